"""Folders of token files of other programs are opened with the separators that they lack."""

from types import SimpleNamespace

import numpy as np
import pytest
from token_files import write_datatrove

from ursa_minor.base.errors import BadInput
from ursa_minor.data.loading.corpus import OpenedSource
from ursa_minor.data.loading.token_folder import check_document_mask
from ursa_minor.data.tokens import manifest as manifests

SEPARATOR = 7
MODEL = SimpleNamespace(vocab_size=64, sequence_length=4)
TEXTS = [[10, 11, 12, 13], [14], [], [15, 16, 17]]
WITH_SEPARATORS = [7, 10, 11, 12, 13, 7, 14, 7, 15, 16, 17]


@pytest.fixture
def folder(tmp_path):
    """Write files of datatrove without separators."""
    write_datatrove(tmp_path / "val" / "0.ds", TEXTS)
    for number in range(2):
        write_datatrove(tmp_path / "train" / f"{number}.ds", TEXTS)
    return tmp_path


def open_source(folder, *, consumed=False):
    """Open a folder like a run."""
    manifest = manifests.describe_folder(folder)
    for shard in manifest.splits["train"]:
        # A download writes the number of documents into the manifest.
        object.__setattr__(shard, "documents", 3)
    if consumed:
        (folder / "train" / "0.ds").unlink()
    return OpenedSource(1.0, folder, manifest, MODEL, consumed=consumed, separator=SEPARATOR)


def test_run_reads_inserted_separators(folder):
    source = open_source(folder)
    row = np.zeros(5, dtype=np.int64)

    source.train.read(1, row)

    assert source.train.num_tokens == 2 * len(WITH_SEPARATORS)
    assert source.num_inserted == 6
    assert row.tolist() == WITH_SEPARATORS[4:9]


def test_deleted_file_keeps_number_of_windows(folder):
    num_windows = open_source(folder).train.num_windows

    source = open_source(folder, consumed=True)

    assert source.train.num_windows == num_windows


@pytest.mark.parametrize("place", ["before", "after", "missing"])
def test_document_mask_needs_separators_before_documents(tmp_path, place):
    texts = [document for document in TEXTS if document]
    if place == "before":
        texts = [[SEPARATOR, *document] for document in texts]
    if place == "after":
        texts = [[*document, SEPARATOR] for document in texts]
    for split in ("train", "val"):
        write_datatrove(tmp_path / f"{split}.ds", texts)
    manifest = manifests.describe_folder(tmp_path)

    if place != "after":
        check_document_mask(tmp_path, manifest, SEPARATOR)
        return
    with pytest.raises(BadInput) as caught:
        check_document_mask(tmp_path, manifest, SEPARATOR)

    message = str(caught.value)
    assert "document_mask" in message
    assert "train.ds" in message
    assert "follows" in message
