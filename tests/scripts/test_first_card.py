"""What is run when a card is met: its parts are listed, rehearsed without a card, and lose no figure and no child."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from conftest import RECIPE, ROOT, TEXT, run_script, start_reader

from benchmarks.first_card import command_line, machine, runner, training

SCRIPT = ROOT / "benchmarks" / "first_card.sh"
ABOUT = {
    "kind": "cuda",
    "machine": "NVIDIA H200",
    "memory_bytes": 2**37,
    "date": "2026-11-22",
    "commit": "0123abc",
}
ABOUT |= {"count": 1, "driver": "580.1", "versions": {"torch": "2.11.0", "transformers": "5.17.0"}}


def first_card_sh(*parts: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the script as a user does, on a machine that has no card."""
    mine = {
        name: value
        for name, value in os.environ.items()
        if name not in ("REHEARSE", "RESULTS", "WORK")
    }
    mine |= {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(["bash", str(SCRIPT), *parts], env=mine, capture_output=True, text=True)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A command of a card that is pretended."""
    asked = argparse.Namespace(
        work=tmp_path / "work", results=tmp_path / "results", seconds=60, tiny=False
    )
    asked.nanogpt, asked.micro_batches = None, [64]
    asked.work.mkdir()
    monkeypatch.setattr(time, "strftime", lambda form: "101112")
    return runner.Command(asked, ABOUT, deadline=time.monotonic() + 60)


@pytest.fixture
def part(command):
    """A part of it."""
    return runner.Part("a", command, 60)


def record(command: runner.Command) -> dict:
    """Return what a command has written."""
    return json.loads((command.args.results / f"{command.name}.json").read_text())["parts"]


def test_every_part_is_listed_where_none_is_named_and_by_help(capsys):
    plain = first_card_sh()
    with pytest.raises(SystemExit) as ended:
        command_line.main(["--help"])
    assert plain.returncode == ended.value.code == 0 and plain.stdout == capsys.readouterr().out
    listed = re.findall(
        r"^  (\w+) {2,}(\S.*)$", plain.stdout.partition("\nParts:\n")[2], re.MULTILINE
    )
    listed = [(name, said) for name, said in listed if name in command_line.PARTS]
    assert [name for name, _ in listed] == list(command_line.PARTS)
    assert command_line.parse(["c", "all"]).parts == ["c", *command_line.ALL_PARTS]
    with pytest.raises(SystemExit) as ended:
        command_line.main(["g", "x"])
    assert ended.value.code == 2


def test_a_report_without_a_card_ends_with_the_remedy_in_a_line_and_writes_nothing(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(machine, "about", lambda: {"kind": "cpu"})
    for name in ("WORK", "RESULTS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    status, shown = command_line.main(["report"]), capsys.readouterr()
    assert status == 2 and shown.out == "" and len(shown.err.splitlines()) == 1
    assert (
        "no NVIDIA card" in shown.err
        and "check_setup.py" in shown.err
        and not list(tmp_path.iterdir())
    )
    # `make test` asks make not to be silent about the folders it enters.
    command = ["make", "--no-print-directory", "-n", "-o", ".venv/.installed", "card-report"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert shown.stdout.strip().endswith("bash benchmarks/first_card.sh report")


@pytest.mark.slow
def test_parts_are_rehearsed_to_their_rows_without_a_card(tmp_path):
    done = first_card_sh("carry", "a", "b", "c2", "h", "i", REHEARSE="1", WORK=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "found no time" not in done.stderr
    assert sorted(path.suffix for path in (tmp_path / "results").iterdir()) == [".json", ".txt"]
    (written,) = (tmp_path / "results").glob("*.json")
    found = json.loads(written.read_text())
    assert [part["row"] for part in found["parts"].values()] == done.stdout.splitlines() and found[
        "rehearsal"
    ]
    for name, part in found["parts"].items():
        assert part["problems"] == [] and f"first_card.sh {name}`" in part["row"]
        assert (
            "a rehearsal: no measurement" in part["row"]
            and f"[JSON]({written.name})" in part["row"]
        )
    assert found["parts"]["c2"]["exact"]["true"]["weights_equal"]
    assert (
        len(found["parts"]["a"]["profiled"]["losses"]) == 14
        and "aten::mm" in found["parts"]["a"]["row"]
    )
    assert "prepared in" in (tmp_path / "results" / f"{written.stem}.txt").read_text()


def test_a_part_that_breaks_leaves_the_next_and_one_without_time_is_named(
    command, monkeypatch, capsys
):
    def broken(part):
        part.note("half", half=1)
        raise KeyError("no such figure")

    def late(part):
        part.deadline = time.monotonic()
        part.run("training", ["-c", ""], part.work)
        part.command.deadline = part.deadline + 10  # the next part needs 14

    parts = {"b": broken, "a": lambda part: part.note("whole", whole=1), "c": late, "g": broken}
    monkeypatch.setattr(command_line, "PARTS", parts)
    monkeypatch.setattr(command_line, "parse", lambda argv: command.args)
    monkeypatch.setattr(machine, "about", lambda: ABOUT)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    command.args.parts = list(parts)
    assert command_line.main([]) == 1
    found = record(command)
    assert found["b"]["half"] == found["a"]["whole"] == 1 and found["a"]["problems"] == []
    assert found["b"]["problems"] == ["KeyError: 'no such figure'"]
    assert found["c"]["problems"] == ["training: not reached, the time was up"]
    assert found["g"]["problems"] == ["not reached, the time was up"] and "half" not in found["g"]
    shown = capsys.readouterr()
    assert (
        "found no time: bash benchmarks/first_card.sh c g\n" in shown.err
        and len(shown.out.splitlines()) == 4
    )
    assert (
        "broken" in (command.args.results / f"{command.name}.txt").read_text()
    )  # of the traceback


def test_a_program_that_fails_is_a_problem_of_its_row_and_what_was_measured_stays(part, command):
    part.note("500,000 tokens/s", speed=7)
    assert part.run("it works", ["-c", "print('fine')"], part.work) == "fine\n"
    assert part.run("it | breaks", ["-c", "raise SystemExit('no such kernel')"], part.work) is None
    found = record(command)["a"]
    assert (
        found["problems"] == ["it | breaks: exit status 1: no such kernel"] and found["speed"] == 7
    )
    assert (
        found["cut_short"] is False
        and "fine\n" in (part.args.results / f"{command.name}.txt").read_text()
    )
    about, command, *said = [cell.strip() for cell in found["row"].split("|")[1:-1]]
    assert (
        about == "2026-11-22, 0123abc, NVIDIA H200, driver 580.1, torch 2.11.0, transformers 5.17.0"
    )
    link = "[JSON](first-card-h200-2026-11-22-101112.json)"
    assert command == "`bash benchmarks/first_card.sh a`"
    assert said == [f"500,000 tokens/s; it / breaks: exit status 1: no such kernel; {link}"]


def test_a_program_that_outlasts_its_part_ends_with_its_own_children(part, monkeypatch):
    monkeypatch.setattr(runner, "LEAST_SECONDS", 1)
    part.deadline = time.monotonic() + 3
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert (
        part.run(
            "it hangs", ["-c", f"{child}; print(p.pid, flush=True); time.sleep(600)"], part.work
        )
        is None
    )
    pid = int((part.work / "logs" / "a-it-hangs.log").read_text())
    status = Path(f"/proc/{pid}/status")
    while status.exists() and "State:\tZ" not in status.read_text():  # until the kill is done
        assert time.monotonic() < part.deadline + 20
        time.sleep(0.05)
    assert (
        part.record["problems"] == ["it hangs: stopped, no time was left: " + str(pid)]
        and part.record["cut_short"]
    )


CUDA_TABLE = """
-----------------  ------------  ------------  ------------  ------------  ------------
             Name    Self CPU %      Self CPU     Self CUDA   Self CUDA %    # of Calls
-----------------  ------------  ------------  ------------  ------------  ------------
    ProfilerStep*        90.00%      10.428ms       9.000ms        60.00%             3
         aten::mm         1.00%      38.729ms       5.000ms        33.33%            57
  Memcpy (Device)         0.00%       0.000us       1.000us         0.01%             3
-----------------  ------------  ------------  ------------  ------------  ------------
Self CPU time total: 104.969ms
Self CUDA time total: 15.000ms
"""


def test_profile_summary_of_a_gpu_has_kernel_shares():
    expected = "profile of three updates, Self CUDA %: aten::mm 33.3%"
    assert training.profile_summary(CUDA_TABLE) == expected


MISSING = {
    "datasets",
    "evaluate",
    "wandb",
    "trackio",
    "tensorboard",
    "aiohttp",
    "pyarrow",
    "fsspec",
    "psutil",
}
MISSING |= {"pynvml", "matplotlib", "bitsandbytes", "tiktoken"}


def main(argv: list[str]) -> int:
    """Train with all of our modules imported anew, as if nothing but torch, Transformers and accelerate were there."""
    for name in [
        name
        for name in sys.modules
        if name.split(".")[0] in ("ursa_minor", "train", "prepare_data")
    ]:
        del sys.modules[name]
    for name in [*sys.modules, *MISSING]:
        if name.split(".")[0] in MISSING:
            sys.modules[name] = None
    import train
    from ursa_minor.data.loading import background

    background.subprocess = types.SimpleNamespace(Popen=start_reader, PIPE=subprocess.PIPE)
    return train.main(argv)


def test_text_trains_where_nothing_but_torch_transformers_and_accelerate_is_installed(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)
    Path("text.txt").write_text(TEXT)
    run_script(__file__, "--recipe", "tiny.yaml", "--data_files", "text.txt")
    assert Path("runs/tiny/model/model.safetensors").is_file()
