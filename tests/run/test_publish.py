"""Titles of pushes."""

import pytest

from ursa_minor.run import publish

TRAINING_ROWS = [{"step": 1, "train/loss": 9.0}, {"step": 2, "train/loss": 2.5}]


@pytest.mark.parametrize(
    ("validation_loss", "expected"),
    [(2.25, "train loss 2.5000, validation loss 2.2500"), (None, "train loss 2.5000")],
)
def test_title_contains_finite_losses(validation_loss, expected):
    rows = [*TRAINING_ROWS, {"step": 2, "eval/loss": validation_loss}]

    assert publish._losses_at(2, rows) == expected
