"""Encode the rows of a source as documents of token ids, in several threads, in order."""

import importlib.metadata
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources.columns import NoText
from ursa_minor.data.sources.find import SourceRow
from ursa_minor.data.sources.formats.text import GPT2_SPLIT_POINT
from ursa_minor.data.tokens import document_counts, normalizers, split_points
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.document_counts import DOCUMENTS, WITHOUT_TEXT
from ursa_minor.data.tokens.shards import id_dtype
from ursa_minor.data.tokens.split_points import NumberedRow
from ursa_minor.data.tokens.token_rows import NO_IDS, TokenRows
from ursa_minor.data.tokens.tokenizer import EncodedTexts

# Of this much text, one batch is also encoded by the tokenizers library, and compared.
CHECK_BYTES = 64_000_000
CHECKED_CHARACTERS = 2**16  # size of the text that tokenizers encodes at a time
BATCH_CHARACTERS = 2**20  # size of the text that a thread encodes at a time
CHANGED_BY_NFC = "changed_by_nfc"  # the key of ``Document.counts``


class Document(NamedTuple):
    """A row of a source, or a piece of a long one, as token ids.

    Attributes:
        row: number of the row.
        ids: (tokens,) uint16 or uint32, see ``id_dtype``. The first piece of a document starts
            with the end-of-text token. A row without text has no ids.
        text_bytes: size of the text that the ids represent, after normalization.
        counts: statistics: documents, rows without text, texts with replaced surrogates, and
            documents that the tokenizer converts to NFC.
    """

    row: int
    ids: np.ndarray
    text_bytes: int
    counts: dict[str, int]


class _Text(NamedTuple):
    """A text as it is encoded.

    Attributes:
        text: the text without lone surrogates.
        num_bytes: its size in UTF-8, after normalization.
        counts: see ``Document``.
    """

    text: str
    num_bytes: int
    counts: dict[str, int]


def replace_surrogates(text: str) -> str:
    """Replace each lone surrogate, which JSON can contain but UTF-8 cannot, by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class DocumentEncoder:
    """Convert the rows of a source to documents of token ids.

    Args:
        tokenizer: encodes the texts.
        name: the tokenizer in the recipe, for messages.
        trainers: number of training processes on this machine. One core is left for each of them.
        token_rows: converts rows of ids to documents, or None if the rows contain texts.

    Attributes:
        bytes_per_token: (vocabulary,) int64, the bytes of text that each id represents.
        threads: number of threads.

    Raises:
        BadInput: the ids of the tokenizer have gaps, or it changes the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        name: str,
        trainers: int = 0,
        *,
        token_rows: TokenRows | None = None,
    ):
        if max(tokenizer.get_vocab().values()) >= len(tokenizer):
            raise BadInput(
                f"tokenizer = {name}: this tokenizer cannot be used, because its ids are not "
                f"consecutive. Use another tokenizer"
            )
        if token_rows is None:
            normalizers.check_keeps_text(tokenizer, name)
        self.bytes_per_token = tokenization.token_bytes(tokenizer)
        self._encode = tokenization.make_encoder(tokenizer)
        self._name = name
        self._end_of_text = np.array([tokenizer.eos_token_id], dtype=np.uint32)
        self._dtype = id_dtype(len(self.bytes_per_token))
        self._uses_nfc = normalizers.uses_nfc(tokenizer)
        self._last_changed_row = -1  # the last row that NFC changed
        self._lock = threading.Lock()
        self._unchecked_bytes = 0  # size of the text since the last check of the encoder
        # SentencePiece may add a space before a text.
        self._max_prefix_bytes = 1 if tokenization.marks_spaces(tokenizer) else 0
        self._token_rows = token_rows
        self._split_point = split_points.split_point_pattern(tokenizer.backend_tokenizer)
        self.threads = max(1, len(os.sched_getaffinity(0)) - trainers)

    def __call__(self, rows: Iterator[SourceRow], first_row: int) -> Iterator[Document]:
        """Yield the document of each row, in order.

        Args:
            rows: the rows of a part from ``first_row`` on.

        Raises:
            BadInput: the tokenizer changes the text, so the ids represent a different number of
                bytes, or an id does not exist.
        """
        numbered_rows: Iterator[NumberedRow] = (
            (number, content, begins_document)
            for number, (content, begins_document) in enumerate(rows, first_row)
        )
        self._last_changed_row = -1
        # The pieces of text files are already split for GPT-2.
        is_split = self._split_point is GPT2_SPLIT_POINT
        if self._token_rows is None and not is_split:
            numbered_rows = split_points.pieces(numbered_rows, self._split_point)
        with ThreadPoolExecutor(self.threads) as pool:
            results = deque()
            for batch in batched(numbered_rows):
                results.append(pool.submit(self._documents, batch))
                # Documents in the queue need memory, so its length is limited.
                if len(results) > 2 * self.threads:
                    yield from self._count_once(results.popleft().result())
            while results:
                yield from self._count_once(results.popleft().result())

    def _count_once(self, documents: list[Document]) -> Iterator[Document]:
        """Yield documents. Of the pieces of a row that NFC changed, only the first is counted."""
        for document in documents:
            if document.counts.get(CHANGED_BY_NFC):
                if document.row == self._last_changed_row:
                    document.counts[CHANGED_BY_NFC] = 0
                self._last_changed_row = document.row
            yield document

    def _documents(self, batch: list[NumberedRow]) -> list[Document]:
        if self._token_rows is not None:
            return [
                self._document_of_ids(self._token_rows, number, ids) for number, ids, _ in batch
            ]
        return self._documents_of_texts(batch)

    def _documents_of_texts(self, batch: list[NumberedRow]) -> list[Document]:
        rows_with_text = []
        texts = []
        for row, text, begins_document in batch:
            if not isinstance(text, NoText):
                rows_with_text.append((row, text, begins_document))
                texts.append(self._text(text, begins_document))

        # Encode all texts of the batch, and check the result.
        encoded = self._encode.encode([text.text for text in texts])
        if self._is_time_to_check(sum(text.num_bytes for text in texts)):
            self._check_encoder(rows_with_text, texts, encoded)
        sizes = self._sizes(encoded)
        self._check_sizes(rows_with_text, texts, encoded, sizes)

        begins = np.array([begins_document for _, _, begins_document in rows_with_text], dtype=bool)
        encoded = self._with_separators(encoded, begins)

        # Divide the ids into documents.
        documents = []
        position = 0  # in the lists of texts
        for row, text, _ in batch:
            if isinstance(text, NoText):
                documents.append(_document_without_text(row, text.contents))
                continue
            begin = encoded.offsets[position]
            end = encoded.offsets[position + 1]
            counts = texts[position].counts
            documents.append(Document(row, encoded.ids[begin:end], int(sizes[position]), counts))
            position += 1
        return documents

    def _text(self, text: str, begins_document: bool) -> _Text:
        """Return a text without lone surrogates, with its size and statistics."""
        try:
            num_bytes = len(text.encode())
            counts = _counts(documents=int(begins_document))
        except UnicodeEncodeError:
            text = replace_surrogates(text)
            num_bytes = len(text.encode())
            counts = _counts(documents=int(begins_document), surrogates_replaced=True)
        if self._uses_nfc:
            normalized = normalizers.to_nfc(text)
            num_bytes = len(normalized.encode())
            counts[CHANGED_BY_NFC] = int(normalized != text)
        return _Text(text, num_bytes, counts)

    def _is_time_to_check(self, num_bytes: int) -> bool:
        """Return whether CHECK_BYTES were encoded since the last check.

        Args:
            num_bytes: size of the batch.
        """
        if self._encode.fast is None:
            return False
        with self._lock:
            self._unchecked_bytes += num_bytes
            is_time = self._unchecked_bytes >= CHECK_BYTES
            if is_time:
                self._unchecked_bytes = 0
        return is_time

    def _check_encoder(
        self, rows: list[NumberedRow], texts: list[_Text], encoded: EncodedTexts
    ) -> None:
        """Raise BadInput if tokenizers gives other ids than the encoder.

        Args:
            rows: the rows of the texts.
            texts: the texts.
            encoded: their ids.
        """
        for (row, _, _), text, ids in zip(rows, texts, encoded.of_each_text(), strict=True):
            # One short piece at a time, because tokenizers needs 130 bytes per character.
            expected_ids = [NO_IDS]
            for piece in split_points.cut(text.text, CHECKED_CHARACTERS, self._split_point):
                expected_ids += self._encode.encode_with_tokenizers([piece]).of_each_text()
            if not np.array_equal(ids, np.concatenate(expected_ids)):
                version = importlib.metadata.version("fastokens")
                raise BadInput(
                    f"row {row}: fastokens {version} gives other ids than the tokenizers library, "
                    f"so the shards of this source may be wrong. Uninstall it (pip uninstall "
                    f"fastokens), delete the folder of the prepared source, and prepare it again"
                )

    def _sizes(self, encoded: EncodedTexts) -> np.ndarray:
        """Return the number of bytes that the ids of each text represent, (texts,) int64."""
        ends = np.concatenate([[0], np.cumsum(self.bytes_per_token[encoded.ids])])
        return np.diff(ends[encoded.offsets])

    def _check_sizes(
        self,
        rows: list[NumberedRow],
        texts: list[_Text],
        encoded: EncodedTexts,
        sizes: np.ndarray,
    ) -> None:
        """Raise BadInput if the ids of a text represent another number of bytes than it has.

        Args:
            rows: the rows of the texts.
            texts: the texts.
            encoded: their ids.
            sizes: (texts,) the number of bytes that the ids of each text represent.
        """
        added_bytes = sizes - np.array([text.num_bytes for text in texts], dtype=np.int64)
        is_wrong = (added_bytes < 0) | (added_bytes > self._max_prefix_bytes)
        if not is_wrong.any():
            return
        position = int(np.argmax(is_wrong))
        row, _, _ = rows[position]
        ids = encoded.ids[encoded.offsets[position] : encoded.offsets[position + 1]]
        reason = "this tokenizer changes the text"
        if self._end_of_text in ids:
            reason = "its end-of-text (eos) token is also a word of the text"
        raise BadInput(
            f"tokenizer = {self._name}: {reason}, so bits per byte would be wrong. Row {row} has "
            f"{texts[position].num_bytes} bytes, but its ids represent {sizes[position]}. Use a "
            f"tokenizer that keeps the text, or train one: --tokenizer bpe"
        )

    def _with_separators(self, encoded: EncodedTexts, begins: np.ndarray) -> EncodedTexts:
        """Insert the end-of-text token in front of each text that begins a document.

        Args:
            encoded: the ids of the texts.
            begins: (texts,) bool, whether a text begins a document.
        """
        text_begins = encoded.offsets[:-1]
        ids = np.insert(encoded.ids, text_begins[begins], self._end_of_text[0])
        num_inserted = np.concatenate([[0], np.cumsum(begins)])
        return EncodedTexts(ids.astype(self._dtype), encoded.offsets + num_inserted)

    def _document_of_ids(
        self, token_rows: TokenRows, row: int, ids: np.ndarray | NoText
    ) -> Document:
        if isinstance(ids, NoText):
            return _document_without_text(row, ids.contents)
        vocab_size = len(self.bytes_per_token)
        if ids.max() >= vocab_size:
            raise BadInput(
                f"tokenizer = {self._name}: row {row} contains the id {ids.max()}, but this "
                f"tokenizer has only {vocab_size} ids. Use the tokenizer that produced the ids"
            )
        text_ids = token_rows.text_ids(ids)
        if not len(text_ids):
            return _document_without_text(row, "special tokens only")
        text_bytes = int(self.bytes_per_token[text_ids].sum())
        document_ids = token_rows.with_separator(text_ids)
        counts = _counts(documents=token_rows.count_documents(document_ids))
        return Document(row, document_ids.astype(self._dtype), text_bytes, counts)


def _document_without_text(row: int, contents: str) -> Document:
    counts = _counts() | document_counts.row_without_text(contents)
    return Document(row, NO_IDS, 0, counts)


def _counts(*, documents: int = 0, surrogates_replaced: bool = False) -> dict[str, int]:
    """Return the statistics of one row."""
    return {
        DOCUMENTS: int(documents),
        WITHOUT_TEXT: 0,
        "surrogates_replaced": int(surrogates_replaced),
    }


def batched(rows: Iterable[NumberedRow]) -> Iterator[list[NumberedRow]]:
    """Group rows into batches of about BATCH_CHARACTERS."""
    batch = []
    size = 0
    for row in rows:
        batch.append(row)
        _, content, _ = row
        size += 1
        if not isinstance(content, NoText):
            size += len(content)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
