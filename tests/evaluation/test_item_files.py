"""Every task reads every documented file format.

For another kind of file, the error message contains a command that converts it.
"""

import bz2
import csv
import gzip
import json
import lzma
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import task_rows

from ursa_minor.base.errors import BadInput
from ursa_minor.evaluation import task_data


def arc_rows_without_empty_texts(seed: int) -> list[dict]:
    """Return rows of ARC in which no answer is empty, which is an error in a local file."""
    rows = task_rows.arc_rows(seed)
    for row in rows:
        texts = row["choices"]["text"]
        row["choices"]["text"] = [text if text.strip() else "x" for text in texts]
    return rows


ROWS = {
    "arc_easy": arc_rows_without_empty_texts(1),
    "arc_challenge": arc_rows_without_empty_texts(2),
    "piqa": task_rows.piqa_rows(3),
    "winogrande": task_rows.winogrande_rows(4),
    "lambada_openai": task_rows.lambada_rows(5),
    "multiblimp_hin": task_rows.multiblimp_rows(6),
    "blimp": [task_rows.blimp_rows(part)[0] for part in range(9)],
    "hellaswag": task_rows.hellaswag_rows(8),
}
PAIRS = [{"sen": f"the {n} cats sit", "wrong_sen": f"the {n} cats sits"} for n in range(6)]


def read(task: str, path: Path) -> task_data.Items:
    """Read the items of a task from a local file."""
    return task_data.read(task_data.all_tasks()[task], [str(path)])


def questions(items: task_data.Items) -> list[tuple]:
    """Return the questions of each item."""
    return [item.questions for item in items]


def expected_questions(task: str, rows: list[dict], folder: Path) -> list[tuple]:
    """Return the questions of rows that are read from a JSON lines file."""
    return questions(read(task, write_json_lines(folder / "expected.jsonl", rows)))


def text_cells(row: dict) -> list[str]:
    """Return the values of a row as texts. A value that is not a text becomes JSON."""
    return [value if isinstance(value, str) else json.dumps(value) for value in row.values()]


def write_json_lines(
    path: Path, rows: list[dict], encoding: str = "utf-8", line_end: str = "\n"
) -> Path:
    """Write rows as JSON lines."""
    lines = [json.dumps(row, ensure_ascii=False) + line_end for row in rows]
    path.write_bytes("".join(lines).encode(encoding))
    return path


def write_tsv(path: Path, rows: list[dict], encoding: str = "utf-8", line_end: str = "\n") -> Path:
    """Write rows as TSV without quotation marks around values."""
    lines = ["\t".join(rows[0]) + line_end]
    for row in rows:
        lines.append("\t".join(text_cells(row)) + line_end)
    path.write_bytes("".join(lines).encode(encoding))
    return path


def write_quoted_tsv(path: Path, rows: list[dict], quoting: int) -> Path:
    """Write rows as TSV with quotation marks around values."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", quoting=quoting)
        writer.writerow(list(rows[0]))
        for row in rows:
            writer.writerow(text_cells(row))
    return path


def write_parquet(path: Path, rows: list[dict]) -> Path:
    """Write rows as a Parquet file."""
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


WRITERS = {"jsonl": write_json_lines, "parquet": write_parquet}  # others are TSV


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "tsv", "TSV", "txt"])
@pytest.mark.parametrize("task", ROWS)
def test_task_reads_every_format(task, suffix, tmp_path):
    rows = [row for row in ROWS[task] if r"\n" not in json.dumps(row)]
    if suffix == "txt" and len(rows[0]) == 1:
        suffix = "tsv"  # one column has no tab by which TSV could be recognized
    write = WRITERS.get(suffix, write_tsv)
    path = write(tmp_path / f"items.{suffix}", rows)

    items = read(task, path)

    assert len(items) == len(rows)
    assert questions(items) == expected_questions(task, rows, tmp_path)


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("suffix", ["jsonl", "tsv"])
def test_byte_order_mark_and_line_ends_are_removed(suffix, line_end, tmp_path):
    rows = ROWS["blimp"]
    write = WRITERS.get(suffix, write_tsv)
    path = write(tmp_path / f"items.{suffix}", rows, "utf-8-sig", line_end)

    items = read("blimp", path)

    assert questions(items) == expected_questions("blimp", rows, tmp_path)


@pytest.mark.parametrize(
    "text", ['"Yes', 'Yes"', '"Yes" he said', '"Yes, all of it."', '5" nails', '"', "'Yes"]
)
def test_quotation_mark_in_tsv_is_text(text, tmp_path):
    rows = [*PAIRS[:2], PAIRS[2] | {"sen": text}, *PAIRS[3:]]

    items = read("multiblimp_hin", write_tsv(tmp_path / "items.tsv", rows))

    good_sentences = [item.questions[0].endings[0] for item in items]
    assert good_sentences == [row["sen"] for row in rows]


@pytest.mark.parametrize(
    "quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL], ids=["quotes where needed", "quotes everywhere"]
)
@pytest.mark.parametrize("task", ROWS)
def test_command_converts_quoted_tsv(task, quoting, tmp_path):
    first_field = next(iter(ROWS[task][0]))
    rows = [row | {first_field: 'She said "yes" _ and left'} for row in ROWS[task][:3]]
    path = write_quoted_tsv(tmp_path / "items.tsv", rows, quoting)

    items = read(task, convert(path, "is a quoted TSV", task))

    assert questions(items) == expected_questions(task, rows, tmp_path)


def test_published_tsv_is_read_as_quoted_tsv(tmp_path, monkeypatch):
    """The ``datasets`` library removes the quotation marks."""
    path = tmp_path / "data.tsv"
    path.write_text('sen\twrong_sen\n"She said ""yes""."\tNo.\n', encoding="utf-8")
    monkeypatch.setattr(task_data, "fetch", lambda task, revision: ([path], "commit"))

    items = task_data.read(task_data.all_tasks()["multiblimp_hin"])

    assert len(items) == 1
    assert items[0].questions[0].endings == ('She said "yes".', "No.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sen\twrong_sen\na\tb\tc\n", "row 1 has 3 fields"),
        ("sen\twrong_sen\na\tb\na\n", "row 2 has 1 fields"),
        ("sen\tsen\na\tb\n", "same name"),
        ("good\tbad\na\tb\n", "row 1: .* missing: sen, wrong_sen.* has good, bad"),
    ],
    ids=["extra field", "missing field", "repeated name", "other names"],
)
def test_malformed_tsv_is_rejected(text, message, tmp_path):
    path = tmp_path / "items.tsv"
    path.write_text(text)

    with pytest.raises(BadInput, match=message):
        read("multiblimp_hin", path)


# Other kinds of files


def convert(path: Path, problem: str, task: str) -> Path:
    """Check the error for a file, run the suggested command, and return the new file."""
    data_before = {file: file.read_bytes() for file in path.parent.iterdir()}

    with pytest.raises(BadInput) as error:
        read(task, path)
    message, _, command = str(error.value).partition(" Convert it: ")
    assert len(error.value.lines) == 1
    assert message.startswith(str(path))
    assert problem in message
    assert command

    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, shell=True, check=True, env=os.environ | {"PATH": programs})
    for file, data in data_before.items():
        assert file.read_bytes() == data, "the command must not change a file"
    new_files = set(path.parent.iterdir()) - data_before.keys()
    assert len(new_files) == 1
    return new_files.pop()


def separated_text(separator: str, quote: str = "") -> str:
    """Return PAIRS as a table in text."""
    lines = [f"sen{separator}wrong_sen\n"]
    for pair in PAIRS:
        cells = [f"{quote}{text}{quote}" for text in pair.values()]
        lines.append(separator.join(cells) + "\n")
    return "".join(lines)


class OtherFile(NamedTuple):
    """A file that a task does not read, and the problem that the message states."""

    name: str
    data: bytes
    problem: str
    command: str | None = None  # a program that the conversion needs


JSON_LINES = "".join(json.dumps(pair) + "\n" for pair in PAIRS)
TSV = separated_text("\t")
CSV = separated_text(",", quote='"')
LATIN1 = JSON_LINES.replace("cats", "ch\xe2ts").encode("latin-1")
OTHER_FILES = {
    "gzip": OtherFile("items.jsonl.gz", gzip.compress(JSON_LINES.encode()), "is gzip-compressed"),
    "gzip with another name": OtherFile(
        "items.jsonl", gzip.compress(JSON_LINES.encode()), "is gzip-compressed"
    ),
    "gzip of tsv": OtherFile("items.tsv.gz", gzip.compress(TSV.encode()), "is gzip-compressed"),
    "bzip2": OtherFile(
        "items.jsonl.bz2", bz2.compress(JSON_LINES.encode()), "is bzip2-compressed", "bzip2"
    ),
    "xz": OtherFile("items.jsonl.xz", lzma.compress(JSON_LINES.encode()), "is xz-compressed", "xz"),
    "utf-16 with mark": OtherFile("items.tsv", TSV.encode("utf-16"), "is UTF-16 text"),
    "utf-16 big": OtherFile("items.tsv", b"\xfe\xff" + TSV.encode("utf-16-be"), "is UTF-16 text"),
    "utf-16 without mark": OtherFile(
        "items.jsonl", JSON_LINES.encode("utf-16-le"), "is UTF-16LE text"
    ),
    "utf-32": OtherFile("items.jsonl", JSON_LINES.encode("utf-32"), "is UTF-32 text"),
    "latin-1": OtherFile("it ems.jsonl", LATIN1, "is not UTF-8 text (invalid byte at offset "),
    "json array": OtherFile("items.json", json.dumps(PAIRS).encode(), "is a JSON array"),
    "indented json array": OtherFile(
        "items.jsonl", json.dumps(PAIRS, indent=1).encode(), "is a JSON array"
    ),
    "json with a list": OtherFile(
        "items.json", json.dumps({"data": PAIRS}).encode(), "is one JSON object with a list"
    ),
    "indented json": OtherFile(
        "items.json", json.dumps(PAIRS[0], indent=1).encode(), "one JSON object over several lines"
    ),
    "csv": OtherFile("items.csv", CSV.encode(), "is CSV"),
    "csv with another name": OtherFile("it'ems.jsonl", CSV.encode("utf-8-sig"), "is CSV"),
    "csv with semicolons": OtherFile("items.csv", CSV.replace(",", ";").encode(), "is CSV"),
}


@pytest.mark.parametrize("file", OTHER_FILES.values(), ids=OTHER_FILES.keys())
def test_command_converts_other_kinds_of_files(file, tmp_path):
    if file.command and not shutil.which(file.command):
        pytest.skip(f"needs {file.command}")
    path = tmp_path / file.name
    path.write_bytes(file.data)

    items = read("multiblimp_hin", convert(path, file.problem, "multiblimp_hin"))

    assert items
    good_sentences = [item.questions[0].endings[0].replace("ch\xe2t", "cat") for item in items]
    assert good_sentences == [pair["sen"] for pair in PAIRS[: len(items)]]


def test_conversion_does_not_overwrite_files(tmp_path):
    (tmp_path / "items-converted.jsonl").write_text("mine")
    path = tmp_path / "items.json"
    path.write_text(json.dumps(PAIRS))

    new_path = convert(path, "is a JSON array", "multiblimp_hin")

    assert new_path.name == "items-converted-2.jsonl"


# Files without rows


def write_zip(path: Path, member: str) -> None:
    """Write a ZIP archive with one empty member."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, "")


class UnusableFile(NamedTuple):
    """A file without rows, and the problem that the message states."""

    name: str
    write: Callable[[Path], object]
    problem: str


UNUSABLE_FILES = {
    "zip": UnusableFile(
        "items.zip", lambda path: write_zip(path, "items.jsonl"), "is a ZIP archive"
    ),
    "xlsx": UnusableFile(
        "items.xlsx", lambda path: write_zip(path, "xl/workbook.xml"), "is an Excel workbook"
    ),
    "xls": UnusableFile(
        "items.xls",
        lambda path: path.write_bytes(b"\xd0\xcf\x11\xe0" + bytes(600)),
        "is an old Excel workbook",
    ),
    "binary": UnusableFile(
        "items.bin", lambda path: path.write_bytes(b"a\0b\1" * 9), "is a binary file"
    ),
    "not parquet": UnusableFile(
        "items.parquet",
        lambda path: path.write_text(JSON_LINES),
        r"cannot be read \(.*[Pp]arquet",
    ),
    "folder": UnusableFile("folder", lambda path: path.mkdir(), r"cannot be read \(Is a directory"),
    "missing": UnusableFile("none.jsonl", lambda path: None, r"cannot be read \(No such file"),
    "empty": UnusableFile("empty.jsonl", lambda path: path.touch(), "contains no items of"),
    "header only": UnusableFile(
        "empty.tsv",
        lambda path: path.write_text("sen\twrong_sen\n"),
        "contains no items of MultiBLiMP hin",
    ),
}


@pytest.mark.parametrize("file", UNUSABLE_FILES.values(), ids=UNUSABLE_FILES.keys())
def test_file_without_rows_is_rejected(file, tmp_path):
    path = tmp_path / file.name
    file.write(path)

    with pytest.raises(BadInput, match=f"{file.name}:? {file.problem}"):
        read("multiblimp_hin", path)
