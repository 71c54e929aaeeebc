"""Write generated additions into data/: a text to pre-train on, prompts, and held-out prompts.

    python scripts/addition.py

A tenth of the pairs of numbers from 0 to 99 is held out. A pair and its reverse are held out
together, so neither is in the text or among the prompts. The files are the same each time.
"""

import json
import random
import sys
from collections.abc import Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from typing import NamedTuple

FOLDER = Path("data")
LINES = 50_000  # of the text, drawn with replacement


class Problems(NamedTuple):
    """Prompts such as ``12+34=``, in random order."""

    training: list[str]
    held_out: list[str]


def problems() -> Problems:
    """Return the prompts to train on and those that are held out."""
    pairs = list(combinations_with_replacement(range(100), 2))
    random.Random(0).shuffle(pairs)
    num_held_out = len(pairs) // 10
    held_out_pairs = set(pairs[:num_held_out])

    ordered_pairs = []
    for first in range(100):
        ordered_pairs += [(first, second) for second in range(100)]
    random.Random(1).shuffle(ordered_pairs)

    result = Problems([], [])
    for first, second in ordered_pairs:
        pair = (min(first, second), max(first, second))
        prompts = result.held_out if pair in held_out_pairs else result.training
        prompts.append(f"{first}+{second}=")
    return result


def solve(prompt: str) -> int:
    """Return the sum that a prompt asks for."""
    first, second = prompt.removesuffix("=").split("+")
    return int(first) + int(second)


def write_lines(name: str, lines: Sequence[str]) -> None:
    """Write a file into the data folder, and print its number of lines."""
    path = FOLDER / name
    text = "".join(f"{line}\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    print(f"{path}: {len(lines):,} lines")


def write_prompts(name: str, prompts: Sequence[str]) -> None:
    """Write prompts as JSON lines into the data folder."""
    rows = [json.dumps({"prompt": prompt}) for prompt in prompts]
    write_lines(name, rows)


def main() -> int:
    """Write the three files."""
    training, held_out = problems()
    generator = random.Random(2)
    additions = []
    for _ in range(LINES):
        prompt = generator.choice(training)
        additions.append(f"{prompt}{solve(prompt)}")

    FOLDER.mkdir(exist_ok=True)
    write_lines("addition.txt", additions)
    write_prompts("addition_prompts.jsonl", training)
    write_prompts("addition_held_out.jsonl", held_out)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as error:
        sys.exit(f"error: {error.filename or FOLDER}: {error.strerror}")
