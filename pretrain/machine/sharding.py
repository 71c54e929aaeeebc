"""The whole model under FSDP, for what needs it whole: looking, sampling, export."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


class WholeModel:
    """Call it for the model with all of its weights on this process.

    A model that is not sharded is itself. A sharded one computes only together with the other processes, each of which
    must do the same number of forward passes; so it is gathered, for as long as the block runs, into a copy that
    computes alone. Every process must ask for it then.

    Args:
        copy: makes the copy, on the CPU; None where the model is not sharded.
    """

    def __init__(self, model: nn.Module, device: torch.device, copy: Callable[[], nn.Module] | None):
        self.model, self.device = model, device
        self.copy = copy() if copy else None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[nn.Module]:
        if self.copy is None:
            yield self.model
            return
        self.copy.load_state_dict(get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True)))
        yield self.copy.to(self.device)
        self.copy.to("cpu")
