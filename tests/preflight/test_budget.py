"""Plans and estimates of check_setup.py: hours, costs, epochs and expected losses."""

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

import check_setup
from ursa_minor.base import gpus
from ursa_minor.preflight import budget
from ursa_minor.recipe import command_line, keys, loading
from ursa_minor.recipe.batching import MANY_EPOCHS

GPT2 = "recipes/gpt2_124m.yaml"
TOKEN_FILES = "recipes/gpt2_124m_fineweb.yaml"


@pytest.fixture(autouse=True)
def repository_folder(monkeypatch):
    """Use the repository as the current folder."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def check(capsys) -> Callable[[str], str]:
    """A function that returns the output of check_setup.py for a line of flags."""

    def call(flags: str) -> str:
        assert check_setup.main(shlex.split(flags)) == 0
        return capsys.readouterr().out

    return call


@pytest.fixture
def check_json(check) -> Callable[[str], dict]:
    """A function that returns the output of check_setup.py --json for a line of flags."""

    def call(flags: str) -> dict:
        return json.loads(check(f"{flags} --json"))

    return call


def only_plan(result: dict) -> dict:
    """Return the plan of a result for a single recipe."""
    (plan,) = result["plans"].values()
    return plan


def normalize_spaces(text: str) -> str:
    """Replace line breaks and indentation by single spaces."""
    return " ".join(text.split())


# Plans


@pytest.mark.parametrize(
    ("flags", "hours", "cost"),
    [
        ("--card rtx4090 --budget 100 --price_per_card_hour 0.4", 250, 100),
        ("--card h100 --count 8 --budget 480 --price_per_machine_hour 20", 24, 480),
        ("--card a6000 --count 3 --hours 8", 8, 0),
    ],
)
def test_plan_spends_the_budget(check_json, flags, hours, cost):
    result = check_json(f"--plan {flags}")

    plan = result["plans"][result["best"]]
    seconds = plan["tokens"] / plan["tokens_per_second"]
    assert seconds / 3600 == pytest.approx(plan["hours"])
    assert plan["all_hours"] == pytest.approx(hours, rel=0.01)
    assert plan.get("cost", 0) == pytest.approx(cost, rel=0.01)
    losses = [other["expected_loss"] for other in result["plans"].values() if other]
    assert plan["expected_loss"] == min(losses)


def test_command_of_plan_is_accepted_by_train_py(check, check_json):
    flags = "--plan --card a6000 --count 3 --hours 8"

    result = check_json(flags)
    text = check(flags)

    words = shlex.split(result["command"])
    arguments = words[words.index("train.py") + 1 :]
    recipe, *_ = command_line.parse_training(arguments)
    plan = result["plans"][result["best"]]
    assert plan["tokens"] == recipe.batch.tokens_per_step * recipe.schedule.max_steps
    assert result["command"] in text
    assert "Besiroglu" in text
    assert f"\n* {Path(result['best']).stem} " in text


def test_scaling_law_predicts_published_loss():
    assert budget.expected_loss(124e6, 10.3e9) == pytest.approx(3.00, abs=0.01)


def test_best_size_has_about_twenty_tokens_per_parameter():
    compute = 5.76e23  # FLOPs of Chinchilla

    def loss(parameters: float) -> float:
        return budget.expected_loss(parameters, compute / 6 / parameters)

    best = min((10 ** (9 + step / 200) for step in range(600)), key=loss)

    tokens = compute / 6 / best
    assert 15 < tokens / best < 25


def test_short_plan_has_smaller_batch_and_warmup(check_json):
    result = check_json(f"--plan --card rtx3060 --hours 1 --recipe {GPT2}")

    plan = only_plan(result)
    changes = plan["changes"]
    assert changes["tokens_per_step"] == 65536
    assert changes["learning_rate"] == 2.1e-4
    assert plan["updates"] < budget.FEWEST_UPDATES
    assert changes["warmup_steps"] == plan["updates"] // 10


def test_long_plan_keeps_recipe_and_counts_epochs(check_json):
    result = check_json(f"--plan --card h100 --count 8 --hours 24 --recipe {GPT2}")

    plan = only_plan(result)
    assert plan["changes"].keys() == {"run_name", "max_steps"}
    assert plan["epochs"] == pytest.approx(plan["tokens"] / 10e9, rel=0.01)


def test_plan_warns_of_many_epochs(check):
    text = check("--plan --card t4 --hours 1 --recipe recipes/quickstart.yaml")

    assert "More than 4 epochs" in normalize_spaces(text)
    # The model is far smaller than those of the scaling law.
    first_row = text.split("expected loss\n")[1].splitlines()[0]
    assert first_row.endswith("  n/a")


def test_expected_loss_counts_at_most_four_epochs():
    recipe = keys.replace(loading.load_recipe(Path(GPT2)), limit_tokens=10**8)

    plan = budget.plan(recipe, gpus.find("t4"), 1, 100.0, 0)

    expected = budget.expected_loss(plan["parameters"], MANY_EPOCHS * 1e8)
    assert plan["expected_loss"] == expected


def test_train_tokens_of_prepared_folder_are_counted(tmp_path):
    splits = {
        "train": [{"file": "a.bin", "tokens": 500}],
        "validation": [{"file": "b.bin", "tokens": 5}],
    }
    manifest = {"splits": splits, "tokenizer": None, "complete": True}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    recipe = loading.load_recipe(Path(TOKEN_FILES), {"data_dir": str(tmp_path)})

    assert budget.estimate_train_tokens(recipe.data) == 500


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        (TOKEN_FILES, {"data_dir": "hf://datasets/kjj0/fineweb10B-gpt2"}),
        (TOKEN_FILES, {"data_dir": "missing"}),
        ("recipes/addition.yaml", {}),
    ],
)
def test_train_tokens_of_missing_data_are_unknown(recipe, flags):
    data = loading.load_recipe(Path(recipe), flags).data

    assert budget.estimate_train_tokens(data) == math.inf


def test_recipe_too_large_for_gpu_is_refused(capsys):
    flags = ["--plan", "--card", "rtx4060", "--hours", "1"]

    status = check_setup.main([*flags, "--recipe", "recipes/gpt2_1558m.yaml"])

    message = capsys.readouterr().err
    assert status == 2
    assert "rtx4060" in message
    assert "recipes/gpt2_1558m.yaml" in message
    assert "memory" in message


def test_plan_marks_sizes_that_do_not_fit(check):
    text = check("--plan --card rtx4060 --hours 1")

    assert re.search(r"\n  gpt2_1558m +does not fit\n", text)


# Estimates


@pytest.mark.parametrize("length", ["--max_steps 38146", "--tokens 20e9"])
def test_longer_run_is_estimated_in_proportion(check_json, length):
    original = check_json("--card a6000")

    result = check_json(f"--card a6000 {length}")

    assert result["tokens"] == pytest.approx(20e9, rel=1e-4)
    assert result["hours"] == pytest.approx(2 * original["hours"], rel=1e-4)
