"""The definition of a token-file format. Each module in ``formats`` contains one."""

import functools
import logging
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from ursa_minor.base import files, shell

log = logging.getLogger(__name__)

RESTORE = "Restore the original file, or download or prepare it again"
# FUSE with direct_io supports private mappings ("c") but not shared ones ("r").
MAPPING_MODES: tuple[Literal["r", "c"], ...] = ("r", "c")
HEAD_BYTES = 16  # number of bytes at the beginning of a file that recognize its format
CHECKED_ENTRIES = 2**20  # number of entries of an index that are checked at a time


class IdLayout(NamedTuple):
    """Where the ids of a token file are stored.

    Attributes:
        offset: position of the first id in the file, in bytes.
        dtype: type of an id.
        num_tokens: number of ids.
    """

    offset: int
    dtype: np.dtype
    num_tokens: int

    @property
    def file_size(self) -> int:
        """Size of the file in bytes. The ids are at its end."""
        return self.offset + self.num_tokens * self.dtype.itemsize


class Positions(Protocol):
    """Positions in a file in ascending order: an array, or an object that reads from an index."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any) -> Any: ...


def no_side_files(path: Path) -> list[Path]:
    """Return an empty list, for formats without side files."""
    return []


def nothing_stated(path: Path) -> None:
    """Return None, for formats that do not state the tokenizer or the documents of a file."""


@dataclass(frozen=True)
class TokenFormat:
    """A format of token files.

    The functions raise BadInput for files that must be converted, and ValueError for files that
    are corrupted.

    Attributes:
        name: name of the format in messages.
        suffix: the ending of the names of its files.
        recognizes: whether a file has this format, by its path and its first ``HEAD_BYTES`` bytes.
            Formats that are recognized by their contents or side files come first in
            ``shards.FORMATS``.
        read_layout: return where the ids of a file are stored.
        names: file names that recognize the format without its contents, for messages.
        companion: a side file that recognizes the format, for messages.
        side_files: return the paths of the files that may accompany a file.
        read_document_ends: return the position at which each document ends, in ids and without
            empty documents, or None if the file does not state them. Every entry of an index is
            checked.
        tokenizer_name: return the name or path of the tokenizer that a file states, or None.
        checked: what opening a file compares with its size, for ``prepare_data.py --verify``.
    """

    name: str
    suffix: str
    recognizes: Callable[[Path, bytes], bool]
    read_layout: Callable[[Path], IdLayout]
    names: tuple[str, ...] = ()
    companion: str | None = None
    side_files: Callable[[Path], list[Path]] = no_side_files
    read_document_ends: Callable[[Path], Positions | None] = nothing_stated
    tokenizer_name: Callable[[Path], str | None] = nothing_stated
    checked: str = "the header"


def check_document_ends(index: Path, ends: Positions, num_tokens: int) -> Positions:
    """Check the ends of the documents of a file, and leave out empty documents.

    Args:
        index: the file that states the ends, for messages.
        ends: (documents,) the position in the file, in ids, at which each document ends.
        num_tokens: number of ids in the file.

    Returns:
        The ends of the documents that are not empty: ``ends``, or a copy in memory if some
        documents are empty.

    Raises:
        ValueError: the ends are not in order, or do not cover the file.
    """
    previous = 0
    has_empty_documents = False
    for start in range(0, len(ends), CHECKED_ENTRIES):
        some_ends = np.asarray(ends[start : start + CHECKED_ENTRIES])
        if some_ends.max() > num_tokens:
            raise ValueError(
                f"{index.name} is corrupted or belongs to another file: a document ends at token "
                f"{some_ends.max()}, but the file has {num_tokens} tokens"
            )
        lengths = np.diff(some_ends.astype(np.int64), prepend=previous)
        if lengths.min() < 0:
            document = start + int(np.argmax(lengths < 0))
            raise ValueError(
                f"{index.name} is corrupted: document {document} ends before it begins"
            )
        has_empty_documents = has_empty_documents or lengths.min() == 0
        previous = int(some_ends[-1])
    if previous != num_tokens:
        raise ValueError(
            f"{index.name} is truncated or belongs to another file: its documents end at token "
            f"{previous}, but the file has {num_tokens} tokens"
        )
    if not has_empty_documents:
        return ends
    positions = np.unique(np.asarray(ends[:]))
    return positions[positions > 0]


def map_array(path: Path, dtype: np.dtype, offset: int, length: int) -> np.ndarray:
    """Map an array in a file into memory, or read it if the file system cannot map files.

    Args:
        path: the file.
        dtype: type of an element.
        offset: position of the first element in the file, in bytes.
        length: number of elements.

    Returns:
        (length,), read-only.
    """
    if not length:  # an empty file cannot be mapped
        empty = np.empty(0, dtype)
        empty.setflags(write=False)
        return empty
    for mode in MAPPING_MODES:
        with files.ignoring_errors(files.NO_MAPPING):
            mapped = np.memmap(path, dtype, mode=mode, offset=offset, shape=(length,))
            mapped.setflags(write=False)
            # Slicing an instance of np.memmap would take microseconds longer.
            return np.asarray(mapped)
    _log_reading(path.parent)
    array = np.fromfile(path, dtype, count=length, offset=offset)
    array.setflags(write=False)
    return array


@functools.cache  # once per folder
def _log_reading(folder: Path) -> None:
    log.warning(
        f"{folder}: this file system cannot map files into memory, so the token files are read "
        f"completely. If they do not fit into memory, copy the folder to another file system, and "
        f"use the copy: --data_dir FOLDER"
    )


def conversion_command(path: Path, dtype: str, new_dtype: str) -> str:
    """Return a command that writes the ids of a file to a new folder as .npy.

    Args:
        path: a file that contains only ids.
        dtype: type of the ids, as an expression of Python.
        new_dtype: type of the ids in the new file.
    """
    folder = path.parent.with_name(f"{path.parent.name}-npy")
    new_path = folder / f"{path.stem}.npy"
    code = (
        f"import numpy as np; ids = np.fromfile({str(path)!r}, {dtype}); "
        f"np.save({str(new_path)!r}, ids.astype({new_dtype}))"
    )
    return (
        f"mkdir -p {shell.path_word(folder)} && python -c {shlex.quote(code)}, "
        f"and use --data_dir {shell.path_word(folder)}"
    )
