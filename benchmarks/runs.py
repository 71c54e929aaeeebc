"""One training run by train.py in a process of its own, for the benchmarks that compare runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START = """import sys
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads({threads})
from pretrain.optim import muon
{change}
import train
sys.exit(train.main({argv!r}))
"""


def train_once(folder: Path, name: str, recipe: Path, flags: list[str], *, threads: int, change: str = "") -> dict:
    """Train to the end and return the last ``loss`` (validation, nats per token), ``seconds`` of training and ``steps``.

    Args:
        folder: where the run (``runs/name``) and its data lie; a run that is finished there is only read.
        flags: recipe keys over the recipe's, as train.py takes them.
        change: Python that changes ``muon``, the leaf, before the run starts.
    """
    argv = ["--recipe", str(recipe), *flags, "--run_name", name, "--eval_steps", "1000000000", "--sample_steps", "0"]
    argv += ["--save_steps", "0", "--logging_steps", "100"]
    metrics = folder / "runs" / name / "metrics.jsonl"
    if not (folder / "runs" / name / "model").is_dir():
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "ACCELERATE_USE_CPU": "true"}
        code = START.format(root=str(ROOT), threads=threads, change=change, argv=argv)
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{name}: train.py ended with {done.returncode}\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    last = [row for row in rows if "eval/loss" in row][-1]
    timed = [row for row in rows if "elapsed_seconds" in row][-1]
    return {"name": name, "loss": last["eval/loss"], "seconds": timed["elapsed_seconds"], "steps": last["step"]}
