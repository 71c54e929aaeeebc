"""The comparison of our models in other programs, and its table in docs/export.md."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from small_models import LLAMA, build_small_model, random_ids, randomize_weights
from transformers import AutoModelForCausalLM

from benchmarks.programs import __main__ as programs
from benchmarks.programs import comparison, environments, table, texts
from benchmarks.programs.comparison import Answer
from benchmarks.programs.definitions import KnownProblem, Program
from ursa_minor.base import files
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.export import stock as stock_export

PROGRAM = Program("A program", "1.0", ("a==1.0",), "reader.py", {"gpt2": "gpt2", "llama": "llama"})


def failing(comparisons) -> list[str]:
    """Return the names of the comparisons that differ by more than their limit."""
    return [one.compared for one in comparisons if not one.passes]


# The comparison


@pytest.fixture
def exported_llama(tmp_path):
    """Return the folder of an exported Llama type with rope_theta 500."""
    model = randomize_weights(build_small_model(**LLAMA))
    stock_export.write(model, tmp_path / "llama", tokenization.make_characters(["abc"]))
    return tmp_path / "llama"


@torch.inference_mode()
def answer_of(folder) -> Answer:
    """Return the logits of an exported model."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return Answer(logits=model(random_ids(2, 16)).logits.numpy())


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": None, "rope_theta": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}, "rope_theta": 1000.0},
        {"rms_norm_eps": 0.1},
    ],
    ids=["no rope_theta", "other rope_theta", "rms_norm_eps"],
)
def test_changed_key_of_export_fails(exported_llama, changes):
    reference = answer_of(exported_llama)
    unchanged = comparison.compare(answer_of(exported_llama), reference)
    config = files.read_json(exported_llama / "config.json") | changes
    kept = {key: value for key, value in config.items() if value is not None}
    files.write_json(exported_llama / "config.json", kept)

    changed = comparison.compare(answer_of(exported_llama), reference)

    assert failing(unchanged) == []
    assert failing(changed) == ["logits"]


LOGITS = np.zeros((2, 3, 5), np.float32)
LISTS = {"ids": [[1], [2]], "decoded": ["a", "b"]}


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        (Answer(LOGITS, values=LISTS), []),
        (Answer(LOGITS + 5e-5), []),
        (Answer(LOGITS + 2e-4), ["logits"]),
        (Answer(LOGITS * np.nan), ["logits"]),
        (Answer(LOGITS[:, :, :4]), ["logits"]),
        (Answer(log_probs=np.full((1, 5), np.log(1 / 5)), values={"log_probs_prompts": [1]}), []),
        (
            Answer(log_probs=np.full((1, 5), np.log(1 / 4)), values={"log_probs_prompts": [1]}),
            ["log_probs"],
        ),
        (Answer(values={"ids": [[1], [3]]}), ["ids"]),
        (Answer(values={"ids": [[1]]}), ["ids"]),
        (Answer(values={"decoded": ["a", "b", "c"]}), ["decoded"]),
        (Answer(values={"measured": {"merged": 1.0}}), ["merged"]),
    ],
)
def test_difference_above_limit_fails(answer, names):
    comparisons = comparison.compare(answer, Answer(LOGITS, values=LISTS))

    assert failing(comparisons) == names


def test_limit_of_a_program_is_used():
    comparisons = comparison.compare(Answer(LOGITS + 2e-4), Answer(LOGITS), {"logits": 1e-3})

    assert failing(comparisons) == []


def test_compared_texts_are_distinct():
    random_texts = texts.random_texts()

    assert len(random_texts) == 200
    assert len(set(random_texts)) > 190


def test_program_without_packages_is_not_run(tmp_path, monkeypatch):
    def fail(*_):
        raise environments.NotInstalled("No matching distribution found for a==1.0")

    monkeypatch.setattr(environments, "prepare", fail)

    row = programs.Comparer(tmp_path, tmp_path, {}).row(PROGRAM)

    assert row["status"] == "not run"
    assert "No matching distribution" in row["reason"]


# The table


def row_of(*differences: float, **result) -> dict:
    """Return a row of the JSON file with differences of the logits of GPT-2 and the Llama type."""
    results = {}
    for kind, difference in zip(("gpt2", "llama"), differences, strict=True):
        one = dataclasses.asdict(comparison.Comparison("logits", difference, 1e-4))
        ids = dataclasses.asdict(comparison.Comparison("ids", 0, 0, total=200))
        results[kind] = {"comparisons": [one, ids]} | result
    return {"status": "equal", "results": results}


def test_table_of_page_is_generated():
    rows = json.loads(table.RESULTS.read_text(encoding="utf-8"))["programs"]

    assert table.generated_part() == table.generate(rows)


def test_row_states_largest_differences():
    line = table.table_row(PROGRAM, row_of(2e-6, 3e-6))

    assert line.startswith("| A program 1.0 | logits: GPT-2 2.0e-06, Llama type 3.0e-06 | ")
    assert "400 token ids" in line
    assert "`a==1.0`" in line
    assert "**" not in line


def test_row_marks_difference_above_limit():
    line = table.table_row(PROGRAM, row_of(2e-6, 0.015))

    assert "GPT-2 2.0e-06, Llama type **1.5e-02**" in line


def test_row_marks_known_problem_that_did_not_occur():
    problem = KnownProblem("padded", "padding is rejected", "trim it")
    program = dataclasses.replace(PROGRAM, problems=(problem,))

    line = table.table_row(program, row_of(0, 0, symptoms={"padded": False}))

    assert "padding is rejected: trim it" in line
    assert "**gpt2: a known problem did not occur (padded)**" in line


@pytest.mark.parametrize(
    ("row", "cell"),
    [
        ({"status": "not run", "reason": "no network"}, "not run"),
        ({"status": "failed", "reason": "an error"}, "**failed**: an error"),
    ],
)
def test_row_without_results_says_why(row, cell):
    line = table.table_row(PROGRAM, row)

    assert f"| A program 1.0 | {cell} |" in line
