"""Documents of token files that another program wrote: where their separators are, if any.

This project writes the end-of-text token before each document. datatrove and Megatron-LM write none
by default, but an index of the documents. The separators are then inserted when ids are read.
"""

from bisect import bisect_left
from enum import Enum
from pathlib import Path

import numpy as np

from ursa_minor.data.tokens.shards import open_ids, read_document_ends
from ursa_minor.data.tokens.token_format import Positions

SAMPLE_DOCUMENTS = 1000  # number of documents that decide where the separators of a file are


class SeparatorPlace(Enum):
    """Where the separator of a document is stored."""

    BEFORE = "before"
    AFTER = "after"
    MISSING = "missing"


class SeparatedIds:
    """The ids of a file with a separator before each document.

    The separators are inserted when a part of the ids is read. The file is not changed or copied.

    Args:
        file_ids: (tokens,) the ids of the file.
        document_ends: (documents,) as ``shards.read_document_ends`` returns them.
        separator: the id to insert.

    Attributes:
        num_documents: number of documents, and of separators.
        itemsize: number of bytes of an id in the file.
    """

    def __init__(self, file_ids: np.ndarray, document_ends: Positions, separator: int):
        self.file_ids = file_ids
        self.num_documents = len(document_ends)
        self.itemsize = file_ids.itemsize
        self._document_ends = document_ends
        self._separator = separator
        self._dtype = np.promote_types(file_ids.dtype, np.min_scalar_type(separator))

    def __len__(self) -> int:
        return len(self.file_ids) + self.num_documents

    def __getitem__(self, span: slice) -> np.ndarray:
        """Return a part of the ids with their separators, (tokens,)."""
        start, stop, _ = span.indices(len(self))
        first_document = self._separators_before(start)
        end_document = self._separators_before(stop)
        begin = start - first_document
        ids = self.file_ids[begin : stop - end_document].astype(self._dtype, copy=False)
        document_starts = self._document_starts(first_document, end_document)
        return np.insert(ids, document_starts - begin, self._separator)

    def file_index(self, index: int) -> int:
        """Return the position in the file of the id at an index, or of the id after a separator."""
        return index - self._separators_before(index)

    def _document_starts(self, first: int, end: int) -> np.ndarray:
        """Return the positions in the file at which the documents from ``first`` to ``end`` start.

        Each document except the first starts at the end of the previous one.
        """
        starts = np.asarray(self._document_ends[max(0, first - 1) : max(0, end - 1)])
        if first == 0 and end > 0:
            starts = np.insert(starts, 0, 0)
        return starts.astype(np.int64)

    def _separators_before(self, index: int) -> int:
        """Return how many separators have an index below ``index``.

        The separator of document d is after d other separators, and after all ids of the documents
        before it.
        """
        if index == 0 or not self.num_documents:
            return 0
        later_documents = range(self.num_documents - 1)  # without the first, whose index is 0
        return 1 + bisect_left(
            later_documents, index, key=lambda d: int(self._document_ends[d]) + d + 1
        )


def with_separators(path: Path, ids: np.ndarray, separator: int) -> np.ndarray | SeparatedIds:
    """Return the ids of a file with a separator before each document.

    Args:
        path: a token file that another program wrote.
        ids: (tokens,) the ids of the file.
        separator: the end-of-text id.

    Returns:
        The same ids if the file contains separators, or does not state where its documents are.

    Raises:
        BadInput: the index of the file is corrupted.
    """
    document_ends = read_document_ends(path)
    if document_ends is None or not len(document_ends):
        return ids
    if _separator_place(ids, document_ends, separator) != SeparatorPlace.MISSING:
        return ids
    return SeparatedIds(ids, document_ends, separator)


def _separator_place(ids: np.ndarray, document_ends: Positions, separator: int) -> SeparatorPlace:
    """Return where at least half of the first documents have a separator."""
    ends = np.asarray(document_ends[:SAMPLE_DOCUMENTS]).astype(np.int64)
    starts = np.insert(ends[:-1], 0, 0)
    if (ids[starts] == separator).mean() >= 0.5:
        return SeparatorPlace.BEFORE
    if (ids[ends - 1] == separator).mean() >= 0.5:
        return SeparatorPlace.AFTER
    return SeparatorPlace.MISSING


def find_following_separators(paths: list[Path], separator: int) -> Path | None:
    """Return a file in which the separators follow the documents, or None.

    Files that do not state where their documents are have such separators if the first file does
    not begin with one, and the last file ends with one.

    Args:
        paths: the token files of a split, in order.
        separator: the end-of-text id.

    Raises:
        BadInput: a file or its index is corrupted.
    """
    without_index = []
    for path in paths:
        ids, _ = open_ids(path)
        if not len(ids):
            continue
        document_ends = read_document_ends(path)
        if document_ends is None:
            without_index.append((path, ids))
        elif _separator_place(ids, document_ends, separator) == SeparatorPlace.AFTER:
            return path
    if without_index:
        _, first_ids = without_index[0]
        last_path, last_ids = without_index[-1]
        if first_ids[0] != separator and last_ids[-1] == separator:
            return last_path
    return None
