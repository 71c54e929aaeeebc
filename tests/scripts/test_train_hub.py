"""End-to-end tests of train.py with the Hub: the real client talks to a server on localhost."""

import json
import os
import re
import runpy
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
from push_helpers import staged_names, step_tag, wait_until
from run_results import final_state, load_weights, losses_by_step, read_window_log
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ursa_minor.base import checkpoint_files
from ursa_minor.run import publish

TINY_FLAGS = (
    *("--recipe", "tiny.yaml"),
    *("--eval_steps", "6"),
    *("--sample_steps", "0"),
    *("--save_steps", "3"),
    *("--logging_steps", "1"),
)
PUSH_FLAGS = (*TINY_FLAGS, "--push_to_hub", "true")
TOKEN = "hf_" + "canary" * 6
NOTICE_SECONDS = 30  # A cloud announces the end of a spot machine at least this early.
MODEL_FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "metrics.jsonl",
    "model.safetensors",
    "recipe.yaml",
    "tokenizer.json",
    "tokenizer_config.json",
}


def main(argv: list[str]) -> None:
    """Run train.py as a program, including the way in which it exits."""
    sys.argv = [str(ROOT / "train.py"), *argv]
    runpy.run_path(sys.argv[0], run_name="__main__")


def train(server: HubServer, *flags: str, expect: int = 0, **environment: str) -> str:
    """Run train.py with this Hub and return what it printed."""
    environment |= server.environment(Path("home").resolve())
    environment["HF_TOKEN"] = TOKEN
    result = run_script("train.py", *flags, expect=expect, **environment)
    return result.stdout + result.stderr


def wait_for_exit(pid: int) -> int:
    """Wait for a process and return its exit status, which is negative for a signal."""
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def files_below(*folders: Path) -> list[Path]:
    """List all files in these folders."""
    paths = []
    for folder in folders:
        paths += [path for path in folder.rglob("*") if path.is_file()]
    return paths


def read_json_lines(data: bytes) -> list[dict]:
    """Parse the rows of a JSON lines file."""
    return [json.loads(line) for line in data.splitlines()]


def pushed_steps(server: HubServer, repo_id: str) -> list[str]:
    """Return the tags of steps in a repository, without those of tokens."""
    return [tag for tag in server.tags(repo_id) if tag.startswith("step-")]


def assert_all_steps_pushed(server: HubServer, repo_id: str, steps: list[str]) -> None:
    """Assert that a private repository has one commit and one tag for each of these steps."""
    titles = server.titles(repo_id)
    tags = server.tags(repo_id)
    assert pushed_steps(server, repo_id) == steps
    assert len(tags) == 2 * len(steps)  # by step and by tokens
    assert len(titles) == len(steps)
    assert titles[0] == tags[steps[-1]]
    assert re.fullmatch(r"p, step 12: train loss .*, validation loss .*", titles[0])
    assert server.repositories[repo_id].private


def copy_inputs(source: Path, target: Path) -> None:
    """Create a folder with the recipe and the text of another one."""
    target.mkdir()
    for name in ("tiny.yaml", "text.txt"):
        shutil.copyfile(source / name, target / name)


def test_run_resumed_from_hub_equals_uninterrupted_run(workspace, monkeypatch):
    steps = [step_tag(step) for step in (3, 6, 9, 12)]
    second_machine = workspace / "second_machine"
    copy_inputs(workspace, second_machine)
    resume = (*TINY_FLAGS, "--run_name", "q", "--resume_from_checkpoint", f"hub://me/p@{steps[1]}")
    with HubServer() as server:
        push_all = ("--run_name", "p", "--hub_strategy", "all_checkpoints")
        text = ("--data_files", str(workspace / "text.txt"))
        first_output = train(server, *PUSH_FLAGS, *text, *push_all)
        pushed = server.files("me/p")

        monkeypatch.chdir(second_machine)
        resumed_output = train(server, *resume)
        requests = list(server.requests)
        server.requests.clear()
        shutil.rmtree("runs/q/model")
        repeated_output = train(server, *resume)
        repeated_requests = list(server.requests)

    assert "all pushes are in me/p" in first_output
    assert_all_steps_pushed(server, "me/p", steps)
    assert "recipe.yaml" in pushed
    for name, data in pushed.items():
        assert str(workspace).encode() not in data, name

    assert f"resumed from runs/q/checkpoints/{steps[1]}" in resumed_output
    assert load_weights(Path("runs/q/model")) == load_weights(workspace / "runs/p/model")
    assert list(losses_by_step("q")) == list(range(1, 13))

    # The checkpoint was downloaded before.
    assert "nothing is left to train" in repeated_output
    assert repeated_requests == []

    for request in requests:
        assert TOKEN.encode() not in request.body, request.path
    for path in files_below(Path("runs"), workspace / "runs"):
        assert TOKEN.encode() not in path.read_bytes(), path


def test_kept_checkpoints_are_pushed_with_all_checkpoints(workspace, monkeypatch):
    second_machine = workspace / "second_machine"
    copy_inputs(workspace, second_machine)
    flags = ("--keep_checkpoints", "log2", "--keep_optimizer", "false", "--run_name", "p")
    push_all = ("--hub_strategy", "all_checkpoints", "--save_steps", "6")
    resume = ("--resume_from_checkpoint", "hub://me/p", "--run_name", "q")
    with HubServer() as server:
        train(server, *PUSH_FLAGS, *push_all, *flags)
        tags = server.tags("me/p")
        pushed = server.files("me/p")
        initial = server.files("me/p", "tokens-0")
        monkeypatch.chdir(second_machine)
        output = train(server, *TINY_FLAGS, *resume)

    steps = (0, 1, 2, 4, 6, 8, 12)
    assert {tag for tag in tags if tag.startswith("step-")} == {step_tag(step) for step in steps}
    by_tokens = {"0": 0, "100": 1, "200": 2, "500": 4, "700": 6, "1K": 8, "1.5K": 12}
    assert {tag for tag in tags if tag.startswith("tokens-")} == {f"tokens-{n}" for n in by_tokens}
    for tokens, step in by_tokens.items():
        assert tags[f"tokens-{tokens}"] == tags[step_tag(step)]
    for step in steps:
        folder = f"checkpoints/{step_tag(step)}"
        assert f"{folder}/model.safetensors" in pushed
        assert (f"{folder}/training/state.json" in pushed) == (step in (6, 12))
    path = workspace / "runs/p/checkpoints" / step_tag(0)
    assert initial["model.safetensors"] == (path / "model.safetensors").read_bytes()
    assert "resumed from runs/q/checkpoints/step-00000012" in output


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint"])
def test_other_strategies_push_no_kept_weights(workspace, strategy):
    flags = ("--keep_checkpoints", "log2", "--keep_optimizer", "false", "--run_name", "p")
    push = ("--hub_strategy", strategy, "--save_steps", "0")

    with HubServer() as server:
        train(server, *PUSH_FLAGS, *push, *flags)
        tags = server.tags("me/p")
        pushed = server.files("me/p")

    assert list(tags) == [step_tag(12), "tokens-1.5K"]
    assert not [name for name in pushed if "checkpoint" in name]


def test_run_killed_before_first_complete_checkpoint_starts_again(workspace, monkeypatch):
    second_machine = workspace / "second_machine"
    copy_inputs(workspace, second_machine)
    flags = ("--keep_checkpoints", "log2", "--keep_optimizer", "false", "--run_name", "p")
    push_all = ("--hub_strategy", "all_checkpoints", "--max_steps", "4", "--save_steps", "0")
    resume = ("--hub_model_id", "me/p", "--resume_from_checkpoint", "hub://me/p")
    command = (*PUSH_FLAGS, *push_all, *flags, *resume)
    with HubServer() as server:
        train(server, *command)
        monkeypatch.chdir(second_machine)
        output = train(server, *command)

    assert "contains no checkpoint yet: the run starts at step 0" in output


def test_pushed_step_is_complete_model_with_card(workspace, tmp_path):
    (workspace / ".env").write_text("SECRET=1")
    flags = ("--hub_model_id", "me/named", "--hub_private_repo", "false", "--save_steps", "6")
    download = tmp_path / "download"
    download.mkdir()

    with HubServer() as server:
        train(server, *PUSH_FLAGS, *flags, "--run_name", "p", PICTURES="1")
        step_files = server.files("me/named", step_tag(6))
        last_files = server.files("me/named")
    for name, data in step_files.items():
        (download / name).write_bytes(data)
    model, report = AutoModelForCausalLM.from_pretrained(download, output_loading_info=True)

    assert not server.repositories["me/named"].private
    assert step_files.keys() >= MODEL_FILES
    for name in step_files:
        assert "env" not in name
        assert "checkpoint" not in name
    assert max(row["step"] for row in read_json_lines(step_files["metrics.jsonl"])) == 6

    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.activation_function == "gelu_new"
    last_checkpoint = checkpoint_files.list_checkpoints(Path("runs/p/checkpoints"))[-1]
    saved_tensors = load_file(last_checkpoint / "model.safetensors")
    assert len(saved_tensors) == len(list(model.parameters()))
    assert AutoTokenizer.from_pretrained(download)("the cat")["input_ids"]

    assert "curves.png" in last_files
    assert last_files["model.safetensors"] == Path("runs/p/model/model.safetensors").read_bytes()
    assert b"validation loss" in last_files["README.md"]
    assert b"me/named" in last_files["README.md"]


def test_end_strategy_pushes_only_last_step(workspace):
    flags = ("--run_name", "e", "--hub_strategy", "end", "--max_steps", "4")

    with HubServer() as server:
        train(server, *PUSH_FLAGS, *flags)

    assert pushed_steps(server, "me/e") == [step_tag(4)]


def test_finished_run_is_pushed_with_best_weights(overfitted_run):
    model_folder = Path("runs/whole/model")
    weights = load_weights(model_folder)
    flags = ("--run_name", "whole", "--push_to_hub", "true", "--license", "mit", "--language", "hi")

    with HubServer() as server:
        train(server, *OVERFITTING_FLAGS, *flags)
        files = server.files("me/whole")

    assert len(server.titles("me/whole")) == 1
    assert pushed_steps(server, "me/whole") == [step_tag(12)]
    assert files["model.safetensors"] == (model_folder / "model.safetensors").read_bytes()
    assert load_weights(model_folder) == weights

    losses = {}
    for row in read_json_lines(files["metrics.jsonl"]):
        if "eval/loss" in row:
            losses[row["step"]] = row["eval/loss"]
    best_step = min(losses, key=losses.__getitem__)
    card = files["README.md"].decode()
    assert 0 < best_step < 12
    assert "license: mit" in card
    assert "- hi\n" in card
    assert f"step {best_step}, which had the lowest validation loss" in card
    assert "| validation loss" in card
    assert f"{losses[best_step]:.4f}" in card
    assert f"{losses[12]:.4f}" not in card


# Pushes that fail.


def test_rejected_pushes_are_sent_later(workspace):
    # The push of the last step replaces those that were waiting behind the first one.
    steps = [step_tag(3), step_tag(12)]
    staged = Path("runs/p/hub")
    with HubServer() as server:
        rejection = InjectedError("POST .*/commit/", times=float("inf"), status=403)
        server.problems.append(rejection)
        output = train(server, *PUSH_FLAGS, "--run_name", "p")
        assert output.count("is not on the Hub") == 1
        assert "--push_pending runs/p" in output
        assert staged_names(staged) == steps
        assert server.tags("me/p") == {}

        server.problems.clear()
        train(server, "--push_pending", "runs/p")
        assert pushed_steps(server, "me/p") == steps
        assert len(server.titles("me/p")) == 2

        train(server, "--push_pending", "runs/p")
        assert len(server.titles("me/p")) == 2
        assert staged_names(staged) == []


def test_run_continues_if_push_cannot_be_staged(workspace, monkeypatch):
    """There is no network here. As nothing is staged, the run does not wait for it."""

    def fail(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(publish, "model_card", fail)

    result = run_script("train.py", *PUSH_FLAGS, "--run_name", "p", HF_TOKEN="not-a-token")

    assert result.stderr.count("was not pushed") == 4
    assert "ZeroDivisionError" in result.stderr
    assert "all pushes" not in result.stderr
    assert Path("runs/p/model/model.safetensors").is_file()


@pytest.fixture
def hanging_hub(monkeypatch) -> Iterator[HubServer]:
    """Start a Hub that does not answer uploads until its ``ending`` is set.

    A run that its user stops waits for one second instead of five.
    """
    seconds = {None: 600, signal.SIGINT: 1}
    monkeypatch.setattr(publish, "push_seconds", seconds.__getitem__)
    with HubServer() as server:
        server.problems = [InjectedError("PUT /lfs/", float("inf"), "hang")]
        yield server


@pytest.mark.parametrize(
    ("max_steps", "limit", "status"),
    [
        pytest.param("12", "10 minutes (Ctrl-C ends the wait)", 0, id="finished"),
        pytest.param("100000", "1 s", 130, id="stopped", marks=pytest.mark.slow),
    ],
)
def test_hanging_upload_does_not_keep_the_process(hanging_hub, workspace, max_steps, limit, status):
    run_log = Path("runs/p/run.log")

    def is_time_to_interrupt() -> bool:
        if status == 0:
            return run_log.is_file() and "the run waits for at most" in run_log.read_text()
        return hanging_hub.count("PUT /lfs/") > 0

    flags = (*PUSH_FLAGS, "--run_name", "p", "--max_steps", max_steps, "--logging_steps", "100")
    environment = hanging_hub.environment(workspace / "home") | {"ACCELERATE_USE_CPU": "true"}
    pid, _, _ = start_script(__file__, flags, environment)
    try:
        wait_until(is_time_to_interrupt, seconds=300)
    finally:
        os.kill(pid, signal.SIGINT)
    assert wait_for_exit(pid) == status
    last_lines = run_log.read_text().splitlines()[-2:]
    assert f"the run waits for at most {limit}" in last_lines[0]
    assert last_lines[1].endswith("python train.py --push_pending runs/p")

    staged = staged_names(Path("runs/p/hub"))
    hanging_hub.problems.clear()
    hanging_hub.ending.set()
    train(hanging_hub, "--push_pending", "runs/p")
    assert staged
    assert pushed_steps(hanging_hub, "me/p") == staged


def test_missing_login_is_rejected_before_run(workspace, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)

    result = run_script("train.py", *PUSH_FLAGS, "--run_name", "p", expect=2)

    assert "hf auth login" in result.stderr
    assert not Path("runs").exists()


def test_push_pending_rejects_file(workspace):
    result = run_script("train.py", "--push_pending", "text.txt", expect=2)

    assert "text.txt" in result.stderr


# Machines that are taken away.


def script_flags(repo_id: str, recipe: Path) -> list[str]:
    """Return the flags of train.py with which the scripts for rented machines start a run.

    scripts/hf_jobs.sh and scripts/skypilot.yaml contain the same call of run_gpt2_124m.sh.
    """
    pattern = r"exec bash (scripts/run_gpt2_124m\.sh .*? \"hub://\$HUB_MODEL_ID\")"
    calls = set()
    for name in ("hf_jobs.sh", "skypilot.yaml"):
        calls.add(re.search(pattern, (ROOT / "scripts" / name).read_text())[1])
    assert len(calls) == 1
    environment = {
        "HUB_MODEL_ID": repo_id,
        "RECIPE": str(recipe),
        "DRY_RUN": "1",
        "HOME": os.environ["HOME"],
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    }
    result = subprocess.run(
        ["bash", "-c", f"bash {calls.pop()}"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    words = shlex.split(result.stdout.splitlines()[-1])
    return words[words.index("train.py") + 1 :]


class FreshMachines:
    """A sequence of machines that have only the recipe, the text and the command of the scripts."""

    def __init__(self, server: HubServer, workspace: Path, monkeypatch: pytest.MonkeyPatch):
        self.server = server
        self.workspace = workspace
        self.monkeypatch = monkeypatch
        self.count = 0
        self.flags = script_flags("me/p", workspace / "tiny.yaml")

    def start_next(self) -> dict[str, str]:
        """Change to the folder of a new machine and return its environment."""
        self.count += 1
        folder = self.workspace / f"machine{self.count}"
        folder.mkdir()
        shutil.copyfile(self.workspace / "text.txt", folder / "text.txt")
        self.monkeypatch.chdir(folder)
        environment = self.server.environment(folder / "home")
        environment["LEDGER"] = str(self.workspace / "p.ledger")
        environment["ACCELERATE_USE_CPU"] = "true"
        return environment

    def train(self, *, stop_at: str = "") -> str:
        """Run the command on a new machine and return what it printed.

        Args:
            stop_at: "STEP:MICRO_STEP" at which the machine sends SIGTERM. By default the run
                finishes.
        """
        environment = self.start_next()
        status = 0
        if stop_at:
            environment |= {"STOP_AT": stop_at, "STOP_BY": "SIGTERM"}
            status = 128 + signal.SIGTERM
        result = run_script(RECORDED_TRAINING, *self.flags, expect=status, **environment)
        return result.stdout + result.stderr


@pytest.fixture
def fresh_machines(finished_run, monkeypatch) -> Iterator[FreshMachines]:
    """Yield machines and check that their last run equals the uninterrupted run."""
    expected_state = final_state("whole")
    expected_windows = read_window_log(Path("whole.ledger"))
    with HubServer() as server:
        yield FreshMachines(server, finished_run, monkeypatch)
    assert final_state("tiny") == expected_state
    assert read_window_log(finished_run / "p.ledger") == expected_windows


@pytest.mark.slow
def test_each_machine_resumes_at_last_step(fresh_machines):
    started = time.monotonic()
    first_output = fresh_machines.train(stop_at="4:1")
    first_seconds = time.monotonic() - started
    second_output = fresh_machines.train(stop_at="8:0")
    last_output = fresh_machines.train()

    assert first_seconds < NOTICE_SECONDS
    assert "hub://me/p contains no checkpoint yet" in first_output
    assert f"resumed from runs/tiny/checkpoints/{step_tag(4)}" in second_output
    assert f"resumed from runs/tiny/checkpoints/{step_tag(8)}" in last_output
    steps = (3, 4, 6, 8, 9, 12)
    assert pushed_steps(fresh_machines.server, "me/p") == [step_tag(step) for step in steps]


@pytest.mark.parametrize(
    ("problem", "resumed_step"),
    [
        pytest.param(InjectedError("PUT /lfs/", kind="hang"), 4, id="upload hangs"),
        pytest.param(
            InjectedError("/commit/", kind="lose"),
            6,
            id="response to commit is lost",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_kill_during_push_loses_only_unsent_steps(fresh_machines, problem, resumed_step):
    fresh_machines.train(stop_at="4:1")
    fresh_machines.server.problems.append(problem)
    environment = fresh_machines.start_next()
    environment |= {"STOP_AT": "8:0", "STOP_BY": "SIGTERM"}
    pid, _, stderr = start_script(RECORDED_TRAINING, fresh_machines.flags, environment)

    def is_stopped_in_push() -> bool:
        is_stopped = "stopped by SIGTERM after step 8" in Path(stderr).read_text()
        return is_stopped and problem.times == 0

    wait_until(is_stopped_in_push)
    os.kill(pid, signal.SIGKILL)
    assert wait_for_exit(pid) == -signal.SIGKILL
    output = fresh_machines.train()

    assert f"resumed from runs/tiny/checkpoints/{step_tag(resumed_step)}" in output


@pytest.mark.parametrize(
    ("stopped_by", "seconds"),
    [
        (None, 600),
        (signal.SIGINT, 5),
        (signal.SIGHUP, 5),
        (signal.SIGTERM, 20),
        (signal.SIGUSR1, 20),
        (signal.SIGUSR2, 20),
        (signal.SIGXCPU, 20),
    ],
)
def test_wait_for_pushes_depends_on_signal(stopped_by, seconds):
    assert publish.push_seconds(stopped_by) == seconds


def test_run_waiting_for_unreachable_hub_can_be_interrupted(workspace):
    environment = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(Path("home").resolve()),
    }
    flags = (*TINY_FLAGS, "--resume_from_checkpoint", "hub://me/p")

    pid, _, stderr = start_script("train.py", flags, environment)
    wait_until(lambda: "; retrying in 1 s" in Path(stderr).read_text())
    os.kill(pid, signal.SIGINT)

    assert wait_for_exit(pid) == -signal.SIGINT
    assert "retried for 15 minutes" in Path(stderr).read_text()


@pytest.mark.parametrize(
    "flags",
    [("--hub_strategy", "every_save"), ("--hub_model_id", "me/other")],
    ids=["no checkpoints are pushed", "another repository"],
)
def test_missing_checkpoint_on_hub_is_rejected(workspace, flags):
    """Only a run that pushes its checkpoints to the same repository may start without them."""
    push = (*PUSH_FLAGS, "--hub_model_id", "me/p", "--hub_strategy", "checkpoint", *flags)

    with HubServer() as server:
        output = train(server, *push, "--resume_from_checkpoint", "hub://me/p", expect=2)

    assert "resume_from_checkpoint = hub://me/p" in output
    assert "404" in output
