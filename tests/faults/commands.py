"""The product's commands, of any checkout, as a case of a campaign runs them: in forks of one warmed process.

The driver itself imports nothing of the product, so that an older tree can be attacked and judged by the same rules.
"""

import asyncio
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SECONDS = 60.0  # more than any command here takes on two busy cores, and less than a user waits without a word
STEPS = 12
RECIPE = f"""
data_files: [text.txt]
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
WORDS = tuple("the cat sat on the mat and the dog ate a red hat while rain fell on old town".split())  # noqa: SIM905


def text(begin: int, count: int) -> str:
    """Return some words, the same for the same arguments."""
    return " ".join(WORDS[(i * i + i // 7) % len(WORDS)] for i in range(begin, begin + count))


@dataclass
class Done:
    """What came of a command; its code is None where it did not end in time, below 0 where a signal ended it."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float  # that it was given

    @property
    def errors(self) -> list[str]:
        """The lines in which it states what is wrong."""
        return [line for line in self.stderr.splitlines() if re.match(r"(data     )?error: ", line)]


class Started:
    """A command that runs, in one process or as many ranks as asked for.

    Args:
        hasty: waits take a hundredth of their time, and the clock jumps on as if they had taken all of it.
        file_bytes: the size at which a file's growth fails.
    """

    def __init__(
        self,
        script: str,
        *flags: str,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        ranks: int = 1,
        hasty: bool = False,
        file_bytes: int = 0,
    ):
        self.out, self.err = printed_by(cwd)
        several = [{}]
        if ranks > 1:
            # Below those that the kernel hands out for connections meanwhile.
            port = 20000 + (os.getpid() * 31 + time.monotonic_ns() // 1000) % 12000
            shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            shared |= {"TORCHELASTIC_RUN_ID": "faults", "LOCAL_WORLD_SIZE": str(ranks)}
            several = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        self.processes = [
            _context().Process(
                target=_main,
                args=(script, list(flags), cwd, dict(environment or {}) | own, self.out, self.err, hasty, file_bytes),
            )
            for own in several
        ]
        for process in self.processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        """Of its processes: one a rank."""
        return [process.pid for process in self.processes if process.pid]

    def wait(self, seconds: float = SECONDS) -> Done:
        """Wait for its end, and end it where it takes longer."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        if None in codes:
            self.kill()
        for process in self.processes:
            process.join()
        out, err = self.out.read_text(errors="replace"), self.err.read_text(errors="replace")
        return Done(None if None in codes else max(codes, key=abs), out, err, seconds)

    def kill(self) -> None:
        """Kill each process and what it has started, as a lack of memory would: with SIGKILL."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)


class Launched:
    """``accelerate launch train.py``, the real one: a launcher and its trainer, with ``Started``'s methods."""

    def __init__(self, tree: Path, *flags: str, cwd: Path):
        self.out, self.err = printed_by(cwd)
        command = [sys.executable, "-m", "accelerate.commands.launch"]
        command += ["--config_file", str(tree / "accelerate_configs/cpu.yaml"), str(tree / "train.py"), *flags]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["OMP_NUM_THREADS"] = "1"  # as in the forks: bits depend on it
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            self._process = subprocess.Popen(
                command, cwd=cwd, stdout=out, stderr=err, start_new_session=True, env=environment
            )
        self.pids = [self._process.pid]

    def wait(self, seconds: float = SECONDS) -> Done:
        """Wait for the launcher's end."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            self.kill()
            self._process.wait()
        return Done(code, self.out.read_text(errors="replace"), self.err.read_text(errors="replace"), seconds)

    def kill(self) -> None:
        """Kill the launcher and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pids[0], signal.SIGKILL)


def train_shards(folder: Path) -> list[str]:
    """Return the names of the train shards below a folder's data/, where files may come and go meanwhile."""
    names = [name for _, _, names in os.walk(folder / "data") for name in names]
    return [name for name in names if name.startswith("train_") and name.endswith(".bin")]


def printed_by(cwd: Path) -> tuple[Path, Path]:
    """Return two new files beside a command's folder, whose disk may be full: for what it prints, and its errors."""
    with tempfile.NamedTemporaryFile(dir=cwd.parent, prefix=f".{cwd.name}-", suffix=".out", delete=False) as file:
        out = Path(file.name)
    out.with_suffix(".err").touch()
    return out, out.with_suffix(".err")


def children(pid: int) -> list[int]:
    """Return the processes that a process has started (Linux)."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found


def alive(pid: int) -> bool:
    """Return whether a process runs (Linux): one that has ended and was not waited for does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def run(script: str, *flags: str, cwd: Path, seconds: float = SECONDS, **how) -> Done:
    """Run a command to its end."""
    return Started(script, *flags, cwd=cwd, **how).wait(seconds)


def fault_of(done: Done, *culprits: str) -> str | None:
    """Return why a command that did not succeed does not hold: it takes too long, has a traceback, names no culprit.

    Args:
        culprits: one of them has to stand in a line that begins with ``error:``.
    """
    if done.code is None:
        return f"no end in {done.seconds:.0f} s; last: {_last(done.stderr)}"
    if "Traceback (most recent call last)" in done.stderr:
        return f"traceback: {_last(done.stderr)}"
    if done.code not in (1, 2):
        return f"exit status {done.code}: {_last(done.stderr)}"
    if not done.errors:
        return f"exit status {done.code} without a line that begins with error: {_last(done.stderr)}"
    if not any(culprit in line for line in done.errors for culprit in culprits):
        return f"none of {', '.join(culprits)} is named: {done.errors[0][:300]}"
    return None


def prepare(shared: Path) -> Path:
    """Make a folder with a recipe, a text and a tokenizer (by the product), and return it."""
    folder = shared / "base"
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text(text(0, 900))
    (folder / "tiny.yaml").write_text(RECIPE.replace("tokenizer: tok", "tokenizer: bpe"))
    done = run("prepare_data.py", "--recipe", "tiny.yaml", "--tokenizer_vocab_size", "300", cwd=folder)
    if done.code != 0:
        raise RuntimeError(f"the tree cannot prepare a plain text: {done.stderr}")
    (next((folder / "data").iterdir()) / "tokenizer").rename(folder / "tok")
    subprocess.run(["rm", "-rf", str(folder / "data")], check=True)
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder


def copy(base: Path, folder: Path) -> Path:
    """Copy a folder's contents with their times, which the product goes by."""
    subprocess.run(["cp", "-a", f"{base}/.", str(folder)], check=True)
    return folder


def digest(path: Path) -> str:
    """Return the SHA-256 of a file; where there is none, that."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "none"


def bits_of(run_dir: Path, steps: int = STEPS) -> dict[str, object]:
    """Return what no interruption may change: weights and moments at the end, the losses of all steps."""
    last = run_dir / "checkpoints" / f"step-{steps:08d}"
    found: dict[str, object] = {name: digest(last / name) for name in ("model.safetensors", "optimizer.safetensors")}
    found["model/"] = digest(run_dir / "model" / "model.safetensors")
    found["losses"] = losses = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for key in ("train/loss", "eval/loss"):
            if key in row:
                losses[row["step"], key] = row[key]
    return found


def difference(found: Mapping, wanted: Mapping) -> str | None:
    """Return what of a run's bits is not as it has to be."""
    names = [name for name in wanted if found.get(name) != wanted[name]]
    return f"other bits than the whole run's: {', '.join(names)}" if names else None


def prepared(folder: Path) -> tuple[int, int] | None:
    """Return the documents and bytes of text of the only folder of shards, as its manifest counts them."""
    found = list((folder / "data").glob("*/manifest.json"))
    if len(found) != 1:
        return None
    manifest = json.loads(found[0].read_text())
    if not manifest["complete"]:
        return None
    documents = sum(counts.get("documents", 0) for counts in manifest["counts"].values())
    return documents, sum(row["text_bytes"] for rows in manifest["splits"].values() for row in rows)


def _last(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip() and not set(line.strip()) <= set("^~|+- ")]
    return lines[-1][:300] if lines else "nothing was printed"


_CONTEXTS: list = []


def _context():
    if not _CONTEXTS:
        # It asks for the ends of all forks at each start, of those that another thread waits for, too, which then has 255.
        multiprocessing.process._cleanup = lambda: None
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["warm"])
        _CONTEXTS.append(context)
    return _CONTEXTS[0]


def attack_tree(tree: Path) -> None:
    """Take the commands from this checkout; called once, before the first one."""
    paths = [str(tree), str(HERE), str(HERE.parent)]
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"  # of what killed ones held
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # the warmed process reads it
    os.environ["FAULTS_TREE"] = str(tree)
    sys.path[:0] = paths
    os.chdir(tree)  # whose modules the warmed process would else take from where the campaign was started


def _main(
    script: str, flags: list[str], cwd: Path, environment: dict, out: Path, err: Path, hasty: bool, file_bytes: int
) -> None:
    """Be a command, in a fork: the script's ``main`` with these flags."""
    code = 70
    try:
        os.setsid()
        os.chdir(cwd)
        os.environ.update(environment)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        if any(name.startswith("HF_") for name in environment):
            turn_hub_client()
        if hasty:
            hurry()
        if file_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        path = Path(os.environ["FAULTS_TREE"], script)
        sys.argv = [str(path), *flags]
        code = importlib.import_module(path.stem).main(list(flags)) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def turn_hub_client() -> None:
    """Make the Hub's clients in a fork read the environment anew: they hold what it was when they were imported."""
    import huggingface_hub.constants
    import huggingface_hub.hf_api

    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            importlib.reload(sys.modules[name])
    huggingface_hub.hf_api.api.endpoint = huggingface_hub.constants.ENDPOINT
    if files := sys.modules.get("huggingface_hub.hf_file_system"):
        files.HfFileSystem.clear_instance_cache()


def hurry() -> None:
    """Let waits take a hundredth of their time, and the clock jump on as if they had taken all of it.

    Of a silent or slow server the time-outs that clients were given take a twentieth; without one a wait has no end.
    """
    sleep, monotonic, jumped = time.sleep, time.monotonic, [0.0]
    later, plain = asyncio.BaseEventLoop.call_later, socket.socket.__base__

    def hasty_sleep(seconds: float) -> None:
        sleep(seconds / 100)
        jumped[0] += seconds * 0.99

    def shortened(seconds: float | None) -> float | None:
        return seconds and min(seconds, max(LEAST_TIMEOUT, seconds / 20))

    def settimeout(self, seconds: float | None) -> None:
        plain.settimeout(self, shortened(seconds))
        _GIVEN[self.fileno()] = seconds or 0.0

    def recv(self, *how) -> bytes:
        try:
            return plain.recv(self, *how)
        except TimeoutError:
            jumped[0] += _GIVEN.get(self.fileno(), 0.0)
            raise

    def call_later(self, seconds: float, call, *args, **more):
        def due(*those):
            jumped[0] += max(0.0, seconds - (shortened(seconds) or 0.0))
            call(*those)

        return later(self, shortened(seconds), due, *args, **more)

    with contextlib.suppress(AttributeError):  # older trees have none
        sys.modules["pretrain.base"].network.SLOW_SECONDS /= 20
    time.sleep, time.monotonic = hasty_sleep, lambda: monotonic() + jumped[0]
    socket.socket.settimeout, socket.socket.recv = settimeout, recv
    asyncio.BaseEventLoop.call_later = call_later


LEAST_TIMEOUT = 3.0  # seconds: a busy machine answers within
_GIVEN: dict[int, float] = {}  # the time-outs of open connections
