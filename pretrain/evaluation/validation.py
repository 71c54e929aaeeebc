"""Validation loss, weighted by tokens, over all processes, in nats per token and in bits per byte."""

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn


@torch.no_grad()
def validation_loss(
    loss_module: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    device: torch.device,
    bytes_per_token: np.ndarray | None = None,
    accelerator: Accelerator | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Return ``loss`` (nats per token) and ``bits_per_byte`` of the batches of all processes, dropout off.

    Args:
        loss_module: inputs_BT, targets_BT to mean nats per token; not a DDP wrapper: processes may have unequal counts.
        batches: this process's (inputs_BT, targets_BT), each token once over all processes.
        bytes_per_token: bytes of text of each id; None leaves ``bits_per_byte`` out.
        accelerator: of the processes that share the batches; None: this one has all.
        stop: asked between batches; True abandons the evaluation (None is returned, on every process).
    """
    was_training = loss_module.training
    loss_module.eval()
    # Sums stay on the device: the host waits for it once, at the end.
    nats = torch.zeros((), dtype=torch.float64, device=device)
    text_bytes = torch.zeros((), dtype=torch.int64, device=device)
    bytes_of_id = None if bytes_per_token is None else torch.as_tensor(bytes_per_token, device=device)
    tokens, stopped = 0, False
    try:
        for inputs_BT, targets_BT in batches:
            if stopped := stop():
                break
            targets_BT = targets_BT.to(device)
            nats += loss_module(inputs_BT.to(device), targets_BT).double() * targets_BT.numel()
            tokens += targets_BT.numel()
            if bytes_of_id is not None:
                text_bytes += bytes_of_id[targets_BT].sum()
    finally:
        loss_module.train(was_training)
    counted, stops = nats.new_tensor(tokens), nats.new_tensor(stopped)
    both = torch.stack([nats, counted, text_bytes.double(), stops])
    sums = (accelerator.reduce(both, "sum") if accelerator else both).tolist()
    if sums[3]:
        return None
    result = {"loss": sums[0] / sums[1]}
    if sums[2]:
        result["bits_per_byte"] = sums[0] / math.log(2) / sums[2]
    return result
