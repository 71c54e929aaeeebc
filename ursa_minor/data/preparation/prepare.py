"""Turn the documents of a source into a folder of token shards.

A process that was killed continues after its last complete shard. The shards have the same bytes however often it was
interrupted.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.preparation.progress import PrefetchTarget, Progress, log_amounts
from ursa_minor.data.sources.find import FoundSource, Part
from ursa_minor.data.sources.remote import shown_name
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import shards
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.encoder import Document, DocumentEncoder, well_formed
from ursa_minor.recipe import keys

log = logging.getLogger(__name__)

BPE_SAMPLE_CHARACTERS = 100_000_000  # the beginning of the train split, on which a bpe is trained
LOCK = ".lock"  # held by the process that writes to the folder


@dataclass(frozen=True)
class Opened:
    """A source that is open.

    Attributes:
        parts: of each split.
        about: what a manifest says of it: commit, tokenizer, and versions, which are filled in while reading.
    """

    source: FoundSource
    parts: dict[str, list[Part]]
    encode: DocumentEncoder
    about: dict

    def write(
        self, split: str, place: dict[str, int], rows: list[dict], limit: int, folder: Path
    ) -> Iterator[tuple[dict | None, dict[str, int], Document | None]]:
        """Write a split's shards into a folder; a split without parts takes its documents from the train split's.

        Args:
            place: where to begin: part, row, and how many ids from there on are left out.
            rows: of the split's shards that are there; the caller adds those that are yielded.
            limit: end with the document that reaches so many tokens, of ``rows`` too; 0: with the last part.

        Yields the row of each shard that is full and where the next one begins; each document that is written to its
        end; and, where a part ends, the row of the shard that is not full, if any. A shard never holds text of two parts.
        """
        parts, done = self.parts.get(split, self.parts["train"]), sum(row["tokens"] for row in rows)
        sizes, shard_tokens = self.encode.bytes_per_token, self.source.config.shard_tokens
        for part in range(place["part"], len(parts)):
            row, skip = (place["row"], place["token"]) if part == place["part"] else (0, 0)
            if 0 < limit <= done and not skip:  # a document that was begun is brought to its end
                return
            number = sum(shards.part_of(row) == part for row in rows)
            writer = shards.ShardWriter(folder, split, part, number, sizes, shard_tokens)
            current, end, following = -1, 0, {"part": part + 1, "row": 0, "token": 0}
            for document in self.encode(parts[part][1](row), row):
                first = end if document.row == current else 0  # a long text comes in pieces
                current, end = document.row, first + len(document.ids)
                if len(document.ids) < skip:
                    skip -= len(document.ids)
                    continue
                for shard, upto in writer.fill(document.ids, skip):
                    yield shard, {"part": part, "row": current, "token": first + upto}, None
                done, skip = done + len(document.ids) - skip, 0
                yield None, following, document
                if 0 < limit <= done:
                    following = {"part": part, "row": current + 1, "token": 0}
                    break
            yield writer.finish(), following, None


def prepare(source: FoundSource, target: PrefetchTarget | None = None) -> None:
    """Write the shards of a source, starting after the last complete shard of an earlier process.

    The manifest is replaced after each shard.

    Args:
        source: what to read, and the folder to write to.
        target: how far to go, when train.py reads the shards while they are written. None: to the end.
    """
    folder = source.folder
    manifest = manifests.read_manifest(folder)
    opened = open_source(source, manifest, target)
    parts = opened.parts["train"]
    if manifest is None:
        splits, counts, begin = held_out_splits(opened)
        manifest = {
            "source": source.name,
            "identity": source.identity,
            **opened.about,
            "files": len(parts),
            "splits": splits | {"train": []},
            "counts": counts | {"train": {}},
            "cursor": begin | {"file": file_at(parts, begin["part"])},
            "complete": False,
        }
        files.write_json(folder / shards.MANIFEST, manifest)
    elif not manifest["complete"]:
        manifest |= opened.about
        check_same_files(folder, manifest, parts)
    begun = time.perf_counter()
    if target:
        target.wait(manifest["splits"]["train"])
    if not manifest["complete"]:
        train_split(opened, manifest, target)
    finish(folder, manifest)
    log_amounts(manifest)
    log.info(f"prepared in {time.perf_counter() - begun:.1f} s")


def open_source(
    source: FoundSource, manifest: dict | None, target: PrefetchTarget | None = None
) -> Opened:
    """Open what is to be read. Raises BadInput when the folder's tokenizer is not the one that its manifest names."""
    folder, name = source.folder, source.config.tokenizer
    versions = manifest.get("versions", {}) if manifest else {}
    revision, parts = open_parts(source, manifest["revision"] if manifest else None, versions)
    tokenizer = open_tokenizer(source, parts)
    identity = {
        "name": name,
        "fingerprint": tokenization.fingerprint(tokenizer),
        "size": len(tokenizer),
    }
    if (
        manifest and {**manifest["tokenizer"], "name": name} != identity
    ):  # a local one may have been moved
        raise BadInput(
            f"{folder / 'tokenizer'} does not match the shards beside it; delete {folder}"
        )
    trainers = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if target else 0
    encode = DocumentEncoder(tokenizer, name, trainers, ids=source.config.token_column is not None)
    return Opened(
        source, parts, encode, {"revision": revision, "versions": versions, "tokenizer": identity}
    )


def held_out_splits(
    opened: Opened,
) -> tuple[dict[str, list[dict]], dict[str, dict], dict[str, int]]:
    """Write every split but train, in one go: training can then begin as soon as its first block is there.

    A source without a validation part takes the first documents of its train split, up to ``validation_tokens``.

    Returns:
        Rows by split, counts by split, and where the train split begins.
    """
    folder = opened.source.folder
    config = opened.source.config
    start = {"part": 0, "row": 0, "token": 0}
    train_begin = start
    splits: dict[str, list[dict]] = {}
    counts: dict[str, dict] = {}
    others = [name for name in opened.parts if name not in ("validation", "train")]
    for split in ("validation", *others):
        is_taken_from_train = split not in opened.parts
        limit = config.validation_tokens if is_taken_from_train else 0
        rows = splits.setdefault(split, [])
        tally: Counter = Counter()
        for shard, following, document in opened.write(split, start, rows, limit, folder):
            if shard:
                rows.append(shard)
            if document:
                tally.update(document.counts)
            if is_taken_from_train:
                train_begin = following
        counts[split] = dict(tally)
        num_tokens = sum(row["tokens"] for row in rows)
        if num_tokens < limit:
            key = "token_column" if config.token_column else "text_column"
            raise BadInput(
                f"{opened.source.name}: {key} = {getattr(config, key)} has {num_tokens} tokens in all, fewer than "
                f"validation_tokens = {limit}; give --{key} with one of more text, "
                f"--validation_tokens {max(1, num_tokens // 10)}, or, with data_files, --validation_files"
            )
    return splits, counts, train_begin


def train_split(opened: Opened, manifest: dict, target: PrefetchTarget | None) -> None:
    """Write the train split from the manifest's cursor on."""
    source = opened.source
    parts = opened.parts["train"]
    rows = manifest["splits"]["train"]
    tally = Counter(manifest["counts"]["train"])
    limit = source.config.limit_tokens
    expected_bytes = 0.0 if target else expected_text_bytes(source, parts)
    progress = Progress(manifest, expected_bytes, limit)
    for shard, following, document in opened.write(
        "train", manifest["cursor"], rows, limit, source.folder
    ):
        if document:
            tally.update(document.counts)
            progress.count(document)
            continue
        if shard:
            rows.append(shard)
        # If the shard ends inside a document, that document is counted later, at its end.
        manifest["counts"]["train"] = dict(tally)
        manifest["cursor"] = following | {"file": file_at(parts, following["part"])}
        files.write_json(source.folder / shards.MANIFEST, manifest)
        if target:  # the trainer may be far behind, and only a few shards are kept
            target.wait(rows)


def file_at(parts: list[Part], part: int) -> str | None:
    """Return the name of a source's file, as a manifest holds it; None behind the last one."""
    return shown_name(parts[part][0]) if part < len(parts) else None


def check_same_files(folder: Path, manifest: dict, parts: list[Part]) -> None:
    """Raise BadInput when files came or went since the manifest's cursor was written: it would be applied to another."""
    cursor, count = manifest["cursor"], manifest["files"]
    now = file_at(parts, cursor["part"])
    then = cursor["file"]
    if then != now or count != len(parts):
        raise BadInput(
            f"{folder}: stopped at {then or 'the end'}, file {cursor['part'] + 1} of {count}; the source now has "
            f"{now or 'no file'} there, of {len(parts)}. Give the same files, or, to read these again, delete the folder"
        )


def finish(folder: Path, manifest: dict) -> None:
    """Write the manifest of a complete folder. It does not depend on where earlier processes stopped."""
    if not manifest["splits"]["train"]:
        raise BadInput(
            f"{folder}: no train text is left; use a smaller --validation_tokens, or --validation_files with data_files"
        )
    for path in folder.glob(".*.tmp*"):  # of killed processes
        files.remove(path)
    final = manifest | {"complete": True}
    final.pop("cursor", None)
    if not final.get("versions"):
        final.pop("versions", None)
    files.write_json(folder / shards.MANIFEST, final)


def open_parts(
    source: FoundSource, pinned: str | None, versions: dict
) -> tuple[str | None, dict[str, list[Part]]]:
    """Return the pinned commit (None for files) and the parts of each split."""
    if source.parts is not None:
        return None, source.parts
    from ursa_minor.data.sources import (
        tables as hub_tables,
    )  # imports datasets, which text does not need

    return hub_tables.open_tables(source, pinned, versions)


def open_tokenizer(source: FoundSource, parts: dict[str, list[Part]]) -> PreTrainedTokenizerFast:
    """Return the folder's tokenizer: the one that is there, or trained on the train split, or loaded; and kept there."""
    path, config = source.folder / "tokenizer", source.config
    if not path.is_dir():
        tokenizer = make_tokenizer(source, parts)
        with files.making(path) as temporary:
            tokenizer.save_pretrained(temporary)
    # Of one that we made, the class is known, and AutoTokenizer would import torch.
    made = config.tokenizer in keys.TRAINED_TOKENIZERS
    return PreTrainedTokenizerFast.from_pretrained(path) if made else tokenization.load(str(path))


def make_tokenizer(source: FoundSource, parts: dict[str, list[Part]]) -> PreTrainedTokenizerFast:
    """Return the tokenizer that a source asks for; nothing is written."""
    config = source.config
    if config.tokenizer == "bpe":
        texts = first_texts(parts["train"])
        return tokenization.train_bpe(texts, config.tokenizer_vocab_size, config.tokenizer_split)
    if config.tokenizer != "characters":
        return tokenization.load(config.tokenizer)
    every = chain.from_iterable(read(0) for found in parts.values() for _, read in found)
    return tokenization.make_characters(well_formed(text or "") for text, _ in every)


def first_texts(parts: list[Part]) -> Iterator[str]:
    """Yield the first texts of a split, as many as a bpe is trained on."""
    left = BPE_SAMPLE_CHARACTERS
    for text, _ in chain.from_iterable(read(0) for _, read in parts):
        if left <= 0:
            return
        left -= len(text or "")
        yield well_formed(text or "")


def expected_text_bytes(source: FoundSource, parts: list[Part]) -> float:
    """Return about how many bytes of text the train split has; 0 where that is not known."""
    if source.most_tokens:
        return source.most_tokens
    if source.config.token_column:
        return 0.0
    from ursa_minor.data.sources import tables as hub_tables

    return hub_tables.expected_text_bytes([name for name, _ in parts], source.config)
