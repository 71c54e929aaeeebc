"""Judge the values that preflight/checks.py collects: plain values in, check results out."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ursa_minor.base import cudnn, gpus

OK = "ok"
WARNING = "warning"
ERROR = "error"
TRYING = "..."  # no result yet; the text states what is being checked
# Without these packages, a run has no wandb reports or no power readings.
OPTIONAL = ("wandb", "nvidia-ml-py")
# Versions that fail between two that work. requirements.txt excludes them.
BROKEN = {
    ("accelerate", "1.14.0"): (
        "FSDP2 fails at a bare GPT-2's tied embeddings (huggingface/accelerate#4171)"
    )
}
# The oldest Linux driver that runs a major CUDA version (CUDA release notes, "CUDA Driver", minor
# version compatibility).
OLDEST_DRIVER = {12: "525.60.13", 13: "580.65.06"}

HALF_PRECISION_FIX = (
    'set mixed_precision: "no" in the accelerate YAML; if that fails too, reinstall torch and the '
    "driver"
)
# What to do if a trial (preflight/trials.py) fails.
TRIAL_FIXES = {
    "fp32": "reinstall torch, because nothing can be trained without this",
    "bf16": HALF_PRECISION_FIX,
    "fp16": HALF_PRECISION_FIX,
    "compile": (
        "install a compiler and the headers of Python (apt install g++ python3-dev), or train "
        "without compilation (accelerate_configs/conservative.yaml); CPU training needs no compiler"
    ),
    "all-reduce": (
        "between GPUs, try NCCL_P2P_DISABLE=1; NCCL_DEBUG=INFO shows where it hangs, and docker "
        "needs --gpus all --ipc=host; between CPU processes, try GLOO_SOCKET_IFNAME=lo"
    ),
}
CUDNN_LIBRARY_FIX = (
    "remove the folder of the other cuDNN from LD_LIBRARY_PATH, so that torch loads its own"
)
Capability = tuple[int, int]  # CUDA compute capability: major, minor


@dataclass(frozen=True)
class Check:
    """The result of a check.

    Attributes:
        level: ``OK``, ``WARNING`` or ``ERROR``; or ``TRYING`` while the check is running.
        fix: how to solve the problem. Empty if there is none.
    """

    name: str
    level: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.level:8} {self.name}: {self.text}"
        return f"{line}. Fix: {self.fix}" if self.fix else line


def read_ranges(text: str) -> dict[str, SpecifierSet]:
    """Return the permitted versions of each package in a requirements file."""
    ranges = {}
    for line in text.splitlines():
        line_without_comment = line.partition("#")[0].strip()
        if line_without_comment:
            requirement = Requirement(line_without_comment)
            ranges[requirement.name] = requirement.specifier
    return ranges


def check_packages(
    ranges: dict[str, SpecifierSet], installed: dict[str, str | None]
) -> list[Check]:
    """Compare installed packages with the ranges of versions in requirements.txt.

    Args:
        installed: the version of each package, or None if it is not installed.

    Returns:
        First a result for all packages within their range together, then one for each other
        package.
    """
    problems = []
    for name, versions in ranges.items():
        version = installed.get(name)
        problem = BROKEN.get((name, version or ""))
        fix = f'pip install "{name}{versions}"'
        if version is None:
            level = WARNING if name in OPTIONAL else ERROR
            problems.append(Check(name, level, "not installed", fix))
        elif problem:
            problems.append(Check(name, ERROR, f"{version} is installed: {problem}", fix))
        elif not versions.contains(version, prereleases=True):
            text = f"{version} is installed; requirements.txt permits {versions}"
            problems.append(Check(name, WARNING, text, fix))

    listed = ", ".join(f"{name} {installed[name]}" for name in ranges if installed.get(name))
    text = (
        f"{len(ranges) - len(problems)} of {len(ranges)} are within the ranges of "
        f"requirements.txt: {listed}"
    )
    return [Check("packages", OK, text), *problems]


def reinstall_command(
    capability: Capability | None, driver: str | None, package: str = "torch"
) -> str:
    """Return the command that installs a torch with kernels for a GPU, which its driver can run.

    CUDA 13 needs compute capability 7.5 (Turing) and driver 580. The cu126 wheels have kernels from
    Maxwell (5.0) to Hopper (9.0).

    Args:
        capability: of the GPU. None, if it is not known, is treated as Ampere.
        driver: its version. None, if it is not known, is treated as a recent one.
    """
    capability = capability or gpus.AMPERE
    if capability < (5, 0):
        return "no current torch supports this GPU"
    wheel = "cu128" if capability >= (10, 0) else "cu126"
    if capability >= (7, 5) and (driver is None or driver_supports(driver, 13)):
        wheel = "cu130"
    index = f"https://download.pytorch.org/whl/{wheel}"
    return f"pip install --force-reinstall {package} --index-url {index}"


def driver_supports(driver: str, cuda: int) -> bool:
    """Return whether a driver runs a major CUDA version. True if its oldest driver is not known."""
    return Version(driver) >= Version(OLDEST_DRIVER.get(cuda, "0"))


def check_torch_build(
    version: str,
    cuda: str | None,
    usable_gpus: int,
    capability: Capability | None,
    driver: str | None,
) -> Check:
    """Check whether this build of torch can use the NVIDIA GPUs of the machine.

    Args:
        version: of torch.
        cuda: the CUDA version of the build, such as ``13.0``. None for a build without CUDA.
        usable_gpus: how many GPUs torch can use.
        capability: of the first GPU, if it is known. It determines the wheel in the fix.
        driver: version of the NVIDIA driver. None if the machine has no NVIDIA GPU.
    """
    text = f"{version}, CUDA {cuda}" if cuda else f"{version}, no CUDA"
    if driver:
        text += f", driver {driver}"
    if usable_gpus or not driver:
        return Check("torch", OK, text)

    if not cuda:
        text += ": a CPU build, but the machine has an NVIDIA GPU"
        fix = reinstall_command(capability, driver, f"torch=={version.partition('+')[0]}")
        return Check("torch", ERROR, text, fix)

    cuda_major = int(cuda.partition(".")[0])
    if driver_supports(driver, cuda_major):
        text += ": it finds no usable GPU although the machine has one; CUDA_VISIBLE_DEVICES may "
        text += "hide it"
        fix = "make sure that nvidia-smi lists the GPU; reboot if the driver was updated"
        return Check("torch", ERROR, text, fix)

    text += ": the driver is too old for this build"
    fix = f"install driver {OLDEST_DRIVER[cuda_major]} or newer"
    if driver_supports(driver, 12):
        fix += f", or torch for CUDA 12: {reinstall_command(capability, driver)}"
    return Check("torch", ERROR, text, fix)


def has_kernels(capability: Capability, arch_list: Sequence[str]) -> bool:
    """Return whether torch's kernels run on a GPU of this compute capability.

    According to the CUDA C++ Programming Guide, "Compute Capabilities":

    - sm_80 runs on 8.0 and on later minor versions of the same major version
    - sm_90a runs on 9.0 only
    - sm_100f runs on the family of 10.0
    - compute_80 is PTX, which the driver compiles for anything from 8.0 on

    Args:
        arch_list: ``torch.cuda.get_arch_list()``.
    """
    for architecture in arch_list:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if match is None:
            continue
        kind, major, minor, suffix = match.groups()
        built_for = (int(major), int(minor))
        if suffix == "a":
            runs = capability == built_for
        elif kind == "compute" and not suffix:
            runs = capability >= built_for
        else:
            runs = capability[0] == built_for[0] and capability >= built_for
        if runs:
            return True
    return False


def check_architecture(
    name: str, capability: Capability, arch_list: Sequence[str], driver: str | None = None
) -> Check:
    """Check whether this build of torch has kernels for a GPU.

    Args:
        name: name of the GPU.
        capability: its compute capability.
        arch_list: ``torch.cuda.get_arch_list()``.
        driver: version of the driver, which limits the wheels that the fix can recommend.
    """
    major, minor = capability
    compiled_for = " ".join(arch_list)
    if has_kernels(capability, arch_list):
        text = f"torch has kernels for {name} (sm_{major}{minor}), among {compiled_for}"
        return Check("kernels", OK, text)
    text = f"torch has no kernels for {name} (sm_{major}{minor}), only for {compiled_for}"
    return Check("kernels", ERROR, text, reinstall_command(capability, driver))


def check_cudnn_attention(
    capabilities: Iterable[Capability], version: int, *, deprioritized: bool
) -> Check:
    """Check whether attention may use cuDNN kernels that return NaN gradients (base/cudnn.py).

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
        variable = cudnn.DEPRIORITIZED_VARIABLE
        return Check("cudnn", OK, f"{name}; PyTorch prefers other attention kernels ({variable})")
    text = (
        f"attention with a mask may return NaN gradients with {name} on Hopper GPUs "
        f"(pytorch#196678)"
    )
    fix = (
        f"export {cudnn.DEPRIORITIZED_VARIABLE}=1 for TRL and document_mask (post_train.py sets "
        f"it), or install torch {cudnn.FIXED_TORCH} or newer, which has cuDNN "
        f"{cudnn.version_text(cudnn.FIXED)}"
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


def check_cudnn_library(library: CudnnLibrary) -> Check | None:
    """Warn if another cuDNN shadows the one that was installed with torch, else return None."""
    loaded_version = cudnn.version_text(library.version)
    package_version = ".".join(library.package.split(".")[:3])
    package_prefix = f"{library.package_folder}/"
    other_libraries = [path for path in library.loaded if not path.startswith(package_prefix)]
    other_folders = [path for path in library.search_path if path != library.package_folder]

    if other_libraries or loaded_version != package_version:
        text = f"cuDNN {loaded_version} is loaded"
        if other_libraries:
            text += f" from {other_libraries[0]}"
        text += f" instead of the {library.package} that was installed with torch"
    elif other_folders:
        text = (
            f"{other_folders[0]} in LD_LIBRARY_PATH contains another cuDNN than the "
            f"{library.package} of torch"
        )
    else:
        return None
    return Check("cudnn library", WARNING, text, CUDNN_LIBRARY_FIX)


def check_disk(free_bytes: int, needed_bytes: float, folder: str, *, shards: bool) -> Check:
    """Check whether a disk has enough free space for the files of a run.

    Args:
        needed_bytes: upper limit of the size of the files.
        shards: whether token shards are written to this disk. If not, only checkpoints are.
    """
    space = (
        f"{free_bytes / 1e9:.1f} GB free at {folder}; "
        f"up to {needed_bytes / 1e9:.1f} GB are needed for"
    )
    name = "disk"
    level = ERROR
    text = f"{space} checkpoints"
    fix = (
        "free some space, use --output_dir to write to another disk, or use a lower "
        "--save_total_limit"
    )
    if shards:
        name = "data disk"
        level = WARNING
        text = f"{space} token shards, and for checkpoints if they are on the same disk"
        fix = (
            "nothing, if the shards exist already; otherwise use --stream_keep consumed, "
            "--limit_tokens, or another disk"
        )
    if free_bytes >= needed_bytes:
        return Check(name, OK, text)
    return Check(name, level, text, fix)
