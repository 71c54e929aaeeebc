"""A stream meets faults: each row comes once, every retry is logged, and what cannot be mended stops with file and row.

All through the real ``datasets`` client and a server on localhost that misbehaves. What belongs to the Hub runs in a
process of its own (``main`` here), because the client holds HF_ENDPOINT from its import on.
"""

import contextlib
import csv
import gzip
import importlib
import itertools
import json
import logging
import lzma
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import RECIPE, ROOT
from data_server import DataServer
from fsspec.utils import infer_compression

import prepare_data
from pretrain.base.errors import BadInput, TrainingStopped
from pretrain.data import prepare, stream
from pretrain.data.shards import is_complete
from pretrain.data.sources import FoundSource
from pretrain.hub import client
from pretrain.recipe import keys

N, GROUP = 700, 100  # rows of a file; of a row group
ROWS = [f"row {i} {random.Random(i).randbytes(15 + i % 40).hex()}" for i in range(N)]
FILES = ("a.parquet", "a.jsonl", "a.jsonl.gz", "a.json.xz", "a.csv")
READERS = ("a.parquet", "a.jsonl", "a.csv")  # each is read by code of its own
KINDS = ("503", "reset", "short", "lie", "429:7", "500", "empty", "502")
BLOCK = 2**13  # what the client reads at a time here, so that files of 60 kB have a middle
ALWAYS = 10**6


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A server with the same rows in files of every kind."""
    folder = tmp_path_factory.mktemp("served")
    write_corpus(folder / "files")
    with DataServer(folder) as server:
        yield server


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """The client's waits, which are only noted."""
    noted = []
    monkeypatch.setattr(stream.time, "sleep", lambda seconds: noted.append(seconds) if seconds else None)
    return noted


@pytest.fixture
def server(running, waits, monkeypatch):
    """The server without faults; the client reads small blocks."""
    running.faults, running.log, running.waits = [], [], waits
    monkeypatch.setattr(stream, "STORAGE", {"http": stream.HTTP | {"block_size": BLOCK}})
    monkeypatch.setattr(stream, "BLOCK_BYTES", BLOCK)
    return running


def write_corpus(folder):
    folder.mkdir(parents=True)
    write_parquet(folder / "a.parquet", ROWS)
    lines = json_lines([{"id": i, "text": text} for i, text in enumerate(ROWS)])
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "a.json.xz").write_bytes(lzma.compress(lines))
    with open(folder / "a.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(ROWS)])


def write_parquet(path, rows):
    table = pa.table({"id": list(range(len(rows))), "text": rows})
    pq.write_table(table, path, row_group_size=GROUP, use_dictionary=False, compression="none")


def json_lines(rows):
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def open_files(names, column="text", **more):
    """Return the parts by split."""
    suffix = re.findall(r"\.(parquet|csv|arrow|jsonl?)", str(names[0]))[0]
    kind = {"jsonl": "json"}.get(suffix, suffix)
    given = {"train": [*map(str, names)]} | {split: [*map(str, found)] for split, found in more.items()}
    return stream.open_tables(dataset_name=kind, data_files=given, text_column=column)[1]


def texts(names, row=0, **more):
    """Return all texts of the train split's first file from a row on."""
    return [text for text, _ in open_files(names, **more)["train"][0][1](row)]


def fault(kind, after=0, times=1, method="."):
    """The request after ``after`` others that match meets ``kind``."""
    return [[method, "ok", after], [method, kind, times]]


# By URL: a fault at any request of any file.


@pytest.mark.parametrize("shift", [0, *(pytest.param(shift, marks=pytest.mark.slow) for shift in range(1, len(KINDS)))])
@pytest.mark.parametrize("name", FILES)
def test_a_fault_at_any_request_loses_no_row_and_doubles_none(server, caplog, name, shift):
    """And each retry is logged, with its wait."""
    url = f"{server.url}/files/{name}"
    assert texts([url]) == ROWS
    total, retries = len(server.log), 0
    assert total >= 6
    for after in range(total):
        kind = KINDS[(after + FILES.index(name) + shift) % len(KINDS)]
        server.faults = fault(kind, after)
        server.waits.clear(), caplog.clear()
        assert texts([url]) == ROWS and server.faults[1][2] == 0, (kind, after)
        tries = [re.search(r"; try \d+ of 10 in ([\d.]+) s$", line) for line in caplog.messages]
        assert [found and float(found[1]) for found in tries] == server.waits, caplog.messages
        retries += len(tries)
    assert retries


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_faults_that_go_on_are_retried_from_the_row_where_they_began(server, caplog, name):
    """A new row begins the count of tries anew."""
    ((_, read),) = open_files([f"{server.url}/files/{name}"])["train"]
    begun = 350 if name == "a.parquet" else 0  # pyarrow reads ahead
    found = []
    for text, _ in read(begun):
        found.append(text)
        if begun + len(found) in (360, 500):
            server.faults = fault("503", times=5)
    assert found == ROWS[begun:]
    assert len(caplog.messages) >= 2 and all("HTTP status 503" in line for line in caplog.messages)
    assert all(int(re.search(r"row (\d+):", line)[1]) >= 360 for line in caplog.messages)
    assert server.waits.count(1) == len({line.partition("row ")[2][:3] for line in caplog.messages}) < len(server.waits)


def test_retry_after_is_obeyed_and_bounded(server, caplog):
    ((_, read),) = open_files([f"{server.url}/files/a.jsonl"])["train"]
    for asked, waited in (("7", 7), ("100000", stream.LONGEST_RETRY_AFTER_SECONDS), ("0", 1), ("soon", 1)):
        server.waits.clear(), caplog.clear()
        server.faults = fault(f"429:{asked}", after=2)
        assert [text for text, _ in read(0)] == ROWS and server.waits == [waited], asked
        assert caplog.messages[0].endswith(f"HTTP status 429; try 2 of 10 in {waited} s")


@pytest.mark.parametrize("name", READERS)
def test_a_server_that_does_not_answer_in_time_is_tried_again_at_opening_and_at_reading(
    server, caplog, monkeypatch, name
):
    quick = {"client_kwargs": {"timeout": stream.ClientTimeout(total=None, sock_connect=0.15, sock_read=0.15)}}
    monkeypatch.setattr(stream, "STORAGE", {"http": quick})
    server.faults = fault("silent", method="GET")
    ((_, read),) = open_files([f"{server.url}/files/{name}"])["train"]
    server.faults += fault("silent", method="GET")
    assert [text for text, _ in read(0)] == ROWS and 1 <= len(caplog.messages) <= 2
    assert not any(times for _, kind, times in server.faults if kind == "silent")


@pytest.mark.parametrize("name", READERS)
def test_used_up_tries_stop_with_file_and_row_from_where_it_is_resumed(server, caplog, name):
    found, url = [], f"{server.url}/files/{name}"
    ((_, read),) = open_files([url])["train"]
    server.log = []
    assert sum(1 for _ in read(0)) == N
    gets = sum(line.startswith("GET") for line in server.log)
    server.faults, server.log = fault("503", after=gets // 2, times=ALWAYS, method="GET"), []
    with pytest.raises(TrainingStopped) as stopped:
        found += (text for text, _ in read(0))
    message = str(stopped.value)
    assert "failed 10 times in a row, last with HTTP status 503" in message
    assert "the same command goes on from there" in message
    assert f"{url}: row {len(found)}: failed" in message
    assert server.waits == [1, 2, 4, 8, 16, 32, 60, 60, 60] and len(caplog.messages) == 9
    assert len(server.log) < 100, "no retries but those that are logged"
    server.faults = []
    assert found + [text for text, _ in read(len(found))] == ROWS


@pytest.mark.parametrize("name", READERS)
def test_a_missing_or_forbidden_file_is_bad_input_at_once(server, name):
    url = f"{server.url}/files/{name}"
    with pytest.raises(BadInput, match=f"no-{name}.*Check the name, and that you may read it"):
        open_files([f"{server.url}/files/no-{name}"])
    ((_, read),) = open_files([url])["train"]
    for status in (404, 403, 401):
        server.faults = fault(str(status), times=ALWAYS)
        with pytest.raises(BadInput, match=rf"{name}: .*({status}|NotFound).*may read it"):
            list(read(0))
    assert not server.waits


QUERY = "?download=true&X-Amz-Expires=60&X-Amz-Signature=ab%2Fc&more=a.b%5B1%5D%2A,c?"


@pytest.mark.parametrize("name, kind", [*zip(FILES, ["429:7", "503", "500", "reset", "502"], strict=True)])
def test_a_url_with_a_query_that_fails_at_opening_is_tried_again_and_read_whole(server, caplog, name, kind):
    urls = [f"{server.url}/files/{name}{QUERY}", f"{server.url}/files/{name}?v=2"]
    server.faults = fault(kind, times=9)
    splits = open_files(urls, validation=[f"{server.url}/files/{name}?v=3"])
    assert [part for part, _ in splits["train"]] == urls and len(splits["validation"]) == 1
    assert caplog.messages and server.faults[1][2] == 0
    assert [[text for text, _ in read(0)] for _, read in splits["train"] + splits["validation"]] == [ROWS] * 3


@pytest.mark.parametrize("name", READERS)
def test_a_url_with_a_query_that_stays_away_stops_with_its_name(server, name):
    urls = [f"{server.url}/files/{name}?v=1", f"{server.url}/files/other-{name}{QUERY}"]
    with pytest.raises(BadInput, match=rf"/other-{name}.*Check the name, and that you may read it"):
        open_files(urls[:1], validation=urls[1:])
    for kind, error in (("404", BadInput), ("429", TrainingStopped), ("503", TrainingStopped)):
        server.faults = [[f"/other-{name}", kind, ALWAYS]]
        often = "failed 10 times in a row, last with " if error is TrainingStopped else ""
        with pytest.raises(error, match=rf"/other-{name}.*{often}.*({kind}|NotFound)"):
            open_files(urls)


@pytest.mark.parametrize("name, kind", [*zip(FILES, ["503", "reset", "429:7", "403", "404"], strict=True)])
def test_nothing_that_is_logged_of_a_url_holds_its_user_password_or_query(server, caplog, name, kind):
    login = server.url.replace("://", "://me:canary@")
    url, raised = f"{login}/files/{name}?token=canary&v=canary", []
    ((_, read),) = open_files([url])["train"]
    server.faults = fault(kind, times=ALWAYS)
    for fails in (lambda: list(read(0)), lambda: open_files([url])):
        with pytest.raises((BadInput, TrainingStopped)) as stopped:
            fails()
        assert f"redacted@127.0.0.1:{server.server_port}/files/{name}?redacted=" in str(stopped.value)
        raised.append(str(stopped.value))
    assert (len(caplog.messages) > 15) == (kind not in ("403", "404"))
    assert "canary" not in "".join([*caplog.messages, *raised])


@pytest.mark.parametrize("name", ["a.jsonl?v=*", "a.parquet?v=*", "*.csv", "a.csv?v=::", "a.csv.gz?v=[1]"])
def test_a_url_that_the_client_would_take_for_something_else_is_refused(server, name):
    (server.folder / "files" / "*.csv").write_text("text\nof a star\n")
    (server.folder / "files" / "a.csv.gz").write_bytes(gzip.compress((server.folder / "files" / "a.csv").read_bytes()))
    with pytest.raises(BadInput, match=re.escape(f"/files/{name.partition('?')[0]}")) as refused:
        open_files([f"{server.url}/files/{name}"])
    for sign, remedy in {"::": "%3A%3A", "*": "%2A", "[": "%5B", "]": "%5D"}.items():
        if sign in name:
            assert remedy in str(refused.value)
            name = name.replace(sign, remedy)
    found = texts([f"{server.url}/files/{name}"])
    assert found == (["of a star"] if name == "%2A.csv" else ROWS)


# Local files: where a row begins, what a row is, what cannot be read.


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "files"
    write_corpus(folder)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_reading_from_any_row_gives_the_rest_and_from_one_that_is_gone_no_silent_end(corpus, waits, name):
    ((_, read),) = open_files([corpus / name])["train"]
    near = {k + d for k in (0, 100, 200, 256, 300, 512, 600, 700) for d in (-1, 0, 1) if 0 <= k + d <= N}
    for row in sorted(near):
        assert [text for text, _ in read(row)] == ROWS[row:], row
    with pytest.raises(TrainingStopped, match=f"{name}: row {N + 1}: .*ended after {N} rows"):
        list(read(N + 1))


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_an_error_that_the_client_takes_for_the_end_is_no_end(corpus, waits, caplog, monkeypatch, name):
    whole, cuts = datasets.IterableDataset.iter, [1, 2]

    def iterate(self, batch_size):
        return itertools.islice(whole(self, batch_size), cuts.pop() if cuts else None)

    monkeypatch.setattr(datasets.IterableDataset, "iter", iterate)
    assert texts([corpus / name]) == ROWS
    assert caplog.messages and all("OSError: ended " in line for line in caplog.messages)


def test_odd_parquet_files_are_read_whole(tmp_path):
    schema = pa.schema({"text": pa.large_string()})
    with pq.ParquetWriter(tmp_path / "gaps.parquet", schema) as writer:  # row groups without rows
        for rows in ([], ["a", "b"], [], [], ["c"], []):
            writer.write_table(pa.table({"text": rows}, schema=schema))
    assert pq.ParquetFile(tmp_path / "gaps.parquet").num_row_groups >= 5
    ((_, read),) = open_files([tmp_path / "gaps.parquet"])["train"]
    for row in range(4):
        assert [text for text, _ in read(row)] == ["a", "b", "c"][row:]
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    assert texts([tmp_path / "none.parquet"]) == []
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    assert texts([tmp_path / "numbers.parquet"]) == [None, None]


def test_what_is_no_text_is_a_row_without_text(tmp_path):
    rows = dict.fromkeys((b'{"text": null}', b'{"id": 1}', b'{"text": ""}', b'{"text": " \\n\\t"}', b'{"text": 5}'))
    rows = {b'{"text": "first"}': "first"} | rows
    rows |= dict.fromkeys((b'{"text": {"a": 1}}', b'{"text": ["a"]}', b'{"text": true}', b"", b"  \r", b'"a text"'))
    rows |= {
        b'{"text": "2020-01-01"}': "2020-01-01",
        b'{"text": "half \\ud83d", "more": {"b": [1]}}': "half \ud83d",
        b'{"text": "whole \\ud83d\\ude00"}': "whole \U0001f600",
        b'{"text": "NUL \\u0000 end"}': "NUL \0 end",
        '{"text": "\u2028 é \x85"}'.encode(): "\u2028 é \x85",
        b'{"text": "twice", "text": "last"}\r': "last",
        b'{"text": "  kept  "}': "  kept  ",
    }
    wanted = list(rows.values())
    for name, content in (("a.jsonl", json_lines(rows)), ("b.json", json_lines(rows)[:-1])):
        (tmp_path / name).write_bytes(content)
        assert texts([tmp_path / name]) == wanted
        assert texts([tmp_path / name], row=10) == wanted[10:]


def test_long_lines_quotes_and_fields_that_only_some_files_have_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK_BYTES", 64)
    rows = ["x" * n for n in (1, 63, 64, 65, 1000, 3)]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json_lines([{"text": row, "n": 1} for row in rows]))
    (tmp_path / "b.jsonl").write_bytes(json_lines([{"text": "b", "n": "one"}, {"more": [1], "text": "c"}]))
    parts = open_files([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])["train"]
    assert [[text for text, _ in read(0)] for _, read in parts] == [rows, ["b", "c"]]
    rows = ["a, b", 'say "so"', "two\nlines", "last"]
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "id"), *((row, i) for i, row in enumerate(rows))])
    assert texts([tmp_path / "a.csv"]) == rows


@pytest.mark.parametrize("name", READERS)
def test_a_missing_column_is_named_with_the_nearest(corpus, name):
    with pytest.raises(BadInput) as refused:
        texts([corpus / name], column="txt")
    assert "text_column = txt: no such column; it has id, text; did you mean --text_column text?" in str(refused.value)


STEMS = ("a[1]", "a1", "c*", "c2", "d?", "d2", "e{1,2}", "f#x", "g%20h", "i;j k", "~l", "__m", ".n", "o:p", "q!r")
ODD_FOLDERS = ("x[1]", "x1", "y?z*")


def write_rows(path, rows):
    """Write rows into a file of the kind that its name ends with."""
    if path.name.endswith(".parquet"):
        write_parquet(path, rows)
    elif path.name.endswith(".arrow"):
        table = pa.table({"text": rows})
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        lines = json_lines([{"text": row} for row in rows])
        if ".csv" in path.name:
            lines = b"text\n" + b"".join(f'"{row}"\n'.encode() for row in rows)
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "csv", "csv.gz", "arrow"])
def test_names_that_look_like_patterns_are_read_as_they_stand_each_once(tmp_path, waits, kind):
    wanted = {}
    for folder in ODD_FOLDERS:
        (tmp_path / folder).mkdir()
        for stem in STEMS:
            if kind != "csv.gz" or "[" not in stem:  # these are refused, see below
                wanted[str(tmp_path / folder / f"{stem}.{kind}")] = f"{folder} {stem} {kind}"
    for path, row in wanted.items():
        write_rows(Path(path), [row])
    held, *train = wanted
    splits = open_files(train, validation=[held])
    found = {split: [(name, [text for text, _ in read(0)]) for name, read in parts] for split, parts in splits.items()}
    assert found["train"] == [(name, [wanted[name]]) for name in train]
    assert found["validation"] == [(held, [wanted[held]])] and not waits


@pytest.mark.parametrize("name", ["a::b.parquet", "a::b.jsonl", "a[1].csv.gz"])
def test_a_name_that_the_client_cannot_open_is_refused_with_a_remedy(tmp_path, waits, name):
    write_rows(tmp_path / name, ["text"])
    write_rows(tmp_path / f"ok.{name.partition('.')[2]}", ["text"])
    with pytest.raises(BadInput, match=rf"/{re.escape(name)}: .*; rename it"):
        open_files([tmp_path / f"ok.{name.partition('.')[2]}", tmp_path / name])
    assert not waits


def test_a_file_that_the_client_leaves_out_or_adds_stops_with_its_name(corpus, monkeypatch):
    real = stream.datasets.load_dataset_builder
    given = [corpus / "a.jsonl", corpus / "a.jsonl.gz"]

    def changed(change):
        def load(**arguments):
            builder = real(**arguments)
            change(builder.config.data_files["train"])
            return builder

        monkeypatch.setattr(stream.datasets, "load_dataset_builder", load)

    for change, name in {
        list.pop: r"a\.jsonl\.gz: was asked for, and datasets would read nothing there",
        list.reverse: r"a\.jsonl: was asked for, and datasets would read .*a\.jsonl\.gz there",
        lambda names: names.append(names[0]): r"a\.jsonl: was not asked for, and datasets would read .*a\.jsonl there",
    }.items():
        changed(change)
        with pytest.raises(BadInput, match=name):
            open_files(given)


def test_a_json_array_is_refused_with_a_remedy(tmp_path, waits):
    (tmp_path / "a.json").write_text('[\n{"text": "a"},\n{"text": "b"}\n]\n')
    with pytest.raises(BadInput, match=r"a.json: is a JSON array.*jq"):
        texts([tmp_path / "a.json"])
    assert not waits


def test_a_compression_that_python_does_not_have_is_refused_with_a_remedy(tmp_path, waits):
    if infer_compression("a.zst"):
        pytest.skip("zstandard is installed")
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(BadInput, match=r"a.jsonl.zst: is compressed with Zstandard, which needs: pip install"):
        texts([tmp_path / "a.jsonl.zst"])
    assert not waits


@pytest.mark.parametrize("name", ["line", "encoding", "truncated.gz", "damaged.gz", "pages", "footer"])
def test_a_file_that_stays_corrupt_stops_with_file_and_row(corpus, tmp_path, waits, caplog, name):
    """Each retry is logged, what can be read comes once, and nothing after the fault."""
    lines = (corpus / "a.jsonl").read_bytes().splitlines(keepends=True)
    packed, table = (corpus / "a.jsonl.gz").read_bytes(), (corpus / "a.parquet").read_bytes()
    groups = pq.ParquetFile(corpus / "a.parquet").metadata
    third = groups.row_group(3).column(1)
    begin, size = third.dictionary_page_offset or third.data_page_offset, third.total_compressed_size
    content, suffix, rows = {
        "line": (b"".join([*lines[:300], b'{"text": "cut\n', *lines[300:]]), ".jsonl", [300]),
        "encoding": (b"".join([*lines[:300], b'{"text": "\xff"}\n', *lines[300:]]), ".jsonl", [300]),
        "truncated.gz": (packed[: len(packed) // 2], ".jsonl.gz", range(N)),
        "damaged.gz": (packed[:-8] + b"\0" * 8, ".jsonl.gz", range(N + 1)),
        "pages": (table[:begin] + b"\xff" * size + table[begin + size :], ".parquet", range(301)),
        "footer": (table[: len(table) // 2], ".parquet", [0]),
    }[name]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    found = []
    with pytest.raises(TrainingStopped) as stopped:
        found += (text for text, _ in open_files([path])["train"][0][1](0))
    assert found == ROWS[: len(found)] and len(found) in rows
    where = str(path) if name == "footer" else f"{path}: row {len(found)}"  # the footer is read to open it
    assert str(stopped.value).startswith(f"{where}: failed 10 times in a row")
    assert len(caplog.messages) == 9 and all(line.startswith(str(path)) for line in caplog.messages)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize("name", FILES)
def test_the_amount_of_text_is_estimated_before_it_is_read(corpus, server, name):
    true = sum(len(row.encode()) for row in ROWS)
    for path in (str(corpus / name), f"{server.url}/files/{name}"):
        server.faults = fault("503", after=1, method="GET")
        found = stream.expected_text_bytes([path, path], "text")
        assert 0.9 * 2 * true < found < 1.1 * 2 * true * (1.1 if name.endswith(".csv") else 1)  # all of it is counted


# A data set of the Hub, in a process of its own.


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """What came of each thing that ``main`` did."""
    folder = tmp_path_factory.mktemp("hub")
    environment = {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "home"), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    environment |= {"HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1"}
    command = [sys.executable, __file__]
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Do in this folder everything that needs the Hub; print what came of it."""
    folder = Path.cwd()
    corpus = folder / "datasets" / "me" / "corpus"
    (corpus / "sample").mkdir(parents=True)
    for number, rows in enumerate((ROWS[: N // 2], ROWS[N // 2 :])):
        write_parquet(corpus / "sample" / f"train-{number:05d}-of-00002.parquet", rows)
    (folder / "datasets/me/odd/sample").mkdir(parents=True)
    lines = folder / "datasets" / "me" / "lines" / "train-00000.json.gz"
    lines.parent.mkdir()
    lines.write_bytes(gzip.compress(json_lines([{"text": row} for row in ROWS])))
    files = "  data_files:\n  - split: train\n    path: sample/*"
    (corpus / "README.md").write_text(f"---\nconfigs:\n- config_name: sample\n{files}\n---\n")
    with DataServer(folder) as server:
        os.environ |= {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0"}
        for module in (huggingface_hub.constants, datasets.config):
            importlib.reload(module)
        print(json.dumps(Hub(server, folder).do_all()))


class Hub:
    """The things to do with the Hub."""

    def __init__(self, server, folder):
        client.bound_client()
        client.TIMEOUT_SECONDS["read"] = 0.3
        self.server, self.folder, self.waits, self.said = server, folder, [], []
        self.filesystem = huggingface_hub.HfFileSystem
        stream.time.sleep = self.waits.append
        logged = logging.Handler()
        logged.emit = lambda record: self.said.append(record.getMessage())
        stream.log.addHandler(logged)
        stream.TIMEOUT_SECONDS = 0.3

    def read(self, faults=(), name="me/corpus", config="sample", pinned=None, column="text", row=0, files=None) -> dict:
        """Read a data set (or the Parquet ``files``) from the beginning as a new process does; say what came of it."""
        self.filesystem.clear_instance_cache()
        shutil.rmtree(self.folder / "home", ignore_errors=True)
        self.waits.clear(), self.said.clear(), self.server.log.clear()
        self.server.faults = [*faults]
        found, stopped, commit, parts = [], None, None, None
        try:
            commit, splits = stream.open_tables(
                dataset_name="parquet" if files else name,
                dataset_config_name=None if files else config,
                data_files={"train": files} if files else None,
                text_column=column,
                pinned=pinned,
            )
            for _, read in splits["train"]:
                found += (text for text, _ in read(row))
            parts = [name for name, _ in splits["train"]]
        except (BadInput, TrainingStopped) as error:
            stopped = f"{type(error).__name__}: {error}"
        kept = {"equal": found == ROWS, "begins": found == ROWS[: len(found)], "rows": len(found), "stopped": stopped}
        met = all(times == 0 for _, kind, times in self.server.faults)
        now = {"waits": [wait for wait in self.waits if wait], "said": [*self.said], "log": [*self.server.log]}
        return kept | now | {"commit": commit, "met": met, "parts": parts}

    def do_all(self) -> dict:
        one, commit, files = "GET .*train-00001", "^GET /api/datasets/me/corpus$", "GET .*train-0000"
        places = [
            ("503", 0, commit),
            ("silent", 0, commit),
            ("reset", 0, "HEAD .*README"),
            ("short", 0, "GET .*README"),
        ]
        places += [("429:7", 0, "GET .*/tree/"), ("silent", 0, "GET .*/tree/"), ("500", 0, files), ("lie", 1, files)]
        places += [("429:7", 1, files), ("502", 2, files), ("short", 0, one), ("reset", 1, one), ("lie", 0, one)]
        places += [("silent", 0, one)]
        sample = "hf://datasets/me/corpus/sample"
        literal = f"{sample}/train-[0].parquet"  # beside train-0.parquet, which it would match
        for file in ("train-[0].parquet", "train-0.parquet"):
            write_parquet(self.folder / "datasets/me/odd/sample" / file, [file])
        return {
            "pattern": self.read(files=[f"{sample}/*.parquet"]),
            "pattern, faults": [
                self.read([["/api/", kind, 3]], files=[f"{sample}/*.parquet"]) for kind in ("503", "reset", "429:7")
            ],
            "no match": self.read(files=[f"{sample}/*.csv.parquet"]),
            "link": self.read(
                files=[
                    f"{self.server.url}/datasets/me/corpus/resolve/main/sample/train-0000{i}-of-00002.parquet{query}"
                    for i, query in enumerate(["?download=true", ""])
                ]
            ),
            "literal": self.read(files=[literal.replace("corpus", "odd")]),
            "clean": self.read(),
            "lines": self.read(name="me/lines", config=None),
            "pinned": self.read(pinned=self.server.commit),
            "campaign": [[*place, self.read(fault(*place[:2], method=place[2]))] for place in places],
            "readme": self.read(fault("503", times=9, method="README")),
            "down": self.read(fault("503", 1, ALWAYS, method=one)),
            "down at once": self.read(fault("503", times=ALWAYS)),
            "gone": self.read(name="me/nothing"),
            "no config": self.read(config="samples"),
            "column": self.read(column="txt"),
            "forbidden": self.read(fault("403", times=ALWAYS, method=one)),
            "moved": self.prepare(),
            "outwaited": self.server.outwaited,
        }

    def prepare(self) -> dict:
        """Prepare shards; the server goes down in between, and main moves on."""
        keys = "dataset_name: me/corpus\ndataset_config_name: sample\nvalidation_tokens: 500\nshard_tokens: 1000\n"
        Path("tiny.yaml").write_text(keys + RECIPE)
        outcomes = []

        def run(*faults) -> dict:
            self.server.faults = [*faults]
            with contextlib.redirect_stdout(sys.stderr):
                outcomes.append(prepare_data.main(["--recipe", "tiny.yaml"]))
            (path,) = Path("data").glob("*/manifest.json")
            return {"names": sorted(p.name for p in path.parent.iterdir()), "manifest": json.loads(path.read_text())}

        whole = run()
        Path("data").rename("whole")
        # The tokenizer is made of all text: both files are read once before the first shard.
        file = "GET .*train-00001"
        cut = run([file, "ok", 2], [file, "503", ALWAYS])
        self.server.commit, before = "d" * 40, self.server.commit
        self.server.log.clear()
        again = run()
        strange = [line for line in self.server.log if "/resolve/" in line and before not in line]
        return {"outcomes": outcomes, "whole": whole, "cut": cut, "again": again, "strange": strange}


def test_a_data_set_of_the_hub_is_read_whole_and_pinned(hub):
    for name in ("clean", "lines"):
        assert hub[name]["equal"] and not hub[name]["said"] and hub[name]["commit"] == "c0ffee" + "0" * 34
    assert hub["pinned"]["equal"] and hub["pinned"]["commit"] == "c0ffee" + "0" * 34
    asked = [line for line in hub["clean"]["log"][1:] + hub["pinned"]["log"] if "c0ffee" not in line]
    assert not asked, "after the first contact everything is asked for by commit"


def test_files_of_the_hub_by_pattern_or_link_are_all_of_them_each_once(hub):
    for done in (hub["pattern"], *hub["pattern, faults"]):
        assert done["equal"] and done["met"], done
        assert [Path(name).name for name in done["parts"]] == [f"train-0000{i}-of-00002.parquet" for i in range(2)]
    assert all(done["said"] for done in hub["pattern, faults"])
    assert re.match(r"BadInput: hf://datasets/me/corpus/sample/\*.csv.parquet: .*may read", hub["no match"]["stopped"])
    assert hub["link"]["equal"] and hub["link"]["parts"] == [
        f"hf://datasets/me/corpus@main/sample/train-0000{i}-of-00002.parquet" for i in range(2)
    ]
    assert [Path(name).name for name in hub["literal"]["parts"]] == ["train-[0].parquet"]


def test_the_hub_fails_anywhere_and_every_row_comes_once(hub):
    """Its list of subsets too, and where it asks to wait it is obeyed."""
    for kind, after, method, done in hub["campaign"]:
        assert done["equal"] and done["met"], (kind, after, method, done)
        assert done["said"] and len(done["said"]) >= len(done["waits"]) > 0, (kind, after, method, done)
        assert kind != "429:7" or min(done["waits"]) >= 7
    assert hub["readme"]["equal"] and hub["readme"]["met"] and hub["readme"]["said"]
    assert hub["outwaited"] == 0, "every request has a time-out"


def test_a_hub_that_stays_down_stops_with_file_and_row(hub):
    done = hub["down"]
    assert done["begins"] and done["rows"] == N // 2
    wanted = "TrainingStopped: hf://.*/sample/train-00001-of-00002.parquet: row 0: failed 10 .* HTTP status 503"
    assert re.match(wanted, done["stopped"])
    assert sum("of 10 in" in line for line in done["said"]) == 9
    assert re.match("TrainingStopped: me/corpus: failed 10 .* HTTP status 503", hub["down at once"]["stopped"])


def test_what_the_hub_does_not_have_is_bad_input_at_once(hub):
    assert re.match("BadInput: me/nothing: HTTP status 404. Check the name", hub["gone"]["stopped"])
    assert re.match("BadInput: .*'samples' not found. Available: .*'sample'", hub["no config"]["stopped"])
    column = "text_column = txt: no such column; it has id, text; did you mean --text_column text?"
    assert column in hub["column"]["stopped"]
    assert re.match("BadInput: .*HTTP status 403.*that you may read it", hub["forbidden"]["stopped"])
    for name in ("gone", "no config", "column", "forbidden"):
        assert not hub[name]["waits"], name


def test_a_run_that_was_cut_off_goes_on_with_the_commit_of_its_first_contact(hub):
    moved = hub["moved"]
    assert moved["outcomes"] == [0, 1, 0]
    assert moved["cut"]["manifest"]["splits"]["train"] and not moved["cut"]["manifest"]["complete"]
    assert moved["again"] == moved["whole"] and moved["whole"]["manifest"]["complete"]
    assert moved["whole"]["manifest"]["revision"] == "c0ffee" + "0" * 34
    assert not moved["strange"]


def test_a_cursor_is_applied_to_no_other_file_than_its_own(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second, more = (shutil.copy(corpus / "a.jsonl", tmp_path / f"{name}.jsonl") for name in "abc")
    wanted = keys.Data(data_seed=1, tokenizer="characters", validation_tokens=500, shard_tokens=9000)

    def source(*names):  # a pattern of the Hub: what it matches may change
        tables = {"dataset_name": "json", "data_files": {"train": [*map(str, names)]}, "text_column": "text"}
        return FoundSource(wanted, "pattern", {}, tables=tables)

    source().folder.mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(prepare.Progress, "shard", lambda self, rows: "train_00001" in rows[-1]["file"] and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare.prepare(source(first, second), prepare.Job())
    for names in ((first, more, second), (first, second, more), (first, more)):
        with pytest.raises(BadInput, match="stopped at b.jsonl, file 2 of 2; the source now has"):
            prepare.prepare(source(*names), prepare.Job())
    prepare.prepare(source(first, second), prepare.Job())
    assert is_complete(source().folder)


if __name__ == "__main__":
    main()
