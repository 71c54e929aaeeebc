"""List the source files of Python's standard library, which serve as training text offline."""

import hashlib
import os
import sysconfig
from pathlib import Path

from ursa_minor.base.errors import BadInput
from ursa_minor.recipe.source_kind import STDLIB

TEST_FOLDERS = {"test", "tests", "idle_test", "testdata", "test_data"}
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "node_modules"}


def stdlib_files(validation_fraction: float) -> dict[str, list[Path]]:
    """Return the Python files of the standard library by split, sorted by path.

    A hash of the path decides the split of a file, so that the split is the same on every machine
    with this version of Python. The same hash selects the files of the ``test`` split among the
    tests of the library, which some distributions such as Debian do not install.

    Raises:
        BadInput: the train or the validation split is empty.
    """
    root = Path(sysconfig.get_path("stdlib"))
    splits: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
    for path in _python_files(root):
        relative_path = path.relative_to(root)
        digest = hashlib.sha256(relative_path.as_posix().encode()).digest()
        is_selected = int.from_bytes(digest[:8]) < validation_fraction * 2**64
        is_test = not TEST_FOLDERS.isdisjoint(relative_path.parts[:-1])
        if is_test:
            if is_selected:
                splits["test"].append(path)
        elif is_selected:
            splits["validation"].append(path)
        else:
            splits["train"].append(path)
    if not splits["train"] and not splits["validation"]:
        raise BadInput(
            f"dataset_name = {STDLIB}: {root} contains no Python source files. "
            f"Use your own text: --data_files PATH"
        )
    for split in ("train", "validation"):
        if not splits[split]:
            raise BadInput(
                f"validation_fraction = {validation_fraction}: the {split} split of {STDLIB} would "
                f"be empty. Use, for example, --validation_fraction 0.1"
            )
    return {split: paths for split, paths in splits.items() if paths}


def _python_files(root: Path) -> list[Path]:
    """Return the Python files below a folder that are not empty, sorted by path."""
    paths = []
    for folder, subfolders, names in os.walk(root):
        # os.walk visits those that remain. site-packages may contain many thousands of files.
        subfolders[:] = set(subfolders) - SKIPPED_FOLDERS
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and path.stat().st_size > 0:
                paths.append(path)
    return sorted(paths)
