"""End to end: what a run promises on machines that run out of memory, lose a process, or shard."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, free_port, run_script, start_script, torchrun_environments
from run_results import TINY_RECIPE, final_state, losses_by_step, metrics_rows
from torch.distributed.fsdp import FSDPModule

from ursa_minor.base import files, gpus
from ursa_minor.base.errors import BadInput
from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.machine import device as hardware
from ursa_minor.machine.accelerator import check_kernels
from ursa_minor.machine.micro_batch import propose_micro_batch
from ursa_minor.preflight import estimate
from ursa_minor.recipe import keys, loading
from ursa_minor.recipe.batching import make_plan

CHILD = str(ROOT / "tests" / "failing_training.py")
QUIET = ("--eval_steps", "0", "--sample_steps", "0")


def sequences(stderr: str) -> tuple[int, int]:
    """Micro-batches and their size, of the header."""
    found = re.search(r"process(?:es)? x (\d+) micro-batch(?:es)? x (\d+) sequence", stderr)
    return int(found[1]), int(found[2])


# per_device_train_batch_size: auto, and an explicit one.


@pytest.mark.parametrize("most, taken", [(7, 4), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_auto_ends_at_the_largest_half_that_fits_and_reads_the_same_windows(workspace, most, taken):
    auto = (
        "--per_device_train_batch_size",
        "auto",
        *QUIET,
        "--max_steps",
        "3",
        "--warmup_steps",
        "1",
    )
    done = run_script(CHILD, *TINY_RECIPE, *auto, "--run_name", "a", MOST=str(most))
    assert sequences(done.stderr) == (8 // taken, taken)
    assert "runs out of memory: trying" in done.stderr
    run_script(
        CHILD, *TINY_RECIPE, *auto, "--run_name", "b", "--per_device_train_batch_size", str(taken)
    )
    assert losses_by_step("a") == losses_by_step("b")
    state = checkpoint.read_state(Path("runs/a/checkpoints/step-00000003"))
    assert state["micro_batch"] == taken and state["tokens"] == 3 * 128


@pytest.mark.slow
def test_one_process_that_runs_out_lowers_all_of_them(workspace):
    auto = ("--per_device_train_batch_size", "auto", *QUIET)
    done = run_script(
        CHILD, *TINY_RECIPE, *auto, "--run_name", "a", processes=2, MOST="1", MOST_RANK="1"
    )
    assert sequences(done.stderr) == (4, 1)
    run_script(
        "train.py",
        *TINY_RECIPE,
        *QUIET,
        "--run_name",
        "b",
        "--per_device_train_batch_size",
        "1",
        processes=2,
    )
    assert final_state("a")["model.safetensors"] == final_state("b")["model.safetensors"]


def test_when_not_one_sequence_fits_checkpointing_is_proposed(workspace):
    done = run_script(
        CHILD,
        *TINY_RECIPE,
        "--per_device_train_batch_size",
        "auto",
        "--run_name",
        "a",
        expect=2,
        MOST="0",
    )
    assert "runs out of memory at a micro-batch of 1 x 16 tokens" in done.stderr
    assert "--gradient_checkpointing full" in done.stderr and "Traceback" not in done.stderr


def test_an_explicit_size_that_does_not_fit_is_explained_and_not_changed(workspace):
    done = run_script(
        CHILD,
        *TINY_RECIPE,
        "--per_device_train_batch_size",
        "4",
        "--run_name",
        "a",
        expect=2,
        MOST="3",
    )
    assert (
        "per_device_train_batch_size = 4: CPU" in done.stderr
        and "micro-batch of 4 x 16 tokens" in done.stderr
    )
    assert "--per_device_train_batch_size 2 or auto" in done.stderr
    assert not list(Path("runs/a").glob("metrics.jsonl"))
    done = run_script(
        CHILD,
        *TINY_RECIPE,
        *QUIET,
        "--per_device_train_batch_size",
        "2",
        "--run_name",
        "a",
        MOST="3",
    )
    assert sequences(done.stderr) == (4, 2)


@pytest.mark.slow
def test_a_resumed_auto_run_keeps_its_size_and_so_its_bits(workspace):
    auto = ("--per_device_train_batch_size", "auto")
    run_script(CHILD, *TINY_RECIPE, *auto, "--run_name", "whole", MOST="2", LEDGER="whole.ledger")
    run_script(
        CHILD,
        *TINY_RECIPE,
        *auto,
        "--run_name",
        "k",
        expect=1,
        MOST="2",
        OUT_AT="7",
        LEDGER="k.ledger",
    )
    done = run_script(CHILD, *TINY_RECIPE, *auto, "--run_name", "k")  # more would fit now
    assert (
        sequences(done.stderr) == (4, 2)
        and "resumed from runs/k/checkpoints/step-00000007" in done.stderr
    )
    assert final_state("k") == final_state("whole")


@pytest.mark.parametrize(
    "processes, rank", [pytest.param(1, "0", marks=pytest.mark.slow), (2, "1")]
)
def test_memory_that_runs_out_later_leaves_a_checkpoint_and_a_remedy(
    finished_ddp_run, processes, rank
):
    out = {"ACCELERATE_USE_CPU": "true", "OUT_AT": "5", "OUT_RANK": rank}
    children = [
        start_script(CHILD, (*TINY_RECIPE, "--run_name", "k"), own | out)
        for own in torchrun_environments(processes)
    ]
    for pid, _, _ in children:  # the launcher ends the other one; here it notices by itself
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    said = Path(children[int(rank)][2]).read_text()
    assert (
        "runs out of memory" in said
        and "--per_device_train_batch_size 1" in said
        and "Traceback" not in said
    )
    path = Path("runs/k/checkpoints/step-00000005")
    assert checkpoint.find_problem(path) is None
    run_script("train.py", *TINY_RECIPE, "--run_name", "k", processes=processes)
    assert final_state("k") == final_state("whole" if processes == 1 else "two")


# Sharding.


@pytest.mark.slow
def test_zero_1_equals_ddp_to_the_bit_and_resumes_to_the_bit(finished_ddp_run):
    zero = (*TINY_RECIPE, "--shard_optimizer", "true")
    run_script("train.py", *zero, "--run_name", "z", processes=2)
    assert final_state("z") == final_state("two")
    run_script(CHILD, *zero, "--run_name", "k", processes=2, expect=None, OUT_AT="7", OUT_RANK="0")
    run_script("train.py", *zero, "--run_name", "k", processes=2)
    assert final_state("k") == final_state("two")


@pytest.mark.parametrize("reshard", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_fsdp2_learns_what_ddp_learns_and_exports_a_stock_model(finished_ddp_run, reshard):
    done = run_script(
        CHILD, *TINY_RECIPE, "--sample_steps", "12", "--run_name", "f", processes=2, FSDP=reshard
    )
    assert "FSDP2" in done.stderr
    two = losses_by_step("two")
    assert losses_by_step("f") == pytest.approx(two, abs=1e-5) and len(two) == 12
    evals = [
        [row["eval/loss"] for row in metrics_rows(name) if "eval/loss" in row]
        for name in ("f", "two")
    ]
    assert evals[0] == pytest.approx(evals[1], abs=1e-5)
    done = run_script(
        "train.py", *TINY_RECIPE, "--run_name", "x", "--eval_only", "--init_from", "runs/f/model"
    )
    assert f'"eval/loss": {evals[0][-1]:.3f}'[:-1] in done.stdout


RECOVERS = hasattr(FSDPModule, "reset_iter_state")  # from torch 2.13 on


@pytest.mark.parametrize("recovers", [True, False] if RECOVERS else [False])
def test_fsdp2_takes_loss_and_averages_in_fp32_once_an_update_or_where_it_cannot_recover_in_each_micro_batch(
    finished_ddp_run, recovers
):
    how = {"FSDP": "true", "ACCELERATE_MIXED_PRECISION": "bf16", "EXCHANGES": "sent.json"}
    how |= {} if recovers else {"RECOVERS": "no"}
    run_script(
        CHILD, *TINY_RECIPE, *QUIET, "--run_name", "f", "--max_steps", "4", processes=2, **how
    )  # of 2 micro-batches each
    whole = 4 * estimate.shape_of(loading.load_recipe(Path("tiny.yaml")).model).parameters
    exchanges = 4 + 1 if recovers else 4 * 2  # one in the try
    # Each of the two blocks is wrapped by itself, and the rest.
    assert files.read_json(Path("sent.json")) == {
        "torch.float32": exchanges * whole,
        "exchanges": exchanges * (2 + 1),
    }
    # In fp32: bf16's own steps are 0.02 here.
    assert losses_by_step("f") == pytest.approx(
        {step: losses_by_step("two")[step] for step in (1, 2, 3, 4)}, abs=1e-3
    )


@pytest.mark.skipif(not RECOVERS, reason="torch 2.13")
@pytest.mark.slow
def test_fsdp2_gives_whole_gradients_up_before_it_halves_the_micro_batch(workspace):
    flags = (
        *TINY_RECIPE,
        *QUIET,
        "--per_device_train_batch_size",
        "auto",
        "--max_steps",
        "3",
        "--run_name",
        "f",
    )
    done = run_script(CHILD, *flags, processes=2, FSDP="true", MOST="1", EXCHANGES="sent.json")
    assert (
        "a micro-batch of 4 sequences runs out of memory: trying 2" in done.stderr
    )  # in one of them nothing waits
    whole, without = (
        "of 2 sequences next to unsharded gradients runs out of memory",
        "of 2 sequences runs out of memory",
    )
    assert (
        done.stderr.index(whole)
        < done.stderr.index(without)
        < done.stderr.index("4 micro-batches x 1 sequence")
    )
    assert len(losses_by_step("f")) == 3


@pytest.mark.parametrize(
    "optimizer, order",
    [
        ("muon", ("one", "fsdp", "zero", "ddp")),  # AdamW's moments are among Muon's
        pytest.param("adamw", ("one", "fsdp", "zero", "ddp"), marks=pytest.mark.slow),
        pytest.param("muon", ("fsdp", "one", "ddp", "fsdp"), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_from_one_process_to_ddp_zero_1_and_fsdp2_and_back(
    finished_ddp_run, optimizer, order
):
    machines = {
        "one": ((), 1, {}),
        "ddp": ((), 2, {}),
        "zero": (("--shard_optimizer", "true"), 2, {}),
        "fsdp": ((), 2, {"FSDP": "true"}),
    }
    chosen = ("--optimizer", optimizer, *QUIET)
    run_script("train.py", *TINY_RECIPE, *chosen, "--run_name", "whole_one")
    for number, name in enumerate(order):
        flags, processes, environment = machines[name]
        if number + 1 < len(order):
            environment = environment | {
                "OUT_AT": str(3 * number + 4)
            }  # after the checkpoint of 3, 6, 9
        done = run_script(
            CHILD,
            *TINY_RECIPE,
            *chosen,
            *flags,
            "--run_name",
            "m",
            processes=processes,
            expect=None,
            **environment,
        )
        assert ("resumed from" in done.stderr) == (number > 0)
    # Newton-Schulz lifts small singular values, and so what rounding has made of them.
    assert losses_by_step("m") == pytest.approx(
        losses_by_step("whole_one"), abs=1e-5 if optimizer == "adamw" else 1e-4
    )
    assert len(losses_by_step("m")) == 12 and Path("runs/m/model/config.json").is_file()


def test_fsdp_on_a_cpu_is_refused(workspace):
    done = run_script(
        "train.py", *TINY_RECIPE, expect=2, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2"
    )
    assert "distributed_type: FSDP (ACCELERATE_USE_FSDP) needs NVIDIA GPUs" in done.stderr
    assert not Path("runs").exists()


# A process that hangs or dies.


def test_a_lost_process_ends_the_run_and_the_same_command_resumes_it_exactly(finished_ddp_run):
    done = run_script(CHILD, *TINY_RECIPE, "--run_name", "k", processes=2, expect=None, DIE_AT="7")
    assert done.returncode == 1 and re.search(r"hangs \(connection", done.stderr, re.IGNORECASE), (
        done.stderr
    )
    again = run_script(CHILD, *TINY_RECIPE, "--run_name", "k", processes=2, DIE_AT="7")
    assert "resumed from runs/k/checkpoints/step-00000006" in again.stderr
    assert final_state("k") == final_state("two")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["HANG_AT", "DIE_AT"])
def test_a_lost_process_ends_the_run_in_time_and_the_launcher_resumes_it_exactly(
    finished_ddp_run, what
):
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "--max_restarts",
        "1",
    ]
    command = [
        sys.executable,
        *launcher,
        CHILD,
        *TINY_RECIPE,
        "--run_name",
        "k",
        "--ddp_timeout",
        "6",
    ]
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        what: "7",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1",
    }
    environment["PYTHONPATH"] = str(ROOT)
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    said, struck_for = [], None
    for line in process.stderr:
        said.append(line)
        if "another process of this run died" in line and struck_for is None:
            struck_for = time.time() - Path("struck").stat().st_mtime
    assert process.wait() == 0, "".join(said)
    assert struck_for is not None and struck_for < 6 + 5, "".join(said)
    assert any("resumed from runs/k/checkpoints/step-00000006" in line for line in said)
    assert final_state("k") == final_state("two")


# Pretended cards.


class FakeAccelerator:
    """What propose_micro_batch asks an Accelerator."""

    num_processes, is_fsdp2 = 1, False

    def __init__(self, precision, compiled, device="cuda"):
        self.device = torch.device(device)
        self.mixed_precision = precision
        backend = type("Backend", (), {"value": "INDUCTOR" if compiled else "NO"})
        self.state = type("State", (), {"dynamo_plugin": type("Plugin", (), {"backend": backend})})


def gpt2_124m(**changes):
    values = {
        "per_device_train_batch_size": "auto",
        "data_files": ["x"],
        "dataset_name": None,
        "task_steps": 0,
    }
    recipe = loading.load_recipe(ROOT / "recipes" / "gpt2_124m.yaml")
    return keys.replace(recipe, **values | changes)


DRIVERS_NAMES = {"t4": "Tesla T4", "v100": "Tesla V100-SXM2-16GB", "a100": "NVIDIA A100-SXM4-80GB"}
DRIVERS_NAMES |= {"a100_40gb": "NVIDIA A100-SXM4-40GB", "a100_pcie": "NVIDIA A100 80GB PCIe"}
DRIVERS_NAMES |= {
    "h100": "NVIDIA H100 80GB HBM3",
    "rtxpro6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
}


@pytest.mark.parametrize("card", gpus.GPUS, ids=lambda card: card.name)
def test_a_pretended_card_gets_its_precision_its_micro_batch_and_its_yaml(card):
    name = DRIVERS_NAMES.get(card.name, card.pattern)
    memory = int(card.memory_gib * 0.98 * 2**30)  # as the driver counts it
    device = hardware.Device("cuda", name, memory, card.capability, 1, has_triton=True)
    assert gpus.find(name) is card
    assert device.precision == card.precision and device.has_tf32 == card.is_ampere_or_newer
    preset = gpus.preset(name)
    text = (ROOT / "accelerate_configs" / f"{preset}.yaml").read_text()
    assert f"mixed_precision: {device.precision}" in text
    accelerator = FakeAccelerator(device.precision, "INDUCTOR" in text)
    proposed = propose_micro_batch(gpt2_124m(), memory, accelerator)
    how = {"half": True, "compiled": "INDUCTOR" in text}
    taken, more = (
        sum(estimate.memory(estimate.GPT2_124M, micro_batch=size, **how).values())
        for size in (proposed, proposed + 1)
    )
    assert taken <= estimate.HEADROOM * memory and (
        proposed == 64 or more > estimate.HEADROOM * memory
    )
    plan = make_plan(gpt2_124m(per_device_train_batch_size=proposed), 1)
    assert plan.per_device_train_batch_size == int(re.search(r"micro-batch (\d+)", text)[1])


def test_an_unknown_card_gets_what_the_memory_model_lets_fit_and_at_least_one_sequence():
    sizes = []
    for gib in (1, 6, 12, 24, 48):
        sizes.append(propose_micro_batch(gpt2_124m(), gib * 2**30, FakeAccelerator("bf16", True)))
    assert sizes[0] == 1 and sizes == sorted(sizes) and 1 < sizes[1] < sizes[4] <= 64
    checkpointed = gpt2_124m(gradient_checkpointing="full")
    assert propose_micro_batch(checkpointed, 6 * 2**30, FakeAccelerator("bf16", True)) > sizes[1]


def test_a_cpu_takes_small_micro_batches():
    assert propose_micro_batch(gpt2_124m(), 60 * 2**30, FakeAccelerator("no", False, "cpu")) == 8


def test_a_card_that_torch_has_no_kernels_for_is_refused_with_the_build_that_has(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90", "compute_120"]
    )
    v100 = hardware.Device("cuda", "Tesla V100-SXM2-16GB", 16 * 2**30, (7, 0), 1, True)
    with pytest.raises(
        BadInput, match=r"no kernels for Tesla V100-SXM2-16GB \(sm_70\).*pip install"
    ):
        check_kernels(v100)
    check_kernels(dataclasses.replace(v100, capability=(8, 6)))
    check_kernels(hardware.Device("cpu", "CPU", 2**34))


# A real card, where there is one.

CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def launch(yaml: str, *flags: str) -> str:
    """Run train.py through `accelerate launch` on one card; return what it said."""
    launcher = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(ROOT / "accelerate_configs" / yaml),
    ]
    command = [sys.executable, *launcher]
    command += [
        "--num_processes",
        "1",
        "--main_process_port",
        str(free_port()),
        str(ROOT / "train.py"),
        *TINY_RECIPE,
        *flags,
    ]
    environment = {
        name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"
    }
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.gpu
@CARD
@pytest.mark.parametrize(
    "yaml", ["zero2_x8.yaml", "zero3_x8.yaml", "conservative.yaml", "h100.yaml"]
)
def test_a_card_learns_what_a_cpu_learns(workspace, yaml):
    still = [word for kind in ("resid", "embd", "attn") for word in (f"--{kind}_pdrop", "0")]
    launch("cpu.yaml", *QUIET, *still, "--run_name", "cpu")
    said = launch(yaml, *QUIET, *still, "--run_name", "card")
    assert ("FSDP2" in said) == yaml.startswith("zero")
    assert losses_by_step("card") == pytest.approx(losses_by_step("cpu"), rel=0.02)


@pytest.mark.gpu
@CARD
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_card_resumes_to_the_bit_where_it_is_deterministic_else_to_rounding(
    workspace, deterministic
):
    how = ("--deterministic", str(deterministic).lower())
    launch("h100.yaml", "--run_name", "whole", *how)
    launch("h100.yaml", "--run_name", "k", "--save_total_limit", "0", *how)
    for later in sorted(Path("runs/k/checkpoints").iterdir())[1:]:
        shutil.rmtree(later)
    assert "resumed from runs/k/checkpoints/step-00000003" in launch(
        "h100.yaml", "--run_name", "k", *how
    )
    assert losses_by_step("k") == pytest.approx(
        losses_by_step("whole"), rel=0 if deterministic else 1e-3
    )
    same = final_state("k")["model.safetensors"] == final_state("whole")["model.safetensors"]
    assert same or not deterministic
    assert 0 < metrics_rows("k")[-2]["gpu/memory"] <= 1
