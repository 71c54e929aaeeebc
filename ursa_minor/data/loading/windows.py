"""Ids cut into windows, the order in which they are trained on, and batches of them on the device.

Legend: B sequences, T tokens. A window is T + 1 ids: inputs are the first T, targets the last T. Windows have stride T,
so each token is a target once; none crosses a shard. A draw is a pair (source, window). Position p counts the draws of a
run over all steps, micro-steps and processes: what stands there is a function of seed, weights and p, so processes,
micro-batches and restarts cannot change it.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens.shards import check_ids, check_ids_in_vocabulary


@dataclass
class _OpenedShard:
    path: Path
    ids: np.ndarray | None  # None: its file is deleted
    offset: int  # bytes from the file's start to the first id
    first_window: int
    num_windows: int


class Windows:
    """One split of one source: shards of ids cut into windows of ``sequence_length + 1`` ids; grows by ``append``.

    Attributes:
        num_tokens: ids of all shards.
        num_windows: windows of all shards; 0 while no shard holds ``sequence_length + 1`` ids (the caller's to refuse,
            since more may come).
        dropped_tokens: ids that are not a window's target: the first one of each shard, and its tail.
    """

    def __init__(self, sequence_length: int, vocab_size: int):
        self.sequence_length, self.vocab_size = sequence_length, vocab_size
        self.num_tokens = self.num_windows = self.dropped_tokens = 0
        self._shards: list[_OpenedShard] = []

    def append(self, path: Path, tokens: int, ids: np.ndarray | None, offset: int) -> None:
        """Add the next shard.

        Args:
            ids: (tokens,) uint16 or uint32, as ``shards.open_ids`` maps them; None where the file was deleted: its
                windows keep their numbers, and cannot be read.
            offset: bytes from the file's start to the first id, for messages.
        """
        windows = max(0, (tokens - 1) // self.sequence_length)
        self._shards.append(_OpenedShard(path, ids, offset, self.num_windows, windows))
        self.num_tokens += tokens
        self.num_windows += windows
        self.dropped_tokens += tokens - windows * self.sequence_length

    def read(self, window: int, row_T1: np.ndarray) -> None:
        """Fill ``row_T1``, (T + 1,) int64, with a window's ids.

        Raises BadInput for an id out of the vocabulary, or a window whose shard was deleted.
        """
        assert 0 <= window < self.num_windows, f"window {window} of {self.num_windows}"
        # Shards without a window share their number with the next that has one: the last of them is the right one.
        shard = self._shards[bisect_right(self._shards, window, key=attrgetter("first_window")) - 1]
        start = (window - shard.first_window) * self.sequence_length
        row_T1[:] = _present(shard)[start : start + self.sequence_length + 1]
        item_bytes = _present(shard).itemsize
        check_ids_in_vocabulary(
            shard.path,
            row_T1,
            self.vocab_size,
            start=start,
            offset=shard.offset + start * item_bytes,
            item_bytes=item_bytes,
        )

    def read_all(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the ids of each shard that has windows, int32, and how many it has. Raises BadInput as ``read`` does."""
        self.check_ids()
        for shard in self._shards:
            if shard.num_windows:
                yield _present(shard).astype(np.int32), shard.num_windows

    def check_ids(self) -> None:
        """Check every id of every shard whose file exists. Raises BadInput for the first one out of the vocabulary."""
        for shard in self._shards:
            if shard.ids is not None:
                check_ids(shard.path, shard.ids, shard.offset, self.vocab_size)

    def release_before(self, window: int) -> list[Path]:
        """Forget the memory maps of the shards whose windows all lie below ``window``; return those files, to delete."""
        done = [shard for shard in self._shards if shard.first_window + shard.num_windows <= window]
        found = [shard.path for shard in done if shard.ids is not None]
        for shard in done:
            shard.ids = None
        return found


def _present(shard: _OpenedShard) -> np.ndarray:
    if shard.ids is None:
        raise BadInput(
            f"{shard.path}: was deleted by stream_keep = consumed after it had been trained on; "
            f"delete the folder to stream it again"
        )
    return shard.ids
