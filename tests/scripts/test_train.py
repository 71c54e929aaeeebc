"""End to end: what a run promises, through the real script, on a small character model with dropout."""

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

from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import shards
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.model.loss import Losses, NextTokenLoss
from ursa_minor.recipe import loading

UNSEEN = ("--eval_steps", "0", "--sample_steps", "0")


def test_data_that_is_not_there_is_refused_before_torch_is_imported(workspace):
    Path("mine.txt").write_text("text")
    code = "import runpy, sys; sys.modules['torch'] = None; del sys.argv[0]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    words = ["--recipe", str(ROOT / "recipes" / "own_text.yaml"), "--data_files", "mine.tx"]
    words += ["--max_steps", "20"]  # a valid command would log a note on the warm-up
    command, environment = (
        [sys.executable, "-c", code, str(ROOT / "train.py"), *words],
        {"PYTHONPATH": str(ROOT)},
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = "error: data_files: the file mine.tx does not exist; did you mean mine.txt?"
    assert (done.returncode, done.stderr.splitlines()) == (2, [said])


def test_a_run_leaves_everything_that_the_readme_names(workspace):
    done = run_script("train.py", *TINY_RECIPE, "--run_name", "r", PICTURES="1")
    folder = Path("runs/r")
    for name in (
        "recipe.yaml",
        "metrics.jsonl",
        "curves.png",
        "samples.txt",
        "run.log",
        "model/config.json",
    ):
        assert (folder / name).stat().st_size > 0, name
    shown, kept = (text.splitlines() for text in (done.stderr, (folder / "run.log").read_text()))
    assert len(kept) > 15 and kept == [
        line for line in shown if "\r" not in line and "it/s]" not in line
    ]
    steps = [row["step"] for row in metrics_rows("r") if "train/loss" in row]
    assert steps == list(range(1, 13))
    assert [row["step"] for row in metrics_rows("r") if "eval/loss" in row] == [0, 4, 8, 12]
    assert all("eval/bits_per_byte" in row for row in metrics_rows("r") if "eval/loss" in row)
    assert "runs/r/model/" in done.stderr
    assert "bits per byte" in done.stderr
    (baseline,) = (row for row in metrics_rows("r") if "baseline/bigram" in row)
    assert (
        baseline["step"] == 12
        and 0 < baseline["baseline/bigram"] < 5
        and 0 < baseline["baseline/gzip"] < 8
    )
    assert f"bigram baseline {baseline['baseline/bigram']:.4f} nats per token, " in done.stderr
    assert loading.load_recipe(folder / "recipe.yaml").saving.run_name == "r"
    assert [p.name for p in checkpoint.list_checkpoints(folder / "checkpoints")] == [
        "step-00000012",
        "step-00000009",
    ]
    drawn = (folder / "samples.txt").read_text()
    again = run_script("train.py", *TINY_RECIPE, "--run_name", "r", "--sample_temperature", "0")
    assert "resumed from runs/r/checkpoints/step-00000012" in again.stderr
    assert "nothing is left to train" in again.stderr
    assert drawn != (folder / "samples.txt").read_text() and list(losses_by_step("r")) == steps


def test_without_prompts_samples_continue_beginnings_of_validation_documents(workspace):
    for name in ("one", "two"):
        Path(f"{name}.txt").write_text(
            f"The text {name} of ours\n" + Path("text.txt").read_text()[:400]
        )
    given = (
        "--data_files",
        "text.txt",
        "--validation_files",
        "one.txt",
        "two.txt",
        "--sample_steps",
        "2",
    )
    Path("bare.yaml").write_text(
        re.sub("^sample_prompts.*\n", "", Path("tiny.yaml").read_text(), flags=re.M)
    )
    run_script(
        "train.py",
        "--recipe",
        "bare.yaml",
        *given,
        "--max_steps",
        "2",
        "--save_steps",
        "0",
        "--run_name",
        "bare",
    )
    found = re.findall(
        "^==== step 2 · prompt '(.*)' ====$", Path("runs/bare/samples.txt").read_text(), re.M
    )
    assert found == ["The text", "The text"]


def test_the_header_warns_of_many_epochs_and_of_validation_text_that_is_unlike_the_trains(
    workspace,
):
    Path("held.txt").write_text("中文 " * 400)
    Path("short.txt").write_text(Path("text.txt").read_text()[:600])
    files = ("--data_files", "short.txt", "--validation_files", "held.txt", "--tokenizer", "bpe")
    room = ("--tokenizer_vocab_size", "280", "--vocab_size", "320")
    done = run_script(
        "train.py", *TINY_RECIPE, *UNSEEN, "--save_steps", "0", *files, *room, "--run_name", "many"
    ).stderr
    assert "reads this text more than 4 times" in done and "dropout" in done
    assert re.search(
        r"note     the validation text has \d\.\d\d bytes per token .*--validation_files", done
    )


# Steps 1, 4, 8 and 12 of conftest's recipe on its text; fp32 on a CPU, torch 2.13.0. No dropout: its random numbers are
# PyTorch's business. Another machine's kernels round otherwise, and Muon makes more of it.
GOLDEN = {
    "adamw": ([4.174410, 3.808260, 3.431451, 3.270961], 2e-5),
    "muon": ([4.174410, 3.870184, 3.454048, 3.300250], 2e-4),
}


@pytest.mark.parametrize(
    "optimizer, micro_batch, rows", [("adamw", "2", None), ("adamw", "8", None), ("muon", "2", 5)]
)
def test_the_loss_curve_moves_only_when_the_changelog_says_so(
    workspace, monkeypatch, optimizer, micro_batch, rows
):
    """Also of one large micro-batch, and where the loss is computed a few rows at a time, as for large micro-batches."""
    if rows:
        monkeypatch.setattr(NextTokenLoss, "rows", rows)
    curve, tolerance = GOLDEN[optimizer]
    still = [word for kind in ("resid", "embd", "attn") for word in (f"--{kind}_pdrop", "0")]
    still += ["--optimizer", optimizer, "--per_device_train_batch_size", micro_batch]
    run_script("train.py", *TINY_RECIPE, *still, *UNSEEN, "--save_steps", "0", "--run_name", "r")
    assert [losses_by_step("r")[step] for step in (1, 4, 8, 12)] == pytest.approx(
        curve, abs=tolerance
    )


def test_train_loss_of_two_processes_is_the_plain_cross_entropy(finished_run):
    """The first update's losses are those of the initial weights, whatever the objective is."""
    terms = (
        "--z_loss",
        "0.05",
        "--label_smoothing",
        "0.2",
        "--max_steps",
        "2",
        "--warmup_steps",
        "1",
    )
    done = run_script(
        "train.py",
        *TINY_RECIPE,
        *UNSEEN,
        *terms,
        "--save_steps",
        "0",
        "--run_name",
        "r",
        processes=2,
    )
    loss, objective = (losses_by_step("r", name)[1] for name in ("train/loss", "train/objective"))
    assert loss == pytest.approx(losses_by_step("whole")[1], abs=1e-5) and objective > loss + 0.1
    assert not losses_by_step("whole", "train/objective")
    assert "  objective " in done.stderr


def test_a_finished_wsd_run_trained_on_equals_one_that_was_as_long_from_the_start(workspace):
    wsd = (
        *TINY_RECIPE,
        *UNSEEN,
        "--lr_scheduler_type",
        "wsd",
        "--decay_ratio",
        "0.3",
        "--save_steps",
        "5",
    )
    run_script("train.py", *wsd, "--run_name", "r")
    kept = checkpoint.list_checkpoints(Path("runs/r/checkpoints"))
    assert [checkpoint.step_of(path) for path in kept] == [
        12,
        10,
        8,
    ]  # two, and that before the decay
    run_script("train.py", *wsd, "--max_steps", "20", "--run_name", "whole")
    said = run_script("train.py", *wsd, "--run_name", "r", "--max_steps", "17", expect=2).stderr
    assert "--extend_steps 5" in said and said.count("error: ") == 1
    run_script("train.py", *shlex.split(said.partition("python train.py ")[2]))
    done = run_script(
        "train.py", "--recipe", "runs/r-17/recipe.yaml", "--extend_steps", "3"
    )  # its own line is undone in turn
    assert "resumed from runs/r-17/checkpoints/step-00000012" in done.stderr
    longer, whole = final_state("r-20", 20), final_state("whole", 20)
    assert longer["state"].pop("origin") and not whole["state"].pop("origin")
    assert longer == whole
    assert (
        list(losses_by_step("r-17")) == list(range(9, 18))
        and Path("runs/r/model/model.safetensors").is_file()
    )


def test_another_length_is_refused_where_a_learning_rate_so_far_would_be_another(finished_run):
    begin = (
        "--resume_from_checkpoint",
        "runs/whole/checkpoints/step-00000009",
        "--run_name",
        "longer",
    )
    done = run_script("train.py", *TINY_RECIPE, *UNSEEN, *begin, "--max_steps", "20", expect=2)
    assert "max_steps = 12, but the command has max_steps = 20" in done.stderr


def test_what_cannot_be_trained_on_is_refused_before_anything_is_made(workspace):
    done = run_script("train.py", *TINY_RECIPE, "--run_name", "r", "--extend_steps", "5", expect=2)
    assert (
        "runs/r/checkpoints contains no complete checkpoint from before the decay phase"
        in done.stderr
    )
    assert not Path("runs").exists()


def test_killed_inside_each_stage_of_a_save_or_between_saves_or_stopped_and_resumed_equals_uninterrupted(
    finished_run,
):
    stages = [
        f"save:{stage}:1"
        for stage in ("model", "optimizer", "state", "manifest", "rename", "rotate")
    ]
    for kill in ("step:2", *stages, "step:1"):
        run_script(
            RECORDED_TRAINING,
            *TINY_RECIPE,
            "--run_name",
            "k",
            expect=-9,
            LEDGER="k.ledger",
            KILL_AT=kill,
        )
    # A signal abandons the partial step and saves the last whole one.
    mark = {"URSA_MINOR_STOPPED_FILE": "stopped"}
    stop = {"STOP_AT": "11:2", "STOP_BY": "SIGINT"}
    done = run_script(
        RECORDED_TRAINING,
        *TINY_RECIPE,
        "--run_name",
        "k",
        expect=130,
        LEDGER="k.ledger",
        **stop,
        **mark,
    )
    Path("stopped").unlink()  # scripts/slurm.sh looks for it
    assert (
        "stopped by SIGINT after step 11" in done.stderr
        and "the same command resumes" in done.stderr
    )
    assert checkpoint.list_checkpoints(Path("runs/k/checkpoints"))[0].name == "step-00000011"
    run_script(RECORDED_TRAINING, *TINY_RECIPE, "--run_name", "k", LEDGER="k.ledger", **mark)
    assert not Path("stopped").exists()
    assert final_state("k") == final_state("whole")
    assert read_window_log(Path("k.ledger")) == read_window_log(Path("whole.ledger"))
    assert not list(Path("runs/k/checkpoints").glob(".step-*"))
    kept = [{k: v for k, v in row.items() if k not in TIME_METRICS} for row in metrics_rows("k")]
    assert kept == [
        {k: v for k, v in row.items() if k not in TIME_METRICS} for row in metrics_rows("whole")
    ]
    assert Path("runs/k/samples.txt").read_text() == Path("runs/whole/samples.txt").read_text()


def best_of(run_name: str) -> tuple[int, dict[int, float]]:
    """The step of the lowest validation loss, and the loss by step."""
    found = losses_by_step(run_name, "eval/loss")
    return min(found, key=found.__getitem__), found


def test_model_has_the_weights_of_the_lowest_validation_loss_whose_checkpoint_is_kept_after_kills_too(
    overfitted_run,
):
    (best, found), kept = best_of("whole"), Path("runs/whole/checkpoints")
    assert 0 < best < 9 and [
        checkpoint.step_of(path) for path in checkpoint.list_checkpoints(kept)
    ] == [12, 9, best]
    assert (
        load_weights(Path("runs/whole/model"))
        == load_weights(kept / f"step-{best:08d}")
        != load_weights(kept / "step-00000012")
    )
    log = Path("runs/whole/run.log").read_text()
    said = f"model/ has the weights of step {best}: validation loss {found[best]:.4f}, the lowest of 7 evaluations"
    assert said in log
    for kill in ("save:rotate:1", "step:3"):
        run_script(
            RECORDED_TRAINING,
            *OVERFITTING_FLAGS,
            "--run_name",
            "k",
            expect=None,
            LEDGER="k.ledger",
            KILL_AT=kill,
        )
    run_script(RECORDED_TRAINING, *OVERFITTING_FLAGS, "--run_name", "k", LEDGER="k.ledger")
    assert final_state("k") == final_state("whole")
    assert load_weights(Path("runs/k/model")) == load_weights(Path("runs/whole/model"))
    assert (Path("runs/k/checkpoints") / f"step-{best:08d}").is_dir()


def test_a_run_that_begins_elsewhere_or_lost_its_best_checkpoint_looks_for_the_best_anew(
    overfitted_run,
):
    begin = ("--resume_from_checkpoint", "runs/whole/checkpoints/step-00000009")
    run_script("train.py", *OVERFITTING_FLAGS, *begin, "--run_name", "other")
    best, found = best_of("other")
    assert list(found) == [10, 12]
    assert load_weights(Path("runs/other/model")) == load_weights(
        Path(f"runs/other/checkpoints/step-{best:08d}")
    )
    state = json.loads(Path("runs/other/checkpoints/step-00000012/state.json").read_text())
    assert state["evaluations"] == 2 and state["best_step"] == best

    lost, newest = (
        Path(f"runs/whole/checkpoints/step-{step:08d}") for step in (best_of("whole")[0], 12)
    )
    (lost / "model.safetensors").write_bytes(b"")
    said = run_script("train.py", *OVERFITTING_FLAGS, "--run_name", "whole").stderr
    assert "which has the lowest validation loss: model.safetensors has 0 bytes" in said
    assert "The last weights are kept" in said and "the lowest of" not in said
    assert load_weights(Path("runs/whole/model")) == load_weights(newest)
    for path in (lost, newest):
        shutil.rmtree(path)
    said = run_script("train.py", *OVERFITTING_FLAGS, "--run_name", "whole").stderr
    assert (
        "resumed from runs/whole/checkpoints/step-00000009" in said
        and "the lowest of 2 evaluations" in said
    )


PATIENT = (*OVERFITTING_FLAGS, "--early_stopping_patience", "2", "--run_name", "r")


def test_early_stopping_ends_a_run_and_a_larger_patience_continues_it(overfitted_run):
    done = run_script("train.py", *PATIENT, "--logging_steps", "100")
    (best, found), (_, whole) = best_of("r"), best_of("whole")
    end = best + 4
    assert found == {step: loss for step, loss in whole.items() if step <= end} and end < 12
    assert (
        f"step {end}: early stopping, after 2 evaluations without a lower validation loss"
        in done.stderr
    )
    assert list(losses_by_step("r")) == [end]  # as at max_steps, the last update has a row
    assert load_weights(Path("runs/r/model")) == load_weights(
        Path(f"runs/r/checkpoints/step-{best:08d}")
    )

    again = run_script("train.py", *PATIENT)
    assert (
        f"early stopping ended this run at step {end} of 12. To continue it, use an" in again.stderr
    )
    assert list(losses_by_step("r")) == [end] and best_of("r") == (best, found)
    refused = run_script("train.py", *PATIENT, "--max_steps", "20", expect=2).stderr
    assert f"Early stopping ended it at step {end}. To continue it to step 12: python" in refused
    assert "learning rate schedule has ended" not in refused

    command = refused.partition("python train.py ")[2].partition(". To start a new run")[0]
    run_script("train.py", *shlex.split(command))  # patience 0
    assert best_of("r") == best_of("whole") and final_state("r") == final_state("whole")


def test_extending_a_run_resets_early_stopping_and_keeps_its_schedule(overfitted_run):
    wsd = (
        *PATIENT,
        "--lr_scheduler_type",
        "wsd",
        "--decay_ratio",
        "0.2",
        "--load_best_model_at_end",
        "false",
    )
    run_script("train.py", *wsd, "--max_steps", "40")
    end = max(losses_by_step("r", "eval/loss"))
    assert end < 30
    run_script("train.py", *wsd, "--max_steps", "40", "--extend_steps", "5")
    assert list(losses_by_step("r-45", "eval/loss")) == [end, end + 2, end + 4]
    state = json.loads(Path(f"runs/r-45/checkpoints/step-{end + 4:08d}/state.json").read_text())
    assert (
        state["since_best"] == 2
        and state["planned"] is None
        and state["science"]["max_steps"] == 45
    )


@pytest.mark.parametrize(
    "flags", [("--load_best_model_at_end", "true"), ("--early_stopping_patience", "2")]
)
def test_a_finished_run_without_a_last_checkpoint_is_left_as_it_is(overfitted_run, flags):
    without = (
        *OVERFITTING_FLAGS,
        "--load_best_model_at_end",
        "false",
        "--save_steps",
        "0",
        "--run_name",
        "r",
        *flags,
    )
    done = run_script("train.py", *without)
    assert ("checkpoints/ to resume from" in done.stderr) == Path("runs/r/checkpoints").is_dir()
    before = {path: path.stat().st_mtime_ns for path in Path("runs/r").rglob("*")}
    again = run_script("train.py", *without)
    assert (
        "nothing is left to train: the run in runs/r finished at step"
        in again.stderr.splitlines()[-1]
    )
    assert {path: path.stat().st_mtime_ns for path in Path("runs/r").rglob("*")} == before


def main(argv: list[str]) -> None:
    """Be ``accelerate launch``; its trainer is a process that imports for itself."""
    words = [
        "--config_file",
        str(ROOT / "accelerate_configs" / "cpu.yaml"),
        str(ROOT / "train.py"),
        *argv,
    ]
    launch.launch_command(launch.launch_command_parser().parse_args(words))


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def end_launcher(pid: int, number: signal.Signals) -> None:
    """Send a launcher a signal, and wait until nothing of what it has started is left."""
    started = family(pid)
    os.kill(pid, number)
    os.waitpid(pid, 0)
    wait_until(lambda: not any(map(is_running, started)), 60)  # 100,000 steps take longer


ENDLESS = (*TINY_RECIPE, *UNSEEN, "--run_name", "s", "--max_steps", "100000", "--save_steps", "0")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_launcher_saves_and_leaves_no_process(workspace, number):
    pid, _, err = start_script(__file__, ENDLESS, {})
    wait_until(lambda: Path("runs/s/metrics.jsonl").exists() and losses_by_step("s"), 60)
    end_launcher(pid, number)
    assert "the same command resumes" in Path(err).read_text()
    (path,) = checkpoint.list_checkpoints(Path("runs/s/checkpoints"))
    assert checkpoint.find_problem(path) is None


@pytest.mark.slow
def test_a_launcher_that_is_stopped_before_training_begins_leaves_no_process(workspace):
    """While train.py imports, for seconds, and its reader does."""
    shutil.rmtree("data")
    pid, _, err = start_script(__file__, ENDLESS, {})
    wait_until(lambda: len(family(pid)) == 3, 60)
    end_launcher(pid, signal.SIGTERM)
    assert "stopped by" not in Path(err).read_text() and not Path("runs").exists()


def test_one_process_equals_two_processes_with_dropout_too_and_resumes_across_them(
    finished_ddp_run,
):
    """Of one process's 4 micro-batches of a step each of two processes takes 2, and draws the same masks for them."""
    # 1 -> 2 -> 1: the stop reaches one process of two and is agreed on.
    mixed, stop = (
        (RECORDED_TRAINING, *TINY_RECIPE, *UNSEEN, "--run_name", "mixed"),
        {"LEDGER": "mixed.ledger", "STOP_BY": "SIGUSR1"},
    )
    run_script(*mixed, expect=138, **stop, STOP_AT="3:1")
    run_script(*mixed, processes=2, expect=None, **stop, STOP_AT="8:0")
    assert checkpoint.list_checkpoints(Path("runs/mixed/checkpoints"))[0].name == "step-00000008"
    run_script(*mixed, LEDGER="mixed.ledger")
    one, two, mixed = (windows_by_step(f"{name}.ledger") for name in ("whole", "two", "mixed"))
    assert len(one) == 12 and one == two == mixed
    for name in ("two", "mixed"):
        assert losses_by_step(name, "train/lr") == losses_by_step("whole", "train/lr")
        assert losses_by_step(name) == pytest.approx(losses_by_step("whole"), abs=1e-5)


def test_three_bad_updates_in_a_row_stop_the_run_and_never_reach_the_weights(
    workspace, monkeypatch
):
    real = NextTokenLoss.forward
    calls = []

    def poisoned(self, *batch, **how):
        losses = real(self, *batch, **how)
        calls.append(torch.is_grad_enabled())
        bad = sum(calls) in (3, 19, 23, 27) and torch.is_grad_enabled()
        return Losses(*(loss * float("nan") for loss in losses)) if bad else losses

    monkeypatch.setattr(NextTokenLoss, "forward", poisoned)
    # The rehearsal takes 2 micro-batches, then each step 4: 3 is in step 1 (skipped alone), 19, 23 and 27 in 5, 6 and 7.
    run_script("train.py", *TINY_RECIPE, *UNSEEN, "--run_name", "n", expect=1)
    skipped = {row["step"]: row["skipped_updates"] for row in metrics_rows("n")}
    assert skipped == {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 3, 7: 4}
    assert [step for step, loss in losses_by_step("n").items() if loss is None] == [1, 5, 6, 7]
    newest = checkpoint.list_checkpoints(Path("runs/n/checkpoints"))[0]
    assert newest.name == "step-00000007"
    assert json.loads((newest / "state.json").read_text())["skipped_updates"] == 4
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(newest / name).values())


def test_bad_update_on_one_process_is_skipped_by_both(workspace, monkeypatch):
    real = NextTokenLoss.forward
    calls = []  # the first two with gradients are the rehearsal's; then two a step

    def poisoned(self, *batch, **how):
        losses = real(self, *batch, **how)
        calls.append(torch.is_grad_enabled())
        bad = sum(calls) == 7 and torch.is_grad_enabled() and os.environ["RANK"] == "1"
        return Losses(*(loss * float("inf") for loss in losses)) if bad else losses

    monkeypatch.setattr(NextTokenLoss, "forward", poisoned)
    run_script(
        "train.py", *TINY_RECIPE, *UNSEEN, "--run_name", "p", "--max_steps", "4", processes=2
    )
    assert [row["skipped_updates"] for row in metrics_rows("p")] == [0, 0, 1, 1]


def test_eval_only_scores_the_newest_checkpoint_and_writes_nothing(finished_run):
    before = sorted((str(p), p.stat().st_mtime_ns) for p in Path("runs").rglob("*"))
    done = run_script(
        "train.py", *TINY_RECIPE, "--run_name", "whole", "--eval_only", "--learning_rate", "0.5"
    )  # it trains nothing
    scored = json.loads(done.stdout.splitlines()[-1])
    last = [row for row in metrics_rows("whole") if "eval/loss" in row][-1]
    assert scored["eval/loss"] == last["eval/loss"]
    assert scored["eval/bits_per_byte"] == last["eval/bits_per_byte"]
    assert sorted((str(p), p.stat().st_mtime_ns) for p in Path("runs").rglob("*")) == before


def test_neither_evaluations_nor_where_shards_lie_change_training(finished_run):
    before, seldom = (
        sorted(Path("data").iterdir()),
        ("--eval_on_start", "false", "--eval_steps", "12", "--sample_steps", "12"),
    )
    run_script(
        "train.py", *TINY_RECIPE, *seldom, "--run_name", "late", "--prepared_data_dir", "else/where"
    )
    assert (
        losses_by_step("late") == losses_by_step("whole")
        and sorted(Path("data").iterdir()) == before
    )
    (folder,) = Path("else/where").iterdir()
    assert (Path("data") / folder.name / "manifest.json").is_file()
    late, whole = final_state("late"), final_state("whole")
    assert (late["state"].pop("evaluations"), whole["state"].pop("evaluations")) == (1, 4)
    assert (
        late["state"].pop("since_best") == 0
        and whole["state"].pop("since_best") >= 0
        and late == whole
    )
    assert [row["step"] for row in metrics_rows("late") if "eval/loss" in row] == [12]
    assert "==== step 0" not in Path("runs/late/samples.txt").read_text()


@pytest.mark.parametrize(
    "flags, words",
    [
        (
            ["--sample_prompts", "the ", "the 中é"],
            "sample_prompts = 'the 中é': the character tokenizer has no id for 'é' '中'",
        ),
        (["--data_files", "short.txt"], "is long enough for a training window"),
        (["--vocab_size", "8"], "Use --vocab_size 64"),
        (["--eval_only"], "contains no checkpoint. Train first, or use --init_from MODEL"),
        (["--data_dir", "nano"], "--tokenizer openai-community/gpt2"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_bad_input_is_one_error_with_a_remedy_and_writes_nothing(workspace, flags, words):
    Path("short.txt").write_text("too short to fill a window")
    Path("nano").mkdir()
    for name in ("train.bin", "val.bin"):
        np.arange(50, dtype=np.uint16).tofile(f"nano/{name}")
    said = run_script("train.py", *TINY_RECIPE, *flags, expect=2).stderr
    assert words in said and "Traceback" not in said and not Path("runs").exists()


def test_a_run_begun_at_a_checkpoint_goes_on_from_its_own_newest_one_after_a_kill(finished_run):
    """Also when the checkpoint that it began at is gone."""
    begin = "runs/whole/checkpoints/step-00000009"
    flags = (*TINY_RECIPE, "--run_name", "k", "--save_steps", "1", "--resume_from_checkpoint")
    done = run_script(
        RECORDED_TRAINING, *flags, begin, expect=-9, LEDGER="k.ledger", KILL_AT="step:3"
    )
    assert f"resumed from {begin}" in done.stderr
    shutil.rmtree(begin)
    done = run_script(RECORDED_TRAINING, *flags, begin, LEDGER="k.ledger")
    assert "resumed from runs/k/checkpoints/step-00000011" in done.stderr
    assert final_state("k")["model.safetensors"] == final_state("whole")["model.safetensors"]
    scored = run_script(
        "train.py", *flags, "runs/k/checkpoints/step-00000011", "--eval_only", "--run_name", "whole"
    )
    assert '"model": "runs/k/checkpoints/step-00000011"' in scored.stdout


def test_a_run_that_goes_back_keeps_what_it_does_from_there_after_a_kill(finished_run):
    flags = (*TINY_RECIPE, "--run_name", "whole", "--save_steps", "1", "--save_total_limit", "0")
    back = (*flags, "--resume_from_checkpoint", "runs/whole/checkpoints/step-00000009")
    run_script(RECORDED_TRAINING, *back, expect=-9, LEDGER="k.ledger", KILL_AT="step:3")
    done = run_script(RECORDED_TRAINING, *back, LEDGER="k.ledger")
    assert (
        "resumed from runs/whole/checkpoints/step-00000011" in done.stderr
    )  # not 12 of the time before
    state = checkpoint.read_state(Path("runs/whole/checkpoints/step-00000012"))
    assert state["origin"]["checkpoint"] == "step-00000009"
    assert "nothing is left to train" in run_script("train.py", *flags).stderr


def test_run_resumes_from_another_folder(finished_run, monkeypatch):
    """The fixture copied the run and its text: recipe.yaml names the place that they were made in."""
    shutil.rmtree("runs/whole/checkpoints/step-00000012")
    elsewhere = finished_run / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    done = run_script("train.py", "--recipe", "../runs/whole/recipe.yaml")
    assert "resumed from ../runs/whole/checkpoints/step-00000009" in done.stderr
    Path("../runs/whole").rename(
        "moved"
    )  # alone: recipe.yaml names the text by its absolute path now
    done = run_script("train.py", "--recipe", "moved/recipe.yaml")
    assert "nothing is left to train" in done.stderr
    done = run_script(
        "train.py", "--recipe", "moved/recipe.yaml", "--run_name", "new", "--learning_rate", "1e-3"
    )
    assert "run      new in runs/new" in done.stderr
    assert "resumed" not in done.stderr
    assert {path.name for path in elsewhere.iterdir() if path.name[0] != "."} == {"moved", "runs"}


def test_shards_of_another_tokenizer_are_refused(finished_run):
    (folder,) = Path("data").glob("text-*")
    manifest = json.loads((folder / shards.MANIFEST).read_text())
    manifest["tokenizer"]["fingerprint"] = "0" * 64
    (folder / shards.MANIFEST).write_text(json.dumps(manifest))
    done = run_script("train.py", *TINY_RECIPE, "--run_name", "t", expect=2)
    assert "not encoded with the tokenizer that the run uses" in done.stderr


@contextlib.contextmanager
def files_of_at_most(size: int):
    """Let no process write a longer file: a disk that is full for the large ones."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


def test_a_model_that_cannot_be_written_is_said_in_a_line_and_the_same_command_writes_it(
    finished_run,
):
    for path in ("runs/whole/checkpoints/step-00000012", "runs/whole/model"):
        shutil.rmtree(path)
    flags = (*TINY_RECIPE, "--run_name", "whole")
    with files_of_at_most(60_000):
        done = run_script("train.py", *flags, expect=1)
    assert (
        "\nerror: runs/whole/model: File too large: raise the limit (ulimit -f); the same command resumes\n"
        in done.stderr
    )
    assert (
        "Traceback" not in done.stderr and "the checkpoint of step 12 was not saved" in done.stderr
    )
    assert os.listdir("runs/whole/checkpoints") == ["step-00000009"]
    run_script("train.py", *flags)
    assert Path("runs/whole/model/model.safetensors").stat().st_size > 60_000


def test_data_that_the_disk_has_no_room_for_stops_the_reader_and_the_run_in_a_line(workspace):
    shutil.rmtree("data")
    flags = (*TINY_RECIPE, *UNSEEN, "--run_name", "f")
    with files_of_at_most(12_000):
        for script in ("prepare_data.py", "train.py"):
            done = run_script(script, *flags, expect=1)
            assert (
                "File too large: raise the limit" in done.stderr and "Traceback" not in done.stderr
            )
    assert "prepare_data.py stopped with exit status 1" in done.stderr
    run_script("train.py", *flags, "--max_steps", "1", "--warmup_steps", "1")


# What a run reads is one list, however it is read: the ledger.

STREAMED = """
validation_tokens: 60
shard_tokens: 150
shuffle_block_tokens: 64
"""


def make_streams() -> None:
    """Make stream.yaml (of Parquet files), mixture.yaml (of JSON lines, too), and the tokenizer that they share."""
    import pyarrow as pa  # here: what imports this file runs where text alone is trained on
    import pyarrow.parquet as pq

    texts = [
        f"{n} {' '.join(WORDS[(n * 7 + i) % len(WORDS)] for i in range(12 + n % 9))}"
        for n in range(24)
    ]
    for part in range(4):
        rows = [{"id": i, "text": text} for i, text in enumerate(texts[part * 6 : part * 6 + 6])]
        pq.write_table(
            pa.Table.from_pylist(rows), f"{'ab'[part // 2]}{part}.parquet", row_group_size=4
        )
    Path("c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:10]))
    tokenization.train_bpe(texts, 300).save_pretrained("tok")
    recipe = RECIPE.replace("tokenizer: characters", "tokenizer: tok").replace(
        "vocab_size: 64", "vocab_size: 320"
    )
    Path("stream.yaml").write_text("data_files: ['*.parquet']\n" + recipe + STREAMED)
    sources = [
        "- {weight: 3, data_files: ['a*.parquet']}",
        "- {weight: 1, data_files: [c.jsonl], shard_tokens: 90}",
    ]
    Path("mixture.yaml").write_text("\n".join(["sources:", *sources]) + recipe + STREAMED)


@pytest.fixture(scope="session")
def streams(tmp_path_factory):
    return create_shared_folder(tmp_path_factory, "streams", make_streams)


streaming = copy_fixture("streams")


def windows_read(path: str) -> list[str]:
    """The window at each position of a run, in order; position = (micro_step * processes + rank) * B + row."""
    return [
        window
        for _, draws in sorted(read_window_log(Path(path)).items())
        for window in draws.split()
    ]


def windows_of_an_epoch(folder: Path) -> int:
    """How many windows a folder has, counted without the product's code."""
    rows = json.loads((folder / "manifest.json").read_text())["splits"]["train"]
    return sum(((folder / row["file"]).stat().st_size - 1024) // 2 - 1 >> 4 for row in rows)


@pytest.mark.parametrize("kind", ["stream", pytest.param("mixture", marks=pytest.mark.slow)])
def test_the_ledger_is_one_whatever_reads_it_and_kills_of_trainer_and_reader_change_nothing(
    streaming, kind
):
    flags = ("--recipe", f"{kind}.yaml", *UNSEEN)
    run_script(RECORDED_TRAINING, *flags, "--run_name", "one", LEDGER="one.ledger")
    whole, made = (
        windows_read("one.ledger"),
        {path: path.read_bytes() for path in Path("data").rglob("*.bin")},
    )
    assert len(whole) == 12 * 8
    run_script(
        RECORDED_TRAINING,
        *flags,
        "--run_name",
        "batch",
        "--per_device_train_batch_size",
        "4",
        LEDGER="batch.ledger",
    )
    assert windows_read("batch.ledger") == whole

    # Each source has been read twice over: none missing, none doubled.
    folders = {window.split(":")[0]: None for window in whole}
    prepared = [
        next(Path("data").glob(name))
        for name in {"stream": ["a0-*"], "mixture": ["a0-*", "c-*"]}[kind]
    ]
    for source, folder in zip(sorted(folders), prepared, strict=True):
        count = windows_of_an_epoch(folder)
        mine = [window for window in whole if window.startswith(f"{source}:")]
        assert len(mine) >= 2 * count
        for begin in (0, count):
            assert sorted(mine[begin : begin + count]) == sorted(
                f"{source}:{window}" for window in range(count)
            )

    shutil.rmtree("data")
    killed = (RECORDED_TRAINING, *flags, "--run_name", "killed")
    run_script(*killed, LEDGER="killed.ledger", expect=-9, KILL_AT="step:4", KILL_READER="1")
    run_script(*killed, LEDGER="killed.ledger", expect=-9, KILL_AT="step:2")
    run_script(*killed, LEDGER="killed.ledger")
    assert windows_read("killed.ledger") == whole and losses_by_step("killed") == losses_by_step(
        "one"
    )
    assert final_state("killed")["model.safetensors"] == final_state("one")["model.safetensors"]
    assert {path: path.read_bytes() for path in Path("data").rglob("*.bin")} == made


def test_shards_of_others_are_trained_on_where_they_lie(streaming):
    Path("theirs").mkdir()
    for split, count in (("train", 2000), ("val", 500)):
        ids = np.random.RandomState(count).randint(0, 300, count).astype(np.uint16)
        np.save(f"theirs/edufineweb_{split}_000001.npy", ids)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in Path("theirs").iterdir())
    flags = (
        "--recipe",
        "stream.yaml",
        "--data_dir",
        "theirs",
        "--run_name",
        "t",
        "--max_steps",
        "4",
    )
    done = run_script("train.py", *flags, "--sample_steps", "0")
    assert "theirs: 2,000 train tokens; the run reads 512" in done.stderr
    assert len(losses_by_step("t")) == 4
    assert (
        sorted((path.name, path.stat().st_mtime_ns) for path in Path("theirs").iterdir()) == before
    )
    assert not Path("data").exists()


def test_training_begins_with_the_first_block_waits_and_stops_where_the_reader_does_until_data_are_mended(
    streaming, monkeypatch
):
    monkeypatch.setattr("ursa_minor.data.loading.background.LOG_SECONDS", 0.0)
    flags = ("--recipe", "stream.yaml", "--run_name", "s", *UNSEEN)
    run_script(RECORDED_TRAINING, *flags, "--run_name", "whole", LEDGER="whole.ledger")
    shutil.rmtree("data")
    good = Path("b3.parquet").read_bytes()
    Path("b3.parquet").write_bytes(good[:100] + bytes(100) + good[200:])
    pid, _, err = start_script(
        RECORDED_TRAINING,
        flags,
        {"LEDGER": "s.ledger", "HOLD_READER": "2", "ACCELERATE_USE_CPU": "true"},
    )
    waits = r"waits for data: \d+ of \d+ windows are prepared"
    wait_until(lambda: re.search(waits, Path(err).read_text()) and losses_by_step("s"), 60)
    (folder,) = Path("data").glob("a0-*")
    assert not manifests.is_complete(folder)
    # A block is 4 windows, a step 8: as many steps as there are whole blocks for were done, and no more.
    assert 1 <= len(losses_by_step("s")) == windows_of_an_epoch(folder) // 8
    Path("go").touch()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    said = Path(err).read_text()
    assert (
        re.search(r"b3.parquet: (row \d+: )?cannot be read: .*Repair or replace", said)
        and "Traceback" not in said
    )
    (newest, *_) = checkpoint.list_checkpoints(Path("runs/s/checkpoints"))
    assert 0 < checkpoint.step_of(newest) == len(losses_by_step("s")) < 12
    Path("b3.parquet").write_bytes(good)
    run_script(RECORDED_TRAINING, *flags, LEDGER="s.ledger")
    assert (
        windows_read("s.ledger") == windows_read("whole.ledger") and len(losses_by_step("s")) == 12
    )
    assert final_state("s")["model.safetensors"] == final_state("whole")["model.safetensors"]
    waits = [row["data_wait_seconds"] for row in metrics_rows("s")]
    assert 0 < waits[0] <= waits[-1] and waits == sorted(waits)


def test_consumed_shards_are_deleted_and_a_killed_run_still_resumes_exactly(streaming):
    flags = ("--recipe", "stream.yaml", *UNSEEN, "--tokens_per_step", "32", "--shard_tokens", "40")
    flags = (*flags, "--shuffle_block_tokens", "32", "--save_steps", "1", "--max_steps", "8")
    run_script(RECORDED_TRAINING, *flags, "--run_name", "all", LEDGER="all.ledger")
    shutil.rmtree("data")
    consumed = (RECORDED_TRAINING, *flags, "--run_name", "s", "--stream_keep", "consumed")
    run_script(*consumed, LEDGER="s.ledger", expect=-9, KILL_AT="step:5")
    run_script(*consumed, LEDGER="s.ledger")
    assert windows_read("s.ledger") == windows_read("all.ledger")
    assert final_state("s", 8)["model.safetensors"] == final_state("all", 8)["model.safetensors"]
    # The older checkpoint of the two that are kept is step 7: of 2 windows a step, 14 are read, 7 whole blocks.
    (folder,) = Path("data").glob("a0-*")
    train = manifests.read_manifest(folder).splits["train"]
    ends = np.cumsum([(shard.tokens - 1) // 16 for shard in train])
    left = [shard.file for shard, end in zip(train, ends, strict=True) if end > 14]
    assert sorted(path.name for path in folder.glob("train_*.bin")) == left
    again = run_script("train.py", *flags, "--run_name", "new", expect=2)
    assert "this file does not exist" in again.stderr


def test_a_second_epoch_of_consumed_shards_is_refused_before_the_start(streaming):
    Path("one.txt").write_text("the cat sat on the mat " * 20)
    flags = ("--recipe", "stream.yaml", "--stream_keep", "consumed", "--run_name", "s")
    done = run_script("train.py", *flags, "--data_files", "one.txt", expect=2)
    assert (
        "stream_keep = consumed" in done.stderr
        and "they are deleted after their first use" in done.stderr
        and "--max_steps" in done.stderr
    )
    assert not Path("runs").exists() and not Path("data").exists()
