"""Test how text files are split into documents at a separator."""

import functools
import random

import pytest

from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources import find as find_sources
from ursa_minor.data.sources import separated_text
from ursa_minor.data.sources.formats import text as text_reader
from ursa_minor.recipe.keys import DataSource

# For each separator, a text and its documents.
TEXTS = {
    "<|endoftext|>": (
        "<|endoftext|>\nfirst\nline 2\n\n<|endoftext|>\r\n<|endoftext|>\n \n<|endoftext|>"
        "\n\n second \r\n<|endoftext|>third<|endoftext|> fourth\n",
        ["first\nline 2\n", "\n second ", "third", " fourth\n"],
    ),
    "blank_line": (
        "\n \r\n  first\r\n second\r\n\r\n \t\r\nthird\n\n\n\n fourth\n \u3000\nfifth\n\t",
        ["  first\r\n second", "third", " fourth", "fifth"],
    ),
    r"\n---\n": (
        "---\nfirst --- \n ---\n---\n---\r\nsecond\r\n---\r\n\r\nthird---\n--- x\n\n---",
        ["first --- \n ---", "second", "\r\nthird---\n--- x\n"],
    ),
    r"\n": ("\ufeffone\r\ntwo\n\n \n three\nfour", ["\ufeffone", "two", " three", "four"]),
    r"(.*) [a\t": (
        "first (x) [a\t\n(.*) [a (.*) [a\tsecond(.*) [a\t",
        ["first (x) [a\t\n(.*) [a ", "second"],
    ),
    r"=\n=": ("=\r\n=one\n=\r\n=\ntwo = \n = three=\n=", ["one", "two = \n = three"]),
}


@pytest.fixture
def set_block_bytes(monkeypatch):
    """Return a function that sets the size of the blocks in which text files are read."""
    pieces = text_reader.pieces

    def set_size(block_bytes):
        reader = functools.partial(pieces, block_bytes=block_bytes)
        monkeypatch.setattr(text_reader, "pieces", reader)

    return set_size


def write_text(path, text):
    """Write a text file without converting line breaks, and return its path."""
    path.write_bytes(text.encode())
    return path


def documents_of(rows):
    """Return documents, each joined from its pieces."""
    documents = []
    for text, begins_document in rows:
        assert text
        if begins_document:
            documents.append(text)
        else:
            documents[-1] += text
    return documents


def find(paths, separator, **settings):
    """Find the source of text files with a separator."""
    names = [str(path) for path in paths]
    config = DataSource(
        data_files=names, document_separator=separator, tokenizer="t", data_seed=1, **settings
    )
    return find_sources.find_source(config)


def split_documents(source):
    """Return the documents of the train and of the validation split."""
    documents = []
    for split in ("train", "validation"):
        ((_, read_rows),) = source.parts[split]
        documents.append(documents_of(read_rows(0)))
    return documents


@pytest.mark.parametrize("value", TEXTS)
def test_text_is_split_for_any_block_size(tmp_path, monkeypatch, set_block_bytes, value):
    text, documents = TEXTS[value]
    path = write_text(tmp_path / "a.txt", text)
    separator = separated_text.parse_separator(value)

    for block_bytes in range(1, len(text) + 2):
        set_block_bytes(block_bytes)
        for long_document_characters in (0, 5, 2**20):
            monkeypatch.setattr(
                separated_text, "LONG_DOCUMENT_CHARACTERS", long_document_characters
            )
            rows = separated_text.rows([path, path], separator)
            assert documents_of(rows) == [*documents, *documents]
        for piece in separated_text.split_file(path, separator):
            assert text.startswith(piece.text, piece.position)


def test_long_document_is_not_cut_inside_separator(monkeypatch):
    monkeypatch.setattr(separated_text, "LONG_DOCUMENT_CHARACTERS", 8)
    splitter = separated_text.DocumentSplitter(separated_text.parse_separator("END OF STORY"))

    pieces = [
        *splitter.add("one two three END OF"),
        *splitter.add(" STORY four"),
        *splitter.finish(),
    ]

    assert documents_of((piece.text, piece.begins_document) for piece in pieces) == [
        "one two three ",
        " four",
    ]


def test_only_long_documents_have_several_rows(tmp_path):
    generator = random.Random(0)
    short = [f"{number} {'word ' * generator.randrange(400)}end" for number in range(3000)]
    long = "many words\n" * 400_000
    documents = [*short, long, *short]
    path = write_text(tmp_path / "a.txt", "<|endoftext|>".join(documents))
    separator = separated_text.parse_separator("<|endoftext|>")

    rows = list(separated_text.rows([path], separator))

    assert documents_of(rows) == [*short, long.removesuffix("\n"), *short]
    num_rows_of_long = len(rows) - 2 * len(short)
    assert 2 <= num_rows_of_long <= 5


def test_validation_begins_at_first_document_after_point(tmp_path, set_block_bytes):
    set_block_bytes(7)
    documents = [[f"{file}.{number} " + "x" * 9 for number in range(10)] for file in range(2)]
    paths = [
        write_text(tmp_path / f"{file}.txt", "\n\n".join(texts))
        for file, texts in enumerate(documents)
    ]
    all_documents = [*documents[0], *documents[1]]
    num_characters = sum(len(path.read_text()) for path in paths)

    for percent in range(8, 90):
        point = num_characters * (1 - percent / 100)
        starts = [15 * number for number in range(10)]  # of the first file, whose length is 148
        starts += [148 + start for start in starts]
        num_train = sum(start < int(point) for start in starts)
        source = find(paths, "blank_line", validation_fraction=percent / 100)
        train, validation = split_documents(source)
        assert train == all_documents[:num_train]
        assert validation == all_documents[num_train:]


def test_text_without_validation_document_is_rejected(tmp_path):
    other = write_text(tmp_path / "b.txt", "a\n\nb")

    for text in ("first\n\n" + "long " * 100, "\n\n\n"):
        path = write_text(tmp_path / "a.txt", text)
        with pytest.raises(BadInput) as caught:
            split_documents(find([path], "blank_line"))
        assert "document_separator" in str(caught.value)
        assert "--validation_files" in str(caught.value)

    with_files = find([path], "blank_line", validation_files=[str(other)])
    assert split_documents(with_files) == [[], ["a", "b"]]


def test_folder_depends_on_separator_only_if_set(tmp_path):
    path = write_text(tmp_path / "a.txt", "one text")

    folders = [
        find([path], separator).folder for separator in (None, "a", "blank_line", r"\n", "\n")
    ]

    assert len(set(folders)) == 4
    assert folders[3] == folders[4]
    assert "document_separator" not in find([path], None).identity
