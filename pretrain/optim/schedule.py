"""The learning rate of each update, a pure function of the step."""

import math
from typing import TYPE_CHECKING

from pretrain.recipe import keys

if TYPE_CHECKING:
    import torch


def learning_rate(step: int, schedule: keys.Schedule, *, max_steps: int, warmup_steps: int) -> float:
    """Return the learning rate of the update that follows ``step`` updates.

    It rises linearly over ``warmup_steps`` updates (the first is peak / warmup_steps, never 0), then falls to
    peak * min_lr_ratio exactly at the last update, step max_steps - 1: in a cosine, in a line, not at all (constant), or
    in a line over the last ``decay_ratio`` of max_steps (wsd: warm-up, stable, decay, https://arxiv.org/abs/2405.18392).

    Args:
        max_steps, warmup_steps: the schedule's, or what max_hours has planned instead.
    """
    peak, shape = schedule.learning_rate, schedule.lr_scheduler_type
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if shape == "constant":
        return peak
    line = decay_begins(schedule, max_steps=max_steps, warmup_steps=warmup_steps)
    begin = warmup_steps if line is None else line
    falling = max_steps - 1 - begin
    progress = min(1.0, (step - begin) / falling) if falling > 0 else float(step >= begin)
    share = 1.0 - max(0.0, progress) if shape in ("linear", "wsd") else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * share)


def decay_begins(schedule: keys.Schedule, *, max_steps: int, warmup_steps: int) -> int | None:
    """Return after how many updates the decay phase begins: until there a longer run is the same run.

    It is that of wsd; constant has none, so its end; None for shapes whose every rate depends on the length.
    """
    if schedule.lr_scheduler_type == "constant":
        return max_steps
    if schedule.lr_scheduler_type != "wsd":
        return None
    return max(warmup_steps, max_steps - 1 - round(schedule.decay_ratio * max_steps))


def set_lr(optimizer: "torch.optim.Optimizer", learning_rate: float) -> None:
    """Set the learning rate of every group, each by its ratio."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_ratio"]
