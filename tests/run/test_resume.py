"""What a run continues from, and whether it may do so with another schedule."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from conftest import ROOT

from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import STATE, step_name
from ursa_minor.optim.schedule import Length, learning_rate, shorten
from ursa_minor.recipe import keys, loading
from ursa_minor.run.resume import extended, other_length, saved_task_commits

# An Accelerator would initialize a state that the processes of later tests inherit.
ALONE = SimpleNamespace(is_main_process=True)
SCHEDULE = keys.Schedule(
    max_steps=100,
    warmup_steps=10,
    learning_rate=1.0,
    min_lr_ratio=0.1,
    lr_scheduler_type="wsd",
    decay_ratio=0.3,
)


def saved_state(step, schedule=SCHEDULE, planned=None):
    science = {
        name: value for name, value in dataclasses.asdict(schedule).items() if name != "max_hours"
    }
    return {"step": step, "science": science, "planned": planned and dataclasses.asdict(planned)}


def test_same_schedule_is_no_other_length():
    assert other_length(saved_state(50), SCHEDULE) is None


@pytest.mark.parametrize(
    ("step", "changes", "is_accepted"),
    [
        (70, {"max_steps": 200}, True),
        (71, {"max_steps": 200}, True),  # update 71 had the peak still
        (72, {"max_steps": 200}, False),
        (50, {"max_steps": 60}, False),
        (50, {"warmup_steps": 20}, False),
        (5, {"max_steps": 200, "lr_scheduler_type": "cosine"}, True),  # within the warm-up
        (50, {"max_hours": 3.0}, False),  # the limit is no other length
    ],
)
def test_other_length_needs_equal_rates_so_far(step, changes, is_accepted):
    schedule = dataclasses.replace(SCHEDULE, **changes)
    expected = Length.of(schedule) if is_accepted else None
    assert other_length(saved_state(step), schedule) == expected


def test_longer_run_keeps_the_warmup_that_max_hours_shortened():
    asked = dataclasses.replace(SCHEDULE, max_steps=100_000, warmup_steps=1000)
    planned = shorten(asked, 20, 200)
    longer = dataclasses.replace(asked, max_steps=300, warmup_steps=planned.warmup_steps)
    length = other_length(saved_state(140, asked, planned), longer)
    assert length == dataclasses.replace(planned, max_steps=300)
    trained = [learning_rate(step, asked, planned) for step in range(140)]
    assert [learning_rate(step, longer, length) for step in range(140)] == trained


def test_planned_length_stays_while_the_hours_are_limited():
    planned = shorten(dataclasses.replace(SCHEDULE, max_steps=100_000), 20, 200)
    state = saved_state(50, dataclasses.replace(SCHEDULE, max_steps=100_000), planned)
    assert other_length(state, dataclasses.replace(SCHEDULE, max_steps=300, max_hours=2.0)) is None
    assert other_length(state, dataclasses.replace(SCHEDULE, max_steps=300)).max_steps == 300


def test_extension_by_no_steps_is_refused():
    recipe = loading.load_recipe(ROOT / "recipes" / "own_text.yaml", {"data_files": ["x"]})
    with pytest.raises(BadInput, match="--extend_steps 0: must be at least 1"):
        extended(recipe, 0)


@pytest.mark.parametrize("max_hours", [0.0, 4.0])
def test_max_hours_may_change_within_a_run(max_hours):
    schedule = dataclasses.replace(SCHEDULE, max_steps=100_000)
    state = saved_state(50, schedule, shorten(schedule, 20, 200))
    assert other_length(state, dataclasses.replace(schedule, max_hours=max_hours)) is None


@pytest.mark.parametrize(
    ("start", "expected"),
    [("auto", {"piqa": "newest"}), ("elsewhere", {"piqa": "newest"}), ("none", {})],
)
def test_task_commits_are_those_of_the_newest_checkpoint(start, expected, tmp_path):
    recipe = loading.load_recipe(
        ROOT / "recipes" / "own_text.yaml",
        {"data_files": ["x"], "output_dir": str(tmp_path), "resume_from_checkpoint": start},
    )
    for step, commit in ((10, "older"), (20, "newest")):
        folder = recipe.saving.checkpoints / step_name(step)
        folder.mkdir(parents=True)
        (folder / STATE).write_text(json.dumps({"tasks": {"piqa": commit}}))

    assert saved_task_commits(recipe.saving, ALONE) == expected


def test_task_commits_of_a_first_start_are_those_of_its_source(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / STATE).write_text(json.dumps({"tasks": {"piqa": "source"}}))
    recipe = loading.load_recipe(
        ROOT / "recipes" / "own_text.yaml",
        {
            "data_files": ["x"],
            "output_dir": str(tmp_path / "run"),
            "resume_from_checkpoint": str(source),
        },
    )

    assert saved_task_commits(recipe.saving, ALONE) == {"piqa": "source"}
