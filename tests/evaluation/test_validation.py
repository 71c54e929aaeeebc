"""The validation loss is the mean over tokens, for any batches and number of processes."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from ursa_minor.evaluation.validation import validation_loss

CPU = torch.device("cpu")
ONE_BYTE_PER_TOKEN = np.ones(11, dtype=np.int64)


class MeanTarget(nn.Module):
    """A model whose loss is the mean of the target ids. It records the mode of each call."""

    def __init__(self):
        super().__init__()
        self.calls = []  # whether dropout is on, and whether gradients are computed

    def forward(self, inputs_BT, targets_BT):
        self.calls.append((self.training, torch.is_grad_enabled()))
        return targets_BT.float().mean()


def make_batch(*rows):
    """Return a batch whose inputs are also its targets."""
    ids = torch.tensor(rows)
    return ids, ids


BATCHES = [make_batch([1, 2], [3, 4], [5, 6]), make_batch([9, 10])]


def compute_loss(
    module=None, batches=BATCHES, *, bytes_per_token=None, reduce_sum=lambda part: part, **options
):
    """Return the validation loss. ``reduce_sum`` adds the sums of other processes."""
    accelerator = SimpleNamespace(reduce=lambda part, reduction: reduce_sum(part))
    return validation_loss(
        module or MeanTarget(),
        batches,
        device=CPU,
        bytes_per_token=bytes_per_token,
        accelerator=accelerator,
        **options,
    )


def test_loss_is_weighted_by_tokens():
    expected = (1 + 2 + 3 + 4 + 5 + 6 + 9 + 10) / 8

    assert compute_loss() == {"loss": pytest.approx(expected)}


def test_bytes_are_those_of_targets():
    inputs = torch.tensor([[0, 1]])
    targets = torch.tensor([[1, 2]])
    bytes_per_token = np.array([1000, 1, 2])

    result = compute_loss(batches=[(inputs, targets)], bytes_per_token=bytes_per_token)

    assert result["bits_per_byte"] == pytest.approx(3 / math.log(2) / 3)


@pytest.fixture
def sums_of_other_process():
    """Return the sums of a process that has the first batch."""
    parts = []

    def record(part):
        parts.append(part)
        return part

    compute_loss(batches=BATCHES[:1], bytes_per_token=ONE_BYTE_PER_TOKEN, reduce_sum=record)
    return parts[0]


def test_processes_add_sums_before_dividing(sums_of_other_process):
    result = compute_loss(
        batches=BATCHES[1:],
        bytes_per_token=ONE_BYTE_PER_TOKEN,
        reduce_sum=lambda part: part + sums_of_other_process,
    )

    assert result == {
        "loss": pytest.approx(5.0),
        "bits_per_byte": pytest.approx(5.0 / math.log(2)),
    }


def test_process_without_batches_gets_total(sums_of_other_process):
    result = compute_loss(batches=[], reduce_sum=lambda part: part + sums_of_other_process)

    assert result["loss"] == pytest.approx(3.5)


def test_stop_ends_validation():
    module = MeanTarget().train()

    result = compute_loss(module, stop=lambda: len(module.calls) == 1)

    assert result is None
    assert len(module.calls) == 1
    assert module.training


def test_stop_of_another_process_ends_validation():
    # The last of these values counts the processes that were stopped.
    other_sums = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)

    assert compute_loss(reduce_sum=lambda part: part + other_sums) is None


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
def test_dropout_and_gradients_are_off_during_validation(is_training):
    module = MeanTarget().train(is_training)

    compute_loss(module)

    assert module.calls == [(False, False), (False, False)]
    assert module.training is is_training
