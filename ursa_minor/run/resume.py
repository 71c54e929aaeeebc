"""Load the checkpoint that a run continues from, and save the next ones in the background."""

import contextlib
import dataclasses
import errno
import logging
from collections.abc import Callable, Mapping
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

from ursa_minor.base import checkpoint_files, files, paths, stopping
from ursa_minor.base.errors import BadInput, space_fix
from ursa_minor.base.run_files import COMPLETE, RECIPE, STATE, WEIGHTS, step_name
from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.checkpoint.state import RunState, planned_length
from ursa_minor.data.loading.corpus import Corpus
from ursa_minor.hub import client, pull
from ursa_minor.optim.optimizers import OPTIMIZERS
from ursa_minor.optim.schedule import Length, decay_start_step, learning_rate
from ursa_minor.recipe import kept_steps, keys, loading, rules

log = logging.getLogger(__name__)


def local_start(saving: keys.Saving) -> Path | None:
    """Return the local checkpoint that ``resume_from_checkpoint`` names, or None."""
    source = saving.resume_from_checkpoint
    if source in ("auto", "none") or pull.is_address(source):
        return None
    return Path(source)


def find_checkpoint(recipe: keys.Recipe, accelerator: Accelerator) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to resume from, and a line for each newer one that is corrupted.

    The main process looks for it and downloads it if necessary. All processes get its answer.

    Returns:
        The checkpoint's folder, or None if the run starts at step 0, and the lines.

    Raises:
        BadInput: on all processes, if the checkpoint that the recipe names cannot be used.
    """
    path = None
    corrupted: list[str] = []
    problem: list[str] = []
    if accelerator.is_main_process:
        try:
            path, corrupted = checkpoint.find_newest(
                recipe.saving.checkpoints, local_start(recipe.saving)
            )
            # A local checkpoint wins: the command that has downloaded one resumes from its own.
            if path is None and pull.is_address(recipe.saving.resume_from_checkpoint):
                path = _download_checkpoint(recipe)
        except BadInput as error:
            problem = error.lines
    answer: list = [path, corrupted, problem]
    broadcast_object_list(answer)
    path, corrupted, problem = answer
    if problem:
        raise BadInput(problem)
    return path, corrupted


def weights_only_notes(folder: Path) -> list[str]:
    """Return a line for a run that starts at step 0 although its folder contains checkpoints."""
    if not checkpoint_files.list_checkpoints(folder):
        return []
    return [
        f"note: this run starts at step 0, because all checkpoints in {folder} contain only "
        f"weights (keep_optimizer = false)"
    ]


def _download_checkpoint(recipe: keys.Recipe) -> Path | None:
    """Download the checkpoint of a ``hub://`` address. Return its folder, or None without one.

    Nothing on the Hub is an error, unless the run pushes to the same repository: then the first
    machine that runs the command starts at step 0, and later machines continue.
    """
    address = recipe.saving.resume_from_checkpoint
    minutes = client.DEADLINE_SECONDS // 60
    log.info(
        f"hub      downloading {address}; if the Hub does not answer, the download is retried for "
        f"{minutes} minutes"
    )
    pushes_there = recipe.hub.pushes_checkpoints and address == f"hub://{recipe.hub.hub_model_id}"
    with stopping.default_signal_actions():
        path = pull.fetch_checkpoint(
            address, recipe.saving.checkpoints, recipe.saving.run_dir, missing_ok=pushes_there
        )
    if path is None:
        log.info(f"hub      {address} contains no checkpoint yet: the run starts at step 0")
    return path


def saved_task_commits(saving: keys.Saving, accelerator: Accelerator) -> dict[str, str]:
    """Return the commits of the task data sets on which this run has been scored, by task.

    They are read from the newest local checkpoint, which is not verified here, because the commits
    only decide which items are read. Every process calls this; the main process reads the file.
    """
    commits: list[dict[str, str]] = [{}]
    if accelerator.is_main_process and saving.resume_from_checkpoint != "none":
        newest = checkpoint_files.list_resume_points(saving.checkpoints)[:1]
        start = local_start(saving)
        if not newest and start:
            newest = [start]
        for path in newest:
            with contextlib.suppress(OSError, ValueError, KeyError):
                commits = [dict(files.read_json(path / STATE)["tasks"])]
    broadcast_object_list(commits)
    return commits[0]


def extended(recipe: keys.Recipe, steps: int) -> keys.Recipe:
    """Return the recipe of a run that continues a finished run for ``steps`` more steps.

    It continues from the last checkpoint before the decay phase, in its own run folder, whose name
    ends in the new number of steps.

    Raises:
        BadInput: the finished run has no such checkpoint, or the recipe states another length.
    """
    saving = recipe.saving
    schedule = recipe.schedule
    if steps < 1:
        raise BadInput(f"--extend_steps {steps}: must be at least 1")
    _check_same_length(recipe)
    # The length of the finished run. If max_hours planned it, the newest checkpoint contains it.
    length = None
    # Find the newest intact checkpoint from before the decay phase.
    for path in checkpoint_files.list_resume_points(saving.checkpoints):
        if checkpoint_files.find_problem(path) is not None:
            continue
        if length is None:
            saved = checkpoint.read_state(path)
            length = planned_length(saved) or _unplanned_length(saved, schedule)
        decay_start = decay_start_step(schedule, length)
        if decay_start is not None and checkpoint_files.step_of(path) <= decay_start:
            break
    else:
        raise BadInput(
            f"--extend_steps: {saving.checkpoints} contains no complete checkpoint from before the "
            f"decay phase. A finished run with --lr_scheduler_type wsd or constant has one, unless "
            f"early stopping ended it with --save_steps 0. Here lr_scheduler_type = "
            f"{schedule.lr_scheduler_type}, save_steps = {saving.save_steps}"
        )
    assert length is not None
    old_suffix = f"-{length.max_steps}"
    new_suffix = f"-{length.max_steps + steps}"
    return keys.replace(
        recipe,
        num_train_epochs=None,
        max_steps=length.max_steps + steps,
        warmup_steps=length.warmup_steps,
        max_hours=0.0,
        run_name=saving.name.removesuffix(old_suffix) + new_suffix,
        output_dir=str(saving.run_dir).removesuffix(old_suffix) + new_suffix,
        resume_from_checkpoint=str(path),
    )


def _check_same_length(recipe: keys.Recipe) -> None:
    """Raise BadInput if a recipe does not state the length of the finished run in its folder."""
    recipe_file = recipe.saving.run_dir / RECIPE
    if not recipe_file.is_file():
        return
    stored = loading.read_run_recipe(recipe_file)
    for name in rules.LENGTH_KEYS:
        value = getattr(recipe.schedule, name)
        if value is not None and value != stored.get(name):
            raise BadInput(
                f"{name} = {value:.15g} is not the length of the finished run in "
                f"{recipe.saving.run_dir}, which --extend_steps extends. Use --recipe "
                f"{paths.quoted(recipe_file)} without --{name}"
            )


def _unplanned_length(saved: dict, schedule: keys.Schedule) -> Length:
    """Return the length of a finished run that ``max_hours`` has not planned.

    Args:
        saved: the ``state.json`` of one of its checkpoints.
        schedule: the schedule of its recipe. If it states num_train_epochs, the checkpoint contains
            the number of steps.
    """
    if schedule.max_steps is not None:
        return Length.of(schedule)
    return Length(saved["science"]["max_steps"], saved["science"]["warmup_steps"])


def other_length(saved: dict, schedule: keys.Schedule) -> Length | None:
    """Return the length of a run that continues a checkpoint with another schedule.

    If ``max_hours`` planned the length of the checkpoint's run, its warm-up stays, because the run
    has been trained with it.

    Args:
        saved: the checkpoint's ``state.json``.
        schedule: the schedule to continue with.

    Returns:
        The new length. None if the schedule has not changed, if the new schedule has other
        learning rates for the steps before the checkpoint, or if ``max_hours`` planned the length
        and still applies.
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
        length = dataclasses.replace(planned, max_steps=schedule.total_steps)
    for step in range(saved["step"]):
        if learning_rate(step, saved_schedule, saved_length) != learning_rate(
            step, schedule, length
        ):
            return None
    return length


@dataclass
class Checkpoints:
    """Loads the checkpoint that a run continues from, and saves new ones.

    ``save`` copies the tensors while training waits; a background thread writes the copies. At the
    end of its ``with`` block the object waits for the last write. If a save fails (a full disk),
    the error is logged, older checkpoints are unchanged and nothing half-written remains.

    Attributes:
        recipe: the complete recipe.
        corpus: the opened data. A checkpoint stores what identifies them.
        model: the model of Transformers, unwrapped.
        optimizer: the optimizer, wrapped by Accelerate.
        accelerator: of this process.
        model_files: the text of the files that make a checkpoint a model that Transformers loads,
            by file name.
        on_disk: called with the path of each checkpoint that is pushed, except the run's last one,
            as soon as it is written, in the background thread. It must not raise.
        saved_step: step of the last complete checkpoint that this process has saved or resumed
            from, or None. Newer checkpoints in the folder belong to a run that went back to an
            earlier step.
        resumed_step: step of the checkpoint that the run has resumed from, or None.
    """

    recipe: keys.Recipe
    corpus: Corpus
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    model_files: Mapping[str, str]
    on_disk: Callable[[Path], None]
    saved_step: int | None = None
    resumed_step: int | None = None
    _writer: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, 1, "checkpoint")
    )
    _writing: Future | None = None
    _writing_step: int = 0
    # The copies are reused, because allocating memory takes longer than copying.
    _copies: dict[str, torch.Tensor] = field(default_factory=dict)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.finish()
        self._writer.shutdown()

    def resume(self) -> tuple[RunState, list[str]]:
        """Load the newest intact checkpoint, if there is one.

        Returns:
            The state of the run, and lines for the user.

        Raises:
            BadInput: the checkpoint is of other hyperparameters or other data.
        """
        recipe = self.recipe
        accelerator = self.accelerator
        path, corrupted = find_checkpoint(recipe, accelerator)
        notes = [f"skipped a corrupted checkpoint: {line}" for line in corrupted]
        if path is None:
            notes += weights_only_notes(recipe.saving.checkpoints)
            return RunState.begin(recipe.schedule), notes

        saved = checkpoint.read_state(path)
        length = other_length(saved, recipe.schedule)
        if length is not None:
            self._change_schedule(saved, length)
        if recipe.schedule.num_train_epochs is not None:
            # Other data would also be another number of steps. This message names the cause.
            self.corpus.check_same_data(path, saved["data"])
        # resume_from_checkpoint may name a checkpoint of another run.
        loading.check_same_hyperparameters(path, saved["science"], recipe)
        self.corpus.check_same_data(path, saved["data"])
        optimizer_spec = OPTIMIZERS[recipe.optimizer.optimizer]
        checkpoint.load(path, self.model, self.optimizer, optimizer_spec.state_tensors)
        if accelerator.scaler is not None and saved["scaler"]:
            accelerator.scaler.load_state_dict(saved["scaler"])
        state = RunState.begin(recipe.schedule, saved)
        if path == local_start(recipe.saving):
            state.origin = checkpoint.origin_of(path)
        if recipe.saving.load_best_model_at_end and not self._has_best(state, path):
            state.forget_best()
        self.saved_step = state.step
        self.resumed_step = state.step
        notes.append(f"resumed from {path}")
        notes += self._resume_notes(state, saved["threads"])
        return state, notes

    def _change_schedule(self, saved: dict, length: Length) -> None:
        """Replace the schedule in a checkpoint's state by that of the recipe."""
        for name, value in dataclasses.asdict(self.recipe.schedule).items():
            if name in saved["science"]:
                saved["science"][name] = value
        if saved["planned"]:
            saved["planned"] = dataclasses.asdict(length)
        saved["since_best"] = 0  # early stopping counts from here

    def _has_best(self, state: RunState, path: Path) -> bool:
        """Return whether the checkpoint with the lowest loss can be loaded at the end of the run.

        It must be in the folder of the checkpoint that the run continues from. If early stopping
        has ended the run, it counts as available, because nothing will be trained any more.
        """
        best = self.recipe.saving.checkpoints / step_name(state.best_step or 0)
        if path.parent != best.parent:
            return False
        return best.is_dir() or state.stops_early(self.recipe.evaluation.early_stopping_patience)

    def _resume_notes(self, state: RunState, saved_threads: int) -> list[str]:
        """Return log lines for the user of a resumed run.

        Args:
            state: the state of the run in the checkpoint.
            saved_threads: number of CPU threads with which the checkpoint was computed.
        """
        notes = []
        if state.planned and self.recipe.schedule.max_hours:
            notes.append(
                f"max_hours has planned {state.max_steps} steps for this run; this length stays"
            )
        if state.step >= state.max_steps:
            notes.append(f"nothing is left to train: max_steps = {state.max_steps} is reached")
        elif state.stops_early(self.recipe.evaluation.early_stopping_patience):
            notes.append(
                f"nothing is left to train: early stopping ended this run at step {state.step} of "
                f"{state.max_steps}. To continue it, use an --early_stopping_patience above "
                f"{state.since_best}, or 0"
            )
        threads = torch.get_num_threads()
        if saved_threads != threads:
            notes.append(
                f"note: the checkpoint was computed with {saved_threads} threads; with {threads} "
                f"the last bits of the results may differ"
            )
        return notes

    def save_alone(self, state: RunState) -> None:
        """Save from this process without the others, for example after it ran out of memory.

        Nothing is saved if the weights or moments are sharded, because the other processes may be
        waiting in another exchange, or if nothing was trained since the last checkpoint.
        """
        can_shard = self.accelerator.is_fsdp2 or self.recipe.optimizer.shard_optimizer
        is_sharded = can_shard and self.accelerator.num_processes > 1
        if state.step > (self.saved_step or 0) and not is_sharded:
            self.save(state, this_process_only=True)

    def save(
        self, state: RunState, *, this_process_only: bool = False, pushes: bool = True
    ) -> None:
        """Copy the state of the run, and start to write it in the background.

        Args:
            state: the state of the run.
            this_process_only: whether no other process calls this. Otherwise every process does,
                and the main process writes.
            pushes: whether ``on_disk`` is called, unless this is the last step.
        """
        self.finish()
        weights, moments = checkpoint.gather(self.model, self.optimizer)
        if not self.accelerator.is_main_process and not this_process_only:
            return
        if self._is_saved(state):
            return
        self.saved_step = state.step
        self._write(state, weights, moments, pushes=pushes)

    def is_kept(self, state: RunState) -> bool:
        """Return whether the checkpoint of this step is kept for a learning curve."""
        return kept_steps.is_kept(
            self.recipe.saving.keep_checkpoints or (),
            state.step,
            self.recipe.batch.tokens_per_step,
            is_last=state.has_ended(self.recipe.evaluation.early_stopping_patience),
        )

    def keep(self, state: RunState) -> None:
        """Save a checkpoint for a learning curve, at a step at which the run saves no other one.

        Every process calls it. With ``keep_optimizer: false`` only the model is saved, unless the
        run has resumed at this step, whose complete checkpoint must stay.
        """
        pushes = self.recipe.hub.hub_strategy == "all_checkpoints"
        if self.recipe.saving.keep_optimizer or state.step == self.resumed_step:
            self.save(state, pushes=pushes)
            return
        self.finish()
        weights = checkpoint.gather_weights(self.model)
        if self.accelerator.is_main_process and not self._is_saved(state):
            self._write(state, weights, None, pushes=pushes)

    def _is_saved(self, state: RunState) -> bool:
        """Return whether this process has a complete checkpoint of this step, kept as it should."""
        path = self.recipe.saving.checkpoints / step_name(state.step)
        if state.step != self.saved_step or checkpoint_files.find_problem(path):
            return False
        # A checkpoint stays kept if the recipe is changed.
        kept = self._kept_as(state)
        return kept is None or checkpoint_files.kept_as(path) is not None

    def _kept_as(self, state: RunState) -> str | None:
        """Return the entry of the manifest for a checkpoint of this step."""
        if not self.is_kept(state):
            return None
        return COMPLETE if self.recipe.saving.keep_optimizer else WEIGHTS

    def _write(
        self,
        state: RunState,
        weights: dict[str, torch.Tensor],
        moments: dict[str, torch.Tensor] | None,
        *,
        pushes: bool,
    ) -> None:
        """Copy the tensors, and start to write a checkpoint in the background.

        Args:
            state: the state of the run.
            weights: see ``checkpoint.Contents``.
            moments: see ``checkpoint.Contents``.
            pushes: whether ``on_disk`` is called, unless this is the last step.
        """
        accelerator = self.accelerator
        saving = self.recipe.saving
        path = saving.checkpoints / step_name(state.step)
        saved_state = {
            **state.saved(),
            "tokens": state.step * self.recipe.batch.tokens_per_step,
            "scaler": accelerator.scaler.state_dict() if accelerator.scaler else None,
            "science": keys.hyperparameters(self.recipe),
            "data": self.corpus.identities(),
            "threads": torch.get_num_threads(),
            "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        }
        contents = checkpoint.Contents(
            self._copy(weights),
            None if moments is None else self._copy(moments),
            saved_state,
            self.model_files,
            self._kept_as(state),
        )
        keep_steps = [self.keep_step(state)]
        if saving.load_best_model_at_end:
            keep_steps.append(state.best_step)
        is_last = state.has_ended(self.recipe.evaluation.early_stopping_patience)

        def write() -> None:
            checkpoint.write(saving.checkpoints, contents, saving.save_total_limit, keep_steps)
            if pushes and not is_last:
                self.on_disk(path)

        self._writing_step = state.step
        self._writing = self._writer.submit(write)

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is on disk. Log an error of the write."""
        writing = self._writing
        self._writing = None
        if writing is None:
            return
        try:
            writing.result()
        except (OSError, SafetensorError) as error:
            fix = ""
            if getattr(error, "errno", None) == errno.ENOSPC:
                fix = f"{space_fix(self.recipe.saving.checkpoints)}; "
            log.error(
                f"the checkpoint of step {self._writing_step} was not saved: {error}: {fix}the run "
                f"continues"
            )

    def _copy(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors to reused CPU memory."""
        copies = {}
        for name, tensor in tensors.items():
            if name not in self._copies:
                self._copies[name] = torch.empty_like(tensor, device="cpu")
            copies[name] = self._copies[name].copy_(tensor)
        return copies

    def keep_step(self, state: RunState) -> int | None:
        """Return the last step before the decay phase, or None if the schedule has no such phase.

        Its checkpoint is never deleted, because --extend_steps continues from it.
        """
        return decay_start_step(self.recipe.schedule, state.length)

    def oldest_step(self, state: RunState) -> int:
        """Return the step of the oldest checkpoint from which the run may be resumed.

        A checkpoint that is kept only because it has the lowest loss does not count.
        """
        paths = checkpoint_files.list_resume_points(self.recipe.saving.checkpoints)
        limit = self.recipe.saving.save_total_limit or len(paths)
        oldest = 0
        for number, path in enumerate(paths):  # newest first
            step = checkpoint_files.step_of(path)
            is_only_best = step == state.best_step and not checkpoint_files.kept_as(path)
            if number < limit or not is_only_best:
                oldest = step
        return oldest

    def load_best(self, state: RunState) -> int:
        """Load the weights with the lowest validation loss, if the recipe requests it.

        Every process calls it. If that checkpoint is corrupted, the last weights stay, and the
        error is logged.

        Returns:
            The step of the weights that the model has now.
        """
        if not self.recipe.saving.load_best_model_at_end or state.best_step in (None, state.step):
            return state.step
        self.finish()
        path = self.recipe.saving.checkpoints / step_name(state.best_step)
        problem: list[str | None] = [None]
        if self.accelerator.is_main_process:
            problem = [checkpoint_files.find_model_problem(path)]
        broadcast_object_list(problem)
        if problem[0]:
            log.error(
                f"{path}, which has the lowest validation loss: {problem[0]}. "
                f"The last weights are kept"
            )
            return state.step
        checkpoint.load_weights(path, self.model)
        return state.best_step
