"""Split text files into documents at a separator.

A file is still read in pieces. A document is one row of a source. Only a document that is longer
than ``LONG_DOCUMENT_CHARACTERS`` is divided into several rows, like a long file without a
separator.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import pluralize
from ursa_minor.data.sources.formats import text as text_format
from ursa_minor.recipe import keys

LONG_DOCUMENT_CHARACTERS = 2**20
BYTE_ORDER_MARK = "\ufeff"
BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")


@dataclass(frozen=True)
class Separator:
    """A separator of documents.

    One line break on each side of it belongs to it as well. Each line break of the separator
    matches both "\\n" and "\\r\\n".

    Attributes:
        value: the recipe's value of document_separator.
        pattern: matches the separator. A line break at the end of the separator is not part of the
            match, so that it can also be the line break at the beginning of the next one.
        begins_with_line_break: whether the match begins with the line break before the separator.
        max_length: largest number of characters of a separator. It is 0 for blank lines, because
            a run of white space is never divided between two pieces of a file.
    """

    value: str
    pattern: re.Pattern[str]
    begins_with_line_break: bool
    max_length: int


class DocumentPiece(NamedTuple):
    """A document, or a piece of a long one.

    Attributes:
        text: its text.
        begins_document: whether it is the beginning of a document.
        position: number of characters of the file before it.
    """

    text: str
    begins_document: bool
    position: int


def parse_separator(value: str) -> Separator:
    """Return the separator that a value of ``document_separator`` means."""
    if value == keys.BLANK_LINE:
        return Separator(value, BLANK_LINES, begins_with_line_break=True, max_length=0)
    text = keys.separator_text(value)
    max_length = len(text) + text.count("\n")  # each line break may be "\r\n"
    begins_with_line_break = text.startswith("\n")
    middle = text[begins_with_line_break:]
    lookahead = ""
    if middle.endswith("\n") and middle.strip("\n"):
        middle = middle[:-1]
        lookahead = r"(?=\r?\n)"
    pattern = r"\r?\n".join(re.escape(line) for line in middle.split("\n")) + lookahead
    if begins_with_line_break:
        pattern = "\n" + pattern
    return Separator(value, re.compile(pattern), begins_with_line_break, max_length)


class DocumentSplitter:
    """Split the text of one file into documents.

    Args:
        separator: the separator of the documents.
    """

    def __init__(self, separator: Separator):
        self._separator = separator
        # The text that is not yielded yet. The beginning of a file counts as a line break, so one
        # is added in front of it. Like the line break after a separator, it is removed again.
        self._text = "\n"
        self._position = -1  # number of characters of the file before this text
        self._begins_document = True

    def add(self, piece: str) -> Iterator[DocumentPiece]:
        """Yield the documents that end in the next piece of the file."""
        self._text += piece
        yield from self._complete_documents()
        if len(self._text) <= LONG_DOCUMENT_CHARACTERS:
            return
        # The last characters may be the beginning of a separator.
        end = len(self._text) - self._separator.max_length
        match = text_format.GPT2_SPLIT_POINT.match(self._text, 0, end)
        if match:
            for document in self._documents(0, match.end()):
                yield document
                self._begins_document = False
            self._remove(match.end())

    def finish(self) -> Iterator[DocumentPiece]:
        """Yield the last documents of the file. Its end counts as a line break as well."""
        has_line_break = self._text.endswith("\n")
        if not has_line_break:
            self._text += "\n"
        yield from self._complete_documents()
        if not has_line_break:
            self._text = self._text.removesuffix("\n")
        yield from self._documents(0, len(self._text))

    def _complete_documents(self) -> Iterator[DocumentPiece]:
        """Yield the documents that are followed by a separator, and remove them from the text."""
        begin = 0
        for match in self._separator.pattern.finditer(self._text):
            end = match.start()
            if self._separator.begins_with_line_break:
                end += 1
            yield from self._documents(begin, self._without_line_break(begin, end))
            begin = match.end()
            self._begins_document = True
        self._remove(begin)

    def _without_line_break(self, begin: int, end: int) -> int:
        """Return the end of a document without the line break at its end."""
        for line_break in ("\r\n", "\n"):
            if self._text.endswith(line_break, begin, end):
                return end - len(line_break)
        return end

    def _documents(self, begin: int, end: int) -> Iterator[DocumentPiece]:
        """Yield the document, or the piece of one, between two places, unless it is empty."""
        if self._begins_document:
            for line_break in ("\r\n", "\n"):
                if self._text.startswith(line_break, begin, end):
                    begin += len(line_break)
                    break
        text = self._text[begin:end]
        is_empty = not text
        if self._begins_document:
            is_empty = not text.lstrip(BYTE_ORDER_MARK).strip()
        if not is_empty:
            yield DocumentPiece(text, self._begins_document, self._position + begin)

    def _remove(self, num_characters: int) -> None:
        """Remove the beginning of the text."""
        self._text = self._text[num_characters:]
        self._position += num_characters


def split_file(path: Path, separator: Separator) -> Iterator[DocumentPiece]:
    """Yield the documents of a text file.

    Raises:
        BadInput: the file cannot be read as text.
    """
    splitter = DocumentSplitter(separator)
    for piece in text_format.pieces(path):
        yield from splitter.add(piece)
    yield from splitter.finish()


def rows(paths: Iterable[Path], separator: Separator) -> Iterator[tuple[str, bool]]:
    """Yield the documents of text files, and for each whether it is the beginning of a document.

    It is not for the later pieces of a long document.
    """
    for path in paths:
        for text, begins_document, _ in split_file(path, separator):
            yield text, begins_document


class DividedText:
    """Text files of which the last documents are the validation split.

    Args:
        paths: the text files.
        separator: the separator of the documents.
        validation_fraction: share of the characters after which the validation split begins, at
            the first document that begins there or later.
    """

    def __init__(self, paths: list[Path], separator: Separator, validation_fraction: float):
        self._paths = paths
        self._separator = separator
        self._validation_fraction = validation_fraction

    @functools.cached_property
    def num_train_documents(self) -> int:
        """The number of documents before the validation split.

        Raises:
            BadInput: no document begins in the part of the text for validation.
        """
        sizes = [sum(map(len, text_format.pieces(path))) for path in self._paths]
        num_left = int(sum(sizes) * (1 - self._validation_fraction))
        num_documents = 0
        for path, size in zip(self._paths, sizes, strict=True):
            for document in split_file(path, self._separator):
                if document.begins_document and document.position >= num_left:
                    return num_documents
                num_documents += document.begins_document
            num_left -= size
        fix = "Use a larger --validation_fraction"
        if num_documents <= len(self._paths):
            fix = "Check the separator"
        raise BadInput(
            f"document_separator = {self._separator.value!r}: {self._paths[0]} is split into "
            f"{pluralize(num_documents, 'document', 'documents')}, none of which begins in the "
            f"last {self._validation_fraction:.3g} of the text (validation_fraction), so no text "
            f"is left for validation. {fix}, or validate on other files: --validation_files FILE"
        )

    def rows(self, split: str) -> Iterator[tuple[str, bool]]:
        """Yield the rows of a split, "train" or "validation". See the function ``rows``."""
        num_train_documents = self.num_train_documents
        num_documents = 0
        for text, begins_document in rows(self._paths, self._separator):
            num_documents += begins_document
            is_train = num_documents <= num_train_documents
            if is_train and split == "train":
                yield text, begins_document
            if not is_train and split == "validation":
                yield text, begins_document
            if not is_train and split == "train":
                return
