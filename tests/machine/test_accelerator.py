"""The accelerator: which launches are refused, and how the others are configured."""

import dataclasses
import os
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ursa_minor.base.errors import BadInput, TrainingStopped
from ursa_minor.machine import accelerator
from ursa_minor.machine import device as hardware
from ursa_minor.machine.accelerator import check_supported, make_accelerator
from ursa_minor.recipe import keys

CPU = hardware.Device("cpu", "CPU (x), 2 threads", 2**34)
T4 = hardware.Device("cuda", "Tesla T4", 15 * 2**30, (7, 5), 1, True)
P4000 = hardware.Device("cuda", "Quadro P4000", 8 * 2**30, (6, 1), 1, True)
A6000 = hardware.Device("cuda", "NVIDIA RTX A6000", 48 * 2**30, (8, 6), 2, True)
A6000_WITHOUT_TRITON = dataclasses.replace(A6000, has_triton=False)
FAKE_ACCELERATOR = types.SimpleNamespace(
    is_fsdp2=False, num_processes=1, wait_for_everyone=lambda: None
)

# Environments that `accelerate launch` sets.
BF16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
FP16_CPU = {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_CPU": "true"}
FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}
INDUCTOR = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
ACCUMULATION = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}


@pytest.fixture(autouse=True)
def restored_matmul_precision():
    """Restore the precision of fp32 products, which an accelerator changes for the process."""
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(autouse=True)
def environment_without_launcher(monkeypatch) -> None:
    """Remove the variables that a launcher would have set."""
    for name in (
        "MIXED_PRECISION",
        "USE_CPU",
        "GRADIENT_ACCUMULATION_STEPS",
        "DYNAMO_BACKEND",
        "DYNAMO_MODE",
    ):
        monkeypatch.delenv(f"ACCELERATE_{name}", raising=False)


@pytest.fixture
def accelerator_options(monkeypatch) -> Callable[..., dict]:
    """A function that makes an accelerator and returns the arguments that Accelerate receives."""

    def make(device, machine: keys.Machine | None = None, **environment) -> dict:
        options = {}

        def fake_accelerator(**kwargs):
            options.update(kwargs)
            return FAKE_ACCELERATOR

        monkeypatch.setattr(accelerator, "Accelerator", fake_accelerator)
        monkeypatch.setattr(os, "environ", dict(os.environ) | environment)
        make_accelerator(device, machine)
        return options

    return make


@pytest.mark.parametrize(
    ("environment", "requested", "expected"),
    [
        ({}, "reduce-overhead", "reduce-overhead"),
        (INDUCTOR | {"ACCELERATE_DYNAMO_MODE": "max-autotune"}, "default", "max-autotune"),
        (
            INDUCTOR | {"ACCELERATE_DYNAMO_MODE": "max-autotune"},
            "reduce-overhead",
            "reduce-overhead",
        ),
    ],
    ids=["recipe only", "YAML only", "recipe overrides YAML"],
)
def test_compile_mode_comes_from_recipe_or_yaml(
    accelerator_options, environment, requested, expected
):
    machine = keys.Machine(compile_mode=requested, tf32=False)

    options = accelerator_options(A6000, machine, **environment)

    assert options["dynamo_plugin"].backend.value == "INDUCTOR"
    assert options["dynamo_plugin"].mode == expected


def test_tf32_can_be_disabled(accelerator_options):
    accelerator_options(A6000, keys.Machine(tf32=False))

    assert torch.get_float32_matmul_precision() == "highest"


# Refused launches


@pytest.mark.parametrize(
    ("device", "environment", "compile_mode", "words"),
    [
        (CPU, {}, "max-autotune", ["compile_mode = max-autotune", "dynamo_backend: NO", "CPU"]),
        (A6000, BF16, "reduce-overhead", ["INDUCTOR"]),
        (CPU, INDUCTOR, "reduce-overhead", ["NVIDIA GPU", "--compile_mode default"]),
        (CPU, BF16, "default", ["mixed_precision: bf16", "PyTorch sees none"]),
        (CPU, FP16_CPU, "default", ["--config_file accelerate_configs/cpu.yaml"]),
        (T4, BF16, "default", ["Tesla T4", "bf16", "mixed_precision: fp16"]),
        (A6000, FP8, "default", ["fp8 is not supported"]),
        (P4000, INDUCTOR, "default", ["Quadro P4000", "too old for Triton"]),
        (A6000_WITHOUT_TRITON, INDUCTOR, "default", ["pip install triton"]),
        (
            A6000,
            BF16 | {"LOCAL_WORLD_SIZE": "4"},
            "default",
            ["2 GPUs on this machine", "num_processes: 2"],
        ),
        (A6000, DEEPSPEED, "default", ["zero1_x8.yaml"]),
        (A6000, FSDP2 | {"FSDP_VERSION": "1"}, "default", ["fsdp_version: 2"]),
        (CPU, FSDP2, "default", ["NVIDIA GPUs"]),
        (T4, FSDP2, "default", ["fp16 gradient scaler"]),
        (A6000, ACCUMULATION, "default", ["tokens_per_step"]),
    ],
    ids=[
        "compile mode without compiler",
        "compile mode without INDUCTOR",
        "CUDA graphs on CPU",
        "bf16 on CPU",
        "fp16 on CPU",
        "bf16 on T4",
        "fp8",
        "compiler on old GPU",
        "compiler without Triton",
        "more processes than GPUs",
        "DeepSpeed",
        "FSDP1",
        "FSDP2 on CPU",
        "FSDP2 in fp16",
        "gradient accumulation",
    ],
)
def test_unsupported_launch_is_refused(device, environment, compile_mode, words):
    with pytest.raises(BadInput) as error:
        check_supported(device, environment, "auto", compile_mode)

    (line,) = error.value.lines
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("device", "environment", "compile_mode"),
    [
        (A6000, {}, "reduce-overhead"),
        (A6000, INDUCTOR, "reduce-overhead"),
        (CPU, INDUCTOR, "max-autotune"),
    ],
)
def test_supported_compile_mode_is_accepted(device, environment, compile_mode):
    check_supported(device, environment, "auto", compile_mode)


def test_bf16_is_accepted_on_requested_cpu():
    check_supported(CPU, BF16 | {"ACCELERATE_USE_CPU": "true"})


def test_one_process_per_gpu_is_accepted():
    compiler = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}

    check_supported(A6000, BF16 | compiler | {"LOCAL_WORLD_SIZE": "2"})


def test_sharding_is_accepted_with_installed_accelerate():
    check_supported(A6000, FSDP2)


def test_old_accelerate_is_refused_for_sharding(monkeypatch):
    """It cannot shard tied embeddings."""
    monkeypatch.setattr(accelerator.accelerate, "__version__", "1.14.0")

    with pytest.raises(BadInput) as error:
        check_supported(A6000, FSDP2)

    message = str(error.value)
    assert "accelerate 1.14.0" in message
    assert "accelerate#4171" in message
    assert "pip install -r requirements.txt" in message


def test_old_accelerate_is_accepted_without_sharding(monkeypatch):
    monkeypatch.setattr(accelerator.accelerate, "__version__", "1.14.0")

    check_supported(A6000, {})


def test_all_problems_are_listed_together(accelerator_options):
    with pytest.raises(BadInput) as error:
        accelerator_options(T4, keys.Machine(tf32=True), **BF16, **ACCUMULATION)

    assert len(error.value.lines) == 3
    (tf32_line,) = [line for line in error.value.lines if line.startswith("tf32 = true: ")]
    assert "Tesla T4 does not support TF32" in tf32_line
    assert "--tf32 auto" in tf32_line


def test_processes_that_would_not_communicate_are_refused(accelerator_options):
    """The fake accelerator has one process, although the launch has two."""
    launch = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }

    with pytest.raises(BadInput, match="WORLD_SIZE = 2, .*Accelerate"):
        accelerator_options(CPU, **launch)

    # Without this variable, the real Accelerate would make one process too.
    assert os.environ["ACCELERATE_USE_CPU"] == "true"


def test_incomplete_launch_is_rejected_before_connecting(accelerator_options):
    with pytest.raises(BadInput, match="RANK = 1, but without WORLD_SIZE"):
        accelerator_options(CPU, RANK="1")


# Deterministic algorithms


@pytest.fixture
def restored_determinism(monkeypatch):
    """Restore the settings of deterministic algorithms."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    # The undo of monkeypatch would delete this setting.
    with torch._inductor.config.patch(deterministic=False):
        yield
    torch.use_deterministic_algorithms(False)


def test_algorithms_are_not_deterministic_by_default(accelerator_options, restored_determinism):
    accelerator_options(A6000)

    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_deterministic_run_configures_torch_and_cublas(accelerator_options, restored_determinism):
    accelerator_options(A6000, keys.Machine(deterministic=True))

    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch._inductor.config.deterministic
    assert not torch.utils.deterministic.fill_uninitialized_memory


# The rendezvous of restarted processes


def meet(store: dist.Store, ranks: list[int], timeout: float = 20.0) -> list[str]:
    """Start these of three ranks together. Return the rendezvous name of each."""
    store.set_timeout(timedelta(seconds=timeout))

    def name_of(rank: int) -> str:
        return accelerator.rendezvous_name(store, rank, 3, timeout)

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(name_of, ranks))


def kill_after_request(store: dist.Store, rank: int) -> None:
    """Leave the request of a process that was killed before it got an answer."""
    store.set(f"ask/{rank}", "the request of a killed process")


def test_restarted_processes_meet_by_new_name():
    store = dist.HashStore()

    first = meet(store, [0, 1, 2])
    kill_after_request(store, 1)
    second = meet(store, [0, 1, 2])
    kill_after_request(store, 2)
    third = meet(store, [0, 1, 2])

    # In each start, all processes have the same name.
    names = [set(first), set(second), set(third)]
    assert [len(start) for start in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([0], "2 processes did not start within 0.3 s"), ([1], "another process of")],
)
def test_missing_process_stops_training_after_timeout(ranks, words):
    store = dist.HashStore()
    kill_after_request(store, 1)

    with pytest.raises(TrainingStopped, match=words):
        meet(store, ranks, timeout=0.3)
