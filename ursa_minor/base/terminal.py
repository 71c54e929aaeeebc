"""Fit text and tables into the width of a terminal."""

import os
import textwrap
from collections.abc import Sequence
from typing import TextIO

DEFAULT_WIDTH = 80  # columns of text that is not written to a terminal
COLUMN_GAP = "  "


def width_of(stream: TextIO) -> int | None:
    """Return the columns of the terminal that a stream is written to, or None without a terminal.

    The environment variable COLUMNS takes precedence.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def wrap(text: str, width: int | None, first_indent: str = "", indent: str = "") -> str:
    """Break the lines of a text between words. A word that is longer than a line stays whole.

    Args:
        text: one or more lines.
        width: columns of a line, or None to break no line.
        first_indent: is inserted before each line of the text.
        indent: is inserted before its continuation lines.
    """
    wrapped_lines = []
    for line in text.split("\n"):
        if width is None or len(first_indent) + len(line) <= width:
            wrapped_lines.append(first_indent + line)
            continue
        wrapped_lines += textwrap.wrap(
            line,
            width,
            initial_indent=first_indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(wrapped_lines)


def align(
    rows: Sequence[Sequence[str]], width: int | None, *, numbers_right: bool = False
) -> list[str]:
    """Return the lines of a table.

    Columns that do not fit into the width continue in blocks below the first one, as pandas prints
    them. Each block begins with the first column.

    Args:
        rows: the cells. Each row has the same number of them.
        width: columns of the terminal, or None to divide no table.
        numbers_right: align all columns but the first to the right.
    """
    cell_widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for block in _divide_columns(cell_widths, width):
        if lines:
            lines.append("")
        for row in rows:
            cells = [row[0].ljust(cell_widths[0])]
            for column in block:
                cell = row[column]
                cell_width = cell_widths[column]
                cells.append(cell.rjust(cell_width) if numbers_right else cell.ljust(cell_width))
            lines.append(COLUMN_GAP.join(cells).rstrip())
    return lines


def _divide_columns(cell_widths: Sequence[int], width: int | None) -> list[list[int]]:
    """Return the numbers of the columns of each block, without the first column, which is 0."""
    blocks: list[list[int]] = [[]]
    block_width = cell_widths[0]
    for column, cell_width in enumerate(cell_widths[1:], 1):
        needed = len(COLUMN_GAP) + cell_width
        if width is not None and blocks[-1] and block_width + needed > width:
            blocks.append([])
            block_width = cell_widths[0]
        blocks[-1].append(column)
        block_width += needed
    return blocks
