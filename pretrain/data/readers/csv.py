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
    if other or len(config.sep or "") != 1:
        said = f"is a CSV with {', '.join(other or ['sep'])} of its own, which is not supported"
        raise BadInput(f"{name}: {said}; try --dataset_revision refs/convert/parquet")
    with remote.whole(name) as file:
        text = TextIOWrapper(file, config.encoding or "utf-8-sig", "surrogateescape", newline="")
        dialect = {option: getattr(config, option) for option in DIALECT}
        records = csv.reader(text, delimiter=config.sep, strict=True, **dialect)
        header = config.names or next(filter(None, records), [])
        refuse_column(name, column, dict.fromkeys(header, TEXT))
        line, held, place = records.line_num + 1, [], header.index(column.name)
        try:
            for record in records:
                if record and len(record) != len(header):
                    fault = f"{len(record)} fields, and {len(header)} in the header"
                    raise Unreadable(f"line {line}: {fault}; a text with {config.sep!r} in it stands between quotes")
                "".join(record[place : place + 1]).encode()
                yield from held
                held, line = record[place : place + 1], records.line_num + 1
        except csv.Error as error:
            fault = f"is not a record of a CSV ({error}); correct it, or write another format"
            raise Unreadable(f"line {line}: {fault}") from None
        except UnicodeEncodeError:
            fault = "is not UTF-8; convert it, for example: iconv -f LATIN1 -t UTF-8 old.csv > new.csv"
            raise Unreadable(f"line {line}: {fault}") from None
    yield from held  # a record that is cut short looks like a whole one: now the end is known to be the file's


READER = Reader("csv", (".csv",), rows)
