"""Paths in recipes and flags: expansion, lookup, moved runs, and shortening for publication."""

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
REFERENCE = "recipes/references/gpt2_124m_llmc.yaml"


@pytest.fixture(autouse=True)
def work_folder(tmp_path, monkeypatch) -> Path:
    """Work in an empty folder, with a home folder and some environment variables."""
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


@pytest.fixture
def home() -> str:
    """Return the home folder."""
    return os.environ["HOME"]


def write_recipe(path: Path, **changes) -> Path:
    """Write the base recipe with some values changed. None removes a key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {name: value for name, value in (BASE | changes).items() if value is not None}
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def load(folder: Path, flags: dict | None = None, **changes) -> keys.Recipe:
    """Load the base recipe with some values changed."""
    return loading.load_recipe(write_recipe(folder / "mine.yaml", **changes), flags)


# Expansion.


ENVIRONMENT = {
    "A": "/a",
    "TILDE": "~/b",
    "DOLLAR": "x$A",
    "SPACE": "two words",
    "BASE_URL": "https://h/d",
}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("~", "{home}"),
        ("~/y", "{home}/y"),
        ("~/*.txt", "{home}/*.txt"),
        ("$A/b", "/a/b"),
        ("${A}b", "/ab"),
        ("$A$A", "/a/a"),
        ("$TILDE/c", "{home}/b/c"),
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
def test_variables_and_home_are_expanded_once(home, path, expected):
    expected = expected.format(home=home)

    result = paths.expand(path, ENVIRONMENT)

    assert result == expected
    round_trip = paths.expand(paths.literal(result))
    assert round_trip.removeprefix("./") == expected.removeprefix("./")


NOT_EXPANDABLE = [
    ("$UNSET/x", "variable UNSET is not set"),
    ("${UNSET}", "variable UNSET is not set"),
    ("$EMPTY/x", "variable EMPTY is empty"),
    ("${PLACE:-/x}", "is not a variable"),
    ("${PLACE", "is not a variable"),
    ("${}", "is not a variable"),
    ("~unknown-user/x", "home folder of ~unknown-user is not known"),
]


@pytest.mark.parametrize(("path", "words"), NOT_EXPANDABLE)
def test_flag_that_cannot_be_expanded_is_rejected(work_folder, path, words):
    with pytest.raises(BadInput) as caught:
        load(work_folder, {"output_dir": path})

    assert f"--output_dir {path}: " in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(("path", "words"), NOT_EXPANDABLE)
def test_key_that_cannot_be_expanded_is_rejected(work_folder, path, words):
    with pytest.raises(BadInput) as caught:
        load(work_folder, output_dir=path)

    assert f"mine.yaml: output_dir = {path}: " in str(caught.value)
    assert words in str(caught.value)


def test_key_replaced_by_a_flag_is_not_expanded(work_folder):
    recipe = load(work_folder, {"output_dir": "x"}, output_dir="$UNSET/x")

    assert recipe.saving.output_dir == "x"


PATH_KEYS = [name for name, field in keys.FIELDS.items() if field.metadata["path"]]


def test_all_keys_of_files_and_folders_are_paths():
    assert set(PATH_KEYS) == {
        "data_dir",
        "data_files",
        "init_from",
        "output_dir",
        "prepared_data_dir",
        "reference_curve",
        "resume_from_checkpoint",
        "task_files",
        "tokenizer",
        "validation_files",
    }


def value_with_path(name: str, path: str) -> str | list[str]:
    """Return a value of this key that contains the path."""
    text = f"piqa={path}" if name == "task_files" else path
    return [text] if name in LISTS else text


@pytest.mark.parametrize("name", PATH_KEYS)
@pytest.mark.parametrize("is_flag", [True, False])
def test_every_path_key_is_expanded(name, is_flag, work_folder, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    (place / "x").write_bytes((ROOT / REFERENCE).read_bytes())
    value = value_with_path(name, "$PLACE/x")
    changes = {"tasks": ["piqa"], "task_steps": 5}
    if name == "data_dir":
        changes["data_files"] = None
    if name == "reference_curve":
        changes |= {"tokenizer": "gpt2", "vocab_size": 50304}

    if is_flag:
        recipe = load(work_folder, {name: value}, **changes)
    else:
        recipe = load(work_folder, **changes | {name: value})

    assert keys.to_dict(recipe)[name] == value_with_path(name, f"{place}/x")


def test_paths_of_a_mixture_are_expanded(work_folder, home, tmp_path):
    sources = [{"weight": 1, "data_files": ["~/a.txt"]}, {"weight": 1, "data_dir": "$PLACE"}]

    data = load(work_folder, data_files=None, tokenizer="owner/name", sources=sources).data

    files_source, folder_source = data.resolved_sources
    assert files_source.data_files == [f"{home}/a.txt"]
    assert folder_source.data_files is None
    assert folder_source.data_dir == str(tmp_path / "place")


def test_data_reader_gets_flags_as_typed(work_folder):
    write_recipe(work_folder / "mine.yaml")
    argv = ["--recipe", "mine.yaml", "--data_files", "$PLACE/a$$b.txt", "c.txt", "--output_dir=~/y"]

    recipe, _, reader_argv = command_line.parse_training(argv)
    reader_recipe, _, _ = command_line.parse_training(reader_argv)

    assert reader_recipe == recipe
    assert recipe.data.data_files == [f"{os.environ['PLACE']}/a$b.txt", "c.txt"]


@pytest.mark.parametrize("name", ["output_dir", "prepared_data_dir"])
def test_url_is_rejected_as_written_folder(name, work_folder):
    with pytest.raises(BadInput, match=f"--{name} s3://bucket/x: must be a folder"):
        load(work_folder, {name: "s3://bucket/x"})


@pytest.mark.parametrize(
    ("parse", "words", "name"),
    [
        (generate.parse, "--model PATH", "model"),
        (export_model.parse, "PATH --out x", "model"),
        (export_model.parse, "m --out PATH", "out"),
        (export_model.parse, "m --out x --text PATH", "text"),
        (eval_tasks.parse, "--tasks piqa --model PATH", "model"),
        (eval_tasks.parse, "--tasks piqa --model m --output PATH", "output"),
        (eval_tasks.parse, "--tasks piqa --model m --data_files PATH", "data_files"),
        (eval_tasks.parse, "--tasks piqa --model m --task_files piqa=PATH", "task_files"),
        (compare_runs.parse, "PATH", "runs"),
        (compare_runs.parse, "r --out PATH", "out"),
        (compare_runs.parse, "r --reference_curve PATH", "reference_curve"),
        (check_setup.parse, "--recipe PATH", "recipe"),
    ],
)
def test_path_options_of_scripts_are_expanded(parse, words, name, home):
    args = parse(words.replace("PATH", "~/x.png").split())

    assert f"{home}/x.png" in str(vars(args)[name])
    with pytest.raises(BadInput, match=r"\$UNSET/x: .*variable UNSET is not set"):
        parse(words.replace("PATH", "$UNSET/x").split())


def test_path_argument_is_expanded_by_argparse(home, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=paths.path_argument)

    args = parser.parse_args(["--json", "~/x"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", "$UNSET"])

    assert args.json == Path(home, "x")
    message = capsys.readouterr().err
    assert "argument --json: $UNSET: " in message
    assert "variable UNSET is not set" in message


def test_push_pending_expands_its_folder(home):
    _, modes, _ = command_line.parse_training(["--push_pending", "~/run"])

    assert modes["push_pending"] == f"{home}/run"


# Recipes of the repository.


def load_by_name(path: str) -> keys.Recipe:
    """Return the recipe that train.py loads for this value of --recipe."""
    recipe, _, _ = command_line.parse_training(["--recipe", path])
    return recipe


def test_repository_recipe_is_found_from_any_folder():
    default_recipe, _, _ = command_line.parse_training([])

    assert default_recipe.saving.name == "gpt2_124m"
    assert load_by_name("recipes/quickstart.yaml").saving.name == "quickstart"
    assert check_setup.load("recipes/gpt2_small.yaml").saving.name == "gpt2_small"


def test_recipe_of_current_folder_is_preferred(work_folder):
    write_recipe(work_folder / "recipes/quickstart.yaml", run_name="of-this-folder")

    assert load_by_name("recipes/quickstart.yaml").saving.name == "of-this-folder"


def test_unknown_recipe_is_rejected():
    with pytest.raises(BadInput, match="^recipes/none.yaml: no such recipe"):
        load_by_name("recipes/none.yaml")


# Recipes of runs.


RUN = {"run_name": "b0", "output_dir": "/gone/runs/b0"}


def test_run_recipe_has_absolute_paths(work_folder, tmp_path, monkeypatch):
    work = work_folder / "a[b] $PLACE"
    work.mkdir()
    monkeypatch.chdir(work)
    for name in ("text.txt", "validation.txt", "odd[1].txt", "~tilde.txt"):
        Path(name).touch()
    Path("tok").mkdir()
    recipe = load(
        work,
        run_name="r",
        data_files=["*.txt", "odd[1].txt", "./~tilde.txt", "https://h/a.txt"],
        validation_files=["./validation.txt"],
        tasks=["piqa"],
        task_files=["piqa=items.jsonl"],
        tokenizer="tok",
        reference_curve=REFERENCE,
        resume_from_checkpoint="auto",
    )
    run_recipe = work / "runs/r/recipe.yaml"
    run_recipe.parent.mkdir(parents=True)
    run_recipe.write_text(keys.as_yaml(recipe), encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    values = keys.to_dict(loading.load_recipe(run_recipe))

    assert values["data_files"] == [
        f"{work_folder}/a[[]b] $PLACE/*.txt",
        f"{work}/odd[1].txt",
        f"{work}/~tilde.txt",
        "https://h/a.txt",
    ]
    assert values["validation_files"] == [f"{work}/validation.txt"]
    assert values["task_files"] == [f"piqa={work}/items.jsonl"]
    assert values["tokenizer"] == f"{work}/tok"
    assert values["prepared_data_dir"] == f"{work}/data"
    assert values["output_dir"] == f"{work}/runs/r"
    assert values["reference_curve"] == REFERENCE
    assert values["resume_from_checkpoint"] == "auto"


@pytest.mark.parametrize("tokenizer", ["characters", "owner/name", "gpt2"])
def test_tokenizer_name_is_not_a_path(tokenizer, work_folder):
    (work_folder / "characters").mkdir()

    values = yaml.safe_load(keys.as_yaml(load(work_folder, tokenizer=tokenizer)))

    assert values["tokenizer"] == tokenizer


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
def test_run_recipe_belongs_to_its_folder(flags, output_dir, name, work_folder):
    path = write_recipe(work_folder / "runs/b0/recipe.yaml", **RUN)
    (work_folder / "runs/b0/metrics.jsonl").touch()

    saving = loading.load_recipe(path.relative_to(work_folder), flags).saving

    assert saving.output_dir == output_dir
    assert saving.name == name


def test_folder_without_run_keeps_stated_output_dir(work_folder):
    path = write_recipe(work_folder / "elsewhere/recipe.yaml", **RUN)

    assert loading.load_recipe(path).saving.output_dir == "/gone/runs/b0"


def test_folder_with_checkpoints_is_a_run(work_folder, monkeypatch):
    folder = work_folder / "elsewhere"
    path = write_recipe(folder / "recipe.yaml", **RUN)
    (folder / "checkpoints").mkdir()

    assert loading.load_recipe(path).saving.output_dir == str(folder)
    monkeypatch.chdir(folder)
    assert loading.load_recipe(Path("recipe.yaml")).saving.output_dir == str(folder)


def test_prepared_data_is_next_to_moved_run(work_folder):
    """Data that was not copied is not prepared in the old folder."""
    stated = RUN | {"prepared_data_dir": "/gone/data"}
    path = write_recipe(work_folder / "runs/b0/recipe.yaml", **stated)

    assert loading.load_recipe(path).data.prepared_data_dir == f"{work_folder}/data"


def test_existing_prepared_data_of_moved_run_is_kept(work_folder):
    old = work_folder / "old"
    old.mkdir()
    stated = RUN | {"output_dir": f"{old}/runs/b0", "prepared_data_dir": f"{old}/data"}
    path = write_recipe(work_folder / "runs/b0/recipe.yaml", **stated)

    assert loading.load_recipe(path).data.prepared_data_dir == f"{old}/data"


@pytest.fixture
def moved_run(work_folder):
    """Write the recipe of a run that was moved with some of its data files."""
    (work_folder / "text.txt").touch()
    (work_folder / "t").mkdir()
    (work_folder / "t/1.txt").touch()
    (work_folder / "data").mkdir()
    return write_recipe(
        work_folder / "runs/b0/recipe.yaml",
        **RUN,
        data_files=["/gone/text.txt", "/gone/t/*.txt", "/other/x.txt"],
        prepared_data_dir="/gone/data",
    )


def test_files_moved_with_a_run_are_found(moved_run, work_folder):
    data = loading.load_recipe(moved_run).data

    assert data.data_files == [
        f"{work_folder}/text.txt",
        f"{work_folder}/t/*.txt",
        "/other/x.txt",
    ]
    assert data.prepared_data_dir == f"{work_folder}/data"


def test_flag_of_moved_run_is_unchanged(moved_run):
    data = loading.load_recipe(moved_run, {"data_files": ["/gone/text.txt"]}).data

    assert data.data_files == ["/gone/text.txt"]


def test_changed_hyperparameter_suggests_another_output_dir(work_folder):
    before = keys.hyperparameters(load(work_folder))
    changed = load(work_folder, {"output_dir": "elsewhere", "learning_rate": "5e-4"})

    with pytest.raises(BadInput, match="Use another --output_dir, or set"):
        loading.check_same_hyperparameters(Path("run"), before, changed)


def test_extension_of_a_run_takes_no_name(work_folder):
    write_recipe(work_folder / "runs/b0/recipe.yaml", **RUN)
    argv = ["--recipe", "runs/b0/recipe.yaml", "--extend_steps", "5", "--run_name", "c0"]

    with pytest.raises(BadInput) as caught:
        command_line.parse_training(argv)

    message = str(caught.value)
    assert message.startswith("--extend_steps ")
    assert "the run in runs/b0" in message
    assert message.endswith("Leave out --run_name")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "{old}"),
        ({"run_name": "new"}, "auto"),
        ({"output_dir": "elsewhere"}, "auto"),
        ({"output_dir": "runs/extended"}, "{old}"),
        ({"run_name": "new", "resume_from_checkpoint": "none"}, "none"),
    ],
)
def test_new_run_does_not_resume_old_checkpoint(work_folder, flags, expected):
    old = work_folder / "runs" / "first" / "checkpoints" / "step-00000016"
    old.mkdir(parents=True)
    folder = work_folder / "runs" / "extended"
    path = write_recipe(
        folder / run_files.RECIPE,
        run_name="extended",
        output_dir=str(folder),
        resume_from_checkpoint=str(old),
    )
    (folder / "metrics.jsonl").touch()

    saving = loading.load_recipe(path, flags).saving

    assert saving.resume_from_checkpoint == expected.format(old=old)


# Published recipes and commands.


@pytest.fixture
def recipe_with_paths(work_folder, home):
    """Return a recipe with a path in each key that may have one."""
    (work_folder / "runs/a/model").mkdir(parents=True)
    (work_folder / "runs/a/recipe.yaml").touch()
    (work_folder / "tok").mkdir()
    changes = {
        "data_files": ["~/corpora/x.txt", "sub/*.txt", "https://h/d/a.txt"],
        "validation_files": [f"{home}/validation.txt"],
        "tokenizer": "tok",
        "init_from": "runs/a",
        "tasks": ["piqa"],
        "task_files": ["piqa=~/items.jsonl"],
        "output_dir": "~/runs/r",
        "prepared_data_dir": "~",
        "resume_from_checkpoint": "~/runs/q/checkpoints/step-00000005",
        "reference_curve": REFERENCE,
    }
    return load(work_folder, **changes | dict.fromkeys(keys.MODEL_KEYS))


def test_paths_of_published_recipe_are_shortened(recipe_with_paths):
    public = keys.redacted(recipe_with_paths)

    assert public["data_files"] == ["x.txt", "*.txt", "https://h/d/a.txt"]
    assert public["validation_files"] == ["validation.txt"]
    assert public["tokenizer"] == "tok"
    assert public["init_from"] == "a"
    assert public["task_files"] == ["piqa=items.jsonl"]
    assert public["output_dir"] == "r"
    assert public["prepared_data_dir"] == "~"
    assert public["resume_from_checkpoint"] == "step-00000005"
    assert public["reference_curve"] == REFERENCE


def test_published_files_contain_no_local_path(recipe_with_paths, tmp_path):
    text = keys.redacted_yaml(recipe_with_paths)
    metadata = model_card.metadata(recipe_with_paths)

    assert str(tmp_path) not in text
    assert "output_dir" not in yaml.safe_load(text)
    assert keys.hyperparameters(recipe_with_paths)["init_from"] == "a"
    assert str(tmp_path) not in str(metadata)


FLAGS = (
    "--recipe recipes/own_text.yaml --data_files {home}/a.txt b/c.txt --output-dir={home}/y "
    "--task_files piqa=~/i.jsonl"
)
SHORT_FLAGS = (
    "--recipe recipes/own_text.yaml --data_files a.txt c.txt --output-dir=y "
    "--task_files piqa=i.jsonl"
)
PROMPT_FLAGS = ["--sample_prompts", "/a b", "--seed", "1"]


def test_command_has_short_paths(home, monkeypatch):
    words = [*FLAGS.format(home=home).split(), *PROMPT_FLAGS]
    monkeypatch.setattr("sys.argv", ["train.py", *words])

    command = run_info.command_line(["bash"])

    assert command == ["python", "train.py", *SHORT_FLAGS.split(), *PROMPT_FLAGS]


def test_command_of_launcher_has_short_paths(home):
    words = [*FLAGS.format(home=home).split(), *PROMPT_FLAGS]
    launcher = ["/opt/accelerate", "launch", "--config_file", f"{home}/x.yaml"]

    command = run_info.command_line([*launcher, f"{home}/train.py", *words])

    short_launcher = ["accelerate", "launch", "--config_file", "x.yaml"]
    assert command == [*short_launcher, "train.py", *SHORT_FLAGS.split(), *PROMPT_FLAGS]


def test_values_that_are_no_paths_are_unchanged():
    values = {
        "data_files": [1, None],
        "tokenizer": 5,
        "task_files": "piqa",
        "sources": ["x", {"weight": 1}],
        3: "~",
    }

    expanded, problems = places.expand(values)

    assert expanded == values
    assert problems == []
