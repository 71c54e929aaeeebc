"""The loss is the mean over every target, however many logits there are at once."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from pretrain import model as models
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


def test_loss_is_the_mean_over_every_target_and_equal_in_evaluation(model, stock):
    inputs, targets = ids(3, 16), ids(3, 16).flip(1)
    expected = F.cross_entropy(stock(inputs).logits.flatten(0, 1), targets.flatten())
    module = NextTokenLoss(model)
    assert module(inputs, targets).item() == pytest.approx(expected.item(), abs=1e-5)
    module.rows = 7  # parts that do not divide the rows
    assert module(inputs, targets).item() == pytest.approx(expected.item(), abs=1e-5)
    with torch.no_grad():
        assert module(inputs, targets).item() == pytest.approx(expected.item(), abs=1e-5)


def gradients(model, rows: int, scale: float = 1.0, dtype=None, wrap=lambda module: module) -> dict[str, torch.Tensor]:
    """Two micro-batches' gradients, as accumulation adds them up."""
    model.zero_grad()
    module = NextTokenLoss(model)
    module.rows = rows
    compute = wrap(module)
    for seed in (0, 1):
        torch.manual_seed(seed)
        inputs, targets = torch.randint(0, 64, (2, 3, 16))
        with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
            loss = compute(inputs, targets)
        (loss * scale).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_loss_in_parts_has_the_gradients_of_the_whole(model, scale):
    whole, parts = gradients(model, 1000, scale), gradients(model, 7, scale)
    for name, gradient in whole.items():
        assert torch.allclose(gradient, parts[name], rtol=1e-4, atol=1e-6 * scale), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_in_parts_is_no_less_exact_in_half_precision(model, dtype):
    """Both differ from fp32 by rounding; the parts' sums are in fp32, the whole's in half precision."""
    exact, whole, parts = (
        gradients(model, rows, 2.0**10, half) for rows, half in ((1000, None), (1000, dtype), (7, dtype))
    )
    for name in ("transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"):
        error = {kind: (g[name] - exact[name]).norm() / exact[name].norm() for kind, g in (("w", whole), ("p", parts))}
        assert error["p"] < 1.2 * error["w"] + 1e-4 and error["w"] < 0.05, name


def test_loss_in_parts_stays_in_one_compiled_graph_and_equals_it(model):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = gradients(model, 7, wrap=lambda module: torch.compile(module, backend=backend, fullgraph=True))
    assert graphs
    for name, gradient in gradients(model, 1000).items():
        assert torch.allclose(gradient, compiled[name], rtol=1e-4, atol=1e-6), name
