"""Test how the text of a recipe is found, identified, split and downloaded."""

import functools
import logging
import os
import random
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from http_server import DataServer
from odd_texts import random_text

from ursa_minor.base import retry
from ursa_minor.base.errors import BadInput, TrainingStopped
from ursa_minor.data.sources import find as find_sources
from ursa_minor.data.sources import remote, stdlib
from ursa_minor.data.sources.columns import NoText
from ursa_minor.data.sources.formats import text as text_reader
from ursa_minor.recipe import keys

ALWAYS = 10**6
# Characters that text mode or splitlines() would change.
ODD_TEXT = "a\r\nb\rc\n\n\x01\ufeffé中\u2028\x85 \x0c\U0001f600 end\x1c \n"
SERVED_TEXT = "some text\r\nof a file\n"
NO_VALIDATION_TEXT = "no text is left for the validation split"


@pytest.fixture(autouse=True)
def downloads(tmp_path, monkeypatch):
    """Use a folder of the test for downloads."""
    folder = tmp_path / "downloads"
    monkeypatch.setattr(remote, "DOWNLOADS", folder)
    return folder


@pytest.fixture
def offline(monkeypatch):
    """Fail if the test opens a network connection."""

    def refuse(*args, **kwargs):
        raise AssertionError("a network connection was opened")

    monkeypatch.setattr(socket, "socket", refuse)


@pytest.fixture
def set_block_bytes(monkeypatch):
    """Return a function that sets the size of the blocks in which text files are read."""
    pieces = text_reader.pieces

    def set_size(block_bytes):
        reader = functools.partial(pieces, block_bytes=block_bytes)
        monkeypatch.setattr(text_reader, "pieces", reader)

    return set_size


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Return an empty folder that replaces the standard library."""
    root = tmp_path / "library"
    root.mkdir()
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(root))
    return root


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serve text files, and do not wait between attempts.

    The answer to ``page*`` is an HTML page. The answer to ``busy*`` is HTTP status 503.
    """
    monkeypatch.setattr(retry.time, "sleep", lambda seconds: None)
    folder = tmp_path / "served"
    write_file(folder, "files/text.txt", SERVED_TEXT)
    write_file(folder, "files/b/text.txt", SERVED_TEXT)
    write_file(folder, "files/empty.txt", "")
    with DataServer(folder) as data_server:
        data_server.url += "/files"
        data_server.problems = [
            ["/page", "<!DOCTYPE html><html>Please log in</html>", ALWAYS],
            ["/busy", "503", ALWAYS],
        ]
        yield data_server


def find(**settings):
    """Find the source with these settings."""
    defaults = {
        "data_seed": 1,
        "validation_tokens": 1000,
        "shard_tokens": 5000,
        "tokenizer": "one",
    }
    return find_sources.find_source(keys.DataSource(**(defaults | settings)))


def write_file(folder, name, content):
    """Write a file, and return its path as a string."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        content = content.encode()
    path.write_bytes(content)
    return str(path)


def read_pieces(path, block_bytes):
    """Return the pieces of a text file."""
    return list(text_reader.pieces(Path(path), block_bytes))


def read_rows(source, split, start=0):
    """Return the rows of a split that has one part."""
    ((_, read),) = source.parts[split]
    return list(read(start))


def read_documents(source, split):
    """Return the documents of a split, each joined from its pieces."""
    documents = []
    for text, is_first_piece in read_rows(source, split):
        if is_first_piece:
            documents.append(text)
        else:
            documents[-1] += text
    return documents


def read_text(source):
    """Return the text of both splits."""
    documents = read_documents(source, "train") + read_documents(source, "validation")
    return "".join(documents)


def rejection(**settings):
    """Return the message of a source that is rejected when it is found or read."""
    with pytest.raises(BadInput) as caught:
        source = find(**settings)
        for split in source.parts:
            read_rows(source, split)
    return str(caught.value)


# Files


@pytest.mark.parametrize(
    "patterns, names",
    [
        ("d.md **/*.txt a.txt", "d.md a.txt a1.txt a[1].txt b.txt sub/c.txt"),
        ("a.txt ABSOLUTE/a.txt [al]*.txt", "a.txt a1.txt a[1].txt"),
        ("a[1].txt", "a[1].txt"),
        ("*.md", "*.md"),
    ],
)
def test_patterns_give_sorted_files_once(tmp_path, monkeypatch, patterns, names):
    """An existing name denotes that file, also if it is a valid pattern."""
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "a[1].txt", "a1.txt", "*.md", "sub/c.txt", "d.md"):
        write_file(tmp_path, name, "x")
    (tmp_path / "link.txt").symlink_to("a.txt")
    patterns = patterns.replace("ABSOLUTE", str(tmp_path))

    assert find_sources.find_files("data_files", patterns.split()) == names.split()


@pytest.mark.parametrize("key", ["data_files", "validation_files"])
def test_missing_file_is_rejected_with_similar_name(tmp_path, key):
    existing = write_file(tmp_path, "t.txt", "x" * 20)
    settings = {"data_files": [existing]} | {key: [str(tmp_path / "no.txt")]}

    message = rejection(**settings)

    assert message.startswith(f"{key}: ")
    assert f"{tmp_path}/no.txt does not exist" in message
    assert f"did you mean {existing}?" in message


@pytest.mark.parametrize(
    "name, message",
    [
        ("no*.txt", "no file matches the pattern no*.txt"),
        ("empty.txt", "empty.txt is empty"),
        ("hf://datasets/o/n/a.txt", "hf:// URLs are supported for tables only"),
        ("http://h:port/x.csv", "data_files: entry 1 is not a valid URL"),
        ("odd/*", r"odd/\udcff.txt' contains a control character or bytes that are not UTF-8"),
    ],
)
def test_unreadable_file_is_rejected(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    write_file(tmp_path, "empty.txt", "")
    write_file(tmp_path, "odd/\udcff.txt", "x")

    assert message in rejection(data_files=[name])


def test_file_without_permission_is_rejected(tmp_path, monkeypatch):
    path = write_file(tmp_path, "t.txt", "x" * 20)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)

    message = rejection(data_files=[path])

    assert path in message
    assert "permission" in message


def test_folder_is_rejected_with_working_pattern(tmp_path):
    write_file(tmp_path, "books/deep/a.txt", "x" * 20)

    message = rejection(data_files=[str(tmp_path / "books")])

    assert "is a folder" in message
    suggested_pattern = message.split("'")[1]
    assert read_text(find(data_files=[suggested_pattern])) == "x" * 20


@pytest.mark.parametrize("spelling", ["ABSOLUTE/t.txt", "t.txt", "ABSOLUTE/sub/../t.txt", "l.txt"])
def test_file_in_both_splits_is_rejected(tmp_path, monkeypatch, offline, spelling):
    monkeypatch.chdir(tmp_path)
    train_file = write_file(tmp_path, "t.txt", "train text")
    (tmp_path / "sub").mkdir()
    (tmp_path / "l.txt").symlink_to(train_file)
    validation_file = spelling.replace("ABSOLUTE", str(tmp_path))

    message = rejection(data_files=[train_file], validation_files=[validation_file])

    assert "is also in data_files" in message


def test_url_in_both_splits_is_rejected(offline):
    url = "https://h/a.csv"

    assert "is also in data_files" in rejection(data_files=[url], validation_files=[url])


@pytest.mark.parametrize("settings", [{}, {"data_files": [], "dataset_name": ""}])
def test_recipe_without_data_is_rejected(settings):
    message = rejection(**settings)

    assert "--data_files" in message
    assert "--data_dir" in message


@pytest.mark.parametrize("name", ["python_stdlib", "owner/name"])
def test_validation_files_without_data_files_are_rejected(tmp_path, name):
    validation_file = write_file(tmp_path, "v.txt", "validation")

    message = rejection(dataset_name=name, validation_files=[validation_file])

    assert "validation_files" in message
    assert "data_files only" in message


def test_text_without_validation_split_is_rejected(tmp_path):
    path = write_file(tmp_path, "t.txt", "train text")

    assert NO_VALIDATION_TEXT in rejection(data_files=[path], validation_fraction=0.0)
    assert NO_VALIDATION_TEXT in rejection(dataset_name="python_stdlib", validation_fraction=0.0)
    assert read_text(find(data_files=[path], validation_fraction=0.1)) == "train text"


def test_validation_files_replace_validation_fraction(tmp_path):
    train_file = write_file(tmp_path, "t.txt", "train text")
    validation_file = write_file(tmp_path, "v.txt", "validation text")

    source = find(
        data_files=[train_file], validation_fraction=0.0, validation_files=[validation_file]
    )

    assert read_documents(source, "train") == ["train text"]
    assert read_documents(source, "validation") == ["validation text"]


def test_tables_do_not_need_validation_fraction(tmp_path):
    """Their validation split has validation_tokens tokens."""
    table = write_file(tmp_path, "t.jsonl", "{}")

    assert find(dataset_name="owner/name", validation_fraction=0.0).files == {}
    assert find(data_files=[table], validation_fraction=0.0).files == {"train": [table]}


@pytest.mark.parametrize("name", ["x" * 251 + ".txt", "é" * 122 + ".jsonl"], ids=["x", "é"])
def test_folder_for_long_name_can_be_created(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = write_file(tmp_path, name, "x" * 20)

    folder = find(data_files=[path]).folder

    folder.mkdir(parents=True)
    assert folder.name.startswith(name[:100])


@pytest.mark.parametrize("length", [256, 5000])
def test_too_long_name_is_rejected(length):
    name = "y" * length + ".txt"

    assert f"data_files: the file {name} does not exist" in rejection(data_files=[name])


# Text: documents, splits, pieces


def split_by_fraction(texts, validation_fraction):
    """Return the expected documents of each split, where the files are split as one text."""
    documents = {"train": [], "validation": []}
    remaining = int(len("".join(texts)) * (1 - validation_fraction))  # train characters
    for text in texts:
        if text[:remaining]:
            documents["train"].append(text[:remaining])
        if text[remaining:]:
            documents["validation"].append(text[remaining:])
        remaining = max(0, remaining - len(text))
    return documents


@pytest.fixture(params=range(2))
def random_files(request, tmp_path):
    """Write several text files, and return their paths by text."""
    draw = random.Random(request.param)
    texts = [random_text(draw, draw.randint(1, 40)) for _ in range(draw.randint(1, 5))]
    texts.append(ODD_TEXT * 3)
    return {text: write_file(tmp_path, f"{i}.txt", text) for i, text in enumerate(texts)}


@pytest.mark.parametrize("fraction, block_bytes", [(0.05, 1), (0.1, 16), (0.5, 4), (0.9, 100)])
def test_fraction_splits_text_without_loss(random_files, set_block_bytes, fraction, block_bytes):
    set_block_bytes(block_bytes)

    source = find(data_files=list(random_files.values()), validation_fraction=fraction)

    expected = split_by_fraction(list(random_files), fraction)
    assert read_documents(source, "train") == expected["train"]
    assert read_documents(source, "validation") == expected["validation"]


@pytest.mark.parametrize("block_bytes", [1, 4, 100])
def test_each_file_is_a_document(random_files, set_block_bytes, block_bytes):
    set_block_bytes(block_bytes)
    *train_texts, validation_text = random_files
    *train_files, validation_file = random_files.values()

    source = find(data_files=train_files, validation_files=[validation_file])

    assert read_documents(source, "train") == train_texts
    assert read_documents(source, "validation") == [validation_text]


def test_long_text_is_read_in_pieces(tmp_path):
    long_text = "é and more words\n" * (3 * text_reader.BLOCK_BYTES // 18)
    long_file = write_file(tmp_path, "long.txt", long_text)
    short_file = write_file(tmp_path, "short.txt", "short")
    validation_file = write_file(tmp_path, "v", "v")
    source = find(data_files=[long_file, short_file], validation_files=[validation_file])

    *long_rows, short_row = read_rows(source, "train")

    assert short_row == ("short", True)
    assert len(long_rows) >= 3
    assert "".join(text for text, _ in long_rows) == long_text
    is_first_piece = [is_first for _, is_first in long_rows]
    assert is_first_piece == [True] + [False] * (len(long_rows) - 1)
    for text, _ in long_rows:
        assert 0 < len(text.encode()) <= text_reader.BLOCK_BYTES + 20


def test_file_deleted_before_reading_is_rejected(tmp_path):
    path = write_file(tmp_path, "deleted.txt", "x" * 20)
    source = find(data_files=[path], validation_files=[write_file(tmp_path, "v", "v")])
    Path(path).unlink()

    with pytest.raises(BadInput, match=r"deleted.txt cannot be read \(No such file"):
        read_rows(source, "train")


def test_pieces_start_with_white_space(tmp_path):
    """A text is split before a space or line break that does not follow white space."""
    path = write_file(tmp_path, "a.txt", "one two\n\nthree  four \n five")

    assert read_pieces(path, 1) == ["one", " two", "\n\nthree", "  four", " \n five"]


@pytest.mark.parametrize("block_bytes", [1, 8])
def test_characters_across_blocks_are_decoded(tmp_path, block_bytes):
    text = "some é 中 words and \U0001f600" * 3
    path = write_file(tmp_path, "a.txt", text)

    assert "".join(read_pieces(path, block_bytes)) == text


INVALID_BYTES = [
    b"\xe9",
    b"\xe4\xb8",
    b"\xe4\xb8X",
    b"\xf0\x9f\x98",
    b"\x80",
    b"\xed\xa0\x80",
    b"\0",
]


@pytest.mark.parametrize("block_bytes", [1, 8])
@pytest.mark.parametrize("rest", [b"", b" more words"], ids=["at end", "inside"])
@pytest.mark.parametrize("invalid", INVALID_BYTES)
def test_invalid_utf8_is_rejected_with_offset(tmp_path, invalid, rest, block_bytes):
    valid = "some é 中 words and \U0001f600".encode() * 3
    path = write_file(tmp_path, "a.txt", valid + invalid + rest)

    with pytest.raises(BadInput) as caught:
        read_pieces(path, block_bytes)

    message = str(caught.value)
    assert path in message
    assert f"byte 0x{invalid[0]:02x} at offset {len(valid)}" in message
    if invalid == b"\0":
        assert f"tr -d '\\000' < {path} > new.txt" in message
    else:
        repaired = (valid + invalid + rest).decode(errors="ignore")
        assert run_suggestion(message, tmp_path).decode() == repaired
        is_truncated = not rest and invalid in (b"\xe9", b"\xe4\xb8", b"\xf0\x9f\x98")
        assert ("truncated" in message) == is_truncated


def run_suggestion(message, folder):
    """Run the command at the end of a message, and return the contents of the file it writes."""
    program = r"(?:iconv|head|sed|tr|gzip|jq|python|\{ echo) "
    command = re.search(f": ({program}.*)$", message)[1]
    before = set(folder.iterdir())
    subprocess.run(command, shell=True, check=True, cwd=folder)
    (new_path,) = set(folder.iterdir()) - before
    return new_path.read_bytes()


SENTENCES = {
    "utf-16": "Der Fluß fließt über die Ebene, täglich.",
    "latin-1": "L'été dernier, nous avons mangé à l'hôtel, puis près de la forêt.",
    "cp1251": "Він каже: мрії збуваються тоді, коли людина наполегливо працює.",
    "gb18030": "北京是中华人民共和国的首都。今天天气很好，我们去公园散步吧。",
    "shift_jis": "東京は日本の首都です。今日は天気がいいから、散歩しましょう。",
}


@pytest.mark.parametrize("encoding", SENTENCES)
def test_other_encoding_is_rejected_with_working_command(tmp_path, encoding):
    text = f"{SENTENCES[encoding]}\r\n" * 200
    path = write_file(tmp_path, "a b.txt", text.encode(encoding))

    message = rejection(data_files=[path])

    assert path in message
    assert run_suggestion(message, tmp_path).decode() == text


def test_latin1_is_not_suggested_for_utf8(tmp_path):
    utf8_text = SENTENCES["latin-1"].encode() * 10
    latin1_text = SENTENCES["latin-1"].encode("latin-1") * 200
    path = write_file(tmp_path, "a.txt", utf8_text + b"\n" + latin1_text)

    message = rejection(data_files=[path])

    assert "UTF-8 and text in another encoding" in message
    assert " -f UTF-8 " in message


def test_document_is_rejected_with_converter(tmp_path):
    path = write_file(tmp_path, "a.txt", b"PK\x03\x04\0\0mimetypeapplication/epub+zip")

    message = rejection(data_files=[path])

    assert path in message
    assert "pandoc -f epub " in message


def test_empty_files_and_folders_are_skipped(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ursa_minor")
    write_file(tmp_path, "pkg/__init__.py", "")
    write_file(tmp_path, "pkg/sub/__init__.py", "")
    file = write_file(tmp_path, "pkg/sub/a.py", "text")

    assert find_sources.find_files("data_files", [f"{tmp_path}/pkg/**"]) == [file]

    (message,) = caplog.messages
    assert "2 empty files and 2 folders" in message


def test_all_unreadable_files_are_listed(tmp_path):
    for number in range(5):
        write_file(tmp_path, f"{number}.txt", b"\xff" if number % 2 else b"some text")

    with pytest.raises(BadInput) as caught:
        read_rows(find(data_files=[f"{tmp_path}/*.txt"]), "train")

    first, second = caught.value.lines
    assert "1.txt" in first
    assert "3.txt" in second


@pytest.mark.parametrize(
    "name, command",
    [
        ("my notes.tar.gz", "tar -xf 'my notes.tar.gz'"),
        ("a.jsonl.tgz", "tar -xf a.jsonl.tgz"),
        ("a.ZIP", "unzip a.ZIP"),
        ("c.txt.gz", "gunzip -k c.txt.gz"),
        ("c.parquet.GZ", "gunzip -k c.parquet.GZ"),
        ("c.txt.zst", "unzstd c.txt.zst"),
    ],
)
def test_archive_is_rejected_with_command(tmp_path, monkeypatch, name, command):
    monkeypatch.chdir(tmp_path)
    write_file(tmp_path, name, b"?" * 99)

    message = rejection(data_files=[name])

    assert message.startswith(f"data_files: {name} ")
    assert message.endswith(f": {command}")


def test_archive_url_is_rejected_with_command(tmp_path):
    url = "https://h/c.txt.bz2?a=1"
    train_file = write_file(tmp_path, "t.txt", "text")

    message = rejection(data_files=[train_file], validation_files=[url])

    assert message.startswith("validation_files: https://h/c.txt.bz2?")
    assert message.endswith(" bunzip2 -k c.txt.bz2")


def write_modules(library, count, content):
    """Write modules m0.py, m1.py, ... with this content to the library."""
    for number in range(count):
        write_file(library, f"m{number}.py", content)


@pytest.mark.parametrize("kind", ["split files", "validation files", "standard library"])
def test_reading_can_start_at_any_row(tmp_path, set_block_bytes, library, kind):
    set_block_bytes(20)
    files = []
    for seed in range(3):
        text = random_text(random.Random(seed), 30) + " of words" * 9
        files.append(write_file(tmp_path, f"{seed}.txt", text))
    write_modules(library, 12, "x = 1\n")
    for number in range(0, 12, 4):
        write_file(library, f"m{number}.py", b"\xe9")
    settings = {
        "split files": {"data_files": files, "validation_fraction": 0.5},
        "validation files": {"data_files": files[:2], "validation_files": files[2:]},
        "standard library": {"dataset_name": "python_stdlib", "validation_fraction": 0.5},
    }
    source = find(**settings[kind])

    for split in ("train", "validation"):
        rows = read_rows(source, split)
        assert len(rows) > 2
        for start in range(len(rows) + 2):
            assert read_rows(source, split, start) == rows[start:]


def assert_tokens_are_bounded(source):
    """Assert that a byte-level tokenizer makes at most the expected number of tokens.

    It makes at most one token per byte, and one more per document.
    """
    documents = read_documents(source, "train")
    num_tokens = sum(len(text.encode()) + 1 for text in documents)
    assert num_tokens <= source.most_tokens


def test_number_of_tokens_is_bounded(tmp_path, library):
    texts = ["a", "é" * 30, ODD_TEXT, "xyz", "中文" * 9]
    files = [write_file(tmp_path, f"{i}.txt", text) for i, text in enumerate(texts)]
    write_modules(library, 30, "é = 1\n")

    assert_tokens_are_bounded(find(data_files=files))
    assert_tokens_are_bounded(find(dataset_name="python_stdlib", validation_fraction=0.3))
    assert find(data_files=files[:1], validation_files=files[1:]).most_tokens == 2
    assert find(dataset_name="owner/name").most_tokens is None


# Names of prepared folders


@pytest.mark.parametrize(
    "tokenizer, names",
    [
        ("openai-community/gpt2", "a-828572c4e6bb name-3623f25c6c0a a-da89193d3802"),
        ("bpe", "a-02349cf0c6f0 name-12ab66cde4db a-c3494ff59b60"),
        ("characters", "a-c22bb7d5c8c3 name-b7e2af274f00 a-83966f35766f"),
        ("Qwen/Qwen3-0.6B", "a-cda6e4a1e75b name-9de58d1c2793 a-ae868bf7996e"),
    ],
)
def test_folder_names_never_change_between_versions(tmp_path, tokenizer, names):
    """Another name would prepare the same data again, so a change of it needs a reason."""
    text_file = write_file(tmp_path, "a.txt", "one text")
    sources = [
        {"data_files": [text_file]},
        {"dataset_name": "owner/name"},
        {"data_files": ["https://h/a.csv"]},
    ]
    settings = {
        "tokenizer": tokenizer,
        "tokenizer_vocab_size": 300,
        "tokenizer_split": "gpt2",
        "text_column": "text",
    }

    folders = [find(**source, **settings).folder.name for source in sources]

    assert folders == names.split()


def test_folder_names_of_other_sources_never_change(tmp_path):
    train_file = write_file(tmp_path, "a.txt", "one text")
    validation_file = write_file(tmp_path, "b.txt", "another")
    table = write_file(tmp_path, "c.jsonl", '{"ids": [1]}')
    set_modified(table, 10**18)

    with_validation = find(data_files=[train_file], validation_files=[validation_file])
    of_tokens = find(data_files=[table], token_column="ids")
    of_token_files = find(data_dir="hf://datasets/owner/name@v1/folder/")

    assert with_validation.folder.name == "a-f7c940da9a87"
    assert of_tokens.folder.name == "c-f09697935348"
    assert of_token_files.folder.name == "name-04d224b10516"


def set_modified(path, nanoseconds):
    """Set the modification time of a file."""
    os.utime(path, ns=(nanoseconds, nanoseconds))


# Settings that change the shards of every source.
CHANGES_OF_ANY_SOURCE = [{"shard_tokens": 5001}, {"limit_tokens": 7}, {"tokenizer": "two"}]


def assert_folders(settings, *, same, different):
    """Assert which changes of the settings keep the folder and which give different folders."""
    folder = find(**settings).folder
    for change in same:
        assert find(**(settings | change)).folder == folder, change
    folders = {folder}
    for change in different:
        folders.add(find(**(settings | change)).folder)
    assert len(folders) == len(different) + 1


def test_folder_of_text_depends_on_contents(tmp_path, offline):
    path = write_file(tmp_path, "x/a.txt", "one text")
    moved = write_file(tmp_path, "y/a.txt", "one text")
    set_modified(moved, 1)
    edited = write_file(tmp_path, "z/a.txt", "two text")
    other = write_file(tmp_path, "v.txt", "three")

    assert_folders(
        {"data_files": [path]},
        same=[
            {"data_files": [moved]},
            {"text_column": "c"},
            {"validation_tokens": 7},
            {"tokenizer_vocab_size": 300},
            {"dataset_name": "owner/name", "dataset_config_name": "c", "dataset_revision": "r"},
        ],
        different=[
            *CHANGES_OF_ANY_SOURCE,
            {"data_files": [edited]},
            {"data_files": [path, other]},
            {"data_files": [other, path]},
            {"validation_fraction": 0.2},
            {"validation_files": [other]},
            {"validation_files": [edited]},
            {"tokenizer": "bpe"},
            {"tokenizer": "bpe", "tokenizer_vocab_size": 300},
            {"tokenizer": "bpe", "tokenizer_split": "gpt2"},
        ],
    )


def test_folder_of_table_depends_on_size_and_time(tmp_path, offline):
    path = write_file(tmp_path, "0/a.jsonl", "{}")
    moved = write_file(tmp_path, "1/a.jsonl", "{}")
    longer = write_file(tmp_path, "2/a.jsonl", "{}{}")
    for table in (path, moved, longer):
        set_modified(table, 10**18)
    newer = write_file(tmp_path, "3/a.jsonl", "{}")
    set_modified(newer, 10**18 + 1)
    validation_file = write_file(tmp_path, "v.jsonl", "{}")

    assert_folders(
        {"data_files": [path]},
        same=[{"data_files": [moved]}, {"validation_fraction": 0.2}],
        different=[
            *CHANGES_OF_ANY_SOURCE,
            {"data_files": [newer]},
            {"data_files": [longer]},
            {"data_files": [path, validation_file]},
            {"data_files": ["https://h/a.jsonl"]},
            {"data_files": ["https://h/b/a.jsonl"]},
            {"text_column": "c"},
            {"validation_tokens": 7},
            {"validation_files": [validation_file]},
        ],
    )


def test_folder_of_dataset_depends_on_its_name(offline):
    assert_folders(
        {"dataset_name": "owner/na me", "dataset_config_name": "c", "dataset_revision": "r"},
        same=[{"validation_fraction": 0.3}],
        different=[
            *CHANGES_OF_ANY_SOURCE,
            {"dataset_name": "other/na me"},
            {"dataset_config_name": None},
            {"dataset_revision": "s"},
            {"dataset_split": "test"},
            {"validation_split": "validation"},
            {"text_column": "c"},
            {"validation_tokens": 7},
        ],
    )


def test_folder_depends_on_contents_of_tokenizer(tmp_path, monkeypatch):
    """Neither on its path nor on a model in the same folder."""
    monkeypatch.chdir(tmp_path)
    text_file = write_file(tmp_path, "a.txt", "some text")
    write_file(tmp_path, "tok/tokenizer.json", "{}")
    write_file(tmp_path, "tok/model.safetensors", "not hashed")
    folder = find(data_files=[text_file], tokenizer="tok").folder

    assert find(data_files=[text_file], tokenizer=str(tmp_path / "tok")).folder == folder
    assert find(data_files=[text_file], tokenizer="./tok").folder == folder
    Path("tok").rename("moved")
    Path("moved/model.safetensors").unlink()
    assert find(data_files=[text_file], tokenizer="moved").folder == folder
    write_file(tmp_path, "moved/tokenizer.json", "{ }")
    assert find(data_files=[text_file], tokenizer="moved").folder != folder


# Tables


@pytest.mark.parametrize(
    "reader, names",
    [
        ("parquet", "a.parquet A.PARQUET a.txt.parquet"),
        ("json", "a.jsonl a.jsonlines a.jl a.json a.ndjson a.json.gz a.jsonl.zst a.jsonl.bz2"),
        ("csv", "a.csv a.v2.csv a.csv.xz"),
        ("arrow", "a.arrow"),
    ],
)
def test_table_is_recognized_by_its_suffix(tmp_path, reader, names):
    for name in names.split():
        path = write_file(tmp_path, name, "some words")
        source = find(data_files=[path])

        assert source.parts is None
        assert source.files == {"train": [path]}
        assert find_sources.reader_of(path).name == reader


@pytest.mark.parametrize("name", ["a.txt", "a.md", "parquet", ".parquet", "a.parquet.txt", "a"])
def test_other_suffix_is_text(tmp_path, name):
    source = find(data_files=[write_file(tmp_path, name, "some words")])

    assert source.files is None
    assert read_text(source) == "some words"


@pytest.mark.parametrize(
    "name, content",
    [
        ("wiki_00", '{"text": "a"}\n\n{"text": "b"}\n'),
        ("a.txt", '[\n{"text": "a"},\n{"text": "b"}\n]\n'),
        ("a.txt", '{"text": "a"}\n  \n{"text": "b"}\n'),
        ("a.txt", '["a", "b"]\n["c"]\n'),
        ("a.txt", '{\n  "text": "a"\n}\n'),
        ("part-0", '{"text": "a"}\n{"text": "b"}\n{"te'),
    ],
    ids=["lines", "array", "blank line", "arrays", "document", "truncated"],
)
def test_json_lines_in_text_file_are_rejected(tmp_path, name, content):
    path = write_file(tmp_path, name, content)

    message = rejection(data_files=[path])

    assert message.startswith(f"data_files: {path} ")
    assert ".jsonl" in message
    assert "--data_format json_lines" in message
    assert read_text(find(data_files=[path], data_format="text")) == content


@pytest.mark.parametrize(
    "name, content",
    [(".eslintrc", '{\n  "root": true\n}\n'), ("a.txt", "[1]\n[2]\n"), ("b.txt", "{a}\n{b}\n")],
)
def test_text_that_resembles_json_is_read(tmp_path, name, content):
    path = write_file(tmp_path, name, content)

    assert read_text(find(data_files=[path])) == content


def test_all_unusable_text_files_are_listed(tmp_path):
    names = {
        "a.txt": b"%PDF-1.4 not a text",
        "b.txt": b"N\0L in a text",
        "c.txt": "Gr\u00fc\u00dfe".encode("cp1252"),
        "d.txt": b'{"text": "a"}\n{"text": "b"}\n',
    }
    for name, content in names.items():
        (tmp_path / name).write_bytes(content)

    with pytest.raises(BadInput) as error:
        find(data_files=[str(tmp_path / "*.txt")])

    for name in names:
        assert len([line for line in error.value.lines if f"/{name} " in line]) == 1, name


@pytest.mark.parametrize(
    "name, data_format, reader",
    [("a.txt", "json_lines", "json"), ("a.jsonl.gz", "csv", "csv")],
)
def test_stated_format_replaces_suffix(tmp_path, name, data_format, reader):
    path = write_file(tmp_path, name, "some words")

    source = find(data_files=[path], data_format=data_format)

    assert source.files == {"train": [path]}
    assert find_sources.reader_of(path, data_format).name == reader
    assert source.identity["data_format"] == data_format


@pytest.mark.parametrize(
    "content, word",
    [
        ("1\tSome words.\n2\tMore words.\n\n", "tabs"),
        ("<!DOCTYPE html>\n<html><p>Some words.</p></html>\n", "HTML"),
        ("name\tsome words\nno columns\n", None),
    ],
    ids=["columns", "HTML", "ragged"],
)
def test_unusual_text_is_read_with_note(tmp_path, content, word):
    path = write_file(tmp_path, "a.txt", content)

    source = find(data_files=[path])

    assert read_text(source) == content
    if word is None:
        assert source.notes == ()
    else:
        (note,) = source.notes
        assert note.startswith(f"data_files: {path} contains ")
        assert word in note


@pytest.mark.parametrize(
    "first_name, second_name",
    [("a.jsonl", "b.parquet"), ("b.parquet", "c.txt"), ("c.txt", "a.jsonl")],
)
def test_files_of_different_formats_are_rejected(tmp_path, first_name, second_name):
    first = write_file(tmp_path, first_name, "{}")
    second = write_file(tmp_path, second_name, "{}")

    for settings in (
        {"data_files": [first, second]},
        {"data_files": [first], "validation_files": [second]},
    ):
        message = rejection(**settings)
        assert "different file formats" in message
        assert first in message
        assert second in message


def test_compressed_file_has_the_same_format(tmp_path):
    plain = write_file(tmp_path, "a.jsonl", "{}")
    compressed = write_file(tmp_path, "d.json.gz", "{}")

    assert find(data_files=[plain, compressed]).files == {"train": [plain, compressed]}


# The standard library


def test_stdlib_splits_are_disjoint(library):
    write_modules(library, 40, "x = 1\n")
    for name in ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"):
        write_file(library, f"pkg/{name}/test_a.py", "x")
    write_file(library, "empty.py", "")

    splits = find_sources.stdlib_files(0.5)

    paths = splits["train"] + splits["validation"]
    assert len(paths) == 40
    assert len(set(paths)) == 40
    for split_paths in splits.values():
        assert split_paths == sorted(split_paths)


def test_stdlib_file_keeps_its_split(library):
    write_modules(library, 40, "x = 1\n")
    before = find_sources.stdlib_files(0.5)
    for number in range(0, 40, 2):
        (library / f"m{number}.py").unlink()

    after = find_sources.stdlib_files(0.5)

    assert set(after["train"]) < set(before["train"])
    assert set(after["validation"]) < set(before["validation"])


def test_stdlib_folder_depends_on_its_files(library):
    write_modules(library, 40, "x = 1\n")
    settings = {"dataset_name": "python_stdlib", "validation_fraction": 0.5}
    folder = find(**settings).folder
    other_folder = find(**(settings | {"validation_fraction": 0.6})).folder
    assert find(**settings).folder == folder
    assert other_folder != folder

    (library / "m0.py").unlink()

    assert find(**settings).folder not in (folder, other_folder)


def test_each_stdlib_file_is_a_document(library):
    for number in range(40):
        write_file(library, f"m{number}.py", f"x = {number}\r\n")
        write_file(library, f"pkg/tests/t{number}.py", f"test {number}\n")
    write_file(library, "latin.py", b"# caf\xe9\n")  # not UTF-8, so a row without text
    source = find(dataset_name="python_stdlib", validation_fraction=0.3)

    rows = read_rows(source, "train") + read_rows(source, "validation")
    test_rows = read_rows(source, "test")

    assert all(is_first_piece for _, is_first_piece in rows)
    texts = [text for text, _ in rows]
    (row_without_text,) = [text for text in texts if isinstance(text, NoText)]
    texts.remove(row_without_text)
    assert sorted(texts) == sorted(f"x = {number}\r\n" for number in range(40))
    assert 0 < len(test_rows) < 40
    for text, _ in test_rows:
        assert text.startswith("test ")


# Downloads


def test_url_is_downloaded_once(downloads, server):
    url = f"{server.url}/text.txt?x=1"

    first = find(data_files=[url])
    second = find(data_files=[url])

    assert server.log == ["GET /files/text.txt"]
    assert second.folder == first.folder
    assert read_text(first) == SERVED_TEXT
    assert len(list(downloads.iterdir())) == 1


def test_urls_with_equal_file_names_are_different(server):
    urls = [f"{server.url}/text.txt", f"{server.url}/b/text.txt"]

    files = find_sources.find_files("data_files", urls)

    assert len(set(files)) == 2


@pytest.mark.parametrize(
    "name, reason",
    [
        ("missing.txt", "HTTP status 404"),
        ("busy.txt", "failed 10 times in a row, last with HTTP status 503"),
        ("empty.txt", "empty file"),
    ],
)
def test_failed_download_leaves_no_file(tmp_path, downloads, server, name, reason):
    url = f"{server.url}/{name}"
    train_file = write_file(tmp_path, "t.txt", "x" * 20)

    with pytest.raises((BadInput, TrainingStopped)) as caught:
        find(data_files=[train_file], validation_files=[url])

    assert url in str(caught.value)
    assert reason in str(caught.value)
    assert not downloads.exists() or not list(downloads.iterdir())


def test_html_is_text_if_requested(server):
    (path,) = find_sources.find_files("data_files", [f"{server.url}/page.html?x=1"])

    assert Path(path).read_bytes().startswith(b"<!DOCTYPE html>")


def test_unexpected_html_is_rejected_without_secret(server):
    message = rejection(data_files=[f"{server.url}/page?token=SECRET"])

    assert "page?redacted" in message
    assert "login page" in message
    assert "SECRET" not in message


def test_page_of_hub_is_rejected_with_file_url(server):
    server.problems.insert(0, ["/blob/", "<!DOCTYPE html><html>A file</html>", ALWAYS])
    host = server.url.removesuffix("/files")

    message = rejection(data_files=[f"{host}/datasets/me/corpus/blob/main/a.txt"])

    assert message.endswith(f": {host}/datasets/me/corpus/resolve/main/a.txt")


def test_download_with_long_name_is_kept(server):
    name = "x" * 250 + ".txt"
    shutil.copy(server.folder / "files/text.txt", server.folder / "files" / name)

    (path,) = find_sources.find_files("data_files", [f"{server.url}/{name}"])

    assert path.endswith("xx.txt")
    assert Path(path).read_bytes() == SERVED_TEXT.encode()


def test_download_of_maximum_size_is_kept(server, monkeypatch):
    monkeypatch.setattr(remote, "DOWNLOAD_BYTES", len(SERVED_TEXT))

    (path,) = find_sources.find_files("data_files", [f"{server.url}/text.txt"])

    assert Path(path).read_bytes() == SERVED_TEXT.encode()


def test_too_large_download_is_rejected(downloads, server, monkeypatch):
    monkeypatch.setattr(remote, "DOWNLOAD_BYTES", len(SERVED_TEXT) - 1)

    message = rejection(data_files=[f"{server.url}/text.txt"])

    assert re.search(r"/text.txt is larger than [\de-]+ GB", message)
    assert "a data set of the Hub" in message
    assert not list(downloads.iterdir())
