"""What is known of graphics cards, from their makers' data sheets, as plain values.

The peak is the dense one of bf16 or fp16 tensor cores with fp32 accumulate, which training uses: the figures that
NVIDIA prints large are twice that where they count sparsity, and twice that again on GeForce cards, which add up in
fp32 at half the rate.
"""

import re
from dataclasses import dataclass
from pathlib import Path

PRESETS = Path(__file__).parent.parent / "accelerate_configs"


@dataclass(frozen=True)
class Card:
    """A card: ``name`` is also its preset's, ``pattern`` the driver's whole name of it.

    ``link_gigabytes_per_second`` is between neighbours, one way: a PCIe 4.0 slot's, or NVLink's.
    """

    name: str
    pattern: str
    memory_gib: float
    teraflops: float
    gigabytes_per_second: float
    watts: int
    capability: tuple[int, int]
    micro_batch: int | None = None  # of 1,024 tokens of GPT-2 124M: where to start
    source: str = ""
    link_gigabytes_per_second: float = 20

    @property
    def precision(self) -> str:
        """``bf16`` from Ampere (8.0) on, else ``fp16``."""
        return "bf16" if self.capability >= (8, 0) else "fp16"

    @property
    def has_tf32(self) -> bool:
        """Whether fp32 matrix products may run as TF32: from Ampere on."""
        return self.capability >= (8, 0)


WHITEPAPER = "whitepaper, FP16 tensor with FP32 accumulate, dense"
# Starting points of the micro-batch are those of presets in use for these cards; none was measured by us yet.
CARDS = (
    Card("t4", r"(Tesla|NVIDIA) T4", 16, 65.0, 320, 70, (7, 5), 8, "NVIDIA T4 data sheet"),
    Card("v100", r"(Tesla|NVIDIA) V100-.*", 16, 125.0, 900, 300, (7, 0), 8, "NVIDIA V100 data sheet (SXM2)"),
    Card("rtx3060", r"NVIDIA GeForce RTX 3060", 12, 25.5, 360, 170, (8, 6), None, f"GA10x {WHITEPAPER}"),
    Card("rtx3080", r"NVIDIA GeForce RTX 3080", 10, 59.5, 760, 320, (8, 6), None, f"GA10x {WHITEPAPER}"),
    Card("rtx3090", r"NVIDIA GeForce RTX 3090", 24, 71.0, 936, 350, (8, 6), 16, f"GA10x {WHITEPAPER}"),
    Card(
        "rtx4060",
        r"NVIDIA GeForce RTX 4060",
        8,
        30.2,
        272,
        115,
        (8, 9),
        None,
        f"twice its fp32 rate, as Ada {WHITEPAPER}",
    ),
    Card("rtx4080", r"NVIDIA GeForce RTX 4080", 16, 97.5, 717, 320, (8, 9), None, f"Ada {WHITEPAPER}"),
    Card("rtx4090", r"NVIDIA GeForce RTX 4090", 24, 165.2, 1008, 450, (8, 9), 16, f"Ada {WHITEPAPER}"),
    Card("rtx5090", r"NVIDIA GeForce RTX 5090", 32, 209.5, 1792, 575, (12, 0), None, f"Blackwell RTX {WHITEPAPER}"),
    Card(
        "a4500", r"NVIDIA RTX A4500", 20, 94.6, 640, 200, (8, 6), 16, "RTX A4500 data sheet, half of its sparse figure"
    ),
    Card(
        "a6000", r"NVIDIA RTX A6000", 48, 154.8, 768, 300, (8, 6), 32, "RTX A6000 data sheet, half of its sparse figure"
    ),
    Card("a10g", r"NVIDIA A10G", 24, 70.0, 600, 300, (8, 6), None, "NVIDIA A10G data sheet"),
    Card("a30", r"NVIDIA A30", 24, 165.0, 933, 165, (8, 0), 24, "NVIDIA A30 data sheet"),
    Card("a40", r"NVIDIA A40", 48, 149.7, 696, 300, (8, 6), 20, "NVIDIA A40 data sheet"),
    Card("a100", r"NVIDIA A100[- ].*", 80, 312.0, 2039, 400, (8, 0), 64, "NVIDIA A100 data sheet (80 GB SXM)", 300),
    Card("l4", r"NVIDIA L4", 24, 121.0, 300, 72, (8, 9), None, "NVIDIA L4 data sheet, half of its sparse figure"),
    Card("l40s", r"NVIDIA L40S", 48, 362.0, 864, 350, (8, 9), None, "NVIDIA L40S data sheet"),
    Card(
        "h100",
        r"NVIDIA H100 80GB HBM3|NVIDIA H100 SXM.*",
        80,
        989.0,
        3350,
        700,
        (9, 0),
        None,
        "NVIDIA H100 data sheet (SXM)",
        450,
    ),
    Card("h100_pcie", r"NVIDIA H100 PCIe", 80, 756.0, 2000, 350, (9, 0), None, "NVIDIA H100 data sheet (PCIe)"),
    Card("h200", r"NVIDIA H200", 141, 989.0, 4800, 700, (9, 0), None, "NVIDIA H200 data sheet", 450),
)


def find(driver_name: str) -> Card | None:
    """Return the card that the driver calls by this whole name, or None: a Ti, a laptop's or another maker's is another."""
    return next((card for card in CARDS if re.fullmatch(card.pattern, driver_name)), None)


def named(name: str) -> Card | None:
    """Return the card of this short name (``a6000``)."""
    return next((card for card in CARDS if card.name == name), None)


def peak_flops(driver_name: str, precision: str) -> float | None:
    """Return a card's dense peak in FLOP/s at this precision (bf16, fp16), or None where it is not known."""
    card = find(driver_name)
    return card.teraflops * 1e12 if card and precision in ("bf16", "fp16") else None


def preset(driver_name: str, count: int = 1, folder: Path = PRESETS) -> str:
    """Return the stem of the accelerate YAML for ``count`` cards that the driver calls by this name.

    ``rtx4090_x2`` where such a file exists, else the single card's; ``conservative`` for an unknown card, ``cpu`` for
    none (an empty name).
    """
    card = find(driver_name.strip())
    if card is None:
        return "conservative" if driver_name.strip() else "cpu"
    return preset_of(card, count, folder)


def preset_of(card: Card, count: int = 1, folder: Path = PRESETS) -> str:
    """Return the stem of the accelerate YAML for ``count`` of a card (h100_pcie takes h100's)."""
    names = [card.name, card.name.partition("_")[0]]
    stems = [f"{name}_x{count}" for name in names if count > 1] + names
    return next((stem for stem in stems if (folder / f"{stem}.yaml").is_file()), "conservative")
