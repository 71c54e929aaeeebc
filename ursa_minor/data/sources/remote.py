"""Files of tables and texts: here, on the Hub, or fetched from a URL; opened, unpacked, tried again."""

import contextlib
import functools
import hashlib
import logging
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import huggingface_hub

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import TruncatedError, check_no_html_page, raise_if_stalled
from ursa_minor.base.redaction import is_redacted, redact_url
from ursa_minor.recipe.source_kind import URL_SCHEMES, path_of

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 60
BLOCK_BYTES = 2**20
DOWNLOADS = "downloads"  # files behind URLs, within prepared_data_dir
# Limit of a download, so that an endless answer does not fill the disk.
DOWNLOAD_BYTES = 20 * 10**9
SUFFIX_BYTES = 200  # of a URL in its copy's name: a name has 255 in all


def copy_of(url: str, prepared_data_dir: str | Path) -> Path:
    """Return where the copy of a file behind a URL is kept; its query, which may be a signature, makes no other file."""
    name = (
        (Path(urlparse(url).path).name or "text").encode()[-SUFFIX_BYTES:].decode(errors="ignore")
    )
    digest = hashlib.sha256(redact_url(url).encode()).hexdigest()
    return Path(prepared_data_dir, DOWNLOADS, f"{digest[:12]}-{name}").absolute()


def fetch(url: str, path: Path) -> None:
    """Write what is behind a URL into a file, if it is not there.

    Raises BadInput for a URL of which something was left out, and a file that is empty or too long; Unreadable for a
    proxy's page; what httpx raises.
    """
    if path.is_file():
        return
    if is_redacted(url):
        raise BadInput(
            f"{url}: its user, password or query was left out here; give the whole URL: --data_files URL"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    headers = {"Accept-Encoding": "identity"}
    with files.replacing(path) as temporary, temporary.open("wb") as file:
        with httpx.stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT_SECONDS
        ) as answer:
            answer.raise_for_status()
            for block in raise_if_stalled(answer.iter_bytes()):
                # The user requested an HTML page.
                if not file.tell() and path.suffix.lower() not in (
                    ".html",
                    ".htm",
                ):
                    check_no_html_page(block, answer.headers, str(answer.url))
                if file.write(block) and file.tell() > DOWNLOAD_BYTES:
                    raise BadInput(
                        f"{url}: has more than {DOWNLOAD_BYTES / 1e9:g} GB, the limit of a file that is fetched; fetch it "
                        f"yourself, or give a data set of the Hub, which is streamed: --dataset_name, hf://"
                    )
        if not file.tell():
            raise BadInput(f"{url}: is empty")


def hub_files(pattern: str, versions: dict[str, dict[str, str]]) -> list[str]:
    """Return the files of a pattern at the commit in ``versions``, where that of the first contact is entered."""
    filesystem = huggingface_hub.HfFileSystem()
    place = filesystem.resolve_path(pattern)
    if (root := f"hf://{place.root}") not in versions:
        ask = functools.partial(huggingface_hub.HfApi().repo_info, timeout=TIMEOUT_SECONDS)
        versions[root] = {
            "commit": ask(place.repo_id, repo_type=place.repo_type, revision=place.revision).sha
        }
    path = f"{place.root.partition('@')[0]}@{versions[root]['commit']}/{place.path_in_repo}"
    if not (found := sorted(filesystem.glob(path))):
        raise FileNotFoundError(pattern)
    return [f"hf://{name}" for name in found]


def shown_name(name: str) -> str:
    """Return a file's name as manifests hold it: a redacted URL, or the name without the folder, which may move."""
    return redact_url(name) if name.startswith(URL_SCHEMES) else Path(name).name


def is_http(name: str) -> bool:
    """Return whether a file is behind a URL of its own, rather than here or on the Hub."""
    return name.startswith(("https://", "http://"))


def file_size(name: str) -> int:
    """Return a file's size in bytes."""
    return (
        huggingface_hub.HfFileSystem().size(name)
        if name.startswith("hf://")
        else Path(name).stat().st_size
    )


def open_file(name: str) -> Any:
    """Open a file without decompressing it."""
    return (
        huggingface_hub.HfFileSystem().open(name)
        if name.startswith("hf://")
        else Path(name).open("rb")
    )


def decompress(name: str, raw: Any) -> Any:
    """Return the file, decompressed where its name names a compression."""
    from fsspec.compression import compr  # here, for a text needs no fsspec
    from fsspec.utils import infer_compression

    # zstandard, which fsspec takes too, takes a file that was cut, or the first of several frames, for the whole.
    if (
        Path(path_of(name)).suffix.lower() == ".zst"
        and getattr(compr.get("zstd"), "__name__", "") != "ZstdFile"
    ):
        raise BadInput(
            f"{name}: is compressed with Zstandard, which needs: pip install backports.zstd"
        )
    compression = infer_compression(path_of(name))
    return compr[compression](raw, mode="rb") if compression else raw


@contextlib.contextmanager
def open_unpacked(name: str) -> Iterator[Any]:
    """Open a file, decompressed. Raises TruncatedError at its end where bytes are left: an error can look like an end."""
    with open_file(name) as raw:
        yield BufferedReader(decompress(name, raw), BLOCK_BYTES)
        if raw.tell() != (size := file_size(name)):
            raise TruncatedError(f"ended after {raw.tell():,} of {size:,} bytes")
