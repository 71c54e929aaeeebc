"""A request to stop is noted, whoever it reached and whoever died."""

import os
import signal

import pytest

from pretrain.stopping import SIGNALS, StopRequest


@pytest.fixture
def handlers():
    """Puts back the handlers that a StopRequest replaces."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_noted_and_gives_the_shells_exit_code(handlers, number, code):
    stop = StopRequest()
    assert not stop.agreed()
    os.kill(os.getpid(), number)
    assert stop.agreed()
    assert stop.exit_code == code


def test_death_of_the_launcher_is_a_request_to_stop(handlers, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    stop = StopRequest()
    assert not stop.requested
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert stop.requested
    assert stop.exit_code == 143


def test_death_of_a_shell_is_none(handlers, monkeypatch):
    for name in ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    stop = StopRequest()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not stop.requested
