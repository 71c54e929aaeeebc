"""Expand `~` and environment variables in the paths that users write, and find the repository's own files.

A path is expanded once, where it is read. ``literal`` is the inverse: it writes a path so that reading it again gives
the same path, for recipe files and for commands that a message prints.
"""

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path

from ursa_minor.base.shell import path_word

ROOT = Path(__file__).resolve().parents[2]  # the folder of train.py, and recipes/
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
VARIABLE = re.compile(
    r"""\$ (?:
        (?P<dollar> \$ )                    # $$ stands for one $
      | (?P<name> [A-Za-z_][A-Za-z0-9_]* )  # $NAME
      | \{ (?P<braced> [^}]* ) (?P<end> \}? )  # ${NAME}
    )""",
    re.VERBOSE,
)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_url(path: str) -> bool:
    """Return whether a text is a URL (https://, hf://, hub://, s3://, ...) rather than a path."""
    return URL.match(path) is not None


def expand(path: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a path with its environment variables and its leading `~` or `~user` replaced.

    `$NAME` and `${NAME}` are variables, and `$$` stands for a `$`. The value of a variable is not searched for further
    variables, but it may begin with `~`. A URL is returned as it is.

    Args:
        environment: the variables, or None for those of this process.

    Raises:
        ValueError: a variable is not set or empty, or there is no such user. The message states what to do.
    """
    if is_url(path):
        return path
    variables = os.environ if environment is None else environment

    def value_of(match: re.Match) -> str:
        if match["dollar"]:
            return "$"
        name = match["name"] or match["braced"]
        if match["name"] is None and not (match["end"] and NAME.fullmatch(name)):
            raise ValueError(
                f"{match[0]} is not a variable; write $NAME, ${{NAME}}, or $$ for the character $"
            )
        if name not in variables:
            raise ValueError(
                f"the environment variable {name} is not set; set it, or write $$ for the character $"
            )
        if not variables[name]:
            raise ValueError(
                f"the environment variable {name} is empty; set it, or write $$ for the character $"
            )
        return variables[name]

    expanded = os.path.expanduser(VARIABLE.sub(value_of, path))  # noqa: PTH111  (Path would change ./~ and a//b)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ValueError(
            f"the home folder of {user} is not known; for a name that begins with ~ write ./{expanded}"
        )
    return expanded


def literal(path: str) -> str:
    """Return a path as ``expand`` reads it back without a change."""
    if is_url(path):
        return path
    escaped = path.replace("$", "$$")
    return f"./{escaped}" if escaped.startswith("~") else escaped


def quoted(path: str | Path) -> str:
    """Return a path as a word of a command of this project that a message prints.

    Neither the shell nor ``expand`` changes it, and it is not mistaken for a flag.
    """
    return path_word(literal(str(path)))


def argument(text: str) -> str:
    """Return a command-line argument expanded, as the ``type`` of an argparse argument.

    Raises:
        argparse.ArgumentTypeError: the path cannot be expanded; argparse adds the name of the option.
    """
    try:
        return expand(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def path_argument(text: str) -> Path:
    """Return a command-line argument as an expanded Path, as the ``type`` of an argparse argument."""
    return Path(argument(text))


def assignment_argument(text: str) -> str:
    """Return NAME=PATH with the path expanded, as the ``type`` of an argparse argument."""
    name, equals, path = text.partition("=")
    return f"{name}{equals}{argument(path)}"


def find_from_anywhere(path: Path) -> Path:
    """Return a path, or the file of this name in the repository where the path itself does not exist."""
    if not os.path.lexists(path) and os.path.lexists(ROOT / path):
        return ROOT / path
    return path
