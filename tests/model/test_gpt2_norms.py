"""GPT-2's norms are folded into the next product under a compiler and autocast, and only there."""

import functools

import pytest
import torch
from small_models import build_small_model, gradients_by_name, randomize_weights
from torch._dynamo.backends.debugging import aot_eager
from torch.testing import assert_close
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def build_model() -> PreTrainedModel:
    """Build a GPT-2 of one layer with random weights."""
    return randomize_weights(build_small_model(n_layer=1))


def build_stock_model() -> PreTrainedModel:
    """Build the same model with the norms of PyTorch."""
    model = build_model()
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm | Conv1D):
            vars(module).pop("forward", None)
    return model


def compiled_gradients(
    model: PreTrainedModel, dtype: torch.dtype | None
) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the gradients of the compiled model, and whether its norms are folded."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    compile_module = functools.partial(torch.compile, backend=backend, fullgraph=True)
    gradients = gradients_by_name(model, dtype, compile_module)

    is_folded = False
    for node in graphs[0].graph.nodes:
        is_folded |= "_Normalized" in str(node.target) or "autograd_function" in str(node)
    return gradients, is_folded


@pytest.mark.slow
def test_folded_norms_are_as_precise_as_stock_norms():
    exact, _ = compiled_gradients(build_stock_model(), None)
    stock, stock_is_folded = compiled_gradients(build_stock_model(), torch.bfloat16)

    folded, is_folded = compiled_gradients(build_model(), torch.bfloat16)

    assert is_folded
    assert not stock_is_folded
    for name, reference in exact.items():
        stock_error = (stock[name] - reference).norm() / reference.norm()
        folded_error = (folded[name] - reference).norm() / reference.norm()
        assert folded_error < 1.3 * stock_error + 1e-3, name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_norms_equal_stock_norms_without_compiler(dtype):
    """test_attention.py tests the compiled model without autocast."""
    expected = gradients_by_name(build_stock_model(), dtype)

    gradients = gradients_by_name(build_model(), dtype)

    assert_close(gradients, expected, rtol=0, atol=0)
