"""Graphics cards as plain values: their makers' data sheets, and speeds that others measured on them.

The peak is the dense one of bf16 or fp16 tensor cores with fp32 accumulate, which training uses: the figures that
NVIDIA prints large are twice that where they count sparsity, and twice that again on GeForce cards, which add up in
fp32 at half the rate. MFU stands against it; estimates take the rate that matrix products reached.
"""

import difflib
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

PRESETS = Path(__file__).parent.parent.parent / "accelerate_configs"


@dataclass(frozen=True)
class Measured:
    """A figure that others measured on one card, and whose it is.

    Attributes:
        figure: TFLOP/s of matrix products, or tokens per second of GPT-2 124M in training.
        micro_batch: sequences of 1,024 tokens that it was trained with.
    """

    figure: float
    source: str
    micro_batch: int | None = None


@dataclass(frozen=True)
class Card:
    """A card: ``name`` is also its preset's, ``pattern`` the driver's whole name of it, the rest its data sheet.

    Attributes:
        link_gigabytes_per_second: between neighbours, one way: a PCIe 4.0 slot's, or NVLink's.
        products: matrix products in bf16 (fp16 before Ampere) as others measured them; None: nobody.
        training: GPT-2 124M as others trained it; None: nobody.
        ours: GPT-2 124M as train.py trained it on such a card; None: not yet.
        advised: the micro-batch that this project's first users were told to take, of 1,024 tokens unless it says so.
    """

    name: str
    pattern: str
    memory_gib: float
    teraflops: float
    gigabytes_per_second: float
    watts: int
    capability: tuple[int, int]
    source: str
    link_gigabytes_per_second: float = 20
    products: Measured | None = None
    training: Measured | None = None
    ours: Measured | None = None
    advised: str | None = None

    @property
    def modern(self) -> bool:
        """Whether it has bf16, TF32 and PyTorch's flash attention: from Ampere (8.0) on."""
        return self.capability >= (8, 0)

    @property
    def precision(self) -> str:
        """``bf16`` where it has it, else ``fp16``."""
        return "bf16" if self.modern else "fp16"

    @property
    def is_geforce(self) -> bool:
        """Whether the maker halves the rate of products that are added up in fp32."""
        return "GeForce" in self.pattern

    @property
    def product_teraflops(self) -> float:
        """TFLOP/s of matrix products: measured, else the share of the peak that measured cards of its kind reach."""
        return self.products.figure if self.products else reached_share(self.is_geforce) * self.teraflops


WHITEPAPER = "whitepaper, FP16 tensor with FP32 accumulate, dense"
SPARSE = "data sheet, half of its sparse figure"
FP8 = "data sheet, a quarter of its sparse FP8 figure"
# The largest rate of square matrices up to 10,240, seconds each; a card with several reports has their median.
SQUARES = "zzc0721/torch-performance-test-data"
LAYERS = "mli/transformers-benchmarks, fp16"
# bf16 autocast, compiled, SDPA, fused AdamW, 524,288 tokens an update, whole fp32 logits; of each card its fastest row.
SCRIPT = "plain PyTorch GPT-2, torch 2.8, one public script"
NANOGPT = "nanoGPT, torch 2.0, karpathy/nanoGPT#225"
NANOGPT_40GB = "nanoGPT, torch 2.0, karpathy/nanoGPT#110"
LADDER = "build-nanogpt's steps, a public file"
WINDOWS = "build-nanogpt on Windows, not compiled, a public file"
TRAINING_SOURCES = (SCRIPT, NANOGPT, NANOGPT_40GB, LADDER, WINDOWS)

# fmt: off
CARDS = (
    #    name, the driver's name, GiB, TFLOP/s, GB/s, W, capability, source of these[, link in GB/s]
    Card("t4", r"(Tesla|NVIDIA) T4", 16, 65.0, 320, 70, (7, 5), "NVIDIA T4 data sheet",
         products=Measured(41.93, SQUARES), advised="8 to 12 of 768"),
    Card("v100", r"(Tesla|NVIDIA) V100-.*", 16, 125.0, 900, 300, (7, 0), "NVIDIA V100 data sheet (SXM2)",
         products=Measured(94.84, SQUARES)),
    Card("rtx3060", r"NVIDIA GeForce RTX 3060", 12, 25.5, 360, 170, (8, 6), f"GA10x {WHITEPAPER}",
         products=Measured(25.47, SQUARES), advised="64 of 256, 8 layers of 512"),
    Card("rtx3080", r"NVIDIA GeForce RTX 3080", 10, 59.5, 760, 320, (8, 6), f"GA10x {WHITEPAPER}",
         products=Measured(64.68, SQUARES), advised="128 of 256"),
    Card("rtx3090", r"NVIDIA GeForce RTX 3090", 24, 71.0, 936, 350, (8, 6), f"GA10x {WHITEPAPER}",
         products=Measured(76.58, SQUARES), advised="12 to 20"),
    Card("rtx3090ti", r"NVIDIA GeForce RTX 3090 Ti", 24, 80.0, 1008, 450, (8, 6),
         f"twice its fp32 rate, as GA10x {WHITEPAPER}",
         products=Measured(81.31, LAYERS), training=Measured(69_164, LADDER, 16)),
    Card("rtx4060", r"NVIDIA GeForce RTX 4060", 8, 30.2, 272, 115, (8, 9),
         f"twice its fp32 rate, as Ada {WHITEPAPER}",
         products=Measured(31.21, SQUARES), advised="64 of 256, 8 layers of 512"),
    Card("rtx4060ti", r"NVIDIA GeForce RTX 4060 Ti", 16, 44.1, 288, 165, (8, 9),
         f"16 GB, twice its fp32 rate, as Ada {WHITEPAPER}; the driver calls the one of 8 GB the same",
         products=Measured(44.74, SQUARES), training=Measured(15_300, WINDOWS)),
    Card("rtx4080", r"NVIDIA GeForce RTX 4080", 16, 97.5, 717, 320, (8, 9), f"Ada {WHITEPAPER}", advised="128 of 256"),
    Card("rtx4090", r"NVIDIA GeForce RTX 4090", 24, 165.2, 1008, 450, (8, 9), f"Ada {WHITEPAPER}",
         products=Measured(164.81, SQUARES), training=Measured(106_340, NANOGPT, 12), advised="16 to 24"),
    Card("rtx5070ti", r"NVIDIA GeForce RTX 5070 Ti", 16, 87.9, 896, 300, (12, 0), f"Blackwell RTX {WHITEPAPER}",
         products=Measured(99.06, SQUARES)),
    Card("rtx5080", r"NVIDIA GeForce RTX 5080", 16, 112.6, 960, 360, (12, 0), f"Blackwell RTX {WHITEPAPER}",
         products=Measured(102.89, SQUARES)),
    Card("rtx5090", r"NVIDIA GeForce RTX 5090", 32, 209.5, 1792, 575, (12, 0), f"Blackwell RTX {WHITEPAPER}",
         products=Measured(236.03, SQUARES), training=Measured(196_551, SCRIPT, 32)),
    Card("a4000", r"NVIDIA RTX A4000", 16, 76.7, 448, 140, (8, 6), f"RTX A4000 {SPARSE}",
         products=Measured(62.78, SQUARES), training=Measured(51_603, SCRIPT, 16)),
    Card("a4500", r"NVIDIA RTX A4500", 20, 94.6, 640, 200, (8, 6), f"RTX A4500 {SPARSE}",
         training=Measured(62_451, SCRIPT, 16), advised="16"),
    Card("a5000", r"NVIDIA RTX A5000", 24, 111.1, 768, 230, (8, 6), f"RTX A5000 {SPARSE}",
         training=Measured(73_707, SCRIPT, 16)),
    Card("a6000", r"NVIDIA RTX A6000", 48, 154.8, 768, 300, (8, 6), f"RTX A6000 {SPARSE}",
         products=Measured(123.34, SQUARES), training=Measured(92_444, SCRIPT, 64), advised="32"),
    Card("rtx2000ada", r"NVIDIA RTX 2000 Ada Generation", 16, 48.0, 224, 70, (8, 9), f"RTX 2000 Ada {FP8}",
         training=Measured(31_360, SCRIPT, 16)),
    Card("rtx4000ada", r"NVIDIA RTX 4000 Ada Generation", 20, 81.9, 360, 130, (8, 9), f"RTX 4000 Ada {FP8}",
         training=Measured(55_103, SCRIPT, 16)),
    Card("rtx6000ada", r"NVIDIA RTX 6000 Ada Generation", 48, 364.2, 960, 300, (8, 9), f"RTX 6000 Ada {FP8}",
         training=Measured(107_156, SCRIPT, 32)),
    Card("rtxpro6000", r"NVIDIA RTX PRO 6000 Blackwell (Workstation|Server) Edition", 96, 503.8, 1792, 600, (12, 0),
         f"RTX PRO Blackwell {WHITEPAPER} (Workstation Edition)",
         products=Measured(413.38, SQUARES), training=Measured(287_774, SCRIPT, 64)),
    Card("a10g", r"NVIDIA A10G", 24, 70.0, 600, 300, (8, 6), "NVIDIA A10G data sheet",
         products=Measured(69.47, SQUARES)),
    Card("a30", r"NVIDIA A30", 24, 165.0, 933, 165, (8, 0), "NVIDIA A30 data sheet", advised="24"),
    Card("a40", r"NVIDIA A40", 48, 149.7, 696, 300, (8, 6), "NVIDIA A40 data sheet",
         products=Measured(122.29, SQUARES), training=Measured(87_612, SCRIPT, 32)),
    Card("a100", r"NVIDIA A100-SXM4?-80GB", 80, 312.0, 2039, 400, (8, 0), "NVIDIA A100 data sheet (80 GB SXM)", 300,
         products=Measured(264.53, SQUARES), training=Measured(208_962, SCRIPT, 64), advised="32 to 64 of 2,048"),
    Card("a100_40gb", r"NVIDIA A100-SXM4?-40GB", 40, 312.0, 1555, 400, (8, 0), "NVIDIA A100 data sheet (40 GB SXM)",
         300, products=Measured(246.33, SQUARES), training=Measured(91_022, NANOGPT_40GB, 12)),
    Card("a100_pcie", r"NVIDIA A100 80GB PCIe|NVIDIA A100-PCIE-[48]0GB", 80, 312.0, 1935, 300, (8, 0),
         "NVIDIA A100 data sheet (80 GB PCIe)",
         products=Measured(234.14, f"{SQUARES} (the one of 40 GB)"), training=Measured(189_393, SCRIPT, 64)),
    Card("l4", r"NVIDIA L4", 24, 121.0, 300, 72, (8, 9), f"NVIDIA L4 {SPARSE}",
         products=Measured(70.89, SQUARES), training=Measured(40_423, SCRIPT, 16)),
    Card("l40", r"NVIDIA L40", 48, 181.0, 864, 300, (8, 9), f"NVIDIA L40 {SPARSE}",
         training=Measured(96_346, SCRIPT, 32)),
    Card("l40s", r"NVIDIA L40S", 48, 362.0, 864, 350, (8, 9), "NVIDIA L40S data sheet",
         products=Measured(269.15, SQUARES), training=Measured(142_641, SCRIPT, 32)),
    Card("h100", r"NVIDIA H100 80GB HBM3|NVIDIA H100 SXM.*", 80, 989.0, 3350, 700, (9, 0),
         "NVIDIA H100 data sheet (SXM)", 450,
         products=Measured(790.59, SQUARES), training=Measured(466_440, SCRIPT, 64),
         ours=Measured(525_116, "train.py by accelerate launch, 30 updates, torch 2.11, 2026-11-26", 64)),
    Card("h100_pcie", r"NVIDIA H100 PCIe", 80, 756.0, 2000, 350, (9, 0), "NVIDIA H100 data sheet (PCIe)",
         products=Measured(495.93, SQUARES), training=Measured(289_447, SCRIPT, 64)),
    # Its training was slower than the PCIe card's, which has less of everything: a shared or capped host, it seems.
    Card("h100_nvl", r"NVIDIA H100 NVL", 94, 835.5, 3938, 400, (9, 0), "NVIDIA H100 NVL data sheet, one card",
         training=Measured(262_133, SCRIPT, 128)),
    Card("h200", r"NVIDIA H200", 141, 989.0, 4800, 700, (9, 0), "NVIDIA H200 data sheet", 450,
         products=Measured(790.29, SQUARES), training=Measured(498_141, SCRIPT, 128)),
    Card("b200", r"NVIDIA B200", 180, 2250.0, 8000, 1000, (10, 0), "NVIDIA HGX B200 data sheet", 900,
         products=Measured(1696.03, SQUARES), training=Measured(793_891, SCRIPT, 128)),
)
# fmt: on


def reached_share(geforce: bool) -> float:
    """Return the share of their data sheet's peak that measured cards reach in matrix products, the median.

    GeForce cards (``geforce``) reach all of it, for their maker halves it; the others run into their power limit.
    """
    return statistics.median(
        card.products.figure / card.teraflops for card in CARDS if card.products and card.is_geforce == geforce
    )


def find(name: str) -> Card | None:
    """Return the card of this name, or None: a Ti, a laptop's, a slice is another.

    Args:
        name: the driver's whole one (NVIDIA A100-SXM4-40GB), ours (a100_40gb), or as people write it (rtx_a6000, 4090).
    """
    wholes = (name, f"NVIDIA {name}", f"NVIDIA GeForce {name}")
    for card in CARDS:
        if any(re.fullmatch(card.pattern, whole, re.IGNORECASE) for whole in wholes):
            return card
    bare = _bare(name)
    return next((card for card in CARDS if bare in (_bare(card.name), f"{_bare(card.name)}{card.memory_gib}gb")), None)


def of_its_kind(name: str) -> list[str]:
    """Return the known cards that are nearest to an unknown one, of its series only; all where none is of its series."""
    bare = _bare(name)
    series = {
        _bare(card.name): card.name for card in CARDS if _series(bare) and _series(_bare(card.name)) == _series(bare)
    }
    if not series:
        return [card.name for card in CARDS]
    return [series[near] for near in difflib.get_close_matches(bare, series, n=4, cutoff=0.0)]


def _bare(name: str) -> str:
    return re.sub("^(nvidia|geforce|quadro|tesla|rtx)*", "", re.sub(r"[^a-z0-9]", "", name.lower()))


def _series(bare: str) -> tuple[str, str] | None:
    """Return the letters before the number, and where there are none the generation; ``ada`` is one of its own."""
    found = re.match(r"([a-z]*)(\d+)(.*)", bare)
    return found and (found[1], "ada" if found[3] == "ada" else "" if found[1] else found[2][:2])


def peak_flops(driver_name: str, precision: str) -> float | None:
    """Return a card's dense peak in FLOP/s at this precision (bf16, fp16), or None where it is not known."""
    card = find(driver_name)
    return card.teraflops * 1e12 if card and precision in ("bf16", "fp16") else None


def preset(driver_name: str, count: int = 1) -> str:
    """Return the stem of the accelerate YAML for ``count`` cards that the driver calls by this name.

    ``rtx4090_x2`` where such a file exists (eight h100_pcie take h100_x8), else the single card's; ``conservative`` for
    an unknown card, ``cpu`` for none (an empty name).
    """
    card = find(driver_name.strip())
    if card is None:
        return "conservative" if driver_name.strip() else "cpu"
    shared = (f"{name}_x{count}" for name in (card.name, card.name.partition("_")[0]))
    return next((stem for stem in shared if (PRESETS / f"{stem}.yaml").is_file()), card.name)


def kernel_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of the driver that the kernel has loaded, or None."""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", path.read_text()) if path.is_file() else None
    return found[1] if found else None
