"""Where a run's schedule ends: at a given step or, with a limit of hours, where the measured speed lets it."""

from collections.abc import Callable

import torch

SETTLING, MEASURING = 5, 15  # updates that are not timed (compiling, clocks), then those that are


class Horizon:
    """The length of the schedule, planned once when ``max_hours`` is given.

    Args:
        max_steps, warmup_steps: of the schedule as it was asked for; a planned one warms up for a quarter at most.
        max_hours: of training; 0 = as it was asked for.
        planned: what an earlier process of this run has planned.

    Attributes:
        max_steps, warmup_steps: the schedule's, as they stand now.
        planned: both, for the checkpoint; None before, and where nothing is to be planned.
    """

    def __init__(self, *, max_steps: int, warmup_steps: int, max_hours: float = 0.0, planned: list[int] | None = None):
        self.asked, self.max_hours, self.planned = (max_steps, warmup_steps), max_hours, planned
        self.max_steps, self.warmup_steps = planned or self.asked
        self._updates, self._settled_at = 0, 0.0

    def plan(self, step: int, elapsed: float, reduce_mean: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
        """Plan when the time has come, and return what became of it; every process calls after each update.

        Args:
            elapsed: seconds of training until ``step``, those before a resume too.
            reduce_mean: mean of a tensor over the processes, so that all plan the same.
        """
        self._updates += 1
        if not self.max_hours or self.planned or self._updates > SETTLING + MEASURING:
            return None
        if self._updates == SETTLING:
            self._settled_at = elapsed
        if self._updates < SETTLING + MEASURING:
            return None
        times = torch.tensor([elapsed, (elapsed - self._settled_at) / MEASURING], dtype=torch.float32)
        elapsed, seconds = reduce_mean(times).tolist()
        steps, warmup_steps = self.asked
        fits = step + max(0, int((3600 * self.max_hours - elapsed) / seconds))
        self.max_steps = min(steps, fits)
        self.warmup_steps = min(warmup_steps, max(self.max_steps // 4, step))  # what is done of it stays
        self.planned = [self.max_steps, self.warmup_steps]
        return (
            f"max_hours = {self.max_hours:g}: at {1000 * seconds:,.0f} ms a step the run takes {self.max_steps:,} of the "
            f"{steps:,} steps, {self.warmup_steps:,} of them warm-up"
        )
