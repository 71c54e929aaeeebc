"""train.py and its trackers, end to end."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import run

QUIET = ("--recipe", "tiny.yaml", "--run_name", "r", "--eval_steps", "6", "--sample_steps", "12", "--save_steps", "3")


def points(run_dir: Path, tag: str) -> list[int]:
    """Return the steps of a curve in TensorBoard's files, in the order of their times."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return [event.step for event in found.Scalars(tag)]


def test_a_resumed_run_is_one_curve_without_lost_or_doubled_points(workplace):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    run("train.py", *QUIET, "--report_to", "tensorboard")
    run_dir = Path("runs/r")
    for gone in ("model", "checkpoints/step-00000009", "checkpoints/step-00000012"):
        shutil.rmtree(run_dir / gone)
    run("train.py", *QUIET, "--report_to", "tensorboard", "--save_total_limit", "0", "--eval_steps", "4", expect=None)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert points(run_dir, "train/loss") == list(range(1, 13)) == [r["step"] for r in rows if "train/loss" in r]
    assert points(run_dir, "train/lr") == list(range(1, 13))
    assert sorted(set(points(run_dir, "eval/loss"))) == sorted(points(run_dir, "eval/loss"))
