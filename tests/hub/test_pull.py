"""A fresh machine gets a whole checkpoint from the Hub, or a reason."""

import json
import os
from pathlib import Path

import pytest
from fake_hub import InjectedError
from huggingface_hub import constants
from push_helpers import ENDPOINTS, REPO_ID, checkpoint_files, pushed_files, stage_pushes, step_tag

from ursa_minor.base.errors import BadInput, TrainingStopped
from ursa_minor.hub import pull as fetching
from ursa_minor.hub import push

pytest_plugins = ["push_helpers"]
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")  # how the client sends LFS objects


@pytest.fixture
def pushed(server, pending):
    """A repository with steps 5 and 12, each with its checkpoint as the last one."""
    stage_pushes(pending, 5, 12)
    push.push_pending(pending)
    server.requests.clear()
    return server


@pytest.fixture
def new(tmp_path) -> Path:
    """The run folder of a fresh machine."""
    return tmp_path / "new"


def fetch(new: Path, source: str = f"hub://{REPO_ID}") -> Path:
    return fetching.fetch_checkpoint(source, new / "checkpoints", new)


def held(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def last(server) -> dict[str, bytes]:
    """The files of the newest commit, by name; what is changed there is changed on the Hub."""
    return server.repositories[REPO_ID].commits[-1].files


def test_newest_checkpoint_is_fetched_whole_with_its_log_and_not_again(pushed, new):
    path = fetch(new)
    assert path == new / "checkpoints" / step_tag(12) and held(path) == checkpoint_files(12)
    assert (new / "metrics.jsonl").read_bytes() == pushed_files(12)["metrics.jsonl"]
    assert os.listdir(new / "checkpoints") == [step_tag(12)]
    (new / "metrics.jsonl").write_text("mine")
    pushed.requests.clear()
    assert held(fetch(new)) == checkpoint_files(12)
    assert not pushed.count("safetensors") and (new / "metrics.jsonl").read_text() == "mine"
    (path / "model.safetensors").write_bytes(b"another run's")
    with pytest.raises(
        BadInput, match=f"{step_tag(12)}/model.safetensors has 13 bytes.*Move the folder"
    ):
        fetch(new)
    assert (path / "model.safetensors").read_bytes() == b"another run's"


def test_checkpoint_of_a_tag_or_a_commit_is_fetched_and_of_all_checkpoints_the_newest(
    server, pending, new, tmp_path
):
    for step in (5, 12):
        stage_pushes(pending, step, within=f"checkpoints/{step_tag(step)}")
    push.push_pending(pending)
    assert held(fetch(new)) == checkpoint_files(12)
    for number, revision in enumerate(
        (step_tag(5), server.repositories[REPO_ID].tags[step_tag(5)])
    ):
        assert held(
            fetch(tmp_path / str(number), f"hub://{REPO_ID}@{revision}")
        ) == checkpoint_files(5)
    last(server)[f"checkpoints/{step_tag(12)}/manifest.json"] = checkpoint_files(5)[
        "manifest.json"
    ]  # of another folder
    with pytest.raises(
        BadInput, match=f"{step_tag(12)}/manifest.json in the repository is damaged"
    ):
        fetch(new)


def test_damaged_or_missing_file_is_found_and_nothing_of_it_is_kept(pushed, new):
    for name in ("optimizer.safetensors", "state.json"):
        good = last(pushed).pop(f"last-checkpoint/{name}")
        with pytest.raises(BadInput, match=f"hub://{REPO_ID}: HTTP status 404"):
            fetch(new)
        last(pushed)[f"last-checkpoint/{name}"] = good[:-1] + bytes([good[-1] ^ 1])
        with pytest.raises(
            BadInput, match=f"{name} is .*Run the same command again, or use another revision"
        ):
            fetch(new)
        assert not os.listdir(new / "checkpoints")
        last(pushed)[f"last-checkpoint/{name}"] = good
    assert held(fetch(new)) == checkpoint_files(12)
    stated = json.loads(last(pushed)["last-checkpoint/manifest.json"])
    for change in (
        {"step": "../x"},
        {"step": 10**9},
        {"files": {}},
        None,
    ):  # none, or of a step that no checkpoint has
        last(pushed)["last-checkpoint/manifest.json"] = json.dumps(
            change and stated | change
        ).encode()
        with pytest.raises(BadInput, match="last-checkpoint/manifest.json in the .* is damaged"):
            fetch(new.with_name("other"))


def test_address_without_a_checkpoint_no_token_and_no_network_are_refused_with_a_remedy(
    pushed, new, monkeypatch
):
    for source, words in [
        ("hub://me/nothing", "HTTP status 404: Repository not found.*hf auth login"),
        (f"hub://{REPO_ID}@step-00000009", "HTTP status 404: Invalid rev id.*the revision"),
        ("hub://run", "this is not an address on the Hub. Use hub://OWNER/NAME"),
        ("hub://me/a..b", "HFValidationError: .*Check the id"),
    ]:
        with pytest.raises(BadInput, match=f"^resume_from_checkpoint = {source}: .*{words}"):
            fetch(new, source)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(BadInput, match="HTTP status 401.*hf auth login, or HF_TOKEN"):
        fetch(new)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="OfflineModeIsEnabled.*HF_HUB_OFFLINE"):
        fetch(new)
    assert not new.exists()


def test_fetch_that_gave_up_goes_on_from_what_it_has_and_survives_a_hub_that_is_down_for_a_while(
    pushed, new
):
    pushed.problems = [InjectedError("GET .*optimizer", 10**6)]
    with pytest.raises(TrainingStopped, match=r"HTTP status 503.*\. The same command resumes"):
        fetch(new)
    problems = ((ENDPOINTS["info"], "status"), ("GET .*metrics", "status"), ("GET .*state", "drop"))
    pushed.problems = [
        InjectedError(match, 6, kind) for match, kind in problems
    ]  # down for a while
    pushed.requests.clear()
    del last(pushed)["metrics.jsonl"]  # a checkpoint without its log is one
    assert held(fetch(new)) == checkpoint_files(12) and not (new / "metrics.jsonl").exists()
    assert not pushed.count("GET .*last-checkpoint/model.safetensors") and os.listdir(
        new / "checkpoints"
    ) == [step_tag(12)]


def test_a_run_that_pushes_there_begins_where_nothing_was_pushed_and_nowhere_else(
    server, pending, new, monkeypatch
):
    def begins(repo_id: str) -> bool:
        return (
            fetching.fetch_checkpoint(f"hub://{repo_id}", new / "checkpoints", new, missing_ok=True)
            is None
        )

    assert begins(REPO_ID)  # there is no such repository
    server.make("me/by-hand").commits[-1].files["README.md"] = b"soon"
    assert begins("me/by-hand")
    stage_pushes(pending, 5, within=None)
    push.push_pending(pending)
    with pytest.raises(BadInput, match="contains no full checkpoint"):
        begins(REPO_ID)
    server.problems.append(InjectedError("GET /api/models/", times=float("inf"), status=503))
    with pytest.raises(TrainingStopped, match="503"):  # it may hold a step
        begins("me/nothing")
    server.problems.clear()
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(BadInput, match="HTTP status 401"):
        begins(REPO_ID)
    assert not new.exists()
