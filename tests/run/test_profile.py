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


def test_a_profile_counts_every_operation_once_and_names_its_kind(tmp_path, caplog):
    weight = torch.zeros(64, 64)
    profile = profiling.Profile(tmp_path, torch.device("cpu"))
    for _ in range(profiling.SKIPPED + profiling.WARM_UP + profiling.RECORDED):
        weight.add_(weight @ weight)
        profile.step()
    profile.close()
    head, *kinds = (tmp_path / "table.txt").read_text().split("\n\n")[0].splitlines()[: len(profiling.KINDS) + 2]
    took = {line[:20].strip(): float(line[20:].split()[0]) for line in kinds}
    assert took["matrix products"] > 0 and abs(sum(took.values()) - float(head[20:].split()[0])) < 0.1
    assert len(caplog.messages) == 1 and str(tmp_path) in caplog.text


def test_matrix_products_of_an_optimizer_are_the_optimizers(tmp_path):
    weight = torch.nn.Parameter(torch.eye(64))
    optimizer = torch.optim.Muon([weight])
    profile = profiling.Profile(tmp_path, torch.device("cpu"))
    for _ in range(profiling.SKIPPED + profiling.WARM_UP + profiling.RECORDED):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        profile.step()
    profile.close()
    table = (tmp_path / "table.txt").read_text()
    took = {line[:20].strip(): float(line[20:].split()[0]) for line in table.splitlines()[1 : len(profiling.KINDS) + 2]}
    assert took["matrix products"] == 0 < took["optimizer"]


def test_without_a_folder_nothing_is_recorded_or_logged(caplog):
    profile = profiling.Profile(None, torch.device("cpu"))
    profile.step()
    profile.close()
    assert not caplog.messages
