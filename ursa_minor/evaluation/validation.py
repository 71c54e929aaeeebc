"""Compute the loss of a split over all processes, weighted by tokens."""

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
    """Return the mean loss over the batches of all processes, without dropout.

    Args:
        loss_module: module that maps inputs_BT and targets_BT to the mean loss in nats per token.
            It must not be a DDP wrapper, because the processes may have different numbers of
            batches.
        batches: the (inputs_BT, targets_BT) of this process. Over all processes, each token
            occurs once.
        bytes_per_token: (vocabulary,) bytes of text that each id represents, or None to leave
            ``bits_per_byte`` out of the result.
        accelerator: the processes that share the batches, or None if this process has all of them.
        stop: function that is called before each batch. If it returns True, the evaluation ends on
            all processes.

    Returns:
        ``loss`` in nats per token, and ``bits_per_byte``. None if any process was stopped.
    """
    was_training = loss_module.training
    loss_module.eval()
    # Nats, tokens, bytes, and whether this process was stopped. On a GPU with float64 the sums stay
    # on the GPU, so that the host waits for it only once, at the end.
    sums = torch.zeros(4, dtype=torch.float64, device=float64_device(device))
    bytes_of_id = None
    if bytes_per_token is not None:
        bytes_of_id = torch.as_tensor(bytes_per_token, device=device)
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

    if accelerator is not None:
        sums = accelerator.reduce(sums, "sum")
    nats, tokens, text_bytes, num_stopped = sums.tolist()
    if num_stopped:
        return None
    result = {"loss": nats / tokens}
    if text_bytes:
        result["bits_per_byte"] = nats / math.log(2) / text_bytes
    return result
