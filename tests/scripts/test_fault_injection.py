"""The campaign of problems itself: its judge, and that it sees a problem that was put in."""

import json
import shutil
import subprocess
import sys

import commands
import pytest
from conftest import ROOT

ERROR = "error: data_files: the file a.csv does not exist. Check the path"


def done(code, stderr, stdout=""):
    return commands.Done(code, stdout, stderr, 60.0)


@pytest.mark.parametrize(
    ("code", "stderr", "why"),
    [
        (2, ERROR, None),
        (1, f"step 3/9\n{ERROR}\n", None),
        (2, f"data     {ERROR}", None),
        (None, "reading\n", "no end in 60 s; last: reading"),
        (
            1,
            f"{ERROR}\nTraceback (most recent call last):\n  File\nKeyError: 'x'\n",
            "traceback: KeyError: 'x'",
        ),
        (0, "", "exit status 0: nothing was printed"),
        (-11, ERROR, f"exit status -11: {ERROR}"),
        (2, "a.csv is bad", "exit status 2 without a line that begins with error: a.csv is bad"),
        (2, "error: something is bad", "none of a.csv is named: error: something is bad"),
    ],
)
def test_the_judge_lets_one_line_that_names_the_culprit_hold_and_nothing_else(code, stderr, why):
    assert commands.command_problem(done(code, stderr), "a.csv") == why


@pytest.mark.slow
def test_a_fault_that_is_put_in_is_found(tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".*", "runs", "docs", "notebooks", "tests")
    )
    path = tree / "ursa_minor/base/files.py"
    sound = path.read_text()
    path.write_text(sound.replace('sha256(path) != row["sha256"]', "False"))
    assert path.read_text() != sound
    command = [
        sys.executable,
        str(ROOT / "tests/fault_injection/run.py"),
        "--tree",
        str(tree),
        "--only",
        "bits",
    ]
    found = subprocess.run([*command, "--json", str(tmp_path)], capture_output=True, text=True)
    assert found.returncode == 1, found.stderr
    (written,) = tmp_path.glob("faults-*.json")
    bits = json.loads(written.read_text())["campaigns"]["bits"]
    assert 0 < bits["held"] < bits["tried"] == 50
    assert any("optimizer.safetensors" in problem["what"] for problem in bits["problems"])
