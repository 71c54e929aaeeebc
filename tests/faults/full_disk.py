"""A disk that is full at some byte: one line, nothing half-made, and with more space the same command resumes.

The disk is a tmpfs where mounting is allowed, else the limit of a process on the size of its files.
"""

import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import damage

FULL = ("No space left", "File too large", "space", "disk")


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """40 runs on disks that hold a part of what they write; 16 whose disk another program fills for a while."""
    whole, wanted = damage.finished(base, shared)
    size = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file())
    mounts = _may_mount(shared)
    for _ in range(40):
        share = rng.random()

        def hit(folder: Path, share=share) -> str | None:
            if not mounts:
                return _limited(base, folder, wanted, share)
            _mount(folder, "64m")
            try:
                commands.copy(base, folder)
                used = _used(folder)
                _mount(folder, str(int(used + share * 1.3 * size)), "remount,")
                done = commands.run(*damage.TRAIN, cwd=folder)
                why = _judge(done)
                _mount(folder, "64m", "remount,")
                return why or damage.ends(commands.run(*damage.TRAIN, cwd=folder), folder, wanted)
            finally:
                subprocess.run(["umount", "-l", str(folder)], check=False)

        yield f"{share:.0%} of the disk", hit
    for _ in range(16 if mounts else 0):
        begin, length = rng.uniform(0.1, 2.5), rng.uniform(0.05, 0.6)

        def hit(folder: Path, begin=begin, length=length) -> str | None:
            _mount(folder, "16m")
            try:
                commands.copy(base, folder)
                filler = threading.Thread(target=_fill, args=(folder, begin, length))
                filler.start()
                done = commands.run(*damage.TRAIN, cwd=folder)
                filler.join()
                if done.code and (why := _judge(done)):
                    return why
                return damage.ends(commands.run(*damage.TRAIN, cwd=folder) if done.code else done, folder, wanted)
            finally:
                subprocess.run(["umount", "-l", str(folder)], check=False)

        yield f"filled after {begin:.1f} s for {length:.1f} s", hit


def _judge(done: commands.Done) -> str | None:
    if done.code == 0:
        return "success, with a traceback" if "Traceback" in done.stderr else None
    return commands.fault_of(done, *FULL)


def _limited(base: Path, folder: Path, wanted: dict, share: float) -> str | None:
    commands.copy(base, folder)
    largest = max(path.stat().st_size for path in (base.parent / "disk" / "whole").rglob("*") if path.is_file())
    done = commands.run(*damage.TRAIN, cwd=folder, file_bytes=max(1, int(share * 1.2 * largest)))
    return _judge(done) or damage.ends(commands.run(*damage.TRAIN, cwd=folder), folder, wanted)


def _may_mount(folder: Path) -> bool:
    place = folder / "mount"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], capture_output=True).returncode == 0
    if mounted:
        subprocess.run(["umount", str(place)], check=True)
    return mounted


def _mount(folder: Path, size: str, how: str = "") -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"{how}size={size}", "tmpfs", str(folder)], check=True)


def _used(folder: Path) -> int:
    about = subprocess.run(["df", "-B1", "--output=used", str(folder)], capture_output=True, text=True, check=True)
    return int(about.stdout.split()[1])


def _fill(folder: Path, begin: float, length: float) -> None:
    time.sleep(begin)
    path = folder / "another-programs-file"
    try:
        with open(path, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        time.sleep(length)
    path.unlink()
