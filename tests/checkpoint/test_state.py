"""Training state: saving, early stopping and the count of bad updates."""

import dataclasses
import json

import pytest

from ursa_minor.checkpoint.state import RunState
from ursa_minor.optim.update import Update
from ursa_minor.recipe import keys

SCHEDULE = keys.Schedule(
    max_steps=100, warmup_steps=10, learning_rate=1.0, min_lr_ratio=0.1, lr_scheduler_type="cosine"
)
GOOD = Update(2.0, 1.0, applied=True, overflow=False)
BAD = Update(float("nan"), 1.0, applied=False, overflow=False)
OVERFLOW = Update(2.0, float("inf"), applied=False, overflow=True)


@pytest.fixture
def state():
    """Return the state of a run after one update."""
    state = RunState.begin(SCHEDULE)
    state.record(BAD, 1.0, 0.5)
    state.micro_batch = 4
    state.trackers = {"wandb": "x"}
    return state


def restore(state):
    """Return the state that a checkpoint of this state restores."""
    return RunState.begin(SCHEDULE, json.loads(json.dumps(state.saved())))


def test_saved_state_is_restored(state):
    assert restore(state) == state


def test_planned_length_is_restored(state):
    state.set_length(50, 25, changed_at=20, rate_before=0.4)

    assert restore(state) == state


def test_length_of_recipe_replaces_saved_length(state):
    longer = dataclasses.replace(SCHEDULE, max_steps=300)

    assert RunState.begin(longer, state.saved()).max_steps == 300


@pytest.mark.parametrize(
    ("patience", "step", "evaluated_step", "stops"),
    [
        (2, 6, 6, True),
        (1, 6, 6, True),  # resumed with a smaller patience
        (3, 6, 6, False),
        (0, 6, 6, False),
        (2, 7, 6, False),  # not evaluated at this step
        (2, 100, 100, False),  # max_steps, a planned end
    ],
)
def test_early_stopping_needs_evaluation_at_this_step(patience, step, evaluated_step, stops):
    state = RunState(100, 10, step=step, evaluated_step=evaluated_step, since_best=2)

    assert state.stops_early(patience) == stops
    assert state.has_ended(patience) == (stops or step == 100)


def test_overflow_does_not_change_bad_update_count():
    state = RunState.begin(SCHEDULE)

    counts = []
    for update in (BAD, BAD, OVERFLOW, BAD, GOOD, BAD):
        state.record(update, 0.0, 0.0)
        counts.append(state.bad_in_a_row)

    assert counts == [1, 2, 2, 3, 0, 1]
    assert state.step == 6
    assert state.skipped_updates == 5
