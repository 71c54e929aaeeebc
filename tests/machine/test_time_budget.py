"""max_hours: the schedule that the measured speed lets fit."""

import pytest

from pretrain.machine.time_budget import MEASURING, SETTLING, Horizon

FIRST = SETTLING + MEASURING


def run(horizon, seconds_per_step, *, start=0, steps=FIRST, elapsed=0.0, compiling=0.0):
    """Make these updates; return what was said."""
    said = []
    elapsed += compiling
    for step in range(start + 1, start + steps + 1):
        elapsed += seconds_per_step
        said.append(horizon.plan(step, elapsed, lambda tensor: tensor))
    return said


def test_without_a_limit_the_schedule_is_the_recipes():
    horizon = Horizon(max_steps=100, warmup_steps=10)
    assert not any(run(horizon, 1.0, steps=100)) and horizon.planned is None
    assert (horizon.max_steps, horizon.warmup_steps) == (100, 10)


def test_the_planned_run_takes_the_hours_that_were_given():
    horizon = Horizon(max_steps=10_000, warmup_steps=1000, max_hours=1.0)
    said = run(horizon, 2.0, compiling=120.0)
    assert [text is not None for text in said] == [False] * (FIRST - 1) + [True]
    assert horizon.max_steps == FIRST + (3600 - 120 - 2 * FIRST) // 2  # the compiler's time is in the hours
    assert horizon.warmup_steps == horizon.max_steps // 4  # of the 1,000 that were asked for
    assert "2,000 ms a step" in said[-1] and "1,740 of the 10,000 steps" in said[-1]


def test_a_run_that_fits_keeps_its_length():
    horizon = Horizon(max_steps=200, warmup_steps=20, max_hours=1.0)
    run(horizon, 0.1)
    assert horizon.planned == [200, 20]


def test_hours_that_are_over_end_the_run_where_it_stands():
    horizon = Horizon(max_steps=200, warmup_steps=50, max_hours=0.001)
    run(horizon, 5.0)
    assert horizon.max_steps == FIRST == horizon.warmup_steps  # the warm-up that was done is not taken back


def test_a_warm_up_that_is_short_enough_stays_as_it_was_asked_for():
    horizon = Horizon(max_steps=10_000, warmup_steps=100, max_hours=1.0)
    run(horizon, 2.0)
    assert horizon.max_steps == pytest.approx(1800, abs=1) and horizon.warmup_steps == 100


def test_a_plan_is_made_once_and_kept_by_a_resumed_run():
    horizon = Horizon(max_steps=10_000, warmup_steps=1000, max_hours=1.0)
    run(horizon, 2.0)
    planned = list(horizon.planned)
    assert not any(run(horizon, 9.0, start=FIRST)) and horizon.planned == planned
    resumed = Horizon(max_steps=10_000, warmup_steps=1000, max_hours=1.0, planned=planned)
    assert not any(run(resumed, 9.0, start=50)) and [resumed.max_steps, resumed.warmup_steps] == planned


def test_a_run_resumed_before_its_plan_counts_the_time_of_before():
    horizon = Horizon(max_steps=10_000, warmup_steps=1000, max_hours=1.0)
    run(horizon, 2.0, start=10, elapsed=1000.0)
    assert horizon.max_steps == pytest.approx(10 + FIRST + (3600 - 1000 - 2 * FIRST) / 2, abs=1)


def test_all_processes_plan_from_the_mean_of_their_clocks():
    horizon = Horizon(max_steps=10_000, warmup_steps=1000, max_hours=1.0)
    asked = []
    for step in range(1, FIRST + 1):
        horizon.plan(step, step * 1.0, lambda tensor: asked.append(tensor) or tensor * 2)
    assert len(asked) == 1 and horizon.max_steps == FIRST + (3600 - 2 * FIRST) // 2
