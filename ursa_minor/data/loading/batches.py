"""Turn windows of token ids into batches on the device."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ursa_minor.data.loading.windows import Windows


class Mapped:
    """Reads batches from memory-mapped files.

    Args:
        sources: the windows of each source.
        device: device that the batches are copied to.
    """

    def __init__(self, sources: Sequence[Windows], device: torch.device):
        self._sources = sources
        self._device = device

    def batch(self, draws: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs_BT and targets_BT, (B, T) int64 on the device.

        Args:
            draws: (B, 2) int64, the source and the window of each sequence.

        Raises:
            BadInput: as ``Windows.read``.
        """
        rows_BT1 = np.empty((len(draws), self._sources[0].sequence_length + 1), dtype=np.int64)
        for row_T1, (source, window) in zip(rows_BT1, draws.tolist(), strict=True):
            self._sources[source].read(window, row_T1)
        return _inputs_and_targets(_to_device(rows_BT1, self._device))


class Resident:
    """Reads the same batches from ids that are stored on the device (4 bytes each).

    Args:
        sources: the windows of each source, which must be complete.
        device: device that stores the ids and the batches.

    Raises:
        BadInput: an id is outside the vocabulary, or a shard was deleted.
    """

    def __init__(self, sources: Sequence[Windows], device: torch.device):
        self._device = device
        shard_ids = [np.empty(0, np.int32)]
        # For each source, the position in all ids at which each window starts, (windows,) int64.
        self._window_starts = []
        shard_start = 0
        for source in sources:
            starts = [np.empty(0, np.int64)]
            for ids, num_windows in source.read_all():
                starts.append(shard_start + np.arange(num_windows) * source.sequence_length)
                shard_start += len(ids)
                shard_ids.append(ids)
            self._window_starts.append(np.concatenate(starts))
        self._ids = torch.from_numpy(np.concatenate(shard_ids)).to(device)
        self._offsets_T1 = torch.arange(sources[0].sequence_length + 1, device=device)

    def batch(self, draws: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs_BT and targets_BT, (B, T) int64 on the device.

        Args:
            draws: (B, 2) int64, the source and the window of each sequence.
        """
        starts = [self._window_starts[source][window] for source, window in draws.tolist()]
        starts_B = _to_device(np.array(starts, dtype=np.int64), self._device)
        positions_BT1 = starts_B[:, None] + self._offsets_T1
        return _inputs_and_targets(self._ids[positions_BT1].long())


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # A copy from pinned memory does not wait for the step that is running. torch allocates pinned
    # memory for each batch and reuses it only after the copy; a buffer that we reuse ourselves
    # could be overwritten during the copy.
    return tensor.pin_memory().to(device, non_blocking=True)


def _inputs_and_targets(ids_BT1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Not views: a compiled step would copy an input that does not start at a multiple of 16 bytes.
    return ids_BT1[:, :-1].contiguous(), ids_BT1[:, 1:].contiguous()


def eval_batches(
    batches: Mapped | Resident, draws: np.ndarray, *, batch_size: int, rank: int, num_processes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this process's share of the draws: inputs_BT and targets_BT, (B, T) int64.

    Args:
        batches: reads the windows.
        draws: (n, 2) int64, the source and the window of each sequence. Each is yielded once, by
            one process.
        batch_size: number of sequences in a batch. The last batch may have fewer.
        rank: rank of this process.
        num_processes: number of processes that share the draws.
    """
    own_draws = draws[rank::num_processes]
    for start in range(0, len(own_draws), batch_size):
        yield batches.batch(own_draws[start : start + batch_size])
