"""The commands of recipes/README.md: the runs that need no recipe file of their own, and published settings."""

import json
import re
import shlex

import pytest
import yaml
from conftest import ROOT

import check_setup
from pretrain.recipe import keys, reading
from pretrain.recipe.plan import make_plan

README = (ROOT / "recipes/README.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", README, flags=re.MULTILINE)
COMMON = {
    "vocab_size": 50304,
    "min_lr_ratio": 0.1,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "optimizer": "adamw",
    "resid_pdrop": 0.0,
    "eval_tokens": 10485760,
    "sources": None,
    "data_files": None,
}
SMALL = {"n_layer": 8, "n_head": 8, "n_embd": 512, "learning_rate": 6e-4}
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "learning_rate": 6e-4}
MEDIUM = {"n_layer": 24, "n_head": 16, "n_embd": 1024, "learning_rate": 3e-4}
FINEWEB_EDU = {
    "dataset_name": "HuggingFaceFW/fineweb-edu",
    "dataset_config_name": "sample-10BT",
    "validation_tokens": 10485760,
    "data_dir": None,
}


def steps(sequence_length, tokens_per_step, max_steps, warmup_steps, limit_tokens):
    return {
        "sequence_length": sequence_length,
        "tokens_per_step": tokens_per_step,
        "max_steps": max_steps,
        "warmup_steps": warmup_steps,
        "limit_tokens": limit_tokens,
    }


READY_TOKENS = {
    "data_dir": "hf://datasets/kjj0/fineweb10B-gpt2",
    "dataset_name": None,
    "stream_keep": "consumed",
    "min_lr_ratio": 0.0,
    "save_steps": 5000,
}
C4 = {"dataset_name": "allenai/c4", "dataset_config_name": "en", "text_column": "text", "validation_tokens": 10485760}
# The values of the recipe files that these commands replaced.
VARIANTS = {
    "gpt2_small_256": SMALL | FINEWEB_EDU | steps(256, 131072, 7800, 390, 1100000000) | {"save_steps": 500},
    "gpt2_124m_256": GPT2 | FINEWEB_EDU | steps(256, 131072, 19000, 950, 2600000000),
    "gpt2_124m_768": GPT2 | FINEWEB_EDU | steps(768, 491520, 20345, 763, 0),
    "gpt2_124m_2048": GPT2 | FINEWEB_EDU | steps(2048, 524288, 19073, 715, 0),
    "gpt2_124m_c4": GPT2 | C4 | steps(1024, 524288, 19073, 715, 10100000000),
    "gpt2_124m_ready_tokens": GPT2 | steps(1024, 524288, 18865, 700, 0) | READY_TOKENS,
    "gpt2_350m_512": MEDIUM | FINEWEB_EDU | steps(512, 262144, 27100, 1000, 7300000000),
}


def commands_of(title):
    """Return the rows of a section's table that have a command: the cells, with the command as words."""
    (section,) = [section for section in SECTIONS if section.startswith(title)]
    rows = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        commands = [cell for cell in cells if cell.startswith("`")]
        if commands:
            rows.append((cells, shlex.split(commands[0].strip("`"))))
    return rows


def recipe_of(words):
    recipe, _, _ = reading.parse_training(words[words.index("train.py") + 1 :])
    return recipe


VARIANT_ROWS = {words[-1]: (cells, words) for cells, words in commands_of("Variants")}
PUBLISHED_ROWS = {words[-1]: (cells, words) for cells, words in commands_of("Published")}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_every_variant_has_a_command():
    assert set(VARIANT_ROWS) == set(VARIANTS)
    assert len(PUBLISHED_ROWS) == 9


@pytest.mark.parametrize("name", VARIANTS)
def test_command_has_the_values_of_the_variant(name):
    _, words = VARIANT_ROWS[name]
    assert words[:2] == ["python", "train.py"]
    found = keys.flat(recipe_of(words))
    wanted = COMMON | {"run_name": name, "save_steps": 1000} | VARIANTS[name]
    assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize("name", VARIANTS)
def test_hours_of_a_variant_are_the_estimates(name, tmp_path, capsys):
    cells, words = VARIANT_ROWS[name]
    path = tmp_path / "variant.yaml"
    path.write_text(keys.as_yaml(recipe_of(words)))
    estimate = ["--estimate", "--json", "--recipe", str(path), "--reader_tokens_per_second", "1e9"]
    for entry in cells[-1].split(", "):
        card, _, hours = entry.partition(": ")
        assert check_setup.main([*estimate, "--card", card]) == 0
        row = json.loads(capsys.readouterr().out)
        decimals = len(hours.partition(".")[2])
        assert f"{row['hours']:.{decimals}f}" == hours, card


@pytest.mark.parametrize("name", PUBLISHED_ROWS)
def test_published_micro_batch_is_used_exactly(name):
    cells, words = PUBLISHED_ROWS[name]
    recipe = recipe_of(words)
    processes = 1
    if "--config_file" in words:
        launch = yaml.safe_load((ROOT / words[words.index("--config_file") + 1]).read_text())
        processes = launch["num_processes"]
    plan = make_plan(recipe, processes)
    published = re.search(r"batch (\d+)(?: x (\d+))?", cells[1])
    assert plan.per_device_train_batch_size == int(published[1])
    if published[2]:
        assert plan.gradient_accumulation_steps == int(published[2])
    context = re.search(r"context ([\d,]+)", cells[1])
    assert recipe.model.sequence_length == int(context[1].replace(",", ""))
