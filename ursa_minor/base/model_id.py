"""Parse the names of models and tokenizers: a folder, or a Hub id with an optional revision."""

import os
import re
from typing import NamedTuple

from ursa_minor.base.errors import BadInput

# Names of tags and branches, as git permits them (git check-ref-format), and commits.
REVISION = re.compile(r"[^\s~^:?*\[\\\x00-\x1f\x7f]+")
EXAMPLE = "OWNER/NAME@step-00005000"


class ModelId(NamedTuple):
    """A folder, or a repository of the Hub.

    Attributes:
        location: the folder, or the id of the repository.
        revision: a tag, branch or commit. None for a folder, and for the default branch.
    """

    location: str
    revision: str | None = None


def parse(name: str, option: str) -> ModelId:
    """Split ``ID@REVISION``. A path that exists on this machine is never split.

    Args:
        name: a path, ``ID`` or ``ID@REVISION``.
        option: the beginning of an error message, for example ``--model `` or ``init_from = ``.

    Raises:
        BadInput: the name is neither an existing path nor a valid id and revision.
    """
    if os.path.exists(name):  # noqa: PTH110  (Path.exists raises for a name that is too long)
        return ModelId(name)
    if name.startswith("hub://"):
        raise BadInput(
            f"{option}{name}: hub:// is for --resume_from_checkpoint only. Use the id without it: "
            f"OWNER/NAME or {EXAMPLE}"
        )
    if "@" not in name:
        return ModelId(name)
    location, _, revision = name.partition("@")
    if "@" in revision:
        raise BadInput(
            f"{option}{name}: has more than one @, and no such folder exists. Use {EXAMPLE}"
        )
    if not location or not REVISION.fullmatch(revision):
        raise BadInput(
            f"{option}{name}: is neither a folder nor an id of the Hub with a tag, a branch or "
            f"a commit after the @. Use {EXAMPLE}, or the id alone for the newest version"
        )
    if os.path.exists(location):  # noqa: PTH110
        raise BadInput(
            f"{option}{name}: {location} is a folder here, and a folder has no revisions. "
            f"Leave out @{revision}, or run the command in another folder to load it from the Hub"
        )
    return ModelId(location, revision)
