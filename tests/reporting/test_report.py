"""What a run reports and writes, and the clock it goes by."""

import json
import math
import os
import re
import termios
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from ursa_minor.base import console
from ursa_minor.base.run_files import read_metrics
from ursa_minor.checkpoint.state import RunState
from ursa_minor.evaluation.tasks import hellaswag
from ursa_minor.optim.update import Update
from ursa_minor.recipe.keys import replace
from ursa_minor.recipe.loading import load_recipe
from ursa_minor.reporting import report
from ursa_minor.reporting.clock import Clock
from ursa_minor.reporting.report import ADVICE_AFTER_STEPS, Report, due, duration


def make(run_dir, first_step=0, is_main=True):
    console.start(is_main)
    recipe = load_recipe(ROOT / "recipes" / "own_text.yaml", {"data_files": ["x"]})
    recipe = replace(recipe, output_dir=str(run_dir), tokens_per_step=8, max_steps=10)
    state = RunState.begin(recipe.schedule)
    state.step = first_step
    return Report(recipe, state, Clock(10, None), is_main=is_main)


def update(made, step, elapsed, *, waited=0.0, max_steps=10):
    """Report an update of loss 2.0 after these seconds of training."""
    made._clock._earlier_seconds, made._clock._started = elapsed, None
    made._clock.count(1234)
    state = RunState(max_steps, 1, step=step, data_wait_seconds=waited)
    made.update(state, Update(2.0, 1.0, True, False), 1e-3, torch.device("cpu"))


def test_resume_drops_rows_past_the_checkpoint_and_evaluations_that_come_again(tmp_path):
    """Lines that are not rows are dropped, too; a kill has torn the last one."""
    made, path = make(tmp_path), tmp_path / "metrics.jsonl"
    for step in range(1, 6):
        made.log(step - 1, {"eval/loss": 3.0})
        made.log(step, {"train/loss": 2.0})
    made.close()
    path.write_bytes(
        b'3\n[]\n{"step": "1"}\n\x00\n' + path.read_bytes() + b'{"step": 3, "train/lo\xc3'
    )
    make(tmp_path, first_step=3).close()
    rows = [json.loads(line) for line in path.open()]
    assert [r["step"] for r in rows if "train/loss" in r] == [1, 2, 3]
    assert [r["step"] for r in rows if "eval/loss" in r] == [0, 1, 2]


def test_a_run_from_the_start_begins_with_empty_files_and_rows_are_on_disk_when_log_returns(
    tmp_path,
):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2}\n')
    (tmp_path / "samples.txt").write_text("==== step 0 · prompt 'a' ====\nabc\n\n")
    made = make(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert (tmp_path / "samples.txt").read_text() == report.NOISE + report.BYTES
    made.log(3, {"train/loss": 1.5})
    made.loss(4, "validation", None)  # that was stopped
    made.scores(4, hellaswag.TASK, None)
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 3, "tokens": 24, "train/loss": 1.5}
    ]


@pytest.mark.parametrize("revision", [None, "c" * 40])
def test_row_of_scores_names_the_revision(tmp_path, revision):
    result = {"items": 10} | {
        f"{name}{end}": 0.5 for name in hellaswag.TASK.scores for end in ("", "_stderr")
    }
    made = make(tmp_path)
    made.scores(4, hellaswag.TASK, result, revision)
    made.close()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row.get("hellaswag/revision") == revision and row["hellaswag/items"] == 10


def test_a_skipped_update_is_a_row_of_json_for_files_and_trackers(tmp_path, monkeypatch):
    sent = []
    tracker = SimpleNamespace(ids={}, log=lambda step, row: sent.append(row), close=lambda: None)
    monkeypatch.setattr(report, "Trackers", lambda *_, **__: tracker)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": null}\n')
    made = make(tmp_path, first_step=1)
    skipped = Update(math.nan, math.inf, False, False, math.nan)
    made.update(RunState(10, 1, step=2), skipped, 1e-3, torch.device("cpu"))
    made.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    old, row = (json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines)
    assert old == {"step": 1, "train/loss": None} and sent == [row]
    assert row["train/loss"] is row["train/objective"] is row["train/grad_norm"] is None
    make(tmp_path, first_step=2).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [old, row]


def test_the_objective_has_a_place_of_its_own(tmp_path, capsys):
    made = make(tmp_path)
    made.update(
        RunState(10, 1, step=1), Update(4.86, 1.0, True, False, 6.048), 1e-3, torch.device("cpu")
    )
    made.update(RunState(10, 1, step=2), Update(4.86, 1.0, True, False), 1e-3, torch.device("cpu"))
    made.close()
    with_objective, without = read_metrics(tmp_path / "metrics.jsonl")
    assert (with_objective["train/loss"], with_objective["train/objective"]) == (4.86, 6.048)
    assert without["train/loss"] == 4.86 and "train/objective" not in without
    assert "loss 4.860  objective 6.048  " in capsys.readouterr().err


def test_trackers_are_given_the_rows_of_the_past_and_the_place_of_the_last_row_that_was_sent(
    tmp_path, monkeypatch
):
    made = make(tmp_path)
    for step in (1, 2, 3):
        made.log(step, {"train/loss": 2.0})
    made.log(2, {"eval/loss": 3.0})
    made.close()
    given = []

    def trackers(recipe, first_step, *, ids, rows, sent):
        given.append((first_step, [(row["step"], *row)[::3] for row in rows], sent))
        return SimpleNamespace(
            ids={"wandb": "x"}, log=lambda *row: given.append(row), close=lambda: None
        )

    monkeypatch.setattr(report, "Trackers", trackers)
    made = make(tmp_path, first_step=2)
    made.log(3, {"train/loss": 1.0})
    assert given[0] == (2, [(1, "train/loss"), (2, "train/loss")], 3001)
    assert given[1:] == [(3, {"step": 3, "tokens": 24, "train/loss": 1.0})]


def test_a_full_disk_stops_no_report_and_loses_no_row(tmp_path, capsys, monkeypatch):
    made = make(tmp_path)
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as disk:
        disk.setattr(
            made._metrics, "_file", SimpleNamespace(write=lambda data: (_ for _ in ()).throw(full))
        )
        disk.setattr(made._samples, "_file", made._metrics._file)
        disk.setattr(report.curves, "draw_curves", lambda *_, **__: (_ for _ in ()).throw(full))
        for step in (1, 2):
            made.log(step, {"train/loss": 2.0})
            made.samples(step, [("a", "b")], show=False)
            made.draw()
    made.log(3, {"train/loss": 2.0})
    made.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert (tmp_path / "samples.txt").read_text().count("==== step") == 2
    said = capsys.readouterr().err
    for name in ("metrics.jsonl: ", "samples.txt: ", "curves.png was not drawn: "):
        assert (
            said.count(name) == (2 if name == "metrics.jsonl: " else 1) and "Traceback" not in said
        ), said


def test_a_sample_steers_no_terminal_from_the_screen_the_log_or_samples_txt(tmp_path, capsys):
    made = make(tmp_path)
    console.log_to_file(tmp_path / "run.log")
    made.samples(0, [("\x9b", "\x1b[2J\u202e http://me:secret@h/x\r\n")], show=True)
    made.close()
    for shown in (
        capsys.readouterr().err,
        *((tmp_path / name).read_text() for name in ("run.log", "samples.txt")),
    ):
        assert "\\x9b\\x1b[2J\\u202e http://redacted@h/x\\r\n" in shown
        assert not [odd for odd in ("\x1b", "\x9b", "\u202e", "secret") if odd in shown]


def test_resume_drops_samples_past_the_checkpoint_and_what_they_begin_with_is_said_once(tmp_path):
    made = make(tmp_path)
    for step in (0, 4, 8):
        made.samples(
            step,
            [("é ", f"text {step}\n==== step one\n==== step 99 of all\nlast line")],
            show=False,
        )
    made.close()
    whole = (tmp_path / "samples.txt").read_text(encoding="utf-8")
    assert whole.startswith(report.NOISE + report.BYTES + "==== step 0")
    again = make(tmp_path, first_step=8)
    kept = (tmp_path / "samples.txt").read_text(encoding="utf-8")
    assert whole.startswith(kept) and kept.count("last line") == 2 and "step 8" not in kept
    again.samples(8, [("a", "b")], show=False)
    assert (tmp_path / "samples.txt").read_text(
        encoding="utf-8"
    ) == kept + "==== step 8 · prompt 'a' ====\nab\n\n"


def test_due_every_interval_and_at_the_last_and_never_for_0():
    assert due(0, 5) and due(5, 5) and not due(6, 5) and due(6, 5, last=True)
    assert not due(5, 0) and not due(5, 0, last=True)


def test_one_hint_is_logged_and_no_second(tmp_path, capsys):
    made = make(tmp_path)
    update(made, ADVICE_AFTER_STEPS - 1, 49.0, waited=24.5)
    assert "hint: " not in capsys.readouterr().err
    for step in (ADVICE_AFTER_STEPS, ADVICE_AFTER_STEPS + 1):
        update(made, step, float(step), waited=step / 2)
    assert capsys.readouterr().err.count("hint: the device waits for data 50% of the time") == 1


def test_a_run_that_lost_to_a_bigram_model_is_told_so(tmp_path, capsys):
    made = make(tmp_path)
    made.loss(4, "validation", {"loss": 1.5, "bits_per_byte": 0.5})
    made.baselines(4, {"bigram": 1.45, "bigram_bits_per_byte": 0.48})
    assert (
        "Validation loss is no better than a bigram baseline. Train longer (--max_steps with a new"
        in capsys.readouterr().err
    )


def test_duration_reads_as_people_write_it():
    written = {
        12.4: "12 s",
        59.6: "1 min 00 s",
        200: "3 min 20 s",
        3599.7: "1 h 00 min",
        5 * 3600 + 240: "5 h 04 min",
    }
    assert {seconds: duration(seconds) for seconds in written} == written


def test_redirected_output_has_lines_at_intervals_and_the_last(tmp_path, capsys, fixed_clock):
    made = make(tmp_path)
    for step, now in [(1, 1), (2, 2), (3, 6.5), (9, 7), (10, 7.5)]:
        fixed_clock.now = 100 + now
        update(made, step, float(now))
    made.close()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and "\r" not in err
    assert [line.split("/")[0].split()[-1] for line in lines if line.startswith("step ")] == [
        "1",
        "3",
        "10",
    ]
    assert (
        "loss 2.000" in err
        and "  1,234 tokens/s\n" in err
        and "mfu" not in err
        and "left 0 s" in lines[-1]
    )


def drawn_on_a_terminal(run_dir, monkeypatch, lines: int) -> list[str]:
    """The lines that a run of two updates draws on a terminal of so many lines of 80 columns."""
    mine, its = os.openpty()
    termios.tcsetwinsize(its, (lines, 80))
    with open(its, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        made = make(run_dir)
        for step in (1, 9):
            update(made, step, float(step))
        made._bar.refresh()
        made.close()
        print("end", file=terminal, flush=True)
        drawn = ""
        while "end" not in drawn:  # the kernel hands it over in pieces
            drawn += os.read(mine, 10_000).decode()
    os.close(mine)
    return [line.rstrip() for line in re.split(r"[\r\n]+", drawn)]


def test_a_terminal_of_80_columns_has_a_bar_with_whole_words_and_one_without_lines_a_line(
    tmp_path, monkeypatch
):
    last = [
        line
        for line in drawn_on_a_terminal(tmp_path, monkeypatch, 24)
        if line.startswith("step 9/10 ")
    ][-1]
    assert (
        re.search(r"^step 9/10 .{20,} loss 2\.000  [\d,]+ tokens/s  left \d+ s$", last)
        and len(last) <= 80
    ), last
    lines = drawn_on_a_terminal(tmp_path, monkeypatch, 0)
    assert lines[0].startswith("step  1/10  loss") and not [
        line for line in lines if line.startswith("step 9/10 ")
    ]


def test_the_time_left_is_counted_from_the_first_update_and_to_a_planned_length(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(report, "LINE_SECONDS", 0)
    made = make(tmp_path)
    update(made, 1, 50.0, max_steps=100)  # the first update pays for compiling: not in the estimate
    update(made, 7, 62.0, max_steps=100)
    update(made, 10, 68.0, max_steps=20)
    first, second, last = capsys.readouterr().err.splitlines()[-3:]
    assert first.startswith("step   1/100") and "left" not in first
    assert second.startswith("step   7/100") and second.endswith("left 3 min 06 s")
    assert last.startswith("step 10/20") and last.endswith("left 20 s")


def test_other_processes_write_nothing(tmp_path, capsys):
    made = make(tmp_path, is_main=False)
    made.log(1, {})
    update(made, 1, 1.0)
    made.loss(1, "validation", {"loss": 1.0})
    made.samples(1, [("a", "b")], show=True)
    made.draw()
    made.close()
    assert not list(tmp_path.iterdir()) and capsys.readouterr() == ("", "")
