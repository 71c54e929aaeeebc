"""A good update changes the weights, a bad gradient changes nothing."""

import math

import pytest
import torch
from torch import nn

from ursa_minor.optim import update

INF, NAN = math.inf, math.nan


class Case:
    """A model after one good update, and its next gradients."""

    def __init__(self, scaler=None):
        torch.manual_seed(0)
        self.module, self.scaler = (
            nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
            scaler,
        )
        self.parameters = list(self.module.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1, fused=True)
        self.gradients()
        self.first = self.update()

    def gradients(self, factor=1.0):
        loss = self.module(torch.arange(5)).square().mean() * factor
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def update(self, loss=1.0, max_grad_norm=1.0, reduce_mean=lambda tensor: tensor, **how):
        how |= {"max_grad_norm": max_grad_norm, "scaler": self.scaler, "reduce_mean": reduce_mean}
        return update.update(self.optimizer, self.parameters, torch.tensor(loss), **how)

    def bits(self):
        moments = [torch.as_tensor(v) for s in self.optimizer.state.values() for v in s.values()]
        return [tensor.detach().clone() for tensor in (*self.parameters, *moments)]

    def unchanged(self, before):
        return all(torch.equal(a, b) for a, b in zip(before, self.bits(), strict=True))


def scaler(scale=2.0**16):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)


@pytest.mark.parametrize("fp16", [False, True])
def test_a_good_update_changes_the_weights_and_clears_the_gradients(fp16):
    case = Case(scaler() if fp16 else None)
    before = case.bits()
    case.gradients()
    got = case.update(loss=1.5, reduce_mean=lambda tensor: tensor + torch.tensor([2.0, 0.0]))
    assert got.applied and not got.overflow and got.loss == 3.5 and math.isfinite(got.grad_norm)
    assert not any(
        torch.equal(a, b)
        for a, b in zip(before[: len(case.parameters)], case.parameters, strict=True)
    )
    assert all(p.grad is None for p in case.parameters)


@pytest.mark.parametrize("problem", ["loss", "gradient", "another process"])
@pytest.mark.parametrize("fp16", [False, True])
def test_a_bad_loss_or_gradient_changes_neither_weights_nor_moments(problem, fp16):
    case = Case(scaler() if fp16 else None)
    before = case.bits()
    case.gradients()
    if problem == "gradient":
        case.parameters[0].grad[1, 2] = -INF
    elsewhere = torch.tensor([NAN if problem == "another process" else 0.0, 0.0])
    got = case.update(
        loss=NAN if problem == "loss" else 1.0, reduce_mean=lambda tensor: tensor + elsewhere
    )
    assert not got.applied and case.unchanged(before)
    assert all(p.grad is None for p in case.parameters)
    assert got.overflow is (fp16 and problem == "gradient") and got.overflow != (
        "not finite" in got.reason
    )
    case.gradients()
    assert case.update().applied


@pytest.mark.parametrize("objective, applied", [(2.5, True), (NAN, False), (INF, False)])
def test_the_objective_decides_whether_an_update_is_applied(objective, applied):
    case = Case()
    before = case.bits()
    case.gradients()
    got = case.update(loss=1.5, objective=torch.tensor(objective))
    assert (got.loss, got.objective, got.applied) == (
        1.5,
        pytest.approx(objective, nan_ok=True),
        applied,
    )
    assert case.unchanged(before) != applied
    assert applied or got.reason.startswith(f"objective {objective}, gradient norm ")
    assert case.first.objective is None


@pytest.mark.parametrize("scale", [2.0**16, 1.0])
def test_fp16_overflow_skips_the_update_and_halves_the_scale_and_is_the_models_fault_at_the_smallest(
    scale,
):
    case = Case(scaler(scale))
    before = case.bits()
    case.gradients(factor=1e38 if scale > 1 else INF)  # finite as fp32, infinite once scaled
    got = case.update()
    assert not got.applied and got.overflow is (scale > 1) and case.unchanged(before)
    assert (
        case.scaler.get_scale() == scale / 2
        and ("scale" if scale > 1 else "not finite") in got.reason
    )
    case.gradients()
    assert case.update().applied and case.scaler.get_scale() == scale / 2
    assert case.first.grad_norm == pytest.approx(
        Case().first.grad_norm, rel=1e-5
    )  # measured unscaled


def test_gradients_are_clipped_to_the_norm_and_the_norm_is_that_before():
    weight = nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for limit, norm in [(1.0, 1.0), (0, 5.0), (100.0, 5.0)]:
        weight.data.zero_()
        weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        how = {"max_grad_norm": limit, "scaler": None, "reduce_mean": lambda tensor: tensor}
        got = update.update(optimizer, [weight], torch.tensor(1.0), **how)
        assert got.grad_norm == 5.0 and weight.detach().norm().item() == pytest.approx(
            norm, rel=1e-4
        )
