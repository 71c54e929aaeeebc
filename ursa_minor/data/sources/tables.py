"""Read data sets of the Hub and files of tables as documents, one for each row.

``hub_dataset`` resolves a data set of the Hub to files. The readers in ``formats`` read these
files, because they make three promises: after an error, reading continues at the row at which it
occurred; all waits are limited; and a file ends only after its last row.
"""

import logging
import math
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import datasets
import pyarrow.parquet as pq

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import TruncatedError
from ursa_minor.base.retry import retried, retry
from ursa_minor.data.sources import hub_dataset, remote
from ursa_minor.data.sources.columns import IDS, Column, Reader
from ursa_minor.data.sources.files import reader_of
from ursa_minor.data.sources.find import FoundSource, Part, SourceRow
from ursa_minor.recipe.keys import DataSource
from ursa_minor.recipe.source_kind import URL_SCHEMES

PARQUET_SIGNATURE = b"PAR1"  # the first bytes of a Parquet file
CHECKED_FILES = 32  # number of local files whose columns are checked before the first is read
SAMPLE_BYTES = 2**20
SAMPLE_FILES = 64  # number of files whose sizes are queried, to estimate the size of all files


def open_tables(
    source: FoundSource, pinned: str | None, versions: dict[str, dict[str, str]]
) -> tuple[str | None, dict[str, list[Part]]]:
    """Open the tables of a source.

    Args:
        source: files of tables, or a data set of the Hub.
        pinned: the commit of the data set, or None for the current commit.
        versions: the commit of each repository of the files on the Hub. Missing ones are added.

    Returns:
        The commit of the data set, or None for files; and the parts of each split. A file is one
        part.

    Raises:
        BadInput: the data does not exist or may not be read.
        TrainingStopped: all attempts to reach the Hub failed.
    """
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    datasets.disable_progress_bars()
    # The client retries a few times itself and logs a warning each time. This project's handlers
    # format these warnings.
    client_log = logging.getLogger("huggingface_hub")
    client_log.handlers = [*logging.getLogger("ursa_minor").handlers]
    client_log.propagate = False

    config = source.config
    column = Column(config.text_column)
    if config.token_column:
        column = Column(config.token_column, IDS)
    if not source.files:
        dataset = hub_dataset.open_dataset(config, pinned)
        return dataset.commit, {
            split: _parts(names, dataset.reader, column, config)
            for split, names in dataset.files.items()
        }

    splits: dict[str, list[Part]] = {}
    for split, names in source.files.items():
        parts = splits.setdefault(split, [])
        for name in names:
            reader = reader_of(name, config.data_format)
            assert reader is not None  # otherwise this is a source of texts
            file_names = [name]
            if name.startswith("hf://"):
                file_names = retry(name, remote.hub_files, name, versions)
            parts += _parts(file_names, reader, column, config)
    _check_schemas(splits)
    return None, splits


def _check_schemas(splits: dict[str, list[Part]]) -> None:
    """Read the first row of up to ``CHECKED_FILES`` local files, spread over all of them.

    Raises:
        BadInput: files have no column of the right type, or cannot be read. There is a line for
            each of them.
    """
    parts = list(chain.from_iterable(splits.values()))
    local_parts = [part for part in parts if not part[0].startswith(URL_SCHEMES)]
    interval = math.ceil(len(local_parts) / CHECKED_FILES) or 1
    problems: list[str] = []
    text_columns = set()
    for _, read in local_parts[::interval]:
        try:
            next(read(0), None)
        except BadInput as error:
            problems += error.lines
            text_columns.add(error.text_columns)
        else:
            text_columns.add(())
    if problems:
        # Another column can be proposed if it is the same for all files.
        is_same = len(text_columns) == 1
        raise BadInput(problems, text_columns=text_columns.pop() if is_same else ())


def _parts(names: list[str], reader: Reader, column: Column, config: DataSource) -> list[Part]:
    return [
        (name, partial(_read, reader, name, column, config.prepared_data_dir)) for name in names
    ]


def expected_text_bytes(names: list[str], config: DataSource) -> float:
    """Estimate the number of bytes of text in files of a data set.

    The share of the text among the bytes of a file is that of the first file. The metadata of
    Parquet contains it; of other formats the beginning is read. Files behind URLs are assumed to
    have the size of the first file.
    """
    first = _local(names[0], config.prepared_data_dir)
    sizes = [
        retry(name, remote.file_size, name)
        for name in names[:SAMPLE_FILES]
        if not remote.is_http(name)
    ]
    mean_size = sum(sizes) / len(sizes) if sizes else remote.file_size(first)
    text_share = retry(first, _text_share, first, config.text_column)
    return len(names) * mean_size * text_share


def _text_share(name: str, text_column: str) -> float:
    """Return the number of bytes of text in a file, divided by the size of the file.

    It is greater than 1 if the file is compressed.
    """
    with remote.open_file(name) as raw:
        is_parquet = raw.read(len(PARQUET_SIGNATURE)) == PARQUET_SIGNATURE
        raw.seek(0)
        if is_parquet:
            return _parquet_text_bytes(raw, text_column) / remote.file_size(name)
        unpacked = remote.decompress(name, raw)
        sample = unpacked.read(SAMPLE_BYTES)
        expansion = 1.0
        if unpacked is not raw:
            expansion = len(sample) / max(1, raw.tell())
    try:
        text_bytes = _json_lines_text_bytes(sample, text_column)
    except (ValueError, AttributeError):
        # A CSV, or one line that is longer than the sample: count all of it as text.
        return expansion
    return expansion * (text_bytes / max(1, len(sample)))


def _parquet_text_bytes(file: object, text_column: str) -> int:
    metadata = pq.ParquetFile(file).metadata
    text_bytes = 0
    for group_number in range(metadata.num_row_groups):
        group = metadata.row_group(group_number)
        for column_number in range(metadata.num_columns):
            column = group.column(column_number)
            if column.path_in_schema == text_column:
                text_bytes += column.total_uncompressed_size
    return text_bytes


def _json_lines_text_bytes(sample: bytes, text_column: str) -> int:
    """Return the number of bytes of text in the first lines of a file.

    Raises:
        ValueError, AttributeError: a line is not a JSON object, or the field is not a text.
    """
    complete_lines = sample.splitlines()[:-1] or [sample]
    texts = [files.parse_json(line).get(text_column) or "" for line in complete_lines]
    return sum(len(text.encode()) for text in texts)


def _local(name: str, prepared_data_dir: str) -> str:
    """Return the name by which a file can be opened. A file behind a URL is downloaded."""
    if remote.is_http(name):
        copy = remote.copy_of(name, prepared_data_dir)
        retry(name, remote.fetch, name, copy)
        return str(copy)
    if name.startswith("hf://"):
        return name
    return str(Path(name).absolute())


def _read(
    reader: Reader, name: str, column: Column, prepared_data_dir: str, start: int
) -> Iterator[SourceRow]:
    """Yield the rows of a file from row ``start`` on, each once, with retries."""
    file = _local(name, prepared_data_dir)

    def read_from(first_row: int) -> Iterator[SourceRow]:
        num_rows = 0
        for cell in reader.rows(file, column, first_row):
            if num_rows >= first_row:
                yield column.value(cell, num_rows), True
            num_rows += 1
        if num_rows < first_row:
            raise TruncatedError(f"the file ended after {num_rows} rows, before row {first_row}")

    return retried(file, read_from, start)
