"""What this machine is, has and lacks, gathered and tried: a verdict after the other, cheap ones first.

torch is imported where it is examined, for it may be what is missing.
"""

import importlib.metadata
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from pretrain.base import files
from pretrain.machine import cards, estimate, forecast, verdicts
from pretrain.machine.verdicts import Check
from pretrain.recipe import keys

REQUIREMENTS = Path(__file__).parents[2] / "requirements.txt"
TINY: dict[str, Any] = {"vocab_size": 512, "sequence_length": 64, "n_layer": 2, "n_head": 2, "n_embd": 128, "seed": 1}
TINY |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
STEP_SECONDS, COMPILE_SECONDS, EXCHANGE_SECONDS = 120, 300, 120
SLOW_DISK = 50e6  # bytes per second: a checkpoint of GPT-2 124M takes half a minute
PYTHON_SOURCE_BYTES = 30e6  # python_stdlib's shards, generously


def examine(recipe: keys.Recipe, path: str, facts: dict, *, quick: bool) -> Generator[Check, None, bool]:
    """Yield one verdict after the other, and before what takes long what is being tried; return whether torch works.

    Args:
        path: the recipe's file.
        facts: fills with what was found.
        quick: without the compiler, the all-reduce and the disk's speed.
    """
    level = verdicts.OK if sys.version_info >= (3, 11) else verdicts.ERROR
    remedy = "" if level == verdicts.OK else "install Python 3.11 or newer; make PYTHON=python3.12 ..."
    yield Check("python", level, platform.python_version(), remedy)
    ranges = verdicts.read_ranges(REQUIREMENTS.read_text(encoding="utf-8"))
    installed = {name: package_version(name) for name in ranges}
    facts |= {"python": platform.python_version(), "packages": installed}
    yield from verdicts.packages(ranges, installed)
    yield verdicts.system(platform.system(), platform.release())
    works = all(installed[name] for name in ("torch", "transformers", "accelerate"))
    try:
        import torch  # noqa: F401
    except Exception as error:  # a library of CUDA's that is not there, a wheel of another processor
        works = False
        if installed["torch"]:
            yield Check("torch", verdicts.ERROR, f"cannot be imported: {error}", "reinstall it: make clean environment")
    if works:
        yield from examine_cards(path, facts, quick=quick)
    yield from examine_disk(recipe, facts, quick=quick or not works)
    return works


def examine_cards(path: str, facts: dict, *, quick: bool) -> Iterator[Check]:
    """Yield verdicts on torch's build, the driver and each card, the YAML to take, and what was tried on them."""
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    listed = nvidia_smi()
    driver = listed[0]["driver"] if listed else kernel_driver()
    usable = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    found = [torch.cuda.get_device_properties(i) for i in usable]
    mine = [{"name": c.name, "memory_bytes": c.total_memory, "capability": (c.major, c.minor)} for c in found]
    first = listed[0]["capability"] if listed else None
    yield verdicts.build(
        torch.__version__, torch.version.cuda, usable=len(mine), capability=first, driver=driver, hidden=hidden
    )
    if torch.version.cuda and driver:
        yield verdicts.driver(driver, torch.version.cuda)
    here = mine or ([] if hidden else listed)
    for card in here:
        size, known = card["memory_bytes"], cards.find(card["name"])
        text = card["name"] + (f", {size / 2**30:.1f} GiB" if size else "")
        text += ", compute capability {}.{}".format(*card["capability"]) if card["capability"] else ""
        remedy = "none needed to train; for MFU and estimates add its data sheet's peak to pretrain/machine/cards.py"
        unknown = Check("card", verdicts.WARNING, f"{text}: not in our table, so MFU will be n/a", remedy)
        yield Check("card", verdicts.OK, text) if known else unknown
    works = bool(mine) or hidden or not driver
    if torch.version.cuda:  # torch for AMD cards names its kernels otherwise
        for card in {card["name"]: card for card in mine}.values():
            verdict = verdicts.architecture(card["name"], card["capability"], torch.cuda.get_arch_list(), driver)
            works &= verdict.level == verdicts.OK
            yield verdict
    threads, preset = torch.get_num_threads(), cards.preset(here[0]["name"] if here else "", len(here))
    if not here:
        preset = "mps" if torch.backends.mps.is_available() else preset
        yield Check("card", verdicts.OK, f"none: CPU, {threads} threads; make train takes {preset}.yaml")
    facts |= {"cards": here, "driver": driver, "cuda": torch.version.cuda, "threads": threads, "preset": preset}
    yield verdicts.launch(preset, len(here), path)
    if works:
        yield from examine_trials(mine, preset, quick, facts)


def examine_trials(mine: list[dict], preset: str, quick: bool, facts: dict) -> Iterator[Check]:
    """Yield verdicts on what was really tried: training steps, attention, TF32, the compiler, the all-reduce."""
    from pretrain.machine import probes

    # Imported once, for every trial.
    multiprocessing.set_forkserver_preload(["pretrain.machine.probes", "pretrain.model.build"])
    device = "cuda" if mine else "cpu"
    modern = bool(mine) and mine[0]["capability"] >= (8, 0)
    half = "fp16" if mine and not modern else "bf16"
    step = {"make": tiny_model, "device": device}

    def tried(name: str, work, seconds: float, **given) -> Generator[Check, None, probes.Result]:
        yield Check(name, verdicts.TRYING, "")
        result = probes.attempt(work, [given], seconds)
        facts[name] = result.value or result.problem
        return result

    def timed(result: probes.Result, name: str, remedy: str) -> Check:
        if result.problem:
            level = verdicts.ERROR if mine or result is plain else verdicts.WARNING  # a CPU trains in fp32
            return Check(name, level, f"a training step fails: {result.problem}", remedy)
        taken = result.value["seconds"]
        faster = f", {plain.value['seconds'] / taken:.2f} times as fast as fp32" if result is not plain else ""
        return Check(name, verdicts.OK, f"a step of a tiny GPT-2 takes {1000 * taken:.1f} ms on {device}{faster}")

    plain = yield from tried("fp32", probes.training_step, STEP_SECONDS, precision="no", compiled=False, **step)
    yield timed(plain, "fp32", "reinstall torch and its driver: nothing trains without this")
    if plain.problem:
        return
    mixed = yield from tried(half, probes.training_step, STEP_SECONDS, precision=half, compiled=False, **step)
    yield timed(mixed, half, 'write mixed_precision: "no" in the accelerate YAML')
    if mine:
        kernels = yield from tried("attention", probes.attention, STEP_SECONDS, device=device, precision=half)
        yield attention_verdict(kernels, modern)
    if modern:
        result = yield from tried("TF32", probes.tf32, STEP_SECONDS, device=device)
        rates = " against ".join(f"{rate / 1e12:.1f}" for rate in reversed(result.value.values()))
        text = f"{rates} TFLOP/s in fp32" if rates else result.problem
        yield Check("TF32", verdicts.WARNING if result.problem else verdicts.OK, text)
    elif mine:
        yield Check("TF32", verdicts.OK, "n/a before Ampere (8.0)")
    else:
        yield Check("attention", verdicts.OK, "flash attention and TF32: n/a on a CPU")
    if quick:
        return
    precision = half if mine else "no"
    result = yield from tried(
        "compile", probes.training_step, COMPILE_SECONDS, precision=precision, compiled=True, **step
    )
    text = ""
    if result.value:
        faster = f"{plain.value['seconds'] / result.value['seconds']:.2f} times as fast as plain fp32"
        text = f"compiled in {result.value['first_seconds']:.0f} s, then {faster} (a tiny model gains little)"
    yield verdicts.compiled(result.problem, text, on_card=forecast.compiles(preset))
    backend, processes = ("nccl", len(mine)) if len(mine) > 1 else ("gloo", 2)
    yield Check("all-reduce", verdicts.TRYING, "")
    result = probes.together(processes, backend, EXCHANGE_SECONDS, megabytes=256 if backend == "nccl" else 64)
    facts["all-reduce"] = result.value or result.problem
    yield verdicts.all_reduce(result.problem, backend=backend, count=processes, **result.value)


def attention_verdict(result, modern: bool) -> Check:
    """Judge the attention kernels that ran, and the one that training takes (flash needs Ampere)."""
    seconds = {name: value for name, value in result.value.items() if name != "training"}
    taken = result.value.get("training")
    text = ", ".join(f"{name} {1000 * value:.2f} ms" for name, value in seconds.items()) or result.problem
    text = f"{text}; training takes {taken}" if taken else text
    if taken in seconds and (taken in ("flash", "cudnn") or not modern):
        return Check("attention", verdicts.OK, text if modern else f"{text} (flash: n/a before Ampere, 8.0)")
    remedy = "training takes a slower kernel, or fails; reinstall torch from requirements.txt"
    return Check("attention", verdicts.WARNING, f"neither flash nor cuDNN serves training: {text}", remedy)


def tiny_model():
    """Build the model that the trials train: GPT-2's parts, 2 layers, 128 wide."""
    from pretrain.model.build import build
    from pretrain.model.loss import NextTokenLoss

    return NextTokenLoss(build(keys.Model(**TINY), eos_token_id=0))


def examine_disk(recipe: keys.Recipe, facts: dict, *, quick: bool) -> Iterator[Check]:
    """Yield verdicts on the folder that the run will be written to; ``quick``: without its speed."""
    wanted = recipe.saving.run_dir.absolute()
    folder = next(path for path in (wanted, *wanted.parents) if path.is_dir())
    saving, shards = recipe.saving, shard_bytes(recipe)
    size = 12.0 * estimate.shape_of(recipe.model).parameters
    kept = saving.save_total_limit or (recipe.schedule.max_steps // saving.save_steps if saving.save_steps else 0)
    free = shutil.disk_usage(folder).free
    facts["disk"] = {"folder": str(folder), "free_bytes": free, "checkpoint_bytes": size, "shard_bytes": shards}
    yield verdicts.disk(free, size * (kept + 1), shards, str(folder), recipe.saving.name)
    if kind := files.network_mount(folder):
        remedy = "a local disk for --output_dir: locks and fsync are slow, or not kept, over a network"
        yield Check("mount", verdicts.WARNING, f"{folder} lies on a network file system ({kind})", remedy)
    if quick or free < 2**30:
        return
    from pretrain.machine import probes

    yield Check("disk speed", verdicts.TRYING, "")
    try:
        speed = probes.write_speed(folder)
    except OSError as error:
        fault = f"{folder} cannot be written: {error.strerror}"
        yield Check("disk speed", verdicts.ERROR, fault, "another --output_dir")
        return
    facts["disk"]["bytes_per_second"] = speed
    text = f"{speed / 1e6:,.0f} MB/s to write and fsync: {size / speed:.1f} s a checkpoint"
    slow = "a faster disk for output_dir, or a larger save_steps" if speed < SLOW_DISK else ""
    yield Check("disk speed", verdicts.WARNING if slow else verdicts.OK, text, slow)


def shard_bytes(recipe: keys.Recipe) -> float:
    """Return the bytes of the token shards that a run makes, at most: those of the tokens that it trains on."""
    sources = [source for source in keys.sources(recipe.data) if not keys.is_here(source)]
    tokens = min(recipe.data.limit_tokens or float("inf"), recipe.batch.tokens_per_step * recipe.schedule.max_steps)
    size = tokens * (2 if estimate.shape_of(recipe.model).vocab_size <= 65_536 else 4)
    own = all(source.dataset_name == "python_stdlib" for source in sources)
    return 0.0 if not sources else min(size, PYTHON_SOURCE_BYTES) if own else float(size)


def package_version(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def nvidia_smi() -> list[dict]:
    """Return the machine's NVIDIA cards as the driver lists them, none where there is no driver.

    Each has name, driver, memory_bytes (None where the driver does not give it), capability (a pair, or None).
    """
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 3 and not done.returncode]
    return [
        {
            "name": name,
            "driver": driver,
            "memory_bytes": int(size.removesuffix(" MiB")) * 2**20 if size.endswith(" MiB") else None,
            "capability": tuple(map(int, re.findall(r"\d+", capability))) or None,
        }
        for name, driver, size, capability in rows
    ]


def kernel_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of the driver that the kernel has loaded, or None."""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", path.read_text()) if path.is_file() else None
    return found[1] if found else None
