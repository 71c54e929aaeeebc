"""Processes in the background that prepare data: started, sent how far to go, restarted when they die, waited for.

A reader ends when this process dies, however it dies: its standard input closes.
"""

import contextlib
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from ursa_minor.base import paths
from ursa_minor.base.errors import BadInput, TrainingStopped

log = logging.getLogger(__name__)

RESTARTS = 5  # in a row, each within LIVED_SECONDS of its start
LIVED_SECONDS = 600.0
RESUMES = "what was trained so far is saved, and the same command resumes"
# Seconds between two checks, and between two messages, while training waits.
POLL_SECONDS, LOG_SECONDS = (
    0.2,
    30.0,
)
REFRESH_SECONDS = 1.0  # while it does not: between two checks
PREPARE = paths.ROOT / "prepare_data.py"


def reader_command(argv: Sequence[str], source: int) -> list[str]:
    """Return the command of the process that prepares one source of the recipe that ``argv`` names."""
    return [sys.executable, str(PREPARE), *argv, "--source", str(source), "--follow"]


class Preparation:
    """Keeps ``command`` running until it ends well; its lines are logged, and its restarts.

    Args:
        command: writes lines to standard output, reads a number a line on standard input, and ends when that closes.
    """

    def __init__(self, command: Sequence[str]):
        self.command = list(command)
        self.done = False
        self._failures, self._target = 0, 0
        self._start()

    def check(self) -> None:
        """Check the process, at any time and often: restart it where it died.

        Raises BadInput when it refused its input (it has printed why), TrainingStopped when it gave up or died too often.
        """
        if self.done or (status := self._process.poll()) is None:
            return
        self._relay.join()
        self._close_input()
        if status == 0:
            self.done = True
        elif status == 2:
            raise BadInput("the data could not be prepared (see above)")
        elif status > 0:  # it has retried what can be retried
            raise TrainingStopped(
                f"the reader stopped with exit status {status} (see above); {RESUMES}"
            )
        else:  # killed: out of memory, for example
            self._failures = 1 + (
                self._failures if time.monotonic() - self._started < LIVED_SECONDS else 0
            )
            if self._failures > RESTARTS:
                raise TrainingStopped(
                    f"the reader was killed {self._failures} times in a row (signal {-status}); {RESUMES}"
                )
            log.warning(
                f"data     the reader was killed (signal {-status}); restart {self._failures} of {RESTARTS}"
            )
            self._start()

    def prefetch(self, windows: int) -> None:
        """Send it how many windows will soon be needed."""
        if windows > self._target:
            self._target = windows
            self._send_target()

    def close(self) -> None:
        """End the process; what it has finished is kept."""
        self.done = True
        self._close_input()
        self._process.wait()
        self._relay.join()  # its last lines come before ours

    def _start(self) -> None:
        self._started = time.monotonic()
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",  # one odd byte must not end the relay
            # The first process of a launch prints a problem for all; this one is always the first of its kind.
            env=os.environ | {"RANK": "0"},
            start_new_session=True,  # Ctrl-C is for the trainer, which then closes the input
        )
        assert process.stdin and process.stdout
        self._process, self._input = process, process.stdin
        self._relay = threading.Thread(target=self._log_lines, args=(process.stdout,), daemon=True)
        self._relay.start()
        self._send_target()

    def _log_lines(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                log.info(f"data     {line.rstrip()}")

    def _send_target(self) -> None:
        # The process has ended; check() reports that.
        with contextlib.suppress(OSError, ValueError):
            self._input.write(f"{self._target}\n")
            self._input.flush()

    def _close_input(self) -> None:
        with contextlib.suppress(OSError):  # unread input is dropped
            self._input.close()


class DataWait:
    """Keeps the readers of a run going and waits where training is ahead of them.

    Args:
        readers: one a source; None where another process has it, or nothing is to be read.
        refresh: opens what is new; True when no source grows any more.

    Attributes:
        waited_seconds: how long training has waited.
    """

    def __init__(self, readers: Sequence[Preparation | None], refresh: Callable[[], bool]):
        self.readers, self.refresh = list(readers), refresh
        self.waited_seconds = 0.0
        self._growing = True
        self._logged, self._refreshed = time.monotonic(), -math.inf

    def until(self, there: Callable[[], bool], what: str) -> None:
        """Wait alone until ``there``. Raises as ``Preparation.check`` does."""
        while not there():
            for reader in filter(None, self.readers):
                reader.check()
            self._log_now_and_then(what)
            time.sleep(POLL_SECONDS)

    def wait(
        self,
        needed: Sequence[int],
        have: Callable[[], list[int]],
        stopping: Callable[[], bool],
        any_of: Callable,
    ) -> str | None:
        """Return when every process has what it needs, or one stops; or why training cannot continue.

        Every process calls it at the same place. Costs nothing once all sources are complete everywhere.

        Args:
            needed: windows of each source.
            have: windows of each source that are there.
            any_of: whether any process has each of the flags that it is given set.
        """
        begin = time.perf_counter()
        while self._growing:
            complete, failure = False, None
            try:
                complete = self._check(needed, have())
            except (BadInput, TrainingStopped) as error:
                failure = str(error)
            behind = not complete and any(map(int.__lt__, have(), needed))
            behind, failed, stop, self._growing = any_of(
                behind, failure is not None, stopping(), not complete
            )
            if failed:
                return failure or "the reader of another process failed (see above)"
            if stop or not behind:
                break
            self._log_now_and_then(
                f"{sum(map(min, have(), needed)):,} of {sum(needed):,} windows are there"
            )
            time.sleep(POLL_SECONDS)
        self.waited_seconds += time.perf_counter() - begin
        return None

    def close(self) -> None:
        """End the readers."""
        for reader in filter(None, self.readers):
            reader.close()

    def _check(self, needed: Sequence[int], have: Sequence[int]) -> bool:
        """Check the readers, and open what is new; return whether all sources are known to be complete."""
        for reader, windows in zip(self.readers, needed, strict=True):
            if reader:
                reader.prefetch(windows)
                reader.check()
        # Reading the manifests costs a millisecond: not at every step while there is enough.
        if (
            all(map(int.__ge__, have, needed))
            and time.monotonic() - self._refreshed <= REFRESH_SECONDS
        ):
            return False
        self._refreshed = time.monotonic()
        return self.refresh()

    def _log_now_and_then(self, what: str) -> None:
        if time.monotonic() - self._logged > LOG_SECONDS:
            self._logged = time.monotonic()
            log.info(f"data     waiting: {what}")
