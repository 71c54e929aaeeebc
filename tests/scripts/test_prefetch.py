"""prepare_data.py --prefetch downloads all that a recipe needs for training without a network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import task_rows
import yaml
from conftest import RECIPE, ROOT, TEXT
from http_server import DataServer
from transformers import GPT2Config, GPT2LMHeadModel

import prepare_data
from ursa_minor.base.run_files import read_metrics
from ursa_minor.data.tokens import pretrained_tokenizer
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import task_data
from ursa_minor.model import pretrained
from ursa_minor.recipe import keys, loading

MODEL_KEYS = ("n_layer", "n_head", "n_embd", "vocab_size", "validation_fraction")
HUB_KEYS = {
    "dataset_name": "me/corpus",
    "validation_tokens": 500,
    "init_from": "me/model",
    "tokenizer": "me/model",
    "sequence_length": 128,
    "tokens_per_step": 512,
    "tasks": ["lambada_openai"],
    "task_steps": 12,
    "task_limit": 3,
    "max_steps": 4,
}


def run_process(script: str, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a script on hub.yaml in a new process with its own Hugging Face cache."""
    recipe = ("--recipe", "hub.yaml", "--prepared_data_dir", "prepared")
    no_evals = ("--eval_steps", "0", "--sample_steps", "0")
    command = [sys.executable, str(ROOT / script), *recipe, *no_evals, *flags]
    defaults = {"ACCELERATE_USE_CPU": "true", "HF_HUB_DISABLE_XET": "1", "HF_HOME": "home"}
    environment = os.environ | defaults | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def write_dataset(folder: Path) -> None:
    """Write a data set of 12 documents."""
    folder.mkdir(parents=True)
    documents = [TEXT[start : start + 500] for start in range(0, 6000, 500)]
    pq.write_table(pa.table({"text": documents}), folder / "a.parquet")


def save_model(folder: Path) -> None:
    """Save a small GPT-2 model with its tokenizer."""
    tokenizer = tokenization.train_bpe([TEXT], 300, "gpt2")
    tokenizer.save_pretrained(folder)
    config = GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=16,
        vocab_size=300,
        n_positions=512,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with a data set, a model and a task, and the recipe hub.yaml, which needs all three."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "served"
    task_rows.write_datasets(folder)
    write_dataset(folder / "datasets/me/corpus")
    save_model(folder / "models/me/model")
    recipe = yaml.safe_load(RECIPE)
    for key in MODEL_KEYS:
        del recipe[key]
    Path("hub.yaml").write_text(yaml.safe_dump(recipe | HUB_KEYS))
    with DataServer(folder) as server:
        server.keeps_commits = True
        yield server


@pytest.mark.slow
def test_prefetched_run_needs_no_network(hub):
    online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    result = run_process("prepare_data.py", "--prefetch", **online)
    assert result.returncode == 0, result.stderr
    *_, copied_folders, _, command = result.stdout.splitlines()
    assert copied_folders.startswith("Copy this folder")
    assert "home" in copied_folders
    assert "prepared" in copied_folders
    assert command.startswith("HF_HUB_OFFLINE=1 HF_HOME=")
    assert "--prefetch" not in command
    requests = len(hub.log)

    # The cache may be moved to another folder.
    shutil.move("home", "moved")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": "moved", "HF_ENDPOINT": hub.url}
    result = run_process("train.py", **offline)

    assert result.returncode == 0, result.stderr
    rows = read_metrics(Path("runs/hub/metrics.jsonl"))
    assert len([row for row in rows if "train/loss" in row]) == 4
    assert any("lambada_openai/acc" in row for row in rows)
    assert len(hub.log) == requests


@pytest.mark.slow
def test_missing_task_is_reported_before_preparing(hub):
    shutil.rmtree("served/datasets/EleutherAI")

    result = run_process("prepare_data.py", "--prefetch", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0")

    assert result.returncode == 2
    assert "lambada_openai (EleutherAI/lambada_openai on the Hub) cannot" in result.stderr
    assert not Path("prepared").exists()


@pytest.fixture
def requests(monkeypatch) -> list[str]:
    """The names of the models, tokenizers and tasks that are requested, without downloads."""
    names = []

    def record(source, *_) -> None:
        names.append(getattr(source, "name", source))

    monkeypatch.setattr(pretrained, "load", record)
    monkeypatch.setattr(pretrained_tokenizer, "load", record)
    monkeypatch.setattr(task_data, "fetch", record)
    return names


def test_tokenizer_and_tasks_are_prefetched(requests):
    prepare_data.prefetch(loading.load_recipe(ROOT / "recipes" / "gpt2_124m.yaml"))

    assert requests == ["openai-community/gpt2", "hellaswag", "lambada_openai"]


def test_local_files_are_not_prefetched(requests):
    recipe = loading.load_recipe(ROOT / "recipes" / "gpt2_124m.yaml")
    changes = {"task_files": ["hellaswag=h.jsonl"], "init_from": "me/gpt2", "tokenizer": "bpe"}

    prepare_data.prefetch(keys.replace(recipe, **changes))

    assert requests == ["me/gpt2", "lambada_openai"]


def test_recipe_without_hub_sources_prefetches_nothing(requests):
    prepare_data.prefetch(loading.load_recipe(ROOT / "recipes" / "quickstart.yaml"))

    assert not requests


def test_rejected_recipe_prefetches_nothing(requests):
    recipe = str(ROOT / "recipes" / "quickstart.yaml")

    status = prepare_data.main(["--recipe", recipe, "--tasks", "piqa", "--prefetch"])

    assert status == 2
    assert not requests


def test_offline_command_states_unknown_length(capsys):
    flags = ["--recipe", "recipes/own_text.yaml", "--dataset_name", "me/corpus"]
    options = {"dataset_name": "me/corpus"}
    recipe = loading.load_recipe(ROOT / flags[1], options, needs_length=False)

    prepare_data.print_offline_instructions(recipe, flags, has_fetched=False)

    assert capsys.readouterr().out.endswith("--dataset_name me/corpus --max_steps N\n")
