"""The speed benchmarks: their own GPT-2 is GPT-2, their products are the model's, each prints what it promises."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import conftest
import pytest
import torch
from conftest import RECIPE, TEXT
from runs import rows

from benchmarks import ablation, knobs, ladder, scaling, side_by_side, throughput, time_to_loss, traffic
from pretrain.machine import estimate, hardware
from pretrain.recipe import keys, reading

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 96, "sequence_length": 16}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
CARD = hardware.Device("cuda", "a card", 2**34, (8, 0), 1, True)
CPU = hardware.Device("cpu", "a CPU", 2**34)


def run(script: str, *flags: str, expect: int = 0) -> subprocess.CompletedProcess:
    """Run a benchmark as a user does, from its folder, whose files must not be taken for modules of others."""
    command = [sys.executable, f"{script}.py", *TINY, *flags]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


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
        weights = 3 * sum(2 * count * inner * outer for count, inner, outer in throughput.matrices(shape))
        attention = 12 * shape.n_layer * shape.n_embd * shape.sequence_length  # as the estimate counts it: not causal
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
    assert all(last[name] for name in ("tf32", "compile", "fused", "own_loss")) and last["precision"] == "bf16"


def test_exchange_that_is_hidden_costs_nothing():
    assert scaling.efficiencies(0.1, 0.0) == (1.0, 1.0)
    assert scaling.efficiencies(0.3, 0.1) == (pytest.approx(0.75), 1.0)
    assert scaling.efficiencies(0.1, 0.2) == (pytest.approx(1 / 3), 0.5)


def test_faults_of_the_command_line_are_told(capsys):
    assert throughput.main([*TINY, "--nanogpt", "/nowhere"]) == 2
    assert "--nanogpt /nowhere: holds no model.py" in capsys.readouterr().err
    assert throughput.main([*TINY, "--only", "nanogpt"]) == 2
    assert "give --nanogpt PATH" in capsys.readouterr().err


def test_traffic_without_a_card_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert traffic.main([*TINY, "--json", str(tmp_path / "t.json")]) == 2
    assert "is_available() is False" in capsys.readouterr().err and not (tmp_path / "t.json").exists()


@pytest.mark.slow
def test_throughput_prints_every_variant(tmp_path):
    flags = ["--compile", "false", "--rounds", "1", "--accumulation", "2", "--json", str(tmp_path / "t.json")]
    done = run("throughput", *flags)
    names = ("ours", "hf", "trainer", "plain", "ceiling")
    for name in names:
        assert f"\n{name} " in done.stdout, done.stdout
    for name in names[1:]:
        assert f"ours / {name} " in done.stdout
    assert "our loop outside the model" in done.stdout and "micro-batch  4 x 2" in done.stdout
    (found,) = json.loads((tmp_path / "t.json").read_text())["micro_batches"]
    losses = {name: row["loss"] for name, row in found["variants"].items()}
    assert losses["ceiling"] is None
    # The same weights and batches: only float rounding differs. Transformers' labels leave the last token out.
    assert losses["ours"] == pytest.approx(losses["plain"], abs=1e-4)
    assert losses["ours"] == pytest.approx(losses["hf"], abs=0.1)
    assert losses["ours"] == pytest.approx(losses["trainer"], abs=0.3)  # its batches are shuffled


@pytest.mark.slow
def test_throughput_goes_on_after_a_variant_that_fails(tmp_path):
    (tmp_path / "model.py").write_text("raise RuntimeError('broken\\nindeed')")
    flags = ["--nanogpt", str(tmp_path), "--only", "nanogpt", "ceiling", "--rounds", "1", "--compile", "false"]
    lines = run("throughput", *flags).stdout.splitlines()
    assert "nanogpt      RuntimeError: broken" in lines and any(line.startswith("ceiling ") for line in lines)


@pytest.mark.slow
def test_ladder_prints_every_rung(tmp_path):
    done = run("ladder", "--rounds", "1", "--compile", "false", "--json", str(tmp_path / "l.json"))
    (found,) = json.loads((tmp_path / "l.json").read_text())["micro_batches"]
    assert len(found["rungs"]) == 10
    assert all(row["problem"].startswith("skipped: ") for row in found["rungs"] if "problem" in row)
    climbed = [row for row in found["rungs"] if "problem" not in row]
    assert [row["rung"] for row in climbed][-1] == "our loss module" and all(row["over_first"] > 0 for row in climbed)
    assert all(row["rung"] in done.stdout for row in found["rungs"])


@pytest.mark.slow
def test_scaling_prints_two_processes(tmp_path):
    flags = ["--compile", "false", "--launches", "1", "--rounds", "2", "--json", str(tmp_path / "s.json")]
    run("scaling", *flags)
    alone, both = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert alone["efficiency"] == pytest.approx(1.0) and both["link"] > 0
    assert 0 < both["no_overlap"] < both["full_overlap"] <= 1


def test_the_length_that_ends_at_a_loss_lies_between_two_that_were_run():
    ended = {1000: 2.0, 2000: 1.8, 500: 2.3}
    assert time_to_loss.steps_to(1.9, ended) == pytest.approx((1000 * 2000) ** 0.5)  # halfway, of the logarithm
    assert time_to_loss.steps_to(2.0, ended) == pytest.approx(1000)
    assert time_to_loss.steps_to(1.7, ended) is None and time_to_loss.steps_to(2.3, ended) is None


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd", "constant"])
def test_adamw_takes_over_the_shape_of_muons_schedule_and_no_flag_without_effect(tmp_path, shape):
    muon = tmp_path / "muon.yaml"
    text = RECIPE.replace("min_lr_ratio: 0.1", "min_lr_ratio: 0.3")
    muon.write_text(text.replace("lr_scheduler_type: cosine", f"lr_scheduler_type: {shape}\ndecay_ratio: 0.4"))
    argv = ["--recipe", str(ROOT / "recipes" / "shakespeare_char.yaml"), *time_to_loss.adamw_schedule(muon)]
    taken = reading.parse_training(argv)[0].schedule
    assert taken.lr_scheduler_type == shape
    assert shape == "constant" or taken.min_lr_ratio == 0.3
    assert shape != "wsd" or taken.decay_ratio == 0.4


@pytest.mark.slow
def test_every_change_of_the_ablation_changes_what_is_learned(workplace):
    recipe = keys.flat(reading.load_recipe(ablation.RECIPE))
    recipe |= {"data_files": ["text.txt"], "vocab_size": 64, "n_layer": 1, "n_embd": 32, "sequence_length": 16}
    recipe |= {
        "tokens_per_step": 192,
        "validation_fraction": 0.1,
        "sample_steps": 0,
        "save_steps": 0,
        "eval_tokens": 320,
    }
    Path("r.yaml").write_text(keys.as_yaml(keys.deal(recipe)))
    Path("text.txt").write_text(Path("text.txt").read_text()[:4000])  # is read more than once
    found = {}
    for number, (name, (flags, change)) in enumerate(ablation.changes(30).items()):
        words = ablation.words_of(
            f"max_steps=30 warmup_steps=2 eval_steps=1000000000 run_name=r{number} output_dir=none {flags}", recipe
        )
        conftest.run(str(ROOT / "tests" / "ablation_child.py"), "--recipe", "r.yaml", *words, CHANGE=change)
        found[name] = [row["eval/loss"] for row in rows(f"r{number}") if "eval/loss" in row][-1]
    same = [names for loss in {*found.values()} if len(names := [name for name in found if found[name] == loss]) > 1]
    assert not same


def test_a_change_of_the_ablation_is_laid_over_the_recipe_and_a_setting_that_a_patch_has_not_is_refused():
    words = ablation.words_of(
        "learning_rate*0.5 muon_momentum=0.9 tokens_per_step*0.5", {"learning_rate": 0.02, "tokens_per_step": 768}
    )
    assert words == ["--learning_rate", "0.01", "--muon_momentum", "0.9", "--tokens_per_step", "384"]
    assert "BETA = 0.5\n" in ablation.patch("soap_muon.py", BETA=0.5)
    with pytest.raises(ValueError):
        ablation.patch("soap_muon.py", GAMMA=0.5)
    for flags, _ in ablation.changes(500).values():
        argv = ablation.words_of(flags, keys.flat(reading.load_recipe(ablation.RECIPE)))
        reading.parse_training(["--recipe", str(ablation.RECIPE), *argv])


def test_an_ablation_goes_on_where_its_figures_end(monkeypatch, tmp_path, capsys):
    trained = []

    def train_once(folder, name, recipe, flags, *, threads, seed, change):
        trained.append((flags[-1], seed))
        return {"name": name, "loss": 2.0 + 0.1 * len(trained), "seconds": 1.0, "steps": 500}

    (tmp_path / "t.txt").write_text("text")
    monkeypatch.setattr(ablation, "train_once", train_once)
    monkeypatch.setattr(ablation, "prepare_shards", lambda *_: None)
    flags = [
        "--folder",
        str(tmp_path),
        "--json",
        str(tmp_path / "a.json"),
        "--text",
        str(tmp_path / "t.txt"),
        "--only",
        "as it is",
        "decay 0",
    ]
    assert ablation.main([*flags, "--seeds", "1"]) == 0 and len(trained) == 2
    assert ablation.main([*flags, "--seeds", "1", "2"]) == 0 and len(trained) == 4
    assert {seed for _, seed in trained[2:]} == {2}
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["decay", "0", "2.3000", "+0.1000", "2.2000,", "2.4000"] for line in lines)


def test_every_knob_stands_in_the_recipe_and_those_of_the_machine_are_not_trained_to_the_end():
    for knob in knobs.KNOBS:
        reading.parse_training(["--recipe", str(ROOT / "recipes" / "quickstart.yaml"), *knobs.flags(knob)])
    free = [knob for knob in knobs.KNOBS if not knobs.changes_learning(knob)]
    assert free == ["gradient_checkpointing=mlp", "gradient_checkpointing=full"]
    assert knobs.flags("z_loss=1e-4,weight_decay=0") == ["--z_loss", "1e-4", "--weight_decay", "0"]


def test_a_knob_that_no_recipe_has_is_refused_before_anything_is_trained(tmp_path, capsys):
    assert knobs.main(["--out", str(tmp_path / "out"), "--knobs", "label_smooting=0.1"]) == 2
    assert "did you mean --label_smoothing?" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_knobs_tells_what_changes_the_loss_from_what_only_costs(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT * 20)
    larger = {"n_layer: 2": "n_layer: 6", "sequence_length: 16": "sequence_length: 128", "_pdrop: 0.1": "_pdrop: 0.0"}
    larger |= {"tokens_per_step: 128": "tokens_per_step: 1024", "batch_size: 2": "batch_size: 8"}
    recipe = RECIPE
    for old, new in larger.items():
        recipe = recipe.replace(old, new)
    (tmp_path / "small.yaml").write_text(recipe)
    command = [sys.executable, "knobs.py", "--recipe", tmp_path / "small.yaml", "--data_files", tmp_path / "text.txt"]
    command += ["--knobs", "z_loss=0.1", "gradient_checkpointing=full", "--steps", "10", "--seeds", "1", "2"]
    command += ["--rounds", "3", "--steps_per_round", "2", "--out", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "knobs.json").read_text())["knobs"]
    base, z_loss, full = found["as it is"], found["z_loss=0.1"], found["gradient_checkpointing=full"]
    assert len({*base["losses"], *z_loss["losses"]}) == 4 and full["losses"] is None
    assert base["ratios"] == [1.0, 1.0, 1.0] and len(full["ratios"]) == 3
    assert z_loss["apart"] > 0.01 and full["apart"] < 1e-5 and full["peak"] < 0.9 * base["peak"]
    assert all(knob in done.stdout for knob in found)
