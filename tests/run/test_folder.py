"""The run folder: cleaning after a kill, checks before a start, and finished runs."""

import os
from types import SimpleNamespace

import pytest
from conftest import ROOT

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import Finish, read_finish, step_name
from ursa_minor.recipe import keys
from ursa_minor.recipe.loading import load_recipe
from ursa_minor.run import folder

SINGLE_PROCESS = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None)


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """Return the run folder runs/r in the working directory. It does not exist yet."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "r"


def make_recipe(run_dir, **changes) -> keys.Recipe:
    """Return a recipe with this run folder."""
    recipe = load_recipe(
        ROOT / "recipes" / "own_text.yaml", {"data_files": ["x"], "max_steps": 1000}
    )
    return keys.replace(recipe, output_dir=str(run_dir), **changes)


def open_run_folder(recipe: keys.Recipe) -> None:
    """Check and prepare the run folder, as each start does before it trains."""
    folder.check_run_folder(recipe)
    with folder.locked(recipe, SINGLE_PROCESS):
        pass


def write_tracker_files(run_dir) -> None:
    """Write the files of trackers that a run has used."""
    (run_dir / "trackers.json").write_text("{}")
    (run_dir / "tensorboard").mkdir()


# Files of killed runs


def test_partial_recipe_is_deleted(run_dir):
    run_dir.mkdir(parents=True)
    (run_dir / ".recipe.yaml.tmp-0123abcd").write_text("half")

    open_run_folder(make_recipe(run_dir))

    assert sorted(os.listdir(run_dir)) == [".lock", "recipe.yaml"]


def test_temporary_files_are_deleted(run_dir):
    open_run_folder(make_recipe(run_dir))
    (run_dir / "curves.png").touch()
    for name in (
        ".model.tmp-01234567",
        ".curves.png.old-01234567",
        ".metrics.jsonl.tmp-89abcdef",
        "checkpoints",
        ".mine",
    ):
        (run_dir / name).mkdir()
    (run_dir / "checkpoints" / ".step-00000003.tmp-01234567").touch()

    open_run_folder(make_recipe(run_dir))

    expected = [".lock", ".mine", "checkpoints", "curves.png", "recipe.yaml"]
    assert sorted(os.listdir(run_dir)) == expected
    assert not os.listdir(run_dir / "checkpoints")


@pytest.fixture
def old_model(run_dir):
    """Create the folder to which a model was renamed, before the process was killed."""
    open_run_folder(make_recipe(run_dir))
    old_model = run_dir / ".model.old-01234567"
    old_model.mkdir()
    (old_model / "config.json").write_text("{}")
    return old_model


def test_renamed_model_is_restored(run_dir, old_model):
    open_run_folder(make_recipe(run_dir))

    assert os.listdir(run_dir / "model") == ["config.json"]
    assert not old_model.exists()


def test_renamed_model_does_not_replace_new_one(run_dir, old_model):
    (run_dir / "model").mkdir()
    (run_dir / "model" / "new.json").touch()

    open_run_folder(make_recipe(run_dir))

    assert os.listdir(run_dir / "model") == ["new.json"]
    assert not old_model.exists()


# Other recipes in a run folder


def test_same_recipe_keeps_tracker_files(run_dir):
    open_run_folder(make_recipe(run_dir))
    write_tracker_files(run_dir)

    open_run_folder(make_recipe(run_dir))

    assert (run_dir / "trackers.json").exists()
    assert (run_dir / "tensorboard").exists()


def test_run_without_result_accepts_other_recipe(run_dir):
    open_run_folder(make_recipe(run_dir))
    write_tracker_files(run_dir)
    (run_dir / "recipe.yaml").write_text("damaged")

    open_run_folder(make_recipe(run_dir, learning_rate=0.5))

    assert load_recipe(run_dir / "recipe.yaml").schedule.learning_rate == 0.5
    assert not (run_dir / "trackers.json").exists()
    assert not (run_dir / "tensorboard").exists()


@pytest.fixture(
    params=["checkpoints/step-00000003", "model", ".model.old-01234567", "hub/step-00000003"]
)
def run_dir_with_result(request, run_dir):
    """Create a run folder with a checkpoint, a model, a renamed model or a staged push."""
    open_run_folder(make_recipe(run_dir))
    (run_dir / request.param).mkdir(parents=True)
    write_tracker_files(run_dir)
    return run_dir


def test_run_with_result_rejects_other_hyperparameters(run_dir_with_result):
    with pytest.raises(BadInput) as caught:
        folder.check_run_folder(make_recipe(run_dir_with_result, learning_rate=0.5))

    assert "learning_rate = 0.003" in str(caught.value)
    assert "learning_rate = 0.5" in str(caught.value)


def test_run_with_result_accepts_moved_files(run_dir_with_result):
    # The contents of the files are compared elsewhere.
    open_run_folder(make_recipe(run_dir_with_result, data_files=["moved"]))

    assert (run_dir_with_result / "trackers.json").exists()


# Folders that a run cannot use


@pytest.mark.parametrize("name", ["runs", "runs/r/checkpoints", "runs/r/model", "runs/r/hub"])
def test_file_in_place_of_folder_is_rejected(run_dir, tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()

    with pytest.raises(BadInput) as caught:
        folder.check_run_folder(make_recipe(run_dir))

    message = str(caught.value)
    assert message.startswith(f"output_dir = {run_dir}: ")
    assert f"{file} is not a folder" in message


def test_second_trainer_is_rejected(run_dir):
    run_dir.mkdir(parents=True)

    with files.locked(run_dir / ".lock", ""), pytest.raises(BadInput) as caught:
        open_run_folder(make_recipe(run_dir))

    assert f"process {os.getpid()} is training" in str(caught.value)


@pytest.mark.parametrize("name", ["thesis.txt", ".hidden"])
def test_folder_with_other_files_is_rejected(run_dir, name):
    run_dir.mkdir(parents=True)
    (run_dir / name).write_text("x")

    with pytest.raises(BadInput, match="not a run folder"):
        folder.check_run_folder(make_recipe(run_dir))

    assert os.listdir(run_dir) == [name]


# Finished runs

FINISHED = Finish(step=8, has_checkpoint=False)
FINISHED_WITH_CHECKPOINT = Finish(step=8)
STOPPED_EARLY = Finish(step=8, since_best=2, has_checkpoint=False)


def make_stopped_run(run_dir, finish: Finish | None, checkpoints: list[int]) -> None:
    """Create a run folder with a model.

    Args:
        run_dir: the run folder.
        finish: the contents of finished.json, or None if the run was killed before it was written.
        checkpoints: the steps of the checkpoints.
    """
    (run_dir / "model").mkdir(parents=True)
    if finish:
        finish.write(run_dir)
    for step in checkpoints:
        (run_dir / "checkpoints" / step_name(step)).mkdir(parents=True)


@pytest.mark.parametrize(
    ("finish", "checkpoints", "changes"),
    [
        (FINISHED, [], {}),
        (FINISHED, [4], {}),
        (FINISHED, [], {"early_stopping_patience": 5, "save_steps": 9}),
        (STOPPED_EARLY, [], {"early_stopping_patience": 2}),
    ],
    ids=["no checkpoint", "best checkpoint", "other intervals", "early stopping"],
)
def test_finished_run_has_nothing_left(run_dir, finish, checkpoints, changes):
    make_stopped_run(run_dir, finish, checkpoints)

    reason = folder.nothing_left(make_recipe(run_dir, **changes), SINGLE_PROCESS)

    assert "finished at step 8" in reason


def test_model_without_checkpoints_has_nothing_left(run_dir):
    make_stopped_run(run_dir, None, [])

    reason = folder.nothing_left(make_recipe(run_dir), SINGLE_PROCESS)

    assert "nothing is left to train" in reason


CHECKPOINT = "runs/r/checkpoints/step-00000004"


@pytest.mark.parametrize(
    ("finish", "changes"),
    [
        (None, {}),
        (FINISHED_WITH_CHECKPOINT, {}),
        (STOPPED_EARLY, {"early_stopping_patience": 3}),
        (STOPPED_EARLY, {"resume_from_checkpoint": CHECKPOINT}),
    ],
    ids=["not finished", "last checkpoint is lost", "more patience", "from a checkpoint"],
)
def test_checkpoint_is_trained_further(run_dir, finish, changes):
    make_stopped_run(run_dir, finish, [4])

    assert folder.nothing_left(make_recipe(run_dir, **changes), SINGLE_PROCESS) is None


@pytest.mark.parametrize("finish", [None, FINISHED, FINISHED_WITH_CHECKPOINT, STOPPED_EARLY])
@pytest.mark.parametrize("checkpoints", [[], [4]])
def test_run_without_model_is_not_finished(run_dir, finish, checkpoints):
    make_stopped_run(run_dir, finish, checkpoints)
    (run_dir / "model").rmdir()

    assert folder.nothing_left(make_recipe(run_dir), SINGLE_PROCESS) is None


def test_more_patience_needs_a_checkpoint(run_dir):
    make_stopped_run(run_dir, STOPPED_EARLY, [])

    with pytest.raises(BadInput) as caught:
        folder.nothing_left(make_recipe(run_dir, early_stopping_patience=3), SINGLE_PROCESS)

    assert "early_stopping_patience = 3" in str(caught.value)
    assert "at step 8" in str(caught.value)


def test_finished_run_rejects_other_source(run_dir):
    make_stopped_run(run_dir, STOPPED_EARLY, [])
    source = "runs/other/checkpoints/step-00000004"

    with pytest.raises(BadInput, match="did not start from it"):
        folder.nothing_left(make_recipe(run_dir, resume_from_checkpoint=source), SINGLE_PROCESS)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 1, "more": 2}'])
def test_damaged_finish_file_is_ignored(tmp_path, text):
    (tmp_path / "finished.json").write_text(text)

    assert read_finish(tmp_path) is None
