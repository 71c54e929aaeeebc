"""What benchmarks that measure side by side share: variants that take turns, sizes as flags, one set of batches."""

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
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import train
from benchmarks.runs import ROOT, flag_words, once
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
SIZES = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50304, "sequence_length": 1024}
# Nothing beside training: no evaluation, no sample, no checkpoint.
QUIET = {f"{name}_steps": "0" for name in ("eval", "task", "sample", "save")}
ADAMW = {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}  # the recipe's
WARM_UP = 2  # updates before the first turn: compiling, moments
TOKENS = 2**22  # ids in the file that is read


class Turns:
    """A variant's end of the alternation: its loop calls ``done`` after each update and sleeps there between turns."""

    def __init__(self, connection):
        self.connection, self.card = connection, device().type == "cuda"
        self._parent = os.getppid()

    def wait(self) -> None:
        """Sleep until the next turn; raises EOFError when there is none."""
        self._timed = self.connection.recv()
        self._left = self._timed + self.card
        self._start = time.perf_counter()

    def done(self, *loss: torch.Tensor | float) -> None:
        """End an update. ``loss``: the parts whose sum is its mean loss; read only when the clock has stopped."""
        if os.getppid() != self._parent:
            raise EOFError  # it was killed, and waits for no answer
        self._left -= 1
        if self.card and self._left in (0, self._timed):
            torch.cuda.synchronize()
        if self._left == self._timed:
            torch.cuda.reset_peak_memory_stats()
            self._start = time.perf_counter()
        if self._left:
            return
        figures = {"seconds": (time.perf_counter() - self._start) / self._timed}
        figures["loss"] = sum(map(float, loss)) if loss else None
        if self.card:
            figures["bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
        self.connection.send(figures)
        self.wait()


def serve(connection, variant: Callable[[Turns], None]) -> None:
    """Be a variant's process: build and train it for as long as it gets turns."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_float32_matmul_precision("high" if hardware.this_device().has_tf32 else "highest")
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
        connection.send(
            {
                "problem": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
            }
        )


def alternate(
    variants: dict[str, Callable[[Turns], None]], *, rounds: int, steps: int, together: bool = True
) -> dict:
    """Give each variant a process and let them take turns of ``steps`` updates, each round beginning with another one.

    Args:
        variants: by name; functions and arguments that another Python can import.
        together: all are there all the time; else one after the other, which takes less memory.

    Returns, by name, ``turns``, a list of what each turn gave (``seconds`` of an update, ``loss``, ``bytes``), and
    ``problem``, empty or what ended it.
    """
    # One card: on several the Trainer would share its batches out among them.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    # A fork would inherit the state of CUDA and OpenMP.
    context = multiprocessing.get_context("spawn")
    results = {name: {"turns": [], "problem": ""} for name in variants}
    for names in [list(variants)] if together else [[name] for name in variants]:
        started = {}
        try:
            for name in names:
                connection, theirs = context.Pipe()
                process = context.Process(target=serve, args=(theirs, variants[name]), daemon=True)
                process.start()
                theirs.close()
                started[name] = process, connection
            for number in range(rounds + 1):  # 0: building and warming up
                first = max(0, number - 1) % len(names)
                for name in [
                    name for name in names[first:] + names[:first] if not results[name]["problem"]
                ]:
                    begin, (process, connection) = time.perf_counter(), started[name]
                    try:
                        connection.send(steps if number else WARM_UP)
                        answer = connection.recv()
                    except (EOFError, OSError):
                        process.join(5)
                        why = " (killed: for memory?)" if process.exitcode == -9 else ""
                        answer = {
                            "problem": f"its process ended, exit status {process.exitcode}{why}"
                        }
                    if problem := answer.get("problem"):
                        results[name]["problem"] = problem
                        process.join(10)  # and its memory is free
                    elif number:
                        results[name]["turns"].append(answer)
                    figure = (
                        f"{1000 * answer['seconds']:.1f} ms" if number and not problem else problem
                    )
                    figure = figure or f"is ready after {time.perf_counter() - begin:.0f} s"
                    print(
                        f"round {number} of {rounds}  {name} {figure}", file=sys.stderr, flush=True
                    )
        finally:
            for process, connection in started.values():
                connection.close()
                process.join(5)
                process.kill()
    return results


# What the speed benchmarks share: flags, device, data, a loop.


def device() -> torch.device:
    """Return what is measured on: a card or the CPU."""
    return torch.device("cuda" if hardware.this_device().kind == "cuda" else "cpu")


def write_ids(folder: Path, vocab_size: int) -> None:
    """Write a data folder as train.py reads it: ids whose k-th most frequent has a share of about 1 / k."""
    random = np.random.default_rng(0)
    ids = (vocab_size ** random.random(TOKENS)).astype(np.uint32) - 1
    np.save(folder / "train.npy", ids)
    np.save(folder / "val.npy", ids)
    tokenization.make_characters(["ab"]).save_pretrained(folder / "tokenizer")


def sizes_of(args: argparse.Namespace) -> dict[str, int]:
    """Return the flags of the model's size."""
    return {name: getattr(args, name) for name in SIZES}


def recipe_of(**changes) -> keys.Recipe:
    """Return recipes/gpt2_124m.yaml with other values of some keys."""
    return keys.replace(loading.load_recipe(RECIPE), **changes)


def our_flags(args: argparse.Namespace, micro_batch: int, folder: Path) -> dict[str, str]:
    """Return flags of train.py: the sizes args for, and full learning rate from the first update on."""
    step = micro_batch * args.accumulation * args.sequence_length
    flags = sizes_of(args) | {
        "tokens_per_step": step,
        "per_device_train_batch_size": micro_batch,
        "warmup_steps": 0,
    }
    # A whole corpus is memory-mapped; one as small as this would be put on the card.
    flags |= {"data_dir": folder, "data_device": "cpu", "output_dir": folder / "run"}
    return {name: str(value) for name, value in flags.items()}


def be_train(argv: list[str], turns: Turns) -> None:
    """Be train.py with these flags, and sleep at the end of each update until the next turn."""
    apply = update.update

    def then_sleep(*args, **named) -> update.Update:
        outcome = apply(*args, **named)
        turns.done(outcome.loss)
        return outcome

    update.update = then_sleep
    with tempfile.TemporaryFile("w+") as log:
        with contextlib.redirect_stderr(log):
            status = train.main(once([*argv, *flag_words(QUIET)]))
        log.seek(0)
        raise RuntimeError(
            f"train.py ended with {status}: {(log.read().strip().splitlines() or [''])[-1]}"
        )


def fixed_batches(
    args: argparse.Namespace, micro_batch: int, folder: Path
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the micro-batches that ``ours`` reads, inputs_BT and targets_BT on the device."""
    recipe = loading.load_recipe(RECIPE, our_flags(args, micro_batch, folder))
    with Corpus(recipe, []) as corpus:
        loader = corpus.loader(make_plan(recipe, 1), device(), rank=0)
        updates = WARM_UP + 1 + args.rounds * (args.steps_per_round + 1)
        return [
            loader.batch(step, micro_step)
            for step, micro_step in itertools.product(range(updates), range(args.accumulation))
        ]


def stock_model(args: argparse.Namespace, **changes) -> GPT2LMHeadModel:
    """Return Transformers' own GPT-2 without dropout, with the weights that ``ours`` begins with."""
    size = {name: size for name, size in sizes_of(args).items() if name != "sequence_length"}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    none |= {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(recipe_of().model.seed)
    settings = size | none | {"n_positions": args.sequence_length, "attn_implementation": "sdpa"}
    return GPT2LMHeadModel(GPT2Config(**settings | changes)).train()


def plain_loop(
    turns: Turns, loss_of: Callable, optimizer: torch.optim.Optimizer, batches: list, args
) -> None:
    """Train as most repositories do: autocast, scale, backward; unscale, clip, step."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kind, half, feed = device().type, HALF_DTYPES.get(args.precision), itertools.cycle(batches)
    scaler = torch.amp.GradScaler(kind, enabled=args.precision == "fp16")
    while True:
        losses = []
        for _ in range(args.accumulation):
            with torch.autocast(kind, half, enabled=half is not None):
                loss = loss_of(*next(feed)) / args.accumulation
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        turns.done(*losses)


def positive(text: str) -> int:
    """Read an integer above 0; raises ValueError for anything else."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def add_sizes(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add the flags of the model's size, and where to write."""
    for name, size in (SIZES | defaults).items():
        parser.add_argument(f"--{name}", type=positive, default=size, help="default: %(default)s")
    parser.add_argument("--json", type=paths.argument, help="write the figures here too")


def add_turns(parser: argparse.ArgumentParser, *, micro_batch: int) -> None:
    """Add the flags of what is measured in turns; ``micro_batch``: the CPU's default."""
    card = device().type == "cuda"
    # 16: more rows than our loss takes at once.
    sizes, steps = (
        [16 if card else micro_batch],
        10 if card else 1,
    )
    parser.add_argument(
        "--micro_batch", type=positive, nargs="+", default=sizes, help="default: %(default)s here"
    )
    parser.add_argument(
        "--precision", choices=["bf16", "fp16", "no"], help="default: what the device is good at"
    )
    parser.add_argument(
        "--compile", type=json.loads, default=True, metavar="true|false", help="default: true"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="default: %(default)s")
    parser.add_argument(
        "--steps_per_round",
        type=positive,
        default=steps,
        help="updates of a turn; default: %(default)s here",
    )


def settle(args: argparse.Namespace) -> hardware.Device:
    """Fill in what depends on the device, and tell Accelerate as its launcher would; return the device.

    Raises BadInput for what the device cannot do.
    """
    os.environ["ACCELERATE_USE_CPU"] = str(device().type == "cpu").lower()
    this_device = hardware.this_device()
    args.precision = args.precision or this_device.precision
    os.environ["ACCELERATE_MIXED_PRECISION"] = args.precision
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "inductor" if args.compile else "no"
    check_supported(this_device, os.environ)
    return this_device


def shape_of(args: argparse.Namespace) -> estimate.Shape:
    """Return the model's size, for estimates."""
    return estimate.Shape(args.n_layer, args.n_embd, args.vocab_size, args.sequence_length)


def fit_together(
    count: int, args: argparse.Namespace, micro_batch: int, more_bytes: int = 0
) -> bool:
    """Return whether weights and moments of ``count`` models can wait in memory while the widest of them works.

    ``more_bytes``: what that one takes beyond the memory model, which knows no attention scores.
    """
    shape = shape_of(args)
    working = estimate.memory(
        shape, micro_batch=micro_batch, half=args.precision != "no", compiled=False
    )
    # The other implementations keep all logits.
    working["logits"] = 12 * micro_batch * args.sequence_length * args.vocab_size
    waiting = count * (12 * shape.parameters + estimate.CONTEXT_BYTES)
    return waiting + sum(
        working.values()
    ) + more_bytes <= estimate.HEADROOM * hardware.free_memory_bytes(device())


def about(args: argparse.Namespace, this_device: hardware.Device) -> dict:
    """Print the machine and the model; return what the JSON says of them."""
    versions = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    shape = shape_of(args)
    print(f"machine      {this_device.name}, load {os.getloadavg()[0]:.1f} at the start")
    print(f"software     {', '.join(f'{name} {number}' for name, number in versions.items())}")
    print(
        f"model        {args.n_layer} layers of {args.n_embd}, {args.n_head} heads, vocabulary {args.vocab_size:,}, "
        f"{args.sequence_length} tokens: {shape.parameters:,} parameters, {shape.flops_per_token / 1e6:,.1f} MFLOP a token"
    )
    threads = torch.get_num_threads()
    return {
        "machine": this_device.name,
        "threads": threads,
        **versions,
        "shape": vars(shape),
        "precision": args.precision,
    }


def summary(seconds: list[float], tokens: int) -> dict[str, float]:
    """Return the medians of some turns, and the spread of the speed."""
    middle = statistics.median(seconds)
    speed = {
        "tokens_per_second": tokens / middle,
        "slowest": tokens / max(seconds),
        "fastest": tokens / min(seconds),
    }
    return {"ms": 1000 * middle} | speed
