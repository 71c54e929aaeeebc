"""Train on a disk that becomes full.

The run must end with an error message and without incomplete files. With more space the same
command must resume it. The disk is a tmpfs if mounting is allowed, else a limit on the size of
files.
"""

import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import commands

MESSAGES = ("No space left", "File too large", "space", "disk")
DISK_SIZE = "64m"


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[commands.Case]:
    """Yield 40 runs on small disks, and 16 runs whose disk is full for some time."""
    whole, expected = commands.finished_run(base, shared)
    sizes = [path.stat().st_size for path in whole.rglob("*") if path.is_file()]
    can_mount = may_mount(shared)
    for _ in range(40):
        share = rng.random()
        if can_mount:
            train = partial(train_on_small_disk, int(share * 1.3 * sum(sizes)))
            run = partial(run_on_own_disk, train, base, expected)
        else:
            run = partial(run_with_size_limit, int(share * 1.2 * max(sizes)), base, expected)
        yield commands.Case(f"{share:.0%} of the disk", run)
    if not can_mount:
        return
    for _ in range(16):
        delay = rng.uniform(0.1, 2.5)
        duration = rng.uniform(0.05, 0.6)
        train = partial(train_on_temporarily_full_disk, delay, duration)
        run = partial(run_on_own_disk, train, base, expected)
        yield commands.Case(f"filled after {delay:.1f} s for {duration:.1f} s", run)


def run_on_own_disk(
    train: Callable[[Path], commands.CompletedCommand],
    base: Path,
    expected: dict,
    folder: Path,
) -> str | None:
    """Train on a mounted disk that becomes full, and again with more space."""
    mount(folder, DISK_SIZE)
    try:
        commands.copy(base, folder)
        result = train(folder)
        resize(folder, DISK_SIZE)
        return resume_problem(result, expected, folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def run_with_size_limit(max_bytes: int, base: Path, expected: dict, folder: Path) -> str | None:
    """Train with a limit on the size of each file, and again without it."""
    commands.copy(base, folder)
    result = commands.run(commands.TRAIN, folder, file_bytes=max(1, max_bytes))
    return resume_problem(result, expected, folder)


def train_on_small_disk(free_bytes: int, folder: Path) -> commands.CompletedCommand:
    """Train with this many free bytes."""
    command = ["df", "-B1", "--output=used", str(folder)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, used_bytes = output.split()
    resize(folder, str(int(used_bytes) + free_bytes))
    return commands.run(commands.TRAIN, folder)


def train_on_temporarily_full_disk(
    delay: float, duration: float, folder: Path
) -> commands.CompletedCommand:
    """Train while another program fills the disk for some time."""
    resize(folder, "16m")
    filler = threading.Thread(target=fill_disk, args=(folder / "filler", delay, duration))
    filler.start()
    result = commands.run(commands.TRAIN, folder)
    filler.join()
    return result


def fill_disk(path: Path, delay: float, duration: float) -> None:
    """After a delay write a file until the disk is full, and delete it after some seconds."""
    time.sleep(delay)
    try:
        with open(path, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        time.sleep(duration)
    path.unlink()


def mount(folder: Path, size: str) -> None:
    """Mount a tmpfs of this size."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    subprocess.run(command, check=True)


def resize(folder: Path, size: str) -> None:
    """Change the size of a mounted tmpfs."""
    command = ["mount", "-t", "tmpfs", "-o", f"remount,size={size}", "tmpfs", str(folder)]
    subprocess.run(command, check=True)


def may_mount(folder: Path) -> bool:
    """Return whether this user may mount a tmpfs."""
    mount_point = folder / "mount"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "tmpfs", str(mount_point)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        return False
    subprocess.run(["umount", str(mount_point)], check=True)
    return True


def resume_problem(result: commands.CompletedCommand, expected: dict, folder: Path) -> str | None:
    """Check the result on the full disk, resume the run, and check the result."""
    if result.code != 0:
        problem = commands.command_problem(result, *MESSAGES)
        if problem:
            return problem
    if "Traceback" in result.stderr:
        return "success, with a traceback"
    return commands.training_problem(commands.run(commands.TRAIN, folder), folder, expected)
