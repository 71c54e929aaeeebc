"""Write token files with datatrove or megatron-core, in an environment that has them.

    python write_with_library.py LIBRARY ID_BYTES FOLDER < documents.json

The standard input is a list of files, each of which is a list of documents, each of which is a list
of ids. The files are FOLDER/train/000.* and so on.
"""

import json
import sys
from pathlib import Path


def write_datatrove(path: Path, documents: list[list[int]], id_bytes: int) -> None:
    """Write a file and its side files with datatrove."""
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    file = TokenizedFile(
        str(path.parent), f"{path.name}.ds", save_final_metadata=True, token_size=id_bytes
    )
    for document in documents:
        file.write(document, None)
    file.close()


def write_megatron(path: Path, documents: list[list[int]], id_bytes: int) -> None:
    """Write a file and its index with Megatron-LM."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    dtype = numpy.uint16 if id_bytes == 2 else numpy.int32
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=dtype)
    for document in documents:
        builder.add_item(torch.tensor(document, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{path}.idx")


WRITERS = {"datatrove": write_datatrove, "megatron": write_megatron}


def main() -> None:
    """Write the files of the standard input."""
    library, id_bytes, folder = sys.argv[1:]
    train_folder = Path(folder) / "train"
    train_folder.mkdir(parents=True)
    for number, documents in enumerate(json.load(sys.stdin)):
        WRITERS[library](train_folder / f"{number:03d}", documents, int(id_bytes))


if __name__ == "__main__":
    main()
