"""check_setup.py as a user calls it, and the Makefile's targets around it. No card is here: cards are pretended."""

import http.server
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, start_script

import check_setup
from benchmarks.runs import once
from ursa_minor.base import gpus
from ursa_minor.base.http import reach
from ursa_minor.data.preparation import measure
from ursa_minor.model.build import build
from ursa_minor.preflight import checks, compatibility, estimate, trials
from ursa_minor.recipe import keys, loading

RECIPE = str(ROOT / "recipes" / "gpt2_124m.yaml")


@pytest.fixture(autouse=True)
def core(monkeypatch):
    """A core encodes 2M tokens a second."""
    monkeypatch.setattr(measure, "text_bytes_per_core", lambda: 9e6)


@pytest.fixture
def asked(monkeypatch):
    """The addresses that were asked for, of a Hub that knows all but what is missing; port 9 is dead."""
    found = []

    def reach(url, seconds):
        found.append(url)
        return "HTTP Error 404: Not Found" if "missing" in url else "refused" if ":9" in url else ""

    monkeypatch.setattr(checks, "reach", reach)
    return found


def recipe(**changes) -> keys.Recipe:
    return keys.replace(loading.load_recipe(Path(RECIPE)), **changes)


def written(path: Path, **changes) -> str:
    """That recipe with changes, as a file."""
    path.write_text(keys.as_yaml(recipe(**changes)))
    return str(path)


def called(capsys, *flags: str, expect: int = 0) -> tuple[str, str]:
    """What main prints on standard output and standard error."""
    capsys.readouterr()
    assert check_setup.main(once(["--recipe", RECIPE, *flags])) == expect
    return capsys.readouterr()


def pretend(folder: Path, monkeypatch, name: str, text: str) -> None:
    """Put a program of this name before all others."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def here(command: list[str], seconds: float) -> dict:
    """Run a trial in this process, where torch is imported already."""
    return {"text": trials.TRIALS[command[-2]](**json.loads(command[-1]))}


def test_a_real_machine_is_described_as_json_without_a_secret(asked, monkeypatch, capsys):
    monkeypatch.setattr(checks, "attempt", here)
    for name, value in {
        "HF_ENDPOINT": "http://hub",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "hf_secret",
    }.items():
        monkeypatch.setenv(name, value)
    status = check_setup.main(["--quick", "--json", "--recipe", RECIPE])
    out, error = capsys.readouterr()
    found = {check["name"]: check for check in json.loads(out)["checks"]}
    levels = {check["level"] for check in found.values()}
    assert levels <= {"ok", "warning", "error"} and status == int(
        "error" in levels
    )  # not what was being tried
    assert {
        "python",
        "packages",
        "torch",
        "launch",
        "fp32",
        "disk",
        "data disk",
        "hub",
    } <= found.keys()
    for name in ("fp32", "hub", "data set HuggingFaceFW/fineweb-edu"):
        assert found[name]["level"] == "ok"
    # The recipe reports to no tracker.
    assert asked == ["http://hub", "http://hub/api/datasets/HuggingFaceFW/fineweb-edu"]
    assert "hf_secret" not in out + error
    assert not {"compile", "all-reduce"} & found.keys()
    assert "...      fp32: is being tried, for at most 120 s\n" in error
    assert (
        f"torch {version('torch')}" in found["packages"]["text"]
        and "up to 4.5 GB" in found["disk"]["text"]
    )


def test_an_address_that_does_not_answer_is_an_error_where_training_needs_it_and_offline_asks_nothing(
    asked, monkeypatch
):
    dead, alone = "http://127.0.0.1:9", {"tokenizer": "bpe", "task_steps": 0}

    def levels(name: str, hub: str = "http://hub", offline: str = "0", **changes) -> dict[str, str]:
        asked.clear()
        monkeypatch.setenv("HF_ENDPOINT", hub)
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        found = checks.examine_network(recipe(dataset_name=name, **changes))
        return {check.name: check.level for check in found if check.level != compatibility.TRYING}

    assert levels("me/there") == {"hub": "ok", "data set me/there": "ok"}
    assert levels("me/missing")["data set me/missing"] == "error"
    assert levels("python_stdlib") == {"hub": "ok"} and asked == ["http://hub"]  # for its tokenizer
    assert levels("python_stdlib", **alone) == {"hub": "ok"} and not asked, "nothing needs the Hub"
    for needed in (
        {"push_to_hub": True},
        {"resume_from_checkpoint": "hub://a/b"},
        {"data_files": ["hf://a/b/c"]},
    ):
        assert levels("python_stdlib", **alone | needed)["hub"] == "ok" and asked == ["http://hub"]
    assert levels("me/there", dead) == {"hub": "error"}, (
        "its shards are not here: training would stop"
    )
    assert levels("python_stdlib", dead)["hub"] == "warning"
    assert levels("me/there", offline="1") == {"hub": "ok"} and not asked
    monkeypatch.setattr(checks.manifests, "is_complete", lambda folder: True)
    assert levels("me/there", dead)["hub"] == "warning"


def test_an_address_answers_refuses_hangs_or_is_not_there(monkeypatch):
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert reach(url, 5) == "" and reach(f"{url}/missing", 5).startswith("HTTP Error 404: ")
        server.shutdown()
    assert reach("http://127.0.0.1:9", 1)
    never = threading.Event()
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: never.wait(30)
    )  # a name server that does not answer
    assert reach("http://a.name", 0.1) == "no answer in 0.1 s"
    never.set()


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a CUDA build")
def test_a_cpu_build_beside_a_card_ends_with_1_and_the_wheel(capsys, tmp_path, monkeypatch):
    pretend(tmp_path, monkeypatch, "nvidia-smi", 'echo "NVIDIA GeForce RTX 4090, 550.54.14"')
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    out, _ = called(capsys, "--quick", expect=1)
    assert "--index-url https://download.pytorch.org/whl/cu126" in out
    assert (
        "ok       gpu: NVIDIA GeForce RTX 4090. GPT-2 124M on one" in out and "rtx4090.yaml" in out
    )
    assert out.splitlines()[-1].startswith("1 error,") and "fp32" not in out
    assert re.search("^error    torch: .* Fix: pip", out, re.MULTILINE)


def test_a_driver_that_fails_is_no_card(monkeypatch, tmp_path):
    pretend(tmp_path, monkeypatch, "nvidia-smi", 'echo "NVIDIA-SMI has failed, 1"; exit 9')
    assert checks.nvidia_smi() == []
    pretend(
        tmp_path,
        monkeypatch,
        "nvidia-smi",
        "printf 'NVIDIA GB10, 580.95\\n\\nfailed, and says why\\n'",
    )
    assert checks.nvidia_smi() == [{"name": "NVIDIA GB10", "driver": "580.95"}]
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
    )
    assert (
        gpus.kernel_driver(version) == "535.183.01" and gpus.kernel_driver(tmp_path / "no") is None
    )


AMPERE, VOLTA = (8, 6), (7, 0)


@pytest.mark.parametrize(
    "mine, preset, failing, said",
    [
        ([AMPERE, AMPERE], "a6000_x2", "", "bf16 ok, compile ok, all-reduce ok"),
        ([VOLTA], "v100", "", "fp16 ok, compile ok, all-reduce ok"),
        ([AMPERE], "a6000", "training_step", "bf16 error"),  # nothing trains
        ([AMPERE, AMPERE], "a6000_x2", "compiled", "bf16 ok, compile error, all-reduce ok"),
        ([AMPERE, AMPERE], "a6000_x2", "nccl", "bf16 ok, compile ok, all-reduce error"),
        ([AMPERE], "a6000", "gloo", "bf16 ok, compile ok, all-reduce warning"),  # not needed
        ([], "cpu", "", "fp32 ok, compile ok, all-reduce ok"),
    ],
)
def test_every_trial_has_its_line_and_one_that_hangs_its_level(
    monkeypatch, mine, preset, failing, said
):
    def attempt(command, seconds):
        if failing and failing in " ".join(command):
            return {"problem": f"no answer in {seconds} s"}
        return {"text": "is fast"}

    monkeypatch.setattr(checks, "attempt", attempt)
    found = [
        check
        for check in checks.examine_trials(mine, preset, False)
        if check.level != compatibility.TRYING
    ]
    assert ", ".join(f"{check.name} {check.level}" for check in found) == said
    fixes = " ".join(check.fix for check in found)
    if failing == "compiled":
        assert "apt install g++ python3-dev" in fixes and "conservative.yaml" in fixes
    if failing == "nccl":
        assert all(
            word in fixes
            for word in ("NCCL_P2P_DISABLE=1", "NCCL_DEBUG=INFO", "GLOO_SOCKET_IFNAME=lo")
        )


def test_flags_that_make_no_sense_end_with_2(capsys, monkeypatch):
    monkeypatch.setattr(checks, "nvidia_smi", list)
    for flags, words in (
        (
            "--estimate --card rtx4090_x2",
            "rtx4090_x2 is not a GPU in our table. Use --card with one of rtx4090, ",
        ),
        ("--estimate --card zzz", "with one of t4, v100"),
        ("--estimte", "--estimte: no such flag; did you mean --estimate?"),
        ("--card t4 --count 0", "--count 0: must be greater than 0"),
        (
            "--card t4 --price_per_card_hour nan",
            "--price_per_card_hour nan: must be greater than 0",
        ),
        ("--all_cards --card t4", "--card and --all_cards exclude each other"),
        ("--card t4 --count 3", "which 3 processes cannot share equally"),
        ("--estimate", "No NVIDIA GPU found. Use --card with one of t4"),
        ("--recipe none.yaml", "none.yaml"),
        ("--size d11", "must be d12, d24"),
        ("--plan --card t4", "--plan needs --hours or --budget"),
        ("--card t4 --hours 1", "--hours and --budget need --plan"),
        ("--plan --card t4 --budget 100", "--budget needs --price_per_card_hour"),
        ("--plan --card t4 --hours inf", "--hours inf: must be greater than 0"),
        ("--plan --card t4 --hours 1 --tokens 1e9", "--plan chooses the size"),
    ):
        out, error = called(capsys, *flags.split(), expect=2)
        assert not out and words in error
    monkeypatch.setattr(checks, "nvidia_smi", lambda: [{"name": "NVIDIA X"}])
    assert "NVIDIA X is not a GPU in our table" in called(capsys, "--estimate", expect=2)[1]


def test_the_table_has_every_card_from_any_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, _ = called(capsys, "--all_cards")
    assert "124,475,904 parameters, 10 B tokens" in out and "cost" not in out
    for card, line in zip(gpus.GPUS, out.splitlines()[3:], strict=False):
        assert line.startswith(f"{card.name} ") and "%" in line
    rows = json.loads(
        called(capsys, "--all_cards", "--json", "--price_per_card_hour", "2", "--count", "4")[0]
    )
    for row, card in zip(rows, gpus.GPUS, strict=True):
        assert (
            row["card"] == card.name
            and row["fits"]
            and row["cost"] == pytest.approx(8 * row["hours"])
        )
        assert row["compiled"] == (card.name != "v100")
        assert row["per_device_train_batch_size"] * 4 * row["gradient_accumulation_steps"] == 512
        assert sum(row["memory_bytes"].values()) < card.memory_gib * 2**30
    assert not list(tmp_path.iterdir())


def test_any_size_is_estimated_on_the_fewest_cards_that_hold_it(capsys):
    gpt3 = ("--size", "gpt3-175b", "--card", "h100")
    row = json.loads(called(capsys, *gpt3, "--json", "--price_per_machine_hour", "3")[0])
    assert row["parameters"] == pytest.approx(175e9, rel=0.01) and row["shared_out"] and row["fits"]
    assert row["count"] * 80 * 2**30 > 16 * row["parameters"] > row["count"] // 2 * 60 * 2**30
    assert (
        row["cost"] == pytest.approx(3 * row["hours"])
        and sum(row["memory_bytes"].values()) < 80 * 2**30
    )
    out = called(capsys, *gpt3)[0]
    assert (
        "gpt3-175b on 64 x h100" in out
        and "zero3_x8.yaml" in out
        and "time to gather" in " ".join(out.split())
    )
    assert "does not fit" in called(capsys, *gpt3, "--count", "8")[0]
    small = json.loads(called(capsys, "--size", "d12", "--card", "h100", "--json")[0])
    assert small["count"] == 1 and not small["shared_out"] and small["parameters"] == 124_475_904


def test_this_machines_cards_are_taken_where_none_is_named(capsys, monkeypatch):
    monkeypatch.setattr(checks, "nvidia_smi", lambda: [{"name": "NVIDIA RTX A6000"}] * 4)
    row = json.loads(called(capsys, "--estimate", "--json")[0])
    alone = json.loads(called(capsys, "--card", "a6000", "--json")[0])
    assert (row["card"], row["count"], alone["count"]) == ("a6000", 4, 1)
    out, _ = called(capsys, "--estimate", "--price_per_machine_hour", "3.2")
    for word in (
        "855 M per token",
        "weights 0.5",
        "% MFU",
        " kWh",
        "at 3.2 per hour",
        "are estimated (accuracy: docs/cards.md",
    ):
        assert word in out
    assert (
        "\naccelerate launch --config_file accelerate_configs/a6000_x4.yaml train.py --recipe"
        in out
    )


def test_an_estimate_says_what_others_and_we_measured_and_what_nobody_did(capsys):
    for card, said in (
        ("rtx5090", "GPT-2 124M   196,551 tokens/s measured on one GPU (plain PyTorch GPT-2"),
        ("rtx5090", "products     236 TFLOP/s in matrix products, measured by others\n"),
        ("a30", "GPT-2 124M   never measured on this GPU\n"),
        ("a30", "products     131 TFLOP/s in matrix products, never measured: 79% of the peak"),
        ("h100", "525,116 tokens/s measured on one GPU\n"),
    ):
        assert said in called(capsys, "--card", card)[0]


def test_checkpointing_is_proposed_where_only_that_fits_and_what_never_fits_is_said(
    capsys, tmp_path
):
    model = {"n_layer": 36, "n_embd": 1280, "n_head": 20, "sequence_length": 8192}
    large = written(tmp_path / "large.yaml", **model, run_name="large")
    rows = json.loads(called(capsys, "--all_cards", "--json", "--recipe", large)[0])
    kinds = {row["card"]: row["fits"] and row["gradient_checkpointing"] for row in rows}
    assert kinds["rtx4060"] is False and kinds["h200"] == "none" and "full" in kinds.values()
    out, _ = called(capsys, "--all_cards", "--recipe", large)
    assert "does not fit" in out and " *  " in out and "* with --gradient_checkpointing full" in out
    card = next(name for name, kind in kinds.items() if kind == "full")
    proposed = called(capsys, "--card", card, "--recipe", large)[0]
    assert ", --gradient_checkpointing full\n" in proposed and proposed.endswith(
        " --gradient_checkpointing full\n"
    )
    assert "does not fit" in called(capsys, "--card", "rtx4060", "--recipe", large)[0]


def test_a_llama_is_estimated_as_one_and_a_model_that_is_gone_on_from_tells_its_size(
    capsys, tmp_path
):
    llama = {
        "architecture": "llama",
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "rope_theta": 1e4,
    }
    sizes = {
        "n_layer": 2,
        "n_head": 8,
        "n_embd": 64,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    } | llama
    asked = tmp_path / "a.yaml"
    row = json.loads(
        called(capsys, "--card", "a6000", "--json", "--recipe", written(asked, **sizes))[0]
    )
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = build(keys.Model(**sizes, sequence_length=1024, **no_dropout, seed=1), eos_token_id=0)
    assert row["parameters"] == model.num_parameters()

    model.save_pretrained(tmp_path / "source")
    values = yaml.safe_load(keys.as_yaml(recipe()))
    for name in keys.MODEL_KEYS:
        values.pop(name, None)
    asked.write_text(
        yaml.safe_dump(values | {"init_from": str(tmp_path / "source"), "tokenizer": "gpt2"})
    )
    assert json.loads(called(capsys, "--card", "a6000", "--json", "--recipe", str(asked))[0]) == row


def test_what_a_run_writes_is_counted():
    checkpoint = 12 * 124_475_904
    assert estimate.written_bytes(recipe(save_total_limit=2)) == (
        3 * checkpoint,
        2 * 19073 * 524288,
    )
    assert estimate.written_bytes(recipe(save_total_limit=0, save_steps=9000))[0] == 3 * checkpoint
    assert estimate.written_bytes(recipe(vocab_size=100_000, limit_tokens=10**6))[1] == 4e6
    assert estimate.written_bytes(recipe(data_dir="shards"))[1] == 0


# ---- the Makefile's targets


def test_make_gpu_status_is_a_table_or_one_line(tmp_path, monkeypatch):
    pretend(tmp_path, monkeypatch, "nvidia-smi", "exit 9")
    command = ["make", "-s", "-C", str(ROOT), "gpu-status"]
    assert subprocess.check_output(command, text=True) == "no NVIDIA driver was found\n"
    row = "0, NVIDIA RTX A6000, 98 %, 40000 MiB, 49140 MiB, 299.10 W, 71"
    pretend(tmp_path, monkeypatch, "nvidia-smi", f'echo "{row}"')
    head, line = subprocess.check_output(command, text=True).splitlines()
    assert (
        head.split()[:3] == ["GPU", "name", "use"]
        and "NVIDIA RTX A6000" in line
        and line.endswith("71")
    )


def test_make_takes_only_the_cards_that_gpus_names(tmp_path, monkeypatch):
    asked = 'echo "NVIDIA RTX A6000"; case "$*" in *--id=1,3*) echo "NVIDIA RTX A6000";; *) exit 3;; esac'
    pretend(tmp_path, monkeypatch, "nvidia-smi", asked)
    command = ["make", "-n", "-C", str(ROOT), "-o", ".venv/.installed", "GPUS=1,3"]
    shown = subprocess.check_output([*command, "ddp-train"], text=True)
    wanted = "accelerate_configs/a6000_x2.yaml train.py --recipe recipes/gpt2_124m_openwebtext.yaml"
    assert wanted in " ".join(shlex.split(shown))
    (tmp_path / "show.mk").write_text(
        "cards:\n\t@echo $$CUDA_DEVICE_ORDER $$CUDA_VISIBLE_DEVICES\n"
    )
    command = [
        "make",
        "-s",
        "-C",
        str(ROOT),
        "-f",
        "Makefile",
        "-f",
        str(tmp_path / "show.mk"),
        "cards",
        "GPUS=1,3",
    ]
    assert subprocess.check_output(command, text=True) == "PCI_BUS_ID 1,3\n"


def test_make_gives_a_value_on_as_one_word_and_flags_as_the_words_of_a_shell(tmp_path, monkeypatch):
    pretend(tmp_path, monkeypatch, "nvidia-smi", "exit 9")
    given = [
        "RECIPE=my recipes/it's $a.yaml",
        "ACCELERATE_CONFIG=a b;c.yaml",
        'FLAGS=--run_name "a b"',
        "NGPUS=3",
    ]
    for target, words in (
        (
            "train",
            ["--config_file", "a b;c.yaml", "train.py", "--recipe", "my recipes/it's $a.yaml"],
        ),
        ("train", ["--run_name", "a b"]),
        ("ddp-train", ["--nproc_per_node", "3", "train.py", "--recipe", "my recipes/it's $a.yaml"]),
    ):
        command = ["make", "-n", "-C", str(ROOT), "-o", ".venv/.installed", target, *given]
        shown = shlex.split(subprocess.check_output(command, text=True))
        assert any(shown[place:][: len(words)] == words for place in range(len(shown))), shown


# ---- scripts/stop.py


def stop(*runs: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "stop.py"), *runs]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def test_stop_ends_a_real_run_after_its_checkpoint_and_leaves_others_alone(workspace):
    assert stop().stdout == "No run of yours is running in runs/ on this machine.\n"
    assert stop("runs/none").returncode == 1
    Path("runs/old").mkdir(parents=True)
    Path("runs/old/.lock").write_text(
        f"{os.getpid()}\n"
    )  # left behind, and its number is another's by now
    flags = "--recipe tiny.yaml --max_steps 1000000 --eval_steps 0 --sample_steps 0 --save_steps 0 --run_name r"
    pid, _, _ = start_script(
        "train.py", tuple(flags.split()), {"ACCELERATE_USE_CPU": "true"}
    )  # which ends within 600 s
    log = Path("runs/r/metrics.jsonl")
    for _ in range(300):
        if log.exists() and log.stat().st_size:
            break
        time.sleep(0.1)
    done = stop()
    assert done.returncode == 0 and "runs/old" not in done.stdout, done.stderr
    assert (
        f"'runs/r': process {pid} was asked to stop" in done.stdout
        and "'runs/r': stopped" in done.stdout
    )
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM
    assert list(Path("runs/r/checkpoints").glob("step-*")) and stop("runs/r").returncode == 0


HOLDER = """
import fcntl, os, signal, sys, time
name, recorded, how = sys.argv[1:]
if "stubborn" in how:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.makedirs(name, exist_ok=True)
file = open(os.path.join(name, ".lock"), "w")
if "open" not in how:
    fcntl.flock(file, fcntl.LOCK_EX)
print(recorded or os.getpid(), file=file, flush=True)
print(flush=True)
time.sleep(60)
"""
ODD_NAMES = ["my runs/a", "it's a\"b", "a$b`id`$(id)", "new\nline", "-x", "größe #*;"]


@pytest.fixture
def hold(tmp_path, monkeypatch):
    """Start a process that holds the lock of a run, as a trainer does; it ends with the test."""
    monkeypatch.chdir(tmp_path)
    started = []

    def start(name: str, recorded: str = "", how: str = "") -> subprocess.Popen:
        command = [sys.executable, "-S", "-E", "-c", HOLDER, name, recorded, how]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        started[-1].stdout.readline()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_stop_ends_the_run_of_that_name_and_no_other(hold):
    for name in ("Makefile", "scripts"):
        Path(name).symlink_to(ROOT / name)
    runs = {name: hold(name) for name in ["runs/a", "a", "my", "x", *ODD_NAMES]}
    before = sorted(os.listdir())
    for name in ODD_NAMES:
        command = ["make", "-s", "stop", f"PYTHON={sys.executable}", f"RUN={name}"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and "stopped" in done.stdout, done.stderr
        assert runs.pop(name).wait(20) == -signal.SIGTERM
        assert [other for other, process in runs.items() if process.poll() is not None] == []
    assert sorted(os.listdir()) == before


def test_stop_touches_no_process_that_does_not_hold_the_lock_and_does_not_wait_for_ever(hold):
    other, reader = hold("another/program"), hold("runs/read", how="open")
    for recorded, words in ((str(other.pid), f"names '{other.pid}'"), ("", "after 1 s")):
        holder = hold("runs/r", recorded, "stubborn")
        done = stop(LIMIT="1")
        holder.kill()
        holder.wait()
        assert done.returncode == 1 and words in done.stderr
    Path("runs/linked").mkdir()
    Path("runs/linked/.lock").symlink_to(Path("another/program/.lock").resolve())
    done = stop("runs/linked", "runs/read")
    assert (
        done.returncode == 1
        and "is a link" in done.stderr
        and other.poll() is reader.poll() is None
    )
    assert stop(LIMIT="ever").returncode == 2
    assert (
        "flock" not in (ROOT / "scripts" / "stop.py").read_text()
    )  # a trainer that starts meanwhile would be refused


@pytest.mark.skipif(not shutil.which("lsof"), reason="lsof is not installed; macOS has it")
def test_stop_finds_a_run_where_the_system_does_not_list_locks(hold, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("stop", ROOT / "scripts" / "stop.py")
    spec.loader.exec_module(stop := importlib.util.module_from_spec(spec))
    monkeypatch.setattr(stop, "LOCKS", Path("none"))
    other, run = hold("runs/a"), hold("my runs/a")
    assert (
        stop.main(["my runs/a"]) == 0 and run.wait(20) == -signal.SIGTERM and other.poll() is None
    )
    assert "'my runs/a': stopped" in capsys.readouterr().out
    assert stop.main(["my runs/a"]) == 0 and "No run of yours is running" in capsys.readouterr().out
