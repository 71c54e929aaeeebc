"""A profile of a few updates."""

import gzip
import json

import torch

from ursa_minor.recipe.command_line import PROFILE_UPDATES
from ursa_minor.reporting import profiler
from ursa_minor.reporting.clock import Clock


def profiled(folder, updates, *, updates_left=PROFILE_UPDATES):
    with profiler.profiling(
        folder, torch.device("cpu"), Clock(1, None), updates_left=updates_left
    ) as step:
        for _ in range(updates):
            torch.eye(64) @ torch.eye(64)
            step()


def test_too_few_updates_for_a_profile_are_reported_first(tmp_path, caplog):
    with profiler.profiling(
        tmp_path / "p", torch.device("cpu"), Clock(1, None), updates_left=12
    ) as step:
        assert caplog.messages == ["no profile: it needs 13 updates, and 12 updates are left"]
        step()
    assert not (tmp_path / "p").exists() and len(caplog.messages) == 1
    profiled(tmp_path, 1, updates_left=13)  # early stopping, a signal
    assert caplog.messages[1:] == [
        "no profile: it needs 13 updates, and the run ended after 1 update"
    ]


def test_a_profile_says_where_the_time_went(tmp_path, caplog):
    profiled(tmp_path, PROFILE_UPDATES)
    assert caplog.messages[0].startswith("profile of 3 updates")
    assert "aten::mm" in (tmp_path / "table.txt").read_text()
    with gzip.open(tmp_path / "trace.json.gz") as file:
        assert any("aten::" in event.get("name", "") for event in json.load(file)["traceEvents"])
