"""Fetch a complete checkpoint from the Hub, or report why it is impossible."""

import json
import os
from pathlib import Path

import pytest
from fake_hub import InjectedError
from huggingface_hub import constants
from push_helpers import ENDPOINTS, REPO_ID, checkpoint_files, pushed_files, stage_pushes, step_tag

from ursa_minor.base.errors import BadInput, TrainingStopped
from ursa_minor.base.run_files import RESUME_FILES
from ursa_minor.hub import pull, push

pytest_plugins = ["push_helpers"]
# The Hub's client uploads LFS objects with a deprecated option of httpx.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")
MANIFEST = "last-checkpoint/manifest.json"


@pytest.fixture
def pushed(server, pending):
    """Push steps 5 and 12, each with its checkpoint as the last one, and return the server."""
    stage_pushes(pending, 5, 12)
    push.push_pending(pending)
    server.requests.clear()
    return server


@pytest.fixture
def new_run(tmp_path) -> Path:
    """Return the run folder of another machine. It does not exist yet."""
    return tmp_path / "new"


def fetch(run_dir: Path, source: str = f"hub://{REPO_ID}", *, missing_ok: bool = False):
    """Fetch a checkpoint into a run folder and return its path."""
    return pull.fetch_checkpoint(source, run_dir / "checkpoints", run_dir, missing_ok=missing_ok)


def folder_contents(path: Path) -> dict[str, bytes]:
    """Return the files of a folder and its subfolders by name."""
    paths = [file for file in path.rglob("*") if file.is_file()]
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in paths}


def files_on_hub(server) -> dict[str, bytes]:
    """Return the files of the newest commit. Changes of this dictionary change the Hub."""
    return server.repositories[REPO_ID].commits[-1].files


def test_newest_checkpoint_is_fetched_with_metrics(pushed, new_run):
    path = fetch(new_run)

    assert path == new_run / "checkpoints" / step_tag(12)
    assert folder_contents(path) == checkpoint_files(12)
    assert (new_run / "metrics.jsonl").read_bytes() == pushed_files(12)["metrics.jsonl"]
    assert os.listdir(new_run / "checkpoints") == [step_tag(12)]


def test_newer_kept_weights_are_ignored(server, pending, new_run):
    stage_pushes(pending, 5, within=f"checkpoints/{step_tag(5)}")
    stage_pushes(pending, 8, within=f"checkpoints/{step_tag(8)}")
    push.push_pending(pending)
    for name in list(files_on_hub(server)):
        if name.startswith(f"checkpoints/{step_tag(8)}/training/"):
            del files_on_hub(server)[name]

    path = fetch(new_run)

    assert path == new_run / "checkpoints" / step_tag(5)


@pytest.mark.parametrize("missing_ok", [True, False])
def test_repository_with_only_kept_weights_has_no_checkpoint(server, pending, new_run, missing_ok):
    stage_pushes(pending, 8, within=f"checkpoints/{step_tag(8)}")
    push.push_pending(pending)
    for name in list(files_on_hub(server)):
        if "/training/" in name:
            del files_on_hub(server)[name]

    if missing_ok:
        assert fetch(new_run, missing_ok=True) is None
        return
    with pytest.raises(BadInput, match="no full checkpoint"):
        fetch(new_run)


def test_existing_files_are_not_fetched_again(pushed, new_run):
    fetch(new_run)
    (new_run / "metrics.jsonl").write_text("mine")
    pushed.requests.clear()

    path = fetch(new_run)

    assert folder_contents(path) == checkpoint_files(12)
    assert (new_run / "metrics.jsonl").read_text() == "mine"
    assert not pushed.count("safetensors")


def test_checkpoint_of_other_run_is_not_replaced(pushed, new_run):
    model = fetch(new_run) / "model.safetensors"
    model.write_bytes(b"another run's")

    with pytest.raises(BadInput) as caught:
        fetch(new_run)

    message = str(caught.value)
    assert f"{step_tag(12)}/model.safetensors" in message
    assert "13 bytes" in message
    assert "Move the folder" in message
    assert model.read_bytes() == b"another run's"


@pytest.fixture
def pushed_checkpoints(server, pending):
    """Push steps 5 and 12 with all_checkpoints, and return the server."""
    for step in (5, 12):
        stage_pushes(pending, step, within=f"checkpoints/{step_tag(step)}")
    push.push_pending(pending)
    return server


def test_newest_of_all_checkpoints_is_fetched(pushed_checkpoints, new_run):
    assert folder_contents(fetch(new_run)) == checkpoint_files(12)


@pytest.mark.parametrize("is_tag", [True, False], ids=["tag", "commit"])
def test_checkpoint_of_revision_is_fetched(pushed_checkpoints, new_run, is_tag):
    revision = step_tag(5)
    if not is_tag:
        revision = pushed_checkpoints.repositories[REPO_ID].tags[revision]

    path = fetch(new_run, f"hub://{REPO_ID}@{revision}")

    assert folder_contents(path) == checkpoint_files(5)


def test_manifest_of_other_step_is_rejected(pushed_checkpoints, new_run):
    name = f"checkpoints/{step_tag(12)}/manifest.json"
    files_on_hub(pushed_checkpoints)[name] = checkpoint_files(5)["manifest.json"]

    with pytest.raises(BadInput) as caught:
        fetch(new_run)

    message = str(caught.value)
    assert f"{step_tag(12)}/manifest.json" in message
    assert "damaged" in message


def test_missing_or_damaged_file_is_reported(pushed, new_run):
    files = files_on_hub(pushed)
    for name in ("training/optimizer.safetensors", "training/state.json", "config.json"):
        data = files.pop(f"last-checkpoint/{name}")
        with pytest.raises(BadInput) as caught:
            fetch(new_run)
        assert f"hub://{REPO_ID}" in str(caught.value)
        assert "404" in str(caught.value)

        files[f"last-checkpoint/{name}"] = data[:-1] + bytes([data[-1] ^ 1])
        with pytest.raises(BadInput) as caught:
            fetch(new_run)
        assert name in str(caught.value)
        assert "Run the same command again, or use another revision" in str(caught.value)
        assert not os.listdir(new_run / "checkpoints")
        files[f"last-checkpoint/{name}"] = data

    assert folder_contents(fetch(new_run)) == checkpoint_files(12)


ROW = {"size": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "../x"},
        {"step": 10**9},
        {"files": {}},
        {"files": dict.fromkeys((*RESUME_FILES, "../../notes.txt"), ROW)},
        None,
    ],
    ids=["outside", "impossible step", "no files", "other file", "null"],
)
def test_damaged_manifest_is_reported(pushed, new_run, changes):
    files = files_on_hub(pushed)
    manifest = None
    if changes is not None:
        manifest = json.loads(files[MANIFEST]) | changes
    files[MANIFEST] = json.dumps(manifest).encode()

    with pytest.raises(BadInput) as caught:
        fetch(new_run)

    assert MANIFEST in str(caught.value)
    assert "damaged" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "problem", "fix"),
    [
        ("hub://me/nothing", "HTTP status 404: Repository not found", "hf auth login"),
        (f"hub://{REPO_ID}@step-00000009", "HTTP status 404: Invalid rev id", "revision"),
        ("hub://run", "not an address on the Hub", "hub://OWNER/NAME"),
        ("hub://me/a..b", "HFValidationError", "Check the id"),
    ],
    ids=["no repository", "no revision", "no owner", "invalid id"],
)
def test_source_without_checkpoint_is_rejected(pushed, new_run, source, problem, fix):
    with pytest.raises(BadInput) as caught:
        fetch(new_run, source)

    message = str(caught.value)
    assert message.startswith(f"resume_from_checkpoint = {source}: ")
    assert problem in message
    assert fix in message
    assert not new_run.exists()


def test_fetch_needs_token_and_network(pushed, new_run, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(BadInput, match="hf auth login, or HF_TOKEN"):
        fetch(new_run)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="HF_HUB_OFFLINE"):
        fetch(new_run)

    assert not new_run.exists()


def test_interrupted_fetch_continues_after_outage(pushed, new_run):
    pushed.problems = [InjectedError("GET .*optimizer", 10**6)]
    with pytest.raises(TrainingStopped, match=r"HTTP status 503.*\. The same command resumes"):
        fetch(new_run)
    # The Hub fails more often than its client retries. A checkpoint is complete without metrics.
    pushed.problems = [
        InjectedError(ENDPOINTS["info"], 6, "status"),
        InjectedError("GET .*metrics", 6, "status"),
        InjectedError("GET .*state", 6, "drop"),
    ]
    del files_on_hub(pushed)["metrics.jsonl"]
    pushed.requests.clear()

    path = fetch(new_run)

    assert folder_contents(path) == checkpoint_files(12)
    assert not pushed.count("GET .*last-checkpoint/model.safetensors")
    assert not (new_run / "metrics.jsonl").exists()
    assert os.listdir(new_run / "checkpoints") == [step_tag(12)]


def test_missing_repository_starts_new_run(server, new_run):
    assert fetch(new_run, missing_ok=True) is None
    assert not new_run.exists()


def test_repository_without_pushes_starts_new_run(server, new_run):
    server.make(REPO_ID).commits[-1].files["README.md"] = b"soon"

    assert fetch(new_run, missing_ok=True) is None
    assert not new_run.exists()


def test_push_without_checkpoint_starts_no_run(server, pending, new_run):
    stage_pushes(pending, 5, within=None)
    push.push_pending(pending)

    with pytest.raises(BadInput, match="contains no full checkpoint"):
        fetch(new_run, missing_ok=True)
    assert not new_run.exists()


def test_unavailable_hub_starts_no_run(server, new_run):
    server.problems.append(InjectedError("GET /api/models/", times=float("inf"), status=503))

    # The repository may contain a checkpoint.
    with pytest.raises(TrainingStopped, match="503"):
        fetch(new_run, "hub://me/nothing", missing_ok=True)
    assert not new_run.exists()


def test_missing_token_starts_no_run(server, new_run, monkeypatch):
    server.make(REPO_ID)
    monkeypatch.delenv("HF_TOKEN")

    with pytest.raises(BadInput, match="HTTP status 401"):
        fetch(new_run, missing_ok=True)
    assert not new_run.exists()
