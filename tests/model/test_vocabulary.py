"""A tokenizer with more ids than the embedding has rows is reported when the model is loaded."""

import json

import pytest
import yaml
from conftest import RECIPE
from small_models import build_small_model

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import pretrained_tokenizer
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.export import stock as stock_export
from ursa_minor.model import pretrained, vocabulary
from ursa_minor.preflight.vocabulary import check_tokenizer_fits
from ursa_minor.recipe import keys


@pytest.fixture
def folder(tmp_path):
    """A model with 320 rows, whose tokenizer has 295 ids."""
    stock_export.write(
        build_small_model(vocab_size=320),
        tmp_path / "model",
        tokenization.train_bpe(["abc abd " * 9], 300),
    )
    return tmp_path / "model"


def enlarge(folder, last_id: int, *, gap: bool = False):
    """Add ids up to ``last_id`` to the tokenizer of a folder; with a gap only that one."""
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text())
    vocabulary_of = definition["model"]["vocab"]
    first = last_id if gap else 1 + max(vocabulary_of.values())
    for number in range(first, last_id + 1):
        vocabulary_of[f"token {number}"] = number
    path.write_text(json.dumps(definition))
    return pretrained_tokenizer.load(str(folder))


@pytest.mark.parametrize(("last_id", "gap"), [(320, False), (320, True), (500, True)])
def test_tokenizer_larger_than_the_embedding_is_refused(folder, last_id, gap):
    tokenizer = enlarge(folder, last_id, gap=gap)
    assert (len(tokenizer) <= 320) == gap
    words = rf"^--model m: the tokenizer has ids up to {last_id}, .* has 320. .*embeddings\({last_id + 1}\)"
    model = pretrained.load(str(folder))
    with pytest.raises(BadInput, match=words):
        vocabulary.check_embedding_rows(model, tokenizer, "--model m")
    model.resize_token_embeddings(last_id + 1)
    vocabulary.check_embedding_rows(model, tokenizer, "--model m")


def test_rows_of_padding_are_allowed(folder):
    vocabulary.check_embedding_rows(pretrained.load(str(folder)), enlarge(folder, 319), "--model m")


@pytest.mark.parametrize(
    ("vocab_size", "last_id", "words"),
    [
        (
            None,
            320,
            r"^init_from = .*ids up to 320, .* has 320. .*embeddings\(321\).*or add rows with --vocab_size 384",
        ),
        (
            320,
            320,
            "^vocab_size = 320 is too small: .* is 320. Use --vocab_size 384",
        ),
        (384, 320, None),
        (None, 319, None),
    ],
)
def test_init_from_needs_rows_for_the_tokenizer(folder, vocab_size, last_id, words):
    enlarge(folder, last_id)
    recipe = keys.from_dict(
        yaml.safe_load(RECIPE)
        | dict.fromkeys(keys.MODEL_KEYS)
        | {"init_from": str(folder), "tokenizer": str(folder), "vocab_size": vocab_size}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    )
    complete = pretrained.complete(recipe)
    if words is None:
        check_tokenizer_fits(complete, vocab_size)
        return
    with pytest.raises(BadInput, match=words):
        check_tokenizer_fits(complete, vocab_size)
