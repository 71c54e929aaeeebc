"""Turn the documents of a source into a folder of token shards.

A process that was killed continues after its last complete shard. The shards have the same bytes however often it was
interrupted.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.preparation.progress import PrefetchTarget, Progress, log_amounts
from ursa_minor.data.sources.find import FoundSource, Part
from ursa_minor.data.sources.remote import shown_name
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.encoder import Document, DocumentEncoder, well_formed
from ursa_minor.data.tokens.manifest import (
    Cursor,
    Manifest,
    Position,
    TokenizerReference,
    read_manifest,
    write_manifest,
)
from ursa_minor.data.tokens.shards import Shard, ShardWriter, count_tokens
from ursa_minor.recipe import keys

log = logging.getLogger(__name__)

BPE_SAMPLE_CHARACTERS = 100_000_000  # the beginning of the train split, on which a bpe is trained


class Written(NamedTuple):
    """One step of ``SourceEncoder.write``.

    Attributes:
        shard: a shard that was completed, if any.
        next_position: where the next shard begins.
        document: a document that was written to its end, if any.
    """

    shard: Shard | None
    next_position: Position
    document: Document | None


@dataclass(frozen=True)
class SourceEncoder:
    """A source that is open, together with the tokenizer that encodes it.

    Attributes:
        parts: the source files of each split.
        encode: converts documents to ids.
        revision: see ``Manifest``, as the two attributes below.
        versions: is filled in while the source is read.
        tokenizer: the reference to the tokenizer of the folder.
    """

    source: FoundSource
    parts: dict[str, list[Part]]
    encode: DocumentEncoder
    revision: str | None
    versions: dict[str, dict[str, str]]
    tokenizer: TokenizerReference

    def write(
        self, split: str, start: Position, existing: list[Shard], limit: int, folder: Path
    ) -> Iterator[Written]:
        """Write the shards of a split into a folder.

        A shard never contains text of two source files.

        Args:
            split: a split without source files takes its documents from those of the train split.
            start: where to begin.
            existing: the shards of the split that are written already. The caller appends those
                that are yielded.
            limit: stop after the document that reaches this number of tokens, including those of
                ``existing``. 0 continues to the end of the source.
            folder: where the shards are written.

        Yields:
            Each shard that is full, each document that is written to its end, and at the end of
            each source file the shard that is not full, if any.
        """
        parts = self.parts.get(split, self.parts["train"])
        num_tokens = count_tokens(existing)
        for part in range(start.part, len(parts)):
            begin = start if part == start.part else Position(part, 0, 0)
            skipped = begin.token  # ids of the first document that are in earlier shards
            is_inside_document = skipped > 0
            if 0 < limit <= num_tokens and not is_inside_document:
                return

            first_number = sum(shard.part == part for shard in existing)
            writer = ShardWriter(
                folder,
                split,
                part,
                first_number,
                self.encode.bytes_per_token,
                self.source.config.shard_tokens,
            )
            next_position = Position(part + 1, 0, 0)
            current_row = -1
            row_tokens = 0  # ids of the current row so far
            _, read_rows = parts[part]
            for document in self.encode(read_rows(begin.row), begin.row):
                # A long text comes in several pieces with the same row number.
                first_token = row_tokens if document.row == current_row else 0
                current_row = document.row
                row_tokens = first_token + len(document.ids)
                if len(document.ids) < skipped:
                    skipped -= len(document.ids)
                    continue
                for shard, num_written in writer.fill(document.ids, skipped):
                    position = Position(part, current_row, first_token + num_written)
                    yield Written(shard, position, None)
                num_tokens += len(document.ids) - skipped
                skipped = 0
                yield Written(None, next_position, document)
                if 0 < limit <= num_tokens:
                    next_position = Position(part, current_row + 1, 0)
                    break
            yield Written(writer.finish(), next_position, None)


def prepare(source: FoundSource, target: PrefetchTarget | None = None) -> None:
    """Write the shards of a source, starting after the last complete shard of an earlier process.

    The manifest is replaced after each shard.

    Args:
        source: what to read, and the folder to write to, which is not complete.
        target: how far to go, when train.py reads the shards while they are written. None: to the end.
    """
    started = time.perf_counter()
    folder = source.folder
    manifest = read_manifest(folder)
    opened = open_source(source, manifest, target)
    train_parts = opened.parts["train"]
    if manifest is None:
        held_out = write_held_out_splits(opened)
        manifest = Manifest(
            source=source.name,
            identity=source.identity,
            revision=opened.revision,
            versions=opened.versions,
            tokenizer=opened.tokenizer,
            files=len(train_parts),
            splits=held_out.splits | {"train": []},
            counts=held_out.counts | {"train": {}},
            cursor=cursor_at(held_out.train_begin, train_parts),
            complete=False,
        )
        write_manifest(folder, manifest)
    else:
        manifest.revision = opened.revision
        manifest.versions = opened.versions
        manifest.tokenizer = opened.tokenizer
        check_same_files(folder, manifest, train_parts)
    if target:
        target.wait(manifest.splits["train"])
    write_train_split(opened, manifest, target)
    finish(folder, manifest)
    log_amounts(manifest)
    log.info(f"prepared in {time.perf_counter() - started:.1f} s")


def open_source(
    source: FoundSource, manifest: Manifest | None, target: PrefetchTarget | None = None
) -> SourceEncoder:
    """Open a source for reading.

    Args:
        manifest: of the folder, if it was begun.
        target: given if a training on this machine reads the shards, which then needs its cores.

    Raises:
        BadInput: the tokenizer of the folder is not the one that its manifest names.
    """
    name = source.config.tokenizer
    pinned_revision = None
    versions: dict[str, dict[str, str]] = {}
    if manifest is not None:
        pinned_revision = manifest.revision
        versions = manifest.versions or {}
    revision, parts = open_parts(source, pinned_revision, versions)
    tokenizer = open_tokenizer(source, parts)
    reference = TokenizerReference(name, tokenization.fingerprint(tokenizer), len(tokenizer))
    if manifest is not None and manifest.tokenizer is not None:
        expected = replace(manifest.tokenizer, name=name)  # a local folder may have been moved
        if reference != expected:
            raise BadInput(
                f"{source.folder / 'tokenizer'} does not match the shards beside it; "
                f"delete {source.folder}"
            )
    trainers = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if target else 0
    encode = DocumentEncoder(tokenizer, name, trainers, ids=source.config.token_column is not None)
    return SourceEncoder(source, parts, encode, revision, versions, reference)


class HeldOutSplits(NamedTuple):
    """All splits but train: their shards and document statistics, and where train begins."""

    splits: dict[str, list[Shard]]
    counts: dict[str, dict[str, int]]
    train_begin: Position


def write_held_out_splits(opened: SourceEncoder) -> HeldOutSplits:
    """Write every split but train completely, so that training can begin with the first train shard.

    A source without a validation part takes the first documents of its train split, up to ``validation_tokens``.
    """
    folder = opened.source.folder
    config = opened.source.config
    start = Position(0, 0, 0)
    train_begin = start
    splits: dict[str, list[Shard]] = {}
    counts: dict[str, dict[str, int]] = {}
    others = [name for name in opened.parts if name not in ("validation", "train")]
    for split in ("validation", *others):
        is_taken_from_train = split not in opened.parts
        limit = config.validation_tokens if is_taken_from_train else 0
        split_shards = splits.setdefault(split, [])
        tally: Counter = Counter()
        for written in opened.write(split, start, split_shards, limit, folder):
            if written.shard:
                split_shards.append(written.shard)
            if written.document:
                tally.update(written.document.counts)
            if is_taken_from_train:
                train_begin = written.next_position
        counts[split] = dict(tally)
        num_tokens = count_tokens(split_shards)
        if num_tokens < limit:
            key = "token_column" if config.token_column else "text_column"
            raise BadInput(
                f"{opened.source.name}: {key} = {getattr(config, key)} has {num_tokens} tokens in all, fewer than "
                f"validation_tokens = {limit}; give --{key} with one of more text, "
                f"--validation_tokens {max(1, num_tokens // 10)}, or, with data_files, --validation_files"
            )
    return HeldOutSplits(splits, counts, train_begin)


def write_train_split(
    opened: SourceEncoder, manifest: Manifest, target: PrefetchTarget | None
) -> None:
    """Write the train split from the manifest's cursor to its end."""
    assert manifest.cursor is not None  # there is one until the folder is complete
    assert manifest.counts is not None
    source = opened.source
    train_parts = opened.parts["train"]
    train_shards = manifest.splits["train"]
    tally = Counter(manifest.counts["train"])
    limit = source.config.limit_tokens
    expected_bytes = 0.0 if target else expected_text_bytes(source, train_parts)
    num_documents = tally["documents"]
    progress = Progress(train_shards, num_documents, expected_bytes, limit)
    for written in opened.write("train", manifest.cursor, train_shards, limit, source.folder):
        if written.document:
            tally.update(written.document.counts)
            progress.count(written.document)
            continue
        if written.shard:
            train_shards.append(written.shard)
        # If the shard ends inside a document, that document is counted later, at its end.
        manifest.counts["train"] = dict(tally)
        manifest.cursor = cursor_at(written.next_position, train_parts)
        write_manifest(source.folder, manifest)
        if target:  # the trainer may be far behind, and only a few shards are kept
            target.wait(train_shards)


def cursor_at(position: Position, parts: list[Part]) -> Cursor:
    """Return a position together with the name of its source file."""
    file = None
    if position.part < len(parts):
        name, _ = parts[position.part]
        file = shown_name(name)
    return Cursor(position.part, position.row, position.token, file=file)


def check_same_files(folder: Path, manifest: Manifest, parts: list[Part]) -> None:
    """Check that the cursor of a manifest is applied to the source files that it was written for.

    Raises:
        BadInput: source files were added or removed.
    """
    cursor = manifest.cursor
    assert cursor is not None  # there is one until the folder is complete
    file_now = cursor_at(cursor, parts).file
    if cursor.file != file_now or manifest.files != len(parts):
        raise BadInput(
            f"{folder}: stopped at {cursor.file or 'the end'}, file {cursor.part + 1} of {manifest.files}; "
            f"the source now has {file_now or 'no file'} there, of {len(parts)}. "
            f"Give the same files, or, to read these again, delete the folder"
        )


def finish(folder: Path, manifest: Manifest) -> None:
    """Mark a folder as complete. Its manifest does not depend on where earlier processes stopped."""
    if not manifest.splits["train"]:
        raise BadInput(
            f"{folder}: no train text is left; use a smaller --validation_tokens, or --validation_files with data_files"
        )
    for path in folder.glob(".*.tmp*"):  # of killed processes
        files.remove(path)
    manifest.complete = True
    manifest.cursor = None
    manifest.versions = manifest.versions or None
    write_manifest(folder, manifest)


def open_parts(
    source: FoundSource, pinned: str | None, versions: dict
) -> tuple[str | None, dict[str, list[Part]]]:
    """Return the pinned commit (None for files) and the parts of each split."""
    if source.parts is not None:
        return None, source.parts
    # Imported here, because it imports datasets, which text files do not need.
    from ursa_minor.data.sources import (
        tables as hub_tables,
    )

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
