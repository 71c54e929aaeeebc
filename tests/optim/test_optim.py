"""The learning rate's shape, what decays, and that a bad gradient changes nothing."""

import importlib.util
import inspect
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pretrain.base.errors import BadInput
from pretrain.optim import muon, optim

needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
INF, NAN = math.inf, math.nan


def lr(step, **changes):
    known = {"peak": 2.0, "warmup_steps": 4, "max_steps": 20, "min_ratio": 0.1}
    return optim.lr_at(step, **(known | changes))


@pytest.mark.parametrize("warmup_steps", [0, 1, 4, 20])
def test_first_update_has_nonzero_learning_rate(warmup_steps):
    assert lr(0, warmup_steps=warmup_steps) == 2.0 / max(1, warmup_steps)


def test_warm_up_is_linear_and_reaches_the_peak():
    assert [lr(step) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize("warmup_steps, max_steps", [(0, 20), (4, 20), (19, 20), (0, 2), (700, 19073)])
def test_last_update_is_exactly_the_floor(shape, warmup_steps, max_steps):
    assert lr(max_steps - 1, warmup_steps=warmup_steps, max_steps=max_steps, shape=shape) == 2.0 * 0.1
    assert lr(max_steps + 5, warmup_steps=warmup_steps, max_steps=max_steps, shape=shape) == 2.0 * 0.1


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_it_only_falls_after_the_warm_up(shape):
    rates = [lr(step, shape=shape) for step in range(4, 20)]
    assert all(a > b for a, b in zip(rates, rates[1:], strict=False)) and rates[0] == 2.0


def test_halfway_is_the_middle_for_both_shapes_and_cosine_is_above_line_before_it():
    assert [lr(5, warmup_steps=0, max_steps=11, shape=s) for s in ("cosine", "linear")] == pytest.approx([1.1, 1.1])
    assert lr(2, warmup_steps=0, max_steps=11) > lr(2, warmup_steps=0, max_steps=11, shape="linear")
    assert lr(2, warmup_steps=0, max_steps=11, shape="linear") == pytest.approx(2.0 * (0.1 + 0.9 * 0.8))


def test_constant_stays_at_the_peak():
    assert {lr(step, shape="constant") for step in range(4, 20)} == {2.0}


def test_wsd_stays_at_the_peak_and_then_falls_in_a_line_to_the_floor():
    rates = [lr(step, shape="wsd", decay_ratio=0.25) for step in range(20)]  # 4 warm-up, 11 stable, 5 down
    assert rates[3:15] == [2.0] * 12
    assert rates[14:] == pytest.approx([2.0 - 1.8 * n / 5 for n in range(6)])
    assert rates[-1] == 2.0 * 0.1
    assert lr(19, shape="wsd", decay_ratio=0.0) == 2.0 * 0.1
    assert lr(30, shape="wsd", decay_ratio=1.0, max_steps=20) == 2.0 * 0.1


def test_warm_up_as_long_as_the_run_ends_at_the_peak():
    assert lr(19, warmup_steps=20) == 2.0 and all(lr(s, warmup_steps=20) > 0 for s in range(20))


def test_a_run_of_one_update_has_a_learning_rate():
    assert lr(0, warmup_steps=0, max_steps=1, min_ratio=0.5) > 0


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def large_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 64), nn.LayerNorm(64), nn.Linear(64, 80))  # of 320, 64, 64, 5,120, 80 elements


SETTINGS = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}


def adamw(module):
    return optim.adamw(module, **SETTINGS)


@pytest.mark.parametrize("make", [optim.adamw, pytest.param(optim.adamw_8bit, marks=needs_bitsandbytes)])
def test_only_matrices_decay_and_every_parameter_is_held_once(make):
    module = model()
    optimizer = make(module, **SETTINGS)
    decay = {group["weight_decay"]: group["params"] for group in optimizer.param_groups}
    assert {p.dim() for p in decay[0.1]} == {2} and {p.dim() for p in decay[0.0]} == {1}
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in module.parameters())
    assert all((g["lr"], g["betas"], g["eps"]) == (0.1, (0.9, 0.95), 1e-8) for g in optimizer.param_groups)


def test_tied_and_frozen_parameters_are_held_once_and_never():
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    module[1].weight = module[0].weight
    module[1].bias.requires_grad_(False)
    held = [p for group in adamw(module).param_groups for p in group["params"]]
    assert len(held) == 1 and held[0] is module[0].weight


def test_set_lr_sets_every_group():
    optimizer = adamw(model())
    optim.set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_the_optimizers_take_the_same_arguments_but_for_momentum():
    ours, eight, of_muon = (inspect.signature(make).parameters for make in (optim.adamw, optim.adamw_8bit, muon.muon))
    assert ours == eight == {name: kind for name, kind in of_muon.items() if name != "momentum"}


@needs_bitsandbytes
def test_moments_of_8_bits_are_those_of_tensors_of_4096_elements_and_the_update_is_near_adamws():
    full, eight = large_model(), large_model()
    optimizers = optim.adamw(full, **SETTINGS), optim.adamw_8bit(eight, **SETTINGS)
    start = [parameter.detach().clone() for parameter in full.parameters()]
    for seed in range(5):
        for module, optimizer in zip((full, eight), optimizers, strict=True):
            torch.manual_seed(seed)
            for parameter in module.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    for before, a, b in zip(start, full.parameters(), eight.parameters(), strict=True):
        state = optimizers[1].state[b]
        kept = {state["state1"].dtype, state["state2"].dtype}
        if b.numel() < 4096:
            assert kept == {torch.float32}
            torch.testing.assert_close(a, b)
        else:
            assert kept == {torch.uint8} and not torch.equal(a, b)
            assert state["absmax1"].shape == state["absmax2"].shape == (b.numel() / 256,)
            assert (a - b).norm() < 0.05 * (a - before).norm()


@needs_bitsandbytes
@pytest.mark.parametrize("fp16", [False, True])
def test_a_bad_gradient_changes_no_8_bit_moment_and_a_good_one_does(fp16):
    case = Case(scaler() if fp16 else None, large_model(), optim.adamw_8bit)
    before = case.bits()
    case.gradients()
    case.parameters[3].grad[1, 2] = NAN
    assert not case.update().applied and case.unchanged(before)
    case.gradients()
    assert case.update().applied and not case.unchanged(before)


def test_missing_bitsandbytes_is_told_with_the_command_of_the_version_that_is_tested(monkeypatch):
    for name in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BadInput, match=r"adamw_8bit needs .* pip install bitsandbytes==[\d.]+, or --optimizer adamw$"):
        optim.adamw_8bit(model(), **SETTINGS)
    pins = (Path(__file__).parents[2] / "requirements-dev.txt").read_text().split()
    assert optim.BITSANDBYTES in pins


@needs_bitsandbytes
def test_8_bits_are_refused_where_bitsandbytes_cannot_work_before_any_training(monkeypatch):
    with pytest.raises(BadInput, match="--shard_optimizer false"):
        optim.adamw_8bit(model(), **SETTINGS, shard=True)
    with monkeypatch.context() as patch:
        patch.setattr(optim, "DTensor", nn.Parameter)  # as if all were sharded
        with pytest.raises(BadInput, match="a YAML without FSDP, or --optimizer adamw"):
            optim.adamw_8bit(model(), **SETTINGS)

    def step(self):
        raise RuntimeError("\nno kernels\nmore lines")

    monkeypatch.setattr("bitsandbytes.optim.AdamW8bit.step", step)
    with pytest.raises(BadInput, match=r"does not run on cpu: no kernels; --optimizer adamw$"):
        optim.adamw_8bit(model(), **SETTINGS)


class Case:
    """A model after one good update, and its next gradients."""

    def __init__(self, scaler=None, module=None, make=optim.adamw):
        self.module, self.scaler = module or model(), scaler
        self.optimizer, self.parameters = make(self.module, **SETTINGS), list(self.module.parameters())
        self.gradients()
        self.first = self.update()

    def gradients(self, factor=1.0):
        loss = self.module(torch.arange(5)).square().mean() * factor
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def update(self, loss=1.0, max_grad_norm=1.0, reduce_mean=lambda tensor: tensor):
        return optim.update(
            self.optimizer,
            self.parameters,
            torch.tensor(loss),
            max_grad_norm=max_grad_norm,
            scaler=self.scaler,
            reduce_mean=reduce_mean,
        )

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
    got = case.update(loss=1.5)
    assert got.applied and not got.overflow and got.loss == 1.5 and math.isfinite(got.grad_norm)
    assert not any(torch.equal(a, b) for a, b in zip(before[: len(case.parameters)], case.parameters, strict=True))
    assert all(p.grad is None for p in case.parameters)


@pytest.mark.parametrize("loss, gradient", [(NAN, None), (INF, None), (1.0, NAN), (1.0, INF), (1.0, -INF)])
@pytest.mark.parametrize("fp16", [False, True])
def test_a_bad_loss_or_gradient_changes_neither_weights_nor_moments(loss, gradient, fp16):
    case = Case(scaler() if fp16 else None)
    before = case.bits()
    case.gradients()
    if gradient is not None:
        case.parameters[0].grad[1, 2] = gradient
    got = case.update(loss=loss)
    assert not got.applied and case.unchanged(before)
    assert all(p.grad is None for p in case.parameters)
    assert got.overflow is (fp16 and gradient is not None)
    case.gradients()
    assert case.update().applied


def test_a_bad_loss_on_another_process_skips_the_update_here():
    case = Case()
    before = case.bits()
    case.gradients()
    got = case.update(reduce_mean=lambda tensor: torch.stack([torch.tensor(NAN), tensor[1]]))
    assert not got.applied and case.unchanged(before) and "not finite" in got.reason


def test_the_reported_loss_is_the_mean_over_processes():
    case = Case()
    case.gradients()
    assert case.update(loss=1.0, reduce_mean=lambda tensor: tensor + 2).loss == 3.0


def test_fp16_overflow_skips_the_update_and_halves_the_scale():
    case = Case(scaler(2.0**16))
    before = case.bits()
    case.gradients(factor=1e38)  # finite as fp32, infinite once scaled
    got = case.update()
    assert not got.applied and got.overflow and case.unchanged(before)
    assert case.scaler.get_scale() == 2.0**15 and "scale" in got.reason
    case.gradients()
    assert case.update().applied and case.scaler.get_scale() == 2.0**15


def test_overflow_at_the_smallest_scale_is_the_models_fault():
    case = Case(scaler(1.0))
    case.gradients()
    case.parameters[0].grad.fill_(INF)
    got = case.update()
    assert not got.applied and not got.overflow and "not finite" in got.reason


def test_scaled_gradients_are_measured_unscaled():
    plain, scaled = Case(), Case(scaler())
    assert scaled.first.grad_norm == pytest.approx(plain.first.grad_norm, rel=1e-5)


def test_scale_survives_its_state_dict():
    case = Case(scaler(2.0**16))
    case.gradients(factor=1e38)
    case.update()
    other = scaler()
    other.load_state_dict(case.scaler.state_dict())
    assert other.get_scale() == 2.0**15 and other.state_dict() == case.scaler.state_dict()


def test_gradients_are_clipped_to_the_norm_and_the_norm_is_that_before():
    seen = []
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for limit, norm in [(1.0, 1.0), (0, 5.0), (100.0, 5.0)]:
        weight.data.zero_()
        weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        got = optim.update(
            optimizer, [weight], torch.tensor(1.0), max_grad_norm=limit, scaler=None, reduce_mean=lambda t: t
        )
        assert got.grad_norm == 5.0
        seen.append((weight.detach().norm().item(), norm))
    assert all(a == pytest.approx(b, rel=1e-4) for a, b in seen)


def test_no_gradient_at_all_is_harmless():
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.zeros(2, 2)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    got = optim.update(optimizer, [weight], torch.tensor(1.0), max_grad_norm=0, scaler=None, reduce_mean=lambda t: t)
    assert got.applied and torch.equal(weight, torch.ones(2, 2))
