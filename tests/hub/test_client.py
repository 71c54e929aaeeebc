"""The client asks nothing for ever, prints nothing and shows nobody the token."""

import json
import logging.handlers
import time
from pathlib import Path

import pytest
from hub_server import Fault
from huggingface_hub import HfApi
from pushes import ENDPOINTS, ID, TOKEN, add, stage

from pretrain.base.errors import BadInput, TrainingStopped
from pretrain.data import tokenization
from pretrain.hub import client, fetch, push

pytest_plugins = ["pushes"]
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")  # how the client sends LFS objects


def test_client_is_silent_on_the_terminal(server, pending, tmp_path, capfd):
    server.faults = [Fault(ENDPOINTS["preupload"], 2), Fault(ENDPOINTS["put"], 2, "drop")]
    logged = logging.handlers.BufferingHandler(1000)
    logging.getLogger("huggingface_hub").addHandler(logged)
    pusher = push.Pusher(pending)
    add(pusher, tmp_path, 1)
    assert pusher.close(20) == 0
    fetch.fetch_checkpoint(f"hub://{ID}", tmp_path / "new" / "checkpoints", tmp_path / "new")
    logging.getLogger("huggingface_hub").removeHandler(logged)
    assert capfd.readouterr() == ("", "") and not logged.buffer


def test_token_is_in_no_file_no_message_and_no_request_but_its_header(server, pending, tmp_path, caplog):
    server.make(ID)
    stage(pending, 1, 2)
    for match in [*ENDPOINTS.values(), "whoami"]:
        server.faults = [Fault(match, status=403, message=f"{TOKEN} may not, hf_oauth_{'x.Y-' * 9} neither")]
        push.push_pending(pending)
        assert_no_token_in(tmp_path)
    with pytest.raises(BadInput) as caught:
        push.check("run", private=True, fresh=True)
    push.push_pending(pending)
    fetch.fetch_checkpoint(f"hub://{ID}", tmp_path / "new" / "checkpoints", tmp_path / "new")
    assert_no_token_in(tmp_path)
    assert any("redacted" in line for line in caplog.messages)
    for text in [*caplog.messages, str(caught.value)]:
        assert "Canary" not in text and "hf_oauth" not in text
    assert {request.token for request in server.requests} == {TOKEN, None}
    for request in server.requests:
        assert b"Canary" not in request.body and "Canary" not in request.path + request.headers
        assert request.token or request.path.startswith("/lfs/")


def assert_no_token_in(folder: Path) -> None:
    assert not [path for path in folder.rglob("*") if path.is_file() and b"Canary" in path.read_bytes()]


def test_client_has_time_outs_also_where_it_asks_for_none(server, monkeypatch):
    monkeypatch.setitem(client.TIMEOUT_SECONDS, "read", 0.1)
    client.bound_client()
    server.make(ID, private=False)
    server.faults = [Fault("whoami|tree|info", 1000, "hang")]
    begun = time.monotonic()
    for call in (HfApi().whoami, lambda: list(HfApi().list_repo_tree(ID))):
        with pytest.raises(Exception, match="timed out"):
            call()
    assert time.monotonic() - begun < 60


COMMIT, FILE = "c0ffee" + "0" * 34, {"type": "file", "path": "a", "size": 1, "oid": "0" * 40}


def fetched(tmp_path: Path) -> Path | None:
    return fetch.fetch_checkpoint(f"hub://{ID}", tmp_path / "new" / "checkpoints", tmp_path / "new")


def listed() -> list:
    client.bound_client()
    return list(HfApi().list_repo_tree(ID))


@pytest.mark.parametrize("said", [{"sha": None}, {}, {"sha": "main"}, {"sha": COMMIT[1:]}, {"sha": 5}, [], None])
def test_a_hub_that_gives_no_commit_is_refused_by_name(server, tmp_path, said):
    server.make(ID, private=False)
    about = {"id": ID, "siblings": []} | said if isinstance(said, dict) else said
    server.faults = [Fault(ENDPOINTS["info"] + "|/revision/", 1000, "say", message=json.dumps(about))]
    with pytest.raises(BadInput, match=f"^{ID}: the Hub names no commit of it"):
        fetched(tmp_path)
    # Transformers would take what the files' own headers say, each the newest.
    with pytest.raises(BadInput, match=f"tokenizer = {ID}: cannot be loaded .{ID}: the Hub names no commit of it"):
        tokenization.load(ID)
    assert not server.count("/resolve/")
    server.faults.clear()
    with pytest.raises(BadInput, match="has no full checkpoint"):
        fetched(tmp_path)


def test_a_file_of_no_commit_is_refused_by_name(server):
    client.bound_client()
    server.make(ID, private=False)
    for commit in ("main", "None", "../" + COMMIT[3:]):
        server.faults = [Fault("/resolve/", 1000, "say", headers={"X-Repo-Commit": commit, "ETag": '"x"'})]
        with pytest.raises(BadInput, match=f"^{ID}: the Hub names no commit"):
            HfApi().hf_hub_download(ID, "config.json")


def test_a_listing_without_an_end_ends_by_pages_and_by_seconds(server, monkeypatch):
    monkeypatch.setattr(client, "LISTING_PAGES", 7)
    server.make(ID, private=False)
    more = {"Link": f'<{server.url}/api/models/{ID}/tree/main?cursor=x>; rel="next"'}
    server.faults = [Fault("tree", 5, "say", message=json.dumps([FILE]), headers=more)]
    assert len(listed()) == 6  # and .gitattributes
    server.faults = [Fault("tree", 1000, "say", message=json.dumps([FILE]), headers=more)]
    with pytest.raises(BadInput, match=f"^{ID}: its listing does not end within 7 pages and 15 minutes") as caught:
        listed()
    assert caught.value.status == 1 and server.faults[0].times == 1000 - 8
    monkeypatch.setattr(client, "LISTING_SECONDS", -1)
    with pytest.raises(BadInput, match=f"^{ID}: its listing does not end"):
        listed()
    assert server.faults[0].times == 1000 - 10


ROWS = [FILE | {"path": path} for path in (None, 5, [], "", "/etc/passwd", "../a", "a/../../b")]
ROWS += [FILE | {"size": size} for size in (None, "1", -1, 10**30, [])] + [FILE | {"type": 5}, {"path": "a"}]
ROWS += [FILE | {"lfs": lfs} for lfs in ("x", [], {})] + [None, 5, "a", []]


@pytest.mark.parametrize("said", [[row] for row in ROWS] + [{}, 5, {"path": "a"}])
def test_a_listing_of_what_is_no_file_is_refused_by_name(server, said):
    server.make(ID, private=False)
    server.faults = [Fault("tree", 1000, "say", message=json.dumps(said))]
    with pytest.raises(BadInput, match=f"^{ID}: the Hub lists .*, which is not a file of it"):
        listed()


def test_siblings_that_are_no_files_are_refused_by_name(server, tmp_path):
    server.make(ID)
    for siblings in ([None], [{}], [{"rfilename": None}], "a", [{"rfilename": "../a"}]):
        about = json.dumps({"id": ID, "sha": COMMIT, "siblings": siblings})
        server.faults = [Fault(ENDPOINTS["info"], 1000, "say", message=about)]
        with pytest.raises(BadInput, match=f"^{ID}: the Hub lists "):
            fetched(tmp_path)


@pytest.mark.parametrize("asked", ["\u00b2", "99999999", "9" * 5000, "-1", "nan"])
def test_the_clients_own_waits_are_bounded_whatever_the_server_asks_for(server, clock, asked):
    server.make(ID, private=False)
    server.faults = [Fault("tree", 3, status=429, headers={"Retry-After": asked})]
    assert len(listed()) == 1 and max(clock.waits) <= client.CLIENT_WAIT_SECONDS + 1


def test_a_page_of_a_proxy_is_said_to_be_one(server, tmp_path):
    server.make(ID)
    html = {"Content-Type": "Text/HTML; charset=utf-8"}
    server.faults = [Fault("GET", 1, "say", message="<!doctype html><title>Log in</title>", headers=html)]
    with pytest.raises(TrainingStopped, match=f"hub://{ID}: .*looks like a proxy's or log-in page .*HTTPS_PROXY"):
        fetched(tmp_path)
