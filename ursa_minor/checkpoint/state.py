"""Training state: the scalars that a checkpoint stores next to the tensors."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ursa_minor.optim.schedule import Length
from ursa_minor.optim.update import Update
from ursa_minor.recipe import keys


@dataclass
class RunState:
    """The state of the training loop, stored in ``state.json``.

    The position in the data, the learning rate and dropout are not stored, because they are
    functions of ``step``.

    Attributes:
        max_steps: length of the schedule in updates: that of the recipe, or the one that
            ``max_hours`` has planned.
        warmup_steps: updates of linear warm-up.
        changed_at: see ``Length``.
        rate_before: see ``Length``.
        planned: whether ``max_hours`` has planned the four values above.
        step: number of attempted updates, including skipped ones.
        skipped_updates: number of updates that were not applied.
        bad_in_a_row: number of updates since the last applied one that were skipped because the
            loss or gradient was not finite. fp16 overflows do not count.
        elapsed_seconds: time of training, without evaluating and saving.
        wall_seconds: wall time since the first update, summed over all starts of the run.
            ``max_hours`` limits it.
        data_wait_seconds: part of ``elapsed_seconds`` in which training waited for data.
        micro_batch: sequences per micro-batch, or None before it is chosen. A resumed run uses the
            same value, so that its results are bitwise identical.
        exchange_each: whether FSDP2 exchanges gradients in each micro-batch. A resumed run uses the
            same value for the same reason.
        trackers: the ids of the run at its trackers, by name of the tracker.
        tasks: the commits of the data sets of the tasks that score the run, by name of the task.
        evaluations: number of validations.
        evaluated_step: step of the last validation, or -1.
        best_loss: the lowest validation loss, or None.
        best_step: its step, or None.
        since_best: number of validations after it.
        origin: the checkpoint that the run started from (``resume_from_checkpoint``), as returned
            by ``format.origin_of``, or None.
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
        """Return the state of a new run, or the state in the ``state.json`` of a checkpoint.

        Args:
            schedule: the recipe's schedule. It sets the length, unless ``max_hours`` has planned
                another one.
            saved: the contents of ``state.json``, or None for a new run.
        """
        state = cls(schedule.total_steps, schedule.warmup_steps)
        if saved is None:
            return state
        length_fields = {field.name for field in dataclasses.fields(Length)}
        for field in dataclasses.fields(cls):
            if field.name not in length_fields and field.name != "planned":
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
        """Return the values for ``state.json``.

        The length is stored only if ``max_hours`` has planned it, as ``planned``.
        """
        values = dataclasses.asdict(self)
        length = dataclasses.asdict(self.length)
        for name in length:
            del values[name]
        values["planned"] = length if self.planned else None
        return values

    def has_ended(self, patience: int) -> bool:
        """Return whether the run ends at this step, by ``max_steps`` or by early stopping.

        Args:
            patience: the recipe's ``early_stopping_patience``.
        """
        return self.step >= self.max_steps or self.stops_early(patience)

    def stops_early(self, patience: int) -> bool:
        """Return whether early stopping ends the run at this step, before ``max_steps``.

        It does so only at a step with an evaluation. A run that is resumed from an earlier
        checkpoint with a smaller patience therefore trains until its next evaluation.

        Args:
            patience: the recipe's ``early_stopping_patience``. 0 disables early stopping.
        """
        if patience == 0 or self.step >= self.max_steps:
            return False
        is_evaluated = self.evaluated_step == self.step
        return is_evaluated and self.since_best >= patience

    def set_length(
        self, max_steps: int, warmup_steps: int, changed_at: int = 0, rate_before: float = 0.0
    ) -> None:
        """Set the length that ``max_hours`` has planned. Checkpoints store it. See ``Length``."""
        self.max_steps = max_steps
        self.warmup_steps = warmup_steps
        self.changed_at = changed_at
        self.rate_before = rate_before
        self.planned = True

    def record_loss(self, loss: float) -> bool:
        """Record the validation loss at this step. Return whether it is the lowest one.

        A resumed run evaluates its first step again. This does not count as another validation.
        """
        if self.step <= self.evaluated_step:
            return False
        self.evaluated_step = self.step
        self.evaluations += 1
        is_lower = self.best_loss is None or loss < self.best_loss
        is_best = math.isfinite(loss) and is_lower
        if is_best:
            self.best_loss = loss
            self.best_step = self.step
            self.since_best = 0
        else:
            self.since_best += 1
        return is_best

    def forget_best(self) -> None:
        """Forget all validations, because the checkpoint with the lowest loss is not available."""
        self.evaluations = 0
        self.evaluated_step = -1
        self.best_loss = None
        self.best_step = None
        self.since_best = 0

    def record(self, update: Update, elapsed_seconds: float, data_wait_seconds: float) -> None:
        """Record an attempted update.

        Args:
            update: its result.
            elapsed_seconds: the new value of ``self.elapsed_seconds``.
            data_wait_seconds: the new value of ``self.data_wait_seconds``.
        """
        self.step += 1
        self.elapsed_seconds = elapsed_seconds
        self.data_wait_seconds = data_wait_seconds
        if update.applied:
            self.bad_in_a_row = 0
            return
        self.skipped_updates += 1
        if not update.overflow:
            self.bad_in_a_row += 1


def planned_length(saved: dict[str, Any]) -> Length | None:
    """Return the length that ``max_hours`` has planned, from a ``state.json``, or None."""
    planned = saved["planned"]
    if planned is None:
        return None
    return Length(**planned)
