"""The order of training windows: a pure function of the seed, the weights and the position.

Position p counts the draws of a run over all steps, micro-steps and processes. The draw at a
position depends only on the seed, the weights and p, so the number of processes, the micro-batch
size and restarts do not change it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ursa_minor.base.errors import BadInput

CYCLE = 1024  # number of positions among which each source of a mixture has exactly its share
# Seeds of the cycles' permutations contain this number in place of an epoch, which no run reaches.
CYCLE_EPOCH = 2**32 - 1


@dataclass(frozen=True)
class TrainOrder:
    """Computes which windows a process reads at a step.

    The positions of a run are divided into cycles of ``CYCLE``. In each cycle, each source has
    exactly its share of the positions, in a permuted order. The n-th position of a source reads the
    n-th window of its own order: epoch after epoch, each permuted within shuffle blocks. A mixture
    therefore does not change the order of a source's own windows.

    Args:
        weights: weight of each source, at least 0, in any unit. A weight of 0 leaves the source
            out.
        sequence_length: T, number of inputs in a window.
        sequences_per_step: number of windows that all processes read in a step.
        micro_batch_size: number of windows in a micro-batch of one process.
        num_processes: number of processes.
        seed: seed of the order, from 0 to 2**32 - 1.
        block_tokens: number of tokens in a shuffle block, which has at least one window.

    Raises:
        BadInput: no source has a weight above 0, or more sources than a cycle has positions.
    """

    weights: tuple[float, ...]
    sequence_length: int
    sequences_per_step: int
    micro_batch_size: int
    num_processes: int
    seed: int
    block_tokens: int

    def __post_init__(self):
        num_sources = sum(weight > 0 for weight in self.weights)
        if not 1 <= num_sources <= CYCLE:
            fix = "Combine some of them"
            if num_sources == 0:
                fix = "Raise the weight of at least one source"
            raise BadInput(
                f"sources: {num_sources} sources have a weight above 0, but the number must be "
                f"from 1 to {CYCLE}. {fix}"
            )

    def number(self, micro_step: int, rank: int) -> int:
        """Return the number of a micro-batch within its step, counted over all processes."""
        return micro_step * self.num_processes + rank

    def windows(
        self, step: int, micro_step: int, rank: int, num_windows: Sequence[int | None]
    ) -> np.ndarray:
        """Return the draws of one micro-batch, (B, 2) int64: the source and the window.

        Args:
            step: number of the step.
            micro_step: number of the micro-batch within the step of this process.
            rank: rank of this process.
            num_windows: number of windows in an epoch of each source, above 0. It is None while
                the source is not complete. Then only the part of the first epoch that ``needed``
                returns may be requested.
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
        """Return how many windows of each source must be prepared before a step, in all processes.

        They are complete shuffle blocks. A complete source with fewer windows has enough.
        """
        turns = self.read_before(step + 1)
        num_blocks = [-(-turn // self._block_windows) for turn in turns]  # rounded up
        return [blocks * self._block_windows for blocks in num_blocks]

    def oldest_needed(self, step: int) -> list[int]:
        """Return the first window of each source that a step of the first epoch may still read."""
        turns = self.read_before(step)
        return [turn // self._block_windows * self._block_windows for turn in turns]

    def check_single_epoch(self, max_steps: int, most_windows: Sequence[int | None]) -> None:
        """Check that the run reads no window of a consumed source twice.

        Args:
            max_steps: number of steps of the run.
            most_windows: number of windows in an epoch of each source, or None if it is not known.

        Raises:
            BadInput: the run reads more windows than that.
        """
        num_read = self.read_before(max_steps)
        for source, (read, most) in enumerate(zip(num_read, most_windows, strict=True)):
            if most is not None and read > most:
                raise BadInput(
                    f"stream_keep = consumed: the run would read {read:,} windows of source "
                    f"{source}, but this source has at most {most:,}, and they are deleted after "
                    f"their first use. Use --stream_keep all, or --max_steps "
                    f"{max_steps * most // read}"
                )

    def shares(self) -> list[float]:
        """Return the actual share of each source: its weight, rounded to positions of a cycle."""
        return [places / CYCLE for places in self._places]

    def read_before(self, step: int) -> list[int]:
        """Return how many windows of each source the steps before a step read, over all epochs."""
        cycle, place = divmod(step * self.sequences_per_step, CYCLE)
        in_cycle = _cycle(self.seed, cycle, self._places).before[place].tolist()
        return [cycle * places + more for places, more in zip(self._places, in_cycle, strict=True)]

    def _window(self, source: int, turn: int, num_windows: int | None) -> int:
        """Return the window that a source contributes at its ``turn``-th position of the run."""
        epoch = 0
        place = turn
        if num_windows is not None:
            epoch, place = divmod(turn, num_windows)
        block, place = divmod(place, self._block_windows)
        first = block * self._block_windows
        length = self._block_windows
        if num_windows is not None:
            length = min(length, num_windows - first)  # the last block may be shorter
        return first + int(_block(self.seed, epoch, block, source, length)[place])

    @cached_property
    def _block_windows(self) -> int:
        return max(1, self.block_tokens // self.sequence_length)

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """Number of positions of each source in a cycle.

        They are the weights' quotas, rounded by the method of the largest remainder. Each source
        with a weight above 0 has at least one position.
        """
        # Fractions are exact: Python 3.12 changed sum() of floats, and the last bit of a sum could
        # move a position.
        weights = [Fraction(weight) for weight in self.weights]
        total = sum(weights)
        quotas = [weight * CYCLE / total for weight in weights]
        places = [max(math.floor(quota), int(quota > 0)) for quota in quotas]
        while sum(places) < CYCLE:
            # The source that is furthest below its quota gains a position. Ties go to the first.
            source = max(range(len(places)), key=lambda index: quotas[index] - places[index])
            places[source] += 1
        while sum(places) > CYCLE:
            # The source that is furthest above its quota loses a position, but not its only one.
            candidates = [index for index, count in enumerate(places) if count > 1]
            source = max(candidates, key=lambda index: places[index] - quotas[index])
            places[source] -= 1
        return tuple(places)


class _Cycle(NamedTuple):
    """The positions of one cycle.

    Attributes:
        sources: (CYCLE,), the source at each position.
        before: (CYCLE, sources), number of positions of each source before each position.
    """

    sources: np.ndarray
    before: np.ndarray


@lru_cache(maxsize=4)
def _cycle(seed: int, cycle: int, places: tuple[int, ...]) -> _Cycle:
    all_sources = np.arange(len(places))
    order = _permutation(CYCLE, seed, CYCLE_EPOCH, cycle)
    sources = np.repeat(all_sources, places)[order]
    is_source = sources[:, None] == all_sources
    return _Cycle(sources, np.cumsum(is_source, axis=0) - is_source)


# A process reads one block of each source at a time, so 16 entries suffice for 16 sources.
# int32 halves their memory.
@lru_cache(maxsize=16)
def _block(seed: int, epoch: int, block: int, source: int, length: int) -> np.ndarray:
    return _permutation(length, seed, epoch, block, source).astype(np.int32)


def _permutation(length: int, *key: int) -> np.ndarray:
    # NumPy guarantees that RandomState's stream never changes, but not Generator's. A run that is
    # resumed with a newer NumPy must read the same windows.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(key))).permutation(length)


def eval_draws(
    num_windows: Sequence[int], weights: Sequence[float], *, max_windows: int
) -> np.ndarray:
    """Return the draws on which a loss is measured, (n, 2) int64: the source and the window.

    They are spread evenly over each split, because the beginning of a split is seldom typical.

    Args:
        num_windows: number of windows of each source.
        weights: weight of each source.
        max_windows: approximate number of draws, or 0 for all windows. It is divided among the
            sources in proportion to the weights. Each source has at least one draw, and at most
            one for each of its windows.
    """
    draws = []
    for source, available in enumerate(num_windows):
        count = available
        if max_windows:
            share = round(max_windows * weights[source] / sum(weights))
            count = min(available, max(1, share))
        chosen = np.arange(count) * available // max(1, count)
        draws.append(np.stack([np.full(count, source), chosen], axis=1))
    return np.concatenate(draws)
