"""Convert rows of token ids, which another program encoded, to documents.

A row is usually one document. It may be padded, and may begin or end with special tokens, all of
which are removed. In packed rows, documents follow each other without regard to the ends of rows,
so such rows are kept as they are.
"""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerFast

# Number of rows that decide whether a source is packed.
SAMPLE_ROWS = 1000
MIN_PADDING = 2  # number of equal ids at the end of a row that look like padding
NO_IDS = np.empty(0, dtype=np.uint32)


class TokenRows:
    """Remove padding and special tokens from rows, and add the end-of-text token.

    Args:
        tokenizer: the tokenizer that the rows were encoded with.
        is_packed: whether the rows are packed, see ``is_packed``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, is_packed: bool = False):
        self._is_packed = is_packed
        self._end_of_text = tokenizer.eos_token_id
        padding = _ids_of(tokenizer.pad_token_id)
        end_of_text = _ids_of(tokenizer.eos_token_id)
        self._before_text = padding | end_of_text | _ids_of(tokenizer.bos_token_id)
        self._after_text = padding | end_of_text

    def text_ids(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids of a row without padding and, unless packed, without special tokens.

        Args:
            ids: (tokens,) the ids of a row.
        """
        text_ids = _strip(ids, self._before_text, self._after_text)
        if not self._is_packed or not len(text_ids):
            return text_ids
        # In packed rows, one end-of-text token at an end of the row separates documents. More of
        # them are padding.
        end = np.array([self._end_of_text], dtype=ids.dtype)
        without_padding = _strip(
            ids, self._before_text - {self._end_of_text}, self._after_text - {self._end_of_text}
        )
        parts = [text_ids]
        if without_padding[0] == self._end_of_text:
            parts.insert(0, end)
        if without_padding[-1] == self._end_of_text:
            parts.append(end)
        return np.concatenate(parts)

    def with_separator(self, text_ids: np.ndarray) -> np.ndarray:
        """Return ids that can follow those of the previous row."""
        if self._is_packed:
            return text_ids
        return np.concatenate([np.array([self._end_of_text], dtype=np.uint32), text_ids])

    def count_documents(self, ids: np.ndarray) -> int:
        """Return the number of documents that begin in a row."""
        return int((ids == self._end_of_text).sum()) if self._is_packed else 1


def contain_end_of_text(rows: Sequence[np.ndarray], tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether an end-of-text token occurs between the text of at least one row.

    At the ends of a row, this token may be padding.

    Args:
        rows: (tokens,) the ids of each of the first rows.
        tokenizer: the tokenizer that the rows were encoded with.
    """
    token_rows = TokenRows(tokenizer)
    return any(tokenizer.eos_token_id in token_rows.text_ids(ids) for ids in rows)


def have_one_length(files: Sequence[Sequence[np.ndarray]]) -> bool:
    """Return whether all rows but the last of each file have the same number of ids.

    Args:
        files: (tokens,) the ids of each of the first rows of each file.
    """
    lengths = set()
    for rows in files:
        lengths |= {len(ids) for ids in rows[:-1]}
    return len(lengths) == 1


def are_packed(files: Sequence[Sequence[np.ndarray]], tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether rows contain documents that were joined and then cut to one length.

    Args:
        files: (tokens,) the ids of each of the first rows of each file.
        tokenizer: the tokenizer that the rows were encoded with.
    """
    return have_one_length(files) and any(contain_end_of_text(rows, tokenizer) for rows in files)


def unknown_padding(rows: Sequence[np.ndarray], tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Return the id with which most rows seem to be padded although it is not the padding token.

    Args:
        rows: (tokens,) the ids of each of the first rows.
        tokenizer: the tokenizer that the rows were encoded with.

    Returns:
        None if the rows differ in length, or if fewer than half of them end with this id repeated.
    """
    token_rows = TokenRows(tokenizer)
    if len(rows) < MIN_PADDING or not have_one_length([rows]):
        return None
    endings = []
    for ids in rows:
        ending = token_rows.text_ids(ids)[-MIN_PADDING:]
        if len(ending) == MIN_PADDING and len(set(ending.tolist())) == 1:
            endings.append(int(ending[0]))
    if not endings:
        return None
    most_frequent = max(set(endings), key=endings.count)
    return most_frequent if endings.count(most_frequent) > len(rows) / 2 else None


def _ids_of(token_id: int | None) -> set[int]:
    return set() if token_id is None else {token_id}


def _strip(ids: np.ndarray, first_ids: set[int], last_ids: set[int]) -> np.ndarray:
    """Remove some ids from the beginning of a row and some from its end."""
    first_positions = np.flatnonzero(~np.isin(ids, list(first_ids)))
    last_positions = np.flatnonzero(~np.isin(ids, list(last_ids)))
    if not len(first_positions) or not len(last_positions):
        return NO_IDS
    return ids[first_positions[0] : last_positions[-1] + 1]
