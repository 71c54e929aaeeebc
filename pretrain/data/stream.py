"""Documents of a data set of the Hub, or of files of tables, streamed with a cursor: each row once, whatever fails.

A data set of the Hub is found by ``datasets``, which also reads the kinds that have no reader here. What it leaves open
is closed here: a fault is retried from the row it happened at and not from the shuffle buffer's or iterator's own
state, waits have a limit, a file is finished only when its last row was read, and a data set is pinned to a commit.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow.parquet as pq

from pretrain.base import files
from pretrain.base.errors import BadInput
from pretrain.base.foreign import one_line
from pretrain.base.network import TruncatedError
from pretrain.data import remote
from pretrain.data.records import IDS, ROWS, Column, arrow_values, refuse_arrow
from pretrain.data.remote import path_of, retry
from pretrain.data.sources import READERS, FoundSource, Part, Row, reader_of
from pretrain.recipe.keys import Data

SAMPLE_BYTES = 2**20
SIZES_ASKED = 64  # files whose size is asked for; their mean stands for all

# Retries and their messages are those of ``remote``: the client's own waits (5, 20, 60 s, up to 20 times) would hide a
# fault from them.
for _name in [name for name in vars(datasets.config) if name.startswith("STREAMING_")]:
    setattr(datasets.config, _name, int(_name.endswith("MAX_RETRIES")))


def open_tables(
    source: FoundSource, pinned: str | None, versions: dict[str, dict[str, str]]
) -> tuple[str | None, dict[str, list[Part]]]:
    """Open tables for streaming.

    Args:
        pinned: the commit of an earlier contact; None: it is asked for.
        versions: of remote files: the commit that their repository was pinned to, or what the server said of a file
            when it was first read. It is filled in while reading, and another file than that is refused.

    Returns: the commit (None for files) and each split's parts; a file is one part.
    Raises BadInput for what does not exist or may not be read, TrainingStopped when the retries are used up.
    """
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    datasets.disable_progress_bars()
    client = logging.getLogger("huggingface_hub")  # which retries a few times by itself, and warns of it
    client.handlers, client.propagate = [*logging.getLogger("pretrain").handlers], False
    config, splits = source.config, {}
    column = Column(config.token_column, IDS) if config.token_column else Column(config.text_column)
    if not source.files:
        return _open_dataset(config, column, pinned)
    for split, asked in source.files.items():
        parts = splits.setdefault(split, [])
        for name in asked:
            if remote.is_http(name):
                remote.watch(name, versions, str(source.folder))
                found = [name]
            elif name.startswith("hf://"):
                found = retry(name, remote.hub_files, name, versions)
            else:
                found = [str(Path(name).absolute())]
            reader = reader_of(name)
            assert reader is not None  # else it is text
            parts += [(file, partial(_read, reader.rows, file, column, None)) for file in found]
    return None, splits


def _open_dataset(config: Data, column: Column, pinned: str | None) -> tuple[str, dict[str, list[Part]]]:
    """Open the train split of a data set of the Hub at a commit."""
    name = str(config.dataset_name)
    ask = partial(huggingface_hub.HfApi().dataset_info, timeout=remote.TIMEOUT_SECONDS)
    commit = pinned or retry(name, lambda: ask(name, revision=config.dataset_revision).sha)
    builder = retry(name, _builder, name, config.dataset_config_name, commit)
    found = {str(split): [str(file) for file in names] for split, names in builder.config.data_files.items()}
    if "train" not in found:
        raise BadInput(f"dataset_name = {name}: has no split train, only {', '.join(found)}")
    kinds = {base.__name__.lower() for base in type(builder).__mro__}  # its own class has the data set's name in it
    reader = next((one for one in READERS if one.name in kinds), None)
    table = None if reader else retry(name, builder.as_streaming_dataset, "train")
    parts: list[Part] = []
    for index, file in enumerate(found["train"]):
        rows = reader.rows if reader else partial(_table_rows, table, index)
        parts.append((file, partial(_read, rows, file, column, builder.config)))
    return commit, {"train": parts}


def expected_text_bytes(names: list[str], text_column: str) -> float:
    """Return about how many bytes of text these files of a data set hold, from the first one and their sizes.

    Parquet's footer knows; of JSON lines or CSV the beginning is read. 0 where a server states no size.
    """
    sizes = [retry(name, remote.file_size, name) for name in names[:SIZES_ASKED]]
    text_bytes = retry(names[0], _text_bytes, names[0], text_column, sizes[0]) if sizes[0] else 0.0
    return text_bytes / max(1, sizes[0]) * sum(sizes) / len(sizes) * len(names)


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


def _builder(name: str, config: str | None, commit: str) -> datasets.DatasetBuilder:
    try:
        return datasets.load_dataset_builder(name, config, revision=commit)
    except ValueError as error:
        if isinstance(error.__cause__ or error.__context__, OSError):  # of the network
            raise
        raise BadInput(f"dataset_name = {name}: cannot be opened: {one_line(error)[:400]}") from None


def _read(rows: Callable[..., Iterator], name: str, column: Column, options: Any, start: int) -> Iterator[Row]:
    """Yield one file's rows from one on, each once whatever fails; ``rows``: a ``Reader``'s, with the same ``options``."""

    def read(row: int) -> Iterator[Row]:
        seen = 0
        for seen, cell in enumerate(rows(name, column, row, options), 1):
            if seen > row:
                yield column.value(cell, seen - 1), True
        if seen < row:
            raise TruncatedError(f"ended after {seen} rows, before row {row}")

    return remote.retried(name, read, start)


def _table_rows(
    table: datasets.IterableDataset, index: int, name: str, column: Column, start: int, options: Any
) -> Iterator[Any]:
    """Yield the column's values as ``datasets`` reads them: also those before ``start``."""
    for found in table.shard(num_shards=table.num_shards, index=index).with_format("arrow").iter(batch_size=ROWS):
        refuse_arrow(name, column, found.schema)
        yield from arrow_values(found.column(column.name), column)
