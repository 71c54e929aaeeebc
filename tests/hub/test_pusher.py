"""Pushes are sent in the background. Newer pushes replace waiting ones, and failed pushes wait."""

import os
import shutil

import pytest
from fake_hub import HubServer, InjectedError
from push_helpers import (
    ENDPOINTS,
    REPO_ID,
    assert_pushed,
    commit_title,
    stage_pushes,
    staged_names,
    step_tag,
    submit_step,
    wait_until,
)

from ursa_minor.base import files
from ursa_minor.hub import client, push

pytest_plugins = ["push_helpers"]
# The Hub's client uploads LFS objects with a deprecated option of httpx.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")


@pytest.fixture
def pusher(server, pending) -> push.PushQueue:
    """Start a queue without staged pushes."""
    pusher = push.PushQueue(pending)
    pusher.start()
    # Otherwise this first attempt could send pushes that the test stages.
    wait_until_idle()
    return pusher


@pytest.fixture
def hanging(server) -> HubServer:
    """Return a Hub that does not answer the next upload until its ``ending`` is set."""
    server.problems = [InjectedError(ENDPOINTS["put"], 1, "hang")]
    return server


def wait_until_idle() -> None:
    """Wait until no push is being sent."""
    wait_until(lambda: not push.is_uploading())


def wait_for_upload(server) -> None:
    """Wait until the server has received an upload."""
    wait_until(lambda: server.count(ENDPOINTS["put"]))


def wait_for_failure(caplog) -> None:
    """Wait until a failed push is logged and no push is being sent."""
    wait_until(lambda: "is not on the Hub" in caplog.text)
    wait_until_idle()


def test_newer_push_replaces_waiting_push(hanging, pusher, pending, tmp_path, caplog):
    for step in (1, 2, 3):
        submit_step(pusher, tmp_path, step)
        wait_for_upload(hanging)

    assert staged_names(pending) == [step_tag(1), step_tag(3)]
    (message,) = [line for line in caplog.messages if "replaced" in line]
    assert f"{step_tag(2)} was replaced by {step_tag(3)}" in message
    hanging.ending.set()
    assert pusher.wait(20) == 0
    assert_pushed(hanging, pending, 1, 3)


def test_push_with_keep_is_not_replaced(hanging, pusher, pending, tmp_path):
    for step in (1, 2, 3):
        submit_step(pusher, tmp_path, step, keep=True)
        wait_for_upload(hanging)

    hanging.ending.set()
    assert pusher.wait(20) == 0
    assert_pushed(hanging, pending, 1, 2, 3)


def test_older_step_does_not_replace_current_push(hanging, pusher, pending, tmp_path):
    submit_step(pusher, tmp_path, 9)
    wait_for_upload(hanging)

    submit_step(pusher, tmp_path, 5)  # the run was resumed from an earlier checkpoint

    assert staged_names(pending) == [step_tag(5), step_tag(9)]
    hanging.ending.set()
    assert pusher.wait(20) == 0
    assert hanging.titles(REPO_ID) == [commit_title(5), commit_title(9)]


def test_push_of_other_process_is_not_replaced(pusher, pending, tmp_path):
    stage_pushes(pending, 1, 2)

    with files.locked(pending / ".lock", "busy"):
        submit_step(pusher, tmp_path, 3)
        wait_until_idle()

    assert staged_names(pending) == [step_tag(1), step_tag(3)]


def test_staged_step_is_not_staged_again(hanging, pusher, pending, tmp_path):
    submit_step(pusher, tmp_path, 1)
    wait_for_upload(hanging)

    pusher.submit(push.Push(1, REPO_ID, True, "another title", False), "", {})

    hanging.ending.set()
    assert pusher.wait(20) == 0
    assert_pushed(hanging, pending, 1)


def test_failed_push_is_sent_with_next_one(server, pusher, pending, tmp_path, caplog):
    server.problems = [InjectedError(ENDPOINTS["commit"], 1, status=403)]
    submit_step(pusher, tmp_path, 1)
    wait_for_failure(caplog)
    assert staged_names(pending) == [step_tag(1)]
    assert not server.tags(REPO_ID)

    submit_step(pusher, tmp_path, 2)
    wait_until_idle()

    assert_pushed(server, pending, 1, 2)


def test_failed_push_is_sent_again_by_wait(server, pusher, pending, tmp_path, caplog):
    server.problems = [InjectedError(ENDPOINTS["commit"], 1, status=403)]
    submit_step(pusher, tmp_path, 1)
    wait_for_failure(caplog)

    remaining = pusher.wait(20)

    assert remaining == 0
    assert_pushed(server, pending, 1)


def test_pushes_wait_behind_failed_push(server, pusher, pending, tmp_path, caplog):
    server.problems = [InjectedError(ENDPOINTS["commit"], 10**6, status=403)]
    submit_step(pusher, tmp_path, 1)
    wait_for_failure(caplog)

    for step in (2, 3):
        submit_step(pusher, tmp_path, step)

    assert pusher.wait(20) == 2
    assert staged_names(pending) == [step_tag(1), step_tag(3)]
    assert caplog.text.count("is not on the Hub") == 1  # the same failure is logged once
    server.problems.clear()
    assert pusher.wait(20) == 0
    assert_pushed(server, pending, 1, 3)


def test_push_after_outage_sends_staged_pushes(
    server, pusher, pending, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(client, "DEADLINE_SECONDS", 10)
    server.problems = [InjectedError(ENDPOINTS["refs"], 10**6)]
    submit_step(pusher, tmp_path, 1)
    wait_for_failure(caplog)
    assert step_tag(1) in caplog.messages[0]
    assert "HTTP status 503: injected" in caplog.messages[0]

    server.problems.clear()
    submit_step(pusher, tmp_path, 2)

    assert pusher.wait(20) == 0
    assert_pushed(server, pending, 1, 2)


def test_silent_hub_delays_neither_submit_nor_wait(server, pusher, pending, tmp_path):
    server.problems = [InjectedError(".*", 10**6, "hang")]

    for step in (1, 2):
        submit_step(pusher, tmp_path, step)

    assert pusher.wait(0.1) == 2
    assert push.is_uploading()
    server.problems.clear()
    server.ending.set()
    assert pusher.wait(20) == 0
    assert not push.is_uploading()
    assert_pushed(server, pending, 1, 2)


def test_wait_ends_when_user_gives_up(hanging, pusher, tmp_path):
    submit_step(pusher, tmp_path, 1)

    remaining = pusher.wait(10**6, give_up=lambda: True)

    assert remaining == 1
    hanging.ending.set()
    assert pusher.wait(20) == 0


def test_checkpoint_may_be_deleted_during_push(hanging, pusher, pending, tmp_path):
    submit_step(pusher, tmp_path, 1)
    wait_for_upload(hanging)

    shutil.rmtree(tmp_path / "1")

    hanging.ending.set()
    assert pusher.wait(20) == 0
    assert_pushed(hanging, pending, 1)


def test_full_disk_leaves_nothing_staged(server, pusher, pending, tmp_path, monkeypatch):
    def raise_disk_full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", raise_disk_full)

    with pytest.raises(OSError, match="No space left"):
        submit_step(pusher, tmp_path, 1)

    assert pusher.wait(20) == 0
    assert os.listdir(pending) == []
    assert not server.requests


def test_start_sends_pushes_of_earlier_process(server, pending):
    stage_pushes(pending, 1)
    # The process was killed while it staged step 2.
    shutil.copytree(pending / step_tag(1), pending / f".{step_tag(2)}.tmp-0123abcd")
    pusher = push.PushQueue(pending)

    pusher.start()

    assert pusher.wait(20) == 0
    assert_pushed(server, pending, 1)


def test_pushes_stay_staged_while_other_process_sends(server, pending):
    stage_pushes(pending, 1)

    with files.locked(pending / ".lock", "busy"):
        remaining = push.PushQueue(pending).wait(20)

    assert remaining == 1
    assert not server.requests


def test_deleted_staging_folder_is_created_again(server, pusher, pending, tmp_path):
    shutil.rmtree(pending)

    submit_step(pusher, tmp_path, 1)

    assert pusher.wait(20) == 0
    assert_pushed(server, pending, 1)


def test_deleted_run_folder_raises_no_error(pusher, pending):
    shutil.rmtree(pending.parent)

    assert pusher.wait(20) == 0
