"""Token files whose ids do not look like text lead to one warning."""

from pathlib import Path

import numpy as np
import odd_tokenizers
import pytest

from ursa_minor.data.loading import token_folder
from ursa_minor.data.loading.windows import Windows

TOKENIZER = odd_tokenizers.byte_level_tokenizer()
RANDOM = np.random.default_rng(0)
TEXT_IDS = RANDOM.integers(0, len(TOKENIZER), 5000)  # the end-of-text token is among them


def warnings(ids: np.ndarray, caplog) -> str:
    """Return the warnings about these ids."""
    train = Windows(16, 512)
    train.append(Path("train.bin"), len(ids), ids.astype(np.uint16), 0)
    largest_id = train.check_ids()

    token_folder.warn_of_wrong_ids(Path("shards"), train, largest_id, TOKENIZER)

    assert len(caplog.messages) <= 1
    return caplog.text


def test_text_has_no_warning(caplog):
    assert not warnings(TEXT_IDS, caplog)


def test_missing_end_of_text_is_a_warning(caplog):
    ids = TEXT_IDS[TOKENIZER.eos_token_id != TEXT_IDS]

    assert "end-of-text" in warnings(ids, caplog)


def test_too_large_id_is_a_warning(caplog):
    ids = np.append(TEXT_IDS, 400)

    assert "largest id is 400" in warnings(ids, caplog)


@pytest.mark.parametrize("period", [1, 2, 7])
def test_predictable_ids_are_a_warning(period, caplog):
    ids = np.tile(np.arange(TOKENIZER.eos_token_id, TOKENIZER.eos_token_id + period), 500)
    ids %= len(TOKENIZER)

    assert "bigram loss" in warnings(ids, caplog)


def test_bigram_loss_is_conditional_entropy():
    ids = np.array([0, 0, 1, 1, 0, 0, 1, 1, 0])  # each id is followed by 0 and 1 equally often

    assert token_folder.bigram_loss(ids) == pytest.approx(np.log(2))
