"""GPT-2's norms go into the next product in half precision under a compiler, and nowhere else."""

import functools

import pytest
import torch
from small_models import build_small_model, gradients_by_name, randomize_weights
from torch._dynamo.backends.debugging import aot_eager
from torch.testing import assert_close
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def with_stock_norms(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm | Conv1D):
            vars(module).pop("forward", None)
    return model


@pytest.mark.slow
def test_folded_norms_round_no_gradient_worse_than_stock_ones():
    precisions = {"exact": None, "stock": torch.bfloat16, "folded": torch.bfloat16}
    found = {}
    for name, dtype in precisions.items():
        model = randomize_weights(build_small_model(n_layer=1))
        graphs = []
        torch._dynamo.reset()
        backend = lambda graph, inputs, graphs=graphs: (
            graphs.append(graph) or aot_eager(graph, inputs)
        )
        compiler = functools.partial(torch.compile, backend=backend, fullgraph=True)
        found[name] = gradients_by_name(
            model if name == "folded" else with_stock_norms(model), dtype, compiler
        )
        folded = any(
            "_Normalized" in str(one.target) or "autograd_function" in str(one)
            for one in graphs[0].graph.nodes
        )
        assert folded == (name == "folded")
    for name, exact in found["exact"].items():
        stock, other = (
            (found[way][name] - exact).norm() / exact.norm() for way in ("stock", "folded")
        )
        assert other < 1.3 * stock + 1e-3, name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_norms_are_the_stock_ones_outside_a_compiler(dtype):
    """Compiled, but outside autocast: test_attention.py."""
    expected = gradients_by_name(
        with_stock_norms(randomize_weights(build_small_model(n_layer=1))), dtype
    )
    assert_close(
        gradients_by_name(randomize_weights(build_small_model(n_layer=1)), dtype),
        expected,
        rtol=0,
        atol=0,
    )
