"""Places where a training step may lose time: one thing done in several ways, in turn, all else equal.

    python benchmarks/places.py                                   # 4 blocks as wide as GPT-2 124M, its vocabulary
    python benchmarks/places.py --only loss compile --rounds 9

Each place prints the median milliseconds of its ways and the median of the rounds' ratios to the first way. What trains by
default is marked. A way that this machine or torch has not is left out, and that is said; Liger's loss needs liger-kernel.
Beside exchanging (benchmarks/scaling.py), DDP costs something of its own, which one process alone shows.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import contextlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from benchmarks import side_by_side
from benchmarks.runs import write_json
from pretrain.machine import hardware
from pretrain.model import attention
from pretrain.model.build import build
from pretrain.model.loss import NextTokenLoss
from pretrain.optim import optimizers

DEVICE = side_by_side.device()
Ways = Iterator[tuple[str, Callable[[], object]]]


def our_model(asked: argparse.Namespace):
    """Return our model, to train."""
    model = side_by_side.recipe_of(**side_by_side.sizes_of(asked)).model
    return build(model, eos_token_id=0).to(DEVICE).train()


def pass_over(asked: argparse.Namespace, model, compute: Callable) -> Callable[[], object]:
    """Return a function that runs forward and backward once; ``compute`` takes inputs and targets, (B, T) int64."""
    ids = torch.randint(0, asked.vocab_size, (asked.micro_batch, asked.sequence_length + 1), device=DEVICE)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def work() -> None:
        half = torch.autocast(DEVICE.type, torch.bfloat16) if asked.precision == "bf16" else contextlib.nullcontext()
        with half:
            loss = compute(inputs, targets)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return work


def mask(asked: argparse.Namespace) -> Ways:
    """Yield attention with and without a mask tensor, compiled."""
    for name, kind in (("Transformers' sdpa", "sdpa"), ("ours, causal without a mask *", attention.CAUSAL)):
        model = our_model(asked)
        model.set_attn_implementation(kind)
        yield name, pass_over(asked, model, torch.compile(NextTokenLoss(model)))


def loss(asked: argparse.Namespace) -> Ways:
    """Yield ways to the same loss, compiled."""
    most = asked.micro_batch * asked.sequence_length
    model = our_model(asked)
    labels = torch.compile(lambda inputs, targets: model(inputs, labels=targets, shift_labels=targets).loss)
    yield "Transformers' labels=", pass_over(asked, model, labels)
    for name, rows in (("whole logits", most), ("a quarter at a time", -(-most // 4)), ("ours *", None)):
        module = NextTokenLoss(our_model(asked))
        module.rows = rows
        yield name, pass_over(asked, module.model, torch.compile(module))
    if hasattr(F, "linear_cross_entropy"):
        other, options = our_model(asked), torch.nn.LinearCrossEntropyOptions()

        def fused(inputs, targets):
            hidden = other.transformer(inputs, use_cache=False).last_hidden_state.flatten(0, 1)
            return F.linear_cross_entropy(hidden, other.lm_head.weight, targets.flatten(), options=options)

        yield "F.linear_cross_entropy, chunked", pass_over(asked, other, torch.compile(fused))
    else:
        print("F.linear_cross_entropy: not in this torch")
    if DEVICE.type == "cuda" and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        last, liger = our_model(asked), LigerFusedLinearCrossEntropyLoss()
        body = torch.compile(lambda inputs: last.transformer(inputs, use_cache=False).last_hidden_state.flatten(0, 1))
        work = lambda inputs, targets: liger(last.lm_head.weight, body(inputs), targets.flatten())  # noqa: E731
        yield "Liger's fused loss", pass_over(asked, last, work)
    else:
        print("Liger's fused loss: needs a card and liger-kernel")


def compiler(asked: argparse.Namespace) -> Ways:
    """Yield what is compiled."""
    module = NextTokenLoss(our_model(asked))
    yield "nothing", pass_over(asked, module.model, module)
    blocks = NextTokenLoss(our_model(asked))
    for block in blocks.model.transformer.h:
        block.compile()
    yield "each block", pass_over(asked, blocks.model, blocks)
    modes = ["default", "max-autotune-no-cudagraphs", *(["reduce-overhead"] if DEVICE.type == "cuda" else [])]
    for mode in modes:
        whole = NextTokenLoss(our_model(asked))
        name = "model and loss *" if mode == "default" else f"the same, {mode}"
        yield name, pass_over(asked, whole.model, torch.compile(whole, mode=mode))


def qkv(asked: argparse.Namespace) -> Ways:
    """Yield q, k, v as strided views of one product, or copied."""

    def copied(module, query, key, value, *args, **kwargs):
        parts = (part.contiguous() for part in (query, key, value))
        return attention._causal_attention(module, *parts, *args, **kwargs)

    AttentionInterface.register("copied", copied)
    AttentionMaskInterface.register("copied", attention._causal_mask)
    for name, kind in (("views *", attention.CAUSAL), ("copied", "copied")):
        model = our_model(asked)
        model.config._attn_implementation = kind
        yield name, pass_over(asked, model, torch.compile(NextTokenLoss(model)))


def accumulate(asked: argparse.Namespace) -> Ways:
    """Yield a backward pass whose gradients are the first of an update, and one that adds them to those there are."""
    for name, kept in (("first micro-batch", False), ("a later one *", True)):
        module = NextTokenLoss(our_model(asked))
        work = pass_over(asked, module.model, torch.compile(module))
        if kept:
            module.model.zero_grad = lambda set_to_none: None
        yield name, work


def weights(asked: argparse.Namespace) -> Ways:
    """Yield fp32 weights under autocast, and bf16 weights with fp32 ones for the optimizer: a whole update of each."""
    if asked.precision != "bf16":
        print("bf16 weights: needs --precision bf16")
        return
    for name, half in (("fp32 weights, autocast *", False), ("bf16 weights, fp32 masters", True)):
        model = our_model(asked)
        masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(masters if half else model.parameters(), lr=1e-4, fused=True)
        model.zero_grad = lambda set_to_none: None  # after the step, below
        if half:
            model.bfloat16()
        way = argparse.Namespace(**vars(asked) | {"precision": "no" if half else "bf16"})
        compute = pass_over(way, model, torch.compile(NextTokenLoss(model)))

        def work(compute=compute, model=model, masters=masters, optimizer=optimizer, half=half) -> None:
            compute()
            if half:
                for parameter, master in zip(model.parameters(), masters, strict=True):
                    master.grad = parameter.grad.float()
            optimizer.step()
            for parameter, master in zip(model.parameters(), masters, strict=True):
                if half:
                    parameter.data.copy_(master.data)
                parameter.grad = None

        yield name, work


def ddp(asked: argparse.Namespace) -> Ways:
    """Yield DDP's own cost, without another process to exchange with: a bare pass, and DDP in several settings."""
    if not torch.distributed.is_initialized():
        backend = "nccl" if DEVICE.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    bare = NextTokenLoss(our_model(asked))
    yield "one process, no DDP", pass_over(asked, bare.model, torch.compile(bare))
    for name, how in (
        ("DDP", {}),
        ("gradients in the buckets *", {"gradient_as_bucket_view": True}),
        ("the same, static_graph", {"gradient_as_bucket_view": True, "static_graph": True}),
        ("the same, buckets of 100 MB", {"gradient_as_bucket_view": True, "bucket_cap_mb": 100}),
    ):
        module = NextTokenLoss(our_model(asked))
        wrapped = torch.nn.parallel.DistributedDataParallel(module, **how)
        yield name, pass_over(asked, module.model, torch.compile(wrapped))


def stepper(asked: argparse.Namespace, make: Callable) -> Callable[[], object]:
    """Return a function that does one optimizer step over constant gradients."""
    model = our_model(asked)
    optimizer = make(model)
    gradients = [torch.full_like(parameter, 1e-3) for parameter in model.parameters()]

    def work() -> None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    return work


def step(asked: argparse.Namespace) -> Ways:
    """Yield an optimizer's step."""
    for name, how in (("AdamW, a loop", {"foreach": False}), ("AdamW, foreach", {"foreach": True})):
        yield name, stepper(asked, lambda model, how=how: torch.optim.AdamW(model.parameters(), lr=1e-4, **how))
    for name, optimizer in (("AdamW, fused *", "adamw"), ("Muon", "muon")):
        settings = side_by_side.recipe_of(optimizer=optimizer).optimizer
        yield name, stepper(asked, lambda model, settings=settings: optimizers.build(model, settings))


def clip(asked: argparse.Namespace) -> Ways:
    """Yield the gradient's norm and clipping."""
    parameters = list(our_model(asked).parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    for name, foreach in (("a loop", False), ("foreach *", None)):
        yield name, lambda foreach=foreach: torch.nn.utils.clip_grad_norm_(parameters, 1e9, foreach=foreach)


PLACES = {"mask": mask, "loss": loss, "compile": compiler, "qkv": qkv, "accumulate": accumulate, "weights": weights}
PLACES |= {"ddp": ddp, "step": step, "clip": clip}


def main(argv: list[str] | None = None) -> int:
    """Measure each place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    side_by_side.add_sizes(parser, n_layer=4, micro_batch=1, rounds=5)
    parser.add_argument("--precision", choices=("bf16", "no"), default="bf16" if DEVICE.type == "cuda" else "no")
    parser.add_argument("--only", nargs="+", choices=PLACES, default=list(PLACES))
    asked = parser.parse_args(argv)
    about = {"machine": hardware.this_device().name, "torch": torch.__version__, "threads": torch.get_num_threads()}
    sizes = side_by_side.sizes_of(asked) | {"micro_batch": asked.micro_batch}
    print(", ".join(f"{key} {value}" for key, value in (about | sizes).items()))
    rows = []
    for place in asked.only:
        torch._dynamo.reset()
        if not (ways := list(PLACES[place](asked))):
            continue
        times = {name: [] for name, _ in ways}
        for number in range(asked.rounds + 2):  # two to compile and settle
            for name, work in ways[number % len(ways) :] + ways[: number % len(ways)]:
                begin = time.perf_counter()
                work()
                if DEVICE.type == "cuda":
                    torch.cuda.synchronize()
                if number >= 2:
                    times[name].append(1000 * (time.perf_counter() - begin))
        print(f"\n{place:32} median ms  min..max            times the first")
        for name, found in times.items():
            ratio = statistics.median(b / a for a, b in zip(next(iter(times.values())), found, strict=True))
            spread = f"{min(found):.1f}..{max(found):.1f}"
            print(f"  {name:30} {statistics.median(found):9.1f}  {spread:18}  {ratio:15.3f}", flush=True)
            rows.append({"place": place, "way": name, "ms": found, "ratio": ratio})
    write_json(asked.json, about | vars(asked) | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
