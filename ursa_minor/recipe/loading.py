"""A recipe file and flags become a Recipe, checked as a whole before anything is written. No torch: --help is instant."""

import logging
import math
import os
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ursa_minor.base import paths, run_files, wording
from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import did_you_mean, shorten
from ursa_minor.recipe import data_source, other_flags, places, rules, sizes
from ursa_minor.recipe.keys import (
    ABSENT,
    FIELDS,
    KEY_TYPES,
    MODEL_KEYS,
    OPTIONAL_KEYS,
    Recipe,
    from_dict,
    hyperparameters,
)

log = logging.getLogger(__name__)

SECRET = re.compile(r"token$|secret|password|api_?key", re.IGNORECASE)
DEFAULT_RECIPE = "recipes/gpt2_124m.yaml"


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice; PyYAML keeps the last one silently."""

    def construct_mapping(self, node, deep=False):
        seen: dict[str, yaml.Node] = {}
        for name, _ in node.value:
            if (first := seen.setdefault(str(name.value), name)) is not name:
                twice = f"{name.value} is given twice (first in line {first.start_mark.line + 1}); keep one of them"
                raise yaml.MarkedYAMLError(problem=twice, problem_mark=name.start_mark)
        return super().construct_mapping(node, deep)


def _with_numbers(values: dict[Any, Any]) -> dict[Any, Any]:
    """Convert the text of numbers to numbers, also in the sources of a mixture."""
    names = {"weight"} | {name for name, kind in KEY_TYPES.items() if kind in (int, float)}
    converted = {
        name: rules.number_of(value) if name in names else value for name, value in values.items()
    }
    if isinstance(converted.get("sources"), list):
        converted["sources"] = [
            _with_numbers(source) if isinstance(source, dict) else source
            for source in converted["sources"]
        ]
    return converted


def load_recipe(
    path: Path, flags: Mapping[str, Any] | None = None, modes: Collection[str] = ()
) -> Recipe:
    """Read a recipe file, apply the flags, and check the result.

    Args:
        path: the recipe file.
        flags: keys and their values as typed on the command line. They win over the file. ``size`` is replaced by
            the keys that it changes (``sizes.change``).
        modes: the flags given that are not recipe keys (``TRAIN_MODES``). Some keys have an effect only with them.

    Raises:
        BadInput: with every error that was found. Each names the file or flag, the problem and a fix.
    """
    flags = flags or {}
    stated = _with_numbers(read_file(path))
    flags, size_flags, size_note = _expand_size(stated, flags)
    flag_values = {name: rules.from_text(text, name) for name, text in flags.items()}
    several = [
        *data_source.several_sources(stated, where=""),
        *data_source.several_sources(flag_values, where="--"),
    ]
    file_values = stated if several else data_source.replace_source(stated, flag_values)
    file_values = data_source.replace_model(file_values, flag_values)
    values, problems = places.expand(file_values | flag_values)
    if path.name == run_files.RECIPE:
        values = places.follow_run_folder(values, stated, flags, path.parent)
    _begin_from_model(values)
    problems += [unknown_name(str(name), FIELDS) for name in values if name not in FIELDS]
    for name, field in FIELDS.items():
        needed = field.default is ABSENT and not (values.get("init_from") and name in MODEL_KEYS)
        if needed and (name not in values or (values[name] is None and name in OPTIONAL_KEYS)):
            problems.append(
                f"{name} is missing: {field.metadata['help']}. It has no default; state it"
            )
        elif name in values and (rule := _broken_rule(name, values)):
            problems.append(f"{name} = {shorten(values[name])}: {rule}")
    if not problems:
        problems += several
        problems += rules.source_problems(values.get("sources"))
    if not problems:
        values = {name: values.get(name, field.default) for name, field in FIELDS.items()}
        values = data_source.drop_ineffective(values, file_values, stated, flags, modes)
        values |= {
            name: float(values[name])
            for name in values
            if KEY_TYPES[name] is float and values[name] is not None
        }
        values["run_name"] = path.stem if values["run_name"] is None else values["run_name"]
        values["output_dir"] = values["output_dir"] or f"runs/{values['run_name']}"
        if size_note:
            log.info(size_note)
        _settle_warmup(values)
        if path.name != run_files.RECIPE:  # said as the run began
            _advise(values)
        problems += rules.recipe_problems(values)
        problems += rules.ineffective_flags(values | dict.fromkeys(modes, True), flags)
    if problems:
        raise BadInput(_blamed(path, problem, flags, size_flags) for problem in problems)
    return from_dict(values)


class _Expanded(NamedTuple):
    """Flags in which ``--size`` is replaced by the keys that it sets.

    Attributes:
        size_flags: the keys that ``--size`` has set, each with this flag as it was typed.
        note: one line about these keys for the header of a run.
    """

    flags: dict[str, Any]
    size_flags: dict[str, str]
    note: str


def _expand_size(values: dict[str, Any], flags: Mapping[str, Any]) -> _Expanded:
    """Replace ``size`` in the flags by the keys that it sets, with their values as text."""
    other_flags = dict(flags)
    size = other_flags.pop("size", None)
    if size is None:
        return _Expanded(other_flags, {}, "")
    change = sizes.change(size, values, other_flags)
    settings = {name: str(value) for name, value in change.settings.items()}
    return _Expanded(other_flags | settings, dict.fromkeys(settings, f"--size {size}"), change.note)


def _broken_rule(name: str, values: Mapping[str, Any]) -> str | None:
    """Return the rule that a key's value breaks; None if it breaks none."""
    fraction_error = rules.fraction_error(name, values[name], values.get("max_steps"))
    return fraction_error or rules.key_problem(name, values[name])


def unknown_name(name: str, known: Collection[str], dashes: str = "") -> str:
    """Return the error message for an unknown recipe key, or for an unknown flag. A secret is not repeated.

    Args:
        known: the recipe keys, or the flags without dashes.
        dashes: ``--`` for a flag.
    """
    if SECRET.search(name):
        return f"{name}: no such key; secrets come from the environment or a login only"
    message = other_flags.suggestion(name, known, dashes)
    if message:
        return message
    kind = "flag" if dashes else "key"
    return f"{name}: no such {kind}{did_you_mean(name.lstrip('-'), known, dashes)}"


def _settle_warmup(values: dict[str, Any]) -> None:
    """Shorten a warm-up that is longer than the run."""
    warmup_steps, steps = values["warmup_steps"], values["max_steps"]
    if warmup_steps > steps:
        values["warmup_steps"] = quarter = max(1, steps // 4)
        log.info(
            f"warmup_steps = {warmup_steps} is longer than the run, max_steps = {steps}: shortened to a quarter, {quarter}"
        )


def _advise(values: Mapping[str, Any]) -> None:
    """Log what is allowed and seldom meant."""
    warmup, steps, evaluations = values["warmup_steps"], values["max_steps"], values["eval_steps"]
    tenth = math.ceil(steps / 10)
    if 2 * warmup >= steps > 1 and warmup != tenth:
        usual = f"a tenth is usual: --warmup_steps {tenth}"
        log.info(f"warmup_steps = {warmup} is at least half of max_steps = {steps}; {usual}")
    if 20 <= steps < 2 * evaluations:  # a shorter run is a trial
        few = "the curve of the validation loss has few points"
        log.info(
            f"eval_steps = {evaluations}, max_steps = {steps}: {few}; for ten: --eval_steps {steps // 10}"
        )


def _blamed(
    path: Path, problem: str, flags: Mapping[str, Any], size_flags: Mapping[str, str]
) -> str:
    """Return an error message with its source in front: the flags that it names, else the file.

    Args:
        size_flags: the keys that ``--size`` has set, each with this flag as it was typed.
    """
    named = {}
    for name, value in flags.items():
        if re.search(rf"\b{name} = ", problem):
            named[name] = size_flags.get(name) or f"--{name} {shorten(value)}"
    key = problem.partition(" = ")[0]
    if [*named] == [key] and key not in size_flags:  # the flag repeats the key and its value
        problem = problem.partition(": ")[2]
    source = ", ".join(dict.fromkeys(named.values())) or path
    return f"{source}: {problem}"


def check_same_hyperparameters(where: Path, before: dict[str, Any], recipe: Recipe) -> None:
    """Raise BadInput with each key whose value is not the one that a run began with.

    Args:
        where: the run's folder or checkpoint, for the message.
        before: the fixed keys and their values as the run has stored them.
        recipe: the recipe to continue with.
    """
    now = hyperparameters(recipe)
    if before.keys() != now.keys():
        names = ", ".join(sorted(before.keys() ^ now.keys()))
        raise BadInput(
            f"{where} was written by another version of Ursa Minor, whose recipes have other keys ({names}). "
            f"Continue it with that version, or give another {recipe.saving.option_of_another_run}"
        )
    changed = [name for name in now if before[name] != now[name]]
    if changed:
        raise BadInput(
            f"{where}: {name} = {shorten(before[name])}, asked for {shorten(now[name])}: fixed for a run. "
            f"{_way_on(name, before, now[name], recipe)}"
            for name in changed
        )


def _way_on(name: str, then: Mapping[str, Any], now: Any, recipe: Recipe) -> str:
    """Return what to do about a key that is fixed; a finished run is trained longer by another command."""
    run = recipe.saving.run_dir
    if (
        name != "max_steps"
        or now <= (then[name] or now)
        or not (run / run_files.MODEL_FOLDER).is_dir()
    ):
        return f"Give another {recipe.saving.option_of_another_run}, or set it back"
    command = f"python train.py --recipe {paths.quoted(run / run_files.RECIPE)}"
    finish = run_files.read_finish(run)
    length = then[name]
    if finish and not finish.stopped_early:
        length = finish.step  # max_hours may have planned another one
    more = now - length
    has_checkpoint = any(
        run_files.STEP.fullmatch(path.name) for path in recipe.saving.checkpoints.glob("step-*")
    )
    if has_checkpoint and then["lr_scheduler_type"] in ("wsd", "constant"):
        if finish and finish.stopped_early:
            return (
                f"Early stopping ended it at step {finish.step}. "
                f"To train it to step {now}: {command} --extend_steps {more} --early_stopping_patience 0"
            )
        return f"To train it on: {command} --extend_steps {more}"

    if finish and finish.stopped_early:
        more = now - finish.step
        reason = f"Early stopping ended it at step {finish.step}. "
        if has_checkpoint:
            reason += (
                f"To continue it to step {then[name]}: {command} --early_stopping_patience 0. "
            )
    elif has_checkpoint or then["lr_scheduler_type"] not in ("wsd", "constant"):
        reason = "Its learning rate has ended. "
    else:
        reason = "It has no checkpoint to continue from. "
    new = (
        f"--init_from {paths.quoted(run)} --run_name {shlex.quote(f'{recipe.saving.name}-2')} "
        f"--output_dir {paths.quoted(f'{run}-2')}"
    )
    return f"{reason}A new run from its weights: {command} {new} --max_steps {more}"


def read_file(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file, unchecked. Raises BadInput where it is not a mapping."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        places = (str(path), f"recipes/{path.stem}.yaml")
        near = [
            wording.did_you_mean_file(place, lambda file: file.suffix == ".yaml")
            for place in places
        ]
        raise BadInput(f"{path}: no such recipe{near[0] or near[1]}") from None
    except (
        OSError,
        yaml.YAMLError,
        ValueError,
    ) as error:  # ValueError: an impossible date, another encoding
        where = str(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            where = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise BadInput(f"{path}: not a recipe: {where}") from None
    if values is None:
        raise BadInput(f"{path}: the recipe is empty")
    if not isinstance(values, dict):
        raise BadInput(
            f"{path}: a recipe is a mapping of `key: value` lines, this is {type(values).__name__}"
        )
    return values


def read_run_recipe(path: Path) -> dict[str, Any]:
    """Return the keys and values of a run folder's recipe. Raises BadInput as ``read_file`` does."""
    return _with_numbers(read_file(path))


def _begin_from_model(values: dict[str, Any]) -> None:
    """With init_from: name the model within a run folder, its tokenizer, and leave out what it brings along."""
    source = values.get("init_from")
    if not isinstance(source, str):
        values["architecture"] = values.get("architecture") or FIELDS["architecture"].default
        return
    model_folder = f"{source}/{run_files.MODEL_FOLDER}"
    if os.path.isdir(model_folder):  # noqa: PTH112  (of a name that is too long Path's own raises)
        source = values["init_from"] = str(Path(model_folder))
    values.setdefault("tokenizer", source)
    for name in MODEL_KEYS:
        values.setdefault(name, None)
