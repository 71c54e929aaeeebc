"""Report the progress of a preparation, and limit how far it runs ahead of training."""

import logging
import os
import sys
import threading
import time

from ursa_minor.base.wording import pluralize
from ursa_minor.data.tokens.document_counts import describe_missing_text, is_contents
from ursa_minor.data.tokens.encoder import CHANGED_BY_NFC, Document
from ursa_minor.data.tokens.manifest import Manifest, overlap_note
from ursa_minor.data.tokens.shards import Shard, count_text_bytes, count_tokens
from ursa_minor.recipe import keys

log = logging.getLogger(__name__)

SHOW_LINE_SECONDS = 10.0  # time between two progress lines
# A tokenizer that fits its text has at least this many bytes of text per token in any language.
MIN_BYTES_PER_TOKEN = 2.5
# With stream_keep = consumed, the number of shards that are prepared ahead of training.
AHEAD_SHARDS = 2


class PrefetchTarget:
    """The number of windows of the train split that train.py will need next.

    train.py writes it to the standard input of this process, which ends when the input is closed.
    """

    def __init__(self, recipe: keys.Recipe):
        self.sequence_length = recipe.model.sequence_length
        self.is_bounded = recipe.data.stream_keep == "consumed"
        self._target = -1
        self._changed = threading.Condition()
        os.nice(10)  # the training processes have priority on shared cores
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            with self._changed:
                self._target = int(line)
                self._changed.notify()
        # train.py has ended. When it is started again, preparation continues from the manifest.
        os._exit(1)

    def wait(self, shards: list[Shard]) -> None:
        """Wait until train.py has sent a target and needs another shard.

        With stream_keep = consumed, another shard is needed when training is fewer than
        ``AHEAD_SHARDS`` shards away from the last one. Otherwise it is always needed.

        Args:
            shards: the train shards that are written.
        """
        needed_target = 0
        if self.is_bounded:
            windows = [max(0, shard.tokens - 1) // self.sequence_length for shard in shards]
            needed_target = sum(windows) - AHEAD_SHARDS * max(windows, default=0)
        with self._changed:
            self._changed.wait_for(lambda: self._target >= needed_target)


class Progress:
    """Log a line about the progress every ``SHOW_LINE_SECONDS``.

    Args:
        existing: the train shards that an earlier process has written.
        num_documents: number of documents in the existing shards.
        expected_bytes: size of the entire text in bytes, or 0 if it is not known.
        limit_tokens: number of tokens after which the preparation ends, or 0 without a limit.
    """

    def __init__(
        self, existing: list[Shard], num_documents: int, expected_bytes: float, limit_tokens: int
    ):
        self._expected = expected_bytes
        self._limit = limit_tokens
        self._documents = num_documents
        self._tokens = count_tokens(existing)
        self._bytes = count_text_bytes(existing)
        self._bytes_before = self._bytes
        self._started = time.perf_counter()
        self._shown = self._started

    def count(self, document: Document) -> None:
        """Count a document, and log the progress if it is time to."""
        self._documents += document.counts["documents"]
        self._tokens += len(document.ids)
        self._bytes += document.text_bytes
        now = time.perf_counter()
        if now - self._shown < SHOW_LINE_SECONDS:
            return
        self._shown = now

        total_bytes = self._expected
        if self._limit:
            total_bytes = min(total_bytes, self._limit * self._bytes / max(1, self._tokens))
        speed = (self._bytes - self._bytes_before) / (now - self._started)
        line = f"{self._documents:,} documents, {self._tokens:,} tokens, {speed / 1e6:.1f} MB/s"
        if total_bytes and speed:  # the first rows may have no text, so the speed is 0
            minutes = max(0.0, total_bytes - self._bytes) / speed / 60
            line += f", about {minutes:.1f} min left"
        log.info(line)


def log_amounts(manifest: Manifest) -> None:
    """Log the amount of text in each split, and warn if the tokenizer does not fit the text."""
    assert manifest.tokenizer is not None  # every folder that this project encoded has a tokenizer
    assert manifest.counts is not None
    tokenizer_name = manifest.tokenizer.name
    for split, shards in manifest.splits.items():
        tokens = count_tokens(shards)
        text_bytes = count_text_bytes(shards)
        if not tokens:
            continue
        counts = []
        for name, number in manifest.counts.get(split, {}).items():
            if number and name != CHANGED_BY_NFC and not is_contents(name):
                counts.append(f"{name.replace('_', ' ')} {number:,}")
        log.info(
            f"{split}: {tokens:,} tokens, {text_bytes / 1e6:.2f} MB, "
            f"{text_bytes / tokens:.2f} bytes per token; {', '.join(counts)}"
        )
        has_few_bytes = text_bytes < MIN_BYTES_PER_TOKEN * tokens
        is_poor_fit = has_few_bytes and tokenizer_name != "characters"
        if split == "train" and is_poor_fit:
            warn_of_poor_fit(tokenizer_name, text_bytes / tokens)
    note = overlap_note(manifest)
    if note:
        log.warning(note)
    log_missing_text(manifest)
    num_changed = sum(counts.get(CHANGED_BY_NFC, 0) for counts in manifest.counts.values())
    if num_changed:
        log.info(
            f"The tokenizer converted {pluralize(num_changed, 'document', 'documents')} to Unicode "
            f"NFC. Bytes and bits per byte refer to the converted text"
        )


def log_missing_text(manifest: Manifest) -> None:
    """Log a warning if more than a small share of the rows have no text."""
    note = describe_missing_text((manifest.counts or {}).values())
    if note:
        log.warning(f"{manifest.source}: {note}")


def warn_of_poor_fit(tokenizer_name: str, bytes_per_token: float) -> None:
    """Log a warning that the tokenizer does not fit the text, with a fix."""
    fix = "Train one on it: --tokenizer bpe --tokenizer_split qwen35"
    if tokenizer_name == "bpe":
        fix = "Train the tokenizer on more text"
    log.warning(
        f"{bytes_per_token:.2f} bytes per token: the tokenizer does not fit this text, so each "
        f"training sequence contains less of it. {fix}, with a larger vocabulary: "
        f"--tokenizer_vocab_size N"
    )
