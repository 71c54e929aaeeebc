"""The scaling law of check_setup.py --plan against runs here: small sizes fit its form, two unseen are predicted.

    python benchmarks/scaling_law.py --workers 2 --json benchmarks/results/scaling-law-cpu.json

The text is Python's source as the packages torch and transformers carry it, the settings are the quickstart's. Eight runs
(four sizes, two numbers of tokens) give the law's five numbers by least squares; two other sizes are compared with it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import hashlib
import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from benchmarks.runs import ROOT, add_runs, commit, flag_words, prepare_shards, train_once, write_json
from pretrain.machine import hardware
from pretrain.machine.planning import CHINCHILLA, Law

RECIPE = ROOT / "recipes" / "own_text.yaml"
QUICKSTART = {
    "tokenizer_vocab_size": 4090,
    "vocab_size": 4096,
    "learning_rate": 2e-2,
    "muon_momentum": 0.85,
    "adam_beta2": 0.99,
}
QUICKSTART |= {"weight_decay": 0.1, "warmup_steps": 10, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
FITTED = [(shape, steps) for shape in ((2, 64), (3, 96), (4, 128), (5, 192)) for steps in (400, 800)]
UNSEEN = [((4, 160), 600), ((6, 256), 800)]
EXPONENTS = np.arange(0.05, 1.5, 0.01)  # that are tried


def write_corpus(path: Path) -> None:
    """Write each Python file of the two packages as a row, each text once, in the order of a hash of its name."""
    texts: dict[str, str] = {}
    for name in ("torch", "transformers"):
        root = Path(importlib.util.find_spec(name).submodule_search_locations[0])
        for file in sorted(root.rglob("*.py")):
            text = file.read_text(encoding="utf-8", errors="ignore")
            texts.setdefault(text, hashlib.sha256(str(file.relative_to(root.parent)).encode()).hexdigest())
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = sorted(texts, key=texts.__getitem__)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows), encoding="utf-8")


def train(asked: argparse.Namespace, shape: tuple[int, int], steps: int, seed: int) -> dict:
    """Train one size for so many updates; return its parameters, tokens and last validation loss."""
    layers, width = shape
    flags = flag_words(data_flags(asked) | {"n_layer": layers, "n_embd": width, "n_head": max(2, width // 32)})
    flags += flag_words({"max_steps": steps, "eval_tokens": 262144})
    name = f"{layers}x{width}-{steps}-{seed}"
    done = train_once(asked.folder, name, RECIPE, flags, threads=1, seed=seed)
    parameters = 12 * layers * width**2 + 13 * layers * width + 2 * width + (4096 + 128) * width
    return {"shape": shape, "seed": seed, "parameters": parameters, "tokens": 2048 * steps, "loss": done["loss"]}


def data_flags(asked: argparse.Namespace) -> dict:
    """Return the recipe keys of the text."""
    corpus = (asked.folder / "corpus.jsonl").resolve()
    return QUICKSTART | {"data_files": corpus, "validation_tokens": 1048576, "limit_tokens": 4000000}


def fit(rows: list[dict]) -> Law:
    """Return the law of least squares: for each pair of exponents the other three numbers are a linear problem."""
    sizes, tokens, losses = (np.array([row[key] for row in rows], float) for key in ("parameters", "tokens", "loss"))
    best, found = np.inf, CHINCHILLA
    for alpha in EXPONENTS:
        for beta in EXPONENTS:
            columns = np.stack([np.ones(len(rows)), sizes**-alpha, tokens**-beta], axis=1)
            solved, *_ = np.linalg.lstsq(columns, losses, rcond=None)
            error = float(((columns @ solved - losses) ** 2).sum())
            if error < best and (solved >= 0).all():
                best, found = error, Law(*map(float, (*solved, alpha, beta)))
    return found


def main(argv: list[str] | None = None) -> int:
    """Train, fit, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_runs(parser, "runs/scaling", seeds=(1,))
    asked = parser.parse_args(argv)
    corpus = asked.folder / "corpus.jsonl"
    if not corpus.is_file():
        write_corpus(corpus)
    prepare_shards(asked.folder, RECIPE, flag_words(data_flags(asked)))
    wanted = [(*run, seed) for run in (*FITTED, *UNSEEN) for seed in asked.seeds]
    wanted.sort(key=lambda run: -run[0][0] * run[0][1] ** 2 * run[1])  # the longest first
    with ThreadPoolExecutor(asked.workers) as pool:
        rows = list(pool.map(lambda run: train(asked, *run), wanted))
    unseen = [row for row in rows if (row["shape"], row["tokens"] // 2048) in UNSEEN]
    seen = [row for row in rows if row not in unseen]
    law = fit(seen)
    print(f"fitted to {len(seen)} runs: L = {law.floor:.3f} + {law.size:.4g} / N^{law.size_power:.2f} + "
          f"{law.data:.4g} / D^{law.data_power:.2f}")  # fmt: skip
    print("blocks x width  parameters     tokens    loss  fitted law  error")
    for row in sorted(rows, key=lambda row: (row in unseen, row["parameters"], row["tokens"])):
        row["law"] = law.loss(row["parameters"], row["tokens"])
        layers, width = row["shape"]
        print(f"{layers:6} x {width:<6} {row['parameters']:>10,} {row['tokens']:>10,}  {row['loss']:.3f} "
              f" {row['law']:10.3f}  {row['law'] - row['loss']:+.3f}{'  not fitted' if row in unseen else ''}")  # fmt: skip
    machine = {"machine": hardware.this_device().name, "torch": torch.__version__, "commit": commit()}
    write_json(asked.json, machine | {"law": law._asdict(), "fitted": seen, "unseen": unseen})
    return 0


if __name__ == "__main__":
    sys.exit(main())
