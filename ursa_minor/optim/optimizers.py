"""Definitions of the optimizers: how each is built, its state, and its requirements. Imports no torch at the top."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ursa_minor.base.errors import BadInput, first_line
from ursa_minor.model.architectures import ARCHITECTURES
from ursa_minor.recipe import keys

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

BITSANDBYTES_REQUIREMENT = "bitsandbytes==0.50.2"  # optional


class Moments(NamedTuple):
    """Bytes that an optimizer keeps of a weight.

    Attributes:
        hidden: of the blocks' matrices.
        embeddings: of embeddings, positions and head.
        vectors: of norms and biases, whose tensors have fewer than 4,096 elements.
    """

    hidden: float
    embeddings: float
    vectors: float


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """All that depends on the optimizer.

    Attributes:
        groups: the parameters as the groups that the class takes; each states its weight decay.
        make: the class and its further arguments, but for the learning rate.
        moments: bytes that it keeps of a weight.
        state_tensors: what it keeps of a parameter, by name: tensors on the meta device, made from a parameter that lies there.
            A checkpoint's are compared with them.
        package: what to install for it, name==version; it is then tried on the device before training.
    """

    groups: Callable[["PreTrainedModel", keys.Optimizer], list[dict]]
    make: Callable[[keys.Optimizer], tuple[type, dict[str, Any]]]
    moments: Moments
    state_tensors: Callable[[dict[str, Any], "torch.Tensor"], dict[str, "torch.Tensor"]]
    package: str | None = None


def build(
    model: "PreTrainedModel", settings: keys.Optimizer, *, shard: bool = False
) -> "torch.optim.Optimizer":
    """Build the recipe's optimizer of a model's weights, with a learning rate of 0: ``set_lr`` sets it for each update.

    Weight decay acts on tensors of two or more dimensions only (not on biases and norms).

    Args:
        shard: each process of the default group keeps the moments of its share of the tensors, updates these, and
            sends them to the others (ZeRO-1, https://arxiv.org/abs/1910.02054). The updates are the same.
    """
    spec = OPTIMIZERS[settings.optimizer]
    kind, arguments = spec.make(settings)
    groups = spec.groups(model, settings)
    if shard:
        # Importing the package causes warnings of TorchScript.
        from torch.distributed.optim import (
            ZeroRedundancyOptimizer,
        )

        return ZeroRedundancyOptimizer(groups, kind, lr=0.0, **arguments)
    return kind(groups, lr=0.0, **arguments)


def check(settings: keys.Optimizer, device: "torch.device", *, sharded: bool) -> None:
    """Raise BadInput where the optimizer's package is missing or does not run on ``device``, and for shards it refuses.

    Args:
        sharded: moments or weights are in shards (ZeRO-1, FSDP2).
    """
    name, spec = settings.optimizer, OPTIMIZERS[settings.optimizer]
    package = (spec.package or "").partition("==")[0]
    try:
        kind, arguments = spec.make(settings)
    except ImportError:
        install = f"pip install {spec.package}, or --optimizer adamw"
        raise BadInput(f"optimizer = {name} needs {package}: {install}") from None
    if sharded and not keys.OPTIMIZER_CAN_SHARD[name]:
        raise BadInput(
            f"optimizer = {name}: updates no moments or weights in shards; use --shard_optimizer false and a YAML without "
            f"FSDP, or --optimizer adamw"
        )
    if not package:
        return
    import torch

    # A package may search its kernels for this device at the first update only, minutes of compiling later.
    trial = torch.nn.Parameter(torch.zeros(4096, device=device))
    trial.grad = torch.zeros_like(trial)
    try:
        kind([trial], **arguments).step()
    except RuntimeError as error:
        why = f"{package} does not run on {device}: {first_line(error)}"
        raise BadInput(f"optimizer = {name}: {why}; --optimizer adamw") from None


def _groups(model: "PreTrainedModel", settings: keys.Optimizer) -> list[dict]:
    from ursa_minor.optim import adamw

    return adamw.groups(model.named_parameters(), settings.weight_decay)


def _adam(settings: keys.Optimizer) -> dict[str, Any]:
    return {"betas": (settings.adam_beta1, settings.adam_beta2), "eps": settings.adam_epsilon}


def _adamw(settings: keys.Optimizer) -> tuple[type, dict[str, Any]]:
    from torch.optim import AdamW

    return AdamW, _adam(settings) | {"fused": True}


def _adamw_keeps(_group: dict[str, Any], like: "torch.Tensor") -> dict[str, "torch.Tensor"]:
    return {"step": like.new_empty(()), "exp_avg": like, "exp_avg_sq": like}


def _adamw_8bit(settings: keys.Optimizer) -> tuple[type, dict[str, Any]]:
    """bitsandbytes' AdamW (https://arxiv.org/abs/2110.02861).

    A moment of a tensor of 4,096 elements or more is a byte an element and a fp32 scale for each 256 of them.
    """
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit, _adam(settings)


def _adamw_8bit_keeps(_group: dict[str, Any], like: "torch.Tensor") -> dict[str, "torch.Tensor"]:
    moment = {"state": like}
    if like.numel() >= 4096:
        scales = like.new_empty(-(-like.numel() // 256))
        moment = {"state": like.byte(), "qmap": like.new_empty(256), "absmax": scales}
    both = {f"{kind}{number}": tensor for number in (1, 2) for kind, tensor in moment.items()}
    return both | {"step": like.new_empty(()).long()}


def _muon(settings: keys.Optimizer) -> tuple[type, dict[str, Any]]:
    from ursa_minor.optim.muon import Muon

    return Muon, _adam(settings) | {"momentum": settings.muon_momentum}


def _muon_groups(model: "PreTrainedModel", settings: keys.Optimizer) -> list[dict]:
    from ursa_minor.optim import muon

    return muon.groups(model, ARCHITECTURES[model.config.model_type], settings.weight_decay)


def _muon_keeps(group: dict[str, Any], like: "torch.Tensor") -> dict[str, "torch.Tensor"]:
    return {"momentum_buffer": like} if group.get("parts") else _adamw_keeps(group, like)


OPTIMIZERS = {
    "adamw": OptimizerSpec(
        groups=_groups, make=_adamw, moments=Moments(8.0, 8.0, 8.0), state_tensors=_adamw_keeps
    ),
    "adamw_8bit": OptimizerSpec(
        groups=_groups,
        make=_adamw_8bit,
        moments=Moments(2 + 8 / 256, 2 + 8 / 256, 8.0),
        state_tensors=_adamw_8bit_keeps,
        package=BITSANDBYTES_REQUIREMENT,
    ),
    "muon": OptimizerSpec(
        groups=_muon_groups, make=_muon, moments=Moments(4.0, 8.0, 8.0), state_tensors=_muon_keeps
    ),
}
