"""The client asks nothing for ever, prints nothing and shows nobody the token."""

import logging.handlers
import time
from pathlib import Path

import pytest
from hub_server import Fault
from huggingface_hub import HfApi
from pushes import ENDPOINTS, ID, TOKEN, add, stage

from pretrain.base.errors import BadInput
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
