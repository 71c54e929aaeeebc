"""Scores of questions, plain: log-likelihoods in, shares out. ``metrics/`` has the same for ``evaluate.load``.

Standard errors are the sample's deviation / sqrt(n), as lm-evaluation-harness has them; a perplexity's is that of the
mean log-likelihood times the perplexity, where the harness draws samples.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

Metric = Callable[..., dict[str, float]]
Ragged = Sequence[np.ndarray]  # a value for each ending of each question, N times (E,)


def likeliest(sums: Ragged, lengths: Ragged | None = None) -> np.ndarray:
    """Return each question's likeliest ending, (N,); of equals the first, and none that has no length.

    Args:
        sums: the endings' log-likelihoods in nats.
        lengths: the endings', in characters or tokens: the likeliest for each of them.
    """
    if lengths is None:
        return np.array([values.argmax() for values in sums])
    means = (np.where(size, values / np.maximum(1, size), -np.inf) for values, size in zip(sums, lengths, strict=True))
    return np.array([values.argmax() for values in means])


def multiple_choice(
    *, predictions: Ragged, characters: Ragged, tokens: Ragged, references: np.ndarray
) -> dict[str, float]:
    """Return acc, acc_norm (per character) and acc_token_norm, and each one's standard error.

    Args:
        predictions: the endings' log-likelihoods in nats.
        references: the right endings, (N,).
    """
    found = {}
    for name, lengths in (("acc", None), ("acc_norm", characters), ("acc_token_norm", tokens)):
        found |= _share(likeliest(predictions, lengths) == references, name)
    return found


def last_word(*, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Return acc and perplexity, and each one's standard error.

    Args:
        predictions: the words' log-likelihoods in nats, (N,).
        references: whether greedy decoding gives the word, (N,).
    """
    found = float(np.exp(-predictions.mean()))
    error = float(predictions.std(ddof=1) / math.sqrt(len(predictions))) if len(predictions) > 1 else 0.0
    return _share(references, "acc") | {"perplexity": found, "perplexity_stderr": found * error}


PLAIN: dict[str, Metric] = {"multiple_choice": multiple_choice, "last_word": last_word}


def _share(right: np.ndarray, name: str) -> dict[str, float]:
    share = float(right.mean())
    return {name: share, f"{name}_stderr": math.sqrt(share * (1 - share) / max(1, len(right) - 1))}
