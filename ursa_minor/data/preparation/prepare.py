"""Turn the documents of a source into a folder of token shards.

After a kill, the next process continues after the last complete shard. The shards have the same
bytes however often a preparation was interrupted.
"""

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.preparation.bpe_sample import bpe_sample, read_texts
from ursa_minor.data.preparation.overlap import ValidationOverlap
from ursa_minor.data.preparation.progress import PrefetchTarget, Progress, log_amounts
from ursa_minor.data.preparation.text_notes import log_notes
from ursa_minor.data.sources.columns import MASK_COLUMN, NoText
from ursa_minor.data.sources.find import FoundSource, Part
from ursa_minor.data.sources.remote import name_in_manifest
from ursa_minor.data.tokens import document_counts, normalizers, pretrained_tokenizer
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.encoder import Document, DocumentEncoder, replace_surrogates
from ursa_minor.data.tokens.manifest import (
    ALSO_IN_TRAIN,
    Cursor,
    Manifest,
    Position,
    TokenizerReference,
    read_manifest,
    write_manifest,
)
from ursa_minor.data.tokens.shards import Shard, ShardWriter, count_tokens
from ursa_minor.data.tokens.token_rows import (
    SAMPLE_ROWS,
    TokenRows,
    are_packed,
    contain_end_of_text,
    unknown_padding,
)
from ursa_minor.recipe import keys
from ursa_minor.recipe.source_kind import STDLIB

log = logging.getLogger(__name__)


class Written(NamedTuple):
    """One step of ``SourceEncoder.write``.

    Attributes:
        shard: a shard that was completed, if any.
        next_position: position at which the next shard starts.
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
        revision: see ``Manifest``.
        versions: see ``Manifest``. It is filled in while the source is read.
        tokenizer: the reference to the tokenizer of the folder.
        is_packed: see ``Manifest``.
    """

    source: FoundSource
    parts: dict[str, list[Part]]
    encode: DocumentEncoder
    revision: str | None
    versions: dict[str, dict[str, str]]
    tokenizer: TokenizerReference
    is_packed: bool | None

    def write(
        self, split: str, start: Position, existing: list[Shard], limit: int, folder: Path
    ) -> Iterator[Written]:
        """Write the shards of a split into a folder.

        A shard never contains text of two source files.

        Args:
            split: a split without source files takes its documents from those of the train split.
            start: position at which to begin.
            existing: the shards of the split that are written already. The caller appends each
                shard that is yielded.
            limit: number of tokens, including those of ``existing``, after which writing stops at
                the end of a document. 0 continues to the end of the source.
            folder: folder that the shards are written to.

        Yields:
            Each shard that is full, each document that is written to its end, and at the end of
            each source file the shard that is not full, if any.
        """
        parts = self.parts.get(split, self.parts["train"])
        num_tokens = count_tokens(existing)
        for part in range(start.part, len(parts)):
            first = start if part == start.part else Position(part, 0, 0)
            skipped = first.token  # ids of the first document that are in earlier shards
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
            for document in self.encode(read_rows(first.row), first.row):
                # A long text comes in several pieces with the same row number.
                first_token = row_tokens if document.row == current_row else 0
                current_row = document.row
                row_tokens = first_token + len(document.ids)
                if len(document.ids) < skipped:
                    skipped -= len(document.ids)
                    continue
                filled = writer.fill(document.ids, skipped, document.text_bytes)
                for shard, num_written in filled:
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
        source: the source to read. Its folder is not complete.
        target: limit up to which shards are written while train.py reads them, or None to write
            all shards.
    """
    started = time.perf_counter()
    log_notes(source)
    folder = source.folder
    manifest = read_manifest(folder)
    opened = open_source(source, manifest, target)
    train_parts = opened.parts["train"]
    if manifest is None:
        held_out = write_held_out_splits(opened)
        overlap = held_out.overlap
        if overlap:
            overlap.write(folder)
        manifest = Manifest(
            source=source.name,
            identity=source.identity,
            revision=opened.revision,
            versions=opened.versions,
            tokenizer=opened.tokenizer,
            files=len(train_parts),
            packed=opened.is_packed,
            splits=held_out.splits | {"train": []},
            counts=held_out.counts | {"train": {}},
            cursor=cursor_at(held_out.train_start, train_parts),
            complete=False,
        )
        write_manifest(folder, manifest)
    else:
        manifest.revision = opened.revision
        manifest.versions = opened.versions
        manifest.tokenizer = opened.tokenizer
        check_same_files(folder, manifest, train_parts)
        overlap = ValidationOverlap.read(folder) if compares_documents(opened) else None
    if target:
        target.wait(manifest.splits["train"])
    write_train_split(opened, manifest, overlap, target)
    finish(folder, manifest)
    log_amounts(manifest)
    log.info(f"prepared in {time.perf_counter() - started:.1f} s")


def open_source(
    source: FoundSource, manifest: Manifest | None, target: PrefetchTarget | None = None
) -> SourceEncoder:
    """Open a source for reading.

    Args:
        manifest: manifest of the folder, if an earlier process has written one.
        target: not None if training processes on this machine read the shards. One core is left
            for each of them.

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
                f"{source.folder / 'tokenizer'} is not the tokenizer that the shards in this "
                f"folder were encoded with. Delete {source.folder}, and run the same command to "
                f"prepare the data again"
            )
    trainers = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if target else 0
    is_packed = None
    token_rows = None
    if source.config.token_column:
        if manifest is not None:
            is_packed = bool(manifest.packed)
        else:
            is_packed = inspect_token_rows(source, parts["train"], tokenizer)
        token_rows = TokenRows(tokenizer, is_packed=is_packed)
    encode = DocumentEncoder(tokenizer, name, trainers, token_rows=token_rows)
    return SourceEncoder(source, parts, encode, revision, versions, reference, is_packed)


def inspect_token_rows(
    source: FoundSource, parts: list[Part], tokenizer: PreTrainedTokenizerFast
) -> bool:
    """Return whether the rows of ids are packed, and log how they are read.

    Args:
        parts: the files of the train split.
        tokenizer: the tokenizer that the rows were encoded with.
    """
    files_of_rows: list[list] = []
    num_missing = SAMPLE_ROWS
    for _, read_rows in parts:
        if num_missing <= 0:
            break
        rows = [ids for ids, _ in islice(read_rows(0), num_missing)]
        num_missing -= len(rows)
        files_of_rows.append([ids for ids in rows if not isinstance(ids, NoText)])
    sample = list(chain.from_iterable(files_of_rows))
    column = f"token_column = {source.config.token_column}"
    padding = unknown_padding(sample, tokenizer)
    if padding is not None:
        log.warning(
            f"{column}: most rows end with the id {padding} repeated, so they seem to be padded "
            f"with it, and it is trained as text. If it is padding, set pad_token in "
            f"tokenizer_config.json to this token, or keep the column {MASK_COLUMN}"
        )
    if are_packed(files_of_rows, tokenizer):
        log.info(
            f"{column}: the rows are packed sequences of {len(sample[0])} ids, which contain their "
            f"own end-of-text tokens. None is added"
        )
        return True
    if contain_end_of_text(sample, tokenizer):
        log.warning(
            f"{column}: some rows contain an end-of-text token between their ids, but the rows "
            f"differ in length, so they are not read as packed. If their documents continue in the "
            f"next row, write them as token files instead"
        )
    log.info(
        f"{column}: each row is one document. Padding and special tokens at its ends are removed, "
        f"and an end-of-text token is added in front"
    )
    return False


def compares_documents(opened: SourceEncoder) -> bool:
    """Return whether the validation documents are compared with those of the train split.

    Packed rows are not documents, and users cannot change the files of the standard library, some
    of which are equal.
    """
    return not opened.is_packed and opened.source.config.dataset_name != STDLIB


class HeldOutSplits(NamedTuple):
    """All splits but train.

    Attributes:
        splits: shards of each split.
        counts: document statistics of each split.
        train_start: position at which the train split starts.
        overlap: the validation documents, or None if they are not compared.
    """

    splits: dict[str, list[Shard]]
    counts: dict[str, dict[str, int]]
    train_start: Position
    overlap: ValidationOverlap | None


def write_held_out_splits(opened: SourceEncoder) -> HeldOutSplits:
    """Write all splits but train, so that training can start with the first train shard.

    If a source has no validation split, the first documents of its train split, up to
    ``validation_tokens``, are the validation split.

    Raises:
        BadInput: the train split has fewer than ``validation_tokens``.
    """
    folder = opened.source.folder
    config = opened.source.config
    start = Position(0, 0, 0)
    train_start = start
    splits: dict[str, list[Shard]] = {}
    counts: dict[str, dict[str, int]] = {}
    overlap = ValidationOverlap() if compares_documents(opened) else None
    others = [name for name in opened.parts if name not in ("validation", "train")]
    for split in ("validation", *others):
        is_taken_from_train = split not in opened.parts
        limit = config.validation_tokens if is_taken_from_train else 0
        split_shards = splits.setdefault(split, [])
        tally: dict[str, int] = {}
        for written in opened.write(split, start, split_shards, limit, folder):
            if written.shard:
                split_shards.append(written.shard)
            if written.document:
                document_counts.add(tally, written.document.counts)
                if overlap and split == "validation":
                    overlap.add_validation_document(written.document)
            if is_taken_from_train:
                train_start = written.next_position
        counts[split] = tally
        if count_tokens(split_shards) < limit:
            raise _too_small(opened.source, count_tokens(split_shards), tally)
    return HeldOutSplits(splits, counts, train_start, overlap)


def _too_small(source: FoundSource, num_tokens: int, counts: dict[str, int]) -> BadInput:
    """Return the error for a source with fewer tokens than ``validation_tokens``.

    Args:
        num_tokens: number of its tokens.
        counts: its document statistics.
    """
    config = source.config
    key = "token_column" if config.token_column else "text_column"
    column = f"{source.name}: the column {key} = {getattr(config, key)}"
    contents = document_counts.describe_contents(counts)
    if num_tokens == 0 and contents:
        return BadInput(
            f"{column} has 0 tokens in total, because no row has text. The rows contain: "
            f"{contents}. Use another column: --{key} NAME"
        )
    fix = f"--validation_tokens {max(1, num_tokens // 10)}"
    if num_tokens == 0:
        fix = f"a column that contains text, with --{key}"
    elif config.data_files:
        fix += ", or --validation_files FILE"
    return BadInput(
        f"{column} has {num_tokens} tokens in total, fewer than validation_tokens = "
        f"{config.validation_tokens}. Use {fix}"
    )


def write_train_split(
    opened: SourceEncoder,
    manifest: Manifest,
    overlap: ValidationOverlap | None,
    target: PrefetchTarget | None,
) -> None:
    """Write the train split from the manifest's cursor to its end.

    Args:
        overlap: the validation documents, with which the train documents are compared, or None.
    """
    assert manifest.cursor is not None  # there is one until the folder is complete
    assert manifest.counts is not None
    source = opened.source
    train_parts = opened.parts["train"]
    train_shards = manifest.splits["train"]
    tally = dict(manifest.counts["train"])
    limit = source.config.limit_tokens
    expected_bytes = 0.0 if target else expected_text_bytes(source, train_parts)
    num_documents = tally.get("documents", 0)
    progress = Progress(train_shards, num_documents, expected_bytes, limit)
    for written in opened.write("train", manifest.cursor, train_shards, limit, source.folder):
        if written.document:
            document_counts.add(tally, written.document.counts)
            progress.count(written.document)
            if overlap:
                overlap.add_train_document(written.document)
            continue
        if written.shard:
            train_shards.append(written.shard)
        # If the shard ends inside a document, that document is counted later, at its end.
        manifest.counts["train"] = dict(tally)
        if overlap and overlap.num_in_train > manifest.counts["validation"].get(ALSO_IN_TRAIN, 0):
            # The file may be newer than the manifest, because adding a document twice is harmless.
            overlap.write(source.folder)
            manifest.counts["validation"][ALSO_IN_TRAIN] = overlap.num_in_train
        manifest.cursor = cursor_at(written.next_position, train_parts)
        write_manifest(source.folder, manifest)
        if target:  # the trainer may be far behind, and only a few shards are kept
            target.wait(train_shards)


def cursor_at(position: Position, parts: list[Part]) -> Cursor:
    """Return a position together with the name of its source file."""
    file = None
    if position.part < len(parts):
        name, _ = parts[position.part]
        file = name_in_manifest(name)
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
            f"{folder}: the source files have changed since the preparation was interrupted. Then "
            f"it had {manifest.files} files, and file {cursor.part + 1} was "
            f"{cursor.file or 'missing'}. Now it has {len(parts)} files, and file "
            f"{cursor.part + 1} is {file_now or 'missing'}. Use the same files as before, or "
            f"delete the folder to prepare the new files from the start"
        )


def finish(folder: Path, manifest: Manifest) -> None:
    """Mark a folder as complete. Its manifest is the same wherever earlier processes stopped."""
    if not manifest.splits["train"]:
        raise BadInput(
            f"{folder}: the train split is empty. Add text, or hold out less of it: use a smaller "
            f"--validation_tokens for tables, or a smaller --validation_fraction for text files"
        )
    for path in folder.glob(".*.tmp*"):  # temporary files of killed processes
        files.remove(path)
    manifest.complete = True
    manifest.cursor = None
    manifest.versions = manifest.versions or None
    write_manifest(folder, manifest)


def open_parts(
    source: FoundSource, pinned: str | None, versions: dict
) -> tuple[str | None, dict[str, list[Part]]]:
    """Return the commit of a source (None for local files) and the parts of each split.

    Args:
        pinned: the commit to read, or None for the newest commit.
        versions: see ``Manifest``. It is filled in while the parts are read.
    """
    if source.parts is not None:
        return None, source.parts
    # Imported here, because it imports datasets, which text files do not need.
    from ursa_minor.data.sources import tables as hub_tables

    return hub_tables.open_tables(source, pinned, versions)


def open_tokenizer(source: FoundSource, parts: dict[str, list[Part]]) -> PreTrainedTokenizerFast:
    """Return the tokenizer in the folder of a source. Create it if it does not exist."""
    path = source.folder / "tokenizer"
    if not path.is_dir():
        tokenizer = make_tokenizer(source, parts)
        with files.create_folder(path) as temporary:
            tokenizer.save_pretrained(temporary)
    if source.config.tokenizer in keys.TRAINED_TOKENIZERS:
        # Its class is known. AutoTokenizer, which determines the class, would import torch.
        return PreTrainedTokenizerFast.from_pretrained(path)
    return pretrained_tokenizer.load(str(path))


def make_tokenizer(source: FoundSource, parts: dict[str, list[Part]]) -> PreTrainedTokenizerFast:
    """Train or load the tokenizer that the configuration of a source names."""
    config = source.config
    if config.tokenizer == "bpe":
        texts = bpe_sample(source, parts["train"])
        return tokenization.train_bpe(texts, config.tokenizer_vocab_size, config.tokenizer_split)
    if config.tokenizer != "characters":
        tokenizer = pretrained_tokenizer.load(config.tokenizer)
        if not config.token_column:
            normalizers.check_keeps_text(tokenizer, config.tokenizer)
        return tokenizer
    all_parts = list(chain.from_iterable(parts.values()))
    return tokenization.make_characters(replace_surrogates(text) for text in read_texts(all_parts))


def expected_text_bytes(source: FoundSource, parts: list[Part]) -> float:
    """Return about how many bytes of text the train split has, or 0 if this is not known."""
    if source.most_tokens:
        return source.most_tokens
    if source.config.token_column:
        return 0.0
    from ursa_minor.data.sources import tables as hub_tables

    return hub_tables.expected_text_bytes([name for name, _ in parts], source.config)
