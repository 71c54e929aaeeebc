"""Start and end a script: closed streams, Ctrl-C, one-line errors and exit statuses."""

import atexit
import contextlib
import functools
import logging
import logging.handlers
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypeVar

from ursa_minor.base import console
from ursa_minor.base.errors import BadInput, TrainingStopped, machine_error
from ursa_minor.base.paths import ROOT

Command = TypeVar("Command")

# How long a process that does not print its error waits for the main process to print it.
SILENT_SECONDS = 1.0
_is_ending = threading.Lock()


def catch_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def announce_early_stop() -> None:
    """Print a line when Ctrl-C or SIGTERM ends a training process before it begins to train.

    Afterwards ``StopRequest`` handles these signals. Python calls a handler only between two
    instructions of the main thread, which may wait in native code for another process for minutes.
    A thread therefore waits for the signals as well.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end_before_training)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch_signals, args=(reader,), daemon=True).start()


def _watch_signals(reader: int) -> None:
    """End the process at a signal whose handler is ``_end_before_training``."""
    while True:
        for number in os.read(reader, 1):
            if signal.getsignal(number) == _end_before_training:
                _end_before_training(number, None)


def _end_before_training(number: int, frame: object) -> None:
    if not _is_ending.acquire(blocking=False):
        return  # the other thread is ending the process
    if is_main_process():
        line = (
            f"stopped by {signal.Signals(number).name} before training began; repeat the same "
            f"command to start again. Data that is already prepared and checkpoints are kept\n"
        )
        with contextlib.suppress(OSError):  # the terminal may be closed
            os.write(2, line.encode())
    os._exit(128 + number)


def set_up_process() -> None:
    """Replace closed standard streams, and install the handler of uncaught errors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # Otherwise the next file that is opened would get the descriptor of the closed stream, and
        # with it everything that is written to the stream.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    sys.excepthook = _show_uncaught


def is_main_process() -> bool:
    """Return whether this is the only process or the first process of a launch."""
    return os.environ.get("RANK", "0") == "0"


def parse_before_imports(name: str, parse: Callable[[list[str]], Command]) -> Command | None:
    """Parse the command line of a script before its slow imports.

    An error in the command line is therefore shown immediately.

    Args:
        name: the ``__name__`` of the script.
        parse: parses the arguments after the script's name. It may raise BadInput.

    Returns:
        What ``parse`` returns, or None if the script is imported as a module.

    Raises:
        SystemExit: with status 2 for bad input, and with 0 after ``--help``.
    """
    if name != "__main__":
        return None
    # Collect the notes on a recipe, and show them only if the command line is valid.
    notes = logging.handlers.MemoryHandler(capacity=1000, flushLevel=logging.CRITICAL + 1)
    log = logging.getLogger("ursa_minor")
    log.handlers = [notes]
    log.propagate = False
    log.setLevel(logging.INFO)
    commands: list[Command] = []

    @exit_on_bad_input
    def parse_arguments() -> None:
        commands.append(parse(sys.argv[1:]))

    status = parse_arguments()
    if status:
        sys.exit(status)

    console.start(is_main=is_main_process())
    for record in notes.buffer:
        log.handle(record)
    if is_main_process():
        sys.stderr.write(f"{console.IMPORTING}\n")
        sys.stderr.flush()
    return commands[0]


def exit_on_bad_input(main: Callable[..., int | None]) -> Callable[..., int]:
    """Wrap the ``main`` of a script to print errors that the user can fix without a traceback.

    - For BadInput, the exit status is 2, and for TrainingStopped it is 1.
    - Errors of the operating system are treated in the same way. For example, the status is 1 for a
      full disk, and 2 for a folder without write permission.
    - Any other error is raised. Its traceback is not redacted.

    Usually every process of a launch finds the same error, and only the main process prints it. See
    ``print_on_every_process`` of the errors for the exception.
    """

    @functools.wraps(main)
    def wrapper(*args, **kwargs) -> int:
        set_up_process()
        try:
            status = main(*args, **kwargs) or 0
            sys.stdout.flush()
            return status
        except (BadInput, TrainingStopped) as error:
            return _print(error)
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _output_is_closed():
                return 1
            problem = machine_error(error)
            if problem is None:
                raise
            return _print(problem)

    return wrapper


def run_and_exit(main: Callable[[], int], is_uploading: Callable[[], bool]) -> NoReturn:
    """Run a script's ``main`` and end the process with its status, without waiting for uploads.

    Python joins all threads before it exits. An upload to a server that does not answer would
    therefore keep the process alive. In this case, this function calls the functions that libraries
    have registered with ``atexit``, which close logs and trackers, and ends the process without
    joining threads.

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
    """Return whether the reader of standard output, such as ``head``, has ended.

    If so, discard the output that is not yet written. Otherwise Python would print an error when it
    flushes the output at exit.
    """
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    is_closed = any(event & select.POLLERR for _, event in poll.poll(0))
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return is_closed


def _show_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show an error that ends the process: in one line if the fix is known, else as a traceback.

    Nothing is shown after Ctrl-C, because the exit status reports it.
    """
    problem = machine_error(error)
    if problem is not None:
        _print(problem)
    elif isinstance(error, ModuleNotFoundError) and _is_third_party(error.name):
        fix = "make environment && source .venv/bin/activate, or pip install -r requirements.txt"
        sys.stderr.write(f"error: {error.name} is not installed for {sys.executable}. Fix: {fix}\n")
    elif kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)


def _is_third_party(module: str | None) -> bool:
    if not module:
        return False
    return not module.startswith("ursa_minor")


def _print(error: BadInput | TrainingStopped) -> int:
    """Print an error if this process must do so. Return the exit status."""
    if is_main_process() or error.print_on_every_process:
        console.close_progress_bars()  # otherwise a bar would be the last line
        for line in error.lines:
            console.say(f"error: {line}")
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun ends all processes when one of them has failed. Let the main process print first.
        time.sleep(SILENT_SECONDS)
    return error.status


def _is_one_of_our_scripts() -> bool:
    script = getattr(sys.modules["__main__"], "__file__", None)
    return script is not None and Path(script).resolve().parent == ROOT


if _is_one_of_our_scripts():
    # A script imports this module before those that take seconds. Until it calls catch_interrupts,
    # Ctrl-C ends the process as SIGTERM does. A library that is being imported might suppress
    # KeyboardInterrupt, or raise another error for it.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    set_up_process()
    # An idle thread of GCC's OpenMP, which torch uses, spins for milliseconds before it sleeps. Two
    # runs on two cores were 6 times slower because of that. 3,000 iterations take about 10 us. The
    # number of threads stays the same, and so do the results.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
