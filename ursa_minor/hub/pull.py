"""A full checkpoint that a run pushed, fetched onto a fresh machine."""

import logging
import re
import shutil
from pathlib import Path

from huggingface_hub.errors import RepositoryNotFoundError

from ursa_minor.base import files, run_files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import http_status_and_retry_after
from ursa_minor.hub import client

log = logging.getLogger(__name__)

NEWEST = "last-checkpoint/"
CHECKPOINT_PATTERN = rf"({NEWEST}|{run_files.CHECKPOINTS}/step-\d{{8}}/)"
ADDRESS = re.compile(r"hub://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


def is_address(source: str) -> bool:
    """Whether a checkpoint is one of the Hub (hub://...)."""
    return source.startswith("hub://")


def fetch_checkpoint(
    source: str, checkpoints: Path, run_dir: Path, *, may_begin: bool = False
) -> Path | None:
    """Fetch a full checkpoint that was pushed into ``checkpoints``, and return its folder.

    It also fetches metrics.jsonl where ``run_dir`` has none. What is there and whole is not fetched again.

    Args:
        source: hub://OWNER/NAME or hub://OWNER/NAME@REVISION: a tag, a branch or a commit.
        may_begin: whether None is returned, so that the run begins, where there is no such repository, or no model in it.

    Raises BadInput where it does not exist, may not be read or is damaged, TrainingStopped where the Hub is down.
    """
    where, address = f"resume_from_checkpoint = {source}", ADDRESS.fullmatch(source)
    if not address:
        raise BadInput(
            f"{where}: is not an address of the Hub. Give hub://OWNER/NAME, or hub://OWNER/NAME@step-00005000"
        )
    fix = "Check the id and the revision, and that you may read it: hf auth login, or HF_TOKEN"
    with client.refusing(where, fix, ". The same command resumes from what was fetched"):
        return _fetch(address, where, checkpoints, run_dir, may_begin)


def _fetch(
    address: re.Match, where: str, checkpoints: Path, run_dir: Path, may_begin: bool
) -> Path | None:
    api, (repo_id, revision) = client.api(), address.groups()
    try:
        info = client.retry(api.model_info, repo_id, revision=revision, say=log.info)
    except RepositoryNotFoundError as error:
        # Status 401 is excluded, because it concerns the token.
        if may_begin and http_status_and_retry_after(error)[0] == 404:
            return None
        raise
    names = {sibling.rfilename for sibling in info.siblings or ()}
    within = [
        name.removesuffix(run_files.MANIFEST)
        for name in names
        if re.fullmatch(CHECKPOINT_PATTERN + run_files.MANIFEST, name)
    ]
    if not within:
        # The tag was created by hand, or by a push that was interrupted.
        if may_begin and run_files.MODEL not in names:
            return None
        raise BadInput(
            f"{where}: has no full checkpoint; only hub_strategy = checkpoint and all_checkpoints push one"
        )
    newest = max(within)
    # The folder is named after the commit, so that an interrupted download continues.
    staging = checkpoints / f".hub-{info.sha[:12]}"
    staging.mkdir(parents=True, exist_ok=True)

    def fetched(name: str) -> Path:
        got = client.retry(
            api.hf_hub_download, repo_id, name, revision=info.sha, local_dir=staging, say=log.info
        )
        return Path(got)

    try:
        manifest = files.read_json(fetched(newest + run_files.MANIFEST))
        path = checkpoints / run_files.step_name(manifest["step"])
        rows = {name: manifest["files"][name] for name in run_files.CHECKPOINT_FILES}
        step_folder = f"{run_files.CHECKPOINTS}/{path.name}/"
        if newest not in (NEWEST, step_folder) or not run_files.STEP.fullmatch(path.name):
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{where}: {newest}{run_files.MANIFEST} cannot be read ({type(error).__name__})"
        ) from None
    if path.exists():
        check_intact(path, rows, f"or it is not the one that {where} names: move {path} away")
    else:
        for name in run_files.CHECKPOINT_FILES:
            fetched(newest + name)
        try:
            check_intact(staging / newest, rows, f"try again, or another revision than {where}")
        except BadInput:
            shutil.rmtree(staging)
            raise
        for file in [*(staging / newest).iterdir(), staging / newest]:
            files.fsync(file)
        files.apply_umask((staging / newest).iterdir())
        files.rename(staging / newest, path)
        files.fsync(checkpoints)
    if run_files.METRICS in names and not (run_dir / run_files.METRICS).exists():
        with files.replacing(run_dir / run_files.METRICS) as temporary:
            shutil.copyfile(fetched(run_files.METRICS), temporary)
    for old in checkpoints.glob(".hub-*"):
        shutil.rmtree(old)
    return path


def check_intact(folder: Path, rows: dict[str, dict], fix: str) -> None:
    """Raise BadInput where a file is not there as its row has it."""
    for name, row in rows.items():
        try:
            problem = files.find_problem(folder / name, row)
        except (OSError, KeyError, TypeError) as error:  # it is gone, or the row is none
            problem = f"cannot be read ({type(error).__name__})"
        if problem:
            raise BadInput(f"{folder / name}: {problem}; {fix}")
