"""max_hours: the schedule that the measured speed lets fit."""

import pytest

from pretrain.machine.time_budget import MEASURING, SETTLING, TimeBudget
from pretrain.recipe import keys

FIRST = SETTLING + MEASURING


def budget(*, max_steps=10_000, warmup_steps=1000, max_hours=1.0, planned=False):
    values = {"learning_rate": 1e-3, "min_lr_ratio": 0.1, "lr_scheduler_type": "cosine"}
    values |= {"max_steps": max_steps, "warmup_steps": warmup_steps, "max_hours": max_hours}
    return TimeBudget(keys.Schedule(**values), planned=planned)


def run(made, seconds_per_step, *, start=0, elapsed=0.0):
    """Make the first updates; return what was planned after each."""
    steps = range(1, FIRST + 1)
    return [made.plan(start + step, elapsed + step * seconds_per_step, lambda tensor: tensor) for step in steps]


def test_the_planned_run_takes_the_hours_that_were_given(caplog):
    with caplog.at_level("INFO", "pretrain"):
        found = run(budget(), 2.0, elapsed=120.0)  # of the compiler, in the hours
    assert [plan is not None for plan in found] == [False] * (FIRST - 1) + [True]
    max_steps, warmup_steps = found[-1]
    assert max_steps == FIRST + (3600 - 120 - 2 * FIRST) // 2
    assert warmup_steps == max_steps // 4  # of the 1,000 that were asked for
    assert "2,000 ms a step" in caplog.text and "1,740 of the 10,000 steps" in caplog.text
    resumed, _ = run(budget(), 2.0, start=10, elapsed=1000.0)[-1]  # before its plan
    assert resumed == pytest.approx(10 + FIRST + (3600 - 1000 - 2 * FIRST) / 2, abs=1)


def test_a_run_that_fits_keeps_its_length_and_one_whose_hours_are_over_ends_where_it_stands():
    assert run(budget(max_steps=200, warmup_steps=20), 0.1)[-1] == (200, 20)
    assert run(budget(warmup_steps=100), 2.0)[-1] == (pytest.approx(1800, abs=1), 100)
    over = run(budget(max_steps=200, warmup_steps=50, max_hours=0.001), 5.0)
    assert over[-1] == (FIRST, FIRST)  # the warm-up that was done is not taken back


def test_a_plan_is_made_once_and_kept_by_a_resumed_run_and_without_a_limit_none_is():
    made = budget()
    assert run(made, 2.0)[-1] and not any(run(made, 9.0, start=FIRST))
    assert not any(run(budget(planned=True), 9.0, start=50)) and not any(run(budget(max_hours=0.0), 1.0))


def test_all_processes_plan_from_the_mean_of_their_clocks():
    made, asked = budget(), []
    found = [made.plan(step, float(step), lambda t: asked.append(t) or t * 2) for step in range(1, FIRST + 1)]
    assert len(asked) == 1 and found[-1][0] == FIRST + (3600 - 2 * FIRST) // 2
