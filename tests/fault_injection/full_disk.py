"""A disk that is full at some byte: one line, nothing half-made, and with more space the same command resumes.

The disk is a tmpfs where mounting is allowed, else the limit of a process on the size of its files.
"""

import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import commands

FULL = ("No space left", "File too large", "space", "disk")


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """40 runs on disks that hold a part of what they write; 16 whose disk another program fills for a while."""
    whole, wanted = commands.finished_run(base, shared)
    sizes = [path.stat().st_size for path in whole.rglob("*") if path.is_file()]
    mounts = may_mount(shared)
    for _ in range(40):
        share = rng.random()
        small = partial(mounted, partial(too_small, int(share * 1.3 * sum(sizes))))
        hit = small if mounts else partial(limited, int(share * 1.2 * max(sizes)))
        yield f"{share:.0%} of the disk", partial(hit, base, wanted)
    for _ in range(16 if mounts else 0):
        begin, length = rng.uniform(0.1, 2.5), rng.uniform(0.05, 0.6)
        hit = partial(mounted, partial(filled, begin, length), base, wanted)
        yield f"filled after {begin:.1f} s for {length:.1f} s", hit


def mounted(hit: Callable, base: Path, wanted: dict, folder: Path) -> str | None:
    """Be a case on a disk of its own: a run that the disk may end, then, with more space, the same command again."""
    mount(folder, "64m")
    try:
        commands.copy(base, folder)
        done = hit(folder)
        mount(folder, "64m", "remount,")
        return _resumes(done, wanted, folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def limited(most: int, base: Path, wanted: dict, folder: Path) -> str | None:
    """Be a case whose files grow to a number of bytes at most."""
    done = commands.run(commands.TRAIN, commands.copy(base, folder), file_bytes=max(1, most))
    return _resumes(done, wanted, folder)


def too_small(more: int, folder: Path) -> commands.Done:
    """Run where so many bytes are free."""
    used = subprocess.run(
        ["df", "-B1", "--output=used", folder], capture_output=True, text=True, check=True
    ).stdout
    mount(folder, str(int(used.split()[1]) + more), "remount,")
    return commands.run(commands.TRAIN, folder)


def filled(begin: float, length: float, folder: Path) -> commands.Done:
    """Run while another program fills the disk for a while."""
    mount(folder, "16m", "remount,")
    filler = threading.Thread(target=_fill, args=(folder / "another-programs-file", begin, length))
    filler.start()
    done = commands.run(commands.TRAIN, folder)
    filler.join()
    return done


def mount(folder: Path, size: str, how: str = "") -> None:
    """Mount a tmpfs of this size, or give it this size."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"{how}size={size}", "tmpfs", str(folder)], check=True
    )


def may_mount(folder: Path) -> bool:
    """Return whether this user may mount a tmpfs."""
    (place := folder / "mount").mkdir()
    done = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "tmpfs", str(place)], capture_output=True
        ).returncode
        == 0
    )
    if done:
        subprocess.run(["umount", str(place)], check=True)
    return done


def _resumes(done: commands.Done, wanted: dict, folder: Path) -> str | None:
    if done.code and (why := commands.command_problem(done, *FULL)):
        return why
    if "Traceback" in done.stderr:
        return "success, with a traceback"
    return commands.training_problem(commands.run(commands.TRAIN, folder), folder, wanted)


def _fill(path: Path, begin: float, length: float) -> None:
    time.sleep(begin)
    try:
        with open(path, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        time.sleep(length)
    path.unlink()
