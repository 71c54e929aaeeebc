"""A Hub on localhost for the real client, and the pushes that tests send to it.

Waits take no time: the clock is the test's.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import HubServer
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

from ursa_minor.base import files, retry
from ursa_minor.hub import card_merge, push

REPO_ID, TOKEN = "me/run", "hf_" + "Canary" * 6
# What a push asks of the Hub, in order.
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
    """A clock that only waiting moves."""

    def __init__(self):
        self.now, self.waits = 0.0, []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(retry, "time", clock)
    monkeypatch.setattr(_http, "time", clock)
    monkeypatch.setattr(file_download, "time", clock)
    return clock


@pytest.fixture
def server(monkeypatch, tmp_path, clock) -> Iterator[HubServer]:
    """A Hub, and this process's client turned to it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(
        files, "fsync", lambda path: None
    )  # takes time, and shows only in a power cut
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


@pytest.fixture
def pending(tmp_path) -> Path:
    return tmp_path / "run" / "hub"


def step_tag(step: int) -> str:
    return f"step-{step:08d}"


def commit_title(step: int) -> str:
    return f"run, step {step}: train loss {10 / step:.4f}"


def checkpoint_files(step: int) -> dict[str, bytes]:
    """Return the files of a checkpoint."""
    made = {
        "model.safetensors": f"weights {step}".encode() * 500,
        "optimizer.safetensors": f"moments {step}".encode() * 1000,
        "state.json": json.dumps({"step": step}).encode(),
    }
    rows = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in made.items()
    }
    return made | {"manifest.json": json.dumps({"step": step, "files": rows}).encode()}


def pushed_files(step: int, within: str | None = "last-checkpoint") -> dict[str, bytes]:
    """Return what a push of this step is to bring to the Hub."""
    made = {
        "config.json": b'{"n_layer": 2}',
        "README.md": card_merge.mark(f"---\nlicense: mit\n---\n# Step {step}\n").encode(),
        "model.safetensors": checkpoint_files(step)["model.safetensors"],
        "metrics.jsonl": b"".join(json.dumps({"step": i}).encode() + b"\n" for i in range(step)),
    }
    return made | (
        {f"{within}/{name}": data for name, data in checkpoint_files(step).items()}
        if within
        else {}
    )


def make_push(step: int, *, repo_id: str = REPO_ID, keep: bool = False) -> push.Push:
    return push.Push(step=step, repo_id=repo_id, private=True, title=commit_title(step), keep=keep)


def write_files(
    folder: Path, step: int, within: str | None = "last-checkpoint"
) -> tuple[str, dict[str, Path]]:
    """Write a step's files below ``folder``; return its model card and the files by name."""
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
    pusher.submit(make_push(step, keep=keep), *write_files(folder, step))


def stage_pushes(
    pending: Path, *steps: int, within: str | None = "last-checkpoint", repo_id: str = REPO_ID
) -> None:
    """Stage pushes without sending them."""
    pending.mkdir(parents=True, exist_ok=True)
    for step in steps:
        card, sources = write_files(pending.parent.parent / "made", step, within)
        push.stage(pending, make_push(step, repo_id=repo_id), card, sources)


def staged_names(pending: Path) -> list[str]:
    return sorted(path.name for path in pending.glob("step-*"))


def assert_pushed(server: HubServer, pending: Path, *steps: int) -> None:
    """Assert one commit and one tag a step, in order, every byte as it was, and nothing left on disk."""
    assert server.titles(REPO_ID) == [commit_title(step) for step in reversed(steps)]
    assert server.tags(REPO_ID) == {step_tag(step): commit_title(step) for step in steps}
    for step in steps:
        assert server.files(REPO_ID, step_tag(step)) == pushed_files(step)
    assert server.files(REPO_ID) == pushed_files(steps[-1])
    assert os.listdir(pending) == [".lock"]


def wait_until(true, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)
