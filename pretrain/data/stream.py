"""Documents of a data set of the Hub, or of Parquet, JSON-lines, CSV and Arrow files, streamed with a cursor.

``datasets`` reads; what it leaves open is closed here (research/reliability.md, 2.2): a fault is retried from the row
it happened at and not from the shuffle buffer's or iterator's own state (D1, D4-D9), waits have a limit (D10), a file
is finished only when its last row was read (a swallowed error looks like an end, D8), and a data set is pinned to a
commit (D12). JSON lines are found by ``datasets`` and parsed here: its parser (Arrow's) refuses half of a surrogate
pair, turns every text into quoted JSON where one row has a number, and wants the first file's fields in every file.
"""

import contextlib
import csv
import difflib
import functools
import json
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from glob import has_magic
from io import BufferedReader, StringIO
from itertools import accumulate, chain, islice, zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import datasets
import fsspec
import huggingface_hub
import pyarrow.parquet as pq
from aiohttp import ClientTimeout
from datasets.data_files import DataFilesList
from datasets.packaged_modules.json.json import Json
from fsspec.compression import compr
from fsspec.utils import infer_compression
from pyarrow.dataset import ParquetFragmentScanOptions

from pretrain.base.errors import BadInput, TrainingStopped
from pretrain.base.network import answer_of
from pretrain.base.redaction import is_redacted, redact
from pretrain.data.sources import Part, Row

log = logging.getLogger(__name__)

TRIES = 10  # in a row without a new row; with the waits below about five minutes
LONGEST_WAIT_SECONDS = 60
LONGEST_RETRY_AFTER_SECONDS = 600  # what a server may ask for
TIMEOUT_SECONDS = 60
ROWS = 256  # of one step of reading
BLOCK_BYTES = TAIL_BYTES = SAMPLE_BYTES = 2**20
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
) -> tuple[str | None, dict[str, list[Part]]]:
    """Open a data set for streaming.

    Args:
        dataset_name: a Hub id, or parquet, json, csv or arrow for ``data_files`` by split.
        pinned: the commit of an earlier contact; else it is asked for.

    Returns: the commit (None for files) and each split's parts; a file of the data set is one part.
    Raises BadInput for what does not exist or may not be read, TrainingStopped when the retries are used up.
    """
    _retry_here()
    asked = {split: _named_files(dataset_name, found) for split, found in (data_files or {}).items()}
    if not asked:
        about = functools.partial(
            huggingface_hub.HfApi().dataset_info, revision=dataset_revision, timeout=TIMEOUT_SECONDS
        )
        pinned = pinned or _patiently(dataset_name, about, dataset_name).sha
    arguments: dict[str, Any] = {"path": dataset_name, "name": dataset_config_name, "revision": pinned}
    # A plain list would be expanded: a name's [ ] * ? a second time, and what then is not found left out.
    arguments["data_files"] = {split: DataFilesList(found, []) for split, found in asked.items()} or None
    given = [name for found in asked.values() for name in found]
    where = given[0] if given else dataset_name
    builder = _patiently(where, _builder, arguments | {"storage_options": STORAGE if asked else None}, files=given)
    names = {str(split): [str(name) for name in found] for split, found in builder.config.data_files.items()}
    for split, found in asked.items():
        _refuse_other_files(found, names.get(split, []))
    if "train" not in names:
        raise BadInput(f"dataset_name = {dataset_name}: has no split train, only {', '.join(names)}")
    if hasattr(builder.config, "columns"):  # Parquet: the other columns are not even fetched
        builder.config.columns, builder.config.batch_size = [text_column], ROWS
        # Without pre_buffer=False Arrow keeps all of a file that was read until its end.
        builder.config.fragment_scan_options = ParquetFragmentScanOptions(pre_buffer=False)
    splits = {}
    for split in ("train", "validation") if data_files else ("train",):
        if split not in names:
            continue
        table = None
        if not isinstance(builder, Json):
            table = _patiently(where, builder.as_streaming_dataset, split, files=given)
        splits[split] = [(name, _reader(table, index, name, text_column)) for index, name in enumerate(names[split])]
    return pinned, splits


def _named_files(kind: str, names: list[str]) -> list[str]:
    """Return the files behind names: of the Hub those that a pattern matches, else each name as it stands.

    Raises BadInput for a file that is not there, and for one whose name ``datasets`` would take for something else.
    """
    found, hub = [], f"{datasets.config.HF_ENDPOINT}/"
    for name in names:
        if name.startswith(hub) and "/resolve/" in name:  # a link to a file there, with the login
            name = "hf://" + unquote(name.removeprefix(hub).partition("?")[0]).replace("/resolve/", "@", 1)
        if name.startswith("hf://"):
            found += _patiently(name, _hub_files, name)
        else:
            found.append(name if "://" in name else str(Path(name).absolute()))
    for name in found:
        if "::" in name:
            raise BadInput(f"{name}: fsspec takes :: for a chain of file systems; rename it (in a URL: %3A%3A)")
        if "://" in name and "*" in name:
            raise BadInput(f"{name}: datasets takes * for a pattern; list the files (a * that is meant: %2A)")
        if kind == "csv" and _compression(name) and {"[", "]"} & set(name.rpartition("/")[2]):
            raise BadInput(
                f"{name}: datasets cannot unpack a CSV with [ or ] in its name; rename it (in a URL: %5B, %5D)"
            )
        if is_redacted(name):
            raise BadInput(
                f"{name}: its user, password or query was left out here; give the whole URL: --data_files URL"
            )
        if name.startswith(("http://", "https://")):  # a missing one is known before hours of reading others
            _patiently(name, _file_size, name, files=[name])
    return found


def _hub_files(pattern: str) -> list[str]:
    """Return the files of a pattern. Unlike the client's own ``exists``, it takes no fault for an absence."""
    filesystem, path = fsspec.core.url_to_fs(pattern)
    try:
        found = [filesystem.info(path)["name"]]
    except FileNotFoundError:
        found = sorted(filesystem.glob(path)) if has_magic(path) else []
        if not found:
            raise
    return [f"hf://{name}" for name in found]


def _refuse_other_files(asked: list[str], found: list[str]) -> None:
    """Raise BadInput with the first file in which what ``datasets`` would read differs from what was asked for."""
    for name, instead in zip_longest(asked, found):
        if name != instead:
            not_ = "" if name else "not "
            raise BadInput(
                f"{name or instead}: was {not_}asked for, and datasets would read {instead or 'nothing'} there"
            )


def expected_text_bytes(names: list[str], text_column: str) -> float:
    """Return about how many bytes of text these files of a data set hold, from the first one and all sizes.

    Parquet's footer knows; of JSON lines or CSV the beginning is read. 0 where a server states no size.
    """
    size = _patiently(names[0], _file_size, names[0])
    if not size:
        return 0.0
    total = size * len(names) if len(names) > SIZES_ASKED else sum(_patiently(name, _file_size, name) for name in names)
    return total / size * _patiently(names[0], _text_bytes, names[0], text_column, size)


def _text_bytes(name: str, text_column: str, size: int) -> float:
    with _open(name) as raw:
        if _is_parquet(name):
            groups = pq.ParquetFile(raw).metadata
            columns = [
                groups.row_group(i).column(j) for i in range(groups.num_row_groups) for j in range(groups.num_columns)
            ]
            return sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_column)
        head = _unpacked(name, raw).read(SAMPLE_BYTES)
        share = len(head) / max(1, raw.tell()) if _compression(name) else 1.0
    with contextlib.suppress(ValueError, AttributeError):  # CSV, or one line longer than the sample: all of it is text
        rows = [json.loads(line).get(text_column) or "" for line in head.splitlines()[:-1] or [head]]
        share *= sum(len(text.encode()) for text in rows) / max(1, len(head))
    return size * share


def _file_size(name: str) -> int:
    filesystem, path = fsspec.core.url_to_fs(name, **STORAGE.get(name.split(":")[0], {}))
    return int(filesystem.size(path) or 0)


def _open(name: str):
    return fsspec.open(name, "rb", **STORAGE.get(name.split(":")[0], {}))


def _compression(name: str) -> str | None:
    plain = _path_of(name)
    if plain.lower().endswith(".zst") and not infer_compression(plain):
        raise BadInput(f"{name}: is compressed with Zstandard, which needs: pip install zstandard")
    return infer_compression(plain)


def _path_of(name: str) -> str:
    """Return a name without a URL's query; a file's own name may hold a question mark."""
    return urlsplit(name).path if "://" in name else name


def _unpacked(name: str, raw: Any) -> Any:
    compression = _compression(name)
    return compr[compression](raw, mode="rb") if compression else raw


class _Redacted(logging.Handler):
    """Logs a client's warnings as ours, redacted: the Hub's client retries a few times by itself."""

    def emit(self, record: logging.LogRecord) -> None:
        log.warning(redact(" ".join(record.getMessage().split()))[:400])


def _retry_here() -> None:
    # Its own waits (5, 20, 60 s, up to 20 times) would hide the fault from the retries below.
    datasets.config.STREAMING_READ_MAX_RETRIES = 1
    datasets.config.STREAMING_READ_RETRY_INTERVAL = 0
    datasets.config.STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL = 0
    datasets.config.STREAMING_READ_RATE_LIMIT_RETRY_INTERVAL = 0
    datasets.config.STREAMING_OPEN_MAX_RETRIES = 1
    datasets.config.STREAMING_OPEN_RETRY_INTERVAL = 0
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    datasets.disable_progress_bars()
    client = logging.getLogger("huggingface_hub")
    client.handlers, client.propagate = [_Redacted(logging.WARNING)], False


class _Patience:
    """Counts the failures in a row at one thing and waits longer after each, to a limit; every retry is logged."""

    def __init__(self, what: str):
        self.what, self.failures = redact(what), 0
        self.place: int | None = -1

    def failed(self, error: Exception, place: int | None = None) -> None:
        """Wait and return, or raise where waiting does not help. ``place``: the row; a new one is progress."""
        if isinstance(error, BadInput):
            raise error
        self.failures = self.failures + 1 if place == self.place else 1
        self.place = place
        status, asked = answer_of(error, contexts=True)
        where = self.what if place is None else f"{self.what}: row {place}"
        reason = f"{type(error).__name__}: {redact(' '.join(str(error).split()))[:300]}"
        if status is not None:
            reason = f"HTTP status {status}"
        if isinstance(error, huggingface_hub.errors.OfflineModeIsEnabled):
            raise BadInput(f"{where}: HF_HUB_OFFLINE is set; unset it, or give --data_files or --data_dir") from None
        # Clients say "not found" of a server that is down, too: then there is a status.
        missing = status is None and isinstance(error, (FileNotFoundError, PermissionError))
        if missing or status in FINAL_STATUS:
            raise BadInput(f"{where}: {reason}. Check the name, and that you may read it (hf auth login)") from None
        if self.failures >= TRIES:
            raise TrainingStopped(
                f"{where}: failed {TRIES} times in a row, last with {reason}. What was read before is kept; the same "
                f"command goes on from there"
            ) from None
        wait = min(LONGEST_WAIT_SECONDS, 2 ** (self.failures - 1))
        wait = min(LONGEST_RETRY_AFTER_SECONDS, max(wait, asked))
        log.warning(f"{where}: {reason}; try {self.failures + 1} of {TRIES} in {wait:g} s")
        time.sleep(wait)


def _patiently(what: str, call: Callable[..., Any], *args, files: Sequence[str] = ()) -> Any:
    patience = _Patience(what)
    while True:
        try:
            return call(*args)
        except Exception as error:  # each client has kinds of its own; what is final is sorted out there
            named = [name for name in files if name in str(error)] or files
            patience.failed(_behind(error, named[0]) if named else error)


def _behind(error: Exception, name: str) -> Exception:
    """Return what really happened to a remote file: ``datasets`` takes a failed request for a missing file."""
    if "://" not in name or answer_of(error, contexts=True)[0] is not None or isinstance(error, BadInput):
        return error
    filesystem, path = fsspec.core.url_to_fs(name, **STORAGE.get(name.split(":")[0], {}))
    try:
        filesystem.cat_file(path, start=0, end=1)
    except Exception as truth:
        return truth
    return OSError(f"said to be missing, but it is there: {error}") if isinstance(error, FileNotFoundError) else error


def _builder(arguments: dict) -> datasets.DatasetBuilder:
    try:
        return datasets.load_dataset_builder(**arguments)
    except (ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        if arguments["data_files"]:  # they were found and have a kind: what fails is the way to them
            raise
        if isinstance(error.__cause__ or error.__context__, OSError) and answer_of(error, contexts=True)[0] is None:
            raise
        reason = redact(" ".join(str(error).split()))[:400]
        raise BadInput(f"dataset_name = {arguments['path']}: cannot be opened: {reason}") from None


def _no_column(where: str, text_column: str, columns: list[str]) -> str:
    near = difflib.get_close_matches(text_column, columns, n=1)
    hint = f"; did you mean --text_column {near[0]}?" if near else ""
    return f"{where}: text_column = {text_column}: no such column; it has {', '.join(columns)}{hint}"


def _reader(
    table: datasets.IterableDataset | None, index: int, name: str, text_column: str
) -> Callable[[int], Iterator[Row]]:
    """Return ``read(row)`` of one file: its texts from that row on, each row once whatever fails on the way.

    Without ``table`` it is a file of JSON lines: a row is a line, and a blank one has no text.
    """

    def read(row: int) -> Iterator[Row]:
        one = None if table is None else table.shard(num_shards=table.num_shards, index=index)
        groups = None
        patience = _Patience(name)
        while True:
            try:
                if groups is None and _is_parquet(name):
                    groups = _row_groups(name, text_column)
                values = _json_values(name, text_column, row)
                if one is not None:
                    values = _table_values(one, name, text_column, row, groups)
                for text in values:
                    row += 1
                    yield (text if isinstance(text, str) and text.strip() else None), True
                return
            except Exception as error:
                patience.failed(_behind(error, name), row)

    return read


def _table_values(
    one: datasets.IterableDataset, name: str, text_column: str, start: int, groups: list[int] | None
) -> Iterator[Any]:
    """Yield the column's values from row ``start`` on. In Parquet it begins at the row group; else it reads up to it.

    The last ones come when it is sure that they are the last. Raises OSError where it ends before its end, or ``start``.
    """
    pieces, skip, row, last, held = iter([one]), start, start, None, []
    if start and groups is not None:
        first = min(bisect_right(groups, start) - 1, len(groups) - 2)
        parts, skip = one.reshard(), start - groups[first]
        pieces = (parts.shard(num_shards=parts.num_shards, index=i) for i in range(first, parts.num_shards))
    for piece in pieces:
        for table in piece.with_format("arrow").iter(batch_size=ROWS):
            if text_column not in table.column_names:
                raise BadInput(_no_column(name, text_column, table.column_names))
            yield from held
            values = table.column(text_column).to_pylist()
            last, held, skip = values[-1], values[skip:], max(0, skip - len(values))
            row += len(held)
    if skip or (groups is not None and row != groups[-1]):
        raise OSError(f"ended after {row - skip} rows, before row {groups[-1] if groups else row}")
    if _path_of(name).lower().endswith(".csv") and isinstance(last, str):
        _refuse_other_end(name, last)
    yield from held


def _json_values(name: str, text_column: str, start: int) -> Iterator[Any]:
    """Yield the field of each line from line ``start`` on: None where a line is blank, no object, or has no such field.

    Raises OSError where it ends before its end, or ``start``.
    """
    number = -1
    with _whole(name) as file:
        lines: Iterator[tuple[int, bytes]] = enumerate(file)
        if not start:
            head = list(islice(lines, ROWS))
            _refuse_no_column(name, text_column, [line for _, line in head])
            lines = chain(head, lines)
        for number, line in lines:
            if number >= start:
                yield _parsed(name, line).get(text_column)
    if number + 1 < start:
        raise OSError(f"ended after {number + 1} rows, before row {start}")


@contextlib.contextmanager
def _whole(name: str) -> Iterator[Any]:
    """Open a file, decompressed. Raises OSError at the end where bytes were not read: an error can look like an end."""
    with _open(name) as raw:
        buffered = BufferedReader(_unpacked(name, raw), BLOCK_BYTES)
        yield buffered
        size = _file_size(name)
        if size and raw.tell() != size:
            raise OSError(f"ended after {raw.tell():,} of {size:,} bytes")


def _parsed(name: str, line: bytes) -> dict:
    """Return a line's object; an empty one where it is blank or something else."""
    line = line.strip()
    if line.startswith(b"["):
        raise BadInput(
            f"{name}: is a JSON array, which can only be read whole. Write one object a line, for example: "
            f"jq -c '.[]' old.json > new.jsonl; of a data set of the Hub try --dataset_revision refs/convert/parquet"
        )
    value = json.loads(line) if line else None
    return value if isinstance(value, dict) else {}


def _refuse_no_column(name: str, text_column: str, lines: list[bytes]) -> None:
    """Raise BadInput where a file's first lines have fields, but none of them this one."""
    columns: dict[str, None] = {}
    for line in lines:
        with contextlib.suppress(UnicodeDecodeError, json.JSONDecodeError):  # they are found again, at their row
            columns |= dict.fromkeys(_parsed(name, line))
    if columns and text_column not in columns:
        raise BadInput(_no_column(name, text_column, list(columns)))


def _is_parquet(name: str) -> bool:
    return _path_of(name).lower().endswith(".parquet")


def _row_groups(name: str, text_column: str) -> list[int]:
    """Return the first row of each row group, and the number of rows, from the file's footer."""
    with _open(name) as file:
        footer = pq.ParquetFile(file)
        if text_column not in footer.schema_arrow.names:
            raise BadInput(_no_column(name, text_column, footer.schema_arrow.names))
        about = footer.metadata
        return list(accumulate((about.row_group(i).num_rows for i in range(about.num_row_groups)), initial=0))


def _refuse_other_end(name: str, last: str) -> None:
    """Raise OSError unless a value may stand in the last record of a CSV file."""
    with _open(name) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        tail = file.read().decode("utf-8", "replace")
    ends = []
    for quote in ("", '"'):  # the tail may begin inside of quotes
        with contextlib.suppress(csv.Error):
            ends += [record for record in csv.reader(StringIO(quote + tail, newline=""), strict=True) if record][-1:]
    if ends and not any(last in ",".join(record) for record in ends):
        raise OSError(f"ended before the last record of {size:,} bytes")
