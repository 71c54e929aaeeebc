"""Text files: UTF-8, every byte kept, each one document; a long one comes in pieces."""

import codecs
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from ursa_minor.base.errors import BadInput

# Longest text without a split point, because its ids take about 130 bytes per character.
MAX_UNSPLIT_CHARACTERS = 2**26
# Each matches from anywhere to the last place where a text may be cut.
# Before a space or newline that follows no white space: GPT-2's regex never joins the two sides.
GPT2_SPLIT_POINT = re.compile(r"(?s).*(?<=\S)(?=[ \n])")

BLOCK_BYTES = 2**20  # a long file is read in pieces of about this size: rows of one document


def pieces(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[str]:
    """Yield a UTF-8 file's text, every byte kept, in pieces whose ids, joined, are those of the whole for GPT-2's split.

    For others ``split_points.pieces`` joins them. Raises BadInput with the offset of a byte that is NUL or not UTF-8.
    """
    decoder, text, offset = codecs.getincrementaldecoder("utf-8")(), "", 0
    try:
        with open(path, "rb") as file:
            while True:
                block = file.read(block_bytes)
                if (nul := block.find(0)) >= 0:
                    raise _not_text(path, offset + nul)
                begin, searched = offset - len(decoder.getstate()[0]), len(text)
                text += decoder.decode(block, final=not block)
                offset += len(block)
                if not block:
                    break
                if found := GPT2_SPLIT_POINT.match(text, searched):
                    yield text[: found.end()]
                    text = text[found.end() :]
                elif len(text) > MAX_UNSPLIT_CHARACTERS:
                    raise BadInput(
                        f"{path}: offset {offset}: no space and no line break in {MAX_UNSPLIT_CHARACTERS:,} characters "
                        f"before it; break its lines, for example: fold -w 1000 {path} > new.txt"
                    )
        if text:
            yield text
    except UnicodeDecodeError as error:
        raise _not_text(path, begin + error.start) from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None


def _not_text(path: Path, offset: int) -> BadInput:
    """Return the error of a byte that no UTF-8 text has, or of a NUL, which no text has."""
    with path.open("rb") as file:
        encoding = (
            "UTF-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "LATIN1"
        )
        file.seek(offset)
        byte = file.read(1)[0]
    fix = f"if it is text, convert it, for example: iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > new.txt"
    if not byte and encoding != "UTF-16":
        fix = "it is not text; leave it out"
    return BadInput(f"{path}: offset {offset}: byte 0x{byte:02x} is not UTF-8 text; {fix}")


def rows(paths: Iterable[Path]) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of text files, and whether each begins its file."""
    for path in paths:
        for number, text in enumerate(pieces(path)):
            yield text, number == 0


def whole_files(paths: Iterable[Path]) -> Iterator[tuple[str | None, bool]]:
    """Yield small files whole; one that is not UTF-8 (the library has a few, for its own tests) is a row without text."""
    for path in paths:
        try:
            yield path.read_bytes().decode("utf-8"), True
        except UnicodeDecodeError:
            yield None, True
