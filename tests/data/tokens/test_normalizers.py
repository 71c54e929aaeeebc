"""Tokenizers that lose or add text are rejected by name, and NFC is accounted for."""

import odd_tokenizers
import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.encoder import CHANGED_BY_NFC, DocumentEncoder

LOSSY = {
    "Lowercase": normalizers.Lowercase(),
    "NFKC": normalizers.NFKC(),
    "Replace": normalizers.Replace(Regex(" {2,}"), " "),
}


def byte_level(normalizer=None):
    """Return a byte-level BPE with a normalizer."""
    tokenizer = odd_tokenizers.byte_level_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizer
    return tokenizer


def encode(tokenizer, *texts: str) -> list:
    """Return the documents of texts."""
    rows = ((text, True) for text in texts)
    return list(DocumentEncoder(tokenizer, "my-tokenizer")(rows, 0))


@pytest.mark.parametrize("kind", LOSSY)
def test_lossy_normalizer_is_rejected_by_name(kind):
    tokenizer = byte_level(normalizers.Sequence([normalizers.NFC(), LOSSY[kind]]))

    with pytest.raises(BadInput) as caught:
        encode(tokenizer, "plain text of the same size")

    message = str(caught.value)
    assert "my-tokenizer" in message
    assert f"normalizer {kind}" in message
    assert "--tokenizer bpe" in message


def test_prefix_space_is_rejected():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )

    with pytest.raises(BadInput, match="add_prefix_space"):
        encode(tokenizer, "text")


def test_nfc_counts_bytes_of_normalized_text():
    tokenizer = byte_level(normalizers.NFC())
    texts = ["ASCII", "composed é", "decomposed e\u0301", "\u0958\u0932\u092e"]

    documents = encode(tokenizer, *texts)

    sizes = [len(tokenizers_nfc(text).encode()) for text in texts]
    assert [document.text_bytes for document in documents] == sizes
    assert [document.counts[CHANGED_BY_NFC] for document in documents] == [0, 0, 1, 1]
    for text, document in zip(texts, documents, strict=True):
        assert tokenization.decode(tokenizer, document.ids[1:]) == tokenizers_nfc(text)


def tokenizers_nfc(text: str) -> str:
    """Return a text in NFC."""
    return normalizers.NFC().normalize_str(text)


def test_pieces_of_changed_document_count_once():
    tokenizer = byte_level(normalizers.NFC())
    rows = [("e\u0301 e", True), (" e\u0301 e", False), (" e\u0301", False), ("e\u0301", True)]

    documents = list(DocumentEncoder(tokenizer, "nfc")(iter(rows), 0))

    assert len(documents) > 2

    assert sum(document.counts[CHANGED_BY_NFC] for document in documents) == 2
    assert sum(document.counts["documents"] for document in documents) == 2


def test_word_as_end_of_text_is_named():
    tokenizer = odd_tokenizers.llama_tokenizer()
    tokenizer.eos_token = "▁river"

    with pytest.raises(BadInput, match="end-of-text"):
        encode(tokenizer, "the river bank")
