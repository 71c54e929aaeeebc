"""Names of files, here and elsewhere."""

from pathlib import Path
from urllib.parse import urlparse

from pretrain.base.foreign import redact_url

COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
URL = ("https://", "http://", "hf://")


def path_of(name: str) -> str:
    """Return a name without a URL's query; a file's own name may hold a question mark."""
    return urlparse(name).path if name.startswith(URL) else name


def shown_name(name: str) -> str:
    """Return a file's name as manifests hold it: a redacted URL, or the name without the folder, which may move."""
    return redact_url(name) if name.startswith(URL) else Path(name).name
