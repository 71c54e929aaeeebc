"""Draw the rewards during GRPO: the picture of docs/post_training.md.

    python benchmarks/post_training_picture.py \\
        benchmarks/results/post-training-cpu-2026-11-23.json --out docs/post_training.png

The picture has a color for each seed: a thin line for the sampled answers, and dots for the greedy
answers to the held-out problems. The program prints nothing.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json

from ursa_minor.base import paths
from ursa_minor.reporting.curves import BLUE, GREEN, VERMILLION, picture, series


def draw(runs: list[dict], path: Path) -> None:
    """Draw three runs.

    Args:
        runs: each has its ``seed`` and ``metrics``, the rows of metrics.jsonl.
        path: of the picture.
    """
    with picture(path, [4.0], ["steps"]) as (axes,):
        colors = (BLUE, VERMILLION, GREEN)
        for run, color in zip(runs, colors, strict=True):
            seed = run["seed"]
            metrics = run["metrics"]
            steps, rewards = series(metrics, "train/reward", "steps")
            axes.plot(steps, rewards, color=color, linewidth=0.8, alpha=0.5)

            steps, rewards = series(metrics, "eval/reward", "steps")
            first_reward = rewards[0]
            last_reward = rewards[-1]
            axes.plot(
                steps,
                rewards,
                color=color,
                marker="o",
                markersize=4,
                linewidth=1.8,
                label=f"seed {seed}: {first_reward:.2f} to {last_reward:.2f}",
            )
        axes.set_ylabel("share of right answers")
        axes.set_title("Held-out problems, greedy (dots); sampled answers (thin)")
        axes.legend(loc="lower right", frameon=False, labelcolor="linecolor")


def main() -> int:
    """Read the figures, write the picture, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "json",
        type=paths.path_argument,
        metavar="PATH",
        help="JSON file with the runs.",
    )
    parser.add_argument(
        "--out",
        type=paths.path_argument,
        required=True,
        metavar="PATH",
        help="PNG file to write.",
    )
    args = parser.parse_args()
    draw(json.loads(args.json.read_text())["rows"], args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
