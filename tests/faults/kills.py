"""SIGKILL at random moments: trainers, their readers, one rank of two, a launcher; then the same command, to its end.

What is trained has to be, to the bit, what a run that nobody killed has trained, and what was read is read once.
"""

import contextlib
import csv
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import pyarrow as pa
import pyarrow.parquet as pq

KILLS = 3
RUNS = 20
STEPS = 90
TARGETS = ("trainer", "reader", "rank", "trainer", "launcher")
FLAGS = ("--recipe", "stream.yaml", "--max_steps", str(STEPS), "--save_steps", "10", "--eval_steps", "30")


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """20 runs that read a mixture of Parquet, JSON lines and CSV while they train, each killed three times."""
    commands.copy(base, shared)
    for name, count in (("a.parquet", 150), ("b.parquet", 130), ("c.jsonl", 120), ("d.csv", 100)):
        texts = [f"{name} {i} {commands.text(i, 20 + i % 9)}" for i in range(count)]
        _write(shared / name, texts)
    sources = "sources:\n- {weight: 3, data_files: ['*.parquet']}\n- {weight: 1, data_files: [c.jsonl]}\n"
    sources += "- {weight: 1, data_files: [d.csv]}\n"
    (shared / "stream.yaml").write_text(commands.RECIPE.replace("data_files: [text.txt]\n", sources))
    wanted: dict[int, dict] = {}
    for ranks in (1, 2):
        done = commands.run("train.py", *FLAGS, "--run_name", f"whole{ranks}", cwd=shared, ranks=ranks)
        if done.code != 0:
            raise RuntimeError(f"the tree cannot train from a stream: {done.stderr}")
        wanted[ranks] = commands.bits_of(shared / "runs" / f"whole{ranks}", STEPS)
    commands.run("prepare_data.py", *FLAGS, cwd=shared)  # to their end, which a run may not need
    shards = _shards(shared)
    for number in range(RUNS):
        target, seed = TARGETS[number % len(TARGETS)], rng.random()

        def hit(folder: Path, target=target, seed=seed) -> str | None:
            dice = random.Random(seed)
            for path in shared.glob("*.*"):
                if path.is_file():
                    (folder / path.name).symlink_to(path)
            (folder / "tok").symlink_to(shared / "tok")
            ranks = 2 if target == "rank" else 1
            for kill in range(KILLS + 1):
                started = _start(target, folder, ranks)
                if kill < KILLS:
                    _kill(started, target, dice)
                done = started.wait(3 * commands.SECONDS)
                if done.code is None:
                    return f"start {kill + 1} did not end: {done.stderr[-300:]}"
                if "Traceback" in done.stderr and target not in ("launcher", "rank"):  # those print one of their own
                    return f"start {kill + 1}: traceback: {done.stderr[-300:]}"
                _end_others(folder)
            if done.code != 0:
                return f"the last start ends with {done.code}: {done.stderr[-300:]}"
            found = commands.bits_of(folder / "runs" / "stream", STEPS)
            other = [name for name, digest in _shards(folder).items() if shards.get(name) != digest]
            why = f"other shards than one reading makes: {', '.join(other)}" if other else None
            return commands.difference(found, wanted[ranks]) or why

        yield target, hit


def _write(path: Path, texts: list[str]) -> None:
    """Write a table in the format that its name ends with."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=16)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["text"], *([text] for text in texts)])
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def _start(target: str, folder: Path, ranks: int):
    if target == "launcher":
        return commands.Launched(Path(os.environ["FAULTS_TREE"]), *FLAGS, cwd=folder)
    return commands.Started("train.py", *FLAGS, cwd=folder, ranks=ranks)


def _kill(started, target: str, dice: random.Random) -> None:
    """Wait for a random moment of the run and kill the target, once it is there."""
    # A launcher imports for seconds before it starts its trainer.
    until = time.monotonic() + dice.uniform(0.2, 12.0 if target == "launcher" else 7.0)
    while time.monotonic() < until and commands.alive(started.pids[0]):
        time.sleep(0.05)
    pids = [started.pids[-1]]
    if target == "reader" or (target == "launcher" and dice.random() < 0.5):
        pids = commands.children(started.pids[0])[:1] or pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _end_others(folder: Path) -> None:
    # Trainers and readers end with their launcher or trainer by themselves: this waits for it, and for no longer.
    end = time.monotonic() + commands.SECONDS
    while time.monotonic() < end and _working_in(folder):
        time.sleep(0.05)
    if left := _working_in(folder):
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        raise RuntimeError(f"processes {left} outlive what started them")


def _working_in(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if path.readlink() == folder and commands.alive(int(path.parent.name)):
                found.append(int(path.parent.name))
    return found


def _shards(folder: Path) -> dict[str, str]:
    found = sorted((folder / "data").rglob("*.bin"))
    return {str(path.relative_to(folder / "data")): commands.digest(path) for path in found}
