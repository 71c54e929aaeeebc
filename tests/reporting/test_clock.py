"""The clock of training time, and the speed that it measures."""

import pytest

from ursa_minor.reporting.clock import Clock


def test_failed_evaluation_does_not_count(fixed_clock):
    clock = Clock(flops_per_token=10, peak_flops=1000.0, elapsed=5.0)
    fixed_clock.now += 2

    with pytest.raises(ZeroDivisionError), clock.paused():
        fixed_clock.now += 50
        elapsed_in_pause = clock.elapsed  # a checkpoint stores this value
        raise ZeroDivisionError
    fixed_clock.now += 3

    assert elapsed_in_pause == pytest.approx(7.0)
    assert clock.elapsed == pytest.approx(10.0)


def test_speed_is_measured_since_last_read(fixed_clock):
    clock = Clock(flops_per_token=10, peak_flops=1000.0, elapsed=77.0)

    clock.count(60)
    fixed_clock.now += 2
    first_speed = clock.read()
    with clock.paused():
        fixed_clock.now += 9
    clock.count(5)
    clock.count(5)
    fixed_clock.now += 1
    second_speed = clock.read()

    first_expected = {"tokens_per_second": 30.0, "ms_per_step": 2000.0, "mfu": 0.3}
    second_expected = {"tokens_per_second": 10.0, "ms_per_step": 500.0, "mfu": 0.1}
    assert first_speed == pytest.approx(first_expected)
    assert second_speed == pytest.approx(second_expected)


def test_mfu_needs_known_peak_flops():
    clock = Clock(flops_per_token=10, peak_flops=None)

    assert "mfu" not in clock.read()
