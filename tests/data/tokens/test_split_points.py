"""Test that a text is split only where this does not change its ids."""

import functools
import hashlib
import json
import random
import re
import unicodedata

import numpy as np
import pytest
from odd_texts import random_text
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources.formats import text as text_reader
from ursa_minor.data.tokens import split_points
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.encoder import DocumentEncoder
from ursa_minor.export import convert

END_OF_TEXT = "<|endoftext|>"
REGEXES = {
    "qwen2": split_points.QWEN2,
    "llama3": split_points.LLAMA3,
    "qwen35": split_points.QWEN35,
    "o200k": split_points.O200K,
}
NFC_NAMES = ("qwen2", "qwen35")  # these tokenizers normalize texts to NFC
TRAINED_SPLITS = {"trained gpt2": "gpt2", "trained qwen35": "qwen35"}
SPLITTING_NAMES = [*REGEXES, *TRAINED_SPLITS]
ROUNDS = [10, pytest.param(4000, marks=pytest.mark.slow)]


def wrap(backend):
    """Return the tokenizer of a backend with an end-of-text token."""
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT)


def train_byte_level_bpe(regex, *, is_nfc=False):
    """Train a byte-level BPE that splits words by a regex, on the fragments of the tests."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    if is_nfc:
        backend.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    draw = random.Random(0)
    backend.train_from_iterator([random_text(draw, 60) for _ in range(60)], trainer)
    return wrap(backend)


def make_metaspace_tokenizer():
    """Return a tokenizer like that of Llama 2, which adds a mark of a space to each text."""
    tokenizer = train_byte_level_bpe(split_points.QWEN2)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@functools.cache
def get_tokenizer(name):
    """Return a tokenizer, which is trained once. The tests must not change it."""
    if name == "metaspace":
        return make_metaspace_tokenizer()
    if name in TRAINED_SPLITS:
        texts = [random_text(random.Random(seed), 60) for seed in range(60)]
        return tokenization.train_bpe(texts, 900, TRAINED_SPLITS[name])
    return train_byte_level_bpe(REGEXES[name], is_nfc=name in NFC_NAMES)


def encode(tokenizer, *texts):
    """Return the ids of several texts, joined."""
    return np.concatenate(tokenization.Encoder(tokenizer)(texts)).tolist()


def split_words(tokenizer, *texts):
    """Return the words that a tokenizer splits texts into.

    Equal words have equal ids, whatever merges the tokenizer has.
    """
    backend = tokenizer.backend_tokenizer
    words = []
    for text in texts:
        if backend.normalizer:
            text = backend.normalizer.normalize_str(text)
        words += [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return words


def draw_text(tokenizer, draw):
    """Return a random text that the tokenizer does not change."""
    text = random_text(draw, 60)
    if tokenizer.backend_tokenizer.normalizer:
        text = unicodedata.normalize("NFC", text)
    return text


def cut(text, places):
    """Return the parts of a text between these places."""
    parts = []
    start = 0
    for end in [*places, len(text)]:
        if start < end:
            parts.append(text[start:end])
        start = end
    return parts


def draw_rows(text, draw, folder):
    """Return the rows of a text file that is read in small blocks."""
    path = folder / "a.txt"
    path.write_text(text, newline="")
    pieces = text_reader.pieces(path, draw.choice([1, 3, 7, 16, 50]))
    return [(piece, index == 0) for index, piece in enumerate(pieces)]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("name", SPLITTING_NAMES)
def test_any_split_points_keep_the_ids(name, rounds):
    tokenizer = get_tokenizer(name)
    last_split_point = split_points.split_point_pattern(tokenizer.backend_tokenizer)
    any_split_point = last_split_point.pattern.removeprefix("(?s).*")
    draw = random.Random(f"{name} {rounds}")

    for _ in range(rounds):
        text = draw_text(tokenizer, draw)
        all_places = [match.start() for match in re.finditer(any_split_point, text)]
        some_places = sorted(draw.sample(all_places, len(all_places) // 3))
        for places in (all_places, some_places):
            parts = cut(text, places)
            assert encode(tokenizer, *parts) == encode(tokenizer, text), parts
            assert split_words(tokenizer, *parts) == split_words(tokenizer, text), parts


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("name", [*SPLITTING_NAMES, "metaspace"])
def test_pieces_of_rows_keep_the_ids(tmp_path, name, rounds):
    tokenizer = get_tokenizer(name)
    last_split_point = split_points.split_point_pattern(tokenizer.backend_tokenizer)
    draw = random.Random(f"{name} {rounds}")
    num_pieces = 0

    for _ in range(rounds):
        text = draw_text(tokenizer, draw)
        rows = draw_rows(text, draw, tmp_path)
        numbered_rows = [(number, *row) for number, row in enumerate(rows)]
        pieces = list(split_points.pieces(numbered_rows, last_split_point))

        piece_texts = [piece for _, piece, _ in pieces]
        assert "".join(piece_texts) == text
        assert encode(tokenizer, *piece_texts) == encode(tokenizer, text)
        assert [begins for _, _, begins in pieces] == [True] + [False] * (len(pieces) - 1)
        assert {number for number, _, _ in pieces} == {0}
        num_pieces += len(pieces)

    if name == "metaspace":
        assert num_pieces == rounds
    else:
        assert num_pieces > 2 * rounds


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("name", SPLITTING_NAMES)
def test_document_encoder_keeps_the_ids(tmp_path, monkeypatch, name, rounds):
    monkeypatch.setattr(tokenization, "SAMPLE_TOKENS", 1000)  # for speed
    tokenizer = get_tokenizer(name)
    encoder = DocumentEncoder(tokenizer, name)
    draw = random.Random(f"{name} {rounds}")

    for _ in range(rounds):
        text = draw_text(tokenizer, draw)
        rows = draw_rows(text, draw, tmp_path)
        ids = np.concatenate([document.ids for document in encoder(iter(rows), 0)])

        assert ids.tolist() == [tokenizer.eos_token_id, *encode(tokenizer, text)]


@pytest.mark.parametrize(
    "name, digest",
    [
        ("qwen2", "1ff7f4106489"),
        ("llama3", "d98f9631be1e"),
        ("qwen35", "00431aed57e6"),
        ("o200k", "2d1b8dc11e89"),
    ],
)
def test_regexes_equal_those_on_the_hub(name, digest):
    """The digests are of the regexes in the files tokenizer.json of the Hub."""
    assert hashlib.sha256(REGEXES[name].encode()).hexdigest()[:12] == digest


def characters_before_split_point(last_split_point):
    """Return the characters after which a text is split if a space follows.

    Of the characters from U+3400 on, every 16th is tried.
    """
    characters = []
    surrogates = range(0xD800, 0xE000)
    for code in [*range(0x3400), *range(0x3400, 0x32400, 16)]:
        if code in surrogates:
            continue
        match = last_split_point.match(f"{chr(code)} ")
        if match and match.end() == 1:
            characters.append(chr(code))
    return characters


@pytest.mark.parametrize("name", REGEXES)
def test_character_before_split_point_ends_a_word(name):
    """Python and the tokenizer may have different versions of Unicode.

    NFC may replace a letter by a letter and a combining mark.
    """
    backend = get_tokenizer(name).backend_tokenizer
    last_split_point = split_points.split_point_pattern(backend)
    characters = characters_before_split_point(last_split_point)
    assert len(characters) > 5000

    for start in range(0, len(characters), 500):
        group = characters[start : start + 500]
        text = "".join(f"{character}\n" for character in group)
        if backend.normalizer:
            text = backend.normalizer.normalize_str(text)
        word_ends = {end for _, (_, end) in backend.pre_tokenizer.pre_tokenize_str(text)}
        line_ends = {place for place, character in enumerate(text) if character == "\n"}
        assert len(line_ends) == len(group)
        assert line_ends <= word_ends


# Which tokenizers have split points


def split_point_after(change):
    """Return the split point pattern of the tokenizer of Qwen2 after a change."""
    definition = json.loads(get_tokenizer("qwen2").backend_tokenizer.to_str())
    change(definition)
    tokenizer = wrap(Tokenizer.from_str(json.dumps(definition)))
    return split_points.split_point_pattern(tokenizer.backend_tokenizer)


def split_point_with_word(content, **flags):
    """Return the split point pattern of the tokenizer of Qwen2 with an added word."""
    word = {
        "id": 900,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    return split_point_after(lambda definition: definition["added_tokens"].append(word | flags))


@pytest.mark.parametrize("word", ["<think>", "   "])
def test_added_word_inside_piece_is_allowed(word):
    assert split_point_with_word(word) is split_points.LINE_SPLIT_POINT


@pytest.mark.parametrize("word", ["a b", "\n\n", " a"])
def test_added_word_across_pieces_prevents_splits(word):
    assert split_point_with_word(word) is None


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_added_word_that_needs_context_prevents_splits(flag):
    assert split_point_with_word("<x>", **{flag: True}) is None


def change_split(**values):
    """Return a function that changes the regex split of a definition."""
    return lambda definition: definition["pre_tokenizer"]["pretokenizers"][0].update(values)


def change_byte_level(**values):
    """Return a function that changes the byte-level step of a definition."""
    return lambda definition: definition["pre_tokenizer"]["pretokenizers"][1].update(values)


def remove_regex(definition):
    definition["pre_tokenizer"]["pretokenizers"].pop(0)


def remove_pre_tokenizer(definition):
    definition["pre_tokenizer"] = None


def add_lower_case(definition):
    definition["normalizer"] = {"type": "Lowercase"}


@pytest.mark.parametrize(
    "change",
    [
        remove_regex,
        change_split(pattern={"Regex": r"\S+\s*"}),
        change_split(behavior="MergedWithPrevious"),
        change_split(invert=True),
        change_byte_level(add_prefix_space=True),
        change_byte_level(use_regex=True),
        add_lower_case,
        remove_pre_tokenizer,
    ],
    ids=[
        "no regex",
        "other regex",
        "merged",
        "inverted",
        "prefix space",
        "two regexes",
        "lower case",
        "no pre-tokenizer",
    ],
)
def test_unknown_tokenizer_has_no_split_points(change):
    assert split_point_after(change) is None


def test_character_tokenizer_has_split_points():
    backend = tokenization.make_characters(["abc"]).backend_tokenizer

    assert split_points.split_point_pattern(backend) is text_reader.GPT2_SPLIT_POINT


# Long texts


@pytest.fixture
def low_character_limit(monkeypatch):
    """Limit a text without a split point to 1,000 characters."""
    monkeypatch.setattr(text_reader, "MAX_UNSPLIT_CHARACTERS", 1000)
    monkeypatch.setattr(split_points, "MAX_UNSPLIT_CHARACTERS", 1000)


@pytest.mark.parametrize(
    "line",
    ["wie sie kann. ", "中文，漢字。\n", "中文\n\u3000\u3000中文。\r\n"],
    ids=["spaces", "punctuation", "indented"],
)
def test_only_few_rows_are_read_ahead(line):
    """Chinese lines end in punctuation and contain no spaces."""
    text = line * 400
    rows = []
    for number, start in enumerate(range(0, len(text), 100)):
        rows.append((number, text[start : start + 100], start == 0))
    table_row = (len(rows), "table", True)
    num_read = 0

    def read_rows():
        nonlocal num_read
        for row in [*rows, table_row]:
            num_read += 1
            yield row

    pieces = split_points.pieces(read_rows(), split_points.LINE_SPLIT_POINT)
    for index, (number, piece, _) in enumerate(pieces):
        assert len(piece) <= 300
        assert num_read <= index + 3
        assert number in (0, len(rows))


@pytest.mark.parametrize(
    "row_text, split_point",
    [("。" * 100, split_points.LINE_SPLIT_POINT), ("a b " * 30, None)],
    ids=["no split point", "unknown tokenizer"],
)
def test_long_text_without_split_point_is_rejected(low_character_limit, row_text, split_point):
    rows = [(3 + index, row_text, index == 0) for index in range(20)]

    with pytest.raises(BadInput, match=r"row 3 is too long .*1,000 characters.*several files"):
        list(split_points.pieces(rows, split_point))


def test_long_row_of_table_is_not_split(low_character_limit):
    rows = [(number, "a" * 2000, True) for number in range(3)]

    assert list(split_points.pieces(rows, split_points.LINE_SPLIT_POINT)) == rows


def test_long_file_without_spaces_is_rejected(tmp_path, low_character_limit):
    path = tmp_path / "long.txt"
    path.write_text("words of text\n" + "中" * 2000)

    with pytest.raises(BadInput, match=r"long\.txt contains no space.* 1,000 characters .*fold -w"):
        list(text_reader.pieces(path, 100))


def test_text_for_perplexity_has_ids_of_whole(tmp_path, monkeypatch):
    """A block may end between a full stop and a line break, which are one word of Qwen2."""
    monkeypatch.setattr(text_reader.pieces, "__defaults__", (28,))
    tokenizer = get_tokenizer("qwen2")
    text = "wie es sein kann.\ncom der Text. " * 30
    path = tmp_path / "a.txt"
    path.write_text(text)

    ids = convert.read_text([str(path)], tokenizer, 0)

    assert ids.tolist() == [tokenizer.eos_token_id, *encode(tokenizer, text)]


def test_cut_text_keeps_its_ids():
    draw = random.Random(3)
    tokenizer = tokenization.train_bpe(["the river bank isn't stone"], 300)
    encode = tokenization.Encoder(tokenizer)
    pattern = split_points.split_point_pattern(tokenizer.backend_tokenizer)

    for _ in range(20):
        text = random_text(draw, 200)
        cut_text = list(split_points.cut(text, 50, pattern))

        assert "".join(cut_text) == text
        assert np.concatenate(encode(cut_text)).tolist() == encode([text])[0].tolist()
