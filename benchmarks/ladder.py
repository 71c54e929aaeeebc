"""Measure the usual speed-ups of GPT-2 training, each on top of those before it.

    python benchmarks/ladder.py                      # GPT-2 124M with 1,024 tokens
    python benchmarks/ladder.py --micro_batch 4 --precision bf16 --json ladder.json

For each micro-batch it prints a table with one line per rung: ms per update, tokens/s, how many
times as fast the rung is as the one before it and as the first one, peak memory and last loss.

The first rung is the model as Transformers provides it: fp32, eager, attention without a fused
kernel, and AdamW that updates one tensor after the other (foreach=False). The rungs take turns like
the variants of throughput.py, each in its own process. If the memory does not suffice for all of
them, they run one after the other. A rung that this machine does not support is skipped with the
reason, and the next rungs build on the one before it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import functools
import statistics
import tempfile
from typing import NamedTuple

import torch

from benchmarks import side_by_side
from benchmarks.runs import write_json
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.machine import device as hardware
from ursa_minor.model.architectures import GPT2
from ursa_minor.model.attention import CAUSAL, register_causal_attention
from ursa_minor.model.loss import NextTokenLoss

# The settings of the first rung.
GROUND = {
    "attn_implementation": "eager",
    "activation_function": "gelu_new",
    "precision": "no",
    "tf32": False,
    "compile": False,
    "fused": False,
    "own_loss": False,
}
HEADER = (
    "rung                              ms/update   tokens/s (slowest .. fastest)      "
    "before   first   peak MiB    loss"
)


class Rung(NamedTuple):
    """A speed-up."""

    name: str
    change: dict  # of the settings
    skip_reason: str  # empty if this machine supports the rung


def rungs(args: argparse.Namespace, device: hardware.Device) -> list[Rung]:
    """Return the rungs in their order.

    Args:
        args: has ``precision``, ``vocab_size`` and ``compile``.
        device: decides which rungs are skipped.
    """
    no_tf32 = "" if device.has_tf32 else f"{device.name} has no TF32"

    autocast = f"{args.precision} autocast"
    no_autocast = ""
    if args.precision == "no":
        autocast = "bf16 autocast"
        no_autocast = "fp32 is the default here; --precision bf16 tries it"

    no_compiler = ""
    if not args.compile:
        no_compiler = "--compile false"
    elif device.kind == "cuda" and not device.compiles:
        no_compiler = "no Triton for this card here"

    padded_vocab_size = -(-args.vocab_size // 128) * 128
    no_padding = ""
    if padded_vocab_size == args.vocab_size:
        no_padding = f"{args.vocab_size:,} is a multiple of 128 as it is"

    return [
        Rung("fp32, eager, attention by hand", {}, ""),
        Rung("TF32", {"tf32": True}, no_tf32),
        Rung(autocast, {"precision": args.precision}, no_autocast),
        Rung("SDPA attention", {"attn_implementation": "sdpa"}, ""),
        Rung("torch.compile", {"compile": True}, no_compiler),
        Rung(
            f"vocabulary {args.vocab_size:,} -> {padded_vocab_size:,}",
            {"vocab_size": padded_vocab_size},
            no_padding,
        ),
        Rung("fused AdamW", {"fused": True}, ""),
        Rung("causal attention without a mask", {"attn_implementation": CAUSAL}, ""),
        Rung("tanh GELU in one kernel", GPT2.in_training, ""),
        Rung("our loss module", {"own_loss": True}, ""),
    ]


def climb(
    args: argparse.Namespace,
    micro_batch: int,
    folder: Path,
    settings: dict,
    turns: side_by_side.Turns,
) -> None:
    """Train with the settings of one rung until ``turns`` ends it.

    Args:
        args: the size of the model.
        micro_batch: sequences per micro-batch.
        folder: contains the token ids.
        settings: GROUND with the changes of this rung and those before it.
        turns: of this rung.
    """
    torch.set_float32_matmul_precision("high" if settings["tf32"] else "highest")
    register_causal_attention()
    model = side_by_side.stock_model(
        args,
        attn_implementation=settings["attn_implementation"],
        activation_function=settings["activation_function"],
        vocab_size=settings["vocab_size"],
    )
    model = model.to(side_by_side.device())
    kernel = {"fused": True} if settings["fused"] else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), **side_by_side.ADAMW, **kernel)
    module = NextTokenLoss(model) if settings["own_loss"] else model
    run = torch.compile(module) if settings["compile"] else module

    def loss_of(inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        if settings["own_loss"]:
            return run(inputs_BT, targets_BT)
        return run(inputs_BT, labels=inputs_BT).loss  # the model shifts the labels

    batches = side_by_side.fixed_batches(args, micro_batch, folder)
    loop_args = with_precision(args, settings["precision"])
    side_by_side.plain_loop(turns, loss_of, optimizer, batches, loop_args)


def with_precision(args: argparse.Namespace, precision: str) -> argparse.Namespace:
    """Return a copy of the arguments with another precision."""
    return argparse.Namespace(**vars(args) | {"precision": precision})


def report(ladder: list[Rung], results: dict, tokens: int) -> list[dict]:
    """Print the table of a micro-batch, and return its rows for the JSON file.

    Args:
        ladder: all rungs.
        results: of ``side_by_side.alternate``, for the rungs that were not skipped.
        tokens: of an update.
    """
    print(HEADER)
    first_seconds = None
    seconds_before = None
    rows = []
    for rung in ladder:
        problem = f"skipped: {rung.skip_reason}"
        if not rung.skip_reason:
            problem = results[rung.name]["problem"]
        if problem:
            print(f"{rung.name:32}  {problem}")
            rows.append({"rung": rung.name, "problem": problem})
            continue

        turns = results[rung.name]["turns"]
        seconds = [turn["seconds"] for turn in turns]
        first_seconds = first_seconds or seconds
        row = {"rung": rung.name, **side_by_side.summary(seconds, tokens)}
        row["loss"] = turns[-1]["loss"]
        row["bytes"] = side_by_side.peak_bytes(turns)
        row["over_before"] = speed_up(seconds_before or seconds, seconds)
        row["over_first"] = speed_up(first_seconds, seconds)
        seconds_before = seconds
        rows.append(row)
        print(table_line(row))
    print(
        "before, first: times the tokens a second of the rung before it, of the first one "
        "(medians of the rounds' ratios)"
    )
    return rows


def speed_up(slow: list[float], fast: list[float]) -> float:
    """Return the median of the ratios of two lists of seconds, round by round."""
    return statistics.median(before / after for before, after in zip(slow, fast, strict=True))


def table_line(row: dict) -> str:
    """Return the line of a rung in the table."""
    cells = [
        f"{row['rung']:32}",
        side_by_side.speed_cells(row),
        f"{row['over_before']:6.2f}",
        f"{row['over_first']:6.2f}",
        side_by_side.memory_cell(row),
        f"{row['loss']:6.3f}",
    ]
    return "  ".join(cells)


def measure(ladder: list[Rung], args: argparse.Namespace, micro_batch: int) -> dict:
    """Measure all rungs with a micro-batch, print the table, and return it for the JSON file."""
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        side_by_side.write_ids(folder, args.vocab_size)
        settings = GROUND | {"vocab_size": args.vocab_size}
        variants = {}
        for rung in ladder:
            if not rung.skip_reason:
                settings = settings | rung.change
                variants[rung.name] = functools.partial(climb, args, micro_batch, folder, settings)
        # The first rung needs the most memory: fp32, with all attention scores.
        score_bytes = 12 * args.n_layer * args.n_head * micro_batch * args.sequence_length**2
        together = side_by_side.fit_together(
            len(variants), with_precision(args, "no"), micro_batch, score_bytes
        )
        results = side_by_side.alternate(
            variants, rounds=args.rounds, steps=args.steps_per_round, together=together
        )

    order = "in turns"
    if not together:
        order = "one rung after the other, because together they do not fit into memory"
    print(
        f"micro-batch  {micro_batch}, {args.rounds} rounds of {args.steps_per_round} updates, "
        f"{order}"
    )
    rows = report(ladder, results, micro_batch * args.sequence_length)
    return {"micro_batch": micro_batch, "in_turns": together, "rungs": rows}


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Measure every micro-batch, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    side_by_side.add_sizes(parser, vocab_size=50257)
    side_by_side.add_turns(parser, micro_batch=2)
    args = parser.parse_args(argv)
    args.accumulation = 1
    device = side_by_side.settle(args)
    record = side_by_side.about(args, device)
    record["steps_per_round"] = args.steps_per_round
    record["micro_batches"] = []
    ladder = rungs(args, device)
    for micro_batch in args.micro_batch:
        record["micro_batches"].append(measure(ladder, args, micro_batch))
    write_json(args.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
