"""A picture of a terminal, as SVG, from the log that a run left.

    python benchmarks/terminal_picture.py runs/quickstart --command "make train" --out docs/quickstart/terminal.svg

The middle of a long log is left out: its first and last lines are shown, each cut to the picture's width.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import html

from pretrain.base.layout import LOG

COLUMNS, FIRST, LAST = 104, 32, 9
SIZE, LINE, CELL = 13, 18, 7.8  # pixels: of the font, a line, a character


def draw(command: str, lines: list[str]) -> str:
    """Return the SVG of a command and the lines that it showed."""
    if len(lines) > FIRST + LAST + 1:
        lines = [*lines[:FIRST], "...", *lines[-LAST:]]
    shown = [
        f"$ {command.removeprefix('$ ')}",
        *(line if len(line) <= COLUMNS else f"{line[: COLUMNS - 3]}..." for line in lines),
    ]
    width, height = round(COLUMNS * CELL) + 32, len(shown) * LINE + 32
    rows = [
        f'<text x="16" y="{24 + LINE * number}" fill="{"#8ec07c" if number == 0 else "#d5d8dc"}" xml:space="preserve" '
        f'textLength="{CELL * len(line):g}" lengthAdjust="spacingAndGlyphs">{html.escape(line, quote=False)}</text>'
        for number, line in enumerate(shown)
    ]
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    style = f'<g font-family="ui-monospace, Menlo, DejaVu Sans Mono, monospace" font-size="{SIZE}">'
    return "\n".join(
        [begin, '<rect width="100%" height="100%" rx="8" fill="#1d2021"/>', style, *rows, "</g>", "</svg>", ""]
    )


def main(argv: list[str] | None = None) -> int:
    """Read the log, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--command", default="make train")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(argv)
    lines = (asked.run / LOG).read_text(encoding="utf-8").splitlines()
    asked.out.write_text(draw(asked.command, lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
