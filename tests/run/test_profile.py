"""A profile of a run too short for one; tests/scripts/test_train.py and tests/card have whole ones."""

import torch

from pretrain.run import profile as profiling
from pretrain.run.clock import Clock


def test_a_run_too_short_for_a_profile_logs_so(tmp_path, caplog):
    profile = profiling.Profile(tmp_path, torch.device("cpu"), Clock(1, None))
    profile.step()
    profile.close()
    (line,) = caplog.messages
    assert "no profile" in line and "--max_steps" in line
