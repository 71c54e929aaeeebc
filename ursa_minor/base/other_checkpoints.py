"""Find the checkpoints of other trainers, and the folders of their converted copies.

``model/import_checkpoint.py`` converts a checkpoint. This module does not need torch.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from ursa_minor.base import files
from ursa_minor.base.run_files import CHECKPOINTS, MODEL_FOLDER

# A file with another suffix is not taken for a checkpoint.
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
# Names of the newest checkpoint in the folder that a program writes to, in order of preference.
NANOGPT_FILE = "ckpt.pt"
NUMBERED_FILES = (
    re.compile(r"model_(\d+)\.pt"),  # build-nanogpt
    re.compile(r"model_(\d+)\.bin"),  # llm.c
)


def find_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint file of another trainer that a path names, or None.

    The contents of the file are not checked.

    Args:
        path: the file, or the output folder of nanoGPT (``ckpt.pt``), or the log folder of
            build-nanogpt or llm.c, whose checkpoint with the highest step is returned.
    """
    if path.is_file():
        return path if path.suffix in SUFFIXES else None
    names_of_models = ("config.json", MODEL_FOLDER, CHECKPOINTS)
    if not path.is_dir() or any((path / name).exists() for name in names_of_models):
        return None
    if (path / NANOGPT_FILE).is_file():
        return path / NANOGPT_FILE
    for pattern in NUMBERED_FILES:
        checkpoint = _newest(path, pattern)
        if checkpoint is not None:
            return checkpoint
    return None


def _newest(folder: Path, pattern: re.Pattern) -> Path | None:
    """Return the file with the highest step in its name, or None if no name matches."""
    file_by_step = {}
    for file in folder.iterdir():
        match = pattern.fullmatch(file.name)
        if match is not None:
            file_by_step[int(match[1])] = file
    if not file_by_step:
        return None
    return file_by_step[max(file_by_step)]


def step_of(file: Path) -> int | None:
    """Return the step in the name of a checkpoint, or None if the name has none."""
    for pattern in NUMBERED_FILES:
        match = pattern.fullmatch(file.name)
        if match is not None:
            return int(match[1])
    return None


def cache_folder() -> Path:
    """Return the folder of all converted models."""
    # A relative path is invalid and must be ignored (XDG Base Directory Specification).
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = Path.home() / ".cache"
    return cache / "ursa_minor" / "models"


def converted_folder(file: Path) -> Path:
    """Return the folder for the converted copy of a file. It does not need to exist.

    Its name is the SHA-256 of the file.
    """
    return cache_folder() / _sha256_of(file)


def converted_folder_of_files(paths: Iterable[Path]) -> Path:
    """Return the folder for the converted copy of several files. It does not need to exist.

    Its name is the SHA-256 of the names and hashes of the files.
    """
    rows = [[path.name, _sha256_of(path)] for path in paths]
    return cache_folder() / hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file in its present state."""
    stat = file.stat()
    return _sha256(str(file.resolve()), stat.st_size, stat.st_mtime_ns)


# Cached, because a process asks several times and a checkpoint has gigabytes.
@functools.cache
def _sha256(path: str, size: int, modified: int) -> str:
    """Return the SHA-256 of a file with this size in bytes and time of modification."""
    return files.sha256(Path(path))
