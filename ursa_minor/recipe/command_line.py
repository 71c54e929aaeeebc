"""Parse the command lines of the scripts.

Nothing here imports torch, so that ``--help`` and errors appear immediately.
"""

import argparse
import dataclasses
import itertools
import os
import re
import shlex
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ursa_minor.base import paths, run_files, wording
from ursa_minor.base.errors import BadInput
from ursa_minor.base.launch import check_launch
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

# A negative number. Before Python 3.14, argparse mistakes values such as -1e-3 for flags.
NEGATIVE = re.compile(r"-(\.?[0-9].*|inf(inity)?|nan)$", re.IGNORECASE)
# How --help names the value of a flag, by its type and by the kind of path that it is.
METAVARS = {int: "N", float: "X", bool: "true|false"}
PATH_METAVARS = {
    None: "TEXT",
    "folder": "PATH",
    "path": "PATH",
    "name": "NAME_OR_PATH",
    "repository file": "PATH",
    "assignment": "NAME=PATH",
}
CHOICE_METAVAR = "NAME"  # if the choices are in the help text
MAX_METAVAR = 45  # characters of choices that replace the value
# Titles of the groups of --help that differ from the names of the sections of a recipe.
GROUP_TITLES = {
    "batch": "batch size",
    "schedule": "duration and learning rate schedule",
    "evaluation": "logging and evaluation",
    "saving": "checkpoints and saving",
    "machine": "hardware",
    "tracking": "experiment tracking",
    "hub": "Hugging Face Hub",
}
COMMON_KEYS = [
    "data_files",
    "dataset_name",
    "data_dir",
    "run_name",
    "max_steps",
    "num_train_epochs",
    "max_hours",
    "learning_rate",
    "optimizer",
    "per_device_train_batch_size",
]
COMMON_HELP = (
    "Every key of a recipe is also an option, which takes precedence over the recipe file. "
    "Keys without a default are stated in the recipe file."
)
# Number of updates that --profile needs. The first ones are not recorded (reporting/profiler.py).
PROFILE_UPDATES = 13
# Options of train.py that are not recipe keys: their types and help, as read_flags takes them.
TRAIN_MODES: dict[str, tuple[type, str]] = {
    "eval_only": (
        bool,
        "Evaluate the newest checkpoint, or the model of --init_from, on the validation split and "
        "the tasks, and exit.",
    ),
    "profile": (
        bool,
        "Record a profile of a few updates of the main process in profile/ of the run folder.",
    ),
    "extend_steps": (
        int,
        "Train a finished run with lr_scheduler_type wsd or constant for this number of additional "
        "updates, as a new run. wsd continues from before the decay phase.",
    ),
    "push_pending": (
        Path,
        "Push the files that are waiting in hub/ of this run folder to the Hub, and exit.",
    ),
}


class TrainCommand(NamedTuple):
    """A parsed command line of train.py.

    Attributes:
        recipe: the recipe, or None with ``--push_pending``, which needs none.
        modes: the options on the command line that are not recipe keys (``TRAIN_MODES``), and
            their values.
        reader_argv: the arguments with which prepare_data.py reads the same recipe.
    """

    recipe: Recipe | None
    modes: dict[str, Any]
    reader_argv: list[str]


def parse_training(argv: Sequence[str]) -> TrainCommand:
    """Parse the command line of train.py, and check everything that does not need torch.

    Raises:
        BadInput: with every error in the flags and the recipe, or with the first error in the
            environment variables of the launcher.
    """
    flags, modes = read_flags(argv, "Pre-train GPT-2 from a recipe.", TRAIN_MODES)
    if "push_pending" in modes:
        run_dir = modes["push_pending"]
        if flags or len(modes) > 1:
            raise BadInput(
                f"--push_pending {run_dir} cannot be combined with other options. Leave them out"
            )
        return TrainCommand(None, {"push_pending": expand_option("push_pending", run_dir)}, [])

    reader_argv = argv_of(flags)
    recipe_file = find_recipe(flags.pop("recipe", DEFAULT_RECIPE))
    if "extend_steps" in modes:
        _check_extension(recipe_file, flags)
    recipe = load_recipe(recipe_file, flags, modes)

    if "extend_steps" in modes and "max_hours" in flags and recipe.schedule.max_hours:
        raise BadInput(
            "--max_hours has no effect with --extend_steps, which sets the length of the run. "
            "Leave out --max_hours"
        )
    if "extend_steps" not in modes and recipe.schedule.max_steps is not None:
        check_profile(recipe.schedule.max_steps, modes)
    check_launch(os.environ)
    return TrainCommand(recipe, modes, reader_argv)


def check_profile(max_steps: int, modes: Collection[str]) -> None:
    """Raise BadInput if the run is too short for ``--profile``."""
    if "profile" in modes and max_steps < PROFILE_UPDATES:
        raise BadInput(
            f"--profile needs {PROFILE_UPDATES} updates, but max_steps = {max_steps}. "
            f"Use --max_steps {PROFILE_UPDATES} or more, or leave out --profile"
        )


def find_recipe(path: str, option: str = "recipe") -> Path:
    """Return the path of a recipe file, in the current folder or else in the repository.

    Args:
        path: the value of the option. The file does not need to exist.
        option: the name of the option, without dashes.

    Raises:
        BadInput: the path cannot be expanded.
    """
    return paths.find_from_anywhere(Path(expand_option(option, path)))


def expand_option(option: str, path: str) -> str:
    """Return the path of a command-line option with ``~`` and variables expanded.

    Raises:
        BadInput: the path cannot be expanded.
    """
    try:
        return paths.expand(path)
    except ValueError as error:
        raise BadInput(f"--{option} {path}: {error}") from None


def _check_extension(recipe_file: Path, flags: Mapping[str, Any]) -> None:
    """Raise BadInput if --extend_steps extends a run folder and the flags name the new run."""
    options = [f"--{name}" for name in ("run_name", "output_dir") if name in flags]
    if recipe_file.name == run_files.RECIPE and options:
        raise BadInput(
            f"--extend_steps names the new run after the run in {recipe_file.parent} and its new "
            f"length. Leave out {' and '.join(options)}"
        )


def quoted_flags(flags: Mapping[str, Any]) -> str:
    """Return flags of a command that a message prints, quoted for the shell.

    Args:
        flags: the flags and their values. A value may be a list.
    """
    words = []
    for name, value in flags.items():
        values = [str(item) for item in value] if isinstance(value, list) else [str(value)]
        if len(values) == 1 and values[0].startswith("-"):
            words.append(f"--{name}={values[0]}")
        else:
            words += [f"--{name}", *values]
    return shlex.join(words)


def argv_of(flags: Mapping[str, str | list[str]]) -> list[str]:
    """Return command-line arguments that state these flags.

    A single value is joined to its flag with "=", because it may begin with dashes.
    """
    argv = []
    for name, value in flags.items():
        values = [value] if isinstance(value, str) else value
        if len(values) == 1:
            argv.append(f"--{name}={values[0]}")
        else:
            argv += [f"--{name}", *values]
    return argv


def read_flags(
    argv: Sequence[str], description: str, extras: Mapping[str, tuple[type, str]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read ``--recipe PATH --key value ...``.

    Args:
        argv: the arguments without the name of the script.
        description: the first line of ``--help``.
        extras: the type and help of each option that is not a recipe key. The value of a bool may
            be omitted; a path remains a string.

    Returns:
        The flags of the recipe as strings, with ``recipe`` (the file) and ``size``. Then the extras
        that are on the command line, without booleans that are false.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--recipe PATH] [--key value ...]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    common = parser.add_argument_group("common options", COMMON_HELP)
    common.add_argument(
        "--recipe",
        metavar="PATH",
        help=f"Recipe file, which states the values of the keys. (default: {DEFAULT_RECIPE})",
    )
    for name in COMMON_KEYS:
        add_key(common, name)
    common.add_argument(
        "--size",
        metavar="|".join(sizes.names_of(sizes.GPT2_SIZES)),
        help="Train the GPT-2 model of this size. In AdamW recipes, this also sets the learning "
        "rate and the batch size (docs/configuration.md).",
    )
    # argparse does not show a group without options.
    modes = parser.add_argument_group("modes")
    for name, (value_type, help) in extras.items():
        add_option(modes, name, value_type, help)
    for section_name, section in SECTIONS.items():
        title = GROUP_TITLES.get(section_name, section_name)
        group = parser.add_argument_group(title, section.__doc__)
        for field in dataclasses.fields(section):
            is_mapping = KEY_TYPES[field.name] == list[dict]  # which cannot be a flag
            if field.name not in COMMON_KEYS and not is_mapping:
                add_key(group, field.name)

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
    """Add an option that is not a recipe key.

    Args:
        group: the parser, or a group of its options.
        name: the name without dashes.
        value_type: the type of the value. The value of a bool may be omitted; a Path remains a
            string.
        help: the help text.
        metavar: the name of the value in ``--help``. The default depends on the type.
    """
    if value_type is bool:
        add_switch(group, f"--{name}", help)
        return
    convert: Callable[[str], Any] = value_type
    if value_type is Path:
        convert = str
        metavar = metavar or "PATH"
    elif value_type is int and name.endswith("_steps"):
        convert = number_of_steps
    metavar = metavar or METAVARS.get(value_type, "TEXT")
    group.add_argument(f"--{name}", help=help, type=convert, metavar=metavar)


def add_switch(group: argparse._ActionsContainer, flag: str, help: str) -> None:
    """Add a boolean flag: true if it has no value, false if it is not on the command line."""
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
    if isinstance(number, int):
        return number
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be an integer") from None


def add_key(group: argparse._ArgumentGroup, name: str) -> None:
    """Add the option of a recipe key. Its value is read as a string, or as a list of strings."""
    options: dict[str, Any] = {}
    if rules.is_list(KEY_TYPES[name]):
        options["nargs"] = "+"
    elif KEY_TYPES[name] is bool:
        options["nargs"] = "?"
        options["const"] = "true"
    help = _help_of_key(name).replace("%", "%%")  # argparse formats help with the % operator
    group.add_argument(f"--{name}", metavar=_metavar_of_key(name), help=help, **options)


def _help_of_key(name: str) -> str:
    """Return the help text of a key, with its choices if it is a list, and its default."""
    field = FIELDS[name]
    help = field.metadata["help"]
    choices = field.metadata["allowed"]
    # The choices of other keys are shown in place of their value (_metavar_of_key). There are too
    # many tasks to list them.
    if _metavar_of_key(name) == CHOICE_METAVAR and len(choices) <= wording.MAX_VALUES:
        help += f" Choices: {', '.join(choices)}."
    if field.default is ABSENT:
        return help
    default = wording.shorten(field.default)
    if isinstance(field.default, bool):
        default = default.lower()
    return f"{help} (default: {default})"


def _metavar_of_key(name: str) -> str:
    """Return how ``--help`` shows the value of a key."""
    value_type = KEY_TYPES[name]
    metadata = FIELDS[name].metadata
    if rules.is_list(value_type) and metadata["allowed"]:
        return CHOICE_METAVAR
    if value_type is str and metadata["allowed"]:
        choices = "|".join(metadata["allowed"])
        return choices if len(choices) <= MAX_METAVAR else CHOICE_METAVAR
    metavar = METAVARS.get(value_type, PATH_METAVARS[metadata["path"]])
    return f"{metavar}|auto" if name in AUTO_KEYS else metavar


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed flags.

    ``--a-b`` is the same as ``--a_b``. The last of repeated flags wins, including flags that take
    lists.

    Raises:
        BadInput: the parser does not know a flag. The message suggests a similar one.
    """
    parser._negative_number_matcher = NEGATIVE
    # ArgumentParser.error exits with a usage text.
    parser.error = _raise_bad_input  # type: ignore[method-assign]
    words = [_with_underscores(word) for word in argv]
    words = _with_values_of_switches(parser, words)

    # Report a misspelt flag first: argparse would report that the required flag is missing.
    names = [flag[2:] for flag in parser._option_string_actions if flag.startswith("--")]
    flags_in_argv = [word.partition("=")[0] for word in words if word.startswith("--")]
    if "--local_rank" in flags_in_argv and "local_rank" not in names:
        raise BadInput(
            "--local_rank is not needed here. torch.distributed.launch and deepspeed pass it. "
            f"Start several processes with torchrun --nproc_per_node N {parser.prog}, or with "
            "accelerate launch"
        )
    unknown = [flag for flag in flags_in_argv if flag[2:] not in names and " " not in flag]
    if not unknown:
        known, unknown = parser.parse_known_args(words)
    if not unknown:
        return known

    # Messages do not repeat values, because a value may be a secret.
    unknown_flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if unknown_flags:
        raise BadInput([_unknown_flag(parser, flag, names) for flag in unknown_flags])
    message = f"{unknown[0]} is not a flag. Write each value after its flag"
    if other_flags.RECIPE_KEY in names:
        message += (
            ", for example --max_steps 100. If this is a command of another trainer, see "
            '"Coming from another trainer" in docs/questions.md'
        )
    raise BadInput(message)


def _with_underscores(word: str) -> str:
    """Return ``--a-b=value`` as ``--a_b=value``. A value such as "--x-y z" stays as it is."""
    flag, equals, value = word.partition("=")
    if not flag.startswith("--") or " " in flag:
        return word
    name = flag[2:].replace("-", "_")
    return f"--{name}{equals}{value}"


def _switches(parser: argparse.ArgumentParser) -> list[str]:
    """Return the boolean flags of a parser, whose values may be omitted."""
    switches = []
    for flag, action in parser._option_string_actions.items():
        if action.nargs == "?" and action.const is not None:
            switches.append(flag)
    return switches


def _with_values_of_switches(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return the words with ``--switch=true`` for a bare switch before a positional argument.

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
        return f"{flag}: no such flag. Use --{name} false"
    if not flag.strip("-_"):
        return (
            "a value that consists of hyphens needs an equals sign, for example "
            "--document_separator=---"
        )
    return unknown_name(flag, names, "--")


def _raise_bad_input(message: str) -> typing.NoReturn:
    raise BadInput(message)
