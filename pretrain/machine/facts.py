"""Facts of a run at its start, beside its recipe: its command, hardware, and the model's size."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pretrain.base.foreign import redact
from pretrain.machine import estimate, hardware
from pretrain.recipe import keys


@dataclass(frozen=True)
class Facts:
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


def facts_of(
    recipe: keys.Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, accelerator: Accelerator
) -> Facts:
    """Return the facts of the run that this process trains."""
    return Facts(
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
    """Return the words that started this run: those of ``launcher``, if it is one; URLs in them are redacted."""
    for place, word in enumerate(launcher[:3]):
        if Path(word).name in ("accelerate", "torchrun"):
            return [Path(word).name, *map(redact, launcher[place + 1 :])]
    return ["python", Path(sys.argv[0]).name, *map(redact, sys.argv[1:])]
