"""Command line of compare_runs.py: the table, the plot and the groups of runs."""

import json
import re
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure

import compare_runs
from ursa_minor.base.run_files import Finish

SEEDS = ["--group", "seed"]
REFERENCE = "recipes/references/gpt2_124m_llmc.yaml"


def write_run(folder: Path, losses: list[float], seconds: float = 1.0, **recipe) -> Path:
    """Write a run with a validation every ten steps of 100 tokens.

    Args:
        folder: of the run. Its name is the run's name.
        losses: of the validations. The train losses are 0.5 higher.
        seconds: per step.
        recipe: keys and values of recipe.yaml.
    """
    folder.mkdir(parents=True)
    rows = []
    for number, loss in enumerate(losses, 1):
        progress = {"step": 10 * number, "tokens": 1000 * number}
        elapsed = seconds * 10 * number
        rows.append(progress | {"train/loss": loss + 0.5, "elapsed_seconds": elapsed})
        rows.append(progress | {"eval/loss": loss, "eval/bits_per_byte": loss / 3})
    for row in rows:
        append_metrics(folder, **row)
    values = {"run_name": folder.name, "n_layer": 4} | recipe
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return folder


def append_metrics(run: Path | str, **row) -> None:
    """Append a row to the metrics of a run."""
    with Path(run, "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def train_longer(run: str) -> None:
    """Append ten steps without a validation to the metrics of a run."""
    progress = {"step": 40, "tokens": 4000}
    append_metrics(run, **progress, **{"train/loss": 2.35}, elapsed_seconds=80.0)


def change_recipe(run: str, **changes) -> None:
    """Change keys of the recipe of a run."""
    path = Path(run, "recipe.yaml")
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def six_runs(in_tmp_path) -> list[str]:
    """Three seeds of each of two optimizers, whose steps take 1, 2 and 3 seconds."""
    final_losses = {"adamw": (2.0, 2.1, 2.2), "muon": (1.8, 1.85, 1.96)}
    names = []
    for optimizer, losses in final_losses.items():
        for seed, loss in enumerate(losses):
            recipe = {"optimizer": optimizer, "seed": seed, "data_seed": seed}
            run = write_run(Path(f"{optimizer}{seed}"), [4.0, 3.0, loss], 1.0 + seed, **recipe)
            names.append(run.name)
    return names


def compare(capsys, *flags: str) -> str:
    """Compare runs and return the output."""
    capsys.readouterr()
    assert compare_runs.main(list(flags)) == 0
    return capsys.readouterr().out


def read_rows(output: str) -> list[list[str]]:
    """Return the rows of a table, as lists of cells, which are separated by two spaces."""
    rows = []
    for line in output.splitlines():
        cells = re.split("  +", line.strip())
        rows.append(cells)
    return rows


def curves(figure: Figure, panel: int) -> list:
    """Return the curves of the runs in a panel."""
    return [line for line in figure.axes[panel].get_lines() if line.get_gid() == "run"]


def legend(figure: Figure) -> list[str]:
    """Return the labels of the first panel."""
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


# ---- the table


def test_table_shows_metrics_and_differing_keys(six_runs, saved_figures, capsys):
    output = compare(capsys, "adamw0", "muon1/metrics.jsonl")

    rows = read_rows(output)
    assert rows[:3] == [["adamw0", "muon1"], ["optimizer", "adamw", "muon"], ["seed", "0", "1"]]
    assert ["validation loss", "2.0000", "1.8500"] in rows
    assert ["bits per byte", "0.6667", "0.6167"] in rows
    assert ["tokens", "3,000", "3,000"] in rows
    assert ["tokens/s", "100", "50"] in rows
    assert ["minutes", "0.5", "1"] in rows
    assert rows[-1] == ["compare.png"]
    assert Path("compare.png").is_file()
    assert "--group seed" not in output


def test_unfinished_run_is_marked(in_tmp_path, saved_figures, capsys):
    write_run(Path("stopped"), [4.0, 3.0], max_steps=1000)
    write_run(Path("done"), [4.0, 3.0, 2.0], max_steps=30)
    Finish(step=30).write(write_run(Path("early"), [4.0], max_steps=1000))

    output = compare(capsys, "stopped", "done", "early")

    assert ["unfinished", "step 20 of 1,000", "-", "-"] in read_rows(output)
    assert "1 run is unfinished" in output
    assert legend(saved_figures[0])[0].endswith("stopped (unfinished)")


def test_unfinished_runs_of_a_group_are_counted(six_runs, saved_figures, capsys):
    for name in six_runs:
        change_recipe(name, max_steps=30)
    for name in ("muon0", "muon1", "muon2"):
        change_recipe(name, max_steps=100)

    output = compare(capsys, *six_runs, *SEEDS)

    assert ["unfinished", "-", "3 of 3 runs"] in read_rows(output)


def test_finished_runs_have_no_row_of_steps(six_runs, saved_figures, capsys):
    assert "unfinished" not in compare(capsys, "adamw0", "muon0")


@pytest.mark.parametrize(
    "recipe",
    [
        {"push_to_hub": True, "hub_model_id": "ME/gpt2", "license": "mit", "language": "ta"},
        {"report_to": ["wandb"], "project_name": "p", "tags": ["a"]},
        {"output_dir": "elsewhere", "prepared_data_dir": "/scratch", "reference_curve": REFERENCE},
    ],
)
def test_keys_without_effect_on_training_are_hidden(six_runs, saved_figures, capsys, recipe):
    change_recipe("adamw1", seed=0, data_seed=0, tokenizer="gpt2", **recipe)
    change_recipe("adamw0", tokenizer="gpt2")

    output = compare(capsys, "adamw0", "adamw1")

    assert not any(name in output for name in recipe)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_table_and_notes_fit_into_the_terminal(
    six_runs, saved_figures, capsys, monkeypatch, columns
):
    monkeypatch.setenv("COLUMNS", str(columns))
    train_longer("adamw0")

    output = compare(capsys, *six_runs)

    assert max(len(line) for line in output.splitlines()) <= columns
    assert all(name in output for name in six_runs)


def test_runs_that_differ_in_seeds_get_a_hint(six_runs, saved_figures, capsys):
    output = compare(capsys, "adamw1", "adamw2", "adamw0")

    assert "With --group seed, the runs that differ only in seeds" in output


def test_reference_curve_of_a_recipe_is_plotted(six_runs, saved_figures, capsys):
    change_recipe("adamw0", reference_curve=REFERENCE, tokenizer="gpt2")
    change_recipe("adamw1", tokenizer="gpt2")
    append_metrics("adamw0", step=600, tokens=524288 * 600, **{"eval/loss": 1.9})

    compare(capsys, "adamw1", "adamw0")

    expected = "llm.c, GPT-2 124M (its own validation set, of FineWeb)"
    assert legend(saved_figures[0])[-1] == expected


def test_final_nan_loss_is_shown(six_runs, saved_figures, capsys):
    append_metrics("muon0", step=40, tokens=4000, **{"eval/loss": None})

    output = compare(capsys, "adamw0", "muon0")

    assert ["validation loss", "2.0000", "nan"] in read_rows(output)


def test_task_score_is_a_row(in_tmp_path, saved_figures, capsys):
    write_run(Path("long"), [3.0, 2.5])
    scores = {"hellaswag/acc": 0.27, "hellaswag/acc_norm": 0.3}
    append_metrics("long", step=30, tokens=3000, **scores)

    output = compare(capsys, "long")

    assert re.search("HellaSwag acc_norm +0.3000", output)
    assert len(saved_figures[0].axes) == 3


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("eval_tokens", (1000, 2000)),
        ("validation_tokens", (1000, 2000)),
        ("validation_fraction", (0.1, 0.2)),
        ("validation_files", (["a"], ["b"])),
    ],
)
def test_different_validation_text_is_reported(in_tmp_path, saved_figures, capsys, key, values):
    first_value, second_value = values
    write_run(Path("a"), [3.0, 2.4], **{key: first_value})
    write_run(Path("b"), [3.0, 2.4], **{key: second_value})
    write_run(Path("c"), [3.0, 2.3], **{key: first_value})

    different = compare(capsys, "a", "b")
    equal = compare(capsys, "a", "c")

    assert f"{key} differs (a: {first_value}, b: {second_value})" in different
    assert "differs" not in equal


# ---- --group: means of several runs


def test_seeds_are_grouped_into_mean_and_deviation(six_runs, saved_figures, capsys):
    rows = read_rows(compare(capsys, *six_runs, *SEEDS))

    assert rows[0] == ["adamw0 x3", "muon0 x3"]
    assert ["optimizer", "adamw", "muon"] in rows
    assert not {"seed", "data_seed"} & {row[0] for row in rows}
    loss_row = ["validation loss", "2.1000 ± 0.1000", "1.8700 ± 0.0819"]
    assert loss_row in rows
    name, difference = rows[rows.index(loss_row) + 1][-2:]
    assert name == "difference"
    assert difference.endswith(" *")
    mean, interval = map(float, difference.removesuffix(" *").split(" ± "))
    assert mean == -0.23
    # The variances are 0.01 and 0.0067. The standard error is sqrt((0.01 + 0.0067) / 3) = 0.0746,
    # and for 3.849 degrees of freedom t is 2.821.
    assert interval == pytest.approx(0.2105, abs=2e-4)
    assert rows[-3][0].startswith("± is the standard deviation, and for a difference")


def test_mean_curve_has_a_band(six_runs, saved_figures, capsys):
    compare(capsys, *six_runs, *SEEDS)

    figure = saved_figures[0]
    bands = [band for band in figure.axes[0].collections if len(band.get_paths())]
    assert len(bands) == 2
    _, muon_by_tokens = curves(figure, 0)
    assert list(muon_by_tokens.get_ydata()) == pytest.approx([4.0, 3.0, 1.87])
    _, muon_by_minutes = curves(figure, 1)
    mean_minutes = [1 / 3, 2 / 3, 1]  # 10, 20 and 30 steps of 2 seconds
    assert list(muon_by_minutes.get_xdata()) == pytest.approx(mean_minutes)
    (title,) = figure.texts
    assert title.get_text() == "mean of 3 runs, band: one standard deviation"


def test_t_quantile_equals_published_table():
    quantiles = [compare_runs.t_quantile(freedom) for freedom in (1, 2, 4, 30, 1000)]

    assert quantiles == pytest.approx([12.706, 4.303, 2.776, 2.042, 1.962], abs=2e-3)


def test_unequal_progress_in_a_group_is_reported(six_runs, saved_figures, capsys):
    equal = compare(capsys, *six_runs, *SEEDS)
    train_longer("muon1")
    unequal = compare(capsys, *six_runs, *SEEDS)

    assert "different numbers of tokens" not in equal
    assert " *\n" in equal
    assert "different numbers of tokens" in unequal
    # The losses are the same, but a significant difference is no longer marked.
    assert " *\n" not in unequal


@pytest.mark.parametrize(
    ("stopped_early", "reached_max_steps"),
    [(["muon0", "muon1", "muon2"], []), (["muon0", "muon2"], ["muon1"])],
    ids=["all", "all_but_one"],
)
def test_early_stopped_runs_count_as_finished(
    six_runs, saved_figures, capsys, stopped_early, reached_max_steps
):
    train_longer("muon1")
    for run in stopped_early:
        Finish(step=40, since_best=2).write(Path(run))
    for run in reached_max_steps:
        Finish(step=40, since_best=0).write(Path(run))

    output = compare(capsys, *six_runs, *SEEDS)

    assert "different numbers of tokens" not in output
    assert " *\n" in output
    assert f"Early stopping ended {len(stopped_early)} runs" in output


def test_unfinished_run_is_reported_among_early_stopped_runs(six_runs, saved_figures, capsys):
    train_longer("muon1")
    for run in ("muon0", "muon2"):
        Finish(step=40, since_best=2).write(Path(run))

    output = compare(capsys, *six_runs, *SEEDS)

    assert "different numbers of tokens" in output
    assert " *\n" not in output
    assert "Early stopping ended 2 runs" in output


def test_absolute_path_of_same_file_is_grouped(six_runs, saved_figures, capsys):
    Path("text.txt").touch()
    absolute = str(Path("text.txt").absolute())
    change_recipe("adamw0", data_files=["text.txt"], prepared_data_dir="data")
    change_recipe("adamw1", data_files=[absolute], prepared_data_dir="data")

    output = compare(capsys, "adamw0", "adamw1", *SEEDS)

    assert "adamw0 x2" in output


def test_explicit_default_is_grouped_with_omitted_key(six_runs, saved_figures, capsys):
    change_recipe("adamw1", eval_tokens=0)
    change_recipe("adamw2", eval_tokens=0)

    output = compare(capsys, *six_runs, *SEEDS)

    assert "adamw0 x3" in output


INVALID_RECIPES = {
    "empty": ("", "recipe.yaml: the recipe is empty"),
    "damaged": ("n_layer: [", "recipe.yaml: not a valid recipe: line 1"),
    "list": ("- n_layer\n", "recipe.yaml: a recipe is a mapping"),
    "other keys": ("steps: 3\n", "recipe.yaml has no key of a recipe"),
    "incomplete": ("optimizer: adamw\nseed: 7\n", "recipe.yaml lacks n_layer"),
}
GROUPED_RUNS = ["adamw0", "adamw1", "muon0", "muon1", "muon2"]


def group_error(capsys) -> str:
    """Return the error message of a comparison that cannot be grouped."""
    assert compare_runs.main([*GROUPED_RUNS, *SEEDS]) == 2
    assert not Path("compare.png").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize("case", INVALID_RECIPES)
@pytest.mark.parametrize("runs", [["adamw0"], GROUPED_RUNS[:4]], ids=["one", "four"])
def test_group_rejects_invalid_recipe(six_runs, capsys, case, runs):
    text, message = INVALID_RECIPES[case]
    for run in runs:
        Path(run, "recipe.yaml").write_text(text)

    assert f"{runs[0]}/{message}" in group_error(capsys)


@pytest.mark.parametrize("runs", [["adamw0"], GROUPED_RUNS[:4]], ids=["one", "four"])
def test_group_rejects_missing_recipe(six_runs, capsys, runs):
    for run in runs:
        Path(run, "recipe.yaml").unlink()

    assert f"{runs[0]}/recipe.yaml does not exist" in group_error(capsys)


def test_runs_without_recipes_get_no_group_hint(six_runs, saved_figures, capsys):
    for run in six_runs:
        Path(run, "recipe.yaml").unlink()

    output = compare(capsys, "adamw0", "adamw1")

    assert "settings of these runs are unknown" in output
    assert "--group" not in output


# ---- the plot


def test_legend_shows_final_loss_of_each_run(in_tmp_path, saved_figures, monkeypatch, capsys):
    labels = ["$a", "_b", "c", "d", "e", "f", "g", "h"]
    runs = []
    for number in range(8):
        losses = [3.0, 2.5, 2.0 + number / 1000]
        run = write_run(Path(f"r{number}"), losses, n_head=number)
        runs.append(run.name)
    monkeypatch.setattr(compare_runs, "SHORT_HOURS", 0.0)  # the unit of long runs

    compare(capsys, *runs, "--labels", *labels)

    figure = saved_figures[0]
    x_labels = [axes.get_xlabel() for axes in figure.axes]
    assert x_labels == ["tokens", "hours of training", "tokens"]
    styles = {(curve.get_color(), curve.get_linestyle()) for curve in curves(figure, 0)}
    assert len(styles) == 8
    expected = [f"{2 + number / 1000:.3f} {label}" for number, label in enumerate(labels)]
    assert legend(figure) == expected
    assert not any(text.get_parse_math() for text in figure.axes[0].get_legend().get_texts())


def test_long_train_loss_is_plotted_as_means(in_tmp_path, saved_figures, capsys):
    write_run(Path("long"), [3.0 + 0.1 * (number % 2) for number in range(900)])

    compare(capsys, "long", "--out", "r.png")

    (train_loss,) = curves(saved_figures[0], 2)
    assert len(train_loss.get_xdata()) == 300


def write_runs_of_two_texts() -> None:
    """Write runs a and c of one text and b of another. Each has a tokenizer of its text."""
    for number, (name, text) in enumerate((("a", "x"), ("b", "y"), ("c", "x"))):
        write_run(Path(name), [3.0, 2.4], tokenizer="bpe", n_head=number, data_files=[text])


def test_different_tokenizers_are_compared_per_byte(in_tmp_path, saved_figures, capsys):
    write_runs_of_two_texts()

    output = compare(capsys, "a", "b")

    figure = saved_figures[0]
    assert "The tokenizers differ" in output
    assert "bits per byte" in figure.axes[0].get_ylabel()
    assert "bits per byte" in figure.axes[-1].get_ylabel()
    assert curves(figure, 0)[0].get_ydata()[-1] == pytest.approx(0.8)


def test_equal_tokenizers_are_compared_per_token(in_tmp_path, saved_figures, capsys):
    write_runs_of_two_texts()

    output = compare(capsys, "a", "c")

    figure = saved_figures[0]
    assert "The tokenizers differ" not in output
    assert "nats per token" in figure.axes[0].get_ylabel()
    assert "nats per token" in figure.axes[-1].get_ylabel()


# ---- bad input


@pytest.mark.parametrize("tokenizer", ["characters", "bpe", "EleutherAI/pythia-70m"])
def test_reference_curve_of_another_tokenizer_is_rejected(six_runs, capsys, tokenizer):
    change_recipe("muon0", tokenizer=tokenizer)

    status = compare_runs.main(["adamw0", "muon0", "--reference_curve", REFERENCE])

    message = capsys.readouterr().err
    assert status == 2
    assert "muon0: reference_curve = " in message
    assert f"tokenizer = {tokenizer}" in message
    assert "--reference_curve none" in message
    assert not list(Path().glob("*.png"))


def test_reference_curve_needs_validation_loss(in_tmp_path, capsys):
    folder = write_run(Path("a"), [])
    append_metrics(folder, step=10, tokens=1000, **{"train/loss": 3.0}, elapsed_seconds=1.0)

    status = compare_runs.main(["a", "--reference_curve", REFERENCE])

    assert status == 2
    assert "no validation loss" in capsys.readouterr().err


def test_unfit_reference_curve_of_a_recipe_is_left_out(six_runs, saved_figures, capsys):
    change_recipe("adamw0", reference_curve=REFERENCE, tokenizer="characters")

    compare(capsys, "adamw0", "adamw1")

    assert not any("llm.c" in label for label in legend(saved_figures[0]))


def test_reference_curve_can_be_switched_off(six_runs, saved_figures, capsys):
    change_recipe("adamw0", reference_curve=REFERENCE, tokenizer="gpt2")
    append_metrics("adamw0", step=600, tokens=524288 * 600, **{"eval/loss": 1.9})

    compare(capsys, "adamw0", "--reference_curve", "none")

    assert not any("llm.c" in label for label in legend(saved_figures[0]))


def test_short_run_gets_no_label_of_a_reference(six_runs, saved_figures, capsys):
    change_recipe("adamw0", tokenizer="gpt2")

    compare(capsys, "adamw0", "--reference_curve", REFERENCE)

    assert not any("llm.c" in label for label in legend(saved_figures[0]))


@pytest.mark.parametrize(
    ("flags", "phrase"),
    [
        ("none", "none: no such file"),
        ("muons0", "did you mean muon0?"),
        ("one", "did you mean runs/one?"),
        ("./adamw0", "a run is given twice"),
        ("muon0 --labels a a", "--labels a a: 2 different labels are needed"),
        ("--out runs.pdf", "--out runs.pdf: must be a .png file"),
        ("--group sed", "did you mean seed?"),
        ("--grop seed", "did you mean --group?"),
        ("--reference_curve none.yaml", "reference_curve = none.yaml: cannot be read"),
        ("--reference none.yaml", "did you mean --reference_curve?"),
    ],
)
def test_bad_flags_are_rejected(six_runs, capsys, flags, phrase):
    Path("runs/one").mkdir(parents=True)

    assert compare_runs.main(["adamw0", *flags.split()]) == 2

    assert phrase in capsys.readouterr().err
    assert not list(Path().glob("*.p*"))


def test_run_without_loss_is_rejected(in_tmp_path, capsys):
    Path("empty.jsonl").write_text('{"step": 1}\n')

    assert compare_runs.main(["empty.jsonl"]) == 2

    assert "empty.jsonl: no row with a loss yet" in capsys.readouterr().err
    assert not list(Path().glob("*.p*"))
