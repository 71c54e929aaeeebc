"""Readers in the background: logged, restarted, sent how far to go, ended; and training that waits for them."""

import logging
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.base.errors import BadInput, TrainingStopped
from pretrain.data import background as reading
from pretrain.data.background import DataWait, Preparation

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 30  # an event that does not come in this time is a failure
ECHO = """
import os, sys
print("pid", os.getpid(), flush=True)
for line in sys.stdin:
    print("sent", line.strip(), flush=True)
"""
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
DIE = "import os; os.kill(os.getpid(), 9)"
# Its parent has a Preparation and waits to be killed; standard error, which the reader's process inherits, stays open.
PARENT = f"""
import sys
from pretrain.base import console
from pretrain.data.background import Preparation
console.start(stream=sys.stdout)
reader = Preparation([sys.executable, "-c", {ECHO!r}])
sys.stdin.read()
"""


class Logged(logging.Handler):
    """What readers log, from whatever thread, without the word "data" before it."""

    def __init__(self):
        super().__init__()
        self.lines = queue.Queue()

    def emit(self, record):
        text = record.getMessage()
        self.lines.put(text[9:] if text.startswith("data     ") else f"no data: {text}")

    def next(self):
        return self.lines.get(timeout=SECONDS)

    def all(self):
        return [self.lines.get_nowait() for _ in range(self.lines.qsize())]


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
    monkeypatch.setattr(reading, "time", made)
    return made


@pytest.fixture
def logged():
    handler = Logged()
    reading.log.addHandler(handler)
    yield handler
    reading.log.removeHandler(handler)


@pytest.fixture
def start(logged):
    """Start a Preparation of a little program; it ends with the test."""
    started = []

    def begin(program, *words):
        command = [sys.executable, "-I", "-S", "-c", program, *map(str, words)]
        started.append(Preparation(command))
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


def test_lines_are_logged_in_order_without_their_ends_and_a_good_end_is_the_end(start, logged, monkeypatch):
    """All of them before the end is known. A signal to the trainer's session does not reach it; it prints for all."""
    monkeypatch.setenv("RANK", "3")
    logged.addFilter(lambda record: bool(sum(range(1000))))  # slow
    printed = b"one\n  two  \n\nodd " + "é".encode() + b" \xff\n" + b"a line\n" * 2000
    about = "import os, sys; print(os.environ['RANK'], os.getsid(0) == os.getpid(), flush=True)"
    one = start(f"{about}; sys.stdout.buffer.write({printed!r})")
    ended(one)
    assert logged.all() == ["0 True", "one", "  two", "", "odd é \ufffd", *["a line"] * 2000] and one.done
    one.check()
    assert one.done and logged.all() == []


def test_a_killed_process_is_restarted_with_a_message_and_sent_what_is_wanted(start, logged):
    one = start(ECHO)
    pid = int(logged.next().split()[1])
    for windows in (0, 7, 8, 8, 5, 9):
        one.prefetch(windows)
        one.check()
    assert [logged.next() for _ in range(4)] == [f"sent {windows}" for windows in (0, 7, 8, 9)]  # only more is news
    assert pid == one._process.pid and not one.done
    os.kill(pid, signal.SIGKILL)
    one._process.wait(timeout=SECONDS)
    one.prefetch(12)  # after its death, which is not known yet
    one.check()
    assert logged.next() == "the reader was killed (signal 9); restart 1 of 5"
    assert logged.next() not in ("", f"pid {pid}") and logged.next() == "sent 12" and not one.done


def test_process_that_is_killed_again_and_again_stops_training_unless_it_has_lived_for_long(start, logged, clock):
    one = start(f"print('begins', flush=True)\n{DIE}")
    for lived in (600, 1, 10_000, 599, 599, 0, 0):
        clock.now += lived
        ended(one)
    words = r"killed 6 times in a row \(signal 9\); what was trained so far is saved, and"
    with pytest.raises(TrainingStopped, match=words):
        ended(one)
    restarts = [f"the reader was killed (signal 9); restart {number} of 5" for number in (1, 2, 1, 2, 3, 4, 5)]
    assert logged.all() == [line for restart in restarts for line in ("begins", restart)] + ["begins"]


def test_process_that_gave_up_or_refused_its_input_is_not_started_again(start, logged):
    one = start("import sys; print('why', file=sys.stdout); sys.exit(3)")
    words = r"the reader stopped with exit status 3 \(see above\); what was trained so far is saved"
    with pytest.raises(TrainingStopped, match=words):
        ended(one)
    assert logged.all() == ["why"]
    with pytest.raises(BadInput, match="could not be prepared .see above.") as caught:
        ended(start("import sys; sys.exit(2)"))
    assert caught.value.status == 2 and logged.all() == []


def test_close_ends_the_process_and_it_stays_ended_also_where_it_is_dead(start, logged):
    one, died = start(ECHO), start(DIE)
    assert [logged.next(), logged.next()][1] == "sent 0"
    died._process.wait(timeout=SECONDS)
    process = one._process
    for each in (one, died):
        each.close()
        each.prefetch(9)
        each.check()
        each.close()
        assert each.done
    assert one._process is process and process.returncode == 0 and logged.all() == []


def test_process_ends_when_its_parent_is_killed():
    pipe = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    pid = int(parent.stdout.readline().split()[2])
    assert parent.stdout.readline() == "data     sent 0\n" and pid != parent.pid
    parent.kill()
    try:
        parent.communicate(timeout=SECONDS)  # returns when all that hold its standard error are gone
    except subprocess.TimeoutExpired:
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the reader's process outlives its parent") from None
    assert parent.returncode == -signal.SIGKILL


# Training that waits.


class Plain:
    """Stands for a Preparation."""

    def __init__(self):
        self.wanted, self.checks, self.error = [], 0, None

    def prefetch(self, windows):
        self.wanted.append(windows)

    def check(self):
        self.checks += 1
        if self.error:
            raise self.error


class Story:
    """A run with fake readers: what is there, what is complete, and what was asked."""

    def __init__(self, have, readers=None):
        self.have, self.complete, self.stopping = list(have), False, False
        self.readers = [Plain() for _ in have] if readers is None else readers
        self.refreshed, self.asked = 0, []
        self.data_wait = DataWait(self.readers, self.refresh)

    def refresh(self):
        self.refreshed += 1
        return self.complete

    def any_of(self, *flags):
        self.asked.append(flags)
        return list(flags)

    def wait(self, needed, any_of=None):
        return self.data_wait.wait(needed, lambda: list(self.have), lambda: self.stopping, any_of or self.any_of)


def test_data_that_is_complete_is_not_read_again(clock):
    story = Story([10])
    story.complete = True
    assert story.wait([99]) is None  # a later epoch: more than there ever will be
    assert story.wait([999], any_of=None) is None
    assert story.refreshed == 1 and len(story.asked) == 1 and story.readers[0].checks == 1
    assert clock.sleeps == 0 and story.data_wait.waited_seconds == 0


@pytest.mark.parametrize("late", [0, 1])
def test_training_waits_until_every_source_has_what_it_needs_or_is_complete_and_logs_it_now_and_then(
    clock, caplog, late
):
    story = Story([100, 100])
    story.have[late] = 2

    def meanwhile():
        story.have[late] += 1
        story.complete = clock.sleeps == 40

    clock.meanwhile = meanwhile
    assert story.wait([2, 2]) is None and clock.sleeps == 0
    assert [one.wanted for one in story.readers] == [[2], [2]]
    assert story.wait([5, 5]) is None
    assert story.have[late] == 5 and clock.sleeps == 3 and story.data_wait.waited_seconds == 3
    assert story.readers[late].checks == 5 and not caplog.messages  # of a short wait
    assert story.wait([50, 50]) is None and clock.sleeps == 40 and story.data_wait.waited_seconds == 40
    assert caplog.messages == ["data     waiting: 83 of 100 windows are there"]


def test_failure_of_a_reader_or_to_open_what_is_new_is_returned_though_the_step_has_its_windows(clock):
    for error in (BadInput(["one", "two"]), TrainingStopped("one\ntwo")):
        story = Story([9])
        story.readers[0].error = error
        assert story.wait([5]) == "one\ntwo" == story.wait([5])
        with pytest.raises(type(error)) as caught:
            story.data_wait.until(lambda: False, "x")
        assert caught.value is error

    def refresh():
        raise BadInput("a shard has gone")

    story = Story([9])
    story.data_wait.refresh = refresh
    assert story.wait([5]) == "a shard has gone" and clock.sleeps == 0
    story.readers[0].error = ZeroDivisionError()  # our own fault
    with pytest.raises(ZeroDivisionError):
        story.wait([5])


def test_training_waits_for_another_process_that_is_behind_and_ends_with_one_that_fails(clock):
    story = Story([9], readers=[None])
    behind = [True, True, False]
    assert story.wait([5], any_of=lambda mine, failed, stop, growing: [behind.pop(0), failed, stop, True]) is None
    assert clock.sleeps == 2 and not behind
    found = story.wait([5], any_of=lambda behind, failed, stop, growing: [behind, True, stop, growing])
    assert found == "the reader of another process failed (see above)" and clock.sleeps == 2
    story.complete, asked = True, []
    for growing in (True, False):  # it asks with the others as long as one of them has more to come
        assert story.wait([5], any_of=lambda *mine: asked.append(mine) or [*mine[:3], growing]) is None  # noqa: B023
    assert story.wait([5], any_of=None) is None and len(asked) == 2


def test_a_request_to_stop_ends_the_wait_of_every_process(clock):
    story = Story([1])
    assert story.wait([5], any_of=lambda behind, failed, stop, growing: [behind, failed, True, growing]) is None
    assert clock.sleeps == 0
    clock.meanwhile = lambda: setattr(story, "stopping", True)
    assert story.wait([5]) is None and clock.sleeps == 1


def test_until_waits_alone_looks_after_the_readers_and_logs_it(clock, caplog):
    story = Story([0, 0])
    story.data_wait.until(lambda: clock.sleeps == 65, "the validation split comes first")
    assert [one.checks for one in story.readers] == [65, 65] and story.refreshed == 0
    assert caplog.messages == ["data     waiting: the validation split comes first"] * 2
    assert story.data_wait.waited_seconds == 0  # before training: not training's wait


def test_a_reader_that_was_started_ahead_is_the_one_that_prepares(workplace, monkeypatch):
    opened: list = []
    monkeypatch.setattr(
        reading,
        "_open",
        lambda command: opened.append(command) or subprocess.Popen([sys.executable, "-c", ECHO], **PIPES),
    )
    monkeypatch.setattr(reading, "AHEAD", {})
    new = ["--recipe", "tiny.yaml", "--prepared_data_dir", "elsewhere"]
    for argv in (["--recipe", "tiny.yaml"], [*new, "--data_files", "https://localhost/a.txt"], ["--push_pending", "r"]):
        reading.start_ahead(argv)  # in a folder that may have it, to be fetched first, or nothing to read
    monkeypatch.setenv("LOCAL_RANK", "1")
    reading.start_ahead(new)
    assert not opened and not reading.AHEAD
    monkeypatch.delenv("LOCAL_RANK")
    reading.start_ahead(new)
    (ahead,) = reading.AHEAD.values()
    assert opened == [reading.reader_command(["--recipe=tiny.yaml", "--prepared_data_dir=elsewhere"], 0)]
    taken = Preparation(opened[0])
    assert taken._process is ahead and not reading.AHEAD and len(opened) == 1
    taken.close()
    assert ahead.returncode == 0
