"""The manifest of a folder of token shards: read, write and compare it, and find damaged shards."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens.shards import MANIFEST, OUR_NAME, RESTORE, Shard, open_ids, split_of

NULLABLE = ("revision", "tokenizer", "file")  # written as null; other keys without a value are not


@dataclass(frozen=True)
class TokenizerReference:
    """The tokenizer that the shards of a folder were encoded with."""

    name: str
    fingerprint: str
    size: int


@dataclass(frozen=True)
class Position:
    """A place in the text of a source.

    Attributes:
        part: number of the source file.
        row: number of the document in this file.
        token: how many ids of this document come before the place.
    """

    part: int
    row: int
    token: int


@dataclass(frozen=True, kw_only=True)
class Cursor(Position):
    """The position at which a preparation continues.

    Attributes:
        file: name of the source file at this position. None at the end of the source.
    """

    file: str | None


@dataclass(kw_only=True)
class Manifest:
    """The contents of a folder of shards. The fields are the keys of the JSON, in the same order.

    Attributes:
        source: name of the source.
        identity: what the name of the folder is computed from.
        revision: commit of a dataset of the Hub.
        versions: commit of each repository that single files of the Hub come from.
        tokenizer: None if this project did not encode the shards.
        files: number of source files of the train split.
        splits: the shards of each split, in order.
        counts: statistics of the documents of each split.
        cursor: where the preparation continues. None if it is complete.
        complete: whether the folder is prepared to the end.
    """

    source: str | None = None
    identity: Mapping[str, Any] | None = None
    revision: str | None = None
    versions: dict[str, dict[str, str]] | None = None
    tokenizer: TokenizerReference | None
    files: int | None = None
    splits: dict[str, list[Shard]]
    counts: dict[str, dict[str, int]] | None = None
    cursor: Cursor | None = None
    complete: bool

    @property
    def shards(self) -> list[Shard]:
        """The shards of all splits."""
        return list(chain.from_iterable(self.splits.values()))


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a folder, complete or not.

    Returns:
        None if the folder has no manifest.

    Raises:
        BadInput: the manifest is damaged or cannot be read.
    """
    path = folder / MANIFEST
    try:
        return _parse(files.read_json(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(
            f"{path}: cannot be read: {error.strerror}; change its permissions"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            f"{path}: not a manifest ({error!r}); delete the folder and prepare it again"
        ) from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest of a folder atomically."""
    document = dataclasses.asdict(manifest, dict_factory=_without_missing_values)
    files.write_json(folder / MANIFEST, document)


def _without_missing_values(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in items if value is not None or key in NULLABLE}


def _parse(document: dict[str, Any]) -> Manifest:
    """Convert the JSON of a manifest. Keys that are not fields are ignored."""
    values = _values_of_fields(Manifest, document)
    values["splits"] = {
        split: [_parse_shard(row) for row in rows] for split, rows in document["splits"].items()
    }
    if document["tokenizer"] is not None:
        tokenizer = _values_of_fields(TokenizerReference, document["tokenizer"])
        values["tokenizer"] = TokenizerReference(**tokenizer)
    if document.get("cursor") is not None:
        values["cursor"] = Cursor(**_values_of_fields(Cursor, document["cursor"]))
    return Manifest(**values)


def _parse_shard(row: dict[str, Any]) -> Shard:
    shard = Shard(**_values_of_fields(Shard, row))
    is_name = Path(shard.file).name == shard.file
    is_count = type(shard.tokens) is int and shard.tokens >= 0
    if not (is_name and is_count):
        raise ValueError(f"{row}: file is a name in this folder, tokens is a count")
    return shard


def _values_of_fields(dataclass_type: type, document: dict[str, Any]) -> dict[str, Any]:
    names = [each.name for each in dataclasses.fields(dataclass_type)]
    return {name: document[name] for name in names if name in document}


def is_complete(folder: Path) -> bool:
    """Return whether a folder of shards is prepared to the end."""
    manifest = read_manifest(folder)
    return manifest is not None and manifest.complete


def describe_folder(folder: Path) -> Manifest:
    """Return the manifest of a folder, or create one from the file names of a third-party folder.

    Third-party files end in .bin or .npy. Their names contain train, val, validation or test
    between underscores, or are one of these words, for example fineweb_train_000001.bin,
    edufineweb_val_000000.npy and train.bin.

    Raises:
        BadInput: the folder does not exist, or is complete without train or validation shards.
    """
    if not folder.is_dir():
        raise BadInput(f"data_dir = {folder}: no such folder; prepare_data.py makes one")
    manifest = read_manifest(folder)
    if manifest is None:
        manifest = Manifest(splits=_splits_by_name(folder), tokenizer=None, complete=True)
    for split, word in (("train", "train"), ("validation", "val")):
        if manifest.complete and not manifest.splits.get(split):
            raise BadInput(
                f"data_dir = {folder}: holds no {split} shards "
                f"(.bin or .npy with the word {word} between underscores); give a folder that "
                f"prepare_data.py, llm.c, modded-nanogpt, build-nanogpt or nanoGPT wrote"
            )
    return manifest


def _splits_by_name(folder: Path) -> dict[str, list[Shard]]:
    splits: dict[str, list[Shard]] = {}
    for path in sorted(folder.iterdir()):
        if OUR_NAME.fullmatch(path.name):
            ours = f"{path.name} is a shard of ours, but there is no {MANIFEST}"
            raise BadInput(
                f"data_dir = {folder}: {ours}: not prepared to the end; run prepare_data.py again"
            )
        split = split_of(path)
        if split is not None:
            ids, _ = open_ids(path)
            splits.setdefault(split, []).append(Shard(path.name, len(ids)))
    return splits


def fingerprint(shards: list[Shard]) -> str:
    """Return a SHA-256 of the contents of shards: their names, tokens and hashes, in order.

    It does not depend on the folder.
    """
    contents = [[shard.file, shard.tokens, shard.sha256] for shard in shards]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def contents(manifest: Manifest) -> dict[str, Any]:
    """Return the identity of a train split, which a checkpoint stores. The split may still grow."""
    train_shards = manifest.splits["train"]
    return {
        "shards": len(train_shards),
        "fingerprint": fingerprint(train_shards),
        "complete": manifest.complete,
        "revision": manifest.revision,
    }


def check_same_contents(where: Path, before: dict[str, Any], manifest: Manifest) -> None:
    """Check that the train split is the one that a checkpoint was trained on.

    Args:
        where: the checkpoint, for the message.
        before: ``contents`` of the split when the checkpoint was saved. If the split was not
            complete then, it may have grown.

    Raises:
        BadInput: the split does not begin with these shards, or has another end.
    """
    train_shards = manifest.splits["train"]
    num_before = before["shards"]
    has_same_end = manifest.complete and len(train_shards) == num_before
    has_same_begin = fingerprint(train_shards[:num_before]) == before["fingerprint"]
    if has_same_begin and (has_same_end or not before["complete"]):
        return

    fix = "give the same text"
    revision = before.get("revision")
    if revision and revision != manifest.revision:
        fix = f"give --dataset_revision {revision}"
    raise BadInput(f"{where}: was trained on other data than this; {fix}, or another --run_name")


def check_unchanged(folder: Path, shards: list[Shard]) -> None:
    """Hash each shard that is newer than the manifest.

    Missing files are ignored, because opening them reports the problem.

    Raises:
        BadInput: some shards have changed.
    """
    existing = [shard for shard in shards if (folder / shard.file).exists()]
    messages = [message for _, message in problems(folder, existing, folder / MANIFEST)]
    if messages:
        raise BadInput(messages)


def problems(
    folder: Path, shards: list[Shard], newer_than: Path | None = None
) -> Iterator[tuple[Shard, str]]:
    """Find shards whose file is missing or does not match the manifest.

    Args:
        newer_than: hash only files that are newer than this one. None hashes all files.

    Yields:
        The shard and a description of its problem.
    """
    for shard in shards:
        path = folder / shard.file
        try:
            open_ids(path, shard.tokens)
            if shard.sha256 is None:
                continue
            newer = newer_than is None or path.stat().st_mtime_ns > newer_than.stat().st_mtime_ns
            if newer and files.sha256(path) != shard.sha256:
                raise BadInput(
                    f"{path}: its SHA-256 is not the one of {MANIFEST}: "
                    f"changed since then; {RESTORE}"
                )
        except BadInput as error:
            yield shard, str(error)
