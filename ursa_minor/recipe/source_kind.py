"""Kinds of data sources, which are determined by the keys of a recipe and by file names."""

import os
from collections.abc import Mapping
from enum import Enum
from glob import has_magic, iglob
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlparse

URL_SCHEMES = ("https://", "http://", "hf://")
STDLIB = "python_stdlib"  # the value of dataset_name for the source of the running Python
COMPRESSED_SUFFIXES = {".gz", ".bz2", ".xz", ".zst"}
# File formats of tables by suffix. All other files are text. The readers are in
# data/sources/formats/.
TABLE_FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".jsonlines": "json",
    ".jl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".arrow": "arrow",
    ".feather": "arrow",  # as pandas and Polars write it
    ".ipc": "arrow",
}
AUTO = "auto"  # the value of data_format for which the names of the files decide
# The other values of data_format, and the format of each. None is text.
DATA_FORMATS: dict[str, str | None] = {
    "text": None,
    "json_lines": "json",
    "csv": "csv",
    "parquet": "parquet",
    "arrow": "arrow",
}
SAVED_STATE = "state.json"  # in a folder of Dataset.save_to_disk: the list of its Arrow files
# These formats need random access, so their files cannot be compressed (no .parquet.gz).
UNCOMPRESSED_FORMATS = {"parquet", "arrow"}


class SourceKind(Enum):
    """A kind of data source. The value is its name in messages and in the documentation."""

    SHARDS = "local token shards"
    TOKEN_FILES = "token files of the Hub"
    TEXT = "text files"
    TABLES = "tables"
    STDLIB = "python_stdlib"
    DATASET = "a Hub data set"


def path_of(name: str) -> str:
    """Return the path of a URL without its query, or the name of a local file unchanged.

    The name of a local file may contain a question mark.
    """
    return urlparse(name).path if name.startswith(URL_SCHEMES) else name


def table_format(name: str, data_format: str | None = AUTO) -> str | None:
    """Return the format of a table, or None for text.

    Args:
        name: name or URL of the file.
        data_format: the recipe key. Its default, or None, means that the suffix decides.
    """
    path = PurePosixPath(path_of(name).lower())
    is_compressed = path.suffix in COMPRESSED_SUFFIXES
    suffix = PurePosixPath(path.stem).suffix if is_compressed else path.suffix
    format = TABLE_FORMATS.get(suffix)
    if data_format not in (AUTO, None):
        format = DATA_FORMATS[data_format]
    if is_compressed and format in UNCOMPRESSED_FORMATS:
        return None
    return format


def source_kind(values: Mapping[str, Any]) -> SourceKind | None:
    """Return the kind of the one data source that the keys name, or None if it is not known.

    The kind of a glob is that of its first match, because all files of a source have the same kind.
    """
    if values.get("data_dir"):
        is_remote = str(values["data_dir"]).startswith("hf://")
        return SourceKind.TOKEN_FILES if is_remote else SourceKind.SHARDS
    if values.get("data_files"):
        name = _first_match(str(values["data_files"][0]))
        if os.path.isdir(name):  # noqa: PTH112
            return None  # it is rejected when the files are found
        is_table = table_format(name, values.get("data_format"))
        return SourceKind.TABLES if is_table else SourceKind.TEXT
    if values.get("dataset_name") == STDLIB:
        return SourceKind.STDLIB
    if values.get("dataset_name"):
        return SourceKind.DATASET
    return None


def _first_match(pattern: str) -> str:
    """Return the first file that a pattern matches, or the pattern itself."""
    if pattern.startswith(URL_SCHEMES):
        return pattern
    saved_state = os.path.join(pattern, SAVED_STATE)  # noqa: PTH118
    if os.path.isfile(saved_state):  # noqa: PTH113
        return saved_state
    if not has_magic(pattern) or os.path.lexists(pattern):
        return pattern
    names = iglob(pattern, recursive=True)
    return next((name for name in names if os.path.isfile(name)), pattern)  # noqa: PTH113
