"""Log notes on the contents of a source that is prepared."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources import separated_text
from ursa_minor.data.sources.find import FoundSource
from ursa_minor.data.tokens.tokenizer import END_OF_TEXT

log = logging.getLogger(__name__)

# Special tokens of common tokenizers, each of which begins with "<".
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<bos>",
    "<eos>",
    "<s>",
    "</s>",
    "<pad>",
    "<unk>",
)
BLOCK_BYTES = 2**20


def log_notes(source: FoundSource) -> None:
    """Log the notes on the files of a source, and on the documents of text files."""
    for note in source.notes:
        log.warning(note)
    _log_document_notes(source)


def _log_document_notes(source: FoundSource) -> None:
    """Log a note about a separator in text files that is not used, or that does not occur."""
    separator = source.config.document_separator
    if not source.text_files:
        return
    if separator is None:
        number = count_occurrences(source.text_files, [END_OF_TEXT])[END_OF_TEXT]
        if number:
            log.warning(
                f"{source.name}: {END_OF_TEXT} occurs {number:,} times in the text, and is read "
                f"as ordinary text. If it separates documents, use "
                f"--document_separator '{END_OF_TEXT}'"
            )
    elif not is_divided(source.text_files, separator):
        log.warning(
            f"document_separator = {separator!r}: no file of {source.name} contains more than one "
            f"document. Check the separator, or leave it out"
        )


def count_occurrences(paths: Iterable[Path], phrases: Sequence[str]) -> dict[str, int]:
    """Return how often each of some phrases occurs in files."""
    numbers = dict.fromkeys(phrases, 0)
    for path in paths:
        # The end of a block may contain the beginning of a phrase.
        end_of_block = dict.fromkeys(phrases, b"")
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                for phrase in phrases:
                    encoded = phrase.encode()
                    text = end_of_block[phrase] + block
                    numbers[phrase] += text.count(encoded)
                    end_of_block[phrase] = text[1 - len(encoded) :]
    return numbers


class Separation(NamedTuple):
    """A separator that text files contain, although the recipe does not name one.

    Attributes:
        separator: the value of document_separator.
        documents: number of documents with this separator.
    """

    separator: str
    documents: int


def find_separation(source: FoundSource) -> Separation | None:
    """Return the separator that divides text files into documents, or None if there is none.

    ``END_OF_TEXT`` is a separator if most of its occurrences are next to a line break. Elsewhere it
    may be a part of a sentence.
    """
    config = source.config
    if not source.text_files or config.document_separator is not None:
        return None
    line_breaks = [f"\n{END_OF_TEXT}", f"{END_OF_TEXT}\n", f"{END_OF_TEXT}\r\n"]
    numbers = count_occurrences(source.text_files, [END_OF_TEXT, *line_breaks])
    num_line_breaks = sum(numbers[phrase] for phrase in line_breaks)
    if not numbers[END_OF_TEXT] or 2 * num_line_breaks < numbers[END_OF_TEXT]:
        return None
    num_documents = count_documents(source.text_files, END_OF_TEXT)
    if num_documents <= len(source.text_files):
        return None
    if not config.validation_files:
        separator = separated_text.parse_separator(END_OF_TEXT)
        divided = separated_text.DividedText(
            list(source.text_files), separator, config.validation_fraction
        )
        try:
            num_train_documents = divided.num_train_documents
        except BadInput:  # no document is left for validation
            return None
        if not num_train_documents:
            return None
    return Separation(END_OF_TEXT, num_documents)


def count_documents(paths: Iterable[Path], document_separator: str | None) -> int:
    """Return the number of documents of text files.

    Args:
        paths: the files.
        document_separator: the recipe key. With None, each file is one document.
    """
    if document_separator is None:
        return len(list(paths))
    separator = separated_text.parse_separator(document_separator)
    number = 0
    for path in paths:
        for document in separated_text.split_file(path, separator):
            number += document.begins_document
    return number


def is_divided(paths: Iterable[Path], document_separator: str) -> bool:
    """Return whether a text file contains more than one document."""
    separator = separated_text.parse_separator(document_separator)
    for path in paths:
        num_documents = 0
        for document in separated_text.split_file(path, separator):
            num_documents += document.begins_document
            if num_documents > 1:
                return True
    return False
