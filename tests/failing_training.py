"""train.py on a machine that it is not: out of memory where it is told, FSDP2 on CPUs, a process that hangs or dies.

Environment: MOST = the largest micro-batch that fits (of process MOST_RANK only, where set); OUT_AT = "STEP": memory
runs out in that step's second micro-batch (on process OUT_RANK); FSDP = "true" or "false", reshard_after_forward: the
model is sharded as `accelerate launch` with fsdp2_x8.yaml would do it, but over gloo; HANG_AT or DIE_AT = "STEP": process
1 sleeps or is killed there, the first time (a file `struck` tells); RECOVERS = no: FSDP2 as before
torch 2.13; EXCHANGES = file: process 0 writes there how often FSDP2 exchanges gradients, and their bytes by type.
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule

import train
from ursa_minor.data.loading import order as window_order
from ursa_minor.machine import accelerator
from ursa_minor.model import loss

RANK = "0"


class SmallMemory(loss.NextTokenLoss):
    """A loss that more than so many sequences at once are too much for."""

    def forward(self, inputs_BT, targets_BT, **how):
        if os.environ.get("MOST_RANK", RANK) == RANK and len(inputs_BT) > int(os.environ["MOST"]):
            raise torch.OutOfMemoryError("simulated")
        return super().forward(inputs_BT, targets_BT, **how)


class Struck(window_order.TrainOrder):
    """Something happens when the windows of a micro-batch are asked for."""

    def windows(self, step, micro_step, rank, num_windows):
        where = str(step) if micro_step == 1 else ""
        if os.environ.get("OUT_AT") == where and os.environ.get("OUT_RANK", "0") == RANK:
            raise torch.OutOfMemoryError("simulated")
        if RANK == "1" and not Path("struck").exists():
            if os.environ.get("HANG_AT") == where:
                Path("struck").touch()
                signal.signal(
                    signal.SIGTERM, signal.SIG_DFL
                )  # or the launcher waits 30 s before it kills
                time.sleep(600)
            if os.environ.get("DIE_AT") == where:
                Path("struck").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().windows(step, micro_step, rank, num_windows)


def sharded(make):
    """Make the Accelerator of a machine with cards: Accelerate itself has FSDP2 on cards only."""

    def replaced(*args, **kwargs):
        made = make(*args, **kwargs)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=os.environ["FSDP"] == "true",
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
        )
        PartialState._shared_state["distributed_type"] = (
            DistributedType.FSDP
        )  # as AcceleratorState does on cards
        AcceleratorState._shared_state.update(
            distributed_type=DistributedType.FSDP, fsdp_plugin=plugin
        )
        return made

    return replaced


def count_exchanges(sent: Counter) -> None:
    """Have FSDP2's exchanges of gradients counted in ``sent``, and the bytes of each type."""
    name = (
        "reduce_scatter_single"
        if hasattr(dist, "reduce_scatter_single")
        else "reduce_scatter_tensor"
    )  # torch 2.13
    real = getattr(dist, name)

    def counted(*, output, input, **how):
        sent[str(input.dtype)] += input.nbytes
        sent["exchanges"] += 1
        return real(output=output, input=input, **how)

    setattr(dist, name, counted)


def main(argv: list[str] | None = None) -> int:
    """Train there."""
    global RANK
    RANK = os.environ.get("RANK", "0")
    if "MOST" in os.environ:
        loss.NextTokenLoss = SmallMemory
    if {"OUT_AT", "HANG_AT", "DIE_AT"} & set(os.environ):
        window_order.TrainOrder = Struck
    if "FSDP" in os.environ:
        accelerator.Accelerator = sharded(accelerator.Accelerator)
    if os.environ.get("RECOVERS") == "no" and hasattr(
        FSDPModule, "reset_iter_state"
    ):  # torch 2.11 lacks it
        del FSDPModule.reset_iter_state
    count_exchanges(sent := Counter())
    status = train.main(argv)
    if RANK == "0" and "EXCHANGES" in os.environ:
        Path(os.environ["EXCHANGES"]).write_text(json.dumps(sent))
    return status


if __name__ == "__main__":
    sys.exit(main())
