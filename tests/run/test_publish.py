"""Titles of pushes."""

import pytest

from ursa_minor.run import publish

ROWS = [
    {"step": 1, "train/loss": 9.0},
    {"step": 2, "train/loss": 2.5},
    {"step": 2, "eval/loss": 2.25},
]


@pytest.mark.parametrize(
    "rows, words",
    [
        (ROWS, "train loss 2.5000, validation loss 2.2500"),
        ([*ROWS[:2], {"step": 2, "eval/loss": None}], "train loss 2.5000"),
    ],
)
def test_a_push_is_titled_with_its_finite_losses(rows, words):
    assert publish._losses_at(2, rows) == words
