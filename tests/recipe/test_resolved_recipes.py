"""The file with all keys of all recipes, which shows each change of a default in a diff."""

import json

import pytest

from scripts.resolved_recipes import GOLDEN, ROOT, resolve

RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def golden_values():
    """Return the expected values of all recipes."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_golden_file_lists_every_recipe(golden_values):
    assert sorted(golden_values) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_resolves_to_its_golden_values(name, golden_values):
    resolved = json.loads(json.dumps(resolve(name)))

    assert resolved == golden_values[name], (
        "if this change is intended, run `make presets` and mention it in CHANGELOG.md"
    )
