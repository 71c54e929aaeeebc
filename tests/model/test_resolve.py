"""What a model's name stands for is known, or refused with the nearest, before anything heavy is imported."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from small_models import build_small_model

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import pretrained_tokenizer
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.export import stock as stock_export
from ursa_minor.model import pretrained
from ursa_minor.model.resolve import resolve_model
from ursa_minor.recipe import loading

pytest_plugins = ["push_helpers"]

WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; import {0}; sys.exit({0}.main(sys.argv[1:]))"
)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/deutsch/model").mkdir(parents=True)


def test_a_run_stands_for_its_model_and_what_holds_none_is_refused_a_misspelt_run_with_the_nearest(
    runs,
):
    assert (
        resolve_model("runs/deutsch") == "runs/deutsch/model"
        and resolve_model("openai-community/gpt2") == "openai-community/gpt2"
    )
    with pytest.raises(
        BadInput, match=r"^--model runs/deutch: no such folder .*; did you mean runs/deutsch\?$"
    ):
        resolve_model("runs/deutch")
    with pytest.raises(
        BadInput, match=r"^model = nowhere/at/all: no such folder \(a Hub id is owner/name\)$"
    ):
        resolve_model("nowhere/at/all", "model = ")
    for name in ("deutsch", "deutch"):
        with pytest.raises(
            BadInput, match=f"^--model {name}: no such folder; did you mean runs/deutsch\\?$"
        ):
            resolve_model(name)
    Path("runs/gpt2_124m").mkdir()
    assert resolve_model("gpt2") == "gpt2"  # an old id without an owner
    Path("text.txt").touch()
    for name in ("runs", "text.txt"):
        with pytest.raises(
            BadInput, match=f"^--model {name}: contains no model. Use a folder with config.json"
        ):
            resolve_model(name)


@pytest.mark.parametrize(
    "script, words",
    [
        ("generate", ["--model", "runs/deutch"]),
        ("eval_hellaswag", ["--model", "runs/deutch"]),
        ("eval_tasks", ["--model", "runs/deutch", "--tasks", "piqa"]),
        ("export_model", ["runs/deutch", "--out", "exports/deutch"]),
    ],
)
def test_a_misspelt_run_is_refused_before_torch_is_imported(runs, script, words):
    command = [sys.executable, "-c", WITHOUT_TORCH.format(script), *words]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean runs/deutsch?" in done.stderr, done.stderr


def test_printed_export_command_is_quoted(runs):
    Path("runs/my run/checkpoints").mkdir(parents=True)
    with pytest.raises(
        BadInput, match="python export_model.py 'runs/my run' --out 'exports/my run'"
    ):
        resolve_model("runs/my run")


def test_existing_path_is_never_split_at_the_at_sign(runs):
    Path("runs/a@b/model").mkdir(parents=True)
    Path("runs/a@b/model/config.json").touch()
    Path("own@v1").mkdir()
    Path("own@v1/config.json").touch()
    assert resolve_model("runs/a@b") == "runs/a@b/model"
    assert resolve_model("runs/a@b/model") == "runs/a@b/model"
    assert resolve_model("own@v1") == "own@v1"


@pytest.mark.parametrize(
    "name", ["me/model@v1", "me/model@refs/pr/1", "gpt2@main", "me/model@0123abc"]
)
def test_hub_id_may_have_a_revision(runs, name):
    assert resolve_model(name) == name


@pytest.mark.parametrize(
    "name, words",
    [
        ("me/model@", "is neither a folder nor an id of the Hub with a tag"),
        ("@v1", "is neither a folder nor an id of the Hub with a tag"),
        ("me/model@v 1", "is neither a folder nor an id of the Hub with a tag"),
        ("me/model@v1@v2", "has more than one @"),
        ("hub://me/model@v1", "Use the id without it: OWNER/NAME"),
        ("hub://me/model", "Use the id without it: OWNER/NAME"),
        ("runs/gone@v1", "no such folder"),
        ("runs/gone@v1/model", "no such folder"),
        ("here/model@v1", "here/model is a folder here, and a folder has no revisions"),
    ],
)
def test_malformed_revision_is_refused_with_a_fix(runs, name, words):
    Path("here/model").mkdir(parents=True)
    for option in ("--model ", "init_from = "):
        with pytest.raises(BadInput) as caught:
            resolve_model(name, option)
        assert str(caught.value).startswith(f"{option}{name}: ") and words in str(caught.value)


@pytest.fixture
def two_revisions(server, tmp_path, monkeypatch):
    """The id of a repository on the local Hub with two tags, whose models differ.

    Transformers remembers the commit of each revision, so that each test has a repository of its own.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    repo_id = f"me/{tmp_path.name}"
    repository = server.make(repo_id, private=False)
    tokenizer = tokenization.make_characters(["abcdefghij \n"])
    for number, tag in enumerate(("v1", "v2")):
        model = build_small_model(seed=number)
        stock_export.write(model, tmp_path / tag, tokenizer)
        files = {path.name: path.read_bytes() for path in (tmp_path / tag).iterdir()}
        repository.tags[tag] = repository.commit(tag, files)
    return repo_id


def test_model_and_tokenizer_come_from_the_given_revision(two_revisions, server, tmp_path):
    newest = pretrained.load(two_revisions).state_dict()
    commit = server.repositories[two_revisions].tags["v1"]
    for name in (f"{two_revisions}@v1", f"{two_revisions}@{commit}"):
        loaded = pretrained.load(resolve_model(name)).state_dict()
        expected = pretrained.load(str(tmp_path / "v1")).state_dict()
        assert all(torch.equal(loaded[key], expected[key]) for key in expected)
        assert not all(torch.equal(loaded[key], newest[key]) for key in expected)
        assert len(pretrained_tokenizer.load(name, of_model=True)) > 1


def test_unknown_revision_is_named(two_revisions):
    for load in (pretrained.load, pretrained_tokenizer.load):
        with pytest.raises(
            BadInput, match="@v9: .*cannot be loaded.*v9 is not a valid git identifier"
        ):
            load(f"{two_revisions}@v9")


def test_run_keeps_the_revision_that_it_begins_from(two_revisions, tmp_path):
    recipe = tmp_path / "r.yaml"
    lines = (ROOT / "recipes/own_text.yaml").read_text().splitlines()
    keep = [
        line
        for line in lines
        if not line.startswith(("tokenizer", "n_", "vocab_size", "architecture"))
    ]
    recipe.write_text("\n".join(keep))
    name = f"{two_revisions}@v1"
    flags = {"init_from": name, "sequence_length": "16", "data_files": ["text.txt"]}
    found = pretrained.complete(loading.load_recipe(recipe, flags))
    assert found.model.init_from == name == found.data.tokenizer
    assert found.model.n_embd == 32
    made = pretrained.load_to_train(name, found.model).state_dict()
    expected = pretrained.load(str(tmp_path / "v1")).state_dict()
    assert torch.equal(made["transformer.wte.weight"], expected["transformer.wte.weight"])
