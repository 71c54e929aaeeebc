"""Recognize folders of tables that other programs write.

A folder of ``Dataset.save_to_disk`` lists its files in ``state.json``, and also contains cache
files. A folder of a table format (Delta, Iceberg, Hudi) also contains files with old rows.
"""

import functools
import json
import logging
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import pluralize
from ursa_minor.recipe.source_kind import COMPRESSED_SUFFIXES, SAVED_STATE

log = logging.getLogger(__name__)

SAVED_SPLITS = "dataset_dict.json"  # written by DatasetDict.save_to_disk
CACHE_INFO = "dataset_info.json"  # in a folder of the cache of load_dataset
MAX_LISTED_FILES = 10_000  # number of files that are examined to suggest a pattern


@dataclass(frozen=True)
class TableFormat:
    """A format of tables that consist of many files.

    Attributes:
        name: its name.
        pattern: a glob pattern that matches in the folder of each table.
        command: a command that writes the current rows to one file, with ``{folder}``, or "".
    """

    name: str
    pattern: str
    command: str = ""


TABLE_FORMATS = (
    TableFormat(
        "Delta",
        "_delta_log",
        "python -c 'import sys, deltalake, pyarrow.parquet as pq; "
        "pq.write_table(deltalake.DeltaTable(sys.argv[1]).to_pyarrow_table(), "
        '"rows.parquet")\' {folder}',
    ),
    TableFormat("Iceberg", "metadata/*.metadata.json"),
    TableFormat("Hudi", ".hoodie"),
)


def check_no_table_format(key: str, name: str) -> None:
    """Check that a local file or folder does not belong to a table of a format of many files.

    Args:
        key: the recipe key or the option, for the message.
        name: a file or folder.

    Raises:
        BadInput: it does.
    """
    path = Path(name).absolute()
    folders = [*path.parents]
    if path.is_dir():
        folders.insert(0, path)
    for folder in folders:
        table_format = _format_of_folder(folder)
        if table_format is None:
            continue
        command = table_format.command.format(folder=shlex.quote(str(folder)))
        export = "Write its current rows to one Parquet file with a program that reads this format"
        if command:
            export += f", for example: {command}"
        raise BadInput(
            f"{key}: {folder} is a table in {table_format.name} format. Its Parquet files cannot "
            f"be read one by one, because they also contain rows that were deleted or replaced. "
            f"{export}"
        )


@functools.cache
def _format_of_folder(folder: Path) -> TableFormat | None:
    """Return the format of the table in a folder, or None."""
    for table_format in TABLE_FORMATS:
        if any(folder.glob(table_format.pattern)):
            return table_format
    return None


def saved_files(folder: Path) -> list[str] | None:
    """Return the files of a folder of ``Dataset.save_to_disk``, in order, or None.

    Raises:
        BadInput: the folder was saved by an old version that stored a selection of rows.
    """
    try:
        state = json.loads((folder / SAVED_STATE).read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise BadInput(
            f"{folder} was saved by an old version of datasets, with a separate selection of rows. "
            f"Load it with datasets.load_from_disk, and save it again in another folder"
        )
    return [str(folder / name) for name in names]


def saved_splits(folder: Path) -> list[str]:
    """Return the splits of a folder of ``DatasetDict.save_to_disk``, or an empty list."""
    try:
        splits = json.loads((folder / SAVED_SPLITS).read_bytes())["splits"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [split for split in splits if (folder / split / SAVED_STATE).is_file()]


def without_cache_files(key: str, names: Sequence[str]) -> list[str]:
    """Leave out files that ``datasets`` has added to its folders, and log their number.

    In a folder of ``Dataset.save_to_disk``, these are the files that ``state.json`` does not list;
    in the cache of ``load_dataset``, those named ``cache-*``. They are left out only if another
    file of the folder is among the names.

    Args:
        key: the recipe key or the option, for the log line.
        names: files in any order.
    """
    names_by_folder: dict[Path, list[str]] = {}
    for name in names:
        names_by_folder.setdefault(Path(name).parent, []).append(name)
    added_files: set[str] = set()
    for folder, names_in_folder in names_by_folder.items():
        data_files = _data_files(folder, names_in_folder)
        if data_files:
            added_files |= set(names_in_folder) - data_files
    result = [name for name in names if name not in added_files]
    num_left_out = len(names) - len(result)
    if num_left_out:
        counted = pluralize(num_left_out, "file", "files")
        log.info(
            f"{key}: leaving out {counted} that datasets added to a saved folder, for example "
            f"{min(added_files)}. Files such as cache-*.arrow contain copies of the rows"
        )
    return result


def _data_files(folder: Path, names: Sequence[str]) -> set[str]:
    """Return those of the files in a folder that contain its rows, not copies of them."""
    saved = saved_files(folder)
    if saved is not None:
        return set(names).intersection(saved)
    if (folder / CACHE_INFO).is_file():
        return {name for name in names if not Path(name).name.startswith("cache-")}
    return set(names)


def files_of_folder(name: str) -> str:
    """Return the value of ``data_files`` that reads a file or the files of a folder, quoted.

    It is a pattern with the most frequent suffix in the folder.
    """
    folder = Path(name)
    if not folder.is_dir() or saved_files(folder):
        return shlex.quote(name)
    splits = saved_splits(folder)
    if splits:
        split = "train" if "train" in splits else splits[0]
        return shlex.quote(str(folder / split))
    suffixes = Counter(map(_suffix, islice(_walk(folder), MAX_LISTED_FILES)))
    suffix = ".txt"
    if suffixes:
        ((suffix, _),) = suffixes.most_common(1)
    pattern = str(folder / "**" / f"*{suffix}")
    return f"'{pattern}'" if shlex.quote(pattern) == pattern else shlex.quote(pattern)


def _walk(folder: Path) -> Iterator[str]:
    """Yield the names of the files in a folder and its subfolders that are not hidden."""
    for _, subfolders, names in os.walk(folder):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (name for name in names if not name.startswith("."))


def _suffix(name: str) -> str:
    """Return the suffix of a file name. That of a compressed file has two parts."""
    path = Path(name)
    if path.suffix.lower() in COMPRESSED_SUFFIXES:
        return Path(path.stem).suffix + path.suffix
    return path.suffix
