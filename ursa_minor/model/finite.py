"""Check that every weight is a finite number, in the model and in the format that stores it."""

import torch

from ursa_minor.base.errors import BadInput


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise BadInput if a weight contains NaN or infinity.

    Args:
        name: name of the weight in the message.
        tensor: the weight.
    """
    if _is_finite(tensor):
        return
    raise BadInput(
        f"{name} contains NaN or infinity, so the model cannot be exported. "
        f"Export a checkpoint from before the training diverged"
    )


def require_stored(
    name: str, weight: torch.Tensor, stored: torch.Tensor, *, limit: float, label: str, fix: str
) -> None:
    """Raise BadInput if a finite weight became infinite in the format that stores it.

    Args:
        name: name of the weight in the message.
        weight: the values of the weight in the model.
        stored: the values that a program will read from the file.
        limit: largest value of the format.
        label: name of the format in the message.
        fix: sentence that says which format to use instead.
    """
    if _is_finite(stored):
        return
    largest = weight.float().abs().max().item()
    raise BadInput(f"{name} has values up to {largest:.6g}, but {label} ends at {limit:.6g}. {fix}")


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    if tensor.itemsize == 1:  # isfinite is not implemented for float8
        tensor = tensor.float()
    return bool(tensor.isfinite().all())
