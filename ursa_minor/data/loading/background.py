"""Run prepare_data.py in background processes, and wait for the data that they prepare.

A reader process ends when the training process ends for any reason, because its standard input is
then closed.
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

MAX_RESTARTS = 5  # consecutive restarts, each within STABLE_SECONDS of the start
STABLE_SECONDS = 600.0
RESUMES = "The training so far is saved. Run the same command again to resume"
OTHER_FAILED = "another process could not prepare its data (see its message)"
POLL_SECONDS = 0.2  # between two checks while training waits
LOG_SECONDS = 30.0  # between two messages while training waits
REFRESH_SECONDS = 1.0  # between two checks for new shards while training does not wait
PREPARE = paths.ROOT / "prepare_data.py"


def reader_command(argv: Sequence[str], source: int) -> list[str]:
    """Return the command that prepares the source with this number of the recipe in ``argv``."""
    return [sys.executable, str(PREPARE), *argv, "--source", str(source), "--follow"]


class Preparation:
    """Keeps a reader process running until it has finished. Logs its lines and its restarts.

    Args:
        command: the command of the process. It writes lines to standard output, reads one number
            per line from standard input, and ends when that is closed.

    Attributes:
        done: whether the process has finished and will not be restarted.
    """

    def __init__(self, command: Sequence[str]):
        self.command = list(command)
        self.done = False
        self._failures = 0
        self._target = 0  # number of windows that will soon be needed
        self._start()

    def check(self) -> None:
        """Check whether the process has ended, and restart it if it was killed.

        Raises:
            BadInput: the process has rejected its input. It has printed the reason.
            TrainingStopped: the process has given up, or was killed too often.
        """
        if self.done:
            return
        status = self._process.poll()
        if status is None:
            return
        self._relay.join()
        self._close_input()
        if status == 0:
            self.done = True
        elif status == 2:
            raise BadInput(
                "the data could not be prepared. The messages of prepare_data.py above state the "
                "problem and the fix"
            )
        elif status > 0:  # the process has already retried after temporary errors
            raise TrainingStopped(
                f"prepare_data.py stopped with exit status {status}. Its messages above state the "
                f"reason. {RESUMES}"
            )
        else:
            self._restart(killed_by=-status)

    def _restart(self, killed_by: int) -> None:
        """Start the process again after a signal has killed it, for example for lack of memory."""
        was_stable = time.monotonic() - self._started >= STABLE_SECONDS
        self._failures = 1 if was_stable else self._failures + 1
        if self._failures > MAX_RESTARTS:
            raise TrainingStopped(
                f"prepare_data.py was killed {self._failures} times in a row by signal "
                f"{killed_by}. {RESUMES}"
            )
        log.warning(
            f"data     prepare_data.py was killed by signal {killed_by} and is started again "
            f"(restart {self._failures} of {MAX_RESTARTS})"
        )
        self._start()

    def prefetch(self, windows: int) -> None:
        """Send the number of windows that will soon be needed to the process."""
        if windows > self._target:
            self._target = windows
            self._send_target()

    def close(self) -> None:
        """End the process. The shards that it has prepared are kept."""
        self.done = True
        self._close_input()
        self._process.wait()
        self._relay.join()  # logs its last lines before those of the trainer

    def _start(self) -> None:
        self._started = time.monotonic()
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",  # an invalid byte must not end the thread that logs the lines
            # Only rank 0 prints errors. There is one reader per machine, whose errors are printed.
            env=os.environ | {"RANK": "0"},
            start_new_session=True,  # Ctrl-C reaches only the trainer, which then closes the input
        )
        assert process.stdin and process.stdout
        self._process = process
        self._input = process.stdin
        self._relay = threading.Thread(target=self._log_lines, args=(process.stdout,), daemon=True)
        self._relay.start()
        self._send_target()

    def _log_lines(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                log.info(f"data     {line.rstrip()}")

    def _send_target(self) -> None:
        # An error means that the process has ended, which check() reports.
        with contextlib.suppress(OSError, ValueError):
            self._input.write(f"{self._target}\n")
            self._input.flush()

    def _close_input(self) -> None:
        with contextlib.suppress(OSError):  # unread input is dropped
            self._input.close()


class DataWait:
    """Keeps the readers of a run going, and waits where training is ahead of them.

    Args:
        readers: the reader process of each source, or None if another process runs it or the
            source is complete.
        refresh: function that opens new shards and returns whether all sources are complete.

    Attributes:
        waited_seconds: time that training has waited.
    """

    def __init__(self, readers: Sequence[Preparation | None], refresh: Callable[[], bool]):
        self.readers = list(readers)
        self.refresh = refresh
        self.waited_seconds = 0.0
        self._growing = True  # whether a source is incomplete in any process
        self._logged = time.monotonic()
        self._refreshed = -math.inf

    def until(self, is_ready: Callable[[], bool], description: str) -> None:
        """Wait until a condition holds, independently of the other processes.

        Args:
            is_ready: the condition.
            description: the reason for the wait, for log lines.

        Raises:
            BadInput, TrainingStopped: as ``Preparation.check``.
        """
        while not is_ready():
            for reader in self.readers:
                if reader:
                    reader.check()
            self._log_now_and_then(description)
            time.sleep(POLL_SECONDS)

    def wait(
        self,
        needed: Sequence[int],
        num_windows: Callable[[], list[int]],
        stopping: Callable[[], bool],
        any_of: Callable,
    ) -> str | None:
        """Wait until every process has the windows that it needs, or one of them stops.

        Every process calls it at the same place. Once all sources are complete in all processes, it
        returns immediately.

        Args:
            needed: number of windows of each source that the next step needs.
            num_windows: function that returns the number of prepared windows of each source.
            stopping: function that returns whether this process was asked to stop.
            any_of: function that takes flags and returns, for each flag, whether it is set in any
                process.

        Returns:
            The reason if training cannot continue, else None.
        """
        started = time.perf_counter()
        while self._growing:
            complete = False
            failure = None
            try:
                complete = self._check(needed, num_windows())
            except (BadInput, TrainingStopped) as error:
                failure = str(error)
            prepared = num_windows()
            is_behind = not complete and not _has_all(prepared, needed)
            flags = (is_behind, failure is not None, stopping(), not complete)
            any_behind, any_failed, any_stopping, self._growing = any_of(*flags)
            if any_failed:
                return failure or OTHER_FAILED
            if any_stopping or not any_behind:
                break
            num_prepared = sum(map(min, prepared, needed))
            self._log_now_and_then(f"{num_prepared:,} of {sum(needed):,} windows are prepared")
            time.sleep(POLL_SECONDS)
        self.waited_seconds += time.perf_counter() - started
        return None

    def wait_until_complete(self, stopping: Callable[[], bool], any_of: Callable) -> None:
        """Wait until all sources are complete in every process, or one of them stops.

        Every process calls it at the same place, and all of them return together.

        Args:
            stopping: see ``wait``.
            any_of: see ``wait``.

        Raises:
            BadInput, TrainingStopped: as ``Preparation.check``. The other processes raise
                TrainingStopped.
        """
        while self._growing:
            complete = False
            failure: BadInput | TrainingStopped | None = None
            try:
                for reader in self.readers:
                    if reader:
                        reader.check()
                complete = self.refresh()
            except (BadInput, TrainingStopped) as error:
                failure = error
            flags = (failure is not None, stopping(), not complete)
            any_failed, any_stopping, self._growing = any_of(*flags)
            if any_failed:
                raise failure or TrainingStopped(OTHER_FAILED)
            if any_stopping:
                break
            if self._growing:
                self._log_now_and_then("num_train_epochs needs all of it")
                time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the readers."""
        for reader in self.readers:
            if reader:
                reader.close()

    def _check(self, needed: Sequence[int], prepared: Sequence[int]) -> bool:
        """Check the readers, and open new shards.

        Returns:
            Whether all sources are known to be complete.
        """
        for reader, windows in zip(self.readers, needed, strict=True):
            if reader:
                reader.prefetch(windows)
                reader.check()
        # Reading the manifests takes about a millisecond. While enough data is prepared, it is done
        # once per REFRESH_SECONDS, not at every step.
        is_recent = time.monotonic() - self._refreshed <= REFRESH_SECONDS
        if is_recent and _has_all(prepared, needed):
            return False
        self._refreshed = time.monotonic()
        return self.refresh()

    def _log_now_and_then(self, description: str) -> None:
        if time.monotonic() - self._logged > LOG_SECONDS:
            self._logged = time.monotonic()
            log.info(f"data     training waits for data: {description}")


def _has_all(prepared: Sequence[int], needed: Sequence[int]) -> bool:
    """Return whether each source has at least the number of windows that are needed."""
    return all(have >= need for have, need in zip(prepared, needed, strict=True))
