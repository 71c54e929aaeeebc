"""Requests to the Hub have timeouts, print nothing and do not reveal the token."""

import time

import pytest
from fake_hub import InjectedError
from huggingface_hub import HfApi
from push_helpers import ENDPOINTS, REPO_ID, TOKEN, stage_pushes

from ursa_minor.base.errors import BadInput, TrainingStopped
from ursa_minor.hub import client, pull, push

pytest_plugins = ["push_helpers"]
# The Hub's client uploads LFS objects with a deprecated option of httpx.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")
OTHER_TOKEN = "hf_oauth_" + "x.Y-" * 9


def fetch(folder) -> None:
    """Fetch the newest checkpoint into the run folder ``folder``."""
    pull.fetch_checkpoint(f"hub://{REPO_ID}", folder / "checkpoints", folder)


def test_token_is_sent_in_header_only(server, pending, tmp_path, caplog, capfd):
    server.make(REPO_ID)
    stage_pushes(pending, 1, 2)

    for match in [*ENDPOINTS.values(), "whoami"]:
        refusal = f"{TOKEN} may not, {OTHER_TOKEN} neither"
        server.problems = [InjectedError(match, status=403, message=refusal)]
        push.push_pending(pending)
    with pytest.raises(BadInput) as caught:
        push.check("run", private=True, fresh=True, card="")
    push.push_pending(pending)
    fetch(tmp_path / "new")

    # No file has the token.
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert paths
    for path in paths:
        assert b"Canary" not in path.read_bytes()

    # No message has a token, and the terminal shows only messages of this project.
    assert any("redacted" in message for message in caplog.messages)
    for text in [*caplog.messages, str(caught.value)]:
        assert "Canary" not in text
        assert "hf_oauth" not in text
    assert {record.name.split(".")[0] for record in caplog.records} == {"ursa_minor"}
    assert capfd.readouterr() == ("", "")

    # Each request has the token in its authorization header only. Uploads to storage have none.
    for request in server.requests:
        assert b"Canary" not in request.body
        assert "Canary" not in request.path
        assert "Canary" not in request.headers
        expected = None if request.path.startswith("/lfs/") else TOKEN
        assert request.token == expected


def read_login() -> dict:
    return HfApi().whoami()


def list_files() -> list:
    return list(HfApi().list_repo_tree(REPO_ID))


@pytest.mark.parametrize("call", [read_login, list_files])
def test_every_request_has_a_timeout(server, monkeypatch, call):
    monkeypatch.setitem(client.TIMEOUTS, "read", 0.1)
    client.set_timeouts()
    server.make(REPO_ID, private=False)
    server.problems = [InjectedError("whoami|tree|info", 1000, "hang")]
    start = time.monotonic()

    with pytest.raises(Exception, match="timed out"):
        call()

    assert time.monotonic() - start < 60


def test_client_limits_retry_after(server, clock):
    client.set_timeouts()
    server.make(REPO_ID, private=False)
    headers = {"Retry-After": "99999999"}
    server.problems = [InjectedError("tree", 3, status=429, headers=headers)]

    files = list_files()

    assert len(files) == 1
    assert max(clock.waits) <= client.CLIENT_WAIT_SECONDS + 1


def test_page_of_proxy_is_reported(server, tmp_path):
    server.make(REPO_ID)
    page = "<!doctype html><title>Log in</title>"
    headers = {"Content-Type": "Text/HTML; charset=utf-8"}
    server.problems = [InjectedError("GET", 1, "say", message=page, headers=headers)]

    with pytest.raises(TrainingStopped) as caught:
        fetch(tmp_path / "new")

    message = str(caught.value)
    assert f"hub://{REPO_ID}: " in message
    assert "proxy or login page" in message
    assert "HTTPS_PROXY" in message
