"""How many updates, and seconds, to a given loss: AdamW against Muon on nanoGPT's character run, each tuned by one search.

    python benchmarks/time_to_loss.py --text tinyshakespeare.txt --json headline.json

trains both as tuned (``TUNED``) with the seeds that no search has seen (``HELD_OUT``), at several lengths, each with a
schedule of its own; finds for each seed the length that ends at --target; then times one run of each in turn, alone on the
machine, with all threads. Losses are of the whole validation split; seconds are of training, evaluations left out. About
11 minutes on two cores. ``--text`` may be any text file or glob, and ``--recipe`` and ``--set`` change the model.

    python benchmarks/time_to_loss.py --text tinyshakespeare.txt --part search --trials 64 --way adamw --json search.json
    python benchmarks/time_to_loss.py --text tinyshakespeare.txt --part undo --way adamw --json undo.json

``search`` is what has found ``TUNED``, the same for both: each trial moves 1 to 3 knobs of one of the three best so far to
a value nearby, and is the mean of two seeds; the four best are then trained with three more seeds. ``undo`` takes the
tuned settings back one by one. Finished runs are kept in --folder and not repeated.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import hashlib
import math
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import yaml

from benchmarks.runs import ROOT, add_runs, commit, flag_words, prepare_shards, train_once, write_json
from pretrain.base.layout import read_metrics
from pretrain.machine import hardware
from pretrain.run.curves import BLACK, BLUE, VERMILLION, picture, series

HELD_OUT = (901, 902, 903, 904, 905)  # chosen before the search; no search may use them
SEARCH, CONFIRM = (11, 12), (13, 14, 15)
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 95% of Student's t, by the number of seeds

# What a search may change, for both ways. A line is the shape that ends at 0.
SPACE = {
    "learning_rate": (2e-3, 2.8e-3, 4e-3, 5.6e-3, 8e-3, 1.1e-2, 1.6e-2, 2.2e-2, 3.2e-2, 4.5e-2),
    "embedding_lr_ratio": (0.25, 0.5, 1.0, 2.0, 4.0),
    "position_lr_ratio": (0.25, 0.5, 1.0, 2.0, 4.0),
    "vector_lr_ratio": (0.1, 0.3, 1.0, 3.0),
    "adam_beta1": (0.7, 0.8, 0.85, 0.9, 0.95),
    "adam_beta2": (0.95, 0.98, 0.99, 0.995),
    "warmup_steps": (10, 30, 60, 100, 150),
    "shape": ("cosine 0.1", "cosine 0.0", "linear 0.0", "wsd 0.8", "wsd 0.5"),
    "weight_decay": (0.01, 0.03, 0.1, 0.3, 1.0),
    "max_grad_norm": (0.1, 0.3, 1.0, 0.0),
    "initializer_range": (0.02, 0.03, 0.04, 0.06, 0.08),
    "adam_nesterov": ("false", "true"),
    "cautious": ("false", "true"),
}
SPACES = {"adamw": SPACE, "muon": SPACE | {"muon_momentum": (0.7, 0.8, 0.85, 0.9, 0.95)}}
# What GPT-2 and the recipes have where nothing was tuned: what undo goes back to.
STOCK = {
    "embedding_lr_ratio": 1.0,
    "position_lr_ratio": 1.0,
    "vector_lr_ratio": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "shape": "linear 0.0",
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "initializer_range": 0.02,
    "adam_nesterov": "false",
    "cautious": "false",
}
# Where each search begins: the best known before it (the end of docs/fewer_tokens.md; the Muon recipe, on this grid).
BEGIN = {
    "adamw": STOCK
    | {"learning_rate": 8e-3, "warmup_steps": 100, "max_grad_norm": 0.3, "initializer_range": 0.06}
    | {"adam_nesterov": "true", "cautious": "true"},
    "muon": STOCK | {"learning_rate": 2.2e-2, "warmup_steps": 10, "muon_momentum": 0.85},
}
SEARCH_STEPS = {"adamw": 650, "muon": 400}  # about where each comes to the target
# What the searches found: of Muon's, no trial was better on the confirming seeds than where it began.
TUNED = {
    "adamw": BEGIN["adamw"]
    | {"learning_rate": 5.6e-3, "embedding_lr_ratio": 2.0, "vector_lr_ratio": 3.0, "adam_beta1": 0.8}
    | {"max_grad_norm": 1.0, "initializer_range": 0.08, "adam_nesterov": "false"},
    "muon": BEGIN["muon"],
}
LENGTHS = {"adamw": (600, 700), "muon": (340, 400)}


def flags(way: str, settings: dict, steps: int) -> list[str]:
    """Return train.py's words for a run of ``steps`` updates with these settings."""
    shape, number = settings["shape"].split()
    keys = {key: value for key, value in settings.items() if key != "shape"} | {"optimizer": way, "max_steps": steps}
    keys |= {"lr_scheduler_type": shape, "min_lr_ratio": 0.0 if shape == "wsd" else number, "eval_on_start": "false"}
    keys |= {"decay_ratio": number} if shape == "wsd" else {}
    return flag_words(keys)


def steps_to(target: float, losses: dict[int, float]) -> float:
    """Return the length whose run ends at ``target``, by a straight line through the losses over the length's logarithm.

    Args:
        losses: final loss by length of the schedule, of two or more lengths.
    """
    logs = {math.log(steps): loss for steps, loss in losses.items()}
    slope, offset = statistics.linear_regression(list(logs), list(logs.values()))
    return math.exp((target - offset) / slope)


def ratio(these: Sequence[float], those: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of two ways' lengths, seed by seed (its geometric mean), and the ends of its 95% interval."""
    logs = [math.log(this / that) for this, that in zip(these, those, strict=True)]
    mean = statistics.mean(logs)
    half = STUDENT[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


class Runs:
    """Trains settings with seeds, several runs at a time."""

    def __init__(self, asked: argparse.Namespace):
        self.asked = asked
        self.pool = ThreadPoolExecutor(asked.workers)
        self.more = ["--data_files", str(Path(asked.text).resolve())]
        self.more += flag_words(dict(pair.split("=", 1) for pair in asked.set))
        prepare_shards(asked.folder, asked.recipe, self.more)

    def losses(self, way: str, settings: dict, steps: int, seeds: Sequence[int]) -> list[float]:
        """Return the final validation loss of each seed."""
        return list(self.pool.map(lambda seed: self.one(way, settings, steps, seed, self.asked.threads)["loss"], seeds))

    def one(self, way: str, settings: dict, steps: int, seed: int, threads: int, prefix: str = "") -> dict:
        """Train once. The run's name has a hash of all that it was asked for."""
        return self.train(f"{prefix}{way}-{steps}", flags(way, settings, steps), seed, threads)

    def train(self, what: str, words: list[str], seed: int, threads: int) -> dict:
        """Train with these words of train.py."""
        recipe, words = self.asked.recipe, [*words, *self.more]
        asked_for = hashlib.sha256(repr((recipe.read_text(), words)).encode()).hexdigest()[:8]
        name = f"{what}-{asked_for}-{seed}"
        return train_once(self.asked.folder, name, recipe, words, threads=threads, seed=seed)


def moved(parent: dict, space: dict, chance: random.Random) -> dict:
    """Return settings with 1 to 3 knobs moved by 1 or 2 values."""
    found = dict(parent)
    for key in chance.sample(sorted(space), chance.randint(1, 3)):
        here = space[key].index(found[key])
        near = [value for place, value in enumerate(space[key]) if 0 < abs(place - here) <= 2]
        found[key] = chance.choice(near)
    return found


def search(runs: Runs, way: str, trials: int) -> dict:
    """Search; print each trial; return all of them and the best."""
    chance, space = random.Random(0), SPACES[way]
    tried: list[tuple[float, dict]] = []
    for number in range(trials):
        settings = BEGIN[way]
        while any(settings == other for _, other in tried):
            settings = moved(chance.choice(sorted(tried, key=lambda t: t[0])[:3])[1], space, chance)
        losses = runs.losses(way, settings, SEARCH_STEPS[way], SEARCH)
        tried.append((statistics.mean(losses), settings))
        changed = {key: value for key, value in settings.items() if value != BEGIN[way][key]}
        best = min(loss for loss, _ in tried)
        print(f"{way} {number:3} {tried[-1][0]:.4f} (best {best:.4f}) {changed}", flush=True)
    confirmed = []
    for loss, settings in sorted(tried, key=lambda t: t[0])[:4]:
        again = runs.losses(way, settings, SEARCH_STEPS[way], CONFIRM)
        confirmed.append((statistics.mean(again), loss, settings))
        print(f"{way} confirmed {confirmed[-1][0]:.4f} (was {loss:.4f})", flush=True)
    best = min(confirmed, key=lambda t: t[0])[-1]
    print(f"{way}: {best}")
    return {"trials": tried, "confirmed": confirmed, "best": best}


def undo(runs: Runs, way: str) -> dict:
    """Take the tuned settings back one by one; print and return the differences in loss, by seed."""
    tuned, steps, seeds = TUNED[way], SEARCH_STEPS[way], CONFIRM
    base = runs.losses(way, tuned, steps, seeds)
    print(f"{way}, {steps} updates: {statistics.mean(base):.4f}")
    found = {}
    for key, value in STOCK.items():
        if tuned[key] != value:
            losses = runs.losses(way, tuned | {key: value}, steps, seeds)
            found[key] = [loss - before for loss, before in zip(losses, base, strict=True)]
            each = ", ".join(f"{difference:+.3f}" for difference in found[key])
            print(f"{key} {tuned[key]} -> {value}: {statistics.mean(found[key]):+.3f} ({each})", flush=True)
    return {"base": base, "undone": found}


def headline(runs: Runs, asked: argparse.Namespace) -> dict:
    """Train both ways with the held-out seeds, then in turn for seconds; print the page's table, return the figures."""
    losses: dict[str, dict[int, list[float]]] = {}
    for way in TUNED:
        lengths = getattr(asked, f"{way}_steps") or LENGTHS[way]
        for steps in lengths:
            found = runs.losses(way, TUNED[way], steps, asked.seeds)
            losses.setdefault(way, {})[steps] = found
            print(f"{way} {steps} updates: {', '.join(f'{loss:.4f}' for loss in found)}", flush=True)
    reached = {
        way: [
            steps_to(asked.target, {steps: each[place] for steps, each in found.items()})
            for place in range(len(asked.seeds))
        ]
        for way, found in losses.items()
    }
    seconds: dict[str, list[float]] = {way: [] for way in TUNED}
    for number in range(asked.rounds):
        for way in TUNED:
            steps = round(statistics.mean(reached[way]))
            done = runs.one(way, TUNED[way], steps, asked.seeds[0], torch.get_num_threads(), f"timed{number}-")
            seconds[way].append(done["seconds"])
    print(f"\n| | updates to {asked.target:g}, mean | standard error | each seed | seconds |\n|---|---|---|---|---|")
    for way, each in reached.items():
        error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.nan
        timed = f"{statistics.median(seconds[way]):.1f}" if asked.rounds else "-"
        listed = ", ".join(f"{steps:.0f}" for steps in each)
        print(f"| {way} | {statistics.mean(each):.0f} | {error:.0f} | {listed} | {timed} |")
    share = ratio(reached["muon"], reached["adamw"])
    print(f"\nMuon takes {share[0]:.2f} times AdamW's updates (95%: {share[1]:.2f} to {share[2]:.2f})", end="")
    if asked.rounds:
        print(
            f" and {statistics.median(seconds['muon']) / statistics.median(seconds['adamw']):.2f} times its seconds",
            end="",
        )
    print()
    return {"losses": losses, "reached": reached, "ratio": share, "seconds": seconds}


def draw(runs: Runs, reached: dict[str, list[float]], share: tuple[float, float, float]) -> None:
    """Draw the validation loss of one run of each way that ends at the target, and of the recipe as it is."""
    asked, seed, curves = runs.asked, runs.asked.seeds[0], {}
    for name, way in (("AdamW, nanoGPT's settings", ""), ("AdamW, tuned", "adamw"), ("Muon, tuned", "muon")):
        steps = round(reached[way][0]) if way else yaml.safe_load(asked.recipe.read_text())["max_steps"]
        words = flags(way, TUNED[way], steps) if way else []
        done = runs.train(f"drawn-{way or 'recipe'}", [*words, "--eval_steps", str(steps // 20)], seed, asked.threads)
        rows = read_metrics(asked.folder / "runs" / done["name"] / "metrics.jsonl")
        curves[name] = series(rows, "eval/loss", "steps")
    target, ends = asked.target, [curves[name][0][-1] for name in ("AdamW, tuned", "Muon, tuned")]
    with picture(asked.picture, [4.2], "steps") as (axes,):
        for (name, (steps, losses)), color in zip(curves.items(), (BLACK, BLUE, VERMILLION), strict=True):
            axes.plot(steps, losses, color=color, linewidth=1.8, label=f"{name}: {steps[-1]:,.0f} updates")
            axes.plot(steps[-1], losses[-1], color=color, marker="o")
        axes.axhline(target, color=BLACK, linestyle="--", linewidth=1)
        below = target - 0.06
        axes.annotate(
            "", (ends[1], below), (ends[0], below), arrowprops={"arrowstyle": "->", "color": VERMILLION, "lw": 2}
        )
        words = f"{share[0]:.2f} times the updates ({len(asked.seeds)} seeds; 95%: {share[1]:.2f} to {share[2]:.2f})"
        axes.annotate(words, (ends[0], below), (8, -4), textcoords="offset points", color=VERMILLION)
        axes.set(ylabel="validation loss (nats per character)", ylim=(target - 0.13, target + 0.9))
        axes.legend(frameon=False, labelcolor="linecolor", fontsize=11)
        title = f"Updates to {target:g}, first of {len(asked.seeds)} seeds; each run has a schedule of its own length"
        axes.set_title(title)


def main(argv: list[str] | None = None) -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="TinyShakespeare, 1,115,394 characters; or any text")
    parser.add_argument("--part", choices=("headline", "search", "undo"), default="headline")
    parser.add_argument("--way", choices=tuple(TUNED), help="of search and undo")
    parser.add_argument("--trials", type=int, default=64, help="of search")
    parser.add_argument("--target", type=float, default=1.88, help="nats per token; nanoGPT's README says 1.88")
    parser.add_argument(
        "--recipe", type=Path, default=ROOT / "recipes" / "shakespeare_char.yaml", help="model and data"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="recipe keys of every run")
    parser.add_argument("--adamw_steps", type=int, nargs="+", help="lengths of AdamW's runs")
    parser.add_argument("--muon_steps", type=int, nargs="+", help="lengths of Muon's runs")
    parser.add_argument("--rounds", type=int, default=3, help="of the timed runs in turn; 0: none")
    parser.add_argument("--threads", type=int, default=1, help="of each run that is not timed")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw one run of each way, too")
    add_runs(parser, "time_to_loss", seeds=HELD_OUT)
    parser.set_defaults(workers=2)
    asked = parser.parse_args(argv)
    asked.recipe = asked.recipe.resolve()
    about = {"machine": hardware.this_device().name, "torch": torch.__version__, "commit": commit()}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    runs = Runs(asked)
    if asked.part == "headline":
        found = headline(runs, asked)
        if asked.picture:
            draw(runs, found["reached"], found["ratio"])
    else:
        found = search(runs, asked.way, asked.trials) if asked.part == "search" else undo(runs, asked.way)
    write_json(asked.json, about | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
