"""Write the tables of docs/configuration.md from ursa_minor/recipe/keys.py.

Each table lists the keys of one section of a recipe. For each key it states the default, the
purpose, the conditions under which it has an effect, and what overrides it.

    python scripts/keys_table.py
"""

import dataclasses
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ursa_minor.recipe import keys  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"
MARK = "<!-- make presets writes all below -->\n"
HEADER = "| key: default | purpose | has an effect if | is overridden by |\n|---|---|---|---|\n"
OTHER_SOURCE = "another data source as a flag"
SHAPE = ("n_layer", "n_head", "n_embd")
SCALED = ("max_steps", "warmup_steps")
LENGTH = ("max_steps", "num_train_epochs")
EITHER_LENGTH = "`--max_steps` or `--num_train_epochs`, whichever is given"


def tables() -> str:
    """Return a table for each section of a recipe."""
    parts = []
    for section in keys.SECTIONS.values():
        parts.append(f"\n### {section.__name__}\n\n{HEADER}")
        for field in dataclasses.fields(section):
            parts.append(row(field))
    return "".join(parts)


def row(field: dataclasses.Field) -> str:
    """Return the row of one key."""
    metadata = field.metadata
    default = ""
    if field.default is not keys.ABSENT:
        written_default = json.dumps(field.default).strip('"')  # as in a recipe
        default = f" {written_default}"
    may_change = "°" if metadata["kind"] == "runtime" else ""
    conditions = [condition.describe() for condition in metadata["effect"]]
    cells = [
        f"`{field.name}:{default}`{may_change}",
        metadata["help"].replace("|", "\\|"),
        " and ".join(conditions),
        ", ".join(overridden_by(field.name)),
    ]
    joined_cells = " | ".join(cells)
    return f"| {joined_cells} |\n"


def overridden_by(name: str) -> list[str]:
    """Return the flags and keys that override a key of the recipe."""
    overrides = []
    if name in keys.SOURCE_KEYS:
        overrides.append(OTHER_SOURCE)
    if name in keys.REPLACED_BY_INIT_FROM:
        overrides.append("`--init_from`")
    if name in (*SHAPE, *SCALED, "learning_rate", "tokens_per_step"):
        overrides.append("`--size`")
    if name in (*LENGTH, *SCALED):
        overrides.append("`max_hours`")
    if name in LENGTH:
        overrides.append("`--extend_steps`")
        overrides.append(EITHER_LENGTH)
    return overrides


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, _, _ = text.partition(MARK)
    PAGE.write_text(before + MARK + tables(), encoding="utf-8")
