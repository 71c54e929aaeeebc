"""What needs no training: a bigram model's probabilities are probabilities, and it knows what follows what."""

import numpy as np
import pytest

from ursa_minor.evaluation.baselines import bigram_loss

VOCABULARY = 7


@pytest.mark.parametrize("before", range(VOCABULARY))
def test_the_chances_of_all_that_may_follow_an_id_are_one_together(before):
    train = np.array(
        [0, 1, 2, 1, 2, 2, 5, 0, 1, 3], dtype=np.uint16
    )  # 3 only at the end, 4 and 6 never
    losses = [
        bigram_loss(train, np.array([[before], [after]]), VOCABULARY) for after in range(VOCABULARY)
    ]
    assert sum(np.exp(-np.array(losses))) == pytest.approx(1)


def test_a_bigram_model_knows_what_always_follows_and_learns_nothing_from_chance():
    always = np.tile(np.arange(5), 2000)
    pairs = np.stack([always[:-1], always[1:]])
    assert bigram_loss(always, pairs, VOCABULARY) < 0.01
    chance = np.random.default_rng(0).integers(0, 5, 20_000)
    assert bigram_loss(chance, pairs, VOCABULARY) == pytest.approx(np.log(5), abs=0.02)
