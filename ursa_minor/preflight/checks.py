"""The checks of check_setup.py: they examine this machine and run trials on it, cheap ones first.

torch is imported inside the functions that examine it, because it may be missing or broken.
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
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from subprocess import DEVNULL
from types import MappingProxyType
from typing import Any, NamedTuple

from ursa_minor.base import cudnn, files, gpus, paths
from ursa_minor.base.errors import first_line, lacks_inodes
from ursa_minor.base.http import reach
from ursa_minor.data.sources import find as find_sources
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.preflight import compatibility, estimate, run_estimate, train_command
from ursa_minor.preflight.compatibility import ERROR, OK, TRYING, WARNING, Capability, Check
from ursa_minor.recipe import keys

REQUIREMENTS = paths.ROOT / "requirements.txt"
OLDEST_PYTHON = (3, 11)
SMI_SECONDS = 60
NETWORK_SECONDS = 5
NETWORK_FIX = (
    "check the name and HTTPS_PROXY, or log in (hf auth login); "
    "to train offline, use --data_files or --data_dir, and set HF_HUB_OFFLINE=1"
)
TRIALS_MODULE = ("-m", "ursa_minor.preflight.trials")


def examine(
    recipe: keys.Recipe, path: str, flags: Mapping[str, Any], *, quick: bool
) -> Iterator[Check]:
    """Yield the results of all checks but those of the data and of the network.

    Before a check that takes long, a result with the level ``TRYING`` states what is being checked.

    Args:
        path: path of the recipe, as it is shown in a command.
        flags: recipe keys of this command, and their values.
        quick: run only the first of the trials.
    """
    yield check_python()
    ranges = compatibility.read_ranges(REQUIREMENTS.read_text(encoding="utf-8"))
    installed = {name: installed_version(name) for name in ranges}
    yield from compatibility.check_packages(ranges, installed)
    yield from examine_disk(recipe)

    yield Check("torch", TRYING, "is being imported")
    try:
        import torch  # noqa: F401
    except Exception as error:  # a missing CUDA library, or a wheel for another processor
        text = f"cannot be imported: {error}"
        yield Check("torch", ERROR, text, "reinstall it: make clean environment")
        return
    if installed["transformers"] and installed["accelerate"]:
        yield from examine_gpus(path, quick, flags)


def check_python() -> Check:
    """Check the version of Python."""
    text = f"{platform.python_version()} on {platform.platform()}"
    if sys.version_info >= OLDEST_PYTHON:
        return Check("python", OK, text)
    oldest = ".".join(str(number) for number in OLDEST_PYTHON)
    fix = f"install Python {oldest} or newer, and use it: make PYTHON=python3.12 ..."
    return Check("python", ERROR, text, fix)


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed."""
    for distribution in distributions(name=package):
        return distribution.version
    return None


def examine_disk(recipe: keys.Recipe) -> Iterator[Check]:
    """Yield check results for the disks that the run writes to."""
    checkpoint_bytes, shard_bytes = estimate.written_bytes(recipe)
    runs_folder = _existing_folder(recipe.saving.run_dir)
    data_folder = _existing_folder(Path(recipe.data.prepared_data_dir))
    is_same_disk = runs_folder.stat().st_dev == data_folder.stat().st_dev
    if is_same_disk:
        shard_bytes += checkpoint_bytes

    yield from _examine_folder(runs_folder, checkpoint_bytes, shards=False)
    yield from _examine_folder(data_folder, shard_bytes, shards=True)

    file_system = files.network_mount(runs_folder)
    if file_system:
        text = f"{runs_folder} is on a network file system ({file_system})"
        fix = (
            "use a local disk for --output_dir: over a network, locks and fsync are slow or "
            "have no effect"
        )
        yield Check("mount", WARNING, text, fix)


def _examine_folder(folder: Path, needed_bytes: float, *, shards: bool) -> Iterator[Check]:
    """Yield check results for the free space and the inodes of the disk of a folder."""
    free_bytes = None
    # Some file systems do not report their free space.
    with files.ignoring_errors(files.NOT_SUPPORTED):
        free_bytes = shutil.disk_usage(folder).free
    if free_bytes is not None:
        yield compatibility.check_disk(free_bytes, needed_bytes, str(folder), shards=shards)
    if lacks_inodes(folder):
        text = f"{folder}: the file system has no free inodes (df -i)"
        yield Check("disk", ERROR, text, "delete files; their size does not matter")


def _existing_folder(folder: Path) -> Path:
    """Return the folder itself, or the nearest folder above it that exists."""
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def examine_gpus(
    path: str, quick: bool, flags: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[Check]:
    """Yield check results for torch, the driver and each GPU, the launch command, and the trials.

    Args:
        path: path of the recipe, for the launch command.
        quick: run only the first of the trials.
        flags: recipe keys of the launch command, and their values.
    """
    import torch

    yield Check("driver", TRYING, f"nvidia-smi is running, for at most {SMI_SECONDS} s")
    listed_gpus = nvidia_smi()
    if listed_gpus:
        driver: str | None = listed_gpus[0]["driver"]
        first_gpu = gpus.find(listed_gpus[0]["name"])
    else:
        driver = gpus.kernel_driver()
        first_gpu = None

    names = []  # of the GPUs that torch can use
    capabilities = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            names.append(torch.cuda.get_device_name(index))
            capabilities.append(torch.cuda.get_device_capability(index))
    yield compatibility.check_torch_build(
        torch.__version__,
        torch.version.cuda,
        usable_gpus=len(names),
        capability=first_gpu.capability if first_gpu else None,
        driver=driver,
    )

    shown_names = names or [gpu["name"] for gpu in listed_gpus]
    for name in shown_names:
        yield check_known_gpu(name)
    if torch.version.cuda:  # torch for AMD GPUs names its kernels differently
        for name, capability in dict(zip(names, capabilities, strict=True)).items():
            arch_list = torch.cuda.get_arch_list()
            yield compatibility.check_architecture(name, capability, arch_list, driver)
    yield from examine_cudnn(capabilities)
    if not shown_names:
        yield Check("gpu", OK, f"no GPU found; the CPU runs {torch.get_num_threads()} threads")

    preset = gpus.preset(shown_names[0] if shown_names else "", len(shown_names))
    if torch.backends.mps.is_available():
        preset = "mps"
    launcher = gpus.launcher(preset, len(shown_names))
    yield Check("launch", OK, f"{launcher} {train_command.quoted(path, flags)}")
    if names or not driver:
        yield from examine_trials(capabilities, preset, quick)


def check_known_gpu(name: str) -> Check:
    """Return what to expect of a GPU, or a warning if it is not in our table."""
    gpu = gpus.find(name)
    if gpu is None:
        text = f"{name}. It is not in ursa_minor/base/gpus.csv: MFU and estimates are unavailable"
        return Check("gpu", WARNING, text)
    return Check("gpu", OK, f"{name}. {run_estimate.expectation(gpu)}")


def examine_cudnn(capabilities: list[Capability]) -> Iterator[Check]:
    """Yield check results for the cuDNN that torch has loaded.

    Args:
        capabilities: compute capabilities of the GPUs.
    """
    import torch

    if torch.version.cuda is None:  # a build for CPUs or AMD GPUs
        return
    try:
        version = torch.backends.cudnn.version()
    except RuntimeError as error:  # torch refuses a library that is older than its own
        yield Check("cudnn", ERROR, first_line(error), compatibility.CUDNN_LIBRARY_FIX)
        return
    if version is None:
        return
    yield compatibility.check_cudnn_attention(
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
    warning = compatibility.check_cudnn_library(library)
    if warning:
        yield warning


def loaded_libraries(name: str) -> list[str]:
    """Return the paths of this process's shared libraries whose file names start with ``name``."""
    maps = Path("/proc/self/maps")  # Linux only
    if not maps.is_file():
        return []
    libraries = set()
    for line in maps.read_text(errors="replace").splitlines():
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith(name):
            libraries.add(path)
    return sorted(libraries)


def library_folders(name: str) -> list[str]:
    """Return the folders of LD_LIBRARY_PATH with a library whose name starts with ``name``."""
    folders = []
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and any(Path(folder).glob(f"{name}*.so*")):
            folders.append(os.path.realpath(folder))
    return folders


class Trial(NamedTuple):
    """A trial that runs in a separate process.

    Attributes:
        name: of its check result.
        command: starts it.
        seconds: time limit.
        is_needed: whether training on this machine is impossible if it fails.
    """

    name: str
    command: list[str]
    seconds: int
    is_needed: bool


def plan_trials(capabilities: list[Capability], preset: str) -> list[Trial]:
    """Return the trials for this machine: a training step, a compiled one, and an all-reduce.

    Args:
        capabilities: compute capabilities of the GPUs. Empty on a machine without a GPU.
        preset: name of the accelerate YAML of this machine.
    """
    precision = "fp32"
    step = {"device": "cpu", "precision": "no"}
    if capabilities:
        precision = "bf16" if capabilities[0] >= gpus.AMPERE else "fp16"
        step = {"device": "cuda", "precision": precision}
    # With fewer than two GPUs, the all-reduce is tried between two processes on the CPU.
    num_processes = 2
    all_reduce = {"backend": "gloo", "megabytes": 64}
    if len(capabilities) > 1:
        num_processes = len(capabilities)
        all_reduce = {"backend": "nccl", "megabytes": 256}
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc_per_node", str(num_processes)]
    compiled_step = step | {"compiled": True}

    return [
        Trial(
            name=precision,
            command=_trial_command([], "training_step", step),
            seconds=120,
            is_needed=True,
        ),
        Trial(
            name="compile",
            command=_trial_command([], "training_step", compiled_step),
            seconds=300,
            is_needed=run_estimate.compiles(preset),
        ),
        Trial(
            name="all-reduce",
            command=_trial_command(torchrun, "all_reduce", all_reduce),
            seconds=120,
            is_needed=all_reduce["backend"] == "nccl",
        ),
    ]


def _trial_command(launcher: list[str], name: str, arguments: dict[str, Any]) -> list[str]:
    """Return the command that runs a function of preflight/trials.py."""
    return [sys.executable, *launcher, *TRIALS_MODULE, name, json.dumps(arguments)]


def examine_trials(capabilities: list[Capability], preset: str, quick: bool) -> Iterator[Check]:
    """Run trials and yield their results.

    Args:
        capabilities, preset: see ``plan_trials``.
        quick: run only the first trial.
    """
    trials = plan_trials(capabilities, preset)
    first_trial = trials[0]
    for trial in [first_trial] if quick else trials:
        yield Check(trial.name, TRYING, f"is being tried, for at most {trial.seconds} s")
        answer = attempt(trial.command, trial.seconds)
        if "problem" not in answer:
            yield Check(trial.name, OK, answer["text"])
            continue
        level = ERROR if trial.is_needed else WARNING
        text = f"the trial fails: {answer['problem']}"
        yield Check(trial.name, level, text, compatibility.TRIAL_FIXES[trial.name])
        if trial is first_trial:  # if this step fails, so do the others
            return


def examine_network(recipe: keys.Recipe) -> Iterator[Check]:
    """Yield check results for the Hub and the recipe's data sets, if a run would use the Hub."""
    is_offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    if is_offline or not may_use_hub(recipe):
        text = "not checked: the recipe does not need it, or HF_HUB_OFFLINE is set"
        yield Check("hub", OK, text)
        return
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    addresses = {"hub": hub}
    hub_ids = {source.hub_id for source in recipe.data.resolved_sources}
    for name in sorted(filter(None, hub_ids)):
        addresses[f"data set {name}"] = f"{hub}/api/datasets/{name}"

    for name, url in addresses.items():
        yield Check(name, TRYING, f"is being requested, for at most {NETWORK_SECONDS + 1} s")
        problem = reach(url, NETWORK_SECONDS)
        # The Hub is reachable even if it refuses its front page. A data set must not be refused.
        is_refusal = problem.startswith("HTTP Error 4")
        if not problem or (is_refusal and name == "hub"):
            yield Check(name, OK, f"{url} answers")
            continue
        level = ERROR if needs_hub(recipe) else WARNING
        yield Check(name, level, f"{url}: {problem}", NETWORK_FIX)
        if name == "hub":  # without the Hub, the data sets cannot be reached either
            return


def needs_hub(recipe: keys.Recipe) -> bool:
    """Return whether training stops without the Hub, because it streams a data set from there.

    A data set whose shards are all prepared is not streamed.
    """
    for source in recipe.data.resolved_sources:
        if source.hub_id:
            folder = find_sources.find_source(source).folder
            if not manifests.is_complete(folder):
                return True
    return False


def may_use_hub(recipe: keys.Recipe) -> bool:
    """Return whether a run may send requests to the Hub.

    They may be for data, a tokenizer, a model, a task or a checkpoint, or to push the model.
    """
    if needs_hub(recipe) or recipe.hub.push_to_hub:
        return True
    evaluation = recipe.evaluation
    tasks_are_local = all(evaluation.files_of(task) for task in evaluation.tasks)
    if evaluation.task_steps > 0 and not tasks_are_local:
        return True
    for name in (recipe.data.tokenizer, recipe.model.init_from):
        is_trained = name in keys.TRAINED_TOKENIZERS
        if name is not None and not is_trained and not Path(name).exists():
            return True
    addresses = [recipe.saving.resume_from_checkpoint]
    for source in recipe.data.resolved_sources:
        addresses += source.data_files or ()
    return any(address.startswith(("hf://", "hub://")) for address in addresses)


def attempt(command: list[str], seconds: float) -> dict[str, Any]:
    """Run a command that prints a JSON object on one line.

    Args:
        seconds: time limit. Afterwards the command and all processes that it started are killed.

    Returns:
        The first JSON object that it printed, or ``{"problem": ...}`` if it printed none in time.
    """
    with (
        # An empty compilation cache, so that the compiler has to run.
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache,
        tempfile.TemporaryFile() as output_file,
    ):
        process = subprocess.Popen(
            command,
            stdin=DEVNULL,
            stdout=output_file,
            stderr=output_file,
            cwd=paths.ROOT,
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {"problem": f"no answer in {seconds:.0f} s"}
        finally:
            # The group has no processes any more if all of them have ended.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output_file.seek(0)
        lines = output_file.read().decode(errors="replace").strip().splitlines()

    for line in lines:
        if line.startswith('{"'):
            return json.loads(line)
    ending = f"exit status {status}"
    if status < 0:
        ending = f"killed by {signal.Signals(-status).name}"
    if lines:
        ending += f": {lines[-1][:200]}"
    return {"problem": f"its process ended without a result, {ending}"}


def nvidia_smi() -> list[dict[str, str]]:
    """Return the ``name`` and the ``driver`` version of each NVIDIA GPU that nvidia-smi lists.

    The list is empty without a driver, or if nvidia-smi fails.
    """
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    output = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        output = subprocess.check_output(query, stderr=DEVNULL, text=True, timeout=SMI_SECONDS)
    rows = re.finditer(r"(?P<name>.+), (?P<driver>[\d.]+)$", output, re.MULTILINE)
    return [row.groupdict() for row in rows]
