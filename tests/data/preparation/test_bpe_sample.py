"""The text on which a BPE is trained."""

import json
from collections import Counter
from pathlib import Path

import pytest

from ursa_minor.data.preparation import bpe_sample, prepare
from ursa_minor.data.sources.find import find_source
from ursa_minor.recipe.keys import DataSource

SIZES = {"a": 900, "b": 2100, "c": 3000}  # characters of each file


@pytest.fixture(autouse=True)
def small_sample(monkeypatch):
    """Limit the sample to 600 characters."""
    monkeypatch.setattr(bpe_sample, "BPE_SAMPLE_CHARACTERS", 600)


def write_files(folder: Path, suffix: str, sizes: dict[str, int]) -> list[str]:
    """Write files of text, each of which repeats the letter of its name."""
    names = []
    for letter, size in sizes.items():
        path = folder / f"{letter}{suffix}"
        if suffix == ".jsonl":
            rows = [json.dumps({"text": letter * 30}) for _ in range(size // 30)]
            path.write_text("\n".join(rows))
        else:
            path.write_text(letter * size)
        names.append(str(path))
    return names


def sampled_letters(names: list[str], **settings: object) -> Counter:
    """Return the number of characters of each file in the sample."""
    defaults = {"tokenizer": "bpe", "validation_fraction": 0.0001, "data_seed": 0}
    config = DataSource(data_files=names, **(defaults | settings))
    source = find_source(config)
    _, parts = prepare.open_parts(source, None, {})
    return Counter("".join(bpe_sample.bpe_sample(source, parts["train"])))


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_sample_has_share_of_each_file(suffix, tmp_path):
    names = write_files(tmp_path, suffix, SIZES)

    letters = sampled_letters(names)

    assert letters["a"] == pytest.approx(90, abs=30)
    assert letters["b"] == pytest.approx(210, abs=30)
    assert letters["c"] == pytest.approx(300, abs=30)


def test_sample_of_separated_documents_is_spread_evenly(tmp_path):
    path = tmp_path / "a.txt"
    documents = [letter * 20 for letter in sorted("abcdef" * 100)]
    path.write_text("\n\n".join([*documents, "z" * 20]))

    settings = {"document_separator": "blank_line", "validation_fraction": 0.002}
    letters = sampled_letters([str(path)], **settings)

    assert set(letters) == set("abcdef")
    for number in letters.values():
        assert number == pytest.approx(100, abs=20)
