"""Wording of messages: suggestions for misspelt names, lists, plurals and shortened values."""

import contextlib
import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

# A message shows only the beginning of longer values and lists.
MAX_CHARACTERS = 200
MAX_VALUES = 12
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
# The least similarity of a suggestion (difflib). With 0.6, which is used for files, the answer to
# activation_function would be validation_fraction.
SIMILARITY = 0.75
FILE_SIMILARITY = 0.6


def did_you_mean(
    word: str, names: Iterable[str], prefix: str = "", *, similarity: float = SIMILARITY
) -> str:
    """Return "; did you mean X?" for the name that a word seems to mean, or "" if there is none.

    It is a name that is spelled similarly, or that starts with the word, or the only name that
    contains all parts of the word and is at most twice as long: hub_id means hub_model_id.

    Args:
        word: the user's input.
        names: the valid names.
        prefix: precedes the name in the suggestion, such as ``--``.
        similarity: the least similarity of the spelling, from 0 to 1.
    """
    word = str(word)
    names = list(names)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=similarity)
    if not matches and word:
        matches = [name for name in names if name.startswith(word)]
    if not matches:
        parts = set(word.split("_"))
        short_names = [name for name in names if len(name) <= 2 * len(word)]
        containing = [name for name in short_names if parts <= set(name.split("_"))]
        matches = containing if len(containing) == 1 else []
    if not matches:
        return ""
    return f"; did you mean {prefix}{matches[0]}?"


def did_you_mean_file(name: str, is_kind: Callable[[Path], bool]) -> str:
    """Return "; did you mean X?" if the folder of ``name`` has a file with a similar name, else "".

    Args:
        name: a path that does not exist.
        is_kind: returns whether a path may be suggested, such as ``Path.is_dir``.
    """
    path = Path(name)
    candidates: list[str] = []
    with contextlib.suppress(OSError):  # the folder does not exist, or may not be read
        candidates = [other.name for other in path.parent.iterdir() if is_kind(other)]
    # "runs/" for runs/a, "/" for /a and "" for a
    prefix = str(path.parent / "_").removesuffix("_")
    return did_you_mean(path.name, candidates, prefix, similarity=FILE_SIMILARITY)


def join_or(values: Sequence) -> str:
    """Return values as "a, b or c". Of a long list, return the first values and the number."""
    texts = [str(value) for value in values]
    if len(texts) > MAX_VALUES:
        first_texts = ", ".join(texts[:MAX_VALUES])
        return f"{first_texts}, ... ({len(texts)} in total)"
    if len(texts) == 1:
        return texts[0]
    *others, last = texts
    return f"{', '.join(others)} or {last}"


def with_unit(value: float, digits: int = 6) -> str:
    """Return a number with at most this many significant digits and a unit: 500k, 2.5M, 10B."""
    for size, unit in UNITS:
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{unit}"
    return f"{value:.{digits}g}"


def pluralize(number: int, singular: str, plural: str) -> str:
    """Return a number and its noun: 1 process, 2 processes."""
    noun = singular if number == 1 else plural
    return f"{number:,} {noun}"


def shorten(value: Any) -> str:
    """Return a value as a message shows it: in one line, and only the beginning of a long one.

    An empty text is shown in quotation marks.
    """
    if value is None or value in ([], ()):
        return "none"
    items = value if isinstance(value, list | tuple) else [value]
    text = " ".join(str(item) or "''" for item in items)
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}..."
