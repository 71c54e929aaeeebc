"""Token files of a data set of the Hub, fetched one by one: from a pinned commit, each checked before it is read.

The folder is one of shards like any other: the files under their own names, and a manifest that grows. Nothing is
tokenized, so that training begins with the validation split and the first train file.
"""

import logging
import shutil
from pathlib import Path, PurePosixPath

import huggingface_hub
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import TruncatedError
from ursa_minor.base.retry import retry
from ursa_minor.data.preparation.progress import PrefetchTarget
from ursa_minor.data.preparation.repair import broken_shards
from ursa_minor.data.sources.find import FoundSource
from ursa_minor.data.tokens import shards
from ursa_minor.data.tokens.manifest import Manifest, read_manifest, write_manifest
from ursa_minor.data.tokens.shards import Shard

log = logging.getLogger(__name__)


def fetch(source: FoundSource, target: PrefetchTarget | None) -> None:
    """Fetch a source's files from where an earlier process stopped; those that are missing or changed, again.

    With stream_keep = consumed train files that are gone stay so. ``target``: how far to go, when train.py follows.
    Raises BadInput for a repository that has no token files or may not be read, TrainingStopped when the retries are
    used up.
    """
    huggingface_hub.utils.disable_progress_bars()
    folder = source.folder
    manifest = read_manifest(folder)
    pinned_revision = None
    broken: list[Shard] = []
    if manifest is not None:
        pinned_revision = manifest.revision
        newer_than = folder / shards.MANIFEST if target else None
        broken = [shard for _, shard in broken_shards(source, manifest, newer_than)]
        if manifest.complete and not broken:
            return

    commit, listed = listing(source, pinned_revision)
    if manifest is None:
        validation = [_fetch_one(source, commit, file) for file in listed["validation"]]
        manifest = Manifest(
            source=source.name,
            identity=source.identity,
            revision=commit,
            tokenizer=None,
            splits={"validation": validation, "train": []},
            complete=False,
        )
        write_manifest(folder, manifest)

    file_by_name = {Path(file.path).name: file for found in listed.values() for file in found}
    for shard in broken:
        if _fetch_one(source, commit, file_by_name[shard.file]) != shard:
            raise BadInput(
                f"{folder / shard.file}: is not what {shards.MANIFEST} says; "
                f"delete {folder} to fetch it anew"
            )

    limit = source.config.limit_tokens
    train_shards = manifest.splits["train"]
    for file in listed["train"][len(train_shards) :]:
        if 0 < limit <= shards.count_tokens(train_shards):
            break
        if target:
            target.wait(train_shards)
        train_shards.append(_fetch_one(source, commit, file))
        write_manifest(folder, manifest)
        tokens = shards.count_tokens(train_shards)
        log.info(
            f"{tokens:,} train tokens are here, {len(train_shards)} of {len(listed['train'])} files"
        )
    shutil.rmtree(folder / ".fetch", ignore_errors=True)
    manifest.complete = True
    write_manifest(folder, manifest)


def describe(source: FoundSource) -> str:
    """Return a summary of the files to fetch, in lines."""
    commit, listed = listing(source, None)
    lines = [
        f"{split}: {len(f)} files, {sum(file.size for file in f) / 1e9:.2f} GB"
        for split, f in listed.items()
    ]
    return "\n".join([f"{source.config.data_dir} at {commit}, into {source.folder}", *lines])


def listing(source: FoundSource, pinned: str | None) -> tuple[str, dict[str, list[RepoFile]]]:
    """Return the commit, and the token files of a folder of the repository by split, sorted by name."""
    assert source.repository is not None
    repo_id, revision, folder = source.repository
    hub, what = huggingface_hub.HfApi(), f"data_dir = {source.config.data_dir}"
    commit = pinned or retry(what, lambda: hub.dataset_info(repo_id, revision=revision).sha)
    place = {"path_in_repo": folder or None, "revision": commit, "repo_type": "dataset"}
    found = retry(what, lambda: list(hub.list_repo_tree(repo_id, **place)))
    splits: dict[str, list[RepoFile]] = {"validation": [], "train": []}
    for file in sorted(
        (file for file in found if isinstance(file, RepoFile)), key=lambda file: file.path
    ):
        splits.get(shards.split_of(PurePosixPath(file.path)) or "", []).append(file)
    if missing := [split for split, held in splits.items() if not held]:
        words = f"holds no {' and no '.join(missing)} shards (named .bin or .npy, with train or val between underscores)"
        raise BadInput(f"{what}: {words}; give the folder that does: .../NAME/FOLDER")
    return commit, splits


def _fetch_one(source: FoundSource, commit: str, file: RepoFile) -> Shard:
    """Fetch a file into the folder, and return its shard. It has its name there only once it is known to be whole."""
    assert source.repository is not None
    folder, (repo_id, _, _) = source.folder, source.repository
    where = f"hf://datasets/{repo_id}@{commit}/{file.path}"

    def get() -> Shard:
        place = {"repo_type": "dataset", "revision": commit, "local_dir": folder / ".fetch"}
        try:
            path = Path(huggingface_hub.hf_hub_download(repo_id, file.path, **place))
        except OSError as error:
            # The client reports missing bytes with this error.
            if type(error) is OSError and error.errno is None:
                raise TruncatedError(" ".join(str(error).split())) from None
            raise
        sha256 = files.sha256(path)
        is_whole = (
            sha256 == file.lfs.sha256 if file.lfs else git_hash(path.read_bytes()) == file.blob_id
        )
        if path.stat().st_size != file.size or not is_whole:
            path.unlink()
            raise TruncatedError(f"{path.name} arrived damaged: its size or hash is not the Hub's")
        tokens = len(shards.open_ids(path)[0])
        files.fsync(path)
        path.replace(folder / path.name)
        files.fsync(folder)
        return Shard(path.name, tokens, sha256=sha256)

    return retry(where, get)
