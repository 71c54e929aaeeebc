"""The set-up of a run: the examples on which it is scored."""

from types import SimpleNamespace

import pytest

from ursa_minor.evaluation.task_data import all_tasks
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
