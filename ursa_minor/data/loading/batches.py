"""Turn windows of token ids into batches on the device."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ursa_minor.data.loading.windows import Windows


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
        starts = np.array(
            [self._starts[source][window] for source, window in draws.tolist()], dtype=np.int64
        )
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


def eval_batches(
    batches: Mapped | Resident, draws: np.ndarray, *, batch_size: int, rank: int, num_processes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this process's share of ``draws``: inputs_BT and targets_BT, B up to ``batch_size``, each draw once."""
    mine = draws[rank::num_processes]
    for begin in range(0, len(mine), batch_size):
        yield batches.batch(mine[begin : begin + batch_size])
