"""Train in unusual environments: locales, limits, folders, variables and signals.

The trainer is a program here. It must end with the weights of a run in a plain environment, with an
error message and a status, or by the signal that was sent.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import commands
import full_disk

TIMEOUT = 150.0  # The imports alone take many seconds while other cases run.
STEPS = 3
FLAGS = (*commands.RECIPE_FLAGS, "--max_steps", str(STEPS), "--warmup_steps", "1")
RUN_COMMAND = 'exec "$@"'
READ_ONLY_MOUNT = 'unshare -m bash -c \'mount -t tmpfs -o ro tmpfs {} && exec "$@"\' ro "$@"'


@dataclass(frozen=True)
class Environment:
    """An unusual environment.

    Args:
        title: a short description.
        variables: environment variables. None unsets a variable.
        shell: the bash program that runs the command.
        subfolder: the folder in which the command runs, relative to that of the case.
        python_flags: flags of Python.
        signal: sent to the command after a random time, if not 0.
        is_reproducible: whether the weights must equal those of a plain environment.
    """

    title: str
    variables: dict[str, str | None] = field(default_factory=dict)
    shell: str = RUN_COMMAND
    subfolder: str = ""
    python_flags: tuple[str, ...] = ()
    signal: int = 0
    is_reproducible: bool = True

    def process_variables(self, home: Path) -> dict[str, str]:
        """Return all variables of the command's environment."""
        variables: dict[str, str | None] = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            **commands.ENVIRONMENT,
            **self.variables,
        }
        return {name: value for name, value in variables.items() if value is not None}


INVALID_VARIABLES = (
    "OMP_NUM_THREADS=abc",
    "OMP_NUM_THREADS=-1",
    "OMP_NUM_THREADS=0",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=x",
    "HF_ENDPOINT=http://me:SECRET@localhost:9",
    "HF_HOME=/dev/null/x",
    "MPLBACKEND=garbage",
    "KMP_AFFINITY=garbage",
    "CUDA_VISIBLE_DEVICES=garbage",
    "COLUMNS=-1",
    "TZ=Nowhere/At_all",
    "PYTHONOPTIMIZE=1",
)
SUBFOLDERS = (
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
LIMITS = ("-n 24", "-n 12", "-s 300", "-f 2", "-v 2500000", "-v 1500000", "-v 700000")
CLOSED_STREAMS = ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def invalid_variable(assignment: str) -> Environment:
    """Return the environment with this variable."""
    name, value = assignment.split("=", 1)
    is_reproducible = not name.startswith("OMP")  # Results depend on the number of threads.
    return Environment(assignment, {name: value}, is_reproducible=is_reproducible)


ENVIRONMENTS = (
    Environment("locale C, UTF8=0", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    Environment("locale tr_TR", {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"}),
    Environment("ASCII streams", {"PYTHONIOENCODING": "ascii"}),
    Environment("umask 077", shell=f"umask 077; {RUN_COMMAND}"),
    Environment("umask 0777", shell=f"umask 0777; {RUN_COMMAND}"),
    Environment("HOME is not set", {"HOME": None}),
    Environment("HOME is missing", {"HOME": "/nowhere/at/all"}),
    Environment("HOME is a file", {"HOME": "/etc/passwd"}),
    Environment("TMPDIR is missing", {"TMPDIR": "/nowhere/at/all"}),
    Environment("TMPDIR is read-only", {"TMPDIR": "/mnt"}, READ_ONLY_MOUNT.format("/mnt")),
    Environment("/dev/shm is read-only", {}, READ_ONLY_MOUNT.format("/dev/shm")),
    *(Environment(f"ulimit {limit}", shell=f"ulimit {limit}; {RUN_COMMAND}") for limit in LIMITS),
    *(Environment(f"closed {streams}", shell=f'exec "$@" {streams}') for streams in CLOSED_STREAMS),
    Environment("full stdout", shell='exec "$@" >/dev/full'),
    Environment("Python -O", python_flags=("-O",)),
    *(Environment(f"in {folder!r}", subfolder=folder) for folder in SUBFOLDERS),
    *(invalid_variable(assignment) for assignment in INVALID_VARIABLES),
    *(Environment(f"{number.name} early", signal=number) for number in SIGNALS * 4),
)


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[commands.Case]:
    """Yield each environment once. The order depends on the seed, and so does each quarter."""
    commands.run_or_raise(commands.run(("train.py", *FLAGS), commands.copy(base, shared)))
    expected = commands.run_digests(shared / commands.RUN, STEPS)
    commands.run_or_raise(commands.run(("prepare_data.py", *FLAGS), shared))
    subprocess.run(["rm", "-rf", str(shared / "runs")], check=True)
    may_mount = full_disk.may_mount(shared)
    inputs = [path for path in shared.iterdir() if path.is_file() or path.name in ("data", "tok")]
    environments = [item for item in ENVIRONMENTS if may_mount or "unshare" not in item.shell]
    for environment in rng.sample(environments, len(environments)):
        signal_delay = rng.uniform(0.0, 4.0)
        run = partial(train_in, environment, inputs, expected, signal_delay)
        yield commands.Case(environment.title, run)


def train_in(
    environment: Environment,
    inputs: list[Path],
    expected: dict,
    signal_delay: float,
    folder: Path,
) -> str | None:
    """Train in this environment. If it has a signal, send it after the delay in seconds."""
    cwd = folder / environment.subfolder
    cwd.mkdir(exist_ok=True)
    subprocess.run(["cp", "-a", *map(str, inputs), str(cwd)], check=True)
    script = str(Path(os.environ["FAULTS_TREE"], "train.py"))
    python = [sys.executable, *environment.python_flags, script, *FLAGS]
    command = ["bash", "-c", environment.shell, "case", *python]

    running = commands.start_program(command, cwd, environment.process_variables(folder))
    if environment.signal:
        time.sleep(signal_delay)
        os.kill(running.pids[0], environment.signal)
    result = running.wait(TIMEOUT)
    running.kill()  # Also kills a reader that outlives its trainer.

    if "SECRET" in result.stdout + result.stderr:
        return "a secret of the environment is printed"
    number = environment.signal
    if number and result.code in (-number, 128 + number):
        return "a traceback" if "Traceback" in result.stderr else None
    if not environment.is_reproducible:
        expected = {}
    # The message of an error need not name a culprit.
    return commands.training_problem(result, cwd, expected, "", steps=STEPS)
