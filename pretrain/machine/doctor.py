"""The checks of check_setup.py: facts of this machine and trials on it, one verdict after the other, cheap ones first.

torch is imported where it is examined, for it may be what is missing.
"""

import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from pretrain.base import cards, files
from pretrain.machine import estimate, forecast, verdicts
from pretrain.machine.verdicts import ERROR, OK, TRYING, WARNING, Check
from pretrain.recipe import keys

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements.txt"
TRIAL_SECONDS, COMPILE_SECONDS, SMI_SECONDS = 120, 300, 60
SLOW_DISK = 50e6  # bytes per second: a checkpoint of GPT-2 124M takes half a minute


def examine(recipe: keys.Recipe, path: str, facts: dict, *, quick: bool) -> Generator[Check, None, bool]:
    """Yield one verdict after the other, and before what takes long what is waited for; return whether torch works.

    ``path`` is the recipe's file; ``facts`` fills with what was found; ``quick``: no compiler, all-reduce, disk's speed.
    """
    old = sys.version_info < (3, 11)
    remedy = "install Python 3.11 or newer; make PYTHON=python3.12 ..." if old else ""
    yield Check("python", ERROR if old else OK, platform.python_version(), remedy)
    ranges = verdicts.read_ranges(REQUIREMENTS.read_text(encoding="utf-8"))
    installed = {name: package_version(name) for name in ranges}
    facts |= {"python": platform.python_version(), "packages": installed}
    yield from verdicts.packages(ranges, installed)
    yield Check("system", OK, f"{platform.system()} {platform.release()}")
    works = all(installed[name] for name in ("torch", "transformers", "accelerate"))
    yield Check("torch", TRYING, "is imported")
    try:
        import torch  # noqa: F401
    except Exception as error:  # a missing CUDA library, or a wheel for another processor
        works = False
        if installed["torch"]:
            yield Check("torch", ERROR, f"cannot be imported: {error}", "reinstall it: make clean environment")
    if works:
        yield from examine_cards(path, facts, quick=quick)
    yield from examine_disk(recipe, facts, quick=quick or not works)
    return works


def examine_cards(path: str, facts: dict, *, quick: bool) -> Iterator[Check]:
    """Yield verdicts on torch's build, the driver and each card, the YAML to take, and what was tried on them."""
    import torch

    yield Check("driver", TRYING, f"nvidia-smi is asked: at most {SMI_SECONDS} s")
    hidden, cuda = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"), torch.version.cuda
    listed = nvidia_smi()
    driver = listed[0]["driver"] if listed else cards.kernel_driver()
    first = listed[0]["capability"] if listed else None
    usable = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    found = [torch.cuda.get_device_properties(i) for i in usable]
    mine = [{"name": c.name, "memory_bytes": c.total_memory, "capability": (c.major, c.minor)} for c in found]
    here = mine or ([] if hidden else listed)
    yield verdicts.build(torch.__version__, cuda, len(mine), first, driver, hidden)
    if cuda and driver:
        yield verdicts.driver(driver, cuda)
    for card in here:
        known, size = cards.find(card["name"]), card["memory_bytes"]
        text = card["name"] + (f", {size / 2**30:.1f} GiB" if size else "")
        text += ", compute capability {}.{}".format(*card["capability"]) if card["capability"] else ""
        if known:
            yield Check("card", OK, f"{text}. {forecast.expectation(known)}")
        else:
            remedy = "none needed to train; for MFU and estimates add its data sheet's peak to pretrain/base/cards.csv"
            yield Check("card", WARNING, f"{text}: not in our table, so the mfu will not be shown", remedy)
    works = bool(mine) or hidden or not driver
    if cuda:  # torch for AMD cards names its kernels otherwise
        for card in {card["name"]: card for card in mine}.values():
            verdict = verdicts.architecture(card["name"], card["capability"], torch.cuda.get_arch_list(), driver)
            works &= verdict.level == OK
            yield verdict
    threads, preset = torch.get_num_threads(), cards.preset(here[0]["name"] if here else "", len(here))
    if not here:
        preset = "mps" if torch.backends.mps.is_available() else preset
        yield Check("card", OK, f"none: CPU, {threads} threads; make train takes {preset}.yaml")
    facts |= {"cards": here, "driver": driver, "cuda": cuda, "threads": threads, "preset": preset}
    yield Check("launch", OK, f"{cards.launcher(preset, len(here))} train.py --recipe {path}")
    if works:
        yield from examine_trials(mine, preset, quick, facts)


def examine_trials(mine: list[dict], preset: str, quick: bool, facts: dict) -> Iterator[Check]:
    """Yield verdicts on what was really tried: training steps, attention, the compiler, the all-reduce."""
    device = "cuda" if mine else "cpu"
    modern = bool(mine) and mine[0]["capability"] >= (8, 0)
    half = "fp16" if mine and not modern else "bf16"

    def tried(name: str, trial: str, needed: bool, **given) -> Generator[Check, None, dict]:
        """Return a trial's answer; of one that has none yield the verdict, and return nothing."""
        seconds = COMPILE_SECONDS if name == "compile" else TRIAL_SECONDS
        yield Check(name, TRYING, f"is tried: at most {seconds} s")
        answer = attempt([sys.executable, "-m", "pretrain.machine.probes", trial, json.dumps(given)], seconds)
        facts[name] = answer.get("problem", answer)
        if "problem" in answer:
            yield verdicts.failed(name, answer["problem"], needed)
            return {}
        return answer

    found = yield from tried("fp32", "training_step", True, device=device, precision="no")
    if not found:
        return
    yield Check("fp32", OK, f"a step of a tiny GPT-2 takes {1000 * found['seconds']:.1f} ms on {device}")
    if found := (yield from tried(half, "training_step", bool(mine), device=device, precision=half)):
        yield Check(half, OK, f"a step takes {1000 * found['seconds']:.1f} ms on {device}, {beside_fp32(found)}")
    if mine and (found := (yield from tried("attention", "attention", False, device=device, precision=half))):
        yield verdicts.attention(found["kernel"], found["seconds"], modern)
    if quick:
        return
    step = {"device": device, "precision": half if mine else "no", "compiled": True}
    if found := (yield from tried("compile", "training_step", forecast.compiles(preset), **step)):
        yield Check("compile", OK, f"compiled in {found['first_seconds']:.0f} s, then {beside_fp32(found)}")
    backend, count, megabytes = ("nccl", len(mine), 256) if len(mine) > 1 else ("gloo", 2, 64)
    sizes = {"backend": backend, "count": count, "megabytes": megabytes}
    if found := (yield from tried("all-reduce", "all_reduce", backend == "nccl", **sizes)):
        rate = f"{found['bytes_per_second'] / 1e9:.2f} GB/s over the ring (2 (n - 1) / n x bytes / seconds)"
        yield Check("all-reduce", OK, f"{backend}, {count} processes: {rate}")


def beside_fp32(found: dict[str, float]) -> str:
    """Return how fast a trial's steps were beside those in fp32."""
    own, plain = found["seconds"], found["fp32_seconds"]
    speed = f"{plain / own:.2f} times as fast as one in fp32 beside it"
    return f"{speed} ({1000 * plain:.1f} ms; a tiny model gains little)"


def attempt(command: list[str], seconds: float) -> dict[str, Any]:
    """Run a command that writes a JSON object to a file, its last argument; return that, or {"problem": why not, a line}.

    After ``seconds`` it is killed, and in any case what it has started.
    """
    with tempfile.TemporaryDirectory(prefix="trial-", ignore_cleanup_errors=True) as folder:
        # A fresh cache: what is tried is the compiler, not what it left behind.
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        answer, words = Path(folder, "answer"), Path(folder, "words")
        with words.open("wb") as out:
            how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, "cwd": ROOT}
            process = subprocess.Popen([*command, str(answer)], **how, env=environment, start_new_session=True)
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return {"problem": f"no answer in {seconds:.0f} s"}
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # all its processes have ended
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        with contextlib.suppress(OSError, ValueError):  # it has not begun its answer, or was killed within
            return json.loads(answer.read_bytes())
        lines = words.read_text(errors="replace").strip().splitlines()
    how_it_ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    last = f": {lines[-1][:200]}" if lines else ""
    return {"problem": f"its process ended without a result, {how_it_ended}{last}"}


def examine_disk(recipe: keys.Recipe, facts: dict, *, quick: bool) -> Iterator[Check]:
    """Yield verdicts on the folder that the run will be written to; ``quick``: without its speed."""
    saving, shards = recipe.saving, shard_bytes(recipe)
    folder, data = _standing(saving.run_dir), _standing(Path(recipe.data.prepared_data_dir))
    size = 12.0 * estimate.shape_of(recipe.model).parameters
    kept = saving.save_total_limit or (recipe.schedule.max_steps // saving.save_steps if saving.save_steps else 0)
    free = shutil.disk_usage(folder).free
    facts["disk"] = {"folder": str(folder), "free_bytes": free, "checkpoint_bytes": size, "shard_bytes": shards}
    shared = folder.stat().st_dev == data.stat().st_dev
    yield verdicts.disk(free, size * (kept + 1), shards if shared else 0, str(folder), saving.name)
    if not shared:
        yield verdicts.disk(shutil.disk_usage(data).free, 0, shards, str(data), saving.name)
    if kind := files.network_mount(folder):
        remedy = "a local disk for --output_dir: locks and fsync are slow, or not kept, over a network"
        yield Check("mount", WARNING, f"{folder} lies on a network file system ({kind})", remedy)
    if quick or free < 2**30:
        return
    if fault := files.unusable(saving.run_dir):
        yield Check("disk speed", ERROR, fault, "another --output_dir")
        return
    yield Check("disk speed", TRYING, "256 MB are written")
    facts["disk"]["bytes_per_second"] = speed = write_speed(folder)
    text = f"{speed / 1e6:,.0f} MB/s to write and fsync: {size / speed:.1f} s a checkpoint"
    slow = "a faster disk for output_dir, or a larger save_steps" if speed < SLOW_DISK else ""
    yield Check("disk speed", WARNING if slow else OK, text, slow)


def _standing(wanted: Path) -> Path:
    """Return the folder, or the nearest above it that exists."""
    return next(path for path in (wanted.absolute(), *wanted.absolute().parents) if path.is_dir())


def write_speed(folder: Path, megabytes: int = 256) -> float:
    """Write and fsync a file of random bytes in ``folder``, and remove it; return bytes per second.

    Raises OSError when the folder does not take it.
    """
    data = os.urandom(2**20) * megabytes
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".write-trial-") as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return len(data) / (time.perf_counter() - start)


def reach(url: str, seconds: float) -> str:
    """Ask an address; return what went wrong ("": it answered; a status: it refused)."""
    pool = ThreadPool(1)  # a name's look-up has no limit of its own
    try:
        pool.apply_async(urllib.request.urlopen, (url,), {"timeout": seconds}).get(seconds + 1).close()
    except multiprocessing.TimeoutError:
        return f"no answer in {seconds:g} s"
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code} {error.reason}"
    except Exception as error:  # names, sockets, TLS and bad addresses each raise their own kinds
        return str(getattr(error, "reason", error)) or type(error).__name__
    return ""


def shard_bytes(recipe: keys.Recipe) -> float:
    """Return the bytes of the token shards that a run makes, at most: those of the tokens that it trains on."""
    sources = [source for source in keys.sources(recipe.data) if not keys.is_here(source)]
    tokens = min(recipe.data.limit_tokens or float("inf"), recipe.batch.tokens_per_step * recipe.schedule.max_steps)
    return float(tokens * (2 if estimate.shape_of(recipe.model).vocab_size <= 65_536 else 4)) if sources else 0.0


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
        done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    rows = (line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 3)
    for name, driver, size, capability in rows:
        memory = int(size.removesuffix(" MiB")) * 2**20 if size.endswith(" MiB") else None
        pair = tuple(map(int, re.findall(r"\d+", capability))) or None
        found.append({"name": name, "driver": driver, "memory_bytes": memory, "capability": pair})
    return found
