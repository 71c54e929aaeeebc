"""Readers in the background: logged, restarted, sent how far to go, ended; and training that waits for them."""

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
SECONDS = 30  # an event that does not come in this time is a failure
ECHO = """
import os, sys
print("pid", os.getpid(), flush=True)
for line in sys.stdin:
    print("sent", line.strip(), flush=True)
"""
DIE = "import os; os.kill(os.getpid(), 9)"
# Its parent has a Preparation and waits to be killed; standard error, which the reader's process inherits, stays open.
PARENT = f"""
import sys
from ursa_minor.base import console
from ursa_minor.data.loading.background import Preparation
console.start(stream=sys.stdout)
reader = Preparation([sys.executable, "-c", {ECHO!r}])
sys.stdin.read()
"""


class Logged(queue.Queue):
    """What readers log, from whatever thread, without the word "data" before it."""

    def next(self):
        return self.get(timeout=SECONDS)

    def all(self):
        return [self.get_nowait() for _ in range(self.qsize())]


class Clock:
    """Stands for the module ``time``: a second goes by where one sleeps, and what is to happen then happens."""

    def __init__(self):
        self.now, self.sleeps, self.meanwhile = 1000.0, 0, lambda: None

    def monotonic(self):
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds):
        assert seconds > 0
        self.now, self.sleeps = self.now + 1, self.sleeps + 1
        assert self.sleeps < 1000, "waits for ever"
        self.meanwhile()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(background, "time", made)
    return made


@pytest.fixture
def logged(monkeypatch):
    found = Logged()
    monkeypatch.setattr(
        background.log,
        "handle",
        lambda record: found.put(record.getMessage().removeprefix("data     ")),
    )
    return found


@pytest.fixture
def start(logged):
    """Start a Preparation of a little program; it ends with the test."""
    started = []

    def begin(program):
        started.append(Preparation([sys.executable, "-I", "-S", "-c", program]))
        return started[-1]

    yield begin
    for one in started:
        one._process.kill()
        one.close()


def ended(one):
    """Wait until the process has ended, then let the Preparation see it."""
    one._process.wait(timeout=SECONDS)
    one.check()


# The process.


def test_lines_are_logged_in_order_before_the_end_is_known_and_a_good_end_is_the_end(
    start, logged, monkeypatch
):
    """A signal to the trainer's session does not reach it; it prints for all processes."""
    monkeypatch.setenv("RANK", "3")
    printed = b"one\n  two  \n\nodd " + "é".encode() + b" \xff\n" + b"a line\n" * 2000
    about = "import os, sys; print(os.environ['RANK'], os.getsid(0) == os.getpid(), flush=True)"
    one = start(f"{about}; sys.stdout.buffer.write({printed!r})")
    ended(one)
    assert (
        logged.all() == ["0 True", "one", "  two", "", "odd é \ufffd", *["a line"] * 2000]
        and one.done
    )
    for status, kind, words in (
        (
            3,
            TrainingStopped,
            r"prepare_data.py stopped with exit status 3\. .* The training so far is saved",
        ),
        (2, BadInput, "could not be prepared. The messages"),
    ):
        with pytest.raises(kind, match=words):
            ended(start(f"print('why'); raise SystemExit({status})"))
        assert logged.all() == ["why"], "and it is not started again"


def test_a_killed_process_is_restarted_with_a_message_and_sent_what_is_wanted_until_it_is_closed(
    start, logged
):
    one, died = start(ECHO), start(DIE)
    pid = int(logged.next().split()[1])
    for windows in (0, 7, 8, 8, 5, 9):
        one.prefetch(windows)
        one.check()
    assert [logged.next() for _ in range(4)] == [
        f"sent {windows}" for windows in (0, 7, 8, 9)
    ]  # only more is news
    assert pid == one._process.pid and not one.done
    os.kill(pid, signal.SIGKILL)
    one._process.wait(timeout=SECONDS)
    one.prefetch(12)  # after its death, which is not known yet
    one.check()
    assert (
        logged.next()
        == "prepare_data.py was killed by signal 9 and is started again (restart 1 of 5)"
    )
    assert logged.next() not in ("", f"pid {pid}") and logged.next() == "sent 12" and not one.done
    died._process.wait(timeout=SECONDS)
    process = one._process
    for each in (one, died):
        each.close()
        each.prefetch(99)
        each.check()
        assert each.done
    assert one._process is process and process.returncode == 0 and logged.all() == []


def test_process_that_is_killed_again_and_again_stops_training_unless_it_has_lived_for_long(
    start, logged, clock
):
    one = start(f"print('begins', flush=True)\n{DIE}")
    for lived in (600, 1, 10_000, 599, 599, 0, 0):
        clock.now += lived
        ended(one)
    words = r"killed 6 times in a row by signal 9\. The training so far is saved"
    with pytest.raises(TrainingStopped, match=words):
        ended(one)
    restarts = [
        f"prepare_data.py was killed by signal 9 and is started again (restart {number} of 5)"
        for number in (1, 2, 1, 2, 3, 4, 5)
    ]
    assert logged.all() == [line for restart in restarts for line in ("begins", restart)] + [
        "begins"
    ]


def test_process_ends_when_its_parent_is_killed():
    pipe = subprocess.PIPE
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    pid = int(parent.stdout.readline().split()[2])
    assert parent.stdout.readline() == "data     sent 0\n" and pid != parent.pid
    parent.kill()
    try:
        parent.communicate(
            timeout=SECONDS
        )  # returns when all that hold its standard error are gone
    except subprocess.TimeoutExpired:
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the reader's process outlives its parent") from None
    assert parent.returncode == -signal.SIGKILL


# Training that waits.


class Story:
    """A run with fake readers: what is there, what is complete, and what was asked."""

    def __init__(self, *have, error=None, refresh=None):
        self.have, self.complete, self.stopping, self.error = list(have), False, False, error
        self.wanted, self.checks, self.refreshed, self.asked = [], 0, 0, []
        reader = types.SimpleNamespace(prefetch=self.wanted.append, check=self.check)
        self.data_wait = DataWait([reader] * len(have), refresh or self.refresh)

    def check(self):
        self.checks += 1
        if self.error:
            raise self.error

    def refresh(self):
        self.refreshed += 1
        return self.complete

    def wait(self, *needed, any_of=lambda *mine: mine):
        def asked(*mine):
            self.asked.append(mine)
            return any_of(*mine)

        return self.data_wait.wait(needed, lambda: list(self.have), lambda: self.stopping, asked)


def test_data_that_is_complete_is_not_read_again(clock):
    story = Story(10)
    story.complete = True
    assert story.wait(99) is story.wait(999) is None  # a later epoch: more than there ever will be
    assert story.refreshed == len(story.asked) == story.checks == 1
    assert clock.sleeps == 0 and story.data_wait.waited_seconds == 0


def test_training_waits_until_every_source_has_what_it_needs_or_is_complete_and_logs_it_now_and_then(
    clock, caplog
):
    story = Story(100, 2)

    def meanwhile():
        story.have[1] += 1
        story.complete = clock.sleeps == 40

    clock.meanwhile = meanwhile
    assert story.wait(2, 2) is None and clock.sleeps == 0 and story.wanted == [2, 2]
    assert story.wait(5, 5) is None
    assert story.have[1] == 5 and clock.sleeps == 3 and story.data_wait.waited_seconds == 3
    assert story.checks == 10 and not caplog.messages  # of a short wait
    assert (
        story.wait(50, 50) is None and clock.sleeps == 40 and story.data_wait.waited_seconds == 40
    )
    assert caplog.messages == ["data     training waits for data: 83 of 100 windows are prepared"]


def test_failure_of_a_reader_or_to_open_what_is_new_is_returned_though_the_step_has_its_windows(
    clock, caplog
):
    for error in (BadInput(["one", "two"]), TrainingStopped("one\ntwo")):
        story = Story(9, error=error)
        assert story.wait(5) == "one\ntwo" == story.wait(5)
        with pytest.raises(type(error)):
            story.data_wait.until(lambda: False, "x")
    story = Story(9, refresh=lambda: (_ for _ in ()).throw(BadInput("a shard has gone")))
    assert story.wait(5) == "a shard has gone" and clock.sleeps == 0
    story = Story(0)
    story.data_wait.until(lambda: clock.sleeps == 65, "the validation split comes first")
    assert story.checks == 65 and story.refreshed == 0
    assert (
        caplog.messages
        == ["data     training waits for data: the validation split comes first"] * 2
    )
    assert story.data_wait.waited_seconds == 0  # before training: not training's wait


def test_training_waits_for_another_process_that_is_behind_and_ends_with_one_that_fails_or_is_to_stop(
    clock,
):
    story = Story(9)
    behind = [True, True, False]
    assert (
        story.wait(
            5, any_of=lambda mine, failed, stop, growing: [behind.pop(0), failed, stop, True]
        )
        is None
    )
    assert clock.sleeps == 2 and not behind
    assert (
        story.wait(50, any_of=lambda behind, failed, stop, growing: [behind, failed, True, growing])
        is None
    )
    found = story.wait(
        5, any_of=lambda behind, failed, stop, growing: [behind, True, stop, growing]
    )
    assert (
        found == "another process could not prepare its data (see its message)"
        and clock.sleeps == 2
    )
    clock.meanwhile = lambda: setattr(story, "stopping", True)
    assert story.wait(50) is None and clock.sleeps == 3
    story.complete, asked = True, len(story.asked)
    for growing in (True, False):  # it asks with the others as long as one of them has more to come
        assert story.wait(5, any_of=lambda *mine: [*mine[:3], growing]) is None  # noqa: B023
    assert story.wait(5) is None and len(story.asked) == asked + 2
