"""Read the settings of post_train.py: a YAML file, and flags that override it.

Each value is checked before TRL gets it, so that an error names the file, the key and the fix.
"""

import argparse
import dataclasses
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub.dataclasses import type_validator
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from ursa_minor.base import paths, wording
from ursa_minor.base.errors import BadInput
from ursa_minor.recipe import command_line, loading, rules


@dataclass
class PostTrainingTask:
    """The model to improve, the reward, and the prompts."""

    _argument_group_name = "model, reward and prompts"  # heading in --help (HfArgumentParser)

    model: str = field(
        metadata={
            "help": "Model to improve (required): a run folder, a checkpoint, a model folder, or a "
            "Hub id (ID or ID@REVISION)."
        }
    )
    reward: str = field(
        metadata={
            "help": "Reward of a completion (required): addition, brackets, python_compiles, the "
            "folder of a reward model, or a function of your own as file.py:function."
        }
    )
    prompts: str = field(
        metadata={
            "help": "Prompts to train on (required): .jsonl, .parquet or .csv files with a column "
            "'prompt', as one path or a glob."
        }
    )
    held_out: str = field(
        metadata={
            "help": "Held-out prompts (required), in files like those of 'prompts'. The model is "
            "scored on them before, during and after the training."
        }
    )
    held_out_steps: int = field(
        default=20,
        metadata={
            "help": "Number of updates between scores on the held-out prompts. (default: 20)"
        },
    )
    stop: str | None = field(
        default=None,
        metadata={
            "help": "Token that ends a completion, in addition to the end of text. (default: none)"
        },
    )
    env: dict[str, str] | None = field(
        default=None,
        metadata={
            "help": "Environment variables to set, by name. They can be given in the file only. "
            "(default: none)"
        },
    )


# The smallest value of a number where TRL accepts smaller ones and fails later.
MINIMUMS = {
    "held_out_steps": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 1,
    "num_generations": 2,
}
POSITIVE = ("learning_rate", "temperature")
# Keys of PostTrainingTask and of TRL's GRPOConfig whose values are paths or may be paths.
PATHS = (
    "model",
    "reward",
    "prompts",
    "held_out",
    "output_dir",
    "resume_from_checkpoint",
    "logging_dir",
    "deepspeed",
    "fsdp_config",
    "chat_template_path",
)
# Types that replace TRL's own, because TRL or post_train.py cannot use all values of those.
TYPE_HINTS = {
    "scale_rewards": str | bool,
    "output_dir": str,
    "max_completion_length": int,
    "num_generations": int,
}
TYPE_LABELS = rules.TYPE_NAMES | {types.NoneType: "null", dict: "a mapping"}


def read(argv: Sequence[str], config: type) -> tuple[PostTrainingTask, Any]:
    """Read ``--config PATH --key value ...``.

    Args:
        argv: the arguments after the script's name.
        config: TRL's class of settings, for example GRPOConfig.

    Returns:
        The task and an instance of ``config``.

    Raises:
        BadInput: there are errors in the settings. Each message names the file, the key, the value
            and the rule for the value.
    """
    parser = argument_parser(config)
    flags = vars(command_line.parse_flags(parser, argv))
    if "config" not in flags:
        raise BadInput(
            "--config is missing. Use a settings file, for example recipes/post/addition.yaml"
        )
    file = command_line.find_recipe(flags.pop("config"), "config")
    values = loading.read_file(file) | flags

    problems = _expand_paths(values)
    problems += _unknown_keys(values, config)
    problems += _check_values(values, config)
    if problems:
        raise BadInput(f"{file}: {problem}" for problem in problems)
    try:
        task, settings = parser.parse_dict(values)
        os.environ.update(task.env or {})
    except Exception as error:  # TRL and the packages that it needs raise errors of many types
        raise trl_error(error, f"{file}: ") from None
    return task, settings


def argument_parser(config: type) -> HfArgumentParser:
    """Return the parser of the command line. Flags that are not given have no value."""
    parser = HfArgumentParser(
        [PostTrainingTask, config],
        add_help=False,
        allow_abbrev=False,
        usage="%(prog)s --config PATH [--key value ...]",
        description="Post-train a model with TRL's GRPOTrainer: improve it by a reward function.",
    )
    general = parser.add_argument_group("general")
    general.add_argument("-h", "--help", action="help", help="Show this text and exit.")
    general.add_argument(
        "--config",
        default=argparse.SUPPRESS,
        metavar="PATH",
        help="YAML file with the settings (required), for example recipes/post/addition.yaml. Each "
        "of its keys can also be given as a flag, which overrides the file.",
    )
    # Show the options of this project before the many of TRL.
    trl_group = parser._optionals
    trl_group.title = f"settings of TRL's {config.__name__}"
    our_groups = [group for group in parser._action_groups if group not in (general, trl_group)]
    parser._action_groups = [general, *our_groups, trl_group]
    for action in parser._actions:
        _adapt_option(action)
    return parser


def _adapt_option(action: argparse.Action) -> None:
    """Adapt an option of HfArgumentParser to a settings file, and complete its help."""
    if action.dest in ("help", "config"):
        return
    # Show the default in the help but remove it from the option. Otherwise it would replace the
    # value of the settings file.
    is_negation = action.nargs == 0  # --no_KEY
    states_default = action.default is None or "(default" in (action.help or "")
    if action.help and not states_default and not is_negation:
        default = wording.shorten(action.default).replace("%", "%%")
        action.help = f"{action.help} (default: {default})"
    action.default = argparse.SUPPRESS
    action.required = False

    if action.type is string_to_bool:
        # HfArgumentParser requires a value if the default is null.
        action.nargs = "?"
        action.const = True
        action.metavar = command_line.METAVARS[bool]
    elif action.type is int and action.dest.endswith("_steps"):
        action.type = command_line.number_of_steps
        action.metavar = command_line.METAVARS[int]
    elif action.type in command_line.METAVARS:
        action.metavar = command_line.METAVARS[action.type]
    elif action.dest in PATHS and action.dest not in ("model", "reward"):
        action.metavar = "PATH"


def _fields(config: type) -> dict[str, dataclasses.Field]:
    """Return the fields that a file or flag can set, by name."""
    fields = {}
    for dataclass_type in (PostTrainingTask, config):
        for key_field in dataclasses.fields(dataclass_type):
            if key_field.init:
                fields[key_field.name] = key_field
    return fields


def _expand_paths(values: dict[str, Any]) -> list[str]:
    """Expand the paths among the values in place, and return the problem of each invalid one."""
    problems = []
    for name in PATHS:
        path = values.get(name)
        if not isinstance(path, str):
            continue
        try:
            values[name] = paths.expand(path)
        except ValueError as error:
            problems.append(f"{name} = {wording.shorten(path)}: {error}")
    return problems


def _unknown_keys(values: Mapping[str, Any], config: type) -> list[str]:
    """Return the problem of each unknown key."""
    fields = _fields(config)
    problems = []
    for name in values:
        if name not in fields:
            suggestion = wording.did_you_mean(name, fields) or ". Remove it"
            problems.append(f"{wording.shorten(name)} is not a key of the settings{suggestion}")
    return problems


def _check_values(values: dict[str, Any], config: type) -> list[str]:
    """Convert the numbers among the values in place, and return the problem of each invalid value.

    A missing value of a required key is also a problem.
    """
    hints = typing.get_type_hints(PostTrainingTask) | typing.get_type_hints(config) | TYPE_HINTS
    problems = []
    for name, key_field in _fields(config).items():
        if name in values:
            allowed_types = _alternatives(hints[name])
            value = _to_number(values[name], allowed_types)
            rule = _broken_rule(name, value, allowed_types)
            if rule is not None:
                problems.append(
                    f"{name} = {wording.shorten(values[name])}: the value must be {rule}"
                )
            values[name] = value
        elif key_field.default is key_field.default_factory is dataclasses.MISSING:
            problems.append(f"{name} is missing. {key_field.metadata['help']}")
    return problems


def _alternatives(hint: Any) -> tuple:
    """Return the types of a union, or the type itself if it is none."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


def _to_number(value: Any, allowed_types: tuple) -> Any:
    """Return a value as a number if it is one, such as 6e-4, which YAML reads as text."""
    if str not in allowed_types:
        value = rules.number_of(value)
    if type(value) is int and float in allowed_types:
        return float(value)
    return value


def _broken_rule(name: str, value: Any, allowed_types: tuple) -> str | None:
    """Return the rule that a value breaks ("must be ..."), or None if it is valid."""
    try:
        type_validator(name, value, typing.Union[allowed_types])  # noqa: UP007
    except TypeError:
        if int in allowed_types and rules.fraction_of_steps(name, value) is not None:
            return rules.FRACTION_RULE.removeprefix("must be ")
        labels = [
            TYPE_LABELS.get(allowed_type, rules.type_name(allowed_type))
            for allowed_type in allowed_types
        ]
        return wording.join_or(labels)
    if value == "" and allowed_types == (str,):
        return "a text that is not empty"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _broken_number_rule(name, value)
    return None


def _broken_number_rule(name: str, value: float) -> str | None:
    """Return the rule that a number breaks, or None if it is valid."""
    if not math.isfinite(value):
        return "a finite number"
    if value < MINIMUMS.get(name, value):
        return f"{MINIMUMS[name]} or more"
    if name in POSITIVE and value <= 0:
        return "above 0"
    return None


def trl_error(error: Exception, prefix: str = "") -> BadInput:
    """Return an error of TRL about the settings as BadInput.

    TRL raises it for values that are valid individually, but not in combination.

    Args:
        prefix: beginning of the message.
    """
    return BadInput(
        f"{prefix}TRL rejects these settings ({type(error).__name__}: {error}). Change the "
        f"settings that this error names"
    )
