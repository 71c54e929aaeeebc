"""Make texts of several sizes from manuals in English and Russian, for experiments with own text.

The manuals are packages of Debian 12. This loads and unpacks them, without installing them, into
the folder ``manuals`` (400 MB):

    apt-get download gnome-user-docs libreoffice-help-en-us libreoffice-help-ru gimp-help-en \\
        gimp-help-ru debian-handbook installation-guide-amd64 aptitude-doc-en aptitude-doc-ru \\
        debian-faq debian-faq-ru gnucash-docs postgresql-doc-15
    for package in *.deb; do dpkg-deb -x "$package" manuals; done

The results of 2026-11-28 use gnome-user-docs 43.0-2, libreoffice-help-* 4:7.4.7-1+deb12u14,
gimp-help-* 2.10.34-2, debian-handbook 11.20220922, installation-guide-amd64 20230508+deb12u1,
aptitude-doc-* 0.8.13-5, debian-faq* 11.1, gnucash-docs 4.13-1 and postgresql-doc-15
15.20-0+deb12u1.

A page is a document. Paragraphs in another script, navigation, and everything that occurred before
(licenses, repeated paragraphs, equal pages) are removed. Very short and very long documents are
left out. The order of the documents is random, but always the same. The first ones are held out. A
smaller text is the beginning of a larger one. This module is not a program.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from ursa_minor.base.files import write_text

# The pages of each script, below the folder into which the packages were unpacked.
PAGES = {
    "latin": (
        "usr/share/help/C/**/*.page",
        "usr/share/libreoffice/help/en-US/text/**/*.html",
        "usr/share/gimp/2.0/help/en/*.html",
        "usr/share/doc/debian-handbook/html/en-US/*.html",
        "usr/share/doc/installation-guide-amd64/en/*.html",
        "usr/share/doc/aptitude/html/en/*.html",
        "usr/share/doc/debian/FAQ/*.en.html",
        "usr/share/doc/gnucash-docs/gnucash-*-en/**/*.html",
        "usr/share/doc/postgresql-doc-15/html/*.html",
    ),
    "cyrillic": (
        "usr/share/help/ru/**/*.page",
        "usr/share/libreoffice/help/ru/text/**/*.html",
        "usr/share/gimp/2.0/help/ru/*.html",
        "usr/share/doc/debian-handbook/html/ru-RU/*.html",
        "usr/share/doc/installation-guide-amd64/ru/*.html",
        "usr/share/doc/aptitude/html/ru/*.html",
        "usr/share/doc/debian/FAQ/ru/*.html",
    ),
}
LETTERS = {"latin": re.compile("[A-Za-z]"), "cyrillic": re.compile("[А-Яа-яЁё]")}

HIDDEN_ELEMENTS = frozenset(
    ("head", "script", "style", "nav", "header", "aside", "footer", "noscript", "info", "comment")
)
# All elements but these start a new line.
INLINE_HTML = frozenset(
    ("a", "abbr", "acronym", "b", "cite", "code", "em", "font", "i", "kbd", "q", "small", "span")
)
MORE_INLINE_HTML = frozenset(("strong", "sub", "sup", "tt", "u", "var"))
INLINE_MALLARD = frozenset(
    ("app", "cmd", "email", "file", "gui", "guiseq", "input", "key", "keyseq", "link", "media")
)
MORE_INLINE_MALLARD = frozenset(("output", "sys"))
INLINE_ELEMENTS = INLINE_HTML | MORE_INLINE_HTML | INLINE_MALLARD | MORE_INLINE_MALLARD

LONG_PARAGRAPH = 40  # characters; a paragraph of this length occurs only once in the text
MOST_OCCURRENCES = 30  # a shorter one that occurs in more pages is navigation
SHORTEST_DOCUMENT = 400  # bytes
LONGEST_DOCUMENT = 20_000  # bytes; larger pages would be much of a small text
HELD_OUT_BYTES = 120_000
SHUFFLE_SEED = 72


class _Paragraphs(HTMLParser):
    """Collect the visible text of an HTML or Mallard page. Every block starts a new line."""

    def __init__(self):
        super().__init__()
        self.hidden_depth = 0
        self.pieces: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in HIDDEN_ELEMENTS:
            self.hidden_depth += 1
        if tag not in INLINE_ELEMENTS:
            self.pieces.append("\n")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in INLINE_ELEMENTS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN_ELEMENTS:
            self.hidden_depth -= 1
        if tag not in INLINE_ELEMENTS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self.hidden_depth <= 0:
            self.pieces.append(re.sub(r"\s+", " ", data))


def paragraphs(page: str) -> list[str]:
    """Return the visible paragraphs of an HTML or Mallard page, in order."""
    parser = _Paragraphs()
    parser.feed(page)
    parser.close()
    lines = "".join(parser.pieces).split("\n")
    stripped_lines = [re.sub(" +", " ", line).strip() for line in lines]
    return [line for line in stripped_lines if line]


def is_in_script(paragraph: str, script: str) -> bool:
    """Return whether more than half of the letters of a paragraph belong to a script."""
    num_letters = sum(character.isalpha() for character in paragraph)
    num_of_script = len(LETTERS[script].findall(paragraph))
    return num_of_script > num_letters / 2


def remove_repetitions(pages: Iterable[Sequence[str]]) -> list[str]:
    """Join the paragraphs of each page into a document, and remove repeated paragraphs.

    Args:
        pages: the paragraphs of each page.

    Returns:
        The documents that are left. A paragraph of ``LONG_PARAGRAPH`` characters is left out of all
        pages but the first, a shorter one out of all pages if it occurs in more than
        ``MOST_OCCURRENCES``. Documents of fewer than ``SHORTEST_DOCUMENT`` or more than
        ``LONGEST_DOCUMENT`` bytes are left out.
    """
    pages = list(pages)
    occurrences: Counter[str] = Counter()
    for page in pages:
        occurrences.update(set(page))

    seen = set()
    documents = []
    for page in pages:
        remaining = []
        for paragraph in page:
            is_long = len(paragraph) >= LONG_PARAGRAPH
            if is_long and paragraph in seen:
                continue
            if not is_long and occurrences[paragraph] > MOST_OCCURRENCES:
                continue
            seen.add(paragraph)
            remaining.append(paragraph)
        document = "\n".join(remaining)
        if SHORTEST_DOCUMENT <= len(document.encode()) <= LONGEST_DOCUMENT:
            documents.append(document)
    return list(dict.fromkeys(documents))


def read_documents(manuals: Path, script: str) -> list[str]:
    """Return the documents of the manuals of a script in random order, always the same one.

    Raises:
        SystemExit: a manual is missing.
    """
    pages = []
    for pattern in PAGES[script]:
        paths = sorted(manuals.glob(pattern))
        if not paths:
            raise SystemExit(
                f"error: {manuals} has no {pattern}. Unpack the packages of "
                f"benchmarks/manuals.py into it."
            )
        for path in paths:
            page = paragraphs(path.read_text("utf-8", errors="replace"))
            pages.append([line for line in page if is_in_script(line, script)])
    documents = remove_repetitions(pages)
    random.Random(SHUFFLE_SEED).shuffle(documents)
    return documents


@dataclass(frozen=True)
class Text:
    """The documents for training, and the held-out documents."""

    train: list[str]
    held_out: list[str]


def cut(documents: Sequence[str], num_bytes: int) -> Text:
    """Hold out the first documents, and take the next ones for training.

    Args:
        num_bytes: size of the training documents; the last one may be larger than the rest of it
            and is then left out.

    Raises:
        ValueError: the documents have fewer bytes.
    """
    held_out, position = _take(documents, 0, HELD_OUT_BYTES)
    train, position = _take(documents, position, num_bytes)
    if position == len(documents):
        raise ValueError(f"the documents have fewer than {num_bytes:,} bytes")
    return Text(train, held_out)


def write_documents(path: Path, documents: Iterable[str]) -> None:
    """Write documents as JSON lines with the column ``text``, atomically."""
    lines = [json.dumps({"text": document}, ensure_ascii=False) for document in documents]
    write_text(path, "\n".join(lines) + "\n")


def _take(documents: Sequence[str], start: int, num_bytes: int) -> tuple[list[str], int]:
    """Return consecutive documents of at most ``num_bytes``, and the position after them."""
    position = start
    remaining_bytes = num_bytes
    while position < len(documents):
        remaining_bytes -= len(documents[position].encode())
        if remaining_bytes < 0:
            break
        position += 1
    return list(documents[start:position]), position
