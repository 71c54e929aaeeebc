"""How a script begins and ends: words from outside are made safe to show; each fault is a line and an exit status."""

import atexit
import functools
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pretrain.base import console, foreign
from pretrain.base.errors import BadInput, TrainingStopped, machine_fault

SILENT_SECONDS = 1.0  # how long a process that prints no error waits for the one that does


def catch_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from here on."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def guard() -> None:
    """Make what this process shows from here on safe, and what ends it a line."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: the next file that is opened would be taken for it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    foreign.guard()
    sys.excepthook = functools.partial(_end, sys.excepthook)


def exit_on_bad_input(main: Callable[..., int | None]) -> Callable[..., int]:
    """Wrap a script's ``main``: BadInput prints its lines and returns 2, TrainingStopped returns 1.

    So do errors of the system that are not bugs of ours: a full disk 1, a place that may not be written 2. Any other error
    keeps its traceback, which shows no secret of a URL.
    Every process of a launch finds the same fault; only the first one prints it, unless it is known to one ``alone``.
    """

    @functools.wraps(main)
    def wrapper(*args, **kwargs) -> int:
        guard()
        try:
            status = main(*args, **kwargs) or 0
            sys.stdout.flush()
            return status
        except (BadInput, TrainingStopped) as error:
            return _print(error)
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _output_is_closed():
                return 1
            if (fault := machine_fault(error)) is None:
                raise
            return _print(fault)

    return wrapper


def run_and_exit(main: Callable[[], int], is_uploading: Callable[[], bool]) -> NoReturn:
    """Run a script's ``main`` and end the process with its status, even if an upload is still running.

    Python joins all threads before it exits, so an upload to a server that does not answer would keep the process. In
    this case the functions that libraries have registered for the exit are called here (they close logs and trackers),
    and the process ends without joining.

    Args:
        main: returns the exit status.
        is_uploading: returns whether a thread is still uploading.
    """
    try:
        status = main()
    except Exception:
        if not is_uploading():
            raise
        sys.excepthook(*sys.exc_info())
        status = 1
    if not is_uploading():
        sys.exit(status)
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _output_is_closed() -> bool:
    """Return whether who read standard output has gone, as head does; what is still to be written is then dropped."""
    watch = select.poll()
    watch.register(output := sys.stdout.fileno(), 0)
    if closed := any(event & select.POLLERR for _, event in watch.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # else Python complains at its end
    return closed


def _end(show: Callable, kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Show what ended an import; nothing of Ctrl-C, which the exit status tells."""
    if fault := machine_fault(error):
        _print(fault)
    elif isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("pretrain"):
        remedy = "make environment && source .venv/bin/activate, or pip install -r requirements.txt"
        sys.stderr.write(f"error: {error.name} is not installed for {sys.executable}. Remedy: {remedy}\n")
    elif kind is not KeyboardInterrupt:
        show(kind, error, trace)


def _print(error: BadInput | TrainingStopped) -> int:
    if os.environ.get("RANK", "0") == "0" or error.alone:
        for line in error.lines:
            console.say(f"error: {line}")
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun ends all processes when one of them has failed: let the first one print before.
        time.sleep(SILENT_SECONDS)
    return error.status


if Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve().parent == Path(__file__).parents[2]:
    # One of our scripts, which imports this before what takes seconds. Until it asks for KeyboardInterrupt, Ctrl-C ends it
    # as SIGTERM does: an import would lose the error, or make another of it.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    guard()
    # Beside another program a thread of torch's OpenMP, GCC's, waits for milliseconds with a busy core for one that has
    # none: two runs on two cores were 6 times as slow. 3,000 tests are some 10 us. Thread counts, and so bits, stay.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
