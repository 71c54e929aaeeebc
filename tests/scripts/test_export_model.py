"""export_model.py as a user calls it: what it writes loads everywhere, what it costs is said, nothing of yours is lost."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import TEXT, run_script
from run_results import update_manifest
from safetensors.torch import load_file, save_file
from small_models import build_small_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, pipeline

import export_model
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import read_metrics
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.export import compression, convert
from ursa_minor.export import stock as model_export


def export(*flags: str, source: str = "runs/whole", out: str = "out", expect: int = 0):
    return run_script("export_model.py", source, "--out", out, *flags, expect=expect)


def record(out: str = "out") -> dict:
    return json.loads(Path(out, "export.json").read_text())


def listing() -> set[str]:
    return {str(path) for path in Path().rglob("*") if not path.name.startswith(".out-")}


def last_loss() -> float:
    rows = read_metrics(Path("runs/whole/metrics.jsonl"))
    return pytest.approx([row["eval/loss"] for row in rows if "eval/loss" in row][-1], abs=1e-5)


def test_a_half_precision_export_loads_in_a_pipeline_and_says_what_it_cost(finished_run):
    out = export("--dtype", "bf16", "--eval_tokens", "320").stdout
    loaded = AutoModelForCausalLM.from_pretrained("out", dtype="auto")
    assert type(loaded) is GPT2LMHeadModel and loaded.dtype == torch.bfloat16
    assert loaded.config.activation_function == "gelu_new"
    made = pipeline("text-generation", model="out")("the ", max_new_tokens=10)[0]["generated_text"]
    assert made.startswith("the ")
    before, after = (record()[when]["loss"] for when in ("before", "after"))
    assert before == last_loss()
    assert 0 < abs(after - before) < 0.01
    assert f"{before:.4f}" in out and f"{after:.4f}" in out and "perplexity" in out
    assert record()["after"]["bytes"] == record()["before"]["bytes"] // 2


def test_int8_and_pruning_load_back_and_say_what_they_cost(finished_run):
    pytest.importorskip("bitsandbytes")
    out = export("--dtype", "int8", "--prune", "0.3").stdout
    loaded = AutoModelForCausalLM.from_pretrained("out")
    assert {module.weight.dtype for module in compression.matrices(loaded).values()} == {torch.int8}
    assert loaded.transformer.wte.weight.dtype == torch.float16
    before, after = (record()[when]["loss"] for when in ("before", "after"))
    assert 0 < abs(after - before) < 0.02
    assert "30.0%" in out and f"{after:.4f}" in out
    Path("items.jsonl").write_text('{"text": "the def"}\n')
    scored = run_script(
        "eval_tasks.py",
        "--model",
        "out",
        "--tasks",
        "lambada_openai",
        "--data_files",
        "items.jsonl",
    )
    assert json.loads(scored.stdout)["precision"] == "int8" and "int8 on CPU" in scored.stderr
    with pytest.raises(BadInput, match="is already quantized"):
        convert.load_model("out")


def test_a_run_that_has_no_model_yet_gives_its_newest_checkpoint(finished_run):
    shutil.rmtree("runs/whole/model")
    assert "checkpoints/step-00000012" in export("--eval_tokens", "320").stderr
    config = AutoModelForCausalLM.from_pretrained("out").config
    assert config.activation_function == "gelu_new" and config.vocab_size == 64
    assert record()["before"]["loss"] == record()["after"]["loss"] == last_loss()
    shutil.rmtree("data")
    assert "the tokenizer of runs/whole, does not exist" in export(out="none", expect=2).stderr


def test_a_model_alone_is_measured_on_text_or_not_at_all(finished_run):
    shutil.copytree("runs/whole/model", "alone")
    out = export(source="alone").stdout
    assert "not measured" in out and "--text PATH" in out and "perplexity" not in out
    assert record()["measured_on"] is None
    (manifest,) = Path("data").glob("*/manifest.json")
    manifest.write_text(manifest.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
    assert "was encoded with a different tokenizer than the model's" in export(out="other").stderr
    Path("data").rename("elsewhere")
    said = export(out="again").stderr
    assert (
        "The loss is not measured, because the run's validation split" in said
        and f"data_dir = {finished_run}/data/text-" in said
    )
    out = export("--text", "text.txt", "--eval_tokens", "64", source="alone", out="measured").stdout
    assert "measured on 64 tokens of text.txt" in out
    tokenizer, model = (
        AutoTokenizer.from_pretrained("alone"),
        AutoModelForCausalLM.from_pretrained("alone"),
    )
    ids = torch.tensor([tokenizer.eos_token_id, *tokenizer(TEXT)["input_ids"][:64]])
    losses = [
        F.cross_entropy(model(ids[None, i : i + 16]).logits[0], ids[i + 1 : i + 17])
        for i in range(0, 64, 16)
    ]
    assert record("measured")["before"]["loss"] == pytest.approx(
        torch.stack(losses).mean().item(), abs=1e-5
    )


def test_bad_input_a_folder_of_yours_and_a_model_too_large_for_fp16_are_refused_and_nothing_is_written(
    finished_run,
):
    for flags, words in (
        (["--dtype", "bf15"], "--dtype: invalid choice: 'bf15'"),
        (["--prune", "nan"], "--prune nan: the share"),
        (["--eval_tokens", "-1"], "--eval_tokens -1: must be 0"),
        (["--trim_vocabulary"], "did you mean --trim_vocab?"),
        (
            ["--gguf", "q8_0", "--dtype", "int8"],
            "--gguf cannot be combined with --dtype int8",
        ),
    ):
        with pytest.raises(BadInput, match=re.escape(words)):
            export_model.parse(["runs/whole", "--out", "out", *flags])
    with pytest.raises(BadInput, match="are required: model, --out"):
        export_model.parse([])
    before = listing()
    assert "--text: the file no.txt does not exist" in export("--text", "no.txt", expect=2).stderr
    assert (
        "--gguf: llama.cpp does not support the way"
        in export("--gguf", "f16", "--text", "no.txt", expect=2).stderr
    )
    for out in ("runs/whole/model", "data", "text.txt"):
        assert f"--out {out} " in export("--overwrite", out=out, expect=2).stderr
    model = GPT2LMHeadModel.from_pretrained("runs/whole/model")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.bias[0] = model.transformer.h[0].mlp.c_proj.weight[0, 0] = (
            65000
        )
    model.save_pretrained("runs/whole/model")
    error = export("--dtype", "fp16", expect=2).stderr
    assert (
        "--dtype fp16: the output of the exported model contains NaN or infinity. Use --dtype bf16"
        in error
    )
    assert listing() == before


def test_an_export_is_replaced_only_when_asked_and_only_as_it_was_written(finished_run):
    export("--dtype", "bf16")
    assert "--overwrite" in export(expect=2).stderr
    export("--overwrite")
    assert record()["dtype"] == "fp32"
    assert (
        "is the model that is exported, which is never replaced"
        in export("--overwrite", source="out", expect=2).stderr
    )
    Path("out", "notes.txt").write_text("mine")
    Path("out", "config.json").write_text(Path("out", "config.json").read_text() + "\n")
    assert ": config.json, notes.txt" in export("--overwrite", expect=2).stderr
    Path("out", "export.json").unlink()
    assert (
        "model.safetensors" in export("--overwrite", expect=2).stderr
        and Path("out", "notes.txt").exists()
    )


def test_chat_gives_the_model_a_template_and_prints_the_next_commands(finished_run):
    own = tokenization.make_characters(["abcdefghijklmnopqrstuvwxyz \n"])
    model_export.write(build_small_model(sequence_length=64), Path("spells"), own)
    done = export("--chat", source="spells")
    tokenizer = AutoTokenizer.from_pretrained("out")
    assert tokenizer.chat_template and record()["chat"] is True
    # Transformers 4 reads no list there.
    assert "extra_special_tokens" not in Path("out/tokenizer_config.json").read_text()
    tune, chat = done.stdout.splitlines()[-2:]
    assert (
        tune.startswith("trl sft ")
        and f" --output_dir {chat.split()[3]} " in tune
        and chat.endswith(" --chat")
    )
    export("--trim_vocab", source="out", out="trimmed")
    assert GPT2LMHeadModel.from_pretrained("trimmed").config.vocab_size == len(tokenizer)


@pytest.mark.parametrize(
    ("flags", "value", "words"),
    [
        (("--dtype", "fp16"), 1e5, "has values up to 100000, but fp16 ends at 65504"),
        (("--dtype", "int8"), 1e5, "has values up to 100000, but fp16 ends at 65504"),
        (("--gguf", "f16"), 1e5, "has values up to 100000, but f16 (--gguf f16) ends at 65504"),
    ],
)
def test_overflowing_weight_ends_before_any_measurement(
    tmp_path, monkeypatch, capsys, flags, value, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(convert, "measure", lambda *_: pytest.fail("the model was measured"))
    model = build_small_model(vocab_size=320)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight[3, 4] = value
    model_export.write(model, Path("large"), tokenization.train_bpe(["abc abd"], 300))
    before = listing()
    assert export_model.main(["large", "--out", "out", *flags]) == 2
    error = capsys.readouterr().err
    assert f"error: transformer.h.1.mlp.c_proj.weight {words}" in error
    assert listing() == before


def test_checkpoint_with_nan_is_not_exported(finished_run, capsys):
    shutil.rmtree("runs/whole/model")
    path = Path("runs/whole/checkpoints/step-00000012")
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if name.endswith("ln_f.bias"))
    weights[name][0] = float("nan")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    update_manifest(path)
    assert export_model.main(["runs/whole", "--out", "out"]) == 2
    assert "ln_f.bias contains NaN or infinity" in capsys.readouterr().err
    assert not Path("out").exists()


def test_model_without_finite_output_is_not_exported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = build_small_model()
    with torch.no_grad():
        model.transformer.ln_f.bias[:] = 3e38
        model.transformer.wte.weight[:] = 3e38
    model_export.write(model, Path("large"), tokenization.make_characters(["abc"]))
    assert export_model.main(["large", "--out", "out"]) == 2
    assert (
        "large cannot be exported, because the output of the model contains NaN or infinity"
        in capsys.readouterr().err
    )
    assert not Path("out").exists()


def test_gguf_writes_a_file_and_a_modelfile_beside_the_export_and_prints_the_commands(
    finished_run, monkeypatch
):
    model_export.write(
        build_small_model(vocab_size=320), Path("spells"), tokenization.train_bpe(["abc abd"], 300)
    )
    done = export("--gguf", "q8_0", source="spells", out="exports/Mine")
    assert "cd exports/Mine\nollama create mine -f Modelfile\nollama run mine\n" in done.stdout
    names = {"Mine.gguf", "Modelfile", "model.safetensors"}
    assert (
        names < {*record("exports/Mine")["files"]}
        and Path("exports/Mine/Mine.gguf").read_bytes()[:4] == b"GGUF"
    )
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert (
        "the package gguf is not installed"
        in export("--gguf", "f16", source="spells", expect=2).stderr
    )
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["My Modèle", "-dash"])
def test_printed_commands_can_be_pasted(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    out = Path(name)
    out.mkdir()
    (out / "config.json").write_text('{"n_positions": 128}')
    tune, talk = map(shlex.split, export_model.chat_commands(out).splitlines()[-2:])
    assert Path(tune[tune.index("--model_name_or_path") + 1]) == out
    assert tune[tune.index("--output_dir") + 1] == talk[3] == f"runs/{name}"
    cd, create, run_it = map(shlex.split, export_model.ollama_commands(out).splitlines()[-3:])
    assert len(cd) == 2 and not cd[1].startswith("-") and Path(cd[1]) == out
    assert re.fullmatch("[a-z0-9][a-z0-9._-]*", create[2]) and create[2] == run_it[2]
