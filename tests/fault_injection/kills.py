"""Send SIGKILL at random moments to trainers, readers, one rank of two, or a launcher.

The same command is then started until it finishes. The result must be bitwise identical to that of
the uninterrupted run, and each row must be read once.
"""

import contextlib
import csv
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import commands
import pyarrow as pa
import pyarrow.parquet as pq

KILLS = 3
RUNS = 20
STEPS = 90
TARGETS = ("trainer", "reader", "rank", "trainer", "launcher")
RECIPE_NAME = "stream.yaml"
SOURCES = """sources:
- {weight: 3, data_files: ['*.parquet']}
- {weight: 1, data_files: [c.jsonl]}
- {weight: 1, data_files: [d.csv]}
"""
FLAGS = (
    *("--recipe", RECIPE_NAME),
    *("--max_steps", str(STEPS)),
    *("--save_steps", "10"),
    *("--eval_steps", "30"),
)
TRAIN = ("train.py", *FLAGS)


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[commands.Case]:
    """Yield 20 runs that read a mixture of files while they train. Each is killed three times."""
    commands.copy(base, shared)
    write_sources(shared)
    recipe = commands.RECIPE.replace("data_files: [text.txt]\n", SOURCES)
    (shared / RECIPE_NAME).write_text(recipe)
    expected: dict[int, dict] = {}
    for ranks in (1, 2):
        name = f"whole{ranks}"
        result = commands.run((*TRAIN, "--run_name", name), shared, ranks=ranks)
        commands.run_or_raise(result)
        expected[ranks] = commands.run_digests(shared / "runs" / name, STEPS)
    # A run may not need all shards.
    commands.run_or_raise(commands.run(("prepare_data.py", *FLAGS), shared))
    for number in range(RUNS):
        target = TARGETS[number % len(TARGETS)]
        ranks = 2 if target == "rank" else 1
        case_rng = random.Random(rng.random())
        run = partial(train_with_kills, target, case_rng, shared, expected[ranks])
        yield commands.Case(target, run)


def write_sources(folder: Path) -> None:
    """Write two Parquet files, a JSON lines file and a CSV file."""
    texts = {}
    for name in "abcd":
        texts[name] = [f"{name} {i} {commands.text(i, 20 + i % 9)}" for i in range(150)]
    for name in "ab":
        table = pa.table({"text": texts[name]})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=16)
    lines = [json.dumps({"text": text}) + "\n" for text in texts["c"]]
    (folder / "c.jsonl").write_text("".join(lines))
    with (folder / "d.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text"])
        writer.writerows([text] for text in texts["d"])


def train_with_kills(
    target: str, rng: random.Random, shared: Path, expected: dict, folder: Path
) -> str | None:
    """Start a run until it finishes, kill the first starts, and check the result."""
    inputs = [path for path in shared.glob("*.*") if path.is_file()]
    for path in (*inputs, shared / "tok"):
        (folder / path.name).symlink_to(path)
    for number in range(1, KILLS + 2):
        running = start(target, folder)
        if number <= KILLS:
            kill(running, target, rng)
        result = running.wait(3 * commands.TIMEOUT)
        problem = start_problem(result, target, folder)
        if problem:
            return f"start {number}: {problem}"
    if result.code != 0:
        return f"the last start ends with {result.code}: {result.stderr[-300:]}"
    digests = commands.run_digests(folder / "runs" / "stream", STEPS)
    return commands.difference(digests, expected) or shard_problem(shared, folder)


def start(target: str, folder: Path) -> commands.RunningCommand:
    """Start the command that contains the target."""
    if target != "launcher":
        return commands.start_script(TRAIN, folder, ranks=2 if target == "rank" else 1)
    tree = Path(os.environ["FAULTS_TREE"])
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(tree / "accelerate_configs/cpu.yaml")),
        *(str(tree / "train.py"), *FLAGS),
    ]
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    environment["OMP_NUM_THREADS"] = "1"
    return commands.start_program(command, folder, environment)


def kill(running: commands.RunningCommand, target: str, rng: random.Random) -> None:
    """Kill the target at a random moment."""
    # A launcher imports for seconds before it starts its trainer.
    max_seconds = 12.0 if target == "launcher" else 7.0
    deadline = time.monotonic() + rng.uniform(0.2, max_seconds)
    while time.monotonic() < deadline and commands.is_running(running.pids[0]):
        time.sleep(0.05)
    pid = running.pids[-1]
    if target == "reader" or (target == "launcher" and rng.random() < 0.5):
        pid = child_of(running.pids[0]) or pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def child_of(pid: int) -> int | None:
    """Return the id of a child process, or None."""
    child = None
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children = path.read_text().split()
            if children:
                child = int(children[0])
    return child


def start_problem(result: commands.CompletedCommand, target: str, folder: Path) -> str | None:
    """Return the problem of a start that was killed or has ended, or None."""
    if result.code is None:
        return f"did not end: {result.stderr[-300:]}"
    # Launchers and ranks print tracebacks of their own.
    if "Traceback" in result.stderr and target not in ("launcher", "rank"):
        return f"traceback: {result.stderr[-300:]}"
    remaining = wait_for_processes(folder)
    for pid in remaining:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if remaining:
        return f"processes {remaining} continue to run"
    return None


def wait_for_processes(folder: Path) -> list[int]:
    """Wait until no process works in a folder. Return those that still run after the timeout.

    Trainers end with their launcher, and readers with their trainer.
    """
    deadline = time.monotonic() + commands.TIMEOUT
    processes = processes_in(folder)
    while processes and time.monotonic() < deadline:
        time.sleep(0.05)
        processes = processes_in(folder)
    return processes


def processes_in(folder: Path) -> list[int]:
    """Return the ids of the running processes whose working directory is this folder."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        pid = int(path.parent.name)
        with contextlib.suppress(OSError):
            if path.readlink() == folder and commands.is_running(pid):
                pids.append(pid)
    return pids


def shard_problem(shared: Path, folder: Path) -> str | None:
    """Compare the shards with those of an uninterrupted preparation."""
    expected = shard_digests(shared)
    different = []
    for name, digest in shard_digests(folder).items():
        if expected.get(name) != digest:
            different.append(name)
    if not different:
        return None
    return f"shards differ from the uninterrupted preparation: {', '.join(different)}"


def shard_digests(folder: Path) -> dict[str, str]:
    """Return the digest of each shard by name."""
    data = folder / "data"
    paths = sorted(data.rglob("*.bin"))
    return {str(path.relative_to(data)): commands.digest(path) for path in paths}
