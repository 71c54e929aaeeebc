"""A picture of a terminal, as SVG: what a command shows at a width.

    python benchmarks/terminal_picture.py --columns 80 --out docs/quickstart/terminal.svg -- make train

The middle of a long screen is left out.
"""

import argparse
import contextlib
import fcntl
import html
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

FIRST, LAST = 34, 9
SIZE, LINE, CELL = 13, 18, 7.8  # pixels: of the font, a line, a character
BACK, TEXT, COMMAND = "#1d2021", "#d5d8dc", "#8ec07c"
ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


class Screen:
    """What a terminal shows of the bytes that a program wrote: lines, carriage returns, and the escapes of a bar."""

    def __init__(self) -> None:
        self.lines, self.row, self.column = [""], 0, 0

    def write(self, text: str) -> None:
        """Show text, which may hold ESC [K (erase the rest of the line), ESC [A (a line up); other escapes are skipped."""
        for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|[\r\n])", text):
            if part == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part == "\r":
                self.column = 0
            elif escape := ESCAPE.fullmatch(part):
                self.row -= escape[2] == "A" and self.row > 0
                if escape[2] == "K":
                    self.lines[self.row] = self.lines[self.row][: self.column]
            else:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + part + line[self.column + len(part) :]
                self.column += len(part)


def record(command: list[str], columns: int) -> list[str]:
    """Run a command on a terminal of so many columns and return the lines on it at the end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    program = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    screen, left = Screen(), b""
    with contextlib.suppress(OSError):  # what reading raises once the program has ended
        while data := os.read(ours, 65536):
            *whole, left = re.split(rb"(?<=[\r\n])", left + data)
            screen.write(b"".join(whole).decode("utf-8", "replace"))
    program.wait()
    os.close(ours)
    return [line.rstrip() for line in screen.lines]


def draw(command: str, lines: list[str], columns: int = 80) -> str:
    """Return the SVG of a command and the lines that it showed, each cut to the width."""
    while lines and not lines[-1]:
        lines = lines[:-1]
    if len(lines) > FIRST + LAST + 1:
        lines = [*lines[:FIRST], "...", *lines[-LAST:]]
    shown = [
        f"$ {command}",
        *(line if len(line) <= columns else f"{line[: columns - 3]}..." for line in lines),
    ]
    width, height = round(columns * CELL) + 32, len(shown) * LINE + 32
    rows = [
        f'<text x="16" y="{24 + LINE * number}" fill="{TEXT if number else COMMAND}" xml:space="preserve" '
        f'textLength="{CELL * len(line):g}" lengthAdjust="spacingAndGlyphs">{html.escape(line, quote=False)}</text>'
        for number, line in enumerate(shown)
    ]
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    style = f'<g font-family="ui-monospace, Menlo, DejaVu Sans Mono, monospace" font-size="{SIZE}">'
    ground = f'<rect width="100%" height="100%" rx="8" fill="{BACK}"/>'
    return "\n".join([begin, ground, style, *rows, "</g>", "</svg>", ""])


def main(argv: list[str] | None = None) -> int:
    """Run the command, write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="+")
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    lines = record(args.command, args.columns)
    args.out.write_text(draw(" ".join(args.command), lines, args.columns), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
