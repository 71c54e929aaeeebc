"""Command line of export_model.py: exported models load in Transformers, and nothing is lost."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import TEXT, CompletedScript, run_script
from huggingface_hub import ModelCard
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

RUN = "runs/whole"


def export(*flags: str, source: str = RUN, out: str = "out", expect: int = 0) -> CompletedScript:
    """Run export_model.py in a process."""
    return run_script("export_model.py", source, "--out", out, *flags, expect=expect)


def export_error(*flags: str, source: str = RUN, out: str = "out") -> str:
    """Return the error message of an export that is rejected."""
    return export(*flags, source=source, out=out, expect=2).stderr


def read_record(out: str = "out") -> dict:
    """Return the contents of export.json, which describes an export."""
    return json.loads(Path(out, "export.json").read_text())


def list_files() -> set[str]:
    """Return the names of all files below the current folder, except output of run_script."""
    return {str(path) for path in Path().rglob("*") if not path.name.startswith(".out-")}


def final_loss():
    """Return the last validation loss of the run, to be compared to 5 decimals."""
    rows = read_metrics(Path(RUN, "metrics.jsonl"))
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    return pytest.approx(losses[-1], abs=1e-5)


def test_half_precision_export_loads_in_a_pipeline(finished_run):
    output = export("--dtype", "bf16", "--eval_tokens", "320").stdout

    model = AutoModelForCausalLM.from_pretrained("out", dtype="auto")
    assert type(model) is GPT2LMHeadModel
    assert model.dtype == torch.bfloat16
    assert model.config.activation_function == "gelu_new"
    (sample,) = pipeline("text-generation", model="out")("the ", max_new_tokens=10)
    assert sample["generated_text"].startswith("the ")
    before = read_record()["before"]
    after = read_record()["after"]
    assert before["loss"] == final_loss()
    assert 0 < abs(after["loss"] - before["loss"]) < 0.01
    assert after["bytes"] == before["bytes"] // 2
    assert f"{before['loss']:.4f}" in output
    assert f"{after['loss']:.4f}" in output
    assert "perplexity" in output


def test_pruned_int8_export_can_be_evaluated(finished_run):
    pytest.importorskip("bitsandbytes")
    Path("items.jsonl").write_text('{"text": "the def"}\n')
    task = ("--tasks", "lambada_openai", "--data_files", "items.jsonl")

    output = export("--dtype", "int8", "--prune", "0.3").stdout
    evaluation = run_script("eval_tasks.py", "--model", "out", *task)

    model = AutoModelForCausalLM.from_pretrained("out")
    dtypes = {module.weight.dtype for module in compression.matrices(model).values()}
    assert dtypes == {torch.int8}
    assert model.transformer.wte.weight.dtype == torch.float16
    loss = read_record()["after"]["loss"]
    assert 0 < abs(loss - read_record()["before"]["loss"]) < 0.02
    assert "30.0%" in output
    unchanged = "wte.weight, wpe.weight"
    assert f"Not pruned: {unchanged}\nNot quantized: {unchanged}\n" in output
    assert f"{loss:.4f}" in output
    assert json.loads(evaluation.stdout)["precision"] == "int8"
    assert "int8 on CPU" in evaluation.stderr
    with pytest.raises(BadInput, match="is already quantized"):
        convert.load_model("out")


def test_newest_checkpoint_of_unfinished_run_is_exported(finished_run):
    shutil.rmtree("runs/whole/model")

    error_output = export("--eval_tokens", "320").stderr

    assert "checkpoints/step-00000012" in error_output
    config = AutoModelForCausalLM.from_pretrained("out").config
    assert config.activation_function == "gelu_new"
    assert config.vocab_size == 64
    assert read_record()["before"]["loss"] == final_loss()
    assert read_record()["after"]["loss"] == read_record()["before"]["loss"]


def test_unfinished_run_is_exported_without_its_data(finished_run):
    shutil.rmtree("runs/whole/model")
    shutil.rmtree("data")

    error_output = export().stderr

    assert "validation split cannot be read" in error_output
    assert len(AutoTokenizer.from_pretrained("out")) == 18


def test_model_without_a_run_is_not_measured(finished_run):
    shutil.copytree("runs/whole/model", "alone")

    output = export(source="alone").stdout

    assert "not measured" in output
    assert "--text PATH" in output
    assert "perplexity" not in output
    assert read_record()["measured_on"] is None


def test_validation_split_of_other_tokenizer_is_reported(finished_run):
    (manifest,) = Path("data").glob("*/manifest.json")
    text = manifest.read_text()
    manifest.write_text(text.replace('"fingerprint": "', '"fingerprint": "0'))

    assert "was encoded with a different tokenizer than the model's" in export().stderr


def test_missing_validation_split_is_reported(finished_run):
    Path("data").rename("elsewhere")

    error_output = export().stderr

    assert "The loss is not measured" in error_output
    assert f"data_dir = {finished_run}/data/text-" in error_output


def test_loss_is_measured_on_given_text(finished_run):
    flags = ("--text", "text.txt", "--eval_tokens", "64")

    output = export(*flags, source="runs/whole/model").stdout

    assert "measured on 64 tokens of text.txt" in output
    tokenizer = AutoTokenizer.from_pretrained("runs/whole/model")
    model = AutoModelForCausalLM.from_pretrained("runs/whole/model")
    ids = torch.tensor([tokenizer.eos_token_id, *tokenizer(TEXT)["input_ids"][:64]])
    losses = []
    for start in range(0, 64, 16):
        logits = model(ids[None, start : start + 16]).logits[0]
        losses.append(F.cross_entropy(logits, ids[start + 1 : start + 17]))
    expected = torch.stack(losses).mean().item()
    assert read_record()["before"]["loss"] == pytest.approx(expected, abs=1e-5)


# ---- rejected exports


@pytest.mark.parametrize(
    ("flags", "phrase"),
    [
        ("--dtype bf15", "--dtype: invalid choice: 'bf15'"),
        ("--prune nan", "--prune nan: the share"),
        ("--eval_tokens -1", "--eval_tokens -1: must be 0"),
        ("--trim_vocabulary", "did you mean --trim_vocab?"),
        ("--gguf q8_0 --dtype int8", "--gguf cannot be combined with --dtype int8"),
    ],
)
def test_bad_flags_are_rejected(flags, phrase):
    with pytest.raises(BadInput, match=re.escape(phrase)):
        export_model.parse([RUN, "--out", "out", *flags.split()])


def test_missing_flags_are_rejected():
    with pytest.raises(BadInput, match="are required: model, --out"):
        export_model.parse([])


@pytest.mark.parametrize(
    ("flags", "phrase"),
    [
        ("--text no.txt --out out", "--text: the file no.txt does not exist"),
        ("--gguf f16 --text no.txt --out out", "--gguf: llama.cpp does not support"),
        ("--overwrite --out runs/whole/model", "--out runs/whole/model "),
        ("--overwrite --out data", "--out data "),
        ("--overwrite --out text.txt", "--out text.txt "),
    ],
    ids=["missing_text", "gguf_of_characters", "own_model", "other_folder", "file"],
)
def test_bad_export_writes_nothing(finished_run, capsys, flags, phrase):
    files = list_files()

    assert export_model.main([RUN, *flags.split()]) == 2

    assert phrase in capsys.readouterr().err
    assert list_files() == files


def test_activations_that_overflow_fp16_are_rejected(finished_run, capsys):
    model = GPT2LMHeadModel.from_pretrained("runs/whole/model")
    block = model.transformer.h[0].mlp
    with torch.no_grad():
        block.c_fc.bias[0] = 65000
        block.c_proj.weight[0, 0] = 65000
    model.save_pretrained("runs/whole/model")
    files = list_files()

    assert export_model.main([RUN, "--out", "out", "--dtype", "fp16"]) == 2

    error = capsys.readouterr().err
    assert "--dtype fp16: the output of the exported model contains NaN" in error
    assert "Use --dtype bf16" in error
    assert list_files() == files


@pytest.mark.parametrize(
    ("flags", "phrase"),
    [
        (("--dtype", "fp16"), "fp16 ends at 65504"),
        (("--dtype", "int8"), "fp16 ends at 65504"),
        (("--gguf", "f16"), "f16 (--gguf f16) ends at 65504"),
    ],
    ids=["fp16", "int8", "gguf"],
)
def test_weight_overflow_is_reported_before_any_measurement(
    tmp_path, monkeypatch, capsys, flags, phrase
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(convert, "measure", lambda *_: pytest.fail("the model was measured"))
    model = build_small_model(vocab_size=320)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight[3, 4] = 1e5
    model_export.write(model, Path("large"), tokenization.train_bpe(["abc abd"], 300))
    files = list_files()

    assert export_model.main(["large", "--out", "out", *flags]) == 2

    error = capsys.readouterr().err
    assert "error: transformer.h.1.mlp.c_proj.weight has values up to 100000" in error
    assert phrase in error
    assert list_files() == files


def test_checkpoint_with_nan_is_not_exported(finished_run, capsys):
    shutil.rmtree("runs/whole/model")
    checkpoint = Path("runs/whole/checkpoints/step-00000012")
    weights = load_file(checkpoint / "model.safetensors")
    name = next(name for name in weights if name.endswith("ln_f.bias"))
    weights[name][0] = float("nan")
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    update_manifest(checkpoint)

    assert export_model.main([RUN, "--out", "out"]) == 2

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

    error = capsys.readouterr().err
    assert "large cannot be exported" in error
    assert "the output of the model contains NaN" in error
    assert not Path("out").exists()


# ---- an existing folder is replaced only with --overwrite


@pytest.fixture
def exported_model(tmp_path, monkeypatch) -> Path:
    """The folder out with an export in bf16 of the model in the folder source."""
    monkeypatch.chdir(tmp_path)
    model_export.write(build_small_model(), Path("source"), tokenization.make_characters(["abc"]))
    assert export_model.main(["source", "--out", "out", "--dtype", "bf16"]) == 0
    return Path("out")


def overwrite_error(capsys, *flags: str, source: str = "source") -> str:
    """Return the error message of an export to out that is rejected."""
    capsys.readouterr()
    assert export_model.main([source, "--out", "out", *flags]) == 2
    return capsys.readouterr().err


def test_export_is_replaced_only_with_overwrite(exported_model, capsys):
    assert "--overwrite" in overwrite_error(capsys)
    assert read_record()["dtype"] == "bf16"

    assert export_model.main(["source", "--out", "out", "--overwrite"]) == 0
    assert read_record()["dtype"] == "fp32"


def test_exported_model_is_never_replaced_by_itself(exported_model, capsys):
    error = overwrite_error(capsys, "--overwrite", source="out")

    assert "is the model that is exported" in error


def test_changed_export_is_not_replaced(exported_model, capsys):
    notes = exported_model / "notes.txt"
    notes.write_text("mine")
    with (exported_model / "config.json").open("a") as config:
        config.write("\n")

    assert ": config.json, notes.txt" in overwrite_error(capsys, "--overwrite")

    (exported_model / "export.json").unlink()
    assert "model.safetensors" in overwrite_error(capsys, "--overwrite")
    assert notes.exists()


# ---- the model card


def read_card(out: str = "out") -> str:
    """Return the model card of an export."""
    return Path(out, "README.md").read_text(encoding="utf-8")


def test_card_describes_the_run(finished_run, capsys):
    flags = ("--description", "About *cats*.", "--dtype", "bf16")

    assert export_model.main([RUN, "--out", "out", *flags]) == 0

    text = read_card()
    assert "\n\nAbout *cats*.\n\n" in text
    assert "| steps | 12 of 12 |" in text
    assert "| validation, bits per byte, bigram model | " in text
    assert "```text\nthe " in text
    assert "README.md" in read_record()["files"]
    output = capsys.readouterr().out
    assert "does not state the license and language" in output
    assert f"Set license and language in {RUN}/recipe.yaml" in output
    assert output.count("not validated") == 1


def test_card_has_license_and_language_of_recipe(finished_run, capsys):
    recipe_file = Path(RUN, "recipe.yaml")
    values = yaml.safe_load(recipe_file.read_text())
    recipe_file.write_text(yaml.safe_dump(values | {"license": "mit", "language": ["en"]}))

    assert export_model.main([RUN, "--out", "out"]) == 0

    data = ModelCard(read_card()).data
    assert (data.license, data.language) == ("mit", ["en"])
    assert "does not state" not in capsys.readouterr().out


def test_card_of_checkpoint_names_its_step(finished_run):
    assert export_model.main([f"{RUN}/checkpoints/step-00000009", "--out", "out"]) == 0

    assert "| steps | 9 of 12 |" in read_card()


def test_card_of_best_model_names_its_step(overfitted_run):
    assert export_model.main([RUN, "--out", "out"]) == 0

    finish = json.loads(Path(RUN, "finished.json").read_text())
    step = finish["weights_step"]
    assert step < finish["step"]
    assert f"| steps | {step} of 12, at the lowest validation loss |" in read_card()


def test_card_without_run_has_no_training_section(finished_run, capsys):
    shutil.copytree("runs/whole/model", "alone")

    assert export_model.main(["alone", "--out", "out"]) == 0

    text = read_card()
    assert "exported from alone with Ursa Minor" in text
    assert "## Training" not in text
    assert "out/README.md" in capsys.readouterr().out


def test_edited_card_is_not_replaced(exported_model, capsys):
    with (exported_model / "README.md").open("a") as card:
        card.write("mine")

    assert ": README.md. Use another folder" in overwrite_error(capsys, "--overwrite")


@pytest.fixture
def tuned_model(finished_run) -> str:
    """A chat model as TRL writes it, whose base model is the run."""
    shutil.rmtree("runs/whole/model")
    letters = tokenization.make_characters(["abcdefghijklmnopqrstuvwxyz \n"])
    model_export.write(build_small_model(sequence_length=64), Path(RUN, "model"), letters)
    assert export_model.main([RUN, "--out", "exports/chat", "--chat"]) == 0
    model = AutoModelForCausalLM.from_pretrained("exports/chat")
    tokenizer = AutoTokenizer.from_pretrained("exports/chat")
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
    model.save_pretrained("runs/tuned")
    tokenizer.save_pretrained("runs/tuned")
    Path("runs/tuned/README.md").write_text("---\nlicence: license\ntags: [trl]\n---\nNone\n")
    return "runs/tuned"


def test_card_of_chat_model_names_base_model(tuned_model):
    assert "was not trained on chats" in read_card("exports/chat")

    assert export_model.main([tuned_model, "--out", "out"]) == 0

    text = read_card()
    assert "fine-tuned on chats. Its base model is whole" in text
    assert "| steps | 12 of 12 |" in text
    assert "apply_chat_template" in text
    assert "User: the " in text
    assert "was not trained on chats" not in text


def test_card_of_chat_model_needs_no_run(tuned_model):
    Path(RUN).rename("elsewhere")

    assert export_model.main([tuned_model, "--out", "out"]) == 0

    assert "Its base model is whole" in read_card()
    assert "## Training" not in read_card()


# ---- chat, GGUF and the commands that are printed


def test_chat_export_has_a_template(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenization.make_characters(["abcdefghijklmnopqrstuvwxyz \n"])
    model_export.write(build_small_model(sequence_length=64), Path("spells"), tokenizer)

    output = export("--chat", source="spells").stdout
    export("--trim_vocab", source="out", out="trimmed")

    chat_tokenizer = AutoTokenizer.from_pretrained("out")
    assert chat_tokenizer.chat_template
    assert read_record()["chat"] is True
    # Transformers 4 cannot read a list there.
    assert "extra_special_tokens" not in Path("out/tokenizer_config.json").read_text()
    tuning_command, chat_command = output.splitlines()[-2:]
    tuned_model = chat_command.split()[3]
    assert tuning_command.startswith("trl sft ")
    assert f" --output_dir {tuned_model} " in tuning_command
    assert chat_command.endswith(" --chat")
    trimmed = GPT2LMHeadModel.from_pretrained("trimmed")
    assert trimmed.config.vocab_size == len(chat_tokenizer)


@pytest.fixture
def byte_level_model(tmp_path, monkeypatch) -> str:
    """A folder with a model that llama.cpp supports."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenization.train_bpe(["abc abd"], 300)
    model_export.write(build_small_model(vocab_size=320), Path("spells"), tokenizer)
    return "spells"


def test_gguf_export_has_a_modelfile(byte_level_model, capsys):
    out = Path("exports/Mine")

    assert export_model.main([byte_level_model, "--out", str(out), "--gguf", "q8_0"]) == 0

    expected = "cd exports/Mine\nollama create mine -f Modelfile\nollama run mine\n"
    output = capsys.readouterr().out
    assert expected in output
    assert {"Mine.gguf", "Modelfile", "model.safetensors"} < set(read_record(str(out))["files"])
    assert (out / "Mine.gguf").read_bytes()[:4] == b"GGUF"
    megabytes = (out / "Mine.gguf").stat().st_size / 1e6
    assert f"Mine.gguf (q8_0): {megabytes:,.2f} MB" in output


def test_gguf_export_without_its_package_is_rejected(byte_level_model, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)

    assert export_model.main([byte_level_model, "--out", "out", "--gguf", "f16"]) == 2

    assert "the package gguf is not installed" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["My Modèle", "-dash"])
def test_printed_chat_commands_are_quoted(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    out = Path(name)
    out.mkdir()
    (out / "config.json").write_text('{"n_positions": 128}')

    commands = export_model.chat_commands(out).splitlines()[-2:]

    tuning_words, chat_words = map(shlex.split, commands)
    assert Path(tuning_words[tuning_words.index("--model_name_or_path") + 1]) == out
    assert tuning_words[tuning_words.index("--output_dir") + 1] == f"runs/{name}-sft"
    assert chat_words[3] == f"runs/{name}-sft"


def test_printed_chat_commands_name_unused_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = Path("exports/mine")
    for folder in (out, Path("runs/mine"), Path("runs/mine-sft")):
        folder.mkdir(parents=True)
    (out / "config.json").write_text('{"n_positions": 128}')

    commands = export_model.chat_commands(out)

    assert "pip install -r requirements/post.txt" in commands
    assert "--output_dir runs/mine-sft-2 " in commands
    assert Path(__file__).parents[2].joinpath("requirements/post.txt").is_file()


@pytest.mark.parametrize("name", ["My Modèle", "-dash"])
def test_printed_ollama_commands_are_quoted(name):
    commands = export_model.ollama_commands(Path(name)).splitlines()[-3:]

    cd_words, create_words, run_words = map(shlex.split, commands)
    assert len(cd_words) == 2
    assert not cd_words[1].startswith("-")
    assert Path(cd_words[1]) == Path(name)
    assert re.fullmatch("[a-z0-9][a-z0-9._-]*", create_words[2])
    assert run_words[2] == create_words[2]
