"""Log notes on the contents of a source that is prepared."""

import logging
from collections.abc import Iterable
from pathlib import Path

from ursa_minor.data.sources import separated_text
from ursa_minor.data.sources.find import FoundSource

log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
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
        number = count_occurrences(source.text_files, END_OF_TEXT.encode())
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


def count_occurrences(paths: Iterable[Path], phrase: bytes) -> int:
    """Return how often a phrase occurs in files."""
    number = 0
    for path in paths:
        end_of_block = b""  # it may contain the beginning of the phrase
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                block = end_of_block + block
                number += block.count(phrase)
                end_of_block = block[1 - len(phrase) :]
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
