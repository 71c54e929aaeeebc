"""Read the rows of a task from JSON lines, Parquet or TSV files.

Other file formats are recognized by their content, and the error names a command that converts the
file. Each command writes a new file. tests/evaluation/test_item_files.py runs these commands.
"""

import csv
import io
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput, first_line
from ursa_minor.base.shell import converted_path
from ursa_minor.data.sources.encodings import wide_encoding

# The first bytes of a file in each format.
PARQUET = b"PAR1"
ZIP = b"PK\x03\x04"
OLD_EXCEL = b"\xd0\xcf\x11\xe0"
# The first bytes of a file, its compression, and the command that unpacks it.
COMPRESSION_SIGNATURES = (
    (b"\x1f\x8b", "gzip-compressed", "gzip -dc"),
    (b"BZh", "bzip2-compressed", "bzip2 -dc"),
    (b"\xfd7zXZ\x00", "xz-compressed", "xz -dc"),
    (b"\x28\xb5\x2f\xfd", "Zstandard-compressed", "zstd -dc"),
)
HEAD_BYTES = 1000  # size of the part of a file from which its encoding is recognized

# The Python programs in these commands. They print the rows of a CSV or TSV file, or of a JSON
# document, as JSON lines, or convert an Excel workbook.
FROM_DELIMITED = (
    "import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader("
    "open(sys.argv[1], encoding='utf-8-sig', newline=''), delimiter='{delimiter}')]"
)
FROM_DOCUMENT = "import json, sys; [print(json.dumps(row)) for row in {rows}]"
DOCUMENT = "json.load(open(sys.argv[1], encoding='utf-8-sig'))"
FROM_EXCEL = (
    "import pandas, sys; pandas.read_excel(sys.argv[1], dtype=str, keep_default_na=False)"
    ".to_json(sys.argv[2], orient='records', lines=True)"
)


class RawRow(NamedTuple):
    """A row of a file that has not been validated.

    Attributes:
        location: the file and the number of the row, for messages.
        value: a dictionary by field name, or the text of a line that is not JSON.
    """

    location: str
    value: object


def read_rows(path: Path, fields: Collection[str]) -> Iterator[RawRow]:
    """Yield the rows of a user's file. Blank rows are skipped.

    TSV is read without quoting: quotation marks are part of the text.

    Args:
        fields: the names of the fields of an item, by which a CSV file is recognized.

    Raises:
        BadInput: the file cannot be read, has another format, or is not well-formed.
    """
    data = _read_bytes(path)
    if path.suffix.lower() == ".parquet" or data.startswith(PARQUET):
        yield from _parquet_rows(path)
        return
    text = _decoded(path, data)
    lines = _lines(text)
    first_nonblank = _first_nonblank(lines)
    if path.suffix.lower() == ".tsv" or _is_tab_separated(first_nonblank):
        yield from _tsv_rows(path, lines)
    else:
        _check_not_document(path, text, first_nonblank, fields)
        _check_not_csv(path, first_nonblank, fields)
        yield from _json_rows(path, lines)


def read_published_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a file of a public data set, as the ``datasets`` library reads them.

    Unlike in ``read_rows``, TSV is read with quoting. Published files were written by pandas, which
    quotes texts that contain a quotation mark.
    """
    if path.suffix != ".tsv":
        yield from read_rows(path, ())
        return
    text = io.StringIO(_decoded(path, _read_bytes(path)), newline="")
    try:
        rows = list(csv.DictReader(text, delimiter="\t"))
    except csv.Error as error:
        raise _unreadable(path, error) from None
    for number, row in enumerate(rows, 1):
        yield RawRow(f"{path}: row {number}", row)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> BadInput:
    reason = getattr(error, "strerror", None) or first_line(error)
    return BadInput(
        f"{path} cannot be read ({reason}). Check the path, or use another copy of the file"
    )


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise _unreadable(path, error) from None
    for number, row in enumerate(rows, 1):
        yield RawRow(f"{path}: row {number}", row)


def _json_rows(path: Path, lines: list[str]) -> Iterator[RawRow]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        value: object
        try:
            value = files.parse_json(line)
        except ValueError:
            value = line  # rows.validate rejects it with its line number
        yield RawRow(f"{path}: line {number}", value)


def _tsv_rows(path: Path, lines: list[str]) -> Iterator[RawRow]:
    nonblank_lines = [line for line in lines if line.strip()]
    if not nonblank_lines:
        return
    header_line = nonblank_lines[0]
    header = header_line.split("\t")
    if all(_is_in_quotes(name) for name in header):
        raise _quoted_tsv(path, f"its header {header_line[:60]} is in quotation marks")
    if len(set(header)) < len(header):
        raise BadInput(
            f"{path}: two columns of the header have the same name ({', '.join(header)}). "
            f"Rename one of them"
        )
    for number, line in enumerate(nonblank_lines[1:], 1):
        location = f"{path}: row {number}"
        values = line.split("\t")
        for name, value in zip(header, values, strict=False):
            if _is_in_quotes(value) and '""' in value:
                raise _quoted_tsv(path, f"row {number}: {name} = {value[:60]}")
        if len(values) != len(header):
            raise BadInput(
                f"{location} has {len(values)} fields, but the header has {len(header)}. Correct "
                f"this row. In TSV, a text cannot contain a tab or a line break, but in JSON lines "
                f"it can"
            )
        yield RawRow(location, dict(zip(header, values, strict=True)))


def _is_in_quotes(value: str) -> bool:
    return len(value) > 1 and value.startswith('"') and value.endswith('"')


def _quoted_tsv(path: Path, evidence: str) -> BadInput:
    return _wrong_format(
        path,
        f"is a quoted TSV ({evidence}), and TSV is read without quoting",
        _from_delimited(r"\t"),
    )


def _decoded(path: Path, data: bytes) -> str:
    """Return the text of a UTF-8 file without its byte order mark.

    Raises:
        BadInput: the file has another format. The message names a command that converts it.
    """
    _check_is_text(path, data)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _wrong_format(
            path,
            f"is not UTF-8 text (invalid byte at offset {error.start}), and may be in Latin-1",
            "iconv -f LATIN1 -t UTF-8 {old} > {new}",
            path.suffix,
        ) from None


def _check_is_text(path: Path, data: bytes) -> None:
    """Raise BadInput for a file that is compressed, in another encoding, or not text."""
    head = data[:HEAD_BYTES]
    for signature, compression, command in COMPRESSION_SIGNATURES:
        if head.startswith(signature):
            suffix = Path(path.stem).suffix or ".jsonl"
            raise _wrong_format(path, f"is {compression}", f"{command} {{old}} > {{new}}", suffix)
    if head.startswith(ZIP) and b"xl/" in data:
        command = f'pip install openpyxl && python -c "{FROM_EXCEL}" {{old}} {{new}}'
        raise _wrong_format(path, "is an Excel workbook", command)
    if head.startswith(ZIP):
        raise _wrong_format(path, "is a ZIP archive", "python -m zipfile -e {old} {new}", "")
    if head.startswith(OLD_EXCEL):
        raise BadInput(f"{path} is an old Excel workbook. Save it as .xlsx or as CSV (UTF-8)")
    encoding = wide_encoding(head)
    if encoding is not None:
        command = f"iconv -f {encoding} -t UTF-8 {{old}} > {{new}}"
        raise _wrong_format(path, f"is {encoding} text, not UTF-8", command, path.suffix)
    if b"\x00" in head:
        raise BadInput(f"{path} is a binary file. Use JSON lines, Parquet or TSV")


def _lines(text: str) -> list[str]:
    """Split a text at line ends. Unlike ``splitlines``, keep U+2028 and form feeds in the lines."""
    if "\n" not in text:
        return text.split("\r")
    return [line.removesuffix("\r") for line in text.split("\n")]


def _first_nonblank(lines: list[str]) -> str:
    """Return the first line that is not blank without outer spaces, or "" if all are blank."""
    for line in lines:
        if line.strip():
            return line.strip()
    return ""


def _is_tab_separated(line: str) -> bool:
    return "\t" in line and not line.startswith(("{", "["))


def _check_not_document(
    path: Path, text: str, first_nonblank: str, fields: Collection[str]
) -> None:
    """Raise BadInput for a file that is a single JSON value with all items."""
    first_value = _json_value(first_nonblank)
    if isinstance(first_value, dict) and not first_value.keys().isdisjoint(fields):
        return  # the first line is an item
    document = _json_value(text)
    list_name = _only_list(document)
    if isinstance(document, list):
        problem = "is a JSON array, not JSON lines"
        rows = DOCUMENT
    elif list_name is not None:
        problem = "is one JSON object with a list, not JSON lines"
        rows = f"{DOCUMENT}['{list_name}']"
    elif isinstance(document, dict) and first_value != document:
        problem = "is one JSON object over several lines, not JSON lines"
        rows = f"[{DOCUMENT}]"
    else:
        return
    program = FROM_DOCUMENT.replace("{rows}", rows)
    raise _wrong_format(path, problem, f'python -c "{program}" {{old}} > {{new}}')


def _only_list(document: object) -> str | None:
    """Return the name of the only field of an object if it is a list, else None."""
    if not isinstance(document, dict) or len(document) != 1:
        return None
    ((name, value),) = document.items()
    # The name is written into a command, so it must not contain quotation marks.
    if isinstance(value, list) and name.isidentifier():
        return name
    return None


def _json_value(text: str) -> object:
    """Return the value of a text in JSON, or None if the text is not JSON."""
    try:
        return files.parse_json(text)
    except ValueError:
        return None


def _check_not_csv(path: Path, first_nonblank: str, fields: Collection[str]) -> None:
    """Raise BadInput for a file with the suffix .csv or with the header of a CSV file."""
    if first_nonblank.startswith("{"):
        return
    delimiter = max(",;", key=first_nonblank.count)
    columns = {column.strip().strip('"') for column in first_nonblank.split(delimiter)}
    has_field = delimiter in first_nonblank and not columns.isdisjoint(fields)
    if path.suffix.lower() == ".csv" or has_field:
        raise _wrong_format(path, "is CSV", _from_delimited(delimiter))


def _from_delimited(delimiter: str) -> str:
    program = FROM_DELIMITED.format(delimiter=delimiter)
    return f'python -c "{program}" {{old}} > {{new}}'


def _wrong_format(path: Path, problem: str, command: str, new_suffix: str = ".jsonl") -> BadInput:
    """Return an error with a command that converts a file into a new one.

    Args:
        problem: the rest of a sentence whose subject is the file.
        command: a shell command with the placeholders {old} and {new} for the names of the files.
        new_suffix: the suffix of the new file.
    """
    old_name = shlex.quote(str(path))
    new_path = converted_path(path, new_suffix)
    new_name = shlex.quote(str(new_path))
    command = command.replace("{old}", old_name)
    command = command.replace("{new}", new_name)
    return BadInput(f"{path} {problem}. Convert it: {command}")
