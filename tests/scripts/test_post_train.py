"""post_train.py and TRL's own command line with our files, as a user calls them."""

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
from conftest import ROOT, needs_trl, run_script
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

POST = ROOT / "recipes" / "post"
POST_PAGE = ROOT / "docs" / "post_training.md"
TRL = Path(sys.executable).with_name("trl")
QUICK = (
    "--max_steps",
    "2",
    "--per_device_train_batch_size",
    "16",
    "--logging_steps",
    "1",
    "--held_out_steps",
    "2",
)
CHATS = [
    [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": f"{word}."}]
    for word in ("cat", "dog", "sun", "sea", "ice", "hat")
]


def post_train(*flags: str, expect: int = 0, **environment: str):
    config = ("--config", str(POST / "addition.yaml"))
    return run_script(
        "post_train.py", *config, *QUICK, *flags, expect=expect, PICTURES="1", **environment
    )


def trl(*words: str, expect: int = 0, **environment: str):
    done = subprocess.run(
        [TRL, *words], capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def make_problems(folder: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "addition.py"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with the generated problems and runs/addition, trained for seconds."""
    folder = tmp_path_factory.mktemp("base")
    make_problems(folder)
    held_out = folder / "data" / "addition_held_out.jsonl"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:40]))
    shape = (
        "--n_layer",
        "1",
        "--n_embd",
        "32",
        "--tokens_per_step",
        "512",
        "--per_device_train_batch_size",
        "8",
    )
    with contextlib.chdir(folder):
        run_script(
            "train.py",
            "--recipe",
            str(ROOT / "recipes" / "addition.yaml"),
            *shape,
            "--max_steps",
            "3",
        )
    return folder


@pytest.fixture
def place(base, tmp_path, monkeypatch) -> Path:
    if importlib.util.find_spec("trl"):
        import trl  # noqa: F401  (here once: each run below is a fork of this process)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("data", "runs/addition"):
        (tmp_path / name).symlink_to(base / name)
    return tmp_path


@pytest.fixture
def chatty(tmp_path, monkeypatch) -> Path:
    """A folder with a small chat model, and chats and pairs of answers as rows."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenization.make_characters(["abcdefghijklmnopqrstuvwxyz .\n"])
    model = build_small_model(sequence_length=64, n_embd=64)
    chat.add_chat(model, tokenizer)
    stock_export.write(model, tmp_path / "base", tokenizer)
    for split in ("train", "test"):
        (tmp_path / "chats").mkdir(exist_ok=True)
        (tmp_path / "pairs").mkdir(exist_ok=True)
        rows = [{"messages": said, "source": "made up"} for said in CHATS] * 8
        (tmp_path / "chats" / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
        rows = [
            {"chosen": said, "rejected": [said[0], {"role": "assistant", "content": "no"}]}
            for said in CHATS
        ]
        (tmp_path / "pairs" / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return tmp_path


def test_without_trl_the_command_to_install_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(
        BadInput, match="TRL cannot be imported .*: pip install -r requirements/post.txt"
    ):
        post_train_script.parse([])


def test_the_generated_problems_that_are_held_out_stand_in_no_order_in_text_or_prompts(tmp_path):
    make_problems(tmp_path)

    def pairs(lines):
        return {tuple(sorted(map(int, line.split("=")[0].split("+")))) for line in lines}

    text = (tmp_path / "data/addition.txt").read_text().splitlines()
    files = (tmp_path / f"data/addition_{name}.jsonl" for name in ("prompts", "held_out"))
    learnt, held_out = (pairs(json.loads(line)["prompt"] for line in file.open()) for file in files)
    assert pairs(text) == learnt and not learnt & held_out and len(learnt | held_out) == 5050
    assert all(
        int(line.split("=")[1]) == sum(map(int, line.split("=")[0].split("+"))) for line in text
    )


def test_stated_choice_about_cudnn_attention_is_kept(monkeypatch):
    seen = []

    def parse(argv):
        seen.append(os.environ[cudnn.DEPRIORITIZED_VARIABLE])
        raise BadInput("stop here")

    monkeypatch.setattr(post_train_script, "parse", parse)
    monkeypatch.setenv(cudnn.DEPRIORITIZED_VARIABLE, "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # main would set it for the whole process
    assert post_train_script.main([]) == 2
    assert seen == ["0"]


def test_cudnn_attention_is_avoided_before_torch_is_imported():
    program = (
        "import os, sys; sys.modules['torch'] = None; import post_train; post_train.main([]); "
    )
    program += f"print(os.environ['{cudnn.DEPRIORITIZED_VARIABLE}'])"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "1\n" and "TRL cannot be imported" in done.stderr, done.stderr


def test_trls_files_and_commands_avoid_cudnn_attention():
    for path in POST.glob("*.yaml"):
        settings = yaml.safe_load(path.read_text())
        assert "model" in settings or settings["env"][cudnn.DEPRIORITIZED_VARIABLE] == "1", path
    commands = re.findall(
        r"^    (.*\btrl (?:sft|dpo|reward) .*)$", POST_PAGE.read_text(), re.MULTILINE
    )
    assert len(commands) >= 5 and all(
        line.startswith(f"{cudnn.DEPRIORITIZED_VARIABLE}=1 trl ") for line in commands
    )


def test_the_pages_program_counts_rows_that_trl_drops_and_cuts(chatty, monkeypatch, capsys):
    page = POST_PAGE.read_text()
    program = textwrap.dedent(re.search(r"<<'END'\n(.*?)\n    END\n", page, re.DOTALL)[1])
    lengths = (
        [(5, 5)] * 3 + [(5, 100)] * 4 + [(100, 5)] * 2
    )  # letters of the question and of the answer
    rows = [
        [{"role": "user", "content": "a" * asked}, {"role": "assistant", "content": "b" * answered}]
        for asked, answered in lengths
    ]
    Path("rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["-", "base", "rows.jsonl", "64"])
    exec(program, {})
    assert capsys.readouterr().out == "9 rows: 2 will be dropped, 4 will be cut\n"


@pytest.mark.post
@needs_trl
def test_trl_drops_and_cuts_the_rows_that_the_page_says(chatty):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    def row(asked, answered):
        messages = [
            {"role": "user", "content": "a" * asked},
            {"role": "assistant", "content": "b" * answered},
        ]
        return {"messages": messages}

    rows = [row(5, 5)] * 3 + [row(5, 100)] * 4 + [row(100, 5)] * 2
    settings = SFTConfig(
        output_dir="out",
        max_length=64,
        assistant_only_loss=True,
        bf16=False,
        report_to="none",
        use_cpu=True,
    )
    model, tokenizer = (
        kind.from_pretrained("base") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    assert sorted(len(ids) for ids in trainer.train_dataset["input_ids"])[3:] == [64] * 4


@pytest.mark.post
@needs_trl
def test_prompts_that_do_not_fit_are_dropped_and_too_few_are_an_error(place):
    rows = Path("data/addition_prompts.jsonl").read_text().splitlines()[:32]
    long = json.dumps({"prompt": "1" * 60 + "+1="})
    Path("mixed.jsonl").write_text("\n".join([*rows, long, long]) + "\n")
    done = post_train("--prompts", "mixed.jsonl")
    assert "prompts = mixed.jsonl: 2 of 34 prompts are too long and are not used" in done.stderr
    Path("long.jsonl").write_text("\n".join([rows[0], long]) + "\n")
    done = post_train("--prompts", "long.jsonl", "--output_dir", "runs/none", expect=2)
    assert "a batch needs 2 prompts" in done.stderr and "only 1 are usable" in done.stderr
    assert not Path("runs/none").exists()


@pytest.mark.post
@needs_trl
def test_a_base_model_is_improved_scored_and_written_as_a_stock_model_and_goes_on_from_trls_checkpoint(
    place,
):
    Path("mine.py").write_text(
        "def digits(prompt, completion):\n    return sum(map(str.isdigit, completion)) / 5\n"
    )
    mine = ("--reward", "mine.py:digits", "--save_strategy", "steps", "--save_steps", "2")
    done = post_train(*mine)
    out = place / "runs/addition-grpo"
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "eval/reward" in rows[0] and "eval/reward" in rows[2] and "train/reward" in rows[1]
    assert "40 held-out prompts: " in done.stderr and (out / "reward.png").stat().st_size > 10_000
    before, after = (
        AutoModelForCausalLM.from_pretrained(path)
        for path in ("runs/addition/model", out / "model")
    )
    assert before.config.to_dict().keys() == after.config.to_dict().keys()
    changed = [
        name
        for name, value in before.state_dict().items()
        if not torch.equal(value, after.state_dict()[name])
    ]
    assert "transformer.wte.weight" in changed
    again = post_train(*mine, expect=2)
    assert "output_dir = runs/addition-grpo: the folder contains a model already" in again.stderr
    (out / "model").rename(place / "first")
    post_train(
        *mine, "--max_steps", "4", "--resume_from_checkpoint", "runs/addition-grpo/checkpoint-2"
    )
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == [0, 1, 2, 3, 4]


@pytest.mark.post
@needs_trl
def test_two_processes_share_the_completions_and_one_writes(place):
    config = ("--config", str(POST / "addition.yaml"), *QUICK)
    run_script("post_train.py", *config, processes=2)
    assert [row["step"] for row in read_metrics(place / "runs/addition-grpo/metrics.jsonl")] == [
        0,
        1,
        2,
    ]


@pytest.mark.post
@needs_trl
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--rewards", "addition"), "--rewards: no such flag; did you mean --reward?"),
        (("--num_generations", "7"), "TRL rejects these settings ("),
        (
            ("--resume_from_checkpoint", "runs/addition"),
            "resume_from_checkpoint = runs/addition: the folder contains no checkpoint",
        ),
        (
            ("--output_dir", "data/addition.txt"),
            "output_dir = data/addition.txt: data/addition.txt is not a folder",
        ),
    ],
)
def test_bad_input_is_answered_with_key_value_and_rule_and_nothing_is_made(flags, words, place):
    done = post_train(*flags, expect=2)
    assert words in done.stderr and "Traceback" not in done.stderr
    assert sorted(path.name for path in (place / "runs").iterdir()) == ["addition"]


@pytest.mark.post
@needs_trl
def test_what_trl_refuses_at_its_first_update_is_a_line_too(place):
    done = post_train("--loss_type", "x", expect=2)
    assert "TRL rejects these settings (ValueError: Unknown loss type: x" in done.stderr


@pytest.mark.post
@needs_trl
def test_sft_by_trls_command_line_makes_a_model_that_answers_and_stops(chatty):
    quick = ("--model_name_or_path", "base", "--dataset_name", "chats", "--output_dir", "runs/chat")
    quick += ("--max_length", "64", "--max_steps", "60", "--per_device_train_batch_size", "16")
    quick += ("--learning_rate", "1e-2", "--disable_tqdm", "true")
    trl("sft", "--config", str(POST / "sft_own_text.yaml"), *quick)
    words = [
        sys.executable,
        ROOT / "generate.py",
        "--model",
        "runs/chat",
        "--chat",
        "--temperature",
        "0",
    ]
    out = subprocess.run(words, input="say dog\nsay sea\n", capture_output=True, text=True).stdout
    assert out.split() == ["dog.", "sea."]
    answer = pipeline("text-generation", "runs/chat")(
        CHATS[2][:1], max_new_tokens=20, do_sample=False
    )
    assert answer[0]["generated_text"][-1] == {"role": "assistant", "content": "sun."}
    quick = (
        "--model_name_or_path",
        "runs/chat",
        "--dataset_name",
        "pairs",
        "--output_dir",
        "runs/dpo",
    )
    quick += (
        "--max_length",
        "64",
        "--max_steps",
        "3",
        "--gradient_accumulation_steps",
        "1",
        "--logging_steps",
        "1",
    )
    done = trl("dpo", "--config", str(POST / "dpo.yaml"), *quick)
    assert "rewards/margins" in done.stdout and Path("runs/dpo/model.safetensors").is_file()
    quick = (*quick[:5], "runs/judge", *quick[6:])
    assert "accuracy" in trl("reward", "--config", str(POST / "reward_model.yaml"), *quick).stdout
    Path("asked.jsonl").write_text(
        "".join(json.dumps({"prompt": said[:1]}) + "\n" for said in CHATS)
    )
    quick = (*QUICK, "--output_dir", "runs/judged", "--max_completion_length", "8")
    post_train(
        *quick,
        "--model",
        "base",
        "--reward",
        "runs/judge",
        *("--prompts", "asked.jsonl", "--held_out", "asked.jsonl"),
    )
    rows = read_metrics(Path("runs/judged/metrics.jsonl"))
    assert rows[0]["eval/reward"] != 0 and rows[1]["train/reward"] != 0


@pytest.mark.post
@needs_trl
def test_the_pages_commands_are_understood_by_trl(monkeypatch):
    from accelerate.commands.launch import launch_command_parser
    from trl.scripts import dpo, reward, sft

    monkeypatch.chdir(ROOT)
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "recipes/post").glob("*.yaml"),
    ]
    pattern = (
        rf"^(?:    |# )(?:{cudnn.DEPRIORITIZED_VARIABLE}=1 )?(trl .*|.*python post_train.py .*)$"
    )
    found = [
        line
        for page in pages
        for line in re.findall(pattern, page.read_text().replace("\\\n", " "), re.M)
    ]
    assert len(found) >= 6
    for line in found:
        line = line.partition(", after")[0].replace(
            " --bf16 true", ""
        )  # Trainer asks the machine for it
        words = shlex.split(line, comments=True)
        if words[0] != "trl":
            post_train_script.parse(words[words.index("--config") :])
            continue
        parser = {"sft": sft, "dpo": dpo, "reward": reward}[words[1]].make_parser(prog="trl")
        *_, unknown = parser.parse_args_and_config(words[2:], return_remaining_strings=True)
        if "--accelerate_config" in unknown:  # TRL's own word for accelerate's --config_file
            unknown[unknown.index("--accelerate_config")] = "--config_file"
        launch_command_parser().parse_args(
            [*unknown, "sft.py"]
        )  # exits where it does not know a word
        config = yaml.safe_load(Path(words[words.index("--config") + 1]).read_text())
        assert config["env"]["HF_HUB_DISABLE_TELEMETRY"] == "1"


@pytest.mark.post
@needs_trl
@pytest.mark.parametrize("asked_for", [False, True])
def test_trl_reports_its_use_only_where_it_is_asked_to(asked_for, place):
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("CI", "HF_HUB_DISABLE_TELEMETRY")
    }
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "0"} if asked_for else {}
    words = [sys.executable, ROOT / "post_train.py", "--config", POST / "addition.yaml", *QUICK]
    with DataServer(place) as server:
        environment |= {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert any("telemetry" in line for line in server.log) == asked_for, server.log
