"""Fetch a full checkpoint that a run pushed to the Hub, so that another machine can continue it."""

import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, ModelInfo
from huggingface_hub.errors import RepositoryNotFoundError

from ursa_minor.base import files, run_files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import http_status_and_retry_after
from ursa_minor.hub import client

log = logging.getLogger(__name__)

NEWEST = "last-checkpoint/"
CHECKPOINT_PATTERN = rf"({NEWEST}|{run_files.CHECKPOINTS}/step-\d{{8}}/)"
# Names of the files of a checkpoint other than its manifest. No other names are downloaded.
CHECKPOINT_FILE = re.compile(
    "|".join([run_files.MODEL_FILE.pattern, *map(re.escape, run_files.RESUME_FILES)])
)
ADDRESS = re.compile(r"hub://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


def is_address(source: str) -> bool:
    """Return whether a checkpoint is on the Hub (hub://...)."""
    return source.startswith("hub://")


def fetch_checkpoint(
    source: str, checkpoints: Path, run_dir: Path, *, missing_ok: bool = False
) -> Path | None:
    """Download a full checkpoint into ``checkpoints`` and return its folder.

    A checkpoint that is complete is not downloaded again. metrics.jsonl is downloaded as well if
    ``run_dir`` has none.

    Args:
        source: hub://OWNER/NAME or hub://OWNER/NAME@REVISION (a tag, a branch or a commit).
        checkpoints: the folder of the run's checkpoints.
        run_dir: the run folder.
        missing_ok: whether to return None, so that the run starts at step 0, if the repository does
            not exist or contains no model.

    Raises:
        BadInput: the checkpoint does not exist, may not be read or is corrupted.
        TrainingStopped: the Hub cannot be reached.
    """
    option = f"resume_from_checkpoint = {source}"
    address = ADDRESS.fullmatch(source)
    if not address:
        raise BadInput(
            f"{option}: this is not an address on the Hub. "
            f"Use hub://OWNER/NAME, or hub://OWNER/NAME@step-00005000"
        )
    fix = (
        "Check the id and the revision, and log in with an account that may read the repository: "
        "hf auth login, or HF_TOKEN"
    )
    retry_fix = ". The same command resumes the download"
    with client.converting_errors(option, fix, retry_fix):
        return _fetch(address, option, checkpoints, run_dir, missing_ok=missing_ok)


def _fetch(
    address: re.Match, option: str, checkpoints: Path, run_dir: Path, *, missing_ok: bool
) -> Path | None:
    """Fetch the newest checkpoint of a repository. See ``fetch_checkpoint``."""
    repo_id, revision = address.groups()
    repository = _open(repo_id, revision, checkpoints, missing_ok=missing_ok)
    if repository is None:
        return None
    folders = _checkpoint_folders(repository.names)
    # A checkpoint that is kept for a learning curve may contain only a model.
    complete = [folder for folder in folders if _is_complete(folder, repository.names)]
    # "last-checkpoint/" sorts after "checkpoints/step-...".
    name = max(complete, default=None)
    if name is None:
        # The tag was created by hand, or by a push that was interrupted.
        has_only_a_model = run_files.MODEL in repository.names and not folders
        if missing_ok and not has_only_a_model:
            return None
        raise BadInput(
            f"{option}: this revision of the repository contains no full checkpoint. Use a "
            f"revision that a run with hub_strategy = checkpoint or all_checkpoints has pushed"
        )

    repository.staging.mkdir(parents=True, exist_ok=True)
    checkpoint = _read_manifest(repository, name, option)
    path = checkpoints / run_files.step_name(checkpoint.step)
    if path.exists():
        fix = f"Move the folder {path} away. The same command then downloads the checkpoint"
        check_intact(path, {name: checkpoint.rows[name] for name in run_files.RESUME_FILES}, fix)
    else:
        _download(repository, checkpoint, path, option)
    _download_metrics(repository, run_dir)
    for folder in checkpoints.glob(".hub-*"):
        shutil.rmtree(folder)
    return path


@dataclass(frozen=True)
class Repository:
    """A revision of a model repository that is being downloaded.

    Attributes:
        repo_id: OWNER/NAME.
        commit: the commit of the revision.
        names: the names of its files.
        staging: the folder for the downloads. It is named after the commit, so that an interrupted
            download continues.
    """

    api: HfApi
    repo_id: str
    commit: str
    names: set[str]
    staging: Path

    def download(self, name: str) -> Path:
        """Download a file into the staging folder and return its path."""
        path = client.retry(
            self.api.hf_hub_download,
            self.repo_id,
            name,
            revision=self.commit,
            local_dir=self.staging,
            log_line=log.info,
        )
        return Path(path)


class PushedCheckpoint(NamedTuple):
    """A checkpoint in a repository.

    Attributes:
        name: name of the folder, ending with a slash.
        step: step of the checkpoint.
        rows: size and SHA-256 of each file except the manifest, from the manifest.
    """

    name: str
    step: int
    rows: dict[str, Any]


def _open(
    repo_id: str, revision: str | None, checkpoints: Path, *, missing_ok: bool
) -> Repository | None:
    """Return a revision of a repository, or None if it does not exist and ``missing_ok`` is set."""
    api = client.api()
    try:
        info: ModelInfo = client.retry(
            api.model_info, repo_id, revision=revision, log_line=log.info
        )
    except RepositoryNotFoundError as error:
        # Its status is 404 or 401, and 401 means that the token is missing or invalid.
        status, _ = http_status_and_retry_after(error)
        if missing_ok and status == 404:
            return None
        raise
    commit = str(info.sha)
    names = {file.rfilename for file in info.siblings or ()}
    return Repository(api, repo_id, commit, names, checkpoints / f".hub-{commit[:12]}")


def _checkpoint_folders(names: set[str]) -> list[str]:
    """Return the folders of the checkpoints that have a manifest, each ending with a slash."""
    pattern = re.compile(CHECKPOINT_PATTERN + run_files.MANIFEST)
    return [name.removesuffix(run_files.MANIFEST) for name in names if pattern.fullmatch(name)]


def _is_complete(folder: str, names: set[str]) -> bool:
    """Return whether a checkpoint in a repository contains any file of ``training/``."""
    training_files = (run_files.OPTIMIZER, run_files.STATE)
    return any(f"{folder}{name}" in names for name in training_files)


def _read_manifest(repository: Repository, name: str, option: str) -> PushedCheckpoint:
    """Download the manifest of a checkpoint and return its contents.

    Raises:
        BadInput: the manifest is corrupted, or belongs to another folder.
    """
    manifest_name = name + run_files.MANIFEST
    try:
        manifest = files.read_json(repository.download(manifest_name))
        step_name = run_files.step_name(manifest["step"])
        rows = dict(manifest["files"])
        is_complete = set(run_files.RESUME_FILES) <= set(rows)
        has_valid_names = all(CHECKPOINT_FILE.fullmatch(file) for file in rows)
        is_step = run_files.STEP.fullmatch(step_name)
        if not is_complete or not has_valid_names:
            raise ValueError
        if not is_step or name not in (NEWEST, f"{run_files.CHECKPOINTS}/{step_name}/"):
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{option}: {manifest_name} in the repository is damaged ({type(error).__name__}). Use "
            f"another revision, for example hub://{repository.repo_id}@step-00005000"
        ) from None
    return PushedCheckpoint(name, manifest["step"], rows)


def _download(
    repository: Repository, checkpoint: PushedCheckpoint, path: Path, option: str
) -> None:
    """Download a checkpoint, verify it, and move it to ``path``.

    Raises:
        BadInput: a file is corrupted. Nothing of the download is kept.
    """
    for name in checkpoint.rows:
        repository.download(checkpoint.name + name)
    folder = repository.staging / checkpoint.name
    try:
        fix = f"Run the same command again, or use another revision than {option}"
        check_intact(folder, checkpoint.rows, fix)
    except BadInput:
        shutil.rmtree(repository.staging)
        raise
    paths = list(folder.rglob("*"))
    for path_to_sync in [*paths, folder]:
        files.fsync(path_to_sync)
    files.apply_umask(file for file in paths if file.is_file())
    files.rename(folder, path)
    files.fsync(path.parent)


def _download_metrics(repository: Repository, run_dir: Path) -> None:
    """Download metrics.jsonl if it was pushed and the run folder has none."""
    path = run_dir / run_files.METRICS
    if run_files.METRICS not in repository.names or path.exists():
        return
    with files.replacing(path) as temporary:
        shutil.copyfile(repository.download(run_files.METRICS), temporary)


def check_intact(folder: Path, rows: Mapping[str, Any], fix: str) -> None:
    """Verify the files of a checkpoint.

    Args:
        folder: the folder of the files.
        rows: size and SHA-256 of each file, from the manifest.
        fix: advice for a corrupted file.

    Raises:
        BadInput: a file is missing or does not match its row.
    """
    for name, row in rows.items():
        try:
            problem = files.find_problem(folder / name, row)
        except (
            OSError,
            KeyError,
            TypeError,
        ) as error:  # the file is missing, or the row is invalid
            problem = f"cannot be read ({type(error).__name__})"
        if problem:
            raise BadInput(f"{folder / name} {problem}. {fix}")
