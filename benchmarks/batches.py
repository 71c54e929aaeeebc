"""How fast the data path is alone: tokens per second of ``TrainOrder.windows`` and ``Mapped.batch`` on one thread.

    python benchmarks/batches.py [--tokens 100000000]

Writes a temporary file of random ids (2 bytes each), so its pages are in memory: this measures our code, not the disk.
Each window's first read still goes through a fresh mapping, as in a run.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import platform
import statistics
import tempfile
import time

import numpy as np
import torch

from pretrain.data import windows

SEQUENCE_LENGTH = 1024
MICRO_BATCH_SIZE = 32
VOCAB_SIZE = 50257
SHUFFLE_BLOCK_TOKENS = 2**26  # the recipe's default
ROUNDS = 9
# What GPT-2 124M eats on one H200: estimated from its bf16 peak at about half use, not measured here.
TRAINING_TOKENS_PER_SECOND = 600_000


def write_ids(path: Path, tokens: int) -> None:
    """Write ``tokens`` random ids as uint16, in parts that fit in any memory."""
    random = np.random.default_rng(0)
    with open(path, "wb") as file:
        for begin in range(0, tokens, 2**24):
            file.write(random.integers(VOCAB_SIZE, size=min(2**24, tokens - begin), dtype=np.uint16).tobytes())


def measure(path: Path, tokens: int) -> list[float]:
    """Return each round's tokens per second: together the rounds read every window of the file once."""
    source = windows.Windows(SEQUENCE_LENGTH, VOCAB_SIZE)
    source.append(path, tokens, np.memmap(path, np.uint16, mode="r", shape=(tokens,)), offset=0)
    order = windows.TrainOrder(
        weights=(1.0,),
        sequence_length=SEQUENCE_LENGTH,
        sequences_per_step=MICRO_BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
        num_processes=1,
        seed=1,
        block_tokens=SHUFFLE_BLOCK_TOKENS,
    )
    batches = windows.Mapped([source], torch.device("cpu"))
    steps = source.num_windows // (MICRO_BATCH_SIZE * ROUNDS)
    rates = []
    for number in range(ROUNDS):
        begin = time.perf_counter()
        for step in range(number * steps, (number + 1) * steps):
            batches.batch(order.windows(step, 0, 0, [source.num_windows]))
        seconds = time.perf_counter() - begin
        rates.append(steps * MICRO_BATCH_SIZE * SEQUENCE_LENGTH / seconds)
    return rates


def main(argv: list[str] | None = None) -> int:
    """Measure, and print the machine, the rounds and their median."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000_000, help="ids in the file (default: %(default)s)")
    tokens = parser.parse_args(argv).tokens
    least = ROUNDS * MICRO_BATCH_SIZE * SEQUENCE_LENGTH + 1
    if tokens < least:
        parser.error(f"--tokens {tokens}: must be at least {least}, one micro-batch a round")

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ids.bin"
        write_ids(path, tokens)
        rates = measure(path, tokens)

    median = statistics.median(rates)
    print(f"machine      {platform.platform()}, {platform.processor() or platform.machine()}")
    print(
        f"software     Python {platform.python_version()}, NumPy {np.__version__}, torch {torch.__version__}, 1 thread"
    )
    print(f"batches      {MICRO_BATCH_SIZE} x {SEQUENCE_LENGTH} of {tokens:,} ids")
    print(f"rounds       {', '.join(f'{rate / 1e6:.1f}' for rate in rates)} million tokens/s")
    print(f"median       {median / 1e6:.1f} million tokens/s (measured)")
    print(
        f"             {median / TRAINING_TOKENS_PER_SECOND:.0f} times the {TRAINING_TOKENS_PER_SECOND:,} tokens/s "
        f"that GPT-2 124M eats on one H200 (estimated)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
