"""prepare_data.py turns text into shards once, whole or not at all."""

import json
import os
from pathlib import Path

import numpy as np
from conftest import TEXT, run

from pretrain import shards, tokenization

TINY = ("--recipe", "tiny.yaml")


def test_shards_hold_exactly_the_text_and_the_manifest_says_so(prepared):
    (folder,) = prepared.glob("data/text-*")
    manifest = shards.read_manifest(folder)
    tokenizer = tokenization.load(str(folder / "tokenizer"))
    text = ""
    for split in ("train", "validation"):
        for row in manifest["splits"][split]:
            ids = np.fromfile(folder / row["file"], dtype="<u2", offset=shards.HEADER_BYTES)
            assert len(ids) == row["tokens"]
            assert shards.files.sha256(folder / row["file"]) == row["sha256"]
            assert ids[0] == tokenizer.eos_token_id
            part = tokenizer.decode(ids[1:].tolist())
            assert row["text_bytes"] == len(part.encode())
            text += part
    assert text == TEXT


def test_second_call_does_nothing(workplace):
    (folder,) = workplace.glob("data/text-*")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.rglob("*.bin"))
    out = run("prepare_data.py", *TINY).stdout
    assert out.strip() == f"data/{folder.name}"
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.rglob("*.bin")) == before


def test_preparation_that_was_cut_off_is_done_again(workplace):
    (folder,) = workplace.glob("data/text-*")
    whole = {path.name: path.read_bytes() for path in folder.glob("*.bin")}
    (folder / shards.MANIFEST).unlink()
    (folder / "train_000000.bin").write_bytes(b"half")
    run("prepare_data.py", *TINY)
    assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == whole


def test_trained_bpe_is_the_same_each_time(workplace):
    flags = (*TINY, "--tokenizer", "bpe", "--tokenizer_vocab_size", "300")
    first = Path(run("prepare_data.py", *flags).stdout.strip())
    manifest = json.loads((first / shards.MANIFEST).read_text())
    os.rename(first, "aside")
    again = Path(run("prepare_data.py", *flags).stdout.strip())
    assert again == first
    assert json.loads((again / shards.MANIFEST).read_text()) == manifest


def test_end_of_text_in_the_text_is_ordinary_text(workplace):
    Path("tricky.txt").write_text("a literal <|endoftext|> is text, CRLF \r\n too, and NUL \0. " * 50, newline="")
    flags = (*TINY, "--data_files", "tricky.txt", "--tokenizer", "bpe", "--tokenizer_vocab_size", "300")
    folder = Path(run("prepare_data.py", *flags).stdout.strip())
    tokenizer = tokenization.load(str(folder / "tokenizer"))
    ids = np.fromfile(folder / "train_000000.bin", dtype="<u2", offset=shards.HEADER_BYTES)
    assert (ids == tokenizer.eos_token_id).sum() == 1
    text = Path("tricky.txt").read_bytes()
    assert tokenizer.decode(ids[1:].tolist()).encode() == text[: len(text) * 9 // 10]


def test_a_folder_of_shards_is_nothing_to_prepare(workplace):
    assert "nothing to prepare" in run("prepare_data.py", *TINY, "--data_dir", "data", expect=2).stderr
