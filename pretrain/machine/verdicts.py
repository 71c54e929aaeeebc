"""Verdicts on the facts that machine/doctor.py gathers: plain values in, a verdict out."""

import re
from dataclasses import dataclass
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from pretrain.base import cards

OK, WARNING, ERROR = "ok", "warning", "error"
TRYING = "..."  # no verdict yet: what is being tried
WHEELS = "https://download.pytorch.org/whl"
# A card may do without these; training says what is then missing.
OPTIONAL = {"wandb": "no reports to Weights & Biases", "nvidia-ml-py": "no watts and temperatures"}
# Versions that fail between two that work; requirements.txt excludes them.
BROKEN = {("accelerate", "1.14.0"): "FSDP2 fails at a bare GPT-2's tied embeddings (huggingface/accelerate#4171)"}
# The oldest Linux driver that runs a major CUDA version (CUDA release notes, "CUDA Driver", minor compatibility).
OLDEST_DRIVER = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
Pair = tuple[int, int]  # a compute capability


@dataclass(frozen=True)
class Check:
    """A verdict: ``level`` is ok, warning or error; ``remedy`` is what to do, empty where there is nothing to do."""

    name: str
    level: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:8} {self.name}: {self.text}" + (f". Remedy: {self.remedy}" if self.remedy else "")


def read_ranges(text: str) -> dict[str, SpecifierSet]:
    """Return the versions that a requirements file takes, by package (``name>=1.2,<=1.4  # why`` is one)."""
    wanted = [Requirement(line.partition("#")[0]) for line in text.splitlines() if line.partition("#")[0].strip()]
    return {one.name: one.specifier for one in wanted}


def packages(ranges: dict[str, SpecifierSet], installed: dict[str, str | None]) -> list[Check]:
    """Compare installed versions (None: not there) with ranges: one line for all within theirs, one for each other."""
    found = []
    for name, taken in ranges.items():
        version, remedy = installed.get(name), f'pip install "{name}{taken}"'
        if version is None and name in OPTIONAL:
            found.append(Check(name, WARNING, f"not installed: {OPTIONAL[name]}", remedy))
        elif version is None:
            found.append(Check(name, ERROR, "not installed", "pip install -r requirements.txt (make environment)"))
        elif fault := BROKEN.get((name, version)):
            found.append(Check(name, ERROR, f"{version} is installed: {fault}", remedy))
        elif not taken.contains(version, prereleases=True):  # a build's own mark (2.13.0+cpu) makes no difference
            found.append(Check(name, WARNING, f"{version} is installed; the tests were run with {taken}", remedy))
    text = f"{len(ranges) - len(found)} of {len(ranges)} are within the ranges of requirements.txt"
    return [Check("packages", OK, text), *found]


def wheel_index(capability: Pair, driver: str | None = None) -> str | None:
    """Return the wheel index whose torch serves a card under a driver; None: no current one does.

    CUDA 13 begins at 7.5 (Turing) and needs driver 580; the cu126 wheels reach from Maxwell (5.0) to Hopper (9.0).
    """
    if capability < (5, 0):
        return None
    if capability >= (7, 5) and (driver is None or _numbers(driver) >= OLDEST_DRIVER[13]):
        return f"{WHEELS}/cu130"
    return f"{WHEELS}/cu128" if capability >= (10, 0) else f"{WHEELS}/cu126"


def build(version: str, cuda: str | None, usable: int, first: Pair | None, driver: str | None, hidden: bool) -> Check:
    """Judge torch's build, of a CUDA version or None, where torch can use so many cards.

    The capability of the ``first`` card, where known, chooses the wheel; ``driver`` is None where the machine has no
    NVIDIA card; ``hidden``: CUDA_VISIBLE_DEVICES hides them.
    """
    text = f"{version}, " + (f"CUDA {cuda}" if cuda else "no CUDA")
    if usable or hidden or not driver:
        hides = "; CUDA_VISIBLE_DEVICES hides every card" if driver and not usable else ""
        return Check("torch", OK, text + hides)
    if not cuda:
        index = wheel_index(first or (8, 0), driver) or f"{WHEELS}/cu126"
        remedy = f"pip install --force-reinstall torch=={version.partition('+')[0]} --index-url {index}"
        return Check("torch", ERROR, f"{text}: a CPU build, but the machine has an NVIDIA card", remedy)
    remedy = "see the driver's line; else nvidia-smi must list the card; a reboot ends a half-done driver update"
    return Check("torch", ERROR, f"{text}, but it finds no usable card on a machine that has one", remedy)


def driver(version: str, cuda: str) -> Check:
    """Judge the driver's version against the CUDA that torch was built with (``13.0``)."""
    oldest = OLDEST_DRIVER.get(int(cuda.partition(".")[0]))
    if oldest is None or _numbers(version) >= oldest:
        return Check("driver", OK, f"{version}, for CUDA {cuda}")
    remedy = f"install driver {'.'.join(f'{part:02}' for part in oldest)} or newer"
    if _numbers(version) >= OLDEST_DRIVER[12]:
        remedy += f", or torch for CUDA 12: pip install torch --index-url {WHEELS}/cu126"
    return Check("driver", ERROR, f"{version} is too old for torch's CUDA {cuda}", remedy)


def served(capability: Pair, arch_list: list[str]) -> bool:
    """Whether torch's kernels (``torch.cuda.get_arch_list()``) run on a card of this compute capability.

    sm_80 runs on 8.0 and later minors of the same major; sm_90a on 9.0 only; sm_100f on its family; compute_80 is
    PTX, which the driver compiles for anything from 8.0 on (CUDA C++ Programming Guide, "Compute Capabilities").
    """
    for kind, major, minor, end in re.findall(r"\b(sm|compute)_(\d+)(\d)([af]?)\b", " ".join(arch_list)):
        listed = (int(major), int(minor))
        same = capability == listed if end == "a" else capability[0] == listed[0] and capability >= listed
        if same or (kind == "compute" and not end and capability >= listed):
            return True
    return False


def architecture(name: str, capability: Pair, arch_list: list[str], driver: str | None = None) -> Check:
    """Judge whether torch's build holds kernels for a card, naming the wheels that do."""
    sm = f"sm_{capability[0]}{capability[1]}"
    if served(capability, arch_list):
        return Check("kernels", OK, f"torch has kernels for {sm}")
    index = wheel_index(capability, driver)
    remedy = f"pip install --force-reinstall torch --index-url {index}" if index else "no current torch serves it"
    return Check("kernels", ERROR, f"torch has no kernels for {name} ({sm}); it has {' '.join(arch_list)}", remedy)


def launch(preset: str, count: int, recipe: str = "") -> Check:
    """Name the accelerate YAML to take, with the flags for more cards than the YAML has, and the recipe."""
    chosen = f" --recipe {recipe}" if recipe else ""
    return Check("launch", OK, f"{cards.launcher(preset, count)} train.py{chosen}")


def disk(free_bytes: int, checkpoint_bytes: float, shard_bytes: float, folder: str, recipe: str) -> Check:
    """Judge a folder's free space against what a recipe writes in all."""
    need, level, remedy = checkpoint_bytes + shard_bytes, OK, ""
    text = (
        f"{free_bytes / 1e9:.1f} GB free at {folder}; {recipe} takes up to {need / 1e9:.1f} GB (checkpoints "
        f"{checkpoint_bytes / 1e9:.1f}, token shards {shard_bytes / 1e9:.1f})"
    )
    if free_bytes < checkpoint_bytes:
        level, remedy = ERROR, "free some, or give --output_dir on another disk, or a lower save_total_limit"
    elif free_bytes < need:
        level = WARNING
        remedy = "none if the shards are there already; else stream_keep: consumed, limit_tokens, or another disk"
    return Check("disk", level, text, remedy)


# The functions below judge a trial's answer: its values, or {"problem": one line}.


def step(name: str, answer: dict[str, Any], device: str) -> Check:
    """Judge the training steps in a precision, ``name``; a CPU trains in fp32, and may lack another."""
    if "problem" in answer:
        level, remedy = ERROR, "reinstall torch and its driver: nothing trains without this"
        if name != "fp32":
            level = WARNING if device == "cpu" else ERROR
            remedy = 'write mixed_precision: "no" in the accelerate YAML'
        return Check(name, level, f"a training step fails: {answer['problem']}", remedy)
    text = f"a step of a tiny GPT-2 takes {1000 * answer['seconds']:.1f} ms on {device}"
    if name != "fp32":
        plain = answer["fp32_seconds"]
        text += f", {plain / answer['seconds']:.2f} times as fast as one in fp32 beside it ({1000 * plain:.1f} ms)"
        text += " (a tiny model gains little)" if device == "cuda" else ""
    return Check(name, OK, text)


def attention(answer: dict[str, Any], modern: bool) -> Check:
    """Judge the attention kernels that ran, and the one that training takes (flash needs Ampere: ``modern``)."""
    taken = answer.get("training")
    text = ", ".join(f"{name} {1000 * value:.2f} ms" for name, value in answer.items() if isinstance(value, float))
    text = (text or answer.get("problem", "")) + (f"; training takes {taken}" if taken else "")
    if taken in answer and (taken in ("flash", "cudnn") or not modern):
        return Check("attention", OK, text if modern else f"{text} (flash: n/a before Ampere, 8.0)")
    remedy = "training takes a slower kernel, or fails; reinstall torch from requirements.txt"
    return Check("attention", WARNING, f"neither flash nor cuDNN serves training: {text}", remedy)


def tf32(answer: dict[str, Any]) -> Check:
    """Judge the fp32 products with TF32 and without."""
    if "problem" in answer:
        return Check("TF32", WARNING, answer["problem"])
    return Check("TF32", OK, f"{answer['tf32'] / 1e12:.1f} against {answer['fp32'] / 1e12:.1f} TFLOP/s in fp32")


def compiled(answer: dict[str, Any], on_card: bool) -> Check:
    """Judge torch.compile: on a card the presets need it, on a CPU nothing does."""
    if "problem" not in answer:
        faster = f"{answer['fp32_seconds'] / answer['seconds']:.2f} times as fast as plain fp32"
        text = f"compiled in {answer['first_seconds']:.0f} s, then {faster} (a tiny model gains little)"
        return Check("compile", OK, text)
    level, remedy = WARNING, "none needed: plain training is not compiled"
    if on_card:
        level, remedy = ERROR, "accelerate_configs/conservative.yaml trains without it"
    if re.search(r"Python\.h", answer["problem"]):
        remedy = f"install Python's headers: apt install python3-dev; {remedy}"
    elif re.search(r"compiler|g\+\+|gcc", answer["problem"], re.IGNORECASE):
        remedy = f"install a compiler: apt install g++; {remedy}"
    return Check("compile", level, answer["problem"], remedy)


def all_reduce(answer: dict[str, Any], backend: str, count: int) -> Check:
    """Judge the sum over ``count`` processes, and its bandwidth."""
    where = f"{backend}, {count} processes"
    if "problem" not in answer:
        rate = f"{answer['bytes_per_second'] / 1e9:.2f} GB/s over the ring (2 (n - 1) / n x bytes / seconds)"
        return Check("all-reduce", OK, f"{where}: {rate}")
    level, remedy = WARNING, "only training with several processes on the CPU needs it; try GLOO_SOCKET_IFNAME=lo"
    if backend == "nccl":
        level = ERROR
        remedy = (
            "try NCCL_P2P_DISABLE=1; NCCL_DEBUG=INFO shows where it hangs; no GPU seen: CUDA_VISIBLE_DEVICES, docker "
        )
        remedy += "--gpus all --ipc=host"
    return Check("all-reduce", level, f"{where}: {answer['problem']}", remedy)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
