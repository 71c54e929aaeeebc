"""What several cards, and machines, are expected to reach over each kind of link: estimated, as a table of Markdown.

    python benchmarks/estimate_links.py

Seconds of an update = those of its tokens on one card (pretrain/machine/estimate.py) by the number of cards, and those of
the exchange after it, none of it hidden behind computing: the cautious side. DDP: a ring moves 2 (n - 1) / n of the fp32
gradients over each link. FSDP2 (ZeRO-3): for each of A micro-batches the bf16 weights are gathered twice, and the fp32
gradients scattered once: (n - 1) / n x N x (4 A + 4) bytes. Between machines the ring passes each machine's link once.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pretrain.machine import cards, estimate
from pretrain.model.architectures import Shape
from pretrain.recipe import reading

RECIPES = ("gpt2_124m", "gpt2_350m", "gpt2_774m", "gpt2_1558m")
LINKS = (  # cards of one kind, how many, what the slowest link moves one way (GB/s, of its data sheet)
    ("4 x RTX 4090, PCIe 4.0 through the processor", "rtx4090", 4, 10.0),
    ("8 x A100, NVLink 3", "a100", 8, 300.0),
    ("8 x H100, NVLink 4", "h100", 8, 450.0),
    ("2 x 8 x H100, InfiniBand 400 Gb/s a card", "h100", 16, 50.0),
    ("2 x 8 x H100, Ethernet 100 Gb/s a machine", "h100", 16, 12.5),
    ("2 x 8 x H100, Ethernet 10 Gb/s a machine", "h100", 16, 1.25),
)
MICRO_BATCH = 16


def shares(shape: Shape, card: cards.Card, count: int, link: float, tokens: int) -> tuple[float, float]:
    """Return what DDP and FSDP2 reach of ``count`` times one card's tokens per second."""
    computing = estimate.seconds_per_token(shape, card) * tokens / count
    ddp = estimate.exchange_seconds(shape, count=count, link=1e9 * link)
    micro_batches = max(1, round(tokens / (count * MICRO_BATCH * shape.sequence_length)))
    fsdp2 = (count - 1) / count * shape.parameters * (4 * micro_batches + 4) / (1e9 * link)
    return computing / (computing + ddp), computing / (computing + fsdp2)


def main() -> int:
    """Print the table."""
    recipes = {name: reading.load_recipe(Path(f"recipes/{name}.yaml")) for name in RECIPES}
    print("| link | " + " | ".join(f"{name}" for name in RECIPES) + " |\n|---|" + "---|" * len(RECIPES))
    for label, name, count, link in LINKS:
        card = cards.named(name)
        assert card is not None
        cells = []
        for recipe in recipes.values():
            shape, tokens = estimate.shape_of(recipe.model), recipe.batch.tokens_per_step
            cells.append(", ".join(f"{100 * share:.0f}%" for share in shares(shape, card, count, link, tokens)))
        print(f"| {label} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
