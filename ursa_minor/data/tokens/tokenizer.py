"""Train a Hugging Face tokenizer, encode and decode with one, and count the bytes of tokens.

Every tokenizer has an end-of-text token and can be saved to a folder that ``AutoTokenizer`` loads.
Special tokens that occur in a text are encoded as ordinary text.
"""

import contextlib
import hashlib
import json
import math
import random
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import definition as definitions
from ursa_minor.data.tokens import split_points

# The notations of SentencePiece for a space, and for a byte that is not part of a longer token.
SPACE = "▁"
BYTE = re.compile("<0x[0-9A-F]{2}>")
END_OF_TEXT = "<|endoftext|>"
REPLACEMENT_CHARACTER = "\ufffd"  # in place of invalid bytes in a decoded text
MAX_INCOMPLETE_BYTES = 3  # a character of UTF-8 has at most four
CONTEXT_TOKENS = 64  # earlier tokens that are decoded together with new ones
# Longer words (in bytes) are split before a tokenizer is trained, because the training time grows
# with the square of the length of a word. Natural words and identifiers are shorter.
LONGEST_WORD = 1024
SAMPLE_TOKENS = 100_000  # number of tokens for which fastokens is compared with tokenizers
SAMPLE_TEXT_TOKENS = 500  # tokens of each text in this sample
MAX_SHOWN_CHARACTERS = 10  # characters that a message lists
# Texts that two implementations of a regex or of BPE could encode differently.
HARD_TEXTS = [
    "",
    " " * 5000 + "a" + " " * 5000,
    "\t\ta \t b\r\n\r\n  c\n\n\n d \n e\r\r f\v\fg   \n",
    "a\x00b \x00\x00 \x1c \x1d\x1e\x1f \x7f\x85 \u00a0x\u1680y\u180ez\u2009 "
    "\u200b\u2028\u2029\u202f \u3000 \ufeff\ufffd",
    "I'll don't we've he'd 's 'S ''s 't's'll 're'm I'M 'l 'v x''d ' s'",
    "0 1 12 123 1234567890 1,234.5 x1y2 ²³ ½ Ⅷ ٣٤ १२ ①a1",
    "e\u0301 ne\u0301e \u0301\u0301 ñ straße ﬁ İi̇ Ǆ ʼn ª º",
    "中文 漢字。かな「カナ」한국어 ภาษาไทย हिन्दी العربية עברית ქართული \U00020000\U000323af",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 "
    "\U0001f1e9\U0001f1ea❤\ufe0f \U0010ffff\ue000",
    "<|endoftext|> <|endoftext|>x<|endof text|>",
    "a" * 10_000,
    "=" * 3000 + "-" * 3000 + "!?" * 1000 + "中" * 1000 + "\U0001f600" * 1000,
]


def train_bpe(
    texts: Iterable[str], vocab_size: int, split: str = "qwen35"
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE, which has no unknown token.

    Args:
        texts: the texts to train on.
        vocab_size: the maximum number of ids.
        split: the regex that splits a text into words: "gpt2" or "qwen35" (Qwen 3.5's). The latter
            keeps a letter and its marks together, while GPT-2's ends a word at each vowel sign of
            Hindi or Khmer. Words longer than LONGEST_WORD are divided for the training, so that no
            token is longer.
    """
    words: list[Any]
    if split == "gpt2":
        words = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    else:
        words = [
            pre_tokenizers.Split(Regex(split_points.QWEN35), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    limit_length = pre_tokenizers.FixedLength(LONGEST_WORD)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, limit_length])
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words[0] if len(words) == 1 else pre_tokenizers.Sequence(words)
    return _wrap(tokenizer)


def make_characters(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Create a tokenizer with one id for each character of the texts, in code-point order.

    The end-of-text token has the last id.
    """
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    vocabulary = {character: i for i, character in enumerate(sorted(characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return _wrap(tokenizer)


class EncodedTexts(NamedTuple):
    """The ids of several texts.

    Attributes:
        ids: (tokens,) uint32, the ids of all texts. The array may be read-only.
        offsets: (texts + 1,) int64. The ids of text i are ``ids[offsets[i] : offsets[i + 1]]``.
    """

    ids: np.ndarray
    offsets: np.ndarray

    def of_each_text(self) -> list[np.ndarray]:
        """Return the ids of each text, (tokens,) uint32."""
        return [self.ids[begin:end] for begin, end in pairwise(self.offsets)]


class Encoder:
    """Encode texts without adding special tokens. Those that occur in a text are ordinary text.

    The dropout, truncation and padding of the tokenizer are ignored. Several threads may call an
    encoder at the same time, because a call changes no setting.

    Attributes:
        fast: a fastokens.Tokenizer with the same ids, which ``make_encoder`` sets, or None.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        self.fast: Any = None
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        if getattr(self._backend.model, "dropout", None):
            self._backend.model.dropout = None

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer with the settings of this encoder. Do not change it."""
        return self._backend

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, (tokens,) uint32. The arrays may be read-only.

        Raises:
            BadInput: a text contains a lone surrogate or a character without an id.
        """
        return self.encode(texts).of_each_text()

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Encode texts with fastokens if possible, otherwise with tokenizers.

        Raises:
            BadInput: a text contains a lone surrogate or a character without an id.
        """
        if self.fast is not None:
            # Without success, for example because of a lone surrogate, tokenizers encodes the texts
            # or reports the problem.
            with contextlib.suppress(Exception):
                ids, offsets = self.fast.encode_batch_flat(list(texts), split_special_tokens=True)
                return EncodedTexts(
                    np.frombuffer(ids, dtype=np.uint32), np.frombuffer(offsets, dtype=np.int64)
                )
        return self.encode_with_tokenizers(texts)

    def encode_with_tokenizers(self, texts: Sequence[str]) -> EncodedTexts:
        """Encode texts with tokenizers. Raises BadInput as ``encode``."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:
            raise BadInput(_describe_failure(self.tokenizer, texts, error)) from None
        ids_of_texts = [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        lengths = [len(ids) for ids in ids_of_texts]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        ids = np.concatenate([np.empty(0, dtype=np.uint32), *ids_of_texts])
        return EncodedTexts(ids, offsets)


def make_encoder(tokenizer: PreTrainedTokenizerFast) -> Encoder:
    """Return the fastest encoder with the ids of a tokenizer.

    It uses fastokens for a byte-level BPE with a known split, if both libraries encode a sample in
    the same way: every token next to random others, which is harder than natural text, and
    HARD_TEXTS.
    """
    encoder = Encoder(tokenizer)
    fast = _as_fastokens(encoder)
    if fast is None:
        return encoder
    texts = [*_random_texts(_bytes_of_tokens(tokenizer)), *HARD_TEXTS]
    expected = encoder.encode_with_tokenizers(texts)
    encoder.fast = fast
    fast_result = encoder.encode(texts)
    if not all(map(np.array_equal, fast_result, expected)):
        encoder.fast = None
    return encoder


def _random_texts(tokens: list[bytes]) -> list[str]:
    """Return texts of at least SAMPLE_TOKENS tokens, which contain each token at least once."""
    repetitions = math.ceil(SAMPLE_TOKENS / len(tokens))
    shuffled = tokens * repetitions
    random.Random(0).shuffle(shuffled)
    texts = []
    for start in range(0, len(shuffled), SAMPLE_TEXT_TOKENS):
        some_tokens = shuffled[start : start + SAMPLE_TEXT_TOKENS]
        text = b"".join(some_tokens)
        texts.append(text.decode("utf-8", "replace"))
    return texts


def encode_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the ids of a prompt. They are never empty.

    An empty prompt is the beginning of a document, which is the end-of-text token.
    """
    ids = Encoder(tokenizer)([text])[0].tolist()
    return ids or [tokenizer.eos_token_id]


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of ids, without special tokens and without an incomplete last character."""
    text = _decode_all(tokenizer, ids)
    if not text.endswith(REPLACEMENT_CHARACTER):
        return text
    # If the last character is incomplete, a decoder with byte fallback makes every byte of the
    # sequence invalid. So the bytes of this character are dropped first.
    for count in range(1, MAX_INCOMPLETE_BYTES + 1):
        if not all(_is_byte(tokenizer, token_id) for token_id in ids[-count:]):
            break
        shorter = _decode_all(tokenizer, ids[:-count])
        if not shorter.endswith(REPLACEMENT_CHARACTER):
            return shorter
    return text.rstrip(REPLACEMENT_CHARACTER)


def decode_continuation(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], new_ids: Sequence[int]
) -> str:
    """Return the text that new ids add to the text of a prompt, as ``Continuation`` decodes it."""
    continuation = Continuation(tokenizer, prompt_ids)
    return continuation.add(new_ids) + continuation.finish()


class Continuation:
    """Decode the ids that follow a prompt, in pieces that no later id changes.

    New ids are decoded together with those before them. Decoded alone, the first word would lose
    its space with a tokenizer like SentencePiece's, and a character of several tokens would be
    lost. The decoded prompt followed by all pieces is ``decode`` of the prompt's and the new ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids)  # the last ids of the text, with which new ids are decoded
        self._num_returned = len(self._ids)  # number of these ids whose text was returned
        self._returned = decode(tokenizer, self._ids)  # the text of the returned ids
        self._shorten()

    def add(self, new_ids: Sequence[int]) -> str:
        """Return the text that these ids complete, or an empty string if they complete none."""
        if not new_ids:
            return ""
        self._ids += new_ids
        text = _decode_all(self._tokenizer, self._ids)
        if text.endswith(REPLACEMENT_CHARACTER) or self._ends_in_byte():
            return ""  # the next ids may belong to the same character
        return self._return_new_text(text)

    def finish(self) -> str:
        """Return the rest of the text, without an incomplete character at its end."""
        return self._return_new_text(decode(self._tokenizer, self._ids))

    def _return_new_text(self, text: str) -> str:
        """Return the part of a text that was not returned before, and remember the text.

        Args:
            text: the decoded ids.
        """
        if text.startswith(self._returned):
            piece = text.removeprefix(self._returned)
        else:
            # The prompt ended in invalid bytes, which decode differently together with the new
            # ones. Decode the new ids alone.
            piece = decode(self._tokenizer, self._ids[self._num_returned :])
        self._returned = text
        self._num_returned = len(self._ids)
        self._shorten()
        return piece

    def _ends_in_byte(self) -> bool:
        """Return whether the last token is a byte. Tokens without text are skipped."""
        for token_id in reversed(self._ids):
            if _is_byte(self._tokenizer, token_id):
                return True
            if _decode_all(self._tokenizer, [token_id]):
                return False
        return False

    def _shorten(self) -> None:
        """Keep only the last ids, so that the time of decoding does not grow with the text.

        These ids must contain text, because decoders change the beginning of a text.
        """
        if len(self._ids) < 2 * CONTEXT_TOKENS:
            return
        last_ids = self._ids[-CONTEXT_TOKENS:]
        text = decode(self._tokenizer, last_ids)
        if text.strip():
            self._ids = last_ids
            self._num_returned = len(last_ids)
            self._returned = text


def _decode_all(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of ids, without special tokens. Spaces before punctuation are kept."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _is_byte(tokenizer: PreTrainedTokenizerBase, token_id: int) -> bool:
    """Return whether a token is a byte in SentencePiece's notation, such as <0xE4>."""
    token = tokenizer.convert_ids_to_tokens(token_id)
    return token is not None and BYTE.fullmatch(token) is not None


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Return the number of bytes of text that each id represents, (vocabulary,) int64.

    Special tokens represent no text. The notation of the vocabulary decides how bytes are counted:

    - byte-level (GPT-2): each byte is one character, see ``bytes_to_unicode``
    - SentencePiece (Llama 2): a space is "▁", and a byte that no other token contains is <0xE4>
    - others: the decoded tokens are counted
    """
    token_ids = range(len(tokenizer))
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(token_ids))]
    decoder = definitions.component(tokenizer.backend_tokenizer, "decoder")
    if '"ByteLevel"' in json.dumps(decoder):
        counts = [len(token) for token in tokens]
    elif marks_spaces(tokenizer):
        counts = [_sentencepiece_bytes(token) for token in tokens]
    else:
        decoded_tokens = [tokenizer.decode([token_id]) for token_id in token_ids]
        counts = [len(text.encode()) for text in decoded_tokens]
    table = np.array(counts, dtype=np.int64)
    # Added tokens are stored as they occur in the text.
    for token_id, token in tokenizer.added_tokens_decoder.items():
        table[token_id] = len(token.content.encode())
    special_ids = [token_id for token_id in tokenizer.all_special_ids if token_id in token_ids]
    table[special_ids] = 0
    return table


def _sentencepiece_bytes(token: str) -> int:
    """Return the number of bytes of text that a token in SentencePiece's notation represents."""
    if BYTE.fullmatch(token):
        return 1
    return len(token.replace(SPACE, " ").encode())


def marks_spaces(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether a tokenizer writes spaces like SentencePiece.

    Such a tokenizer may add one space before a text.
    """
    decoder = definitions.component(tokenizer.backend_tokenizer, "decoder")
    return f'"{SPACE}"' in json.dumps(decoder, ensure_ascii=False)


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a SHA-256 of those parts of a tokenizer's definition that decide the ids of a text."""
    definition = definitions.complete(tokenizer.backend_tokenizer)
    names = ("model", "pre_tokenizer", "normalizer", "added_tokens")
    parts = {name: definition[name] for name in names}
    document = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _as_fastokens(encoder: Encoder) -> Any:
    """Return a fastokens.Tokenizer with the ids of an encoder, or None if it is not used."""
    try:
        import fastokens
    except ImportError:
        return None
    text = encoder.backend.to_str()
    definition = json.loads(text)
    regex = split_points.word_regex(definition["pre_tokenizer"] or {})
    vocabulary = definition["model"].get("vocab", {})
    has_all_bytes = set(bytes_to_unicode().values()) <= set(vocabulary)
    if regex not in split_points.SPLITS or not _is_plain_bpe(definition) or not has_all_bytes:
        return None
    try:
        return fastokens.Tokenizer.from_json_str(text)
    except Exception:  # a part of the definition is not supported
        return None


def _bytes_of_tokens(tokenizer: PreTrainedTokenizerFast) -> list[bytes]:
    """Return the bytes of each token of a byte-level BPE, without added tokens."""
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    added_tokens = {token.content for token in tokenizer.added_tokens_decoder.values()}
    ordinary_tokens = sorted(vocabulary.keys() - added_tokens, key=vocabulary.__getitem__)
    return [bytes(byte_of[character] for character in token) for token in ordinary_tokens]


def _is_plain_bpe(definition: dict[str, Any]) -> bool:
    """Return whether the JSON of a tokenizer defines a BPE without options that change the ids."""
    model = definition["model"]
    if model["type"] != "BPE":
        return False
    options = (
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
    )
    has_options = any(model[option] for option in options)
    # Added tokens that are not special are matched in the text before words are split.
    all_special = all(token["special"] for token in definition["added_tokens"])
    keeps_text = definition["normalizer"] in (None, {"type": "NFC"})
    return not has_options and keeps_text and all_special


def _describe_failure(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], error: Exception
) -> str:
    """Return the message for texts that a tokenizer cannot encode."""
    text = "".join(texts)
    tokens = set(tokenizer.get_vocab())
    ordinary_tokens = tokens - set(tokenizer.all_special_tokens)
    has_characters_only = all(len(token) == 1 for token in ordinary_tokens)
    unknown = sorted(set(text) - tokens)
    if has_characters_only and unknown:
        shown = " ".join(map(repr, unknown[:MAX_SHOWN_CHARACTERS]))
        if len(unknown) > MAX_SHOWN_CHARACTERS:
            shown += " ..."
        return (
            f"the character tokenizer has no id for {shown}, because the text that it was created "
            f"from does not contain these characters. Remove them from this text"
        )
    surrogate = re.search("[\ud800-\udfff]", text)
    if surrogate:
        return (
            f"the tokenizer cannot encode this text, because {surrogate[0]!r} is half of a "
            f"surrogate pair, not a character. Remove it from the text"
        )
    return f"the tokenizer cannot encode this text ({error}). Change the text"
