"""Validate the rows of a task: texts are texts, and the answer is the label of one of them."""

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from ursa_minor.base import files
from ursa_minor.base.wording import join_or
from ursa_minor.evaluation.task import Answer, Choices, Task, TaskRow, Text, Texts

NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?")
SURROGATE = re.compile("[\ud800-\udfff]")
SHOWN_CHARACTERS = 60  # of a value in a message


def validate(task: Task, row: object, *, is_published: bool = False) -> dict[str, Any]:
    """Return the fields of a task's row in the form in which ``task.questions`` takes them.

    The rules are the same for every task and file format:

    - A text is a string. A number is converted to one; a boolean, null or list is an error.
    - A text that is scored is not empty in a local file, because an empty cell is usually a missing
      value. A context may be empty.
    - A list of texts may also be a string with JSON, because TSV has no lists.
    - There are as many texts as labels, at least two, and no two labels are equal.
    - The answer is one of the labels. Labels are compared as values: 1, "1" and 1.0 are equal.

    Args:
        row: an object from a file of items, in any form.
        is_published: whether the row is from the task's own data set, where empty texts are scored.

    Returns:
        For a ``Text`` field a string, for a ``Texts`` or ``Choices`` field a tuple of strings, for
        an ``Answer`` field the index of the right text.

    Raises:
        ValueError: the row is not an item of the task. The message names the field.
    """
    if not isinstance(row, dict):
        raise ValueError("is not a JSON object")
    missing = [name for name in task.fields if name not in row]
    if missing:
        columns = ", ".join(map(str, row))
        raise ValueError(
            f"has no {', '.join(missing)}; an item of {task.label} has {', '.join(task.fields)}, "
            f"and this row has {_shortened(columns)}"
        )
    fields = {name: _validated_field(task, row, name) for name in task.fields}
    if not is_published:
        _check_no_empty_texts(task, fields)
    return fields


def _check_no_empty_texts(task: Task, fields: dict[str, Any]) -> None:
    """Raise ValueError for a text to be scored that has only spaces, or nothing."""
    for name, value in fields.items():
        field = task.fields[name]
        if isinstance(field, Answer) or (isinstance(field, Text) and not field.is_scored):
            continue
        texts = (value,) if isinstance(value, str) else value
        if not all(text.strip() for text in texts):
            raise ValueError(f"{name} has an empty text")


def _validated_field(task: Task, row: TaskRow, name: str) -> Any:
    field = task.fields[name]
    value = row[name]
    match field:
        case Text():
            return _text(name, value)
        case Texts():
            texts = _texts(name, value)
            if len(texts) != field.count:
                raise ValueError(f"{name} has {len(texts)} texts: must have {field.count}")
            return texts
        case Choices():
            return _choices(name, value, field)[0]
        case Answer():
            return _answer(name, value, _labels(task, row, field))


def _text(name: str, value: object) -> str:
    if isinstance(value, str):
        if SURROGATE.search(value):
            raise ValueError(
                f"{name} = {_shown(value)}: contains half of a surrogate pair, which is not a character"
            )
        return value
    if _is_number(value):
        return str(value)
    raise ValueError(f"{name} = {_shown(value)}: must be a text or a number")


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts = _from_json(value)
    if not isinstance(texts, list):
        raise ValueError(f"{name} = {_shown(value)}: must be a list of texts")
    return tuple(_text(f"{name}[{index}]", text) for index, text in enumerate(texts))


def _choices(name: str, value: object, field: Choices) -> tuple[tuple[str, ...], list]:
    """Return the texts of a ``Choices`` field and the label of each."""
    parts = _from_json(value)
    if not isinstance(parts, dict) or not {field.texts, field.labels} <= parts.keys():
        raise ValueError(
            f"{name} = {_shown(value)}: must be an object with the lists {field.texts} and {field.labels}"
        )
    texts = _texts(f"{name}.{field.texts}", parts[field.texts])
    labels = parts[field.labels]
    if not isinstance(labels, list):
        raise ValueError(f"{name}.{field.labels} = {_shown(labels)}: must be a list of labels")
    if len(texts) != len(labels):
        raise ValueError(f"{name} has {len(texts)} texts and {len(labels)} labels: must be as many")
    if len(texts) < 2:
        raise ValueError(f"{name} has too few texts ({len(texts)}): must have at least two")
    keys = [_label_key(f"{name}.{field.labels}", label) for label in labels]
    if len({*keys}) < len(keys):
        raise ValueError(f"{name}.{field.labels} = {_shown(labels)}: two labels are equal")
    return texts, labels


def _labels(task: Task, row: TaskRow, field: Answer) -> Sequence:
    """Return the labels that an ``Answer`` field may have."""
    if not isinstance(field.labels, str):
        return field.labels
    choices = task.fields[field.labels]
    assert isinstance(choices, Choices)
    return _choices(field.labels, row[field.labels], choices)[1]


def _answer(name: str, value: object, labels: Sequence) -> int:
    """Return the index of the label that is equal to a value."""
    key = _label_key(name, value)
    keys = [_label_key(name, label) for label in labels]
    if key not in keys:
        raise ValueError(
            f"{name} = {_shown(value)}: must be {join_or(labels)}; a test split without answers "
            f"cannot be scored: take the validation split"
        )
    return keys.index(key)


def _label_key(name: str, value: object) -> Decimal | str:
    """Return a key that is the same for equal labels: a number, or a text without outer spaces."""
    if not isinstance(value, str) and not _is_number(value):
        raise ValueError(f"{name} = {_shown(value)}: a label must be a text or a finite number")
    text = str(value).strip()
    return Decimal(text) if NUMBER.fullmatch(text) else text


def _is_number(value: object) -> bool:
    """Return whether a value is a finite number. A boolean is not a number."""
    if isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, (float, Decimal)) and math.isfinite(value)


def _from_json(value: object) -> object:
    """Return the list or object that a string with JSON contains, and any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return files.parse_json(value)
    except ValueError:
        return value


def _shown(value: object) -> str:
    return _shortened("null" if value is None else repr(value))


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
