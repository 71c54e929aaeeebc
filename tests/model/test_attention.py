"""Attention is causal without a mask, and within documents as if each stood alone, by whichever kernel there is."""

import functools

import pytest
import torch
import torch.nn.functional as F
from small_models import KINDS, backward, gradients_by_name, randomize_weights, stock_copy
from small_models import build_small_model as built_small
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.attention.flex_attention import BlockMask
from torch.testing import assert_close
from transformers import PreTrainedModel

from ursa_minor.model import attention
from ursa_minor.model.loss import NextTokenLoss

SEPARATOR, LENGTH = 0, 24
# Inside, at the start, none, of one token each (also the last), all of one token.
BEGINS = [[7, 15], [0, 10], [], [3, 4, 5, 6, 23], range(LENGTH)]


def built(**changes) -> PreTrainedModel:
    """One whose heads are wide enough for FlexAttention."""
    return built_small(**{"n_head": 4, "n_embd": 64, "sequence_length": LENGTH} | changes)


@pytest.fixture(params=["gpt2", "llama"])
def model(request) -> PreTrainedModel:
    """With weights with which a token's context matters much to the loss."""
    return randomize_weights(built(**KINDS[request.param])).train()


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randint(
        1, 64, (2, len(BEGINS), LENGTH), generator=torch.Generator().manual_seed(0)
    )
    for row, begins in zip(inputs, BEGINS, strict=True):
        row[list(begins)] = SEPARATOR
    return inputs, targets


def masked(model: PreTrainedModel, flex: bool | None = None) -> NextTokenLoss:
    return NextTokenLoss(
        model, context=functools.partial(attention.within_documents, separator=SEPARATOR, flex=flex)
    )


def test_the_loss_and_its_gradients_are_those_of_every_document_alone(model, batch):
    stock, losses = stock_copy(model), []
    for row, targets, begins in zip(*batch, BEGINS, strict=True):
        for first, end in zip([0, *begins], [*begins, LENGTH], strict=True):
            if first < end:
                logits = stock(row[None, first:end]).logits[0]
                losses.append(F.cross_entropy(logits, targets[first:end], reduction="sum"))
    expected = torch.stack(losses).sum() / batch[0].numel()
    loss = masked(model)(*batch)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert_close(backward(loss, model), backward(expected, stock), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert masked(model)(*batch).item() == pytest.approx(expected.item(), abs=1e-5)
        assert NextTokenLoss(model)(*batch).item() != pytest.approx(expected.item(), abs=1e-3)


@pytest.fixture
def on_a_card(monkeypatch):
    """FlexAttention as far as a CPU can go: torch refuses its gradients there, though it knows their formula."""
    monkeypatch.setattr(
        "torch.nn.attention.flex_attention._validate_device", lambda *tensors: None, raising=False
    )


def compiled(
    module: torch.nn.Module, compute=lambda graph, _: graph.forward
) -> tuple[torch.nn.Module, list]:
    """The module as one graph, run as torch runs its operations, and the list that the graph will be in."""
    graphs = []
    torch._dynamo.reset()
    backend = lambda graph, inputs: graphs.append(graph) or compute(graph, inputs)  # noqa: E731
    return torch.compile(module, backend=backend, fullgraph=True), graphs


def test_the_cards_kernel_equals_the_mask(model, batch, on_a_card):
    expected, loss = masked(model)(*batch), masked(model, flex=True)(*batch)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert_close(backward(loss, model), backward(expected, model), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_cards_kernel_equals_the_mask_in_one_graph_without_it(model, batch, on_a_card):
    expected = masked(model)(*batch)
    module, graphs = compiled(masked(model, flex=True))
    loss = module(*batch)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert_close(backward(loss, model), backward(expected, model), rtol=1e-4, atol=1e-5)
    other = [part.flip(0, 1) for part in batch]  # documents elsewhere: the same graph
    assert module(*other).item() == pytest.approx(masked(model)(*other).item(), abs=1e-5)
    (graph,) = graphs
    names = [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]
    assert (
        names.count("flex_attention") == 2 and "scaled_dot_product_attention" not in names
    )  # one a layer


@pytest.mark.parametrize("takes_no_flex", [{"attn_pdrop": 0.2}, {"n_head": 8}])
def test_dropout_and_narrow_heads_get_a_mask_that_every_kernel_takes(
    takes_no_flex, batch, monkeypatch
):
    model = randomize_weights(built(**takes_no_flex)).train()
    monkeypatch.delattr(attention, "flex_attention")
    torch.manual_seed(2)
    expected = masked(model)(*batch)
    torch.manual_seed(2)
    assert masked(model, flex=True)(*batch).item() == pytest.approx(expected.item(), abs=1e-5)


def test_only_a_compiler_on_a_card_gets_the_kernel_that_needs_both(monkeypatch, batch):
    for card, compiling in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(torch.Tensor, "is_cuda", card)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        mask = attention.within_documents(batch[0], separator=SEPARATOR)["attention_mask"]
        assert isinstance(mask, BlockMask) == (card and compiling)
        assert mask.shape == (len(BEGINS), 1, LENGTH, LENGTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_key_heads_in_groups_reach_a_fast_kernel(dtype, monkeypatch):
    """Meta stands for a card, of whose kernels only flash, in bf16, takes groups."""
    query, key, value = (torch.randn(2, heads, 8, 16, dtype=dtype) for heads in (6, 2, 2))
    whole = [part.repeat_interleave(3, 1) for part in (key, value)]
    expected = F.scaled_dot_product_attention(query, *whole, is_causal=True).transpose(1, 2)
    assert torch.allclose(
        attention._causal_attention(None, query, key, value, None)[0], expected, atol=1e-2
    )
    seen = []
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *qkv, **how: seen.append((qkv, how)) or qkv[0]
    )
    attention._causal_attention(None, *(part.to("meta") for part in (query, key, value)), None)
    ((_, *pair), how) = seen[0]
    groups = dtype == torch.bfloat16
    assert [part.shape[1] for part in pair] == ([2, 2] if groups else [6, 6])
    assert how["enable_gqa"] == groups and how["is_causal"]


@pytest.mark.parametrize(("kind", "how"), [("gpt2", {"compute": aot_eager}), ("llama", {})])
def test_compiled_model_is_one_graph_without_a_mask_and_has_the_gradients_of_one_that_recomputes_nothing(
    kind, how
):
    model = built(**KINDS[kind], n_layer=1, gradient_checkpointing="mlp")
    made = []
    found = gradients_by_name(
        model, wrap=lambda module: made.extend(compiled(module, **how)) or made[0]
    )
    (graph,) = made[1]
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes]
    (layer,) = [node for node in nodes if node.target is F.scaled_dot_product_attention]
    assert layer.kwargs.get("attn_mask", layer.args[3] if len(layer.args) > 3 else None) is None
    for node in nodes:
        assert "_Normalized" not in str(node.target) and "autograd_function" not in str(node), (
            "norms outside autocast"
        )
        value = node.meta.get("example_value")
        assert not (
            isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() == 4
        ), node
    assert_close(found, gradients_by_name(built(**KINDS[kind], n_layer=1)), rtol=1e-5, atol=1e-6)
