"""Arrow's own files, as a stream or with a footer."""

from collections.abc import Iterator
from typing import Any

from pretrain.data.records import Column, Reader, column_types, refuse_column, values_of


def rows(name: str, column: Column, start: int, options: Any = None) -> Iterator[Any]:
    """Yield the column's values."""
    import pyarrow as pa

    from pretrain.data import remote

    with remote.open_file(name) as raw:
        try:
            file = pa.ipc.open_stream(raw)
            batches = iter(file)
        except pa.ArrowInvalid:
            raw.seek(0)
            file = pa.ipc.open_file(raw)
            batches = map(file.get_batch, range(file.num_record_batches))
        refuse_column(name, column, column_types(file.schema))
        place = file.schema.get_field_index(column.name)
        for batch in batches:
            batch.validate(full=True)
            yield from values_of(batch.column(place), column)


READER = Reader("arrow", (".arrow",), rows, in_places=True)
