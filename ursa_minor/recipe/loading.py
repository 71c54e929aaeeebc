"""A recipe file and flags become a Recipe, checked as a whole before anything is written. No torch: --help is instant."""

import argparse
import dataclasses
import itertools
import logging
import math
import os
import re
import shlex
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ursa_minor.base import paths, run_files, wording
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput
from ursa_minor.base.launch import refuse_incomplete_launch
from ursa_minor.base.wording import nearest, shown
from ursa_minor.recipe import data_source, other_flags, places, rules, sizes
from ursa_minor.recipe.keys import (
    ABSENT,
    AUTO,
    FIELDS,
    MODEL_KEYS,
    OPTIONAL,
    SLICES,
    TYPES,
    Recipe,
    deal,
    fixed,
)

log = logging.getLogger(__name__)

# A value, where argparse before Python 3.14 takes -1e-3 for a flag.
NEGATIVE = re.compile(r"-(\.?[0-9].*|inf(inity)?|nan)$", re.IGNORECASE)
SECRET = re.compile(r"token$|secret|password|api_?key", re.IGNORECASE)
RECIPE = "recipes/gpt2_124m.yaml"  # where none is given
RUN_RECIPE = "recipe.yaml"  # the name of a run folder's
METAVARS = {int: "N", float: "X", bool: "true|false"}
USUAL = ["data_files", "dataset_name", "data_dir", "run_name", "max_steps", "max_hours", "learning_rate", "optimizer"]
USUAL += ["per_device_train_batch_size"]


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
    """Return keys with those values as numbers that are to be numbers, in a mixture's sources too."""
    numbers = {"weight"} | {name for name, wanted in TYPES.items() if wanted in (int, float)}
    found = {name: rules.number_of(value) if name in numbers else value for name, value in values.items()}
    if isinstance(found.get("sources"), list):
        found["sources"] = [_with_numbers(each) if isinstance(each, dict) else each for each in found["sources"]]
    return found


PROFILE_UPDATES = 13  # what --profile takes: the first ones are left out (ursa_minor/reporting/profiler.py)
# Flags of train.py that are not recipe keys, as read_flags takes them.
TRAIN_MODES = {
    "eval_only": (bool, "score the newest checkpoint (or init_from): validation split, tasks; then stop"),
    "profile": (bool, "record a few updates, the main process's, into profile/ of the run folder"),
    "extend_steps": (int, "train a finished wsd run so many steps longer, from before its decay phase, as another run"),
    "push_pending": (str, "send what waits in this run folder's hub/ to the Hub; then stop"),
}


@exit_on_bad_input
def refuse_at_once(argv: Sequence[str]) -> None:
    """Answer ``--help``, and a command of train.py that its flags, recipe or launch make wrong; needs no torch.

    Returns the exit status, 0 where the command may continue.
    """
    parse_training(argv)
    refuse_incomplete_launch(os.environ)


def parse_training(argv: Sequence[str]) -> tuple[Recipe | None, dict[str, Any], list[str]]:
    """Read the command line of train.py.

    Returns: the recipe, None with push_pending, which needs none; the modes given; and the argv by which another script
    reads the same recipe. Raises BadInput with every fault found.
    """
    flags, modes = read_flags(argv, "Pre-train GPT-2 from a recipe.", TRAIN_MODES)
    if "push_pending" in modes:
        if flags or len(modes) > 1:
            raise BadInput(f"--push_pending {modes['push_pending']}: stands alone; leave the other flags out")
        modes["push_pending"] = expand_option("push_pending", modes["push_pending"])
        return None, modes, []
    reader_argv = argv_of(flags)
    recipe_file = find_recipe(flags.pop("recipe", RECIPE))
    if "extend_steps" in modes:
        _refuse_name_of_extension(recipe_file, flags)
    recipe = load_recipe(recipe_file, flags, modes)
    if "extend_steps" in modes and "max_hours" in flags and recipe.schedule.max_hours:
        raise BadInput("--max_hours has no effect with --extend_steps, which states the length. Leave it out")
    max_steps = recipe.schedule.max_steps
    if "profile" in modes and "extend_steps" not in modes and max_steps < PROFILE_UPDATES:
        raise BadInput(
            f"--profile: max_steps = {max_steps}, and a profile takes {PROFILE_UPDATES} updates; use --max_steps "
            f"{PROFILE_UPDATES} or more, or leave out --profile"
        )
    return recipe, modes, reader_argv


def find_recipe(typed: str, option: str = "recipe") -> Path:
    """Return the recipe file that an option names, in the current folder or else in the repository.

    Raises BadInput where the path cannot be expanded. Whether there is such a file is not checked.
    """
    return paths.find_from_anywhere(Path(expand_option(option, typed)))


def expand_option(option: str, path: str) -> str:
    """Return the path of a command-line option expanded; raises BadInput where it cannot be."""
    try:
        return paths.expand(path)
    except ValueError as error:
        raise BadInput(f"--{option} {path}: {error}") from None


def _refuse_name_of_extension(recipe_file: Path, flags: Mapping[str, Any]) -> None:
    """Raise BadInput where --extend_steps gets a run's recipe.yaml and a name or folder for the extended run."""
    options = [f"--{name}" for name in ("run_name", "output_dir") if name in flags]
    if recipe_file.name == RUN_RECIPE and options:
        raise BadInput(
            f"--extend_steps: extends the run in {recipe_file.parent} and names the new run after its length; "
            f"leave {' and '.join(options)} out"
        )


def argv_of(flags: Mapping[str, str | list[str]]) -> list[str]:
    """Return the argv that gives these flags, whatever their values are."""
    argv = []
    for name, value in flags.items():
        texts = [value] if isinstance(value, str) else value
        argv += [f"--{name}={texts[0]}"] if len(texts) == 1 else [f"--{name}", *texts]
    return argv


def read_flags(
    argv: Sequence[str], description: str, extras: Mapping[str, tuple[type, str]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read ``--recipe FILE --key value ...``.

    Args:
        argv: what stands after the script's name.
        description: first line of ``--help``.
        extras: flags that are not recipe keys: type (bool: the value may be left out) and help.

    Returns:
        The flags of the recipe, ``recipe`` (the file) and ``size``, as typed; and the extras that were
        given, without booleans that are false.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--recipe FILE] [--key value ...]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    usual = parser.add_argument_group("usual")
    usual.add_argument("--recipe", metavar="FILE", help=f"default: {RECIPE}")
    for name in USUAL:
        _add_flag(usual, name)
    size_names = "|".join(sizes.names_of(sizes.GPT2_SIZES))
    size_help = "shape of this GPT-2; AdamW recipes also get its learning rate and batch (docs/knobs.md)"
    usual.add_argument("--size", metavar=size_names, help=size_help)
    modes = parser.add_argument_group("instead, or beside")  # not shown where it is empty
    for name, (wanted, help) in extras.items():
        add_option(modes, name, wanted, help)
    for title, part in SLICES.items():
        group = parser.add_argument_group(title, part.__doc__)
        for field in dataclasses.fields(part):
            if field.name not in USUAL and TYPES[field.name] != list[dict]:  # mappings do not fit into a flag
                _add_flag(group, field.name)
    flags = vars(parse_flags(parser, argv))
    if "size" in flags:
        sizes.check(flags["size"], flags)
    modes_given = {}
    for name in extras:
        value = flags.pop(name, False)
        if value is not False:
            modes_given[name] = value
    return flags, modes_given


def add_option(
    group: argparse._ActionsContainer,
    name: str,
    wanted: type,
    help: str,
    metavar: str = "",
) -> None:
    """Add a flag that is not a recipe key.

    Args:
        wanted: type of its value. A bool may be given without a value.
        metavar: name of the value in ``--help``.
    """
    if wanted is bool:
        add_switch(group, f"--{name}", help)
        return
    convert: Callable[[str], Any] = wanted
    if wanted is int and name.endswith("_steps"):
        convert = number_of_steps
    metavar = metavar or METAVARS.get(wanted, "TEXT")
    group.add_argument(f"--{name}", help=help, type=convert, metavar=metavar)


def add_switch(group: argparse._ActionsContainer, flag: str, help: str) -> None:
    """Add a boolean flag: true if it is given without a value, false if it is not given."""
    group.add_argument(
        flag,
        help=help,
        nargs="?",
        const=True,
        default=False,
        type=_boolean,
        metavar="true|false",
    )


def _boolean(text: str) -> bool:
    """Convert the value of a switch (a type of argparse)."""
    value = rules.boolean_of(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"must be true or false, not {wording.shown(text)!r}")
    return value


def number_of_steps(text: str) -> int:
    """Convert a number of steps (a type of argparse)."""
    if rules.fraction_of_steps("_steps", text) is not None:
        raise argparse.ArgumentTypeError(f"{text}: {rules.FRACTION_RULE}")
    number = rules.number_of(text)
    try:
        return number if isinstance(number, int) else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be an integer") from None


def _add_flag(group: argparse._ArgumentGroup, name: str) -> None:
    field, wanted = FIELDS[name], TYPES[name]
    about, choices = field.metadata, () if wanted in (int, float) else field.metadata["allowed"]
    words = "|".join(choices[: wording.MANY]) or METAVARS.get(wanted, "TEXT") + "|auto" * (name in AUTO)
    default = "" if field.default is ABSENT else f" (default: {shown(field.default)})"
    options: dict[str, Any] = {}
    if rules.is_list(wanted):
        options["nargs"] = "+"
    elif wanted is bool:
        options |= {"nargs": "?", "const": "true"}
    group.add_argument(f"--{name}", metavar=words, help=(about["help"] + default).replace("%", "%%"), **options)


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed flags.

    ``--a-b`` is ``--a_b``. The last of repeated flags wins, also of flags that take a list.

    Raises BadInput for a flag that the parser does not know, naming the nearest one.
    """
    parser._negative_number_matcher = NEGATIVE
    parser.error = _refuse  # type: ignore[method-assign]  # its own would exit with a usage text
    words = [_with_underscores(word) for word in argv]
    words = _with_values_of_switches(parser, words)

    # A misspelt flag is named before argparse misses the right one.
    names = [flag[2:] for flag in parser._option_string_actions if flag.startswith("--")]
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    if "--local_rank" in given and "local_rank" not in names:
        raise BadInput(
            "--local_rank: torch.distributed.launch and deepspeed pass this flag, which is not needed here. Start "
            f"several processes with torchrun --nproc_per_node N {parser.prog}, or with accelerate launch"
        )
    unknown = [flag for flag in given if flag[2:] not in names and " " not in flag]
    if not unknown:
        known, unknown = parser.parse_known_args(words)
    if not unknown:
        return known

    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]  # a value may be a secret
    if not flags:
        message = f"{unknown[0]} is not a flag. Write each value after its flag"
        if other_flags.RECIPE_KEY in names:
            message += ', for example --max_steps 100. If this is a command of another trainer, see "Coming from '
            message += 'another trainer" in docs/questions.md'
        raise BadInput(message)
    raise BadInput([_unknown_flag(parser, flag, names) for flag in flags])


def _with_underscores(word: str) -> str:
    """Return ``--a-b=value`` as ``--a_b=value``. A value such as "--x-y z" stays as it is."""
    flag, equals, value = word.partition("=")
    if not flag.startswith("--") or " " in flag:
        return word
    return "--" + flag[2:].replace("-", "_") + equals + value


def _switches(parser: argparse.ArgumentParser) -> list[str]:
    """Return the boolean flags of a parser, which may be given without a value."""
    switches = []
    for flag, action in parser._option_string_actions.items():
        if action.nargs == "?" and action.const is not None:
            switches.append(flag)
    return switches


def _with_values_of_switches(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return the words with ``--switch=true`` for a bare switch in front of a positional argument.

    Argparse would take that argument for the value of the switch.
    """
    has_positional = any(not action.option_strings for action in parser._actions)
    if not has_positional:
        return list(words)
    switches = _switches(parser)
    explicit = []
    for word, next_word in itertools.zip_longest(words, words[1:], fillvalue=""):
        if word in switches and rules.boolean_of(next_word) is None:
            explicit.append(f"{word}=true")
        else:
            explicit.append(word)
    return explicit


def _unknown_flag(parser: argparse.ArgumentParser, flag: str, names: Collection[str]) -> str:
    """Return the error message for a flag that the parser does not know."""
    name = flag.removeprefix("--no_")
    if name != flag and f"--{name}" in _switches(parser):
        return f"{flag}: no such flag; write --{name} false"
    return _unknown(flag, names, "--")


def load_recipe(path: Path, flags: Mapping[str, Any] | None = None, modes: Collection[str] = ()) -> Recipe:
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
    values, faults = places.expand(file_values | flag_values)
    if path.name == RUN_RECIPE:
        values = places.follow_run_folder(values, stated, flags, path.parent)
    _begin_from_model(values)
    faults += [_unknown(str(name), FIELDS) for name in values if name not in FIELDS]
    for name, field in FIELDS.items():
        needed = field.default is ABSENT and not (values.get("init_from") and name in MODEL_KEYS)
        if needed and (name not in values or values[name] is None and name in OPTIONAL):
            faults.append(f"{name} is missing: {field.metadata['help']}. It has no default; state it")
        elif name in values and (rule := _broken_rule(name, values)):
            faults.append(f"{name} = {shown(values[name])}: {rule}")
    if not faults:
        faults += several
        faults += rules.source_faults(values.get("sources"))
    if not faults:
        values = {name: values.get(name, field.default) for name, field in FIELDS.items()}
        values = data_source.drop_ineffective(values, file_values, stated, flags, modes)
        values |= {name: float(values[name]) for name in values if TYPES[name] is float and values[name] is not None}
        values["run_name"] = path.stem if values["run_name"] is None else values["run_name"]
        values["output_dir"] = values["output_dir"] or f"runs/{values['run_name']}"
        if size_note:
            log.info(size_note)
        _settle_warmup(values)
        if path.name != RUN_RECIPE:  # said as the run began
            _advise(values)
        faults += rules.recipe_faults(values)
        faults += rules.ineffective_flags(values | dict.fromkeys(modes, True), flags)
    if faults:
        raise BadInput(_blamed(path, fault, flags, size_flags) for fault in faults)
    return deal(values)


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
    return fraction_error or rules.key_fault(name, values[name])


def _unknown(name: str, known: Collection[str], dashes: str = "") -> str:
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
    return f"{name}: no such {kind}{nearest(name.lstrip('-'), known, dashes)}"


def _settle_warmup(values: dict[str, Any]) -> None:
    """Shorten a warm-up that is longer than the run."""
    asked, steps = values["warmup_steps"], values["max_steps"]
    if asked > steps:
        values["warmup_steps"] = quarter = max(1, steps // 4)
        log.info(
            f"warmup_steps = {asked} is longer than the run, max_steps = {steps}: shortened to a quarter, {quarter}"
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
        log.info(f"eval_steps = {evaluations}, max_steps = {steps}: {few}; for ten: --eval_steps {steps // 10}")


def _blamed(path: Path, fault: str, flags: Mapping[str, Any], size_flags: Mapping[str, str]) -> str:
    """Return an error message with its source in front: the flags that it names, else the file.

    Args:
        size_flags: the keys that ``--size`` has set, each with this flag as it was typed.
    """
    named = {}
    for name, value in flags.items():
        if re.search(rf"\b{name} = ", fault):
            named[name] = size_flags.get(name) or f"--{name} {shown(value)}"
    key = fault.partition(" = ")[0]
    if [*named] == [key] and key not in size_flags:  # the flag repeats the key and its value
        fault = fault.partition(": ")[2]
    source = ", ".join(dict.fromkeys(named.values())) or path
    return f"{source}: {fault}"


def refuse_changed_science(where: Path, before: dict[str, Any], recipe: Recipe) -> None:
    """Raise BadInput with each key whose value is not the one that a run began with.

    Args:
        where: the run's folder or checkpoint, for the message.
        before: the fixed keys and their values as the run has stored them.
        recipe: the recipe to continue with.
    """
    now = fixed(recipe)
    if before.keys() != now.keys():
        names = ", ".join(sorted(before.keys() ^ now.keys()))
        raise BadInput(
            f"{where} was written by another version of Ursa Minor, whose recipes have other keys ({names}). "
            f"Continue it with that version, or give another {recipe.saving.option_of_another_run}"
        )
    changed = [name for name in now if before[name] != now[name]]
    if changed:
        raise BadInput(
            f"{where}: {name} = {shown(before[name])}, asked for {shown(now[name])}: fixed for a run. "
            f"{_way_on(name, before, now[name], recipe)}"
            for name in changed
        )


def _way_on(name: str, then: Mapping[str, Any], now: Any, recipe: Recipe) -> str:
    """Return what to do about a key that is fixed; a finished run is trained longer by another command."""
    run = recipe.saving.run_dir
    if name != "max_steps" or now <= (then[name] or now) or not (run / run_files.MODEL_FOLDER).is_dir():
        return f"Give another {recipe.saving.option_of_another_run}, or set it back"
    command = f"python train.py --recipe {paths.quoted(run / RUN_RECIPE)}"
    finish = run_files.read_finish(run)
    length = then[name]
    if finish and not finish.stopped_early:
        length = finish.step  # max_hours may have planned another one
    more = now - length
    has_checkpoint = any(run_files.STEP.fullmatch(path.name) for path in recipe.saving.checkpoints.glob("step-*"))
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
            reason += f"To continue it to step {then[name]}: {command} --early_stopping_patience 0. "
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
        near = [wording.nearest_beside(place, lambda file: file.suffix == ".yaml") for place in places]
        raise BadInput(f"{path}: no such recipe{near[0] or near[1]}") from None
    except (OSError, yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date, another encoding
        where = str(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            where = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise BadInput(f"{path}: not a recipe: {where}") from None
    if values is None:
        raise BadInput(f"{path}: the recipe is empty")
    if not isinstance(values, dict):
        raise BadInput(f"{path}: a recipe is a mapping of `key: value` lines, this is {type(values).__name__}")
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
    if os.path.isdir(f"{source}/model"):  # noqa: PTH112  (of a name that is too long Path's own raises)
        source = values["init_from"] = str(Path(source) / "model")
    values.setdefault("tokenizer", source)
    for name in MODEL_KEYS:
        values.setdefault(name, None)


def _refuse(message: str) -> typing.NoReturn:
    raise BadInput(message)
