"""Group the runs whose recipes differ only in some keys, such as the seed."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import METRICS, RECIPE
from ursa_minor.recipe import keys, loading

# Recipe keys that say where a run is stored, logged and published and which checkpoints it keeps,
# and nothing about its training.
TRACKING_KEYS = [field.name for field in dataclasses.fields(keys.SECTIONS["tracking"])]
HUB_KEYS = [field.name for field in dataclasses.fields(keys.SECTIONS["hub"])]
STORAGE_KEYS = (
    "run_name",
    "output_dir",
    "prepared_data_dir",
    "resume_from_checkpoint",
    "save_steps",
    "save_total_limit",
    "keep_checkpoints",
    "keep_optimizer",
    *TRACKING_KEYS,
    *HUB_KEYS,
)


class RunGroup(NamedTuple):
    """Runs that belong into one column.

    Attributes:
        recipe: the recipe keys that the runs share.
        paths: metrics.jsonl of each run.
    """

    recipe: dict[str, object]
    paths: list[Path]


def group_runs(paths: Sequence[Path], group_keys: Sequence[str]) -> list[RunGroup]:
    """Return the runs that belong into one column, in the order of the first run of each."""
    ignored_keys = {*STORAGE_KEYS, *group_keys}
    if "seed" in group_keys:
        ignored_keys.add("data_seed")
    recipes = {path: keys.map_paths(read_recipe(path), relative_path) for path in paths}
    if group_keys:
        recipes = completed(recipes, ignored_keys)
    groups: dict[str, RunGroup] = {}
    for path in paths:
        recipe = {key: value for key, value in recipes[path].items() if key not in ignored_keys}
        group_id = str(path)
        if group_keys:
            group_id = json.dumps(recipe, sort_keys=True, default=str)
        groups.setdefault(group_id, RunGroup(recipe, [])).paths.append(path)
    return list(groups.values())


def have_different_seeds(paths: Sequence[Path]) -> bool:
    """Return whether no two of these runs have the same values of seed and data_seed.

    Args:
        paths: metrics.jsonl of each run.
    """
    seeds = set()
    for path in paths:
        recipe = read_recipe(path)
        values = [recipe.get(key, keys.FIELDS[key].default) for key in ("seed", "data_seed")]
        seeds.add(tuple(values))
    return len(seeds) == len(paths)


def relative_path(name: str, path: str) -> str:
    """Return the path in a recipe key as a relative one if it is inside the current folder."""
    if Path(path).is_absolute() and Path(path).is_relative_to(Path.cwd()):
        return str(Path(path).relative_to(Path.cwd()))
    return path


def recipe_file(metrics: Path) -> Path:
    """Return the path of a run's recipe, next to its metrics.jsonl."""
    return metrics.with_name(RECIPE)


def read_recipe(metrics: Path) -> dict[str, object]:
    """Return the recipe next to a metrics.jsonl, or an empty one if there is none.

    Raises:
        BadInput: the recipe is not valid.
    """
    path = recipe_file(metrics)
    if not path.is_file():
        return {}
    try:
        recipe = loading.read_run_recipe(path)
    except BadInput as error:
        raise BadInput(
            f"{error}. Correct or restore this file. To compare the run without its recipe, copy "
            f"only {metrics} to an empty folder, and compare the copy without --group"
        ) from None
    return {str(name): value for name, value in recipe.items()}


def completed(
    recipes: Mapping[Path, dict[str, object]], ignored_keys: set[str]
) -> dict[Path, dict[str, object]]:
    """Return recipes with the defaults of the keys that they leave out.

    Args:
        recipes: by their metrics.jsonl.
        ignored_keys: keys in which runs of a group may differ.

    Raises:
        BadInput: a recipe is missing or lacks a key without a default that another one states, so
            that it is unknown whether the runs differ in it.
    """
    stated_keys = set().union(*recipes.values())
    compared_keys = (stated_keys & keys.FIELDS.keys()) - ignored_keys
    return {
        metrics: complete_recipe(recipe_file(metrics), recipe, compared_keys)
        for metrics, recipe in recipes.items()
    }


def complete_recipe(
    path: Path, recipe: Mapping[str, object], compared_keys: set[str]
) -> dict[str, object]:
    """Return a recipe with the defaults of the compared keys that it leaves out.

    Args:
        path: file of the recipe, for messages.
    """
    fix = f"Copy the {RECIPE} that the run wrote next to its {METRICS}, or leave out --group"
    if not path.is_file():
        raise BadInput(
            f"--group: {path} does not exist, so it is not known how that run differs. {fix}"
        )
    if not recipe.keys() & keys.FIELDS.keys():
        raise BadInput(f"--group: {path} has no key of a recipe. {fix}")
    missing_keys = compared_keys - recipe.keys()
    if recipe.get("init_from") is not None:
        missing_keys -= set(keys.MODEL_KEYS)  # the model that the run started from defines them
    complete = dict(recipe)
    without_default = []
    for key in sorted(missing_keys):
        default = keys.FIELDS[key].default
        if default is keys.ABSENT:
            without_default.append(key)
        else:
            complete[key] = default
    if without_default:
        raise BadInput(
            f"--group: {path} lacks {', '.join(without_default)}, which another recipe states. "
            f"{fix}"
        )
    return complete
