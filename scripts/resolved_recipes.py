"""Write all recipes with all of their keys to a golden file, which makes a changed default visible.

    python scripts/resolved_recipes.py

tests/recipe/test_resolved_recipes.py compares the file with the recipes.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ursa_minor.recipe import keys, loading  # noqa: E402

GOLDEN = ROOT / "tests" / "recipe" / "resolved_recipes.json"


def resolve(name: str) -> dict:
    """Return all keys and values of a recipe in recipes/."""
    recipe = loading.load_recipe(ROOT / "recipes" / name)
    return keys.to_dict(recipe)


if __name__ == "__main__":
    golden = {}
    for path in (ROOT / "recipes").glob("*.yaml"):
        golden[path.name] = resolve(path.name)
    text = json.dumps(golden, indent=1, sort_keys=True)
    GOLDEN.write_text(f"{text}\n", encoding="utf-8")
