"""Check the id of a data set of the Hub without contacting the Hub."""

import os
import re
import shlex
from pathlib import Path
from urllib.parse import urlparse

from ursa_minor.base.errors import BadInput
from ursa_minor.base.redaction import redact_url
from ursa_minor.data.sources.table_folders import files_of_folder
from ursa_minor.recipe.source_kind import STDLIB, URL_SCHEMES

DATASET_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
# Groups: id, and the rest of the path of a file. The last part of the id is the name.
DATASET_PATH = re.compile(r"/?datasets/([^/@]+(?:/[^/@]+)?)(?:@[^/]+)?(/.*)?")
FILE_PATH = re.compile(r"/(blob|raw|resolve)/")
HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
# First arguments of datasets.load_dataset that are file formats, not data sets.
FILE_FORMATS = ("arrow", "csv", "json", "pandas", "parquet", "text")


def is_hub_url(url: str) -> bool:
    """Return whether a URL is one of the Hub (``HF_ENDPOINT``)."""
    endpoint = os.environ.get("HF_ENDPOINT", "")
    hosts = (*HUB_HOSTS, urlparse(endpoint).netloc)
    return url.startswith("hf://") or urlparse(url).netloc in hosts


def check_dataset_id(name: str) -> None:
    """Check that a name can be the id of a data set of the Hub, and not something else.

    ``datasets`` would read a local folder of the same name instead of the data set.

    Raises:
        BadInput: the name is a URL, a local path or a file format, or is not a valid id.
    """
    if name == STDLIB:
        return
    reason = _problem(name)
    if reason:
        shown_name = redact_url(name) if name.startswith(URL_SCHEMES) else name
        raise BadInput(f"dataset_name = {shown_name}: {reason}")


def _problem(name: str) -> str | None:
    """Return the problem with a name and its fix, or None."""
    if name.startswith(URL_SCHEMES):
        return _problem_of_url(name)
    match = DATASET_PATH.fullmatch(name)
    if match and not os.path.lexists(name):
        return f"leave out the prefix. Use --dataset_name {match[1]}"
    if name in FILE_FORMATS:
        return "this is a file format, not a data set. Use --data_files FILE..."
    if os.path.lexists(name):
        fix = f"this is a local path. To read it, use --data_files {files_of_folder(name)}"
        if Path(name).is_dir() and DATASET_ID.fullmatch(name):
            fix += ". To read the data set of the Hub, run the command in another folder"
        return fix
    repo_id, _, revision = name.partition("@")
    if revision and DATASET_ID.fullmatch(repo_id):
        return f"use --dataset_name {repo_id} --dataset_revision {shlex.quote(revision)}"
    if not DATASET_ID.fullmatch(name):
        return (
            "must be the id of a data set of the Hub, OWNER/NAME. For local files, use "
            "--data_files PATH... with paths that exist"
        )
    return None


def _problem_of_url(url: str) -> str:
    """Return the fix for a URL in the place of an id."""
    path = urlparse(url).path
    if url.startswith("hf://"):
        path = url.removeprefix("hf:/")
    match = DATASET_PATH.fullmatch(path)
    if not is_hub_url(url) or not match:
        return "this is a URL, not the id of a data set. For the URL of a file, use --data_files"
    file_path = match[2] or ""
    if FILE_PATH.match(file_path):
        url_of_file = FILE_PATH.sub("/resolve/", redact_url(url), count=1)
        return f"this is the URL of a file. Use --data_files {shlex.quote(url_of_file)}"
    return f"this is a URL. Use the id in it: --dataset_name {match[1]}"
