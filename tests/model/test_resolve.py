"""Names of models: run folders, model folders and ids of the Hub, with or without a revision."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from small_models import build_small_model

from ursa_minor.base import files, run_files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import pretrained_tokenizer
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.export import stock as stock_export
from ursa_minor.model import pretrained
from ursa_minor.model.resolve import resolve_model
from ursa_minor.recipe import keys, loading

pytest_plugins = ["push_helpers"]

WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; import {0}; sys.exit({0}.main(sys.argv[1:]))"
)


@pytest.fixture
def run_folder(tmp_path, monkeypatch) -> Path:
    """The folder runs/deutsch with a model, in an otherwise empty current folder."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/deutsch")
    (folder / "model").mkdir(parents=True)
    return folder


def test_run_name_is_resolved_to_its_model(run_folder):
    assert resolve_model("runs/deutsch") == "runs/deutsch/model"


def test_similar_checkpoint_is_suggested(run_folder):
    Path("runs/deutsch/ckpt.pt").touch()

    with pytest.raises(BadInput) as error:
        resolve_model("runs/deutsch/ckp.pt")

    message = str(error.value)
    assert message.startswith("--model runs/deutsch/ckp.pt: no such file")
    assert message.endswith("did you mean runs/deutsch/ckpt.pt?")


def test_hub_id_is_not_changed(run_folder):
    assert resolve_model("openai-community/gpt2") == "openai-community/gpt2"


def test_hub_id_without_owner_is_accepted(run_folder):
    Path("runs/gpt2_124m").mkdir()

    assert resolve_model("gpt2") == "gpt2"


@pytest.mark.parametrize("name", ["runs/deutch", "deutsch", "deutch"])
def test_similar_run_is_suggested(run_folder, name):
    with pytest.raises(BadInput) as error:
        resolve_model(name)

    message = str(error.value)
    assert message.startswith(f"--model {name}: no such folder")
    assert message.endswith("did you mean runs/deutsch?")


def test_unknown_folder_is_refused_without_suggestion(run_folder):
    with pytest.raises(BadInput) as error:
        resolve_model("nowhere/at/all", "model = ")

    message = str(error.value)
    assert message.startswith("model = nowhere/at/all: no such folder")
    assert "owner/name" in message
    assert "did you mean" not in message


@pytest.mark.parametrize("name", ["runs", "text.txt"])
def test_path_without_model_is_refused(run_folder, name):
    Path("text.txt").touch()

    with pytest.raises(BadInput, match=f"^--model {name}: contains no model.*config.json"):
        resolve_model(name)


def write_checkpoint(run_dir: Path, step: int) -> Path:
    """Write a checkpoint with placeholders instead of tensors."""
    path = run_dir / "checkpoints" / f"step-{step:08d}"
    (path / "training").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_text("weights")
    (path / "training/optimizer.safetensors").write_text("moments")
    (path / "training/state.json").write_text(json.dumps({"step": step}))
    rows = {name: files.manifest_row(path / name) for name in run_files.RESUME_FILES}
    (path / "manifest.json").write_text(json.dumps({"step": step, "files": rows}))
    return path


def test_unfinished_run_means_newest_intact_checkpoint(run_folder, caplog):
    run_dir = Path("runs/my run")
    intact = write_checkpoint(run_dir, 5)
    (write_checkpoint(run_dir, 10) / "model.safetensors").write_text("damaged")

    with caplog.at_level("INFO"):
        names = [resolve_model("runs/my run"), resolve_model("runs/my run", "init_from = ")]

    assert names == [str(intact), str(intact)]
    skipped, line = caplog.messages
    assert "step-00000010" in skipped
    assert line.startswith("runs/my run has no model/ yet")
    assert line.endswith(intact.name)


def test_finished_run_means_its_model(run_folder):
    write_checkpoint(run_folder, 5)

    assert resolve_model("runs/deutsch") == "runs/deutsch/model"


def test_checkpoint_is_model_folder(run_folder):
    path = str(write_checkpoint(run_folder, 5))

    assert resolve_model(path) == path


def test_run_with_corrupted_checkpoints_is_refused(run_folder):
    run_dir = Path("runs/new")
    (write_checkpoint(run_dir, 5) / "model.safetensors").write_text("damaged")

    with pytest.raises(BadInput) as error:
        resolve_model("runs/new")

    assert str(error.value).startswith("--model runs/new: ")
    assert "intact" in str(error.value)


def test_checkpoint_is_suggested_for_its_parent(run_folder):
    path = write_checkpoint(run_folder, 5)

    with pytest.raises(BadInput) as error:
        resolve_model("runs/deutsch/checkpoints")

    assert str(error.value).endswith(f"for example {path}")


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("generate", ["--model", "runs/deutch"]),
        ("eval_hellaswag", ["--model", "runs/deutch"]),
        ("eval_tasks", ["--model", "runs/deutch", "--tasks", "piqa"]),
        ("export_model", ["runs/deutch", "--out", "exports/deutch"]),
    ],
)
def test_misspelled_run_is_refused_without_importing_torch(run_folder, script, flags):
    command = [sys.executable, "-c", WITHOUT_TORCH.format(script), *flags]
    environment = {"PYTHONPATH": str(ROOT)}

    process = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert process.returncode == 2, process.stderr
    assert "did you mean runs/deutsch?" in process.stderr


# Revisions


@pytest.mark.parametrize("path", ["runs/a@b", "runs/a@b/model"])
def test_existing_run_is_not_split_at_sign(run_folder, path):
    Path("runs/a@b/model").mkdir(parents=True)
    Path("runs/a@b/model/config.json").touch()

    assert resolve_model(path) == "runs/a@b/model"


def test_existing_model_folder_is_not_split_at_sign(run_folder):
    Path("own@v1").mkdir()
    Path("own@v1/config.json").touch()

    assert resolve_model("own@v1") == "own@v1"


@pytest.mark.parametrize(
    "name", ["me/model@v1", "me/model@refs/pr/1", "gpt2@main", "me/model@0123abc"]
)
def test_hub_id_may_have_revision(run_folder, name):
    assert resolve_model(name) == name


@pytest.mark.parametrize("option", ["--model ", "init_from = "])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("me/model@", "neither a folder nor an id of the Hub"),
        ("@v1", "neither a folder nor an id of the Hub"),
        ("me/model@v 1", "neither a folder nor an id of the Hub"),
        ("me/model@v1@v2", "more than one @"),
        ("hub://me/model@v1", "OWNER/NAME"),
        ("hub://me/model", "OWNER/NAME"),
        ("runs/gone@v1", "no such folder"),
        ("runs/gone@v1/model", "no such folder"),
        ("here/model@v1", "a folder has no revisions"),
    ],
)
def test_malformed_revision_is_refused(run_folder, name, words, option):
    Path("here/model").mkdir(parents=True)

    with pytest.raises(BadInput) as error:
        resolve_model(name, option)

    message = str(error.value)
    assert message.startswith(f"{option}{name}: ")
    assert words in message


@pytest.fixture
def repo_id(server, tmp_path, monkeypatch) -> str:
    """The id of a repository on the local Hub, whose tags v1 and v2 have different models.

    Transformers caches the commit of each revision, so each test has its own repository.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    repo_id = f"me/{tmp_path.name}"
    repository = server.make(repo_id, private=False)
    tokenizer = tokenization.make_characters(["abcdefghij \n"])
    for seed, tag in enumerate(("v1", "v2")):
        stock_export.write(build_small_model(seed=seed), tmp_path / tag, tokenizer)
        files = {path.name: path.read_bytes() for path in (tmp_path / tag).iterdir()}
        repository.tags[tag] = repository.commit(tag, files)
    return repo_id


def load_weights(name) -> dict[str, torch.Tensor]:
    """Load the weights of a model by name."""
    return pretrained.load(str(name)).state_dict()


def equal_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Return whether all weights are bitwise equal."""
    return all(torch.equal(left[name], right[name]) for name in right)


def test_model_and_tokenizer_of_revision_are_loaded(repo_id, server, tmp_path):
    commit = server.repositories[repo_id].tags["v1"]
    newest = load_weights(repo_id)
    expected = load_weights(tmp_path / "v1")

    for revision in ("v1", commit):
        name = f"{repo_id}@{revision}"
        weights = load_weights(resolve_model(name))
        assert equal_weights(weights, expected)
        assert not equal_weights(weights, newest)
        assert len(pretrained_tokenizer.load(name, of_model=True)) > 1


@pytest.mark.parametrize("load", [pretrained.load, pretrained_tokenizer.load])
def test_unknown_revision_is_named(repo_id, load):
    with pytest.raises(BadInput, match="@v9: .*cannot be loaded.*v9"):
        load(f"{repo_id}@v9")


def write_recipe_without_shape(path: Path) -> None:
    """Write a recipe that states neither a tokenizer nor the shape of its model."""
    shape_keys = ("tokenizer", "n_", "vocab_size", "architecture")
    lines = (ROOT / "recipes/own_text.yaml").read_text().splitlines()
    other_lines = [line for line in lines if not line.startswith(shape_keys)]
    path.write_text("\n".join(other_lines))


@pytest.fixture
def revision_recipe(repo_id, tmp_path) -> keys.Recipe:
    """A complete recipe that initializes from the revision v1."""
    path = tmp_path / "recipe.yaml"
    write_recipe_without_shape(path)
    flags = {
        "init_from": f"{repo_id}@v1",
        "sequence_length": "16",
        "data_files": ["text.txt"],
    }
    return pretrained.complete(loading.load_recipe(path, flags))


def test_recipe_keeps_its_initial_revision(revision_recipe, repo_id, tmp_path):
    name = f"{repo_id}@v1"

    model = pretrained.load_to_train(name, revision_recipe.model)

    assert revision_recipe.model.init_from == name
    assert revision_recipe.data.tokenizer == name
    assert revision_recipe.model.n_embd == 32
    embedding = model.state_dict()["transformer.wte.weight"]
    assert torch.equal(embedding, load_weights(tmp_path / "v1")["transformer.wte.weight"])
