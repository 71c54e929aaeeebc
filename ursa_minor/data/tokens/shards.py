"""Token files on disk: their formats, and how they are read, checked and written.

This project writes the format of llm.c: a header of 1,024 bytes and then the ids of one split as
little-endian uint16 or uint32. It also reads files of llm.c, modded-nanogpt, build-nanogpt and
nanoGPT in their own folders, without writing to these. Nothing is unpickled.
"""

import functools
import logging
import re
import shlex
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy

from ursa_minor.base import files, shell
from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import join_or

log = logging.getLogger(__name__)

# llm.c, dev/data/data_common.py: the header consists of 256 int32: the magic, the version, the
# number of tokens, and zeros.
HEADER_BYTES = 1024
SHARD_HEADERS: dict[tuple[int, int], np.dtype] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
MANIFEST = "manifest.json"
# nanoGPT, data/*/prepare.py: uint16 ids without a header, so only the name shows the format.
HEADERLESS = ("train.bin", "val.bin")
HEADERLESS_DTYPE = np.dtype("<u2")
CHECKED_WORDS = 10**6  # number of 16-bit words of a headerless file whose width is checked
MIN_CHECKED_WORDS = 16  # fewer words may be 0 by chance
# Megatron-LM, megatron/core/datasets/indexed_dataset.py: FILE.idx contains a magic, the version as
# a uint64, and the code of the type of the ids in FILE.bin.
MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_DTYPE_OFFSET = 17
MEGATRON_DTYPES: dict[int, np.dtype] = {3: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u2")}
MEGATRON_OTHER_DTYPES = {1: "uint8", 2: "int8", 5: "int64", 6: "float64", 7: "float32"}
# build-nanogpt's fineweb.py saves uint16. int32 is read as uint32: a negative id becomes one that
# no vocabulary has, and is reported as such.
NPY_DTYPES: dict[str, np.dtype] = {
    "<u2": np.dtype("<u2"),
    "<u4": np.dtype("<u4"),
    "<i4": np.dtype("<u4"),
}
# The split that a word in the name of a file names.
SPLIT_WORDS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
# The name of a shard that ShardWriter writes.
OUR_NAME = re.compile(r"(train|val|test)_\d{5}_\d{5}\.bin")
MAX_PART = 99_999  # the number of a part has five digits in the name of a shard
WRITE_BUFFER_BYTES = 2**20
CHECK_TOKENS = 2**24  # number of ids that are checked at a time, to limit the memory of a check
# FUSE with direct_io supports private mappings ("c") but not shared ones ("r").
MAPPING_MODES: tuple[Literal["r", "c"], ...] = ("r", "c")
RESTORE = "Restore the original file, or download or prepare it again"


@dataclass(frozen=True)
class Shard:
    """A token file of a folder, as the manifest lists it. The fields are the keys of the JSON.

    Attributes:
        file: name of the file in its folder.
        tokens: number of ids.
        text_bytes: size of the encoded text, or None if this project did not write the file.
        sha256: hash of the file, or None if the folder has no manifest.
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


def open_ids(path: Path, tokens: int | None = None) -> tuple[np.ndarray, int]:
    """Map the ids of a token file into memory.

    Args:
        path: a file in one of the formats of this module.
        tokens: number of ids according to the manifest, or None if the folder has no manifest.

    Returns:
        The ids, (tokens,) uint16 or uint32, read-only; and their offset in the file in bytes.

    Raises:
        BadInput: the format is unknown, the file cannot be read, is truncated or corrupted, or has
            another number of ids.
    """
    try:
        layout = _read_layout(path)
        size = path.stat().st_size
        if size != layout.file_size:
            raise ValueError(
                f"the file is truncated or corrupted. It has {size} bytes, but its "
                f"{layout.num_tokens} tokens need {layout.file_size}"
            )
        if tokens not in (None, layout.num_tokens):
            raise ValueError(
                f"the file or {MANIFEST} was changed. The file has {layout.num_tokens} tokens, but "
                f"{MANIFEST} lists {tokens}"
            )
        ids = _map(path, layout)
    except BadInput:
        raise
    except FileNotFoundError:
        raise BadInput(f"{path}: this file does not exist. {RESTORE}") from None
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read ({error.strerror}). Check its permissions and the limit of "
            f"open files (ulimit -n)"
        ) from None
    except Exception as error:  # for a corrupted .npy file, ast and tokenize raise their own errors
        raise BadInput(f"{path}: {error}. {RESTORE}") from None
    # Slicing an instance of np.memmap would take microseconds longer.
    return np.asarray(ids), layout.offset


def _read_layout(path: Path) -> IdLayout:
    """Recognize the format of a token file, and return its layout according to the header.

    Raises:
        BadInput: the ids have a type that is not supported.
        ValueError: the format is unknown, or the header of an .npy file is corrupted.
    """
    with open(path, "rb") as file:
        head = file.read(12)
    magic, version, num_tokens = struct.unpack("<3i", head.ljust(12, b"\0"))
    if (magic, version) in SHARD_HEADERS:
        return IdLayout(HEADER_BYTES, SHARD_HEADERS[magic, version], num_tokens)

    if head.startswith(npy.MAGIC_PREFIX):
        return _npy_layout(path)
    if path.suffix == ".npy":
        raise BadInput(
            f"{path} has no NumPy header. If it contains only ids, as the files of OLMo do, "
            f"convert it with the type of its ids: {_conversion(path, 'np.uint16', 'np.uint16')}. "
            f"Otherwise the file is corrupted. {RESTORE}"
        )
    megatron_dtype = _megatron_dtype(path)
    if megatron_dtype is not None:
        if megatron_dtype == HEADERLESS_DTYPE:
            _check_width(path)
        return IdLayout(0, megatron_dtype, path.stat().st_size // megatron_dtype.itemsize)

    known_magics = [known_magic for known_magic, _ in SHARD_HEADERS]
    if path.name in HEADERLESS and magic not in known_magics:
        _check_width(path)
        return IdLayout(0, HEADERLESS_DTYPE, path.stat().st_size // HEADERLESS_DTYPE.itemsize)

    headers = " or ".join(f"{magic}, {version} (llm.c)" for magic, version in SHARD_HEADERS)
    raise ValueError(
        f"the format is unknown, because the file starts with {magic}, {version}. A token "
        f"file starts with {headers}, is named {join_or(['*.npy', *HEADERLESS])}, or has an .idx "
        f"file of Megatron-LM next to it"
    )


def _npy_layout(path: Path) -> IdLayout:
    """Return the layout of an .npy file. Raises BadInput if its array cannot contain ids."""
    array, offset = _map_npy(path)
    dtype_name = array.dtype.str
    if array.ndim != 1 or dtype_name not in NPY_DTYPES:
        raise BadInput(
            f"{path}: the array has shape {array.shape} and dtype {dtype_name}, but ids have shape "
            f"(tokens,) and dtype {join_or(list(NPY_DTYPES))}. Save it as "
            f"np.save(path, ids.astype(np.uint16)), or np.uint32 for ids above 65,535"
        )
    return IdLayout(offset, NPY_DTYPES[dtype_name], len(array))


def _megatron_dtype(path: Path) -> np.dtype | None:
    """Return the type of the ids that Megatron-LM's index next to a file states.

    Returns:
        None if there is no such index.

    Raises:
        BadInput: ids of this type are not supported.
    """
    index = path.with_suffix(".idx")
    if path.suffix != ".bin" or not index.is_file():
        return None
    with open(index, "rb") as file:
        head = file.read(MEGATRON_DTYPE_OFFSET + 1)
    if not head.startswith(MEGATRON_MAGIC) or len(head) <= MEGATRON_DTYPE_OFFSET:
        return None
    code = head[MEGATRON_DTYPE_OFFSET]
    if code in MEGATRON_DTYPES:
        return MEGATRON_DTYPES[code]
    name = MEGATRON_OTHER_DTYPES.get(code)
    if name is None:
        raise BadInput(
            f"{index} is corrupted: its data type has the unknown code {code}. {RESTORE}"
        )
    raise BadInput(
        f"{path} contains ids of the type {name} according to {index.name}. Convert it: "
        f"{_conversion(path, f'np.{name}', 'np.uint32')}"
    )


def _check_width(path: Path) -> None:
    """Check that a file without a header seems to contain uint16 ids.

    The upper halves of wider ids are 0 if the tokenizer has at most 65,536 ids. Larger tokenizers
    cannot be used with such files, see ``check_vocabulary_of_headerless``.

    Raises:
        BadInput: the ids seem to be wider.
    """
    words = np.fromfile(path, HEADERLESS_DTYPE, count=CHECKED_WORDS)
    if len(words) < MIN_CHECKED_WORDS:
        return
    is_zero = [not words[offset::4].any() for offset in range(4)]
    if sum(is_zero) >= 3:
        width = "64 bits"
        dtype = "'<i8'" if is_zero[3] else "'>i8'"
    elif is_zero[1] and is_zero[3]:
        width = "32 bits"
        dtype = "'<u4'"
    elif is_zero[0] and is_zero[2]:
        width = "32 bits in big-endian order"
        dtype = "'>u4'"
    else:
        return
    raise BadInput(
        f"{path} has no header, so it is read as 16-bit ids, but its ids seem to have {width}. "
        f"Convert it: {_conversion(path, dtype, 'np.uint32')}"
    )


def check_vocabulary_of_headerless(path: Path, num_ids: int) -> None:
    """Check that a tokenizer can be used with a file without a header.

    Args:
        path: a token file.
        num_ids: number of ids of the tokenizer.

    Raises:
        BadInput: the file is headerless, and 16-bit ids are too narrow for the tokenizer.
    """
    if num_ids <= 2**16 or path.name not in HEADERLESS or _megatron_dtype(path) is not None:
        return
    _, offset = open_ids(path)
    if offset == 0:
        raise BadInput(
            f"{path} has no header, so it is read as 16-bit ids, but the tokenizer has {num_ids:,} "
            f"ids. If the file contains wider ids, convert it: "
            f"{_conversion(path, 'np.uint32', 'np.uint32')}. Otherwise use the tokenizer that the "
            f"ids were encoded with"
        )


def _conversion(path: Path, dtype: str, new_dtype: str) -> str:
    """Return a command that writes the ids of a file to a new folder as .npy."""
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


def id_dtype(num_ids: int) -> np.dtype:
    """Return the type in which the ids of a tokenizer are stored."""
    return np.dtype("<u2") if num_ids <= 2**16 else np.dtype("<u4")


def check_ids(path: Path, ids: np.ndarray, offset: int, vocab_size: int) -> int:
    """Check every id of a token file, and return the largest one.

    Args:
        path: the token file.
        ids: (tokens,) the ids of the file, as ``open_ids`` returns them.
        offset: position of the first id in the file, in bytes.
        vocab_size: vocabulary size of the model or tokenizer.

    Raises:
        BadInput: an id is not in the vocabulary.
    """
    largest_id = 0
    for start in range(0, len(ids), CHECK_TOKENS):
        some_ids = ids[start : start + CHECK_TOKENS]
        largest_id = max(largest_id, int(some_ids.max()))
        check_ids_in_vocabulary(
            path,
            some_ids,
            vocab_size,
            start=start,
            offset=offset + start * ids.itemsize,
            item_bytes=ids.itemsize,
        )
    return largest_id


def check_ids_in_vocabulary(
    path: Path, ids: np.ndarray, vocab_size: int, *, start: int, offset: int, item_bytes: int
) -> None:
    """Check a part of the ids of a token file.

    Args:
        path: the token file.
        ids: (n,) some of the ids of the file.
        vocab_size: vocabulary size of the model or tokenizer.
        start: index of the first of these ids within the file.
        offset: position of the first of these ids in the file, in bytes.
        item_bytes: number of bytes of an id in the file.

    Raises:
        BadInput: an id is not in the vocabulary. The message names the first one.
    """
    if ids.max() < vocab_size:
        return
    index = int(np.argmax(ids >= vocab_size))
    id_offset = offset + index * item_bytes
    raise BadInput(
        f"{path}: token {start + index} at offset {id_offset} has the id {ids[index]}, but with "
        f"vocab_size = {vocab_size} the largest id is {vocab_size - 1}. Use the tokenizer that "
        f"the shards were encoded with, and a vocab_size of at least its number of ids"
    )


def _map(path: Path, layout: IdLayout) -> np.ndarray:
    """Map the ids of a file into memory, or read them if the file system cannot map files."""
    for mode in MAPPING_MODES:
        with files.ignoring_errors(files.NO_MAPPING):
            mapped_ids = np.memmap(
                path, layout.dtype, mode=mode, offset=layout.offset, shape=(layout.num_tokens,)
            )
            mapped_ids.setflags(write=False)
            return mapped_ids
    _log_reading(path.parent)
    ids = np.fromfile(path, layout.dtype, count=layout.num_tokens, offset=layout.offset)
    ids.setflags(write=False)
    return ids


def _map_npy(path: Path) -> tuple[np.ndarray, int]:
    """Map or read an .npy file. Return its array and the size of its header in bytes."""
    for mode in MAPPING_MODES:
        with files.ignoring_errors(files.NO_MAPPING):
            mapped = npy.open_memmap(path, mode=mode)
            return mapped, mapped.offset
    with open(path, "rb") as file:
        array = npy.read_array(file, allow_pickle=False)
        return array, file.tell() - array.nbytes


@functools.cache  # once per folder
def _log_reading(folder: Path) -> None:
    log.warning(
        f"{folder}: this file system cannot map files into memory, so the token files are read "
        f"completely. If they do not fit into memory, copy the folder to another file system, and "
        f"use the copy: --data_dir FOLDER"
    )


class ShardWriter:
    """Write the ids of one part of one split as shards.

    The name of a shard is ``{split}_{part}_{number}.bin`` with five digits each, so the order of
    the names is that of the ids. As in llm.c, the validation split is called val. A shard that is
    not complete has a name that starts with a dot, and a header of zeros.

    Args:
        folder: folder that the shards are written to.
        split: "train", "validation" or "test".
        part: number of the source file.
        first_number: number of the first shard, which is the number of existing shards of this
            part.
        bytes_per_token: (vocabulary,) int64, the bytes of text that each id represents. With more
            than 65,536 entries, ids are stored as uint32, else as uint16.
        shard_tokens: maximum number of tokens in a shard. The count in the header is an int32.

    Raises:
        BadInput: the number of the part is too high.
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
        if part > MAX_PART:
            raise BadInput(
                f"{folder}: there are more than {MAX_PART + 1:,} source files, which is the "
                f"limit for the names of shards. Concatenate some of the files"
            )
        word = "val" if split == "validation" else split
        self.folder = folder
        self.prefix = f"{word}_{part:05d}_"
        self.number = first_number
        self.bytes_per_token = bytes_per_token
        self.shard_tokens = shard_tokens
        self.dtype = id_dtype(len(bytes_per_token))
        self.format = next(key for key, dtype in SHARD_HEADERS.items() if dtype == self.dtype)
        self._file: BinaryIO | None = None  # file of the current shard

    def fill(
        self, ids: np.ndarray, begin: int = 0, text_bytes: int | None = None
    ) -> Iterator[tuple[Shard, int]]:
        """Write the ids of a document from index ``begin`` on.

        Args:
            ids: (tokens,) the ids of the document.
            begin: index of the first id to write.
            text_bytes: size of the text that all ids represent, if it is known.

        Yields:
            Each shard that becomes complete, and the index of the first id after it.
        """
        while begin < len(ids):
            if self._file is None:
                self._open_shard()
            num_free = self.shard_tokens - self._tokens
            end = min(len(ids), begin + num_free)
            part = ids[begin:end]
            part_bytes = text_bytes
            if part_bytes is None or len(part) < len(ids):
                part_bytes = int(self.bytes_per_token[part].sum())
            self._write(part, part_bytes)
            begin = end
            if self._tokens == self.shard_tokens:
                shard = self.finish()
                assert shard is not None  # it contains the ids that were just written
                yield shard, begin

    def _open_shard(self) -> None:
        name = f"{self.prefix}{self.number:05d}.bin"
        self._path = self.folder / name
        self._temporary = self.folder / f".{name}.tmp"
        self._tokens = 0
        self._text_bytes = 0
        self._file = open(self._temporary, "wb", buffering=WRITE_BUFFER_BYTES)
        self._file.seek(HEADER_BYTES)  # leaves zeros, which ``finish`` replaces

    def _write(self, ids: np.ndarray, text_bytes: int) -> None:
        assert self._file is not None
        try:
            self._file.write(ids.astype(self.dtype, copy=False).data)
        except OSError:
            with files.naming(self._path):
                raise
        self._tokens += len(ids)
        self._text_bytes += text_bytes

    def finish(self) -> Shard | None:
        """Make the current shard durable and return it, or return None if there is none."""
        if self._file is None:
            return None
        magic, version = self.format
        header = struct.pack("<3i", magic, version, self._tokens)
        with files.naming(self._path):
            self._file.seek(0)
            self._file.write(header)
            self._file.close()
        sha256 = files.sha256(self._temporary)
        files.fsync(self._temporary)
        self._temporary.replace(self._path)
        files.fsync(self.folder)
        self._file = None
        self.number += 1
        return Shard(self._path.name, self._tokens, self._text_bytes, sha256)


def split_of(path: PurePath) -> str | None:
    """Return the split that the name of a token file contains, or None if it contains none.

    Raises:
        BadInput: the name contains several splits.
    """
    is_token_file = path.suffix in (".bin", ".npy")
    # macOS adds a "._fineweb_train_000001.bin" to each file that it copies to other file systems.
    is_hidden = path.name.startswith(".")
    if is_hidden or not is_token_file:
        return None
    words = path.stem.split("_")
    splits = {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}
    if len(splits) > 1:
        names = " and ".join(sorted(splits))
        raise BadInput(
            f"{path}: the file name contains the names of several splits, {names}. Rename the file "
            f"so that its name contains only one"
        )
    return next(iter(splits), None)
