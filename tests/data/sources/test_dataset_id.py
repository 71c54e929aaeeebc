"""Test names of data sets that are not ids, before the Hub is contacted."""

import pytest

from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources.dataset_id import check_dataset_id

PAGE = "https://huggingface.co/datasets/owner/name"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to a folder that contains a folder of JSON lines."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.jsonl").write_text('{"text": "a"}\n')


@pytest.mark.parametrize(
    "name, fix",
    [
        (f"{PAGE}/viewer/default/train", "--dataset_name owner/name"),
        (f"{PAGE}/blob/main/a.txt", f"--data_files {PAGE}/resolve/main/a.txt"),
        ("datasets/owner/name", "--dataset_name owner/name"),
        ("json", "--data_files FILE"),
        ("corpus", "--data_files 'corpus/**/*.jsonl'"),
    ],
)
def test_name_that_is_no_id_is_rejected(name, fix):
    with pytest.raises(BadInput) as caught:
        check_dataset_id(name)

    message = str(caught.value)
    assert message.startswith(f"dataset_name = {name}: ")
    assert fix in message
