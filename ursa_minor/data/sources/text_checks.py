"""Judge text files by their contents.

The name of a file decides how it is read. Contents that do not look like plain text lead to an
error or to a note.
"""

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import HTML_START
from ursa_minor.base.wording import pluralize
from ursa_minor.data.sources import encodings

HEAD_BYTES = 4096
MAX_LINE_BYTES = 2**24  # a longer line is not parsed
JSON_LINES = 5  # number of lines that must be JSON objects
TSV_LINES = 1000  # number of lines that must have the same number of tabs
XML_DECLARATION = re.compile(rb"(\xef\xbb\xbf)?\s*<\?xml[^>]*>\s*")


def check_texts(key: str, paths: Iterable[Path]) -> list[str]:
    """Check that text files do not contain JSON lines, and are not documents in ASCII.

    Args:
        key: the recipe key of the files. Messages begin with it.
        paths: the files.

    Returns:
        One note if files contain HTML, and one if they contain columns separated by tabs.

    Raises:
        BadInput: a file contains JSON lines or a document.
    """
    json_paths = []
    html_paths = []
    tsv_paths = []
    for path in paths:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if head.startswith(encodings.ASCII_DOCUMENTS):
            raise BadInput(f"{key}: {path} is not text. {encodings.recognize(str(path), head)}")
        if _is_html(head):
            html_paths.append(path)
        elif _contains_json_lines(path, head):
            json_paths.append(path)
        elif _has_columns(path, head):
            tsv_paths.append(path)
    if json_paths:
        raise BadInput(f"{key}: {_json_problem(json_paths)}")
    notes = []
    if html_paths:
        notes.append(f"{key}: {_note_on_html(html_paths)}")
    if tsv_paths:
        notes.append(f"{key}: {_note_on_columns(tsv_paths)}")
    return notes


def _json_problem(paths: list[Path]) -> str:
    new_name = f"{str(paths[0]).removesuffix('.txt')}.jsonl"
    return (
        f"{_with_count(paths)} JSON objects, one per line, but a file with this name is read as "
        f"plain text. To train on a field of the objects, rename it to {new_name} or use "
        f"--data_format json_lines. To train on the JSON itself, use --data_format text"
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


def _contains_json_lines(path: Path, head: bytes) -> bool:
    """Return whether the first lines of a file are JSON objects, or parts of an array of them.

    Args:
        head: the first bytes of the file.
    """
    if not head.removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"{", b"[")):
        return False
    with path.open("rb") as file:
        lines = list(itertools.islice(_nonempty_lines(file), JSON_LINES))
    # An array may begin and end with lines that contain only a bracket.
    lines = [line for line in lines if line.strip() not in (b"[", b"]")]
    num_objects = [_num_objects(line) for line in lines]
    return all(num_objects) and sum(num_objects) >= 2


def _num_objects(line: bytes) -> int:
    """Return the number of JSON objects that a line consists of, or 0 if it is something else."""
    text = line.removeprefix(codecs.BOM_UTF8).strip()
    # The lines of an array are separated by commas.
    for candidate in (text, text.lstrip(b"[").rstrip(b",]")):
        try:
            value = files.parse_json(candidate)
        except ValueError:
            continue
        if isinstance(value, dict):
            return 1
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            return len(value)
    return 0


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
        if line.strip(b"\r\n"):
            yield line
