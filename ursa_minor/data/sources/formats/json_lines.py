"""JSON lines: one object per line.

The parser of Arrow, which ``datasets`` uses, rejects lone surrogates, converts all strings of a
column to quoted JSON if one row has a number, and requires the fields of the first file in every
file.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, BinaryIO

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import Unreadable
from ursa_minor.data.sources import encodings, json_documents
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
            _check_first_lines(name, first_lines, file, column)
        for number, line in chain(first_lines, lines):
            if number < start:
                yield None
                continue
            try:
                row = _json_object(number, line)
            except UnicodeError:
                raise _not_utf8(name, number, line, file) from None
            yield _field(row, column) if column.name in row else _missing_field(line, row)


def _check_first_lines(
    name: str, numbered_lines: list[tuple[int, bytes]], file: BinaryIO, column: Column
) -> None:
    """Check that a file consists of JSON objects, one per line, that have the column.

    Args:
        name: the file.
        numbered_lines: its first lines.
        file: the open file after these lines.
        column: the field that is read.

    Raises:
        BadInput, Unreadable: the file contains something else.
    """
    lines = [
        (number, line) for number, line in numbered_lines if line.strip() not in (b"", b"null")
    ]
    if not lines:
        return
    objects = list(_objects(line for _, line in lines))
    number, first_line = lines[0]
    try:
        first_value = files.parse_json(first_line)
    except UnicodeError:
        raise _not_utf8(name, number, first_line, file) from None
    except ValueError:
        first_value = None
        if b"\0" in first_line:
            raise _not_utf8(name, number, first_line, file) from None
    is_scalar = isinstance(first_value, str | int | float)
    if not isinstance(first_value, dict) and not (is_scalar and objects):
        document = b"".join(line for _, line in numbered_lines)
        document += file.read(max(0, json_documents.DOCUMENT_BYTES - len(document)))
        is_complete = not file.read(1)
        raise json_documents.explain(name, document, column, is_complete=is_complete)

    types = _field_types(objects)
    if not types:
        return
    try:
        check_column(name, column, types)
    except BadInput as error:
        if len(lines) == 1:
            wrapper_error = json_documents.explain_wrapper(name, objects[0], column)
            if wrapper_error is not None:
                raise wrapper_error from None
        message = f"{error}{json_documents.messages_fix(name, objects[0], column)}"
        raise BadInput(message, text_columns=error.text_columns) from None


def _not_utf8(name: str, number: int, line: bytes, file: BinaryIO) -> Unreadable:
    """Return the error for a line that is not UTF-8.

    Args:
        number: number of the line, from 0.
        file: the open file after the line, or after some more lines.
    """
    sample = encodings.lines_before(name, number) + line + file.read(encodings.SAMPLE_BYTES)
    is_end = not file.read(1)
    explanation = encodings.explain(
        name, line, sample, is_end=is_end, drop_end=encodings.DROP_LAST_LINE
    )
    return Unreadable(f"line {number + 1} is not UTF-8 text. {explanation}")


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


def _json_object(number: int, line: bytes) -> dict:
    """Parse a line of a file.

    Args:
        number: number of the line, from 0.

    Returns:
        The object, or an empty dict if the line is blank or contains a string, a number, true,
        false or null.

    Raises:
        UnicodeError: the line is not UTF-8.
        Unreadable: the line is not JSON, or an array.
    """
    line = line.strip()
    if not line:
        return {}
    try:
        value = files.parse_json(line)
    except UnicodeError:
        raise
    except ValueError as error:
        raise Unreadable(
            f"line {number + 1} is not valid JSON ({error}). Correct this line. Each line must "
            f"contain one JSON object"
        ) from None
    if isinstance(value, list):
        raise Unreadable(
            f"line {number + 1} is a JSON array, but the lines before it are objects. Correct "
            f"this line. Each line must contain one JSON object"
        )
    return value if isinstance(value, dict) else {}


def _objects(lines: Iterable[bytes]) -> Iterator[dict]:
    """Yield the lines that are objects. Another line is reported when its row is read."""
    for line in lines:
        with contextlib.suppress(ValueError):
            value = files.parse_json(line)
            if isinstance(value, dict):
                yield value


def _field_types(objects: Iterable[dict]) -> dict[str, str]:
    """Return the type of each field in these objects, as in ``check_column``.

    A field that contains a string in at least one object is of type ``TEXT``.
    """
    types: dict[str, set[str]] = defaultdict(set)
    for values in objects:
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
