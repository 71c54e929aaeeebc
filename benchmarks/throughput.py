"""Compare the tokens/s of GPT-2 training: train.py, Hugging Face, plain PyTorch, an upper bound.

    python benchmarks/throughput.py                   # GPT-2 124M with 1,024 tokens
    python benchmarks/throughput.py --micro_batch 16 32 --nanogpt ~/nanoGPT --json throughput.json
    python benchmarks/throughput.py --only ours ceiling --compile false

For each micro-batch it prints a table with one line per variant (ms per update, tokens/s, TFLOP/s,
MFU, peak memory, last loss), and how many times as fast as each other variant train.py is.

ours      train.py, without evaluations and checkpoints
hf        GPT2LMHeadModel(labels=...) with SDPA attention in a short Accelerate loop
trainer   the same model in transformers.Trainer
plain     a GPT-2 in plain PyTorch with the same weights (class PlainGPT2 in this file)
nanogpt   nanoGPT's model and optimizer from --nanogpt PATH with its own settings (no biases),
          trained as its train.py does
descent   train.py with Inductor's coordinate descent over the block sizes of its kernels
autotune  train.py with --compile_mode max-autotune-no-cudagraphs, which also times kernels of
          matrix products
ceiling   only the matrix products and the attention kernels of the model: an upper bound for every
          training loop of this model

Each variant has its own process, and so its own compiler caches, memory and Accelerate state. The
variants take turns, so that all of them meet the machine in the same state. Between its turns a
variant sleeps inside its training loop, at the end of an update. This holds for the Trainer too: it
makes one call of train(), and its callback on_step_end waits for the next turn. On a GPU a sleeping
variant releases its cached memory. The first update of a turn allocates it again and is not timed.

All variants except nanogpt start with the same weights. All of them read the same windows (the
Trainer shuffles them), so their losses must be similar. "ours" reads the windows from files and the
Trainer collates them. The other variants have their batches on the device in advance. The token ids
are random, with the frequencies of words (Zipf's law).
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
from typing import NamedTuple

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
    device,
    fit_together,
    fixed_batches,
    memory_cell,
    our_flags,
    peak_bytes,
    plain_loop,
    positive,
    run_train,
    settle,
    shape_of,
    speed_cells,
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

HEADER = (
    "variant      ms/update   tokens/s (slowest .. fastest)        TFLOP/s   MFU    "
    "peak MiB    loss"
)

# ---- Variants. Each function trains until ``turns`` ends it.


def ours(
    args: argparse.Namespace, micro_batch: int, folder: Path, turns: Turns, **recipe_keys: str
) -> None:
    """Train with train.py."""
    flags = our_flags(args, micro_batch, folder) | recipe_keys
    run_train(["--recipe", str(RECIPE), *flag_words(flags)], turns)


def descent(args: argparse.Namespace, micro_batch: int, folder: Path, turns: Turns) -> None:
    """Train with train.py while Inductor searches block sizes."""
    from torch._inductor import config

    config.coordinate_descent_tuning = True
    ours(args, micro_batch, folder, turns, output_dir=str(folder / "descent"))


def autotune(args: argparse.Namespace, micro_batch: int, folder: Path, turns: Turns) -> None:
    """Train with train.py while Inductor also times templates of matrix products."""
    ours(
        args,
        micro_batch,
        folder,
        turns,
        compile_mode="max-autotune-no-cudagraphs",
        output_dir=str(folder / "autotune"),
    )


def hf(args: argparse.Namespace, micro_batch: int, folder: Path, turns: Turns) -> None:
    """Train the stock model in the loop of Accelerate's documentation.

    Accelerate compiles the model if ACCELERATE_DYNAMO_BACKEND says so.
    """
    from accelerate import Accelerator

    batches = itertools.cycle(fixed_batches(args, micro_batch, folder))
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation)
    model = stock_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    while True:
        with accelerator.accumulate(model):
            inputs_BT, _ = next(batches)
            loss = model(inputs_BT, labels=inputs_BT).loss  # the model shifts the labels
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
    """Train the stock model in one call of Trainer.train()."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    losses = []

    class EndTurn(TrainerCallback):
        def on_step_end(self, *_, **__):
            turns.done(*losses)
            losses.clear()

    class LossTrainer(Trainer):
        def training_step(self, *step_args, **step_kwargs):
            loss = super().training_step(*step_args, **step_kwargs)
            losses.append(loss)
            return loss

    batches = fixed_batches(args, micro_batch, folder)
    arguments = TrainingArguments(
        max_steps=len(batches) // args.accumulation,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=args.accumulation,
        # The precision and the compiler of the other variants
        bf16=args.precision == "bf16",
        fp16=args.precision == "fp16",
        torch_compile=args.compile,
        use_cpu=device().type == "cpu",
        # The optimizer of the other variants
        optim="adamw_torch_fused",
        learning_rate=ADAMW["lr"],
        adam_beta2=ADAMW["betas"][1],
        weight_decay=ADAMW["weight_decay"],
        lr_scheduler_type="constant",
        # Only training
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        output_dir=str(folder / "trainer"),
    )
    rows = []
    for inputs_BT, _ in batches:
        for row in inputs_BT.cpu():
            rows.append({"input_ids": row, "labels": row})
    loss_trainer = LossTrainer(
        stock_model(args),
        arguments,
        train_dataset=rows,
        callbacks=[EndTurn()],
    )
    loss_trainer.train()


class PlainGPT2(nn.Module):
    """A GPT-2 in plain PyTorch. Its parameters have the order of Transformers' GPT2LMHeadModel."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.tokens = nn.Embedding(args.vocab_size, args.n_embd)
        self.positions = nn.Embedding(args.sequence_length, args.n_embd)
        self.blocks = nn.ModuleList(
            PlainBlock(args.n_embd, args.n_head) for _ in range(args.n_layer)
        )
        self.norm = nn.LayerNorm(args.n_embd)

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss in nats per token."""
        positions_T = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
        x_BTD = self.tokens(inputs_BT) + self.positions(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BTD = self.norm(x_BTD)
        logits_BTV = F.linear(x_BTD, self.tokens.weight).float()
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    @torch.no_grad()
    def take_weights(self, stock: GPT2LMHeadModel) -> "PlainGPT2":
        """Copy the weights of Transformers' model, and return self."""
        pairs = zip(self.parameters(), stock.named_parameters(), strict=True)
        for parameter, (name, weight) in pairs:
            # The matrices in the blocks are Conv1D of shape (in, out).
            is_conv1d = ".h." in name and weight.dim() == 2
            if is_conv1d:
                weight = weight.mT
            parameter.copy_(weight)
        return self


class PlainBlock(nn.Module):
    """A transformer block: attention and MLP, each with a LayerNorm and a residual connection."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Apply the block. Input and output have the shape (batch, sequence, width)."""
        qkv = self.qkv(self.norm_1(x_BTD))
        qkv = qkv.unflatten(-1, (3, self.heads, -1))
        # (B, T, 3, heads, head width) becomes three tensors (B, heads, T, head width).
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attention_BTD = attention.transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.out(attention_BTD)

        hidden = self.up(self.norm_2(x_BTD))
        hidden = F.gelu(hidden, approximate="tanh")
        return x_BTD + self.down(hidden)


def plain(args: argparse.Namespace, micro_batch: int, folder: Path, turns: Turns) -> None:
    """Train PlainGPT2 with the weights of the stock model."""
    model = PlainGPT2(args)
    model.take_weights(stock_model(args))
    model.to(device())
    parameters = list(model.parameters())
    matrix_parameters = [parameter for parameter in parameters if parameter.dim() > 1]
    vector_parameters = [parameter for parameter in parameters if parameter.dim() == 1]
    groups = [
        {"params": matrix_parameters},
        {"params": vector_parameters, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, **ADAMW, fused=True)
    loss_of = torch.compile(model) if args.compile else model
    batches = fixed_batches(args, micro_batch, folder)
    plain_loop(turns, loss_of, optimizer, batches, args)


def nanogpt_model(args: argparse.Namespace) -> nn.Module:
    """Return the GPT of the nanoGPT checkout on the device."""
    file = Path(args.nanogpt) / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    config = module.GPTConfig(
        n_layer=args.n_layer,
        n_head=args.n_head,
        n_embd=args.n_embd,
        vocab_size=args.vocab_size,
        block_size=args.sequence_length,
        dropout=0.0,
        bias=False,
    )
    return module.GPT(config).to(device())


def nanogpt(args: argparse.Namespace, micro_batch: int, folder: Path, turns: Turns) -> None:
    """Train nanoGPT's GPT as its train.py does."""
    model = nanogpt_model(args)
    optimizer = model.configure_optimizers(
        ADAMW["weight_decay"],
        ADAMW["lr"],
        ADAMW["betas"],
        device().type,
    )
    run = torch.compile(model) if args.compile else model

    def loss_of(inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        _, loss = run(inputs_BT, targets_BT)
        return loss

    batches = fixed_batches(args, micro_batch, folder)
    plain_loop(turns, loss_of, optimizer, batches, args)


class Matrices(NamedTuple):
    """Weight matrices of one size."""

    count: int
    width_in: int
    width_out: int


def matrices(shape: estimate.Shape) -> list[Matrices]:
    """Return the weight matrices of the model. Each token is multiplied with each three times."""
    width = shape.n_embd
    return [
        Matrices(shape.n_layer, width, 3 * width),  # query, key and value
        Matrices(shape.n_layer, width, width),  # output of the attention
        Matrices(shape.n_layer, width, 4 * width),  # MLP, first layer
        Matrices(shape.n_layer, 4 * width, width),  # MLP, second layer
        Matrices(1, width, shape.vocab_size),  # logits
    ]


class Products:
    """The three matrix products of a weight: output, gradient of input, gradient of weight."""

    def __init__(self, sizes: Matrices, tokens: int, **tensor_options):
        self.count = sizes.count
        self.x = torch.randn((tokens, sizes.width_in), **tensor_options)
        self.weight = torch.randn((sizes.width_in, sizes.width_out), **tensor_options)
        self.y = torch.randn((tokens, sizes.width_out), **tensor_options)
        self.x_gradient = torch.empty_like(self.x)
        self.weight_gradient = torch.empty_like(self.weight)

    def compute(self) -> None:
        """Compute the products of all matrices of this size."""
        for _ in range(self.count):
            torch.mm(self.x, self.weight, out=self.y)
            torch.mm(self.y, self.weight.T, out=self.x_gradient)
            torch.mm(self.x.T, self.y, out=self.weight_gradient)


def ceiling(args: argparse.Namespace, micro_batch: int, folder: Path, turns: Turns) -> None:
    """Compute only the products of the weights and the causal attention of the model.

    Attention is the kernel of SDPA, forward and backward. Plain products would be slower, because
    they write the T x T scores to memory.
    """
    dtype = HALF_DTYPES.get(args.precision, torch.float32)
    tensor_options = {"device": device(), "dtype": dtype}
    tokens = micro_batch * args.sequence_length
    products = []
    for sizes in matrices(shape_of(args)):
        products.append(Products(sizes, tokens, **tensor_options))
    head_width = args.n_embd // args.n_head
    heads_shape = (micro_batch, args.n_head, args.sequence_length, head_width)
    q, k, v = (torch.randn(heads_shape, **tensor_options, requires_grad=True) for _ in range(3))
    gradient = torch.randn(heads_shape, **tensor_options)
    while True:
        for _ in range(args.accumulation):
            for matrices_of_a_size in products:
                matrices_of_a_size.compute()
            for _ in range(args.n_layer):
                attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                torch.autograd.grad(attention, (q, k, v), gradient)
        turns.done()


VARIANTS = {
    "ours": ours,
    "hf": hf,
    "trainer": trainer,
    "plain": plain,
    "nanogpt": nanogpt,
    "ceiling": ceiling,
    "descent": descent,
    "autotune": autotune,
}
# Measured by default. descent and autotune compile for minutes, and nanogpt needs a checkout.
DEFAULT_VARIANTS = ("ours", "hf", "trainer", "plain", "ceiling")

# ---- Report and command line.


def report(results: dict, together: bool, args: argparse.Namespace, micro_batch: int) -> dict:
    """Print the table and the ratios of a micro-batch, and return them for the JSON file.

    Args:
        results: of ``alternate``.
        together: whether the variants took turns. The speed of a machine drifts by a third within
            minutes, so variants that did not take turns with "ours" are not compared with it.
        args: the size of the model, and the precision.
        micro_batch: sequences per micro-batch.
    """
    print(HEADER)
    rows = {}
    for name, result in results.items():
        problem = result["problem"]
        if problem:
            print(f"{name:11}  {problem}")
            rows[name] = {"problem": problem}
        else:
            rows[name] = measured_row(result["turns"], args, micro_batch)
            print(table_line(name, rows[name], args))

    ratios = {}
    has_ours = "ours" in results and not results["ours"]["problem"]
    if together and has_ours:
        our_turns = results["ours"]["turns"]
        for name, result in results.items():
            if name != "ours" and not result["problem"]:
                ratios[name] = print_ratio(name, result["turns"], our_turns)
    return {"micro_batch": micro_batch, "variants": rows, "ours_over": ratios}


def measured_row(turns: list[dict], args: argparse.Namespace, micro_batch: int) -> dict:
    """Return the figures of a variant for the JSON file."""
    tokens = micro_batch * args.accumulation * args.sequence_length
    seconds = [turn["seconds"] for turn in turns]
    row = summary(seconds, tokens)
    row["loss"] = turns[-1]["loss"]
    row["bytes"] = peak_bytes(turns)
    row["mfu"] = None
    peak = gpus.peak_flops(hardware.this_device().name, args.precision)
    if peak:
        row["mfu"] = flops_per_second(row, args) / peak
    return row


def flops_per_second(row: dict, args: argparse.Namespace) -> float:
    """Return the floating-point operations per second of a variant."""
    return row["tokens_per_second"] * shape_of(args).flops_per_token


def table_line(name: str, row: dict, args: argparse.Namespace) -> str:
    """Return the line of a variant in the table."""
    teraflops = flops_per_second(row, args) / 1e12
    mfu_cell = "n/a"
    mfu = row["mfu"]
    if mfu is not None:
        mfu_cell = f"{mfu:.1%}"
    loss_cell = "n/a"
    loss = row["loss"]
    if loss is not None:
        loss_cell = f"{loss:.3f}"
    cells = [
        f"{name:11}",
        speed_cells(row),
        f"{teraflops:8.3g}",
        f"{mfu_cell:>5}",
        memory_cell(row),
        f"{loss_cell:>6}",
    ]
    return "  ".join(cells)


def print_ratio(name: str, turns: list[dict], our_turns: list[dict]) -> float:
    """Print and return how many times as fast as a variant train.py is."""
    ratios = []
    for turn, our_turn in zip(turns, our_turns, strict=True):
        ratios.append(turn["seconds"] / our_turn["seconds"])
    median = statistics.median(ratios)
    lowest = min(ratios)
    highest = max(ratios)
    print(
        f"ours / {name:9} {median:.3f} times "
        f"(median of the rounds' ratios; {lowest:.3f} .. {highest:.3f})"
    )
    return median


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        BadInput: --nanogpt is missing, or is not a checkout of nanoGPT.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_sizes(parser)
    parser.add_argument(
        "--accumulation",
        type=positive,
        metavar="N",
        default=1,
        help="Micro-batches per update. Default: %(default)s.",
    )
    add_turns(parser, micro_batch=4)
    default_names = " ".join(DEFAULT_VARIANTS)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=VARIANTS,
        help=f"Variants to measure. Default: {default_names}, and nanogpt with --nanogpt.",
    )
    parser.add_argument(
        "--nanogpt",
        type=paths.argument,
        metavar="PATH",
        help="Folder of a nanoGPT checkout. Its model.py is measured too.",
    )
    args = parser.parse_args(argv)
    if args.nanogpt and not (Path(args.nanogpt) / "model.py").is_file():
        raise BadInput(
            f"--nanogpt {args.nanogpt}: the folder contains no model.py. Give the folder of a "
            f"nanoGPT checkout"
        )
    if args.only is None:
        args.only = list(DEFAULT_VARIANTS)
        if args.nanogpt:
            args.only.append("nanogpt")
    if "nanogpt" in args.only and not args.nanogpt:
        raise BadInput("--only nanogpt: give --nanogpt PATH too, the folder of a nanoGPT checkout")
    return args


def measure(args: argparse.Namespace, micro_batch: int) -> dict:
    """Measure all variants with a micro-batch, print the table, and return it for the JSON file."""
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_ids(folder, args.vocab_size)
        variants = {}
        for name in args.only:
            variants[name] = functools.partial(VARIANTS[name], args, micro_batch, folder)
        together = fit_together(len(variants), args, micro_batch)
        results = alternate(
            variants,
            rounds=args.rounds,
            steps=args.steps_per_round,
            together=together,
        )

    order = "in turns"
    if not together:
        order = "one after the other, without ratios, because together they do not fit (--only)"
    compilation = "compiled" if args.compile else "eager"
    print(
        f"micro-batch  {micro_batch} x {args.accumulation}, precision {args.precision}, "
        f"{compilation}, {args.rounds} rounds of {args.steps_per_round} updates, {order}"
    )
    record = report(results, together, args, micro_batch)
    record["in_turns"] = order
    return record


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Measure every micro-batch, and return the exit status."""
    args = parse(argv)
    this_device = settle(args)
    record = about(args, this_device)
    record["compiled"] = args.compile
    record["accumulation"] = args.accumulation
    record["steps_per_round"] = args.steps_per_round
    record["micro_batches"] = []
    for micro_batch in args.micro_batch:
        record["micro_batches"].append(measure(args, micro_batch))
    write_json(args.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
