"""Retry a network operation until it succeeds or fails for good."""

import gzip
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import OfflineModeIsEnabled

from ursa_minor.base.errors import BadInput, TrainingStopped
from ursa_minor.base.http import TruncatedError, Unreadable, causes, http_status_and_retry_after
from ursa_minor.base.redaction import one_line, redact

log = logging.getLogger(__name__)

TRIES = 10  # in a row without a new row; with the waits below about four minutes
LONGEST_WAIT_SECONDS, LONGEST_ASKED_SECONDS = 60, 300  # of our own; where a server asks for one
FINAL_STATUS = {400, 401, 403, 404, 405, 410, 416}
FINAL = (FileNotFoundError, PermissionError, OfflineModeIsEnabled)


def retry(what: str, call: Callable[..., Any], *args) -> Any:
    """Return a call's result, tried again as ``retried`` has it."""
    return next(retried(what, lambda _: iter([call(*args)])))


def retried(what: str, read: Callable[[int], Iterator[Any]], row: int = -1) -> Iterator[Any]:
    """Yield what ``read(row)`` yields, each row once: after a problem it is called again with the row of the problem.

    After each failure in a row the wait is longer, to a limit; every retry is logged. What a parser says of a local file
    is final; of a remote one it is when a second reading says the same. ``row``: below 0: there are none to be named.
    """
    local, what = Path(what).is_absolute(), redact(what)
    failures, last = 0, (row, "")
    while True:
        try:
            for value in read(row):
                yield value
                row += 1
            return
        except Exception as caught:  # each client has kinds of its own
            error = min(causes(caught, contexts=True), key=_rank)
        status, asked = http_status_and_retry_after(error, contexts=True)
        where = what if row < 0 else f"{what}: row {row}"
        reason = f"{type(error).__name__}: {one_line(error)[:300]}".rstrip(
            ": ."
        )  # some have no message
        if status is not None:
            reason = f"HTTP status {status}"
        again = local or (row, reason) == last
        if isinstance(error, BadInput):
            raise error from None
        # Clients say "not found" of a server that is down, too: then there is a status.
        if status in FINAL_STATUS or (status is None and isinstance(error, FINAL)):
            raise BadInput(
                f"{where}: {reason}. Check the name, and that you may read it (hf auth login); without a network first "
                f"prepare_data.py ... --prefetch where there is one"
            )
        if again and isinstance(error, Unreadable):
            raise BadInput(f"{what}: {one_line(error)}")
        if again and status is None and not _may_pass(error, local):
            raise BadInput(
                f"{where}: cannot be read: {reason}. Repair or replace the file, or leave it out"
            )
        failures, last = failures + 1 if row == last[0] else 1, (row, reason)
        if failures == TRIES:
            fix = (
                ""
                if status
                else "; without a network, first prepare_data.py ... --prefetch where there is one"
            )
            raise TrainingStopped(
                f"{where}: failed {TRIES} times in a row, last with {reason}. What was read before is kept; the same "
                f"command resumes from there{fix}"
            )
        wait = max(
            min(asked, LONGEST_ASKED_SECONDS), min(LONGEST_WAIT_SECONDS, 2 ** (failures - 1))
        )
        log.warning(f"{where}: {reason}; try {failures + 1} of {TRIES} in {wait:g} s")
        time.sleep(wait)


def _rank(error: BaseException) -> int:
    """Return 0 for the error that says best what is wrong. fsspec says of each request that failed: no such file."""
    return (
        0
        if isinstance(error, BadInput | Unreadable)
        else 2
        if isinstance(error, FileNotFoundError)
        else 1
    )


def _may_pass(error: BaseException, local: bool) -> bool:
    """Return whether a disk or a network failed. Else the bytes were got, and are not what they should be."""
    if isinstance(error, TruncatedError):
        return not local
    if type(error) is OSError:  # Arrow and bz2 raise it, without a number, about their input
        return error.errno is not None
    of_client = type(error).__module__.startswith("http")
    return of_client or (isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile))
