"""Commands for a user to paste into a shell."""

import re
import shlex
import unicodedata
from pathlib import Path


def path_word(path: Path | str) -> str:
    """Return a path as one word of a shell command: quoted, and never mistaken for a flag."""
    text = str(path)
    if text.startswith("-"):
        text = f"./{text}"
    return shlex.quote(text)


def ollama_name(name: str) -> str:
    """Return the nearest valid name of an Ollama model: lower case, with [a-z0-9._-] only."""
    decomposed = unicodedata.normalize("NFKD", name.casefold())
    ascii_name = "".join(c for c in decomposed if not unicodedata.combining(c))
    valid = re.sub(r"[^a-z0-9._-]+", "-", ascii_name).strip("._-")
    return valid[:80] or "model"
