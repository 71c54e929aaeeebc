"""A trainer as a process of its own, in surroundings that nobody had in mind: locales, limits, folders, variables, signals.

It ends with the weights of a run in plain surroundings, or with one line and a status, or by the signal that was sent.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import commands
import full_disk

SECONDS = 150.0  # imports alone take many seconds while other cases run
TRAIN = ("train.py", "--recipe", "tiny.yaml", "--max_steps", "3", "--warmup_steps", "1")
UNSHARED = 'unshare -m bash -c \'mount -t tmpfs -o ro tmpfs {} && exec "$@"\' ro "$@"'


@dataclass(frozen=True)
class Row:
    """What is other than usual: variables (None: not set), words of a shell before the command, where it runs, Python's
    flags, the signal that comes; ``bits``: whether equal weights are promised there."""

    title: str
    variables: dict[str, str | None] = field(default_factory=dict)
    shell: str = 'exec "$@"'
    place: str = ""
    flags: tuple[str, ...] = ()
    signal: int = 0
    bits: bool = True


GARBAGE = """OMP_NUM_THREADS=abc OMP_NUM_THREADS=-1 OMP_NUM_THREADS=0 ACCELERATE_GRADIENT_ACCUMULATION_STEPS=x
HF_ENDPOINT=http://me:SECRET@localhost:9 HF_HOME=/dev/null/x MPLBACKEND=garbage KMP_AFFINITY=garbage
CUDA_VISIBLE_DEVICES=garbage COLUMNS=-1 TZ=Nowhere/At_all PYTHONOPTIMIZE=1"""
PLACES = (
    "my runs",
    'it\'s "quoted"',
    "two\nlines",
    "🦣",
    "\u202egnp",
    "[a]*?",
    "%d{x}",
    "#?token=x",
    "-dash",
    "caf\udce9",
)
ROWS = (
    Row("locale C, UTF8=0", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    Row("locale tr_TR", {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"}),
    Row("ASCII streams", {"PYTHONIOENCODING": "ascii"}),
    Row("umask 077", shell='umask 077; exec "$@"'),
    Row("umask 0777", shell='umask 0777; exec "$@"'),
    Row("HOME is not set", {"HOME": None}),
    Row("HOME is missing", {"HOME": "/nowhere/at/all"}),
    Row("HOME is a file", {"HOME": "/etc/passwd"}),
    Row("TMPDIR is missing", {"TMPDIR": "/nowhere/at/all"}),
    Row("TMPDIR is read-only", {"TMPDIR": "/mnt"}, UNSHARED.format("/mnt")),
    Row("/dev/shm is read-only", {}, UNSHARED.format("/dev/shm")),
    *(
        Row(f"ulimit {limit}", shell=f'ulimit {limit}; exec "$@"')
        for limit in ("-n 24", "-n 12", "-s 300", "-f 2")
    ),
    *(
        Row(f"ulimit -v {kib}", shell=f'ulimit -v {kib}; exec "$@"')
        for kib in (2_500_000, 1_500_000, 700_000)
    ),
    *(
        Row(f"closed {what}", shell=f'exec "$@" {what}')
        for what in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")
    ),
    Row("full stdout", shell='exec "$@" >/dev/full'),
    Row("Python -O", flags=("-O",)),
    *(Row(f"in {place!r}", place=place) for place in PLACES),
    *(
        Row(given, dict([given.split("=", 1)]), bits=not given.startswith("OMP"))
        for given in GARBAGE.split()
    ),
    *(
        Row(f"{which.name} early", signal=which)
        for which in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) * 4
    ),
)


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """Each row once, in an order of the seed's, so that another seed's quarter is another one."""
    commands.run_or_raise(commands.run(TRAIN, commands.copy(base, shared)))
    wanted = commands.run_digests(shared / commands.RUN, 3)
    commands.run_or_raise(commands.run(("prepare_data.py", *TRAIN[1:]), shared))
    subprocess.run(["rm", "-rf", str(shared / "runs")], check=True)
    may_mount = full_disk.may_mount(shared)
    given = [path for path in shared.iterdir() if path.is_file() or path.name in ("data", "tok")]
    rows = [row for row in ROWS if may_mount or "unshare" not in row.shell]
    for row in rng.sample(rows, len(rows)):
        yield row.title, partial(surrounded, row, given, wanted, rng.uniform(0.0, 4.0))


def surrounded(
    row: Row, given: list[Path], wanted: dict, moment: float, folder: Path
) -> str | None:
    """Be a case: train in these surroundings; where a signal is to come, after so many seconds."""
    place = folder / row.place
    place.mkdir(exist_ok=True)
    subprocess.run(["cp", "-a", *map(str, given), str(place)], check=True)
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        **commands.ENVIRONMENT,
        **row.variables,
    }
    environment = {name: value for name, value in variables.items() if value is not None}
    python = [
        sys.executable,
        *row.flags,
        str(Path(os.environ["FAULTS_TREE"], TRAIN[0])),
        *TRAIN[1:],
    ]
    started = commands.Started(
        ["bash", "-c", row.shell, "case", *python], place, environment, program=True
    )
    if row.signal:
        time.sleep(moment)
        os.kill(started.pids[0], row.signal)
    done = started.wait(SECONDS)
    started.kill()  # a reader that outlives its trainer, too
    if "SECRET" in done.stdout + done.stderr:
        return "a secret of the environment is printed"
    if row.signal and done.code in (-row.signal, 128 + row.signal):
        return "a traceback" if "Traceback" in done.stderr else None
    return commands.training_problem(done, place, wanted if row.bits else {}, "", steps=3)
