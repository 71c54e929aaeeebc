"""Token files whose ids do not look like text lead to one warning."""

from pathlib import Path

import numpy as np
import odd_tokenizers
import pytest

from ursa_minor.base.errors import BadInput
from ursa_minor.data.loading import token_folder
from ursa_minor.data.loading.windows import Windows
from ursa_minor.data.tokens import tokenizer as tokenization

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


def test_missing_end_of_text_is_a_warning(caplog):
    assert not warnings(TEXT_IDS, caplog)

    text = warnings(TEXT_IDS[TOKENIZER.eos_token_id != TEXT_IDS], caplog)

    assert "end-of-text" in text


def test_too_large_id_is_a_warning(caplog):
    text = warnings(np.append(TEXT_IDS, 400), caplog)

    assert "largest id is 400" in text


def test_predictable_ids_are_a_warning(caplog):
    text = warnings(np.tile([TOKENIZER.eos_token_id, 5], 500), caplog)

    assert "bigram loss" in text


@pytest.fixture
def tokenizer_folder(tmp_path) -> Path:
    """Write the tokenizer to a folder."""
    folder = tmp_path / "tokenizer"
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["tokenizer.json", "."])
def test_stated_tokenizer_on_this_machine_is_compared(tokenizer_folder, caplog, name):
    stated = str(tokenizer_folder / name)

    fingerprint = tokenization.fingerprint(TOKENIZER)
    token_folder.check_stated_tokenizer(Path("tokens"), stated, "other/name", fingerprint)
    with pytest.raises(BadInput) as caught:
        token_folder.check_stated_tokenizer(Path("tokens"), stated, "other/name", "0" * 64)

    assert not caplog.text
    assert stated in str(caught.value)
    assert f"--tokenizer {tokenizer_folder}" in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "is_warned"),
    [
        ("gpt2", False),
        ("openai-community/gpt2", False),
        ("OWNER/llama", True),
        ("/old/gpt2", False),
    ],
)
def test_stated_name_of_the_hub_is_compared(caplog, stated, is_warned):
    token_folder.check_stated_tokenizer(Path("tokens"), stated, "openai-community/gpt2", "0" * 64)

    assert (f"tokenizer {stated}" in caplog.text) == is_warned
