"""Run the project's commands, of any checkout, and check how they end.

The driver imports nothing from the project, so an older checkout can be tested by the same rules.
"""

import contextlib
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
# Longer than any command here needs on two busy cores. A user would not wait longer either.
TIMEOUT = 60.0
STEPS = 12
RECIPE = f"""data_files: [text.txt]
tokenizer: tok
validation_fraction: 0.1
validation_tokens: 60
shard_tokens: 150
shuffle_block_tokens: 64
n_layer: 1
n_head: 2
n_embd: 32
vocab_size: 320
sequence_length: 16
resid_pdrop: 0.1
embd_pdrop: 0.1
attn_pdrop: 0.1
tokens_per_step: 64
max_steps: {STEPS}
per_device_train_batch_size: 2
learning_rate: 3.0e-3
min_lr_ratio: 0.1
warmup_steps: 3
lr_scheduler_type: cosine
weight_decay: 0.1
adam_beta1: 0.9
adam_beta2: 0.95
adam_epsilon: 1.0e-8
max_grad_norm: 1.0
seed: 1
data_seed: 2
logging_steps: 1
eval_steps: 6
eval_tokens: 160
sample_steps: 0
save_steps: 3
"""
PHRASE = "the cat sat on the mat and the dog ate a red hat while rain fell on old town"
WORDS = PHRASE.split()
RECIPE_FLAGS = ("--recipe", "tiny.yaml")
TRAIN = ("train.py", *RECIPE_FLAGS, "--save_total_limit", "0")
PREPARE = ("prepare_data.py", *RECIPE_FLAGS)
RUN = Path("runs/tiny")
ENVIRONMENT = {
    # Results depend on the number of threads.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "ACCELERATE_USE_CPU": "true",
}
# Modules that take seconds to import. Those that an older checkout lacks are ignored.
PRELOADED_MODULES = [
    "matplotlib.pyplot",
    "transformers.generation.utils",
    "transformers.models.gpt2.modeling_gpt2",
    "train",
    "prepare_data",
    "ursa_minor.data.sources.tables",
    "generate",
    "eval_hellaswag",
]


class Case(NamedTuple):
    """One fault-injection test.

    Args:
        title: a short description of the fault.
        run: runs the test in an empty folder and returns the problem, or None if it passed.
    """

    title: str
    run: Callable[[Path], str | None]


@dataclass
class CompletedCommand:
    """The result of a command.

    Args:
        code: the exit status, below 0 for a signal, or None if the command did not end in time.
        stdout: the standard output.
        stderr: the standard error.
        timeout: the number of seconds that the command had.
    """

    code: int | None
    stdout: str
    stderr: str
    timeout: float

    @property
    def errors(self) -> list[str]:
        """The lines with an error message."""
        return [line for line in self.stderr.splitlines() if re.match(r"(data     )?error: ", line)]


class RunningCommand:
    """A command that was started.

    Args:
        pids: the ids of its processes, one for each rank.
        exit_codes: returns the exit status of each process, or None while it runs.
        stdout: the file with its standard output.
        stderr: the file with its standard error.
    """

    def __init__(
        self,
        pids: list[int],
        exit_codes: Callable[[], list[int | None]],
        stdout: Path,
        stderr: Path,
    ):
        self.pids = pids
        self._exit_codes = exit_codes
        self._stdout = stdout
        self._stderr = stderr

    def wait(self, timeout: float = TIMEOUT) -> CompletedCommand:
        """Wait until the command ends. Kill it after the timeout."""
        deadline = time.monotonic() + timeout
        codes = self._exit_codes()
        while None in codes and time.monotonic() < deadline:
            time.sleep(0.02)
            codes = self._exit_codes()
        while None in self._exit_codes():
            self.kill()
            time.sleep(0.02)
        code = None if None in codes else max(codes, key=abs)
        stdout = self._stdout.read_text(errors="replace")
        stderr = self._stderr.read_text(errors="replace")
        return CompletedCommand(code, stdout, stderr, timeout)

    def kill(self) -> None:
        """Send SIGKILL to the processes and their children."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def start_script(
    command: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    *,
    ranks: int = 1,
    fast_waits: bool = False,
    file_bytes: int = 0,
) -> RunningCommand:
    """Start a script in forks of a process that has imported the slow modules.

    Args:
        command: a script of the checkout and its flags.
        cwd: the working directory.
        environment: added to the environment of this process.
        ranks: the number of processes.
        fast_waits: waits take a hundredth of their time, and the clock skips the rest.
        file_bytes: writing fails if a file becomes larger than this. 0 means no limit.
    """
    outputs = _output_files(cwd)
    forks = []
    for rank_environment in _rank_environments(ranks):
        fork = _Fork(
            command,
            cwd,
            environment={**(environment or {}), **rank_environment},
            outputs=outputs,
            fast_waits=fast_waits,
            file_bytes=file_bytes,
        )
        forks.append(_context().Process(target=fork.run))
    for fork in forks:
        fork.start()

    def exit_codes() -> list[int | None]:
        return [fork.exitcode for fork in forks]

    return RunningCommand([fork.pid for fork in forks], exit_codes, *outputs)


def start_program(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> RunningCommand:
    """Start a program with this environment."""
    stdout, stderr = _output_files(cwd)
    with open(stdout, "wb") as stdout_file, open(stderr, "wb") as stderr_file:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout_file,
            stderr=stderr_file,
            start_new_session=True,
        )
    return RunningCommand([process.pid], lambda: [process.poll()], stdout, stderr)


def run(command: Sequence[str], cwd: Path, timeout: float = TIMEOUT, **options) -> CompletedCommand:
    """Run a script until it ends. See ``start_script`` for the options."""
    return start_script(command, cwd, **options).wait(timeout)


def _output_files(cwd: Path) -> tuple[Path, Path]:
    """Create files for standard output and error next to the folder, whose disk may be full."""
    with tempfile.NamedTemporaryFile(
        dir=cwd.parent, prefix=f".{cwd.name}-", suffix=".out", delete=False
    ) as file:
        stdout = Path(file.name)
    stderr = stdout.with_suffix(".err")
    stderr.touch()
    return stdout, stderr


def _rank_environments(ranks: int) -> list[dict[str, str]]:
    """Return the variables that torchrun sets for each process."""
    if ranks == 1:
        return [{}]
    # Below the ports that the kernel gives to outgoing connections.
    port = 20000 + (os.getpid() * 31 + time.monotonic_ns() // 1000) % 12000
    environments = []
    for rank in range(ranks):
        environment = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "problems",
            "LOCAL_WORLD_SIZE": str(ranks),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
        environments.append(environment)
    return environments


@dataclass
class _Fork:
    """A script that runs in a fork. The arguments are those of ``start_script``.

    Args:
        outputs: the files for standard output and standard error.
    """

    command: Sequence[str]
    cwd: Path
    environment: dict[str, str]
    outputs: tuple[Path, Path]
    fast_waits: bool
    file_bytes: int

    def run(self) -> None:
        """Call ``main`` of the script and exit."""
        code = 70
        try:
            self._set_up()
            path = Path(os.environ["FAULTS_TREE"], self.command[0])
            arguments = list(self.command[1:])
            sys.argv = [str(path), *arguments]
            code = importlib.import_module(path.stem).main(arguments) or 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _set_up(self) -> None:
        """Change the process as if the script had been started as a program."""
        os.setsid()
        os.chdir(self.cwd)
        os.environ.update(self.environment)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate(self.outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        if any(name.startswith("HF_") for name in self.environment):
            reload_hub_client()
        if self.fast_waits:
            shorten_waits()
        if self.file_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.file_bytes, self.file_bytes))


def _is_message(line: str) -> bool:
    """Return whether a line contains more than the marks of a traceback below its code."""
    return bool(set(line.strip()) - set("^~|+- "))


def command_problem(result: CompletedCommand, *culprits: str) -> str | None:
    """Return the problem of a failed command, or None if its error message is good.

    Args:
        result: the result of the command.
        culprits: an error message must contain one of these.
    """
    messages = [line for line in result.stderr.splitlines() if _is_message(line)]
    last = messages[-1][:300] if messages else "nothing was printed"
    if result.code is None:
        return f"no end in {result.timeout:.0f} s; last: {last}"
    if "Traceback (most recent call last)" in result.stderr:
        return f"traceback: {last}"
    if result.code not in (1, 2):
        return f"exit status {result.code}: {last}"
    if not result.errors:
        return f"exit status {result.code} without an error message: {last}"
    for culprit in culprits:
        if any(culprit in line for line in result.errors):
            return None
    return f"none of {', '.join(culprits)} is named: {result.errors[0][:300]}"


def training_problem(
    result: CompletedCommand,
    folder: Path,
    expected: Mapping[str, object],
    *culprits: str,
    steps: int = STEPS,
) -> str | None:
    """Return the problem of a training command after a fault, or None.

    The command must either fail with a message that names a culprit, or end with the expected
    digests.
    """
    if result.code != 0:
        return command_problem(result, *culprits)
    if "Traceback" in result.stderr:
        return "success, with a traceback"
    return difference(run_digests(folder / RUN, steps), expected)


def prepare(shared: Path) -> Path:
    """Create and return a folder with a recipe, a text and a tokenizer."""
    folder = shared / "base"
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text(text(0, 900))
    (folder / "tiny.yaml").write_text(RECIPE.replace("tokenizer: tok", "tokenizer: bpe"))
    run_or_raise(run((*PREPARE, "--tokenizer_vocab_size", "300"), folder))
    prepared = next((folder / "data").iterdir())
    (prepared / "tokenizer").rename(folder / "tok")
    subprocess.run(["rm", "-rf", str(folder / "data")], check=True)
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder


def finished_run(base: Path, shared: Path) -> tuple[Path, dict[str, object]]:
    """Train without faults. Return the folder of the run and its digests."""
    folder = shared / "whole"
    folder.mkdir()
    run_or_raise(run(TRAIN, copy(base, folder)))
    return folder, run_digests(folder / RUN)


def run_or_raise(result: CompletedCommand) -> None:
    """Raise RuntimeError if a command without an injected fault has failed."""
    if result.code != 0:
        raise RuntimeError(f"a command fails without an injected fault: {result.stderr}")


def text(start: int, count: int) -> str:
    """Return words that depend only on the arguments."""
    numbers = range(start, start + count)
    return " ".join(WORDS[(number * number + number // 7) % len(WORDS)] for number in numbers)


def copy(source: Path, folder: Path) -> Path:
    """Copy the contents of a folder with their times, on which the project relies."""
    subprocess.run(["cp", "-a", f"{source}/.", str(folder)], check=True)
    return folder


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or "none" if it does not exist."""
    if not path.is_file():
        return "none"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_digests(run_dir: Path, steps: int = STEPS) -> dict[str, object]:
    """Return the results of a run that must not depend on interruptions.

    These are the digests of the final weights and moments, and the losses of all steps.
    """
    checkpoint = run_dir / "checkpoints" / f"step-{steps:08d}"
    losses = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for key in ("train/loss", "eval/loss"):
            if key in row:
                losses[row["step"], key] = row[key]
    return {
        "model.safetensors": digest(checkpoint / "model.safetensors"),
        "training/optimizer.safetensors": digest(checkpoint / "training/optimizer.safetensors"),
        "model/": digest(run_dir / "model" / "model.safetensors"),
        "losses": losses,
    }


def difference(actual: Mapping[str, object], expected: Mapping[str, object]) -> str | None:
    """Name the digests that differ from the expected ones. Return None if all are equal."""
    names = [name for name in expected if actual.get(name) != expected[name]]
    if not names:
        return None
    return f"differs from the uninterrupted run: {', '.join(names)}"


def is_running(pid: int) -> bool:
    """Return whether a process runs (Linux). A zombie does not run."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        state = stat.rpartition(")")[2].split()[0]
        return state != "Z"
    return False


@functools.cache
def _context() -> multiprocessing.context.ForkServerContext:
    """Return the context whose server process has imported the slow modules."""
    # Each start would collect the exit status of all forks, also of those for which another
    # thread waits. That thread would then read the status 255.
    multiprocessing.process._cleanup = lambda: None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    return context


def use_checkout(tree: Path) -> None:
    """Run the commands of this checkout. Called once, before the first command."""
    paths = [str(tree), str(HERE), str(HERE.parent)]
    os.environ.update(ENVIRONMENT)
    # Killed processes leave resources behind.
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for the server process of the forks
    os.environ["FAULTS_TREE"] = str(tree)
    sys.path[:0] = paths
    # Otherwise the server process would import the modules of the current folder.
    os.chdir(tree)


def reload_hub_client() -> None:
    """Make the Hub client of a fork read the environment again.

    The client read it when it was imported.
    """
    import huggingface_hub.constants
    import huggingface_hub.hf_api

    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            importlib.reload(sys.modules[name])
    huggingface_hub.hf_api.api.endpoint = huggingface_hub.constants.ENDPOINT
    file_system = sys.modules.get("huggingface_hub.hf_file_system")
    if file_system:
        file_system.HfFileSystem.clear_instance_cache()


def shorten_waits() -> None:
    """Let waits take a hundredth of their time. The clock skips the rest."""
    original_sleep = time.sleep
    original_monotonic = time.monotonic
    skipped = 0.0

    def sleep(seconds: float) -> None:
        nonlocal skipped
        original_sleep(seconds / 100)
        skipped += seconds * 0.99

    def monotonic() -> float:
        return original_monotonic() + skipped

    time.sleep = sleep
    time.monotonic = monotonic
