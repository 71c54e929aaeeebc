"""The terminal: what the product logs, beside a progress bar, from the main process of a launch; and a copy in a file."""

import contextlib
import errno
import logging
import os
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TextIO

from ursa_minor.base import files
from ursa_minor.base.redaction import RedactingFilter, redact

ABOUT = re.compile(r"\S+ {2,}")  # "data     ...": what a line is about, before its words


def start(is_main: bool = True, stream: TextIO | None = None) -> None:
    """Write the records of the logger "ursa_minor" to ``stream`` (None: standard error), a line each, and nowhere else.

    Args:
        is_main: other processes write errors only, which no process but the one that logs them knows.
    """
    log = logging.getLogger("ursa_minor")
    log.handlers, log.propagate = (
        [_Terminal(logging.INFO if is_main else logging.ERROR, stream)],
        False,
    )
    log.setLevel(logging.INFO)


def log_to_file(path: Path) -> None:
    """Append to a file what has been shown since ``start`` and what will be; one that cannot be written ends nothing."""
    for terminal in _terminals():
        with contextlib.suppress(OSError):
            terminal.file = files.Log(path)
            terminal.keep(terminal.before)


def say(line: str) -> None:
    """Write a line to standard error and into that file, from whichever process."""
    _show(line, None)
    for terminal in _terminals():
        terminal.keep(f"{line}\n")


def importing() -> None:
    """Write what the next seconds are for: a script's first line, as train.py's."""
    say("start    importing torch and Transformers")


def write(text: str) -> None:
    """Write generated text to standard output.

    A terminal gets the redacted text, because it would obey control characters. A file or pipe gets every byte of the
    text in UTF-8.
    """
    if sys.stdout.isatty():
        data = redact(text).encode(sys.stdout.encoding, "backslashreplace")
    else:
        data = text.encode("utf-8", "surrogateescape")
    sys.stdout.flush()  # what was printed before comes first
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _show(line: str, stream: TextIO | None) -> None:
    """Write a line to ``stream``; to standard error (None) as long as somebody reads it: a dead terminal ends no run."""
    terminal = stream or sys.stderr
    try:
        # Imported here, so that a Python without packages reaches the error message of cli.
        from tqdm import (
            tqdm,
        )

        tqdm.write(_wrapped(line) if terminal.isatty() else line, file=terminal)
        terminal.flush()
    except OSError as error:
        if stream is not None:
            raise
        if error.errno in (errno.EPIPE, errno.EIO):
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stderr.fileno())  # other writers to it survive, too


def _wrapped(line: str) -> str:
    """Return a line broken between words at the terminal's width, below its own words; several lines as they are."""
    width, about = shutil.get_terminal_size().columns, ABOUT.match(line)
    if "\n" in line or len(line) <= width:
        return line
    inset = " " * about.end() if about and about.end() < width / 2 else ""
    return "\n".join(
        textwrap.wrap(
            line, width, subsequent_indent=inset, break_long_words=False, break_on_hyphens=False
        )
    )


def _terminals() -> list["_Terminal"]:
    return [
        handler
        for handler in logging.getLogger("ursa_minor").handlers
        if isinstance(handler, _Terminal)
    ]


class _Terminal(logging.Handler):
    """Show redacted records on the terminal, and copy them into the run's log file."""

    def __init__(self, level: int, stream: TextIO | None):
        super().__init__(level)
        self.addFilter(RedactingFilter())
        self.stream = stream
        self.file: files.Log | None = None
        self.before = ""  # what was shown before there was a file

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if record.levelno >= logging.ERROR:
            line = f"error: {line}"
        _show(line, self.stream)
        self.keep(f"{line}\n")

    def keep(self, text: str) -> None:
        if self.file is None:
            self.before += text
        elif news := self.file.write(text):
            _show(news, self.stream)
