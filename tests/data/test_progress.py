"""What the user sees of a preparation: lines now and then, of whatever is read."""

import pytest

from pretrain.data import progress
from pretrain.data.documents import NO_IDS, Document

NOTHING = {"splits": {"train": []}, "counts": {"train": {}}}


def test_progress_is_shown_now_and_then_of_rows_without_text_too(monkeypatch, caplog):
    monkeypatch.setattr(progress, "SHOW_LINE_SECONDS", 0.0)
    shown = progress.Progress(None, NOTHING)
    shown.count(Document(0, NO_IDS, 0, {"documents": 0, "without_text": 1}))
    shown.count(Document(1, NO_IDS, 9, {"documents": 1, "without_text": 0}))
    assert [line.rpartition(", ")[0] for line in caplog.messages] == ["0 documents, 0 tokens", "1 documents, 0 tokens"]


@pytest.mark.parametrize(
    "name, text_bytes, warned", [("bpe", 249, 1), ("a/b", 249, 1), ("bpe", 250, 0), ("characters", 1, 0)]
)
def test_a_tokenizer_that_does_not_fit_the_text_is_warned_of(caplog, name, text_bytes, warned):
    splits = {"validation": [{"tokens": 100, "text_bytes": 100}], "train": [{"tokens": 100, "text_bytes": text_bytes}]}
    manifest = {"splits": splits, "counts": {"train": {}}, "tokenizer": {"name": name}}
    progress.Progress(None, NOTHING).end(manifest)
    found = [line for line in caplog.messages if "2.49 bytes per token: the tokenizer does not fit this text" in line]
    assert len(found) == warned and all(("Give it more text, with" in line) == (name == "bpe") for line in found)
