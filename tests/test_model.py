"""The model is stock GPT-2 that trains without a mask, and has the size that it says."""

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
)

from pretrain import export, tokenization
from pretrain import model as models
from pretrain.errors import BadInput
from pretrain.loss import NextTokenLoss

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "sequence_length": 16, "eos_token_id": 0}
SHAPE |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "seed": 1}


@pytest.fixture
def model() -> GPT2LMHeadModel:
    return models.build(**SHAPE)


@pytest.fixture
def stock(model) -> GPT2LMHeadModel:
    """Transformers' own, with its own attention and activation, and the same weights."""
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, attn_implementation="sdpa")
    other = GPT2LMHeadModel(config).eval()
    other.load_state_dict(model.state_dict())
    return other


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(0))


def compiled_graph(module: torch.nn.Module, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(module, backend=backend)(*inputs)
    assert len(graphs) == 1, "the model broke into several graphs"
    return graphs[0]


def attention_masks(graph: torch.fx.GraphModule) -> list:
    calls = [n for n in graph.graph.nodes if n.target is F.scaled_dot_product_attention]
    assert len(calls) == 2, "one attention call a layer"
    return [n.kwargs.get("attn_mask", n.args[3] if len(n.args) > 3 else None) for n in calls]


def test_compiled_model_hands_attention_no_mask(model):
    graph = compiled_graph(NextTokenLoss(model).train(), ids(2, 16), ids(2, 16))
    assert attention_masks(graph) == [None, None]
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        assert not (isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() == 4), node


def test_the_graph_test_would_see_a_mask(model):
    """Transformers' own path does build one (torch before 2.14), so the test above can fail."""
    model.set_attn_implementation("sdpa")
    masks = attention_masks(compiled_graph(NextTokenLoss(model).train(), ids(2, 16), ids(2, 16)))
    if masks == [None, None]:
        pytest.skip("this Transformers and torch build no mask any more")
    assert all(mask is not None for mask in masks)


def test_logits_equal_stock_gpt2(model, stock):
    tokens = ids(2, 16)
    assert torch.allclose(model.eval()(tokens).logits, stock(tokens).logits, atol=1e-5)


def test_left_padding_equals_stock_gpt2(model, stock):
    tokens, mask = ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    a, b = model.eval()(tokens, attention_mask=mask).logits, stock(tokens, attention_mask=mask).logits
    assert torch.allclose(a[0, 3:], b[0, 3:], atol=1e-5)
    assert torch.allclose(a[1], b[1], atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_generate_equals_stock_gpt2(model, stock, padded):
    tokens, mask = ids(2, 5), torch.ones(2, 5, dtype=torch.long)
    if padded:
        mask[0, :2] = 0
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}
    ours = model.eval().generate(tokens, attention_mask=mask, **settings)
    assert torch.equal(ours, stock.generate(tokens, attention_mask=mask, **settings))


def test_same_seed_same_weights_and_another_seed_others():
    a, b, c = models.build(**SHAPE), models.build(**SHAPE), models.build(**SHAPE | {"seed": 2})
    weights = [m.transformer.h[0].attn.c_attn.weight for m in (a, b, c)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_gpt2_124m_has_its_published_size():
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=50257))
    assert models.count_parameters(model) == 124_439_808


@pytest.fixture
def exported(model, tmp_path):
    tokenizer = tokenization.make_characters(["abcdefghij klmnop"])
    export.write(model, tmp_path / "model", tokenizer)
    return tmp_path / "model", tokenizer


def test_starting_from_a_model_pads_its_vocabulary_at_the_mean_row(model, exported):
    folder, _ = exported
    wider = models.build(**SHAPE | {"vocab_size": 70, "init_from": str(folder)})
    rows = wider.transformer.wte.weight
    assert torch.equal(rows[:64], model.transformer.wte.weight)
    assert torch.allclose(rows[64:], model.transformer.wte.weight.mean(0).expand(6, -1))
    assert wider.lm_head.weight is wider.transformer.wte.weight
    shorter = models.build(**SHAPE | {"sequence_length": 8, "init_from": str(folder)})
    assert torch.equal(shorter.transformer.wpe.weight, model.transformer.wpe.weight[:8])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layer": 3}, "n_layer = 2"),
        ({"vocab_size": 32}, "--vocab_size 64"),
        ({"sequence_length": 32}, "n_positions"),
    ],
)
def test_starting_from_a_model_of_another_shape_is_refused(exported, change, words):
    with pytest.raises(BadInput, match=words):
        models.build(**SHAPE | change | {"init_from": str(exported[0])})


def test_starting_from_nothing_loadable_is_refused(tmp_path):
    with pytest.raises(BadInput, match="init_from"):
        models.build(**SHAPE | {"init_from": str(tmp_path)})
