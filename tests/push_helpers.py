"""Fixtures and helpers for tests that push to a local Hub with the real client.

Retries take no time in these tests, because the modules that wait use a fake clock.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_hub import HubServer
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

from ursa_minor.base import files, retry
from ursa_minor.hub import card_merge, push

REPO_ID = "me/run"
TOKEN = "hf_" + "Canary" * 6
LAST_CHECKPOINT = "last-checkpoint"
# The requests of a push, in order.
ENDPOINTS = {
    "refs": "GET .*/refs",
    "create": "POST /api/repos/create",
    "info": "GET /api/models/me/run$",
    "validate": "POST /api/validate-yaml",
    "preupload": "POST .*/preupload/",
    "batch": "POST .*/objects/batch",
    "put": "PUT /lfs/",
    "commit": "POST .*/commit/",
    "files": "GET .*/tree/",
    "tag": "POST .*/tag/",
}


class Clock:
    """A replacement of the module time that only ``sleep`` moves."""

    def __init__(self):
        self.now = 0.0
        self.waits = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """Replace the clock of retries, ours and those of the Hub's client."""
    clock = Clock()
    monkeypatch.setattr(retry, "time", clock)
    monkeypatch.setattr(_http, "time", clock)
    monkeypatch.setattr(file_download, "time", clock)
    return clock


@pytest.fixture
def server(monkeypatch, tmp_path, clock) -> Iterator[HubServer]:
    """Start a local Hub and direct this process's client to it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # fsync is slow, and its effect is visible only after a power failure.
    monkeypatch.setattr(files, "fsync", lambda path: None)
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


@pytest.fixture
def pending(tmp_path) -> Path:
    """Return the folder of staged pushes in a run folder. It does not exist yet."""
    return tmp_path / "run" / "hub"


def step_tag(step: int) -> str:
    """Return the name of a staged push, which is also its tag on the Hub."""
    return f"step-{step:08d}"


def commit_title(step: int) -> str:
    """Return the title of the commit of a push."""
    return f"run, step {step}: train loss {10 / step:.4f}"


def checkpoint_files(step: int) -> dict[str, bytes]:
    """Return the files of a checkpoint."""
    contents = {
        "model.safetensors": f"weights {step}".encode() * 500,
        "config.json": b'{"n_layer": 2}',
        "tokenizer.json": f"tokenizer {step}".encode(),
        "training/optimizer.safetensors": f"moments {step}".encode() * 1000,
        "training/state.json": json.dumps({"step": step}).encode(),
    }
    rows = {}
    for name, data in contents.items():
        rows[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    contents["manifest.json"] = json.dumps({"step": step, "files": rows}).encode()
    return contents


def pushed_files(step: int, within: str | None = LAST_CHECKPOINT) -> dict[str, bytes]:
    """Return the files that a push of this step stores on the Hub.

    Args:
        step: the step of the push.
        within: the folder of the full checkpoint, or None for a push of the model only.
    """
    card = card_merge.mark(f"---\nlicense: mit\n---\n# Step {step}\n")
    rows = [json.dumps({"step": number}) for number in range(step)]
    contents = {
        "config.json": b'{"n_layer": 2}',
        "README.md": card.encode(),
        "model.safetensors": checkpoint_files(step)["model.safetensors"],
        "metrics.jsonl": "".join(row + "\n" for row in rows).encode(),
    }
    if within:
        for name, data in checkpoint_files(step).items():
            contents[f"{within}/{name}"] = data
    return contents


def make_push(step: int, *, repo_id: str = REPO_ID, keep: bool = False) -> push.Push:
    """Return a push to a private repository."""
    return push.Push(step=step, repo_id=repo_id, private=True, title=commit_title(step), keep=keep)


def write_files(
    folder: Path, step: int, within: str | None = LAST_CHECKPOINT
) -> tuple[str, dict[str, Path]]:
    """Write a step's files below ``folder``. Return its model card and the files by name."""
    contents = pushed_files(step, within)
    card = contents.pop("README.md").decode()
    sources = {}
    for name, data in contents.items():
        path = folder / str(step) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        sources[name] = path
    return card, sources


def submit_step(pusher: push.PushQueue, folder: Path, step: int, *, keep: bool = False) -> None:
    """Write a step's files below ``folder`` and submit their push."""
    card, sources = write_files(folder, step)
    pusher.submit(make_push(step, keep=keep), card, sources)


def stage_pushes(
    pending: Path, *steps: int, within: str | None = LAST_CHECKPOINT, repo_id: str = REPO_ID
) -> None:
    """Stage pushes without sending them."""
    pending.mkdir(parents=True, exist_ok=True)
    for step in steps:
        card, sources = write_files(pending.parent.parent / "made", step, within)
        push.stage(pending, make_push(step, repo_id=repo_id), card, sources)


def staged_names(pending: Path) -> list[str]:
    """Return the names of the staged pushes, sorted."""
    return sorted(path.name for path in pending.glob("step-*"))


def assert_pushed(server: HubServer, pending: Path, *steps: int) -> None:
    """Assert that the Hub has one commit and one tag per step, and that no push is staged.

    Every byte must be unchanged, and the commits must be in the order of ``steps``.
    """
    titles = [commit_title(step) for step in steps]
    tags = [step_tag(step) for step in steps]
    assert server.titles(REPO_ID) == titles[::-1]
    assert server.tags(REPO_ID) == dict(zip(tags, titles, strict=True))
    for step in steps:
        assert server.files(REPO_ID, step_tag(step)) == pushed_files(step)
    assert server.files(REPO_ID) == pushed_files(steps[-1])
    assert os.listdir(pending) == [".lock"]


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait until ``condition()`` is true. Fail after this many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
