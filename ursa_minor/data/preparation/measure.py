"""Measure how long a preparation takes and how large its result is; verify a prepared folder."""

import math
import time
from functools import cache
from itertools import chain, islice
from pathlib import Path

from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import pluralize
from ursa_minor.data.preparation.prepare import expected_text_bytes, first_texts, open_parts
from ursa_minor.data.sources.find import STDLIB, FoundSource, Part, find_source
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import shards
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.encoder import BATCH_CHARACTERS, DocumentEncoder
from ursa_minor.recipe import keys

DRY_RUN_SECONDS = 10
CORE_SECONDS = 1.0  # for which an estimate encodes


def dry_run(source: FoundSource) -> str:
    """Encode text for some seconds; return what all of it would take, as lines to read. Nothing is kept."""
    if source.config.token_column:
        raise BadInput(
            "--dry_run: measures how fast text is encoded, and token_column holds none; leave it out"
        )
    _, parts = open_parts(source, None, {})
    name, config = source.config.tokenizer, source.config
    if name in keys.TRAINED_TOKENIZERS:
        # The number of characters is at most the number of bytes.
        size = config.tokenizer_vocab_size if name == "bpe" else 257
        tokenizer = tokenization.train_bpe(
            islice(first_texts(parts["train"]), 1000), size, config.tokenizer_split
        )
    else:
        tokenizer = tokenization.load(name)
    encode = DocumentEncoder(tokenizer, name)
    tokens, text_bytes, seconds = _timed(encode, parts["train"], DRY_RUN_SECONDS)
    if not text_bytes:
        raise BadInput(f"{source.name}: no text in its first rows")
    whole, itemsize = (
        max(expected_text_bytes(source, parts["train"]), text_bytes),
        2 if len(tokenizer) <= 2**16 else 4,
    )
    total = min(whole * tokens / text_bytes, config.limit_tokens or math.inf)
    held, used = (
        pluralize(len(parts["train"]), "file", "files"),
        pluralize(encode.threads, "thread", "threads"),
    )
    lines = (
        f"{source.name}: {held}, about {whole / 1e6:,.1f} MB of text, {total:,.0f} tokens (estimated)",
        f"{source.folder}: {total * itemsize / 1e6:,.3f} MB on disk (estimated: {itemsize} bytes a token)",
        f"{total / tokens * seconds:,.1f} s at {text_bytes / seconds / 1e6:.1f} MB/s of text, "
        f"{tokens / seconds:,.0f} tokens/s (measured for {seconds:.0f} s with {used}, reading included)",
    )
    return "\n".join(lines)


@cache
def text_bytes_per_core() -> float:
    """Return how many bytes of text a core of this machine encodes in a second: Python's own, by a small bpe of it."""
    data = keys.DataSource(
        dataset_name=STDLIB, validation_fraction=0.05, tokenizer="bpe", data_seed=0
    )
    train = (find_source(data).parts or {})["train"]
    encode = DocumentEncoder(tokenization.train_bpe(islice(first_texts(train), 50), 2042), STDLIB)
    encode.threads = 1
    _, text_bytes, seconds = _timed(encode, train, CORE_SECONDS)
    return text_bytes / seconds


def _timed(encode: DocumentEncoder, parts: list[Part], limit: float) -> tuple[int, int, float]:
    """Encode documents for ``limit`` seconds; return tokens, bytes of text, and the seconds that these took.

    Documents come in batches: one that comes too late is not counted, nor the time that its batch took, but for the first.
    """
    started, tokens, text_bytes, seconds = time.perf_counter(), 0, 0, 0.0
    for document in chain.from_iterable(encode(read(0), 0) for _, read in parts):
        now = time.perf_counter() - started
        if now > limit and text_bytes >= BATCH_CHARACTERS:
            break
        tokens, text_bytes, seconds = (
            tokens + len(document.ids),
            text_bytes + document.text_bytes,
            now,
        )
    return tokens, text_bytes, seconds


def verify(folder: Path, vocab_size: int) -> str:
    """Read every byte of a folder of token files, and return a line which states that it is intact.

    Args:
        vocab_size: of the model. The tokenizer of the folder is used instead if its manifest names one.

    Raises:
        BadInput: with every error that was found.
    """
    manifest = manifests.describe_folder(folder)
    errors = [error for _, error in manifests.problems(folder, manifest.shards)]
    if errors:
        raise BadInput(errors)

    compared = "sizes (there are no hashes to compare with)"
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
    intact = f"{len(manifest.shards)} shards, {num_tokens:,} tokens are whole"
    return f"{folder}: {intact}: {compared}, ids below {vocab_size}{state}"
