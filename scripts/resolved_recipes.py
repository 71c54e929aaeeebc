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
    return keys.to_dict(loading.load_recipe(ROOT / "recipes" / name))


if __name__ == "__main__":
    names = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))
    golden = {name: resolve(name) for name in names}
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n", encoding="utf-8")
