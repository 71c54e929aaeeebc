"""What a run reports and writes, and the clock it goes by."""

import json

import pytest

from pretrain.base import console
from pretrain.run import report
from pretrain.run.report import Meter, Report, due, duration, read_metrics


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(report.time, "perf_counter", lambda: Clock.now)
    monkeypatch.setattr(report.time, "monotonic", lambda: Clock.now)
    return Clock


def make(run_dir, first_step=0, is_main=True, max_steps=10):
    console.start(is_main)
    return Report(run_dir, first_step=first_step, max_steps=max_steps, tokens_per_step=8, is_main=is_main)


def row(elapsed, loss=2.0, **more):
    return {"train/loss": loss, "tokens_per_second": 1234.5, "ms_per_step": 250.0, "elapsed_seconds": elapsed, **more}


def test_rows_are_on_disk_when_log_returns(tmp_path):
    made = make(tmp_path)
    made.log(3, {"train/loss": 1.5})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 3, "tokens": 24, "train/loss": 1.5}]
    made.close()


def test_resume_drops_rows_past_the_checkpoint_and_looks_that_come_again(tmp_path):
    made = make(tmp_path)
    for step in range(1, 6):
        made.log(step - 1, {"eval/loss": 3.0})
        made.log(step, {"train/loss": 2.0})
    made.close()
    make(tmp_path, first_step=3).close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows if "train/loss" in r] == [1, 2, 3]
    assert [r["step"] for r in rows if "eval/loss" in r] == [0, 1, 2]


def test_a_run_from_the_start_begins_with_empty_files(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2}\n')
    (tmp_path / "samples.txt").write_text("==== step 0 · prompt 'a' ====\nabc\n\n")
    make(tmp_path).close()
    assert (tmp_path / "metrics.jsonl").read_text() == (tmp_path / "samples.txt").read_text() == ""


def test_resume_drops_a_torn_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "train/loss": 2}\n{"step": 2, "train/lo\xc3')
    assert read_metrics(path) == [{"step": 1, "train/loss": 2}]
    made = make(tmp_path, first_step=2)
    made.log(3, {})
    made.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


def test_resume_drops_samples_past_the_checkpoint(tmp_path):
    made = make(tmp_path)
    for step in (0, 4, 8):
        made.samples(step, [("é ", f"text {step}\nsecond line")])
    made.close()
    whole = (tmp_path / "samples.txt").read_text(encoding="utf-8")
    make(tmp_path, first_step=8).close()
    kept = (tmp_path / "samples.txt").read_text(encoding="utf-8")
    assert whole.startswith(kept) and kept.endswith("text 4\nsecond line\n\n") and "step 8" not in kept


def test_trackers_hear_every_row_and_sample_and_the_end(tmp_path):
    class Tracker:
        def __init__(self):
            self.heard = []

        def log(self, step, row):
            self.heard.append((step, row))

        def sample(self, step, texts):
            self.heard.append((step, texts))

        def close(self):
            self.heard.append("end")

    made = make(tmp_path)
    made.trackers = Tracker()
    made.log(3, {"train/loss": 2.0})
    made.samples(3, [("a", "b"), ("c", "d")])
    made.close()
    (written,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert made.trackers.heard == [(3, written), (3, [("a", "b"), ("c", "d")]), "end"]


def test_sampled_text_that_looks_like_a_heading_breaks_no_resume(tmp_path):
    made = make(tmp_path)
    made.samples(0, [("a", "\n==== step one\n==== step 99 of all\nlast line")])
    made.close()
    make(tmp_path, first_step=4).close()
    assert "last line" in (tmp_path / "samples.txt").read_text()


@pytest.mark.parametrize(
    "step, interval, last, expected",
    [(0, 5, False, True), (5, 5, False, True), (6, 5, False, False), (6, 5, True, True), (5, 0, False, False)]
    + [(5, 0, True, False), (0, 0, False, False)],
)
def test_due_every_interval_and_at_the_last_and_never_for_0(step, interval, last, expected):
    assert due(step, interval, last) is expected


def test_paused_time_does_not_count(clock):
    meter = Meter(flops_per_token=10, peak_flops=1000.0, elapsed=5.0)
    clock.now += 2
    with meter.paused():
        clock.now += 50
    clock.now += 3
    assert meter.elapsed == pytest.approx(10.0)


def test_paused_time_does_not_count_when_the_look_fails(clock):
    meter = Meter(flops_per_token=10, peak_flops=None)
    with pytest.raises(ZeroDivisionError), meter.paused():
        clock.now += 50
        raise ZeroDivisionError
    assert meter.elapsed == pytest.approx(0.0)


def test_time_saved_inside_a_pause_is_training_time_only(clock):
    meter = Meter(flops_per_token=10, peak_flops=None)
    clock.now += 2
    with meter.paused():
        clock.now += 50  # a validation, then the checkpoint that stores elapsed
        assert meter.elapsed == pytest.approx(2.0)


def test_speed_and_mfu_are_of_the_time_since_the_last_read(clock):
    meter = Meter(flops_per_token=10, peak_flops=1000.0, elapsed=77.0)
    meter.count(60)
    clock.now += 2
    assert meter.read() == pytest.approx({"tokens_per_second": 30.0, "ms_per_step": 2000.0, "mfu": 0.3})
    with meter.paused():
        clock.now += 9
    meter.count(5)
    meter.count(5)
    clock.now += 1
    assert meter.read() == pytest.approx({"tokens_per_second": 10.0, "ms_per_step": 500.0, "mfu": 0.1})
    assert meter.updates == 3


def test_mfu_is_left_out_where_the_peak_is_unknown(clock):
    meter = Meter(flops_per_token=10, peak_flops=None)
    clock.now += 1
    assert set(meter.read()) == {"tokens_per_second", "ms_per_step"}


def test_one_hint_is_said_and_no_second(tmp_path, capsys):
    made = make(tmp_path)
    for text in (None, "first", "second", "first"):
        made.hint(text)
    assert capsys.readouterr().err == "hint: first\n"
    make(tmp_path, is_main=False).hint("on another process")
    assert capsys.readouterr().err == ""


def test_a_planned_length_is_what_is_counted_to(tmp_path, capsys):
    made = make(tmp_path, max_steps=1000)
    made.progress(1, row(0.0))
    made.extend(20, "max_hours = 1: 20 steps")
    made.progress(10, row(10.0))
    made.progress(20, row(20.0))
    assert "max_hours = 1: 20 steps" in (said := capsys.readouterr().err)
    assert "step 20/20" in said and "/1000" in said.splitlines()[0]


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0 s"), (12.4, "12 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (3599.7, "1 h 00 min")]
    + [(5 * 3600 + 240, "5 h 04 min"), (2 * 86400 + 3 * 3600, "2 d 03 h")],
)
def test_duration_reads_as_people_write_it(seconds, text):
    assert duration(seconds) == text


def test_redirected_output_prints_lines_at_intervals_and_the_last(tmp_path, capsys, clock):
    made = make(tmp_path)
    made.start_progress()
    for step, now in [(1, 0), (2, 1), (3, 5.5), (9, 6), (10, 6.5)]:
        clock.now = 100 + now
        made.progress(step, row(elapsed=now))
    made.close()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and "\r" not in err
    assert [line.split("/")[0].split()[-1] for line in lines if line.startswith("step ")] == ["1", "3", "10"]
    assert "loss 2.000" in err and "tok/s 1,234" in err and "MFU n/a" in err and "left 0 s" in lines[-1]


def test_expected_time_is_told_once_from_the_first_steps(tmp_path, capsys, clock):
    made = make(tmp_path, max_steps=100)
    made.start_progress()
    made.progress(1, row(elapsed=50.0, mfu=0.415))  # the first update pays for compiling: not in the estimate
    made.progress(3, row(elapsed=54.0))
    made.progress(5, row(elapsed=58.0))
    made.close()
    err = capsys.readouterr().err
    assert err.count("expected training time 3 min 20 s") == 1 and "MFU 41.5%" in err


def test_other_processes_write_and_say_nothing(tmp_path, capsys):
    made = make(tmp_path, is_main=False)
    made.start_progress()
    made.log(1, {})
    made.progress(1, row(elapsed=1.0))
    made.samples(1, [("a", "b")])
    made.close()
    assert not list(tmp_path.iterdir()) and capsys.readouterr() == ("", "")
