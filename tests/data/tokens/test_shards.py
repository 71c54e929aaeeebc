"""Test token files and their manifest: formats, writing, and the detection of damage."""

import errno
import io
import mmap
import os
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import shards
from ursa_minor.data.tokens.manifest import Manifest
from ursa_minor.data.tokens.shards import Shard

HEADER_BITS = 8 * 1024


def make_writer(
    folder, *, split="train", part=0, first_number=0, vocab_size=1000, shard_tokens=10**6
):
    """Return a writer for which id i represents i % 7 bytes."""
    token_bytes = np.arange(vocab_size) % 7
    return shards.ShardWriter(folder, split, part, first_number, token_bytes, shard_tokens)


def write_shards(folder, ids, **settings):
    """Write ids like prepare_data.py, and return the shards."""
    writer = make_writer(folder, **settings)
    written = [shard for shard, _ in writer.fill(np.asarray(ids, dtype=np.uint32))]
    last_shard = writer.finish()
    if last_shard:
        written.append(last_shard)
    return written


def llm_c_bytes(ids, *, magic=20240520, version=1, dtype="<u2", num_tokens=None):
    """Return the contents of a token file of llm.c."""
    if num_tokens is None:
        num_tokens = len(ids)
    header = np.zeros(256, dtype="<i4")
    header[:3] = [magic, version, num_tokens]
    return header.tobytes() + np.array(ids, dtype=dtype).tobytes()


def npy_bytes(ids, dtype="<u2"):
    """Return the contents of a NumPy file."""
    buffer = io.BytesIO()
    np.save(buffer, np.array(ids, dtype=dtype))
    return buffer.getvalue()


def raw_bytes(ids):
    """Return the contents of a token file of nanoGPT."""
    return np.array(ids, dtype="<u2").tobytes()


def read_ids(folder, written):
    """Return the ids of several shards."""
    arrays = [shards.open_ids(folder / shard.file, shard.tokens)[0] for shard in written]
    return np.concatenate(arrays).tolist()


def shift_modified(path, seconds):
    """Shift the modification time of a file."""
    nanoseconds = path.stat().st_mtime_ns + seconds * 10**9
    os.utime(path, ns=(nanoseconds, nanoseconds))


def flip_bit(path, bit):
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


# Formats


@pytest.mark.parametrize(
    "name, content, offset, dtype, ids",
    [
        ("a_train_1.bin", llm_c_bytes([5, 6, 65535]), 1024, "<u2", [5, 6, 65535]),
        (
            "a_train_1.bin",
            llm_c_bytes([5, 2**32 - 1], magic=20240801, version=7, dtype="<u4"),
            1024,
            "<u4",
            [5, 2**32 - 1],
        ),
        ("a_train_1.bin", llm_c_bytes([]), 1024, "<u2", []),
        ("train.bin", llm_c_bytes([5]), 1024, "<u2", [5]),
        ("a_train_1.npy", npy_bytes([5, 70000], "<u4"), 128, "<u4", [5, 70000]),
        ("renamed_train.bin", npy_bytes([5]), 128, "<u2", [5]),
        ("train.bin", raw_bytes([5, 6, 50256]), 0, "<u2", [5, 6, 50256]),
    ],
    ids=["llm.c", "llm.c uint32", "empty", "llm.c train.bin", "npy", "npy renamed", "nanoGPT"],
)
def test_format_is_recognized(tmp_path, name, content, offset, dtype, ids):
    path = tmp_path / name
    path.write_bytes(content)

    opened_ids, opened_offset = shards.open_ids(path, len(ids))

    assert opened_ids.tolist() == ids
    assert opened_ids.dtype == dtype
    assert opened_offset == offset
    assert type(opened_ids) is np.ndarray
    assert not opened_ids.flags.writeable


@pytest.fixture(
    params=[("a_train_1.bin", llm_c_bytes), ("train.bin", raw_bytes), ("a_train_1.npy", npy_bytes)],
    ids=["llm.c", "nanoGPT", "npy"],
)
def token_file(request, tmp_path):
    """Write the ids 5, 6, 50256 to a file of each format."""
    name, make_content = request.param
    path = tmp_path / name
    path.write_bytes(make_content([5, 6, 50256]))
    return path


def test_other_number_of_tokens_is_rejected(token_file):
    with pytest.raises(BadInput) as caught:
        shards.open_ids(token_file, 50)

    message = str(caught.value)
    assert token_file.name in message
    assert "has 3 tokens, but manifest.json lists 50" in message


@pytest.mark.parametrize("code", [errno.ENODEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.parametrize("has_private_maps", [True, False], ids=["private maps", "no maps"])
def test_file_is_read_if_it_cannot_be_mapped(
    token_file, monkeypatch, caplog, has_private_maps, code
):
    """FUSE with direct_io supports private maps only."""
    map_file = mmap.mmap

    def refuse(*args, access, **kwargs):
        if has_private_maps and access == mmap.ACCESS_COPY:
            return map_file(*args, access=access, **kwargs)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(mmap, "mmap", refuse)
    ids, offset = shards.open_ids(token_file, 3)
    shards.open_ids(token_file)

    assert ids.tolist() == [5, 6, 50256]
    assert ids.dtype == "<u2"
    assert not ids.flags.writeable
    assert offset == token_file.stat().st_size - ids.nbytes
    messages = [line for line in caplog.messages if "cannot map files into memory" in line]
    assert len(messages) == (0 if has_private_maps else 1)


@pytest.mark.parametrize(
    "name, content, problem",
    [
        ("a.bin", llm_c_bytes([1], magic=20240522), "starts with 20240522, 1. "),
        ("a.bin", raw_bytes(range(900)), "is named *.npy, train.bin or val.bin"),
        ("train.bin", llm_c_bytes([1], version=2), "starts with 20240520, 2"),
        ("a.bin", llm_c_bytes([1, 2], num_tokens=3), "1028 bytes, but its 3 tokens need 1030"),
        ("a.bin", llm_c_bytes([1, 2], num_tokens=-1), "-1 tokens"),
        ("a.bin", llm_c_bytes([1])[:20], "20 bytes, but its 1 tokens need 1026"),
        ("a.bin", b"", "starts with 0"),
        ("train.bin", b"\x01\x00\x02", "3 bytes, but its 1 tokens need 2"),
        ("a.npy", bytes(200), "has no NumPy header"),
        ("a.npy", npy_bytes(range(3)).replace(b"descr", b"desc\n"), ""),
        ("a.npy", npy_bytes(range(3))[:-1], ""),
        ("a.npy", npy_bytes(range(3)) + b"x", "135 bytes, but its 3 tokens need 134"),
    ],
    ids=[
        "magic",
        "headerless",
        "version",
        "truncated",
        "negative length",
        "truncated header",
        "empty",
        "odd length",
        "npy magic",
        "npy header",
        "npy truncated",
        "npy too long",
    ],
)
def test_invalid_token_file_is_rejected(tmp_path, name, content, problem):
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(BadInput) as caught:
        shards.open_ids(path)

    (line,) = caught.value.lines
    assert line.startswith(str(path))
    assert problem in line
    assert "Restore the original file" in line


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (npy_bytes(range(3), "<i8"), "dtype <i8"),
        (npy_bytes(range(3), ">u2"), "dtype >u2"),
        (npy_bytes([[1], [2], [3]]), "shape (3, 1)"),
    ],
    ids=["wide", "big-endian", "shape"],
)
def test_array_of_other_type_is_rejected(tmp_path, content, problem):
    path = tmp_path / "a.npy"
    path.write_bytes(content)

    with pytest.raises(BadInput) as caught:
        shards.open_ids(path)

    (line,) = caught.value.lines
    assert problem in line
    assert "np.save" in line
    assert "Restore" not in line  # the file is not damaged


def test_missing_token_file_is_rejected(tmp_path):
    with pytest.raises(BadInput) as caught:
        shards.open_ids(tmp_path / "a.bin")

    (line,) = caught.value.lines
    assert line.startswith(f"{tmp_path / 'a.bin'}: ")
    assert "does not exist" in line
    assert "Restore the original file" in line


def test_object_array_is_not_unpickled(tmp_path):
    class CreateFolder:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "created"),))

    path = tmp_path / "a_train.npy"
    np.save(path, np.array([CreateFolder()], dtype=object), allow_pickle=True)

    with pytest.raises(BadInput, match=r"a_train\.npy: .*Python objects"):
        shards.open_ids(path)

    assert not (tmp_path / "created").exists()


def test_negative_id_is_outside_every_vocabulary(tmp_path):
    path = tmp_path / "a_train.npy"
    path.write_bytes(npy_bytes([0, 50256, -1, -(2**31)], "<i4"))

    ids, _ = shards.open_ids(path)

    assert ids.dtype == np.uint32
    assert ids[:2].tolist() == [0, 50256]
    assert (ids[2:] >= 2**31).all()


# Writing


@pytest.mark.parametrize(
    "vocab_size, dtype, magic, version",
    [(65536, "<u2", 20240520, 1), (65537, "<u4", 20240801, 7)],
)
def test_shard_has_the_format_of_llm_c(tmp_path, vocab_size, dtype, magic, version):
    ids = list(range(vocab_size - 12, vocab_size))

    (shard,) = write_shards(tmp_path, ids, vocab_size=vocab_size)

    path = tmp_path / "train_00000_00000.bin"
    assert list(tmp_path.iterdir()) == [path]
    text_bytes = sum(token_id % 7 for token_id in ids)
    assert shard == Shard(path.name, 12, text_bytes, files.sha256(path))
    assert path.read_bytes() == llm_c_bytes(ids, magic=magic, version=version, dtype=dtype)


def test_ids_are_divided_into_full_shards(tmp_path):
    writer = make_writer(tmp_path, part=2, first_number=95, shard_tokens=10)
    ids = np.arange(95)

    written = []
    for start in range(0, 95, 19):
        batch = np.concatenate([[7, 7], ids[start : start + 19]])
        for shard, position in writer.fill(batch, 2):
            written.append(shard)
            assert start + position - 2 == 10 * len(written)
    written.append(writer.finish())

    assert writer.finish() is None
    assert [shard.tokens for shard in written] == [10] * 9 + [5]
    assert read_ids(tmp_path, written) == ids.tolist()
    for number, shard in enumerate(written):
        shard_ids = ids[10 * number : 10 * number + 10]
        assert shard.file == f"train_00002_{95 + number:05d}.bin"
        assert shard.text_bytes == sum(shard_ids % 7)
        assert shard.sha256 == files.sha256(tmp_path / shard.file)


def test_sorted_names_give_the_order(tmp_path):
    written = write_shards(tmp_path, range(95), part=2, first_number=95, shard_tokens=10)
    written += write_shards(tmp_path, range(95, 99), part=11, shard_tokens=2)

    names = [shard.file for shard in written]
    assert names == sorted(names)
    assert read_ids(tmp_path, written) == list(range(99))


def test_validation_shard_has_short_prefix(tmp_path):
    (shard,) = write_shards(tmp_path, [1], split="validation")

    assert shard.file == "val_00000_00000.bin"


def test_too_many_source_files_are_rejected(tmp_path):
    with pytest.raises(BadInput, match="more than 100,000 source files"):
        make_writer(tmp_path, part=100_000)


def test_shard_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    """The folder is flushed after the renaming, so before a manifest can list the shard."""
    calls = []

    def record(path):
        calls.append((path.name, os.listdir(tmp_path)))

    monkeypatch.setattr(shards.files, "fsync", record)
    write_shards(tmp_path, [1, 2])

    temporary_name = ".train_00000_00000.bin.tmp"
    assert calls == [
        (temporary_name, [temporary_name]),
        (tmp_path.name, ["train_00000_00000.bin"]),
    ]


# Manifest


def manifest_text(splits):
    """Return the JSON of a manifest with this JSON of its splits."""
    return f'{{"complete": true, "tokenizer": null, "splits": {splits}}}'


@pytest.mark.parametrize(
    "content, problem",
    [
        ('{"complete": tr', "char 13"),
        ("[]", "TypeError"),
        (manifest_text("[]"), "AttributeError"),
        (
            manifest_text('{"train": [{"file": "../a.bin", "tokens": 7}]}'),
            "file must be a file name",
        ),
        (
            manifest_text('{"train": [{"file": "a.bin", "tokens": -7}]}'),
            "tokens must be an integer",
        ),
        (manifest_text('{"train": [{"file": "a.bin"}]}'), "tokens"),
        (manifest_text('{}, "cursor": {"part": 0}'), "row"),
        ('{"complete": true, "splits": {}}', "tokenizer"),
    ],
    ids=[
        "invalid JSON",
        "list",
        "list of splits",
        "other folder",
        "negative tokens",
        "no tokens",
        "incomplete cursor",
        "no tokenizer",
    ],
)
def test_damaged_manifest_is_rejected(tmp_path, content, problem):
    path = tmp_path / "manifest.json"
    path.write_text(content)

    with pytest.raises(BadInput) as caught:
        manifests.describe_folder(tmp_path)

    (line,) = caught.value.lines
    assert line.startswith(f"{path} ")
    assert problem in line
    assert f"Delete the folder {tmp_path}" in line


UNFINISHED = {
    "source": "text",
    "identity": {"format": 2, "limit_tokens": None},
    "revision": None,
    "versions": {},
    "tokenizer": {"name": "bpe", "fingerprint": "cd", "size": 300},
    "files": 1,
    "splits": {
        "validation": [],
        "train": [
            {"file": "train_00000_00000.bin", "tokens": 7, "text_bytes": 9, "sha256": "ab"},
        ],
    },
    "counts": {"validation": {}, "train": {"documents": 3}},
    "cursor": {"part": 1, "row": 0, "token": 0, "file": None},
    "complete": False,
}
DOWNLOADED = {
    "source": "fineweb",
    "identity": {"format": 2},
    "revision": "d" * 40,
    "tokenizer": None,
    "splits": {"validation": [], "train": [{"file": "a.bin", "tokens": 7, "sha256": "ab"}]},
    "complete": True,
}


@pytest.mark.parametrize("content", [UNFINISHED, DOWNLOADED], ids=["unfinished", "downloaded"])
def test_reading_and_writing_keeps_manifest_bytes(tmp_path, content):
    path = tmp_path / "manifest.json"
    files.write_json(path, content)
    original_bytes = path.read_bytes()

    manifest = manifests.read_manifest(tmp_path)
    path.unlink()
    manifests.write_manifest(tmp_path, manifest)

    assert path.read_bytes() == original_bytes


# Folders of other projects

TOKENS = range(7)


def modification_times(folder):
    """Return the modification times of a folder and of its entries."""
    return {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}


@pytest.mark.parametrize(
    "content, train, validation, other",
    [
        (
            llm_c_bytes(TOKENS),
            ["fineweb_train_000001.bin", "fineweb_train_000002.bin"],
            "fineweb_val_000000.bin",
            "LICENSE.bin",
        ),
        (
            llm_c_bytes(TOKENS),
            ["TinyStories_train.bin"],
            "TinyStories_validation_0.bin",
            "._TinyStories_train.bin",
        ),
        (
            npy_bytes(TOKENS),
            ["edufineweb_train_000001.npy", "edufineweb_train_000010.npy"],
            "edufineweb_val_000000.npy",
            "a.npy",
        ),
        (raw_bytes(TOKENS), ["train.bin"], "val.bin", "meta.pkl"),
    ],
    ids=["modded-nanogpt", "words", "build-nanogpt", "nanoGPT"],
)
def test_folder_of_other_project_is_read(tmp_path, content, train, validation, other):
    for name in [*reversed(train), validation]:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "corpus_test_0.bin").write_bytes(llm_c_bytes(TOKENS))
    (tmp_path / other).write_bytes(b"not a token file")
    (tmp_path / "train_logs").mkdir()
    times = modification_times(tmp_path)

    manifest = manifests.describe_folder(tmp_path)

    splits = {
        "train": [Shard(name, 7) for name in train],
        "validation": [Shard(validation, 7)],
        "test": [Shard("corpus_test_0.bin", 7)],
    }
    assert manifest == Manifest(splits=splits, tokenizer=None, complete=True)
    for split in manifest.splits.values():
        assert read_ids(tmp_path, split) == list(TOKENS) * len(split)
        assert not list(manifests.find_problems(tmp_path, split))
        manifests.check_unchanged(tmp_path, split)
    assert modification_times(tmp_path) == times


def test_missing_folder_is_rejected(tmp_path):
    with pytest.raises(BadInput, match=r"data_dir = .*/data: .*does not exist.*prepare_data\.py"):
        manifests.describe_folder(tmp_path / "data")


@pytest.mark.parametrize(
    "names, message",
    [
        (["a_train_0.bin"], "has no validation shards .*Use a folder that"),
        (["a_train_val_0.bin"], r"a_train_val_0\.bin: .*train and validation"),
        (
            ["train_00000_00000.bin", "val_00000_00000.bin"],
            r"manifest\.json is missing.*same prepare_data\.py command",
        ),
    ],
    ids=["no validation", "two splits", "no manifest"],
)
def test_folder_without_splits_is_rejected(tmp_path, names, message):
    for name in names:
        (tmp_path / name).write_bytes(llm_c_bytes(TOKENS))

    with pytest.raises(BadInput, match=message):
        manifests.describe_folder(tmp_path)


# Identity of the train split


def make_manifest(train, *, complete, revision="abc"):
    """Return the manifest of a folder with these train shards."""
    return Manifest(splits={"train": train}, tokenizer=None, complete=complete, revision=revision)


@pytest.fixture
def train_shards(tmp_path):
    """Write three train shards."""
    return write_shards(tmp_path, range(30), shard_tokens=10)


@pytest.mark.parametrize("complete", [False, True])
def test_copied_train_split_is_accepted(tmp_path, train_shards, complete):
    (tmp_path / "copy").mkdir()
    copied_shards = write_shards(tmp_path / "copy", range(30), shard_tokens=10)
    identity = manifests.train_identity(make_manifest(train_shards, complete=complete))

    copy = make_manifest(copied_shards, complete=complete)
    manifests.check_same_train_split(tmp_path, identity, copy)


def test_unfinished_train_split_may_grow(tmp_path, train_shards):
    identity = manifests.train_identity(make_manifest(train_shards[:2], complete=False))

    larger = make_manifest(train_shards, complete=True)
    manifests.check_same_train_split(tmp_path, identity, larger)


def test_complete_train_split_must_not_grow(tmp_path, train_shards):
    identity = manifests.train_identity(make_manifest(train_shards[:2], complete=True))

    larger = make_manifest(train_shards, complete=True)
    with pytest.raises(BadInput, match="was trained on different data"):
        manifests.check_same_train_split(tmp_path, identity, larger)


@pytest.mark.parametrize("complete", [False, True])
def test_different_train_split_is_rejected(tmp_path, train_shards, complete):
    first, second, _ = train_shards
    identity = manifests.train_identity(make_manifest([first, second], complete=complete))
    changed = replace(second, sha256="0" * 64)

    for shard_list in ([first, changed], [second, first], [first]):
        other = make_manifest(shard_list, complete=True)
        with pytest.raises(BadInput, match=r"was trained on different data\. Use the same text"):
            manifests.check_same_train_split(tmp_path, identity, other)


@pytest.mark.parametrize("complete", [False, True])
def test_other_revision_is_rejected_with_fix(tmp_path, train_shards, complete):
    first, second, _ = train_shards
    identity = manifests.train_identity(make_manifest([first, second], complete=complete))
    changed = replace(second, sha256="0" * 64)

    other = make_manifest([first, changed], complete=complete, revision="def")
    with pytest.raises(BadInput, match=r"Use --dataset_revision abc, or .* --run_name"):
        manifests.check_same_train_split(tmp_path, identity, other)


# Detection of damage


@pytest.fixture
def folder_with_manifest(tmp_path):
    """Write three shards whose files are 100 seconds older than their manifest."""
    folder = tmp_path / "data"
    folder.mkdir()
    for shard in write_shards(folder, range(50), shard_tokens=20):
        shift_modified(folder / shard.file, -100)
    (folder / "manifest.json").touch()
    return folder


def existing_shards(folder):
    """Return the shards of a folder from its files."""
    found = []
    for path in sorted(folder.glob("*.bin")):
        ids, _ = shards.open_ids(path)
        found.append(Shard(path.name, len(ids), sha256=files.sha256(path)))
    return found


def test_newer_file_with_same_contents_is_accepted(folder_with_manifest):
    written = existing_shards(folder_with_manifest)
    shift_modified(folder_with_manifest / written[1].file, 200)

    manifests.check_unchanged(folder_with_manifest, written)


@pytest.mark.parametrize("is_copied", [False, True], ids=["original", "copy"])
def test_changed_byte_is_rejected(folder_with_manifest, tmp_path, is_copied):
    written = existing_shards(folder_with_manifest)
    changed = folder_with_manifest / written[1].file
    flip_bit(changed, HEADER_BITS + 128)
    shift_modified(changed, 200)
    folder = folder_with_manifest
    if is_copied:
        folder = shutil.copytree(folder_with_manifest, tmp_path / "copy")

    with pytest.raises(BadInput) as caught:
        manifests.check_unchanged(folder, written)

    (line,) = caught.value.lines
    assert line.startswith(f"{folder / changed.name} was changed")
    assert "SHA-256" in line


def test_only_newer_files_with_hash_are_read(folder_with_manifest, monkeypatch):
    """Files that are missing, older than the manifest, or listed without a hash are not read."""
    missing, without_hash, older = existing_shards(folder_with_manifest)
    (folder_with_manifest / missing.file).unlink()
    without_hash = Shard(without_hash.file, without_hash.tokens)
    shift_modified(folder_with_manifest / without_hash.file, 200)
    monkeypatch.setattr(shards.files, "sha256", lambda path: pytest.fail(f"read {path}"))

    manifests.check_unchanged(folder_with_manifest, [missing, without_hash, older])


def test_every_problem_of_a_folder_is_found(tmp_path):
    written = write_shards(tmp_path, range(50), shard_tokens=10)
    missing, truncated, replaced, other_version, changed = [
        tmp_path / shard.file for shard in written
    ]
    missing.unlink()
    truncated.write_bytes(truncated.read_bytes()[:-2])
    replaced.write_bytes(llm_c_bytes(range(9)))
    flip_bit(other_version, 32)
    flip_bit(changed, 8 * 600)

    problems = list(manifests.find_problems(tmp_path, written))

    assert [shard for shard, _ in problems] == written
    for shard, message in problems:
        assert shard.file in message


def test_any_flipped_bit_is_found(tmp_path):
    draw = random.Random(200)
    (shard,) = write_shards(tmp_path, range(10))
    path = tmp_path / shard.file
    content = path.read_bytes()

    for _ in range(50):
        path.write_bytes(content)
        flip_bit(path, draw.randrange(8 * len(content)))
        ((problem_shard, message),) = manifests.find_problems(tmp_path, [shard])
        assert problem_shard == shard
        assert shard.file in message
