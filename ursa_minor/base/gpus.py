"""GPUs: their data sheets, and speeds that others and we have measured (``gpus.csv``).

The peak of a GPU is the rate of dense matrix products in bf16 or fp16 that accumulate in fp32,
because training uses these. The prominent figures of NVIDIA's data sheets are twice as high if they
count sparsity. On GeForce GPUs, which accumulate in fp32 at half the rate, they are twice as high
again.

MFU is relative to this peak. Estimates use the rate that matrix products have reached.
"""

import csv
import difflib
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ursa_minor.base.paths import ROOT

AMPERE = (8, 0)  # first compute capability with bf16, TF32 and PyTorch's flash attention
PRESETS = ROOT / "accelerate_configs"

# Source of the measurements of training in gpus.csv. The script trains with bf16 autocast,
# torch.compile, SDPA, fused AdamW, 524,288 tokens per update and full fp32 logits. gpus.csv has the
# fastest row of each GPU.
SCRIPT = "plain PyTorch GPT-2, torch 2.8, one public script"


@dataclass(frozen=True)
class Measurement:
    """A speed that was measured on one GPU.

    Attributes:
        figure: TFLOP/s of matrix products, or tokens per second of training GPT-2 124M.
        source: who measured it.
        micro_batch: sequences of 1,024 tokens in training.
    """

    figure: float
    source: str
    micro_batch: int | None = None


@dataclass(frozen=True)
class Gpu:
    """A type of GPU.

    Attributes:
        name: also the name of its preset in accelerate_configs/.
        pattern: regular expression for the full names that the driver reports.
        source: the data sheet.
        capability: compute capability.
        memory_gib: memory in GiB.
        teraflops: peak in TFLOP/s (see above).
        gigabytes_per_second: bandwidth of its memory in GB/s.
        watts: power limit.
        link_gigabytes_per_second: bandwidth between neighbors in one direction, in GB/s: that of
            NVLink or of a PCIe 4.0 slot.
        products: TFLOP/s of matrix products in bf16 (fp16 before Ampere), measured by others, or
            None if not measured. It is the largest rate of square matrices up to 10,240 during
            seconds of work, and the median of several reports.
        training: tokens per second of training GPT-2 124M, measured by others, or None.
        own_training: tokens per second of training GPT-2 124M with train.py, measured by us, or
            None.
        usual_micro_batch: micro-batch of published presets, in sequences of 1,024 tokens unless it
            states another length, or "" if there are none.
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
    own_training: Measurement | None
    usual_micro_batch: str

    @property
    def is_ampere_or_newer(self) -> bool:
        """Whether it has bf16, TF32 and PyTorch's flash attention."""
        return self.capability >= AMPERE

    @property
    def precision(self) -> str:
        """``bf16`` if the GPU supports it, else ``fp16``."""
        return "bf16" if self.is_ampere_or_newer else "fp16"

    @property
    def is_geforce(self) -> bool:
        """Whether NVIDIA halves the rate of matrix products that accumulate in fp32."""
        return "GeForce" in self.pattern

    @property
    def product_teraflops(self) -> float:
        """TFLOP/s of matrix products: measured, or else estimated from GPUs that were measured."""
        if self.products:
            return self.products.figure
        return reached_share(self.is_geforce) * self.teraflops


def _read_measurement(row: Mapping[str, str], name: str) -> Measurement | None:
    """Return a measurement in a row of gpus.csv, or None if it was not measured.

    Args:
        row: the row.
        name: first of its columns: ``products``, ``training`` or ``ours``.
    """
    if not row[name]:
        return None
    micro_batch = row.get(f"{name}_micro_batch")
    return Measurement(
        figure=float(row[name]),
        source=row[f"{name}_source"],
        micro_batch=int(micro_batch) if micro_batch else None,
    )


def _read_gpu(row: Mapping[str, str]) -> Gpu:
    """Return the GPU in a row of gpus.csv."""
    major, minor = row["capability"].split(".")
    return Gpu(
        name=row["name"],
        pattern=row["pattern"],
        source=row["source"],
        capability=(int(major), int(minor)),
        memory_gib=float(row["memory_gib"]),
        teraflops=float(row["teraflops"]),
        gigabytes_per_second=float(row["gigabytes_per_second"]),
        watts=float(row["watts"]),
        link_gigabytes_per_second=float(row["link_gigabytes_per_second"]),
        products=_read_measurement(row, "products"),
        training=_read_measurement(row, "training"),
        own_training=_read_measurement(row, "ours"),
        usual_micro_batch=row["advised"],
    )


with open(Path(__file__).with_name("gpus.csv"), encoding="utf-8", newline="") as _file:
    GPUS = tuple(_read_gpu(row) for row in csv.DictReader(_file))


def reached_share(geforce: bool) -> float:
    """Return the median share of the peak that GPUs have reached in matrix products.

    GeForce GPUs reach all of it, because NVIDIA halves their rate. Other GPUs are limited by their
    power.

    Args:
        geforce: whether to use the measurements of GeForce GPUs or those of the others.
    """
    shares = []
    for gpu in GPUS:
        if gpu.products and gpu.is_geforce == geforce:
            shares.append(gpu.products.figure / gpu.teraflops)
    return statistics.median(shares)


def find(name: str) -> Gpu | None:
    """Return the GPU with a name, or None if it is unknown.

    A Ti, a laptop GPU or a MIG slice is a different GPU than the one with the shorter name.

    Args:
        name: the full name that the driver reports (NVIDIA A100-SXM4-40GB), the name in gpus.csv
            (a100_40gb), or a name as people write it (rtx_a6000, 4090).
    """
    short_name = _short_name(name)
    full_names = (name, f"NVIDIA {name}", f"NVIDIA GeForce {name}")
    for gpu in GPUS:
        gpu_name = _short_name(gpu.name)
        if short_name in (gpu_name, f"{gpu_name}{gpu.memory_gib:g}gb"):
            return gpu
        if any(re.fullmatch(gpu.pattern, full_name, re.IGNORECASE) for full_name in full_names):
            return gpu
    return None


@dataclass(frozen=True)
class GpuCount:
    """A GPU and a number of them."""

    gpu: Gpu
    count: int


def find_several(name: str) -> GpuCount | None:
    """Return the GPU and the number in a name such as rtx4090_x8, 8x4090 or H100 x 8.

    The names of the files in accelerate_configs/ have this form.

    Returns:
        None if the name has no number, or if the GPU is unknown.
    """
    for pattern in (r"(?P<name>.+?)[ _-]*x *(?P<count>\d+)", r"(?P<count>\d+) *x *(?P<name>.+)"):
        match = re.fullmatch(pattern, name.strip(), re.IGNORECASE)
        gpu = find(match["name"]) if match else None
        if match and gpu:
            return GpuCount(gpu, int(match["count"]))
    return None


def similar_gpus(name: str) -> list[str]:
    """Return the names of up to four known GPUs in the series of an unknown one, the nearest first.

    If no known GPU is in that series, return all names.
    """
    short_name = _short_name(name)
    series = _series(short_name)
    names_of_series: dict[str, str] = {}  # by short name
    for gpu in GPUS:
        gpu_name = _short_name(gpu.name)
        if series is not None and _series(gpu_name) == series:
            names_of_series[gpu_name] = gpu.name
    if not names_of_series:
        return [gpu.name for gpu in GPUS]
    nearest = difflib.get_close_matches(short_name, names_of_series, n=4, cutoff=0.0)
    return [names_of_series[gpu_name] for gpu_name in nearest]


def _short_name(name: str) -> str:
    """Return the letters and digits of a name in lower case, without the names of the brand."""
    letters_and_digits = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub("^(nvidia|geforce|quadro|tesla|rtx)*", "", letters_and_digits)


def _series(short_name: str) -> tuple[str, str] | None:
    """Return a value that is equal for GPUs of one series, or None if the name has no number.

    The series is given by the letters before the number (``a`` for a4500), or by the generation if
    there are none (``40`` for 4090). Names that end in "ada" are a separate series.
    """
    match = re.match(r"([a-z]*)(\d+)(.*)", short_name)
    if match is None:
        return None
    letters, number, suffix = match.groups()
    if suffix == "ada":
        return letters, "ada"
    if letters:
        return letters, ""
    return "", number[:2]


def peak_flops(driver_name: str, precision: str) -> float | None:
    """Return the dense peak of a GPU in FLOP/s, or None if it is not known.

    Args:
        driver_name: the name that the driver reports.
        precision: ``bf16`` or ``fp16``. The peaks of other precisions are not known.
    """
    gpu = find(driver_name)
    if gpu is None or precision not in ("bf16", "fp16"):
        return None
    return gpu.teraflops * 1e12


def preset(driver_name: str, count: int = 1) -> str:
    """Return the name of the file in accelerate_configs/, without .yaml, for a number of GPUs.

    Args:
        driver_name: the name that the driver reports, or an empty name if there is no GPU.
        count: number of GPUs.

    Returns:
        - ``rtx4090_x2`` or, for eight h100_pcie, ``h100_x8``, if there is such a file
        - otherwise the file for one GPU, such as ``rtx4090``
        - ``conservative`` for an unknown GPU
        - ``cpu`` for an empty name
    """
    driver_name = driver_name.strip()
    if not driver_name:
        return "cpu"
    gpu = find(driver_name)
    if gpu is None:
        return "conservative"
    family, _, _ = gpu.name.partition("_")  # h100 for h100_pcie
    for name in (gpu.name, family):
        stem = f"{name}_x{count}"
        if (PRESETS / f"{stem}.yaml").is_file():
            return stem
    return gpu.name


def launcher(stem: str, count: int) -> str:
    """Return the command that starts train.py on a number of GPUs, up to the name of the script.

    Args:
        stem: name of the file in accelerate_configs/, without .yaml.
        count: number of GPUs.
    """
    command = f"accelerate launch --quiet --config_file accelerate_configs/{stem}.yaml"
    if count > 1 and not stem.endswith(f"_x{count}"):
        command += f" --multi_gpu --num_processes {count}"
    return command


def kernel_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of the NVIDIA driver that the kernel has loaded, or None."""
    if not path.is_file():
        return None
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", path.read_text())
    if match is None:
        return None
    return match[1]
