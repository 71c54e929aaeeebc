"""Random texts of fragments that are easily split at a wrong place.

The fragments are white space, punctuation, combining marks and letters of many scripts.
"""

import random

FRAGMENTS = [
    # white space
    *(" ", "  ", "\n", "\n\n", "\r\n", "\r", "\t", " \t ", "\t\n"),
    *("\u00a0", "\u2028", "\x85", "\x1c", "\x0b\f", "\u3000 "),
    # punctuation
    *(".", "。", "!?", "...", "/", "/\n", ".\n", "。\n\u3000\u3000"),
    *('"', "'", "'s", " 's", "I'll", "'\n", "DON'T", "=" * 9, "_", "_x_", "$a"),
    # letters and digits
    *("a", "kann", "The", "ABc", "com", "0", "1234", "²½", "Ⅷ", "٣٤", "é", "ß"),
    *("e\u0301", "\u0301", "中文", "漢", "かな", "हि", "न्दी", "\u0915\u093c"),
    *("ខ្មែរ", "ภาษา", "שלום", "مرحبا", "한국", "Ǆ", "\u2f800"),
    # invisible characters, emoji and special tokens
    *("\u200b", "\u200d", "\u200f", "\ufeff", "\x01", "\u180e"),
    *("\U0001f468\u200d\U0001f469", "❤\ufe0f", "\U0010ffff", "\ufffd", "<|endoftext|>"),
]


def random_text(draw: random.Random, fragments: int = 60) -> str:
    """Return a text of a few kinds of fragments, which are therefore often repeated."""
    kinds = draw.sample(FRAGMENTS, draw.randint(2, len(FRAGMENTS)))
    return "".join(draw.choices(kinds, k=fragments))
