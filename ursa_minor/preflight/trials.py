"""Trials of a machine: small computations, each in a separate process.

``python -m ursa_minor.preflight.trials NAME ARGUMENTS`` runs the function of this name with these
arguments, a JSON object. It prints a JSON object: ``{"text": ...}``, or ``{"problem": ...}`` if the
trial fails. ``checks.attempt`` starts it, so that a crash or a hang of a trial is a result as well.
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

MAX_SECONDS = 600  # a trial ends itself after this time, in case its parent process has died
TURNS = 9  # training steps; the first is excluded from the median
TINY_GPT2: dict[str, Any] = {
    "vocab_size": 512,
    "sequence_length": 64,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 128,
    "seed": 1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def main() -> None:
    """Run the trial that the command line names, and print its result."""
    name, arguments = sys.argv[1:]
    signal.alarm(MAX_SECONDS)
    status = 0
    try:
        result = {"text": TRIALS[name](**json.loads(arguments))}
    except BaseException as error:
        status = 1
        result = {"problem": f"{type(error).__name__}: {first_line(error)}"[:300]}
    # On a separate line, because a library may have printed something before.
    os.write(1, f"\n{json.dumps(result)}\n".encode())
    os._exit(status)  # a normal exit could hang in a library


def training_step(*, device: str, precision: str, compiled: bool = False) -> str:
    """Train a tiny GPT-2, and return the median time of a training step as text.

    Its steps alternate with those of another tiny GPT-2 in fp32 without compilation, which is the
    reference.

    Args:
        precision: ``no`` (fp32), ``bf16`` or ``fp16`` by autocast.

    Raises:
        RuntimeError: a loss or a gradient is not finite.
    """
    steps = _steps(device, precision, compiled)
    plain_steps = _steps(device, "no", False)
    times = []
    plain_times = []
    for _ in range(TURNS):
        times.append(next(steps))
        plain_times.append(next(plain_steps))

    milliseconds = 1000 * statistics.median(times[1:])
    plain_milliseconds = 1000 * statistics.median(plain_times[1:])
    text = f"a step of a tiny GPT-2 takes {milliseconds:.1f} ms on {device}"
    if compiled:
        text = f"compiled in {times[0]:.0f} s, then {text}"
    if compiled or precision != "no":
        text += f", and {plain_milliseconds:.1f} ms in fp32 without compilation"
        text += " (a tiny model gains little)"
    return text


def _steps(device: str, precision: str, compiled: bool) -> Iterator[float]:
    """Train a tiny GPT-2, and yield the seconds that each training step takes."""
    torch.manual_seed(1)
    module = NextTokenLoss(build(keys.Model(**TINY_GPT2), eos_token_id=0)).to(device)
    loss_of = torch.compile(module) if compiled else module
    ids = torch.randint(0, 16, (4, 65), device=device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    device_type = torch.device(device).type
    half_dtype = HALF_DTYPES.get(precision)
    while True:
        start = time.perf_counter()
        with torch.autocast(device_type, dtype=half_dtype, enabled=half_dtype is not None):
            loss = loss_of(ids[:, :-1], ids[:, 1:])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        if not (loss.isfinite() and norm.isfinite()):
            raise RuntimeError(f"loss {loss.item()}, gradient norm {norm.item()}: not finite")
        optimizer.step()
        optimizer.zero_grad()
        _finish(device)
        yield time.perf_counter() - start


def all_reduce(*, backend: str, megabytes: int = 64) -> str:
    """Sum fp32 values over the processes of the launcher, and return the bandwidth as text.

    A ring moves 2 (n - 1) / n of the bytes over each of its links. The speed of a link is what
    NCCL's tests call the bus bandwidth. If one process raises an error or dies, the launcher ends
    them all.

    Args:
        backend: ``nccl``, with GPU i for process i, or ``gloo`` on the CPU.
        megabytes: size of the values, in MiB.

    Raises:
        RuntimeError: the sum is wrong.
    """
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    count = dist.get_world_size()
    values = torch.full((megabytes * 2**18,), dist.get_rank() + 1.0, device=device)
    for _ in range(2):  # the first time, connections are established
        start = time.perf_counter()
        dist.all_reduce(values)
        _finish(device)
        seconds = time.perf_counter() - start
    # The first sum is 1 + ... + n on each process, the second n times as much.
    if not (values == count * count * (count + 1) / 2).all():
        raise RuntimeError("the sum over the processes is wrong")
    dist.destroy_process_group()
    bytes_per_second = 2 * (count - 1) / count * values.nbytes / seconds
    return (
        f"{backend}, {count} processes: {bytes_per_second / 1e9:.2f} GB/s over each link of the "
        f"ring, which is 2 (n - 1) / n x bytes / seconds"
    )


def _finish(device: str | torch.device) -> None:
    """Wait until a GPU has finished its queued work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


TRIALS = {trial.__name__: trial for trial in (training_step, all_reduce)}

if __name__ == "__main__":
    main()
