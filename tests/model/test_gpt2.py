"""GPT-2's norms go into the next product in half precision under a compiler, and nowhere else."""

import functools
from collections.abc import Callable

import pytest
import torch
from small_models import built, gradients, randomize
from torch._dynamo.backends.debugging import aot_eager
from torch.testing import assert_close
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def with_stock_norms(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm | Conv1D):
            vars(module).pop("forward", None)
    return model


def compiler(graphs: list, compute=aot_eager) -> Callable:
    """A compiler that notes its graphs; it goes through what Inductor gets, and computes it op by op."""
    torch._dynamo.reset()

    def backend(graph, example_inputs):
        graphs.append(graph)
        return compute(graph, example_inputs)

    return functools.partial(torch.compile, backend=backend, fullgraph=True)


def folded(graphs: list) -> bool:
    return any("_Normalized" in str(node.target) or "autograd_function" in str(node) for node in graphs[0].graph.nodes)


@pytest.mark.slow
def test_folded_norms_round_no_gradient_worse_than_stock_ones():
    precisions = {"exact": None, "stock": torch.bfloat16, "folded": torch.bfloat16}
    found = {}
    for name, dtype in precisions.items():
        model = randomize(built(n_layer=1))
        graphs = []
        found[name] = gradients(model if name == "folded" else with_stock_norms(model), dtype, compiler(graphs))
        assert folded(graphs) == (name == "folded")
    for name, exact in found["exact"].items():
        stock, other = ((found[way][name] - exact).norm() / exact.norm() for way in ("stock", "folded"))
        assert other < 1.3 * stock + 1e-3, name


@pytest.mark.parametrize("dtype, compiled", [(None, True), (None, False), (torch.bfloat16, False)])
def test_norms_are_the_stock_ones_outside_autocast_and_outside_a_compiler(dtype, compiled):
    wrap = compiler([], lambda graph, _: graph.forward) if compiled else lambda module: module
    expected = gradients(with_stock_norms(randomize(built(n_layer=1))), dtype)
    assert_close(gradients(randomize(built(n_layer=1)), dtype, wrap), expected, rtol=0, atol=0)
