"""max_hours: the planned length, the wall time and the limit, with a fake clock."""

import math

import pytest
from conftest import RECIPE

from ursa_minor.optim.schedule import Length
from ursa_minor.recipe import keys, loading
from ursa_minor.run import time_limit
from ursa_minor.run.time_limit import MARGIN, TimeBudget


class FakeClock:
    """A clock that only ``sleep`` moves."""

    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds


@pytest.fixture
def recipe(tmp_path) -> keys.Recipe:
    """Return a recipe of 10,000 updates, 1 hour and no evaluations."""
    path = tmp_path / "tiny.yaml"
    path.write_text("data_files: [text.txt]\n" + RECIPE)
    changes = {
        "max_steps": 10_000,
        "warmup_steps": 0,
        "max_hours": 1.0,
        "eval_steps": 0,
        "sample_steps": 0,
        "save_steps": 0,
    }
    return keys.replace(loading.load_recipe(path), **changes)


@pytest.fixture
def clock() -> FakeClock:
    """Return a clock that only the test moves."""
    return FakeClock()


def make_budget(recipe, clock, *, spent=0.0, is_planned=False, **changes) -> TimeBudget:
    """Return the time budget of a run with these changes of the recipe."""
    changed = keys.replace(recipe, **changes)
    return TimeBudget(changed, spent=spent, is_planned=is_planned, now=clock)


def share_nothing(values):
    """Share values between the processes of a run with one process."""
    return values


def train(budget, clock, durations, *, first_step=0, activities=()) -> list[Length | None]:
    """Make updates of these durations and return the result of ``plan`` after each.

    Args:
        budget: the time budget.
        clock: its clock.
        durations: the seconds of each update.
        first_step: the step at which the run starts.
        activities: tuples of the number of updates, an activity and the seconds it takes then.
    """
    planned = []
    for number, seconds in enumerate(durations):
        for after, activity, duration in activities:
            if after == number:
                clock.sleep(duration)
                budget.count(activity)
        budget.start()
        clock.sleep(seconds)
        budget.count(time_limit.UPDATE)
        planned.append(budget.plan(first_step + number + 1, share=share_nothing))
    return planned


def planned_length(budget, clock, durations, *, activities=()) -> Length:
    """Make updates of these durations and return the only planned length."""
    planned = train(budget, clock, durations, activities=activities)
    (length,) = [length for length in planned if length is not None]
    return length


def expected_steps(elapsed, per_update, *, step=20) -> int:
    """Return the number of steps that fit into one hour.

    Args:
        elapsed: the seconds that are spent.
        per_update: the seconds per update.
        step: the current step.
    """
    return step + int((3600 - elapsed) * (1 - MARGIN) / per_update)


def test_length_is_planned_after_twenty_updates(recipe, clock, caplog):
    budget = make_budget(recipe, clock)

    with caplog.at_level("INFO", "ursa_minor"):
        planned = train(budget, clock, [2.0] * 60)

    length = planned[19]
    assert planned == [None] * 19 + [length] + [None] * 40
    assert length.max_steps == expected_steps(40, 2.0)
    assert length.warmup_steps == 0
    assert length.changed_at == 20
    assert "an update takes 2,000 ms (median of 20)" in caplog.text
    assert f"the run takes {length.max_steps:,} of the 10,000 steps" in caplog.text


@pytest.mark.parametrize(
    "slow_updates",
    [{7: 6.0}, {0: 30.0, 1: 12.0, 2: 4.0}, {19: 60.0}, dict.fromkeys(range(9), 5.0)],
    ids=["one stall", "compilation", "stall in the last update", "nine slow updates"],
)
def test_stall_hardly_changes_planned_length(recipe, clock, slow_updates):
    durations = [slow_updates.get(number, 0.5) for number in range(20)]

    length = planned_length(make_budget(recipe, clock), clock, durations)

    assert length.max_steps == expected_steps(sum(durations), 0.5)


def test_time_for_other_activities_is_reserved(recipe, clock):
    budget = make_budget(
        recipe,
        clock,
        eval_steps=50,
        sample_steps=300,
        task_steps=1000,
        save_steps=15,
        tasks=["piqa"],
    )
    activities = [
        (0, time_limit.VALIDATION, 12.0),
        (0, time_limit.SAMPLES, 3.0),
        (0, time_limit.TASKS, 40.0),
        (15, time_limit.CHECKPOINT, 2.0),
    ]

    length = planned_length(budget, clock, [1.0] * 20, activities=activities)

    def remaining_seconds(max_steps: int) -> int:
        validations = math.ceil(max_steps / 50) * 12
        samples = math.ceil(max_steps / 300) * 3
        tasks = math.ceil(max_steps / 1000) * 40
        checkpoints = (math.ceil(max_steps / 15) - 1) * 2
        updates = max_steps - 20
        return updates + validations + samples + tasks + checkpoints

    # The activities before the first update do not count.
    available = (3600 - 22) * (1 - MARGIN)
    assert remaining_seconds(length.max_steps) <= available
    assert remaining_seconds(length.max_steps + 1) > available


def test_best_checkpoint_is_reserved_per_validation(recipe, clock):
    budget = make_budget(
        recipe,
        clock,
        eval_steps=100,
        save_steps=1000,
        max_hours=0.5,
        load_best_model_at_end=True,
    )
    activities = [(10, time_limit.CHECKPOINT, 50.0)]

    length = planned_length(budget, clock, [1.0] * 20, activities=activities)

    # 1730 s remain, 1643 s of them are planned: 993 updates and 13 checkpoints, one for each of
    # the validations at 100, ..., 1000 and 1013 and two at 1000 and 1013.
    assert length.max_steps == 1013


def test_kept_checkpoints_are_reserved(recipe, clock):
    points = ["600", "700", "1000000B"]
    budget = make_budget(recipe, clock, max_hours=0.5, keep_checkpoints=points)
    activities = [(10, time_limit.CHECKPOINT, 50.0)]

    length = planned_length(budget, clock, [1.0] * 20, activities=activities)

    # 1730 s remain, 1643 s of them are planned: 1543 updates and 2 checkpoints.
    assert length.max_steps == 1563


def test_unknown_durations_count_as_zero(recipe, clock):
    budget = make_budget(recipe, clock, eval_steps=100, save_steps=100)

    length = planned_length(budget, clock, [1.0] * 20)

    assert length.max_steps == expected_steps(20, 1.0)


def test_evaluation_at_planning_step_is_reserved(recipe, clock):
    budget = make_budget(recipe, clock, eval_steps=20, max_hours=0.1)
    activities = [(0, time_limit.VALIDATION, 30.0)]

    length = planned_length(budget, clock, [1.0] * 20, activities=activities)

    # The evaluation at step 20 is due after the plan, because the loop evaluates before the next
    # update. 340 s remain, 323 of them are planned: 113 updates, and validations at 20, 40, ...,
    # 120 and 133.
    assert length.max_steps == 133


@pytest.mark.parametrize(
    ("max_steps", "warmup_steps"), [(200, 20), (1000, 900)], ids=["short", "long warm-up"]
)
def test_run_within_limit_keeps_its_length(recipe, clock, max_steps, warmup_steps):
    budget = make_budget(recipe, clock, max_steps=max_steps, warmup_steps=warmup_steps)

    length = planned_length(budget, clock, [0.1] * 20)

    assert length.max_steps == max_steps
    assert length.warmup_steps == warmup_steps


def test_warmup_that_fits_is_kept(recipe, clock):
    budget = make_budget(recipe, clock, warmup_steps=100)

    length = planned_length(budget, clock, [2.0] * 20)

    assert length.max_steps == expected_steps(40, 2.0)
    assert length.warmup_steps == 100


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({"is_planned": True}, 30),
        ({"max_hours": 0.0}, 30),
        ({"max_steps": 12}, 12),
        ({"max_steps": 20}, 20),
        ({"max_hours": 0.0055}, 20),  # no update fits into the 0.8 s that remain
        ({"max_hours": 0.001}, 20),
    ],
    ids=[
        "resumed after the plan",
        "no limit",
        "ends before the plan",
        "ends at the plan",
        "no update fits",
        "limit has passed",
    ],
)
def test_no_length_is_planned(recipe, clock, options, updates):
    budget = make_budget(recipe, clock, **options)

    planned = train(budget, clock, [1.0] * updates)

    assert planned == [None] * updates


def test_resume_before_plan_measures_updates_again(recipe, clock):
    budget = make_budget(recipe, clock, spent=600.0)

    planned = train(budget, clock, [2.0] * 20, first_step=15)

    assert planned[-1].max_steps == expected_steps(640, 2.0, step=35)


def test_all_processes_use_the_same_plan(recipe):
    shared_values = []

    def share_from_main_process(values):
        shared_values.extend(values)
        values[:] = shared_values[:1]

    plans = []
    for seconds_per_update in (2.0, 7.0):  # the main process is the first one
        clock = FakeClock()
        budget = make_budget(recipe, clock, warmup_steps=1000)
        for step in range(1, 21):
            budget.start()
            clock.sleep(seconds_per_update)
            budget.count(time_limit.UPDATE)
            plan = budget.plan(step, share_from_main_process)
        plans.append(plan)

    assert plans[0] == plans[1]
    assert plans[0].max_steps == expected_steps(40, 2.0)


def test_wall_time_starts_with_first_update(recipe, clock):
    budget = make_budget(recipe, clock, spent=100.0)

    clock.sleep(50.0)
    budget.count(time_limit.VALIDATION)
    assert budget.seconds == 100.0
    budget.start()
    clock.sleep(2.0)
    budget.count(time_limit.UPDATE)
    clock.sleep(7.0)
    budget.count(time_limit.VALIDATION)
    budget.start()

    assert budget.seconds == 109.0


@pytest.mark.parametrize(("max_hours", "is_used_up"), [(1.0, True), (1.01, False), (0.0, False)])
def test_limit_ends_run_after_max_hours(recipe, clock, max_hours, is_used_up):
    budget = make_budget(recipe, clock, spent=3000.0, max_hours=max_hours)

    budget.start()
    clock.sleep(600.0)

    assert budget.is_used_up == is_used_up


@pytest.mark.parametrize(
    ("changes", "spent", "flags"),
    [
        ({"output_dir": "runs/a b"}, 3600.0, "--recipe 'runs/a b/recipe.yaml' --max_hours 2"),
        ({}, 36000.0, "--recipe runs/r/recipe.yaml --max_hours 20"),
        (
            {"resume_from_checkpoint": "none"},
            0.0,
            "--recipe runs/r/recipe.yaml --max_hours 2 --resume_from_checkpoint auto",
        ),
    ],
    ids=["output_dir", "run_name", "resume_from_checkpoint"],
)
def test_stop_message_contains_resume_command(recipe, clock, changes, spent, flags):
    names = {"run_name": "r", "output_dir": None}
    budget = make_budget(recipe, clock, spent=spent, **names | changes)

    message = budget.stop_message(14)

    assert message.startswith("max_hours = 1 is used up after step 14.")
    assert message.endswith(f"python train.py {flags}")
