"""Find places at which a text can be split, so that its pieces have the ids of the complete text.

A tokenizer first splits a text into words with a regex, and encodes each word without its context.
A text can be split at a place if a word ends there whatever follows, and if the words before are
the same with and without the text that follows.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources.columns import NoText
from ursa_minor.data.sources.formats.text import GPT2_SPLIT_POINT, MAX_UNSPLIT_CHARACTERS
from ursa_minor.data.tokens import definition

# The number of a row, its text (str) or ids or NoText, and whether it begins a document.
NumberedRow = tuple[int, Any, bool]

# Letters that NFC replaces by a letter and a combining mark, at which some regexes end a word.
_DECOMPOSED = r"\u0958-\u095f\u09dc-\u09df\u0a33-\u0a5e\u0b5c\u0b5d\u0f40-\u0fbc\ufb1d-\ufb4e"
# Matches up to the last split point: a place at which none of the regexes below has a word on both
# sides. Their words contain punctuation together with the line breaks after it, and white space up
# to its last line break. So a text can be split
# - before a space or newline that follows a letter or digit,
# - after the last line break in white space, unless a "/" follows, which the regex of GPT-4o joins
#   to the punctuation and line breaks before it.
LINE_SPLIT_POINT = re.compile(
    rf"(?s).*(?:(?<=[^\W_{_DECOMPOSED}])(?=[ \n])|(?<=\n)(?=[^\S\r\n]*[^\s/]))"
)

# The regexes by which tokenizers split a text into words, as tokenizer.json contains them.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITE_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
QWEN2 = (  # Qwen 3 has the same regex.
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _WHITE_SPACE
)
QWEN35 = (  # Unlike QWEN2, this regex keeps a letter and its combining marks together.
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    + _WHITE_SPACE
)
LLAMA3 = (  # The encoding cl100k of GPT-4 has the same regex.
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _WHITE_SPACE
)
O200K = (  # the regex of GPT-4o
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _WHITE_SPACE
)
GPT2 = "gpt2"  # for GPT-2's regex, which is built into ByteLevel and is not in tokenizer.json

# The split points for each regex.
SPLITS = {
    GPT2: GPT2_SPLIT_POINT,
    QWEN2: LINE_SPLIT_POINT,
    QWEN35: LINE_SPLIT_POINT,
    LLAMA3: LINE_SPLIT_POINT,
    O200K: LINE_SPLIT_POINT,
}


def split_point_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern that matches up to the last place where a text can be split.

    Returns:
        None if texts cannot be split for this tokenizer, or if that is not known.
    """
    pre_tokenizer = definition.component(tokenizer, "pre_tokenizer") or {}
    if pre_tokenizer.get("pattern") == {"Regex": r"[\s\S]"}:
        return GPT2_SPLIT_POINT  # each character is a word, so every place is a split point
    if definition.component(tokenizer, "normalizer") not in (None, {"type": "NFC"}):
        return None
    for token in tokenizer.get_added_tokens_decoder().values():
        # Special tokens in a text are ordinary text. Others are matched before words are split.
        if not token.special and _may_cross_split_point(token):
            return None
    return SPLITS.get(word_regex(pre_tokenizer) or "")


def _may_cross_split_point(added_token: AddedToken) -> bool:
    """Return whether a split could cut an added token, or the text around it that it removes."""
    depends_on_context = added_token.lstrip or added_token.rstrip or added_token.single_word
    return depends_on_context or not re.fullmatch(r"\S+|[ \t]+", added_token.content)


def word_regex(pre_tokenizer: dict[str, Any]) -> str | None:
    """Return the regex by which a byte-level tokenizer splits a text into words.

    Args:
        pre_tokenizer: the entry pre_tokenizer of the tokenizer's JSON.

    Returns:
        The regex, "gpt2" for GPT-2's regex, or None if the pre-tokenizer does more than split
        words.
    """
    match pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return GPT2
        case [
            {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": regex}},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return regex
    return None


def cut(text: str, size: int, split_point: re.Pattern[str] | None) -> Iterator[str]:
    """Yield pieces of a text of up to this many characters, or longer ones without a split point.

    Args:
        split_point: see ``split_point_pattern``. With None, the text is one piece.
    """
    begin = 0
    while split_point and len(text) - begin > size:
        match = split_point.match(text[begin : begin + size])
        if not match or not match.end():
            break
        yield text[begin : begin + match.end()]
        begin += match.end()
    yield text[begin:]


def pieces(
    rows: Iterable[NumberedRow], split_point: re.Pattern[str] | None
) -> Iterator[NumberedRow]:
    """Join the rows of each document, and split documents of several rows at split points.

    A piece has the number of the first row of its document.

    Args:
        split_point: see ``split_point_pattern``. With None, each document is one piece.

    Raises:
        BadInput: a text of several rows is too long and has no split point.
    """
    text: str | None = None  # text of the current document, without the pieces that were yielded
    first_row = 0  # first row of the current document
    has_begun = False  # whether a piece of the current document has been yielded
    # An additional row, after which the last document is yielded.
    end = (-1, NoText(""), True)
    for row, row_text, begins_document in chain(rows, [end]):
        if text is not None and (begins_document or isinstance(row_text, NoText)):
            yield first_row, text, not has_begun
            text = None
        if isinstance(row_text, NoText):
            if row >= 0:
                yield row, row_text, True
        elif text is None:
            text = row_text
            first_row = row
            has_begun = False
        else:
            num_searched = len(text)
            text += row_text
            match = split_point.match(text, num_searched) if split_point else None
            if match:
                yield first_row, text[: match.end()], not has_begun
                text = text[match.end() :]
                has_begun = True
            elif len(text) > MAX_UNSPLIT_CHARACTERS:
                raise BadInput(
                    f"the text that starts in row {first_row} is too long for this tokenizer. It "
                    f"has more than {MAX_UNSPLIT_CHARACTERS:,} characters without a place at which "
                    f"it can be split without changing its ids. Divide the text into several "
                    f"files, or write it as several rows of JSON lines"
                )
