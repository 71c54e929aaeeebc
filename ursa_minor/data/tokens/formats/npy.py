"""build-nanogpt: NumPy's .npy with one dimension."""

from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.lib import format as npy

from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import join_or
from ursa_minor.data.tokens.token_format import (
    RESTORE,
    IdLayout,
    TokenFormat,
    conversion_command,
)

# build-nanogpt's fineweb.py saves uint16. int32 is read as uint32: a negative id becomes one that
# no vocabulary has, and is reported as such.
DTYPES: dict[str, np.dtype] = {
    "<u2": np.dtype("<u2"),
    "<u4": np.dtype("<u4"),
    "<i4": np.dtype("<u4"),
}
HEADER_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def recognizes(path: Path, head: bytes) -> bool:
    """Return whether a file begins with NumPy's magic, or is named as if it did."""
    return head.startswith(npy.MAGIC_PREFIX) or path.suffix == ".npy"


def read_layout(path: Path) -> IdLayout:
    """Return the layout that NumPy's header states."""
    with open(path, "rb") as file:
        if file.read(len(npy.MAGIC_PREFIX)) != npy.MAGIC_PREFIX:
            _refuse_without_header(path)
        file.seek(0)
        version = npy.read_magic(file)
        if version not in HEADER_READERS:
            raise ValueError(f"the header has the unknown version {version}")
        shape, _, dtype = HEADER_READERS[version](file)
        offset = file.tell()
    if dtype.hasobject:
        raise ValueError("the array contains Python objects, which are not read")
    if len(shape) != 1 or dtype.str not in DTYPES:
        raise BadInput(
            f"{path}: the array has shape {shape} and dtype {dtype.str}, but ids have shape "
            f"(tokens,) and dtype {join_or(list(DTYPES))}. Save it as "
            f"np.save(path, ids.astype(np.uint16)), or np.uint32 for ids above 65,535"
        )
    return IdLayout(offset, DTYPES[dtype.str], shape[0])


def _refuse_without_header(path: Path) -> NoReturn:
    command = conversion_command(path, "np.uint16", "np.uint16")
    raise BadInput(
        f"{path} has no NumPy header. If it contains only ids, as the files of OLMo do, convert it "
        f"with the type of its ids: {command}. Otherwise the file is corrupted. {RESTORE}"
    )


FORMAT = TokenFormat(
    name="NumPy",
    suffix=".npy",
    names=("*.npy",),
    recognizes=recognizes,
    read_layout=read_layout,
)
