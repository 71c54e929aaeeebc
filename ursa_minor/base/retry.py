"""Retry a network operation until it succeeds or fails for good.

``call_with_retries`` is the loop. ``retry`` and ``retried`` use it for the data, hub/client.py for
pushes and pulls, evaluation/task_data.py for the items of tasks.
"""

import errno
import gzip
import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

from ursa_minor.base.errors import BadInput, TrainingStopped
from ursa_minor.base.http import TruncatedError, Unreadable, causes, http_status_and_retry_after
from ursa_minor.base.redaction import one_line, redact

log = logging.getLogger(__name__)

WAIT_SECONDS = (1, 2, 4, 8, 16, 32, 60)  # between attempts; the last one is repeated
# Statuses below 500 that may pass: timeout, conflict, precondition, lock, too early, rate limit.
PASSING_STATUS = {408, 409, 412, 423, 425, 429}
FINAL_STATUS = set(range(400, 500)) - PASSING_STATUS
FULL_OR_READ_ONLY = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}  # of the local disk

# Of reading the data:
TRIES = 10  # in a row without a new row; with the waits above about four minutes
LONGEST_ASKED_SECONDS = 300  # that a wait follows a server's Retry-After
FINAL_ERRORS = (FileNotFoundError, PermissionError, OfflineModeIsEnabled)
PREFETCH = "without a network first prepare_data.py ... --prefetch where there is one"

_END = object()


def call_with_retries(
    call: Callable[[], Any],
    *,
    check: Callable[[Exception], float] | None = None,
    log_retry: Callable[[Exception, float], None] | None = None,
    deadline_seconds: float = math.inf,
) -> Any:
    """Return the result of a call. After an error that may pass, wait and call again.

    Args:
        check: receives each error. It raises an error if another attempt would not help, and else
            returns the seconds that the server asks to wait. The default is ``check_may_pass``.
        log_retry: receives the error and the seconds before each wait.
        deadline_seconds: no attempt starts later than this after the first failure. Then the last
            error is raised.
    """
    if check is None:
        check = check_may_pass
    failures = 0
    deadline = math.inf
    while True:
        try:
            return call()
        except Exception as caught:  # each client has its own errors
            error = caught
        failures += 1
        if failures == 1:
            deadline = time.monotonic() + deadline_seconds

        usual_wait = WAIT_SECONDS[min(failures, len(WAIT_SECONDS)) - 1]
        wait = max(usual_wait, check(error))
        if time.monotonic() + wait > deadline:
            raise error
        if log_retry:
            log_retry(error, wait)
        time.sleep(wait)


def check_may_pass(error: Exception) -> float:
    """Return the seconds that a server asks to wait.

    Raises:
        Exception: the error itself, if another attempt would end in the same way.
    """
    status, retry_after = http_status_and_retry_after(error)
    is_final = isinstance(error, BadInput | HFValidationError | OfflineModeIsEnabled | Unreadable)
    is_disk_error = getattr(error, "errno", None) in FULL_OR_READ_ONLY
    if is_final or is_disk_error or status in FINAL_STATUS:
        raise error
    return retry_after


def retry(what: str, call: Callable[..., Any], *args) -> Any:
    """Return the result of a call that reads data. It is retried as in ``retried``."""
    failures = _DataFailures(what)
    return call_with_retries(
        partial(call, *args), check=failures.check, log_retry=failures.log_retry
    )


def retried(what: str, read: Callable[[int], Iterator[Any]], row: int) -> Iterator[Any]:
    """Yield the rows that ``read(row)`` yields. After an error, read again from its row.

    Args:
        what: file, URL or data set, for messages.
        read: yields the rows from a row number on.
        row: the first row.

    Raises:
        BadInput: another attempt would not help. An error of a parser is final for a local file,
            and for a remote one if it occurs twice.
        TrainingStopped: ``TRIES`` attempts in a row failed.
    """
    rows: Iterator[Any] | None = None

    def read_row() -> Any:
        nonlocal rows
        if rows is None:
            rows = read(row)
        try:
            return next(rows, _END)
        except Exception:
            rows = None
            raise

    failures = _DataFailures(what, row)
    while True:
        value = call_with_retries(read_row, check=failures.check, log_retry=failures.log_retry)
        if value is _END:
            return
        yield value
        row += 1
        failures.start(row)


class _DataFailures:
    """The failures in a row of reading one row, or of one request.

    Args:
        what: file, URL or data set, for messages.
        row: number of the row. None for a request.
    """

    def __init__(self, what: str, row: int | None = None):
        self._is_local = Path(what).is_absolute()
        self._what = redact(what)
        self.start(row)

    def start(self, row: int | None) -> None:
        """Forget the failures: what follows is another row."""
        self._row = row
        self._number = 0
        self._reason = ""

    def check(self, caught: Exception) -> float:
        """Return the seconds that the server asks to wait.

        Raises:
            BadInput, TrainingStopped: no attempt follows; see ``retried``.
        """
        error = min(causes(caught, contexts=True), key=_rank)
        if isinstance(error, BadInput):
            raise error from None
        status, retry_after = http_status_and_retry_after(error, contexts=True)
        reason = describe(error)
        is_repeated = self._is_local or reason == self._reason
        self._reason = reason
        self._number += 1

        # Clients also report "not found" when a server is down. Then there is a status.
        if status in FINAL_STATUS or (status is None and isinstance(error, FINAL_ERRORS)):
            raise BadInput(
                f"{self._where}: {reason}. Check the name, and that you may read it "
                f"(hf auth login); {PREFETCH}"
            )
        if is_repeated and isinstance(error, Unreadable):
            raise BadInput(f"{self._what}: {one_line(error)}")
        if is_repeated and status is None and not _may_pass(error, self._is_local):
            raise BadInput(
                f"{self._where}: cannot be read: {reason}. "
                f"Repair or replace the file, or leave it out"
            )
        if self._number == TRIES:
            fix = "" if status else f"; {PREFETCH}"
            raise TrainingStopped(
                f"{self._where}: failed {TRIES} times in a row, last with {reason}. "
                f"What was read before is kept; the same command resumes from there{fix}"
            )
        return min(retry_after, LONGEST_ASKED_SECONDS)

    def log_retry(self, error: Exception, wait: float) -> None:
        """Log that another attempt follows."""
        log.warning(
            f"{self._where}: {self._reason}; try {self._number + 1} of {TRIES} in {wait:g} s"
        )

    @property
    def _where(self) -> str:
        return self._what if self._row is None else f"{self._what}: row {self._row}"


def describe(error: BaseException) -> str:
    """Return an error in one line: its HTTP status, or its name and message."""
    status, _ = http_status_and_retry_after(error, contexts=True)
    if status is not None:
        return f"HTTP status {status}"
    text = f"{type(error).__name__}: {one_line(error)[:300]}"
    return text.rstrip(": .")  # some errors have no message


def _rank(error: BaseException) -> int:
    """Return 0 for the error that describes the problem best."""
    if isinstance(error, BadInput | Unreadable):
        return 0
    if isinstance(error, FileNotFoundError):  # fsspec raises it for every failed request
        return 2
    return 1


def _may_pass(error: BaseException, is_local: bool) -> bool:
    """Return whether a disk or a network failed. Otherwise the bytes themselves are wrong."""
    if isinstance(error, TruncatedError):
        return not is_local
    if type(error) is OSError:  # Arrow and bz2 raise it, without a number, for bad input
        return error.errno is not None
    is_of_client = type(error).__module__.startswith("http")
    is_of_system = isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile)
    return is_of_client or is_of_system
