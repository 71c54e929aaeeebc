"""Write notebooks/walkthrough.ipynb from the text and the code of docs/walkthrough.md.

    python scripts/walkthrough_notebook.py

The output that the page shows below its code is left out: the notebook prints its own.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "walkthrough.md"
NOTEBOOK = ROOT / "notebooks" / "walkthrough.ipynb"
# The first cell changes to the root of the repository.
FIRST_CODE = 'from pathlib import Path\n\nif Path("../train.py").exists():\n    %cd -q ..'
RELATIVE_LINK = re.compile(r"\]\((?!https?:)([^)]+)\)")
# A block of code, and the indented lines of its output.
CODE_BLOCK = re.compile(r"```python\n(.*?)\n```\n+(?:    [^\n]*\n)*", re.DOTALL)
METADATA = {
    "kernelspec": {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    },
    "language_info": {"name": "python"},
}


def notebook() -> str:
    """Return the notebook as JSON."""
    page = PAGE.read_text(encoding="utf-8")
    page = RELATIVE_LINK.sub(r"](../docs/\1)", page)
    # The pattern has one group, so text and code alternate.
    title, *parts = CODE_BLOCK.split(page)
    contents = [("markdown", title), ("code", FIRST_CODE)]
    for number, part in enumerate(parts):
        kind = "code" if number % 2 == 0 else "markdown"
        contents.append((kind, part))

    cells = []
    for number, (kind, text) in enumerate(contents):
        if text.strip():
            source = text.strip("\n")
            cells.append(cell(number, kind, source))
    document = {
        "cells": cells,
        "metadata": METADATA,
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    notebook_json = json.dumps(document, indent=1)
    return f"{notebook_json}\n"


def cell(number: int, kind: str, source: str) -> dict:
    """Return a cell without outputs.

    Args:
        number: unique in the notebook.
        kind: code or markdown.
        source: its text.
    """
    contents = {
        "cell_type": kind,
        "id": f"cell-{number}",
        "metadata": {},
    }
    if kind == "code":
        contents["execution_count"] = None
        contents["outputs"] = []
    contents["source"] = source.splitlines(keepends=True)
    return contents


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")
