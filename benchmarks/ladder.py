"""What each known speed-up of GPT-2 training gives: one after the other, each on top of those before it.

    python benchmarks/ladder.py                                          # GPT-2 124M at 1,024 tokens
    python benchmarks/ladder.py --micro_batch 4 --precision bf16 --json ladder.json

The first rung is the model as Transformers gives it: fp32, eager, attention by hand, AdamW tensor by tensor
(foreach=False). The rungs take turns as the variants of throughput.py do, each in a process of its own, or run one
after the other where their memory is too much together. A rung that this machine cannot climb is skipped, with the
reason, and those after it stand on the one before.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import functools
import statistics
import tempfile

import torch

from benchmarks import side_by_side
from benchmarks.runs import write_json
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.machine import device as hardware
from ursa_minor.model.architectures import GPT2
from ursa_minor.model.attention import CAUSAL, register_causal_attention
from ursa_minor.model.loss import NextTokenLoss

GROUND = {"attn_implementation": "eager", "activation_function": "gelu_new", "precision": "no"}
GROUND |= {"tf32": False, "compile": False, "fused": False, "own_loss": False}


def rungs(args: argparse.Namespace, device: hardware.Device) -> list[tuple[str, dict, str]]:
    """Return the ladder: each rung's name, what it changes, and why it is skipped here (empty: it is not)."""
    padded = -(-args.vocab_size // 128) * 128
    no_compiler = (
        "no Triton for this card here" if device.kind == "cuda" and not device.compiles else ""
    )
    return [
        ("fp32, eager, attention by hand", {}, ""),
        ("TF32", {"tf32": True}, "" if device.has_tf32 else f"{device.name} has no TF32"),
        (
            f"{args.precision if args.precision != 'no' else 'bf16'} autocast",
            {"precision": args.precision},
            "" if args.precision != "no" else "fp32 is the default here; --precision bf16 tries it",
        ),
        ("SDPA attention", {"attn_implementation": "sdpa"}, ""),
        ("torch.compile", {"compile": True}, no_compiler if args.compile else "--compile false"),
        (
            f"vocabulary {args.vocab_size:,} -> {padded:,}",
            {"vocab_size": padded},
            "" if padded != args.vocab_size else f"{padded:,} is a multiple of 128 as it is",
        ),
        ("fused AdamW", {"fused": True}, ""),
        ("causal attention without a mask", {"attn_implementation": CAUSAL}, ""),
        ("tanh GELU in one kernel", GPT2.in_training, ""),
        ("our loss module", {"own_loss": True}, ""),
    ]


def climb(
    args: argparse.Namespace,
    micro_batch: int,
    folder: Path,
    settings: dict,
    turns: side_by_side.Turns,
) -> None:
    """Train on one rung.

    Args:
        settings: GROUND, changed.
    """
    torch.set_float32_matmul_precision("high" if settings["tf32"] else "highest")
    register_causal_attention()
    shape = {
        name: settings[name]
        for name in ("attn_implementation", "activation_function", "vocab_size")
    }
    model = side_by_side.stock_model(args, **shape).to(side_by_side.device())
    kernel = {"fused": True} if settings["fused"] else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), **side_by_side.ADAMW, **kernel)
    module = NextTokenLoss(model) if settings["own_loss"] else model
    run = torch.compile(module) if settings["compile"] else module
    loss_of = (
        run if settings["own_loss"] else lambda inputs_BT, _: run(inputs_BT, labels=inputs_BT).loss
    )
    batches = side_by_side.fixed_batches(args, micro_batch, folder)
    args = argparse.Namespace(**vars(args) | {"precision": settings["precision"]})
    side_by_side.plain_loop(turns, loss_of, optimizer, batches, args)


def report(ladder: list[tuple[str, dict, str]], results: dict, tokens: int) -> list[dict]:
    """Print the table of a micro-batch; return its rows for the JSON."""
    print(
        "rung                              ms/update   tokens/s (slowest .. fastest)      before   first   peak MiB    loss"
    )
    first, before, rows = None, None, []
    for name, _, reason in ladder:
        problem = f"skipped: {reason}" if reason else results[name]["problem"]
        if problem:
            print(f"{name:32}  {problem}")
            rows.append({"rung": name, "problem": problem})
            continue
        turns = results[name]["turns"]
        seconds = [turn["seconds"] for turn in turns]
        row = {"rung": name, **side_by_side.summary(seconds, tokens), "loss": turns[-1]["loss"]}
        row["bytes"] = max((turn["bytes"] for turn in turns if "bytes" in turn), default=None)
        for key, other in (("over_before", before), ("over_first", first)):
            row[key] = statistics.median(
                b / a for a, b in zip(seconds, other or seconds, strict=True)
            )
        first, before = first or seconds, seconds
        memory = f"{row['bytes'] / 2**20:,.0f}" if row["bytes"] else "n/a"
        print(
            f"{name:32}  {row['ms']:9,.1f}  {row['tokens_per_second']:9,.0f} ({row['slowest']:9,.0f} .. "
            f"{row['fastest']:9,.0f})  {row['over_before']:6.2f}  {row['over_first']:6.2f}  {memory:>9}  {row['loss']:6.3f}"
        )
        rows.append(row)
    print(
        "before, first: times the tokens a second of the rung before it, of the first one (medians of the rounds' ratios)"
    )
    return rows


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Climb the ladder at every micro-batch; print a table for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    side_by_side.add_sizes(parser, vocab_size=50257)
    side_by_side.add_turns(parser, micro_batch=2)
    args = parser.parse_args(argv)
    args.accumulation = 1
    device = side_by_side.settle(args)
    record = side_by_side.about(args, device) | {
        "steps_per_round": args.steps_per_round,
        "micro_batches": [],
    }
    ladder = rungs(args, device)
    for micro_batch in args.micro_batch:
        with tempfile.TemporaryDirectory() as name:
            side_by_side.write_ids(Path(name), args.vocab_size)
            settings, climbed = GROUND | {"vocab_size": args.vocab_size}, {}
            for rung, change, _ in [rung for rung in ladder if not rung[2]]:
                settings = settings | change
                climbed[rung] = functools.partial(climb, args, micro_batch, Path(name), settings)
            # Score the model of the widest rung.
            fp32 = argparse.Namespace(**vars(args) | {"precision": "no"})
            scores = 12 * args.n_layer * args.n_head * micro_batch * args.sequence_length**2
            together = side_by_side.fit_together(len(climbed), fp32, micro_batch, scores)
            results = side_by_side.alternate(
                climbed, rounds=args.rounds, steps=args.steps_per_round, together=together
            )
        print(
            f"micro-batch  {micro_batch}, {args.rounds} rounds of {args.steps_per_round} updates, "
            f"{'in turns' if together else 'one rung after the other: all at once do not fit into the memory'}"
        )
        rows = report(ladder, results, micro_batch * args.sequence_length)
        record["micro_batches"].append(
            {"micro_batch": micro_batch, "in_turns": together, "rungs": rows}
        )
    write_json(args.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
