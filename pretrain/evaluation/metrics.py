"""Scores of questions, plain: log-likelihoods in, shares out. ``metrics/`` has the same for ``evaluate.load``.

Standard errors are the sample's deviation / sqrt(n), as lm-evaluation-harness has them; a perplexity's is that of the
mean log-likelihood times the perplexity, where the harness draws samples.
"""

import math
from collections.abc import Sequence

import numpy as np


def likeliest(sums: Sequence[np.ndarray], lengths: Sequence[np.ndarray] | None = None) -> np.ndarray:
    """Return each question's likeliest ending, (N,); of equals the first, and none that has no length.

    Args:
        sums: of each question the log-likelihoods of its endings in nats, (E,).
        lengths: of the endings, in characters or tokens: the likeliest for each of them.
    """
    if lengths is None:
        return np.array([values.argmax() for values in sums])
    means = (np.where(size, values / np.maximum(1, size), -np.inf) for values, size in zip(sums, lengths, strict=True))
    return np.array([values.argmax() for values in means])


def accuracy(right: np.ndarray, name: str = "acc") -> dict[str, float]:
    """Return the share of N right answers, (N,), and its standard error."""
    share = float(right.mean())
    return {name: share, f"{name}_stderr": math.sqrt(share * (1 - share) / max(1, len(right) - 1))}


def perplexity(nats: np.ndarray) -> dict[str, float]:
    """Return exp of the mean negative log-likelihood of N words in nats, (N,), and its standard error."""
    found = float(np.exp(-nats.mean()))
    error = float(nats.std(ddof=1) / math.sqrt(len(nats))) if len(nats) > 1 else 0.0
    return {"perplexity": found, "perplexity_stderr": found * error}
