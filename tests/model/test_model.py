"""The model is stock GPT-2 or Llama that trains without a mask, goes on from others' weights, and recomputes exactly."""

import functools
import json
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch._dynamo.backends.debugging import aot_eager
from transformers import (
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from pretrain.base.errors import BadInput
from pretrain.data import tokenization
from pretrain.model import export
from pretrain.model import model as models
from pretrain.model.loss import NextTokenLoss

SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 64, "sequence_length": 16, "eos_token_id": 0}
SHAPE |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "seed": 1}
LLAMA = {"architecture": "llama", "num_key_value_heads": 2, "intermediate_size": 48, "rope_theta": 500.0}
KINDS = {"gpt2": {}, "llama": LLAMA, "untied": LLAMA | {"tie_word_embeddings": False}}


@pytest.fixture(params=KINDS)
def kind(request) -> dict:
    return SHAPE | KINDS[request.param]


@pytest.fixture
def model(kind) -> PreTrainedModel:
    return models.build(**kind)


@pytest.fixture
def stock(kind, model) -> PreTrainedModel:
    """Transformers' own, with its own attention and activation, and the same weights."""
    if kind.get("architecture") == "llama":
        shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
        shape |= {"intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 16, "rms_norm_eps": 1e-5}
        shape |= {"tie_word_embeddings": kind.get("tie_word_embeddings", True), "attn_implementation": "sdpa"}
        rope = {"rope_type": "default", "rope_theta": 500.0}
        other = LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=rope))
    else:
        shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 64, "n_positions": 16}
        other = GPT2LMHeadModel(GPT2Config(**shape, attn_implementation="sdpa"))
    other.load_state_dict(model.state_dict())
    return other.eval()


def ids(*shape: int, below: int = 64) -> torch.Tensor:
    return torch.randint(1, below, shape, generator=torch.Generator().manual_seed(0))


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """As after some training: nothing at its initial zero or one."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


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
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    calls = [n for part in parts for n in part.graph.nodes if n.target is F.scaled_dot_product_attention]
    assert len(calls) == 2, "one attention call a layer"
    return [n.kwargs.get("attn_mask", n.args[3] if len(n.args) > 3 else None) for n in calls]


@pytest.mark.parametrize("kind", ["gpt2", "llama"], indirect=True)
@pytest.mark.parametrize("gradient_checkpointing", ["none", "mlp"])
def test_compiled_model_is_one_graph_and_hands_attention_no_mask(kind, gradient_checkpointing):
    model = models.build(**kind, gradient_checkpointing=gradient_checkpointing)
    graph = compiled_graph(NextTokenLoss(model).train(), ids(2, 16), ids(2, 16))
    assert attention_masks(graph) == [None, None]
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        assert not (isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() == 4), node


@pytest.mark.parametrize("kind", ["gpt2", "llama"], indirect=True)
def test_the_graph_test_would_see_a_mask(model):
    """Transformers' own path does build one (torch before 2.14), so the test above can fail."""
    model.set_attn_implementation("sdpa")
    masks = attention_masks(compiled_graph(NextTokenLoss(model).train(), ids(2, 16), ids(2, 16)))
    if masks == [None, None]:
        pytest.skip("this Transformers and torch build no mask any more")
    assert all(mask is not None for mask in masks)


def test_logits_equal_the_stock_models(model, stock):
    tokens = ids(2, 16)
    assert torch.allclose(model.eval()(tokens).logits, stock(tokens).logits, atol=1e-5)


def test_left_padding_equals_the_stock_model(model, stock):
    tokens, mask = ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    a, b = model.eval()(tokens, attention_mask=mask).logits, stock(tokens, attention_mask=mask).logits
    assert torch.allclose(a[0, 3:], b[0, 3:], atol=1e-5)
    assert torch.allclose(a[1], b[1], atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_generate_equals_the_stock_model(model, stock, padded):
    stock.load_state_dict(randomize(model).state_dict())
    tokens, mask = ids(2, 5), torch.ones(2, 5, dtype=torch.long)
    if padded:
        mask[0, :2] = 0
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}
    ours = model.generate(tokens, attention_mask=mask, **settings)
    assert torch.equal(ours, stock.generate(tokens, attention_mask=mask, **settings))


def test_same_seed_same_weights_and_another_seed_others(kind):
    a, b, c = (models.build(**kind | {"seed": seed}) for seed in (1, 1, 2))
    weights = [next(p for name, p in m.named_parameters() if "attn" in name) for m in (a, b, c)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_gpt2_124m_has_its_published_size():
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=50257))
    assert models.count_parameters(model) == 124_439_808


def test_llama_is_as_the_recipe_says_and_without_biases():
    model = models.build(**SHAPE | KINDS["untied"] | {"attn_pdrop": 0.25, "eos_token_id": 7})
    config = model.config
    assert (config.num_key_value_heads, config.intermediate_size, config.max_position_embeddings) == (2, 48, 16)
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps, config.attention_dropout) == (500.0, 1e-5, 0.25)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id, config.use_cache) == (7, 7, None, False)
    assert not [name for name, _ in model.named_parameters() if "bias" in name]
    assert models.build(**SHAPE | LLAMA).lm_head.weight.shape == (64, 32)
    assert models.count_parameters(model) - models.count_parameters(models.build(**SHAPE | LLAMA)) == 64 * 32


def test_gpt2_takes_another_width_within_its_mlp():
    assert models.build(**SHAPE, intermediate_size=48).transformer.h[0].mlp.c_fc.weight.shape == (32, 48)
    assert models.build(**SHAPE).transformer.h[0].mlp.c_fc.weight.shape == (32, 128)


# Recomputing in the backward pass.


def gradients(model: PreTrainedModel, dtype: torch.dtype | None = None, wrap=lambda module: module) -> dict:
    model.zero_grad()
    torch.manual_seed(5)  # dropout's
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = wrap(NextTokenLoss(model).train())(ids(2, 16), ids(2, 16).flip(1))
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("gradient_checkpointing", ["mlp", "full"])
def test_recomputing_changes_no_gradient_and_no_name(kind, gradient_checkpointing, dtype, dropout):
    kind = kind | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    plain, other = models.build(**kind), models.build(**kind, gradient_checkpointing=gradient_checkpointing)
    assert list(plain.state_dict()) == list(other.state_dict())
    expected, got = gradients(plain, dtype), gradients(other, dtype)
    for name, gradient in expected.items():
        assert torch.equal(gradient, got[name]), name


@pytest.mark.parametrize("kind", ["gpt2", "llama"], indirect=True)
def test_recomputing_an_mlp_changes_no_gradient_under_a_compiler(kind):
    torch._dynamo.reset()
    kind = kind | {"n_layer": 1}
    wrap = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    expected, got = (
        gradients(models.build(**kind)),
        gradients(models.build(**kind, gradient_checkpointing="mlp"), wrap=wrap),
    )
    for name, gradient in expected.items():
        assert torch.allclose(gradient, got[name], atol=1e-6), name


# Norms whose scale and shift go into the next product.


def with_stock_norms(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm | Conv1D):
            vars(module).pop("forward", None)
    return model


def compiler(graphs: list) -> Callable:
    """A compiler that notes its graphs; it goes through what Inductor gets, and computes it op by op."""
    torch._dynamo.reset()

    def backend(graph, example_inputs):
        graphs.append(graph)
        return aot_eager(graph, example_inputs)

    return functools.partial(torch.compile, backend=backend, fullgraph=True)


def folded(graphs: list) -> bool:
    return any("_Normalized" in str(node.target) or "autograd_function" in str(node) for node in graphs[0].graph.nodes)


def test_folded_norms_round_no_gradient_worse_than_stock_ones():
    models_of = {"exact": None, "stock": torch.bfloat16, "folded": torch.bfloat16}
    found = {}
    for name, dtype in models_of.items():
        model = randomize(models.build(**SHAPE | {"n_layer": 1}))
        graphs = []
        found[name] = gradients(model if name == "folded" else with_stock_norms(model), dtype, compiler(graphs))
        assert folded(graphs) == (name == "folded")
    for name, exact in found["exact"].items():
        stock, other = ((found[way][name] - exact).norm() / exact.norm() for way in ("stock", "folded"))
        assert other < 1.3 * stock + 1e-3, name


def test_folded_norms_train_to_the_losses_of_stock_ones():
    losses = {}
    for name, prepare in {"stock": with_stock_norms, "folded": lambda model: model}.items():
        model = prepare(models.build(**SHAPE)).train()
        module = compiler([])(NextTokenLoss(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses[name] = []
        for _ in range(20):
            with torch.autocast("cpu", torch.bfloat16):
                loss = module(ids(4, 16), ids(4, 16).roll(-1, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses["stock"][-1] < losses["stock"][0] / 2
    assert losses["folded"] == pytest.approx(losses["stock"], abs=0.02) and losses["folded"] != losses["stock"]


@pytest.mark.parametrize("dtype, compiled", [(None, True), (None, False), (torch.bfloat16, False)])
def test_norms_are_the_stock_ones_outside_autocast_and_outside_a_compiler(dtype, compiled):
    expected, got = (
        gradients(prepare(randomize(models.build(**SHAPE))), dtype, compiler([]) if compiled else lambda module: module)
        for prepare in (with_stock_norms, lambda model: model)
    )
    for name, gradient in expected.items():
        assert torch.equal(gradient, got[name]), name


def kept_bytes(model: PreTrainedModel) -> int:
    """Bytes of what the backward pass is handed, weights aside."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = NextTokenLoss(model).train()(ids(2, 16), ids(2, 16))
    assert loss.requires_grad
    return sum(size for start, size in kept.items() if start not in weights)


def test_recomputing_an_mlp_keeps_its_products_results_only_and_recomputing_blocks_keeps_least(kind):
    none, mlp, full = (kept_bytes(models.build(**kind, gradient_checkpointing=g)) for g in ("none", "mlp", "full"))
    # The activation's result, or gate's activation and its product with the other; fp32 of 2 layers of 2 x 16 tokens.
    fewer = 2 * 48 if kind.get("architecture") == "llama" else 128
    assert none - mlp == 4 * 2 * 2 * 16 * fewer
    assert full < mlp / 2


# Going on from another model.


def gpt2_source(**other) -> GPT2LMHeadModel:
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 61, "n_positions": 16, "n_inner": 48}
    return randomize(GPT2LMHeadModel(GPT2Config(**shape | {"bos_token_id": 1, "eos_token_id": 2} | other)))


def llama_source(**other) -> LlamaForCausalLM:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    shape |= {"intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 16, "head_dim": 12}
    shape |= {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2, "bos_token_id": 1, "eos_token_id": [2, 3]}
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return randomize(LlamaForCausalLM(LlamaConfig(**shape | {"rope_parameters": rope} | other)))


SOURCES = {"gpt2": gpt2_source, "llama": llama_source}
SOURCES["tied"] = functools.partial(llama_source, tie_word_embeddings=True)


@pytest.fixture(params=SOURCES)
def other(request) -> PreTrainedModel:
    return SOURCES[request.param]()


def go_on(folder, **changes) -> PreTrainedModel:
    """Build from a folder, as train.py does with a recipe that states no shape."""
    return models.build(**SHAPE | models.source(str(folder)) | changes, init_from=str(folder))


def loss(model: PreTrainedModel, inputs: torch.Tensor) -> float:
    return F.cross_entropy(model(inputs).logits.flatten(0, 1), inputs.flip(1).flatten()).item()


def in_shards(model, folder):
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1


def as_bin(model, folder):
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def as_hub_keeps_gpt2(model, folder):
    """OpenAI's own has no prefix and its causal masks beside the weights, older fine-tunes have another buffer too."""
    model.save_pretrained(folder)
    weights = {name.removeprefix("transformer."): w for name, w in load_file(folder / "model.safetensors").items()}
    weights |= {"h.0.attn.bias": torch.ones(1, 1, 16, 16).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def as_old_llama(model, folder):
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors") | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def as_export(model, folder):
    export.write(model, folder / "model", tokenization.make_characters(["abcdefghij klmnop"]))


WAYS = [("gpt2", as_hub_keeps_gpt2), ("llama", as_old_llama)]
WAYS += [(kind, way) for kind in SOURCES for way in (PreTrainedModel.save_pretrained, in_shards, as_bin, as_export)]


@pytest.mark.parametrize(("kind", "way"), WAYS)
@pytest.mark.parametrize("vocab_size", [61, 64])
def test_going_on_from_a_model_begins_at_its_loss(tmp_path, kind, way, vocab_size):
    """``as_export`` makes a run's folder: it stands for the model in it."""
    source = SOURCES[kind]()
    expected, tokens = loss(source, ids(2, 16, below=61)), ids(2, 16, below=61)
    logits = source(tokens).logits
    way(source, tmp_path)
    assert models.source(str(tmp_path))["vocab_size"] == 64
    model = go_on(tmp_path, vocab_size=vocab_size).eval()
    assert torch.allclose(model(tokens).logits[..., :61], logits, atol=1e-5)
    assert model.dtype == torch.float32
    if vocab_size == 61:
        assert loss(model, tokens) == pytest.approx(expected, abs=1e-5)
        with torch.no_grad():
            assert NextTokenLoss(model)(tokens, tokens.flip(1)).item() == pytest.approx(expected, abs=1e-5)


def test_new_rows_of_the_vocabulary_begin_at_the_mean_of_the_old_and_a_tied_head_stays_tied(other, tmp_path):
    other.save_pretrained(tmp_path)
    model = go_on(tmp_path)
    for ours, theirs in (
        (model.get_input_embeddings(), other.get_input_embeddings()),
        (model.lm_head, other.lm_head),
    ):
        assert torch.equal(ours.weight[:61], theirs.weight)
        assert torch.allclose(ours.weight[61:], theirs.weight.mean(0).expand(3, -1))
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == other.config.tie_word_embeddings
    assert model.config.vocab_size == 64
    assert all(parameter.requires_grad for parameter in model.parameters()) and model.training


def test_the_models_own_config_is_kept_but_for_what_the_recipe_says(other, tmp_path):
    other.generation_config.temperature, other.generation_config.do_sample = 0.6, True
    other.save_pretrained(tmp_path)
    model = go_on(tmp_path, attn_pdrop=0.25, vocab_size=61)
    before, after = other.config.to_dict(), model.config.to_dict()
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    dropout = "attn_pdrop" if other.config.model_type == "gpt2" else "attention_dropout"
    changed -= {"resid_pdrop", "embd_pdrop", "architectures", "dtype", "activation_function", "_name_or_path"}
    assert changed == {"use_cache", dropout} and after[dropout] == 0.25 and after["use_cache"] is False
    assert after.get("activation_function") in (None, models.TRAINING_ACTIVATION)
    assert model.generation_config.temperature == 0.6
    assert model.generation_config.eos_token_id == other.config.eos_token_id
    assert model.config._attn_implementation == models.CAUSAL


def test_a_shorter_context_cuts_gpt2s_positions_and_leaves_llamas(other, tmp_path):
    other.save_pretrained(tmp_path)
    model, tokens = go_on(tmp_path, sequence_length=8).eval(), ids(2, 8, below=61)
    assert torch.allclose(model(tokens).logits[..., :61], other(tokens).logits, atol=1e-5)
    if other.config.model_type == "gpt2":
        assert model.config.n_positions == len(model.transformer.wpe.weight) == 8
        assert model.transformer.wpe.weight.untyped_storage().nbytes() == 8 * 32 * 4
        assert model.transformer.wpe.weight.requires_grad
    else:
        assert model.config.max_position_embeddings == 16


def test_a_checkpoint_tells_the_recipes_model_keys(tmp_path):
    gpt2_source().save_pretrained(tmp_path / "a")
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 64}
    keys = {"architecture": "gpt2", "num_key_value_heads": None, "tie_word_embeddings": None, "rope_theta": None}
    assert models.source(str(tmp_path / "a")) == shape | keys | {"intermediate_size": 48}
    for inner in (None, 128):
        gpt2_source(n_inner=inner).save_pretrained(tmp_path / "b")
        assert models.source(str(tmp_path / "b")) == shape | keys | {"intermediate_size": None}
    assert go_on(tmp_path / "b", intermediate_size=128)
    llama_source().save_pretrained(tmp_path / "c")
    keys = {"architecture": "llama", "num_key_value_heads": 2, "tie_word_embeddings": False, "rope_theta": 500.0}
    assert models.source(str(tmp_path / "c")) == shape | keys | {"intermediate_size": 48}


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("gpt2", {"n_layer": 3}, "n_layer = 3, the model's is 2; leave n_layer out"),
        ("gpt2", {"intermediate_size": 128}, "intermediate_size = 128, the model's is 48"),
        ("gpt2", {"architecture": "llama"}, "architecture = llama, the model's is gpt2"),
        ("gpt2", {"num_key_value_heads": 2}, "num_key_value_heads = 2, the model's is None"),
        ("gpt2", {"vocab_size": 32}, "vocab_size = 32: its vocabulary has 61 rows; use --vocab_size 64"),
        ("gpt2", {"sequence_length": 32}, "sequence_length = 32: its context is 16 tokens; use --sequence_length 16"),
        ("llama", {"sequence_length": 32}, "sequence_length = 32: its context is 16 tokens; use --sequence_length 16"),
        ("llama", {"rope_theta": 10000.0}, "rope_theta = 10000.0, the model's is 500.0; leave rope_theta out"),
        ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings = True, the model's is False"),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads = 4, the model's is 2"),
    ],
)
def test_a_recipe_of_another_shape_than_its_models_is_refused_with_a_remedy(tmp_path, kind, change, words):
    SOURCES[kind]().save_pretrained(tmp_path)
    with pytest.raises(BadInput) as error:
        go_on(tmp_path, **change)
    assert error.value.lines == [line for line in error.value.lines if line.startswith(f"init_from = {tmp_path}: ")]
    assert len(error.value.lines) == 1 and words in str(error.value)


def test_every_key_of_another_shape_is_named_at_once(tmp_path):
    gpt2_source().save_pretrained(tmp_path)
    with pytest.raises(BadInput) as error:
        go_on(tmp_path, n_layer=3, n_embd=64, sequence_length=32)
    assert [line.split(": ")[1].split(" ")[0] for line in error.value.lines] == ["n_layer", "n_embd", "sequence_length"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation_function": "relu"}, "activation_function = relu: GPT-2's is gelu_new"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True: GPT-2's is False"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn = True: GPT-2's is False"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False: GPT-2's is True"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantized; give the model that it was made from",
        ),
        ({"model_type": "mistral"}, "is a mistral; give a model of type gpt2 or llama"),
    ],
)
def test_a_model_that_training_would_silently_change_is_refused(tmp_path, change, words):
    config = gpt2_source().config.to_dict() | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="init_from") as error:
        models.source(str(tmp_path))
    assert words in str(error.value)


def test_what_is_no_causal_model_or_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(BadInput, match=f"init_from = {tmp_path}: holds no model"):
        models.source(str(tmp_path))
    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=f"init_from = {tmp_path}: is a bert"):
        models.source(str(tmp_path))
    gpt2_source().config.save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=f"init_from = {tmp_path}: cannot be loaded"):
        go_on(tmp_path)
    with pytest.raises(BadInput, match="init_from = runs/none: no such folder"):
        models.source("runs/none")


def test_weights_that_are_not_the_configs_are_refused_and_never_filled_with_noise(tmp_path):
    GPT2Model(gpt2_source().config).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    with pytest.raises(BadInput, match=r"not those of its config.json: it lacks transformer.h.2.* and 9 more"):
        go_on(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": 1}))
    with pytest.raises(BadInput, match=r"not those of its config.json: it has besides h.1."):
        go_on(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_inner": 64}))
    with pytest.raises(BadInput, match="cannot be loaded"):
        go_on(tmp_path)


def test_a_config_that_ties_two_different_matrices_is_refused(tmp_path):
    llama_source().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(BadInput, match="ties the head to the embedding"):
        go_on(tmp_path)
