"""Runs whose length is stated as num_train_epochs, end to end."""

import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from conftest import RECORDED_TRAINING, run_script
from run_results import TINY_RECIPE, final_state, losses_by_step, read_window_log

from ursa_minor.data.loading.corpus import Corpus
from ursa_minor.recipe import loading

NO_EVALS = ("--eval_steps", "0", "--sample_steps", "0")
# tiny.yaml has 562 windows and 8 sequences per step, so this is 12 steps, as in the file.
EPOCHS = ("--num_train_epochs", "0.17")
# A run without checkpoints: only finished.json contains its number of steps.
FINISHED = (*TINY_RECIPE, *NO_EVALS, "--save_steps", "0", "--run_name", "e")
LENGTH_LINE = "length   0.17 epochs of 562 windows = 12 steps of 8 sequences"


@pytest.fixture
def finished_epochs(workspace) -> None:
    """Finish the run runs/e."""
    run_script("train.py", *FINISHED, *EPOCHS)


def test_killed_run_in_epochs_equals_run_in_steps(finished_run):
    shutil.rmtree("data")
    recorded = (RECORDED_TRAINING, *TINY_RECIPE, *EPOCHS, "--run_name", "e")

    killed = run_script(*recorded, expect=-9, LEDGER="e.ledger", KILL_AT="step:5")
    resumed = run_script(*recorded, LEDGER="e.ledger")

    assert LENGTH_LINE in killed.stderr
    assert LENGTH_LINE in resumed.stderr
    assert "resumed from" in resumed.stderr
    assert final_state("e") == final_state("whole")
    assert read_window_log(Path("e.ledger")) == read_window_log(Path("whole.ledger"))
    recipe = yaml.safe_load(Path("runs/e/recipe.yaml").read_text())
    assert recipe["num_train_epochs"] == 0.17
    assert "max_steps" not in recipe
    assert loading.load_run_recipe(Path("runs/e")).schedule.max_steps == 12


def test_two_processes_agree_on_steps_of_epochs(finished_run):
    shutil.rmtree("data")

    result = run_script("train.py", *TINY_RECIPE, *EPOCHS, "--run_name", "two", processes=2)

    assert result.stderr.count(LENGTH_LINE) == 1
    assert losses_by_step("two") == pytest.approx(losses_by_step("whole"), abs=1e-5)


def test_evaluation_needs_no_number_of_steps(finished_run):
    flags = (*TINY_RECIPE, *EPOCHS, "--run_name", "whole")

    result = run_script("train.py", *flags, "--eval_only")

    assert "step-00000012" in json.loads(result.stdout)["model"]


def test_equal_number_of_steps_is_the_same_run(finished_epochs):
    for flags in (EPOCHS, ("--num_train_epochs", "0.169"), ("--max_steps", "12")):
        result = run_script("train.py", *FINISHED, *flags)

        assert "nothing is left to train" in result.stderr


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (("--num_train_epochs", "0.5"), "max_steps = 36 (num_train_epochs = 0.5)"),
        (("--max_steps", "13"), "max_steps = 13"),
    ],
)
def test_other_number_of_steps_is_another_run(finished_epochs, flags, fragment):
    result = run_script("train.py", *FINISHED, *flags, expect=2)

    assert "This run has max_steps = 12" in result.stderr
    assert fragment in result.stderr


def test_changed_text_is_named_instead_of_steps(workspace):
    command = (*TINY_RECIPE, *NO_EVALS, *EPOCHS, "--run_name", "e")
    run_script("train.py", *command)
    with Path("text.txt").open("a") as file:
        file.write("the cat sat on the mat " * 200)

    result = run_script("train.py", *command, expect=2)

    assert "different data" in result.stderr
    assert "max_steps" not in result.stderr


def test_extended_run_states_its_steps(workspace):
    schedule = ("--lr_scheduler_type", "wsd", "--decay_ratio", "0.3")
    command = (*TINY_RECIPE, *NO_EVALS, *schedule, "--run_name", "e")
    run_script("train.py", *command, *EPOCHS)

    run_script("train.py", "--recipe", "runs/e/recipe.yaml", "--extend_steps", "3")

    recipe = yaml.safe_load(Path("runs/e-15/recipe.yaml").read_text())
    assert recipe["max_steps"] == 15
    assert "num_train_epochs" not in recipe


def test_early_stopped_run_in_epochs_can_be_continued(workspace):
    command = (*TINY_RECIPE, *EPOCHS, "--sample_steps", "0", "--run_name", "e")
    diverging = ("--learning_rate", "2", "--eval_steps", "1", "--early_stopping_patience")

    stopped = run_script("train.py", *command, *diverging, "1")
    continued = run_script("train.py", *command, *diverging, "0")

    assert "early stopping" in stopped.stderr
    assert list(losses_by_step("e")) == list(range(1, 13))
    assert LENGTH_LINE in continued.stderr


def write_mixture() -> None:
    """Write mixture.yaml with two texts of equal weight, of which one is a third of the other."""
    values = yaml.safe_load(Path("tiny.yaml").read_text())
    for name in ("data_files", "max_steps"):
        del values[name]
    (folder,) = Path("data").iterdir()
    values["tokenizer"] = str(folder / "tokenizer")
    text = Path("text.txt").read_text()
    Path("short.txt").write_text(text[: len(text) // 3])
    names = ("text.txt", "short.txt")
    values["sources"] = [{"weight": 1, "data_files": [name]} for name in names]
    values["num_train_epochs"] = 0.1
    Path("mixture.yaml").write_text(yaml.safe_dump(values))


def test_epoch_of_mixture_has_windows_of_all_sources(workspace):
    write_mixture()
    recorded = (RECORDED_TRAINING, "--recipe", "mixture.yaml", *NO_EVALS)

    result = run_script(*recorded, LEDGER="mixture.ledger")

    num_windows = 562 + 187  # of text.txt and of short.txt
    num_steps = math.ceil(0.1 * num_windows / 8)
    draws = " ".join(read_window_log(Path("mixture.ledger")).values()).split()
    assert len(draws) == 8 * num_steps
    assert f"0.1 epochs of {num_windows} windows = {num_steps} steps" in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("length")]
    num_short = sum(draw.startswith("1:") for draw in draws)
    assert f"{num_short / 187:.2f} times" in line
    assert f"{(len(draws) - num_short) / 562:.2f} times" in line


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (("--num_train_epochs", "1e9"), "at most 1,000,000,000"),
        (("--num_train_epochs", "0.01", "--profile"), "--profile needs 13 updates"),
        (
            (*EPOCHS, "--lr_scheduler_type", "wsd", "--warmup_steps", "11", "--decay_ratio", "0.5"),
            "max_steps = 12) overlap",
        ),
    ],
)
def test_rules_apply_to_computed_steps(workspace, flags, fragment):
    result = run_script("train.py", *TINY_RECIPE, *flags, expect=2)

    assert "num_train_epochs" in result.stderr or "--profile" in result.stderr
    assert fragment in result.stderr
    assert not Path("runs").exists()


def test_card_of_run_in_epochs_states_steps(finished_epochs):
    run_script("export_model.py", "runs/e", "--out", "exported")

    assert "12 of 12" in Path("exported/README.md").read_text()


def test_signal_while_data_is_prepared_stops_run(workspace, monkeypatch):
    def receive_signal(corpus, stop):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Corpus, "wait_until_complete", receive_signal)
    command = (*TINY_RECIPE, *EPOCHS, "--run_name", "e")

    result = run_script("train.py", *command, expect=143, URSA_MINOR_STOPPED_FILE="stopped")

    assert "stopped by SIGTERM before the first step" in result.stderr
    assert Path("stopped").is_file()  # scripts/slurm.sh reads this file
    assert not Path("runs").exists()
