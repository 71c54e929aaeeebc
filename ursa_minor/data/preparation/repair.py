"""Shards that are missing or have changed, made again to the same bytes from the text that they were made from."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.preparation.prepare import open_source
from ursa_minor.data.sources.find import FoundSource
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import shards

log = logging.getLogger(__name__)

SCRATCH = ".again"  # where shards are written before they replace the old ones


def repair(source: FoundSource, *, every: bool = True) -> None:
    """Make again what is wrong with a folder's shards; where nothing is, the source is not opened.

    Args:
        every: read every byte of them; else only of those that are newer than the manifest, as make would.

    Raises BadInput where the source no longer gives what the manifest says.
    """
    folder = source.folder
    scratch = folder / SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    manifest = manifests.read_manifest(folder)
    if manifest is None:
        return
    if every:
        log.info(
            f"{folder}: every byte of {sum(map(len, manifest['splits'].values()))} shards is checked"
        )
    broken: dict[tuple[str, int], list[str]] = {}
    for split, row in broken_rows(source, manifest, None if every else folder / shards.MANIFEST):
        broken.setdefault((split, shards.part_of(row)), []).append(row["file"])
    if not broken and (folder / "tokenizer").is_dir():
        return
    opened = open_source(source, manifest)
    for (split, part), wanted in broken.items():
        log.info(f"{folder}: missing or changed, made again: {', '.join(wanted)[:200]}")
        rows, place = of_part(manifest, split, part), {"part": part, "row": 0, "token": 0}
        rows = rows[: 1 + max(number for number, row in enumerate(rows) if row["file"] in wanted)]
        if (
            split == "train" and "validation" not in opened.parts
        ):  # the first documents are validation's
            place["token"] = sum(row["tokens"] for row in of_part(manifest, "validation", part))
        scratch.mkdir()
        written = opened.write(split, place, [], sum(row["tokens"] for row in rows), scratch)
        if [shard for shard, _, _ in written if shard][: len(rows)] != rows:
            raise BadInput(
                f"{folder / wanted[-1]}: cannot be made again, because its source has changed; put the old one back, or "
                f"delete {folder} to read all of it again"
            )
        for file in wanted:
            (scratch / file).replace(folder / file)
        files.fsync(folder)
        shutil.rmtree(scratch)
    with files.skipping(files.NO_MODES):  # otherwise train.py reads the shards once more
        os.utime(folder / shards.MANIFEST)  # newer than the shards


def of_part(manifest: dict, split: str, part: int) -> list[dict]:
    """Return the rows of the shards of a split that were made from one source file."""
    return [row for row in manifest["splits"][split] if shards.part_of(row) == part]


def broken_rows(
    source: FoundSource, manifest: dict, newer_than: Path | None
) -> Iterator[tuple[str, dict]]:
    """Yield split and row of each shard that is missing, unless it may be, or that has changed (``shards.problems``)."""
    folder = source.folder
    for split, rows in manifest["splits"].items():
        if (
            split == "train" and source.config.stream_keep == "consumed"
        ):  # what has been trained on is deleted
            rows = [row for row in rows if (folder / row["file"]).exists()]
        for row, _ in manifests.problems(folder, rows, newer_than):
            yield split, row
