"""Arrow IPC files, in the stream format and in the file format with a footer."""

from collections.abc import Iterator
from typing import Any

from ursa_minor.data.sources.columns import Column, Reader, arrow_rows, check_arrow


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
            batch.validate(full=True)
            yield from arrow_rows(batch, column)


READER = Reader("arrow", rows)
