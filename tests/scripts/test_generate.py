"""generate.py as a user calls it."""

import io
import re
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


@pytest.fixture
def model_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenization.make_characters(["abcdefghij \n"])
    model = build_small_model(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    with torch.no_grad():
        model.transformer.wte.weight[len(tokenizer) :] += 5  # the padding would win if it were let
        model.transformer.wte.weight[tokenizer.eos_token_id] = -100 * model.transformer.ln_f.weight
    Path("runs/r").mkdir(parents=True)
    stock_export.write(model, Path("runs/r/model"), tokenizer)
    return "runs/r"


def test_a_run_writes_on_with_known_characters_and_each_sample_is_the_text_of_its_own_seed(
    model_dir,
):
    flags = ("--model", model_dir, "--prompt", "abc", "--max_new_tokens", "30")
    first = run_script("generate.py", *flags, "--num_samples", "2", "--seed", "3").stdout
    one, two = first.removeprefix("---- sample 1 of 2\n").split("---- sample 2 of 2\n")
    assert (
        one.startswith("abc")
        and one.strip() != two.strip()
        and set(one + two) <= set("abcdefghij \n")
    )
    assert run_script("generate.py", *flags, "--seed", "4").stdout == two


@pytest.mark.parametrize(
    ("kind", "prompt"), [("llama", "river"), ("llama", ""), ("lower_case", "The Cafe\u0301 bar")]
)
def test_what_is_written_is_the_text_of_prompt_and_new_ids(
    kind, prompt, tmp_path, monkeypatch, capfdbinary
):
    tokenizer = odd_tokenizers.TOKENIZERS[kind]()
    model = build_small_model(vocab_size=512, sequence_length=16)
    stock_export.write(model, tmp_path / "m", tokenizer)
    prompt_ids, sampled = tokenization.encode_prompt(tokenizer, prompt), []
    sample = sampling.sample
    monkeypatch.setattr(sampling, "sample", lambda *words: sampled.extend(sample(*words)))
    # With this seed the first new token of "river" begins with a space, which is lost where it is decoded alone.
    flags = ["--max_new_tokens", "40", "--seed", "24"]
    assert generate.main(["--model", str(tmp_path / "m"), "--prompt", prompt, *flags]) == 0
    whole = tokenization.decode(tokenizer, [*prompt_ids, *sampled])
    assert len(sampled) == 40 and capfdbinary.readouterr().out.decode() == whole + "\n"


def test_bad_input_is_one_error_with_exit_2(model_dir):
    for flags, words in (
        (["--temprature", "1"], "did you mean --temperature?"),
        (["--top_p", "0", "--num_samples", "0"], "--top_p 0.0: must be between 1e-06 and 1.0"),
        (
            ["--chat", "--prompt", "a"],
            "--chat: messages are read from the terminal. Leave out --prompt",
        ),
    ):
        with pytest.raises(BadInput, match=re.escape(words)):
            generate.parse(["--model", model_dir, *flags])
    with pytest.raises(BadInput, match="--modle: no such flag; did you mean --model"):
        generate.parse(["--modle", model_dir])
    for flags, words in (
        (["--prompt", "xyz"], "no id for 'x' 'y' 'z'"),
        (
            ["--chat"],
            "runs/r has no chat template. Make a model that has one (python export_model.py runs/r --chat",
        ),
    ):
        done = run_script("generate.py", "--model", model_dir, *flags, expect=2)
        assert words in done.stderr and "Traceback" not in done.stderr


def test_a_model_that_computes_nan_writes_nothing(model_dir):
    tokenizer = tokenization.make_characters(["abcdefghij \n"])
    stock_export.write(overflowing_model(torch.float32), Path("nan"), tokenizer)
    done = run_script("generate.py", "--model", "nan", "--prompt", "abc", expect=2)
    assert "error: generating text: the model computes no valid probabilities" in done.stderr
    assert not done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("generate.py", "--model", "m"),
        ("export_model.py", "m", "--out", "out"),
        ("eval_tasks.py", "--model", "m", "--tasks", "piqa", "--data_files", "items.jsonl"),
    ],
    ids=lambda words: words[0],
)
def test_larger_tokenizer_is_one_error_of_each_script(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    stock_export.write(
        build_small_model(vocab_size=16), Path("m"), tokenization.make_characters(["abc"])
    )
    tokenizer = pretrained_tokenizer.load("m")
    tokenizer.add_tokens([f"<{number}>" for number in range(20)])
    tokenizer.save_pretrained("m")
    Path("items.jsonl").write_text('{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n')
    error = run_script(*command, expect=2).stderr
    assert (
        "m: the tokenizer has ids up to 23, which need 24 rows" in error
        and "Traceback" not in error
    )
    assert "model.resize_token_embeddings(24)" in error and not Path("out").exists()


def test_chat_answers_each_line_until_the_input_ends_safe_to_show_on_a_terminal(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenization.make_characters([string.ascii_lowercase + " \n\x1b"])
    model = build_small_model(sequence_length=64)
    chat.add_chat(model, tokenizer)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # tied: every logit is 0 but that of ESC
        model.transformer.ln_f.bias.fill_(1)
        model.lm_head.weight[tokenizer.convert_tokens_to_ids("\x1b")] = 1
    stock_export.write(model, Path("chatty"), tokenizer)
    terminal = io.TextIOWrapper(io.BytesIO(), "utf-8")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n\nde f\n\xd6\n"))
    with monkeypatch.context() as at:
        at.setattr(sys, "stdout", terminal)
        assert generate.main(["--model", "chatty", "--chat", "--max_new_tokens", "2"]) == 0
    terminal.flush()
    assert (
        terminal.buffer.getvalue() == b"\\x1b\\x1b\n" * 2 + b"\n"
        and "no id for '\xd6'" in caplog.text
    )
