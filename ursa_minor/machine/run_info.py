"""Facts of a run at its start, beside its recipe: its command, hardware, and the model's size."""

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
    """The facts that the log's header and the model card state.

    Attributes:
        command: its words.
        hardware: the device's name; each process has one.
        precision: bf16, fp16 or fp32.
        model_type: as Transformers has it.
        flops_per_token: forward and backward, computed.
        tokenizer_size: ids that stand for text; the vocabulary's other rows are padding.
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
    """Return the facts of the run that this process trains."""
    return RunInfo(
        command=command_line(launcher_command()),
        hardware=hardware.device_name(accelerator.device),
        num_processes=accelerator.num_processes,
        precision=accelerator.mixed_precision.replace("no", "fp32"),
        model_type=model.config.model_type,
        parameters=model.num_parameters(),
        flops_per_token=estimate.shape_of(recipe.model).flops_per_token,
        tokenizer_size=len(tokenizer),
    )


def launcher_command() -> list[str]:
    """Return the command line of the process that started this one; empty where Linux's /proc is not there."""
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    return parent.read_text(errors="replace").split("\0")[:-1] if parent.is_file() else []


def command_line(launcher: Sequence[str]) -> list[str]:
    """Return the words that started this run: those of ``launcher``, if it is one.

    URLs in them have no secrets, and local paths are shortened.
    """
    for place, word in enumerate(launcher[:3]):
        if Path(word).name in ("accelerate", "torchrun"):
            return [Path(word).name, *map(redact, _with_short_paths(launcher[place + 1 :]))]
    return ["python", Path(sys.argv[0]).name, *map(redact, _with_short_paths(sys.argv[1:]))]


def _with_short_paths(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command with the last component only of each local path.

    A relative path that is not the value of a recipe key stays: it leads to the script, the recipe or a YAML file of
    Accelerate.
    """
    key = ""
    for word in words:
        flag, equals, value = word.partition("=")
        if not word.startswith("--"):
            yield _short_word(key, word)
            continue
        key = flag.removeprefix("--").replace("-", "_")
        yield f"{flag}={_short_word(key, value)}" if equals else word


def _short_word(key: str, word: str) -> str:
    """Return the value of an option, or a word without one, with local paths shortened."""
    if key not in keys.FIELDS:
        is_place = Path(word).is_absolute() or word.startswith(("~", "$"))
        return Path(word).name or word if is_place else word
    try:
        expanded = keys.map_paths({key: word}, lambda _, path: paths.expand(path))
    except ValueError:
        return word
    return keys.map_paths(expanded, keys.shortened)[key]
