"""The devices of this machine and the features that they support.

A ``Device`` consists of plain values, so that tests can describe any GPU.
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

# Devices without float64 tensors: Apple's GPUs.
NO_FLOAT64 = ("mps",)
# Lowest compute capability that Triton supports, the back end of torch.compile.
TRITON = (7, 0)
# Linux reports its memory here. MemAvailable includes the file cache, which MemFree does not.
MEMINFO = Path("/proc/meminfo")
# Shares of the time beyond which ``bottleneck_advice`` suggests an improvement.
MUCH_WAITING = 0.1
LOW_UTILIZATION = 0.7


@dataclass(frozen=True)
class Device:
    """The device that a process computes on.

    Attributes:
        kind: cuda, mps or cpu.
        name: name of the GPU or the processor.
        memory_bytes: memory of one GPU. For a CPU, the memory of the machine.
        capability: compute capability of the least capable visible NVIDIA GPU, or None without one.
        count: number of NVIDIA GPUs of this machine.
        has_triton: whether Triton is installed, which torch.compile needs on a GPU.
    """

    kind: str
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    count: int = 0
    has_triton: bool = False

    @property
    def precision(self) -> str:
        """The best mixed precision: bf16 or fp16 on an NVIDIA GPU, else no (fp32)."""
        if self.kind != "cuda":
            return "no"
        # bf16 and TF32 both exist from Ampere on.
        return "bf16" if self.has_tf32 else "fp16"

    @property
    def compiles(self) -> bool:
        """Whether torch.compile works, and is worth the time that it takes."""
        return self.has_triton and self.capability is not None and self.capability >= TRITON

    @property
    def has_tf32(self) -> bool:
        """Whether fp32 matrix products may run as TF32."""
        return self.capability is not None and self.capability >= AMPERE


def this_device() -> Device:
    """Return the device of this process, chosen as by Accelerate."""
    _use_expandable_segments()
    use_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true"
    if torch.cuda.is_available() and not use_cpu:
        count = torch.cuda.device_count()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        gpu = torch.cuda.get_device_properties(min(local_rank, count - 1))
        capabilities = [torch.cuda.get_device_capability(index) for index in range(count)]
        return Device(
            kind="cuda",
            name=gpu.name,
            memory_bytes=gpu.total_memory,
            capability=min(capabilities),
            count=count,
            has_triton=has_triton_package(),
        )
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if torch.backends.mps.is_available() and not use_cpu:
        return Device("mps", "mps", memory_bytes)
    return Device("cpu", device_name(torch.device("cpu")), memory_bytes)


def _use_expandable_segments() -> None:
    """Configure CUDA's allocator so that blocks of varying size leave no gaps in memory.

    The allocator reads the setting once, when the GPU is first used. Expandable segments exist on
    Linux only, but not under WSL. A setting of the user is kept.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in os.environ:
            return
    is_wsl = "microsoft" in platform.release().lower()
    if sys.platform == "linux" and not is_wsl:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def float64_device(device: torch.device) -> torch.device:
    """Return the device for float64 sums of values from ``device``: itself, or else the CPU."""
    if device.type in NO_FLOAT64:
        return torch.device("cpu")
    return device


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or that of the processor with its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        threads = pluralize(torch.get_num_threads(), "thread", "threads")
        return f"CPU ({processor_name()}), {threads}"
    return str(device)


def processor_name() -> str:
    """Return the name of the processor that the system reports."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        text = cpuinfo.read_text(errors="replace")
        model_name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
        if model_name:
            return model_name[1].strip()
    return platform.processor() or platform.machine()


def versions() -> str:
    """Return the versions of torch, CUDA, cuDNN and the driver, which determine the kernels."""
    cudnn = torch.backends.cudnn.version() or "none"
    driver = kernel_driver() or "unknown"
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {cudnn}, driver {driver}"


def free_memory_bytes(device: torch.device, num_processes: int = 1) -> int:
    """Return the memory that this process can use.

    Args:
        device: the device of this process.
        num_processes: processes that share the memory of a CPU.

    Returns:
        On a GPU, the free bytes and those that this process has reserved. On a CPU, an equal share
        of the available bytes of the machine, which include its file cache.
    """
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return free_bytes + torch.cuda.memory_reserved(device)
    return _available_bytes() // num_processes


def _available_bytes() -> int:
    """Return the available memory of the machine, or all memory if it is not known (macOS)."""
    if MEMINFO.is_file():
        match = re.search(r"^MemAvailable:\s+(\d+) kB$", MEMINFO.read_text(), re.MULTILINE)
        if match:
            return 1024 * int(match[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gpu_metrics(device: torch.device) -> dict[str, float]:
    """Return metrics of the GPU, or an empty dict on a CPU.

    Returns:
        ``gpu/memory``, the peak of allocated memory as a share of the GPU's, ``gpu/utilization``, a
        share of the time, and ``gpu/watts``. The last two are read from NVML at most once per
        second, because a reading takes milliseconds. They are missing without nvidia-ml-py, or if
        the driver does not report them.
    """
    if device.type != "cuda":
        return {}
    total_memory = torch.cuda.get_device_properties(device).total_memory
    values = {"gpu/memory": torch.cuda.max_memory_allocated(device) / total_memory}
    values.update(_nvml(device, int(time.monotonic())))
    return values


@functools.lru_cache(maxsize=1)
def _nvml(device: torch.device, second: int) -> dict[str, float]:
    """Return the metrics from NVML. ``second`` is the key of the cache."""
    try:
        return {
            "gpu/utilization": torch.cuda.utilization(device) / 100,
            "gpu/watts": torch.cuda.power_draw(device) / 1000,
        }
    except Exception:
        # NVML raises errors of different classes without nvidia-ml-py, for a virtual GPU, and for a
        # driver of another version.
        return {}


def bottleneck_advice(metrics: Mapping[str, float], waiting_share: float) -> str | None:
    """Return the first thing to try for a better use of the device, or None if it is well used.

    Args:
        metrics: result of ``gpu_metrics``.
        waiting_share: share of the training time that was spent waiting for batches.
    """
    if waiting_share > MUCH_WAITING:
        return (
            f"the device waits for data {waiting_share:.0%} of the time. Check whether the data is "
            f"on a slow disk or a network disk"
        )
    utilization = metrics.get("gpu/utilization", 1.0)
    if utilization < LOW_UTILIZATION:
        return (
            f"the GPU is busy only {utilization:.0%} of the time. docs/gpu_tuning.md describes "
            f"what to check first"
        )
    return None
