"""Draw the pictures of the documentation from stored results, without training.

    python benchmarks/pictures.py                                  # all pictures
    python benchmarks/pictures.py docs/compare.png                 # some of them
    python benchmarks/pictures.py --from runs/quickstart           # store a new run before

``--from`` copies the metrics of runs into benchmarks/results/runs/, with the date, the commit and
the machine. The name of the run folder decides which stored run is replaced. The other results are
written by ``terminal.py``, ``time_to_loss.py`` and the commands in benchmarks/results/README.md.

To add a picture, write a function that draws it into a path, and enter it in ``PICTURES``. If it
shows runs, enter their names in ``RUNS``.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import datetime
import json
from collections.abc import Callable, Mapping, Sequence

import compare_runs
from benchmarks import terminal
from benchmarks.runs import ROOT, commit
from ursa_minor.base import paths
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import METRICS, read_metrics
from ursa_minor.base.wording import did_you_mean
from ursa_minor.evaluation.tasks import blimp
from ursa_minor.machine import device as hardware
from ursa_minor.reporting import curves, learning_curve

RESULTS = ROOT / "benchmarks" / "results"
STORED_RUNS = RESULTS / "runs"

# Groups of docs/evaluation.md, and runs of docs/expect.md.
ADAMW_RUNS = ("adamw-1", "adamw-2", "adamw-3")
MUON_RUNS = ("muon-1", "muon-2", "muon-3")
RATE_RUNS = {
    "1e-5": "rate-1e-5",
    "1e-3 (the recipe)": "rate-1e-3",
    "1e-2": "rate-1e-2",
    "1e-1": "rate-1e-1",
}
RATE_COLORS = (curves.SKY, curves.BLUE, curves.GREEN, curves.VERMILLION)
SPIKE_RUN = "spike"
RUNS = ("quickstart", *ADAMW_RUNS, *MUON_RUNS, *RATE_RUNS.values(), SPIKE_RUN)

# Metrics that no picture shows. They are not stored.
DROPPED = ("skipped_updates", "ms_per_step", "data_wait_seconds")
DIGITS = 6  # significant digits of a stored value


def store(run_dir: Path, folder: Path = STORED_RUNS) -> None:
    """Store the metrics of a run as ``folder/NAME.jsonl``, where NAME is that of its folder.

    The first line states where they come from. The other lines are rows of metrics.jsonl, without
    the metrics that no picture shows.

    Raises:
        BadInput: no picture shows a run of this name, or it has no metrics.
    """
    name = run_dir.resolve().name
    if name not in RUNS:
        raise BadInput(f"--from {run_dir}: no picture shows a run {name}{did_you_mean(name, RUNS)}")
    rows = read_metrics(run_dir / METRICS)
    if not rows:
        raise BadInput(f"--from {run_dir}: {METRICS} is missing or empty. Give a finished run")
    about = {
        "run": name,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": hardware.this_device().name,
    }
    lines = [json.dumps(about)]
    for row in rows:
        stored_row = {}
        for key, value in row.items():
            if key not in DROPPED:
                stored_row[key] = _rounded(value)
        lines.append(json.dumps(stored_row))
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return value


def stored_rows(name: str) -> list[dict]:
    """Return the rows of a stored run. The first line of the file is not one of them."""
    return read_metrics(STORED_RUNS / f"{name}.jsonl")


def newest_result(pattern: str) -> dict:
    """Return the contents of the newest JSON file in benchmarks/results, by the date in its name.

    Args:
        pattern: of its name, for example "post-training-cpu-*.json".
    """
    path = max(RESULTS.glob(pattern))
    return json.loads(path.read_text(encoding="utf-8"))


# The pictures


def draw_quickstart(path: Path) -> None:
    """Draw curves.png of the quickstart, as the run itself draws it."""
    curves.draw_curves(stored_rows("quickstart"), path, "quickstart")


def draw_terminal(path: Path) -> None:
    """Draw the terminal of ``make train``."""
    recording = (RESULTS / "terminal.txt").read_text(encoding="utf-8")
    path.write_text(terminal.draw(recording), encoding="utf-8")


def draw_comparison(path: Path) -> None:
    """Draw the comparison of AdamW and Muon, as compare_runs.py draws it."""
    columns = [_column("AdamW", ADAMW_RUNS), _column("Muon", MUON_RUNS)]
    compare_runs.draw(columns, path, reference=None, loss="eval/loss", time_unit="minutes")


def _column(label: str, names: Sequence[str]) -> compare_runs.RunColumn:
    runs = [stored_rows(name) for name in names]
    # The other fields are for the table.
    return compare_runs.RunColumn(
        label, recipe={}, runs=runs, results=[], finishes=[], interruptions=[]
    )


def draw_problems(path: Path) -> None:
    """Draw runs with several learning rates, and a run with a spike."""
    with curves.picture(path, [4.0, 3.4], ["steps", "steps"]) as (rates_axes, spike_axes):
        _draw_learning_rates(rates_axes)
        _draw_spike(spike_axes)
        curves.set_title(rates_axes, "Learning rates, and a spike (shakespeare_char)")


def _draw_learning_rates(axes) -> None:
    for (label, name), color in zip(RATE_RUNS.items(), RATE_COLORS, strict=True):
        steps, losses = curves.series(stored_rows(name), "eval/loss", "steps")
        label = f"{label}: {losses[-1]:.2f}"
        axes.plot(steps, losses, color=color, marker="o", markersize=4, label=label)
    axes.set_ylabel("validation loss\n(nats per character)")
    curves.legend_above(axes, "learning rate: last validation loss")


def _draw_spike(axes) -> None:
    rows = stored_rows(SPIKE_RUN)
    steps, losses = curves.series(rows, "train/loss", "steps")
    axes.plot(steps, losses, color=curves.BLUE, linewidth=1, label="train, each step")
    steps, losses = curves.series(rows, "eval/loss", "steps")
    axes.plot(steps, losses, color=curves.VERMILLION, marker="o", markersize=4, label="validation")
    axes.set_ylabel("loss\n(nats per character)")
    curves.legend_above(axes, "a text that contains 8,000 characters of noise")


def draw_fewer_tokens(path: Path) -> None:
    """Draw the validation loss of AdamW and Muon up to a target (``time_to_loss.py``)."""
    result = newest_result("time-to-loss-cpu-*.json")
    target = result["target"]
    colors = (curves.BLACK, curves.BLUE, curves.VERMILLION)
    with curves.picture(path, [4.6], ["steps"]) as (axes,):
        lines = []
        for curve, color in zip(result["curves"], colors, strict=True):
            steps = curve["steps"]
            losses = curve["losses"]
            label = f"{curve['label']}: {steps[-1]:,.0f} updates"
            axes.plot(steps, losses, color=color, linewidth=1.8, label=label)
            axes.plot(steps[-1], losses[-1], color=color, marker="o")
            lines.append(((steps, losses), color))
        axes.axhline(target, color=curves.BLACK, linestyle="--", linewidth=1)
        axes.set_ylim(target - 0.19, target + 0.9)
        axes.set_ylabel("validation loss (nats per character)")
        curves.mark_cut_off(axes, lines)

        # An arrow below the target points from the end of AdamW's run to the end of Muon's.
        _, adamw, muon = result["curves"]
        height = target - 0.06
        arrow_start = (adamw["steps"][-1], height)
        arrow_end = (muon["steps"][-1], height)
        arrow = {"arrowstyle": "->", "color": curves.VERMILLION, "lw": 2}
        axes.annotate("", arrow_end, arrow_start, arrowprops=arrow)
        ratio, low, high = result["ratio"]
        num_seeds = len(result["reached"]["muon"])
        first_ratio = muon["steps"][-1] / adamw["steps"][-1]
        text = (
            f"{ratio:.2f} times the updates: mean of {num_seeds} seeds (95%: {low:.2f} to "
            f"{high:.2f}).\n{first_ratio:.2f} times for the seed that is drawn"
        )
        axes.annotate(
            text,
            arrow_start,
            (8, 6),
            textcoords="offset points",
            color=curves.VERMILLION,
            verticalalignment="top",
        )

        curves.legend_above(axes)
        curves.set_title(
            axes, f"Updates to a loss of {target:g}. Each run has a schedule of its own length"
        )


def draw_rewards(path: Path) -> None:
    """Draw the rewards during GRPO: a color for each seed."""
    result = newest_result("post-training-cpu-*.json")
    colors = (curves.BLUE, curves.VERMILLION, curves.GREEN)
    with curves.picture(path, [4.0], ["steps"]) as (axes,):
        for run, color in zip(result["rows"], colors, strict=True):
            _draw_one_seed(axes, run, color)
        axes.set_ylabel("share of correct answers")
        curves.legend_above(axes)
        curves.set_title(axes, "Held-out problems, greedy (dots); sampled answers (thin lines)")


def _draw_one_seed(axes, run: Mapping, color: str) -> None:
    steps, rewards = curves.series(run["metrics"], "train/reward", "steps")
    axes.plot(steps, rewards, color=color, linewidth=1.0, alpha=0.8)

    steps, rewards = curves.series(run["metrics"], "eval/reward", "steps")
    label = f"seed {run['seed']}: {rewards[0]:.2f} to {rewards[-1]:.2f}"
    axes.plot(steps, rewards, color=color, marker="o", markersize=4, linewidth=1.8, label=label)


def draw_learning_curve(path: Path) -> None:
    """Draw the BLiMP scores of checkpoints of the quickstart, as eval_tasks.py draws them."""
    folder = RESULTS / "learning-curve"
    lines = []
    for text in (folder / "scores.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        # The folder of each run contains its recipe, which decides how runs are grouped.
        line["run"] = str(folder / Path(line["run"]).name)
        lines.append(line)
    learning_curve.draw([blimp.BLIMP], lines, path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "docs/quickstart/curves.png": draw_quickstart,
    "docs/quickstart/terminal.svg": draw_terminal,
    "docs/compare.png": draw_comparison,
    "docs/expect.png": draw_problems,
    "docs/fewer_tokens.png": draw_fewer_tokens,
    "docs/learning_curve.png": draw_learning_curve,
    "docs/post_training.png": draw_rewards,
}


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Store runs, draw pictures, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pictures",
        nargs="*",
        metavar="PICTURE",
        help=f"Pictures to draw: {', '.join(PICTURES)}. Default: all.",
    )
    parser.add_argument(
        "--from",
        dest="runs",
        nargs="+",
        type=paths.path_argument,
        default=[],
        metavar="RUN",
        help="Folders of finished runs whose metrics replace the stored ones.",
    )
    parser.add_argument(
        "--out",
        type=paths.path_argument,
        default=ROOT,
        metavar="PATH",
        help="Folder to write docs/... to. Default: the repository.",
    )
    args = parser.parse_args(argv)
    for name in args.pictures:
        if name not in PICTURES:
            raise BadInput(f"{name}: no such picture{did_you_mean(name, PICTURES)}")
    for run_dir in args.runs:
        store(run_dir)
    for name in args.pictures or PICTURES:
        path = args.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        PICTURES[name](path)
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
