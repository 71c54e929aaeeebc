"""Small tokenizers of the kinds that decode text in different ways."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ursa_minor.data.tokens import tokenizer as tokenization

END_OF_TEXT = tokenization.END_OF_TEXT
WORDS = ["the", "river", "stone", "bank", "n", "'", "t", ".", ",", "é"]
TEXT = "The river's bank isn't stone. Ein Café, 中文 🙂 \n\n  two spaces "


def _wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([END_OF_TEXT])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
    )


def _sentencepiece_backend() -> Tokenizer:
    """Words with and without the mark of a space, single letters, and a token for each byte."""
    letters = sorted({*TEXT, *"".join(WORDS)} - {" ", "文", "🙂", "\n"})
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *(f"▁{word}" for word in WORDS), *letters]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = []
    for word in WORDS:
        made = "▁"
        for letter in word:
            vocabulary.setdefault(made + letter, len(vocabulary))
            merges.append((made, letter))
            made += letter
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    return Tokenizer(model)


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: the normalizer marks spaces, and the decoder strips the first one."""
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
    """As T5's and XLM-R's: the pre-tokenizer marks spaces."""
    backend = _sentencepiece_backend()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _wrapped(backend)


def lower_case_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose normalizer composes accents and lowers case."""
    made = tokenization.train_bpe([TEXT], 300)
    made.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Lowercase()]
    )
    return made


def word_piece() -> PreTrainedTokenizerFast:
    """As BERT's: the decoder puts spaces between words and takes them away before punctuation."""
    letters = sorted({*TEXT.lower(), *"".join(WORDS)} - {" ", "\n"})
    pieces = ["[UNK]", *WORDS, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    return _wrapped(backend)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """As GPT-2's: a token is any sequence of bytes."""
    return tokenization.train_bpe([TEXT], 300)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A token is a character."""
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
