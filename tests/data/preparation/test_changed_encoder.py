"""A preparation continues with another encoder and writes the same shards."""

from pathlib import Path

import pytest
from conftest import TEXT

from ursa_minor.data.preparation.prepare import prepare
from ursa_minor.data.sources.find import FoundSource, find_source
from ursa_minor.data.tokens import shards
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.recipe.keys import DataSource

SHARDS_BEFORE_STOP = 3


def make_source(folder: str) -> FoundSource:
    """Return a source of many documents, whose shards are written below a folder."""
    config = DataSource(
        data_files=["rows.csv"],
        tokenizer="tok",
        validation_tokens=100,
        shard_tokens=500,
        prepared_data_dir=folder,
        data_seed=0,
    )
    source = find_source(config)
    source.folder.mkdir(parents=True, exist_ok=True)
    return source


def contents(source: FoundSource) -> dict[str, bytes]:
    """Return the shards of a source by name."""
    return {path.name: path.read_bytes() for path in source.folder.glob("*.bin")}


def stop_after_some_shards(monkeypatch) -> None:
    """Let the preparation fail when it opens the fourth train shard."""
    open_shard = shards.ShardWriter._open_shard

    def fail(writer):
        if writer.prefix.startswith("train") and writer.number == SHARDS_BEFORE_STOP:
            raise KeyboardInterrupt
        open_shard(writer)

    monkeypatch.setattr(shards.ShardWriter, "_open_shard", fail)


@pytest.mark.parametrize("first_encoder", ["fastokens", "tokenizers"])
def test_changed_encoder_writes_same_shards(first_encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [TEXT[i : i + 300] for i in range(0, len(TEXT) - 300, 40)]
    Path("rows.csv").write_text("text\n" + "\n".join(texts))
    tokenization.train_bpe([TEXT], 400).save_pretrained("tok")
    expected = make_source("uninterrupted")
    prepare(expected)

    interrupted = make_source("interrupted")
    with monkeypatch.context() as patch:
        stop_after_some_shards(patch)
        if first_encoder == "tokenizers":
            patch.setattr(tokenization, "_as_fastokens", lambda encoder: None)
        with pytest.raises(KeyboardInterrupt):
            prepare(interrupted)
    assert len(contents(interrupted)) == SHARDS_BEFORE_STOP + 1
    if first_encoder == "fastokens":
        monkeypatch.setattr(tokenization, "_as_fastokens", lambda encoder: None)
    prepare(interrupted)

    assert contents(interrupted) == contents(expected)
