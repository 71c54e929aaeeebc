"""Tokens a second of GPT-2 training, side by side: train.py, Hugging Face's two ways, plain PyTorch, a ceiling.

    python benchmarks/throughput.py                                        # GPT-2 124M at 1,024 tokens
    python benchmarks/throughput.py --micro_batch 16 32 --nanogpt ~/nanoGPT --json throughput.json
    python benchmarks/throughput.py --only ours ceiling --compile false

ours      train.py itself, which neither evaluates nor saves here
hf        GPT2LMHeadModel(labels=...) with SDPA attention in a short Accelerate loop
trainer   the same model in transformers.Trainer
plain     a plain PyTorch GPT-2 of the same weights, written below
nanogpt   nanoGPT's model and optimizer from --nanogpt PATH, its own settings (no biases), stepped as its train.py does
descent   train.py with Inductor's coordinate descent over its kernels' block sizes
autotune  train.py with --compile_mode max-autotune-no-cudagraphs, which also times kernels of matrix products
ceiling   only the model's matrix products and attention kernels: what no loop around this model can pass

Each variant is a process of its own and they take turns: each has its own compiler caches, memory and Accelerate state,
as its user would, and all meet the machine in the same state. Between turns it sleeps inside its loop, at the end of an
update: the Trainer's, too, is one call of train(), whose on_step_end waits for the next turn. On a card it gives its
cached memory back then, and the first update of a turn, which fetches it again, is not timed. All but nanogpt begin
with the same weights; all read the same windows (the Trainer shuffles them), so their losses must be alike. ours reads
them from files and the Trainer collates; the others have their batches on the device beforehand. Ids are random, as
frequent as words are (Zipf).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import functools
import importlib.util
import itertools
import statistics
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2LMHeadModel

from benchmarks.runs import flag_words, write_json
from benchmarks.side_by_side import (
    ADAMW,
    RECIPE,
    Turns,
    about,
    add_sizes,
    add_turns,
    alternate,
    be_train,
    device,
    fit_together,
    fixed_batches,
    our_flags,
    plain_loop,
    positive,
    settle,
    shape_of,
    stock_model,
    summary,
    write_ids,
)
from ursa_minor.base import gpus, paths
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput
from ursa_minor.machine import device as hardware
from ursa_minor.model.dtypes import HALF_DTYPES
from ursa_minor.preflight import estimate

# The variants.


def ours(
    args: argparse.Namespace, micro_batch: int, folder: Path, turns: Turns, **more: str
) -> None:
    """Train by train.py."""
    flags = our_flags(args, micro_batch, folder)
    be_train(["--recipe", str(RECIPE), *flag_words(flags | more)], turns)


def descent(args: argparse.Namespace, micro_batch: int, folder: Path, turns: Turns) -> None:
    """Train by train.py, with Inductor searching block sizes."""
    from torch._inductor import config

    config.coordinate_descent_tuning = True
    ours(args, micro_batch, folder, turns, output_dir=str(folder / "descent"))


def autotune(args: argparse.Namespace, micro_batch: int, folder: Path, turns: Turns) -> None:
    """Train by train.py, with Inductor timing templates of matrix products too."""
    options = {"compile_mode": "max-autotune-no-cudagraphs", "output_dir": str(folder / "autotune")}
    ours(args, micro_batch, folder, turns, **options)


def hf(args: argparse.Namespace, micro_batch: int, folder: Path, turns: Turns) -> None:
    """Train the stock model in the loop of Accelerate's documentation; its launcher's environment says compile."""
    from accelerate import Accelerator

    batches = itertools.cycle(fixed_batches(args, micro_batch, folder))
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation)
    model = stock_model(args)
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
    )
    losses = []
    while True:
        with accelerator.accumulate(model):
            inputs_BT, _ = next(batches)
            loss = model(inputs_BT, labels=inputs_BT).loss  # which shifts the labels itself
            accelerator.backward(loss)
            losses.append(loss.detach() / args.accumulation)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            turns.done(*losses)
            losses.clear()


def trainer(args: argparse.Namespace, micro_batch: int, folder: Path, turns: Turns) -> None:
    """Train the stock model in one call of Trainer.train(), which sleeps in on_step_end between turns."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    batches = fixed_batches(args, micro_batch, folder)
    losses = []

    class Wait(TrainerCallback):
        def on_step_end(self, *_, **__):
            turns.done(*losses)
            losses.clear()

    batch = {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": args.accumulation,
    }
    speed = {
        "bf16": args.precision == "bf16",
        "fp16": args.precision == "fp16",
        "torch_compile": args.compile,
    }
    same = {
        "optim": "adamw_torch_fused",
        "learning_rate": ADAMW["lr"],
        "adam_beta2": ADAMW["betas"][1],
    }
    same |= {"weight_decay": ADAMW["weight_decay"], "lr_scheduler_type": "constant"}
    quiet = {
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    place = {"output_dir": str(folder / "trainer"), "use_cpu": device().type == "cpu"}
    steps = len(batches) // args.accumulation
    arguments = TrainingArguments(max_steps=steps, **batch, **speed, **same, **quiet, **place)
    rows = [
        {"input_ids": row.cpu(), "labels": row.cpu()}
        for inputs_BT, _ in batches
        for row in inputs_BT
    ]
    made = Trainer(stock_model(args), arguments, train_dataset=rows, callbacks=[Wait()])
    step = made.training_step
    made.training_step = lambda *step_args: losses.append(step(*step_args)) or losses[-1]
    made.train()


class PlainGPT2(nn.Module):
    """GPT-2 in plain PyTorch; its parameters come in the order of Transformers' GPT2LMHeadModel."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.tokens = nn.Embedding(args.vocab_size, args.n_embd)
        self.places = nn.Embedding(args.sequence_length, args.n_embd)
        self.blocks = nn.ModuleList(
            PlainBlock(args.n_embd, args.n_head) for _ in range(args.n_layer)
        )
        self.norm = nn.LayerNorm(args.n_embd)

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, nats per token."""
        x = self.tokens(inputs_BT) + self.places(
            torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
        )
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets_BT.flatten())

    @torch.no_grad()
    def take_weights(self, stock: GPT2LMHeadModel) -> "PlainGPT2":
        """Copy the weights of Transformers' model, whose Conv1D are (in, out)."""
        for parameter, (name, its) in zip(self.parameters(), stock.named_parameters(), strict=True):
            parameter.copy_(its.mT if ".h." in name and its.dim() == 2 else its)
        return self


class PlainBlock(nn.Module):
    """Attention, then MLP, each on a norm of the residual stream."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.norm_2, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, width) to the same."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


def plain(args: argparse.Namespace, micro_batch: int, folder: Path, turns: Turns) -> None:
    """Train PlainGPT2 with the stock model's weights."""
    model = PlainGPT2(args).take_weights(stock_model(args)).to(device())
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAMW, fused=True)
    run = torch.compile(model) if args.compile else model
    plain_loop(turns, run, optimizer, fixed_batches(args, micro_batch, folder), args)


def nanogpt_model(args: argparse.Namespace) -> nn.Module:
    """Return nanoGPT's GPT, from the checkout."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(args.nanogpt) / "model.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    size = {
        "n_layer": args.n_layer,
        "n_head": args.n_head,
        "n_embd": args.n_embd,
        "vocab_size": args.vocab_size,
    }
    return module.GPT(
        module.GPTConfig(**size, block_size=args.sequence_length, dropout=0.0, bias=False)
    ).to(device())


def nanogpt(args: argparse.Namespace, micro_batch: int, folder: Path, turns: Turns) -> None:
    """Train nanoGPT's GPT as its train.py does."""
    model = nanogpt_model(args)
    optimizer = model.configure_optimizers(
        ADAMW["weight_decay"], ADAMW["lr"], ADAMW["betas"], device().type
    )
    run = torch.compile(model) if args.compile else model
    plain_loop(
        turns,
        lambda x, y: run(x, y)[1],
        optimizer,
        fixed_batches(args, micro_batch, folder),
        args,
    )


def matrices(shape: estimate.Shape) -> list[tuple[int, int, int]]:
    """Return the model's weight matrices: how many, width in, width out. Each is multiplied three times a token."""
    d = shape.n_embd
    blocks = [(shape.n_layer, i * d, o * d) for i, o in ((1, 3), (1, 1), (1, 4), (4, 1))]
    return [*blocks, (1, d, shape.vocab_size)]


def ceiling(args: argparse.Namespace, micro_batch: int, folder: Path, turns: Turns) -> None:
    """Do the weights' products (output, input's gradient, weight's gradient) and causal attention, and nothing else.

    Attention is SDPA's kernel forward and backward: bare products, which write T x T scores, would be slower.
    """
    kind, tokens = (
        {"device": device(), "dtype": HALF_DTYPES.get(args.precision, torch.float32)},
        micro_batch * args.sequence_length,
    )
    work = []
    for count, inner, outer in matrices(shape_of(args)):
        x, w, y = (
            torch.randn(size, **kind) for size in ((tokens, inner), (inner, outer), (tokens, outer))
        )
        work.append((count, x, w, y, torch.empty_like(x), torch.empty_like(w)))
    heads = (micro_batch, args.n_head, args.sequence_length, args.n_embd // args.n_head)
    q, k, v = (torch.randn(heads, **kind, requires_grad=True) for _ in range(3))
    gradient = torch.randn(heads, **kind)
    while True:
        for _ in range(args.accumulation):
            for count, x, w, y, dx, dw in work:
                for _ in range(count):
                    torch.mm(x, w, out=y)
                    torch.mm(y, w.T, out=dx)
                    torch.mm(x.T, y, out=dw)
            for _ in range(args.n_layer):
                torch.autograd.grad(
                    F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient
                )
        turns.done()


VARIANTS = {
    "ours": ours,
    "hf": hf,
    "trainer": trainer,
    "plain": plain,
    "nanogpt": nanogpt,
    "ceiling": ceiling,
}
VARIANTS |= {"descent": descent, "autotune": autotune}
# The two that compile for minutes are to be named.
USUAL = (
    "ours",
    "hf",
    "trainer",
    "plain",
    "ceiling",
)


# The command line.


def report(results: dict, together: bool, args: argparse.Namespace, micro_batch: int) -> dict:
    """Print the table and the ratios of a micro-batch; return them for the JSON.

    Args:
        together: whether the variants took turns. A machine drifts by a third within minutes: what was not taken in turn
            with ours is not compared with it.
    """
    tokens, flops = (
        micro_batch * args.accumulation * args.sequence_length,
        shape_of(args).flops_per_token,
    )
    peak = gpus.peak_flops(hardware.this_device().name, args.precision)
    print(
        "variant      ms/update   tokens/s (slowest .. fastest)        TFLOP/s   MFU    peak MiB    loss"
    )
    rows = {}
    for name, result in results.items():
        if result["problem"]:
            print(f"{name:11}  {result['problem']}")
            rows[name] = {"problem": result["problem"]}
            continue
        turns = result["turns"]
        row = rows[name] = summary([turn["seconds"] for turn in turns], tokens) | {
            "loss": turns[-1]["loss"]
        }
        row["bytes"] = max((turn["bytes"] for turn in turns if "bytes" in turn), default=None)
        row["mfu"] = row["tokens_per_second"] * flops / peak if peak else None
        mfu, memory = (
            f"{row['mfu']:.1%}" if peak else "n/a",
            f"{row['bytes'] / 2**20:,.0f}" if row["bytes"] else "n/a",
        )
        print(
            f"{name:11}  {row['ms']:9,.1f}  {row['tokens_per_second']:9,.0f} ({row['slowest']:9,.0f} .. "
            f"{row['fastest']:9,.0f})  {row['tokens_per_second'] * flops / 1e12:8.3g}  {mfu:>5}  {memory:>9}  "
            f"{'   n/a' if row['loss'] is None else format(row['loss'], '6.3f')}"
        )
    sound, ratios = (
        {name: result["turns"] for name, result in results.items() if not result["problem"]},
        {},
    )
    our_turns = sound.pop("ours", ()) if together else ()
    for name, turns in sound.items() if our_turns else ():
        turn_ratios = [
            turn["seconds"] / my["seconds"] for turn, my in zip(turns, our_turns, strict=True)
        ]
        ratios[name] = statistics.median(turn_ratios)
        print(
            f"ours / {name:9} {ratios[name]:.3f} times (median of the rounds' ratios; {min(turn_ratios):.3f} .. {max(turn_ratios):.3f})"
        )
    return {"micro_batch": micro_batch, "variants": rows, "ours_over": ratios}


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Measure every micro-batch; print a table for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_sizes(parser)
    parser.add_argument("--accumulation", type=positive, default=1, help="micro-batches an update")
    add_turns(parser, micro_batch=4)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, help="variants to run")
    parser.add_argument(
        "--nanogpt",
        type=paths.argument,
        metavar="PATH",
        help="a checkout of nanoGPT: its model.py is measured too",
    )
    args = parser.parse_args(argv)
    if args.nanogpt and not (Path(args.nanogpt) / "model.py").is_file():
        raise BadInput(
            f"--nanogpt {args.nanogpt}: holds no model.py; give the folder of a nanoGPT checkout"
        )
    if "nanogpt" in (args.only or ()) and not args.nanogpt:
        raise BadInput("--only nanogpt: give --nanogpt PATH too, the folder of a nanoGPT checkout")
    names = args.only or [*USUAL, *(["nanogpt"] if args.nanogpt else [])]
    record = about(args, settle(args))
    record |= {
        "compiled": args.compile,
        "accumulation": args.accumulation,
        "steps_per_round": args.steps_per_round,
    }
    record["micro_batches"] = []
    for micro_batch in args.micro_batch:
        with tempfile.TemporaryDirectory() as name:
            write_ids(Path(name), args.vocab_size)
            variants = {
                name_: functools.partial(VARIANTS[name_], args, micro_batch, Path(name))
                for name_ in names
            }
            together = fit_together(len(variants), args, micro_batch)
            results = alternate(
                variants, rounds=args.rounds, steps=args.steps_per_round, together=together
            )
        way = (
            "in turns"
            if together
            else "one after the other, without ratios: all at once do not fit (see --only)"
        )
        print(
            f"micro-batch  {micro_batch} x {args.accumulation}, precision {args.precision}, "
            f"{'compiled' if args.compile else 'eager'}, {args.rounds} rounds of {args.steps_per_round} updates, "
            f"{way}"
        )
        record["micro_batches"].append(
            report(results, together, args, micro_batch) | {"in_turns": way}
        )
    write_json(args.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
