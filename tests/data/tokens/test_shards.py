"""Token files: every format read and refused, what is written, the manifest, and that no damage goes unseen."""

import errno
import io
import mmap
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import shards
from ursa_minor.data.tokens.manifest import Manifest
from ursa_minor.data.tokens.shards import Shard


def make_writer(
    folder, *, split="train", part=0, first_number=0, vocab_size=1000, shard_tokens=10**6
):
    return shards.ShardWriter(
        folder, split, part, first_number, np.arange(vocab_size) % 7, shard_tokens
    )


def write(folder, ids, **how):
    """Write ids as prepare_data.py does; return the shards."""
    writer = make_writer(folder, **how)
    full = [shard for shard, _ in writer.fill(np.asarray(ids, dtype=np.uint32))]
    return [shard for shard in [*full, writer.finish()] if shard]


def llm_c(ids, magic=20240520, version=1, dtype="<u2", count=None):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    return header.tobytes() + np.array(ids, dtype=dtype).tobytes()


def npy(array):
    out = io.BytesIO()
    np.save(out, np.asarray(array))
    return out.getvalue()


def ids_of(folder, written):
    return np.concatenate(
        [shards.open_ids(folder / shard.file, shard.tokens)[0] for shard in written]
    ).tolist()


def touch(path, seconds):
    os.utime(path, ns=(path.stat().st_mtime_ns + seconds * 10**9,) * 2)


def flip(path, bit):
    body = bytearray(path.read_bytes())
    body[bit // 8] ^= 1 << bit % 8
    path.write_bytes(body)


@pytest.mark.parametrize(
    "name, body, layout",
    [
        ("a_train_1.bin", llm_c([5, 6, 65535]), (1024, "<u2", 3)),
        ("a_train_1.bin", llm_c([5, 2**32 - 1], 20240801, 7, "<u4"), (1024, "<u4", 2)),
        ("a_train_1.bin", llm_c([]), (1024, "<u2", 0)),
        ("train.bin", llm_c([5]), (1024, "<u2", 1)),
        ("a_train_1.npy", npy(np.array([5, 70000], dtype="<u4")), (128, "<u4", 2)),
        ("renamed_train.bin", npy(np.array([5], dtype="<u2")), (128, "<u2", 1)),
        ("train.bin", np.array([5, 6, 50256], dtype="<u2").tobytes(), (0, "<u2", 3)),
    ],
)
def test_every_format_is_recognised_by_contents_and_name(tmp_path, name, body, layout):
    path = tmp_path / name
    path.write_bytes(body)
    ids, offset = shards.open_ids(path, layout[2])
    assert (
        (offset, ids.dtype, len(ids)) == layout
        and type(ids) is np.ndarray
        and not ids.flags.writeable
    )
    assert ids.tolist() == np.frombuffer(body, layout[1], offset=offset).tolist()
    with pytest.raises(
        BadInput,
        match=rf"{name}: .* The file has {layout[2]} tokens, but manifest.json lists 50",
    ):
        shards.open_ids(path, 50)


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.parametrize("offered", ["private maps", "no maps"])
@pytest.mark.parametrize("name", ["a_train_1.bin", "train.bin", "a_train_1.npy"])
def test_token_file_is_read_where_it_cannot_be_mapped(
    tmp_path, monkeypatch, caplog, name, offered, number
):
    """FUSE with direct_io offers private maps only."""
    ids = np.array([5, 6, 50256], dtype="<u2")
    bodies = {"a_train_1.bin": llm_c(ids), "train.bin": ids.tobytes(), "a_train_1.npy": npy(ids)}
    (tmp_path / name).write_bytes(bodies[name])
    real = mmap.mmap

    def refuse(*args, access, **kwargs):
        if offered == "no maps" or access != mmap.ACCESS_COPY:
            raise OSError(number, os.strerror(number))
        return real(*args, access=access, **kwargs)

    monkeypatch.setattr(mmap, "mmap", refuse)
    found, offset = shards.open_ids(tmp_path / name, 3)
    assert found.tolist() == ids.tolist() and found.dtype == ids.dtype and not found.flags.writeable
    assert offset == len(bodies[name]) - ids.nbytes
    shards.open_ids(tmp_path / name)
    lines = [line for line in caplog.messages if "cannot map files into memory" in line]
    assert len(lines) == (offered == "no maps")


@pytest.mark.parametrize(
    "name, body, words",
    [
        (
            "a.bin",
            llm_c([1], magic=20240522),
            "starts with 20240522, 1. A token file starts with 20240520, 1 (llm.c)",
        ),
        ("a.bin", np.arange(900, dtype="<u2").tobytes(), "is named *.npy, train.bin or val.bin"),
        ("train.bin", llm_c([1], version=2), "starts with 20240520, 2"),
        ("a.bin", llm_c([1, 2], count=3), "has 1028 bytes, but its 3 tokens need 1030"),
        ("a.bin", llm_c([1, 2], count=-1), "-1 tokens"),
        ("a.bin", llm_c([1])[:20], "has 20 bytes, but its 1 tokens need 1026"),
        ("a.bin", b"", "starts with 0"),
        ("a.bin", None, "this file does not exist"),
        ("train.bin", b"\x01\x00\x02", "has 3 bytes, but its 1 tokens need 2"),
        ("a.npy", bytes(200), "the magic string is not correct"),
        ("a.npy", npy(np.arange(3, dtype="<u2")).replace(b"descr", b"desc\n"), ""),
        (
            "a.npy",
            npy(np.arange(3, dtype="<i8")),
            "dtype <i8, but ids have shape (tokens,) and dtype <u2, <u4 or <i4",
        ),
        ("a.npy", npy(np.zeros((3, 1), dtype="<u2")), "shape (3, 1)"),
        ("a.npy", npy(np.arange(3, dtype="<u2"))[:-1], ""),
        (
            "a.npy",
            npy(np.arange(3, dtype="<u2")) + b"x",
            "has 135 bytes, but its 3 tokens need 134",
        ),
    ],
)
def test_what_is_no_whole_token_file_is_refused_with_file_and_remedy(tmp_path, name, body, words):
    path = tmp_path / name
    if body is not None:
        path.write_bytes(body)
    with pytest.raises(BadInput) as caught:
        shards.open_ids(path)
    (line,) = caught.value.lines
    assert (
        line.startswith(f"{path}: ")
        and words in line
        and line.endswith("Restore the original file, or download or prepare it again")
    )


def test_an_object_array_is_never_unpickled_and_a_negative_id_is_beyond_every_vocabulary(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    path = tmp_path / "a_train.npy"
    np.save(path, np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(BadInput, match=r"a_train.npy: .*Python objects"):
        shards.open_ids(path)
    assert not (tmp_path / "sprung").exists()
    np.save(path, np.array([0, 50256, -1, -(2**31)], dtype=np.int32))
    ids, _ = shards.open_ids(path)
    assert ids.dtype == np.uint32 and ids[:2].tolist() == [0, 50256] and (ids[2:] >= 2**31).all()


@pytest.mark.parametrize(
    "vocab_size, itemsize, magic", [(65536, 2, (20240520, 1)), (65537, 4, (20240801, 7))]
)
def test_written_ids_are_read_back_in_llm_c_format(tmp_path, vocab_size, itemsize, magic):
    ids = np.arange(vocab_size - 12, vocab_size)
    (shard,) = write(tmp_path, ids, vocab_size=vocab_size)
    path = tmp_path / "train_00000_00000.bin"
    text_bytes = sum(int(i) % 7 for i in ids)
    assert shard == Shard(path.name, 12, text_bytes, files.sha256(path))
    assert np.fromfile(path, "<i4", count=256).tolist() == [*magic, 12, *[0] * 253]
    assert np.fromfile(path, f"<u{itemsize}", offset=1024).tolist() == ids.tolist()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_shards_are_cut_where_they_are_full_and_lose_nothing_and_sorted_names_are_the_order(
    tmp_path,
):
    writer = make_writer(tmp_path, part=2, first_number=95, shard_tokens=10)
    ids = np.arange(95)
    written = []
    for begin in range(0, 95, 19):
        for shard, on in writer.fill(np.concatenate([[7, 7], ids[begin : begin + 19]]), 2):
            assert shard.tokens == 10 and begin + on - 2 == 10 * (len(written) + 1)
            written.append(shard)
    written.append(writer.finish())
    assert [shard.tokens for shard in written] == [10] * 9 + [5] and writer.finish() is None
    for number, shard in enumerate(written):
        assert shard.file == f"train_00002_{95 + number:05d}.bin"
        assert shard.text_bytes == sum(
            i % 7 for i in range(number * 10, number * 10 + shard.tokens)
        )
        assert shard.sha256 == files.sha256(tmp_path / shard.file)
    written += write(tmp_path, range(95, 99), part=11, shard_tokens=2)
    names = [shard.file for shard in written]
    assert names == sorted(names) and ids_of(tmp_path, written) == list(range(99))
    assert write(tmp_path, [1], split="validation")[0].file == "val_00000_00000.bin"
    with pytest.raises(BadInput, match="more than 100,000 source files.*Concatenate"):
        make_writer(tmp_path, part=100_000)


def test_a_shard_is_on_the_disk_before_it_has_its_name_and_its_name_before_it_has_a_row(
    tmp_path, monkeypatch
):
    calls = []
    monkeypatch.setattr(
        shards.files, "fsync", lambda path: calls.append((path.name, os.listdir(tmp_path)))
    )
    write(tmp_path, [1, 2])
    temporary, final = ".train_00000_00000.bin.tmp", "train_00000_00000.bin"
    assert calls == [(temporary, [temporary]), (tmp_path.name, [final])]


ROWS = '{"complete": true, "tokenizer": null, "splits": %s}'


@pytest.mark.parametrize(
    "body, words",
    [
        ('{"complete": tr', "char 13"),
        ("[]", "TypeError"),
        (ROWS % "[]", "AttributeError"),
        (ROWS % '{"train": [{"file": "../a.bin", "tokens": 7}]}', "file must be a file name"),
        (ROWS % '{"train": [{"file": "a.bin", "tokens": -7}]}', "tokens must be an integer"),
        (ROWS % '{"train": [{"file": "a.bin"}]}', "tokens"),
        (ROWS % '{}, "cursor": {"part": 0}', "row"),
        ('{"complete": true, "splits": {}}', "tokenizer"),
    ],
)
def test_a_damaged_manifest_is_refused_with_a_remedy(tmp_path, body, words):
    (tmp_path / "manifest.json").write_text(body)
    with pytest.raises(BadInput) as caught:
        manifests.describe_folder(tmp_path)
    (line,) = caught.value.lines
    assert line.startswith(f"{tmp_path / 'manifest.json'} is not a valid manifest (")
    assert words in line and line.endswith(
        f"Delete the folder {tmp_path}, and prepare the data again"
    )


SHARD = {"file": "train_00000_00000.bin", "tokens": 7, "text_bytes": 9, "sha256": "ab"}
UNFINISHED = {
    "source": "text",
    "identity": {"format": 2, "limit_tokens": None},
    "revision": None,
    "versions": {},
    "tokenizer": {"name": "bpe", "fingerprint": "cd", "size": 300},
    "files": 1,
    "splits": {"validation": [], "train": [SHARD]},
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


@pytest.mark.parametrize("document", [UNFINISHED, DOWNLOADED])
def test_reading_and_writing_a_manifest_keeps_its_bytes(tmp_path, document):
    path = tmp_path / "manifest.json"
    files.write_json(path, document)
    before = path.read_bytes()
    manifest = manifests.read_manifest(tmp_path)
    path.unlink()
    manifests.write_manifest(tmp_path, manifest)
    assert path.read_bytes() == before


LLM_C, UINT16, RAW = (
    llm_c(range(7)),
    npy(np.arange(7, dtype="<u2")),
    np.arange(7, dtype="<u2").tobytes(),
)


@pytest.mark.parametrize(
    "body, train, validation, other",
    [
        (
            LLM_C,
            ["fineweb_train_000001.bin", "fineweb_train_000002.bin"],
            "fineweb_val_000000.bin",
            "LICENSE.bin",
        ),
        (
            LLM_C,
            ["TinyStories_train.bin"],
            "TinyStories_validation_0.bin",
            "._TinyStories_train.bin",
        ),
        (
            UINT16,
            ["edufineweb_train_000001.npy", "edufineweb_train_000010.npy"],
            "edufineweb_val_000000.npy",
            "a.npy",
        ),
        (RAW, ["train.bin"], "val.bin", "meta.pkl"),
    ],
    ids=["modded-nanogpt", "words", "build-nanogpt", "nanoGPT"],
)
def test_the_folders_of_others_are_read_where_they_lie(tmp_path, body, train, validation, other):
    for name in [*train[::-1], validation, "corpus_test_0.bin"]:
        (tmp_path / name).write_bytes(LLM_C if "_test_" in name else body)
    (tmp_path / other).write_bytes(b"not ours to read")
    (tmp_path / "train_logs").mkdir()
    before = {path.name: path.stat().st_mtime_ns for path in [*tmp_path.iterdir(), tmp_path]}
    described = manifests.describe_folder(tmp_path)
    named = {"train": train, "validation": [validation], "test": ["corpus_test_0.bin"]}
    splits = {split: [Shard(name, 7) for name in names] for split, names in named.items()}
    assert described == Manifest(splits=splits, tokenizer=None, complete=True)
    for found in described.splits.values():
        assert ids_of(tmp_path, found) == [*range(7)] * len(found)
        assert not [*manifests.find_problems(tmp_path, found)]
        manifests.check_unchanged(tmp_path, found)
    assert before == {
        path.name: path.stat().st_mtime_ns for path in [*tmp_path.iterdir(), tmp_path]
    }


@pytest.mark.parametrize(
    "names, words",
    [
        (None, "data_dir = .*/data: this folder does not exist.*prepare_data.py"),
        (
            ["a_train_0.bin"],
            "has no validation shards .* between underscores.*Use a folder that",
        ),
        (["a_train_val_0.bin"], "a_train_val_0.bin: the file name .* train and validation"),
        (
            ["train_00000_00000.bin", "val_00000_00000.bin"],
            "manifest.json is missing.*run the same prepare_data.py command again",
        ),
    ],
)
def test_a_folder_that_cannot_be_trained_on_is_refused_with_what_would_do(tmp_path, names, words):
    folder = tmp_path / "data"
    if names is not None:
        folder.mkdir()
    for name in names or []:
        (folder / name).write_bytes(LLM_C)
    with pytest.raises(BadInput, match=words):
        manifests.describe_folder(folder)


def manifest_of(train, complete, revision="abc"):
    return Manifest(splits={"train": train}, tokenizer=None, complete=complete, revision=revision)


@pytest.mark.parametrize("complete", [False, True])
def test_a_run_goes_on_with_the_text_that_it_began_with_only(tmp_path, complete):
    """Which may lie elsewhere, and have grown meanwhile unless it was complete."""
    (tmp_path / "copy").mkdir()
    first, copied = (
        write(folder, range(30), shard_tokens=10) for folder in (tmp_path, tmp_path / "copy")
    )
    before = manifests.train_identity(manifest_of(first[:2], complete))
    manifests.check_same_train_split(tmp_path, before, manifest_of(copied[:2], complete))
    other = [first[0], replace(first[1], sha256="0" * 64)]
    for found in [other, first[1::-1], first[:1], *([first] if complete else [])]:
        with pytest.raises(BadInput, match="was trained on different data. Use the same text, or"):
            manifests.check_same_train_split(tmp_path, before, manifest_of(found, True))
    if not complete:
        manifests.check_same_train_split(tmp_path, before, manifest_of(first, True))
    with pytest.raises(BadInput, match="Use --dataset_revision abc, or .* --run_name"):
        manifests.check_same_train_split(tmp_path, before, manifest_of(other, complete, "def"))


def test_a_changed_byte_is_refused_also_after_copying_and_what_is_older_is_not_read(
    tmp_path, monkeypatch
):
    folder = tmp_path / "data"
    folder.mkdir()
    written = write(folder, range(50), shard_tokens=20)
    (folder / "manifest.json").touch()
    for shard in written:
        touch(folder / shard.file, -100)
    changed = folder / written[1].file
    touch(changed, 200)
    manifests.check_unchanged(folder, written)
    flip(changed, 8 * 1040)
    touch(changed, 200)
    for place in (folder, Path(shutil.copytree(folder, tmp_path / "copy"))):
        with pytest.raises(BadInput) as caught:
            manifests.check_unchanged(place, written)
        (line,) = caught.value.lines
        assert line.startswith(f"{place / changed.name} was changed") and "SHA-256" in line
    (folder / written[0].file).unlink()
    monkeypatch.setattr(shards.files, "sha256", lambda path: pytest.fail(f"read {path}"))
    manifests.check_unchanged(folder, [written[0], Shard(changed.name, 20), written[2]])


def test_every_fault_of_a_folder_is_found_at_once_and_any_flipped_bit_is_one(tmp_path):
    draw, written = random.Random(200), write(tmp_path, range(60), shard_tokens=10)
    gone, short, other, version, changed, bit = [tmp_path / shard.file for shard in written]
    whole = bit.read_bytes()
    gone.unlink()
    short.write_bytes(short.read_bytes()[:-2])
    other.write_bytes(llm_c(range(9)))
    flip(version, 32)
    flip(changed, 8 * 600)
    for _ in range(50):
        bit.write_bytes(whole)
        flip(bit, draw.randrange(8 * len(whole)))
        found = [*manifests.find_problems(tmp_path, written)]
        assert [shard for shard, _ in found] == written
        assert all(shard.file in line for shard, line in found)
