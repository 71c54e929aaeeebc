"""Check a run folder before training, and lock it against a second trainer."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ursa_minor.base import checkpoint_files, console, files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import (
    FINISH,
    LOG,
    MODEL_FOLDER,
    PARTIAL,
    PENDING,
    RECIPE,
    STEP,
    TENSORBOARD,
    TRACKER_IDS,
    clear_partial,
    read_finish,
)
from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.recipe import keys, loading
from ursa_minor.run.resume import local_start


def check_run_folder(recipe: keys.Recipe) -> None:
    """Check that the run folder can be used for the run.

    Before ``max_steps`` are computed from ``num_train_epochs``, the length of the run is not
    compared with that of the run in the folder. Call this again when they are known.

    Raises:
        BadInput: it cannot be written, is not a run folder, contains a run with other
            hyperparameters, or contains checkpoints that ``resume_from_checkpoint`` forbids.
    """
    saving = recipe.saving
    run_dir = saving.run_dir
    for path in (run_dir, saving.checkpoints, run_dir / MODEL_FOLDER, run_dir / PENDING):
        problem = files.find_folder_problem(path)
        if problem:
            raise BadInput(
                f"output_dir = {run_dir}: {problem}. Correct that, or use another --run_name or "
                f"--output_dir"
            )
    start = local_start(saving)
    if start:
        checkpoint.find_newest(saving.checkpoints, start)

    recipe_file = run_dir / RECIPE
    if not recipe_file.is_file():
        if _contains_other_files(run_dir):
            raise BadInput(
                f"output_dir = {run_dir} contains files but no recipe.yaml, so it is not a run "
                f"folder. Use another --output_dir"
            )
        return
    if contains_results(saving):
        earlier = keys.hyperparameters(_recipe_to_compare(run_dir, recipe))
        loading.check_same_hyperparameters(recipe_file, earlier, recipe)
    starts_anew = saving.resume_from_checkpoint == "none"
    if starts_anew and checkpoint_files.list_checkpoints(saving.checkpoints):
        raise BadInput(
            f"resume_from_checkpoint = none: {run_dir} contains checkpoints; use another "
            f"{saving.option_of_another_run}"
        )


def _recipe_to_compare(run_dir: Path, recipe: keys.Recipe) -> keys.Recipe:
    """Return the recipe of a run folder, without ``max_steps`` if only other data changes them.

    Then the comparison of the data with a checkpoint names the cause.
    """
    earlier = loading.load_run_recipe(run_dir)
    epochs = earlier.schedule.num_train_epochs
    has_same_epochs = epochs is not None and epochs == recipe.schedule.num_train_epochs
    if has_same_epochs and earlier.schedule.max_steps != recipe.schedule.max_steps:
        return keys.replace(earlier, max_steps=None)
    return earlier


def _contains_other_files(run_dir: Path) -> bool:
    """Return whether a folder contains anything that the start of a run has not created."""
    if not run_dir.is_dir():
        return False
    return any(
        path.name != files.LOCK_FILE and not PARTIAL.fullmatch(path.name)
        for path in run_dir.iterdir()
    )


def contains_results(saving: keys.Saving) -> bool:
    """Return whether a run folder contains anything that another run would damage.

    That is a checkpoint (intact or corrupted), a model, or a push that was not sent. A folder
    without them may be used for another run.
    """
    run_dir = saving.run_dir
    if checkpoint_files.list_checkpoints(saving.checkpoints):
        return True
    pending = run_dir / PENDING
    if pending.is_dir() and any(STEP.fullmatch(path.name) for path in pending.iterdir()):
        return True
    models = [run_dir / MODEL_FOLDER, *run_dir.glob(f".{MODEL_FOLDER}.old-*")]
    return any(os.path.lexists(path) for path in models)


def nothing_left(recipe: keys.Recipe, accelerator: Accelerator) -> str | None:
    """Return a line for the user if the run has finished and left no checkpoint of its last step.

    Otherwise return None. (A run with a checkpoint of its last step is resumed from it, and writes
    its model again.) Every process calls this, and the main process decides.

    Raises:
        BadInput: on all processes, if the command requests more training but the run has no
            checkpoint to continue from. It would otherwise train from the start and replace the
            finished model.
    """
    line: str | None = None
    problem: list[str] = []
    if accelerator.is_main_process:
        try:
            line = _describe_finish(recipe)
        except BadInput as error:
            problem = error.lines
    decision: list = [line, problem]
    broadcast_object_list(decision)
    line, problem = decision
    if problem:
        raise BadInput(problem)
    return line


def _describe_finish(recipe: keys.Recipe) -> str | None:
    """Do the work of ``nothing_left`` on the main process."""
    saving = recipe.saving
    run_dir = saving.run_dir
    if not (run_dir / MODEL_FOLDER).is_dir():
        return None
    # None if the run was killed between writing model/ and this file.
    finish = read_finish(run_dir)
    if _may_have_other_length(recipe):
        return None  # the data is opened first, and then the lengths are compared
    has_checkpoints = bool(checkpoint_files.list_resume_points(saving.checkpoints))
    if has_checkpoints and (finish is None or finish.has_checkpoint):
        return None

    start = local_start(saving)
    if start and finish and not checkpoint.matches_origin(finish.origin, start):
        if start.resolve().parent == saving.checkpoints.resolve():
            return None  # the run goes back to one of its own checkpoints
        raise BadInput(
            f"resume_from_checkpoint = {start}: {run_dir} contains a finished run that did not "
            f"start from it; use another {saving.option_of_another_run}"
        )

    patience = recipe.evaluation.early_stopping_patience
    if finish and finish.stopped_early and not 0 < patience <= finish.since_best:
        if has_checkpoints:
            return None
        raise BadInput(
            f"early_stopping_patience = {patience}: early stopping ended the run in {run_dir} at "
            f"step {finish.step}, and it has no checkpoint to continue from (save_steps was 0); "
            f"use another {saving.option_of_another_run}"
        )
    step = f" at step {finish.step}" if finish else ""
    return (
        f"nothing is left to train: the run in {run_dir} finished{step}, and its model is "
        f"{run_dir / MODEL_FOLDER}. To train again, use another {saving.option_of_another_run}"
    )


def _may_have_other_length(recipe: keys.Recipe) -> bool:
    """Return whether a run of unknown length states another length than the run in its folder."""
    schedule = recipe.schedule
    if schedule.max_steps is not None:
        return False
    earlier = loading.load_recipe(recipe.saving.run_dir / RECIPE)
    return earlier.schedule.num_train_epochs != schedule.num_train_epochs


@contextlib.contextmanager
def locked(recipe: keys.Recipe, accelerator: Accelerator) -> Iterator[None]:
    """Create the run folder, and lock it during the block so that no other trainer uses it.

    Every process calls it. The main process has the lock. It writes recipe.yaml, deletes the
    remains of interrupted writes, and starts the log file.

    Raises:
        BadInput: another process is training in the folder.
    """
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
        yield
        return
    saving = recipe.saving
    run_dir = saving.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    busy = (
        f"output_dir = {run_dir}: process {{pid}} is training there; stop it, or use another "
        f"{saving.option_of_another_run}"
    )
    with files.locked(run_dir / files.LOCK_FILE, busy, users="trainers"):
        clear_partial(run_dir)
        checkpoint.clear_interrupted(saving.checkpoints)
        recipe_file = run_dir / RECIPE
        text = keys.as_yaml(recipe)
        is_other_recipe = recipe_file.is_file() and recipe_file.read_bytes() != text.encode()
        if is_other_recipe and not contains_results(saving):
            # The curves of another run, which has left nothing else, would be continued.
            for name in (TRACKER_IDS, FINISH, TENSORBOARD):
                files.remove(run_dir / name)
        files.write_text(recipe_file, text)
        console.log_to_file(run_dir / LOG)
        accelerator.wait_for_everyone()
        yield
