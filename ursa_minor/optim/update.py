"""One update that a bad gradient cannot poison."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ursa_minor.model.loss import Losses
from ursa_minor.recipe import keys


@dataclass(frozen=True)
class Update:
    """The result of one attempted update, the same on all processes."""

    loss: float  # cross entropy in nats per token, mean over the step and all processes
    grad_norm: float  # before clipping
    applied: bool
    overflow: bool  # not applied because fp16 gradients overflowed: the scale was lowered, the model is sound
    objective: float | None = (
        None  # the loss that is minimized, or None if that is the cross entropy
    )

    @property
    def reason(self) -> str:
        """Why it was not applied."""
        if self.overflow:
            return "fp16 overflow; the loss scale was lowered"
        if self.objective is None:
            return f"loss {self.loss}, gradient norm {self.grad_norm}: not finite"
        return f"objective {self.objective}, gradient norm {self.grad_norm}: not finite"


class MeanLosses:
    """The losses of a step, on the device: means over this process's micro-batches.

    Attributes:
        loss: the cross entropy in nats per token.
        objective: the loss that is minimized, or None if that is the cross entropy.
    """

    def __init__(self, micro_batches: int, device: torch.device, loss: keys.Loss):
        self._micro_batches = micro_batches
        self.loss = torch.zeros((), device=device)
        self.objective = torch.zeros((), device=device) if loss.has_objective else None

    def add(self, losses: Losses) -> None:
        """Add those of a micro-batch. The host does not wait for the device."""
        self.loss += losses.cross_entropy.detach() / self._micro_batches
        if self.objective is not None:
            self.objective += losses.objective.detach() / self._micro_batches


def update(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    loss: torch.Tensor,
    *,
    objective: torch.Tensor | None = None,
    max_grad_norm: float,
    scaler: torch.amp.GradScaler | None,
    reduce_mean: Callable[[torch.Tensor], torch.Tensor],
) -> Update:
    """Clip and apply the gradients, or skip them all when objective or norm is not finite on any process.

    Args:
        loss: cross entropy in nats per token, this process's mean over the step, a scalar.
        objective: the loss that is minimized, likewise, or None if that is ``loss``.
        max_grad_norm: 0 = measure only.
        scaler: the gradient scaler under fp16, else None.
        reduce_mean: mean of a tensor over the processes; one infinite or NaN part makes it so everywhere.

    The one place of a step where the host waits for the device.
    """
    scaler = scaler or torch.amp.GradScaler(enabled=False)  # which only steps
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf)
    if isinstance(norm, DTensor):  # under FSDP each process has a part of it
        norm = norm.full_tensor()
    measured = [loss.float(), norm.float()]
    if objective is not None:
        measured.append(objective.float())
    mean_loss, grad_norm, *means = reduce_mean(torch.stack(measured)).tolist()
    mean_objective = means[0] if means else None
    minimized = mean_loss if mean_objective is None else mean_objective
    applied = math.isfinite(minimized) and math.isfinite(grad_norm)
    # Read from the device only where an overflow is possible.
    before = 0.0 if applied else scaler.get_scale()
    if applied:
        scaler.step(optimizer)
    scaler.update()
    # At a scale of 1 or less there is nothing left to lower: what still overflows is the model, not the format.
    overflow = not applied and math.isfinite(minimized) and 1.0 < before > scaler.get_scale()
    optimizer.zero_grad(set_to_none=True)
    return Update(mean_loss, grad_norm, applied, overflow, mean_objective)
