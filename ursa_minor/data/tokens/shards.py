"""Token files on disk: their formats, how they are written, the manifest that lists them, whether they are whole.

A shard of ours is llm.c's: 1,024 bytes of header, then the ids of one split, little-endian uint16 or uint32. Files
of llm.c, modded-nanogpt, build-nanogpt and nanoGPT are read where they lie; nothing is written beside them. Nothing
here unpickles. A problem is BadInput: file, what stands there, the rule, the fix.
"""

import functools
import logging
import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO, Literal

import numpy as np
from numpy.lib import format as npy

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput

log = logging.getLogger(__name__)

# llm.c, dev/data/data_common.py: 256 int32 of header: magic, version, number of tokens, zeros; then the ids.
HEADER_BYTES = 1024
SHARD_HEADERS: dict[tuple[int, int], np.dtype] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
MANIFEST = "manifest.json"
# nanoGPT, data/*/prepare.py: uint16 ids and nothing else, so that only the name shows what they are.
HEADERLESS = ("train.bin", "val.bin")
# build-nanogpt's fineweb.py saves uint16. int32 is read as uint32: a negative id becomes one that is beyond every
# vocabulary, and is refused as such.
NPY_DTYPES: dict[str, np.dtype] = {
    "<u2": np.dtype("<u2"),
    "<u4": np.dtype("<u4"),
    "<i4": np.dtype("<u4"),
}
SPLIT_WORDS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
OUR_NAME = re.compile(r"(train|val|test)_\d{5}_\d{5}\.bin")
# FUSE with direct_io maps a file for one process ("c") but does not share the map ("r").
CHECK_TOKENS = 2**24  # ids that are checked in one go: bounds the memory of a check
MAPPING_MODES: tuple[Literal["r", "c"], ...] = ("r", "c")
RESTORE = "put the old file back, or fetch or prepare it again"


@dataclass(frozen=True)
class Shard:
    """A token file of a folder, as the manifest lists it. The fields are the keys of the JSON.

    Attributes:
        file: name of the file in its folder.
        tokens: number of ids.
        text_bytes: size of the encoded text. None if the file was not written by this project.
        sha256: hash of the file. None if the folder has no manifest.
    """

    file: str
    tokens: int
    text_bytes: int | None = None
    sha256: str | None = None

    @property
    def part(self) -> int:
        """Number of the source file that a shard of this project was written from."""
        return int(self.file.split("_")[1])


def count_tokens(shards: Iterable[Shard]) -> int:
    """Return the number of tokens of several shards."""
    return sum(shard.tokens for shard in shards)


def count_text_bytes(shards: Iterable[Shard]) -> int:
    """Return how many bytes of text several shards were encoded from, as far as it is known."""
    return sum(shard.text_bytes or 0 for shard in shards)


def open_ids(path: Path, tokens: int | None = None) -> tuple[np.ndarray, int]:
    """Map a token file of any format that we know: its ids, (tokens,) unsigned and read-only, and where they begin (bytes).

    Raises BadInput for any other file, for one that is damaged, cut short or cannot be read, and where ``tokens``, the
    manifest's count, is another.
    """
    try:
        with open(path, "rb") as file:
            head, size = file.read(12), os.fstat(file.fileno()).st_size
        magic, version, count = struct.unpack("<3i", head.ljust(12, b"\0"))
        if (magic, version) in SHARD_HEADERS:
            offset, dtype = HEADER_BYTES, SHARD_HEADERS[magic, version]
        elif path.suffix == ".npy" or head.startswith(npy.MAGIC_PREFIX):
            array, offset = _map_npy(path)
            if array.ndim != 1 or array.dtype.str not in NPY_DTYPES:
                found = f"shape {array.shape}, dtype {array.dtype.str}: ids are (tokens,) and {', '.join(NPY_DTYPES)}"
                raise ValueError(f"{found}; save it with np.save(path, ids.astype(np.uint16))")
            dtype = NPY_DTYPES[array.dtype.str]
            count = len(array)
        elif path.name in HEADERLESS and magic not in dict(SHARD_HEADERS.keys()):
            offset, dtype, count = 0, np.dtype("<u2"), size // 2
        else:
            known = " or ".join(f"{magic}, {version} (llm.c)" for magic, version in SHARD_HEADERS)
            rule = f"a token file begins with {known} or is named *.npy, {' or '.join(HEADERLESS)}"
            raise ValueError(f"begins with {magic}, {version}: {rule}")
        if size != (expected := offset + count * dtype.itemsize):
            raise ValueError(
                f"{count} tokens take {expected} bytes, the file has {size}: cut short or damaged"
            )
        if tokens not in (None, count):
            raise ValueError(f"has {count} tokens, {MANIFEST} says {tokens}: changed since then")
        mapped = _map(path, dtype, offset, count)
    except OSError as error:  # among them: too many open files
        raise BadInput(f"{path}: cannot be read: {error.strerror}; {RESTORE}") from None
    except Exception as error:  # of a damaged .npy, ast and tokenize raise their own
        raise BadInput(f"{path}: {error}; {RESTORE}") from None
    return np.asarray(mapped), offset  # a slice of the np.memmap class costs microseconds more


def check_ids(path: Path, ids: np.ndarray, offset: int, vocab_size: int) -> None:
    """Check every id of a token file.

    Args:
        ids: (tokens,) unsigned ids and ``offset``, their start in the file in bytes, as ``open_ids`` returns them.

    Raises:
        BadInput: an id is out of the vocabulary.
    """
    for start in range(0, len(ids), CHECK_TOKENS):
        some = ids[start : start + CHECK_TOKENS]
        check_ids_in_vocabulary(
            path,
            some,
            vocab_size,
            start=start,
            offset=offset + start * ids.itemsize,
            item_bytes=ids.itemsize,
        )


def check_ids_in_vocabulary(
    path: Path, ids: np.ndarray, vocab_size: int, *, start: int, offset: int, item_bytes: int
) -> None:
    """Raise BadInput if one of the ids is out of the vocabulary. The message names the first one and its place.

    Args:
        path: the token file.
        ids: (n,) some of its ids.
        start: number of the first of these ids within the file.
        offset: position of the first of these ids in the file, in bytes.
        item_bytes: bytes of an id in the file.
    """
    if ids.max() < vocab_size:
        return
    place = int(np.argmax(ids >= vocab_size))
    raise BadInput(
        f"{path}: offset {offset + place * item_bytes}: token {start + place} is id {int(ids[place])}, "
        f"vocab_size = {vocab_size} ends at {vocab_size - 1}: "
        f"these shards belong to another tokenizer, or vocab_size is too small"
    )


def _map(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    """Map the ids of a file into memory, or read them where the file system cannot map files."""
    for mode in MAPPING_MODES:
        with files.ignoring_errors(files.NO_MAPPING):
            mapped = np.memmap(path, dtype, mode=mode, offset=offset, shape=(count,))
            mapped.setflags(write=False)
            return mapped
    _log_reading(path.parent)
    ids = np.fromfile(path, dtype, count=count, offset=offset)
    ids.setflags(write=False)
    return ids


def _map_npy(path: Path) -> tuple[np.ndarray, int]:
    """Map or read a file in NumPy's format; return its array, and the bytes before it."""
    for mode in MAPPING_MODES:
        with files.ignoring_errors(files.NO_MAPPING):
            mapped = npy.open_memmap(path, mode=mode)
            return mapped, mapped.offset
    with open(path, "rb") as file:
        array = npy.read_array(file, allow_pickle=False)
        return array, file.tell() - array.nbytes


@functools.cache
def _log_reading(folder: Path) -> None:
    log.warning(
        f"{folder}: this file system cannot map files into memory, so its token files are read into memory. If that is "
        f"too much, copy the folder to another file system and name it with --data_dir"
    )


class ShardWriter:
    """Writes the ids of one source file (``part``) of one split as shards.

    Shards are ``{split}_{part}_{number}.bin``, both five digits, so that sorted names are the order; llm.c's word
    for validation is val. One that is not finished has a name that begins with a dot, and no magic.

    Args:
        first_number: number of the first shard to write: how many of this part are there already.
        bytes_per_token: (vocabulary,) int64, bytes of text that each id stands for; up to 65,536 of them the ids are
            uint16, above it uint32.
        shard_tokens: most tokens of a shard; llm.c's header counts with an int32.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        part: int,
        first_number: int,
        bytes_per_token: np.ndarray,
        shard_tokens: int,
    ):
        if part > 99_999:
            raise BadInput(
                f"{folder}: source file {part}: shard names count to 99999; join the source files"
            )
        word = "val" if split == "validation" else split
        self.folder, self.prefix, self.number = folder, f"{word}_{part:05d}_", first_number
        self.bytes_per_token, self.shard_tokens = bytes_per_token, shard_tokens
        self.format, self.dtype = list(SHARD_HEADERS.items())[len(bytes_per_token) > 2**16]
        self._file: BinaryIO | None = None

    def fill(self, ids: np.ndarray, begin: int = 0) -> Iterator[tuple[Shard, int]]:
        """Write the ids of a document from ``begin`` on.

        Yields:
            Each shard that they fill, and the index of the first id that is not in it.
        """
        while begin < len(ids):
            if self._file is None:
                self._path = self.folder / f"{self.prefix}{self.number:05d}.bin"
                self._temporary = self._path.with_name(f".{self._path.name}.tmp")
                self._tokens, self._text_bytes = 0, 0
                self._file = open(self._temporary, "wb")
                self._file.seek(HEADER_BYTES)  # what is left out are zeros
            some = ids[begin : begin + self.shard_tokens - self._tokens]
            with files.naming(self._path):
                self._file.write(some.astype(self.dtype).data)
            self._tokens += len(some)
            self._text_bytes += int(self.bytes_per_token[some].sum())
            begin += len(some)
            if self._tokens == self.shard_tokens:
                shard = self.finish()
                assert shard is not None  # it contains the ids that were just written
                yield shard, begin

    def finish(self) -> Shard | None:
        """Make the current shard durable and return it. Return None if there is no current shard."""
        if self._file is None:
            return None
        with files.naming(self._path):
            self._file.seek(0)
            self._file.write(struct.pack("<3i", *self.format, self._tokens))
            self._file.close()
        sha256 = files.sha256(self._temporary)
        files.fsync(self._temporary)
        self._temporary.replace(self._path)
        files.fsync(self.folder)
        self._file = None
        self.number += 1
        return Shard(self._path.name, self._tokens, self._text_bytes, sha256)


def split_of(path: PurePath) -> str | None:
    """Return the split that the name of a file of ids says, None where it says none. Raises BadInput where it says two."""
    # macOS puts a "._fineweb_train_000001.bin" beside each file that it copies to other file systems.
    if path.suffix not in (".bin", ".npy") or path.name.startswith("."):
        return None
    named = {SPLIT_WORDS[word] for word in path.stem.split("_") if word in SPLIT_WORDS}
    if len(named) > 1:
        raise BadInput(f"{path}: its name says {' and '.join(sorted(named))}; rename it to say one")
    return next(iter(named), None)
