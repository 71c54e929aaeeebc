"""Post-training's settings: a YAML file and flags over it, each value checked before TRL takes it."""

import argparse
import dataclasses
import math
import os
import types
import typing
from collections.abc import Sequence
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

    model: str = field(
        metadata={"help": "a run folder, a model folder, or a Hub id (ID or ID@REVISION)"}
    )
    reward: str = field(
        metadata={
            "help": "addition, brackets, python_compiles, a reward model's folder, or file.py:function"
        }
    )
    prompts: str = field(
        metadata={"help": "a file of rows with a column prompt (.jsonl, .parquet, .csv), or a glob"}
    )
    held_out: str = field(
        metadata={"help": "another one, which the model is scored on before, meanwhile and after"}
    )
    held_out_steps: int = field(default=20, metadata={"help": "score it every so many steps"})
    stop: str | None = field(
        default=None, metadata={"help": "a token that ends a completion, besides the end of text"}
    )
    env: dict[str, str] | None = field(
        default=None, metadata={"help": "variables of the environment (file only)"}
    )


# The least value of a number where TRL accepts less and fails at it later.
LEAST = {"held_out_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
LEAST |= {"max_completion_length": 1, "num_generations": 2}
# Values that are paths: of Task and of TRL's GRPOConfig.
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
ABOVE_0 = ("learning_rate", "temperature")
# Types that differ from TRL's own, which it or post_train.py cannot use.
HINTS = {
    "scale_rewards": str | bool,
    "output_dir": str,
    "max_completion_length": int,
    "num_generations": int,
}
TYPE_LABELS = rules.TYPE_NAMES | {types.NoneType: "null", dict: "a mapping"}


def read(argv: Sequence[str], config: type) -> tuple[PostTrainingTask, Any]:
    """Return the Task and TRL's ``config`` that ``--config FILE --key value ...`` asks for.

    Raises BadInput with every problem found: file, key, value, rule.
    """
    parser = HfArgumentParser(
        [PostTrainingTask, config],
        allow_abbrev=False,
        description="Improve a model by a checked reward.",
    )
    parser.add_argument("--config", metavar="FILE", help="for example recipes/post/addition.yaml")
    for action in parser._actions:
        # The default is in the file or in the class.
        action.default, action.required = (
            argparse.SUPPRESS,
            False,
        )
        if action.type is string_to_bool:
            # HfArgumentParser requires a value where the default is null.
            action.nargs = "?"
            action.const = True
        elif action.type is int and action.dest.endswith("_steps"):
            action.type = command_line.number_of_steps
    flags = vars(command_line.parse_flags(parser, argv))
    if "config" not in flags:
        raise BadInput("--config is missing: give a file, for example recipes/post/addition.yaml")
    file = command_line.find_recipe(flags.pop("config"), "config")
    fields = {
        key_field.name: key_field
        for part in (PostTrainingTask, config)
        for key_field in dataclasses.fields(part)
        if key_field.init
    }
    hints = typing.get_type_hints(PostTrainingTask) | typing.get_type_hints(config) | HINTS
    values = loading.read_file(file) | flags
    problems = _expand_paths(values)
    problems += [
        f"{wording.shorten(n)}: no such key{wording.did_you_mean(n, fields)}"
        for n in values
        if n not in fields
    ]
    for name, key_field in fields.items():
        if name in values:
            several = typing.get_origin(hints[name]) in (types.UnionType, typing.Union)
            options = typing.get_args(hints[name]) if several else (hints[name],)
            value = values[name] if str in options else rules.number_of(values[name])
            value = float(value) if type(value) is int and float in options else value
            if rule := _broken_rule(name, value, options):
                problems.append(f"{name} = {wording.shorten(values[name])}: must be {rule}")
            values[name] = value
        elif key_field.default is key_field.default_factory is dataclasses.MISSING:
            problems.append(f"{name} is missing: {key_field.metadata['help']}")
    if problems:
        raise BadInput(f"{file}: {problem}" for problem in problems)
    try:
        task, settings = parser.parse_dict(values)
        os.environ.update(task.env or {})
    except Exception as error:  # each part of TRL, and what is not installed, raises its own kinds
        raise refusal(error, f"{file}: ") from None
    return task, settings


def _expand_paths(values: dict[str, Any]) -> list[str]:
    """Expand the paths among the values in place; return one line for each path that cannot be expanded."""
    problems = []
    for name in PATHS:
        if isinstance(path := values.get(name), str):
            try:
                values[name] = paths.expand(path)
            except ValueError as error:
                problems.append(f"{name} = {wording.shorten(path)}: {error}")
    return problems


def refusal(error: Exception, where: str = "") -> BadInput:
    """Return TRL's own error about values that are each allowed, or about their combination."""
    return BadInput(f"{where}TRL refuses these settings: {type(error).__name__}: {error}")


def _broken_rule(name: str, value: Any, options: tuple) -> str:
    """Return the rule that a value breaks; None where it breaks none."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        type_validator(name, value, typing.Union[options])  # noqa: UP007
    except TypeError:
        if int in options and rules.fraction_of_steps(name, value) is not None:
            return rules.FRACTION_RULE.removeprefix("must be ")
        return wording.join_or(
            [TYPE_LABELS.get(option, rules.type_name(option)) for option in options]
        )
    if number and not math.isfinite(value):
        return "a finite number"
    if value == "" and options == (str,):
        return "a text that is not empty"
    if number and value < LEAST.get(name, value):
        return f"{LEAST[name]} or more"
    return "above 0" if name in ABOVE_0 and value <= 0 else ""
