"""Judge from its definition whether a tokenizer keeps the text that it encodes.

Bits per byte and generated text are only correct if the ids represent the complete text. Three
kinds of tokenizers are accepted: without a normalizer, with NFC, and with SentencePiece's
replacement of spaces by "▁".
"""

from collections.abc import Iterator
from typing import Any

from tokenizers.normalizers import NFC
from transformers import PreTrainedTokenizerFast

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import definition
from ursa_minor.data.tokens.tokenizer import SPACE

# What the normalizers of the tokenizers library do that loses text.
LOSSES = {
    "BertNormalizer": "removes characters, accents or upper case",
    "Lowercase": "converts text to lower case",
    "NFD": "decomposes letters with accents",
    "NFKC": "replaces characters such as ½ and ﬁ",
    "NFKD": "replaces characters such as ½ and ﬁ",
    "Nmt": "removes or replaces control characters and spaces",
    "Precompiled": "replaces characters by a table of SentencePiece, such as nmt_nfkc",
    "Prepend": "adds text",
    "Replace": "replaces text",
    "Strip": "removes spaces",
    "StripAccents": "removes accents",
}
_NFC = NFC()


def uses_nfc(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether a tokenizer converts texts to NFC before it encodes them."""
    normalizer = definition.component(tokenizer.backend_tokenizer, "normalizer")
    return any(step["type"] == "NFC" for step in _steps(normalizer))


def to_nfc(text: str) -> str:
    """Return a text in NFC, as the tokenizers library converts it.

    Python's ``unicodedata`` has the tables of another version of Unicode.
    """
    return text if text.isascii() else _NFC.normalize_str(text)


def check_keeps_text(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Check that a tokenizer neither loses nor adds text.

    Args:
        name: the tokenizer in the recipe, for the message.

    Raises:
        BadInput: a part of the tokenizer changes the text.
    """
    normalizer = definition.component(tokenizer.backend_tokenizer, "normalizer")
    for step in _steps(normalizer):
        if not _is_lossless(step):
            kind = step["type"]
            effect = LOSSES.get(kind, "may change the text")
            raise BadInput(
                f"tokenizer = {name}: its normalizer {kind} {effect}, so bits per byte would be "
                f"wrong, and the model could not generate the original text. Use a tokenizer that "
                f"keeps the text (with the normalizer NFC or none), or train one: --tokenizer bpe"
            )
    pre_tokenizer = definition.component(tokenizer.backend_tokenizer, "pre_tokenizer")
    for step in _steps(pre_tokenizer):
        if step["type"] == "ByteLevel" and step["add_prefix_space"]:
            raise BadInput(
                f"tokenizer = {name}: its pre-tokenizer ByteLevel adds a space before each text "
                f"(add_prefix_space = true), so bits per byte would be wrong. Use a tokenizer that "
                f"was trained with add_prefix_space = false, or train one: --tokenizer bpe"
            )


def _steps(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the normalizers or pre-tokenizers that a component consists of."""
    if component is None:
        return
    if component["type"] != "Sequence":
        yield component
        return
    for step in component.get("normalizers") or component.get("pretokenizers") or []:
        yield from _steps(step)


def _is_lossless(step: dict[str, Any]) -> bool:
    """Return whether a normalizer keeps the text, apart from its composition in NFC."""
    match step:
        case {"type": "NFC" | "ByteLevel"}:
            return True
        case {"type": "Prepend", "prepend": prefix}:
            return prefix == SPACE
        case {"type": "Replace", "pattern": {"String": " "}, "content": content}:
            return content == SPACE
        case {"type": "Precompiled", "precompiled_charsmap": table}:
            return not table
    return False
