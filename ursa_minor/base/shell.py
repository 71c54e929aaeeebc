"""Quote arguments of commands that a message prints, for the user to paste into a shell."""

import re
import shlex
import unicodedata
from pathlib import Path


def path_word(path: Path | str) -> str:
    """Quote a path as one word of a shell command that is not mistaken for a flag."""
    text = str(path)
    if text.startswith("-"):
        text = f"./{text}"
    return shlex.quote(text)


def ollama_name(name: str) -> str:
    """Return the nearest valid name of an Ollama model: lower case, with [a-z0-9._-] only."""
    decomposed = unicodedata.normalize("NFKD", name.casefold())
    without_accents = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    valid_name = re.sub(r"[^a-z0-9._-]+", "-", without_accents).strip("._-")
    return valid_name[:80] or "model"
