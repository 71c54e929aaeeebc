"""The bigram baseline: its probabilities sum to 1, and it learns which id follows which."""

import numpy as np
import pytest

from ursa_minor.evaluation.baselines import bigram_loss

VOCAB_SIZE = 7


@pytest.mark.parametrize("previous_id", range(VOCAB_SIZE))
def test_probabilities_of_next_ids_sum_to_one(previous_id):
    # 3 occurs only at the end, and 4 and 6 do not occur.
    train_ids = np.array([0, 1, 2, 1, 2, 2, 5, 0, 1, 3], dtype=np.uint16)

    losses = []
    for next_id in range(VOCAB_SIZE):
        pair = np.array([[previous_id], [next_id]])
        losses.append(bigram_loss(train_ids, pair, VOCAB_SIZE))

    probabilities = np.exp(-np.array(losses))
    assert probabilities.sum() == pytest.approx(1)


def test_loss_is_zero_for_deterministic_text():
    ids = np.tile(np.arange(5), 2000)
    pairs = np.stack([ids[:-1], ids[1:]])

    assert bigram_loss(ids, pairs, VOCAB_SIZE) < 0.01


def test_loss_after_random_text_is_uniform():
    ids = np.tile(np.arange(5), 2000)
    pairs = np.stack([ids[:-1], ids[1:]])
    random_ids = np.random.default_rng(0).integers(0, 5, 20_000)

    loss = bigram_loss(random_ids, pairs, VOCAB_SIZE)

    assert loss == pytest.approx(np.log(5), abs=0.02)
