"""Rows of a source to documents of ids: on all cores that training leaves, in order, each id's bytes accounted for."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources.find import SourceRow
from ursa_minor.data.sources.formats import text as text_format
from ursa_minor.data.tokens import split_points
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.split_points import NumberedRow

BATCH_CHARACTERS = 2**20  # text that a thread encodes at a time
NO_IDS = np.empty(0, dtype=np.uint32)


class Document(NamedTuple):
    """A row or a piece of it, encoded: ids (n,), a document's first behind the end-of-text token; none without text."""

    row: int
    ids: np.ndarray
    text_bytes: int
    counts: dict[str, int]


def well_formed(text: str) -> str:
    """Replace each half of a surrogate pair, which JSON can carry and UTF-8 cannot, by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class DocumentEncoder:
    """Rows of texts, or of ids, to Documents, on all cores but those of ``trainers`` other processes.

    Args:
        ids: rows hold the tokenizer's ids; an end-of-text token at either end is left out, for one stands before each.

    Attributes:
        bytes_per_token: (vocabulary,) int64, bytes of text that each id stands for.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, name: str, trainers: int = 0, *, ids: bool = False
    ):
        if max(tokenizer.get_vocab().values()) >= len(tokenizer):
            raise BadInput(f"tokenizer = {name}: its ids have gaps; use another tokenizer")
        self.bytes_per_token = tokenization.token_bytes(tokenizer)
        self._encode = tokenization.make_encoder(tokenizer)
        self._name, self._end_of_text = name, np.array([tokenizer.eos_token_id], dtype=np.uint32)
        # Bytes that the tokenizer may add before a text.
        self._prefix = int(tokenization.marks_spaces(tokenizer))
        self._ids, self._place = ids, split_points.split_point_pattern(tokenizer.backend_tokenizer)
        self.threads = max(1, len(os.sched_getaffinity(0)) - trainers)

    def __call__(self, rows: Iterator[SourceRow], first_row: int) -> Iterator[Document]:
        """Yield each row's Document, in order. Raises BadInput for a tokenizer that changes the text."""
        numbered: Iterator[NumberedRow] = (
            (number, *row) for number, row in enumerate(rows, first_row)
        )
        # Long texts are already cut at split points.
        if not self._ids and self._place is not text_format.GPT2_SPLIT_POINT:
            numbered = split_points.pieces(numbered, self._place)
        with ThreadPoolExecutor(self.threads) as pool:
            waiting = deque()
            for batch in batched(numbered):
                waiting.append(pool.submit(self._documents, batch))
                if len(waiting) > 2 * self.threads:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()

    def _documents(self, batch: list[NumberedRow]) -> list[Document]:
        if self._ids:
            return [self._of_ids(number, row) for number, row, _ in batch]
        texts = [well_formed(text) for _, text, _ in batch if text is not None]
        encodings, documents = zip(texts, self._encode(texts), strict=True), []
        for number, text, begins in batch:
            kept, ids = ("", NO_IDS) if text is None else next(encodings)
            text_bytes, size = int(self.bytes_per_token[ids].sum()), len(kept.encode())
            if not 0 <= text_bytes - size <= self._prefix:
                raise BadInput(
                    f"tokenizer = {self._name}: its ids stand for {text_bytes} bytes where row {number} has {size}: it "
                    f"changes the text, so bits per byte would be wrong. Use a byte-level one"
                )
            counts = {
                "documents": int(begins and text is not None),
                "without_text": int(text is None),
            }
            counts["surrogates_replaced"] = int(kept != (text or ""))
            if begins and text is not None:
                ids = np.concatenate([self._end_of_text, ids])
            documents.append(Document(number, ids, text_bytes, counts))
        return documents

    def _of_ids(self, number: int, ids: np.ndarray | None) -> Document:
        counts = {
            "documents": int(ids is not None),
            "without_text": int(ids is None),
            "surrogates_replaced": 0,
        }
        if ids is None:
            return Document(number, NO_IDS, 0, counts)
        if ids.max() >= len(self.bytes_per_token):
            raise BadInput(
                f"row {number}: holds the id {ids.max()}, and tokenizer = {self._name} has {len(self.bytes_per_token)}; "
                f"give the one that the ids were made with"
            )
        inner = np.flatnonzero(ids != self._end_of_text)
        ids = ids[inner[0] : inner[-1] + 1] if len(inner) else NO_IDS
        return Document(
            number,
            np.concatenate([self._end_of_text, ids]),
            int(self.bytes_per_token[ids].sum()),
            counts,
        )


def batched(rows: Iterable[NumberedRow]) -> Iterator[list[NumberedRow]]:
    """Group rows so that each group holds about BATCH_CHARACTERS."""
    batch, size = [], 0
    for row in rows:
        batch.append(row)
        size += 1 + (0 if row[1] is None else len(row[1]))
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
