"""Create an environment with pinned packages for each program.

An environment is created once and is used again as long as its list of packages is the same. All
environments that need PyTorch share one installation of it, which takes a gigabyte.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.programs.definitions import Program

TORCH = "torch==2.13.0"
SITE_PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
PACKAGE_LIST = "installed.txt"  # is written when the installation is complete


class NotInstalled(Exception):
    """The packages of a program could not be installed."""


def prepare(program: Program, cache: Path) -> Path:
    """Return the folder of a program's environment, which is created if necessary.

    Raises:
        NotInstalled: with the last line that the installer printed.
    """
    folder = cache / program.environment
    if program.npm:
        return create(folder, program.packages, _install_npm)
    if program.needs_torch:
        torch_folder = create(cache / "torch", (TORCH,), _install_pip)
        return create(folder, program.packages, _install_pip, torch_folder)
    return create(folder, program.packages, _install_pip)


def create(folder: Path, packages: Sequence[str], install, *arguments) -> Path:
    """Create an environment, unless it exists with these packages."""
    package_list = "\n".join(packages) + "\n"
    marker = folder / PACKAGE_LIST
    if marker.exists() and marker.read_text() == package_list:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    install(folder, packages, *arguments)
    marker.write_text(package_list)
    return folder


def variables(program: Program, folder: Path) -> Mapping[str, str]:
    """Return the environment variables under which the commands of a program are run."""
    return _with_programs(folder / ("node_modules/.bin" if program.npm else "bin"))


def of_project() -> Mapping[str, str]:
    """Return the environment variables under which commands use this project's environment."""
    return _with_programs(Path(sys.executable).parent)


def _with_programs(programs: Path) -> dict[str, str]:
    """Return environment variables with a folder at the start of PATH."""
    values = dict(os.environ)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "NODE_PATH"):
        values.pop(name, None)
    values["PATH"] = f"{programs}{os.pathsep}{values['PATH']}"
    values |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    values |= {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    return values


def _install_pip(folder: Path, packages: Sequence[str], torch_folder: Path | None = None) -> None:
    """Create a virtual environment and install packages of PyPI into it."""
    _run([sys.executable, "-m", "venv", str(folder)], folder)
    if torch_folder is not None:
        # Packages of the environment itself take precedence over those that a .pth file adds.
        path_file = folder / SITE_PACKAGES / "shared_torch.pth"
        path_file.write_text(f"{torch_folder.resolve() / SITE_PACKAGES}\n")
        packages = [TORCH, *packages]
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    _run([*command, "--disable-pip-version-check", *packages], folder)


def _install_npm(folder: Path, packages: Sequence[str]) -> None:
    """Install packages of npm, without the scripts that download binaries for GPUs."""
    if shutil.which("npm") is None:
        raise NotInstalled("npm is not installed")
    (folder / "package.json").write_text("{}\n")
    _run(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", *packages], folder)


def _run(command: list[str], folder: Path) -> None:
    """Run a command in a folder. Raises NotInstalled if it fails."""
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
        shutil.rmtree(folder, ignore_errors=True)
        raise NotInstalled(lines[-1])
