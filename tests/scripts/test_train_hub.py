"""train.py and the Hub, end to end: the real client against a server on this machine."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import OVERFITTING_FLAGS, RECORDED_TRAINING, ROOT, run_script, start_script
from fake_hub import HubServer, InjectedError
from push_helpers import staged_names, wait_until
from run_results import final_state, load_weights, read_window_log
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.run import publish

STEPS = ("--eval_steps", "6", "--sample_steps", "0", "--save_steps", "3", "--logging_steps", "1")
PUSHED = ("--recipe", "tiny.yaml", *STEPS, "--push_to_hub", "true")
CANARY = "hf_" + "canary" * 6
NOTICE = 30  # seconds that a cloud gives a spot machine at least


def train(server: HubServer, *flags: str, expect: int = 0, **environment: str) -> str:
    """Run train.py where it knows this Hub; return what it printed."""
    environment |= server.environment(Path("home").resolve()) | {"HF_TOKEN": CANARY}
    done = run_script("train.py", *flags, expect=expect, **environment)
    return done.stdout + done.stderr


def test_a_fresh_machine_goes_on_from_the_hub_to_the_bit(workspace, monkeypatch):
    with HubServer() as server:
        text = ("--data_files", str(workspace / "text.txt"))
        said = train(server, *PUSHED, *text, "--run_name", "p", "--hub_strategy", "all_checkpoints")
        assert "all pushes are in me/p" in said
        steps = ["step-00000003", "step-00000006", "step-00000009", "step-00000012"]
        assert list(server.tags("me/p")) == steps and len(server.titles("me/p")) == 4
        assert server.titles("me/p")[0] == server.tags("me/p")[steps[-1]]
        assert re.fullmatch(
            r"p, step 12: train loss .*, validation loss .*", server.titles("me/p")[0]
        )
        assert server.repositories["me/p"].private
        pushed = server.files("me/p")
        assert "recipe.yaml" in pushed
        assert not [name for name, data in pushed.items() if str(workspace).encode() in data]
        again = Path("elsewhere")
        again.mkdir()
        for name in ("tiny.yaml", "text.txt"):
            (again / name).write_bytes(Path(name).read_bytes())
        monkeypatch.chdir(again)
        source = f"hub://me/p@{steps[1]}"
        said = train(
            server,
            "--recipe",
            "tiny.yaml",
            *STEPS,
            "--run_name",
            "q",
            "--resume_from_checkpoint",
            source,
        )
        assert "resumed from runs/q/checkpoints/step-00000006" in said
        assert not any(CANARY.encode() in request.body for request in server.requests)
        server.requests.clear()
        shutil.rmtree("runs/q/model")
        said = train(
            server,
            "--recipe",
            "tiny.yaml",
            *STEPS,
            "--run_name",
            "q",
            "--resume_from_checkpoint",
            source,
        )
        assert (
            "nothing is left to train" in said and not server.requests
        )  # what was fetched is here
    assert load_weights(Path("../runs/p/model")) == load_weights(Path("runs/q/model"))
    rows = [json.loads(line) for line in Path("runs/q/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 13))
    for path in (
        path
        for folder in (Path("runs"), Path("../runs"))
        for path in folder.rglob("*")
        if path.is_file()
    ):
        assert CANARY.encode() not in path.read_bytes(), path


def test_a_pushed_step_is_a_whole_model_with_its_card_and_nothing_else(workspace, tmp_path):
    (workspace / ".env").write_text("SECRET=1")
    named = ("--hub_model_id", "me/named", "--hub_private_repo", "false")
    with HubServer() as server:
        train(server, *PUSHED, "--save_steps", "6", "--run_name", "p", *named, PICTURES="1")
        tree = server.files("me/named", "step-00000006")
        last = server.files("me/named")
        assert not server.repositories["me/named"].private
        train(server, *PUSHED, "--run_name", "e", "--hub_strategy", "end", "--max_steps", "4")
        assert list(server.tags("me/e")) == ["step-00000004"]
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "README.md",
        "recipe.yaml",
    } <= tree.keys()
    assert {
        "tokenizer.json",
        "tokenizer_config.json",
        "metrics.jsonl",
    } <= tree.keys() and "curves.png" in last
    assert not any("env" in name or "checkpoint" in name for name in tree)
    assert {json.loads(line)["step"] for line in tree["metrics.jsonl"].splitlines()} <= set(
        range(7)
    )
    for name, data in tree.items():
        (tmp_path / "pushed").mkdir(exist_ok=True)
        (tmp_path / "pushed" / name).write_bytes(data)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "pushed", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    saved = load_file(
        checkpoint.list_checkpoints(Path("runs/p/checkpoints"))[-1] / "model.safetensors"
    )
    assert model.config.activation_function == "gelu_new" and len(saved) == len(
        list(model.parameters())
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "pushed")("the cat")["input_ids"]
    assert last["model.safetensors"] == Path("runs/p/model/model.safetensors").read_bytes()
    assert b"validation loss" in last["README.md"] and b"me/named" in last["README.md"]


def test_a_finished_run_is_pushed_by_its_command_and_the_card_names_the_step_of_the_best_weights(
    overfitted_run,
):
    before = load_weights(Path("runs/whole/model"))
    with HubServer() as server:
        train(
            server,
            *OVERFITTING_FLAGS,
            "--run_name",
            "whole",
            "--push_to_hub",
            "true",
            "--license",
            "mit",
            "--language",
            "hi",
        )
        files = server.files("me/whole")
        assert len(server.titles("me/whole")) == 1 and list(server.tags("me/whole")) == [
            "step-00000012"
        ]
    assert files["model.safetensors"] == Path("runs/whole/model/model.safetensors").read_bytes()
    assert load_weights(Path("runs/whole/model")) == before
    card, losses = (
        files["README.md"].decode(),
        [json.loads(line) for line in files["metrics.jsonl"].splitlines()],
    )
    found = {row["step"]: row["eval/loss"] for row in losses if "eval/loss" in row}
    best = min(found, key=found.__getitem__)
    assert 0 < best < 12 and "license: mit" in card and "- hi\n" in card
    assert f"The weights are those of step {best}, which had the lowest validation loss." in card
    assert (
        "| validation loss" in card
        and f"{found[best]:.4f}" in card
        and f"{found[12]:.4f}" not in card
    )


def test_a_hub_that_refuses_ends_no_run_and_what_waits_is_sent_later_once(workspace):
    with HubServer() as server:
        server.problems.append(InjectedError("POST .*/commit/", times=float("inf"), status=403))
        said = train(server, *PUSHED, "--run_name", "p")
        assert said.count("is not on the Hub") == 1 and "--push_pending runs/p" in said
        steps = ["step-00000003", "step-00000012"]  # the last step replaces the others that waited
        assert staged_names(Path("runs/p/hub")) == steps and server.tags("me/p") == {}
        server.problems.clear()
        train(server, "--push_pending", "runs/p")
        assert list(server.tags("me/p")) == steps and len(server.titles("me/p")) == 2
        train(server, "--push_pending", "runs/p")
        assert len(server.titles("me/p")) == 2 and staged_names(Path("runs/p/hub")) == []


def test_a_push_that_cannot_be_made_ends_no_run(workspace, monkeypatch):
    """There is no network in this process, and nothing is laid ready: nothing is waited for."""
    monkeypatch.setattr(publish, "model_card", lambda *_: 1 / 0)
    done = run_script("train.py", *PUSHED, "--run_name", "p", HF_TOKEN="not-a-token")
    assert done.stderr.count("was not pushed") == 4 and "ZeroDivisionError" in done.stderr
    assert Path("runs/p/model/model.safetensors").is_file() and "all pushes" not in done.stderr


@pytest.fixture
def hanging_hub() -> Iterator[HubServer]:
    """A Hub that never answers an upload, until its ``ending`` is set."""
    with HubServer() as server:
        server.problems = [InjectedError("PUT /lfs/", float("inf"), "hang")]
        yield server


@pytest.mark.parametrize(
    ("max_steps", "until", "limit", "status"),
    [
        ("12", "the run waits for at most", "10 minutes (Ctrl-C ends the wait)", 0),
        ("100000", "100/100000", "5 s", 130),
    ],
    ids=["finished", "stopped"],
)
def test_hanging_upload_does_not_keep_the_process(
    hanging_hub, workspace, max_steps, until, limit, status
):
    environment = (
        os.environ | hanging_hub.environment(workspace / "home") | {"ACCELERATE_USE_CPU": "true"}
    )
    flags = (
        *PUSHED,
        "--run_name",
        "p",
        "--max_steps",
        max_steps,
        "--save_steps",
        "50",
        "--logging_steps",
        "100",
    )
    with open("printed", "w") as printed:
        command = [sys.executable, str(ROOT / "train.py"), *flags]
        process = subprocess.Popen(command, env=environment, stdout=printed, stderr=printed)
    try:
        wait_until(lambda: until in Path("printed").read_text(), seconds=300)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == status
    finally:
        process.kill()
    last_lines = Path("runs/p/run.log").read_text().splitlines()[-2:]
    assert f"the run waits for at most {limit}" in last_lines[0]
    assert last_lines[1].endswith("To send: python train.py --push_pending runs/p")

    staged = staged_names(Path("runs/p/hub"))
    hanging_hub.problems.clear()
    hanging_hub.ending.set()
    train(hanging_hub, "--push_pending", "runs/p")
    assert list(hanging_hub.tags("me/p")) == staged


def test_without_a_login_the_run_is_refused_before_anything_is_written(workspace, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    done = run_script("train.py", *PUSHED, "--run_name", "p", expect=2)
    assert "hf auth login" in done.stderr and not Path("runs").exists()


def test_pending_pushes_of_no_run_are_bad_input(workspace):
    assert "text.txt" in run_script("train.py", "--push_pending", "text.txt", expect=2).stderr


# Machines that are taken away.


def script_flags(repo_id: str, recipe: Path) -> list[str]:
    """The flags of train.py that scripts/hf_jobs.sh and skypilot.yaml start a run with, by way of run_gpt2_124m.sh."""
    start = r"exec bash (scripts/run_gpt2_124m\.sh .*? \"hub://\$HUB_MODEL_ID\")"
    (line,) = {
        re.search(start, (ROOT / "scripts" / name).read_text())[1]
        for name in ("hf_jobs.sh", "skypilot.yaml")
    }
    given = {
        "HUB_MODEL_ID": repo_id,
        "RECIPE": str(recipe),
        "DRY_RUN": "1",
        "HOME": os.environ["HOME"],
    }
    given["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    command = ["bash", "-c", f"bash {line}"]
    done = subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, check=True)
    words = shlex.split(done.stdout.splitlines()[-1])
    return words[words.index("train.py") + 1 :]


class Machines:
    """One machine after the other, each with nothing but the recipe, the text and the script's command."""

    def __init__(self, server: HubServer, workplace: Path, monkeypatch):
        self.server, self.workplace, self.monkeypatch, self.count = (
            server,
            workplace,
            monkeypatch,
            0,
        )
        self.flags = script_flags("me/p", workplace / "tiny.yaml")

    def next(self) -> dict[str, str]:
        """Leave the machine for a fresh one; return its environment."""
        self.count += 1
        folder = self.workplace / f"machine{self.count}"
        folder.mkdir()
        (folder / "text.txt").write_bytes((self.workplace / "text.txt").read_bytes())
        self.monkeypatch.chdir(folder)
        ledger = {"LEDGER": str(self.workplace / "p.ledger"), "ACCELERATE_USE_CPU": "true"}
        return self.server.environment(folder / "home") | ledger

    def run(self, expect: int = 0, **how: str) -> str:
        """Run the command on a fresh machine; return what it printed."""
        done = run_script(RECORDED_TRAINING, *self.flags, expect=expect, **self.next(), **how)
        return done.stdout + done.stderr


@pytest.fixture
def fresh_machines(finished_run, monkeypatch):
    """Machines whose run has to end as the one that nothing interrupted."""
    whole = final_state("whole"), read_window_log(Path("whole.ledger"))
    with HubServer() as server:
        yield Machines(server, finished_run, monkeypatch)
    assert (
        final_state("tiny"),
        read_window_log(finished_run / "p.ledger"),
    ) == whole  # of the last machine


def test_one_command_begins_and_goes_on_to_the_bit_on_each_fresh_machine_after_notice(
    fresh_machines,
):
    began = time.monotonic()
    said = fresh_machines.run(expect=143, STOP_AT="4:1", STOP_BY="SIGTERM")
    assert time.monotonic() - began < NOTICE
    assert "hub://me/p contains no checkpoint yet: the run starts at step 0" in said
    said = fresh_machines.run(expect=143, STOP_AT="8:0", STOP_BY="SIGTERM")
    assert "resumed from runs/tiny/checkpoints/step-00000004" in said  # not one step is lost
    assert "resumed from runs/tiny/checkpoints/step-00000008" in fresh_machines.run()
    assert list(fresh_machines.server.tags("me/p")) == [
        f"step-{step:08d}" for step in (3, 4, 6, 8, 9, 12)
    ]


@pytest.mark.parametrize(
    "problem, begins",
    [
        pytest.param(InjectedError("PUT /lfs/", kind="hang"), 4, id="an upload hangs"),
        pytest.param(
            InjectedError("/commit/", kind="lose"),
            6,
            id="a commit's answer is lost",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_machine_that_is_taken_within_a_push_loses_what_had_not_arrived_and_no_more(
    fresh_machines, problem, begins
):
    server = fresh_machines.server
    fresh_machines.run(expect=143, STOP_AT="4:1", STOP_BY="SIGTERM")
    server.problems.append(problem)
    environment = fresh_machines.next() | {"STOP_AT": "8:0", "STOP_BY": "SIGTERM"}
    pid, _, said = start_script(RECORDED_TRAINING, fresh_machines.flags, environment)
    wait_until(
        lambda: problem.times == 0 and "stopped by SIGTERM after step 8" in Path(said).read_text()
    )
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert f"resumed from runs/tiny/checkpoints/step-{begins:08d}" in fresh_machines.run()


def test_a_run_that_is_taken_away_waits_for_the_hub_longer_than_one_that_its_user_ends():
    by_user = [publish.push_seconds(number) for number in (signal.SIGINT, signal.SIGHUP)]
    by_system = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
    assert by_user == [5, 5] and publish.push_seconds(None) == 600
    assert [publish.push_seconds(number) for number in by_system] == [20] * 4


def test_a_run_that_waits_for_a_hub_that_cannot_be_reached_says_so_and_ends_at_once(workspace):
    environment = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(Path("home").resolve()),
    }
    flags = ("--recipe", "tiny.yaml", *STEPS, "--resume_from_checkpoint", "hub://me/p")
    pid, _, said = start_script("train.py", flags, environment)
    wait_until(lambda: "; retrying in 1 s" in Path(said).read_text())
    os.kill(pid, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGINT
    assert "the download is retried for 15 minutes" in Path(said).read_text()


@pytest.mark.parametrize("more", [["--hub_strategy", "every_save"], ["--hub_model_id", "me/other"]])
def test_only_a_run_that_pushes_its_checkpoints_there_begins_where_there_are_none(workspace, more):
    with HubServer() as server:
        asked = (*PUSHED, "--hub_model_id", "me/p", "--hub_strategy", "checkpoint", *more)
        said = train(server, *asked, "--resume_from_checkpoint", "hub://me/p", expect=2)
    assert "resume_from_checkpoint = hub://me/p: HTTP status 404" in said
