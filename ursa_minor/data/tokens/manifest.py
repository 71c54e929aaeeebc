"""Read, write and compare the manifest of a folder of token shards, and find corrupted shards."""

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
from ursa_minor.data.tokens.shards import (
    MANIFEST,
    OUR_NAME,
    SPLIT_WORDS,
    Shard,
    open_ids,
    read_document_ends,
    split_in_folder,
    split_of,
)
from ursa_minor.data.tokens.token_format import RESTORE

# Keys that are written as null if they have no value. Other keys without a value are left out.
NULLABLE = ("revision", "tokenizer", "file")
SEE_CONVERSION = "Convert them as docs/data.md shows (Token files that must be converted)"
# The key of ``Manifest.counts`` for the validation documents that also occur in the train split.
ALSO_IN_TRAIN = "also_in_train"
MAX_SHARE_IN_TRAIN = 0.01  # if more of the validation documents also occur there, a note is given


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
        token: number of ids of this document before the place.
    """

    part: int
    row: int
    token: int


@dataclass(frozen=True, kw_only=True)
class Cursor(Position):
    """The position at which a preparation continues.

    Attributes:
        file: name of the source file at this position, or None at the end of the source.
    """

    file: str | None


@dataclass(kw_only=True)
class Manifest:
    """The contents of a folder of shards. The fields are the keys of the JSON, in the same order.

    Attributes:
        source: name of the source.
        identity: everything that the shards depend on. The name of the folder contains its hash.
        revision: commit of a dataset of the Hub.
        versions: commit of each repository that single files of the Hub come from.
        tokenizer: None if this project did not encode the shards.
        files: number of source files of the train split.
        packed: whether the rows of a token_column are packed (see ``token_rows``), or None for
            other sources.
        splits: the shards of each split, in order.
        counts: statistics of the documents of each split.
        cursor: position at which the preparation continues, or None if it is complete.
        complete: whether the folder is prepared to the end.
    """

    source: str | None = None
    identity: Mapping[str, Any] | None = None
    revision: str | None = None
    versions: dict[str, dict[str, str]] | None = None
    tokenizer: TokenizerReference | None
    files: int | None = None
    packed: bool | None = None
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
            f"{path} cannot be read ({error.strerror}). Check its permissions and the disk"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            f"{path} is not a valid manifest ({error!r}). Delete the folder {folder}, and prepare "
            f"the data again"
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
    values["splits"] = {}
    for split, rows in document["splits"].items():
        values["splits"][split] = [_parse_shard(row) for row in rows]
    if document["tokenizer"] is not None:
        tokenizer = _values_of_fields(TokenizerReference, document["tokenizer"])
        values["tokenizer"] = TokenizerReference(**tokenizer)
    if document.get("cursor") is not None:
        values["cursor"] = Cursor(**_values_of_fields(Cursor, document["cursor"]))
    return Manifest(**values)


def _parse_shard(row: dict[str, Any]) -> Shard:
    shard = Shard(**_values_of_fields(Shard, row))
    path = Path(shard.file)
    is_in_split_folder = len(path.parts) == 2 and path.parts[0] in SPLIT_WORDS
    if path.name != shard.file and not is_in_split_folder:
        raise ValueError(f"in {row}, file must be a file name without a folder")
    if type(shard.tokens) is not int or shard.tokens < 0:
        raise ValueError(f"in {row}, tokens must be an integer of 0 or more")
    return shard


def _values_of_fields(dataclass_type: type, document: dict[str, Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(dataclass_type)]
    return {name: document[name] for name in names if name in document}


def overlap_note(manifest: Manifest) -> str | None:
    """Return a note if many of the validation documents also occur in the train split."""
    counts = (manifest.counts or {}).get("validation", {})
    num_documents = counts.get("documents", 0)
    num_in_train = counts.get(ALSO_IN_TRAIN, 0)
    if num_in_train <= MAX_SHARE_IN_TRAIN * num_documents:
        return None
    return (
        f"{num_in_train:,} of the {num_documents:,} validation documents "
        f"({num_in_train / num_documents:.1%}) also occur in the training text, so the validation "
        f"loss is too low. Remove duplicate documents from the text"
    )


def is_complete(folder: Path) -> bool:
    """Return whether a folder of shards is prepared to the end."""
    manifest = read_manifest(folder)
    return manifest is not None and manifest.complete


def describe_folder(folder: Path) -> Manifest:
    """Return the manifest of a folder, or create one from the file names of a third-party folder.

    Third-party files have the suffixes of ``shards.FORMATS``. Their names contain train, val,
    validation or test between underscores, or are one of these words, for example
    fineweb_train_000001.bin, edufineweb_val_000000.npy and train.bin. If a folder has no such file
    of a split, the files are read from its subfolder with one of these names, for example
    train/00000_00000_doc_shuffled.ds.

    Raises:
        BadInput: the folder does not exist, or is complete without train or validation shards.
    """
    if not folder.is_dir():
        raise BadInput(
            f"data_dir = {folder}: this folder does not exist. Check the path, or create a folder "
            f"of shards with prepare_data.py"
        )
    manifest = read_manifest(folder)
    if manifest is None:
        manifest = Manifest(splits=_splits_by_name(folder), tokenizer=None, complete=True)
    for split, word in (("train", "train"), ("validation", "val")):
        if manifest.complete and not manifest.splits.get(split):
            raise BadInput(
                f"data_dir = {folder} has no {split} shards (.bin, .npy or .ds files with the word "
                f"{word} between underscores, or in the subfolder {word}). "
                f"{_advice_for_other_files(folder)}"
            )
    return manifest


def _advice_for_other_files(folder: Path) -> str:
    """Return how the files of a folder without shards can be used."""
    paths = [*folder.glob("*"), *folder.glob("*/*")]
    names = [path.name for path in paths]
    if any(name.endswith(".mds") for name in names):
        return f"The folder contains MDS files of mosaicml-streaming. {SEE_CONVERSION}"
    if any(name.startswith("chunk-") and name.endswith(".bin") for name in names):
        return f"The folder contains chunks of litdata. {SEE_CONVERSION}"
    if any(name.endswith(".ds") for name in names):
        return "Move the files that datatrove wrote into the subfolders train and val"
    return (
        "Use a folder that prepare_data.py, llm.c, modded-nanogpt, build-nanogpt, nanoGPT, "
        "datatrove or Megatron-LM wrote"
    )


def _splits_by_name(folder: Path) -> dict[str, list[Shard]]:
    paths_by_split: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if OUR_NAME.fullmatch(path.name):
            raise BadInput(
                f"data_dir = {folder}: {path.name} was written by prepare_data.py, but "
                f"{MANIFEST} is missing. Copy the missing file if this folder is a copy. Otherwise "
                f"run the same prepare_data.py command again, which completes the folder"
            )
        split = split_of(path)
        if split is not None:
            paths_by_split.setdefault(split, []).append(path)
    if not {"train", "validation"} <= paths_by_split.keys():
        for split, paths in _paths_in_split_folders(folder).items():
            paths_by_split.setdefault(split, paths)

    splits = {}
    for split, paths in paths_by_split.items():
        splits[split] = []
        for path in paths:
            ids, _ = open_ids(path)
            splits[split].append(Shard(path.relative_to(folder).as_posix(), len(ids)))
    return splits


def _paths_in_split_folders(folder: Path) -> dict[str, list[Path]]:
    """Return the token files in subfolders that are named after a split."""
    paths_by_split: dict[str, list[Path]] = {}
    for subfolder in sorted(folder.iterdir()):
        if subfolder.name not in SPLIT_WORDS or not subfolder.is_dir():
            continue
        for path in sorted(subfolder.iterdir()):
            split = split_in_folder(path, SPLIT_WORDS[subfolder.name])
            if split is not None:
                paths_by_split.setdefault(split, []).append(path)
    return paths_by_split


def fingerprint(shards: list[Shard]) -> str:
    """Return a SHA-256 of the contents of shards: their names, tokens and hashes, in order.

    It does not depend on the folder.
    """
    contents = [[shard.file, shard.tokens, shard.sha256] for shard in shards]
    document = json.dumps(contents)
    return hashlib.sha256(document.encode()).hexdigest()


def train_identity(manifest: Manifest) -> dict[str, Any]:
    """Return the identity of the train split, which a checkpoint stores. It may still grow."""
    train_shards = manifest.splits["train"]
    return {
        "shards": len(train_shards),
        "fingerprint": fingerprint(train_shards),
        "complete": manifest.complete,
        "revision": manifest.revision,
    }


def check_same_train_split(where: Path, before: dict[str, Any], manifest: Manifest) -> None:
    """Check that the train split is the one that a checkpoint was trained on.

    Args:
        where: the checkpoint, which an error names.
        before: ``train_identity`` of the split when the checkpoint was saved. If the split was not
            complete then, it may have grown.

    Raises:
        BadInput: the split starts with different shards, or has a different end.
    """
    train_shards = manifest.splits["train"]
    num_before = before["shards"]
    has_same_beginning = fingerprint(train_shards[:num_before]) == before["fingerprint"]
    has_same_end = manifest.complete and len(train_shards) == num_before
    may_have_grown = not before["complete"]
    if has_same_beginning and (has_same_end or may_have_grown):
        return

    fix = "Use the same text"
    revision = before.get("revision")
    if revision and revision != manifest.revision:
        fix = f"Use --dataset_revision {revision}"
    raise BadInput(
        f"{where} was trained on different data. {fix}, or start a new run with a different "
        f"--run_name"
    )


def check_unchanged(folder: Path, shards: list[Shard]) -> None:
    """Hash each shard that is newer than the manifest.

    Missing files are ignored, because opening them reports the problem.

    Raises:
        BadInput: some shards have changed.
    """
    existing = [shard for shard in shards if (folder / shard.file).exists()]
    changes = find_problems(folder, existing, newer_than=folder / MANIFEST)
    messages = [message for _, message in changes]
    if messages:
        raise BadInput(messages)


def find_problems(
    folder: Path, shards: list[Shard], newer_than: Path | None = None
) -> Iterator[tuple[Shard, str]]:
    """Find shards whose file is missing or does not match the manifest.

    Args:
        folder: folder of the shards.
        shards: the shards according to the manifest.
        newer_than: a file. Only shards that are newer are hashed. None hashes all shards.

    Yields:
        The shard and a description of its problem.
    """
    for shard in shards:
        message = _find_problem(folder / shard.file, shard, newer_than)
        if message is not None:
            yield shard, message


def _find_problem(path: Path, shard: Shard, newer_than: Path | None) -> str | None:
    try:
        open_ids(path, shard.tokens)
        document_ends = read_document_ends(path)
    except BadInput as error:
        return str(error)
    if shard.documents is not None:
        num_documents = 0 if document_ends is None else len(document_ends)
        if num_documents != shard.documents:
            return (
                f"{path}: the index of the file was changed. It lists {num_documents} documents, "
                f"but {MANIFEST} lists {shard.documents}. {RESTORE}"
            )
    if shard.sha256 is None:
        return None
    is_hashed = newer_than is None or path.stat().st_mtime_ns > newer_than.stat().st_mtime_ns
    if is_hashed and files.sha256(path) != shard.sha256:
        return (
            f"{path} was changed after it was written: its SHA-256 differs from that in "
            f"{MANIFEST}. {RESTORE}"
        )
    return None
