"""Write generated addition into data/: a text to pre-train on, problems to improve by, and held-out ones.

    python scripts/addition.py

A tenth of the pairs of 0 to 99 is held out, in both orders: such a problem stands neither in the text nor among the
prompts. The same files come every time.
"""

import json
import random
import sys
from itertools import combinations_with_replacement
from pathlib import Path

FOLDER = Path("data")
LINES = 50_000  # of the text, drawn with replacement


def problems() -> tuple[list[str], list[str]]:
    """Return the prompts that may be learnt from and those held out, as ``12+34=``, each set in random order."""
    pairs = list(combinations_with_replacement(range(100), 2))
    random.Random(0).shuffle(pairs)
    held_out = set(pairs[: len(pairs) // 10])
    both = [(a, b) for a in range(100) for b in range(100)]
    random.Random(1).shuffle(both)
    prompts = {f"{a}+{b}=": (min(a, b), max(a, b)) in held_out for a, b in both}
    learnt = [prompt for prompt, is_held_out in prompts.items() if not is_held_out]
    held_out_prompts = [prompt for prompt, is_held_out in prompts.items() if is_held_out]
    return learnt, held_out_prompts


def main() -> int:
    """Write the three files; print what they hold."""
    learnt, held_out = problems()
    draw = random.Random(2)
    lines = (draw.choice(learnt) for _ in range(LINES))
    text = "".join(f"{prompt}{sum(map(int, prompt[:-1].split('+')))}\n" for prompt in lines)
    rows = (
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        for prompts in (learnt, held_out)
    )
    names = ("addition.txt", "addition_prompts.jsonl", "addition_held_out.jsonl")
    FOLDER.mkdir(exist_ok=True)
    for name, content in zip(names, (text, *rows), strict=True):
        (FOLDER / name).write_text(content, encoding="utf-8")
        print(f"{FOLDER / name}: {content.count(chr(10)):,} lines")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as error:
        sys.exit(f"error: {error.filename or FOLDER}: {error.strerror}")
