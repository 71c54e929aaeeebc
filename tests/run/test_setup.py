"""The set-up of a run: on which items it is scored."""

from types import SimpleNamespace

import pytest

from ursa_minor.evaluation.task_data import all_tasks
from ursa_minor.run import setup

PIQA = all_tasks()["piqa"]
RECIPE = SimpleNamespace(evaluation=None, model=SimpleNamespace(sequence_length=8))
CORPUS = SimpleNamespace(tokenizer=None)


@pytest.fixture
def reads(monkeypatch):
    """Replace the reading of items by a record of the commits at which they are read."""
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
        ({"piqa": "saved"}, [{"piqa": "saved"}], "saved"),  # a checkpoint names another commit
        ({"piqa": "newest"}, [], "newest"),
        ({}, [], "newest"),  # the run has not been scored
    ],
)
def test_resumed_run_is_scored_on_its_own_items(
    reads, saved_commits, expected_reads, expected_commit
):
    state = SimpleNamespace(tasks=dict(saved_commits))
    newest = {PIQA: SimpleNamespace(commit="newest")}

    tests = setup.tests_of_run(RECIPE, newest, state, CORPUS, accelerator=None)

    assert reads == expected_reads
    assert tests[PIQA].commit == expected_commit
    assert state.tasks == {"piqa": expected_commit}
