"""Load a recipe: read its file, apply the flags, and check the result before anything is written.

Nothing here imports torch, so that ``--help`` and errors appear immediately.
"""

import logging
import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ursa_minor.base import checkpoint_files, paths, run_files, wording
from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import did_you_mean, shorten
from ursa_minor.recipe import data_source, kept_steps, other_flags, places, rules, sizes
from ursa_minor.recipe.keys import (
    ABSENT,
    FIELDS,
    KEY_TYPES,
    MODEL_KEYS,
    MOST_STEPS,
    OPTIONAL_KEYS,
    Recipe,
    from_dict,
    hyperparameters,
    replace,
    to_dict,
)

log = logging.getLogger(__name__)

SECRET = re.compile(r"token$|secret|password|api_?key", re.IGNORECASE)
DEFAULT_RECIPE = "recipes/gpt2_124m.yaml"
NUMBER_KEYS = {name for name, value_type in KEY_TYPES.items() if value_type in (int, float)}
# Schedules whose runs --extend_steps can continue.
EXTENDABLE_SCHEDULES = ("wsd", "constant")


class _Loader(yaml.SafeLoader):
    """A SafeLoader that rejects repeated keys, of which PyYAML silently keeps the last one."""

    def construct_mapping(self, node, deep=False):
        first_nodes: dict[str, yaml.Node] = {}
        for key_node, _ in node.value:
            first_node = first_nodes.setdefault(str(key_node.value), key_node)
            if first_node is not key_node:
                first_line = first_node.start_mark.line + 1
                raise yaml.MarkedYAMLError(
                    problem=f"{key_node.value} is given twice (first in line {first_line}). "
                    "Keep one of them",
                    problem_mark=key_node.start_mark,
                )
        return super().construct_mapping(node, deep)


def load_recipe(
    path: Path,
    flags: Mapping[str, Any] | None = None,
    modes: Collection[str] = (),
    *,
    needs_length: bool = True,
) -> Recipe:
    """Read a recipe file, apply the flags, and check the result.

    Args:
        path: the recipe file.
        flags: keys and their values as typed on the command line. They take precedence over the
            file. ``size`` is replaced by the keys that it sets (``sizes.change``).
        modes: the options on the command line that are not recipe keys (``TRAIN_MODES``). Some keys
            have an effect only with them.
        needs_length: whether the length of the run must be known before training. Preparing data
            does not need it.

    Raises:
        BadInput: with every error that was found. Each message names the file or the flag, the
            problem and a fix.
    """
    is_of_run_folder = path.name == run_files.RECIPE
    stated = _with_numbers(read_file(path))
    length_flags = _length_flags(flags or {})
    length_conflicts = [
        *rules.several_lengths(stated, where=""),
        *rules.several_lengths(length_flags, where="--"),
    ]
    if not length_conflicts:
        stated = data_source.replace_length(stated, length_flags)
    expanded = _expand_size(stated, flags or {})
    flag_values = {name: rules.from_text(text, name) for name, text in expanded.flags.items()}

    # Apply the flags. Some replace more than their own key.
    source_conflicts = [
        *data_source.several_sources(stated, where=""),
        *data_source.several_sources(flag_values, where="--"),
    ]
    file_values = stated
    if not source_conflicts:
        file_values = data_source.replace_source(file_values, flag_values)
    file_values = data_source.replace_model(file_values, flag_values)
    values, problems = places.expand(file_values | flag_values)
    if is_of_run_folder:
        values = places.follow_run_folder(values, stated, expanded.flags, path.parent)
    _apply_init_from(values)

    # Check each key. Combinations are checked only if every key is valid.
    problems += _problems_of_keys(values)
    if not problems:
        problems += length_conflicts
        problems += source_conflicts
        problems += rules.source_problems(values.get("sources"))
    if not problems:
        values.setdefault("max_steps", None)  # num_train_epochs is stated
        values = {name: values.get(name, field.default) for name, field in FIELDS.items()}
        values = data_source.drop_ineffective(values, file_values, stated, expanded.flags, modes)
        _convert_to_floats(values)
        _name_run(values, path)
        if expanded.note:
            log.info(expanded.note)
        if values["max_steps"] is not None:
            _apply_length(values, logs_advice=not is_of_run_folder)
        problems += rules.recipe_problems(values)
        if needs_length:
            problems += rules.epoch_problems(values)
        with_modes = values | dict.fromkeys(modes, True)
        problems += rules.ineffective_flags(with_modes, expanded.flags)
    if problems:
        raise BadInput(_with_origin(problem, path, expanded) for problem in problems)
    return from_dict(values)


def with_max_steps(recipe: Recipe, max_steps: int, *, logs_advice: bool) -> Recipe:
    """Return a recipe with the ``max_steps`` that were computed from its ``num_train_epochs``.

    The rules about ``max_steps`` that ``load_recipe`` applies are applied now.

    Args:
        recipe: a loaded recipe that states ``num_train_epochs``.
        max_steps: total number of updates.
        logs_advice: whether to log settings that are valid but rarely intended.

    Raises:
        BadInput: the schedule does not fit into this number of updates.
    """
    values = to_dict(recipe) | {"max_steps": max_steps}
    setting = f"num_train_epochs = {recipe.schedule.num_train_epochs:g}"
    if max_steps > MOST_STEPS:
        raise BadInput(
            f"{setting} are {max_steps:,} steps, but a run has at most {MOST_STEPS:,}. Use a "
            f"smaller number"
        )
    _apply_length(values, logs_advice=logs_advice)
    completed = from_dict(values)
    problems = list(rules.length_problems(completed.schedule))
    if problems:
        raise BadInput(f"{setting} is max_steps = {max_steps}. {problem}" for problem in problems)
    return completed


def _apply_length(values: dict[str, Any], *, logs_advice: bool) -> None:
    """Apply what follows from ``max_steps``, in place.

    Args:
        values: every key.
        logs_advice: whether to log settings that are valid but rarely intended.
    """
    _shorten_warmup(values)
    if logs_advice:
        _log_advice(values)


def _length_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that state the length of the run, without those whose value is none."""
    values = {}
    for name in rules.LENGTH_KEYS:
        if name in flags:
            values[name] = rules.from_text(flags[name], name)
    return {name: value for name, value in values.items() if value is not None}


def _with_numbers(values: dict[Any, Any]) -> dict[Any, Any]:
    """Convert strings that are numbers to numbers, also in the sources of a mixture.

    The numbers in keep_checkpoints, whose items are texts such as 10M, become texts.
    """
    converted = {}
    for name, value in values.items():
        is_number = name == "weight" or name in NUMBER_KEYS
        converted[name] = rules.number_of(value) if is_number else value
    if "keep_checkpoints" in converted:
        converted["keep_checkpoints"] = kept_steps.as_texts(converted["keep_checkpoints"])
    sources = converted.get("sources")
    if isinstance(sources, list):
        converted["sources"] = [
            _with_numbers(source) if isinstance(source, dict) else source for source in sources
        ]
    return converted


class _ExpandedFlags(NamedTuple):
    """Flags in which ``--size`` is replaced by the keys that it sets.

    Attributes:
        flags: keys and their values as text.
        size_flags: the keys that ``--size`` has set. The value of each is this flag as typed.
        note: one line about these keys for the header of a run, or an empty string.
    """

    flags: dict[str, Any]
    size_flags: dict[str, str]
    note: str


def _expand_size(values: dict[str, Any], flags: Mapping[str, Any]) -> _ExpandedFlags:
    """Replace ``size`` in the flags by the keys that it sets.

    Args:
        values: keys and values of the recipe file.
        flags: keys and their values as typed.
    """
    other_flags = dict(flags)
    size = other_flags.pop("size", None)
    if size is None:
        return _ExpandedFlags(other_flags, {}, "")
    change = sizes.change(size, values, other_flags)
    settings = {name: str(value) for name, value in change.settings.items()}
    size_flags = dict.fromkeys(settings, f"--size {size}")
    return _ExpandedFlags(other_flags | settings, size_flags, change.note)


def _apply_init_from(values: dict[str, Any]) -> None:
    """Complete the keys of the model in place.

    With init_from, the tokenizer defaults to that of the model, and keys that the model determines
    default to None.
    """
    source = values.get("init_from")
    if not isinstance(source, str):
        values["architecture"] = values.get("architecture") or FIELDS["architecture"].default
        return
    values.setdefault("tokenizer", source)
    for name in MODEL_KEYS:
        values.setdefault(name, None)


def _problems_of_keys(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors of unknown keys, of missing keys, and of values that a key cannot have."""
    for name in values:
        if name not in FIELDS:
            yield unknown_name(str(name), FIELDS)
    for name, field in FIELDS.items():
        if _is_missing(name, values):
            yield (
                f"{name} is missing and has no default. "
                f"Add it to the recipe, or set it with --{name}: {field.metadata['help']}"
            )
        elif name in values:
            value = values[name]
            problem = rules.fraction_error(name, value, values.get("max_steps"))
            problem = problem or rules.key_problem(name, value)
            if problem:
                yield f"{name} = {shorten(value)}: {problem}"


def _is_missing(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether a key without a default has no value."""
    is_loaded = bool(values.get("init_from")) and name in MODEL_KEYS
    if name == "max_steps" and values.get("num_train_epochs") is not None:
        return False
    if FIELDS[name].default is not ABSENT or is_loaded:
        return False
    if name not in values:
        return True
    return values[name] is None and name in OPTIONAL_KEYS


def _convert_to_floats(values: dict[str, Any]) -> None:
    """Convert integers to floats, in place, where the key is a float."""
    for name, value in values.items():
        if KEY_TYPES[name] is float and value is not None:
            values[name] = float(value)


def _name_run(values: dict[str, Any], path: Path) -> None:
    """Set the defaults of run_name and output_dir in place."""
    if values["run_name"] is None:
        values["run_name"] = path.stem
    if not values["output_dir"]:
        values["output_dir"] = f"runs/{values['run_name']}"


def _shorten_warmup(values: dict[str, Any]) -> None:
    """Shorten a warm-up that is longer than the run, in place."""
    warmup_steps = values["warmup_steps"]
    max_steps = values["max_steps"]
    if warmup_steps > max_steps:
        quarter = max(1, max_steps // 4)
        values["warmup_steps"] = quarter
        log.info(
            f"warmup_steps = {warmup_steps} exceeds max_steps = {max_steps}. "
            f"A quarter of max_steps is used instead: warmup_steps = {quarter}"
        )


def _log_advice(values: Mapping[str, Any]) -> None:
    """Log values that are valid but rarely intended."""
    warmup_steps = values["warmup_steps"]
    max_steps = values["max_steps"]
    eval_steps = values["eval_steps"]
    tenth = math.ceil(max_steps / 10)
    if 2 * warmup_steps >= max_steps > 1 and warmup_steps != tenth:
        log.info(
            f"warmup_steps = {warmup_steps} is at least half of max_steps = {max_steps}. "
            f"A tenth is usual: --warmup_steps {tenth}"
        )
    if 20 <= max_steps < 2 * eval_steps:  # a shorter run is a trial
        log.info(
            f"With eval_steps = {eval_steps} and max_steps = {max_steps}, the curve of the "
            f"validation loss has few points. For ten points use --eval_steps {max_steps // 10}"
        )


def _with_origin(problem: str, path: Path, expanded: _ExpandedFlags) -> str:
    """Return an error message that begins with the flags that it is about, or else with the file.

    Args:
        problem: the message. It names keys as in ``max_steps = 5``, or it begins with flags.
        path: the recipe file.
        expanded: the flags of the command line.
    """
    if problem.startswith("--"):
        return problem
    flags_in_problem = {}
    for name, value in expanded.flags.items():
        if re.search(rf"\b{name} = ", problem):
            typed = f"--{name} {shorten(value)}"
            flags_in_problem[name] = expanded.size_flags.get(name, typed)
    if not flags_in_problem:
        return f"{path}: {problem}"

    key, _, _ = problem.partition(" = ")
    is_about_one_flag = list(flags_in_problem) == [key] and key not in expanded.size_flags
    if is_about_one_flag:
        # The flag repeats "key = value: ", with which the message begins.
        _, _, problem = problem.partition(": ")
    # One --size sets several keys, so it may occur several times. It is named once.
    typed_flags = dict.fromkeys(flags_in_problem.values())
    return f"{', '.join(typed_flags)}: {problem}"


def unknown_name(name: str, known: Collection[str], dashes: str = "") -> str:
    """Return the error message for an unknown recipe key or an unknown flag.

    Args:
        name: the key or the flag. If it names a secret, the message does not repeat the value.
        known: the recipe keys, or the flags without dashes.
        dashes: ``--`` for a flag.
    """
    kind = "flag" if dashes else "key"
    if SECRET.search(name):
        return (
            f"{name}: no such {kind}. "
            "Secrets are read only from environment variables or from a saved login"
        )
    message = other_flags.suggestion(name, known, dashes)
    if message:
        return message
    return f"{name}: no such {kind}{did_you_mean(name.lstrip('-'), known, dashes)}"


def check_same_hyperparameters(where: Path, before: dict[str, Any], recipe: Recipe) -> None:
    """Check that the hyperparameters are those that a run was started with.

    The length of the run and its warm-up are not compared while one of the lengths is not known,
    because ``max_steps`` have not been computed from ``num_train_epochs``.

    Args:
        where: the run folder or the checkpoint, for the message.
        before: the hyperparameters that the run has stored.
        recipe: the recipe to continue with.

    Raises:
        BadInput: with each hyperparameter that differs, and how to proceed.
    """
    now = hyperparameters(recipe)
    if before.keys() != now.keys():
        names = ", ".join(sorted(before.keys() ^ now.keys()))
        raise BadInput(
            f"{where} was written by another version of Ursa Minor, whose recipes have other keys "
            f"({names}). Continue it with that version, or use another "
            f"{recipe.saving.option_of_another_run}"
        )
    problems = []
    is_length_known = None not in (before["max_steps"], now["max_steps"])
    for name, value in now.items():
        if name in ("max_steps", "warmup_steps") and not is_length_known:
            continue
        if before[name] != value:
            problems.append(
                f"{where}: {name} is fixed for a run. This run has {name} = "
                f"{shorten(before[name])}, but the command has {name} = {shorten(value)}"
                f"{_source_of_length(name, before, recipe)}. "
                f"{_fix_of_changed_key(where, name, before, recipe)}"
            )
    if problems:
        raise BadInput(problems)


def _fix_of_changed_key(where: Path, name: str, before: Mapping[str, Any], recipe: Recipe) -> str:
    """Return what to do about a hyperparameter that differs from that of the run.

    Args:
        where: the recipe in the run folder, or the checkpoint.
        name: the key.
        before: the hyperparameters that the run has stored.
        recipe: the recipe to continue with.
    """
    is_longer = name == "max_steps" and recipe.schedule.total_steps > before["max_steps"]
    is_finished = (recipe.saving.run_dir / run_files.MODEL_FOLDER).is_dir()
    if is_longer and is_finished:
        return _how_to_train_longer(before, recipe.schedule.total_steps, recipe)
    fix = f"set {name} back"
    if _source_of_length(name, before, recipe):
        fix = f"state the length of the run as {_stated_length(where, before)}"
    return f"Use another {recipe.saving.option_of_another_run}, or {fix}"


def _stated_length(where: Path, before: Mapping[str, Any]) -> str:
    """Return the option that states the length of a run, in epochs if its recipe does so.

    Args:
        where: the recipe in the run folder, or a checkpoint, which contains only the steps.
        before: the hyperparameters that the run has stored.
    """
    epochs = None
    if where.name == run_files.RECIPE:
        epochs = read_run_recipe(where).get("num_train_epochs")
    if epochs is None:
        return f"--max_steps {before['max_steps']}"
    return f"--num_train_epochs {epochs:.15g}"


def _source_of_length(name: str, before: Mapping[str, Any], recipe: Recipe) -> str:
    """Return which epochs another number of steps was computed from, or an empty string."""
    schedule = recipe.schedule
    epochs = schedule.num_train_epochs
    has_other_length = before["max_steps"] != schedule.max_steps
    if name not in ("max_steps", "warmup_steps") or epochs is None or not has_other_length:
        return ""
    return f" (num_train_epochs = {epochs:g})"


def _how_to_train_longer(before: Mapping[str, Any], max_steps: int, recipe: Recipe) -> str:
    """Return the commands that train a finished run up to a larger number of steps."""
    run_dir = recipe.saving.run_dir
    command = f"python train.py --recipe {paths.quoted(run_dir / run_files.RECIPE)}"
    planned_steps = before["max_steps"]
    finish = run_files.read_finish(run_dir)
    has_checkpoint = bool(checkpoint_files.list_resume_points(recipe.saving.checkpoints))
    is_extendable = before["lr_scheduler_type"] in EXTENDABLE_SCHEDULES

    if finish and finish.stopped_early:
        reason = f"Early stopping ended it at step {finish.step}. "
        if has_checkpoint and is_extendable:
            more_steps = max_steps - planned_steps
            return (
                f"{reason}To train it to step {max_steps}: "
                f"{command} --extend_steps {more_steps} --early_stopping_patience 0"
            )
        if has_checkpoint:
            reason += (
                f"To continue it to step {planned_steps}: {command} --early_stopping_patience 0. "
            )
        return reason + _how_to_start_from(run_dir, command, max_steps - finish.step, recipe)

    # max_hours may have ended the run at another step than planned.
    last_step = finish.step if finish else planned_steps
    more_steps = max_steps - last_step
    if has_checkpoint and is_extendable:
        return f"To train it longer: {command} --extend_steps {more_steps}"
    if is_extendable:
        reason = "It has no checkpoint to continue from. "
    else:
        reason = "Its learning rate schedule has ended. "
    return reason + _how_to_start_from(run_dir, command, more_steps, recipe)


def _how_to_start_from(run_dir: Path, command: str, max_steps: int, recipe: Recipe) -> str:
    """Return the command that starts a new run from the weights of a finished one."""
    new_name = shlex.quote(f"{recipe.saving.name}-2")
    flags = f"--init_from {paths.quoted(run_dir)} --run_name {new_name} "
    if recipe.saving.option_of_another_run == "--output_dir":
        new_folder = paths.quoted(f"{run_dir}-2")
        flags += f"--output_dir {new_folder} "
    return f"To start a new run from its weights: {command} {flags}--max_steps {max_steps}"


def read_file(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file, unchecked.

    Raises:
        BadInput: the file cannot be read, or is not a mapping.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such recipe{_similar_recipe(path)}") from None
    # ValueError: a date that does not exist, or a file that is not UTF-8.
    except (OSError, yaml.YAMLError, ValueError) as error:
        reason = str(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            reason = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise BadInput(f"{path}: not a valid recipe: {reason}") from None
    if values is None:
        raise BadInput(f"{path}: the recipe is empty, but it must contain `key: value` lines")
    if not isinstance(values, dict):
        raise BadInput(
            f"{path}: a recipe is a mapping with `key: value` lines, but this file contains a "
            f"{type(values).__name__}"
        )
    return values


def _similar_recipe(path: Path) -> str:
    """Return a suggestion for a missing file: a similar name in its folder, or else in recipes/."""

    def is_yaml(file: Path) -> bool:
        return file.suffix == ".yaml"

    suggestion = wording.did_you_mean_file(str(path), is_yaml)
    return suggestion or wording.did_you_mean_file(f"recipes/{path.stem}.yaml", is_yaml)


def load_run_recipe(run_dir: Path) -> Recipe:
    """Return the recipe of a run folder, with the run's ``max_steps`` if they are known.

    Raises:
        BadInput: the recipe cannot be read or is not valid.
    """
    recipe = load_recipe(run_dir / run_files.RECIPE)
    if recipe.schedule.max_steps is None:
        max_steps = checkpoint_files.read_max_steps(run_dir)
        recipe = replace(recipe, max_steps=max_steps)
    return recipe


def read_run_recipe(path: Path) -> dict[str, Any]:
    """Return the keys and values of a run folder's recipe, with the run's ``max_steps``.

    ``max_steps`` is None if the recipe states ``num_train_epochs`` and the run has not stored the
    number of steps yet.

    Raises:
        BadInput: the file cannot be read, or is not a mapping.
    """
    values = _with_numbers(read_file(path))
    if values.get("num_train_epochs") is not None:
        values["max_steps"] = checkpoint_files.read_max_steps(path.parent)
    return values
