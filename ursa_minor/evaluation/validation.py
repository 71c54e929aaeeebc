"""Validation loss, weighted by tokens, over all processes, in nats per token and in bits per byte."""

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from ursa_minor.machine.device import float64_device


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
    # Nats, tokens, bytes, whether to stop. On a GPU with float64 they stay there, and the host waits once, at the end.
    sums = torch.zeros(4, dtype=torch.float64, device=float64_device(device))
    bytes_of_id = (
        None if bytes_per_token is None else torch.as_tensor(bytes_per_token, device=device)
    )
    try:
        for inputs_BT, targets_BT in batches:
            if stop():
                sums[3] = 1
                break
            targets_BT = targets_BT.to(device)
            loss = loss_module(inputs_BT.to(device), targets_BT).to(sums.device)
            sums[0] += loss.double() * targets_BT.numel()
            sums[1] += targets_BT.numel()
            if bytes_of_id is not None:
                sums[2] += bytes_of_id[targets_BT].sum().to(sums.device)
    finally:
        loss_module.train(was_training)
    nats, tokens, text_bytes, stopped = (
        accelerator.reduce(sums, "sum") if accelerator else sums
    ).tolist()
    if stopped:
        return None
    return {"loss": nats / tokens} | (
        {"bits_per_byte": nats / math.log(2) / text_bytes} if text_bytes else {}
    )
