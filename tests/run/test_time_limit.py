"""max_hours: the planned length, the wall time and the limit, with times from an injected clock."""

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
def recipe(tmp_path):
    """A recipe of 10,000 updates, 1 hour and no evaluations."""
    (tmp_path / "tiny.yaml").write_text("data_files: [text.txt]\n" + RECIPE)
    tiny = loading.load_recipe(tmp_path / "tiny.yaml")
    idle = {"eval_steps": 0, "sample_steps": 0, "save_steps": 0}
    return keys.replace(tiny, max_steps=10_000, warmup_steps=0, max_hours=1.0, **idle)


@pytest.fixture
def clock():
    return FakeClock()


def make_budget(recipe, clock, *, spent=0.0, is_planned=False, **changes):
    changed = keys.replace(recipe, **changes)
    return TimeBudget(changed, spent=spent, is_planned=is_planned, now=clock)


def train(budget, clock, durations, *, first_step=0, activities=()):
    """Make updates of these durations and return the result of ``plan`` after each.

    Args:
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
        planned.append(budget.plan(first_step + number + 1, share=lambda values: values))
    return planned


def expected_steps(elapsed, per_update, *, step=20, limit=3600.0, reserve=0.0):
    return step + int(((limit - elapsed) * (1 - MARGIN) - reserve) / per_update)


def test_length_is_planned_once_after_twenty_updates(recipe, clock, caplog):
    budget = make_budget(recipe, clock)
    with caplog.at_level("INFO", "ursa_minor"):
        planned = train(budget, clock, [2.0] * 60)
    assert planned[:19] == [None] * 19
    assert planned[19] == Length(
        expected_steps(40, 2.0), 0, changed_at=20, rate_before=planned[19].rate_before
    )
    assert planned[20:] == [None] * 40
    assert "an update takes 2,000 ms (median of 20)" in caplog.text
    assert f"the run takes {planned[19].max_steps:,} of the 10,000 steps" in caplog.text


@pytest.mark.parametrize(
    "slow",
    [{7: 6.0}, {0: 30.0, 1: 12.0, 2: 4.0}, {19: 60.0}, dict.fromkeys(range(9), 5.0)],
    ids=["one stall", "compilation", "stall in the last update", "nine slow updates"],
)
def test_a_stall_hardly_changes_the_planned_length(recipe, clock, slow):
    durations = [slow.get(number, 0.5) for number in range(20)]
    (length,) = filter(None, train(make_budget(recipe, clock), clock, durations))
    assert length.max_steps == expected_steps(sum(durations), 0.5)


def test_time_for_evaluations_and_checkpoints_is_reserved(recipe, clock):
    intervals = {
        "eval_steps": 50,
        "sample_steps": 300,
        "task_steps": 1000,
        "save_steps": 15,
        "tasks": ["piqa"],
    }
    budget = make_budget(recipe, clock, **intervals)
    before = [
        (0, time_limit.VALIDATION, 12.0),
        (0, time_limit.SAMPLES, 3.0),
        (0, time_limit.TASKS, 40.0),
    ]
    saved = [(15, time_limit.CHECKPOINT, 2.0)]
    (length,) = filter(None, train(budget, clock, [1.0] * 20, activities=[*before, *saved]))

    def total(end):
        evaluations = -(-end // 50) * 12 + -(-end // 300) * 3 + -(-end // 1000) * 40
        checkpoints = (-(-end // 15) - 1) * 2
        return end - 20 + evaluations + checkpoints

    available = (3600 - 22) * (1 - MARGIN)  # what came before the first update does not count
    assert total(length.max_steps) <= available < total(length.max_steps + 1)


def test_a_checkpoint_per_validation_is_reserved_for_the_best(recipe, clock):
    changes = {
        "eval_steps": 100,
        "save_steps": 1000,
        "max_hours": 0.5,
        "load_best_model_at_end": True,
    }
    budget = make_budget(recipe, clock, **changes)
    saved = [(10, time_limit.CHECKPOINT, 50.0)]
    (length,) = filter(None, train(budget, clock, [1.0] * 20, activities=saved))
    # 1730 s remain, 1643 s of them are planned: 993 updates and 13 checkpoints, one for each of
    # the validations at 100, ..., 1000 and 1013 and two at 1000 and 1013.
    assert length.max_steps == 1013


def test_unknown_durations_count_as_zero(recipe, clock):
    budget = make_budget(recipe, clock, eval_steps=100, save_steps=100)
    (length,) = filter(None, train(budget, clock, [1.0] * 20))
    assert length.max_steps == expected_steps(20, 1.0)


def test_evaluation_at_the_planning_step_is_reserved(recipe, clock):
    """It is due after the plan: the loop evaluates before the next update."""
    budget = make_budget(recipe, clock, eval_steps=20, max_hours=0.1)
    (length,) = filter(
        None, train(budget, clock, [1.0] * 20, activities=[(0, time_limit.VALIDATION, 30.0)])
    )
    # 340 s remain, 323 of them are planned: 113 updates, validated at 20, 40, ..., 120 and 133.
    assert length.max_steps == 133


@pytest.mark.parametrize(
    ("changes", "durations", "expected"),
    [
        ({"max_steps": 200, "warmup_steps": 20}, [0.1] * 20, Length(200, 20)),  # the whole run fits
        ({"max_steps": 1000, "warmup_steps": 900}, [0.1] * 20, Length(1000, 900)),
        ({"warmup_steps": 100}, [2.0] * 20, Length(expected_steps(40, 2.0), 100)),
    ],
)
def test_planned_length_in_special_cases(recipe, clock, changes, durations, expected):
    planned = train(make_budget(recipe, clock, **changes), clock, durations)[-1]
    assert (planned.max_steps, planned.warmup_steps) == (expected.max_steps, expected.warmup_steps)


@pytest.mark.parametrize(
    ("changes", "state", "updates"),
    [
        ({}, {"is_planned": True}, 30),  # resumed after the plan
        ({"max_hours": 0.0}, {}, 30),
        ({"max_steps": 12}, {}, 12),  # shorter than the planning
        ({"max_steps": 20}, {}, 20),
        ({"max_hours": 0.0055}, {}, 20),  # no update fits into the 0.8 s that remain
        ({"max_hours": 0.001}, {}, 20),  # the limit was passed before
    ],
)
def test_no_length_is_planned(recipe, clock, changes, state, updates):
    budget = make_budget(recipe, clock, **state, **changes)
    assert train(budget, clock, [1.0] * updates) == [None] * updates


def test_resume_before_the_plan_measures_twenty_updates_again(recipe, clock):
    budget = make_budget(recipe, clock, spent=600.0)
    planned = train(budget, clock, [2.0] * 20, first_step=15)
    assert planned[-1].max_steps == expected_steps(640, 2.0, step=35)


def test_all_processes_receive_the_plan_of_the_main_process(recipe):
    plans = {}
    shared = []

    def share(values):
        shared.extend(values)
        values[:] = shared[:1]

    for rank, seconds in enumerate((2.0, 7.0)):  # the main process comes first
        clock = FakeClock()
        budget = make_budget(recipe, clock, warmup_steps=1000)
        for step in range(1, 21):
            budget.start()
            clock.sleep(seconds)
            budget.count(time_limit.UPDATE)
            plans[rank] = budget.plan(step, share)
    assert plans[0] == plans[1]
    assert plans[0].max_steps == expected_steps(40, 2.0)


def test_wall_time_runs_from_the_first_update_and_over_resumes(recipe, clock):
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
def test_limit_is_reached_when_the_hours_are_used_up(recipe, clock, max_hours, is_used_up):
    budget = make_budget(recipe, clock, spent=3000.0, max_hours=max_hours)
    budget.start()
    clock.sleep(600.0)
    assert budget.is_used_up == is_used_up


@pytest.mark.parametrize(
    ("changes", "spent", "command"),
    [
        ({"output_dir": "runs/a b"}, 3600.0, "--recipe 'runs/a b/recipe.yaml' --max_hours 2"),
        (
            {"run_name": "r", "output_dir": None},
            36000.0,
            "--recipe runs/r/recipe.yaml --max_hours 20",
        ),
        (
            {"run_name": "r", "output_dir": None, "resume_from_checkpoint": "none"},
            0.0,
            "--recipe runs/r/recipe.yaml --max_hours 2 --resume_from_checkpoint auto",
        ),
    ],
)
def test_stop_message_names_a_command_that_continues(recipe, clock, changes, spent, command):
    message = make_budget(recipe, clock, spent=spent, **changes).stop_message(14)
    assert message.startswith("max_hours = 1 is used up after step 14.")
    assert message.endswith(f"python train.py {command}")
