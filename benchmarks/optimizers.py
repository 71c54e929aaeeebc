"""AdamW with 32-bit and with 8-bit moments: what they hold, how long an update takes, what a run ends with.

    python benchmarks/optimizers.py --part step                            # GPT-2 124M, on the CPU or the card
    python benchmarks/optimizers.py --part losses --text tinyshakespeare.txt --max_steps 1000 --workers 2

``step`` gives the same weights and gradients to both in turn, and counts the bytes of every tensor of their states.
``losses`` trains --recipe with each and every seed, by train.py; flags that are not named here go to it (--max_steps).
Losses are over the whole validation split. Runs may go side by side: they say nothing about time. Finished runs are
kept in --folder and not repeated.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import dataclasses
import hashlib
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks import side_by_side
from benchmarks.runs import ROOT, add_runs, prepare_shards, train_once, write_json
from pretrain.machine import hardware
from pretrain.model.build import build
from pretrain.optim import optimizers
from pretrain.optim.schedule import set_lr

NAMES = ("adamw", "adamw_8bit")


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the state's tensors, one that several share counted once."""
    tensors = (v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def seconds(optimizer: torch.optim.Optimizer) -> float:
    """Return how long one update takes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    optimizer.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def compare_steps(asked: argparse.Namespace) -> list[dict]:
    """Time both optimizers in turn over one model's weights and gradients; print and return the medians."""
    torch.set_num_threads(asked.threads)
    shape = {name: getattr(asked, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    recipe = side_by_side.recipe_of(**shape)
    model = build(recipe.model, eos_token_id=0).to(side_by_side.device())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) / 1000
    ways = {name: optimizers.build(model, dataclasses.replace(recipe.optimizer, optimizer=name)) for name in NAMES}
    for optimizer in ways.values():
        set_lr(optimizer, 1e-4)
        optimizer.step()  # makes the moments
    times = {name: [] for name in NAMES}
    for _ in range(asked.rounds):
        for name in NAMES:
            times[name].append(seconds(ways[name]))
    parameters = model.num_parameters()
    print(f"model        {shape}, {parameters:,} parameters")
    print(f"{'optimizer':12} bytes of moments  a parameter  ms an update (fastest to slowest)")
    rows = []
    for name, optimizer in ways.items():
        held, middle = state_bytes(optimizer), statistics.median(times[name])
        rows.append({"optimizer": name, "state_bytes": held, "parameters": parameters, "seconds": times[name]})
        low, high = min(times[name]), max(times[name])
        print(
            f"{name:12} {held:16,}  {held / parameters:11.3f}  {1e3 * middle:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})"
        )
    ratios = [slow / fast for fast, slow in zip(*times.values(), strict=True)]
    print(f"time, {NAMES[1]} / {NAMES[0]}: {statistics.median(ratios):.2f} (median of the rounds' ratios)")
    return rows


def compare_losses(asked: argparse.Namespace, flags: list[str]) -> list[dict]:
    """Train with each optimizer and seed; print and return each run's last validation loss."""
    recipe = Path(asked.recipe).resolve()
    if asked.text:
        flags = ["--data_files", str(Path(asked.text).resolve()), *flags]
    prepare_shards(asked.folder, recipe, flags)
    key = hashlib.sha256(repr(flags).encode()).hexdigest()[:8]  # other flags, other runs

    def one(job: tuple[int, str]) -> dict:
        seed, name = job
        run_name, mine = f"{name}-{recipe.stem}-seed{seed}-{key}", [*flags, "--optimizer", name]
        row = train_once(asked.folder, run_name, recipe, mine, threads=asked.threads, seed=seed)
        print(f"{name:12} seed {seed}: {row['loss']:.4f} after {row['steps']} updates", flush=True)
        return row | {"optimizer": name, "seed": seed}

    with ThreadPoolExecutor(asked.workers) as pool:
        rows = list(pool.map(one, [(seed, name) for seed in asked.seeds for name in NAMES]))
    losses = {name: [row["loss"] for row in rows if row["optimizer"] == name] for name in NAMES}
    for name, found in losses.items():
        print(f"{name:12} mean {statistics.mean(found):.4f}")
    differences = [eight - full for full, eight in zip(*losses.values(), strict=True)]
    each = ", ".join(f"{difference:+.4f}" for difference in differences)
    print(f"{NAMES[1]} - {NAMES[0]}: mean {statistics.mean(differences):+.4f}, each seed's {each}")
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure the part asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["step", "losses"], required=True)
    for name, size in (("n_layer", 12), ("n_head", 12), ("n_embd", 768), ("vocab_size", 50304)):
        parser.add_argument(f"--{name}", type=int, default=size, help="step: the model (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="step: updates timed of each")
    parser.add_argument("--threads", type=int, help="step: 2 unless told; losses: of each run, 1 unless told")
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "shakespeare_char.yaml"), help="losses")
    parser.add_argument("--text", help="losses: a text file in place of the recipe's data")
    add_runs(parser.add_argument_group("losses"), "optimizers")
    asked, flags = parser.parse_known_args(argv)
    if asked.part == "step" and flags:
        parser.error(f"unknown: {' '.join(flags)}")
    asked.threads = asked.threads or (2 if asked.part == "step" else 1)
    device = hardware.this_device()
    print(f"machine      {device.name}, torch {torch.__version__}, {asked.threads} threads")
    rows = compare_steps(asked) if asked.part == "step" else compare_losses(asked, flags)
    about = {"machine": device.name, "torch": torch.__version__, "threads": asked.threads, "flags": flags}
    write_json(asked.json, about | {"part": asked.part, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
