"""How many updates, and seconds, to a given loss: nanoGPT's character run on TinyShakespeare, AdamW against Muon.

    python benchmarks/time_to_loss.py --text tinyshakespeare.txt --part losses --workers 2 --threads 1
    python benchmarks/time_to_loss.py --text tinyshakespeare.txt --part seconds --nanogpt CHECKOUT_OF_NANOGPT

``losses`` trains to the end of schedules of several lengths, each with its own, and finds by interpolation (loss over
the logarithm of the length) which length ends at --target: for AdamW at several learning rates (its best counts) and for
recipes/shakespeare_char_muon.yaml. Losses are over the whole validation split. Runs may go side by side: they say nothing
about time. ``seconds`` trains those lengths and nanoGPT's own command in turn, alone on the machine, with all threads;
seconds are of training, evaluation left out.

The same question for the unchanged GPT-2 124M, on a card (not run yet):

    python benchmarks/time_to_loss.py --part losses --text 'corpus/*.txt' --adamw_recipe recipes/gpt2_124m.yaml \
        --muon_recipe recipes/gpt2_124m_fast.yaml --adamw_rates 6e-4 1.2e-3 1.8e-3 --adamw_steps 400 800 1600 \
        --muon_steps 200 400 800 --same_steps 1600 --target 3.0 --seeds 1 2 --set validation_fraction=0.02

nanoGPT (https://github.com/karpathy/nanoGPT) is not part of this project; without a checkout its row is left out.
Finished runs are kept in --folder and not repeated.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import math
import os
import re
import shutil
import statistics
import subprocess
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.runs import ROOT, add_runs, flag_words, prepare_shards, train_once, write_json
from pretrain.machine import hardware
from pretrain.recipe import keys, reading

ADAMW, MUON = ROOT / "recipes" / "shakespeare_char.yaml", ROOT / "recipes" / "shakespeare_char_muon.yaml"
# Its README's command for a CPU; evaluation is rare here, for its time does not count.
NANOGPT = """config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --eval_interval=1000
    --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000
    --lr_decay_iters=2000 --dropout=0.0"""


def schedule(steps: int, recipe: Path) -> list[str]:
    """Return the flags of a schedule of this length: its warm-up is the recipe's, at most a tenth of it."""
    warmup_steps = min(reading.load_recipe(recipe).schedule.warmup_steps, steps // 10)
    return ["--max_steps", str(steps), "--warmup_steps", str(warmup_steps)]


def adamw_schedule(muon: Path) -> list[str]:
    """Return the flags that give AdamW the shape of Muon's schedule, which is better for both than the cosine."""
    shape = reading.load_recipe(muon).schedule
    flags = {"lr_scheduler_type": shape.lr_scheduler_type}
    for name in ("min_lr_ratio", "decay_ratio"):
        if shape.lr_scheduler_type in keys.FIELDS[name].metadata["only"][1]:  # others would be refused as idle
            flags[name] = getattr(shape, name)
    return flag_words(flags)


def ways(asked: argparse.Namespace) -> dict[str, tuple[Path, list[str]]]:
    """Return recipe and flags of each competitor."""
    adamw, muon = Path(asked.adamw_recipe).resolve(), Path(asked.muon_recipe).resolve()
    shape = [*adamw_schedule(muon), *set_flags(asked.adamw_set)]
    found = {f"adamw {rate:g}": (adamw, ["--learning_rate", f"{rate:.6f}", *shape]) for rate in asked.adamw_rates}
    return found | {"muon": (muon, [])}


def set_flags(pairs: list[str]) -> list[str]:
    """Return KEY=VALUE pairs as train.py's words."""
    return flag_words(dict(pair.split("=", 1) for pair in pairs))


def steps_to(target: float, losses: dict[int, float]) -> float | None:
    """Return the length whose run ends at ``target``, between two that were run; None: none ends as low, or all do.

    Args:
        losses: mean final loss by length of the schedule.
    """
    rows = sorted(losses.items())
    for (short, high), (long, low) in zip(rows, rows[1:], strict=False):
        if low <= target < high:
            share = (high - target) / (high - low)
            return math.exp(math.log(short) + share * (math.log(long) - math.log(short)))
    return None


def compare_losses(asked: argparse.Namespace) -> dict:
    """Train every way at every length with every seed; print and return what they end with."""
    text = ["--data_files", str(Path(asked.text).resolve())]
    text += set_flags(asked.set)
    jobs = []
    for way, (recipe, flags) in ways(asked).items():
        lengths = asked.muon_steps if way == "muon" else asked.adamw_steps
        for steps in sorted({*lengths, asked.same_steps}):
            for seed in asked.seeds:
                jobs.append((way, steps, seed, recipe, [*text, *schedule(steps, recipe), *flags]))
    prepare_shards(asked.folder, Path(asked.adamw_recipe).resolve(), text)

    def one(job: tuple) -> dict:
        way, steps, seed, recipe, flags = job
        name = f"{way.replace(' ', '-')}-{steps}-seed{seed}"
        row = train_once(asked.folder, name, recipe, flags, threads=asked.threads, seed=seed)
        row |= {"way": way, "seed": seed}
        print(f"{way:14} {steps:5} steps, seed {seed}: {row['loss']:.4f}", flush=True)
        return row

    with ThreadPoolExecutor(asked.workers) as pool:
        rows = list(pool.map(one, jobs))
    print(f"\n{'way':14} {'steps':>6}  final validation loss, mean and each seed's (nats per character)")
    reached, after = {}, {}
    for way in ways(asked):
        means = {}
        for steps in sorted({row["steps"] for row in rows if row["way"] == way}):
            found = [row["loss"] for row in rows if row["way"] == way and row["steps"] == steps]
            means[steps] = statistics.mean(found)
            print(f"{way:14} {steps:6}  {means[steps]:.4f}  {', '.join(f'{loss:.4f}' for loss in found)}")
        reached[way], after[way] = steps_to(asked.target, means), means[asked.same_steps]
    print(f"\nsteps of the schedule that ends at {asked.target:g} (interpolated)")
    for way, steps in reached.items():
        print(f"{way:14} {f'{steps:,.0f}' if steps else 'outside the lengths that were run'}")
    best = min((steps for way, steps in reached.items() if way != "muon" and steps), default=None)
    if best and reached["muon"]:
        print(f"muon needs {reached['muon'] / best:.2f} times the steps of AdamW at its best rate")
    return {"rows": rows, "steps_to_target": reached, f"after_{asked.same_steps}": after}


def nanogpt_once(checkout: Path, text: Path, threads: int) -> dict:
    """Run nanoGPT's command; return its training ``seconds`` (its own clock, iteration by iteration) and last loss."""
    data = checkout / "data" / "shakespeare_char"
    if not (checkout / "train.py").is_file():
        raise SystemExit(f"--nanogpt {checkout}: holds no train.py; give a checkout of nanoGPT")
    shutil.copy(text, data / "input.txt")
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    if not (data / "train.bin").exists():
        subprocess.run([sys.executable, "prepare.py"], cwd=data, check=True, capture_output=True)
    words = [sys.executable, "train.py", *NANOGPT.split()]
    done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    times = [float(ms) / 1000 for ms in re.findall(r"iter \d+: loss [\d.]+, time ([\d.]+)ms", done.stdout)]
    times = [t for t in times if t < 3 * statistics.median(times)]  # a look takes 13 times an iteration: not training
    losses = re.findall(r"val loss ([\d.]+)", done.stdout)
    return {"steps": 2000, "seconds": statistics.mean(times) * 2000, "loss": float(losses[-1])}


def compare_seconds(asked: argparse.Namespace) -> list[dict]:
    """Train each way in turn, several rounds; print and return its seconds."""
    text = Path(asked.text).resolve()
    turns, (rate, length) = {}, asked.best_adamw
    tuned = [*adamw_schedule(MUON), *set_flags(asked.adamw_set)]
    if asked.nanogpt:
        turns["nanoGPT, its command"] = lambda _: nanogpt_once(Path(asked.nanogpt).resolve(), text, asked.threads)
    for name, recipe, flags in (
        (f"ours, AdamW {rate:g}", ADAMW, [*schedule(int(length), ADAMW), "--learning_rate", str(rate), *tuned]),
        ("ours, Muon", MUON, schedule(asked.best_muon, MUON)),
    ):

        def turn(number: int, name=name, recipe=recipe, flags=flags) -> dict:
            run_name = f"timed-{name.replace(' ', '-').replace(',', '')}-{number}"
            argv = ["--data_files", str(text), *flags]
            return train_once(asked.folder, run_name, recipe, argv, threads=asked.threads)

        turns[name] = turn
    rows = []
    for number in range(asked.rounds):
        for name, turn in turns.items():
            rows.append(turn(number) | {"way": name})
            row = rows[-1]
            print(f"{name:22} {row['steps']:5} steps  {row['seconds']:7.1f} s  loss {row['loss']:.4f}", flush=True)
    print(f"\n{'way':22} steps  ms a step  seconds (median)  of the first's")
    median = {name: statistics.median(r["seconds"] for r in rows if r["way"] == name) for name in turns}
    first = next(iter(median.values()))
    for name, seconds in median.items():
        steps = next(row["steps"] for row in rows if row["way"] == name)
        print(f"{name:22} {steps:5}  {1000 * seconds / steps:9.1f}  {seconds:16.1f}  {seconds / first:14.2f}")
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="TinyShakespeare, 1,115,394 characters")
    parser.add_argument("--part", choices=("losses", "seconds"), required=True)
    parser.add_argument("--target", type=float, default=1.88, help="nats per character; nanoGPT's README says 1.88")
    parser.add_argument("--same_steps", type=int, default=2000, help="a length that every way is run at too")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="recipe keys of every run")
    parser.add_argument("--adamw_set", nargs="*", default=[], metavar="KEY=VALUE", help="recipe keys of AdamW's runs")
    parser.add_argument("--adamw_recipe", default=str(ADAMW))
    parser.add_argument("--muon_recipe", default=str(MUON))
    parser.add_argument("--adamw_rates", type=float, nargs="+", default=[4e-3, 6e-3, 8e-3])
    parser.add_argument("--adamw_steps", type=int, nargs="+", default=[950, 1150])
    parser.add_argument("--muon_steps", type=int, nargs="+", default=[400, 500])
    parser.add_argument("--best_adamw", type=float, nargs=2, default=[6e-3, 1100], metavar=("RATE", "STEPS"))
    parser.add_argument("--best_muon", type=int, default=500, metavar="STEPS")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each run")
    parser.add_argument("--nanogpt", help="folder of a checkout")
    add_runs(parser, "time_to_loss", seeds=(1, 2, 3))
    asked = parser.parse_args(argv)
    about = {"machine": hardware.this_device().name, "torch": torch.__version__, "threads": asked.threads}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    found = compare_losses(asked) if asked.part == "losses" else {"rows": compare_seconds(asked)}
    write_json(asked.json, about | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
