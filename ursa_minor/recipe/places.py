"""Paths of a recipe as it is read: expanded, and those of a run's recipe.yaml where the run folder is now."""

import os
from collections.abc import Collection, Mapping
from glob import has_magic, iglob
from pathlib import Path
from typing import Any

from ursa_minor.base import paths
from ursa_minor.base.run_files import CHECKPOINTS, METRICS
from ursa_minor.base.wording import shorten
from ursa_minor.recipe import keys


def expand(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a recipe's keys and values with expanded paths, and one line for each path that cannot be expanded."""
    problems = []

    def expanded(name: str, path: str) -> str:
        try:
            return paths.expand(path)
        except ValueError as error:
            problems.append(f"{name} = {shorten(path)}: {error}")
            return path

    return keys.map_paths(values, expanded), problems


def follow_run_folder(
    values: Mapping[str, Any], stated: Mapping[str, Any], flags: Collection[str], folder: Path
) -> dict[str, Any]:
    """Return the values of a run's recipe.yaml with output_dir, and paths next to the run, as they are now.

    1. With --output_dir the run is in that folder.
    2. With another --run_name it is a new run, in runs/<run_name>.
    3. Otherwise it is the run in ``folder``, which may have been moved or copied, if there is one.

    A run in another folder does not start from the checkpoint that the run of recipe.yaml started from
    (``resume_from_checkpoint``).

    Args:
        values: of recipe.yaml and the flags together, with expanded paths.
        stated: recipe.yaml's own values.
        flags: names of the keys that the command line states.
        folder: the folder of recipe.yaml.
    """
    followed = dict(values)
    stated, _ = expand(stated)
    if isinstance(stated.get("output_dir"), str):
        followed |= _moved(values, flags, Path(stated["output_dir"]), folder.resolve())
    run_name = values.get("run_name")
    has_other_name = bool(run_name and stated.get("run_name") and run_name != stated["run_name"])
    if "output_dir" in flags:
        is_other_run = Path(str(values["output_dir"])).resolve() != folder.resolve()
    elif has_other_name:
        followed["output_dir"] = None
        is_other_run = True
    else:
        is_other_run = False
        if contains_run(folder):
            followed["output_dir"] = str(
                folder if folder.name not in ("", "..") else folder.resolve()
            )
    if is_other_run and "resume_from_checkpoint" not in flags:
        followed["resume_from_checkpoint"] = keys.FIELDS["resume_from_checkpoint"].default
    return followed


def contains_run(folder: Path) -> bool:
    """Return whether a folder contains a run that has begun."""
    return (folder / METRICS).is_file() or (folder / CHECKPOINTS).is_dir()


def _moved(
    values: Mapping[str, Any], flags: Collection[str], before: Path, now: Path
) -> dict[str, Any]:
    """Return the values of recipe.yaml for a run folder that was moved together with files that it names.

    The moved folder is the outermost parent of the run folder below which all names are as before. A local path inside
    it that does not exist any more is replaced by the path inside its new place, if that exists or nothing is left at
    the old place.

    Args:
        before: the run folder as recipe.yaml states it.
        now: where it is.
    """
    if not before.is_absolute() or before == now:
        return {}
    while before.name == now.name and before != before.parent:
        before = before.parent
        now = now.parent

    def new_place(name: str, path: str) -> str:
        place = Path(path)
        if not (keys.is_local(name, path) and place.is_relative_to(before)) or _exists(path):
            return path
        moved = str(now / place.relative_to(before))
        return moved if _exists(moved) or not before.exists() else path

    names = values.keys() - {"output_dir", *flags}
    return keys.map_paths({name: values[name] for name in names}, new_place)


def _exists(path: str) -> bool:
    """Return whether a path exists, or a glob matches a file."""
    if os.path.lexists(path):
        return True
    return has_magic(path) and any(iglob(path, recursive=True))
