"""What the user sees of a preparation: lines now and then, of whatever is read."""

import pytest

from ursa_minor.data.preparation import progress
from ursa_minor.data.tokens.encoder import NO_IDS, Document
from ursa_minor.data.tokens.manifest import Manifest, TokenizerReference
from ursa_minor.data.tokens.shards import Shard


@pytest.mark.parametrize("expected, limit", [(1e6, 0), (1e6, 50), (0.0, 50)])
def test_rows_without_text_at_the_begin_are_shown_too(monkeypatch, caplog, expected, limit):
    """There is no speed yet to tell from how long it takes."""
    monkeypatch.setattr(progress, "SHOW_LINE_SECONDS", 0.0)
    shown = progress.Progress([], 0, expected, limit)
    shown.count(Document(0, NO_IDS, 0, {"documents": 0, "without_text": 1}))
    shown.count(Document(1, NO_IDS, 9, {"documents": 1, "without_text": 0}))
    before, after = caplog.messages
    assert before == "0 documents, 0 tokens, 0.0 MB/s" and ("min left" in after) == bool(expected)


CASES = [("bpe", 249, 1), ("a/b", 249, 1), ("bpe", 250, 0), ("characters", 100, 0)]


@pytest.mark.parametrize("name, text_bytes, warned", CASES)
def test_a_tokenizer_that_does_not_fit_the_text_is_warned_of(caplog, name, text_bytes, warned):
    splits = {
        "validation": [Shard("val_00000_00000.bin", 100, 100)],
        "train": [Shard("train_00000_00000.bin", 100, text_bytes)],
    }
    tokenizer = TokenizerReference(name, fingerprint="", size=300)
    manifest = Manifest(splits=splits, counts={"train": {}}, tokenizer=tokenizer, complete=True)
    progress.log_amounts(manifest)
    found = [line for line in caplog.messages if "does not fit this text" in line]
    assert len(found) == warned and all("2.49 bytes per token" in line for line in found)
    assert all(
        ("Train the tokenizer on more text, with" in line) == (name == "bpe") for line in found
    )
