"""CSV with a header: every field is a text, as it stands.

pandas' parser, which ``datasets`` takes, takes the texts None, NA and 12 for none or for numbers, and moves the fields of
a record that has too many.
"""

import csv
from collections.abc import Iterator
from io import TextIOWrapper
from typing import Any

from pretrain.base.errors import BadInput
from pretrain.base.network import Unreadable
from pretrain.data.records import TEXT, Column, Reader, refuse_column

DIALECT = ("quotechar", "quoting", "doublequote", "escapechar", "skipinitialspace")  # options that csv.reader has
OTHER = ("header", "skiprows", "nrows", "skipfooter", "comment", "lineterminator", "dialect")  # options that it lacks

csv.field_size_limit(2**31 - 1)  # a document is a field; the default ends at 131,072 characters


def rows(name: str, column: Column, start: int, options: Any = None) -> Iterator[str]:
    """Yield the column's field of each record; a blank line is none."""
    from datasets.packaged_modules.csv.csv import CsvConfig

    from pretrain.data import remote

    config = options or CsvConfig()
    other = [option for option in OTHER if getattr(config, option) != getattr(CsvConfig, option)]
    other += ["sep"] if len(config.sep or "") != 1 else []
    if other:
        said = f"is a CSV with {', '.join(other)} of its own, which is not supported"
        raise BadInput(f"{name}: {said}; try --dataset_revision refs/convert/parquet")
    held: list[str] = []
    with remote.whole(name) as file:
        text = TextIOWrapper(file, config.encoding or "utf-8-sig", "surrogateescape", newline="")
        found = csv_records(config, text)
        if not (header := config.names or next(found, [])):
            raise BadInput(f"{name}: is empty; a CSV begins with a header")
        refuse_column(name, column, dict.fromkeys(header, TEXT))
        for record in found:
            yield from held
            held = [record[header.index(column.name)]]
    yield from held  # a record that is cut short looks like a whole one: now the end is known to be the file's


def csv_records(config: Any, text: TextIOWrapper) -> Iterator[list[str]]:
    """Yield records, all of as many fields. Raises Unreadable with the first line of one that is none."""
    dialect = {option: getattr(config, option) for option in DIALECT} | {"delimiter": config.sep}
    records, line, width = csv.reader(text, strict=True, **dialect), 1, len(config.names or ())
    while True:
        try:
            record = next(records, None)
            if record is None:
                return
            "".join(record).encode()
        except (csv.Error, UnicodeEncodeError) as error:
            fault = f"is not a record of a CSV ({error}); correct it, or write another format"
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


READER = Reader("csv", (".csv",), rows)
