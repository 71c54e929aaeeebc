"""Tests of the speed benchmarks: their models, their comparisons, and what they print."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from benchmarks import ladder, side_by_side, throughput, time_to_loss, traffic, tune_optimizers
from ursa_minor.machine import device as hardware
from ursa_minor.preflight import estimate
from ursa_minor.recipe import command_line, keys

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "shakespeare_char.yaml"
SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 96, "sequence_length": 16}
TINY_FLAGS = [f"--{name}={size}" for name, size in SIZES.items()]
GPU = hardware.Device("cuda", "a GPU", 2**34, (8, 0), 1, True)
CPU = hardware.Device("cpu", "a CPU", 2**34)


# The compared models.


def test_plain_gpt2_equals_stock_model():
    args = argparse.Namespace(**SIZES)
    stock = side_by_side.stock_model(args)
    # A bias of zeros would hide an error in its use.
    torch.nn.init.normal_(stock.transformer.h[0].attn.c_attn.bias)
    ids = torch.randint(0, SIZES["vocab_size"], (3, SIZES["sequence_length"] + 1))
    inputs = ids[:, :-1]
    targets = ids[:, 1:]

    plain = throughput.PlainGPT2(args).take_weights(stock)
    loss = plain(inputs, targets)

    logits = stock(inputs).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    num_parameters = sum(parameter.numel() for parameter in plain.parameters())
    assert num_parameters == stock.num_parameters()
    assert num_parameters == side_by_side.shape_of(args).parameters


@pytest.mark.parametrize(
    "shape", [estimate.GPT2_124M, estimate.Shape(2, 64, 512, 64)], ids=["GPT-2 124M", "tiny"]
)
def test_ceiling_computes_products_of_estimate(shape):
    weight_flops = 0
    for count, inner, outer in throughput.matrices(shape):
        weight_flops += 3 * 2 * count * inner * outer

    # The estimate counts attention without the causal mask.
    attention_flops = 12 * shape.n_layer * shape.n_embd * shape.sequence_length
    # It also counts 6 for each weight of a bias or a norm, which is in no product.
    vector_flops = 6 * (13 * shape.n_layer + 2) * shape.n_embd
    assert weight_flops + attention_flops + vector_flops == shape.flops_per_token
    # These are 0.09% for GPT-2 124M and 1.2% for the tiny model.
    assert vector_flops < 0.013 * shape.flops_per_token


# The ladder of optimizations.


def test_gpu_climbs_every_rung():
    args = argparse.Namespace(precision="bf16", vocab_size=50257, compile=True)

    rungs = ladder.rungs(args, GPU)

    assert not [reason for _, _, reason in rungs if reason]
    assert "vocabulary 50,257 -> 50,304" in [name for name, _, _ in rungs]
    settings = ladder.GROUND.copy()
    for _, change, _ in rungs:
        settings |= change
    for name in ("tf32", "compile", "fused", "own_loss"):
        assert settings[name], name
    assert settings["precision"] == "bf16"


def test_cpu_skips_rungs_with_reason():
    args = argparse.Namespace(precision="no", vocab_size=512, compile=False)

    rungs = ladder.rungs(args, CPU)

    skipped = {name: reason for name, _, reason in rungs if reason}
    assert list(skipped) == ["TF32", "bf16 autocast", "torch.compile", "vocabulary 512 -> 512"]
    assert "--precision bf16" in skipped["bf16 autocast"]
    assert "a CPU has no TF32" in skipped["TF32"]


# Throughput and traffic.


def test_invalid_nanogpt_folder_is_rejected(capsys):
    status = throughput.main([*TINY_FLAGS, "--nanogpt", "/nowhere"])

    assert status == 2
    message = capsys.readouterr().err
    assert "--nanogpt /nowhere" in message
    assert "no model.py" in message


def test_traffic_without_gpu_is_rejected(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "t.json"

    status = traffic.main([*TINY_FLAGS, "--json", str(output)])

    assert status == 2
    assert "is_available() is False" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.slow
def test_throughput_prints_every_variant(tmp_path):
    output = tmp_path / "t.json"
    flags = ["--compile=false", "--rounds=1", "--accumulation=2", f"--json={output}"]
    command = [sys.executable, "throughput.py", *TINY_FLAGS, *flags]

    # The files in the script's folder must not be imported instead of installed modules.
    result = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
    others = ("hf", "trainer", "plain", "ceiling")
    for name in ("ours", *others):
        assert f"\n{name} " in result.stdout, result.stdout
    for name in others:
        assert f"ours / {name} " in result.stdout
    assert "micro-batch  4 x 2" in result.stdout
    measurements = json.loads(output.read_text())["micro_batches"]
    assert len(measurements) == 1
    losses = {name: row["loss"] for name, row in measurements[0]["variants"].items()}
    assert losses["ceiling"] is None
    # The weights and batches are the same, except that Transformers ignores the last token of a
    # label and that Trainer shuffles its batches.
    assert losses["ours"] == pytest.approx(losses["plain"], abs=1e-4)
    assert losses["ours"] == pytest.approx(losses["hf"], abs=0.1)
    assert losses["ours"] == pytest.approx(losses["trainer"], abs=0.3)


@pytest.mark.parametrize(
    ("is_alternating", "ratios"), [(False, {}), (True, {"hf": 2.0, "plain": 4.0})]
)
def test_throughput_compares_only_alternating_measurements(capsys, is_alternating, ratios):
    variants = {"trainer": {"turns": [], "problem": "out of memory"}}
    for name, seconds in {"ours": (1.0, 2.0), "hf": (2.0, 4.0), "plain": (4.0, 8.0)}.items():
        turns = [{"seconds": turn_seconds, "loss": 3.0} for turn_seconds in seconds]
        variants[name] = {"turns": turns, "problem": ""}
    args = argparse.Namespace(accumulation=1, precision="no", **SIZES)

    report = throughput.report(variants, is_alternating, args, 1)

    assert report["ours_over"] == ratios
    is_printed = "ours / hf" in capsys.readouterr().out
    assert is_printed == is_alternating


# Time to a loss.


def test_steps_to_loss_are_interpolated():
    losses = {1000: 2.0, 2000: 1.8}

    # Half of the difference is half of the logarithm.
    assert time_to_loss.steps_to(1.9, losses) == pytest.approx((1000 * 2000) ** 0.5)
    assert time_to_loss.steps_to(1.6, losses | {4000: 1.6}) == pytest.approx(4000)


def test_ratio_of_steps_has_range():
    ratio, low, high = time_to_loss.ratio([400, 440, 420], [800, 880, 840])
    assert ratio == pytest.approx(0.5)
    assert low == ratio
    assert high == ratio

    ratio, low, high = time_to_loss.ratio([400, 440, 420], [800, 800, 800])
    assert low < 0.5
    assert 0.5 < ratio < high


def test_held_out_seeds_are_not_used_before():
    assert len(time_to_loss.HELD_OUT) == 5
    assert not set(time_to_loss.UNDO_SEEDS) & set(time_to_loss.HELD_OUT)


@pytest.mark.parametrize("optimizer", time_to_loss.TUNED)
def test_tuned_settings_are_recipe_values(optimizer):
    tuned = time_to_loss.TUNED[optimizer]
    for settings in (tuned, tuned | time_to_loss.STOCK):
        flags = time_to_loss.flags(optimizer, settings, 500)

        recipe, *_ = command_line.parse_training(["--recipe", str(RECIPE), *flags])

        values = keys.to_dict(recipe)
        for key, setting in settings.items():
            assert str(values[key]).lower() == str(setting)


def test_runs_with_swapped_settings_differ(monkeypatch, tmp_path):
    names = []

    def train_once(folder, name, *args, **kwargs):
        names.append(name)
        return {"loss": 1.0}

    monkeypatch.setattr(time_to_loss, "prepare_shards", lambda *_: None)
    monkeypatch.setattr(time_to_loss, "train_once", train_once)
    args = argparse.Namespace(workers=1, text="t", folder=tmp_path, recipe=RECIPE, threads=1)
    runs = time_to_loss.Runs(args)
    first = {"weight_decay": 1.0, "max_grad_norm": 0.1}
    second = {"weight_decay": 0.1, "max_grad_norm": 1.0}

    for change in (first, second, second):
        runs.losses("muon", time_to_loss.TUNED["muon"] | change, 400, (1, 2))

    assert len(set(names)) == 4


# The search for optimizer settings.


class SearchResult(NamedTuple):
    """The trials in the file of a search, and the settings that this call has trained."""

    trials: list[dict]
    trained: list[str]


def search(folder: Path, num_trials: int, monkeypatch: pytest.MonkeyPatch) -> SearchResult:
    """Search for Muon settings with invented losses."""
    trained = []

    def train(search, settings, seeds):
        trained.append(str(settings))
        loss = abs(hash(str(settings))) % 1000 / 1000
        return {str(seed): loss for seed in seeds}

    monkeypatch.setattr(tune_optimizers, "prepare_shards", lambda *_: None)
    monkeypatch.setattr(tune_optimizers.Search, "train", train)
    trials_file = folder / "muon.json"
    flags = ["--text=t.txt", "--optimizer=muon", f"--trials={num_trials}"]
    tune_optimizers.main([*flags, f"--trials_file={trials_file}"])
    return SearchResult(json.loads(trials_file.read_text())["trials"], trained)


def test_interrupted_search_continues_with_next_trial(tmp_path, monkeypatch):
    whole_folder = tmp_path / "whole"
    whole_folder.mkdir()
    interrupted_folder = tmp_path / "interrupted"
    interrupted_folder.mkdir()
    whole = search(whole_folder, 6, monkeypatch)
    search(interrupted_folder, 3, monkeypatch)

    continued = search(interrupted_folder, 6, monkeypatch)

    settings = [trial["settings"] for trial in continued.trials]
    assert settings == [trial["settings"] for trial in whole.trials]
    earlier_settings = {str(setting) for setting in settings[:3]}
    assert not earlier_settings & set(continued.trained)


def test_search_of_another_optimizer_is_not_continued(tmp_path, monkeypatch):
    search(tmp_path, 1, monkeypatch)
    flags = ["--text=t.txt", "--optimizer=adamw", f"--trials_file={tmp_path / 'muon.json'}"]

    with pytest.raises(SystemExit, match="has another 'optimizer'"):
        tune_optimizers.main(flags)


@pytest.mark.parametrize("optimizer", tune_optimizers.SPACE)
def test_flags_of_every_searched_value_are_accepted(optimizer):
    for name, values in tune_optimizers.SPACE[optimizer].items():
        for value in values:
            settings = tune_optimizers.BEGIN[optimizer] | {name: value}
            flags = tune_optimizers.train_flags(optimizer, settings, 500)
            assert command_line.parse_training(["--recipe", str(RECIPE), *flags]).recipe
