"""The panels and lines of curves.png."""

import numpy as np
import pytest
from conftest import ROOT
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ursa_minor.evaluation.tasks.hellaswag import TASK
from ursa_minor.recipe import keys, loading, reference_curves, sizes
from ursa_minor.reporting.curves import (
    RowSampler,
    draw_curves,
    draw_rewards,
    published_scores,
)


def training_row(step: int) -> dict:
    """Return a row of metrics.jsonl about an update."""
    return {
        "step": step,
        "tokens": 8 * step,
        "train/loss": 3.0,
        "train/lr": 0.1,
        "tokens_per_second": 5.0,
    }


TRAINING_ROWS = [training_row(1), training_row(2)]
VALIDATION_ROW = {"step": 2, "tokens": 16, "eval/loss": 2.5}
HELLASWAG_ROW = {
    "step": 2,
    "tokens": 16,
    "hellaswag/items": 1000,
    "hellaswag/revision": TASK.revision,
    "hellaswag/acc": 0.27,
    "hellaswag/acc_stderr": 0.01,
    "hellaswag/acc_token_norm": 0.28,
}
PUBLISHED = {"hellaswag/acc": {"GPT-2": 0.2892}, "hellaswag/acc_norm": {"GPT-2": 0.3114}}


@pytest.fixture
def draw(tmp_path, saved_figures):
    """Return a function that draws rows and returns the figure."""

    def draw_figure(rows: list[dict], title: str = "a run", **options) -> Figure:
        draw_curves(rows, tmp_path / "curves.png", title, **options)
        return saved_figures[-1]

    return draw_figure


def rows_of_long_run(steps: int) -> list[dict]:
    """Return rows whose loss falls from 11 to 3, with a validation every 250 steps."""
    noise = np.random.default_rng(1).normal(0, 0.04, steps + 1)
    rows = []
    for step in range(1, steps + 1):
        loss = 3 + 8 * float(np.exp(-step / (0.01 * steps)))
        training = {
            "step": step,
            "tokens": 1000 * step,
            "train/loss": loss + noise[step],
            "train/grad_norm": loss / 10,
            "train/lr": 1e-3 * (1 - step / steps),
            "tokens_per_second": 9e4 + noise[step],
            "mfu": 0.4,
            "elapsed_seconds": 2.0 * step,
        }
        rows.append(training)
        if step % 250 == 0:
            rows.append({"step": step, "tokens": 1000 * step, "eval/loss": loss})
    return rows


def panel_labels(figure: Figure) -> list[str]:
    """Return the label of the y axis of each panel."""
    return [axes.get_ylabel() for axes in figure.axes]


def legend_labels(axes: Axes) -> list[str]:
    """Return the texts of the legend."""
    return [text.get_text() for text in axes.get_legend().get_texts()]


def lines_with_style(axes: Axes, style: str) -> list[Line2D]:
    """Return the lines with this style, for example "--"."""
    return [line for line in axes.get_lines() if line.get_linestyle() == style]


def test_rows_without_curves_draw_nothing(tmp_path, saved_figures):
    rows = [{"step": 0, "tokens": 0}, {"step": 1, "train/loss": 2.0}]

    draw_curves(rows, tmp_path / "curves.png", "a run")

    assert not list(tmp_path.iterdir())
    assert not saved_figures


def test_panels_without_data_are_omitted(draw):
    row_with_all_metrics = training_row(1) | {"mfu": 0.4, "train/grad_norm": 1.0}

    loss_only = draw([VALIDATION_ROW])
    complete = draw([VALIDATION_ROW, *TRAINING_ROWS, HELLASWAG_ROW, row_with_all_metrics])

    assert panel_labels(loss_only) == ["loss (nats per token)"]
    assert panel_labels(complete) == [
        "loss (nats per token)",
        "HellaSwag (% of 1,000 items)",
        "learning rate",
        "gradient norm",
        "tokens/s",
        "MFU",
    ]
    assert loss_only.get_figheight() < complete.get_figheight()
    assert loss_only.get_figwidth() == complete.get_figwidth()


def test_initial_losses_do_not_stretch_the_axis(draw):
    figure = draw(rows_of_long_run(1000))

    low, high = figure.axes[0].get_ylim()
    assert 2.5 < low < 2.9
    assert 3.1 < high < 4


def test_few_points_are_all_visible(draw):
    rows = [
        {"step": 0, "tokens": 0, "eval/loss": 9.0},
        {"step": 1000, "tokens": 1000, "eval/loss": 4.0},
    ]

    figure = draw(rows)

    low, high = figure.axes[0].get_ylim()
    assert low < 4
    assert high > 8.9


def test_legends_are_above_the_axes(draw, tmp_path, saved_figures):
    run = draw([*rows_of_long_run(500), HELLASWAG_ROW], published=PUBLISHED)
    draw_rewards([{"step": 1, "train/reward": 0.5}], tmp_path / "reward.png", "a run")

    for axes in (*run.axes[:2], saved_figures[-1].axes[0]):
        axes.figure.draw_without_rendering()
        assert axes.get_legend().get_window_extent().y0 > axes.bbox.y1


def marks(axes: Axes) -> list[str]:
    """Return the marks of cut-off values above the axes, and their text."""
    return [text.get_text() for text in axes.texts]


def test_cut_off_values_are_marked(draw):
    spike = training_row(600) | {"tokens": 600_000, "train/grad_norm": 50.0}

    figure = draw([*rows_of_long_run(1000), spike])

    losses, _, gradient_norm, speed, _ = figure.axes
    assert marks(losses)[-1] == "up to 10.3"
    assert marks(gradient_norm) == ["▲", "▲", "up to 50"]
    assert not marks(speed)


def test_visible_values_are_not_marked(draw):
    figure = draw([VALIDATION_ROW, *TRAINING_ROWS])

    assert not [axes for axes in figure.axes if marks(axes)]


def test_training_loss_is_smoothed(draw):
    figure = draw(rows_of_long_run(1000))

    axes = figure.axes[0]
    raw_line, smooth_line, _ = axes.get_lines()
    raw_losses = raw_line.get_ydata()
    smooth_losses = smooth_line.get_ydata()
    assert raw_line.get_alpha() < 1
    assert f"train: {smooth_losses[-1]:.3f}" in legend_labels(axes)
    assert smooth_losses[500] == pytest.approx(np.mean(raw_losses[480:520]), abs=1e-3)


def test_published_scores_match_the_model_size():
    recipe = loading.load_recipe(ROOT / "recipes/gpt2_124m.yaml")
    larger_model = keys.replace(recipe, n_layer=24, n_embd=1024).model

    scores = published_scores(recipe.model)
    scores_of_larger_model = published_scores(larger_model)

    assert scores["lambada_openai/acc"] == {"GPT-2 124M": 0.3256}
    assert scores["lambada_openai/perplexity"]["GPT-2 124M"] > 1
    assert scores["hellaswag/acc_norm"] == {"GPT-2 124M": 0.3114}
    assert scores["hellaswag/acc_token_norm"] == {"GPT-2 124M": 0.2955, "GPT-3 124M": 0.3370}
    assert scores_of_larger_model["hellaswag/acc_token_norm"].keys() == {"GPT-2 355M"}


def test_hellaswag_has_all_published_scores():
    recipe = loading.load_recipe(ROOT / "recipes/gpt2_124m.yaml")

    scores = published_scores(recipe.model)

    assert {f"hellaswag/{score}" for score in TASK.scores} <= set(scores)
    assert {size.label for size in sizes.GPT2_SIZES} <= set(TASK.published)


@pytest.fixture
def figure_with_baselines(draw) -> Figure:
    """Draw a run with baselines, missing values and no task, although scores are published."""
    skipped_update = training_row(3) | {"train/loss": None, "train/grad_norm": None}
    baselines = {"step": 2, "tokens": 16, "baseline/bigram": 2.75, "baseline/gzip": 1.5}
    missing = {
        "step": 3,
        "tokens": 24,
        "eval/loss": None,
        "eval/bits_per_byte": None,
        "baseline/bigram": None,
        "baseline/gzip": None,
    }
    validation = VALIDATION_ROW | {"eval/bits_per_byte": 1.25}
    rows = [*TRAINING_ROWS, skipped_update, validation, baselines, missing]
    return draw(rows, "_a $run$ ^2", published=PUBLISHED)


def test_title_is_not_parsed_as_math(figure_with_baselines):
    (title,) = figure_with_baselines.texts

    assert title.get_text() == "_a $run$ ^2"
    assert not title.get_parse_math()


def test_missing_values_are_omitted(figure_with_baselines):
    training_line = figure_with_baselines.axes[0].get_lines()[0]

    assert list(training_line.get_xdata()) == [8, 16]


def test_baselines_are_horizontal_lines(figure_with_baselines):
    axes = figure_with_baselines.axes[0]

    assert axes.get_legend().get_title().get_text() == "bits per byte (nats per token)"
    assert legend_labels(axes) == [
        "train (3.000)",
        "validation: 1.250 (2.500)",
        "bigram baseline: 1.375 (2.750)",
        "gzip baseline: 1.500 (3.000)",
    ]
    heights = [line.get_ydata()[0] for line in lines_with_style(axes, "--")]
    assert heights == [2.75, 3.0]  # one bit per byte is 2 nats per token here
    assert axes.get_ylim()[1] > 3.0


def test_second_axis_has_bits_per_byte(figure_with_baselines):
    axes = figure_with_baselines.axes[0]
    figure_with_baselines.draw_without_rendering()

    (bits_axis,) = axes.child_axes
    assert bits_axis.get_ylabel() == "bits per byte"
    assert bits_axis.get_ylim() == pytest.approx([limit / 2 for limit in axes.get_ylim()])


def test_published_scores_need_a_scored_run(figure_with_baselines):
    for label in panel_labels(figure_with_baselines):
        assert "HellaSwag" not in label


def test_published_scores_are_drawn_per_metric(draw):
    earlier = HELLASWAG_ROW | {
        "step": 1,
        "tokens": 8,
        "hellaswag/acc": 0.25,
        "hellaswag/acc_stderr": 0.02,
    }
    rows = [*TRAINING_ROWS, VALIDATION_ROW, earlier, HELLASWAG_ROW]

    figure = draw(rows, published=PUBLISHED)

    axes = figure.axes[1]
    # The published acc_norm is not drawn, because the run has no such score.
    assert legend_labels(axes) == [
        "acc: 27.00 ± 1.00",
        "GPT-2: 28.92",
        "acc_token_norm: 28.00",
        "chance: 25.00",
    ]
    (band,) = axes.collections  # one standard error of acc; acc_token_norm has none in these rows
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.round(6)}
    assert {(8, 0.23), (8, 0.27), (16, 0.26), (16, 0.28)} <= corners


@pytest.mark.parametrize("revision", [None, "0" * 40], ids=["none", "other"])
def test_published_scores_need_same_revision(draw, revision):
    other = HELLASWAG_ROW | {"step": 3, "tokens": 24, "hellaswag/revision": revision}

    figure = draw([*TRAINING_ROWS, HELLASWAG_ROW, other], published=PUBLISHED)

    labels = ["acc: 27.00 ± 1.00", "acc_token_norm: 28.00", "chance: 25.00"]
    assert legend_labels(figure.axes[1]) == labels


def test_reference_curve_ends_with_the_run(draw):
    reference = reference_curves.load("recipes/references/gpt2_124m_llmc.yaml")
    rows = [
        {"step": 125, "tokens": 125 * 2**19, "eval/loss": 7.0},
        {"step": 400, "tokens": 400 * 2**19, "eval/loss": 5.6},
    ]

    figure = draw(rows, reference=reference)

    (line,) = lines_with_style(figure.axes[0], ":")
    assert line.get_label() == "llm.c, GPT-2 124M (its own validation set, of FineWeb)"
    assert list(line.get_xdata()) == [0, 250 * 2**19]
    assert list(line.get_ydata()) == [11.0092, 6.1710]


def test_long_run_is_sampled_at_even_steps():
    steps = 50_000
    sampler = RowSampler()

    for step in range(1, steps + 1):
        sampler.add({"step": step, "train/loss": 3.0})
        if step % 500 == 0 and step >= steps // 2:
            sampler.add({"step": step, "eval/loss": 2.0})

    update_steps = [row["step"] for row in sampler.rows if "train/loss" in row]
    assert 2000 <= len(update_steps) <= 4000
    assert len(set(np.diff(update_steps))) == 1
    assert update_steps[0] == 1
    assert update_steps[-1] > steps - 100
    evaluation_steps = [row["step"] for row in sampler.rows if "eval/loss" in row]
    assert evaluation_steps == list(range(steps // 2, steps + 1, 500))
    all_steps = [row["step"] for row in sampler.rows]
    assert all_steps == sorted(all_steps)
