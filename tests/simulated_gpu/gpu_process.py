"""Run a script of the product in a process with a simulated GPU.

Environment variables:

- SCRIPT: the script's name without .py
- GPU_MODEL: a ``simulated_cuda.GpuModel`` as JSON
- KILL_AT: kill the process with SIGKILL at this update, as soon as a checkpoint is on disk
- INIT_SCALE: initial scale of fp16 gradients
- LOSS_ROWS: rows of logits that are computed at a time

The record of the simulated GPU is written to gpu.json (gpuN.json for rank N).
"""

import importlib
import itertools
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from recorded_training import call_after, kill_this_process
from simulated_cuda import GpuModel, SimulatedGpu, simulate

from ursa_minor.model import loss
from ursa_minor.optim import update
from ursa_minor.preflight import checks, trials

RECORDED_VALUES = (
    "allocator_settings",
    "backend",
    "compile_calls",
    "ddp_arguments",
    "exchanged_bytes",
    "profiled_activities",
)
RECORDED_COUNTERS = ("waits", "kernels", "products", "watched")


def main(argv: list[str] | None = None) -> int:
    """Run the script on the simulated GPU."""
    gpu = simulate(read_gpu_model())
    waits_at_updates: list[Counter] = []

    def after_update(_) -> None:
        waits_at_updates.append(Counter(gpu.waits))
        if len(waits_at_updates) == int(os.environ.get("KILL_AT", "0")):
            wait_for_checkpoint()
            kill_this_process()

    call_after(update, "update", after_update)
    loss.NextTokenLoss.rows = None
    if "LOSS_ROWS" in os.environ:
        loss.NextTokenLoss.rows = int(os.environ["LOSS_ROWS"])
    if "INIT_SCALE" in os.environ:
        set_initial_scale(float(os.environ["INIT_SCALE"]))
    shrink_trials()

    script = importlib.import_module(os.environ["SCRIPT"])
    try:
        return script.main(argv)
    finally:
        rank = os.environ.get("RANK", "")
        record = recorded_use(gpu, waits_at_updates)
        Path(f"gpu{rank}.json").write_text(json.dumps(record, default=str))


def read_gpu_model() -> GpuModel:
    """Return the simulated model that the environment requests."""
    fields = json.loads(os.environ["GPU_MODEL"])
    fields["capability"] = tuple(fields["capability"])
    return GpuModel(**fields)


def wait_for_checkpoint() -> None:
    """Wait until the checkpoint that is being written is on disk."""
    run_name = sys.argv[sys.argv.index("--run_name") + 1]
    checkpoints = Path("runs", run_name, "checkpoints")
    while not list(checkpoints.glob("step-*")):
        time.sleep(0.01)


def set_initial_scale(scale: float) -> None:
    """Change the default initial scale of torch's gradient scaler."""
    device, _, *rest = torch.amp.GradScaler.__init__.__defaults__
    torch.amp.GradScaler.__init__.__defaults__ = (device, scale, *rest)


def shrink_trials() -> None:
    """Make the trials of the setup check short, and run them in this process, which has the GPU."""
    trials.TURNS = 2
    functions = trials.TRIALS | {"all_reduce": lambda **_: "is tested with two GPUs"}

    def attempt(command: list[str], seconds: float) -> dict:
        name, arguments = command[-2:]
        return {"text": functions[name](**json.loads(arguments))}

    checks.attempt = attempt


def recorded_use(gpu: SimulatedGpu, waits_at_updates: list[Counter]) -> dict:
    """Return the record of the GPU, and the waits of each update in addition."""
    record = {name: getattr(gpu, name) for name in RECORDED_VALUES}
    for name in RECORDED_COUNTERS:
        record[name] = with_text_keys(getattr(gpu, name))
    record["updates"] = []
    for before, after in itertools.pairwise([Counter(), *waits_at_updates]):
        record["updates"].append(with_text_keys(after - before))
    return record


def with_text_keys(counts: Counter) -> dict[str, int]:
    """Return a counter with keys (what, place) as a dict with keys "what place"."""
    return {f"{what} {place}": count for (what, place), count in counts.items()}


if __name__ == "__main__":
    sys.exit(main())
