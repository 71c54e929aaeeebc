"""Resuming from a checkpoint, and saving the next: which one, and what it holds beside the tensors."""

import contextlib
import dataclasses
import errno
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from transformers import PreTrainedModel

from ursa_minor.base import files, stopping
from ursa_minor.base.errors import BadInput, space_fix
from ursa_minor.base.run_files import STATE, step_name
from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.checkpoint.state import RunState, planned_length
from ursa_minor.data.loading.corpus import Corpus
from ursa_minor.hub import client, pull
from ursa_minor.optim.optimizers import OPTIMIZERS
from ursa_minor.optim.schedule import Length, decay_begins, learning_rate
from ursa_minor.recipe import keys, loading

log = logging.getLogger(__name__)


def begins_at(saving: keys.Saving) -> Path | None:
    """Return the checkpoint on this machine that a run is to begin from, if the recipe names one."""
    asked = saving.resume_from_checkpoint
    return None if asked in ("auto", "none") or pull.is_address(asked) else Path(asked)


def find_checkpoint(recipe: keys.Recipe, accelerator: Accelerator) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to resume from, the same on all processes, and a line for each newer one that is damaged."""
    asked, folder = recipe.saving.resume_from_checkpoint, recipe.saving.checkpoints
    found: list = [None, [], None]
    if accelerator.is_main_process:
        try:
            found[:2] = checkpoint.find_newest(folder, begins_at(recipe.saving))
            # Later starts of the same command resume from this folder.
            if found[0] is None and pull.is_address(asked):
                minutes = client.DEADLINE_SECONDS // 60
                log.info(
                    f"hub      fetching {asked}; a Hub that does not answer is asked again for {minutes} minutes"
                )
                # A run that pushes there begins there: one command for the first machine and for those after it.
                own = recipe.hub.pushes_checkpoints and asked == f"hub://{recipe.hub.hub_model_id}"
                with stopping.ending_at_once():
                    found[0] = pull.fetch_checkpoint(
                        asked, folder, recipe.saving.run_dir, may_begin=own
                    )
                if found[0] is None:
                    log.info(
                        f"hub      nothing was pushed to {asked} yet: the run begins at step 0"
                    )
        except BadInput as error:
            found[2] = error.lines
    broadcast_object_list(found)
    if found[2]:
        raise BadInput(found[2])
    return found[0], found[1]


def saved_task_commits(saving: keys.Saving, accelerator: Accelerator) -> dict[str, str]:
    """Return the commits of the task data sets that this run has been scored on, by task.

    They are those of the newest local checkpoint, which is not verified here: the commits only
    decide which items are read. Every process calls this; the main process reads.
    """
    commits: list[dict[str, str]] = [{}]
    if accelerator.is_main_process and saving.resume_from_checkpoint != "none":
        start = begins_at(saving)
        newest = checkpoint.list_checkpoints(saving.checkpoints)[:1]
        for path in newest or ([start] if start else []):
            with contextlib.suppress(OSError, ValueError, KeyError):
                commits = [dict(files.read_json(path / STATE)["tasks"])]
    broadcast_object_list(commits)
    return commits[0]


def extended(recipe: keys.Recipe, steps: int) -> keys.Recipe:
    """Return the recipe of a run that trains a finished one on, ``steps`` longer, from before its decay phase.

    It has a run folder of its own, named by its length. Raises BadInput where the finished run has no such checkpoint.
    """
    saving, schedule = recipe.saving, recipe.schedule
    if steps < 1:
        raise BadInput(f"--extend_steps {steps}: must be at least 1")
    length = None  # of the finished run: the newest checkpoint has it, if max_hours planned it
    for path in checkpoint.list_checkpoints(saving.checkpoints):
        if checkpoint.find_problem(path) is not None:
            continue
        if length is None:
            length = planned_length(checkpoint.read_state(path)) or Length.of(schedule)
        decay_start = decay_begins(schedule, length)
        if decay_start is not None and checkpoint.step_of(path) <= decay_start:
            break
    else:
        raise BadInput(
            f"--extend_steps: {saving.checkpoints} contains no complete checkpoint from before the decay phase. A "
            f"finished run with --lr_scheduler_type wsd or constant has one, unless early stopping ended it with "
            f"--save_steps 0. Here lr_scheduler_type = {schedule.lr_scheduler_type}, save_steps = {saving.save_steps}"
        )
    assert length is not None
    old_suffix = f"-{length.max_steps}"
    new_suffix = f"-{length.max_steps + steps}"
    return keys.replace(
        recipe,
        max_steps=length.max_steps + steps,
        warmup_steps=length.warmup_steps,
        max_hours=0.0,
        run_name=saving.name.removesuffix(old_suffix) + new_suffix,
        output_dir=str(saving.run_dir).removesuffix(old_suffix) + new_suffix,
        resume_from_checkpoint=str(path),
    )


def other_length(saved: dict, schedule: keys.Schedule) -> Length | None:
    """Return the length of a run that continues a checkpoint with another schedule.

    The warm-up of a planned length stays, because it has been trained with.

    Args:
        saved: the checkpoint's ``state.json``.
        schedule: the schedule to continue with.

    Returns:
        None if the schedule is the checkpoint's, if its learning rates until the checkpoint would
        have been others, or if ``max_hours`` has planned a length, which then stays.
    """
    fields = dataclasses.asdict(schedule)
    # max_hours is not stored, because it may change within a run.
    stated = {name: saved["science"].get(name, value) for name, value in fields.items()}
    saved_schedule = dataclasses.replace(schedule, **stated)
    planned = planned_length(saved)
    if saved_schedule == schedule or (planned and schedule.max_hours):
        return None

    if planned is None:
        saved_length = Length.of(saved_schedule)
        length = Length.of(schedule)
    else:
        saved_length = planned
        length = dataclasses.replace(planned, max_steps=schedule.max_steps)
    for step in range(saved["step"]):
        if learning_rate(step, saved_schedule, saved_length) != learning_rate(
            step, schedule, length
        ):
            return None
    return length


@dataclass
class Checkpoints:
    """Loads a run's newest checkpoint, and saves the next beside training, which stands still while tensors are copied.

    Leaving its block waits for the one that is being written. A save that fails (a full disk) is logged, and leaves the
    older checkpoints untouched and nothing half-made.

    Attributes:
        model: the bare model of Transformers.
        on_disk: called with each checkpoint but the run's last once it is there, beside training; must not raise.
        saved_step: of this process's last checkpoint, at first of the one that it resumed from; later ones in the folder
            are of a run that went back.
    """

    recipe: keys.Recipe
    corpus: Corpus
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    on_disk: Callable[[Path], None]
    saved_step: int = 0
    _writer: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, 1, "checkpoint")
    )
    _writing: Future | None = None
    # Kept, for new memory costs more than the copying.
    _copies: dict[str, torch.Tensor] = field(default_factory=dict)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.finish()
        self._writer.shutdown()

    def resume(self) -> tuple[RunState, list[str]]:
        """Load the newest checkpoint that verifies, if any; return how far the run is and what the user should know."""
        recipe, accelerator = self.recipe, self.accelerator
        path, damaged = find_checkpoint(recipe, accelerator)
        notes = [f"skipped a damaged checkpoint: {line}" for line in damaged]
        if path is None:
            return RunState.begin(recipe.schedule), notes
        saved = checkpoint.read_state(path)
        length = other_length(saved, recipe.schedule)
        if length is not None:
            for name, value in dataclasses.asdict(recipe.schedule).items():
                if name in saved["science"]:
                    saved["science"][name] = value
            if saved["planned"]:
                saved["planned"] = dataclasses.asdict(length)
            saved["since_best"] = 0  # early stopping counts from here
        # A path may lead to another run.
        loading.check_same_hyperparameters(path, saved["science"], recipe)
        self.corpus.check_same_data(path, saved["data"])
        checkpoint.load(
            path, self.model, self.optimizer, OPTIMIZERS[recipe.optimizer.optimizer].state_tensors
        )
        if accelerator.scaler is not None and saved["scaler"]:
            accelerator.scaler.load_state_dict(saved["scaler"])
        state = RunState.begin(recipe.schedule, saved)
        if path == begins_at(recipe.saving):
            state.origin = checkpoint.origin_of(path)
        patience = recipe.evaluation.early_stopping_patience
        best = recipe.saving.checkpoints / step_name(state.best_step or 0)
        is_elsewhere = path.parent != best.parent
        # A run that has ended stays ended.
        is_lost = not best.is_dir() and not state.stops_early(patience)
        if recipe.saving.load_best_model_at_end and (is_elsewhere or is_lost):
            state.forget_best()
        self.saved_step = state.step
        notes.append(f"resumed from {path}")
        if state.planned and recipe.schedule.max_hours:
            notes.append(
                f"max_hours has planned {state.max_steps} steps in this run; this length stays"
            )
        if state.step >= state.max_steps:
            notes.append(f"nothing is left to train: max_steps = {state.max_steps} is reached")
        elif state.stops_early(patience):
            notes.append(
                f"nothing is left to train: early stopping ended this run at step {state.step} of {state.max_steps}. "
                f"To continue it, give an --early_stopping_patience above {state.since_best}, or 0"
            )
        if saved["threads"] != (threads := torch.get_num_threads()):
            notes.append(
                f"note: it ran with {saved['threads']} threads; bits may differ with {threads}"
            )
        return state, notes

    def save_alone(self, state: RunState) -> None:
        """Save on this process only, where it can and something was trained; the others may be in an exchange."""
        sharded = self.accelerator.is_fsdp2 or self.recipe.optimizer.shard_optimizer
        if state.step > self.saved_step and not (sharded and self.accelerator.num_processes > 1):
            self.save(state, alone=True)

    def save(self, state: RunState, *, alone: bool = False) -> None:
        """Copy the state of all processes, which call it, and begin to write it."""
        self.finish()
        accelerator, saving = self.accelerator, self.recipe.saving
        weights, moments = checkpoint.gather(self.model, self.optimizer)
        path = saving.checkpoints / step_name(state.step)
        again = state.step == self.saved_step and checkpoint.find_problem(path) is None
        if not (accelerator.is_main_process or alone) or again:
            return
        self.saved_step = state.step
        beside = {
            **state.saved(),
            "tokens": state.step * self.recipe.batch.tokens_per_step,
            "scaler": accelerator.scaler.state_dict() if accelerator.scaler else None,
            "science": keys.hyperparameters(self.recipe),
            "data": self.corpus.contents(),
            "threads": torch.get_num_threads(),
            "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        }
        tensors = self._copy(weights), self._copy(moments)
        keep_steps = (
            self.keep_step(state),
            state.best_step if saving.load_best_model_at_end else None,
        )
        is_last = state.has_ended(self.recipe.evaluation.early_stopping_patience)

        def write() -> None:
            checkpoint.write(
                saving.checkpoints, tensors, beside, saving.save_total_limit, keep_steps
            )
            if not is_last:
                self.on_disk(path)

        self._writing = self._writer.submit(write)

    def finish(self) -> None:
        """Wait until what was begun is on disk."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except (OSError, SafetensorError) as error:
            fix = ""
            if getattr(error, "errno", None) == errno.ENOSPC:
                fix = f"{space_fix(self.recipe.saving.checkpoints)}; "
            log.error(f"no checkpoint at step {self.saved_step}: {error}: {fix}the run continues")

    def _copy(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, tensor in tensors.items():
            self._copies.setdefault(name, torch.empty_like(tensor, device="cpu"))
        return {name: self._copies[name].copy_(tensor) for name, tensor in tensors.items()}

    def keep_step(self, state: RunState) -> int | None:
        """Return the step whose checkpoint stays, for --extend_steps begins there; None: the schedule has none."""
        return decay_begins(self.recipe.schedule, state.length)

    def oldest_step(self, state: RunState) -> int:
        """Return the step of the oldest checkpoint that a run resumes from; one that is kept as the best is not."""
        kept = [
            checkpoint.step_of(path)
            for path in checkpoint.list_checkpoints(self.recipe.saving.checkpoints)
        ]
        limit = self.recipe.saving.save_total_limit or len(kept)
        return min(
            kept[:limit] + [step for step in kept[limit:] if step != state.best_step], default=0
        )

    def load_best(self, state: RunState) -> int:
        """Load the weights of the lowest validation loss, where that is asked for; return the step of the weights now.

        Every process calls it. A checkpoint that does not verify leaves the last weights, with a line that says so.
        """
        if not self.recipe.saving.load_best_model_at_end or state.best_step in (None, state.step):
            return state.step
        self.finish()
        path = self.recipe.saving.checkpoints / step_name(state.best_step)
        problem = [checkpoint.find_problem(path) if self.accelerator.is_main_process else None]
        broadcast_object_list(problem)
        if problem[0]:
            log.error(
                f"{path}, of the lowest validation loss: {problem[0]}. The last weights are kept"
            )
            return state.step
        checkpoint.load_weights(path, self.model)
        return state.best_step
