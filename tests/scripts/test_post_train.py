"""Tests of post_train.py, and of TRL's command line with this project's configuration files."""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, CompletedScript, needs_trl, run_script
from http_server import DataServer
from small_models import build_small_model
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import post_train as post_train_script
from ursa_minor.base import cudnn
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import read_metrics
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.export import stock as stock_export
from ursa_minor.post import chat

POST_RECIPES = ROOT / "recipes" / "post"
POST_PAGE = ROOT / "docs" / "post_training.md"
TRL = Path(sys.executable).with_name("trl")
POST_TRAIN = (
    *("--config", str(POST_RECIPES / "addition.yaml")),
    *("--max_steps", "2"),
    *("--per_device_train_batch_size", "16"),
    *("--logging_steps", "1"),
    *("--held_out_steps", "2"),
)
ANSWER_WORDS = ("cat", "dog", "sun", "sea", "ice", "hat")
CHATS = [
    [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": f"{word}."}]
    for word in ANSWER_WORDS
]
OUTPUT = Path("runs/addition-grpo")


def post_train(*flags: str, expect: int = 0, processes: int = 1) -> CompletedScript:
    """Run post_train.py for two steps."""
    return run_script(
        "post_train.py", *POST_TRAIN, *flags, expect=expect, processes=processes, PICTURES="1"
    )


def trl(*words: str) -> str:
    """Run TRL's command line and return its standard output."""
    result = subprocess.run([TRL, *words], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def generate_problems(folder: Path) -> None:
    """Generate the addition problems in the folder ``data``."""
    command = [sys.executable, ROOT / "scripts" / "addition.py"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write a JSON lines file with these rows."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def metric_steps(folder: Path) -> list[int]:
    """Return the steps in the metrics of a run."""
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def addition_folder(tmp_path_factory) -> Path:
    """Make a folder with the addition problems and runs/addition, trained for seconds."""
    folder = tmp_path_factory.mktemp("addition")
    generate_problems(folder)
    held_out = folder / "data" / "addition_held_out.jsonl"
    lines = held_out.read_text().splitlines(keepends=True)
    held_out.write_text("".join(lines[:40]))
    flags = (
        *("--recipe", str(ROOT / "recipes" / "addition.yaml")),
        *("--n_layer", "1"),
        *("--n_embd", "32"),
        *("--tokens_per_step", "512"),
        *("--per_device_train_batch_size", "8"),
        *("--max_steps", "3"),
    )
    with contextlib.chdir(folder):
        run_script("train.py", *flags)
    return folder


@pytest.fixture
def workspace(addition_folder, tmp_path, monkeypatch) -> Path:
    """Change to a folder with links to the addition problems and the model."""
    # Imported here once, because each run is a fork of this process.
    if importlib.util.find_spec("trl"):
        import trl  # noqa: F401
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("data", "runs/addition"):
        (tmp_path / name).symlink_to(addition_folder / name)
    return tmp_path


@pytest.fixture
def chat_folder(tmp_path, monkeypatch) -> Path:
    """Change to a folder with a small chat model, chats, and pairs of answers."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenization.make_characters(["abcdefghijklmnopqrstuvwxyz .\n"])
    model = build_small_model(sequence_length=64, n_embd=64)
    chat.add_chat(model, tokenizer)
    stock_export.write(model, tmp_path / "base", tokenizer)
    rejected_answer = {"role": "assistant", "content": "no"}
    chats = [{"messages": messages, "source": "made up"} for messages in CHATS]
    pairs = [{"chosen": chosen, "rejected": [chosen[0], rejected_answer]} for chosen in CHATS]
    for split in ("train", "test"):
        write_rows(tmp_path / "chats" / f"{split}.jsonl", chats * 8)
        write_rows(tmp_path / "pairs" / f"{split}.jsonl", pairs)
    return tmp_path


def test_missing_trl_suggests_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)

    with pytest.raises(BadInput, match="TRL cannot be .*pip install -r requirements/post.txt"):
        post_train_script.parse([])


def test_help_without_trl_names_its_installation(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)

    with pytest.raises(SystemExit) as caught:
        post_train_script.parse(["--help"])

    output = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "--config PATH" in output
    assert "pip install -r requirements/post.txt" in output


# The addition problems.


def summands(problem: str) -> tuple[int, ...]:
    """Return the sorted summands of a problem such as "12+3=15"."""
    addition, _, _ = problem.partition("=")
    return tuple(sorted(int(number) for number in addition.split("+")))


def read_prompts(path: Path) -> set[tuple[int, ...]]:
    """Return the summands of all prompts in a file."""
    return {summands(json.loads(line)["prompt"]) for line in path.read_text().splitlines()}


def test_held_out_problems_are_not_trained_on(tmp_path):
    generate_problems(tmp_path)

    text = (tmp_path / "data/addition.txt").read_text().splitlines()
    prompts = read_prompts(tmp_path / "data/addition_prompts.jsonl")
    held_out = read_prompts(tmp_path / "data/addition_held_out.jsonl")
    assert {summands(line) for line in text} == prompts
    assert not prompts & held_out
    assert len(prompts | held_out) == 5050
    for line in text:
        _, _, result = line.partition("=")
        assert int(result) == sum(summands(line)), line


# The attention of cuDNN.


def test_user_setting_of_cudnn_attention_is_kept(monkeypatch):
    values = []

    def parse(argv):
        values.append(os.environ[cudnn.DEPRIORITIZED_VARIABLE])
        raise BadInput("stop here")

    monkeypatch.setattr(post_train_script, "parse", parse)
    monkeypatch.setenv(cudnn.DEPRIORITIZED_VARIABLE, "0")
    # Otherwise main would change this variable for the whole process.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    status = post_train_script.main([])

    assert status == 2
    assert values == ["0"]


def test_cudnn_attention_is_avoided_before_torch_import():
    program = f"""
import os, sys
sys.modules["torch"] = None
import post_train
post_train.main([])
print(os.environ["{cudnn.DEPRIORITIZED_VARIABLE}"])
"""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]

    result = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert result.stdout == "1\n", result.stderr
    assert "TRL cannot be imported" in result.stderr


def test_trl_files_avoid_cudnn_attention():
    for path in POST_RECIPES.glob("*.yaml"):
        settings = yaml.safe_load(path.read_text())
        # A file with "model" is for post_train.py, which sets the variable itself.
        if "model" not in settings:
            assert settings["env"][cudnn.DEPRIORITIZED_VARIABLE] == "1", path


def test_trl_commands_avoid_cudnn_attention():
    pattern = r"^    (.*\btrl (?:sft|dpo|reward) .*)$"

    trl_commands = re.findall(pattern, POST_PAGE.read_text(), re.MULTILINE)

    assert len(trl_commands) >= 5
    for line in trl_commands:
        assert line.startswith(f"{cudnn.DEPRIORITIZED_VARIABLE}=1 trl ")


# Rows that are too long.


def chat_row(question_letters: int, answer_letters: int) -> dict:
    """Return a chat with a question and an answer of these lengths."""
    question = {"role": "user", "content": "a" * question_letters}
    answer = {"role": "assistant", "content": "b" * answer_letters}
    return {"messages": [question, answer]}


def long_and_short_chats() -> list[dict]:
    """Return nine chats for a context of 64 tokens: 3 that fit, 4 to truncate and 2 to drop."""
    return [chat_row(5, 5)] * 3 + [chat_row(5, 100)] * 4 + [chat_row(100, 5)] * 2


def test_program_of_page_counts_long_rows(chat_folder, monkeypatch, capsys):
    block = re.search(r"<<'END'\n(.*?)\n    END\n", POST_PAGE.read_text(), re.DOTALL)
    program = textwrap.dedent(block[1])
    write_rows(Path("rows.jsonl"), long_and_short_chats())
    monkeypatch.setattr(sys, "argv", ["-", "base", "rows.jsonl", "64"])

    exec(program, {})

    assert capsys.readouterr().out == "9 rows: 2 will be dropped, 4 will be cut\n"


@pytest.mark.post
@needs_trl
def test_trl_drops_and_truncates_long_rows(chat_folder):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        output_dir="out",
        max_length=64,
        assistant_only_loss=True,
        bf16=False,
        report_to="none",
        use_cpu=True,
    )

    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained("base"),
        args=settings,
        train_dataset=Dataset.from_list(long_and_short_chats()),
        processing_class=AutoTokenizer.from_pretrained("base"),
    )

    lengths = sorted(len(ids) for ids in trainer.train_dataset["input_ids"])
    assert lengths[3:] == [64] * 4


@pytest.mark.post
@needs_trl
def test_too_long_prompts_are_not_used(workspace):
    prompts = Path("data/addition_prompts.jsonl").read_text().splitlines()[:32]
    long_prompt = json.dumps({"prompt": "1" * 60 + "+1="})
    Path("mixed.jsonl").write_text("\n".join([*prompts, long_prompt, long_prompt]) + "\n")
    Path("long.jsonl").write_text("\n".join([prompts[0], long_prompt]) + "\n")

    mixed = post_train("--prompts", "mixed.jsonl")
    long = post_train("--prompts", "long.jsonl", "--output_dir", "runs/none", expect=2)

    assert "prompts = mixed.jsonl: 2 of 34 prompts" in mixed.stderr
    assert "a batch needs 2 prompts" in long.stderr
    assert "only 1 are usable" in long.stderr
    assert not Path("runs/none").exists()


# Training with rewards.


def changed_weights(before: Path, after: Path) -> list[str]:
    """Return the names of the weights that differ between two models of the same architecture."""
    model_before = AutoModelForCausalLM.from_pretrained(before)
    model_after = AutoModelForCausalLM.from_pretrained(after)
    assert model_before.config.to_dict().keys() == model_after.config.to_dict().keys()
    weights_after = model_after.state_dict()
    names = []
    for name, tensor in model_before.state_dict().items():
        if not torch.equal(tensor, weights_after[name]):
            names.append(name)
    return names


@pytest.mark.post
@needs_trl
def test_base_model_is_post_trained_and_resumed(workspace):
    Path("mine.py").write_text(
        "def digits(prompt, completion):\n    return sum(map(str.isdigit, completion)) / 5\n"
    )
    flags = ("--reward", "mine.py:digits", "--save_strategy", "steps", "--save_steps", "2")

    result = post_train(*flags)

    rows = read_metrics(OUTPUT / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "eval/reward" in rows[0]
    assert "train/reward" in rows[1]
    assert "eval/reward" in rows[2]
    assert "40 held-out prompts: " in result.stderr
    assert (OUTPUT / "reward.png").stat().st_size > 10_000
    names = changed_weights(Path("runs/addition/model"), OUTPUT / "model")
    assert "transformer.wte.weight" in names

    repeated = post_train(*flags, expect=2)
    assert f"output_dir = {OUTPUT}" in repeated.stderr
    assert "contains a model already" in repeated.stderr

    (OUTPUT / "model").rename(workspace / "first")
    resume = ("--max_steps", "4", "--resume_from_checkpoint", f"{OUTPUT}/checkpoint-2")
    post_train(*flags, *resume)
    assert metric_steps(OUTPUT) == [0, 1, 2, 3, 4]


@pytest.mark.post
@needs_trl
def test_two_processes_write_metrics_once(workspace):
    # Without PICTURES: no curve is drawn.
    run_script("post_train.py", *POST_TRAIN, processes=2)

    assert metric_steps(OUTPUT) == [0, 1, 2]


@pytest.mark.post
@needs_trl
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--rewards", "addition"), ("--rewards", "did you mean --reward?")),
        (("--num_generations", "7"), ("TRL rejects these settings (",)),
        (
            ("--resume_from_checkpoint", "runs/addition"),
            ("resume_from_checkpoint = runs/addition", "contains no checkpoint"),
        ),
        (
            ("--output_dir", "data/addition.txt"),
            ("output_dir = data/addition.txt", "is not a folder"),
        ),
    ],
)
def test_invalid_flag_is_rejected_before_run(flags, words, workspace):
    result = post_train(*flags, expect=2)

    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in (workspace / "runs").iterdir()] == ["addition"]


@pytest.mark.post
@needs_trl
def test_error_of_first_update_is_reported(workspace):
    result = post_train("--loss_type", "x", expect=2)

    assert "TRL rejects these settings (ValueError" in result.stderr
    assert "Unknown loss type: x" in result.stderr


# TRL's command line.


@pytest.mark.post
@needs_trl
def test_trl_trains_chat_and_reward_models(chat_folder):
    """Fine-tune a chat model, continue it with DPO, train a judge, and train with its rewards."""
    sft_flags = (
        *("--model_name_or_path", "base"),
        *("--dataset_name", "chats"),
        *("--output_dir", "runs/chat"),
        *("--max_length", "64"),
        *("--max_steps", "60"),
        *("--per_device_train_batch_size", "16"),
        *("--learning_rate", "1e-2"),
        *("--disable_tqdm", "true"),
    )
    pair_flags = (
        *("--model_name_or_path", "runs/chat"),
        *("--dataset_name", "pairs"),
        *("--max_length", "64"),
        *("--max_steps", "3"),
        *("--gradient_accumulation_steps", "1"),
        *("--logging_steps", "1"),
    )
    judged_flags = (
        *("--model", "base"),
        *("--reward", "runs/judge"),
        *("--prompts", "asked.jsonl"),
        *("--held_out", "asked.jsonl"),
        *("--output_dir", "runs/judged"),
        *("--max_completion_length", "8"),
    )

    trl("sft", "--config", str(POST_RECIPES / "sft_own_text.yaml"), *sft_flags)
    generate = [sys.executable, ROOT / "generate.py", "--model", "runs/chat", "--chat"]
    generated = subprocess.run(
        [*generate, "--temperature", "0"],
        input="say dog\nsay sea\n",
        capture_output=True,
        text=True,
    )
    assert generated.stdout.split() == ["dog.", "sea."]
    generator = pipeline("text-generation", "runs/chat")
    answers = generator(CHATS[2][:1], max_new_tokens=20, do_sample=False)
    assert answers[0]["generated_text"][-1] == {"role": "assistant", "content": "sun."}

    dpo_config = str(POST_RECIPES / "dpo.yaml")
    dpo_output = trl("dpo", "--config", dpo_config, *pair_flags, "--output_dir", "runs/dpo")
    assert "rewards/margins" in dpo_output
    assert Path("runs/dpo/model.safetensors").is_file()

    judge_config = str(POST_RECIPES / "reward_model.yaml")
    judge_flags = (*pair_flags, "--output_dir", "runs/judge")
    judge_output = trl("reward", "--config", judge_config, *judge_flags)
    assert "accuracy" in judge_output

    write_rows(Path("asked.jsonl"), [{"prompt": messages[:1]} for messages in CHATS])
    post_train(*judged_flags)
    rows = read_metrics(Path("runs/judged/metrics.jsonl"))
    assert rows[0]["eval/reward"] != 0
    assert rows[1]["train/reward"] != 0


def documented_commands() -> list[list[str]]:
    """Return the words of all commands of TRL and post_train.py in the documentation."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *POST_RECIPES.glob("*.yaml"),
    ]
    variable = rf"(?:{cudnn.DEPRIORITIZED_VARIABLE}=1 )?"
    pattern = rf"^(?:    |# ){variable}(trl .*|.*python post_train.py .*)$"
    words = []
    for page in pages:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(pattern, text, re.MULTILINE):
            command, _, _ = line.partition(", after")
            # Trainer checks whether the machine supports bf16.
            command = command.replace(" --bf16 true", "")
            words.append(shlex.split(command, comments=True))
    return words


@pytest.mark.post
@needs_trl
def test_documented_commands_are_accepted(monkeypatch):
    from accelerate.commands.launch import launch_command_parser
    from trl.scripts import dpo, reward, sft

    scripts = {"sft": sft, "dpo": dpo, "reward": reward}
    monkeypatch.chdir(ROOT)

    commands = documented_commands()

    assert len(commands) >= 6
    for words in commands:
        config_index = words.index("--config")
        if words[0] != "trl":
            post_train_script.parse(words[config_index:])
            continue
        parser = scripts[words[1]].make_parser(prog="trl")
        *_, unknown = parser.parse_args_and_config(words[2:], return_remaining_strings=True)
        # TRL's name for --config_file of Accelerate.
        if "--accelerate_config" in unknown:
            unknown[unknown.index("--accelerate_config")] = "--config_file"
        # The parser exits if it does not know a word.
        launch_command_parser().parse_args([*unknown, "sft.py"])
        config = yaml.safe_load(Path(words[config_index + 1]).read_text())
        assert config["env"]["HF_HUB_DISABLE_TELEMETRY"] == "1"


@pytest.mark.post
@needs_trl
@pytest.mark.parametrize("is_enabled", [False, True], ids=["default", "enabled"])
def test_trl_telemetry_is_disabled_by_default(is_enabled, workspace):
    environment = dict(os.environ)
    for name in ("CI", "HF_HUB_DISABLE_TELEMETRY"):
        environment.pop(name, None)
    if is_enabled:
        environment["HF_HUB_DISABLE_TELEMETRY"] = "0"
    command = [sys.executable, ROOT / "post_train.py", *POST_TRAIN]

    with DataServer(workspace) as server:
        environment["HF_ENDPOINT"] = server.url
        environment["HF_HUB_OFFLINE"] = "0"
        environment["HF_HUB_DISABLE_XET"] = "1"
        result = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
    is_reported = any("telemetry" in line for line in server.log)
    assert is_reported == is_enabled, server.log
