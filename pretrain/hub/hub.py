"""The Hugging Face Hub: what a run pushes there, and what a fresh machine fetches.

Training never waits for the Hub. A push is laid ready on disk and sent beside training, oldest first: one commit and
one tag each. What cannot be sent stays there for the next push, the next start or ``push_pending``. The Hub's client
has no time-outs, repeats only some requests and would commit twice where an answer is lost, so that is seen to here:
each attempt looks how far the one before it came. The token is the client's (HF_TOKEN or a login): no file and no
message has it.
"""

import contextlib
import errno
import functools
import json
import logging
import math
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    get_token,
    set_client_factory,
)
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars, validate_repo_id
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.logging import set_verbosity_error

from pretrain.base import files
from pretrain.base.errors import BadInput, TrainingStopped
from pretrain.base.redaction import redact

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = {"connect": 10, "read": 60, "write": 60, "pool": 60}
WAIT_SECONDS = (1, 2, 4, 8, 16, 32, 60)  # between attempts; the last one again and again
DEADLINE_SECONDS = 15 * 60  # from a push's first failure on
HEALING = {408, 409, 412, 423, 425, 429}  # statuses below 500 that another attempt may not meet
LOCAL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}
SECRET = re.compile(r"hf_[\w.-]{20,}")
TOKENS = "https://huggingface.co/settings/tokens"
PUSH, METRICS = "push.json", "metrics.jsonl"
MANIFEST, PARTS = "manifest.json", ("model.safetensors", "optimizer.safetensors", "state.json")  # of a checkpoint
NEWEST = "last-checkpoint/"
CHECKPOINT = rf"({NEWEST}|checkpoints/step-\d{{8}}/)"
ALLOWED = re.compile(
    r"(generation_)?config\.json|model[\w-]*\.safetensors(\.index\.json)?|README\.md|recipe\.yaml|curves\.png"
    r"|tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|metrics\.jsonl"
    rf"|{CHECKPOINT}({'|'.join(map(re.escape, (*PARTS, MANIFEST)))})"
)
STEP = re.compile(r"step-\d{8}")
PARTIAL = re.compile(r"\.step-\d{8}\.tmp-[0-9a-f]{8}")
ADDRESS = re.compile(r"hub://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


@functools.cache
def bound_client() -> None:
    """Give the Hub's client time-outs, once a process: without them it waits for ever for a silent server."""
    set_client_factory(_bounded_client)


def _bounded_client() -> Any:
    # The client is made anew after some errors, and asks for no limit at all where it lists files. So what it asks for
    # is put right as each request goes out.
    def bound(request: Any) -> None:
        asked = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {kind: asked.get(kind) or limit for kind, limit in TIMEOUT_SECONDS.items()}

    client = default_client_factory()
    client.event_hooks = client.event_hooks | {"request": [*client.event_hooks["request"], bound]}
    return client


def _api() -> HfApi:
    """Return the Hub's client, bounded, and silent on the terminal."""
    bound_client()
    warnings.filterwarnings("ignore", module="huggingface_hub")
    disable_progress_bars()
    set_verbosity_error()
    return HfApi()


def check(repo_id: str, *, private: bool, fresh: bool, card: str = "") -> tuple[str, list[str]]:
    """Find before step 0 what cannot work. Nothing is made on the Hub.

    Args:
        repo_id: hub_model_id, or the run's name; without an owner it is the login's.
        fresh: whether the run starts at step 0.
        card: a README.md with what the user chose of its metadata.

    Returns: the full id (as it was given where the Hub cannot be asked), and what the user should know, a line each.
    Raises BadInput for a malformed id, no login, no right to write, another run's repository, and metadata that the Hub
    refuses.
    """
    where = f"hub_model_id = {repo_id}"
    try:
        validate_repo_id(repo_id)
        if get_token() is None:
            raise BadInput("push_to_hub = true: no login was found on this machine: hf auth login, or set HF_TOKEN")
        return _check(_api(), repo_id, private, fresh, card)
    except BadInput:
        raise
    except HFValidationError as error:
        raise BadInput(f"{where}: {error} Give NAME or OWNER/NAME") from None
    except Exception as error:  # each layer of the client has kinds of its own
        if _is_refusal(error):
            raise BadInput(f"{where}: {_words(error)}. Check the id, and what the token may do: {TOKENS}") from None
        return repo_id, [f"the Hub cannot be asked now ({_words(error)}); training starts, and pushes wait on disk"]


def _check(api: HfApi, repo_id: str, private: bool, fresh: bool, card: str) -> tuple[str, list[str]]:
    try:
        login = api.whoami()
    except OSError as error:
        if not _is_refusal(error):
            raise
        words = f"the Hub does not take the token ({_words(error)})"
        raise BadInput(f"push_to_hub = true: {words}: hf auth login --force, or another HF_TOKEN") from None
    try:
        if card:
            ModelCard(card).validate()
    except ValueError as error:
        raise BadInput(f"license, language, tags: the Hub refuses them: {_words(error)}") from None
    name, token = login["name"], login.get("auth", {}).get("accessToken", {})
    repo_id = repo_id if "/" in repo_id else f"{name}/{repo_id}"
    owner, where, notes = repo_id.split("/")[0], f"hub_model_id = {repo_id}", []
    fine = f"make a fine-grained one that may write to {owner}'s repositories: {TOKENS}"
    if token.get("role") == "read":
        raise BadInput(f"push_to_hub = true: the token may only read; {fine}")
    if token.get("role") in ("write", "admin"):
        notes.append(f"this token may write to all that {name} may write to; safer: {fine}")
    try:
        found = api.model_info(repo_id)
    except RepositoryNotFoundError:
        if not _may_create(login, token, owner):
            raise BadInput(f"{where}: {name} has no right to make it; give another owner, or {fine}") from None
        return repo_id, notes
    try:
        api.auth_check(repo_id, write=True)
    except OSError as error:
        if _status(error)[0] != 404:  # some mirrors of the Hub have no such route
            raise
    if private and found.private is False:
        notes.append(f"{repo_id} is there and is public; hub_private_repo = true is for repositories that are made")
    steps = sorted(ref.name for ref in api.list_repo_refs(repo_id).tags if STEP.fullmatch(ref.name))
    if fresh and steps:
        raise BadInput(
            f"{where}: holds another run's {steps[-1]}, and this run starts at step 0; give another hub_model_id, or go "
            f"on from there (hub_strategy checkpoint, all_checkpoints) with --resume_from_checkpoint hub://{repo_id}"
        )
    return repo_id, notes


def _may_create(login: dict, token: dict, owner: str) -> bool:
    scopes = token.get("fineGrained", {}).get("scoped")
    if scopes is not None:
        return owner in {scope["entity"].get("name") for scope in scopes if "repo.write" in scope["permissions"]}
    roles = {group["name"]: group.get("roleInOrg") for group in login.get("orgs", ())}
    return owner == login["name"] or roles.get(owner, "read") != "read"


class Pusher:
    """Keeps pushes in ``pending``, a folder within the run's, and sends them in the background.

    What an earlier process left there is sent first. A reason why nothing can be sent is logged once.

    Args:
        deadline: seconds of trying from a push's first failure on; then it waits for the next ``add``.
    """

    def __init__(self, pending: Path, deadline: float = DEADLINE_SECONDS):
        self.pending, self.deadline = pending, deadline
        pending.mkdir(parents=True, exist_ok=True)
        for path in pending.iterdir():  # what a killed process had not finished
            if PARTIAL.fullmatch(path.name) and not path.is_symlink():
                shutil.rmtree(path)
        self._due: SimpleQueue[bool] = SimpleQueue()
        self._due.put(True)
        self._thread = threading.Thread(target=self._work, name="hub", daemon=True)
        self._thread.start()

    def add(
        self, step: int, *, repo_id: str, private: bool, title: str, tag: str, files: dict[str, Path | str]
    ) -> None:
        """Lay the push of a step ready: weights by a hard link, all else by a copy. One that is there already stays.

        Where it cannot be kept (a full disk, for example), that is logged, and no more.

        Args:
            private: if the repository has to be made.
            title: of the commit, one line; no other push's.
            files: by their names in the repository: a file, or its text.

        Raises ValueError for a name that is not on the list, a link, and what is no regular file.
        """
        for name, source in files.items():
            if not ALLOWED.fullmatch(name):
                raise ValueError(f"{name}: is not on the list of what may be pushed")
            if isinstance(source, Path) and (source.is_symlink() or not source.is_file()):
                raise ValueError(f"{source}: is no regular file, so it is not pushed")
        push = {"step": step, "repo_id": repo_id, "private": private, "title": " ".join(title.split()), "tag": tag}
        try:
            _stage(self.pending / f"step-{step:08d}", push, files)
        except OSError as error:
            log.error(f"no push of step {step}: {error}. Free some space; the run goes on")
            return
        self._due.put(True)

    def close(self, seconds: float) -> int:
        """Wait so many seconds at most for what is pending; return how many pushes are left. May be called again."""
        self._due.put(False)
        self._thread.join(seconds)
        return len(_staged(self.pending))

    @property
    def sending(self) -> bool:
        """Whether, after ``close``, something is still being tried."""
        return self._thread.is_alive()

    def _work(self) -> None:
        told = None
        while self._due.get():
            try:
                with _sending(self.pending):
                    fault = _send_all(self.pending, self.deadline)
            except BadInput:  # another process sends them
                continue
            except Exception as error:  # the folder is gone, for example: training goes on
                fault = "a push", _words(error)
            # Once the main thread has ended, printing from another one can bring the interpreter down.
            if fault and fault[1] != told and threading.main_thread().is_alive():
                log.warning(_waits(self.pending, *fault))
            told = fault and fault[1]


def push_pending(pending: Path, deadline: float = DEADLINE_SECONDS) -> int:
    """Send all that is staged, and return how many pushes are left.

    Raises BadInput (status 4) when another process is sending them.
    """
    if not pending.is_dir():
        return 0
    with _sending(pending):
        if fault := _send_all(pending, deadline, sent=logging.INFO):
            log.warning(_waits(pending, *fault))
        return len(_staged(pending))


def _sending(pending: Path) -> contextlib.AbstractContextManager:
    return files.locked(pending / ".lock", f"{pending}: process {{pid}} is sending it; wait until it has", 4)


def _waits(pending: Path, name: str, reason: str) -> str:
    command = f"python train.py --push_pending {pending.parent}"
    return f"hub: {name} is not on the Hub: {reason}. It waits in {pending}; to send it later: {command}"


def _stage(folder: Path, push: dict, sources: dict[str, Path | str]) -> None:
    if (folder / PUSH).is_file():
        return
    with files.making(folder) as aside:
        rows = {}
        for name, source in sources.items():
            path = aside / "files" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _place(source, path)
            rows[name] = {"size": path.stat().st_size}
        files.write_json(aside / PUSH, push | {"parent": None, "files": rows})


def _place(source: Path | str, path: Path) -> None:
    if isinstance(source, str):
        path.write_bytes(source.encode())
        return
    if path.suffix == ".safetensors":  # big, and never changed once written; a log grows, so it must be copied
        with contextlib.suppress(OSError):  # another file system, or one without links
            os.link(source, path)
            return
    shutil.copyfile(source, path)


def _staged(pending: Path) -> list[Path]:
    """Return the staged pushes, oldest first."""
    return sorted(path for path in pending.iterdir() if STEP.fullmatch(path.name) and (path / PUSH).is_file())


def _send_all(pending: Path, deadline: float, sent: int = logging.DEBUG) -> tuple[str, str] | None:
    """Send what is staged, also what is added meanwhile; return which push could not be sent, and why.

    ``sent``: the level at which a push that was sent is logged.
    """
    fault, seen = None, set()
    while left := [folder for folder in _staged(pending) if folder not in seen]:
        folder = left[0]
        seen.add(folder)
        try:
            push, sums = json.loads((folder / PUSH).read_text(encoding="utf-8")), {}
            address = _patiently(deadline, _send, _api(), folder, push, sums)
            log.log(sent, f"hub: {folder.name} is on the Hub: {address}")
        except BadInput as error:  # it is damaged; the others are not
            fault = folder.name, str(error)
        except Exception as error:  # whatever is wrong with the Hub: the next one would meet it, or overtake this one
            return folder.name, _words(error)
    return fault


def _send(api: HfApi, folder: Path, push: dict, sums: dict[str, str]) -> str:
    """Bring a push to the Hub, from where the last attempt ended, and return its address.

    ``sums`` is filled with the files' SHA-256 by the first attempt that needs them.
    """
    repo_id = push["repo_id"]
    if "/" not in repo_id:  # the Hub could not be asked for the login's name
        repo_id = f"{api.whoami()['name']}/{repo_id}"
    try:
        refs = api.list_repo_refs(repo_id)
    except RepositoryNotFoundError:
        api.create_repo(repo_id, private=push["private"], exist_ok=True)
        refs = api.list_repo_refs(repo_id)
    if push["tag"] not in {ref.name for ref in refs.tags}:
        commit = _commit(api, repo_id, folder, push, sums)
        api.create_tag(repo_id, tag=push["tag"], revision=commit, exist_ok=True)
    shutil.rmtree(folder / "files", ignore_errors=True)  # push.json goes last: until then it stands in the queue
    shutil.rmtree(folder)
    return f"{repo_id}@{push['tag']}"


def _commit(api: HfApi, repo_id: str, folder: Path, push: dict, sums: dict[str, str]) -> str:
    """Make the push's commit, unless an attempt whose answer was lost has; return it."""
    found = api.model_info(repo_id)
    for commit in api.list_repo_commits(repo_id) if push["parent"] not in (None, found.sha) else ():
        if commit.commit_id == push["parent"]:  # what comes after was before that attempt
            break
        if commit.title == push["title"]:
            return commit.commit_id
    if strangers := [name for name in push["files"] if not ALLOWED.fullmatch(name)]:
        raise BadInput(f"{folder / PUSH}: {strangers[0]} is not on the list of what may be pushed")
    sums or sums.update(_checksums(folder / "files", push["files"], f"to give this push up, remove {folder}"))
    push["parent"] = found.sha
    push["files"] = {name: row | {"sha256": sums[name]} for name, row in push["files"].items()}
    files.write_json(folder / PUSH, push)
    operations = []
    if any(re.match(CHECKPOINT, name) for name in sums):  # no older one stays behind as the last
        there = {sibling.rfilename for sibling in found.siblings if sibling.rfilename.startswith(NEWEST)}
        operations = [CommitOperationDelete(name) for name in sorted(there - set(sums))]
    for name, digest in sums.items():
        operation = CommitOperationAdd(name, folder / "files" / name)
        operation.upload_info.sha256 = bytes.fromhex(digest)  # spares the client reading all of it once more
        operations.append(operation)
    # Naming the parent makes the Hub refuse a commit that comes twice.
    return api.create_commit(repo_id, operations, commit_message=push["title"], parent_commit=found.sha).oid


def _checksums(folder: Path, rows: dict[str, dict], remedy: str) -> dict[str, str]:
    """Return each file's SHA-256. Raises BadInput where one has not the size, or the SHA-256, of its row."""
    sums = {}
    for name, row in rows.items():
        path = folder / name
        if path.is_file() and not path.is_symlink() and path.stat().st_size == row["size"]:
            sums[name] = files.sha256(path)
        if name not in sums or row.get("sha256", sums[name]) != sums[name]:
            raise BadInput(f"{path}: is damaged; {remedy}")
    return sums


def is_address(source: str) -> bool:
    """Whether a checkpoint is one of the Hub (hub://...)."""
    return source.startswith("hub://")


def fetch_checkpoint(source: str, checkpoints: Path, run_dir: Path) -> Path:
    """Fetch a full checkpoint that was pushed into ``checkpoints``, and return its folder.

    It also fetches metrics.jsonl where ``run_dir`` has none. What is there and whole is not fetched again.

    Args:
        source: hub://OWNER/NAME or hub://OWNER/NAME@REVISION: a tag, a branch or a commit.

    Raises BadInput where it does not exist, may not be read or is damaged, TrainingStopped where the Hub is down.
    """
    where = f"resume_from_checkpoint = {source}"
    address = ADDRESS.fullmatch(source)
    try:
        if not address:
            raise HFValidationError("is no address of the Hub.")
        return _fetch(_api(), *address.groups(), where, checkpoints, run_dir)
    except BadInput:
        raise
    except HFValidationError as error:
        raise BadInput(f"{where}: {error} Give hub://OWNER/NAME or hub://OWNER/NAME@step-00005000") from None
    except OfflineModeIsEnabled:
        raise BadInput(f"{where}: HF_HUB_OFFLINE is set; unset it, or give a checkpoint of this machine") from None
    except Exception as error:  # each layer of the client has kinds of its own
        if not _is_refusal(error):
            raise TrainingStopped(f"{where}: {_words(error)}. The same command goes on from what was fetched") from None
        remedy = "Check the id and the revision, and that you may read it: hf auth login, or HF_TOKEN"
        raise BadInput(f"{where}: {_words(error)}. {remedy}") from None


def _fetch(api: HfApi, repo_id: str, revision: str | None, where: str, checkpoints: Path, run_dir: Path) -> Path:
    found = _patiently(DEADLINE_SECONDS, api.model_info, repo_id, revision=revision)
    names = {sibling.rfilename for sibling in found.siblings}
    within = sorted(name.removesuffix(MANIFEST) for name in names if re.fullmatch(CHECKPOINT + MANIFEST, name))
    if not within:
        raise BadInput(f"{where}: has no full checkpoint; only hub_strategy = checkpoint and all_checkpoints push one")
    aside = checkpoints / f".hub-{found.sha[:12]}"  # of this commit, so a fetch that was killed goes on
    aside.mkdir(parents=True, exist_ok=True)

    def fetched(name: str) -> Path:
        download = functools.partial(api.hf_hub_download, revision=found.sha, local_dir=aside)
        return Path(_patiently(DEADLINE_SECONDS, download, repo_id, name))

    try:
        manifest = json.loads(fetched(within[-1] + MANIFEST).read_text(encoding="utf-8"))
        path = checkpoints / f"step-{manifest['step']:08d}"
        rows = {name: {key: manifest["files"][name][key] for key in ("size", "sha256")} for name in PARTS}
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{where}: {within[-1]}{MANIFEST} cannot be read ({type(error).__name__})") from None
    if path.exists():
        _checksums(path, rows, f"or it is not the one that {where} names: move {path} away")
    else:
        for name in PARTS:
            fetched(within[-1] + name)
        try:
            _checksums(aside / within[-1], rows, f"try again, or another revision than {where}")
        except BadInput:
            shutil.rmtree(aside)
            raise
        for file in [*(aside / within[-1]).iterdir(), aside / within[-1]]:
            files.fsync(file)
        (aside / within[-1]).rename(path)
        files.fsync(checkpoints)
    if METRICS in names and not (run_dir / METRICS).exists():
        with files.replacing(run_dir / METRICS) as temporary:
            shutil.copyfile(fetched(METRICS), temporary)
    for old in checkpoints.glob(".hub-*"):
        shutil.rmtree(old)
    return path


def _patiently(deadline: float, call: Callable[..., Any], *args, **kwargs) -> Any:
    """Call until it works; raise the last error where another attempt cannot help, or ``deadline`` seconds are over."""
    waits, until = chain(WAIT_SECONDS, repeat(WAIT_SECONDS[-1])), math.inf
    while True:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            until = min(until, time.monotonic() + deadline)
            wait = max(next(waits), _status(error)[1])
            if _is_final(error) or time.monotonic() + wait > until:
                raise
        time.sleep(wait)


def _is_final(error: BaseException) -> bool:
    """Whether another attempt would end in the same way."""
    here = isinstance(error, (BadInput, HFValidationError, OfflineModeIsEnabled))
    return here or _is_refusal(error) or getattr(error, "errno", None) in LOCAL


def _is_refusal(error: BaseException) -> bool:
    """Whether the Hub was reached and says no, for good."""
    status = _status(error)[0]
    return status is not None and 400 <= status < 500 and status not in HEALING


def _status(error: BaseException | None) -> tuple[int | None, float]:
    """Return the HTTP status behind an error, and how many seconds its Retry-After asks to wait."""
    while error is not None:
        answer = getattr(error, "response", None)
        if answer is not None:
            asked = answer.headers.get("Retry-After", "")
            return answer.status_code, float(asked) if asked.isdigit() else 0.0
        error = error.__cause__
    return None, 0.0


def _words(error: BaseException) -> str:
    """Return an error in one line, without a token."""
    if isinstance(error, (LocalEntryNotFoundError, RuntimeError)):  # what happened is behind it
        error = error.__cause__ or error
    status = _status(error)[0]
    name = type(error).__name__ if status is None else f"HTTP status {status}"
    text = str(error) if status is None else getattr(error, "server_message", None) or ""
    text = redact(" ".join(SECRET.sub("hf_...", text).split()))[:300]
    return f"{name}: {text}" if text else name
