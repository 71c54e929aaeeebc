"""Verdicts on the facts that preflight/checks.py gathers: plain values in, a verdict out."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ursa_minor.base import cudnn, gpus

OK, WARNING, ERROR = "ok", "warning", "error"
TRYING = "..."  # no verdict yet: what is being tried
# Optional: without them, a run has no wandb reports or power readings.
OPTIONAL = (
    "wandb",
    "nvidia-ml-py",
)
# Versions that fail between two that work; requirements.txt excludes them.
BROKEN = {
    (
        "accelerate",
        "1.14.0",
    ): "FSDP2 fails at a bare GPT-2's tied embeddings (huggingface/accelerate#4171)"
}
# The oldest Linux driver that runs a major CUDA version (CUDA release notes, "CUDA Driver", minor compatibility).
OLDEST_DRIVER = {12: "525.60.13", 13: "580.65.06"}
NO_HALF = 'mixed_precision: "no" in the accelerate YAML; where that fails too, reinstall torch and its driver'
REMEDIES = {  # of trials without a result
    "fp32": "reinstall torch: nothing trains without this",
    **dict.fromkeys(("bf16", "fp16"), NO_HALF),
    "compile": "install a compiler and Python's headers (apt install g++ python3-dev), or train without by "
    "accelerate_configs/conservative.yaml; on a CPU none is needed",
    "all-reduce": "between cards try NCCL_P2P_DISABLE=1, NCCL_DEBUG=INFO shows where it hangs, and docker needs --gpus "
    "all --ipc=host; between CPUs try GLOO_SOCKET_IFNAME=lo",
}
CUDNN_REMEDY = (
    "take the folder of the other cuDNN out of LD_LIBRARY_PATH, so that torch loads its own"
)
Pair = tuple[int, int]  # a compute capability


@dataclass(frozen=True)
class Check:
    """A verdict: ``level`` is ok, warning or error; ``fix`` is what to do, empty where there is nothing to do."""

    name: str
    level: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:8} {self.name}: {self.text}" + (
            f". Fix: {self.fix}" if self.fix else ""
        )


def read_ranges(text: str) -> dict[str, SpecifierSet]:
    """Return the versions that a requirements file takes, by package (``name>=1.2,<=1.4  # why`` is one)."""
    wanted = [Requirement(line) for line in re.sub("#.*", "", text).splitlines() if line.strip()]
    return {one.name: one.specifier for one in wanted}


def packages(ranges: dict[str, SpecifierSet], installed: dict[str, str | None]) -> list[Check]:
    """Compare installed versions (None: not there) with ranges: one line for all within theirs, one for each other."""
    found = []
    for name, taken in ranges.items():
        version, fix = installed.get(name), f'pip install "{name}{taken}"'
        if version is None:
            found.append(Check(name, WARNING if name in OPTIONAL else ERROR, "not installed", fix))
        elif problem := BROKEN.get((name, version)):
            found.append(Check(name, ERROR, f"{version} is installed: {problem}", fix))
        elif not taken.contains(
            version, prereleases=True
        ):  # a build's own mark (2.13.0+cpu) makes no difference
            found.append(
                Check(
                    name,
                    WARNING,
                    f"{version} is installed; the tests were run with {taken}",
                    fix,
                )
            )
    versions = ", ".join(f"{name} {installed[name]}" for name in ranges if installed.get(name))
    text = f"{len(ranges) - len(found)} of {len(ranges)} are within the ranges of requirements.txt: {versions}"
    return [Check("packages", OK, text), *found]


def reinstall(capability: Pair | None, driver: str | None, package: str = "torch") -> str:
    """Return how to install the torch that serves a card under a driver.

    CUDA 13 begins at 7.5 (Turing) and needs driver 580; the cu126 wheels reach from Maxwell (5.0) to Hopper (9.0).
    """
    capability = capability or gpus.AMPERE
    if capability < (5, 0):
        return "no current torch serves it"
    wheel = "cu128" if capability >= (10, 0) else "cu126"
    if capability >= (7, 5) and (driver is None or reaches(driver, 13)):
        wheel = "cu130"
    return f"pip install --force-reinstall {package} --index-url https://download.pytorch.org/whl/{wheel}"


def reaches(driver: str, cuda: int) -> bool:
    """Return whether a driver runs a major CUDA version; any does where we do not know the oldest."""
    return Version(driver) >= Version(OLDEST_DRIVER.get(cuda, "0"))


def build(
    version: str, cuda: str | None, usable: int, first: Pair | None, driver: str | None
) -> Check:
    """Judge torch's build, of a CUDA version (``13.0``) or None, and the driver, where torch can use so many cards.

    The capability of the ``first`` card, where known, chooses the wheel; ``driver`` is None where the machine has no
    NVIDIA card.
    """
    text = f"{version}, {f'CUDA {cuda}' if cuda else 'no CUDA'}{f', driver {driver}' if driver else ''}"
    if usable or not driver:
        return Check("torch", OK, text)
    if not cuda:
        text += ": a CPU build, but the machine has an NVIDIA card"
        fix = reinstall(first, driver, f"torch=={version.partition('+')[0]}")
    elif reaches(driver, major := int(cuda.partition(".")[0])):
        text += ": it finds no usable card on a machine that has one; does CUDA_VISIBLE_DEVICES hide it?"
        fix = "nvidia-smi must list the card; a reboot ends a half-done driver update"
    else:
        text += ": the driver is too old for it"
        older = f", or torch for CUDA 12: {reinstall(first, driver)}" if reaches(driver, 12) else ""
        fix = f"install driver {OLDEST_DRIVER[major]} or newer{older}"
    return Check("torch", ERROR, text, fix)


def served(capability: Pair, arch_list: list[str]) -> bool:
    """Whether torch's kernels (``torch.cuda.get_arch_list()``) run on a card of this compute capability.

    sm_80 runs on 8.0 and later minors of the same major; sm_90a on 9.0 only; sm_100f on its family; compute_80 is
    PTX, which the driver compiles for anything from 8.0 on (CUDA C++ Programming Guide, "Compute Capabilities").
    """
    for kind, major, minor, end in re.findall(
        r"\b(sm|compute)_(\d+)(\d)([af]?)\b", " ".join(arch_list)
    ):
        listed = (int(major), int(minor))
        same = (
            capability == listed
            if end == "a"
            else capability[0] == listed[0] and capability >= listed
        )
        if same or (kind == "compute" and not end and capability >= listed):
            return True
    return False


def architecture(
    name: str, capability: Pair, arch_list: list[str], driver: str | None = None
) -> Check:
    """Judge whether torch's build holds kernels for a card, naming the wheels that do."""
    text = f"{name} (sm_{capability[0]}{capability[1]}); it has {' '.join(arch_list)}"
    if served(capability, arch_list):
        return Check("kernels", OK, f"torch has kernels for {text}")
    return Check(
        "kernels", ERROR, f"torch has no kernels for {text}", reinstall(capability, driver)
    )


def cudnn_attention(capabilities: Iterable[Pair], version: int, *, deprioritized: bool) -> Check:
    """Judge whether attention may use cuDNN kernels that return NaN gradients (base/cudnn.py).

    Args:
        capabilities: compute capabilities of the GPUs.
        version: ``torch.backends.cudnn.version()``.
        deprioritized: whether the environment variable makes PyTorch prefer other kernels.
    """
    name = f"cuDNN {cudnn.version_text(version)}"
    has_hopper = any(major == cudnn.HOPPER for major, _ in capabilities)
    if version >= cudnn.FIXED or not has_hopper:
        return Check("cudnn", OK, name)
    if deprioritized:
        return Check(
            "cudnn",
            OK,
            f"{name}; PyTorch prefers other attention kernels ({cudnn.DEPRIORITIZED_VARIABLE})",
        )
    text = f"the attention of {name} may return NaN gradients on Hopper GPUs where it has a mask (pytorch#196678)"
    fix = (
        f"export {cudnn.DEPRIORITIZED_VARIABLE}=1 for TRL and document_mask (post_train.py sets it), or install "
        f"torch {cudnn.FIXED_TORCH} or newer, which has cuDNN {cudnn.version_text(cudnn.FIXED)}"
    )
    return Check("cudnn", WARNING, text, fix)


@dataclass(frozen=True)
class CudnnLibrary:
    """The cuDNN that a process has loaded, and the one that was installed with torch.

    Attributes:
        version: ``torch.backends.cudnn.version()``, of the loaded library.
        package: version of the installed nvidia-cudnn package, such as 9.20.0.48.
        package_folder: folder of its libraries.
        loaded: paths of the loaded libraries.
        search_path: folders of LD_LIBRARY_PATH that contain a cuDNN.
    """

    version: int
    package: str
    package_folder: str
    loaded: Sequence[str]
    search_path: Sequence[str]


def cudnn_library(library: CudnnLibrary) -> Check | None:
    """Warn if another cuDNN shadows the one that was installed with torch; return None if none does."""
    loaded_version = cudnn.version_text(library.version)
    package_version = ".".join(library.package.split(".")[:3])
    others = [path for path in library.loaded if not path.startswith(f"{library.package_folder}/")]
    folders = [folder for folder in library.search_path if folder != library.package_folder]
    if others or loaded_version != package_version:
        where = f" from {others[0]}" if others else ""
        text = f"cuDNN {loaded_version} is loaded{where} instead of the {library.package} that was installed with torch"
    elif folders:
        text = f"{folders[0]} in LD_LIBRARY_PATH contains another cuDNN than the {library.package} of torch"
    else:
        return None
    return Check("cudnn library", WARNING, text, CUDNN_REMEDY)


def disk(free_bytes: int, need_bytes: float, folder: str, *, shards: bool) -> Check:
    """Judge a folder's free space against what goes there: checkpoints, or ``shards`` and what else is on their disk."""
    name, what = (
        ("data disk", "token shards, and checkpoints on the same disk")
        if shards
        else ("disk", "checkpoints")
    )
    text = f"{free_bytes / 1e9:.1f} GB free at {folder}; up to {need_bytes / 1e9:.1f} GB are needed for {what}"
    if free_bytes >= need_bytes:
        return Check(name, OK, text)
    if shards:
        fix = "none if the shards are there already; else stream_keep: consumed, limit_tokens, or another disk"
        return Check(name, WARNING, text, fix)
    return Check(
        name,
        ERROR,
        text,
        "free some, or give --output_dir on another disk, or a lower save_total_limit",
    )
