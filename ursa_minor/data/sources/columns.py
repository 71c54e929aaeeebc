"""The column of a table that is read, its type, and the reader of a file format."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import Unreadable

# The types of a column that can be read. Messages contain these names.
TEXT = "text"
IDS = "lists of ids"
ARROW_TEXT_TYPES = ("string", "large_string", "string_view")
ARROW_JSON = "extension<arrow.json>"
MASK_COLUMN = "attention_mask"  # as Transformers' tokenizers name it
BATCH_ROWS = 256
# The types of JSON values other than null. bool is first, because it is a subclass of int.
VALUE_TYPES = {
    bool: "booleans",
    str: TEXT,
    int: "numbers",
    float: "numbers",
    list: "lists",
    dict: "objects",
}
MAX_LISTED_CHARACTERS = 1000  # maximum length of the list of columns in a message


class NoText(NamedTuple):
    """A row without text.

    Attributes:
        contents: a short description of the contents of the row, such as "numbers".
    """

    contents: str


class MaskedIds(NamedTuple):
    """The ids of a row, and which of them are not padding.

    Attributes:
        ids: list or array of ids.
        mask: list or array with 0 for padding and 1 for other ids.
    """

    ids: Any
    mask: Any


class Column(NamedTuple):
    """The column of a table that is read.

    Attributes:
        name: name of the column, or of the field of a JSON object.
        type: ``TEXT``, or ``IDS`` for data that is tokenized already.
    """

    name: str
    type: str = TEXT

    def value(self, cell: Any, row: int) -> Any:
        """Convert a cell of this column to a text or to token ids.

        Args:
            cell: the value that the reader of the file format yields.
            row: number of the row, which an error names.

        Returns:
            A string or an array of shape (tokens,) uint32, or NoText if the cell is empty, or is
            not a string in a column of text.

        Raises:
            Unreadable: the cell of a column of ids is not a list of ids, or its mask does not fit.
        """
        if isinstance(cell, NoText):
            return cell
        if cell is None:
            return NoText("null")
        if self.type == TEXT:
            has_text = isinstance(cell, str) and cell.strip()
            return cell if has_text else NoText(_contents_without_text(cell))

        mask = None
        if isinstance(cell, MaskedIds):
            cell, mask = cell
        if cell is None:
            return NoText("null")
        ids = np.asarray(cell)
        if mask is not None:
            ids = ids[_is_token(mask, ids, row)]
        if not ids.size:
            return NoText("empty values")
        are_integers = ids.ndim == 1 and ids.dtype.kind in "iu"
        if not are_integers or ids.min() < 0 or ids.max() >= 2**32:
            raise Unreadable(
                f"row {row} is not a list of ids (integers from 0 to 2**32 - 1). "
                f"Correct or remove this row"
            )
        return ids.astype(np.uint32)


def _contents_without_text(cell: Any) -> str:
    """Describe a cell of a column of text that contains no text."""
    if isinstance(cell, str):
        return "white space" if cell else "empty values"
    for value_type, description in VALUE_TYPES.items():
        if isinstance(cell, value_type):
            return description
    return type(cell).__name__


def _is_token(mask: Any, ids: np.ndarray, row: int) -> np.ndarray:
    """Return for each id of a row whether it is not padding, (tokens,) bool.

    Args:
        mask: the value of ``MASK_COLUMN``. Padding has 0. Some programs write the number of the
            document instead of 1.
        ids: (tokens,) the ids of the row.
        row: number of the row, for the message.

    Raises:
        Unreadable: the mask is not a list of as many non-negative numbers.
    """
    values = np.asarray(mask)
    are_numbers = values.shape == ids.shape and values.dtype.kind in "biuf"
    if not are_numbers or (values.size and values.min() < 0):
        raise Unreadable(
            f"row {row}: {MASK_COLUMN} is not a list of {ids.size} numbers of 0 or more, one for "
            f"each id. Correct or remove this row"
        )
    return values != 0


@dataclass(frozen=True)
class Reader:
    """A file format of tables.

    Attributes:
        name: name of the builder in ``datasets``, and of the format in
            ``recipe/source_kind.TABLE_FORMATS``.
        rows: yields the cells of a column. Its arguments are the file, the column and the number
            of the first row that is needed. It yields one value for each row of the file; those
            before the first row are ignored, so it may yield None for them. A value that is not a
            string represents a row without text; it may be NoText. The function raises BadInput
            if the file has no such column, Unreadable for a row that cannot be parsed, and
            TruncatedError if the file ends too early.
    """

    name: str
    rows: Callable[[str, Column, int], Iterator[Any]]


def check_column(name: str, column: Column, types: Mapping[str, str]) -> None:
    """Check that a table has a column, and that the column is of the right type or empty.

    Args:
        name: the file, which an error names.
        types: the type of each column of the table: ``TEXT``, ``IDS``, the name of another type,
            or "" if the column is empty.

    Raises:
        BadInput: the column is missing or is of another type.
    """
    column_type = types.get(column.name)
    if column_type in (column.type, ""):
        return

    key = "text_column" if column.type == TEXT else "token_column"
    problem = f"{name} has no column {column.name!r}"
    if column_type == ARROW_JSON:
        raise BadInput(_json_column(name, column))
    if column_type is not None:
        problem = f"{name}: the column {column.name!r} contains {column_type}, not {column.type}"
    columns = [f"{other} ({other_type or 'empty'})" for other, other_type in types.items()]
    listed = ", ".join(columns)[:MAX_LISTED_CHARACTERS] or "none"
    text_columns: list[str] = []
    if column_type is None and column.type == TEXT:
        text_columns = [other for other, other_type in types.items() if other_type == TEXT]
    raise BadInput(
        f"{problem}. Choose a column that contains {column.type} with --{key}. "
        f"The columns of this file are: {listed}",
        text_columns=text_columns,
    )


def _json_column(name: str, column: Column) -> str:
    """Return the message for a column of DuckDB's type JSON, which contains texts in quotes."""
    quoted_column = '"' + column.name.replace('"', '""') + '"'
    query = (
        f"COPY (SELECT * REPLACE ({quoted_column} ->> '$' AS {quoted_column}) FROM '{name}') "
        f"TO 'new.parquet'"
    )
    return (
        f"{name}: the column {column.name!r} has the type JSON, as DuckDB writes it if not every "
        f"value is a text. Its texts are in quotation marks. Convert it to text with DuckDB: "
        f"{query}"
    )


def arrow_values(cells: Any, column: Column) -> Any:
    """Return the values of an Arrow array: strings, or an array of ids for each row."""
    if column.type == IDS:
        return cells.to_numpy(zero_copy_only=False)
    try:
        return cells.to_pylist()
    except UnicodeDecodeError:
        # One by one, so that the error occurs at the row that is not UTF-8.
        return (cell.as_py() for cell in cells)


def names_to_read(column: Column, names: list[str]) -> list[str]:
    """Return the columns of a table that are read: the column, and the mask of its ids, if any."""
    has_mask = column.type == IDS and MASK_COLUMN in names
    return [column.name, MASK_COLUMN] if has_mask else [column.name]


def arrow_rows(batch: Any, column: Column) -> Iterator[Any]:
    """Yield the value of a column for each row of an Arrow record batch.

    Args:
        batch: a batch with the columns of ``names_to_read``.
    """
    values = arrow_values(batch.column(column.name), column)
    if len(names_to_read(column, batch.schema.names)) == 1:
        yield from values
        return
    masks = arrow_values(batch.column(MASK_COLUMN), column)
    for ids, mask in zip(values, masks, strict=True):
        yield MaskedIds(ids, mask)


def check_arrow(name: str, column: Column, schema: Any) -> None:
    """Check the column of a file with an Arrow schema. See ``check_column``."""
    types = {field.name: _type_of_arrow(field.type) for field in schema}
    check_column(name, column, types)


def _type_of_arrow(arrow_type: Any) -> str:
    """Convert a type of Arrow to the type of a column (see ``check_column``)."""
    if str(arrow_type).startswith("dictionary"):
        arrow_type = arrow_type.value_type
    type_name = str(arrow_type)
    element_type = str(getattr(arrow_type, "value_type", ""))  # type of the elements of a list
    if type_name in ARROW_TEXT_TYPES:
        return TEXT
    if element_type.startswith(("int", "uint")):
        return IDS
    return "" if type_name == "null" else type_name
