"""Pushes to the Hub: checked before step 0, staged on disk, sent beside training.

Training never waits for the Hub. Pushes are sent oldest first, one commit and one tag each. What cannot be sent stays
staged for the next push, the next start or ``push_pending``. Where an answer was lost, the next attempt finds the files
on the Hub as they are here, and the client makes no second commit.
"""

import contextlib
import logging
import os
import re
import shutil
import threading
import uuid
from pathlib import Path
from queue import SimpleQueue

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, ModelInfo, constants, get_token
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from pretrain.base import files, layout, paths
from pretrain.base.errors import BadInput, TrainingStopped
from pretrain.base.redaction import one_line
from pretrain.hub import card_merge, client
from pretrain.hub.fetch import CHECKPOINT, NEWEST, PARTS, refuse_damaged

log = logging.getLogger(__name__)

PUSH = "push.json"
CARD = "README.md"
TOKENS = "https://huggingface.co/settings/tokens"
ALLOWED = re.compile(
    r"(generation_)?config\.json|model[\w-]*\.safetensors(\.index\.json)?|README\.md|recipe\.yaml|curves\.png"
    r"|tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|metrics\.jsonl"
    rf"|{CHECKPOINT}({'|'.join(map(re.escape, (*PARTS, layout.MANIFEST)))})"
)


def check(repo_id: str, *, private: bool, fresh: bool, card: str) -> tuple[str, str]:
    """Find before step 0 what cannot work. Nothing is made on the Hub.

    Args:
        repo_id: hub_model_id, or the run's name; without an owner it is the login's.
        fresh: whether the run starts at step 0.
        card: a README.md with what the user chose of its metadata.

    Returns: the full id (as it was given where the Hub cannot be asked), and what the user should know, if anything.
    Raises BadInput for a malformed id, no login, no right to write, another run's repository, and metadata that the Hub
    refuses.
    """
    where = f"hub_model_id = {repo_id}"
    try:
        with client.refusing(
            where, f"Give NAME or OWNER/NAME; check the login (hf auth login) and the token: {TOKENS}"
        ):
            validate_repo_id(repo_id)
            if get_token() is None:
                raise BadInput("push_to_hub = true: no login was found on this machine: hf auth login, or set HF_TOKEN")
            if constants.HF_HUB_OFFLINE:
                raise TrainingStopped("HF_HUB_OFFLINE is set")
            return _check(client.api(), repo_id, private, fresh, card)
    except TrainingStopped as error:
        return repo_id, f"the Hub cannot be reached now ({error}); training starts, and pushes wait on disk"


def _check(api: HfApi, repo_id: str, private: bool, fresh: bool, card: str) -> tuple[str, str]:
    login = api.whoami()
    try:
        ModelCard(card).validate()
    except ValueError as error:
        raise BadInput(f"license, language, tags: the Hub refuses them: {client.describe(error)}") from None
    name, token = login["name"], login.get("auth", {}).get("accessToken", {})
    repo_id = repo_id if "/" in repo_id else f"{name}/{repo_id}"
    owner, where = repo_id.split("/")[0], f"hub_model_id = {repo_id}"
    found = api.model_info(repo_id) if api.repo_exists(repo_id) else None
    fine = f"make a fine-grained one that may write to {owner}'s repositories: {TOKENS}"
    if token.get("role") == "read":
        raise BadInput(f"{where}: the token may only read; {fine}")
    if found is None and not _may_create(login, token, owner):
        raise BadInput(f"{where}: {name} may not create it; give another owner, or a token with more rights: {fine}")
    if found is None:
        return repo_id, ""
    api.auth_check(repo_id, write=True)
    steps = sorted(ref.name for ref in api.list_repo_refs(repo_id).tags if layout.STEP.fullmatch(ref.name))
    if fresh and steps:
        raise BadInput(
            f"{where}: holds another run's {steps[-1]}, and this run starts at step 0; give another hub_model_id, or go "
            f"on from there (hub_strategy checkpoint, all_checkpoints) with --resume_from_checkpoint hub://{repo_id}"
        )
    public = f"{repo_id} exists and is public; hub_private_repo = true is for repositories that are made"
    return repo_id, public if private and found.private is False else ""


def _may_create(login: dict, token: dict, owner: str) -> bool:
    scopes = token.get("fineGrained", {}).get("scoped")
    if scopes is not None:
        return owner in {scope["entity"].get("name") for scope in scopes if "repo.write" in scope["permissions"]}
    roles = {group["name"]: group.get("roleInOrg") for group in login.get("orgs", ())}
    return owner == login["name"] or roles.get(owner, "read") != "read"


class Pusher:
    """Keeps pushes in ``pending``, a folder within the run's, and sends them in the background.

    What an earlier process left there is sent first. A reason why nothing can be sent is logged once. What could not be
    sent in time waits for the next ``add``.
    """

    def __init__(self, pending: Path):
        self.pending = pending
        pending.mkdir(parents=True, exist_ok=True)
        layout.clear_partial(pending)
        self._due: SimpleQueue[bool] = SimpleQueue()
        self._due.put(True)
        self._thread = threading.Thread(target=self._work, name="hub", daemon=True)
        self._thread.start()

    def add(self, step: int, *, repo_id: str, private: bool, title: str, files: dict[str, Path | str]) -> None:
        """Stage the push of a step: weights by a hard link, all else by a copy. One that is there already stays.

        Args:
            private: if the repository has to be made.
            title: of the commit, one line.
            files: by their names in the repository: a file, or its text.

        Raises ValueError for a name that is not on the list, a link, and what is not a regular file; OSError for a full
        disk. Nothing half-made is left.
        """
        for name, source in files.items():
            if not ALLOWED.fullmatch(name):
                raise ValueError(f"{name}: is not on the list of what may be pushed")
            if isinstance(source, Path) and (source.is_symlink() or not source.is_file()):
                raise ValueError(f"{source}: is not a regular file, so it is not pushed")
        folder = self.pending / layout.step_name(step)
        if not (folder / PUSH).is_file():
            push = {"repo_id": repo_id, "private": private, "title": " ".join(title.split())}
            _stage(folder, push, files)
        self._due.put(True)

    def close(self, seconds: float) -> int:
        """Wait so many seconds at most for what is staged; return how many pushes are left. May be called again."""
        self._due.put(False)
        self._thread.join(seconds)
        return len(_staged(self.pending))

    @property
    def sending(self) -> bool:
        """Whether, after ``close``, something is still being tried."""
        return self._thread.is_alive()

    def _work(self) -> None:
        logged = None
        while self._due.get():
            try:
                fault = _send_all(self.pending)
            except BadInput:  # another process sends them
                continue
            except Exception as error:  # the folder is gone, for example: training continues
                fault = _waits(self.pending / "a push", client.describe(error))
            # Once the main thread has ended, writing from another one can bring the interpreter down.
            if fault and fault != logged and threading.main_thread().is_alive():
                log.warning(fault)
            logged = fault


def push_pending(pending: Path) -> int:
    """Send all that is staged, and return how many pushes are left.

    Raises BadInput (status 4) when another process is sending them.
    """
    if not pending.is_dir() or not _staged(pending):
        log.info(f"hub: nothing waits in {pending}")
        return 0
    if fault := _send_all(pending, sent=logging.INFO):
        log.warning(fault)
    return len(_staged(pending))


def _waits(folder: Path, reason: str) -> str:
    command = f"python train.py --push_pending {paths.quoted(folder.parent.parent)}"
    return f"hub: {folder.name} is not on the Hub: {reason}. It waits in {folder.parent}; to send it later: {command}"


def _stage(folder: Path, push: dict, sources: dict[str, Path | str]) -> None:
    with files.making(folder) as temporary:
        rows = {}
        for name, source in sources.items():
            path = temporary / "files" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, str):
                path.write_bytes(source.encode())
            elif path.suffix == ".safetensors":  # big, and never changed once written
                with contextlib.suppress(OSError):  # another file system, or one without links
                    os.link(source, path)
            if not path.exists():  # a log grows, so it is copied
                shutil.copyfile(source, path)
            rows[name] = files.row_of(path)
        files.write_json(temporary / PUSH, push | {"files": rows})


def _staged(pending: Path) -> list[Path]:
    """Return the staged pushes, oldest first."""
    return sorted(path for path in pending.iterdir() if layout.STEP.fullmatch(path.name) and (path / PUSH).is_file())


def _send_all(pending: Path, sent: int = logging.DEBUG) -> str | None:
    """Send what is staged, also what is added meanwhile; return a line on the push that could not be sent.

    ``sent``: the level at which a push that was sent is logged. Raises BadInput when another process is sending them.
    """
    fault, seen = None, set()
    with files.locked(pending / ".lock", f"{pending}: process {{pid}} is sending it; wait until it has", 4):
        while left := [folder for folder in _staged(pending) if folder not in seen]:
            folder = left[0]
            seen.add(folder)
            try:
                push = files.read_json(folder / PUSH)
                if others := [name for name in push["files"] if not ALLOWED.fullmatch(name)]:
                    raise BadInput(f"{folder / PUSH}: {others[0]} is not on the list of what may be pushed")
                refuse_damaged(folder / "files", push["files"], f"to abandon this push, remove {folder}")
                repo_id = client.retry(_send, client.api(), folder, push)
                log.log(sent, f"hub: {folder.name} is on the Hub: {repo_id}@{folder.name}")
                temporary = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
                folder.rename(temporary)  # a kill meanwhile must not leave half of it in the queue
                shutil.rmtree(temporary)
            except BadInput as error:  # it is damaged; the others are not
                fault = _waits(folder, str(error))
            except Exception as error:  # whatever is wrong with the Hub: the next one would meet it, or overtake this
                return _waits(folder, client.describe(error))
    return fault


def _send(api: HfApi, folder: Path, push: dict) -> str:
    """Bring a push to the Hub, from where the last attempt ended; return the repository's full id."""
    repo_id, rows = push["repo_id"], push["files"]
    if "/" not in repo_id:  # the Hub could not be asked for the login's name
        repo_id = f"{api.whoami()['name']}/{repo_id}"
    if not api.repo_exists(repo_id):
        api.create_repo(repo_id, private=push["private"], exist_ok=True)
    if folder.name in {ref.name for ref in api.list_repo_refs(repo_id).tags}:
        return repo_id
    found = api.model_info(repo_id)
    operations: list[CommitOperationAdd | CommitOperationDelete] = []
    if any(re.match(CHECKPOINT, name) for name in rows):  # no older one stays behind as the last
        there = {sibling.rfilename for sibling in found.siblings or () if sibling.rfilename.startswith(NEWEST)}
        operations = [CommitOperationDelete(name) for name in sorted(there - rows.keys())]
    operations += [CommitOperationAdd(name, folder / "files" / name) for name in rows if name != CARD]
    card, problem = None, None
    if CARD in rows:
        card, problem = _merged_card(api, repo_id, found, folder / "files" / CARD)
    with_card = operations
    if card is not None:
        with_card = [*operations, CommitOperationAdd(CARD, card)]
    # Of files that an attempt whose answer was lost has brought there the client makes no commit. Naming the parent
    # makes the Hub refuse one that comes while that attempt is still at work.
    options = {"commit_message": push["title"], "parent_commit": found.sha}
    try:
        commit = api.create_commit(repo_id, with_card, **options)
    except ValueError as error:  # raised before anything is uploaded
        if card is None or "Invalid metadata in README.md" not in str(error):
            raise
        problem = f"the Hub refuses it: {one_line(error)}. {card_merge.REMEDY}"
        commit = api.create_commit(repo_id, operations, **options)
    # The client leaves out what the repository ignores, and keeps that to itself.
    if ignored := [one.path_in_repo for one in with_card if getattr(one, "_should_ignore", False)]:
        raise BadInput(f"{repo_id} ignores {', '.join(ignored)}; take that out of its .gitignore")
    api.create_tag(repo_id, tag=folder.name, revision=commit.oid, exist_ok=True)
    if problem and threading.main_thread().is_alive():
        log.warning(f"hub: {folder.name} leaves README.md of {repo_id} as it is: {problem}")
    return repo_id


def _merged_card(api: HfApi, repo_id: str, found: ModelInfo, staged: Path) -> tuple[bytes | None, str | None]:
    """Merge the staged model card into the one on the Hub.

    A push never fails because of a card on the Hub: the card is left as it is then.

    Returns:
        The README.md to push and None; or None and why the one on the Hub is left as it is.
    """
    has_card = CARD in {sibling.rfilename for sibling in found.siblings or ()}
    try:
        current = ""
        if has_card:
            current = client.retry(client.read_file, repo_id, CARD, found.sha).decode()
        last = None
        if has_card and not card_merge.MARKERS.search(current):
            last = client.retry(_last_card, api, repo_id)
        return card_merge.merge(staged.read_bytes().decode(), current, last).encode(), None
    except UnicodeDecodeError:
        return None, f"it is not UTF-8 text. {card_merge.REMEDY}"
    except card_merge.CannotMerge as error:
        return None, f"{error}. {card_merge.REMEDY}"
    except Exception as error:
        return None, f"it cannot be read: {client.describe(error)}. The next push tries again"


def _last_card(api: HfApi, repo_id: str) -> str | None:
    """Return the README.md of the newest step on the Hub; None if there is none."""
    tags = [ref.name for ref in api.list_repo_refs(repo_id).tags if layout.STEP.fullmatch(ref.name)]
    if not tags:
        return None
    try:
        return client.read_file(repo_id, CARD, max(tags)).decode(errors="replace")
    except EntryNotFoundError:
        return None
