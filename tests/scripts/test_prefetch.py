"""prepare_data.py --prefetch fetches all that a recipe needs: a machine without a network trains from it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import task_rows
from conftest import RECIPE, ROOT, TEXT
from http_server import DataServer
from transformers import GPT2Config, GPT2LMHeadModel

import prepare_data
from ursa_minor.base.run_files import read_metrics
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import task_data
from ursa_minor.model import pretrained
from ursa_minor.recipe import keys, loading

FLAGS = (
    "--recipe",
    "hub.yaml",
    "--prepared_data_dir",
    "prepared",
    "--eval_steps",
    "0",
    "--sample_steps",
    "0",
)


def called(script: str, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a script as a user does."""
    command = [sys.executable, str(ROOT / script), *FLAGS, *flags]
    environment = {
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": "home",
    } | environment
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A Hub with a data set, a model with its tokenizer, and a task; a recipe that needs all three."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "served"
    task_rows.write_datasets(folder)
    (folder / "datasets" / "me" / "corpus").mkdir(parents=True)
    pq.write_table(
        pa.table({"text": [TEXT[i : i + 500] for i in range(0, 6000, 500)]}),
        folder / "datasets/me/corpus/a.parquet",
    )
    tokenizer = tokenization.train_bpe([TEXT], 300, "gpt2")
    model = folder / "models" / "me" / "model"
    tokenizer.save_pretrained(model)
    ids = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=300, n_positions=512, **ids)
    ).save_pretrained(model)
    shape = (
        "n_layer",
        "n_head",
        "n_embd",
        "vocab_size",
        "sequence_length",
        "tokenizer",
        "validation_fraction",
    )
    kept = [line for line in RECIPE.splitlines() if not line.startswith(shape)]
    own = [
        "dataset_name: me/corpus",
        "validation_tokens: 500",
        "init_from: me/model",
        "tokenizer: me/model",
    ]
    own += [
        "sequence_length: 128",
        "tasks: [lambada_openai]",
        "task_steps: 12",
        "task_limit: 3",
        "max_steps: 4",
    ]
    kept = [line for line in kept if not line.startswith(("max_steps", "tokens_per_step"))] + [
        "tokens_per_step: 512"
    ]
    Path("hub.yaml").write_text("\n".join([*kept, *own]) + "\n")
    with DataServer(folder) as server:
        server.keeps_commits = True
        yield server


@pytest.mark.slow
def test_a_machine_without_a_network_trains_from_what_was_prefetched(served):
    there = {"HF_ENDPOINT": served.url, "HF_HUB_OFFLINE": "0"}
    task = Path("served/datasets/EleutherAI")
    task.rename("away")
    done = called("prepare_data.py", "--prefetch", **there)
    assert (
        done.returncode == 2
        and "lambada_openai (EleutherAI/lambada_openai on the Hub) cannot" in done.stderr
    )
    assert not Path("prepared").exists()
    Path("away").rename(task)
    done = called("prepare_data.py", "--prefetch", **there)
    assert done.returncode == 0, done.stderr
    *_, carried, _, last = done.stdout.splitlines()
    assert carried.startswith("Copy this folder") and "home" in carried and "prepared" in carried
    assert last.startswith("HF_HUB_OFFLINE=1 HF_HOME=") and "--prefetch" not in last
    asked = len(served.log)
    shutil.copytree("home", "elsewhere")
    shutil.rmtree("home")
    done = called("train.py", HF_HUB_OFFLINE="1", HF_HOME="elsewhere", HF_ENDPOINT=served.url)
    assert done.returncode == 0, done.stderr
    found = read_metrics(Path("runs/hub/metrics.jsonl"))
    assert len([row for row in found if "train/loss" in row]) == 4 and any(
        "lambada_openai/acc" in row for row in found
    )
    assert len(served.log) == asked


def test_what_a_recipe_asks_the_hub_for_beside_its_data_is_prefetched_and_nothing_else(monkeypatch):
    asked = []
    for module, name in ((pretrained, "load"), (tokenization, "load"), (task_data, "fetch")):
        monkeypatch.setattr(
            module, name, lambda what, *_: asked.append(getattr(what, "name", what))
        )
    recipe = loading.load_recipe(ROOT / "recipes" / "gpt2_124m.yaml")
    prepare_data.prefetch(recipe)
    assert asked == ["openai-community/gpt2", "hellaswag", "lambada_openai"]
    asked.clear()
    prepare_data.prefetch(
        keys.replace(recipe, task_files=["hellaswag=h.jsonl"], init_from="me/gpt2", tokenizer="bpe")
    )
    assert asked == ["me/gpt2", "lambada_openai"]
    asked.clear()
    prepare_data.prefetch(loading.load_recipe(ROOT / "recipes" / "quickstart.yaml"))
    assert not asked
    assert (
        prepare_data.main(
            ["--recipe", str(ROOT / "recipes" / "quickstart.yaml"), "--tasks", "piqa", "--prefetch"]
        )
        == 2
    )
    assert not asked  # what train.py refuses, too
