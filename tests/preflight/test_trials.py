"""Trials are real, and what hangs, dies or prints no answer in one is an answer."""

import json
import os
import re
import signal
import sys
import time

import pytest

from ursa_minor.model import loss
from ursa_minor.preflight import checks, trials

HANG = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
time.sleep(60)
"""


def script(text: str, *arguments: str, seconds: float = 60) -> dict:
    return checks.attempt([sys.executable, "-S", "-c", text, *arguments], seconds)


def trial(name: str, *launch: str, **given) -> dict:
    return checks.attempt(
        [sys.executable, *launch, "-m", "ursa_minor.preflight.trials", name, json.dumps(given)], 300
    )


def test_a_hang_is_an_answer_within_its_time_and_leaves_no_process(tmp_path):
    start = time.monotonic()
    assert script(HANG, str(tmp_path / "pid"), seconds=2) == {"problem": "no answer in 2 s"}
    assert time.monotonic() - start < 30  # of its 60
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not os.path.exists(f"/proc/{pid}") or " Z " in open(f"/proc/{pid}/stat").read():
            return
        time.sleep(0.1)
    pytest.fail("the trial's child still runs")


@pytest.mark.parametrize(
    "text, ending",
    [
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
        (
            "import sys; print('the last words', file=sys.stderr); sys.exit(3)",
            "exit status 3: the last words",
        ),
        ("import os; os.write(1, bytes([255]))", "exit status 0: \N{REPLACEMENT CHARACTER}"),
    ],
)
def test_a_crash_an_exit_and_rubbish_are_answers(text, ending):
    assert script(text) == {"problem": f"its process ended without a result, {ending}"}


def test_a_trial_that_raises_is_an_answer_of_one_line(monkeypatch, capfd):
    for module, name in ((os, "_exit"), (signal, "alarm")):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(
        sys, "argv", ["probes", "training_step", '{"device": "none", "precision": "no"}']
    )
    trials.main()
    assert json.loads(capfd.readouterr().out)["problem"].startswith(
        "RuntimeError: Expected one of cpu, cuda"
    )


LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.mark.slow
def test_two_processes_measure_their_bandwidth_and_one_that_raises_ends_them_all_with_its_words():
    assert trial("all_reduce", *LAUNCH, backend="gloo", megabytes=4)["text"].startswith(
        "gloo, 2 processes: "
    )
    assert trial("all_reduce", *LAUNCH, backend="none")["problem"].startswith(
        "AssertionError: Unknown backend"
    )


def test_steps_train_gpt2_in_half_precision_and_in_fp32_in_turn(monkeypatch):
    monkeypatch.setattr(trials, "TURNS", 4)
    assert " ms in fp32" in trials.training_step(device="cpu", precision="bf16")
    taken = {"bf16": [9.0, 1.0, 8.0, 2.0], "no": [9.0, 4.0, 4.0, 40.0]}
    monkeypatch.setattr(
        trials, "_steps", lambda device, precision, compiled: iter(taken[precision])
    )
    found = trials.training_step(device="cpu", precision="bf16", compiled=True)
    # Medians without the first.
    step = "a step of a tiny GPT-2 takes 2000.0 ms on cpu, and 4000.0 ms in fp32"
    assert found.startswith(f"compiled in 9 s, then {step}")


def test_a_loss_that_is_not_finite_is_refused(monkeypatch):
    monkeypatch.setattr(
        loss.NextTokenLoss, "forward", lambda self, *_: float("nan") * next(self.parameters()).sum()
    )
    with pytest.raises(RuntimeError, match="not finite"):
        trials.training_step(device="cpu", precision="no")


@pytest.mark.slow
def test_a_compiled_step_is_really_compiled_and_fails_without_a_compiler_by_its_name(monkeypatch):
    found = trial("training_step", device="cpu", precision="no", compiled=True)
    first, step = (
        float(re.search(words, found["text"])[1])
        for words in (r"compiled in (\d+) s", r"takes ([\d.]+) ms")
    )
    assert first > 10 * step / 1000

    monkeypatch.setenv("CXX", "no-such-g++")
    problem = trial("training_step", device="cpu", precision="no", compiled=True)["problem"]
    assert "no-such-g++" in problem and "compiler" in problem.lower()
