"""A profile of a few updates."""

import gzip
import json

import torch

from pretrain.run import profile
from pretrain.run.clock import Clock


def test_a_profile_says_where_the_time_went_and_a_run_too_short_for_one_logs_so(tmp_path, caplog):
    for steps in (1, profile.SKIPPED + profile.WARM_UP + profile.RECORDED):
        with profile.profiling(tmp_path, torch.device("cpu"), Clock(1, None)) as step:
            for _ in range(steps):
                torch.eye(64) @ torch.eye(64)
                step()
    none, some = caplog.messages
    assert "no profile" in none and "--max_steps" in none and some.startswith("profile of 3 updates")
    assert "aten::mm" in (tmp_path / "table.txt").read_text()
    with gzip.open(tmp_path / "trace.json.gz") as file:
        assert any("aten::" in event.get("name", "") for event in json.load(file)["traceEvents"])
