"""Pictures from the rows of metrics.jsonl: curves.png of a run, and what pictures of several share."""

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ursa_minor.base import files
from ursa_minor.evaluation.task import Task
from ursa_minor.evaluation.task_data import all_tasks
from ursa_minor.recipe import keys, sizes
from ursa_minor.recipe.reference_curves import Reference

# Okabe and Ito's colors, which color-blind people can distinguish; their yellow is too light for a line.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = [
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
]
SCORES = {"acc": (GREEN, "o"), "acc_norm": (BLUE, "s"), "acc_token_norm": (VERMILLION, "^")}
AXES = {
    "tokens": "tokens",
    "steps": "step",
    "hours": "hours of training",
    "minutes": "minutes of training",
}
LOSSES = {"train/loss": ("train", BLUE), "eval/loss": ("validation", VERMILLION)}
# Small panels: what they show, as which words, in which color.
SIDES = {"train/lr": ("learning rate", GREEN), "train/grad_norm": ("gradient norm", PURPLE)}
SIDES |= {"tokens_per_second": ("tokens / s", BLUE), "mfu": ("MFU", ORANGE)}
STYLE = {
    "text.parse_math": False,
    "font.size": 10,
    "legend.fontsize": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
STYLE |= {
    "axes.spines.top": False,
    "legend.framealpha": 0.8,
    "axes.titlesize": 12,
    "axes.xmargin": 0.01,
}
WIDTH, DPI = 9, 120  # inches; 1,080 pixels, of which a README shows 900
MOST_UPDATES = 4000  # rows of updates that a picture is drawn from: more than it has pixels
SMOOTHED = 25  # of this many parts of a run a smoothed point is the mean of one
WARM_UP_SHARE = 0.1  # of a run: what stands higher than the rest there would squash the rest

Published = Mapping[str, Mapping[str, float]]


class RowSampler:
    """A growing run's rows for its picture: every evaluation, and updates at even steps, of which there are never many.

    A picture then costs the same, however long the run is.
    """

    def __init__(self) -> None:
        self.rows: list[Mapping] = []  # those that are drawn, in order
        self._updates, self._stride = 0, 1

    def add(self, row: Mapping) -> None:
        """Take a row that was logged."""
        is_update = "train/loss" in row
        if not is_update or self._updates % self._stride == 0:
            self.rows.append(row)
        self._updates += is_update
        if self._updates > MOST_UPDATES * self._stride:
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
    """Return whether each score of a task in ``rows`` is of all items of its public data set.

    Published scores are of all items at ``task.revision``, so that only such scores compare.
    """
    revisions = {row.get(task.metric("revision")) for row in rows if task.metric("items") in row}
    if task.revision is None:
        return bool(revisions) and None not in revisions
    return revisions == {task.revision}


def published_scores(model: keys.Model) -> Published:
    """Return published scores that a model of this shape may be compared with: metric -> model -> value."""
    smallest = sizes.GPT2_SIZES[0]
    label = smallest.label  # also for a model of another shape
    for size in sizes.GPT2_SIZES:
        if (size.n_layer, size.n_embd) == (model.n_layer, model.n_embd):
            label = size.label
    names = [label]
    if label == smallest.label:
        names.append("GPT-3 124M")

    scores: dict[str, dict[str, float]] = {}
    for task in all_tasks().values():
        for name in names:
            for score, value in zip(task.scores, task.published.get(name, ()), strict=False):
                if value is not None:
                    scores.setdefault(task.metric(score), {})[name] = (
                        value / 100 if score in task.shares else value
                    )
    return scores


def draw_curves(
    rows: Sequence[Mapping],
    path: Path,
    title: str,
    *,
    published: Published | None = None,
    reference: Reference | None = None,
) -> None:
    """Draw a run's rows into ``path`` (PNG) over tokens; nothing is written when there is nothing to draw.

    Args:
        published: others' scores of tasks: a metric's name in the rows -> whose -> value. They are
            drawn as lines where the run was scored on all items of the same data set.
        reference: another's validation loss, drawn as far as this run has come.
    """
    others = published or {}
    # What draws it, its height in inches, what it shows.
    panels: list[tuple[Callable, float, list[str]]] = [
        (partial(_draw_loss, reference), 3.2, [*LOSSES])
    ]
    for task in all_tasks().values():
        panels.append((partial(_draw_scores, others, task), 2.8, [*map(task.metric, task.shares)]))
    panels += [(partial(_draw_side, name, *style), 1.2, [name]) for name, style in SIDES.items()]
    shown = [panel for panel in panels if any(len(series(rows, name)[0]) for name in panel[2])]
    if not shown:
        return
    with picture(path, [height for _, height, _ in shown], ["tokens"] * len(shown)) as panel_axes:
        panel_axes[0].set_title(title)
        for axes, (draw, _, _) in zip(panel_axes, shown, strict=True):
            draw(axes, rows)


def draw_rewards(rows: Sequence[Mapping], path: Path, title: str) -> None:
    """Draw post-training's rows into ``path`` (PNG) over steps: the sampled completions' reward and the held-out one."""
    sampled, held_out = (series(rows, name, "steps") for name in ("train/reward", "eval/reward"))
    reached = (
        " to ".join(f"{value:.3f}" for value in held_out[1][[0, -1]]) if len(held_out[1]) else ""
    )
    with picture(path, [3.2], ["steps"]) as (axes,):
        axes.plot(*sampled, color=SKY, linewidth=0.9, label="sampled, prompts that it learns from")
        axes.plot(
            *held_out,
            color=VERMILLION,
            marker="o",
            markersize=4,
            label=f"greedy, held-out prompts: {reached}",
        )
        axes.set(ylabel="mean reward", title=title)
        axes.legend(loc="lower right")


@contextlib.contextmanager
def picture(path: Path, heights: list[float], x: Sequence[str]) -> Iterator[list]:
    """Give axes of these heights (inches), one below the other; on success they become the PNG at ``path``.

    Args:
        x: one of AXES for each. Panels over the same thing have the same ends.
    """
    os.environ["MPLBACKEND"] = "agg"  # or the user's is asked for, which may not be there
    import matplotlib  # here, for a run that never draws should not pay a second of import
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, sum(heights) + 0.6), layout="constrained")
        all_axes = list(
            figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        )
        for number, axes in enumerate(all_axes):
            if x[number] in x[:number]:
                axes.sharex(all_axes[x.index(x[number])])
        yield all_axes
        for axes, name, below in zip(all_axes, x, [*x[1:], None], strict=True):
            axes.xaxis.set_major_formatter(_count if name == "tokens" else "{x:,g}")
            axes.tick_params(labelbottom=name != below)
            axes.set_xlabel(AXES[name] if name != below else "")
        with files.replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=DPI)


def _draw_loss(reference: Reference | None, axes, rows: Sequence[Mapping]) -> None:
    lines, levels = [series(rows, name) for name in LOSSES], {}
    known = [
        row for row in rows if _is_number(row.get("eval/bits_per_byte")) and row.get("eval/loss")
    ]
    # The text is the same each time.
    ratio = known[-1]["eval/bits_per_byte"] / known[-1]["eval/loss"] if known else None
    for row in rows:
        if _is_number(row.get("baseline/bigram")):
            levels[f"a bigram model: {row['baseline/bigram']:.2f}"] = row["baseline/bigram"]
        if _is_number(row.get("baseline/gzip")) and ratio:
            levels[f"gzip: {row['baseline/gzip']:.2f} bits per byte"] = row["baseline/gzip"] / ratio
    axes.plot(*lines[0], color=SKY, linewidth=0.6, alpha=0.45)
    for (places, values), (name, color) in zip(lines, LOSSES.values(), strict=True):
        if len(values):
            points = (
                {"marker": "o", "markersize": 4} if name == "validation" or len(values) < 2 else {}
            )
            drawn = _smoothed(values) if name == "train" else values
            axes.plot(
                places, drawn, color=color, linewidth=1.6, label=f"{name} {drawn[-1]:.3f}", **points
            )
    for (label, value), color in zip(
        levels.items(), itertools.cycle((BLACK, GREEN, PURPLE, ORANGE)), strict=False
    ):
        axes.axhline(value, color=color, linestyle="--", linewidth=1, label=label)
    if reference:
        most = max((float(places[-1]) for places, _ in lines if len(places)), default=0.0)
        axes.plot(
            *reference.until(most), color=BLACK, linestyle=":", linewidth=1.2, label=reference.words
        )
    axes.set(ylabel="loss (nats per token)", ylim=view(lines, levels.values()))
    axes.legend(loc="upper right")
    if ratio:
        bits = axes.secondary_yaxis(
            "right", functions=(lambda nats: nats * ratio, lambda bits: bits / ratio)
        )
        bits.set_ylabel("bits per byte")


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Return the mean of each value and its neighbors; of few values themselves."""
    window = np.ones(max(1, len(values) // SMOOTHED))
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def _draw_scores(published: Published, task: Task, axes, rows: Sequence[Mapping]) -> None:
    is_comparable = scored_all_items(rows, task)
    for score in task.shares:
        name, (color, marker) = task.metric(score), SCORES[score]
        tokens, values = series(rows, name)
        if not len(tokens):
            continue
        errors = series(rows, f"{name}_stderr")[1]
        label = f"{score} {100 * values[-1]:.2f}"
        if len(errors) == len(values):
            axes.fill_between(
                tokens, values - errors, values + errors, color=color, alpha=0.2, linewidth=0
            )
            label += f" ± {100 * errors[-1]:.2f}"
        axes.plot(tokens, values, color=color, marker=marker, markersize=4, label=label)
        lines = published.get(name, {}) if is_comparable else {}
        for whose, value in lines.items():
            axes.axhline(
                value, color=color, linestyle="--", linewidth=1, label=f"{whose}: {100 * value:.2f}"
            )
    if task.chance:
        axes.axhline(task.chance, color=BLACK, linestyle="--", linewidth=1, label="chance")
    items = series(rows, task.metric("items"))[1]
    axes.set(ylabel=f"{task.label} (% of {items[-1]:,.0f})" if len(items) else f"{task.label} (%)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")
    axes.margins(y=0.1)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 1.16), ncols=4, borderaxespad=0, frameon=False)


def _draw_side(name: str, label: str, color: str, axes, rows: Sequence[Mapping]) -> None:
    line = series(rows, name)
    axes.plot(*line, color=color, marker="." if len(line[0]) < 2 else None, linewidth=1.2)
    high = line[1].max() if name == "train/lr" else view([line])[1]
    axes.set(ylim=(0, 1.05 * high), ylabel=label)
    axes.yaxis.set_major_formatter(_count)


def series(rows: Sequence[Mapping], name: str, x: str = "tokens") -> tuple[np.ndarray, np.ndarray]:
    """Return where and what a metric was, as two arrays; values that are not finite (a skipped update's) are left out."""
    key = "tokens" if x == "tokens" else "step"
    points = [row for row in rows if _is_number(row.get(name)) and _is_number(row.get(key))]
    places = np.array([row[key] for row in points], dtype=float)
    # Evaluations have no time, because the clock is paused.
    if x in (
        "hours",
        "minutes",
    ):
        clock = [
            (0, 0.0),
            *((row["step"], row["elapsed_seconds"]) for row in rows if "elapsed_seconds" in row),
        ]
        steps, seconds = zip(*clock, strict=True)
        places = np.interp(places, steps, seconds) / {"hours": 3600, "minutes": 60}[x]
    return places, np.array([row[name] for row in points], dtype=float)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def view(
    drawn: Sequence[tuple[np.ndarray, np.ndarray]], levels: Collection[float] = ()
) -> tuple[float, float]:
    """Return a range of y that shows these lines after their warm-up, and the levels; rare outliers leave it at the top."""
    drawn = [(places, values) for places, values in drawn if len(places)]
    later = [values[places >= WARM_UP_SHARE * places.max()] for places, values in drawn]
    # A line from outside to its only later points shows little: it is shown whole.
    later = [
        part if len(part) > 2 else values for part, (_, values) in zip(later, drawn, strict=True)
    ]
    low = min([*(values.min() for _, values in drawn), *levels], default=0.0)
    high = max([*(np.quantile(values, 0.995) for values in later), *levels], default=1.0)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return float(low - margin), float(high + margin)


def _count(value: float, _=None) -> str:
    """Return a count of tokens as people write it: 500k, 2.5M, 10B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
