"""What several cards compile, hold and exchange in an update of GPT-2 124M at full width: counted, not timed.

    .venv-null-card/bin/python benchmarks/several_cards.py --json benchmarks/results/several-cards.json

Each case is launched on simulated cards (tests/card/null), as train.py is launched on real ones, for updates of two
micro-batches. The first process counts graphs and kernels that Inductor plans. Of eight the others wait for it, and take
its compiled code from the cache; equal graphs are then planned once.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import collections
import json
import os
import subprocess
import tempfile
import time

import torch
from torch._inductor import config as inductor
from torch._inductor import scheduler

from benchmarks import memory_card, traffic
from benchmarks.runs import ROOT, commit, write_json
from pretrain.machine import hardware
from pretrain.machine.accelerator import make_accelerator

PLAIN = {
    "cards": 2,
    "yaml": "h100_x8",
    "optimize_ddp": True,
    "checkpointing": "none",
    "exchange_each": True,
    "changes": {},
}
CASES = {
    "DDP": {},
    "DDP, optimize_ddp off": {"optimize_ddp": False},
    "DDP, checkpointing full": {"checkpointing": "full"},
    "DDP, checkpointing full, optimize_ddp off": {"checkpointing": "full", "optimize_ddp": False},
    "DDP, Muon": {"changes": {"optimizer": "muon"}},
    "ZeRO-1": {"yaml": "zero1_x8", "changes": {"shard_optimizer": True}},
    "FSDP2, in each micro-batch": {"yaml": "fsdp2_x8"},
    "FSDP2, once an update": {"yaml": "fsdp2_x8", "exchange_each": False},
    "FSDP2, once an update, 8 cards": {"yaml": "fsdp2_x8", "exchange_each": False, "cards": 8},
    "DDP, 8 cards": {"cards": 8},
    "DDP, 8 cards, optimize_ddp off": {"cards": 8, "optimize_ddp": False},
}


def measure(case: dict) -> None:
    """Measure a case in one process of the launch; the first prints a JSON line."""
    torch._dynamo.config.optimize_ddp = case["optimize_ddp"]
    inductor.force_disable_caches = case["cards"] == 2  # or equal graphs of one process are planned once
    accelerator = make_accelerator(hardware.this_device())
    recipe = memory_card.read(
        str(ROOT / "recipes" / "gpt2_124m.yaml"),
        case["checkpointing"],
        case["micro_batch"],
        accelerator.num_processes,
        **case["changes"],
    )
    graphs, after_update, compiled = [], [], Path(case["folder"]) / "compiled"
    generate, do_update, backward = scheduler.Scheduler.codegen, memory_card.update.update, accelerator.backward
    sync_gradients = memory_card.sync_gradients

    def noted(self):
        nodes = [node for node in self.nodes if not isinstance(node, scheduler.NopKernelSchedulerNode)]
        graphs.append([(traffic.kind(node), int(node.get_read_write_buffers_sizes())) for node in nodes])
        return generate(self)

    def counted(*args, **how):
        outcome = do_update(*args, **how)
        after_update.append(len(graphs))
        return outcome

    def first_backward(loss):
        backward(loss)
        compiled.touch()

    def wait(*args, **how):
        compiles = case["cards"] > 2 and not accelerator.is_fsdp2
        while compiles and not (accelerator.is_main_process or compiled.exists()):
            time.sleep(0.5)
        return sync_gradients(*args, **how)

    scheduler.Scheduler.codegen, memory_card.update.update, memory_card.sync_gradients = noted, counted, wait
    if accelerator.is_main_process:
        accelerator.backward = first_backward
    memory_card.peaks(recipe, accelerator, case["exchange_each"])
    if accelerator.is_main_process:
        moved, kernels = collections.Counter(), collections.Counter()
        for name, size in (kernel for graph in graphs for kernel in graph):
            moved[name] += size
            kernels[name] += 1
        beside = sum(moved.values()) - moved[traffic.PRODUCTS] - moved[traffic.ATTENTION]
        row = {"graphs": len(graphs), "graphs_after_each_update": after_update, "kernels": sum(kernels.values())}
        row |= {"by_kind": dict(kernels), "beside_products_and_attention": beside, "pid": os.getpid()}
        row |= {"allocated": torch.cuda.max_memory_allocated(), "held": torch.cuda.memory_allocated()}
        print(json.dumps(row), flush=True)


def launched(case: dict) -> dict:
    """Measure a case in processes that accelerate starts; return its row, with what was exchanged an update."""
    with tempfile.TemporaryDirectory() as folder:
        case = case | {"folder": folder}
        words = [sys.executable, str(ROOT / "tests" / "card" / "null" / "run.py"), "--card", "h100"]
        words += ["--count", str(case["cards"]), "--trace", f"{folder}/trace", "accelerate", "launch", "--config_file"]
        words += [f"accelerate_configs/{case['yaml']}.yaml", "--num_processes", str(case["cards"]), __file__]
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*words, "--measure", json.dumps(case)], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
        if line is None:
            raise SystemExit(f"{case}: ended with {done.returncode}\n{done.stderr[-3000:]}")
        row = json.loads(line)
        exchanged: dict[str, list[int]] = {}
        for words in map(str.split, Path(f"{folder}/trace.{row.pop('pid')}").read_text().splitlines()):
            if words[0] == "nccl" and words[-1].isdigit() and int(words[-1]) > 1024:
                exchanged.setdefault(words[1], []).append(int(words[-1]))
        row["exchanges"] = {
            name: {"calls": len(sizes), "bytes": sum(sizes)} for name, sizes in exchanged.items()
        }  # of all updates
        return row


def main(argv: list[str] | None = None) -> int:
    """Measure the cases that the JSON has not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("several-cards.json"), help="default: %(default)s")
    parser.add_argument("--micro_batch", type=int, default=16)
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="default: all")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.measure:
        measure(json.loads(asked.measure))
        return 0
    record = json.loads(asked.json.read_text()) if asked.json.is_file() else {"torch": torch.__version__, "rows": []}
    for name in asked.cases:
        case = {"name": name, "micro_batch": asked.micro_batch} | PLAIN | CASES[name]
        if all(row["name"] != name for row in record["rows"]):
            record["rows"].append(case | launched(case) | {"updates": memory_card.UPDATES, "commit": commit()})
            write_json(asked.json, record)
        row = next(row for row in record["rows"] if row["name"] == name)
        exchanges = ", ".join(
            f"{kind} {one['calls']} x, {one['bytes'] / 1e9:.2f} GB" for kind, one in row["exchanges"].items()
        )
        beside, peak = row["beside_products_and_attention"] / 1e9, row["allocated"] / 2**30
        print(f"{name:42} graphs {row['graphs']} ({row['graphs_after_each_update']}), kernels {row['kernels']}, beside "
              f"products {beside:.1f} GB, peak {peak:.2f} GiB; {exchanges}", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
