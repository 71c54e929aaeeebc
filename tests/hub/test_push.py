"""The Hub gets each push once and whole, whatever happens on the way; and training does not notice."""

import hashlib
import json
import os
import re
import shutil
import time

import pytest
from hub_server import Fault
from huggingface_hub import HfApi, constants
from pushes import ENDPOINTS, ID, add, assert_arrived, content, stage, tag, title, wait_until, waiting

from pretrain.base import files
from pretrain.base.errors import BadInput
from pretrain.hub import client, push

pytest_plugins = ["pushes"]
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")  # how the client sends LFS objects


def test_pushes_arrive_in_order_one_commit_and_tag_each_and_a_public_repository_stays_public(
    server, pending, tmp_path, caplog
):
    stage(pending, 9, 100, 5, repo_id="run")  # without an owner it is the login's
    caplog.set_level("INFO")
    assert push.push_pending(pending) == 0
    assert server.repositories[ID].private and f"hub: {tag(9)} is on the Hub: {ID}@{tag(9)}" in caplog.messages
    server.repositories[ID].private = False
    add(pusher := push.Pusher(pending), tmp_path, 200)
    assert pusher.close(20) == 0 and push.push_pending(pending) == 0
    assert_arrived(server, pending, 5, 9, 100, 200)
    assert not server.repositories[ID].private and server.count("repos/create") == 1
    assert server.count("POST .*/commit/") == 4


def test_step_that_is_on_the_hub_already_is_not_sent_again(server, pending):
    stage(pending, 1, 2)
    push.push_pending(pending)
    sent = server.count("PUT /lfs/")
    stage(pending, 1)  # by a run that went on from before it
    assert push.push_pending(pending) == 0
    assert_arrived(server, pending, 1, 2)
    assert server.count("PUT /lfs/") == sent and server.count("POST .*/commit/") == 2


def test_last_checkpoint_goes_when_another_kind_comes_and_stays_when_none_does(server, pending):
    stage(pending, 1)
    stage(pending, 2, within=None)
    stage(pending, 3, within=f"checkpoints/{tag(3)}")
    stage(pending, 4, within=f"checkpoints/{tag(4)}")
    assert push.push_pending(pending) == 0
    last = {name: data for name, data in content(1).items() if name.startswith("last-checkpoint/")}
    assert server.files(ID, tag(2)) == content(2, None) | last
    third = content(3, f"checkpoints/{tag(3)}")
    assert server.files(ID, tag(3)) == third
    assert server.files(ID, tag(4)) == third | content(4, f"checkpoints/{tag(4)}")
    server.repositories[ID].commits[-1].files["last-checkpoint/more.safetensors"] = b"of an older format"
    stage(pending, 5)
    assert push.push_pending(pending) == 0
    assert {name for name in server.files(ID) if name.startswith("last-checkpoint/")} == last.keys()


def test_other_names_links_directories_and_missing_files_are_refused(server, pending, tmp_path):
    (tmp_path / "file").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    pusher = push.Pusher(pending)
    names = [".env", "secrets.json", "a/config.json", "../config.json", "config.json\n", "last-checkpoint/.env"]
    names += ["model.bin", "checkpoints/step-1/state.json", "checkpoints/../state.json"]
    faults = [(name, "file", "not on the list") for name in names]
    faults += [("config.json", source, "not a regular file") for source in ("link", ".", "nothing")]
    for name, source, words in faults:
        with pytest.raises(ValueError, match=words):
            pusher.add(1, repo_id=ID, private=True, title="t", files={name: tmp_path / source})
    assert pusher.close(5) == 0 and not server.requests
    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
    names += ["merges.txt", "README.md", "recipe.yaml", "curves.png", "metrics.jsonl", "model.safetensors"]
    names += ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    assert all(map(push.ALLOWED.fullmatch, names))


def test_staged_push_is_whole_after_its_checkpoint_is_rotated_away_and_its_log_has_grown(server, pending, tmp_path):
    stage(pending, 3)
    staged = pending / tag(3) / "files"
    made = tmp_path / "made" / "3"
    for name in ("model.safetensors", "last-checkpoint/optimizer.safetensors"):
        assert os.path.samefile(staged / name, made / name)  # no second copy of what is big
    with open(made / "metrics.jsonl", "a") as log:
        log.write("{}\n")
    shutil.rmtree(made)
    assert push.push_pending(pending) == 0
    assert_arrived(server, pending, 3)


def test_without_hard_links_it_is_a_copy_and_a_full_disk_leaves_nothing_behind(server, pending, tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", fails)
        pusher = push.Pusher(pending)
        with pytest.raises(OSError, match="No space left"):
            add(pusher, tmp_path, 1)
        assert pusher.close(5) == 0 and os.listdir(pending) == [".lock"] and not server.requests
    monkeypatch.setattr(os, "link", fails)
    stage(pending, 1)
    assert push.push_pending(pending) == 0
    assert_arrived(server, pending, 1)


def test_staged_push_that_was_changed_is_never_sent_and_holds_up_no_other(server, pending, caplog):
    def rewrite(name: str) -> None:
        made = json.loads((folder / "push.json").read_text())
        (folder / "push.json").write_text(json.dumps(made | {"files": made["files"] | {name: {"size": 6}}}))

    folder, damaged = pending / tag(1), f"; to abandon this push, remove {pending / tag(1)}"
    config = folder / "files" / "config.json"
    changes = {
        lambda: config.write_bytes(config.read_bytes() + b" "): damaged,
        lambda: config.write_bytes(config.read_bytes().replace(b"2", b"3")): damaged,
        lambda: config.rename(folder / "elsewhere") and config.symlink_to(folder / "elsewhere"): damaged,
        config.unlink: damaged,
        lambda: rewrite("../../../secret"): "is not on the list",
    }
    for number, (change, words) in enumerate(changes.items(), 2):
        stage(pending, 1, number)
        change()
        assert push.push_pending(pending) == 1 and waiting(pending) == [tag(1)]
        assert server.titles(ID)[0] == title(number) and tag(1) not in server.tags(ID)
        assert str(folder) in caplog.messages[-1] and words in caplog.messages[-1]
        shutil.rmtree(folder)


def test_what_killed_processes_left_half_made_or_half_removed_goes_and_what_is_whole_is_sent(
    server, pending, monkeypatch
):
    stage(pending, 1)
    shutil.copytree(pending / tag(1), pending / f".{tag(2)}.tmp-0123abcd")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda path: (path / "files" / "config.json").unlink() or 1 / 0)
        assert push.push_pending(pending) == 0  # what is half removed is not in the queue
    assert len(os.listdir(pending)) == 3
    stage(pending, 1)
    assert push.Pusher(pending).close(10) == 0
    assert_arrived(server, pending, 1)


DOWN = [Fault(match, 6) for match in ENDPOINTS.values()]  # longer than its client tries
LOST = [Fault(ENDPOINTS["commit"], 1, "drop")]
LOST += [Fault(ENDPOINTS[name], 1, "lose") for name in ("create", "put", "commit", "tag")]


@pytest.mark.parametrize("faults", [DOWN, LOST], ids=["down", "lost"])
def test_push_survives_a_hub_that_is_down_and_lost_connections_and_answers(server, pending, faults, monkeypatch):
    monkeypatch.setattr(client, "DEADLINE_SECONDS", 10**4)  # one fault after the other
    stage(pending, 1, 2)
    server.faults = faults
    assert push.push_pending(pending) == 0 and not any(fault.times for fault in faults)
    assert_arrived(server, pending, 1, 2)


@pytest.mark.parametrize("endpoint", ["commit", "tag"])
def test_what_a_lost_answer_has_made_is_found_by_the_next_process_too(server, pending, monkeypatch, endpoint):
    stage(pending, 1, 2)
    server.faults = [Fault(ENDPOINTS[endpoint], kind="lose")]
    with monkeypatch.context() as patched:
        patched.setattr(client, "DEADLINE_SECONDS", 0)
        assert push.push_pending(pending) == 2
    assert server.titles(ID) == [title(1)]
    others = {**server.repositories[ID].commits[-1].files, "NOTES.md": b"by hand"}
    server.repositories[ID].commit("by hand", others)
    assert push.push_pending(pending) == 0
    assert server.titles(ID) == [title(2), "by hand", title(1)]
    assert {name: data for name, data in server.files(ID, tag(1)).items() if name != "NOTES.md"} == content(1)
    assert server.files(ID) == server.files(ID, tag(2)) == content(2) | {"NOTES.md": b"by hand"}


def test_closed_port_is_tried_until_the_deadline_with_longer_and_longer_waits(
    server, pending, clock, monkeypatch, caplog
):
    stage(pending, 1)
    with monkeypatch.context() as patched:
        patched.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert push.push_pending(pending) == 1
    assert clock.waits[:8] == [1, 2, 4, 8, 16, 32, 60, 60] and 14 * 60 < sum(clock.waits) <= 15 * 60
    (message,) = caplog.messages
    assert message.startswith(f"hub: {tag(1)} is not on the Hub: ConnectError")
    assert message.endswith(f"waits in {pending}; to send it later: python train.py --push_pending {pending.parent}")
    clock.waits.clear()
    statuses = [408, 409, 412, 423, 425, 429, 500, 502, 504]  # which pass
    server.faults = [Fault(ENDPOINTS["commit"], 1, status=status) for status in statuses]
    assert push.push_pending(pending) == 0
    assert clock.waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert_arrived(server, pending, 1)


def test_refusal_is_logged_once_and_not_tried_again(server, pending, clock, caplog):
    server.make(ID)
    stage(pending, 1, 2)
    refusals = [("put", 403), *(("commit", status) for status in (400, 401, 403, 404, 413)), ("tag", 403)]
    for number, (endpoint, status) in enumerate(refusals, 1):
        server.faults = [Fault(ENDPOINTS[endpoint], 1000, status=status, message="no, because")]
        assert push.push_pending(pending) == 2 and not clock.waits
        assert len(caplog.messages) == number and f"HTTP status {status}" in caplog.messages[-1]
    server.faults.clear()
    assert push.push_pending(pending) == 0
    assert_arrived(server, pending, 1, 2)


def test_commit_that_someone_else_was_faster_than_is_made_on_top(server, pending, monkeypatch):
    stage(pending, 1)
    server.make(ID)
    real = HfApi.create_commit

    def slow(*args, **kwargs):
        if "by hand" not in server.titles(ID):
            server.repositories[ID].commit("by hand", {"NOTES.md": b"by hand"})
        return real(*args, **kwargs)

    monkeypatch.setattr(HfApi, "create_commit", slow)
    assert push.push_pending(pending) == 0
    assert server.count("POST .*/commit/") == 2  # the first one met 412
    assert server.titles(ID) == [title(1), "by hand"]
    assert server.files(ID, tag(1)) == content(1) | {"NOTES.md": b"by hand"}


def test_retry_after_is_kept_to_unless_it_lies_past_the_deadline(server, pending, clock):
    stage(pending, 1)
    server.faults = [Fault(ENDPOINTS["refs"], 1, status=429, headers={"Retry-After": "3600"})]
    assert push.push_pending(pending) == 1
    assert not clock.waits and server.count("refs") == 1
    asked = ((name, 70 + i) for i, name in enumerate(("refs", "commit", "tag")))
    server.faults = [Fault(ENDPOINTS[name], 1, status=429, headers={"Retry-After": str(wait)}) for name, wait in asked]
    assert push.push_pending(pending) == 0
    assert clock.waits == [70, 71, 72]
    assert_arrived(server, pending, 1)


def test_background_logs_a_fault_once_and_sends_when_the_hub_is_back(server, pending, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(client, "DEADLINE_SECONDS", 10)
    server.faults = [Fault("GET .*/refs", 10**6)]
    pusher = push.Pusher(pending)
    for step in (1, 2, 3):
        add(pusher, tmp_path, step)
    wait_until(lambda: server.count("refs") >= 12)  # several rounds of attempts
    server.faults.clear()
    add(pusher, tmp_path, 4)
    assert pusher.close(20) == 0
    (message,) = caplog.messages
    assert message.startswith(f"hub: {tag(1)} is not on the Hub: HTTP status 503: injected.")
    assert_arrived(server, pending, 1, 2, 3, 4)


def test_a_silent_hub_holds_up_neither_training_nor_its_end(server, pending, tmp_path):
    server.faults = [Fault(".*", 1000, "hang")]
    pusher = push.Pusher(pending)
    begun = time.monotonic()
    for step in range(1, 6):
        add(pusher, tmp_path, step)
    assert waiting(pending) == [tag(step) for step in range(1, 6)]
    assert pusher.close(0.1) == 5 and pusher.close(0.1) == 5 and pusher.sending
    assert time.monotonic() - begun < 60  # the server is silent for ever
    server.faults.clear()
    server.ending.set()  # the silent answers end
    assert pusher.close(20) == 0 and not pusher.sending
    assert_arrived(server, pending, 1, 2, 3, 4, 5)


def test_two_processes_do_not_send_the_same_pushes(server, pending):
    stage(pending, 1)
    with files.locked(pending / ".lock", "busy"):
        with pytest.raises(BadInput, match=f"process {os.getpid()} is sending it") as caught:
            push.push_pending(pending)
        assert caught.value.status == 4
        assert push.Pusher(pending).close(5) == 1
    shutil.rmtree(pending / tag(1))  # and nothing pending needs no Hub
    assert push.push_pending(pending) == 0 == push.Pusher(pending).close(5)
    assert not server.requests


def test_files_that_the_repository_ignores_are_named_and_wait_until_it_takes_them(server, pending, caplog):
    stage(pending, 1)
    server.ignored = r".*\.safetensors"
    assert push.push_pending(pending) == 1 and waiting(pending) == [tag(1)]
    assert "me/run ignores " in caplog.messages[-1] and ".gitignore" in caplog.messages[-1]
    assert not server.tags(ID)
    server.ignored = None
    assert push.push_pending(pending) == 0
    assert server.files(ID, tag(1)) == content(1)


def test_push_goes_through_xet_where_the_client_uses_it(server, pending, tmp_path, monkeypatch):
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    server.xet = tmp_path / "xet"
    stage(pending, 1)
    server.faults = [Fault(ENDPOINTS["commit"], 1), Fault(ENDPOINTS["commit"], 1, "lose")]
    assert push.push_pending(pending) == 0
    assert server.titles(ID) == [title(1)] and server.tags(ID) == {tag(1): title(1)}
    stored = {name: hashlib.sha256(data).hexdigest() for name, data in content(1).items() if "safetensors" in name}
    found = {name: data.decode() for name, data in server.files(ID).items() if name in stored}
    assert found == {name: f"in Xet: {digest}" for name, digest in stored.items()}
    assert not server.count("objects/batch") and any(server.xet.rglob("*"))


def edit_card(server, edit) -> str:
    """Edit the README.md on the Hub, as its owner would in the browser; return the new text."""
    newest = server.repositories[ID].commits[-1].files
    text = edit(newest["README.md"].decode())
    server.repositories[ID].commit("by hand", {**newest, "README.md": text.encode()})
    return text


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def card_of(server) -> str:
    return server.files(ID)["README.md"].decode()


def test_edits_of_the_card_on_the_hub_are_kept(server, pending, caplog):
    stage(pending, 1)
    push.push_pending(pending)
    edit_card(server, lambda text: text.replace("license: mit", "license: apache-2.0\nwidget: []") + "Mine.\n")
    stage(pending, 2)
    assert push.push_pending(pending) == 0 and not warnings_in(caplog)
    assert "license: apache-2.0\nwidget: []\n" in card_of(server) and card_of(server).endswith("Mine.\n")
    assert "# Step 2" in card_of(server) and "# Step 1" not in card_of(server)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: "---\nlicense: [mit\n---\nMine.\n", "its metadata block is not valid YAML"),
        (lambda text: text.replace("# Step 1", "# Step 1\nMine."), "our section was edited"),
    ],
)
def test_damaged_card_is_left_alone_and_the_rest_is_pushed(server, pending, caplog, edit, words):
    stage(pending, 1)
    push.push_pending(pending)
    text = edit_card(server, edit)
    stage(pending, 2)
    assert push.push_pending(pending) == 0 and not waiting(pending)
    assert card_of(server) == text
    assert server.files(ID, tag(2))["metrics.jsonl"] == content(2)["metrics.jsonl"]
    (message,) = warnings_in(caplog)
    assert message.startswith(f"hub: {tag(2)} leaves README.md of {ID} as it is: ") and words in message


def test_card_that_is_no_utf8_text_is_left_alone(server, pending, caplog):
    server.make(ID).commits[-1].files["README.md"] = b"\xff\xfe# Mine"
    stage(pending, 1)
    assert push.push_pending(pending) == 0
    assert server.files(ID)["README.md"] == b"\xff\xfe# Mine" and "it is not UTF-8 text" in caplog.text


@pytest.mark.parametrize("status", [403, 503])
def test_push_succeeds_if_the_old_card_cannot_be_read(server, pending, caplog, status):
    server.make(ID).commits[-1].files["README.md"] = b"# Mine"
    stage(pending, 1)
    server.faults = [Fault("(GET|HEAD) .*/resolve/.*README", 10**6, status=status)]
    assert push.push_pending(pending) == 0 and not waiting(pending)
    assert server.files(ID)["README.md"] == b"# Mine" and tag(1) in server.tags(ID)
    assert f"it cannot be read: HTTP status {status}" in caplog.text
    server.faults.clear()
    stage(pending, 2)
    assert push.push_pending(pending) == 0
    assert card_of(server).endswith("<!-- ursa-minor:end -->\n") and "# Mine" in card_of(server)


def test_push_succeeds_without_a_card_that_the_hub_refuses(server, pending, caplog):
    stage(pending, 1)
    server.faults = [Fault(ENDPOINTS["validate"], status=400)]
    assert push.push_pending(pending) == 0 and not waiting(pending)
    assert "README.md" not in server.files(ID) and "the Hub refuses it: Invalid metadata" in caplog.text


def check(repo_id: str = "run", private: bool = True, fresh: bool = True, card: str = "---\nlicense: mit\n---\n"):
    return push.check(repo_id, private=private, fresh=fresh, card=card)


def scope(name: str, *permissions: str) -> dict:
    scoped = [{"entity": {"type": "user", "name": name}, "permissions": list(permissions)}]
    return {"role": "fineGrained", "fineGrained": {"scoped": scoped}}


def test_check_makes_nothing_finds_the_owner_and_refuses_a_license_that_the_hub_does_not_know(server):
    for token in ({"role": "write"}, scope("me", "repo.content.read", "repo.write")):
        server.login["auth"]["accessToken"] = token
        assert check("run") == ("me/run", "") == check("me/run")
    server.faults = [Fault("validate-yaml", 1, status=400, message='"license" must be one of [mit, ...]')]
    assert re.match(
        "license, language, tags: the Hub refuses them.*must be one of", refusal(card="---\nlicense: MTI\n---\n")
    )
    assert not server.repositories


def refusal(repo_id: str = "run", **how) -> str:
    with pytest.raises(BadInput) as caught:
        check(repo_id, **how)
    return str(caught.value)


def test_check_refuses_a_malformed_id_no_login_and_a_token_or_owner_that_may_not_write(server, monkeypatch):
    for name in ("a b", "a/b/c"):
        assert re.match("hub_model_id = .*Give NAME or OWNER/NAME", refusal(name))
    with monkeypatch.context() as patched:
        patched.delenv("HF_TOKEN")
        assert re.match("push_to_hub = true: no login.*hf auth login, or set HF_TOKEN", refusal())
    assert not server.requests
    server.faults = [Fault("whoami", status=401)]
    assert re.match("hub_model_id = run: HTTP status 401.*hf auth login", refusal())
    server.login["orgs"] = [{"name": "readers", "roleInOrg": "read"}, {"name": "writers", "roleInOrg": "write"}]
    for owner in ("them", "readers"):
        assert f"hub_model_id = {owner}/run: me may not create it" in refusal(f"{owner}/run")
    assert check("writers/run")[0] == "writers/run"
    server.make("them/run", private=False)
    server.read_only.add("them/run")
    assert "hub_model_id = them/run: HTTP status 403: You don't have the rights" in refusal("them/run")
    for token in ({"role": "read"}, scope("me", "repo.content.read"), scope("you", "repo.write")):
        server.login["auth"]["accessToken"] = token
        assert "make a fine-grained one that may write to me's repositories" in refusal()
        assert ("the token may only read" in refusal()) == (token == {"role": "read"})


def test_check_refuses_another_runs_repository_only_to_a_new_run_and_names_a_public_one(server, pending):
    stage(pending, 5, 12)
    push.push_pending(pending)
    assert re.search("holds another run's step-00000012.*another hub_model_id", refusal())
    assert check(fresh=False) == (ID, "")
    server.repositories[ID].private = False
    assert "is public" in check(fresh=False)[1] and not check(fresh=False, private=False)[1]


def test_check_lets_a_run_start_when_the_hub_is_down(server, monkeypatch):
    server.make(ID)
    for endpoint in ("whoami", "validate", "info", "auth-check", "refs"):
        server.faults = [Fault(ENDPOINTS.get(endpoint, endpoint), 100)]
        repo_id, note = check()
        assert repo_id == "run" and note.startswith("the Hub cannot be reached now (")
    for name, value, words in (
        ("ENDPOINT", "http://127.0.0.1:9", "Connect"),
        ("HF_HUB_OFFLINE", True, "HF_HUB_OFFLINE"),
    ):
        monkeypatch.setattr(constants, name, value)
        assert words in check(ID)[1]
