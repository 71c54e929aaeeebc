"""Compare AdamW and Muon: updates and seconds to a given loss on nanoGPT's character run.

    python benchmarks/time_to_loss.py --text tinyshakespeare.txt --json headline.json

trains both optimizers with their tuned settings (``TUNED``) and with seeds that no search has used
(``HELD_OUT``). There are runs of two lengths, and the schedule of a run ends with the run. For each
seed, the number of updates to the target loss is interpolated between the two lengths. Then one run
of each optimizer is timed, alternating, with all threads. It prints the final losses, a table with
updates and seconds, and their ratio. Losses are of the complete validation split. Seconds are of
training without evaluations. It takes about 11 minutes on two idle cores. ``--text`` may be any
text file or glob, and ``--recipe`` changes the model.

    python benchmarks/time_to_loss.py --text tinyshakespeare.txt --part undo --json undo.json

sets each tuned setting of AdamW back alone, and prints by how much the loss changes.
``benchmarks/tune_optimizers.py`` has found ``TUNED``. Finished runs are kept in --folder and not
repeated.
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
from typing import NamedTuple

import torch
import yaml

from benchmarks.runs import ROOT, commit, flag_words, prepare_shards, train_once, write_json
from ursa_minor.base import paths
from ursa_minor.base.run_files import METRICS, read_metrics
from ursa_minor.machine import device as hardware
from ursa_minor.reporting.curves import series

HELD_OUT = (901, 902, 903, 904, 905)  # chosen before the search; no search may use them
UNDO_SEEDS = (13, 14, 15)
UNDO_STEPS = 650  # AdamW reaches the target after about this number of updates
# The 97.5% quantile of Student's t distribution by the number of seeds, for intervals of 95%.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}

# The settings of GPT-2 and of the recipes before tuning. ``undo`` goes back to them.
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
    "adamw": {
        **STOCK,
        "learning_rate": 5.6e-3,
        "warmup_steps": 150,
        "adam_beta1": 0.8,
        "initializer_range": 0.08,
    },
    "muon": {
        **STOCK,
        "learning_rate": 2.2e-2,
        "warmup_steps": 10,
        "muon_momentum": 0.85,
    },
}
LENGTHS = {"adamw": (660, 760), "muon": (340, 400)}

Settings = dict[str, float | str]


class Ratio(NamedTuple):
    """A ratio, and its 95% confidence interval."""

    value: float
    low: float
    high: float

    def interval(self) -> str:
        """Return the interval for messages."""
        return f"95%: {self.low:.2f} to {self.high:.2f}"


def flags(optimizer: str, settings: Settings, steps: int) -> list[str]:
    """Return arguments of train.py for a run of ``steps`` updates with these settings."""
    run_keys = {
        "optimizer": optimizer,
        "max_steps": steps,
        "eval_on_start": "false",
    }
    return flag_words(settings | run_keys)


def steps_to(target: float, losses: dict[int, float]) -> float:
    """Return the number of updates of a run that would end at the target loss.

    The final loss is assumed to be a linear function of the logarithm of the number of updates.

    Args:
        target: loss.
        losses: final loss by number of updates, for two or more numbers.
    """
    logs = [math.log(steps) for steps in losses]
    final_losses = list(losses.values())
    slope, offset = statistics.linear_regression(logs, final_losses)
    target_log = (target - offset) / slope
    return math.exp(target_log)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the geometric mean of the ratios of two lists, seed by seed.

    Args:
        numerators: updates of one optimizer, one number per seed.
        denominators: updates of the other one.
    """
    logs = []
    for numerator, denominator in zip(numerators, denominators, strict=True):
        logs.append(math.log(numerator / denominator))
    mean = statistics.mean(logs)
    half_width = math.nan
    if len(logs) > 1:
        half_width = STUDENT[len(logs)] * standard_error(logs)
    return Ratio(
        value=math.exp(mean),
        low=math.exp(mean - half_width),
        high=math.exp(mean + half_width),
    )


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean, or NaN for a single value."""
    if len(values) == 1:
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


class Runs:
    """Train settings with several seeds, several runs at a time.

    Args:
        args: of the command line.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.pool = ThreadPoolExecutor(args.workers)
        text = Path(args.text).resolve()
        self.data_flags = ["--data_files", paths.literal(str(text))]
        prepare_shards(args.folder, args.recipe, self.data_flags)

    def losses(
        self, optimizer: str, settings: Settings, steps: int, seeds: Sequence[int]
    ) -> list[float]:
        """Return the final validation loss of each seed."""
        prefix = f"{optimizer}-{steps}"
        run_flags = flags(optimizer, settings, steps)

        def train_seed(seed: int) -> float:
            result = self.train(prefix, run_flags, seed, self.args.threads)
            return result["loss"]

        return list(self.pool.map(train_seed, seeds))

    def train(self, prefix: str, run_flags: list[str], seed: int, threads: int) -> dict:
        """Train once, and return the results of ``train_once``.

        Args:
            prefix: of the run's name. A hash of the recipe and the flags is added.
            run_flags: arguments of train.py.
            seed: of the first weights and of the order of the data.
            threads: CPU threads.
        """
        recipe = self.args.recipe
        folder = self.args.folder
        all_flags = run_flags + self.data_flags
        settings = repr((recipe.read_text(), all_flags))
        digest = hashlib.sha256(settings.encode()).hexdigest()
        name = f"{prefix}-{digest[:8]}-{seed}"
        return train_once(folder, name, recipe, all_flags, threads=threads, seed=seed)


def undo(runs: Runs) -> dict:
    """Set each tuned setting of AdamW back alone. Print and return the differences in loss."""
    tuned = TUNED["adamw"]
    tuned_losses = runs.losses("adamw", tuned, UNDO_STEPS, UNDO_SEEDS)
    mean_loss = statistics.mean(tuned_losses)
    print(f"adamw, {UNDO_STEPS} updates: {mean_loss:.4f}")
    differences_by_key = {}
    for key, value in STOCK.items():
        tuned_value = tuned[key]
        if tuned_value == value:
            continue
        settings = tuned | {key: value}
        losses = runs.losses("adamw", settings, UNDO_STEPS, UNDO_SEEDS)
        differences = []
        for loss, tuned_loss in zip(losses, tuned_losses, strict=True):
            differences.append(loss - tuned_loss)
        differences_by_key[key] = differences
        mean = statistics.mean(differences)
        by_seed = listed(differences, "+.3f")
        print(f"{key} {tuned_value} -> {value}: {mean:+.3f} ({by_seed})", flush=True)
    return {"base": tuned_losses, "undone": differences_by_key}


def listed(numbers: Sequence[float], number_format: str) -> str:
    """Return numbers in one line, separated by commas."""
    return ", ".join(format(number, number_format) for number in numbers)


def headline(runs: Runs, args: argparse.Namespace) -> dict:
    """Train both optimizers with the held-out seeds, then time them, and print the table.

    Returns:
        ``losses`` by optimizer, number of updates and seed; ``reached``, the updates to the target
        by optimizer and seed; ``ratio``, Muon's updates relative to AdamW's; ``seconds`` of each
        timed run by optimizer.
    """
    losses: dict[str, dict[int, list[float]]] = {}
    reached: dict[str, list[float]] = {}
    for optimizer, settings in TUNED.items():
        losses_by_steps = {}
        lengths = getattr(args, f"{optimizer}_steps") or LENGTHS[optimizer]
        for steps in lengths:
            final_losses = runs.losses(optimizer, settings, steps, args.seeds)
            losses_by_steps[steps] = final_losses
            listed_losses = listed(final_losses, ".4f")
            print(f"{optimizer} {steps} updates: {listed_losses}", flush=True)
        losses[optimizer] = losses_by_steps
        reached[optimizer] = updates_to_target(args.target, losses_by_steps)

    seconds = time_runs(runs, args, reached)
    updates_ratio = ratio(reached["muon"], reached["adamw"])
    print_table(args, reached, seconds)
    print_ratio(updates_ratio, seconds)
    return {
        "losses": losses,
        "reached": reached,
        "ratio": updates_ratio,
        "seconds": seconds,
    }


def time_runs(
    runs: Runs, args: argparse.Namespace, reached: dict[str, list[float]]
) -> dict[str, list[float]]:
    """Time runs to the target loss with all threads. The optimizers alternate.

    Args:
        runs: trains the runs.
        args: of the command line.
        reached: updates to the target by optimizer and seed.

    Returns:
        The seconds of each run by optimizer.
    """
    seconds: dict[str, list[float]] = {optimizer: [] for optimizer in TUNED}
    first_seed = args.seeds[0]
    all_threads = torch.get_num_threads()
    for number in range(args.rounds):
        for optimizer, settings in TUNED.items():
            steps = round(statistics.mean(reached[optimizer]))
            prefix = f"timed{number}-{optimizer}-{steps}"
            run_flags = flags(optimizer, settings, steps)
            result = runs.train(prefix, run_flags, first_seed, all_threads)
            seconds[optimizer].append(result["seconds"])
    return seconds


def updates_to_target(target: float, losses: dict[int, list[float]]) -> list[float]:
    """Return the number of updates to the target loss for each seed.

    Args:
        target: loss.
        losses: for each number of updates, the final losses of the seeds.
    """
    result = []
    for losses_of_seed in zip(*losses.values(), strict=True):
        losses_by_steps = dict(zip(losses, losses_of_seed, strict=True))
        result.append(steps_to(target, losses_by_steps))
    return result


def print_table(
    args: argparse.Namespace, reached: dict[str, list[float]], seconds: dict[str, list[float]]
) -> None:
    """Print the table of docs/fewer_tokens.md."""
    print()
    print(f"| | updates to {args.target:g}, mean | standard error | each seed | seconds |")
    print("|---|---|---|---|---|")
    for optimizer, updates in reached.items():
        mean = statistics.mean(updates)
        error = standard_error(updates)
        by_seed = listed(updates, ".0f")
        timed = "-"
        if seconds[optimizer]:
            median = statistics.median(seconds[optimizer])
            timed = f"{median:.1f}"
        print(f"| {optimizer} | {mean:.0f} | {error:.0f} | {by_seed} | {timed} |")


def print_ratio(updates: Ratio, seconds: dict[str, list[float]]) -> None:
    """Print Muon's updates and seconds relative to AdamW's."""
    interval = updates.interval()
    sentence = f"Muon takes {updates.value:.2f} times AdamW's updates ({interval})"
    if seconds["muon"]:
        muon_seconds = statistics.median(seconds["muon"])
        adamw_seconds = statistics.median(seconds["adamw"])
        seconds_ratio = muon_seconds / adamw_seconds
        sentence += f" and {seconds_ratio:.2f} times its seconds"
    print()
    print(sentence)


def loss_curves(runs: Runs, reached: dict[str, list[float]]) -> list[dict]:
    """Train one run per optimizer, and the recipe without changes, with evaluations.

    ``pictures.py`` draws the result.

    Args:
        runs: trains the runs.
        reached: updates to the target by optimizer and seed.

    Returns:
        For each run its ``label``, and the ``steps`` and ``losses`` of its evaluations.
    """
    recipe = yaml.safe_load(runs.args.recipe.read_text())
    adamw_steps = round(reached["adamw"][0])
    muon_steps = round(reached["muon"][0])
    adamw_flags = flags("adamw", TUNED["adamw"], adamw_steps)
    muon_flags = flags("muon", TUNED["muon"], muon_steps)
    return [
        loss_curve(runs, "AdamW, nanoGPT's settings", "recipe", [], recipe["max_steps"]),
        loss_curve(runs, "AdamW, tuned", "adamw", adamw_flags, adamw_steps),
        loss_curve(runs, "Muon, tuned", "muon", muon_flags, muon_steps),
    ]


def loss_curve(runs: Runs, label: str, name: str, run_flags: list[str], steps: int) -> dict:
    """Train a run with twenty evaluations and the first seed. See ``loss_curves``.

    Args:
        runs: trains the run.
        label: of the curve.
        name: part of the run's name.
        run_flags: arguments of train.py.
        steps: of the run.
    """
    args = runs.args
    all_flags = [*run_flags, "--eval_steps", str(steps // 20)]
    first_seed = args.seeds[0]
    result = runs.train(f"drawn-{name}", all_flags, first_seed, args.threads)
    rows = read_metrics(args.folder / "runs" / result["name"] / METRICS)
    evaluated_steps, losses = series(rows, "eval/loss", "steps")
    return {
        "label": label,
        "steps": evaluated_steps.tolist(),
        "losses": losses.round(4).tolist(),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text",
        required=True,
        type=paths.argument,
        metavar="PATH",
        help="Text file or glob, for example TinyShakespeare (1,115,394 characters).",
    )
    parser.add_argument(
        "--part",
        choices=("headline", "undo"),
        default="headline",
        help="Comparison to make. Default: %(default)s.",
    )
    parser.add_argument(
        "--target",
        type=float,
        default=1.88,
        help="Target loss in nats per token. Default: %(default)s, as in nanoGPT's README.",
    )
    parser.add_argument(
        "--recipe",
        type=Path,
        metavar="PATH",
        default=ROOT / "recipes" / "shakespeare_char.yaml",
        help="Recipe with the model and the data settings. Default: shakespeare_char.",
    )
    for optimizer, lengths in LENGTHS.items():
        parser.add_argument(
            f"--{optimizer}_steps",
            type=int,
            nargs="+",
            metavar="N",
            help=f"Updates of the runs with {optimizer}. Default: {lengths[0]} {lengths[1]}.",
        )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        default=3,
        help="Timed runs of each optimizer, or 0 for none. Default: %(default)s.",
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        default=1,
        help="CPU threads of each run that is not timed. Default: %(default)s.",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        metavar="N",
        default=list(HELD_OUT),
        help="Seeds. Default: %(default)s.",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        default=2,
        help="Runs at the same time. Default: %(default)s.",
    )
    parser.add_argument(
        "--folder",
        default="time_to_loss",
        type=paths.path_argument,
        metavar="PATH",
        help="Folder of the runs. Finished runs are not repeated. Default: %(default)s.",
    )
    parser.add_argument(
        "--json",
        type=paths.argument,
        metavar="PATH",
        help="Also write the figures to this file.",
    )
    args = parser.parse_args(argv)
    args.recipe = args.recipe.resolve()
    if args.recipe.is_file() and "max_steps" not in yaml.safe_load(args.recipe.read_text()):
        parser.error(f"--recipe {args.recipe}: must state max_steps, not num_train_epochs")
    return args


def main(argv: list[str] | None = None) -> int:
    """Make the comparison, and return the exit status."""
    args = parse(argv)
    about = {
        "machine": hardware.this_device().name,
        "torch": torch.__version__,
        "commit": commit(),
    }
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    runs = Runs(args)
    if args.part == "undo":
        figures = undo(runs)
    else:
        figures = headline(runs, args)
        figures["target"] = args.target
        figures["curves"] = loss_curves(runs, figures["reached"])
    write_json(args.json, about | figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
