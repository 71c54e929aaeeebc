"""Write token files as datatrove and Megatron-LM do, without these libraries."""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

MEGATRON_CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}


def join(documents: Iterable[Sequence[int]], dtype: str) -> np.ndarray:
    """Return the ids of several documents as one array."""
    arrays = [np.array(document, dtype=dtype) for document in documents]
    return np.concatenate([np.empty(0, dtype), *arrays])


def write_datatrove(
    path: Path,
    documents: Iterable[Sequence[int]],
    *,
    id_bytes: int = 2,
    tokenizer: str = "Unknown Tokenizer|2",
    has_metadata: bool = True,
    has_index: bool = True,
) -> Path:
    """Write documents as datatrove's TokenizedFile does, and return the path."""
    documents = list(documents)
    ids = join(documents, f"<u{id_bytes}")
    path.parent.mkdir(parents=True, exist_ok=True)
    ids.tofile(path)
    if has_metadata:
        metadata = path.with_name(f"{path.name}.metadata")
        metadata.write_text(f"{tokenizer}|{id_bytes}\n{len(ids)}\n{len(ids)} T")
    if has_index:
        ends = np.cumsum([len(document) for document in documents]).astype("<u8")
        ends.tofile(path.with_name(f"{path.name}.index"))
    return path


def write_megatron(
    path: Path, documents: Iterable[Sequence[int]], *, dtype: str = "int32", modes: bool = False
) -> Path:
    """Write documents as Megatron-LM's IndexedDatasetBuilder does, and return the path.

    Each document is one sequence. An empty document is a sequence without ids.
    """
    documents = list(documents)
    path.parent.mkdir(parents=True, exist_ok=True)
    join(documents, dtype).tofile(path)
    lengths = np.array([len(document) for document in documents], dtype="<i4")
    pointers = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(dtype).itemsize
    entries = np.arange(len(documents) + 1, dtype="<i8")
    header = struct.pack("<QBQQ", 1, MEGATRON_CODES[dtype], len(lengths), len(entries))
    content = b"MMIDIDX\0\0" + header + lengths.tobytes() + pointers.tobytes() + entries.tobytes()
    if modes:
        content += bytes(len(lengths))
    path.with_suffix(".idx").write_bytes(content)
    return path
