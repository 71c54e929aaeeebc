"""train.py and the Hub, end to end: the real client against a server on this machine."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import run
from hub_server import Fault, HubServer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pretrain.hub import model_card
from pretrain.run import checkpoint

STEPS = ("--eval_steps", "6", "--sample_steps", "0", "--save_steps", "3", "--logging_steps", "1")
PUSHED = ("--recipe", "tiny.yaml", *STEPS, "--push_to_hub", "true")
CANARY = "hf_" + "canary" * 6


def train(server: HubServer, *flags: str, expect: int = 0, **environment: str) -> str:
    """Run train.py where it knows this Hub; return what it printed."""
    environment |= server.environment(Path("home").resolve()) | {"HF_TOKEN": CANARY}
    done = run("train.py", *flags, expect=expect, **environment)
    return done.stdout + done.stderr


def weights(run_dir: str) -> dict[str, torch.Tensor]:
    return load_file(Path(run_dir) / "model" / "model.safetensors")


def test_a_fresh_machine_goes_on_from_the_hub_to_the_bit(workplace, monkeypatch):
    with HubServer() as server:
        said = train(server, *PUSHED, "--run_name", "p", "--hub_strategy", "all_checkpoints")
        assert "all pushes are in me/p" in said
        steps = ["step-00000003", "step-00000006", "step-00000009", "step-00000012"]
        assert list(server.tags("me/p")) == steps and len(server.titles("me/p")) == 4
        assert re.fullmatch(r"p, step 3: train loss \d\.\d{4}", server.tags("me/p")[steps[0]])
        assert re.fullmatch(r"p, step 12: train loss .*, validation loss .*", server.titles("me/p")[0])
        assert server.repositories["me/p"].private
        again = Path("elsewhere")
        again.mkdir()
        for name in ("tiny.yaml", "text.txt"):
            (again / name).write_bytes(Path(name).read_bytes())
        monkeypatch.chdir(again)
        source = f"hub://me/p@{steps[1]}"
        said = train(server, "--recipe", "tiny.yaml", *STEPS, "--run_name", "q", "--resume_from_checkpoint", source)
        assert "resumed from runs/q/checkpoints/step-00000006" in said
    mine, theirs = weights("../runs/p"), weights("runs/q")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    rows = [json.loads(line) for line in Path("runs/q/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 13))
    for path in (path for folder in (Path("runs"), Path("../runs")) for path in folder.rglob("*") if path.is_file()):
        assert CANARY.encode() not in path.read_bytes(), path
    assert not any(CANARY.encode() in request.body for request in server.requests)


def test_a_pushed_step_is_a_whole_model_with_its_card_and_nothing_else(workplace, tmp_path):
    (workplace / ".env").write_text("SECRET=1")
    named = ("--hub_model_id", "me/named", "--hub_private_repo", "false")
    with HubServer() as server:
        train(server, *PUSHED, "--run_name", "p", *named, PICTURES="1")
        tree = server.files("me/named", "step-00000006")
        last = server.files("me/named")
        assert not server.repositories["me/named"].private
    assert {"config.json", "generation_config.json", "model.safetensors", "README.md", "recipe.yaml"} <= tree.keys()
    assert {"tokenizer.json", "tokenizer_config.json", "metrics.jsonl"} <= tree.keys() and "curves.png" in last
    assert not any("env" in name or "checkpoint" in name for name in tree)
    assert {json.loads(line)["step"] for line in tree["metrics.jsonl"].splitlines()} <= set(range(7))
    for name, data in tree.items():
        (tmp_path / "pushed").mkdir(exist_ok=True)
        (tmp_path / "pushed" / name).write_bytes(data)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "pushed", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    saved = load_file(checkpoint.list_checkpoints(Path("runs/p/checkpoints"))[-1] / "model.safetensors")
    assert model.config.activation_function == "gelu_new" and len(saved) == len(list(model.parameters()))
    assert AutoTokenizer.from_pretrained(tmp_path / "pushed")("the cat")["input_ids"]
    assert last["model.safetensors"] == Path("runs/p/model/model.safetensors").read_bytes()
    assert b"model-index" in last["README.md"] and b"me/named" in last["README.md"]


def test_a_hub_that_refuses_ends_no_run_and_what_waits_is_sent_later_once(workplace):
    with HubServer() as server:
        server.faults.append(Fault("POST .*/commit/", times=float("inf"), status=403))
        said = train(server, *PUSHED, "--run_name", "p")
        assert said.count("is not on the Hub") == 1 and "--push_pending runs/p" in said
        assert len(list(Path("runs/p/hub").glob("step-*"))) == 4 and server.tags("me/p") == {}
        server.faults.clear()
        train(server, "--push_pending", "runs/p")
        assert len(server.titles("me/p")) == len(server.tags("me/p")) == 4
        train(server, "--push_pending", "runs/p")
        assert len(server.titles("me/p")) == 4 and not list(Path("runs/p/hub").glob("step-*"))


def test_a_push_that_cannot_be_made_ends_no_run(workplace, monkeypatch):
    """There is no network in this process, and nothing is laid ready: nothing is waited for."""
    monkeypatch.setattr(model_card, "model_card", lambda *_: 1 / 0)
    done = run("train.py", *PUSHED, "--run_name", "p", HF_TOKEN="not-a-token")
    assert done.stderr.count("no push of step") == 4 and "ZeroDivisionError" in done.stderr
    assert Path("runs/p/model/model.safetensors").is_file() and "all pushes" not in done.stderr


def test_without_a_login_the_run_is_refused_before_anything_is_written(workplace, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    done = run("train.py", *PUSHED, "--run_name", "p", expect=2)
    assert "hf auth login" in done.stderr and not Path("runs").exists()


@pytest.mark.parametrize("folder", ["nowhere", "text.txt"])
def test_pending_pushes_of_no_run_are_bad_input(workplace, folder):
    done = run("train.py", "--push_pending", folder, expect=2)
    assert folder in done.stderr
