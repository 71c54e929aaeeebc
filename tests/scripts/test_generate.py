"""Command line of generate.py: samples, chat and bad input."""

import io
import re
import shutil
import string
import sys
from pathlib import Path

import odd_tokenizers
import pytest
import torch
from conftest import run_script
from small_models import build_small_model, overflowing_model

import generate
from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import pretrained_tokenizer
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import sampling
from ursa_minor.export import stock as stock_export
from ursa_minor.post import chat

CHARACTERS = "abcdefghij \n"


@pytest.fixture
def model_dir(tmp_path, monkeypatch) -> str:
    """The folder of a run whose model prefers padding ids and never ends a text."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenization.make_characters([CHARACTERS])
    model = build_small_model(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    embeddings = model.transformer.wte.weight
    with torch.no_grad():
        embeddings[len(tokenizer) :] += 5
        embeddings[tokenizer.eos_token_id] = -100 * model.transformer.ln_f.weight
    Path("runs/r").mkdir(parents=True)
    stock_export.write(model, Path("runs/r/model"), tokenizer)
    return "runs/r"


def test_each_sample_is_text_of_its_seed(model_dir):
    flags = ("--model", model_dir, "--prompt", "abc", "--max_new_tokens", "30")

    output = run_script("generate.py", *flags, "--num_samples", "2", "--seed", "3").stdout
    output_of_seed_4 = run_script("generate.py", *flags, "--seed", "4").stdout

    samples = output.removeprefix("---- sample 1 of 2\n")
    first, second = samples.split("---- sample 2 of 2\n")
    assert first.startswith("abc")
    assert first.strip() != second.strip()
    assert set(first + second) <= set(CHARACTERS)
    assert output_of_seed_4 == second


@pytest.mark.parametrize(
    ("kind", "prompt"), [("llama", "river"), ("llama", ""), ("lower_case", "The Cafe\u0301 bar")]
)
def test_output_decodes_prompt_with_new_ids(kind, prompt, tmp_path, monkeypatch, capfdbinary):
    tokenizer = odd_tokenizers.TOKENIZERS[kind]()
    model = build_small_model(vocab_size=512, sequence_length=16)
    stock_export.write(model, tmp_path / "m", tokenizer)
    new_ids = []
    sample = sampling.sample
    monkeypatch.setattr(sampling, "sample", lambda *args: new_ids.extend(sample(*args)))
    # With this seed the first new token after "river" begins with a space. Decoding the token
    # alone would drop the space.
    flags = ["--max_new_tokens", "40", "--seed", "24"]

    assert generate.main(["--model", str(tmp_path / "m"), "--prompt", prompt, *flags]) == 0

    prompt_ids = tokenization.encode_prompt(tokenizer, prompt)
    expected = tokenization.decode(tokenizer, [*prompt_ids, *new_ids]) + "\n"
    assert len(new_ids) == 40
    assert capfdbinary.readouterr().out.decode() == expected


@pytest.mark.parametrize(
    ("flags", "phrase"),
    [
        ("--model runs/r --temprature 1", "did you mean --temperature?"),
        ("--model runs/r --top_p 0 --num_samples 0", "--top_p 0.0: must be between 1e-06 and 1.0"),
        ("--model runs/r --chat --prompt a", "Leave out --prompt"),
        ("--modle runs/r", "did you mean --model"),
    ],
)
def test_bad_flags_are_rejected(flags, phrase):
    with pytest.raises(BadInput, match=re.escape(phrase)):
        generate.parse(flags.split())


@pytest.mark.parametrize(
    ("flags", "phrase"),
    [
        (("--prompt", "xyz"), "no id for 'x' 'y' 'z'"),
        (("--chat",), "runs/r has no chat template"),
        (("--chat",), "python export_model.py runs/r --chat"),
    ],
    ids=["unknown_characters", "no_chat_template", "suggested_command"],
)
def test_flags_that_do_not_fit_model_are_rejected(model_dir, flags, phrase):
    result = run_script("generate.py", "--model", model_dir, *flags, expect=2)

    assert phrase in result.stderr
    assert "Traceback" not in result.stderr


def test_model_that_computes_nan_prints_nothing(model_dir):
    tokenizer = tokenization.make_characters([CHARACTERS])
    stock_export.write(overflowing_model(torch.float32), Path("nan"), tokenizer)

    result = run_script("generate.py", "--model", "nan", "--prompt", "abc", expect=2)

    assert "error: generating text: the model computes no valid" in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    "command",
    [
        ("generate.py", "--model", "m"),
        ("export_model.py", "m", "--out", "out"),
        ("eval_tasks.py", "--model", "m", "--tasks", "piqa", "--data_files", "items.jsonl"),
    ],
    ids=lambda words: words[0],
)
def test_too_large_tokenizer_is_rejected(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    model = build_small_model(vocab_size=16)
    stock_export.write(model, Path("m"), tokenization.make_characters(["abc"]))
    tokenizer = pretrained_tokenizer.load("m")
    tokenizer.add_tokens([f"<{number}>" for number in range(20)])
    tokenizer.save_pretrained("m")
    Path("items.jsonl").write_text('{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n')

    error = run_script(*command, expect=2).stderr

    assert "m: the tokenizer has ids up to 23" in error
    assert "model.resize_token_embeddings(24)" in error
    assert "Traceback" not in error
    assert not Path("out").exists()


def write_escaping_chat_model(folder: Path) -> None:
    """Write a chat model that generates nothing but the ESC character."""
    tokenizer = tokenization.make_characters([string.ascii_lowercase + " \n\x1b"])
    model = build_small_model(sequence_length=64)
    chat.add_chat(model, tokenizer)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.transformer.ln_f.bias.fill_(1)
        model.lm_head.weight[tokenizer.convert_tokens_to_ids("\x1b")] = 1
    stock_export.write(model, folder, tokenizer)


def test_chat_answers_with_escaped_control_characters(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_escaping_chat_model(Path("chatty"))
    terminal = io.TextIOWrapper(io.BytesIO(), "utf-8")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n\nde f\n\xd6\n"))

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        status = generate.main(["--model", "chatty", "--chat", "--max_new_tokens", "2"])

    assert status == 0
    terminal.flush()
    # Two answers: the empty line gets none, and the last one has an unknown character.
    assert terminal.buffer.getvalue() == b"\\x1b\\x1b\n" * 2 + b"\n"
    assert "no id for '\xd6'" in capsys.readouterr().err


def test_checkpoint_of_unfinished_run_is_named(finished_run):
    shutil.rmtree("runs/whole/model")

    result = run_script("generate.py", "--model", "runs/whole", "--max_new_tokens", "2")

    assert "runs/whole has no model/ yet; using checkpoints/step-00000012" in result.stderr
