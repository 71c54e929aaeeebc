"""Profiles: what is told belongs to this run."""

import types

import pytest
import torch
from torch.autograd import DeviceType

from pretrain.run import profile as profiling
from pretrain.run.clock import Clock


def test_a_run_too_short_for_a_profile_logs_so_beside_an_earlier_one(tmp_path, caplog):
    (tmp_path / "table.txt").write_text("of the attempt before")
    profile = profiling.Profile(tmp_path, torch.device("cpu"), Clock(1, None))
    profile.step()
    profile.close()
    (line,) = caplog.messages
    assert "no profile" in line and "--max_steps" in line


def test_a_profile_counts_each_operation_once_by_its_kind_and_an_optimizers_products_are_its_own(tmp_path, caplog):
    weight, other = torch.nn.Parameter(torch.eye(64)), torch.eye(64)
    optimizer = torch.optim.Muon([weight])
    took = []
    for products in (True, False):
        profile = profiling.Profile(tmp_path / str(products), torch.device("cpu"), Clock(1, None))
        for _ in range(profiling.SKIPPED + profiling.WARM_UP + profiling.RECORDED):
            weight.grad = other @ other if products else torch.ones_like(weight)
            optimizer.step()
            profile.step()
        profile.close()
        table = (tmp_path / str(products) / "table.txt").read_text().split("\n\n")[0].splitlines()
        head, *kinds = table[: len(profiling.KINDS) + 2]
        took.append({line[:22].strip(): float(line[22:].split()[0]) for line in kinds})
        assert abs(sum(took[-1].values()) - float(head[22:].split()[0])) < 0.1
    assert took[0]["matrix products"] > 0 == took[1]["matrix products"] and took[1]["optimizer"] > 0
    assert len(caplog.messages) == 2 and str(tmp_path) in caplog.text


@pytest.mark.parametrize(
    "name, kind",
    [
        ("aten::addmm", "matrix products"),
        ("aten::_cudnn_attention_backward", "attention"),
        ("triton_red_fused__to_copy_add_arange_eq_exp_logsumexp_mul_split_sub_unsqueeze_view_35", "loss"),
        ("triton_red_fused_gelu_gelu_backward_sum_view_5", "norms, activations"),
        ("Command Buffer Full", None),  # an H100's profiler gave these kernels to their operation as well
    ],
)
def test_what_an_h100_ran_is_counted_once_under_the_kind_that_it_computed(name, kind):
    event = types.SimpleNamespace(name=name, cpu_parent=None, device_type=DeviceType.CPU, self_device_time_total=3e3)
    rows = [line.split() for line in profiling._by_kind([event], "self_device_time_total").splitlines()[1:]]
    counted = [" ".join(row[:-3]) for row in rows if float(row[-3]) > 0]
    assert counted == ([kind] if kind else [])
