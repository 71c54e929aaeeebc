"""Wording of messages: suggestions for misspelt names, lists, plurals and shortened values."""

import contextlib
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LONG, MANY = 200, 12  # characters of a value, and values of a list, that a message shows


def did_you_mean(word: str, names, prefix: str = "") -> str:
    """Return "; did you mean X?" where a name is close to a word, else nothing."""
    names = list(names)
    longer = [name for name in names if word and name.startswith(word)]
    match = difflib.get_close_matches(str(word), names, n=1) or longer
    return f"; did you mean {prefix}{match[0]}?" if match else ""


def did_you_mean_file(name: str, is_kind: Callable[[Path], bool]) -> str:
    """Return "; did you mean X?" where something of this kind lies beside ``name`` and has a close name, else nothing."""
    path, beside = Path(name), []
    with contextlib.suppress(OSError):  # a folder that is not there, or may not be read
        beside = [one.name for one in path.parent.iterdir() if is_kind(one)]
    return did_you_mean(path.name, beside, str(path.parent / "_")[:-1])


def join_or(values: Sequence) -> str:
    """Return values as "a, b or c", of many the first."""
    texts = [str(value) for value in values]
    if len(texts) > MANY:
        return f"{', '.join(texts[:MANY])}, ... ({len(texts)} in all)"
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]


def pluralize(number: int, one: str, several: str) -> str:
    """Return a number and its noun: 1 process, 2 processes."""
    return f"{number:,} {one if number == 1 else several}"


def shorten(value: Any) -> str:
    """Return a value as a message shows it, in one line: the beginning of a long one."""
    if value is None or value in ([], ()):
        return "none"
    text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text if len(text) <= LONG else f"{text[:LONG]}..."
