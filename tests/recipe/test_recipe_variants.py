"""The commands and figures in the tables of recipes/README.md."""

import json
import re
import shlex
from typing import NamedTuple

import pytest
import yaml
from conftest import ROOT

import check_setup
from ursa_minor.recipe import command_line, keys
from ursa_minor.recipe.batching import make_plan

README = (ROOT / "recipes/README.md").read_text(encoding="utf-8")


class Row(NamedTuple):
    """A row of a table: its cells, and the words of its command."""

    cells: list[str]
    words: list[str]


def read_rows(title):
    """Return the rows with a command in the section with this title, by the command's last word."""
    sections = re.split(r"^## ", README, flags=re.MULTILINE)
    (section,) = [section for section in sections if section.startswith(title)]
    rows = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        commands = [cell for cell in cells if cell.startswith("`")]
        if commands:
            words = shlex.split(commands[0].strip("`"))
            rows[words[-1]] = Row(cells, words)
    return rows


def parse_recipe(words):
    """Return the recipe of a command that runs train.py."""
    arguments = words[words.index("train.py") + 1 :]
    recipe, _, _ = command_line.parse_training(arguments)
    return recipe


def process_count(words):
    """Return the number of processes of a command."""
    if "--config_file" not in words:
        return 1
    path = ROOT / words[words.index("--config_file") + 1]
    return yaml.safe_load(path.read_text())["num_processes"]


VARIANTS = read_rows("Variants")
PUBLISHED = read_rows("Published")


@pytest.fixture(autouse=True)
def repository_folder(monkeypatch):
    """Work in the repository, where the commands are run."""
    monkeypatch.chdir(ROOT)


def test_every_row_of_both_tables_has_a_command():
    assert len(VARIANTS) == 7
    assert len(PUBLISHED) == 9


@pytest.mark.parametrize("name", VARIANTS)
def test_hours_of_variant_are_the_estimates(name, tmp_path, capsys):
    cells, words = VARIANTS[name]
    assert words[:2] == ["python", "train.py"]
    path = tmp_path / "variant.yaml"
    path.write_text(keys.as_yaml(parse_recipe(words)))
    argv = ["--estimate", "--json", "--recipe", str(path)]

    for entry in cells[-1].split(", "):
        gpu, _, hours = entry.partition(": ")
        status = check_setup.main([*argv, "--card", gpu])
        estimate = json.loads(capsys.readouterr().out)
        decimals = len(hours.partition(".")[2])
        assert status == 0
        assert f"{estimate['hours']:.{decimals}f}" == hours, gpu


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_micro_batch_is_used_exactly(name):
    cells, words = PUBLISHED[name]
    batch = re.search(r"batch (\d+)(?: x (\d+))?", cells[1])
    context = re.search(r"context ([\d,]+)", cells[1])
    recipe = parse_recipe(words)

    plan = make_plan(recipe, process_count(words))

    assert plan.per_device_train_batch_size == int(batch[1])
    if batch[2]:
        assert plan.gradient_accumulation_steps == int(batch[2])
    assert recipe.model.sequence_length == int(context[1].replace(",", ""))
