"""Learning rate schedules. The rate of an update is a pure function of its step."""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ursa_minor.recipe import keys

if TYPE_CHECKING:
    import torch

# A warm-up that max_hours shortens continues for at least this many updates.
MIN_RISE = 10


@dataclass(frozen=True)
class Length:
    """Length of a schedule, from the recipe or planned by ``max_hours``.

    Attributes:
        max_steps: number of updates.
        warmup_steps: updates of linear warm-up.
        changed_at: number of updates that were made before ``max_hours`` planned this length.
            0 if these updates had the rates that this length gives them anyway.
        rate_before: learning rate of the last one of these updates; the schedule continues from it.
    """

    max_steps: int
    warmup_steps: int
    changed_at: int = 0
    rate_before: float = 0.0

    @classmethod
    def of(cls, schedule: keys.Schedule) -> "Length":
        """Return the length that the recipe states, or that follows from num_train_epochs."""
        return cls(schedule.total_steps, schedule.warmup_steps)


def learning_rate(step: int, schedule: keys.Schedule, length: Length | None = None) -> float:
    """Return the learning rate of the update that follows ``step`` updates.

    The rate rises linearly over ``warmup_steps`` updates: the first one has peak / warmup_steps,
    the last one has the peak. Then it falls to peak * min_lr_ratio, which it reaches at step
    max_steps, one step after the last update, as in Transformers:

    - cosine: along half a cosine.
    - linear: along a line.
    - wsd (warm-up, stable, decay, https://arxiv.org/abs/2405.18392): it stays at the peak, then
      falls along a line during the last ``decay_ratio`` of max_steps.
    - constant: it stays at the peak.

    Args:
        step: number of updates made so far.
        schedule: the recipe's schedule.
        length: the length planned by ``max_hours``. Defaults to the length of ``schedule``.
    """
    if length is None:
        length = Length.of(schedule)
    if step < length.warmup_steps:
        return _warmup_rate(step, schedule.learning_rate, length)
    if schedule.lr_scheduler_type == "constant":
        return schedule.learning_rate

    highest = schedule.learning_rate
    lowest = schedule.learning_rate * schedule.min_lr_ratio
    decay_start = decay_start_step(schedule, length)
    if decay_start is None:
        decay_start = length.warmup_steps
    if length.changed_at > length.warmup_steps:
        # max_hours planned this length after the warm-up: the rate falls from where it was then.
        highest = length.rate_before
        decay_start = max(decay_start, length.changed_at)

    if step >= length.max_steps:
        return lowest
    if step <= decay_start:
        return highest
    progress = (step - decay_start) / (length.max_steps - decay_start)
    remaining = 1.0 - progress
    if schedule.lr_scheduler_type == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    return highest * remaining + lowest * (1.0 - remaining)


def _warmup_rate(step: int, peak: float, length: Length) -> float:
    """Return the rate during the warm-up.

    It rises linearly to ``rate_before`` until ``changed_at``, and from there linearly to the peak.
    If the length did not change, both are 0, and there is only the second line.
    """
    if step < length.changed_at:
        return length.rate_before * (step + 1) / length.changed_at
    updates = length.warmup_steps - length.changed_at
    updates_made = step + 1 - length.changed_at
    updates_left = updates - updates_made
    share_of_peak = peak * updates_made / updates
    share_of_rate_before = length.rate_before * updates_left / updates
    return share_of_peak + share_of_rate_before


def decay_start_step(schedule: keys.Schedule, length: Length) -> int | None:
    """Return the number of updates before the decay phase.

    Until then, a longer run has the same learning rates.

    Returns:
        For wsd, max_steps - round(decay_ratio * max_steps), but not before the end of the warm-up.
        For constant, max_steps. None for the other shapes, whose rates all depend on the length.
    """
    if schedule.lr_scheduler_type == "constant":
        return length.max_steps
    if schedule.lr_scheduler_type != "wsd":
        return None
    decay_steps = round(schedule.decay_ratio * length.max_steps)
    decay_start = max(length.warmup_steps, length.max_steps - decay_steps)
    # If max_hours planned this length during the stable phase, the rate was at its peak until then.
    if length.rate_before == schedule.learning_rate:
        decay_start = max(decay_start, length.changed_at)
    return decay_start


def shorten(schedule: keys.Schedule, step: int, max_steps: int) -> Length:
    """Return the length of a run that ``max_hours`` ends after ``max_steps`` updates.

    A warm-up that has not ended is shortened to a quarter of the new length. It continues for at
    least ``MIN_RISE`` updates (or half of the remaining ones, if those are fewer), so that the
    learning rate does not jump.

    Args:
        schedule: the recipe's schedule, which the run has followed so far.
        step: number of updates made so far, at least 1.
        max_steps: new number of updates, at least ``step``. If it is not smaller than the recipe's,
            the recipe's length stays.
    """
    if max_steps >= schedule.total_steps:
        return Length.of(schedule)

    warmup_steps = schedule.warmup_steps
    if step < warmup_steps:
        half_of_remaining = math.ceil((max_steps - step) / 2)
        earliest_end = step + min(MIN_RISE, half_of_remaining)
        shortened = max(max_steps // 4, earliest_end)
        warmup_steps = min(warmup_steps, shortened)

    length = Length(max_steps, warmup_steps)
    rate_before = learning_rate(step - 1, schedule)
    if learning_rate(step - 1, schedule, length) != rate_before:
        length = dataclasses.replace(length, changed_at=step, rate_before=rate_before)
    return length


def set_lr(optimizer: "torch.optim.Optimizer", learning_rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
