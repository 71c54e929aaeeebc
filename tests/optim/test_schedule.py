"""The learning rate's shape over a run."""

import pytest

from pretrain.optim import schedule
from pretrain.recipe import keys


def lr(step, warmup_steps=4, max_steps=20, **changes):
    known = {"learning_rate": 2.0, "min_lr_ratio": 0.1, "lr_scheduler_type": "cosine"}
    known |= {"warmup_steps": 0, "max_steps": 1}
    asked = keys.Schedule(**known | changes)  # whose two numbers of steps max_hours may have planned otherwise
    return schedule.learning_rate(step, asked, max_steps=max_steps, warmup_steps=warmup_steps)


def test_first_update_has_nonzero_learning_rate():
    assert [lr(0, warmup_steps=steps) for steps in (0, 1, 4)] == [2.0, 2.0, 0.5]


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_last_update_is_exactly_the_floor(shape):
    for warmup, steps in ((19, 20), (0, 1), (700, 19073)):
        for step in (steps - 1, steps + 5):
            assert lr(step, warmup_steps=warmup, max_steps=steps, lr_scheduler_type=shape) == 2.0 * 0.1


def test_it_rises_in_a_line_to_the_peak_and_falls_in_a_cosine_or_a_line():
    assert [lr(step) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    cosine, line = ([lr(s, 0, 11, lr_scheduler_type=kind) for s in range(11)] for kind in ("cosine", "linear"))
    assert line == pytest.approx([2.0 - 0.18 * step for step in range(11)]) and cosine[5] == pytest.approx(1.1)
    assert cosine[2] > line[2] and cosine == sorted(cosine, reverse=True) and lr(4) == 2.0


def test_wsd_stays_at_the_peak_as_constant_does_and_then_falls_in_a_line_to_the_floor():
    assert {lr(step, lr_scheduler_type="constant") for step in range(4, 20)} == {2.0}
    rates = [lr(step, lr_scheduler_type="wsd", decay_ratio=0.25) for step in range(20)]  # 4 warm-up, 11 stable, 5 down
    assert rates[3:15] == [2.0] * 12
    assert rates[14:] == pytest.approx([2.0 - 1.8 * n / 5 for n in range(6)])
    assert rates[-1] == 2.0 * 0.1
    assert lr(19, lr_scheduler_type="wsd", decay_ratio=0.0) == 2.0 * 0.1
    assert lr(30, lr_scheduler_type="wsd", decay_ratio=1.0, max_steps=20) == 2.0 * 0.1
