"""The picture of docs/post_training.md: what each seed's sampled and greedy answers score while GRPO trains.

python benchmarks/post_training_picture.py benchmarks/results/post-training-cpu-2026-11-23.json --out docs/post_training.png
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json

from ursa_minor.base import paths
from ursa_minor.reporting.curves import BLUE, GREEN, VERMILLION, picture, series


def draw(runs: list[dict], path: Path) -> None:
    """Draw the runs, each ``seed`` and ``metrics``."""
    with picture(path, [4.0], ["steps"]) as (axes,):
        for run, color in zip(runs, (BLUE, VERMILLION, GREEN), strict=True):
            sampled, greedy = (
                series(run["metrics"], f"{kind}/reward", "steps") for kind in ("train", "eval")
            )
            axes.plot(*sampled, color=color, linewidth=0.8, alpha=0.5)
            label = f"seed {run['seed']}: {greedy[1][0]:.2f} to {greedy[1][-1]:.2f}"
            axes.plot(*greedy, color=color, marker="o", markersize=4, linewidth=1.8, label=label)
        axes.set(
            ylabel="share of right answers",
            title="Held-out problems, greedy (dots); sampled answers (thin)",
        )
        axes.legend(loc="lower right", frameon=False, labelcolor="linecolor")


def main() -> int:
    """Read the figures, write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=paths.path_argument)
    parser.add_argument("--out", type=paths.path_argument, required=True)
    args = parser.parse_args()
    draw(json.loads(args.json.read_text())["rows"], args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
