"""Test the reading of tables from URLs, local files and the Hub, and its behaviour on errors.

The tests use the real ``datasets`` client, and a server on localhost that can fail.
"""

import csv
import errno
import gzip
import importlib
import itertools
import json
import logging
import os
import random
import re
import shutil
import subprocess
import types
from dataclasses import asdict, dataclass, field
from pathlib import Path

import datasets
import fsspec.compression
import fsspec.implementations.http  # imported once, before the forks
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import RECIPE, run_in_fork
from http_server import DataServer

import prepare_data
from ursa_minor.base import http, retry
from ursa_minor.base.errors import BadInput, TrainingStopped
from ursa_minor.data.preparation import prepare
from ursa_minor.data.sources import remote
from ursa_minor.data.sources import tables as hub_tables
from ursa_minor.data.sources.columns import NoText
from ursa_minor.data.sources.find import FoundSource
from ursa_minor.data.tokens.manifest import is_complete
from ursa_minor.hub import client
from ursa_minor.recipe import keys

NUM_ROWS = 700
ROW_GROUP_ROWS = 100
ROWS = [f"row {i} {random.Random(i).randbytes(15 + i % 40).hex()}" for i in range(NUM_ROWS)]
FILES = ("a.parquet", "a.jsonl", "a.jsonl.gz", "a.csv")

LOGIN_PAGE = "<!DOCTYPE html><html><body>Please log in</body></html>"
PROBLEMS = ("503", "reset", "short", "429:7", "500", "silent", "garbage", "drip", LOGIN_PAGE)
ALWAYS = 10**6


@pytest.fixture(scope="module")
def module_server(tmp_path_factory):
    """Serve the same rows in files of every format."""
    folder = tmp_path_factory.mktemp("served")
    write_files(folder / "files")
    with DataServer(folder) as server:
        yield server


@pytest.fixture
def server(module_server, tmp_path, monkeypatch):
    """Return the server without problems, and change to a folder of the test for downloads."""
    module_server.problems = []
    module_server.log = []
    monkeypatch.chdir(tmp_path)
    return module_server


@pytest.fixture
def served_files(module_server):
    """Return the folder with the served files, to read them as local files."""
    return module_server.folder / "files"


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """Record the waits before retries instead of waiting."""
    recorded = []

    def record(seconds):
        if seconds:
            recorded.append(seconds)

    monkeypatch.setattr(retry.time, "sleep", record)
    return recorded


def write_files(folder):
    """Write the rows to a file of each format."""
    folder.mkdir(parents=True)
    write_parquet(folder / "a.parquet", ROWS)
    lines = json_lines([{"id": i, "text": text} for i, text in enumerate(ROWS)])
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    with open(folder / "a.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(ROWS)])


def write_parquet(path, rows):
    """Write rows to a Parquet file with several row groups."""
    table = pa.table({"id": list(range(len(rows))), "text": rows})
    pq.write_table(
        table, path, row_group_size=ROW_GROUP_ROWS, use_dictionary=False, compression="none"
    )


def json_lines(rows):
    """Return rows as JSON lines."""
    return join_lines(json.dumps(row).encode() for row in rows)


def join_lines(lines):
    """Return lines with a newline after each."""
    return b"".join(line + b"\n" for line in lines)


def table_source(files=None, column="text", **settings):
    """Return the source of files by split, or of a data set of the Hub."""
    config = keys.DataSource(data_seed=1, tokenizer="characters", text_column=column, **settings)
    names = {}
    for split, paths in (files or {}).items():
        names[split] = [str(path) for path in paths]
    return FoundSource(config, "source", {}, files=names)


def open_reader(path, column="text"):
    """Return the function that reads a file from a row on."""
    source = table_source({"train": [path]}, column)
    _, splits = hub_tables.open_tables(source, None, {})
    ((_, read),) = splits["train"]
    return read


def read_texts(path, row=0, column="text"):
    """Return the texts of a file from a row on, and None for each row without text."""
    rows = [text for text, _ in open_reader(path, column)(row)]
    return [None if isinstance(text, NoText) else text for text in rows]


def problem(kind, *, after=0, times=1, pattern="."):
    """Return the problems of the server for a problem after some undisturbed requests."""
    return [[pattern, "ok", after], [pattern, kind, times]]


# URLs of files


def test_download_is_retried_after_every_problem(server, waits, caplog, monkeypatch):
    monkeypatch.setattr(remote, "TIMEOUT_SECONDS", 0.15)
    monkeypatch.setattr(http, "SLOW_SECONDS", 0.2)
    server.problems = [[".", kind, 1] for kind in PROBLEMS]

    texts = read_texts(f"{server.url}/files/a.jsonl.gz")

    assert texts == ROWS
    assert len(server.log) == len(PROBLEMS) + 1
    assert waits[PROBLEMS.index("429:7")] == 8
    logged_waits = []
    for message in caplog.messages:
        match = re.search(r"; retrying in ([\d.]+) s \(attempt \d+ of 10\)$", message)
        logged_waits.append(float(match[1]))
    assert logged_waits == waits


def test_url_with_new_signature_is_not_downloaded_again(server):
    url = f"{server.url}/files/a.jsonl.gz?download=true&sig=a.b%2Fc"
    assert read_texts(url) == ROWS

    texts = read_texts(url.replace("a.b", "c.d"), 300)

    assert texts == ROWS[300:]
    assert len(server.log) == 1


def assert_no_file_is_left():
    """Assert that the current folder contains no file."""
    assert not [path for path in Path().rglob("*") if path.is_file()]


@pytest.mark.parametrize("status", ["404", "403", "401", "422", "451"])
def test_url_with_permanent_error_is_rejected(server, waits, status):
    server.problems = problem(status, times=ALWAYS)

    with pytest.raises(BadInput, match=rf"a\.csv: HTTP status {status}.*may read it"):
        read_texts(f"{server.url}/files/a.csv")

    assert not waits
    assert_no_file_is_left()


def test_login_page_is_rejected_after_one_retry(server, waits):
    url = f"{server.url}/files/a.csv"
    server.problems = problem(LOGIN_PAGE, times=ALWAYS)

    with pytest.raises(BadInput, match=f"^{url}: .*login page"):
        read_texts(url)

    assert waits == [1]
    assert_no_file_is_left()


# Errors while reading


def failing_reader(problems):
    """Return a function that reads ROWS from a row on and fails.

    Args:
        problems: (row, error) of each failure, in order. Each occurs once.
    """
    remaining = list(problems)

    def read(row):
        for number in range(row, NUM_ROWS):
            if remaining and remaining[0][0] == number:
                _, error = remaining.pop(0)
                raise error
            yield ROWS[number]

    return read


def http_error(status, retry_after=None):
    """Return the client's error for an HTTP status."""
    headers = {}
    if retry_after:
        headers["Retry-After"] = retry_after
    error = OSError("no answer")
    error.response = types.SimpleNamespace(status_code=status, headers=headers)
    return error


def test_each_new_row_resets_retry_count(waits, caplog):
    problems = [(0, http_error(503))]
    problems += [(360, http_error(503))] * 5
    problems += [(500, ConnectionError())] * 9

    texts = list(retry.retried("hf://a", failing_reader(problems), 0))

    assert texts == ROWS
    assert waits == [1, 1, 2, 4, 8, 16, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert caplog.messages[0].startswith("hf://a: row 0: HTTP status 503; retrying in 1 s")
    assert caplog.messages[-1].startswith("hf://a: row 500: ConnectionError; retrying in 60 s")
    assert "attempt 10 of 10" in caplog.messages[-1]


@pytest.mark.parametrize(
    "retry_after, wait",
    [("7", 7), ("100000", retry.MAX_RETRY_AFTER_SECONDS), ("0", 1), ("soon", 1)],
)
def test_retry_after_header_is_obeyed(waits, retry_after, wait):
    read = failing_reader([(2, http_error(429, retry_after))])

    assert list(retry.retried("hf://a", read, 0)) == ROWS
    assert waits == [wait]


def test_last_failed_attempt_states_row(waits):
    read = failing_reader([(4, http_error(503))] * 10)

    with pytest.raises(TrainingStopped) as caught:
        list(retry.retried("hf://a", read, 0))

    message = str(caught.value)
    assert "hf://a: row 4: failed 10 times in a row" in message
    assert "HTTP status 503" in message
    assert "same command" in message
    assert waits[-1] == 60


def test_missing_connection_is_reported_with_fix():
    def fail():
        raise ConnectionError

    with pytest.raises(TrainingStopped, match=r"^me/corpus: failed 10 times in a row.*--prefetch"):
        retry.retry("me/corpus", fail)


# Local files


@pytest.mark.parametrize("name", FILES)
def test_file_is_read_from_any_row(served_files, name):
    read = open_reader(served_files / name)

    for boundary in (0, 100, 200, 256, 300, 512, 600, 700):
        for row in range(max(0, boundary - 1), min(NUM_ROWS, boundary + 1) + 1):
            assert [text for text, _ in read(row)] == ROWS[row:], row


@pytest.mark.parametrize("name", FILES)
def test_row_after_end_of_file_is_rejected(served_files, name):
    read = open_reader(served_files / name)

    with pytest.raises(BadInput) as caught:
        list(read(NUM_ROWS + 1))

    message = str(caught.value)
    assert f"{name}: row {NUM_ROWS + 1}: " in message
    assert f"ended after {NUM_ROWS} rows" in message


def test_client_error_is_not_end_of_file(served_files, monkeypatch):
    """The client treats some errors as the end of the file."""
    iter_batches = pq.ParquetFile.iter_batches

    def end_immediately(*args, **kwargs):
        return itertools.islice(iter_batches(*args, **kwargs), 0)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", end_immediately)

    with pytest.raises(BadInput, match=r"a\.parquet: row 0: .*ended after 0 rows"):
        read_texts(served_files / "a.parquet")


def test_empty_row_groups_are_skipped(tmp_path):
    path = tmp_path / "gaps.parquet"
    schema = pa.schema({"text": pa.large_string()})
    with pq.ParquetWriter(path, schema) as writer:
        for rows in ([], ["a", "b"], [], [], ["c"], []):
            writer.write_table(pa.table({"text": rows}, schema=schema))

    for row in range(4):
        assert read_texts(path, row) == ["a", "b", "c"][row:]


WORDS = pa.array(["a", None, "a", "b"])


@pytest.mark.parametrize(
    "column",
    [WORDS.dictionary_encode(), WORDS.cast(pa.string_view()), pa.nulls(4)],
    ids=["dictionary", "string view", "nulls"],
)
def test_parquet_column_types_are_read(tmp_path, column):
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")

    assert read_texts(tmp_path / "a.parquet") == column.to_pylist()


@pytest.mark.parametrize("new_file", [pa.ipc.new_stream, pa.ipc.new_file])
def test_arrow_file_and_stream_are_read(tmp_path, new_file):
    path = tmp_path / "a.arrow"
    table = pa.table({"id": [0, 1], "text": ["a", "b"]})
    with new_file(path, table.schema) as writer:
        writer.write_table(table)

    assert read_texts(path) == ["a", "b"]
    assert read_texts(path, 1) == ["b"]


JSON_ROWS = {
    b'\xef\xbb\xbf{"text": "first"}': "first",
    b'{"text": null}': None,
    b'{"id": 1}': None,
    b'{"text": ""}': None,
    b'{"text": " \\n\\t"}': None,
    b'{"text": 5}': None,
    b'{"text": {"a": 1}}': None,
    b'{"text": ["a"]}': None,
    b'{"text": true}': None,
    b"": None,
    b"  \r": None,
    b'"a text"': None,
    b'{"text": "2020-01-01"}': "2020-01-01",
    b'{"text": "half \\ud83d", "more": {"b": [1]}}': "half \ud83d",
    b'{"text": "whole \\ud83d\\ude00"}': "whole \U0001f600",
    b'{"text": "NUL \\u0000 end"}': "NUL \0 end",
    '{"text": "\u2028 é \x85"}'.encode(): "\u2028 é \x85",
    b'{"text": "twice", "text": "last"}\r': "last",
    b'{"text": "  kept  "}': "  kept  ",
}


@pytest.mark.parametrize("has_final_newline", [True, False])
def test_json_value_without_text_is_none(tmp_path, has_final_newline):
    path = tmp_path / "a.jsonl"
    content = join_lines(JSON_ROWS)
    path.write_bytes(content if has_final_newline else content[:-1])
    expected = list(JSON_ROWS.values())

    assert read_texts(path) == expected
    assert read_texts(path, row=10) == expected[10:]


def test_each_csv_value_is_text(tmp_path):
    """Pandas would read some values as missing, and a chunk of 10,000 numbers as numbers."""
    texts = ["None", "NA", "null", "nan", "N/A", "<NA>", "12", "1e3", "-inf", "True", "2020-01-01"]
    texts += ["", " ", " kept ", "a,b", 'a "b"', "two\r\nlines", "NUL \0 end", "\u2028 é \x85"]
    texts += ["x" * 200_000, *map(str, range(10_500)), "last"]
    path = tmp_path / "a.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        file.write("\ufeffid,text\r\n\r\n")
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(enumerate(texts))

    expected = [text if text.strip() else None for text in texts]
    assert read_texts(path) == expected
    assert read_texts(path, row=10_400) == expected[10_400:]


def test_csv_without_quotes_is_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text\nplain\n\nNone\r\n7", newline="")

    assert read_texts(path) == ["plain", "None", "7"]


def test_csv_without_header_is_rejected(tmp_path):
    path = tmp_path / "none.csv"
    path.write_text("\n\n")

    with pytest.raises(BadInput, match=r"none\.csv has no column 'text'.*--text_column.*line 1"):
        read_texts(path)


def write_parquet_without_text(folder):
    """Write a Parquet file whose column "content" contains lists. Return its path."""
    path = folder / "a.parquet"
    pq.write_table(pa.table({"content": [["a"], ["b"]], "text": ["a", "b"]}), path)
    return path


def write_arrow_without_text(folder):
    """Write an Arrow file whose column "content" contains numbers. Return its path."""
    path = folder / "a.arrow"
    table = pa.table({"content": [1, 2], "text": ["a", "b"]})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    return path


def write_json_without_text(folder):
    """Write JSON lines whose column "content" contains numbers and lists. Return the path."""
    path = folder / "a.jsonl"
    rows = [{"content": 1, "text": "a"}, {"content": ["b"], "text": "b"}]
    path.write_bytes(json_lines([{"content": None}]) + b"\n" + json_lines([*rows, 7]))
    return path


@pytest.mark.parametrize("column, problem", [("content", "not text"), ("txt", "no column 'txt'")])
@pytest.mark.parametrize(
    "write_table, content_type",
    [
        (write_parquet_without_text, r"list<\w+: string>"),
        (write_arrow_without_text, "int64"),
        (write_json_without_text, "lists and numbers"),
    ],
)
def test_column_without_text_is_rejected(
    tmp_path, waits, write_table, content_type, column, problem
):
    path = write_table(tmp_path)

    with pytest.raises(BadInput) as caught:
        read_texts(path, column=column)

    message = str(caught.value)
    assert str(path) in message
    assert problem in message
    assert re.search(rf": content \({content_type}\), text \(text\)$", message)
    assert not waits


def test_missing_columns_are_found_before_reading(tmp_path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "0.parquet")
    for number in (1, 2):
        pq.write_table(pa.table({"content": ["a"]}), tmp_path / f"{number}.parquet")
    source = table_source({"train": sorted(tmp_path.glob("*.parquet"))})

    with pytest.raises(BadInput) as caught:
        hub_tables.open_tables(source, None, {})

    first, second = caught.value.lines
    assert "1.parquet has no column 'text'" in first
    assert "2.parquet has no column 'text'" in second


def test_zstandard_file_with_large_window_is_read(tmp_path):
    zstd = pytest.importorskip("backports.zstd")
    path = tmp_path / "a.jsonl.zst"
    options = {
        zstd.CompressionParameter.window_log: 30,
        zstd.CompressionParameter.enable_long_distance_matching: 1,
    }
    compressor = zstd.ZstdCompressor(options=options)
    lines = json_lines([{"text": row} for row in ROWS])
    path.write_bytes(compressor.compress(lines) + compressor.flush())

    assert read_texts(path) == ROWS


def test_zstandard_without_package_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setitem(fsspec.compression.compr, "zstd", lambda file, mode: file)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"")

    with pytest.raises(BadInput, match=r"a\.jsonl\.zst is compressed.*pip install backports\.zstd"):
        read_texts(path)


@dataclass
class DamagedFile:
    """A file that is damaged or has the suffix of another format.

    Attributes:
        name: end of its name.
        content: contents of the file.
        num_rows: possible numbers of rows before the problem.
        message: pattern of the message.
    """

    name: str
    content: bytes
    num_rows: range
    message: str


def exactly(number):
    """Return the range that contains only this number."""
    return range(number, number + 1)


def json_array(folder):
    """Return a JSON array instead of JSON lines."""
    return DamagedFile("json", b'[\n{"text": "a"}\n]\n', exactly(0), ".*is a JSON array.*jq")


def invalid_json_line(folder):
    """Return JSON lines with an invalid line after 300 rows."""
    lines = (folder / "a.jsonl").read_bytes().splitlines(keepends=True)
    content = b"".join([*lines[:300], b'{"text": "cut\n', *lines[:301]])
    return DamagedFile("jsonl", content, exactly(300), "line 301 is not valid JSON")


def array_among_json_lines(folder):
    """Return JSON lines with an array after 300 rows."""
    lines = (folder / "a.jsonl").read_bytes().splitlines(keepends=True)
    content = b"".join([*lines[:300], b'["a"]\n', *lines[:301]])
    return DamagedFile("jsonl", content, exactly(300), "line 301 is a JSON array")


def parquet_with_invalid_utf8(folder):
    """Return a Parquet file whose row 99 is not UTF-8."""
    cells = [row.encode() for row in ROWS[:120]]
    cells[99] = b"caf\xe9 au lait"
    array = pa.array(cells, pa.binary())
    text = pa.StringArray.from_buffers(len(array), *array.buffers()[1:])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": text}), sink)
    content = sink.getvalue().to_pybytes()
    return DamagedFile("parquet", content, exactly(99), "row 99: .*UnicodeDecodeError")


def truncated_gzip(folder):
    """Return the first half of a compressed file."""
    content = (folder / "a.jsonl.gz").read_bytes()
    num_rows = range(NUM_ROWS)
    return DamagedFile("jsonl.gz", content[: len(content) // 2], num_rows, r"row \d+: .*EOFError")


def corrupted_gzip(folder):
    """Return a compressed file with another checksum."""
    content = (folder / "a.jsonl.gz").read_bytes()[:-8] + b"\0" * 8
    return DamagedFile("jsonl.gz", content, range(NUM_ROWS + 1), r"row \d+: .*BadGzipFile")


def corrupted_parquet(folder):
    """Return a Parquet file whose fourth row group is overwritten."""
    path = folder / "a.parquet"
    column = pq.ParquetFile(path).metadata.row_group(3).column(1)
    start = column.dictionary_page_offset or column.data_page_offset
    size = column.total_compressed_size
    content = bytearray(path.read_bytes())
    content[start : start + size] = b"\xff" * size
    return DamagedFile("parquet", bytes(content), range(301), r"row \d+: .*OSError")


def json_named_parquet(folder):
    """Return JSON lines in a file with the suffix of Parquet."""
    content = json_lines([{"text": "a text"}] * 50)
    return DamagedFile("parquet", content, exactly(0), "magic bytes not found")


def csv_with_line(folder, line):
    """Return a CSV file with this line after the header and 300 valid rows."""
    lines = (folder / "a.csv").read_bytes().splitlines(keepends=True)
    return b"".join([*lines[:301], line, *lines[1:301]])


def csv_with_extra_field(folder):
    """Return a CSV file with a line of 3 fields."""
    content = csv_with_line(folder, b"31,a text, in two\n")
    message = "line 302 has 3 fields, but the header has 2"
    return DamagedFile("csv", content, exactly(299), message)


def csv_with_invalid_utf8(folder):
    """Return a CSV file with a line that is not UTF-8."""
    return DamagedFile("csv", csv_with_line(folder, b"31,\xff\n"), exactly(299), "line 302 .*UTF-8")


def csv_with_open_quote(folder):
    """Return a CSV file with a quoted field that does not end."""
    content = csv_with_line(folder, b'31,"open\n')
    return DamagedFile("csv", content, exactly(299), "line 302 .*unexpected end of data")


@pytest.mark.parametrize(
    "make_file",
    [
        json_array,
        invalid_json_line,
        array_among_json_lines,
        parquet_with_invalid_utf8,
        truncated_gzip,
        corrupted_gzip,
        corrupted_parquet,
        json_named_parquet,
        csv_with_extra_field,
        csv_with_invalid_utf8,
        csv_with_open_quote,
    ],
)
def test_damaged_local_file_is_rejected_without_retry(served_files, tmp_path, waits, make_file):
    """The rows before the problem are read once."""
    file = make_file(served_files)
    path = tmp_path / f"a.{file.name}"
    path.write_bytes(file.content)

    texts = []
    with pytest.raises(BadInput) as caught:
        for text, _ in open_reader(path)(0):
            texts.append(text)

    message = str(caught.value)
    assert re.match(f"{re.escape(str(path))}.*{file.message}", message)
    assert "\n" not in message
    assert "same command" not in message
    assert len(texts) in file.num_rows
    assert texts == ROWS[: len(texts)]
    assert not waits


def converted(path):
    """Return the file that the command at the end of the error for a file writes."""
    with pytest.raises(BadInput) as caught:
        read_texts(path)
    message = str(caught.value)
    assert str(path) in message
    command = re.search(r": ((?:jq|iconv|python|\{ echo) .*)$", message)[1]
    subprocess.run(command, shell=True, check=True)
    (new_path,) = path.parent.glob("*-converted.*")
    return new_path


ROWS_OF_TEXT = [{"id": 1, "text": "a b"}, {"id": 2, "text": "c"}]
MESSAGES = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize(
    "content, texts",
    [
        (json.dumps(["a b", "c"]), ["a b", "c"]),
        ('["a b"]\n["c", "d"]\n', ["a b", "c\nd"]),
        ('"a b"\n"c"\n', ["a b", "c"]),
        (json.dumps({"version": 1, "data": ROWS_OF_TEXT}), ["a b", "c"]),
        (json.dumps({"data": ROWS_OF_TEXT}, indent=1), ["a b", "c"]),
        (json.dumps({"messages": MESSAGES}) + "\n", ["a b\nc"]),
    ],
    ids=["array", "arrays", "strings", "wrapper", "indented wrapper", "messages"],
)
def test_other_json_is_rejected_with_working_command(tmp_path, content, texts):
    path = tmp_path / "a b.json"
    path.write_text(content)

    assert read_texts(converted(path)) == texts


def test_json_lines_in_utf16_are_rejected_with_working_command(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a b"}\n{"text": "c"}\n', encoding="utf-16")

    assert read_texts(converted(path)) == ["a b", "c"]


@pytest.mark.parametrize(
    "content",
    ["id;text\n1;a b\n2;c\n", "sep=,\nid,text\n1,a b\n2,c\n", "1,a b\n2,c\n"],
    ids=["semicolons", "sep", "no header"],
)
def test_csv_dialect_is_rejected_with_working_command(tmp_path, content):
    path = tmp_path / "a.csv"
    path.write_text(content)

    assert read_texts(converted(path)) == ["a b", "c"]


def test_csv_with_two_text_columns_is_rejected(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,id,text\na,1,b\n")

    with pytest.raises(BadInput, match=r"a\.csv: .*2 columns with the name 'text'"):
        read_texts(path)


def test_temporary_disk_errors_are_retried(served_files, waits, monkeypatch):
    codes = [errno.EMFILE, errno.ESTALE, errno.EIO]
    open_file = remote.open_file

    def fail_three_times(name):
        if codes:
            raise OSError(codes.pop(0), "no")
        return open_file(name)

    monkeypatch.setattr(remote, "open_file", fail_three_times)

    assert read_texts(served_files / "a.jsonl") == ROWS
    assert waits == [1, 2, 4]


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "URL"])
@pytest.mark.parametrize("name", FILES)
def test_amount_of_text_is_estimated(served_files, server, name, is_remote):
    path = f"{server.url}/files/{name}" if is_remote else str(served_files / name)
    text_bytes = 2 * sum(len(row.encode()) for row in ROWS)

    estimate = hub_tables.expected_text_bytes([path, path], table_source().config)

    # All of a CSV file counts as text.
    most = 1.21 * text_bytes if name == "a.csv" else 1.1 * text_bytes
    assert 0.9 * text_bytes < estimate < most


# Data sets of the Hub

COMMIT = "c0ffee" + "0" * 34
PATTERN = "hf://datasets/me/corpus/sample/*.parquet"
SECOND_FILE = "GET .*train-00001"


def write_hub_files(folder):
    """Write data sets of Parquet, JSON lines, CSV with an unsupported option, and text."""
    for name in ("corpus/sample", "lines", "tabs", "plain", "configs/a", "script", "baby", "split"):
        (folder / name).mkdir(parents=True)
    half = NUM_ROWS // 2
    write_parquet(folder / "corpus/sample/train-00000-of-00002.parquet", ROWS[:half])
    write_parquet(folder / "corpus/sample/train-00001-of-00002.parquet", ROWS[half:])
    (folder / "corpus/README.md").write_text(
        "---\n"
        "configs:\n"
        "- config_name: sample\n"
        "  data_files:\n"
        "  - split: train\n"
        "    path: sample/*\n"
        "---\n"
    )
    lines = json_lines([{"text": row} for row in ROWS])
    (folder / "lines/train-00000.json.gz").write_bytes(gzip.compress(lines))
    (folder / "tabs/a.csv").write_text("id\ttext\n0\ta\n")
    (folder / "tabs/README.md").write_text('---\nconfigs:\n- config_name: a\n  sep: "\\t"\n---\n')
    (folder / "plain/a.txt").write_text("words")
    (folder / "configs/README.md").write_text(
        "---\nconfigs:\n- config_name: tam\n  data_files: a/*\n"
        "- config_name: hin\n  data_files: a/*\n---\n"
    )
    write_parquet(folder / "configs/a/a.parquet", ROWS)
    (folder / "script/script.py").write_text("a = 1")
    (folder / "baby/a.train").write_text("words")
    write_parquet(folder / "split/train.parquet", ROWS)
    write_parquet(folder / "split/test.parquet", ROWS[:9])


@pytest.fixture(scope="module")
def hub_server(tmp_path_factory):
    """Serve the data sets."""
    folder = tmp_path_factory.mktemp("hub")
    write_hub_files(folder / "datasets" / "me")
    with DataServer(folder) as server:
        server.keeps_commits = True
        yield server


@pytest.fixture
def hub(hub_server, tmp_path, monkeypatch):
    """Return a client of the server, and change to a folder of the test."""
    monkeypatch.chdir(tmp_path)
    hub_server.commit = COMMIT
    return HubClient(hub_server)


@dataclass
class HubRequest:
    """The data set or the Parquet files to read."""

    name: str = "me/corpus"
    config: str | None = "sample"
    column: str = "text"
    validation_split: str | None = None
    pinned: str | None = None  # commit
    files: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class HubResult:
    """The result of reading a data set from the beginning.

    Attributes:
        has_all_rows: whether all rows were read once, in order.
        error: type and message of the exception, or None.
        waits: waits before retries in seconds.
        messages: logged messages.
        commit: commit of the data set.
        versions: commits of the repositories of files.
        parts: names of the files.
        validation_parts: names of the files of the validation split.
    """

    has_all_rows: bool = False
    error: str | None = None
    waits: list[float] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    validation_parts: list[str] = field(default_factory=list)


@dataclass
class Preparation:
    """The exit status of prepare_data.py, and the folder that it has prepared."""

    status: int
    file_names: list[str]
    manifest: dict


class HubClient:
    """Reads from a server in forks, because the client reads HF_ENDPOINT only on import."""

    def __init__(self, server):
        self.server = server

    def read(self, *problems, **request):
        """Read a data set, or Parquet files, from the beginning."""
        self._reset_server(problems)
        run_in_fork(self._read, HubRequest(**request))
        return HubResult(**json.loads(Path("result.json").read_text()))

    def prepare(self, *problems):
        """Prepare the data of the recipe."""
        self._reset_server(problems)
        run_in_fork(self._prepare)
        (manifest,) = Path("data").glob("*/manifest.json")
        return Preparation(
            status=int(Path("status").read_text()),
            file_names=sorted(path.name for path in manifest.parent.iterdir()),
            manifest=json.loads(manifest.read_text()),
        )

    def met_all_problems(self):
        """Return whether each problem has occurred as often as requested."""
        return all(times == 0 for _, _, times in self.server.problems)

    def requests_of_other_commits(self):
        """Return the requests that do not name COMMIT."""
        return [line for line in self.server.log if COMMIT not in line]

    def _reset_server(self, problems):
        self.server.problems = list(problems)
        self.server.log = []

    def _connect(self):
        """Use the server as the Hub of this process, with short timeouts and without waits.

        Returns:
            The result to which waits and messages are added.
        """
        os.environ.update(
            HF_ENDPOINT=self.server.url,
            HF_HUB_OFFLINE="0",
            HF_HUB_DISABLE_XET="1",
            HF_HOME="home",
            HF_HUB_DOWNLOAD_TIMEOUT="1",
            HF_HUB_ETAG_TIMEOUT="1",
        )
        shutil.rmtree("home", ignore_errors=True)
        importlib.reload(huggingface_hub.constants)
        importlib.reload(datasets.config)
        client.set_timeouts()
        client.TIMEOUTS["read"] = 0.3
        remote.TIMEOUT_SECONDS = 0.3
        result = HubResult()
        retry.time.sleep = result.waits.append
        handler = logging.Handler()
        handler.emit = lambda record: result.messages.append(record.getMessage())
        logging.getLogger("ursa_minor").addHandler(handler)
        return result

    def _read(self, request):
        result = self._connect()
        result.versions = request.versions
        files = {"train": request.files} if request.files else {}
        source = table_source(
            files,
            request.column,
            dataset_name=request.name,
            dataset_config_name=request.config,
            validation_split=request.validation_split,
        )
        texts = []
        try:
            result.commit, splits = hub_tables.open_tables(source, request.pinned, result.versions)
            result.parts = [name for name, _ in splits["train"]]
            result.validation_parts = [name for name, _ in splits.get("validation", [])]
            for _, read in splits["train"]:
                texts += [text for text, _ in read(0)]
        except (BadInput, TrainingStopped) as error:
            result.error = f"{type(error).__name__}: {error}"
        result.has_all_rows = texts == ROWS
        result.waits = [seconds for seconds in result.waits if seconds]
        Path("result.json").write_text(json.dumps(asdict(result)))

    def _prepare(self):
        self._connect()
        Path("status").write_text(str(prepare_data.main(["--recipe", "tiny.yaml"])))


@pytest.mark.parametrize(
    "request_settings, num_first_requests",
    [({}, 1), ({"name": "me/lines", "config": None}, 1), ({"pinned": COMMIT}, 0)],
    ids=["Parquet", "JSON lines", "pinned"],
)
def test_dataset_is_read_at_one_commit(hub, request_settings, num_first_requests):
    """Only the first request, which returns the commit, does not name it."""
    result = hub.read(**request_settings)

    assert result.has_all_rows
    assert result.commit == COMMIT
    assert not result.messages
    assert hub.requests_of_other_commits() == hub.server.log[:num_first_requests]


def test_pattern_stays_at_first_commit(hub):
    first = hub.read(["/api/", "503", 3], files=[PATTERN])
    assert first.has_all_rows
    assert hub.met_all_problems()
    assert first.messages
    assert [Path(name).name for name in first.parts] == [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]
    hub.server.commit = "e" * 40

    second = hub.read(files=[PATTERN], versions=first.versions)

    assert second.has_all_rows
    assert second.parts == first.parts
    assert not [line for line in hub.requests_of_other_commits() if "/resolve/" in line]


def test_pattern_without_match_is_rejected(hub):
    pattern = "hf://datasets/me/corpus/sample/*.csv.parquet"

    result = hub.read(files=[pattern])

    assert result.error.startswith(f"BadInput: {pattern}: ")
    assert "may read" in result.error


def test_hub_problems_are_retried(hub):
    problems = [
        *problem("503", pattern="^GET /api/datasets/me/corpus$"),
        *problem("silent", pattern="GET .*/tree/"),
        *problem("503", times=9, pattern="README"),
        *problem("lie", pattern=SECOND_FILE),
        *problem("429:33", pattern="GET .*train-00000"),
    ]

    result = hub.read(*problems)

    assert result.has_all_rows
    assert hub.met_all_problems()
    assert len(result.waits) > 0
    assert len(result.messages) >= len(result.waits)
    assert max(result.waits) >= 33
    assert hub.server.outwaited == 0, "a request has no timeout"


@pytest.mark.parametrize(
    "request_settings, message",
    [
        ({"name": "me/nothing"}, "me/nothing: HTTP status 404"),
        ({"config": "samples"}, "'samples' not found. Available: .*'sample'"),
        ({"name": "me/tabs", "config": None}, "me/tabs: .* not Parquet.*refs/convert/parquet"),
        ({"name": "me/plain", "config": None}, "me/plain: .*--data_files .*/resolve/main/a.txt"),
        ({"column": "txt"}, "has no column 'txt'.*: id "),
        ({"name": "me/configs", "config": None}, "Available: .*--dataset_config_name (hin|tam)"),
        ({"name": "me/script", "config": None}, "script.*refs/convert/parquet"),
        ({"name": "me/baby", "config": None}, "--data_files .*/me/baby/resolve/main/a.train"),
        ({"validation_split": "test"}, "no split named test"),
    ],
)
def test_missing_part_of_hub_is_rejected(hub, request_settings, message):
    result = hub.read(**request_settings)

    assert re.match(f"BadInput: .*{message}", result.error)
    assert sum(result.waits) <= 1


def test_named_split_is_read_for_validation(hub):
    result = hub.read(name="me/split", config=None, validation_split="test")

    assert result.has_all_rows
    assert [Path(name).name for name in result.validation_parts] == ["test.parquet"]


def test_hub_file_without_permission_is_rejected(hub):
    result = hub.read(*problem("403", times=ALWAYS, pattern=SECOND_FILE))

    assert re.match("BadInput: .*HTTP status 403.*may read", result.error)
    assert sum(result.waits) <= 1


def test_interrupted_preparation_resumes_at_first_commit(hub):
    Path("tiny.yaml").write_text(
        "dataset_name: me/corpus\n"
        "dataset_config_name: sample\n"
        "validation_tokens: 500\n"
        "shard_tokens: 1000\n" + RECIPE
    )
    uninterrupted = hub.prepare()
    assert uninterrupted.status == 0
    assert uninterrupted.manifest["complete"]
    assert uninterrupted.manifest["revision"] == COMMIT
    Path("data").rename("uninterrupted")
    # The tokenizer reads both files once, before the first shard.
    interrupted = hub.prepare([SECOND_FILE, "ok", 1], [SECOND_FILE, "503", ALWAYS])
    assert interrupted.status == 1
    assert interrupted.manifest["splits"]["train"]
    assert not interrupted.manifest["complete"]
    hub.server.commit = "d" * 40

    resumed = hub.prepare()

    assert resumed == uninterrupted
    assert not [line for line in hub.requests_of_other_commits() if "/resolve/" in line]


def pattern_source(*files):
    """Return the source of a pattern that matches these files now."""
    settings = {"validation_tokens": 500, "shard_tokens": 9000}
    return table_source({"train": files}, **settings)


class StopAfterSecondShard:
    """A prefetch target that stops the preparation after the second train shard."""

    def wait(self, shards):
        if shards and "train_00001" in shards[-1].file:
            raise InterruptedError


def test_resume_with_other_files_is_rejected(served_files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        shutil.copy(served_files / "a.jsonl", tmp_path / name)
    source = pattern_source("a.jsonl", "b.jsonl")
    source.folder.mkdir(parents=True)
    with pytest.raises(InterruptedError):
        prepare.prepare(source, StopAfterSecondShard())

    for names in (
        ("a.jsonl", "c.jsonl", "b.jsonl"),
        ("a.jsonl", "b.jsonl", "c.jsonl"),
        ("a.jsonl", "c.jsonl"),
    ):
        with pytest.raises(BadInput, match=r"file 2 was b\.jsonl"):
            prepare.prepare(pattern_source(*names))

    prepare.prepare(source)
    assert is_complete(source.folder)
