"""Text to ids and back: a Hugging Face tokenizer, loaded or made from the text, and its bytes per token.

Every tokenizer here has an end-of-text token, saves to a folder that ``AutoTokenizer`` loads, and treats special
tokens that stand in the text as ordinary text.
"""

import contextlib
import hashlib
import json
import random
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ursa_minor.base import model_id
from ursa_minor.base.errors import BadInput, first_line
from ursa_minor.data.tokens import split_points

SPACE, BYTE = "▁", re.compile("<0x[0-9A-F]{2}>")  # as SentencePiece writes a space, and a lone byte
END_OF_TEXT = "<|endoftext|>"
REPLACEMENT_CHARACTER = "\ufffd"  # what bytes that make no character are decoded to
MAX_INCOMPLETE_BYTES = 3  # a character of UTF-8 has at most four
CONTEXT_TOKENS = 64  # decoded before new ones
LONGEST_WORD = 1024  # the time to learn from a word grows with its square; no language's and no code's comes near
SAMPLE_TOKENS = 100_000  # at least so many must come out alike from tiktoken and tokenizers, each of them once or more
HARD_TEXTS = [  # where two splitters or two merge loops could part
    "",
    " " * 5000 + "a" + " " * 5000,
    "\t\ta \t b\r\n\r\n  c\n\n\n d \n e\r\r f\v\fg   \n",
    "a\x00b \x00\x00 \x1c \x1d\x1e\x1f \x7f\x85 \u00a0x\u1680y\u180ez\u2009 \u200b\u2028\u2029\u202f \u3000 \ufeff\ufffd",
    "I'll don't we've he'd 's 'S ''s 't's'll 're'm I'M 'l 'v x''d ' s'",
    "0 1 12 123 1234567890 1,234.5 x1y2 ²³ ½ Ⅷ ٣٤ १२ ①a1",
    "e\u0301 ne\u0301e \u0301\u0301 ñ straße ﬁ İi̇ Ǆ ʼn ª º",
    "中文 漢字。かな「カナ」한국어 ภาษาไทย हिन्दी العربية עברית ქართული \U00020000\U000323af",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea❤\ufe0f \U0010ffff\ue000",
    "<|endoftext|> <|endoftext|>x<|endof text|>",
    "a" * 10_000,
    "=" * 3000 + "-" * 3000 + "!?" * 1000 + "中" * 1000 + "\U0001f600" * 1000,
]


def train_bpe(
    texts: Iterable[str], vocab_size: int, split: str = "qwen35"
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE (no unknown token) of at most ``vocab_size`` ids.

    ``split``, the regex that parts words: gpt2, or Qwen 3.5's, which keeps a letter and its marks together (GPT-2's ends
    a word at each vowel sign of Hindi or Khmer).

    What the split leaves whole is learnt from in pieces of LONGEST_WORD bytes: no token is longer.
    """
    tokenizer = Tokenizer(models.BPE())
    words: list[Any] = (
        [] if split == "gpt2" else [pre_tokenizers.Split(Regex(split_points.QWEN35), "isolated")]
    )
    words.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*words, pre_tokenizers.FixedLength(LONGEST_WORD)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words[0] if split == "gpt2" else pre_tokenizers.Sequence(words)
    return _wrap(tokenizer)


def make_characters(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one id a character of ``texts``, in code-point order, and the end of text."""
    characters = sorted(set().union(*map(set, texts)))
    vocabulary = {character: i for i, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return _wrap(tokenizer)


def load(name: str, of_model: bool = False) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer from a folder or the Hub.

    Args:
        name: a folder, or an id of the Hub, which may end in @REVISION.
        of_model: the tokenizer is a model's own, not one that a recipe names.

    Raises BadInput when it cannot be had, has no fast form, or has no end-of-text token.
    """
    # Imported here, because it imports torch, which reading text does not need.
    from transformers import (
        AutoTokenizer,
    )

    option = "--model " if of_model else "tokenizer = "
    where = f"{option}{name}"
    location, revision = model_id.parse(name, option)
    at_revision = {"revision": revision} if revision else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            location, use_fast=True, trust_remote_code=False, **at_revision
        )
    except (
        Exception
    ) as error:  # the Hub client, the cache and the parsers each raise their own kinds
        fix = "a folder with tokenizer.json, or a Hub id that this machine can reach"
        fix += "" if of_model else "; bpe or characters makes one from the text"
        raise BadInput(f"{where}: cannot be loaded ({first_line(error)}). Give {fix}") from None
    if not getattr(tokenizer, "is_fast", False):
        raise BadInput(
            f"{where}: has no fast (tokenizers) form; choose one that has tokenizer.json"
        )
    # Transformers created it from the config of a model.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise BadInput(
            f"{where}: holds no tokenizer; give the one of the model's training: a folder or a Hub id"
        )
    if tokenizer.eos_token_id is None:
        raise BadInput(f"{where}: has no end-of-text (eos) token to join documents with")
    return tokenizer


class Encoder:
    """Texts to ids, without any special token; one that stands in a text is ordinary text.

    It may be called from several threads at once, and is then what it is alone: nothing is set around a call. The
    tokenizer's own truncation and padding are left out.

    Attributes:
        tiktoken: the same merge table, where ``make_encoder`` has proved that, and makes the ids; else None.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        self.tiktoken: Any = None
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, (n,) uint32, maybe read-only.

        Raises BadInput for a text that the tokenizer cannot write: a character that it has no id for, a lone surrogate.
        """
        if self.tiktoken is not None:
            # About a million spaces overflow its regex's stack, and it takes no half of a surrogate pair.
            with contextlib.suppress(ValueError):
                return [
                    self.tiktoken.encode_to_numpy(text, disallowed_special=()) for text in texts
                ]
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:
            raise BadInput(_cannot_write(self.tokenizer, texts, error)) from None
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def make_encoder(tokenizer: PreTrainedTokenizerFast) -> Encoder:
    """Return the fastest encoder that gives the tokenizer's ids: tiktoken's when it is a BPE of a kind that both know.

    Its merge table is proved to mean the same, and both libraries encode every token in random company (harsher than
    natural text) and hard texts; any difference leaves the work to ``tokenizers``. Takes about a second for GPT-2.
    """
    encoder = Encoder(tokenizer)
    tiktoken = _as_tiktoken(tokenizer)
    if tiktoken is not None:
        tokens = tiktoken.token_byte_values()
        drawn = tokens * -(-SAMPLE_TOKENS // len(tokens))
        random.Random(0).shuffle(drawn)
        joined = [b"".join(drawn[start : start + 500]) for start in range(0, len(drawn), 500)]
        texts = [*(text.decode("utf-8", "replace") for text in joined), *HARD_TEXTS]
        wanted = encoder(texts)
        encoder.tiktoken = tiktoken
        if not all(map(np.array_equal, encoder(texts), wanted)):
            encoder.tiktoken = None
    return encoder


def encode_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return a prompt's ids; an empty prompt is the beginning of a document, which is the end-of-text token."""
    return Encoder(tokenizer)([text])[0].tolist() or [tokenizer.eos_token_id]


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of ids, without special tokens and without an incomplete character at its end."""
    text = _decode_all(tokenizer, ids)
    if not text.endswith(REPLACEMENT_CHARACTER):
        return text
    # A decoder with byte fallback makes every byte of a sequence invalid if its last character is
    # incomplete, so these bytes are dropped first.
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
        self._ids = list(prompt_ids)  # of the text before, as far as it matters, and the new ones
        self._num_returned = len(self._ids)  # the first of them, whose text has been returned
        self._returned = decode(tokenizer, self._ids)
        self._shorten()

    def add(self, new_ids: Sequence[int]) -> str:
        """Return the text that is complete with these ids; an empty text if there is none."""
        if not new_ids:
            return ""
        self._ids += new_ids
        text = _decode_all(self._tokenizer, self._ids)
        if text.endswith(REPLACEMENT_CHARACTER) or self._ends_in_byte():
            return ""  # the next ids may belong to the same character
        return self._take(text)

    def finish(self) -> str:
        """Return the rest of the text, without an incomplete character at its end."""
        return self._take(decode(self._tokenizer, self._ids))

    def _take(self, text: str) -> str:
        piece = text.removeprefix(self._returned)
        if not text.startswith(self._returned):  # invalid bytes that continue those of the prompt
            piece = decode(self._tokenizer, self._ids[self._num_returned :])
        self._returned = text
        self._num_returned = len(self._ids)
        self._shorten()
        return piece

    def _ends_in_byte(self) -> bool:
        """Return whether the last token is a byte. Tokens without a text, such as special ones, are skipped."""
        for token_id in reversed(self._ids):
            if _is_byte(self._tokenizer, token_id):
                return True
            if _decode_all(self._tokenizer, [token_id]):
                return False
        return False

    def _shorten(self) -> None:
        """Forget the ids before the last ones, so that decoding takes no longer for a longer text.

        The last ids must have a text of their own, because decoders change its beginning.
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
    """Return the text of ids without special tokens; spaces before punctuation are kept."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _is_byte(tokenizer: PreTrainedTokenizerBase, token_id: int) -> bool:
    """Return whether a token is a byte as SentencePiece writes it, such as <0xE4>."""
    token = tokenizer.convert_ids_to_tokens(token_id)
    return token is not None and BYTE.fullmatch(token) is not None


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Return how many bytes of text each id stands for, (vocabulary,) int64; special tokens stand for none.

    A byte-level vocabulary writes each byte as one character (GPT-2's bytes_to_unicode), SentencePiece's (Llama 2) a space
    as a mark and a byte that no token holds as <0xE4>; any other is decoded.
    """
    size = len(tokenizer)
    texts = tokenizer.convert_ids_to_tokens(list(range(size)))
    decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
    if '"ByteLevel"' in decoder:
        counts = [len(text) if text is not None else 0 for text in texts]
    elif marks_spaces(tokenizer):
        counts = [
            1 if BYTE.fullmatch(text or "") else len((text or "").replace(SPACE, " ").encode())
            for text in texts
        ]
    else:
        counts = [len(tokenizer.decode([i]).encode("utf-8")) for i in range(size)]
    table = np.array(counts, dtype=np.int64)
    table[[i for i in tokenizer.all_special_ids if i < size]] = 0
    return table


def marks_spaces(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether a tokenizer writes spaces as SentencePiece does, which may set one more before a text."""
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
    return f'"{SPACE}"' in json.dumps(decoder, ensure_ascii=False)


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a SHA-256 that changes when any id could: of the tokenizer's whole definition."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = {
        name: definition[name] for name in ("model", "pre_tokenizer", "normalizer", "added_tokens")
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _as_tiktoken(tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return a tiktoken.Encoding with the tokenizer's merge table, or None where the table would not mean the same.

    tiktoken joins the two neighbors whose bytes together have the lowest id; a Hugging Face BPE joins the two that
    stand first in its list of merges. The two agree on every text when ids rise along that list and every token's own
    bytes merge to that token. For take the first time that tiktoken joins neighbors x, y to a token t which the list
    makes of others, a, b: until then nothing was joined across the ends of t's bytes, so inside them the same was
    joined as when t stands alone; there its last two parts are a, b, and here x, y.
    """
    try:
        import tiktoken

        # GPT-2's pattern, written so that it runs faster.
        from tiktoken_ext.openai_public import (
            r50k_pat_str,
        )
    except ImportError:
        return None
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = definition["model"], definition["added_tokens"]
    regex = split_points.word_regex(definition["pre_tokenizer"] or {})
    options = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if (
        model["type"] != "BPE"
        or any(model[name] for name in (*options, "byte_fallback", "ignore_merges"))
        or definition["normalizer"] is not None
        or regex not in split_points.SPLITS
        or not all(token["special"] for token in added)  # any other is searched for in the text
        or tokenizer.eos_token_id is None
    ):
        return None
    vocabulary = {
        text: i
        for text, i in model["vocab"].items()
        if text not in {token["content"] for token in added}
    }
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    merged = [left + right for left, right in model["merges"]]
    if vocabulary.keys() != {*byte_of, *merged}:
        return None
    if any(vocabulary[earlier] >= vocabulary[later] for earlier, later in pairwise(merged)):
        return None
    tokenize = tokenizer.backend_tokenizer.model.tokenize
    if any([token.id for token in tokenize(text)] != [i] for text, i in vocabulary.items()):
        return None
    return tiktoken.Encoding(
        "the tokenizer's BPE",
        pat_str=r50k_pat_str if regex == "gpt2" else regex,
        mergeable_ranks={
            bytes(map(byte_of.__getitem__, text)): i for text, i in vocabulary.items()
        },
        # An unused special token: without one, tiktoken is 3 times slower.
        special_tokens={tokenizer.eos_token: tokenizer.eos_token_id},
    )


def _cannot_write(
    tokenizer: PreTrainedTokenizerFast, documents: Sequence[str], error: Exception
) -> str:
    known, text = tokenizer.get_vocab(), "".join(documents)
    unknown = sorted(set(text) - set(known))
    if (
        all(len(token) == 1 for token in known if token not in tokenizer.all_special_tokens)
        and unknown
    ):
        shown = " ".join(map(repr, unknown[:10])) + (" ..." if len(unknown) > 10 else "")
        return f"the character tokenizer has no id for {shown}: they do not stand in the text it was made from"
    if half := re.search("[\ud800-\udfff]", text):
        return f"the tokenizer cannot write this text: {half[0]!r} is half of a surrogate pair, no character"
    return f"the tokenizer cannot write this text: {error}"
