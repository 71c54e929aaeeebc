"""Text to ids and back: a Hugging Face tokenizer, loaded or made from the text, and its bytes per token.

Every tokenizer here has an end-of-text token, saves to a folder that ``AutoTokenizer`` loads, and treats special
tokens that stand in the text as ordinary text.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from .errors import BadInput

END_OF_TEXT = "<|endoftext|>"


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE like GPT-2's (same split, no unknown token) of at most ``vocab_size`` ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
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


def load(name: str) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer from a folder or the Hub.

    Raises BadInput when it cannot be had, has no fast form, or has no end-of-text token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=False)
    except Exception as error:  # the Hub client, the cache and the parsers each raise their own kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(
            f"tokenizer = {name}: cannot be loaded ({reason}). Give a folder with tokenizer.json, a Hub id that this "
            f"machine can reach, or bpe or characters to make one from the text"
        ) from None
    if not getattr(tokenizer, "is_fast", False):
        raise BadInput(f"tokenizer = {name}: has no fast (tokenizers) form; choose one that has tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise BadInput(f"tokenizer = {name}: has no end-of-text (eos) token to join documents with")
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield each document's ids, (n,) uint32: the end-of-text token, then its text.

    The token stands first, as in llm.c, so that a model asked to go on from it begins a document.
    Raises BadInput for a text that the tokenizer cannot write (a character that it has no id for).
    """
    backend = tokenizer.backend_tokenizer
    before = backend.encode_special_tokens
    backend.encode_special_tokens = True  # "<|endoftext|>" in a text is text, not the end of it
    try:
        encodings = backend.encode_batch_fast(list(documents), add_special_tokens=False)
    except Exception as error:
        raise BadInput(_cannot_write(tokenizer, documents, error)) from None
    finally:
        backend.encode_special_tokens = before
    for encoding in encodings:
        yield np.array([tokenizer.eos_token_id, *encoding.ids], dtype=np.uint32)


def encode_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return a prompt's ids; an empty prompt is the beginning of a document."""
    (ids,) = encode(tokenizer, [text])
    return ids.tolist() if not text else ids[1:].tolist()


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Return how many bytes of text each id stands for, (vocabulary,) int64; special tokens stand for none.

    A byte-level vocabulary writes each byte as one character (GPT-2's bytes_to_unicode); any other is decoded.
    """
    size = len(tokenizer)
    texts = tokenizer.convert_ids_to_tokens(list(range(size)))
    if '"ByteLevel"' in json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]):
        counts = [len(text) if text is not None else 0 for text in texts]
    else:
        counts = [len(tokenizer.decode([i]).encode("utf-8")) for i in range(size)]
    table = np.array(counts, dtype=np.int64)
    table[[i for i in tokenizer.all_special_ids if i < size]] = 0
    return table


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a SHA-256 that changes when any id could: of the tokenizer's whole definition."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = {name: definition[name] for name in ("model", "pre_tokenizer", "normalizer", "added_tokens")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer's files into ``folder``, as ``AutoTokenizer.from_pretrained`` reads them."""
    tokenizer.save_pretrained(folder)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _cannot_write(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str], error: Exception) -> str:
    known = tokenizer.get_vocab()
    unknown = sorted(set("".join(documents)) - set(known))
    if all(len(token) == 1 for token in known if token not in tokenizer.all_special_tokens) and unknown:
        shown = " ".join(map(repr, unknown[:10])) + (" ..." if len(unknown) > 10 else "")
        return f"the character tokenizer has no id for {shown}: they do not stand in the text it was made from"
    return f"the tokenizer cannot write this text: {error}"
