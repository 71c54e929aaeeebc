"""The speed benchmarks: their own GPT-2 is GPT-2, their products are the model's, each prints what it promises."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import ladder, side_by_side, throughput, time_to_loss, traffic, tune_optimizers
from ursa_minor.machine import device as hardware
from ursa_minor.preflight import estimate
from ursa_minor.recipe import command_line, keys

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 96, "sequence_length": 16}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
CARD = hardware.Device("cuda", "a card", 2**34, (8, 0), 1, True)
CPU = hardware.Device("cpu", "a CPU", 2**34)


def test_plain_gpt2_is_the_stock_model():
    asked = argparse.Namespace(**SIZES)
    stock = side_by_side.stock_model(asked)
    torch.nn.init.normal_(stock.transformer.h[0].attn.c_attn.bias)  # zeros would hide where they go
    plain = throughput.PlainGPT2(asked).take_weights(stock)
    ids = torch.randint(0, SIZES["vocab_size"], (3, SIZES["sequence_length"] + 1))
    logits = stock(ids[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(plain(ids[:, :-1], ids[:, 1:]), expected, atol=1e-5, rtol=0)
    count = sum(parameter.numel() for parameter in plain.parameters())
    assert count == stock.num_parameters() == side_by_side.shape_of(asked).parameters


def test_ceiling_does_the_estimates_products():
    for shape in (estimate.GPT2_124M, estimate.Shape(2, 64, 512, 64)):
        weights = 3 * sum(
            2 * count * inner * outer for count, inner, outer in throughput.matrices(shape)
        )
        attention = (
            12 * shape.n_layer * shape.n_embd * shape.sequence_length
        )  # as the estimate counts it: not causal
        # The estimate also has 6 for each weight that is in no product: biases and norms, 13 L d + 2 d of them.
        vectors = 6 * (13 * shape.n_layer + 2) * shape.n_embd
        assert weights + attention + vectors == shape.flops_per_token
        assert vectors < 0.013 * shape.flops_per_token  # 0.09% of GPT-2 124M, 1.2% of the tiny one


def test_a_card_climbs_every_rung_and_a_cpu_says_why_not():
    asked = argparse.Namespace(precision="bf16", vocab_size=50257, compile=True)
    little = argparse.Namespace(precision="no", vocab_size=512, compile=False)
    ladders = ladder.rungs(asked, CARD), ladder.rungs(little, CPU)
    assert not [reason for _, _, reason in ladders[0] if reason]
    assert "vocabulary 50,257 -> 50,304" in [name for name, _, _ in ladders[0]]
    skipped = {name: reason for name, _, reason in ladders[1] if reason}
    assert list(skipped) == ["TF32", "bf16 autocast", "torch.compile", "vocabulary 512 -> 512"]
    assert "--precision bf16" in skipped["bf16 autocast"] and "a CPU has no TF32" in skipped["TF32"]
    last = ladder.GROUND.copy()
    for _, change, _ in ladders[0]:
        last |= change
    assert (
        all(last[name] for name in ("tf32", "compile", "fused", "own_loss"))
        and last["precision"] == "bf16"
    )


def test_faults_of_the_command_line_and_of_the_machine_are_told(monkeypatch, capsys, tmp_path):
    assert throughput.main([*TINY, "--nanogpt", "/nowhere"]) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (
        traffic.main([*TINY, "--json", str(tmp_path / "t.json")]) == 2
        and not (tmp_path / "t.json").exists()
    )
    shown = capsys.readouterr().err
    assert (
        "--nanogpt /nowhere: the folder contains no model.py" in shown
        and "is_available() is False" in shown
    )


@pytest.mark.slow
def test_throughput_prints_every_variant(tmp_path):
    flags = [
        "--compile",
        "false",
        "--rounds",
        "1",
        "--accumulation",
        "2",
        "--json",
        str(tmp_path / "t.json"),
    ]
    # As a user does, from its folder, whose files must not be taken for modules of others.
    command = [sys.executable, "throughput.py", *TINY, *flags]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = ("ours", "hf", "trainer", "plain", "ceiling")
    for name in names:
        assert f"\n{name} " in done.stdout, done.stdout
    for name in names[1:]:
        assert f"ours / {name} " in done.stdout
    assert "micro-batch  4 x 2" in done.stdout
    (found,) = json.loads((tmp_path / "t.json").read_text())["micro_batches"]
    losses = {name: row["loss"] for name, row in found["variants"].items()}
    assert losses["ceiling"] is None
    # The same weights and batches: only float rounding differs. Transformers' labels leave the last token out.
    assert losses["ours"] == pytest.approx(losses["plain"], abs=1e-4)
    assert losses["ours"] == pytest.approx(losses["hf"], abs=0.1)
    assert losses["ours"] == pytest.approx(losses["trainer"], abs=0.3)  # its batches are shuffled


def test_throughput_compares_only_what_was_measured_in_turn(capsys):
    found = {"trainer": {"turns": [], "problem": "out of memory"}}
    for name, turns in {"ours": (1.0, 2.0), "hf": (2.0, 4.0), "plain": (4.0, 8.0)}.items():
        found[name] = {"turns": [{"seconds": each, "loss": 3.0} for each in turns], "problem": ""}
    asked = argparse.Namespace(accumulation=1, precision="no", **SIZES)
    assert (
        throughput.report(found, False, asked, 1)["ours_over"] == {}
        and "ours / hf" not in capsys.readouterr().out
    )
    assert throughput.report(found, True, asked, 1)["ours_over"] == {"hf": 2.0, "plain": 4.0}
    assert "ours / hf" in capsys.readouterr().out


def test_the_length_that_ends_at_a_loss_lies_on_the_line_through_those_that_were_run():
    ended = {1000: 2.0, 2000: 1.8}
    assert time_to_loss.steps_to(1.9, ended) == pytest.approx(
        (1000 * 2000) ** 0.5
    )  # halfway, of the logarithm
    assert time_to_loss.steps_to(1.6, ended | {4000: 1.6}) == pytest.approx(4000)
    found, low, high = time_to_loss.ratio([400, 440, 420], [800, 880, 840])
    assert found == low == high == pytest.approx(0.5)
    found, low, high = time_to_loss.ratio([400, 440, 420], [800, 800, 800])
    assert low < 0.5 < found < high


def test_every_tuned_setting_is_a_recipes_and_the_held_out_seeds_are_no_others():
    assert len(time_to_loss.HELD_OUT) == 5 and {*time_to_loss.UNDO_SEEDS}.isdisjoint(
        time_to_loss.HELD_OUT
    )
    recipe = ["--recipe", str(ROOT / "recipes" / "shakespeare_char.yaml")]
    for way, tuned in time_to_loss.TUNED.items():
        for settings in (tuned, tuned | time_to_loss.STOCK):
            taken = keys.to_dict(
                command_line.parse_training([*recipe, *time_to_loss.flags(way, settings, 500)])[0]
            )
            assert {key: str(taken[key]).lower() for key in settings} == {
                key: str(one) for key, one in settings.items()
            }


def test_two_settings_that_swap_their_values_are_two_runs(monkeypatch, tmp_path):
    names = []
    monkeypatch.setattr(time_to_loss, "prepare_shards", lambda *a: None)
    monkeypatch.setattr(
        time_to_loss,
        "train_once",
        lambda folder, name, *a, **k: names.append(name) or {"loss": 1.0},
    )
    recipe = ROOT / "recipes" / "shakespeare_char.yaml"
    runs = time_to_loss.Runs(
        argparse.Namespace(workers=1, text="t", folder=tmp_path, recipe=recipe, threads=1)
    )
    first = {"weight_decay": 1.0, "max_grad_norm": 0.1}
    second = {"weight_decay": 0.1, "max_grad_norm": 1.0}
    for change in (first, second, second):
        runs.losses("muon", time_to_loss.TUNED["muon"] | change, 400, (1, 2))
    assert len(set(names)) == 4


def search(folder: Path, trials: int, monkeypatch) -> tuple[list, list[str]]:
    """Return the trials of a search, and the settings that it has trained. The losses are made up."""
    trained = []

    def train(search, settings, seeds):
        trained.append(str(settings))
        return {str(seed): abs(hash(str(settings))) % 1000 / 1000 for seed in seeds}

    monkeypatch.setattr(tune_optimizers, "prepare_shards", lambda *_: None)
    monkeypatch.setattr(tune_optimizers.Search, "train", train)
    words = ["--text", "t.txt", "--optimizer", "muon", "--trials", str(trials)]
    tune_optimizers.main([*words, "--trials_file", str(folder / "muon.json")])
    return json.loads((folder / "muon.json").read_text())["trials"], trained


def test_interrupted_search_continues_with_the_next_trial(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    # Given one search in a piece, and one that was interrupted after three trials
    whole, _ = search(tmp_path / "a", 6, monkeypatch)
    search(tmp_path / "b", 3, monkeypatch)

    # When the second one is continued
    continued, trained = search(tmp_path / "b", 6, monkeypatch)

    # Then it has tried the same settings, and none of them twice
    assert [trial["settings"] for trial in continued] == [trial["settings"] for trial in whole]
    searched = [str(trial["settings"]) for trial in continued[:3]]
    assert not set(searched) & set(trained[:3])


def test_search_of_another_optimizer_is_not_continued(tmp_path, monkeypatch):
    search(tmp_path, 1, monkeypatch)
    with pytest.raises(SystemExit, match="has another 'optimizer'"):
        words = ["--text", "t.txt", "--optimizer", "adamw"]
        tune_optimizers.main([*words, "--trials_file", str(tmp_path / "muon.json")])


@pytest.mark.parametrize("optimizer", tune_optimizers.SPACE)
def test_flags_of_every_searched_value_are_accepted(optimizer):
    recipe = ["--recipe", "recipes/shakespeare_char.yaml"]
    for name, values in tune_optimizers.SPACE[optimizer].items():
        for value in values:
            settings = tune_optimizers.BEGIN[optimizer] | {name: value}
            flags = tune_optimizers.train_flags(optimizer, settings, 500)
            assert command_line.parse_training([*recipe, *flags]).recipe
