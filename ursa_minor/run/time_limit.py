"""Keep the time limit ``max_hours``: plan the length of a run from its first updates."""

import bisect
import logging
import math
import shlex
import statistics
import time
from collections.abc import Callable

from accelerate.utils import broadcast_object_list

from ursa_minor.base.run_files import RECIPE
from ursa_minor.optim.schedule import Length, shorten
from ursa_minor.recipe import kept_steps, keys

log = logging.getLogger(__name__)

PLANNING_UPDATES = 20
# Part of the remaining time that is not planned. It allows for activities of unknown duration (the
# first checkpoint, the test split and the export at the end) and for a machine that becomes slower.
MARGIN = 0.05

# Activities of the training loop.
UPDATE = "update"
VALIDATION = "validation"
TASKS = "tasks"
SAMPLES = "samples"
CHECKPOINT = "checkpoint"


class TimeBudget:
    """Measure the wall time of a run, plan its length and report when ``max_hours`` are used up.

    Wall time runs from the first update of each process. It includes evaluations, checkpoints and
    waiting for data, and is summed over resumes.

    Args:
        recipe: the run's recipe.
        spent: seconds of wall time of the earlier processes of this run.
        is_planned: whether an earlier process has planned the length, which then stays.
        now: clock, in seconds.
    """

    def __init__(
        self,
        recipe: keys.Recipe,
        *,
        spent: float,
        is_planned: bool,
        now: Callable[[], float] = time.perf_counter,
    ):
        self._schedule = recipe.schedule
        self._saving = recipe.saving
        self._tokens_per_step = recipe.batch.tokens_per_step
        self._intervals = {
            VALIDATION: recipe.evaluation.eval_steps,
            TASKS: recipe.evaluation.task_steps,
            SAMPLES: recipe.evaluation.sample_steps,
            CHECKPOINT: recipe.saving.save_steps,
        }
        self._needs_plan = self.is_limited and not is_planned
        self._durations: dict[str, list[float]] = {name: [] for name in (UPDATE, *self._intervals)}
        self._spent = spent
        self._now = now
        self._started_at: float | None = None
        self._counted_until = now()

    @property
    def is_limited(self) -> bool:
        """Whether the run has a time limit."""
        return self._schedule.max_hours > 0

    @property
    def seconds(self) -> float:
        """Wall time of the run so far."""
        if self._started_at is None:
            return self._spent
        return self._spent + self._now() - self._started_at

    @property
    def is_used_up(self) -> bool:
        """Whether the time limit is reached."""
        return self.is_limited and self.seconds >= self._limit

    @property
    def _limit(self) -> float:
        return 3600 * self._schedule.max_hours

    def start(self) -> None:
        """Start the wall time before the first update of this process. Later calls do nothing."""
        if self._started_at is None:
            self._started_at = self._now()
            self._counted_until = self._started_at

    def count(self, activity: str) -> None:
        """Record the time since the last call as the duration of a finished activity."""
        now = self._now()
        if self._needs_plan:
            self._durations[activity].append(now - self._counted_until)
        self._counted_until = now

    def plan(
        self, step: int, share: Callable[[list], object] = broadcast_object_list
    ) -> Length | None:
        """Return the planned length, once, after ``PLANNING_UPDATES`` updates of this process.

        Every process calls this after each update. The main process decides. Without time for
        another update nothing is planned: the run stops at its limit and can be continued.

        Args:
            step: number of updates of the run so far.
            share: replaces the elements of a list by those of the main process.
        """
        is_due = len(self._durations[UPDATE]) == PLANNING_UPDATES
        if not (self._needs_plan and is_due and step < self._schedule.total_steps):
            return None
        self._needs_plan = False
        shared = [self._longest_run(step)]
        share(shared)
        max_steps = shared[0]
        if max_steps == step:
            log.info(
                f"max_hours = {self._schedule.max_hours:g} leaves no time to finish the run: it "
                f"will stop with a checkpoint when the time is used up"
            )
            return None
        length = shorten(self._schedule, step, max_steps)
        self._log_plan(step, length)
        return length

    def stop_message(self, step: int) -> str:
        """Return the last line of a run that the limit has stopped."""
        hours = self._schedule.max_hours
        more = 2 * max(hours, self.seconds / 3600)
        recipe_file = shlex.quote(str(self._saving.run_dir / RECIPE))
        command = f"python train.py --recipe {recipe_file} --max_hours {more:.3g}"
        if self._saving.resume_from_checkpoint == "none":
            command += " --resume_from_checkpoint auto"
        return (
            f"max_hours = {hours:g} is used up after step {step}. "
            f"To continue with a larger limit: {command}"
        )

    def _longest_run(self, step: int) -> int:
        """Return the largest ``max_steps`` that ends within the limit; ``step`` if none does."""
        available = (self._limit - self.seconds) * (1 - MARGIN)

        def seconds_until(end: int) -> float:
            return (end - step) * self._seconds_of(UPDATE) + self._reserve(step, end)

        possible = range(step, self._schedule.total_steps + 1)
        num_fitting = bisect.bisect_right(possible, available, key=seconds_until)
        return step + max(0, num_fitting - 1)

    def _reserve(self, step: int, end: int) -> float:
        """Return the seconds that evaluations and checkpoints take between two steps.

        An activity that has not happened yet counts as 0 seconds.
        """
        times = {activity: self._times(activity, step, end) for activity in self._intervals}
        if self._saving.load_best_model_at_end:  # each validation may save a checkpoint
            times[CHECKPOINT] += times[VALIDATION]
        kept = kept_steps.all_kept(self._saving.keep_checkpoints or (), end, self._tokens_per_step)
        times[CHECKPOINT] += sum(kept_step >= step for kept_step in kept)
        return sum(times[activity] * self._seconds_of(activity) for activity in times)

    def _times(self, activity: str, step: int, end: int) -> int:
        """Return how often an activity is due: at the multiples of its interval and at the end."""
        interval = self._intervals[activity]
        if interval == 0:
            return 0
        return math.ceil(end / interval) - (step - 1) // interval

    def _seconds_of(self, activity: str) -> float:
        """Return the median duration of an activity, 0 if it has not happened yet."""
        durations = self._durations[activity]
        return statistics.median(durations) if durations else 0.0

    def _log_plan(self, step: int, length: Length) -> None:
        reserve = self._reserve(step, length.max_steps)
        milliseconds = 1000 * self._seconds_of(UPDATE)
        log.info(
            f"max_hours = {self._schedule.max_hours:g}: an update takes {milliseconds:,.0f} ms "
            f"(median of {PLANNING_UPDATES}), so the run takes {length.max_steps:,} of the "
            f"{self._schedule.total_steps:,} steps, {length.warmup_steps:,} of them warm-up; "
            f"{reserve:,.0f} s are reserved for evaluations and checkpoints"
        )
