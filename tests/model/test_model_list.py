"""The models of --model: patterns, steps and tokens, damaged checkpoints and other files."""

import json
from pathlib import Path

import pytest
from checkpoint_folders import write_recipe

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import Finish, step_name
from ursa_minor.model import model_list
from ursa_minor.model.model_list import fingerprint, list_models

PATTERN = "runs/a/checkpoints/*"


def write_files(folder: Path, step: int | None = None) -> Path:
    """Write a folder that looks like a model, with a manifest if ``step`` is given."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    if step is not None:
        row = files.manifest_row(folder / "model.safetensors")
        manifest = {"step": step, "files": {"model.safetensors": row}}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run with three checkpoints in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = Path("runs/a")
    write_recipe(path)
    for step in (4, 0, 16):
        write_files(path / "checkpoints" / step_name(step), step)
    return path


def steps_of(names: list[str]) -> list[int | None]:
    """Return the step of each listed model."""
    return [model.step for model in list_models(names).models]


def test_pattern_lists_checkpoints_in_order(run):
    models = list_models([PATTERN]).models

    assert [model.name for model in models] == [
        f"{run}/checkpoints/{step_name(s)}" for s in (0, 4, 16)
    ]
    assert [model.tokens for model in models] == [0, 256, 1024]
    assert {model.run for model in models} == {"runs/a"}


def test_expanded_pattern_lists_the_same_models(run):
    names = [str(path) for path in sorted(run.glob("checkpoints/*"))]

    assert list_models(names) == list_models([PATTERN])


def test_model_is_listed_once(run):
    names = [PATTERN, "./runs/a/checkpoints/step-00000004/", str(run.resolve()) + "/checkpoints/*4"]

    assert steps_of(names) == [0, 4, 16]


def test_existing_path_with_brackets_is_no_pattern(run):
    write_files(Path("runs/[a]/model"))

    assert not model_list.is_pattern("runs/[a]")
    assert list_models(["runs/[a]"]).models[0].location == "runs/[a]/model"


def test_state_has_precedence_over_recipe(run):
    training = run / "checkpoints/step-00000004/training"
    training.mkdir()
    (training / "state.json").write_text('{"step": 4, "tokens": 999}')

    (model,) = list_models([f"{PATTERN}4"]).models

    assert model.tokens == 999


@pytest.mark.parametrize("text", ["", "[]", '{"tokens": null}', "{"])
def test_invalid_state_is_ignored(run, text):
    training = run / "checkpoints/step-00000004/training"
    training.mkdir()
    (training / "state.json").write_text(text)

    (model,) = list_models([f"{PATTERN}4"]).models

    assert model.tokens == 256


@pytest.mark.parametrize("recipe", ["tokens_per_step: auto", "[", "seed: 1", None])
def test_tokens_are_unknown_without_valid_recipe(run, recipe):
    (run / "recipe.yaml").unlink()
    if recipe is not None:
        (run / "recipe.yaml").write_text(recipe)

    models = list_models([PATTERN]).models

    assert [model.step for model in models] == [0, 4, 16]
    assert [model.tokens for model in models] == [0, None, None]


@pytest.mark.parametrize(("weights_step", "step"), [(None, 20), (16, 16)])
def test_finished_run_has_the_step_of_its_weights(run, weights_step, step):
    write_files(run / "model")
    Finish(step=20, weights_step=weights_step).write(run)

    (model,) = list_models(["runs/a"]).models

    assert model.location == "runs/a/model"
    assert (model.step, model.tokens) == (step, 64 * step)


def test_model_without_run_has_no_step(run):
    write_files(Path("plain"))

    (model,) = list_models(["plain"]).models

    assert (model.run, model.step, model.tokens) == (None, None, None)


def test_hub_id_is_listed():
    (model,) = list_models(["me/model@main"]).models

    assert model.location == "me/model@main"
    assert fingerprint(model) is None


def test_other_paths_are_skipped(run):
    (run / "checkpoints/notes.txt").write_text("mine")
    (run / "checkpoints/other").mkdir()

    listed = list_models([PATTERN])

    assert len(listed.models) == 3
    assert listed.skipped == ["runs/a/checkpoints/notes.txt", "runs/a/checkpoints/other"]
    assert not listed.problems


def test_checkpoint_without_config_is_a_problem(run):
    (run / "checkpoints/step-00000004/config.json").unlink()

    listed = list_models([PATTERN])

    assert [model.step for model in listed.models] == [0, 16]
    (problem,) = listed.problems
    assert "step-00000004" in problem


def test_run_without_model_is_a_problem(run):
    write_recipe(Path("runs/b"))

    listed = list_models(["runs/*/checkpoints/*", "runs/b"])

    assert len(listed.models) == 3
    assert "runs/b" in listed.problems[0]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("runs/b/checkpoints/*", "no file or folder matches"),
        ("runs/a/*.yaml", "is a model"),
        ("runs/aa", "did you mean runs/a?"),
    ],
)
def test_names_without_models_are_rejected(run, name, word):
    with pytest.raises(BadInput) as error:
        list_models([name])

    assert name in str(error.value)
    assert word in str(error.value)


# ---- fingerprints


def fingerprint_of(name: str) -> str | None:
    """Return the fingerprint of the only model that a name means."""
    (model,) = list_models([name]).models
    return fingerprint(model)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_fingerprint_depends_on_each_loaded_file(run, file):
    write_files(Path("plain"))
    first = fingerprint_of("plain")
    (Path("plain") / file).write_text("changed")

    assert fingerprint_of("plain") != first


def test_fingerprint_ignores_other_files(run):
    first = fingerprint_of("runs/a/checkpoints/step-00000004")
    (run / "checkpoints/step-00000004/README.md").write_text("mine")

    assert fingerprint_of("runs/a/checkpoints/step-00000004") == first


def damage_weights(folder: Path) -> None:
    """Change a byte of the weights."""
    (folder / "model.safetensors").write_bytes(b"Weights")


def remove_weights(folder: Path) -> None:
    """Remove the weights."""
    (folder / "model.safetensors").unlink()


def damage_manifest(folder: Path) -> None:
    """Truncate the manifest."""
    (folder / "manifest.json").write_text("{")


def change_step(folder: Path) -> None:
    """Change the step in the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"step": 5}))


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (damage_weights, "model.safetensors is corrupted"),
        (remove_weights, "model.safetensors is missing"),
        (damage_manifest, "manifest.json cannot be read"),
        (change_step, "manifest.json is of step 5"),
    ],
)
def test_corrupted_checkpoint_has_no_fingerprint(run, damage, word):
    damage(run / "checkpoints/step-00000004")

    with pytest.raises(BadInput) as error:
        fingerprint_of("runs/a/checkpoints/step-00000004")

    assert "--model runs/a/checkpoints/step-00000004" in str(error.value)
    assert word in str(error.value)
