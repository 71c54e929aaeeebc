"""Compute the scores of a task from log-likelihoods.

The folder ``metrics/`` has the same scores for ``evaluate.load``; its comments say why they are
implemented twice.

Standard errors are those of lm-evaluation-harness: the standard deviation of the sample divided by
sqrt(n). The standard error of a perplexity is the perplexity times the standard error of the mean
log-likelihood; lm-evaluation-harness estimates it by resampling instead.
"""

import math
from collections.abc import Callable, Sequence, Sized

import numpy as np

Metric = Callable[..., dict[str, float]]
Ragged = Sequence[np.ndarray]  # N arrays (E,): a value for each ending of each question


def likeliest(sums: Ragged, lengths: Ragged | None = None) -> np.ndarray:
    """Return the index of the most likely ending of each question, (N,). Ties go to the first.

    Args:
        sums: the log-likelihoods of the endings in nats.
        lengths: the lengths of the endings in characters or tokens. If they are given, the mean
            log-likelihoods are compared, and an ending of length 0 is never chosen.
    """
    if lengths is None:
        return np.array([values.argmax() for values in sums])
    choices = []
    for values, sizes in zip(sums, lengths, strict=True):
        means = np.where(sizes, values / np.maximum(1, sizes), -np.inf)
        choices.append(means.argmax())
    return np.array(choices)


def multiple_choice(
    *, predictions: Ragged, characters: Ragged, tokens: Ragged, references: np.ndarray
) -> dict[str, float]:
    """Return acc, acc_norm (per character), acc_token_norm (per token) and their standard errors.

    Args:
        predictions: the log-likelihoods of the endings in nats.
        characters: the lengths of the endings in characters.
        tokens: the lengths of the endings in tokens.
        references: (N,) the index of the right ending of each question.

    Raises:
        ValueError: a value is not valid. The message names the question.
    """
    _check_counts(references, predictions, characters, tokens)
    sums = [np.asarray(values, dtype=np.float64) for values in predictions]
    labels = np.asarray(references)
    for number, (values, reference) in enumerate(zip(sums, references, strict=True)):
        _check_finite(f"predictions[{number}]", values)
        num_endings = len(values)
        if reference not in range(num_endings):
            raise ValueError(
                f"references[{number}] = {reference} is not the index of one of the "
                f"{num_endings} endings"
            )
        _check_lengths(f"characters[{number}]", characters[number], num_endings)
        _check_lengths(f"tokens[{number}]", tokens[number], num_endings)

    scores = {}
    for name, lengths in (("acc", None), ("acc_norm", characters), ("acc_token_norm", tokens)):
        scores |= accuracy(likeliest(sums, lengths) == labels, name)
    return scores


def last_word(*, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Return acc, perplexity and their standard errors.

    Args:
        predictions: (N,) the log-likelihoods of the words in nats.
        references: (N,) whether greedy decoding gives the word.

    Raises:
        ValueError: a value is not valid. The message names the word.
    """
    _check_counts(references, predictions)
    nats = np.asarray(predictions, dtype=np.float64)
    is_right = np.asarray(references)
    for number, (value, reference) in enumerate(zip(nats, references, strict=True)):
        _check_finite(f"predictions[{number}]", value)
        if reference not in (0, 1):
            raise ValueError(f"references[{number}] = {reference} is neither 0 nor 1")

    with np.errstate(over="ignore"):  # the perplexity of very unlikely words is infinite
        perplexity = float(np.exp(-nats.mean()))
    error = 0.0
    if len(nats) > 1:
        error = float(nats.std(ddof=1) / math.sqrt(len(nats)))
    scores = accuracy(is_right, "acc")
    scores["perplexity"] = perplexity
    scores["perplexity_stderr"] = perplexity * error
    return scores


PLAIN: dict[str, Metric] = {"multiple_choice": multiple_choice, "last_word": last_word}


def _check_counts(references: Sized, *others: Sized) -> None:
    """Raise ValueError if there is nothing to score or the arguments differ in length."""
    counts = [len(references)] + [len(values) for values in others]
    if len(set(counts)) > 1:
        raise ValueError(f"references, predictions and lengths differ in number: {counts}")
    if len(references) == 0:
        raise ValueError("there is nothing to score: predictions and references are empty")


def _check_finite(where: str, nats: np.ndarray) -> None:
    if nats.size == 0:
        raise ValueError(f"{where} is empty: a question needs endings")
    if not np.isfinite(nats).all():
        raise ValueError(f"{where} = {nats.tolist()} contains a log-likelihood that is not finite")


def _check_lengths(where: str, lengths: np.ndarray, num_endings: int) -> None:
    if len(lengths) != num_endings:
        raise ValueError(f"{where} has {len(lengths)} lengths for {num_endings} endings")
    values = np.asarray(lengths, dtype=np.float64)
    is_valid = (values >= 0) & (values % 1 == 0)
    if not is_valid.all():
        raise ValueError(
            f"{where} = {values.tolist()} contains a length that is not an integer of 0 or more"
        )


def accuracy(is_right: np.ndarray, name: str) -> dict[str, float]:
    """Return the fraction of right answers and its standard error."""
    fraction = float(is_right.mean())
    variance = fraction * (1 - fraction) / max(1, len(is_right) - 1)
    return {name: fraction, f"{name}_stderr": math.sqrt(variance)}
