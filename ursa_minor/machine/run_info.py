"""Collect what describes a run besides its recipe: command, hardware and size of the model."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ursa_minor.base import paths
from ursa_minor.base.redaction import redact
from ursa_minor.machine import device as hardware
from ursa_minor.preflight import estimate
from ursa_minor.recipe import keys


@dataclass(frozen=True)
class RunInfo:
    """Information on a run for the header of its log and the model card.

    Attributes:
        command: the command line of the run, as a list of arguments.
        hardware: name of the device of one process.
        num_processes: number of processes of the run.
        precision: bf16, fp16 or fp32.
        model_type: the ``model_type`` of Transformers.
        parameters: number of weights.
        flops_per_token: estimated FLOPs of the forward and backward pass for one token.
        tokenizer_size: number of token ids. Further rows of the vocabulary are padding.
    """

    command: Sequence[str]
    hardware: str
    num_processes: int
    precision: str
    model_type: str
    parameters: int
    flops_per_token: int
    tokenizer_size: int


def run_info_of(
    recipe: keys.Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    accelerator: Accelerator,
) -> RunInfo:
    """Return the information on the run that this process trains."""
    precision = accelerator.mixed_precision
    if precision == "no":
        precision = "fp32"
    return RunInfo(
        command=command_line(launcher_command()),
        hardware=hardware.device_name(accelerator.device),
        num_processes=accelerator.num_processes,
        precision=precision,
        model_type=model.config.model_type,
        parameters=model.num_parameters(),
        flops_per_token=estimate.shape_of(recipe.model).flops_per_token,
        tokenizer_size=len(tokenizer),
    )


def launcher_command() -> list[str]:
    """Return the command line of the parent process, or an empty list without Linux's /proc."""
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    if not parent.is_file():
        return []
    return parent.read_text(errors="replace").split("\0")[:-1]


def command_line(launcher: Sequence[str]) -> list[str]:
    """Return the arguments of the command that started this run.

    Secrets in URLs are removed, and local paths are shortened.

    Args:
        launcher: command line of the parent process. It is returned if it is that of ``accelerate``
            or ``torchrun``.
    """
    command = ["python", Path(sys.argv[0]).name]
    arguments: Sequence[str] = sys.argv[1:]
    # The program may follow an interpreter and its option.
    for index, argument in enumerate(launcher[:3]):
        program = Path(argument).name
        if program in ("accelerate", "torchrun"):
            command = [program]
            arguments = launcher[index + 1 :]
            break
    return command + [redact(argument) for argument in _with_short_paths(arguments)]


def _with_short_paths(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments of a command, with only the last component of each local path.

    A relative path is kept unless it is the value of a recipe key, because it names the script, the
    recipe or a YAML file of Accelerate.
    """
    key = ""
    for argument in arguments:
        if not argument.startswith("--"):
            yield _shorten_paths(key, argument)
            continue
        flag, equals, value = argument.partition("=")
        key = flag.removeprefix("--").replace("-", "_")
        if equals:
            yield f"{flag}={_shorten_paths(key, value)}"
        else:
            yield argument


def _shorten_paths(key: str, value: str) -> str:
    """Return a value with local paths shortened.

    Args:
        key: name of the option before the value, or an empty string.
        value: the value.
    """
    if key in keys.FIELDS:
        try:
            expanded = keys.map_paths({key: value}, lambda _, path: paths.expand(path))
        except ValueError:
            return value
        return keys.map_paths(expanded, keys.shortened)[key]
    is_outside = Path(value).is_absolute() or value.startswith(("~", "$"))
    if is_outside:
        return Path(value).name or value
    return value
