"""The installed package works in another project."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OTHER_PROJECT = """
from ursa_minor.base import gpus
from ursa_minor.hub import model_card
from ursa_minor.optim.muon import TrainerMuon
from ursa_minor.post import chat

assert gpus.find("a6000") and TrainerMuon
print(gpus.__file__)
"""
SOURCES = ("ursa_minor/", "requirements", "pyproject.toml", "README.md", "LICENSE")


def copy_sources(folder: Path) -> None:
    """Copy the tracked files of the package, so that no build folder remains in the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split("\0"):
        if name.startswith(SOURCES):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def install(source: Path, target: Path) -> None:
    """Install a package into a folder, without a network."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    flags = ["--no-build-isolation", "--no-compile", "--disable-pip-version-check"]
    command = [*pip, *flags, "--target", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True)


def test_package_data_has_all_file_types():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = pyproject["tool"]["setuptools"]["package-data"]["ursa_minor"]
    files = [path for path in (ROOT / "ursa_minor").rglob("*") if path.is_file()]

    suffixes = {path.suffix for path in files} - {".py", ".pyc"}

    assert suffixes == {pattern.removeprefix("**/*") for pattern in patterns}


@pytest.mark.slow
def test_installed_package_works_in_another_project(tmp_path):
    setuptools_version = importlib.metadata.version("setuptools")
    if int(setuptools_version.split(".")[0]) < 77:
        pytest.skip("setuptools 77 or newer is needed to build the package without a network")
    source = tmp_path / "source"
    target = tmp_path / "target"
    copy_sources(source)

    install(source, target)
    process = subprocess.run(
        [sys.executable, "-c", OTHER_PROJECT],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert process.stdout.strip() == str(target / "ursa_minor" / "base" / "gpus.py")
