"""How far a run is: what a checkpoint keeps beside tensors, and the loop goes by."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ursa_minor.optim.schedule import Length
from ursa_minor.optim.update import Update
from ursa_minor.recipe import keys


@dataclass
class RunState:
    """The loop's state; data, learning rate and dropout are functions of ``step``.

    Attributes:
        step: updates attempted; a skipped one counts.
        max_steps, warmup_steps: of the schedule: the recipe's, or those that ``max_hours`` has planned.
        changed_at, rate_before: see ``Length``.
        planned: whether ``max_hours`` has planned these four.
        wall_seconds: wall time since the first update of each process, which ``max_hours`` limits.
        bad_in_a_row: updates skipped for a loss or gradient that is not finite, since the last good one.
        elapsed_seconds: of training, without evaluating and saving; ``data_wait_seconds``: of these, waiting for data.
        micro_batch, exchange_each: sequences, and whether FSDP2 exchanges gradients in each micro-batch; a resumed run
            keeps both, and so its bits.
        trackers: the run's ids there, by name.
        tasks: by name the commit of each task's data set that the run is scored on.
        evaluations, evaluated_step: how many validations there were, and at which step the last one.
        best_loss, best_step, since_best: the lowest validation loss, its step, and how many have followed.
        origin: the checkpoint that the run began at (``resume_from_checkpoint``), as ``checkpoint.origin_of`` states it.
    """

    max_steps: int
    warmup_steps: int
    changed_at: int = 0
    rate_before: float = 0.0
    planned: bool = False
    step: int = 0
    skipped_updates: int = 0
    bad_in_a_row: int = 0
    elapsed_seconds: float = 0.0
    wall_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    micro_batch: int | None = None
    exchange_each: bool = False
    trackers: dict = dataclasses.field(default_factory=dict)
    tasks: dict = dataclasses.field(default_factory=dict)
    evaluations: int = 0
    evaluated_step: int = -1
    best_loss: float | None = None
    best_step: int | None = None
    since_best: int = 0
    origin: dict | None = None

    @classmethod
    def begin(cls, schedule: keys.Schedule, saved: dict[str, Any] | None = None) -> "RunState":
        """Return the state before the first step, or the one that a checkpoint's ``state.json`` contains.

        Args:
            schedule: the recipe's schedule, which sets the length unless ``max_hours`` has planned another one.
            saved: the contents of ``state.json``; None before the first step.
        """
        state = cls(schedule.max_steps, schedule.warmup_steps)
        if saved is None:
            return state
        of_length = {field.name for field in dataclasses.fields(Length)}
        for field in dataclasses.fields(cls):
            if field.name not in of_length and field.name != "planned":
                setattr(state, field.name, saved[field.name])
        length = planned_length(saved)
        if length is not None:
            state.set_length(**dataclasses.asdict(length))
        return state

    @property
    def length(self) -> Length:
        """Length of the schedule."""
        return Length(self.max_steps, self.warmup_steps, self.changed_at, self.rate_before)

    def saved(self) -> dict[str, Any]:
        """Return its values for ``state.json``."""
        values = dataclasses.asdict(self)
        length = dataclasses.asdict(self.length)
        for name in length:
            del values[name]
        values["planned"] = length if self.planned else None
        return values

    def has_ended(self, patience: int) -> bool:
        """Return whether nothing is left to train: max_steps is reached, or early stopping ends the run at this step.

        Args:
            patience: the recipe's ``early_stopping_patience``.
        """
        return self.step >= self.max_steps or self.stops_early(patience)

    def stops_early(self, patience: int) -> bool:
        """Return whether early stopping ends the run at this step, before max_steps.

        That needs an evaluation at this very step. A run that is resumed from an earlier checkpoint with a smaller
        patience therefore trains until its next evaluation.
        """
        is_evaluated = self.evaluated_step == self.step
        return is_evaluated and self.step < self.max_steps and 0 < patience <= self.since_best

    def set_length(
        self, max_steps: int, warmup_steps: int, changed_at: int = 0, rate_before: float = 0.0
    ) -> None:
        """Give the schedule another length, which a checkpoint then stores."""
        self.max_steps = max_steps
        self.warmup_steps = warmup_steps
        self.changed_at = changed_at
        self.rate_before = rate_before
        self.planned = True

    def record_loss(self, loss: float) -> bool:
        """Record the validation loss at this step; return whether it is the lowest.

        A resumed run evaluates its first step again, which counts once.
        """
        if self.step <= self.evaluated_step:
            return False
        self.evaluated_step, self.evaluations = self.step, self.evaluations + 1
        if is_best := math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_loss, self.best_step = loss, self.step
        self.since_best = 0 if is_best else self.since_best + 1
        return is_best

    def forget_best(self) -> None:
        """Begin to look for the lowest loss anew, at this step: the checkpoint of the one until now is not here."""
        self.evaluations, self.evaluated_step, self.best_loss, self.best_step, self.since_best = (
            0,
            -1,
            None,
            None,
            0,
        )

    def record(self, update: Update, elapsed_seconds: float, data_wait_seconds: float) -> None:
        """Record an attempted update."""
        self.step += 1
        self.skipped_updates += not update.applied
        self.bad_in_a_row = 0 if update.applied else self.bad_in_a_row + (not update.overflow)
        self.elapsed_seconds, self.data_wait_seconds = elapsed_seconds, data_wait_seconds


def planned_length(saved: dict[str, Any]) -> Length | None:
    """Return the length that ``max_hours`` had planned, from a ``state.json``; None if it had not."""
    planned = saved["planned"]
    return None if planned is None else Length(**planned)
