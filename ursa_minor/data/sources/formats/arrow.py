"""Arrow IPC files, in the stream format and in the file format with a footer."""

from collections.abc import Iterator
from typing import Any

from ursa_minor.data.sources.columns import (
    TEXT,
    Column,
    Reader,
    arrow_rows,
    check_arrow,
    names_to_read,
)


def rows(name: str, column: Column, start: int) -> Iterator[Any]:
    """Yield the values of a column (see ``Reader.rows``)."""
    import pyarrow as pa

    from ursa_minor.data.sources import remote

    with remote.open_file(name) as raw:
        if remote.is_empty(raw):
            return
        try:
            file = pa.ipc.open_stream(raw)
            batches = iter(file)
        except pa.ArrowInvalid:
            raw.seek(0)
            file = pa.ipc.open_file(raw)
            batches = map(file.get_batch, range(file.num_record_batches))
        check_arrow(name, column, file.schema)
        for batch in batches:
            yield from arrow_rows(_validated(batch, column), column)


def _validated(batch: Any, column: Column) -> Any:
    """Check a record batch. A text that is not UTF-8 is reported when its row is read.

    Raises:
        pyarrow.ArrowInvalid: the batch is damaged.
    """
    import pyarrow as pa

    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        # The offsets of a column are checked before its texts.
        batch = batch.select(names_to_read(column, batch.schema.names))
        batch.validate()
        if column.type != TEXT or "UTF8" not in str(error):
            raise
    return batch


READER = Reader("arrow", rows)
