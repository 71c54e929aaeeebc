"""Separators are inserted into token files of other programs that have none."""

import itertools

import numpy as np
import pytest
from token_files import write_datatrove, write_megatron

from ursa_minor.base.errors import BadInput
from ursa_minor.data.loading import windows
from ursa_minor.data.tokens import documents, shards, token_format

SEPARATOR = 7
LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6]
WRITERS = {"a_train.ds": write_datatrove, "a_train.bin": write_megatron}


def make_documents(lengths):
    """Return documents of these lengths without the separator."""
    draw = np.random.default_rng(0)
    return [draw.integers(10, 50, length).tolist() for length in lengths]


def joined_with_separators(texts):
    """Return the ids as this project writes them: the separator precedes each document."""
    ids = []
    for document in texts:
        if document:
            ids += [SEPARATOR, *document]
    return ids


def open_with_separators(path):
    """Open a file, and insert separators if it has none."""
    ids, _ = shards.open_ids(path)
    return documents.with_separators(path, ids, SEPARATOR)


@pytest.fixture(params=WRITERS)
def write(request, tmp_path):
    """Return a function that writes documents in a format, and returns the path."""
    return lambda texts: WRITERS[request.param](tmp_path / request.param, texts)


@pytest.mark.parametrize(
    "lengths",
    [LENGTHS, [5], [0, *LENGTHS], [2, 0, 0, 3], [*LENGTHS, 0], [0], []],
    ids=["documents", "one", "empty first", "empty inside", "empty last", "only empty", "none"],
)
def test_separator_precedes_each_document(write, lengths):
    texts = make_documents(lengths)

    ids = open_with_separators(write(texts))

    assert ids[:].tolist() == joined_with_separators(texts)
    assert len(ids) == len(ids[:])


def test_any_part_is_read_alone(write):
    texts = make_documents(LENGTHS)
    expected = joined_with_separators(texts)
    ids = open_with_separators(write(texts))

    for start in range(len(expected)):
        for stop in range(start, len(expected) + 1):
            assert ids[start:stop].tolist() == expected[start:stop]


def test_index_is_checked_in_parts(write, monkeypatch):
    monkeypatch.setattr(token_format, "CHECKED_ENTRIES", 3)
    texts = make_documents([*LENGTHS, 0])

    ids = open_with_separators(write(texts))

    assert ids[:].tolist() == joined_with_separators(texts)


@pytest.mark.parametrize("separator", [7, 300, 70_000])
def test_separator_may_be_wider_than_the_ids(tmp_path, separator):
    path = write_megatron(tmp_path / "a.bin", [[1, 2], [3]], dtype="uint8")
    ids, _ = shards.open_ids(path)

    with_separators = documents.with_separators(path, ids, separator)

    assert with_separators[:].tolist() == [separator, 1, 2, separator, 3]


@pytest.mark.parametrize("place", ["before", "after"])
def test_existing_separators_are_kept(write, place):
    texts = make_documents(LENGTHS)
    if place == "before":
        texts = [[SEPARATOR, *document] for document in texts]
    else:
        texts = [[*document, SEPARATOR] for document in texts]

    ids = open_with_separators(write(texts))

    assert isinstance(ids, np.ndarray)
    assert ids.tolist() == list(itertools.chain.from_iterable(texts))


def test_separator_in_one_text_is_no_sign(write):
    """The literal <|endoftext|> may be the end of a text."""
    texts = make_documents(LENGTHS)
    texts[0].append(SEPARATOR)

    ids = open_with_separators(write(texts))

    assert ids[:].tolist() == joined_with_separators(texts)


def test_invalid_id_is_named_with_position_in_file(write):
    texts = make_documents(LENGTHS)
    texts[2][1] = 900
    path = write(texts)
    opened = windows.Windows(4, 100)
    ids = open_with_separators(path)
    opened.append(path, len(ids), ids, 0)
    row = np.zeros(5, dtype=np.int64)

    for check in (opened.check_ids, lambda: opened.read(1, row)):
        with pytest.raises(BadInput) as caught:
            check()

        assert f"token 5 at offset {5 * ids.itemsize} has the id 900" in str(caught.value)


def test_windows_of_file_and_of_written_separators_are_equal(write, tmp_path):
    texts = make_documents(LENGTHS)
    path = write(texts)
    expected = np.array(joined_with_separators(texts), dtype=np.uint16)
    rows = []
    for ids in (open_with_separators(path), expected):
        opened = windows.Windows(4, 100)
        opened.append(path, len(ids), ids, 0)
        row = np.zeros(5, dtype=np.int64)
        split_rows = [next(opened.read_all())[0].tolist()]
        for window in range(opened.num_windows):
            opened.read(window, row)
            split_rows.append(row.tolist())
        rows.append(split_rows)

    assert rows[0] == rows[1]


@pytest.mark.parametrize("place", ["before", "after", "missing"])
def test_following_separators_are_found_by_index(write, place):
    texts = make_documents(LENGTHS)
    if place == "before":
        texts = [[SEPARATOR, *document] for document in texts]
    if place == "after":
        texts = [[*document, SEPARATOR] for document in texts]
    path = write(texts)

    found = documents.find_following_separators([path], SEPARATOR)

    assert found == (path if place == "after" else None)


@pytest.mark.parametrize(
    ("first", "last", "is_found"),
    [([1, 2, 7, 3], [4, 5, 7], True), ([7, 1, 2], [3, 7], False), ([1, 2], [7, 3], False)],
    ids=["after", "before", "unknown"],
)
def test_following_separators_are_found_without_index(tmp_path, first, last, is_found):
    paths = [tmp_path / "a_train_0.npy", tmp_path / "a_train_1.npy"]
    for path, ids in zip(paths, (first, last), strict=True):
        np.save(path, np.array(ids, dtype=np.uint16))

    found = documents.find_following_separators(paths, SEPARATOR)

    assert (found is not None) == is_found
