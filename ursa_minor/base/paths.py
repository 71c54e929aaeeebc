"""Expand `~` and environment variables in the paths that users write, and locate the repository.

A path is expanded once, when it is read. ``literal`` is the inverse: it escapes a path, so that
``expand`` returns it unchanged. Recipe files and commands in messages contain escaped paths.
"""

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path

from ursa_minor.base.shell import path_word

ROOT = Path(__file__).resolve().parents[2]  # the repository: train.py, recipes/
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
VARIABLE = re.compile(
    r"""\$ (?:
        (?P<dollar> \$ )                    # $$ is an escaped $
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

    `$NAME` and `${NAME}` are variables, and `$$` is an escaped `$`. The value of a variable is not
    expanded again, but it may start with `~`. A URL is returned unchanged.

    Args:
        path: a path in a recipe or on the command line.
        environment: the variables, or None for those of this process.

    Raises:
        ValueError: a variable is not set or is empty, or the user does not exist. The message
            contains a fix.
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
        fix = "set it, or write $$ for the character $"
        if name not in variables:
            raise ValueError(f"the environment variable {name} is not set; {fix}")
        if not variables[name]:
            raise ValueError(f"the environment variable {name} is empty; {fix}")
        return variables[name]

    with_values = VARIABLE.sub(value_of, path)
    expanded = os.path.expanduser(with_values)  # noqa: PTH111  (Path would change ./~ and a//b)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ValueError(
            f"the home folder of {user} is not known; for a name that starts with ~ write "
            f"./{expanded}"
        )
    return expanded


def literal(path: str) -> str:
    """Escape a path, so that ``expand`` returns it unchanged."""
    if is_url(path):
        return path
    escaped = path.replace("$", "$$")
    if escaped.startswith("~"):
        return f"./{escaped}"
    return escaped


def quoted(path: str | Path) -> str:
    """Return a path as an argument of a command of this project that a message prints.

    Neither the shell nor ``expand`` changes it, and it is not mistaken for a flag.
    """
    return path_word(literal(str(path)))


def argument(text: str) -> str:
    """Return an expanded path as a string, as the ``type`` of an argparse argument.

    Raises:
        argparse.ArgumentTypeError: the path cannot be expanded. argparse adds the option's name.
    """
    try:
        return expand(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def path_argument(text: str) -> Path:
    """Return an expanded path as a Path, as the ``type`` of an argparse argument."""
    return Path(argument(text))


def assignment_argument(text: str) -> str:
    """Return NAME=PATH with the path expanded, as the ``type`` of an argparse argument."""
    name, equals, path = text.partition("=")
    return f"{name}{equals}{argument(path)}"


def find_from_anywhere(path: Path) -> Path:
    """Return a path if it exists, or else the same path in the repository if that exists."""
    if not os.path.lexists(path) and os.path.lexists(ROOT / path):
        return ROOT / path
    return path


def can_be_picture(path: Path) -> bool:
    """Return whether a picture can be written to a path."""
    return path.suffix == ".png" and not path.is_dir() and path.parent.is_dir()
