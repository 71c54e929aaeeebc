"""The Hub's client, with time-outs; its errors in one line; attempts that go on while another one may help.

The client waits for ever for a silent server and repeats only some requests. The token is the client's own (HF_TOKEN or
a login): no file and no message has it.
"""

import errno
import functools
import math
import time
import warnings
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

from huggingface_hub import HfApi, set_client_factory
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.logging import set_verbosity_error

from pretrain.base.errors import BadInput
from pretrain.base.foreign import one_line
from pretrain.base.network import answer_of

TIMEOUT_SECONDS = {"connect": 10, "read": 60, "write": 60, "pool": 60}
WAIT_SECONDS = (1, 2, 4, 8, 16, 32, 60)  # between attempts; the last one again and again
DEADLINE_SECONDS = 15 * 60  # from the first failure on
PASSING = {408, 409, 412, 423, 425, 429}  # statuses below 500 that another attempt may not meet
LOCAL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}


@functools.cache
def bound_client() -> None:
    """Give the client time-outs, once a process."""
    set_client_factory(_bounded_client)


def _bounded_client() -> Any:
    # The client is made anew after some errors, and asks for no limit at all where it lists files. So what it asks for
    # is put right as each request goes out.
    def bound(request: Any) -> None:
        asked = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {kind: asked.get(kind) or limit for kind, limit in TIMEOUT_SECONDS.items()}

    client = default_client_factory()
    client.event_hooks = client.event_hooks | {"request": [*client.event_hooks["request"], bound]}
    return client


def api() -> HfApi:
    """Return the client, bounded, and silent on the terminal."""
    bound_client()
    warnings.filterwarnings("ignore", module="huggingface_hub")
    disable_progress_bars()
    set_verbosity_error()
    return HfApi()


def patiently(call: Callable[..., Any], *args, **kwargs) -> Any:
    """Call until it works; raise the last error where another attempt cannot help, or DEADLINE_SECONDS are over."""
    waits, until = chain(WAIT_SECONDS, repeat(WAIT_SECONDS[-1])), math.inf
    while True:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            until = min(until, time.monotonic() + DEADLINE_SECONDS)
            wait = max(next(waits), answer_of(error)[1])
            if _is_final(error) or time.monotonic() + wait > until:
                raise
        time.sleep(wait)


def is_refusal(error: BaseException) -> bool:
    """Whether the Hub was reached and refuses for good."""
    status = answer_of(error)[0]
    return status is not None and 400 <= status < 500 and status not in PASSING


def describe(error: BaseException) -> str:
    """Return an error in one line, without a token."""
    if isinstance(error, (LocalEntryNotFoundError, RuntimeError)):  # what happened is behind it
        error = error.__cause__ or error
    status = answer_of(error)[0]
    name = type(error).__name__ if status is None else f"HTTP status {status}"
    text = str(error) if status is None else getattr(error, "server_message", None) or ""
    text = one_line(text)[:300]
    return f"{name}: {text}" if text else name


def _is_final(error: BaseException) -> bool:
    """Whether another attempt would end in the same way."""
    here = isinstance(error, (BadInput, HFValidationError, OfflineModeIsEnabled))
    return here or is_refusal(error) or getattr(error, "errno", None) in LOCAL
