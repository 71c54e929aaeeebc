"""Test the log lines of a data preparation."""

import pytest

from ursa_minor.data.preparation import progress
from ursa_minor.data.tokens.encoder import NO_IDS, Document
from ursa_minor.data.tokens.manifest import Manifest, TokenizerReference
from ursa_minor.data.tokens.shards import Shard


@pytest.mark.parametrize("expected_bytes, limit_tokens", [(1e6, 0), (1e6, 50), (0.0, 50)])
def test_rows_without_text_at_start_are_logged(monkeypatch, caplog, expected_bytes, limit_tokens):
    """The speed is still 0 then, so no remaining time can be computed from it."""
    monkeypatch.setattr(progress, "SHOW_LINE_SECONDS", 0.0)
    reporter = progress.Progress([], 0, expected_bytes, limit_tokens)
    without_text = Document(0, NO_IDS, 0, {"documents": 0, "without_text": 1})
    with_text = Document(1, NO_IDS, 9, {"documents": 1, "without_text": 0})

    reporter.count(without_text)
    reporter.count(with_text)

    first_line, second_line = caplog.messages
    assert first_line == "0 documents, 0 tokens, 0.0 MB/s"
    size_is_known = expected_bytes > 0
    assert ("min left" in second_line) == size_is_known


def log_amounts(tokenizer_name: str, text_bytes: int) -> None:
    """Log the amounts of a train split with 100 tokens and this many bytes of text."""
    splits = {
        "validation": [Shard("val_00000_00000.bin", 100, 100)],
        "train": [Shard("train_00000_00000.bin", 100, text_bytes)],
    }
    tokenizer = TokenizerReference(tokenizer_name, fingerprint="", size=300)
    manifest = Manifest(splits=splits, counts={"train": {}}, tokenizer=tokenizer, complete=True)
    progress.log_amounts(manifest)


@pytest.mark.parametrize("name, has_own_fix", [("bpe", True), ("owner/name", False)])
def test_tokenizer_with_short_tokens_is_warned_of(caplog, name, has_own_fix):
    log_amounts(name, text_bytes=249)

    (warning,) = [line for line in caplog.messages if "does not fit" in line]
    assert "2.49 bytes per token" in warning
    assert ("on more text" in warning) == has_own_fix


@pytest.mark.parametrize("name, text_bytes", [("bpe", 250), ("characters", 100)])
def test_tokenizer_that_fits_is_not_warned_of(caplog, name, text_bytes):
    log_amounts(name, text_bytes)

    assert "does not fit" not in caplog.text
