"""The parameter groups of AdamW, and the kinds of weights by which optimizers group parameters."""

from collections.abc import Iterable

from torch import nn

from ursa_minor.model.architectures import Architecture


def groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict]:
    """Return parameters in two groups: matrices and embeddings, which decay, then norms and biases, which do not.

    A group without parameters is left out.
    """
    decaying: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for _, parameter in named:
        if parameter.dim() < 2:
            vectors.append(parameter)
        else:
            decaying.append(parameter)
    both = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in both if group["params"]]


def is_hidden_matrix(name: str, parameter: nn.Parameter, architecture: Architecture) -> bool:
    """Return whether a parameter is a matrix of a block, which maps features to features."""
    return parameter.dim() >= 2 and architecture.blocks in name
