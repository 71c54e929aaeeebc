"""Resolve paths, glob patterns and URLs to files, and choose the reader of each file."""

import os
import re
import shlex
from glob import glob
from pathlib import Path

import httpx

from ursa_minor.base.errors import BadInput
from ursa_minor.base.redaction import is_valid_url, redact_url
from ursa_minor.base.retry import retry
from ursa_minor.base.wording import did_you_mean_file
from ursa_minor.data.sources import remote
from ursa_minor.data.sources.columns import Reader
from ursa_minor.data.sources.formats import arrow, csv, json_lines, parquet
from ursa_minor.recipe.source_kind import COMPRESSED_SUFFIXES, URL_SCHEMES, path_of, table_format

# Each format is one module. Its file names are in recipe/source_kind.TABLE_FORMATS.
READERS = (parquet.READER, json_lines.READER, csv.READER, arrow.READER)
# What breaks a line, and what no file of ours can hold: half of a surrogate pair is a byte that is not UTF-8.
ODD_NAME = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# By how a name ends: the command that unpacks it. What packs a single file leaves it under the name before that.
UNPACK = {".tar": "tar -xf", ".tgz": "tar -xf", ".zip": "unzip", ".7z": "7z x", ".rar": "unrar x"}


def no_such_file(key: str, name: str) -> str:
    return f"{key}: {name}: no such file{did_you_mean_file(name, Path.is_file)}"


def find_files(key: str, patterns: list[str], kept: Path = Path("data")) -> list[str]:
    """Return the files behind paths, globs and URLs, sorted within each pattern, each once.

    A name that exists is that file, also where it looks like a glob. A text behind a URL is fetched, with ``kept`` for
    prepared_data_dir; a table behind one when it is read.
    """
    found: dict[str, str] = {}  # by where it lies: links and other spellings lead to the same file
    for pattern in patterns:
        if pattern.startswith(URL_SCHEMES):
            if not is_valid_url(pattern):
                raise BadInput(
                    f"{key}, number {patterns.index(pattern) + 1}: is not a URL; write / ? # @ : and spaces in a user, "
                    f"password or query as %2F %3F %23 %40 %3A %20"
                )
            name = pattern if reader_of(pattern) else str(download(key, pattern, kept))
            found.setdefault(resolved_name(name), name)
            continue
        matches = [] if os.path.lexists(pattern) else sorted(glob(pattern, recursive=True))
        for name in matches or [pattern]:
            path = Path(name)
            if ODD_NAME.search(name):
                raise BadInput(
                    f"{key}: {name!a}: a name with a control character or no UTF-8; rename the file"
                )
            if os.path.isdir(path):  # noqa: PTH112  (of a name that is too long Path's own raises)
                raise BadInput(
                    f"{key}: {path} is a folder; give its files, for example '{path}/**/*.txt'"
                )
            if not os.path.isfile(path):  # noqa: PTH113
                raise BadInput(no_such_file(key, str(path)))
            if not path.stat().st_size:
                raise BadInput(f"{key}: {path}: is empty")
            if not os.access(path, os.R_OK):
                raise BadInput(f"{key}: {path}: you have no permission to read it")
            if not reader_of(name):
                _check_not_packed(key, name)
            found.setdefault(resolved_name(name), str(path))
    return list(found.values())


def _check_not_packed(key: str, name: str) -> None:
    path = Path(path_of(name).lower())
    suffix = (
        ".tar" if path.suffix in COMPRESSED_SUFFIXES and path.stem.endswith(".tar") else path.suffix
    )
    if suffix in UNPACK:
        fetched = Path(path_of(name)).name if name.startswith(URL_SCHEMES) else name
        command = f"{UNPACK[suffix]} {shlex.quote(fetched)}"
        raise BadInput(f"{key}: {name}: is packed; give what this unpacks: {command}")


def download(key: str, url: str, prepared_data_dir: Path) -> Path:
    """Fetch a text file once, tried again as tables are read; later calls return the kept copy.

    Raises BadInput when it cannot be had, TrainingStopped when the retries are used up.
    """
    _check_not_packed(key, url)
    if not remote.is_http(url):
        raise BadInput(
            f"{key}: {url}: of hf:// only tables are read; give a text's link, as its page on the Hub has it: "
            f"https://.../resolve/main/NAME"
        )

    def fetch() -> None:
        try:
            remote.fetch(url, path)
        except httpx.ConnectError as error:  # no network, or no such host: the user knows at once
            raise BadInput(
                f"{key}: {url}: cannot be fetched ({error}). Give a file: --{key} FILE"
            ) from None

    path = remote.copy_of(url, prepared_data_dir)
    retry(f"{key}: {url}", fetch)
    return path


def reader_of(name: str) -> Reader | None:
    """Return the reader of a table by its file name, or None for text."""
    format_name = table_format(name)
    return next((reader for reader in READERS if reader.name == format_name), None)


def resolved_name(name: str) -> str:
    return redact_url(name) if name.startswith(URL_SCHEMES) else str(Path(name).resolve())
