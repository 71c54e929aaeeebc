"""Token files on disk: how they are read, checked and written.

This project writes the format of llm.c: a header of 1,024 bytes and then the ids of one split as
little-endian uint16 or uint32. The files of other programs are read in their own folders, without
writing to these. Each of their formats is a module in ``formats``. Nothing is unpickled.
"""

import contextlib
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO

import numpy as np

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import join_or
from ursa_minor.data.tokens.formats import datatrove, headerless, llm_c, megatron, npy
from ursa_minor.data.tokens.formats.llm_c import HEADER_BYTES, SHARD_HEADERS
from ursa_minor.data.tokens.token_format import (
    HEAD_BYTES,
    RESTORE,
    Positions,
    TokenFormat,
    conversion_command,
    map_array,
)

# A file has the first of these formats that recognizes it. Contents and side files come before
# names.
FORMATS = (
    llm_c.FORMAT,
    npy.FORMAT,
    megatron.FORMAT,
    datatrove.FORMAT,
    headerless.FORMAT,
)
SUFFIXES = {token_format.suffix for token_format in FORMATS}
MANIFEST = "manifest.json"
# The split that a word in the name of a file names.
SPLIT_WORDS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
# The name of a shard that ShardWriter writes.
OUR_NAME = re.compile(r"(train|val|test)_\d{5}_\d{5}\.bin")
MAX_PART = 99_999  # the number of a part has five digits in the name of a shard
WRITE_BUFFER_BYTES = 2**20
CHECK_TOKENS = 2**24  # number of ids that are checked at a time, to limit the memory of a check


@dataclass(frozen=True)
class Shard:
    """A token file of a folder, as the manifest lists it. The fields are the keys of the JSON.

    Attributes:
        file: name of the file in its folder. Files of other programs may be in a subfolder that
            is named after their split.
        tokens: number of ids.
        text_bytes: size of the encoded text, or None if this project did not write the file.
        sha256: hash of the file, or None if the folder has no manifest.
        documents: number of documents that are not empty, or None if the file does not state it.
    """

    file: str
    tokens: int
    text_bytes: int | None = None
    sha256: str | None = None
    documents: int | None = None

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
    """Map the ids of a token file into memory.

    Args:
        path: a file in one of ``FORMATS``.
        tokens: number of ids according to the manifest, or None if the folder has no manifest.

    Returns:
        The ids, (tokens,) of an integer type, read-only; and their offset in the file in bytes.

    Raises:
        BadInput: the format is unknown, the file cannot be read, is truncated or corrupted, or has
            another number of ids.
    """
    with _explaining_errors(path):
        layout = find_format(path).read_layout(path)
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
        ids = map_array(path, layout.dtype, layout.offset, layout.num_tokens)
    return ids, layout.offset


def read_document_ends(path: Path) -> Positions | None:
    """Return the end of each document of a token file, or None if the file does not state them.

    Args:
        path: a file that ``open_ids`` can open.

    Returns:
        The ends of the documents that are not empty, in ascending order and in ids. The last one is
        the number of ids.

    Raises:
        BadInput: the file or its index cannot be read or is corrupted.
    """
    with _explaining_errors(path):
        return find_format(path).read_document_ends(path)


def tokenizer_name(path: Path) -> str | None:
    """Return the name of the tokenizer that a token file states, or None.

    Raises:
        BadInput: the file or its metadata cannot be read.
    """
    with _explaining_errors(path):
        return find_format(path).tokenizer_name(path)


def side_files(path: Path) -> list[Path]:
    """Return the paths of all files that may accompany a token file of this name."""
    paths = []
    for token_format in FORMATS:
        if path.suffix == token_format.suffix:
            paths += token_format.side_files(path)
    return paths


def find_format(path: Path) -> TokenFormat:
    """Return the format of a token file.

    Raises:
        ValueError: the format is unknown.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    for token_format in FORMATS:
        if token_format.recognizes(path, head):
            return token_format
    found_magic, found_version, _ = llm_c.read_header(head)
    headers = " or ".join(f"{magic}, {version} (llm.c)" for magic, version in SHARD_HEADERS)
    names: list[str] = []
    companions = []
    for token_format in FORMATS:
        names += token_format.names
        if token_format.companion:
            companions.append(token_format.companion)
    raise ValueError(
        f"the format is unknown, because the file starts with {found_magic}, {found_version}. A "
        f"token file starts with {headers}, is named {join_or(names)}, or has "
        f"{join_or(companions)} next to it"
    )


@contextlib.contextmanager
def _explaining_errors(path: Path) -> Iterator[None]:
    """Raise BadInput with the name of the file for an error in the ``with`` block."""
    try:
        yield
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


def check_vocabulary_of_headerless(path: Path, num_ids: int) -> None:
    """Check that a tokenizer can be used with a file without a header.

    Args:
        path: a token file.
        num_ids: number of ids of the tokenizer.

    Raises:
        BadInput: the file is headerless, and 16-bit ids are too narrow for the tokenizer.
    """
    if num_ids <= 2**16 or path.name not in headerless.NAMES:
        return
    with _explaining_errors(path):
        is_headerless = find_format(path) is headerless.FORMAT
    if is_headerless:
        raise BadInput(
            f"{path} has no header, so it is read as 16-bit ids, but the tokenizer has {num_ids:,} "
            f"ids. If the file contains wider ids, convert it: "
            f"{conversion_command(path, 'np.uint32', 'np.uint32')}. Otherwise use the tokenizer "
            f"that the ids were encoded with"
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
    if ids.max() < vocab_size and ids.min() >= 0:
        return
    index = int(np.argmax((ids >= vocab_size) | (ids < 0)))
    id_offset = offset + index * item_bytes
    raise BadInput(
        f"{path}: token {start + index} at offset {id_offset} has the id {ids[index]}, but with "
        f"vocab_size = {vocab_size} the largest id is {vocab_size - 1}. Use the tokenizer that "
        f"the shards were encoded with, and a vocab_size of at least its number of ids"
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


def is_token_file(path: PurePath) -> bool:
    """Return whether a file may contain tokens, by its name."""
    # macOS adds a "._fineweb_train_000001.bin" to each file that it copies to other file systems.
    is_hidden = path.name.startswith(".")
    return path.suffix in SUFFIXES and not is_hidden


def split_in_folder(path: PurePath, split: str) -> str | None:
    """Return the split of a file in a folder that is named after a split.

    Returns:
        None if it is not a token file.

    Raises:
        BadInput: the name of the file contains another split.
    """
    if not is_token_file(path):
        return None
    if split_of(path) not in (None, split):
        raise BadInput(
            f"{path}: the name of the file contains another split than the name of its folder, "
            f"{split}. Rename the file, or move it to another folder"
        )
    return split


def split_of(path: PurePath) -> str | None:
    """Return the split that the name of a token file contains, or None if it contains none.

    Raises:
        BadInput: the name contains several splits.
    """
    if not is_token_file(path):
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
