"""Documents of a data set of the Hub, or of files of tables, streamed with a cursor: each row once, whatever fails.

A data set of the Hub is found by ``datasets``, which also reads the kinds that have no reader here. What it leaves open
is closed here: a fault is retried from the row it happened at and not from the shuffle buffer's or iterator's own
state, waits have a limit, a file is finished only when its last row was read, and a data set is pinned to a commit.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import huggingface_hub
import pyarrow.parquet as pq

from pretrain.base import files
from pretrain.base.errors import BadInput
from pretrain.base.foreign import redact
from pretrain.base.network import TruncatedError, http_status_and_retry_after
from pretrain.data import records, remote
from pretrain.data.names import path_of
from pretrain.data.records import IDS, ROWS, Column, refuse_column
from pretrain.data.retries import RetryPolicy, retry
from pretrain.data.sources import READERS, Part, Row, Tables

SAMPLE_BYTES = 2**20
SIZES_ASKED = 64  # files whose size is asked for; of more, the first one's stands for all


def open_tables(
    tables: Tables, pinned: str | None, versions: dict[str, dict[str, str]], kept_in: str
) -> tuple[str | None, dict[str, list[Part]]]:
    """Open a data set for streaming.

    Args:
        pinned: the commit of an earlier contact; None: it is asked for.
        versions: of remote ``data_files``: the commit that their repository was pinned to, or what the server said of
            a file when it was first read. It is filled in while reading, and another file than that is refused.
        kept_in: what is to be deleted when all is to be read anew.

    Returns: the commit (None for files) and each split's parts; a file of the data set is one part.
    Raises BadInput for what does not exist or may not be read, TrainingStopped when the retries are used up.
    """
    remote.retry_here()
    column = Column(tables.token_column, IDS) if tables.token_column else Column(tables.text_column)
    if tables.data_files is None:
        return _open_dataset(tables, column, pinned)
    reader, splits = next(one for one in READERS if one.name == tables.dataset_name), {}
    for split, asked in tables.data_files.items():
        names = remote.named_files(reader, asked, versions)
        for name in filter(remote.is_http, names):
            remote.watch(name, versions, kept_in)
        splits[split] = [_part(name, column, functools.partial(reader.rows, name, column)) for name in names]
    return None, splits


def _part(name: str, column: Column, values: Callable[[int], Iterator[Any]]) -> Part:
    return name, functools.partial(_read, name, column, values)


def _open_dataset(tables: Tables, column: Column, pinned: str | None) -> tuple[str, dict[str, list[Part]]]:
    """Open the train split of a data set of the Hub at a commit."""
    name = tables.dataset_name
    ask = functools.partial(huggingface_hub.HfApi().dataset_info, timeout=remote.TIMEOUT_SECONDS)
    commit = pinned or retry(name, lambda: ask(name, revision=tables.dataset_revision).sha)
    builder = retry(name, _builder, {"path": name, "name": tables.dataset_config_name, "revision": commit})
    found = {str(split): [str(file) for file in names] for split, names in builder.config.data_files.items()}
    if "train" not in found:
        raise BadInput(f"dataset_name = {name}: has no split train, only {', '.join(found)}")
    kinds = {base.__name__.lower() for base in type(builder).__mro__}  # its own class has the data set's name in it
    reader = next((one for one in READERS if one.name in kinds), None)
    table = None if reader else retry(name, builder.as_streaming_dataset, "train")
    parts = []
    for index, file in enumerate(found["train"]):
        if reader:
            values = functools.partial(reader.rows, file, column, options=builder.config)
        else:
            values = functools.partial(_table_values, table, index, file, column)
        parts.append(_part(file, column, values))
    return commit, {"train": parts}


def expected_text_bytes(names: list[str], text_column: str) -> float:
    """Return about how many bytes of text these files of a data set hold, from the first one and all sizes.

    Parquet's footer knows; of JSON lines or CSV the beginning is read. 0 where a server states no size.
    """
    size = retry(names[0], remote.file_size, names[0])
    if not size:
        return 0.0
    asked = names if len(names) <= SIZES_ASKED else names[:1]
    total = sum(retry(name, remote.file_size, name) for name in asked) * len(names) / len(asked)
    return total / size * retry(names[0], _text_bytes, names[0], text_column, size)


def _text_bytes(name: str, text_column: str, size: int) -> float:
    with remote.open_file(name) as raw:
        if path_of(name).lower().endswith(".parquet"):
            footer = pq.ParquetFile(raw).metadata
            groups = map(footer.row_group, range(footer.num_row_groups))
            columns = (group.column(i) for group in groups for i in range(footer.num_columns))
            return sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_column)
        unpacked = remote.unpacked(name, raw)
        head = unpacked.read(SAMPLE_BYTES)
        share = 1.0 if unpacked is raw else len(head) / max(1, raw.tell())
    with contextlib.suppress(ValueError, AttributeError):  # CSV, or one line longer than the sample: all of it is text
        rows = [files.parse_json(line).get(text_column) or "" for line in head.splitlines()[:-1] or [head]]
        share *= sum(len(text.encode()) for text in rows) / max(1, len(head))
    return size * share


def _builder(arguments: dict) -> datasets.DatasetBuilder:
    try:
        return datasets.load_dataset_builder(**arguments)
    except (ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        if (
            isinstance(error.__cause__ or error.__context__, OSError)
            and http_status_and_retry_after(error, contexts=True)[0] is None
        ):
            raise
        reason = redact(" ".join(str(error).split()))[:400]
        raise BadInput(f"dataset_name = {arguments['path']}: cannot be opened: {reason}") from None


def _read(name: str, column: Column, values: Callable[[int], Iterator[Any]], row: int) -> Iterator[Row]:
    """Yield one file's rows from one on, each once whatever fails; ``values``: as ``Reader.rows`` gives them."""
    policy = RetryPolicy(name, row)
    while True:
        try:
            seen = 0
            for seen, value in enumerate(values(row), 1):
                if seen <= row:
                    continue
                found: Any = None
                if column.holds == IDS:
                    found = records.ids_of(value, row)
                elif isinstance(value, str) and value.strip():
                    found = value
                row += 1
                yield found, True
            if seen < row:
                raise TruncatedError(f"ended after {seen} rows, before row {row}")
            return
        except Exception as error:
            policy.failed(error, row)


def _table_values(table: datasets.IterableDataset, index: int, name: str, column: Column, start: int) -> Iterator[Any]:
    """Yield the column's values as ``datasets`` reads them: also those before ``start``."""
    for found in table.shard(num_shards=table.num_shards, index=index).with_format("arrow").iter(batch_size=ROWS):
        refuse_column(name, column, records.column_types(found.schema))
        yield from records.values_of(found.column(column.name), column)
