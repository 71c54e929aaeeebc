"""List the models that the values of --model mean, with the run, step and tokens of each.

Does not import torch, unless a checkpoint of another trainer must be converted.
"""

import contextlib
import glob
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ursa_minor.base import checkpoint_files, files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import (
    CHECKPOINTS,
    MANIFEST,
    MODEL,
    MODEL_FILE,
    MODEL_FOLDER,
    RECIPE,
    STATE,
    STEP,
    read_finish,
    step_name,
)
from ursa_minor.model.resolve import resolve_model
from ursa_minor.recipe import loading

PATTERN = re.compile(r"[*?\[]")
OLD_WEIGHTS = "pytorch_model"  # beginning of the names of weights that are not in safetensors
OPTION = "--model "
HASH_DIGITS = 16


@dataclass(frozen=True)
class ListedModel:
    """A model to score.

    Attributes:
        name: a path or Hub id, for messages and files.
        location: what ``pretrained.load`` expects.
        run_dir: the folder of its run, or None if the model belongs to no run.
        step: the updates after which it was saved, or None if unknown.
        tokens: the tokens that it was trained on, or None if unknown.
    """

    name: str
    location: str
    run_dir: Path | None = None
    step: int | None = None
    tokens: int | None = None

    @property
    def run(self) -> str | None:
        """The run folder as a relative path, or None if the model belongs to no run."""
        return os.path.relpath(self.run_dir) if self.run_dir else None


@dataclass(frozen=True)
class ModelList:
    """The models of a command line.

    Attributes:
        models: the models to score, in order.
        problems: a message for each checkpoint or run that contains no model.
        skipped: the other paths that contain no model, such as files.
    """

    models: list[ListedModel]
    problems: list[str]
    skipped: list[str]


def is_pattern(name: str) -> bool:
    """Return whether a value of --model is a pattern with ``*``, ``?`` or ``[...]``."""
    return PATTERN.search(name) is not None and not Path(name).exists()


def list_models(names: Sequence[str]) -> ModelList:
    """Return the models that paths, patterns and Hub ids mean. Each model is listed once.

    Raises:
        BadInput: a pattern matches nothing, a path does not exist, or there is no model.
    """
    models: dict[str, ListedModel] = {}
    problems = []
    skipped = []
    for name in _expand(names):
        is_path = Path(name).exists()
        try:
            location = resolve_model(name)
        except BadInput as error:
            if not is_path:
                raise
            if _should_be_model(Path(name)):
                problems.append(str(error))
            else:
                skipped.append(name)
            continue
        if is_path:
            models.setdefault(str(Path(location).resolve()), _describe(name, location))
        else:
            models.setdefault(name, ListedModel(name, location))

    if not models:
        reason = "no file or folder that it matches is a model. Use the checkpoints of a run"
        message = f"{OPTION}{' '.join(names)}: {reason}: --model 'RUN_FOLDER/{CHECKPOINTS}/*'"
        raise BadInput([*problems, message])
    return ModelList(list(models.values()), problems, skipped)


def _expand(names: Sequence[str]) -> list[str]:
    """Return the paths and Hub ids, each once, with the matches instead of a pattern."""
    expanded = []
    for name in names:
        if not is_pattern(name):
            expanded.append(name)
            continue
        matches = sorted(glob.glob(name))
        if not matches:
            raise BadInput(
                f"{OPTION}'{name}': no file or folder matches. Use the checkpoints of a run: "
                f"--model 'RUN_FOLDER/{CHECKPOINTS}/*'"
            )
        expanded += matches
    paths = [os.path.normpath(name) if Path(name).exists() else name for name in expanded]
    return list(dict.fromkeys(paths))


def _should_be_model(path: Path) -> bool:
    """Return whether a path that contains no model is a checkpoint or a run."""
    return STEP.fullmatch(path.name) is not None or (path / RECIPE).is_file()


def _describe(name: str, location: str) -> ListedModel:
    """Return a model of this machine with its run, step and tokens."""
    folder = Path(location)
    run_dir = checkpoint_files.run_folder_of(folder)
    step = None
    if STEP.fullmatch(folder.name):
        step = checkpoint_files.step_of(folder)
        if run_dir is None:  # a copy without the recipe
            parent = folder.resolve().parent
            run_dir = parent.parent if parent.name == CHECKPOINTS else parent
    elif run_dir is not None and folder.name == MODEL_FOLDER:
        finish = read_finish(run_dir)
        if finish is not None:
            step = finish.step if finish.weights_step is None else finish.weights_step
    tokens = _tokens(folder, run_dir, step)
    return ListedModel(name, location, run_dir, step, tokens)


def _tokens(folder: Path, run_dir: Path | None, step: int | None) -> int | None:
    """Return the tokens of a model: those in its state.json, or else the steps times their size."""
    if step is None or run_dir is None:
        return None
    tokens = None
    # A checkpoint with weights only has no such file.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        tokens = files.read_json(folder / STATE)["tokens"]
    if type(tokens) is int:
        return tokens
    if step == 0:
        return 0
    try:
        tokens_per_step = loading.read_run_recipe(run_dir / RECIPE).get("tokens_per_step")
    except BadInput:
        return None
    return step * tokens_per_step if type(tokens_per_step) is int else None


def fingerprint(model: ListedModel) -> str | None:
    """Verify the weights of a model, and return a hash of the files that Transformers loads.

    Returns:
        The beginning of a SHA-256, or None for a model of the Hub.

    Raises:
        BadInput: a file cannot be read, or differs from the manifest of the checkpoint.
    """
    folder = Path(model.location)
    if not folder.is_dir():
        return None
    hashes = {}
    try:
        for path in sorted(folder.iterdir()):
            if MODEL_FILE.fullmatch(path.name) or path.name.startswith(OLD_WEIGHTS):
                hashes[path.name] = files.sha256(path)
    except OSError as error:
        raise BadInput(f"{OPTION}{model.name}: {error.filename}: {error.strerror}") from None
    problem = _find_problem(folder, hashes.get(MODEL))
    if problem:
        raise BadInput(
            f"{OPTION}{model.name}: {problem}. Restore this checkpoint from a copy, or leave it out"
        )
    return hashlib.sha256(files.to_json(hashes).encode()).hexdigest()[:HASH_DIGITS]


def _find_problem(folder: Path, sha256: str | None) -> str | None:
    """Return how a checkpoint differs from its manifest, or None if it does not or has none.

    Args:
        sha256: that of the weights, or None if they are missing.
    """
    if not (folder / MANIFEST).exists():
        return None
    try:
        manifest = files.read_json(folder / MANIFEST)
        step = manifest["step"]
        expected_hash = manifest["files"][MODEL]["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    is_checkpoint = STEP.fullmatch(folder.name) is not None
    if is_checkpoint and (type(step) is not int or folder.name != step_name(step)):
        return f"{MANIFEST} is of step {step!r:.40}"
    if sha256 is None:
        return f"{MODEL} is missing"
    if sha256 != expected_hash:
        return f"{MODEL} is corrupted (SHA-256 mismatch)"
    return None
