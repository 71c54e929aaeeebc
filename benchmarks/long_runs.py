"""What grows with a run, its data or its model: picture, metrics.jsonl, shards, a checkpoint. Seconds and memory.

    python benchmarks/long_runs.py                      # in an empty folder
    python benchmarks/long_runs.py --parts picture metrics

Each part is a process of its own, whose peak of memory is printed beside what importing took.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
import re
import subprocess
import tempfile
import time
from dataclasses import replace

import numpy as np
import torch

from benchmarks import side_by_side
from pretrain.base.layout import read_metrics
from pretrain.data import shards
from pretrain.data.windows import TrainOrder, Windows
from pretrain.model.build import build
from pretrain.optim import optimizers
from pretrain.recipe.plan import Plan
from pretrain.run import checkpoint, curves
from pretrain.run.clock import Clock
from pretrain.run.report import Report
from pretrain.run.state import RunState

SHARDS, LARGE, DRAWS = 2000, 20, 20_000


def rows_of(steps: int) -> list[dict]:
    """Return rows as a real run's, an evaluation every 250 updates."""
    noise, rows = np.random.default_rng(1).normal(0, 0.04, steps + 1), []
    for step in range(1, steps + 1):
        row = {"step": step, "tokens": 524288 * step, "train/loss": 3 + 8 / step + noise[step], "train/grad_norm": 0.5}
        row |= {"train/lr": 6e-4, "tokens_per_second": 9e4, "mfu": 0.4, "elapsed_seconds": 5.5 * step}
        rows.append(row | {"data_wait_seconds": 0.0, "ms_per_step": 5500.0, "skipped_updates": 0})
        if step % 250 == 0:
            rows.append({"step": step, "tokens": 524288 * step, "eval/loss": 3 + 8 / step})
    return rows


def peak_kilobytes() -> int:
    """Return this program's peak of memory; getrusage's would be that of the process which started it, where larger."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def measure(part: str, folder: Path) -> dict[str, float]:
    """Do a part; return seconds by what was done."""
    found, begin = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal begin
        found[name] = time.perf_counter() - begin
        begin = time.perf_counter()

    log, ids = folder / "metrics.jsonl", folder / "ids.bin"
    if part in ("picture of every row", "picture"):
        thinned = curves.Thinned(read_metrics(log)) if part == "picture" else None
        begin = time.perf_counter()
        curves.draw_curves(thinned.rows if thinned else read_metrics(log), folder / "curves.png", "a run")
        lap("drawn once")
    elif part == "metrics.jsonl":
        recipe = side_by_side.recipe_of(output_dir=str(folder))
        begin = time.perf_counter()
        state = replace(RunState.begin(recipe.schedule), step=10**9)
        Report(recipe, Plan(1, 512, 16, 32), state, Clock(10, None), is_main=True)
        lap("read and written, as at each start")
    elif part == "checkpoint":
        recipe = side_by_side.recipe_of()
        model = build(recipe.model, eos_token_id=0)
        optimizer = optimizers.build(model, recipe.optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()  # makes the moments
        begin = time.perf_counter()
        with checkpoint.Saver(folder, is_main=True, keep=0) as saver:
            saver.prepare(model, optimizer)
            saver.ready()
            lap("memory made ready, beside the first update")
            saver.save(1, model, optimizer, {"step": 1, "scaler": None})
            lap("training held up")
        lap("written beside training")
        newest, _ = checkpoint.find_newest(folder)
        lap("found and checked at a start")
        checkpoint.load(newest, model, optimizer, optimizers.OPTIMIZERS[recipe.optimizer.optimizer].keeps)
        lap("loaded")
    elif part == "shards":
        windows = Windows(1024, 50304)
        for _ in range(SHARDS):
            windows.append(ids, 1_000_000, *shards.open_ids(ids, 1_000_000))
        lap(f"{SHARDS:,} shards opened")
    elif part == "windows":
        windows, tokens = Windows(1024, 50304), 1_000_000_000
        header = bytearray(ids.read_bytes()[: shards.HEADER_BYTES])
        header[8:12] = tokens.to_bytes(4, "little")
        for number in range(LARGE):
            path = folder / f"large-{number}.bin"
            with open(path, "wb") as file:
                file.write(header)
                file.truncate(shards.HEADER_BYTES + 2 * tokens)  # holes: no bytes on the disk
            windows.append(path, tokens, *shards.open_ids(path, tokens))
        begin, row_T1 = time.perf_counter(), np.empty(1025, dtype=np.int64)
        for window in np.random.default_rng(0).integers(0, windows.num_windows, DRAWS).tolist():
            windows.read(window, row_T1)
        lap(f"{DRAWS:,} windows anywhere in {LARGE} shards of 2 GB")
        order = TrainOrder((1.0,), 1024, 512, 512, 1, 1337, 2**26)
        for step in range(DRAWS // 512):
            for _, window in order.windows(step, 0, 0, [windows.num_windows]).tolist():
                windows.read(window, row_T1)
        lap("as many in the order of a run")
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure each part; print its seconds and its memory."""
    parts = ["picture of every row", "picture", "metrics.jsonl", "checkpoint", "shards", "windows"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="updates of the run")
    parser.add_argument("--measure", nargs=2, metavar=("PART", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.measure:
        before = peak_kilobytes()
        seconds = measure(asked.measure[0], Path(asked.measure[1]))
        print(json.dumps({"seconds": seconds, "mb": (peak_kilobytes() - before) / 1024}))
        return 0
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        writer = shards.ShardWriter(folder, "train", 0, 0, np.ones(50257, dtype=np.int64), 1_000_000)
        list(writer.fill(np.random.default_rng(0).integers(0, 50257, 1_000_000).astype(np.uint32)))
        next(folder.glob("train_*.bin")).rename(folder / "ids.bin")
        for part in asked.parts:
            for rows in asked.rows if part.startswith(("picture", "metrics")) else [0]:
                text = "".join(json.dumps(row) + "\n" for row in rows_of(rows))
                (folder / "metrics.jsonl").write_text(text)
                command = [sys.executable, __file__, "--measure", part, name]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found = json.loads(done.stdout.splitlines()[-1])
                said = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in found["seconds"].items())
                print(f"{part:22} {f'{rows:,} updates' if rows else '':18} {said}; {found['mb']:.0f} MB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
