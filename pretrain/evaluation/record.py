"""A task: a multiple-choice test that a run is scored on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pretrain.evaluation.likelihood import Question


class Encoded(Protocol):
    """A task's items, encoded for a tokenizer.

    Attributes:
        questions: what ``likelihood.log_likelihoods`` takes, with any number of endings each.
    """

    items: Sequence[Any]
    questions: list[Question]

    def longer_than(self, context_length: int | None) -> int:
        """Return how many questions lose tokens to this context. Raises BadInput where one cannot be asked at all."""

    def result(self, likelihoods: Sequence[np.ndarray]) -> dict[str, float]:
        """Return each score as a share of 1, its ``_stderr``, and ``items``; of each question (endings,) nats."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """All that the loop, the header, metrics, curves, ``--eval_only`` and a model's card know of a test.

    Attributes:
        name: of its metrics, ``<name>/<score>``.
        label: what people call it.
        scores: their names, and the rule of each.
        chance: the share that guessing scores.
        size: how many items the whole test has; published figures are of these.
        dataset: of the Hub, and its split.
        published: what others measured, in per cent, by model and in the order of ``scores``; None: not published.
        citations: ``MODEL, SIZE: source`` for each of these.
        read: (files, or None for the Hub's) -> items.
        encode: (items, tokenizer) -> the same, encoded.
    """

    name: str
    label: str
    scores: Mapping[str, str]
    chance: float
    size: int
    dataset: tuple[str, str]
    published: Mapping[str, tuple[float | None, ...]]
    citations: tuple[str, ...]
    read: Callable[[Sequence[str] | None], list]
    encode: Callable[..., Encoded]

    def metric(self, score: str) -> str:
        """Return a score's name in metrics."""
        return f"{self.name}/{score}"
