"""The commands of recipes/README.md: the runs that need no recipe file of their own, and published settings."""

import json
import re
import shlex

import pytest
import yaml
from conftest import ROOT

import check_setup
from ursa_minor.recipe import command_line, keys
from ursa_minor.recipe.batching import make_plan

README = (ROOT / "recipes/README.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", README, flags=re.MULTILINE)


def commands_of(title):
    """Return the rows of a section's table that have a command: the cells, with the command as words."""
    (section,) = [section for section in SECTIONS if section.startswith(title)]
    rows = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        commands = [cell for cell in cells if cell.startswith("`")]
        if commands:
            rows.append((cells, shlex.split(commands[0].strip("`"))))
    return rows


def recipe_of(words):
    recipe, _, _ = command_line.parse_training(words[words.index("train.py") + 1 :])
    return recipe


VARIANT_ROWS = {words[-1]: (cells, words) for cells, words in commands_of("Variants")}
PUBLISHED_ROWS = {words[-1]: (cells, words) for cells, words in commands_of("Published")}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_every_row_of_both_tables_has_a_command():
    assert len(VARIANT_ROWS) == 7
    assert len(PUBLISHED_ROWS) == 9


@pytest.mark.parametrize("name", VARIANT_ROWS)
def test_hours_of_a_variant_are_the_estimates(name, tmp_path, capsys):
    cells, words = VARIANT_ROWS[name]
    assert words[:2] == ["python", "train.py"]
    path = tmp_path / "variant.yaml"
    path.write_text(keys.as_yaml(recipe_of(words)))
    estimate = ["--estimate", "--json", "--recipe", str(path), "--reader_tokens_per_second", "1e9"]
    for entry in cells[-1].split(", "):
        card, _, hours = entry.partition(": ")
        assert check_setup.main([*estimate, "--card", card]) == 0
        row = json.loads(capsys.readouterr().out)
        decimals = len(hours.partition(".")[2])
        assert f"{row['hours']:.{decimals}f}" == hours, card


@pytest.mark.parametrize("name", PUBLISHED_ROWS)
def test_published_micro_batch_is_used_exactly(name):
    cells, words = PUBLISHED_ROWS[name]
    recipe = recipe_of(words)
    processes = 1
    if "--config_file" in words:
        launch = yaml.safe_load((ROOT / words[words.index("--config_file") + 1]).read_text())
        processes = launch["num_processes"]
    plan = make_plan(recipe, processes)
    published = re.search(r"batch (\d+)(?: x (\d+))?", cells[1])
    assert plan.per_device_train_batch_size == int(published[1])
    if published[2]:
        assert plan.gradient_accumulation_steps == int(published[2])
    context = re.search(r"context ([\d,]+)", cells[1])
    assert recipe.model.sequence_length == int(context[1].replace(",", ""))
