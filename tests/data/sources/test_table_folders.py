"""Test folders of tables that other programs write."""

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources.files import find_files

TEXTS = ["a text", "another text"]


@pytest.mark.parametrize("pattern", ["saved", "saved/*.arrow"])
def test_caches_of_saved_folder_are_left_out(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 0)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk("saved")
    datasets.load_from_disk("saved").map(lambda row: {"text": row["text"].upper()})
    assert list((tmp_path / "saved").glob("cache-*.arrow"))

    assert find_files("data_files", [pattern]) == ["saved/data-00000-of-00001.arrow"]


@pytest.mark.parametrize(
    "file, marker, format_name",
    [
        ("year=2024/a.parquet", "_delta_log/00000000000000000000.json", "Delta"),
        ("data/a.parquet", "metadata/v1.metadata.json", "Iceberg"),
    ],
)
def test_table_of_many_files_is_rejected(tmp_path, file, marker, format_name):
    for name in (file, marker):
        (tmp_path / "table" / name).parent.mkdir(parents=True)
        (tmp_path / "table" / name).touch()
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "table" / file)

    with pytest.raises(BadInput) as caught:
        find_files("data_files", [f"{tmp_path}/table/**/*.parquet"])

    (line,) = caught.value.lines
    assert f"{tmp_path}/table" in line
    assert format_name in line
