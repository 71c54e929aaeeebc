# Each epoch cuts the text into windows at other places: from the second on they begin up to a window later.
SEED = 1

import numpy as np

from pretrain.data import windows

CODE = 2**40  # a draw holds the window and how far it is moved


def _window(self, source, turn, num_windows, old=windows.TrainOrder._window):
    found = old(self, source, turn, num_windows)
    epoch = turn // num_windows if num_windows else 0
    moved = int(np.random.SeedSequence([SEED, epoch]).generate_state(1)[0]) % self.sequence_length if epoch else 0
    return found + CODE * moved


def _read(self, window, row_T1):
    moved, window = divmod(window, CODE)
    shard = self._shards[0]
    begin = window * self.sequence_length + moved
    begin = min(begin, len(shard.ids) - self.sequence_length - 1)  # the last window ends with the text
    row_T1[:] = shard.ids[begin : begin + self.sequence_length + 1]


windows.TrainOrder._window, windows.Windows.read = _window, _read
