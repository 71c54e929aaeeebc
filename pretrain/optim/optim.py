"""The learning rate by step, AdamW with moments of 32 or 8 bits, and one update that a bad gradient cannot poison."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pretrain.base.errors import BadInput

BITSANDBYTES = "bitsandbytes==0.50.2"  # optional: adamw_8bit alone needs it


def lr_at(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    max_steps: int,
    min_ratio: float,
    shape: str = "cosine",
    decay_ratio: float = 0.2,
) -> float:
    """Return the learning rate of the update that follows ``step`` updates.

    It rises linearly over ``warmup_steps`` updates (the first is peak / warmup_steps, never 0), then falls to
    ``peak * min_ratio`` exactly at the last update, step max_steps - 1.

    Args:
        shape: cosine, linear, constant, or wsd (warm-up, stable, decay: https://arxiv.org/abs/2405.18392): the peak,
            then a line over the last ``decay_ratio`` of max_steps.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if shape == "constant":
        return peak
    begin = max(warmup_steps, max_steps - 1 - round(decay_ratio * max_steps)) if shape == "wsd" else warmup_steps
    falling = max_steps - 1 - begin
    progress = min(1.0, (step - begin) / falling) if falling > 0 else float(step >= begin)
    share = 1.0 - max(0.0, progress) if shape in ("linear", "wsd") else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (min_ratio + (1.0 - min_ratio) * share)


def adamw(
    model: nn.Module,
    *,
    learning_rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    shard: bool = False,
) -> torch.optim.Optimizer:
    """Build AdamW; weight decay acts on tensors of two or more dimensions only (not on biases and norms).

    Args:
        shard: each process of the default group keeps the moments of its share of the tensors, updates these, and
            sends them to the others (ZeRO-1, https://arxiv.org/abs/1910.02054). The updates are the same.
    """
    groups = _groups(model, weight_decay)
    settings = {"lr": learning_rate, "betas": (beta1, beta2), "eps": epsilon, "fused": True}
    if shard:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # its package brings TorchScript's warnings

        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **settings)
    return torch.optim.AdamW(groups, **settings)


def adamw_8bit(
    model: nn.Module,
    *,
    learning_rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    shard: bool = False,
) -> torch.optim.Optimizer:
    """Build bitsandbytes' AdamW, whose moments take 8 bits (https://arxiv.org/abs/2110.02861); arguments as ``adamw``'s.

    Each moment of a tensor of 4,096 elements or more is one byte an element and a fp32 scale for each 256 of them.
    Raises BadInput where ``check_8bit`` does.
    """
    groups = _groups(model, weight_decay)
    parameters = [parameter for group in groups for parameter in group["params"]]
    sharded = shard or any(isinstance(parameter, DTensor) for parameter in parameters)
    check_8bit(parameters[0].device, sharded=sharded)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, lr=learning_rate, betas=(beta1, beta2), eps=epsilon)


def check_8bit(device: torch.device, *, sharded: bool) -> None:
    """Raise BadInput where bitsandbytes is missing or does not run on ``device``, and for moments or weights in shards."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        remedy = f"pip install {BITSANDBYTES}, or --optimizer adamw"
        raise BadInput(f"optimizer = adamw_8bit needs bitsandbytes: {remedy}") from None
    if sharded:
        raise BadInput(
            "optimizer = adamw_8bit: bitsandbytes updates no moments or weights in shards; use --shard_optimizer false and "
            "a YAML without FSDP, or --optimizer adamw"
        )
    # It looks for its kernels for this device at the first update only, minutes of compiling later.
    trial = nn.Parameter(torch.zeros(4096, device=device))
    trial.grad = torch.zeros_like(trial)
    try:
        AdamW8bit([trial]).step()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInput(
            f"optimizer = adamw_8bit: bitsandbytes does not run on {device}: {reason}; --optimizer adamw"
        ) from None


def _groups(model: nn.Module, weight_decay: float) -> list[dict]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def set_lr(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


@dataclass(frozen=True)
class Update:
    """What came of one attempted update, the same on all processes."""

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
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf)
    if isinstance(norm, DTensor):  # under FSDP each process has a part of it
        norm = norm.full_tensor()
    mean_loss, grad_norm = reduce_mean(torch.stack([loss.float(), norm.float()])).tolist()
    applied = math.isfinite(mean_loss) and math.isfinite(grad_norm)
    overflow = False
    if scaler is None:
        if applied:
            optimizer.step()
    else:
        before = 0.0 if applied else scaler.get_scale()  # read from the device only where an overflow may be why
        if applied:
            scaler.step(optimizer)
        scaler.update()
        # At a scale of 1 or less there is nothing left to lower: what still overflows is the model, not the format.
        overflow = not applied and math.isfinite(mean_loss) and 1.0 < before > scaler.get_scale()
    optimizer.zero_grad(set_to_none=True)
    return Update(mean_loss, grad_norm, applied, overflow)
