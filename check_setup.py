"""Tell before it costs: what this machine is and lacks, what a run will take, whether a card holds its load.

    python check_setup.py                                       # a line a check; --quick leaves out the slow ones
    python check_setup.py --estimate --card a6000 --count 4     # memory, tokens/s, hours, kWh; --all_cards for a table
    python check_setup.py --warm_up_seconds 60                  # all cards at full load for a minute

Exit status: 0 no error found, 1 an error (or no card to load), 2 flags or a recipe that make no sense.
"""

import argparse
import contextlib
import dataclasses
import difflib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.base import files
from pretrain.base.errors import BadInput, exit_on_bad_input
from pretrain.machine import cards, verdicts
from pretrain.machine.verdicts import Check

try:
    from pretrain.machine import estimate, forecast
    from pretrain.recipe import keys, reading
except ModuleNotFoundError as missing:  # before the packages are installed this is the first thing to say
    sys.exit(f"error    packages: {missing.name} is not installed. Remedy: make environment, or "
             "pip install -r requirements.txt")  # fmt: skip

ROOT = Path(__file__).resolve().parent
TINY: dict[str, Any] = {"vocab_size": 512, "sequence_length": 64, "n_layer": 2, "n_head": 2, "n_embd": 128, "seed": 1}
TINY |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
STEP_SECONDS, COMPILE_SECONDS, EXCHANGE_SECONDS, NETWORK_SECONDS = 120, 300, 120, 5
PYTHON_SOURCE_BYTES = 30e6  # python_stdlib's shards, generously


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Check, estimate or load, as the flags say; return the exit status."""
    asked = parse(sys.argv[1:] if argv is None else argv)
    try:
        if asked.warm_up_seconds:
            return warm_up(asked.warm_up_seconds)
        recipe = filled(reading.load_recipe(Path(asked.recipe)))
        return show_estimates(recipe, asked) if asked.estimate else show_checks(recipe, asked)
    except KeyboardInterrupt:
        raise BadInput("stopped before all was tried", 130) from None
    except BrokenPipeError:  # as with "| head": what is left to say goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags; raises BadInput for any that makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--recipe", default="recipes/gpt2_124m.yaml", metavar="FILE", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, not lines")
    parser.add_argument(
        "--quick", action="store_true", help="without the compiler, the all-reduce and the disk's speed"
    )
    parser.add_argument("--estimate", action="store_true", help="what the recipe will take, not what the machine is")
    parser.add_argument(
        "--card", metavar="NAME", help="estimate for this card (a6000, rtx4090, ...), not the machine's"
    )
    parser.add_argument("--all_cards", action="store_true", help="estimate for every card we know: a table")
    parser.add_argument("--count", type=int, metavar="N", help="estimate for this many cards")
    parser.add_argument("--price_per_hour", type=float, default=0.0, metavar="P", help="of one card, in any currency")
    parser.add_argument(
        "--warm_up_seconds", type=int, default=0, metavar="S", help="full load on every card for so long"
    )
    asked = reading.parse_flags(parser, argv)
    faults = []
    asked.card = asked.card and short_name(asked.card)
    if asked.card and cards.named(asked.card) is None:
        near = difflib.get_close_matches(asked.card.lower(), [card.name for card in cards.CARDS], n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {card_names()}"
        faults.append(f"--card {asked.card}: no such card; {hint}")
    if asked.count is not None and asked.count < 1:
        faults.append(f"--count {asked.count}: must be 1 or more")
    if not 0 <= asked.price_per_hour < float("inf"):
        faults.append(f"--price_per_hour {asked.price_per_hour}: must be 0 or more")
    if not 0 <= asked.warm_up_seconds <= 3600:
        faults.append(f"--warm_up_seconds {asked.warm_up_seconds}: must be 1 to 3600")
    if asked.card and asked.all_cards:
        faults.append("--card and --all_cards: give one of them")
    if faults:
        raise BadInput(faults)
    asked.estimate |= bool(asked.card or asked.all_cards or asked.count or asked.price_per_hour)
    return asked


def short_name(card: str) -> str:
    """Return a card's short name, also for the driver's name of it, whole or without the maker's."""
    found = (cards.find(f"{maker}{card}") for maker in ("", "NVIDIA ", "NVIDIA GeForce ", "Tesla "))
    return next((known.name for known in found if known), card.lower())


def filled(recipe: keys.Recipe) -> keys.Recipe:
    """Return the recipe with the size of the model that it begins from, if any."""
    if not recipe.model.init_from:
        return recipe
    try:
        from pretrain.model import pretrained
    except ImportError as missing:
        raise BadInput(
            f"init_from = {recipe.model.init_from}: its size cannot be read without {missing.name}. Install it: make "
            f"environment, or pip install -r requirements.txt"
        ) from None
    return pretrained.complete(recipe)


# ---- what the machine is


def show_checks(recipe: keys.Recipe, asked: argparse.Namespace) -> int:
    """Print the verdicts as they come, or all as JSON; return 1 where one is an error."""
    facts, found = {}, []
    for check in examine(recipe, asked, facts):
        found.append(check)
        if not asked.json:
            print(check, flush=True)
    counts = {level: sum(check.level == level for check in found) for level in (verdicts.ERROR, verdicts.WARNING)}
    if asked.json:
        print(json.dumps({"checks": [dataclasses.asdict(check) for check in found], "facts": facts}, indent=1))
    else:
        print(f"{counts['error']} errors, {counts['warning']} warnings")
    return 1 if counts["error"] else 0


def examine(recipe: keys.Recipe, asked: argparse.Namespace, facts: dict) -> Iterator[Check]:
    """Yield one verdict after the other, cheap ones first; ``facts`` fills with what was found."""
    yield verdicts.python(sys.version_info[:3])
    pins = verdicts.read_pins((ROOT / "requirements.txt").read_text(encoding="utf-8"))
    installed = {name: package_version(name) for name in pins}
    facts |= {"python": platform.python_version(), "packages": installed}
    yield from verdicts.packages(pins, installed)
    yield verdicts.system(platform.system(), platform.release())
    works = all(package_version(name) for name in ("torch", "transformers", "accelerate"))
    try:
        import torch  # noqa: F401
    except Exception as error:  # a library of CUDA's that is not there, a wheel of another processor
        works = False
        if package_version("torch"):
            yield Check("torch", verdicts.ERROR, f"cannot be imported: {error}", "reinstall it: make clean environment")
    if works:
        yield from examine_cards(asked, facts)
    yield from examine_disk(recipe, asked, facts, works)
    yield from examine_network(recipe, works)


def examine_cards(asked: argparse.Namespace, facts: dict) -> Iterator[Check]:
    """Yield verdicts on torch's build, the driver and each card, the YAML to take, and what was tried on them."""
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    listed = nvidia_smi()
    driver = listed[0]["driver"] if listed else kernel_driver()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    present = bool(listed) or Path("/proc/driver/nvidia").exists()
    yield verdicts.build(
        torch.__version__,
        torch.version.cuda,
        usable=count,
        present=present,
        capability=listed[0]["capability"] if listed else None,
        driver=driver,
        hidden=hidden,
    )
    listed = [] if hidden else listed
    if torch.version.cuda and present:
        yield verdicts.driver(driver, torch.version.cuda)
    seen = [torch.cuda.get_device_properties(i) for i in range(count)]
    mine = [
        {"name": card.name, "memory_bytes": card.total_memory, "capability": (card.major, card.minor)} for card in seen
    ]
    here = mine or listed
    for card in here:
        yield verdicts.card(
            card["name"], card["memory_bytes"], card["capability"], known=bool(cards.find(card["name"]))
        )
    usable = bool(mine) or not (listed or (present and not hidden))
    if torch.version.cuda:  # torch for AMD cards names its kernels otherwise
        for card in {card["name"]: card for card in mine}.values():
            verdict = verdicts.architecture(card["name"], card["capability"], torch.cuda.get_arch_list(), driver)
            usable &= verdict.level == verdicts.OK
            yield verdict
    threads = torch.get_num_threads()
    preset = cards.preset(here[0]["name"] if here else "", len(here))
    if not here and torch.backends.mps.is_available():
        preset = "mps"
    if not here:
        yield Check("card", verdicts.OK, f"none: CPU, {threads} threads; make train takes {preset}.yaml")
    facts |= {"cards": here, "driver": driver, "cuda": torch.version.cuda, "threads": threads}
    facts |= {"preset": preset}
    yield verdicts.launch(preset, len(here), asked.recipe)
    if usable:
        yield from examine_trials(mine, preset, asked.quick, facts)


def examine_trials(mine: list[dict], preset: str, quick: bool, facts: dict) -> Iterator[Check]:
    """Yield verdicts on what was really tried: training steps, attention, TF32, the compiler, the all-reduce."""
    from pretrain.machine import probes

    # Imported once, for every trial.
    multiprocessing.set_forkserver_preload(["pretrain.machine.probes", "pretrain.model.build"])
    device = "cuda" if mine else "cpu"
    modern = bool(mine) and mine[0]["capability"] >= (8, 0)
    half = "fp16" if mine and not modern else "bf16"
    step = {"make": tiny_model, "vocabulary": TINY["vocab_size"], "length": TINY["sequence_length"], "batch": 4}
    step |= {"device": device}

    def tried(name: str, work, seconds: float, **given) -> probes.Result:
        with trying(name):
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

    plain = tried("fp32", probes.training_step, STEP_SECONDS, precision="no", compiled=False, **step)
    yield timed(plain, "fp32", "reinstall torch and its driver: nothing trains without this")
    if plain.problem:
        return
    mixed = tried(half, probes.training_step, STEP_SECONDS, precision=half, compiled=False, **step)
    yield timed(mixed, half, 'write mixed_precision: "no" in the accelerate YAML')
    if mine:
        kernels = tried("attention", probes.attention, STEP_SECONDS, device=device, precision=half)
        yield attention_verdict(kernels, modern)
    if modern:
        result = tried("TF32", probes.tf32, STEP_SECONDS, device=device)
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
    result = tried("compile", probes.training_step, COMPILE_SECONDS, precision=precision, compiled=True, **step)
    faster = (
        f"{plain.value['seconds'] / result.value['seconds']:.2f} times as fast as plain fp32" if result.value else ""
    )
    text = faster and f"compiled in {result.value['first_seconds']:.0f} s, then {faster} (a tiny model gains little)"
    yield verdicts.compiled(result.problem, text, on_card=forecast.compiles(preset))
    backend, processes = ("nccl", len(mine)) if len(mine) > 1 else ("gloo", 2)
    with trying("all-reduce"):
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


def examine_disk(recipe: keys.Recipe, asked: argparse.Namespace, facts: dict, works: bool) -> Iterator[Check]:
    """Yield verdicts on the folder that the run will be written to; ``works``: torch can be imported."""
    wanted = recipe.saving.run_dir.absolute()
    folder = next(path for path in (wanted, *wanted.parents) if path.is_dir())
    size, shards = 12.0 * estimate.shape_of(recipe.model).parameters, shard_bytes(recipe)
    every, saving = recipe.saving.save_steps, recipe.saving
    kept = saving.save_total_limit or (recipe.schedule.max_steps // every if every else 0)
    free = shutil.disk_usage(folder).free
    facts["disk"] = {"folder": str(folder), "free_bytes": free, "checkpoint_bytes": size, "shard_bytes": shards}
    yield verdicts.disk(free, size * (kept + 1), shards, str(folder), recipe.saving.name)
    yield from verdicts.mount(files.network_mount(folder), str(folder))
    if asked.quick or free < 2**30 or not works:
        return
    from pretrain.machine import probes

    try:
        with trying("disk speed"):
            speed = probes.write_speed(folder)
    except OSError as error:
        yield Check(
            "disk speed", verdicts.ERROR, f"{folder} cannot be written: {error.strerror}", "another --output_dir"
        )
        return
    facts["disk"]["bytes_per_second"] = speed
    yield verdicts.disk_speed(speed, size)


def shard_bytes(recipe: keys.Recipe) -> float:
    """Return the bytes of the token shards that a run makes, at most: those of the tokens that it trains on."""
    sources = [source for source in keys.sources(recipe.data) if not source.data_dir]
    tokens = min(recipe.data.limit_tokens or float("inf"), recipe.batch.tokens_per_step * recipe.schedule.max_steps)
    size = tokens * (2 if estimate.shape_of(recipe.model).vocab_size <= 65_536 else 4)
    own = all(source.dataset_name == "python_stdlib" for source in sources)
    return 0.0 if not sources else min(size, PYTHON_SOURCE_BYTES) if own else float(size)


def examine_network(recipe: keys.Recipe, works: bool) -> Iterator[Check]:
    """Yield verdicts on the Hub, the recipe's data sets there, and Weights & Biases, where they would be asked."""
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    names = {source.dataset_name for source in keys.sources(recipe.data) if not source.data_dir}
    wanted = {"hub": (hub, "to train offline: data_files or data_dir, and HF_HUB_OFFLINE=1; else look at HTTPS_PROXY")}
    for name in sorted(filter(None, names - {"python_stdlib"})):
        remedy = "look at dataset_name, or log in (hf auth login); offline: data_files"
        wanted[f"data set {name}"] = (f"{hub}/api/datasets/{name}", remedy)
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        wanted = {}
        yield Check("hub", verdicts.OK, "HF_HUB_OFFLINE is set: not asked")
    if package_version("wandb") and os.environ.get("WANDB_MODE", "online") == "online":
        url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").rstrip("/")
        wanted["wandb"] = (url, "only reports to Weights & Biases need it; WANDB_MODE=offline keeps them here")
    if works:
        from pretrain.machine import probes

        with trying("network"):
            problems = probes.reach([url for url, _ in wanted.values()], NETWORK_SECONDS)
        for name, (url, remedy) in wanted.items():
            if name.startswith("data set") and problems[hub] and not problems[hub].startswith("HTTP 4"):
                continue  # said once
            # A refusal of its front page is an answer; of a data set's page it is not.
            there = problems[url].startswith("HTTP 4") and name in ("hub", "wandb")
            yield verdicts.reachable(name, url, "" if there else problems[url], remedy)
    if package_version("huggingface_hub"):
        from huggingface_hub import get_token

        yield verdicts.login(get_token() is not None)


@contextlib.contextmanager
def trying(name: str) -> Iterator[None]:
    """Show on a terminal what is being tried, for as long as it is."""
    shown = sys.stderr.isatty()
    if shown:
        print(f"...      {name}", end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print(" " * (9 + len(name)), end="\r", file=sys.stderr, flush=True)


def package_version(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def nvidia_smi() -> list[dict]:
    """Return the machine's NVIDIA cards as the driver lists them, none where there is no driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return verdicts.read_nvidia_smi(done.stdout) if done.returncode == 0 else []


def kernel_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of the driver that the kernel has loaded, or None."""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", path.read_text()) if path.is_file() else None
    return found[1] if found else None


# ---- what a run will take


def show_estimates(recipe: keys.Recipe, asked: argparse.Namespace) -> int:
    """Print what the recipe takes on one card, on several, or on each that we know."""
    if asked.all_cards:
        rows = [forecast.estimate_run(recipe, card, asked.count or 1, asked.price_per_hour) for card in cards.CARDS]
        print(json.dumps(rows, indent=1) if asked.json else forecast.table(recipe, rows))
        return 0
    found = nvidia_smi() if not asked.card else []
    card = cards.named(asked.card) if asked.card else cards.find(found[0]["name"]) if found else None
    if card is None:
        here = f"{found[0]['name']} is not in our table" if found else "this machine has no NVIDIA card"
        raise BadInput(f"--estimate: {here}; give --card, one of {card_names()}, or --all_cards")
    row = forecast.estimate_run(recipe, card, asked.count or len(found) or 1, asked.price_per_hour)
    print(json.dumps(row, indent=1) if asked.json else forecast.describe(recipe, card, row))
    return 0


def card_names() -> str:
    """Return the names that --card takes."""
    return ", ".join(card.name for card in cards.CARDS)


# ---- full load


def warm_up(seconds: int) -> int:
    """Multiply matrices on every card for ``seconds``; say every 5 s what each reaches. 1 where there is no card."""
    import torch

    from pretrain.machine import probes

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        print("no card that torch can use: nothing to load; python check_setup.py says why", file=sys.stderr)
        return 1
    old = any(torch.cuda.get_device_capability(i) < (8, 0) for i in range(count))
    precision, passed = "fp16" if old else "bf16", 0.0
    print(f"{count} cards, {seconds} s of {precision} matrix products of 8,192 x 8,192; Ctrl-C ends it")
    for readings in probes.load([f"cuda:{i}" for i in range(count)], seconds, precision):
        passed += 5
        for i, (device, reading) in enumerate(readings.items()):
            name = torch.cuda.get_device_name(i)
            peak = cards.peak_flops(name, precision)
            share = f" ({100 * reading['flops_per_second'] / peak:.0f}% of its peak)" if peak else " (peak not known)"
            watts = f", {reading['watts']:.0f} W" if reading["watts"] is not None else ""
            heat = f", {reading['celsius']:.0f} °C" if reading["celsius"] is not None else ""
            rate = f"{reading['flops_per_second'] / 1e12:.1f} TFLOP/s"
            print(f"{min(passed, seconds):4.0f} s  {device} {name}: {rate}{share}{watts}{heat}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
