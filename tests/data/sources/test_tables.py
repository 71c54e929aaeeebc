"""A stream meets problems: each row comes once, every retry is logged, and what cannot be mended stops with file and row.

All through the real ``datasets`` client and a server on localhost that misbehaves.
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
import types
from pathlib import Path

import datasets
import fsspec.compression
import fsspec.implementations.http  # once, before the forks
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
from ursa_minor.data.sources.find import FoundSource
from ursa_minor.data.tokens.manifest import is_complete
from ursa_minor.hub import client
from ursa_minor.recipe import keys

N, GROUP = 700, 100  # rows of a file; of a row group
ROWS = [f"row {i} {random.Random(i).randbytes(15 + i % 40).hex()}" for i in range(N)]
FILES = ("a.parquet", "a.jsonl", "a.jsonl.gz", "a.csv")


PAGE = "<!DOCTYPE html><html><body>Please log in</body></html>"
KINDS = ("503", "reset", "short", "429:7", "500", "silent", "garbage", "drip", PAGE)
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
    monkeypatch.setattr(
        retry.time, "sleep", lambda seconds: noted.append(seconds) if seconds else None
    )
    return noted


@pytest.fixture
def server(running, tmp_path, monkeypatch):
    """The server without problems; what is fetched goes into a folder of the test's own."""
    running.problems, running.log = [], []
    monkeypatch.chdir(tmp_path)
    return running


def write_corpus(folder):
    folder.mkdir(parents=True)
    write_parquet(folder / "a.parquet", ROWS)
    lines = json_lines([{"id": i, "text": text} for i, text in enumerate(ROWS)])
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    with open(folder / "a.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(ROWS)])


def write_parquet(path, rows):
    table = pa.table({"id": list(range(len(rows))), "text": rows})
    pq.write_table(table, path, row_group_size=GROUP, use_dictionary=False, compression="none")


def json_lines(rows):
    return b"".join(
        (row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows
    )


def tables(files=None, column="text", **more):
    config = keys.DataSource(data_seed=1, tokenizer="characters", text_column=column, **more)
    return FoundSource(
        config,
        "it",
        {},
        files={split: [*map(str, names)] for split, names in (files or {}).items()},
    )


def open_files(names, column="text"):
    """Return the parts by split."""
    return hub_tables.open_tables(tables({"train": names}, column), None, {})[1]


def texts(names, row=0, **more):
    """Return all texts of the train split's first file from a row on."""
    return [text for text, _ in open_files(names, **more)["train"][0][1](row)]


def problem(kind, after=0, times=1, method="."):
    """The request after ``after`` others that match meets ``kind``."""
    return [[method, "ok", after], [method, kind, times]]


# By URL: fetched whole, once.


def test_a_table_behind_a_url_is_fetched_once_whatever_fails_on_the_way_and_then_read_from_any_row(
    server, waits, caplog, monkeypatch
):
    """And each retry is logged, with its wait."""
    monkeypatch.setattr(remote, "TIMEOUT_SECONDS", 0.15)
    monkeypatch.setattr(http, "SLOW_SECONDS", 0.2)
    url = f"{server.url}/files/a.jsonl.gz?download=true&sig=a.b%2Fc"
    server.problems = [[".", kind, 1] for kind in KINDS]
    assert texts([url]) == ROWS and len(server.log) == len(KINDS) + 1
    tries = [
        re.search(r"; retrying in ([\d.]+) s \(attempt \d+ of 10\)$", line)
        for line in caplog.messages
    ]
    assert [found and float(found[1]) for found in tries] == waits and waits[3] == 8, (
        caplog.messages
    )
    assert (
        texts([url.replace("a.b", "c.d")], 300) == ROWS[300:] and len(server.log) == len(KINDS) + 1
    )


def test_what_a_url_does_not_give_is_refused_and_nothing_of_it_is_kept(server, waits):
    url = f"{server.url}/files/a.csv"
    for status in ("404", "403", "401", "422", "451"):
        server.problems = problem(status, times=ALWAYS)
        with pytest.raises(BadInput, match=rf"a.csv: HTTP status {status}.*may read it"):
            texts([url])
    server.problems = problem(PAGE, times=ALWAYS)
    with pytest.raises(
        BadInput, match=f"^{url}: the answer of {url} looks like a proxy or login page"
    ):
        texts([url])
    assert waits == [1] and not any(path.is_file() for path in Path().rglob("*"))


# Faults while reading.


def failing(problems):
    """A read that fails with each of the problems, by the row at which: (row, error)."""

    def read(row):
        for number in range(row, N):
            if problems and problems[0][0] == number:
                raise problems.pop(0)[1]
            yield ROWS[number]

    return read


def answer(status, asked=None):
    error = OSError("no answer")
    error.response = types.SimpleNamespace(
        status_code=status, headers={"Retry-After": asked} if asked else {}
    )
    return error


def test_faults_are_retried_from_the_row_where_they_began_and_a_new_row_begins_the_count_anew(
    waits, caplog
):
    problems = [(0, answer(503))] + [(360, answer(503))] * 5 + [(500, ConnectionError())] * 9
    assert list(retry.retried("hf://a", failing(problems), 0)) == ROWS
    assert waits == [1, 1, 2, 4, 8, 16, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert caplog.messages[0] == "hf://a: row 0: HTTP status 503; retrying in 1 s (attempt 2 of 10)"
    assert (
        caplog.messages[-1]
        == "hf://a: row 500: ConnectionError; retrying in 60 s (attempt 10 of 10)"
    )


def test_retry_after_is_obeyed_and_bounded(waits):
    for asked, waited in (
        ("7", 7),
        ("100000", retry.MAX_RETRY_AFTER_SECONDS),
        ("0", 1),
        ("soon", 1),
    ):
        waits.clear()
        assert list(
            retry.retried("hf://a", failing([(2, answer(429, asked))]), 0)
        ) == ROWS and waits == [waited]


def test_used_up_tries_stop_with_file_and_row_from_where_it_is_resumed(waits):
    found = []
    with pytest.raises(TrainingStopped) as stopped:
        found += (text for text in retry.retried("hf://a", failing([(4, answer(503))] * 10), 0))
    said = "hf://a: row 4: failed 10 times in a row, last with HTTP status 503. The rows that were read are saved; the same "
    assert str(stopped.value) == said + "command resumes from there" and waits[-1] == 60
    with pytest.raises(
        TrainingStopped,
        match="^me/corpus: failed 10 times in a row.*--prefetch on a machine that has one$",
    ):
        read = failing([(0, ConnectionError())] * 10)
        retry.retry("me/corpus", lambda: next(read(0)))


# Local files: where a row begins, what a row is, what cannot be read.


@pytest.fixture
def corpus(running):
    return running.folder / "files"


@pytest.mark.parametrize("name", FILES)
def test_reading_from_any_row_gives_the_rest_and_from_one_that_is_gone_no_silent_end(
    corpus, waits, name
):
    ((_, read),) = open_files([corpus / name])["train"]
    near = {
        k + d for k in (0, 100, 200, 256, 300, 512, 600, 700) for d in (-1, 0, 1) if 0 <= k + d <= N
    }
    for row in sorted(near):
        assert [text for text, _ in read(row)] == ROWS[row:], row
    with pytest.raises(BadInput, match=f"{name}: row {N + 1}: .*the file ended after {N} rows"):
        list(read(N + 1))


def test_an_error_that_the_client_takes_for_the_end_is_no_end(corpus, monkeypatch):
    whole = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda *given, **named: itertools.islice(whole(*given, **named), 0),
    )
    with pytest.raises(
        BadInput,
        match="a.parquet: row 0: cannot be read: TruncatedError: the file ended after 0 rows, before row 100",
    ):
        texts([corpus / "a.parquet"])


def write_table(path, table):
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)


def test_odd_parquet_files_and_arrow_files_with_a_footer_and_as_a_stream_are_read_whole(tmp_path):
    schema = pa.schema({"text": pa.large_string()})
    with pq.ParquetWriter(tmp_path / "gaps.parquet", schema) as writer:  # row groups without rows
        for rows in ([], ["a", "b"], [], [], ["c"], []):
            writer.write_table(pa.table({"text": rows}, schema=schema))
    for row in range(4):
        assert texts([tmp_path / "gaps.parquet"], row) == ["a", "b", "c"][row:]
    words = pa.array(["a", None, "a", "b"])
    for column in (words.dictionary_encode(), words.cast(pa.string_view()), pa.nulls(4)):
        pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
        assert texts([tmp_path / "a.parquet"]) == (
            [None] * 4 if column.null_count == 4 else ["a", None, "a", "b"]
        )
    table = pa.table({"id": [0, 1], "text": ["a", "b"]})
    write_table(tmp_path / "a.arrow", table)
    with pa.ipc.new_file(tmp_path / "b.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.arrow", "b.arrow"):
        assert texts([tmp_path / name]) == ["a", "b"] and texts([tmp_path / name], 1) == ["b"]


def test_what_is_no_text_is_a_row_without_text(tmp_path):
    rows = dict.fromkeys(
        (b'{"text": null}', b'{"id": 1}', b'{"text": ""}', b'{"text": " \\n\\t"}', b'{"text": 5}')
    )
    rows = {b'\xef\xbb\xbf{"text": "first"}': "first"} | rows
    rows |= dict.fromkeys(
        (b'{"text": {"a": 1}}', b'{"text": ["a"]}', b'{"text": true}', b"", b"  \r", b'"a text"')
    )
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


def test_each_text_of_a_csv_is_text(tmp_path):
    """Also what pandas takes for no text or for a number, and where it would take a chunk of 10,000 for numbers."""
    rows = [
        *["None", "NA", "null", "nan", "N/A", "<NA>", "12", "1e3", "-inf", "True", "2020-01-01"],
        "",
        " ",
        " kept ",
        "a,b",
        'a "b"',
    ]
    rows += [
        "two\r\nlines",
        "NUL \0 end",
        "\u2028 é \x85",
        "x" * 200_000,
        *map(str, range(10_500)),
        "last",
    ]
    (tmp_path / "a.csv").write_text("\ufeffid,text\r\n\r\n", encoding="utf-8", newline="")
    with open(tmp_path / "a.csv", "a", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(enumerate(rows))
    wanted = [row if row.strip() else None for row in rows]
    assert (
        texts([tmp_path / "a.csv"]) == wanted
        and texts([tmp_path / "a.csv"], row=10_400) == wanted[10_400:]
    )
    (tmp_path / "one.csv").write_text("text\nplain\n\nNone\r\n7", newline="")
    assert texts([tmp_path / "one.csv"]) == ["plain", "None", "7"]
    (tmp_path / "none.csv").write_text("\n\n")
    with pytest.raises(BadInput, match="none.csv has no column 'text'.*--text_column"):
        texts([tmp_path / "none.csv"])


NO_TEXT = {"parquet": ([["a"], ["b"]], r"list<\w+: string>"), "arrow": ([1, 2], "int64")}
NO_TEXT |= {"jsonl": ([1, ["b"]], "lists and numbers")}


@pytest.mark.parametrize("kind", NO_TEXT)
def test_a_column_that_holds_no_text_is_refused_with_what_the_columns_hold(tmp_path, waits, kind):
    path, (values, said) = tmp_path / f"a.{kind}", NO_TEXT[kind]
    table = {"content": values, "text": ["a", "b"]}
    if kind == "jsonl":
        rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
        path.write_bytes(json_lines([{"content": None}, b"", *rows, b"7"]))
    else:
        write_table(path, pa.table(table))
    problems = {
        "content": f": the column 'content' contains {said}, not text",
        "txt": " has no column 'txt'",
    }
    for column, problem in problems.items():
        with pytest.raises(BadInput) as refused:
            texts([path], column=column)
        wanted = rf"{path}{problem}.*: content \({said}\), text \(text\)"
        assert re.fullmatch(wanted, str(refused.value)), refused.value
    assert not waits


def test_zstandard_is_refused_without_the_package_that_reads_all_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setitem(fsspec.compression.compr, "zstd", lambda file, mode: file)
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    with pytest.raises(
        BadInput,
        match="a.jsonl.zst is compressed with .*: pip install backports.zstd",
    ):
        texts([tmp_path / "a.jsonl.zst"])


def damaged(folder):
    """Files that are not what their names say: the bytes, how the name ends, rows before the problem, what is said."""
    table = (folder / "a.parquet").read_bytes()
    lines, records = (
        (folder / name).read_bytes().splitlines(keepends=True)[:301]
        for name in ("a.jsonl", "a.csv")
    )
    packed = (folder / "a.jsonl.gz").read_bytes()
    third = pq.ParquetFile(folder / "a.parquet").metadata.row_group(3).column(1)
    begin, size = (
        third.dictionary_page_offset or third.data_page_offset,
        third.total_compressed_size,
    )
    return {
        "array": (b'[\n{"text": "a"}\n]\n', "json", [0], "is a JSON array.*jq"),
        "line": (
            b"".join([*lines[:300], b'{"text": "cut\n', *lines]),
            "jsonl",
            [300],
            "line 301 is not valid JSON",
        ),
        "truncated.gz": (packed[: len(packed) // 2], "jsonl.gz", range(N), r"row \d+: .*EOFError"),
        "damaged.gz": (
            packed[:-8] + b"\0" * 8,
            "jsonl.gz",
            range(N + 1),
            r"row \d+: .*BadGzipFile",
        ),
        "pages": (
            table[:begin] + b"\xff" * size + table[begin + size :],
            "parquet",
            range(301),
            r"row \d+: .*OSError",
        ),
        "no Parquet": (lines[0] * 50, "parquet", [0], "ArrowInvalid: .*magic bytes not found"),
        "ragged": (
            b"".join([*records, b"31,a text, in two\n"]),
            "csv",
            [299],
            "line 302 has 3 fields, but the header has 2",
        ),
        "bytes": (b"".join([*records, b"31,\xff\n"]), "csv", [299], "line 302 is not UTF-8"),
        "quotes": (
            b"".join([*records, b'31,"open\n', *records]),
            "csv",
            [299],
            "line 302 .*unexpected end of data",
        ),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "array",
        "line",
        "truncated.gz",
        "damaged.gz",
        "pages",
        "no Parquet",
        "ragged",
        "bytes",
        "quotes",
    ],
)
def test_a_local_file_that_is_not_what_its_name_says_is_refused_at_once_with_file_and_place(
    corpus, tmp_path, waits, kind
):
    """What can be read before it comes once, and nothing after it."""
    content, suffix, rows, words = damaged(corpus)[kind]
    path, found = tmp_path / f"a.{suffix}", []
    path.write_bytes(content)
    with pytest.raises(BadInput, match=f"^{re.escape(str(path))}.*{words}") as refused:
        found += (text for text, _ in open_files([path])["train"][0][1](0))
    assert found == ROWS[: len(found)] and len(found) in rows and not waits
    assert "\n" not in str(refused.value) and "same command" not in str(refused.value)


def test_a_disk_that_fails_for_a_while_is_read_on(corpus, waits, monkeypatch):
    real, problems = (
        remote.open_file,
        [OSError(code, "no") for code in (errno.EIO, errno.ESTALE, errno.EMFILE)],
    )

    def opened(name):
        if problems:
            raise problems.pop()
        return real(name)

    monkeypatch.setattr(remote, "open_file", opened)
    assert texts([corpus / "a.jsonl"]) == ROWS and waits == [1, 2, 4]


@pytest.mark.parametrize("name", FILES)
def test_the_amount_of_text_is_estimated_before_it_is_read(corpus, server, name):
    true = sum(len(row.encode()) for row in ROWS)
    for path in (str(corpus / name), f"{server.url}/files/{name}"):
        found = hub_tables.expected_text_bytes([path, path], tables().config)
        assert (
            0.9 * 2 * true < found < 1.1 * 2 * true * (1.1 if name.endswith(".csv") else 1)
        )  # all of it is counted


# A data set of the Hub.

SAMPLE, COMMIT = "hf://datasets/me/corpus/sample", "c0ffee" + "0" * 34
SECOND_FILE = "GET .*train-00001"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A Hub that has the rows in two files of Parquet, in one of packed JSON lines, and of a kind that is not read."""
    folder = tmp_path_factory.mktemp("hub")
    for place in ("corpus/sample", "lines", "tabs", "plain"):
        (folder / "datasets" / "me" / place).mkdir(parents=True)
    for number, rows in enumerate((ROWS[: N // 2], ROWS[N // 2 :])):
        write_parquet(
            folder / f"datasets/me/corpus/sample/train-{number:05d}-of-00002.parquet", rows
        )
    lines = gzip.compress(json_lines([{"text": row} for row in ROWS]))
    (folder / "datasets/me/lines/train-00000.json.gz").write_bytes(lines)
    (folder / "datasets/me/tabs/a.csv").write_text("id\ttext\n0\ta\n")
    (folder / "datasets/me/tabs/README.md").write_text(
        '---\nconfigs:\n- config_name: a\n  sep: "\\t"\n---\n'
    )
    (folder / "datasets/me/plain/a.txt").write_text("words")
    files = "  data_files:\n  - split: train\n    path: sample/*"
    (folder / "datasets/me/corpus/README.md").write_text(
        f"---\nconfigs:\n- config_name: sample\n{files}\n---\n"
    )
    with DataServer(folder) as server:
        server.keeps_commits = True
        yield server


@pytest.fixture
def hub(served, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    served.commit = COMMIT
    return Hub(served)


class Hub:
    """Reads from a server, each time in a fork: the client holds HF_ENDPOINT from its import on."""

    def __init__(self, server):
        self.server = server

    def read(self, *problems, **how):
        """Read a data set, or Parquet ``files``, from the beginning; return what came of it."""
        self.server.problems, self.server.log = [*problems], []
        run_in_fork(self._read, how)
        found, met = (
            json.loads(Path("found.json").read_text()),
            not any(times for *_, times in self.server.problems),
        )
        return types.SimpleNamespace(**found, log=self.server.log, met=met)

    def prepare(self, *problems):
        """Prepare the recipe's shards; return the exit status, the names of their files and the manifest."""
        self.server.problems, self.server.log = [*problems], []
        run_in_fork(self._prepare)
        (path,) = Path("data").glob("*/manifest.json")
        names = sorted(path.name for path in path.parent.iterdir())
        return int(Path("status").read_text()), names, json.loads(path.read_text())

    def _connect(self):
        """Make this process's client one of the server; return its waits, which are noted only, and what is logged."""
        os.environ |= {
            "HF_ENDPOINT": self.server.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        os.environ |= {
            "HF_HOME": "home",
            "HF_HUB_DOWNLOAD_TIMEOUT": "1",
            "HF_HUB_ETAG_TIMEOUT": "1",
        }
        shutil.rmtree("home", ignore_errors=True)
        for module in (huggingface_hub.constants, datasets.config):
            importlib.reload(module)
        client.set_timeouts()
        client.TIMEOUTS["read"] = remote.TIMEOUT_SECONDS = 0.3
        waits, said, logged = [], [], logging.Handler()
        retry.time.sleep = waits.append
        logged.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("ursa_minor").addHandler(logged)
        return waits, said

    def _read(self, how):
        waits, said = self._connect()
        given = {
            "name": "me/corpus",
            "config": "sample",
            "pinned": None,
            "column": "text",
            "files": {},
        } | how
        dataset = {"dataset_name": given["name"], "dataset_config_name": given["config"]}
        source = tables(given["files"] and {"train": given["files"]}, given["column"], **dataset)
        found, stopped, commit, parts, versions = [], None, None, [], given.get("versions", {})
        try:
            commit, splits = hub_tables.open_tables(source, given["pinned"], versions)
            parts = [name for name, _ in splits["train"]]
            for _, read in splits["train"]:
                found += (text for text, _ in read(0))
        except (BadInput, TrainingStopped) as error:
            stopped = f"{type(error).__name__}: {error}"
        kept = {
            "equal": found == ROWS,
            "begins": found == ROWS[: len(found)],
            "rows": len(found),
            "stopped": stopped,
        }
        kept |= {"waits": [wait for wait in waits if wait], "said": said, "versions": versions}
        Path("found.json").write_text(json.dumps(kept | {"commit": commit, "parts": parts}))

    def _prepare(self):
        self._connect()
        Path("status").write_text(str(prepare_data.main(["--recipe", "tiny.yaml"])))


def test_a_data_set_of_the_hub_is_read_whole_and_pinned(hub):
    clean, lines, pinned = (
        hub.read(),
        hub.read(name="me/lines", config=None),
        hub.read(pinned=COMMIT),
    )
    assert all(
        done.equal and not done.said and done.commit == COMMIT for done in (clean, lines, pinned)
    )
    asked = [line for line in clean.log[1:] + pinned.log if "c0ffee" not in line]
    assert not asked, "after the first contact everything is asked for by commit"


def test_files_of_the_hub_by_pattern_are_all_of_them_at_the_commit_of_the_first_contact(hub):
    first = hub.read(["/api/", "503", 3], files=[f"{SAMPLE}/*.parquet"])
    hub.server.commit = "e" * 40
    again = hub.read(files=[f"{SAMPLE}/*.parquet"], versions=first.versions)
    assert first.equal and first.met and first.said and again.equal and first.parts == again.parts
    assert [Path(name).name for name in first.parts] == [
        f"train-0000{i}-of-00002.parquet" for i in range(2)
    ]
    assert all("c0ffee" in line for line in first.log + again.log if "/resolve/" in line)
    done = hub.read(files=[f"{SAMPLE}/*.csv.parquet"])
    assert re.match(
        r"BadInput: hf://datasets/me/corpus/sample/\*.csv.parquet: .*may read", done.stopped
    )


def test_the_hub_fails_anywhere_and_every_row_comes_once(hub):
    """Its list of subsets too, and where it asks to wait it is obeyed."""
    problems = problem("503", method="^GET /api/datasets/me/corpus$") + problem(
        "silent", method="GET .*/tree/"
    )
    problems += problem("503", times=9, method="README") + problem("lie", method=SECOND_FILE)
    done = hub.read(*problems, *problem("429:33", method="GET .*train-00000"))
    assert (
        done.equal and done.met and len(done.said) >= len(done.waits) > 0 and max(done.waits) >= 33
    ), done
    assert hub.server.outwaited == 0, "every request has a time-out"


def test_what_the_hub_does_not_have_is_bad_input_at_once(hub):
    column = "has no column 'txt'.*: id "
    for wanted, done in {
        "me/nothing: HTTP status 404. Check the name": hub.read(name="me/nothing"),
        ".*'samples' not found. Available: .*'sample'": hub.read(config="samples"),
        "dataset_name = me/tabs: .* not Parquet.*refs/convert/parquet": hub.read(
            name="me/tabs", config=None
        ),
        "dataset_name = me/plain: .* not Parquet.*refs/convert/parquet": hub.read(
            name="me/plain", config=None
        ),
        f".*{column}": hub.read(column="txt"),
        ".*HTTP status 403.*that you may read it": hub.read(
            *problem("403", times=ALWAYS, method=SECOND_FILE)
        ),
    }.items():
        assert re.match(f"BadInput: {wanted}", done.stopped) and sum(done.waits) <= 1, done


def test_a_run_that_was_cut_off_goes_on_with_the_commit_of_its_first_contact(hub):
    own = "dataset_name: me/corpus\ndataset_config_name: sample\nvalidation_tokens: 500\nshard_tokens: 1000\n"
    Path("tiny.yaml").write_text(own + RECIPE)
    whole = hub.prepare()
    Path("data").rename("whole")
    # The tokenizer is made of all text: both files are read once before the first shard.
    status, _, manifest = hub.prepare([SECOND_FILE, "ok", 1], [SECOND_FILE, "503", ALWAYS])
    assert status == 1 and manifest["splits"]["train"] and not manifest["complete"]
    hub.server.commit = "d" * 40
    assert (
        hub.prepare() == whole
        and whole[0] == 0
        and whole[2]["complete"]
        and whole[2]["revision"] == COMMIT
    )
    assert not [line for line in hub.server.log if "/resolve/" in line and COMMIT not in line]


def test_a_cursor_is_applied_to_no_other_file_than_its_own(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second, more = (
        shutil.copy(corpus / "a.jsonl", tmp_path / f"{name}.jsonl") for name in "abc"
    )
    wanted = keys.DataSource(
        data_seed=1, tokenizer="characters", validation_tokens=500, shard_tokens=9000
    )

    def source(*names):  # a pattern of the Hub: what it matches may change
        return FoundSource(wanted, "pattern", {}, files={"train": [*map(str, names)]})

    source().folder.mkdir(parents=True)
    stopping = types.SimpleNamespace(
        wait=lambda found: found and "train_00001" in found[-1].file and 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        prepare.prepare(source(first, second), stopping)
    for names in ((first, more, second), (first, second, more), (first, more)):
        with pytest.raises(BadInput, match="file 2 was b.jsonl. Now it has"):
            prepare.prepare(source(*names))
    prepare.prepare(source(first, second))
    assert is_complete(source().folder)
