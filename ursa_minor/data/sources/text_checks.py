"""Judge text files by their contents.

The name of a file decides how it is read. Contents that do not look like plain text lead to an
error or to a note.
"""

import codecs
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import HTML_START
from ursa_minor.base.wording import pluralize
from ursa_minor.data.sources import encodings
from ursa_minor.data.sources.formats import text as text_format

HEAD_BYTES = 4096
MAX_LINE_BYTES = 2**24  # a longer line is not parsed
JSON_LINES = 5  # number of lines that must be JSON objects
TSV_LINES = 1000  # number of lines that must have the same number of tabs
XML_DECLARATION = re.compile(rb"(\xef\xbb\xbf)?\s*<\?xml[^>]*>\s*")


def check_texts(key: str, paths: Sequence[Path]) -> list[str]:
    """Check that text files do not contain JSON, and are not documents in ASCII.

    Args:
        key: the recipe key of the files. Messages begin with it.
        paths: the files.

    Returns:
        One note if files contain HTML, and one if they contain columns separated by tabs.

    Raises:
        BadInput: files contain JSON or documents, with a line for each problem.
    """
    problems = []
    document_paths = []
    json_paths = []
    html_paths = []
    tsv_paths = []
    for path in paths:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if head.startswith(encodings.ASCII_DOCUMENTS):
            document_paths.append(path)
            problems.append(f"{key}: {path} is not text. {encodings.recognize(str(path), head)}")
        elif _is_html(head):
            html_paths.append(path)
        elif _contains_json(path, head):
            json_paths.append(path)
        elif _has_columns(path, head):
            tsv_paths.append(path)
    if json_paths:
        problems.append(f"{key}: {_json_problem(json_paths)}")
    if problems:
        other_paths = [path for path in paths if path not in document_paths]
        raise BadInput(problems + text_format.problems(other_paths))
    notes = []
    if html_paths:
        notes.append(f"{key}: {_note_on_html(html_paths)}")
    if tsv_paths:
        notes.append(f"{key}: {_note_on_columns(tsv_paths)}")
    return notes


def _json_problem(paths: list[Path]) -> str:
    new_name = f"{str(paths[0]).removesuffix('.txt')}.jsonl"
    return (
        f"{_with_count(paths)} JSON, but a file with this name is read as plain text. To train "
        f"on a field of the JSON objects, rename it to {new_name} or use --data_format json_lines. "
        f"To train on the JSON itself, use --data_format text"
    )


def _note_on_html(paths: list[Path]) -> str:
    program = "pandoc -f html -t plain --wrap=none"
    command = encodings.conversion(str(paths[0]), program, ".txt")
    return (
        f"{_with_count(paths)} HTML, whose tags are trained as text. To extract the text: {command}"
    )


def _note_on_columns(paths: list[Path]) -> str:
    with paths[0].open("rb") as file:
        lines = list(itertools.islice(_nonempty_lines(file), TSV_LINES))
    num_columns = lines[0].count(b"\t") + 1
    widths = [0] * num_columns
    for line in lines:
        for number, field in enumerate(line.split(b"\t")):
            widths[number] += len(field)
    longest = widths.index(max(widths))
    program = f"""jq -Rc 'rtrimstr("\\r") | split("\\t") | {{text: .[{longest}]}}'"""
    command = encodings.conversion(str(paths[0]), program, ".jsonl")
    return (
        f"{_with_count(paths)} {num_columns} columns separated by tabs, all of which are "
        f"trained as text. To train on column {longest + 1} only, with one document for each row: "
        f"{command}"
    )


def _with_count(paths: list[Path]) -> str:
    """Return the subject and the verb of a note: "a.txt contains"."""
    if len(paths) == 1:
        return f"{paths[0]} contains"
    return f"{paths[0]} and {pluralize(len(paths) - 1, 'other file', 'other files')} contain"


def _contains_json(path: Path, head: bytes) -> bool:
    """Return whether a file contains JSON: several rows, or one document in a ``.txt`` file.

    Rows are JSON objects or arrays, one per line, or the elements of one array. One document is
    accepted in files without this suffix, because many configuration files of programs are JSON.

    Args:
        head: the first bytes of the file.
    """
    if not head.removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"{", b"[")):
        return False
    with path.open("rb") as file:
        lines = list(itertools.islice(_nonempty_lines(file), JSON_LINES))
        is_end = not file.read(1)
    # An array may begin and end with lines that contain only a bracket.
    lines = [line for line in lines if line.strip() not in (b"[", b"]")]
    num_rows = [_num_rows(line) for line in lines]
    is_truncated = is_end and sum(num_rows[:-1]) >= 2
    if is_truncated:  # the last line may be incomplete
        num_rows.pop()
    if all(num_rows) and sum(num_rows) >= 2:
        return True
    return path.suffix.lower() == ".txt" and _is_json_document(path)


def _is_json_document(path: Path) -> bool:
    """Return whether a file of moderate size consists of one JSON object or array."""
    if path.stat().st_size > MAX_LINE_BYTES:
        return False
    try:
        value = files.parse_json(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except ValueError:
        return False
    return isinstance(value, dict) or _is_row(value)


def _num_rows(line: bytes) -> int:
    """Return the number of rows that a line consists of, or 0 if it is not JSON."""
    text = line.removeprefix(codecs.BOM_UTF8).strip()
    # The lines of an array are separated by commas.
    for candidate in (text, text.lstrip(b"[").rstrip(b",]")):
        try:
            value = files.parse_json(candidate)
        except ValueError:
            continue
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            return len(value)
        if isinstance(value, dict) or _is_row(value):
            return 1
    return 0


def _is_row(value: Any) -> bool:
    """Return whether a value is an array of other things than numbers.

    Lines such as [1] also occur in plain text.
    """
    return isinstance(value, list) and any(isinstance(item, str | list | dict) for item in value)


def _is_html(head: bytes) -> bool:
    """Return whether a file with these first bytes is an HTML page."""
    declaration = XML_DECLARATION.match(head)
    if declaration:
        head = head[declaration.end() :]
    return HTML_START.match(head) is not None


def _has_columns(path: Path, head: bytes) -> bool:
    """Return whether the first lines of a file have the same number of columns.

    Args:
        head: the first bytes of the file.
    """
    has_line = b"\n" in head.lstrip(b"\r\n")
    if has_line and b"\t" not in head:  # the usual case
        return False
    num_lines = 0
    num_tabs = 0
    with path.open("rb") as file:
        for line in itertools.islice(_nonempty_lines(file), TSV_LINES):
            if num_lines == 0:
                num_tabs = line.count(b"\t")
            is_row = num_tabs > 0 and line.count(b"\t") == num_tabs
            if not is_row or line.startswith(b"\t"):
                return False
            num_lines += 1
    return num_lines > 1


def _nonempty_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file that are not empty, up to one that is longer than the limit."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            return
        if line.strip(b" \r\n"):
            yield line
