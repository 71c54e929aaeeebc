"""Text to ids and back, the same after saving, and each id's bytes."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from pretrain import tokenization
from pretrain.errors import BadInput

TEXT = (
    "It was — né\u0301e 中文 \U0001f600!\r\n\r\n\tdef f(x):  return x  \x00 a\u00a0b\u2028c\x85 end\n<|endoftext|> <|en"
)
MAKERS = {
    "bpe": lambda texts: tokenization.train_bpe(texts, 320),
    "characters": tokenization.make_characters,
}


@pytest.fixture(params=MAKERS)
def tokenizer(request):
    return MAKERS[request.param]([TEXT, TEXT + "other"])


def ids_of(tokenizer, text):
    (ids,) = tokenization.encode(tokenizer, [text])
    return ids


def test_text_survives_ids(tokenizer):
    ids = ids_of(tokenizer, TEXT)
    assert ids.dtype == np.uint32 and ids[0] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[1:].tolist()) == TEXT


def test_text_never_seen_survives_a_bpe():
    made = MAKERS["bpe"](["abc abd"])
    assert made.decode(ids_of(made, TEXT)[1:].tolist()) == TEXT


def test_saved_tokenizer_gives_the_same_ids(tokenizer, tmp_path):
    tokenization.save(tokenizer, tmp_path)
    for loaded in (tokenization.load(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)):
        assert ids_of(loaded, TEXT).tolist() == ids_of(tokenizer, TEXT).tolist()
        assert loaded.decode(ids_of(tokenizer, TEXT)[1:].tolist()) == TEXT
        assert len(loaded) == len(tokenizer) and loaded.eos_token_id == tokenizer.eos_token_id
        assert loaded.eos_token == loaded.bos_token == "<|endoftext|>"
        assert tokenization.token_bytes(loaded).tolist() == tokenization.token_bytes(tokenizer).tolist()


def test_end_of_text_written_in_a_text_is_ordinary_text(tokenizer):
    ids = ids_of(tokenizer, TEXT)
    assert (ids == tokenizer.eos_token_id).sum() == 1
    assert tokenizer.eos_token_id not in tokenization.encode_prompt(tokenizer, "<|endoftext|>")


def test_encoding_leaves_the_tokenizer_as_it_was(tokenizer):
    for setting in (False, True):
        tokenizer.backend_tokenizer.encode_special_tokens = setting
        ids_of(tokenizer, TEXT)
        assert tokenizer.backend_tokenizer.encode_special_tokens is setting


def test_bytes_of_ids_sum_to_the_bytes_of_the_text(tokenizer):
    table = tokenization.token_bytes(tokenizer)
    assert table.dtype == np.int64 and table.shape == (len(tokenizer),)
    assert table[ids_of(tokenizer, TEXT)].sum() == len(TEXT.encode())
    assert table[tokenizer.eos_token_id] == 0


def test_ids_of_characters_stand_in_code_point_order():
    made = tokenization.make_characters(["cab", "d"])
    assert ids_of(made, "abcd")[1:].tolist() == [0, 1, 2, 3] and made.eos_token_id == 4 and len(made) == 5


def test_unknown_characters_are_named():
    made = tokenization.make_characters(["abc"])
    with pytest.raises(BadInput, match="no id for 'x' 'é': they do not stand in the text it was made from"):
        ids_of(made, "aéxb")


def test_bpe_has_every_byte_and_at_most_the_asked_size():
    made = tokenization.train_bpe([TEXT * 5], 300)
    assert 257 <= len(made) <= 300


def test_bpe_is_the_same_each_time():
    assert tokenization.fingerprint(MAKERS["bpe"]([TEXT])) == tokenization.fingerprint(MAKERS["bpe"]([TEXT]))


def test_documents_are_encoded_apart(tokenizer):
    got = list(tokenization.encode(tokenizer, ["end", "", "a"]))
    assert [ids.tolist() for ids in got] == [ids_of(tokenizer, text).tolist() for text in ("end", "", "a")]
    assert got[1].tolist() == [tokenizer.eos_token_id]


def test_prompt_is_the_text_alone_and_an_empty_one_begins_a_document(tokenizer):
    assert tokenizer.decode(tokenization.encode_prompt(tokenizer, "end")) == "end"
    assert tokenization.encode_prompt(tokenizer, "") == [tokenizer.eos_token_id]


def test_fingerprint_changes_with_the_vocabulary_and_not_with_a_save(tokenizer, tmp_path):
    tokenization.save(tokenizer, tmp_path)
    assert tokenization.fingerprint(tokenization.load(str(tmp_path))) == tokenization.fingerprint(tokenizer)
    others = [MAKERS["bpe"]([TEXT]), tokenization.train_bpe([TEXT], 300), MAKERS["characters"](["abc"])]
    prints = {tokenization.fingerprint(other) for other in others}
    assert len(prints) == 3


def test_fingerprint_is_the_same_after_encoding(tokenizer):
    before = tokenization.fingerprint(tokenizer)
    ids_of(tokenizer, TEXT)
    tokenizer("end", truncation=True, max_length=5)
    assert tokenization.fingerprint(tokenizer) == before


@pytest.mark.parametrize("content", [None, "", "{"])
def test_a_folder_that_holds_no_tokenizer_is_refused_with_a_remedy(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadInput, match="cannot be loaded .*Give a folder with tokenizer.json") as caught:
        tokenization.load(str(tmp_path))
    assert len(caught.value.lines) == 1 and "\n" not in caught.value.lines[0] and str(tmp_path) in str(caught.value)


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path):
    made = MAKERS["bpe"]([TEXT])
    made.eos_token = made.bos_token = None
    tokenization.save(made, tmp_path)
    with pytest.raises(BadInput, match="no end-of-text"):
        tokenization.load(str(tmp_path))
