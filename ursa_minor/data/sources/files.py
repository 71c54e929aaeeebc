"""Resolve paths, glob patterns and URLs to files, and choose the reader of each file."""

import logging
import os
import re
import shlex
from glob import glob, has_magic
from pathlib import Path
from typing import NoReturn

import httpx

from ursa_minor.base.errors import BadInput
from ursa_minor.base.redaction import is_valid_url, redact_url
from ursa_minor.base.retry import retry
from ursa_minor.base.wording import did_you_mean_file, pluralize
from ursa_minor.data.sources import remote, table_folders
from ursa_minor.data.sources.columns import Reader
from ursa_minor.data.sources.formats import arrow, csv, json_lines, parquet
from ursa_minor.recipe.source_kind import (
    AUTO,
    COMPRESSED_SUFFIXES,
    URL_SCHEMES,
    path_of,
    table_format,
)

log = logging.getLogger(__name__)

# Each format is one module. Its file names are in recipe/source_kind.TABLE_FORMATS.
READERS = (parquet.READER, json_lines.READER, csv.READER, arrow.READER)

# Control characters and line separators, which would break a line of a log, and bytes that are not
# UTF-8 (surrogates), which cannot be written to a file.
ODD_CHARACTER = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

# The command that unpacks a file, by its suffix.
UNPACK_COMMANDS = {
    ".tar": "tar -xf",
    ".tgz": "tar -xf",
    ".zip": "unzip",
    ".7z": "7z x",
    ".rar": "unrar x",
    ".br": "brotli -d",
    ".lz4": "lz4 -d",
    ".gz": "gunzip -k",
    ".bz2": "bunzip2 -k",
    ".xz": "unxz -k",
    ".zst": "unzstd",
}


def no_such_file(key: str, name: str) -> str:
    if has_magic(name):
        return f"{key}: no file matches the pattern {name}. Check the pattern"
    suggestion = did_you_mean_file(name, Path.is_file) or ". Check the path"
    return f"{key}: the file {name} does not exist{suggestion}"


def find_files(
    key: str,
    patterns: list[str],
    prepared_data_dir: Path = Path("data"),
    data_format: str = AUTO,
) -> list[str]:
    """Return the files that paths, glob patterns and URLs name.

    A pattern that is the name of an existing file matches this file only. A folder of
    ``Dataset.save_to_disk`` is permitted. A text file behind a URL is downloaded now, a table when
    it is read.

    Args:
        key: the recipe key or the option of the patterns, for messages.
        patterns: paths, glob patterns and URLs.
        prepared_data_dir: folder that contains the folder for downloads.
        data_format: see ``reader_of``.

    Returns:
        Each file once, in the order of the patterns. The files of a glob pattern are sorted.
        Cache files that ``datasets`` writes into a saved folder are left out.

    Raises:
        BadInput: files do not exist or cannot be read. There is a line for each of them.
        TrainingStopped: all attempts to download a file failed.
    """
    # The keys are resolved names, so that links and different spellings of a path are one file.
    files: dict[str, str] = {}
    problems: list[str] = []
    for number, pattern in enumerate(patterns, 1):
        if pattern.startswith(URL_SCHEMES):
            names = [_file_of_url(key, number, pattern, prepared_data_dir, data_format)]
        else:
            names = _match(key, pattern)
            problems += _problems_of_files(key, names, data_format)
        for name in names:
            files.setdefault(resolved_name(name), name)
    if problems:
        raise BadInput(problems)
    return table_folders.without_cache_files(key, list(files.values()))


def _file_of_url(key: str, number: int, url: str, prepared_data_dir: Path, data_format: str) -> str:
    """Return the URL of a table, or the path of the downloaded copy of a text.

    Args:
        number: the number of the URL among the patterns, for messages.
    """
    if not is_valid_url(url):
        raise BadInput(
            f"{key}: entry {number} is not a valid URL. Check its host and port. In the "
            f"user name, password and query, write / ? # @ : and spaces as %2F %3F %23 "
            f"%40 %3A %20"
        )
    if reader_of(url, data_format):
        return url
    return str(download(key, url, prepared_data_dir))


def _match(key: str, pattern: str) -> list[str]:
    """Return the local files that a pattern matches, or the pattern itself if there are none.

    Of a glob pattern, empty files and folders are left out, and their number is logged. A folder
    of ``Dataset.save_to_disk`` means the files that it lists.
    """
    if os.path.lexists(pattern):
        return table_folders.saved_files(Path(pattern)) or [str(Path(pattern))]
    names = []
    folders = []
    empty_files = []
    for name in sorted(glob(pattern, recursive=True)):
        if os.path.isdir(name):  # noqa: PTH112
            folders.append(str(Path(name)))
        elif os.path.isfile(name) and not Path(name).stat().st_size:  # noqa: PTH113
            empty_files.append(str(Path(name)))
        else:
            names.append(str(Path(name)))
    if not names:
        # The first one is rejected later.
        return [*empty_files, *folders, str(Path(pattern))][:1]
    if empty_files or folders:
        skipped = []
        if empty_files:
            skipped.append(pluralize(len(empty_files), "empty file", "empty files"))
        if folders:
            skipped.append(pluralize(len(folders), "folder", "folders"))
        log.info(f"{key}: skipped among the matches of {pattern}: {' and '.join(skipped)}")
    return names


def _problems_of_files(key: str, names: list[str], data_format: str) -> list[str]:
    """Return the problems of the local files that cannot be used."""
    problems = []
    for name in names:
        try:
            _check_file(key, name, data_format)
        except BadInput as error:
            problems += error.lines
    return list(dict.fromkeys(problems))


def _check_file(key: str, name: str, data_format: str) -> None:
    """Raise BadInput for a local file that cannot be read, an archive or a part of a table."""
    if ODD_CHARACTER.search(name):
        raise BadInput(
            f"{key}: the file name {name!a} contains a control character or bytes that are not "
            f"UTF-8. Rename the file"
        )
    # For a name that is too long, the methods of Path raise an error.
    if os.path.isdir(name):  # noqa: PTH112
        _reject_folder(key, name)
    if not os.path.isfile(name):  # noqa: PTH113
        raise BadInput(no_such_file(key, name))
    if not Path(name).stat().st_size:
        raise BadInput(f"{key}: the file {name} is empty. Use a file that contains text or rows")
    if not os.access(name, os.R_OK):
        raise BadInput(
            f"{key}: you do not have permission to read {name}. "
            f"Change its permissions, or use a copy that you may read"
        )
    reader = reader_of(name, data_format)
    if reader is None:
        _check_not_packed(key, name)
    elif reader is parquet.READER:
        table_folders.check_no_table_format(key, name)


def _reject_folder(key: str, name: str) -> NoReturn:
    """Raise BadInput for a folder, with the files to use instead."""
    table_folders.check_no_table_format(key, name)
    splits = table_folders.saved_splits(Path(name))
    if splits:
        raise BadInput(
            f"{key}: {name} was saved by datasets and has the splits {', '.join(splits)}. Use one "
            f"of them, for example {table_folders.files_of_folder(name)}. Another one can be "
            f"used as --validation_files"
        )
    raise BadInput(
        f"{key}: {name} is a folder. Use its files, for example "
        f"{table_folders.files_of_folder(name)}"
    )


def _check_not_packed(key: str, name: str) -> None:
    """Raise BadInput for an archive or a compressed text, with the command that unpacks it."""
    path = Path(path_of(name).lower())
    suffix = path.suffix
    if suffix in COMPRESSED_SUFFIXES and path.stem.endswith(".tar"):
        suffix = ".tar"
    if suffix not in UNPACK_COMMANDS:
        return
    local_name = Path(path_of(name)).name if name.startswith(URL_SCHEMES) else name
    command = f"{UNPACK_COMMANDS[suffix]} {shlex.quote(local_name)}"
    raise BadInput(
        f"{key}: {name} is an archive or a compressed text. "
        f"Unpack it and use the files that it contains: {command}"
    )


def download(key: str, url: str, prepared_data_dir: Path) -> Path:
    """Download a text file, with retries, and return the path of the copy.

    Later calls return the same copy.

    Raises:
        BadInput: the file does not exist, may not be read, or is not a text file.
        TrainingStopped: all attempts failed.
    """
    _check_not_packed(key, url)
    if not remote.is_http(url):
        raise BadInput(
            f"{key}: {url} is a text file, but hf:// URLs are supported for tables only. For a "
            f"text file, use the download link on its page on the Hub: "
            f"https://.../resolve/main/NAME"
        )

    def fetch() -> None:
        try:
            remote.fetch(url, path)
        except httpx.ConnectError as error:
            # The host or the network is missing, so retries would not help.
            raise BadInput(
                f"{key}: {url} cannot be downloaded ({error}). Use a local file instead"
            ) from None

    path = remote.copy_of(url, prepared_data_dir)
    retry(f"{key}: {url}", fetch)
    return path


def reader_of(name: str, data_format: str = AUTO) -> Reader | None:
    """Return the reader of a table, or None for text.

    Args:
        name: the file.
        data_format: the recipe key. If it is auto, the file name decides.
    """
    format_name = table_format(name, data_format)
    return next((reader for reader in READERS if reader.name == format_name), None)


def resolved_name(name: str) -> str:
    """Return a name that is the same for all spellings of a path or URL."""
    return redact_url(name) if name.startswith(URL_SCHEMES) else str(Path(name).resolve())
