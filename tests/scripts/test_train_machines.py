"""Run train.py on machines with little memory, lost processes, sharding, or a GPU."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from conftest import (
    ROOT,
    CompletedScript,
    free_port,
    run_script,
    start_script,
    torchrun_environments,
)
from run_results import TINY_RECIPE, final_state, losses_by_step, metrics_rows
from torch.distributed.fsdp import FSDPModule

from ursa_minor.base import checkpoint_files, files, gpus
from ursa_minor.base.errors import BadInput
from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.machine import device as hardware
from ursa_minor.machine.accelerator import check_kernels
from ursa_minor.machine.micro_batch import propose_micro_batch
from ursa_minor.preflight import estimate
from ursa_minor.recipe import keys, loading
from ursa_minor.recipe.batching import make_plan

FAILING_TRAINING = str(ROOT / "tests" / "failing_training.py")
NO_EVALS = ("--eval_steps", "0", "--sample_steps", "0")
NO_DROPOUT = ("--resid_pdrop", "0", "--embd_pdrop", "0", "--attn_pdrop", "0")
SHORT = ("--max_steps", "3", "--warmup_steps", "1")
AUTO = ("--per_device_train_batch_size", "auto")


def train_tiny(run_name: str, *flags: str, **options) -> CompletedScript:
    """Run failing_training.py on tiny.yaml; the options are those of ``run_script``."""
    return run_script(FAILING_TRAINING, *TINY_RECIPE, *flags, "--run_name", run_name, **options)


def batch_in_header(stderr: str) -> tuple[int, int]:
    """Return the number of micro-batches and their sequences that the header states."""
    pattern = r"process(?:es)? x (\d+) micro-batch(?:es)? x (\d+) sequence"
    match = re.search(pattern, stderr)
    return int(match[1]), int(match[2])


# The size of a micro-batch: auto or explicit.


@pytest.mark.parametrize(
    "max_sequences, expected", [(7, 4), pytest.param(1, 1, marks=pytest.mark.slow)]
)
def test_auto_halves_micro_batch_until_it_fits(workspace, max_sequences, expected):
    flags = (*NO_EVALS, *SHORT)
    result = train_tiny("auto", *flags, *AUTO, MAX_SEQUENCES=str(max_sequences))
    train_tiny("fixed", *flags, "--per_device_train_batch_size", str(expected))

    assert batch_in_header(result.stderr) == (8 // expected, expected)
    assert "runs out of memory: trying" in result.stderr
    assert losses_by_step("auto") == losses_by_step("fixed")
    state = checkpoint.read_state(Path("runs/auto/checkpoints/step-00000003"))
    assert state["micro_batch"] == expected
    assert state["tokens"] == 3 * 128


@pytest.mark.slow
def test_all_processes_take_the_smallest_micro_batch(workspace):
    limit = {"MAX_SEQUENCES": "1", "MAX_SEQUENCES_RANK": "1"}
    result = train_tiny("auto", *NO_EVALS, *AUTO, processes=2, **limit)
    train_tiny("fixed", *NO_EVALS, "--per_device_train_batch_size", "1", processes=2)

    assert batch_in_header(result.stderr) == (4, 1)
    assert final_state("auto")["model.safetensors"] == final_state("fixed")["model.safetensors"]


def test_checkpointing_is_suggested_if_nothing_fits(workspace):
    result = train_tiny("a", *AUTO, expect=2, MAX_SEQUENCES="0")

    assert "runs out of memory at a micro-batch of 1 x 16 tokens" in result.stderr
    assert "--gradient_checkpointing full" in result.stderr
    assert "Traceback" not in result.stderr


def test_explicit_micro_batch_is_not_changed(workspace):
    size = ("--per_device_train_batch_size", "4")
    result = train_tiny("a", *size, expect=2, MAX_SEQUENCES="3")

    assert "per_device_train_batch_size = 4" in result.stderr
    assert "micro-batch of 4 x 16 tokens" in result.stderr
    assert "--per_device_train_batch_size 2 or auto" in result.stderr
    assert not Path("runs/a/metrics.jsonl").exists()

    # The suggested size fits.
    suggestion = ("--per_device_train_batch_size", "2")
    result = train_tiny("a", *NO_EVALS, *SHORT, *suggestion, MAX_SEQUENCES="3")
    assert batch_in_header(result.stderr) == (4, 2)


@pytest.mark.slow
def test_resumed_auto_run_keeps_its_micro_batch(workspace):
    train_tiny("whole", *AUTO, MAX_SEQUENCES="2")
    train_tiny("k", *AUTO, expect=1, MAX_SEQUENCES="2", OOM_AT="7")

    result = train_tiny("k", *AUTO)  # a larger micro-batch would fit now

    assert batch_in_header(result.stderr) == (4, 2)
    assert "resumed from runs/k/checkpoints/step-00000007" in result.stderr
    assert final_state("k") == final_state("whole")


@pytest.mark.parametrize("processes, rank", [pytest.param(1, 0, marks=pytest.mark.slow), (2, 1)])
def test_out_of_memory_in_a_step_leaves_checkpoint(finished_ddp_run, processes, rank):
    flags = (*TINY_RECIPE, "--run_name", "k")
    failure = {"ACCELERATE_USE_CPU": "true", "OOM_AT": "5", "OOM_RANK": str(rank)}
    children = []
    for environment in torchrun_environments(processes):
        children.append(start_script(FAILING_TRAINING, flags, environment | failure))
    # No launcher ends the other process: it notices the failure itself.
    for pid, _, _ in children:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    _, _, err = children[rank]
    message = Path(err).read_text()

    assert "runs out of memory" in message
    assert "--per_device_train_batch_size 1" in message
    assert "Traceback" not in message
    assert checkpoint_files.find_problem(Path("runs/k/checkpoints/step-00000005")) is None
    run_script("train.py", *flags, processes=processes)
    uninterrupted = "whole" if processes == 1 else "two"
    assert final_state("k") == final_state(uninterrupted)


# Sharding.


@pytest.mark.slow
def test_zero_1_equals_ddp_bitwise(finished_ddp_run):
    flags = ("--shard_optimizer", "true")
    train_tiny("zero", *flags, processes=2)
    train_tiny("k", *flags, processes=2, expect=None, OOM_AT="7")
    train_tiny("k", *flags, processes=2)

    assert final_state("zero") == final_state("two")
    assert final_state("k") == final_state("two")  # after an interruption too


@pytest.mark.parametrize("reshard", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_fsdp2_learns_like_ddp(finished_ddp_run, reshard):
    """The exported model is a standard one, which has the validation loss of the run."""
    flags = ("--sample_steps", "12", "--save_steps", "12", "--eval_steps", "12")
    result = train_tiny("f", *flags, processes=2, FSDP=reshard)
    assert "FSDP2" in result.stderr
    expected = losses_by_step("two")
    assert len(expected) == 12
    assert losses_by_step("f") == pytest.approx(expected, abs=1e-5)
    evals = losses_by_step("f", "eval/loss")
    expected_evals = losses_by_step("two", "eval/loss")
    for step in (0, 12):
        assert evals[step] == pytest.approx(expected_evals[step], abs=1e-5)

    exported = ("--eval_only", "--init_from", "runs/f/model", "--run_name", "x")
    result = run_script("train.py", *TINY_RECIPE, *exported)
    assert f'"eval/loss": {evals[12]:.3f}'[:-1] in result.stdout


CAN_RECOVER = hasattr(FSDPModule, "reset_iter_state")  # since torch 2.13


@pytest.mark.parametrize(
    "recovers",
    [
        pytest.param(True, marks=pytest.mark.skipif(not CAN_RECOVER, reason="needs torch 2.13")),
        pytest.param(False, marks=pytest.mark.slow),
    ],
)
def test_fsdp2_averages_gradients_in_fp32(finished_ddp_run, recovers):
    """Gradients are exchanged once per update, or in each micro-batch if FSDP2 cannot recover."""
    environment = {"FSDP": "true", "ACCELERATE_MIXED_PRECISION": "bf16", "EXCHANGES": "sent.json"}
    updates = 4
    exchanges = updates + 1  # one in the memory trial
    if not recovers:
        environment["FSDP_RECOVERY"] = "no"
        exchanges = updates * 2  # each process has 2 micro-batches

    train_tiny("f", *NO_EVALS, "--max_steps", str(updates), processes=2, **environment)

    parameters = estimate.shape_of(loading.load_recipe(Path("tiny.yaml")).model).parameters
    groups = 3  # the two blocks, and the other tensors
    assert files.read_json(Path("sent.json")) == {
        "torch.float32": exchanges * parameters * 4,
        "exchanges": exchanges * groups,
    }
    # The loss is computed in fp32: two neighboring numbers in bf16 differ by 0.02 here.
    ddp_losses = losses_by_step("two")
    expected = {step: ddp_losses[step] for step in range(1, updates + 1)}
    assert losses_by_step("f") == pytest.approx(expected, abs=1e-3)


@pytest.mark.skipif(not CAN_RECOVER, reason="needs torch 2.13")
@pytest.mark.slow
def test_fsdp2_shards_gradients_before_halving_micro_batch(workspace):
    environment = {"FSDP": "true", "MAX_SEQUENCES": "1", "EXCHANGES": "sent.json"}
    result = train_tiny("f", *NO_EVALS, *AUTO, *SHORT, processes=2, **environment)

    # With one micro-batch of 4 sequences, no gradients wait for others.
    header = result.stderr
    assert "a micro-batch of 4 sequences runs out of memory: trying 2" in header
    unsharded = header.index("of 2 sequences next to unsharded gradients runs out of memory")
    sharded = header.index("of 2 sequences runs out of memory")
    assert unsharded < sharded < header.index("4 micro-batches x 1 sequence")
    assert len(losses_by_step("f")) == 3


class Launch(NamedTuple):
    """How a run is started."""

    processes: int
    flags: tuple[str, ...]
    environment: dict[str, str]


LAUNCHES = {
    "one": Launch(1, (), {}),
    "ddp": Launch(2, (), {}),
    "zero": Launch(2, ("--shard_optimizer", "true"), {}),
    "fsdp": Launch(2, (), {"FSDP": "true"}),
}


@pytest.mark.parametrize(
    "optimizer, order, tolerance",
    [
        # Muon contains AdamW for some tensors. Newton-Schulz amplifies rounding errors.
        ("muon", ("one", "fsdp", "zero", "ddp"), 1e-4),
        pytest.param("adamw", ("one", "fsdp", "zero", "ddp"), 1e-5, marks=pytest.mark.slow),
        pytest.param("muon", ("fsdp", "one", "ddp", "fsdp"), 1e-4, marks=pytest.mark.slow),
    ],
)
def test_checkpoint_fits_every_kind_of_sharding(workspace, optimizer, order, tolerance):
    flags = ("--optimizer", optimizer, *NO_EVALS, "--max_steps", "8", "--save_steps", "2")
    train_tiny("whole", *flags)

    failing_steps = ("3", "5", "7", "none")  # after the checkpoints of 2, 4 and 6
    for number, name in enumerate(order):
        start = LAUNCHES[name]
        environment = start.environment | {"OOM_AT": failing_steps[number]}
        options = {"processes": start.processes, "expect": None, **environment}
        result = train_tiny("moved", *flags, *start.flags, **options)
        assert ("resumed from" in result.stderr) == (number > 0)

    losses = losses_by_step("moved")
    assert len(losses) == 8
    assert losses == pytest.approx(losses_by_step("whole"), abs=tolerance)
    assert Path("runs/moved/model/config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero", "fsdp"])
def test_kept_checkpoints_leave_sharded_training_unchanged(workspace, name):
    """Also if the run is resumed from the initial weights."""
    start = LAUNCHES[name]
    flags = (*start.flags, *NO_EVALS, "--max_steps", "4", "--save_steps", "4")
    kept = (*flags, "--keep_checkpoints", "log2")
    weights = (*kept, "--keep_optimizer", "false")
    train_tiny("whole", *flags, processes=2, **start.environment)

    train_tiny("w", *weights, processes=2, **start.environment)
    train_tiny("k", *kept, processes=2, **start.environment)
    for step in (1, 2, 4):
        shutil.rmtree(f"runs/k/checkpoints/step-{step:08d}")
    for path in (Path("runs/k/model"), Path("runs/k/finished.json")):
        files.remove(path)
    result = train_tiny("k", *kept, processes=2, **start.environment)

    assert "resumed from runs/k/checkpoints/step-00000000" in result.stderr
    for run_name in ("w", "k"):
        assert final_state(run_name, 4) == final_state("whole", 4)
        for step in (0, 1, 2):
            path = Path(f"runs/{run_name}/checkpoints/step-{step:08d}")
            assert checkpoint_files.find_model_problem(path) is None


def test_fsdp_on_a_cpu_is_rejected(workspace):
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}

    result = run_script("train.py", *TINY_RECIPE, expect=2, **environment)

    assert "ACCELERATE_USE_FSDP" in result.stderr
    assert "needs NVIDIA GPUs" in result.stderr
    assert not Path("runs").exists()


# A process that hangs or dies.


def test_lost_process_ends_the_run(finished_ddp_run):
    result = train_tiny("k", processes=2, expect=None, DIE_AT="7")
    assert result.returncode == 1
    assert "hangs (connection" in result.stderr.lower()

    resumed = train_tiny("k", processes=2, DIE_AT="7")
    assert "resumed from runs/k/checkpoints/step-00000006" in resumed.stderr
    assert final_state("k") == final_state("two")


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["HANG_AT", "DIE_AT"])
def test_launcher_resumes_after_lost_process(finished_ddp_run, failure):
    timeout = 6
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    flags = [*TINY_RECIPE, "--run_name", "k", "--ddp_timeout", str(timeout)]
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": str(ROOT),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1",
        failure: "7",
    }
    command = [sys.executable, *torchrun, "--max_restarts", "1", FAILING_TRAINING, *flags]

    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    lines = []
    noticed_after = None
    for line in process.stderr:
        lines.append(line)
        if "another process of this run died" in line and noticed_after is None:
            noticed_after = time.time() - Path("struck").stat().st_mtime
    output = "".join(lines)

    assert process.wait() == 0, output
    assert noticed_after is not None, output
    assert noticed_after < timeout + 5, output
    assert "resumed from runs/k/checkpoints/step-00000006" in output
    assert final_state("k") == final_state("two")


# Simulated GPUs.


def fake_accelerator(
    mixed_precision: str, *, compiled: bool, device: str = "cuda"
) -> SimpleNamespace:
    """Return an object with the attributes of an Accelerator that propose_micro_batch reads."""
    backend = SimpleNamespace(value="INDUCTOR" if compiled else "NO")
    return SimpleNamespace(
        num_processes=1,
        is_fsdp2=False,
        device=torch.device(device),
        mixed_precision=mixed_precision,
        state=SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=backend)),
    )


def gpt2_124m(**changes) -> keys.Recipe:
    """Return the recipe of GPT-2 124M with micro-batch size auto and a local text."""
    values = {
        "per_device_train_batch_size": "auto",
        "data_files": ["x"],
        "dataset_name": None,
        "task_steps": 0,
    }
    recipe = loading.load_recipe(ROOT / "recipes" / "gpt2_124m.yaml")
    return keys.replace(recipe, **values | changes)


DRIVER_NAMES = {
    "t4": "Tesla T4",
    "v100": "Tesla V100-SXM2-16GB",
    "a100": "NVIDIA A100-SXM4-80GB",
    "a100_40gb": "NVIDIA A100-SXM4-40GB",
    "a100_pcie": "NVIDIA A100 80GB PCIe",
    "h100": "NVIDIA H100 80GB HBM3",
    "rtxpro6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
}


@pytest.mark.parametrize("gpu", gpus.GPUS, ids=lambda gpu: gpu.name)
def test_gpu_has_precision_micro_batch_and_config(gpu):
    name = DRIVER_NAMES.get(gpu.name, gpu.pattern)
    memory = int(gpu.memory_gib * 0.98 * 2**30)  # as the driver counts it
    device = hardware.Device("cuda", name, memory, gpu.capability, 1, has_triton=True)
    config = (ROOT / "accelerate_configs" / f"{gpus.preset(name)}.yaml").read_text()
    compiled = "INDUCTOR" in config

    accelerator = fake_accelerator(device.precision, compiled=compiled)
    micro_batch = propose_micro_batch(gpt2_124m(), memory, accelerator)

    assert gpus.find(name) is gpu
    assert device.precision == gpu.precision
    assert device.has_tf32 == gpu.is_ampere_or_newer
    assert f"mixed_precision: {device.precision}" in config
    plan = make_plan(gpt2_124m(per_device_train_batch_size=micro_batch), 1)
    assert plan.per_device_train_batch_size == int(re.search(r"micro-batch (\d+)", config)[1])

    def estimated_memory(size: int) -> float:
        parts = estimate.memory(estimate.GPT2_124M, micro_batch=size, half=True, compiled=compiled)
        return sum(parts.values())

    # The proposed micro-batch is the largest that fits, and at most 64.
    available = estimate.HEADROOM * memory
    assert estimated_memory(micro_batch) <= available
    assert micro_batch == 64 or estimated_memory(micro_batch + 1) > available


def test_unknown_gpu_gets_micro_batch_by_memory():
    accelerator = fake_accelerator("bf16", compiled=True)
    sizes = []
    for gib in (1, 6, 12, 24, 48):
        sizes.append(propose_micro_batch(gpt2_124m(), gib * 2**30, accelerator))

    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    assert 1 < sizes[1] < sizes[4] <= 64
    checkpointed = gpt2_124m(gradient_checkpointing="full")
    assert propose_micro_batch(checkpointed, 6 * 2**30, accelerator) > sizes[1]


def test_cpu_gets_small_micro_batch():
    accelerator = fake_accelerator("no", compiled=False, device="cpu")

    assert propose_micro_batch(gpt2_124m(), 60 * 2**30, accelerator) == 8


def test_gpu_without_kernels_is_rejected(monkeypatch):
    architectures = ["sm_75", "sm_80", "sm_90", "compute_120"]
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)
    v100 = hardware.Device("cuda", "Tesla V100-SXM2-16GB", 16 * 2**30, (7, 0), 1, True)

    with pytest.raises(BadInput, match=r"Tesla V100-SXM2-16GB \(sm_70\).*pip install"):
        check_kernels(v100)
    check_kernels(dataclasses.replace(v100, capability=(8, 6)))
    check_kernels(hardware.Device("cpu", "CPU", 2**34))


# A real GPU.

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def launch(config: str, *flags: str) -> str:
    """Run train.py with `accelerate launch` on one GPU and return its stderr."""
    path = ROOT / "accelerate_configs" / config
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(path)]
    launcher += ["--num_processes", "1", "--main_process_port", str(free_port())]
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *TINY_RECIPE, *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("ACCELERATE_USE_CPU", None)
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "config", ["zero2_x8.yaml", "zero3_x8.yaml", "conservative.yaml", "h100.yaml"]
)
def test_gpu_learns_like_cpu(workspace, config):
    launch("cpu.yaml", *NO_EVALS, *NO_DROPOUT, "--run_name", "cpu")

    output = launch(config, *NO_EVALS, *NO_DROPOUT, "--run_name", "gpu")

    assert ("FSDP2" in output) == config.startswith("zero")
    assert losses_by_step("gpu") == pytest.approx(losses_by_step("cpu"), rel=0.02)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("deterministic, tolerance", [("true", 0), ("false", 1e-3)])
def test_deterministic_gpu_run_resumes_bitwise(workspace, deterministic, tolerance):
    flags = ("--deterministic", deterministic)
    launch("h100.yaml", "--run_name", "whole", *flags)
    launch("h100.yaml", "--run_name", "k", "--save_total_limit", "0", *flags)
    for path in sorted(Path("runs/k/checkpoints").iterdir())[1:]:
        shutil.rmtree(path)

    output = launch("h100.yaml", "--run_name", "k", *flags)

    assert "resumed from runs/k/checkpoints/step-00000003" in output
    assert losses_by_step("k") == pytest.approx(losses_by_step("whole"), rel=tolerance)
    if deterministic == "true":
        assert final_state("k")["model.safetensors"] == final_state("whole")["model.safetensors"]
    assert 0 < metrics_rows("k")[-2]["gpu/memory"] <= 1
