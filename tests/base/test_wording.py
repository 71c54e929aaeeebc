"""Suggestions for misspelt names."""

import pytest

from ursa_minor.base.wording import did_you_mean
from ursa_minor.recipe.keys import FIELDS


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("lerning_rate", "learning_rate"),
        ("learn_rate", "learning_rate"),
        ("n_embed", "n_embd"),
        ("max_step", "max_steps"),
        ("early", "early_stopping_patience"),  # its beginning
        ("hub_id", "hub_model_id"),  # two of its parts
        ("epsilon", "adam_epsilon"),
    ],
)
def test_similar_name_is_suggested(word, name):
    assert did_you_mean(word, FIELDS, "--") == f"; did you mean --{name}?"


@pytest.mark.parametrize(
    "word", ["activation_function", "betas", "time", "clip", "train", "split", "heads", "x", ""]
)
def test_name_of_another_meaning_is_not_suggested(word):
    assert not did_you_mean(word, FIELDS)
