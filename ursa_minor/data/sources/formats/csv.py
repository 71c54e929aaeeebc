"""CSV with a header: every field is a text, as it stands.

pandas' parser, which ``datasets`` takes, takes the texts None, NA and 12 for none or for numbers, and moves the fields of
a record that has too many.
"""

import csv
from collections.abc import Iterator
from io import TextIOWrapper
from typing import Any

from ursa_minor.base.http import Unreadable
from ursa_minor.data.sources.columns import TEXT, Column, Reader, check_column

csv.field_size_limit(2**31 - 1)  # a document is a field; the default ends at 131,072 characters


def rows(name: str, column: Column, start: int, **dialect: Any) -> Iterator[str]:
    """Yield the column's field of each record; a blank line is none. ``dialect``: of ``csv.reader``."""
    from ursa_minor.data.sources import remote

    with remote.open_unpacked(name) as file:
        records = csv.reader(
            TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline=""), strict=True, **dialect
        )
        header = next(filter(None, records), [])
        check_column(name, column, dict.fromkeys(header, TEXT))
        line, held, place = records.line_num + 1, [], header.index(column.name)
        try:
            for record in records:
                if record and len(record) != len(header):
                    problem = f"{len(record)} fields, and {len(header)} in the header"
                    raise Unreadable(
                        f"line {line}: {problem}; a text with {records.dialect.delimiter!r} in it stands between quotes"
                    )
                "".join(record[place : place + 1]).encode()
                yield from held
                held, line = record[place : place + 1], records.line_num + 1
        except csv.Error as error:
            problem = f"is not a record of a CSV ({error}); correct it, or write another format"
            raise Unreadable(f"line {line}: {problem}") from None
        except UnicodeEncodeError:
            problem = (
                "is not UTF-8; convert it, for example: iconv -f LATIN1 -t UTF-8 old.csv > new.csv"
            )
            raise Unreadable(f"line {line}: {problem}") from None
    yield from held  # a record that is cut short looks like a whole one: now the end is known to be the file's


READER = Reader("csv", rows)
