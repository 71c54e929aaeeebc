"""Ids cut into windows, the order in which they are trained on, and batches of them on the device.

Legend: B sequences, T tokens. A window is T + 1 ids: inputs are the first T, targets the last T. Windows have stride T,
so each token is a target once; none crosses a shard. A draw is a pair (source, window). Position p counts the draws of a
run over all steps, micro-steps and processes: what stands there is a function of seed, weights and p, so processes,
micro-batches and restarts cannot change it.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch

from ursa_minor.base.errors import BadInput

CYCLE = 1024  # positions in which each source of a mixture has exactly its share
CYCLE_EPOCH = 2**32 - 1  # an epoch that no run reaches: its seeds are free for the cycles
CHECK_TOKENS = 2**24  # ids that are checked in one go: bounds the memory of a check


@dataclass
class _Shard:
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
        self._shards: list[_Shard] = []

    def append(self, path: Path, tokens: int, ids: np.ndarray | None, offset: int) -> None:
        """Add the next shard.

        Args:
            ids: (tokens,) uint16 or uint32, as ``shards.open_ids`` maps them; None where the file was deleted: its
                windows keep their numbers, and cannot be read.
            offset: bytes from the file's start to the first id, for messages.
        """
        windows = max(0, (tokens - 1) // self.sequence_length)
        self._shards.append(_Shard(path, ids, offset, self.num_windows, windows))
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
        self._refuse_bad_ids(shard, start, row_T1)

    def read_all(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the ids of each shard that has windows, int32, and how many it has. Raises BadInput as ``read`` does."""
        self.check_ids()
        for shard in self._shards:
            if shard.num_windows:
                yield _present(shard).astype(np.int32), shard.num_windows

    def check_ids(self) -> None:
        """Check every id of every shard that is there. Raises BadInput for the first one out of the vocabulary."""
        for shard in self._shards:
            if shard.ids is not None:
                for start in range(0, len(shard.ids), CHECK_TOKENS):
                    self._refuse_bad_ids(shard, start, shard.ids[start : start + CHECK_TOKENS])

    def release_before(self, window: int) -> list[Path]:
        """Forget the memory maps of the shards whose windows all lie below ``window``; return those files, to delete."""
        done = [shard for shard in self._shards if shard.first_window + shard.num_windows <= window]
        found = [shard.path for shard in done if shard.ids is not None]
        for shard in done:
            shard.ids = None
        return found

    def _refuse_bad_ids(self, shard: _Shard, start: int, ids: np.ndarray) -> None:
        if ids.max() < self.vocab_size:
            return
        place = int(np.argmax(ids >= self.vocab_size))
        token = start + place
        offset = shard.offset + token * _present(shard).itemsize
        raise BadInput(
            f"{shard.path}: offset {offset}: token {token} is id {int(ids[place])}, "
            f"vocab_size = {self.vocab_size} ends at {self.vocab_size - 1}: "
            f"these shards belong to another tokenizer, or vocab_size is too small"
        )


def _present(shard: _Shard) -> np.ndarray:
    if shard.ids is None:
        raise BadInput(
            f"{shard.path}: was deleted by stream_keep = consumed after it had been trained on; "
            f"delete the folder to stream it again"
        )
    return shard.ids


@dataclass(frozen=True)
class TrainOrder:
    """Which windows a process reads at a step: a pure function of seed, weights and position, and of nothing else.

    Positions are dealt to the sources in cycles of CYCLE: each source has exactly its share of every cycle, its places
    permuted. The n-th place of a source holds the n-th window of its own order: epoch after epoch, each permuted inside
    shuffle blocks. So a mixture changes only which windows come between a source's own.

    Args:
        weights: one per source, of at least 0, any scale; 0 leaves a source out. (1.0,) for one source.
        seed: 0 to 2**32 - 1.
        block_tokens: tokens of a shuffle block, at least one window.

    Raises BadInput for no source, or more than a cycle has places.
    """

    weights: tuple[float, ...]
    sequence_length: int
    sequences_per_step: int
    micro_batch_size: int
    num_processes: int
    seed: int
    block_tokens: int

    def __post_init__(self):
        drawn = sum(weight > 0 for weight in self.weights)
        if not 1 <= drawn <= CYCLE:
            raise BadInput(f"sources: {drawn} have a weight above 0: must be 1 to {CYCLE}; remove some, or join them")

    def number(self, micro_step: int, rank: int) -> int:
        """Return which micro-batch of its step this is: its sequences are the same for any number of processes."""
        return micro_step * self.num_processes + rank

    def windows(self, step: int, micro_step: int, rank: int, num_windows: Sequence[int | None]) -> np.ndarray:
        """Return the draws of one micro-batch, (B, 2) int64: source, window.

        Args:
            num_windows: windows in one epoch of each source, above 0; None while its stream is not complete: then only
                its first epoch can be asked for, and only blocks that ``needed`` has seen there.
        """
        first = step * self.sequences_per_step
        first += self.number(micro_step, rank) * self.micro_batch_size
        draws = np.empty((self.micro_batch_size, 2), dtype=np.int64)
        for row in range(self.micro_batch_size):
            cycle, place = divmod(first + row, CYCLE)
            sources, before = _cycle(self.seed, cycle, self._places)
            source = int(sources[place])
            turn = cycle * self._places[source] + int(before[place, source])
            draws[row] = source, self._window(source, turn, num_windows[source])
        return draws

    def needed(self, step: int) -> list[int]:
        """Return how many windows of each source must be there before ``step`` may begin, in whole shuffle blocks.

        A source that is complete with fewer has enough. All processes and micro-steps are counted.
        """
        turns = self.read_before(step + 1)
        return [-(-turn // self._block_windows) * self._block_windows for turn in turns]

    def oldest_needed(self, step: int) -> list[int]:
        """Return, for each source, the first window that ``step`` or a later one can read in the first epoch."""
        turns = self.read_before(step)
        return [turn // self._block_windows * self._block_windows for turn in turns]

    def refuse_second_epoch(self, max_steps: int, most_windows: Sequence[int | None]) -> None:
        """Raise BadInput where the run reads more than ``most_windows`` of a source (None: not known)."""
        for source, (read, most) in enumerate(zip(self.read_before(max_steps), most_windows, strict=True)):
            if most is not None and read > most:
                raise BadInput(
                    f"stream_keep = consumed: the run reads {read:,} windows of source {source}, which has at most "
                    f"{most:,}: those of a second epoch would be deleted. Use --stream_keep all, or --max_steps "
                    f"{max_steps * most // read}"
                )

    def shares(self) -> list[float]:
        """Return the real share of each source: its weight, rounded to whole places of a cycle."""
        return [places / CYCLE for places in self._places]

    def read_before(self, step: int) -> list[int]:
        """Return how many windows of each source the steps before ``step`` have read, over all epochs."""
        cycle, place = divmod(step * self.sequences_per_step, CYCLE)
        before = _cycle(self.seed, cycle, self._places)[1][place].tolist()
        return [cycle * places + more for places, more in zip(self._places, before, strict=True)]

    def _window(self, source: int, turn: int, num_windows: int | None) -> int:
        epoch, place = (0, turn) if num_windows is None else divmod(turn, num_windows)
        block, place = divmod(place, self._block_windows)
        first = block * self._block_windows
        length = self._block_windows if num_windows is None else min(self._block_windows, num_windows - first)
        return first + int(_block(self.seed, epoch, block, source, length)[place])

    @cached_property
    def _block_windows(self) -> int:
        return max(1, self.block_tokens // self.sequence_length)

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """Places of each source in a cycle: the largest remainders of its quota, and one at least if it has a weight."""
        # Fractions are exact: Python 3.12 changed sum() of floats, and a last bit could move a place.
        weights = [Fraction(weight) for weight in self.weights]
        total = sum(weights)
        quotas = [weight * CYCLE / total for weight in weights]
        places = [max(math.floor(quota), int(quota > 0)) for quota in quotas]
        while (missing := CYCLE - sum(places)) != 0:
            # Who is furthest from its quota gains or gives one; of equals, the first.
            sign = 1 if missing > 0 else -1
            may = [source for source, held in enumerate(places) if sign > 0 or held > 1]
            places[max(may, key=lambda source: (quotas[source] - places[source]) * sign)] += sign
        return tuple(places)


@lru_cache(maxsize=4)
def _cycle(seed: int, cycle: int, places: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return each position's source, (CYCLE,), and each source's places before it in the cycle, (CYCLE, sources)."""
    everyone = np.arange(len(places))
    sources = np.repeat(everyone, places)[_permutation(CYCLE, seed, CYCLE_EPOCH, cycle)]
    here = sources[:, None] == everyone
    return sources, np.cumsum(here, axis=0) - here


# A process reads one block of each source at a time: 16 entries serve as many sources. int32 halves what they hold.
@lru_cache(maxsize=16)
def _block(seed: int, epoch: int, block: int, source: int, length: int) -> np.ndarray:
    return _permutation(length, seed, epoch, block, source).astype(np.int32)


def _permutation(length: int, *key: int) -> np.ndarray:
    # RandomState's stream is frozen by NumPy's compatibility policy; Generator's is not. A run resumed under a newer
    # NumPy must read the same windows.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(key))).permutation(length)


class Mapped:
    """Batches straight from the memory maps."""

    def __init__(self, sources: Sequence[Windows], device: torch.device):
        self._sources, self._device = sources, device

    def batch(self, draws: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs_BT and targets_BT, (B, T) int64 on the device, of ``draws``, (B, 2): source, window.

        Raises BadInput as ``Windows.read`` does.
        """
        rows_BT1 = np.empty((len(draws), self._sources[0].sequence_length + 1), dtype=np.int64)
        for row_T1, (source, window) in zip(rows_BT1, draws.tolist(), strict=True):
            self._sources[source].read(window, row_T1)
        return _inputs_and_targets(_to_device(rows_BT1, self._device))


class Resident:
    """The same batches from ids that live on the device whole (4 bytes each): for sources that fit there and are complete.

    Raises BadInput at construction for an id out of the vocabulary, or a shard that was deleted.
    """

    def __init__(self, sources: Sequence[Windows], device: torch.device):
        self._device = device
        parts, self._starts, begin = [np.empty(0, np.int32)], [], 0
        for source in sources:
            starts = [np.empty(0, np.int64)]
            for ids, num_windows in source.read_all():
                starts.append(begin + np.arange(num_windows) * source.sequence_length)
                begin += len(ids)
                parts.append(ids)
            self._starts.append(np.concatenate(starts))
        self._ids = torch.from_numpy(np.concatenate(parts)).to(device)
        self._places_T1 = torch.arange(sources[0].sequence_length + 1, device=device)

    def batch(self, draws: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs_BT and targets_BT, (B, T) int64 on the device, of ``draws``, (B, 2): source, window."""
        starts = np.array([self._starts[source][window] for source, window in draws.tolist()], dtype=np.int64)
        starts_B1 = _to_device(starts, self._device)[:, None]
        return _inputs_and_targets(self._ids[starts_B1 + self._places_T1].long())


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # From pinned memory the copy does not wait for the step in flight. torch lends pinned memory anew for each batch and
    # takes none back before its copy is done; a buffer of our own could be overwritten under the copy.
    return tensor.pin_memory().to(device, non_blocking=True)


def _inputs_and_targets(ids_BT1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Whole tensors, not views: a compiled step copies an input that does not begin at a multiple of 16 bytes.
    return ids_BT1[:, :-1].contiguous(), ids_BT1[:, 1:].contiguous()


def eval_draws(num_windows: Sequence[int], weights: Sequence[float], *, max_windows: int) -> np.ndarray:
    """Return the draws that a loss is measured on, (n, 2) int64: source, window.

    Args:
        num_windows: windows of each source.
        max_windows: 0 for every window of every source; else about this many, in proportion to the weights: at least
            one of each source, and never more than it has. They are spread evenly over each split: its first files are
            seldom like the rest.
    """
    draws = []
    for source, have in enumerate(num_windows):
        wanted = round(max_windows * weights[source] / sum(weights)) if max_windows else have
        count = min(have, max(1, wanted))
        chosen = np.arange(count) * have // max(1, count)
        draws.append(np.stack([np.full(count, source), chosen], axis=1))
    return np.concatenate(draws)


def eval_batches(
    batches: Mapped | Resident, draws: np.ndarray, *, batch_size: int, rank: int, num_processes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this process's share of ``draws``: inputs_BT and targets_BT, B up to ``batch_size``, each draw once."""
    mine = draws[rank::num_processes]
    for begin in range(0, len(mine), batch_size):
        yield batches.batch(mine[begin : begin + batch_size])
