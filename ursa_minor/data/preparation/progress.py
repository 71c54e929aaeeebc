"""How far a preparation is: what the user sees of it, and how far train.py lets it go."""

import logging
import os
import sys
import threading
import time

from ursa_minor.data.tokens.encoder import Document
from ursa_minor.data.tokens.manifest import Manifest
from ursa_minor.data.tokens.shards import Shard, count_text_bytes, count_tokens
from ursa_minor.recipe import keys

log = logging.getLogger(__name__)

SHOW_LINE_SECONDS = 10.0  # between two lines
FEW_BYTES = 2.5  # a token: less than any language has under a tokenizer made for it
AHEAD_SHARDS = 2  # with stream_keep = consumed: how far the reader runs ahead of the trainer


class PrefetchTarget:
    """The number of windows that train.py will soon need.

    train.py writes it to our standard input. Closing the input ends this process.
    """

    def __init__(self, recipe: keys.Recipe):
        self.sequence_length, self.bounded = (
            recipe.model.sequence_length,
            recipe.data.stream_keep == "consumed",
        )
        self._target, self._changed = -1, threading.Condition()
        os.nice(10)  # the trainer goes first where they share cores
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            with self._changed:
                self._target = int(line)
                self._changed.notify()
        os._exit(1)  # the trainer is gone; the next one resumes from the manifest

    def wait(self, shards: list[Shard]) -> None:
        """With stream_keep = consumed, wait until the trainer is close to the last shard."""
        ahead = 0
        if self.bounded:
            windows = [max(0, shard.tokens - 1) // self.sequence_length for shard in shards]
            ahead = sum(windows) - AHEAD_SHARDS * max(windows, default=0)
        with self._changed:
            self._changed.wait_for(lambda: ahead <= self._target)


class Progress:
    """The visible progress: a line now and then.

    Args:
        existing: the train shards that an earlier process has written.
        num_documents: number of documents in them.
        expected_bytes: size of the whole text. 0 if it is not known.
        limit_tokens: number of tokens after which the preparation ends. 0 if there is no limit.
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
        """Note a document; show it now and then."""
        self._documents += document.counts["documents"]
        self._tokens += len(document.ids)
        self._bytes += document.text_bytes
        if (now := time.perf_counter()) - self._shown < SHOW_LINE_SECONDS:
            return
        self._shown, total = now, self._expected
        if self._limit:
            total = min(total, self._limit * self._bytes / max(1, self._tokens))
        speed = (self._bytes - self._bytes_before) / (now - self._started)
        # The first rows may have no text at all.
        left = (
            f", about {max(0.0, total - self._bytes) / speed / 60:.1f} min left"
            if total and speed
            else ""
        )
        log.info(
            f"{self._documents:,} documents, {self._tokens:,} tokens, {speed / 1e6:.1f} MB/s{left}"
        )


def log_amounts(manifest: Manifest) -> None:
    """Log the amount of text in each split, and warn of a tokenizer that does not fit the text."""
    assert manifest.tokenizer is not None  # the folder was encoded here
    assert manifest.counts is not None
    name = manifest.tokenizer.name
    for split, shards in manifest.splits.items():
        tokens = count_tokens(shards)
        text_bytes = count_text_bytes(shards)
        if not tokens:
            continue
        counts = [
            f"{noun.replace('_', ' ')} {n:,}"
            for noun, n in manifest.counts.get(split, {}).items()
            if n
        ]
        fit = f"{text_bytes / tokens:.2f} bytes per token"
        log.info(
            f"{split}: {tokens:,} tokens, {text_bytes / 1e6:.2f} MB, {fit}; {', '.join(counts)}"
        )
        if split == "train" and name != "characters" and text_bytes < FEW_BYTES * tokens:
            fix = (
                "Give it more text"
                if name == "bpe"
                else "Make one from it: --tokenizer bpe --tokenizer_split qwen35"
            )
            log.warning(
                f"{fit}: the tokenizer does not fit this text, "
                f"and a model sees less of it at a time. {fix}, "
                f"with more ids: --tokenizer_vocab_size N"
            )
