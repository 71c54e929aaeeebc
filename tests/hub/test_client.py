"""The client asks nothing for ever, prints nothing and shows nobody the token."""

import time

import pytest
from fake_hub import InjectedError
from huggingface_hub import HfApi
from push_helpers import ENDPOINTS, REPO_ID, TOKEN, stage_pushes

from ursa_minor.base.errors import BadInput, TrainingStopped
from ursa_minor.hub import client, pull, push

pytest_plugins = ["push_helpers"]
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")  # how the client sends LFS objects


def test_token_is_in_no_file_no_message_and_no_request_but_its_header_and_the_terminal_has_our_lines_only(
    server, pending, tmp_path, caplog, capfd
):
    server.make(REPO_ID)
    stage_pushes(pending, 1, 2)
    for match in [*ENDPOINTS.values(), "whoami"]:
        server.problems = [
            InjectedError(
                match, status=403, message=f"{TOKEN} may not, hf_oauth_{'x.Y-' * 9} neither"
            )
        ]
        push.push_pending(pending)
    with pytest.raises(BadInput) as caught:
        push.check("run", private=True, fresh=True, card="")
    push.push_pending(pending)
    pull.fetch_checkpoint(f"hub://{REPO_ID}", tmp_path / "new" / "checkpoints", tmp_path / "new")
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and b"Canary" in path.read_bytes()
    ]
    assert any("redacted" in line for line in caplog.messages)
    assert {record.name.split(".")[0] for record in caplog.records} == {
        "ursa_minor"
    } and capfd.readouterr() == ("", "")
    for text in [*caplog.messages, str(caught.value)]:
        assert "Canary" not in text and "hf_oauth" not in text
    assert {request.token for request in server.requests} == {TOKEN, None}
    for request in server.requests:
        assert b"Canary" not in request.body and "Canary" not in request.path + request.headers
        assert request.token or request.path.startswith("/lfs/")


def test_client_has_time_outs_also_where_it_asks_for_none(server, monkeypatch):
    monkeypatch.setitem(client.TIMEOUTS, "read", 0.1)
    client.set_timeouts()
    server.make(REPO_ID, private=False)
    server.problems = [InjectedError("whoami|tree|info", 1000, "hang")]
    begun = time.monotonic()
    for call in (HfApi().whoami, lambda: list(HfApi().list_repo_tree(REPO_ID))):
        with pytest.raises(Exception, match="timed out"):
            call()
    assert time.monotonic() - begun < 60


def test_the_clients_own_waits_are_bounded_whatever_the_server_asks_for(server, clock):
    client.set_timeouts()
    server.make(REPO_ID, private=False)
    server.problems = [InjectedError("tree", 3, status=429, headers={"Retry-After": "99999999"})]
    assert (
        len(list(HfApi().list_repo_tree(REPO_ID))) == 1
        and max(clock.waits) <= client.CLIENT_WAIT_SECONDS + 1
    )


def test_a_page_of_a_proxy_is_said_to_be_one(server, tmp_path):
    server.make(REPO_ID)
    html = {"Content-Type": "Text/HTML; charset=utf-8"}
    server.problems = [
        InjectedError("GET", 1, "say", message="<!doctype html><title>Log in</title>", headers=html)
    ]
    with pytest.raises(
        TrainingStopped, match=f"hub://{REPO_ID}: .*looks like a proxy or login page .*HTTPS_PROXY"
    ):
        pull.fetch_checkpoint(
            f"hub://{REPO_ID}", tmp_path / "new" / "checkpoints", tmp_path / "new"
        )
