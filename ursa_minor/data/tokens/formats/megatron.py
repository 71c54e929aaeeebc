"""Megatron-LM and NeMo: ids without a header in FILE.bin, and an index in FILE.idx.

megatron-core 0.16, megatron/core/datasets/indexed_dataset.py: the index contains a magic, the
version (uint64), the code of the type of the ids (uint8), the numbers of sequences and of document
entries (uint64), and then for each sequence its length in ids (int32) and its position in bytes
(int64). The document entries follow (int64): 0, and the number of the sequence after each document.
A multimodal dataset adds a byte per sequence.
"""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens.formats import headerless
from ursa_minor.data.tokens.token_format import (
    CHECKED_ENTRIES,
    RESTORE,
    IdLayout,
    Positions,
    TokenFormat,
    check_document_ends,
    conversion_command,
    map_array,
)

MAGIC = b"MMIDIDX\0\0"
HEADER = "<9sQBQQ"
HEADER_BYTES = struct.calcsize(HEADER)
VERSION = 1
# int16 and int32 are read as unsigned: a negative id becomes one that no vocabulary has.
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<u2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
FLOAT_DTYPES = {6: "float64", 7: "float32"}


class Index(NamedTuple):
    """The contents of an index.

    Attributes:
        code: the code of the type of the ids.
        lengths: (sequences,) int32, number of ids of each sequence.
        pointers: (sequences,) int64, position of each sequence in the file, in bytes.
        documents: (documents + 1,) int64, number of sequences before each document and at the end.
    """

    code: int
    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray


class DocumentEnds:
    """The ends of documents, which are computed from the index when they are read.

    Args:
        index: the index.
        itemsize: number of bytes of an id.
        num_tokens: number of ids in the file.
    """

    def __init__(self, index: Index, itemsize: int, num_tokens: int):
        self._index = index
        self._itemsize = itemsize
        self._num_tokens = num_tokens
        self._sequences = index.documents[1:]  # number of sequences up to the end of each document

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, key: Any) -> Any:
        sequences = self._sequences[key]
        last_sequence = len(self._index.pointers) - 1
        pointers = self._index.pointers[np.minimum(sequences, last_sequence)]
        return np.where(sequences > last_sequence, self._num_tokens, pointers // self._itemsize)


def index_file(path: Path) -> Path:
    """Return the path of the index of a file."""
    return path.with_suffix(".idx")


def side_files(path: Path) -> list[Path]:
    """Return the path of the index."""
    return [index_file(path)]


def recognizes(path: Path, head: bytes) -> bool:
    """Return whether an index of Megatron-LM, or the beginning of one, is next to a .bin file."""
    index = index_file(path)
    if path.suffix != ".bin" or not index.is_file():
        return False
    with open(index, "rb") as file:
        return MAGIC.startswith(file.read(len(MAGIC)))


def read_layout(path: Path) -> IdLayout:
    """Return the layout that the index states."""
    index = _map_index(path)
    dtype = _dtype(path, index.code)
    if dtype == headerless.DTYPE:
        headerless.check_width(path)
    if not len(index.documents):
        # The index describes no documents, not even their end. Then only the type is used.
        return IdLayout(0, dtype, path.stat().st_size // dtype.itemsize)
    num_tokens = 0
    if len(index.pointers):
        num_tokens = int(index.pointers[-1]) // dtype.itemsize + int(index.lengths[-1])
    return IdLayout(0, dtype, num_tokens)


def read_document_ends(path: Path) -> Positions | None:
    """Return the ends of the documents, after checking every entry of the index."""
    index = _map_index(path)
    if not len(index.documents):
        return None
    layout = read_layout(path)
    _check_sequences(path, index, layout.dtype.itemsize)
    if not layout.num_tokens:
        return np.empty(0, np.int64)
    ends = DocumentEnds(index, layout.dtype.itemsize, layout.num_tokens)
    return check_document_ends(index_file(path), ends, layout.num_tokens)


def _map_index(path: Path) -> Index:
    """Map the index of a file into memory, after comparing its size with its header."""
    name = index_file(path).name
    num_bytes = index_file(path).stat().st_size
    if num_bytes < HEADER_BYTES:
        raise ValueError(f"{name} is truncated: it has {num_bytes} bytes")
    content = map_array(index_file(path), np.dtype("u1"), 0, num_bytes)
    _, version, code, num_sequences, num_entries = struct.unpack(
        HEADER, content[:HEADER_BYTES].tobytes()
    )
    if version != VERSION:
        raise ValueError(f"{name} has the unknown version {version}")

    lengths_end = HEADER_BYTES + 4 * num_sequences
    pointers_end = lengths_end + 8 * num_sequences
    size = pointers_end + 8 * num_entries
    if not num_sequences and not num_entries:
        nothing = np.empty(0, np.int64)
        return Index(code, nothing, nothing, nothing)
    if num_bytes not in (size, size + num_sequences):  # without and with a byte per sequence
        raise ValueError(
            f"{name} is truncated or corrupted: it has {num_bytes} bytes, but its "
            f"{num_sequences} sequences and {num_entries} document entries need {size}"
        )
    return Index(
        code,
        content[HEADER_BYTES:lengths_end].view("<i4"),
        content[lengths_end:pointers_end].view("<i8"),
        content[pointers_end:size].view("<i8"),
    )


def _dtype(path: Path, code: int) -> np.dtype:
    """Return the type of the ids. Raises BadInput if ids of this type are not supported."""
    if code in DTYPES:
        return DTYPES[code]
    index = index_file(path)
    name = FLOAT_DTYPES.get(code)
    if name is None:
        raise BadInput(
            f"{index} is corrupted: its data type has the unknown code {code}. {RESTORE}"
        )
    raise BadInput(
        f"{path} contains ids of the type {name} according to {index.name}. Convert it: "
        f"{conversion_command(path, f'np.{name}', 'np.uint32')}"
    )


def _check_sequences(path: Path, index: Index, itemsize: int) -> None:
    """Check that the sequences follow each other in the file, and that documents consist of them.

    Raises:
        ValueError: the index is corrupted.
    """
    name = index_file(path).name
    end = 0
    for start in range(0, len(index.lengths), CHECKED_ENTRIES):
        lengths = index.lengths[start : start + CHECKED_ENTRIES].astype(np.int64)
        ends = end + np.cumsum(lengths * itemsize)
        pointers = index.pointers[start : start + CHECKED_ENTRIES]
        if lengths.min() < 0 or not np.array_equal(pointers, ends - lengths * itemsize):
            raise ValueError(f"{name} is corrupted: its sequences do not follow each other")
        end = int(ends[-1])

    num_sequences = len(index.lengths)
    previous = 0
    for start in range(0, len(index.documents), CHECKED_ENTRIES):
        entries = index.documents[start : start + CHECKED_ENTRIES]
        if np.diff(entries, prepend=previous).min() < 0:
            raise ValueError(f"{name} is corrupted: its documents are not in order")
        previous = int(entries[-1])
    if index.documents[0] != 0 or previous != num_sequences:
        raise ValueError(
            f"{name} is corrupted: its documents end at sequence {previous}, but it has "
            f"{num_sequences} sequences"
        )


FORMAT = TokenFormat(
    name="Megatron-LM",
    suffix=".bin",
    companion="an .idx file of Megatron-LM",
    recognizes=recognizes,
    read_layout=read_layout,
    side_files=side_files,
    read_document_ends=read_document_ends,
    checked="the header of the index",
)
