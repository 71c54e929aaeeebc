"""Test the processes that prepare data in the background, and the wait of training for them."""

import os
import queue
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from ursa_minor.base.errors import BadInput, TrainingStopped
from ursa_minor.data.loading import background
from ursa_minor.data.loading.background import DataWait, Preparation

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 30  # a test fails if an expected event takes longer

# A reader that prints its process id and each line that it receives.
ECHO = """
import os, sys
print("pid", os.getpid(), flush=True)
for line in sys.stdin:
    print("sent", line.strip(), flush=True)
"""
KILL_ITSELF = "import os; os.kill(os.getpid(), 9)"
# A process that has a Preparation and waits until it is killed.
PARENT = f"""
import sys
from ursa_minor.base import console
from ursa_minor.data.loading.background import Preparation
console.start(stream=sys.stdout)
reader = Preparation([sys.executable, "-c", {ECHO!r}])
sys.stdin.read()
"""


class LogLines(queue.Queue):
    """The lines that readers log from any thread, without the prefix "data"."""

    def append(self, record):
        self.put(record.getMessage().removeprefix("data     "))

    def next(self):
        return self.get(timeout=SECONDS)

    def all(self):
        return [self.get_nowait() for _ in range(self.qsize())]


class FakeTime:
    """A replacement for the module ``time`` whose clock advances by 1 second per sleep.

    Attributes:
        on_sleep: function that is called at the end of each sleep.
    """

    def __init__(self):
        self.now = 1000.0
        self.sleeps = 0
        self.on_sleep = lambda: None

    def monotonic(self):
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds):
        assert seconds > 0
        self.now += 1
        self.sleeps += 1
        assert self.sleeps < 1000, "the wait does not end"
        self.on_sleep()


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock of the module by one that advances by sleeps only."""
    fake_time = FakeTime()
    monkeypatch.setattr(background, "time", fake_time)
    return fake_time


@pytest.fixture
def log_lines(monkeypatch):
    """Collect the lines that readers log."""
    lines = LogLines()
    monkeypatch.setattr(background.log, "handle", lines.append)
    return lines


@pytest.fixture
def start(log_lines):
    """Return a function that starts a Preparation of a small program until the test ends."""
    preparations = []

    def start_program(program):
        preparation = Preparation([sys.executable, "-I", "-S", "-c", program])
        preparations.append(preparation)
        return preparation

    yield start_program
    for preparation in preparations:
        preparation._process.kill()
        preparation.close()


def check_after_exit(preparation):
    """Wait until the process has ended, then check the Preparation."""
    preparation._process.wait(timeout=SECONDS)
    preparation.check()


def restart_message(number):
    """Return the message about this consecutive restart."""
    return f"prepare_data.py was killed by signal 9 and is started again (restart {number} of 5)"


# Preparation


def test_reader_lines_are_logged_in_order(start, log_lines):
    printed = b"one\n  two  \n\nodd " + "é".encode() + b" \xff\n" + b"a line\n" * 2000
    preparation = start(f"import sys; sys.stdout.buffer.write({printed!r})")

    check_after_exit(preparation)

    assert preparation.done
    assert log_lines.all() == ["one", "  two", "", "odd é \ufffd", *["a line"] * 2000]


def test_reader_has_rank_0_and_new_session(start, log_lines, monkeypatch):
    """Rank 0 prints errors. Signals to the session of the trainer do not reach the reader."""
    monkeypatch.setenv("RANK", "3")
    program = "import os; print(os.environ['RANK'], os.getsid(0) == os.getpid())"

    check_after_exit(start(program))

    assert log_lines.all() == ["0 True"]


@pytest.mark.parametrize(
    "status, error, message",
    [
        (3, TrainingStopped, r"exit status 3\. .*The training so far is saved"),
        (2, BadInput, "could not be prepared"),
    ],
)
def test_reader_that_fails_is_not_restarted(start, log_lines, status, error, message):
    preparation = start(f"print('reason'); raise SystemExit({status})")

    with pytest.raises(error, match=message):
        check_after_exit(preparation)

    assert log_lines.all() == ["reason"]


def test_only_larger_targets_are_sent(start, log_lines):
    preparation = start(ECHO)

    for windows in (0, 7, 8, 8, 5, 9):
        preparation.prefetch(windows)
        preparation.check()

    assert log_lines.next() == f"pid {preparation._process.pid}"
    for windows in (0, 7, 8, 9):
        assert log_lines.next() == f"sent {windows}"
    assert not preparation.done


def test_killed_reader_is_restarted_with_latest_target(start, log_lines):
    preparation = start(ECHO)
    pid = int(log_lines.next().split()[1])
    assert log_lines.next() == "sent 0"

    os.kill(pid, signal.SIGKILL)
    preparation._process.wait(timeout=SECONDS)
    preparation.prefetch(12)  # before check() notices the death
    preparation.check()

    assert log_lines.next() == restart_message(1)
    restarted_pid = int(log_lines.next().removeprefix("pid "))
    assert restarted_pid != pid
    assert log_lines.next() == "sent 12"
    assert not preparation.done


@pytest.mark.parametrize(
    "program, status", [(ECHO, 0), (KILL_ITSELF, -signal.SIGKILL)], ids=["running", "killed"]
)
def test_closed_reader_is_not_restarted(start, log_lines, program, status):
    preparation = start(program)
    process = preparation._process
    if program == ECHO:
        log_lines.next()
        log_lines.next()
    else:
        process.wait(timeout=SECONDS)

    preparation.close()
    preparation.prefetch(99)
    preparation.check()

    assert preparation.done
    assert preparation._process is process
    assert process.returncode == status
    assert log_lines.all() == []


def test_repeatedly_killed_reader_stops_training(start, log_lines, clock):
    """A process that has lived for 600 seconds starts the count again."""
    preparation = start(f"print('started', flush=True)\n{KILL_ITSELF}")

    for lifetime in (600, 1, 10_000, 599, 599, 0, 0):
        clock.now += lifetime
        check_after_exit(preparation)
    with pytest.raises(TrainingStopped, match=r"6 times in a row.*The training so far is saved"):
        check_after_exit(preparation)

    expected = []
    for number in (1, 2, 1, 2, 3, 4, 5):
        expected += ["started", restart_message(number)]
    assert log_lines.all() == [*expected, "started"]


def test_reader_ends_when_its_parent_is_killed():
    pipe = subprocess.PIPE
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    reader_pid = int(parent.stdout.readline().split()[2])
    assert parent.stdout.readline() == "data     sent 0\n"
    assert reader_pid != parent.pid

    parent.kill()

    # The reader inherits standard error, so communicate() also waits for its end.
    try:
        parent.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.kill(reader_pid, signal.SIGKILL)
        raise AssertionError("the reader's process outlives its parent") from None
    assert parent.returncode == -signal.SIGKILL


# DataWait


class FakeRun:
    """A run with fake readers, which counts the calls of DataWait.

    Attributes:
        num_windows: number of prepared windows of each source.
        complete: whether all sources are complete.
        stopping: whether the run was asked to stop.
        targets: the targets that were sent to the readers.
        checks: number of checks of a reader.
        refreshes: number of searches for new shards.
        flags: the flags of this process at each exchange with the other processes.
    """

    def __init__(self, *num_windows, error=None, refresh=None):
        self.num_windows = list(num_windows)
        self.complete = False
        self.stopping = False
        self.targets = []
        self.checks = 0
        self.refreshes = 0
        self.flags = []
        self.error = error
        reader = types.SimpleNamespace(prefetch=self.targets.append, check=self.check)
        self.data_wait = DataWait([reader] * len(num_windows), refresh or self.refresh)

    def check(self):
        self.checks += 1
        if self.error:
            raise self.error

    def refresh(self):
        self.refreshes += 1
        return self.complete

    def wait(self, *needed, any_of=lambda *flags: flags):
        """Wait for this number of windows of each source.

        Args:
            any_of: function that takes the flags of this process and returns those of all.
        """

        def exchange(*flags):
            self.flags.append(flags)
            return any_of(*flags)

        return self.data_wait.wait(
            needed, lambda: list(self.num_windows), lambda: self.stopping, exchange
        )

    def wait_until_complete(self, any_of=lambda *flags: flags):
        """Wait until all sources are complete."""
        self.data_wait.wait_until_complete(lambda: self.stopping, any_of)


def test_complete_data_is_not_checked_again(clock):
    """A later epoch needs more windows than there will ever be."""
    run = FakeRun(10)
    run.complete = True

    assert run.wait(99) is None
    assert run.wait(999) is None

    assert run.refreshes == 1
    assert len(run.flags) == 1
    assert run.checks == 1
    assert clock.sleeps == 0
    assert run.data_wait.waited_seconds == 0


def test_training_does_not_wait_for_prepared_windows(clock):
    run = FakeRun(100, 2)

    assert run.wait(2, 2) is None

    assert clock.sleeps == 0
    assert run.targets == [2, 2]


def test_training_waits_until_sources_have_enough(clock, caplog):
    run = FakeRun(100, 2)

    def prepare_window():
        run.num_windows[1] += 1

    clock.on_sleep = prepare_window
    assert run.wait(5, 5) is None

    assert run.num_windows[1] == 5
    assert clock.sleeps == 3
    assert run.data_wait.waited_seconds == 3
    assert run.checks == 8
    assert not caplog.messages


def test_long_wait_is_logged_until_complete(clock, caplog):
    run = FakeRun(100, 2)

    def prepare_window():
        run.num_windows[1] += 1
        run.complete = clock.sleeps == 40

    clock.on_sleep = prepare_window
    assert run.wait(50, 50) is None

    assert clock.sleeps == 40
    assert run.data_wait.waited_seconds == 40
    assert caplog.messages == ["data     training waits for data: 83 of 100 windows are prepared"]


@pytest.mark.parametrize("error", [BadInput(["one", "two"]), TrainingStopped("one\ntwo")])
def test_reader_failure_is_returned(clock, error):
    """Also if the step has its windows already."""
    run = FakeRun(9, error=error)

    assert run.wait(5) == "one\ntwo"
    assert run.wait(5) == "one\ntwo"
    with pytest.raises(type(error)):
        run.data_wait.until(lambda: False, "x")


def test_failure_to_open_shards_is_returned(clock):
    def refresh():
        raise BadInput("a shard is missing")

    run = FakeRun(9, refresh=refresh)

    assert run.wait(5) == "a shard is missing"
    assert clock.sleeps == 0


def test_wait_before_training_is_not_counted(clock, caplog):
    run = FakeRun(0)

    run.data_wait.until(lambda: clock.sleeps == 65, "the validation split comes first")

    message = "data     training waits for data: the validation split comes first"
    assert caplog.messages == [message] * 2
    assert run.checks == 65
    assert run.refreshes == 0
    assert run.data_wait.waited_seconds == 0


def test_training_waits_for_slower_process(clock):
    run = FakeRun(9)
    others_behind = [True, True, False]

    def any_of(behind, failed, stopping, growing):
        return others_behind.pop(0), failed, stopping, True

    assert run.wait(5, any_of=any_of) is None

    assert clock.sleeps == 2
    assert not others_behind


def test_wait_ends_when_another_process_stops(clock):
    run = FakeRun(9)

    def any_of(behind, failed, stopping, growing):
        return behind, failed, True, growing

    assert run.wait(50, any_of=any_of) is None
    assert clock.sleeps == 0


def test_failure_of_another_process_is_returned(clock):
    run = FakeRun(9)

    def any_of(behind, failed, stopping, growing):
        return behind, True, stopping, growing

    assert "another process" in run.wait(5, any_of=any_of)
    assert clock.sleeps == 0


def test_wait_ends_when_run_is_stopped(clock):
    run = FakeRun(9)

    def stop():
        run.stopping = True

    clock.on_sleep = stop
    assert run.wait(50) is None
    assert clock.sleeps == 1


def test_flags_are_exchanged_while_any_source_grows(clock):
    """A process whose sources are complete takes part as long as another one's are not."""
    run = FakeRun(9)
    run.complete = True
    others_growing = [True, False]

    def any_of(behind, failed, stopping, growing):
        return behind, failed, stopping, others_growing.pop(0)

    for _ in range(3):
        assert run.wait(5, any_of=any_of) is None

    assert len(run.flags) == 2


def test_wait_for_all_data_ends_when_it_is_complete(clock):
    run = FakeRun(9)

    def complete():
        run.complete = True

    clock.on_sleep = complete
    run.wait_until_complete()
    assert clock.sleeps == 1
    assert run.wait(10**9) is None  # nothing more is prepared


def test_wait_for_all_data_continues_for_slower_process(clock):
    run = FakeRun(9)
    run.complete = True
    others_growing = [True, True, False]

    run.wait_until_complete(lambda failed, stopping, growing: (False, False, others_growing.pop(0)))

    assert clock.sleeps == 2


def test_wait_for_all_data_ends_when_run_is_stopped(clock):
    run = FakeRun(9)

    run.wait_until_complete(lambda failed, stopping, growing: (False, True, True))

    assert clock.sleeps == 0


@pytest.mark.parametrize("error", [BadInput("no"), None])
def test_failure_ends_wait_for_all_data_in_every_process(clock, error):
    run = FakeRun(9, error=error)

    with pytest.raises(BadInput if error else TrainingStopped):
        run.wait_until_complete(lambda failed, stopping, growing: (True, False, True))
