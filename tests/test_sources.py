"""Documents of a source: found, split, kept to the byte, and fetched whole or not at all."""

import http.server
import threading
from pathlib import Path

import pytest

from pretrain import stream
from pretrain.errors import BadInput


def find(tmp_path, **changes):
    known = {
        "dataset_name": None,
        "data_files": None,
        "validation_files": None,
        "validation_fraction": 0.1,
        "tokenizer": {"t": 1},
    }
    return stream.find_source(**(known | changes), download_dir=tmp_path / "downloads")


def text(tmp_path, name, content):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def refused(tmp_path, **changes):
    with pytest.raises(BadInput) as caught:
        list(find(tmp_path, **changes).documents())
    return str(caught.value)


def split(source, name):
    return [text for kind, text in source.documents() if kind == name]


@pytest.fixture
def server():
    class Handler(http.server.BaseHTTPRequestHandler):
        asked = []

        def do_GET(self):
            self.asked.append(self.path)
            if self.path == "/missing.txt":
                self.send_error(404)
                return
            body = b"some text\r\nof a file\n"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body) + 5 * (self.path == "/short.txt")))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    made = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    made.url, made.asked = f"http://127.0.0.1:{made.server_port}", Handler.asked
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_globs_give_sorted_files_each_once_in_the_order_asked(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "d.md"):
        text(tmp_path, name, "x")
    found = stream.find_files("data_files", [f"{tmp_path}/d.md", f"{tmp_path}/**/*.txt", f"{tmp_path}/a.txt"], tmp_path)
    assert [path.name for path in found] == ["d.md", "a.txt", "b.txt", "c.txt"]


def test_a_name_that_looks_like_a_glob_is_found(tmp_path):
    name = text(tmp_path, "a[1].txt", "x")
    assert stream.find_files("data_files", [name], tmp_path) == [Path(name)]


def test_missing_file_is_refused(tmp_path):
    assert "data_files: " in refused(tmp_path, data_files=[str(tmp_path / "no.txt")])
    assert "no*.txt: no such file" in refused(tmp_path, data_files=[f"{tmp_path}/no*.txt"])


def test_empty_file_is_refused(tmp_path):
    assert "e.txt: is empty" in refused(tmp_path, data_files=[text(tmp_path, "e.txt", "")])


def test_folder_is_refused_with_a_glob_that_works(tmp_path):
    text(tmp_path, "books/deep/a.txt", "x" * 20)
    message = refused(tmp_path, data_files=[str(tmp_path / "books")])
    assert "is a folder" in message
    assert find(tmp_path, data_files=[message.split("'")[1]]).split_files["train"][0].name == "a.txt"


def test_bytes_that_are_not_utf8_are_refused_with_their_offset(tmp_path):
    message = refused(tmp_path, data_files=[text(tmp_path, "l.txt", b"caf\xe9 au lait")])
    assert "l.txt: offset 3: byte 0xe9 is not UTF-8" in message and "iconv" in message


def test_a_users_file_is_never_skipped_whatever_its_name(tmp_path):
    files = [text(tmp_path, "python_stdlib.txt", b"caf\xe9"), text(tmp_path, "v.txt", "validation")]
    assert "is not UTF-8" in refused(tmp_path, data_files=files[:1], validation_files=files[1:])


@pytest.mark.parametrize("held_out", [False, True])
def test_every_byte_of_a_text_is_kept(tmp_path, held_out):
    content = "a\r\nb\rc\n\n\x00\ufeffé中\u2028\x85 \x0c end".encode() * 3
    extra = {"validation_files": [text(tmp_path, "v.txt", b"v\r\n")]} if held_out else {}
    source = find(tmp_path, data_files=[text(tmp_path, "a.txt", content)], **extra)
    read = "".join(t for kind, t in source.documents() if kind == "train" or not held_out)
    assert read.encode() == content
    if held_out:
        assert split(source, "validation") == ["v\r\n"]


@pytest.mark.parametrize("length", [10, 11, 19, 1003, 12347])
def test_ninety_ten_split_is_nanogpts(tmp_path, length):
    content = ("é0123456789" * length)[:length]
    source = find(tmp_path, data_files=[text(tmp_path, "a.txt", content)])
    cut = int(length * 0.9)  # nanoGPT, data/shakespeare_char/prepare.py
    assert list(source.documents()) == [("train", content[:cut]), ("validation", content[cut:])]


def test_several_files_stay_documents_and_split_as_one_text(tmp_path):
    names = [text(tmp_path, f"{i}.txt", content) for i, content in enumerate(("a" * 30, "b" * 60, "c" * 10))]
    source = find(tmp_path, data_files=names, validation_fraction=0.5)
    assert split(source, "train") == ["a" * 30, "b" * 20]
    assert split(source, "validation") == ["b" * 40, "c" * 10]


def test_train_documents_all_come_before_validation_ones(tmp_path):
    names = [text(tmp_path, f"{i}.txt", "x" * 50) for i in range(3)]
    kinds = [kind for kind, _ in find(tmp_path, data_files=names).documents()]
    assert kinds == sorted(kinds)


def test_validation_files_are_the_validation_split(tmp_path):
    train, held_out = text(tmp_path, "t.txt", "train me"), text(tmp_path, "v.txt", "score me")
    source = find(tmp_path, data_files=[train], validation_files=[held_out])
    assert list(source.documents()) == [("train", "train me"), ("validation", "score me")]


@pytest.mark.parametrize("form", ["same", "relative", "dotted", "link"])
def test_a_file_in_both_splits_is_refused_however_it_is_written(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    train = text(tmp_path, "t.txt", "train me")
    (tmp_path / "sub").mkdir()
    (tmp_path / "l.txt").symlink_to(train)
    other = {"same": train, "relative": "t.txt", "dotted": f"{tmp_path}/sub/../t.txt", "link": "l.txt"}[form]
    assert "is also in data_files" in refused(tmp_path, data_files=[train], validation_files=[other])


def test_folder_name_changes_with_text_split_and_tokenizer_not_with_the_path(tmp_path):
    here, there = text(tmp_path, "x/a.txt", "one text"), text(tmp_path, "y/a.txt", "one text")
    other, held_out = text(tmp_path, "z/a.txt", "two text"), text(tmp_path, "v.txt", "three")
    name = find(tmp_path, data_files=[here]).folder_name
    assert name == find(tmp_path, data_files=[there]).folder_name and name.startswith("a-")
    names = {
        name,
        find(tmp_path, data_files=[other]).folder_name,
        find(tmp_path, data_files=[here], validation_fraction=0.2).folder_name,
        find(tmp_path, data_files=[here], validation_files=[held_out]).folder_name,
        find(tmp_path, data_files=[here], tokenizer={"t": 2}).folder_name,
        find(tmp_path, data_files=[here, held_out]).folder_name,
        find(tmp_path, data_files=[held_out, here]).folder_name,
    }
    assert len(names) == 7


def test_stdlib_splits_are_disjoint_deterministic_and_free_of_tests():
    splits = stream.stdlib_files(0.05)
    assert splits == stream.stdlib_files(0.05)
    every = [path for paths in splits.values() for path in paths]
    assert len(every) == len(set(every)) and all(paths == sorted(paths) for paths in splits.values())
    root = Path(stream.sysconfig.get_path("stdlib"))
    for name in ("train", "validation"):
        folders = {part for path in splits[name] for part in path.relative_to(root).parts[:-1]}
        assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert 0.01 < len(splits["validation"]) / len(splits["train"]) < 0.12


def test_a_file_keeps_its_stdlib_split_when_others_come_and_go(tmp_path, monkeypatch):
    monkeypatch.setattr(stream.sysconfig, "get_path", lambda name: str(tmp_path))
    for i in range(40):
        text(tmp_path, f"m{i}.py", "x = 1\n")
    text(tmp_path, "pkg/tests/test_a.py", "x")
    text(tmp_path, "site-packages/b.py", "x")
    text(tmp_path, "empty.py", "")
    before = stream.stdlib_files(0.5)
    assert sum(map(len, (before["train"], before["validation"]))) == 40
    for i in range(0, 40, 2):
        (tmp_path / f"m{i}.py").unlink()
    after = stream.stdlib_files(0.5)
    assert all(set(after[name]) < set(before[name]) for name in ("train", "validation"))


def test_stdlib_source_reads_and_skips_what_is_not_utf8(tmp_path, monkeypatch):
    monkeypatch.setattr(stream.sysconfig, "get_path", lambda name: str(tmp_path))
    for i in range(20):
        text(tmp_path, f"m{i}.py", f"x = {i}\n")
    text(tmp_path, "latin.py", b"# caf\xe9\n")
    source = find(tmp_path, dataset_name="python_stdlib", validation_fraction=0.3)
    assert len(list(source.documents())) == 20 and source.folder_name.startswith("python_stdlib-")


def test_unknown_data_set_names_the_remedies(tmp_path):
    message = refused(tmp_path, dataset_name="HuggingFaceFW/fineweb-edu")
    for words in ("dataset_name = HuggingFaceFW/fineweb-edu", "--data_dir", "--data_files", "recipes/quickstart.yaml"):
        assert words in message


def test_no_source_at_all_names_the_remedies(tmp_path):
    message = refused(tmp_path)
    assert "--data_files" in message and "--data_dir" in message


def test_url_is_fetched_once_and_kept(tmp_path, server):
    url = f"{server.url}/folder/text.txt?x=1"
    first = find(tmp_path, data_files=[url])
    again = find(tmp_path, data_files=[url])
    assert server.asked == ["/folder/text.txt?x=1"] and first == again
    assert first.split_files["train"][0].read_bytes() == b"some text\r\nof a file\n"
    assert len(list((tmp_path / "downloads").iterdir())) == 1


def test_two_urls_with_one_file_name_are_two_files(tmp_path, server):
    urls = [f"{server.url}/a/t.txt", f"{server.url}/b/t.txt"]
    assert len(set(find(tmp_path, data_files=urls).split_files["train"])) == 2


@pytest.mark.parametrize("name", ["missing.txt", "short.txt"])
def test_failed_download_is_refused_and_leaves_nothing(tmp_path, server, name):
    message = refused(tmp_path, data_files=[f"{server.url}/{name}"])
    assert f"{server.url}/{name}" in message
    assert not (tmp_path / "downloads").exists() or not list((tmp_path / "downloads").iterdir())


def test_host_that_does_not_answer_is_refused(tmp_path, server):
    message = refused(tmp_path, data_files=["http://127.0.0.1:1/a.txt"])
    assert "cannot be fetched" in message and "--data_files FILE" in message


def test_download_that_is_killed_half_way_leaves_no_file_to_be_taken_for_whole(tmp_path, server, monkeypatch):
    def full_disk(self, body):
        self.open("wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError):
        stream.download(f"{server.url}/a.txt", tmp_path / "downloads")
    assert not list((tmp_path / "downloads").iterdir())
