"""What stands in a table: the records of a CSV, the objects of JSON lines, which columns hold text."""

import contextlib
import csv
import difflib
from collections.abc import Iterable, Iterator, Mapping
from io import TextIOWrapper

import pyarrow as pa
from datasets.packaged_modules.csv.csv import CsvConfig

from pretrain.base import files
from pretrain.base.errors import BadInput
from pretrain.data.patience import Unreadable

CSV_DIALECT = ("quotechar", "quoting", "doublequote", "escapechar", "skipinitialspace")  # as csv.reader has them
JSON_TYPES = {str: "text", int: "numbers", float: "numbers", bool: "booleans", list: "lists", dict: "objects"}
SHOWN_COLUMNS = 20

csv.field_size_limit(2**31 - 1)  # a document is a field; the default ends at 131,072 characters


def refuse_column(name: str, text_column: str, types: Mapping[str, str]) -> None:
    """Raise BadInput unless a column holds text, or nothing.

    Args:
        types: what each column holds: text, "" for nothing, or what else.
    """
    if (found := types.get(text_column)) in ("text", ""):
        return
    near = difflib.get_close_matches(text_column, types, n=1)
    hint = f"; did you mean --text_column {near[0]}?" if near else ""
    if found is None:
        raise BadInput(f"{name}: text_column = {text_column}: no such column; it has {_listed(types)}{hint}")
    texts = [column for column, holds in types.items() if holds == "text"]
    remedy = f"give --text_column with one of text: {_listed(texts)}" if texts else "write it as text"
    raise BadInput(f"{name}: text_column = {text_column}: holds {found}, not text; {remedy}")


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


def refuse_no_text(name: str, text_column: str, lines: list[tuple[int, bytes]]) -> None:
    """Raise BadInput where a file's first lines have fields, but none of them has text in this one."""
    types: dict[str, set[str]] = {}
    for number, line in lines:
        with contextlib.suppress(Unreadable):  # it is found again, at its row
            for column, value in json_object(name, number, line).items():
                types.setdefault(column, set()).add(JSON_TYPES.get(type(value), ""))
    if types:
        held = {column: found - {""} for column, found in types.items()}
        refuse_column(
            name, text_column, {c: "text" if "text" in f else " and ".join(sorted(f)) for c, f in held.items()}
        )


def column_types(schema: pa.Schema) -> dict[str, str]:
    """Return what each column holds, as ``refuse_column`` has it."""
    types = {}
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        holds = "" if pa.types.is_null(kind) else str(kind)
        types[field.name] = "text" if any(is_text(kind) for is_text in texts) else holds
    return types
