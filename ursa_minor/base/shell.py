"""Write the commands that a message prints, which the user pastes into a shell."""

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


def unused_path(folder: Path, stem: str, suffix: str = "") -> Path:
    """Return a path at which nothing exists, for the output of a command.

    Args:
        folder: the folder of the output.
        stem: name of the output without its suffix. A number is added if it exists.
        suffix: suffix of the output, "" for a folder.
    """
    path = folder / f"{stem}{suffix}"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}{suffix}"
    return path


def converted_path(path: Path, suffix: str) -> Path:
    """Return a path next to a file, at which nothing exists, for its conversion."""
    stem = path.name.partition(".")[0] or "file"
    return unused_path(path.parent, f"{stem}-converted", suffix)


def filter_command(program: str, old: Path, suffix: str, unpack: str = "") -> str:
    """Return the command that writes the output of a program for a file into a new file.

    Args:
        program: a command that reads standard input and writes standard output.
        old: the file that is converted.
        suffix: suffix of the new file.
        unpack: the command that writes the decompressed file to standard output, such as
            ``gzip -dc``, or "" for a file that is not compressed.
    """
    new = path_word(converted_path(old, suffix))
    if unpack:
        return f"{unpack} {path_word(old)} | {program} > {new}"
    return f"{program} < {path_word(old)} > {new}"


def ollama_name(name: str) -> str:
    """Return the nearest valid name of an Ollama model: lower case, with [a-z0-9._-] only."""
    decomposed = unicodedata.normalize("NFKD", name.casefold())
    without_accents = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    valid_name = re.sub(r"[^a-z0-9._-]+", "-", without_accents).strip("._-")
    return valid_name[:80] or "model"
