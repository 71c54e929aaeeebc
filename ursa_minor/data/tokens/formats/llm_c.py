"""llm.c and modded-nanogpt: a header, then the ids. This project writes the same format.

llm.c, dev/data/data_common.py: the header consists of 256 int32: the magic, the version, the number
of tokens, and zeros.
"""

import struct
from pathlib import Path

import numpy as np

from ursa_minor.data.tokens.token_format import HEAD_BYTES, IdLayout, TokenFormat

HEADER_BYTES = 1024
HEADER_BEGIN = "<3i"  # the magic, the version and the number of tokens
SHARD_HEADERS: dict[tuple[int, int], np.dtype] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}


def read_header(head: bytes) -> tuple[int, int, int]:
    """Return the magic, the version and the number of tokens. Missing bytes count as zeros."""
    size = struct.calcsize(HEADER_BEGIN)
    return struct.unpack(HEADER_BEGIN, head[:size].ljust(size, b"\0"))


def has_magic(head: bytes) -> bool:
    """Return whether a file begins with a magic of llm.c, in any version."""
    return read_header(head)[0] in {magic for magic, _ in SHARD_HEADERS}


def recognizes(path: Path, head: bytes) -> bool:
    """Return whether a file begins with a known magic and version."""
    return read_header(head)[:2] in SHARD_HEADERS


def read_layout(path: Path) -> IdLayout:
    """Return the layout that the header states."""
    with open(path, "rb") as file:
        magic, version, num_tokens = read_header(file.read(HEAD_BYTES))
    return IdLayout(HEADER_BYTES, SHARD_HEADERS[magic, version], num_tokens)


FORMAT = TokenFormat(name="llm.c", suffix=".bin", recognizes=recognizes, read_layout=read_layout)
