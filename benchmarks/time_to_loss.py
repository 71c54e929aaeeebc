"""Compare AdamW and Muon: updates and seconds to a given loss on nanoGPT's character run.

    python benchmarks/time_to_loss.py --text tinyshakespeare.txt --json headline.json

trains both optimizers with their tuned settings (``TUNED``) and with seeds that no search has used
(``HELD_OUT``). Each run has a schedule of its own length. For each seed, the number of updates to
the target loss is interpolated between the two lengths. Then one run of each optimizer is timed,
alternating, with all threads. Losses are of the whole validation split; seconds are of training
without evaluations. It takes about 11 minutes on two idle cores. ``--text`` may be any text file or
glob, and ``--recipe`` changes the model.

    python benchmarks/time_to_loss.py --text tinyshakespeare.txt --part undo --json undo.json

sets each tuned setting of AdamW back alone. ``benchmarks/tune_optimizers.py`` has found ``TUNED``.
Finished runs are kept in --folder and not repeated.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import hashlib
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import yaml

from benchmarks.runs import ROOT, commit, flag_words, prepare_shards, train_once, write_json
from ursa_minor.base import paths
from ursa_minor.base.run_files import read_metrics
from ursa_minor.machine import device as hardware
from ursa_minor.reporting.curves import BLACK, BLUE, VERMILLION, picture, series

HELD_OUT = (901, 902, 903, 904, 905)  # chosen before the search; no search may use them
UNDO, UNDO_STEPS = (13, 14, 15), 650  # seeds, and about where AdamW comes to the target
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 95% of Student's t, by the number of seeds

# What GPT-2 and the recipes have where nothing was tuned: what undo goes back to.
STOCK = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "lr_scheduler_type": "linear",
    "min_lr_ratio": 0.0,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "initializer_range": 0.02,
}
TUNED = {
    "adamw": STOCK
    | {"learning_rate": 5.6e-3, "warmup_steps": 150, "adam_beta1": 0.8, "initializer_range": 0.08},
    "muon": STOCK | {"learning_rate": 2.2e-2, "warmup_steps": 10, "muon_momentum": 0.85},
}
LENGTHS = {"adamw": (660, 760), "muon": (340, 400)}


def flags(way: str, settings: dict, steps: int) -> list[str]:
    """Return train.py's words for a run of ``steps`` updates with these settings."""
    return flag_words(settings | {"optimizer": way, "max_steps": steps, "eval_on_start": "false"})


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
    half = (
        STUDENT[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
        if len(logs) > 1
        else math.nan
    )
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


class Runs:
    """Trains settings with seeds, several runs at a time."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.pool = ThreadPoolExecutor(args.workers)
        self.more = ["--data_files", paths.literal(str(Path(args.text).resolve()))]
        prepare_shards(args.folder, args.recipe, self.more)

    def losses(self, way: str, settings: dict, steps: int, seeds: Sequence[int]) -> list[float]:
        """Return the final validation loss of each seed."""
        what, words = f"{way}-{steps}", flags(way, settings, steps)
        return list(
            self.pool.map(
                lambda seed: self.train(what, words, seed, self.args.threads)["loss"], seeds
            )
        )

    def train(self, what: str, words: list[str], seed: int, threads: int) -> dict:
        """Train once with these words of train.py. The run's name has a hash of all that it was asked for."""
        recipe, words = self.args.recipe, [*words, *self.more]
        asked_for = hashlib.sha256(repr((recipe.read_text(), words)).encode()).hexdigest()[:8]
        name = f"{what}-{asked_for}-{seed}"
        return train_once(self.args.folder, name, recipe, words, threads=threads, seed=seed)


def undo(runs: Runs) -> dict:
    """Take AdamW's tuned settings back one by one; print and return the differences in loss, by seed."""
    tuned = TUNED["adamw"]
    base = runs.losses("adamw", tuned, UNDO_STEPS, UNDO)
    print(f"adamw, {UNDO_STEPS} updates: {statistics.mean(base):.4f}")
    differences = {}
    for key, value in STOCK.items():
        if tuned[key] != value:
            losses = runs.losses("adamw", tuned | {key: value}, UNDO_STEPS, UNDO)
            differences[key] = [loss - before for loss, before in zip(losses, base, strict=True)]
            listed = ", ".join(f"{difference:+.3f}" for difference in differences[key])
            print(
                f"{key} {tuned[key]} -> {value}: {statistics.mean(differences[key]):+.3f} ({listed})",
                flush=True,
            )
    return {"base": base, "undone": differences}


def headline(runs: Runs, args: argparse.Namespace) -> dict:
    """Train both ways with the held-out seeds, then in turn for seconds; print the page's table, return the figures."""
    losses: dict[str, dict[int, list[float]]] = {}
    for way in TUNED:
        lengths = getattr(args, f"{way}_steps") or LENGTHS[way]
        for steps in lengths:
            losses_by_steps = runs.losses(way, TUNED[way], steps, args.seeds)
            losses.setdefault(way, {})[steps] = losses_by_steps
            print(
                f"{way} {steps} updates: {', '.join(f'{loss:.4f}' for loss in losses_by_steps)}",
                flush=True,
            )
    reached = {
        way: [
            steps_to(
                args.target,
                {steps: seed_values[place] for steps, seed_values in losses_by_steps.items()},
            )
            for place in range(len(args.seeds))
        ]
        for way, losses_by_steps in losses.items()
    }
    seconds: dict[str, list[float]] = {way: [] for way in TUNED}
    for number in range(args.rounds):
        for way in TUNED:
            steps = round(statistics.mean(reached[way]))
            what, words = f"timed{number}-{way}-{steps}", flags(way, TUNED[way], steps)
            seconds[way].append(
                runs.train(what, words, args.seeds[0], torch.get_num_threads())["seconds"]
            )
    print(
        f"\n| | updates to {args.target:g}, mean | standard error | each seed | seconds |\n|---|---|---|---|---|"
    )
    for way, seed_values in reached.items():
        error = (
            statistics.stdev(seed_values) / math.sqrt(len(seed_values))
            if len(seed_values) > 1
            else math.nan
        )
        timed = f"{statistics.median(seconds[way]):.1f}" if args.rounds else "-"
        listed = ", ".join(f"{steps:.0f}" for steps in seed_values)
        print(f"| {way} | {statistics.mean(seed_values):.0f} | {error:.0f} | {listed} | {timed} |")
    share = ratio(reached["muon"], reached["adamw"])
    print(
        f"\nMuon takes {share[0]:.2f} times AdamW's updates (95%: {share[1]:.2f} to {share[2]:.2f})",
        end="",
    )
    if args.rounds:
        print(
            f" and {statistics.median(seconds['muon']) / statistics.median(seconds['adamw']):.2f} times its seconds",
            end="",
        )
    print()
    return {"losses": losses, "reached": reached, "ratio": share, "seconds": seconds}


def draw(runs: Runs, reached: dict[str, list[float]], share: tuple[float, float, float]) -> None:
    """Draw the validation loss of one run of each way that ends at the target, and of the recipe as it is."""
    args, seed, curves = runs.args, runs.args.seeds[0], {}
    for name, way in (
        ("AdamW, nanoGPT's settings", ""),
        ("AdamW, tuned", "adamw"),
        ("Muon, tuned", "muon"),
    ):
        steps = (
            round(reached[way][0]) if way else yaml.safe_load(args.recipe.read_text())["max_steps"]
        )
        words = flags(way, TUNED[way], steps) if way else []
        done = runs.train(
            f"drawn-{way or 'recipe'}",
            [*words, "--eval_steps", str(steps // 20)],
            seed,
            args.threads,
        )
        rows = read_metrics(args.folder / "runs" / done["name"] / "metrics.jsonl")
        curves[name] = series(rows, "eval/loss", "steps")
    target, ends = args.target, [curves[name][0][-1] for name in ("AdamW, tuned", "Muon, tuned")]
    with picture(args.picture, [4.2], ["steps"]) as (axes,):
        for (name, (steps, losses)), color in zip(
            curves.items(), (BLACK, BLUE, VERMILLION), strict=True
        ):
            axes.plot(
                steps, losses, color=color, linewidth=1.8, label=f"{name}: {steps[-1]:,.0f} updates"
            )
            axes.plot(steps[-1], losses[-1], color=color, marker="o")
        axes.axhline(target, color=BLACK, linestyle="--", linewidth=1)
        below = target - 0.06
        axes.annotate(
            "",
            (ends[1], below),
            (ends[0], below),
            arrowprops={"arrowstyle": "->", "color": VERMILLION, "lw": 2},
        )
        words = f"{share[0]:.2f} times the updates ({len(args.seeds)} seeds; 95%: {share[1]:.2f} to {share[2]:.2f})"
        axes.annotate(
            words, (ends[0], below), (8, -4), textcoords="offset points", color=VERMILLION
        )
        axes.set(ylabel="validation loss (nats per character)", ylim=(target - 0.13, target + 0.9))
        axes.legend(frameon=False, labelcolor="linecolor", fontsize=11)
        title = f"Updates to {target:g}, first of {len(args.seeds)} seeds; each run has a schedule of its own length"
        axes.set_title(title)


def main(argv: list[str] | None = None) -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text",
        required=True,
        type=paths.argument,
        help="TinyShakespeare, 1,115,394 characters; or any text",
    )
    parser.add_argument("--part", choices=("headline", "undo"), default="headline")
    parser.add_argument(
        "--target", type=float, default=1.88, help="nats per token; nanoGPT's README says 1.88"
    )
    parser.add_argument(
        "--recipe",
        type=Path,
        default=ROOT / "recipes" / "shakespeare_char.yaml",
        help="model and data",
    )
    parser.add_argument("--adamw_steps", type=int, nargs="+", help="lengths of AdamW's runs")
    parser.add_argument("--muon_steps", type=int, nargs="+", help="lengths of Muon's runs")
    parser.add_argument("--rounds", type=int, default=3, help="of the timed runs in turn; 0: none")
    parser.add_argument("--threads", type=int, default=1, help="of each run that is not timed")
    parser.add_argument(
        "--picture", type=paths.path_argument, metavar="PNG", help="draw one run of each way, too"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=list(HELD_OUT), help="default: %(default)s"
    )
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument(
        "--folder",
        default="time_to_loss",
        type=paths.path_argument,
        help="finished runs there are not repeated",
    )
    parser.add_argument("--json", type=paths.argument, help="write the figures here too")
    args = parser.parse_args(argv)
    args.recipe = args.recipe.resolve()
    about = {"machine": hardware.this_device().name, "torch": torch.__version__, "commit": commit()}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    runs = Runs(args)
    if args.part == "headline":
        figures = headline(runs, args)
        if args.picture:
            draw(runs, figures["reached"], figures["ratio"])
    else:
        figures = undo(runs)
    write_json(args.json, about | figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
