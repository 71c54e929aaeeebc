"""Explain why a file is not UTF-8 text, and name the command that converts it.

Tests run these commands. Each writes a new file.
"""

import codecs
import re
from collections import Counter
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ursa_minor.base import shell
from ursa_minor.base.wording import pluralize
from ursa_minor.recipe.source_kind import COMPRESSED_SUFFIXES, URL_SCHEMES, path_of

SAMPLE_BYTES = 2**20  # number of bytes after the first invalid one that are examined
VALID_SAMPLE_BYTES = 2**16  # number of bytes before it that are examined
HEAD_BYTES = 2**16  # number of bytes by which the type of a file is recognized
EXCERPT_CHARACTERS = 40
DROP_LAST_LINE = "sed '$d'"  # for a table that ends inside a character; see ``explain``

BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
# Encodings of texts from before UTF-8, as the WHATWG Encoding Standard lists them: Python's name
# of each, and that of iconv. Where one contains another (CP949 and EUC-KR), it is the larger one.
LATIN_ENCODINGS = {
    "cp1252": "CP1252",  # contains all characters of LATIN1
    "cp1250": "CP1250",
    "iso8859_2": "ISO-8859-2",
    "cp1254": "CP1254",
    "cp1257": "CP1257",
}
WEST_EUROPEAN = "cp1252"
OTHER_ENCODINGS = {
    "gb18030": "GB18030",
    "big5": "BIG5",
    "cp950": "CP950",
    "cp932": "CP932",
    "euc_jp": "EUC-JP",
    "cp949": "CP949",
    "cp1251": "CP1251",
    "cp866": "CP866",
    "koi8_r": "KOI8-R",
    "koi8_u": "KOI8-U",
    "iso8859_5": "ISO-8859-5",
    "cp1253": "CP1253",
    "iso8859_7": "ISO-8859-7",
    "cp1255": "CP1255",
    "iso8859_8": "ISO-8859-8",
    "cp1256": "CP1256",
    "iso8859_6": "ISO-8859-6",
    "cp874": "CP874",
}
ICONV_NAMES = LATIN_ENCODINGS | OTHER_ENCODINGS
# Documents that may consist of ASCII only.
ASCII_DOCUMENTS = (b"%PDF-", b"{\\rtf")
# The letters with accents of each language. They distinguish the encodings of the Latin script, to
# which charset-normalizer often gives the same rating.
ACCENTED_LETTERS = (
    "äöüß",  # German
    "àâæçéèêëîïôœùûüÿ",  # French
    "áéíñóúüº",  # Spanish
    "àáâãçéêíóôõúü",  # Portuguese
    "àèéìòù",  # Italian
    "àçèéíïòóúü",  # Catalan
    "áéëíïóöúü",  # Dutch
    "åäöéæø",  # Danish, Finnish, Norwegian, Swedish
    "áæðéíóöúýþ",  # Icelandic
    "ąćęłńóśźż",  # Polish
    "áčďéěíňóřšťúůýž",  # Czech
    "áäčďéíĺľňóôŕšťúýž",  # Slovak
    "áéíóöőúüű",  # Hungarian
    "čćđšž",  # Croatian, Slovene
    "ăâîşţ",  # Romanian
    "çğıöşü\u0307âîû",  # Turkish; the lower case of İ has a combining dot
    "ąčęėįšųūž",  # Lithuanian
    "āčēģīķļņšūž",  # Latvian
    "äõöüšž",  # Estonian
)
# Other characters that occur in the texts of all these languages.
PUNCTUATION = "\u00a0–—‘’‚“”„…«»‹›•·°§€£©®™²³½×¿¡"
# A guess is accepted up to this chaos, which charset-normalizer measures from 0 to 1.
MAX_CHAOS = 0.25
# The characters outside ASCII of a UTF-8 text in the Latin script: letters and punctuation. A text
# in another encoding may contain some UTF-8 sequences by chance, which are usually not among them.
LATIN_CHARACTERS = re.compile("[\u00a0-\u024f\u2010-\u2044]")


NOT_ASCII = re.compile("[^\x00-\x7f]")
INVALID_BYTE = re.compile("[\udc80-\udcff]")  # as surrogateescape decodes it
INVALID_RUN = re.compile("[\udc80-\udcff]+")
CONTROL_CHARACTER = re.compile("[\x00-\x08\x0e-\x1f\x7f]")
MAX_CONTROL_SHARE = 0.01  # a file with a larger share is not text
LATIN_RUN = 2  # in a text in the Latin script, fewer invalid bytes than this follow each other


class FileType(NamedTuple):
    """A type of file that is recognized by its first bytes.

    Attributes:
        signature: the first bytes.
        description: the noun for messages.
        fix: what to do.
        program: reads the file from standard input and writes its text. "" if there is none.
        marker: bytes that also occur in the first ``HEAD_BYTES``.
        new_suffix: suffix of the file that the program writes. None keeps the old suffix.
    """

    signature: bytes
    description: str
    fix: str
    program: str = ""
    marker: bytes = b""
    new_suffix: str | None = ".txt"


def _zip_document(marker: bytes, description: str, pandoc_format: str) -> FileType:
    """Return a type of document that is a ZIP archive and that pandoc reads."""
    program = f"pandoc -f {pandoc_format} -t plain --wrap=none"
    fix = "Extract its text with pandoc"
    return FileType(ZIP_SIGNATURE, description, fix, program, marker)


def _compressed(signature: bytes, description: str, program: str) -> FileType:
    return FileType(signature, description, "Unpack it", program, new_suffix=None)


ZIP_SIGNATURE = b"PK\x03\x04"
SAVE_AS_TEXT = "Save it as plain text in UTF-8"
FILE_TYPES = (
    FileType(
        b"%PDF-",
        "a PDF document",
        "Extract its text (pip install pdfminer.six)",
        "pdf2txt.py /dev/stdin",
    ),
    FileType(
        b"{\\rtf",
        "an RTF document",
        "Extract its text with pandoc",
        "pandoc -f rtf -t plain --wrap=none",
    ),
    _zip_document(b"word/", "a Word document (docx)", "docx"),
    _zip_document(b"application/epub+zip", "an EPUB book", "epub"),
    _zip_document(b"application/vnd.oasis.opendocument.text", "an OpenDocument text", "odt"),
    FileType(
        ZIP_SIGNATURE, "a ZIP archive or an office document", "Unpack it, or save its text as UTF-8"
    ),
    FileType(b"\xd0\xcf\x11\xe0", "an old office document, such as Word's .doc", SAVE_AS_TEXT),
    _compressed(b"\x1f\x8b", "compressed with gzip", "gzip -dc"),
    _compressed(b"BZh", "compressed with bzip2", "bzip2 -dc"),
    _compressed(b"\xfd7zXZ\x00", "compressed with xz", "xz -dc"),
    _compressed(b"\x28\xb5\x2f\xfd", "compressed with Zstandard", "zstd -dc"),
    FileType(b"ARROW1", "an Arrow table", "Rename it to *.arrow, or use --data_format arrow"),
    FileType(
        b"\xff\xff\xff\xff", "an Arrow table", "Rename it to *.arrow, or use --data_format arrow"
    ),
    FileType(b"PAR1", "a Parquet table", "Rename it to *.parquet, or use --data_format parquet"),
)


def conversion(name: str, program: str, suffix: str | None = None) -> str:
    """Return the command that converts a file into a new file.

    Args:
        name: the file. The command for a file on the Hub converts a local copy.
        program: a command that reads standard input and writes standard output.
        suffix: suffix of the new file, or None for that of the old one.
    """
    path = Path(path_of(name))
    if name.startswith(URL_SCHEMES):
        path = Path(path.name)
    unpack = ""
    uncompressed = path
    if path.suffix.lower() in COMPRESSED_SUFFIXES:
        programs = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
        unpack = f"{programs[path.suffix.lower()]} -dc"
        uncompressed = path.with_suffix("")
    new_suffix = uncompressed.suffix if suffix is None else suffix
    return shell.filter_command(program, path, new_suffix, unpack)


def recognize(name: str, head: bytes) -> str | None:
    """Return what kind of file this is instead of text in UTF-8, and how to convert it.

    Args:
        name: the file.
        head: its first bytes, at most ``HEAD_BYTES``.

    Returns:
        Sentences, or None if the first bytes do not show that it is another kind of file.
    """
    for file_type in FILE_TYPES:
        if not head.startswith(file_type.signature) or file_type.marker not in head:
            continue
        sentences = f"The file is {file_type.description}. {file_type.fix}"
        if file_type.program:
            sentences += f": {conversion(name, file_type.program, file_type.new_suffix)}"
        return sentences
    encoding = wide_encoding(head)
    if encoding is not None:
        return f"The file is {encoding} text. Convert it: {_iconv(name, encoding)}"
    return None


def wide_encoding(head: bytes) -> str | None:
    """Return the name of a UTF-16 or UTF-32 encoding, or None for other bytes.

    UTF-16 without a byte order mark is recognized by zeros that are mostly at odd or mostly at even
    positions. At least line breaks and spaces have them.
    """
    for mark, encoding in BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return encoding
    even_zeros = head[::2].count(0)
    odd_zeros = head[1::2].count(0)
    if max(even_zeros, odd_zeros) <= 2 * min(even_zeros, odd_zeros):
        return None
    encoding = "UTF-16LE" if odd_zeros > even_zeros else "UTF-16BE"
    text = head[: len(head) // 2 * 2].decode(encoding, "replace")
    num_spaces = sum(letter.isspace() for letter in text)
    num_printable = sum(letter.isprintable() for letter in text)
    is_text = num_spaces > 0 and num_printable + num_spaces > 0.95 * len(text)
    return encoding if is_text else None


def lines_before(name: str, number: int) -> bytes:
    """Return the first lines of a table that are not ASCII, for a sample (see ``explain``).

    They show whether the beginning of a file is UTF-8.

    Args:
        name: the file.
        number: number of the line, from 0, before which to stop.
    """
    from ursa_minor.data.sources import remote  # its imports are slow

    lines = []
    num_bytes = 0
    with remote.open_file(name) as raw:
        file = BufferedReader(remote.decompress(name, raw))
        for line in islice(file, number):
            if not line.isascii():
                lines.append(line)
                num_bytes += len(line)
            if num_bytes > VALID_SAMPLE_BYTES:
                break
    return b"".join(lines)


def explain(name: str, head: bytes, sample: bytes, *, is_end: bool, drop_end: str) -> str:
    """Return why the bytes of a file are not valid UTF-8, and how to convert the file.

    Args:
        name: the file.
        head: see ``recognize``.
        sample: bytes of the file that contain the first invalid one.
        is_end: whether the sample contains the end of the file.
        drop_end: a program that copies standard input to standard output without its end, for a
            file that ends inside a character.

    Returns:
        Sentences. The last one ends with a command, if there is one.
    """
    file_type = recognize(name, head)
    if file_type is not None:
        return file_type
    first_invalid = 0
    try:
        sample.decode()
    except UnicodeDecodeError as error:
        first_invalid = error.start
        if is_end and error.reason == "unexpected end of data":
            return (
                "The file ends inside a character, so it seems to be truncated. Download it "
                f"again, or drop the end: {conversion(name, drop_end)}"
            )
    last_line_end = sample.rfind(b"\n") + 1
    if not is_end and last_line_end > first_invalid:
        sample = sample[:last_line_end]  # do not end inside a character

    decoded = sample.decode("utf-8", "surrogateescape")
    num_invalid = len(INVALID_BYTE.findall(decoded))
    num_sequences = len(NOT_ASCII.findall(decoded)) - num_invalid
    if num_sequences >= num_invalid:
        return (
            f"The file is UTF-8 text with damaged characters (this part of it contains "
            f"{pluralize(num_invalid, 'invalid byte', 'invalid bytes')} and "
            f"{pluralize(num_sequences, 'valid character', 'valid characters')} outside ASCII). "
            f"Use an undamaged copy, or remove the invalid bytes: {_without_invalid_bytes(name)}"
        )
    for candidates in _candidates(decoded):
        guess = _guess(sample, candidates)
        if guess is not None:
            return (
                f"The file seems to be encoded in {guess.encoding} (charset-normalizer's "
                f"confidence: {guess.confidence:.0%}). In this encoding it contains "
                f"{guess.excerpt!r}. If this is right, convert it: {_iconv(name, guess.encoding)}"
            )
    is_text = len(CONTROL_CHARACTER.findall(decoded)) < MAX_CONTROL_SHARE * len(decoded)
    if num_sequences and is_text:
        return (
            "The file contains UTF-8 and text in another encoding. Convert the texts that it was "
            f"made of, or remove the invalid bytes: {_without_invalid_bytes(name)}"
        )
    return (
        "Its encoding was not recognized, and it may not be text. Leave out this file, or convert "
        "it to UTF-8 (iconv -l lists encodings)"
    )


def _candidates(decoded: str) -> list[list[str]]:
    """Return the possible encodings of a text, in the order in which they are tried.

    Args:
        decoded: the text, decoded as UTF-8 with surrogates for the invalid bytes.
    """
    latin = list(LATIN_ENCODINGS)
    if NOT_ASCII.search(INVALID_BYTE.sub("", decoded)):
        latin.remove(WEST_EUROPEAN)
    has_utf8_letters = LATIN_CHARACTERS.search(decoded) is not None
    # In the Latin script, most letters with accents are surrounded by ASCII letters.
    num_runs = len(INVALID_RUN.findall(decoded))
    num_invalid = len(INVALID_BYTE.findall(decoded))
    is_latin = num_invalid < LATIN_RUN * num_runs
    if is_latin and has_utf8_letters:
        return []
    if is_latin:
        return [latin, list(OTHER_ENCODINGS)]
    if has_utf8_letters:
        return [list(OTHER_ENCODINGS)]
    return [list(OTHER_ENCODINGS), latin]


def _iconv(name: str, encoding: str) -> str:
    return conversion(name, f"iconv -f {encoding} -t UTF-8")


def _without_invalid_bytes(name: str) -> str:
    return conversion(name, "iconv -c -f UTF-8 -t UTF-8")


class _Guess(NamedTuple):
    """A guess of the encoding of a text.

    Attributes:
        encoding: iconv's name.
        confidence: 1 minus the chaos that charset-normalizer measured, as in its ``detect``.
        excerpt: the text around the first character that is not ASCII.
    """

    encoding: str
    confidence: float
    excerpt: str


def _guess(sample: bytes, candidates: list[str]) -> _Guess | None:
    """Guess the encoding of a text, or return None if no candidate fits."""
    from charset_normalizer import from_bytes  # most runs do not need it

    # The threshold applies to each part of the sample.
    best = from_bytes(sample, cp_isolation=candidates, threshold=2 * MAX_CHAOS).best()
    if best is None or best.chaos > MAX_CHAOS:
        return None
    encoding = best.encoding
    if encoding in LATIN_ENCODINGS:
        latin = [name for name in LATIN_ENCODINGS if name in candidates]
        encoding = max(latin, key=lambda name: _language_share(sample, name))
    text = sample.decode(encoding, "replace")
    return _Guess(ICONV_NAMES[encoding], 1 - best.chaos, _excerpt(text))


def _language_share(sample: bytes, encoding: str) -> float:
    """Return the share of the letters with accents that belong to one language.

    Args:
        sample: text in the Latin script.
        encoding: one of ``LATIN_ENCODINGS``.

    Returns:
        The share for the language with the highest one. 0 if the text cannot be decoded.
    """
    try:
        text = sample.decode(encoding).lower()
    except UnicodeDecodeError:
        return 0.0
    counts = Counter(re.sub(f"[\x00-\x7f{PUNCTUATION}]", "", text))
    shares = []
    for letters in ACCENTED_LETTERS:
        num_letters = sum(counts[letter] for letter in letters)
        shares.append(num_letters / max(1, counts.total()))
    return max(shares)


def _excerpt(text: str) -> str:
    """Return the text around the first character that is not ASCII, in one line."""
    first_letter = re.search("[^\x00-\x7f]", text)
    position = first_letter.start() if first_letter else 0
    start = max(0, position - EXCERPT_CHARACTERS // 2)
    return " ".join(text[start : start + EXCERPT_CHARACTERS].split())
