"""Write the tables of docs/knobs.md from the keys in ursa_minor/recipe/keys.py.

    python scripts/keys_table.py

There is one table for each section of a recipe, with a row for each key: its default, its purpose,
when it has an effect, and what overrides it.
"""

import dataclasses
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ursa_minor.recipe import keys  # noqa: E402

PAGE = ROOT / "docs" / "knobs.md"
MARK = "<!-- make presets writes all below -->\n"
HEADER = (
    "| key: default | what it does | has an effect if | is overridden by |\n|---|---|---|---|\n"
)
# Keys that --size sets. The length is also set by max_hours.
SHAPE_KEYS = ("n_layer", "n_head", "n_embd")
LENGTH_KEYS = ("max_steps", "warmup_steps")
SIZE_KEYS = (*SHAPE_KEYS, *LENGTH_KEYS, "learning_rate", "tokens_per_step")


def tables() -> str:
    """Return the tables of all sections in Markdown."""
    parts = []
    for section in keys.SECTIONS.values():
        parts.append(f"\n### {section.__name__}\n\n{HEADER}")
        parts += [row(field) for field in dataclasses.fields(section)]
    return "".join(parts)


def row(field: dataclasses.Field) -> str:
    """Return the row of one key."""
    metadata = field.metadata
    default = ""
    if field.default is not keys.ABSENT:
        default = " " + json.dumps(field.default).strip('"')  # as a recipe states it
    # The page explains this mark: the key may change when a run is resumed.
    may_change = "°" if metadata["kind"] == "run" else ""
    purpose = metadata["help"].replace("|", "\\|")
    conditions = " and ".join(condition.describe() for condition in metadata["effect"])
    overrides = ", ".join(overridden_by(field.name))
    return f"| `{field.name}:{default}`{may_change} | {purpose} | {conditions} | {overrides} |\n"


def overridden_by(name: str) -> list[str]:
    """Return the flags and keys that override a key of the recipe."""
    overrides = []
    if name in keys.SOURCE_KEYS:
        overrides.append("another data source as a flag")
    if name in keys.REPLACED_BY_INIT_FROM:
        overrides.append("`--init_from`")
    if name in SIZE_KEYS:
        overrides.append("`--size`")
    if name in LENGTH_KEYS:
        overrides.append("`max_hours`")
    if name == "max_steps":
        overrides.append("`--extend_steps`")
    return overrides


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    introduction = text.partition(MARK)[0]
    PAGE.write_text(introduction + MARK + tables(), encoding="utf-8")
