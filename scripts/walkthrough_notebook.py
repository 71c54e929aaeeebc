"""Write notebooks/walkthrough.ipynb from docs/walkthrough.md: its text, and its code without what it prints.

python scripts/walkthrough_notebook.py
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, NOTEBOOK = ROOT / "docs" / "walkthrough.md", ROOT / "notebooks" / "walkthrough.ipynb"
BEGIN = 'from pathlib import Path\n\nif Path("../train.py").exists():\n    %cd -q ..'
LINK = re.compile(r"\]\((?!https?:)([^)]+)\)")
STEP = re.compile(r"```python\n(.*?)\n```\n+(?:    [^\n]*\n)*", re.DOTALL)


def notebook() -> str:
    """Return the notebook as JSON."""
    title, *parts = STEP.split(LINK.sub(r"](../docs/\1)", PAGE.read_text(encoding="utf-8")))
    cells = [("markdown", title), ("code", BEGIN)]
    cells += [
        ("code" if number % 2 == 0 else "markdown", part) for number, part in enumerate(parts)
    ]
    made = [
        cell(number, kind, text.strip("\n"))
        for number, (kind, text) in enumerate(cells)
        if text.strip()
    ]
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    about |= {"language_info": {"name": "python"}}
    return (
        json.dumps({"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}, indent=1)
        + "\n"
    )


def cell(number: int, kind: str, text: str) -> dict:
    """Return a cell, empty of outputs."""
    more = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {
        "cell_type": kind,
        "id": f"cell-{number}",
        "metadata": {},
        **more,
        "source": text.splitlines(keepends=True),
    }


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")
