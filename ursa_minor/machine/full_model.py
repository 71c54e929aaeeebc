"""The whole model under FSDP, for what needs it whole: evaluation, sampling, export."""

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ursa_minor.model.build import build
from ursa_minor.recipe import keys


class FullModel:
    """Call it for the model with all of its weights on this process.

    A model that is not sharded is itself. A sharded one computes only together with the other processes, each of which
    must do the same number of forward passes; so it is gathered, for as long as the block runs, into a copy that
    computes alone. Every process must ask for it then.

    Args:
        shape: what the model was built from.
    """

    def __init__(self, model: PreTrainedModel, shape: keys.Model, device: torch.device):
        self._model, self._device = model, device
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self._copy = build(shape, eos_token_id=model.config.eos_token_id) if sharded else None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[PreTrainedModel]:
        if self._copy is None:
            yield self._model
            return
        self._copy.load_state_dict(
            get_model_state_dict(self._model, options=StateDictOptions(full_state_dict=True))
        )
        try:
            yield self._copy.to(self._device)
        finally:
            self._copy.to("cpu")
