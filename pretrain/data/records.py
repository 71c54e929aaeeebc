"""What stands in a table: the records of a CSV, the objects of JSON lines, which columns hold text."""

import contextlib
import csv
import difflib
from collections.abc import Iterable, Iterator, Mapping
from io import TextIOWrapper
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets.packaged_modules.csv.csv import CsvConfig

from pretrain.base import files
from pretrain.base.errors import BadInput
from pretrain.base.network import Unreadable

CSV_DIALECT = ("quotechar", "quoting", "doublequote", "escapechar", "skipinitialspace")  # as csv.reader has them
TEXT, IDS = "text", "lists of ids"
JSON_TYPES = {str: "text", int: "numbers", float: "numbers", bool: "booleans", list: "lists", dict: "objects"}
SHOWN_COLUMNS = 20

csv.field_size_limit(2**31 - 1)  # a document is a field; the default ends at 131,072 characters


class Column(NamedTuple):
    """Which column of a table is read; ``holds``: text, or lists of ids."""

    name: str
    holds: str = TEXT

    @property
    def key(self) -> str:
        """The recipe's key that names it."""
        return "text_column" if self.holds == TEXT else "token_column"


def refuse_column(name: str, column: Column, types: Mapping[str, str]) -> None:
    """Raise BadInput unless a column holds what it is to hold, or nothing.

    Args:
        types: what each column holds: text, lists of ids, "" for nothing, or what else.
    """
    if (found := types.get(column.name)) in (column.holds, ""):
        return
    near = difflib.get_close_matches(column.name, types, n=1)
    hint = f"; did you mean --{column.key} {near[0]}?" if near else ""
    if found is None:
        raise BadInput(f"{name}: {column.key} = {column.name}: no such column; it has {_listed(types)}{hint}")
    fits = [other for other, holds in types.items() if holds == column.holds]
    remedy = (
        f"give --{column.key} with one of {column.holds}: {_listed(fits)}" if fits else f"write it as {column.holds}"
    )
    raise BadInput(f"{name}: {column.key} = {column.name}: holds {found}, not {column.holds}; {remedy}")


def ids_of(value: Any, row: int) -> np.ndarray | None:
    """Return a row's list of ids, (n,) uint32, or None where it is empty. Raises Unreadable where it holds no ids."""
    ids = np.asarray([] if value is None else value)
    if not ids.size:
        return None
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 2**32:
        raise Unreadable(f"row {row}: is no list of ids, whole numbers from 0; leave the row out")
    return ids.astype(np.uint32)


def _listed(columns: Iterable[str]) -> str:
    """Return names as words of one line; a file that is no table can have any."""
    shown = [column if column.isprintable() else ascii(column) for column in columns]
    return ", ".join(shown[:SHOWN_COLUMNS])[:1000] + (", ..." if len(shown) > SHOWN_COLUMNS else "")


def csv_records(config: CsvConfig, text: TextIOWrapper) -> Iterator[list[str]]:
    """Yield records, all of as many fields. Raises Unreadable with the first line of one that is none."""
    dialect = {option: getattr(config, option) for option in CSV_DIALECT} | {"delimiter": config.sep}
    records, line, width = csv.reader(text, strict=True, **dialect), 1, len(config.names or ())
    while True:
        try:
            record = next(records, None)
            if record is None:
                return
            "".join(record).encode()
        except (csv.Error, UnicodeEncodeError) as error:
            fault = f"is no record of a CSV ({error}); mend it, or write another format"
            if isinstance(error, UnicodeEncodeError):
                fault = "is not UTF-8; convert it, for example: iconv -f LATIN1 -t UTF-8 old.csv > new.csv"
            raise Unreadable(f"line {line}: {fault}") from None
        if record:
            width = width or len(record)
            if len(record) != width:
                fault = f"{len(record)} fields, and {width} in the lines before"
                raise Unreadable(f"line {line}: {fault}; a text with {config.sep!r} in it stands between quotes")
            yield record
        line = records.line_num + 1


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
        raise Unreadable(f"line {number + 1}: is no JSON ({error}); mend it: a line is one object") from None
    return value if isinstance(value, dict) else {}


def refuse_no_text(name: str, column: Column, lines: list[tuple[int, bytes]]) -> None:
    """Raise BadInput where a file's first lines have fields, but none of them has text in this one."""
    types: dict[str, set[str]] = {}
    for number, line in lines:
        with contextlib.suppress(Unreadable):  # it is found again, at its row
            for field, value in json_object(name, number, line).items():
                types.setdefault(field, set()).add(_json_type(value))
    if types:
        held = {field: found - {""} for field, found in types.items()}
        refuse_column(name, column, {f: TEXT if TEXT in h else " and ".join(sorted(h)) for f, h in held.items()})


def _json_type(value: Any) -> str:
    numbers = isinstance(value, list) and all(type(one) is int for one in value)
    return IDS if numbers else JSON_TYPES.get(type(value), "")


def column_types(schema: pa.Schema) -> dict[str, str]:
    """Return what each column holds, as ``refuse_column`` has it."""
    types = {}
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_list_view, pa.types.is_fixed_size_list)
        ids = any(is_list(kind) for is_list in lists) and pa.types.is_integer(kind.value_type)
        holds = "" if pa.types.is_null(kind) else IDS if ids else str(kind)
        types[field.name] = TEXT if any(is_text(kind) for is_text in texts) else holds
    return types
