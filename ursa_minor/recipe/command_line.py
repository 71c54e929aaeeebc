"""Parse the command lines of the scripts. Imports no torch, so that --help and errors appear immediately."""

import argparse
import dataclasses
import itertools
import os
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ursa_minor.base import paths, run_files, wording
from ursa_minor.base.errors import BadInput
from ursa_minor.base.launch import check_launch
from ursa_minor.base.wording import shorten
from ursa_minor.recipe import other_flags, rules, sizes
from ursa_minor.recipe.keys import (
    ABSENT,
    AUTO_KEYS,
    FIELDS,
    KEY_TYPES,
    SECTIONS,
    Recipe,
)
from ursa_minor.recipe.loading import DEFAULT_RECIPE, load_recipe, unknown_name

# A value, where argparse before Python 3.14 takes -1e-3 for a flag.
NEGATIVE = re.compile(r"-(\.?[0-9].*|inf(inity)?|nan)$", re.IGNORECASE)
METAVARS = {int: "N", float: "X", bool: "true|false"}
USUAL = [
    "data_files",
    "dataset_name",
    "data_dir",
    "run_name",
    "max_steps",
    "max_hours",
    "learning_rate",
    "optimizer",
    "per_device_train_batch_size",
]
# The number of updates that --profile takes: the first ones are left out (reporting/profiler.py).
PROFILE_UPDATES = 13
# Flags of train.py that are not recipe keys, as read_flags takes them.
TRAIN_MODES = {
    "eval_only": (
        bool,
        "score the newest checkpoint (or init_from): validation split, tasks; then stop",
    ),
    "profile": (bool, "record a few updates, the main process's, into profile/ of the run folder"),
    "extend_steps": (
        int,
        "train a finished wsd run so many steps longer, from before its decay phase, as another run",
    ),
    "push_pending": (str, "send what waits in this run folder's hub/ to the Hub; then stop"),
}


class TrainCommand(NamedTuple):
    """A command line of train.py.

    Attributes:
        recipe: None with ``--push_pending``, which needs none.
        modes: the flags given that are not recipe keys (``TRAIN_MODES``), and their values.
        reader_argv: the flags with which prepare_data.py reads the same recipe.
    """

    recipe: Recipe | None
    modes: dict[str, Any]
    reader_argv: list[str]


def parse_training(argv: Sequence[str]) -> TrainCommand:
    """Parse the command line of train.py, and check what needs no torch.

    Raises:
        BadInput: with every error that was found in the flags and the recipe, or with the first one
            in the variables of the launcher.
    """
    flags, modes = read_flags(argv, "Pre-train GPT-2 from a recipe.", TRAIN_MODES)
    if "push_pending" in modes:
        if flags or len(modes) > 1:
            raise BadInput(
                f"--push_pending {modes['push_pending']}: stands alone; leave the other flags out"
            )
        modes["push_pending"] = expand_option("push_pending", modes["push_pending"])
        return TrainCommand(None, modes, [])

    reader_argv = argv_of(flags)
    recipe_file = find_recipe(flags.pop("recipe", DEFAULT_RECIPE))
    if "extend_steps" in modes:
        _check_file_extension(recipe_file, flags)
    recipe = load_recipe(recipe_file, flags, modes)
    if "extend_steps" in modes and "max_hours" in flags and recipe.schedule.max_hours:
        raise BadInput(
            "--max_hours has no effect with --extend_steps, which states the length. Leave it out"
        )
    max_steps = recipe.schedule.max_steps
    if "profile" in modes and "extend_steps" not in modes and max_steps < PROFILE_UPDATES:
        raise BadInput(
            f"--profile: max_steps = {max_steps}, and a profile takes {PROFILE_UPDATES} updates; "
            f"use --max_steps {PROFILE_UPDATES} or more, or leave out --profile"
        )
    check_launch(os.environ)
    return TrainCommand(recipe, modes, reader_argv)


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


def _check_file_extension(recipe_file: Path, flags: Mapping[str, Any]) -> None:
    """Raise BadInput where --extend_steps gets a run's recipe.yaml and a name or folder for the extended run."""
    options = [f"--{name}" for name in ("run_name", "output_dir") if name in flags]
    if recipe_file.name == run_files.RECIPE and options:
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
    usual.add_argument("--recipe", metavar="FILE", help=f"default: {DEFAULT_RECIPE}")
    for name in USUAL:
        _add_flag(usual, name)
    size_names = "|".join(sizes.names_of(sizes.GPT2_SIZES))
    size_help = (
        "shape of this GPT-2; AdamW recipes also get its learning rate and batch (docs/knobs.md)"
    )
    usual.add_argument("--size", metavar=size_names, help=size_help)
    modes = parser.add_argument_group("instead, or beside")  # not shown where it is empty
    for name, (value_type, help) in extras.items():
        add_option(modes, name, value_type, help)
    for title, part in SECTIONS.items():
        group = parser.add_argument_group(title, part.__doc__)
        for field in dataclasses.fields(part):
            # A list of mappings cannot be a flag.
            if field.name not in USUAL and KEY_TYPES[field.name] != list[dict]:
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
    value_type: type,
    help: str,
    metavar: str = "",
) -> None:
    """Add a flag that is not a recipe key.

    Args:
        value_type: type of its value. A bool may be given without a value.
        metavar: name of the value in ``--help``.
    """
    if value_type is bool:
        add_switch(group, f"--{name}", help)
        return
    convert: Callable[[str], Any] = value_type
    if value_type is int and name.endswith("_steps"):
        convert = number_of_steps
    metavar = metavar or METAVARS.get(value_type, "TEXT")
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
        raise argparse.ArgumentTypeError(f"must be true or false, not {wording.shorten(text)!r}")
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
    field, value_type = FIELDS[name], KEY_TYPES[name]
    about, choices = field.metadata, () if value_type in (int, float) else field.metadata["allowed"]
    words = "|".join(choices[: wording.MAX_VALUES]) or METAVARS.get(
        value_type, "TEXT"
    ) + "|auto" * (name in AUTO_KEYS)
    default = "" if field.default is ABSENT else f" (default: {shorten(field.default)})"
    options: dict[str, Any] = {}
    if rules.is_list(value_type):
        options["nargs"] = "+"
    elif value_type is bool:
        options |= {"nargs": "?", "const": "true"}
    group.add_argument(
        f"--{name}", metavar=words, help=(about["help"] + default).replace("%", "%%"), **options
    )


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed flags.

    ``--a-b`` is ``--a_b``. The last of repeated flags wins, also of flags that take a list.

    Raises BadInput for a flag that the parser does not know, naming the nearest one.
    """
    parser._negative_number_matcher = NEGATIVE
    parser.error = _raise_bad_input  # type: ignore[method-assign]  # its own would exit with a usage text
    words = [_with_underscores(word) for word in argv]
    words = _with_values_of_switches(parser, words)

    # A misspelt flag is named before argparse misses the right one.
    names = [flag[2:] for flag in parser._option_string_actions if flag.startswith("--")]
    flags_in_argv = [word.partition("=")[0] for word in words if word.startswith("--")]
    if "--local_rank" in flags_in_argv and "local_rank" not in names:
        raise BadInput(
            "--local_rank: torch.distributed.launch and deepspeed pass this flag, which is not needed here. Start "
            f"several processes with torchrun --nproc_per_node N {parser.prog}, or with accelerate launch"
        )
    unknown = [flag for flag in flags_in_argv if flag[2:] not in names and " " not in flag]
    if not unknown:
        known, unknown = parser.parse_known_args(words)
    if not unknown:
        return known

    # A value may be a secret.
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
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
    return unknown_name(flag, names, "--")


def _raise_bad_input(message: str) -> typing.NoReturn:
    raise BadInput(message)
