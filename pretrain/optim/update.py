"""One update that a bad gradient cannot poison."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Update:
    """The result of one attempted update, the same on all processes."""

    loss: float  # nats per token, mean over the step and all processes
    grad_norm: float  # before clipping
    applied: bool
    overflow: bool  # not applied because fp16 gradients overflowed: the scale was lowered, the model is sound

    @property
    def reason(self) -> str:
        """Why it was not applied."""
        if self.overflow:
            return "fp16 overflow; the loss scale was lowered"
        return f"loss {self.loss}, gradient norm {self.grad_norm}: not finite"


def update(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    loss: torch.Tensor,
    *,
    max_grad_norm: float,
    scaler: torch.amp.GradScaler | None,
    reduce_mean: Callable[[torch.Tensor], torch.Tensor],
) -> Update:
    """Clip and apply the gradients, or skip them all when loss or norm is not finite on any process.

    Args:
        loss: this process's mean over the step, scalar, nats per token.
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
    mean_loss, grad_norm = reduce_mean(torch.stack([loss.float(), norm.float()])).tolist()
    applied = math.isfinite(mean_loss) and math.isfinite(grad_norm)
    before = 0.0 if applied else scaler.get_scale()  # read from the device only where an overflow is possible
    if applied:
        scaler.step(optimizer)
    scaler.update()
    # At a scale of 1 or less there is nothing left to lower: what still overflows is the model, not the format.
    overflow = not applied and math.isfinite(mean_loss) and 1.0 < before > scaler.get_scale()
    optimizer.zero_grad(set_to_none=True)
    return Update(mean_loss, grad_norm, applied, overflow)
