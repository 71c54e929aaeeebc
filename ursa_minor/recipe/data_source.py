"""How flags replace parts of a recipe, and which keys then have an effect.

A data source on the command line replaces the recipe's whole data source, and ``--init_from`` replaces the recipe's
model and tokenizer. A key that flags make ineffective is dropped with a note.
"""

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ursa_minor.base import paths
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
    """Return the keys that name a data source. An empty list or text names none."""
    return [name for name in SOURCE_CHOICES if values.get(name)]


def several_sources(values: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield the error of a file, or of a command line, that names two data sources.

    Args:
        where: a prefix of the keys in the message: ``--`` for flags.
    """
    names = [f"{where}{name}" for name in stated_sources(values)]
    if len(names) > 1:
        yield f"{' and '.join(names)} are different data sources. A run has one; keep one of them"


def replace_source(file_values: RecipeValues, flag_values: Mapping[str, Any]) -> RecipeValues:
    """Return the file's values without its data source if the flags name another one.

    The keys that are dropped are logged. A flag that repeats the recipe's own source drops nothing.
    """
    flags = stated_sources(flag_values)
    if not flags:
        return file_values
    flag = flags[0]
    own_sources = stated_sources(file_values)
    repeats = own_sources == [flag] and _path(file_values[flag]) == _path(flag_values[flag])
    if not own_sources or repeats:
        return file_values
    dropped = [name for name in SOURCE_KEYS if file_values.get(name)]
    log.info(
        f"--{flag} replaces the recipe's data source; these keys of the recipe are ignored: {', '.join(dropped)}"
    )
    return _without(file_values, dropped)


def replace_model(file_values: RecipeValues, flag_values: Mapping[str, Any]) -> RecipeValues:
    """Return the file's values without its model and tokenizer if ``--init_from`` brings others.

    The keys that are dropped are logged.
    """
    model = flag_values.get("init_from")
    if not isinstance(model, str) or _model_path(model) == _model_path(
        file_values.get("init_from")
    ):
        return file_values
    dropped = [name for name in REPLACED_BY_INIT_FROM if name in file_values]
    stated = [name for name in dropped if file_values[name] is not None]
    if stated:
        log.info(
            f"--init_from brings its own model and tokenizer; these keys of the recipe are ignored: {', '.join(stated)}"
        )
    return _without(file_values, dropped)


def drop_ineffective(
    values: RecipeValues,
    file_values: Mapping[str, Any],
    original_values: Mapping[str, Any],
    flags: Collection[str],
    modes: Collection[str] = (),
) -> RecipeValues:
    """Return the values without the recipe's keys that only the flags make ineffective.

    Args:
        values: every key, with flags and defaults applied.
        file_values: the keys that remain of the recipe file after ``replace_source`` and ``replace_model``.
        original_values: the keys that the recipe file states.
        flags: the keys that the flags state.
        modes: the flags given that are not recipe keys.

    A dropped key gets its default. Without a default it is switched off, or keeps its value if it cannot be.
    """
    if not flags:
        return values
    defaults = {name: field.default for name, field in FIELDS.items()}
    without_flags = defaults | dict(original_values)
    with_modes = values | dict.fromkeys(modes, True)
    result = dict(values)
    dropped = []
    for name in FIELDS:
        if name in flags or name not in file_values or is_off(name, values[name]):
            continue
        if has_effect(name, with_modes) or not has_effect(name, without_flags):
            continue
        dropped.append(name)
        result[name] = _value_when_dropped(name, values[name])
    if dropped:
        log.info(
            "With these flags, keys of the recipe have no effect and are ignored: "
            + ", ".join(dropped)
        )
    return result


def _value_when_dropped(name: str, value: Any) -> Any:
    field = FIELDS[name]
    if field.default is not ABSENT:
        return field.default
    off_values = [off for off in field.metadata["off"] if off is not None]
    return off_values[0] if off_values else value


def is_off(name: str, value: Any) -> bool:
    """Return whether a value switches its key off, so that it does no harm where the key has no effect."""
    return value == [] or value in FIELDS[name].metadata["off"]


def has_effect(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether a key has an effect on a run with these values (of every key, and the modes of the command)."""
    return any(_conditions_hold(name, view) for view in _views(name, values))


def violated_conditions(name: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a key without effect is in conflict with, and the flag that would give it one (maybe empty)."""
    views = list(_views(name, values))
    if not views:
        yield "sources: no source of the mixture takes it from the recipe", ""
        return
    for condition in FIELDS[name].metadata["effect"]:
        if not condition.holds(views[0]):
            yield condition.violation(views[0]), condition.fix()


def _conditions_hold(name: str, values: Mapping[str, Any]) -> bool:
    return all(condition.holds(values) for condition in FIELDS[name].metadata["effect"])


def _views(name: str, values: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Return the values as each source of the run sees them that takes ``name`` from the recipe."""
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
    """Return a path, or a list of them, in a form in which relative and absolute paths are equal."""
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
    """Return the path of a model. A run folder stands for the model in it."""
    if isinstance(value, str) and os.path.isdir(f"{value}/model"):  # noqa: PTH112  (Path raises for long names)
        return _path(f"{value}/model")
    return _path(value)
