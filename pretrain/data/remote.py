"""Files of tables, here, behind a URL or on the Hub: opened, unpacked, tried again, pinned to what they first were."""

import contextlib
import functools
import gzip
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from glob import has_magic
from io import SEEK_SET, BufferedReader, RawIOBase
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import huggingface_hub

from pretrain.base import network
from pretrain.base.errors import BadInput, TrainingStopped
from pretrain.base.foreign import is_redacted, one_line, redact, redact_url
from pretrain.base.network import TruncatedError, Unreadable, causes, http_status_and_retry_after
from pretrain.recipe.rules import counted

log = logging.getLogger(__name__)

COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
URL = ("https://", "http://", "hf://")
TRIES = 10  # in a row without a new row; with the waits below about four minutes
LONGEST_WAIT_SECONDS = 60
RETRY_SECONDS = 300  # without a byte, however many tries that takes
FINAL_STATUS = {400, 401, 403, 404, 405, 410, 416}
TIMEOUT_SECONDS = 60
BLOCK_BYTES = 2**20
PART_BYTES = 5 * 2**20  # of a file behind a URL: a pause between two parts may last as it likes

# By URL: what its server said of the file when it was first read, and where what was read of it is kept.
WATCHED: dict[str, tuple[dict[str, str], str]] = {}
certificates = functools.cache(httpx.create_ssl_context)  # to read them takes as long as many an answer


def retry(what: str, call: Callable[..., Any], *args) -> Any:
    """Return a call's result, tried again as ``retried`` has it."""
    return next(retried(what, lambda _: iter([call(*args)])))


def retried(what: str, read: Callable[[int], Iterator[Any]], row: int = -1) -> Iterator[Any]:
    """Yield what ``read(row)`` yields, each row once: after a fault it is called again with the row of the fault.

    After each failure in a row the wait is longer, to a limit; every retry is logged. What a parser says of a local file
    is final; of a remote one it is when a second reading says the same. ``row``: below 0: there are none to be named.
    """
    local, what = Path(what).is_absolute(), redact(what)
    failures, since, last = 0, time.monotonic(), (row, "")
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
        reason = f"{type(error).__name__}: {one_line(error)[:300]}".rstrip(": .")  # some have no message
        if status is not None:
            reason = f"HTTP status {status}"
        again = local or (row, reason) == last
        if isinstance(error, BadInput):
            raise error from None
        if isinstance(error, huggingface_hub.errors.OfflineModeIsEnabled):
            raise BadInput(
                f"{where}: HF_HUB_OFFLINE is set. Prepare it where there is a network (prepare_data.py ... --prefetch), or "
                f"give local data: --data_files FILE, --data_dir FOLDER"
            )
        # Clients say "not found" of a server that is down, too: then there is a status.
        if status in FINAL_STATUS or (status is None and isinstance(error, (FileNotFoundError, PermissionError))):
            raise BadInput(f"{where}: {reason}. Check the name, and that you may read it (hf auth login)")
        if again and isinstance(error, Unreadable):
            raise BadInput(f"{what}: {one_line(error)}")
        if again and status is None and not _may_pass(error, local):
            raise BadInput(f"{where}: cannot be read: {reason}. Repair or replace the file, or leave it out")
        if row != last[0]:
            failures, since = 0, time.monotonic()
        failures, last = failures + 1, (row, reason)
        left = math.ceil(max(since, network.moved_at) + RETRY_SECONDS - time.monotonic())
        if failures >= TRIES or left <= 0:
            remedy = "" if status else "; without a network, first prepare_data.py ... --prefetch where there is one"
            raise TrainingStopped(
                f"{where}: failed {counted(failures, 'time', 'times')} in a row, last with {reason}. What was read before "
                f"is kept; the same command resumes from there{remedy}"
            )
        wait = min(left, max(asked, min(LONGEST_WAIT_SECONDS, 2 ** (failures - 1))))
        log.warning(f"{where}: {reason}; try {failures + 1} of {TRIES} in {wait:g} s")
        time.sleep(wait)


def _rank(error: BaseException) -> int:
    """Return 0 for the error that says best what is wrong. fsspec says of each request that failed: no such file."""
    return 0 if isinstance(error, BadInput | Unreadable) else 2 if isinstance(error, FileNotFoundError) else 1


def _may_pass(error: BaseException, local: bool) -> bool:
    """Return whether a disk or a network failed. Else the bytes were got, and are not what they should be."""
    if isinstance(error, TruncatedError):
        return not local
    if type(error) is OSError:  # Arrow and bz2 raise it, without a number, about their input
        return error.errno is not None
    of_client = type(error).__module__.startswith(("http", "aiohttp"))
    return of_client or (isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile))


class HttpFile(RawIOBase):
    """A file behind a URL, in parts where its server gives them, else in one answer.

    Each answer is checked before a byte of it is read: it is of the bytes that were asked for, no page, of the file that
    was read before, and does not trickle. Raises TruncatedError, Unreadable, TimeoutError, and what httpx raises; BadInput
    for a URL of which something was left out.

    Attributes:
        size: in bytes; 0 where the server states none.
    """

    def __init__(self, url: str, part_bytes: int = 0):
        if is_redacted(url):
            raise BadInput(
                f"{url}: its user, password or query was left out here; give the whole URL: --data_files URL"
            )
        # One of its own: the garbage collector may close a forgotten answer while another file holds its client's lock.
        self._client = httpx.Client(verify=certificates(), follow_redirects=True, timeout=TIMEOUT_SECONDS)
        self._url, self._part_bytes = url, part_bytes or PART_BYTES
        self._place = self._begin = self.size = 0
        self._blocks = self._answer()
        self._held = next(self._blocks, b"")

    def readable(self) -> bool:
        """Return True, as ``seekable`` does."""
        return True

    seekable = readable

    def close(self) -> None:
        """Close the connection."""
        self._blocks = iter(())
        self._client.close()
        super().close()

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Go to a place in the file; its bytes are asked for when they are read."""
        self._place = offset + (0, self._place, self.size)[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill some of the buffer; return how much."""
        at = self._place - self._begin
        if not 0 <= at < len(self._held):
            if at != len(self._held):  # the answer continues elsewhere in the file
                self._blocks = iter(())
            self._held, self._begin, at = next(self._blocks, b""), self._place, 0
            if not self._held and self._place < self.size:
                self._blocks = self._answer()
                self._held = next(self._blocks)
        some = self._held[at : at + len(buffer)]
        buffer[: len(some)] = some
        self._place += len(some)
        return len(some)

    def _answer(self) -> Iterator[bytes]:
        part = f"bytes={self._place}-{self._place + self._part_bytes - 1}"
        headers = {"Range": part, "Accept-Encoding": "identity"}  # sizes and ranges are those of the file
        with self._client.stream("GET", self._url, headers=headers) as answer:
            answer.raise_for_status()
            blocks = network.moving(answer.iter_bytes())
            begin, size = next(blocks, b""), answer.headers.get("Content-Length", "")
            if not path_of(self._url).lower().endswith((".html", ".htm")):  # the user asked for a page
                network.refuse_page(begin, answer.headers, str(answer.url))
            if got := re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", "")):
                begin, size = begin + b"".join(blocks), got[2]
                if (int(got[1]), len(begin)) != (self._place, min(self._part_bytes, int(size) - self._place)):
                    raise TruncatedError(f"was asked for {part}, answered {len(begin)} from {got[1]} of {size}")
            elif self._place:
                raise Unreadable("its server gives no part of a file alone, which this format needs; fetch it yourself")
            refuse_other(self._url, answer.headers, size)
            self.size = int(size or 0)
            yield begin
            yield from blocks


def refuse_other(url: str, headers: Mapping[str, str], size: str) -> None:
    """Raise Unreadable where an answer is of another file than was first read behind a URL that is watched."""
    before, kept_in = WATCHED.get(url, ({}, ""))
    said = {"ETag": headers.get("ETag"), "Last-Modified": headers.get("Last-Modified"), "size": size}
    # The first mark that both have decides: a better one stands before.
    mark = next((mark for mark in said if before.get(mark) and said[mark]), None)
    if mark and before[mark] != said[mark]:
        raise Unreadable(
            f"has changed on its server since it was first read: {mark} {said[mark]}, was {before[mark]}. Texts of both "
            f"would be mixed: put the old file back, or delete {kept_in} to read all of it again"
        )
    if not before:
        before.update({mark: value for mark, value in said.items() if value})


def watch(url: str, versions: dict[str, dict[str, str]], kept_in: str) -> None:
    """Refuse, from now on, another file behind a URL than ``versions`` has of it, which is filled in at first."""
    WATCHED[url] = (versions.setdefault(shown_name(url), {}), kept_in)
    retry(url, file_size, url)  # a missing one is known before hours of reading others


def hub_files(pattern: str, versions: dict[str, dict[str, str]]) -> list[str]:
    """Return the files of a pattern at the commit in ``versions``, where that of the first contact is entered."""
    filesystem = huggingface_hub.HfFileSystem()
    place = filesystem.resolve_path(pattern)
    if (root := f"hf://{place.root}") not in versions:
        ask = functools.partial(huggingface_hub.HfApi().repo_info, timeout=TIMEOUT_SECONDS)
        versions[root] = {"commit": ask(place.repo_id, repo_type=place.repo_type, revision=place.revision).sha}
    path = f"{place.root.partition('@')[0]}@{versions[root]['commit']}/{place.path_in_repo}"
    found = sorted(filesystem.glob(path)) if has_magic(path) else [filesystem.info(path)["name"]]
    if not found:
        raise FileNotFoundError(pattern)
    return [f"hf://{name}" for name in found]


def path_of(name: str) -> str:
    """Return a name without a URL's query; a file's own name may hold a question mark."""
    return urlparse(name).path if name.startswith(URL) else name


def shown_name(name: str) -> str:
    """Return a file's name as manifests hold it: a redacted URL, or the name without the folder, which may move."""
    return redact_url(name) if name.startswith(URL) else Path(name).name


def is_http(name: str) -> bool:
    """Return whether a file is behind a URL of its own, rather than here or on the Hub."""
    return name.startswith(("https://", "http://"))


def file_size(name: str) -> int:
    """Return a file's size in bytes; 0 where a server states none."""
    if is_http(name):
        return HttpFile(name, 1).size
    if name.startswith("hf://"):
        return int(huggingface_hub.HfFileSystem().size(name) or 0)
    return Path(name).stat().st_size


def open_file(name: str) -> Any:
    """Open a file without decompressing it."""
    if is_http(name):
        return BufferedReader(HttpFile(name), BLOCK_BYTES)
    return huggingface_hub.HfFileSystem().open(name) if name.startswith("hf://") else Path(name).open("rb")


def unpacked(name: str, raw: Any) -> Any:
    """Return the file, decompressed where its name names a compression."""
    from fsspec.compression import compr  # here, for a text needs no fsspec
    from fsspec.utils import infer_compression

    # zstandard, which fsspec takes too, takes a file that was cut, or the first of several frames, for the whole.
    if Path(path_of(name)).suffix.lower() == ".zst" and getattr(compr.get("zstd"), "__name__", "") != "ZstdFile":
        raise BadInput(f"{name}: is compressed with Zstandard, which needs: pip install backports.zstd")
    compression = infer_compression(path_of(name))
    return compr[compression](raw, mode="rb") if compression else raw


@contextlib.contextmanager
def whole(name: str) -> Iterator[Any]:
    """Open a file, decompressed. Raises TruncatedError at its end where bytes are left: an error can look like an end."""
    with open_file(name) as raw:
        yield BufferedReader(unpacked(name, raw), BLOCK_BYTES)
        size = file_size(name)
        if size and raw.tell() != size:
            raise TruncatedError(f"ended after {raw.tell():,} of {size:,} bytes")
