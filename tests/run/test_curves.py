"""curves.png is drawn from whatever rows a run has; several runs are told apart in one picture."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks import plot_runs
from benchmarks.plot_runs import draw_runs
from pretrain.run.curves import draw_curves

TRAIN = [{"step": s, "tokens": 8 * s, "train/loss": 3.0, "train/lr": 0.1, "tokens_per_second": 5.0} for s in (1, 2)]
LOOK = {"step": 2, "tokens": 16, "eval/loss": 2.5}
SCORED = {"step": 2, "tokens": 16, "hellaswag/items": 1000}
SCORED |= {"hellaswag/acc": 0.27, "hellaswag/acc_stderr": 0.01, "hellaswag/acc_token_norm": 0.28}
PUBLISHED = {"eval/loss": {"GPT-2": 3.29}, "hellaswag/acc": {"GPT-2": 0.2892}, "hellaswag/acc_norm": {"GPT-2": 0.3114}}


def long_run(steps: int) -> list[dict]:
    """Rows as a real run's: a loss that falls from 11 to 3, a look every 250 steps."""
    noise = np.random.default_rng(1).normal(0, 0.04, steps + 1)
    rows = []
    for step in range(1, steps + 1):
        loss = 3 + 8 * float(np.exp(-step / (0.01 * steps)))
        row = {"step": step, "tokens": 1000 * step, "train/loss": loss + noise[step], "train/grad_norm": loss / 10}
        row |= {"train/lr": 1e-3 * (1 - step / steps), "tokens_per_second": 9e4 + noise[step], "mfu": 0.4}
        rows.append(row | {"elapsed_seconds": 2.0 * step})
        if step % 250 == 0:
            rows.append({"step": step, "tokens": 1000 * step, "eval/loss": loss})
    return rows


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """The figures that were saved, which are not painted here."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (figures.append(self), Path(path).touch()))
    return figures


def names(figure: Figure) -> list[str]:
    return [axes.get_ylabel() for axes in figure.axes]


def words(axes) -> list[str]:
    return [text.get_text().strip() for text in axes.texts]


@pytest.mark.parametrize("rows", [TRAIN, [LOOK], [SCORED], [*TRAIN, {"step": 3}, LOOK, SCORED]])
def test_curves_are_a_png(tmp_path, rows):
    draw_curves(rows, tmp_path / "curves.png", "a run")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


@pytest.mark.parametrize("rows", [[], [{"step": 0, "tokens": 0}], [{"step": 1, "train/loss": 2.0}]])
def test_nothing_is_drawn_from_nothing(tmp_path, rows):
    draw_curves(rows, tmp_path / "curves.png", "a run")
    assert not draw_runs({"a run": rows}, tmp_path / "runs.png")
    assert not list(tmp_path.iterdir())


def test_panels_without_data_are_left_out_and_the_picture_is_shorter(tmp_path, drawn):
    fast = {**TRAIN[0], "mfu": 0.4, "train/grad_norm": 1.0}
    for rows in ([LOOK], [LOOK, *TRAIN], [LOOK, *TRAIN, SCORED], [LOOK, fast]):
        draw_curves(rows, tmp_path / "curves.png", "a run")
    assert [name.split(" (")[0] for name in names(drawn[0])] == ["loss"]
    assert [name.split(" (")[0] for name in names(drawn[1])] == ["loss", "learning rate", "tokens / s", "gradient norm"]
    assert "HellaSwag (% of 1,000)" in names(drawn[2])
    assert "MFU (%)" in names(drawn[3]) and "MFU (%)" not in names(drawn[2])
    heights = [figure.get_figheight() for figure in drawn]
    assert heights[0] < heights[1] < heights[2] and len({figure.get_figwidth() for figure in drawn}) == 1


def test_large_losses_at_the_start_do_not_squash_the_curve_and_few_points_are_shown_whole(tmp_path, drawn):
    draw_curves(long_run(1000), tmp_path / "curves.png", "a run")
    looks = [{"step": step, "tokens": step, "eval/loss": loss} for step, loss in ((0, 9.0), (1000, 4.0))]
    draw_curves(looks, tmp_path / "curves.png", "a run")
    (low, high), (lowest, highest) = (figure.axes[0].get_ylim() for figure in drawn)
    assert 2.5 < low < 2.9 and 3.1 < high < 4 and lowest < 4 and highest > 8.9


def test_the_last_validation_loss_and_the_title_are_written(tmp_path, drawn):
    skipped = {"step": 3, "tokens": 24, "train/loss": float("nan"), "train/grad_norm": float("inf"), "train/lr": 0.1}
    rows = [*TRAIN, skipped, {**LOOK, "step": 1, "tokens": 8, "eval/loss": 2.75}, LOOK]
    draw_curves(rows, tmp_path / "curves.png", "_a $run$ ^2")
    assert list(drawn[0].axes[0].get_lines()[0].get_xdata()) == [8, 16]  # what is not finite is left out
    assert words(drawn[0].axes[0]) == ["2.500"]
    assert drawn[0].axes[0].get_title() == "_a $run$ ^2"
    assert not drawn[0].axes[0].title.get_parse_math()


def test_what_others_published_is_a_named_line_where_the_run_has_that_metric(tmp_path, drawn):
    draw_curves([*TRAIN, LOOK], tmp_path / "curves.png", "a run", published=PUBLISHED)
    draw_curves([*TRAIN, LOOK, SCORED], tmp_path / "curves.png", "a run", published=PUBLISHED)
    draw_curves([*TRAIN, LOOK, SCORED], tmp_path / "curves.png", "a run")
    assert words(drawn[0].axes[0]) == ["GPT-2: 3.29", "2.500"]
    assert not any("HellaSwag" in name for name in names(drawn[0]))
    assert words(drawn[1].axes[1]) == ["GPT-2: 28.92", "chance"]  # acc_norm was not scored
    assert words(drawn[2].axes[0]) == ["2.500"] and words(drawn[2].axes[1]) == ["chance"]
    flat = [line.get_ydata()[0] for line in drawn[1].axes[1].get_lines() if line.get_linestyle() == "--"]
    assert flat == [0.2892, 0.25]
    low, high = drawn[0].axes[0].get_ylim()
    assert low < 2.5 and high > 3.29  # the line is in view


def test_hellaswag_has_a_band_of_one_standard_error_and_its_last_score(tmp_path, drawn):
    earlier = SCORED | {"step": 1, "tokens": 8, "hellaswag/acc": 0.25, "hellaswag/acc_stderr": 0.02}
    draw_curves([earlier, SCORED], tmp_path / "curves.png", "a run")
    (axes,) = drawn[0].axes
    (band,) = axes.collections  # acc_token_norm has no errors in these rows
    corners = {tuple(point) for point in band.get_paths()[0].vertices.round(6)}
    assert {(8, 0.23), (8, 0.27), (16, 0.26), (16, 0.28)} <= corners
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["acc 27.00 ± 1.00", "acc_token_norm 28.00"]


def runs_of(figure: Figure, panel: int) -> list:
    return [line for line in figure.axes[panel].get_lines() if line.get_gid() == "run"]


def test_runs_keep_their_colours_and_are_named_with_their_last_validation_loss(tmp_path, drawn):
    assert draw_runs({"$a": [*TRAIN, LOOK], "_b": TRAIN, "c": [LOOK, SCORED]}, tmp_path / "r.png", score="acc")
    figure = drawn[0]
    assert names(figure) == ["train loss\n(nats per token)", "validation loss\n(nats per token)", "HellaSwag acc (%)"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["$a: 2.500", "_b", "c: 2.500"]
    assert not any(text.get_parse_math() for text in figure.legends[0].get_texts())
    colors = [[line.get_color() for line in runs_of(figure, panel)] for panel in range(3)]
    assert colors[0] == colors[1] == colors[2] and len({*colors[0]}) == 3
    assert [len(line.get_xdata()) for line in runs_of(figure, 0)] == [2, 2, 0]
    draw_runs({str(number): TRAIN for number in range(20)}, tmp_path / "r.png")  # more than there are colours
    assert len({(line.get_color(), line.get_linestyle()) for line in runs_of(drawn[1], 0)}) == 20


def test_hours_are_those_of_training_also_for_evaluations(tmp_path, drawn):
    rows = long_run(500)  # 2 s a step
    draw_runs({"a": rows}, tmp_path / "r.png", x="hours")
    draw_runs({"a": rows}, tmp_path / "r.png", x="steps")
    assert list(runs_of(drawn[0], 1)[0].get_xdata()) == pytest.approx([500 / 3600, 1000 / 3600])
    assert list(runs_of(drawn[1], 1)[0].get_xdata()) == [250, 500]
    assert [figure.axes[-1].get_xlabel() for figure in drawn] == ["hours of training", "step"]


def test_a_noisy_train_loss_is_drawn_as_means(tmp_path, drawn):
    rows = long_run(2000)
    draw_runs({"a": rows, "short": TRAIN}, tmp_path / "r.png")
    line = runs_of(drawn[0], 0)[0]
    first = [row["train/loss"] for row in rows if "train/loss" in row][:5]
    assert len(line.get_xdata()) == 400 and line.get_ydata()[0] == pytest.approx(np.mean(first))
    assert names(drawn[0])[0].startswith("train loss, means of 5")


@pytest.fixture
def two_runs(tmp_path, monkeypatch) -> Path:
    for name, rows in (("one", [*TRAIN, LOOK]), ("two", [*TRAIN, {**LOOK, "eval/loss": 2.25}])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_plot_runs_takes_folders_and_files(two_runs, drawn, capsys):
    assert plot_runs.main(["one", "two/metrics.jsonl", "--x", "steps", "--out", "both.png"]) == 0
    assert plot_runs.main(["one", "two", "--labels", "AdamW", "Muon"]) == 0
    assert capsys.readouterr().out == "both.png\nruns.png\n"
    labels = [[text.get_text() for text in figure.legends[0].get_texts()] for figure in drawn]
    assert labels == [["one: 2.500", "two: 2.250"], ["AdamW: 2.500", "Muon: 2.250"]]
    assert (two_runs / "both.png").is_file() and (two_runs / "runs.png").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["one", "none"], "none: no such file; give a run's folder or its metrics.jsonl"),
        (["one", "two", "--labels", "a"], "--labels: 1 labels for 2 runs"),
        (["one", "two", "--labels", "a", "a"], "two runs have one name"),
        (["one", "--out", "runs.pdf"], "--out runs.pdf: must be a .png file in a folder that is there"),
        (["empty.jsonl"], "empty.jsonl: no row with a loss or a score yet"),
    ],
)
def test_plot_runs_names_the_remedy_and_writes_nothing(two_runs, capsys, flags, message):
    (two_runs / "empty.jsonl").write_text('{"step": 1}\n')
    assert plot_runs.main(flags) == 2
    assert message in capsys.readouterr().err
    assert not list(two_runs.glob("*.p*"))
