"""A staged push reaches the Hub once and completely, whatever fails on the way."""

import dataclasses
import hashlib
import os
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
    write_files,
)

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.hub import client, push

pytest_plugins = ["push_helpers"]
# The Hub's client uploads LFS objects with a deprecated option of httpx.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")


def files_on_hub(server) -> dict[str, bytes]:
    """Return the files of the newest commit. Changes of this dictionary change the Hub."""
    return server.repositories[REPO_ID].commits[-1].files


def test_staged_pushes_are_sent_oldest_first(server, pending, caplog):
    stage_pushes(pending, 9, 100, 5, repo_id="run")  # without an owner, the login owns it

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert_pushed(server, pending, 5, 9, 100)
    assert server.repositories[REPO_ID].private
    assert server.count("repos/create") == 1
    assert server.count("POST .*/commit/") == 3
    assert f"pushed {step_tag(5)} to {REPO_ID}" in caplog.messages[0]


def test_public_repository_stays_public(server, pending):
    server.make(REPO_ID, private=False)
    stage_pushes(pending, 1)

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert not server.repositories[REPO_ID].private


@pytest.mark.parametrize("has_folder", [False, True])
def test_nothing_pending_makes_no_request(server, pending, has_folder):
    if has_folder:
        pending.mkdir(parents=True)

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert not server.requests


def test_partly_removed_push_is_not_sent_again(server, pending, monkeypatch):
    stage_pushes(pending, 1)
    # The process is killed before it deletes the files.
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert staged_names(pending) == []


def test_step_with_tag_is_not_sent_again(server, pending):
    stage_pushes(pending, 1, 2)
    push.push_pending(pending)
    uploads = server.count("PUT /lfs/")
    stage_pushes(pending, 1)  # by a run that was resumed from an earlier step

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert_pushed(server, pending, 1, 2)
    assert server.count("PUT /lfs/") == uploads
    assert server.count("POST .*/commit/") == 2


def test_push_is_also_tagged_by_tokens(server, pending):
    card, sources = write_files(pending.parent.parent / "made", 3)
    new_push = dataclasses.replace(make_push(3), tokens_tag="tokens-1.5B")
    pending.mkdir(parents=True)
    for _ in range(2):  # the second time, both tags exist
        push.stage(pending, new_push, card, sources)
        push.push_pending(pending)

    assert server.tags(REPO_ID) == {
        step_tag(3): commit_title(3),
        "tokens-1.5B": commit_title(3),
    }
    assert server.titles(REPO_ID) == [commit_title(3)]


def test_push_without_its_last_tag_is_completed(server, pending):
    card, sources = write_files(pending.parent.parent / "made", 3)
    new_push = dataclasses.replace(make_push(3), tokens_tag="tokens-10M")
    pending.mkdir(parents=True)
    push.stage(pending, new_push, card, sources)
    push.push_pending(pending)
    del server.repositories[REPO_ID].tags[step_tag(3)]  # killed before it was created
    push.stage(pending, new_push, card, sources)

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert list(server.tags(REPO_ID)) == [step_tag(3), "tokens-10M"]
    assert server.titles(REPO_ID) == [commit_title(3)]


def test_unchanged_files_are_tagged_without_commit(server, pending):
    stage_pushes(pending, 1)
    push.push_pending(pending)
    server.repositories[REPO_ID].tags.clear()
    stage_pushes(pending, 1)

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert server.titles(REPO_ID) == [commit_title(1)]
    assert server.tags(REPO_ID) == {step_tag(1): commit_title(1)}


def test_unknown_files_of_last_checkpoint_are_deleted(server, pending):
    stage_pushes(pending, 1)
    push.push_pending(pending)
    files_on_hub(server)["last-checkpoint/more.safetensors"] = b"of an older format"
    stage_pushes(pending, 2)

    push.push_pending(pending)

    assert server.files(REPO_ID) == pushed_files(2)


def test_model_only_push_keeps_last_checkpoint(server, pending):
    stage_pushes(pending, 1)
    stage_pushes(pending, 2, within=None)

    push.push_pending(pending)

    expected = pushed_files(2, within=None)
    for name, data in pushed_files(1).items():
        if name.startswith("last-checkpoint/"):
            expected[name] = data
    assert server.files(REPO_ID) == expected


def test_newer_checkpoint_elsewhere_deletes_last_checkpoint(server, pending):
    within = f"checkpoints/{step_tag(2)}"
    stage_pushes(pending, 1)
    stage_pushes(pending, 2, within=within)

    push.push_pending(pending)

    assert server.files(REPO_ID) == pushed_files(2, within)


def test_earlier_checkpoints_stay_on_hub(server, pending):
    expected = {}
    for step in (1, 2):
        within = f"checkpoints/{step_tag(step)}"
        stage_pushes(pending, step, within=within)
        expected |= pushed_files(step, within)

    push.push_pending(pending)

    assert server.files(REPO_ID) == expected


@pytest.mark.parametrize(
    "name",
    [
        ".env",
        "secrets.json",
        "a/config.json",
        "../config.json",
        "config.json\n",
        "last-checkpoint/.env",
        "last-checkpoint/state.json",
        "last-checkpoint/training/config.json",
        "model.bin",
        "checkpoints/step-1/training/state.json",
        "checkpoints/../training/state.json",
    ],
)
def test_unknown_file_name_is_rejected(pending, tmp_path, name):
    (tmp_path / "file").write_text("secret")

    with pytest.raises(ValueError, match="not on the list"):
        push.stage(pending, make_push(1), "", {name: tmp_path / "file"})
    assert not pending.exists()


@pytest.mark.parametrize("source", ["link", ".", "nothing"])
def test_source_must_be_regular_file(pending, tmp_path, source):
    (tmp_path / "file").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "file")

    with pytest.raises(ValueError, match="not a regular file"):
        push.stage(pending, make_push(1), "", {"config.json": tmp_path / source})
    assert not pending.exists()


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "merges.txt",
        "README.md",
        "recipe.yaml",
        "curves.png",
        "metrics.jsonl",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "last-checkpoint/config.json",
        "last-checkpoint/training/state.json",
        "checkpoints/step-00000012/tokenizer.json",
    ],
)
def test_model_and_tokenizer_files_are_allowed(name):
    assert push.ALLOWED.fullmatch(name)


def test_files_added_after_staging_are_not_sent(server, pending, tmp_path):
    stage_pushes(pending, 1)
    staged_files = pending / step_tag(1) / "files"
    (tmp_path / "secret").write_text("secret")
    (staged_files / ".DS_Store").write_text("of a file manager")
    (staged_files / "recipe.yaml").symlink_to(tmp_path / "secret")

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert_pushed(server, pending, 1)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "last-checkpoint/training/optimizer.safetensors"]
)
def test_staged_weights_are_hard_links(server, pending, tmp_path, name):
    stage_pushes(pending, 3)

    staged_file = pending / step_tag(3) / "files" / name
    assert os.path.samefile(staged_file, tmp_path / "made" / "3" / name)


def test_staged_push_outlives_its_checkpoint(server, pending, tmp_path):
    stage_pushes(pending, 3)
    with open(tmp_path / "made" / "3" / "metrics.jsonl", "a") as metrics:
        metrics.write("{}\n")
    shutil.rmtree(tmp_path / "made" / "3")

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert_pushed(server, pending, 3)


def raise_disk_full(*_):
    raise OSError(28, "No space left on device")


def test_weights_are_copied_without_hard_links(server, pending, monkeypatch):
    monkeypatch.setattr(os, "link", raise_disk_full)

    stage_pushes(pending, 1)

    assert push.push_pending(pending) == 0
    assert_pushed(server, pending, 1)


def test_full_disk_leaves_no_staged_files(pending, monkeypatch):
    monkeypatch.setattr(shutil, "copyfile", raise_disk_full)

    with pytest.raises(OSError, match="No space left"):
        stage_pushes(pending, 1)

    assert os.listdir(pending) == []


# Each request fails 6 times, which is more than the Hub's client retries.
DOWN = [InjectedError(match, 6) for match in ENDPOINTS.values()]
LOST_ANSWERS = [
    InjectedError(ENDPOINTS["commit"], 1, "drop"),
    InjectedError(ENDPOINTS["create"], 1, "lose"),
    InjectedError(ENDPOINTS["put"], 1, "lose"),
    InjectedError(ENDPOINTS["commit"], 1, "lose"),
    InjectedError(ENDPOINTS["tag"], 1, "lose"),
]


@pytest.mark.parametrize("problems", [DOWN, LOST_ANSWERS], ids=["down", "lost"])
def test_push_survives_failing_hub(server, pending, problems, monkeypatch):
    monkeypatch.setattr(client, "DEADLINE_SECONDS", 10**4)  # the problems occur one by one
    stage_pushes(pending, 1, 2)
    server.problems = problems

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert not any(problem.times for problem in problems)
    assert_pushed(server, pending, 1, 2)


@pytest.mark.parametrize("endpoint", ["commit", "tag"])
def test_next_process_continues_after_lost_answer(server, pending, monkeypatch, endpoint):
    stage_pushes(pending, 1, 2)
    server.problems = [InjectedError(ENDPOINTS[endpoint], kind="lose")]
    with monkeypatch.context() as patched:
        patched.setattr(client, "DEADLINE_SECONDS", 0)
        assert push.push_pending(pending) == 2
    assert server.titles(REPO_ID) == [commit_title(1)]
    notes = {"NOTES.md": b"by hand"}
    server.repositories[REPO_ID].commit("by hand", files_on_hub(server) | notes)

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert server.titles(REPO_ID) == [commit_title(2), "by hand", commit_title(1)]
    # The tag of step 1 may be at the commit by hand if the answer to the tag was lost.
    assert server.files(REPO_ID, step_tag(1)) | notes == pushed_files(1) | notes
    assert server.files(REPO_ID, step_tag(2)) == pushed_files(2) | notes
    assert server.files(REPO_ID) == pushed_files(2) | notes


def test_unreachable_hub_is_retried_until_deadline(server, pending, clock, monkeypatch, caplog):
    stage_pushes(pending, 1)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")

    remaining = push.push_pending(pending)

    assert remaining == 1
    assert clock.waits[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert 14 * 60 < sum(clock.waits) <= 15 * 60
    (message,) = caplog.messages
    assert f"{step_tag(1)} is not on the Hub: ConnectError" in message
    assert str(pending) in message
    assert message.endswith(f"python train.py --push_pending {pending.parent}")


def test_temporary_statuses_are_retried(server, pending, clock):
    stage_pushes(pending, 1)
    statuses = [408, 409, 412, 423, 425, 429, 500, 502, 504]
    server.problems = [InjectedError(ENDPOINTS["commit"], 1, status=status) for status in statuses]

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert clock.waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert_pushed(server, pending, 1)


@pytest.mark.parametrize(
    ("endpoint", "status"),
    [
        ("put", 403),
        ("commit", 400),
        ("commit", 401),
        ("commit", 403),
        ("commit", 404),
        ("commit", 413),
        ("commit", 422),
        ("commit", 451),
        ("tag", 403),
    ],
)
def test_refused_push_is_not_retried(server, pending, clock, caplog, endpoint, status):
    server.make(REPO_ID)
    stage_pushes(pending, 1, 2)
    refusal = InjectedError(ENDPOINTS[endpoint], 1000, status=status, message="no, because")
    server.problems = [refusal]

    remaining = push.push_pending(pending)

    assert remaining == 2
    assert not clock.waits
    (message,) = caplog.messages
    assert f"{step_tag(1)} is not on the Hub: HTTP status {status}" in message
    server.problems.clear()
    assert push.push_pending(pending) == 0
    assert_pushed(server, pending, 1, 2)


def test_push_follows_concurrent_commit(server, pending, monkeypatch):
    stage_pushes(pending, 1)
    server.make(REPO_ID)
    upload_folder = HfApi.upload_folder

    def upload_after_other_commit(*args, **kwargs):
        if "by hand" not in server.titles(REPO_ID):
            server.repositories[REPO_ID].commit("by hand", {"NOTES.md": b"by hand"})
        return upload_folder(*args, **kwargs)

    monkeypatch.setattr(HfApi, "upload_folder", upload_after_other_commit)

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert server.count("POST .*/commit/") == 2  # the status of the first one is 412
    assert server.titles(REPO_ID) == [commit_title(1), "by hand"]
    assert server.files(REPO_ID, step_tag(1)) == pushed_files(1) | {"NOTES.md": b"by hand"}


def test_deleted_repository_is_created_again(server, pending):
    stage_pushes(pending, 1)
    push.push_pending(pending)
    del server.repositories[REPO_ID]
    stage_pushes(pending, 2)

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert_pushed(server, pending, 2)


def test_push_follows_renamed_repository(server, pending):
    stage_pushes(pending, 1)
    push.push_pending(pending)
    server.repositories["me/other"] = server.repositories.pop(REPO_ID)
    server.renamed[REPO_ID] = "me/other"
    stage_pushes(pending, 2)

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert server.titles("me/other") == [commit_title(2), commit_title(1)]
    assert list(server.repositories) == ["me/other"]


def too_many_requests(endpoint: str, retry_after: int) -> InjectedError:
    """Return an error 429 that asks the client to wait this many seconds."""
    headers = {"Retry-After": str(retry_after)}
    return InjectedError(ENDPOINTS[endpoint], 1, status=429, headers=headers)


def test_retry_after_beyond_deadline_ends_push(server, pending, clock):
    stage_pushes(pending, 1)
    server.problems = [too_many_requests("refs", 3600)]

    remaining = push.push_pending(pending)

    assert remaining == 1
    assert not clock.waits
    assert server.count("refs") == 1


def test_retry_after_is_respected(server, pending, clock):
    stage_pushes(pending, 1)
    server.problems = [
        too_many_requests("refs", 70),
        too_many_requests("commit", 71),
        too_many_requests("tag", 72),
    ]

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert clock.waits == [70, 71, 72]
    assert_pushed(server, pending, 1)


def test_second_sender_ends_with_status_4(server, pending):
    stage_pushes(pending, 1)

    with files.locked(pending / ".lock", "busy"), pytest.raises(BadInput) as caught:
        push.push_pending(pending)

    assert f"process {os.getpid()}" in str(caught.value)
    assert caught.value.status == 4
    assert not server.requests


def test_files_excluded_by_gitignore_are_named(server, pending, caplog):
    stage_pushes(pending, 1)
    server.ignored = r".*\.safetensors"

    remaining = push.push_pending(pending)

    assert remaining == 1
    assert f"{REPO_ID} on the Hub excludes" in caplog.messages[-1]
    assert "last-checkpoint/model.safetensors" in caplog.messages[-1]
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

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert server.titles(REPO_ID) == [commit_title(1)]
    assert server.tags(REPO_ID) == {step_tag(1): commit_title(1)}
    assert not server.count("objects/batch")
    assert any(server.xet.rglob("*"))
    weights = {name: data for name, data in pushed_files(1).items() if "safetensors" in name}
    for name, data in weights.items():
        sha256 = hashlib.sha256(data).hexdigest()
        assert server.files(REPO_ID)[name] == f"in Xet: {sha256}".encode()


def read_card(server) -> str:
    """Return the model card on the Hub."""
    return server.files(REPO_ID)["README.md"].decode()


def replace_card(server, text: str) -> None:
    """Commit another README.md on the Hub, as its owner can do in the browser."""
    contents = files_on_hub(server) | {"README.md": text.encode()}
    server.repositories[REPO_ID].commit("by hand", contents)


def warnings_in(caplog) -> list[str]:
    """Return the messages of the level WARNING."""
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture
def pushed(server, pending):
    """Push step 1 and return the server."""
    stage_pushes(pending, 1)
    push.push_pending(pending)
    return server


def test_edits_of_card_on_hub_are_kept(pushed, pending, caplog):
    metadata = "license: apache-2.0\nwidget: []\n"
    card = read_card(pushed).replace("license: mit\n", metadata)
    replace_card(pushed, card + "Mine.\n")
    stage_pushes(pending, 2)

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert not warnings_in(caplog)
    merged = read_card(pushed)
    assert metadata in merged
    assert merged.endswith("Mine.\n")
    assert "# Step 2" in merged
    assert "# Step 1" not in merged


def break_metadata(card: str) -> str:
    return "---\nlicense: [mit\n---\nMine.\n"


def edit_generated_section(card: str) -> str:
    return card.replace("# Step 1", "# Step 1\nMine.")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [(break_metadata, "not valid YAML"), (edit_generated_section, "section between the markers")],
)
def test_damaged_card_is_not_replaced(pushed, pending, caplog, edit, reason):
    damaged = edit(read_card(pushed))
    replace_card(pushed, damaged)
    stage_pushes(pending, 2)

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert not staged_names(pending)
    assert read_card(pushed) == damaged
    pushed_metrics = pushed.files(REPO_ID, step_tag(2))["metrics.jsonl"]
    assert pushed_metrics == pushed_files(2)["metrics.jsonl"]
    (message,) = warnings_in(caplog)
    assert f"{step_tag(2)}: README.md of {REPO_ID} was left unchanged" in message
    assert reason in message


def test_card_damaged_between_attempts_is_not_replaced(pushed, pending):
    stage_pushes(pending, 2)
    pushed.problems = [InjectedError(ENDPOINTS["commit"], 1, status=403)]
    assert push.push_pending(pending) == 1
    damaged = edit_generated_section(read_card(pushed))
    replace_card(pushed, damaged)

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert read_card(pushed) == damaged


def test_card_in_other_encoding_is_not_replaced(server, pending, caplog):
    card = b"\xff\xfe# Mine"
    server.make(REPO_ID)
    files_on_hub(server)["README.md"] = card
    stage_pushes(pending, 1)

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert server.files(REPO_ID)["README.md"] == card
    assert "not UTF-8 text" in caplog.text


@pytest.mark.parametrize("status", [403, 503])
def test_push_succeeds_with_unreadable_card(server, pending, caplog, status):
    server.make(REPO_ID)
    files_on_hub(server)["README.md"] = b"# Mine"
    stage_pushes(pending, 1)
    server.problems = [InjectedError("(GET|HEAD) .*/resolve/.*README", 10**6, status=status)]

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert not staged_names(pending)
    assert read_card(server) == "# Mine"
    assert step_tag(1) in server.tags(REPO_ID)
    assert f"it cannot be read (HTTP status {status}" in caplog.text
    server.problems.clear()
    stage_pushes(pending, 2)
    assert push.push_pending(pending) == 0
    assert "# Mine" in read_card(server)
    assert read_card(server).endswith("<!-- ursa-minor:end -->\n")


def test_push_succeeds_without_rejected_card(server, pending, caplog):
    stage_pushes(pending, 1)
    server.problems = [InjectedError(ENDPOINTS["validate"], status=400)]

    remaining = push.push_pending(pending)

    assert remaining == 0
    assert not staged_names(pending)
    assert "README.md" not in server.files(REPO_ID)
    assert "the Hub rejects the new card" in caplog.text
    assert "Invalid metadata" in caplog.text


def check(
    repo_id: str = "run",
    *,
    private: bool = True,
    fresh: bool = True,
    card: str = "---\nlicense: mit\n---\n",
) -> tuple[str, str]:
    """Check a repository before a run, and return its full id and a note."""
    return push.check(repo_id, private=private, fresh=fresh, card=card)


def rejection(repo_id: str = "run", card: str = "---\nlicense: mit\n---\n") -> str:
    """Return the message of the error that the check raises."""
    with pytest.raises(BadInput) as caught:
        check(repo_id, card=card)
    return str(caught.value)


def fine_grained_token(name: str, *permissions: str) -> dict:
    """Return whoami's description of a token with permissions for one owner."""
    scoped = [{"entity": {"type": "user", "name": name}, "permissions": list(permissions)}]
    return {"role": "fineGrained", "fineGrained": {"scoped": scoped}}


@pytest.mark.parametrize(
    "token",
    [{"role": "write"}, fine_grained_token("me", "repo.content.read", "repo.write")],
    ids=["write", "fine-grained"],
)
@pytest.mark.parametrize("repo_id", ["run", "me/run"])
def test_check_adds_owner_without_creating_repository(server, token, repo_id):
    server.login["auth"]["accessToken"] = token

    assert check(repo_id) == ("me/run", "")
    assert not server.repositories


def test_check_rejects_unknown_license(server):
    refusal = '"license" must be one of [mit, ...]'
    server.problems = [InjectedError("validate-yaml", 1, status=400, message=refusal)]

    message = rejection(card="---\nlicense: MTI\n---\n")

    assert "license, language, tags" in message
    assert "must be one of" in message
    assert not server.repositories


@pytest.mark.parametrize("repo_id", ["a b", "a/b/c"])
def test_check_rejects_malformed_id(server, repo_id):
    message = rejection(repo_id)

    assert "hub_model_id" in message
    assert "NAME or OWNER/NAME" in message
    assert not server.requests


def test_check_needs_login(server, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")

    message = rejection()

    assert "push_to_hub = true: you are not logged in" in message
    assert "hf auth login" in message
    assert "HF_TOKEN" in message
    assert not server.requests


def test_check_rejects_expired_token(server):
    server.problems = [InjectedError("whoami", status=401)]

    message = rejection()

    assert "hub_model_id = run" in message
    assert "HTTP status 401" in message
    assert "hf auth login" in message


@pytest.fixture
def organizations(server):
    """Make the login a member of an organization that it may read, and of one that it may write."""
    server.login["orgs"] = [
        {"name": "readers", "roleInOrg": "read"},
        {"name": "writers", "roleInOrg": "write"},
    ]


@pytest.mark.parametrize("owner", ["them", "readers"])
def test_check_rejects_owner_without_write_permission(server, organizations, owner):
    message = rejection(f"{owner}/run")

    assert f"hub_model_id = {owner}/run" in message
    assert "may not create this repository" in message


def test_check_accepts_organization_with_write_permission(server, organizations):
    repo_id, _ = check("writers/run")

    assert repo_id == "writers/run"


def test_check_rejects_read_only_repository(server):
    server.make("them/run", private=False)
    server.read_only.add("them/run")

    message = rejection("them/run")

    assert "hub_model_id = them/run" in message
    assert "HTTP status 403: You don't have the rights" in message


def test_check_rejects_read_only_token(server):
    server.login["auth"]["accessToken"] = {"role": "read"}

    message = rejection()

    assert "create a fine-grained token that may write to me's repositories" in message
    assert "the token is read-only" in message


@pytest.mark.parametrize(
    "token",
    [fine_grained_token("me", "repo.content.read"), fine_grained_token("you", "repo.write")],
    ids=["no write permission", "other owner"],
)
def test_check_rejects_insufficient_token(server, token):
    server.login["auth"]["accessToken"] = token

    message = rejection()

    assert "create a fine-grained token that may write to me's repositories" in message
    assert "the token is read-only" not in message


def test_check_rejects_repository_of_other_run(server, pending):
    stage_pushes(pending, 5, 12)
    push.push_pending(pending)

    message = rejection()

    assert "step-00000012 of another run" in message
    assert "another hub_model_id" in message


def test_check_accepts_repository_of_resumed_run(pushed):
    assert check(fresh=False) == (REPO_ID, "")


def test_check_notes_unexpected_public_repository(pushed):
    pushed.repositories[REPO_ID].private = False

    _, note_for_private_run = check(fresh=False, private=True)
    _, note_for_public_run = check(fresh=False, private=False)

    assert "is public" in note_for_private_run
    assert note_for_public_run == ""


@pytest.mark.parametrize(
    "match",
    ["whoami", ENDPOINTS["validate"], ENDPOINTS["info"], "auth-check", ENDPOINTS["refs"]],
    ids=["login", "card", "repository", "permission", "tags"],
)
def test_check_passes_if_hub_is_down(server, match):
    server.make(REPO_ID)
    server.problems = [InjectedError(match, 100)]

    repo_id, note = check()

    assert repo_id == "run"
    assert "the Hub cannot be reached now" in note


@pytest.mark.parametrize(
    ("constant", "value", "reason"),
    [("ENDPOINT", "http://127.0.0.1:9", "Connect"), ("HF_HUB_OFFLINE", True, "HF_HUB_OFFLINE")],
    ids=["no connection", "offline"],
)
def test_check_passes_without_network(server, monkeypatch, constant, value, reason):
    monkeypatch.setattr(constants, constant, value)

    _, note = check(REPO_ID)

    assert reason in note
