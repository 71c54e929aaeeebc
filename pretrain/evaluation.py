"""Validation loss, weighted by tokens, over all processes, in nats per token and in bits per byte."""

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import nn


@torch.no_grad()
def validation_loss(
    loss_module: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    device: torch.device,
    reduce_sum: Callable[[torch.Tensor], torch.Tensor],
    bytes_per_token: np.ndarray | None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Return ``loss`` (nats per token) and ``bits_per_byte`` of the batches of all processes, dropout off.

    Args:
        loss_module: inputs_BT, targets_BT to mean nats per token; not a DDP wrapper: processes may have unequal counts.
        batches: this process's (inputs_BT, targets_BT), each token once over all processes.
        reduce_sum: sum of a float64 tensor over the processes.
        bytes_per_token: bytes of text of each id; None leaves ``bits_per_byte`` out.
        stop: asked between batches; True abandons the evaluation (None is returned, on every process).
    """
    was_training = loss_module.training
    loss_module.eval()
    nats, tokens, text_bytes, stopped = 0.0, 0, 0, False
    try:
        for inputs_BT, targets_BT in batches:
            if stopped := stop():
                break
            mean = loss_module(inputs_BT.to(device), targets_BT.to(device))
            nats += mean.item() * targets_BT.numel()
            tokens += targets_BT.numel()
            if bytes_per_token is not None:
                text_bytes += int(bytes_per_token[targets_BT.numpy()].sum())
    finally:
        loss_module.train(was_training)
    sums = reduce_sum(torch.tensor([nats, tokens, text_bytes, stopped], dtype=torch.float64, device=device)).tolist()
    if sums[3]:
        return None
    result = {"loss": sums[0] / sums[1]}
    if sums[2]:
        result["bits_per_byte"] = sums[0] / math.log(2) / sums[2]
    return result
