"""Whose a run folder is, what a killed run leaves in it, and what may be done there next."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import Finish, read_finish, step_name
from ursa_minor.recipe import keys
from ursa_minor.recipe.loading import load_recipe
from ursa_minor.run import folder

ALONE = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None)


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "r"


def recipe(run_dir, **changes):
    return keys.replace(
        load_recipe(ROOT / "recipes" / "own_text.yaml", {"data_files": ["x"]}),
        output_dir=str(run_dir),
        **changes,
    )


def begin(asked):
    """Do what each start does before it trains."""
    folder.check_run_folder(asked)
    with folder.locked(asked, ALONE):
        pass


def test_what_kills_left_half_made_is_cleared_and_a_model_that_was_moved_aside_comes_back(run_dir):
    run_dir.mkdir(parents=True)
    (run_dir / ".recipe.yaml.tmp-0123abcd").write_text("half")  # of the first start
    begin(recipe(run_dir))
    for name in (".model.tmp-01234567", ".model.old-01234567", ".curves.png.old-01234567"):
        (run_dir / name).mkdir()
    (run_dir / ".model.old-01234567" / "config.json").write_text("{}")
    (run_dir / "curves.png").touch()
    for name in (".metrics.jsonl.tmp-89abcdef", "checkpoints", ".mine"):
        (run_dir / name).mkdir()
    (run_dir / "checkpoints" / ".step-00000003.tmp-01234567").touch()
    begin(recipe(run_dir))
    kept = [".lock", ".mine", "checkpoints", "curves.png", "model", "recipe.yaml"]
    assert sorted(os.listdir(run_dir)) == kept and not os.listdir(run_dir / "checkpoints")
    assert os.listdir(run_dir / "model") == ["config.json"]
    (run_dir / ".model.old-76543210").mkdir()  # the new one is there
    begin(recipe(run_dir))
    assert sorted(os.listdir(run_dir)) == kept and os.listdir(run_dir / "model") == ["config.json"]


def test_a_run_folder_without_a_result_takes_another_recipe_and_its_curves_begin_anew(run_dir):
    begin(recipe(run_dir))
    (run_dir / "trackers.json").write_text("{}")
    (run_dir / "tensorboard").mkdir()
    begin(recipe(run_dir))
    assert (run_dir / "trackers.json").exists() and (run_dir / "tensorboard").exists()
    (run_dir / "recipe.yaml").write_text("damaged")
    begin(recipe(run_dir, learning_rate=0.5))
    assert load_recipe(run_dir / "recipe.yaml").schedule.learning_rate == 0.5
    assert not (run_dir / "trackers.json").exists() and not (run_dir / "tensorboard").exists()


@pytest.mark.parametrize(
    "result",
    ["checkpoints/step-00000003", "model", ".model.old-01234567", "hub/step-00000003"],
    ids=str,
)
def test_the_science_of_a_run_that_has_left_something_is_fixed(run_dir, result):
    """A checkpoint, sound or damaged or fetched, a model whose checkpoints were deleted, a push that waits."""
    begin(recipe(run_dir))
    (run_dir / result).mkdir(parents=True)
    (run_dir / "trackers.json").write_text("{}")
    with pytest.raises(BadInput, match="learning_rate = 0.003, but .* learning_rate = 0.5"):
        folder.check_run_folder(recipe(run_dir, learning_rate=0.5))
    begin(recipe(run_dir, data_files=["moved"]))  # what it holds is compared instead
    assert (run_dir / "trackers.json").exists()


@pytest.mark.parametrize("name", ["runs", "runs/r/checkpoints", "runs/r/model", "runs/r/hub"])
def test_a_place_that_cannot_be_written_to_is_refused_before_anything_is_prepared(
    run_dir, tmp_path, name
):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(
        BadInput, match=f"^output_dir = {run_dir}: {tmp_path / name} is not a folder that"
    ):
        folder.check_run_folder(recipe(run_dir))


def test_a_second_trainer_in_a_run_folder_is_refused_with_the_pid_of_the_first(run_dir):
    run_dir.mkdir(parents=True)
    with (
        files.locked(run_dir / ".lock", ""),
        pytest.raises(BadInput, match=f"process {os.getpid()} is training there"),
    ):
        begin(recipe(run_dir))


def test_a_folder_of_other_files_is_left_as_it_is(run_dir):
    for name in ("thesis.txt", ".hidden"):
        files.remove(run_dir)
        run_dir.mkdir(parents=True)
        (run_dir / name).write_text("x")
        with pytest.raises(BadInput, match="not a run folder"):
            folder.check_run_folder(recipe(run_dir))
        assert [path.name for path in Path(run_dir).iterdir()] == [name]


FINISHED = Finish(step=8, has_checkpoint=False)
STOPPED = Finish(step=8, since_best=2, has_checkpoint=False)


@pytest.mark.parametrize(
    "finish, checkpoints, changes, expected",
    [
        (FINISHED, [], {}, "finished at step 8"),
        (FINISHED, [4], {}, "finished at step 8"),  # that of the lowest loss
        (FINISHED, [], {"early_stopping_patience": 5, "save_steps": 9}, "finished at step 8"),
        (
            None,
            [],
            {},
            "nothing is left to train",
        ),  # killed before it wrote finished.json, and without checkpoints
        (None, [4], {}, None),
        (
            Finish(step=8),
            [4],
            {},
            None,
        ),  # its last checkpoint is lost: train again from the one before
        (STOPPED, [], {"early_stopping_patience": 2}, "finished at step 8"),
        (STOPPED, [4], {"early_stopping_patience": 3}, None),
        (STOPPED, [4], {"resume_from_checkpoint": "runs/r/checkpoints/step-00000004"}, None),
    ],
)
def test_a_finished_run_has_nothing_left(run_dir, finish, checkpoints, changes, expected):
    (run_dir / "model").mkdir(parents=True)
    if finish:
        finish.write(run_dir)
    for step in checkpoints:
        (run_dir / "checkpoints" / step_name(step)).mkdir(parents=True)
    found = folder.nothing_left(recipe(run_dir, **changes), ALONE)
    assert found is None if expected is None else expected in found
    (run_dir / "model").rmdir()
    assert folder.nothing_left(recipe(run_dir, **changes), ALONE) is None


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"early_stopping_patience": 3},
            "early_stopping_patience = 3: early stopping ended the run in .* at step 8",
        ),
        (
            {"resume_from_checkpoint": "runs/other/checkpoints/step-00000004"},
            "a finished run that did not start from it",
        ),
    ],
)
def test_a_finished_model_is_not_trained_over(run_dir, changes, message):
    (run_dir / "model").mkdir(parents=True)
    STOPPED.write(run_dir)
    with pytest.raises(BadInput, match=message):
        folder.nothing_left(recipe(run_dir, **changes), ALONE)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 1, "more": 2}'])
def test_a_damaged_finish_is_none(tmp_path, text):
    (tmp_path / "finished.json").write_text(text)
    assert read_finish(tmp_path) is None
