"""The note on a text that a run reads too often."""

import pytest
from conftest import ROOT

from ursa_minor.data.loading.epochs import note_on_epochs, suggested_epochs
from ursa_minor.recipe import keys, loading
from ursa_minor.recipe.batching import MANY_EPOCHS


def load(**flags) -> keys.Recipe:
    """Load the recipe own_text, which states its length in epochs, with these flags."""
    path = ROOT / "recipes" / "own_text.yaml"
    return loading.load_recipe(path, {"data_files": ["x"], **flags})


def test_large_text_is_read_less_often():
    small = suggested_epochs(0.3e6)

    assert small > MANY_EPOCHS
    assert suggested_epochs(100e6) == MANY_EPOCHS


@pytest.mark.parametrize(
    ("flags", "option"),
    [
        ({"num_train_epochs": 20}, "--num_train_epochs 10"),
        ({"max_steps": 1000}, "--max_steps 489"),  # 10 x 100,000 tokens / 2,048
    ],
    ids=["epochs", "steps"],
)
def test_note_names_the_option_of_the_recipe(flags, option):
    note = note_on_epochs(load(**flags), 300_000, 100_000, tokens_read=2_000_000)

    assert "0.3 MB 20 times" in note
    assert "about 10 times" in note
    assert f"{option};" in note
    assert "model/" in note


@pytest.mark.parametrize("epochs", [0.5, 4, 10, 12])
def test_usual_number_of_epochs_gets_no_note(epochs):
    assert not note_on_epochs(load(), 300_000, 100_000, tokens_read=int(epochs * 100_000))


def test_unknown_size_is_estimated_from_tokens():
    num_tokens = 100_000_000

    note = note_on_epochs(load(), 0, num_tokens, tokens_read=10 * num_tokens)

    assert "0.4 GB 10 times" in note
    assert f"--num_train_epochs {MANY_EPOCHS}" in note
