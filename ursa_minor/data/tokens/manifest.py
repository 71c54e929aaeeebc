"""The manifest of a folder of token shards: read it, compare it, and find damaged shards."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens.shards import MANIFEST, OUR_NAME, RESTORE, open_ids, split_of


def read_manifest(folder: Path) -> dict | None:
    """Return a folder's manifest, complete or not, or None when there is none. Raises BadInput for a damaged one."""
    path = folder / MANIFEST
    try:
        manifest = files.read_json(path)
        manifest["tokenizer"], manifest["complete"]
        for row in (row for rows in manifest["splits"].values() for row in rows):
            if (
                Path(row["file"]).name != row["file"]
                or type(row["tokens"]) is not int
                or row["tokens"] < 0
            ):
                raise ValueError(f"{row}: file is a name in this folder, tokens is a count")
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
            raise BadInput(
                f"data_dir = {folder}: {ours}: not prepared to the end; run prepare_data.py again"
            )
        if split := split_of(path):
            splits.setdefault(split, []).append(
                {"file": path.name, "tokens": len(open_ids(path)[0])}
            )
    return splits


def fingerprint(rows: list[dict]) -> str:
    """Return a SHA-256 of a split's contents: of its shards' tokens and hashes, in order, whatever folder they are in."""
    contents = [[row["file"], row["tokens"], row.get("sha256")] for row in rows]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def contents(manifest: dict) -> dict:
    """Return the identity of a train split so far, which a resumed run must find again; the split may still grow."""
    rows = manifest["splits"]["train"]
    found = {
        "shards": len(rows),
        "fingerprint": fingerprint(rows),
        "complete": manifest["complete"],
    }
    return found | {"revision": manifest.get("revision")}


def check_same_contents(where: Path, before: dict, manifest: dict) -> None:
    """Raise BadInput unless the train split begins with what it had ``before``, and ends there if it had ended."""
    rows = manifest["splits"]["train"]
    ended = not before["complete"] or (manifest["complete"] and len(rows) == before["shards"])
    if ended and fingerprint(rows[: before["shards"]]) == before["fingerprint"]:
        return
    fix = "give the same text"
    if (revision := before.get("revision")) and revision != manifest.get("revision"):
        fix = f"give --dataset_revision {revision}"
    raise BadInput(f"{where}: was trained on other data than this; {fix}, or another --run_name")


def check_unchanged(folder: Path, rows: list[dict]) -> None:
    """Hash each shard that is newer than the manifest, as make would; raise BadInput for those that changed.

    Files that are missing are passed over: opening them shows what is wrong.
    """
    there = [row for row in rows if (folder / row["file"]).exists()]
    if lines := [line for _, line in problems(folder, there, folder / MANIFEST)]:
        raise BadInput(lines)


def problems(
    folder: Path, rows: list[dict], newer_than: Path | None = None
) -> Iterator[tuple[dict, str]]:
    """Yield each row whose file is missing, or is not what the row says, with its problem.

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
                raise BadInput(
                    f"{path}: its SHA-256 is not the one of {MANIFEST}: changed since then; {RESTORE}"
                )
        except BadInput as error:
            yield row, str(error)
