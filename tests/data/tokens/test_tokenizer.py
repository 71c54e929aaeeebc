"""Text to ids and back, the same after saving, each id's bytes; tiktoken's ids are the tokenizer's, or it is not used."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken_ext.openai_public
from conftest import gpt2_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.encoder import DocumentEncoder

TEXT = "It was — né\u0301e 中文 \U0001f600!\r\n\r\n\tdef f(x):  return x  \x00 a\u00a0b\u2028c\x85 end\n<|endoftext|> <|en"
MAKERS = {
    "bpe": lambda texts: tokenization.train_bpe(texts, 320),
    "bpe of GPT-2's split": lambda texts: tokenization.train_bpe(texts, 320, "gpt2"),
    "characters": tokenization.make_characters,
}


@pytest.fixture(params=MAKERS)
def tokenizer(request):
    return MAKERS[request.param]([TEXT, TEXT + "other"])


def ids_of(tokenizer, text):
    (ids,) = tokenization.Encoder(tokenizer)([text])
    return ids


def test_text_survives_ids_also_of_a_saved_tokenizer_which_has_the_same_fingerprint(
    tokenizer, tmp_path
):
    wanted, before = ids_of(tokenizer, TEXT), tokenization.fingerprint(tokenizer)
    tokenizer("end", truncation=True, max_length=5)
    tokenizer.save_pretrained(tmp_path)
    assert wanted.dtype == np.uint32
    for loaded in (
        tokenizer,
        tokenization.load(str(tmp_path)),
        AutoTokenizer.from_pretrained(tmp_path),
    ):
        assert (
            ids_of(loaded, TEXT).tolist() == wanted.tolist()
            and loaded.decode(wanted.tolist()) == TEXT
        )
        assert (
            len(loaded) == len(tokenizer)
            and loaded.eos_token == loaded.bos_token == "<|endoftext|>"
        )
        assert tokenization.fingerprint(loaded) == before


# Both kinds of BPE are encoded by tiktoken in the same way.
ENCODERS = [(tokenization.Encoder, kind) for kind in MAKERS]
ENCODERS += [(tokenization.make_encoder, "bpe"), (tokenization.make_encoder, "characters")]


@pytest.mark.parametrize(("encode", "tokenizer"), ENCODERS, indirect=["tokenizer"])
def test_end_of_text_written_in_a_text_is_ordinary_text(encode, tokenizer):
    encoder = encode(tokenizer)
    assert (
        tokenizer.eos_token_id not in encoder([TEXT])[0]
        and tokenizer.decode(encoder([TEXT])[0].tolist()) == TEXT
    )
    assert tokenizer.eos_token_id not in tokenization.encode_prompt(tokenizer, "<|endoftext|>")
    assert encoder([]) == [] and [len(ids) for ids in encoder(["", "a"])] == [0, 1]


def test_bytes_of_ids_sum_to_the_bytes_of_the_text(tokenizer):
    table = tokenization.token_bytes(tokenizer)
    assert table.dtype == np.int64 and table.shape == (len(tokenizer),)
    assert table[ids_of(tokenizer, TEXT)].sum() == len(TEXT.encode())
    assert table[tokenizer.eos_token_id] == 0


def test_bytes_of_a_sentencepiece_vocabulary_sum_to_the_bytes_of_the_text_and_its_prefix():
    """Llama 2's kind: a mark for a space, one more before the text, bytes for what no token holds."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefé"]
    merges = [("▁", "a"), ("b", "c"), ("▁a", "bc")]
    vocabulary = {word: i for i, word in enumerate([*words, "▁a", "bc", "▁abc"])}
    made = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    text = "abc  é 中\U0001f600\nabc <0xE4> fed"
    ids = ids_of(tokenizer, text)
    assert (
        vocabulary["▁abc"] in ids and vocabulary["<0xE4>"] in ids
    )  # the second byte of a Chinese character
    assert tokenization.token_bytes(tokenizer)[ids].sum() == len(text.encode()) + 1


def test_characters_stand_in_code_point_order_and_a_bpe_has_every_byte_and_at_most_the_asked_size():
    made = tokenization.make_characters(["cab", "d"])
    assert (
        ids_of(made, "abcd").tolist() == [0, 1, 2, 3] and made.eos_token_id == 4 and len(made) == 5
    )
    made = tokenization.train_bpe(["abc abd" * 5], 300)
    assert 257 <= len(made) <= 300 and made.decode(ids_of(made, TEXT).tolist()) == TEXT
    assert made.decode(tokenization.encode_prompt(made, "end")) == "end"
    assert tokenization.encode_prompt(made, "") == [
        made.eos_token_id
    ]  # the beginning of a document


@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_that_holds_no_tokenizer_is_refused_with_a_remedy(tmp_path, content):
    (tmp_path / ("other.json" if content is None else "tokenizer.json")).write_text(content or "")
    for of_model, fix in (
        (False, "with --tokenizer bpe$"),
        (True, "that this machine can reach$"),
    ):
        with pytest.raises(
            BadInput, match=f"cannot be loaded .*Use a folder with tokenizer.json.*{fix}"
        ) as caught:
            tokenization.load(str(tmp_path), of_model)
        assert (
            len(caught.value.lines) == 1
            and "\n" not in caught.value.lines[0]
            and str(tmp_path) in str(caught.value)
        )


def test_a_tokenizer_without_end_of_text_whose_ids_have_gaps_or_that_changes_the_text_is_refused(
    tmp_path,
):
    made = MAKERS["bpe"]([TEXT])
    made.backend_tokenizer.normalizer = normalizers.NFC()
    encode = DocumentEncoder(made, "owner/name")
    assert next(encode([("\u00e9", True)], 0)).text_bytes == 2
    with pytest.raises(
        BadInput,
        match="owner/name: .* changes the text.*Row 7 has 3 bytes, but its ids represent 2",
    ):
        next(encode([("e\u0301", True)], 7))
    made.eos_token = made.bos_token = None
    made.save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="no end-of-text"):
        tokenization.load(str(tmp_path))
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token=""))
    with pytest.raises(
        BadInput, match="tokenizer = owner/name: .* not consecutive. Use another tokenizer"
    ):
        DocumentEncoder(
            PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="b"), "owner/name"
        )


KINDS = {
    "prose": "It wasn't theirs: they'd said so, 'twas  \"ours\".\n\nWe'll see -- in 1984 or '85, won't we?  \n Yes. "
    * 30,
    "code": Path(__file__).read_text(encoding="utf-8")[:6000],
    "carriage returns": "a\r\nb \r\n \r\n\tc\r d\n\r\n" * 100,
    "white space": " \n\n  \t x\n \n \u00a0 y\u2028 z\x85 \u3000 \x1c \x1f \x0b \x0c\n" * 50,
    "ends in spaces": "word " * 200 + "   \n  ",
    "Chinese": "中文没有空格，只有标点。" * 50 + "\n" + "第二段 " * 50,
    "marks and emoji": "ne\u0301 e \u0301 \U0001f468\u200d\U0001f469 🇩🇪 हिन्दी ภาษา " * 40,
    "numbers": "1 23 4,567 8.9e10 x1 '2 ²³ ½\n" * 50,
    "special": "<|endoftext|> <|endoftext|>\n<| endoftext |>" * 20,
}


def test_a_bpe_is_trained_on_a_text_without_a_break_and_no_token_is_longer_than_the_bound():
    """Without the bound it takes from half a minute to hours."""
    text = "words " * 50 + "中" * 300_000
    made = tokenization.train_bpe([text], 400)
    assert 0 < max(tokenization.token_bytes(made)) <= tokenization.LONGEST_WORD
    assert made.decode(ids_of(made, text[-5000:]).tolist()) == text[-5000:]


@pytest.mark.parametrize(
    ("split", "wanted"), [("gpt2", "a0c92df654fb"), ("qwen35", "c79832d980b3")]
)
def test_a_trained_bpe_never_changes_between_versions(split, wanted):
    """GPT-2's split as it was before words had a bound: a run that is resumed makes its tokenizer again."""
    texts = [text for kind, text in KINDS.items() if kind != "code"]
    made = tokenization.train_bpe([*texts, "x" * 1000], 1000, split)
    assert tokenization.fingerprint(made)[:12] == wanted


def test_a_letter_and_its_marks_stay_in_one_word_of_the_new_split_and_a_token_holds_them():
    text = "हिन्दी में लिखा हुआ वाक्य और ភាសាខ្មែរ ในภาษาไทย தமிழ் மொழி "
    sizes = []
    for split in ("gpt2", "qwen35"):
        made = tokenization.train_bpe([text * 40], 400, split)
        sizes.append(len(text.encode()) / len(ids_of(made, text)))
        assert made.decode(ids_of(made, text).tolist()) == text
    assert sizes[1] > 1.5 * sizes[0], sizes


def changed(edit):
    """A BPE of ours after a change of its definition."""
    made = tokenization.train_bpe(
        [TEXT * 3, "def define defined other others another"], 320, "gpt2"
    )
    definition = json.loads(made.backend_tokenizer.to_str())
    edit(definition)
    backend = Tokenizer.from_str(json.dumps(definition))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def byte_level(merges):
    """A byte-level BPE of these merges alone, by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*alphabet, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def swap_two_ids(definition):
    vocabulary, merges = definition["model"]["vocab"], definition["model"]["merges"]
    one, other = "".join(merges[3]), "".join(merges[40])
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


def add_word(definition):
    word = dict(
        definition["added_tokens"][0],
        content="zebra",
        id=len(definition["model"]["vocab"]),
        special=False,
    )
    definition["added_tokens"].append(word)


CHANGES = {
    "a space put before": lambda d: d["pre_tokenizer"].update(add_prefix_space=True),
    "a normalizer": lambda d: d.update(normalizer={"type": "NFC"}),
    "shuffled ids": swap_two_ids,
    "a word looked for in the text": add_word,
    "an unknown token": lambda d: d["model"].update(unk_token="<|endoftext|>"),
    "a byte that has no id": lambda d: d["model"]["vocab"].pop("ÿ"),
    "a token that has no merge": lambda d: d["model"]["merges"].pop(),
}
UNLIKE_GPT2 = {name: (lambda edit=edit: changed(edit)) for name, edit in CHANGES.items()} | {
    "two merges to one token": lambda: byte_level(
        [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]
    ),
    "a token that its merges never reach": lambda: byte_level(
        [("b", "c"), ("a", "b"), ("ab", "c")]
    ),
    "one id a character": lambda: tokenization.make_characters([TEXT, *tokenization.HARD_TEXTS]),
}


def test_gpt2_is_encoded_by_tiktoken_to_the_tokenizers_own_ids():
    made = gpt2_tokenizer()
    encoder = tokenization.make_encoder(made)
    assert encoder.tiktoken and len(made) == 50257
    texts = ["Hello world", *KINDS.values(), *tokenization.HARD_TEXTS]
    assert encoder(texts[:1])[0].tolist() == [15496, 995]  # as GPT-2's own encoder.py gives
    for got, ids in zip(encoder(texts), tokenization.Encoder(made)(texts), strict=True):
        assert got.tolist() == ids.tolist() and got.dtype == np.uint32


@pytest.mark.parametrize("split", ["gpt2", "qwen35"])
def test_bpe_of_ours_is_encoded_by_tiktoken_to_the_tokenizers_own_ids(split):
    made = tokenization.train_bpe(KINDS.values(), 1000, split)
    encoder = tokenization.make_encoder(made)
    assert encoder.tiktoken
    texts = [
        text.replace("<|endoftext|>", "") for text in (*KINDS.values(), *tokenization.HARD_TEXTS)
    ]
    for text, ids in zip(texts, encoder(texts), strict=True):
        assert ids.tolist() == made.encode(text, add_special_tokens=False)
    run = " " * 1_000_000 if split == "gpt2" else ""  # more than tiktoken takes
    assert encoder([run + "a"])[0].tolist() == ids_of(made, run + "a").tolist()


@pytest.mark.parametrize("kind", UNLIKE_GPT2)
def test_a_tokenizer_unlike_gpt2s_is_told_by_its_definition_and_left_to_its_own_library(kind):
    made = UNLIKE_GPT2[kind]()
    assert tokenization._as_tiktoken(made) is None
    text = "def abc zebra others' defined don't 1234  x\n"
    assert tokenization.make_encoder(made)([text])[0].tolist() == made.encode(
        text, add_special_tokens=False
    )


def test_tiktoken_with_another_split_is_found_out_and_not_used(monkeypatch):
    for pattern in (r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", r"'s| ?\S+|\s+"):
        monkeypatch.setattr(tiktoken_ext.openai_public, "r50k_pat_str", pattern)
        assert (
            tokenization.make_encoder(tokenization.train_bpe(KINDS.values(), 1000, "gpt2")).tiktoken
            is None
        )


def test_without_tiktoken_or_with_another_merge_table_the_tokenizer_encodes(monkeypatch):
    right, other = byte_level([("a", "b"), ("c", "d")]), byte_level([("c", "d"), ("a", "b")])
    with monkeypatch.context() as patched:
        found = tokenization._as_tiktoken(right)
        patched.setattr(tokenization, "_as_tiktoken", lambda tokenizer: found)
        assert tokenization.make_encoder(right).tiktoken
        assert tokenization.make_encoder(other).tiktoken is None  # its sample shows it
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert tokenization.make_encoder(right).tiktoken is None


@pytest.mark.slow
def test_both_libraries_class_every_character_alike():
    """Each of the merges shows whether a character is split from a letter, a digit, a sign or a space before it."""
    made = byte_level(
        [
            (before, byte)
            for before in "a1.Ġ"
            for byte in sorted(pre_tokenizers.ByteLevel.alphabet())
        ]
    )
    encoder = tokenization.make_encoder(made)
    assert encoder.tiktoken
    # Letters, digits and spaces end at U+323AF (Unicode 16); of ideographs and private use every eighth is enough.
    wide = [
        range(0x3400, 0xA000),
        range(0xAC00, 0xF900),
        range(0x17000, 0x1AFF0),
        range(0x20000, 0x32400),
    ]
    codes = [
        code for code in range(0x32400) if code % 8 == 0 or not any(code in field for field in wide)
    ]
    codes = [code for code in codes if not 0xD800 <= code < 0xE000]
    shown = [
        "".join(f"a{chr(c)}1{chr(c)}.{chr(c)} {chr(c)}\n" for c in codes[i : i + 1000])
        for i in range(0, len(codes), 1000)
    ]
    for text, got, wanted in zip(
        shown, encoder(shown), tokenization.Encoder(made)(shown), strict=True
    ):
        assert np.array_equal(got, wanted), f"they part between {text[1]!r} and {text[-2]!r}"


@pytest.mark.parametrize(("encode", "tokenizer"), ENCODERS, indirect=["tokenizer"])
def test_a_tokenizers_settings_do_not_touch_the_ids_nor_the_other_way_round(encode, tokenizer):
    wanted = ids_of(tokenizer, TEXT).tolist()
    tokenizer("end", truncation=True, max_length=5)
    tokenizer.backend_tokenizer.enable_padding(length=4000)
    for setting in (False, True):
        tokenizer.backend_tokenizer.encode_special_tokens = setting
        assert encode(tokenizer)([TEXT])[0].tolist() == wanted
        assert tokenizer.backend_tokenizer.encode_special_tokens is setting


@pytest.mark.parametrize("encode", [tokenization.Encoder, tokenization.make_encoder])
def test_what_a_tokenizer_cannot_write_is_refused_in_words(encode):
    with pytest.raises(
        BadInput, match="no id for 'x' 'é', because the text that it was created from"
    ):
        encode(tokenization.make_characters(["abc"]))(["abc", "aéxb"])
    with pytest.raises(
        BadInput, match=r"cannot encode this text, because '\\ud800' is half of a surrogate pair"
    ):
        encode(MAKERS["bpe"]([TEXT]))(["fine", "a\ud800b"])
