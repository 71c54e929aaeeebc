"""Token files without a header are read with the right width or rejected."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import shards

IDS = np.random.default_rng(0).integers(0, 50_000, 3000)
MEGATRON_CODES = {"int32": 4, "float32": 7}


def write(folder: Path, dtype: str, name: str = "train.bin", ids: np.ndarray = IDS) -> Path:
    """Write ids without a header."""
    path = folder / name
    ids.astype(dtype).tofile(path)
    return path


def python_environment(folder: Path) -> dict[str, str]:
    """Return an environment in which the command python is this interpreter."""
    commands = folder / "commands"
    commands.mkdir()
    (commands / "python").symlink_to(sys.executable)
    return os.environ | {"PATH": f"{commands}:{os.environ['PATH']}"}


def write_index(path: Path, dtype: str) -> None:
    """Write the beginning of Megatron-LM's index of a file."""
    head = b"MMIDIDX\0\0" + struct.pack("<QB", 1, MEGATRON_CODES[dtype])
    path.with_suffix(".idx").write_bytes(head + bytes(100))


@pytest.mark.parametrize(
    ("dtype", "width"),
    [("<u4", "32 bits"), ("<i8", "64 bits"), (">i8", "64 bits"), (">u4", "big-endian")],
)
def test_wider_ids_are_rejected_with_conversion(dtype, width, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    path = write(folder, dtype)

    with pytest.raises(BadInput) as caught:
        shards.open_ids(path)

    message = str(caught.value)
    assert str(path) in message
    assert width in message
    command = message.partition("Convert it: ")[2].partition(", and use")[0]
    subprocess.run(command, shell=True, check=True, env=python_environment(tmp_path))
    ids, _ = shards.open_ids(tmp_path / "shards-npy" / "train.npy")
    assert np.array_equal(ids, IDS)


def test_large_vocabulary_needs_a_header(tmp_path):
    headerless = write(tmp_path, "<u2")
    with_header = tmp_path / "train_1.npy"
    np.save(with_header, IDS.astype(np.uint32))

    shards.check_vocabulary_of_headerless(headerless, 65_536)
    shards.check_vocabulary_of_headerless(with_header, 70_000)
    with pytest.raises(BadInput, match="70,000"):
        shards.check_vocabulary_of_headerless(headerless, 70_000)


def test_megatron_index_decides_type(tmp_path):
    path = write(tmp_path, "int32", "text_train_document.bin")
    write_index(path, "int32")

    ids, _ = shards.open_ids(path)

    assert np.array_equal(ids, IDS)
    shards.check_vocabulary_of_headerless(path, 70_000)


def test_unsupported_megatron_type_is_rejected(tmp_path):
    path = write(tmp_path, "float32")
    write_index(path, "float32")

    with pytest.raises(BadInput, match="float32"):
        shards.open_ids(path)
