"""Validation loss is the mean over tokens, whatever the batches and processes."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from pretrain.evaluation.validation import validation_loss

CPU = torch.device("cpu")


class FirstTarget(nn.Module):
    """A loss that can be computed by hand: the mean of the target ids; it remembers how it was called."""

    def __init__(self):
        super().__init__()
        self.modes = []

    def forward(self, inputs_BT, targets_BT):
        self.modes.append((self.training, torch.is_grad_enabled()))
        return targets_BT.float().mean()


def batch(*rows):
    ids = torch.tensor(rows)
    return ids, ids


UNEVEN = [batch([1, 2], [3, 4], [5, 6]), batch([9, 10])]


def score(module=None, batches=UNEVEN, bytes_per_token=None, reduce_sum=lambda tensor: tensor, **more):
    accelerator = SimpleNamespace(reduce=lambda tensor, how: reduce_sum(tensor))
    more |= {"bytes_per_token": bytes_per_token, "accelerator": accelerator}
    return validation_loss(module or FirstTarget(), batches, device=CPU, **more)


def test_loss_is_weighted_by_tokens_not_by_batches():
    assert score() == {"loss": pytest.approx((1 + 2 + 3 + 4 + 5 + 6 + 9 + 10) / 8)}


def test_bytes_are_counted_of_targets_not_of_inputs():
    pair = [(torch.tensor([[0, 1]]), torch.tensor([[1, 2]]))]
    got = score(batches=pair, bytes_per_token=np.array([1000, 1, 2]))
    assert got["bits_per_byte"] == pytest.approx(3 / math.log(2) / 3)


class OnACard(torch.Tensor):
    """Targets as a card's: NumPy may not read them, and reading a value makes the host wait."""

    def numpy(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def item(self):
        raise AssertionError("the host waits for the card")


def test_targets_may_live_on_a_card_and_the_host_waits_for_none_of_them():
    there = [tuple(ids.as_subclass(OnACard) for ids in pair) for pair in UNEVEN]
    table = np.arange(11, dtype=np.int64) % 4
    assert score(batches=there, bytes_per_token=table) == score(bytes_per_token=table)


def test_processes_sum_nats_tokens_and_bytes_before_dividing():
    sums = []
    score(batches=UNEVEN[:1], bytes_per_token=np.ones(11, dtype=np.int64), reduce_sum=lambda t: sums.append(t) or t)
    both = score(
        batches=UNEVEN[1:], bytes_per_token=np.ones(11, dtype=np.int64), reduce_sum=lambda tensor: tensor + sums[0]
    )
    assert sums[0].dtype == torch.float64
    others = torch.tensor([12.0, 4.0, 0.0, 0.0], dtype=torch.float64)
    assert score(batches=[], reduce_sum=lambda tensor: tensor + others) == {"loss": 3.0}  # this one has no batch
    assert both == {"loss": pytest.approx(5.0), "bits_per_byte": pytest.approx(5.0 / math.log(2))}


def test_stop_here_or_of_another_process_abandons_the_evaluation_and_dropout_is_off_only_in_it():
    module, asked = FirstTarget().train(), []
    assert score(module, stop=lambda: len(asked.append(1) or asked) > 1) is None
    assert module.modes == [(False, False)] and module.training  # without dropout and gradients
    score(module.eval())
    assert not module.training
    stopped = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    assert score(reduce_sum=lambda tensor: tensor + stopped) is None
