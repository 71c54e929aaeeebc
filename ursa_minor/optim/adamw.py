"""Parameter groups of AdamW, and the kinds of parameters by which optimizers group them."""

from collections.abc import Iterable

from torch import nn

from ursa_minor.model.architectures import Architecture


def groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict]:
    """Return two parameter groups: matrices and embeddings, then norms and biases.

    Weight decay applies to the first group only. A group without parameters is left out.

    Args:
        named: names and parameters, as from ``named_parameters()``.
        weight_decay: weight decay of the first group.
    """
    decaying: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for _, parameter in named:
        if parameter.dim() < 2:
            vectors.append(parameter)
        else:
            decaying.append(parameter)
    candidates = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in candidates if group["params"]]


def is_hidden_matrix(name: str, parameter: nn.Parameter, architecture: Architecture) -> bool:
    """Return whether a parameter is a matrix inside a block."""
    return parameter.dim() >= 2 and architecture.blocks in name
