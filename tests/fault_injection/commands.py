"""The product's commands, of any checkout, as a case of a campaign runs them, and the judge of what came of them.

The driver itself imports nothing of the product, so that an older tree can be attacked and judged by the same rules.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SECONDS = 60.0  # more than any command here takes on two busy cores, and less than a user waits without a word
STEPS = 12
SETTINGS = f"""data_files=[text.txt] tokenizer=tok validation_fraction=0.1 validation_tokens=60 shard_tokens=150
shuffle_block_tokens=64 n_layer=1 n_head=2 n_embd=32 vocab_size=320 sequence_length=16 resid_pdrop=0.1 embd_pdrop=0.1
attn_pdrop=0.1 tokens_per_step=64 max_steps={STEPS} per_device_train_batch_size=2 learning_rate=3.0e-3 min_lr_ratio=0.1
warmup_steps=3 lr_scheduler_type=cosine weight_decay=0.1 adam_beta1=0.9 adam_beta2=0.95 adam_epsilon=1.0e-8
max_grad_norm=1.0 seed=1 data_seed=2 logging_steps=1 eval_steps=6 eval_tokens=160 sample_steps=0 save_steps=3"""
RECIPE = "".join(f"{setting.replace('=', ': ')}\n" for setting in SETTINGS.split())
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
TRAIN = ("train.py", "--recipe", "tiny.yaml", "--save_total_limit", "0")
RUN = Path("runs/tiny")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # bits depend on threads
ENVIRONMENT |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "ACCELERATE_USE_CPU": "true",
}


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
    """A command that runs: forks of one process that has imported all that they need, one a rank; or a program.

    Args:
        command: a script of the tree and its flags, or a program's words.
        environment: what a fork adds to its own; all that a program has, which makes it one.
        hasty: waits take a hundredth of their time, and the clock jumps on as if they had taken all of it.
        file_bytes: the size at which a file's growth fails.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        *,
        program: bool = False,
        ranks: int = 1,
        hasty: bool = False,
        file_bytes: int = 0,
    ):
        with tempfile.NamedTemporaryFile(
            dir=cwd.parent, prefix=f".{cwd.name}-", suffix=".out", delete=False
        ) as file:
            self.out = Path(file.name)  # beside the folder, whose disk may be full
        self.err = self.out.with_suffix(".err")
        self.err.touch()
        if program:
            with open(self.out, "wb") as out, open(self.err, "wb") as err:
                how = {
                    "stdin": subprocess.DEVNULL,
                    "stdout": out,
                    "stderr": err,
                    "start_new_session": True,
                }
                popen = subprocess.Popen(command, cwd=cwd, env=environment, **how)
            self.pids, self._codes = [popen.pid], lambda: [popen.poll()]
            return
        several = [{}]
        if ranks > 1:
            # Below those that the kernel hands out for connections meanwhile.
            port = 20000 + (os.getpid() * 31 + time.monotonic_ns() // 1000) % 12000
            shared = {
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            shared |= {"TORCHELASTIC_RUN_ID": "problems", "LOCAL_WORLD_SIZE": str(ranks)}
            several = [
                shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
            ]
        printed = (self.out, self.err)
        given = [
            (command, cwd, {**(environment or {}), **own}, printed, hasty, file_bytes)
            for own in several
        ]
        forks = [_context().Process(target=_main, args=each) for each in given]
        for fork in forks:
            fork.start()
        self.pids, self._codes = (
            [fork.pid for fork in forks],
            lambda: [fork.exitcode for fork in forks],
        )

    def wait(self, seconds: float = SECONDS) -> Done:
        """Wait for its end, and end it where it takes longer."""
        end = time.monotonic() + seconds
        while None in (codes := self._codes()) and time.monotonic() < end:
            time.sleep(0.02)
        while None in self._codes():
            self.kill()
            time.sleep(0.02)
        out, err = self.out.read_text(errors="replace"), self.err.read_text(errors="replace")
        return Done(None if None in codes else max(codes, key=abs), out, err, seconds)

    def kill(self) -> None:
        """Kill each process and what it has started, as a lack of memory would: with SIGKILL."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def run(command: Sequence[str], cwd: Path, seconds: float = SECONDS, **how) -> Done:
    """Run a command to its end."""
    return Started(command, cwd, **how).wait(seconds)


def command_problem(done: Done, *culprits: str) -> str | None:
    """Return why a command that did not succeed does not hold: it takes too long, has a traceback, names no culprit.

    Args:
        culprits: one of them has to stand in a line that begins with ``error:``.
    """
    lines = [
        line
        for line in done.stderr.splitlines()
        if line.strip() and not set(line.strip()) <= set("^~|+- ")
    ]
    last = lines[-1][:300] if lines else "nothing was printed"
    if done.code is None:
        return f"no end in {done.seconds:.0f} s; last: {last}"
    if "Traceback (most recent call last)" in done.stderr:
        return f"traceback: {last}"
    if done.code not in (1, 2):
        return f"exit status {done.code}: {last}"
    if not done.errors:
        return f"exit status {done.code} without a line that begins with error: {last}"
    if not any(culprit in line for line in done.errors for culprit in culprits):
        return f"none of {', '.join(culprits)} is named: {done.errors[0][:300]}"
    return None


def training_problem(
    done: Done, folder: Path, wanted: Mapping, *culprits: str, steps: int = STEPS
) -> str | None:
    """Return why a start after some damage does not hold: it names no culprit, or it ends with other bits."""
    if done.code != 0:
        return command_problem(done, *culprits)
    if "Traceback" in done.stderr:
        return "success, with a traceback"
    return difference(run_digests(folder / RUN, steps), wanted)


def prepare(shared: Path) -> Path:
    """Make a folder with a recipe, a text and a tokenizer (by the product), and return it."""
    folder = shared / "base"
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text(text(0, 900))
    (folder / "tiny.yaml").write_text(RECIPE.replace("tokenizer: tok", "tokenizer: bpe"))
    run_or_raise(run(("prepare_data.py", *TRAIN[1:3], "--tokenizer_vocab_size", "300"), folder))
    (next((folder / "data").iterdir()) / "tokenizer").rename(folder / "tok")
    subprocess.run(["rm", "-rf", str(folder / "data")], check=True)
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder


def finished_run(base: Path, shared: Path) -> tuple[Path, dict]:
    """Return a folder with a run that is complete, and its bits."""
    (whole := shared / "whole").mkdir()
    run_or_raise(run(TRAIN, copy(base, whole)))
    return whole, run_digests(whole / RUN)


def run_or_raise(done: Done) -> None:
    """Raise RuntimeError where a command fails that nothing has attacked."""
    if done.code != 0:
        raise RuntimeError(f"the tree fails without an attack: {done.stderr}")


def copy(base: Path, folder: Path) -> Path:
    """Copy a folder's contents with their times, which the product goes by."""
    subprocess.run(["cp", "-a", f"{base}/.", str(folder)], check=True)
    return folder


def digest(path: Path) -> str:
    """Return the SHA-256 of a file; where there is none, that."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "none"


def run_digests(run_dir: Path, steps: int = STEPS) -> dict[str, object]:
    """Return what no interruption may change: weights and moments at the end, the losses of all steps."""
    last = run_dir / "checkpoints" / f"step-{steps:08d}"
    found: dict[str, object] = {
        name: digest(last / name) for name in ("model.safetensors", "optimizer.safetensors")
    }
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {
        (row["step"], key): row[key]
        for row in rows
        for key in ("train/loss", "eval/loss")
        if key in row
    }
    return found | {"model/": digest(run_dir / "model" / "model.safetensors"), "losses": losses}


def difference(found: Mapping, wanted: Mapping) -> str | None:
    """Return what of a run's bits is not as it has to be."""
    names = [name for name in wanted if found.get(name) != wanted[name]]
    return f"other bits than the whole run's: {', '.join(names)}" if names else None


def is_running(pid: int) -> bool:
    """Return whether a process runs (Linux): one that has ended and was not waited for does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@functools.cache
def _context():
    # It asks for the ends of all forks at each start, of those that another thread waits for, too, which then has 255.
    multiprocessing.process._cleanup = lambda: None
    context = multiprocessing.get_context("forkserver")
    # What each command imports, for seconds; of an older tree what is not there is left out.
    imported = [
        "matplotlib.pyplot",
        "transformers.generation.utils",
        "transformers.models.gpt2.modeling_gpt2",
        "train",
    ]
    context.set_forkserver_preload(
        [*imported, "prepare_data", "ursa_minor.data.sources.tables", "generate", "eval_hellaswag"]
    )
    return context


def use_checkout(tree: Path) -> None:
    """Take the commands from this checkout; called once, before the first one."""
    os.environ.update(ENVIRONMENT)
    paths = [str(tree), str(HERE), str(HERE.parent)]
    os.environ["PYTHONWARNINGS"] = (
        "ignore::UserWarning:multiprocessing.resource_tracker"  # of what killed ones held
    )
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # the warmed process reads it
    os.environ["FAULTS_TREE"] = str(tree)
    sys.path[:0] = paths
    os.chdir(
        tree
    )  # whose modules the warmed process would else take from where the campaign was started


def _main(
    command: Sequence[str],
    cwd: Path,
    environment: dict,
    printed: tuple,
    hasty: bool,
    file_bytes: int,
) -> None:
    """Be a command, in a fork: the script's ``main`` with these flags."""
    code = 70
    try:
        os.setsid()
        os.chdir(cwd)
        os.environ.update(environment)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate(printed, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        if any(name.startswith("HF_") for name in environment):
            reload_hub_client()
        if hasty:
            hurry()
        if file_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        path = Path(os.environ["FAULTS_TREE"], command[0])
        sys.argv = [str(path), *command[1:]]
        code = importlib.import_module(path.stem).main(list(command[1:])) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def reload_hub_client() -> None:
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
    """Let waits take a hundredth of their time, and the clock jump on as if they had taken all of it."""
    sleep, monotonic, jumped = time.sleep, time.monotonic, [0.0]

    def hasty_sleep(seconds: float) -> None:
        sleep(seconds / 100)
        jumped[0] += seconds * 0.99

    time.sleep, time.monotonic = hasty_sleep, lambda: monotonic() + jumped[0]
