"""Parquet: the row groups from that of the wanted row on, and of them the one column."""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

from ursa_minor.base.http import TruncatedError
from ursa_minor.data.sources.columns import ROWS, Column, Reader, arrow_values, check_arrow


def rows(name: str, column: Column, start: int) -> Iterator[Any]:
    """Yield the column's values."""
    import pyarrow.parquet as pq

    from ursa_minor.data.sources import remote

    with remote.open_file(name) as raw:
        # With pre_buffer Arrow keeps all of a file that was read until its end.
        file, row = pq.ParquetFile(raw, pre_buffer=False), 0
        check_arrow(name, column, file.schema_arrow)
        for group in range(file.num_row_groups):
            end = row + file.metadata.row_group(group).num_rows
            if end <= start:
                yield from repeat(None, end - row)
                row = end
                continue
            for batch in file.iter_batches(ROWS, row_groups=[group], columns=[column.name]):
                yield from arrow_values(batch.column(0), column)
                row += len(batch)
            if row != end:
                raise TruncatedError(f"ended after {row} rows, before row {end}")


READER = Reader("parquet", rows)
