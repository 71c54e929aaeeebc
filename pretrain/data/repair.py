"""Shards that are missing or have changed, made again to the same bytes from the text that they were made from."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pretrain.base import files
from pretrain.base.errors import BadInput
from pretrain.data import shards
from pretrain.data.prepare import Job, Opened, open_source
from pretrain.data.sources import FoundSource

log = logging.getLogger(__name__)


def repair(source: FoundSource, job: Job, *, every: bool = True) -> None:
    """Make again what is wrong with a folder's shards; where nothing is, the source is not opened.

    Args:
        every: read every byte of them; else only of those that are newer than the manifest, as make would.

    Raises BadInput where the source no longer gives what the manifest says.
    """
    folder, temporary = source.folder, source.folder / f".again{job.lock}"
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
    name = shards.MANIFEST if shards.is_complete(folder) else job.manifest
    manifest = shards.read_manifest(folder, name)
    if manifest is None:
        return
    if every:
        log.info(f"{folder}: every byte of {sum(map(len, manifest['splits'].values()))} shards is checked")
    broken = {}
    for split, row in broken_rows(source, manifest, None if every else folder / name):
        broken.setdefault((split, shards.part_of(row)), []).append(row["file"])
    if not broken and (folder / "tokenizer").is_dir():
        return
    opened, _ = open_source(source, job, manifest)
    for (split, part), wanted in broken.items():
        log.info(f"{folder}: missing or changed, made again: {', '.join(wanted[:5])}{', ...' * (len(wanted) > 5)}")
        temporary.mkdir()
        _make_again(opened, manifest, split, part, set(wanted), temporary)
        shutil.rmtree(temporary)
    os.utime(folder / name)  # newer than the shards


def broken_rows(source: FoundSource, manifest: dict, newer_than: Path | None) -> Iterator[tuple[str, dict]]:
    """Yield split and row of each shard that is missing, unless it may be, or that has changed (``shards.faults``)."""
    folder = source.folder
    for split, rows in manifest["splits"].items():
        if split == "train" and source.config.stream_keep == "consumed":  # what has been trained on is deleted
            rows = [row for row in rows if (folder / row["file"]).exists()]
        for row, _ in shards.faults(folder, rows, newer_than):
            yield split, row


def _make_again(opened: Opened, manifest: dict, split: str, part: int, wanted: set[str], temporary: Path) -> None:
    """Write a part's shards into another folder up to the last that is wanted; these take their place in the folder."""
    folder, made = opened.source.folder, _rows_again(opened, manifest, split, part, temporary)
    for row in (row for row in manifest["splits"][split] if shards.part_of(row) == part):
        if next(made, None) != row:
            raise BadInput(
                f"{folder / row['file']}: cannot be made again, because its source has changed; put the old one "
                f"back, or delete {folder} to read all of it again"
            )
        path = temporary / row["file"]
        if row["file"] not in wanted:
            path.unlink()
            continue
        path.replace(folder / row["file"])
        files.fsync(folder)
        wanted.remove(row["file"])
        if not wanted:
            return


def _rows_again(opened: Opened, manifest: dict, split: str, part: int, temporary: Path) -> Iterator[dict]:
    """Write a part's shards, of as many tokens as the manifest has of them, into another folder; yield their rows."""
    tokens = {
        name: sum(row["tokens"] for row in rows if shards.part_of(row) == part)
        for name, rows in manifest["splits"].items()
    }
    # Where validation is not a part of its own, it is the first documents of the train split's.
    skip = tokens["validation"] if split == "train" and "validation" not in opened.parts else 0
    left, writer = tokens[split], opened.writer(split, part, folder=temporary)
    _, read = opened.parts.get(split, opened.parts["train"])[part]
    for document in opened.encode(read(0), 0):
        ids = document.ids[skip:][:left]
        skip, left = max(0, skip - len(document.ids)), left - len(ids)
        for row, _ in writer.fill(ids):
            yield row
        if not left:
            break
    if last := writer.finish():
        yield last
