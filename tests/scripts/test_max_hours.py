"""max_hours through train.py, with a clock that advances at each reading instead of real time."""

import functools
import json
import os
import shlex
from pathlib import Path

import pytest
from conftest import RECORDED_TRAINING, run_script
from run_results import TINY_RECIPE, final_state, losses_by_step, metrics_rows

from ursa_minor.run.time_limit import TimeBudget

QUIET = ("--eval_steps", "0", "--sample_steps", "0", "--save_steps", "1000", "--logging_steps", "1")
FAST = ("--per_device_train_batch_size", "8", *QUIET)
LONG = (*TINY_RECIPE, *FAST, "--max_steps", "100000", "--warmup_steps", "50")


class Ticks:
    """A clock that advances by a second at each reading, by more on other processes than the main one."""

    def __init__(self, seconds=1.0):
        self.step = seconds
        self.time = 0.0

    def __call__(self):
        self.time += self.step * (1 + 4 * int(os.environ.get("RANK", "0")))
        return self.time


@pytest.fixture
def tick(monkeypatch):
    """Return a function that gives the next runs a clock of that many seconds per reading."""

    def set_clock(seconds):
        with_clock = functools.partial(TimeBudget, now=Ticks(seconds))
        monkeypatch.setattr("train.TimeBudget", with_clock)

    return set_clock


def newest_state(run_name):
    path = max((Path("runs") / run_name / "checkpoints").iterdir())
    return json.loads((path / "state.json").read_text())


def hours(seconds):
    return ("--max_hours", str(seconds / 3600))


def test_killed_run_keeps_the_planned_length_bitwise(workspace, tick):
    tick(1.0)
    done = run_script("train.py", *LONG, *hours(150), "--run_name", "whole")
    planned = newest_state("whole")["planned"]
    end = planned["max_steps"]
    assert 25 < end < 60 and planned["changed_at"] == 20
    assert f"the run takes {end} of the 100,000 steps" in done.stderr
    assert list(losses_by_step("whole")) == list(range(1, end + 1))
    rates = [row["train/lr"] for row in metrics_rows("whole") if "train/lr" in row]
    assert rates[19] < rates[20] < rates[19] + 3e-4  # a jump to the peak would be larger
    assert max(rates) == pytest.approx(3e-3) and rates[-1] < 1e-3

    run_script(
        RECORDED_TRAINING,
        *LONG,
        *hours(150),
        "--run_name",
        "k",
        expect=-9,
        LEDGER="k.ledger",
        KILL_AT="step:23",
    )
    tick(0.1)
    again = run_script("train.py", *LONG, *hours(150), "--run_name", "k")
    assert f"max_hours has planned {end} steps for this run; this length stays" in again.stderr
    assert final_state("k", end) == final_state("whole", end)


def test_run_that_uses_up_its_hours_can_be_continued(workspace, tick):
    """Two processes, whose clocks differ, stop after the same step."""
    tick(1.0)
    flags = (*TINY_RECIPE, *FAST, "--max_steps", "40", "--run_name", "r")
    done = run_script("train.py", *flags, *hours(40), processes=2)
    stopped_at = newest_state("r")["step"]
    assert 5 < stopped_at < 20
    assert f"is used up after step {stopped_at}. To continue with a larger limit: " in done.stderr
    assert not Path("runs/r/model").exists()
    assert newest_state("r")["planned"] is None

    again = run_script("train.py", *flags, *hours(40), processes=2)  # nothing more is trained
    assert newest_state("r")["step"] == stopped_at
    command = next(line for line in again.stderr.splitlines() if "To continue" in line)
    words = shlex.split(command.partition("python train.py ")[2])
    tick(0.01)
    run_script("train.py", *words, processes=2)
    assert list(losses_by_step("r")) == list(range(1, 41))
    assert newest_state("r")["planned"]["max_steps"] == 40
    assert Path("runs/r/model/model.safetensors").is_file()


def test_planned_wsd_run_can_be_extended(workspace, tick):
    tick(1.0)
    wsd = (*LONG, "--lr_scheduler_type", "wsd", "--decay_ratio", "0.3", *hours(150))
    run_script("train.py", *wsd, "--run_name", "r")
    planned = newest_state("r")["planned"]
    end = planned["max_steps"]
    done = run_script("train.py", "--recipe", "runs/r/recipe.yaml", "--extend_steps", "3")
    assert "resumed from runs/r/checkpoints/" in done.stderr
    longer = newest_state(f"r-{end + 3}")
    assert longer["step"] == end + 3
    assert longer["planned"] == planned | {"max_steps": end + 3}
    before, after = (
        {row["step"]: row["train/lr"] for row in metrics_rows(name) if "train/lr" in row}
        for name in ("r", f"r-{end + 3}")
    )
    common = min(after)
    assert after[common] == pytest.approx(3e-3)
    assert common > planned["warmup_steps"] > 20 and before[common] == after[common]
