"""A copy of the tree in which one line is broken, to see that a test fails."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from conftest import ROOT

COPIED = ["pretrain", "tests", "benchmarks", "recipes", "accelerate_configs", "docs", "scripts", "README.md"]
COPIED += ["pyproject.toml", "requirements.txt", "requirements-dev.txt"]


@dataclass(frozen=True)
class Breakage:
    """A line as it is, as it would be wrong, the promise that this breaks, and the tests that must see it."""

    file: str
    line: str
    broken: str
    promise: str
    tests: str


def copy_tree(folder: Path) -> Path:
    """Copy what the tests need of the tree into a new folder."""
    for path in (*map(ROOT.joinpath, COPIED), *ROOT.glob("*.py")):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        folder.mkdir(exist_ok=True)
        copy(path, folder / path.name)
    return folder


def run_tests(tree: Path, tests: str, folder: Path) -> subprocess.CompletedProcess:
    """Run tests of a copied tree up to the first that fails; their temporary files go to ``folder``."""
    command = [sys.executable, "-m", "pytest", "-x", *tests.split(), f"--basetemp={folder}"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


def assert_seen(breakage: Breakage, folder: Path) -> None:
    """Break the line in a copy of the tree, and assert that its tests fail there."""
    tree = copy_tree(folder / "tree")
    source = (tree / breakage.file).read_text(encoding="utf-8")
    assert source.count(breakage.line) == 1, "the line has changed: write the breakage anew"
    (tree / breakage.file).write_text(source.replace(breakage.line, breakage.broken), encoding="utf-8")
    done = run_tests(tree, breakage.tests, folder / "runs")
    assert done.returncode == 1, done.stdout[-3000:]
