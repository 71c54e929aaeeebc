"""End the runs of this folder, each at its next safe point (a checkpoint is written); wait until they have ended.

    python3 scripts/stop.py              # every run under runs/
    python3 scripts/stop.py runs/name    # that one

The signal goes to the process that a run's .lock names, if that process holds this lock: no other program gets one.
LIMIT: seconds to wait, 600 unless set. Exit status: 0 all have ended (or none was running), 1 one has not, 2 bad input.
"""

import glob
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

# On Linux, /proc/locks lists the holder of a lock. On macOS, lsof lists who has the file open.
LOCKS = Path("/proc/locks")


def holders(lock: Path) -> list:
    """Return the processes of this user that hold a lock, without taking it: a trainer may start meanwhile."""
    if not LOCKS.exists():
        return (
            subprocess.run(["lsof", "-wt", "--", lock.absolute()], stdout=subprocess.PIPE)
            .stdout.decode()
            .split()
        )
    pids = []
    for info in map(Path, glob.iglob("/proc/[0-9]*/fdinfo/*")):
        with suppress(OSError):  # it has ended, or is another user's
            if " FLOCK " in info.read_text() and lock.samefile(info.parents[1] / "fd" / info.name):
                pids.append(info.parts[2])
    return pids


def main(names: list) -> int:
    """Send the signals, wait, and print what came of it."""
    limit, failed, waiting = os.environ.get("LIMIT", "600"), False, []
    if not limit.isdecimal():
        print(f"error: LIMIT={limit!r}: give a whole number of seconds", file=sys.stderr)
        return 2
    for run in map(Path, names or sorted(Path().glob("runs/*"))):
        name, lock, problem = ascii(str(run)), run / ".lock", ""  # odd characters are written out
        if lock.is_symlink():
            problem = "its .lock is a link, which no trainer makes"
        elif lock.is_file() and (pids := holders(lock)):
            pid = lock.read_bytes()[:20].decode("ascii", "replace").strip()
            if pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGTERM)
                waiting.append((name, lock, pid))
                print(
                    f"{name}: process {pid} was asked to stop; waiting for its checkpoint",
                    flush=True,
                )
            else:
                problem = f"process {pids[0]} holds its .lock, which names {pid!r}; if it is a trainer, kill it yourself"
        elif names and not run.is_dir():
            problem = "there is no such run"
        if problem:
            failed = True
            print(f"error: {name}: {problem}", file=sys.stderr)

    if not waiting and not failed:
        print(
            f"nothing of yours is running in {' '.join(map(ascii, names)) or 'runs/'} on this machine"
        )
    end = time.monotonic() + int(limit)
    for name, lock, pid in waiting:
        while (runs := lock.exists() and pid in holders(lock)) and time.monotonic() < end:
            time.sleep(0.2)
        failed |= runs
        if runs:
            left = f"has not ended after {limit} s; kill -9 {pid} ends it (the last checkpoint is kept)"
            print(f"error: {name} {left}", file=sys.stderr)
        else:
            print(f"{name}: stopped; the same command resumes it", flush=True)
    return int(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        sys.exit(main(sys.argv[1:]))
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
