"""Train on two simulated machines: processes that die, a network that fails, and Slurm's script.

They are network namespaces of one host, so GPUs, NCCL, InfiniBand, two disks and two clocks are
not tested.
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
CONFIG = ROOT / "accelerate_configs/multi_node_2x8.yaml"
SLURM_SCRIPT = ROOT / "scripts/slurm.sh"
PYTHONPATH = f"{ROOT}:{ROOT / 'tests'}"
LAST_STEP = 300
LONG = (
    *TINY_RECIPE,
    *("--eval_steps", "0", "--sample_steps", "0"),
    *("--max_steps", str(LAST_STEP), "--save_steps", "20"),
)
MARGIN = 8  # seconds that a run needs to end on two busy cores, in addition to its time limit
LOST_PROCESS = "another process of this run died, was killed (memory?) or hangs"
RESUMED = "resumed from runs/{}/checkpoints/step-"


def small_config() -> str:
    """Return the configuration of two machines with a CPU process each: three values change.

    distributed_type remains MULTI_GPU, which uses torch's launcher; train.py takes CPUs and gloo
    if there is no GPU. With MULTI_CPU accelerate 1.15 leaves other processes to mpirun.
    """
    text = CONFIG.read_text()
    replacements = {
        "num_processes: 16": "num_processes: 2",
        "mixed_precision: bf16": 'mixed_precision: "no"',
        "dynamo_backend: INDUCTOR": 'dynamo_backend: "NO"',
    }
    for old, new in replacements.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def start_training(
    machines: TwoMachines,
    *flags: str,
    restarts: int = 0,
    **environment: str,
) -> list[Started]:
    """Start the run `k` on both machines with the command that the configuration documents."""
    Path("two.yaml").write_text(small_config())
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "two.yaml"]
    command += ["--rdzv_backend", "c10d", "--max_restarts", str(restarts)]
    command += ["--main_process_ip", HOSTS[0], "--main_process_port", str(PORT)]
    script = [str(ROOT / "train.py"), *LONG, *flags, "--run_name", "k"]
    environment = environment | {"PYTHONPATH": PYTHONPATH}
    launchers = []
    for machine in (0, 1):
        rank = ["--machine_rank", str(machine)]
        launchers.append(machines.start(machine, [*command, *rank, *script], **environment))
    return launchers


def exit_statuses(launchers: list[Started], seconds: float = 120) -> list[int]:
    """Wait for both launchers and return their exit statuses."""
    end = time.monotonic() + seconds
    statuses = []
    for launcher in launchers:
        statuses.append(launcher.process.wait(max(0.1, end - time.monotonic())))
    return statuses


def combined_output(launchers: list[Started]) -> str:
    """Return the output of both launchers."""
    return "".join(launcher.output for launcher in launchers)


def trainer_pids(machines: TwoMachines, machine: int) -> list[int]:
    """Return the ids of a machine's training processes, without their launcher."""
    pids = []
    for pid, command in machines.processes(machine).items():
        if "train.py" in command and "accelerate" not in command:
            pids.append(pid)
    return pids


def wait_for_step(run_name: str, step: int) -> None:
    """Wait until a run has logged this number of rows."""
    path = Path("runs") / run_name / "metrics.jsonl"
    wait_until(lambda: path.is_file() and path.read_text().count("\n") >= step, seconds=120)


def wait_for_lost_process(machines: TwoMachines, machine: int, launcher: Started) -> None:
    """Wait until a machine has reported the loss of the other and has ended its training."""
    wait_until(
        lambda: LOST_PROCESS in launcher.output and not trainer_pids(machines, machine),
        seconds=10 + MARGIN,
    )


def assert_resumed_run_is_exact(machines: TwoMachines, expected: dict) -> None:
    """Start both machines again and compare the result with that of an uninterrupted run."""
    launchers = start_training(machines)
    assert exit_statuses(launchers) == [0, 0], combined_output(launchers)
    assert RESUMED.format("k") in launchers[0].output
    assert final_state("k", LAST_STEP) == expected


@pytest.mark.slow
def test_two_machines_learn_like_one_process(finished_ddp_run, machines):
    """They read the windows of one process, and equal two processes on one machine bitwise."""
    environment = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": machines.address(0),
        "MASTER_PORT": str(PORT),
        "TORCHELASTIC_RUN_ID": "t",
        "ACCELERATE_USE_CPU": "true",
        "LEDGER": "apart.ledger",
        "PYTHONPATH": PYTHONPATH,
    }
    command = [sys.executable, RECORDED_TRAINING, *TINY_RECIPE, "--run_name", "apart"]

    processes = []
    for rank in (0, 1):
        processes.append(machines.start(rank, command, RANK=str(rank), **environment))
    wait_until(lambda: machines.processes(0) and machines.processes(1))
    assert exit_statuses(processes) == [0, 0], combined_output(processes)

    expected_windows = windows_by_step("whole.ledger")
    assert len(expected_windows) == 12
    assert windows_by_step("two.ledger") == expected_windows
    assert windows_by_step("apart.ledger") == expected_windows
    assert len(losses_by_step("apart")) == 12
    for name in ("train/loss", "eval/loss"):
        expected = losses_by_step("whole", name)
        assert losses_by_step("apart", name) == pytest.approx(expected, abs=1e-5)
    assert final_state("apart") == final_state("two")


@pytest.fixture
def uninterrupted(workspace, machines) -> dict:
    """The final state of an uninterrupted run of two processes on one machine.

    The test above shows that two machines compute the same.
    """
    run_script("train.py", *LONG, "--run_name", "whole", processes=2)
    return final_state("whole", LAST_STEP)


@pytest.mark.slow
def test_killed_trainer_ends_the_other(machines, uninterrupted):
    launchers = start_training(machines, "--ddp_timeout", "60")
    wait_for_step("k", 100)
    killed_at = time.monotonic()
    (pid,) = trainer_pids(machines, 1)
    os.kill(pid, signal.SIGKILL)

    assert exit_statuses(launchers, 60) == [1, 1]
    assert time.monotonic() - killed_at < MARGIN + 10  # long before the time limit
    assert LOST_PROCESS in launchers[0].output
    assert_resumed_run_is_exact(machines, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["trainer", "launcher"])
def test_launchers_restart_killed_trainer(machines, uninterrupted, first):
    """The trainer or the launcher of the other machine notices the loss first.

    A launcher that is first restarts its trainer, and does not count this as a restart.
    """
    shutdown = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    launchers = start_training(machines, "--ddp_timeout", "60", restarts=3, **shutdown)
    wait_for_step("k", 100)
    (other_pid,) = trainer_pids(machines, 0)
    (pid,) = trainer_pids(machines, 1)
    if first == "launcher":
        os.kill(other_pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)

    assert exit_statuses(launchers) == [0, 0], combined_output(launchers)
    if first == "trainer":
        assert LOST_PROCESS in launchers[0].output
    assert RESUMED.format("k") in combined_output(launchers)
    assert final_state("k", LAST_STEP) == uninterrupted


@pytest.mark.slow
def test_short_network_failure_does_not_end_training(machines, uninterrupted):
    launchers = start_training(machines, "--ddp_timeout", "30")
    wait_for_step("k", 100)
    machines.disconnect()
    time.sleep(5)
    rows = len(metrics_rows("k"))
    machines.reconnect()

    assert exit_statuses(launchers) == [0, 0], combined_output(launchers)
    assert rows < LAST_STEP
    assert LOST_PROCESS not in combined_output(launchers)
    assert final_state("k", LAST_STEP) == uninterrupted


@pytest.mark.slow
def test_long_network_failure_ends_both_runs(machines, uninterrupted):
    """A machine that loses power looks the same: packets are lost without a notification."""
    launchers = start_training(machines, "--ddp_timeout", "10")
    wait_for_step("k", 100)
    machines.disconnect()
    for machine in (0, 1):
        wait_for_lost_process(machines, machine, launchers[machine])
    # The second launcher would wait for the first one for minutes.
    machines.kill(0)
    machines.kill(1)
    machines.reconnect()

    assert_resumed_run_is_exact(machines, uninterrupted)


# Slurm's script runs unchanged. Stand-ins for Slurm's commands set its variables and start a task
# on each machine. They do not show how Slurm itself allocates and names nodes, applies limits,
# connects the network, sends signals and queues jobs.

# sbatch SCRIPT [ARGUMENTS]: set the variables and run the script.
SBATCH = """#!/bin/bash
cpus=$(sed -n 's/^#SBATCH --cpus-per-task=//p' "$1")
export SLURM_JOB_NUM_NODES=2 SLURM_GPUS_PER_NODE=1
export SLURM_JOB_ID=4711 SLURM_JOB_NODELIST='node[1-2]' SLURM_CPUS_PER_TASK=$cpus
export SLURM_SUBMIT_DIR=$PWD
exec bash "$@"
"""
SCONTROL = """#!/bin/bash
[[ $1 == requeue ]] && echo "$*" >>requeued
[[ "$1 $2" == "show hostnames" ]] && printf 'node1\\nnode2\\n'
[[ "$1 $2" == "show job" ]] && echo "   PreemptEligibleTime=2026-11-21T10:00:00 PreemptTime=None"
exit 0
"""
# One task per node. It forwards SIGTERM and behaves as with --kill-on-bad-exit.
SRUN = """#!{python}
import os, signal, subprocess, sys, time

def forward(number, frame):
    for task in tasks:
        task.send_signal(number)

command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
tasks = []
for node, prefix in enumerate({prefixes}):
    environment = os.environ | {{"SLURM_NODEID": str(node)}}
    tasks.append(subprocess.Popen([*prefix, *command], env=environment))
signal.signal(signal.SIGTERM, forward)
codes = [None]
while None in codes:
    codes = [task.poll() for task in tasks]
    if any(codes):
        for task in tasks:
            task.kill()
    time.sleep(0.05)
sys.exit(max(codes, key=abs))
"""


@pytest.fixture
def submit_job(machines, workspace):
    """Return a function that submits Slurm's script as a job of two nodes."""
    configs = workspace / "accelerate_configs"
    configs.mkdir()
    (configs / CONFIG.name).write_text(small_config())
    (workspace / "train.py").symlink_to(ROOT / "train.py")
    folder = workspace / "bin"
    folder.mkdir()
    prefixes = json.dumps([machines.enter(machine) for machine in (0, 1)])
    srun = SRUN.format(python=sys.executable, prefixes=prefixes)
    for name, text in {"sbatch": SBATCH, "scontrol": SCONTROL, "srun": srun}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "GLOO_SOCKET_IFNAME": DEVICE}

    def submit() -> Started:
        flags = [*LONG, "--run_name", "s"]
        command = [str(folder / "sbatch"), str(SLURM_SCRIPT), *flags]
        return Started(command, environment, workspace)

    return submit


@pytest.mark.slow
def test_slurm_job_is_requeued_before_time_limit(submit_job, uninterrupted):
    job = submit_job()
    wait_for_step("s", 100)
    job.process.send_signal(signal.SIGUSR1)  # Slurm sends it 5 minutes before the time limit
    assert job.process.wait(60) == 0, job.output
    assert Path("requeued").read_text() == "requeue 4711\n"
    assert "the same command resumes" in job.output
    assert len(losses_by_step("s")) < LAST_STEP

    job = submit_job()
    assert job.process.wait(120) == 0, job.output
    assert RESUMED.format("s") in job.output
    assert final_state("s", LAST_STEP) == uninterrupted


@pytest.mark.slow
def test_slurm_script_restarts_killed_trainer(submit_job, uninterrupted, machines):
    job = submit_job()
    wait_for_step("s", 100)
    (pid,) = trainer_pids(machines, 1)
    os.kill(pid, signal.SIGKILL)

    assert job.process.wait(120) == 0, job.output
    assert LOST_PROCESS in job.output
    assert RESUMED.format("s") in job.output
    assert final_state("s", LAST_STEP) == uninterrupted
