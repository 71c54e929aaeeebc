"""Parquet: read one column without the row groups that end before the first row.

The attention mask of a column of ids is read as well.
"""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

from ursa_minor.base.http import TruncatedError
from ursa_minor.data.sources.columns import (
    BATCH_ROWS,
    Column,
    Reader,
    arrow_rows,
    check_arrow,
    names_to_read,
)


def rows(name: str, column: Column, start: int) -> Iterator[Any]:
    """Yield the values of a column (see ``Reader.rows``)."""
    import pyarrow.parquet as pq

    from ursa_minor.data.sources import remote

    with remote.open_file(name) as raw:
        if remote.is_empty(raw):
            return
        # With pre_buffer, Arrow keeps all bytes that it has read until the file is closed.
        file = pq.ParquetFile(raw, pre_buffer=False)
        check_arrow(name, column, file.schema_arrow)
        columns = names_to_read(column, file.schema_arrow.names)
        row = 0
        for group in range(file.num_row_groups):
            end = row + file.metadata.row_group(group).num_rows
            if end <= start:
                yield from repeat(None, end - row)
                row = end
                continue
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns):
                yield from arrow_rows(batch, column)
                row += len(batch)
            if row != end:
                raise TruncatedError(f"the file ended after {row} rows, before row {end}")


READER = Reader("parquet", rows)
