"""Validation loss is the mean over tokens, whatever the batches and processes."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from ursa_minor.evaluation.validation import validation_loss

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


def score(
    module=None, batches=UNEVEN, bytes_per_token=None, reduce_sum=lambda tensor: tensor, **more
):
    accelerator = SimpleNamespace(reduce=lambda tensor, how: reduce_sum(tensor))
    more |= {"bytes_per_token": bytes_per_token, "accelerator": accelerator}
    return validation_loss(module or FirstTarget(), batches, device=CPU, **more)


def test_loss_is_weighted_by_tokens_not_by_batches():
    assert score() == {"loss": pytest.approx((1 + 2 + 3 + 4 + 5 + 6 + 9 + 10) / 8)}


def test_bytes_are_counted_of_targets_not_of_inputs():
    pair = [(torch.tensor([[0, 1]]), torch.tensor([[1, 2]]))]
    got = score(batches=pair, bytes_per_token=np.array([1000, 1, 2]))
    assert got["bits_per_byte"] == pytest.approx(3 / math.log(2) / 3)


def test_processes_sum_nats_tokens_and_bytes_before_dividing():
    sums, one_each = [], np.ones(11, dtype=np.int64)
    score(
        batches=UNEVEN[:1],
        bytes_per_token=one_each,
        reduce_sum=lambda part: sums.append(part) or part,
    )
    both = score(
        batches=UNEVEN[1:], bytes_per_token=one_each, reduce_sum=lambda part: part + sums[0]
    )
    assert both == {"loss": pytest.approx(5.0), "bits_per_byte": pytest.approx(5.0 / math.log(2))}
    assert score(batches=[], reduce_sum=lambda part: part + sums[0])["loss"] == pytest.approx(
        3.5
    )  # none of its own


def test_stop_here_or_of_another_process_abandons_the_evaluation_and_dropout_is_off_only_in_it():
    module, asked = FirstTarget().train(), []
    assert score(module, stop=lambda: len(asked.append(1) or asked) > 1) is None
    assert module.modes == [(False, False)] and module.training  # without dropout and gradients
    score(module.eval())
    assert not module.training
    stopped = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    assert score(reduce_sum=lambda tensor: tensor + stopped) is None
