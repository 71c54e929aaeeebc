"""Trials of the setup check: real computations whose hangs, crashes and errors become results."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from ursa_minor.model import loss
from ursa_minor.preflight import checks, trials

# Start a child, write its process id to the file, and hang.
HANG = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
time.sleep(60)
"""
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def attempt_program(text: str, *arguments: str, seconds: float = 60) -> dict:
    """Run a Python program as a trial and return its result."""
    return checks.attempt([sys.executable, "-S", "-c", text, *arguments], seconds)


def attempt_trial(name: str, *launcher: str, **arguments) -> dict:
    """Run a trial in its own process and return its result."""
    module = ("-m", "ursa_minor.preflight.trials")
    command = [sys.executable, *launcher, *module, name, json.dumps(arguments)]
    return checks.attempt(command, 300)


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return " Z " not in status


def test_hanging_trial_is_stopped_with_its_children(tmp_path):
    start = time.monotonic()

    result = attempt_program(HANG, str(tmp_path / "pid"), seconds=1)

    assert result == {"problem": "no answer in 1 s"}
    assert time.monotonic() - start < 30
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import ctypes; ctypes.string_at(0)", ["killed by SIGSEGV"]),
        (
            "import sys; print('the last words', file=sys.stderr); sys.exit(3)",
            ["exit status 3", "the last words"],
        ),
        (
            "import os; os.write(1, bytes([255]))",
            ["exit status 0", "\N{REPLACEMENT CHARACTER}"],
        ),
    ],
    ids=["crash", "exit", "invalid UTF-8"],
)
def test_trial_without_result_is_a_problem(program, words):
    result = attempt_program(program)

    assert set(result) == {"problem"}
    assert "without a result" in result["problem"]
    for word in words:
        assert word in result["problem"]


def test_exception_becomes_problem_of_one_line(monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", lambda *_: None)
    monkeypatch.setattr(signal, "alarm", lambda *_: None)
    arguments = json.dumps({"device": "none", "precision": "no"})
    monkeypatch.setattr(sys, "argv", ["trials", "training_step", arguments])

    trials.main()

    problem = json.loads(capfd.readouterr().out)["problem"]
    assert problem.startswith("RuntimeError: Expected one of cpu, cuda")


@pytest.mark.slow
def test_two_processes_measure_their_bandwidth():
    result = attempt_trial("all_reduce", *TWO_PROCESSES, backend="gloo", megabytes=4)

    assert result["text"].startswith("gloo, 2 processes: ")


@pytest.mark.slow
def test_exception_ends_all_processes():
    result = attempt_trial("all_reduce", *TWO_PROCESSES, backend="none")

    assert result["problem"].startswith("AssertionError: Unknown backend")


def test_training_step_reports_fp32_time_too(monkeypatch):
    monkeypatch.setattr(trials, "TURNS", 4)

    text = trials.training_step(device="cpu", precision="bf16")

    assert " ms in fp32" in text


def test_step_time_is_median_without_first_step(monkeypatch):
    seconds = {"bf16": [9.0, 1.0, 8.0, 2.0], "no": [9.0, 4.0, 4.0, 40.0]}
    monkeypatch.setattr(trials, "TURNS", 4)
    monkeypatch.setattr(
        trials, "_steps", lambda device, precision, compiled: iter(seconds[precision])
    )

    text = trials.training_step(device="cpu", precision="bf16", compiled=True)

    assert text.startswith("compiled in 9 s")
    assert "takes 2000.0 ms on cpu" in text
    assert "4000.0 ms in fp32" in text


def test_loss_that_is_not_finite_is_refused(monkeypatch):
    def forward(module, *_):
        return float("nan") * next(module.parameters()).sum()

    monkeypatch.setattr(loss.NextTokenLoss, "forward", forward)

    with pytest.raises(RuntimeError, match="not finite"):
        trials.training_step(device="cpu", precision="no")


def find_number(pattern: str, text: str) -> float:
    """Return the number that a pattern's group matches."""
    return float(re.search(pattern, text)[1])


@pytest.mark.slow
def test_compiled_step_is_really_compiled():
    result = attempt_trial("training_step", device="cpu", precision="no", compiled=True)

    compile_seconds = find_number(r"compiled in (\d+) s", result["text"])
    step_milliseconds = find_number(r"takes ([\d.]+) ms", result["text"])
    assert compile_seconds > 10 * step_milliseconds / 1000


@pytest.mark.slow
def test_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-g++")

    result = attempt_trial("training_step", device="cpu", precision="no", compiled=True)

    assert "no-such-g++" in result["problem"]
    assert "compiler" in result["problem"].lower()
