"""Select the texts on which a BPE is trained."""

import math
from collections.abc import Iterator
from pathlib import Path

from ursa_minor.data.sources.columns import NoText
from ursa_minor.data.sources.find import FoundSource, Part
from ursa_minor.data.tokens.encoder import replace_surrogates
from ursa_minor.recipe.source_kind import URL_SCHEMES

# A BPE is trained on at most this many characters of the train split.
BPE_SAMPLE_CHARACTERS = 100_000_000


def read_texts(parts: list[Part]) -> Iterator[str]:
    """Yield the text of each row, which is empty for a row without text."""
    for _, read_rows in parts:
        for text, _ in read_rows(0):
            yield "" if isinstance(text, NoText) else text


def first_texts(parts: list[Part]) -> Iterator[str]:
    """Yield the first texts of a split, up to about BPE_SAMPLE_CHARACTERS."""
    yield from _beginning(read_texts(parts), BPE_SAMPLE_CHARACTERS)


def _beginning(texts: Iterator[str], max_characters: int) -> Iterator[str]:
    """Yield the first texts that have this many characters together."""
    remaining = max_characters
    for text in texts:
        if remaining <= 0:
            return
        remaining -= len(text)
        yield replace_surrogates(text)


def bpe_sample(source: FoundSource, parts: list[Part]) -> Iterator[str]:
    """Yield the texts on which a BPE is trained.

    Of local files with more than BPE_SAMPLE_CHARACTERS, the beginning of each file is used, in
    proportion to its size. Of text files with a separator, documents from all of the text are used.
    Of other sources, only the first files are used, because reading all of them would take too
    long.

    Args:
        parts: the files of the train split.
    """
    has_urls = any(name.startswith(URL_SCHEMES) for name, _ in parts)
    is_local = source.config.dataset_name is None and not has_urls
    if not is_local or _are_short(parts):
        yield from first_texts(parts)
    elif source.parts is None:
        yield from _sample_of_tables(parts)
    elif source.config.document_separator:
        yield from _sample_of_documents(parts)
    else:
        yield from _sample_of_texts(parts)


def _are_short(parts: list[Part]) -> bool:
    """Return whether files have fewer than BPE_SAMPLE_CHARACTERS in total."""
    return sum(len(text) for text in first_texts(parts)) < BPE_SAMPLE_CHARACTERS


def _sample_of_tables(parts: list[Part]) -> Iterator[str]:
    """Yield the first texts of each file. A part is a file."""
    sizes = [Path(name).stat().st_size for name, _ in parts]
    for part, size in zip(parts, sizes, strict=True):
        quota = math.ceil(BPE_SAMPLE_CHARACTERS * size / sum(sizes))
        yield from _beginning(read_texts([part]), quota)


def _sample_of_texts(parts: list[Part]) -> Iterator[str]:
    """Yield the beginning of each file. A file is a document, which may consist of several rows."""
    sizes: list[int] = []
    for text, begins_document in _text_rows(parts):
        if begins_document:
            sizes.append(0)
        sizes[-1] += len(text)

    file_number = -1
    remaining = 0
    for text, begins_document in _text_rows(parts):
        if begins_document:
            file_number += 1
            remaining = math.ceil(BPE_SAMPLE_CHARACTERS * sizes[file_number] / sum(sizes))
        if remaining > 0:
            yield replace_surrogates(text[:remaining])
            remaining -= len(text)


def _sample_of_documents(parts: list[Part]) -> Iterator[str]:
    """Yield rows at even distances, as many as have about BPE_SAMPLE_CHARACTERS together."""
    num_characters = sum(len(text) for text, _ in _text_rows(parts))
    share = BPE_SAMPLE_CHARACTERS / num_characters
    num_read = 0
    num_yielded = 0
    for text, _ in _text_rows(parts):
        if num_yielded <= share * num_read:
            yield replace_surrogates(text)
            num_yielded += len(text)
        num_read += len(text)


def _text_rows(parts: list[Part]) -> Iterator[tuple[str, bool]]:
    """Yield the text of each row, and whether it begins a document."""
    for _, read_rows in parts:
        for text, begins_document in read_rows(0):
            yield "" if isinstance(text, NoText) else text, begins_document
