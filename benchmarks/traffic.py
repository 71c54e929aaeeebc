"""Count the bytes that a compiled micro-batch moves through the memory of a GPU, without timing it.

    python benchmarks/traffic.py            # GPT-2 124M, 64 x 1,024 tokens, bf16: 24 GiB or more
    python benchmarks/traffic.py --of nanogpt --nanogpt ~/nanoGPT       # nanoGPT's GPT-2, compiled

It prints the bytes and the number of the kernels of each kind, the bytes of all kernels other than
matrix products and attention, and the peak of the memory.

For each kernel that Inductor's scheduler plans, the tensors that it reads and writes are counted
once, as if no cache kept data between two kernels, and each kernel read every byte only once. This
is a lower bound of the real traffic, in particular for attention. Time does not matter, so a
simulated GPU (tests/simulated_gpu/null at d33aee3) counts the same bytes as a real GPU of its kind.
Inductor does not count tensors with more than 1e9 elements: compare models that compute all logits
in one step with a micro-batch of 16 x 1,024.
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

PRODUCTS = "matrix products"
ATTENTION = "attention"


def ours(args: argparse.Namespace) -> torch.nn.Module:
    """Return the stock GPT-2 with our loss."""
    recipe = side_by_side.recipe_of(**side_by_side.sizes_of(args))
    return NextTokenLoss(build(recipe.model, eos_token_id=0).to("cuda").train())


def hf(args: argparse.Namespace) -> torch.nn.Module:
    """Return the stock GPT-2 with the loss of Transformers."""
    model = side_by_side.stock_model(args).to("cuda")
    return WithLoss(model, lambda model, x, y: model(x, labels=y).loss)


def plain(args: argparse.Namespace) -> torch.nn.Module:
    """Return a GPT-2 in plain PyTorch."""
    return throughput.PlainGPT2(args).to("cuda")


def nanogpt(args: argparse.Namespace) -> torch.nn.Module:
    """Return nanoGPT's GPT."""
    return WithLoss(throughput.nanogpt_model(args), lambda model, x, y: model(x, y)[1])


MODELS = {"ours": ours, "hf": hf, "plain": plain, "nanogpt": nanogpt}


class WithLoss(torch.nn.Module):
    """A model with a loss function, which is called as our loss module.

    Args:
        model: the model.
        loss: a function of the model, inputs_BT and targets_BT.
    """

    def __init__(self, model: torch.nn.Module, loss: Callable):
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss in nats per token."""
        return self.loss(self.model, inputs_BT, targets_BT)


def kind_of(node: scheduler.BaseSchedulerNode) -> str:
    """Return the kind of a kernel: matrix product, attention, other library kernel, or generated.

    Generated kernels with sums are a kind of their own.
    """
    if not isinstance(node, scheduler.ExternKernelSchedulerNode):
        return "generated, with sums" if node.is_reduction() else "generated, elementwise"
    kernel_name = getattr(node.node, "python_kernel_name", "")
    operator = getattr(node.node, "op_overload", "")
    name = f"{kernel_name} {operator}"
    if "attention" in name:
        return ATTENTION
    if "mm" in name:
        return PRODUCTS
    return f"library: {name}"


def count_kernels(module: torch.nn.Module, ids_BT: torch.Tensor) -> list[dict]:
    """Compile a forward and a backward pass in bf16, and return each kernel's kind and bytes."""
    kernels = []
    original_codegen = scheduler.Scheduler.codegen

    def codegen_and_count(self):
        for node in self.nodes:
            if not isinstance(node, scheduler.NopKernelSchedulerNode):
                size = int(node.get_read_write_buffers_sizes())
                kernels.append({"kind": kind_of(node), "bytes": size})
        return original_codegen(self)

    scheduler.Scheduler.codegen = codegen_and_count
    # A cached compilation would not call the scheduler.
    inductor.force_disable_caches = True
    try:
        forward_and_backward(module, ids_BT)
    finally:
        scheduler.Scheduler.codegen = original_codegen
    return kernels


def forward_and_backward(module: torch.nn.Module, ids_BT: torch.Tensor) -> None:
    """Compute a micro-batch as train.py does."""
    with torch.autocast(ids_BT.device.type, torch.bfloat16):
        loss = module(ids_BT, ids_BT.clone())
    loss.backward()


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    side_by_side.add_sizes(parser, micro_batch=64)
    parser.add_argument(
        "--of",
        choices=MODELS,
        default="ours",
        help="Model to count. Default: %(default)s.",
    )
    parser.add_argument(
        "--nanogpt",
        type=paths.argument,
        metavar="PATH",
        help="Folder of a nanoGPT checkout, for --of nanogpt.",
    )
    args = parser.parse_args(argv)
    if args.of == "nanogpt" and not args.nanogpt:
        parser.error("--of nanogpt: --nanogpt PATH must name a checkout of it")
    return args


def main(argv: list[str] | None = None) -> int:
    """Count one micro-batch, print the report, and return the exit status."""
    args = parse(argv)
    if not torch.cuda.is_available():
        print(
            "traffic.py: torch.cuda.is_available() is False; kernels are counted on a CUDA device",
            file=sys.stderr,
        )
        return 2
    module = torch.compile(MODELS[args.of](args))
    ids_BT = torch.zeros(args.micro_batch, args.sequence_length, dtype=torch.int64, device="cuda")
    kernels = count_kernels(module, ids_BT)
    torch.cuda.reset_peak_memory_stats()
    # Gradients of the first pass exist now, as in every micro-batch of an update except the first.
    forward_and_backward(module, ids_BT)
    peak = torch.cuda.max_memory_allocated()

    num_kernels = collections.Counter(kernel["kind"] for kernel in kernels)
    bytes_by_kind = collections.Counter()
    for kernel in kernels:
        bytes_by_kind[kernel["kind"]] += kernel["bytes"]
    other_bytes = sum(bytes_by_kind.values()) - bytes_by_kind[PRODUCTS] - bytes_by_kind[ATTENTION]
    gpu = torch.cuda.get_device_name()
    sizes = side_by_side.sizes_of(args)
    print(f"{gpu}, torch {torch.__version__}, {sizes}, micro-batch {args.micro_batch}")
    kinds = {}
    for name, size in bytes_by_kind.most_common():
        print(f"{size / 1e9:8.2f} GB  {num_kernels[name]:5} kernels  {name}")
        kinds[name] = {"bytes": size, "kernels": num_kernels[name]}
    print(
        f"{other_bytes / 1e9:8.2f} GB in addition to products and attention; "
        f"peak of memory {peak / 2**30:.2f} GiB"
    )
    figures = {
        "name": args.of,
        "card": gpu,
        "torch": torch.__version__,
        **sizes,
        "micro_batch": args.micro_batch,
        "kinds": kinds,
        "beside_products_and_attention": other_bytes,
        "peak_memory": peak,
    }
    write_json(args.json, {"rows": [figures]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
