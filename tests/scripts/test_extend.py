"""Each patch of docs/extend.md applies, trains, and passes make check."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ROOT

ENVIRONMENT = ROOT / ".venv"
# Number of Python files in the patch, for the sections that state it.
PYTHON_FILES = {
    "Add an architecture": 2,
    "Add an activation function": 3,
    "Change the block": 5,
    "Add a reader": 3,
    "Add a token-file format": 2,
    "Add a tracker": 2,
    "Add a task": 2,
}
MOST_CHANGED_LINES = {"Add a token-file format": 40}
pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="needs git")


class Addition(NamedTuple):
    """A patch and the commands that try it."""

    patch: str
    commands: str


def read_additions() -> dict[str, Addition]:
    """Return the additions of the page by the title of their section."""
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    section = r"^## (.*?)\n.*?^```sh\ngit apply (\S+)\n(.*?)^```"
    additions = {}
    for title, path, commands in re.findall(section, page, re.M | re.S):
        patch = (ROOT / path).read_text(encoding="utf-8")
        additions[title] = Addition(patch, commands)
    return additions


ADDITIONS = read_additions()


def run_git(*words: str, cwd: Path, text: str = "") -> subprocess.CompletedProcess:
    """Run git with this text as its standard input."""
    return subprocess.run(["git", *words], cwd=cwd, input=text, capture_output=True, text=True)


def run_in(tree: Path, command: list[str]) -> subprocess.CompletedProcess:
    """Run a command in a folder with the Python of this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def test_page_has_these_additions():
    assert list(ADDITIONS) == [
        "Add an optimizer",
        "Add an architecture",
        "Add an activation function",
        "Change the block",
        "Add a loss key",
        "Add a reader",
        "Add a token-file format",
        "Add a tracker",
        "Add a task",
    ]


@pytest.mark.parametrize("title", ADDITIONS)
def test_patch_applies_and_is_short(title):
    patch = ADDITIONS[title].patch

    check = run_git("apply", "--check", "-", cwd=ROOT, text=patch)

    assert not check.stderr
    changed_lines = re.findall(r"^[+-](?!\+\+ |-- )", patch, re.MULTILINE)
    assert 0 < len(changed_lines) <= MOST_CHANGED_LINES.get(title, 60)
    if title in PYTHON_FILES:
        python_files = re.findall(r"^\+\+\+ b/\S+\.py$", patch, re.MULTILINE)
        assert len(python_files) == PYTHON_FILES[title]


def copy_tracked_files(tree: Path) -> None:
    """Copy the repository with the times of its files, because make installs if they are new."""
    listed = run_git("ls-files", "-z", cwd=ROOT)
    for name in listed.stdout.split("\0")[:-1]:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    run_git("init", "--quiet", cwd=tree)


@pytest.mark.slow
@pytest.mark.parametrize("title", ADDITIONS)
def test_patched_tree_trains_and_passes_checks(title, tmp_path):
    if not (ENVIRONMENT / ".installed-dev").exists():
        pytest.skip("make check needs the environment of make test")
    if run_git("rev-parse", cwd=ROOT).returncode:
        pytest.skip("not a git checkout")
    patch, commands = ADDITIONS[title]
    tree = tmp_path / "tree"
    copy_tracked_files(tree)
    apply = run_git("apply", "-", cwd=tree, text=patch)
    assert not apply.stderr
    run_git("add", "--all", cwd=tree)  # a test of make check lists the tracked files

    training = run_in(tree, ["bash", "-e", "-c", commands])
    resumed = run_in(tree, ["bash", "-e", "-c", commands.splitlines()[-1]])
    check = run_in(tree, ["make", "check", f"VENV={ENVIRONMENT}"])

    assert training.returncode == 0, training.stderr
    assert "step 3:" in training.stderr, training.stderr
    assert "disabled" not in training.stderr, training.stderr
    (run,) = (tree / "runs").iterdir()
    assert '"train/loss"' in (run / "metrics.jsonl").read_text()
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from" in resumed.stderr, resumed.stderr
    assert check.returncode == 0, check.stdout + check.stderr
