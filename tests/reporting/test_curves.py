"""curves.png is drawn from whatever rows a run has."""

import numpy as np
import pytest
from conftest import ROOT
from matplotlib.figure import Figure

from ursa_minor.evaluation.tasks.hellaswag import TASK
from ursa_minor.recipe import keys, loading, reference_curves, sizes
from ursa_minor.reporting.curves import RowSampler, draw_curves, published_scores

TRAIN = [
    {"step": s, "tokens": 8 * s, "train/loss": 3.0, "train/lr": 0.1, "tokens_per_second": 5.0}
    for s in (1, 2)
]
LOOK = {"step": 2, "tokens": 16, "eval/loss": 2.5}
SCORED = {"step": 2, "tokens": 16, "hellaswag/items": 1000, "hellaswag/revision": TASK.revision}
SCORED |= {"hellaswag/acc": 0.27, "hellaswag/acc_stderr": 0.01, "hellaswag/acc_token_norm": 0.28}
PUBLISHED = {"hellaswag/acc": {"GPT-2": 0.2892}, "hellaswag/acc_norm": {"GPT-2": 0.3114}}


def long_run(steps: int) -> list[dict]:
    """Rows as a real run's: a loss that falls from 11 to 3, a look every 250 steps."""
    noise = np.random.default_rng(1).normal(0, 0.04, steps + 1)
    rows = []
    for step in range(1, steps + 1):
        loss = 3 + 8 * float(np.exp(-step / (0.01 * steps)))
        row = {
            "step": step,
            "tokens": 1000 * step,
            "train/loss": loss + noise[step],
            "train/grad_norm": loss / 10,
        }
        row |= {
            "train/lr": 1e-3 * (1 - step / steps),
            "tokens_per_second": 9e4 + noise[step],
            "mfu": 0.4,
        }
        rows.append(row | {"elapsed_seconds": 2.0 * step})
        if step % 250 == 0:
            rows.append({"step": step, "tokens": 1000 * step, "eval/loss": loss})
    return rows


def names(figure: Figure) -> list[str]:
    return [axes.get_ylabel() for axes in figure.axes]


def words(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_panels_without_data_are_left_out_and_the_picture_is_shorter(tmp_path, saved_figures):
    draw_curves(
        [{"step": 0, "tokens": 0}, {"step": 1, "train/loss": 2.0}], tmp_path / "curves.png", "a run"
    )
    assert not list(tmp_path.iterdir())  # nothing is drawn from nothing
    fast = {**TRAIN[0], "mfu": 0.4, "train/grad_norm": 1.0}
    for rows in ([LOOK], [LOOK, *TRAIN, SCORED, fast]):
        draw_curves(rows, tmp_path / "curves.png", "a run")
    assert names(saved_figures[0]) == ["loss (nats per token)"]
    score, *sides = names(saved_figures[1])[1:]
    assert score == "HellaSwag (% of 1,000 items)" and sides == [
        "learning rate",
        "gradient norm",
        "tokens/s",
        "MFU",
    ]
    assert (
        saved_figures[0].get_figheight() < saved_figures[1].get_figheight()
        and len({f.get_figwidth() for f in saved_figures}) == 1
    )


def test_large_losses_at_the_start_do_not_squash_the_curve_and_few_points_are_shown_whole(
    tmp_path, saved_figures
):
    draw_curves(long_run(1000), tmp_path / "curves.png", "a run")
    looks = [
        {"step": step, "tokens": step, "eval/loss": loss} for step, loss in ((0, 9.0), (1000, 4.0))
    ]
    draw_curves(looks, tmp_path / "curves.png", "a run")
    (low, high), (lowest, highest) = (figure.axes[0].get_ylim() for figure in saved_figures)
    assert 2.5 < low < 2.9 and 3.1 < high < 4 and lowest < 4 and highest > 8.9
    raw, smooth, _ = (
        saved_figures[0].axes[0].get_lines()
    )  # the training loss is smoothed above its own faint line
    assert raw.get_alpha() < 1 and f"train: {smooth.get_ydata()[-1]:.3f}" in words(
        saved_figures[0].axes[0]
    )
    assert smooth.get_ydata()[500] == pytest.approx(np.mean(raw.get_ydata()[480:520]), abs=1e-3)


def test_published_figures_have_the_rows_own_names_and_units_and_are_of_the_same_shape():
    recipe = loading.load_recipe(ROOT / "recipes/gpt2_124m.yaml")
    found = published_scores(recipe.model)
    assert {f"hellaswag/{score}" for score in TASK.scores} <= {*found}
    assert found["lambada_openai/acc"] == {"GPT-2 124M": 0.3256}
    assert found["lambada_openai/perplexity"]["GPT-2 124M"] > 1
    assert found["hellaswag/acc_norm"] == {"GPT-2 124M": 0.3114}
    assert found["hellaswag/acc_token_norm"] == {"GPT-2 124M": 0.2955, "GPT-3 124M": 0.3370}
    larger = keys.replace(recipe, n_layer=24, n_embd=1024).model
    assert published_scores(larger)["hellaswag/acc_token_norm"].keys() == {"GPT-2 355M"}
    assert {size.label for size in sizes.GPT2_SIZES} <= {*TASK.published}


def test_what_others_reached_is_a_named_line_where_the_run_has_that_metric(tmp_path, saved_figures):
    skipped = {
        "step": 3,
        "tokens": 24,
        "train/loss": None,
        "train/grad_norm": None,
        "train/lr": 0.1,
    }
    nothing = {"step": 3, "tokens": 24, "eval/loss": None, "eval/bits_per_byte": None}
    nothing |= {"baseline/bigram": None, "baseline/gzip": None}
    baseline = {"step": 2, "tokens": 16, "baseline/bigram": 2.75, "baseline/gzip": 1.5}
    rows = [*TRAIN, skipped, LOOK | {"eval/bits_per_byte": 1.25}, baseline, nothing]
    draw_curves(rows, tmp_path / "curves.png", "_a $run$ ^2", published=PUBLISHED)
    earlier = SCORED | {"step": 1, "tokens": 8, "hellaswag/acc": 0.25, "hellaswag/acc_stderr": 0.02}
    draw_curves(
        [*TRAIN, LOOK, earlier, SCORED], tmp_path / "curves.png", "a run", published=PUBLISHED
    )
    axes = saved_figures[0].axes[0]
    assert axes.get_title() == "_a $run$ ^2" and not axes.title.get_parse_math()
    assert list(axes.get_lines()[0].get_xdata()) == [8, 16]  # what is not finite is left out
    labels = ["train: 3.000", "validation: 2.500", "bigram baseline: 2.75"]
    labels += ["gzip baseline: 1.50 bits per byte"]
    assert words(axes) == labels and not any(
        "HellaSwag" in name for name in names(saved_figures[0])
    )
    flat = [line.get_ydata()[0] for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert flat == [2.75, 3.0] and axes.get_ylim()[1] > 3.0  # 2 nats a bit; all are in view
    (bits,) = axes.child_axes
    saved_figures[0].draw_without_rendering()
    assert bits.get_ylabel() == "bits per byte"
    assert bits.get_ylim() == pytest.approx([limit / 2 for limit in axes.get_ylim()])
    scores = ["acc: 27.00 ± 1.00", "GPT-2: 28.92", "acc_token_norm: 28.00", "chance: 25.00"]
    assert words(saved_figures[1].axes[1]) == scores  # acc_norm was not scored
    (band,) = (
        saved_figures[1].axes[1].collections
    )  # of one standard error; acc_token_norm has none in these rows
    corners = {tuple(point) for point in band.get_paths()[0].vertices.round(6)}
    assert {(8, 0.23), (8, 0.27), (16, 0.26), (16, 0.28)} <= corners


@pytest.mark.parametrize("revision", [None, "0" * 40])
def test_published_scores_are_of_all_items_only(tmp_path, saved_figures, revision):
    rows = [*TRAIN, SCORED, {**SCORED, "step": 3, "tokens": 24, "hellaswag/revision": revision}]
    draw_curves(rows, tmp_path / "curves.png", "a run", published=PUBLISHED)
    labels = ["acc: 27.00 ± 1.00", "acc_token_norm: 28.00", "chance: 25.00"]
    assert words(saved_figures[0].axes[1]) == labels


def test_a_published_curve_is_drawn_as_far_as_the_run_has_come_and_says_that_its_text_is_another(
    tmp_path, saved_figures
):
    llmc = reference_curves.load("recipes/references/gpt2_124m_llmc.yaml")
    rows = [
        {"step": step, "tokens": step * 2**19, "eval/loss": loss}
        for step, loss in ((125, 7.0), (400, 5.6))
    ]
    draw_curves(rows, tmp_path / "curves.png", "a run", reference=llmc)
    (line,) = (line for line in saved_figures[0].axes[0].get_lines() if line.get_linestyle() == ":")
    assert line.get_label() == "llm.c, GPT-2 124M (its own validation set, of FineWeb)"
    assert list(line.get_xdata()) == [0, 250 * 2**19] and list(line.get_ydata()) == [
        11.0092,
        6.1710,
    ]


def test_a_long_run_is_drawn_from_few_updates_at_even_steps_and_every_evaluation():
    steps = 50_000
    thinned = RowSampler()
    for step in range(1, steps + 1):
        thinned.add({"step": step, "train/loss": 3.0})
        if step % 500 == 0 and step >= steps // 2:
            thinned.add({"step": step, "eval/loss": 2.0})
    updates = [row["step"] for row in thinned.rows if "train/loss" in row]
    assert 2000 <= len(updates) <= 4000 and len({*np.diff(updates)}) == 1
    assert updates[0] == 1 and updates[-1] > steps - 100
    evaluations = [row["step"] for row in thinned.rows if "eval/loss" in row]
    assert evaluations == list(range(steps // 2, steps + 1, 500))
    assert [row["step"] for row in thinned.rows] == sorted(row["step"] for row in thinned.rows)
