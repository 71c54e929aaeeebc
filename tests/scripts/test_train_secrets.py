"""The user, password and query of a data file's URL are used, and stand in nothing that a run leaves, sends or prints."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TEXT, run_script
from fake_hub import HubServer
from http_server import DataServer

from ursa_minor.machine import run_info

SECRETS = ("canaryuser", "canarypass", "canarytoken", "canaryquery", "canaryagain")
TINY = (
    "--recipe",
    "tiny.yaml",
    "--run_name",
    "r",
    "--sample_steps",
    "0",
    "--eval_steps",
    "0",
    "--save_steps",
    "3",
)
TINY += ("--shard_tokens", "3000")
ROWS = (*TINY, "--validation_tokens", "300")  # of tables without validation files


@pytest.fixture
def server(tmp_path):
    """Serves files to who knows the password and a token."""
    folder = tmp_path / "served"
    (folder / "files").mkdir(parents=True)
    for name, text in {"a": TEXT, "b": TEXT[::-1]}.items():
        (folder / "files" / f"{name}.txt").write_text(text)
        rows = [text[i : i + 100] for i in range(0, len(text), 100)]
        (folder / "files" / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": row}) + "\n" for row in rows)
        )
    with DataServer(folder) as running:
        login = "Basic Y2FuYXJ5dXNlcjpjYW5hcnlwYXNz"  # canaryuser:canarypass
        running.allowed = lambda path, headers: (
            "token=canary" in path and headers.get("Authorization") == login
        )
        yield running


def url(
    server: DataServer, name: str, token: str = "canarytoken", login: str = "canaryuser:canarypass@"
) -> str:
    return f"{server.url.replace('://', f'://{login}')}/files/{name}?v=canaryquery&token={token}"


@pytest.fixture
def own(workspace):
    """A folder of one's own without shards."""
    shutil.rmtree("data")
    return workspace


def check_no_secrets(*said: str | bytes) -> None:
    """Assert that no secret stands in a file below this folder, or in what was printed or sent."""
    seen = {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    seen |= {
        f"said {i}": words.encode() if isinstance(words, str) else words
        for i, words in enumerate(said)
    }
    assert len(seen) > 10
    assert not [
        (where, secret)
        for where, found in seen.items()
        for secret in SECRETS
        if secret.encode() in found
    ]


def test_a_run_that_is_pushed_and_tracked_leaves_sends_and_prints_no_secret(
    own, server, monkeypatch
):
    names = [name for name in ("wandb", "tensorboard", "trackio") if importlib.util.find_spec(name)]
    flags = (
        "--push_to_hub",
        "true",
        "--hub_strategy",
        "checkpoint",
        "--report_to",
        *(names or ["none"]),
    )
    given = ("--data_files", url(server, "a.jsonl"), "--validation_files", url(server, "b.jsonl"))
    with HubServer() as hub:
        homes = {
            "HOME": "home",
            "XDG_CACHE_HOME": "home/cache",
            "TRACKIO_DIR": "home/trackio",
            "HF_HOME": "home/hf",
        }
        home = {name: str(Path(folder).resolve()) for name, folder in homes.items()}
        for module in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
            monkeypatch.delitem(sys.modules, module)  # it notes its folder at its import
        done = run_script(
            "train.py", *TINY, *flags, *given, **hub.environment("") | home, WANDB_MODE="offline"
        )
        shown = f"{server.url.replace('://', '://redacted@')}/files/a.jsonl?redacted=".encode()
        pushed = hub.files("me/r")
        assert shown in pushed["README.md"] and shown in pushed["recipe.yaml"]
        sent = [
            f"{request.path} {request.headers}".encode() + request.body for request in hub.requests
        ]
    assert names == [name for name in names if list(Path().rglob(f"*{name}*"))]
    check_no_secrets(done.stdout, done.stderr, *sent)


def test_the_same_command_goes_on_with_a_renewed_token_and_refuses_another_file(own, server):
    for name in "ab":  # here, for the reader that the trainer would start takes seconds to begin
        run_script("prepare_data.py", *ROWS, "--data_files", url(server, f"{name}.jsonl"))
    first = run_script("train.py", *ROWS, "--data_files", url(server, "a.jsonl"))
    assert (
        "/redacted@" not in first.stderr
        and "a.jsonl?redacted=" in Path("runs/r/recipe.yaml").read_text()
    )
    shutil.rmtree("runs/r/checkpoints/step-00000012")
    server.log.clear()
    again = run_script("train.py", *ROWS, "--data_files", url(server, "a.jsonl", "canaryagain"))
    assert "resumed from runs/r/checkpoints/step-00000009" in again.stderr
    # The run folder's own recipe finds the shards too.
    by_recipe = run_script("train.py", "--recipe", "runs/r/recipe.yaml", "--eval_only")
    assert not server.log, "the file is known by its redacted URL"
    other = run_script("train.py", *ROWS, "--data_files", url(server, "b.jsonl"), expect=2)
    assert "runs/r/checkpoints/step-00000012" in other.stderr
    check_no_secrets(
        *(
            words
            for done in (first, again, by_recipe, other)
            for words in (done.stdout, done.stderr)
        )
    )


def test_a_preparation_goes_on_with_a_renewed_token_where_it_was(own, server):
    flags = (
        "--validation_tokens",
        "300",
        "--shard_tokens",
        "1000",
        "--recipe",
        "tiny.yaml",
        "--data_files",
    )
    urls = [url(server, "a.jsonl"), url(server, "b.jsonl")]
    killed = run_script(
        str(ROOT / "tests" / "scripts" / "test_prepare_data.py"),
        *flags,
        *urls,
        expect=-9,
        KILL_AT="shard:16",
    )
    (path,) = Path("data").glob("*/manifest.json")
    cursor = json.loads(path.read_text())["cursor"]
    assert "/files/" in cursor["file"] and not [
        secret for secret in SECRETS if secret in cursor["file"]
    ]
    done = run_script(
        "prepare_data.py", *flags, *(one.replace("canarytoken", "canaryagain") for one in urls)
    )
    assert done.stdout.strip() == str(path.parent) and json.loads(path.read_text())["complete"]
    check_no_secrets(killed.stderr, done.stderr)


NO_URL = "data_files: entry 1 is not a valid URL"


@pytest.mark.parametrize(
    "file, change, named",
    [
        ("a.jsonl", ("canarypass@", "canaryquery@"), "/files/a.jsonl"),
        ("a.txt", ("canarypass@", "canary/canarypass@"), NO_URL),
        ("a.txt", ("canaryuser:canarypass", "redacted"), "/files/a.txt"),
        ("a.txt", (":PORT/", ":1/"), "/files/a.txt"),  # nothing listens there
    ],
)
def test_a_url_that_cannot_be_read_is_named_without_its_secrets(own, server, file, change, named):
    given = url(server, file).replace(change[0].replace("PORT", str(server.server_port)), change[1])
    done = run_script("prepare_data.py", "--recipe", "tiny.yaml", "--data_files", given, expect=2)
    assert named in done.stderr and "Traceback" not in done.stderr
    assert not [secret for secret in SECRETS if secret in done.stderr]


@pytest.mark.parametrize(
    "script, flags",
    [
        ("train.py", ("--recipe", "tiny.yaml")),
        ("export_model.py", ("nowhere", "--out", "out")),
        ("check_setup.py", ()),
    ],
)
def test_a_secret_in_a_flag_that_is_none_is_not_shown(workspace, script, flags):
    secret = (
        f"--api_key={SECRETS[0]}=={SECRETS[1]}",
        f"--zzz=https://canaryuser:canarypass@h/x?token={SECRETS[2]}",
    )
    said = run_script(script, *flags, *secret, expect=2).stderr
    assert "--api_key: " in said and "--zzz: " in said and "canary" not in said


def test_the_command_that_a_card_shows_has_no_secret(monkeypatch):
    words = [
        "train.py",
        "--data_files",
        "http://me:canary@h/a.txt?token=canary",
        "--seed=http://h/?canary",
    ]
    monkeypatch.setattr(sys, "argv", words)
    for launcher, begin in (
        (["/opt/bin/accelerate", "launch"], ["accelerate", "launch"]),
        (["bash"], ["python"]),
    ):
        shown = [
            *begin,
            "train.py",
            "--data_files",
            "http://redacted@h/a.txt?redacted",
            "--seed=http://h/?redacted=",
        ]
        found = run_info.command_line([*launcher, *words])
        assert (
            found[:-1] == shown[:-1]
            and found[-1].startswith(shown[-1])
            and "canary" not in str(found)
        )
