"""Graphics cards as plain values: their makers' data sheets, and speeds that others and we measured on them.

The peak is the dense one of bf16 or fp16 tensor cores with fp32 accumulate, which training uses: the figures that
NVIDIA prints large are twice that where they count sparsity, and twice that again on GeForce cards, which add up in
fp32 at half the rate. MFU stands against it; estimates take the rate that matrix products reached.
"""

import csv
import difflib
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AMPERE = (8, 0)  # first compute capability with bf16, TF32 and PyTorch's flash attention
PRESETS = Path(__file__).parent.parent.parent / "accelerate_configs"


@dataclass(frozen=True)
class Measurement:
    """A figure that somebody measured on one card, and whose it is.

    Attributes:
        figure: TFLOP/s of matrix products, or tokens per second of GPT-2 124M in training.
        micro_batch: sequences of 1,024 tokens that it was trained with.
    """

    figure: float
    source: str
    micro_batch: int | None = None


@dataclass(frozen=True)
class Gpu:
    """A card: ``name`` is also its preset's, ``pattern`` the driver's whole name of it, the rest its data sheet.

    Attributes:
        link_gigabytes_per_second: between neighbors, one way: a PCIe 4.0 slot's, or NVLink's.
        products: matrix products in bf16 (fp16 before Ampere) as others measured them; None: nobody.
        training: GPT-2 124M as others trained it; None: nobody.
        ours: GPT-2 124M as train.py trained it on such a card; None: not yet.
        advised: the micro-batch of published presets, of 1,024 tokens unless it says so; empty: in none of them.
    """

    name: str
    pattern: str
    source: str
    capability: tuple[int, int]
    memory_gib: float
    teraflops: float
    gigabytes_per_second: float
    watts: float
    link_gigabytes_per_second: float
    products: Measurement | None
    training: Measurement | None
    ours: Measurement | None
    advised: str

    @property
    def modern(self) -> bool:
        """Whether it has bf16, TF32 and PyTorch's flash attention."""
        return self.capability >= AMPERE

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
        return (
            self.products.figure
            if self.products
            else reached_share(self.is_geforce) * self.teraflops
        )


# Rates of products are the largest of squares up to 10,240, seconds each; of several reports of a card their median.
# bf16 autocast, compiled, SDPA, fused AdamW, 524,288 tokens an update, whole fp32 logits; of each card its fastest row.
SCRIPT = "plain PyTorch GPT-2, torch 2.8, one public script"
# Columns of gpus.csv that hold a number of the data sheet.
SHEET = ("memory_gib", "teraflops", "gigabytes_per_second", "watts", "link_gigabytes_per_second")


def _measured(row: Mapping[str, str], name: str) -> Measurement | None:
    """Return a measurement of a row of gpus.csv; None where nobody made one."""
    size = row.get(f"{name}_micro_batch")
    return (
        Measurement(float(row[name]), row[f"{name}_source"], int(size) if size else None)
        if row[name]
        else None
    )


def _gpu(row: Mapping[str, str]) -> Gpu:
    """Return the card of a row of gpus.csv."""
    major, minor = map(int, row["capability"].split("."))
    values: dict[str, Any] = {name: float(row[name]) for name in SHEET}
    values |= {name: _measured(row, name) for name in ("products", "training", "ours")}
    return Gpu(
        row["name"], row["pattern"], row["source"], (major, minor), advised=row["advised"], **values
    )


with open(Path(__file__).with_name("gpus.csv"), encoding="utf-8", newline="") as _file:
    GPUS = tuple(map(_gpu, csv.DictReader(_file)))


def reached_share(geforce: bool) -> float:
    """Return the share of their data sheet's peak that measured cards reach in matrix products, the median.

    GeForce cards (``geforce``) reach all of it, for their maker halves it; the others run into their power limit.
    """
    return statistics.median(
        card.products.figure / card.teraflops
        for card in GPUS
        if card.products and card.is_geforce == geforce
    )


def find(name: str) -> Gpu | None:
    """Return the card of this name, or None: a Ti, a laptop's, a slice is another.

    Args:
        name: the driver's whole one (NVIDIA A100-SXM4-40GB), ours (a100_40gb), or as people write it (rtx_a6000, 4090).
    """
    bare, wholes = _bare(name), (name, f"NVIDIA {name}", f"NVIDIA GeForce {name}")
    for card in GPUS:
        ours = _bare(card.name)
        drivers = any(re.fullmatch(card.pattern, whole, re.IGNORECASE) for whole in wholes)
        if drivers or bare in (ours, f"{ours}{card.memory_gib:g}gb"):
            return card
    return None


def similar_gpus(name: str) -> list[str]:
    """Return the known cards that are nearest to an unknown one, of its series only; all where none is of its series."""
    bare = _bare(name)
    kind = _series(bare)
    series = {
        _bare(card.name): card.name for card in GPUS if kind and _series(_bare(card.name)) == kind
    }
    if not series:
        return [card.name for card in GPUS]
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


def launcher(stem: str, count: int) -> str:
    """Return the words before train.py for ``count`` cards by the accelerate YAML of this stem."""
    several = (
        f" --multi_gpu --num_processes {count}"
        if count > 1 and not stem.endswith(f"_x{count}")
        else ""
    )
    return f"accelerate launch --config_file accelerate_configs/{stem}.yaml{several}"


def kernel_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of the driver that the kernel has loaded, or None."""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", path.read_text()) if path.is_file() else None
    return found[1] if found else None
