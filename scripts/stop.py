"""Stop the runs of this folder after their next checkpoint, and wait until they have ended.

    python3 scripts/stop.py              # every run under runs/
    python3 scripts/stop.py runs/name    # this run

A run is stopped by SIGTERM to the process whose number is in the run's .lock, if that process
really holds this lock. No other process gets a signal.

The environment variable LIMIT is the number of seconds to wait for all runs (default: 600). The
exit status is 0 if all runs have ended or none was running, 1 if a run is still running, and 2 for
bad input.
"""

import glob
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# On Linux, /proc/locks lists the holder of a lock. On macOS, lsof lists who has the file open.
LOCKS = Path("/proc/locks")


class StoppingRun(NamedTuple):
    """A run whose process has got the signal."""

    name: str  # for messages
    lock: Path
    pid: str

    def is_running(self) -> bool:
        """Return whether the process still holds the lock."""
        return self.lock.exists() and self.pid in holders(self.lock)


class Problem(Exception):
    """The reason why a run cannot be stopped."""


def holders(lock: Path) -> list:
    """Return the numbers of the processes of this user that hold a lock.

    The lock is not taken to find out, because a trainer that starts at this moment would fail.
    """
    if not LOCKS.exists():
        listed = subprocess.run(["lsof", "-wt", "--", lock.absolute()], stdout=subprocess.PIPE)
        return listed.stdout.decode().split()
    pids = []
    for info in map(Path, glob.iglob("/proc/[0-9]*/fdinfo/*")):
        process = info.parent.parent
        open_file = process / "fd" / info.name
        with suppress(OSError):  # the process has ended, or belongs to another user
            if " FLOCK " in info.read_text() and lock.samefile(open_file):
                pids.append(process.name)
    return pids


def signal_run(run: Path):
    """Send SIGTERM to the process of a run.

    Returns:
        A StoppingRun, or None if the run is not running.

    Raises:
        Problem: it is not clear which process to stop.
    """
    lock = run / ".lock"
    if lock.is_symlink():
        raise Problem("its .lock is a link, which a trainer never makes")
    if not lock.is_file():
        return None
    pids = holders(lock)
    if not pids:
        return None
    pid = lock.read_bytes()[:20].decode("ascii", "replace").strip()
    if pid not in pids:
        raise Problem(
            f"process {pids[0]} holds its .lock, which names {pid!r}. If that process is a "
            f"trainer, end it with kill {pids[0]}"
        )
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(int(pid), signal.SIGTERM)
    return StoppingRun(shown_name(run), lock, pid)


def shown_name(run: Path) -> str:
    """Return the name of a run with special characters escaped."""
    return ascii(str(run))


def print_error(message: str) -> None:
    """Print an error message."""
    print(f"error: {message}", file=sys.stderr)


def main(names: list) -> int:
    """Stop the runs, and return the exit status.

    Args:
        names: of the run folders. All under runs/ if empty.
    """
    limit = os.environ.get("LIMIT", "600")
    if not limit.isdecimal():
        print_error(f"LIMIT={limit!r}: must be a whole number of seconds")
        return 2

    has_failed = False
    stopping_runs = []
    for run in map(Path, names or sorted(Path().glob("runs/*"))):
        try:
            if names and not run.is_dir():
                raise Problem("there is no such run")
            stopping_run = signal_run(run)
        except Problem as problem:
            has_failed = True
            print_error(f"{shown_name(run)}: {problem}")
            continue
        if stopping_run is not None:
            stopping_runs.append(stopping_run)
            print(
                f"{stopping_run.name}: process {stopping_run.pid} was asked to stop. Waiting for "
                f"its checkpoint",
                flush=True,
            )
    if not stopping_runs and not has_failed:
        folders = " ".join(map(ascii, names)) or "runs/"
        print(f"No run of yours is running in {folders} on this machine.")

    deadline = time.monotonic() + int(limit)
    for run in stopping_runs:
        is_running = run.is_running()
        while is_running and time.monotonic() < deadline:
            time.sleep(0.2)
            is_running = run.is_running()
        if is_running:
            has_failed = True
            print_error(
                f"{run.name} has not ended after {limit} s. kill -9 {run.pid} ends it, and its "
                f"last checkpoint stays"
            )
        else:
            print(f"{run.name}: stopped. The same command resumes it.", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    # Ctrl-C ends the waiting without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        sys.exit(main(sys.argv[1:]))
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
