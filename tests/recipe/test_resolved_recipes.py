"""The golden file of all recipes with all of their keys."""

import json

import pytest

from scripts.resolved_recipes import GOLDEN, ROOT, resolve

RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))


def test_golden_file_lists_every_recipe():
    assert sorted(json.loads(GOLDEN.read_text(encoding="utf-8"))) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_resolves_to_its_golden_values(name):
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))[name]
    resolved = json.loads(json.dumps(resolve(name)))
    assert resolved == golden, (
        "if this change is intended, run `make presets` and mention it in CHANGELOG.md"
    )
