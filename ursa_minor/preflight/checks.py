"""The checks of check_setup.py: facts of this machine and trials on it, one verdict after the other, cheap ones first.

torch is imported where it is examined, for it may be what is missing.
"""

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from ursa_minor.base import cudnn, files, gpus, paths
from ursa_minor.base.errors import first_line, lacks_inodes
from ursa_minor.base.http import reach
from ursa_minor.data.sources import find as find_sources
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.preflight import compatibility, estimate, run_estimate
from ursa_minor.preflight.compatibility import ERROR, OK, TRYING, WARNING, Check
from ursa_minor.recipe import keys

REQUIREMENTS = paths.ROOT / "requirements.txt"
SMI_SECONDS = 60
NETWORK_SECONDS = 5
NETWORK_FIX = (
    "check the name and HTTPS_PROXY, or log in (hf auth login); "
    "to train offline: data_files or data_dir, and HF_HUB_OFFLINE=1"
)
TRAINING_STEP = "-m ursa_minor.preflight.trials training_step"


def examine(recipe: keys.Recipe, path: str, *, quick: bool) -> Iterator[Check]:
    """Yield verdicts on the recipe of this ``path`` here, and what is waited for; ``quick``: one trial of three."""
    fix = (
        "install Python 3.11 or newer; make PYTHON=python3.12 ..."
        if sys.version_info < (3, 11)
        else ""
    )
    yield Check(
        "python",
        ERROR if fix else OK,
        f"{platform.python_version()} on {platform.platform()}",
        fix,
    )
    ranges = compatibility.read_ranges(REQUIREMENTS.read_text(encoding="utf-8"))
    installed = {
        name: next((one.version for one in distributions(name=name)), None) for name in ranges
    }
    yield from compatibility.packages(ranges, installed)
    yield from examine_disk(recipe)
    yield Check("torch", TRYING, "is being imported")
    try:
        import torch  # noqa: F401
    except Exception as error:  # a missing CUDA library, or a wheel for another processor
        yield Check(
            "torch", ERROR, f"cannot be imported: {error}", "reinstall it: make clean environment"
        )
        return
    if installed["transformers"] and installed["accelerate"]:
        yield from examine_cards(path, quick)


def examine_disk(recipe: keys.Recipe) -> Iterator[Check]:
    """Yield verdicts on the folders that the run will be written to."""
    checkpoints, shards = estimate.written_bytes(recipe)
    runs, data = map(_standing, (recipe.saving.run_dir, Path(recipe.data.prepared_data_dir)))
    if runs.stat().st_dev == data.stat().st_dev:
        shards += checkpoints
    for folder, needed, is_data in ((runs, checkpoints, False), (data, shards, True)):
        free = None
        # Some file systems do not report their free space.
        with files.ignoring_errors(files.NOT_SUPPORTED):
            free = shutil.disk_usage(folder).free
        if free is not None:
            yield compatibility.disk(free, needed, str(folder), shards=is_data)
        if lacks_inodes(folder):
            yield Check(
                "disk",
                ERROR,
                f"{folder}: no inodes are left (df -i)",
                "delete files, of whatever size",
            )
    if kind := files.network_mount(runs):
        fix = "a local disk for --output_dir: locks and fsync are slow, or not kept, over a network"
        yield Check("mount", WARNING, f"{runs} lies on a network file system ({kind})", fix)


def _standing(wanted: Path) -> Path:
    """Return the folder, or the nearest above it that exists."""
    return next(path for path in (wanted.absolute(), *wanted.absolute().parents) if path.is_dir())


def examine_cards(path: str, quick: bool) -> Iterator[Check]:
    """Yield verdicts on torch's build, the driver and each card, the YAML to take, and what was tried on them."""
    import torch

    yield Check("driver", TRYING, f"nvidia-smi is asked: at most {SMI_SECONDS} s")
    listed, cuda = nvidia_smi(), torch.version.cuda
    driver = listed[0]["driver"] if listed else gpus.kernel_driver()
    known = gpus.find(listed[0]["name"]) if listed else None
    usable = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    mine = [(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in usable]
    here = [name for name, _ in mine] or [card["name"] for card in listed]
    yield compatibility.build(
        torch.__version__, cuda, len(mine), known.capability if known else None, driver
    )
    for name in here:
        known = gpus.find(name)
        text = (
            run_estimate.expectation(known)
            if known
            else "It is not in ursa_minor/base/gpus.csv: no mfu, no estimates"
        )
        yield Check("card", OK if known else WARNING, f"{name}. {text}")
    # torch for AMD GPUs names its kernels differently.
    for name, capability in dict(mine).items() if cuda else ():
        yield compatibility.architecture(name, capability, torch.cuda.get_arch_list(), driver)
    yield from examine_cudnn([capability for _, capability in mine])
    if not here:
        yield Check("card", OK, f"none: CPU, {torch.get_num_threads()} threads")
    preset = gpus.preset(here[0] if here else "", len(here))
    preset = "mps" if torch.backends.mps.is_available() else preset
    yield Check(
        "launch", OK, f"{gpus.launcher(preset, len(here))} train.py --recipe {paths.quoted(path)}"
    )
    if mine or not driver:
        yield from examine_trials([capability for _, capability in mine], preset, quick)


def examine_cudnn(capabilities: list[compatibility.Pair]) -> Iterator[Check]:
    """Yield check results for the cuDNN that torch has loaded, for GPUs of these compute capabilities."""
    import torch

    if torch.version.cuda is None:  # a build for CPUs or AMD GPUs
        return
    try:
        version = torch.backends.cudnn.version()
    except RuntimeError as error:  # torch refuses a library that is older than its own
        yield Check("cudnn", ERROR, first_line(error), compatibility.CUDNN_REMEDY)
        return
    if version is None:
        return
    yield compatibility.cudnn_attention(
        capabilities, version, deprioritized=cudnn.is_deprioritized()
    )
    package_name = f"nvidia-cudnn-cu{torch.version.cuda.partition('.')[0]}"
    package = next(iter(distributions(name=package_name)), None)
    if package is None:  # the torch of a container or of conda
        return
    library = compatibility.CudnnLibrary(
        version=version,
        package=package.version,
        package_folder=os.path.realpath(str(package.locate_file("nvidia/cudnn/lib"))),
        loaded=loaded_libraries("libcudnn"),
        search_path=library_folders("libcudnn"),
    )
    shadowed = compatibility.cudnn_library(library)
    if shadowed:
        yield shadowed


def loaded_libraries(name: str) -> list[str]:
    """Return the paths of the shared libraries of this process whose file names begin with ``name``."""
    maps = Path("/proc/self/maps")  # Linux only
    text = maps.read_text(errors="replace") if maps.is_file() else ""
    paths = {line.rpartition(" ")[2] for line in text.splitlines()}
    return sorted(path for path in paths if Path(path).name.startswith(name))


def library_folders(name: str) -> list[str]:
    """Return the folders of LD_LIBRARY_PATH that contain a shared library whose name begins with ``name``."""
    folders = []
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and any(Path(folder).glob(f"{name}*.so*")):
            folders.append(os.path.realpath(folder))
    return folders


def examine_trials(mine: list[compatibility.Pair], preset: str, quick: bool) -> Iterator[Check]:
    """Yield verdicts on what was tried on cards of these capabilities: steps, the compiler, the all-reduce."""
    half = "fp32"
    step = {"device": "cpu", "precision": "no"}
    if mine:
        half = "bf16" if mine[0] >= gpus.AMPERE else "fp16"
        step = {"device": "cuda", "precision": half}
    backend, count, megabytes = ("nccl", len(mine), 256) if len(mine) > 1 else ("gloo", 2, 64)
    ring = {"backend": backend, "megabytes": megabytes}
    several = f"-m torch.distributed.run --standalone --nproc_per_node {count} -m ursa_minor.preflight.trials all_reduce"
    trials = [  # the name of its line, its words, its arguments, its time limit, whether training needs it here
        (half, TRAINING_STEP, step, 120, True),
        ("compile", TRAINING_STEP, step | {"compiled": True}, 300, run_estimate.compiles(preset)),
        ("all-reduce", several, ring, 120, backend == "nccl"),
    ]
    for name, words, given, seconds, needed in trials[: 1 if quick else None]:
        yield Check(name, TRYING, f"is tried: at most {seconds} s")
        found = attempt([sys.executable, *words.split(), json.dumps(given)], seconds)
        if "problem" not in found:
            yield Check(name, OK, found["text"])
            continue
        level = ERROR if needed else WARNING
        yield Check(
            name, level, f"its trial fails: {found['problem']}", compatibility.REMEDIES[name]
        )
        if name == half:  # nothing trains
            return


def examine_network(recipe: keys.Recipe) -> Iterator[Check]:
    """Yield verdicts on the Hub and the recipe's data sets there, if a run would ask the Hub."""
    is_offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    if is_offline or not asks_hub(recipe):
        text = "no request is made: nothing of the recipe needs it, or HF_HUB_OFFLINE is set"
        yield Check("hub", OK, text)
        return
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    addresses = {"hub": hub}
    hub_ids = {source.hub_id for source in recipe.data.resolved_sources}
    for name in sorted(filter(None, hub_ids)):
        addresses[f"data set {name}"] = f"{hub}/api/datasets/{name}"

    for name, url in addresses.items():
        yield Check(name, TRYING, f"is asked: at most {NETWORK_SECONDS + 1} s")
        problem = reach(url, NETWORK_SECONDS)
        # A refusal of its front page is an answer. A refusal of a data set's page is not.
        is_refusal = problem.startswith("HTTP Error 4")
        if not problem or (is_refusal and name == "hub"):
            yield Check(name, OK, f"{url} answers")
            continue
        level = ERROR if needs_hub(recipe) else WARNING
        yield Check(name, level, f"{url}: {problem}", NETWORK_FIX)
        if name == "hub":  # one line is enough
            return


def needs_hub(recipe: keys.Recipe) -> bool:
    """Return whether the run would stop without the Hub: it streams a data set whose shards are not all here."""
    for source in recipe.data.resolved_sources:
        if source.hub_id:
            folder = find_sources.find_source(source).folder
            if not manifests.is_complete(folder):
                return True
    return False


def asks_hub(recipe: keys.Recipe) -> bool:
    """Return whether the run may ask the Hub: for data, a tokenizer, a model, a task, a checkpoint, or to push."""
    if needs_hub(recipe) or recipe.hub.push_to_hub:
        return True
    evaluation = recipe.evaluation
    if evaluation.task_steps > 0 and not all(map(evaluation.files_of, evaluation.tasks)):
        return True
    names = {recipe.data.tokenizer, recipe.model.init_from} - {None, *keys.TRAINED_TOKENIZERS}
    if any(not Path(str(name)).is_dir() for name in names):
        return True
    addresses = [recipe.saving.resume_from_checkpoint]
    for source in recipe.data.resolved_sources:
        addresses += source.data_files or ()
    return any(address.startswith(("hf://", "hub://")) for address in addresses)


def attempt(command: list[str], seconds: float) -> dict[str, Any]:
    """Run a command that prints a JSON object in a line; return the first, or {"problem": why not, a line}.

    After ``seconds`` it is killed, and in any case what it has started.
    """
    # A fresh cache: what is tried is the compiler, not what it left behind.
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache,
        tempfile.TemporaryFile() as words,
    ):
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        process = subprocess.Popen(
            command,
            stdin=DEVNULL,
            stdout=words,
            stderr=words,
            cwd=paths.ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {"problem": f"no answer in {seconds:.0f} s"}
        finally:
            # All its processes have ended.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        words.seek(0)
        lines = words.read().decode(errors="replace").strip().splitlines()
    if answers := [line for line in lines if line.startswith('{"')]:
        return json.loads(answers[0])
    how_it_ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    last = f": {lines[-1][:200]}" if lines else ""
    return {"problem": f"its process ended without a result, {how_it_ended}{last}"}


def nvidia_smi() -> list[dict[str, str]]:
    """Return the ``name`` and ``driver`` of the machine's NVIDIA cards; an empty list without a driver."""
    query, out = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        out = subprocess.check_output(query, stderr=DEVNULL, text=True, timeout=SMI_SECONDS)
    return [
        found.groupdict()
        for found in re.finditer(r"(?P<name>.+), (?P<driver>[\d.]+)$", out, re.MULTILINE)
    ]
