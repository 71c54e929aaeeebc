# The batch grows: until these shares of all tokens an update takes so large a part of tokens_per_step; the learning rate is
# that of the tokens seen, times the root of the part. One process, one micro-batch. STEPS: the whole updates of it.
STEPS = 500
STAGES = [(0.5, 0.5)]

import itertools

import numpy as np

from pretrain.data import windows
from pretrain.optim import schedule

before, parts = [0.0], []
while before[-1] < STEPS:
    parts.append(next((part for share, part in STAGES if before[-1] < share * STEPS), 1.0))
    before.append(before[-1] + parts[-1])


def _windows(self, step, micro_step, rank, num_windows):
    first, count = round(before[step] * self.sequences_per_step), round(parts[step] * self.sequences_per_step)
    cycles, rows = itertools.islice(itertools.count(first), count), []
    for cycle, place in (divmod(position, windows.CYCLE) for position in cycles):
        sources, turns = windows._cycle(self.seed, cycle, self._places)
        source = int(sources[place])
        turn = cycle * self._places[source] + int(turns[place, source])
        rows.append((source, self._window(source, turn, num_windows[source])))
    return np.array(rows, dtype=np.int64)


def _learning_rate(step, settings, *, max_steps, warmup_steps, old=schedule.learning_rate):
    return old(before[step], settings, max_steps=STEPS, warmup_steps=warmup_steps) * parts[step] ** 0.5


windows.TrainOrder.windows, schedule.learning_rate = _windows, _learning_rate
