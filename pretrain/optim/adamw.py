"""AdamW's groups, and its step with Nesterov's momentum and cautious updates, which torch's has not.

Sources: T. Dozat, Incorporating Nesterov momentum into Adam, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ (NAdam,
with one momentum for all updates, and decoupled decay); K. Liang et al., https://arxiv.org/abs/2411.16085 (cautious;
without its scale, which would need a sum over shards, and is a matter of the learning rate).
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pretrain.model.architectures import Architecture

MOST_ELEMENTS = 2**26  # of tensors that are updated at once: bounds the memory, and is enough to fill a card


def groups(
    named: Iterable[tuple[str, nn.Parameter]], record: Architecture, weight_decay: float, ratios: Mapping[str, float]
) -> list[dict]:
    """Return parameters as groups of one decay and one rate: those that decay first.

    Args:
        ratios: what ``embeddings`` (with the head), ``positions`` and ``vectors`` (norms and biases, which do not decay)
            learn at, as parts of the learning rate; 1 where none is given.
    """
    found: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        part = kind(name, parameter, record)
        found.setdefault((part == "vectors", ratios.get(part, 1.0)), []).append(parameter)
    return [
        {"params": params, "weight_decay": 0.0 if is_vector else weight_decay, "lr_ratio": ratio}
        for (is_vector, ratio), params in sorted(found.items(), key=lambda item: item[0][0])
    ]


def kind(name: str, parameter: nn.Parameter, record: Architecture) -> str:
    """Return vectors, matrices (of blocks: from features to features), positions or embeddings (and the head)."""
    if parameter.dim() < 2:
        return "vectors"
    if record.blocks in name:
        return "matrices"
    return "positions" if record.positions is not None and record.positions in name else "embeddings"


def batches(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters that have gradients, at most ``MOST_ELEMENTS`` at a time, or one that is larger."""
    batch: list[nn.Parameter] = []
    elements = 0
    for parameter in (p for p in parameters if p.grad is not None):
        if batch and elements + parameter.numel() > MOST_ELEMENTS:
            yield batch
            batch, elements = [], 0
        batch.append(parameter)
        elements += parameter.numel()
    if batch:
        yield batch


def update(parameters: list[nn.Parameter], group: dict, state: dict) -> None:
    """Update parameters of one group in place. Each process updates its own shard: no element needs another.

    Args:
        group: with AdamW's settings, ``nesterov`` (the step is that of the momentum after one more update with the same
            gradient) and ``cautious`` (a weight whose step goes against its gradient waits).
        state: of each parameter, AdamW's, with the count of updates on the host; made here at the first.
    """
    for parameter in parameters:
        own = state[parameter]
        if "step" not in own:
            own.update(step=torch.tensor(0.0))
            own.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        own["step"] = own["step"].cpu()  # a checkpoint's lies on the device: one wait, not each
    weights = [_local(p) for p in parameters]
    gradients = [_local(p.grad) for p in parameters]
    first, second = ([_local(state[p][name]) for p in parameters] for name in ("exp_avg", "exp_avg_sq"))
    torch._foreach_add_([state[p]["step"] for p in parameters], 1)
    done = state[parameters[0]]["step"].item()
    beta1, beta2 = group["betas"]
    torch._foreach_lerp_(first, gradients, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
    ahead = done + 1 if group["nesterov"] else done
    steps = torch._foreach_mul(first, (beta1 if group["nesterov"] else 1.0) / (1 - beta1**ahead))
    if group["nesterov"]:
        torch._foreach_add_(steps, gradients, alpha=(1 - beta1) / (1 - beta1**done))
    if group["cautious"]:
        agree = torch._foreach_mul(steps, gradients)
        torch._foreach_sign_(agree)
        torch._foreach_clamp_min_(agree, 0)
        torch._foreach_mul_(steps, agree)
    scales = torch._foreach_sqrt(second)
    torch._foreach_div_(scales, (1 - beta2**done) ** 0.5)
    torch._foreach_add_(scales, group["eps"])
    torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_addcdiv_(weights, steps, scales, value=-group["lr"])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
