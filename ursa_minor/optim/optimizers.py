"""Define the optimizers: how each is built, its state, and its requirements.

Importing this module does not import torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ursa_minor.base.errors import BadInput, first_line
from ursa_minor.model.architectures import ARCHITECTURES
from ursa_minor.recipe import keys

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Optional dependency.
BITSANDBYTES_REQUIREMENT = "bitsandbytes==0.50.2"
# bitsandbytes stores moments of smaller tensors in fp32, and one scale for each block of elements.
QUANTIZED_FROM = 4096
QUANTIZATION_BLOCK = 256


class Moments(NamedTuple):
    """Bytes of optimizer state per weight.

    Attributes:
        hidden: for weights in the matrices of blocks.
        embeddings: for weights in embeddings, positions and the head.
        vectors: for weights in norms and biases.
    """

    hidden: float
    embeddings: float
    vectors: float


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Definition of an optimizer.

    Attributes:
        groups: function that returns the parameter groups of a model, each with its weight decay.
        make: function that returns the class, and its arguments except groups and learning rate.
        moments: bytes of optimizer state per weight.
        state_tensors: function that returns the state of one parameter by name, given its group and
            a tensor like it. Both tensors and results are on the meta device. A checkpoint is
            compared with them.
        package: optional dependency, name==version. It is tried on the device before training.
    """

    groups: Callable[["PreTrainedModel", keys.Optimizer], list[dict]]
    make: Callable[[keys.Optimizer], tuple[type, dict[str, Any]]]
    moments: Moments
    state_tensors: Callable[[dict[str, Any], "torch.Tensor"], dict[str, "torch.Tensor"]]
    package: str | None = None


def build(
    model: "PreTrainedModel", settings: keys.Optimizer, *, shard: bool = False
) -> "torch.optim.Optimizer":
    """Build the optimizer of a recipe, with a learning rate of 0.

    ``schedule.set_lr`` sets the rate of each update. Weight decay applies to tensors of two or more
    dimensions only, and so not to biases and norms.

    Args:
        model: the model to train.
        settings: the optimizer keys of the recipe.
        shard: whether each process stores the moments of its share of the tensors, updates these
            tensors, and sends them to the other processes (ZeRO-1,
            https://arxiv.org/abs/1910.02054). The updates are the same.
    """
    spec = OPTIMIZERS[settings.optimizer]
    optimizer_class, arguments = spec.make(settings)
    groups = spec.groups(model, settings)
    if shard:
        # Imported here because the import causes warnings of TorchScript.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(groups, optimizer_class, lr=0.0, **arguments)
    return optimizer_class(groups, lr=0.0, **arguments)


def check(settings: keys.Optimizer, device: "torch.device", *, sharded: bool) -> None:
    """Check that the optimizer of a recipe works on this machine.

    Args:
        settings: the optimizer keys of the recipe.
        device: the device that trains.
        sharded: whether moments or weights are sharded (ZeRO-1, FSDP2).

    Raises:
        BadInput: its package is missing or does not run on ``device``, or it cannot be sharded.
    """
    name = settings.optimizer
    spec = OPTIMIZERS[name]
    package = (spec.package or "").partition("==")[0]
    try:
        optimizer_class, arguments = spec.make(settings)
    except ImportError:
        raise BadInput(
            f"optimizer = {name} needs the package {package}. Install it with pip install "
            f"{spec.package}, or use --optimizer adamw"
        ) from None
    if sharded and not keys.OPTIMIZER_CAN_SHARD[name]:
        raise BadInput(
            f"optimizer = {name} cannot update sharded moments or weights. Use --shard_optimizer "
            f"false and a YAML without FSDP, or --optimizer adamw"
        )
    if not package:
        return

    # Make one update. Otherwise the package may find out only at the first update of training,
    # after minutes of compiling, that it has no kernels for this device.
    import torch

    parameter = torch.nn.Parameter(torch.zeros(QUANTIZED_FROM, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer_class([parameter], **arguments).step()
    except RuntimeError as error:
        raise BadInput(
            f"optimizer = {name}: {package} does not run on {device}: {first_line(error)}. Use "
            f"--optimizer adamw"
        ) from None


def _groups(model: "PreTrainedModel", settings: keys.Optimizer) -> list[dict]:
    from ursa_minor.optim import adamw

    return adamw.groups(model.named_parameters(), settings.weight_decay)


def _adam(settings: keys.Optimizer) -> dict[str, Any]:
    return {"betas": (settings.adam_beta1, settings.adam_beta2), "eps": settings.adam_epsilon}


def _adamw(settings: keys.Optimizer) -> tuple[type, dict[str, Any]]:
    from torch.optim import AdamW

    return AdamW, _adam(settings) | {"fused": True}


def _adamw_state(_group: dict[str, Any], like: "torch.Tensor") -> dict[str, "torch.Tensor"]:
    return {"step": like.new_empty(()), "exp_avg": like, "exp_avg_sq": like}


def _adamw_8bit(settings: keys.Optimizer) -> tuple[type, dict[str, Any]]:
    """Return the AdamW of bitsandbytes (https://arxiv.org/abs/2110.02861) and its arguments.

    It stores the moments of a tensor of 4,096 or more elements in one byte per element, and one
    fp32 scale for each 256 elements.
    """
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit, _adam(settings)


def _adamw_8bit_state(_group: dict[str, Any], like: "torch.Tensor") -> dict[str, "torch.Tensor"]:
    moment = {"state": like}
    if like.numel() >= QUANTIZED_FROM:
        moment = {
            "state": like.byte(),
            "qmap": like.new_empty(256),
            "absmax": like.new_empty(math.ceil(like.numel() / QUANTIZATION_BLOCK)),
        }
    state = {}
    for number in (1, 2):
        for name, tensor in moment.items():
            state[f"{name}{number}"] = tensor
    state["step"] = like.new_empty(()).long()
    return state


def _muon(settings: keys.Optimizer) -> tuple[type, dict[str, Any]]:
    from ursa_minor.optim.muon import Muon

    return Muon, _adam(settings) | {"momentum": settings.muon_momentum}


def _muon_groups(model: "PreTrainedModel", settings: keys.Optimizer) -> list[dict]:
    from ursa_minor.optim import muon

    return muon.groups(model, ARCHITECTURES[model.config.model_type], settings.weight_decay)


def _muon_state(group: dict[str, Any], like: "torch.Tensor") -> dict[str, "torch.Tensor"]:
    if group.get("parts"):
        return {"momentum_buffer": like}
    return _adamw_state(group, like)


OPTIMIZERS = {
    "adamw": OptimizerSpec(
        groups=_groups, make=_adamw, moments=Moments(8.0, 8.0, 8.0), state_tensors=_adamw_state
    ),
    "adamw_8bit": OptimizerSpec(
        groups=_groups,
        make=_adamw_8bit,
        moments=Moments(2 + 8 / QUANTIZATION_BLOCK, 2 + 8 / QUANTIZATION_BLOCK, 8.0),
        state_tensors=_adamw_8bit_state,
        package=BITSANDBYTES_REQUIREMENT,
    ),
    "muon": OptimizerSpec(
        groups=_muon_groups, make=_muon, moments=Moments(4.0, 8.0, 8.0), state_tensors=_muon_state
    ),
}
