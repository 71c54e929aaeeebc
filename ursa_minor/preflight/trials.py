"""Real trials of a machine: ``python -m ursa_minor.preflight.trials NAME ARGUMENTS`` prints a JSON object.

checks.attempt runs each in its own process, so that a crash or a hang is an answer too. A trial returns its line.
"""

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ursa_minor.base.errors import first_line
from ursa_minor.model.build import build
from ursa_minor.model.dtypes import HALF_DTYPES
from ursa_minor.model.loss import NextTokenLoss
from ursa_minor.recipe import keys

TURNS = 9  # the first is left out of the medians
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "sequence_length": 64,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 128,
    "seed": 1,
}
SHAPE |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def main() -> None:
    """Run the trial that the command names; print {"text": its line}, or {"problem": one line}."""
    name, arguments = sys.argv[1:]
    signal.alarm(600)  # should the parent die
    try:
        found = {"text": TRIALS[name](**json.loads(arguments))}
    except BaseException as error:
        found = {"problem": f"{type(error).__name__}: {first_line(error)}"[:300]}
    os.write(1, f"\n{json.dumps(found)}\n".encode())  # whatever a library has printed before
    os._exit("problem" in found)  # a library may hang at exit


def training_step(*, device: str, precision: str, compiled: bool = False) -> str:
    """Train a tiny GPT-2, each step in turn with one of another in plain fp32; say the milliseconds a step, medians.

    ``precision``: no (fp32), bf16 or fp16 by autocast. Raises RuntimeError when a loss or a gradient is not finite.
    """
    own, plain = _steps(device, precision, compiled), _steps(device, "no", False)
    first, *turns = [(next(own), next(plain)) for _ in range(TURNS)]
    seconds, fp32_seconds = (statistics.median(taken) for taken in zip(*turns, strict=True))
    text = f"compiled in {first[0]:.0f} s, then " if compiled else ""
    text += f"a step of a tiny GPT-2 takes {1000 * seconds:.1f} ms on {device}"
    if compiled or precision != "no":
        text += (
            f"; in plain fp32, beside it, {1000 * fp32_seconds:.1f} ms (a tiny model gains little)"
        )
    return text


def _steps(device: str, precision: str, compiled: bool) -> Iterator[float]:
    """Yield the seconds of one training step after the other, of a GPT-2 of SHAPE."""
    torch.manual_seed(1)
    module = NextTokenLoss(build(keys.Model(**SHAPE), eos_token_id=0)).to(device)
    run = torch.compile(module) if compiled else module
    ids = torch.randint(0, 16, (4, 65), device=device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    half = HALF_DTYPES.get(precision)
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
        yield time.perf_counter() - start


def all_reduce(*, backend: str, megabytes: int = 64) -> str:
    """Sum ``megabytes`` of fp32 over the launcher's processes; say the bytes a second over each link of the ring.

    A ring moves 2 (n - 1) / n of the bytes over each link (NCCL's tests call that the bus bandwidth). nccl: process i
    takes card i. One process that dies or raises, as on a wrong sum, ends them all.
    """
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if backend == "nccl"
        else torch.device("cpu")
    )
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    count = dist.get_world_size()
    values = torch.full((megabytes * 2**18,), dist.get_rank() + 1.0, device=device)
    for _ in range(2):  # the first one connects
        start = time.perf_counter()
        dist.all_reduce(values)
        _finish(device)
        seconds = time.perf_counter() - start
    if not (values == count * count * (count + 1) / 2).all():
        raise RuntimeError("the sum over the processes is wrong")
    dist.destroy_process_group()
    speed = 2 * (count - 1) / count * values.nbytes / seconds
    return f"{backend}, {count} processes: {speed / 1e9:.2f} GB/s over the ring (2 (n - 1) / n x bytes / seconds)"


def _finish(device: str | torch.device) -> None:
    """Wait until a card has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


TRIALS = {work.__name__: work for work in (training_step, all_reduce)}

if __name__ == "__main__":
    main()
