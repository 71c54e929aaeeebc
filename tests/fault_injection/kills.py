"""SIGKILL at random moments: trainers, their readers, one rank of two, a launcher; then the same command, to its end.

What is trained has to be, to the bit, what a run that nobody killed has trained, and what was read is read once.
"""

import contextlib
import csv
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import commands
import pyarrow as pa
import pyarrow.parquet as pq

KILLS = 3
RUNS = 20
STEPS = 90
TARGETS = ("trainer", "reader", "rank", "trainer", "launcher")
FLAGS = (
    "--recipe",
    "stream.yaml",
    "--max_steps",
    str(STEPS),
    "--save_steps",
    "10",
    "--eval_steps",
    "30",
)


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """20 runs that read a mixture of Parquet, JSON lines and CSV while they train, each killed three times."""
    commands.copy(base, shared)
    texts = {
        name: [f"{name} {i} {commands.text(i, 20 + i % 9)}" for i in range(150)] for name in "abcd"
    }
    for name in "ab":
        pq.write_table(
            pa.table({"text": texts[name]}), shared / f"{name}.parquet", row_group_size=16
        )
    (shared / "c.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts["c"])
    )
    with (shared / "d.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts["d"])])
    sources = (
        "sources:\n- {weight: 3, data_files: ['*.parquet']}\n- {weight: 1, data_files: [c.jsonl]}\n"
    )
    sources += "- {weight: 1, data_files: [d.csv]}\n"
    (shared / "stream.yaml").write_text(
        commands.RECIPE.replace("data_files: [text.txt]\n", sources)
    )
    wanted: dict[int, dict] = {}
    for ranks in (1, 2):
        commands.run_or_raise(
            commands.run(("train.py", *FLAGS, "--run_name", f"whole{ranks}"), shared, ranks=ranks)
        )
        wanted[ranks] = commands.run_digests(shared / "runs" / f"whole{ranks}", STEPS)
    commands.run_or_raise(
        commands.run(("prepare_data.py", *FLAGS), shared)
    )  # to their end, which a run may not need
    for number in range(RUNS):
        target = TARGETS[number % len(TARGETS)]
        yield target, partial(killed, target, random.Random(rng.random()), shared, wanted)


def killed(
    target: str, dice: random.Random, shared: Path, wanted: dict[int, dict], folder: Path
) -> str | None:
    """Be a case: start a run in a folder until it ends by itself, and kill the first starts."""
    for path in [*(path for path in shared.glob("*.*") if path.is_file()), shared / "tok"]:
        (folder / path.name).symlink_to(path)
    ranks, tree = 2 if target == "rank" else 1, Path(os.environ["FAULTS_TREE"])
    for kill in range(KILLS + 1):
        if target == "launcher":
            command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
            command += [str(tree / "accelerate_configs/cpu.yaml"), str(tree / "train.py"), *FLAGS]
            environment = {
                name: value for name, value in os.environ.items() if name != "PYTHONPATH"
            }
            started = commands.Started(
                command, folder, environment | {"OMP_NUM_THREADS": "1"}, program=True
            )
        else:
            started = commands.Started(("train.py", *FLAGS), folder, ranks=ranks)
        if kill < KILLS:
            _kill(started, target, dice)
        done = started.wait(3 * commands.SECONDS)
        if done.code is None:
            return f"start {kill + 1} did not end: {done.stderr[-300:]}"
        if "Traceback" in done.stderr and target not in (
            "launcher",
            "rank",
        ):  # those print one of their own
            return f"start {kill + 1}: traceback: {done.stderr[-300:]}"
        # Trainers and readers end with their launcher or trainer by themselves: this waits for it, and for no longer.
        end = time.monotonic() + commands.SECONDS
        while (left := _working_in(folder)) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        if left:
            return f"processes {left} outlive what started them"
    if done.code != 0:
        return f"the last start ends with {done.code}: {done.stderr[-300:]}"
    whole = _shards(shared)
    other = [name for name, digest in _shards(folder).items() if whole.get(name) != digest]
    why = f"other shards than one reading makes: {', '.join(other)}" if other else None
    return (
        commands.difference(commands.run_digests(folder / "runs" / "stream", STEPS), wanted[ranks])
        or why
    )


def _kill(started: commands.Started, target: str, dice: random.Random) -> None:
    """Wait for a random moment of the run and kill the target, once it is there."""
    # A launcher imports for seconds before it starts its trainer.
    until = time.monotonic() + dice.uniform(0.2, 12.0 if target == "launcher" else 7.0)
    while time.monotonic() < until and commands.is_running(started.pids[0]):
        time.sleep(0.05)
    pid = started.pids[-1]
    if target == "reader" or (target == "launcher" and dice.random() < 0.5):
        for task in Path(f"/proc/{started.pids[0]}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                pid = int((task.read_text().split() or [pid])[0])
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _working_in(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if path.readlink() == folder and commands.is_running(int(path.parent.name)):
                found.append(int(path.parent.name))
    return found


def _shards(folder: Path) -> dict[str, str]:
    found = sorted((folder / "data").rglob("*.bin"))
    return {str(path.relative_to(folder / "data")): commands.digest(path) for path in found}
