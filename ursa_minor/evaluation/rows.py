"""Validate the rows of a task: texts are texts, and the answer is the label of one of them."""

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from ursa_minor.base import files
from ursa_minor.base.wording import join_or
from ursa_minor.evaluation.task import Answer, Choices, Task, TaskRow, Text, Texts

NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?")
SURROGATE = re.compile("[\ud800-\udfff]")
SHOWN_CHARACTERS = 60  # maximum length of a value in a message


def validate(task: Task, row: object, *, is_published: bool = False) -> dict[str, Any]:
    """Return the fields of a task's row in the form in which ``task.questions`` takes them.

    The rules are the same for every task and file format:

    - A text is a string. A number is converted to one; a boolean, null or list is an error.
    - A text that is scored is not empty in a local file, because an empty cell is usually a missing
      value. A context may be empty.
    - A list of texts may also be a string with JSON, because TSV has no lists.
    - A ``Choices`` field has one label for each text, at least two texts, and no two equal labels.
    - The answer is one of the labels. Labels are compared as values: 1, "1" and 1.0 are equal.

    Args:
        row: an object from a file of items, in any form.
        is_published: whether the row is from the task's own data set, where empty texts are scored.

    Returns:
        A string for a ``Text`` field, a tuple of strings for a ``Texts`` or ``Choices`` field, and
        the index of the right text for an ``Answer`` field.

    Raises:
        ValueError: the row is not an item of the task. The message names the field.
    """
    if not isinstance(row, dict):
        raise ValueError(
            "the row is not a JSON object. Write one JSON object per line, or use another format"
        )
    missing = [name for name in task.fields if name not in row]
    if missing:
        columns = ", ".join(str(name) for name in row)
        raise ValueError(
            f"these fields are missing: {', '.join(missing)}. An item of {task.label} must have "
            f"{', '.join(task.fields)}, but this row has {_shortened(columns)}"
        )
    fields = {name: _validated_field(task, row, name) for name in task.fields}
    if not is_published:
        _check_no_empty_texts(task, fields)
    return fields


def _check_no_empty_texts(task: Task, fields: dict[str, Any]) -> None:
    """Raise ValueError for a text to be scored that is empty or has only spaces."""
    for name, value in fields.items():
        match task.fields[name]:
            case Text(is_scored=True):
                texts = [value]
            case Texts() | Choices():
                texts = value
            case _:
                continue
        if not all(text.strip() for text in texts):
            raise ValueError(
                f"{name} contains an empty text, which cannot be scored. Complete or remove the row"
            )


def _validated_field(task: Task, row: TaskRow, name: str) -> Any:
    field = task.fields[name]
    value = row[name]
    match field:
        case Text():
            return _text(name, value)
        case Texts():
            texts = _texts(name, value)
            if len(texts) != field.count:
                raise ValueError(f"{name} must have {field.count} texts, not {len(texts)}")
            return texts
        case Choices():
            return _choices(name, value, field).texts
        case Answer():
            return _answer(name, value, _labels(task, row, field))


def _text(name: str, value: object) -> str:
    if _is_number(value):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text or a number, not {_shown(value)}")
    if SURROGATE.search(value):
        raise ValueError(
            f"{name} = {_shown(value)} contains half of a surrogate pair, which is not a "
            f"character. Remove it"
        )
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    values = _from_json(value)
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list of texts, not {_shown(value)}")
    texts = []
    for index, text in enumerate(values):
        texts.append(_text(f"{name}[{index}]", text))
    return tuple(texts)


class _LabeledTexts(NamedTuple):
    """The texts of a ``Choices`` field and the label of each."""

    texts: tuple[str, ...]
    labels: list


def _choices(name: str, value: object, field: Choices) -> _LabeledTexts:
    lists = _from_json(value)
    list_names = {field.texts, field.labels}
    if not isinstance(lists, dict) or not list_names <= lists.keys():
        raise ValueError(
            f"{name} must be an object with the lists {field.texts} and {field.labels}, "
            f"not {_shown(value)}"
        )
    texts = _texts(f"{name}.{field.texts}", lists[field.texts])
    labels = lists[field.labels]
    labels_name = f"{name}.{field.labels}"
    if not isinstance(labels, list):
        raise ValueError(f"{labels_name} must be a list of labels, not {_shown(labels)}")
    if len(texts) != len(labels):
        raise ValueError(
            f"{name} has {len(texts)} texts and {len(labels)} labels. Each text must have one label"
        )
    if len(texts) < 2:
        raise ValueError(f"{name} must have at least two texts, not {len(texts)}")
    label_keys = {_label_key(labels_name, label) for label in labels}
    if len(label_keys) < len(labels):
        raise ValueError(
            f"{labels_name} = {_shown(labels)} contains two equal labels. Use a different label "
            f"for each text"
        )
    return _LabeledTexts(texts, labels)


def _labels(task: Task, row: TaskRow, field: Answer) -> Sequence:
    """Return the labels that an ``Answer`` field may have."""
    if not isinstance(field.labels, str):
        return field.labels
    choices = task.fields[field.labels]
    assert isinstance(choices, Choices)
    return _choices(field.labels, row[field.labels], choices).labels


def _answer(name: str, value: object, labels: Sequence) -> int:
    """Return the index of the label that is equal to a value."""
    key = _label_key(name, value)
    keys = [_label_key(name, label) for label in labels]
    if key not in keys:
        raise ValueError(
            f"{name} must be {join_or(labels)}, not {_shown(value)}. If this is a test split "
            f"without answers, use the validation split instead"
        )
    return keys.index(key)


def _label_key(name: str, value: object) -> Decimal | str:
    """Return a key that is the same for equal labels: a number, or a text without outer spaces."""
    is_text = isinstance(value, str)
    if not is_text and not _is_number(value):
        raise ValueError(f"{name}: a label must be a text or a finite number, not {_shown(value)}")
    text = str(value).strip()
    if NUMBER.fullmatch(text):
        return Decimal(text)
    return text


def _is_number(value: object) -> bool:
    """Return whether a value is a finite number. A boolean is not a number."""
    if isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, (float, Decimal)) and math.isfinite(value)


def _from_json(value: object) -> object:
    """Return the value of a string with JSON. Any other value is returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return files.parse_json(value)
    except ValueError:
        return value


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return _shortened(text)


def _shortened(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]}..."
