"""Find the validation documents that also occur in the train split.

A document is identified by a hash of its first ids. The hashes of the validation documents are
kept in the folder of the source. That file also contains which of them have occurred in the train
split, so the result does not depend on interruptions.
"""

import hashlib
import logging
import zipfile
from pathlib import Path

import numpy as np

from ursa_minor.base import files
from ursa_minor.data.tokens.encoder import Document

log = logging.getLogger(__name__)

FILE_NAME = "validation_documents.npz"
# Of a longer document, only the beginning is compared, because it may be read in several pieces.
COMPARED_IDS = 2**16


class ValidationOverlap:
    """The validation documents of a source, and which of them occur in its train split."""

    def __init__(self) -> None:
        self._num_documents: dict[int, int] = {}  # validation documents with each hash
        self._in_train: set[int] = set()

    def add_validation_document(self, document: Document) -> None:
        """Add a document of the validation split. Later pieces of a document are ignored."""
        if document.counts["documents"]:
            key = _hash(document)
            self._num_documents[key] = self._num_documents.get(key, 0) + 1

    def add_train_document(self, document: Document) -> None:
        """Compare a document of the train split with those of the validation split."""
        if document.counts["documents"]:
            key = _hash(document)
            if key in self._num_documents:
                self._in_train.add(key)

    @property
    def num_in_train(self) -> int:
        """The number of validation documents that occur in the train split."""
        return sum(self._num_documents[key] for key in self._in_train)

    def write(self, folder: Path) -> None:
        """Write the file in the folder of the source, atomically."""
        hashes = sorted(self._num_documents)
        with files.replacing(folder / FILE_NAME) as temporary, temporary.open("wb") as file:
            np.savez(
                file,
                hashes=np.array(hashes, dtype=np.uint64),
                documents=np.array([self._num_documents[key] for key in hashes], dtype=np.uint32),
                in_train=np.array([key in self._in_train for key in hashes], dtype=bool),
            )

    @classmethod
    def read(cls, folder: Path) -> "ValidationOverlap | None":
        """Read the file in the folder of a source.

        Returns:
            None if the file is missing or damaged.
        """
        overlap = cls()
        try:
            with np.load(folder / FILE_NAME) as arrays:
                hashes = arrays["hashes"].tolist()
                overlap._num_documents = dict(
                    zip(hashes, arrays["documents"].tolist(), strict=True)
                )
                in_train = arrays["hashes"][arrays["in_train"]]
                overlap._in_train = set(in_train.tolist())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile) as error:
            log.warning(
                f"{folder / FILE_NAME} cannot be read ({error}), so the validation documents are "
                f"not compared with the train documents"
            )
            return None
        return overlap


def _hash(document: Document) -> int:
    """Return a hash of the first ids of a document."""
    ids = np.ascontiguousarray(document.ids[:COMPARED_IDS])
    return int.from_bytes(hashlib.blake2b(ids.data, digest_size=8).digest())
