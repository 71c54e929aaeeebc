"""The order of training windows: a pure function of the seed, the weights and the position."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from ursa_minor.base.errors import BadInput

CYCLE = 1024  # positions in which each source of a mixture has exactly its share
CYCLE_EPOCH = 2**32 - 1  # an epoch that no run reaches: its seeds are free for the cycles


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
            raise BadInput(
                f"sources: {drawn} have a weight above 0: must be 1 to {CYCLE}; remove some, or join them"
            )

    def number(self, micro_step: int, rank: int) -> int:
        """Return which micro-batch of its step this is: its sequences are the same for any number of processes."""
        return micro_step * self.num_processes + rank

    def windows(
        self, step: int, micro_step: int, rank: int, num_windows: Sequence[int | None]
    ) -> np.ndarray:
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

    def check_single_epoch(self, max_steps: int, most_windows: Sequence[int | None]) -> None:
        """Raise BadInput where the run reads more than ``most_windows`` of a source (None: not known)."""
        for source, (read, most) in enumerate(
            zip(self.read_before(max_steps), most_windows, strict=True)
        ):
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
        length = (
            self._block_windows
            if num_windows is None
            else min(self._block_windows, num_windows - first)
        )
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


def eval_draws(
    num_windows: Sequence[int], weights: Sequence[float], *, max_windows: int
) -> np.ndarray:
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
