"""JSON lines: an object a line.

Arrow's parser, which ``datasets`` takes, refuses half of a surrogate pair, turns every text into quoted JSON where one
row has a number, and wants the first file's fields in every file.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import Unreadable
from ursa_minor.data.sources.columns import IDS, ROWS, TEXT, Column, Reader, check_column

TYPES = {
    str: TEXT,
    int: "numbers",
    float: "numbers",
    bool: "booleans",
    list: "lists",
    dict: "objects",
}


def rows(name: str, column: Column, start: int) -> Iterator[Any]:
    """Yield the field of each line: None where a line is blank, no object, or has no such field."""
    from ursa_minor.data.sources import remote

    with remote.open_unpacked(name) as file:
        lines = enumerate(file)
        head = list(islice(lines, ROWS))
        if not start and (types := _types(name, head)):
            check_column(name, column, types)
        for number, line in chain(head, lines):
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
        raise Unreadable(
            f"line {number + 1}: is not JSON ({error}); correct it: a line is one object"
        ) from None
    return value if isinstance(value, dict) else {}


def _types(name: str, lines: list[tuple[int, bytes]]) -> dict[str, str]:
    """Return what each field of these lines holds; text, where one of them has it."""
    types = defaultdict(set)
    for number, line in lines:
        with contextlib.suppress(Unreadable):  # it is reported later, at its row
            for field, value in json_object(name, number, line).items():
                is_ids = isinstance(value, list) and all(type(one) is int for one in value)
                types[field].add(IDS if is_ids else TYPES.get(type(value), ""))
    return {
        field: TEXT if TEXT in held else " and ".join(sorted(held - {""}))
        for field, held in types.items()
    }


READER = Reader("json", rows)
