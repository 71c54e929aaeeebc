"""The number of steps of num_train_epochs before a run: counted, estimated or not known."""

import json
from pathlib import Path

import pytest
from conftest import RECIPE

import check_setup
from ursa_minor.base.errors import BadInput
from ursa_minor.preflight import budget, data_check, data_size
from ursa_minor.recipe import loading


def load(data_files: str | None = "text.txt", **flags: str):
    """Load a recipe of 2 epochs in the current folder."""
    text = RECIPE.replace("max_steps: 12", "num_train_epochs: 2")
    if data_files:
        text += f"data_files: [{data_files}]\n"
    Path("epochs.yaml").write_text(text)
    return loading.load_recipe(Path("epochs.yaml"), flags)


def test_windows_of_prepared_folder_are_counted(workspace):
    completed, note = data_size.complete_recipe(load())

    assert completed.schedule.max_steps == 141  # 2 * 562 / 8
    assert "prepared" in note


def test_windows_of_text_are_estimated_from_its_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a" * 16_000)

    completed, note = data_size.complete_recipe(load())

    # 0.9 * 16,000 characters are left for training.
    assert completed.schedule.max_steps == pytest.approx(2 * 900 / 8, rel=0.01)
    assert "size of the files" in note


@pytest.mark.parametrize("data_files", [None, "missing.txt"])
def test_unknown_size_needs_number_of_steps(tmp_path, monkeypatch, data_files):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(BadInput) as caught:
        data_size.complete_recipe(load(data_files))

    (message,) = caught.value.lines
    assert "num_train_epochs = 2" in message
    assert "--max_steps N" in message


def test_recipe_in_steps_is_unchanged(workspace):
    recipe = load(max_steps="5")

    assert data_size.complete_recipe(recipe) == (recipe, "")


def test_plan_replaces_epochs_by_steps(workspace):
    plan = budget.plan(load(), budget.gpus.find("t4"), 1, 1.0, 0)

    assert plan["changes"]["max_steps"] == plan["updates"]


def test_estimate_states_steps_and_their_basis(workspace, capsys):
    load()

    check_setup.main(["--recipe", "epochs.yaml", "--estimate", "--card", "t4"])

    output = capsys.readouterr().out
    assert "num_train_epochs = 2 is 141 steps" in output
    assert "prepared" in output
    assert "--max_steps" not in output


def test_estimate_replaces_epochs_by_stated_steps(workspace, capsys):
    load()

    check_setup.main(["--recipe", "epochs.yaml", "--card", "t4", "--max_steps", "7"])

    output = capsys.readouterr().out
    assert "num_train_epochs" not in output
    assert "--max_steps 7" in output


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_data_report_replaces_estimate_from_files(tmp_path, monkeypatch, suffix):
    monkeypatch.chdir(tmp_path)
    rows = [" ".join(map(str, range(n, n + 400, 7))) for n in range(100)]
    if suffix == "jsonl":
        rows = [json.dumps({"text": row}) for row in rows]
    Path(f"text.{suffix}").write_text("\n".join(rows))
    flags = {"tokenizer": "bpe", "tokenizer_vocab_size": "400"}
    if suffix == "jsonl":
        flags["validation_tokens"] = "100"
    recipe = load(f"text.{suffix}", **flags)
    (source,) = recipe.data.resolved_sources
    report = data_check.look(source, loads_from_hub=False).report

    completed, note = data_size.complete_recipe(recipe, [report])

    train_tokens = report.cost.tokens - 100 if suffix == "jsonl" else 0.9 * report.cost.tokens
    assert completed.schedule.max_steps == pytest.approx(2 * train_tokens / 16 / 8, abs=1)
    assert "data report" in note
