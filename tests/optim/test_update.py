"""A finite update changes the weights, and an update that is not finite changes nothing."""

import math

import pytest
import torch
from torch import nn

from ursa_minor.optim import update

SMALLEST_SCALE = 1.0


def keep_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the mean over processes if there is one process."""
    return tensor


def make_scaler(scale: float = 2.0**16) -> torch.amp.GradScaler:
    """Return a gradient scaler that does not grow during a test."""
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)


class Trainer:
    """A small model after one successful update, with gradients for the next one."""

    def __init__(self, scaler: torch.amp.GradScaler | None = None):
        torch.manual_seed(0)
        self.scaler = scaler
        self.module = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
        self.parameters = list(self.module.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1, fused=True)
        self.compute_gradients()
        self.first_result = self.update()

    def compute_gradients(self, factor: float = 1.0) -> None:
        """Compute gradients of a loss that is multiplied by ``factor``."""
        loss = self.module(torch.arange(5)).square().mean() * factor
        if self.scaler:
            loss = self.scaler.scale(loss)
        loss.backward()

    def update(self, loss: float = 1.0, **options):
        """Update the weights, and return the result."""
        options = {
            "max_grad_norm": 1.0,
            "scaler": self.scaler,
            "reduce_mean": keep_local,
        } | options
        return update.update(self.optimizer, self.parameters, torch.tensor(loss), **options)

    def copy_state(self) -> list[torch.Tensor]:
        """Return copies of the weights and of the optimizer's state."""
        tensors = list(self.parameters)
        for state in self.optimizer.state.values():
            tensors += [torch.as_tensor(value) for value in state.values()]
        return [tensor.detach().clone() for tensor in tensors]

    def has_state(self, expected: list[torch.Tensor]) -> bool:
        """Return whether weights and optimizer state are bitwise equal to a copy."""
        pairs = zip(expected, self.copy_state(), strict=True)
        return all(torch.equal(before, after) for before, after in pairs)

    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)


@pytest.fixture(params=[False, True], ids=["fp32", "fp16"])
def trainer(request) -> Trainer:
    """A trainer with new gradients, with and without a gradient scaler."""
    trainer = Trainer(make_scaler() if request.param else None)
    trainer.compute_gradients()
    return trainer


def test_finite_update_changes_all_weights(trainer):
    before = [parameter.detach().clone() for parameter in trainer.parameters]

    result = trainer.update(loss=1.5, reduce_mean=lambda tensor: tensor + torch.tensor([2.0, 0.0]))

    assert result.applied
    assert not result.overflow
    assert result.loss == 3.5  # the mean over processes
    assert math.isfinite(result.grad_norm)
    for old, new in zip(before, trainer.parameters, strict=True):
        assert not torch.equal(old, new)
    assert not trainer.has_gradients()


@pytest.mark.parametrize("problem", ["loss", "gradient", "another process"])
def test_update_that_is_not_finite_changes_nothing(trainer, problem):
    options = {}
    if problem == "loss":
        options["loss"] = math.nan
    elif problem == "gradient":
        trainer.parameters[0].grad[1, 2] = -math.inf
    else:
        options["reduce_mean"] = lambda tensor: tensor + torch.tensor([math.nan, 0.0])
    before = trainer.copy_state()

    result = trainer.update(**options)

    assert not result.applied
    assert trainer.has_state(before)
    assert not trainer.has_gradients()
    # An infinite gradient is normal in fp16.
    is_overflow = trainer.scaler is not None and problem == "gradient"
    assert result.overflow is is_overflow
    assert ("not finite" in result.reason) == (not is_overflow)

    trainer.compute_gradients()
    assert trainer.update().applied


@pytest.mark.parametrize(
    ("objective", "applied"), [(2.5, True), (math.nan, False), (math.inf, False)]
)
def test_objective_decides_whether_update_is_applied(objective, applied):
    trainer = Trainer()
    trainer.compute_gradients()
    before = trainer.copy_state()

    result = trainer.update(loss=1.5, objective=torch.tensor(objective))

    assert result.loss == 1.5
    assert result.objective == pytest.approx(objective, nan_ok=True)
    assert result.applied == applied
    assert trainer.has_state(before) == (not applied)
    if not applied:
        assert f"objective {objective}" in result.reason
        assert "gradient norm" in result.reason


def test_objective_is_optional():
    assert Trainer().first_result.objective is None


def overflow(trainer: Trainer, factor: float):
    """Update with gradients that overflow. Check that nothing changes and the scale is halved."""
    scale = trainer.scaler.get_scale()
    before = trainer.copy_state()
    trainer.compute_gradients(factor)
    result = trainer.update()
    assert not result.applied
    assert trainer.has_state(before)
    assert trainer.scaler.get_scale() == scale / 2
    return result


def test_fp16_overflow_skips_update_and_halves_scale():
    trainer = Trainer(make_scaler())

    # The gradients are finite, but infinite after scaling.
    result = overflow(trainer, factor=1e38)

    assert result.overflow
    assert "scale" in result.reason
    trainer.compute_gradients()
    assert trainer.update().applied
    assert trainer.scaler.get_scale() == 2.0**15


def test_overflow_at_smallest_scale_is_an_error():
    trainer = Trainer(make_scaler(SMALLEST_SCALE))

    result = overflow(trainer, factor=math.inf)

    assert not result.overflow
    assert "not finite" in result.reason
    trainer.compute_gradients()
    assert trainer.update().applied
    assert trainer.scaler.get_scale() == SMALLEST_SCALE / 2


@pytest.mark.parametrize("scale", [2.0**16, SMALLEST_SCALE])
def test_gradient_norm_is_measured_without_scale(scale):
    scaled = Trainer(make_scaler(scale)).first_result
    expected = Trainer().first_result

    assert scaled.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


@pytest.mark.parametrize(("max_grad_norm", "step_norm"), [(1.0, 1.0), (0, 5.0), (100.0, 5.0)])
def test_gradients_are_clipped_to_maximum_norm(max_grad_norm, step_norm):
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    optimizer = torch.optim.SGD([weight], lr=1.0)

    result = update.update(
        optimizer,
        [weight],
        torch.tensor(1.0),
        max_grad_norm=max_grad_norm,
        scaler=None,
        reduce_mean=keep_local,
    )

    # The reported norm is the one before clipping.
    assert result.grad_norm == 5.0
    assert weight.detach().norm().item() == pytest.approx(step_norm, rel=1e-4)
