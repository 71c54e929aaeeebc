"""Run train.py end to end on a small character model: results, resuming and errors."""

import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from accelerate.commands import launch
from commands import is_running
from conftest import (
    OVERFITTING_FLAGS,
    RECIPE,
    RECORDED_TRAINING,
    ROOT,
    WORDS,
    copy_fixture,
    create_shared_folder,
    run_script,
    start_script,
)
from push_helpers import wait_until
from run_results import (
    TIME_METRICS,
    TINY_RECIPE,
    final_state,
    load_weights,
    losses_by_step,
    metrics_rows,
    read_window_log,
    windows_by_step,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ursa_minor.base import checkpoint_files
from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import shards
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.model.loss import Losses, NextTokenLoss
from ursa_minor.recipe import loading

NO_EVALS = ("--eval_steps", "0", "--sample_steps", "0")
NO_SAVES = ("--save_steps", "0")
NO_DROPOUT = ("--resid_pdrop", "0", "--embd_pdrop", "0", "--attn_pdrop", "0")


def checkpoint_path(run_name: str, step: int) -> Path:
    """Return the folder of a run's checkpoint."""
    return Path("runs") / run_name / "checkpoints" / f"step-{step:08d}"


def checkpoint_steps(run_name: str) -> list[int]:
    """Return the steps of a run's checkpoints, newest first."""
    paths = checkpoint_files.list_checkpoints(Path("runs") / run_name / "checkpoints")
    return [checkpoint_files.step_of(path) for path in paths]


def modification_times(folder: str) -> dict[Path, int]:
    """Return the modification time of everything in a folder."""
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*")}


def suggested_flags(message: str) -> list[str]:
    """Return the flags of the train.py command at the end of a message."""
    return shlex.split(message.partition("python train.py ")[2])


# Files and messages of a run.


def test_missing_data_is_reported_before_importing_torch(workspace):
    Path("mine.txt").write_text("text")
    code = (
        "import runpy, sys; sys.modules['torch'] = None; del sys.argv[0]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    recipe = ROOT / "recipes" / "own_text.yaml"
    flags = ["--recipe", str(recipe), "--data_files", "mine.tx", "--max_steps", "20"]
    command = [sys.executable, "-c", code, str(ROOT / "train.py"), *flags]

    result = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)

    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: data_files")
    assert "mine.tx does not exist" in line
    assert "mine.txt?" in line


def test_run_writes_documented_files(workspace):
    result = run_script("train.py", *TINY_RECIPE, "--run_name", "r", PICTURES="1")

    folder = Path("runs/r")
    for name in ("recipe.yaml", "metrics.jsonl", "curves.png", "samples.txt", "model/config.json"):
        assert (folder / name).stat().st_size > 0, name
    assert loading.load_recipe(folder / "recipe.yaml").saving.run_name == "r"
    assert "runs/r/model/" in result.stderr
    logged = (folder / "run.log").read_text().splitlines()
    shown = result.stderr.splitlines()
    progress_bars = [line for line in shown if "\r" in line or "it/s]" in line]
    assert len(logged) > 15
    assert logged == [line for line in shown if line not in progress_bars]


def test_metrics_contain_losses_evaluations_and_baselines(finished_run):
    rows = metrics_rows("whole")
    evaluations = [row for row in rows if "eval/loss" in row]
    (baseline,) = [row for row in rows if "baseline/bigram" in row]
    log = Path("runs/whole/run.log").read_text()

    assert list(losses_by_step("whole")) == list(range(1, 13))
    assert [row["step"] for row in evaluations] == [0, 4, 8, 12]
    assert all("eval/bits_per_byte" in row for row in evaluations)
    assert baseline["step"] == 12
    assert 0 < baseline["baseline/bigram"] < 5
    assert 0 < baseline["baseline/gzip"] < 8
    assert f"bigram baseline {baseline['baseline/bigram']:.4f} nats per token, " in log
    assert "bits per byte" in log
    assert checkpoint_steps("whole") == [12, 9]


def test_finished_run_draws_new_samples(finished_run):
    samples = Path("runs/whole/samples.txt")
    old_samples = samples.read_text()
    flags = (*TINY_RECIPE, "--run_name", "whole", "--sample_temperature", "0")

    result = run_script("train.py", *flags)

    assert "resumed from runs/whole/checkpoints/step-00000012" in result.stderr
    assert "nothing is left to train" in result.stderr
    assert samples.read_text() != old_samples
    assert list(losses_by_step("whole")) == list(range(1, 13))


def test_samples_default_to_validation_document_starts(workspace):
    text = Path("text.txt").read_text()[:400]
    Path("one.txt").write_text(f"The text number one\n{text}")
    Path("two.txt").write_text(f"The text number two\n{text}")
    lines = Path("tiny.yaml").read_text().splitlines()
    recipe = [line for line in lines if not line.startswith("sample_prompts")]
    Path("bare.yaml").write_text("\n".join(recipe))
    data = ("--data_files", "text.txt", "--validation_files", "one.txt", "two.txt")
    short = ("--max_steps", "2", "--sample_steps", "2", *NO_SAVES)

    run_script("train.py", "--recipe", "bare.yaml", *data, *short, "--run_name", "bare")

    samples = Path("runs/bare/samples.txt").read_text()
    prompts = re.findall("^==== step 2 · prompt '(.*)' ====$", samples, re.MULTILINE)
    assert prompts == ["The text", "The text"]


def test_header_warns_about_unsuitable_data(workspace):
    Path("held.txt").write_text("中文 " * 400)
    Path("short.txt").write_text(Path("text.txt").read_text()[:150])
    data = ("--data_files", "short.txt", "--validation_files", "held.txt")
    tokenizer = ("--tokenizer", "bpe", "--tokenizer_vocab_size", "280", "--vocab_size", "320")
    flags = (*TINY_RECIPE, *NO_EVALS, *NO_SAVES, *data, *tokenizer)

    result = run_script("train.py", *flags, "--run_name", "many")

    assert "reads this text" in result.stderr
    assert "--max_steps" in result.stderr
    bytes_per_token = r"note     the validation text has \d\.\d\d bytes per token .*"
    assert re.search(bytes_per_token + "--validation_files", result.stderr)


# Steps 1, 4, 8 and 12 of the recipe in conftest.py, in fp32 on a CPU with torch 2.13.0. There is
# no dropout, because PyTorch may change its random numbers. The kernels of another machine round
# differently, and Muon amplifies the difference.
GOLDEN = {
    "adamw": ([4.174410, 3.808260, 3.431451, 3.270961], 2e-5),
    "muon": ([4.174410, 3.870184, 3.454048, 3.300250], 2e-4),
}


@pytest.mark.parametrize(
    "optimizer, micro_batch, loss_rows",
    [
        pytest.param("adamw", "2", None, id="adamw"),
        pytest.param("adamw", "8", None, id="one large micro-batch"),
        pytest.param("muon", "2", 5, id="muon, loss of 5 rows at a time"),
    ],
)
def test_loss_curve_equals_recorded_curve(
    workspace, monkeypatch, optimizer, micro_batch, loss_rows
):
    """A change of the curve needs an entry in the changelog."""
    if loss_rows:
        monkeypatch.setattr(NextTokenLoss, "rows", loss_rows)
    flags = ("--optimizer", optimizer, "--per_device_train_batch_size", micro_batch)

    run_script(
        "train.py", *TINY_RECIPE, *NO_DROPOUT, *NO_EVALS, *NO_SAVES, *flags, "--run_name", "r"
    )

    losses = losses_by_step("r")
    expected, tolerance = GOLDEN[optimizer]
    assert [losses[step] for step in (1, 4, 8, 12)] == pytest.approx(expected, abs=tolerance)


def test_train_loss_is_plain_cross_entropy(finished_run):
    """The losses of the first update are those of the initial weights for every objective."""
    objective_flags = ("--z_loss", "0.05", "--label_smoothing", "0.2")
    short = ("--max_steps", "2", "--warmup_steps", "1", *NO_EVALS, *NO_SAVES)

    result = run_script(
        "train.py", *TINY_RECIPE, *objective_flags, *short, "--run_name", "r", processes=2
    )

    loss = losses_by_step("r")[1]
    objective = losses_by_step("r", "train/objective")[1]
    assert loss == pytest.approx(losses_by_step("whole")[1], abs=1e-5)
    assert objective > loss + 0.1
    assert not losses_by_step("whole", "train/objective")
    assert "  objective " in result.stderr


# Another length.


def test_extended_wsd_run_equals_longer_run(workspace):
    schedule = ("--lr_scheduler_type", "wsd", "--decay_ratio", "0.3")
    wsd = (*TINY_RECIPE, *NO_EVALS, *schedule, "--save_steps", "5")
    run_script("train.py", *wsd, "--run_name", "r")
    assert checkpoint_steps("r") == [12, 10, 8]  # the newest two, and the last before the decay
    run_script("train.py", *wsd, "--max_steps", "20", "--run_name", "whole")

    refused = run_script("train.py", *wsd, "--run_name", "r", "--max_steps", "17", expect=2)
    assert "--extend_steps 5" in refused.stderr
    assert refused.stderr.count("error: ") == 1
    run_script("train.py", *suggested_flags(refused.stderr))
    # An extended run can be extended again, from before its own decay.
    recipe = ("--recipe", "runs/r-17/recipe.yaml")
    result = run_script("train.py", *recipe, "--extend_steps", "3")

    assert "resumed from runs/r-17/checkpoints/step-00000012" in result.stderr
    assert list(losses_by_step("r-17")) == list(range(9, 18))
    assert Path("runs/r/model/model.safetensors").is_file()
    extended = final_state("r-20", 20)
    whole = final_state("whole", 20)
    assert extended["state"].pop("origin")
    assert not whole["state"].pop("origin")
    assert extended == whole


def test_length_that_changes_past_rates_is_rejected(finished_run):
    start = ("--resume_from_checkpoint", "runs/whole/checkpoints/step-00000009")
    flags = (*TINY_RECIPE, *NO_EVALS, *start, "--run_name", "longer", "--max_steps", "20")

    result = run_script("train.py", *flags, expect=2)

    assert "max_steps = 12" in result.stderr
    assert "max_steps = 20" in result.stderr


def test_extended_run_keeps_checkpoints_by_same_rule(workspace):
    schedule = ("--lr_scheduler_type", "wsd", "--decay_ratio", "0.3")
    kept = ("--keep_checkpoints", "log2", "10", "18", "--keep_optimizer", "false")
    run_script("train.py", *TINY_RECIPE, *NO_EVALS, *schedule, *kept, "--run_name", "r")
    steps = checkpoint_steps("r")

    run_script("train.py", "--recipe", "runs/r/recipe.yaml", "--extend_steps", "8")

    assert steps == [12, 10, 9, 8, 4, 2, 1, 0]
    assert checkpoint_steps("r") == steps
    assert checkpoint_steps("r-20") == [20, 18, 16, 14, 10, 8]


def test_extending_missing_run_is_rejected(workspace):
    flags = (*TINY_RECIPE, "--run_name", "r", "--extend_steps", "5")

    result = run_script("train.py", *flags, expect=2)

    assert "runs/r/checkpoints contains no complete checkpoint" in result.stderr
    assert not Path("runs").exists()


# Interruptions.


def rows_without_times(run_name: str) -> list[dict]:
    """Return the rows of metrics.jsonl without measured times."""
    rows = metrics_rows(run_name)
    for row in rows:
        for name in TIME_METRICS:
            row.pop(name, None)
    return rows


def test_interrupted_run_equals_uninterrupted_run(finished_run):
    """The run is killed in each stage of a save and between saves, stopped, and then finished."""
    recorded = (RECORDED_TRAINING, *TINY_RECIPE, "--run_name", "k")
    environment = {"LEDGER": "k.ledger", "URSA_MINOR_STOPPED_FILE": "stopped"}
    stages = ("model", "optimizer", "state", "manifest", "rename", "rotate")
    save_kills = [f"save:{stage}:1" for stage in stages]

    for kill in ("step:2", *save_kills, "step:1"):
        run_script(*recorded, expect=-9, KILL_AT=kill, **environment)
    # A signal discards the unfinished step and saves the last complete one.
    result = run_script(*recorded, expect=130, STOP_AT="11:2", STOP_BY="SIGINT", **environment)
    assert "stopped by SIGINT after step 11" in result.stderr
    assert "the same command resumes" in result.stderr
    assert checkpoint_steps("k")[0] == 11
    Path("stopped").unlink()  # scripts/slurm.sh reads this file
    run_script(*recorded, **environment)

    assert not Path("stopped").exists()
    assert final_state("k") == final_state("whole")
    assert read_window_log(Path("k.ledger")) == read_window_log(Path("whole.ledger"))
    assert rows_without_times("k") == rows_without_times("whole")
    assert Path("runs/k/samples.txt").read_text() == Path("runs/whole/samples.txt").read_text()
    assert not list(Path("runs/k/checkpoints").glob(".step-*"))


KEPT_FLAGS = (*TINY_RECIPE, *NO_EVALS, "--keep_checkpoints", "log2", "0.7K")  # 128 tokens per step
WEIGHTS_ONLY = ("--keep_optimizer", "false")


def kept_contents(run_name: str) -> dict[str, bytes]:
    """Return the files of a run's kept checkpoints, by path, without those that contain times."""
    folder = Path("runs") / run_name / "checkpoints"
    contents = {}
    for checkpoint_folder in checkpoint_files.list_checkpoints(folder):
        if not checkpoint_files.kept_as(checkpoint_folder):
            continue
        paths = {path for path in checkpoint_folder.rglob("*") if path.is_file()}
        if (checkpoint_folder / "training").exists():
            paths -= {
                checkpoint_folder / "training/state.json",
                checkpoint_folder / "manifest.json",
            }
        for path in paths:
            contents[path.relative_to(folder).as_posix()] = path.read_bytes()
    return contents


@pytest.mark.parametrize(
    ("flags", "kills"),
    [
        # During the save at step 0 and after it; at step 6; in the removal of step 3; and in the
        # last rotation, after step 6 has its new manifest.
        (
            WEIGHTS_ONLY,
            ("model:1", "step:1", "step:4", "manifest:2", "step:4", "rotate:1", "manifest:2"),
        ),
        ((), ("model:1", "step:1", "step:3", "manifest:2", "rename:2")),
    ],
    ids=["weights", "complete"],
)
def test_kept_checkpoints_survive_kills_bitwise(workspace, flags, kills):
    recorded = (RECORDED_TRAINING, *KEPT_FLAGS, *flags, "--run_name")
    run_script(*recorded, "whole", LEDGER="whole.ledger")

    for kill in kills:
        event = kill if kill.startswith("step") else f"save:{kill}"
        run_script(*recorded, "k", expect=-9, LEDGER="k.ledger", KILL_AT=event)
    run_script(*recorded, "k", LEDGER="k.ledger")

    assert kept_contents("k") == kept_contents("whole")
    kept_names = {name.partition("/")[0] for name in kept_contents("k")}
    assert kept_names == {f"step-{step:08d}" for step in (0, 1, 2, 4, 6, 8, 12)}
    assert final_state("k") == final_state("whole")


@pytest.mark.slow
def test_kept_checkpoints_of_two_processes_survive_kills(workspace):
    recorded = (RECORDED_TRAINING, *KEPT_FLAGS, *WEIGHTS_ONLY, "--run_name")
    run_script(*recorded, "whole", processes=2, LEDGER="whole.ledger")

    for kill in ("step:1", "step:3", "step:5", "step:3"):
        run_script(*recorded, "k", processes=2, expect=-9, LEDGER="k.ledger", KILL_AT=kill)
    run_script(*recorded, "k", processes=2, LEDGER="k.ledger")

    assert kept_contents("k") == kept_contents("whole")
    assert final_state("k") == final_state("whole")


def test_kept_weights_are_not_resumed_from(workspace):
    flags = (*KEPT_FLAGS, *WEIGHTS_ONLY, "--save_steps", "0", "--run_name", "r")
    recorded = (RECORDED_TRAINING, *flags)

    run_script(*recorded, expect=-9, LEDGER="k.ledger", KILL_AT="step:7")
    assert checkpoint_steps("r") == [6, 4, 2, 1, 0]
    no_weights = run_script("train.py", *flags, "--eval_only", expect=2)
    result = run_script(*recorded, LEDGER="k.ledger")
    repeated = run_script("train.py", *flags)

    assert "contains no checkpoint" in no_weights.stderr
    assert "resumed from" not in result.stderr
    assert "this run starts at step 0, because all checkpoints" in result.stderr
    assert checkpoint_steps("r") == [12, 8, 6, 4, 2, 1, 0]
    assert load_weights(checkpoint_path("r", 12)) == load_weights(Path("runs/r/model"))
    assert "nothing is left to train: the run in runs/r finished at step 12" in repeated.stderr


def test_run_that_stops_at_kept_weights_is_resumed_there(workspace):
    recorded = (RECORDED_TRAINING, *KEPT_FLAGS, *WEIGHTS_ONLY, "--run_name", "r")
    environment = {"LEDGER": "k.ledger"}

    run_script(*recorded, expect=130, STOP_AT="8:1", STOP_BY="SIGINT", **environment)
    path = checkpoint_path("r", 8)
    assert checkpoint_files.find_problem(path) is None
    result = run_script(*recorded, **environment)

    assert f"resumed from {path}" in result.stderr
    assert checkpoint_files.is_weights_only(path)


def test_killed_run_ignores_its_starting_checkpoint(finished_run):
    """It resumes from its own newest checkpoint, even if the starting checkpoint is deleted."""
    start = "runs/whole/checkpoints/step-00000009"
    flags = (*TINY_RECIPE, "--save_steps", "1", "--resume_from_checkpoint")
    recorded = (RECORDED_TRAINING, *flags, start, "--run_name", "k")

    result = run_script(*recorded, expect=-9, LEDGER="k.ledger", KILL_AT="step:3")
    assert f"resumed from {start}" in result.stderr
    shutil.rmtree(start)
    result = run_script(*recorded, LEDGER="k.ledger")

    assert "resumed from runs/k/checkpoints/step-00000011" in result.stderr
    assert final_state("k")["model.safetensors"] == final_state("whole")["model.safetensors"]


def test_eval_only_scores_checkpoint_of_another_run(finished_run):
    path = "runs/whole/checkpoints/step-00000009"
    flags = (*TINY_RECIPE, "--resume_from_checkpoint", path, "--eval_only", "--run_name", "other")

    result = run_script("train.py", *flags)

    assert f'"model": "{path}"' in result.stdout


def test_run_that_went_back_resumes_there(finished_run):
    """After a kill it continues from the repeated steps, not from the later ones before."""
    flags = (*TINY_RECIPE, "--run_name", "whole", "--save_steps", "1", "--save_total_limit", "0")
    back = (*flags, "--resume_from_checkpoint", "runs/whole/checkpoints/step-00000009")

    run_script(RECORDED_TRAINING, *back, expect=-9, LEDGER="k.ledger", KILL_AT="step:3")
    result = run_script(RECORDED_TRAINING, *back, LEDGER="k.ledger")

    assert "resumed from runs/whole/checkpoints/step-00000011" in result.stderr
    state = checkpoint.read_state(checkpoint_path("whole", 12))
    assert state["origin"]["checkpoint"] == "step-00000009"
    assert "nothing is left to train" in run_script("train.py", *flags).stderr


def test_run_resumes_from_another_folder(finished_run, monkeypatch):
    """The fixture copied the run, so that recipe.yaml names the folder where it was made."""
    shutil.rmtree(checkpoint_path("whole", 12))
    other_folder = finished_run / "other"
    other_folder.mkdir()
    monkeypatch.chdir(other_folder)

    result = run_script("train.py", "--recipe", "../runs/whole/recipe.yaml")
    assert "resumed from ../runs/whole/checkpoints/step-00000009" in result.stderr

    # Without the text: recipe.yaml names it by its absolute path now.
    Path("../runs/whole").rename("moved")
    result = run_script("train.py", "--recipe", "moved/recipe.yaml")
    assert "nothing is left to train" in result.stderr

    new_run = ("--run_name", "new", "--learning_rate", "1e-3")
    result = run_script("train.py", "--recipe", "moved/recipe.yaml", *new_run)
    assert "run      new in runs/new" in result.stderr
    assert "resumed" not in result.stderr
    names = {path.name for path in other_folder.iterdir() if not path.name.startswith(".")}
    assert names == {"moved", "runs"}


def test_processes_draw_the_same_dropout(finished_ddp_run):
    """Two processes split the 4 micro-batches of one process and draw the same dropout masks.

    The run `mixed` changes from one process to two and back. The signal reaches one of the two.
    """
    recorded = (RECORDED_TRAINING, *TINY_RECIPE, *NO_EVALS, "--run_name", "mixed")
    environment = {"LEDGER": "mixed.ledger", "STOP_BY": "SIGUSR1"}

    run_script(*recorded, expect=138, STOP_AT="3:1", **environment)
    run_script(*recorded, processes=2, expect=None, STOP_AT="8:0", **environment)
    assert checkpoint_steps("mixed")[0] == 8
    run_script(*recorded, **environment)

    expected_windows = windows_by_step("whole.ledger")
    assert len(expected_windows) == 12
    for name in ("two", "mixed"):
        assert windows_by_step(f"{name}.ledger") == expected_windows
        assert losses_by_step(name, "train/lr") == losses_by_step("whole", "train/lr")
        assert losses_by_step(name) == pytest.approx(losses_by_step("whole"), abs=1e-5)


def shapes_by_file(path: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the names and shapes of the tensors in a checkpoint, by the name of the file."""
    shapes = {}
    for file in sorted(path.rglob("*")):
        tensors = load_file(file) if file.suffix == ".safetensors" else {}
        name = file.relative_to(path).as_posix()
        shapes[name] = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    return shapes


def test_two_processes_write_checkpoint_of_one(finished_ddp_run):
    shapes = shapes_by_file(checkpoint_path("two", 12))

    assert shapes == shapes_by_file(checkpoint_path("whole", 12))
    assert "wte.weight" in shapes["model.safetensors"]
    assert "transformer.wte.weight/exp_avg" in shapes["training/optimizer.safetensors"]
    config = Path("config.json")
    expected_config = (checkpoint_path("whole", 12) / config).read_bytes()
    assert (checkpoint_path("two", 12) / config).read_bytes() == expected_config
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path("two", 12))
    assert model.config.activation_function == "gelu_new"


# The checkpoint of the lowest validation loss, and early stopping.


def validation_losses(run_name: str) -> dict[int, float]:
    """Return the validation loss by step."""
    return losses_by_step(run_name, "eval/loss")


def best_step(run_name: str) -> int:
    """Return the step of the lowest validation loss."""
    losses = validation_losses(run_name)
    return min(losses, key=losses.__getitem__)


def test_model_has_weights_of_lowest_validation_loss(overfitted_run):
    best = best_step("whole")
    loss = validation_losses("whole")[best]

    assert 0 < best < 9
    assert checkpoint_steps("whole") == [12, 9, best]
    weights = load_weights(Path("runs/whole/model"))
    assert weights == load_weights(checkpoint_path("whole", best))
    assert weights != load_weights(checkpoint_path("whole", 12))
    log = Path("runs/whole/run.log").read_text()
    assert f"weights of step {best}: validation loss {loss:.4f}" in log
    assert "the lowest of 7 evaluations" in log


def test_killed_run_keeps_its_best_checkpoint(overfitted_run):
    recorded = (RECORDED_TRAINING, *OVERFITTING_FLAGS, "--run_name", "k")

    for kill in ("save:rotate:1", "step:3"):
        run_script(*recorded, expect=None, LEDGER="k.ledger", KILL_AT=kill)
    run_script(*recorded, LEDGER="k.ledger")

    assert final_state("k") == final_state("whole")
    assert load_weights(Path("runs/k/model")) == load_weights(Path("runs/whole/model"))
    assert checkpoint_path("k", best_step("whole")).is_dir()


def test_new_run_searches_its_own_best_checkpoint(overfitted_run):
    start = ("--resume_from_checkpoint", "runs/whole/checkpoints/step-00000009")

    run_script("train.py", *OVERFITTING_FLAGS, *start, "--run_name", "other")

    best = best_step("other")
    state = checkpoint.read_state(checkpoint_path("other", 12))
    assert list(validation_losses("other")) == [10, 12]
    assert load_weights(Path("runs/other/model")) == load_weights(checkpoint_path("other", best))
    assert state["evaluations"] == 2
    assert state["best_step"] == best


def test_damaged_best_checkpoint_keeps_last_weights(overfitted_run):
    best = checkpoint_path("whole", best_step("whole"))
    newest = checkpoint_path("whole", 12)
    command = ("train.py", *OVERFITTING_FLAGS, "--run_name", "whole")
    (best / "model.safetensors").write_bytes(b"")

    damaged = run_script(*command)
    assert "lowest validation loss: model.safetensors has 0 bytes" in damaged.stderr
    assert "The last weights are kept" in damaged.stderr
    assert "the lowest of" not in damaged.stderr
    assert load_weights(Path("runs/whole/model")) == load_weights(newest)

    shutil.rmtree(best)
    shutil.rmtree(newest)
    resumed = run_script(*command)
    assert "resumed from runs/whole/checkpoints/step-00000009" in resumed.stderr
    assert "the lowest of 2 evaluations" in resumed.stderr


PATIENT = (*OVERFITTING_FLAGS, "--early_stopping_patience", "2", "--run_name", "r")


def test_early_stopped_run_can_be_continued(overfitted_run):
    stopped = run_script("train.py", *PATIENT, "--logging_steps", "100")
    best = best_step("r")
    end = best + 4  # two evaluations later
    losses = validation_losses("r")
    whole_losses = validation_losses("whole")
    assert end < 12
    assert losses == {step: loss for step, loss in whole_losses.items() if step <= end}
    assert f"step {end}: early stopping, after 2 evaluations" in stopped.stderr
    assert list(losses_by_step("r")) == [end]  # the last update is always logged
    assert load_weights(Path("runs/r/model")) == load_weights(checkpoint_path("r", best))

    repeated = run_script("train.py", *PATIENT)
    assert f"early stopping ended this run at step {end} of 12" in repeated.stderr
    assert list(losses_by_step("r")) == [end]
    assert validation_losses("r") == losses

    refused = run_script("train.py", *PATIENT, "--max_steps", "20", expect=2).stderr
    assert f"Early stopping ended it at step {end}" in refused
    assert "learning rate schedule has ended" not in refused

    suggestion = refused.partition(". To start a new run")[0]
    run_script("train.py", *suggested_flags(suggestion))
    assert validation_losses("r") == whole_losses
    assert final_state("r") == final_state("whole")


def test_last_step_of_early_stopped_run_stays_kept(overfitted_run):
    kept = ("--keep_checkpoints", "log2", "--keep_optimizer", "false", "--save_steps", "1")
    patience = ("--load_best_model_at_end", "false", "--early_stopping_patience")
    flags = (*PATIENT, *kept, "--eval_steps", "1", *patience)

    run_script("train.py", *flags, "3")
    end = max(validation_losses("r"))
    run_script("train.py", *flags, "0")

    assert end == 9
    assert checkpoint_steps("r") == sorted({0, 1, 2, 4, 8, 11, 12, end}, reverse=True)
    assert checkpoint_files.is_weights_only(checkpoint_path("r", end))


def test_best_weights_of_a_kept_checkpoint_are_loaded(overfitted_run):
    """The run searches the best weights only after its resumption."""
    kept = ("--keep_checkpoints", "log2", "--keep_optimizer", "false", "--save_steps", "5")
    flags = (*OVERFITTING_FLAGS, *kept, "--run_name", "r", "--load_best_model_at_end")
    recorded = (RECORDED_TRAINING, *flags, "false", "--eval_steps", "4")
    run_script(*recorded, expect=-9, KILL_AT="step:12", LEDGER="k.ledger")
    best = min(validation_losses("r"), key=validation_losses("r").__getitem__)
    assert best in (4, 8)

    run_script("train.py", *flags, "true", "--eval_steps", "1000")

    path = checkpoint_path("r", best)
    assert checkpoint_files.is_weights_only(path)
    assert load_weights(Path("runs/r/model")) == load_weights(path)


def test_extension_resets_early_stopping(overfitted_run):
    schedule = ("--lr_scheduler_type", "wsd", "--decay_ratio", "0.2", "--max_steps", "40")
    flags = (*PATIENT, *schedule, "--load_best_model_at_end", "false")

    run_script("train.py", *flags)
    end = max(validation_losses("r"))
    assert end < 30
    run_script("train.py", *flags, "--extend_steps", "5")

    assert list(validation_losses("r-45")) == [end, end + 2, end + 4]
    state = checkpoint.read_state(checkpoint_path("r-45", end + 4))
    assert state["since_best"] == 2
    assert state["planned"] is None
    assert state["science"]["max_steps"] == 45


@pytest.mark.parametrize(
    "flags", [("--load_best_model_at_end", "true"), ("--early_stopping_patience", "2")]
)
def test_finished_run_without_last_checkpoint_is_unchanged(overfitted_run, flags):
    unsaved = (*OVERFITTING_FLAGS, "--load_best_model_at_end", "false", *NO_SAVES)
    command = ("train.py", *unsaved, "--run_name", "r", *flags)
    result = run_script(*command)
    has_checkpoints = Path("runs/r/checkpoints").is_dir()
    assert ("checkpoints/ to resume from" in result.stderr) == has_checkpoints
    before = modification_times("runs/r")

    repeated = run_script(*command)

    last_line = repeated.stderr.splitlines()[-1]
    assert "nothing is left to train: the run in runs/r finished at step" in last_line
    assert modification_times("runs/r") == before


# Signals to the launcher.


class ForkedTrainer:
    """A fork of this process with the part of subprocess.Popen that the launcher uses."""

    def __init__(self, command, env):
        _, script, *flags = command
        # The fork replaces these streams. If they were deleted there, they would close its output.
        self.streams = [sys.stdout, sys.stderr]
        self.pid, _, _ = start_script(script, tuple(flags), env)

    def wait(self):
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def main(argv: list[str]) -> None:
    """Run ``accelerate launch train.py``.

    With FORKED_TRAINER the trainer is a fork, which need not import PyTorch again.
    """
    if "FORKED_TRAINER" in os.environ:
        launch.subprocess = types.SimpleNamespace(
            Popen=ForkedTrainer, CalledProcessError=subprocess.CalledProcessError
        )
    config = ROOT / "accelerate_configs" / "cpu.yaml"
    words = ["--config_file", str(config), str(ROOT / "train.py"), *argv]
    launch.launch_command(launch.launch_command_parser().parse_args(words))


def process_tree(pid: int) -> list[int]:
    """Return the ids of a process and all of its descendants."""
    children = psutil.Process(pid).children(recursive=True)
    return [pid, *(child.pid for child in children)]


def stop_launcher(pid: int, number: signal.Signals) -> None:
    """Send a signal to a launcher, and wait until it and its descendants have ended."""
    pids = process_tree(pid)
    os.kill(pid, number)
    os.waitpid(pid, 0)
    wait_until(lambda: not any(map(is_running, pids)), 60)  # training itself takes longer


def printed_text() -> str:
    """Return what all processes have printed in this folder."""
    return "".join(path.read_text() for path in Path().glob(".out-*"))


ENDLESS = (*TINY_RECIPE, *NO_EVALS, *NO_SAVES, "--run_name", "s", "--max_steps", "100000")


@pytest.mark.parametrize(
    "number, environment",
    [
        pytest.param(signal.SIGTERM, {"FORKED_TRAINER": "1"}, id="SIGTERM"),
        pytest.param(signal.SIGINT, {}, id="SIGINT", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, {}, id="SIGTERM, not forked", marks=pytest.mark.slow),
    ],
)
def test_signal_to_launcher_saves_and_ends_processes(workspace, number, environment):
    pid, _, _ = start_script(__file__, ENDLESS, environment)
    metrics = Path("runs/s/metrics.jsonl")
    wait_until(lambda: metrics.exists() and losses_by_step("s"), 60)

    stop_launcher(pid, number)

    assert "the same command resumes" in printed_text()
    (path,) = checkpoint_files.list_checkpoints(Path("runs/s/checkpoints"))
    assert checkpoint_files.find_problem(path) is None


@pytest.mark.slow
def test_launcher_stopped_during_imports_leaves_no_process(workspace):
    shutil.rmtree("data")
    pid, _, _ = start_script(__file__, ENDLESS, {})
    wait_until(lambda: len(process_tree(pid)) == 3, 60)  # launcher, trainer, reader

    stop_launcher(pid, signal.SIGTERM)

    assert "stopped by" not in printed_text()
    assert not Path("runs").exists()


# Updates that are not finite.


def spoil_losses(monkeypatch, passes: set[int], value: float, rank: str = "0") -> None:
    """Multiply the loss by ``value`` in these forward passes with gradients of one process."""
    forward = NextTokenLoss.forward
    count = 0

    def spoiled(self, *batch, **options):
        nonlocal count
        losses = forward(self, *batch, **options)
        if not torch.is_grad_enabled():
            return losses
        count += 1
        if count not in passes or os.environ.get("RANK", "0") != rank:
            return losses
        return Losses(*(loss * value for loss in losses))

    monkeypatch.setattr(NextTokenLoss, "forward", spoiled)


def test_three_bad_updates_stop_the_run(workspace, monkeypatch):
    # The memory trial has 2 micro-batches, and each step has 4. Pass 3 is in step 1, the others
    # are in steps 5, 6 and 7.
    spoil_losses(monkeypatch, {3, 19, 23, 27}, float("nan"))

    run_script("train.py", *TINY_RECIPE, *NO_EVALS, "--run_name", "n", expect=1)

    skipped = {row["step"]: row["skipped_updates"] for row in metrics_rows("n")}
    assert skipped == {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 3, 7: 4}
    assert [step for step, loss in losses_by_step("n").items() if loss is None] == [1, 5, 6, 7]
    assert checkpoint_steps("n")[0] == 7
    newest = checkpoint_path("n", 7)
    assert checkpoint.read_state(newest)["skipped_updates"] == 4
    for name in ("model.safetensors", "training/optimizer.safetensors"):
        for tensor in load_file(newest / name).values():
            assert torch.isfinite(tensor).all()


def test_bad_update_is_skipped_by_all_processes(workspace, monkeypatch):
    # The memory trial has 2 passes and each step has 2 for each process: pass 7 is in step 3.
    spoil_losses(monkeypatch, {7}, float("inf"), rank="1")
    flags = (*TINY_RECIPE, *NO_EVALS, "--run_name", "p", "--max_steps", "4")

    run_script("train.py", *flags, processes=2)

    assert [row["skipped_updates"] for row in metrics_rows("p")] == [0, 0, 1, 1]


# Evaluation and input.


def test_eval_only_writes_nothing(finished_run):
    before = modification_times("runs")
    # Another learning rate is allowed, because nothing is trained.
    flags = (*TINY_RECIPE, "--run_name", "whole", "--eval_only", "--learning_rate", "0.5")

    result = run_script("train.py", *flags)

    scores = json.loads(result.stdout.splitlines()[-1])
    last_row = [row for row in metrics_rows("whole") if "eval/loss" in row][-1]
    assert scores["eval/loss"] == last_row["eval/loss"]
    assert scores["eval/bits_per_byte"] == last_row["eval/bits_per_byte"]
    assert modification_times("runs") == before


def test_evaluations_and_data_folder_leave_training_unchanged(finished_run):
    before = sorted(Path("data").iterdir())
    rare = ("--eval_on_start", "false", "--eval_steps", "12", "--sample_steps", "12")
    flags = (*TINY_RECIPE, *rare, "--prepared_data_dir", "another/folder", "--run_name", "late")

    run_script("train.py", *flags)

    assert losses_by_step("late") == losses_by_step("whole")
    assert list(losses_by_step("late", "eval/loss")) == [12]
    assert "==== step 0" not in Path("runs/late/samples.txt").read_text()
    assert sorted(Path("data").iterdir()) == before
    (folder,) = Path("another/folder").iterdir()
    assert (Path("data") / folder.name / "manifest.json").is_file()
    late = final_state("late")
    whole = final_state("whole")
    assert late["state"].pop("evaluations") == 1
    assert whole["state"].pop("evaluations") == 4
    assert late["state"].pop("since_best") == 0
    assert whole["state"].pop("since_best") >= 0
    assert late == whole


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--sample_prompts", "the ", "the 中é"], "no id for 'é' '中'"),
        (["--data_files", "short.txt"], "training window"),
        (["--vocab_size", "8"], "--vocab_size 64"),
        (["--eval_only"], "contains no checkpoint"),
        (["--data_dir", "nano"], "--tokenizer openai-community/gpt2"),
    ],
    ids=["prompt", "short text", "vocabulary", "no checkpoint", "no tokenizer"],
)
def test_bad_input_is_reported_before_writing(workspace, flags, message):
    Path("short.txt").write_text("too short to fill a window")
    Path("nano").mkdir()
    for name in ("train.bin", "val.bin"):
        np.arange(50, dtype=np.uint16).tofile(f"nano/{name}")

    result = run_script("train.py", *TINY_RECIPE, *flags, expect=2)

    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not Path("runs").exists()


def test_shards_of_another_tokenizer_are_rejected(finished_run):
    (folder,) = Path("data").glob("text-*")
    path = folder / shards.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["tokenizer"]["fingerprint"] = "0" * 64
    path.write_text(json.dumps(manifest))

    result = run_script("train.py", *TINY_RECIPE, "--run_name", "t", expect=2)

    assert "not encoded with the tokenizer" in result.stderr


# A full disk.


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit the size of the files that a process can write, like a disk that is almost full."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))


def test_unwritable_model_is_written_by_next_run(finished_run):
    shutil.rmtree("runs/whole/checkpoints/step-00000012")
    shutil.rmtree("runs/whole/model")
    command = ("train.py", *TINY_RECIPE, "--run_name", "whole")

    with file_size_limit(60_000):
        result = run_script(*command, expect=1)
    assert "\nerror: runs/whole/model: File too large" in result.stderr
    assert "ulimit -f" in result.stderr
    assert "the same command resumes" in result.stderr
    assert "the checkpoint of step 12 was not saved" in result.stderr
    assert "Traceback" not in result.stderr
    assert os.listdir("runs/whole/checkpoints") == ["step-00000009"]

    run_script(*command)
    assert Path("runs/whole/model/model.safetensors").stat().st_size > 60_000


def test_unwritable_data_stops_preparation_and_training(workspace):
    shutil.rmtree("data")
    flags = (*TINY_RECIPE, *NO_EVALS, "--run_name", "f")

    with file_size_limit(12_000):
        prepared = run_script("prepare_data.py", *flags, expect=1)
        trained = run_script("train.py", *flags, expect=1)
    for result in (prepared, trained):
        assert "File too large: raise the limit" in result.stderr
        assert "Traceback" not in result.stderr
    assert "prepare_data.py stopped with exit status 1" in trained.stderr

    run_script("train.py", *flags, "--max_steps", "1", "--warmup_steps", "1")


# Streamed data: the order of the windows does not depend on how they are read.

STREAM_KEYS = """
validation_tokens: 60
shard_tokens: 150
shuffle_block_tokens: 64
"""


def make_documents() -> list[str]:
    """Return 24 short documents."""
    documents = []
    for number in range(24):
        length = 12 + number % 9
        words = [WORDS[(number * 7 + index) % len(WORDS)] for index in range(length)]
        documents.append(f"{number} {' '.join(words)}")
    return documents


def make_streams() -> None:
    """Write the recipes stream.yaml and mixture.yaml, their data and the tokenizer they share.

    The stream is four Parquet files. The mixture is two of them and a JSON lines file.
    """
    # Imported here, because pyarrow is not a dependency of training on text files.
    import pyarrow as pa
    import pyarrow.parquet as pq

    documents = make_documents()
    for part, name in enumerate(("a0", "a1", "b2", "b3")):
        texts = documents[part * 6 : part * 6 + 6]
        table = pa.table({"id": list(range(6)), "text": texts})
        pq.write_table(table, f"{name}.parquet", row_group_size=4)
    lines = [json.dumps({"text": text}) + "\n" for text in documents[:10]]
    Path("c.jsonl").write_text("".join(lines))
    tokenization.train_bpe(documents, 300).save_pretrained("tok")

    recipe = RECIPE.replace("tokenizer: characters", "tokenizer: tok")
    recipe = recipe.replace("vocab_size: 64", "vocab_size: 320") + STREAM_KEYS
    sources = (
        "sources:\n"
        "- {weight: 3, data_files: ['a*.parquet']}\n"
        "- {weight: 1, data_files: [c.jsonl], shard_tokens: 90}"
    )
    Path("stream.yaml").write_text("data_files: ['*.parquet']\n" + recipe)
    Path("mixture.yaml").write_text(sources + recipe)


@pytest.fixture(scope="session")
def streams(tmp_path_factory):
    """A shared folder with the files of ``make_streams``."""
    return create_shared_folder(tmp_path_factory, "streams", make_streams)


streaming = copy_fixture("streams")


def windows_in_order(path: str) -> list[str]:
    """Return the windows of a window log in the order of their positions in the run.

    A position is (micro_step * processes + rank) * batch size + row.
    """
    windows = []
    for _, draws in sorted(read_window_log(Path(path)).items()):
        windows.extend(draws.split())
    return windows


def count_windows(folder: Path) -> int:
    """Return the number of train windows of a folder, without the product's code."""
    rows = json.loads((folder / "manifest.json").read_text())["splits"]["train"]
    count = 0
    for row in rows:
        header_bytes = 1024
        tokens = ((folder / row["file"]).stat().st_size - header_bytes) // 2
        count += (tokens - 1) // 16
    return count


def shard_contents() -> dict[Path, bytes]:
    """Return the contents of all prepared shards."""
    return {path: path.read_bytes() for path in Path("data").rglob("*.bin")}


def assert_epochs_are_complete(windows: list[str], folders: list[str]) -> None:
    """Check that each of the first two epochs of a source has each of its windows once.

    Args:
        windows: "source:window" in the order of the run.
        folders: a pattern of the prepared folder of each source, in the order of the sources.
    """
    sources = sorted({window.split(":")[0] for window in windows})
    for source, pattern in zip(sources, folders, strict=True):
        count = count_windows(next(Path("data").glob(pattern)))
        own_windows = [window for window in windows if window.startswith(f"{source}:")]
        epoch = sorted(f"{source}:{number}" for number in range(count))
        assert len(own_windows) >= 2 * count
        assert sorted(own_windows[:count]) == epoch
        assert sorted(own_windows[count : 2 * count]) == epoch


@pytest.mark.parametrize(
    "recipe, folders",
    [
        ("stream.yaml", ["a0-*"]),
        pytest.param("mixture.yaml", ["a0-*", "c-*"], marks=pytest.mark.slow),
    ],
)
def test_streamed_windows_survive_kills_of_both_processes(streaming, recipe, folders):
    command = (RECORDED_TRAINING, "--recipe", recipe, *NO_EVALS, "--run_name")
    run_script(*command, "one", LEDGER="one.ledger")
    windows = windows_in_order("one.ledger")
    assert len(windows) == 12 * 8
    assert_epochs_are_complete(windows, folders)
    contents = shard_contents()

    # The micro-batch size does not change the order.
    run_script(*command, "batch", "--per_device_train_batch_size", "4", LEDGER="batch.ledger")
    assert windows_in_order("batch.ledger") == windows

    shutil.rmtree("data")
    killed = (*command, "killed")
    ledger = {"LEDGER": "killed.ledger"}
    run_script(*killed, expect=-9, KILL_AT="step:4", KILL_READER="1", **ledger)
    run_script(*killed, expect=-9, KILL_AT="step:2", **ledger)
    run_script(*killed, **ledger)
    assert windows_in_order("killed.ledger") == windows
    assert losses_by_step("killed") == losses_by_step("one")
    assert final_state("killed")["model.safetensors"] == final_state("one")["model.safetensors"]
    assert shard_contents() == contents


def test_external_shards_are_read_in_place(streaming):
    Path("theirs").mkdir()
    for split, count in (("train", 2000), ("val", 500)):
        ids = np.random.RandomState(count).randint(0, 300, count).astype(np.uint16)
        np.save(f"theirs/edufineweb_{split}_000001.npy", ids)
    before = modification_times("theirs")
    flags = ("--recipe", "stream.yaml", "--data_dir", "theirs", "--run_name", "t")

    result = run_script("train.py", *flags, "--max_steps", "4", "--sample_steps", "0")

    assert "theirs: 2,000 train tokens; the run reads 512" in result.stderr
    assert len(losses_by_step("t")) == 4
    assert modification_times("theirs") == before
    assert not Path("data").exists()


def test_training_follows_data_preparation(streaming, monkeypatch):
    """Training starts with the first block, waits for more, stops at a damaged file and resumes."""
    import pyarrow.parquet as pq

    monkeypatch.setattr("ursa_minor.data.loading.background.LOG_SECONDS", 0.0)
    flags = ("--recipe", "stream.yaml", *NO_EVALS, "--run_name")
    run_script(RECORDED_TRAINING, *flags, "whole", LEDGER="whole.ledger")
    shutil.rmtree("data")
    intact = Path("b3.parquet").read_bytes()
    metadata = pq.ParquetFile("b3.parquet").metadata
    # The first rows are read before the run starts, so a later row group is damaged.
    offset = metadata.row_group(metadata.num_row_groups - 1).column(0).data_page_offset
    Path("b3.parquet").write_bytes(intact[:offset] + bytes(100) + intact[offset + 100 :])

    held = {"LEDGER": "s.ledger", "HOLD_READER": "2", "ACCELERATE_USE_CPU": "true"}
    pid, _, err = start_script(RECORDED_TRAINING, (*flags, "s"), held)
    waits = r"waits for data: \d+ of \d+ windows are prepared"
    wait_until(lambda: re.search(waits, Path(err).read_text()) and losses_by_step("s"), 60)
    (folder,) = Path("data").glob("a0-*")
    assert not manifests.is_complete(folder)
    # A step reads 8 windows: all steps with complete data are done, and no more.
    assert 1 <= len(losses_by_step("s")) == count_windows(folder) // 8

    Path("go").touch()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    message = Path(err).read_text()
    assert re.search(r"b3.parquet: (row \d+: )?cannot be read: .*Repair or replace", message)
    assert "Traceback" not in message
    assert 0 < checkpoint_steps("s")[0] == len(losses_by_step("s")) < 12

    Path("b3.parquet").write_bytes(intact)
    run_script(RECORDED_TRAINING, *flags, "s", LEDGER="s.ledger")
    assert windows_in_order("s.ledger") == windows_in_order("whole.ledger")
    assert len(losses_by_step("s")) == 12
    assert final_state("s")["model.safetensors"] == final_state("whole")["model.safetensors"]
    waited_seconds = [row["data_wait_seconds"] for row in metrics_rows("s")]
    assert waited_seconds[0] > 0
    assert waited_seconds == sorted(waited_seconds)


@pytest.mark.slow
def test_consumed_shards_are_deleted(streaming):
    """The remaining shards suffice to resume a killed run exactly, but not for a new run."""
    steps = ("--tokens_per_step", "32", "--save_steps", "1", "--max_steps", "8")
    blocks = ("--shard_tokens", "40", "--shuffle_block_tokens", "32")
    flags = ("--recipe", "stream.yaml", *NO_EVALS, *steps, *blocks, "--run_name")
    run_script(RECORDED_TRAINING, *flags, "all", LEDGER="all.ledger")
    shutil.rmtree("data")

    consumed = (RECORDED_TRAINING, *flags, "s", "--stream_keep", "consumed")
    run_script(*consumed, LEDGER="s.ledger", expect=-9, KILL_AT="step:5")
    run_script(*consumed, LEDGER="s.ledger")

    assert windows_in_order("s.ledger") == windows_in_order("all.ledger")
    assert final_state("s", 8)["model.safetensors"] == final_state("all", 8)["model.safetensors"]
    # The older of the two kept checkpoints is step 7. A step has 2 windows, so 14 are consumed.
    (folder,) = Path("data").glob("a0-*")
    train = manifests.read_manifest(folder).splits["train"]
    ends = np.cumsum([(shard.tokens - 1) // 16 for shard in train])
    needed = [shard.file for shard, end in zip(train, ends, strict=True) if end > 14]
    assert sorted(path.name for path in folder.glob("train_*.bin")) == needed
    new_run = run_script("train.py", *flags, "new", expect=2)
    assert "this file does not exist" in new_run.stderr


def test_second_epoch_of_consumed_shards_is_rejected(streaming):
    Path("one.txt").write_text("the cat sat on the mat " * 20)
    flags = ("--recipe", "stream.yaml", "--stream_keep", "consumed", "--data_files", "one.txt")

    result = run_script("train.py", *flags, "--run_name", "s", expect=2)

    assert "stream_keep = consumed" in result.stderr
    assert "deleted after their first use" in result.stderr
    assert "--max_steps" in result.stderr
    assert not Path("runs").exists()
    assert not Path("data").exists()
