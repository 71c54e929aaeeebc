"""Examine the data of a source (``--dry_run``), and verify a prepared folder."""

import codecs
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import huggingface_hub
from transformers import PreTrainedTokenizerFast

from ursa_minor.base import checkpoint_files, model_id
from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import pluralize
from ursa_minor.data.preparation.bpe_sample import first_texts
from ursa_minor.data.preparation.data_report import TEXT_FILES, Cost, DataReport
from ursa_minor.data.preparation.prepare import expected_text_bytes, open_parts
from ursa_minor.data.preparation.text_notes import (
    SPECIAL_TOKENS,
    count_documents,
    count_occurrences,
    find_separation,
    log_notes,
)
from ursa_minor.data.sources.columns import NoText
from ursa_minor.data.sources.find import FoundSource, Part, SourceRow
from ursa_minor.data.tokens import document_counts, normalizers, pretrained_tokenizer, shards
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.document_counts import DOCUMENTS, Counts
from ursa_minor.data.tokens.encoder import BATCH_CHARACTERS, DocumentEncoder
from ursa_minor.recipe import keys
from ursa_minor.recipe.source_kind import AUTO, COMPRESSED_SUFFIXES, STDLIB, path_of, table_format

DRY_RUN_SECONDS = 10
BYTES_VOCABULARY = 257  # one id per byte, and the end-of-text token
# The names of file formats in messages.
KINDS = {"parquet": "Parquet", "json": "JSON lines", "csv": "CSV", "arrow": "Arrow"}
TEXT_FORMATS = ("json", "csv")  # table formats that are text


class Measurement(NamedTuple):
    """The text that a measurement has encoded, and the time that it took.

    Attributes:
        tokens: number of tokens.
        text_bytes: size of the text.
        seconds: the time.
        counts: statistics of the rows, see ``document_counts``.
        characters: number of characters.
        special_tokens: how often special tokens occur in the text, by token.
        is_complete: whether all rows were read.
    """

    tokens: int
    text_bytes: int
    seconds: float
    counts: Counts
    characters: int
    special_tokens: dict[str, int]
    is_complete: bool


def dry_run(source: FoundSource) -> str:
    """Return what ``examine`` finds, as text of several lines.

    Raises:
        BadInput: see ``examine``.
    """
    if source.config.token_column:
        raise BadInput(
            "--dry_run measures how fast text is encoded, but with token_column the data contain "
            "ids instead of text. Leave out --dry_run"
        )
    return "\n".join(str(finding) for finding in examine(source).findings())


def examine(source: FoundSource, *, loads_from_hub: bool = True) -> DataReport:
    """Read the beginning of a source for some seconds, and describe its data.

    The size and the time of the entire preparation are estimated. Nothing is written.

    Args:
        source: a source of text.
        loads_from_hub: whether a tokenizer may be downloaded. Otherwise it is not used if it is not
            on this machine.

    Raises:
        BadInput: the data cannot be prepared, or there is no text at its beginning.
    """
    config = source.config
    log_notes(source)
    _, parts = open_parts(source, None, {})
    if source.text_files and config.validation_files:
        _read_all(parts)  # otherwise all of the text is read to find its validation part
    train_parts = parts["train"]
    tokenizer = _similar_tokenizer(config, train_parts, loads_from_hub=loads_from_hub)
    encode = DocumentEncoder(tokenizer or _bytes_tokenizer(), config.tokenizer)
    measured = _measure(encode, train_parts, DRY_RUN_SECONDS)
    if not measured.text_bytes:
        contents = document_counts.describe_contents(measured.counts) or "nothing"
        raise BadInput(
            f"{source.name}: no row contains text, so nothing can be measured. The rows contain: "
            f"{contents}. Use another source, or for a table another column: --text_column NAME"
        )
    if config.tokenizer == "characters":
        num_tokens = measured.characters + measured.counts[DOCUMENTS]
        measured = measured._replace(tokens=num_tokens)

    all_bytes = max(expected_text_bytes(source, train_parts), measured.text_bytes)
    cost = None
    bytes_per_token = None
    flags: dict[str, str] = {}
    if tokenizer is not None:
        cost = _estimate_cost(config, measured, all_bytes, encode)
        bytes_per_token = measured.text_bytes / measured.tokens
        if _takes_all_for_validation(source, parts, measured):
            flags["validation_tokens"] = str(max(1, measured.tokens // 10))
    separation = find_separation(source)
    if separation:
        flags["document_separator"] = separation.separator

    num_documents = measured.counts[DOCUMENTS]
    special_tokens = measured.special_tokens
    is_estimated = False
    if source.text_files:
        num_documents = count_documents(source.text_files, config.document_separator)
        special_tokens = count_occurrences(source.text_files, SPECIAL_TOKENS)
    elif not measured.is_complete:
        num_documents = round(num_documents * all_bytes / measured.text_bytes)
        is_estimated = True
    return DataReport(
        name=source.name,
        folder=str(source.folder),
        files=_files_by_kind(source, train_parts),
        validation_files=_count_validation_files(source, parts),
        encoding=_encoding(source, train_parts),
        documents=num_documents,
        documents_are_estimated=is_estimated,
        counts=measured.counts,
        special_tokens={token: number for token, number in special_tokens.items() if number},
        tokenizer=config.tokenizer,
        bytes_per_token=bytes_per_token,
        cost=cost,
        separated_documents=separation.documents if separation else 0,
        flags=flags,
    )


def _bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes, to read rows if the recipe's tokenizer is unavailable."""
    return tokenization.train_bpe([], BYTES_VOCABULARY)


def _estimate_cost(
    config: keys.DataSource, measured: Measurement, all_bytes: float, encode: DocumentEncoder
) -> Cost:
    """Estimate the time and the size of the entire preparation.

    Args:
        config: the source.
        measured: a measurement on a part of its text.
        all_bytes: size of its text.
        encode: the encoder of the measurement.
    """
    all_tokens = all_bytes * measured.tokens / measured.text_bytes
    tokens = min(all_tokens, config.limit_tokens or math.inf)
    return Cost(
        text_megabytes=all_bytes / 1e6,
        tokens=tokens,
        bytes_per_id=shards.id_dtype(len(encode.bytes_per_token)).itemsize,
        seconds=tokens / measured.tokens * measured.seconds,
        measured_seconds=measured.seconds,
        megabytes_per_second=measured.text_bytes / measured.seconds / 1e6,
        tokens_per_second=measured.tokens / measured.seconds,
        threads=encode.threads,
    )


def _takes_all_for_validation(
    source: FoundSource, parts: dict[str, list[Part]], measured: Measurement
) -> bool:
    """Return whether ``validation_tokens`` leaves no token of a table to train on."""
    if source.parts is not None or "validation" in parts or not measured.is_complete:
        return False
    return measured.tokens <= source.config.validation_tokens


def _read_all(parts: dict[str, list[Part]]) -> None:
    """Read every row, which raises BadInput if one of the files cannot be read."""
    for _, read_rows in chain.from_iterable(parts.values()):
        for _ in read_rows(0):
            pass


def _files_by_kind(source: FoundSource, train_parts: list[Part]) -> dict[str, int]:
    """Return the number of the train files of each kind."""
    if source.text_files:
        return {TEXT_FILES: len(source.text_files)}
    if source.config.dataset_name == STDLIB:
        splits = [split for split, *_ in source.identity["files"]]
        return {"Python": splits.count("train")}
    kinds = Counter(_kind(name, source.config) for name, _ in train_parts)
    return dict(kinds)


def _kind(name: str, config: keys.DataSource) -> str:
    """Return the kind of a file of a table, such as "JSON lines (.gz)"."""
    format_name = _format(name, config)
    kind = KINDS.get(format_name, format_name)
    suffix = PurePosixPath(path_of(name).lower()).suffix
    return f"{kind} ({suffix})" if suffix in COMPRESSED_SUFFIXES else kind


def _format(name: str, config: keys.DataSource) -> str:
    data_format = config.data_format if config.data_files else AUTO
    return table_format(name, data_format) or "other"


def _count_validation_files(source: FoundSource, parts: dict[str, list[Part]]) -> int:
    """Return the number of files for validation. 0 if a part of the train files is used."""
    if source.parts is None:
        return len(parts.get("validation", ()))
    validation = source.identity["validation"] if source.text_files else None
    return len(validation) if isinstance(validation, list) else 0


def _encoding(source: FoundSource, train_parts: list[Part]) -> str | None:
    """Return the encoding of a source, or None for files that are not text."""
    if source.parts is None:
        first_name, _ = train_parts[0]
        return "UTF-8" if _format(first_name, source.config) in TEXT_FORMATS else None
    num_marks = 0
    for path in source.text_files:
        with path.open("rb") as file:
            num_marks += file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    if not num_marks:
        return "UTF-8"
    marked = pluralize(num_marks, "file begins", "files begin")
    return f"UTF-8 ({marked} with a byte order mark)"


def _similar_tokenizer(
    config: keys.DataSource, train_parts: list[Part], *, loads_from_hub: bool
) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer of a source, or one like it that is trained on its first texts.

    Returns:
        None if it is on the Hub and may not be downloaded.
    """
    if config.tokenizer not in keys.TRAINED_TOKENIZERS:
        location: str | None = config.tokenizer
        if not loads_from_hub:
            location = _local_folder(config.tokenizer)
        if location is None:
            return None
        tokenizer = pretrained_tokenizer.load(location)
        normalizers.check_keeps_text(tokenizer, config.tokenizer)
        return tokenizer
    size = config.tokenizer_vocab_size
    if config.tokenizer == "characters":
        # A vocabulary of single bytes. The number of tokens is that of the characters.
        size = BYTES_VOCABULARY
    texts = islice(first_texts(train_parts), 1000)
    return tokenization.train_bpe(texts, size, config.tokenizer_split)


def _local_folder(tokenizer: str) -> str | None:
    """Return the folder of a tokenizer, which may be in the cache of the Hub, or None."""
    if checkpoint_files.model_folder_of(Path(tokenizer)) or Path(tokenizer).is_dir():
        return tokenizer
    repo_id, revision = model_id.parse(tokenizer, "tokenizer = ")
    cached = huggingface_hub.try_to_load_from_cache(
        repo_id, pretrained_tokenizer.TOKENIZER_FILE, revision=revision
    )
    return str(Path(cached).parent) if isinstance(cached, str) else None


class _TextStatistics:
    """Count characters and special tokens of texts, by row, before the texts are encoded."""

    def __init__(self) -> None:
        self.characters = 0
        self.special_tokens = dict.fromkeys(SPECIAL_TOKENS, 0)
        # Rows that are read but not added yet. The encoder reads ahead in other threads.
        self._characters: dict[int, int] = {}
        self._special_tokens: dict[int, dict[str, int]] = {}

    def observe(self, rows: Iterable[SourceRow]) -> Iterator[SourceRow]:
        """Yield the rows of a part."""
        self._characters.clear()
        self._special_tokens.clear()
        for number, row in enumerate(rows):
            text, _ = row
            if not isinstance(text, NoText):
                self._characters[number] = len(text)
                if "<" in text:
                    self._special_tokens[number] = {
                        token: text.count(token) for token in SPECIAL_TOKENS
                    }
            yield row

    def add(self, number: int) -> None:
        """Add a row of the current part to the totals, unless it was added before."""
        self.characters += self._characters.pop(number, 0)
        for token, occurrences in self._special_tokens.pop(number, {}).items():
            self.special_tokens[token] += occurrences


def _measure(encode: DocumentEncoder, parts: list[Part], max_seconds: float) -> Measurement:
    """Encode documents for ``max_seconds``, at least ``BATCH_CHARACTERS`` bytes.

    Documents are encoded in batches. Documents that arrive after the limit are not counted, and the
    time after the last counted document is not counted either.
    """
    started = time.perf_counter()
    tokens = 0
    text_bytes = 0
    seconds = 0.0
    counts: Counts = {}
    statistics = _TextStatistics()
    is_complete = True
    documents = (encode(statistics.observe(read_rows(0)), 0) for _, read_rows in parts)
    for document in chain.from_iterable(documents):
        elapsed = time.perf_counter() - started
        if elapsed > max_seconds and text_bytes >= BATCH_CHARACTERS:
            is_complete = False
            break
        tokens += len(document.ids)
        text_bytes += document.text_bytes
        document_counts.add(counts, document.counts)
        statistics.add(document.row)
        seconds = elapsed
    return Measurement(
        tokens=tokens,
        text_bytes=text_bytes,
        seconds=seconds,
        counts=counts,
        characters=statistics.characters,
        special_tokens=statistics.special_tokens,
        is_complete=is_complete,
    )


def verify(folder: Path, vocab_size: int) -> str:
    """Read every byte of a folder of token files, and return a line that states that it is intact.

    Args:
        vocab_size: vocabulary size of the model. If the manifest of the folder names a tokenizer,
            the size of this tokenizer is used instead.

    Raises:
        BadInput: listing every error in the folder.
    """
    manifest = manifests.describe_folder(folder)
    errors = [error for _, error in manifests.find_problems(folder, manifest.shards)]
    if errors:
        raise BadInput(errors)

    if manifest.tokenizer is not None:
        vocab_size = manifest.tokenizer.size
    num_tokens = 0
    for shard in manifest.shards:
        path = folder / shard.file
        ids, offset = shards.open_ids(path)
        shards.check_ids(path, ids, offset, vocab_size)
        num_tokens += len(ids)

    has_hashes = all(shard.sha256 for shard in manifest.shards)
    checked = ["sizes", "hashes"] if has_hashes else ["sizes (the folder has no hashes)"]
    not_checked = []
    if manifest.tokenizer is None:
        checked += _checks_of_formats(folder, manifest)
        not_checked = _limits_of_formats(folder, manifest, has_hashes=has_hashes)
    checked.append(f"ids below {vocab_size}")
    state = "" if manifest.complete else "; its preparation is not finished"
    limits = f". Not checked: {'; '.join(not_checked)}" if not_checked else ""
    return (
        f"{folder}: {len(manifest.shards)} shards with {num_tokens:,} tokens are intact "
        f"(checked: {', '.join(checked)}){state}{limits}"
    )


def _checks_of_formats(folder: Path, manifest: manifests.Manifest) -> list[str]:
    """Return what has been checked in the token files of another program, besides their sizes."""
    checks = set()
    num_documents = 0
    for shard in manifest.shards:
        path = folder / shard.file
        checks.add(shards.find_format(path).checked)
        document_ends = shards.read_document_ends(path)
        if document_ends is not None:
            num_documents += len(document_ends)
    result = sorted(checks)
    if num_documents:
        result.append(f"the index of {pluralize(num_documents, 'document', 'documents')}")
    return result


def _limits_of_formats(
    folder: Path, manifest: manifests.Manifest, *, has_hashes: bool
) -> list[str]:
    """Return what cannot be checked in the token files of another program."""
    limits = []
    if not has_hashes:
        limits.append("whether valid ids were changed")
    paths = [folder / shard.file for shard in manifest.shards]
    if any(shards.read_document_ends(path) is None for path in paths):
        limits.append("where documents begin, which the files do not state")
    limits.append("whether the ids were encoded with the tokenizer of the recipe")
    return limits
