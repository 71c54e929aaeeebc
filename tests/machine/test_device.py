"""What the machine is, has and can do."""

import dataclasses
import types

import torch

from ursa_minor.machine import device as hardware

CPU = hardware.Device("cpu", "CPU (x), 2 threads", 2**34)
T4 = hardware.Device("cuda", "Tesla T4", 15 * 2**30, (7, 5), 1, True)
P4000 = hardware.Device("cuda", "Quadro P4000", 8 * 2**30, (6, 1), 1, True)
A6000 = hardware.Device("cuda", "NVIDIA RTX A6000", 48 * 2**30, (8, 6), 2, True)


def test_precision_and_compiler_without_a_yaml_are_what_the_device_has():
    assert [device.precision for device in (CPU, T4, P4000, A6000)] == [
        "no",
        "fp16",
        "fp16",
        "bf16",
    ]
    assert [device.compiles for device in (CPU, T4, P4000, A6000)] == [False, True, False, True]
    assert not dataclasses.replace(A6000, has_triton=False).compiles


def test_the_least_capable_of_a_machines_cards_decides_or_processes_would_compute_in_two_precisions(
    monkeypatch,
):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # else it is set for the tests that follow
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    card = types.SimpleNamespace(name="NVIDIA RTX A6000", total_memory=48 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(8, 6), (7, 5)][index])
    found = hardware.this_device()
    assert (found.kind, found.name, found.capability, found.count) == (
        "cuda",
        "NVIDIA RTX A6000",
        (7, 5),
        2,
    )
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert hardware.this_device().kind == "cpu"


def test_gauges_ask_nvml_once_a_second_and_do_without_it(monkeypatch):
    card, answers = torch.device("cuda:0"), iter([97, 98])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=1000)
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 830)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(answers))
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 287_500)
    for now, busy in ((10.0, 0.97), (10.9, 0.97), (11.0, 0.98), (11.5, 0.98)):
        monkeypatch.setattr(hardware.time, "monotonic", lambda now=now: now)
        assert hardware.gpu_metrics(card) == {
            "gpu/memory": 0.83,
            "gpu/utilization": busy,
            "gpu/watts": 287.5,
        }
    monkeypatch.setattr(
        hardware.time, "monotonic", lambda: 13.0
    )  # of which nothing is known: an error
    assert (
        hardware.gpu_metrics(card) == {"gpu/memory": 0.83}
        and hardware.gpu_metrics(torch.device("cpu")) == {}
    )


def test_a_hint_is_given_where_something_is_to_be_had():
    assert "waits for data 20% of the time" in hardware.bottleneck_advice({}, 0.2)
    assert "busy only 40% of the time" in hardware.bottleneck_advice({"gpu/utilization": 0.4}, 0.0)
    assert (
        hardware.bottleneck_advice({"gpu/utilization": 0.9}, 0.0)
        is hardware.bottleneck_advice({}, 0.0)
        is None
    )  # {}: a CPU


def test_cpu_is_named_with_its_threads():
    name = hardware.device_name(torch.device("cpu"))
    count = torch.get_num_threads()
    assert name.startswith("CPU (") and name.endswith(
        f"), {count} thread{'s' if count > 1 else ''}"
    )
    assert hardware.processor_name() in name and hardware.processor_name()


def test_file_cache_counts_as_available_memory(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemFree:   100 kB\nMemAvailable:    8000 kB\n")
    monkeypatch.setattr(hardware, "MEMINFO", meminfo)

    assert hardware.free_memory_bytes(torch.device("cpu"), num_processes=4) == 2000 * 1024
