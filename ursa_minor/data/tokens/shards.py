"""Token files on disk: their formats, how they are written, the manifest that lists them, whether they are whole.

A shard of ours is llm.c's: 1,024 bytes of header, then the ids of one split, little-endian uint16 or uint32. Files
of llm.c, modded-nanogpt, build-nanogpt and nanoGPT are read where they lie; nothing is written beside them. Nothing
here unpickles. A fault is BadInput: file, what stands there, the rule, the remedy.
"""

import functools
import hashlib
import json
import logging
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import BinaryIO, Literal

import numpy as np
from numpy.lib import format as npy

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput

log = logging.getLogger(__name__)

# llm.c, dev/data/data_common.py: 256 int32 of header: magic, version, number of tokens, zeros; then the ids.
HEADER_BYTES = 1024
FORMATS: dict[tuple[int, int], np.dtype] = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
MANIFEST = "manifest.json"
# nanoGPT, data/*/prepare.py: uint16 ids and nothing else, so that only the name shows what they are.
HEADERLESS = ("train.bin", "val.bin")
# build-nanogpt's fineweb.py saves uint16. int32 is read as uint32: a negative id becomes one that is beyond every
# vocabulary, and is refused as such.
NPY_DTYPES: dict[str, np.dtype] = {"<u2": np.dtype("<u2"), "<u4": np.dtype("<u4"), "<i4": np.dtype("<u4")}
SPLIT_WORDS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
OUR_NAME = re.compile(r"(train|val|test)_\d{5}_\d{5}\.bin")
# FUSE with direct_io maps a file for one process ("c") but does not share the map ("r").
MAPPING_MODES: tuple[Literal["r", "c"], ...] = ("r", "c")
RESTORE = "put the old file back, or fetch or prepare it again"


def open_ids(path: Path, tokens: int | None = None) -> tuple[np.ndarray, int]:
    """Map a token file of any format that we know: its ids, (tokens,) unsigned and read-only, and where they begin (bytes).

    Raises BadInput for any other file, for one that is damaged, cut short or cannot be read, and where ``tokens``, the
    manifest's count, is another.
    """
    try:
        with open(path, "rb") as file:
            head, size = file.read(12), os.fstat(file.fileno()).st_size
        magic, version, count = struct.unpack("<3i", head.ljust(12, b"\0"))
        if (magic, version) in FORMATS:
            offset, dtype = HEADER_BYTES, FORMATS[magic, version]
        elif path.suffix == ".npy" or head.startswith(npy.MAGIC_PREFIX):
            array, offset = _map_npy(path)
            if array.ndim != 1 or array.dtype.str not in NPY_DTYPES:
                found = f"shape {array.shape}, dtype {array.dtype.str}: ids are (tokens,) and {', '.join(NPY_DTYPES)}"
                raise ValueError(f"{found}; save it with np.save(path, ids.astype(np.uint16))")
            dtype = NPY_DTYPES[array.dtype.str]
            count = len(array)
        elif path.name in HEADERLESS and magic not in dict(FORMATS.keys()):
            offset, dtype, count = 0, np.dtype("<u2"), size // 2
        else:
            known = " or ".join(f"{magic}, {version} (llm.c)" for magic, version in FORMATS)
            rule = f"a token file begins with {known} or is named *.npy, {' or '.join(HEADERLESS)}"
            raise ValueError(f"begins with {magic}, {version}: {rule}")
        if size != (expected := offset + count * dtype.itemsize):
            raise ValueError(f"{count} tokens take {expected} bytes, the file has {size}: cut short or damaged")
        if tokens not in (None, count):
            raise ValueError(f"has {count} tokens, {MANIFEST} says {tokens}: changed since then")
        mapped = _map(path, dtype, offset, count)
    except OSError as error:  # among them: too many open files
        raise BadInput(f"{path}: cannot be read: {error.strerror}; {RESTORE}") from None
    except Exception as error:  # of a damaged .npy, ast and tokenize raise their own
        raise BadInput(f"{path}: {error}; {RESTORE}") from None
    return np.asarray(mapped), offset  # a slice of the np.memmap class costs microseconds more


def _map(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    """Map the ids of a file into memory, or read them where the file system cannot map files."""
    for mode in MAPPING_MODES:
        with files.skipping(files.NO_MAPPING):
            mapped = np.memmap(path, dtype, mode=mode, offset=offset, shape=(count,))
            mapped.setflags(write=False)
            return mapped
    _log_reading(path.parent)
    ids = np.fromfile(path, dtype, count=count, offset=offset)
    ids.setflags(write=False)
    return ids


def _map_npy(path: Path) -> tuple[np.ndarray, int]:
    """Map or read a file in NumPy's format; return its array, and the bytes before it."""
    for mode in MAPPING_MODES:
        with files.skipping(files.NO_MAPPING):
            mapped = npy.open_memmap(path, mode=mode)
            return mapped, mapped.offset
    with open(path, "rb") as file:
        array = npy.read_array(file, allow_pickle=False)
        return array, file.tell() - array.nbytes


@functools.cache
def _log_reading(folder: Path) -> None:
    log.warning(
        f"{folder}: this file system cannot map files into memory, so its token files are read into memory. If that is "
        f"too much, copy the folder to another file system and name it with --data_dir"
    )


class ShardWriter:
    """Writes the ids of one source file (``part``) of one split as shards.

    Shards are ``{split}_{part}_{number}.bin``, both five digits, so that sorted names are the order; llm.c's word
    for validation is val. One that is not finished has a name that begins with a dot, and no magic.

    Args:
        first_number: number of the first shard to write: how many of this part are there already.
        bytes_per_token: (vocabulary,) int64, bytes of text that each id stands for; up to 65,536 of them the ids are
            uint16, above it uint32.
        shard_tokens: most tokens of a shard; llm.c's header counts with an int32.
    """

    def __init__(
        self, folder: Path, split: str, part: int, first_number: int, bytes_per_token: np.ndarray, shard_tokens: int
    ):
        if part > 99_999:
            raise BadInput(f"{folder}: source file {part}: shard names count to 99999; join the source files")
        word = "val" if split == "validation" else split
        self.folder, self.prefix, self.number = folder, f"{word}_{part:05d}_", first_number
        self.bytes_per_token, self.shard_tokens = bytes_per_token, shard_tokens
        self.format, self.dtype = list(FORMATS.items())[len(bytes_per_token) > 2**16]
        self._file: BinaryIO | None = None

    def fill(self, ids: np.ndarray, begin: int = 0) -> Iterator[tuple[dict, int]]:
        """Write a document's ids from ``begin`` on; yield the row of each shard that they fill, and where they continue."""
        while begin < len(ids):
            if self._file is None:
                self._path = self.folder / f"{self.prefix}{self.number:05d}.bin"
                self._temporary = self._path.with_name(f".{self._path.name}.tmp")
                self._tokens, self._text_bytes = 0, 0
                self._file = open(self._temporary, "wb")
                self._file.seek(HEADER_BYTES)  # what is left out are zeros
            some = ids[begin : begin + self.shard_tokens - self._tokens]
            with files.naming(self._path):
                self._file.write(some.astype(self.dtype).data)
            self._tokens += len(some)
            self._text_bytes += int(self.bytes_per_token[some].sum())
            begin += len(some)
            if self._tokens == self.shard_tokens and (row := self.finish()):
                yield row, begin

    def finish(self) -> dict | None:
        """Make the current shard durable; return its row: file, tokens, text_bytes, sha256. None if it is empty."""
        if self._file is None:
            return None
        with files.naming(self._path):
            self._file.seek(0)
            self._file.write(struct.pack("<3i", *self.format, self._tokens))
            self._file.close()
        row = {"file": self._path.name, "tokens": self._tokens, "text_bytes": self._text_bytes}
        row["sha256"] = files.sha256(self._temporary)
        files.fsync(self._temporary)
        self._temporary.replace(self._path)
        files.fsync(self.folder)
        self._file, self.number = None, self.number + 1
        return row


def part_of(row: dict) -> int:
    """Return the number of the source file that a shard of ours was made from."""
    return int(row["file"].split("_")[1])


def read_manifest(folder: Path) -> dict | None:
    """Return a folder's manifest, complete or not, or None when there is none. Raises BadInput for a damaged one."""
    path = folder / MANIFEST
    try:
        manifest = files.read_json(path)
        manifest["tokenizer"], manifest["complete"]  # noqa: B018  (raises KeyError)
        for row in (row for rows in manifest["splits"].values() for row in rows):
            if Path(row["file"]).name != row["file"] or type(row["tokens"]) is not int or row["tokens"] < 0:
                raise ValueError(f"{row}: file is a name in this folder, tokens is a count")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}; change its permissions") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: not a manifest ({error!r}); delete the folder and prepare it again") from None
    return manifest


def is_complete(folder: Path) -> bool:
    """Return whether a folder of shards is prepared to its end."""
    return (read_manifest(folder) or {"complete": False})["complete"]


def describe_folder(folder: Path) -> dict:
    """Return the manifest of a folder of token files: its own, or one made from the names of others' files.

    Others' files end in .bin or .npy and have train, val, validation or test between underscores, or alone
    (fineweb_train_000001.bin, edufineweb_val_000000.npy, train.bin). Raises BadInput for a folder that is missing,
    or that is finished and has no train or no validation.
    """
    if not folder.is_dir():
        raise BadInput(f"data_dir = {folder}: no such folder; prepare_data.py makes one")
    manifest = read_manifest(folder)
    if manifest is None:
        manifest = {"splits": _splits_by_name(folder), "tokenizer": None, "complete": True}
    for split, word in (("train", "train"), ("validation", "val")):
        if manifest["complete"] and not manifest["splits"].get(split):
            raise BadInput(
                f"data_dir = {folder}: holds no {split} shards (.bin or .npy with the word {word} between underscores); "
                f"give a folder that prepare_data.py, llm.c, modded-nanogpt, build-nanogpt or nanoGPT wrote"
            )
    return manifest


def _splits_by_name(folder: Path) -> dict[str, list[dict]]:
    splits = {}
    for path in sorted(folder.iterdir()):
        if OUR_NAME.fullmatch(path.name):
            ours = f"{path.name} is a shard of ours, but there is no {MANIFEST}"
            raise BadInput(f"data_dir = {folder}: {ours}: not prepared to the end; run prepare_data.py again")
        if split := split_of(path):
            splits.setdefault(split, []).append({"file": path.name, "tokens": len(open_ids(path)[0])})
    return splits


def split_of(path: PurePath) -> str | None:
    """Return the split that the name of a file of ids says, None where it says none. Raises BadInput where it says two."""
    # macOS puts a "._fineweb_train_000001.bin" beside each file that it copies to other file systems.
    if path.suffix not in (".bin", ".npy") or path.name.startswith("."):
        return None
    named = {SPLIT_WORDS[word] for word in path.stem.split("_") if word in SPLIT_WORDS}
    if len(named) > 1:
        raise BadInput(f"{path}: its name says {' and '.join(sorted(named))}; rename it to say one")
    return next(iter(named), None)


def fingerprint(rows: list[dict]) -> str:
    """Return a SHA-256 of a split's contents: of its shards' tokens and hashes, in order, whatever folder they are in."""
    contents = [[row["file"], row["tokens"], row.get("sha256")] for row in rows]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def contents(manifest: dict) -> dict:
    """Return the identity of a train split so far, which a resumed run must find again; the split may still grow."""
    rows = manifest["splits"]["train"]
    found = {"shards": len(rows), "fingerprint": fingerprint(rows), "complete": manifest["complete"]}
    return found | {"revision": manifest.get("revision")}


def refuse_other_contents(where: Path, before: dict, manifest: dict) -> None:
    """Raise BadInput unless the train split begins with what it had ``before``, and ends there if it had ended."""
    rows = manifest["splits"]["train"]
    ended = not before["complete"] or (manifest["complete"] and len(rows) == before["shards"])
    if ended and fingerprint(rows[: before["shards"]]) == before["fingerprint"]:
        return
    remedy = "give the same text"
    if (revision := before.get("revision")) and revision != manifest.get("revision"):
        remedy = f"give --dataset_revision {revision}"
    raise BadInput(f"{where}: was trained on other data than this; {remedy}, or another --run_name")


def refuse_changed(folder: Path, rows: list[dict]) -> None:
    """Hash each shard that is newer than the manifest, as make would; raise BadInput for those that changed.

    Files that are missing are passed over: opening them shows what is wrong.
    """
    there = [row for row in rows if (folder / row["file"]).exists()]
    if lines := [line for _, line in faults(folder, there, folder / MANIFEST)]:
        raise BadInput(lines)


def faults(folder: Path, rows: list[dict], newer_than: Path | None = None) -> Iterator[tuple[dict, str]]:
    """Yield each row whose file is missing, or is not what the row says, with its fault.

    Args:
        newer_than: hash only what is newer than this file, as make would.
    """
    for row in rows:
        path = folder / row["file"]
        try:
            open_ids(path, row["tokens"])
            if "sha256" not in row:  # of others' files
                continue
            newer = newer_than is None or path.stat().st_mtime_ns > newer_than.stat().st_mtime_ns
            if newer and files.sha256(path) != row["sha256"]:
                raise BadInput(f"{path}: its SHA-256 is not the one of {MANIFEST}: changed since then; {RESTORE}")
        except BadInput as error:
            yield row, str(error)
