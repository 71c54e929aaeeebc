"""What is run when a card is met: its parts are listed, rehearsed without a card, and lose no figure and no child."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from conftest import RECIPE, ROOT, TEXT, run, start_reader

from benchmarks import first_card

SCRIPT = ROOT / "benchmarks" / "first_card.sh"
ABOUT = {"kind": "cuda", "machine": "NVIDIA H200", "memory_bytes": 2**37, "date": "2026-11-22", "commit": "0123abc"}
ABOUT |= {"driver": "580.1", "versions": {"torch": "2.11.0", "transformers": "5.17.0"}}
HEADER = "| date | commit | machine | command | result |"


def first_card_sh(*parts: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the script as a user does, on a machine that has no card."""
    mine = {name: value for name, value in os.environ.items() if name not in ("REHEARSE", "RESULTS", "WORK", "TEXT")}
    mine |= {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(["bash", str(SCRIPT), *parts], env=mine, capture_output=True, text=True)


@pytest.fixture
def part(tmp_path, monkeypatch):
    """A part of a card that is pretended."""
    asked = argparse.Namespace(work=tmp_path / "work", results=tmp_path / "results", seconds=60, rehearse=False)
    asked.text = asked.nanogpt = asked.hellaswag = None
    asked.micro_batches = [64]
    asked.work.mkdir()
    monkeypatch.setattr(first_card, "STARTED", time.monotonic())
    return first_card.Part("a", asked, ABOUT)


def test_every_part_is_listed_where_none_is_named_and_by_help():
    plain, asked = first_card_sh(), first_card_sh("--help")
    assert plain.returncode == asked.returncode == 0 and plain.stdout == asked.stdout
    listed = re.findall(r"^  (\w+) {2,}(\S.*)$", plain.stdout.partition("\nParts:\n")[2], re.MULTILINE)
    listed = [(name, said) for name, said in listed if name in first_card.PARTS]
    assert [name for name, _ in listed] == ["a", "b", "b2", "c", "d", "e", "f", "g", "report"]


def test_a_report_without_a_card_ends_with_the_remedy_in_a_line_and_writes_nothing(tmp_path):
    done = first_card_sh("report", WORK=str(tmp_path / "work"), RESULTS=str(tmp_path / "results"))
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "no NVIDIA card" in done.stderr and "check_setup.py" in done.stderr and not list(tmp_path.iterdir())
    # `make test` asks make not to be silent about the folders it enters.
    command = ["make", "--no-print-directory", "-n", "-o", ".venv/.installed", "card-report"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert shown.stdout.strip().endswith("bash benchmarks/first_card.sh report")


@pytest.mark.slow
def test_a_part_is_rehearsed_to_its_row_without_a_card(tmp_path):
    done = first_card_sh("g", REHEARSE="1", WORK=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (table,) = (tmp_path / "results").glob("*.md")
    (written,) = (tmp_path / "results").glob("*.json")
    record = json.loads(written.read_text())
    assert table.read_text().splitlines() == [HEADER, "|---|---|---|---|---|", record["row"]]
    assert record["row"] == done.stdout.strip() and record["rehearsal"] and record["problems"] == []
    assert "a rehearsal: no measurement" in record["row"] and f"[JSON]({written.name})" in record["row"]
    assert [row["micro_batch"] for row in record["memory"]] == [2, 4]
    assert all(row["measured"] > 0 and row["ratio"] > 0 for row in record["memory"])


def test_a_row_has_the_tables_cells_whatever_is_said(part):
    part.note("500,000 tokens/s", speed=1)
    part.fail("b | broke\non two lines")
    (table,) = part.results.glob("*.md")
    assert table.name == "first-card-h200-2026-11-22.md"
    *_, row = table.read_text().splitlines()
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert len(cells) == HEADER.count("|") - 1 and cells[:2] == ["2026-11-22", "0123abc"]
    assert cells[2] == "NVIDIA H200, driver 580.1, torch 2.11.0, transformers 5.17.0"
    assert cells[3] == "`bash benchmarks/first_card.sh a`"
    assert cells[4].startswith("500,000 tokens/s; b / broke on two lines; [JSON](first-card-h200-2026-11-22-a.json)")


def test_parts_of_a_day_stand_in_one_table_in_their_order_and_a_repeated_one_once(part):
    for name, said in (("b2", "ladder"), ("a", "first"), ("b2", "again")):
        part.name, part.said, part.record["part"] = name, [], name
        part.note(said)
    (table,) = part.results.glob("*.md")
    assert [line.split("`")[1][-2:].strip() for line in table.read_text().splitlines()[2:]] == ["a", "b2"]
    assert "again" in table.read_text() and "ladder" not in table.read_text()


def test_a_program_that_fails_is_a_problem_and_what_was_measured_stays(part):
    part.note("measured", speed=7)
    assert part.run("it works", ["-c", "print('fine')"], part.work) == "fine\n"
    assert part.run("it breaks", ["-c", "raise SystemExit('no such kernel')"], part.work) is None
    record = json.loads(next(part.results.glob("*.json")).read_text())
    assert record["problems"] == ["it breaks: exit status 1: no such kernel"] and record["speed"] == 7


def test_a_program_that_outlasts_its_part_ends_with_its_own_children(part, monkeypatch):
    monkeypatch.setattr(first_card, "LEAST_SECONDS", 1)
    part.deadline = time.monotonic() + 5
    child = (
        "import os, subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    )
    assert part.run("it hangs", ["-c", f"{child}; print(p.pid, flush=True); time.sleep(600)"], part.work) is None
    pid = int((part.work / "logs" / "a-it-hangs.log").read_text())
    status = Path(f"/proc/{pid}/status")
    while status.exists() and "State:\tZ" not in status.read_text():  # until the kill is done
        assert time.monotonic() < part.deadline + 20
        time.sleep(0.05)
    assert part.record["problems"] == ["it hangs: stopped, no time was left: " + str(pid)]
    part.deadline = time.monotonic()
    assert part.run("the next one", ["-c", ""], part.work) is None
    assert part.record["problems"][-1] == "the next one: not reached, the part's time was up"


MISSING = {"datasets", "evaluate", "wandb", "trackio", "tensorboard", "aiohttp", "pyarrow", "fsspec", "psutil"}
MISSING |= {"pynvml", "matplotlib", "bitsandbytes", "tiktoken"}


def main(argv: list[str]) -> int:
    """Train with all of our modules imported anew, as if nothing but torch, Transformers and accelerate were there."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("pretrain", "train", "prepare_data")]:
        del sys.modules[name]
    for name in [*sys.modules, *MISSING]:
        if name.split(".")[0] in MISSING:
            sys.modules[name] = None
    import train
    from pretrain.data import background

    background.subprocess = types.SimpleNamespace(Popen=start_reader, PIPE=subprocess.PIPE)
    return train.main(argv)


def test_text_trains_where_nothing_but_torch_transformers_and_accelerate_is_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)
    Path("text.txt").write_text(TEXT)
    run(__file__, "--recipe", "tiny.yaml", "--data_files", "text.txt")
    assert Path("runs/tiny/model/model.safetensors").is_file()
