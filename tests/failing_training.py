"""Run train.py on a simulated machine: little memory, FSDP2 on CPUs, a process that hangs or dies.

Environment variables:

- MAX_SEQUENCES: the largest micro-batch that fits into memory, of all processes or only of
  MAX_SEQUENCES_RANK.
- OOM_AT: a step in whose second micro-batch process OOM_RANK (default 0) runs out of memory.
- HANG_AT, DIE_AT: a step in whose second micro-batch process 1 sleeps or is killed. This happens
  once: the file ``struck`` marks it.
- FSDP: "true" or "false", the value of reshard_after_forward. The model is sharded as with
  `accelerate launch` and fsdp2_x8.yaml, but over gloo.
- FSDP_RECOVERY: "no" makes FSDP2 behave as before torch 2.13, which cannot continue after an
  out-of-memory error.
- EXCHANGES: the file to which process 0 writes the number of gradient exchanges of FSDP2 and
  their bytes by dtype.
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule

import train
from ursa_minor.data.loading import order as window_order
from ursa_minor.machine import accelerator
from ursa_minor.model import loss

STRUCK = Path("struck")


def this_rank() -> str:
    """Return the rank of this process."""
    return os.environ.get("RANK", "0")


class SmallMemory(loss.NextTokenLoss):
    """A loss that runs out of memory at more than MAX_SEQUENCES sequences."""

    def forward(self, inputs_BT, targets_BT, **options):
        limited_rank = os.environ.get("MAX_SEQUENCES_RANK", this_rank())
        is_too_large = len(inputs_BT) > int(os.environ["MAX_SEQUENCES"])
        if limited_rank == this_rank() and is_too_large:
            raise torch.OutOfMemoryError("simulated")
        return super().forward(inputs_BT, targets_BT, **options)


class FailingOrder(window_order.TrainOrder):
    """Fail when the windows of a step's second micro-batch are read."""

    def windows(self, step, micro_step, rank, num_windows):
        if micro_step == 1:
            self._fail_at(str(step))
        return super().windows(step, micro_step, rank, num_windows)

    def _fail_at(self, step: str) -> None:
        if os.environ.get("OOM_AT") == step and os.environ.get("OOM_RANK", "0") == this_rank():
            raise torch.OutOfMemoryError("simulated")
        if this_rank() != "1" or STRUCK.exists():
            return
        if os.environ.get("HANG_AT") == step:
            STRUCK.touch()
            # Otherwise the launcher waits for 30 seconds before it kills this process.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(600)
        if os.environ.get("DIE_AT") == step:
            STRUCK.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def sharded(make: Callable[..., Accelerator]) -> Callable[..., Accelerator]:
    """Return a function that makes an Accelerator which shards with FSDP2, on CPUs too.

    Accelerate itself supports FSDP2 on GPUs only. The states are set as it sets them there.
    """

    def make_sharded(*args, **kwargs):
        result = make(*args, **kwargs)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=os.environ["FSDP"] == "true",
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
        )
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
        return result

    return make_sharded


def count_exchanges() -> Counter:
    """Return a counter of FSDP2's gradient exchanges, and of their bytes by dtype."""
    name = "reduce_scatter_tensor"
    if hasattr(dist, "reduce_scatter_single"):  # its name since torch 2.13
        name = "reduce_scatter_single"
    original = getattr(dist, name)
    exchanges = Counter()

    def counted(*, output, input, **options):
        exchanges[str(input.dtype)] += input.nbytes
        exchanges["exchanges"] += 1
        return original(output=output, input=input, **options)

    setattr(dist, name, counted)
    return exchanges


def main(argv: list[str] | None = None) -> int:
    """Run train.py as the environment variables say."""
    if "MAX_SEQUENCES" in os.environ:
        loss.NextTokenLoss = SmallMemory
    if {"OOM_AT", "HANG_AT", "DIE_AT"} & set(os.environ):
        window_order.TrainOrder = FailingOrder
    if "FSDP" in os.environ:
        accelerator.Accelerator = sharded(accelerator.Accelerator)
    has_recovery = hasattr(FSDPModule, "reset_iter_state")
    if os.environ.get("FSDP_RECOVERY") == "no" and has_recovery:
        del FSDPModule.reset_iter_state
    exchanges = count_exchanges()
    status = train.main(argv)
    if this_rank() == "0" and "EXCHANGES" in os.environ:
        Path(os.environ["EXCHANGES"]).write_text(json.dumps(exchanges))
    return status


if __name__ == "__main__":
    sys.exit(main())
