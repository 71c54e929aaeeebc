"""Resume a run, with the same schedule or with another length."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from conftest import ROOT

from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import RECIPE, STATE, step_name
from ursa_minor.optim.schedule import Length, learning_rate, shorten
from ursa_minor.recipe import keys, loading
from ursa_minor.run.resume import extended, other_length, saved_task_commits, weights_only_notes

# An Accelerator would initialize a state that the processes of later tests inherit.
MAIN_PROCESS = SimpleNamespace(is_main_process=True)
SCHEDULE = keys.Schedule(
    max_steps=100,
    warmup_steps=10,
    learning_rate=1.0,
    min_lr_ratio=0.1,
    lr_scheduler_type="wsd",
    decay_ratio=0.3,
)
LONG_SCHEDULE = dataclasses.replace(SCHEDULE, max_steps=100_000)


def saved_state(
    step: int, schedule: keys.Schedule = SCHEDULE, planned: Length | None = None
) -> dict:
    """Return the state of a checkpoint.

    Args:
        step: the step of the checkpoint.
        schedule: the schedule of the run.
        planned: the length that max_hours planned, if any.
    """
    hyperparameters = dataclasses.asdict(schedule)
    del hyperparameters["max_hours"]
    planned_values = dataclasses.asdict(planned) if planned else None
    return {"step": step, "science": hyperparameters, "planned": planned_values}


def load_recipe(**values) -> keys.Recipe:
    """Return the recipe own_text with these values."""
    path = ROOT / "recipes" / "own_text.yaml"
    return loading.load_recipe(path, {"data_files": ["x"], **values})


def test_start_despite_weights_only_checkpoints_is_noted(tmp_path):
    for step in (0, 4):
        (tmp_path / step_name(step)).mkdir()

    (note,) = weights_only_notes(tmp_path)

    assert "starts at step 0" in note
    assert f"all checkpoints in {tmp_path}" in note
    assert "keep_optimizer = false" in note
    assert weights_only_notes(tmp_path / "missing") == []


def test_same_schedule_has_no_other_length():
    assert other_length(saved_state(50), SCHEDULE) is None


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (70, {"max_steps": 200}),
        (71, {"max_steps": 200}),
        (5, {"max_steps": 200, "lr_scheduler_type": "cosine"}),
    ],
    ids=["before the decay", "last update before the decay", "within the warm-up"],
)
def test_equal_rates_so_far_permit_other_length(step, changes):
    schedule = dataclasses.replace(SCHEDULE, **changes)

    assert other_length(saved_state(step), schedule) == Length.of(schedule)


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (72, {"max_steps": 200}),
        (50, {"max_steps": 60}),
        (50, {"warmup_steps": 20}),
        (50, {"max_hours": 3.0}),
    ],
    ids=["decay has started", "decay would have started", "warm-up", "limit only"],
)
def test_different_rates_permit_no_other_length(step, changes):
    schedule = dataclasses.replace(SCHEDULE, **changes)

    assert other_length(saved_state(step), schedule) is None


def test_longer_run_keeps_shortened_warmup():
    schedule = dataclasses.replace(LONG_SCHEDULE, warmup_steps=1000)
    planned = shorten(schedule, 20, 200)
    longer = dataclasses.replace(schedule, max_steps=300, warmup_steps=planned.warmup_steps)

    length = other_length(saved_state(140, schedule, planned), longer)

    assert length == dataclasses.replace(planned, max_steps=300)
    rates_so_far = [learning_rate(step, schedule, planned) for step in range(140)]
    assert [learning_rate(step, longer, length) for step in range(140)] == rates_so_far


def test_planned_length_stays_while_hours_are_limited():
    planned = shorten(LONG_SCHEDULE, 20, 200)
    state = saved_state(50, LONG_SCHEDULE, planned)
    without_limit = dataclasses.replace(SCHEDULE, max_steps=300)
    with_limit = dataclasses.replace(without_limit, max_hours=2.0)

    assert other_length(state, with_limit) is None
    assert other_length(state, without_limit).max_steps == 300


@pytest.mark.parametrize("max_hours", [0.0, 4.0])
def test_max_hours_may_change_within_run(max_hours):
    state = saved_state(50, LONG_SCHEDULE, shorten(LONG_SCHEDULE, 20, 200))
    schedule = dataclasses.replace(LONG_SCHEDULE, max_hours=max_hours)

    assert other_length(state, schedule) is None


def test_extension_by_no_steps_is_rejected():
    with pytest.raises(BadInput) as caught:
        extended(load_recipe(), 0)

    assert "--extend_steps 0" in str(caught.value)
    assert "at least 1" in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "flags", "option"),
    [
        ("num_train_epochs: 3", {"num_train_epochs": "2"}, "num_train_epochs = 2"),
        ("max_steps: 12", {"num_train_epochs": "3"}, "num_train_epochs = 3"),
        ("max_steps: 12", {"max_steps": "900"}, "max_steps = 900"),
    ],
)
def test_extension_of_another_length_is_rejected(tmp_path, stated, flags, option):
    (tmp_path / RECIPE).write_text(stated)

    with pytest.raises(BadInput) as caught:
        extended(load_recipe(output_dir=str(tmp_path), **flags), 30)

    (message,) = caught.value.lines
    assert option in message
    assert f"--recipe {tmp_path}/recipe.yaml" in message


@pytest.mark.parametrize(
    ("stated", "flags"),
    [
        ("num_train_epochs: 3", {"num_train_epochs": "3.0"}),
        ("max_steps: 12", {"max_steps": "12"}),
    ],
)
def test_extension_may_repeat_length_of_run(tmp_path, stated, flags):
    (tmp_path / RECIPE).write_text(stated)

    with pytest.raises(BadInput) as caught:
        extended(load_recipe(output_dir=str(tmp_path), **flags), 30)

    (message,) = caught.value.lines
    assert "contains no complete checkpoint" in message


@pytest.mark.parametrize(
    ("start", "expected"),
    [("auto", {"piqa": "newest"}), ("elsewhere", {"piqa": "newest"}), ("none", {})],
)
def test_task_commits_come_from_newest_checkpoint(start, expected, tmp_path):
    recipe = load_recipe(output_dir=str(tmp_path), resume_from_checkpoint=start)
    for step, commit in ((10, "older"), (20, "newest")):
        folder = recipe.saving.checkpoints / step_name(step)
        (folder / STATE).parent.mkdir(parents=True)
        (folder / STATE).write_text(json.dumps({"tasks": {"piqa": commit}}))

    commits = saved_task_commits(recipe.saving, MAIN_PROCESS)

    assert commits == expected


def test_task_commits_of_new_run_come_from_source(tmp_path):
    source = tmp_path / "source"
    (source / STATE).parent.mkdir(parents=True)
    (source / STATE).write_text(json.dumps({"tasks": {"piqa": "source"}}))
    recipe = load_recipe(output_dir=str(tmp_path / "run"), resume_from_checkpoint=str(source))

    commits = saved_task_commits(recipe.saving, MAIN_PROCESS)

    assert commits == {"piqa": "source"}
