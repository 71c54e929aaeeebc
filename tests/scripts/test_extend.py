"""docs/extend.md: each addition applies to this tree, trains, and keeps the rules of the house."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
# By the section's title: the diff, and the commands that try it.
ADDITIONS = {
    title: ((ROOT / path).read_text(encoding="utf-8"), commands)
    for title, path, commands in re.findall(
        r"^## (.*?)\n.*?^```sh\ngit apply (\S+)\n(.*?)^```", PAGE, re.M | re.S
    )
}
pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="needs git")


def git(*words: str, at: Path, text: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(["git", *words], cwd=at, input=text, capture_output=True, text=True)


def test_every_addition_applies_to_this_tree_and_is_short(tmp_path):
    assert [*ADDITIONS] == [
        "Add an optimizer",
        "Add an architecture",
        "Add a loss key",
        "Add a reader",
        "Add a tracker",
        "Add a task",
    ]
    for title, (diff, _) in ADDITIONS.items():
        assert not git("apply", "--check", "-", at=ROOT, text=diff).stderr, title
        assert 0 < len(re.findall(r"^[+-](?!\+\+ |-- )", diff, re.MULTILINE)) <= 60, title
        if title in ("Add a reader", "Add a tracker", "Add an architecture", "Add a task"):
            files = 3 if title == "Add a reader" else 2
            assert len(re.findall(r"^\+\+\+ b/\S+\.py$", diff, re.MULTILINE)) == files, title


@pytest.mark.slow
@pytest.mark.parametrize("title", ADDITIONS)
def test_an_addition_trains_three_steps_and_keeps_the_rules_of_the_house(title, tmp_path):
    environment, (diff, commands) = ROOT / ".venv", ADDITIONS[title]
    if not (environment / ".installed-dev").exists():
        pytest.skip("make check needs the environment of make test")
    if git("rev-parse", at=ROOT).returncode:
        pytest.skip("not a git checkout")
    tree = tmp_path / "tree"
    for name in git("ls-files", "-z", at=ROOT).stdout.split("\0")[:-1]:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)  # with its time, or make would install anew
    git("init", "--quiet", at=tree)
    assert not git("apply", "-", at=tree, text=diff).stderr
    git("add", "--all", at=tree)  # a test asks git what there is
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = {"cwd": tree, "capture_output": True, "text": True, "env": os.environ | {"PATH": path}}
    done = subprocess.run(["bash", "-e", "-c", commands], **words)
    assert not done.returncode, done.stderr
    (run,) = (tree / "runs").iterdir()
    assert '"train/loss"' in (run / "metrics.jsonl").read_text()
    assert "step 3:" in done.stderr and "disabled" not in done.stderr, done.stderr
    again = subprocess.run(
        ["bash", "-e", "-c", commands.splitlines()[-1]], **words
    )  # its checkpoint is resumed
    assert not again.returncode and "resumed from" in again.stderr, again.stderr
    done = subprocess.run(["make", "check", f"VENV={environment}"], **words)
    assert not done.returncode, done.stdout + done.stderr
