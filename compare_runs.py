"""Compare runs: the settings that differ, the final metrics, and the loss curves in one picture.

    python compare_runs.py runs/adamw runs/muon
    python compare_runs.py runs/a1 runs/a2 runs/a3 runs/b1 runs/b2 runs/b3 --group seed

A run is given as its folder or its metrics.jsonl. With --group, the runs whose recipes differ only
in the given keys are one column (data_seed counts as given if seed is). Such a column shows the
mean and the standard deviation, and its difference from the first column with a 95% interval
(Welch's t-test). Times are hours of training, or minutes if all runs are short.
"""

import argparse
import math
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# This import comes first, because it makes a missing package one line instead of a traceback.
from ursa_minor.base.cli import exit_on_bad_input

# isort: split

import numpy as np

from ursa_minor.base import terminal
from ursa_minor.base.errors import BadInput
from ursa_minor.base.paths import argument, can_be_picture, path_argument
from ursa_minor.base.run_files import METRICS, RECIPE, Finish, read_finish, read_metrics
from ursa_minor.base.wording import did_you_mean, did_you_mean_file, pluralize
from ursa_minor.evaluation.task_data import all_tasks
from ursa_minor.recipe import command_line, keys, reference_curves
from ursa_minor.reporting import curves
from ursa_minor.reporting.run_groups import RunGroup, group_runs, read_recipe, recipe_file

COLORS = (curves.BLUE, curves.VERMILLION, curves.GREEN, curves.PURPLE, curves.ORANGE, curves.SKY)
DASHES = ("-", "--", "-.")  # if there are more columns than colors
MAX_POINTS = 400  # points of a drawn train loss
MAX_MARKERS = 20  # a line with more points has no markers
MAX_CELL = 28  # characters of a recipe value in the table
SHORT_HOURS = 0.2  # times are shown in minutes if no run is longer

# Recipe keys that decide which tokenizer is trained from the text of a run.
TOKENIZER_TRAINING_KEYS = (
    "tokenizer_vocab_size",
    "tokenizer_split",
    "data_files",
    "dataset_name",
    "dataset_config_name",
    "dataset_split",
    "sources",
)
# Recipe keys that decide which tokens a validation loss is computed on.
VALIDATION_KEYS = (
    "eval_tokens",
    "validation_tokens",
    "validation_fraction",
    "validation_files",
    "document_separator",
    "validation_split",
)

LOSS_LABELS = {
    "eval/loss": "validation loss\n(nats per token)",
    "train/loss": "train loss\n(nats per token)",
    "eval/bits_per_byte": "validation loss\n(bits per byte)",
}


class RunColumn(NamedTuple):
    """One column of the table: a run, or the runs of one group.

    Attributes:
        label: its heading.
        recipe: the recipe keys that the runs share.
        runs: the rows of metrics.jsonl of each run.
        results: the final metrics of each run (``final_metrics``).
        finishes: how each run ended, or None if it is unfinished.
        interruptions: for each run that has not reached its max_steps, how far it is, such as
            "17 of 1,000". None for the others, and for runs without a recipe.
    """

    label: str
    recipe: Mapping[str, object]
    runs: list[list[dict]]
    results: list[dict[str, float]]
    finishes: list[Finish | None]
    interruptions: list[str | None]

    @property
    def num_interrupted(self) -> int:
        """Number of runs that have not reached their max_steps."""
        return sum(1 for interruption in self.interruptions if interruption)


class Line(NamedTuple):
    """The points of a drawn line."""

    x: np.ndarray
    y: np.ndarray


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Read the runs, draw the picture and print the table."""
    args = parse(sys.argv[1:] if argv is None else argv)
    paths = [find_metrics(name) for name in args.runs]
    columns = make_columns(paths, args.group, args.labels)
    results = []
    for column in columns:
        results += column.results
    if not any("train loss" in result or "validation loss" in result for result in results):
        raise BadInput(f"{', '.join(args.runs)}: no row with a loss yet")

    picture = args.out
    if picture is None:
        first_run = paths[0].resolve().parent
        picture = Path(os.path.relpath(first_run.with_name("compare.png")))
    is_long = any(result.get("hours", 0.0) >= SHORT_HOURS for result in results)
    time_unit = "hours" if is_long else "minutes"
    have_same_tokenizer = same_tokenizer(columns)
    loss = "eval/loss"
    if not have_same_tokenizer and all("bits per byte" in result for result in results):
        loss = "eval/bits_per_byte"
    reference = load_reference(args.reference_curve, columns, paths, loss)
    draw(columns, picture, reference, loss, time_unit)

    have_same_lengths = all(has_same_lengths(column) for column in columns)
    width = terminal.width_of(sys.stdout)
    rows = table(columns, time_unit, mark_differences=have_same_lengths)
    print("\n".join(terminal.align(rows, width)))
    for note in table_notes(columns, have_same_lengths):
        print(terminal.wrap(note, width))
    if len(columns) == len(paths) and could_be_grouped(paths):
        note = (
            "\nWith --group seed, the runs that differ only in seeds become one column, with means "
            "and intervals."
        )
        print(terminal.wrap(note, width))
    for note in comparison_notes(columns, paths, have_same_tokenizer):
        print(terminal.wrap(note, width))
    print(f"\n{picture}")
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line. Raises BadInput for an invalid option."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    selection = parser.add_argument_group("runs")
    selection.add_argument(
        "runs",
        nargs="+",
        type=argument,
        metavar="RUN",
        help="Runs to compare: run folders, or their metrics.jsonl.",
    )
    selection.add_argument(
        "--group",
        nargs="+",
        default=[],
        metavar="KEY",
        help="Recipe keys in which the runs of a column may differ, usually seed, which includes "
        "data_seed. Such a column has the mean and the standard deviation, and its difference from "
        "the first column with a 95%% interval (Welch's t-test). (default: none, so that each run "
        "is a column)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--labels",
        nargs="+",
        metavar="LABEL",
        help="Headings of the columns, one for each column. (default: the names of the run "
        "folders)",
    )
    output.add_argument(
        "--reference_curve",
        type=argument,
        metavar="PATH",
        help="File with the losses of a published run to draw, such as "
        f"{reference_curves.EXAMPLE}. (default: the reference_curve of the first recipe that has "
        "one; none draws no curve)",
    )
    output.add_argument(
        "--out",
        type=path_argument,
        metavar="PATH",
        help="The .png file of the picture. (default: compare.png next to the folder of the first "
        "run)",
    )
    args = command_line.parse_flags(parser, argv)
    if args.out and not can_be_picture(args.out):
        raise BadInput(f"--out {args.out}: must be a .png file in a folder that exists")
    for key in args.group:
        if key not in keys.FIELDS:
            raise BadInput(
                f"--group {key}: {key!r} is not a recipe key{did_you_mean(key, keys.FIELDS)}"
            )
    return args


# Runs and columns


def find_metrics(name: str) -> Path:
    """Return the metrics.jsonl of a run, given as its folder or as this file.

    Raises:
        BadInput: there is no such file.
    """
    path = Path(name) / METRICS if Path(name).is_dir() else Path(name)
    if not path.is_file():
        suggestion = did_you_mean_file(f"runs/{name}", Path.is_dir)
        if not suggestion:
            suggestion = did_you_mean_file(name, Path.is_dir)
        raise BadInput(
            f"{path}: no such file. Use the folder of a run, or its {METRICS}{suggestion}"
        )
    return path


def make_columns(
    paths: Sequence[Path], group_keys: Sequence[str], labels: Sequence[str] | None
) -> list[RunColumn]:
    """Return a column for each run, or for each group of runs if there are ``group_keys``.

    Args:
        paths: metrics.jsonl of each run.
        group_keys: recipe keys in which the runs of a group may differ.
        labels: headings of the columns, or None for the names of the run folders.

    Raises:
        BadInput: a run is given twice, or there is not one label for each column.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise BadInput("a run is given twice. Give each run once")
    groups = group_runs(paths, group_keys)
    if labels is None:
        labels = folder_labels(groups, with_counts=bool(group_keys))
    if len(labels) != len(groups) or len(set(labels)) != len(labels):
        raise BadInput(
            f"--labels {' '.join(labels)}: {len(groups)} different labels are needed, one for "
            f"each column"
        )
    columns = []
    for label, group in zip(labels, groups, strict=True):
        runs = [read_metrics(path) for path in group.paths]
        results = [final_metrics(rows) for rows in runs]
        finishes = [read_finish(path.parent) for path in group.paths]
        interruptions = [
            describe_interruption(path, rows, finish)
            for path, rows, finish in zip(group.paths, runs, finishes, strict=True)
        ]
        columns.append(RunColumn(label, group.recipe, runs, results, finishes, interruptions))
    return columns


def describe_interruption(path: Path, rows: Sequence[Mapping], finish: Finish | None) -> str | None:
    """Return how far a run is that has not reached its max_steps, such as "17 of 1,000", or None.

    Args:
        path: metrics.jsonl of the run.
        rows: of metrics.jsonl.
        finish: how the run ended, or None if it is unfinished.
    """
    max_steps = read_recipe(path).get("max_steps")
    if finish is not None or not isinstance(max_steps, int):
        return None
    steps = [row["step"] for row in rows if "step" in row]
    last_step = max(steps, default=0)
    if last_step >= max_steps:
        return None
    return f"{last_step:,} of {max_steps:,}"


def folder_labels(groups: Sequence[RunGroup], *, with_counts: bool) -> list[str]:
    """Return the name of the first run folder of each group.

    Args:
        with_counts: add the number of runs.
    """
    labels = [group.paths[0].resolve().parent.name for group in groups]
    if len(set(labels)) < len(labels):
        labels = [str(group.paths[0].parent) for group in groups]
    if with_counts:
        labels = [
            f"{label} x{len(group.paths)}" for label, group in zip(labels, groups, strict=True)
        ]
    return labels


def could_be_grouped(paths: Sequence[Path]) -> bool:
    """Return whether --group seed would join some of these runs."""
    try:
        return len(group_runs(paths, ["seed"])) < len(paths)
    except BadInput:  # a recipe is missing or incomplete
        return False


# Recipes


def same_tokenizer(columns: Sequence[RunColumn]) -> bool:
    """Return whether all runs have the same tokenizer.

    A tokenizer that is trained from the text of a run is the same only for the same text.
    """
    first = columns[0].recipe
    compared_keys = ["tokenizer"]
    if first.get("tokenizer") in keys.TRAINED_TOKENIZERS:
        compared_keys += TOKENIZER_TRAINING_KEYS
    for column in columns:
        if any(column.recipe.get(key) != first.get(key) for key in compared_keys):
            return False
    return True


# Metrics


def final_metrics(rows: Sequence[Mapping]) -> dict[str, float]:
    """Return the last value of each metric of a run, by its label in the table.

    A value that was not finite is NaN.

    Args:
        rows: of metrics.jsonl.
    """
    last: dict[str, float] = {}
    last_training_row: Mapping | None = None
    for row in rows:
        if "elapsed_seconds" in row:
            last_training_row = row
        for name, value in row.items():
            if value is None:
                last[name] = math.nan
            elif isinstance(value, (int, float)):
                last[name] = value
    results = {label: last[name] for label, name in metric_labels().items() if name in last}
    if results and last_training_row and last.get("elapsed_seconds"):
        tokens = last_training_row["tokens"]
        seconds = last_training_row["elapsed_seconds"]
        results["tokens"] = tokens
        results["hours"] = seconds / 3600
        results["minutes"] = seconds / 60
        results["tokens/s"] = tokens / seconds
    return results


def metric_labels() -> dict[str, str]:
    """Return the names of the metrics in metrics.jsonl, by their label in the table."""
    labels = {
        "validation loss": "eval/loss",
        "bits per byte": "eval/bits_per_byte",
        "train loss": "train/loss",
    }
    for task in all_tasks().values():
        for score in task.scores:
            labels[f"{task.label} {score}"] = task.metric(score)
    return labels


def has_same_lengths(column: RunColumn) -> bool:
    """Return whether all runs of a column were trained to their end or on equally many tokens.

    A run that early stopping has ended is finished, whatever its length.
    """
    lengths = {result.get("tokens") for result in column.results}
    if len(lengths) == 1:
        return True
    if None in column.finishes:
        return False
    full_lengths = set()
    for result, finish in zip(column.results, column.finishes, strict=True):
        if finish and not finish.stopped_early:
            full_lengths.add(result.get("tokens"))
    return len(full_lengths) <= 1


# The table


def table(
    columns: Sequence[RunColumn], time_unit: str, *, mark_differences: bool
) -> list[list[str]]:
    """Return the cells of the table, row by row.

    The rows are the labels, the recipe keys that differ, the steps of interrupted runs, and the
    final metrics. If a column has
    several runs, each loss or score is followed by the differences from the first column.

    Args:
        time_unit: hours or minutes.
        mark_differences: append * to a difference that is not explained by chance.
    """
    rows = [["", *(column.label for column in columns)]]
    for key in in_first_order(column.recipe for column in columns):
        values = [str(column.recipe.get(key)) for column in columns]
        if len(set(values)) > 1:
            rows.append([key, *(shorten_cell(value) for value in values)])

    if any(column.num_interrupted for column in columns):
        rows.append(["unfinished", *(unfinished_cell(column) for column in columns)])

    all_results: list[dict[str, float]] = []
    for column in columns:
        all_results += column.results
    for name in in_first_order(all_results):
        if name in ("hours", "minutes") and name != time_unit:
            continue
        samples = [
            [result[name] for result in column.results if name in result] for column in columns
        ]
        number_format = format_of(name)
        rows.append([name, *(with_spread(values, number_format) for values in samples)])
        is_loss_or_score = number_format == ".4f"
        has_groups = any(len(values) > 1 for values in samples)
        if is_loss_or_score and samples[0] and has_groups:
            differences = [
                difference(samples[0], values, number_format, mark=mark_differences)
                for values in samples[1:]
            ]
            rows.append(["  difference", "", *differences])
    return rows


def unfinished_cell(column: RunColumn) -> str:
    """Return which runs of a column are unfinished, as a cell of the table."""
    if not column.num_interrupted:
        return "-"
    if len(column.runs) == 1:
        return f"step {column.interruptions[0]}"
    return f"{column.num_interrupted} of {len(column.runs)} runs"


def in_first_order(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the keys of all mappings, each once, in the order in which they occur first."""
    ordered: dict[str, None] = {}
    for mapping in mappings:
        ordered |= dict.fromkeys(mapping)
    return list(ordered)


def shorten_cell(value: str) -> str:
    """Return the beginning of a value that is too long for a cell."""
    return value if len(value) <= MAX_CELL else f"{value[: MAX_CELL - 3]}..."


def format_of(name: str) -> str:
    """Return the number format of a metric by its label."""
    if "tokens" in name:
        return ",.0f"
    if name in ("hours", "minutes"):
        return ".3g"
    return ".4f"


def with_spread(values: Sequence[float], number_format: str) -> str:
    """Return the mean, and with several values the standard deviation."""
    if not values:
        return "-"
    mean = format(statistics.fmean(values), number_format)
    if len(values) == 1:
        return mean
    return f"{mean} ± {format(statistics.stdev(values), number_format)}"


def difference(
    first: Sequence[float], second: Sequence[float], number_format: str, *, mark: bool
) -> str:
    """Return the difference of two means with half of its 95% interval by Welch's t-test.

    The interval is left out if one of the samples has a single value.

    Args:
        mark: append * if the interval does not include zero.
    """
    if not second:
        return "-"
    gap = statistics.fmean(second) - statistics.fmean(first)
    if min(len(first), len(second)) < 2:
        return format(gap, f"+{number_format}")
    half_width = welch_half_width(first, second)
    star = " *" if mark and abs(gap) > half_width else ""
    return f"{format(gap, f'+{number_format}')} ± {format(half_width, number_format)}{star}"


def welch_half_width(first: Sequence[float], second: Sequence[float]) -> float:
    """Return half of the 95% interval of the difference of two means (Welch 1947)."""
    first_error = statistics.variance(first) / len(first)  # squared standard error of the mean
    second_error = statistics.variance(second) / len(second)
    squared_error = first_error + second_error
    if squared_error == 0:
        return 0.0
    # The Welch-Satterthwaite equation.
    freedom = squared_error**2 / (
        first_error**2 / (len(first) - 1) + second_error**2 / (len(second) - 1)
    )
    return t_quantile(freedom) * math.sqrt(squared_error)


def t_quantile(freedom: float) -> float:
    """Return the 97.5% quantile of Student's t distribution, to 1e-3.

    The density is summed from 0 until the probability is reached.

    Args:
        freedom: degrees of freedom.
    """
    log_gamma_ratio = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    scale = math.exp(log_gamma_ratio) / math.sqrt(freedom * math.pi)
    exponent = -(freedom + 1) / 2
    step = 1e-3
    t = 0.0
    probability = 0.5
    while probability < 0.975:
        middle = t + step / 2
        probability += step * scale * (1 + middle**2 / freedom) ** exponent
        t += step
    return t


def table_notes(columns: Sequence[RunColumn], have_same_lengths: bool) -> Iterator[str]:
    """Yield the sentences that explain the figures of the table."""
    if any(len(column.runs) > 1 for column in columns):
        yield (
            "\n± is the standard deviation, and for a difference its 95% interval. "
            "* marks an interval without zero: the difference is more than chance."
        )
    if any(len(column.runs) == 2 for column in columns):
        yield "Two seeds give a wide interval. A third seed makes it about half as wide."
    if not have_same_lengths:
        yield (
            "Runs of a column have read different numbers of tokens, so their mean is not of one "
            "length of training. No difference is marked."
        )
    num_interrupted = sum(column.num_interrupted for column in columns)
    if num_interrupted:
        runs = pluralize(num_interrupted, "run is", "runs are")
        yield f"{runs} unfinished: the figures are the newest so far, not those of the end."
    num_stopped_early = sum(count_stopped_early(column) for column in columns)
    if num_stopped_early:
        yield (
            f"Early stopping ended {pluralize(num_stopped_early, 'run', 'runs')}. The figures are "
            f"those at the end of each run."
        )


def count_stopped_early(column: RunColumn) -> int:
    """Return the number of runs of a column that early stopping has ended."""
    return sum(1 for finish in column.finishes if finish and finish.stopped_early)


def comparison_notes(
    columns: Sequence[RunColumn], paths: Sequence[Path], have_same_tokenizer: bool
) -> Iterator[str]:
    """Yield the sentences about differences between the runs that limit the comparison."""
    for key in VALIDATION_KEYS:
        values = [str(column.recipe.get(key)) for column in columns]
        if len(set(values)) > 1:
            values_by_label = ", ".join(
                f"{column.label}: {value}" for column, value in zip(columns, values, strict=True)
            )
            yield (
                f"\n{key} differs ({values_by_label}), so the validation losses are of different "
                f"text and cannot be compared exactly."
            )
    without_recipe = [str(path.parent) for path in paths if not recipe_file(path).is_file()]
    if without_recipe:
        yield (
            f"\nThe tokenizer and settings of these runs are unknown, because {RECIPE} is missing: "
            f"{', '.join(without_recipe)}"
        )
    elif not have_same_tokenizer:
        yield (
            "\nThe tokenizers differ, so only bits per byte of the same validation text can be "
            "compared, not nats per token."
        )


# The picture


def load_reference(
    name: str | None, columns: Sequence[RunColumn], paths: Sequence[Path], loss: str
) -> reference_curves.Reference | None:
    """Return the reference curve to draw, or None.

    Args:
        name: the value of --reference_curve, or None for the reference_curve of the first recipe
            that has one. That curve is left out if it does not fit all runs.
        columns: of the table.
        paths: metrics.jsonl of each run.
        loss: the validation metric that is drawn.

    Raises:
        BadInput: the curve on the command line cannot be read or does not fit.
    """
    if name == "none":
        return None
    is_stated = name is not None
    if name is None:
        names = [read_recipe(path).get("reference_curve") for path in paths]
        name = next((str(other) for other in names if other), None)
    if name is None:
        return None
    problems = reference_problems(name, columns, loss)
    if problems and is_stated:
        raise BadInput(problems)
    return None if problems else reference_curves.load(name)


def reference_problems(name: str, columns: Sequence[RunColumn], loss: str) -> list[str]:
    """Return the reasons why a reference curve cannot be drawn next to these runs."""
    problems = []
    for column in columns:
        tokenizer = column.recipe.get("tokenizer")
        if isinstance(tokenizer, str):
            for problem in reference_curves.problems(name, tokenizer):
                problems.append(f"{column.label}: {problem}")
    has_loss = loss == "eval/loss" and has_points(columns, loss, "tokens")
    if not problems and not has_loss:
        problems.append(
            f"--reference_curve {name}: these runs have no validation loss in nats per token to "
            f"compare it with. Leave it out"
        )
    return problems


def draw(
    columns: Sequence[RunColumn],
    path: Path,
    reference: reference_curves.Reference | None,
    loss: str,
    time_unit: str,
) -> None:
    """Draw the losses over tokens and over time. A group is drawn as mean and standard deviation.

    Args:
        path: of the picture.
        reference: is drawn next to "eval/loss" over tokens.
        loss: the validation metric. With "eval/loss" (nats per token), the train loss is drawn,
            too.
        time_unit: hours or minutes.
    """
    panels = [(loss, "tokens"), (loss, time_unit)]
    if loss == "eval/loss":
        panels.append(("train/loss", "tokens"))
    panels = [(name, x) for name, x in panels if has_points(columns, name, x)]
    heights = [3.2 if name == loss else 2.4 for name, _ in panels]
    with curves.picture(path, heights, [x for _, x in panels]) as all_axes:
        max_runs = max(len(column.runs) for column in columns)
        if max_runs > 1:
            curves.set_title(all_axes[0], f"mean of {max_runs} runs, band: one standard deviation")
        for axes, (name, x) in zip(all_axes, panels, strict=True):
            axes.spines.right.set_visible(False)
            lines = []
            colored_lines = []
            for number, column in enumerate(columns):
                line = draw_column(axes, column, number, name, x)
                if line is not None:
                    lines.append(line)
                    colored_lines.append((line, column_color(number)))
            if reference and (name, x) == ("eval/loss", "tokens"):
                longest = max(float(line.x[-1]) for line in lines)
                if reference.has_line(longest):
                    tokens, losses = reference.until(longest)
                    axes.plot(tokens, losses, ":", color=curves.BLACK, label=reference.legend_label)
            axes.set(ylabel=LOSS_LABELS[name], ylim=curves.y_limits(lines))
            curves.mark_cut_off(axes, colored_lines)
            curves.legend_above(axes)


def has_points(columns: Sequence[RunColumn], name: str, x: str) -> bool:
    """Return whether a run has a value of a metric."""
    for column in columns:
        for rows in column.runs:
            if len(curves.series(rows, name, x)[0]):
                return True
    return False


def column_color(number: int) -> str:
    """Return the color of a column."""
    return COLORS[number % len(COLORS)]


def draw_column(axes, column: RunColumn, number: int, name: str, x: str) -> Line | None:
    """Draw a metric of one column, and return its line, or None if it has no values.

    Args:
        axes: of Matplotlib.
        number: of the column, which decides color and dashes.
        name: of the metric in metrics.jsonl.
        x: tokens, hours or minutes.
    """
    # Cut the runs to the same number of points, and plot means of blocks of the train loss, because
    # its noise would hide the other curves.
    runs = [np.array(curves.series(rows, name, x)) for rows in column.runs]
    length = min(run.shape[1] for run in runs)
    if length == 0:
        return None
    block = math.ceil(length / MAX_POINTS) if name == "train/loss" else 1
    num_points = length // block
    block_means = []
    for run in runs:
        blocks = run[:, : num_points * block].reshape(2, num_points, block)
        block_means.append(blocks.mean(2))
    x_values, y_values = np.stack(block_means, 1)  # (runs, points) each
    line = Line(x_values.mean(0), y_values.mean(0))

    color = column_color(number)
    dashes = DASHES[number // len(COLORS) % len(DASHES)]
    # The value comes first, because Matplotlib does not show a label that begins with _.
    label = f"{line.y[-1]:.3f} {column.label}"
    if column.num_interrupted:
        label += " (unfinished)"
    marker = {"marker": "o", "markersize": 3} if num_points <= MAX_MARKERS else {}
    axes.plot(line.x, line.y, dashes, label=label, color=color, linewidth=1.2, gid="run", **marker)
    if len(runs) > 1:
        deviation = y_values.std(0, ddof=1)
        axes.fill_between(
            line.x, line.y - deviation, line.y + deviation, color=color, alpha=0.2, linewidth=0
        )
    return line


if __name__ == "__main__":
    sys.exit(main())
