"""Several runs side by side: what their recipes change, what they reached, and their curves in one picture.

    python compare_runs.py runs/adamw runs/muon
    python compare_runs.py runs/a1 runs/a2 runs/a3 runs/b1 runs/b2 runs/b3 --group seed

A run is its folder or its metrics.jsonl. With --group, runs whose recipes differ in nothing else are one column (data_seed
goes with seed): mean and standard deviation, and the difference from the first column with its 95% interval (Welch's t).
Hours are hours of training; of short runs minutes.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput
from ursa_minor.base.paths import argument, path_argument
from ursa_minor.base.run_files import METRICS, RECIPE, Finish, read_finish, read_metrics
from ursa_minor.base.wording import did_you_mean_file, pluralize
from ursa_minor.evaluation.task_data import all_tasks
from ursa_minor.recipe import command_line, keys, loading, reference_curves
from ursa_minor.reporting import curves

COLORS = (curves.BLUE, curves.VERMILLION, curves.GREEN, curves.PURPLE, curves.ORANGE, curves.SKY)
DASHES = ("-", "--", "-.")  # for more columns than colors
POINTS = 400  # of a train loss
# Keys that say nothing of a run.
NAMING_KEYS = ("run_name", "output_dir", "prepared_data_dir", "resume_from_checkpoint", "tags")
CELL = 28  # characters of a value
MAKING = (
    "tokenizer_vocab_size",
    "tokenizer_split",
    "data_files",
    "dataset_name",
    "dataset_config_name",
    "sources",
)
LOSS_LABELS = {
    "eval/loss": "validation loss\n(nats per token)",
    "train/loss": "train loss\n(nats per token)",
}
LOSS_LABELS["eval/bits_per_byte"] = "validation loss\n(bits per byte)"
# Keys that decide which tokens a validation loss is computed on.
UNLIKE_VALIDATION = ("eval_tokens", "validation_tokens", "validation_fraction", "validation_files")
SHORT = 0.2  # hours, below which minutes are shown


class RunColumn(NamedTuple):
    """One run, or the runs of one group.

    Attributes:
        recipe: the keys that they share.
        runs: the rows of metrics.jsonl of each.
        reached: the last value of each metric, by its label in the table, for each run.
        finishes: how each run ended, or None if it is unfinished.
    """

    label: str
    recipe: Mapping[str, object]
    runs: list[list[dict]]
    reached: list[dict[str, float]]
    finishes: list[Finish | None]


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Read the runs, print the table, draw the picture."""
    args = parse(sys.argv[1:] if argv is None else argv)
    paths = [*map(find_metrics, args.runs)]
    columns = grouped(paths, args.group, args.labels)
    reached = [metrics for column in columns for metrics in column.reached]
    if not any(metrics.keys() & {"train loss", "validation loss"} for metrics in reached):
        raise BadInput(f"{', '.join(args.runs)}: no row with a loss yet")
    named = args.reference or next(
        filter(None, (column.recipe.get("reference_curve") for column in columns)), None
    )
    picture = args.out or Path(os.path.relpath(paths[0].resolve().parent.with_name("compare.png")))
    alike = same_tokens(columns)
    even = all(map(ended_alike, columns))
    loss = (
        "eval/loss"
        if alike or not all("bits per byte" in metrics for metrics in reached)
        else "eval/bits_per_byte"
    )
    time = "hours" if max(metrics.get("hours", 0.0) for metrics in reached) >= SHORT else "minutes"
    draw(columns, picture, reference_curves.load(str(named)) if named else None, loss, time)
    lines = table(columns, time, "" if even else " *")
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
    most = max(len(column.runs) for column in columns)
    if most > 1:
        print(
            "\n±: standard deviation; of a difference its 95% interval, * if zero is outside: more than chance"
        )
    if any(len(column.runs) == 2 for column in columns):
        print("two seeds give a wide interval; a third makes it about half as wide")
    if not even:
        print(
            "runs of a column have read different numbers of tokens: their mean is of no one length; no * is given"
        )
    stopped_early = [
        finish
        for column in columns
        for finish in column.finishes
        if finish and finish.stopped_early
    ]
    if stopped_early:
        print(
            f"early stopping ended {pluralize(len(stopped_early), 'run', 'runs')}; figures are those at the end of each run"
        )
    if most == 1 and could_be_grouped(paths):
        print(
            "\n--group seed: runs that differ in seeds only become one column, with means and intervals"
        )
    for key in UNLIKE_VALIDATION:
        values = [column.recipe.get(key) for column in columns]
        if len({str(value) for value in values}) > 1:
            shown = ", ".join(
                f"{column.label}: {value}" for column, value in zip(columns, values, strict=True)
            )
            print(
                f"\n{key} differs ({shown}): the validation losses are of different text and do not compare exactly"
            )
    if unknown := [str(path.parent) for path in paths if not recipe_file(path).is_file()]:
        print(
            f"\nwithout recipe.yaml it is not known which tokenizer and settings a run has: {', '.join(unknown)}"
        )
    elif not alike:
        print(
            "\nthe tokenizers differ: only bits per byte of the same validation text compare, not nats per token"
        )
    print(f"\n{picture}")
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the flags; raises BadInput for any that makes no sense."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "runs", nargs="+", type=argument, metavar="RUN", help="a run's folder, or its metrics.jsonl"
    )
    add(
        "--group",
        nargs="+",
        default=[],
        metavar="KEY",
        help="keys in which runs of a column may differ",
    )
    add("--labels", nargs="+", help="one a column; default: the folders' names")
    add(
        "--reference",
        type=argument,
        metavar="FILE",
        help="a published curve; default: the recipes' reference_curve",
    )
    add(
        "--out", type=path_argument, metavar="PNG", help="default: compare.png beside the first run"
    )
    args = command_line.parse_flags(parser, argv)
    if args.out and (
        args.out.suffix != ".png" or args.out.is_dir() or not args.out.parent.is_dir()
    ):
        raise BadInput(f"--out {args.out}: must be a .png file in a folder that is there")
    if odd := [key for key in args.group if key not in keys.FIELDS]:
        raise BadInput(f"--group {odd[0]}: is not a recipe key; seeds are --group seed")
    return args


def find_metrics(name: str) -> Path:
    """Return a run's metrics.jsonl. Raises BadInput where there is none."""
    path = Path(name) / METRICS if Path(name).is_dir() else Path(name)
    if not path.is_file():
        near = did_you_mean_file(f"runs/{name}", Path.is_dir) or did_you_mean_file(
            name, Path.is_dir
        )
        raise BadInput(f"{path}: no such file; give a run's folder or its metrics.jsonl{near}")
    return path


def grouped(
    paths: Sequence[Path], group: Sequence[str], labels: Sequence[str] | None
) -> list[RunColumn]:
    """Return a column for each run, or for each group of them. Raises BadInput for labels that do not fit."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise BadInput("a run is given twice; give each once")
    free = {*NAMING_KEYS, *group, *(["data_seed"] if "seed" in group else [])}
    groups: dict[str, tuple[dict, list[Path]]] = {}
    recipes = {path: keys.map_paths(read_recipe(path), from_here) for path in paths}
    if group:
        recipes = completed(recipes, free)
    for path in paths:
        recipe = {key: value for key, value in recipes[path].items() if key not in free}
        place = json.dumps(recipe, sort_keys=True, default=str) if group else str(path)
        groups.setdefault(place, (recipe, []))[1].append(path)
    if labels is None:
        labels = [path.resolve().parent.name for _, (path, *_) in groups.values()]
        if len({*labels}) < len(labels):
            labels = [str(path.parent) for _, (path, *_) in groups.values()]
        if group:
            labels = [
                f"{label} x{len(same)}"
                for label, (_, same) in zip(labels, groups.values(), strict=True)
            ]
    if len(labels) != len(groups) or len({*labels}) != len(labels):
        raise BadInput(
            f"--labels {' '.join(labels)}: {len(groups)} different ones are needed, one a column"
        )
    columns = []
    for label, (recipe, same) in zip(labels, groups.values(), strict=True):
        runs = [*map(read_metrics, same)]
        finishes = [read_finish(path.parent) for path in same]
        columns.append(RunColumn(label, recipe, runs, [*map(reach, runs)], finishes))
    return columns


def from_here(name: str, path: str) -> str:
    """Return the value of a recipe key that is a path, relative where it is inside the current folder."""
    place = Path(path)
    is_below = place.is_absolute() and place.is_relative_to(Path.cwd())
    return str(place.relative_to(Path.cwd())) if is_below else path


def could_be_grouped(paths: Sequence[Path]) -> bool:
    """Return whether --group seed would join some of these runs."""
    try:
        return len(grouped(paths, ["seed"], None)) < len(paths)
    except BadInput:  # a recipe is missing or incomplete
        return False


def recipe_file(metrics: Path) -> Path:
    """Return where the recipe of a run is, by its metrics.jsonl."""
    return metrics.with_name(RECIPE)


def read_recipe(metrics: Path) -> dict[str, object]:
    """Return the recipe next to a metrics.jsonl; {} if there is none. Raises BadInput if it is damaged."""
    path = recipe_file(metrics)
    if not path.is_file():
        return {}
    try:
        return {str(name): value for name, value in loading.read_run_recipe(path).items()}
    except BadInput as error:
        raise BadInput(
            f"{error}. Restore it, or compare a copy of {metrics.name} alone, without that file and without --group"
        ) from None


def completed(
    recipes: Mapping[Path, dict[str, object]], free: set[str]
) -> dict[Path, dict[str, object]]:
    """Return recipes with the defaults of the keys that they leave out.

    Args:
        recipes: by their metrics.jsonl.
        free: keys in which runs of a group may differ.

    Raises:
        BadInput: a recipe is missing or lacks a key without a default that another one states, so
            that it is unknown whether the runs differ in it.
    """
    stated = (set().union(*recipes.values()) & keys.FIELDS.keys()) - free
    defaults = {name: keys.FIELDS[name].default for name in keys.FIELDS}
    complete = {}
    for metrics, recipe in recipes.items():
        path = recipe_file(metrics)
        fix = "Copy the recipe.yaml that the run wrote next to its metrics.jsonl, or leave --group out"
        if not path.is_file():
            raise BadInput(
                f"--group: {path} does not exist, so it is not known how that run differs. {fix}"
            )
        if not recipe.keys() & keys.FIELDS.keys():
            raise BadInput(f"--group: {path} has no key of a recipe. {fix}")
        lacking = stated - recipe.keys()
        if recipe.get("init_from") is not None:
            lacking -= set(keys.MODEL_KEYS)  # the model brings them along
        missing = [name for name in sorted(lacking) if defaults[name] is keys.ABSENT]
        if missing:
            raise BadInput(
                f"--group: {path} lacks {', '.join(missing)}, which another recipe states. {fix}"
            )
        complete[metrics] = dict(recipe)
        for name in lacking:
            if defaults[name] is not keys.ABSENT:
                complete[metrics][name] = defaults[name]
    return complete


def ended_alike(column: RunColumn) -> bool:
    """Return whether the mean of a column's runs is that of one length.

    A run that early stopping has ended is finished, at whatever length.
    """
    lengths = {reached.get("tokens") for reached in column.reached}
    if len(lengths) == 1:
        return True
    if None in column.finishes:
        return False
    runs = zip(column.reached, column.finishes, strict=True)
    whole_lengths = {
        reached.get("tokens") for reached, finish in runs if finish and not finish.stopped_early
    }
    return len(whole_lengths) <= 1


def reach(rows: Sequence[Mapping]) -> dict[str, float]:
    """Return the last value of each metric of a run, by its label in the table; NaN if it was not finite."""
    last: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if value is None:
                last[name] = math.nan
            elif isinstance(value, (int, float)):
                last[name] = value
    labels = {
        "validation loss": "eval/loss",
        "bits per byte": "eval/bits_per_byte",
        "train loss": "train/loss",
    }
    labels |= {
        f"{task.label} {score}": task.metric(score)
        for task in all_tasks().values()
        for score in task.scores
    }
    reached = {words: last[name] for words, name in labels.items() if name in last}
    if reached and last.get("elapsed_seconds"):
        trained = [row for row in rows if "elapsed_seconds" in row][-1]
        tokens, seconds = trained["tokens"], trained["elapsed_seconds"]
        reached |= {
            "tokens": tokens,
            "hours": seconds / 3600,
            "minutes": seconds / 60,
            "tokens/s": tokens / seconds,
        }
    return reached


def table(columns: Sequence[RunColumn], time: str, unsure: str) -> list[list[str]]:
    """Return the cells of the table: recipe keys that differ, then what was reached, with differences between groups.

    Args:
        time: hours or minutes.
        unsure: what is left out at the end of a difference.
    """
    lines = [["", *(column.label for column in columns)]]
    for key in dict.fromkeys(itertools.chain.from_iterable(column.recipe for column in columns)):
        values = [str(column.recipe.get(key)) for column in columns]
        if len({*values}) > 1:
            lines.append(
                [
                    key,
                    *(
                        value if len(value) <= CELL else f"{value[: CELL - 3]}..."
                        for value in values
                    ),
                ]
            )
    for name in dict.fromkeys(
        itertools.chain.from_iterable(reached for column in columns for reached in column.reached)
    ):
        if name in {"hours", "minutes"} - {time}:
            continue
        digits = ",.0f" if "tokens" in name else ".3g" if name == time else ".4f"
        first, *others = samples = [
            [reached[name] for reached in column.reached if name in reached] for column in columns
        ]
        lines.append([name, *(with_spread(values, digits) for values in samples)])
        if digits == ".4f" and first and max(map(len, samples)) > 1:
            apart = [difference(first, values, digits).removesuffix(unsure) for values in others]
            lines.append(["  difference", "", *apart])
    return lines


def with_spread(values: Sequence[float], digits: str) -> str:
    """Return a mean and, of several values, the standard deviation."""
    mean = format(statistics.fmean(values), digits) if values else "-"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):{digits}}"


def difference(first: Sequence[float], second: Sequence[float], digits: str) -> str:
    """Return how far apart two means are, and half of the 95% interval by Welch's t where both have two values or more."""
    if not second:
        return "-"
    apart = statistics.fmean(second) - statistics.fmean(first)
    if min(len(first), len(second)) < 2:
        return f"{apart:+{digits}}"
    a, b = (statistics.variance(values) / len(values) for values in (first, second))
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1) or 1)
    half = student(freedom) * math.sqrt(a + b) if a + b else 0.0
    return f"{apart:+{digits}} ± {half:{digits}}{' *' * (abs(apart) > half)}"


def student(freedom: float) -> float:
    """Return the 97.5% quantile of Student's t (to 1e-3), by summing its density from 0 on."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(
        freedom * math.pi
    )
    t, below, step = 0.0, 0.5, 1e-3
    while below < 0.975:
        below += step * scale * (1 + (t + step / 2) ** 2 / freedom) ** (-(freedom + 1) / 2)
        t += step
    return t


def same_tokens(columns: Sequence[RunColumn]) -> bool:
    """Return whether all have one tokenizer; one that is made from the text is another for another text."""
    made = columns[0].recipe.get("tokenizer") in keys.TRAINED_TOKENIZERS
    names = ("tokenizer", *(MAKING if made else ()))
    return all(
        column.recipe.get(name) == columns[0].recipe.get(name)
        for column in columns
        for name in names
    )


def draw(
    columns: Sequence[RunColumn],
    path: Path,
    reference: reference_curves.Reference | None,
    loss: str,
    time: str,
) -> None:
    """Draw the losses over tokens and over time; a group as mean and standard deviation.

    Args:
        loss: the metric of a validation; of "eval/loss", in nats per token, the train loss is drawn, too.
        time: hours or minutes.
    """
    panels = [(loss, "tokens"), (loss, time)] + [("train/loss", "tokens")] * (loss == "eval/loss")
    rows = [run for column in columns for run in column.runs]
    panels = [
        (name, x) for name, x in panels if any(len(curves.series(run, name, x)[0]) for run in rows)
    ]
    heights = [3.2 if name == loss else 2.4 for name, _ in panels]
    with curves.picture(path, heights, [x for _, x in panels]) as all_axes:
        if (most := max(len(column.runs) for column in columns)) > 1:
            all_axes[0].set_title(f"mean of {most} runs, band: one standard deviation")
        for axes, (name, x) in zip(all_axes, panels, strict=True):
            axes.spines.right.set_visible(False)
            lines = [
                line
                for number, column in enumerate(columns)
                if (line := drawn(axes, column, number, name, x))
            ]
            if reference and (name, x) == ("eval/loss", "tokens"):
                places, values = reference.until(max(float(places[-1]) for places, _ in lines))
                axes.plot(places, values, ":", color=curves.BLACK, label=reference.words)
            axes.set(ylabel=LOSS_LABELS[name], ylim=curves.y_limits(lines))
            axes.legend(loc="upper right", fontsize=8, ncols=1 + len(columns) // 9)


def drawn(axes, column: RunColumn, number: int, name: str, x: str) -> tuple | None:
    """Draw one column's metric; return its line, or None where it has none."""
    import numpy as np  # here, for it takes time, and a wrong flag is answered at once

    series = [np.array(curves.series(run, name, x)) for run in column.runs]
    length = min(curve.shape[1] for curve in series)
    if not length:
        return None
    # Plot means of blocks, because noise would hide the other curves.
    block = -(-length // POINTS) if name == "train/loss" else 1
    count = length // block
    places, values = np.stack(
        [curve[:, : count * block].reshape(2, count, block).mean(2) for curve in series], 1
    )
    line = places.mean(0), values.mean(0)
    look = {"color": COLORS[number % len(COLORS)], "linewidth": 1.2, "gid": "run"}
    marker = {} if count > 20 else {"marker": "o", "markersize": 3}
    label = f"{line[1][-1]:.3f} {column.label}"  # in this order: a label that begins with _ is not shown
    axes.plot(*line, DASHES[number // len(COLORS) % len(DASHES)], label=label, **look, **marker)
    if len(values) > 1:
        spread = values.std(0, ddof=1)
        axes.fill_between(
            line[0], line[1] - spread, line[1] + spread, color=look["color"], alpha=0.2, linewidth=0
        )
    return line


if __name__ == "__main__":
    sys.exit(main())
