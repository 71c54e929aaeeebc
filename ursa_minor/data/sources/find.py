"""A run's sources: found by name, size and hash, split by a fixed rule, and read as documents in a fixed order.

A source is either text (the user's files, or the running Python's own standard library: each file is one document,
every byte kept) or tables (a data set of the Hub, Parquet, JSON lines, CSV: each row is one), which ``stream`` reads.
It is found without being read, so that a run knows whether its shards exist. What is cut into shards by itself is
a part: (name, read), where ``read(row)`` yields (text, begins) from that row on: the text or None where a row has
none, and whether it begins a document. All text files of a split are one part; a table's file is one.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from glob import has_magic
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources.files import UNPACK, find_files, no_such_file, reader_of, resolved_name
from ursa_minor.data.sources.formats import text as text_format
from ursa_minor.data.sources.remote import shown_name
from ursa_minor.data.sources.stdlib import stdlib_files
from ursa_minor.recipe import keys
from ursa_minor.recipe.keys import DataSource
from ursa_minor.recipe.source_kind import STDLIB, URL_SCHEMES, path_of

UNPACK |= {
    ".br": "brotli -d",
    ".lz4": "lz4 -d",
    ".gz": "gunzip -k",
    ".bz2": "bunzip2 -k",
    ".xz": "unxz -k",
    ".zst": "unzstd",
}
NAME_BYTES = 240  # of a source in its folder's name, which has 255 in all
NO_DATA = (
    "no data: give --data_files FILE... (text, Parquet, JSON lines) or --data_dir FOLDER (shards)"
)
NO_VALIDATION = (
    "validation_fraction = 0: there would be nothing to validate on; give a share such as 0.1"
)
FORMAT = 2  # raise when the same source would be read to other documents or cut into other shards
FORMAT_VERSIONS = {"csv": 3}  # formats of single kinds
TOKENIZER_FILE = re.compile(
    r"(tokenizer|vocab|merges|special_tokens|added_tokens|spiece|sentencepiece)"
)

# A text (str), or its ids ((n,) uint32), or None; whether a document begins with it.
SourceRow = tuple[Any, bool]
Part = tuple[str, Callable[[int], Iterator[SourceRow]]]


@dataclass(frozen=True)
class FoundSource:
    """A source that was found: where its shards belong, and how to read it."""

    config: DataSource
    name: str
    identity: Mapping[str, Any]
    parts: dict[str, list[Part]] | None = field(default=None, repr=False)  # of text, by split
    files: Mapping[str, list[str]] | None = (
        None  # of tables, by split; {}: a data set of the Hub, which has them
    )
    most_tokens: int | None = (
        None  # no tokenizer makes more of it; None: not known without reading it
    )
    repository: tuple[str, str | None, str] | None = (
        None  # or token files of the Hub: id, revision, folder
    )

    @property
    def folder(self) -> Path:
        """``<prepared_data_dir>/<name>-<fingerprint>``: another text, split or tokenizer is another folder."""
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()
        name = self.name.encode()[:NAME_BYTES].decode(errors="ignore")
        return Path(self.config.prepared_data_dir) / f"{name}-{digest[:12]}"


def find_source(config: DataSource) -> FoundSource:
    """Find one of ``recipe.data.resolved_sources`` without reading it as text, and without the network but for a text behind a URL.

    A tokenizer in a local folder is part of the identity by its contents, so that the shards are found again whatever
    its path is.

    Raises BadInput when nothing is found.
    """
    source = _find(config)
    contents = _tokenizer_contents(config.tokenizer)
    if "tokenizer" not in source.identity or contents is None:
        return source
    tokenizer = {**source.identity["tokenizer"], "tokenizer": contents}
    return dataclasses.replace(source, identity={**source.identity, "tokenizer": tokenizer})


def _tokenizer_contents(name: str) -> list[list[str]] | None:
    """Return the names and hashes of a local tokenizer's files, or None if it is not in a local folder."""
    folder = Path(name)
    if name in keys.TRAINED_TOKENIZERS or not folder.is_dir():
        return None
    return [
        [path.name, files.sha256(path)]
        for path in sorted(folder.iterdir())
        if TOKENIZER_FILE.match(path.name)
    ]


def _find(config: DataSource) -> FoundSource:
    if config.data_dir:
        return _repository(config)
    if config.validation_files and not config.data_files:
        raise BadInput(
            "validation_files: go with data_files only; any other source keeps a part of its own"
        )
    if config.data_files:
        kind, splits = _own_files(config)
        return _table_files(config, kind, splits) if kind else _text_files(config, splits)
    if config.dataset_name == STDLIB:
        return _stdlib(config)
    if config.dataset_name:
        return _hub_dataset(config)
    raise BadInput(NO_DATA)


def has_urls(config: DataSource) -> bool:
    """Return whether a source's files lie elsewhere: to find it may then fetch them."""
    return any(
        name.startswith(URL_SCHEMES)
        for name in [*(config.data_files or ()), *(config.validation_files or ())]
    )


def check_source_exists(config: DataSource) -> None:
    """Raise BadInput where no source is stated, or a file of it that lies here is not there: what is known at once."""
    if not (config.data_dir or config.data_files or config.dataset_name):
        raise BadInput(NO_DATA)
    for key in ("data_files", "validation_files"):
        for pattern in getattr(config, key) or ():
            if (
                not pattern.startswith(URL_SCHEMES)
                and not has_magic(pattern)
                and not os.path.lexists(pattern)
            ):
                raise BadInput(no_such_file(key, pattern))


def _identity(config: DataSource, **own: Any) -> dict[str, Any]:
    """Return the identity of a source's shards: the part of all kinds, and ``own`` of its kind."""
    is_bpe = config.tokenizer == "bpe"
    tokenizer = {
        "tokenizer": config.tokenizer,
        "size": config.tokenizer_vocab_size if is_bpe else None,
        "split": config.tokenizer_split if is_bpe else None,
    }
    return {
        "format": FORMAT,
        "tokenizer": tokenizer,
        "token_column": config.token_column,
        "shard_tokens": config.shard_tokens,
        "limit_tokens": config.limit_tokens,
        **own,
    }


def _repository(config: DataSource) -> FoundSource:
    address = config.data_dir or ""
    place = keys.REPOSITORY.fullmatch(address)
    assert place is not None  # rules.py has seen it
    revision, folder = place[2] and unquote(place[2]), place[3] or ""
    identity = {
        "format": FORMAT,
        "data_dir": address.rstrip("/"),
        "limit_tokens": config.limit_tokens,
    }
    return FoundSource(
        config, place[1].rpartition("/")[2], identity, repository=(place[1], revision, folder)
    )


def _own_files(config: DataSource) -> tuple[str | None, dict[str, list[str]]]:
    """Return the files' reader, None for text, and their names by split."""
    kept = Path(config.prepared_data_dir)
    train = find_files("data_files", config.data_files or [], kept)
    held_out = find_files("validation_files", config.validation_files or [], kept)
    if twice := set(map(resolved_name, train)) & set(map(resolved_name, held_out)):
        raise BadInput(
            f"validation_files: {min(twice)} is also in data_files: it would be trained on"
        )
    kinds = {
        reader.name if (reader := reader_of(name)) else None: name for name in [*train, *held_out]
    }
    if len(kinds) > 1:
        raise BadInput(
            f"data_files: {' and '.join(sorted(kinds.values()))} are of different kinds; give one kind"
        )
    return next(iter(kinds)), {"train": train} | ({"validation": held_out} if held_out else {})


def _text_files(config: DataSource, splits: dict[str, list[str]]) -> FoundSource:
    if "validation" not in splits and not config.validation_fraction:
        raise BadInput(f"{NO_VALIDATION}, or --validation_files FILE")
    paths = {split: [*map(Path, names)] for split, names in splits.items()}
    hashes = {split: [[p.name, files.sha256(p)] for p in found] for split, found in paths.items()}
    identity = _identity(config, **{"validation": config.validation_fraction} | hashes)
    parts = _text_parts(paths, config.validation_fraction)
    return FoundSource(
        config, paths["train"][0].stem, identity, parts, most_tokens=_most_tokens(paths["train"])
    )


def _table_files(config: DataSource, kind: str, splits: dict[str, list[str]]) -> FoundSource:
    identity = _identity(
        config, validation=config.validation_tokens, text_column=config.text_column
    )
    identity |= {"format": FORMAT_VERSIONS.get(kind, FORMAT)} | {
        split: [*map(_stamp, names)] for split, names in splits.items()
    }
    name = Path(path_of(splits["train"][0])).name.split(".")[0]
    return FoundSource(config, _folder_name(name), identity, files=splits)


def _stdlib(config: DataSource) -> FoundSource:
    if not config.validation_fraction:
        raise BadInput(NO_VALIDATION)
    paths = stdlib_files(config.validation_fraction)
    hashes = [[split, p.name, files.sha256(p)] for split, found in paths.items() for p in found]
    parts = {
        split: [(STDLIB, _reading(text_format.whole_files, found))]
        for split, found in paths.items()
    }
    most_tokens = _most_tokens(paths["train"])
    return FoundSource(
        config, STDLIB, _identity(config, files=hashes), parts, most_tokens=most_tokens
    )


def _hub_dataset(config: DataSource) -> FoundSource:
    asked = ("dataset_name", "dataset_config_name", "dataset_revision", "text_column")
    identity = _identity(
        config,
        validation=config.validation_tokens,
        **{name: getattr(config, name) for name in asked},
    )
    return FoundSource(
        config, _folder_name(str(config.dataset_name).split("/")[-1]), identity, files={}
    )


def _folder_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def _text_parts(paths: dict[str, list[Path]], validation_fraction: float) -> dict[str, list[Part]]:
    name = paths["train"][0].name
    if "validation" in paths:
        return {
            split: [(name, _reading(text_format.rows, found))] for split, found in paths.items()
        }

    def rows(held_out: bool) -> Iterator[SourceRow]:
        lengths = (len(piece) for path in paths["train"] for piece in text_format.pieces(path))
        # The position in characters, as in nanoGPT.
        left, begun = (
            int(sum(lengths) * (1 - validation_fraction)),
            False,
        )
        for whole, begins in text_format.rows(paths["train"]):
            if piece := whole[left:] if held_out else whole[:left]:
                yield piece, begins or not begun
                begun = True
            left = max(0, left - len(whole))
            if not left and not held_out:
                return

    return {"train": [(name, _reading(rows, False))], "validation": [(name, _reading(rows, True))]}


def _reading(
    rows: Callable[..., Iterator[SourceRow]], *args
) -> Callable[[int], Iterator[SourceRow]]:
    return lambda start: islice(rows(*args), start, None)


def _most_tokens(paths: list[Path]) -> int:
    return sum(path.stat().st_size + 1 for path in paths)


def _stamp(name: str) -> list:
    """Name, size and time of change: tables are too big to be hashed at each start."""
    if name.startswith(URL_SCHEMES):
        return [shown_name(name)]
    stat = Path(name).stat()
    return [shown_name(name), stat.st_size, stat.st_mtime_ns]
