"""Tests of benchmarks/first_card.sh, which runs benchmarks on a GPU and records their results."""

import argparse
import contextlib
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
MACHINE = {
    "kind": "cuda",
    "machine": "NVIDIA H200",
    "memory_bytes": 2**37,
    "date": "2026-11-22",
    "commit": "0123abc",
    "count": 1,
    "driver": "580.1",
    "versions": {"torch": "2.11.0", "transformers": "5.17.0"},
}
# Starts a child process, prints its id, and does not end.
HANGING_PROGRAM = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def first_card_sh(*parts: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the script on a machine without a GPU."""
    variables = dict(os.environ)
    for name in ("REHEARSE", "RESULTS", "WORK"):
        variables.pop(name, None)
    variables |= {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    variables |= environment
    command = ["bash", str(SCRIPT), *parts]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


@pytest.fixture
def command(tmp_path, monkeypatch) -> runner.Command:
    """Return a call of the script on a simulated GPU."""
    args = argparse.Namespace(
        work=tmp_path / "work",
        results=tmp_path / "results",
        seconds=60,
        tiny=False,
        nanogpt=None,
        micro_batches=[64],
    )
    args.work.mkdir()
    monkeypatch.setattr(time, "strftime", lambda _: "101112")
    return runner.Command(args, MACHINE, deadline=time.monotonic() + 60)


@pytest.fixture
def part(command) -> runner.Part:
    """Return a part of that call."""
    return runner.Part("a", command, 60)


def read_parts(command: runner.Command) -> dict:
    """Read the results of a call by part."""
    path = command.args.results / f"{command.name}.json"
    return json.loads(path.read_text())["parts"]


def read_log(command: runner.Command) -> str:
    """Read the output of the programs of a call."""
    return (command.args.results / f"{command.name}.txt").read_text()


# The command line.


def test_script_without_parts_prints_help(capsys):
    result = first_card_sh()
    with pytest.raises(SystemExit) as help_exit:
        command_line.main(["--help"])

    assert result.returncode == 0
    assert help_exit.value.code == 0
    assert result.stdout == capsys.readouterr().out
    _, _, description = result.stdout.partition("\nParts:\n")
    names = re.findall(r"^  (\w+) {2,}\S.*$", description, re.MULTILINE)
    parts = [name for name in names if name in command_line.PARTS]
    assert parts == list(command_line.PARTS)


def test_all_is_replaced_by_parts():
    assert command_line.parse(["c", "all"]).parts == ["c", *command_line.ALL_PARTS]


def test_unknown_part_is_rejected():
    with pytest.raises(SystemExit) as exit_:
        command_line.main(["g", "x"])

    assert exit_.value.code == 2


def test_report_without_gpu_is_rejected(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "about", lambda: {"kind": "cpu"})
    for name in ("WORK", "RESULTS"):
        monkeypatch.setenv(name, str(tmp_path / name))

    status = command_line.main(["report"])

    output = capsys.readouterr()
    assert status == 2
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert "no NVIDIA card" in output.err
    assert "check_setup.py" in output.err
    assert not list(tmp_path.iterdir())


def test_make_card_report_runs_script():
    # Without the flag, make prints the folders that it enters if `make test` has started it.
    command = ["make", "--no-print-directory", "-n", "-o", ".venv/.installed", "card-report"]

    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert result.stdout.strip().endswith("bash benchmarks/first_card.sh report")


@pytest.mark.slow
def test_parts_can_be_rehearsed_without_gpu(tmp_path):
    parts = ("carry", "a", "b", "c2", "h", "i")
    result = first_card_sh(*parts, REHEARSE="1", WORK=str(tmp_path))

    assert result.returncode == 0, result.stderr
    assert "found no time" not in result.stderr
    files = sorted((tmp_path / "results").iterdir(), key=lambda path: path.suffix)
    assert [path.suffix for path in files] == [".json", ".txt"]
    json_file, text_file = files
    record = json.loads(json_file.read_text())
    assert record["rehearsal"]
    assert [part["row"] for part in record["parts"].values()] == result.stdout.splitlines()
    for name, part in record["parts"].items():
        assert part["problems"] == []
        assert f"first_card.sh {name}`" in part["row"]
        assert "a rehearsal: no measurement" in part["row"]
        assert f"[JSON]({json_file.name})" in part["row"]
    assert record["parts"]["c2"]["exact"]["true"]["weights_equal"]
    assert len(record["parts"]["a"]["profiled"]["losses"]) == 14
    assert "aten::mm" in record["parts"]["a"]["row"]
    assert "prepared in" in text_file.read_text()


# Parts that fail.


def failing_part(part: runner.Part) -> None:
    """Note a figure and raise an error."""
    part.note("half", half=1)
    raise KeyError("no such figure")


def successful_part(part: runner.Part) -> None:
    """Note a figure."""
    part.note("whole", whole=1)


def late_part(part: runner.Part) -> None:
    """Use up the time of the part and leave too little for the next one."""
    part.deadline = time.monotonic()
    part.run("training", ["-c", ""], part.work)
    part.command.deadline = part.deadline + 10  # The next part needs 14 seconds.


def test_failed_part_does_not_stop_others(command, monkeypatch, capsys):
    parts = {"b": failing_part, "a": successful_part, "c": late_part, "g": failing_part}
    command.args.parts = list(parts)
    monkeypatch.setattr(command_line, "PARTS", parts)
    monkeypatch.setattr(command_line, "parse", lambda _: command.args)
    monkeypatch.setattr(machine, "about", lambda: MACHINE)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    status = command_line.main([])

    assert status == 1
    results = read_parts(command)
    assert results["b"]["half"] == 1
    assert results["b"]["problems"] == ["KeyError: 'no such figure'"]
    assert results["a"]["whole"] == 1
    assert results["a"]["problems"] == []
    assert results["c"]["problems"] == ["training: not reached, the time was up"]
    assert results["g"]["problems"] == ["not reached, the time was up"]
    assert "half" not in results["g"]
    output = capsys.readouterr()
    assert "found no time: bash benchmarks/first_card.sh c g\n" in output.err
    assert len(output.out.splitlines()) == 4
    assert "failing_part" in read_log(command), "the log has no traceback"


def test_failed_program_keeps_earlier_figures(part, command):
    part.note("500,000 tokens/s", speed=7)

    output = part.run("it works", ["-c", "print('fine')"], part.work)
    failure = part.run("it | breaks", ["-c", "raise SystemExit('no such kernel')"], part.work)

    assert output == "fine\n"
    assert failure is None
    result = read_parts(command)["a"]
    assert result["problems"] == ["it | breaks: exit status 1: no such kernel"]
    assert result["speed"] == 7
    assert result["cut_short"] is False
    assert "fine\n" in read_log(command)
    cells = [cell.strip() for cell in result["row"].split("|")[1:-1]]
    link = "[JSON](first-card-h200-2026-11-22-101112.json)"
    assert cells == [
        "2026-11-22, 0123abc, NVIDIA H200, driver 580.1, torch 2.11.0, transformers 5.17.0",
        "`bash benchmarks/first_card.sh a`",
        f"500,000 tokens/s; it / breaks: exit status 1: no such kernel; {link}",
    ]


def is_running(pid: int) -> bool:
    """Return whether a process runs (Linux). A zombie does not run."""
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


@pytest.mark.slow
def test_program_without_time_is_killed_with_children(part, monkeypatch):
    monkeypatch.setattr(runner, "LEAST_SECONDS", 0)
    part.deadline = time.monotonic() + 2

    output = part.run("it hangs", ["-c", HANGING_PROGRAM], part.work)

    child = int((part.work / "logs" / "a-it-hangs.log").read_text())
    while is_running(child):
        assert time.monotonic() < part.deadline + 20
        time.sleep(0.05)
    assert output is None
    assert part.record["problems"] == [f"it hangs: stopped, no time was left: {child}"]
    assert part.record["cut_short"]


# Parts that measure training.


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


def test_profile_summary_of_gpu_has_kernel_shares():
    expected = "profile of three updates, Self CUDA %: aten::mm 33.3%"

    assert training.profile_summary(CUDA_TABLE) == expected


# A rented machine may have only torch, Transformers and Accelerate.

OPTIONAL_PACKAGES = {
    "aiohttp",
    "bitsandbytes",
    "datasets",
    "evaluate",
    "fastokens",
    "fsspec",
    "matplotlib",
    "psutil",
    "pyarrow",
    "pynvml",
    "tensorboard",
    "trackio",
    "wandb",
}


def main(argv: list[str]) -> int:
    """Import the project again without the optional packages, and train."""
    for name in list(sys.modules):
        package, _, _ = name.partition(".")
        if package in ("ursa_minor", "train", "prepare_data"):
            del sys.modules[name]
        if package in OPTIONAL_PACKAGES:
            sys.modules[name] = None
    for name in OPTIONAL_PACKAGES:
        sys.modules[name] = None
    import train
    from ursa_minor.data.loading import background

    background.subprocess = types.SimpleNamespace(Popen=start_reader, PIPE=subprocess.PIPE)
    return train.main(argv)


def test_training_needs_no_optional_packages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)
    Path("text.txt").write_text(TEXT)

    run_script(__file__, "--recipe", "tiny.yaml", "--data_files", "text.txt")

    assert Path("runs/tiny/model/model.safetensors").is_file()
