"""The Accelerator: what a launch is refused, and how it is made."""

import dataclasses
import os
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ursa_minor.base.errors import BadInput, TrainingStopped
from ursa_minor.machine import accelerator
from ursa_minor.machine import device as hardware
from ursa_minor.machine.accelerator import check_supported as refuse
from ursa_minor.machine.accelerator import make_accelerator
from ursa_minor.recipe import keys

CPU = hardware.Device("cpu", "CPU (x), 2 threads", 2**34)
T4 = hardware.Device("cuda", "Tesla T4", 15 * 2**30, (7, 5), 1, True)
P4000 = hardware.Device("cuda", "Quadro P4000", 8 * 2**30, (6, 1), 1, True)
A6000 = hardware.Device("cuda", "NVIDIA RTX A6000", 48 * 2**30, (8, 6), 2, True)
FAKE = types.SimpleNamespace(
    is_fsdp2=False, num_processes=1, wait_for_everyone=lambda: None
)  # an Accelerator
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "bf16"}
FP16 = {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_CPU": "true"}
YAML = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.fixture(autouse=True)
def precision_of_products():
    """An accelerator for a card sets it for the whole process; other tests of this worker have their own."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(autouse=True)
def not_launched(monkeypatch):
    for name in (
        "MIXED_PRECISION",
        "USE_CPU",
        "GRADIENT_ACCUMULATION_STEPS",
        "DYNAMO_BACKEND",
        "DYNAMO_MODE",
    ):
        monkeypatch.delenv(f"ACCELERATE_{name}", raising=False)


@pytest.fixture
def made(monkeypatch):
    """What a launch on a device gives Accelerate, and the precision of fp32 products afterwards."""

    def make(device, machine=None, **environment):
        seen = {}
        monkeypatch.setattr(accelerator, "Accelerator", lambda **how: seen.update(how) or FAKE)
        monkeypatch.setattr(os, "environ", dict(os.environ) | environment)
        make_accelerator(device, machine)
        return seen, torch.get_float32_matmul_precision()

    return make


def test_the_compile_mode_is_the_one_asked_for_else_the_yamls(made):
    launched = YAML | {"ACCELERATE_DYNAMO_MODE": "max-autotune"}
    for environment, asked, given in (
        ({}, "reduce-overhead", "reduce-overhead"),
        (launched, "default", "max-autotune"),
        (launched, "reduce-overhead", "reduce-overhead"),
    ):
        how, products = made(A6000, keys.Machine(compile_mode=asked, tf32=False), **environment)
        assert (how["dynamo_plugin"].backend.value, how["dynamo_plugin"].mode) == (
            "INDUCTOR",
            given,
        )
        assert products == "highest"


@pytest.mark.parametrize(
    "device, environment, compile_mode, said",
    [
        (
            CPU,
            {},
            "max-autotune",
            "compile_mode = max-autotune has no effect with dynamo_backend: NO on CPU",
        ),
        (A6000, LAUNCHED, "reduce-overhead", "It needs INDUCTOR"),
        (CPU, YAML, "reduce-overhead", "an NVIDIA GPU. Use --compile_mode default"),
        (
            CPU,
            LAUNCHED,
            "default",
            "mixed_precision: bf16: the accelerate YAML is for a GPU, but PyTorch sees none",
        ),
        (CPU, FP16, "default", "--config_file accelerate_configs/cpu.yaml"),
        (T4, LAUNCHED, "default", "Tesla T4 does not support bf16. Write mixed_precision: fp16"),
        (
            A6000,
            {"ACCELERATE_MIXED_PRECISION": "fp8"},
            "default",
            "fp8 is not supported",
        ),
        (P4000, YAML, "default", "Quadro P4000 is too old for Triton"),
        (dataclasses.replace(A6000, has_triton=False), YAML, "default", "pip install triton"),
        (
            A6000,
            LAUNCHED | {"LOCAL_WORLD_SIZE": "4"},
            "default",
            "sees 2 GPUs on this machine. Write num_processes: 2",
        ),
        (A6000, {"ACCELERATE_USE_DEEPSPEED": "true"}, "default", "zero1_x8.yaml"),
        (A6000, SHARDED | {"FSDP_VERSION": "1"}, "default", "fsdp_version: 2"),
        (CPU, SHARDED, "default", "needs NVIDIA GPUs"),
        (T4, SHARDED, "default", "fp16 gradient scaler is not supported"),
        (
            A6000,
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            "default",
            "steps is computed from tokens_per_step",
        ),
    ],
)
def test_what_a_machine_cannot_do_is_refused_with_the_remedy(
    device, environment, compile_mode, said
):
    with pytest.raises(BadInput) as caught:
        refuse(device, environment, "auto", compile_mode)
    (line,) = caught.value.lines
    assert said in line


def test_what_a_machine_can_do_is_not_refused():
    for environment in ({}, YAML):
        refuse(A6000, environment, "auto", "reduce-overhead")
    refuse(CPU, YAML, "auto", "max-autotune")
    refuse(CPU, LAUNCHED | {"ACCELERATE_USE_CPU": "true"})  # slow, and asked for
    refuse(A6000, LAUNCHED | {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "LOCAL_WORLD_SIZE": "2"})


def test_a_version_of_accelerate_that_cannot_shard_tied_embeddings_is_refused_where_a_run_is_sharded(
    monkeypatch,
):
    refuse(A6000, SHARDED)
    monkeypatch.setattr(accelerator.accelerate, "__version__", "1.14.0")
    with pytest.raises(
        BadInput, match=r"accelerate 1\.14\.0.*accelerate#4171.*pip install -r requirements\.txt"
    ):
        refuse(A6000, SHARDED)
    refuse(A6000, {})


def test_all_faults_are_listed_at_once_and_stop_the_accelerator(made):
    with pytest.raises(BadInput) as caught:
        made(T4, keys.Machine(tf32=True), **LAUNCHED, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4")
    assert len(caught.value.lines) == 3
    assert (
        "tf32 = true: Tesla T4 does not support TF32, which GPUs have from Ampere on. "
        "Use --tf32 auto" in caught.value.lines
    )


def test_processes_that_do_not_know_each_other_are_refused(made):
    launch = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    with pytest.raises(BadInput, match="WORLD_SIZE = 2, but Accelerate makes it 1"):
        made(CPU, **launch)
    assert os.environ["ACCELERATE_USE_CPU"] == "true"  # so that the real one does know


def test_incomplete_launch_is_rejected_before_connecting(made):
    with pytest.raises(BadInput, match="RANK = 1, but without WORLD_SIZE"):
        made(CPU, RANK="1")


def test_deterministic_asks_torch_cublas_and_the_compiler_for_kernels_that_repeat_themselves(
    made, monkeypatch
):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch._inductor.config, "deterministic", False)
    try:
        made(A6000)
        assert (
            not torch.are_deterministic_algorithms_enabled()
            and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        )
        made(A6000, keys.Machine(deterministic=True))
        assert (
            torch.are_deterministic_algorithms_enabled()
            and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        )
        assert (
            torch._inductor.config.deterministic
            and not torch.utils.deterministic.fill_uninitialized_memory
        )
    finally:
        torch.use_deterministic_algorithms(False)


def meet(store, ranks, timeout=20.0):
    """Start these of three ranks at once; return what each got."""
    store.set_timeout(timedelta(seconds=timeout))
    with ThreadPoolExecutor(3) as pool:
        return list(
            pool.map(lambda rank: accelerator.rendezvous_name(store, rank, 3, timeout), ranks)
        )


def test_processes_that_are_started_anew_meet_by_a_name_that_those_before_them_did_not_have():
    store, names = dist.HashStore(), []
    for dead in (None, 1, 2):
        if dead:
            store.set(f"ask/{dead}", "of one that asked and was killed")
        first, *others = meet(store, [0, 1, 2])
        assert others == [first, first] and first not in names
        names.append(first)


@pytest.mark.parametrize(
    "ranks, words", [([0], r"2 processes did not start within 0.3 s"), ([1], "another process of")]
)
def test_a_process_that_does_not_come_is_waited_for_as_long_as_ddp_timeout(ranks, words):
    store = dist.HashStore()
    store.set("ask/1", "of one that asked and was killed")
    with pytest.raises(TrainingStopped, match=words):
        meet(store, ranks, timeout=0.3)
