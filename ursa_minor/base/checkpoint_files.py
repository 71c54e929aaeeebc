"""List and verify checkpoints, and find the model of a run. This does not need torch.

A checkpoint is a folder such as ``step-00001000``. ``checkpoint/format.py`` describes its files. A
run can be resumed from it (a resume point), unless it contains only weights.
"""

import contextlib
import functools
import logging
import os
from pathlib import Path

from ursa_minor.base import files, other_checkpoints
from ursa_minor.base.run_files import (
    CHECKPOINTS,
    KEPT,
    MANIFEST,
    MODEL,
    MODEL_FOLDER,
    RECIPE,
    RESUME_FILES,
    STATE,
    STEP,
    TRAINING,
    WEIGHTS,
    read_finish,
    step_name,
)

log = logging.getLogger(__name__)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the paths with the name of a checkpoint, newest first. They are not verified."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if STEP.fullmatch(path.name)]
    return sorted(paths, reverse=True)


def list_resume_points(folder: Path) -> list[Path]:
    """Return the checkpoints that are not weights only, newest first. They are not verified."""
    return [path for path in list_checkpoints(folder) if not is_weights_only(path)]


def kept_as(path: Path) -> str | None:
    """Return how a checkpoint is kept for a learning curve, or None if it is not.

    Returns:
        ``COMPLETE`` or ``WEIGHTS``. None if the manifest cannot be read.
    """
    try:
        return files.read_json(path / MANIFEST).get(KEPT)
    except (OSError, ValueError, AttributeError):
        return None


def kept_contents(folder: Path) -> dict[int, str]:
    """Return the checkpoints in a folder that are kept for a learning curve.

    Returns:
        For each step, ``COMPLETE`` or ``WEIGHTS``.
    """
    contents = {}
    for path in list_checkpoints(folder):
        entry = kept_as(path)
        if entry is not None:
            contents[step_of(path)] = entry
    return contents


def is_weights_only(path: Path) -> bool:
    """Return whether a checkpoint contains only a model, so that no run can be resumed from it.

    The manifest decides. While the optimizer's state is being removed, the folder may still contain
    files that the manifest does not list any more.
    """
    try:
        manifest = files.read_json(path / MANIFEST)
        has_training = any(name.startswith(f"{TRAINING}/") for name in manifest["files"])
        return manifest.get(KEPT) == WEIGHTS and not has_training
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def find_problem(path: Path) -> str | None:
    """Return the problem of a checkpoint, or None if a run can be resumed from it.

    The files that a resumed run reads (``RESUME_FILES``) are compared with the manifest. The other
    files, such as config.json, may be edited. The problem starts with the name of the file.
    """
    name = MANIFEST  # the file that is being read
    try:
        manifest = files.read_json(path / MANIFEST)
        step = manifest["step"]
        if type(step) is not int or path.name != step_name(step):
            return f"{MANIFEST} is of step {step!r:.40}"
        if is_weights_only(path):
            return f"{MANIFEST} lists only weights (keep_optimizer = false)"
        missing_rows = [file for file in RESUME_FILES if file not in manifest["files"]]
        if missing_rows:
            return (
                f"{MANIFEST} does not list {missing_rows[0]}, so another version of Ursa Minor "
                f"wrote this checkpoint"
            )
        for name in RESUME_FILES:
            problem = files.find_problem(path / name, manifest["files"][name])
            if problem:
                return f"{name} {problem}"
        state_step = files.read_json(path / STATE)["step"]
        if state_step != step:
            return f"{STATE} is of step {state_step!r:.40}, {MANIFEST} of step {step}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{name} cannot be read ({_reason(error)})"
    return None


def find_model_problem(path: Path) -> str | None:
    """Return the problem of a checkpoint whose model is to be used, or None if it is intact.

    Only the weights of a checkpoint without the optimizer's state are verified.
    """
    if not is_weights_only(path):
        return find_problem(path)
    try:
        manifest = files.read_json(path / MANIFEST)
        problem = files.find_problem(path / MODEL, manifest["files"][MODEL])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MODEL} cannot be read ({_reason(error)})"
    return f"{MODEL} {problem}" if problem else None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error!s:.60}"


def read_max_steps(run_dir: Path) -> int | None:
    """Return the ``max_steps`` of a run, also if its recipe states ``num_train_epochs``.

    They are stored in each checkpoint, and in ``finished.json``.

    Returns:
        The number, or None if neither file exists or can be read.
    """
    for path in list_checkpoints(run_dir / CHECKPOINTS):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            max_steps = files.read_json(path / STATE)["science"]["max_steps"]
            if type(max_steps) is int:
                return max_steps
    finish = read_finish(run_dir)
    return finish.max_steps if finish else None


def run_folder_of(path: Path) -> Path | None:
    """Return the run folder of a path, or None if it belongs to no run.

    Args:
        path: a run folder, its ``model/`` or one of its checkpoints.
    """
    path = path.resolve()
    candidates = [path]
    if path.name == MODEL_FOLDER:
        candidates.append(path.parent)
    if STEP.fullmatch(path.name) and path.parent.name == CHECKPOINTS:
        candidates.append(path.parent.parent)
    for folder in candidates:
        if (folder / RECIPE).is_file():
            return folder
    return None


def model_folder_of(run_dir: Path) -> Path | None:
    """Return the folder of the model that a path means, or None if the path itself is meant.

    Args:
        run_dir: a run folder, which means its ``model/`` or else its newest intact checkpoint; or
            the checkpoint of another trainer, which means its converted copy. If there is no such
            folder yet, None is returned.
    """
    other_checkpoint = other_checkpoints.find_checkpoint(run_dir)
    if other_checkpoint is not None:
        converted = other_checkpoints.converted_folder(other_checkpoint)
        return converted if converted.is_dir() else None
    if any((run_dir / name).exists() for name in ("config.json", "tokenizer.json")):
        return None
    model_folder = run_dir / MODEL_FOLDER
    if model_folder.is_dir():
        return model_folder
    name = _newest_intact(run_dir.absolute() / CHECKPOINTS)
    return run_dir / CHECKPOINTS / name if name else None


# The result is cached, so that a process uses the same checkpoint each time, even if the run saves
# another one in the meantime.
@functools.cache
def _newest_intact(checkpoints: Path) -> str | None:
    """Return the name of the newest intact checkpoint and log it, or return None."""
    for path in list_checkpoints(checkpoints):
        problem = find_model_problem(path)
        if problem is None:
            run_dir = os.path.relpath(checkpoints.parent)
            log.info(f"{run_dir} has no {MODEL_FOLDER}/ yet; using {CHECKPOINTS}/{path.name}")
            return path.name
        log.info(f"skipped a corrupted checkpoint: {os.path.relpath(path)}: {problem}")
    return None
