"""Requests to stop: by a signal, by the death of the launcher, and across processes."""

import contextlib
import json
import os
import resource
import signal
import threading
import time

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from ursa_minor.base import stopping
from ursa_minor.base.errors import TrainingStopped
from ursa_minor.base.signals import SIGNALS, ignore_stop_signals
from ursa_minor.base.stopping import (
    LAUNCHED,
    StopRequest,
    default_signal_actions,
    end_with_launcher,
    raise_on_lost_peer,
)

EXIT_CODES = {
    "SIGTERM": 143,
    "SIGINT": 130,
    "SIGHUP": 129,
    "SIGUSR1": 138,
    "SIGUSR2": 140,
    "SIGXCPU": 152,
}


@pytest.fixture
def restored_handlers():
    """Restore the signal handlers that the test replaces."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def send_signal(name):
    """Send a signal to this process."""
    os.kill(os.getpid(), getattr(signal, name))


# Signals.


@pytest.mark.usefixtures("restored_handlers")
@pytest.mark.parametrize(("name", "code"), EXIT_CODES.items())
def test_signal_is_a_request_to_stop(name, code):
    stop = StopRequest()
    agreed_before = stop.agreed()

    send_signal(name)

    assert not agreed_before
    assert stop.agreed()
    assert stop.exit_code == code


@pytest.mark.usefixtures("restored_handlers")
@pytest.mark.parametrize(("first", "second"), [("SIGINT", "SIGTERM"), ("SIGUSR1", "SIGINT")])
def test_first_signal_sets_exit_code(first, second):
    stop = StopRequest()

    send_signal(first)
    send_signal(second)

    assert stop.exit_code == EXIT_CODES[first]


@pytest.mark.usefixtures("restored_handlers")
@pytest.mark.parametrize(("restarts", "code"), [("3", 0), ("0", 143)])
def test_exit_code_prevents_restart_by_launcher(monkeypatch, restarts, code):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    stop = StopRequest()

    send_signal("SIGTERM")

    assert stop.exit_code == code


@pytest.mark.usefixtures("restored_handlers")
def test_flags_of_one_process_are_unchanged():
    stop = StopRequest()

    assert stop.any_of(True, False, True) == [True, False, True]
    assert not stop.agreed()


@pytest.mark.usefixtures("restored_handlers")
@pytest.mark.parametrize("name", EXIT_CODES)
def test_only_hangup_ignored_at_start_stays_ignored(name):
    """SIGHUP is ignored under nohup. A shell ignores SIGINT for a command in the background."""
    signal.signal(getattr(signal, name), signal.SIG_IGN)
    stop = StopRequest()

    send_signal(name)

    assert stop.agreed() == (name != "SIGHUP")


def receive_signal_before_training(name):
    """Receive a signal where there is nothing to save."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # SIGXCPU would write a core file
    StopRequest()
    with default_signal_actions():
        send_signal(name)


@pytest.mark.parametrize("name", EXIT_CODES)
def test_signal_ends_process_before_training(name):
    child = os.fork()
    if child == 0:
        receive_signal_before_training(name)
        os._exit(0)

    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == -getattr(signal, name)


@pytest.mark.usefixtures("restored_handlers")
def test_background_process_ignores_warnings_of_a_scheduler():
    """SIGTERM and SIGINT still end it."""
    ignore_stop_signals()

    ignored = []
    for name in EXIT_CODES:
        if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN:
            ignored.append(name)
    assert ignored == ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"]


# Death of the launcher.


def run_orphan(act, *, launched):
    """Start a process through a launcher, and kill the launcher.

    Args:
        act: runs in the process with the launcher's process id and a function that it must call
            when the launcher may be killed.
        launched: whether the environment is that of a launcher, and not that of a shell.

    Returns:
        The return value of ``act``.
    """
    result_reader, result_writer = os.pipe()
    ready_reader, ready_writer = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        launcher_id = os.getpid()
        if os.fork() == 0:
            with contextlib.suppress(BaseException):
                set_launcher_variables(launched)
                result = act(launcher_id, lambda: os.write(ready_writer, b"ready"))
                os.write(result_writer, json.dumps(result).encode())
            os._exit(0)
        signal.pause()
    os.close(result_writer)
    assert os.read(ready_reader, 5) == b"ready"
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    with open(result_reader) as file:
        return json.load(file)


def set_launcher_variables(launched):
    """Set the environment of a process that a launcher or a shell has started."""
    for name in LAUNCHED:
        os.environ.pop(name, None)
    if launched:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"


def wait_for_other_parent(process_id):
    """Wait until the parent process has another id than this one."""
    while os.getppid() == process_id:
        time.sleep(0.01)


def wait_for_request(stop):
    """Wait until a stop is requested, or for 30 seconds."""
    deadline = time.monotonic() + 30
    while not stop.requested and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("dies_early", [True, False])
def test_death_of_launcher_is_request_to_stop(monkeypatch, dies_early):
    """The launcher may also die before this process watches it."""
    monkeypatch.setattr(stopping, "CHECK_SECONDS", 0.01)

    def act(launcher_id, set_ready):
        stop = StopRequest()
        if not dies_early:
            end_with_launcher(launcher_id)
        requested_before = stop.requested
        set_ready()
        wait_for_other_parent(launcher_id)
        if dies_early:
            end_with_launcher(launcher_id)
        wait_for_request(stop)
        return [requested_before, stop.requested, stop.exit_code]

    assert run_orphan(act, launched=True) == [False, True, 143]


def test_death_of_shell_is_no_request():
    def act(shell_id, set_ready):
        stop = StopRequest()
        end_with_launcher(shell_id)
        set_ready()
        wait_for_other_parent(shell_id)
        return [stop.requested, threading.active_count()]

    assert run_orphan(act, launched=False) == [False, 1]


# Several processes.


@pytest.mark.parametrize(
    "message",
    [
        "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
        "[unbound_buffer.cc:81] Timed out waiting 6000ms for recv operation to complete",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5) ran for 600000 "
        "milliseconds before timing out",
    ],
)
def test_lost_process_is_reported_with_a_fix(message):
    with pytest.raises(TrainingStopped) as caught, raise_on_lost_peer():
        raise RuntimeError(message)

    assert "died, was killed (memory?) or hangs" in str(caught.value)
    assert "--max_restarts 3" in str(caught.value)
    assert caught.value.print_on_every_process


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        ValueError("timed out"),
        TrainingStopped("Timed out waiting"),
    ],
)
def test_other_error_is_unchanged(error):
    with pytest.raises(type(error)) as caught, raise_on_lost_peer():
        raise error

    assert caught.value is error


def stop_together(rank, store, signaled_rank):
    """Check the requests of one of two processes, of which one receives SIGINT."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    stop = StopRequest()
    flags = stop.any_of(rank == 0, False, rank == 1, True)
    agreed_before = stop.agreed()
    if rank == signaled_rank:
        send_signal("SIGINT")
    requested_here = stop.requested

    agreed = stop.agreed()

    assert flags == [True, False, True, True]
    assert not agreed_before
    assert requested_here == (rank == signaled_rank)
    assert agreed
    assert stop.requested
    assert stop.exit_code == (130 if rank == signaled_rank else 143)
    dist.barrier()


@pytest.mark.parametrize("signaled_rank", [0, 1])
def test_request_to_one_process_stops_both(tmp_path, signaled_rank):
    arguments = (tmp_path / "store", signaled_rank)

    mp.start_processes(stop_together, arguments, nprocs=2, start_method="fork")
