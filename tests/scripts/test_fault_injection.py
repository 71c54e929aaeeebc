"""Tests that the fault-injection tests accept good error messages and detect a removed check."""

import json
import shutil
import subprocess
import sys

import commands
import pytest
from conftest import ROOT

ERROR = "error: data_files: the file a.csv does not exist. Check the path"
TRACEBACK = "Traceback (most recent call last):\n  File\nKeyError: 'x'\n"


def completed_command(code: int | None, stderr: str) -> commands.CompletedCommand:
    """Return the result of a command that printed only this."""
    return commands.CompletedCommand(code, "", stderr, 60.0)


@pytest.mark.parametrize(
    ("code", "stderr"),
    [(2, ERROR), (1, f"step 3/9\n{ERROR}\n"), (2, f"data     {ERROR}")],
    ids=["only the error", "after other output", "from the reader"],
)
def test_error_that_names_culprit_is_accepted(code, stderr):
    assert commands.command_problem(completed_command(code, stderr), "a.csv") is None


@pytest.mark.parametrize(
    ("code", "stderr", "problem"),
    [
        (None, "reading\n", "no end in 60 s; last: reading"),
        (1, f"{ERROR}\n{TRACEBACK}", "traceback: KeyError: 'x'"),
        (0, "", "exit status 0: nothing was printed"),
        (-11, ERROR, f"exit status -11: {ERROR}"),
        (2, "a.csv is bad", "exit status 2 without an error message: a.csv is bad"),
        (2, "error: something is bad", "none of a.csv is named: error: something is bad"),
    ],
    ids=["hang", "traceback", "success", "signal", "no error message", "no culprit"],
)
def test_other_end_is_problem(code, stderr, problem):
    assert commands.command_problem(completed_command(code, stderr), "a.csv") == problem


@pytest.mark.slow
def test_removed_check_is_detected(tmp_path):
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".*", "runs", "docs", "notebooks", "tests")
    shutil.copytree(ROOT, tree, ignore=ignored)
    path = tree / "ursa_minor/base/files.py"
    original = path.read_text()
    path.write_text(original.replace('sha256(path) != row["sha256"]', "False"))
    assert path.read_text() != original

    script = str(ROOT / "tests/fault_injection/run.py")
    command = [sys.executable, script, "--tree", str(tree), "--only", "bits"]
    result = subprocess.run([*command, "--json", str(tmp_path)], capture_output=True, text=True)

    assert result.returncode == 1, result.stderr
    results = list(tmp_path.glob("faults-*.json"))
    assert len(results) == 1
    bits = json.loads(results[0].read_text())["campaigns"]["bits"]
    assert bits["tried"] == 50
    assert 0 < bits["held"] < 50
    titles = [problem["what"] for problem in bits["problems"]]
    assert any("training/optimizer.safetensors" in title for title in titles)
