"""The bytes that a compiled micro-batch moves through a card's memory beside its matrix products, counted, not timed.

    python benchmarks/traffic.py                    # GPT-2 124M, 64 x 1,024 tokens, bf16: a card of 24 GiB or more
    python benchmarks/traffic.py --of nanogpt --nanogpt ~/nanoGPT                       # another's GPT-2, as compiled

Each kernel that Inductor's scheduler plans counts what it reads and writes once, as if no cache kept anything between
kernels and every byte within one were read once: a lower bound of the real traffic, that of attention above all. Time
does not enter, so that a card without arithmetic (tests/simulated_gpu/null at d33aee3) counts the same as a real one of its kind.
Inductor counts no tensor for more than 1e9 elements: models that make all logits at once are compared at 16 x 1,024.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import collections
from collections.abc import Callable

import torch
from torch._inductor import config as inductor
from torch._inductor import scheduler

from benchmarks import side_by_side, throughput
from benchmarks.runs import write_json
from ursa_minor.base import paths
from ursa_minor.model.build import build
from ursa_minor.model.loss import NextTokenLoss

PRODUCTS, ATTENTION = "matrix products", "attention"


def ours(args: argparse.Namespace) -> torch.nn.Module:
    """Return the stock GPT-2 with our loss."""
    recipe = side_by_side.recipe_of(**side_by_side.sizes_of(args))
    return NextTokenLoss(build(recipe.model, eos_token_id=0).to("cuda").train())


def hf(args: argparse.Namespace) -> torch.nn.Module:
    """Return the stock GPT-2 with the loss that Transformers computes."""
    return WithLoss(
        side_by_side.stock_model(args).to("cuda"), lambda model, x, y: model(x, labels=y).loss
    )


def plain(args: argparse.Namespace) -> torch.nn.Module:
    """Return a GPT-2 in plain PyTorch."""
    return throughput.PlainGPT2(args).to("cuda")


def nanogpt(args: argparse.Namespace) -> torch.nn.Module:
    """Return nanoGPT's GPT."""
    return WithLoss(throughput.nanogpt_model(args), lambda model, x, y: model(x, y)[1])


MODELS = {each.__name__: each for each in (ours, hf, plain, nanogpt)}


class WithLoss(torch.nn.Module):
    """A model that is called as ours is, and returns the mean loss."""

    def __init__(self, model: torch.nn.Module, loss: Callable):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, nats per token."""
        return self.loss(self.model, inputs_BT, targets_BT)


def kind(node: scheduler.BaseSchedulerNode) -> str:
    """Return what a kernel is: a product, attention, another one of a library's, or generated with or without sums."""
    if isinstance(node, scheduler.ExternKernelSchedulerNode):
        name = f"{getattr(node.node, 'python_kernel_name', '')} {getattr(node.node, 'op_overload', '')}"
        return (
            ATTENTION if "attention" in name else PRODUCTS if "mm" in name else f"library: {name}"
        )
    return "generated, with sums" if node.is_reduction() else "generated, elementwise"


def count(module: torch.nn.Module, ids_BT: torch.Tensor) -> list[dict]:
    """Compile a forward and a backward pass in bf16; return each kernel's kind and bytes."""
    kernels, generate = [], scheduler.Scheduler.codegen

    def noted(self):
        for node in self.nodes:
            if not isinstance(node, scheduler.NopKernelSchedulerNode):
                kernels.append(
                    {"kind": kind(node), "bytes": int(node.get_read_write_buffers_sizes())}
                )
        return generate(self)

    scheduler.Scheduler.codegen = noted
    inductor.force_disable_caches = True  # or nothing is planned the second time
    try:
        forward_and_backward(module, ids_BT)
    finally:
        scheduler.Scheduler.codegen = generate
    return kernels


def forward_and_backward(module: torch.nn.Module, ids_BT: torch.Tensor) -> None:
    """Do a micro-batch as train.py does."""
    with torch.autocast(ids_BT.device.type, torch.bfloat16):
        loss = module(ids_BT, ids_BT.clone())
    loss.backward()


def main(argv: list[str] | None = None) -> int:
    """Count one micro-batch; print the kinds of kernels, what lies beside the products, and the peak of memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    side_by_side.add_sizes(parser, micro_batch=64)
    parser.add_argument("--of", choices=MODELS, default="ours", help="whose GPT-2 (default: ours)")
    parser.add_argument(
        "--nanogpt", type=paths.argument, metavar="PATH", help="a checkout of nanoGPT"
    )
    args = parser.parse_args(argv)
    if args.of == "nanogpt" and not args.nanogpt:
        parser.error("--of nanogpt: --nanogpt PATH must name a checkout of it")
    if not torch.cuda.is_available():
        print(
            "traffic.py: torch.cuda.is_available() is False; kernels are counted on a CUDA device",
            file=sys.stderr,
        )
        return 2
    shape = side_by_side.sizes_of(args)
    module = torch.compile(MODELS[args.of](args))
    ids_BT = torch.zeros(args.micro_batch, args.sequence_length, dtype=torch.int64, device="cuda")
    kernels = count(module, ids_BT)
    torch.cuda.reset_peak_memory_stats()
    # Gradients of the first pass exist now, as in every micro-batch of an update except the first.
    forward_and_backward(module, ids_BT)
    peak = torch.cuda.max_memory_allocated()

    moved, number = collections.Counter(), collections.Counter(kernel["kind"] for kernel in kernels)
    for kernel in kernels:
        moved[kernel["kind"]] += kernel["bytes"]
    beside = sum(moved.values()) - moved[PRODUCTS] - moved[ATTENTION]
    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, {shape}, micro-batch {args.micro_batch}")
    for name, size in moved.most_common():
        print(f"{size / 1e9:8.2f} GB  {number[name]:5} kernels  {name}")
    print(
        f"{beside / 1e9:8.2f} GB beside products and attention; peak of memory {peak / 2**30:.2f} GiB"
    )
    figures = {
        "name": args.of,
        "card": card,
        "torch": torch.__version__,
        **shape,
        "micro_batch": args.micro_batch,
    }
    figures |= {"kinds": {name: {"bytes": moved[name], "kernels": number[name]} for name in moved}}
    figures |= {"beside_products_and_attention": beside, "peak_memory": peak}
    write_json(args.json, {"rows": [figures]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
