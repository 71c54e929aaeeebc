"""The run folder: whose it is, and one trainer at a time."""

import contextlib
import os
from collections.abc import Iterator

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ursa_minor.base import console, files
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
from ursa_minor.run.resume import begins_at


def check_run_folder(recipe: keys.Recipe) -> None:
    """Raise BadInput when the run folder holds another recipe's run, or is not a run folder."""
    run_dir, asked = recipe.saving.run_dir, recipe.saving.resume_from_checkpoint
    option = recipe.saving.option_of_another_run
    old = run_dir / RECIPE
    for place in (run_dir, recipe.saving.checkpoints, run_dir / MODEL_FOLDER, run_dir / PENDING):
        if problem := files.unusable(place):
            raise BadInput(
                f"output_dir = {run_dir}: {problem}; give another --run_name or --output_dir, or correct that"
            )
    if begin := begins_at(recipe.saving):
        checkpoint.find_newest(recipe.saving.checkpoints, begin)
    if not old.is_file():
        found = run_dir.iterdir() if run_dir.is_dir() else ()
        if any(path.name != files.LOCK_FILE and not PARTIAL.fullmatch(path.name) for path in found):
            raise BadInput(
                f"output_dir = {run_dir}: has files and no recipe.yaml: not a run folder of ours"
            )
        return
    if holds_results(recipe.saving):
        loading.check_same_hyperparameters(
            old, keys.hyperparameters(loading.load_recipe(old)), recipe
        )
    if asked == "none" and checkpoint.list_checkpoints(recipe.saving.checkpoints):
        raise BadInput(
            f"resume_from_checkpoint = none: {run_dir} holds checkpoints; give another {option}"
        )


def holds_results(saving: keys.Saving) -> bool:
    """Return whether a run folder holds what another run would spoil: a checkpoint, sound or not, a model, a push.

    Without them nothing is kept of a run, and its folder may be used for another one.
    """
    run_dir, pushes = saving.run_dir, saving.run_dir / PENDING
    models = [run_dir / MODEL_FOLDER, *run_dir.glob(f".{MODEL_FOLDER}.old-*")]
    staged = pushes.is_dir() and any(STEP.fullmatch(path.name) for path in pushes.iterdir())
    return (
        bool(checkpoint.list_checkpoints(saving.checkpoints))
        or staged
        or any(map(os.path.lexists, models))
    )


def nothing_left(recipe: keys.Recipe, accelerator: Accelerator) -> str | None:
    """Return a line for the user if the run has finished and has no checkpoint of its end, else None.

    Every process calls it, and the main process decides. A run with a checkpoint of its end is resumed from there, and
    its model is written again.

    Raises BadInput, on all processes, if the command asks for more training but the run has no checkpoint to continue
    from. It would otherwise train from the start and replace the finished model.
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
    saving = recipe.saving
    run_dir = saving.run_dir
    if not (run_dir / MODEL_FOLDER).is_dir():
        return None
    finish = read_finish(run_dir)  # None if a kill came between writing model/ and this file
    has_checkpoints = bool(checkpoint.list_checkpoints(saving.checkpoints))
    if has_checkpoints and (finish is None or finish.has_checkpoint):
        return None

    begin = begins_at(saving)
    if begin and finish and not checkpoint.began_at(finish.origin, begin):
        if begin.resolve().parent == saving.checkpoints.resolve():
            return None  # the run goes back to one of its checkpoints
        raise BadInput(
            f"resume_from_checkpoint = {begin}: {run_dir} contains a finished run that did not start there; "
            f"give another {saving.option_of_another_run}"
        )

    patience = recipe.evaluation.early_stopping_patience
    if finish and finish.stopped_early and not 0 < patience <= finish.since_best:
        if has_checkpoints:
            return None
        raise BadInput(
            f"early_stopping_patience = {patience}: early stopping ended the run in {run_dir} at step {finish.step}, "
            f"and it has no checkpoint to continue from (save_steps was 0); "
            f"give another {saving.option_of_another_run}"
        )
    step = f" at step {finish.step}" if finish else ""
    return (
        f"nothing is left to train: the run in {run_dir} finished{step}, and its model is {run_dir / MODEL_FOLDER}. "
        f"To train again, give another {saving.option_of_another_run}"
    )


@contextlib.contextmanager
def held(recipe: keys.Recipe, accelerator: Accelerator) -> Iterator[None]:
    """Make the run folder and hold it inside the block: one trainer a folder."""
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
        yield
        return
    run_dir = recipe.saving.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    option = recipe.saving.option_of_another_run
    busy = f"output_dir = {run_dir}: process {{pid}} is training there; stop it, or give another {option}"
    with files.locked(run_dir / files.LOCK_FILE, busy, users="trainers"):
        clear_partial(run_dir)
        clear_partial(recipe.saving.checkpoints)
        path, text = run_dir / RECIPE, keys.as_yaml(recipe)
        if (
            not holds_results(recipe.saving)
            and path.is_file()
            and path.read_bytes() != text.encode()
        ):
            for name in (TRACKER_IDS, FINISH, TENSORBOARD):  # new curves: those are another run's
                files.remove(run_dir / name)
        files.write_text(path, text)
        console.log_to_file(run_dir / LOG)
        accelerator.wait_for_everyone()
        yield
