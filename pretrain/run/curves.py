"""Pictures from the rows of metrics.jsonl: curves.png of one run, and several runs in one picture."""

import contextlib
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from pretrain.base import files

# Okabe and Ito's colours, which colour-blind people can distinguish; their yellow is too light for a line.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = "#000000 #E69F00 #56B4E9 #009E73 #0072B2 #D55E00 #CC79A7".split()  # noqa: SIM905
RUNS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES = ("-", "--", ":", "-.")  # for more runs than colours
SCORES = {"acc": (GREEN, "o"), "acc_norm": (BLUE, "s"), "acc_token_norm": (VERMILLION, "^")}
CHANCE = 0.25
AXES = {"tokens": "tokens", "steps": "step", "hours": "hours of training"}
STYLE = {"text.parse_math": False, "font.size": 10, "legend.fontsize": 9, "axes.grid": True, "grid.alpha": 0.3}
STYLE |= {"axes.spines.top": False, "legend.framealpha": 0.8, "axes.titlesize": 12, "axes.xmargin": 0.01}
WIDTH, DPI = 9, 120  # inches; 1,080 pixels, of which a README shows 900
WARM_UP = 0.1  # of a run: what stands higher than the rest there would squash the rest
POINTS = 400  # of a train loss, where several are compared

Published = Mapping[str, Mapping[str, float]]


def draw_curves(rows: Sequence[Mapping], path: Path, title: str, *, published: Published | None = None) -> None:
    """Draw a run's rows into ``path`` (PNG) over tokens; nothing is written when there is nothing to draw.

    Args:
        published: what others reached, as lines: a metric's name in the rows -> whose -> value.
    """
    panels = (  # what draws it, its height in inches, what it shows
        (_draw_loss, 3.2, ("train/loss", "eval/loss")),
        (_draw_hellaswag, 2.8, tuple(f"hellaswag/{score}" for score in SCORES)),
        (_draw_rate, 1.6, ("train/lr", "train/grad_norm")),
        (_draw_speed, 1.6, ("tokens_per_second",)),
    )
    shown = [panel for panel in panels if any(len(_series(rows, name)[0]) for name in panel[2])]
    with _picture(path, [height for _, height, _ in shown], "tokens") as found:
        for axes, (draw, _, _) in zip(found, shown, strict=True):
            draw(axes, rows, published or {})
        if shown:
            found[0].set_title(title)


def draw_runs(runs: Mapping[str, Sequence[Mapping]], path: Path, *, x: str = "tokens", score: str = "acc_norm") -> bool:
    """Draw several runs, label -> rows, into ``path`` (PNG); return whether there was anything to draw.

    Args:
        x: tokens, steps or hours (of training: evaluating and saving not counted).
        score: which of HellaSwag's.
    """
    heights = {"train/loss": 2.6, "eval/loss": 3.2, f"hellaswag/{score}": 2.4}
    names = [name for name in heights if any(len(_series(rows, name, x)[0]) for rows in runs.values())]
    with _picture(path, [heights[name] for name in names], x) as found:
        for axes, name in zip(found, names, strict=True):
            _compare(axes, runs, name, x)
        if names:
            lines = [line for line in found[0].get_lines() if line.get_gid()]
            last = {label: _series(rows, "eval/loss")[1][-1:] for label, rows in runs.items()}
            labels = [": ".join([label, *(f"{value:.3f}" for value in values)]) for label, values in last.items()]
            about = {"title": "run: last validation loss", "loc": "outside lower center", "ncols": 2}
            found[0].figure.legend(lines, labels, **about)
    return bool(names)


def draw_rewards(rows: Sequence[Mapping], path: Path, title: str) -> None:
    """Draw post-training's rows into ``path`` (PNG) over steps: the sampled completions' reward and the held-out one."""
    sampled, held_out = (_series(rows, name, "steps") for name in ("train/reward", "eval/reward"))
    with _picture(path, [3.2], "steps") as (axes,):
        axes.plot(*sampled, color=SKY, linewidth=0.9, label="sampled, prompts that it learns from")
        axes.plot(*held_out, color=VERMILLION, marker="o", markersize=4, label="greedy, held-out prompts")
        for at, side in ((0, "left"), (-1, "right")) if len(held_out[0]) else ():
            above = {"xytext": (0, 7), "textcoords": "offset points", "ha": side, "fontweight": "bold"}
            axes.annotate(f"{held_out[1][at]:.3f}", (held_out[0][at], held_out[1][at]), color=VERMILLION, **above)
        axes.set(ylabel="mean reward", title=title)
        axes.margins(y=0.12)
        axes.legend(loc="lower right")


@contextlib.contextmanager
def _picture(path: Path, heights: list[float], x: str) -> Iterator[list]:
    """Give axes of these heights (inches), one below the other; on success they become the PNG at ``path``."""
    if not heights:
        yield []
        return
    os.environ["MPLBACKEND"] = "agg"  # or the user's is asked for, which may not be there
    import matplotlib  # here, for a run that never draws should not pay a second of import
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, sum(heights) + 0.6), layout="constrained")
        found = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
        yield found
        found[-1].set_xlabel(AXES[x])
        found[-1].xaxis.set_major_formatter(_count if x == "tokens" else "{x:,g}")
        with files.replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=DPI)


def _draw_loss(axes, rows: Sequence[Mapping], published: Published) -> None:
    train, held_out = _series(rows, "train/loss"), _series(rows, "eval/loss")
    levels = published.get("eval/loss", {})
    axes.plot(*train, color=SKY, linewidth=0.7, marker="." if len(train[0]) < 2 else None, label="train")
    axes.plot(*held_out, color=VERMILLION, marker="o", markersize=4, label="validation")
    for whose, value in levels.items():
        _level(axes, value, f"{whose}: {value:.2f}", BLACK, 0.01)
    if len(held_out[1]):
        place = {"xytext": (0, 9), "textcoords": "offset points", "ha": "right", "fontweight": "bold"}
        axes.annotate(f"{held_out[1][-1]:.3f}", (held_out[0][-1], held_out[1][-1]), color=VERMILLION, **place)
    axes.set(ylabel="loss (nats per token)", ylim=_view([train, held_out], levels.values()))
    axes.legend(loc="upper right")


def _draw_hellaswag(axes, rows: Sequence[Mapping], published: Published) -> None:
    for number, (score, (color, marker)) in enumerate(SCORES.items()):
        name = f"hellaswag/{score}"
        tokens, values = _series(rows, name)
        if not len(tokens):
            continue
        errors = _series([row for row in rows if name in row], f"{name}_stderr")[1]
        label = f"{score} {100 * values[-1]:.2f}"
        if len(errors) == len(values):
            axes.fill_between(tokens, values - errors, values + errors, color=color, alpha=0.2, linewidth=0)
            label += f" ± {100 * errors[-1]:.2f}"
        axes.plot(tokens, values, color=color, marker=marker, markersize=4, label=label)
        for whose, value in published.get(name, {}).items():
            _level(axes, value, f"{whose}: {100 * value:.2f}", color, 0.01 + 0.24 * number)
    _level(axes, CHANCE, "chance", BLACK, 0.99)
    items = _series(rows, "hellaswag/items")[1]
    axes.set(ylabel=f"HellaSwag (% of {items[-1]:,.0f})" if len(items) else "HellaSwag (%)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")
    axes.margins(y=0.1)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 1.16), ncols=3, borderaxespad=0, frameon=False)


def _draw_rate(axes, rows: Sequence[Mapping], published: Published) -> None:
    rate, norm = _series(rows, "train/lr"), _series(rows, "train/grad_norm")
    _side(axes, rate, GREEN, "learning rate", (0, None), linewidth=1.8)
    other = axes.twinx()
    _side(other, norm, PURPLE, "gradient norm", (0, _view([norm])[1]), linewidth=0.6)
    axes.set_zorder(other.get_zorder() + 1)  # the rate above the noise of the norm
    axes.patch.set_visible(False)


def _draw_speed(axes, rows: Sequence[Mapping], published: Published) -> None:
    speed, mfu = _series(rows, "tokens_per_second"), _series(rows, "mfu")
    _side(axes, speed, BLUE, "tokens / s", (0, 1.1 * _view([speed])[1]), linewidth=1.2)
    axes.yaxis.set_major_formatter(_count)
    if len(mfu[0]):
        shares = mfu[0], 100 * mfu[1]
        _side(axes.twinx(), shares, ORANGE, "MFU (%)", (0, 1.4 * _view([shares])[1]), linestyle="--")


def _compare(axes, runs: Mapping[str, Sequence[Mapping]], name: str, x: str) -> None:
    """Draw one metric of all runs; a run without it keeps its colour in the other panels."""
    drawn, most = [], 1
    for number, rows in enumerate(runs.values()):
        places, values = _series(rows, name, x)
        color, dashes = RUNS[number % len(RUNS)], DASHES[number // len(RUNS) % len(DASHES)]
        if name == "train/loss" and (block := -(-len(values) // POINTS)) > 1:  # else noise would hide the others
            most, whole = max(most, block), len(values) // block * block
            places, values = (part[:whole].reshape(-1, block).mean(1) for part in (places, values))
        marker = {} if name == "train/loss" and len(places) > 1 else {"marker": "o", "markersize": 3}
        axes.plot(places, values, dashes, color=color, linewidth=1.2, gid="run", **marker)
        drawn.append((places, values))
    if name.startswith("hellaswag"):
        _level(axes, CHANCE, "chance", BLACK, 0.99)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")
        axes.set(ylabel=f"HellaSwag {name.partition('/')[2]} (%)")
    else:
        words = "validation loss" if name == "eval/loss" else f"train loss{f', means of {most}' if most > 1 else ''}"
        axes.set(ylabel=f"{words}\n(nats per token)", ylim=_view(drawn))


def _side(axes, points: tuple[np.ndarray, np.ndarray], color: str, label: str, ylim: tuple, **line) -> None:
    """Draw a line whose axis has its colour and name."""
    axes.plot(*points, color=color, marker="." if len(points[0]) < 2 else None, **line)
    axes.set(ylim=ylim)
    axes.set_ylabel(label, color=color)
    axes.tick_params(axis="y", labelcolor=color)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axes.yaxis.get_ticks_position() == "left")  # two grids would cross


def _level(axes, value: float, label: str, color: str, place: float) -> None:
    """Draw a dashed line over the whole width, with its name at ``place`` (a share of the width)."""
    axes.axhline(value, color=color, linestyle="--", linewidth=1)
    shade = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0}
    how = {"ha": "left" if place < 0.5 else "right", "color": color, "fontsize": 8, "bbox": shade, "zorder": 3}
    above = {"xytext": (0, 2), "textcoords": "offset points"}
    axes.annotate(f" {label} ", (place, value), xycoords=axes.get_yaxis_transform(), **above, **how)


def _series(rows: Sequence[Mapping], name: str, x: str = "tokens") -> tuple[np.ndarray, np.ndarray]:
    """Return where and what a metric was, as two arrays; values that are not finite (a skipped update's) are left out."""
    key = "tokens" if x == "tokens" else "step"
    found = [row for row in rows if _is_number(row.get(name)) and _is_number(row.get(key))]
    places = np.array([row[key] for row in found], dtype=float)
    if x == "hours":  # an evaluation has no time of its own, for the clock stands still meanwhile
        clock = [(0, 0.0), *((row["step"], row["elapsed_seconds"]) for row in rows if "elapsed_seconds" in row)]
        steps, seconds = zip(*clock, strict=True)
        places = np.interp(places, steps, seconds) / 3600
    return places, np.array([row[name] for row in found], dtype=float)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _view(drawn: Sequence[tuple[np.ndarray, np.ndarray]], levels: Collection[float] = ()) -> tuple[float, float]:
    """Return a range of y that shows these lines after their warm-up, and the levels; rare outliers leave it at the top."""
    drawn = [(places, values) for places, values in drawn if len(places)]
    later = [values[places >= WARM_UP * places.max()] for places, values in drawn]
    if max(map(len, later), default=0) < 2:  # a line from the warm-up to its only later point shows nothing
        later = [values for _, values in drawn]
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
