"""A tokenizer with more ids than the embedding has rows is reported when the model is loaded."""

import json

import pytest
import yaml
from conftest import RECIPE
from small_models import build_small_model
from transformers import PreTrainedTokenizerBase

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import pretrained_tokenizer
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.export import stock as stock_export
from ursa_minor.model import pretrained, vocabulary
from ursa_minor.preflight.vocabulary import check_tokenizer_fits
from ursa_minor.recipe import keys

NUM_ROWS = 320


@pytest.fixture
def folder(tmp_path):
    """The folder of a model with 320 rows, whose tokenizer has 295 ids."""
    model = build_small_model(vocab_size=NUM_ROWS)
    tokenizer = tokenization.train_bpe(["abc abd " * 9], 300)
    stock_export.write(model, tmp_path / "model", tokenizer)
    return tmp_path / "model"


def enlarge_tokenizer(folder, last_id: int, *, gap: bool = False) -> PreTrainedTokenizerBase:
    """Add ids up to ``last_id`` to the tokenizer of a folder, or with a gap only that id."""
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text())
    vocab = definition["model"]["vocab"]
    first = last_id if gap else 1 + max(vocab.values())
    for number in range(first, last_id + 1):
        vocab[f"token {number}"] = number
    path.write_text(json.dumps(definition))
    return pretrained_tokenizer.load(str(folder))


@pytest.mark.parametrize(("last_id", "gap"), [(320, False), (320, True), (500, True)])
def test_tokenizer_larger_than_embedding_is_refused(folder, last_id, gap):
    tokenizer = enlarge_tokenizer(folder, last_id, gap=gap)
    model = pretrained.load(str(folder))

    with pytest.raises(BadInput) as error:
        vocabulary.check_embedding_rows(model, tokenizer, "--model m")

    # With a gap, the number of ids alone does not show the problem.
    assert (len(tokenizer) <= NUM_ROWS) == gap
    message = str(error.value)
    assert message.startswith("--model m: ")
    assert f"ids up to {last_id}" in message
    assert "has 320" in message
    assert f"embeddings({last_id + 1})" in message


@pytest.mark.parametrize(("last_id", "gap"), [(320, False), (320, True), (500, True)])
def test_suggested_number_of_rows_is_accepted(folder, last_id, gap):
    tokenizer = enlarge_tokenizer(folder, last_id, gap=gap)
    model = pretrained.load(str(folder))

    model.resize_token_embeddings(last_id + 1)

    vocabulary.check_embedding_rows(model, tokenizer, "--model m")


def test_padded_embedding_is_accepted(folder):
    tokenizer = enlarge_tokenizer(folder, NUM_ROWS - 1)
    model = pretrained.load(str(folder))

    vocabulary.check_embedding_rows(model, tokenizer, "--model m")


def complete_recipe(folder, vocab_size: int | None) -> keys.Recipe:
    """Complete a recipe that initializes from the folder."""
    options = dict.fromkeys(keys.MODEL_KEYS)
    options |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    options |= {"init_from": str(folder), "tokenizer": str(folder), "vocab_size": vocab_size}
    return pretrained.complete(keys.from_dict(yaml.safe_load(RECIPE) | options))


@pytest.mark.parametrize(
    ("vocab_size", "words"),
    [
        (
            None,
            "^init_from = .*ids up to 320, .*has 320.*embeddings.321.*--vocab_size 384",
        ),
        (NUM_ROWS, "^vocab_size = 320 is too small.*320.*--vocab_size 384"),
    ],
)
def test_init_from_without_rows_for_tokenizer_is_refused(folder, vocab_size, words):
    enlarge_tokenizer(folder, 320)
    recipe = complete_recipe(folder, vocab_size)

    with pytest.raises(BadInput, match=words):
        check_tokenizer_fits(recipe, vocab_size)


@pytest.mark.parametrize(("vocab_size", "last_id"), [(384, 320), (None, 319)])
def test_init_from_with_sufficient_rows_is_accepted(folder, vocab_size, last_id):
    enlarge_tokenizer(folder, last_id)
    recipe = complete_recipe(folder, vocab_size)

    check_tokenizer_fits(recipe, vocab_size)
