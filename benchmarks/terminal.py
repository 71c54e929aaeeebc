"""Record what a command shows in a terminal. ``pictures.py`` draws it as an SVG picture.

    python benchmarks/terminal.py --out benchmarks/results/terminal.txt -- make train

It runs the command in a pseudo-terminal of --columns characters, and writes the command and the
lines that are on the screen at the end. It prints nothing.
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

# Lines shown from the beginning and from the end of a long output.
FIRST = 34
LAST = 9

# Sizes in pixels.
FONT_SIZE = 13
LINE_HEIGHT = 18
CHARACTER_WIDTH = 7.8

BACKGROUND = "#1d2021"
TEXT = "#d5d8dc"
COMMAND = "#8ec07c"
FONT = "ui-monospace, Menlo, DejaVu Sans Mono, monospace"

ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
CONTROL = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|[\r\n])")


class Screen:
    """The lines of a terminal: text, line breaks, carriage returns, and two escape sequences.

    ESC [K erases the rest of the line, and ESC [A moves up by one line. Progress bars use them.
    Other escape sequences are ignored.
    """

    def __init__(self) -> None:
        self.lines = [""]
        self.row = 0
        self.column = 0

    def write(self, text: str) -> None:
        """Show the output of a program."""
        for part in CONTROL.split(text):
            escape = ESCAPE.fullmatch(part)
            if part == "\n":
                self.row += 1
                self.column = 0
                if self.row == len(self.lines):
                    self.lines.append("")
            elif part == "\r":
                self.column = 0
            elif escape:
                self.apply(command=escape[2])
            else:
                self.overwrite(part)

    def apply(self, command: str) -> None:
        """Apply an escape sequence, given by its last letter."""
        if command == "A" and self.row > 0:
            self.row -= 1
        elif command == "K":
            line = self.lines[self.row]
            self.lines[self.row] = line[: self.column]

    def overwrite(self, text: str) -> None:
        """Replace characters from the cursor on."""
        line = self.lines[self.row].ljust(self.column)
        end = self.column + len(text)
        before = line[: self.column]
        after = line[end:]
        self.lines[self.row] = before + text + after
        self.column = end


def record(command: list[str], columns: int) -> list[str]:
    """Run a command in a terminal of this width, and return the lines that it shows at the end."""
    our_end, program_end = pty.openpty()
    window_size = struct.pack("HHHH", 50, columns, 0, 0)  # rows, columns, two unused numbers
    fcntl.ioctl(program_end, termios.TIOCSWINSZ, window_size)
    program = subprocess.Popen(command, stdin=program_end, stdout=program_end, stderr=program_end)
    os.close(program_end)
    output = b""
    # Reading raises OSError after the program has ended.
    with contextlib.suppress(OSError):
        data = os.read(our_end, 65536)
        while data:
            output += data
            data = os.read(our_end, 65536)
    program.wait()
    os.close(our_end)
    screen = Screen()
    screen.write(output.decode("utf-8", "replace"))
    return [line.rstrip() for line in screen.lines]


def draw(recording: str, columns: int = 80) -> str:
    """Return the SVG of a recording. The middle of a long one is left out.

    Args:
        recording: the text that ``main`` has written: ``$``, the command, and its output.
        columns: width in characters. Longer lines are truncated.
    """
    command_line, *lines = recording.rstrip().splitlines()
    if len(lines) > FIRST + LAST + 1:
        lines = [*lines[:FIRST], "...", *lines[-LAST:]]

    shown_lines = [command_line]
    for line in lines:
        if len(line) > columns:
            line = f"{line[: columns - 3]}..."
        shown_lines.append(line)

    width = round(columns * CHARACTER_WIDTH) + 32
    height = len(shown_lines) * LINE_HEIGHT + 32
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">',
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
        f'<g font-family="{FONT}" font-size="{FONT_SIZE}">',
    ]
    for number, line in enumerate(shown_lines):
        y = 24 + LINE_HEIGHT * number
        color = TEXT if number else COMMAND
        text_width = CHARACTER_WIDTH * len(line)
        text = html.escape(line, quote=False)
        elements.append(
            f'<text x="16" y="{y}" fill="{color}" xml:space="preserve" '
            f'textLength="{text_width:g}" lengthAdjust="spacingAndGlyphs">{text}</text>'
        )
    return "\n".join([*elements, "</g>", "</svg>", ""])


def main(argv: list[str] | None = None) -> int:
    """Run the command, write the recording, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command",
        nargs="+",
        help="Command to run, after --.",
    )
    parser.add_argument(
        "--columns",
        type=int,
        metavar="N",
        default=80,
        help="Width of the terminal in characters. Default: %(default)s.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="Text file to write.",
    )
    args = parser.parse_args(argv)
    lines = record(args.command, args.columns)
    command_line = " ".join(args.command)
    recording = "\n".join([f"$ {command_line}", *lines]).rstrip()
    args.out.write_text(f"{recording}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
