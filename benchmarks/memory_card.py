"""Measure the GPU memory of a training step, and compare it with the estimate.

    python benchmarks/memory_card.py --json memory.json
    python benchmarks/memory_card.py --json memory.json --recipes recipes/gpt2_124m.yaml \\
        --micro_batch 16 64 --checkpointing none                            # some cases
    python benchmarks/memory_card.py --json memory.json --recipes recipes/gpt2_124m.yaml \\
        --micro_batch 16 --shards 2                                         # FSDP2 on two GPUs

It prints one line per case: the peak of the memory that the CUDA allocator has handed out
("allocated"), the memory that it has reserved from the driver for this, the estimate of
ursa_minor/preflight/estimate.py in GiB, and estimated / allocated.

A case is three updates of two micro-batches with the recipe's optimizer, prepared as train.py does
it. The peak is that of the last update. At its beginning the moments exist. The gradients of its
first micro-batch exist while the second is computed. Cases that the JSON file contains are not
measured again, so an interrupted command can be repeated.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import gc
import itertools
import json
import subprocess
from collections.abc import Iterator
from importlib.metadata import version

import torch
from accelerate import Accelerator

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

RECIPES = ["recipes/gpt2_124m.yaml", "recipes/gpt2_350m.yaml", "recipes/llama_124m.yaml"]
ACCUMULATION = 2  # micro-batches per update
UPDATES = 3
# The entries of a row that identify a case.
CASE = (
    "recipe",
    "precision",
    "compiled",
    "checkpointing",
    "shards",
    "micro_batch",
)
SHARDED_STATE = ("weights", "half copies", "gradients", "moments")
FSDP = ROOT / "accelerate_configs" / "fsdp2_x8.yaml"
HEADER = (
    "recipe       compiled checkpointing shards  micro-batch  allocated   reserved  "
    "estimated  / allocated"
)

# ---- The measuring process, which accelerate launches


def measure(recipe_path: str, checkpointing: str, micro_batches: list[int]) -> None:
    """Measure a recipe at each micro-batch, and print a line of JSON for each.

    Args:
        recipe_path: relative to the root of the repository.
        checkpointing: value of the key ``gradient_checkpointing``.
        micro_batches: in sequences.
    """
    accelerator = make_accelerator(hardware.this_device())
    for micro_batch in micro_batches:
        row: dict = {"micro_batch": micro_batch}
        try:
            train_updates(recipe_path, checkpointing, micro_batch, accelerator)
            row["allocated"] = torch.cuda.max_memory_allocated()
            row["reserved"] = torch.cuda.max_memory_reserved()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            row["problem"] = "out of memory"
        accelerator.free_memory()  # the accelerator keeps references to models and optimizers
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        if accelerator.is_main_process:
            print(json.dumps(row), flush=True)


def train_updates(
    recipe_path: str, checkpointing: str, micro_batch: int, accelerator: Accelerator
) -> None:
    """Train a few updates. Afterwards the memory peaks of CUDA are those of the last one."""
    recipe = read(recipe_path, checkpointing, micro_batch, accelerator.num_processes)
    device = accelerator.device
    model = build(recipe.model, eos_token_id=0).to(device)
    optimizer = optimizers.build(model, recipe.optimizer, shard=recipe.optimizer.shard_optimizer)
    module, optimizer = prepare(loss_module(model, recipe.loss, 0), optimizer, accelerator)
    shape = (micro_batch, recipe.model.sequence_length)
    inputs_BT = torch.zeros(shape, dtype=torch.int64, device=device)
    targets_BT = inputs_BT.clone()

    for number in range(UPDATES):
        is_last = number + 1 == UPDATES
        if is_last:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        loss = torch.zeros((), device=device)
        for micro_step in range(ACCUMULATION):
            # FSDP2 exchanges gradients in each micro-batch.
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
            reduce_mean=lambda tensor: accelerator.reduce(tensor.to(device), "mean"),
        )


def read(recipe_path: str, checkpointing: str, micro_batch: int, processes: int) -> keys.Recipe:
    """Return a recipe whose update has ACCUMULATION micro-batches of this size per process."""
    recipe = loading.load_recipe(paths.find_from_anywhere(Path(recipe_path)))
    tokens = ACCUMULATION * processes * micro_batch * recipe.model.sequence_length
    return keys.replace(
        recipe,
        gradient_checkpointing=checkpointing,
        tokens_per_step=tokens,
        per_device_train_batch_size=micro_batch,
    )


# ---- The main process


def launch(device: hardware.Device, case: dict, micro_batches: list[int]) -> Iterator[dict]:
    """Measure in processes that accelerate starts, as it starts train.py.

    Args:
        device: the GPU.
        case: the entries of CASE except the micro-batch.
        micro_batches: in sequences.

    Yields:
        A row for each micro-batch.

    Raises:
        BadInput: a process failed.
    """
    config_file = ROOT / "accelerate_configs" / f"{gpus.preset(device.name)}.yaml"
    if case["shards"] > 1:
        config_file = FSDP
    command = ["accelerate", "launch", "--config_file", str(config_file)]
    command += ["--num_processes", str(case["shards"])]
    command += ["--mixed_precision", case["precision"]]
    compiler = "inductor" if case["compiled"] else "no"
    command += ["--dynamo_backend", compiler]
    command += [__file__, "--measure", case["recipe"], case["checkpointing"]]
    command += map(str, micro_batches)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("{"):
                yield case | json.loads(line)
    if process.returncode:
        command_line = " ".join(command)
        raise BadInput(f"{command_line}: ended with {process.returncode}", status=1)


def estimated(row: dict) -> int:
    """Return the estimated bytes of a case, without the CUDA context."""
    recipe = read(row["recipe"], row["checkpointing"], row["micro_batch"], row["shards"])
    shards = {}
    if row["shards"] > 1:
        shards = dict.fromkeys(SHARDED_STATE, row["shards"])
    parts = estimate.memory(
        estimate.shape_of(recipe.model),
        micro_batch=row["micro_batch"],
        half=row["precision"] != "no",
        compiled=row["compiled"],
        checkpointing=row["checkpointing"],
        shards=shards,
    )
    return round(sum(size for name, size in parts.items() if name != "context"))


def table_line(row: dict) -> str:
    """Return the line of a case in the table."""
    recipe = Path(row["recipe"]).stem
    compilation = "compiled" if row["compiled"] else "eager"
    checkpointing = row["checkpointing"]
    shards = row["shards"]
    micro_batch = row["micro_batch"]
    line = f"{recipe:12} {compilation:9}{checkpointing:14}{shards:6}  {micro_batch:11}"
    if "problem" in row:
        problem = row["problem"]
        return f"{line}  {problem}"
    for name in ("allocated", "reserved", "estimated"):
        gibibytes = row[name] / 2**30
        line += f"{gibibytes:11.2f}"
    ratio = row["ratio"]
    return f"{line}  {ratio:11.3f}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipes",
        nargs="+",
        type=paths.argument,
        metavar="PATH",
        default=RECIPES,
        help="Recipes. Default: GPT-2 124M and 350M, and a Llama of 124M.",
    )
    parser.add_argument(
        "--micro_batch",
        type=int,
        nargs="+",
        metavar="N",
        default=[4, 8, 16, 32, 64, 128],
        help="Micro-batches in sequences. Default: %(default)s.",
    )
    parser.add_argument(
        "--compiled",
        nargs="+",
        default=["no", "yes"],
        choices=["no", "yes"],
        help="Whether to use torch.compile. Default: both.",
    )
    parser.add_argument(
        "--checkpointing",
        nargs="+",
        default=["none", "mlp", "full"],
        choices=["none", "mlp", "full"],
        help="Gradient checkpointing. Default: all three.",
    )
    parser.add_argument(
        "--shards",
        type=int,
        metavar="N",
        default=1,
        help="Processes of FSDP2, or 1 to train without it. Default: %(default)s.",
    )
    parser.add_argument(
        "--json",
        type=paths.path_argument,
        metavar="PATH",
        help="File for the figures. Each case is written as soon as it is measured. Required.",
    )
    parser.add_argument(
        "--measure",
        nargs="+",
        help=argparse.SUPPRESS,
    )
    return parser.parse_args(argv)


def cases(args: argparse.Namespace, device: hardware.Device) -> Iterator[dict]:
    """Yield the cases of the command line, without their micro-batches."""
    for recipe, compiled, checkpointing in itertools.product(
        args.recipes, args.compiled, args.checkpointing
    ):
        yield {
            "recipe": recipe,
            "precision": device.precision,
            "compiled": compiled == "yes",
            "checkpointing": checkpointing,
            "shards": args.shards,
        }


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Measure every case that the JSON file does not contain, and return the exit status."""
    args = parse(argv)
    if args.measure:
        recipe, checkpointing, *micro_batches = args.measure
        measure(recipe, checkpointing, list(map(int, micro_batches)))
        return 0

    device = hardware.this_device()
    if device.kind != "cuda":
        raise BadInput("PyTorch finds no GPU. Run this benchmark on a machine that has one")
    if args.json is None:
        raise BadInput("--json PATH is required, because the figures are written case by case")
    if args.json.is_file():
        record = json.loads(args.json.read_text())
    else:
        record = {
            "machine": device.name,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "rows": [],
        }
    print(f"machine      {device.name}, torch {torch.__version__}; GiB")
    print(HEADER)
    for case in cases(args, device):
        measured = {tuple(row[name] for name in CASE) for row in record["rows"]}
        case_values = tuple(case.values())
        left = [size for size in args.micro_batch if (*case_values, size) not in measured]
        if not left:
            continue
        for row in launch(device, case, left):
            row["commit"] = commit()
            row["estimated"] = estimated(row)
            if "problem" not in row:
                row["ratio"] = round(row["estimated"] / row["allocated"], 3)
            record["rows"].append(row)
            write_json(args.json, record)
            print(table_line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
