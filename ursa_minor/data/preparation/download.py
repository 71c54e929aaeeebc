"""Download the token files of a data set of the Hub one by one, from a pinned commit.

The result is a folder of shards like any other: the files under their own names, and a manifest
that grows. Each file is verified before it gets its name. Nothing is tokenized, so training can
start with the validation split and the first train file.
"""

import functools
import logging
import shutil
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import huggingface_hub
from huggingface_hub.hf_api import RepoFile, RepoFolder
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

SCRATCH = ".fetch"  # folder for files that are not verified yet


class RemoteFiles(NamedTuple):
    """The token files of a repository.

    Attributes:
        commit: the commit of the files.
        folder: the folder of the repository that contains the files, or "".
        by_split: the files of the splits ``validation`` and ``train``, sorted by path.
        by_path: all files of the folder and of its subfolders that are named after a split.
    """

    commit: str
    folder: str
    by_split: dict[str, list[RepoFile]]
    by_path: dict[str, RepoFile]

    def name_of(self, file: RepoFile) -> str:
        """Return the path of a file relative to the folder."""
        return PurePosixPath(file.path).relative_to(self.folder).as_posix()

    def side_files(self, file: RepoFile) -> list[RepoFile]:
        """Return the existing files that accompany a token file."""
        paths = [path.as_posix() for path in shards.side_files(Path(file.path))]
        return [self.by_path[path] for path in paths if path in self.by_path]


def fetch(source: FoundSource, target: PrefetchTarget | None) -> None:
    """Download the files of a source, starting after the last complete one of an earlier process.

    Missing and changed files are downloaded again, except train files with stream_keep = consumed,
    which are deleted after their use.

    Args:
        target: limit up to which files are downloaded while train.py reads the shards, or None to
            download all files.

    Raises:
        BadInput: the repository has no token files, or may not be read.
        TrainingStopped: the retries are used up.
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

    remote = list_files(source, pinned_revision)
    if manifest is None:
        validation_shards = []
        for file in remote.by_split["validation"]:
            validation_shards.append(_download(source, remote, file))
        manifest = Manifest(
            source=source.name,
            identity=source.identity,
            revision=remote.commit,
            tokenizer=None,
            splits={"validation": validation_shards, "train": []},
            complete=False,
        )
        write_manifest(folder, manifest)
    _download_again(source, remote, broken)
    _download_train_files(source, remote, manifest, target)
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)
    manifest.complete = True
    write_manifest(folder, manifest)


def _download_again(source: FoundSource, remote: RemoteFiles, broken: list[Shard]) -> None:
    """Download the files of broken shards again.

    Raises:
        BadInput: a file is not the one of the manifest.
    """
    file_by_name = {}
    for split_files in remote.by_split.values():
        for file in split_files:
            file_by_name[remote.name_of(file)] = file
    for shard in broken:
        if _download(source, remote, file_by_name[shard.file]) != shard:
            raise BadInput(
                f"{source.folder / shard.file} was downloaded again, but it does not match "
                f"{shards.MANIFEST}. Delete {source.folder}, and run the same command to download "
                f"all files again"
            )


def _download_train_files(
    source: FoundSource, remote: RemoteFiles, manifest: Manifest, target: PrefetchTarget | None
) -> None:
    """Download the train files that are missing at the end of the manifest, up to limit_tokens."""
    limit = source.config.limit_tokens
    train_files = remote.by_split["train"]
    train_shards = manifest.splits["train"]
    for file in train_files[len(train_shards) :]:
        if 0 < limit <= shards.count_tokens(train_shards):
            return
        if target:
            target.wait(train_shards)
        train_shards.append(_download(source, remote, file))
        write_manifest(source.folder, manifest)
        log.info(
            f"downloaded {shards.count_tokens(train_shards):,} train tokens, "
            f"{len(train_shards)} of {len(train_files)} files"
        )


def describe(source: FoundSource) -> str:
    """Return what would be downloaded, as text of several lines."""
    remote = list_files(source, None)
    lines = [f"{source.config.data_dir} at {remote.commit}, into {source.folder}"]
    for split, split_files in remote.by_split.items():
        num_files = len(split_files)
        gigabytes = sum(file.size for file in split_files) / 1e9
        lines.append(f"{split}: {num_files} files, {gigabytes:.2f} GB")
    return "\n".join(lines)


def list_files(source: FoundSource, pinned_revision: str | None) -> RemoteFiles:
    """List the token files of a source.

    Args:
        pinned_revision: the commit to read, or None for the newest commit of the source's revision.

    Raises:
        BadInput: a split has no files, or the repository may not be read.
    """
    assert source.repository is not None
    repo_id, revision, folder = source.repository
    name = f"data_dir = {source.config.data_dir}"
    api = huggingface_hub.HfApi()
    commit = pinned_revision
    if commit is None:
        commit = retry(name, lambda: api.dataset_info(repo_id, revision=revision).sha)

    def list_folder(path: str) -> list[RepoFile | RepoFolder]:
        entries = api.list_repo_tree(
            repo_id, path_in_repo=path or None, revision=commit, repo_type="dataset"
        )
        return sorted(entries, key=lambda entry: entry.path)

    entries = retry(name, lambda: list_folder(folder))
    by_path = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
    by_split: dict[str, list[RepoFile]] = {"validation": [], "train": []}
    for path, file in by_path.items():
        split = shards.split_of(PurePosixPath(path))
        if split in by_split:
            by_split[split].append(file)

    for entry in entries:
        split = shards.SPLIT_WORDS.get(PurePosixPath(entry.path).name)
        if isinstance(entry, RepoFile) or split not in by_split or by_split[split]:
            continue
        for file in retry(name, functools.partial(list_folder, entry.path)):
            by_path[file.path] = file
            if shards.split_in_folder(PurePosixPath(file.path), split):
                by_split[split].append(file)

    missing_splits = [split for split, split_files in by_split.items() if not split_files]
    if missing_splits:
        raise BadInput(
            f"{name} has no {' and no '.join(missing_splits)} shards. They are .bin, .npy or .ds "
            f"files with train or val in their names, for example fineweb_val_000000.bin, or in "
            f"the subfolders train and val. If they are in another subfolder, add it: "
            f"{name}/SUBFOLDER"
        )
    return RemoteFiles(commit, folder, by_split, by_path)


def _download(source: FoundSource, remote: RemoteFiles, file: RepoFile) -> Shard:
    """Download a token file and its side files into the folder of a source.

    They get their final names after their sizes and hashes were compared with those on the Hub. The
    token file is the last one.

    Returns:
        The shard.
    """
    paths = []
    for repo_file in [*remote.side_files(file), file]:
        path, sha256 = _download_to_scratch(source, remote.commit, repo_file)
        paths.append(path)
    ids, _ = shards.open_ids(path)
    document_ends = shards.read_document_ends(path)

    name = remote.name_of(file)
    folder = (source.folder / name).parent
    folder.mkdir(exist_ok=True)
    for path in paths:
        files.fsync(path)
        path.replace(folder / path.name)
    files.fsync(folder)
    return Shard(
        name,
        len(ids),
        sha256=sha256,
        documents=None if document_ends is None else len(document_ends),
    )


def _download_to_scratch(source: FoundSource, commit: str, file: RepoFile) -> tuple[Path, str]:
    """Download a file and compare it with the Hub. Return its path and its SHA-256."""
    assert source.repository is not None
    folder = source.folder
    repo_id, _, _ = source.repository

    def download_once() -> tuple[Path, str]:
        try:
            downloaded = huggingface_hub.hf_hub_download(
                repo_id,
                file.path,
                repo_type="dataset",
                revision=commit,
                local_dir=folder / SCRATCH,
            )
        except OSError as error:
            # The client reports missing bytes with this error.
            if type(error) is OSError and error.errno is None:
                raise TruncatedError(" ".join(str(error).split())) from None
            raise
        path = Path(downloaded)
        sha256 = files.sha256(path)
        if not _matches(path, sha256, file):
            path.unlink()
            raise TruncatedError(
                f"{path.name} was corrupted during the download: its size or hash is not that of "
                f"the Hub"
            )
        return path, sha256

    return retry(f"hf://datasets/{repo_id}@{commit}/{file.path}", download_once)


def _matches(path: Path, sha256: str, file: RepoFile) -> bool:
    """Return whether a downloaded file has the size and the hash that the Hub states."""
    if path.stat().st_size != file.size:
        return False
    if file.lfs:
        return sha256 == file.lfs.sha256
    return git_hash(path.read_bytes()) == file.blob_id
