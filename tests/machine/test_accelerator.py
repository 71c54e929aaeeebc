"""The Accelerator: what a launch is refused, and how it is made."""

import dataclasses
import os
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pretrain.base.errors import BadInput, TrainingStopped
from pretrain.machine import accelerator, hardware
from pretrain.machine.accelerator import make_accelerator
from pretrain.recipe import keys

CPU = hardware.Device("cpu", "CPU (x), 2 threads", 2**34)
T4 = hardware.Device("cuda", "Tesla T4", 15 * 2**30, (7, 5), 1, True)
P4000 = hardware.Device("cuda", "Quadro P4000", 8 * 2**30, (6, 1), 1, True)
A6000 = hardware.Device("cuda", "NVIDIA RTX A6000", 48 * 2**30, (8, 6), 2, True)
FAKE = types.SimpleNamespace(is_fsdp2=False, num_processes=1, wait_for_everyone=lambda: None)  # an Accelerator
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "bf16"}
YAML = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}


@pytest.fixture(autouse=True)
def precision_of_products():
    """An accelerator for a card sets it for the whole process; other tests of this worker have their own."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(autouse=True)
def not_launched(monkeypatch):
    for name in ("MIXED_PRECISION", "USE_CPU", "GRADIENT_ACCUMULATION_STEPS", "DYNAMO_BACKEND", "DYNAMO_MODE"):
        monkeypatch.delenv(f"ACCELERATE_{name}", raising=False)


def faults(device, tf32="auto", compile_mode="default", **environment):
    """What is wrong with a launch on that device, one line each."""
    try:
        accelerator.refuse_impossible(device, environment, tf32, compile_mode)
    except BadInput as error:
        return error.lines
    return []


@pytest.mark.parametrize(
    "device, launched, compile_mode, given",
    [
        (A6000, {}, "reduce-overhead", "reduce-overhead"),
        (A6000, YAML | {"ACCELERATE_DYNAMO_MODE": "max-autotune"}, "default", "max-autotune"),
        (A6000, YAML | {"ACCELERATE_DYNAMO_MODE": "max-autotune"}, "reduce-overhead", "reduce-overhead"),
    ],
)
def test_the_compile_mode_is_the_one_asked_for_else_the_yamls(monkeypatch, device, launched, compile_mode, given):
    seen = {}
    monkeypatch.setattr(accelerator, "Accelerator", lambda **how: seen.update(how) or FAKE)
    monkeypatch.setattr(os, "environ", dict(os.environ) | launched)
    make_accelerator(device, keys.Machine(compile_mode=compile_mode))
    plugin = seen["dynamo_plugin"]
    assert (plugin.backend.value, plugin.mode) == ("INDUCTOR", given)


@pytest.mark.parametrize(
    "device, environment, compile_mode, said",
    [
        (CPU, {}, "max-autotune", "nothing is compiled here (dynamo_backend: NO); write dynamo_backend: INDUCTOR"),
        (A6000, LAUNCHED, "reduce-overhead", "in the accelerate YAML, or use --compile_mode default"),
        (A6000, YAML | {"ACCELERATE_DYNAMO_BACKEND": "EAGER"}, "max-autotune", "(dynamo_backend: EAGER)"),
        (P4000, {}, "max-autotune", "(dynamo_backend: NO); use --compile_mode default"),
        (CPU, YAML, "reduce-overhead", "no NVIDIA card here; use --compile_mode default, or max-autotune-no-cuda"),
    ],
)
def test_a_compile_mode_that_would_do_nothing_is_refused_with_the_remedy(device, environment, compile_mode, said):
    (line,) = faults(device, compile_mode=compile_mode, **environment)
    assert line.startswith(f"compile_mode = {compile_mode}: ") and said in line
    assert not faults(device, **environment)
    for mode in ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        assert not faults(A6000, compile_mode=mode) and not faults(A6000, compile_mode=mode, **YAML)
        assert mode == "reduce-overhead" or not faults(CPU, compile_mode=mode, **YAML)


def test_a_cards_yaml_without_a_card_is_refused_with_the_yaml_to_take():
    for precision in ("bf16", "fp16"):
        (line,) = faults(CPU, ACCELERATE_MIXED_PRECISION=precision)
        assert f"mixed_precision: {precision}" in line and "PyTorch sees none" in line and "cpu.yaml" in line
    assert not faults(CPU, ACCELERATE_MIXED_PRECISION="bf16", ACCELERATE_USE_CPU="true")  # slow, and asked for
    assert not faults(CPU, ACCELERATE_MIXED_PRECISION="no")
    (line,) = faults(CPU, ACCELERATE_MIXED_PRECISION="fp16", ACCELERATE_USE_CPU="true")
    assert 'fp16 needs a GPU; write mixed_precision: "no"' in line


@pytest.mark.parametrize(
    "device, environment, said",
    [
        (T4, LAUNCHED, "Tesla T4 has no bf16; write mixed_precision: fp16"),
        (A6000, {"ACCELERATE_MIXED_PRECISION": "fp8"}, "(docs/knobs.md says why); write mixed_precision: bf16"),
        (P4000, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "too old for its compiler"),
        (dataclasses.replace(A6000, compiler=False), {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "pip install triton"),
        (A6000, LAUNCHED | {"LOCAL_WORLD_SIZE": "4"}, "sees 2 cards; write num_processes: 2"),
        (A6000, {"ACCELERATE_USE_DEEPSPEED": "true"}, "zero1_x8.yaml"),
        (A6000, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "write fsdp_version: 2"),
        (CPU, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "needs NVIDIA cards. Without a GPU: --config_file"),
        (T4, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "fp16 under FSDP"),
        (A6000, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "gradient_accumulation_steps is derived here"),
        (CPU, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto"}, "gradient_accumulation_steps is derived here"),
    ],
)
def test_what_a_machine_cannot_do_is_refused_with_the_remedy(device, environment, said):
    (line,) = faults(device, **environment)
    assert said in line
    assert not faults(A6000, **LAUNCHED, ACCELERATE_DYNAMO_BACKEND="INDUCTOR", LOCAL_WORLD_SIZE="2")


def test_a_version_of_accelerate_that_cannot_shard_tied_embeddings_is_refused_where_a_run_is_sharded(monkeypatch):
    sharded = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert not faults(A6000, **sharded)
    monkeypatch.setattr(accelerator.accelerate, "__version__", "1.14.0")
    (line,) = faults(A6000, **sharded)
    assert "accelerate 1.14.0" in line and "accelerate#4171" in line and "pip install -r requirements.txt" in line
    assert not faults(A6000)


def test_all_faults_are_listed_at_once_and_stop_the_accelerator(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(BadInput) as caught:
        make_accelerator(T4, keys.Machine(tf32=True))
    assert len(caught.value.lines) == 3
    assert "tf32 = true: Tesla T4 has no TF32 (Ampere and later have); use --tf32 auto" in caught.value.lines


def test_processes_that_do_not_know_each_other_are_refused(monkeypatch):
    monkeypatch.setattr(accelerator, "Accelerator", lambda **how: FAKE)
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "2"})
    with pytest.raises(BadInput, match="WORLD_SIZE = 2, but Accelerate makes it 1"):
        make_accelerator(CPU)
    assert os.environ["ACCELERATE_USE_CPU"] == "true"  # so that the real one does know


def test_deterministic_asks_torch_cublas_and_the_compiler_for_kernels_that_repeat_themselves(monkeypatch):
    monkeypatch.setattr(accelerator, "Accelerator", lambda **how: FAKE)
    monkeypatch.setattr(os, "environ", environment := {})
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch._inductor.config, "deterministic", False)
    try:
        make_accelerator(A6000)
        assert not torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in environment
        make_accelerator(A6000, keys.Machine(deterministic=True))
        assert torch.are_deterministic_algorithms_enabled() and environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch._inductor.config.deterministic and not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


def meet(store, ranks, world_size=3, timeout=20.0):
    """Start these ranks at once; return what each got."""
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: accelerator.rendezvous_name(store, rank, world_size, timeout), ranks))


def test_processes_that_are_started_anew_meet_by_a_name_that_those_before_them_did_not_have():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    names = []
    for dead in (None, 1, 2):
        if dead:
            store.set(f"ask/{dead}", "of one that asked and was killed")
        first, *others = meet(store, [0, 1, 2])
        assert others == [first, first] and first not in names
        names.append(first)


@pytest.mark.parametrize("ranks, words", [([0], r"2 processes did not come within 0.3 s"), ([1], "another process of")])
def test_a_process_that_does_not_come_is_waited_for_as_long_as_ddp_timeout(ranks, words):
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    store.set("ask/1", "of one that asked and was killed")
    with pytest.raises(TrainingStopped, match=words):
        meet(store, ranks, timeout=0.3)
