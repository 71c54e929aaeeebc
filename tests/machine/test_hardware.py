"""What the machine is said to be, and what it is refused."""

import dataclasses
import os
import types
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from pretrain.base.errors import BadInput
from pretrain.machine import hardware

CPU = hardware.Device("cpu", "CPU (x), 2 threads", 2**34)
T4 = hardware.Device("cuda", "Tesla T4", 15 * 2**30, (7, 5), 1, True)
P4000 = hardware.Device("cuda", "Quadro P4000", 8 * 2**30, (6, 1), 1, True)
A6000 = hardware.Device("cuda", "NVIDIA RTX A6000", 48 * 2**30, (8, 6), 2, True)
FAKE = types.SimpleNamespace(is_fsdp2=False, num_processes=1, wait_for_everyone=lambda: None)  # an Accelerator
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "bf16"}


@pytest.fixture(autouse=True)
def not_launched(monkeypatch):
    for name in ("MIXED_PRECISION", "USE_CPU", "GRADIENT_ACCUMULATION_STEPS", "DYNAMO_BACKEND", "DYNAMO_MODE"):
        monkeypatch.delenv(f"ACCELERATE_{name}", raising=False)


def faults(device, tf32="auto", compile_mode="default", **environment):
    """What is wrong with a launch on that device, one line each."""
    try:
        hardware.refuse_impossible(device, environment, tf32, compile_mode)
    except BadInput as error:
        return error.lines
    return []


def test_cpu_has_no_counted_memory_and_no_gauges():
    assert hardware.peak_memory_bytes(torch.device("cpu")) is None
    assert hardware.gauges(torch.device("cpu")) == {}


@pytest.mark.parametrize("device, precision", [(CPU, "no"), (T4, "fp16"), (P4000, "fp16"), (A6000, "bf16")])
def test_the_best_precision_is_what_the_device_has(device, precision):
    assert device.precision == precision


@pytest.mark.parametrize("device, compiles", [(CPU, False), (T4, True), (P4000, False), (A6000, True)])
def test_without_a_yaml_the_compiler_is_taken_where_it_works(device, compiles):
    assert device.compiles == compiles
    assert not dataclasses.replace(device, compiler=False).compiles


def test_tf32_comes_with_ampere():
    assert [device.has_tf32 for device in (CPU, T4, A6000)] == [False, False, True]
    assert not faults(A6000, True) and not faults(T4, False) and not faults(T4)
    assert "tf32 = true: Tesla T4 has no TF32" in faults(T4, True)[0] and "--tf32 auto" in faults(T4, True)[0]


def test_a_pretended_ampere_card_gets_tf32_after_accelerate_had_its_say(monkeypatch):
    seen = []
    monkeypatch.setattr(hardware, "Accelerator", lambda **how: seen.append(how) or FAKE)
    monkeypatch.setattr(hardware.os, "environ", dict(os.environ))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: seen.append(precision))
    for device, tf32 in ((A6000, "auto"), (A6000, False), (T4, "auto"), (CPU, "auto")):
        hardware.make_accelerator(device, tf32=tf32)
    assert seen[1::2] == ["high", "highest", "highest", "highest"]
    assert [how["mixed_precision"] for how in seen[0::2]] == ["bf16", "bf16", "fp16", "no"]
    assert [how["dynamo_plugin"].backend.value for how in seen[0::2]] == ["INDUCTOR"] * 3 + ["NO"]


YAML = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}


@pytest.mark.parametrize(
    "device, launched, compile_mode, given",
    [
        (A6000, {}, "default", "default"),
        (A6000, {}, "reduce-overhead", "reduce-overhead"),
        (A6000, YAML, "max-autotune", "max-autotune"),
        (A6000, YAML | {"ACCELERATE_DYNAMO_MODE": "max-autotune"}, "default", "max-autotune"),
        (A6000, YAML | {"ACCELERATE_DYNAMO_MODE": "max-autotune"}, "reduce-overhead", "reduce-overhead"),
        (CPU, YAML | {"ACCELERATE_USE_CPU": "true"}, "max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
    ],
)
def test_the_compile_mode_is_the_one_asked_for_else_the_yamls(monkeypatch, device, launched, compile_mode, given):
    seen = {}
    monkeypatch.setattr(hardware, "Accelerator", lambda **how: seen.update(how) or FAKE)
    monkeypatch.setattr(hardware.os, "environ", dict(os.environ) | launched)
    hardware.make_accelerator(device, compile_mode=compile_mode)
    plugin = seen["dynamo_plugin"]
    assert (plugin.backend.value, plugin.mode) == ("INDUCTOR", given)


def test_the_compile_mode_arrives_in_torch_compile(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda module, **how: asked.append(how) or module)
    for name, value in (YAML | {"ACCELERATE_USE_CPU": "true"}).items():
        monkeypatch.setenv(name, value)
    for compile_mode in ("default", "max-autotune-no-cudagraphs"):
        AcceleratorState._reset_state(reset_partial_state=True)
        hardware.make_accelerator(CPU, compile_mode=compile_mode).prepare(torch.nn.Linear(2, 2))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert asked == [{"backend": "inductor"}, {"backend": "inductor", "mode": "max-autotune-no-cudagraphs"}]


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


def test_compile_modes_that_can_be_had_are_not_refused():
    for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        assert not faults(A6000, compile_mode=mode) and not faults(A6000, compile_mode=mode, **YAML)
        assert mode == "reduce-overhead" or not faults(CPU, compile_mode=mode, **YAML)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_that_grow_are_asked_for_before_the_card_is_touched_unless_the_user_has_chosen(monkeypatch, name):
    seen = []

    def touch(index):  # the first call that starts the allocator, which reads its settings then
        seen.append({key: value for key, value in hardware.os.environ.items() if "ALLOC_CONF" in key})
        return types.SimpleNamespace(name="NVIDIA RTX A6000", total_memory=48 * 2**30)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", touch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 6))
    for before in ({}, {name: "max_split_size_mb:128"}):
        monkeypatch.setattr(hardware.os, "environ", dict(before))
        hardware.this_device()
    assert seen == [{"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, {name: "max_split_size_mb:128"}]


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
        (A6000, LAUNCHED | {"LOCAL_WORLD_SIZE": "4"}, "sees 2 card(s); write num_processes: 2"),
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


def test_all_faults_are_said_at_once_and_stop_the_accelerator(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(BadInput) as caught:
        hardware.make_accelerator(T4, tf32=True)
    assert len(caught.value.lines) == 3


def test_processes_that_do_not_know_each_other_are_refused(monkeypatch):
    monkeypatch.setattr(hardware, "Accelerator", lambda **how: FAKE)
    monkeypatch.setattr(hardware.os, "environ", {"WORLD_SIZE": "2"})
    with pytest.raises(BadInput, match="WORLD_SIZE = 2, but Accelerate makes it 1"):
        hardware.make_accelerator(CPU)
    assert hardware.os.environ["ACCELERATE_USE_CPU"] == "true"  # so that the real one does know


def test_this_machine_is_what_accelerate_would_take(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    card = types.SimpleNamespace(name="NVIDIA RTX A6000", total_memory=48 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(8, 6), (7, 5)][index])
    found = hardware.this_device()
    # The least capable card decides, or two processes would compute in two precisions.
    assert (found.kind, found.name, found.capability, found.count) == ("cuda", "NVIDIA RTX A6000", (7, 5), 2)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert hardware.this_device().kind == "cpu" and hardware.this_device().memory_bytes > 2**30


def test_gauges_read_memory_use_and_watts_and_do_without_nvml(monkeypatch):
    card = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 830)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 97)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 287_500)
    monkeypatch.setattr(hardware.time, "monotonic", lambda: 5.0)
    assert hardware.gauges(card) == {"gpu/memory": 0.83, "gpu/utilization": 0.97, "gpu/watts": 287.5}

    def missing(device):
        raise ModuleNotFoundError("nvidia-ml-py")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    monkeypatch.setattr(hardware.time, "monotonic", lambda: 6.0)
    assert hardware.gauges(card) == {"gpu/memory": 0.83}


def test_nvml_is_asked_once_a_second_however_short_an_update(monkeypatch):
    card, asked = torch.device("cuda:0"), []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 830)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: asked.append(device) or 97)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 287_500)
    for now in (10.0, 10.1, 10.9, 11.0, 11.5):
        monkeypatch.setattr(hardware.time, "monotonic", lambda now=now: now)
        assert hardware.gauges(card)["gpu/utilization"] == 0.97
    assert len(asked) == 2


@pytest.mark.parametrize(
    "memory, micro_batch, waiting, said",
    [
        (0.85, 8, 0.0, None),
        (
            0.5,
            8,
            0.0,
            "only 50% of the card's memory is in use: a larger --per_device_train_batch_size than 8 would fit",
        ),
        (0.5, 32, 0.0, None),  # the whole share of a step
        (0.22, 16, 0.0, None),  # a large card at its own preset: 16,384 tokens fill it
        (0.97, 8, 0.0, "--per_device_train_batch_size 4 goes on"),
        (0.97, 1, 0.0, "--per_device_train_batch_size 1"),
        (0.5, 8, 0.2, "waits for data 20% of the time"),
        (None, 8, 0.0, None),  # a CPU
    ],
)
def test_a_hint_is_given_where_something_is_to_be_had(memory, micro_batch, waiting, said):
    read = {} if memory is None else {"gpu/memory": memory}
    told = hardware.hint(read, micro_batch=micro_batch, most=32, tokens=1024 * micro_batch, waiting=waiting)
    assert (told is None) == (said is None) and (said or "") in (told or "")
    idle = hardware.hint(read | {"gpu/utilization": 0.4}, micro_batch=micro_batch, most=32, tokens=8192, waiting=0.0)
    assert "busy only 40% of the time" in idle


def test_cpu_is_named_with_its_threads():
    name = hardware.device_name(torch.device("cpu"))
    assert name.startswith("CPU (") and name.endswith(f"{torch.get_num_threads()} threads")
    assert hardware.processor_name() in name and hardware.processor_name()


def network_mount(tmp_path, path, *mounts):
    """The answer where these are mounted: (place, kind)."""
    table = tmp_path / "mounts"
    table.write_text("".join(f"from {place} {kind} rw,relatime 0 0\n" for place, kind in mounts))
    return hardware.network_mount(Path(path), table)


@pytest.mark.parametrize(
    "path, kind",
    [
        ("/home/data", None),
        ("/srv/data/x", "nfs4"),
        ("/srv", "nfs4"),
        ("/srv2/data", None),  # begins alike
        ("/srv/fast/data", None),  # a local disk under a network one
        ("/srv/fast/far/data", "fuse.sshfs"),  # and the other way round
        ("/srv/fast/farther", None),
        ("/my disk/data", "cifs"),
        ("/my", None),
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_the_innermost_mount_decides_whether_a_folder_lies_on_the_network(tmp_path, path, kind, backwards):
    mounts = [("/", "overlay"), ("/srv", "nfs4"), ("/srv/fast", "ext4"), ("/srv/fast/far", "fuse.sshfs")]
    mounts += [(r"/my\040disk", "cifs"), ("/proc", "proc")]
    assert network_mount(tmp_path, path, *(mounts[::-1] if backwards else mounts)) == kind


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "9p", "fuse.s3fs"])
def test_network_file_systems_are_known(tmp_path, kind):
    assert network_mount(tmp_path, "/data", ("/", "ext4"), ("/data", kind)) == kind


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "nfsd", "fuseblk", "fuse.lxcfs"])
def test_local_file_systems_are_no_network(tmp_path, kind):
    assert network_mount(tmp_path, "/data", ("/", "nfs"), ("/data", kind)) is None


def test_a_link_lies_where_it_leads_to(tmp_path, monkeypatch):
    for name in ("here", "far"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "far")
    mounts = [("/", "ext4"), (tmp_path / "far", "nfs")]
    assert network_mount(tmp_path, tmp_path / "here" / "link" / "data", *mounts) == "nfs"
    monkeypatch.chdir(tmp_path)
    assert network_mount(tmp_path, "far/data", *mounts) == "nfs" and network_mount(tmp_path, "here", *mounts) is None


def test_a_machine_without_a_table_of_mounts_or_with_an_odd_one_is_not_known(tmp_path):
    assert hardware.network_mount(tmp_path, tmp_path / "none") is None
    (tmp_path / "odd").write_bytes(b"\nx\nfrom /\nfrom \xff nfs rw 0 0\n")
    assert hardware.network_mount(tmp_path, tmp_path / "odd") is None


def test_deterministic_asks_torch_cublas_and_the_compiler_for_kernels_that_repeat_themselves(monkeypatch):
    monkeypatch.setattr(hardware, "Accelerator", lambda **how: FAKE)
    monkeypatch.setattr(hardware.os, "environ", environment := {})
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch._inductor.config, "deterministic", False)
    try:
        hardware.make_accelerator(A6000)
        assert not torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in environment
        hardware.make_accelerator(A6000, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled() and environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch._inductor.config.deterministic and not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
