"""Servers' answers: the status and wait that they state, and signs of a wrong answer."""

import contextlib
import re
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from multiprocessing.pool import ThreadPool

SLOW_SECONDS, SLOW_BYTES = 60, 2**16  # an answer that brings less in this time is as good as silent
ASKED = "X-Retry-After-Asked"  # what a server asked for, where a client that would obey it was given less
PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html)\b", re.IGNORECASE)


class Unreadable(ValueError):
    """Bytes that are not what they should be; its text says what to do."""


class TruncatedError(OSError):
    """There are fewer bytes or rows than there should be."""


def causes(error: BaseException | None, *, contexts: bool = False) -> Iterator[BaseException]:
    """Yield an error and those behind it, each once.

    Args:
        contexts: also one that was met while another was handled; some libraries name no cause.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if contexts else None)


def http_status_and_retry_after(
    error: BaseException | None, *, contexts: bool = False
) -> tuple[int | None, float]:
    """Return the HTTP status behind an error (None: there was no answer), and the seconds that its Retry-After asks for.

    Args:
        contexts: as ``causes`` has it.
    """
    for cause in causes(error, contexts=contexts):
        answer = getattr(cause, "response", None)
        status = getattr(cause, "status", None) or getattr(answer, "status_code", None)
        if isinstance(status, int):
            return status, retry_after(
                getattr(cause, "headers", None) or getattr(answer, "headers", None) or {}
            )
    return None, 0.0


def retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a server asks to wait, by a number or a date, however many; 0 for anything else."""
    wait, seconds = str(headers.get(ASKED) or headers.get("Retry-After", "")).strip(), 0.0
    with contextlib.suppress(ValueError, TypeError, OverflowError):  # it is not a date
        is_number = re.fullmatch("[0-9]+", wait)
        seconds = (
            float(wait) if is_number else parsedate_to_datetime(wait).timestamp() - time.time()
        )
    return max(0.0, seconds)


def raise_if_stalled(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the blocks of an answer. Raises TimeoutError where fewer than SLOW_BYTES are waited for SLOW_SECONDS."""
    waited, got, begun = 0.0, 0, time.monotonic()
    for block in blocks:
        waited, got = waited + time.monotonic() - begun, got + len(block)
        if got >= SLOW_BYTES:
            waited, got = 0.0, 0
        elif waited > SLOW_SECONDS:
            raise TimeoutError(f"fewer than {SLOW_BYTES:,} bytes came in {SLOW_SECONDS} seconds")
        yield block
        begun = time.monotonic()


def reach(url: str, seconds: float) -> str:
    """Ask an address; return what went wrong ("": it answered; HTTP Error and a status: it refused)."""
    pool = ThreadPool(1)  # a name's look-up has no limit of its own
    try:
        pool.apply_async(urllib.request.urlopen, (url,), {"timeout": seconds}).get(
            seconds + 1
        ).close()
    except Exception as error:  # names, sockets, TLS and bad addresses each raise their own kinds
        return str(error) or f"no answer in {seconds:g} s"
    return ""


def check_no_html_page(begin: bytes, headers: Mapping[str, str], url: str) -> None:
    """Raise Unreadable for an answer that is HTML by its headers and by the bytes that it begins with."""
    if "html" in headers.get("Content-Type", "").lower() and PAGE.match(begin):
        raise Unreadable(
            f"the answer of {url} looks like a proxy's or log-in page (HTML); open it in a browser and log in, or set "
            f"HTTPS_PROXY and NO_PROXY as this network wants them"
        )
