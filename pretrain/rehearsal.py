"""A try of one micro-batch before the first step: does it fit into the card's memory?"""

import gc
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

from .errors import BadInput


def runs_out_of_memory(
    forward_and_backward: Callable[[torch.Tensor, torch.Tensor], None],
    parameters: Iterable[nn.Parameter],
    *,
    micro_batch: int,
    sequence_length: int,
    moments_held: bool,
    device: torch.device,
) -> bool:
    """Return whether a micro-batch runs out of memory, and leave nothing of it behind.

    Raises BadInput when the compiler cannot compile it.

    Args:
        forward_and_backward: takes inputs_BT and targets_BT, (B, T) int64; must not exchange gradients, as another
            process may have failed.
        parameters: whose gradients and, unless ``moments_held``, two moments must find room beside it.
        moments_held: whether the optimizer has allocated its own already (a resumed run).
    """
    parameters = list(parameters)
    failed = False
    try:
        room = [] if moments_held else [torch.empty_like(p) for p in parameters for _ in range(2)]
        inputs_BT = torch.zeros(micro_batch, sequence_length, dtype=torch.int64, device=device)
        forward_and_backward(inputs_BT, inputs_BT.clone())  # two tensors, as in training: one would be compiled apart
    except torch.OutOfMemoryError:
        failed = True  # and the exception, whose frames hold tensors, is gone after this line
    except (TorchDynamoException, InductorError) as error:
        if not isinstance(getattr(error, "inner_exception", None), torch.OutOfMemoryError):
            raise BadInput(
                f"torch.compile fails on this machine: {_first_line(error)}. check_setup.py tells more; without the "
                f'compiler: dynamo_backend: "NO" in the accelerate YAML, or ACCELERATE_DYNAMO_BACKEND=no'
            ) from None
        failed = True
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
