"""datatrove 0.10, pipeline/tokens/tokenizer.py: ids without a header, and up to three side files.

- FILE.ds.metadata: the tokenizer and the bytes of an id, as "NAME|2"; the number of ids; the same
  number in words. Older versions state no bytes.
- FILE.ds.index: the end of each document as uint64, counted in ids.
- FILE.ds.loss: a byte per id, which is 0 if the id is not a target.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ursa_minor.base import shell
from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens.formats import headerless
from ursa_minor.data.tokens.token_format import (
    IdLayout,
    Positions,
    TokenFormat,
    check_document_ends,
    conversion_command,
    map_array,
)

SUFFIX = ".ds"
DTYPES: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
INDEX_DTYPE = np.dtype("<u8")
UNKNOWN_TOKENIZER = "Unknown Tokenizer"


class Metadata(NamedTuple):
    """The contents of FILE.ds.metadata. A value is None if it is not stated."""

    tokenizer: str | None
    id_bytes: int | None
    num_tokens: int


def side_files(path: Path) -> list[Path]:
    """Return the paths of the metadata, the index and the loss mask."""
    return [path.with_name(path.name + ending) for ending in (".metadata", ".index", ".loss")]


def recognizes(path: Path, head: bytes) -> bool:
    """Return whether a file has side files of datatrove, or is named *.ds."""
    metadata, index, _ = side_files(path)
    return metadata.is_file() or index.is_file() or path.suffix == SUFFIX


def read_layout(path: Path) -> IdLayout:
    """Return the layout that the metadata or the index and the size of the file state."""
    metadata_file, index, loss = side_files(path)
    if loss.exists():
        folder = shell.path_word(path.parent.with_name(f"{path.parent.name}-loss"))
        raise BadInput(
            f"{path} has a loss mask, {loss.name}, which is not supported. To train on all tokens, "
            f"move the mask to another folder: mkdir -p {folder} && mv {shell.path_word(loss)} "
            f"{folder}"
        )
    last_end = _last_end(index)
    metadata = _read_metadata(metadata_file)
    num_tokens = last_end if metadata is None else metadata.num_tokens
    if num_tokens is None:
        raise BadInput(
            f"{path} has neither a .metadata nor an .index file of datatrove next to it, so the "
            f"number of bytes of an id is unknown. If datatrove is still writing the file, wait "
            f"until all of its jobs have finished. Otherwise copy these files too, or convert the "
            f"file with the type of its ids: {conversion_command(path, 'np.uint16', 'np.uint16')}"
        )
    if last_end not in (None, num_tokens):
        raise ValueError(
            f"{metadata_file.name} and {index.name} contradict each other: they state "
            f"{num_tokens} and {last_end} tokens"
        )
    id_bytes = metadata.id_bytes if metadata else None
    if id_bytes is None:
        id_bytes = 4 if path.stat().st_size >= 4 * num_tokens else 2
        if id_bytes == 2:
            headerless.check_width(path)
    if id_bytes not in DTYPES:
        raise ValueError(f"{metadata_file.name} states {id_bytes} bytes per id, not 2 or 4")
    return IdLayout(0, DTYPES[id_bytes], num_tokens)


def read_document_ends(path: Path) -> Positions | None:
    """Return the ends of the documents, or None without an index."""
    _, index, _ = side_files(path)
    if not index.is_file():
        return None
    num_tokens = read_layout(path).num_tokens
    if not num_tokens:
        return np.empty(0, INDEX_DTYPE)
    return check_document_ends(index, _map_index(index), num_tokens)


def tokenizer_name(path: Path) -> str | None:
    """Return the tokenizer that the metadata state."""
    metadata = _read_metadata(side_files(path)[0])
    return metadata.tokenizer if metadata else None


def _read_metadata(path: Path) -> Metadata | None:
    if not path.is_file():
        return None
    try:
        tokenizer_line, tokens_line = path.read_text(encoding="utf-8").splitlines()[:2]
        tokenizer, separator, id_bytes = tokenizer_line.rpartition("|")
        num_tokens = int(tokens_line)
        if not separator:
            return Metadata(tokenizer_line, None, num_tokens)
        if tokenizer.startswith(UNKNOWN_TOKENIZER):
            return Metadata(None, int(id_bytes), num_tokens)
        return Metadata(tokenizer, int(id_bytes), num_tokens)
    except ValueError:
        raise ValueError(
            f"{path.name} is corrupted. Its lines should be TOKENIZER|2 (or 4) and the number of "
            f"tokens"
        ) from None


def _map_index(index: Path) -> np.ndarray:
    size = index.stat().st_size
    if size % INDEX_DTYPE.itemsize:
        raise ValueError(f"{index.name} is truncated: its size is not a multiple of 8 bytes")
    return map_array(index, INDEX_DTYPE, 0, size // INDEX_DTYPE.itemsize)


def _last_end(index: Path) -> int | None:
    """Return the end of the last document, or None without an index."""
    if not index.is_file():
        return None
    ends = _map_index(index)
    return int(ends[-1]) if len(ends) else 0


FORMAT = TokenFormat(
    name="datatrove",
    suffix=SUFFIX,
    companion="a .metadata file of datatrove",
    recognizes=recognizes,
    read_layout=read_layout,
    side_files=side_files,
    read_document_ends=read_document_ends,
    tokenizer_name=tokenizer_name,
    checked="the metadata",
)
