"""The package, installed for another project."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
USE = """
from ursa_minor.base import gpus
from ursa_minor.hub import model_card
from ursa_minor.optim.muon import TrainerMuon
from ursa_minor.post import chat

assert gpus.find("a6000") and TrainerMuon
print(gpus.__file__)
"""


def test_installed_package_works_in_another_project(tmp_path):
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools 77 or newer is needed to build the package without a network")

    # Given a copy of the tracked files, so that no build folder is left here
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    source = tmp_path / "source"
    for name in listed.stdout.split("\0"):
        if name.startswith(
            ("ursa_minor/", "requirements", "pyproject.toml", "README.md", "LICENSE")
        ):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())

    # When it is installed into an empty folder
    target = tmp_path / "target"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run(
        [*install, "--target", str(target), str(source)], check=True, capture_output=True
    )

    # Then another project imports it from there, with its data files
    environment = os.environ | {"PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(target / "ursa_minor" / "base" / "gpus.py")
