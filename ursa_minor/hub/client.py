"""The client of the Hugging Face Hub with timeouts, retries and one-line errors.

The client of huggingface_hub waits forever for a server that does not answer, and retries only
some requests. It reads the token itself (HF_TOKEN or a login). No file and no message contains the
token.
"""

import contextlib
import functools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, set_client_factory
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.logging import set_verbosity_error

from ursa_minor.base.errors import BadInput, TrainingStopped
from ursa_minor.base.http import (
    SERVER_RETRY_AFTER,
    check_no_html_page,
    http_status_and_retry_after,
    raise_if_stalled,
    retry_after,
)
from ursa_minor.base.redaction import one_line
from ursa_minor.base.retry import FINAL_STATUS, call_with_retries

# Seconds for each part of a request, as httpx names them.
TIMEOUTS = {"connect": 10, "read": 60, "write": 60, "pool": 60}
DEADLINE_SECONDS = 15 * 60  # time after the first failure in which attempts are made
# Longest wait of huggingface_hub's own retries, whatever Retry-After the server sends.
CLIENT_WAIT_SECONDS = 60
MESSAGE_LENGTH = 300  # maximum length of a quoted error in characters


@functools.cache
def set_timeouts() -> None:
    """Set the timeouts of the client. Only the first call in a process has an effect."""

    # huggingface_hub creates the client again after some errors, and requests no timeout when it
    # lists files. So the timeouts are set when a request is sent.
    def create_client() -> Any:
        client = default_client_factory()
        client.event_hooks["request"].append(_set_timeouts)
        client.event_hooks["response"].append(_check_response)
        return client

    set_client_factory(create_client)


def _set_timeouts(request: Any) -> None:
    """Set the timeouts that a request lacks."""
    timeouts = dict(request.extensions.get("timeout", {}))
    for name, default_seconds in TIMEOUTS.items():
        if not timeouts.get(name):
            timeouts[name] = default_seconds
    request.extensions["timeout"] = timeouts


def _check_response(response: Any) -> None:
    """Bound how long the client waits because of a response.

    Raises:
        Unreadable: the response is the page of a proxy.
    """
    headers = response.headers
    if response.is_success:
        read_blocks = response.iter_raw
        response.iter_raw = lambda *args, **kwargs: raise_if_stalled(read_blocks(*args, **kwargs))
        if "html" in headers.get("Content-Type", "").lower():
            check_no_html_page(response.read(), headers, str(response.request.url))
    elif headers.get("Retry-After"):
        seconds = min(CLIENT_WAIT_SECONDS, retry_after(headers))
        # Our own retries respect the original value.
        headers[SERVER_RETRY_AFTER] = headers["Retry-After"]
        headers["Retry-After"] = str(int(seconds))


def api() -> HfApi:
    """Return the client with timeouts. It writes nothing to the terminal."""
    set_timeouts()
    warnings.filterwarnings("ignore", module="huggingface_hub")
    disable_progress_bars()
    set_verbosity_error()
    return HfApi()


def read_file(repo_id: str, name: str, revision: str | None) -> bytes:
    """Return the contents of a small file of a model repository."""
    with tempfile.TemporaryDirectory() as folder:  # the cache would keep every version
        path = api().hf_hub_download(repo_id, name, revision=revision, local_dir=folder)
        return Path(path).read_bytes()


def retry(
    call: Callable[..., Any], *args, log_line: Callable[[str], None] | None = None, **kwargs
) -> Any:
    """Return the result of a call. After an error that may pass, wait and call again.

    Args:
        call: function that is called with ``args`` and ``kwargs``.
        log_line: function that receives a line for the log before each wait.

    Raises:
        Exception: the last error, if another attempt cannot help or DEADLINE_SECONDS have passed.
    """

    def log_retry(error: Exception, wait: float) -> None:
        if log_line:
            log_line(f"hub      {describe(error)}; retrying in {wait:g} s")

    return call_with_retries(
        functools.partial(call, *args, **kwargs),
        log_retry=log_retry,
        deadline_seconds=DEADLINE_SECONDS,
    )


@contextlib.contextmanager
def converting_errors(prefix: str, fix: str, retry_fix: str = "") -> Iterator[None]:
    """Convert an error of the client inside the block into one line.

    Args:
        prefix: beginning of the message, such as the option.
        fix: sentence with the fix of a permanent error.
        retry_fix: end of the message for a temporary error.

    Raises:
        BadInput: the error is permanent, for example HTTP status 404.
        TrainingStopped: the error is temporary, for example a timeout.
    """
    try:
        yield
    except (BadInput, TrainingStopped):
        raise
    except Exception as error:  # each layer of the client has its own exception classes
        message = f"{prefix}: {describe(error)}"
        status, _ = http_status_and_retry_after(error)
        is_invalid = isinstance(error, (HFValidationError, OfflineModeIsEnabled))
        if is_invalid or status in FINAL_STATUS:
            raise BadInput(f"{message}. {fix}") from None
        raise TrainingStopped(f"{message}{retry_fix}") from None


def describe(error: BaseException) -> str:
    """Return an error in one line, without a token."""
    if isinstance(
        error, (LocalEntryNotFoundError, RuntimeError)
    ):  # the client's error hides the actual one
        error = error.__cause__ or error
    status, _ = http_status_and_retry_after(error)
    if status is None:
        name = type(error).__name__
        text = str(error)
    else:
        name = f"HTTP status {status}"
        text = getattr(error, "server_message", None) or ""
    text = one_line(text)[:MESSAGE_LENGTH]
    return f"{name}: {text}" if text else name
