"""Names of files, here and elsewhere."""

from pathlib import Path
from urllib.parse import urlparse

from pretrain.base.foreign import redact_url
from pretrain.recipe.keys import Data

COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
URL = ("https://", "http://", "hf://")


def has_urls(source: Data) -> bool:
    """Return whether a source's files lie elsewhere: to find it may then fetch them."""
    return any(name.startswith(URL) for name in [*(source.data_files or ()), *(source.validation_files or ())])


def path_of(name: str) -> str:
    """Return a name without a URL's query; a file's own name may hold a question mark."""
    return urlparse(name).path if name.startswith(URL) else name


def shown_name(name: str) -> str:
    """Return a file's name as manifests hold it: a redacted URL, or the name without the folder, which may move."""
    return redact_url(name) if name.startswith(URL) else Path(name).name
