"""Draw the scores of checkpoints over the tokens that they were trained on.

Each task has a panel. A run is a line with standard errors. Runs that differ only in their seeds
are one line, the mean, with a band of one standard deviation.
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import METRICS, RECIPE
from ursa_minor.base.wording import pluralize
from ursa_minor.evaluation.score_tables import first_score
from ursa_minor.evaluation.task import Task
from ursa_minor.reporting import curves
from ursa_minor.reporting.run_groups import group_runs, have_different_seeds

log = logging.getLogger(__name__)

ScoreLine = Mapping[str, Any]  # the scores of a model on a task

COLORS = (
    curves.BLUE,
    curves.VERMILLION,
    curves.GREEN,
    curves.PURPLE,
    curves.ORANGE,
    curves.SKY,
)
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.")  # if there are more lines than colors
PANEL_HEIGHT = 3.4
MAX_LEGEND_COLUMNS = 4
SEPARATORS = "-_."  # between the words in the name of a run
MAX_NAME = 50  # a longer name is shortened
LEGEND_ROW_HEIGHT = 0.25  # inches
# Step 0 has no logarithm. It is drawn to the left of the smallest number of tokens, at this part of
# the width of the axis.
ZERO_GAP = 0.07
MIN_ZERO_FACTOR = 2.0
DECADE_STEPS = (1, 2, 5)
MAX_TICKS = 10
TICK_MARGIN = 1.05  # a tick may be this factor outside of the data, as 1,000 is for 1,024


@dataclass(frozen=True)
class Run:
    """The scores of the checkpoints of one run on one task, by tokens.

    Attributes:
        scores: the score and its standard error for each number of tokens.
    """

    scores: Mapping[float, tuple[float, float]]


class Curve(NamedTuple):
    """The points of a drawn line.

    Attributes:
        tokens: (N,) in ascending order. It may begin with 0.
        means: (N,) the mean score of the runs.
        errors: (N,) the mean of the standard errors over the items.
        deviations: (N,) the standard deviation of the runs, or None for a single run.
    """

    tokens: np.ndarray
    means: np.ndarray
    errors: np.ndarray
    deviations: np.ndarray | None


class LabeledRuns(NamedTuple):
    """Runs that are drawn as one line.

    Attributes:
        name: the name of the run, or what the names of several runs have in common.
        run_dirs: the folders of the runs.
    """

    name: str
    run_dirs: list[str]

    def label(self, num_runs: int) -> str:
        """Return the text of the legend for this number of runs."""
        if num_runs == 1:
            return self.name
        return f"{self.name}, {num_runs} seeds"


def has_points(lines: Sequence[ScoreLine]) -> bool:
    """Return whether some of the models belong to a run and have a number of tokens."""
    return any(_is_point(line) for line in lines)


def _is_point(line: ScoreLine) -> bool:
    return line["run"] is not None and line["tokens"] is not None


def draw(tasks: Sequence[Task], lines: Sequence[ScoreLine], path: Path) -> None:
    """Draw the first score of each task over tokens, in a panel for each task.

    Args:
        tasks: the tasks in order.
        lines: the scores of complete tasks. Those without a number of tokens are left out.
        path: the PNG file.
    """
    points = [line for line in lines if _is_point(line)]
    run_dirs = list(dict.fromkeys(line["run"] for line in points))
    groups = _group(run_dirs)
    names = {line["task"] for line in points}
    drawn_tasks = [task for task in tasks if task.name in names]
    all_tokens = sorted({line["tokens"] for line in points})
    zero = _position_of_zero(all_tokens)

    legend_rows = math.ceil((len(groups) + 1) / _legend_columns(groups))
    height = PANEL_HEIGHT + LEGEND_ROW_HEIGHT * legend_rows
    heights = [height] * len(drawn_tasks)
    with curves.picture(path, heights, ["log tokens"] * len(heights)) as all_axes:
        all_axes[0].figure.suptitle(_title(groups), fontsize=10)
        _set_scale(all_axes[0], all_tokens, zero)  # the other axes share it
        for task, axes in zip(drawn_tasks, all_axes, strict=True):
            task_lines = [line for line in points if line["task"] == task.name]
            _draw_panel(axes, task, groups, task_lines, zero)


def _group(run_dirs: Sequence[str]) -> list[LabeledRuns]:
    """Join the runs that differ only in their seeds, and return a label for each line.

    Runs that do not even differ in their seeds have a line each.
    """
    paths = [Path(run_dir) / METRICS for run_dir in run_dirs]
    groups = [[run_dir] for run_dir in run_dirs]
    if len(run_dirs) > 1:
        try:
            run_groups = group_runs(paths, ["seed"])
            groups = []
            for run_group in run_groups:
                folders = [str(path.parent) for path in run_group.paths]
                if have_different_seeds(run_group.paths):
                    groups.append(folders)
                else:
                    groups += [[folder] for folder in folders]
        except BadInput:
            log.warning(
                f"Each run has its own line in the picture, because the {RECIPE} of some of them "
                f"is missing or incomplete"
            )
    names = [_common_name(group) for group in groups]
    if len(set(names)) < len(names):
        names = [Path(group[0]).resolve().name for group in groups]
    if len(set(names)) < len(names):
        names = [group[0] for group in groups]
    labeled = []
    for full_name, group in zip(names, groups, strict=True):
        name = full_name
        if len(full_name) > MAX_NAME:
            name = f"{full_name[: MAX_NAME - 3]}..."
        labeled.append(LabeledRuns(name, group))
    return labeled


def _common_name(run_dirs: Sequence[str]) -> str:
    """Return what the names of runs have in common: "muon" for muon-1 and muon-2.

    It is the name of the first run if the names have nothing in common.
    """
    names = [Path(run_dir).resolve().name for run_dir in run_dirs]
    parts = [re.split(f"([{SEPARATORS}])", name) for name in names]  # words and separators
    common_name = ""
    for words in zip(*parts, strict=False):
        if len(set(words)) > 1:
            break
        common_name += words[0]
    return common_name.rstrip(SEPARATORS) or names[0]


def _title(groups: Sequence[LabeledRuns]) -> str:
    title = "bars: standard error over the items"
    if any(len(group.run_dirs) > 1 for group in groups):
        title = f"line: mean of the seeds · band: one standard deviation of the seeds · {title}"
    return title


def _legend_columns(groups: Sequence[LabeledRuns]) -> int:
    """Return the number of columns in which the labels fit into the width of the picture."""
    labels = [group.label(len(group.run_dirs)) for group in groups]
    text_width = max(curves.legend_width(f"00.00 {label}") for label in labels)
    num_columns = int(curves.LEGEND_WIDTH / (text_width + curves.LEGEND_LINE_WIDTH))
    return min(MAX_LEGEND_COLUMNS, max(1, num_columns))


def _draw_panel(
    axes, task: Task, groups: Sequence[LabeledRuns], lines: Sequence[ScoreLine], zero: float
) -> None:
    """Draw the curves of a task and the score of random guessing."""
    score = first_score(task)
    for number, group in enumerate(groups):
        runs = _runs(group, score, lines)
        curve = _curve(runs, group.name, task)
        if curve is not None:
            last_value = task.format_score(score, curve.means[-1])
            label = f"{last_value} {group.label(len(runs))}"
            _draw_curve(axes, curve, label, number, zero)
    if task.chance:
        value = task.format_score(score, task.chance)
        axes.axhline(
            task.chance, color=curves.BLACK, linestyle=":", linewidth=1.2, label=f"{value} chance"
        )

    axes.set_ylabel(f"{task.label} {score}\n(% of {_number_of_items(lines)})")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")
    axes.margins(y=0.08)
    # The legend is above the panel, where it covers no line.
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=_legend_columns(groups),
        borderaxespad=0.2,
        frameon=False,
    )


def _number_of_items(lines: Sequence[ScoreLine]) -> str:
    """Return on how many items models were scored, or a range if the tokenizers leave out items."""
    numbers = [line["items"] for line in lines]
    least = min(numbers)
    most = max(numbers)
    items = pluralize(most, "item", "items")
    return items if least == most else f"{least:,} to {items}"


def _draw_curve(axes, curve: Curve, label: str, number: int, zero: float) -> None:
    """Draw a curve with its standard errors, and a band if it is the mean of several runs.

    Args:
        label: for the legend.
        number: of the curve, which decides color, marker and dashes.
        zero: where step 0 is drawn.
    """
    positions = np.where(curve.tokens == 0, zero, curve.tokens)
    color = COLORS[number % len(COLORS)]
    dashes = DASHES[number // len(COLORS) % len(DASHES)]
    axes.errorbar(
        positions,
        curve.means,
        yerr=curve.errors,
        color=color,
        linestyle=dashes,
        marker=MARKERS[number % len(MARKERS)],
        markersize=3.5,
        linewidth=1.3,
        elinewidth=0.9,
        capsize=2,
        label=label,
    )
    if curve.deviations is not None:
        low = curve.means - curve.deviations
        high = curve.means + curve.deviations
        axes.fill_between(positions, low, high, color=color, alpha=0.2, linewidth=0)


def _runs(group: LabeledRuns, score: str, lines: Sequence[ScoreLine]) -> list[Run]:
    """Return the finite scores of the runs of a group. Runs without scores are left out."""
    runs = []
    for run_dir in group.run_dirs:
        scores = {}
        for line in lines:
            value = line[score]
            error = line[f"{score}_stderr"]
            if line["run"] == run_dir and None not in (value, error):
                scores[line["tokens"]] = (value, error)
        if scores:
            runs.append(Run(scores))
    return runs


def _curve(runs: Sequence[Run], name: str, task: Task) -> Curve | None:
    """Return the line of a group, at the tokens at which each of its runs has a checkpoint.

    Args:
        runs: the runs of the group.
        name: the name of the group, for a warning.
        task: for a warning.
    """
    if not runs:
        return None
    common_tokens = set(runs[0].scores)
    all_tokens = set(runs[0].scores)
    for run in runs[1:]:
        common_tokens &= run.scores.keys()
        all_tokens |= run.scores.keys()
    num_missing = len(all_tokens) - len(common_tokens)
    if num_missing:
        log.warning(
            f"{name}: the picture of {task.name} leaves out "
            f"{pluralize(num_missing, 'point', 'points')} at which some seeds have no score"
        )
    if not common_tokens:
        return None
    tokens = sorted(common_tokens)
    rows = []
    for run in runs:
        rows.append([run.scores[number] for number in tokens])
    values = np.array(rows)  # (runs, tokens, 2): the scores and their standard errors
    scores = values[:, :, 0]
    errors = values[:, :, 1]
    deviations = None
    if len(runs) > 1:
        deviations = scores.std(0, ddof=1)
    return Curve(np.array(tokens, dtype=float), scores.mean(0), errors.mean(0), deviations)


# The horizontal axis


def _position_of_zero(all_tokens: Sequence[float]) -> float:
    """Return where step 0 is drawn on the logarithmic axis.

    Args:
        all_tokens: the numbers of tokens in ascending order.
    """
    positive = [tokens for tokens in all_tokens if tokens > 0]
    if not positive:
        return 1.0
    width = positive[-1] / positive[0]
    return positive[0] / max(MIN_ZERO_FACTOR, width**ZERO_GAP)


def _set_scale(axes, all_tokens: Sequence[float], zero: float) -> None:
    """Make the horizontal axis logarithmic, with a mark for step 0 at its left end if needed."""
    positive = [tokens for tokens in all_tokens if tokens > 0]
    has_zero = len(positive) < len(all_tokens)
    ticks = _ticks(positive)
    labels = [curves.format_count(tick) for tick in ticks]
    if has_zero:
        ticks = [zero, *ticks]
        labels = ["0\n(start)", *labels]
        if positive:
            # The line marks that the axis is interrupted between 0 and the first logarithm.
            middle = math.sqrt(zero * positive[0])
            axes.axvline(middle, color=curves.BLACK, linestyle=":", linewidth=0.8, alpha=0.5)
    axes.set_xscale("log")
    axes.set_xticks(ticks, labels)
    axes.set_xticks([], minor=True)
    low = ticks[0] if has_zero else positive[0]
    high = positive[-1] if positive else zero
    margin = (high / low) ** 0.02 if high > low else 2.0
    axes.set_xlim(low / margin, high * margin)


def _ticks(positive: Sequence[float]) -> list[float]:
    """Return round numbers in the range of the data: 1, 2 and 5 times powers of ten if they fit."""
    if not positive:
        return []
    first_decade = math.floor(math.log10(positive[0]))
    last_decade = math.ceil(math.log10(positive[-1]))
    low = positive[0] / TICK_MARGIN
    high = positive[-1] * TICK_MARGIN
    ticks: list[float] = []
    for steps in (DECADE_STEPS, DECADE_STEPS[:1]):
        ticks = []
        for decade in range(first_decade, last_decade + 1):
            candidates = [step * 10.0**decade for step in steps]
            ticks += [tick for tick in candidates if low <= tick <= high]
        if len(ticks) <= MAX_TICKS:
            break
    return ticks or sorted({positive[0], positive[-1]})
