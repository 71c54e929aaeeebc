"""Write the tables of docs/knobs.md anew: each key of a recipe, its default and what it does, from pretrain/recipe/keys.py.

python scripts/keys_table.py
"""

import dataclasses
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pretrain.recipe import keys  # noqa: E402

PAGE, MARK = ROOT / "docs" / "knobs.md", "<!-- make presets writes all below -->\n"
MAY_CHANGE = {"science": "", "data": "", "run": "°"}


def tables() -> str:
    """Return a table for each part of a recipe."""
    found = []
    for part in keys.SLICES.values():
        found.append(f"\n### {part.__name__}\n\n| key: default | what it does |\n|---|---|\n")
        for field in dataclasses.fields(part):
            about, absent = field.metadata, field.default is keys.ABSENT
            default = "" if absent else " " + json.dumps(field.default).strip('"')  # as a recipe states it
            words = about["help"].replace("|", "\\|")
            found.append(f"| `{field.name}:{default}`{MAY_CHANGE[about['kind']]} | {words} |\n")
    return "".join(found)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.partition(MARK)[0] + MARK + tables(), encoding="utf-8")
