"""A request to stop is noted, whoever it reached and whoever died."""

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

from ursa_minor.base.errors import TrainingStopped
from ursa_minor.base.signals import SIGNALS, ignore_stop_signals
from ursa_minor.base.stopping import (
    LAUNCHED,
    StopRequest,
    default_signal_actions,
    end_with_launcher,
    raise_on_lost_peer,
)


@pytest.fixture
def handlers():
    """Puts back the handlers that a StopRequest replaces."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


CODES = {
    "SIGTERM": 143,
    "SIGINT": 130,
    "SIGHUP": 129,
    "SIGUSR1": 138,
    "SIGUSR2": 140,
    "SIGXCPU": 152,
}


@pytest.mark.parametrize(
    ("number", "code"), [(getattr(signal, name), code) for name, code in CODES.items()]
)
def test_a_signal_is_noted_and_gives_the_shells_exit_code(handlers, monkeypatch, number, code):
    stop = StopRequest()
    assert stop.any_of(True, False, True) == [
        True,
        False,
        True,
    ]  # which are its own, and no request to stop
    assert not stop.agreed()
    os.kill(os.getpid(), number)
    assert stop.agreed() and stop.exit_code == code
    os.kill(os.getpid(), signal.SIGTERM if number == signal.SIGINT else signal.SIGINT)
    assert stop.exit_code == code, "the first one counts"
    for restarts, status in (("3", 0), ("0", code)):  # a launcher would restart what has failed
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        assert stop.exit_code == status


@pytest.mark.parametrize("name", CODES)
def test_only_hangup_ignored_at_start_stays_ignored(handlers, name):
    """SIGHUP is ignored under nohup. A shell ignores SIGINT for a command in the background."""
    number = getattr(signal, name)
    signal.signal(number, signal.SIG_IGN)
    stop = StopRequest()
    os.kill(os.getpid(), number)
    assert stop.agreed() == (name != "SIGHUP")


@pytest.mark.parametrize("name", CODES)
def test_signal_ends_the_process_before_training(name):
    """Inside the block there is nothing to save, so the signal has its default action."""
    number = getattr(signal, name)
    if not (child := os.fork()):
        resource.setrlimit(
            resource.RLIMIT_CORE, (0, 0)
        )  # the default action of SIGXCPU writes a core file
        StopRequest()
        with default_signal_actions():
            os.kill(os.getpid(), number)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number


def test_background_process_ignores_warnings_of_a_scheduler(handlers):
    """SIGTERM and SIGINT still end it."""
    ignore_stop_signals()
    ignored = [name for name in CODES if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN]
    assert ignored == ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"]


def orphan(act, launched):
    """Let a launcher start a process that calls ``act(parent)``, and kill the launcher; return what that process says."""
    answer, saying = os.pipe()
    ready, telling = os.pipe()
    if not (launcher := os.fork()):
        parent = os.getpid()
        if not os.fork():
            with contextlib.suppress(BaseException):
                for name in LAUNCHED:
                    os.environ.pop(name, None)
                os.environ |= {"ACCELERATE_MIXED_PRECISION": "no"} if launched else {}
                found = act(parent, lambda: os.write(telling, b"ready"))
                os.write(saying, json.dumps(found).encode())
            os._exit(0)
        signal.pause()
    os.close(saying)
    assert os.read(ready, 5) == b"ready"
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    with open(answer) as said:
        return said.read()


def parent_is(pid):
    """Wait until the parent is another one."""
    while os.getppid() == pid:
        time.sleep(0.01)


@pytest.mark.parametrize("early", [True, False])
def test_death_of_the_launcher_is_a_request_to_stop(early):
    """Also when it has died before this process could ask."""

    def act(parent, ready):
        stop = StopRequest()
        if not early:
            end_with_launcher(parent)
        ready()
        while_alive = stop.requested
        parent_is(parent)
        if early:
            end_with_launcher(parent)
        deadline = time.monotonic() + 30
        while not stop.requested and time.monotonic() < deadline:
            time.sleep(0.01)
        return [while_alive, stop.requested, stop.exit_code]

    assert json.loads(orphan(act, launched=True)) == [False, True, 143]


def test_death_of_a_shell_is_none():
    def act(parent, ready):
        stop = StopRequest()
        end_with_launcher(parent)
        ready()
        parent_is(parent)
        return [stop.requested, threading.active_count()]

    assert json.loads(orphan(act, launched=False)) == [False, 1]


def test_a_lost_process_is_said_by_whoever_notices_with_how_to_go_on_and_other_errors_pass():
    for words in (
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
        "[unbound_buffer.cc:81] Timed out waiting 6000ms for recv operation to complete",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5) ran for 600000 milliseconds before timing out",
    ):
        with pytest.raises(TrainingStopped) as caught, raise_on_lost_peer():
            raise RuntimeError(words)
        said = str(caught.value)
        assert (
            "died, was killed (memory?) or hangs" in said
            and "--max_restarts 3" in said
            and caught.value.print_on_every_process
        )
    for error in (
        RuntimeError("shape mismatch"),
        ValueError("timed out"),
        TrainingStopped("Timed out waiting"),
    ):
        with pytest.raises(type(error)) as caught, raise_on_lost_peer():
            raise error
        assert caught.value is error


@pytest.mark.parametrize("asked", [0, 1])
def test_a_request_to_one_process_stops_both_at_the_same_place(tmp_path, asked):
    """And two processes know each other's flags."""

    def work(rank):
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2
        )
        stop = StopRequest()
        assert (
            stop.any_of(rank == 0, False, rank == 1, True) == [True, False, True, True]
            and not stop.agreed()
        )
        if rank == asked:
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested == (rank == asked)
        assert (
            stop.agreed() and stop.requested and stop.exit_code == (130 if rank == asked else 143)
        )
        dist.barrier()

    mp.start_processes(work, nprocs=2, start_method="fork")
