"""CSV with a header: every field is a string, exactly as it is written.

The parser of pandas, which ``datasets`` uses, converts strings such as None, NA and 12 to missing
values and numbers, and shifts the fields of a record that has too many.
"""

import csv
import re
import shlex
from collections.abc import Iterator
from io import TextIOWrapper
from itertools import chain, islice
from typing import Any

from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import Unreadable
from ursa_minor.data.sources import encodings
from ursa_minor.data.sources.columns import TEXT, Column, Reader, check_column

csv.field_size_limit(2**31 - 1)  # the default of 131,072 characters is too few for a document

HEADER_LINES = 20  # number of lines by which the dialect of a table is recognized
OTHER_DELIMITERS = (";", "\t", "|")
SEPARATOR_LINE = re.compile(r"sep=(.)")  # Excel writes it before the header
# A first record with such a field is not a header.
NUMBER = re.compile(r"[-+]?[0-9]+([.,:/-][0-9]+)*")  # a number, a date or a time
SENTENCE = re.compile(r"\S+ .*[.!?。！？।]", re.DOTALL)
MAX_NAME_CHARACTERS = 64
# A program that reads a table in another dialect from standard input and writes it with commas.
CONVERT = (
    "import csv, io, sys; csv.field_size_limit(2**31 - 1); "
    "text = io.TextIOWrapper(sys.stdin.buffer, 'utf-8-sig', newline=''); "
    "new = io.TextIOWrapper(sys.stdout.buffer, 'utf-8', newline=''); {skip}"
    "csv.writer(new).writerows(csv.reader(text, delimiter='{delimiter}'))"
)


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
        first_lines = list(islice(text, HEADER_LINES))
        records = csv.reader(chain(first_lines, text), strict=True, **dialect)
        header = _read_header(name, column, first_lines, records)
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
            record_text = records.dialect.delimiter.join(record)
            following = text.read(encodings.SAMPLE_BYTES)
            raise _not_utf8(name, line, f"{record_text}\n{following}") from None
    if previous_field is not None:
        yield previous_field


def _read_header(name: str, column: Column, first_lines: list[str], records: Any) -> list[str]:
    """Read the header of a table and check that it has the column.

    Args:
        first_lines: the first lines of the file.
        records: the ``csv.reader`` that reads this file.

    Raises:
        BadInput: the column is missing or ambiguous, or the columns are separated by another
            delimiter.
        Unreadable: the first lines are not UTF-8, or the header is not valid CSV.
    """
    error = None
    try:
        header = next(filter(None, records), [])
    except csv.Error as caught:
        header = []
        error = caught
    delimiter = records.dialect.delimiter
    if header.count(column.name) == 1:
        return header
    if header.count(column.name) > 1:
        raise BadInput(
            f"{name}: the header has {header.count(column.name)} columns with the name "
            f"{column.name!r}. Rename all but one of them in line 1"
        )

    _check_utf8(name, first_lines)
    _check_delimiter(name, column, first_lines, delimiter)
    if error is not None:
        raise Unreadable(
            f"line 1 is not a valid CSV record ({error}). Correct this line, or save the table as "
            f"JSON lines or Parquet"
        )
    if any(_is_data(field) for field in header):
        raise _missing_header(name, header, column)
    try:
        check_column(name, column, dict.fromkeys(header, TEXT))
    except BadInput as problem:
        raise BadInput(
            f"{problem}. They are read from line 1. If line 1 is a row, add a header above it",
            text_columns=problem.text_columns,
        ) from None
    return header


def _check_utf8(name: str, first_lines: list[str]) -> None:
    for number, line in enumerate(first_lines, 1):
        if "\0" in line or not _is_utf8(line):
            raise _not_utf8(name, number, "".join(first_lines[number - 1 :]))


def _check_delimiter(name: str, column: Column, first_lines: list[str], delimiter: str) -> None:
    """Raise BadInput if the columns of a table are separated by another delimiter.

    Args:
        first_lines: the first lines of the file.
        delimiter: the delimiter of the reader.
    """
    lines = [line.rstrip("\r\n") for line in first_lines if line.strip()]
    if not lines:
        return
    separator_line = SEPARATOR_LINE.fullmatch(lines[0])
    if separator_line:
        problem = f"line 1 ({lines[0]}) is a setting of Excel, not the header"
        raise _other_dialect(name, problem, separator_line[1], skips_first_line=True)
    for other in OTHER_DELIMITERS:
        names = [field.strip('" ') for field in lines[0].split(other)]
        counts = {line.count(other) for line in lines}
        is_consistent = len(names) > 1 and len(counts) == 1
        if other != delimiter and (column.name in names or is_consistent):
            problem = f"the columns are separated by {other!r}, not by {delimiter!r}"
            raise _other_dialect(name, problem, other)


def _other_dialect(
    name: str, problem: str, delimiter: str, *, skips_first_line: bool = False
) -> BadInput:
    """Return the error of a table in another dialect, with the command that converts it."""
    skip = ""
    if skips_first_line:
        skip = "next(text); "
    program = CONVERT.format(skip=skip, delimiter=delimiter.replace("\t", r"\t"))
    command = encodings.conversion(name, f'python -c "{program}"', ".csv")
    return BadInput(f"{name}: {problem}. Convert the table: {command}")


def _missing_header(name: str, record: list[str], column: Column) -> BadInput:
    """Return the error of a table without a header, with the command that adds one.

    Args:
        record: the first record.
    """
    longest = record.index(max(record, key=len))
    names = [f"column{number}" for number in range(1, len(record) + 1)]
    names[longest] = column.name
    header = ",".join(names)
    program = f"{{ echo {shlex.quote(header)}; cat; }}"
    command = encodings.conversion(name, program, ".csv")
    return BadInput(
        f"{name} has no column {column.name!r}, because line 1 is not a header but a row. Add a "
        f"header: {command}"
    )


def _is_data(field: str) -> bool:
    """Return whether a field of the first record cannot be the name of a column."""
    is_sentence = SENTENCE.fullmatch(field) is not None
    is_number = NUMBER.fullmatch(field) is not None
    return is_sentence or is_number or len(field) > MAX_NAME_CHARACTERS


def _is_utf8(text: str) -> bool:
    """Return whether a text that was decoded with surrogateescape was valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _not_utf8(name: str, line: int, text: str, *, is_end: bool = False) -> Unreadable:
    """Return the error for a line that is not UTF-8.

    Args:
        line: number of the line, from 1.
        text: text from this line on, decoded with surrogateescape.
        is_end: whether this is the rest of the file.
    """
    text_bytes = text.encode("utf-8", "surrogateescape")
    head = text_bytes[: encodings.HEAD_BYTES]
    sample = encodings.lines_before(name, line - 1) + text_bytes
    explanation = encodings.explain(
        name, head, sample, is_end=is_end, drop_end=encodings.DROP_LAST_LINE
    )
    return Unreadable(f"line {line} is not UTF-8 text. {explanation}")


def _check_length(record: list[str], header: list[str], line: int, delimiter: str) -> None:
    if len(record) != len(header):
        raise Unreadable(
            f"line {line} has {len(record)} fields, but the header has {len(header)}. Correct "
            f"this line. A field that contains {delimiter!r} must be in quotation marks"
        )


READER = Reader("csv", rows)
