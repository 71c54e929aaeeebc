"""Token files: every format read and refused, what is written, the manifest, and that no damage goes unseen."""

import io
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from pretrain.base import files
from pretrain.base.errors import BadInput
from pretrain.data import shards


def table(vocab_size):
    return np.arange(vocab_size, dtype=np.int64) % 7


def make_writer(folder, *, split="train", part=0, first_number=0, vocab_size=1000, shard_tokens=10**6):
    return shards.ShardWriter(folder, split, part, first_number, table(vocab_size), shard_tokens)


def write(folder, ids, **how):
    """Write ids as prepare_data.py does; return the rows."""
    writer = make_writer(folder, **how)
    rows = [row for row, _ in writer.fill(np.asarray(ids, dtype=np.uint32))]
    return [row for row in [*rows, writer.finish()] if row]


def save_manifest(folder, complete=True, **splits):
    manifest = {"splits": splits, "tokenizer": None, "complete": complete}
    files.write_json(folder / "manifest.json", manifest)
    return manifest


def llm_c(ids, magic=20240520, version=1, dtype="<u2", count=None):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    return header.tobytes() + np.array(ids, dtype=dtype).tobytes()


def npy(array, version=(1, 0)):
    out = io.BytesIO()
    np.lib.format.write_array(out, np.asarray(array), version=version)
    return out.getvalue()


def fortran(count):
    body = npy(np.arange(count, dtype="<u2"))
    return body.replace(b"'fortran_order': False", b"'fortran_order': True ")


def ids_of(folder, rows):
    return np.concatenate([shards.open_ids(folder / row["file"], row["tokens"])[0] for row in rows]).tolist()


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
    assert shards.read_layout(path) == layout
    ids, offset = shards.open_ids(path, layout[2])
    assert type(ids) is np.ndarray and ids.dtype == layout[1] and offset == layout[0]
    assert ids.tolist() == np.frombuffer(body, layout[1], offset=offset).tolist()
    assert not ids.flags.writeable


@pytest.mark.parametrize(
    "name, body, offset, words",
    [
        ("a.bin", llm_c([1], magic=20240522), 0, "magic 20240522: a token file has 20240520 or 20240801"),
        ("a.bin", np.arange(900, dtype="<u2").tobytes(), 0, "or is named *.npy, train.bin or val.bin"),
        ("a.bin", llm_c([1], version=2), 4, "version 2: magic 20240520 has version 1"),
        ("a.bin", llm_c([1, 2], count=3), 8, "says 3 tokens, that is 1030 bytes, the file has 1028"),
        ("a.bin", llm_c([1, 2], count=-1), 8, "says -1 tokens"),
        ("train.bin", llm_c([1])[:4], 4, "ends inside its header of 1024 bytes"),
        ("a.bin", b"", 0, "the file is empty"),
        ("train.bin", b"\x01\x00\x02", 2, "half an id: 3 bytes"),
        ("a.npy", bytes(200), 0, "the magic string is not correct"),
        ("a.npy", npy(np.arange(3, dtype="<u2"), (2, 0)), 0, "version is not 1.0"),
        ("a.npy", npy(np.arange(3, dtype="<u2")).replace(b"descr", b"desc\n"), 0, "no .npy header"),
        ("a.npy", npy(np.arange(3, dtype="<i8")), 10, "dtype <i8: ids are (tokens,), C, <u2, <u4, <i4"),
        ("a.npy", npy(np.zeros((3, 1), dtype="<u2")), 10, "shape (3, 1)"),
        ("a.npy", fortran(3), 10, "Fortran order"),
        ("a.npy", npy(np.arange(3, dtype="<u2"))[:-1], 10, "says 3 tokens, that is 134 bytes, the file has 133"),
    ],
)
def test_what_is_no_whole_token_file_is_refused_with_file_offset_and_remedy(tmp_path, name, body, offset, words):
    path = tmp_path / name
    path.write_bytes(body)
    with pytest.raises(BadInput) as caught:
        shards.open_ids(path)
    (line,) = caught.value.lines
    assert line.startswith(f"{path}: offset {offset}: ") and words in line and "\n" not in line
    assert line.split("; ")[-1].startswith(("fetch it again", "fetch or prepare it again", "save it again with"))


def test_an_object_array_is_never_unpickled_and_a_negative_id_is_beyond_every_vocabulary(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    path = tmp_path / "a_train.npy"
    np.save(path, np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(BadInput, match=r"a_train.npy: offset 10: shape \(1,\), C order, dtype \|O"):
        shards.open_ids(path)
    assert not (tmp_path / "sprung").exists()
    np.save(path, np.array([0, 50256, -1, -(2**31)], dtype=np.int32))
    ids, _ = shards.open_ids(path)
    assert ids.dtype == np.uint32 and ids[:2].tolist() == [0, 50256] and (ids[2:] >= 2**31).all()


def test_a_file_that_cannot_be_read_or_has_not_the_tokens_of_its_row_is_refused(tmp_path):
    raw = np.arange(40, dtype="<u2")
    for name, body, end in (
        ("a.bin", llm_c(raw), 1104),
        ("train.bin", raw.tobytes(), 80),
        ("a.npy", npy(raw.astype("<i4")), 288),
    ):
        with pytest.raises(BadInput, match=f"{name}: offset 0: cannot be read: .*; put it back"):
            shards.open_ids(tmp_path / name)
        (tmp_path / name).write_bytes(body)
        words = f"{name}: offset {end}: .* has 40 tokens, manifest.json says 50: changed since"
        with pytest.raises(BadInput, match=words):
            shards.open_ids(tmp_path / name, 50)


@pytest.mark.parametrize("vocab_size, itemsize, magic", [(65536, 2, (20240520, 1)), (65537, 4, (20240801, 7))])
def test_written_ids_are_read_back_in_llm_c_format(tmp_path, vocab_size, itemsize, magic):
    ids = np.arange(vocab_size - 12, vocab_size)
    (row,) = write(tmp_path, ids, vocab_size=vocab_size)
    path = tmp_path / "train_00000_00000.bin"
    assert row == {
        "file": path.name,
        "tokens": 12,
        "text_bytes": sum(int(i) % 7 for i in ids),
        "sha256": files.sha256(path),
    }
    assert np.fromfile(path, "<i4", count=256).tolist() == [*magic, 12, *[0] * 253]
    assert np.fromfile(path, f"<u{itemsize}", offset=1024).tolist() == ids.tolist()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_shards_are_cut_where_they_are_full_and_lose_nothing(tmp_path):
    writer, ids, rows = make_writer(tmp_path, shard_tokens=10), np.arange(95, dtype=np.uint32), []
    for begin in range(0, 95, 19):
        for row, on in writer.fill(np.concatenate([[7, 7], ids[begin : begin + 19]]), 2):
            assert row["tokens"] == 10 and begin + on - 2 == 10 * (len(rows) + 1)
            rows.append(row)
    rows.append(writer.finish())
    assert [row["tokens"] for row in rows] == [10] * 9 + [5] and writer.finish() is None
    assert ids_of(tmp_path, rows) == ids.tolist()
    for number, row in enumerate(rows):
        assert row["file"] == f"train_00000_{number:05d}.bin"
        assert row["text_bytes"] == sum(i % 7 for i in range(number * 10, number * 10 + row["tokens"]))
        assert row["sha256"] == files.sha256(tmp_path / row["file"])


def test_names_are_llm_cs_and_sorted_they_are_the_order(tmp_path):
    rows = write(tmp_path, range(6), part=2, first_number=9, shard_tokens=2)
    rows += write(tmp_path, range(6, 10), part=11, shard_tokens=2)
    names = [row["file"] for row in rows]
    assert names[0] == "train_00002_00009.bin" and names[-1] == "train_00011_00001.bin"
    assert names == sorted(names) and ids_of(tmp_path, rows) == list(range(10))
    for split, name in (("validation", "val_00000_00000.bin"), ("test", "test_00000_00000.bin")):
        assert write(tmp_path, [1], split=split)[0]["file"] == name
    with pytest.raises(BadInput, match="source file 100000: shard names count to 99999; join"):
        make_writer(tmp_path, part=100_000)


def test_a_shard_is_on_the_disk_before_it_has_its_name_and_its_name_before_it_has_a_row(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(shards.files, "fsync", lambda path: calls.append((path.name, os.listdir(tmp_path))))
    write(tmp_path, [1, 2])
    temporary, final = ".train_00000_00000.bin.tmp", "train_00000_00000.bin"
    assert calls == [(temporary, [temporary]), (tmp_path.name, [final])]


def test_what_a_killed_writer_leaves_is_no_shard_and_is_cleared_for_its_own_part_only(tmp_path):
    for split, part in (("train", 7), ("train", 8), ("train", 70), ("validation", 0)):
        writer = make_writer(tmp_path, split=split, part=part, shard_tokens=1000)
        list(writer.fill(np.zeros(1900 if part == 7 else 1, dtype=np.int64)))
        writer._file.flush()  # and no more
    left = tmp_path / ".train_00007_00001.bin.tmp"
    with pytest.raises(BadInput, match="offset 0: magic 0"):
        shards.read_layout(left)
    assert [path.name for path in tmp_path.glob("*.bin")] == ["train_00007_00000.bin"]
    shards.clear_partial(tmp_path, "train", 7)
    names = {".train_00008_00000.bin.tmp", ".train_00070_00000.bin.tmp", ".val_00000_00000.bin.tmp"}
    assert {path.name for path in tmp_path.iterdir()} == names | {"train_00007_00000.bin"}
    shards.clear_partial(tmp_path, "train")
    assert {path.name for path in tmp_path.iterdir()} == {".val_00000_00000.bin.tmp", "train_00007_00000.bin"}
    assert ids_of(tmp_path, write(tmp_path, [5, 6], split="validation")) == [5, 6], "what was left is written over"


def test_our_manifest_is_returned_and_may_have_no_train_while_it_grows(tmp_path):
    assert shards.read_manifest(tmp_path) is None
    splits = {"validation": write(tmp_path, [1], split="validation")}
    growing = save_manifest(tmp_path, complete=False, **splits)
    assert shards.read_manifest(tmp_path) == shards.describe_folder(tmp_path) == growing
    save_manifest(tmp_path, **splits, train=[])
    with pytest.raises(BadInput, match="holds no train shards"):
        shards.describe_folder(tmp_path)
    whole = save_manifest(tmp_path, **splits, train=write(tmp_path, [2]))
    assert shards.read_manifest(tmp_path) == shards.describe_folder(tmp_path) == whole


ROWS = '{"complete": true, "tokenizer": null, "splits": %s}'


@pytest.mark.parametrize(
    "body, words",
    [
        ('{"complete": tr', "char 13"),
        ("[]", "no complete, splits, tokenizer"),
        (b"\xff\xfe", "utf-8"),
        ("[" * 100_000, "nests too deeply"),
        (ROWS % "[]", "AttributeError"),
        (ROWS % '{"train": [7]}', "TypeError"),
        (ROWS % '{"train": [{"file": "../a.bin", "tokens": 7}]}', "a name in this folder"),
        (ROWS % '{"train": [{"file": "a.bin", "tokens": -7}]}', "tokens is a count"),
    ],
)
def test_a_damaged_manifest_is_refused_with_a_remedy(tmp_path, body, words):
    (tmp_path / "manifest.json").write_bytes(body if isinstance(body, bytes) else body.encode())
    with pytest.raises(BadInput) as caught:
        shards.describe_folder(tmp_path)
    (line,) = caught.value.lines
    assert line.startswith(f"{tmp_path / 'manifest.json'}: not a manifest (") and words in line
    assert line.endswith("delete the folder and prepare it again")


LLM_C, UINT16, RAW = llm_c(range(7)), npy(np.arange(7, dtype="<u2")), np.arange(7, dtype="<u2").tobytes()


@pytest.mark.parametrize(
    "body, train, validation, other",
    [
        (LLM_C, ["fineweb_train_000001.bin", "fineweb_train_000002.bin"], ["fineweb_val_000000.bin"], "LICENSE.bin"),
        (LLM_C, ["TinyStories_train.bin"], ["TinyStories_validation_0.bin"], "._TinyStories_train.bin"),
        (
            UINT16,
            ["edufineweb_train_000001.npy", "edufineweb_train_000010.npy"],
            ["edufineweb_val_000000.npy"],
            "a.npy",
        ),
        (RAW, ["train.bin"], ["val.bin"], "meta.pkl"),
    ],
    ids=["modded-nanogpt", "words", "build-nanogpt", "nanoGPT"],
)
def test_the_folders_of_others_are_read_where_they_lie(tmp_path, body, train, validation, other):
    for name in [*train[::-1], *validation, "corpus_test_0.bin"]:
        (tmp_path / name).write_bytes(LLM_C if "_test_" in name else body)
    (tmp_path / other).write_bytes(b"not ours to read")
    (tmp_path / "train_logs").mkdir()
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} | {"": tmp_path.stat().st_mtime_ns}
    described = shards.describe_folder(tmp_path)
    named = {"train": train, "validation": validation, "test": ["corpus_test_0.bin"]}
    splits = {split: [{"file": name, "tokens": 7} for name in names] for split, names in named.items()}
    assert described == {"splits": splits, "tokenizer": None, "complete": True}
    for rows in described["splits"].values():
        assert ids_of(tmp_path, rows) == [*range(7)] * len(rows)
        shards.refuse_changed(tmp_path, rows)
        shards.verify(tmp_path, rows)
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} | {"": tmp_path.stat().st_mtime_ns}
    assert after == before


@pytest.mark.parametrize(
    "names, words",
    [
        (None, "data_dir = .*/data: no such folder; prepare_data.py makes one"),
        (["a_train_0.bin"], "holds no validation shards .* between underscores.*; give a folder that"),
        (["a.bin"], "holds no train shards .* between underscores.*; give a folder that"),
        (["a_train_val_0.bin"], "a_train_val_0.bin: its name says train and validation; rename it"),
        (["train_00000_00000.bin", "val_00000_00000.bin"], "no manifest.json: not prepared to the end; run prepare_d"),
    ],
)
def test_a_folder_that_cannot_be_trained_on_is_refused_with_what_would_do(tmp_path, names, words):
    folder = tmp_path / "data"
    if names is not None:
        folder.mkdir()
    for name in names or []:
        (folder / name).write_bytes(LLM_C)
    with pytest.raises(BadInput, match=words):
        shards.describe_folder(folder)


def manifest_of(rows, complete):
    return {"splits": {"train": rows}, "complete": complete, "revision": "abc"}


@pytest.mark.parametrize("complete", [False, True])
def test_a_run_goes_on_with_the_text_that_it_began_with_only(tmp_path, complete):
    """Which may lie elsewhere, and have grown meanwhile unless it was complete."""
    (tmp_path / "copy").mkdir()
    rows, copied = (write(folder, range(30), shard_tokens=10) for folder in (tmp_path, tmp_path / "copy"))
    before = shards.contents(manifest_of(rows[:2], complete))
    shards.refuse_other_contents(tmp_path, before, manifest_of(copied[:2], complete))
    other = [rows[0], rows[1] | {"sha256": "0" * 64}]
    for found in [other, rows[1::-1], rows[:1], *([rows] if complete else [])]:
        with pytest.raises(BadInput, match="was trained on other data than this; give the same text, or another"):
            shards.refuse_other_contents(tmp_path, before, manifest_of(found, True))
    if not complete:
        shards.refuse_other_contents(tmp_path, before, manifest_of(rows, True))
    with pytest.raises(BadInput, match="give --dataset_revision abc, or another --run_name"):
        shards.refuse_other_contents(tmp_path, before, manifest_of(other, complete) | {"revision": "def"})


@pytest.fixture
def prepared_folder(tmp_path):
    """A folder of ours, its shards older than its manifest."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = write(folder, range(50), shard_tokens=20)
    save_manifest(folder, train=rows)
    for row in rows:
        touch(folder / row["file"], -100)
    return folder, rows


@pytest.mark.parametrize("copied", [False, True])
def test_a_changed_byte_is_refused_also_after_copying(prepared_folder, tmp_path, copied):
    folder, rows = prepared_folder
    flip(folder / rows[1]["file"], 8 * 1040)
    touch(folder / rows[1]["file"], 200)
    if copied:
        folder = Path(shutil.copytree(folder, tmp_path / "copy"))
    with pytest.raises(BadInput) as caught:
        shards.refuse_changed(folder, rows)
    (line,) = caught.value.lines
    path = folder / "train_00000_00001.bin"
    assert line.startswith(f"{path}: offset 0 to 1064: changed since manifest.json: its sha256 is ")
    assert line.endswith("put the old file back or prepare the folder again")


def test_shards_that_were_only_touched_or_have_no_hash_pass_and_older_ones_are_not_read(prepared_folder, monkeypatch):
    folder, rows = prepared_folder
    touch(folder / rows[1]["file"], 200)
    shards.refuse_changed(folder, rows)
    flip(folder / rows[1]["file"], 8 * 1040)
    touch(folder / rows[1]["file"], 200)
    (folder / rows[0]["file"]).unlink()
    monkeypatch.setattr(shards.files, "sha256", lambda path: pytest.fail(f"read {path}"))
    shards.refuse_changed(folder, [rows[0], {"file": rows[1]["file"], "tokens": 20}, rows[2]])


def test_every_fault_of_a_folder_is_found_at_once(tmp_path, caplog):
    """Any flipped bit is one; a shard that no row names is a note."""
    draw, rows = random.Random(200), write(tmp_path, range(60), shard_tokens=10)
    stray = write(tmp_path, [1], part=5) + write(tmp_path, [1], split="validation")
    (tmp_path / "notes.bin").write_bytes(b"somebody's own")
    shards.verify(tmp_path, rows)
    assert [note.split(": ")[0] for note in caplog.messages] == [str(tmp_path / row["file"]) for row in stray]
    gone, short, other, version, changed, bit = paths = [tmp_path / row["file"] for row in rows]
    whole = bit.read_bytes()
    gone.unlink()
    short.write_bytes(short.read_bytes()[:-2])
    other.write_bytes(llm_c(range(9)))
    flip(version, 32)
    flip(changed, 8 * 600)
    for _ in range(50):
        bit.write_bytes(whole)
        flip(bit, draw.randrange(8 * len(whole)))
        with pytest.raises(BadInput) as caught:
            shards.verify(tmp_path, rows)
        found = [tuple(line.split(": ")[:2]) for line in caught.value.lines]
        offsets = ["offset 0", "offset 8", "offset 1042", "offset 4", "offset 0 to 1044", found[-1][1]]
        assert found == list(zip(map(str, paths), offsets, strict=True))
