"""Tests that the login and the query of a data URL are used, but never stored, sent or printed."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, TEXT, run_script
from fake_hub import HubServer
from http_server import DataServer

from ursa_minor.machine import run_info

SECRETS = ("canaryuser", "canarypass", "canarytoken", "canaryquery", "canaryagain")
BASIC_LOGIN = "Basic Y2FuYXJ5dXNlcjpjYW5hcnlwYXNz"  # canaryuser:canarypass
TINY_FLAGS = (
    *("--recipe", "tiny.yaml"),
    *("--run_name", "r"),
    *("--sample_steps", "0"),
    *("--eval_steps", "0"),
    *("--save_steps", "3"),
    *("--shard_tokens", "3000"),
)
# Flags for a table without validation files.
TABLE_FLAGS = (*TINY_FLAGS, "--validation_tokens", "300")
KILLED_PREPARATION = str(ROOT / "tests" / "scripts" / "test_prepare_data.py")


@pytest.fixture
def server(tmp_path) -> Iterator[DataServer]:
    """Serve two texts and two tables to clients with the password and a token."""
    folder = tmp_path / "served"
    files = folder / "files"
    files.mkdir(parents=True)
    for name, text in {"a": TEXT, "b": TEXT[::-1]}.items():
        (files / f"{name}.txt").write_text(text)
        with open(files / f"{name}.jsonl", "w") as table:
            for start in range(0, len(text), 100):
                table.write(json.dumps({"text": text[start : start + 100]}) + "\n")

    def is_allowed(path, headers) -> bool:
        return "token=canary" in path and headers.get("Authorization") == BASIC_LOGIN

    with DataServer(folder) as server:
        server.allowed = is_allowed
        yield server


def secret_url(server: DataServer, name: str, token: str = "canarytoken") -> str:
    """Return the URL of a served file with a user, a password, a query and a token."""
    base = server.url.replace("://", "://canaryuser:canarypass@")
    return f"{base}/files/{name}?v=canaryquery&token={token}"


@pytest.fixture
def unprepared_workspace(workspace) -> Path:
    """Return the workspace without shards."""
    shutil.rmtree("data")
    return workspace


def secrets_in(text: str | bytes) -> list[str]:
    """Return the secrets that occur in a text."""
    data = text.encode() if isinstance(text, str) else text
    return [secret for secret in SECRETS if secret.encode() in data]


def assert_no_secrets(*texts: str | bytes) -> None:
    """Assert that no secret occurs in these texts or in a file of the current folder."""
    files = [path for path in Path().rglob("*") if path.is_file()]
    assert len(files) + len(texts) > 10
    for path in files:
        assert not secrets_in(path.read_bytes()), path
    for text in texts:
        assert not secrets_in(text)


@pytest.fixture
def user_folders(monkeypatch) -> dict[str, str]:
    """Return environment variables for user folders below the current folder."""
    folders = {
        "HOME": "home",
        "XDG_CACHE_HOME": "home/cache",
        "TRACKIO_DIR": "home/trackio",
        "HF_HOME": "home/hf",
    }
    # trackio reads its folder when it is imported.
    for module in list(sys.modules):
        if module.partition(".")[0] == "trackio":
            monkeypatch.delitem(sys.modules, module)
    return {name: str(Path(folder).resolve()) for name, folder in folders.items()}


def test_pushed_and_tracked_run_contains_no_secret(unprepared_workspace, server, user_folders):
    trackers = ("wandb", "tensorboard", "trackio")
    installed = [name for name in trackers if importlib.util.find_spec(name)]
    flags = (
        *("--push_to_hub", "true"),
        *("--hub_strategy", "checkpoint"),
        *("--report_to", *(installed or ["none"])),
        *("--data_files", secret_url(server, "a.jsonl")),
        *("--validation_files", secret_url(server, "b.jsonl")),
    )
    with HubServer() as hub:
        environment = hub.environment("") | user_folders | {"WANDB_MODE": "offline"}
        result = run_script("train.py", *TINY_FLAGS, *flags, **environment)
        pushed = hub.files("me/r")
    sent = []
    for request in hub.requests:
        sent.append(f"{request.path} {request.headers}".encode() + request.body)

    redacted_base = server.url.replace("://", "://redacted@")
    redacted_url = f"{redacted_base}/files/a.jsonl?redacted=".encode()
    assert redacted_url in pushed["README.md"]
    assert redacted_url in pushed["recipe.yaml"]
    for name in installed:
        assert list(Path().rglob(f"*{name}*")), name
    assert_no_secrets(result.stdout, result.stderr, *sent)


def test_run_resumes_with_renewed_token(unprepared_workspace, server):
    # Prepared here because a reader that train.py starts needs seconds to start.
    for name in ("a.jsonl", "b.jsonl"):
        run_script("prepare_data.py", *TABLE_FLAGS, "--data_files", secret_url(server, name))
    first = run_script("train.py", *TABLE_FLAGS, "--data_files", secret_url(server, "a.jsonl"))
    recipe = Path("runs/r/recipe.yaml").read_text()
    shutil.rmtree("runs/r/checkpoints/step-00000012")
    server.log.clear()

    renewed_url = secret_url(server, "a.jsonl", token="canaryagain")
    resumed = run_script("train.py", *TABLE_FLAGS, "--data_files", renewed_url)
    evaluated = run_script("train.py", "--recipe", "runs/r/recipe.yaml", "--eval_only")
    requests = list(server.log)
    other_url = secret_url(server, "b.jsonl")
    other = run_script("train.py", *TABLE_FLAGS, "--data_files", other_url, expect=2)

    assert "/redacted@" not in first.stderr
    assert "a.jsonl?redacted=" in recipe
    assert "resumed from runs/r/checkpoints/step-00000009" in resumed.stderr
    assert not requests, "the shards are found by the redacted URL"
    assert "runs/r/checkpoints/step-00000012" in other.stderr
    for result in (first, resumed, evaluated, other):
        assert_no_secrets(result.stdout, result.stderr)


def test_preparation_resumes_with_renewed_token(unprepared_workspace, server):
    flags = (
        *("--recipe", "tiny.yaml"),
        *("--validation_tokens", "300"),
        *("--shard_tokens", "1000"),
        "--data_files",
    )
    urls = [secret_url(server, name) for name in ("a.jsonl", "b.jsonl")]
    renewed_urls = [url.replace("canarytoken", "canaryagain") for url in urls]

    killed = run_script(KILLED_PREPARATION, *flags, *urls, expect=-9, KILL_AT="shard:16")
    manifests = list(Path("data").glob("*/manifest.json"))
    cursor = json.loads(manifests[0].read_text())["cursor"]
    resumed = run_script("prepare_data.py", *flags, *renewed_urls)

    assert len(manifests) == 1
    assert "/files/" in cursor["file"]
    assert not secrets_in(cursor["file"])
    assert resumed.stdout.strip() == str(manifests[0].parent)
    assert json.loads(manifests[0].read_text())["complete"]
    assert_no_secrets(killed.stderr, resumed.stderr)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("a.jsonl", "canarypass@", "canaryquery@", "/files/a.jsonl"),
        ("a.txt", "canarypass@", "canary/canarypass@", "entry 1 is not a valid URL"),
        ("a.txt", "canaryuser:canarypass", "redacted", "/files/a.txt"),
        ("a.txt", ":PORT/", ":1/", "/files/a.txt"),
    ],
    ids=["wrong password", "slash in password", "redacted login", "closed port"],
)
def test_unreadable_url_is_named_without_secrets(
    unprepared_workspace, server, name, old, new, message
):
    old = old.replace("PORT", str(server.server_port))
    url = secret_url(server, name).replace(old, new)

    result = run_script("prepare_data.py", "--recipe", "tiny.yaml", "--data_files", url, expect=2)

    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not secrets_in(result.stderr)


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train.py", ("--recipe", "tiny.yaml")),
        ("export_model.py", ("nowhere", "--out", "out")),
        ("check_setup.py", ()),
    ],
)
def test_value_of_unknown_flag_is_not_printed(workspace, script, flags):
    unknown_flags = (
        "--api_key=canaryuser==canarypass",
        "--zzz=https://canaryuser:canarypass@h/x?token=canarytoken",
    )

    result = run_script(script, *flags, *unknown_flags, expect=2)

    assert "--api_key: " in result.stderr
    assert "--zzz: " in result.stderr
    assert "canary" not in result.stderr


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        (["/opt/bin/accelerate", "launch"], ["accelerate", "launch"]),
        (["bash"], ["python"]),
    ],
    ids=["accelerate", "shell"],
)
def test_command_of_model_card_is_redacted(monkeypatch, launcher, expected):
    url = "http://me:canary@h/a.txt?token=canary"
    words = ["train.py", "--data_files", url, "--seed=http://h/?canary"]
    monkeypatch.setattr(sys, "argv", words)

    command = run_info.command_line([*launcher, *words])

    redacted_url = "http://redacted@h/a.txt?redacted"
    assert command[:-1] == [*expected, "train.py", "--data_files", redacted_url]
    assert command[-1].startswith("--seed=http://h/?redacted=")
    assert "canary" not in str(command)
