"""Estimate the time and the size of a preparation (``--dry_run``), and verify a prepared folder."""

import math
import time
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import pluralize
from ursa_minor.data.preparation.bpe_sample import first_texts
from ursa_minor.data.preparation.prepare import expected_text_bytes, open_parts
from ursa_minor.data.preparation.text_notes import log_notes
from ursa_minor.data.sources.find import FoundSource, Part
from ursa_minor.data.tokens import document_counts, pretrained_tokenizer, shards
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.document_counts import Counts
from ursa_minor.data.tokens.encoder import BATCH_CHARACTERS, DocumentEncoder
from ursa_minor.recipe import keys

DRY_RUN_SECONDS = 10


class Measurement(NamedTuple):
    """The amount of text that a measurement has encoded, and the time that it took.

    Attributes:
        tokens: number of tokens.
        text_bytes: size of the text.
        seconds: the time.
        counts: statistics of the rows, see ``document_counts``.
    """

    tokens: int
    text_bytes: int
    seconds: float
    counts: Counts


def dry_run(source: FoundSource) -> str:
    """Encode text for some seconds, and estimate the size and the time of the entire preparation.

    Nothing is written.

    Returns:
        Text of three lines, and a line about rows without text if there are many.

    Raises:
        BadInput: the source has token ids instead of text, or no text at its beginning.
    """
    config = source.config
    if config.token_column:
        raise BadInput(
            "--dry_run measures how fast text is encoded, but with token_column the data contain "
            "ids instead of text. Leave out --dry_run"
        )
    log_notes(source)
    _, parts = open_parts(source, None, {})
    train_parts = parts["train"]
    tokenizer = _similar_tokenizer(config, train_parts)
    encode = DocumentEncoder(tokenizer, config.tokenizer)
    tokens, text_bytes, seconds, counts = _measure(encode, train_parts, DRY_RUN_SECONDS)
    if not text_bytes:
        contents = document_counts.describe_contents(counts) or "nothing"
        raise BadInput(
            f"{source.name}: no row contains text, so nothing can be measured. The rows contain: "
            f"{contents}. Use another source, or for a table another column: --text_column NAME"
        )

    all_bytes = max(expected_text_bytes(source, train_parts), text_bytes)
    all_tokens = min(all_bytes * tokens / text_bytes, config.limit_tokens or math.inf)
    bytes_per_id = 2 if len(tokenizer) <= 2**16 else 4
    num_files = pluralize(len(train_parts), "file", "files")
    threads = pluralize(encode.threads, "thread", "threads")
    note = document_counts.describe_missing_text([counts])
    return (
        f"{source.name}: {num_files}, about {all_bytes / 1e6:,.1f} MB of text, "
        f"{all_tokens:,.0f} tokens (estimated)\n"
        f"{source.folder}: {all_tokens * bytes_per_id / 1e6:,.3f} MB on disk "
        f"(estimated: {bytes_per_id} bytes per token)\n"
        f"{all_tokens / tokens * seconds:,.1f} s at {text_bytes / seconds / 1e6:.1f} MB/s of text, "
        f"{tokens / seconds:,.0f} tokens/s "
        f"(measured for {seconds:.0f} s with {threads}, including reading)"
        + (f"\n{note}" if note else "")
    )


def _similar_tokenizer(config: keys.DataSource, train_parts: list[Part]) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a source, or one like it that is trained on its first texts."""
    if config.tokenizer not in keys.TRAINED_TOKENIZERS:
        return pretrained_tokenizer.load(config.tokenizer)
    size = config.tokenizer_vocab_size
    if config.tokenizer == "characters":
        # A vocabulary of single bytes: a text has at most as many characters as bytes.
        size = 257
    texts = islice(first_texts(train_parts), 1000)
    return tokenization.train_bpe(texts, size, config.tokenizer_split)


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
    for document in chain.from_iterable(encode(read_rows(0), 0) for _, read_rows in parts):
        elapsed = time.perf_counter() - started
        if elapsed > max_seconds and text_bytes >= BATCH_CHARACTERS:
            break
        tokens += len(document.ids)
        text_bytes += document.text_bytes
        document_counts.add(counts, document.counts)
        seconds = elapsed
    return Measurement(tokens, text_bytes, seconds, counts)


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

    compared = "sizes (the folder has no hashes)"
    if manifest.tokenizer is not None:
        compared = "sizes, hashes"
        vocab_size = manifest.tokenizer.size
    num_tokens = 0
    for shard in manifest.shards:
        path = folder / shard.file
        ids, offset = shards.open_ids(path)
        shards.check_ids(path, ids, offset, vocab_size)
        num_tokens += len(ids)

    state = "" if manifest.complete else "; its preparation is not finished"
    return (
        f"{folder}: {len(manifest.shards)} shards with {num_tokens:,} tokens are intact "
        f"(checked: {compared}, ids below {vocab_size}){state}"
    )
