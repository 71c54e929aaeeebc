"""The set-up of a run: the examples on which it is scored, and the kept checkpoints."""

import json
from types import SimpleNamespace

import pytest
from conftest import ROOT

from ursa_minor.base.run_files import KEPT, MANIFEST, step_name
from ursa_minor.checkpoint.state import RunState
from ursa_minor.evaluation.task_data import all_tasks
from ursa_minor.recipe import loading
from ursa_minor.run import setup

PIQA = all_tasks()["piqa"]
RECIPE = SimpleNamespace(evaluation=None, model=SimpleNamespace(sequence_length=8))
CORPUS = SimpleNamespace(tokenizer=None)


@pytest.fixture
def read_commits(monkeypatch) -> list[dict]:
    """Replace the functions that read examples. Return a list of the commits that are read."""
    commits_read = []

    def read_items(evaluation, accelerator, commits):
        commits_read.append(dict(commits))
        return commits

    def encode_items(items, tokenizer, sequence_length):
        return {PIQA: SimpleNamespace(commit=items["piqa"])}

    monkeypatch.setattr(setup, "read_items", read_items)
    monkeypatch.setattr(setup, "encode_items", encode_items)
    return commits_read


@pytest.mark.parametrize(
    ("saved_commits", "expected_reads", "expected_commit"),
    [
        ({"piqa": "saved"}, [{"piqa": "saved"}], "saved"),
        ({"piqa": "newest"}, [], "newest"),
        ({}, [], "newest"),
    ],
    ids=["other commit", "same commit", "not scored yet"],
)
def test_resumed_run_keeps_its_examples(
    read_commits, saved_commits, expected_reads, expected_commit
):
    state = SimpleNamespace(tasks=dict(saved_commits))
    newest = {PIQA: SimpleNamespace(commit="newest")}

    tests = setup.tests_of_run(RECIPE, newest, state, CORPUS, accelerator=None)

    assert read_commits == expected_reads
    assert tests[PIQA].commit == expected_commit
    assert state.tasks == {"piqa": expected_commit}


def kept_lines(step: int = 0, **flags) -> list[str]:
    """Return the header's lines on the kept checkpoints of gpt2_124m (524,288 tokens per step).

    Args:
        step: the step at which the run of 10,000 steps continues.
    """
    recipe = loading.load_recipe(ROOT / "recipes" / "gpt2_124m.yaml", flags)
    return list(setup.kept_checkpoints(recipe, RunState(10_000, 0, step=step)))


def test_header_states_disk_use_of_kept_checkpoints():
    (line,) = kept_lines(keep_checkpoints=["0", "1B"], keep_optimizer="false")

    assert "2 checkpoints" in line
    assert "weights only" in line
    assert "996 MB" in line
    assert kept_lines() == []


@pytest.mark.parametrize(
    ("step", "existing", "expected"),
    [
        (9000, {}, "1 checkpoint kept by keep_checkpoints (complete): 1.49 GB"),
        (10_000, {}, "1 checkpoint kept by keep_checkpoints (complete): 1.49 GB"),
        (9000, {4: "weights"}, "2 checkpoints kept by keep_checkpoints (1 with weights only)"),
        (4096, {1: "complete", 7: None}, "4 checkpoints kept by keep_checkpoints (complete)"),
        (8193, {8192: "complete"}, "2 checkpoints kept by keep_checkpoints (complete): 2.99 GB"),
    ],
)
def test_header_counts_existing_and_later_kept_checkpoints(tmp_path, step, existing, expected):
    for existing_step, contents in existing.items():
        path = tmp_path / "checkpoints" / step_name(existing_step)
        path.mkdir(parents=True)
        (path / MANIFEST).write_text(json.dumps({"step": existing_step, KEPT: contents}))

    (line,) = kept_lines(step, keep_checkpoints=["log2"], output_dir=str(tmp_path))

    assert expected in line


def test_header_notes_kept_checkpoints_after_the_end():
    points = ["10000", "10001", "5.24B", "5.25B"]

    _, note = kept_lines(keep_checkpoints=points)

    assert "keep_checkpoints = 10001 5.25B is not reached" in note


def test_header_notes_complete_checkpoints_of_consumed_data():
    flags = {"keep_checkpoints": ["log2"], "stream_keep": "consumed"}

    _, note = kept_lines(**flags)

    assert "--keep_optimizer false" in note
    assert len(kept_lines(**flags, keep_optimizer="false")) == 1
