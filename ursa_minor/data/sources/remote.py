"""Open local files, files on the Hub and downloaded files, and decompress them."""

import contextlib
import hashlib
import importlib
import re
from collections.abc import Iterator
from io import SEEK_END, BufferedReader
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlparse

import httpx
import huggingface_hub

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import (
    HTML_START,
    TruncatedError,
    check_no_html_page,
    raise_if_stalled,
)
from ursa_minor.base.redaction import is_redacted, redact_url
from ursa_minor.data.sources.dataset_id import is_hub_url
from ursa_minor.recipe.source_kind import URL_SCHEMES, path_of

TIMEOUT_SECONDS = 60
BLOCK_BYTES = 2**20
DOWNLOADS = "downloads"  # folder in prepared_data_dir for files behind URLs
# Limit of a download, so that an endless response does not fill the disk.
DOWNLOAD_BYTES = 20 * 10**9
# Maximum length of a URL's file name in the name of its copy. A file name has at most 255 bytes.
SUFFIX_BYTES = 200
# The path of a page of the Hub about a file. /raw/ is the file, or a pointer if it is in Git LFS.
HUB_PAGE = re.compile(r"(/[^/]+/[^/]+)/(?:blob|raw)/")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_ZSTD_WINDOW_LOG = 31  # 2 GiB, the largest window that zstd supports
HTML_SUFFIXES = (".html", ".htm")


def copy_of(url: str, prepared_data_dir: str | Path) -> Path:
    """Return the path of the local copy of a file behind a URL.

    It does not depend on the query of the URL, which may be a signature that expires.
    """
    url_path = Path(urlparse(url).path)
    name = url_path.name or "text"
    # The last bytes, because the suffix is the file format. They may start inside a character.
    last_bytes = name.encode()[-SUFFIX_BYTES:]
    short_name = last_bytes.decode(errors="ignore")
    url_without_query = redact_url(url)
    digest = hashlib.sha256(url_without_query.encode()).hexdigest()
    copy = Path(prepared_data_dir, DOWNLOADS, f"{digest[:12]}-{short_name}")
    return copy.absolute()


def fetch(url: str, path: Path) -> None:
    """Download a file, unless it exists.

    Raises:
        BadInput: a part of the URL was redacted, the file is empty or too large, or the URL is
            that of a page of the Hub or of a Git LFS pointer.
        Unreadable: a proxy answered with an HTML page.
        httpx.HTTPError: the download failed.
    """
    if path.is_file():
        return
    if is_redacted(url):
        raise BadInput(
            f"{url}: the user, password or query of this URL was removed before the recipe was "
            f"saved. Use the complete URL: --data_files URL"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as temporary, temporary.open("wb") as file:
        _download(url, file, expects_html=path.suffix.lower() in HTML_SUFFIXES)


def _download(url: str, file: BinaryIO, *, expects_html: bool) -> None:
    headers = {"Accept-Encoding": "identity"}
    with httpx.stream(
        "GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT_SECONDS
    ) as response:
        response.raise_for_status()
        num_bytes = 0
        for block in raise_if_stalled(response.iter_bytes()):
            if num_bytes == 0 and not expects_html:
                _check_no_page(block, response, url)
            num_bytes += file.write(block)
            if num_bytes > DOWNLOAD_BYTES:
                raise BadInput(
                    f"{url} is larger than {DOWNLOAD_BYTES / 1e9:g} GB, the limit of a download. "
                    f"Download the file yourself and use the local file, or use a data set of the "
                    f"Hub, which is not downloaded completely: --dataset_name NAME"
                )
    if num_bytes == 0:
        raise BadInput(f"{url}: the server sent an empty file. Use another URL or a local file")


def _check_no_page(start: bytes, response: httpx.Response, url: str) -> None:
    """Check that an answer is a file, not a page about it or a Git LFS pointer.

    Args:
        start: the first bytes of the answer.
        response: the answer.
        url: the URL of the user. The answer may come from another one.

    Raises:
        BadInput: the URL is that of a page of the Hub, or of a pointer.
        Unreadable: a proxy answered with an HTML page.
    """
    is_pointer = start.startswith(LFS_POINTER)
    path = urlparse(url).path
    is_hub_file = is_hub_url(url) or path.startswith("/datasets/")
    is_hub_page = is_hub_file and HUB_PAGE.search(path) and HTML_START.match(start)
    if is_pointer or is_hub_page:
        url_without_query = redact_url(url)
        what = "a Git LFS pointer" if is_pointer else "a page of the Hub"
        fix = "Use the download link of the file"
        if is_hub_file and HUB_PAGE.search(path):
            file_url = HUB_PAGE.sub(r"\1/resolve/", url_without_query, count=1)
            fix += f": {file_url}"
        raise BadInput(f"{url_without_query} is {what}, not the file itself. {fix}")
    check_no_html_page(start, response.headers, str(response.url))


def hub_files(pattern: str, versions: dict[str, dict[str, str]]) -> list[str]:
    """Return the files on the Hub that match a pattern, sorted, at a pinned commit.

    Args:
        pattern: a hf:// URL, which may contain wildcards.
        versions: the commit of each repository, as in the manifest. The current commit of a
            repository that is missing is added.

    Raises:
        FileNotFoundError: no file matches.
    """
    filesystem = huggingface_hub.HfFileSystem()
    location = filesystem.resolve_path(pattern)
    repository = f"hf://{location.root}"
    if repository not in versions:
        info = huggingface_hub.HfApi().repo_info(
            location.repo_id,
            repo_type=location.repo_type,
            revision=location.revision,
            timeout=TIMEOUT_SECONDS,
        )
        versions[repository] = {"commit": info.sha}
    commit = versions[repository]["commit"]
    root_without_revision = location.root.partition("@")[0]
    names = filesystem.glob(f"{root_without_revision}@{commit}/{location.path_in_repo}")
    if not names:
        raise FileNotFoundError(pattern)
    return [f"hf://{name}" for name in sorted(names)]


def name_in_manifest(name: str) -> str:
    """Return the name of a file for manifests: a redacted URL, or a name without its folder.

    The folder is left out because it may be moved.
    """
    return redact_url(name) if name.startswith(URL_SCHEMES) else Path(name).name


def is_http(name: str) -> bool:
    """Return whether a file is behind an http(s):// URL. Otherwise it is local or on the Hub."""
    return name.startswith(("https://", "http://"))


def file_size(name: str) -> int:
    """Return the size of a file, local or on the Hub, in bytes."""
    if name.startswith("hf://"):
        return huggingface_hub.HfFileSystem().size(name)
    return Path(name).stat().st_size


def open_file(name: str) -> Any:
    """Open a file, local or on the Hub, without decompressing it."""
    if name.startswith("hf://"):
        return huggingface_hub.HfFileSystem().open(name)
    return Path(name).open("rb")


def is_empty(raw: Any) -> bool:
    """Return whether an open file, of which nothing was read, has no bytes.

    The Hub has data sets with empty files. An empty local file is rejected when it is found.
    """
    size = raw.seek(0, SEEK_END)
    raw.seek(0)
    return size == 0


def decompress(name: str, raw: Any) -> Any:
    """Return a file object with the decompressed bytes of an open file.

    Args:
        name: name of the file. Its suffix decides the compression.
        raw: the open file. It is returned unchanged if the suffix names no compression.

    Raises:
        BadInput: a package that is needed is not installed.
    """
    from fsspec.compression import compr  # slow to import, and text files do not need it
    from fsspec.utils import infer_compression

    # fsspec also supports the package zstandard, which ends without an error after the first of
    # several frames, and at the end of a truncated file.
    is_zstd = Path(path_of(name)).suffix.lower() == ".zst"
    if is_zstd and getattr(compr.get("zstd"), "__name__", "") != "ZstdFile":
        raise BadInput(
            f"{name} is compressed with Zstandard, which requires a package that is not "
            f"installed. Install it: pip install backports.zstd"
        )
    compression = infer_compression(path_of(name))
    if compression is None:
        return raw
    if compression == "zstd":
        # Files of zstd --long may need more memory than the default limit of 128 MiB.
        zstd = importlib.import_module(compr["zstd"].__module__.rpartition(".")[0])
        options = {zstd.DecompressionParameter.window_log_max: MAX_ZSTD_WINDOW_LOG}
        return compr["zstd"](raw, mode="rb", options=options)
    return compr[compression](raw, mode="rb")


@contextlib.contextmanager
def open_unpacked(name: str) -> Iterator[Any]:
    """Open a file, local or on the Hub, and decompress it.

    Raises:
        TruncatedError: not all bytes were read when the block ends. Some clients report an error
            as the end of the file.
    """
    with open_file(name) as raw:
        yield BufferedReader(decompress(name, raw), BLOCK_BYTES)
        size = file_size(name)
        position = raw.tell()
        if position != size:
            raise TruncatedError(f"the file ended after {position:,} of {size:,} bytes")
