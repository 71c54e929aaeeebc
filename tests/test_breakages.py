"""The product is broken on purpose, one line at a time, in a copy: the tests that breakages.txt names must fail.

Here each line and test is found in the tree; in ``make test-slow`` each breakage is tried.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT

COPIED = ["pretrain", "tests", "benchmarks", "recipes", "metrics", "accelerate_configs", "docs", "scripts", "README.md"]
COPIED += ["pyproject.toml", "requirements.txt", "requirements-dev.txt"]


@dataclass(frozen=True)
class Breakage:
    """A line as it is, as it would be wrong, and the tests that must notice."""

    file: str
    line: str
    broken: str
    tests: str

    def __str__(self) -> str:
        return f"{self.file}: {self.broken.strip() or 'without ' + self.line.strip()}"


def read() -> list[Breakage]:
    found, file, change = [], "", ("", "")
    for line in (ROOT / "tests" / "breakages.txt").read_text(encoding="utf-8").splitlines()[2:]:
        if line.startswith("    "):
            found.append(Breakage(file, *change, line.strip()))
        elif line.startswith("  "):
            before, end = json.JSONDecoder().raw_decode(line.strip())
            change = before, json.loads(line.strip()[end:].removeprefix(" -> "))
        elif line:
            file = line
    return found


BREAKAGES = read()


def copy_tree(folder: Path) -> Path:
    """Copy what the tests need of the tree into a new folder."""
    folder.mkdir()
    for path in (*map(ROOT.joinpath, COPIED), *ROOT.glob("*.py")):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, folder / path.name)
    return folder


def run_tests(tree: Path, tests: str, folder: Path) -> subprocess.CompletedProcess:
    """Run tests of a copied tree up to the first that fails; their temporary files go to ``folder``."""
    command = [sys.executable, "-m", "pytest", "-x", *tests.split(), f"--basetemp={folder}"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


def test_each_breakage_stands_once_in_its_file_and_its_tests_are_there():
    assert len(BREAKAGES) > 120
    for breakage in BREAKAGES:
        assert (ROOT / breakage.file).read_text(encoding="utf-8").count(breakage.line) == 1, breakage
        for path, _, name in (test.partition("::") for test in breakage.tests.split()):
            assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8"), breakage


@pytest.mark.slow
@pytest.mark.parametrize("breakage", BREAKAGES, ids=str)
def test_a_broken_line_is_noticed(breakage, tmp_path):
    tree = copy_tree(tmp_path / "tree")
    source = (tree / breakage.file).read_text(encoding="utf-8")
    (tree / breakage.file).write_text(source.replace(breakage.line, breakage.broken), encoding="utf-8")
    done = run_tests(tree, breakage.tests, tmp_path / "runs")
    assert done.returncode == 1, done.stdout[-3000:]


@pytest.mark.slow
def test_the_tree_as_it_is_passes(tmp_path):
    """Or a test that fails for another reason would be taken for one that notices."""
    tests = " ".join(sorted({test for breakage in BREAKAGES for test in breakage.tests.split()}))
    done = run_tests(copy_tree(tmp_path / "tree"), tests, tmp_path / "runs")
    assert done.returncode == 0, done.stdout[-3000:]
