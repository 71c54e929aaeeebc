"""Test the decoding of new ids together with those before them, in one call and one by one."""

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
INVALID_BYTES = [0xE4, 0xFF, 0x41]  # these form no character


def encode_known(tokenizer, text):
    """Return the ids of the characters of a text for which the tokenizer has ids."""
    is_character_tokenizer = len(tokenizer) < 60
    if is_character_tokenizer:
        vocabulary = tokenizer.get_vocab()
        text = "".join(character for character in text if character in vocabulary)
    return encode_prompt(tokenizer, text)


def draw_known_texts(tokenizer, draw, length):
    """Return the first ids of random texts."""
    ids = []
    for _ in range(length):
        ids += encode_known(tokenizer, draw.choice(TEXTS))
    return ids[:length]


def decode_one_by_one(tokenizer, prompt_ids, new_ids):
    """Return the piece of text that each new id adds, and the last piece."""
    continuation = Continuation(tokenizer, prompt_ids)
    pieces = [continuation.add([new_id]) for new_id in new_ids]
    pieces.append(continuation.finish())
    return pieces


def byte_token_ids(tokenizer, values):
    """Return the ids of the tokens of these bytes."""
    return [tokenizer.convert_tokens_to_ids(f"<0x{value:02X}>") for value in values]


@pytest.mark.parametrize("num_new_ids", [1, 7, 150])
@pytest.mark.parametrize("kind", odd_tokenizers.TOKENIZERS)
def test_prompt_and_pieces_form_the_decoded_text(kind, num_new_ids):
    tokenizer = odd_tokenizers.TOKENIZERS[kind]()
    draw = random.Random(num_new_ids)
    prompts = PROMPTS[::4] if num_new_ids == 150 else PROMPTS

    for prompt in prompts:
        prompt_ids = encode_known(tokenizer, prompt)
        prompt_text = decode(tokenizer, prompt_ids)
        random_ids = [draw.randrange(len(tokenizer)) for _ in range(num_new_ids)]
        text_ids = draw_known_texts(tokenizer, draw, num_new_ids)

        for new_ids in ([], random_ids, text_ids):
            expected = decode(tokenizer, [*prompt_ids, *new_ids])
            pieces = decode_one_by_one(tokenizer, prompt_ids, new_ids)
            new_text = decode_continuation(tokenizer, prompt_ids, new_ids)
            assert prompt_text + "".join(pieces) == expected
            assert prompt_text + new_text == expected


@pytest.mark.parametrize(
    "prompt, new_text",
    [("river", " stone"), ("the river ", " stone"), ("", "stone")],
    ids=["word", "space", "document start"],
)
@pytest.mark.parametrize("kind", ["llama", "metaspace_first", "metaspace_always"])
def test_first_new_word_keeps_its_space(kind, prompt, new_text):
    tokenizer = odd_tokenizers.TOKENIZERS[kind]()
    prompt_ids = encode_prompt(tokenizer, prompt)
    stone = tokenizer.convert_tokens_to_ids("▁stone")

    assert decode_continuation(tokenizer, prompt_ids, [stone]) == new_text


@pytest.mark.parametrize("kind", ["llama", "byte_level", "lower_case"])
def test_character_of_several_tokens_is_one_piece(kind):
    tokenizer = odd_tokenizers.TOKENIZERS[kind]()
    prompt_ids = encode_prompt(tokenizer, "the 中")
    new_ids = encode_prompt(tokenizer, "🙂stone")

    text = "".join(decode_one_by_one(tokenizer, prompt_ids, new_ids))

    assert text.endswith("🙂stone")
    assert REPLACEMENT_CHARACTER not in text


def test_incomplete_character_is_omitted():
    """With byte fallback, each byte of a sequence is invalid if the last character is."""
    tokenizer = odd_tokenizers.llama_tokenizer()
    prompt_ids = encode_prompt(tokenizer, "the 中文")
    first, second, third = byte_token_ids(tokenizer, "中".encode())

    assert decode(tokenizer, [*prompt_ids, first]) == "the 中文"
    assert decode(tokenizer, [*prompt_ids, first, second]) == "the 中文"
    assert decode_continuation(tokenizer, prompt_ids, [first, second, third, first]) == "中"


def test_invalid_bytes_do_not_repeat_the_prompt():
    tokenizer = odd_tokenizers.llama_tokenizer()
    prompt_ids = encode_prompt(tokenizer, "the 中")
    invalid_ids = byte_token_ids(tokenizer, INVALID_BYTES)
    stone = tokenizer.convert_tokens_to_ids("▁stone")

    pieces = decode_one_by_one(tokenizer, prompt_ids, [*invalid_ids, stone])

    assert "".join(pieces) == f"{REPLACEMENT_CHARACTER * len(INVALID_BYTES)} stone"
