"""The terminal: what the product logs, beside a progress bar, from the main process of a launch."""

import logging
import sys
from typing import TextIO

from tqdm import tqdm


def start(is_main: bool = True, stream: TextIO | None = None) -> None:
    """Write the records of the logger "pretrain" to ``stream`` (None: standard error), a line each, and nowhere else.

    Args:
        is_main: other processes write errors only, which no process but the one that logs them knows.
    """
    log = logging.getLogger("pretrain")
    log.handlers, log.propagate = [_Terminal(logging.INFO if is_main else logging.ERROR, stream)], False
    log.setLevel(logging.INFO)


class _Terminal(logging.Handler):
    def __init__(self, level: int, stream: TextIO | None):
        super().__init__(level)
        self.stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        stream = self.stream or sys.stderr
        tqdm.write(self.format(record), file=stream)
        stream.flush()

    def format(self, record: logging.LogRecord) -> str:
        return f"error: {record.getMessage()}" if record.levelno >= logging.ERROR else record.getMessage()
