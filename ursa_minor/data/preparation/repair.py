"""Write missing and changed shards again, with the same bytes, from the text of their source."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.preparation.prepare import SourceEncoder, open_source
from ursa_minor.data.sources.find import FoundSource
from ursa_minor.data.tokens.manifest import Manifest, Position, find_problems, read_manifest
from ursa_minor.data.tokens.shards import MANIFEST, Shard, count_tokens

log = logging.getLogger(__name__)

SCRATCH = ".again"  # folder for new shards before they replace the old ones


def repair(source: FoundSource, *, every: bool = True) -> None:
    """Write the missing and changed shards of a folder again.

    The source is opened only if there are any.

    Args:
        every: hash all shards. False hashes only those that are newer than the manifest.

    Raises:
        BadInput: the new shards differ from the manifest, because the source has changed.
    """
    folder = source.folder
    scratch = folder / SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    manifest = read_manifest(folder)
    if manifest is None:
        return
    newer_than = None if every else folder / MANIFEST
    if every:
        log.info(f"{folder}: checking the hashes of {len(manifest.shards)} shards")
    broken_files: dict[tuple[str, int], list[str]] = {}
    for split, shard in broken_shards(source, manifest, newer_than):
        broken_files.setdefault((split, shard.part), []).append(shard.file)
    if not broken_files and (folder / "tokenizer").is_dir():
        return

    opened = open_source(source, manifest)
    for (split, part), file_names in broken_files.items():
        log.info(
            f"{folder}: writing these missing or changed shards again: "
            f"{', '.join(file_names)[:200]}"
        )
        write_again(opened, manifest, split, part, file_names)
    # Make the manifest newer than the shards. Otherwise train.py would hash them again.
    with files.ignoring_errors(files.NO_MODES):
        os.utime(folder / MANIFEST)


def write_again(
    opened: SourceEncoder, manifest: Manifest, split: str, part: int, file_names: list[str]
) -> None:
    """Write some shards of one source file again.

    Args:
        part: index of the source file.
        file_names: names of the shards.

    Raises:
        BadInput: the new shards differ from the manifest.
    """
    folder = opened.source.folder
    scratch = folder / SCRATCH
    expected = shards_of_part(manifest, split, part)
    last_index = max(n for n, shard in enumerate(expected) if shard.file in file_names)
    expected = expected[: last_index + 1]
    begin = Position(part, 0, 0)
    if split == "train" and "validation" not in opened.parts:
        # The first documents of the train split were taken for validation.
        begin = Position(part, 0, count_tokens(shards_of_part(manifest, "validation", part)))

    scratch.mkdir()
    steps = opened.write(split, begin, [], count_tokens(expected), scratch)
    shards = [step.shard for step in steps if step.shard]
    if shards[: len(expected)] != expected:
        raise BadInput(
            f"{folder / file_names[-1]} is missing or damaged, and cannot be written again because "
            f"the source has changed. Restore the old source, or delete {folder} to prepare the "
            f"data again"
        )
    for name in file_names:
        (scratch / name).replace(folder / name)
    files.fsync(folder)
    shutil.rmtree(scratch)


def shards_of_part(manifest: Manifest, split: str, part: int) -> list[Shard]:
    """Return the shards of a split that were written from one source file."""
    return [shard for shard in manifest.splits[split] if shard.part == part]


def broken_shards(
    source: FoundSource, manifest: Manifest, newer_than: Path | None
) -> Iterator[tuple[str, Shard]]:
    """Yield the split and the shard for each shard that ``manifest.find_problems`` reports.

    With stream_keep = consumed, a missing train shard is no problem: it was deleted after its use.

    Args:
        newer_than: a file. Only shards that were modified after it are hashed. None hashes all.
    """
    folder = source.folder
    for split, shards in manifest.splits.items():
        if split == "train" and source.config.stream_keep == "consumed":
            shards = [shard for shard in shards if (folder / shard.file).exists()]
        for shard, _ in find_problems(folder, shards, newer_than):
            yield split, shard
