"""Test the notes about the documents of text files."""

import pytest

from ursa_minor.data.preparation import text_notes
from ursa_minor.data.sources.find import find_source
from ursa_minor.recipe.keys import DataSource


@pytest.mark.parametrize(
    "separator, note",
    [(None, "<|endoftext|> occurs 700 times"), (r"\n--\n", "no file of a contains more than one")],
)
def test_unused_separator_is_noted(tmp_path, monkeypatch, caplog, separator, note):
    monkeypatch.setattr(text_notes, "BLOCK_BYTES", 50)
    path = tmp_path / "a.txt"
    path.write_text("<|endoftext|>".join("word " * (number % 7) for number in range(701)))
    config = DataSource(
        data_files=[str(path)], document_separator=separator, tokenizer="t", data_seed=1
    )

    text_notes.log_notes(find_source(config))

    (warning,) = caplog.messages
    assert note in warning
    assert "document_separator" in warning
