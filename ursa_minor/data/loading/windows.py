"""Cut the ids of a split into windows.

Dimensions: B sequences, T tokens. A window has T + 1 ids: the first T are the inputs, the last T
the targets. Consecutive windows of a shard start T ids apart, so each token is a target once.
No window crosses the end of a shard. A draw is a pair (source, window); ``order`` decides which
draws a step reads.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens.documents import SeparatedIds
from ursa_minor.data.tokens.shards import CHECK_TOKENS, check_ids, check_ids_in_vocabulary


@dataclass
class _OpenedShard:
    path: Path
    ids: np.ndarray | SeparatedIds | None  # None if the file was deleted
    offset: int  # bytes before the first id in the file
    first_window: int  # number of the shard's first window within the split
    num_windows: int


class Windows:
    """The windows of one split of one source, whose shards are added with ``append``.

    Args:
        sequence_length: T, number of inputs in a window.
        vocab_size: ids must be below it.

    Attributes:
        num_tokens: number of ids in all shards.
        num_windows: number of windows in all shards. It is 0 if no shard has
            ``sequence_length + 1`` ids; the caller decides whether that is an error, because more
            shards may follow.
        dropped_tokens: number of ids that are not a target of any window: the first id of each
            shard, and the ids after its last complete window.
    """

    def __init__(self, sequence_length: int, vocab_size: int):
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.num_tokens = 0
        self.num_windows = 0
        self.dropped_tokens = 0
        self._shards: list[_OpenedShard] = []

    def append(
        self, path: Path, tokens: int, ids: np.ndarray | SeparatedIds | None, offset: int
    ) -> None:
        """Add the next shard.

        Args:
            path: the shard's file, for messages.
            tokens: number of ids in the shard.
            ids: (tokens,) of an integer type, a memory map (``shards.open_ids``), possibly with
                inserted separators. None if the file was deleted: its windows keep their numbers,
                but cannot be read.
            offset: number of bytes before the first id in the file, for messages.
        """
        windows = max(0, (tokens - 1) // self.sequence_length)
        self._shards.append(_OpenedShard(path, ids, offset, self.num_windows, windows))
        self.num_tokens += tokens
        self.num_windows += windows
        self.dropped_tokens += tokens - windows * self.sequence_length

    def read(self, window: int, row_T1: np.ndarray) -> None:
        """Copy the ids of a window into ``row_T1``, (T + 1,) int64.

        Raises:
            BadInput: an id is outside the vocabulary, or the shard was deleted.
        """
        assert 0 <= window < self.num_windows, f"window {window} of {self.num_windows}"
        # A shard without windows has the same first_window as the next shard with windows. Of
        # several such shards the last one contains the window.
        position = bisect_right(self._shards, window, key=attrgetter("first_window")) - 1
        shard = self._shards[position]
        ids = _existing_ids(shard)
        start = (window - shard.first_window) * self.sequence_length
        stop = start + self.sequence_length + 1
        row_T1[:] = ids[start:stop]
        checked_ids = row_T1
        if isinstance(ids, SeparatedIds):
            # Only ids of the file are checked, because the message states their position in it.
            start = ids.file_index(start)
            checked_ids = ids.file_ids[start : ids.file_index(stop)]
        check_ids_in_vocabulary(
            shard.path,
            checked_ids,
            self.vocab_size,
            start=start,
            offset=shard.offset + start * ids.itemsize,
            item_bytes=ids.itemsize,
        )

    def read_all(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the ids of each shard that has windows, (tokens,) int32, and its number of windows.

        Raises:
            BadInput: as ``read``.
        """
        self.check_ids()
        for shard in self._shards:
            if shard.num_windows:
                yield _existing_ids(shard)[:].astype(np.int32), shard.num_windows

    def check_ids(self) -> int:
        """Check all ids of all shards whose files exist, and return the largest one.

        Raises:
            BadInput: an id is outside the vocabulary.
        """
        largest_id = 0
        for shard in self._shards:
            if shard.ids is not None:
                file_ids = shard.ids
                if isinstance(file_ids, SeparatedIds):
                    file_ids = file_ids.file_ids
                largest_of_shard = check_ids(shard.path, file_ids, shard.offset, self.vocab_size)
                largest_id = max(largest_id, largest_of_shard)
        return largest_id

    def contains(self, token_id: int) -> bool:
        """Return whether an id occurs in a shard whose file exists."""
        for shard in self._shards:
            if shard.ids is None:
                continue
            for start in range(0, len(shard.ids), CHECK_TOKENS):
                if (shard.ids[start : start + CHECK_TOKENS] == token_id).any():
                    return True
        return False

    def first_ids(self, max_ids: int) -> np.ndarray:
        """Return the first ids of the first shard whose file exists, (at most max_ids,) int64."""
        for shard in self._shards:
            if shard.ids is not None:
                return shard.ids[:max_ids].astype(np.int64)
        return np.empty(0, dtype=np.int64)

    def release_before(self, window: int) -> list[Path]:
        """Close the memory maps of all shards before a window, and return their files.

        Args:
            window: number of the first window that is still needed.
        """
        paths = []
        for shard in self._shards:
            is_before = shard.first_window + shard.num_windows <= window
            if is_before and shard.ids is not None:
                paths.append(shard.path)
                shard.ids = None
        return paths


def _existing_ids(shard: _OpenedShard) -> np.ndarray | SeparatedIds:
    if shard.ids is None:
        raise BadInput(
            f"{shard.path} is missing, because stream_keep = consumed deletes a shard after it "
            f"was trained on. To prepare the data again, delete the folder {shard.path.parent}"
        )
    return shard.ids
