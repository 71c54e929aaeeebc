"""The Hub's client, with time-outs and checked answers; its errors in one line; attempts while another one may help.

The client waits for ever for a silent server, repeats only some requests, and takes what it is answered for true. The
token is the client's own (HF_TOKEN or a login): no file and no message has it.
"""

import contextlib
import errno
import functools
import json
import math
import re
import threading
import time
import warnings
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

from huggingface_hub import HfApi, set_client_factory
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoFile, RepoFolder
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.logging import set_verbosity_error

from pretrain.base.errors import BadInput
from pretrain.base.foreign import one_line
from pretrain.base.network import ASKED, Unreadable, http_status_and_retry_after, moving, refuse_page, retry_after

TIMEOUT_SECONDS = {"connect": 10, "read": 60, "write": 60, "pool": 60}
WAIT_SECONDS = (1, 2, 4, 8, 16, 32, 60)  # between attempts; the last one again and again
DEADLINE_SECONDS = 15 * 60  # from the first failure on
PASSING = {408, 409, 412, 423, 425, 429}  # statuses below 500 that may pass
LOCAL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}
LISTING_PAGES, LISTING_SECONDS = 2000, 15 * 60  # a page of the Hub has a thousand names
CLIENT_WAIT_SECONDS = 60  # of each of the client's own few retries, however long the server asks for
COMMIT = re.compile("[0-9a-f]{40}")
ABOUT = re.compile(r"/api/(?:models|datasets|spaces)/((?:[^/]+/)?(?!refs$|auth-check$)[^/]+?)(?:/revision/.+)?$")
TREE = re.compile(r"/api/(?:models|datasets|spaces)/(.+?)/(?:tree|paths-info)/")
KINDS = {"file": RepoFile, "directory": RepoFolder}  # the kinds of a tree's entries

_listing = threading.local()  # of this thread: ``state``, the pages of a listing so far, and when it began
_refused: set[tuple[bytes, str]] = set()  # hosts and repositories of which they gave no commit


@functools.cache
def bound_client() -> None:
    """Give the client time-outs, and have answers checked, once a process."""
    set_client_factory(_bounded_client)


def _bounded_client() -> Any:
    # The client is made anew after some errors, and asks for no limit at all where it lists files. So what it asks for
    # is put right as each request goes out.
    def bound(request: Any) -> None:
        asked = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {kind: asked.get(kind) or limit for kind, limit in TIMEOUT_SECONDS.items()}
        for host, name in [*_refused]:  # Transformers would read on from main
            if host == request.url.netloc and f"/{name}/resolve/" in request.url.path:
                raise _no_commit(name)

    client = default_client_factory()
    hooks = client.event_hooks
    client.event_hooks = {"request": [*hooks["request"], bound], "response": [*hooks["response"], _check]}
    return client


def _check(answer: Any) -> None:
    """Check an answer before the client reads it, and bound how long the client waits for it, or because of it.

    Raises BadInput for an answer that is not about a repository, Unreadable for an HTML page.
    """
    url, headers = answer.request.url, answer.headers
    found = TREE.search(url.path) or (None if "expand=" in str(url) else ABOUT.search(url.path))
    name = found[1] if found else url.path.partition("/resolve/")[0].strip("/").removeprefix("datasets/")
    if not COMMIT.fullmatch(headers.get("X-Repo-Commit", "0" * 40)):
        raise _no_commit(name)
    if not answer.is_success:
        if "Retry-After" in headers:
            headers[ASKED] = headers["Retry-After"]
            headers["Retry-After"] = str(int(min(CLIENT_WAIT_SECONDS, retry_after(headers))))
        return
    raw = answer.iter_raw
    answer.iter_raw = lambda *how, **more: moving(raw(*how, **more))
    if "html" in headers.get("Content-Type", "").lower():
        refuse_page(answer.read(), headers, str(url))
    if found:
        answer.read()
        with contextlib.suppress(json.JSONDecodeError, RecursionError):  # faults that may pass
            _check_repository(url.netloc, name, answer.json(), is_tree=found.re is TREE)
    pages, begun = getattr(_listing, "state", (0, 0.0))
    _listing.state = (pages + 1, begun if pages else time.monotonic()) if "next" in answer.links else (0, 0.0)
    if pages >= LISTING_PAGES or (pages and time.monotonic() - begun > LISTING_SECONDS):
        _listing.state = 0, 0.0
        limit = f"{LISTING_PAGES:,} pages and {LISTING_SECONDS / 60:g} minutes"
        raise BadInput(f"{name}: its listing does not end within {limit}; check HF_ENDPOINT", 1)


def _check_repository(host: bytes, name: str, said: Any, *, is_tree: bool) -> None:
    """Raise BadInput where the Hub gives no commit of a repository, or lists a row that is not a file or folder of it."""
    if not is_tree:
        if not isinstance(said, dict) or not COMMIT.fullmatch(str(said.get("sha"))):
            _refused.add((host, name))
            raise _no_commit(name)
        _refused.discard((host, name))
        said = said.get("siblings") or []
    for row in said if isinstance(said, list) else [said]:
        try:
            path = row["rfilename"] if "rfilename" in row else KINDS[row["type"]](**row).path
            good = path and path[0] != "/" and ".." not in path.split("/") and 0 <= row.get("size", 0) < 2**63
        except (KeyError, TypeError, ValueError, AttributeError):  # at which the client would end
            good = False
        if not good:
            raise BadInput(f"{name}: the Hub lists {str(row)[:200]}, which is not a file of it; check HF_ENDPOINT")


def _no_commit(name: str) -> BadInput:
    remedy = "check HF_ENDPOINT, or give files of this machine"
    return BadInput(f"{name}: the Hub names no commit of it, so two versions could be mixed; {remedy}")


def api() -> HfApi:
    """Return the client, bounded, and silent on the terminal."""
    bound_client()
    warnings.filterwarnings("ignore", module="huggingface_hub")
    disable_progress_bars()
    set_verbosity_error()
    return HfApi()


def retry(call: Callable[..., Any], *args, say: Callable[[str], None] | None = None, **kwargs) -> Any:
    """Call until it works; raise the last error where another attempt cannot help, or DEADLINE_SECONDS are over.

    Args:
        say: is given a line before each wait.
    """
    waits, until = chain(WAIT_SECONDS, repeat(WAIT_SECONDS[-1])), math.inf
    while True:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            until = min(until, time.monotonic() + DEADLINE_SECONDS)
            wait = max(next(waits), http_status_and_retry_after(error)[1])
            if _is_final(error) or time.monotonic() + wait > until:
                raise
            if say:
                say(f"hub      {describe(error)}; asked again in {wait:g} s")
        time.sleep(wait)


def is_refusal(error: BaseException) -> bool:
    """Whether the Hub was reached and refuses for good."""
    status = http_status_and_retry_after(error)[0]
    return status is not None and 400 <= status < 500 and status not in PASSING


def describe(error: BaseException) -> str:
    """Return an error in one line, without a token."""
    if isinstance(error, (LocalEntryNotFoundError, RuntimeError)):  # the cause is its context
        error = error.__cause__ or error
    status = http_status_and_retry_after(error)[0]
    name = type(error).__name__ if status is None else f"HTTP status {status}"
    text = str(error) if status is None else getattr(error, "server_message", None) or ""
    text = one_line(text)[:300]
    return f"{name}: {text}" if text else name


def _is_final(error: BaseException) -> bool:
    """Whether another attempt would end in the same way."""
    here = isinstance(error, (BadInput, HFValidationError, OfflineModeIsEnabled, Unreadable))
    return here or is_refusal(error) or getattr(error, "errno", None) in LOCAL
