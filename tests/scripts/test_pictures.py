"""The pictures of the documentation are drawn from stored results."""

import json
from pathlib import Path

import pytest
from conftest import ROOT

from benchmarks import pictures
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import read_metrics


def write_run(folder: Path) -> Path:
    """Write a run folder with two rows of metrics."""
    rows = [
        {"step": 0, "tokens": 0, "eval/loss": 8.335391610860825},
        {"step": 1, "tokens": 8, "train/loss": 3.0, "ms_per_step": 221.36, "skipped_updates": 0},
    ]
    folder.mkdir(parents=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_every_picture_of_the_docs_is_drawn():
    docs = ROOT / "docs"
    files = [*docs.rglob("*.png"), *docs.rglob("*.svg")]

    names = {path.relative_to(ROOT).as_posix() for path in files}

    assert names == set(pictures.PICTURES)


def test_every_stored_run_is_in_a_picture():
    assert {path.stem for path in pictures.STORED_RUNS.iterdir()} == set(pictures.RUNS)


def test_store_keeps_drawn_metrics_and_origin(tmp_path, monkeypatch):
    monkeypatch.setenv("COMMIT", "1234567")
    run_dir = write_run(tmp_path / "quickstart")

    pictures.store(run_dir, tmp_path / "stored")

    path = tmp_path / "stored" / "quickstart.jsonl"
    about = json.loads(path.read_text().splitlines()[0])
    assert about["commit"] == "1234567"
    assert about["machine"]
    assert read_metrics(path) == [
        {"step": 0, "tokens": 0, "eval/loss": 8.33539},
        {"step": 1, "tokens": 8, "train/loss": 3.0},
    ]


def test_run_of_another_name_is_rejected(tmp_path):
    run_dir = write_run(tmp_path / "quickstrat")

    with pytest.raises(BadInput) as caught:
        pictures.store(run_dir, tmp_path / "stored")

    assert "--from" in str(caught.value)
    assert "quickstart" in str(caught.value)


def test_run_without_metrics_is_rejected(tmp_path):
    (tmp_path / "quickstart").mkdir()

    with pytest.raises(BadInput) as caught:
        pictures.store(tmp_path / "quickstart", tmp_path / "stored")

    assert "metrics.jsonl" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", pictures.PICTURES)
def test_picture_is_drawn_without_training(name, tmp_path):
    status = pictures.main([name, "--out", str(tmp_path)])

    assert status == 0
    assert (tmp_path / name).stat().st_size > 5000
