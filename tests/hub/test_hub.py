"""The Hub gets each push once and whole, whatever happens on the way; and training does not notice.

The real client talks to a server on localhost (hub_server.py). Waits take no time: the clock is the test's.
"""

import hashlib
import json
import logging.handlers
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub_server import Fault, HubServer
from huggingface_hub import HfApi, constants, file_download
from huggingface_hub.utils import _http

from pretrain.base import files
from pretrain.base.errors import BadInput, TrainingStopped
from pretrain.hub import hub

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")  # how the client sends LFS objects
TOKEN = "hf_" + "Canary" * 6
ID = "me/run"
ROOT = Path(__file__).resolve().parents[2]
PUSH = "import sys, pathlib; from pretrain.hub import hub; hub.push_pending(pathlib.Path(sys.argv[1]))"
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
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(hub, "time", clock)
    monkeypatch.setattr(_http, "time", clock)
    monkeypatch.setattr(file_download, "time", clock)
    return clock


@pytest.fixture
def server(monkeypatch, tmp_path, clock):
    """A Hub, and this process's client turned to it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(files, "fsync", lambda path: None)  # takes time, and shows only in a power cut
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


@pytest.fixture
def pending(tmp_path) -> Path:
    return tmp_path / "run" / "hub"


def tag(step: int) -> str:
    return f"step-{step:08d}"


def title(step: int) -> str:
    return f"run, step {step}: train loss {10 / step:.4f}"


def parts(step: int) -> dict[str, bytes]:
    """Return the files of a checkpoint."""
    made = {
        "model.safetensors": f"weights {step}".encode() * 500,
        "optimizer.safetensors": f"moments {step}".encode() * 1000,
        "state.json": json.dumps({"step": step}).encode(),
    }
    rows = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in made.items()}
    return made | {"manifest.json": json.dumps({"step": step, "files": rows}).encode()}


def content(step: int, within: str | None = "last-checkpoint") -> dict[str, bytes]:
    """Return what a push of this step is to bring to the Hub."""
    made = {
        "config.json": b'{"n_layer": 2}',
        "README.md": f"---\nlicense: mit\n---\n# Step {step}\n".encode(),
        "model.safetensors": parts(step)["model.safetensors"],
        "metrics.jsonl": b"".join(json.dumps({"step": i}).encode() + b"\n" for i in range(step)),
    }
    return made | ({f"{within}/{name}": data for name, data in parts(step).items()} if within else {})


def add(pusher, folder: Path, step: int, within: str | None = "last-checkpoint", repo_id: str = ID) -> None:
    """Write a step's files below ``folder`` and add their push; the card goes as text."""
    made = {}
    for name, data in content(step, within).items():
        path = folder / str(step) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        made[name] = data.decode() if name == "README.md" else path
    pusher.add(step, repo_id=repo_id, private=True, title=title(step), tag=tag(step), files=made)


def stage(pending: Path, *steps: int, within: str | None = "last-checkpoint", repo_id: str = ID) -> None:
    """Lay pushes ready while another holds the lock, so that they are not sent."""
    pending.mkdir(parents=True, exist_ok=True)
    with files.locked(pending / ".lock", "busy"):
        pusher = hub.Pusher(pending)
        for step in steps:
            add(pusher, pending.parent.parent / "made", step, within, repo_id)
        assert pusher.close(10) == len(waiting(pending))


def waiting(pending: Path) -> list[str]:
    return sorted(path.name for path in pending.glob("step-*"))


def assert_arrived(server: HubServer, pending: Path, *steps: int) -> None:
    """Assert one commit and one tag a step, in order, every byte as it was, and nothing left on disk."""
    assert server.titles(ID) == [title(step) for step in reversed(steps)]
    assert server.tags(ID) == {tag(step): title(step) for step in steps}
    for step in steps:
        assert server.files(ID, tag(step)) == content(step)
    assert server.files(ID) == content(steps[-1])
    assert os.listdir(pending) == [".lock"]


# A push.


def test_push_is_one_commit_and_one_tag_in_a_private_repository(server, pending, caplog):
    stage(pending, 3)
    assert hub.push_pending(pending) == 0
    assert_arrived(server, pending, 3)
    assert server.repositories[ID].private and caplog.messages == [f"hub: {tag(3)} is on the Hub: {ID}@{tag(3)}"]
    assert server.count("POST .*/commit/") == 1


def test_pushes_arrive_in_order_and_once_each(server, pending, tmp_path):
    stage(pending, 9, 100, 5)
    pusher = hub.Pusher(pending)
    add(pusher, tmp_path, 200)
    assert pusher.close(20) == 0
    assert hub.push_pending(pending) == 0
    assert_arrived(server, pending, 5, 9, 100, 200)


def test_what_is_on_the_hub_already_is_not_sent_again(server, pending):
    stage(pending, 1)
    hub.push_pending(pending)
    sent = server.count("PUT /lfs/")
    stage(pending, 1)
    assert hub.push_pending(pending) == 0
    assert_arrived(server, pending, 1)
    assert server.count("PUT /lfs/") == sent and server.count("POST .*/commit/") == 1


def test_repository_that_is_public_stays_public(server, pending):
    server.make(ID, private=False)
    stage(pending, 1)
    assert hub.push_pending(pending) == 0
    assert_arrived(server, pending, 1)
    assert not server.repositories[ID].private and not server.count("repos/create")


def test_id_without_owner_becomes_the_logins_when_the_hub_is_there(server, pending):
    stage(pending, 1, repo_id="run")
    assert hub.push_pending(pending) == 0
    assert_arrived(server, pending, 1)


def test_last_checkpoint_goes_when_another_kind_comes_and_stays_when_none_does(server, pending):
    stage(pending, 1)
    stage(pending, 2, within=None)
    stage(pending, 3, within=f"checkpoints/{tag(3)}")
    stage(pending, 4, within=f"checkpoints/{tag(4)}")
    assert hub.push_pending(pending) == 0
    last = {name: data for name, data in content(1).items() if name.startswith("last-checkpoint/")}
    assert server.files(ID, tag(2)) == content(2, None) | last
    third = content(3, f"checkpoints/{tag(3)}")
    assert server.files(ID, tag(3)) == third
    assert server.files(ID, tag(4)) == third | content(4, f"checkpoints/{tag(4)}")


# What is laid ready.


@pytest.mark.parametrize(
    "name",
    [".env", "secrets.json", "a/config.json", "../config.json", "config.json\n", "last-checkpoint/.env", "model.bin"]
    + ["checkpoints/step-1/state.json", "checkpoints/../state.json", "last-checkpoint/model-2.safetensors"],
)
def test_other_names_are_refused(server, pending, tmp_path, name):
    (tmp_path / "file").write_text("secret")
    pusher = hub.Pusher(pending)
    with pytest.raises(ValueError, match="not on the list"):
        pusher.add(1, repo_id=ID, private=True, title="t", tag=tag(1), files={name: tmp_path / "file"})
    assert pusher.close(5) == 0 and not server.requests


def test_links_directories_and_missing_files_are_refused(server, pending, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    pusher = hub.Pusher(pending)
    for source in (tmp_path / "link", tmp_path, tmp_path / "nothing"):
        with pytest.raises(ValueError, match="no regular file"):
            pusher.add(1, repo_id=ID, private=True, title="t", tag=tag(1), files={"config.json": source})
    assert pusher.close(5) == 0 and not server.requests


def test_names_of_a_run_are_on_the_list():
    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
    names += ["merges.txt", "README.md", "recipe.yaml", "curves.png", "metrics.jsonl", "model.safetensors"]
    names += ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    assert all(map(hub.ALLOWED.fullmatch, names))


def test_staged_push_is_whole_after_its_checkpoint_is_rotated_away_and_its_log_has_grown(server, pending, tmp_path):
    stage(pending, 3)
    staged = pending / tag(3) / "files"
    made = tmp_path / "made" / "3"
    for name in ("model.safetensors", "last-checkpoint/optimizer.safetensors"):
        assert os.path.samefile(staged / name, made / name)  # no second copy of what is big
    with open(made / "metrics.jsonl", "a") as log:
        log.write("{}\n")
    shutil.rmtree(made)
    assert hub.push_pending(pending) == 0
    assert_arrived(server, pending, 3)


def test_without_hard_links_it_is_a_copy(server, pending, monkeypatch):
    def no_link(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    stage(pending, 1)
    assert hub.push_pending(pending) == 0
    assert_arrived(server, pending, 1)


def test_full_disk_is_logged_and_leaves_nothing_behind(server, pending, tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    pusher = hub.Pusher(pending)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        add(pusher, tmp_path, 1)
    assert pusher.close(5) == 0
    assert caplog.messages == [
        "no push of step 1: [Errno 28] No space left on device. Free some space; the run goes on"
    ]
    assert os.listdir(pending) == [".lock"] and not server.requests


def test_staged_file_that_was_changed_is_never_sent_and_holds_up_no_other(server, pending, caplog):
    stage(pending, 1, 2)
    path = pending / tag(1) / "files" / "config.json"
    path.write_bytes(path.read_bytes() + b" ")
    assert hub.push_pending(pending) == 1
    assert server.titles(ID) == [title(2)] and waiting(pending) == [tag(1)]
    assert f"{path}: is damaged; to give this push up, remove {pending / tag(1)}" in caplog.messages[-1]


def test_change_after_the_first_attempt_is_found_by_its_checksum(server, pending, caplog):
    stage(pending, 1)
    server.faults = [Fault("POST .*/commit/", status=403)]
    assert hub.push_pending(pending) == 1
    path = pending / tag(1) / "files" / "config.json"
    path.write_bytes(path.read_bytes().replace(b"2", b"3"))
    assert hub.push_pending(pending) == 1
    assert "is damaged" in caplog.messages[-1] and not server.titles(ID)


@pytest.mark.parametrize("name", ["../../../secret", ".env"])
def test_name_that_was_put_into_push_json_is_not_sent(server, pending, tmp_path, name, caplog):
    (tmp_path / "secret").write_text("secret")
    stage(pending, 1)
    path = pending / tag(1) / "push.json"
    push = json.loads(path.read_text())
    push["files"][name] = {"size": 6}
    path.write_text(json.dumps(push))
    assert hub.push_pending(pending) == 1
    assert "not on the list" in caplog.messages[0] and not server.titles(ID)


def test_link_that_was_put_into_a_staged_push_is_not_sent(server, pending, tmp_path):
    stage(pending, 1)
    path = pending / tag(1) / "files" / "config.json"
    (tmp_path / "secret").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    assert hub.push_pending(pending) == 1
    assert not server.titles(ID)


def test_what_a_killed_process_left_half_made_goes_and_what_it_left_whole_is_sent(server, pending):
    stage(pending, 1)
    shutil.copytree(pending / tag(1), pending / f".{tag(2)}.tmp-0123abcd")
    assert hub.Pusher(pending).close(10) == 0
    assert_arrived(server, pending, 1)


def test_push_whose_kill_came_while_it_was_cleared_away_is_not_sent_again(server, pending):
    stage(pending, 1)
    (pending / "kept").mkdir()
    shutil.copytree(pending / tag(1), pending / "kept" / tag(1))
    hub.push_pending(pending)
    (pending / "kept" / tag(1)).rename(pending / tag(1))
    (pending / "kept").rmdir()
    (pending / tag(1) / "files" / "config.json").unlink()
    assert hub.push_pending(pending) == 0
    assert_arrived(server, pending, 1)


# Faults of the Hub.


@pytest.mark.parametrize("times", [1, 3, 6])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_push_survives_a_hub_that_is_down_for_a_while(server, pending, clock, endpoint, times):
    stage(pending, 1, 2)
    server.faults = [Fault(ENDPOINTS[endpoint], times)]
    assert hub.push_pending(pending) == 0
    assert server.faults[0].times == 0 and sum(clock.waits) >= times
    assert_arrived(server, pending, 1, 2)


@pytest.mark.parametrize("kind", ["drop", "lose"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_push_survives_lost_connections_and_lost_answers(server, pending, endpoint, kind):
    stage(pending, 1, 2)
    server.faults = [Fault(ENDPOINTS[endpoint], 2, kind)]
    assert hub.push_pending(pending) == 0
    assert server.faults[0].times < 2
    assert_arrived(server, pending, 1, 2)


@pytest.mark.parametrize("endpoint", ["commit", "tag"])
def test_lost_answer_is_looked_for_by_the_next_process_too(server, pending, endpoint):
    stage(pending, 1, 2)
    server.faults = [Fault(ENDPOINTS[endpoint], kind="lose")]
    assert hub.push_pending(pending, deadline=0) == 2
    assert server.titles(ID) == [title(1)]
    others = {**server.repositories[ID].commits[-1].files, "NOTES.md": b"by hand"}
    server.repositories[ID].commit("by hand", others)
    assert hub.push_pending(pending) == 0
    assert server.titles(ID) == [title(2), "by hand", title(1)]
    assert server.tags(ID) == {tag(1): title(1), tag(2): title(2)}
    assert server.files(ID) == content(2) | {"NOTES.md": b"by hand"}


def test_title_of_an_older_commit_is_not_taken_for_this_push(server, pending):
    server.make(ID).commit(title(1), {"old": b""})
    stage(pending, 1)
    server.faults = [Fault(ENDPOINTS["commit"], 2)]
    assert hub.push_pending(pending) == 0
    assert server.titles(ID) == [title(1), title(1)]
    assert server.files(ID, tag(1)) == content(1) | {"old": b""}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_silent_hub_holds_a_push_up_no_longer_than_its_deadline(server, pending, clock, monkeypatch, endpoint, caplog):
    stage(pending, 1)
    server.faults = [Fault(ENDPOINTS[endpoint], 1000, "hang")]
    begun = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setitem(hub.TIMEOUT_SECONDS, "read", 0.1)
        assert hub.push_pending(pending, deadline=0.5) == 1
    assert time.monotonic() - begun < 5
    assert len(caplog.messages) == 1 and "Timeout" in caplog.messages[0]
    server.faults.clear()
    assert hub.push_pending(pending) == 0
    assert_arrived(server, pending, 1)


def test_closed_port_is_tried_until_the_deadline_with_longer_and_longer_waits(
    server, pending, clock, monkeypatch, caplog
):
    stage(pending, 1)
    with monkeypatch.context() as patched:
        patched.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert hub.push_pending(pending) == 1
    assert clock.waits[:8] == [1, 2, 4, 8, 16, 32, 60, 60] and 14 * 60 < sum(clock.waits) <= 15 * 60
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"hub: {tag(1)} is not on the Hub: ConnectError")
    assert caplog.messages[0].endswith(
        f"waits in {pending}; to send it later: python train.py --push_pending {pending.parent}"
    )
    assert hub.push_pending(pending) == 0
    assert_arrived(server, pending, 1)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413])
@pytest.mark.parametrize("endpoint", ["preupload", "commit", "tag"])
def test_refusal_is_logged_once_and_not_tried_again(server, pending, clock, endpoint, status, caplog):
    server.make(ID)
    stage(pending, 1, 2)
    server.faults = [Fault(ENDPOINTS[endpoint], 1000, status=status, message="no, because")]
    assert hub.push_pending(pending) == 2
    assert server.count(ENDPOINTS[endpoint]) == 1 and not clock.waits
    assert len(caplog.messages) == 1 and f"HTTP status {status}: no, because" in caplog.messages[0]
    server.faults.clear()
    assert hub.push_pending(pending) == 0
    assert_arrived(server, pending, 1, 2)


def test_refused_upload_is_a_refusal_though_the_client_wraps_it(server, pending, clock, caplog):
    stage(pending, 1)
    server.faults = [Fault(ENDPOINTS["put"], 1000, status=403)]
    assert hub.push_pending(pending) == 1
    assert "HTTP status 403" in caplog.messages[0] and not clock.waits


def test_owner_that_is_not_ours_is_a_refusal(server, pending, clock, caplog):
    stage(pending, 1, repo_id="them/run")
    assert hub.push_pending(pending) == 1
    assert "HTTP status 403: You don't have the rights" in caplog.messages[0] and not clock.waits


@pytest.mark.parametrize("status", [408, 409, 412, 429, 500, 502, 504])
def test_statuses_that_pass_are_tried_again(server, pending, clock, status):
    stage(pending, 1)
    server.faults = [Fault(ENDPOINTS["commit"], 2, status=status), Fault(ENDPOINTS["tag"], 1, status=429)]
    assert hub.push_pending(pending) == 0
    assert clock.waits == [1, 2, 4]
    assert_arrived(server, pending, 1)


def test_commit_that_someone_else_was_faster_than_is_made_on_top(server, pending, monkeypatch):
    stage(pending, 1)
    server.make(ID)
    real = HfApi.create_commit

    def slow(*args, **kwargs):
        if "by hand" not in server.titles(ID):
            server.repositories[ID].commit("by hand", {"NOTES.md": b"by hand"})
        return real(*args, **kwargs)

    monkeypatch.setattr(HfApi, "create_commit", slow)
    assert hub.push_pending(pending) == 0
    assert server.count("POST .*/commit/") == 2  # the first one met 412
    assert server.titles(ID) == [title(1), "by hand"]
    assert server.files(ID, tag(1)) == content(1) | {"NOTES.md": b"by hand"}


@pytest.mark.parametrize("endpoint", ["refs", "commit", "tag"])
def test_retry_after_is_kept_to(server, pending, clock, endpoint):
    stage(pending, 1)
    server.faults = [Fault(ENDPOINTS[endpoint], 1, status=429, headers={"Retry-After": "77"})]
    assert hub.push_pending(pending) == 0
    assert clock.waits == [77]
    assert_arrived(server, pending, 1)


def test_retry_after_past_the_deadline_ends_the_attempts(server, pending, clock):
    stage(pending, 1)
    server.faults = [Fault(ENDPOINTS["refs"], 1, status=429, headers={"Retry-After": "3600"})]
    assert hub.push_pending(pending) == 1
    assert not clock.waits and server.count("refs") == 1


def test_files_are_read_for_their_checksums_once_however_often_it_is_tried(server, pending, monkeypatch):
    stage(pending, 1)
    read, real = [], files.sha256
    monkeypatch.setattr(files, "sha256", lambda path: read.append(path) or real(path))
    monkeypatch.setattr("huggingface_hub.lfs.sha_fileobj", lambda *_: pytest.fail("the client read all of it, too"))
    server.faults = [Fault(ENDPOINTS["commit"], 4)]
    assert hub.push_pending(pending) == 0
    assert len(read) == len(content(1))


# Beside training.


def test_background_logs_a_fault_once_and_goes_on_when_the_hub_is_back(server, pending, tmp_path, caplog):
    server.faults = [Fault("GET .*/refs", 10**6)]
    pusher = hub.Pusher(pending, deadline=10)
    for step in (1, 2, 3):
        add(pusher, tmp_path, step)
    wait_until(lambda: server.count("refs") >= 12)  # several rounds of attempts
    server.faults.clear()
    add(pusher, tmp_path, 4)
    assert pusher.close(20) == 0
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(
        f"hub: {tag(1)} is not on the Hub: HTTP status 503: injected."
    )
    assert_arrived(server, pending, 1, 2, 3, 4)


def wait_until(true, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_waiting_for_a_silent_hub_ends_in_time_and_can_go_on(server, pending, tmp_path):
    server.faults = [Fault("GET .*/refs", 1000, "hang")]
    pusher = hub.Pusher(pending)
    add(pusher, tmp_path, 1)
    wait_until(lambda: server.count("refs"))
    begun = time.monotonic()
    assert pusher.close(0.1) == 1 and pusher.close(0.1) == 1
    assert time.monotonic() - begun < 2
    server.faults.clear()
    server.ending.set()  # the silent answers end
    assert pusher.close(20) == 0


def test_adding_a_push_waits_for_nothing(server, pending, tmp_path):
    server.faults = [Fault(".*", 1000, "hang")]
    pusher = hub.Pusher(pending)
    begun = time.monotonic()
    for step in range(1, 6):
        add(pusher, tmp_path, step)
    assert time.monotonic() - begun < 2
    assert waiting(pending) == [tag(step) for step in range(1, 6)]
    server.faults.clear()
    server.ending.set()  # the silent answers end
    assert pusher.close(20) == 0
    assert_arrived(server, pending, 1, 2, 3, 4, 5)


def test_two_processes_do_not_send_the_same_pushes(server, pending):
    stage(pending, 1)
    with files.locked(pending / ".lock", "busy"):
        with pytest.raises(BadInput, match=f"process {os.getpid()} is sending it") as caught:
            hub.push_pending(pending)
        assert caught.value.status == 4
        assert hub.Pusher(pending).close(5) == 1
    assert not server.requests


@pytest.mark.parametrize("kind", ["hang", "lose"])
def test_kill_in_the_middle_of_a_commit_neither_loses_nor_doubles_it(server, pending, tmp_path, kind):
    stage(pending, 1, 2)
    server.faults = [Fault(ENDPOINTS["commit"], 1, kind)]
    command = [sys.executable, "-c", PUSH, str(pending)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    child = subprocess.Popen(command, cwd=ROOT, env=clean | server.environment(tmp_path / "home"))
    wait_until(lambda: server.count(ENDPOINTS["commit"]))
    child.kill()
    child.wait()
    assert server.titles(ID) == ([title(1)] if kind == "lose" else [])
    assert hub.push_pending(pending) == 0
    assert_arrived(server, pending, 1, 2)


def test_nothing_pending_needs_no_hub(server, tmp_path, pending):
    assert hub.push_pending(tmp_path / "nothing") == 0
    assert hub.Pusher(pending).close(5) == 0
    assert hub.push_pending(pending) == 0
    assert not server.requests


def test_client_is_silent_on_the_terminal(server, pending, tmp_path, capfd):
    server.faults = [Fault(ENDPOINTS["preupload"], 2), Fault(ENDPOINTS["put"], 2, "drop")]
    logged = logging.handlers.BufferingHandler(1000)
    logging.getLogger("huggingface_hub").addHandler(logged)
    pusher = hub.Pusher(pending)
    add(pusher, tmp_path, 1)
    assert pusher.close(20) == 0
    hub.fetch_checkpoint(f"hub://{ID}", tmp_path / "new" / "checkpoints", tmp_path / "new")
    logging.getLogger("huggingface_hub").removeHandler(logged)
    assert capfd.readouterr() == ("", "") and not logged.buffer


def test_token_is_in_no_file_no_message_and_no_request_but_its_header(server, pending, tmp_path, caplog):
    server.make(ID)
    stage(pending, 1, 2)
    for match in [*ENDPOINTS.values(), "whoami"]:
        server.faults = [Fault(match, status=403, message=f"{TOKEN} may not, hf_oauth_{'x.Y-' * 9} neither")]
        hub.push_pending(pending)
        assert_no_token_in(tmp_path)
    with pytest.raises(BadInput) as caught:
        check()
    hub.push_pending(pending)
    hub.fetch_checkpoint(f"hub://{ID}", tmp_path / "new" / "checkpoints", tmp_path / "new")
    assert_no_token_in(tmp_path)
    assert any("hf_..." in line for line in caplog.messages)
    for text in [*caplog.messages, str(caught.value)]:
        assert "Canary" not in text and "hf_oauth" not in text
    assert {request.token for request in server.requests} == {TOKEN, None}
    for request in server.requests:
        assert b"Canary" not in request.body and "Canary" not in request.path + request.headers
        assert request.token or request.path.startswith("/lfs/")


def assert_no_token_in(folder: Path) -> None:
    assert not [path for path in folder.rglob("*") if path.is_file() and b"Canary" in path.read_bytes()]


def test_push_goes_through_xet_where_the_client_uses_it(server, pending, tmp_path, monkeypatch):
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    server.xet = tmp_path / "xet"
    stage(pending, 1)
    server.faults = [Fault(ENDPOINTS["commit"], 1), Fault(ENDPOINTS["commit"], 1, "lose")]
    assert hub.push_pending(pending) == 0
    assert server.titles(ID) == [title(1)] and server.tags(ID) == {tag(1): title(1)}
    stored = {name: hashlib.sha256(data).hexdigest() for name, data in content(1).items() if "safetensors" in name}
    assert {name: data.decode() for name, data in server.files(ID).items() if name in stored} == {
        name: f"in Xet: {digest}" for name, digest in stored.items()
    }
    assert not server.count("objects/batch") and any(server.xet.rglob("*"))


# Before step 0.


def check(repo_id: str = "run", private: bool = True, fresh: bool = True):
    return hub.check(repo_id, private=private, fresh=fresh)


FINE = {"role": "fineGrained", "fineGrained": {"scoped": []}}


def scope(name: str, *permissions: str) -> dict:
    scoped = [{"entity": {"type": "user", "name": name}, "permissions": list(permissions)}]
    return {"role": "fineGrained", "fineGrained": {"scoped": scoped}}


def test_check_makes_nothing_and_finds_the_owner(server):
    server.login["auth"]["accessToken"] = scope("me", "repo.content.read", "repo.write")
    assert check("run") == ("me/run", []) == check("me/run")
    assert not server.repositories and not server.count("POST")


def test_check_refuses_a_license_that_the_hub_does_not_know(server):
    server.faults = [Fault("validate-yaml", 1, status=400, message='"license" must be one of [mit, ...]')]
    with pytest.raises(BadInput, match="license, language, tags: the Hub refuses them") as caught:
        hub.check("run", private=True, fresh=True, card="---\nlicense: MTI\n---\n")
    assert "must be one of" in str(caught.value) and not server.repositories
    assert hub.check("run", private=True, fresh=True, card="---\nlicense: mit\n---\n")[0] == ID


@pytest.mark.parametrize("name", ["a b", "a/b/c", "--x", "x.git", "a..b", "x" * 97, "", "-x"])
def test_check_refuses_a_malformed_id_before_any_request(server, name):
    with pytest.raises(BadInput, match="^hub_model_id = "):
        check(name)
    assert not server.requests


def test_check_refuses_without_a_login(server, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(BadInput, match="^push_to_hub = true: no login.*hf auth login, or set HF_TOKEN"):
        check()


@pytest.mark.parametrize("status", [401, 403])
def test_check_refuses_a_token_that_the_hub_does_not_take(server, status):
    server.faults = [Fault("whoami", status=status)]
    with pytest.raises(BadInput, match=f"^push_to_hub = true: .*HTTP status {status}"):
        check()


@pytest.mark.parametrize(
    "token", [{"role": "read"}, scope("me", "repo.content.read"), scope("you", "repo.write"), FINE]
)
def test_check_refuses_a_token_that_may_not_write(server, token):
    server.login["auth"]["accessToken"] = token
    with pytest.raises(BadInput, match="make a fine-grained one that may write to me's repositories"):
        check()


def test_check_refuses_an_owner_that_is_not_the_logins(server):
    server.login["orgs"] = [{"name": "readers", "roleInOrg": "read"}, {"name": "writers", "roleInOrg": "write"}]
    for owner in ("them", "readers"):
        with pytest.raises(BadInput, match=f"^hub_model_id = {owner}/run: me has no right to make it"):
            check(f"{owner}/run")
    assert check("writers/run")[0] == "writers/run"


def test_check_refuses_a_repository_without_the_right_to_write(server):
    server.make("them/run", private=False)
    server.read_only.add("them/run")
    with pytest.raises(BadInput, match="^hub_model_id = them/run: HTTP status 403: You don't have the rights"):
        check("them/run")


def test_check_does_without_a_route_that_a_mirror_lacks(server):
    server.make(ID)
    server.faults = [Fault("auth-check", status=404)]
    assert check()[0] == ID


def test_check_refuses_another_runs_repository_only_to_a_new_run(server, pending):
    stage(pending, 5, 12)
    hub.push_pending(pending)
    with pytest.raises(BadInput, match="holds another run's step-00000012.*another hub_model_id"):
        check()
    assert check(fresh=False)[0] == ID
    server.repositories[ID].tags = {"v1.0": server.repositories[ID].commits[-1].oid}
    assert check()[0] == ID


def test_check_tells_of_a_token_that_may_too_much_and_of_a_public_repository(server):
    server.make(ID, private=False)
    notes = check()[1]
    assert len(notes) == 2 and "fine-grained" in notes[0] and "is public" in notes[1]
    assert len(check(private=False)[1]) == 1


@pytest.mark.parametrize("fault", [Fault(".*", 100), Fault(".*", 100, status=429), Fault(".*", 100, "hang")])
@pytest.mark.parametrize("endpoint", ["whoami", ENDPOINTS["info"], "auth-check", "refs"])
def test_check_lets_a_run_start_when_the_hub_is_down(server, monkeypatch, endpoint, fault):
    monkeypatch.setitem(hub.TIMEOUT_SECONDS, "read", 0.1)
    server.make(ID)
    server.faults = [Fault(endpoint, fault.times, fault.kind, fault.status)]
    repo_id, (note,) = check()
    assert repo_id == "run" and note.startswith("the Hub cannot be asked now (")


def test_check_lets_a_run_start_without_network(server, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "OfflineModeIsEnabled" in check()[1][0]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "ConnectError" in check(ID)[1][0]


# A full checkpoint from the Hub.


@pytest.fixture
def pushed(server, pending):
    """A repository with steps 5 and 12, each with its checkpoint as the last one."""
    stage(pending, 5, 12)
    hub.push_pending(pending)
    server.requests.clear()
    return server


@pytest.fixture
def new(tmp_path) -> Path:
    """The run folder of a fresh machine."""
    return tmp_path / "new"


def fetch(new: Path, source: str = f"hub://{ID}") -> Path:
    return hub.fetch_checkpoint(source, new / "checkpoints", new)


def held(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_newest_checkpoint_is_fetched_whole_with_its_log(pushed, new):
    path = fetch(new)
    assert path == new / "checkpoints" / tag(12) and held(path) == parts(12)
    assert (new / "metrics.jsonl").read_bytes() == content(12)["metrics.jsonl"]
    assert os.listdir(new / "checkpoints") == [tag(12)]
    assert stat.S_ISREG((path / "state.json").lstat().st_mode)


def test_checkpoint_of_a_tag_or_a_commit_is_fetched(pushed, new, tmp_path):
    assert held(fetch(new, f"hub://{ID}@{tag(5)}")) == parts(5)
    oid = pushed.repositories[ID].tags[tag(5)]
    assert held(fetch(tmp_path / "other", f"hub://{ID}@{oid}")) == parts(5)


def test_newest_of_all_checkpoints_is_fetched(server, pending, new):
    stage(pending, 5, within=f"checkpoints/{tag(5)}")
    stage(pending, 12, within=f"checkpoints/{tag(12)}")
    hub.push_pending(pending)
    assert held(fetch(new)) == parts(12)
    assert held(fetch(new, f"hub://{ID}@{tag(5)}")) == parts(5)


def test_what_is_here_and_whole_is_not_fetched_again(pushed, new):
    fetch(new)
    (new / "metrics.jsonl").write_text("mine")
    pushed.requests.clear()
    assert held(fetch(new)) == parts(12)
    assert not pushed.count("safetensors") and (new / "metrics.jsonl").read_text() == "mine"


def test_other_checkpoint_under_the_same_name_is_left_alone(pushed, new):
    path = fetch(new)
    (path / "model.safetensors").write_bytes(b"another run's")
    with pytest.raises(BadInput, match=f"{tag(12)}/model.safetensors: is damaged; or it is not the one.*move"):
        fetch(new)
    assert (path / "model.safetensors").read_bytes() == b"another run's"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_damaged_file_is_found_and_nothing_of_it_is_kept(pushed, new, name):
    tree = pushed.repositories[ID].commits[-1].files
    good = tree[f"last-checkpoint/{name}"]
    tree[f"last-checkpoint/{name}"] = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(BadInput, match=f"{name}: is damaged; try again, or another revision"):
        fetch(new)
    assert not os.listdir(new / "checkpoints")
    tree[f"last-checkpoint/{name}"] = good
    assert held(fetch(new)) == parts(12)


@pytest.mark.parametrize("manifest", [b"", b"{}", b"[]", b'{"step": "x", "files": {}}', b'{"step": 1, "files": {}}'])
def test_manifest_that_is_none_is_refused(pushed, new, manifest):
    pushed.repositories[ID].commits[-1].files["last-checkpoint/manifest.json"] = manifest
    with pytest.raises(BadInput, match="last-checkpoint/manifest.json cannot be read"):
        fetch(new)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hub://me/nothing", "HTTP status 404: Repository not found.*hf auth login"),
        (f"hub://{ID}@step-00000009", "HTTP status 404: Invalid rev id.*the revision"),
        ("hub://run", "is no address of the Hub. Give hub://OWNER/NAME"),
        (f"hub://{ID}/last-checkpoint", "is no address of the Hub"),
        ("hub://me/a..b", "Give hub://OWNER/NAME"),
        (f"hub://{ID}@", "is no address of the Hub"),
    ],
)
def test_address_without_a_checkpoint_is_refused_with_a_remedy(pushed, new, source, words):
    with pytest.raises(BadInput, match=f"^resume_from_checkpoint = {source}: .*{words}"):
        fetch(new, source)
    assert not new.exists()


def test_repository_without_a_full_checkpoint_is_refused(server, pending, new):
    stage(pending, 5, within=None)
    hub.push_pending(pending)
    with pytest.raises(BadInput, match="has no full checkpoint; only hub_strategy = checkpoint"):
        fetch(new)


def test_private_repository_needs_a_token(pushed, new, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(BadInput, match="HTTP status 401.*hf auth login, or HF_TOKEN"):
        fetch(new)


def test_offline_is_said(pushed, new, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="HF_HUB_OFFLINE is set"):
        fetch(new)


@pytest.mark.parametrize("kind", ["status", "drop", "lose"])
@pytest.mark.parametrize("match", [ENDPOINTS["info"], "HEAD .*optimizer", "GET .*optimizer", "GET .*metrics"])
def test_fetch_survives_a_hub_that_is_down_for_a_while(pushed, new, clock, match, kind):
    pushed.faults = [Fault(match, 6, kind)]
    assert held(fetch(new)) == parts(12)
    assert pushed.faults[0].times == 0 and (new / "metrics.jsonl").is_file()


def test_fetch_that_gave_up_goes_on_from_what_it_has(pushed, new):
    pushed.faults = [Fault("GET .*optimizer", 10**6)]
    with pytest.raises(TrainingStopped, match=r"HTTP status 503.*\. The same command goes on"):
        fetch(new)
    pushed.faults.clear()
    pushed.requests.clear()
    assert held(fetch(new)) == parts(12)
    assert not pushed.count("GET .*last-checkpoint/model.safetensors") and os.listdir(new / "checkpoints") == [tag(12)]


def test_addresses_of_the_hub_are_told_from_paths():
    assert hub.is_address("hub://me/run") and not hub.is_address("runs/hub/checkpoints/step-00000005")


# The client.


def test_client_has_time_outs_also_where_it_asks_for_none(server, monkeypatch):
    monkeypatch.setitem(hub.TIMEOUT_SECONDS, "read", 0.1)
    hub.bound_client()
    server.make(ID, private=False)
    server.faults = [Fault("whoami|tree|info", 1000, "hang")]
    begun = time.monotonic()
    for call in (HfApi().whoami, lambda: list(HfApi().list_repo_tree(ID))):
        with pytest.raises(Exception, match="timed out"):
            call()
    assert time.monotonic() - begun < 10
