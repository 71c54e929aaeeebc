"""Test tokenizers: encoding and decoding, saving, bytes per token, and fastokens."""

import functools
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import odd_texts
import pytest
from conftest import gpt2_tokenizer, run_in_fork
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import pretrained_tokenizer, split_points
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.encoder import DocumentEncoder

END_OF_TEXT = "<|endoftext|>"
TEXT = (
    "It was — né\u0301e 中文 \U0001f600!\r\n\r\n\tdef f(x):  return x  \x00 "
    "a\u00a0b\u2028c\x85 end\n<|endoftext|> <|en"
)
TEXTS = {
    "prose": (
        "It wasn't theirs: they'd said so, 'twas  \"ours\".\n\nWe'll see -- in 1984 or '85, "
        "won't we?  \n Yes. "
    )
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


def train_small_bpe():
    """Train a BPE tokenizer with the default split on TEXT."""
    return tokenization.train_bpe([TEXT, TEXT + "other"], 320)


def train_small_gpt2_bpe():
    """Train a BPE tokenizer with the split of GPT-2 on TEXT."""
    return tokenization.train_bpe([TEXT, TEXT + "other"], 320, "gpt2")


def make_character_tokenizer():
    """Return a tokenizer of the characters of TEXT."""
    return tokenization.make_characters([TEXT, TEXT + "other"])


@functools.cache
def train_bpe_on_texts(split):
    """Train a BPE tokenizer on TEXTS. The tests must not change it."""
    return tokenization.train_bpe(TEXTS.values(), 1000, split)


MAKERS = {
    "bpe": train_small_bpe,
    "gpt2-bpe": train_small_gpt2_bpe,
    "characters": make_character_tokenizer,
}
# fastokens encodes both kinds of BPE in the same way, so one of them is sufficient.
ENCODERS = [
    (tokenization.Encoder, "bpe"),
    (tokenization.Encoder, "gpt2-bpe"),
    (tokenization.Encoder, "characters"),
    (tokenization.make_encoder, "bpe"),
    (tokenization.make_encoder, "characters"),
]


@pytest.fixture(params=MAKERS)
def tokenizer(request):
    """Return a tokenizer of each kind that this project creates."""
    return MAKERS[request.param]()


@pytest.fixture
def small_sample(monkeypatch):
    """Compare fastokens with the tokenizers library on a small sample, for speed."""
    monkeypatch.setattr(tokenization, "SAMPLE_TOKENS", 1000)


def encode(tokenizer, text):
    """Return the ids of a text from the tokenizers library."""
    (ids,) = tokenization.Encoder(tokenizer)([text])
    return ids


def wrap(backend):
    """Return the tokenizer of a backend with an end-of-text token."""
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT)


# Encoding and decoding


@pytest.mark.parametrize("load", [pretrained_tokenizer.load, AutoTokenizer.from_pretrained])
def test_loaded_tokenizer_equals_saved_tokenizer(tokenizer, tmp_path, load):
    ids = encode(tokenizer, TEXT).tolist()
    fingerprint = tokenization.fingerprint(tokenizer)
    tokenizer("end", truncation=True, max_length=5)  # settings that must not be saved
    tokenizer.save_pretrained(tmp_path)

    loaded = load(str(tmp_path))

    assert encode(loaded, TEXT).tolist() == ids
    assert loaded.decode(ids) == TEXT
    assert len(loaded) == len(tokenizer)
    assert loaded.eos_token == END_OF_TEXT
    assert loaded.bos_token == END_OF_TEXT
    assert tokenization.fingerprint(loaded) == fingerprint


def test_truncation_does_not_change_fingerprint(tokenizer):
    ids = encode(tokenizer, TEXT)
    fingerprint = tokenization.fingerprint(tokenizer)

    tokenizer("end", truncation=True, max_length=5)

    assert tokenization.fingerprint(tokenizer) == fingerprint
    assert encode(tokenizer, TEXT).tolist() == ids.tolist()
    assert ids.dtype == np.uint32
    assert tokenizer.decode(ids.tolist()) == TEXT


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize("make_encoder, tokenizer", ENCODERS, indirect=["tokenizer"])
def test_end_of_text_in_text_is_ordinary_text(make_encoder, tokenizer):
    (ids,) = make_encoder(tokenizer)([TEXT])

    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids.tolist()) == TEXT


def test_end_of_text_in_prompt_is_ordinary_text(tokenizer):
    assert tokenizer.eos_token_id not in tokenization.encode_prompt(tokenizer, END_OF_TEXT)


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize("make_encoder, tokenizer", ENCODERS, indirect=["tokenizer"])
def test_empty_texts_have_no_ids(make_encoder, tokenizer):
    encoder = make_encoder(tokenizer)

    assert encoder([]) == []
    assert [len(ids) for ids in encoder(["", "a"])] == [0, 1]


def test_bytes_of_ids_sum_to_text_bytes(tokenizer):
    tokenizer.add_tokens(["Zürich"])
    text = TEXT + "Zürich"

    num_bytes = tokenization.token_bytes(tokenizer)

    assert num_bytes.dtype == np.int64
    assert num_bytes.shape == (len(tokenizer),)
    assert num_bytes[encode(tokenizer, text)].sum() == len(text.encode())
    assert num_bytes[tokenizer.eos_token_id] == 0


def make_sentencepiece_tokenizer():
    """Return a tokenizer like that of Llama 2.

    Spaces are "▁" tokens, the text gets a prefix of one, and unknown characters are bytes.
    """
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *"▁abcdefé", "▁a", "bc", "▁abc"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [("▁", "a"), ("b", "c"), ("▁a", "bc")]
    model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_bytes_of_sentencepiece_ids_include_prefix():
    tokenizer = make_sentencepiece_tokenizer()
    text = "abc  é 中\U0001f600\nabc <0xE4> fed"

    ids = encode(tokenizer, text)

    assert tokenizer.convert_tokens_to_ids("▁abc") in ids
    assert tokenizer.convert_tokens_to_ids("<0xE4>") in ids  # a byte of the Chinese character
    assert tokenization.token_bytes(tokenizer)[ids].sum() == len(text.encode()) + 1


def test_characters_have_ids_in_code_point_order():
    tokenizer = tokenization.make_characters(["cab", "d"])

    assert encode(tokenizer, "abcd").tolist() == [0, 1, 2, 3]
    assert tokenizer.eos_token_id == 4
    assert len(tokenizer) == 5


def test_bpe_encodes_every_byte():
    tokenizer = tokenization.train_bpe(["abc abd" * 5], 300)

    assert 257 <= len(tokenizer) <= 300
    assert tokenizer.decode(encode(tokenizer, TEXT).tolist()) == TEXT


def test_empty_prompt_starts_a_document(tokenizer):
    assert tokenization.encode_prompt(tokenizer, "") == [tokenizer.eos_token_id]
    assert tokenizer.decode(tokenization.encode_prompt(tokenizer, "end")) == "end"


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize("make_encoder, tokenizer", ENCODERS, indirect=["tokenizer"])
def test_encoder_ignores_settings_of_tokenizer(make_encoder, tokenizer):
    """And it does not change them."""
    expected = encode(tokenizer, TEXT).tolist()
    tokenizer("end", truncation=True, max_length=5)
    tokenizer.backend_tokenizer.enable_padding(length=4000)

    for setting in (False, True):
        tokenizer.backend_tokenizer.encode_special_tokens = setting
        (ids,) = make_encoder(tokenizer)([TEXT])
        assert ids.tolist() == expected
        assert tokenizer.backend_tokenizer.encode_special_tokens is setting


# Rejected tokenizers and texts


@pytest.mark.parametrize(
    "of_model, fix", [(False, "with --tokenizer bpe"), (True, "that this machine can reach")]
)
@pytest.mark.parametrize(
    "name, content", [("other.json", ""), ("tokenizer.json", "{")], ids=["missing", "invalid"]
)
def test_folder_without_tokenizer_is_rejected(tmp_path, name, content, of_model, fix):
    (tmp_path / name).write_text(content)

    with pytest.raises(BadInput, match=f"cannot be loaded .*tokenizer.json.*{fix}$") as caught:
        pretrained_tokenizer.load(str(tmp_path), of_model)

    (line,) = caught.value.lines
    assert "\n" not in line
    assert str(tmp_path) in line


def test_tokenizer_that_loses_spaces_is_rejected():
    tokenizer = train_small_bpe()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    encoder = DocumentEncoder(tokenizer, "owner/name")

    with pytest.raises(BadInput, match=r"owner/name: .*changes the text.*Row 7 has 3 bytes"):
        next(encoder([("a b", True)], 7))


def test_tokenizer_with_gaps_between_ids_is_rejected():
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token=""))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="b")

    with pytest.raises(BadInput, match=r"tokenizer = owner/name: .*not consecutive"):
        DocumentEncoder(tokenizer, "owner/name")


@pytest.mark.parametrize("make_encoder", [tokenization.Encoder, tokenization.make_encoder])
def test_character_without_id_is_rejected(make_encoder):
    encoder = make_encoder(tokenization.make_characters(["abc"]))

    with pytest.raises(BadInput, match="no id for 'x' 'é'"):
        encoder(["abc", "aéxb"])


@pytest.mark.parametrize("make_encoder", [tokenization.Encoder, tokenization.make_encoder])
def test_lone_surrogate_is_rejected(make_encoder):
    encoder = make_encoder(train_small_bpe())

    with pytest.raises(BadInput, match=r"'\\ud800' is half of a surrogate pair"):
        encoder(["fine", "a\ud800b"])


# Training of BPE tokenizers


def test_token_length_is_bounded():
    """Without the bound, training on this text takes from half a minute to hours."""
    text = "words " * 50 + "中" * 300_000

    tokenizer = tokenization.train_bpe([text], 400)

    longest = max(tokenization.token_bytes(tokenizer))
    assert 0 < longest <= tokenization.LONGEST_WORD
    assert tokenizer.decode(encode(tokenizer, text[-5000:]).tolist()) == text[-5000:]


@pytest.mark.parametrize(
    "split, fingerprint", [("gpt2", "a0c92df654fb"), ("qwen35", "c79832d980b3")]
)
def test_trained_bpe_never_changes_between_versions(split, fingerprint):
    """A resumed run trains its tokenizer again."""
    texts = [text for name, text in TEXTS.items() if name != "code"]

    tokenizer = tokenization.train_bpe([*texts, "x" * 1000], 1000, split)

    assert tokenization.fingerprint(tokenizer)[:12] == fingerprint


def test_qwen_split_keeps_combining_marks_in_words():
    text = "हिन्दी में लिखा हुआ वाक्य और ភាសាខ្មែរ ในภาษาไทย தமிழ் மொழி "
    num_ids = {}
    for split in ("gpt2", "qwen35"):
        tokenizer = tokenization.train_bpe([text * 40], 400, split)
        ids = encode(tokenizer, text)
        num_ids[split] = len(ids)
        assert tokenizer.decode(ids.tolist()) == text

    assert num_ids["gpt2"] > 1.5 * num_ids["qwen35"]


# fastokens


def assert_same_ids(tokenizer, encoder, texts):
    """Assert that an encoder returns the ids of the tokenizers library."""
    expected = tokenization.Encoder(tokenizer)(texts)
    for ids, expected_ids in zip(encoder(texts), expected, strict=True):
        assert ids.dtype == np.uint32
        assert ids.tolist() == expected_ids.tolist()


@functools.cache
def gpt2_encoder():
    """Return the fastest encoder of GPT-2's tokenizer."""
    return tokenization.make_encoder(gpt2_tokenizer())


def test_fastokens_ids_of_gpt2_are_equal(small_sample):
    tokenizer = gpt2_tokenizer()
    assert len(tokenizer) == 50257

    encoder = gpt2_encoder()

    assert encoder.fast
    assert encoder(["Hello world"])[0].tolist() == [15496, 995]  # as GPT-2's encoder.py
    assert_same_ids(tokenizer, encoder, [*TEXTS.values(), *tokenization.HARD_TEXTS])


def test_gpt2_ids_equal_vectors_of_llama_cpp(small_sample):
    """llama.cpp publishes texts and their GPT-2 ids for its tests."""
    path = Path(__file__).parent / "gpt2_ids.json"
    vectors = json.loads(path.read_text("utf-8"))["vectors"]
    texts = [vector["text"] for vector in vectors]
    encoder = gpt2_encoder()

    ids = [array.tolist() for array in encoder(texts)]
    encoded_by_tokenizers = encoder.encode_with_tokenizers(texts).of_each_text()
    ids_of_tokenizers = [array.tolist() for array in encoded_by_tokenizers]

    assert len(vectors) == 46
    assert ids == [vector["ids"] for vector in vectors]
    assert ids_of_tokenizers == ids


SPLITS = {
    "gpt2": split_points.GPT2,
    "qwen2": split_points.QWEN2,
    "qwen35": split_points.QWEN35,
    "llama3": split_points.LLAMA3,
    "o200k": split_points.O200K,
}


def make_bpe_with_split(regex):
    """Return a byte-level BPE tokenizer with one of ``SPLITS``."""
    tokenizer = tokenization.train_bpe(TEXTS.values(), 1000, "gpt2")
    if regex != split_points.GPT2:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(regex), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return tokenizer


@pytest.mark.parametrize("split", SPLITS)
def test_fastokens_ids_of_each_split_are_equal(split):
    tokenizer = make_bpe_with_split(SPLITS[split])
    encoder = tokenization.make_encoder(tokenizer)
    assert encoder.fast
    draw = random.Random(0)
    random_texts = [odd_texts.random_text(draw) for _ in range(100)]

    assert_same_ids(tokenizer, encoder, [*TEXTS.values(), *tokenization.HARD_TEXTS, *random_texts])


def test_fastokens_works_in_fork_and_threads(small_sample):
    tokenizer = train_bpe_on_texts("qwen35")
    encoder = tokenization.make_encoder(tokenizer)
    texts = [*TEXTS.values()] * 20
    expected = [ids.tolist() for ids in encoder(texts)]

    def encode_in_threads():
        with ThreadPoolExecutor(4) as pool:
            for result in pool.map(encoder, [texts] * 8):
                assert [ids.tolist() for ids in result] == expected

    encode_in_threads()
    run_in_fork(encode_in_threads)


def make_byte_level_bpe(merges):
    """Return a byte-level BPE tokenizer that has only these merges."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += ["".join(merge) for merge in merges]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return wrap(backend)


def add_prefix_space(definition):
    definition["pre_tokenizer"].update(add_prefix_space=True)


def add_normalizer(definition):
    definition.update(normalizer={"type": "NFC"})


def swap_two_ids(definition):
    model = definition["model"]
    first = "".join(model["merges"][3])
    second = "".join(model["merges"][40])
    vocabulary = model["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def add_word(definition):
    word_id = len(definition["model"]["vocab"])
    word = definition["added_tokens"][0] | {"content": "zebra", "id": word_id, "special": False}
    definition["added_tokens"].append(word)


def add_unknown_token(definition):
    definition["model"].update(unk_token=END_OF_TEXT)


def remove_byte(definition):
    del definition["model"]["vocab"]["ÿ"]


def remove_last_merge(definition):
    definition["model"]["merges"].pop()


@functools.cache
def bpe_definition():
    """Return the JSON definition of a BPE tokenizer."""
    texts = [TEXT * 3, "def define defined other others another"]
    return tokenization.train_bpe(texts, 320, "gpt2").backend_tokenizer.to_str()


def make_changed_bpe(change):
    """Return a BPE tokenizer after a change of its definition."""
    definition = json.loads(bpe_definition())
    change(definition)
    return wrap(Tokenizer.from_str(json.dumps(definition)))


@pytest.mark.parametrize(
    ("change", "is_fast"),
    [
        (add_normalizer, True),
        (swap_two_ids, True),
        (remove_last_merge, True),
        (add_prefix_space, False),
        (add_word, False),
        (add_unknown_token, False),
        (remove_byte, False),
    ],
)
def test_changed_bpe_keeps_its_ids(change, is_fast):
    tokenizer = make_changed_bpe(change)
    text = "def abc zebra others' defined don't 1234 e\u0301 x\n"

    encoder = tokenization.make_encoder(tokenizer)

    assert (encoder.fast is not None) == is_fast
    (ids,) = encoder([text])
    assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "merges",
    [
        [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")],
        [("b", "c"), ("a", "b"), ("ab", "c")],
    ],
    ids=["two merges for a token", "unreachable token"],
)
def test_unusual_merges_keep_their_ids(merges):
    tokenizer = make_byte_level_bpe(merges)
    encoder = tokenization.make_encoder(tokenizer)

    assert_same_ids(tokenizer, encoder, ["abc", "bc abcabc ab", "aabbcc"])


def test_characters_are_not_encoded_by_fastokens():
    tokenizer = tokenization.make_characters([TEXT, *tokenization.HARD_TEXTS])

    assert tokenization.make_encoder(tokenizer).fast is None


def test_fastokens_with_other_ids_is_not_used(monkeypatch):
    tokenizer = make_byte_level_bpe([("a", "b"), ("c", "d")])
    other_tokenizer = make_byte_level_bpe([("c", "d"), ("a", "b")])
    fast = tokenization._as_fastokens(tokenization.Encoder(tokenizer))
    monkeypatch.setattr(tokenization, "_as_fastokens", lambda encoder: fast)

    assert tokenization.make_encoder(tokenizer).fast
    assert tokenization.make_encoder(other_tokenizer).fast is None


def test_tokenizers_library_encodes_without_fastokens(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastokens", None)
    tokenizer = make_byte_level_bpe([("a", "b"), ("c", "d")])

    encoder = tokenization.make_encoder(tokenizer)

    assert encoder.fast is None
    assert encoder(["ab"])[0].tolist() == tokenizer.encode("ab")


class WrongEncoder:
    """Encode with fastokens, but swap the last two ids from the second batch on."""

    def __init__(self, fast):
        self.fast = fast
        self.num_batches = 0

    def encode_batch_flat(self, texts, *, split_special_tokens):
        ids, offsets = self.fast.encode_batch_flat(texts, split_special_tokens=split_special_tokens)
        self.num_batches += 1
        if self.num_batches > 1:
            ids = ids[:-8] + ids[-4:] + ids[-8:-4]
        return ids, offsets


def test_wrong_ids_stop_preparation(monkeypatch):
    monkeypatch.setattr("ursa_minor.data.tokens.encoder.CHECK_BYTES", 1000)
    monkeypatch.setattr("ursa_minor.data.tokens.encoder.BATCH_CHARACTERS", 100)
    document_encoder = DocumentEncoder(train_bpe_on_texts("gpt2"), "tok")
    document_encoder.threads = 1
    document_encoder._encode.fast = WrongEncoder(document_encoder._encode.fast)
    texts = ["the same words ab", "the same words ba"] * 100

    with pytest.raises(BadInput, match=r"row \d+: fastokens .* other ids"):
        list(document_encoder(((text, True) for text in texts), 0))


def assigned_characters():
    """Return the characters that may be letters, digits or spaces in Unicode 16.

    Of ideographs, Hangul and private use, every eighth character is sufficient.
    """
    sparse_ranges = [
        range(0x3400, 0xA000),
        range(0xAC00, 0xF900),
        range(0x17000, 0x1AFF0),
        range(0x20000, 0x32400),
    ]
    surrogates = range(0xD800, 0xE000)
    characters = []
    for code in range(0x32400):
        is_sparse = any(code in codes for codes in sparse_ranges)
        if code in surrogates or (is_sparse and code % 8):
            continue
        characters.append(chr(code))
    return characters


@pytest.mark.slow
def test_both_libraries_classify_characters_alike():
    """Merges show whether a character is split from a letter, digit, sign or space before it."""
    merges = []
    for before in "a1.Ġ":
        for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
            merges.append((before, byte))
    tokenizer = make_byte_level_bpe(merges)
    encoder = tokenization.make_encoder(tokenizer)
    assert encoder.fast
    characters = assigned_characters()

    for start in range(0, len(characters), 1000):
        group = characters[start : start + 1000]
        text = "".join(f"a{c}1{c}.{c} {c}\n" for c in group)
        (ids,) = encoder([text])
        assert np.array_equal(ids, encode(tokenizer, text)), f"from {group[0]!r} to {group[-1]!r}"
