"""A try of one micro-batch before the first step: does it fit into the card's memory?"""

import gc
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

from pretrain.base.errors import BadInput, is_out_of_memory


def runs_out_of_memory(
    forward_and_backward: Callable[[torch.Tensor, torch.Tensor], None],
    parameters: Iterable[nn.Parameter],
    *,
    micro_batch: int,
    sequence_length: int,
    micro_batches: int,
    room_bytes: int,
    device: torch.device,
) -> bool:
    """Return whether a step's micro-batches run out of memory, and leave nothing of them behind.

    Raises BadInput when the compiler cannot compile it.

    Args:
        forward_and_backward: takes inputs_BT and targets_BT, (B, T) int64; must not exchange gradients, as another
            process may have failed.
        parameters: whose gradients are made.
        micro_batches: of a step; of several two are tried, since the gradients of the first are there in the second.
        room_bytes: what must find room beside them: moments that the optimizer has not allocated yet.
    """
    parameters = list(parameters)
    failed = False
    try:
        room = torch.empty(room_bytes, dtype=torch.uint8, device=device)
        inputs_BT = torch.zeros(micro_batch, sequence_length, dtype=torch.int64, device=device)
        for _ in range(min(2, micro_batches)):
            forward_and_backward(inputs_BT, inputs_BT.clone())  # two tensors, as in training: one compiles otherwise
    except (RuntimeError, TorchDynamoException, InductorError) as error:
        failed = is_out_of_memory(error)  # the exception, whose frames hold tensors, is gone after this block
        if not failed and isinstance(error, (TorchDynamoException, InductorError)):
            raise BadInput(
                f"torch.compile fails on this machine: {_first_line(error)}. check_setup.py tells more; without the "
                f'compiler: dynamo_backend: "NO" in the accelerate YAML, or ACCELERATE_DYNAMO_BACKEND=no'
            ) from None
        if not failed:
            raise
    finally:
        room = None  # noqa: F841  (freed here)
        for parameter in parameters:
            parameter.grad = None
    if failed:
        torch._dynamo.reset()  # a second size would be compiled as "any size", which is slower
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return failed


def _first_line(error: Exception) -> str:
    cause = getattr(error, "inner_exception", None) or error
    return (str(cause).strip().splitlines() or [""])[0][:200] or type(cause).__name__
