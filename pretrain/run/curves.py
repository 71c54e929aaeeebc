"""Pictures from the rows of metrics.jsonl: curves.png of a run, and what pictures of several share."""

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.base import files
from pretrain.evaluation.items import records
from pretrain.evaluation.record import Task
from pretrain.recipe.references import Reference

# Okabe and Ito's colors, which color-blind people can distinguish; their yellow is too light for a line.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = "#000000 #E69F00 #56B4E9 #009E73 #0072B2 #D55E00 #CC79A7".split()  # noqa: SIM905
SCORES = {"acc": (GREEN, "o"), "acc_norm": (BLUE, "s"), "acc_token_norm": (VERMILLION, "^")}
AXES = {"tokens": "tokens", "steps": "step", "hours": "hours of training", "minutes": "minutes of training"}
SHADE = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0}  # behind words that a line may cross
STYLE = {"text.parse_math": False, "font.size": 10, "legend.fontsize": 9, "axes.grid": True, "grid.alpha": 0.3}
STYLE |= {"axes.spines.top": False, "legend.framealpha": 0.8, "axes.titlesize": 12, "axes.xmargin": 0.01}
WIDTH, DPI = 9, 120  # inches; 1,080 pixels, of which a README shows 900
MOST_UPDATES = 4000  # rows of updates that a picture is drawn from: more than it has pixels
SMOOTHED = 25  # of this many parts of a run a smoothed point is the mean of one
WARM_UP = 0.1  # of a run: what stands higher than the rest there would squash the rest

Published = Mapping[str, Mapping[str, float]]


class Thinned:
    """A growing run's rows for its picture: every evaluation, and updates at even steps, of which there are never many.

    Attributes:
        rows: in order; a picture then costs the same, however long the run is.
    """

    def __init__(self, rows: Iterable[Mapping] = ()):
        self.rows: list[Mapping] = []
        self._seen, self._kept, self._stride = 0, 0, 1
        for row in rows:
            self.add(row)

    def add(self, row: Mapping) -> None:
        """Take a row that was logged."""
        if "train/loss" in row:
            self._seen += 1
            if (self._seen - 1) % self._stride:
                return
            self._kept += 1
        self.rows.append(row)
        if self._kept > MOST_UPDATES:
            updates = [number for number, row in enumerate(self.rows) if "train/loss" in row]
            dropped = {*updates[1::2]}
            self.rows = [row for number, row in enumerate(self.rows) if number not in dropped]
            self._kept, self._stride = len(updates) - len(dropped), 2 * self._stride


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
        published: what others reached, as lines: a metric's name in the rows -> whose -> value.
        reference: another's validation loss, drawn as far as this run has come.
    """
    others = published or {}
    # What draws it, its height in inches, what it shows.
    panels: list[tuple[Callable[..., None], float, list[str]]] = [
        (partial(_draw_loss, others, reference), 3.2, ["train/loss", "eval/loss"])
    ]
    for task in records().values():
        panels.append((partial(_draw_scores, others, task), 2.8, [*map(task.metric, task.shares)]))
    panels += [(_draw_rate, 1.2, ["train/lr"]), (_draw_norm, 1.2, ["train/grad_norm"])]
    panels.append((_draw_speed, 1.2, ["tokens_per_second"]))
    shown = [panel for panel in panels if any(len(series(rows, name)[0]) for name in panel[2])]
    with picture(path, [height for _, height, _ in shown], "tokens") as found:
        for axes, (draw, _, _) in zip(found, shown, strict=True):
            draw(axes, rows)
        if shown:
            found[0].set_title(title)


def draw_rewards(rows: Sequence[Mapping], path: Path, title: str) -> None:
    """Draw post-training's rows into ``path`` (PNG) over steps: the sampled completions' reward and the held-out one."""
    sampled, held_out = (series(rows, name, "steps") for name in ("train/reward", "eval/reward"))
    with picture(path, [3.2], "steps") as (axes,):
        axes.plot(*sampled, color=SKY, linewidth=0.9, label="sampled, prompts that it learns from")
        axes.plot(*held_out, color=VERMILLION, marker="o", markersize=4, label="greedy, held-out prompts")
        for at, side in ((0, "left"), (-1, "right")) if len(held_out[0]) else ():
            above = {"xytext": (0, 7), "textcoords": "offset points", "ha": side, "fontweight": "bold"}
            axes.annotate(f"{held_out[1][at]:.3f}", (held_out[0][at], held_out[1][at]), color=VERMILLION, **above)
        axes.set(ylabel="mean reward", title=title)
        axes.margins(y=0.12)
        axes.legend(loc="lower right")


@contextlib.contextmanager
def picture(path: Path, heights: list[float], x: str | Sequence[str]) -> Iterator[list]:
    """Give axes of these heights (inches), one below the other; on success they become the PNG at ``path``.

    Args:
        x: one of AXES for all of them together, or one for each.
    """
    if not heights:
        yield []
        return
    os.environ["MPLBACKEND"] = "agg"  # or the user's is asked for, which may not be there
    import matplotlib  # here, for a run that never draws should not pay a second of import
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, sum(heights) + 0.6), layout="constrained")
        shared = isinstance(x, str)
        found = list(figure.subplots(len(heights), 1, sharex=shared, squeeze=False, height_ratios=heights)[:, 0])
        for number, axes in enumerate([] if shared else found):
            if x[number] in x[:number]:  # panels over the same thing have the same ends
                axes.sharex(found[x.index(x[number])])
        yield found
        for axes, name in [(found[-1], x)] if isinstance(x, str) else zip(found, x, strict=True):
            axes.set_xlabel(AXES[name])
            axes.xaxis.set_major_formatter(_count if name == "tokens" else "{x:,g}")
        with files.replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=DPI)


def _draw_loss(published: Published, reference: Reference | None, axes, rows: Sequence[Mapping]) -> None:
    train, held_out = series(rows, "train/loss"), series(rows, "eval/loss")
    levels = {f"{whose}: {value:.2f}": (value, 0.01) for whose, value in published.get("eval/loss", {}).items()}
    known = [row for row in rows if _is_number(row.get("eval/bits_per_byte")) and row.get("eval/loss")]
    ratio = known[-1]["eval/bits_per_byte"] / known[-1]["eval/loss"] if known else None  # the same text each time
    for row in rows:
        if "baseline/bigram" in row:
            value = row["baseline/bigram"]
            levels[f"a bigram model: {value:.2f}"] = value, _free_place([train, held_out], value)
        if "baseline/gzip" in row and ratio:
            value = row["baseline/gzip"] / ratio
            levels[f"gzip: {row['baseline/gzip']:.2f} bits per byte"] = value, _free_place([train, held_out], value)
    smooth = _smoothed(train[1])
    axes.plot(*train, color=SKY, linewidth=0.6, alpha=0.45)
    axes.plot(train[0], smooth, color=BLUE, linewidth=1.6, marker="." if len(smooth) < 2 else None)
    axes.plot(*held_out, color=VERMILLION, linewidth=1.6, marker="o", markersize=4)
    for label, (value, where) in levels.items():
        level(axes, value, label, BLACK, where)
    if reference:
        most = max((float(places[-1]) for places, _ in (train, held_out) if len(places)), default=0.0)
        axes.plot(*reference.until(most), color=BLACK, linestyle=":", linewidth=1.2, label=reference.words)
    ends = [("validation", held_out, VERMILLION), ("train", (train[0], smooth), BLUE)]
    ends = [end for end in ends if len(end[1][0])]
    low, high = view([train, held_out], [value for value, _ in levels.values()])
    lasts = {name: np.interp(np.linspace(0.82, 1, 20) * x[-1], x, y) for name, (x, y), _ in ends}  # where names stand
    ends.sort(key=lambda end: -lasts[end[0]].mean())
    above = min(max((last.max() for last in lasts.values()), default=0.0), high - 0.1 * (high - low))
    below = min((last.min() for last in lasts.values()), default=0.0)
    places_of_names = ((above, 4, "bottom"), (below, -4, "top"))
    for (name, (places, values), color), (y, height, side) in zip(ends, places_of_names, strict=False):
        place = {"xytext": (0, height), "textcoords": "offset points"}
        begins = places[-1] < 0.2 * max(x[-1] for _, (x, _), _ in ends)  # a line of its first point only
        how: dict[str, Any] = {
            "ha": "left" if begins else "right",
            "va": side,
            "fontweight": "bold",
            "bbox": SHADE,
            "zorder": 4,
        }
        axes.annotate(f"{name} {values[-1]:.3f}", (places[-1], y), color=color, **place, **how)
    room = 0.06 * (high - low)  # for the lower line's name
    axes.set(ylabel="loss (nats per token)", ylim=(low - room, high))
    if reference:
        axes.legend(loc="upper right", frameon=False, labelcolor="linecolor")
    if ratio:
        bits = axes.secondary_yaxis("right", functions=(lambda nats: nats * ratio, lambda bits: bits / ratio))
        bits.set_ylabel("bits per byte")


def _free_place(lines: Sequence[tuple[np.ndarray, np.ndarray]], value: float) -> float:
    """Return where along the width (a share) a level's label is farthest from the lines."""
    lines = [line for line in lines if len(line[0])]
    most = max(places[-1] for places, _ in lines)

    def distance(begin: float) -> float:
        under = np.linspace(begin, begin + 0.2, 20) * most
        return min(np.abs(np.interp(under, *line) - value).min() for line in lines)

    return max((0.01, 0.25, 0.49), key=distance)  # right of the middle a label would be written to the left


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Return the mean of each value and its neighbors; of few values themselves."""
    width = len(values) // SMOOTHED
    if width < 2:
        return values
    window = np.ones(width)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def _draw_scores(published: Published, task: Task, axes, rows: Sequence[Mapping]) -> None:
    for number, score in enumerate(task.shares):
        name, (color, marker) = task.metric(score), SCORES[score]
        tokens, values = series(rows, name)
        if not len(tokens):
            continue
        errors = series(rows, f"{name}_stderr")[1]
        label = f"{score} {100 * values[-1]:.2f}"
        if len(errors) == len(values):
            axes.fill_between(tokens, values - errors, values + errors, color=color, alpha=0.2, linewidth=0)
            label += f" ± {100 * errors[-1]:.2f}"
        axes.plot(tokens, values, color=color, marker=marker, markersize=4, label=label)
        for whose, value in published.get(name, {}).items():
            level(axes, value, f"{whose}: {100 * value:.2f}", color, 0.01 + 0.24 * number)
    if task.chance:
        level(axes, task.chance, "chance", BLACK, 0.99)
    items = series(rows, task.metric("items"))[1]
    axes.set(ylabel=f"{task.label} (% of {items[-1]:,.0f})" if len(items) else f"{task.label} (%)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")
    axes.margins(y=0.1)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 1.16), ncols=3, borderaxespad=0, frameon=False)


def _draw_rate(axes, rows: Sequence[Mapping]) -> None:
    rate = series(rows, "train/lr")
    _side(axes, rate, GREEN, "learning rate", (0, None), linewidth=1.8)
    axes.set_yticks([0, rate[1].max()])


def _draw_norm(axes, rows: Sequence[Mapping]) -> None:
    norm = series(rows, "train/grad_norm")
    _side(axes, norm, PURPLE, "gradient norm", (0, view([norm])[1]), linewidth=0.8)


def _draw_speed(axes, rows: Sequence[Mapping]) -> None:
    speed, mfu = series(rows, "tokens_per_second"), series(rows, "mfu")
    _side(axes, speed, BLUE, "tokens / s", (0, 1.1 * view([speed])[1]), linewidth=1.2)
    axes.yaxis.set_major_formatter(_count)
    if len(mfu[0]):
        shares = mfu[0], 100 * mfu[1]
        _side(axes.twinx(), shares, ORANGE, "MFU (%)", (0, 1.4 * view([shares])[1]), linestyle="--")


def _side(axes, points: tuple[np.ndarray, np.ndarray], color: str, label: str, ylim: tuple, **line) -> None:
    """Draw a line whose axis has its color and name."""
    axes.plot(*points, color=color, marker="." if len(points[0]) < 2 else None, **line)
    axes.set(ylim=ylim)
    axes.set_ylabel(label, color=color)
    axes.tick_params(axis="y", labelcolor=color)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axes.yaxis.get_ticks_position() == "left")  # two grids would cross


def level(axes, value: float, label: str, color: str, place: float) -> None:
    """Draw a dashed line over the whole width, with its name at ``place`` (a share of the width)."""
    axes.axhline(value, color=color, linestyle="--", linewidth=1)
    how = {"ha": "left" if place < 0.5 else "right", "color": color, "fontsize": 8, "bbox": SHADE, "zorder": 3}
    above = {"xytext": (0, 2), "textcoords": "offset points"}
    axes.annotate(f" {label} ", (place, value), xycoords=axes.get_yaxis_transform(), **above, **how)


def name_ends(axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each line's name and last value at its end, (x, y, name, color), moved apart where two would overlap."""
    low, high = axes.get_ylim()
    least, free = 0.9 * 12 / (72 * axes.get_figure().get_figheight() * axes.get_position().height), -math.inf
    for x, y, label, color in sorted(ends, key=lambda end: end[1]):
        free = max((y - low) / (high - low), free + least)  # shares of the axes' height
        where = {"xycoords": axes.transAxes, "fontsize": 8, "va": "center", "annotation_clip": False, "bbox": SHADE}
        at = axes.transLimits.transform((x, y))[0]
        if at < 0.8:  # a line that ends early has its name under its end, where a falling one is not, or above the axis
            where |= {"xytext": (0, -9), "ha": "right"} if free > 0.12 else {"xytext": (4, 9), "ha": "left"}
            where["textcoords"] = "offset points"
        axes.annotate(f" {label} {y:.3f}", (at if at < 0.8 else 1.0, free), color=color, **where)


def series(rows: Sequence[Mapping], name: str, x: str = "tokens") -> tuple[np.ndarray, np.ndarray]:
    """Return where and what a metric was, as two arrays; values that are not finite (a skipped update's) are left out."""
    key = "tokens" if x == "tokens" else "step"
    found = [row for row in rows if _is_number(row.get(name)) and _is_number(row.get(key))]
    places = np.array([row[key] for row in found], dtype=float)
    if x in ("hours", "minutes"):  # an evaluation has no time of its own, for the clock stands still meanwhile
        clock = [(0, 0.0), *((row["step"], row["elapsed_seconds"]) for row in rows if "elapsed_seconds" in row)]
        steps, seconds = zip(*clock, strict=True)
        places = np.interp(places, steps, seconds) / {"hours": 3600, "minutes": 60}[x]
    return places, np.array([row[name] for row in found], dtype=float)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def view(drawn: Sequence[tuple[np.ndarray, np.ndarray]], levels: Collection[float] = ()) -> tuple[float, float]:
    """Return a range of y that shows these lines after their warm-up, and the levels; rare outliers leave it at the top."""
    drawn = [(places, values) for places, values in drawn if len(places)]
    later = [values[places >= WARM_UP * places.max()] for places, values in drawn]
    # A line from outside to its only later points shows little: it is shown whole.
    later = [part if len(part) > 2 else values for part, (_, values) in zip(later, drawn, strict=True)]
    if not drawn and not levels:
        return 0.0, 1.0
    low = min([*(values.min() for _, values in drawn), *levels])
    high = max([*(np.quantile(values, 0.995) for values in later), *levels])
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return float(low - margin), float(high + margin)


def _count(value: float, _=None) -> str:
    """Return a count of tokens as people write it: 500k, 2.5M, 10B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
