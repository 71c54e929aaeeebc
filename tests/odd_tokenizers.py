"""Small tokenizers of different types, which decode text in different ways."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ursa_minor.data.tokens import tokenizer as tokenization

END_OF_TEXT = tokenization.END_OF_TEXT
WORDS = ["the", "river", "stone", "bank", "n", "'", "t", ".", ",", "é"]
TEXT = "The river's bank isn't stone. Ein Café, 中文 🙂 \n\n  two spaces "


def _wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Return a Transformers tokenizer of this backend, with an end-of-text token."""
    backend.add_special_tokens([END_OF_TEXT])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
    )


def _sentencepiece_backend() -> Tokenizer:
    """Return a BPE of the words, single letters and one token per byte.

    Each word exists with and without the character that marks a space.
    """
    letters = sorted({*TEXT, *"".join(WORDS)} - {" ", "文", "🙂", "\n"})
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *(f"▁{word}" for word in WORDS), *letters]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = []
    for word in WORDS:
        prefix = "▁"
        for letter in word:
            vocabulary.setdefault(prefix + letter, len(vocabulary))
            merges.append((prefix, letter))
            prefix += letter
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    return Tokenizer(model)


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like that of Llama 2.

    The normalizer marks spaces, and the decoder strips the first one.
    """
    backend = _sentencepiece_backend()
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    return _wrapped(backend)


def metaspace_tokenizer(scheme: str = "first") -> PreTrainedTokenizerFast:
    """Return a tokenizer like those of T5 and XLM-R: the pre-tokenizer marks spaces."""
    backend = _sentencepiece_backend()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _wrapped(backend)


def lower_case_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE whose normalizer composes accents and lowers case."""
    tokenizer = tokenization.train_bpe([TEXT], 300)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Lowercase()]
    )
    return tokenizer


def word_piece() -> PreTrainedTokenizerFast:
    """Return a tokenizer like that of BERT.

    The decoder inserts spaces between words and removes those before punctuation.
    """
    letters = sorted({*TEXT.lower(), *"".join(WORDS)} - {" ", "\n"})
    continuations = [f"##{letter}" for letter in letters]
    pieces = ["[UNK]", *WORDS, *letters, *continuations]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    return _wrapped(backend)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, like that of GPT-2."""
    return tokenization.train_bpe([TEXT], 300)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are single characters."""
    return tokenization.make_characters([TEXT])


TOKENIZERS = {
    "llama": llama_tokenizer,
    "metaspace_first": metaspace_tokenizer,
    "metaspace_always": lambda: metaspace_tokenizer("always"),
    "metaspace_never": lambda: metaspace_tokenizer("never"),
    "lower_case": lower_case_tokenizer,
    "word_piece": word_piece,
    "byte_level": byte_level_tokenizer,
    "characters": character_tokenizer,
}
