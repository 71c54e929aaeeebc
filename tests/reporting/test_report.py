"""The report of a run: its files, its lines on the terminal and the rows for trackers."""

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
from ursa_minor.evaluation.tasks.hellaswag import TASK
from ursa_minor.optim.update import Update
from ursa_minor.recipe import keys, loading
from ursa_minor.reporting import report
from ursa_minor.reporting.clock import Clock
from ursa_minor.reporting.report import ADVICE_AFTER_STEPS, Report, due, duration

CPU = torch.device("cpu")
CONTROL_CHARACTERS = ("\x1b", "\x9b", "\u202e")


def start_report(run_dir, first_step: int = 0, *, is_main: bool = True) -> Report:
    """Start the report of a run of 10 steps with 8 tokens each."""
    console.start(is_main)
    flags = {"data_files": ["x"], "max_steps": 10, "warmup_steps": 1}
    recipe = loading.load_recipe(ROOT / "recipes" / "own_text.yaml", flags)
    recipe = keys.replace(recipe, output_dir=str(run_dir), tokens_per_step=8)
    state = RunState.begin(recipe.schedule)
    state.step = first_step
    return Report(recipe, state, Clock(10, None), is_main=is_main)


def make_update(
    loss: float = 2.0,
    grad_norm: float = 1.0,
    *,
    is_applied: bool = True,
    objective: float | None = None,
) -> Update:
    """Return the result of an update without an overflow."""
    return Update(
        loss=loss, grad_norm=grad_norm, applied=is_applied, overflow=False, objective=objective
    )


def report_update(
    run_report: Report, step: int, elapsed: float, *, waited: float = 0.0, max_steps: int = 10
) -> None:
    """Report an update of loss 2.0.

    Args:
        run_report: the report.
        step: the step of the update.
        elapsed: the training time so far, in seconds.
        waited: the part of it that was spent waiting for data, in seconds.
        max_steps: the planned length of the run.
    """
    clock = run_report._clock
    clock._earlier_seconds = elapsed
    clock._started = None
    clock.count(1234)
    state = RunState(max_steps, 1, step=step, data_wait_seconds=waited)
    run_report.update(state, make_update(), 1e-3, CPU)


def steps_with(rows: list[dict], key: str) -> list[int]:
    """Return the steps of the rows that have this key."""
    return [row["step"] for row in rows if key in row]


# metrics.jsonl


def test_resume_drops_rows_after_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = start_report(tmp_path)
    for step in range(1, 6):
        first.log(step - 1, {"eval/loss": 3.0})
        first.log(step, {"train/loss": 2.0})
    first.close()

    start_report(tmp_path, first_step=3).close()

    rows = read_metrics(path)
    assert steps_with(rows, "train/loss") == [1, 2, 3]
    assert steps_with(rows, "eval/loss") == [0, 1, 2]  # the one at the checkpoint is repeated


def test_resume_drops_damaged_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    row = b'{"step": 1, "train/loss": 2.0}\n'
    damaged = b'3\n[]\n{"step": "1"}\n\x00\n'
    incomplete = b'{"step": 3, "train/lo\xc3'
    path.write_bytes(damaged + row + incomplete)

    start_report(tmp_path, first_step=3).close()

    assert path.read_bytes() == row


def test_new_run_starts_with_empty_files(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2}\n')
    (tmp_path / "samples.txt").write_text("==== step 0 · prompt 'a' ====\nabc\n\n")

    start_report(tmp_path)

    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert (tmp_path / "samples.txt").read_text() == report.NOISE + report.BYTES


def test_row_is_on_disk_when_log_returns(tmp_path):
    run_report = start_report(tmp_path)

    run_report.log(3, {"train/loss": 1.5})

    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows == [{"step": 3, "tokens": 24, "train/loss": 1.5}]


def test_interrupted_evaluation_writes_no_row(tmp_path):
    run_report = start_report(tmp_path)

    run_report.loss(4, "validation", None)
    run_report.scores(4, TASK, None)

    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("revision", [None, "c" * 40], ids=["none", "known"])
def test_row_of_scores_names_the_revision(tmp_path, revision):
    scores = {"items": 10}
    for name in TASK.scores:
        scores[name] = 0.5
        scores[f"{name}_stderr"] = 0.5
    run_report = start_report(tmp_path)

    run_report.scores(4, TASK, scores, revision)

    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row.get("hellaswag/revision") == revision
    assert row["hellaswag/items"] == 10


class FakeTrackers:
    """Trackers that store their arguments and rows."""

    def __init__(self, recipe=None, first_step=0, *, ids=None, rows=(), sent=-1):
        self.first_step = first_step
        self.earlier_rows = list(rows)
        self.sent = sent
        self.ids = {"wandb": "x"}
        self.rows = []

    def log(self, step: int, row: dict) -> None:
        self.rows.append(row)

    def close(self) -> None: ...


@pytest.fixture
def started_trackers(monkeypatch) -> list[FakeTrackers]:
    """Replace the trackers. Return a list to which each report appends its trackers."""
    created = []

    def start_trackers(*args, **options) -> FakeTrackers:
        created.append(FakeTrackers(*args, **options))
        return created[-1]

    monkeypatch.setattr(report, "Trackers", start_trackers)
    return created


def reject_constant(name: str) -> None:
    """Fail for NaN and Infinity, which are not JSON."""
    pytest.fail(name)


def test_skipped_update_has_null_values(tmp_path, started_trackers):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": null}\n')
    run_report = start_report(tmp_path, first_step=1)
    skipped = make_update(math.nan, math.inf, is_applied=False, objective=math.nan)

    run_report.update(RunState(10, 1, step=2), skipped, 1e-3, CPU)
    run_report.close()

    lines = path.read_text().splitlines()
    earlier_row, row = [json.loads(line, parse_constant=reject_constant) for line in lines]
    assert earlier_row == {"step": 1, "train/loss": None}
    assert row["train/loss"] is None
    assert row["train/objective"] is None
    assert row["train/grad_norm"] is None
    assert started_trackers[0].rows == [row]
    start_report(tmp_path, first_step=2).close()
    assert read_metrics(path) == [earlier_row, row]  # a resume keeps rows with null


def test_objective_is_reported_next_to_loss(tmp_path, capsys):
    run_report = start_report(tmp_path)

    run_report.update(RunState(10, 1, step=1), make_update(4.86, objective=6.048), 1e-3, CPU)
    run_report.update(RunState(10, 1, step=2), make_update(4.86), 1e-3, CPU)
    run_report.close()

    with_objective, without_objective = read_metrics(tmp_path / "metrics.jsonl")
    assert with_objective["train/loss"] == 4.86
    assert with_objective["train/objective"] == 6.048
    assert without_objective["train/loss"] == 4.86
    assert "train/objective" not in without_objective
    assert "loss 4.860  objective 6.048  " in capsys.readouterr().err


def test_trackers_receive_earlier_rows_and_position(tmp_path, started_trackers):
    first = start_report(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"train/loss": 2.0})
    first.log(2, {"eval/loss": 3.0})
    first.close()

    resumed = start_report(tmp_path, first_step=2)
    resumed.log(3, {"train/loss": 1.0})

    trackers = started_trackers[1]
    assert trackers.first_step == 2
    assert steps_with(trackers.earlier_rows, "train/loss") == [1, 2]
    assert len(trackers.earlier_rows) == 2
    assert trackers.sent == 3001  # 1000 * 3 for the third row, and one more for the fourth
    assert trackers.rows == [{"step": 3, "tokens": 24, "train/loss": 1.0}]


def raise_disk_full(*_args, **_options) -> None:
    raise OSError(28, "No space left on device")


def test_full_disk_loses_no_row(tmp_path, capsys, monkeypatch):
    run_report = start_report(tmp_path)
    full_file = SimpleNamespace(write=raise_disk_full)

    with monkeypatch.context() as full_disk:
        full_disk.setattr(run_report._metrics, "_file", full_file)
        full_disk.setattr(run_report._samples, "_file", full_file)
        full_disk.setattr(report.curves, "draw_curves", raise_disk_full)
        for step in (1, 2):
            run_report.log(step, {"train/loss": 2.0})
            run_report.samples(step, [("a", "b")], show=False)
            run_report.draw()
    run_report.log(3, {"train/loss": 2.0})
    run_report.close()

    assert steps_with(read_metrics(tmp_path / "metrics.jsonl"), "train/loss") == [1, 2, 3]
    assert (tmp_path / "samples.txt").read_text().count("==== step") == 2
    output = capsys.readouterr().err
    assert output.count("metrics.jsonl: ") == 2  # when it fails and when it works again
    assert output.count("samples.txt: ") == 1
    assert output.count("curves.png was not drawn: ") == 1
    assert "Traceback" not in output


# samples.txt


def test_control_characters_of_samples_are_escaped(tmp_path, capsys):
    run_report = start_report(tmp_path)
    console.log_to_file(tmp_path / "run.log")

    run_report.samples(0, [("\x9b", "\x1b[2J\u202e http://me:secret@h/x\r\n")], show=True)
    run_report.close()

    log = (tmp_path / "run.log").read_text()
    samples = (tmp_path / "samples.txt").read_text()
    for text in (capsys.readouterr().err, log, samples):
        assert "\\x9b\\x1b[2J\\u202e http://redacted@h/x\\r\n" in text
        for forbidden in (*CONTROL_CHARACTERS, "secret"):
            assert forbidden not in text


def test_resume_drops_samples_after_checkpoint(tmp_path):
    path = tmp_path / "samples.txt"
    first = start_report(tmp_path)
    for step in (0, 4, 8):
        text = f"text {step}\n==== step one\n==== step 99 of all\nlast line"
        first.samples(step, [("é ", text)], show=False)
    first.close()
    before_resume = path.read_text(encoding="utf-8")

    resumed = start_report(tmp_path, first_step=8)
    after_resume = path.read_text(encoding="utf-8")
    resumed.samples(8, [("a", "b")], show=False)

    assert before_resume.startswith(report.NOISE + report.BYTES + "==== step 0")
    assert before_resume.startswith(after_resume)
    assert after_resume.count("last line") == 2
    assert "step 8" not in after_resume
    new_sample = "==== step 8 · prompt 'a' ====\nab\n\n"
    assert path.read_text(encoding="utf-8") == after_resume + new_sample


# Messages


@pytest.mark.parametrize(
    ("step", "interval", "is_due", "is_due_at_end"),
    [(0, 5, True, True), (5, 5, True, True), (6, 5, False, True), (5, 0, False, False)],
)
def test_report_is_due_at_intervals_and_end(step, interval, is_due, is_due_at_end):
    assert due(step, interval) == is_due
    assert due(step, interval, last=True) == is_due_at_end


def test_hint_is_logged_once(tmp_path, capsys):
    run_report = start_report(tmp_path)

    report_update(run_report, ADVICE_AFTER_STEPS - 1, 49.0, waited=24.5)
    assert "hint: " not in capsys.readouterr().err
    for step in (ADVICE_AFTER_STEPS, ADVICE_AFTER_STEPS + 1):
        report_update(run_report, step, float(step), waited=step / 2)

    output = capsys.readouterr().err
    assert output.count("hint: ") == 1
    assert "waits for data 50% of the time" in output


def test_loss_above_bigram_baseline_is_reported(tmp_path, capsys):
    run_report = start_report(tmp_path)
    state = RunState(max_steps=10, warmup_steps=1, step=10)

    run_report.loss(10, "validation", {"loss": 1.5, "bits_per_byte": 0.5})
    run_report.baselines(state, {"bigram": 1.45, "bigram_bits_per_byte": 0.48})

    output = capsys.readouterr().err
    assert "no better than a bigram baseline" in output
    assert "--max_steps" in output


def test_run_cut_by_max_hours_needs_more_hours(tmp_path, capsys):
    run_report = start_report(tmp_path)
    state = RunState(max_steps=4, warmup_steps=1, planned=True, step=4)

    run_report.loss(4, "validation", {"loss": 1.5, "bits_per_byte": 0.5})
    run_report.baselines(state, {"bigram": 1.45, "bigram_bits_per_byte": 0.48})

    assert "Train longer (--max_hours" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (12.4, "12 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 00 min"),
        (5 * 3600 + 240, "5 h 04 min"),
    ],
)
def test_duration_has_two_units(seconds, expected):
    assert duration(seconds) == expected


# Progress


def test_redirected_output_has_lines_at_intervals(tmp_path, capsys, fixed_clock):
    run_report = start_report(tmp_path)

    for step, seconds in [(1, 1), (2, 2), (3, 6.5), (9, 7), (10, 7.5)]:
        fixed_clock.now = 100 + seconds
        report_update(run_report, step, float(seconds))
    run_report.close()

    output, errors = capsys.readouterr()
    lines = errors.splitlines()
    step_lines = [line for line in lines if line.startswith("step ")]
    assert [re.match(r"step +(\d+)/10 ", line)[1] for line in step_lines] == ["1", "3", "10"]
    assert output == ""
    assert "\r" not in errors
    assert "loss 2.000" in errors
    assert "  1,234 tokens/s\n" in errors
    assert "mfu" not in errors
    assert "left 0 s" in lines[-1]


@pytest.fixture
def draw_on_terminal(tmp_path, monkeypatch):
    """Return a function that reports two updates on a terminal and returns the drawn lines.

    With a message, the progress ends and the message is logged.
    """

    def draw(height: int, message: str = "") -> list[str]:
        own_end, terminal_end = os.openpty()
        termios.tcsetwinsize(terminal_end, (height, 80))
        with open(terminal_end, "w") as terminal:
            monkeypatch.setattr("sys.stderr", terminal)
            run_report = start_report(tmp_path)
            for step in (1, 9):
                report_update(run_report, step, float(step))
            run_report._bar.refresh()
            if message:
                run_report.end_progress()
                console.say(message)
            run_report.close()
            print("end", file=terminal, flush=True)
            output = ""
            while "end" not in output:  # a read may return only a part
                output += os.read(own_end, 10_000).decode()
        os.close(own_end)
        return [line.rstrip() for line in re.split(r"[\r\n]+", output)]

    return draw


def test_progress_bar_fits_terminal(draw_on_terminal):
    lines = draw_on_terminal(height=24)

    bars = [line for line in lines if line.startswith("step 9/10 ")]
    assert re.search(r"^step 9/10 .{20,} loss 2\.000  [\d,]+ tokens/s  left \d+ s$", bars[-1])
    assert len(bars[-1]) <= 80


def test_message_after_the_progress_is_the_last_line(draw_on_terminal):
    lines = draw_on_terminal(height=24, message="stopped by SIGINT after step 9")

    last_lines = [line for line in lines if line][-3:]
    assert last_lines[0].startswith("step 9/10 ")
    assert last_lines[1:] == ["stopped by SIGINT after step 9", "end"]


def test_terminal_without_height_has_no_bar(draw_on_terminal):
    lines = draw_on_terminal(height=0)

    assert lines[0].startswith("step  1/10  loss")
    assert not [line for line in lines if line.startswith("step 9/10 ")]


def test_time_left_excludes_the_first_update(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "LINE_SECONDS", 0)
    run_report = start_report(tmp_path)

    report_update(run_report, 1, 50.0, max_steps=100)  # includes the compilation
    report_update(run_report, 7, 62.0, max_steps=100)
    report_update(run_report, 10, 68.0, max_steps=20)  # max_hours has shortened the run

    first, second, last = capsys.readouterr().err.splitlines()[-3:]
    assert first.startswith("step   1/100")
    assert "left" not in first
    assert second.startswith("step   7/100")
    assert second.endswith("left 3 min 06 s")
    assert last.startswith("step 10/20")
    assert last.endswith("left 20 s")


@pytest.mark.parametrize(
    ("seconds_per_step", "suggests_limit"), [(1.0, False), (60.0, True)], ids=["short", "long"]
)
def test_expected_time_is_logged_after_20_updates(
    tmp_path, capsys, seconds_per_step, suggests_limit
):
    run_report = start_report(tmp_path)
    first_seconds = 50.0  # the first update, with compilation

    for step in range(1, 23):
        elapsed = first_seconds + (step - 1) * seconds_per_step
        report_update(run_report, step, elapsed, max_steps=121)

    lines = [line for line in capsys.readouterr().err.splitlines() if "time     " in line]
    (line,) = lines
    assert f"{duration(100 * seconds_per_step)} for the remaining 100 steps" in line
    assert ("--max_hours" in line) == suggests_limit


def test_no_expected_time_at_the_end_of_a_run(tmp_path, capsys):
    run_report = start_report(tmp_path)

    for step in range(1, 41):
        report_update(run_report, step, elapsed=float(step), max_steps=40)

    assert "remaining" not in capsys.readouterr().err


def test_other_processes_write_nothing(tmp_path, capsys):
    run_report = start_report(tmp_path, is_main=False)

    run_report.log(1, {})
    report_update(run_report, 1, 1.0)
    run_report.loss(1, "validation", {"loss": 1.0})
    run_report.samples(1, [("a", "b")], show=True)
    run_report.draw()
    run_report.close()

    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")
