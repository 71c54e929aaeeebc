"""The profile of a few updates."""

import gzip
import json

import torch

from ursa_minor.recipe.command_line import PROFILE_UPDATES
from ursa_minor.reporting import profiler
from ursa_minor.reporting.clock import Clock


def profile_updates(folder, updates: int, *, updates_left: int = PROFILE_UPDATES) -> None:
    """Profile updates that multiply two matrices.

    Args:
        folder: the folder of the profile.
        updates: the number of updates that are made.
        updates_left: the number of updates that are announced.
    """
    device = torch.device("cpu")
    clock = Clock(1, None)
    with profiler.profiling(folder, device, clock, updates_left=updates_left) as step:
        for _ in range(updates):
            torch.eye(64) @ torch.eye(64)
            step()


def test_too_few_updates_are_reported_first(tmp_path, caplog):
    folder = tmp_path / "profile"
    clock = Clock(1, None)

    with profiler.profiling(folder, torch.device("cpu"), clock, updates_left=12) as step:
        messages_before_update = list(caplog.messages)
        step()

    (message,) = messages_before_update
    assert "no profile" in message
    assert "needs 13 updates" in message
    assert "12 updates are left" in message
    assert caplog.messages == messages_before_update
    assert not folder.exists()


def test_early_end_is_reported(tmp_path, caplog):
    profile_updates(tmp_path, 1, updates_left=13)

    (message,) = caplog.messages
    assert "no profile" in message
    assert "ended after 1 update" in message


def test_profile_has_table_and_trace(tmp_path, caplog):
    profile_updates(tmp_path, PROFILE_UPDATES)

    assert caplog.messages[0].startswith("profile of 3 updates")
    assert "aten::mm" in (tmp_path / "table.txt").read_text()
    with gzip.open(tmp_path / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert any("aten::" in event.get("name", "") for event in events)
