"""Run train.py with max_hours and a clock that advances at each reading instead of real time."""

import functools
import os
import shlex
from pathlib import Path

import pytest
from conftest import RECORDED_TRAINING, run_script
from run_results import TINY_RECIPE, final_state, losses_by_step

from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.run.time_limit import TimeBudget

FEW_OUTPUTS = ("--eval_steps", "0", "--sample_steps", "0", "--save_steps", "1000")
FAST = (*TINY_RECIPE, *FEW_OUTPUTS, "--per_device_train_batch_size", "8")
LONG = (*FAST, "--max_steps", "100000", "--warmup_steps", "50")


class SteppingClock:
    """A clock that advances at each reading, five times as much on the second process."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.time = 0.0

    def __call__(self) -> float:
        rank = int(os.environ.get("RANK", "0"))
        self.time += self.seconds * (1 + 4 * rank)
        return self.time


@pytest.fixture
def set_clock(monkeypatch):
    """Return a function that sets the seconds per clock reading of later runs."""

    def set_seconds(seconds: float) -> None:
        budget = functools.partial(TimeBudget, now=SteppingClock(seconds))
        monkeypatch.setattr("train.TimeBudget", budget)

    return set_seconds


def max_hours(seconds: float) -> tuple[str, str]:
    """Return the flags that limit a run to these seconds."""
    return ("--max_hours", str(seconds / 3600))


def newest_state(run_name: str) -> dict:
    """Return the training state in the newest checkpoint."""
    path = max((Path("runs") / run_name / "checkpoints").iterdir())
    return checkpoint.read_state(path)


def test_killed_run_keeps_its_planned_length(workspace, set_clock):
    flags = (*LONG, *max_hours(150), "--run_name")
    set_clock(1.0)
    result = run_script("train.py", *flags, "whole")
    planned = newest_state("whole")["planned"]
    end = planned["max_steps"]
    assert 25 < end < 60
    assert planned["changed_at"] == 20
    assert f"the run takes {end} of the 100,000 steps" in result.stderr
    assert list(losses_by_step("whole")) == list(range(1, end + 1))
    rates = list(losses_by_step("whole", "train/lr").values())
    assert rates[19] < rates[20] < rates[19] + 3e-4  # no jump to the maximum
    assert max(rates) == pytest.approx(3e-3)
    assert rates[-1] < 1e-3

    run_script(RECORDED_TRAINING, *flags, "k", expect=-9, LEDGER="k.ledger", KILL_AT="step:23")
    set_clock(0.1)  # a faster machine
    result = run_script("train.py", *flags, "k")
    assert f"max_hours has planned {end} steps" in result.stderr
    assert final_state("k", end) == final_state("whole", end)


@pytest.mark.slow
def test_run_without_hours_left_can_be_continued(workspace, set_clock):
    """Two processes with different clocks stop after the same step."""
    flags = (*FAST, "--max_steps", "40", "--run_name", "r")
    set_clock(1.0)
    result = run_script("train.py", *flags, *max_hours(40), processes=2)
    last_step = newest_state("r")["step"]
    assert 5 < last_step < 20
    assert f"is used up after step {last_step}. To continue" in result.stderr
    assert not Path("runs/r/model").exists()
    assert newest_state("r")["planned"] is None

    # The same command trains nothing and suggests how to continue.
    repeated = run_script("train.py", *flags, *max_hours(40), processes=2)
    assert newest_state("r")["step"] == last_step
    suggestion = next(line for line in repeated.stderr.splitlines() if "To continue" in line)

    set_clock(0.01)
    command = suggestion.partition("python train.py ")[2]
    run_script("train.py", *shlex.split(command), processes=2)
    assert list(losses_by_step("r")) == list(range(1, 41))
    assert newest_state("r")["planned"]["max_steps"] == 40
    assert Path("runs/r/model/model.safetensors").is_file()


def test_planned_wsd_run_can_be_extended(workspace, set_clock):
    schedule = ("--lr_scheduler_type", "wsd", "--decay_ratio", "0.3")
    set_clock(1.0)
    run_script("train.py", *LONG, *schedule, *max_hours(150), "--run_name", "r")
    planned = newest_state("r")["planned"]
    end = planned["max_steps"]

    result = run_script("train.py", "--recipe", "runs/r/recipe.yaml", "--extend_steps", "3")

    extended_name = f"r-{end + 3}"
    extended = newest_state(extended_name)
    assert "resumed from runs/r/checkpoints/" in result.stderr
    assert extended["step"] == end + 3
    assert extended["planned"] == planned | {"max_steps": end + 3}
    rates = losses_by_step("r", "train/lr")
    extended_rates = losses_by_step(extended_name, "train/lr")
    first_step = min(extended_rates)
    assert first_step > planned["warmup_steps"] > 20
    assert extended_rates[first_step] == pytest.approx(3e-3)
    assert extended_rates[first_step] == rates[first_step]
