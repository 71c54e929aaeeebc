"""Compute the scores of a task from log-likelihoods.

``metrics/`` has the same scores for ``evaluate.load``; its comments say why they are implemented twice. Standard errors
are those of lm-evaluation-harness: the sample's standard deviation / sqrt(n). The standard error of a perplexity is the
standard error of the mean log-likelihood times the perplexity, for which the harness draws samples.
"""

import math
from collections.abc import Callable, Sequence, Sized

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
    means = (
        np.where(size, values / np.maximum(1, size), -np.inf)
        for values, size in zip(sums, lengths, strict=True)
    )
    return np.array([values.argmax() for values in means])


def multiple_choice(
    *, predictions: Ragged, characters: Ragged, tokens: Ragged, references: np.ndarray
) -> dict[str, float]:
    """Return acc, acc_norm (per character) and acc_token_norm, and each one's standard error.

    Args:
        predictions: the endings' log-likelihoods in nats.
        characters, tokens: the endings' lengths.
        references: the right endings, (N,).

    Raises:
        ValueError: a value is not valid. The message names the question.
    """
    _check_counts(references, predictions, characters, tokens)
    sums = [np.asarray(values, dtype=np.float64) for values in predictions]
    labels = np.asarray(references)
    for number, (values, reference) in enumerate(zip(sums, references, strict=True)):
        _check_finite(f"predictions[{number}]", values)
        endings = len(values)
        if reference not in range(endings):
            raise ValueError(
                f"references[{number}] = {reference} is not the number of one of {endings} endings"
            )
        _check_lengths(f"characters[{number}]", characters[number], endings)
        _check_lengths(f"tokens[{number}]", tokens[number], endings)

    scores = {}
    for name, lengths in (("acc", None), ("acc_norm", characters), ("acc_token_norm", tokens)):
        scores |= _share(likeliest(sums, lengths) == labels, name)
    return scores


def last_word(*, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Return acc and perplexity, and each one's standard error.

    Args:
        predictions: the words' log-likelihoods in nats, (N,).
        references: whether greedy decoding gives the word, (N,).

    Raises:
        ValueError: a value is not valid. The message names the word.
    """
    _check_counts(references, predictions)
    nats = np.asarray(predictions, dtype=np.float64)
    right = np.asarray(references)
    for number, (value, reference) in enumerate(zip(nats, references, strict=True)):
        _check_finite(f"predictions[{number}]", value)
        if reference not in (0, 1):
            raise ValueError(f"references[{number}] = {reference} is neither 0 nor 1")

    with np.errstate(over="ignore"):  # the perplexity of very unlikely words is infinite
        perplexity = float(np.exp(-nats.mean()))
    error = 0.0
    if len(nats) > 1:
        error = float(nats.std(ddof=1) / math.sqrt(len(nats)))
    scores = _share(right, "acc")
    scores["perplexity"] = perplexity
    scores["perplexity_stderr"] = perplexity * error
    return scores


PLAIN: dict[str, Metric] = {"multiple_choice": multiple_choice, "last_word": last_word}


def _check_counts(references: Sized, *others: Sized) -> None:
    """Raise ValueError unless there is something to score, and as much of everything."""
    counts = [len(references), *map(len, others)]
    if len({*counts}) > 1:
        raise ValueError(f"references, predictions and lengths differ in number: {counts}")
    if len(references) == 0:
        raise ValueError("there is nothing to score: predictions and references are empty")


def _check_finite(where: str, nats: np.ndarray) -> None:
    if nats.size == 0:
        raise ValueError(f"{where} is empty: a question needs endings")
    if not np.isfinite(nats).all():
        raise ValueError(f"{where} = {nats.tolist()}: a log-likelihood is not finite")


def _check_lengths(where: str, lengths: np.ndarray, endings: int) -> None:
    if len(lengths) != endings:
        raise ValueError(f"{where} has {len(lengths)} lengths for {endings} endings")
    values = np.asarray(lengths, dtype=np.float64)
    if not (values >= 0).all() or (values % 1).any():
        raise ValueError(
            f"{where} = {values.tolist()}: a length is not a whole number of 0 or more"
        )


def _share(right: np.ndarray, name: str) -> dict[str, float]:
    share = float(right.mean())
    return {name: share, f"{name}_stderr": math.sqrt(share * (1 - share) / max(1, len(right) - 1))}
