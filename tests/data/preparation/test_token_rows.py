"""Rows of token ids give the same shards as the text that they were encoded from."""

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import odd_tokenizers
import pytest

from ursa_minor.data.preparation.prepare import prepare
from ursa_minor.data.sources.find import find_source
from ursa_minor.data.tokens import shards
from ursa_minor.data.tokens.manifest import read_manifest
from ursa_minor.recipe.keys import DataSource

TEXTS = [f"the river {number} stone bank" + " the" * (number % 5) for number in range(60)]
ROW_IDS = 48  # length of padded rows
BLOCK_IDS = 16  # length of packed rows


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    """Work in a temporary folder."""
    monkeypatch.chdir(tmp_path)


def save_tokenizer(**special_tokens: str):
    """Save a tokenizer with these special tokens in the folder tok, and return it."""
    tokenizer = odd_tokenizers.byte_level_tokenizer()
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.save_pretrained("tok")
    return tokenizer


def write_rows(rows: list[dict], suffix: str) -> str:
    """Write a table and return the name of its file."""
    name = f"rows{suffix}"
    if suffix == ".jsonl":
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        datasets.Dataset.from_list(rows).to_parquet(name)
    return name


def prepared_ids(name: str, **changes) -> np.ndarray:
    """Prepare a table and return the ids of all its shards."""
    config = DataSource(
        data_files=[name], tokenizer="tok", validation_tokens=100, data_seed=0, **changes
    )
    source = find_source(config)
    source.folder.mkdir(parents=True, exist_ok=True)
    prepare(source)
    parts = []
    for pattern in ("val_*.bin", "train_*.bin"):
        for path in sorted(source.folder.glob(pattern)):
            ids, _ = shards.open_ids(path)
            parts.append(ids)
    return np.concatenate(parts)


def ids_of_texts() -> np.ndarray:
    """Return the ids that the texts themselves give."""
    return prepared_ids(write_rows([{"text": text} for text in TEXTS], ".jsonl"))


def padded(ids: list[int], pad_id: int, side: str) -> dict:
    """Return a row as a tokenizer with padding = "max_length" writes it."""
    padding = [pad_id] * (ROW_IDS - len(ids))
    ones = [len(ids) % 2 + 1] * len(ids)  # some programs write the number of the document
    zeros = [0] * len(padding)
    if side == "left":
        return {"input_ids": padding + ids, "attention_mask": zeros + ones}
    return {"input_ids": ids + padding, "attention_mask": ones + zeros}


def without_mask(row: dict) -> dict:
    return {"input_ids": row["input_ids"]}


# How other programs write the ids of a document: a function of the ids and the tokenizer.
LAYOUTS: dict[str, Callable] = {
    "bos_eos": lambda ids, tok: {"input_ids": [tok.bos_token_id, *ids, tok.eos_token_id]},
    "padded_left": lambda ids, tok: padded(ids, tok.pad_token_id, "left"),
    "padded_without_mask": lambda ids, tok: without_mask(
        padded([*ids, tok.eos_token_id], tok.pad_token_id, "right")
    ),
    "padded_with_text_id": lambda ids, tok: padded(ids, ids[0], "right"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_give_shards_of_their_text(layout):
    tokenizer = save_tokenizer(pad_token="<pad>", bos_token="<s>")
    expected = ids_of_texts()
    rows = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        rows.append(LAYOUTS[layout](ids, tokenizer))

    ids = prepared_ids(write_rows(rows, ".jsonl"), token_column="input_ids")

    assert np.array_equal(ids, expected)


def test_mask_of_table_removes_padding():
    tokenizer = save_tokenizer()
    expected = ids_of_texts()
    rows = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        rows.append(padded(ids, ids[0], "right"))

    ids = prepared_ids(write_rows(rows, ".parquet"), token_column="input_ids")

    assert np.array_equal(ids, expected)


def packed_rows(tokenizer, texts: list[str]) -> tuple[list[int], list[dict]]:
    """Return joined documents, and the blocks that run_clm's group_texts makes of them."""
    ids = []
    for text in texts:
        ids += [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    blocks = [ids[begin : begin + BLOCK_IDS] for begin in range(0, len(ids), BLOCK_IDS)]
    return ids, [{"input_ids": block} for block in blocks]


@pytest.mark.parametrize("pad_token", [None, odd_tokenizers.END_OF_TEXT])
def test_packed_rows_get_no_separator(pad_token, caplog):
    special_tokens = {"pad_token": pad_token} if pad_token else {}
    tokenizer = save_tokenizer(**special_tokens)
    # The last row of each file is shorter. With a padding token, the very last one is padded.
    first_ids, first_rows = packed_rows(tokenizer, TEXTS[:29])
    last_ids, last_rows = packed_rows(tokenizer, TEXTS[29:])
    assert len(first_rows[-1]["input_ids"]) < BLOCK_IDS
    if pad_token:
        last_row = last_rows[-1]["input_ids"]
        last_row += [tokenizer.pad_token_id] * (BLOCK_IDS - len(last_row))
    Path(write_rows(first_rows, ".jsonl")).rename("first.jsonl")
    Path(write_rows(last_rows, ".jsonl")).rename("last.jsonl")
    caplog.set_level("INFO")

    ids = prepared_ids("*.jsonl", token_column="input_ids")

    assert ids.tolist() == first_ids + last_ids
    (folder,) = Path("data").iterdir()
    assert read_manifest(folder).packed is True
    assert "packed" in caplog.text


def test_padded_rows_are_not_packed():
    tokenizer = save_tokenizer(pad_token=odd_tokenizers.END_OF_TEXT)
    rows = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        rows.append(
            without_mask(padded([*ids, tokenizer.eos_token_id], tokenizer.pad_token_id, "right"))
        )

    prepared_ids(write_rows(rows, ".jsonl"), token_column="input_ids")

    (folder,) = Path("data").iterdir()
    assert read_manifest(folder).packed is False


def test_unknown_padding_is_a_warning(caplog):
    tokenizer = save_tokenizer()
    rows = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        rows.append(without_mask(padded(ids, 7, "right")))

    prepared_ids(write_rows(rows, ".jsonl"), token_column="input_ids")

    assert "the id 7" in caplog.text
    assert "pad_token" in caplog.text
