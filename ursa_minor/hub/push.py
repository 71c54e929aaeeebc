"""Push a run to the Hub: stage each push on disk, and send it in the background.

A push is one commit with the model, its card and, depending on ``hub_strategy``, a checkpoint.
One tag on the commit names the step, and another one the number of tokens.

1. ``check`` finds problems before step 0.
2. ``PushQueue.submit`` stages a push: it links or copies the files, because training may delete a
   checkpoint while it is being sent.
3. ``upload`` sends a staged push to the Hub. During training it runs in the thread of
   ``HfApi.run_as_future``.
4. ``push_pending``, or the next start of the run, sends the pushes that are still staged.
"""

import concurrent.futures
import dataclasses
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi, ModelCard, ModelInfo, constants, get_token
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from ursa_minor.base import files, paths, run_files
from ursa_minor.base.errors import BadInput, TrainingStopped
from ursa_minor.base.redaction import one_line
from ursa_minor.hub import card_merge, client
from ursa_minor.hub.card_metadata import CARD_FILE
from ursa_minor.hub.pull import CHECKPOINT_FILE, CHECKPOINT_PATTERN, NEWEST

log = logging.getLogger(__name__)

TOKEN_SETTINGS_URL = "https://huggingface.co/settings/tokens"


def _any_of(names: Iterable[str]) -> str:
    """Return a regular expression that matches each of the names."""
    return "|".join(re.escape(name) for name in names)


# Names that a push may contain.
TOP_LEVEL_FILES = (CARD_FILE, run_files.RECIPE, run_files.METRICS, run_files.CURVES)
ALLOWED = re.compile(
    rf"{run_files.MODEL_FILE.pattern}|{_any_of(TOP_LEVEL_FILES)}"
    rf"|{CHECKPOINT_PATTERN}({CHECKPOINT_FILE.pattern}|{_any_of([run_files.MANIFEST])})"
)

# A staged push is a folder with the name of its tag. It contains the generated model card
# (CARD_FILE), which is merged into the one on the Hub, and:
PUSH = "push.json"  # the fields of Push
FILES = "files"  # the folder that is uploaded

POLL_SECONDS = 1.0


def check(repo_id: str, *, private: bool, fresh: bool, card: str) -> tuple[str, str]:
    """Find problems of a push before step 0. Nothing is created on the Hub.

    Args:
        repo_id: hub_model_id, or the name of the run. Without an owner it belongs to the login.
        private: whether the user wants a private repository.
        fresh: whether the run starts at step 0.
        card: a README.md with the metadata that the user chose.

    Returns:
        The full id (unchanged if the Hub cannot be reached), and a note for the user, which may be
        empty.

    Raises:
        BadInput: one of these problems was found:
            - The id is malformed.
            - The user is not logged in, or may not write to the repository.
            - The repository belongs to another run.
            - The Hub refuses the metadata.
    """
    option = f"hub_model_id = {repo_id}"
    fix = (
        f"Use NAME or OWNER/NAME, and check the login (hf auth login) "
        f"and the token: {TOKEN_SETTINGS_URL}"
    )
    try:
        with client.converting_errors(option, fix):
            validate_repo_id(repo_id)
            if get_token() is None:
                raise BadInput(
                    "push_to_hub = true: you are not logged in on this machine. "
                    "Log in with hf auth login, or set HF_TOKEN"
                )
            if constants.HF_HUB_OFFLINE:
                raise TrainingStopped("HF_HUB_OFFLINE is set")
            return _check(client.api(), repo_id, private=private, fresh=fresh, card=card)
    except TrainingStopped as error:
        note = (
            f"the Hub cannot be reached now ({error}). "
            f"Training starts, and pushes are kept on disk until they can be sent"
        )
        return repo_id, note


def _check(api: HfApi, repo_id: str, *, private: bool, fresh: bool, card: str) -> tuple[str, str]:
    """See ``check``. Errors of the client are not converted."""
    login = api.whoami()
    user = login["name"]
    token = login.get("auth", {}).get("accessToken", {})

    try:
        ModelCard(card).validate()
    except ValueError as error:
        raise BadInput(
            f"license, language, tags: the Hub rejects these values ({client.describe(error)}). "
            f"Correct the value that this error names"
        ) from None

    if "/" not in repo_id:
        repo_id = f"{user}/{repo_id}"
    owner = repo_id.split("/")[0]
    option = f"hub_model_id = {repo_id}"
    new_token = (
        f"create a fine-grained token that may write to {owner}'s repositories: "
        f"{TOKEN_SETTINGS_URL}"
    )
    exists = api.repo_exists(repo_id)
    if token.get("role") == "read":
        raise BadInput(f"{option}: the token is read-only. To push, {new_token}")
    if not exists:
        if not _may_create(login, token, owner):
            raise BadInput(
                f"{option}: the token of {user} may not create this repository. "
                f"Use another owner, or {new_token}"
            )
        return repo_id, ""

    api.auth_check(repo_id, write=True)
    steps = _step_tags(api, repo_id)
    if fresh and steps:
        raise BadInput(
            f"{option}: the repository already contains {max(steps)} of another run, but this run "
            f"starts at step 0. Use another hub_model_id. If the other run has pushed full "
            f"checkpoints, you can continue it with --resume_from_checkpoint hub://{repo_id}"
        )
    if private and api.model_info(repo_id).private is False:
        note = (
            f"{repo_id} already exists and is public. hub_private_repo = true applies only to new "
            f"repositories. To make this repository private, change its settings on the Hub"
        )
        return repo_id, note
    return repo_id, ""


def _may_create(login: dict, token: dict, owner: str) -> bool:
    """Return whether a token may create repositories of an owner.

    Args:
        login: the answer of ``HfApi.whoami``.
        token: the part of the answer that describes the token.
        owner: a user or an organization.
    """
    scopes = token.get("fineGrained", {}).get("scoped")
    if scopes is not None:
        for scope in scopes:
            if scope["entity"].get("name") == owner and "repo.write" in scope["permissions"]:
                return True
        return False
    if owner == login["name"]:
        return True
    for organization in login.get("orgs", ()):
        if organization["name"] == owner:
            return organization.get("roleInOrg", "read") != "read"
    return False


def _step_tags(api: HfApi, repo_id: str) -> set[str]:
    """Return the tags that pushes have created."""
    tags = api.list_repo_refs(repo_id).tags
    return {tag.name for tag in tags if run_files.STEP.fullmatch(tag.name)}


@dataclasses.dataclass(frozen=True)
class Push:
    """A push of one step.

    Attributes:
        step: the step, which gives the push its tag.
        repo_id: the repository. Without an owner it belongs to the login.
        private: whether the repository is private, if it has to be created.
        title: first line of the commit message.
        keep: whether the push is sent even if a newer one is waiting.
        tokens_tag: another tag, by the number of tokens (``run_files.tokens_name``), or an empty
            string. A push that an earlier version has staged has none.
    """

    step: int
    repo_id: str
    private: bool
    title: str
    keep: bool
    tokens_tag: str = ""

    @property
    def tag(self) -> str:
        """The tag on the Hub, and the name of the staging folder."""
        return run_files.step_name(self.step)


def stage(pending: Path, push: Push, card: str, sources: Mapping[str, Path | str]) -> None:
    """Write a push to disk.

    An error leaves no files behind. If a push of this step is already staged, nothing is written.

    Args:
        pending: the folder of the staged pushes.
        push: the description of the push, which is written to ``push.json``.
        card: the generated model card.
        sources: maps each name in the repository to a file or a text.

    Raises:
        ValueError: a name is not allowed, or a source is a link or not a regular file.
        OSError: the files cannot be written, for example because the disk is full.
    """
    for name, source in sources.items():
        if not ALLOWED.fullmatch(name):
            raise ValueError(f"{name} is not on the list of files that may be pushed")
        if isinstance(source, Path) and (source.is_symlink() or not source.is_file()):
            raise ValueError(f"{source} is not a regular file, so it cannot be pushed")

    pending.mkdir(exist_ok=True)  # the user may have deleted it, to abandon the pushes
    with files.create_folder(pending / push.tag) as folder:
        for name, source in sources.items():
            target = folder / FILES / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, str):
                target.write_bytes(source.encode())
            elif target.suffix == ".safetensors":
                _link_or_copy(source, target)
            else:
                # A copy, because training appends to logs and replaces pictures.
                shutil.copyfile(source, target)
        (folder / CARD_FILE).write_bytes(card.encode())
        files.write_json(folder / PUSH, dataclasses.asdict(push))


def _link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link to a file, or a copy if the file systems differ or have no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def staged_pushes(pending: Path) -> list[Path]:
    """Return the folders of the staged pushes, oldest step first."""
    folders: list[Path] = []
    if not pending.is_dir():
        return folders
    for folder in sorted(pending.iterdir()):
        if run_files.STEP.fullmatch(folder.name) and (folder / PUSH).is_file():
            folders.append(folder)
    return folders


def _remove(folder: Path) -> None:
    """Remove a staged push.

    It is renamed first. If the process is killed, the remaining files do not look like a push.
    """
    temporary = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    folder.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def read_push(folder: Path) -> Push:
    """Read the ``push.json`` of a staged push."""
    return Push(**files.read_json(folder / PUSH))


def upload(api: HfApi, folder: Path, push: Push) -> str:
    """Send a staged push to the Hub.

    1. Create the repository if it is missing.
    2. Merge the model card.
    3. Make one commit.
    4. Tag it.

    After an error it may be called again. Files that an earlier call has committed are not
    committed twice.

    Returns:
        The full id of the repository.

    Raises:
        BadInput: the ``.gitignore`` of the repository excludes some of the files.
    """
    repo_id = push.repo_id
    if "/" not in repo_id:  # the Hub could not be reached when the run started
        repo_id = f"{api.whoami()['name']}/{repo_id}"
    # create_repo does not follow the redirect of a renamed repository, but creates a second one.
    if not api.repo_exists(repo_id):
        api.create_repo(repo_id, private=push.private, exist_ok=True)
    tags = _step_tags(api, repo_id)
    if push.tag in tags:
        return repo_id

    head = api.model_info(repo_id)
    problem = _prepare_card(repo_id, head, tags, folder)
    readme = folder / FILES / CARD_FILE
    try:
        commit = _commit(api, repo_id, head, push, folder / FILES)
    except ValueError as error:  # raised before anything is uploaded
        if not readme.exists() or "Invalid metadata in README.md" not in str(error):
            raise
        problem = f"the Hub rejects the new card ({one_line(error)}). {card_merge.FIX}"
        readme.unlink()
        commit = _commit(api, repo_id, head, push, folder / FILES)

    # The tag of the step is created last, because it marks the push as sent.
    if push.tokens_tag:
        api.create_tag(repo_id, tag=push.tokens_tag, revision=commit.oid, exist_ok=True)
    api.create_tag(repo_id, tag=push.tag, revision=commit.oid, exist_ok=True)
    if problem:
        log.warning(f"hub      {push.tag}: {CARD_FILE} of {repo_id} was left unchanged: {problem}")
    return repo_id


def _commit(api: HfApi, repo_id: str, head: ModelInfo, push: Push, source: Path) -> CommitInfo:
    """Upload the allowed files of a folder in one commit after ``head``.

    Raises:
        BadInput: the ``.gitignore`` of the repository excludes some of the files.
    """
    names = _allowed_names(source)
    outdated = None
    if any(re.match(CHECKPOINT_PATTERN, name) for name in names):
        # upload_folder deletes the matching files on the Hub that this push does not contain.
        outdated = f"{NEWEST}*"

    # If someone else commits after `head`, the Hub refuses this commit. The next attempt follows
    # the other commit.
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=source,
        allow_patterns=names,
        delete_patterns=outdated,
        commit_message=push.title,
        parent_commit=head.sha,
    )

    # upload_folder silently skips the files that the repository's .gitignore excludes.
    missing = set(names) - set(api.list_repo_files(repo_id, revision=commit.oid))
    if missing:
        raise BadInput(
            f"the .gitignore of {repo_id} on the Hub excludes {', '.join(sorted(missing))}. "
            f"Remove the patterns that match these files from this .gitignore"
        )
    return commit


def _allowed_names(folder: Path) -> list[str]:
    """Return the names of the files in a folder that may be pushed. Links are not followed."""
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_regular_file = path.is_file() and not path.is_symlink()
        if is_regular_file and ALLOWED.fullmatch(name):
            names.append(name)
    return names


def _prepare_card(repo_id: str, head: ModelInfo, tags: set[str], folder: Path) -> str | None:
    """Merge the generated model card into the one on the Hub, and write the README.md to upload.

    A push never fails because of the card on the Hub. If the cards cannot be merged, no README.md
    is uploaded.

    Args:
        repo_id: OWNER/NAME.
        head: the newest commit.
        tags: the tags that pushes have created.
        folder: the folder of the staged push.

    Returns:
        The reason why the card on the Hub is left unchanged, or None if it was merged.
    """
    readme = folder / FILES / CARD_FILE
    readme.unlink(missing_ok=True)  # an earlier attempt may have merged it into an older card
    generated = (folder / CARD_FILE).read_bytes().decode()
    names_on_hub = {file.rfilename for file in head.siblings or ()}
    try:
        current = ""
        last = None
        if CARD_FILE in names_on_hub:
            current = client.retry(client.read_file, repo_id, CARD_FILE, head.sha).decode()
            if not card_merge.MARKERS.search(current):
                last = client.retry(_last_card, repo_id, tags)
        merged = card_merge.merge(generated, current, last)
    except UnicodeDecodeError:
        return f"it is not UTF-8 text. {card_merge.FIX}"
    except card_merge.CannotMerge as error:
        return f"{error}. {card_merge.FIX}"
    except Exception as error:
        return f"it cannot be read ({client.describe(error)}). The next push will try again"
    readme.write_bytes(merged.encode())
    return None


def _last_card(repo_id: str, tags: set[str]) -> str | None:
    """Return the README.md of the newest pushed step, or None if there is none."""
    if not tags:
        return None
    try:
        return client.read_file(repo_id, CARD_FILE, max(tags)).decode(errors="replace")
    except EntryNotFoundError:
        return None


# The attempts of this process to send pushes in the background.
_attempts: list[concurrent.futures.Future] = []


def is_uploading() -> bool:
    """Return whether a thread of this process is still sending pushes.

    Python waits for this thread before the process exits.
    """
    return any(not attempt.done() for attempt in _attempts)


class PushQueue:
    """Stage the pushes of a run and send them in the background.

    - At most one push is being sent (or has failed and will be sent again), and one is waiting
      behind it. A newer push replaces the waiting one, unless that one has ``keep``.
    - Pushes are sent oldest step first. After a failure the others wait for the next attempt, so
      an older step never follows a newer one.

    Args:
        pending: the folder of the staged pushes, inside the run folder.
    """

    def __init__(self, pending: Path):
        self.pending = pending
        self._api = client.api()
        # Held while a staged push is selected to be sent or replaced.
        self._lock = threading.Lock()
        self._first: Path | None = None  # the push that is being sent, or has failed
        self._logged_failure: str | None = None

    def start(self) -> None:
        """Send the pushes of an earlier process.

        Only the process that has locked the run folder may call it.
        """
        self.pending.mkdir(parents=True, exist_ok=True)
        run_files.clear_partial(self.pending)
        self._send_in_background()

    def submit(self, push: Push, card: str, sources: Mapping[str, Path | str]) -> None:
        """Stage a push and send it in the background. See ``stage`` for arguments and errors."""
        stage(self.pending, push, card, sources)
        self._remove_superseded(self.pending / push.tag)
        self._send_in_background()

    def wait(self, seconds: float, give_up: Callable[[], bool] = lambda: False) -> int:
        """Try to send the staged pushes for the last time, and wait for the result.

        Args:
            seconds: the longest time to wait.
            give_up: function that is called once per second. The wait ends if it returns True.

        Returns:
            The number of pushes that are still staged.
        """
        deadline = time.monotonic() + seconds
        last_attempt = self._send_in_background()
        while not last_attempt.done() and not give_up():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            concurrent.futures.wait([last_attempt], timeout=min(remaining, POLL_SECONDS))
        return len(staged_pushes(self.pending))

    def send(self) -> str | None:
        """Send the staged pushes until one fails.

        This includes pushes that are staged in the meantime.

        Returns:
            A message about the push that failed, or None.

        Raises:
            BadInput: another process is sending them (exit status 4).
        """
        if not staged_pushes(self.pending):
            return None
        busy = f"{self.pending}: process {{pid}} is sending these pushes. Wait until it ends"
        with files.locked(self.pending / files.LOCK_FILE, busy, 4):
            while True:
                folder = self._choose_oldest()
                if folder is None:
                    return None
                try:
                    repo_id = client.retry(upload, self._api, folder, read_push(folder))
                    _remove(folder)
                except BadInput as error:
                    return self._describe_failure(folder.name, str(error))
                except Exception as error:
                    return self._describe_failure(folder.name, client.describe(error))
                log.info(f"hub      pushed {folder.name} to {repo_id}")

    def _choose_oldest(self) -> Path | None:
        """Return the push to send next, or None, and protect it from being replaced."""
        with self._lock:
            staged = staged_pushes(self.pending)
            self._first = staged[0] if staged else None
            return self._first

    def _remove_superseded(self, newest: Path) -> None:
        """Remove staged pushes that a newer one replaces.

        The oldest push is kept, because it may be sent now or after a failure; otherwise frequent
        pushes could replace each other forever. With ``all_checkpoints`` every push is kept.

        Args:
            newest: the push that was staged last.
        """
        with self._lock:
            for folder in staged_pushes(self.pending)[1:]:
                if folder in (newest, self._first):
                    continue
                if not read_push(folder).keep:
                    _remove(folder)
                    log.info(
                        f"hub      {folder.name} was replaced by {newest.name} before it was sent"
                    )

    def _send_in_background(self) -> concurrent.futures.Future:
        attempt = self._api.run_as_future(self._send_and_log)
        _attempts.append(attempt)
        return attempt

    def _send_and_log(self) -> None:
        """Send the staged pushes and log a failure, but not the same one twice in a row."""
        try:
            failure = self.send()
        except BadInput:  # another process is sending them
            return
        except Exception as error:  # for example, the user deletes the folder at this moment
            failure = self._describe_failure("a push", client.describe(error))
        if failure and failure != self._logged_failure:
            log.warning(failure)
        self._logged_failure = failure

    def _describe_failure(self, name: str, reason: str) -> str:
        command = f"python train.py --push_pending {paths.quoted(self.pending.parent)}"
        return (
            f"hub      {name} is not on the Hub: {reason}. It is kept in {self.pending}. "
            f"To push it later, run: {command}"
        )


def push_pending(pending: Path) -> int:
    """Send all staged pushes, and return the number that is left.

    Raises:
        BadInput: another process is sending them (exit status 4).
    """
    if not staged_pushes(pending):
        log.info(f"hub      there are no pushes to send in {pending}")
        return 0
    failure = PushQueue(pending).send()
    if failure:
        log.warning(failure)
    return len(staged_pushes(pending))
