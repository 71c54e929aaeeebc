"""Tables: the column that is read, what it holds, and the reader of a format."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import Unreadable

TEXT, IDS = "text", "lists of ids"
ROWS = 256  # rows of a batch


class Column(NamedTuple):
    """Which column of a table is read; ``holds``: text, or lists of ids."""

    name: str
    holds: str = TEXT

    def value(self, cell: Any, row: int) -> Any:
        """Return a row's text, or its ids, (n,) uint32; None where it has none. Raises Unreadable for what holds no ids."""
        if self.holds == TEXT:
            return cell if isinstance(cell, str) and cell.strip() else None
        ids = np.asarray([] if cell is None else cell)
        if not ids.size:
            return None
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 2**32:
            raise Unreadable(
                f"row {row}: is not a list of ids, whole numbers from 0; leave the row out"
            )
        return ids.astype(np.uint32)


@dataclass(frozen=True)
class Reader:
    """A format of tables.

    Attributes:
        name: the builder's name in ``datasets``, and the format's in ``recipe/source_kind.TABLE_FORMATS``.
        rows: (file, column, start) -> what stands in the column, row by row; what is given for those before ``start``
            is ignored. A value that is not text is a row without text. Raises BadInput for a file without the column,
            Unreadable for a row that cannot be read, TruncatedError where the file ends before its end.
    """

    name: str
    rows: Callable[[str, Column, int], Iterator[Any]]


def check_column(name: str, column: Column, types: Mapping[str, str]) -> None:
    """Raise BadInput unless a column holds what it is to hold, or nothing.

    Args:
        types: what each column holds: text, lists of ids, "" for nothing, or what else.
    """
    if (found := types.get(column.name)) in (column.holds, ""):
        return
    key = "text_column" if column.holds == TEXT else "token_column"
    said = "no such column" if found is None else f"holds {found}, not {column.holds}"
    listed = ", ".join(f"{other} ({holds or 'nothing'})" for other, holds in types.items())[:1000]
    raise BadInput(
        f"{name}: {key} = {column.name}: {said}; give one of {column.holds}: it has {listed}"
    )


def arrow_values(cells: Any, column: Column) -> Any:
    """Return the values of Arrow's cells: texts, or arrays of ids."""
    return cells.to_numpy(zero_copy_only=False) if column.holds == IDS else cells.to_pylist()


def check_arrow(name: str, column: Column, schema: Any) -> None:
    """Do as ``check_column`` does for an Arrow schema."""
    types = {}
    for field in schema:
        kind = field.type.value_type if str(field.type).startswith("dictionary") else field.type
        word, held = str(kind), str(getattr(kind, "value_type", ""))  # of a list
        is_text, is_ids = (
            word in ("string", "large_string", "string_view"),
            held.startswith(("int", "uint")),
        )
        types[field.name] = TEXT if is_text else IDS if is_ids else "" if word == "null" else word
    check_column(name, column, types)
