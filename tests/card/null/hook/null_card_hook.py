"""What PyTorch runs at its import under the null card (an entry point of the group torch.backends)."""

import ctypes
import itertools
import pickle


def on_import() -> None:
    """Turn off, or answer, what needs more than a card without numbers."""
    import torch

    # cuDNN plans its attention after asking the card itself, in more ways than the null card answers.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.isin = _none_is_in(torch, torch.isin)
    torch.stack = _stacked(torch, torch.stack)
    if torch.distributed.is_available():
        torch.distributed.broadcast_object_list = _broadcast_by_store(torch.distributed)


def _none_is_in(torch, is_in):
    """Answer that nothing is in: on a card it counts distinct values and takes a size from the count.

    Transformers asks it when it samples.
    """

    def answer(elements, test_elements, **how):
        tensors = [value for value in (elements, test_elements) if isinstance(value, torch.Tensor) and value.is_cuda]
        if not tensors:
            return is_in(elements, test_elements, **how)
        shape = elements.shape if isinstance(elements, torch.Tensor) else ()
        return torch.zeros(shape, dtype=torch.bool, device=tensors[0].device)

    return answer


def _stacked(torch, stack):
    """Stack numbers for real: validation divides by one that the host has put on the card."""

    def answer(tensors, *where, **how):
        out = stack(tensors, *where, **how)
        plain = {type(tensor) for tensor in (out, *tensors)} == {torch.Tensor}  # neither a compiler's nor a DTensor
        if plain and out.is_cuda and out.dim() == 1 and {tensor.dtype for tensor in tensors} == {out.dtype}:
            for place, tensor in zip(out, tensors, strict=True):
                ctypes.memmove(place.data_ptr(), tensor.data_ptr(), tensor.element_size())
        return out

    return answer


def _broadcast_by_store(distributed):
    """Send objects through the store by which the processes met: over NCCL their sizes would be added up on the card."""
    numbers = itertools.count()

    def broadcast_object_list(objects, src=0, group=None, device=None):
        store, key = distributed.distributed_c10d._get_default_store(), f"null-card-objects-{next(numbers)}"
        if distributed.get_rank() == src:
            store.set(key, pickle.dumps(list(objects)))
        else:
            objects[:] = pickle.loads(store.get(key))

    return broadcast_object_list
