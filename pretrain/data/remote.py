"""Files of tables, here, behind a URL or on the Hub: opened, unpacked, tried again, pinned to what they first were."""

import asyncio
import contextlib
import functools
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from glob import has_magic
from io import BufferedReader
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import datasets
import fsspec
import huggingface_hub
from aiohttp import ClientResponse, ClientSession, ClientTimeout, StreamReader, TraceConfig
from fsspec.compression import compr
from fsspec.utils import infer_compression

from pretrain.base import network
from pretrain.base.errors import BadInput
from pretrain.base.foreign import is_redacted
from pretrain.base.network import TruncatedError, Unreadable
from pretrain.data import unread
from pretrain.data.names import COMPRESSED, path_of, shown_name
from pretrain.data.records import Reader
from pretrain.data.retries import RetryPolicy

TIMEOUT_SECONDS = 60
BLOCK_BYTES = 2**20

# By URL: what its server said of the file when it was first read, and where what was read of it is kept.
WATCHED: dict[Any, tuple[dict[str, str], str]] = {}


async def _session(**options) -> ClientSession:
    """Return the HTTP session that fetches files: it checks every answer before a byte of it is read."""
    trace = TraceConfig()
    trace.on_request_end.append(_check_answer)
    trace.on_response_chunk_received.append(_note_block)
    return ClientSession(trace_configs=[trace], **options)


async def _check_answer(_client, _context, asked) -> None:
    """Raise TruncatedError for an answer of other bytes than were asked for, Unreadable for another file or a page."""
    answer: ClientResponse = asked.response
    url = (*answer.history, answer)[0].url
    if "html" in answer.headers.get("Content-Type", "").lower():
        if asked.method == "HEAD":  # what follows shows whether it is a page
            return
        begin = await answer.content.read(BLOCK_BYTES)
        network.refuse_page(begin, answer.headers, str(answer.url))
        with warnings.catch_warnings(action="ignore"):  # unread_data is deprecated
            answer.content.unread_data(begin)
    _watch(answer.content, -network.SLOW_BYTES)
    size = answer.headers.get("Content-Length")
    wanted = re.match(r"bytes=(\d+)-(\d+)", answer.request_info.headers.get("Range", ""))
    got = re.match(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range", ""))
    if answer.status == 206 and wanted and got:
        first, last, whole = map(int, got.groups())
        number = size or str(last - first + 1)
        if (first, last, number) != (int(wanted[1]), min(int(wanted[2]), whole - 1), str(last - first + 1)):
            raise TruncatedError(f"was asked for {wanted[0]}, answered {number} from {first} to {last} of {whole}")
        size = got[3]
    if url not in WATCHED or answer.status not in (200, 206):
        return
    before, kept_in = WATCHED[url]
    said = {"ETag": answer.headers.get("ETag", "").removeprefix("W/"), "size": size}
    # A server that makes its answer up on the way says that it was modified now.
    if (modified := answer.headers.get("Last-Modified")) != answer.headers.get("Date"):
        said["Last-Modified"] = modified
    for mark in ("ETag", "Last-Modified", "size"):  # the first one that both have: a better one decides
        if before.get(mark) and said.get(mark):
            if before[mark] != said[mark]:
                raise Unreadable(
                    f"has changed on its server since it was first read: {mark} {said[mark]}, was {before[mark]}. "
                    f"Texts of both would be mixed: put the old file back, or delete {kept_in} to read all of it again"
                )
            break
    if asked.method == "GET" and not before:
        before.update({mark: value for mark, value in said.items() if value})


def _watch(content: StreamReader, before: int) -> None:
    """Let reading of an answer fail where it waits, and fewer than network.SLOW_BYTES have come in network.SLOW_SECONDS."""
    if content.is_eof() or content.exception():
        return
    if content.total_bytes - before < network.SLOW_BYTES and not content._size:  # otherwise bytes wait to be read
        fault = f"fewer than {network.SLOW_BYTES:,} bytes came in {network.SLOW_SECONDS} seconds"
        content.set_exception(TimeoutError(fault))
        return
    asyncio.get_running_loop().call_later(network.SLOW_SECONDS, _watch, content, content.total_bytes)


async def _note_block(_client, _context, got) -> None:
    if len(got.chunk) >= network.SLOW_BYTES:
        network.moved()


HTTP = {
    "get_client": _session,
    "headers": {"Accept-Encoding": "identity"},  # sizes and ranges are those of the file
    "client_kwargs": {"timeout": ClientTimeout(total=None, sock_connect=TIMEOUT_SECONDS, sock_read=TIMEOUT_SECONDS)},
}
STORAGE = {"http": HTTP, "https": HTTP}


def watch(url: str, versions: dict[str, dict[str, str]], kept_in: str) -> None:
    """Refuse, from now on, another file behind a URL than ``versions`` has of it, which is filled in while reading."""
    WATCHED[_as_asked(url)] = (versions.setdefault(shown_name(url), {}), kept_in)
    retry(url, file_size, url)  # a missing one is known before hours of reading others


def named_files(reader: Reader, names: list[str], versions: dict[str, dict[str, str]]) -> list[str]:
    """Return the files behind names: of the Hub those that a pattern matches, else each name as it stands.

    Raises BadInput for a file that is not there, and for one whose name ``datasets`` would take for something else.
    """
    found, hub = [], f"{datasets.config.HF_ENDPOINT}/"
    for name in names:
        if name.startswith(hub) and "/resolve/" in name:  # a link to a file there, with the login
            name = "hf://" + unquote(name.removeprefix(hub).partition("?")[0]).replace("/resolve/", "@", 1)
        if name.startswith("hf://"):
            found += retry(name, _hub_files, name, versions)
        else:
            found.append(name if "://" in name else str(Path(name).absolute()))
    for name in found:
        if "::" in name:
            raise BadInput(f"{name}: fsspec takes :: for a chain of file systems; rename it (in a URL: %3A%3A)")
        if reader.in_places and Path(path_of(name)).suffix.lower() in COMPRESSED:
            raise BadInput(f"{name}: {reader.name} is read at any position, which this compression prevents; unpack it")
        if "://" in name and "*" in name:
            raise BadInput(f"{name}: datasets takes * for a pattern; list the files (a * that is meant: %2A)")
        if is_redacted(name):
            raise BadInput(
                f"{name}: its user, password or query was left out here; give the whole URL: --data_files URL"
            )
    return found


def _hub_files(pattern: str, versions: dict[str, dict[str, str]]) -> list[str]:
    """Return the files of a pattern at a commit. Unlike the client's own ``exists``, it takes no fault for an absence."""
    filesystem, path = fsspec.core.url_to_fs(pattern)
    place = filesystem.resolve_path(path)
    if hasattr(place, "revision"):  # a bucket has none
        if f"hf://{place.root}" not in versions:
            ask = functools.partial(huggingface_hub.HfApi().repo_info, timeout=TIMEOUT_SECONDS)
            about = ask(place.repo_id, repo_type=place.repo_type, revision=place.revision)
            versions[f"hf://{place.root}"] = {"commit": about.sha}
        commit = versions[f"hf://{place.root}"]["commit"]
        path = f"{place.root.partition('@')[0]}@{commit}/{place.path_in_repo}"
    try:
        found = [filesystem.info(path)["name"]]
    except FileNotFoundError:
        found = sorted(filesystem.glob(path)) if has_magic(path) else []
        if not found:
            raise
    return [f"hf://{name}" for name in found]


def file_size(name: str) -> int:
    """Return a file's size in bytes; 0 where a server states none."""
    filesystem, path = fsspec.core.url_to_fs(name, **STORAGE.get(name.split(":")[0], {}))
    return int(filesystem.size(path) or 0)


def _as_asked(url: str) -> Any:
    """Return a URL as the client knows that it asked for it, which takes the user and password out of it."""
    filesystem, path = fsspec.core.url_to_fs(url, **HTTP)
    return filesystem.encode_url(path).with_user(None).with_fragment(None)


def open_file(name: str) -> Any:
    """Return a context that opens a file without decompressing it."""
    return fsspec.open(name, "rb", **STORAGE.get(name.split(":")[0], {}))


def unpacked(name: str, raw: Any) -> Any:
    """Return the file, decompressed where its name names a compression."""
    # zstandard, which fsspec takes too, takes a file that was cut, or the first of several frames, for the whole.
    if Path(path_of(name)).suffix.lower() == ".zst" and getattr(compr.get("zstd"), "__name__", "") != "ZstdFile":
        raise BadInput(f"{name}: is compressed with Zstandard, which needs: pip install backports.zstd")
    compression = infer_compression(path_of(name))
    return compr[compression](raw, mode="rb") if compression else raw


def retry_here() -> None:
    """Leave retries and their messages to ``retry``."""
    # Its own waits (5, 20, 60 s, up to 20 times) would hide the fault from the retries below.
    for name in (name for name in vars(datasets.config) if name.startswith("STREAMING_")):
        setattr(datasets.config, name, int(name.endswith("MAX_RETRIES")))
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    datasets.disable_progress_bars()
    client = logging.getLogger("huggingface_hub")  # which retries a few times by itself, and warns of it
    client.handlers, client.propagate = [*logging.getLogger("pretrain").handlers], False


def retry(what: str, call: Callable[..., Any], *args) -> Any:
    """Return a call's result, retried as ``RetryPolicy`` has it."""
    policy = RetryPolicy(what)
    while True:
        try:
            return call(*args)
        except Exception as error:  # each client has kinds of its own; what is final is sorted out there
            policy.failed(error)


@contextlib.contextmanager
def whole(name: str) -> Iterator[Any]:
    """Open a file, decompressed. Raises TruncatedError at its end where bytes are left: an error can look like an end."""
    with open_file(name) as raw:
        buffered = BufferedReader(unpacked(name, raw), BLOCK_BYTES)
        if packed := unread.packing(buffered.peek()):  # a record of compressed bytes can look whole
            unpack = unread.command(packed, Path(path_of(name)).name)
            raise BadInput(f"{name}: is packed otherwise than its name says; give what this unpacks: {unpack}")
        yield buffered
        size = file_size(name)
        if size and raw.tell() != size:
            raise TruncatedError(f"ended after {raw.tell():,} of {size:,} bytes")
