"""UTF-8 text files: each is a document, of which every byte is kept. Long ones come in pieces."""

import codecs
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources import encodings
from ursa_minor.data.sources.columns import NoText

# The longest text without a split point. Encoding needs about 130 bytes of memory per character.
MAX_UNSPLIT_CHARACTERS = 2**26
# Matches up to the last place where a text can be split for GPT-2's tokenizer: before a space or
# newline that does not follow white space. GPT-2's regex never joins the two sides.
GPT2_SPLIT_POINT = re.compile(r"(?s).*(?<=\S)(?=[ \n])")

NUL_SAMPLE_BYTES = 2**16  # size of the text around a NUL that is examined
CONTROL_BYTES = re.compile(rb"[\x01-\x08\x0e-\x1a\x7f]")  # control characters that texts lack

BLOCK_BYTES = 2**20  # about the size of the pieces of a long file
NOT_ASCII = re.compile(rb"[\x80-\xff]")


def pieces(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[str]:
    """Yield the text of a UTF-8 file in pieces.

    The ids of the pieces, joined, are the ids of the complete text for a tokenizer that splits
    words like GPT-2. For other tokenizers, ``split_points.pieces`` joins these pieces to others.

    Raises:
        BadInput: the file cannot be read, contains a NUL or a byte that is not UTF-8, or is too
            long and cannot be split.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    text = ""  # text that is decoded, but not yielded yet
    offset = 0  # position of the next block in the file, in bytes
    try:
        with open(path, "rb") as file:
            while True:
                block = file.read(block_bytes)
                nul = block.find(0)
                if nul >= 0:
                    raise _not_text(path, offset + nul)

                undecoded, _ = decoder.getstate()  # the beginning of a character
                decoded_from = offset - len(undecoded)
                num_searched = len(text)
                text += decoder.decode(block, final=not block)
                offset += len(block)
                if not block:
                    break

                match = GPT2_SPLIT_POINT.match(text, num_searched)
                if match:
                    yield text[: match.end()]
                    text = text[match.end() :]
                elif len(text) > MAX_UNSPLIT_CHARACTERS:
                    raise BadInput(
                        f"{path} contains no space and no line break in the "
                        f"{MAX_UNSPLIT_CHARACTERS:,} characters before byte {offset}, so it cannot "
                        f"be split into pieces. Insert line breaks, for example: "
                        f"fold -w 1000 {shlex.quote(str(path))} > new.txt"
                    )
        if text:
            yield text
    except UnicodeDecodeError as error:
        raise _not_text(path, decoded_from + error.start) from None
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read ({error.strerror}). Check its permissions and the disk, or use "
            f"another copy of the file"
        ) from None


def _not_text(path: Path, offset: int) -> BadInput:
    """Return the error for a NUL, or for a byte that is not UTF-8, at an offset in a file."""
    with path.open("rb") as file:
        head = file.read(encodings.HEAD_BYTES)
        file.seek(offset)
        byte = file.read(1)[0]
    problem = f"{path} is not UTF-8 text: byte 0x{byte:02x} at offset {offset}"
    if byte == 0:
        fix = encodings.recognize(str(path), head) or _fix_of_nul(path, offset)
        return BadInput(f"{problem} does not occur in texts. {fix}")
    sample, is_end = _sample(path, offset)
    explanation = encodings.explain(
        str(path), head, sample, is_end=is_end, drop_end=f"head -c {offset}"
    )
    return BadInput(f"{problem} is invalid. {explanation}")


def _sample(path: Path, offset: int) -> tuple[bytes, bool]:
    """Return bytes around the first invalid one, and whether they contain the end of the file.

    If there are characters before it that are not ASCII, the sample starts with some of them,
    because they show whether the rest of the file is UTF-8.
    """
    with path.open("rb") as file:
        first_letter = 0  # position of the first byte that is not ASCII
        while first_letter < offset:
            block = file.read(BLOCK_BYTES)
            match = NOT_ASCII.search(block)
            if match:
                first_letter += match.start()
                break
            first_letter += len(block)
        file.seek(first_letter)
        num_valid = min(encodings.VALID_SAMPLE_BYTES, offset - first_letter)
        valid_bytes = file.read(max(0, num_valid))
        file.seek(offset)
        sample = file.read(encodings.SAMPLE_BYTES)
        is_end = not file.read(1)
    # The valid text may have been cut inside a character.
    valid_text = valid_bytes.decode("utf-8", "ignore")
    return valid_text.encode() + sample, is_end


def _fix_of_nul(path: Path, offset: int) -> str:
    """Return what to do about a file with a NUL at an offset."""
    with path.open("rb") as file:
        file.seek(max(0, offset - NUL_SAMPLE_BYTES // 2))
        sample = file.read(NUL_SAMPLE_BYTES)
    # In UTF-16 every other byte may be 0. In a damaged text, a few places or its end are.
    without_nul = sample.replace(b"\0", b"")
    num_places = len(re.findall(rb"\0+", sample))
    num_errors = without_nul.decode("utf-8", "replace").count("\ufffd")  # also at the two ends
    has_control = CONTROL_BYTES.search(without_nul) is not None
    is_text = 10 * num_places < len(without_nul) and num_errors <= 2 and not has_control
    if not is_text:
        return "Leave out this file"
    return (
        f"If the file is text, remove such bytes: "
        f"tr -d '\\000' < {shlex.quote(str(path))} > new.txt"
    )


def problems(paths: Iterable[Path]) -> list[str]:
    """Read text files to their end, and return the messages of those that cannot be read."""
    lines: list[str] = []
    for path in paths:
        try:
            for _ in pieces(path):
                pass
        except BadInput as error:
            lines += error.lines
    return lines


def rows(paths: Iterable[Path]) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of text files, and for each piece whether it is the first of its file."""
    for path in paths:
        for number, text in enumerate(pieces(path)):
            yield text, number == 0


def small_files(paths: Iterable[Path]) -> Iterator[tuple[str | NoText, bool]]:
    """Yield the complete text of each file, and True, because it begins a document.

    It is NoText if the file is not UTF-8. The standard library contains a few such files for
    its own tests.
    """
    for path in paths:
        try:
            yield path.read_bytes().decode("utf-8"), True
        except UnicodeDecodeError:
            yield NoText("bytes that are not UTF-8"), True
