"""The clock of training time, and the speed by it."""

import pytest

from ursa_minor.reporting.clock import Clock


def test_paused_time_does_not_count_neither_inside_nor_when_the_evaluation_fails(fixed_clock):
    made = Clock(flops_per_token=10, peak_flops=1000.0, elapsed=5.0)
    fixed_clock.now += 2
    with pytest.raises(ZeroDivisionError), made.paused():
        fixed_clock.now += 50
        assert made.elapsed == pytest.approx(7.0)  # what a checkpoint stores
        raise ZeroDivisionError
    fixed_clock.now += 3
    assert made.elapsed == pytest.approx(10.0)


def test_speed_and_mfu_are_of_the_time_since_the_last_read(fixed_clock):
    made = Clock(flops_per_token=10, peak_flops=1000.0, elapsed=77.0)
    made.count(60)
    fixed_clock.now += 2
    assert made.read() == pytest.approx(
        {"tokens_per_second": 30.0, "ms_per_step": 2000.0, "mfu": 0.3}
    )
    with made.paused():
        fixed_clock.now += 9
    made.count(5)
    made.count(5)
    fixed_clock.now += 1
    assert made.read() == pytest.approx(
        {"tokens_per_second": 10.0, "ms_per_step": 500.0, "mfu": 0.1}
    )
    assert "mfu" not in Clock(flops_per_token=10, peak_flops=None).read()
