"""Documents of a source, in a fixed order, split into train, validation (and test) by a fixed rule.

Two sources live here: the running Python's own standard library, and the user's text files. Each is found first
(names and hashes, cheap), so that a run can tell whether its shards exist, and read later.
"""

import hashlib
import json
import sysconfig
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from glob import glob
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlparse

from . import files
from .errors import BadInput

STDLIB = "python_stdlib"
TEST_FOLDERS = {"test", "tests", "idle_test", "testdata", "test_data"}
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "node_modules"}
DOWNLOAD_TIMEOUT_SECONDS = 60
FORMAT = 1  # raise when the same source would be read to other documents


@dataclass(frozen=True)
class Source:
    """A source that was found: where its shards belong and which files make each split."""

    name: str
    identity: dict
    split_files: dict[str, list[Path]] = field(repr=False)
    validation_fraction: float = 0.0  # > 0: the last share of the train files' text is the validation split
    skip_undecodable: bool = False

    @property
    def folder_name(self) -> str:
        """``<source>-<fingerprint>``: another text, split or tokenizer is another folder."""
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()
        return f"{self.name}-{digest[:12]}"

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield (split, text) of every document, split by split."""
        if not self.validation_fraction:
            for split, paths in self.split_files.items():
                for path in paths:
                    text = read_text(path, skip_undecodable=self.skip_undecodable)
                    if text is not None:
                        yield split, text
            return
        texts = [read_text(path) for path in self.split_files["train"]]
        left = int(sum(map(len, texts)) * (1 - self.validation_fraction))  # characters; nanoGPT's rule
        tail = []
        for text in texts:
            if text[:left]:
                yield "train", text[:left]
            if text[left:]:
                tail.append(text[left:])
            left = max(0, left - len(text))
        for text in tail:
            yield "validation", text


def find_source(
    *,
    dataset_name: str | None,
    data_files: list[str] | None,
    validation_files: list[str] | None,
    validation_fraction: float,
    tokenizer: dict,
    download_dir: Path,
) -> Source:
    """Find the files of a source without reading them as text.

    Args:
        tokenizer: what decides the ids (its name, or how it is made): part of the fingerprint.
        download_dir: where files given by URL are kept.

    Raises BadInput when nothing is found or a source is not one of ours.
    """
    identity = {"format": FORMAT, "tokenizer": tokenizer}
    if data_files:
        train = find_files("data_files", data_files, download_dir)
        held_out = find_files("validation_files", validation_files, download_dir) if validation_files else []
        trained_on = {path.resolve() for path in train}
        if twice := [path for path in held_out if path.resolve() in trained_on]:
            raise BadInput(f"validation_files: {twice[0]} is also in data_files: it would be trained on")
        identity["files"] = [[path.name, files.sha256(path)] for path in train]
        identity["validation"] = [[p.name, files.sha256(p)] for p in held_out] or validation_fraction
        split_files = {"train": train} | ({"validation": held_out} if held_out else {})
        return Source(train[0].stem, identity, split_files, 0.0 if held_out else validation_fraction)
    if dataset_name == STDLIB:
        split_files = stdlib_files(validation_fraction)
        identity["files"] = [[split, p.name, files.sha256(p)] for split, ps in split_files.items() for p in ps]
        return Source(STDLIB, identity, split_files, skip_undecodable=True)
    if not dataset_name:
        raise BadInput("no data: give --data_files FILE... (text) or --data_dir FOLDER (token shards)")
    raise BadInput(
        f"dataset_name = {dataset_name}: this version reads no data set from the Hub yet, and no shards or text were "
        f"given. Use --data_dir FOLDER (token shards, ours or llm.c's fineweb_train_*.bin), --data_files FILE... "
        f"(text), or --recipe recipes/quickstart.yaml (needs no data)"
    )


def find_files(key: str, patterns: list[str], download_dir: Path) -> list[Path]:
    """Return the files behind paths, globs and URLs, sorted within each pattern, each once."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        if pattern.startswith(("https://", "http://")):
            matches = [download(pattern, download_dir)]
        else:
            matches = sorted(Path(name) for name in glob(pattern, recursive=True)) or [Path(pattern)]
        for path in matches:
            if path.is_dir():
                raise BadInput(f"{key}: {path} is a folder; give its files, for example '{path}/**/*.txt'")
            if not path.is_file():
                raise BadInput(f"{key}: {path}: no such file")
            if not path.stat().st_size:
                raise BadInput(f"{key}: {path}: is empty")
            found[path] = None
    return list(found)


def download(url: str, folder: Path) -> Path:
    """Fetch a text file once; later calls return the kept copy. Raises BadInput when it cannot be had."""
    name = Path(urlparse(url).path).name or "text"
    path = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:12]}-{name}"
    if path.is_file():
        return path
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_SECONDS) as answer:
            body = answer.read()
    except (OSError, ValueError, HTTPException) as error:
        raise BadInput(f"data_files: {url}: cannot be fetched ({error}). Give a file: --data_files FILE") from None
    folder.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as temporary:
        temporary.write_bytes(body)
    return path


def read_text(path: Path, *, skip_undecodable: bool = False) -> str | None:
    """Return a file's text with every byte kept (no newline is changed); None when it may be skipped.

    Raises BadInput with the offset of the first byte that is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        if skip_undecodable:
            return None
        raise BadInput(
            f"{path}: offset {error.start}: byte 0x{error.object[error.start]:02x} is not UTF-8; convert it, for "
            f"example: iconv -f LATIN1 -t UTF-8 {path.name} > new.txt"
        ) from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None


def stdlib_files(validation_fraction: float) -> dict[str, list[Path]]:
    """Return the standard library's Python files by split, sorted by path.

    A file's split is a hash of its path, so another machine with this Python splits alike. The library's own tests,
    where they are installed (Debian leaves them out), are a ``test`` split, thinned by the same hash.
    """
    root = Path(sysconfig.get_path("stdlib"))
    splits: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts) or not path.stat().st_size:
            continue
        digest = hashlib.sha256(relative.as_posix().encode()).digest()
        held_out = int.from_bytes(digest[:8]) < validation_fraction * 2**64
        if TEST_FOLDERS & set(relative.parts[:-1]):
            if held_out:
                splits["test"].append(path)
        else:
            splits["validation" if held_out else "train"].append(path)
    if not splits["train"] or not splits["validation"]:
        raise BadInput(f"dataset_name = {STDLIB}: {root} holds no Python source to train on; use --data_files FILE...")
    return {split: paths for split, paths in splits.items() if paths}
