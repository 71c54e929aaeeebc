"""A staged push reaches the Hub once and completely, whatever fails on the way."""

import hashlib
import os
import re
import shutil

import pytest
from fake_hub import InjectedError
from huggingface_hub import HfApi, constants
from push_helpers import (
    ENDPOINTS,
    REPO_ID,
    assert_pushed,
    commit_title,
    make_push,
    pushed_files,
    stage_pushes,
    staged_names,
    step_tag,
)

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.hub import client, push

pytest_plugins = ["push_helpers"]
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")  # how the client sends LFS objects


def test_staged_pushes_are_sent_oldest_step_first(server, pending, caplog):
    stage_pushes(pending, 9, 100, 5, repo_id="run")  # without an owner it belongs to the login
    assert push.push_pending(pending) == 0
    assert_pushed(server, pending, 5, 9, 100)
    assert server.repositories[REPO_ID].private and server.count("repos/create") == 1
    assert server.count("POST .*/commit/") == 3
    assert caplog.messages[0] == f"hub      pushed {step_tag(5)} to {REPO_ID}"


def test_public_repository_stays_public(server, pending):
    server.make(REPO_ID, private=False)
    stage_pushes(pending, 1)
    assert push.push_pending(pending) == 0
    assert not server.repositories[REPO_ID].private


def test_nothing_pending_makes_no_request(server, pending):
    assert push.push_pending(pending) == 0
    pending.mkdir(parents=True)
    assert push.push_pending(pending) == 0
    assert not server.requests


def test_partly_removed_push_is_not_sent_again(server, pending, monkeypatch):
    stage_pushes(pending, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # the process is killed here
    assert push.push_pending(pending) == 0
    assert staged_names(pending) == []


def test_step_with_a_tag_is_not_sent_again(server, pending):
    stage_pushes(pending, 1, 2)
    push.push_pending(pending)
    sent = server.count("PUT /lfs/")
    stage_pushes(pending, 1)  # by a run that continued from before this step
    assert push.push_pending(pending) == 0
    assert_pushed(server, pending, 1, 2)
    assert server.count("PUT /lfs/") == sent
    assert server.count("POST .*/commit/") == 2


def test_unchanged_files_are_tagged_without_a_commit(server, pending):
    stage_pushes(pending, 1)
    push.push_pending(pending)
    server.repositories[REPO_ID].tags.clear()
    stage_pushes(pending, 1)
    assert push.push_pending(pending) == 0
    assert server.titles(REPO_ID) == [commit_title(1)]
    assert server.tags(REPO_ID) == {step_tag(1): commit_title(1)}


def test_files_of_an_older_last_checkpoint_are_deleted(server, pending):
    stage_pushes(pending, 1)
    push.push_pending(pending)
    server.repositories[REPO_ID].commits[-1].files["last-checkpoint/more.safetensors"] = (
        b"of an older format"
    )
    stage_pushes(pending, 2)
    push.push_pending(pending)
    assert server.files(REPO_ID) == pushed_files(2)


@pytest.mark.parametrize(
    ("within", "is_kept"),
    [(None, True), (f"checkpoints/{step_tag(2)}", False)],
    ids=["model only", "all_checkpoints"],
)
def test_only_a_newer_checkpoint_deletes_last_checkpoint(server, pending, within, is_kept):
    stage_pushes(pending, 1)
    stage_pushes(pending, 2, within=within)
    push.push_pending(pending)
    last = {
        name: data for name, data in pushed_files(1).items() if name.startswith("last-checkpoint/")
    }
    expected = pushed_files(2, within)
    if is_kept:
        expected |= last
    assert server.files(REPO_ID) == expected


def test_earlier_checkpoints_stay_in_checkpoints(server, pending):
    for step in (1, 2):
        stage_pushes(pending, step, within=f"checkpoints/{step_tag(step)}")
    push.push_pending(pending)
    assert server.files(REPO_ID) == pushed_files(1, f"checkpoints/{step_tag(1)}") | pushed_files(
        2, f"checkpoints/{step_tag(2)}"
    )


NAMES = [
    ".env",
    "secrets.json",
    "a/config.json",
    "../config.json",
    "config.json\n",
    "last-checkpoint/.env",
]
NAMES += ["model.bin", "checkpoints/step-1/state.json", "checkpoints/../state.json"]
REFUSED = [(name, "file", "not on the list") for name in NAMES]
REFUSED += [("config.json", source, "not a regular file") for source in ("link", ".", "nothing")]


@pytest.mark.parametrize(("name", "source", "words"), REFUSED)
def test_other_names_links_and_folders_are_refused(pending, tmp_path, name, source, words):
    (tmp_path / "file").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(ValueError, match=words):
        push.stage(pending, make_push(1), "", {name: tmp_path / source})
    assert not pending.exists()


def test_names_of_models_and_tokenizers_are_allowed():
    names = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    ]
    names += [
        "merges.txt",
        "README.md",
        "recipe.yaml",
        "curves.png",
        "metrics.jsonl",
        "model.safetensors",
    ]
    names += ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    assert all(map(push.ALLOWED.fullmatch, names))


def test_files_added_to_a_staged_push_are_not_sent(server, pending, tmp_path):
    stage_pushes(pending, 1)
    (tmp_path / "secret").write_text("secret")
    (pending / step_tag(1) / "files" / ".DS_Store").write_text("of a file manager")
    (pending / step_tag(1) / "files" / "recipe.yaml").symlink_to(tmp_path / "secret")
    assert push.push_pending(pending) == 0
    assert_pushed(server, pending, 1)


def test_staged_push_outlives_its_checkpoint(server, pending, tmp_path):
    stage_pushes(pending, 3)
    made = tmp_path / "made" / "3"
    for name in ("model.safetensors", "last-checkpoint/optimizer.safetensors"):
        assert os.path.samefile(
            pending / step_tag(3) / "files" / name, made / name
        )  # takes no space
    with open(made / "metrics.jsonl", "a") as metrics:
        metrics.write("{}\n")
    shutil.rmtree(made)
    assert push.push_pending(pending) == 0
    assert_pushed(server, pending, 3)


def fail_for_lack_of_space(*_):
    raise OSError(28, "No space left on device")


def test_weights_are_copied_without_hard_links(server, pending, monkeypatch):
    monkeypatch.setattr(os, "link", fail_for_lack_of_space)
    stage_pushes(pending, 1)
    assert push.push_pending(pending) == 0
    assert_pushed(server, pending, 1)


def test_full_disk_leaves_no_staged_files(pending, monkeypatch):
    monkeypatch.setattr(shutil, "copyfile", fail_for_lack_of_space)
    with pytest.raises(OSError, match="No space left"):
        stage_pushes(pending, 1)
    assert os.listdir(pending) == []


DOWN = [InjectedError(match, 6) for match in ENDPOINTS.values()]  # longer than the client tries
LOST = [InjectedError(ENDPOINTS["commit"], 1, "drop")]
LOST += [InjectedError(ENDPOINTS[name], 1, "lose") for name in ("create", "put", "commit", "tag")]


@pytest.mark.parametrize("problems", [DOWN, LOST], ids=["down", "lost"])
def test_push_survives_a_failing_hub(server, pending, problems, monkeypatch):
    monkeypatch.setattr(client, "DEADLINE_SECONDS", 10**4)  # one problem after the other
    stage_pushes(pending, 1, 2)
    server.problems = problems
    assert push.push_pending(pending) == 0
    assert not any(problem.times for problem in problems)
    assert_pushed(server, pending, 1, 2)


@pytest.mark.parametrize("endpoint", ["commit", "tag"])
def test_next_process_finds_what_a_lost_answer_made(server, pending, monkeypatch, endpoint):
    stage_pushes(pending, 1, 2)
    server.problems = [InjectedError(ENDPOINTS[endpoint], kind="lose")]
    with monkeypatch.context() as patched:
        patched.setattr(client, "DEADLINE_SECONDS", 0)
        assert push.push_pending(pending) == 2
    assert server.titles(REPO_ID) == [commit_title(1)]
    others = {**server.repositories[REPO_ID].commits[-1].files, "NOTES.md": b"by hand"}
    server.repositories[REPO_ID].commit("by hand", others)
    assert push.push_pending(pending) == 0
    assert server.titles(REPO_ID) == [commit_title(2), "by hand", commit_title(1)]
    assert {
        name: data
        for name, data in server.files(REPO_ID, step_tag(1)).items()
        if name != "NOTES.md"
    } == pushed_files(1)
    assert (
        server.files(REPO_ID)
        == server.files(REPO_ID, step_tag(2))
        == pushed_files(2) | {"NOTES.md": b"by hand"}
    )


def test_unreachable_hub_is_tried_until_the_deadline(server, pending, clock, monkeypatch, caplog):
    stage_pushes(pending, 1)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert push.push_pending(pending) == 1
    assert clock.waits[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert 14 * 60 < sum(clock.waits) <= 15 * 60
    (message,) = caplog.messages
    assert message.startswith(f"hub      {step_tag(1)} is not on the Hub: ConnectError")
    assert f"It is kept in {pending}. " in message
    assert message.endswith(f"python train.py --push_pending {pending.parent}")


def test_statuses_that_may_pass_are_retried(server, pending, clock):
    stage_pushes(pending, 1)
    statuses = [408, 409, 412, 423, 425, 429, 500, 502, 504]
    server.problems = [InjectedError(ENDPOINTS["commit"], 1, status=status) for status in statuses]
    assert push.push_pending(pending) == 0
    assert clock.waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert_pushed(server, pending, 1)


@pytest.mark.parametrize(
    ("endpoint", "status"),
    [
        ("put", 403),
        *(("commit", status) for status in (400, 401, 403, 404, 413, 422, 451)),
        ("tag", 403),
    ],
)
def test_refusal_is_logged_and_not_retried(server, pending, clock, caplog, endpoint, status):
    server.make(REPO_ID)
    stage_pushes(pending, 1, 2)
    server.problems = [
        InjectedError(ENDPOINTS[endpoint], 1000, status=status, message="no, because")
    ]
    assert push.push_pending(pending) == 2
    assert not clock.waits
    (message,) = caplog.messages
    assert f"{step_tag(1)} is not on the Hub: HTTP status {status}" in message
    server.problems.clear()
    assert push.push_pending(pending) == 0
    assert_pushed(server, pending, 1, 2)


def test_push_follows_a_commit_made_in_between(server, pending, monkeypatch):
    stage_pushes(pending, 1)
    server.make(REPO_ID)
    upload_folder = HfApi.upload_folder

    def upload_late(*args, **kwargs):
        if "by hand" not in server.titles(REPO_ID):
            server.repositories[REPO_ID].commit("by hand", {"NOTES.md": b"by hand"})
        return upload_folder(*args, **kwargs)

    monkeypatch.setattr(HfApi, "upload_folder", upload_late)
    assert push.push_pending(pending) == 0
    assert server.count("POST .*/commit/") == 2  # the first one was answered with 412
    assert server.titles(REPO_ID) == [commit_title(1), "by hand"]
    assert server.files(REPO_ID, step_tag(1)) == pushed_files(1) | {"NOTES.md": b"by hand"}


def test_deleted_repository_is_created_again(server, pending):
    stage_pushes(pending, 1)
    push.push_pending(pending)
    del server.repositories[REPO_ID]
    stage_pushes(pending, 2)
    assert push.push_pending(pending) == 0
    assert_pushed(server, pending, 2)


def test_push_follows_a_renamed_repository(server, pending):
    stage_pushes(pending, 1)
    push.push_pending(pending)
    server.repositories["me/other"] = server.repositories.pop(REPO_ID)
    server.renamed[REPO_ID] = "me/other"
    stage_pushes(pending, 2)
    assert push.push_pending(pending) == 0
    assert server.titles("me/other") == [commit_title(2), commit_title(1)]
    assert list(server.repositories) == ["me/other"]


def test_retry_after_beyond_the_deadline_ends_the_push(server, pending, clock):
    stage_pushes(pending, 1)
    server.problems = [
        InjectedError(ENDPOINTS["refs"], 1, status=429, headers={"Retry-After": "3600"})
    ]
    assert push.push_pending(pending) == 1
    assert not clock.waits and server.count("refs") == 1


def test_retry_after_is_respected(server, pending, clock):
    stage_pushes(pending, 1)
    for wait, endpoint in ((70, "refs"), (71, "commit"), (72, "tag")):
        server.problems.append(
            InjectedError(ENDPOINTS[endpoint], 1, status=429, headers={"Retry-After": str(wait)})
        )
    assert push.push_pending(pending) == 0
    assert clock.waits == [70, 71, 72]
    assert_pushed(server, pending, 1)


def test_second_sender_ends_with_status_4(server, pending):
    stage_pushes(pending, 1)
    busy = pytest.raises(BadInput, match=f"process {os.getpid()} is sending these")
    with files.locked(pending / ".lock", "busy"), busy as caught:
        push.push_pending(pending)
    assert caught.value.status == 4
    assert not server.requests


def test_files_that_gitignore_excludes_are_named(server, pending, caplog):
    stage_pushes(pending, 1)
    server.ignored = r".*\.safetensors"
    assert push.push_pending(pending) == 1
    assert "me/run on the Hub excludes last-checkpoint/model.safetensors, " in caplog.messages[-1]
    assert ".gitignore" in caplog.messages[-1]
    assert not server.tags(REPO_ID)
    server.ignored = None
    assert push.push_pending(pending) == 0
    assert server.files(REPO_ID, step_tag(1)) == pushed_files(1)


def test_push_through_xet(server, pending, tmp_path, monkeypatch):
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    server.xet = tmp_path / "xet"
    stage_pushes(pending, 1)
    server.problems = [
        InjectedError(ENDPOINTS["commit"], 1),
        InjectedError(ENDPOINTS["commit"], 1, "lose"),
    ]
    assert push.push_pending(pending) == 0
    assert server.titles(REPO_ID) == [commit_title(1)] and server.tags(REPO_ID) == {
        step_tag(1): commit_title(1)
    }
    stored = {
        name: hashlib.sha256(data).hexdigest()
        for name, data in pushed_files(1).items()
        if "safetensors" in name
    }
    found = {name: data.decode() for name, data in server.files(REPO_ID).items() if name in stored}
    assert found == {name: f"in Xet: {digest}" for name, digest in stored.items()}
    assert not server.count("objects/batch") and any(server.xet.rglob("*"))


def edit_card(server, edit) -> str:
    """Edit the README.md on the Hub, as its owner would in the browser; return the new text."""
    newest = server.repositories[REPO_ID].commits[-1].files
    text = edit(newest["README.md"].decode())
    server.repositories[REPO_ID].commit("by hand", {**newest, "README.md": text.encode()})
    return text


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def card_of(server) -> str:
    return server.files(REPO_ID)["README.md"].decode()


def test_edits_of_the_card_on_the_hub_are_kept(server, pending, caplog):
    stage_pushes(pending, 1)
    push.push_pending(pending)
    edit_card(
        server,
        lambda text: text.replace("license: mit", "license: apache-2.0\nwidget: []") + "Mine.\n",
    )
    stage_pushes(pending, 2)
    assert push.push_pending(pending) == 0 and not warnings_in(caplog)
    assert "license: apache-2.0\nwidget: []\n" in card_of(server) and card_of(server).endswith(
        "Mine.\n"
    )
    assert "# Step 2" in card_of(server) and "# Step 1" not in card_of(server)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: "---\nlicense: [mit\n---\nMine.\n", "its metadata block is not valid YAML"),
        (
            lambda text: text.replace("# Step 1", "# Step 1\nMine."),
            "the section between the markers was edited",
        ),
    ],
)
def test_damaged_card_is_left_alone_and_the_rest_is_pushed(server, pending, caplog, edit, words):
    stage_pushes(pending, 1)
    push.push_pending(pending)
    text = edit_card(server, edit)
    stage_pushes(pending, 2)
    assert push.push_pending(pending) == 0 and not staged_names(pending)
    assert card_of(server) == text
    assert server.files(REPO_ID, step_tag(2))["metrics.jsonl"] == pushed_files(2)["metrics.jsonl"]
    (message,) = warnings_in(caplog)
    assert (
        message.startswith(f"hub      {step_tag(2)}: README.md of {REPO_ID} was left unchanged: ")
        and words in message
    )


def test_card_damaged_between_attempts_is_left_alone(server, pending):
    stage_pushes(pending, 1)
    push.push_pending(pending)
    stage_pushes(pending, 2)
    server.problems = [InjectedError(ENDPOINTS["commit"], 1, status=403)]
    assert push.push_pending(pending) == 1
    text = edit_card(server, lambda text: text.replace("# Step 1", "# Step 1\nMine."))
    assert push.push_pending(pending) == 0
    assert card_of(server) == text


def test_card_that_is_no_utf8_text_is_left_alone(server, pending, caplog):
    server.make(REPO_ID).commits[-1].files["README.md"] = b"\xff\xfe# Mine"
    stage_pushes(pending, 1)
    assert push.push_pending(pending) == 0
    assert (
        server.files(REPO_ID)["README.md"] == b"\xff\xfe# Mine"
        and "it is not UTF-8 text" in caplog.text
    )


@pytest.mark.parametrize("status", [403, 503])
def test_push_succeeds_if_the_old_card_cannot_be_read(server, pending, caplog, status):
    server.make(REPO_ID).commits[-1].files["README.md"] = b"# Mine"
    stage_pushes(pending, 1)
    server.problems = [InjectedError("(GET|HEAD) .*/resolve/.*README", 10**6, status=status)]
    assert push.push_pending(pending) == 0 and not staged_names(pending)
    assert server.files(REPO_ID)["README.md"] == b"# Mine" and step_tag(1) in server.tags(REPO_ID)
    assert f"it cannot be read (HTTP status {status}" in caplog.text
    server.problems.clear()
    stage_pushes(pending, 2)
    assert push.push_pending(pending) == 0
    assert card_of(server).endswith("<!-- ursa-minor:end -->\n") and "# Mine" in card_of(server)


def test_push_succeeds_without_a_card_that_the_hub_refuses(server, pending, caplog):
    stage_pushes(pending, 1)
    server.problems = [InjectedError(ENDPOINTS["validate"], status=400)]
    assert push.push_pending(pending) == 0 and not staged_names(pending)
    assert (
        "README.md" not in server.files(REPO_ID)
        and "the Hub rejects the new card (Invalid metadata" in caplog.text
    )


def check(
    repo_id: str = "run",
    private: bool = True,
    fresh: bool = True,
    card: str = "---\nlicense: mit\n---\n",
):
    return push.check(repo_id, private=private, fresh=fresh, card=card)


def scope(name: str, *permissions: str) -> dict:
    scoped = [{"entity": {"type": "user", "name": name}, "permissions": list(permissions)}]
    return {"role": "fineGrained", "fineGrained": {"scoped": scoped}}


def test_check_makes_nothing_finds_the_owner_and_refuses_a_license_that_the_hub_does_not_know(
    server,
):
    for token in ({"role": "write"}, scope("me", "repo.content.read", "repo.write")):
        server.login["auth"]["accessToken"] = token
        assert check("run") == ("me/run", "") == check("me/run")
    server.problems = [
        InjectedError("validate-yaml", 1, status=400, message='"license" must be one of [mit, ...]')
    ]
    assert re.match(
        "license, language, tags: the Hub rejects these values.*must be one of",
        refusal(card="---\nlicense: MTI\n---\n"),
    )
    assert not server.repositories


def refusal(repo_id: str = "run", **how) -> str:
    with pytest.raises(BadInput) as caught:
        check(repo_id, **how)
    return str(caught.value)


def test_check_refuses_a_malformed_id_no_login_and_a_token_or_owner_that_may_not_write(
    server, monkeypatch
):
    for name in ("a b", "a/b/c"):
        assert re.match("hub_model_id = .*Use NAME or OWNER/NAME", refusal(name))
    with monkeypatch.context() as patched:
        patched.delenv("HF_TOKEN")
        assert re.match(
            "push_to_hub = true: you are not logged in.*hf auth login, or set HF_TOKEN", refusal()
        )
    assert not server.requests
    server.problems = [InjectedError("whoami", status=401)]
    assert re.match("hub_model_id = run: HTTP status 401.*hf auth login", refusal())
    server.login["orgs"] = [
        {"name": "readers", "roleInOrg": "read"},
        {"name": "writers", "roleInOrg": "write"},
    ]
    for owner in ("them", "readers"):
        assert (
            f"hub_model_id = {owner}/run: the token of me may not create this repository"
            in refusal(f"{owner}/run")
        )
    assert check("writers/run")[0] == "writers/run"
    server.make("them/run", private=False)
    server.read_only.add("them/run")
    assert "hub_model_id = them/run: HTTP status 403: You don't have the rights" in refusal(
        "them/run"
    )
    for token in ({"role": "read"}, scope("me", "repo.content.read"), scope("you", "repo.write")):
        server.login["auth"]["accessToken"] = token
        assert "create a fine-grained token that may write to me's repositories" in refusal()
        assert ("the token is read-only" in refusal()) == (token == {"role": "read"})


def test_check_refuses_another_runs_repository_only_to_a_new_run_and_names_a_public_one(
    server, pending
):
    stage_pushes(pending, 5, 12)
    push.push_pending(pending)
    assert re.search("contains step-00000012 of another run.*another hub_model_id", refusal())
    assert check(fresh=False) == (REPO_ID, "")
    server.repositories[REPO_ID].private = False
    assert "is public" in check(fresh=False)[1] and not check(fresh=False, private=False)[1]


def test_check_lets_a_run_start_when_the_hub_is_down(server, monkeypatch):
    server.make(REPO_ID)
    for endpoint in ("whoami", "validate", "info", "auth-check", "refs"):
        server.problems = [InjectedError(ENDPOINTS.get(endpoint, endpoint), 100)]
        repo_id, note = check()
        assert repo_id == "run" and note.startswith("the Hub cannot be reached now (")
    for name, value, words in (
        ("ENDPOINT", "http://127.0.0.1:9", "Connect"),
        ("HF_HUB_OFFLINE", True, "HF_HUB_OFFLINE"),
    ):
        monkeypatch.setattr(constants, name, value)
        assert words in check(REPO_ID)[1]
