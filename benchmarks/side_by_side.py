"""Helpers of the benchmarks that compare training loops side by side.

They start one process per variant, let the variants take turns, define the flags for the size of
the model, and write the token ids that all variants read. This module is not a program:
throughput.py, ladder.py and traffic.py use it.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import train
from benchmarks.runs import ROOT, flag_words, last_line, once
from ursa_minor.base import paths
from ursa_minor.data.loading.corpus import Corpus
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.machine import device as hardware
from ursa_minor.machine.accelerator import check_supported
from ursa_minor.model.dtypes import HALF_DTYPES
from ursa_minor.optim import update
from ursa_minor.preflight import estimate
from ursa_minor.recipe import keys, loading
from ursa_minor.recipe.batching import make_plan

RECIPE = ROOT / "recipes" / "gpt2_124m.yaml"
SIZES = {
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "vocab_size": 50304,
    "sequence_length": 1024,
}
# train.py only trains: it neither evaluates nor writes samples and checkpoints.
QUIET = {
    "eval_steps": "0",
    "task_steps": "0",
    "sample_steps": "0",
    "save_steps": "0",
}
# As in the recipe
ADAMW = {
    "lr": 6e-4,
    "betas": (0.9, 0.95),
    "weight_decay": 0.1,
}
WARM_UP = 2  # updates before the first turn, which compile the model and allocate AdamW's moments
TOKENS = 2**22  # token ids in the file that the variants read


class Turns:
    """The turns of one variant, in its own process.

    The training loop of the variant calls ``done`` after each update. At the end of a turn ``done``
    sends the figures of the turn and blocks until the next turn begins.
    """

    def __init__(self, connection: Connection):
        self.connection = connection
        self.is_on_gpu = device().type == "cuda"
        self._parent = os.getppid()

    def wait(self) -> None:
        """Block until the next turn begins.

        Raises:
            EOFError: there is no further turn.
        """
        self._timed_updates = self.connection.recv()
        self._updates_left = self._timed_updates
        if self.is_on_gpu:
            # The first update allocates again the memory that was released between turns.
            self._updates_left += 1
        self._start = time.perf_counter()

    def done(self, *losses: torch.Tensor | float) -> None:
        """End an update.

        Args:
            losses: their sum is the mean loss of the update. They are read only after the clock has
                stopped, because reading a tensor waits for the GPU.

        Raises:
            EOFError: the parent process was killed, or there is no further turn.
        """
        if os.getppid() != self._parent:
            raise EOFError
        self._updates_left -= 1
        if self.is_on_gpu and self._updates_left in (0, self._timed_updates):
            torch.cuda.synchronize()
        if self._updates_left == self._timed_updates:
            torch.cuda.reset_peak_memory_stats()
            self._start = time.perf_counter()
        if self._updates_left:
            return

        elapsed = time.perf_counter() - self._start
        figures = {"seconds": elapsed / self._timed_updates, "loss": None}
        if losses:
            figures["loss"] = sum(map(float, losses))
        if self.is_on_gpu:
            figures["bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
        self.connection.send(figures)
        self.wait()


Variant = Callable[[Turns], None]


def serve(connection: Connection, variant: Variant) -> None:
    """Build and train a variant for as long as it gets turns. Its process runs this function."""
    import transformers

    transformers.logging.set_verbosity_error()
    has_tf32 = hardware.this_device().has_tf32
    torch.set_float32_matmul_precision("high" if has_tf32 else "highest")
    try:
        turns = Turns(connection)
        turns.wait()
        with contextlib.redirect_stdout(sys.stderr):
            variant(turns)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except torch.OutOfMemoryError:
        connection.send({"problem": "out of memory"})
    except Exception as error:
        kind = type(error).__name__
        first_line, _, _ = str(error).strip().partition("\n")
        connection.send({"problem": f"{kind}: {first_line[:200]}"})


class VariantProcess(NamedTuple):
    """The process of a variant, and our end of the pipe to it."""

    process: multiprocessing.process.BaseProcess
    connection: Connection


def alternate(
    variants: dict[str, Variant], *, rounds: int, steps: int, together: bool = True
) -> dict[str, dict]:
    """Start a process for each variant, and let the variants take turns.

    Args:
        variants: functions by name. The functions and their arguments must be picklable.
        rounds: turns of each variant. Each round begins with another variant.
        steps: updates of a turn.
        together: start all processes at the beginning. Otherwise a variant starts when the one
            before it has finished all rounds, which takes less memory.

    Returns:
        For each variant ``turns``, a list with the ``seconds`` of an update, the ``loss`` and on a
        GPU the peak in ``bytes``, and ``problem``, which is empty or says why the variant ended.
    """
    # Use one GPU, because the Trainer would distribute its batches over several.
    visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    first_gpu, *_ = visible_gpus.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = first_gpu

    results = {name: {"turns": [], "problem": ""} for name in variants}
    groups = [list(variants)] if together else [[name] for name in variants]
    for names in groups:
        processes: dict[str, VariantProcess] = {}
        try:
            for name in names:
                processes[name] = start_variant(variants[name])
            for number in range(rounds + 1):  # round 0 builds and warms up
                first = max(0, number - 1) % len(names)
                for name in names[first:] + names[:first]:
                    result = results[name]
                    if not result["problem"]:
                        updates = steps if number else WARM_UP
                        outcome = take_turn(processes[name], result, number, updates)
                        print(f"round {number} of {rounds}  {name} {outcome}", file=sys.stderr)
        finally:
            for process, connection in processes.values():
                connection.close()
                process.join(5)
                process.kill()
    return results


def start_variant(variant: Variant) -> VariantProcess:
    """Start the process of a variant. It waits for its first turn."""
    # A fork would inherit the state of CUDA and OpenMP.
    context = multiprocessing.get_context("spawn")
    our_end, its_end = context.Pipe()
    process = context.Process(target=serve, args=(its_end, variant), daemon=True)
    process.start()
    its_end.close()
    return VariantProcess(process, our_end)


def take_turn(variant: VariantProcess, result: dict, number: int, updates: int) -> str:
    """Give a variant one turn, and add the answer to its result.

    Args:
        variant: its process.
        result: the variant's entry of the results, which is changed.
        number: of the round. The figures of round 0 are not kept.
        updates: of this turn.

    Returns:
        The outcome for the progress line.
    """
    process, connection = variant
    start = time.perf_counter()
    try:
        connection.send(updates)
        answer = connection.recv()
    except (EOFError, OSError):
        process.join(5)
        problem = f"its process ended, exit status {process.exitcode}"
        if process.exitcode == -9:
            problem += " (killed: for memory?)"
        answer = {"problem": problem}

    if "problem" in answer:
        result["problem"] = answer["problem"]
        process.join(10)  # afterwards its memory is free
        return answer["problem"]
    if number == 0:
        seconds = time.perf_counter() - start
        return f"is ready after {seconds:.0f} s"
    result["turns"].append(answer)
    milliseconds = 1000 * answer["seconds"]
    return f"{milliseconds:.1f} ms"


# The following helpers define flags, the device, the data and a training loop.


def device() -> torch.device:
    """Return the device that is measured: a GPU if there is one, otherwise the CPU."""
    has_gpu = hardware.this_device().kind == "cuda"
    return torch.device("cuda" if has_gpu else "cpu")


def write_ids(folder: Path, vocab_size: int) -> None:
    """Write a data folder for train.py with random token ids.

    The ids follow Zipf's law, as words do: the share of the k-th most frequent id is about 1 / k.
    """
    generator = np.random.default_rng(0)
    ranks = vocab_size ** generator.random(TOKENS)
    ids = ranks.astype(np.uint32) - 1
    np.save(folder / "train.npy", ids)
    np.save(folder / "val.npy", ids)
    tokenizer = tokenization.make_characters(["ab"])
    tokenizer.save_pretrained(folder / "tokenizer")


def sizes_of(args: argparse.Namespace) -> dict[str, int]:
    """Return the flags for the size of the model."""
    return {name: getattr(args, name) for name in SIZES}


def recipe_of(**changes) -> keys.Recipe:
    """Return recipes/gpt2_124m.yaml with other values of some keys."""
    recipe = loading.load_recipe(RECIPE)
    return keys.replace(recipe, **changes)


def our_flags(args: argparse.Namespace, micro_batch: int, folder: Path) -> dict[str, str]:
    """Return flags of train.py for this size, with the full learning rate from the first update."""
    flags = {
        **sizes_of(args),
        "tokens_per_step": micro_batch * args.accumulation * args.sequence_length,
        "per_device_train_batch_size": micro_batch,
        "warmup_steps": 0,
        "data_dir": folder,
        # train.py memory-maps a large corpus. It would copy one of this size to the GPU.
        "data_device": "cpu",
        "output_dir": folder / "run",
    }
    return {name: str(value) for name, value in flags.items()}


def run_train(argv: list[str], turns: Turns) -> None:
    """Run train.py in this process, so that each of its updates ends with ``turns.done``.

    Args:
        argv: arguments for train.py.
        turns: of this variant.

    Raises:
        RuntimeError: train.py ended before the last turn.
    """
    original_update = update.update

    def update_in_turn(*args, **kwargs) -> update.Update:
        outcome = original_update(*args, **kwargs)
        turns.done(outcome.loss)
        return outcome

    update.update = update_in_turn
    all_arguments = once([*argv, *flag_words(QUIET)])
    with tempfile.TemporaryFile("w+") as log:
        with contextlib.redirect_stderr(log):
            status = train.main(all_arguments)
        log.seek(0)
        message = last_line(log.read())
        raise RuntimeError(f"train.py ended with {status}: {message}")


def fixed_batches(
    args: argparse.Namespace, micro_batch: int, folder: Path
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the micro-batches that train.py reads: inputs_BT and targets_BT on the device."""
    recipe = loading.load_recipe(RECIPE, our_flags(args, micro_batch, folder))
    plan = make_plan(recipe, 1)
    updates = WARM_UP + 1 + args.rounds * (args.steps_per_round + 1)
    batches = []
    with Corpus(recipe, []) as corpus:
        loader = corpus.loader(plan, device(), rank=0)
        for step in range(updates):
            for micro_step in range(args.accumulation):
                batches.append(loader.batch(step, micro_step))
    return batches


def stock_model(args: argparse.Namespace, **changes) -> GPT2LMHeadModel:
    """Return the GPT-2 of Transformers without dropout, with the same first weights as train.py.

    Args:
        args: the size of the model.
        changes: to the GPT2Config.
    """
    settings = {
        "n_layer": args.n_layer,
        "n_embd": args.n_embd,
        "n_head": args.n_head,
        "vocab_size": args.vocab_size,
        "n_positions": args.sequence_length,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attn_implementation": "sdpa",
    }
    config = GPT2Config(**settings | changes)
    torch.manual_seed(recipe_of().model.seed)
    return GPT2LMHeadModel(config).train()


def plain_loop(
    turns: Turns,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    args: argparse.Namespace,
) -> None:
    """Train with the usual loop: autocast, scale, backward, unscale, clip, step."""
    device_type = device().type
    half = HALF_DTYPES.get(args.precision)
    endless_batches = itertools.cycle(batches)
    scaler = torch.amp.GradScaler(device_type, enabled=args.precision == "fp16")
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]

    while True:
        losses = []
        for _ in range(args.accumulation):
            inputs_BT, targets_BT = next(endless_batches)
            with torch.autocast(device_type, half, enabled=half is not None):
                loss = loss_of(inputs_BT, targets_BT) / args.accumulation
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        turns.done(*losses)


def positive(text: str) -> int:
    """Convert an argument into an integer above 0, or raise ValueError."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def add_sizes(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add the flags for the size of the model, and --json."""
    for name, size in (SIZES | defaults).items():
        parser.add_argument(
            f"--{name}",
            type=positive,
            metavar="N",
            default=size,
            help="Default: %(default)s.",
        )
    parser.add_argument(
        "--json",
        type=paths.argument,
        metavar="PATH",
        help="Also write the figures to this file.",
    )


def add_turns(parser: argparse.ArgumentParser, *, micro_batch: int) -> None:
    """Add the flags of benchmarks whose variants take turns.

    Args:
        parser: receives the flags.
        micro_batch: the default on a CPU.
    """
    steps = 1
    if device().type == "cuda":
        steps = 10
        micro_batch = 16  # our loss computes this many rows in several chunks
    parser.add_argument(
        "--micro_batch",
        type=positive,
        nargs="+",
        metavar="N",
        default=[micro_batch],
        help="Micro-batches to measure, in sequences. Default on this machine: %(default)s.",
    )
    parser.add_argument(
        "--precision",
        choices=["bf16", "fp16", "no"],
        help="Precision of matrix products. Default: the best that this device supports.",
    )
    parser.add_argument(
        "--compile",
        type=json.loads,
        default=True,
        metavar="true|false",
        help="Use torch.compile. Default: true.",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        metavar="N",
        default=5,
        help="Turns of each variant. Default: %(default)s.",
    )
    parser.add_argument(
        "--steps_per_round",
        type=positive,
        metavar="N",
        default=steps,
        help="Updates per turn. Default on this machine: %(default)s.",
    )


def settle(args: argparse.Namespace) -> hardware.Device:
    """Set the default precision, and the environment variables that accelerate's launcher sets.

    Returns:
        The device of this machine.

    Raises:
        BadInput: the device does not support the precision or the compiler.
    """
    use_cpu = device().type == "cpu"
    os.environ["ACCELERATE_USE_CPU"] = str(use_cpu).lower()
    this_device = hardware.this_device()
    args.precision = args.precision or this_device.precision
    os.environ["ACCELERATE_MIXED_PRECISION"] = args.precision
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "inductor" if args.compile else "no"
    check_supported(this_device, os.environ)
    return this_device


def shape_of(args: argparse.Namespace) -> estimate.Shape:
    """Return the size of the model for estimates."""
    return estimate.Shape(
        n_layer=args.n_layer,
        n_embd=args.n_embd,
        vocab_size=args.vocab_size,
        sequence_length=args.sequence_length,
    )


def fit_together(
    count: int, args: argparse.Namespace, micro_batch: int, more_bytes: int = 0
) -> bool:
    """Return whether the memory suffices for all variants at the same time.

    While one of them trains, the others keep their weights, gradients and moments in memory.

    Args:
        count: number of variants.
        args: the size of the model, and the precision.
        micro_batch: sequences per micro-batch.
        more_bytes: memory that the working variant needs in addition to the estimate, such as
            materialized attention scores.
    """
    shape = shape_of(args)
    working = estimate.memory(
        shape,
        micro_batch=micro_batch,
        half=args.precision != "no",
        compiled=False,
    )
    # The other implementations keep all logits.
    tokens = micro_batch * args.sequence_length
    working["logits"] = 12 * tokens * args.vocab_size
    waiting_bytes = count * (12 * shape.parameters + estimate.CONTEXT_BYTES)
    working_bytes = sum(working.values()) + more_bytes
    available_bytes = estimate.HEADROOM * hardware.free_memory_bytes(device())
    return waiting_bytes + working_bytes <= available_bytes


def about(args: argparse.Namespace, this_device: hardware.Device) -> dict:
    """Print the machine, the software and the model, and return them for the JSON file."""
    versions = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    listed_versions = ", ".join(f"{name} {number}" for name, number in versions.items())
    shape = shape_of(args)
    megaflops = shape.flops_per_token / 1e6
    load, _, _ = os.getloadavg()
    print(f"machine      {this_device.name}, load {load:.1f} at the start")
    print(f"software     {listed_versions}")
    print(
        f"model        {args.n_layer} layers of {args.n_embd}, {args.n_head} heads, "
        f"vocabulary {args.vocab_size:,}, {args.sequence_length} tokens: "
        f"{shape.parameters:,} parameters, {megaflops:,.1f} MFLOP a token"
    )
    return {
        "machine": this_device.name,
        "threads": torch.get_num_threads(),
        **versions,
        "shape": vars(shape),
        "precision": args.precision,
    }


def summary(seconds: list[float], tokens: int) -> dict[str, float]:
    """Return the median time of an update in ms, and median and extremes of the tokens/s.

    Args:
        seconds: of an update, one value per turn.
        tokens: of an update.
    """
    median = statistics.median(seconds)
    return {
        "ms": 1000 * median,
        "tokens_per_second": tokens / median,
        "slowest": tokens / max(seconds),
        "fastest": tokens / min(seconds),
    }


def speed_cells(row: dict) -> str:
    """Return the cells of a table with the figures of ``summary``."""
    milliseconds = row["ms"]
    median = row["tokens_per_second"]
    slowest = row["slowest"]
    fastest = row["fastest"]
    speeds = f"{median:9,.0f} ({slowest:9,.0f} .. {fastest:9,.0f})"
    return f"{milliseconds:9,.1f}  {speeds}"


def memory_cell(row: dict) -> str:
    """Return the cell of a table with the memory peak in MiB."""
    if row["bytes"] is None:
        return f"{'n/a':>9}"
    mebibytes = row["bytes"] / 2**20
    return f"{mebibytes:9,.0f}"


def peak_bytes(turns: list[dict]) -> int | None:
    """Return the highest memory peak of some turns, or None if it was not measured (CPU)."""
    peaks = [turn["bytes"] for turn in turns if "bytes" in turn]
    return max(peaks, default=None)
