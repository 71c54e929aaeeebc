"""Two machines, tried: a network namespace each on one host, `accelerate launch` in both, and a cable that can be cut.

What it does not prove: cards, NCCL and InfiniBand (these are gloo and TCP), two disks, two clocks.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import RECORDED_TRAINING, ROOT, run_script
from push_helpers import wait_until
from run_results import TINY_RECIPE, final_state, losses_by_step, metrics_rows, windows_by_step
from two_machines import DEVICE, HOSTS, PORT, Started, TwoMachines

pytest_plugins = ["two_machines"]
YAML = ROOT / "accelerate_configs/multi_node_2x8.yaml"
SLURM = ROOT / "scripts/slurm.sh"
PYTHONPATH = f"{ROOT}:{ROOT / 'tests'}"
QUIET = ("--eval_steps", "0", "--sample_steps", "0")
LONG = (*TINY_RECIPE, *QUIET, "--max_steps", "300", "--save_steps", "20")
LAST = 300
MARGIN = 8  # seconds that ending takes on two busy cores, beside the time limit
NOTICED = "another process of this run died, was killed (memory?) or hangs"


def shrunk() -> str:
    """The YAML for two machines with a CPU process each: three values are other ones.

    distributed_type stays. With MULTI_CPU accelerate 1.15 starts one process and leaves the others to mpirun; MULTI_GPU is
    torch's launcher, and train.py takes CPUs and gloo where there is no card.
    """
    text = YAML.read_text()
    for old, new in (
        ("num_processes: 16", "num_processes: 2"),
        ("mixed_precision: bf16", 'mixed_precision: "no"'),
        ("dynamo_backend: INDUCTOR", 'dynamo_backend: "NO"'),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def train(
    machines: TwoMachines,
    run_name: str,
    *flags: str,
    restarts: int = 0,
    **environment: str,
) -> list[Started]:
    """Start train.py by the command that the YAML's head gives, on both machines."""
    Path("two.yaml").write_text(shrunk())
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "two.yaml"]
    command += ["--rdzv_backend", "c10d", "--max_restarts", str(restarts)]
    command += ["--main_process_ip", HOSTS[0], "--main_process_port", str(PORT)]
    words = [str(ROOT / "train.py"), *LONG, *flags, "--run_name", run_name]
    environment |= {"PYTHONPATH": PYTHONPATH}
    return [
        machines.start(n, [*command, "--machine_rank", str(n), *words], **environment)
        for n in (0, 1)
    ]


def assert_both_go_on(machines: TwoMachines, whole: dict) -> None:
    """Started again, the two end with the bits of the run that nothing interrupted."""
    assert ended(again := train(machines, "k")) == [0, 0], again[0].said + again[1].said
    assert "resumed from runs/k/checkpoints/step-" in again[0].said
    assert final_state("k", LAST) == whole


def ended(launchers: list[Started], seconds: float = 120) -> list[int]:
    """Wait for both; return their exit statuses."""
    until = time.monotonic() + seconds
    return [launcher.process.wait(max(0.1, until - time.monotonic())) for launcher in launchers]


def trainers(machines: TwoMachines, machine: int) -> list[int]:
    """The processes there that train, without their launcher."""
    found = machines.processes(machine).items()
    return [pid for pid, command in found if "train.py" in command and "accelerate" not in command]


def wait_for_step(run_name: str, step: int) -> None:
    """Wait until so many updates are logged."""
    path = Path("runs") / run_name / "metrics.jsonl"
    wait_until(lambda: path.is_file() and path.read_text().count("\n") >= step, seconds=120)


@pytest.mark.slow
def test_processes_on_two_machines_learn_what_one_process_learns(finished_ddp_run, machines):
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": machines.address(0),
        "MASTER_PORT": str(PORT),
        "ACCELERATE_USE_CPU": "true",
    }
    shared |= {
        "TORCHELASTIC_RUN_ID": "t",
        "LEDGER": "apart.ledger",
        "LOCAL_RANK": "0",
        "PYTHONPATH": PYTHONPATH,
    }
    command = [sys.executable, RECORDED_TRAINING, *TINY_RECIPE, "--run_name", "apart"]
    started = [machines.start(rank, command, **shared, RANK=str(rank)) for rank in (0, 1)]
    wait_until(lambda: all(machines.processes(machine) for machine in (0, 1)))
    assert ended(started) == [0, 0], started[0].said + started[1].said
    # One process's ledger and losses, and the bits of two processes on one machine.
    read = windows_by_step("whole.ledger")
    assert (
        len(read) == 12 and windows_by_step("two.ledger") == windows_by_step("apart.ledger") == read
    )
    for name in ("train/loss", "eval/loss"):
        assert losses_by_step("apart", name) == pytest.approx(
            losses_by_step("whole", name), abs=1e-5
        )
    assert len(losses_by_step("apart")) == 12 and final_state("apart") == final_state("two")


@pytest.fixture
def whole(workspace, machines):
    """The end of a run on two machines that nothing interrupts: that of two processes on one, as is tested above."""
    run_script("train.py", *LONG, "--run_name", "whole", processes=2)
    return final_state("whole", LAST)


@pytest.mark.slow
def test_a_killed_trainer_ends_the_other_and_both_started_again_go_on_to_the_bit(machines, whole):
    launchers = train(machines, "k", "--ddp_timeout", "60")
    wait_for_step("k", 100)
    struck = time.monotonic()
    (pid,) = trainers(machines, 1)
    os.kill(pid, signal.SIGKILL)
    assert (
        ended(launchers, 60) == [1, 1] and time.monotonic() - struck < MARGIN + 10
    )  # long before the time limit
    assert NOTICED in launchers[0].said
    assert_both_go_on(machines, whole)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["trainer", "launcher"])
def test_a_killed_trainer_comes_back_by_itself_and_the_run_goes_on_to_the_bit(
    machines, whole, first
):
    """Whichever notices on the other machine: a launcher that is first starts its trainer anew without counting that."""
    launchers = train(
        machines, "k", "--ddp_timeout", "60", restarts=3, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1"
    )
    wait_for_step("k", 100)
    (alive,), (pid,) = trainers(machines, 0), trainers(machines, 1)
    if first == "launcher":
        os.kill(alive, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    assert ended(launchers) == [0, 0], launchers[0].said + launchers[1].said
    assert first == "launcher" or NOTICED in launchers[0].said
    assert "resumed from runs/k/checkpoints/step-" in launchers[0].said + launchers[1].said
    assert final_state("k", LAST) == whole


@pytest.mark.slow
def test_a_cable_that_is_out_for_less_than_the_time_limit_is_waited_for(machines, whole):
    launchers = train(machines, "k", "--ddp_timeout", "30")
    wait_for_step("k", 100)
    machines.cut()
    time.sleep(5)
    before = len(metrics_rows("k"))
    machines.mend()
    assert ended(launchers) == [0, 0], launchers[0].said + launchers[1].said
    assert before < LAST and NOTICED not in launchers[0].said + launchers[1].said
    assert final_state("k", LAST) == whole


@pytest.mark.slow
def test_a_cable_that_is_out_for_longer_ends_both_with_a_message_and_they_go_on_to_the_bit(
    machines, whole
):
    """As a machine without power does: each sees no more of the other, and nothing tells that it is gone."""
    launchers = train(machines, "k", "--ddp_timeout", "10")
    wait_for_step("k", 100)
    machines.cut()
    for machine, launcher in enumerate(launchers):
        wait_until(
            lambda: NOTICED in launcher.said and not trainers(machines, machine),
            seconds=10 + MARGIN,
        )
    machines.kill(0)
    machines.kill(1)  # its launcher asks the first one, in vain, for minutes
    machines.mend()
    assert_both_go_on(machines, whole)


# Slurm: its script as it is, with stand-ins that set Slurm's variables and start a task on each machine. What they do not
# prove: that Slurm grants, names and reaches nodes so, its limits, its network, when it sends which signal, the queue.

SBATCH = """#!/bin/bash
# sbatch SCRIPT [arguments]: what Slurm sets is set, and the script runs.
cpus=$(sed -n 's/^#SBATCH --cpus-per-task=//p' "$1")
export SLURM_JOB_NUM_NODES=2 SLURM_GPUS_PER_NODE=1
export SLURM_JOB_ID=4711 SLURM_JOB_NODELIST='node[1-2]' SLURM_CPUS_PER_TASK=$cpus SLURM_SUBMIT_DIR=$PWD
exec bash "$@"
"""
SCONTROL = """#!/bin/bash
[[ $1 == requeue ]] && echo "$*" >>requeued
[[ "$1 $2" == "show hostnames" ]] && printf 'node1\\nnode2\\n'
[[ "$1 $2" == "show job" ]] && echo "   PreemptEligibleTime=2026-11-21T10:00:00 PreemptTime=None"
exit 0
"""
# A task a node; a signal is handed on; --kill-on-bad-exit.
SRUN = """#!{python}
import os, signal, subprocess, sys, time
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
tasks = [
    subprocess.Popen([*enter, *command], env=os.environ | {{"SLURM_NODEID": str(number)}})
    for number, enter in enumerate({enter})
]
signal.signal(signal.SIGTERM, lambda number, frame: [task.send_signal(number) for task in tasks])
while None in (codes := [task.poll() for task in tasks]):
    if any(codes):
        [task.kill() for task in tasks]
    time.sleep(0.05)
sys.exit(max(codes, key=abs))
"""


@pytest.fixture
def slurm(machines, workspace):
    """Submit the script as a job of two nodes."""
    (workspace / "accelerate_configs").mkdir()
    (workspace / "accelerate_configs" / YAML.name).write_text(shrunk())
    (workspace / "train.py").symlink_to(ROOT / "train.py")
    folder = workspace / "bin"
    folder.mkdir()
    enter = json.dumps([machines.enter(machine) for machine in (0, 1)])
    for name, text in {
        "sbatch": SBATCH,
        "scontrol": SCONTROL,
        "srun": SRUN.format(python=sys.executable, enter=enter),
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = os.environ | {"PATH": path, "GLOO_SOCKET_IFNAME": DEVICE}
    return lambda *flags: Started([str(folder / "sbatch"), str(SLURM), *flags], given, workspace)


@pytest.mark.slow
def test_slurms_script_trains_on_both_nodes_and_its_queued_job_goes_on_to_the_bit(slurm, whole):
    job = slurm(*LONG, "--run_name", "s")
    wait_for_step("s", 100)
    job.process.send_signal(signal.SIGUSR1)  # 5 minutes before the time limit
    assert job.process.wait(60) == 0, job.said
    assert Path("requeued").read_text() == "requeue 4711\n"
    assert "the same command resumes from there" in job.said and len(losses_by_step("s")) < LAST
    job = slurm(*LONG, "--run_name", "s")
    assert job.process.wait(120) == 0, job.said
    assert "resumed from runs/s/checkpoints/step-" in job.said
    assert final_state("s", LAST) == whole


@pytest.mark.slow
def test_slurms_script_starts_both_nodes_again_when_one_trainer_is_killed(slurm, whole, machines):
    job = slurm(*LONG, "--run_name", "s")
    wait_for_step("s", 100)
    (pid,) = trainers(machines, 1)
    os.kill(pid, signal.SIGKILL)
    assert job.process.wait(120) == 0, job.said
    assert NOTICED in job.said and "resumed from runs/s/checkpoints/step-" in job.said
    assert final_state("s", LAST) == whole
