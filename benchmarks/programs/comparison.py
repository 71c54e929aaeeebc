"""Compare the results of a program with the reference."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

STRICT = 1e-4  # the largest difference of logits that rounding explains
# Lists of which each element must be equal. The difference is the number of elements that differ.
LISTS = ("ids", "decoded", "chat", "chat_ids", "greedy")
ARRAYS = ("logits", "log_probs", "endings", "rolling")


@dataclass
class Answer:
    """The results of a program for a model.

    Attributes:
        logits: (prompts, tokens, vocabulary) float32, or None.
        log_probs: (prompts, vocabulary) logarithms of the probabilities of the token after a
            prompt of which the index is in ``log_probs_prompts`` of ``values``. They replace
            logits for a program that reports no logits.
        endings: log-likelihoods of endings after a context in nats.
        rolling: log-likelihoods of whole texts in nats.
        values: contents of answer.json: lists of ``LISTS``, ``measured``, ``symptoms``, ``error``.
    """

    logits: np.ndarray | None = None
    log_probs: np.ndarray | None = None
    endings: np.ndarray | None = None
    rolling: np.ndarray | None = None
    values: dict = field(default_factory=dict)


@dataclass
class Comparison:
    """One comparison of a program with the reference.

    Attributes:
        compared: "logits", "ids" and so on.
        difference: the largest difference of numbers, or the number of texts that differ.
        limit: the largest difference that is accepted.
        total: number of texts, or None if numbers are compared.
    """

    compared: str
    difference: float
    limit: float
    total: int | None = None

    @property
    def passes(self) -> bool:
        """Return whether the difference is within the limit. NaN is not."""
        return self.difference <= self.limit


def read_answer(folder: Path, num_prompts: int) -> Answer:
    """Read the files that ``inside/exchange.py`` wrote."""
    values = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    answer = Answer(values=values)
    for name in ARRAYS:
        file = folder / f"{name}.f32"
        if file.exists():
            numbers = np.fromfile(file, "<f4")
            if name == "logits":
                numbers = numbers.reshape(num_prompts, values["num_tokens"], -1)
            elif name == "log_probs":
                numbers = numbers.reshape(len(values["log_probs_prompts"]), -1)
            setattr(answer, name, numbers)
    return answer


def compare(
    answer: Answer, reference: Answer, limits: Mapping[str, float] | None = None
) -> list[Comparison]:
    """Compare an answer with the reference, as far as the program computes the same things.

    Args:
        answer: of the program.
        reference: answer of Transformers in this project's environment for the same folder.
        limits: accepted differences that are not ``STRICT``, by the name of the comparison.
    """
    limits = limits or {}
    comparisons = []
    for name in ARRAYS:
        ours = getattr(answer, name)
        if ours is not None:
            theirs = _reference_array(reference, name)
            if name == "log_probs":
                theirs = theirs[answer.values["log_probs_prompts"]]
            comparisons.append(
                Comparison(name, largest_difference(ours, theirs), limits.get(name, STRICT))
            )
    for name in LISTS:
        if name in answer.values:
            theirs = reference.values[name]
            number = num_different(answer.values[name], theirs)
            comparisons.append(Comparison(name, number, limits.get(name, 0), total=len(theirs)))
    for name, difference in answer.values.get("measured", {}).items():
        comparisons.append(Comparison(name, difference, limits.get(name, STRICT)))
    return comparisons


def largest_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest absolute difference. Infinity if the shapes differ or a value is NaN."""
    if ours.shape != theirs.shape:
        return float("inf")
    difference = float(np.abs(ours.astype(np.float64) - theirs).max())
    return float("inf") if np.isnan(difference) else difference


def num_different(ours: Sequence, theirs: Sequence) -> int:
    """Return the number of elements that differ, including missing ones."""
    equal = sum(mine == other for mine, other in zip(ours, theirs, strict=False))
    return max(len(ours), len(theirs)) - equal


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the logarithm of the softmax over the last axis, in double precision."""
    logits = logits.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _reference_array(reference: Answer, name: str) -> np.ndarray:
    """Return an array of the reference. log_probs are computed from its logits."""
    if name != "log_probs":
        array = getattr(reference, name)
        assert array is not None, name
        return array
    assert reference.logits is not None
    return log_softmax(reference.logits[:, -1])
