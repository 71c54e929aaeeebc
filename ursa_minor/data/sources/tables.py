"""Documents of a data set of the Hub, or of files of tables, streamed with a cursor: each row once, whatever fails.

A data set of the Hub is found by ``datasets``, and pinned to a commit. Its files are read by the readers here: a problem is
retried from the row it happened at, waits have a limit, and a file is finished only when its last row was read.
"""

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow.parquet as pq
from datasets.packaged_modules.csv.csv import CsvConfig

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import TruncatedError
from ursa_minor.base.retry import retried, retry
from ursa_minor.data.sources import remote
from ursa_minor.data.sources.columns import IDS, Column, Reader
from ursa_minor.data.sources.files import READERS, reader_of
from ursa_minor.data.sources.find import FoundSource, Part, SourceRow
from ursa_minor.recipe.keys import DataSource
from ursa_minor.recipe.source_kind import path_of

SAMPLE_BYTES = 2**20
SIZES_ASKED = 64  # files whose size is asked for; their mean stands for all


def open_tables(
    source: FoundSource, pinned: str | None, versions: dict[str, dict[str, str]]
) -> tuple[str | None, dict[str, list[Part]]]:
    """Open tables for streaming.

    Args:
        pinned: the commit of an earlier contact; None: it is asked for.
        versions: of files on the Hub: the commit that their repository was pinned to; it is filled in.

    Returns: the commit (None for files) and each split's parts; a file is one part.
    Raises BadInput for what does not exist or may not be read, TrainingStopped when the retries are used up.
    """
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    datasets.disable_progress_bars()
    # This client retries a few times and logs a warning each time.
    client = logging.getLogger("huggingface_hub")
    client.handlers, client.propagate = [*logging.getLogger("ursa_minor").handlers], False
    config, splits = source.config, {}
    column = Column(config.token_column, IDS) if config.token_column else Column(config.text_column)
    if not source.files:
        return _open_dataset(config, column, pinned)
    for split, asked in source.files.items():
        parts = splits.setdefault(split, [])
        for name in asked:
            reader, found = reader_of(name), [name]
            assert reader is not None  # else it is text
            if name.startswith("hf://"):
                found = retry(name, remote.hub_files, name, versions)
            parts += [
                (file, partial(_read, reader, file, column, config.prepared_data_dir))
                for file in found
            ]
    return None, splits


def _open_dataset(
    config: DataSource, column: Column, pinned: str | None
) -> tuple[str, dict[str, list[Part]]]:
    """Open the train split of a data set of the Hub at a commit."""
    name = str(config.dataset_name)
    ask = partial(huggingface_hub.HfApi().dataset_info, timeout=remote.TIMEOUT_SECONDS)
    commit = pinned or retry(name, lambda: ask(name, revision=config.dataset_revision).sha)
    builder = retry(
        name,
        lambda: datasets.load_dataset_builder(name, config.dataset_config_name, revision=commit),
    )
    found = {
        str(split): [str(file) for file in names]
        for split, names in builder.config.data_files.items()
    }
    if "train" not in found:
        raise BadInput(f"dataset_name = {name}: has no split train, only {', '.join(found)}")
    # The name of its class contains the name of the data set.
    kinds = {base.__name__.lower() for base in type(builder).__mro__}
    reader = next((one for one in READERS if one.name in kinds), None)
    options = getattr(builder.config, "pd_read_csv_kwargs", None)
    if reader is None or options not in (None, CsvConfig().pd_read_csv_kwargs):
        raise BadInput(
            f"dataset_name = {name}: holds no Parquet, JSON lines, Arrow or plain CSV; try the Hub's own conversion: "
            f"--dataset_revision refs/convert/parquet"
        )
    kept = config.prepared_data_dir
    return commit, {
        "train": [(file, partial(_read, reader, file, column, kept)) for file in found["train"]]
    }


def expected_text_bytes(names: list[str], config: DataSource) -> float:
    """Return about how many bytes of text files of a data set hold: of the first one's bytes so many are text.

    Parquet's footer states that; of JSON lines or CSV the beginning is read. What is behind URLs is as large as the first.
    """
    first = _local(names[0], config.prepared_data_dir)
    sizes = [
        retry(name, remote.file_size, name)
        for name in names[:SIZES_ASKED]
        if not remote.is_http(name)
    ]
    mean = sum(sizes) / len(sizes) if sizes else remote.file_size(first)
    return len(names) * mean * retry(first, _text_share, first, config.text_column)


def _text_share(name: str, text_column: str) -> float:
    with remote.open_file(name) as raw:
        if path_of(name).lower().endswith(".parquet"):
            footer = pq.ParquetFile(raw).metadata
            groups = map(footer.row_group, range(footer.num_row_groups))
            columns = (group.column(i) for group in groups for i in range(footer.num_columns))
            text_bytes = sum(
                c.total_uncompressed_size for c in columns if c.path_in_schema == text_column
            )
            return text_bytes / remote.file_size(name)
        unpacked = remote.unpacked(name, raw)
        head = unpacked.read(SAMPLE_BYTES)
        share = 1.0 if unpacked is raw else len(head) / max(1, raw.tell())
    # For CSV, or if one line exceeds the sample, count all of it as text.
    with contextlib.suppress(ValueError, AttributeError):
        rows = [
            files.parse_json(line).get(text_column) or ""
            for line in head.splitlines()[:-1] or [head]
        ]
        share *= sum(len(text.encode()) for text in rows) / max(1, len(head))
    return share


def _local(name: str, prepared_data_dir: str) -> str:
    """Return the name of a file that is here or on the Hub: what is behind a URL is fetched."""
    if remote.is_http(name):
        copy = remote.copy_of(name, prepared_data_dir)
        retry(name, remote.fetch, name, copy)
        return str(copy)
    return name if name.startswith("hf://") else str(Path(name).absolute())


def _read(
    reader: Reader, name: str, column: Column, prepared_data_dir: str, start: int
) -> Iterator[SourceRow]:
    """Yield one file's rows from one on, each once whatever fails."""
    file = _local(name, prepared_data_dir)

    def read(row: int) -> Iterator[SourceRow]:
        seen = 0
        for seen, cell in enumerate(reader.rows(file, column, row), 1):
            if seen > row:
                yield column.value(cell, seen - 1), True
        if seen < row:
            raise TruncatedError(f"ended after {seen} rows, before row {row}")

    return retried(file, read, start)
