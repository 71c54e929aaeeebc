"""Show log records on the terminal, next to a progress bar, and copy them into run.log.

Only the main process of a launch shows them. Other processes show errors.
"""

import contextlib
import errno
import logging
import os
import re
import sys
from pathlib import Path
from typing import TextIO

from ursa_minor.base import files, terminal
from ursa_minor.base.redaction import RedactingFilter, redact

TOPIC = re.compile(r"\S+ {2,}")  # "data     " in "data     50% of the text"
IMPORTING = "start    importing torch and Transformers"  # the first line of a script


def start(is_main: bool = True, stream: TextIO | None = None) -> None:
    """Show the records of the logger "ursa_minor" from now on, one line each.

    Args:
        is_main: whether this is the main process. Other processes show errors only, because those
            may have occurred in that process only.
        stream: where to write, or None for standard error.
    """
    log = logging.getLogger("ursa_minor")
    level = logging.INFO if is_main else logging.ERROR
    log.handlers = [_Terminal(level, stream)]
    log.propagate = False
    log.setLevel(logging.INFO)


def log_to_file(path: Path) -> None:
    """Append everything that is shown to a file, including all lines since ``start``.

    A file that cannot be opened is ignored, because logging must not stop a run.
    """
    for handler in _terminals():
        with contextlib.suppress(OSError):
            handler.file = files.Log(path)
            handler.copy_to_file(handler.earlier_text)


def say(line: str) -> None:
    """Write a line to standard error and to the log file, in every process."""
    _show(line, None)
    for handler in _terminals():
        handler.copy_to_file(f"{line}\n")


def close_progress_bars() -> None:
    """Leave all progress bars as they are, so that the next line is below them."""
    if "tqdm" in sys.modules:
        from tqdm import tqdm

        for bar in list(getattr(tqdm, "_instances", ())):
            bar.close()


def announce_imports() -> None:
    """Write the first line of a script, which explains why nothing happens for some seconds."""
    say(IMPORTING)


def write(text: str) -> None:
    """Write generated text to standard output.

    A terminal gets the redacted text, because it would obey control characters. A file or pipe gets
    every byte of the text in UTF-8.
    """
    if sys.stdout.isatty():
        data = redact(text).encode(sys.stdout.encoding, "backslashreplace")
    else:
        data = text.encode("utf-8", "surrogateescape")
    sys.stdout.flush()  # text that was printed earlier comes first
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _show(line: str, stream: TextIO | None) -> None:
    """Write a line to a stream, or to standard error if ``stream`` is None.

    A terminal that has been closed does not end the run.

    Raises:
        OSError: ``stream`` cannot be written to.
    """
    output = stream or sys.stderr
    try:
        # Imported here, so that a Python without packages reaches the error message of cli.
        from tqdm import tqdm

        text = line
        if output.isatty():
            text = _wrap(line, terminal.width_of(output) or terminal.DEFAULT_WIDTH)
        tqdm.write(text, file=output)
        output.flush()
    except OSError as error:
        if stream is not None:
            raise
        if error.errno in (errno.EPIPE, errno.EIO):
            # Libraries and native code write to standard error as well, and would fail.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as null:
                os.dup2(null.fileno(), sys.stderr.fileno())


def _wrap(line: str, width: int) -> str:
    """Break a line between words at the width of the terminal.

    Further lines are indented to the text after the topic. A text of several lines is not changed.
    """
    if "\n" in line:
        return line
    indent = ""
    topic = TOPIC.match(line)
    if topic and topic.end() < width / 2:
        indent = " " * topic.end()
    return terminal.wrap(line, width, indent=indent)


def _terminals() -> list["_Terminal"]:
    handlers = logging.getLogger("ursa_minor").handlers
    return [handler for handler in handlers if isinstance(handler, _Terminal)]


class _Terminal(logging.Handler):
    """Show redacted records on the terminal, and copy them into the run's log file."""

    def __init__(self, level: int, stream: TextIO | None):
        super().__init__(level)
        self.addFilter(RedactingFilter())
        self.stream = stream
        self.file: files.Log | None = None
        self.earlier_text = ""  # shown before the file was opened

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if record.levelno >= logging.ERROR:
            line = f"error: {line}"
        _show(line, self.stream)
        self.copy_to_file(f"{line}\n")

    def copy_to_file(self, text: str) -> None:
        """Append to the log file, or store the text until ``log_to_file`` opens the file."""
        if self.file is None:
            self.earlier_text += text
            return
        file_problem = self.file.write(text)
        if file_problem:
            _show(file_problem, self.stream)
