"""Profiles: what is told belongs to this run."""

import torch

from pretrain.run import profile as profiling


def test_a_run_too_short_for_a_profile_logs_so_beside_an_earlier_one(tmp_path, caplog):
    (tmp_path / "table.txt").write_text("of the attempt before")
    profile = profiling.Profile(tmp_path, torch.device("cpu"))
    profile.step()
    profile.close()
    (line,) = caplog.messages
    assert "no profile" in line and "--max_steps" in line


def test_a_profile_counts_each_operation_once_by_its_kind_and_an_optimizers_products_are_its_own(tmp_path, caplog):
    weight, other = torch.nn.Parameter(torch.eye(64)), torch.eye(64)
    optimizer = torch.optim.Muon([weight])
    took = []
    for products in (True, False):
        profile = profiling.Profile(tmp_path / str(products), torch.device("cpu"))
        for _ in range(profiling.SKIPPED + profiling.WARM_UP + profiling.RECORDED):
            weight.grad = other @ other if products else torch.ones_like(weight)
            optimizer.step()
            profile.step()
        profile.close()
        table = (tmp_path / str(products) / "table.txt").read_text().split("\n\n")[0].splitlines()
        head, *kinds = table[: len(profiling.KINDS) + 2]
        took.append({line[:20].strip(): float(line[20:].split()[0]) for line in kinds})
        assert abs(sum(took[-1].values()) - float(head[20:].split()[0])) < 0.1
    assert took[0]["matrix products"] > 0 == took[1]["matrix products"] and took[1]["optimizer"] > 0
    assert len(caplog.messages) == 2 and str(tmp_path) in caplog.text
