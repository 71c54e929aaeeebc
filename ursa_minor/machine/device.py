"""The devices of this machine and their abilities.

A ``Device`` is plain values, so that any card can be pretended.
"""

import functools
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._triton import has_triton_package

from ursa_minor.base.gpus import AMPERE, kernel_driver
from ursa_minor.base.wording import pluralize

NO_FLOAT64 = ("mps",)  # devices whose tensors cannot be float64: Apple's GPUs
TRITON = (7, 0)  # first compute capability that Triton, the compiler's back end, supports


@dataclass(frozen=True)
class Device:
    """The device that a process computes on.

    Attributes:
        kind: cuda, mps or cpu.
        memory_bytes: of one card; of a CPU the machine's.
        capability: of the least capable visible card, as NVIDIA counts it; None elsewhere.
        count: cards of this machine.
        has_triton: whether Triton is installed, which torch.compile needs on a card.
    """

    kind: str
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    count: int = 0
    has_triton: bool = False

    @property
    def precision(self) -> str:
        """The best mixed precision: bf16 where the card has it, else fp16 on a card, else no (fp32)."""
        return "no" if self.kind != "cuda" else "bf16" if self.has_tf32 else "fp16"

    @property
    def compiles(self) -> bool:
        """Whether torch.compile works and is worth its time."""
        return self.has_triton and (self.capability or (0, 0)) >= TRITON

    @property
    def has_tf32(self) -> bool:
        """Whether fp32 matrix products may run as TF32."""
        return (self.capability or (0, 0)) >= AMPERE


def this_device() -> Device:
    """Return the device of this process, as ``accelerate`` would choose it too."""
    forced = os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true"
    # Blocks of varying size leave gaps in CUDA's memory; segments that grow do not (Linux only, and not under WSL). The
    # allocator reads this once, when the card is first asked for anything.
    named = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if not named and sys.platform == "linux" and "microsoft" not in platform.release().lower():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if torch.cuda.is_available() and not forced:
        cards = range(torch.cuda.device_count())
        mine = torch.cuda.get_device_properties(
            min(int(os.environ.get("LOCAL_RANK", "0")), len(cards) - 1)
        )
        least = min(torch.cuda.get_device_capability(card) for card in cards)
        return Device("cuda", mine.name, mine.total_memory, least, len(cards), has_triton_package())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if torch.backends.mps.is_available() and not forced:
        return Device("mps", "mps", memory)
    return Device("cpu", device_name(torch.device("cpu")), memory)


def float64_device(device: torch.device) -> torch.device:
    """Return the device for float64 sums of values that are computed on ``device``: the CPU where it has no float64."""
    return torch.device("cpu") if device.type in NO_FLOAT64 else device


def device_name(device: torch.device) -> str:
    """Return the card's or the processor's name, with what limits it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return (
            f"CPU ({processor_name()}), {pluralize(torch.get_num_threads(), 'thread', 'threads')}"
        )
    return str(device)


def processor_name() -> str:
    """Return the processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(errors="replace") if info.is_file() else ""
    named = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def versions() -> str:
    """Return the versions that decide about kernels: of torch, CUDA, cuDNN and the driver."""
    cudnn = torch.backends.cudnn.version() or "none"
    driver = kernel_driver() or "not known"
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {cudnn}, driver {driver}"


def free_memory_bytes(device: torch.device, num_processes: int = 1) -> int:
    """Return the memory that this process may plan with: a card's free part and its own; of a CPU its share."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    # macOS does not report free pages.
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") // num_processes


def gauges(device: torch.device) -> dict[str, float]:
    """Return ``gpu/memory`` (peak allocated, a share of the card), ``gpu/utilization`` (a share), ``gpu/watts``.

    The last two come from NVML, at most once a second, for each reading takes milliseconds of the host; they are left
    out where nvidia-ml-py or the driver does not give them. Empty on a CPU.
    """
    if device.type != "cuda":
        return {}
    total = torch.cuda.get_device_properties(device).total_memory
    return {
        "gpu/memory": torch.cuda.max_memory_allocated(device) / total,
        **_nvml(device, int(time.monotonic())),
    }


@functools.lru_cache(maxsize=1)
def _nvml(device: torch.device, second: int) -> dict[str, float]:
    try:
        return {
            "gpu/utilization": torch.cuda.utilization(device) / 100,
            "gpu/watts": torch.cuda.power_draw(device) / 1000,
        }
    except Exception:  # no nvidia-ml-py, a virtual card, a driver of another age: NVML has a kind of error for each
        return {}


def hint(read: Mapping[str, float], waiting: float) -> str | None:
    """Return the one thing to try first for a better use of the card, if any.

    Args:
        read: what ``gauges`` gave.
        waiting: share of the training time in which batches were waited for.
    """
    busy = read.get("gpu/utilization", 1.0)
    if waiting > 0.1:
        return f"the device waits for data {waiting:.0%} of the time: is the data on a slow or network disk?"
    if busy < 0.7:
        return f"the card is busy only {busy:.0%} of the time; docs/gpu_tuning.md has the order in which to look"
    return None
