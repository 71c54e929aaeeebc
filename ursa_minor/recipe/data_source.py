"""Replace parts of a recipe by flags, and find the keys that then have no effect.

A data source on the command line replaces the recipe's whole data source. ``--init_from`` replaces
the recipe's model and tokenizer, and ``--max_steps`` replaces its ``num_train_epochs``. A key of
the recipe that flags make ineffective is dropped with a note.
"""

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ursa_minor.base import paths, run_files
from ursa_minor.recipe.keys import (
    ABSENT,
    FIELDS,
    REPLACED_BY_INIT_FROM,
    SOURCE_CHOICES,
    SOURCE_KEYS,
    SOURCE_NAMES,
    SOURCE_RULES,
)

log = logging.getLogger(__name__)

RecipeValues = dict[str, Any]
DATA_KEYS = {name for name, field in FIELDS.items() if field.metadata["kind"] == "data"}


def stated_sources(values: Mapping[str, Any]) -> list[str]:
    """Return the keys that name a data source. An empty list or an empty text does not name one."""
    return [name for name in SOURCE_CHOICES if values.get(name)]


def several_sources(values: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield the error of a file or a command line that names more than one data source.

    Args:
        values: the keys and values of the file, or of the flags.
        where: the prefix of the keys in the message: ``--`` for flags.
    """
    names = [f"{where}{name}" for name in stated_sources(values)]
    if len(names) > 1:
        yield (
            f"{' and '.join(names)} are different data sources. "
            "A run can have only one. Keep one of them"
        )


def replace_source(file_values: RecipeValues, flag_values: Mapping[str, Any]) -> RecipeValues:
    """Return the file's values without its data source if the flags name another one.

    The dropped keys are logged. A flag that repeats the recipe's own source drops nothing.
    """
    flag_sources = stated_sources(flag_values)
    recipe_sources = stated_sources(file_values)
    if not flag_sources or not recipe_sources:
        return file_values
    flag = flag_sources[0]
    if recipe_sources == [flag] and _path(file_values[flag]) == _path(flag_values[flag]):
        return file_values
    dropped = [name for name in SOURCE_KEYS if file_values.get(name)]
    log.info(
        f"--{flag} replaces the recipe's data source. "
        f"These keys of the recipe are ignored: {', '.join(dropped)}"
    )
    return _without(file_values, dropped)


def replace_model(file_values: RecipeValues, flag_values: Mapping[str, Any]) -> RecipeValues:
    """Return the file's values without its model and tokenizer if ``--init_from`` replaces them.

    The dropped keys are logged. A flag that repeats the recipe's own model drops nothing.
    """
    flag_model = flag_values.get("init_from")
    if not isinstance(flag_model, str):
        return file_values
    if _model_path(flag_model) == _model_path(file_values.get("init_from")):
        return file_values
    dropped = [name for name in REPLACED_BY_INIT_FROM if name in file_values]
    dropped_values = [name for name in dropped if file_values[name] is not None]
    if dropped_values:
        log.info(
            "--init_from replaces the recipe's model and tokenizer. "
            f"These keys of the recipe are ignored: {', '.join(dropped_values)}"
        )
    return _without(file_values, dropped)


def replace_length(file_values: RecipeValues, flag_values: Mapping[str, Any]) -> RecipeValues:
    """Return the file's values without its length of the run if the flags state another one.

    Args:
        file_values: keys and values of the recipe file.
        flag_values: ``max_steps`` or ``num_train_epochs`` if a flag states it, otherwise empty.
    """
    others = {"max_steps": "num_train_epochs", "num_train_epochs": "max_steps"}
    return _without(file_values, [others[name] for name in flag_values])


def drop_ineffective(
    values: RecipeValues,
    file_values: Mapping[str, Any],
    original_values: Mapping[str, Any],
    flags: Collection[str],
    modes: Collection[str] = (),
) -> RecipeValues:
    """Return the values without the recipe's keys that only the flags make ineffective.

    A dropped key gets its default. A key without a default is disabled, or keeps its value if it
    cannot be disabled.

    Args:
        values: every key, with flags and defaults applied.
        file_values: the keys that remain of the recipe file after ``replace_source`` and
            ``replace_model``.
        original_values: the keys that the recipe file states.
        flags: the keys that the flags state.
        modes: the options on the command line that are not recipe keys.
    """
    if not flags:
        return values
    defaults = {name: field.default for name, field in FIELDS.items()}
    without_flags = defaults | dict(original_values)
    with_modes = values | dict.fromkeys(modes, True)
    result = dict(values)
    dropped = []
    for name in FIELDS:
        is_only_in_file = name in file_values and name not in flags
        if not is_only_in_file or is_off(name, values[name]):
            continue
        has_lost_effect = has_effect(name, without_flags) and not has_effect(name, with_modes)
        if has_lost_effect:
            dropped.append(name)
            result[name] = _value_when_dropped(name, values[name])
    if dropped:
        log.info(
            "With these flags, the following keys of the recipe have no effect and are ignored: "
            f"{', '.join(dropped)}"
        )
    return result


def _value_when_dropped(name: str, value: Any) -> Any:
    field = FIELDS[name]
    if field.default is not ABSENT:
        return field.default
    off_values = [off for off in field.metadata["off"] if off is not None]
    return off_values[0] if off_values else value


def is_off(name: str, value: Any) -> bool:
    """Return whether a value disables its key. It is permitted where the key has no effect."""
    return value == [] or value in FIELDS[name].metadata["off"]


def has_effect(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether a key has an effect on a run.

    Args:
        name: the key.
        values: every key, and the modes of the command that are on.
    """
    return any(_conditions_hold(name, view) for view in _views(name, values))


def violated_conditions(name: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the reasons why a key has no effect.

    Args:
        name: the key.
        values: every key, and the modes of the command that are on.

    Yields:
        The setting that the key conflicts with, and the flag that would resolve the conflict (an
        empty string if there is none).
    """
    views = list(_views(name, values))
    if not views:
        yield "sources, none of which takes this key from the recipe", ""
        return
    for condition in FIELDS[name].metadata["effect"]:
        if not condition.holds(views[0]):
            yield condition.violation(views[0]), condition.fix()


def _conditions_hold(name: str, values: Mapping[str, Any]) -> bool:
    return all(condition.holds(values) for condition in FIELDS[name].metadata["effect"])


def _views(name: str, values: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Return the values of the recipe once for each data source that uses its value of ``name``.

    In each of them, the keys of the source override those of the recipe.
    """
    sources = values.get("sources")
    if not sources or name not in DATA_KEYS:
        return [values]
    if name in SOURCE_NAMES:
        return []
    views = []
    for source in sources:
        if name in SOURCE_RULES and name in source:
            continue
        views.append({**values, **dict.fromkeys(SOURCE_NAMES), **source})
    return views


def _without(values: RecipeValues, names: Collection[str]) -> RecipeValues:
    return {name: value for name, value in values.items() if name not in names}


def _path(value: Any) -> Any:
    """Return a path, or a list of paths, so that two paths of the same file are equal."""
    if isinstance(value, list):
        return [_path(item) for item in value]
    if not isinstance(value, str):
        return value
    try:
        path = paths.expand(value)
    except ValueError:  # reported when the recipe's paths are expanded
        return value
    return os.path.realpath(path) if os.path.lexists(path) else path


def _model_path(value: Any) -> Any:
    """Return the path of a model. A run folder means the model in it."""
    if isinstance(value, str):
        model_folder = f"{value}/{run_files.MODEL_FOLDER}"
        if os.path.isdir(model_folder):  # noqa: PTH112  (Path.is_dir raises if a name is too long)
            return _path(model_folder)
    return _path(value)
