"""A limit of hours: fewer updates are planned, once, from the speed of the first ones."""

import logging
from collections.abc import Callable

import torch

from pretrain.recipe import keys

log = logging.getLogger(__name__)

SETTLING, MEASURING = 5, 15  # updates that are not timed (compiling, clocks), then those that are


class TimeBudget:
    """Plans the length of the schedule when ``max_hours`` is given.

    Args:
        planned: whether an earlier process of this run has done so.
    """

    def __init__(self, schedule: keys.Schedule, *, planned: bool):
        self._schedule, self._planned = schedule, planned or not schedule.max_hours
        self._updates, self._settled_at = 0, 0.0

    def plan(
        self, step: int, elapsed: float, reduce_mean: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[int, int] | None:
        """Return max_steps and warmup_steps when the time to plan has come; every process calls after each update.

        Args:
            elapsed: seconds of training until ``step``, those before a resume too.
            reduce_mean: mean of a tensor over the processes, so that all plan the same.
        """
        self._updates += 1
        if self._updates == SETTLING:
            self._settled_at = elapsed
        if self._planned or self._updates < SETTLING + MEASURING:
            return None
        self._planned = True
        times = torch.tensor([elapsed, (elapsed - self._settled_at) / MEASURING], dtype=torch.float32)
        elapsed, seconds = reduce_mean(times).tolist()
        asked, hours = self._schedule, self._schedule.max_hours
        max_steps = min(asked.max_steps, step + max(0, int((3600 * hours - elapsed) / seconds)))
        warmup_steps = min(asked.warmup_steps, max(max_steps // 4, step))  # the updates so far stay
        log.info(
            f"max_hours = {hours:g}: at {1000 * seconds:,.0f} ms a step the run takes {max_steps:,} of the "
            f"{asked.max_steps:,} steps, {warmup_steps:,} of them warm-up"
        )
        return max_steps, warmup_steps
