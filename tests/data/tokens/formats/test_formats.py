"""Files of datatrove and Megatron-LM are read, or rejected with the name of the problem."""

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from token_files import write_datatrove, write_megatron

from ursa_minor.base.errors import BadInput
from ursa_minor.data.preparation import measure
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import shards

TEXTS = [[1, 2, 3], [], [40, 50], [6]]
IDS = [1, 2, 3, 40, 50, 6]
ENDS = [3, 5, 6]  # without the empty document


def read(path):
    """Return the ids of a file and the ends of its documents."""
    ids, _ = shards.open_ids(path)
    return ids.tolist(), np.asarray(shards.read_document_ends(path)).tolist()


def problem_of(path):
    """Open a file and its documents, and return the message of the error."""
    with pytest.raises(BadInput) as caught:
        read(path)
    (message,) = caught.value.lines
    return message


def side_file(path, ending):
    """Return the path of a side file of datatrove."""
    return path.with_name(f"{path.name}.{ending}")


# Recognition


@pytest.mark.parametrize("id_bytes", [2, 4])
@pytest.mark.parametrize("name", ["a_train.ds", "train.bin", "renamed_train.bin"])
def test_datatrove_is_recognized_by_side_files(tmp_path, name, id_bytes):
    path = write_datatrove(tmp_path / name, TEXTS, id_bytes=id_bytes)

    ids, ends = read(path)

    assert ids == IDS
    assert ends == ENDS
    assert shards.open_ids(path)[0].itemsize == id_bytes


@pytest.mark.parametrize("id_bytes", [2, 4])
@pytest.mark.parametrize("missing", ["has_metadata", "has_index"])
def test_one_side_file_of_datatrove_is_enough(tmp_path, missing, id_bytes):
    path = write_datatrove(tmp_path / "a.ds", TEXTS, id_bytes=id_bytes, **{missing: False})

    ids, _ = shards.open_ids(path)

    assert ids.tolist() == IDS
    assert (shards.read_document_ends(path) is None) == (missing == "has_index")


def test_older_metadata_state_no_width(tmp_path):
    path = write_datatrove(tmp_path / "a.ds", TEXTS, id_bytes=4)
    side_file(path, "metadata").write_text("gpt2\n6\n6 T")

    assert read(path) == (IDS, ENDS)
    assert shards.tokenizer_name(path) == "gpt2"


@pytest.mark.parametrize(
    ("stated", "name"),
    [("gpt2", "gpt2"), ("a/tokenizer.json", "a/tokenizer.json"), ("Unknown Tokenizer|2", None)],
)
def test_tokenizer_of_datatrove_is_read(tmp_path, stated, name):
    path = write_datatrove(tmp_path / "a.ds", TEXTS, tokenizer=stated)

    assert shards.tokenizer_name(path) == name


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
@pytest.mark.parametrize("name", ["train.bin", "my_text_document.bin"])
def test_megatron_is_read_in_each_integer_type(tmp_path, name, dtype):
    path = write_megatron(tmp_path / name, TEXTS, dtype=dtype)

    assert read(path) == (IDS, ENDS)
    assert shards.tokenizer_name(path) is None


def test_sequences_of_one_document_are_joined(tmp_path):
    path = write_megatron(tmp_path / "a.bin", [[1, 2], [3], [4, 5]], modes=True)
    index = path.with_suffix(".idx")
    content = index.read_bytes()
    entries = np.array([0, 2, 2, 3], dtype="<i8")  # the second of three documents is empty
    index.write_bytes(content[: -8 * 4 - 3] + entries.tobytes() + content[-3:])

    assert read(path) == ([1, 2, 3, 4, 5], [3, 5])


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_negative_id_of_megatron_is_rejected(tmp_path, dtype):
    path = write_megatron(tmp_path / "a.bin", [[1, 2, -1]], dtype=dtype)
    ids, offset = shards.open_ids(path)

    with pytest.raises(BadInput, match="token 2 at offset"):
        shards.check_ids(path, ids, offset, 50_000)


@pytest.mark.parametrize("write", [write_datatrove, write_megatron])
def test_file_without_documents_has_no_ids(tmp_path, write):
    path = write(tmp_path / "a_train.bin", [])

    assert read(path) == ([], [])


# Damage


def change_metadata(path, text):
    """Replace the metadata of datatrove."""
    side_file(path, "metadata").write_text(text)


def change_index(path, ends):
    """Replace the index of datatrove."""
    np.array(ends, dtype="<u8").tofile(side_file(path, "index"))


def cut(path, num_bytes):
    """Remove the last bytes of a file."""
    path.write_bytes(path.read_bytes()[:-num_bytes])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: cut(path, 2), "has 10 bytes, but its 6 tokens need 12"),
        (lambda path: cut(side_file(path, "index"), 3), "a.ds.index is truncated"),
        (lambda path: cut(side_file(path, "index"), 8), "contradict"),
        (lambda path: change_index(path, [3, 5, 7]), "state 6 and 7 tokens"),
        (lambda path: change_index(path, [3, 9, 6]), "a document ends at token 9"),
        (lambda path: change_index(path, [3, 2**63, 6]), "a document ends at token"),
        (lambda path: change_index(path, [3, 2, 6]), "document 1 ends before it begins"),
        (lambda path: change_index(path, []), "contradict"),
        (lambda path: change_metadata(path, "gpt2|2\n5\n5 T"), "contradict"),
        (lambda path: change_metadata(path, "gpt2|4\n6\n6 T"), "need 24"),
        (lambda path: change_metadata(path, "gpt2|3\n6\n6 T"), "states 3 bytes per id"),
        (lambda path: change_metadata(path, "gpt2|2"), "a.ds.metadata is corrupted"),
        (lambda path: change_metadata(path, ""), "a.ds.metadata is corrupted"),
        (lambda path: change_metadata(path, "gpt2|2\nsix"), "a.ds.metadata is corrupted"),
    ],
)
def test_damaged_file_of_datatrove_is_rejected(tmp_path, damage, words):
    path = write_datatrove(tmp_path / "a.ds", TEXTS)
    damage(path)

    message = problem_of(path)

    assert str(path) in message
    assert words in message
    assert "Restore the original file" in message


def test_file_of_datatrove_without_side_files_is_rejected(tmp_path):
    path = write_datatrove(tmp_path / "a.ds", TEXTS, has_metadata=False, has_index=False)

    message = problem_of(path)

    assert ".metadata" in message
    assert "np.fromfile" in message


def test_loss_mask_of_datatrove_is_rejected_with_command(tmp_path):
    path = write_datatrove(tmp_path / "tokens" / "a.ds", TEXTS)
    side_file(path, "loss").write_bytes(bytes(6))

    message = problem_of(path)

    assert "loss mask" in message
    command = message.partition("folder: ")[2]
    subprocess.run(command, shell=True, check=True)
    assert read(path) == (IDS, ENDS)


MEGATRON_HEADER = struct.calcsize("<9sQBQQ")


def patch_index(path, offset, layout, *values):
    """Replace bytes of the index of Megatron-LM."""
    index = path.with_suffix(".idx")
    content = bytearray(index.read_bytes())
    struct.pack_into(layout, content, offset, *values)
    index.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: cut(path, 4), "has 20 bytes, but its 6 tokens need 24"),
        (lambda path: path.write_bytes(path.read_bytes() + b"1234"), "has 28 bytes"),
        (lambda path: cut(path.with_suffix(".idx"), 1), "a.idx is truncated"),
        (lambda path: path.with_suffix(".idx").write_bytes(b""), "a.idx is truncated"),
        (lambda path: path.with_suffix(".idx").write_bytes(b"MMID"), "a.idx is truncated"),
        (lambda path: patch_index(path, 9, "<Q", 2), "unknown version 2"),
        (lambda path: patch_index(path, 18, "<Q", 2**62), "a.idx is truncated or corrupted"),
        (lambda path: patch_index(path, MEGATRON_HEADER, "<i", -3), "do not follow"),
        (lambda path: patch_index(path, MEGATRON_HEADER + 4 * 4, "<q", 8), "do not follow"),
        (lambda path: patch_index(path, MEGATRON_HEADER + 4 * 4 + 24, "<q", 2**50), "need"),
        (lambda path: patch_index(path, MEGATRON_HEADER + 12 * 4, "<q", 1), "documents"),
        (lambda path: patch_index(path, MEGATRON_HEADER + 12 * 4 + 8, "<q", 9), "order"),
        (lambda path: patch_index(path, MEGATRON_HEADER + 12 * 4 + 32, "<q", 9), "sequence 9"),
        (lambda path: patch_index(path, 17, "<B", 8), "has 24 bytes, but its"),
        (lambda path: patch_index(path, 17, "<B", 77), "unknown code 77"),
    ],
)
def test_damaged_file_of_megatron_is_rejected(tmp_path, damage, words):
    path = write_megatron(tmp_path / "a.bin", TEXTS)
    damage(path)

    message = problem_of(path)

    assert str(path) in message or str(path.with_suffix(".idx")) in message
    assert words in message
    assert "Restore the original file" in message


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_megatron_floats_are_rejected_with_conversion(tmp_path, dtype):
    folder = tmp_path / "shards"
    path = write_megatron(folder / "a_train.bin", TEXTS, dtype=dtype)

    message = problem_of(path)

    assert dtype in message
    command = message.partition("Convert it: ")[2].partition(", and use")[0]
    (tmp_path / "python").symlink_to(sys.executable)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(command, shell=True, check=True, env=environment)
    ids, _ = shards.open_ids(tmp_path / "shards-npy" / "a_train.npy")
    assert ids.tolist() == IDS


def test_other_idx_file_is_ignored(tmp_path):
    path = tmp_path / "train.bin"
    np.array(IDS, dtype="<u2").tofile(path)
    path.with_suffix(".idx").write_bytes(b"something else")

    assert shards.open_ids(path)[0].tolist() == IDS


# Folders


def split_files(folder):
    """Return the names of the files of each split of a folder."""
    splits = manifests.describe_folder(folder).splits
    return {split: [shard.file for shard in files] for split, files in splits.items()}


def test_splits_are_read_from_subfolders(tmp_path):
    for split in ("train", "val"):
        for rank in range(2):
            write_datatrove(tmp_path / split / f"{rank:05d}_unshuffled.ds", TEXTS)
    (tmp_path / "logs").mkdir()

    assert split_files(tmp_path) == {
        "train": ["train/00000_unshuffled.ds", "train/00001_unshuffled.ds"],
        "validation": ["val/00000_unshuffled.ds", "val/00001_unshuffled.ds"],
    }


def test_subfolder_is_ignored_if_files_name_the_splits(tmp_path):
    for name in ("train.ds", "val.ds", "train/0.ds", "test/0.ds"):
        write_datatrove(tmp_path / name, TEXTS)

    assert split_files(tmp_path) == {"train": ["train.ds"], "validation": ["val.ds"]}


def test_split_of_file_and_folder_must_agree(tmp_path):
    write_datatrove(tmp_path / "train" / "a_val_0.ds", TEXTS)

    with pytest.raises(BadInput, match=r"a_val_0\.ds"):
        manifests.describe_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shard.00000.mds", "mosaicml-streaming"),
        ("chunk-0-0.bin", "litdata"),
        ("00000_unshuffled.ds", "subfolders train and val"),
        ("text_document.bin", "Megatron-LM wrote"),
    ],
)
def test_message_names_files_without_split(tmp_path, name, words):
    (tmp_path / name).write_bytes(bytes(10))

    with pytest.raises(BadInput) as caught:
        manifests.describe_folder(tmp_path)

    assert str(tmp_path) in str(caught.value)
    assert words in str(caught.value)


# prepare_data.py --verify


@pytest.mark.parametrize("write", [write_datatrove, write_megatron])
def test_verification_checks_index_of_documents(tmp_path, write):
    for split in ("train", "val"):
        write(tmp_path / f"a_{split}.bin", TEXTS)

    result = measure.verify(tmp_path, 64)

    assert "2 shards with 12 tokens are intact" in result
    assert "the index of 6 documents" in result
    assert "where documents begin" not in result
    assert "tokenizer of the recipe" in result.partition("Not checked: ")[2]


def test_verification_states_what_files_do_not(tmp_path):
    for split in ("train", "val"):
        np.save(tmp_path / f"a_{split}.npy", np.array(IDS, dtype=np.uint16))

    not_checked = measure.verify(tmp_path, 64).partition("Not checked: ")[2]

    assert "where documents begin" in not_checked
    assert "whether valid ids were changed" in not_checked


def test_verification_reports_index_that_points_outside(tmp_path):
    for split in ("train", "val"):
        write_datatrove(tmp_path / f"{split}.ds", TEXTS)
    change_index(tmp_path / "train.ds", [3, 9, 6])

    with pytest.raises(BadInput, match="a document ends at token 9"):
        measure.verify(tmp_path, 64)
