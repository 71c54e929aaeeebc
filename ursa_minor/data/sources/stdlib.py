"""List the source files of Python's standard library, which serve as training text without a network."""

import hashlib
import os
import sysconfig
from pathlib import Path

from ursa_minor.base.errors import BadInput
from ursa_minor.recipe.source_kind import STDLIB

TEST_FOLDERS = {"test", "tests", "idle_test", "testdata", "test_data"}
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "node_modules"}


def stdlib_files(validation_fraction: float) -> dict[str, list[Path]]:
    """Return the standard library's Python files by split, sorted by path.

    A file's split is a hash of its path, so another machine with this Python splits alike. The library's own tests,
    where they are installed (Debian leaves them out), are a ``test`` split, thinned by the same hash.
    """
    root = Path(sysconfig.get_path("stdlib"))
    splits: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - SKIPPED_FOLDERS  # site-packages may hold many thousands
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(found):
        relative = path.relative_to(root)
        if not path.stat().st_size:
            continue
        digest = hashlib.sha256(relative.as_posix().encode()).digest()
        held_out = int.from_bytes(digest[:8]) < validation_fraction * 2**64
        if TEST_FOLDERS & set(relative.parts[:-1]):
            if held_out:
                splits["test"].append(path)
        else:
            splits["validation" if held_out else "train"].append(path)
    if not splits["train"] or not splits["validation"]:
        raise BadInput(
            f"dataset_name = {STDLIB}: {root} holds no Python source to train on; use --data_files FILE..."
        )
    return {split: paths for split, paths in splits.items() if paths}
