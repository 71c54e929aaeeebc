"""nanoGPT: uint16 ids without a header, so only the names of its files show the format."""

from pathlib import Path

import numpy as np

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens.formats import llm_c
from ursa_minor.data.tokens.token_format import IdLayout, TokenFormat, conversion_command

NAMES = ("train.bin", "val.bin")  # nanoGPT, data/*/prepare.py
DTYPE = np.dtype("<u2")
CHECKED_WORDS = 10**6  # number of 16-bit words whose width is checked
MIN_CHECKED_WORDS = 16  # fewer words may be 0 by chance


def recognizes(path: Path, head: bytes) -> bool:
    """Return whether a file has one of nanoGPT's names, and no header of llm.c."""
    return path.name in NAMES and not llm_c.has_magic(head)


def read_layout(path: Path) -> IdLayout:
    """Return the layout of a file that consists of uint16 ids."""
    size = path.stat().st_size
    if not size:
        raise ValueError("the file is empty")
    check_width(path)
    return IdLayout(0, DTYPE, size // DTYPE.itemsize)


def check_width(path: Path) -> None:
    """Check that a file seems to contain uint16 ids.

    The upper halves of wider ids are 0 if the tokenizer has at most 65,536 ids. Larger tokenizers
    cannot be used with such files, see ``shards.check_vocabulary_of_headerless``.

    Raises:
        BadInput: the ids seem to be wider.
    """
    words = np.fromfile(path, DTYPE, count=CHECKED_WORDS)
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
        f"Convert it: {conversion_command(path, dtype, 'np.uint32')}"
    )


FORMAT = TokenFormat(
    name="nanoGPT",
    suffix=".bin",
    names=NAMES,
    recognizes=recognizes,
    read_layout=read_layout,
    checked="the width of the ids",
)
