"""Explain why a JSON file does not consist of JSON lines, and name the command that converts it.

Tests run these commands. Each writes a new file.
"""

import json
import re
import shlex
from collections.abc import Sequence
from typing import Any

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources.columns import IDS, TEXT, Column
from ursa_minor.data.sources.encodings import conversion
from ursa_minor.recipe.source_kind import URL_SCHEMES

# Of a longer file, only the beginning is examined.
DOCUMENT_BYTES = 2**25
# The usual fields of a message that contain its text.
MESSAGE_FIELDS = ("content", "text", "value")
ROLE_FIELDS = ("role", "from")  # fields that name the author of a message
# The beginning of an array, or of an object up to its first array.
FIRST_ARRAY = re.compile(r'(\{[^\[\]]{0,1000}"(?P<field>\w+)"\s*:\s*)?\[\s*')
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def explain(name: str, document: bytes, column: Column, *, is_complete: bool) -> BadInput:
    """Return the error of a file whose first lines are not JSON objects.

    Args:
        name: the file.
        document: its contents, or their beginning.
        column: the field that is read.
        is_complete: whether ``document`` contains all of the file.
    """
    text = document.decode("utf-8-sig", "replace")
    if "\r" in text and "\n" not in text:
        command = conversion(name, r"tr '\r' '\n'", ".jsonl")
        return BadInput(
            f"{name}: the lines end with a carriage return (CR) only. Use line feeds: {command}"
        )
    lines = text.split("\n")
    if not is_complete:
        lines = lines[:-1] or lines  # the last one may be incomplete
    line_numbers = [number for number, line in enumerate(lines) if line.strip()]
    first_line = lines[line_numbers[0]]
    number = line_numbers[0] + 1
    values = [_parse(lines[index]) for index in line_numbers[:2]]
    if len(values) == 2 and all(isinstance(value, list | str) for value in values):
        problem = f"line {number} is a JSON {_type_name(values[0])}, not an object"
        program = _object_of(values[0], column)
        return _error(name, problem, program, column)

    documents = _values_of(text) if is_complete else _values_of_beginning(text)
    if documents:
        return _explain_documents(name, documents, column)
    if isinstance(_parse(first_line.rstrip().rstrip(",")), dict):
        command = conversion(name, r"sed 's/,[[:space:]]*$//'", ".jsonl")
        return BadInput(
            f"{name}: line {number} is not valid JSON, because a comma follows the object. Remove "
            f"the commas at the ends of lines: {command}"
        )
    return BadInput(
        f"{name}: line {number} is not valid JSON ({_parse_error(first_line)}). Correct this "
        f"line. Each line must contain one JSON object"
    )


def explain_wrapper(name: str, row: dict, column: Column) -> BadInput | None:
    """Return the error of a file that is one object with a list of all rows.

    Returns:
        None if the object has no list of rows.
    """
    program = _rows_of_wrapper(row, column)
    if program is None:
        return None
    return _error(name, "the file is one JSON object that contains all rows", program, column)


def messages_fix(name: str, row: dict, column: Column) -> str:
    """Return the command that joins the messages of chats, or "" if a row contains no messages.

    Args:
        row: an object without text in ``column``.
    """
    if column.type != TEXT:
        return ""
    for field, value in row.items():
        if _is_list_of(value, dict) and _message_field(value) is not None:
            program = _object(column, f"{_path(field)} | {_joined(value)}")
            return (
                f". To join the texts in {field!r}, with one document for each row: "
                f"{_jq(name, program)}"
            )
    return ""


def _explain_documents(name: str, documents: list[Any], column: Column) -> BadInput:
    """Return the error of a file that consists of JSON values over several lines."""
    first = documents[0]
    if isinstance(first, list):
        problem = "the file is a JSON array, not JSON lines"
        program = None
        if first:
            program = _objects_of_each(".[]", first[0], column)
        return _error(name, problem, program, column)
    if isinstance(first, dict):
        wrapper_error = None
        if len(documents) == 1:
            wrapper_error = explain_wrapper(name, first, column)
        problem = "the JSON objects of this file extend over several lines"
        return wrapper_error or _error(name, problem, ".", column)
    problem = f"line 1 is a JSON {_type_name(first)}, not an object"
    return _error(name, problem, _object_of(first, column), column)


def _error(name: str, problem: str, program: str | None, column: Column) -> BadInput:
    """Return an error with the jq command that converts a file to one object per line.

    Args:
        program: a program of jq. None if no text was found.
    """
    if program is None:
        example = json.dumps({column.name: "some text"})
        return BadInput(
            f"{name}: {problem}. Convert the file to one object per line, such as {example}"
        )
    fix = "Convert the file"
    if name.startswith(URL_SCHEMES):
        fix = (
            "For a data set of the Hub, use --dataset_revision refs/convert/parquet, if there is "
            "one. Or download the file, and convert it"
        )
    return BadInput(f"{name}: {problem}. {fix} to one object per line: {_jq(name, program)}")


def _jq(name: str, program: str) -> str:
    return conversion(name, f"jq -c {shlex.quote(program)}", ".jsonl")


def _type_name(value: Any) -> str:
    """Return JSON's name for the type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _object_of(value: Any, column: Column) -> str | None:
    """Return the jq program that makes an object of a row, or None if it contains no text.

    Objects are kept.
    """
    if isinstance(value, dict):
        return "."
    if column.type == IDS:
        return _object(column, ".") if _is_list_of(value, int) else None
    if isinstance(value, str):
        return _object(column, ".")
    if not isinstance(value, list):
        return None
    if _is_list_of(value, str):
        return _object(column, 'join("\\n")')
    if _is_list_of(value, dict) and _message_field(value) is not None:
        return _object(column, _joined(value))
    texts = [item for item in value if isinstance(item, str)]
    if not texts:
        return None
    index = value.index(max(texts, key=len))
    return _object(column, f".[{index}]")


def _objects_of_each(rows: str, first_row: Any, column: Column) -> str | None:
    """Return the jq program that makes an object of each row, or None if a row contains no text.

    Args:
        rows: the jq program that yields the rows.
        first_row: the first of them.
    """
    program = _object_of(first_row, column)
    if program is None:
        return None
    if program == ".":
        return rows
    return f"{rows} | {program}"


def _rows_of_wrapper(wrapper: dict, column: Column) -> str | None:
    """Return the jq program that yields the rows in an object, or None if it contains no rows."""
    cells: Any = wrapper.get(column.name)
    if isinstance(cells, dict):
        cells = list(cells.values())  # pandas writes a column as an object
    if _is_list_of(cells, str):
        return _objects_of_each(f"{_path(column.name)}[]", cells[0], column)

    longest: list = []
    longest_field = ""
    for field, value in wrapper.items():
        if _is_list_of_rows(value, column) and len(value) > len(longest):
            longest = value
            longest_field = field
    if not longest:
        return None
    return _objects_of_each(f"{_path(longest_field)}[]", longest[0], column)


def _is_list_of_rows(value: Any, column: Column) -> bool:
    """Return whether a value is a list of objects or of strings, but not of a chat's messages."""
    if not _is_list_of(value, dict):
        return _is_list_of(value, str)
    has_column = any(column.name in row for row in value)
    is_chat = any(field in value[0] for field in ROLE_FIELDS)
    return has_column or not is_chat


def _values_of(text: str) -> list[Any]:
    """Return the JSON values that a text consists of, or none if it contains anything else."""
    decoder = json.JSONDecoder()
    values = []
    text = text.strip()
    position = 0
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return []
        values.append(value)
        while position < len(text) and text[position].isspace():
            position += 1
    return values


def _values_of_beginning(text: str) -> list[Any]:
    """Return values like those of a text that is too long to be parsed completely.

    Of an array, or an object that contains an array, only the first element is returned. If the
    text is a sequence of values, the first one is returned twice.
    """
    text = text.lstrip()
    decoder = json.JSONDecoder()
    try:
        value, _ = decoder.raw_decode(text)
        return [value, value]
    except (ValueError, RecursionError):
        pass  # the first value continues after the end of the text
    array = FIRST_ARRAY.match(text)
    if array is None:
        return []
    try:
        element, _ = decoder.raw_decode(text, array.end())
    except (ValueError, RecursionError):
        return []
    if array["field"] is None:
        return [[element]]
    return [{array["field"]: [element]}]


def _parse(line: str) -> Any:
    try:
        return files.parse_json(line)
    except ValueError:
        return None


def _parse_error(line: str) -> str:
    try:
        files.parse_json(line)
    except ValueError as error:
        return str(error)
    return "it is followed by other values"


def _is_list_of(value: Any, item_type: type) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(item, item_type) for item in value)


def _message_field(messages: Sequence[dict]) -> str | None:
    """Return the field of messages that contains their texts, or None if none does."""
    fields = [field for field, value in messages[0].items() if isinstance(value, str)]
    for field in (*MESSAGE_FIELDS, *fields):
        if field in fields:
            return field
    return None


def _joined(messages: Sequence[dict]) -> str:
    """Return the jq program that joins the texts of messages, one per line."""
    path = _path(str(_message_field(messages)))
    return f'map({path} | strings) | join("\\n")'


def _object(column: Column, value: str) -> str:
    """Return the jq program that makes an object of the column and a value."""
    if "|" in value:
        value = f"({value})"
    return "{" + f"{_key(column.name)}: {value}" + "}"


def _path(field: str) -> str:
    """Return the path of a field in a program of jq."""
    return f".{_key(field)}"


def _key(field: str) -> str:
    """Return a field as jq writes it: in quotation marks if it is not an identifier."""
    if IDENTIFIER.fullmatch(field):
        return field
    return json.dumps(field)
