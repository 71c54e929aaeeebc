"""Retry a network operation until it succeeds or another attempt would not help.

``call_with_retries`` is the loop. ``retry`` and ``retried`` use it to read data, hub/client.py for
pushes and pulls, and evaluation/task_data.py to load the items of tasks.
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

# Waits between two attempts. After the last one, every wait has its length.
WAIT_SECONDS = (1, 2, 4, 8, 16, 32, 60)
# Statuses below 500 after which another attempt may succeed: timeout, conflict, precondition, lock,
# too early, rate limit.
TEMPORARY_STATUS = {408, 409, 412, 423, 425, 429}
FINAL_STATUS = set(range(400, 500)) - TEMPORARY_STATUS
FULL_OR_READ_ONLY = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}  # the local disk

# For reading data:
TRIES = 10  # attempts without a new row; with the waits above they take about four minutes
MAX_RETRY_AFTER_SECONDS = 300  # a longer Retry-After of a server is shortened to this
FINAL_ERRORS = (FileNotFoundError, PermissionError, OfflineModeIsEnabled)
PREFETCH = "without a network, first run prepare_data.py ... --prefetch on a machine that has one"

_END = object()  # marks the end of the rows


def call_with_retries(
    call: Callable[[], Any],
    *,
    check: Callable[[Exception], float] | None = None,
    log_retry: Callable[[Exception, float], None] | None = None,
    deadline_seconds: float = math.inf,
) -> Any:
    """Return the result of a call. After a temporary error, wait and call again.

    Args:
        call: the operation.
        check: receives each error. It raises an error if another attempt would not help. Otherwise
            it returns the seconds that the server asks to wait. The default is ``check_temporary``.
        log_retry: receives the error and the seconds before each wait.
        deadline_seconds: no attempt starts later than this after the first failure. The last error
            is raised instead.
    """
    if check is None:
        check = check_temporary
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


def check_temporary(error: Exception) -> float:
    """Check that an error may be temporary. Return the seconds that the server asks to wait.

    Raises:
        Exception: the error itself, if another attempt would fail in the same way.
    """
    status, retry_after = http_status_and_retry_after(error)
    is_final = isinstance(error, BadInput | HFValidationError | OfflineModeIsEnabled | Unreadable)
    is_disk_error = getattr(error, "errno", None) in FULL_OR_READ_ONLY
    if is_final or is_disk_error or status in FINAL_STATUS:
        raise error
    return retry_after


def retry(source: str, call: Callable[..., Any], *args) -> Any:
    """Return the result of ``call(*args)``, which reads data. Errors are handled as in ``retried``.

    Args:
        source: file, URL or data set, for messages.
        call: the operation.
        args: its arguments.
    """
    failures = _DataFailures(source)
    return call_with_retries(
        partial(call, *args), check=failures.check, log_retry=failures.log_retry
    )


def retried(source: str, read: Callable[[int], Iterator[Any]], row: int) -> Iterator[Any]:
    """Yield the rows that ``read(row)`` yields. After an error, read again from the same row.

    Args:
        source: file, URL or data set, for messages.
        read: yields the rows from a row number on.
        row: number of the first row.

    Raises:
        BadInput: another attempt would not help. An error of a parser is final for a local file,
            and for a remote one if it occurs twice.
        TrainingStopped: ``TRIES`` attempts in a row have failed.
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

    failures = _DataFailures(source, row)
    while True:
        value = call_with_retries(read_row, check=failures.check, log_retry=failures.log_retry)
        if value is _END:
            return
        yield value
        row += 1
        failures.start(row)


class _DataFailures:
    """Consecutive failures to read one row, or of one request.

    Args:
        source: file, URL or data set, for messages.
        row: number of the row. None for a request.
    """

    def __init__(self, source: str, row: int | None = None):
        self._is_local = Path(source).is_absolute()
        self._source = redact(source)
        self.start(row)

    def start(self, row: int | None) -> None:
        """Start with another row, and forget earlier failures."""
        self._row = row
        self._count = 0
        self._reason = ""  # of the last failure

    def check(self, caught: Exception) -> float:
        """Return the seconds that the server asks to wait.

        Raises:
            BadInput, TrainingStopped: there is no further attempt; see ``retried``.
        """
        error = min(causes(caught, contexts=True), key=_rank)
        if isinstance(error, BadInput):
            raise error from None
        status, retry_after = http_status_and_retry_after(error, contexts=True)
        reason = describe(error)
        is_repeated = self._is_local or reason == self._reason
        self._reason = reason
        self._count += 1

        # Clients also raise "not found" when a server is down. Then there is a status.
        if status in FINAL_STATUS or (status is None and isinstance(error, FINAL_ERRORS)):
            raise BadInput(
                f"{self._location}: {reason}. Check the name, and that you may read it "
                f"(hf auth login); {PREFETCH}"
            )
        if is_repeated and isinstance(error, Unreadable):
            raise BadInput(f"{self._source}: {one_line(error)}")
        if is_repeated and status is None and not _is_temporary(error, self._is_local):
            raise BadInput(
                f"{self._location}: cannot be read: {reason}. "
                f"Repair or replace the file, or leave it out"
            )
        if self._count == TRIES:
            fix = "" if status else f"; {PREFETCH}"
            raise TrainingStopped(
                f"{self._location}: failed {TRIES} times in a row, last with {reason}. "
                f"The rows that were read are saved; the same command resumes from there{fix}"
            )
        return min(retry_after, MAX_RETRY_AFTER_SECONDS)

    def log_retry(self, error: Exception, wait: float) -> None:
        """Log that another attempt follows."""
        log.warning(
            f"{self._location}: {self._reason}; retrying in {wait:g} s "
            f"(attempt {self._count + 1} of {TRIES})"
        )

    @property
    def _location(self) -> str:
        if self._row is None:
            return self._source
        return f"{self._source}: row {self._row}"


def describe(error: BaseException) -> str:
    """Describe an error in one line by its HTTP status, or by its class and message."""
    status, _ = http_status_and_retry_after(error, contexts=True)
    if status is not None:
        return f"HTTP status {status}"
    message = one_line(error)[:300]
    description = f"{type(error).__name__}: {message}"
    return description.rstrip(": .")  # some errors have no message


def _rank(error: BaseException) -> int:
    """Return a number that is lowest for the error that describes the problem best."""
    if isinstance(error, BadInput | Unreadable):
        return 0
    if isinstance(error, FileNotFoundError):  # fsspec raises it for every failed request
        return 2
    return 1


def _is_temporary(error: BaseException, is_local: bool) -> bool:
    """Return whether a disk or a network has failed. Otherwise the bytes themselves are wrong."""
    if isinstance(error, TruncatedError):
        return not is_local
    if type(error) is OSError:  # Arrow and bz2 raise it, without a number, for bad input
        return error.errno is not None
    is_client_error = type(error).__module__.startswith("http")  # http.client, httpx, httpcore
    is_system_error = isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile)
    return is_client_error or is_system_error
