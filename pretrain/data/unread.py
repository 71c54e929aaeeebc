"""Files that are not text: what packed them or how they are encoded, and the command that makes text of them."""

import codecs
import contextlib
import re
import shlex
import tarfile
from io import BytesIO
from pathlib import Path

from pretrain.base.errors import BadInput

# By how a name ends: the command. What packs a single file leaves it under the name before that.
UNPACK = {".tar": "tar -xf", ".tgz": "tar -xf", ".zip": "unzip", ".7z": "7z x", ".rar": "unrar x", ".br": "brotli -d"}
UNPACK |= {".lz4": "lz4 -d", ".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zst": "unzstd"}
MAGIC = {b"PK\x03\x04": ".zip", b"7z\xbc\xaf\x27\x1c": ".7z", b"Rar!\x1a\x07": ".rar", b"\x04\x22\x4d\x18": ".lz4"}
MAGIC |= {b"\x1f\x8b\x08": ".gz", b"BZh91AY&SY": ".bz2", b"\xfd7zXZ\x00": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
HEAD_BYTES = 2**20  # more than a block of bzip2, which is read whole to see whether a tar is inside
BOMS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32"}
BOMS |= {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}  # last: one is the beginning of UTF-32's
CONTROL = re.compile(b"[\x00-\x08\x0e-\x1a\x7f]")


def packing(head: bytes) -> str | None:
    """Return the archive or compression of a file with these first bytes, as a key of UNPACK."""
    with contextlib.suppress(EOFError):
        if head.strip(b"\0") and tarfile.is_tarfile(BytesIO(head)):  # compressed or not
            return ".tar"
    return next((suffix for magic, suffix in MAGIC.items() if head.startswith(magic)), None)


def refuse_packed(what: str, name: str, path: Path | None = None) -> None:
    """Raise BadInput with the command that unpacks a file, known by its name or, where it is here (path), by its content.

    ``what`` begins the message: the key and the file.
    """
    stem, found = Path(name.lower()).stem, Path(name.lower()).suffix
    if found in (".gz", ".bz2", ".xz", ".zst") and stem.endswith(".tar"):
        found = ".tar"
    if path:
        with path.open("rb") as file:
            found = packing(file.read(HEAD_BYTES)) or found
    if found in UNPACK:
        unpack = command(found, str(path or Path(name).name))
        raise BadInput(f"{what}: is packed; {'' if path else 'fetch it, and '}give what this unpacks: {unpack}")


def command(packed: str, name: str) -> str:
    """Return the command that unpacks a file, whatever its name is."""
    ends = name.lower().endswith(packed) or packed in (".tar", ".zip", ".7z", ".rar")
    unpack, quoted = UNPACK[packed], shlex.quote(name)
    return f"{unpack} {quoted}" if ends else f"{unpack} < {quoted} > new{Path(name).suffix or '.txt'}"


def not_text(path: Path, offset: int, byte: int) -> BadInput:
    """Return the error of a byte that no UTF-8 text has, or of a NUL, with a remedy where the file may be text."""
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(max(0, offset - 2048))
        around = file.read(4096)
    encoding = next((name for bom, name in BOMS.items() if head.startswith(bom)), None)
    if encoding or (byte and 100 * len(CONTROL.findall(around)) <= len(around)):
        remedy = f"convert it, for example: iconv -f {encoding or 'LATIN1'} -t UTF-8 {shlex.quote(str(path))} > new.txt"
    elif byte:
        remedy = "it is not text; leave it out"
    else:
        remedy = f"no text has one; leave it out, or only the NULs: tr -d '\\000' < {shlex.quote(str(path))} > new.txt"
    return BadInput(f"{path}: offset {offset}: {f'byte 0x{byte:02x} is not UTF-8' if byte else 'a NUL byte'}; {remedy}")
