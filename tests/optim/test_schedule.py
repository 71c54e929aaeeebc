"""Learning rates of all updates, compared with formulas and with Transformers' schedules."""

import itertools
import math

import pytest
import torch
from transformers import (
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from ursa_minor.optim.schedule import Length, decay_start_step, learning_rate, shorten
from ursa_minor.recipe import keys

PEAK = 2.0
FALLING = ("cosine", "linear", "wsd")


def make_schedule(**changes):
    """Make a cosine schedule of 20 updates with 4 warm-up updates, and these changes."""
    values = {
        "learning_rate": PEAK,
        "min_lr_ratio": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "max_steps": 20,
    }
    return keys.Schedule(**values | changes)


def rates(schedule, length=None, stop=None):
    """Return the learning rate of each update."""
    max_steps = length.max_steps if length else schedule.max_steps
    return [learning_rate(step, schedule, length) for step in range(stop or max_steps)]


def closed_form(step, schedule):
    """Return the learning rate, written independently of the code under test."""
    total, warmup = schedule.max_steps, schedule.warmup_steps
    if step < warmup:
        return PEAK * (step + 1) / warmup
    if schedule.lr_scheduler_type == "constant":
        return PEAK
    begin = warmup
    if schedule.lr_scheduler_type == "wsd":
        begin = max(warmup, total - round(schedule.decay_ratio * total))
    if step <= begin:
        return PEAK
    fraction = (step - begin) / (total - begin)
    if schedule.lr_scheduler_type == "cosine":
        fraction = math.sin(0.5 * math.pi * fraction) ** 2
    return PEAK - (PEAK - PEAK * schedule.min_lr_ratio) * fraction


@pytest.mark.parametrize(
    ("shape", "decay_ratio"),
    [
        ("cosine", 0.2),
        ("linear", 0.2),
        ("constant", 0.2),
        ("wsd", 0.0),
        ("wsd", 0.25),
        ("wsd", 1.0),
    ],
)
@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    ("max_steps", "warmup_steps"), [(1, 0), (1, 1), (2, 1), (20, 0), (20, 4), (20, 19), (20, 20)]
)
def test_every_rate_equals_closed_form(shape, min_lr_ratio, max_steps, warmup_steps, decay_ratio):
    schedule = make_schedule(
        lr_scheduler_type=shape,
        min_lr_ratio=min_lr_ratio,
        max_steps=max_steps,
        warmup_steps=warmup_steps,
        decay_ratio=decay_ratio,
    )
    expected = [closed_form(step, schedule) for step in range(max_steps)]
    assert rates(schedule) == pytest.approx(expected, rel=1e-12)
    assert min(rates(schedule)) > 0.0  # every update has an effect


@pytest.mark.parametrize("shape", FALLING)
@pytest.mark.parametrize("warmup_steps", [0, 6])
def test_rates_after_warmup_equal_transformers(shape, warmup_steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    max_steps = 50
    if shape == "cosine":
        reference = get_cosine_schedule_with_warmup(optimizer, warmup_steps, max_steps)
    elif shape == "linear":
        reference = get_linear_schedule_with_warmup(optimizer, warmup_steps, max_steps)
    else:
        decay_steps = round(0.3 * max_steps)
        reference = get_wsd_schedule(
            optimizer, warmup_steps, decay_steps, max_steps, decay_type="linear"
        )
    schedule = make_schedule(
        lr_scheduler_type=shape,
        max_steps=max_steps,
        warmup_steps=warmup_steps,
        min_lr_ratio=0.0,
        decay_ratio=0.3,
    )
    for step in range(max_steps + 1):
        if step >= warmup_steps:
            expected = pytest.approx(reference.get_last_lr()[0], rel=1e-12, abs=1e-12)
            assert learning_rate(step, schedule) == expected, step
        optimizer.step()
        reference.step()


@pytest.mark.parametrize("shape", FALLING)
@pytest.mark.parametrize(("max_steps", "warmup_steps"), [(1, 0), (20, 20), (19073, 700)])
def test_minimum_is_reached_exactly_at_max_steps(shape, max_steps, warmup_steps):
    schedule = make_schedule(
        lr_scheduler_type=shape, max_steps=max_steps, warmup_steps=warmup_steps
    )
    for step in (max_steps, max_steps + 5):
        assert learning_rate(step, schedule) == PEAK * 0.1
    assert learning_rate(max_steps - 1, schedule) > PEAK * 0.1


def test_wsd_is_at_peak_before_its_decay():
    schedule = make_schedule(lr_scheduler_type="wsd", decay_ratio=0.25)
    assert decay_start_step(schedule, Length.of(schedule)) == 15
    assert rates(schedule)[3:16] == [PEAK] * 13
    assert rates(schedule)[15:] == pytest.approx([2.0 - 1.8 * step / 5 for step in range(5)])
    longer = make_schedule(lr_scheduler_type="wsd", decay_ratio=0.25, max_steps=40)
    assert rates(longer)[:16] == rates(schedule)[:16]


@pytest.mark.parametrize(
    ("changes", "begin"),
    [
        ({"decay_ratio": 1.0, "warmup_steps": 4}, 4),  # not before the end of the warm-up
        ({"decay_ratio": 1.0, "warmup_steps": 0}, 0),
        ({"decay_ratio": 0.0}, 20),
        ({"lr_scheduler_type": "constant"}, 20),
        ({"lr_scheduler_type": "cosine"}, None),
        ({"lr_scheduler_type": "linear"}, None),
    ],
)
def test_decay_begins_at_documented_step(changes, begin):
    schedule = make_schedule(**{"lr_scheduler_type": "wsd"} | changes)
    assert decay_start_step(schedule, Length.of(schedule)) == begin


# A length that max_hours has planned

LONG = 100_000


@pytest.mark.parametrize("shape", [*FALLING, "constant"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 5, 19, 20, 21, 50, 1000])
@pytest.mark.parametrize("planned_steps", [22, 24, 30, 60, 148, 500, 5000])
def test_planned_length_keeps_learning_rate_continuous(shape, warmup_steps, planned_steps):
    schedule = make_schedule(
        lr_scheduler_type=shape, max_steps=LONG, warmup_steps=warmup_steps, decay_ratio=0.9
    )
    previous = rates(schedule, stop=20)
    length = shorten(schedule, 20, planned_steps)
    following = [learning_rate(step, schedule, length) for step in range(20, planned_steps + 1)]

    # No step is larger than those of a rise over 10 updates (or half of the remaining ones),
    # or than the steepest step of a cosine over the updates after the warm-up.
    remaining = planned_steps - 20
    steepest_rise = PEAK / min(10, -(-remaining // 2))
    falling = max(1, planned_steps - max(20, length.warmup_steps))
    steepest_fall = 0.9 * PEAK * math.pi / 2 / falling
    changes = [after - before for before, after in itertools.pairwise([previous[-1], *following])]
    assert max(changes) <= steepest_rise + 1e-9
    assert min(changes) >= -steepest_fall - 1e-9
    if warmup_steps > 20:
        rise = following[: length.warmup_steps - 20]
        assert rise == sorted(rise)
        assert rise[-1] == pytest.approx(PEAK)
        assert length.warmup_steps <= max(planned_steps // 4, 30)
    if shape != "constant":
        assert following[-1] == pytest.approx(PEAK * 0.1)


def test_shortened_warmup_rises_linearly_from_its_rate():
    schedule = make_schedule(max_steps=LONG, warmup_steps=50)
    length = shorten(schedule, 20, 148)
    assert length == Length(148, 37, changed_at=20, rate_before=PEAK * 20 / 50)
    slope = (PEAK - PEAK * 0.4) / 17
    expected = [PEAK * 0.4 + slope * number for number in range(1, 18)]
    assert rates(schedule, length)[20:37] == pytest.approx(expected)
    assert rates(schedule, length)[:20] == pytest.approx(rates(schedule)[:20])


@pytest.mark.parametrize(
    ("changes", "planned_steps"),
    [
        ({"warmup_steps": 100}, 5000),  # the warm-up still runs and need not be shortened
        ({"warmup_steps": 20}, 5000),
        ({"warmup_steps": 4, "lr_scheduler_type": "wsd"}, 5000),  # before its decay
        ({"warmup_steps": 4, "lr_scheduler_type": "constant"}, 5000),
        ({"warmup_steps": 4, "max_steps": 5000}, 5000),  # the whole run fits
        ({"warmup_steps": 2000, "max_steps": 5000}, 5000),
    ],
)
def test_planned_run_equals_one_given_that_length(changes, planned_steps):
    schedule = make_schedule(**{"max_steps": LONG} | changes)
    length = shorten(schedule, 20, planned_steps)
    expected = make_schedule(**changes | {"max_steps": planned_steps})

    assert length == Length.of(expected)
    assert rates(schedule, length) == rates(expected)


def test_wsd_planned_within_decay_can_be_extended():
    schedule = make_schedule(
        lr_scheduler_type="wsd", max_steps=LONG, warmup_steps=4, decay_ratio=0.5
    )
    length = shorten(schedule, 20, 30)  # 30 updates from the start would have decayed from step 15
    assert length == Length(30, 4, changed_at=20, rate_before=PEAK)
    assert decay_start_step(schedule, length) == 20
    assert rates(schedule, length)[4:21] == [PEAK] * 17
    assert rates(schedule, length)[29] == pytest.approx(PEAK * (0.1 + 0.9 * 0.1))
