"""A text is cut only where the ids of its pieces, joined, are those of the whole, whatever it is split by."""

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
from ursa_minor.data.sources.formats import text as text_format
from ursa_minor.data.sources.formats import text as text_reader
from ursa_minor.data.tokens import split_points
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.encoder import DocumentEncoder
from ursa_minor.export import convert

REGEXES = {  # the split, and whether the tokenizer normalizes to NFC
    "qwen2": (split_points.QWEN2, True),
    "llama3": (split_points.LLAMA3, False),
    "qwen35": (split_points.QWEN35, True),
    "o200k": (split_points.O200K, False),
}
DIGESTS = "1ff7f4106489 d98f9631be1e 00431aed57e6 2d1b8dc11e89"  # of those that the Hub's tokenizer.json have


def byte_level(regex, nfc=False):
    """A byte-level BPE that splits by this regex and has merged much of what the fragments hold."""
    made = Tokenizer(models.BPE())
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(regex), "isolated"), bytes_of]
    )
    made.decoder = decoders.ByteLevel()
    if nfc:
        made.normalizer = normalizers.NFC()
    special, alphabet = ["<|endoftext|>"], pre_tokenizers.ByteLevel.alphabet()
    how = {
        "vocab_size": 900,
        "special_tokens": special,
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    draw = random.Random(0)
    made.train_from_iterator([random_text(draw, 60) for _ in range(60)], trainers.BpeTrainer(**how))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")


def sentencepiece():
    """Llama 2's kind: spaces are marks, and one stands before each text."""
    made = byte_level(split_points.QWEN2)
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    made.backend_tokenizer.decoder = decoders.Metaspace()
    return made


MAKERS = {name: (lambda asked=asked: byte_level(*asked)) for name, asked in REGEXES.items()}
TEXTS = [random_text(random.Random(i), 60) for i in range(60)]
MAKERS |= {
    f"our {split}": (lambda split=split: tokenization.train_bpe(TEXTS, 900, split))
    for split in ("gpt2", "qwen35")
}
MAKERS |= {"metaspace": sentencepiece}


@pytest.fixture(scope="module")
def made():
    return {name: make() for name, make in MAKERS.items()}


def ids(tokenizer, *texts):
    return np.concatenate(tokenization.Encoder(tokenizer)(texts)).tolist()


def words(tokenizer, *texts):
    """The words that a tokenizer splits texts into: where these are the same, so are the ids, whatever it has merged."""
    normalizer, split = (
        tokenizer.backend_tokenizer.normalizer,
        tokenizer.backend_tokenizer.pre_tokenizer,
    )
    normal = [normalizer.normalize_str(text) if normalizer else text for text in texts]
    return [word for text in normal for word, _ in split.pre_tokenize_str(text)]


def changed(tokenizer, change):
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    change(definition)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(definition)), eos_token="<|endoftext|>"
    )


def assert_pieces_have_the_ids_of_the_whole(tokenizer, encode, draw, folder):
    content = random_text(draw, 60)
    last = split_points.split_point_pattern(tokenizer.backend_tokenizer)
    if tokenizer.backend_tokenizer.normalizer:  # which changes any other text
        content = unicodedata.normalize("NFC", content)
    whole = ids(tokenizer, content)
    if last:
        every = [m.start() for m in re.finditer(last.pattern.removeprefix("(?s).*"), content)]
        for places in (every, sorted(draw.sample(every, len(every) // 3))):
            parts = [
                content[a:b]
                for a, b in zip([0, *places], [*places, len(content)], strict=True)
                if a < b
            ]
            assert ids(tokenizer, *parts) == whole and words(tokenizer, *parts) == words(
                tokenizer, content
            ), parts
    path = folder / "a.txt"
    path.write_text(content, newline="")
    rows = [
        (text, i == 0)
        for i, text in enumerate(text_reader.pieces(path, draw.choice([1, 3, 7, 16, 50])))
    ]
    if encode:
        found = [document.ids for document in encode(iter(rows), 0)]
        assert np.concatenate(found).tolist() == [tokenizer.eos_token_id, *whole]
    found = list(split_points.pieces(((i, *row) for i, row in enumerate(rows)), last))
    assert (
        "".join(text for _, text, _ in found) == content
        and ids(tokenizer, *(text for _, text, _ in found)) == whole
    )
    assert [begins for _, _, begins in found] == [True] + [False] * (len(found) - 1) and {
        n for n, _, _ in found
    } == {0}
    return len(found)


@pytest.mark.parametrize("rounds", [10, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MAKERS)
def test_ids_of_the_pieces_joined_are_the_ids_of_the_whole_for_every_split(
    made, tmp_path, name, rounds
):
    draw, tokenizer = random.Random(f"{name} {rounds}"), made[name]
    encode = (
        DocumentEncoder(tokenizer, name) if name != "metaspace" else None
    )  # which could not decode these bytes
    number = sum(
        assert_pieces_have_the_ids_of_the_whole(tokenizer, encode, draw, tmp_path)
        for _ in range(rounds)
    )
    assert number == rounds if name == "metaspace" else number > 2 * rounds


def test_the_regexes_are_those_of_the_tokenizers_on_the_hub():
    assert (
        " ".join(hashlib.sha256(regex.encode()).hexdigest()[:12] for regex, _ in REGEXES.values())
        == DIGESTS
    )


@pytest.mark.parametrize("name", REGEXES)
def test_every_character_behind_which_a_text_is_cut_ends_a_word_of_the_tokenizers(made, name):
    """Python and the tokenizer may know different versions of Unicode, and NFC may write a letter with a mark behind."""
    tokenizer = made[name].backend_tokenizer
    last = split_points.split_point_pattern(tokenizer)
    shown = [
        chr(code)
        for code in range(0x32400)
        if not 0xD800 <= code < 0xE000 and (code % 16 == 0 or code < 0x3400)
    ]
    behind = [
        character
        for character in shown
        if (found := last.match(f"{character} ")) and found.end() == 1
    ]
    assert len(behind) > 5000
    for start in range(0, len(behind), 500):
        some = behind[start : start + 500]
        text = "".join(f"{character}\n" for character in some)
        normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        ends = {end for _, (_, end) in tokenizer.pre_tokenizer.pre_tokenize_str(normal)}
        breaks = [place for place, character in enumerate(normal) if character == "\n"]
        assert len(breaks) == len(some) and not {place for place in breaks if place not in ends}


def test_a_tokenizer_that_joins_words_or_is_not_known_gets_whole_texts(made):
    def place(change):
        return split_points.split_point_pattern(changed(made["qwen2"], change).backend_tokenizer)

    def with_word(content, **flags):
        word = {
            "id": 900,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": False,
        }
        return place(lambda d: d["added_tokens"].append(word | {"content": content} | flags))

    assert with_word("<think>") is with_word("   ") is split_points.LINE_SPLIT_POINT
    assert with_word("a b") is with_word("\n\n") is with_word(" a") is None
    assert (
        with_word("<x>", lstrip=True)
        is with_word("<x>", rstrip=True)
        is with_word("<x>", single_word=True)
        is None
    )
    changes = {
        "no regex": lambda d: d["pre_tokenizer"]["pretokenizers"].pop(0),
        "another regex": lambda d: d["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(
            Regex=r"\S+\s*"
        ),
        "joins": lambda d: d["pre_tokenizer"]["pretokenizers"][0].update(
            behavior="MergedWithPrevious"
        ),
        "matches what is between": lambda d: d["pre_tokenizer"]["pretokenizers"][0].update(
            invert=True
        ),
        "a space before each text": lambda d: d["pre_tokenizer"]["pretokenizers"][1].update(
            add_prefix_space=True
        ),
        "two regexes": lambda d: d["pre_tokenizer"]["pretokenizers"][1].update(use_regex=True),
        "lower case": lambda d: d.update(normalizer={"type": "Lowercase"}),
        "none": lambda d: d.update(pre_tokenizer=None),
    }
    assert not [name for name, change in changes.items() if place(change)]
    assert (
        split_points.split_point_pattern(tokenization.make_characters(["abc"]).backend_tokenizer)
        is text_format.GPT2_SPLIT_POINT
    )


def test_a_long_text_is_held_a_few_rows_at_a_time_and_one_that_cannot_be_cut_is_refused(
    made, tmp_path, monkeypatch
):
    """Also where no line ends in a letter and no space stands between words, as in Chinese."""
    for line in ("wie sie kann. ", "中文，漢字。\n", "中文\n\u3000\u3000中文。\r\n"):
        content = line * 400
        rows = [
            (i, content[at : at + 100], at == 0) for i, at in enumerate(range(0, len(content), 100))
        ]
        read = []
        stream = (read.append(row[0]) or row for row in [*rows, (len(rows), "table", True)])
        for count, (number, text, _) in enumerate(
            split_points.pieces(stream, split_points.LINE_SPLIT_POINT)
        ):
            assert len(text) <= 300 and len(read) <= count + 3 and number in (0, len(rows))
    for module in (text_reader, split_points):
        monkeypatch.setattr(module, "MAX_UNSPLIT_CHARACTERS", 1000)
    words = "row 3 is too long .* 1,000 characters .*Divide the text into several files"
    for text, place in (("。" * 100, split_points.LINE_SPLIT_POINT), ("a b " * 30, None)):
        with pytest.raises(BadInput, match=words):
            list(split_points.pieces(((3 + i, text, i == 0) for i in range(20)), place))
    whole = [(i, "a" * 2000, True) for i in range(3)]
    assert (
        list(split_points.pieces(whole, split_points.LINE_SPLIT_POINT)) == whole
    )  # rows of a table stay whole
    path = tmp_path / "long.txt"
    path.write_text("words of text\n" + "中" * 2000)
    words = r"long.txt contains no space and no line break in the 1,000 characters .*fold -w"
    with pytest.raises(BadInput, match=words):
        list(text_reader.pieces(path, 100))


def test_a_text_that_is_measured_has_the_ids_of_the_whole(made, tmp_path, monkeypatch):
    """Where a block ends between a full stop and a line break, which are one word of Qwen's."""
    monkeypatch.setattr(text_reader.pieces, "__defaults__", (28,))
    content = "wie es sein kann.\ncom der Text. " * 30
    (tmp_path / "a.txt").write_text(content)
    found = convert.read_text([str(tmp_path / "a.txt")], made["qwen2"], 0)
    assert found.tolist() == [made["qwen2"].eos_token_id, *ids(made["qwen2"], content)]
