"""New ids are decoded together with those before them, whatever the tokenizer, all at once or as they come."""

import random

import odd_tokenizers
import pytest

from ursa_minor.data.tokens.tokenizer import (
    REPLACEMENT_CHARACTER,
    Continuation,
    decode,
    decode_continuation,
    encode_prompt,
)

PROMPTS = [
    "",
    "river",
    "river ",
    " river",
    "The Cafe\u0301 ",
    "it '",
    "\n\n",
    "the 中文 🙂 stone",
    odd_tokenizers.TEXT,
]
TEXTS = [" stone", "the river", "中文 🙂", "'t.", " n't", "  ", "é"]
INVALID = [0xE4, 0xFF, 0x41]  # bytes that make no character


def known(tokenizer, text):
    """The ids of a text, as far as the tokenizer has ids for it."""
    characters = tokenizer.get_vocab() if len(tokenizer) < 60 else text
    return encode_prompt(tokenizer, "".join(c for c in text if c in characters))


def pieces(tokenizer, prompt_ids, new_ids):
    continuation = Continuation(tokenizer, prompt_ids)
    return [continuation.add([new]) for new in new_ids] + [continuation.finish()]


@pytest.mark.parametrize("length", [1, 7, 150])
@pytest.mark.parametrize("kind", odd_tokenizers.TOKENIZERS)
def test_prompt_and_pieces_are_the_text_of_all_ids(kind, length):
    tokenizer, draw = odd_tokenizers.TOKENIZERS[kind](), random.Random(length)
    for prompt in PROMPTS[:: 1 + length // 50]:
        prompt_ids = known(tokenizer, prompt)
        drawn = [draw.randrange(len(tokenizer)) for _ in range(length)]
        written = [i for _ in range(length) for i in known(tokenizer, draw.choice(TEXTS))][:length]
        for new_ids in ([], drawn, written):
            whole = decode(tokenizer, [*prompt_ids, *new_ids])
            assert (
                decode(tokenizer, prompt_ids) + "".join(pieces(tokenizer, prompt_ids, new_ids))
                == whole
            )
            assert (
                decode(tokenizer, prompt_ids) + decode_continuation(tokenizer, prompt_ids, new_ids)
                == whole
            )


@pytest.mark.parametrize("kind", ["llama", "metaspace_first", "metaspace_always"])
def test_the_first_new_word_keeps_its_space(kind):
    tokenizer = odd_tokenizers.TOKENIZERS[kind]()
    stone = tokenizer.convert_tokens_to_ids("▁stone")
    for prompt in ("river", "the river "):
        assert decode_continuation(tokenizer, encode_prompt(tokenizer, prompt), [stone]) == " stone"
    assert decode_continuation(tokenizer, encode_prompt(tokenizer, ""), [stone]) == "stone", (
        "a document begins"
    )


@pytest.mark.parametrize("kind", ["llama", "byte_level", "lower_case"])
def test_a_character_of_several_tokens_is_one_piece(kind):
    tokenizer = odd_tokenizers.TOKENIZERS[kind]()
    prompt_ids, new_ids = encode_prompt(tokenizer, "the 中"), encode_prompt(tokenizer, "🙂stone")
    found = pieces(tokenizer, prompt_ids, new_ids)
    assert "".join(found).endswith("🙂stone") and not any(
        REPLACEMENT_CHARACTER in piece for piece in found
    )


def test_an_incomplete_character_leaves_those_before_it():
    """Byte fallback makes each byte of a sequence invalid if its last character is."""
    tokenizer = odd_tokenizers.llama_tokenizer()
    first, *rest = (tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "中".encode())
    ids = encode_prompt(tokenizer, "the 中文")
    assert (
        decode(tokenizer, [*ids, first]) == decode(tokenizer, [*ids, first, rest[0]]) == "the 中文"
    )
    assert decode_continuation(tokenizer, ids, [first, *rest, first]) == "中"


def test_invalid_bytes_after_a_prompt_do_not_repeat_it():
    tokenizer = odd_tokenizers.llama_tokenizer()
    invalid = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in INVALID]
    stone = tokenizer.convert_tokens_to_ids("▁stone")
    found = pieces(tokenizer, encode_prompt(tokenizer, "the 中"), [*invalid, stone])
    assert "".join(found) == f"{REPLACEMENT_CHARACTER * len(INVALID)} stone"
