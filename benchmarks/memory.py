"""The memory of a training step on a CPU: measured, beside what pretrain/machine/estimate.py says.

For cards: memory_card.py.

    python benchmarks/memory.py                                         # a small GPT-2
    python benchmarks/memory.py --architecture gpt2 llama --num_key_value_heads 2       # and a Llama-type model
    python benchmarks/memory.py --n_layer 12 --n_embd 768 --n_head 12 --vocab_size 50304 --sequence_length 1024 \
        --micro_batch 1                                                 # GPT-2 124M

Two micro-batches and one AdamW update. The peak is that of PyTorch's allocations on their time line, as the profiler
writes them down: a card's tensors, but the CPU's kernels and their own scratch memory, and autocast as it is on a CPU.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import contextlib
import dataclasses
import itertools

import torch

from benchmarks import side_by_side
from benchmarks.runs import write_json
from pretrain.machine import estimate, hardware
from pretrain.model.build import build
from pretrain.model.loss import CARD_ROWS, NextTokenLoss
from pretrain.optim import optimizers


def step(module, optimizer, ids_BT, precision: str) -> None:
    """Do one update as train.py does."""
    dtype = side_by_side.HALF.get(precision)
    for _ in range(2):  # the first one's gradients are there when the second one runs
        with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
            loss = module(ids_BT, ids_BT.clone())
        loss.backward()
    side_by_side.apply_update(module, optimizer, loss)


def peak(work) -> int:
    """Return the most bytes that ``work`` had allocated at once, above those at its begin."""
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    return side_by_side.most_held(profile)


def measure(
    shape: estimate.Shape, micro_batch: int, precision: str, compiled: bool, checkpointing: str, logits_rows: int
) -> int:
    """Return the peak of a step in bytes, with weights, gradients and moments."""
    torch._dynamo.reset()
    recipe = side_by_side.recipe_of(**vars(shape), gradient_checkpointing=checkpointing)
    model = build(recipe.model, eos_token_id=0)
    module = NextTokenLoss(model.train())
    module.rows = logits_rows
    optimizer = optimizers.build(model, recipe.optimizer)
    ids_BT = torch.randint(0, shape.vocab_size, (micro_batch, shape.sequence_length))
    run = torch.compile(module) if compiled else module
    step(run, optimizer, ids_BT, precision)  # compiles, and makes the moments
    weights_and_moments = 12 * model.num_parameters()
    return weights_and_moments + peak(lambda: step(run, optimizer, ids_BT, precision))


def shape_of(asked: argparse.Namespace, architecture: str) -> estimate.Shape:
    """Return the size of the model that is measured."""
    sizes = {field.name: getattr(asked, field.name) for field in dataclasses.fields(estimate.Shape)}
    if architecture == "llama":  # which has no sizes of its own; the usual ones
        sizes["num_key_value_heads"] = asked.num_key_value_heads or asked.n_head
        sizes["intermediate_size"] = asked.intermediate_size or -(-8 * asked.n_embd // 192) * 64
    else:
        sizes["num_key_value_heads"] = None
    return estimate.Shape(**sizes | {"architecture": architecture})


def main(argv: list[str] | None = None) -> int:
    """Measure every combination; print each beside the estimate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    side_by_side.add_sizes(parser, n_layer=4, n_embd=256, n_head=4, vocab_size=8192, sequence_length=128)
    parser.add_argument("--architecture", nargs="+", default=["gpt2"], choices=["gpt2", "llama"])
    parser.add_argument("--num_key_value_heads", type=int, help="llama: default n_head")
    parser.add_argument("--intermediate_size", type=int, help="default: 4 n_embd, llama: 8 n_embd / 3")
    parser.add_argument("--tie_word_embeddings", default=True, action=argparse.BooleanOptionalAction)
    parser.add_argument("--micro_batch", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--precision", nargs="+", default=["bf16", "no"], choices=["bf16", "fp16", "no"])
    parser.add_argument("--compiled", nargs="+", default=["no", "yes"], choices=["no", "yes"])
    parser.add_argument("--checkpointing", nargs="+", default=["none", "mlp", "full"], choices=["none", "mlp", "full"])
    parser.add_argument("--rows", type=int, default=CARD_ROWS, help="logits at once (default: %(default)s)")
    asked = parser.parse_args(argv)
    shapes = [shape_of(asked, architecture) for architecture in asked.architecture]
    machine = hardware.device_name(torch.device("cpu"))
    print(f"machine       {machine}, torch {torch.__version__}")
    for shape in shapes:
        print(f"model         {shape}, {shape.parameters:,} parameters")
    print(
        "architecture  precision  compiled  checkpointing  micro-batch  measured MiB  estimated MiB  estimated / measured"
    )
    rows, estimate.LOSS_ROWS = [], asked.rows
    ways = itertools.product(shapes, asked.precision, asked.compiled, asked.checkpointing, asked.micro_batch)
    for shape, precision, compiled, checkpointing, micro_batch in ways:
        compiled = compiled == "yes"
        how = {"half": precision != "no", "compiled": compiled, "checkpointing": checkpointing}
        said = sum(estimate.memory(shape, micro_batch=micro_batch, **how).values())
        said -= estimate.CONTEXT_BYTES
        found = measure(shape, micro_batch, precision, compiled, checkpointing, asked.rows)
        row = {"architecture": shape.architecture, "precision": precision, "compiled": compiled}
        row |= {"checkpointing": checkpointing, "micro_batch": micro_batch}
        rows.append(row | {"measured": found, "estimated": round(said), "ratio": round(said / found, 3)})
        print(
            f"{shape.architecture:12}  {precision:9}  {compiled!s:8}  {checkpointing:13}  {micro_batch:11}  "
            f"{found / 2**20:12,.0f}  {said / 2**20:13,.0f}  {said / found:18.2f}",
            flush=True,
        )
        about = {"machine": machine, "torch": torch.__version__, "shapes": [vars(shape) for shape in shapes]}
        write_json(asked.json, about | {"rows": rows})  # after each row: some take minutes
    return 0


if __name__ == "__main__":
    sys.exit(main())
