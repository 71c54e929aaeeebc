"""Gather the full model under FSDP, for evaluation, sampling and export."""

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ursa_minor.model.build import build
from ursa_minor.recipe import keys


class FullModel:
    """A context manager factory that yields the model with all of its weights on this process.

    A model that is not sharded is yielded as it is. A sharded model can compute only if all
    processes run the same number of forward passes. So its weights are gathered into a copy that
    computes without the other processes. All processes must enter the block together.

    Args:
        model: the model, before Accelerate has wrapped it.
        shape: the model keys that it was built from.
        device: the device of this process.
    """

    def __init__(self, model: PreTrainedModel, shape: keys.Model, device: torch.device):
        self._model = model
        self._device = device
        self._copy: PreTrainedModel | None = None
        is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        if is_sharded:
            self._copy = build(shape, eos_token_id=model.config.eos_token_id)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[PreTrainedModel]:
        """Yield the full model. The copy of a sharded model is on the device during the block."""
        if self._copy is None:
            yield self._model
            return
        options = StateDictOptions(full_state_dict=True)
        self._copy.load_state_dict(get_model_state_dict(self._model, options=options))
        try:
            yield self._copy.to(self._device)
        finally:
            self._copy.to("cpu")
