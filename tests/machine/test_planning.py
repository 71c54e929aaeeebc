"""A plan spends what it was given, says what it expects, and its command is one that train.py reads."""

import json
import math
import shlex
from pathlib import Path

import pytest
from conftest import ROOT

import check_setup
from pretrain.base import cards
from pretrain.data import prepare
from pretrain.machine import forecast, planning
from pretrain.machine.supply import Supply, supply
from pretrain.recipe import keys, reading
from pretrain.recipe.plan import MANY_EPOCHS


@pytest.fixture(autouse=True)
def core(monkeypatch, request):
    """A core encodes 2M tokens a second, but in the test that measures it."""
    monkeypatch.chdir(ROOT)
    if "measured" not in request.node.name:
        monkeypatch.setattr(prepare, "text_bytes_per_core", lambda: 9e6)


def planned(capsys, *flags: str) -> dict:
    assert check_setup.main(["--plan", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def printed(capsys, *flags: str) -> str:
    assert check_setup.main(["--plan", *flags]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "hours", "cost"),
    [
        (("--card", "rtx4090", "--budget", "100", "--price_per_card_hour", "0.4"), 250, 100),
        (("--card", "a6000", "--hours", "8"), 8, None),
        (("--card", "h100", "--count", "8", "--budget", "480", "--price_per_machine_hour", "20"), 24, 480),
        (("--card", "a6000", "--count", "3", "--hours", "100", "--price_per_card_hour", "1"), 100, 300),
    ],
)
def test_a_plan_spends_the_hours_and_its_command_is_read_by_train_py(capsys, flags, hours, cost):
    found = planned(capsys, *flags)
    row = found["plans"][found["best"]]
    words = shlex.split(found["command"])
    recipe, *_ = reading.parse_training(words[words.index("train.py") + 1 :])
    assert row["tokens"] == recipe.batch.tokens_per_step * recipe.schedule.max_steps
    assert row["tokens"] / row["tokens_per_second"] / 3600 == pytest.approx(row["hours"])
    spent = (row["hours"] + row["waiting_hours"]) / planning.TRAINING_SHARE
    assert 0.99 * hours < spent <= 1.001 * hours and row["all_hours"] == pytest.approx(spent)
    assert cost is None or row["cost"] == pytest.approx(cost, rel=0.01)
    assert (ROOT / words[words.index("--config_file") + 1]).is_file()
    if "--count" in flags:
        count = flags[flags.index("--count") + 1]
        assert "_x8.yaml" in found["command"] or f"--multi_gpu --num_processes {count} " in found["command"]
    assert row["expected_loss"] == min(one["expected_loss"] for one in found["plans"].values())
    law = 1.8172 + 482.01 / row["parameters"] ** 0.3478 + 2085.43 / row["tokens"] ** 0.3658
    assert row["expected_loss"] == pytest.approx(law)
    text = printed(capsys, *flags)
    assert (
        found["command"] in text and "Besiroglu" in text and f"{row['tokens']:,} in {row['updates']:,} updates" in text
    )


def test_the_laws_best_size_has_about_twenty_tokens_a_parameter():
    compute = 5.76e23  # Chinchilla's
    sizes = [10 ** (9 + step / 200) for step in range(600)]
    best = min(sizes, key=lambda size: planning.CHINCHILLA.loss(size, compute / 6 / size))
    assert 15 < compute / 6 / best / best < 25


def test_a_short_run_takes_a_smaller_batch_with_its_rate_and_a_shorter_warm_up(capsys):
    found = planned(capsys, "--card", "rtx3060", "--hours", "1", "--recipe", "recipes/gpt2_124m.yaml")
    (row,) = found["plans"].values()
    assert row["changes"]["tokens_per_step"] == 65536 and row["changes"]["learning_rate"] == 2.1e-4
    assert row["updates"] < planning.FEWEST_UPDATES and row["changes"]["warmup_steps"] == row["updates"] // 10


def test_a_plan_takes_a_larger_sample_where_the_tokens_need_it(capsys):
    found = planned(capsys, "--card", "h100", "--count", "8", "--hours", "24", "--recipe", "recipes/gpt2_124m.yaml")
    (row,) = found["plans"].values()
    assert row["changes"]["dataset_config_name"] == "sample-350BT" and 0.9 < row["epochs"] < 1
    assert row["tokens"] < row["changes"]["limit_tokens"] < 1.02 * row["tokens"]
    small = planned(capsys, "--card", "a6000", "--hours", "10", "--recipe", "recipes/gpt2_124m.yaml")
    assert "dataset_config_name" not in small["plans"]["recipes/gpt2_124m.yaml"]["changes"]


def test_a_text_that_is_read_often_is_warned_of_and_counts_four_times_at_most(capsys):
    out = printed(capsys, "--card", "t4", "--hours", "1", "--recipe", "recipes/quickstart.yaml")
    assert "note      more than 4 epochs teach little" in out
    assert out.split("expected loss\n")[1].splitlines()[0].endswith("  n/a")  # a model far below those of the law
    recipe = keys.replace(reading.load_recipe(Path("recipes/gpt2_124m.yaml")), dataset_config_name=None)
    row = planning.plan(recipe, cards.find("t4"), 1, 100.0, Supply(1e8, 1e6), 0)
    assert row["expected_loss"] == pytest.approx(planning.CHINCHILLA.loss(row["parameters"], MANY_EPOCHS * 1e8))


def test_a_reader_slower_than_the_cards_costs_hours_and_the_remedy_is_said(capsys):
    flags = shlex.split("--estimate --card h100 --count 8 --cores 9 --price_per_card_hour 2 --tokens 10e9")
    assert check_setup.main([*flags, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["reader_tokens_per_second"] == 2e6 and row["tokens"] == pytest.approx(10e9, rel=1e-4)
    waiting = 10e9 / 2e6 / 3600 - row["hours"]  # the sample has no more
    assert row["waiting_hours"] == pytest.approx(waiting) and waiting > 0.5
    assert row["cost"] == pytest.approx(16 * (row["hours"] + waiting))
    assert check_setup.main(flags) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("reader "))
    assert (
        "1 core of 9 at 2.0 M, the speed of one here): the cards wait 0.5" in line and "prepare_data.py before" in line
    )
    assert check_setup.main([*flags, "--reader_tokens_per_second", "5e6"]) == 0
    assert "5,000,000 tokens/s (as you say): no waiting" in capsys.readouterr().out
    assert check_setup.main([*flags[:5], "--link_megabytes_per_second", "2.9"]) == 0
    assert "1,000,000 tokens/s (56 cores of 64 at 2.0 M, the speed of one here, 2.9 MB/s)" in capsys.readouterr().out


def test_prepared_data_and_ready_tokens_need_no_core(tmp_path, capsys):
    ready = reading.load_recipe(Path("recipes/gpt2_124m_ready_tokens.yaml"))
    given = supply(ready.data, trainers=1, cores=2, link=2e6, speed=0)
    assert (given.speed, given.words) == (1e6, "2 MB/s")
    folder = tmp_path / "shards"
    folder.mkdir()
    manifest = {
        "splits": {"train": [{"file": "a.bin", "tokens": 500}], "validation": [{"file": "b.bin", "tokens": 5}]},
        "tokenizer": None,
        "complete": True,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    given = supply(keys.replace(ready, data_dir=str(folder)).data, trainers=1, cores=2, link=0, speed=0)
    assert given == Supply(500, math.inf, "prepared") and given.waiting_seconds(1e9, 1) == 0


def test_a_core_is_measured_here():
    assert 1e5 < prepare.text_bytes_per_core() < 1e9


def test_the_hours_of_a_plan_hold_the_waiting(capsys):
    slow = ("--card", "h100", "--hours", "10", "--reader_tokens_per_second", "100000")
    row = planned(capsys, *slow, "--recipe", "recipes/gpt2_124m.yaml")["plans"]["recipes/gpt2_124m.yaml"]
    assert row["tokens"] / 1e5 / 3600 == pytest.approx(0.9 * 10, rel=1e-3) and row["waiting_hours"] > 5
    assert row["all_hours"] == pytest.approx(10, rel=1e-3)


def test_a_card_that_holds_no_size_has_no_plan(capsys):
    flags = ["--plan", "--card", "rtx4060", "--hours", "1", "--recipe", "recipes/gpt2_1558m.yaml"]
    assert check_setup.main(flags) == 2
    assert "holds none of recipes/gpt2_1558m" in capsys.readouterr().err
    assert check_setup.main(flags[:-2]) == 0
    assert "  gpt2_1558m   does not fit\n" in capsys.readouterr().out


def test_more_updates_or_tokens_are_estimated(capsys):
    rows = []
    for flags in ((), ("--max_steps", "38146"), ("--tokens", "20e9")):
        assert check_setup.main(["--estimate", "--json", "--card", "a6000", *flags]) == 0
        rows.append(json.loads(capsys.readouterr().out))
    assert [forecast.in_short(row["tokens"]) for row in rows] == ["10.0 B", "20.0 B", "20.0 B"]
    assert rows[1]["hours"] == pytest.approx(2 * rows[0]["hours"])


def test_a_recipe_whose_text_is_not_there_yet_is_estimated(capsys):
    assert check_setup.main(["--estimate", "--card", "a6000", "--recipe", "recipes/addition.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["waiting_hours"] == 0


def test_what_is_prepared_is_read_again_rather_than_left_for_a_larger_sample():
    recipe = reading.load_recipe(Path("recipes/gpt2_124m.yaml"))
    row = planning.plan(recipe, cards.find("h100"), 8, 24.0, Supply(9.9e9, math.inf, "prepared"), 0)
    assert "dataset_config_name" not in row["changes"] and row["epochs"] > 10
