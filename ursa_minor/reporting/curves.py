"""Draw curves.png from the rows of metrics.jsonl, and provide parts for other pictures."""

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from ursa_minor.base import files
from ursa_minor.base.wording import with_unit
from ursa_minor.evaluation.task import Task
from ursa_minor.evaluation.task_data import all_tasks
from ursa_minor.recipe import keys, sizes
from ursa_minor.recipe.reference_curves import Reference

# The palette of Okabe and Ito, whose colors color-blind people can distinguish. Its yellow is left
# out, because it is too light for a line.
BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"

# Labels of the horizontal axis.
AXES = {
    "tokens": "tokens",
    "log tokens": "tokens (logarithmic scale)",
    "steps": "step",
    "hours": "hours of training",
    "minutes": "minutes of training",
}
SECONDS_PER_UNIT = {"hours": 3600, "minutes": 60}
# Label and color of each metric.
LOSSES = {"train/loss": ("train", BLUE), "eval/loss": ("validation", VERMILLION)}
SIDES = {  # in small panels
    "train/lr": ("learning rate", GREEN),
    "train/grad_norm": ("gradient norm", PURPLE),
    "tokens_per_second": ("tokens/s", BLUE),
    "mfu": ("MFU", ORANGE),
}
# Color and marker of each score.
SCORES = {"acc": (GREEN, "o"), "acc_norm": (BLUE, "s"), "acc_token_norm": (VERMILLION, "^")}
LEVEL_COLORS = (BLACK, GREEN, PURPLE, ORANGE)


STYLE = {
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.titlesize": 12,
    "axes.xmargin": 0.01,
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.fontsize": 9,
    "legend.framealpha": 0.8,
    "text.parse_math": False,
}
# Width and heights in inches.
WIDTH = 9
POINTS_PER_INCH = 72
LEGEND_WIDTH = WIDTH - 1.0  # without the labels of the vertical axes
LEGEND_LINE_WIDTH = 0.75  # the line next to a label, and the gap after it
LOSS_HEIGHT = 3.8
SCORES_HEIGHT = 3.2
SIDE_HEIGHT = 1.2
DPI = 120  # a picture is 1,080 pixels wide, and GitHub shows 900 of them

MOST_UPDATES = 4000  # updates that a picture is drawn from, more than it has pixels
SMOOTHED = 25  # a smoothed value is the mean over 1/25 of the run
WARM_UP_SHARE = 0.1  # part of a run whose high values may be outside of the picture
# Smallest distances of marks of cut-off values from each other and from their text, relative to the
# length of the axis.
MARK_DISTANCE = 0.03
TEXT_DISTANCE = 0.1

Published = Mapping[str, Mapping[str, float]]  # metric -> model -> score
Line = tuple[np.ndarray, np.ndarray]  # horizontal positions and values


class RowSampler:
    """Select the rows of a growing run for its picture.

    It keeps every evaluation, and updates at regular intervals. There are never more than
    MOST_UPDATES updates, so a picture of a long run takes no longer to draw.

    Attributes:
        rows: the selected rows, in order.
    """

    def __init__(self) -> None:
        self.rows: list[Mapping] = []
        self._num_updates = 0
        self._stride = 1  # one of this many updates is kept

    def add(self, row: Mapping) -> None:
        """Add a row that was logged, unless it is an update that is skipped."""
        if "train/loss" not in row:
            self.rows.append(row)
            return
        if self._num_updates % self._stride == 0:
            self.rows.append(row)
        self._num_updates += 1
        if self._num_updates > MOST_UPDATES * self._stride:
            self._stride *= 2
            self._drop_every_second_update()

    def _drop_every_second_update(self) -> None:
        rows = []
        is_dropped = False
        for row in self.rows:
            if "train/loss" not in row:
                rows.append(row)
                continue
            if not is_dropped:
                rows.append(row)
            is_dropped = not is_dropped
        self.rows = rows


def scored_all_items(rows: Sequence[Mapping], task: Task) -> bool:
    """Return whether each score of a task was measured on all items of its public data set.

    Published scores are of all items at ``task.revision``. Others cannot be compared with them.
    """
    items_name = task.metric("items")
    revision_name = task.metric("revision")
    revisions = {row.get(revision_name) for row in rows if items_name in row}
    if task.revision is None:
        return bool(revisions) and None not in revisions
    return revisions == {task.revision}


def published_scores(model: keys.Model) -> Published:
    """Return the published scores of models of the same size.

    For a model whose shape is not one of GPT-2's sizes these are the scores of the smallest GPT-2.
    """
    smallest = sizes.GPT2_SIZES[0]
    label = smallest.label
    for size in sizes.GPT2_SIZES:
        if (size.n_layer, size.n_embd) == (model.n_layer, model.n_embd):
            label = size.label
    model_labels = [label]
    if label == smallest.label:
        model_labels.append("GPT-3 124M")

    scores: dict[str, dict[str, float]] = {}
    for task in all_tasks().values():
        for model_label in model_labels:
            # Of some models only the first scores are published.
            values = task.published.get(model_label, ())
            for score, value in zip(task.scores, values, strict=False):
                if value is None:
                    continue
                if score in task.shares:
                    value /= 100  # published in percent
                scores.setdefault(task.metric(score), {})[model_label] = value
    return scores


class Panel(NamedTuple):
    """A panel of curves.png.

    Attributes:
        draw: draws rows into the axes of the panel.
        height: in inches.
        metrics: the panel is left out if the rows have none of them.
    """

    draw: Callable[[Any, Sequence[Mapping]], None]
    height: float
    metrics: Collection[str]


def draw_curves(
    rows: Sequence[Mapping],
    path: Path,
    title: str,
    *,
    published: Published | None = None,
    reference: Reference | None = None,
) -> None:
    """Draw the metrics of a run over tokens. If the rows contain none, no file is written.

    Args:
        rows: the rows of metrics.jsonl, or a selection of them.
        path: the PNG file.
        title: of the picture.
        published: scores of other models. They are drawn as horizontal lines if the run was scored
            on all items of the same data set.
        reference: the validation loss of another run. It is drawn up to the tokens of this run.
    """
    panels = []
    for panel in _all_panels(published or {}, reference):
        if any(_has_points(rows, name) for name in panel.metrics):
            panels.append(panel)
    if not panels:
        return

    heights = [panel.height for panel in panels]
    with picture(path, heights, ["tokens"] * len(panels)) as all_axes:
        set_title(all_axes[0], title)
        for axes, panel in zip(all_axes, panels, strict=True):
            panel.draw(axes, rows)


def _all_panels(published: Published, reference: Reference | None) -> list[Panel]:
    """Return the panels of curves.png from top to bottom."""
    draw_loss = partial(_draw_loss, reference)
    panels = [Panel(draw_loss, LOSS_HEIGHT, LOSSES)]
    for task in all_tasks().values():
        draw_scores = partial(_draw_scores, published, task)
        metrics = [task.metric(score) for score in task.shares]
        panels.append(Panel(draw_scores, SCORES_HEIGHT, metrics))
    for name, (label, color) in SIDES.items():
        draw_side = partial(_draw_side, name, label, color)
        panels.append(Panel(draw_side, SIDE_HEIGHT, [name]))
    return panels


def _has_points(rows: Sequence[Mapping], name: str) -> bool:
    positions, _ = series(rows, name)
    return len(positions) > 0


def draw_rewards(rows: Sequence[Mapping], path: Path, title: str) -> None:
    """Draw the rewards of a post-training over steps.

    Args:
        rows: rows with ``train/reward`` (of sampled completions) or ``eval/reward`` (of greedy
            completions of held-out prompts).
        path: the PNG file.
        title: of the picture.
    """
    steps, rewards = series(rows, "train/reward", "steps")
    held_out_steps, held_out_rewards = series(rows, "eval/reward", "steps")
    held_out_label = "greedy, held-out prompts"
    if len(held_out_rewards):
        held_out_label += f": {held_out_rewards[0]:.3f} to {held_out_rewards[-1]:.3f}"
    with picture(path, [LOSS_HEIGHT], ["steps"]) as (axes,):
        axes.plot(steps, rewards, color=SKY, linewidth=0.9, label="sampled, training prompts")
        axes.plot(
            held_out_steps,
            held_out_rewards,
            color=VERMILLION,
            marker="o",
            markersize=4,
            label=held_out_label,
        )
        axes.set_ylabel("mean reward")
        set_title(axes, title)
        legend_above(axes)


def _import_matplotlib():
    """Import Matplotlib when it is needed, because it takes a second, and many runs never draw."""
    os.environ["MPLBACKEND"] = "agg"  # the user's backend may not be installed
    import matplotlib

    return matplotlib


def legend_width(label: str) -> float:
    """Return the width of the text of a label in a legend, in inches."""
    _import_matplotlib()
    from matplotlib.textpath import TextPath

    without_math = label.replace("$", "S")
    path = TextPath((0, 0), without_math, size=STYLE["legend.fontsize"])
    return path.get_extents().width / POINTS_PER_INCH


@contextlib.contextmanager
def picture(path: Path, heights: list[float], x: Sequence[str]) -> Iterator[list]:
    """Yield axes, one below the other. When the block has succeeded, write them to a PNG file.

    Args:
        path: the PNG file.
        heights: the height of each of the axes in inches.
        x: the key in AXES of each horizontal axis. Those with the same key have the same range.
    """
    matplotlib = _import_matplotlib()
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, sum(heights) + 0.6), layout="constrained")
        subplots = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
        all_axes = list(subplots[:, 0])
        for number, axes in enumerate(all_axes):
            first = x.index(x[number])
            if first < number:
                axes.sharex(all_axes[first])

        yield all_axes

        for number, axes in enumerate(all_axes):
            key = x[number]
            # Only the lowest of several axes with the same key has labels.
            is_labeled = number + 1 == len(all_axes) or x[number + 1] != key
            if key != "log tokens":  # the caller has set the scale and its labels
                axes.xaxis.set_major_formatter(format_count if key == "tokens" else "{x:,g}")
            axes.tick_params(labelbottom=is_labeled)
            axes.set_xlabel(AXES[key] if is_labeled else "")
        with files.replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=DPI)


def set_title(axes, title: str) -> None:
    """Set the title of a picture. It is above the legend of the first axes.

    Args:
        axes: any axes of the picture.
        title: is not parsed as math.
    """
    axes.figure.suptitle(title, fontsize=STYLE["axes.titlesize"])


def legend_above(axes, title: str | None = None) -> None:
    """Add a legend above the axes, where it covers no line.

    Args:
        axes: with labeled lines.
        title: first line of the legend, for example the unit of its values.
    """
    _, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    text_width = max(legend_width(label) for label in labels)
    most_columns = max(1, int(LEGEND_WIDTH / (text_width + LEGEND_LINE_WIDTH)))
    num_rows = math.ceil(len(labels) / most_columns)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=math.ceil(len(labels) / num_rows),
        borderaxespad=1.2,  # leaves space for the marks of cut-off values
        frameon=False,
        title=title,
        title_fontsize=STYLE["legend.fontsize"],
        alignment="left",
    )


def mark_cut_off(axes, lines: Sequence[tuple[Line, str]]) -> None:
    """Mark the places where lines leave the picture at its top, and state the highest value.

    Args:
        axes: with their final limits.
        lines: each line with its color.
    """
    left, right = axes.get_xlim()
    _, top = axes.get_ylim()
    transform = axes.get_xaxis_transform()
    all_peaks = []
    for (positions, values), color in lines:
        peaks = _peaks_above(top, positions, values, MARK_DISTANCE * (right - left))
        for position, _ in peaks:
            axes.text(
                position,
                1,
                "▲",
                transform=transform,
                color=color,
                fontsize=6,
                horizontalalignment="center",
                verticalalignment="bottom",
            )
        all_peaks += peaks
    if not all_peaks:
        return

    highest_position, value = max(all_peaks, key=lambda peak: peak[1])
    text_position = _end_of_group(
        highest_position, [position for position, _ in all_peaks], TEXT_DISTANCE * (right - left)
    )
    is_left = text_position < (left + right) / 2
    if not is_left:
        text_position = highest_position
    axes.annotate(
        f"up to {format_count(float(f'{value:.3g}'))}",
        (text_position, 1),
        (5 if is_left else -5, 0),
        xycoords=transform,
        textcoords="offset points",
        fontsize=8,
        horizontalalignment="left" if is_left else "right",
        verticalalignment="bottom",
        annotation_clip=False,
    )


def _end_of_group(start: float, positions: Collection[float], distance: float) -> float:
    """Return the last position that follows ``start`` without a gap of at least ``distance``."""
    end = start
    for position in sorted(positions):
        if end < position < end + distance:
            end = position
    return end


def _peaks_above(
    limit: float, positions: np.ndarray, values: np.ndarray, distance: float
) -> list[tuple[float, float]]:
    """Return the highest point of each part of a line that is above a limit.

    Points that are closer to each other than ``distance`` belong to the same part.
    """
    peaks: list[tuple[float, float]] = []
    last_position = -math.inf
    for position, value in zip(positions, values, strict=True):
        if value <= limit:
            continue
        point = (float(position), float(value))
        if position - last_position > distance:
            peaks.append(point)
        elif value > peaks[-1][1]:
            peaks[-1] = point
        last_position = position
    return peaks


def _draw_loss(reference: Reference | None, axes, rows: Sequence[Mapping]) -> None:
    """Draw the losses, the baselines and the loss of another run."""
    train_line = series(rows, "train/loss")
    validation_line = series(rows, "eval/loss")
    lines = [train_line, validation_line]
    bits_per_nat = _bits_per_nat(rows)
    baselines = _baselines(rows, bits_per_nat)

    axes.plot(*train_line, color=SKY, linewidth=0.6, alpha=0.45)
    train_positions, train_losses = train_line
    smoothed_line = (train_positions, _smoothed(train_losses))
    _draw_one_loss(axes, smoothed_line, "train/loss", bits_per_nat)
    _draw_one_loss(axes, validation_line, "eval/loss", bits_per_nat)
    for (label, level), color in zip(
        baselines.items(), itertools.cycle(LEVEL_COLORS), strict=False
    ):
        label += _legend_value(level, bits_per_nat)
        axes.axhline(level, color=color, linestyle="--", linewidth=1, label=label)
    most_tokens = max((float(tokens[-1]) for tokens, _ in lines if len(tokens)), default=0.0)
    if reference and reference.has_line(most_tokens):
        axes.plot(
            *reference.until(most_tokens),
            color=BLACK,
            linestyle=":",
            linewidth=1.2,
            label=reference.legend_label,
        )

    axes.set(ylabel="loss (nats per token)", ylim=y_limits(lines, baselines.values()))
    mark_cut_off(axes, [(train_line, BLUE), (validation_line, VERMILLION)])
    legend_above(axes, "bits per byte (nats per token)" if bits_per_nat else "nats per token")
    if bits_per_nat:
        conversions = (lambda nats: nats * bits_per_nat, lambda bits: bits / bits_per_nat)
        bits_axis = axes.secondary_yaxis("right", functions=conversions)
        bits_axis.set_ylabel("bits per byte")


def _draw_one_loss(axes, line: Line, name: str, bits_per_nat: float | None) -> None:
    """Draw the smoothed train loss or the validation loss.

    Args:
        axes: of the panel.
        line: tokens and losses.
        name: the metric.
        bits_per_nat: of the validation text, or None if it is not known.
    """
    tokens, losses = line
    if not len(losses):
        return
    label, color = LOSSES[name]
    is_validation = name == "eval/loss"
    marker = {}
    if is_validation or len(losses) == 1:
        marker = {"marker": "o", "markersize": 4}
    if is_validation or bits_per_nat is None:
        label += _legend_value(losses[-1], bits_per_nat)
    else:
        label += f" ({losses[-1]:.3f})"  # the training text has other bytes per token
    axes.plot(tokens, losses, color=color, linewidth=1.6, label=label, **marker)


def _legend_value(nats: float, bits_per_nat: float | None) -> str:
    """Return a loss in bits per byte, if they are known, with nats per token in parentheses."""
    if bits_per_nat is None:
        return f": {nats:.3f}"
    return f": {nats * bits_per_nat:.3f} ({nats:.3f})"


def _bits_per_nat(rows: Sequence[Mapping]) -> float | None:
    """Return bits per byte divided by nats per token, or None if no row has both.

    All evaluations use the same text, so the factor is the same.
    """
    for row in reversed(rows):
        if _is_number(row.get("eval/bits_per_byte")) and row.get("eval/loss"):
            return row["eval/bits_per_byte"] / row["eval/loss"]
    return None


def _baselines(rows: Sequence[Mapping], bits_per_nat: float | None) -> dict[str, float]:
    """Return the label of each baseline, and its level in nats per token."""
    levels = {}
    for row in rows:
        bigram = row.get("baseline/bigram")
        if _is_number(bigram):
            levels["bigram baseline"] = bigram
        gzip = row.get("baseline/gzip")
        if _is_number(gzip) and bits_per_nat:
            levels["gzip baseline"] = gzip / bits_per_nat
    return levels


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Return a moving average of the values. Fewer than 2 * SMOOTHED values stay the same."""
    if not len(values):
        return values
    window_size = max(1, len(values) // SMOOTHED)
    window = np.ones(window_size)
    sums = np.convolve(values, window, "same")
    # At the ends of the curve the window contains fewer values.
    counts = np.convolve(np.ones_like(values), window, "same")
    return sums / counts


def _draw_scores(published: Published, task: Task, axes, rows: Sequence[Mapping]) -> None:
    """Draw the scores of a task in percent, with their standard errors and published scores."""
    if not scored_all_items(rows, task):
        published = {}
    for score in task.shares:
        if _has_points(rows, task.metric(score)):
            _draw_one_score(published, task, score, axes, rows)
    if task.chance:
        _draw_level(axes, task.chance, "chance", BLACK)

    _, num_items = series(rows, task.metric("items"))
    unit = "%"
    if len(num_items):
        unit = f"% of {num_items[-1]:,.0f} items"
    axes.set_ylabel(f"{task.label} ({unit})")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")
    axes.margins(y=0.1)
    legend_above(axes)


def _draw_one_score(
    published: Published, task: Task, score: str, axes, rows: Sequence[Mapping]
) -> None:
    name = task.metric(score)
    color, marker = SCORES[score]
    tokens, values = series(rows, name)
    _, errors = series(rows, f"{name}_stderr")
    label = f"{score}: {100 * values[-1]:.2f}"
    if len(errors) == len(values):
        label += f" ± {100 * errors[-1]:.2f}"
        low = values - errors
        high = values + errors
        axes.fill_between(tokens, low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(tokens, values, color=color, marker=marker, markersize=4, label=label)
    for model_label, value in published.get(name, {}).items():
        _draw_level(axes, value, model_label, color)


def _draw_level(axes, share: float, label: str, color: str) -> None:
    """Draw a horizontal line, whose label states its value in percent."""
    label += f": {100 * share:.2f}"
    axes.axhline(share, color=color, linestyle="--", linewidth=1, label=label)


def _draw_side(name: str, label: str, color: str, axes, rows: Sequence[Mapping]) -> None:
    """Draw a metric in a small panel whose vertical axis starts at 0."""
    positions, values = series(rows, name)
    marker = "." if len(values) == 1 else None
    axes.plot(positions, values, color=color, marker=marker, linewidth=1.2)
    if name == "train/lr":
        highest = values.max()
    else:
        _, highest = y_limits([(positions, values)])
    axes.set(ylim=(0, 1.05 * highest), ylabel=label)
    axes.yaxis.set_major_formatter(format_count)
    mark_cut_off(axes, [((positions, values), color)])


def series(rows: Sequence[Mapping], name: str, x: str = "tokens") -> Line:
    """Return the values of a metric and their positions on the horizontal axis.

    Values that are not finite, such as the loss of a skipped update, are left out.

    Args:
        rows: the rows of metrics.jsonl.
        name: the metric.
        x: a key in AXES.
    """
    key = "tokens" if x == "tokens" else "step"
    points = [row for row in rows if _is_number(row.get(name)) and _is_number(row.get(key))]
    positions = np.array([row[key] for row in points], dtype=float)
    values = np.array([row[name] for row in points], dtype=float)
    if x in SECONDS_PER_UNIT:
        # Evaluations have a step and no time, because the clock is paused.
        steps = [0]
        seconds = [0.0]
        for row in rows:
            if "elapsed_seconds" in row:
                steps.append(row["step"])
                seconds.append(row["elapsed_seconds"])
        positions = np.interp(positions, steps, seconds) / SECONDS_PER_UNIT[x]
    return positions, values


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def y_limits(lines: Sequence[Line], levels: Collection[float] = ()) -> tuple[float, float]:
    """Return the limits of the vertical axis for some lines.

    The high losses of the warm-up and rare outliers may be above the limits, because the rest of a
    line would be too flat with them.

    Args:
        lines: positions and values of each line.
        levels: values that must be within the limits.
    """
    lows = list(levels)
    highs = list(levels)
    for positions, values in lines:
        if not len(positions):
            continue
        lows.append(values.min())
        shown = values[positions >= WARM_UP_SHARE * positions.max()]
        if len(shown) <= 2:  # too few points to leave any out
            shown = values
        highs.append(np.quantile(shown, 0.995))
    low = min(lows, default=0.0)
    high = max(highs, default=1.0)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return float(low - margin), float(high + margin)


def format_count(value: float, _position: int | None = None) -> str:
    """Return a number with a unit: 500k, 2.5M, 10B."""
    return with_unit(value)
