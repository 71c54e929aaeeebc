"""The picture of scores over tokens: lines, bands, chance level and step 0."""

import math
from pathlib import Path

import numpy as np
import pytest
from checkpoint_folders import write_recipe

from ursa_minor.evaluation.task import Task
from ursa_minor.evaluation.task_data import all_tasks
from ursa_minor.reporting import learning_curve

BLIMP = all_tasks()["blimp"]
LAMBADA = all_tasks()["lambada_openai"]
TOKENS = (0, 1024, 4096, 65536)
PICTURE = Path("curve.png")


def make_lines(run: str | None, scores: dict[int | None, float | None], task: Task = BLIMP):
    """Return the lines of a run with a score for each number of tokens."""
    lines = []
    for tokens, score in scores.items():
        line = {"task": task.name, "run": run, "step": tokens, "tokens": tokens, "items": 670}
        line |= {"model": f"{run}/{tokens}", "acc": score, "acc_stderr": 0.02}
        lines.append(line)
    return lines


def rising(offset: float = 0.0) -> dict[int, float]:
    """Return a score that rises with the tokens."""
    return {tokens: 0.5 + offset + index / 10 for index, tokens in enumerate(TOKENS)}


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch) -> None:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)


def data_lines(axes) -> list:
    """Return the lines of the runs in a panel."""
    return [container.lines[0] for container in axes.containers]


def legend(axes) -> list[str]:
    """Return the labels of a panel."""
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_run_is_a_line_with_errors_and_chance(in_tmp_path, saved_figures):
    write_recipe(Path("runs/a"))

    learning_curve.draw([BLIMP], make_lines("runs/a", rising()), PICTURE)

    (axes,) = saved_figures[0].axes
    (container,) = axes.containers
    line, _, bars = container.lines
    assert line.get_ydata() == pytest.approx([0.5, 0.6, 0.7, 0.8])
    segments = np.array(bars[0].get_segments())
    assert np.ptp(segments[:, :, 1], axis=1) == pytest.approx(0.04)
    assert axes.get_xscale() == "log"
    assert sorted(legend(axes)) == ["50.00 chance", "80.00 a"]
    assert PICTURE.is_file()


def test_step_zero_is_labeled_at_the_left(in_tmp_path, saved_figures):
    write_recipe(Path("runs/a"))

    learning_curve.draw([BLIMP], make_lines("runs/a", rising()), PICTURE)

    (axes,) = saved_figures[0].axes
    positions = data_lines(axes)[0].get_xdata()
    assert 0 < positions[0] <= positions[1] / 2
    assert list(positions[1:]) == list(TOKENS[1:])
    ticks = dict(zip(axes.get_xticks(), axes.get_xticklabels(), strict=True))
    assert ticks[positions[0]].get_text().startswith("0")
    assert axes.get_xlim()[0] < positions[0]


@pytest.mark.parametrize("tokens", [[0], [0, 100], [100], [1, 10**13], [10**12, 3 * 10**12]])
def test_any_range_of_tokens_is_drawn(in_tmp_path, tokens):
    write_recipe(Path("runs/a"))
    scores = dict.fromkeys(tokens, 0.5)

    learning_curve.draw([BLIMP], make_lines("runs/a", scores), PICTURE)

    assert PICTURE.stat().st_size > 1000


def test_seeds_are_one_line_with_a_band(in_tmp_path, saved_figures):
    lines = []
    for seed in (1, 2):
        write_recipe(Path(f"runs/muon-{seed}"), seed=seed, data_seed=seed, optimizer="muon")
        lines += make_lines(f"runs/muon-{seed}", rising(seed / 10))
    write_recipe(Path("runs/adamw"), seed=1, data_seed=1, optimizer="adamw")
    lines += make_lines("runs/adamw", rising())

    learning_curve.draw([BLIMP], lines, PICTURE)

    (axes,) = saved_figures[0].axes
    muon, adamw = data_lines(axes)
    assert muon.get_ydata() == pytest.approx([0.65, 0.75, 0.85, 0.95])
    assert adamw.get_ydata() == pytest.approx([0.5, 0.6, 0.7, 0.8])
    labels = legend(axes)
    assert "95.00 muon, 2 seeds" in labels
    assert "80.00 adamw" in labels
    bands = [item for item in axes.collections if item.get_alpha() == 0.2]
    assert len(bands) == 1
    low, high = bands[0].get_paths()[0].get_extents().intervaly
    assert (low, high) == pytest.approx((0.65 - math.sqrt(0.005), 0.95 + math.sqrt(0.005)))


def test_tokens_that_a_seed_lacks_are_left_out(in_tmp_path, saved_figures, caplog):
    lines = []
    for seed in (1, 2):
        write_recipe(Path(f"runs/{seed}"), seed=seed)
        lines += make_lines(f"runs/{seed}", rising())

    learning_curve.draw([BLIMP], lines[:-1], PICTURE)

    (line,) = data_lines(saved_figures[0].axes[0])
    assert len(line.get_xdata()) == 3
    assert "leaves out 1 point at which some seeds have no score" in caplog.text


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (("muon-1", "muon-2"), "muon"),
        (("muon_10", "muon_11"), "muon"),
        (("lr0.1-s1", "lr0.1-s2"), "lr0.1"),
        (("muon", "muon-s2"), "muon"),
        (("a/muon", "b/muon"), "muon"),
        (("first", "second"), "first"),
    ],
)
def test_line_has_common_name_of_seeds(in_tmp_path, saved_figures, names, label):
    lines = []
    for seed, name in enumerate(names):
        write_recipe(Path(name), seed=seed)
        lines += make_lines(name, rising())

    learning_curve.draw([BLIMP], lines, PICTURE)

    assert f"80.00 {label}, 2 seeds" in legend(saved_figures[0].axes[0])


def test_equal_common_names_are_not_used(in_tmp_path, saved_figures):
    lines = []
    for number in range(4):
        run = f"runs/tiny-{number}"
        write_recipe(Path(run), seed=number % 2, learning_rate=number // 2)
        lines += make_lines(run, rising())

    learning_curve.draw([BLIMP], lines, PICTURE)

    labels = legend(saved_figures[0].axes[0])
    assert {"80.00 tiny-0, 2 seeds", "80.00 tiny-2, 2 seeds"} < set(labels)


def test_seeds_may_keep_different_checkpoints(in_tmp_path, saved_figures):
    lines = []
    for seed, points in ((1, ["log2"]), (2, None)):
        run = f"runs/tiny-{seed}"
        write_recipe(Path(run), seed=seed, keep_checkpoints=points, keep_optimizer=points is None)
        lines += make_lines(run, rising())

    learning_curve.draw([BLIMP], lines, PICTURE)

    assert "80.00 tiny, 2 seeds" in legend(saved_figures[0].axes[0])


def test_runs_of_same_seed_have_own_lines(in_tmp_path, saved_figures):
    lines = []
    for number in (1, 2):
        write_recipe(Path(f"runs/tiny-{number}"), seed=1)
        lines += make_lines(f"runs/tiny-{number}", rising())

    learning_curve.draw([BLIMP], lines, PICTURE)

    labels = legend(saved_figures[0].axes[0])
    assert sorted(labels) == ["50.00 chance", "80.00 tiny-1", "80.00 tiny-2"]


def test_different_numbers_of_items_are_a_range(in_tmp_path, saved_figures):
    write_recipe(Path("runs/a"))
    lines = make_lines("runs/a", rising())
    lines[0]["items"] = 650

    learning_curve.draw([BLIMP], lines, PICTURE)

    assert "% of 650 to 670 items" in saved_figures[0].axes[0].get_ylabel()


def test_runs_without_complete_recipe_are_separate(in_tmp_path, saved_figures, caplog):
    write_recipe(Path("runs/1"), seed=1)
    Path("runs/2").mkdir()
    lines = make_lines("runs/1", rising()) + make_lines("runs/2", rising())

    learning_curve.draw([BLIMP], lines, PICTURE)

    assert len(data_lines(saved_figures[0].axes[0])) == 2
    assert "own line" in caplog.text


def test_each_task_has_a_panel(in_tmp_path, saved_figures):
    write_recipe(Path("runs/a"))
    lines = make_lines("runs/a", rising()) + make_lines("runs/a", rising(), LAMBADA)

    learning_curve.draw([LAMBADA, BLIMP], lines, PICTURE)

    first, second = saved_figures[0].axes
    assert first.get_ylabel().startswith("LAMBADA acc")
    assert second.get_ylabel().startswith("BLiMP acc")
    assert legend(first) == ["80.00 a"]  # random guessing gives 0


def test_score_that_is_not_finite_is_left_out(in_tmp_path, saved_figures):
    write_recipe(Path("runs/a"))

    learning_curve.draw([BLIMP], make_lines("runs/a", rising() | {4096: None}), PICTURE)

    (line,) = data_lines(saved_figures[0].axes[0])
    assert len(line.get_xdata()) == 3


def test_model_without_tokens_has_no_point():
    assert not learning_curve.has_points(make_lines(None, {None: 0.5}))
    assert not learning_curve.has_points(make_lines("runs/a", {None: 0.5}))
    assert learning_curve.has_points(make_lines("runs/a", {0: 0.5}))


@pytest.mark.parametrize("length", [5, 16, 24, 40, 200])
def test_legend_covers_no_line(in_tmp_path, length):
    """All labels are above the panel and within the picture."""
    from matplotlib.figure import Figure

    figures = []
    original = Figure.savefig

    def save(figure, *args, **settings):
        figures.append(figure)
        return original(figure, *args, **settings)

    lines = []
    for number in range(14):
        run = f"runs/{number:02d}{'m' * (length - 2)}"
        write_recipe(Path(run), learning_rate=number)
        lines += make_lines(run, rising())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save)
        learning_curve.draw([BLIMP, LAMBADA], lines, PICTURE)

    (figure,) = figures
    panel = figure.axes[0].get_window_extent()
    box = figure.axes[0].get_legend().get_window_extent()
    assert box.y0 >= panel.y1 - 1
    assert box.x1 <= figure.bbox.x1
    assert panel.width > 0.8 * figure.bbox.width
    assert panel.height > 200
