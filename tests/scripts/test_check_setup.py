"""Command line of check_setup.py, the GPU targets of the Makefile, and scripts/stop.py.

This machine has no GPU, so nvidia-smi is replaced.
"""

import contextlib
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
from _pytest.capture import CaptureResult
from conftest import ROOT, start_script

import check_setup
import prepare_data
from benchmarks.runs import once
from ursa_minor.base import gpus
from ursa_minor.base.http import reach
from ursa_minor.data.preparation import measure
from ursa_minor.model.build import build
from ursa_minor.preflight import checks, compatibility, data_check, estimate, trials
from ursa_minor.recipe import keys, loading

RECIPE = str(ROOT / "recipes" / "gpt2_124m.yaml")
DEAD_HUB = "http://127.0.0.1:9"
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.fixture
def requested_urls(monkeypatch) -> list[str]:
    """Replace the network. Port 9 refuses connections, and a URL with "missing" is not found."""
    urls = []

    def fake_reach(url, seconds):
        urls.append(url)
        if "missing" in url:
            return "HTTP Error 404: Not Found"
        if ":9" in url:
            return "refused"
        return ""

    monkeypatch.setattr(checks, "reach", fake_reach)
    return urls


def load_recipe(**changes) -> keys.Recipe:
    """Return the recipe of GPT-2 124M with these changes."""
    return keys.replace(loading.load_recipe(Path(RECIPE)), **changes)


def write_recipe(path: Path, **changes) -> str:
    """Write the recipe of GPT-2 124M with these changes, and return the path of the file."""
    path.write_text(keys.as_yaml(load_recipe(**changes)))
    return str(path)


def run_check_setup(capsys, *flags: str, expect: int = 0) -> CaptureResult:
    """Run check_setup.py in this process and return its output."""
    capsys.readouterr()
    assert check_setup.main(once(["--recipe", RECIPE, *flags])) == expect
    return capsys.readouterr()


def print_estimate(capsys, *flags: str) -> str:
    """Return the text of an estimate."""
    return run_check_setup(capsys, *flags).out


def read_estimate(capsys, *flags: str):
    """Return the estimate that --json prints: a row, or with --all_cards a list of rows."""
    return json.loads(print_estimate(capsys, *flags, "--json"))


def install_program(folder: Path, monkeypatch, name: str, text: str) -> None:
    """Write a shell program and put it before all others on PATH."""
    program = folder / name
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def run_trial_in_process(command: list[str], seconds: float) -> dict:
    """Run a trial in this process, which has already imported torch."""
    name, arguments = command[-2:]
    return {"text": trials.TRIALS[name](**json.loads(arguments))}


# ---- checks of this machine


def test_machine_is_described_as_json(requested_urls, monkeypatch, capsys):
    monkeypatch.setattr(checks, "attempt", run_trial_in_process)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(data_check, "look_in_child", lambda config: "no result")

    status = check_setup.main(["--quick", "--json", "--recipe", RECIPE])

    printed = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(printed.out)["checks"]}
    levels = {row["level"] for row in rows.values()}
    assert levels <= {"ok", "warning", "error"}  # no check that is still in progress
    assert status == int("error" in levels)
    expected = {"python", "packages", "torch", "launch", "fp32", "disk", "data disk", "hub"}
    assert expected <= rows.keys()
    for name in ("fp32", "hub", "data set HuggingFaceFW/fineweb-edu"):
        assert rows[name]["level"] == "ok"
    assert "compile" not in rows
    assert "all-reduce" not in rows
    assert f"torch {version('torch')}" in rows["packages"]["text"]
    assert "up to 4.5 GB" in rows["disk"]["text"]
    # The recipe uses no tracker, so only these are requested.
    assert requested_urls == ["http://hub", "http://hub/api/datasets/HuggingFaceFW/fineweb-edu"]
    assert "hf_secret" not in printed.out + printed.err
    assert "fp32: is being tried, for at most 120 s" in printed.err


class TestNetworkChecks:
    """Which URLs checks.examine_network requests, and how serious a failure is."""

    @pytest.fixture
    def network_levels(self, requested_urls, monkeypatch):
        """Return a function that examines the network for a data set: levels by check name."""

        def examine(dataset: str, hub: str = "http://hub", offline: str = "0", **changes) -> dict:
            requested_urls.clear()
            monkeypatch.setenv("HF_ENDPOINT", hub)
            monkeypatch.setenv("HF_HUB_OFFLINE", offline)
            results = checks.examine_network(load_recipe(dataset_name=dataset, **changes))
            finished = [check for check in results if check.level != compatibility.TRYING]
            return {check.name: check.level for check in finished}

        return examine

    def test_missing_data_set_is_an_error(self, network_levels):
        assert network_levels("me/there") == {"hub": "ok", "data set me/there": "ok"}
        assert network_levels("me/missing")["data set me/missing"] == "error"

    def test_hub_is_requested_for_its_tokenizer(self, network_levels, requested_urls):
        assert network_levels("python_stdlib") == {"hub": "ok"}
        assert requested_urls == ["http://hub"]

    def test_local_recipe_requests_no_url(self, network_levels, requested_urls):
        assert network_levels("python_stdlib", tokenizer="bpe", task_steps=0) == {"hub": "ok"}
        assert not requested_urls

    @pytest.mark.parametrize(
        "key",
        [
            {"push_to_hub": True},
            {"resume_from_checkpoint": "hub://a/b"},
            {"data_files": ["hf://a/b/c"]},
        ],
        ids=lambda key: next(iter(key)),
    )
    def test_key_that_needs_hub_requests_it(self, network_levels, requested_urls, key):
        levels = network_levels("python_stdlib", tokenizer="bpe", task_steps=0, **key)

        assert levels["hub"] == "ok"
        assert requested_urls == ["http://hub"]

    def test_unreachable_hub_is_an_error_without_local_shards(self, network_levels, monkeypatch):
        assert network_levels("me/there", DEAD_HUB) == {"hub": "error"}
        assert network_levels("python_stdlib", DEAD_HUB)["hub"] == "warning"

        monkeypatch.setattr(checks.manifests, "is_complete", lambda folder: True)
        assert network_levels("me/there", DEAD_HUB)["hub"] == "warning"

    def test_offline_mode_requests_no_url(self, network_levels, requested_urls):
        assert network_levels("me/there", offline="1") == {"hub": "ok"}
        assert not requested_urls


def test_reach_returns_error_of_server():
    handler = http.server.SimpleHTTPRequestHandler
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        root_problem = reach(url, 5)
        missing_problem = reach(f"{url}/missing", 5)
        server.shutdown()

    assert root_problem == ""
    assert missing_problem.startswith("HTTP Error 404: ")
    assert reach(DEAD_HUB, 1)


def test_reach_stops_waiting_for_name_server(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(30))

    problem = reach("http://a.name", 0.1)

    assert problem == "no answer in 0.1 s"
    released.set()


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a CUDA build")
def test_cpu_build_on_gpu_machine_is_an_error(capsys, tmp_path, monkeypatch):
    gpu = "NVIDIA GeForce RTX 4090"
    install_program(tmp_path, monkeypatch, "nvidia-smi", f'echo "{gpu}, 550.54.14"')
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    output = run_check_setup(capsys, "--quick", expect=1).out

    assert re.search("^error    torch: .* Fix: pip", output, re.MULTILINE)
    assert "--index-url https://download.pytorch.org/whl/cu126" in output
    assert f"ok       gpu: {gpu}. GPT-2 124M on one" in output
    assert "rtx4090.yaml" in output
    assert "fp32" not in output
    assert output.splitlines()[-1].startswith("1 error,")


def test_failing_nvidia_smi_lists_no_gpu(monkeypatch, tmp_path):
    text = 'echo "NVIDIA-SMI has failed, 1"; exit 9'
    install_program(tmp_path, monkeypatch, "nvidia-smi", text)

    assert checks.nvidia_smi() == []


def test_unreadable_line_of_nvidia_smi_is_skipped(monkeypatch, tmp_path):
    text = "printf 'NVIDIA GB10, 580.95\\n\\nfailed, and says why\\n'"
    install_program(tmp_path, monkeypatch, "nvidia-smi", text)

    assert checks.nvidia_smi() == [{"name": "NVIDIA GB10", "driver": "580.95"}]


def test_kernel_driver_is_read_from_version_file(tmp_path):
    version_file = tmp_path / "version"
    module = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01"
    version_file.write_text(f"{module}  Sun May 12 19:39:15 UTC 2024\n")

    assert gpus.kernel_driver(version_file) == "535.183.01"
    assert gpus.kernel_driver(tmp_path / "missing") is None


AMPERE = (8, 6)
VOLTA = (7, 0)


@pytest.mark.parametrize(
    ("capabilities", "preset", "failing_trial", "expected"),
    [
        ([AMPERE, AMPERE], "a6000_x2", "none", "bf16 ok, compile ok, all-reduce ok"),
        ([VOLTA], "v100", "none", "fp16 ok, compile ok, all-reduce ok"),
        ([AMPERE], "a6000", "training_step", "bf16 error"),  # so the other trials are not run
        ([AMPERE, AMPERE], "a6000_x2", "compiled", "bf16 ok, compile error, all-reduce ok"),
        ([AMPERE, AMPERE], "a6000_x2", "nccl", "bf16 ok, compile ok, all-reduce error"),
        ([AMPERE], "a6000", "gloo", "bf16 ok, compile ok, all-reduce warning"),  # not needed
        ([], "cpu", "none", "fp32 ok, compile ok, all-reduce ok"),
    ],
)
def test_each_trial_has_a_level(monkeypatch, capabilities, preset, failing_trial, expected):
    def fake_attempt(command, seconds):
        if failing_trial in " ".join(command):
            return {"problem": f"no answer in {seconds} s"}
        return {"text": "is fast"}

    monkeypatch.setattr(checks, "attempt", fake_attempt)

    results = list(checks.examine_trials(capabilities, preset, False))

    finished = [check for check in results if check.level != compatibility.TRYING]
    assert ", ".join(f"{check.name} {check.level}" for check in finished) == expected
    fixes = " ".join(check.fix for check in finished)
    if failing_trial == "compiled":
        assert "apt install g++ python3-dev" in fixes
        assert "conservative.yaml" in fixes
    if failing_trial == "nccl":
        assert "NCCL_P2P_DISABLE=1" in fixes
        assert "NCCL_DEBUG=INFO" in fixes
        assert "GLOO_SOCKET_IFNAME=lo" in fixes


# ---- data


STORY = "The cat sat on the mat, and the dog ran far away over the green hills. " * 3
DATA_FILES = {
    "a b.txt": "\n<|endoftext|>\n".join([STORY] * 20),
    "prose.txt": f"{STORY} The token <|endoftext|> ends a document. {STORY}\n" * 20,
    "rows.jsonl": '{"id": 1, "content": ""}\n' + f'{{"id": 2, "content": "{STORY}"}}\n' * 19,
    "two_texts.jsonl": f'{{"title": "{STORY}", "content": "{STORY}"}}\n' * 20,
    "latin.txt": "Übergröße für schöne Bäume. " * 20,
}


@pytest.fixture
def data_files(tmp_path, monkeypatch, requested_urls):
    """Write the data files into the current folder, and replace the trials of the machine.

    Returns:
        The URLs that are requested.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "DRY_RUN_SECONDS", 0.05)
    monkeypatch.setattr(checks, "attempt", lambda command, seconds: {"text": "is fast"})
    for name, text in DATA_FILES.items():
        encoding = "latin1" if name == "latin.txt" else "utf-8"
        Path(name).write_text(text, encoding=encoding)
    return requested_urls


def run_data_check(capsys, *flags: str, expect: int = 0) -> CaptureResult:
    """Run check_setup.py with these flags only, and return its output."""
    capsys.readouterr()
    assert check_setup.main(["--quick", *flags]) == expect
    return capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "documents", "num_separators", "following_flags"),
    [
        ("a b.txt", 1, 19, ["--document_separator", "<|endoftext|>"]),
        ("prose.txt", 1, 20, []),
        ("rows.jsonl", 19, None, ["--validation_tokens", "--text_column", "content"]),
    ],
)
def test_data_check_shows_dry_run_and_command(
    data_files, capsys, name, documents, num_separators, following_flags
):
    output = run_data_check(capsys, "--data_files", name).out
    rows = json.loads(run_data_check(capsys, "--data_files", name, "--json").out)

    (report,) = rows["data"]
    assert report["documents"] == documents
    assert report["special_tokens"].get("<|endoftext|>") == num_separators
    assert report["encoding"] == "UTF-8"
    assert report["counts"]["without_text"] == int(name == "rows.jsonl")
    assert report["bytes_per_token"] > 3
    (launch,) = [row["text"] for row in rows["checks"] if row["name"] == "launch"]
    words = shlex.split(launch)
    first = words.index("train.py")
    recipe = ["--recipe", "recipes/own_text.yaml"]
    assert words[first + 1 : first + 5] == [*recipe, "--data_files", name]
    assert [word for word in words[first + 5 :] if not word.isdigit()] == following_flags
    assert not data_files

    # The command is valid, and a dry run of the same data shows the same lines.
    capsys.readouterr()
    assert prepare_data.main([*words[first + 1 :], "--dry_run"]) == 0
    first_line, *_ = capsys.readouterr().out.splitlines()
    assert f"data: {first_line}\n" in output


@pytest.mark.parametrize(
    ("name", "word"), [("latin.txt", "iconv"), ("two_texts.jsonl", "--text_column")]
)
def test_unusable_data_exits_as_the_preparation(data_files, capsys, name, word):
    flags = ["--recipe", str(ROOT / "recipes/own_text.yaml"), "--data_files", name]

    printed = run_data_check(capsys, *flags, "--json", expect=2)
    assert prepare_data.main(flags) == 2
    message = capsys.readouterr().err

    assert not printed.out
    assert name in printed.err
    assert word in printed.err
    assert message.splitlines()[-1] in printed.err


def test_command_of_own_text_names_data(data_files, capsys):
    flags = ("--recipe", "recipes/own_text.yaml")

    output = run_data_check(capsys, *flags).out
    message = run_data_check(capsys, *flags, "--card", "a6000", expect=2).err

    assert "warning  data: the recipe names no data" in output
    assert "train.py --recipe recipes/own_text.yaml --data_files FILE\n" in output
    # The length of the run depends on the size of the data.
    assert "--data_files FILE" in message


def test_command_of_hub_data_states_steps(capsys, monkeypatch, requested_urls):
    monkeypatch.setattr(checks, "attempt", lambda command, seconds: {"text": "is fast"})
    monkeypatch.setattr(data_check, "look_in_child", lambda config: "no result")
    flags = ("--recipe", "recipes/own_text.yaml", "--dataset_name", "foo/bar")

    output = run_data_check(capsys, *flags).out

    assert (
        "warning  length: num_train_epochs = 10: the length of the Hub data set foo/bar" in output
    )
    assert "--dataset_name foo/bar --max_steps N\n" in output


def test_look_at_remote_data_is_bounded(monkeypatch):
    monkeypatch.setattr(data_check, "REMOTE_SECONDS", 0)
    config = load_recipe(dataset_name="me/there").data.resolved_sources[0]

    assert data_check.look_in_child(config) == "no result after 0 s"


# ---- bad flags


@pytest.mark.parametrize(
    ("flags", "phrase"),
    [
        ("--estimate --card rtx4099", "rtx4099 is not a GPU in our table"),
        ("--estimate --card rtx4099", "with one of rtx4090, "),
        ("--estimate --card rtx4090_x8", "Use --card rtx4090 --count 8"),
        ("--card rtx4090_x8", "rtx4090.yaml --multi_gpu --num_processes 8 train.py"),
        ("--card rtx4090_x2", "accelerate_configs/rtx4090_x2.yaml train.py"),
        ("--plan --hours 9 --card 8xh100", "Use --card h100 --count 8"),
        ("--estimate --card zzz", "with one of t4, v100"),
        ("--estimte", "did you mean --estimate?"),
        ("--card t4 --count 0", "--count 0: must be greater than 0"),
        ("--card t4 --price_per_card_hour nan", "--price_per_card_hour nan: must be greater"),
        ("--all_cards --card t4", "--card and --all_cards exclude each other"),
        ("--card t4 --count 3", "3 processes cannot share equally"),
        ("--estimate", "No NVIDIA GPU found. Use --card"),
        ("--recipe none.yaml", "none.yaml"),
        ("--size d11", "must be d12, d24"),
        ("--plan --card t4", "--plan needs --hours or --budget"),
        ("--card t4 --hours 1", "--hours and --budget need --plan"),
        ("--plan --card t4 --budget 100", "--budget needs --price_per_card_hour"),
        ("--plan --card t4 --hours inf", "--hours inf: must be greater than 0"),
        ("--plan --card t4 --hours 1 --tokens 1e9", "--plan chooses the size"),
        ("--plan --card t4 --hours 1 --num_train_epochs 2", "Leave out --num_train_epochs"),
        ("--max_steps 9 --num_train_epochs 2", "--max_steps and --num_train_epochs exclude"),
        ("--tokens 9 --num_train_epochs 2", "--tokens and --num_train_epochs exclude"),
        ("--card t4 --num_train_epochs 0", "--num_train_epochs 0.0: must be greater than 0"),
        ("--card t4 --num_train_epochs 2", "HuggingFaceFW/fineweb-edu is not known"),
    ],
)
def test_bad_flags_are_rejected(capsys, monkeypatch, flags, phrase):
    monkeypatch.setattr(checks, "nvidia_smi", list)

    printed = run_check_setup(capsys, *flags.split(), expect=2)

    assert not printed.out
    assert phrase in printed.err


def test_estimate_for_unknown_gpu_is_rejected(capsys, monkeypatch):
    monkeypatch.setattr(checks, "nvidia_smi", lambda: [{"name": "NVIDIA X"}])

    error = run_check_setup(capsys, "--estimate", expect=2).err

    assert "NVIDIA X is not a GPU in our table" in error


# ---- estimates


def test_table_has_a_line_per_gpu(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    output = print_estimate(capsys, "--all_cards")

    assert "124,475,904 parameters, 10 B tokens" in output
    assert "cost" not in output
    lines = output.splitlines()[3:]
    for gpu, line in zip(gpus.GPUS, lines, strict=False):
        assert line.startswith(f"{gpu.name} ")
        assert "%" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "is_stated"),
    [
        ("--card rtx4090 --count 8", True),
        ("--card rtx4090", False),
        ("--card a100 --count 8", False),
        ("--all_cards --count 8", True),
        ("--all_cards", False),
        ("--plan --hours 24 --card rtx3090 --count 8", True),
        ("--plan --hours 24 --card rtx3090", False),
    ],
)
def test_estimate_states_missing_peer_to_peer_transfers(capsys, flags, is_stated):
    output = run_check_setup(capsys, *flags.split(), expect=0).out

    assert ("NCCL_P2P_DISABLE=1" in output) == is_stated


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize(
    "flags",
    [
        "--card rtx4090 --count 8 --price_per_card_hour 1",
        "--all_cards --count 8",
        "--plan --card rtx4090 --count 8 --hours 24",
        "--help",
    ],
)
def test_output_fits_into_the_terminal(capsys, monkeypatch, flags, columns):
    monkeypatch.setenv("COLUMNS", str(columns))

    with contextlib.suppress(SystemExit):  # --help
        check_setup.main(flags.split())

    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if line.startswith("accelerate launch")]
    assert max(len(line) for line in lines if line not in commands) <= columns


def test_narrow_table_has_blocks_of_columns(capsys, monkeypatch):
    wide = run_check_setup(capsys, "--all_cards", expect=0).out
    monkeypatch.setenv("COLUMNS", "50")

    narrow = run_check_setup(capsys, "--all_cards", expect=0).out

    assert wide.count("rtx4090 ") == 1
    assert narrow.count("rtx4090 ") == 2
    assert "124M, measured" in narrow


def test_json_table_has_a_row_per_gpu(capsys):
    rows = read_estimate(capsys, "--all_cards", "--price_per_card_hour", "2", "--count", "4")

    for row, gpu in zip(rows, gpus.GPUS, strict=True):
        assert row["card"] == gpu.name
        assert row["fits"]
        assert row["cost"] == pytest.approx(8 * row["hours"])
        assert row["compiled"] == (gpu.name != "v100")
        sequences = row["per_device_train_batch_size"] * row["gradient_accumulation_steps"]
        assert sequences * 4 == 512
        assert sum(row["memory_bytes"].values()) < gpu.memory_gib * 2**30


HUB_MIXTURE = {
    "tokenizer": "gpt2",
    "num_train_epochs": 3,
    "sources": [{"weight": 1, "dataset_name": "foo/bar"}],
}


@pytest.mark.parametrize("option", [("--max_steps", "100"), ("--tokens", "204800")])
@pytest.mark.parametrize(
    ("changes", "data"), [({}, ("--dataset_name", "foo/bar")), (HUB_MIXTURE, ())]
)
def test_stated_steps_replace_epochs_of_recipe(capsys, tmp_path, changes, data, option):
    values = yaml.safe_load((ROOT / "recipes/own_text.yaml").read_text()) | changes
    if "sources" in changes:
        del values["data_files"]
    recipe_file = tmp_path / "r.yaml"
    recipe_file.write_text(yaml.safe_dump(values))
    flags = ["--recipe", str(recipe_file), *data, "--estimate", "--card", "a6000"]

    row = json.loads(run_data_check(capsys, *flags, *option, "--json").out)
    command = run_data_check(capsys, *flags, *option).out.splitlines()[-1]

    assert row["tokens"] == 204_800
    assert command.endswith("--max_steps 100")
    assert "--max_steps N" in run_data_check(capsys, *flags, expect=2).err


@pytest.mark.parametrize("recipe", ["own_text", "quickstart"])
def test_epochs_option_replaces_length_of_recipe(data_files, capsys, recipe):
    flags = ["--recipe", f"recipes/{recipe}.yaml", "--data_files", "prose.txt", "--card", "a6000"]

    output = run_data_check(capsys, *flags, "--num_train_epochs", "2").out

    assert "num_train_epochs = 2 is " in output
    assert output.endswith("--data_files prose.txt --num_train_epochs 2\n")


def test_plan_needs_no_length_of_run(capsys, tmp_path):
    values = yaml.safe_load((ROOT / "recipes/own_text.yaml").read_text())
    del values["data_files"]
    recipe_file = tmp_path / "r.yaml"
    recipe_file.write_text(yaml.safe_dump(values | {"dataset_name": "foo/bar"}))

    output = run_data_check(
        capsys, "--recipe", str(recipe_file), "--plan", "--hours", "1", "--card", "a6000"
    ).out

    assert "--max_steps" in output


def test_large_model_is_estimated_on_sharding_gpus(capsys):
    flags = ("--size", "gpt3-175b", "--card", "h100")

    row = read_estimate(capsys, *flags, "--price_per_machine_hour", "3")
    output = print_estimate(capsys, *flags)

    assert row["parameters"] == pytest.approx(175e9, rel=0.01)
    assert row["shared_out"]
    assert row["fits"]
    training_state = 16 * row["parameters"]
    assert row["count"] * 80 * 2**30 > training_state
    assert row["count"] // 2 * 60 * 2**30 < training_state  # half of the GPUs is too few
    assert row["cost"] == pytest.approx(3 * row["hours"])
    assert sum(row["memory_bytes"].values()) < 80 * 2**30
    assert "gpt3-175b on 64 x h100" in output
    assert "zero3_x8.yaml" in output
    assert "time to gather" in " ".join(output.split())
    assert "does not fit" in print_estimate(capsys, *flags, "--count", "8")


def test_small_model_is_estimated_on_one_gpu(capsys):
    row = read_estimate(capsys, "--size", "d12", "--card", "h100")

    assert row["count"] == 1
    assert not row["shared_out"]
    assert row["parameters"] == 124_475_904


def test_estimate_uses_gpus_of_this_machine(capsys, monkeypatch):
    monkeypatch.setattr(checks, "nvidia_smi", lambda: [{"name": "NVIDIA RTX A6000"}] * 4)

    row = read_estimate(capsys, "--estimate")
    one_gpu_row = read_estimate(capsys, "--card", "a6000")
    output = print_estimate(capsys, "--estimate", "--price_per_machine_hour", "3.2")

    assert row["card"] == "a6000"
    assert row["count"] == 4
    assert one_gpu_row["count"] == 1
    for phrase in ("855 M per token", "weights 0.5", "% MFU", " kWh", "at 3.2 per hour"):
        assert phrase in output
    assert "are estimated (accuracy: docs/cards.md" in output
    launch = (
        "accelerate launch --quiet --config_file accelerate_configs/a6000_x4.yaml train.py --recipe"
    )
    assert f"\n{launch}" in output


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("rtx5090", "GPT-2 124M   196,551 tokens/s measured on one GPU (plain PyTorch GPT-2"),
        ("rtx5090", "products     236 TFLOP/s in matrix products, measured by others\n"),
        ("a30", "GPT-2 124M   never measured on this GPU\n"),
        ("a30", "products     131 TFLOP/s in matrix products, never measured: 79% of the peak"),
        ("h100", "525,116 tokens/s measured on one GPU\n"),
    ],
)
def test_estimate_names_source_of_each_speed(capsys, gpu, expected):
    assert expected in print_estimate(capsys, "--card", gpu)


def test_gradient_checkpointing_is_proposed_where_needed(capsys, tmp_path):
    model = {"n_layer": 36, "n_embd": 1280, "n_head": 20, "sequence_length": 8192}
    recipe = write_recipe(tmp_path / "large.yaml", **model, run_name="large")

    rows = read_estimate(capsys, "--all_cards", "--recipe", recipe)

    rows_by_gpu = {row["card"]: row for row in rows}
    assert not rows_by_gpu["rtx4060"]["fits"]
    assert rows_by_gpu["h200"]["fits"]
    assert rows_by_gpu["h200"]["gradient_checkpointing"] == "none"
    fitting = [row for row in rows if row["fits"]]
    checkpointed = [row["card"] for row in fitting if row["gradient_checkpointing"] == "full"]
    assert checkpointed
    table = print_estimate(capsys, "--all_cards", "--recipe", recipe)
    assert "does not fit" in table
    assert " *  " in table
    assert "* with --gradient_checkpointing full" in table
    output = print_estimate(capsys, "--card", checkpointed[0], "--recipe", recipe)
    assert ", --gradient_checkpointing full\n" in output
    assert output.endswith(" --gradient_checkpointing full\n")
    assert "does not fit" in print_estimate(capsys, "--card", "rtx4060", "--recipe", recipe)


def test_estimate_of_llama_equals_that_of_init_from(capsys, tmp_path):
    shape = {
        "architecture": "llama",
        "n_layer": 2,
        "n_head": 8,
        "num_key_value_heads": 4,
        "n_embd": 64,
        "intermediate_size": 2048,
        "vocab_size": 512,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    }
    model = build(keys.Model(**shape, sequence_length=1024, **NO_DROPOUT, seed=1), eos_token_id=0)
    source = tmp_path / "source"
    model.save_pretrained(source)
    recipe = write_recipe(tmp_path / "llama.yaml", **shape)
    values = yaml.safe_load(keys.as_yaml(load_recipe()))
    for key in keys.MODEL_KEYS:
        values.pop(key, None)
    values["init_from"] = str(source)
    values["tokenizer"] = "gpt2"
    continued_recipe = tmp_path / "continued.yaml"
    continued_recipe.write_text(yaml.safe_dump(values))

    row = read_estimate(capsys, "--card", "a6000", "--recipe", recipe)
    continued_row = read_estimate(capsys, "--card", "a6000", "--recipe", str(continued_recipe))

    assert row["parameters"] == model.num_parameters()
    assert continued_row == row


@pytest.mark.parametrize(("keep_optimizer", "bytes_per_weight"), [(True, 12), (False, 4)])
def test_kept_checkpoints_are_part_of_disk_use(tmp_path, capsys, keep_optimizer, bytes_per_weight):
    flags = {"keep_checkpoints": ["0", "0.5B", "1B", "100B"], "keep_optimizer": keep_optimizer}
    recipe = load_recipe(**flags)
    all_kept = load_recipe(**flags, save_total_limit=0, save_steps=1908)  # step 1908 reaches 1B
    kept_bytes = bytes_per_weight * 124_475_904

    kept = estimate.kept_checkpoints(recipe)
    assert list(kept) == [0, 954, 1908]
    assert estimate.bytes_of_kept(recipe, kept) == 3 * kept_bytes
    assert list(estimate.kept_checkpoints(all_kept)) == [0, 954]
    without = estimate.written_bytes(load_recipe())
    assert estimate.written_bytes(recipe)[0] == without[0] + 3 * kept_bytes

    words = ("--card", "a6000", "--recipe", write_recipe(tmp_path / "kept.yaml", **flags))
    row = read_estimate(capsys, *words)
    output = " ".join(print_estimate(capsys, *words).split())
    assert row["checkpoint_bytes"] == without[0] + 3 * kept_bytes
    assert "3 checkpoints kept by keep_checkpoints" in output
    assert f"{3 * kept_bytes / 1e9:.3g} GB" in output


def test_written_bytes_are_checkpoints_and_shards():
    checkpoint_bytes = 12 * 124_475_904
    token_bytes = 2 * 19073 * 524288

    two_kept = estimate.written_bytes(load_recipe(save_total_limit=2))
    all_kept = estimate.written_bytes(load_recipe(save_total_limit=0, save_steps=9000))
    large_ids = estimate.written_bytes(load_recipe(vocab_size=100_000, limit_tokens=10**6))
    existing_shards = estimate.written_bytes(load_recipe(data_dir="shards"))

    assert two_kept == (3 * checkpoint_bytes, token_bytes)
    assert all_kept[0] == 3 * checkpoint_bytes
    assert large_ids[1] == 4e6
    assert existing_shards[1] == 0


# ---- targets of the Makefile


def run_make(*words: str) -> str:
    """Run make in the repository and return its output."""
    return subprocess.check_output(["make", "-C", str(ROOT), *words], text=True)


def print_recipe_of(target: str, *variables: str) -> list[str]:
    """Return the words of the commands that a target would run."""
    printed = run_make("-n", "-o", ".venv/.installed", target, *variables)
    return shlex.split(printed)


def test_make_gpu_status_reports_missing_driver(tmp_path, monkeypatch):
    install_program(tmp_path, monkeypatch, "nvidia-smi", "exit 9")

    assert run_make("-s", "gpu-status") == "no NVIDIA driver was found\n"


def test_make_gpu_status_prints_a_table(tmp_path, monkeypatch):
    row = "0, NVIDIA RTX A6000, 98 %, 40000 MiB, 49140 MiB, 299.10 W, 71"
    install_program(tmp_path, monkeypatch, "nvidia-smi", f'echo "{row}"')

    header, line = run_make("-s", "gpu-status").splitlines()

    assert header.split()[:3] == ["GPU", "name", "use"]
    assert "NVIDIA RTX A6000" in line
    assert line.endswith("71")


def test_make_uses_only_the_gpus_in_gpus(tmp_path, monkeypatch):
    gpu = 'echo "NVIDIA RTX A6000"'
    text = f'{gpu}; case "$*" in *--id=1,3*) {gpu};; *) exit 3;; esac'
    install_program(tmp_path, monkeypatch, "nvidia-smi", text)
    makefile = tmp_path / "show.mk"
    makefile.write_text("gpus:\n\t@echo $$CUDA_DEVICE_ORDER $$CUDA_VISIBLE_DEVICES\n")

    words = print_recipe_of("ddp-train", "GPUS=1,3")
    visible = run_make("-s", "-f", "Makefile", "-f", str(makefile), "gpus", "GPUS=1,3")

    launch = "accelerate_configs/a6000_x2.yaml train.py --recipe"
    assert f"{launch} recipes/gpt2_124m_openwebtext.yaml" in " ".join(words)
    assert visible == "PCI_BUS_ID 1,3\n"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("train", ["--config_file", "a b;c.yaml", "train.py"]),
        ("train", ["train.py", "--recipe", "my recipes/it's $a.yaml"]),
        ("train", ["--run_name", "a b"]),
        ("ddp-train", ["--nproc_per_node", "3", "train.py"]),
        ("ddp-train", ["train.py", "--recipe", "my recipes/it's $a.yaml"]),
    ],
)
def test_make_quotes_its_variables(tmp_path, monkeypatch, target, expected):
    install_program(tmp_path, monkeypatch, "nvidia-smi", "exit 9")
    variables = [
        "RECIPE=my recipes/it's $a.yaml",
        "ACCELERATE_CONFIG=a b;c.yaml",
        'FLAGS=--run_name "a b"',
        "NGPUS=3",
    ]

    words = print_recipe_of(target, *variables)

    starts = range(len(words))
    assert any(words[start : start + len(expected)] == expected for start in starts), words


# ---- scripts/stop.py


def run_stop(*runs: str, **environment: str) -> subprocess.CompletedProcess:
    """Run scripts/stop.py in a process."""
    command = [sys.executable, str(ROOT / "scripts" / "stop.py"), *runs]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def start_long_run(name: str) -> int:
    """Start a training run in the background, wait for its first metrics, and return its pid."""
    steps = "--max_steps 1000000 --eval_steps 0 --sample_steps 0 --save_steps 0"
    flags = ("--recipe", "tiny.yaml", *steps.split(), "--run_name", name)
    pid, _, _ = start_script("train.py", flags, {"ACCELERATE_USE_CPU": "true"})
    log = Path("runs", name, "metrics.jsonl")
    deadline = time.monotonic() + 60
    while not log.exists() or not log.stat().st_size:
        assert time.monotonic() < deadline, "the run has not started"
        time.sleep(0.05)
    return pid


def test_stop_ends_real_run_after_its_checkpoint(workspace):
    # A lock that was left behind, and whose number now belongs to another process
    Path("runs/old").mkdir(parents=True)
    Path("runs/old/.lock").write_text(f"{os.getpid()}\n")
    pid = start_long_run("r")

    process = run_stop()

    assert process.returncode == 0, process.stderr
    assert f"'runs/r': process {pid} was asked to stop" in process.stdout
    assert "'runs/r': stopped" in process.stdout
    assert "runs/old" not in process.stdout
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM
    assert list(Path("runs/r/checkpoints").glob("step-*"))
    assert run_stop("runs/r").returncode == 0


def test_stop_without_runs_reports_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert run_stop().stdout == "No run of yours is running in runs/ on this machine.\n"
    assert run_stop("runs/none").returncode == 1


LOCK_HOLDER = """
import fcntl, os, signal, sys, time
name, recorded_pid, mode = sys.argv[1:]
if mode == "ignores SIGTERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.makedirs(name, exist_ok=True)
file = open(os.path.join(name, ".lock"), "w")
if mode != "without lock":
    fcntl.flock(file, fcntl.LOCK_EX)
print(recorded_pid or os.getpid(), file=file, flush=True)
print(flush=True)
time.sleep(60)
"""
SPECIAL_NAMES = ["my runs/a", "it's a\"b", "a$b`id`$(id)", "new\nline", "-x", "größe #*;"]


@pytest.fixture
def hold_lock(tmp_path, monkeypatch):
    """Return a function that starts a process with the lock of a run."""
    monkeypatch.chdir(tmp_path)
    processes = []

    def start(name: str, recorded_pid: str = "", mode: str = "") -> subprocess.Popen:
        command = [sys.executable, "-S", "-E", "-c", LOCK_HOLDER, name, recorded_pid, mode]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        processes.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_stop_ends_only_the_named_run(hold_lock):
    for name in ("Makefile", "scripts"):
        Path(name).symlink_to(ROOT / name)
    runs = {name: hold_lock(name) for name in ["runs/a", "a", "my", "x", *SPECIAL_NAMES]}
    files = sorted(os.listdir())

    for name in SPECIAL_NAMES:
        command = ["make", "-s", "stop", f"PYTHON={sys.executable}", f"RUN={name}"]
        process = subprocess.run(command, capture_output=True, text=True)

        assert process.returncode == 0, process.stderr
        assert "stopped" in process.stdout
        assert runs.pop(name).wait(20) == -signal.SIGTERM
        assert [other for other, holder in runs.items() if holder.poll() is not None] == []
    assert sorted(os.listdir()) == files


def test_stop_spares_process_that_lock_does_not_name(hold_lock):
    other = hold_lock("another/program")
    holder = hold_lock("runs/r", recorded_pid=str(other.pid))

    process = run_stop()

    assert process.returncode == 1
    assert f"names '{other.pid}'" in process.stderr
    assert other.poll() is None
    assert holder.poll() is None


def test_stop_gives_up_after_limit(hold_lock):
    hold_lock("runs/r", mode="ignores SIGTERM")

    process = run_stop(LIMIT="1")

    assert process.returncode == 1
    assert "after 1 s" in process.stderr
    assert run_stop(LIMIT="ever").returncode == 2


def test_stop_spares_linked_and_unlocked_files(hold_lock):
    other = hold_lock("another/program")
    reader = hold_lock("runs/read", mode="without lock")
    Path("runs/linked").mkdir()
    Path("runs/linked/.lock").symlink_to(Path("another/program/.lock").resolve())

    process = run_stop("runs/linked", "runs/read")

    assert process.returncode == 1
    assert "is a link" in process.stderr
    assert other.poll() is None
    assert reader.poll() is None


def test_stop_never_takes_the_lock():
    # A trainer that starts at this moment would be refused.
    assert "flock" not in (ROOT / "scripts" / "stop.py").read_text()


@pytest.mark.skipif(not shutil.which("lsof"), reason="lsof is not installed; macOS has it")
def test_stop_finds_lock_holder_with_lsof(hold_lock, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("stop", ROOT / "scripts" / "stop.py")
    stop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stop)
    monkeypatch.setattr(stop, "LOCKS", Path("none"))
    other = hold_lock("runs/a")
    run = hold_lock("my runs/a")

    assert stop.main(["my runs/a"]) == 0

    assert run.wait(20) == -signal.SIGTERM
    assert other.poll() is None
    assert "'my runs/a': stopped" in capsys.readouterr().out
    assert stop.main(["my runs/a"]) == 0
    assert "No run of yours is running" in capsys.readouterr().out
