"""A script of the product in a process that has a pretended card.

Environment: SCRIPT = its name; CARD = a ``simulated_cuda.GpuModel`` as JSON. KILL_AT = N kills the process with SIGKILL at the
N-th update, when a checkpoint is on disk; SCALE = what fp16 gradients are multiplied by at first; ROWS = of the logits that
are made at once. What became known of the card is written to card.json.
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
from simulated_cuda import GpuModel, Machine, simulate

from ursa_minor.model import loss
from ursa_minor.optim import update
from ursa_minor.preflight import checks, trials

OF_THE_CARD = ("allocator", "backend", "compiled", "exchanged", "profiled", "wrapped")


def main(argv: list[str] | None = None) -> int:
    """Run the script with the card."""
    given = json.loads(os.environ["CARD"])
    machine = simulate(GpuModel(**given | {"capability": tuple(given["capability"])}))
    updates = []  # of each: the waits until then

    def count(_) -> None:
        updates.append(Counter(machine.waits))
        if len(updates) == int(os.environ.get("KILL_AT", "0")):
            run_name = sys.argv[sys.argv.index("--run_name") + 1]
            while not list(Path("runs", run_name, "checkpoints").glob("step-*")):
                time.sleep(0.01)  # the one that was begun
            kill_this_process()

    call_after(update, "update", count)
    loss.NextTokenLoss.rows = int(os.environ["ROWS"]) if "ROWS" in os.environ else None
    device, scale, *rest = torch.amp.GradScaler.__init__.__defaults__
    torch.amp.GradScaler.__init__.__defaults__ = (
        device,
        float(os.environ.get("SCALE", scale)),
        *rest,
    )
    shrink_trials()
    try:
        return importlib.import_module(os.environ["SCRIPT"]).main(argv)
    finally:
        Path(f"card{os.environ.get('RANK', '')}.json").write_text(
            json.dumps(collected_counts(machine, updates), default=str)
        )


def shrink_trials() -> None:
    """Let the set-up check's trials be small, and run in this process, which has the card."""
    trials.TURNS = 2
    works = trials.TRIALS | {"all_reduce": lambda **_: "is tried with two cards"}
    checks.attempt = lambda command, seconds: {
        "text": works[command[-2]](**json.loads(command[-1]))
    }


def collected_counts(machine: Machine, updates: list[Counter]) -> dict:
    """Return what became known of the card; ``updates``: what the host waited for in each."""
    named = lambda counts: {f"{what} {place}": count for (what, place), count in counts.items()}  # noqa: E731
    return {
        **{name: getattr(machine, name) for name in OF_THE_CARD},
        **{
            name: named(getattr(machine, name))
            for name in ("waits", "kernels", "products", "watched")
        },
        "updates": [
            named(now - before) for before, now in itertools.pairwise([Counter(), *updates])
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
