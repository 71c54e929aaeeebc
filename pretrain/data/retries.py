"""Faults of reading: which are tried again, how often and after how long, and which are final."""

import gzip
import logging
import lzma
import math
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa

from pretrain.base import network
from pretrain.base.errors import BadInput, TrainingStopped
from pretrain.base.foreign import one_line, redact
from pretrain.base.network import TruncatedError, Unreadable, causes, http_status_and_retry_after
from pretrain.recipe.rules import counted

log = logging.getLogger(__name__)

TRIES = 10  # in a row without a new row; with the waits below about four minutes
LONGEST_WAIT_SECONDS = 60
RETRY_SECONDS = 300  # without a byte, however many tries that takes
FINAL_STATUS = {400, 401, 403, 404, 405, 410, 416}
# Errors of parsers about their input.
PARSERS = (
    *(ValueError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile),
    *(pa.ArrowException, datasets.exceptions.DatasetsError),
)


def retry(what: str, call: Callable[..., Any], *args) -> Any:
    """Return a call's result, retried as ``RetryPolicy`` has it."""
    policy = RetryPolicy(what)
    while True:
        try:
            return call(*args)
        except Exception as error:  # each client has kinds of its own; what is final is sorted out there
            policy.failed(error)


class RetryPolicy:
    """Counts the failures in a row at one thing and waits longer after each, to a limit; every retry is logged.

    What a parser says of a local file is final; of a remote one it is when a second reading says the same.
    """

    def __init__(self, what: str, place: int | None = None):
        self.what, self.failures, self.reason = redact(what), 0, ""
        self.place, self._since = place, time.monotonic()
        self.local = Path(what).is_absolute()
        self.is_file = self.local or "://" in what

    def failed(self, error: BaseException, place: int | None = None) -> None:
        """Wait and return, or raise where waiting does not help. ``place``: the row; a new one is progress."""
        error = _root(error)
        status, asked = http_status_and_retry_after(error, contexts=True)
        where = self.what if place is None else f"{self.what}: row {place}"
        reason = f"{type(error).__name__}: {one_line(error)[:300]}".rstrip(": .")  # some have no message
        if status is not None:
            reason = f"HTTP status {status}"
        elif isinstance(error, Unreadable):
            reason = one_line(error)
        if isinstance(error, huggingface_hub.errors.OfflineModeIsEnabled):
            raise BadInput(
                f"{where}: HF_HUB_OFFLINE is set. Prepare it where there is a network (prepare_data.py ... --prefetch), or "
                f"give local data: --data_files FILE, --data_dir FOLDER"
            ) from None
        # Clients say "not found" of a server that is down, too: then there is a status.
        missing = status is None and isinstance(error, (FileNotFoundError, PermissionError))
        if missing or status in FINAL_STATUS:
            raise BadInput(f"{where}: {reason}. Check the name, and that you may read it (hf auth login)") from None
        if self.local or (place, reason) == (self.place, self.reason):
            if isinstance(error, Unreadable):
                raise BadInput(f"{self.what}: {reason}") from None
            if self.is_file and _is_final(error, self.local):
                raise BadInput(
                    f"{where}: cannot be read: {reason}. Repair or replace the file, or leave it out"
                ) from None
        if self.local and not isinstance(error, OSError):
            raise error
        if place != self.place:
            self.failures, self._since = 0, time.monotonic()
        self.failures, self.place, self.reason = self.failures + 1, place, reason
        left = math.ceil(max(self._since, network.moved_at) + RETRY_SECONDS - time.monotonic())
        if self.failures >= TRIES or left <= 0:
            remedy = "" if status else "; without a network, first prepare_data.py ... --prefetch where there is one"
            raise TrainingStopped(
                f"{where}: failed {counted(self.failures, 'time', 'times')} in a row, last with {reason}. What was read "
                f"before is kept; the same command resumes from there{remedy}"
            ) from None
        wait = min(left, max(asked, min(LONGEST_WAIT_SECONDS, 2 ** (self.failures - 1))))
        log.warning(f"{where}: {reason}; try {self.failures + 1} of {TRIES} in {wait:g} s")
        time.sleep(wait)


def _root(error: BaseException) -> BaseException:
    """Return the error, of those behind this one, that says what is wrong. Raises one that is BadInput."""
    behind = [*causes(error, contexts=True)]
    for one in behind:
        if isinstance(one, BadInput):
            raise one from None
    # fsspec says of each request that failed that the file is missing; why it failed stands behind that.
    found: list[BaseException] = [one for one in behind if isinstance(one, Unreadable)]
    found += [one for one in behind if not isinstance(one, FileNotFoundError)]
    return [*found, error][0]


def _is_final(error: BaseException, local: bool) -> bool:
    """Return whether the bytes were got and are not what they should be; an error with a number, of a disk, may pass."""
    if isinstance(error, TruncatedError):
        return local
    if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):  # Arrow and bz2 raise a plain one
        return type(error) is OSError and error.errno is None
    return isinstance(error, PARSERS) or type(error).__name__ == "ZstdError"  # of several packages
