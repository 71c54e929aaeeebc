"""The memory of a training step on a card: measured, beside what ursa_minor/preflight/estimate.py says.

    python benchmarks/memory_card.py --json memory.json                              # on a card
    ... --recipes recipes/gpt2_124m.yaml --micro_batch 16 64 --checkpointing none    # some of the cases
    ... --shards 2 --recipes recipes/gpt2_124m.yaml --micro_batch 16                 # FSDP2 on two cards

Each case is updates of two micro-batches with the recipe's optimizer, prepared as train.py prepares them: the gradients
of the first are there when the second is computed, and the moments are there when the last update, which is measured,
begins. allocated is the CUDA allocator's peak, reserved what it has taken for that from the driver. Cases that the JSON
has already are not measured again: a run that was stopped continues.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import gc
import itertools
import json
import subprocess
from importlib.metadata import version

import torch

from benchmarks.runs import ROOT, commit, write_json
from ursa_minor.base import gpus, paths
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput, is_out_of_memory
from ursa_minor.machine import device as hardware
from ursa_minor.machine.accelerator import make_accelerator, prepare, sync_gradients
from ursa_minor.model.build import build
from ursa_minor.model.loss import loss_module
from ursa_minor.optim import optimizers, update
from ursa_minor.preflight import estimate
from ursa_minor.recipe import keys, loading

RECIPES = [f"recipes/{name}.yaml" for name in ("gpt2_124m", "gpt2_350m", "llama_124m")]
ACCUMULATION, UPDATES = 2, 3
# What makes it another one.
CASE = (
    "recipe",
    "precision",
    "compiled",
    "checkpointing",
    "shards",
    "micro_batch",
)
FSDP = ROOT / "accelerate_configs" / "fsdp2_x8.yaml"


def measure(recipe_path: str, checkpointing: str, micro_batches: list[int]) -> None:
    """Measure a recipe at each micro-batch, as accelerate has launched this process; print a JSON line for each."""
    accelerator = make_accelerator(hardware.this_device())
    for micro_batch in micro_batches:
        row = {"micro_batch": micro_batch}
        try:
            peaks(recipe_path, checkpointing, micro_batch, accelerator)
            row |= {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
            }
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            row["problem"] = "out of memory"
        accelerator.free_memory()  # it keeps what it has prepared
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        if accelerator.is_main_process:
            print(json.dumps(row), flush=True)


def peaks(recipe_path: str, checkpointing: str, micro_batch: int, accelerator) -> None:
    """Do the updates, FSDP2 exchanging gradients in each micro-batch; the peaks are then those of the last one."""
    recipe = read(recipe_path, checkpointing, micro_batch, accelerator.num_processes)
    model = build(recipe.model, eos_token_id=0).to(accelerator.device)
    optimizer = optimizers.build(model, recipe.optimizer, shard=recipe.optimizer.shard_optimizer)
    module, optimizer = prepare(loss_module(model, recipe.loss, 0), optimizer, accelerator)
    inputs_BT = torch.zeros(
        micro_batch, recipe.model.sequence_length, dtype=torch.int64, device=accelerator.device
    )
    targets_BT = inputs_BT.clone()
    for number in range(UPDATES):
        if number + 1 == UPDATES:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        loss = torch.zeros((), device=accelerator.device)
        for micro_step in range(ACCUMULATION):
            exchange = micro_step + 1 == ACCUMULATION or accelerator.is_fsdp2
            with sync_gradients(module, accelerator, enabled=exchange):
                losses = module(inputs_BT, targets_BT, with_cross_entropy=True)
                accelerator.backward(losses.objective / ACCUMULATION)
            loss += losses.cross_entropy.detach() / ACCUMULATION
        update.update(
            optimizer,
            list(model.parameters()),
            loss,
            max_grad_norm=recipe.optimizer.max_grad_norm,
            scaler=accelerator.scaler,
            reduce_mean=lambda tensor: accelerator.reduce(tensor.to(accelerator.device), "mean"),
        )


def read(recipe_path: str, checkpointing: str, micro_batch: int, processes: int) -> keys.Recipe:
    """Return the recipe with a step of two such micro-batches."""
    recipe = loading.load_recipe(paths.find_from_anywhere(Path(recipe_path)))
    tokens = ACCUMULATION * processes * micro_batch * recipe.model.sequence_length
    step = {"tokens_per_step": tokens, "per_device_train_batch_size": micro_batch}
    return keys.replace(recipe, gradient_checkpointing=checkpointing, **step)


def launched(device: hardware.Device, case: dict, micro_batches: list[int]):
    """Measure in processes that accelerate starts, as it starts train.py; yield a row a micro-batch."""
    stem = gpus.preset(device.name)
    yaml = FSDP if case["shards"] > 1 else ROOT / "accelerate_configs" / f"{stem}.yaml"
    command = [
        "accelerate",
        "launch",
        "--config_file",
        str(yaml),
        "--num_processes",
        str(case["shards"]),
    ]
    command += [
        "--mixed_precision",
        case["precision"],
        "--dynamo_backend",
        "inductor" if case["compiled"] else "no",
    ]
    command += [
        __file__,
        "--measure",
        case["recipe"],
        case["checkpointing"],
        *map(str, micro_batches),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("{"):
                yield case | json.loads(line)
    if process.returncode:
        raise BadInput(f"{' '.join(command)}: ended with {process.returncode}", status=1)


def estimated(row: dict) -> int:
    """Return what the memory model says of a case, without CUDA's context."""
    recipe = read(row["recipe"], row["checkpointing"], row["micro_batch"], row["shards"])
    sharded = ("weights", "half copies", "gradients", "moments") if row["shards"] > 1 else ()
    parts = estimate.memory(
        estimate.shape_of(recipe.model),
        micro_batch=row["micro_batch"],
        half=row["precision"] != "no",
        compiled=row["compiled"],
        checkpointing=row["checkpointing"],
        shards=dict.fromkeys(sharded, row["shards"]),
    )
    return round(sum(size for name, size in parts.items() if name != "context"))


def told(row: dict) -> str:
    """Return a case's line of the table."""
    head = f"{Path(row['recipe']).stem:12} {'compiled' if row['compiled'] else 'eager':9}{row['checkpointing']:14}"
    head += f"{row['shards']:6}  {row['micro_batch']:11}"
    if "problem" in row:
        return f"{head}  {row['problem']}"
    figures = "".join(
        f"{row[name] / 2**30:11.2f}" for name in ("allocated", "reserved", "estimated")
    )
    return f"{head}{figures}  {row['ratio']:11.3f}"


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Measure every case that the JSON does not have."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipes",
        nargs="+",
        type=paths.argument,
        default=RECIPES,
        help="default: GPT-2 124M and 350M, a Llama of 124M",
    )
    parser.add_argument("--micro_batch", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128])
    parser.add_argument("--compiled", nargs="+", default=["no", "yes"], choices=["no", "yes"])
    parser.add_argument(
        "--checkpointing",
        nargs="+",
        default=["none", "mlp", "full"],
        choices=["none", "mlp", "full"],
    )
    parser.add_argument(
        "--shards",
        type=int,
        default=1,
        help="processes of FSDP2; 1: without (default: %(default)s)",
    )
    parser.add_argument("--json", type=paths.path_argument, help="where the figures are kept")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        recipe, checkpointing, *micro_batches = args.measure
        measure(recipe, checkpointing, list(map(int, micro_batches)))
        return 0
    device = hardware.this_device()
    if device.kind != "cuda":
        raise BadInput("PyTorch sees no card; run this on a machine that has one")
    if args.json is None:
        raise BadInput(
            "--json PATH is missing: measuring takes long, and the figures are kept there on the way"
        )
    record = {
        "machine": device.name,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "rows": [],
    }
    if args.json.is_file():
        record = json.loads(args.json.read_text())
    print(f"machine      {device.name}, torch {torch.__version__}; GiB")
    print(
        "recipe       compiled checkpointing shards  micro-batch  allocated   reserved  estimated  / allocated"
    )
    for recipe, compiled, checkpointing in itertools.product(
        args.recipes, args.compiled, args.checkpointing
    ):
        case = {"recipe": recipe, "precision": device.precision, "compiled": compiled == "yes"}
        case |= {"checkpointing": checkpointing, "shards": args.shards}
        known = {tuple(row[name] for name in CASE) for row in record["rows"]}
        left = [size for size in args.micro_batch if (*case.values(), size) not in known]
        for row in launched(device, case, left) if left else ():
            row |= {"commit": commit(), "estimated": estimated(row)}
            row |= (
                {} if "problem" in row else {"ratio": round(row["estimated"] / row["allocated"], 3)}
            )
            record["rows"].append(row)
            write_json(args.json, record)
            print(told(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
