"""Test what ``measure.examine`` reports."""

import pytest

from ursa_minor.data.preparation import measure
from ursa_minor.data.sources.find import find_source
from ursa_minor.recipe.keys import DataSource


def test_bytes_per_token_of_characters_are_exact(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("Привет" * 1000, encoding="utf-8")
    config = DataSource(data_files=[str(path)], tokenizer="characters", data_seed=1)

    report = measure.examine(find_source(config))

    assert report.bytes_per_token == pytest.approx(2, abs=0.01)
    assert report.cost.tokens == pytest.approx(6000, abs=10)
