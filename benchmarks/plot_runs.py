"""Several runs in one picture: train loss, validation loss and, where they were scored, HellaSwag.

    python benchmarks/plot_runs.py runs/adamw runs/muon
    python benchmarks/plot_runs.py runs/a runs/b c/metrics.jsonl --x hours --labels AdamW Muon theirs --out docs/abc.png

A run is its folder or its metrics.jsonl. Hours are hours of training: evaluating and saving not counted.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
from collections.abc import Mapping, Sequence

from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import BadInput
from pretrain.base.layout import read_metrics
from pretrain.evaluation.items import records
from pretrain.run import curves

RUNS = (curves.BLUE, curves.VERMILLION, curves.GREEN, curves.PURPLE, curves.ORANGE, curves.SKY, curves.BLACK)
DASHES = ("-", "--", ":", "-.")  # for more runs than colours
POINTS = 400  # of a train loss


def find_metrics(name: str) -> Path:
    """Return a run's metrics.jsonl. Raises BadInput where there is none."""
    path = Path(name)
    if path.is_dir():
        path = path / "metrics.jsonl"
    if not path.is_file():
        raise BadInput(f"{path}: no such file; give a run's folder or its metrics.jsonl")
    return path


def name_runs(paths: list[Path], given: list[str] | None) -> list[str]:
    """Return a label for each: those given, else the folders' names, or whole paths where two have one name.

    Raises BadInput when there are more or fewer labels than runs, or one is there twice.
    """
    names = [path.resolve().parent.name for path in paths]
    labels = given or (names if len({*names}) == len(names) else [str(path.parent) for path in paths])
    if len(labels) != len(paths):
        raise BadInput(f"--labels: {len(labels)} labels for {len(paths)} runs; give one for each")
    if len({*labels}) != len(labels):
        raise BadInput(
            f"--labels {' '.join(labels)}: two runs have one name; give each its own label, and each run once"
        )
    return labels


def draw_runs(runs: Mapping[str, Sequence[Mapping]], path: Path, *, x: str = "tokens", score: str = "acc_norm") -> bool:
    """Draw several runs, label -> rows, into ``path`` (PNG); return whether there was anything to draw.

    Args:
        x: tokens, steps or hours (of training: evaluating and saving not counted).
        score: which of HellaSwag's.
    """
    heights = {"train/loss": 2.6, "eval/loss": 3.2, f"hellaswag/{score}": 2.4}
    names = [name for name in heights if any(len(curves.series(rows, name, x)[0]) for rows in runs.values())]
    with curves.picture(path, [heights[name] for name in names], x) as found:
        for axes, name in zip(found, names, strict=True):
            _compare(axes, runs, name, x)
        if names:
            lines = [line for line in found[0].get_lines() if line.get_gid()]
            last = {label: curves.series(rows, "eval/loss")[1][-1:] for label, rows in runs.items()}
            labels = [": ".join([label, *(f"{value:.3f}" for value in values)]) for label, values in last.items()]
            about = {"title": "run: last validation loss", "loc": "outside lower center", "ncols": 2}
            found[0].figure.legend(lines, labels, **about)
    return bool(names)


def _compare(axes, runs: Mapping[str, Sequence[Mapping]], name: str, x: str) -> None:
    """Draw one metric of all runs; a run without it keeps its colour in the other panels."""
    drawn, most = [], 1
    for number, rows in enumerate(runs.values()):
        places, values = curves.series(rows, name, x)
        color, dashes = RUNS[number % len(RUNS)], DASHES[number // len(RUNS) % len(DASHES)]
        if name == "train/loss" and (block := -(-len(values) // POINTS)) > 1:  # else noise would hide the others
            most, whole = max(most, block), len(values) // block * block
            places, values = (part[:whole].reshape(-1, block).mean(1) for part in (places, values))
        marker = {} if name == "train/loss" and len(places) > 1 else {"marker": "o", "markersize": 3}
        axes.plot(places, values, dashes, color=color, linewidth=1.2, gid="run", **marker)
        drawn.append((places, values))
    task = next((task for task in records().values() if name.startswith(f"{task.name}/")), None)
    if task:
        curves.level(axes, task.chance, "chance", curves.BLACK, 0.99)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")
        axes.set(ylabel=f"{task.label} {name.partition('/')[2]} (%)")
    else:
        words = "validation loss" if name == "eval/loss" else f"train loss{f', means of {most}' if most > 1 else ''}"
        axes.set(ylabel=f"{words}\n(nats per token)", ylim=curves.view(drawn))


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or its metrics.jsonl")
    parser.add_argument("--x", choices=curves.AXES, default="tokens")
    parser.add_argument("--score", choices=curves.SCORES, default="acc_norm", help="which of HellaSwag's")
    parser.add_argument("--labels", nargs="+", help="one for each run; default: the folders' names")
    parser.add_argument("--out", type=Path, default=Path("runs.png"), metavar="PNG")
    asked = parser.parse_args(argv)
    if asked.out.suffix != ".png" or asked.out.is_dir() or not asked.out.parent.is_dir():
        raise BadInput(f"--out {asked.out}: must be a .png file in a folder that is there")
    paths = [find_metrics(name) for name in asked.runs]
    labels = name_runs(paths, asked.labels)
    runs = {label: read_metrics(path) for label, path in zip(labels, paths, strict=True)}
    if not draw_runs(runs, asked.out, x=asked.x, score=asked.score):
        raise BadInput(f"{', '.join(map(str, paths))}: no row with a loss or a score yet")
    print(asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
