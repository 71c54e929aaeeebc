"""Documents of a data set of the Hub, or of Parquet, JSON-lines, CSV and Arrow files, streamed with a cursor.

``datasets`` reads; what it leaves open is closed here (research/reliability.md, 2.2): a fault is retried from the row
it happened at and not from the shuffle buffer's or iterator's own state (D1, D4-D9), waits have a limit (D10), a file
is finished only when its last row was read (a swallowed error looks like an end, D8), and a data set is pinned to a
commit (D12).
"""

import contextlib
import difflib
import gzip
import json
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import datasets
import fsspec
import huggingface_hub
import pyarrow.parquet as pq
from aiohttp import ClientTimeout

from .errors import BadInput, TrainingStopped

Row = tuple[str | None, bool]
Part = tuple[str, Callable[[int], Iterator[Row]]]

TRIES = 10  # in a row without a new row; with the waits below about five minutes
LONGEST_WAIT_SECONDS = 60
LONGEST_RETRY_AFTER_SECONDS = 600  # what a server may ask for
TIMEOUT_SECONDS = 60
ROWS = 256  # of one step of reading
TAIL_BYTES = SAMPLE_BYTES = 2**20
SIZES_ASKED = 64  # files whose size is asked for; of more, the first one's stands for all
HTTP = {
    "client_kwargs": {"timeout": ClientTimeout(total=None, sock_connect=TIMEOUT_SECONDS, sock_read=TIMEOUT_SECONDS)}
}
STORAGE = {"http": HTTP, "https": HTTP}
FINAL_STATUS = {400, 401, 403, 404, 405, 410, 416}


def open_tables(
    *,
    dataset_name: str,
    dataset_config_name: str | None = None,
    dataset_revision: str | None = None,
    data_files: dict[str, list[str]] | None = None,
    text_column: str,
    pinned: str | None = None,
    say: Callable[[str], None],
) -> tuple[str | None, dict[str, list[Part]]]:
    """Open a data set for streaming.

    Args:
        dataset_name: a Hub id, or parquet, json, csv or arrow for ``data_files`` by split.
        pinned: the commit of an earlier contact; else it is asked for.
        say: hears each retry.

    Returns: the commit (None for files) and each split's parts; a file of the data set is one part.
    Raises BadInput for what does not exist or may not be read, TrainingStopped when the retries are used up.
    """
    _retry_here(say)
    if not data_files:
        pinned = pinned or _patiently(dataset_name, say, _commit, dataset_name, dataset_revision)
    arguments = {"path": dataset_name, "name": dataset_config_name, "revision": pinned, "data_files": data_files}
    arguments["storage_options"] = STORAGE if data_files else None
    builder = _patiently(dataset_name, say, _builder, arguments)
    names = {str(split): [str(name) for name in found] for split, found in builder.config.data_files.items()}
    if "train" not in names:
        raise BadInput(f"dataset_name = {dataset_name}: has no split train, only {', '.join(names)}")
    splits = {}
    for split in ("train", "validation") if data_files else ("train",):
        if split not in names:
            continue
        if hasattr(builder.config, "columns"):  # Parquet: the other columns are not even fetched
            arguments["columns"] = [text_column]
        table = _patiently(dataset_name, say, _open_split, arguments, split, text_column)
        splits[split] = [
            (name, _reader(table, index, name, text_column, say)) for index, name in enumerate(names[split])
        ]
    return pinned, splits


def expected_text_bytes(names: list[str], text_column: str) -> float:
    """Return about how many bytes of text these files of a data set hold, from the first one and all sizes.

    Parquet's footer knows; of JSON lines or CSV the beginning is looked at.
    """
    size = _file_size(names[0])
    total = sum(map(_file_size, names)) if len(names) <= SIZES_ASKED else size * len(names)
    if _is_parquet(names[0]):
        with _open(names[0]) as file:
            groups = pq.ParquetFile(file).metadata
        columns = [
            groups.row_group(i).column(j) for i in range(groups.num_row_groups) for j in range(groups.num_columns)
        ]
        return total / size * sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_column)
    with _open(names[0], compression="infer") as file:
        head = file.read(SAMPLE_BYTES)
    share = 1.0
    with contextlib.suppress(ValueError, AttributeError):  # CSV, or one line longer than the sample: all of it is text
        rows = [json.loads(line).get(text_column) or "" for line in head.splitlines()[:-1] or [head]]
        share = sum(len(text.encode()) for text in rows) / max(1, len(head))
    if not names[0].split("?")[0].endswith((".json", ".jsonl", ".ndjson", ".csv", ".arrow")):
        share *= len(head) / len(gzip.compress(head))
    return total * share


def _file_size(name: str) -> int:
    filesystem, path = fsspec.core.url_to_fs(name, **STORAGE.get(name.split(":")[0], {}))
    return int(filesystem.size(path))


def _open(name: str, **options):
    return fsspec.open(name, "rb", **options, **STORAGE.get(name.split(":")[0], {}))


class _Hearing(logging.Handler):
    """Passes a client's warnings on: the Hub's client retries a few times by itself."""

    def __init__(self, say: Callable[[str], None]):
        super().__init__(logging.WARNING)
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Say the message."""
        self.say(" ".join(record.getMessage().split())[:400])


def _retry_here(say: Callable[[str], None]) -> None:
    # Its own waits (5, 20, 60 s, up to 20 times) would hide the fault from the retries below.
    datasets.config.STREAMING_READ_MAX_RETRIES = 1
    datasets.config.STREAMING_READ_RETRY_INTERVAL = 0
    datasets.config.STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL = 0
    datasets.config.STREAMING_READ_RATE_LIMIT_RETRY_INTERVAL = 0
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    datasets.disable_progress_bars()
    huggingface_hub.get_session().timeout = TIMEOUT_SECONDS  # the client itself has none: a silent server hangs it
    client = logging.getLogger("huggingface_hub")
    client.handlers, client.propagate = [_Hearing(say)], False


class _Patience:
    """Counts the failures in a row at one thing and waits longer after each, to a limit; every retry is said."""

    def __init__(self, what: str, say: Callable[[str], None]):
        self.what, self.say, self.failures, self.place = what, say, 0, -1

    def failed(self, error: Exception, place: int = 0) -> None:
        """Wait and return, or raise where waiting does not help. ``place``: the row; a new one is progress."""
        if isinstance(error, BadInput):
            raise error
        self.failures = self.failures + 1 if place == self.place else 1
        self.place = place
        status, asked = _answer_of(error)
        where = f"{self.what}: row {place}" if place else self.what
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if status is not None:
            reason = f"HTTP status {status}"
        if status in FINAL_STATUS or isinstance(error, (FileNotFoundError, PermissionError)):
            raise BadInput(f"{where}: {reason}. Check the name, and that you may read it (hf auth login)") from None
        if self.failures >= TRIES:
            raise TrainingStopped(
                f"{where}: failed {TRIES} times in a row, last with {reason}. What was read before is kept; the same "
                f"command goes on from there"
            ) from None
        wait = min(LONGEST_WAIT_SECONDS, 2 ** (self.failures - 1))
        if asked is not None:
            wait = min(LONGEST_RETRY_AFTER_SECONDS, max(wait, asked))
        self.say(f"{where}: {reason}; try {self.failures + 1} of {TRIES} in {wait:g} s")
        time.sleep(wait)


def _patiently(what: str, say: Callable[[str], None], call: Callable[..., Any], *args) -> Any:
    patience = _Patience(what, say)
    while True:
        try:
            return call(*args)
        except Exception as error:  # each client has kinds of its own; what is final is sorted out there
            patience.failed(error)


def _answer_of(error: BaseException | None) -> tuple[int | None, float | None]:
    """Return the HTTP status behind an error, and how many seconds its Retry-After asks to wait."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        answer = getattr(error, "response", None)
        status = getattr(error, "status", None) or getattr(answer, "status_code", None)
        if isinstance(status, int):
            headers = getattr(error, "headers", None) or getattr(answer, "headers", None) or {}
            asked = headers.get("Retry-After", "")
            return status, float(asked) if str(asked).isdigit() else None
        error = error.__cause__ or error.__context__
    return None, None


def _behind(error: Exception, name: str) -> Exception:
    """Return what really happened to a remote file: ``datasets`` takes a failed look at one for a missing file."""
    if "://" not in name or _answer_of(error)[0] is not None or isinstance(error, BadInput):
        return error
    filesystem, path = fsspec.core.url_to_fs(name, **STORAGE.get(name.split(":")[0], {}))
    try:
        filesystem.cat_file(path, start=0, end=1)
    except Exception as truth:
        return truth
    return OSError(f"said to be missing, but it is there: {error}") if isinstance(error, FileNotFoundError) else error


def _commit(name: str, revision: str | None) -> str:
    return huggingface_hub.HfApi().dataset_info(name, revision=revision, timeout=TIMEOUT_SECONDS).sha


def _builder(arguments: dict) -> datasets.DatasetBuilder:
    try:
        return datasets.load_dataset_builder(**arguments)
    except (ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        if isinstance(error.__cause__ or error.__context__, OSError) and _answer_of(error)[0] is None:
            raise
        reason = " ".join(str(error).split())[:400]
        raise BadInput(f"dataset_name = {arguments['path']}: cannot be opened: {reason}") from None


def _open_split(arguments: dict, split: str, text_column: str) -> datasets.IterableDataset:
    try:
        return datasets.load_dataset(**arguments, split=split, streaming=True)
    except ValueError as error:
        if "columns" not in arguments or text_column not in str(error):
            raise
        table = datasets.load_dataset(**(arguments | {"columns": None}), split=split, streaming=True)
        raise BadInput(_no_column(arguments["path"], text_column, table.column_names or [])) from None


def _no_column(where: str, text_column: str, columns: list[str]) -> str:
    near = difflib.get_close_matches(text_column, columns, n=1)
    hint = f"; did you mean --text_column {near[0]}?" if near else ""
    return f"{where}: text_column = {text_column}: no such column; it has {', '.join(columns)}{hint}"


def _reader(
    table: datasets.IterableDataset, index: int, name: str, text_column: str, say: Callable[[str], None]
) -> Callable[[int], Iterator[Row]]:
    """Return ``read(row)`` of one file: its texts from that row on, each row once whatever fails on the way."""

    def read(row: int) -> Iterator[Row]:
        one = table.shard(num_shards=table.num_shards, index=index)
        groups = None
        patience = _Patience(name, say)
        last = None
        while True:
            try:
                if groups is None and _is_parquet(name):
                    groups = _row_groups(name)
                for texts in _texts(one, name, text_column, row, groups):
                    for last in texts:
                        row += 1
                        yield (last if isinstance(last, str) and last.strip() else None), True
                _refuse_early_end(name, text_column, row, groups, last)
                return
            except Exception as error:
                patience.failed(_behind(error, name), row)

    return read


def _texts(
    one: datasets.IterableDataset, name: str, text_column: str, start: int, groups: list[int] | None
) -> Iterator[list]:
    """Yield lists of values from row ``start`` on. In Parquet it begins at the row group; else it reads up to it."""
    pieces, skip = iter([one]), start
    if start and groups is not None:
        first = min(bisect_right(groups, start) - 1, len(groups) - 2)
        parts, skip = one.reshard(), start - groups[first]
        pieces = (parts.shard(num_shards=parts.num_shards, index=i) for i in range(first, parts.num_shards))
    for piece in pieces:
        for table in piece.with_format("arrow").iter(batch_size=ROWS):
            if skip >= len(table):
                skip -= len(table)
                continue
            if text_column not in table.column_names:
                raise BadInput(_no_column(name, text_column, table.column_names))
            yield table.column(text_column)[skip:].to_pylist()
            skip = 0


def _is_parquet(name: str) -> bool:
    return name.split("?")[0].lower().endswith(".parquet")


def _row_groups(name: str) -> list[int]:
    """Return the first row of each row group, and the number of rows, from the file's footer."""
    with _open(name) as file:
        about = pq.ParquetFile(file).metadata
        return list(accumulate((about.row_group(i).num_rows for i in range(about.num_row_groups)), initial=0))


def _refuse_early_end(name: str, text_column: str, row: int, groups: list[int] | None, last: object) -> None:
    """Raise OSError unless the row that was read last is the file's last: an error on the way can look like an end."""
    if groups is not None and row != groups[-1]:
        raise OSError(f"ended after {row} of {groups[-1]} rows")
    plain = name.split("?")[0].lower()
    if not plain.endswith((".jsonl", ".ndjson")) or not row:
        return  # compressed files have an end of their own, which their reader checks
    with _open(name) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        lines = [line for line in file.read().split(b"\n") if line.strip()]
    if len(lines) < 2 and size > TAIL_BYTES:
        return  # one line longer than the tail
    if json.loads(lines[-1]).get(text_column) != last:
        raise OSError(f"ended after {row} rows, before the last line of {size:,} bytes")
