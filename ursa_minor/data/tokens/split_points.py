"""Where a text may be cut for a tokenizer: ids of the pieces, joined, are those of the whole.

A tokenizer's regex splits a text into words, and begins anew behind each, without a view of what came before. So a cut
is right where a word ends whatever follows, and where the words before it are the same with and without what follows.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources.formats.text import GPT2_SPLIT_POINT, MAX_UNSPLIT_CHARACTERS

NumberedRow = tuple[int, Any, bool]  # its number, text or ids, whether a document begins with it

# The regexes below join signs with the line breaks behind them, and white space with the last line break in it. So: before
# a space or newline behind a letter or digit (but not a letter that NFC takes apart), and behind that last line break.
LINE_SPLIT_POINT = re.compile(
    r"(?s).*(?:(?<=[^\W_\u0958-\u095f\u09dc-\u09df\u0a33-\u0a5e\u0b5c\u0b5d\u0f40-\u0fbc\ufb1d-\ufb4e])(?=[ \n])"
    r"|(?<=\n)(?=[^\S\r\n]*[^\s/]))"
)
_SHORT, _END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
# The regex of a tokenizer's Split, as tokenizer.json has it. Qwen 2's is Qwen 3's too, LLAMA3 GPT-4's cl100k.
QWEN2 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END
QWEN35 = _SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _END
LLAMA3 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END
O200K = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_SHORT}?|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_SHORT}?"
O200K += r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END
SPLITS = {"gpt2": GPT2_SPLIT_POINT} | dict.fromkeys(
    (QWEN2, QWEN35, LLAMA3, O200K), LINE_SPLIT_POINT
)


def split_point_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return the pattern that ends at the last place where a text may be cut for a tokenizer; None: it may not be."""
    definition = json.loads(tokenizer.to_str())
    split, added = definition["pre_tokenizer"] or {}, definition["added_tokens"]
    if split.get("pattern") == {"Regex": r"[\s\S]"}:  # our characters: any place would do
        return GPT2_SPLIT_POINT
    if definition["normalizer"] not in (None, {"type": "NFC"}):
        return None
    # The text is searched for these tokens.
    for token in (token for token in added if not token["special"]):
        strips = token["lstrip"] or token["rstrip"] or token["single_word"]
        if strips or not re.fullmatch(r"\S+|[ \t]+", token["content"]):
            return None
    return SPLITS.get(word_regex(split) or "")


def word_regex(split: dict[str, Any]) -> str | None:
    """Return the regex by which a byte-level tokenizer's split parts words, ``gpt2`` for its own; None: it does more."""
    match split.get("pretokenizers", [split]):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return "gpt2"
        case [
            {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": regex}},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return regex
    return None


def pieces(rows: Iterable[NumberedRow], last: re.Pattern[str] | None) -> Iterator[NumberedRow]:
    """Join the rows of each document, and cut what comes in several where ``last`` (of ``split_point_pattern``) allows it.

    A piece has the number of its document's first row. Raises BadInput for a text that is too long to be held whole.
    """
    held, first, begun = None, 0, False
    for number, text, begins in chain(rows, [(-1, None, True)]):
        if held is not None and (begins or text is None):
            yield first, held, not begun
            held = None
        if text is None:
            if number >= 0:
                yield number, None, True
        elif held is None:
            held, first, begun = text, number, False
        else:
            seen, held = len(held), held + text
            if last and (found := last.match(held, seen)):
                yield first, held[: found.end()], not begun
                held, begun = held[found.end() :], True
            elif len(held) > MAX_UNSPLIT_CHARACTERS:
                raise BadInput(
                    f"tokenizer: gives the right ids only to a whole text, and row {first} begins one that has no place "
                    f"to cut in {MAX_UNSPLIT_CHARACTERS:,} characters; give it in several files, or as JSON lines"
                )
