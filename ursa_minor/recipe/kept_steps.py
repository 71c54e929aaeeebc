"""The steps of the checkpoints that ``keep_checkpoints`` keeps for a learning curve.

The values of the key are ``log2`` (the steps 0, 1, 2, 4, 8, ... and the last one), numbers of
steps, and numbers of tokens with the suffix K, M or B. A number of tokens means the first step that
reaches it.
"""

import functools
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from ursa_minor.base.wording import did_you_mean, shorten

LOG2 = "log2"
SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9}
# Groups: the number, and the suffix.
POINT = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?(?:[eE]\d{1,2})?)([A-Za-z]*)", re.ASCII)
MAX_LENGTH = 40  # of a value, in characters
RULE = (
    "must be log2, or a list of steps (100) and of tokens with the suffix K, M or B (10M, 1.5B), "
    "such as [0, 100, 10M]"
)


def as_texts(value: Any) -> Any:
    """Return the value of ``keep_checkpoints`` in a YAML file with each integer as text.

    A value outside a list becomes a list. Values of other types are returned unchanged.
    """
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    text = _as_text(value)
    return [text] if isinstance(text, str) else value


def _as_text(value: Any) -> Any:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_integer else value


def find_problem(value: Any) -> str | None:
    """Return the rule that a value of ``keep_checkpoints`` breaks, or None if it is valid."""
    if not isinstance(value, list):
        return RULE
    for item in value:
        problem = _problem_of_item(item)
        if problem:
            return problem
    return None


def _problem_of_item(item: Any) -> str | None:
    if item == LOG2:
        return None
    if not isinstance(item, str):
        return f"{RULE}. {shorten(item)} is neither"
    if not item.strip():
        return f"{RULE}. A value is empty. To keep none of these checkpoints, use none"
    if "," in item or ";" in item:
        return (
            f"{RULE}. Separate the values with spaces on the command line (0 100 10M), and write a "
            f"list in a recipe file"
        )
    point = POINT.fullmatch(item[:MAX_LENGTH])
    if point is None or len(item) > MAX_LENGTH:
        if item.startswith("-") and POINT.fullmatch(item[1:]):
            return f"{RULE}. {shorten(item)} is negative"
        return f"{RULE}. {shorten(item)} is neither{did_you_mean(item.lower(), [LOG2])}"
    number, suffix = point.groups()
    if suffix in SUFFIXES:
        return None
    if suffix:
        fix = f"; did you mean {number}{suffix.upper()}?" if suffix.upper() in SUFFIXES else ""
        return f"{RULE}. The suffix of {shorten(item)} is not known{fix}"
    if Fraction(number).denominator != 1:
        return f"{RULE}. {shorten(item)} is not an integer number of steps"
    return None


def listed_steps(points: Sequence[str], tokens_per_step: int) -> dict[str, int]:
    """Return the step that each value of ``keep_checkpoints`` means, except for ``log2``.

    Args:
        points: valid values.
        tokens_per_step: number of tokens of an update.
    """
    steps = {}
    for text in points:
        point = POINT.fullmatch(text)
        if point is None:  # log2
            continue
        number, suffix = point.groups()
        if suffix:
            tokens = Fraction(number) * SUFFIXES[suffix]
            steps[text] = math.ceil(tokens / tokens_per_step)
        else:
            steps[text] = int(Fraction(number))
    return steps


@functools.cache
def _set_of_steps(points: tuple[str, ...], tokens_per_step: int) -> frozenset[int]:
    return frozenset(listed_steps(points, tokens_per_step).values())


def is_kept(points: Sequence[str], step: int, tokens_per_step: int, *, is_last: bool) -> bool:
    """Return whether the checkpoint of a step is kept.

    Args:
        points: valid values of ``keep_checkpoints``.
        step: number of updates made.
        tokens_per_step: number of tokens of an update.
        is_last: whether this is the last step of the run.
    """
    is_zero_or_power_of_two = step & (step - 1) == 0
    if LOG2 in points and (is_zero_or_power_of_two or is_last):
        return True
    return step in _set_of_steps(tuple(points), tokens_per_step)


def all_kept(points: Sequence[str], max_steps: int, tokens_per_step: int) -> list[int]:
    """Return the steps of a run whose checkpoints are kept, in ascending order.

    Args:
        points: valid values of ``keep_checkpoints``.
        max_steps: number of updates of the run.
        tokens_per_step: number of tokens of an update.
    """
    steps = set(listed_steps(points, tokens_per_step).values())
    if LOG2 in points:
        steps |= {0, max_steps}
        steps |= {2**exponent for exponent in range(max_steps.bit_length())}
    return sorted(step for step in steps if step <= max_steps)


def beyond(points: Sequence[str], max_steps: int, tokens_per_step: int) -> list[str]:
    """Return the values of ``keep_checkpoints`` that a run of ``max_steps`` does not reach."""
    steps = listed_steps(points, tokens_per_step)
    return [text for text, step in steps.items() if step > max_steps]
