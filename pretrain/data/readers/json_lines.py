"""JSON lines: an object a line.

Arrow's parser, which ``datasets`` takes, refuses half of a surrogate pair, turns every text into quoted JSON where one
row has a number, and wants the first file's fields in every file.
"""

import contextlib
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from pretrain.base import files
from pretrain.base.errors import BadInput
from pretrain.base.network import Unreadable
from pretrain.data.records import IDS, ROWS, TEXT, Column, Reader, refuse_column

TYPES = {str: "text", int: "numbers", float: "numbers", bool: "booleans", list: "lists", dict: "objects"}


def rows(name: str, column: Column, start: int, options: Any = None) -> Iterator[Any]:
    """Yield the field of each line: None where a line is blank, no object, or has no such field."""
    from pretrain.data import remote

    with remote.whole(name) as file:
        lines: Iterator[tuple[int, bytes]] = enumerate(file)
        if not start:
            head = list(islice(lines, ROWS))
            refuse_no_text(name, column, head)
            lines = chain(head, lines)
        for number, line in lines:
            yield json_object(name, number, line).get(column.name) if number >= start else None


def json_object(name: str, number: int, line: bytes) -> dict:
    """Return the object of a line, by its number from 0; an empty one where it is blank or something else."""
    line = line.strip()
    if line.startswith(b"["):
        raise BadInput(
            f"{name}: is a JSON array, which can only be read whole. Write one object a line, for example: "
            f"jq -c '.[]' old.json > new.jsonl; of a data set of the Hub try --dataset_revision refs/convert/parquet"
        )
    try:
        value = files.parse_json(line) if line else None
    except ValueError as error:
        raise Unreadable(f"line {number + 1}: is not JSON ({error}); correct it: a line is one object") from None
    return value if isinstance(value, dict) else {}


def refuse_no_text(name: str, column: Column, lines: list[tuple[int, bytes]]) -> None:
    """Raise BadInput where a file's first lines have fields, but none of them has text in this one."""
    types: dict[str, set[str]] = {}
    for number, line in lines:
        with contextlib.suppress(Unreadable):  # it is reported later, at its row
            for field, value in json_object(name, number, line).items():
                types.setdefault(field, set()).add(_json_type(value))
    if types:
        held = {field: found - {""} for field, found in types.items()}
        refuse_column(name, column, {f: TEXT if TEXT in h else " and ".join(sorted(h)) for f, h in held.items()})


def _json_type(value: Any) -> str:
    numbers = isinstance(value, list) and all(type(one) is int for one in value)
    return IDS if numbers else TYPES.get(type(value), "")


READER = Reader("json", (".jsonl", ".json", ".ndjson"), rows)
