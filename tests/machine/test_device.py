"""The device of the machine: its precision, compiler, memory and metrics."""

import types

import pytest
import torch

from ursa_minor.machine import device as hardware

CPU = hardware.Device("cpu", "CPU (x), 2 threads", 2**34)
T4 = hardware.Device("cuda", "Tesla T4", 15 * 2**30, (7, 5), 1, True)
P4000 = hardware.Device("cuda", "Quadro P4000", 8 * 2**30, (6, 1), 1, True)
A6000 = hardware.Device("cuda", "NVIDIA RTX A6000", 48 * 2**30, (8, 6), 2, True)
A6000_WITHOUT_TRITON = hardware.Device("cuda", "NVIDIA RTX A6000", 48 * 2**30, (8, 6), 2, False)


@pytest.mark.parametrize(
    ("device", "precision"),
    [(CPU, "no"), (T4, "fp16"), (P4000, "fp16"), (A6000, "bf16")],
    ids=["CPU", "T4", "P4000", "A6000"],
)
def test_default_precision_depends_on_device(device, precision):
    assert device.precision == precision


@pytest.mark.parametrize(
    ("device", "compiles"),
    [(CPU, False), (T4, True), (P4000, False), (A6000, True), (A6000_WITHOUT_TRITON, False)],
    ids=["CPU", "T4", "P4000", "A6000", "without Triton"],
)
def test_default_compilation_depends_on_device(device, compiles):
    assert device.compiles == compiles


# Different GPUs in one machine


@pytest.fixture
def two_different_gpus(monkeypatch) -> None:
    """Simulate a machine whose second GPU is less capable."""
    capabilities = [(8, 6), (7, 5)]
    properties = types.SimpleNamespace(name="NVIDIA RTX A6000", total_memory=48 * 2**30)
    # this_device would set the variable for all later tests.
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])


def test_least_capable_gpu_determines_capability(two_different_gpus):
    """Otherwise the processes would compute in different precisions."""
    device = hardware.this_device()

    assert device.kind == "cuda"
    assert device.name == "NVIDIA RTX A6000"
    assert device.capability == (7, 5)
    assert device.count == 2


def test_cpu_is_used_if_requested(two_different_gpus, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    assert hardware.this_device().kind == "cpu"


# Metrics of the GPU


@pytest.fixture
def gpu_memory(monkeypatch) -> None:
    """Simulate a GPU that has used 83% of its memory."""
    properties = types.SimpleNamespace(total_memory=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 830)


def test_nvml_is_read_once_per_second(gpu_memory, monkeypatch):
    gpu = torch.device("cuda:0")
    answers = iter([97, 98])
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(answers))
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 287_500)
    expected = {10.0: 0.97, 10.9: 0.97, 11.0: 0.98, 11.5: 0.98}

    for now, utilization in expected.items():
        monkeypatch.setattr(hardware.time, "monotonic", lambda now=now: now)
        assert hardware.gpu_metrics(gpu) == {
            "gpu/memory": 0.83,
            "gpu/utilization": utilization,
            "gpu/watts": 287.5,
        }

    # The iterator has no third answer, which is an error as without NVML.
    monkeypatch.setattr(hardware.time, "monotonic", lambda: 13.0)
    assert hardware.gpu_metrics(gpu) == {"gpu/memory": 0.83}


def test_cpu_has_no_gpu_metrics():
    assert hardware.gpu_metrics(torch.device("cpu")) == {}


# Advice


def test_waiting_for_data_causes_advice():
    assert "waits for data 20% of the time" in hardware.bottleneck_advice({}, 0.2)


def test_idle_gpu_causes_advice():
    advice = hardware.bottleneck_advice({"gpu/utilization": 0.4}, 0.0)

    assert "busy only 40% of the time" in advice


@pytest.mark.parametrize("metrics", [{"gpu/utilization": 0.9}, {}], ids=["busy GPU", "CPU"])
def test_busy_device_causes_no_advice(metrics):
    assert hardware.bottleneck_advice(metrics, 0.0) is None


# The CPU


@pytest.mark.parametrize(("num_threads", "words"), [(1, "1 thread"), (2, "2 threads")])
def test_name_of_cpu_includes_its_threads(monkeypatch, num_threads, words):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)

    name = hardware.device_name(torch.device("cpu"))

    assert hardware.processor_name()
    assert name == f"CPU ({hardware.processor_name()}), {words}"


def test_file_cache_counts_as_available_memory(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemFree:   100 kB\nMemAvailable:    8000 kB\n")
    monkeypatch.setattr(hardware, "MEMINFO", meminfo)

    assert hardware.free_memory_bytes(torch.device("cpu"), num_processes=4) == 2000 * 1024
