"""Real trials of a machine: ``python -m pretrain.machine.probes NAME ARGUMENTS FILE`` writes a JSON object to FILE.

doctor.attempt runs each in a process of its own, so that a crash or a hang is an answer too.
"""

import itertools
import json
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing import ProcessRaisedException

from pretrain.base.errors import first_line
from pretrain.recipe import keys

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
TURNS = 9  # the first is left out of the medians
ORPHAN_SECONDS = 600
SHAPE: dict[str, Any] = {"vocab_size": 512, "sequence_length": 64, "n_layer": 2, "n_head": 2, "n_embd": 128, "seed": 1}
SHAPE |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def main() -> None:
    """Run the trial that the command names; write what it returned, or {"problem": one line}, to the file that it names."""
    name, arguments, answer = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is a line, not a file of gigabytes
    signal.alarm(ORPHAN_SECONDS)  # should the parent die
    found: dict[str, Any]
    try:
        found = TRIALS[name](**json.loads(arguments))
    except ProcessRaisedException as error:  # the last line of another's traceback
        found = {"problem": str(error).strip().splitlines()[-1][:300]}
    except BaseException as error:
        found = {"problem": f"{type(error).__name__}: {first_line(error)}"[:300]}
    Path(answer).write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # a library may hang at exit


def training_step(*, device: str, precision: str, compiled: bool = False) -> dict[str, float]:
    """Train a tiny GPT-2, each step in turn with one of another in plain fp32; return seconds a step, medians.

    Keys: ``first_seconds`` (compiling included), ``seconds``, ``fp32_seconds`` (of the other), ``loss``.
    ``precision``: no (fp32), bf16 or fp16 by autocast. Raises RuntimeError when a loss or a gradient is not finite.
    """
    turns = zip(_steps(device, precision, compiled), _steps(device, "no", False), strict=True)
    own, plain = zip(*itertools.islice(turns, TURNS), strict=True)
    seconds, fp32_seconds = (statistics.median(taken for taken, _ in steps[1:]) for steps in (own, plain))
    return {"first_seconds": own[0][0], "seconds": seconds, "fp32_seconds": fp32_seconds, "loss": own[-1][1]}


def tiny_model() -> nn.Module:
    """Build what the trials train: GPT-2's parts, of SHAPE; (B, T) int64 inputs and targets to a loss."""
    from pretrain.model.build import build  # it imports Transformers, which other trials do without
    from pretrain.model.loss import NextTokenLoss

    return NextTokenLoss(build(keys.Model(**SHAPE), eos_token_id=0))


def _steps(device: str, precision: str, compiled: bool) -> Iterator[tuple[float, float]]:
    """Yield the seconds and the loss of one training step after the other."""
    torch.manual_seed(1)
    module = tiny_model().to(device)
    run = torch.compile(module) if compiled else module
    ids = torch.randint(0, 16, (4, 65), device=device)
    optimizer, half = torch.optim.AdamW(module.parameters(), lr=1e-3), HALF.get(precision)
    while True:
        start = time.perf_counter()
        with torch.autocast(torch.device(device).type, dtype=half, enabled=half is not None):
            loss = run(ids[:, :-1], ids[:, 1:])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        if not (loss.isfinite() and norm.isfinite()):
            raise RuntimeError(f"loss {loss.item()}, gradient norm {norm.item()}: not finite")
        optimizer.step()
        optimizer.zero_grad()
        _finish(device)
        yield time.perf_counter() - start, loss.item()


def attention(*, device: str, precision: str, length: int = 1024) -> dict[str, float | str]:
    """Run causal attention forward and backward, 4 x 12 heads x ``length`` x 64; return its ``seconds``.

    ``kernel`` is the one that training takes: cudnn, flash, efficient or math. Raises RuntimeError where it does not run.
    """
    from pretrain.model.attention import kernel_taken  # it imports Transformers, too

    model = keys.Model(**SHAPE | {"n_embd": 768, "n_head": 12, "sequence_length": length})
    half, how = HALF[precision], {"document_mask": False, "compiled": True}
    kernel = kernel_taken(model, 4, torch.device(device), half, **how)
    query, key, value = torch.randn(3, 4, 12, length, 64, device=device, dtype=half, requires_grad=True)
    for _ in range(3):
        start = time.perf_counter()
        F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
        _finish(device)
        seconds = time.perf_counter() - start
    return {"kernel": kernel, "seconds": seconds}


def all_reduce(*, count: int, backend: str, megabytes: int = 64) -> dict[str, float]:
    """Sum ``megabytes`` of fp32 over ``count`` processes; return ``bytes_per_second`` over each link of the ring.

    A ring moves 2 (n - 1) / n of the bytes over each link (NCCL's tests call that the bus bandwidth). nccl: process i
    takes card i. One process that dies or raises, as on a wrong sum, ends them all.
    """
    with tempfile.TemporaryDirectory(prefix="meeting-") as folder:
        torch.multiprocessing.spawn(_sum, (count, backend, megabytes, folder), count)
        return {"bytes_per_second": float(Path(folder, "speed").read_text())}


def _sum(rank: int, count: int, backend: str, megabytes: int, folder: str) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=count)
    values = torch.full((megabytes * 2**18,), rank + 1.0, device=device)
    dist.all_reduce(values)
    if not (values == count * (count + 1) / 2).all():
        raise RuntimeError("the sum over the processes is wrong")
    dist.barrier()
    _finish(device)
    start = time.perf_counter()
    dist.all_reduce(values)
    _finish(device)
    seconds = time.perf_counter() - start
    dist.destroy_process_group()
    if rank == 0:
        Path(folder, "speed").write_text(str(2 * (count - 1) / count * values.nbytes / seconds))


def _finish(device: str | torch.device) -> None:
    """Wait until a card has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


TRIALS = {work.__name__: work for work in (training_step, attention, all_reduce)}

if __name__ == "__main__":
    main()
