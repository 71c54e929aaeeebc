"""A plan spends what it was given, says what it expects, and its command is one that train.py reads."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT

import check_setup
from ursa_minor.base import gpus
from ursa_minor.data.preparation import measure as preparation_measure
from ursa_minor.preflight import budget
from ursa_minor.preflight.data_throughput import DataThroughput, estimate_throughput
from ursa_minor.recipe import command_line, keys, loading
from ursa_minor.recipe.batching import MANY_EPOCHS

GPT2 = "recipes/gpt2_124m.yaml"


measure = preparation_measure.text_bytes_per_core


@pytest.fixture(autouse=True)
def core(monkeypatch):
    """A core encodes 2M tokens a second."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(preparation_measure, "text_bytes_per_core", lambda: 9e6)


@pytest.fixture
def said(capsys):
    """What check_setup.py prints for a line of flags: text, or with --json its value."""

    def call(flags: str):
        assert check_setup.main(shlex.split(flags)) == 0
        out = capsys.readouterr().out
        return json.loads(out) if "--json" in flags else out

    return call


@pytest.mark.parametrize(
    ("flags", "hours", "cost"),
    [
        ("--card rtx4090 --budget 100 --price_per_card_hour 0.4", 250, 100),
        ("--card h100 --count 8 --budget 480 --price_per_machine_hour 20", 24, 480),
        ("--card a6000 --count 3 --hours 8", 8, 0),
    ],
)
def test_a_plan_spends_the_hours_and_its_command_is_read_by_train_py(said, flags, hours, cost):
    found = said(f"--plan --json {flags}")
    row, words = found["plans"][found["best"]], shlex.split(found["command"])
    recipe, *_ = command_line.parse_training(words[words.index("train.py") + 1 :])
    assert row["tokens"] == recipe.batch.tokens_per_step * recipe.schedule.max_steps
    assert row["tokens"] / row["tokens_per_second"] / 3600 == pytest.approx(row["hours"])
    assert [row["all_hours"], row.get("cost", 0)] == pytest.approx([hours, cost], rel=0.01)
    assert row["expected_loss"] == min(
        one["expected_loss"] for one in found["plans"].values() if one
    )
    text = said(f"--plan {flags}")
    assert (
        found["command"] in text
        and "Besiroglu" in text
        and f"\n* {Path(found['best']).stem} " in text
    )


def test_the_law_is_that_of_the_page_and_its_best_size_has_about_twenty_tokens_a_parameter():
    assert budget.expected_loss(124e6, 10.3e9) == pytest.approx(3.00, abs=0.01)
    compute = 5.76e23  # Chinchilla's
    sizes = [10 ** (9 + step / 200) for step in range(600)]
    best = min(sizes, key=lambda size: budget.expected_loss(size, compute / 6 / size))
    assert 15 < compute / 6 / best / best < 25


def test_a_short_run_takes_a_smaller_batch_with_its_rate_and_a_shorter_warm_up(said):
    (row,) = said(f"--plan --json --card rtx3060 --hours 1 --recipe {GPT2}")["plans"].values()
    assert row["changes"]["tokens_per_step"] == 65536 and row["changes"]["learning_rate"] == 2.1e-4
    assert (
        row["updates"] < budget.FEWEST_UPDATES
        and row["changes"]["warmup_steps"] == row["updates"] // 10
    )


def test_a_plan_keeps_the_recipes_text_and_says_how_often_it_is_read(said):
    (row,) = said(f"--plan --json --card h100 --count 8 --hours 24 --recipe {GPT2}")[
        "plans"
    ].values()
    assert row["changes"].keys() == {"run_name", "max_steps"} and row["epochs"] == pytest.approx(
        row["tokens"] / 10e9, rel=0.01
    )


def test_a_text_that_is_read_often_is_warned_of_and_counts_four_times_at_most(said):
    out = said("--plan --card t4 --hours 1 --recipe recipes/quickstart.yaml")
    assert "More than 4 epochs hardly improve" in " ".join(out.split())
    assert (
        out.split("expected loss\n")[1].splitlines()[0].endswith("  n/a")
    )  # a model far below those of the law
    recipe = keys.replace(loading.load_recipe(Path(GPT2)), dataset_config_name=None)
    row = budget.plan(recipe, gpus.find("t4"), 1, 100.0, DataThroughput(1e8, 1e6), 0)
    assert row["expected_loss"] == budget.expected_loss(row["parameters"], MANY_EPOCHS * 1e8)


def test_a_reader_slower_than_the_cards_costs_hours_and_the_remedy_is_said(said):
    flags = "--estimate --card h100 --count 8 --cores 9 --price_per_card_hour 2 --tokens 10e9"
    row = said(f"{flags} --json")
    assert row["reader_tokens_per_second"] == 2e6 and row["tokens"] == pytest.approx(10e9, rel=1e-4)
    waiting = 10e9 / 2e6 / 3600 - row["hours"]  # the sample has no more
    assert row["waiting_hours"] == pytest.approx(waiting) and waiting > 0.5
    assert row["cost"] == pytest.approx(16 * (row["hours"] + waiting))
    text = " ".join(said(flags).split())
    assert "1 core of 9 at 2.0 M each, as measured on this machine): the GPUs wait 0.5" in text
    assert "Run prepare_data.py before" in text
    assert "5,000,000 tokens/s (as given): no waiting" in said(
        f"{flags} --reader_tokens_per_second 5e6"
    )
    linked = said("--card h100 --count 8 --link_megabytes_per_second 2.9")
    assert "1,000,000 tokens/s (2.9 MB/s, 56 cores of 64 at 2.0 M each," in linked


def test_prepared_data_and_ready_tokens_need_no_core_and_else_one_is_measured_here(tmp_path):
    assert 1e5 < measure() < 1e9
    token_files = {"data_dir": "hf://datasets/kjj0/fineweb10B-gpt2"}
    ready = loading.load_recipe(Path("recipes/gpt2_124m_fineweb.yaml"), token_files)
    given = estimate_throughput(ready.data, trainers=1, cores=2, link=2e6, speed=0)
    assert (given.speed, given.description) == (1e6, "2 MB/s")
    splits = {
        "train": [{"file": "a.bin", "tokens": 500}],
        "validation": [{"file": "b.bin", "tokens": 5}],
    }
    (tmp_path / "manifest.json").write_text(
        json.dumps({"splits": splits, "tokenizer": None, "complete": True})
    )
    given = estimate_throughput(
        keys.replace(ready, data_dir=str(tmp_path)).data, trainers=1, cores=2, link=0, speed=0
    )
    assert given == DataThroughput(500, math.inf, "prepared") and given.waiting_seconds(1e9, 1) == 0


def test_the_hours_of_a_plan_hold_the_waiting(said):
    found = said(
        f"--plan --json --card h100 --hours 10 --reader_tokens_per_second 1e5 --recipe {GPT2}"
    )
    row = found["plans"][GPT2]
    assert (
        row["tokens"] / 1e5 / 3600 == pytest.approx(0.9 * 10, rel=1e-3) and row["waiting_hours"] > 5
    )
    assert row["all_hours"] == pytest.approx(10, rel=1e-3)


def test_a_card_that_holds_no_size_has_no_plan_and_a_size_that_does_not_fit_is_named(said, capsys):
    flags = "--plan --card rtx4060 --hours 1"
    assert check_setup.main([*flags.split(), "--recipe", "recipes/gpt2_1558m.yaml"]) == 2
    assert "rtx4060 has too little memory for recipes/gpt2_1558m.yaml" in capsys.readouterr().err
    assert re.search(r"\n  gpt2_1558m +does not fit\n", said(flags))


def test_more_updates_or_tokens_are_estimated_and_a_text_may_not_be_there_yet(said):
    one, *twice = (
        said(f"--json --card a6000 {each}") for each in ("", "--max_steps 38146", "--tokens 20e9")
    )
    for row in twice:
        assert [row["tokens"], row["hours"]] == pytest.approx([20e9, 2 * one["hours"]], rel=1e-4)
    assert said("--json --card a6000 --recipe recipes/addition.yaml")["waiting_hours"] == 0
