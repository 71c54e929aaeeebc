"""CSV with a header: every field is a string, exactly as it is written.

The parser of pandas, which ``datasets`` uses, converts strings such as None, NA and 12 to missing
values and numbers, and shifts the fields of a record that has too many.
"""

import csv
from collections.abc import Iterator
from io import TextIOWrapper
from typing import Any

from ursa_minor.base.http import Unreadable
from ursa_minor.data.sources.columns import TEXT, Column, Reader, check_column

csv.field_size_limit(2**31 - 1)  # the default of 131,072 characters is too few for a document


def rows(name: str, column: Column, start: int, **dialect: Any) -> Iterator[str]:
    """Yield the field of a column for each record (see ``Reader.rows``). Blank lines are skipped.

    Args:
        dialect: options of ``csv.reader``.
    """
    from ursa_minor.data.sources import remote

    # Each field is yielded after the next record was read, or after the end of the file was
    # verified, because the last record of a truncated file looks complete.
    previous_field: str | None = None
    with remote.open_unpacked(name) as file:
        text = TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
        records = csv.reader(text, strict=True, **dialect)
        header = next(filter(None, records), [])
        check_column(name, column, dict.fromkeys(header, TEXT))
        index = header.index(column.name)
        line = records.line_num + 1  # line at which the next record begins
        try:
            for record in records:
                field = None
                if record:
                    _check_length(record, header, line, records.dialect.delimiter)
                    field = record[index]
                    field.encode()  # fails if the file contains bytes that are not UTF-8
                if previous_field is not None:
                    yield previous_field
                previous_field = field
                line = records.line_num + 1
        except csv.Error as error:
            raise Unreadable(
                f"line {line} is not a valid CSV record ({error}). "
                f"Correct this line, or save the table as JSON lines or Parquet"
            ) from None
        except UnicodeEncodeError:
            raise Unreadable(
                f"line {line} is not UTF-8 text. Convert the file to UTF-8, for example: "
                f"iconv -f LATIN1 -t UTF-8 old.csv > new.csv"
            ) from None
    if previous_field is not None:
        yield previous_field


def _check_length(record: list[str], header: list[str], line: int, delimiter: str) -> None:
    if len(record) != len(header):
        raise Unreadable(
            f"line {line} has {len(record)} fields, but the header has {len(header)}. Correct "
            f"this line. A field that contains {delimiter!r} must be in quotation marks"
        )


READER = Reader("csv", rows)
