"""Attention is causal without a mask tensor, stays within documents, and selects a fast kernel."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from small_models import KINDS, backward, gradients_by_name, randomize_weights, stock_copy
from small_models import build_small_model as build_narrow_model
from torch._dynamo.backends.debugging import aot_eager
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import BlockMask
from torch.testing import assert_close
from transformers import PreTrainedModel

from ursa_minor.model import attention
from ursa_minor.model.loss import NextTokenLoss

SEPARATOR = 0
LENGTH = 24
# Where documents begin in each row of the batch: inside, also at the start, nowhere, documents of
# one token (also the last), and only documents of one token.
STARTS = [[7, 15], [0, 10], [], [3, 4, 5, 6, 23], list(range(LENGTH))]


def build_model(**changes) -> PreTrainedModel:
    """Build a small model whose heads are wide enough for FlexAttention."""
    shape = {"n_head": 4, "n_embd": 64, "sequence_length": LENGTH}
    return build_narrow_model(**shape | changes)


@pytest.fixture(params=["gpt2", "llama"])
def model(request) -> PreTrainedModel:
    """A model with random weights, whose loss depends much on the context of a token."""
    return randomize_weights(build_model(**KINDS[request.param])).train()


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs that contain several documents per row, and targets."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(1, 64, (2, len(STARTS), LENGTH), generator=generator)
    for row, starts in zip(inputs, STARTS, strict=True):
        row[starts] = SEPARATOR
    return inputs, targets


def masked_loss(model: PreTrainedModel, flex: bool | None = None) -> NextTokenLoss:
    """Return the loss of a model that attends within documents only."""
    context = functools.partial(attention.within_documents, separator=SEPARATOR, flex=flex)
    return NextTokenLoss(model, context=context)


# Documents


def separate_documents_loss(model, inputs, targets) -> torch.Tensor:
    """Compute the mean loss of the batch with a separate forward pass per document."""
    losses = []
    for row, row_targets, starts in zip(inputs, targets, STARTS, strict=True):
        for start, end in zip([0, *starts], [*starts, LENGTH], strict=True):
            if start == end:
                continue
            logits = model(row[None, start:end]).logits[0]
            losses.append(F.cross_entropy(logits, row_targets[start:end], reduction="sum"))
    return torch.stack(losses).sum() / inputs.numel()


def test_masked_loss_equals_loss_of_separate_documents(model, batch):
    stock = stock_copy(model)
    expected = separate_documents_loss(stock, *batch)

    loss = masked_loss(model)(*batch)

    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert_close(backward(loss, model), backward(expected, stock), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_masked_loss_is_equal_without_gradients(model, batch):
    expected = separate_documents_loss(stock_copy(model), *batch)

    loss = masked_loss(model)(*batch)
    loss_without_mask = NextTokenLoss(model)(*batch)

    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert loss_without_mask.item() != pytest.approx(expected.item(), abs=1e-3)


# FlexAttention


@pytest.fixture
def flex_gradients_on_cpu(monkeypatch) -> None:
    """Allow the gradients of FlexAttention on a CPU, which torch computes but refuses."""
    monkeypatch.setattr(
        "torch.nn.attention.flex_attention._validate_device", lambda *tensors: None, raising=False
    )


def run_graph(graph: GraphModule, inputs: list) -> Callable:
    """Compile nothing: run the operations of the graph."""
    return graph.forward


def compile_and_record(
    module: torch.nn.Module, backend: Callable = run_graph
) -> tuple[torch.nn.Module, list[GraphModule]]:
    """Compile a module as one graph. Return it and the list to which its graphs are added."""
    graphs = []

    def recording_backend(graph, inputs):
        graphs.append(graph)
        return backend(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(module, backend=recording_backend, fullgraph=True), graphs


def test_flex_attention_equals_mask(model, batch, flex_gradients_on_cpu):
    expected = masked_loss(model)(*batch)

    loss = masked_loss(model, flex=True)(*batch)

    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert_close(backward(loss, model), backward(expected, model), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_flex_attention_is_one_graph(model, batch, flex_gradients_on_cpu):
    other_batch = [part.flip(0, 1) for part in batch]
    expected = masked_loss(model)(*batch)
    expected_of_other = masked_loss(model)(*other_batch)
    module, graphs = compile_and_record(masked_loss(model, flex=True))

    loss = module(*batch)

    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert_close(backward(loss, model), backward(expected, model), rtol=1e-4, atol=1e-5)
    # Other documents use the same graph.
    assert module(*other_batch).item() == pytest.approx(expected_of_other.item(), abs=1e-5)
    (graph,) = graphs
    names = [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]
    assert names.count("flex_attention") == 2  # one per layer
    assert "scaled_dot_product_attention" not in names


@pytest.mark.parametrize(
    "changes", [{"attn_pdrop": 0.2}, {"n_head": 8}], ids=["dropout", "narrow heads"]
)
def test_model_unsuited_for_flex_attention_uses_mask(changes, batch, monkeypatch):
    model = randomize_weights(build_model(**changes)).train()
    monkeypatch.delattr(attention, "flex_attention")
    torch.manual_seed(2)
    expected = masked_loss(model)(*batch)

    torch.manual_seed(2)
    loss = masked_loss(model, flex=True)(*batch)

    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize(
    ("is_cuda", "is_compiling", "uses_flex"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_flex_attention_needs_gpu_and_compiler(
    monkeypatch, batch, is_cuda, is_compiling, uses_flex
):
    inputs, _ = batch
    monkeypatch.setattr(torch.Tensor, "is_cuda", is_cuda)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)

    mask = attention.within_documents(inputs, separator=SEPARATOR)["attention_mask"]

    assert isinstance(mask, BlockMask) == uses_flex
    assert mask.shape == (len(STARTS), 1, LENGTH, LENGTH)


# Grouped key and value heads


def random_heads(num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Return queries, keys or values of two sequences of 8 tokens."""
    return torch.randn(2, num_heads, 8, 16, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_heads_equal_repeated_heads(dtype):
    query = random_heads(6, dtype)
    key = random_heads(2, dtype)
    value = random_heads(2, dtype)
    repeated_key = key.repeat_interleave(3, 1)
    repeated_value = value.repeat_interleave(3, 1)
    expected = F.scaled_dot_product_attention(query, repeated_key, repeated_value, is_causal=True)

    result, _ = attention._causal_attention(None, query, key, value, None)

    assert torch.allclose(result, expected.transpose(1, 2), atol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "num_heads", "enable_gqa"), [(torch.float32, 6, False), (torch.bfloat16, 2, True)]
)
def test_grouped_heads_reach_fast_kernel_on_gpu(monkeypatch, dtype, num_heads, enable_gqa):
    """On a GPU only the flash kernel supports groups, and it needs bf16.

    The meta device takes the place of a GPU.
    """
    calls = []

    def record_call(query, key, value, **kwargs):
        calls.append((key, value, kwargs))
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", record_call)
    query = random_heads(6, dtype).to("meta")
    key = random_heads(2, dtype).to("meta")

    attention._causal_attention(None, query, key, key.clone(), None)

    ((key_argument, value_argument, kwargs),) = calls
    assert key_argument.shape[1] == num_heads
    assert value_argument.shape[1] == num_heads
    assert kwargs["enable_gqa"] == enable_gqa
    assert kwargs["is_causal"]


# The compiled model


def all_nodes(graph: GraphModule) -> list[torch.fx.Node]:
    """Return the nodes of a graph and of the graphs inside it."""
    nodes = []
    for part in graph.modules():
        if isinstance(part, GraphModule):
            nodes += part.graph.nodes
    return nodes


def attention_mask_of(node: torch.fx.Node) -> object:
    """Return the mask that a call of scaled_dot_product_attention receives."""
    if "attn_mask" in node.kwargs:
        return node.kwargs["attn_mask"]
    return node.args[3] if len(node.args) > 3 else None


def is_mask(node: torch.fx.Node) -> bool:
    """Return whether a node computes an attention mask: booleans with four dimensions."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() == 4


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("gpt2", aot_eager), ("llama", run_graph)],
    ids=["gpt2", "llama"],
)
def test_compiled_model_is_one_graph_without_mask(kind, backend):
    """The model recomputes its MLP, with the gradients of a model that recomputes nothing."""
    model = build_model(**KINDS[kind], n_layer=1, gradient_checkpointing="mlp")
    expected = gradients_by_name(build_model(**KINDS[kind], n_layer=1))
    all_graphs = []

    def compile_module(module):
        compiled, graphs = compile_and_record(module, backend)
        all_graphs.append(graphs)
        return compiled

    gradients = gradients_by_name(model, wrap=compile_module)

    ((graph,),) = all_graphs
    nodes = all_nodes(graph)
    (call,) = [node for node in nodes if node.target is F.scaled_dot_product_attention]
    assert attention_mask_of(call) is None
    custom_functions = [node for node in nodes if "autograd_function" in str(node)]
    assert len(custom_functions) == 1  # the loss; our norms are used under autocast only
    for node in nodes:
        assert "_Normalized" not in str(node.target)
        assert not is_mask(node), node
    assert_close(gradients, expected, rtol=1e-5, atol=1e-6)
