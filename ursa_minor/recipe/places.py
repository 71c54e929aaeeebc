"""Expand the paths of a recipe, and find the paths in a run's recipe.yaml if the run was moved."""

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
    """Expand ``~`` and variables in the paths of a recipe.

    Returns:
        The keys and values with expanded paths, and one error message for each path that cannot be
        expanded.
    """
    problems = []

    def expand_path(name: str, path: str) -> str:
        try:
            return paths.expand(path)
        except ValueError as error:
            problems.append(f"{name} = {shorten(path)}: {error}")
            return path

    return keys.map_paths(values, expand_path), problems


def follow_run_folder(
    values: Mapping[str, Any], stated: Mapping[str, Any], flags: Collection[str], folder: Path
) -> dict[str, Any]:
    """Adapt the values of a run's recipe.yaml to the present place of the run.

    1. With --output_dir, the run is in that folder.
    2. With another --run_name, it is a new run in runs/<run_name>.
    3. Otherwise it is the run in ``folder``, if there is one. It may have been moved or copied.

    A run in another folder than recipe.yaml does not start from the checkpoint that the run of
    recipe.yaml started from (``resume_from_checkpoint``).

    Args:
        values: keys and values of recipe.yaml and the flags together, with expanded paths.
        stated: keys and values of recipe.yaml.
        flags: the keys that the command line states.
        folder: the folder of recipe.yaml.

    Returns:
        The values with output_dir, resume_from_checkpoint and the paths of moved files changed.
    """
    followed = dict(values)
    stated, _ = expand(stated)
    if isinstance(stated.get("output_dir"), str):
        old_folder = Path(stated["output_dir"])
        followed |= _follow_moved_files(values, flags, old_folder, folder.resolve())

    run_name = values.get("run_name")
    old_name = stated.get("run_name")
    if "output_dir" in flags:
        is_other_run = Path(str(values["output_dir"])).resolve() != folder.resolve()
    elif run_name and old_name and run_name != old_name:
        is_other_run = True
        followed["output_dir"] = None
    else:
        is_other_run = False
        if contains_run(folder):
            has_name = folder.name not in ("", "..")
            followed["output_dir"] = str(folder if has_name else folder.resolve())
    if is_other_run and "resume_from_checkpoint" not in flags:
        followed["resume_from_checkpoint"] = keys.FIELDS["resume_from_checkpoint"].default
    return followed


def contains_run(folder: Path) -> bool:
    """Return whether a folder contains a run that has started."""
    return (folder / METRICS).is_file() or (folder / CHECKPOINTS).is_dir()


def _follow_moved_files(
    values: Mapping[str, Any], flags: Collection[str], old_folder: Path, new_folder: Path
) -> dict[str, Any]:
    """Return the values of recipe.yaml with the new paths of files that moved with the run folder.

    The folder that was moved is the outermost parent of the run folder below which all names are
    unchanged. A local path inside the old folder that does not exist any more is replaced by the
    same path inside the new folder, if that exists or nothing remains at the old place.

    Args:
        values: keys and values of recipe.yaml and the flags.
        flags: the keys that the command line states, which are not changed.
        old_folder: the run folder that recipe.yaml states.
        new_folder: the folder that contains recipe.yaml.
    """
    if not old_folder.is_absolute() or old_folder == new_folder:
        return {}
    while old_folder.name == new_folder.name and old_folder != old_folder.parent:
        old_folder = old_folder.parent
        new_folder = new_folder.parent

    def new_path(name: str, path: str) -> str:
        if not keys.is_local(name, path) or _exists(path):
            return path
        if not Path(path).is_relative_to(old_folder):
            return path
        moved_path = str(new_folder / Path(path).relative_to(old_folder))
        if _exists(moved_path) or not old_folder.exists():
            return moved_path
        return path

    names = values.keys() - {"output_dir", *flags}
    return keys.map_paths({name: values[name] for name in names}, new_path)


def _exists(path: str) -> bool:
    """Return whether a path exists, or a glob matches a file."""
    if os.path.lexists(path):
        return True
    return has_magic(path) and any(iglob(path, recursive=True))
