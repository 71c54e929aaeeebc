"""Documents of a data set of the Hub, or of Parquet, JSON-lines, CSV and Arrow files, streamed with a cursor.

``datasets`` reads; what it leaves open is closed here: a fault is retried from the row it happened at and not from the
shuffle buffer's or iterator's own state, waits have a limit, a file is finished only when its last row was read (a
swallowed error looks like an end), and a data set is pinned to a commit. JSON lines and CSV are found by ``datasets``
and parsed here. Its parser of JSON (Arrow's) refuses half of a surrogate pair, turns every text into quoted JSON where
one row has a number, and wants the first file's fields in every file. Its parser of CSV (pandas') takes the texts None,
NA and 12 for none or for numbers, and moves the fields of a record that has too many.
"""

import asyncio
import contextlib
import functools
import logging
import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from glob import has_magic
from io import BufferedReader, TextIOWrapper
from itertools import accumulate, chain, islice, zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import datasets
import fsspec
import huggingface_hub
import pyarrow.parquet as pq
from aiohttp import ClientResponse, ClientSession, ClientTimeout, StreamReader, TraceConfig
from datasets.data_files import DataFilesList
from datasets.packaged_modules.csv.csv import Csv, CsvConfig
from datasets.packaged_modules.json.json import Json
from fsspec.compression import compr
from fsspec.utils import infer_compression
from pyarrow.dataset import ParquetFragmentScanOptions

from pretrain.base import files, network
from pretrain.base.errors import BadInput
from pretrain.base.foreign import is_redacted, redact
from pretrain.base.network import Unreadable, answer_of, causes
from pretrain.data import records, unread
from pretrain.data.patience import Cut, Patience
from pretrain.data.records import IDS, TEXT, Column, refuse_column
from pretrain.data.sources import COMPRESSED, Part, Row, Tables, path_of, shown_name

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 60
ROWS = 256  # of one step of reading
BLOCK_BYTES = SAMPLE_BYTES = 2**20
CSV_OTHER = ("skiprows", "nrows", "skipfooter", "comment", "lineterminator", "dialect")  # it has not
SIZES_ASKED = 64  # files whose size is asked for; of more, the first one's stands for all

# By URL: what its server said of the file when it was first read, and where what was read of it is kept.
WATCHED: dict[Any, tuple[dict[str, str], str]] = {}


async def _session(**options) -> ClientSession:
    """Return what asks servers for files: every answer is checked before a byte of it is read."""
    trace = TraceConfig()
    trace.on_request_end.append(_check_answer)
    trace.on_response_chunk_received.append(_note_block)
    return ClientSession(trace_configs=[trace], **options)


async def _check_answer(_client, _context, asked) -> None:
    """Raise Cut for an answer of other bytes than were asked for, Unreadable for another file than before, or a page."""
    answer: ClientResponse = asked.response
    url = (*answer.history, answer)[0].url
    if "html" in answer.headers.get("Content-Type", "").lower():
        if asked.method == "HEAD":  # what follows shows whether it is a page
            return
        begin = await answer.content.read(BLOCK_BYTES)
        network.refuse_page(begin, answer.headers, str(answer.url))
        with warnings.catch_warnings(action="ignore"):  # that reading on is wished for in another way
            answer.content.unread_data(begin)
    _watch(answer.content, -network.SLOW_BYTES)
    size = answer.headers.get("Content-Length")
    wanted = re.match(r"bytes=(\d+)-(\d+)", answer.request_info.headers.get("Range", ""))
    got = re.match(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range", ""))
    if answer.status == 206 and wanted and got:
        first, last, whole = map(int, got.groups())
        number = size or str(last - first + 1)
        if (first, last, number) != (int(wanted[1]), min(int(wanted[2]), whole - 1), str(last - first + 1)):
            raise Cut(f"was asked for {wanted[0]}, answered {number} from {first} to {last} of {whole}")
        size = got[3]
    if url not in WATCHED or answer.status not in (200, 206):
        return
    before, kept_in = WATCHED[url]
    said = {"ETag": answer.headers.get("ETag", "").removeprefix("W/"), "size": size}
    # A server that makes its answer up on the way says that it was modified now.
    if (modified := answer.headers.get("Last-Modified")) != answer.headers.get("Date"):
        said["Last-Modified"] = modified
    for mark in ("ETag", "Last-Modified", "size"):  # the first one that both have: a better one decides
        if before.get(mark) and said.get(mark):
            if before[mark] != said[mark]:
                raise Unreadable(
                    f"has changed on its server since it was first read: {mark} {said[mark]}, was {before[mark]}. "
                    f"Texts of both would be mixed: put the old file back, or delete {kept_in} to read all of it anew"
                )
            break
    if asked.method == "GET" and not before:
        before.update({mark: value for mark, value in said.items() if value})


def _watch(content: StreamReader, before: int) -> None:
    """Let reading of an answer fail where it waits, and fewer than network.SLOW_BYTES have come in network.SLOW_SECONDS."""
    if content.is_eof() or content.exception():
        return
    if content.total_bytes - before < network.SLOW_BYTES and not content._size:  # else what has come is not read yet
        fault = f"fewer than {network.SLOW_BYTES:,} bytes came in {network.SLOW_SECONDS} seconds"
        content.set_exception(TimeoutError(fault))
        return
    asyncio.get_running_loop().call_later(network.SLOW_SECONDS, _watch, content, content.total_bytes)


async def _note_block(_client, _context, got) -> None:
    if len(got.chunk) >= network.SLOW_BYTES:
        network.moved()


HTTP = {
    "get_client": _session,
    "headers": {"Accept-Encoding": "identity"},  # sizes and ranges are those of the file
    "client_kwargs": {"timeout": ClientTimeout(total=None, sock_connect=TIMEOUT_SECONDS, sock_read=TIMEOUT_SECONDS)},
}
STORAGE = {"http": HTTP, "https": HTTP}


def open_tables(
    tables: Tables,
    *,
    pinned: str | None = None,
    versions: dict[str, dict[str, str]] | None = None,
    kept_in: str = "its shards",
) -> tuple[str | None, dict[str, list[Part]]]:
    """Open a data set for streaming.

    Args:
        pinned: the commit of an earlier contact; else it is asked for.
        versions: of remote ``data_files``: the commit that their repository was pinned to, or what the server said of
            a file when it was first read. It is filled in while reading, and another file than that is refused.
        kept_in: what is to be deleted when all is to be read anew.

    Returns: the commit (None for files) and each split's parts; a file of the data set is one part.
    Raises BadInput for what does not exist or may not be read, TrainingStopped when the retries are used up.
    """
    _retry_here()
    dataset_name = tables.dataset_name
    column = Column(tables.token_column, IDS) if tables.token_column else Column(tables.text_column)
    versions = {} if versions is None else versions
    asked = {split: _named_files(dataset_name, found, versions) for split, found in (tables.data_files or {}).items()}
    for name in (name for found in asked.values() for name in found if name.startswith(("http://", "https://"))):
        WATCHED[_as_asked(name)] = (versions.setdefault(shown_name(name), {}), kept_in)
        patiently(name, _file_size, name, files=[name])  # a missing one is known before hours of reading others
    if not asked:
        ask = functools.partial(huggingface_hub.HfApi().dataset_info, timeout=TIMEOUT_SECONDS)
        pinned = pinned or patiently(dataset_name, lambda: ask(dataset_name, revision=tables.dataset_revision).sha)
    arguments: dict[str, Any] = {"path": dataset_name, "name": tables.dataset_config_name, "revision": pinned}
    # A plain list would be expanded: a name's [ ] * ? a second time, and what then is not found left out.
    arguments["data_files"] = {split: DataFilesList(found, []) for split, found in asked.items()} or None
    given = [name for found in asked.values() for name in found]
    where = given[0] if given else dataset_name
    builder = patiently(where, _builder, arguments | {"storage_options": STORAGE if asked else None}, files=given)
    names = {str(split): [str(name) for name in found] for split, found in builder.config.data_files.items()}
    for split, found in asked.items():
        _refuse_other_files(found, names.get(split, []))
    if "train" not in names:
        raise BadInput(f"dataset_name = {dataset_name}: has no split train, only {', '.join(names)}")
    if hasattr(builder.config, "columns"):  # Parquet: the other columns are not even fetched
        builder.config.columns, builder.config.batch_size = [column.name], ROWS
        # Without pre_buffer=False Arrow keeps all of a file that was read until its end.
        builder.config.fragment_scan_options = ParquetFragmentScanOptions(pre_buffer=False)
    splits = {}
    for split in asked or ["train"]:
        table = None
        parts: list[Part] = []
        if not isinstance(builder, (Json, Csv)):
            table = patiently(where, builder.as_streaming_dataset, split, files=given)
        for index, name in enumerate(names[split]):
            values = functools.partial(_table_values, table, index, name, column)
            if isinstance(builder, Json):
                values = functools.partial(_json_values, name, column)
            elif isinstance(builder, Csv):
                values = functools.partial(_csv_values, builder.config, name, column)
            parts.append((name, functools.partial(_read, name, column, values)))
        splits[split] = parts
    return pinned, splits


def _named_files(kind: str, names: list[str], versions: dict[str, dict[str, str]]) -> list[str]:
    """Return the files behind names: of the Hub those that a pattern matches, else each name as it stands.

    Raises BadInput for a file that is not there, and for one whose name ``datasets`` would take for something else.
    """
    found, hub = [], f"{datasets.config.HF_ENDPOINT}/"
    for name in names:
        if name.startswith(hub) and "/resolve/" in name:  # a link to a file there, with the login
            name = "hf://" + unquote(name.removeprefix(hub).partition("?")[0]).replace("/resolve/", "@", 1)
        if name.startswith("hf://"):
            found += patiently(name, _hub_files, name, versions)
        else:
            found.append(name if "://" in name else str(Path(name).absolute()))
    for name in found:
        if "::" in name:
            raise BadInput(f"{name}: fsspec takes :: for a chain of file systems; rename it (in a URL: %3A%3A)")
        if kind in ("parquet", "arrow") and Path(path_of(name)).suffix.lower() in COMPRESSED:
            raise BadInput(f"{name}: {kind} is read in places, which this compression hides; unpack it")
        if "://" in name and "*" in name:
            raise BadInput(f"{name}: datasets takes * for a pattern; list the files (a * that is meant: %2A)")
        if is_redacted(name):
            raise BadInput(
                f"{name}: its user, password or query was left out here; give the whole URL: --data_files URL"
            )
    return found


def _hub_files(pattern: str, versions: dict[str, dict[str, str]]) -> list[str]:
    """Return the files of a pattern at a commit. Unlike the client's own ``exists``, it takes no fault for an absence."""
    filesystem, path = fsspec.core.url_to_fs(pattern)
    place = filesystem.resolve_path(path)
    if hasattr(place, "revision"):  # a bucket has none
        if f"hf://{place.root}" not in versions:
            ask = functools.partial(huggingface_hub.HfApi().repo_info, timeout=TIMEOUT_SECONDS)
            about = ask(place.repo_id, repo_type=place.repo_type, revision=place.revision)
            versions[f"hf://{place.root}"] = {"commit": about.sha}
        commit = versions[f"hf://{place.root}"]["commit"]
        path = f"{place.root.partition('@')[0]}@{commit}/{place.path_in_repo}"
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
    size = patiently(names[0], _file_size, names[0], files=names[:1])
    if not size:
        return 0.0
    asked = names if len(names) <= SIZES_ASKED else names[:1]
    total = sum(patiently(name, _file_size, name, files=[name]) for name in asked) * len(names) / len(asked)
    return total / size * patiently(names[0], _text_bytes, names[0], text_column, size, files=names[:1])


def _text_bytes(name: str, text_column: str, size: int) -> float:
    with _open(name) as raw:
        if _is_parquet(name):
            footer = pq.ParquetFile(raw).metadata
            groups = map(footer.row_group, range(footer.num_row_groups))
            columns = (group.column(i) for group in groups for i in range(footer.num_columns))
            return sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_column)
        unpacked = _unpacked(name, raw)
        head = unpacked.read(SAMPLE_BYTES)
        share = 1.0 if unpacked is raw else len(head) / max(1, raw.tell())
    with contextlib.suppress(ValueError, AttributeError):  # CSV, or one line longer than the sample: all of it is text
        rows = [files.parse_json(line).get(text_column) or "" for line in head.splitlines()[:-1] or [head]]
        share *= sum(len(text.encode()) for text in rows) / max(1, len(head))
    return size * share


def _file_size(name: str) -> int:
    filesystem, path = fsspec.core.url_to_fs(name, **STORAGE.get(name.split(":")[0], {}))
    return int(filesystem.size(path) or 0)


def _as_asked(url: str) -> Any:
    """Return a URL as the client knows that it asked for it, which takes the user and password out of it."""
    filesystem, path = fsspec.core.url_to_fs(url, **HTTP)
    return filesystem.encode_url(path).with_user(None).with_fragment(None)


def _open(name: str):
    return fsspec.open(name, "rb", **STORAGE.get(name.split(":")[0], {}))


def _unpacked(name: str, raw: Any) -> Any:
    """Return what a file holds, decompressed; the file itself where its name names no compression."""
    # zstandard, which fsspec takes too, takes a file that was cut, or the first of several frames, for the whole.
    if Path(path_of(name)).suffix.lower() == ".zst" and getattr(compr.get("zstd"), "__name__", "") != "ZstdFile":
        raise BadInput(f"{name}: is compressed with Zstandard, which needs: pip install backports.zstd")
    compression = infer_compression(path_of(name))
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


def patiently(what: str, call: Callable[..., Any], *args, files: Sequence[str] = ()) -> Any:
    """Return what a call returns, tried again as ``Patience`` has it; ``files``: which an error may be of."""
    patience = Patience(what)
    while True:
        try:
            return call(*args)
        except Exception as error:  # each client has kinds of its own; what is final is sorted out there
            named = [name for name in files if name in str(error)] or files
            patience.failed(_behind(error, named[0]) if named else error)


def _behind(error: Exception, name: str) -> Exception:
    """Return what really happened to a remote file: ``datasets`` takes a failed request for a missing file."""
    known = any(
        isinstance(one, (BadInput, Unreadable)) or "Timeout" in type(one).__name__
        for one in causes(error, contexts=True)
    )
    if "://" not in name or known or answer_of(error, contexts=True)[0] is not None:
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


def _read(name: str, column: Column, values: Callable[[int], Iterator[Any]], row: int) -> Iterator[Row]:
    """Yield one file's rows from one on, each once whatever fails; ``values``: what stands in the column from a row on."""
    patience = Patience(name, row)
    while True:
        try:
            for value in values(row):
                found: Any = None
                if column.holds == IDS:
                    found = records.ids_of(value, row)
                elif isinstance(value, str) and value.strip():
                    found = value
                row += 1
                yield found, True
            return
        except Exception as error:
            patience.failed(_behind(error, name), row)


def _table_values(table: datasets.IterableDataset, index: int, name: str, column: Column, start: int) -> Iterator[Any]:
    """Yield the column's values from row ``start`` on. In Parquet it begins at the row group; else it reads up to it.

    Raises Cut where it ends before its end, or ``start``: some clients take an error for an end.
    """
    groups = _row_groups(name, column) if _is_parquet(name) else None
    one = table.shard(num_shards=table.num_shards, index=index)
    pieces, row, skip = iter([one]), start, start
    if start and groups is not None:
        first = min(bisect_right(groups, start) - 1, len(groups) - 2)
        parts, skip = one.reshard(), start - groups[first]
        pieces = (parts.shard(num_shards=parts.num_shards, index=i) for i in range(first, parts.num_shards))
    for piece in pieces:
        for found in piece.with_format("arrow").iter(batch_size=ROWS):
            refuse_column(name, column, records.column_types(found.schema))
            cells = found.column(column.name)
            values = (cells.to_numpy() if column.holds == IDS else cells.to_pylist())[skip:]
            skip = max(0, skip - len(found))
            row += len(values)
            yield from values
    if skip or (groups is not None and row != groups[-1]):
        raise Cut(f"ended after {row - skip} rows, before row {groups[-1] if groups else row}")


def _csv_values(config: CsvConfig, name: str, column: Column, start: int) -> Iterator[str]:
    """Yield the column's field of each record from record ``start`` on; a blank line is none."""
    other = [option for option in CSV_OTHER if getattr(config, option) != getattr(CsvConfig, option)]
    if other or config.header not in ("infer", 0) or len(config.sep or "") != 1:
        said = f"is described as a CSV with {', '.join(other) or 'a header or sep'} of its own, which is not read here"
        raise BadInput(f"{name}: {said}; try --dataset_revision refs/convert/parquet")
    number, held = -1, []
    with _whole(name) as file:
        text = TextIOWrapper(file, config.encoding or "utf-8-sig", "surrogateescape", newline="")
        rows = records.csv_records(config, text)
        first = [] if config.names and config.header == "infer" else next(rows, [])
        header = config.names or first
        if header:
            refuse_column(name, column, dict.fromkeys(header, TEXT))
        for number, record in enumerate(rows):
            if number >= start:
                yield from held
                held = [record[header.index(column.name)]]
    yield from held  # a record that is cut short looks like a whole one: now the end is known to be the file's
    if not header:
        raise BadInput(f"{name}: has no line; give a CSV with a header")
    if number + 1 < start:
        raise Cut(f"ended after {number + 1} rows, before row {start}")


def _json_values(name: str, column: Column, start: int) -> Iterator[Any]:
    """Yield the field of each line from line ``start`` on: None where a line is blank, no object, or has no such field."""
    number = -1
    with _whole(name) as file:
        lines: Iterator[tuple[int, bytes]] = enumerate(file)
        if not start:
            head = list(islice(lines, ROWS))
            records.refuse_no_text(name, column, head)
            lines = chain(head, lines)
        for number, line in lines:
            if number >= start:
                yield records.json_object(name, number, line).get(column.name)
    if number + 1 < start:
        raise Cut(f"ended after {number + 1} rows, before row {start}")


@contextlib.contextmanager
def _whole(name: str) -> Iterator[Any]:
    """Open a file, decompressed. Raises Cut at the end where bytes were not read: an error can look like an end."""
    with _open(name) as raw:
        buffered = BufferedReader(_unpacked(name, raw), BLOCK_BYTES)
        if packed := unread.packing(buffered.peek()):  # of which a record can be whole
            unpack = unread.command(packed, Path(path_of(name)).name)
            raise BadInput(f"{name}: is packed otherwise than its name says; give what this unpacks: {unpack}")
        yield buffered
        size = _file_size(name)
        if size and raw.tell() != size:
            raise Cut(f"ended after {raw.tell():,} of {size:,} bytes")


def _is_parquet(name: str) -> bool:
    return path_of(name).lower().endswith(".parquet")


def _row_groups(name: str, column: Column) -> list[int]:
    """Return the first row of each row group, and the number of rows, from the file's footer."""
    with _open(name) as file:
        footer = pq.ParquetFile(file)
        refuse_column(name, column, records.column_types(footer.schema_arrow))
        about = footer.metadata
        return list(accumulate((about.row_group(i).num_rows for i in range(about.num_row_groups)), initial=0))
