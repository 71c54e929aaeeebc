"""JSON lines: one object per line.

The parser of Arrow, which ``datasets`` uses, rejects lone surrogates, converts all strings of a
column to quoted JSON if one row has a number, and requires the fields of the first file in every
file.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import Unreadable
from ursa_minor.data.sources.columns import (
    BATCH_ROWS,
    IDS,
    MASK_COLUMN,
    TEXT,
    VALUE_TYPES,
    Column,
    MaskedIds,
    NoText,
    Reader,
    check_column,
)

MAX_LISTED_FIELDS = 3  # number of fields in the description of a row without text


def rows(name: str, column: Column, start: int) -> Iterator[Any]:
    """Yield the value of a field for each line (see ``Reader.rows``).

    It is NoText if the line is blank, is not an object, or has no such field.
    """
    from ursa_minor.data.sources import remote

    with remote.open_unpacked(name) as file:
        lines = enumerate(file)
        first_lines = list(islice(lines, BATCH_ROWS))
        if start == 0:
            types = _field_types(name, first_lines)
            if types:
                check_column(name, column, types)
        for number, line in chain(first_lines, lines):
            if number < start:
                yield None
            else:
                row = json_object(name, number, line)
                yield _field(row, column) if column.name in row else _missing_field(line, row)


def _missing_field(line: bytes, row: dict) -> NoText:
    """Describe a line without the field."""
    if not line.strip():
        return NoText("blank lines")
    if not line.lstrip().startswith(b"{"):
        return NoText("JSON values that are not objects")
    names = [name for name, value in row.items() if isinstance(value, str)]
    listed = ", ".join(names[:MAX_LISTED_FIELDS]) or "none with text"
    return NoText(f"other fields: {listed}")


def _field(row: dict, column: Column) -> Any:
    """Return the value of a field, together with the mask of ids, if any."""
    value = row.get(column.name)
    if column.type == IDS and isinstance(row.get(MASK_COLUMN), list):
        return MaskedIds(value, row[MASK_COLUMN])
    return value


def json_object(name: str, number: int, line: bytes) -> dict:
    """Parse a line of a file.

    Args:
        name: the file, for messages.
        number: number of the line, from 0.

    Returns:
        The object, or an empty dict if the line is blank or contains another JSON value.

    Raises:
        BadInput: the file is a JSON array.
        Unreadable: the line is not JSON.
    """
    line = line.strip()
    if not line:
        return {}
    if line.startswith(b"["):
        raise BadInput(
            f"{name} is a JSON array, not JSON lines. Convert it to one object per line, for "
            f"example: jq -c '.[]' old.json > new.jsonl (for a data set of the Hub, use "
            f"--dataset_revision refs/convert/parquet)"
        )
    try:
        value = files.parse_json(line)
    except ValueError as error:
        raise Unreadable(
            f"line {number + 1} is not valid JSON ({error}). Correct this line. Each line must "
            f"contain one JSON object"
        ) from None
    return value if isinstance(value, dict) else {}


def _field_types(name: str, numbered_lines: list[tuple[int, bytes]]) -> dict[str, str]:
    """Return the type of each field in these lines, as in ``check_column``.

    A field that contains a string in at least one line is of type ``TEXT``.
    """
    types: dict[str, set[str]] = defaultdict(set)
    for number, line in numbered_lines:
        # A line that is not JSON is reported when its row is read.
        with contextlib.suppress(Unreadable):
            values = json_object(name, number, line)
            for field, value in values.items():
                types[field].add(_value_type(value))
    return {field: _describe(value_types) for field, value_types in types.items()}


def _value_type(value: Any) -> str:
    # bool is a subclass of int, so isinstance would accept lists of booleans.
    if isinstance(value, list) and all(type(element) is int for element in value):
        return IDS
    return VALUE_TYPES.get(type(value), "")


def _describe(value_types: set[str]) -> str:
    if TEXT in value_types:
        return TEXT
    return " and ".join(sorted(value_types - {""}))


READER = Reader("json", rows)
