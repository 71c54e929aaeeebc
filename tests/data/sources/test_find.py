"""Sources: found and named without being read; text kept to the byte, in pieces; fetched whole or not at all."""

import functools
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
from ursa_minor.data.sources.formats import text as text_reader
from ursa_minor.recipe import keys

ODD = "a\r\nb\rc\n\n\x01\ufeffé中\u2028\x85 \x0c\U0001f600 end\x1c \n"  # what text modes and splitlines() change
PLAIN = {"data_seed": 1, "validation_tokens": 1000, "shard_tokens": 5000, "tokenizer": "one"}


@pytest.fixture(autouse=True)
def downloads(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "DOWNLOADS", tmp_path / "downloads")
    return tmp_path / "downloads"


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "socket", refuse)


@pytest.fixture
def pieces_of(monkeypatch):
    """Call it with a number of bytes to make text files come in blocks of that size."""
    real = text_reader.pieces
    return lambda size: monkeypatch.setattr(
        text_reader, "pieces", functools.partial(real, block_bytes=size)
    )


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A folder that stands for the standard library."""
    root = tmp_path / "library"
    root.mkdir()
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(root))
    return root


@pytest.fixture
def server(tmp_path):
    """Text files behind URLs, and what misbehaves on the way: ``page`` answers with HTML, whatever its name ends with."""
    folder = tmp_path / "served"
    for name in ("text.txt", "b/text.txt"):
        text(folder, f"files/{name}", "some text\r\nof a file\n")
    text(folder, "files/empty.txt", "")
    with DataServer(folder) as made:
        made.url += "/files"
        made.problems = [
            ["/page", "<!DOCTYPE html><html>Please log in</html>", 10**6],
            ["/busy", "503", 10**6],
        ]
        yield made


def find(**changes):
    return find_sources.find_source(keys.DataSource(**PLAIN | changes))


def text(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def pieces(path, block_bytes):
    return list(text_reader.pieces(Path(path), block_bytes))


def rows(source, split, start=0):
    ((_, read),) = source.parts[split]
    return list(read(start))


def documents(source, split):
    """Join the pieces of each document; a row without text is one."""
    found = []
    for words, begins in rows(source, split):
        assert begins or found, "the first row begins a document"
        if begins:
            found.append(words)
        else:
            found[-1] += words
    return found


def whole(source):
    return "".join("".join(documents(source, split)) for split in ("train", "validation"))


def refused(**changes):
    """What is said by a source that is refused when it is found, or when it is read."""
    with pytest.raises(BadInput) as caught:
        source = find(**changes)
        for split in source.parts:
            rows(source, split)
    return str(caught.value)


# Files.


def test_paths_and_globs_give_sorted_files_each_once_in_the_order_asked(tmp_path, monkeypatch):
    """A name that exists is that file, also where it looks like a glob."""
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "a[1].txt", "a1.txt", "*.md", "sub/c.txt", "d.md"):
        text(tmp_path, name, "x")
    (tmp_path / "link.txt").symlink_to("a.txt")
    for asked, found in {
        "d.md **/*.txt a.txt": "d.md a.txt a1.txt a[1].txt b.txt sub/c.txt",
        f"a.txt {tmp_path}/a.txt [al]*.txt": "a.txt a1.txt a[1].txt",
        "a[1].txt": "a[1].txt",
        "*.md": "*.md",
    }.items():
        assert find_sources.find_files("data_files", asked.split()) == found.split()


def test_a_file_that_cannot_be_read_is_refused_with_its_key_and_a_folder_with_a_glob_that_works(
    tmp_path, monkeypatch
):
    name = text(tmp_path, "t.txt", "x" * 20)
    for key in ("data_files", "validation_files"):
        asked = {"data_files": [name]} | {key: [str(tmp_path / "no.txt")]}
        assert (
            refused(**asked)
            == f"{key}: the file {tmp_path}/no.txt does not exist; did you mean {tmp_path}/t.txt?"
        )
    assert "no*.txt does not exist" in refused(data_files=[f"{tmp_path}/no*.txt"])
    assert "e.txt is empty" in refused(data_files=[text(tmp_path, "e.txt", "")])
    assert "hf:// URLs are supported for tables only" in refused(
        data_files=["hf://datasets/o/n/a.txt"]
    )
    assert "data_files: entry 1 is not a valid URL" in refused(data_files=["http://h:port/x.csv"])
    text(tmp_path, "books/deep/a.txt", "x" * 20)
    message = refused(data_files=[str(tmp_path / "books")])
    assert "is a folder" in message and whole(find(data_files=[message.split("'")[1]])) == "x" * 20
    text(tmp_path, "odd/\udcff.txt", "x")
    assert r"odd/\udcff.txt' contains a control character or bytes that are not UTF-8" in refused(
        data_files=[f"{tmp_path}/odd/*"]
    )
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)
    assert "do not have permission to read" in refused(data_files=[name])


def test_a_file_in_both_splits_is_refused_however_it_is_written(tmp_path, monkeypatch, offline):
    monkeypatch.chdir(tmp_path)
    train = text(tmp_path, "t.txt", "train me")
    (tmp_path / "sub").mkdir()
    (tmp_path / "l.txt").symlink_to(train)
    for other in (train, "t.txt", f"{tmp_path}/sub/../t.txt", "l.txt"):
        assert "is also in data_files" in refused(data_files=[train], validation_files=[other])
    assert "is also in data_files" in refused(
        data_files=["https://h/a.csv"], validation_files=["https://h/a.csv"]
    )


def test_no_source_and_validation_files_beside_one_that_would_not_read_them_are_refused(tmp_path):
    message = refused()
    assert (
        "--data_files" in message
        and "--data_dir" in message
        and refused(data_files=[], dataset_name="") == message
    )
    held_out = [text(tmp_path, "v.txt", "validation")]
    for name in ("python_stdlib", "owner/name"):
        assert "validation_files can be used with data_files only" in refused(
            dataset_name=name, validation_files=held_out
        )


def test_no_text_to_validate_on_is_refused_with_a_remedy_that_works_and_tables_keep_validation_tokens(
    tmp_path,
):
    train, held_out = text(tmp_path, "t.txt", "train me"), text(tmp_path, "v.txt", "score me")
    assert "no text is left for the validation split" in refused(
        data_files=[train], validation_fraction=0.0
    )
    assert whole(find(data_files=[train], validation_fraction=0.1)) == "train me"
    source = find(data_files=[train], validation_fraction=0.0, validation_files=[held_out])
    assert documents(source, "train") == ["train me"] and documents(source, "validation") == [
        "score me"
    ]
    assert "no text is left for the validation split" in refused(
        dataset_name="python_stdlib", validation_fraction=0.0
    )
    assert find(dataset_name="owner/name", validation_fraction=0.0).files == {}
    assert find(data_files=[text(tmp_path, "t.jsonl", "{}")], validation_fraction=0.0).files


@pytest.mark.parametrize("name", ["x" * 251 + ".txt", "é" * 122 + ".jsonl"])
def test_a_long_name_is_found_and_has_a_folder_that_can_be_made(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = find(data_files=[text(tmp_path, name, "x" * 20)]).folder
    folder.mkdir(parents=True)
    assert folder.name.startswith(name[:100])
    for longer in ("y" * 256, "y" * 5000):
        assert (
            refused(data_files=[f"{longer}.txt"])
            == f"data_files: the file {longer}.txt does not exist. Check the path"
        )


# Text: documents, splits, pieces.


@pytest.mark.parametrize("seed", range(2))
def test_train_and_validation_are_all_of_the_text_each_character_once(tmp_path, pieces_of, seed):
    """Several files stay documents and are split as one text."""
    draw = random.Random(seed)
    texts = [random_text(draw, draw.randint(1, 40)) for _ in range(draw.randint(1, 5))] + [ODD * 3]
    names = [text(tmp_path, f"{i}.txt", content) for i, content in enumerate(texts)]
    for fraction in (0.05, 0.1, 0.5, 0.9):
        pieces_of(draw.choice([1, 4, 16, 100]))
        wanted, left = {"train": [], "validation": []}, int(len("".join(texts)) * (1 - fraction))
        for content in texts:
            wanted["train"] += [content[:left]] if content[:left] else []
            wanted["validation"] += [content[left:]] if content[left:] else []
            left = max(0, left - len(content))
        source = find(data_files=names, validation_fraction=fraction)
        assert {split: documents(source, split) for split in wanted} == wanted
        source = find(data_files=names[:-1], validation_files=names[-1:])
        assert (
            documents(source, "train") == texts[:-1]
            and documents(source, "validation") == texts[-1:]
        )


def test_a_long_text_comes_in_pieces_of_about_a_block_and_only_the_first_begins_it(tmp_path):
    words = "é and more words\n" * (3 * text_reader.BLOCK_BYTES // 18)
    name = text(tmp_path, "long.txt", words)
    source = find(
        data_files=[name, text(tmp_path, "short.txt", "short")],
        validation_files=[text(tmp_path, "v", "v")],
    )
    *long, short = rows(source, "train")
    assert len(long) >= 3 and [begins for _, begins in long] == [True] + [False] * (len(long) - 1)
    assert "".join(piece for piece, _ in long) == words and short == ("short", True)
    assert all(0 < len(piece.encode()) <= text_reader.BLOCK_BYTES + 20 for piece, _ in long)
    Path(name).unlink()
    with pytest.raises(BadInput, match=r"long.txt cannot be read \(No such file"):
        rows(source, "train")


def test_a_text_is_cut_before_each_space_or_line_break_that_follows_no_white_space(tmp_path):
    found = pieces(text(tmp_path, "a.txt", "one two\n\nthree  four \n five"), 1)
    assert found == ["one", " two", "\n\nthree", "  four", " \n five"]


@pytest.mark.parametrize("block_bytes", [1, 8])
def test_characters_lie_across_blocks_and_bytes_that_are_not_utf8_are_refused_with_offset_and_remedy(
    tmp_path, block_bytes
):
    good = "some é 中 words and \U0001f600".encode() * 3
    assert "".join(pieces(text(tmp_path, "a.txt", good), block_bytes)) == good.decode()
    for bad in (
        b"\xe9",
        b"\xe4\xb8",
        b"\xe4\xb8X",
        b"\xf0\x9f\x98",
        b"\x80",
        b"\xed\xa0\x80",
        b"\0",
    ):
        for content in (good + bad, good + bad + b" more words"):
            name = text(tmp_path, "a.txt", content)
            with pytest.raises(BadInput) as caught:
                pieces(name, block_bytes)
            assert str(caught.value).startswith(
                f"{name} is not UTF-8 text: byte 0x{bad[0]:02x} at offset {len(good)}"
            )
            fix = (
                "Leave out this file"
                if bad == b"\0"
                else f"iconv -f LATIN1 -t UTF-8 {name} > new.txt"
            )
            assert str(caught.value).endswith(fix)


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_bytes_of_another_encoding_are_refused_with_the_iconv_that_makes_utf8_of_them(
    tmp_path, encoding
):
    words = "Der Fluß fließt über die Ebene, täglich.\r\n" * 200
    message = refused(data_files=[text(tmp_path, "a b.txt", words.encode(encoding))])
    subprocess.run(message.split("for example: ")[1], shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "new.txt").read_bytes().decode() == words


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
def test_an_archive_and_a_packed_text_are_refused_with_the_command_that_unpacks_them(
    tmp_path, monkeypatch, name, command
):
    monkeypatch.chdir(tmp_path)
    text(tmp_path, name, b"?" * 99)
    message = refused(data_files=[name])
    assert message.startswith(f"data_files: {name} is an archive or a compressed text")
    assert message.endswith(f": {command}")
    held_out = refused(
        data_files=[text(tmp_path, "t.txt", "text")], validation_files=["https://h/c.txt.bz2?a=1"]
    )
    assert held_out.startswith("validation_files: https://h/c.txt.bz2?") and held_out.endswith(
        " bunzip2 -k c.txt.bz2"
    )


def test_reading_from_a_row_on_is_reading_all_without_the_rows_before(tmp_path, pieces_of, library):
    pieces_of(20)
    names = [
        text(tmp_path, f"{i}.txt", random_text(random.Random(i), 30) + " of words" * 9)
        for i in range(3)
    ]
    for i in range(12):
        text(library, f"m{i}.py", f"x = {i}\n" if i % 4 else b"\xe9")
    found = [
        find(data_files=names, validation_fraction=0.5),
        find(data_files=names[:2], validation_files=names[2:]),
    ]
    for source in (*found, find(dataset_name="python_stdlib", validation_fraction=0.5)):
        for split in ("train", "validation"):
            every = rows(source, split)
            assert len(every) > 2
            for start in range(len(every) + 2):
                assert rows(source, split, start) == every[start:]


def test_a_source_bounds_the_tokens_that_can_be_made_of_it(tmp_path, library):
    """A byte-level tokenizer makes at most one of each byte, and one more of each document."""
    names = [
        text(tmp_path, f"{i}.txt", content)
        for i, content in enumerate(["a", "é" * 30, ODD, "xyz", "中文" * 9])
    ]
    for i in range(30):
        text(library, f"m{i}.py", "é = 1\n")
    for changes in (
        {"data_files": names},
        {"dataset_name": "python_stdlib", "validation_fraction": 0.3},
    ):
        source = find(**changes)
        assert (
            sum(len(words.encode()) + 1 for words in documents(source, "train"))
            <= source.most_tokens
        )
    assert find(data_files=names[:1], validation_files=names[1:]).most_tokens == 2
    assert find(dataset_name="owner/name").most_tokens is None


# Fingerprints.


def test_names_of_prepared_folders_are_stable(tmp_path):
    """Another name would prepare the same data again, so a change of these names needs a reason."""
    names = {
        "openai-community/gpt2": "a-828572c4e6bb name-3623f25c6c0a a-da89193d3802",
        "bpe": "a-02349cf0c6f0 name-12ab66cde4db a-c3494ff59b60",
        "characters": "a-c22bb7d5c8c3 name-b7e2af274f00 a-83966f35766f",
        "Qwen/Qwen3-0.6B": "a-cda6e4a1e75b name-9de58d1c2793 a-ae868bf7996e",
    }
    here = text(tmp_path, "a.txt", "one text")
    for name, folders in names.items():
        asked = (
            {"data_files": [here]},
            {"dataset_name": "owner/name"},
            {"data_files": ["https://h/a.csv"]},
        )
        plain = {
            "tokenizer": name,
            "tokenizer_vocab_size": 300,
            "tokenizer_split": "gpt2",
            "text_column": "text",
        }
        assert " ".join(find(**one, **plain).folder.name for one in asked) == folders
    ids = text(tmp_path, "c.jsonl", '{"ids": [1]}')
    os.utime(ids, ns=(10**18, 10**18))
    asked = ({"data_files": [here], "validation_files": [text(tmp_path, "b.txt", "another")]},)
    asked += (
        {"data_files": [ids], "token_column": "ids"},
        {"data_dir": "hf://datasets/owner/name@v1/folder/"},
    )
    assert (
        " ".join(find(**one).folder.name for one in asked)
        == "a-f7c940da9a87 c-f09697935348 name-04d224b10516"
    )


CUT = [
    {"shard_tokens": 5001},
    {"limit_tokens": 7},
    {"tokenizer": "two"},
]  # what changes the shards of every source


def test_a_folder_changes_with_all_that_decides_its_shards_and_with_nothing_else(tmp_path, offline):
    here, there, other = (
        text(tmp_path, f"{at}/a.txt", "one text" if at < "z" else "two text") for at in "xyz"
    )
    held_out, held = text(tmp_path, "v.txt", "three"), text(tmp_path, "v.jsonl", "{}")
    table, moved, grown, later = (
        text(tmp_path, f"{i}/a.jsonl", "{}" * (1 + (i == 2))) for i in range(4)
    )
    for path, time in (
        (there, 1),
        *((path, 10**18) for path in (table, moved, grown)),
        (later, 10**18 + 1),
    ):
        os.utime(path, ns=(time, time))
    hub = {"dataset_name": "owner/na me", "dataset_config_name": "c", "dataset_revision": "r"}
    bpe, of_tables = {"tokenizer": "bpe"}, [{"text_column": "c"}, {"validation_tokens": 7}]
    same = {"text": [{"data_files": [there]}, *of_tables, {"tokenizer_vocab_size": 300}, hub]}
    same |= {
        "table": [{"data_files": [moved]}, {"validation_fraction": 0.2}],
        "hub": [{"validation_fraction": 0.3}],
    }
    others = {"text": [[other], [here, held_out], [held_out, here]], "hub": []}
    others["table"] = [
        [later],
        [grown],
        [table, held],
        ["https://h/a.jsonl"],
        ["https://h/b/a.jsonl"],
    ]
    changes = {
        kind: [{"data_files": names} for names in found] + CUT for kind, found in others.items()
    }
    changes["text"] += [
        {"validation_fraction": 0.2},
        {"validation_files": [held_out]},
        {"validation_files": [other]},
    ]
    changes["text"] += [bpe, bpe | {"tokenizer_vocab_size": 300}, bpe | {"tokenizer_split": "gpt2"}]
    changes["table"] += [*of_tables, {"validation_files": [held]}]
    changes["hub"] += [
        {"dataset_name": "other/na me"},
        {"dataset_config_name": None},
        {"dataset_revision": "s"},
        *of_tables,
    ]
    for kind, given in (
        ("text", {"data_files": [here]}),
        ("table", {"data_files": [table]}),
        ("hub", hub),
    ):
        folder = find(**given).folder
        assert {find(**given | change).folder for change in same[kind]} == {folder}
        assert (
            len({folder, *(find(**given | change).folder for change in changes[kind])})
            == len(changes[kind]) + 1
        )


# Tables.


@pytest.mark.parametrize(
    "kind, names",
    [
        ("parquet", "a.parquet A.PARQUET a.txt.parquet"),
        ("json", "a.jsonl a.json a.ndjson a.json.gz a.jsonl.zst a.jsonl.bz2"),
        ("csv", "a.csv a.v2.csv a.csv.xz"),
        ("arrow", "a.arrow"),
        (None, "a.txt a.md parquet .parquet a.parquet.txt a"),
    ],
)
def test_tables_are_known_by_how_their_names_end(tmp_path, kind, names):
    for path in (text(tmp_path, name, "some words") for name in names.split()):
        source = find(data_files=[path])
        if kind is None:
            assert source.files is None and whole(source) == "some words"
        else:
            assert source.parts is None and source.files == {"train": [path]}
            assert find_sources.reader_of(path).name == kind


def test_files_of_different_kinds_are_refused(tmp_path):
    a, b, c = (text(tmp_path, name, "{}") for name in ("a.jsonl", "b.parquet", "c.txt"))
    for one, other in ((a, b), (b, c), (c, a)):
        for changes in (
            {"data_files": [one, other]},
            {"data_files": [one], "validation_files": [other]},
        ):
            message = refused(**changes)
            assert "different file formats" in message and one in message and other in message
    assert find(data_files=[a, text(tmp_path, "d.json.gz", "{}")]).files


# The standard library.


def test_stdlib_splits_are_disjoint_without_tests_and_a_file_keeps_its_own_when_others_come_and_go(
    library,
):
    for i in range(40):
        text(library, f"m{i}.py", "x = 1\n")
    for name in ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"):
        text(library, f"pkg/{name}/test_a.py", "x")
    text(library, "empty.py", "")
    before, asked = (
        find_sources.stdlib_files(0.5),
        {"dataset_name": "python_stdlib", "validation_fraction": 0.5},
    )
    every = before["train"] + before["validation"]
    assert len(set(every)) == len(every) == 40 and all(
        paths == sorted(paths) for paths in before.values()
    )
    known = {
        find(**asked).folder,
        find(**asked).folder,
        find(**asked | {"validation_fraction": 0.6}).folder,
    }
    assert len(known) == 2
    for i in range(0, 40, 2):
        (library / f"m{i}.py").unlink()
    after = find_sources.stdlib_files(0.5)
    assert all(set(after[name]) < set(before[name]) for name in ("train", "validation"))
    assert find(**asked).folder not in known


def test_each_stdlib_file_is_a_document_its_tests_a_split_and_one_that_is_not_utf8_a_row_without_text(
    library,
):
    for i in range(40):
        text(library, f"m{i}.py", f"x = {i}\r\n")
        text(library, f"pkg/tests/t{i}.py", f"test {i}\n")
    text(library, "latin.py", b"# caf\xe9\n")
    source = find(dataset_name="python_stdlib", validation_fraction=0.3)
    found = rows(source, "train") + rows(source, "validation")
    assert all(begins for _, begins in found)
    assert sorted(words or "" for words, _ in found) == [
        "",
        *sorted(f"x = {i}\r\n" for i in range(40)),
    ]
    tests = [words for words, _ in rows(source, "test")]
    assert 0 < len(tests) < 40 and all(words.startswith("test ") for words in tests)


# Downloads.


def test_url_is_fetched_once_and_kept_and_two_urls_with_one_file_name_are_two_files(
    downloads, server
):
    url = f"{server.url}/text.txt?x=1"
    first, again = find(data_files=[url]), find(data_files=[url])
    assert server.log == ["GET /files/text.txt"] and first.folder == again.folder
    assert whole(first) == "some text\r\nof a file\n"
    assert len(list(downloads.iterdir())) == 1
    assert len(set(find_sources.find_files("data_files", [url, f"{server.url}/b/text.txt"]))) == 2


@pytest.mark.parametrize(
    "name, reason",
    [
        ("missing.txt", "HTTP status 404. Check the name"),
        ("busy.txt", "failed 10 times in a row, last with HTTP status 503"),
        ("empty.txt", "the server sent an empty file"),
    ],
)
def test_failed_download_is_stated_and_leaves_nothing(
    tmp_path, downloads, server, name, reason, monkeypatch
):
    monkeypatch.setattr(retry.time, "sleep", lambda seconds: None)
    url = f"{server.url}/{name}"
    with pytest.raises((BadInput, TrainingStopped)) as caught:
        find(data_files=[text(tmp_path, "t.txt", "x" * 20)], validation_files=[url])
    assert f"{url}: {reason}" in str(caught.value)
    assert not downloads.exists() or not list(downloads.iterdir())


def test_a_page_is_a_text_where_a_page_is_asked_for_and_a_proxys_elsewhere(
    downloads, server, monkeypatch
):
    monkeypatch.setattr(retry.time, "sleep", lambda seconds: None)
    (kept,) = find_sources.find_files("data_files", [f"{server.url}/page.html?x=1"])
    assert Path(kept).read_bytes().startswith(b"<!DOCTYPE html>")
    message = refused(data_files=[f"{server.url}/page?token=SECRET"])
    assert "page?redacted looks like a proxy or login page" in message and "SECRET" not in message


def test_a_download_has_a_limit_that_is_said_and_a_name_that_can_be_made(
    downloads, server, monkeypatch
):
    url = f"{server.url}/{'x' * 250}.txt"
    shutil.copy(server.folder / "files/text.txt", server.folder / f"files/{'x' * 250}.txt")
    monkeypatch.setattr(remote, "DOWNLOAD_BYTES", len("some text\r\nof a file\n"))
    (kept,) = find_sources.find_files("data_files", [url])
    assert kept.endswith("xx.txt") and Path(kept).read_bytes() == b"some text\r\nof a file\n"
    monkeypatch.setattr(remote, "DOWNLOAD_BYTES", 20)
    message = refused(data_files=[f"{server.url}/text.txt"])
    assert re.search(
        r"/text.txt is larger than [\de-]+ GB, the limit of a download.*a data set of the Hub",
        message,
    )
    assert list(downloads.iterdir()) == [Path(kept)]


def test_shards_are_found_whatever_the_path_of_the_tokenizer_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text")
    Path("tok").mkdir()
    Path("tok/tokenizer.json").write_text("{}")
    Path("tok/model.safetensors").write_text("not hashed")

    def folder_of(tokenizer: str) -> Path:
        return find_sources.find_source(
            keys.DataSource(**PLAIN | {"tokenizer": tokenizer, "data_files": ["a.txt"]})
        ).folder

    relative = folder_of("tok")
    assert folder_of(str(tmp_path / "tok")) == folder_of("./tok") == relative
    Path("tok").rename("moved")
    Path("moved/model.safetensors").unlink()
    assert folder_of("moved") == relative
    Path("moved/tokenizer.json").write_text("{ }")
    assert folder_of("moved") != relative
