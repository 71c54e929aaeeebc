"""compare_runs.py as a user calls it: the table is that of metrics.jsonl, the picture that of the runs."""

import json
import re
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure

import compare_runs
from ursa_minor.base.run_files import Finish

WORDS = ["$a", "_b", "c", "d", "e", "f", "g", "h"]


def write_run(folder: Path, losses: list[float], seconds: float = 1.0, **recipe) -> Path:
    """Write a run with a validation every ten updates of 100 tokens."""
    folder.mkdir(parents=True)
    rows = []
    for number, loss in enumerate(losses, 1):
        row = {"step": 10 * number, "tokens": 1000 * number}
        rows.append(row | {"train/loss": loss + 0.5, "elapsed_seconds": seconds * 10 * number})
        rows.append(row | {"eval/loss": loss, "eval/bits_per_byte": loss / 3})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"run_name": folder.name, "n_layer": 4} | recipe
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return folder


@pytest.fixture
def six(tmp_path, monkeypatch) -> list[str]:
    """Three seeds of two optimizers."""
    last = {"adamw": (2.0, 2.1, 2.2), "muon": (1.8, 1.85, 1.96)}
    for optimizer, losses in last.items():
        for seed, loss in enumerate(losses):
            written = {"optimizer": optimizer, "seed": seed, "data_seed": seed}
            write_run(tmp_path / f"{optimizer}{seed}", [4.0, 3.0, loss], 1.0 + seed, **written)
    monkeypatch.chdir(tmp_path)
    return [f"{optimizer}{seed}" for optimizer in last for seed in range(3)]


def lines_of(figure: Figure, panel: int) -> list:
    return [line for line in figure.axes[panel].get_lines() if line.get_gid() == "run"]


def test_two_runs_differ_in_the_keys_that_the_table_shows(six, saved_figures, capsys):
    assert compare_runs.main(["adamw0", "muon1/metrics.jsonl"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [["adamw0", "muon1"], ["optimizer", "adamw", "muon"], ["seed", "0", "1"]]
    assert ["validation", "loss", "2.0000", "1.8500"] in lines and [
        "bits",
        "per",
        "byte",
        "0.6667",
        "0.6167",
    ] in lines
    assert ["tokens", "3,000", "3,000"] in lines and ["tokens/s", "100", "50"] in lines
    assert ["minutes", "0.5", "1"] in lines and lines[-1] == ["compare.png"]
    assert Path("compare.png").is_file()
    assert not any("--group seed" in " ".join(line) for line in lines)
    recipe = Path("adamw0/recipe.yaml")
    recipe.write_text(
        recipe.read_text() + "reference_curve: recipes/references/gpt2_124m_llmc.yaml\n"
    )
    compare_runs.main(["adamw1", "adamw2", "adamw0"])
    assert "With --group seed, the runs that differ only in seeds" in capsys.readouterr().out
    labels = [text.get_text() for text in saved_figures[-1].axes[0].get_legend().get_texts()]
    assert labels[-1:] == ["llm.c, GPT-2 124M (its own validation set, of FineWeb)"]


def test_absolute_path_of_the_same_file_is_no_difference(six, saved_figures, capsys):
    Path("text.txt").touch()
    places = {"data_files": ["text.txt"], "prepared_data_dir": "data"}
    for run, changes in zip(
        six[:2], (places, places | {"data_files": [str(Path("text.txt").absolute())]}), strict=True
    ):
        file = Path(run, "recipe.yaml")
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changes))
    compare_runs.main([*six[:2], "--group", "seed"])
    assert "adamw0 x2" in capsys.readouterr().out


def test_seeds_become_a_mean_a_deviation_and_a_difference_with_its_interval(
    six, saved_figures, capsys
):
    assert compare_runs.main([*six, "--group", "seed"]) == 0
    lines = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["", "adamw0 x3", "muon0 x3"] and ["optimizer", "adamw", "muon"] in lines
    assert not {"seed", "data_seed"} & {line[0] for line in lines}
    # By hand: variances 0.01 and 0.0067, so 0.0746 = sqrt((0.01 + 0.0067) / 3) with 3.849 degrees, t = 2.821
    at = lines.index(["validation loss", "2.1000 ± 0.1000", "1.8700 ± 0.0819"])
    *_, name, apart = [word for word in lines[at + 1] if word]
    gap, half = map(float, apart.removesuffix(" *").split(" ± "))
    assert apart.endswith(" *") and lines[-3][0].startswith(
        "± is the standard deviation, and for a difference its 95% interval"
    )
    assert name == "difference" and gap == -0.23 and half == pytest.approx(0.2105, abs=2e-4)
    band = [
        collection
        for collection in saved_figures[0].axes[0].collections
        if len(collection.get_paths())
    ]
    assert len(lines_of(saved_figures[0], 0)) == 2 and len(band) == 2
    assert list(lines_of(saved_figures[0], 0)[1].get_ydata()) == pytest.approx([4.0, 3.0, 1.87])
    assert list(lines_of(saved_figures[0], 1)[1].get_xdata()) == pytest.approx(
        [1 / 3, 2 / 3, 1]
    )  # minutes, mean of 1, 2, 3
    assert saved_figures[0].axes[0].get_title() == "mean of 3 runs, band: one standard deviation"
    found = [compare_runs.t_quantile(freedom) for freedom in (1, 2, 4, 30, 1000)]
    assert found == pytest.approx([12.706, 4.303, 2.776, 2.042, 1.962], abs=2e-3)


def test_runs_of_one_column_that_have_not_come_equally_far_are_said(six, saved_figures, capsys):
    for whole in (True, False):
        compare_runs.main([*six, "--group", "seed"])
        out = capsys.readouterr().out
        assert ("different numbers of tokens" in out) != whole and (" *\n" in out) == whole
        with Path("muon1/metrics.jsonl").open(
            "a"
        ) as file:  # its losses stay, and so does the star that they would get
            file.write(
                json.dumps(
                    {"step": 40, "tokens": 4000, "train/loss": 2.35, "elapsed_seconds": 80.0}
                )
                + "\n"
            )


@pytest.mark.parametrize(
    "ended, even",
    [(("early", "early"), True), (("early", "max_steps"), True), (("early", None), False)],
)
def test_runs_that_early_stopping_ended_are_finished(six, saved_figures, capsys, ended, even):
    with Path("muon1/metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 40, "tokens": 4000, "train/loss": 2.35, "elapsed_seconds": 80.0})
            + "\n"
        )
    for seed, kind in zip((0, 2, 1), ("early", *ended), strict=True):
        if kind:
            Finish(step=40, since_best=2 if kind == "early" else 0).write(Path(f"muon{seed}"))
    assert compare_runs.main([*six, "--group", "seed"]) == 0
    out = capsys.readouterr().out
    assert ("different numbers of tokens" not in out) == even == (" *\n" in out)
    assert f"Early stopping ended {2 if ended[1] != 'early' else 3} runs" in out


def test_a_loss_that_was_not_finite_at_the_end_is_shown(six, capsys):
    with Path("muon0/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 40, "tokens": 4000, "eval/loss": None}) + "\n")
    assert compare_runs.main(["adamw0", "muon0"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["validation", "loss", "2.0000", "nan"] in lines


def test_the_picture_names_each_line_with_what_it_reached(tmp_path, saved_figures, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_runs, "SHORT_HOURS", 0.0)  # as if the runs were long
    for number in range(8):
        write_run(tmp_path / f"r{number}", [3.0, 2.5, 2.0 + number / 1000], n_head=number)
    assert compare_runs.main([*(f"r{number}" for number in range(8)), "--labels", *WORDS]) == 0
    figure = saved_figures[0]
    assert [axes.get_xlabel() for axes in figure.axes] == ["tokens", "hours of training", "tokens"]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines_of(figure, 0)}) == 8
    named = figure.axes[0].get_legend().get_texts()
    shown = [f"{2 + number / 1000:.3f} {word}" for number, word in enumerate(WORDS)]
    assert [text.get_text() for text in named] == shown
    assert not any(text.get_parse_math() for text in named)


def test_a_long_train_loss_is_drawn_as_means_and_a_task_is_a_line_of_the_table(
    tmp_path, saved_figures, capsys
):
    write_run(tmp_path / "long", [3.0 + 0.1 * (number % 2) for number in range(900)])
    with (tmp_path / "long" / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 9000, "tokens": 900000, "hellaswag/acc": 0.27, "hellaswag/acc_norm": 0.3}\n'
        )
    assert compare_runs.main([str(tmp_path / "long"), "--out", str(tmp_path / "r.png")]) == 0
    assert (
        len(saved_figures[0].axes) == 3 and len(lines_of(saved_figures[0], 2)[0].get_xdata()) == 300
    )
    assert re.search("HellaSwag acc_norm +0.3000", capsys.readouterr().out)


def test_runs_of_different_tokenizers_are_drawn_in_bits_per_byte(
    tmp_path, saved_figures, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name, recipe in {
        "a": {"data_files": ["x"]},
        "b": {"data_files": ["y"]},
        "c": {"data_files": ["x"]},
    }.items():
        write_run(tmp_path / name, [3.0, 2.4], tokenizer="bpe", n_head=ord(name), **recipe)
    for runs, unit in ((["a", "b"], "bits per byte"), (["a", "c"], "nats per token")):
        assert compare_runs.main(runs) == 0
        assert (
            unit in saved_figures[-1].axes[0].get_ylabel()
            and unit in saved_figures[-1].axes[-1].get_ylabel()
        )
        assert ("The tokenizers differ" in capsys.readouterr().out) == (unit == "bits per byte")
    assert lines_of(saved_figures[0], 0)[0].get_ydata()[-1] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("eval_tokens", (1000, 2000)),
        ("validation_tokens", (1000, 2000)),
        ("validation_fraction", (0.1, 0.2)),
        ("validation_files", (["a"], ["b"])),
    ],
)
def test_different_validation_text_is_reported(
    tmp_path, saved_figures, monkeypatch, capsys, key, values
):
    monkeypatch.chdir(tmp_path)
    for name, value in zip("ab", values, strict=True):
        write_run(tmp_path / name, [3.0, 2.4], **{key: value})
    write_run(tmp_path / "c", [3.0, 2.3], **{key: values[0]})
    assert compare_runs.main(["a", "b"]) == 0
    line = f"{key} differs (a: {values[0]}, b: {values[1]}), so the validation losses are of different text"
    assert line in capsys.readouterr().out
    assert compare_runs.main(["a", "c"]) == 0
    assert "differs" not in capsys.readouterr().out


REPLACED = {
    "missing": (None, "recipe.yaml does not exist, so it is not known how that run differs"),
    "empty": ("", "recipe.yaml: the recipe is empty"),
    "damaged": ("n_layer: [", "recipe.yaml: not a valid recipe: line 1"),
    "list": ("- n_layer\n", "recipe.yaml: a recipe is a mapping"),
    "other keys": ("steps: 3\n", "recipe.yaml has no key of a recipe"),
    "incomplete": (
        "optimizer: adamw\nseed: 7\n",
        "recipe.yaml lacks n_layer, which another recipe states",
    ),
}


@pytest.mark.parametrize("case", REPLACED)
@pytest.mark.parametrize("runs", [["adamw0"], ["adamw0", "adamw1", "muon0", "muon1"]])
def test_group_needs_the_recipe_of_each_run(six, capsys, case, runs):
    text, message = REPLACED[case]
    for run in runs:
        recipe = Path(run, "recipe.yaml")
        recipe.unlink() if text is None else recipe.write_text(text)
    if case == "incomplete" and len(runs) > 1:
        runs = [*runs, "muon2"]
    assert (
        compare_runs.main(["adamw0", "adamw1", "muon0", "muon1", "muon2", "--group", "seed"]) == 2
    )
    assert f"{runs[0]}/{message}" in capsys.readouterr().err
    assert not Path("compare.png").exists()


def test_runs_without_recipes_get_no_hint_to_group_them(six, saved_figures, capsys):
    for run in six:
        Path(run, "recipe.yaml").unlink()
    assert compare_runs.main(six[:2]) == 0
    out = capsys.readouterr().out
    assert "--group" not in out and "settings of these runs are unknown" in out


def test_key_that_a_recipe_leaves_out_has_its_default(six, saved_figures, capsys):
    for run in ("adamw1", "adamw2"):
        with Path(run, "recipe.yaml").open("a") as file:
            file.write("eval_tokens: 0\n")
    assert compare_runs.main([*six, "--group", "seed"]) == 0
    assert "adamw0 x3" in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused_and_nothing_written(six, capsys):
    Path("runs/one").mkdir(parents=True)
    Path("empty.jsonl").write_text('{"step": 1}\n')
    for flags, message in {
        "none": "none: no such file. Use the folder of a run, or its metrics.jsonl",
        "muons0": "or its metrics.jsonl; did you mean muon0?",
        "one": "did you mean runs/one?",
        "./adamw0": "a run is given twice",
        "muon0 --labels a a": "--labels a a: 2 different labels are needed",
        "--out runs.pdf": "--out runs.pdf: must be a .png file in a folder that exists",
        "--group sed": "--group sed: 'sed' is not a recipe key; did you mean seed?",
        "--grop seed": "--grop: no such flag; did you mean --group?",
        "--reference none.yaml": "reference_curve = none.yaml: cannot be read",
    }.items():
        assert (
            compare_runs.main(["adamw0", *flags.split()]) == 2
            and message in capsys.readouterr().err
        )
    assert compare_runs.main(["empty.jsonl"]) == 2
    assert "empty.jsonl: no row with a loss yet" in capsys.readouterr().err
    assert not list(Path().glob("*.p*"))
