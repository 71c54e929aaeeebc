"""Files of tables, here, behind a URL or on the Hub: opened, unpacked, tried again, pinned to what they first were."""

import contextlib
import functools
import logging
import re
from collections.abc import Iterator, Mapping
from glob import has_magic
from io import SEEK_SET, BufferedReader, RawIOBase
from pathlib import Path
from typing import Any

import datasets
import httpx
import huggingface_hub
from fsspec.compression import compr
from fsspec.utils import infer_compression

from pretrain.base import network
from pretrain.base.errors import BadInput
from pretrain.base.foreign import is_redacted
from pretrain.base.network import TruncatedError, Unreadable
from pretrain.data.names import COMPRESSED, path_of, shown_name
from pretrain.data.records import Reader
from pretrain.data.retries import retry

TIMEOUT_SECONDS = 60
BLOCK_BYTES = 2**20
PART_BYTES = 5 * 2**20  # of a file behind a URL: a pause between two parts may last as it likes

# By URL: what its server said of the file when it was first read, and where what was read of it is kept.
WATCHED: dict[str, tuple[dict[str, str], str]] = {}
certificates = functools.cache(httpx.create_ssl_context)  # to read them takes as long as many an answer


class HttpFile(RawIOBase):
    """A file behind a URL, in parts where its server gives them, else in one answer.

    Each answer is checked before a byte of it is read: it is of the bytes that were asked for, no page, of the file that
    was read before, and does not trickle. Raises TruncatedError, Unreadable, TimeoutError, and what httpx raises.

    Attributes:
        size: in bytes; 0 where the server states none.
    """

    def __init__(self, url: str, part_bytes: int = 0):
        # One of its own: the garbage collector may close a forgotten answer while another file holds its client's lock.
        self._client = httpx.Client(verify=certificates(), follow_redirects=True, timeout=TIMEOUT_SECONDS)
        self._url, self._part_bytes, self._place, self.size = url, part_bytes or PART_BYTES, 0, 0
        self._before, self._kept_in = WATCHED.get(url, ({}, "what was read of it"))
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
        ahead = offset + (-self._place, 0, self.size - self._place)[whence]
        self._place += ahead
        if 0 <= ahead < len(self._held):
            self._held = self._held[ahead:]
        elif ahead:
            self._held, self._blocks = b"", iter(())
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill some of the buffer; return how much."""
        self._held = self._held or next(self._blocks, b"")
        if not self._held and self._place < self.size:
            self._blocks = self._answer()
            self._held = next(self._blocks)
        some, self._held = self._held[: len(buffer)], self._held[len(buffer) :]
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
                wanted = min(self._part_bytes, int(size) - self._place)
                if (int(got[1]), len(begin)) != (self._place, wanted):
                    raise TruncatedError(f"was asked for {part}, answered {len(begin)} from {got[1]} of {size}")
            elif self._place:
                raise Unreadable("its server gives no part of a file alone, which this format needs; fetch it yourself")
            self._refuse_other(answer.headers, size)
            self.size = int(size or 0)
            yield begin
            yield from blocks

    def _refuse_other(self, headers: Mapping[str, str], size: str) -> None:
        """Raise Unreadable where an answer is of another file than was first read."""
        said = {"ETag": headers.get("ETag"), "Last-Modified": headers.get("Last-Modified"), "size": size}
        # The first mark that both have decides: a better one stands before.
        mark = next((mark for mark in said if self._before.get(mark) and said[mark]), None)
        if mark and self._before[mark] != said[mark]:
            raise Unreadable(
                f"has changed on its server since it was first read: {mark} {said[mark]}, was {self._before[mark]}. "
                f"Texts of both would be mixed: put the old file back, or delete {self._kept_in} to read all of it again"
            )
        if not self._before:
            self._before.update({mark: value for mark, value in said.items() if value})


def watch(url: str, versions: dict[str, dict[str, str]], kept_in: str) -> None:
    """Refuse, from now on, another file behind a URL than ``versions`` has of it, which is filled in at first."""
    WATCHED[url] = (versions.setdefault(shown_name(url), {}), kept_in)
    retry(url, file_size, url)  # a missing one is known before hours of reading others


def named_files(reader: Reader, names: list[str], versions: dict[str, dict[str, str]]) -> list[str]:
    """Return the files behind names: of the Hub those that a pattern matches, else each name as it stands.

    Raises BadInput for a file that is not there or cannot be read as it is.
    """
    found = []
    for name in names:
        if name.startswith("hf://"):
            found += retry(name, _hub_files, name, versions)
        else:
            found.append(name if is_http(name) else str(Path(name).absolute()))
    for name in found:
        if reader.in_places and Path(path_of(name)).suffix.lower() in COMPRESSED:
            raise BadInput(f"{name}: {reader.name} is read at any position, which this compression prevents; unpack it")
        if is_redacted(name):
            raise BadInput(
                f"{name}: its user, password or query was left out here; give the whole URL: --data_files URL"
            )
    return found


def _hub_files(pattern: str, versions: dict[str, dict[str, str]]) -> list[str]:
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


@contextlib.contextmanager
def whole(name: str) -> Iterator[Any]:
    """Open a file, decompressed. Raises TruncatedError at its end where bytes are left: an error can look like an end."""
    with open_file(name) as raw:
        yield BufferedReader(unpacked(name, raw), BLOCK_BYTES)
        size = file_size(name)
        if size and raw.tell() != size:
            raise TruncatedError(f"ended after {raw.tell():,} of {size:,} bytes")
