"""The Hub's client with time-outs; its errors in one line; attempts while another one may help.

The client waits for ever for a silent server, and repeats only some requests. The token is the client's own (HF_TOKEN or
a login): no file and no message has it.
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
DEADLINE_SECONDS = 15 * 60  # from the first failure on
CLIENT_WAIT_SECONDS = (
    60  # of each of the client's own few retries, however long the server asks for
)


@functools.cache
def bound_client() -> None:
    """Give the client time-outs, once a process."""

    # The client is made anew after some errors, and asks for no limit at all where it lists files. So what it asks for
    # is put right as each request goes out.
    def bounded() -> Any:
        client = default_client_factory()
        client.event_hooks["request"].append(_bound)
        client.event_hooks["response"].append(_check)
        return client

    set_client_factory(bounded)


def _bound(request: Any) -> None:
    asked = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        kind: asked.get(kind) or limit for kind, limit in TIMEOUTS.items()
    }


def _check(answer: Any) -> None:
    """Bound how long the client waits because of an answer. Raises Unreadable for a proxy's page."""
    headers = answer.headers
    if answer.is_success:
        raw = answer.iter_raw
        answer.iter_raw = lambda *how, **more: raise_if_stalled(raw(*how, **more))
        if "html" in headers.get("Content-Type", "").lower():
            check_no_html_page(answer.read(), headers, str(answer.request.url))
    elif asked := headers.get("Retry-After"):
        headers[SERVER_RETRY_AFTER], headers["Retry-After"] = (
            asked,
            str(int(min(CLIENT_WAIT_SECONDS, retry_after(headers)))),
        )


def api() -> HfApi:
    """Return the client, bounded, and silent on the terminal."""
    bound_client()
    warnings.filterwarnings("ignore", module="huggingface_hub")
    disable_progress_bars()
    set_verbosity_error()
    return HfApi()


def read_file(repo_id: str, name: str, revision: str | None) -> bytes:
    """Return the contents of a small file of a model repository."""
    with tempfile.TemporaryDirectory() as folder:  # not the cache, which keeps every version
        path = api().hf_hub_download(repo_id, name, revision=revision, local_dir=folder)
        return Path(path).read_bytes()


def retry(
    call: Callable[..., Any], *args, say: Callable[[str], None] | None = None, **kwargs
) -> Any:
    """Call until it works. Raise the last error if another attempt cannot help or DEADLINE_SECONDS are over.

    Args:
        say: receives a line before each wait.
    """

    def log_retry(error: Exception, wait: float) -> None:
        if say:
            say(f"hub      {describe(error)}; asked again in {wait:g} s")

    return call_with_retries(
        functools.partial(call, *args, **kwargs),
        log_retry=log_retry,
        deadline_seconds=DEADLINE_SECONDS,
    )


@contextlib.contextmanager
def refusing(where: str, fix: str, later: str = "") -> Iterator[None]:
    """Raise BadInput with ``fix`` for what is refused for good, TrainingStopped with ``later`` for what may pass."""
    try:
        yield
    except (BadInput, TrainingStopped):
        raise
    except Exception as error:  # each layer of the client has kinds of its own
        why = f"{where}: {describe(error)}"
        is_refused = http_status_and_retry_after(error)[0] in FINAL_STATUS
        if is_refused or isinstance(error, (HFValidationError, OfflineModeIsEnabled)):
            raise BadInput(f"{why}. {fix}") from None
        raise TrainingStopped(f"{why}{later}") from None


def describe(error: BaseException) -> str:
    """Return an error in one line, without a token."""
    if isinstance(error, (LocalEntryNotFoundError, RuntimeError)):  # the cause is its context
        error = error.__cause__ or error
    status = http_status_and_retry_after(error)[0]
    name = type(error).__name__ if status is None else f"HTTP status {status}"
    text = str(error) if status is None else getattr(error, "server_message", None) or ""
    text = one_line(text)[:300]
    return f"{name}: {text}" if text else name
