"""Paths that users write: expanded, found from any folder, absolute in a run's recipe.yaml, short where others read."""

import argparse
import os
from pathlib import Path

import pytest
import yaml
from conftest import RECIPE, ROOT

import check_setup
import compare_runs
import eval_tasks
import export_model
import generate
from ursa_minor.base import paths, run_files
from ursa_minor.base.errors import BadInput
from ursa_minor.hub import model_card
from ursa_minor.machine import run_info
from ursa_minor.recipe import command_line, keys, loading, places

BASE = yaml.safe_load(RECIPE) | {"data_files": ["a.txt"], "vocab_size": 512}
LISTS = ("data_files", "validation_files", "task_files")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in, a home and a variable."""
    home = tmp_path / "home"
    home.mkdir()
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PLACE", str(tmp_path / "place"))
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("UNSET", raising=False)
    return work


def write(path: Path, **changes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {name: value for name, value in (BASE | changes).items() if value is not None}
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def load(folder: Path, flags: dict | None = None, **changes) -> keys.Recipe:
    return loading.load_recipe(write(folder / "mine.yaml", **changes), flags)


# Expansion.


ENVIRONMENT = {
    "A": "/a",
    "TILDE": "~/b",
    "DOLLAR": "x$A",
    "SPACE": "two words",
    "BASE_URL": "https://h/d",
}


@pytest.mark.parametrize(
    ("path", "expanded"),
    [
        ("~", "HOME"),
        ("~/y", "HOME/y"),
        ("~/*.txt", "HOME/*.txt"),
        ("$A/b", "/a/b"),
        ("${A}b", "/ab"),
        ("$A$A", "/a/a"),
        ("$TILDE/c", "HOME/b/c"),
        ("$DOLLAR", "x$A"),
        ("$SPACE/ü ä/100%", "two words/ü ä/100%"),
        ("$BASE_URL/a.txt", "https://h/d/a.txt"),
        ("a$$A", "a$A"),
        ("cost$/5$.txt", "cost$/5$.txt"),
        ("a~b/~", "a~b/~"),
        ("./~x", "./~x"),
        ("-", "-"),
        ("owner/name", "owner/name"),
        ("https://h/$A/~", "https://h/$A/~"),
        ("hf://datasets/o/$A", "hf://datasets/o/$A"),
        ("hub://o/n@$A", "hub://o/n@$A"),
        ("s3://$A/~", "s3://$A/~"),
        ("file:///$A", "file:///$A"),
    ],
)
def test_variables_and_home_are_expanded_once(path, expanded):
    wanted = (
        f"{os.environ['HOME']}{expanded.removeprefix('HOME')}"
        if expanded.startswith("HOME")
        else expanded
    )
    result = paths.expand(path, ENVIRONMENT)
    assert result == wanted
    assert paths.expand(paths.literal(result)).removeprefix("./") == wanted.removeprefix("./")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("$UNSET/x", "the environment variable UNSET is not set"),
        ("${UNSET}", "the environment variable UNSET is not set"),
        ("$EMPTY/x", "the environment variable EMPTY is empty"),
        ("${PLACE:-/x}", "is not a variable; write $NAME, ${NAME}"),
        ("${PLACE", "is not a variable"),
        ("${}", "is not a variable"),
        ("~nobody-of-this-name/x", "the home folder of ~nobody-of-this-name is not known"),
    ],
)
def test_path_that_cannot_be_expanded_is_refused(path, words, here):
    for value, message in (
        (path, f"--output_dir {path}: "),
        (None, f"mine.yaml: output_dir = {path}: "),
    ):
        flags = {"output_dir": value} if value else {}
        stated = {} if value else {"output_dir": path}
        with pytest.raises(BadInput) as raised:
            load(here, flags, **stated)
        assert message in str(raised.value)
        assert words in str(raised.value)
    load(here, {"output_dir": "x"}, output_dir=path)  # the file's value is not used


PATH_KEYS = [name for name, field in keys.FIELDS.items() if field.metadata["path"]]


def test_all_keys_of_files_and_folders_are_marked_as_paths():
    wanted = {
        "data_dir",
        "data_files",
        "validation_files",
        "prepared_data_dir",
        "tokenizer",
        "init_from",
    }
    wanted |= {"task_files", "output_dir", "resume_from_checkpoint", "reference_curve"}
    assert set(PATH_KEYS) == wanted


@pytest.mark.parametrize("name", PATH_KEYS)
@pytest.mark.parametrize("is_flag", [True, False])
def test_every_path_key_is_expanded(name, is_flag, here, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    (place / "x").write_bytes((ROOT / "recipes/references/gpt2_124m_llmc.yaml").read_bytes())
    prefix = "piqa=" if name == "task_files" else ""
    value = [f"{prefix}$PLACE/x"] if name in LISTS else f"{prefix}$PLACE/x"
    stated = {"tasks": ["piqa"], "task_steps": 5}
    if name == "data_dir":
        stated["data_files"] = None
    recipe = (
        load(here, {name: value}, **stated) if is_flag else load(here, **stated | {name: value})
    )
    wanted = f"{prefix}{place}/x"
    assert keys.to_dict(recipe)[name] == ([wanted] if name in LISTS else wanted)


def test_paths_of_a_mixture_are_expanded(here, tmp_path):
    sources = [{"weight": 1, "data_files": ["~/a.txt"]}, {"weight": 1, "data_dir": "$PLACE"}]
    data = load(here, data_files=None, tokenizer="owner/name", sources=sources).data
    assert [source.data_files for source in data.resolved_sources] == [
        [f"{tmp_path}/home/a.txt"],
        None,
    ]
    assert data.resolved_sources[1].data_dir == str(tmp_path / "place")


def test_process_that_prepares_data_gets_the_flags_as_typed(here):
    write(here / "mine.yaml")
    argv = ["--recipe", "mine.yaml", "--data_files", "$PLACE/a$$b.txt", "c.txt", "--output_dir=~/y"]
    recipe, _, reader_argv = command_line.parse_training(argv)
    again, _, _ = command_line.parse_training(reader_argv)
    assert again == recipe
    assert recipe.data.data_files == [f"{os.environ['PLACE']}/a$b.txt", "c.txt"]


@pytest.mark.parametrize("name", ["output_dir", "prepared_data_dir"])
def test_url_is_refused_where_a_folder_is_written(name, here):
    with pytest.raises(BadInput, match=f"--{name} s3://bucket/x: must be a folder on this machine"):
        load(here, {name: "s3://bucket/x"})


@pytest.mark.parametrize(
    ("parse", "words", "name"),
    [
        (generate.parse, ["--model", "PATH"], "model"),
        (export_model.parse, ["PATH", "--out", "x"], "model"),
        (export_model.parse, ["m", "--out", "PATH"], "out"),
        (export_model.parse, ["m", "--out", "x", "--text", "PATH"], "text"),
        (eval_tasks.parse, ["--tasks", "piqa", "--model", "PATH"], "model"),
        (eval_tasks.parse, ["--tasks", "piqa", "--model", "m", "--output", "PATH"], "output"),
        (
            eval_tasks.parse,
            ["--tasks", "piqa", "--model", "m", "--data_files", "PATH"],
            "data_files",
        ),
        (
            eval_tasks.parse,
            ["--tasks", "piqa", "--model", "m", "--task_files", "piqa=PATH"],
            "task_files",
        ),
        (compare_runs.parse, ["PATH"], "runs"),
        (compare_runs.parse, ["r", "--out", "PATH"], "out"),
        (compare_runs.parse, ["r", "--reference", "PATH"], "reference"),
        (check_setup.parse, ["--recipe", "PATH"], "recipe"),
    ],
)
def test_path_options_of_the_scripts_are_expanded(parse, words, name, tmp_path):
    args = parse([word.replace("PATH", "~/x.png") for word in words])
    assert f"{tmp_path}/home/x.png" in str(vars(args)[name])
    with pytest.raises(BadInput, match=r"\$UNSET/x: the environment variable UNSET is not set"):
        parse([word.replace("PATH", "$UNSET/x") for word in words])


def test_argparse_names_the_option_of_a_benchmark(capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=paths.path_argument)
    assert parser.parse_args(["--json", "~/x"]).json == Path(os.environ["HOME"], "x")
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", "$UNSET"])
    assert (
        "argument --json: $UNSET: the environment variable UNSET is not set"
        in capsys.readouterr().err
    )


def test_push_pending_expands_its_folder(tmp_path):
    _, modes, _ = command_line.parse_training(["--push_pending", "~/run"])
    assert modes["push_pending"] == str(tmp_path / "home/run")


# Recipes from another folder.


def test_recipes_are_found_from_any_folder(here):
    assert command_line.parse_training([])[0].saving.name == "gpt2_124m"
    recipe = command_line.parse_training(["--recipe", "recipes/quickstart.yaml"])[0]
    assert recipe.saving.name == "quickstart"
    assert check_setup.load("recipes/gpt2_small.yaml").saving.name == "gpt2_small"
    write(here / "recipes/quickstart.yaml", run_name="of-this-folder")
    recipe = command_line.parse_training(["--recipe", "recipes/quickstart.yaml"])[0]
    assert recipe.saving.name == "of-this-folder"
    with pytest.raises(BadInput, match="^recipes/none.yaml: no such recipe"):
        command_line.parse_training(["--recipe", "recipes/none.yaml"])


# A run's recipe.yaml.


def test_run_recipe_means_the_same_from_another_folder(here, tmp_path, monkeypatch):
    work = here / "a[b] $PLACE"
    work.mkdir()
    monkeypatch.chdir(work)
    for name in ("text.txt", "held.txt", "odd[1].txt", "~tilde.txt"):
        Path(name).touch()
    Path("tok").mkdir()
    stated = {
        "data_files": ["*.txt", "odd[1].txt", "./~tilde.txt", "https://h/a.txt"],
        "validation_files": ["./held.txt"],
        "tasks": ["piqa"],
        "task_files": ["piqa=items.jsonl"],
        "tokenizer": "tok",
        "reference_curve": "recipes/references/gpt2_124m_llmc.yaml",
        "resume_from_checkpoint": "auto",
    }
    recipe = load(work, run_name="r", **stated)
    run = work / "runs/r/recipe.yaml"
    run.parent.mkdir(parents=True)
    run.write_text(keys.as_yaml(recipe), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = keys.to_dict(loading.load_recipe(run))
    assert found["data_files"][1:] == [
        f"{work}/odd[1].txt",
        f"{work}/~tilde.txt",
        "https://h/a.txt",
    ]
    assert found["data_files"][0] == f"{here}/a[[]b] $PLACE/*.txt"
    assert found["validation_files"] == [f"{work}/held.txt"]
    assert found["task_files"] == [f"piqa={work}/items.jsonl"]
    assert found["tokenizer"] == f"{work}/tok"
    assert found["prepared_data_dir"] == f"{work}/data"
    assert found["output_dir"] == f"{work}/runs/r"
    assert found["reference_curve"] == "recipes/references/gpt2_124m_llmc.yaml"
    assert found["resume_from_checkpoint"] == "auto"


@pytest.mark.parametrize("tokenizer", ["characters", "owner/name", "gpt2"])
def test_names_that_are_no_folder_stay(tokenizer, here):
    Path("characters").mkdir()
    values = yaml.safe_load(keys.as_yaml(load(here, tokenizer=tokenizer)))
    assert values["tokenizer"] == tokenizer


RUN = {"run_name": "b0", "output_dir": "/gone/runs/b0"}


@pytest.mark.parametrize(
    ("flags", "output_dir", "name"),
    [
        ({}, "runs/b0", "b0"),
        ({"run_name": "b0"}, "runs/b0", "b0"),
        ({"eval_steps": "7"}, "runs/b0", "b0"),
        ({"run_name": "c0"}, "runs/c0", "c0"),
        ({"run_name": "c0", "learning_rate": "5e-4"}, "runs/c0", "c0"),
        ({"output_dir": "x"}, "x", "b0"),
        ({"run_name": "c0", "output_dir": "x"}, "x", "c0"),
    ],
)
def test_run_recipe_is_its_folder_unless_another_is_named(flags, output_dir, name, here):
    recipe_file = write(here / "runs/b0/recipe.yaml", **RUN)
    (here / "runs/b0/metrics.jsonl").touch()
    saving = loading.load_recipe(recipe_file.relative_to(here), flags).saving
    assert (saving.output_dir, saving.name) == (output_dir, name)


def test_folder_without_a_run_keeps_the_stated_output_dir(here):
    recipe_file = write(here / "elsewhere/recipe.yaml", **RUN)
    assert loading.load_recipe(recipe_file).saving.output_dir == "/gone/runs/b0"
    (here / "elsewhere/checkpoints").mkdir()
    assert loading.load_recipe(recipe_file).saving.output_dir == str(here / "elsewhere")
    os.chdir(here / "elsewhere")
    assert loading.load_recipe(Path("recipe.yaml")).saving.output_dir == str(here / "elsewhere")


def test_folder_of_shards_is_next_to_a_moved_run(here):
    """Nothing was prepared, or it was not copied: it is not prepared in the old place."""
    recipe_file = write(here / "runs/b0/recipe.yaml", **RUN | {"prepared_data_dir": "/gone/data"})
    assert loading.load_recipe(recipe_file).data.prepared_data_dir == f"{here}/data"
    old = here / "old"
    old.mkdir()
    stated = {"output_dir": f"{old}/runs/b0", "prepared_data_dir": f"{old}/data"}
    recipe_file = write(here / "runs/b0/recipe.yaml", **RUN | stated)
    assert loading.load_recipe(recipe_file).data.prepared_data_dir == f"{old}/data"


def test_files_that_moved_along_with_a_run_are_found(here):
    stated = {
        "data_files": ["/gone/text.txt", "/gone/t/*.txt", "/other/x.txt"],
        "prepared_data_dir": "/gone/data",
    }
    recipe_file = write(here / "runs/b0/recipe.yaml", **RUN | stated)
    (here / "text.txt").touch()
    (here / "t").mkdir()
    (here / "t/1.txt").touch()
    (here / "data").mkdir()
    data = loading.load_recipe(recipe_file).data
    assert data.data_files == [f"{here}/text.txt", f"{here}/t/*.txt", "/other/x.txt"]
    assert data.prepared_data_dir == f"{here}/data"
    data = loading.load_recipe(recipe_file, {"data_files": ["/gone/text.txt"]}).data
    assert data.data_files == ["/gone/text.txt"]  # a flag is taken as it is


def test_changed_hyperparameter_suggests_output_dir_where_it_is_given(here):
    before = keys.hyperparameters(load(here))
    changed = load(here, {"output_dir": "elsewhere", "learning_rate": "5e-4"})
    with pytest.raises(BadInput, match="Use another --output_dir, or set"):
        loading.check_same_hyperparameters(Path("run"), before, changed)


def test_extension_of_a_run_takes_no_name(here):
    write(here / "runs/b0/recipe.yaml", **RUN)
    argv = ["--recipe", "runs/b0/recipe.yaml", "--extend_steps", "5", "--run_name", "c0"]
    with pytest.raises(
        BadInput, match="^--extend_steps names .* the run in runs/b0 .* Leave out --run_name$"
    ):
        command_line.parse_training(argv)


# What others see.


def test_paths_are_shortened_where_others_see_them(here, tmp_path):
    (here / "runs/a/model").mkdir(parents=True)
    (here / "runs/a/recipe.yaml").touch()
    (here / "tok").mkdir()
    changes = {
        "data_files": ["~/corpora/x.txt", "sub/*.txt", "https://h/d/a.txt"],
        "validation_files": [str(tmp_path / "home/held.txt")],
        "tokenizer": "tok",
        "init_from": "runs/a",
        "tasks": ["piqa"],
        "task_files": ["piqa=~/items.jsonl"],
        "output_dir": "~/runs/r",
        "prepared_data_dir": "~",
        "resume_from_checkpoint": "~/runs/q/checkpoints/step-00000005",
        "reference_curve": "recipes/references/gpt2_124m_llmc.yaml",
    }
    recipe = load(here, **changes | dict.fromkeys(keys.MODEL_KEYS))
    public = keys.redacted(recipe)
    wanted = {
        "data_files": ["x.txt", "*.txt", "https://h/d/a.txt"],
        "validation_files": ["held.txt"],
        "tokenizer": "tok",
        "init_from": "a",
        "task_files": ["piqa=items.jsonl"],
        "output_dir": "r",
        "prepared_data_dir": "~",
        "resume_from_checkpoint": "step-00000005",
        "reference_curve": "recipes/references/gpt2_124m_llmc.yaml",
    }
    assert {name: public[name] for name in wanted} == wanted
    text = keys.redacted_yaml(recipe)
    assert str(tmp_path) not in text
    assert "output_dir" not in yaml.safe_load(text)
    assert keys.hyperparameters(recipe)["init_from"] == "a"
    assert str(tmp_path) not in str(model_card.metadata(recipe))


def test_command_in_a_model_card_has_short_paths(monkeypatch):
    home = os.environ["HOME"]
    words = [
        "train.py",
        "--recipe",
        "recipes/own_text.yaml",
        "--data_files",
        f"{home}/a.txt",
        "b/c.txt",
    ]
    words += [
        f"--output-dir={home}/y",
        "--task_files",
        "piqa=~/i.jsonl",
        "--sample_prompts",
        "/a b",
        "--seed",
        "1",
    ]
    shown = ["train.py", "--recipe", "recipes/own_text.yaml", "--data_files", "a.txt", "c.txt"]
    shown += [
        "--output-dir=y",
        "--task_files",
        "piqa=i.jsonl",
        "--sample_prompts",
        "/a b",
        "--seed",
        "1",
    ]
    launcher = [
        "/opt/accelerate",
        "launch",
        "--config_file",
        f"{home}/x.yaml",
        f"{home}/{words[0]}",
        *words[1:],
    ]
    assert run_info.command_line(launcher) == [
        "accelerate",
        "launch",
        "--config_file",
        "x.yaml",
        *shown,
    ]
    monkeypatch.setattr("sys.argv", words)
    assert run_info.command_line(["bash"]) == ["python", *shown]


def test_values_that_are_no_paths_are_left_alone():
    values = {
        "data_files": [1, None],
        "tokenizer": 5,
        "task_files": "piqa",
        "sources": ["x", {"weight": 1}],
        3: "~",
    }
    assert places.expand(values) == (values, [])


@pytest.mark.parametrize(
    ("flags", "start"),
    [
        ({}, "OLD"),
        ({"run_name": "new"}, "auto"),
        ({"output_dir": "elsewhere"}, "auto"),
        ({"output_dir": "runs/extended"}, "OLD"),
        ({"run_name": "new", "resume_from_checkpoint": "none"}, "none"),
    ],
)
def test_new_run_does_not_start_where_the_old_one_did(here, flags, start):
    old = here / "runs" / "first" / "checkpoints" / "step-00000016"
    old.mkdir(parents=True)
    folder = here / "runs" / "extended"
    changes = {
        "run_name": "extended",
        "output_dir": str(folder),
        "resume_from_checkpoint": str(old),
    }
    path = write(folder / run_files.RECIPE, **changes)
    (folder / "metrics.jsonl").touch()
    wanted = str(old) if start == "OLD" else start
    assert loading.load_recipe(path, flags).saving.resume_from_checkpoint == wanted
