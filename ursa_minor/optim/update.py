"""Make one update, or skip it if the gradients are not finite."""

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
    """The result of an update, identical on all processes.

    Attributes:
        loss: cross entropy in nats per token, mean over the step and all processes.
        grad_norm: norm of the gradient before clipping.
        applied: whether the weights were updated.
        overflow: whether the update was skipped because gradients overflowed fp16. The loss scale
            was lowered, and the model itself is finite.
        objective: the loss that is minimized, or None if that is the cross entropy.
    """

    loss: float
    grad_norm: float
    applied: bool
    overflow: bool
    objective: float | None = None

    @property
    def reason(self) -> str:
        """The reason why the update was skipped."""
        if self.overflow:
            return "fp16 overflow; the loss scale was lowered"
        minimized = f"loss {self.loss}"
        if self.objective is not None:
            minimized = f"objective {self.objective}"
        return f"{minimized}, gradient norm {self.grad_norm}: not finite"


class MeanLosses:
    """The mean losses of a step over the micro-batches of this process, as tensors on the device.

    Attributes:
        loss: the cross entropy in nats per token.
        objective: the loss that is minimized, or None if that is the cross entropy.
    """

    def __init__(self, micro_batches: int, device: torch.device, loss: keys.Loss):
        """Start at 0.

        Args:
            micro_batches: number of micro-batches per step.
            device: the device that trains.
            loss: the loss keys of the recipe.
        """
        self._micro_batches = micro_batches
        self.loss = torch.zeros((), device=device)
        self.objective = torch.zeros((), device=device) if loss.has_objective else None

    def add(self, losses: Losses) -> None:
        """Add the losses of a micro-batch, without waiting for the device."""
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
    """Clip and apply the gradients, or skip them if they are not finite on any process.

    This is the only point of a step where the host waits for the device.

    Args:
        optimizer: the optimizer. Its gradients are cleared.
        parameters: the parameters of the model.
        loss: scalar, cross entropy in nats per token, mean over the step on this process.
        objective: scalar, the loss that is minimized, likewise, or None if that is ``loss``.
        max_grad_norm: norm to which the gradient is clipped, or 0 for no clipping.
        scaler: the gradient scaler under fp16, else None.
        reduce_mean: function that returns the mean of a tensor over all processes. If a value is
            infinite or NaN on one process, the mean must be so on all of them.
    """
    if scaler is None:
        scaler = torch.amp.GradScaler(enabled=False)  # only calls optimizer.step()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf)
    if isinstance(norm, DTensor):  # under FSDP, each process has the norm of its shards
        norm = norm.full_tensor()

    measurements = [loss.float(), norm.float()]
    if objective is not None:
        measurements.append(objective.float())
    means = reduce_mean(torch.stack(measurements)).tolist()
    mean_loss = means[0]
    grad_norm = means[1]
    mean_objective = None if objective is None else means[2]
    minimized = mean_loss if mean_objective is None else mean_objective
    is_loss_finite = math.isfinite(minimized)

    if is_loss_finite and math.isfinite(grad_norm):
        scaler.step(optimizer)
        scaler.update()
        applied = True
        overflow = False
    else:
        # The scale is on the device, so it is read only if the update is skipped.
        old_scale = scaler.get_scale()
        scaler.update()
        applied = False
        # A scale of 1 or less does not cause an overflow. Then the gradients themselves are not
        # finite.
        overflow = is_loss_finite and old_scale > 1.0 and scaler.get_scale() < old_scale
    optimizer.zero_grad(set_to_none=True)
    return Update(mean_loss, grad_norm, applied, overflow, mean_objective)
