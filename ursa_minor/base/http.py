"""Read HTTP answers: status, Retry-After, stalled downloads, and pages of proxies."""

import re
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from multiprocessing.pool import ThreadPool

# A download is stalled if it receives fewer than SLOW_BYTES during SLOW_SECONDS of waiting.
SLOW_SECONDS = 60
SLOW_BYTES = 2**16
# Header with the Retry-After of the server, if hub/client.py has shortened Retry-After itself.
SERVER_RETRY_AFTER = "X-Server-Retry-After"
HTML_START = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html)\b", re.IGNORECASE)


class Unreadable(ValueError):
    """The bytes are not in the expected format. The message states what to do."""


class TruncatedError(OSError):
    """There are fewer bytes or rows than expected."""


def causes(error: BaseException | None, *, contexts: bool = False) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it, each once.

    Args:
        error: the last error of the chain.
        contexts: whether to include errors that were being handled when another one was raised.
            Some libraries raise an error without naming its cause.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        cause = error.__cause__
        if cause is None and contexts:
            cause = error.__context__
        error = cause


def http_status_and_retry_after(
    error: BaseException | None, *, contexts: bool = False
) -> tuple[int | None, float]:
    """Return the HTTP status of the answer that caused an error, and its Retry-After in seconds.

    The status is None if there was no answer.

    Args:
        error: an error of any HTTP client.
        contexts: see ``causes``.
    """
    for cause in causes(error, contexts=contexts):
        # aiohttp and urllib have the status in the error, httpx and requests in its response.
        response = getattr(cause, "response", None)
        status = getattr(cause, "status", None) or getattr(response, "status_code", None)
        if isinstance(status, int):
            headers = getattr(cause, "headers", None) or getattr(response, "headers", None) or {}
            return status, retry_after(headers)
    return None, 0.0


def retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a server asks to wait, by a number or a date, or 0 if it does not."""
    value = headers.get(SERVER_RETRY_AFTER) or headers.get("Retry-After", "")
    value = str(value).strip()
    if re.fullmatch("[0-9]+", value):
        return float(value)
    try:
        date = parsedate_to_datetime(value)
        return max(0.0, date.timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):  # it is not a date
        return 0.0


def raise_if_stalled(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the blocks of a download.

    Raises:
        TimeoutError: fewer than SLOW_BYTES arrived during SLOW_SECONDS of waiting.
    """
    waited = 0.0  # seconds since the last SLOW_BYTES
    received = 0  # bytes since then
    started = time.monotonic()
    for block in blocks:
        waited += time.monotonic() - started
        received += len(block)
        if received >= SLOW_BYTES:
            waited = 0.0
            received = 0
        elif waited > SLOW_SECONDS:
            raise TimeoutError(
                f"received fewer than {SLOW_BYTES:,} bytes in {SLOW_SECONDS} seconds"
            )
        yield block
        started = time.monotonic()  # the caller's own time does not count


def reach(url: str, seconds: float) -> str:
    """Request a URL and return the problem, or "" if the server answers with success.

    Args:
        url: the address.
        seconds: time limit.
    """
    # In a thread, because urlopen does not limit the time to look up a host name.
    pool = ThreadPool(1)
    try:
        request = pool.apply_async(urllib.request.urlopen, (url,), {"timeout": seconds})
        response = request.get(seconds + 1)
        response.close()
    except Exception as error:  # look-ups, sockets, TLS and invalid URLs have different errors
        return str(error) or f"no answer in {seconds:g} s"
    return ""


def check_no_html_page(start: bytes, headers: Mapping[str, str], url: str) -> None:
    """Check that an answer is not the HTML page of a proxy or a login.

    A data file may be sent as text/html, or start with "<html>". An answer is a page only if both
    are true.

    Args:
        start: the first bytes of the answer.
        headers: the headers of the answer.
        url: for the message.

    Raises:
        Unreadable: the answer is a page.
    """
    is_sent_as_html = "html" in headers.get("Content-Type", "").lower()
    if is_sent_as_html and HTML_START.match(start):
        raise Unreadable(
            f"the answer of {url} looks like a proxy or login page (HTML); open it in a browser "
            f"and log in, or set HTTPS_PROXY and NO_PROXY as this network requires. If the URL is "
            f"that of a page about the file, use its download link"
        )
