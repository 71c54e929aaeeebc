"""Every task reads every documented file format; other kinds of files are named with a command that converts them."""

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
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import task_rows

from ursa_minor.base.errors import BadInput
from ursa_minor.evaluation import task_data


def own_arc(seed):
    """Rows of ARC without empty answers, which are an error in a local file."""
    rows = task_rows.arc_rows(seed)
    for row in rows:
        row["choices"]["text"] = [text if text.strip() else "x" for text in row["choices"]["text"]]
    return rows


ROWS = {
    "arc_easy": own_arc(1),
    "arc_challenge": own_arc(2),
    "piqa": task_rows.piqa_rows(3),
    "winogrande": task_rows.winogrande_rows(4),
    "lambada_openai": task_rows.lambada_rows(5),
    "multiblimp_hin": task_rows.multiblimp_rows(6),
    "blimp": [task_rows.blimp_rows(part)[0] for part in range(9)],
    "hellaswag": task_rows.hellaswag_rows(8),
}
PAIRS = [{"sen": f"the {n} cats sit", "wrong_sen": f"the {n} cats sits"} for n in range(6)]


def read(task, *paths, **how):
    return task_data.read(task_data.all_tasks()[task], [str(path) for path in paths], **how)


def questions(found):
    return [item.questions for item in found]


def write_json_lines(path, rows, encoding="utf-8", end="\n"):
    path.write_bytes(
        "".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode(encoding)
    )
    return path


def write_tsv(path, rows, encoding="utf-8", end="\n"):
    """Without quoting; a list is written as JSON."""
    cells = [
        [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
        for row in rows
    ]
    lines = ["\t".join(fields) for fields in [list(rows[0]), *cells]]
    path.write_bytes((end.join(lines) + end).encode(encoding))
    return path


def write_parquet(path, rows, **_):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


WRITERS = {"jsonl": write_json_lines, "parquet": write_parquet, "tsv": write_tsv}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "tsv", "TSV", "txt"])
@pytest.mark.parametrize("task", ROWS)
def test_a_task_reads_every_format_alike(task, suffix, tmp_path):
    rows = [
        row for row in ROWS[task] if "\n" not in json.dumps(row) and "\\n" not in json.dumps(row)
    ]
    if suffix == "txt" and len(rows[0]) == 1:
        suffix = "tsv"  # one column has no tab by which it could be recognized
    write = WRITERS.get(suffix.lower(), write_tsv)
    wanted = read(task, write_json_lines(tmp_path / "wanted.jsonl", rows))
    found = read(task, write(tmp_path / f"items.{suffix}", rows))
    assert len(wanted) == len(rows) and questions(found) == questions(wanted)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("write", [write_json_lines, write_tsv])
def test_byte_order_marks_and_line_ends_are_no_part_of_a_text(write, end, tmp_path):
    wanted = read("blimp", write_json_lines(tmp_path / "wanted.jsonl", ROWS["blimp"]))
    path = write(
        tmp_path / f"items.{'tsv' if write is write_tsv else 'jsonl'}",
        ROWS["blimp"],
        "utf-8-sig",
        end,
    )
    assert questions(read("blimp", path)) == questions(wanted)


@pytest.mark.parametrize(
    "text", ['"Yes', 'Yes"', '"Yes" he said', '"Yes, all of it."', '5" nails', '"', "'Yes"]
)
def test_a_quotation_mark_in_tsv_is_text(text, tmp_path):
    rows = [row | {"sen": text} if n == 2 else row for n, row in enumerate(PAIRS)]
    found = read("multiblimp_hin", write_tsv(tmp_path / "items.tsv", rows))
    assert [question.endings[0] for ((question,),) in zip(questions(found), strict=True)] == [
        row["sen"] for row in rows
    ]


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("task", ROWS)
def test_quoted_tsv_is_an_error_whose_command_converts_it(task, quoting, tmp_path):
    rows = [row | {next(iter(row)): 'She said "yes" _ and left'} for row in ROWS[task][:3]]
    path = tmp_path / "items.tsv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t", quoting=quoting)
        writer.writeheader()
        cells = [
            {name: v if isinstance(v, str) else json.dumps(v) for name, v in row.items()}
            for row in rows
        ]
        writer.writerows(cells)
    wanted = read(task, write_json_lines(tmp_path / "wanted.jsonl", rows))
    assert questions(read(task, converted(path, "is a quoted TSV", task))) == questions(wanted)


def test_published_tsv_is_read_as_the_datasets_library_reads_it(tmp_path, monkeypatch):
    path = tmp_path / "data.tsv"
    path.write_text('sen\twrong_sen\n"She said ""yes""."\tNo.\n', encoding="utf-8")
    monkeypatch.setattr(task_data, "fetch", lambda task, revision: ([path], "commit"))
    (item,) = task_data.read(task_data.all_tasks()["multiblimp_hin"])
    assert item.questions[0].endings == ('She said "yes".', "No.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sen\twrong_sen\na\tb\tc\n", "row 1 has 3 fields, but the header has 2"),
        ("sen\twrong_sen\na\tb\na\n", "row 2 has 1 fields, but the header has 2"),
        ("sen\tsen\na\tb\n", "two columns of the header have the same name"),
        (
            "good\tbad\na\tb\n",
            "row 1: these fields are missing: sen, wrong_sen.* this row has good, bad",
        ),
    ],
)
def test_malformed_tsv_is_an_error_that_names_the_row(text, message, tmp_path):
    path = tmp_path / "items.tsv"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        read("multiblimp_hin", path)


# Other kinds of files


def converted(path: Path, problem: str, task: str) -> Path:
    """Check the error of a file, run the command that it suggests, and return the new file."""
    before = {one: one.read_bytes() for one in path.parent.iterdir()}
    with pytest.raises(BadInput) as caught:
        read(task, path)
    assert len(caught.value.lines) == 1
    message, _, command = str(caught.value).partition(" Convert it: ")
    assert message.startswith(str(path)) and problem in message and command
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, shell=True, check=True, env=os.environ | {"PATH": search})
    assert all(one.read_bytes() == data for one, data in before.items()), (
        "a command changes no file"
    )
    (new,) = {*path.parent.iterdir()} - before.keys()
    return new


def _archive(path, data):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("items.jsonl", data)


LINES = "".join(json.dumps(row) + "\n" for row in PAIRS)
TABLE = "sen\twrong_sen\n" + "".join("\t".join(row.values()) + "\n" for row in PAIRS)
COMMAS = "sen,wrong_sen\n" + "".join(
    ",".join(f'"{text}"' for text in row.values()) + "\n" for row in PAIRS
)
KINDS = {
    "gzip": ("items.jsonl.gz", gzip.compress(LINES.encode()), "is gzip-compressed"),
    "gzip with another name": ("items.jsonl", gzip.compress(LINES.encode()), "is gzip-compressed"),
    "gzip of tsv": ("items.tsv.gz", gzip.compress(TABLE.encode()), "is gzip-compressed"),
    "bzip2": ("items.jsonl.bz2", bz2.compress(LINES.encode()), "is bzip2-compressed"),
    "xz": ("items.jsonl.xz", lzma.compress(LINES.encode()), "is xz-compressed"),
    "utf-16 with mark": ("items.tsv", TABLE.encode("utf-16"), "is UTF-16 text"),
    "utf-16 big": ("items.tsv", b"\xfe\xff" + TABLE.encode("utf-16-be"), "is UTF-16 text"),
    "utf-16 without mark": ("items.jsonl", LINES.encode("utf-16-le"), "is UTF-16LE text"),
    "utf-32": ("items.jsonl", LINES.encode("utf-32"), "is UTF-32 text"),
    "latin-1": (
        "it ems.jsonl",
        LINES.replace("cats", "ch\xe2ts").encode("latin-1"),
        "is not UTF-8 text (invalid byte at offset ",
    ),
    "json array": ("items.json", json.dumps(PAIRS).encode(), "is a JSON array"),
    "indented json array": ("items.jsonl", json.dumps(PAIRS, indent=1).encode(), "is a JSON array"),
    "json with a list": (
        "items.json",
        json.dumps({"data": PAIRS}).encode(),
        "is one JSON object with a list",
    ),
    "indented json": (
        "items.json",
        json.dumps(PAIRS[0], indent=1).encode(),
        "one JSON object over several lines",
    ),
    "csv": ("items.csv", COMMAS.encode(), "is CSV"),
    "csv with another name": ("it'ems.jsonl", COMMAS.encode("utf-8-sig"), "is CSV"),
    "csv with semicolons": ("items.csv", COMMAS.replace(",", ";").encode(), "is CSV"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_another_kind_of_file_is_named_with_a_command_that_works(kind, tmp_path):
    name, data, problem = KINDS[kind]
    path = tmp_path / name
    path.write_bytes(data)
    command = problem.removeprefix("is ").partition("-")[0]
    if command in ("bzip2", "xz") and not shutil.which(command):
        pytest.skip(f"needs {command}")
    found = read("multiblimp_hin", converted(path, problem, "multiblimp_hin"))
    texts = [item.questions[0].endings[0].replace("ch\xe2t", "cat") for item in found]
    assert texts == [row["sen"] for row in PAIRS[: len(found)]] and texts


def test_a_file_that_the_command_would_write_is_never_an_existing_one(tmp_path):
    (tmp_path / "items-converted.jsonl").write_text("mine")
    (tmp_path / "items.json").write_text(json.dumps(PAIRS))
    new = converted(tmp_path / "items.json", "is a JSON array", "multiblimp_hin")
    assert new.name == "items-converted-2.jsonl"


@pytest.mark.parametrize(
    ("name", "make", "problem"),
    [
        ("items.zip", lambda path: _archive(path, LINES), "is a ZIP archive"),
        ("items.xlsx", lambda path: _archive(path, "xl/workbook.xml"), "is an Excel workbook"),
        (
            "items.xls",
            lambda path: path.write_bytes(b"\xd0\xcf\x11\xe0" + bytes(600)),
            "is an old Excel workbook",
        ),
        ("items.bin", lambda path: path.write_bytes(b"a\0b\1" * 9), "is a binary file"),
        ("items.parquet", lambda path: path.write_text(LINES), r"cannot be read \(.*[Pp]arquet"),
        ("folder", lambda path: path.mkdir(), r"cannot be read \(Is a directory"),
        ("none.jsonl", lambda path: None, r"cannot be read \(No such file"),
        ("empty.jsonl", lambda path: path.touch(), "contains no items of MultiBLiMP hin"),
        (
            "empty.tsv",
            lambda path: path.write_text("sen\twrong_sen\n"),
            "contains no items of MultiBLiMP hin",
        ),
    ],
)
def test_a_file_without_rows_is_an_error_that_names_it(name, make, problem, tmp_path):
    make(tmp_path / name)
    with pytest.raises(BadInput, match=f"{name}:? {problem}"):
        read("multiblimp_hin", tmp_path / name)
