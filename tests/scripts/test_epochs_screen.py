"""Tests of the epochs screen: its texts, the order of its runs, and how it continues."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import epochs_screen, manuals
from benchmarks.epochs_screen import Result, Run, Text

SMALL = Text("latin", 0.3)


def result_of(run: Run, bits_per_byte: float) -> Result:
    """Return an invented result. The last loss is higher than the best one."""
    return Result(
        script=run.text.script,
        megabytes=run.text.megabytes,
        epochs=run.epochs,
        weight_decay=run.weight_decay,
        seed=run.seed,
        steps=100,
        seconds=1.0,
        loss=4.0,
        bits_per_byte=bits_per_byte + 0.1,
        best_loss=3.9,
        best_bits_per_byte=bits_per_byte,
        best_step=90,
        commit="abc",
        machine="a CPU",
    )


# The texts.


def test_visible_paragraphs_of_page_are_read():
    page = """<html><head><title>Hidden</title></head><body><nav>Hidden</nav>
        <h1>Save  a file</h1><p>Press <b>Ctrl</b>+S,\n or choose&nbsp;Save.<br/>Then wait.</p>
        <script>hidden()</script></body></html>"""

    lines = manuals.paragraphs(page)

    assert lines == ["Save a file", "Press Ctrl+S, or choose Save.", "Then wait."]


@pytest.mark.parametrize(
    ("paragraph", "script"),
    [("Save a file", "latin"), ("Сохраните файл в GIMP", "cyrillic"), ("Ёлка", "cyrillic")],
)
def test_paragraph_is_in_one_script(paragraph, script):
    scripts = [name for name in manuals.PAGES if manuals.is_in_script(paragraph, name)]

    assert scripts == [script]


def test_numbers_are_in_no_script():
    assert not any(manuals.is_in_script("1, 2, 3", script) for script in manuals.PAGES)


def test_long_paragraph_occurs_once():
    license_text = "Permission is granted to copy this document. " * 10
    pages = [[license_text, f"Page {number}. " * 50] for number in range(3)]

    documents = manuals.remove_repetitions(pages)

    assert len(documents) == 3
    assert "\n".join(documents).count(license_text) == 1
    assert documents[0].startswith(license_text)


def test_equal_pages_are_one_document():
    page = ["Options", "The same page in two places. " * 20]

    assert len(manuals.remove_repetitions([page, page])) == 1


def test_equal_pages_of_short_paragraphs_are_one_document():
    page = [f"The word number {number}" for number in range(50)]

    assert len(manuals.remove_repetitions([page, page])) == 1


def test_navigation_is_removed():
    pages = [["Next", f"Page {number}. " * 50] for number in range(manuals.MOST_OCCURRENCES + 1)]

    documents = manuals.remove_repetitions(pages)

    assert "Next" not in "\n".join(documents)


@pytest.mark.parametrize("num_bytes", [manuals.SHORTEST_DOCUMENT - 1, manuals.LONGEST_DOCUMENT + 1])
def test_very_short_and_long_documents_are_left_out(num_bytes):
    assert manuals.remove_repetitions([["x" * num_bytes]]) == []


def test_larger_text_continues_smaller_one():
    documents = [f"{number:03} " * 1000 for number in range(200)]

    small = manuals.cut(documents, 100_000)
    large = manuals.cut(documents, 300_000)

    assert small.held_out == large.held_out
    assert large.train[: len(small.train)] == small.train
    assert not set(large.train) & set(large.held_out)
    assert 95_000 < sum(len(document) for document in small.train) <= 100_000


def test_too_large_text_is_rejected():
    with pytest.raises(ValueError, match="1,000,000 bytes"):
        manuals.cut(["x" * 1000] * 500, 1_000_000)


def test_missing_manual_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"help/C/\*\*/\*\.page"):
        manuals.read_documents(tmp_path, "latin")


# The order of the runs.


def test_stages_contain_every_combination_once():
    runs = epochs_screen.runs_of(epochs_screen.STAGES)

    assert len(runs) == len(set(runs))
    num_texts = 7
    assert len(runs) == 6 * 4 * 4 + 2 * 4 + num_texts  # the grid, the large text, and today's
    assert {run.text.script for run in runs if run.text.megabytes == 10} == {"latin"}


def test_coarse_runs_come_first():
    runs = epochs_screen.runs_of(epochs_screen.STAGES)

    assert {run.text.megabytes for run in runs[:12]} == {0.3}
    assert {run.text.megabytes for run in runs[12:18]} == {1.0}


def test_close_runs_and_todays_get_second_seed():
    close = [Run(SMALL, 10, 0.5), Run(SMALL, 20, 0.5)]
    results = [result_of(close[0], 2.0), result_of(close[1], 2.01)]
    results.append(result_of(Run(SMALL, 40, 0.5), 2.015))
    results.append(result_of(Run(Text("cyrillic", 0.3), 10, 0.5), 1.0))

    runs = epochs_screen.contested(results, SMALL)

    today = Run(SMALL, None, epochs_screen.TODAY_DECAY, seed=2)
    assert runs == [*(replace(run, seed=2) for run in close), today]


def test_clear_result_needs_no_second_seed():
    results = [result_of(Run(SMALL, 10, 0.5), 2.0), result_of(Run(SMALL, 20, 0.5), 2.1)]

    runs = epochs_screen.contested(results, SMALL)

    assert [run.epochs for run in runs] == [None]


def test_second_seed_follows_decays():
    results = []
    started = set()
    for stage in epochs_screen.STAGES:
        for run in stage.runs:
            started.add(run)
            results.append(result_of(run, 2.0))
        if stage.repeats:
            break

    run = epochs_screen.next_run(results, started)

    assert run is not None
    assert run.seed == 2
    assert run.text == SMALL


def test_all_runs_end():
    results = []
    while run := epochs_screen.next_run(results, {result.run for result in results}):
        results.append(result_of(run, 2.0))

    seeds = [result.seed for result in results]
    assert seeds.count(1) == len(epochs_screen.runs_of(epochs_screen.STAGES))
    assert seeds.count(2) >= 7


@pytest.mark.parametrize(
    ("epochs", "num_windows", "steps"), [(5, 33, 11), (5, 32, 10), (40, 1, 3), (None, 5, 1000)]
)
def test_steps_are_rounded_up(epochs, num_windows, steps):
    assert epochs_screen.count_steps(epochs, num_windows) == steps


# Continuing, and the tables.


def call(folder: Path, num_runs: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the screen with invented results until the time is over. Return the trained runs."""
    trained = []

    def train(screen, run):
        trained.append(f"{run.text.name} {run.name}")
        if len(trained) == num_runs:
            screen.args.hours = 0
        return result_of(run, 2.0)

    monkeypatch.setattr(epochs_screen.Screen, "prepare", lambda _: None)
    monkeypatch.setattr(epochs_screen.Screen, "train", train)
    epochs_screen.main([f"--results_file={folder / 'results.json'}", "--workers=1"])
    return trained


def test_interrupted_screen_continues_with_next_run(tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    (tmp_path / "interrupted").mkdir()
    whole = call(tmp_path / "whole", 6, monkeypatch)

    first = call(tmp_path / "interrupted", 4, monkeypatch)
    second = call(tmp_path / "interrupted", 2, monkeypatch)

    assert first + second == whole
    stored = json.loads((tmp_path / "interrupted" / "results.json").read_text())
    assert len(stored["results"]) == 6
    assert len(stored["not_run"]) == 111 - 6


@pytest.mark.parametrize("is_finished", [False, True])
def test_only_unfinished_run_is_removed(tmp_path, monkeypatch, is_finished):
    run = Run(SMALL, 10, 0.5)
    run_folder = tmp_path / SMALL.name / "runs" / run.name
    (run_folder / ("model" if is_finished else "checkpoints")).mkdir(parents=True)
    existed = []

    def train_once(folder, name, *args, **kwargs):
        existed.append(run_folder.exists())
        run_folder.mkdir(parents=True, exist_ok=True)
        rows = []
        for step, loss in [(4, 3.0), (8, 2.0), (11, 2.5)]:
            rows.append({"step": step, "eval/loss": loss, "eval/bits_per_byte": loss / 2})
        lines = [json.dumps(row) for row in rows]
        (run_folder / "metrics.jsonl").write_text("\n".join(lines))
        return {"seconds": 5.0}

    monkeypatch.setattr(epochs_screen, "train_once", train_once)
    args = argparse.Namespace(folder=tmp_path, results_file=tmp_path / "results.json")
    screen = epochs_screen.Screen(args)
    screen.texts = {SMALL.name: {"windows": 16}}

    result = screen.train(run)

    assert existed == [is_finished]
    assert result.run == run
    assert result.steps == 10
    assert result.bits_per_byte == 1.25
    assert result.best_bits_per_byte == 1.0
    assert result.best_step == 8


def test_report_marks_missing_runs(tmp_path, capsys):
    run = Run(SMALL, 10, 0.5)
    results = [result_of(run, 2.0), result_of(replace(run, seed=2), 2.02)]
    rows = [asdict(result) for result in results]
    record = {"hours": 1.0, "texts": {}, "results": rows}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(record))

    epochs_screen.main([f"--results_file={path}", "--report"])

    lines = capsys.readouterr().out.splitlines()
    assert "| 10 epochs | not run | 2.010 (2.110) ±0.010 | not run | not run |" in lines
    assert "| cyrillic-1MB | not run |  | not run |" in lines
