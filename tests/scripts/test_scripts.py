"""Launch scripts: which commands they run, in which order, and which errors stop them.

The programs that they start are replaced by shell programs that record their arguments.
"""

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT
from huggingface_hub import JobHardware
from huggingface_hub.cli.hf import app

from ursa_minor.recipe import command_line

RUN = ROOT / "scripts/run_gpt2_124m.sh"
SLURM = ROOT / "scripts/slurm.sh"
HF_JOBS = ROOT / "scripts/hf_jobs.sh"
SKYPILOT = ROOT / "scripts/skypilot.yaml"
SIGNED_URL = "https://me:PW@forge.example/x?token=SECRET"
REDACTED_URL = "https://redacted@forge.example/x?redacted"

FAILED_DRIVER = "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."
NVIDIA_SMI = """#!/bin/bash
[[ {count} == 0 ]] && {{ echo "{failed}"; exit 9; }}
for ((i = 0; i < {count}; i++)); do
    if [[ $1 == -L ]]; then echo "GPU $i: {name} (UUID: GPU-$i)"; else echo "{name}"; fi
done
"""
RECORDER = """#!/bin/bash
echo "{program} $*" >>"$LOG"
exit "${{{program}_status:-0}}"
"""
PYTHON = f"""#!/bin/bash
[[ $1 == -c ]] && exec {sys.executable} "$@"
echo "python $*" >>"$LOG"
exit "${{python_status:-0}}"
"""


def install_programs(folder: Path, **programs: str) -> dict[str, str]:
    """Write shell programs into a folder.

    Returns:
        The environment of a script that uses them. They write to the file LOG.
    """
    for name, text in programs.items():
        program = folder / name
        program.write_text(text)
        program.chmod(0o755)
    log = folder / "log"
    log.write_text("")
    return {"PATH": f"{folder}:/usr/bin:/bin", "LOG": str(log)}


def run_bash(
    script: Path, *flags: str, env: dict[str, str], cwd: Path = ROOT
) -> subprocess.CompletedProcess:
    """Run a shell script and return its exit status and output."""
    command = ["bash", str(script), *flags]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)


# ---- all shell scripts

SHELL_SCRIPTS = [*ROOT.glob("scripts/*.sh"), *ROOT.glob("benchmarks/*.sh")]
SHELL_SCRIPTS += [ROOT / ".ci/run", SKYPILOT]
BASH_4_SYNTAX = (
    r"(declare|local|typeset) -[An]|mapfile|readarray|\$\{\w+(,|\^|@)|&>>|\|&|coproc|=~ .*\("
)


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_script_runs_under_bash_of_macos(script):
    """In bash 3.2 an empty array is unset, and a pattern with a bracket must be in a variable."""
    text = script.read_text()

    assert not re.findall(BASH_4_SYNTAX, text)
    for array in re.findall(r"\b(\w+)=\(\)", text):
        assert not re.findall(rf'(?<!\+)"\$\{{{array}\[[@*]\]\}}"', text), array


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_script_stops_at_first_error(script):
    text = script.read_text()

    assert "\nset -euo pipefail\n" in text or script == SKYPILOT


# ---- run_gpt2_124m.sh


class ScriptRun(NamedTuple):
    """A finished script and the commands that it ran."""

    process: subprocess.CompletedProcess
    commands: list[str]


@pytest.fixture
def run_training_script(tmp_path) -> Callable[..., ScriptRun]:
    """Return a function that runs a copy of run_gpt2_124m.sh on a machine with these GPUs."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("ursa_minor", "accelerate_configs", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = tmp_path / "scripts" / RUN.name
    script.write_text(RUN.read_text())
    programs = {name: RECORDER.format(program=name) for name in ("accelerate", "hf")}
    programs["python"] = PYTHON

    def run(gpu="NVIDIA RTX A6000", count=1, flags=(), **environment) -> ScriptRun:
        programs["nvidia-smi"] = NVIDIA_SMI.format(name=gpu, count=count, failed=FAILED_DRIVER)
        env = install_programs(tmp_path / "bin", **programs) | {"HOME": str(tmp_path)}
        process = run_bash(script, *flags, env=env | environment)
        return ScriptRun(process, Path(env["LOG"]).read_text().splitlines())

    return run


CHECK = "python check_setup.py --recipe recipes/gpt2_124m.yaml"


def train_command(preset: str, launch_flags: str = "") -> str:
    """Return the training command with a preset of accelerate_configs."""
    launch = (
        f"accelerate launch --quiet --config_file accelerate_configs/{preset}.yaml{launch_flags}"
    )
    return f"{launch} train.py --recipe recipes/gpt2_124m.yaml"


@pytest.mark.parametrize(
    ("gpu", "count", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 8, train_command("a100_x8")),
        ("NVIDIA H200", 8, train_command("h200", " --multi_gpu --num_processes 8")),
        ("none", 0, train_command("cpu")),
    ],
)
def test_dry_run_prints_commands_for_these_gpus(
    run_training_script, tmp_path, gpu, count, expected
):
    process, commands = run_training_script(gpu, count, DRY_RUN="1")

    assert process.returncode == 0
    assert process.stdout.splitlines() == [CHECK, expected]
    assert not commands
    assert not (tmp_path / "runs").exists()


def test_commands_use_the_given_recipe(run_training_script, tmp_path):
    recipe = "recipes/gpt2_350m.yaml"
    environment = {"PUSH": "1", "RECIPE": recipe, "PREPARE": "1"}

    dry_run = run_training_script(DRY_RUN="1", **environment)
    run = run_training_script(HF_TOKEN="x", **environment)

    train = f"{train_command('a6000')} --push_to_hub true --hub_model_id gpt2_350m"
    expected = [
        CHECK.replace("recipes/gpt2_124m.yaml", recipe),
        f"python prepare_data.py --recipe {recipe}",
        train.replace("recipes/gpt2_124m.yaml", recipe),
    ]
    assert dry_run.process.stdout.splitlines() == expected
    assert run.commands == expected
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["gpt2_350m.lock"]


def test_dry_run_is_quoted_and_redacted(run_training_script):
    flags = ["--data_files", SIGNED_URL, "--x", "a b's $c\nd"]

    process, _ = run_training_script(DRY_RUN="1", HF_TOKEN="hf_secret_of_mine", flags=flags)

    words = shlex.split(process.stdout)
    assert words[-4:] == ["--data_files", REDACTED_URL, "--x", "a b's $c\nd"]
    assert not re.search("PW|SECRET", process.stdout + process.stderr)


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        ({"flags": ["--recipe=recipes/gpt2_350m.yaml"]}, "RECIPE=FILE in the environment"),
        ({"RECIPE": "recipes/none.yaml"}, "RECIPE=recipes/none.yaml: there is no such file"),
        ({"HUB_MODEL_ID": "me/-x"}, "error: HUB_MODEL_ID: "),
        ({"RECIPE": "recipes/--x.yaml"}, "error: RECIPE: "),
    ],
    ids=["recipe_flag", "missing_recipe", "model_id_like_a_flag", "recipe_like_a_flag"],
)
def test_bad_argument_is_rejected_before_any_command(run_training_script, arguments, phrase):
    process, commands = run_training_script(HF_TOKEN="x", **arguments)

    assert process.returncode == 2
    assert not process.stdout
    assert process.stderr.count("\n") == 1
    assert phrase in process.stderr
    assert not commands


PUSHED_TRAIN = (
    f"{train_command('a6000')} --push_to_hub true --hub_model_id you/gpt2 --save_steps 500"
)


@pytest.mark.parametrize(
    ("environment", "status", "expected"),
    [
        ({"python_status": "1"}, 1, [CHECK]),
        ({"accelerate_status": "143"}, 143, [CHECK, PUSHED_TRAIN]),
        ({}, 0, [CHECK, PUSHED_TRAIN]),
    ],
    ids=["failing_check", "interrupted_training", "finished_training"],
)
def test_status_is_that_of_last_command(run_training_script, environment, status, expected):
    environment = environment | {"HUB_MODEL_ID": "you/gpt2", "HF_TOKEN": "hf_secret"}

    process, commands = run_training_script(flags=["--save_steps", "500"], **environment)

    assert process.returncode == status
    assert commands == expected
    assert "hf_secret" not in process.stdout + process.stderr


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        ({"count": 0}, "no GPU"),
        ({"HUB_MODEL_ID": "me/x"}, "HF_TOKEN"),
        ({"PUSH": "1"}, "HF_TOKEN"),
    ],
    ids=["no_gpu", "model_id_without_token", "push_without_token"],
)
def test_missing_requirement_stops_before_any_command(run_training_script, arguments, phrase):
    process, commands = run_training_script(**arguments)

    assert process.returncode == 1
    assert phrase in process.stderr
    assert not commands


def test_second_start_of_a_run_is_rejected(run_training_script, tmp_path):
    (tmp_path / "runs").mkdir()
    with open(tmp_path / "runs/gpt2_124m.lock", "w") as lock:
        descriptor = lock.fileno()
        subprocess.run(["flock", "-n", str(descriptor)], pass_fds=[descriptor], check=True)

        process, commands = run_training_script()

    assert process.returncode == 1
    assert "another run" in process.stderr
    assert not commands


def test_price_of_a_call_is_printed(run_training_script):
    process, _ = run_training_script(PRICE_PER_MACHINE_HOUR="2.5")

    assert re.search(r"this call: 0\.0\d h x 2\.5 = 0\.0", process.stdout)


# ---- slurm.sh

SRUN = """#!/bin/bash
printf '%s\\n' "srun $*" >>"$LOG"
while [[ $1 == -* ]]; do shift; done
SLURM_NODEID=1 exec "$@"
"""
# With wait=1 it runs until SIGTERM, as a trainer does. With saves=1 it then writes the file that
# reports an interrupted run.
TRAINER = """#!/bin/bash
echo "${0##*/} $*" >>"$LOG"
[[ -z ${wait:-} ]] && exit 0
stop() {
    echo stopped >>"$LOG"
    [[ -n ${saves:-} ]] && touch "$URSA_MINOR_STOPPED_FILE"
    exit "${ends_with:-143}"
}
trap stop TERM
echo ready >>"$LOG"
for ((i = 0; i < 200; i++)); do sleep 0.05; done
"""
SCONTROL = """#!/bin/bash
[[ $1 == requeue ]] && echo "scontrol $*" >>"$LOG"
[[ "$1 $2" == "show hostnames" ]] && printf 'node1\\nnode2\\n'
[[ "$1 $2" == "show job" ]] && echo "   PreemptEligibleTime=2026-11-21T10:00:00 PreemptTime=None"
exit 0
"""


class SlurmJob(NamedTuple):
    """A running Slurm script and the log of the commands that it runs."""

    process: subprocess.Popen
    log: Path

    def finish(self) -> list[str]:
        """Wait for a successful end and return the commands."""
        assert self.process.wait(20) == 0
        return self.log.read_text().splitlines()

    def requeues(self) -> list[str]:
        """Return the commands that requeued the job."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if line.startswith("scontrol requeue")]


@pytest.fixture
def start_slurm_job(tmp_path) -> Callable[..., SlurmJob]:
    """Return a function that starts slurm.sh as job 4711 on two nodes."""
    env = install_programs(
        tmp_path, srun=SRUN, accelerate=TRAINER, python=TRAINER, scontrol=SCONTROL
    )
    env["SLURM_JOB_NODELIST"] = "node[1-2]"
    env["SLURM_JOB_ID"] = "4711"
    env["SLURM_CPUS_PER_TASK"] = "32"

    def start(*flags, **environment) -> SlurmJob:
        command = ["bash", str(SLURM), *flags]
        process = subprocess.Popen(command, env=env | environment, cwd=ROOT, text=True)
        return SlurmJob(process, Path(env["LOG"]))

    return start


TRAIN_FLAGS = ("--recipe", "recipes/gpt2_1558m.yaml", "--run_name", "a b")


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (4, 4)])
def test_slurm_starts_one_launcher_per_node(start_slurm_job, nodes, gpus):
    size = {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_GPUS_PER_NODE": f"h100:{gpus}"}

    commands = start_slurm_job(*TRAIN_FLAGS, **size).finish()

    assert any("srun --cpus-per-task=32 --kill-on-bad-exit=1 bash -c" in line for line in commands)
    assert commands[-1].endswith(f"train.py {' '.join(TRAIN_FLAGS)}")
    words = commands[-1].removeprefix("accelerate launch ").split()
    args = launch_command_parser().parse_args(words)
    assert args.config_file.endswith("multi_node_2x8.yaml")
    assert (ROOT / args.config_file).is_file()
    assert args.num_machines == nodes
    assert args.num_processes == nodes * gpus
    assert args.max_restarts == 3
    assert args.machine_rank == 1
    assert args.main_process_ip == "node1"
    assert args.main_process_port == 24711
    assert args.rdzv_backend == ("c10d" if nodes > 1 else "static")


def test_slurm_starts_one_gpu_without_launcher(start_slurm_job):
    size = {"SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_PER_NODE": "h100:1"}

    commands = start_slurm_job(*TRAIN_FLAGS, **size).finish()

    assert commands[-1] == f"python train.py {' '.join(TRAIN_FLAGS)}"


def test_slurm_dry_run_prints_command_with_container():
    environment = {
        "DRY_RUN": "1",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_GPUS_PER_NODE": "4",
        "CONTAINER": "our image.sqsh",
        "CONTAINER_MOUNTS": "/scratch:/scratch",
        "ACCELERATE_YAML": "x.yaml",
        "PATH": "/usr/bin:/bin",  # without Slurm
    }

    process = run_bash(SLURM, "--run_name", "a b", env=environment)

    assert process.returncode == 0
    assert process.stderr == ""
    words = shlex.split(process.stdout)
    assert words[:3] == ["srun", "--cpus-per-task=32", "--kill-on-bad-exit=1"]
    assert "--container-image=our image.sqsh" in words
    assert f"--container-mounts={ROOT}:{ROOT},/scratch:/scratch" in words
    assert words[words.index("--config_file") + 1] == "x.yaml"
    assert words[-3:] == ["train.py", "--run_name", "a b"]


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "1"}], ids=["no job", "no srun"])
def test_slurm_script_without_slurm_is_one_error(environment):
    process = run_bash(SLURM, env=environment | {"PATH": "/usr/bin:/bin"})

    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.count("\n") == 1
    assert "sbatch scripts/slurm.sh" in process.stderr
    assert "DRY_RUN=1" in process.stderr


@pytest.mark.parametrize("size", [{}, {"SLURM_JOB_NUM_NODES": "4"}, {"SLURM_GPUS_PER_NODE": "4"}])
def test_slurm_dry_run_reports_assumed_sizes(size):
    environment = size | {"DRY_RUN": "1", "PATH": "/usr/bin:/bin"}

    process = run_bash(SLURM, env=environment)

    assert process.returncode == 0
    assert "SLURM_JOB_NUM_NODES=2 SLURM_GPUS_PER_NODE=8" in process.stderr


def test_slurm_sets_environment_of_trainer(start_slurm_job, tmp_path):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text('echo "venv" >>"$LOG"\n')
    print_environment = 'env | grep -E "IFNAME|CACHE_DIR|ELASTIC" | sort >>"$LOG"'
    (tmp_path / "accelerate").write_text(f"#!/bin/bash\n{print_environment}\n")
    settings = {"INTERFACE": "ib0", "NODE_CACHE": "/local", "VENV": str(tmp_path / "venv")}

    lines = start_slurm_job(**settings).finish()

    assert lines[-6:] == [
        "venv",
        "GLOO_SOCKET_IFNAME=ib0",
        "NCCL_SOCKET_IFNAME=ib0",
        "TORCHINDUCTOR_CACHE_DIR=/local/inductor",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240",
        "TRITON_CACHE_DIR=/local/triton",
    ]


REQUEUED = ["scontrol requeue 4711"]
ARRAY_TASK = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("environment", "status", "requeues"),
    [
        ({"ends_with": "143"}, 0, REQUEUED),
        ({"ends_with": "1", "saves": "1"}, 0, REQUEUED),  # accelerate launch after SIGTERM
        ({"ends_with": "143", "REQUEUE": "0"}, 0, []),
        ({"ends_with": "143", **ARRAY_TASK}, 0, ["scontrol requeue 4700_3"]),
        ({"ends_with": "0"}, 0, []),  # the training ended in the last minutes
        ({"ends_with": "1"}, 1, []),
        ({"ends_with": "2"}, 2, []),
    ],
    ids=["stopped", "saved", "requeue_off", "array_task", "finished", "failed", "bad_input"],
)
def test_slurm_requeues_only_an_interrupted_job(start_slurm_job, environment, status, requeues):
    job = start_slurm_job(wait="1", **environment)
    deadline = time.monotonic() + 20
    while not job.log.read_text().endswith("ready\n") and time.monotonic() < deadline:
        time.sleep(0.02)

    job.process.send_signal(signal.SIGUSR1)

    assert job.process.wait(20) == status
    assert "stopped" in job.log.read_text().splitlines()
    assert job.requeues() == requeues
    assert not list(ROOT.glob(".stopped-*"))


@pytest.mark.parametrize("status", [138, 140, 152])
def test_slurm_requeues_a_warned_step(start_slurm_job, tmp_path, status):
    """With --signal=USR1 instead of B:USR1, the signal ends the step."""
    (tmp_path / "accelerate").write_text(f"#!/bin/bash\nexit {status}\n")

    job = start_slurm_job()

    assert job.process.wait(20) == 0
    assert job.requeues() == REQUEUED


@pytest.mark.parametrize("status", [0, 1, 143, 137])
def test_slurm_does_not_requeue_an_ended_step(start_slurm_job, tmp_path, status):
    (tmp_path / "accelerate").write_text(f"#!/bin/bash\nexit {status}\n")

    job = start_slurm_job()

    assert job.process.wait(20) == status
    assert job.requeues() == []


def test_slurm_requests_warning_before_time_limit():
    directives = re.findall(r"^#SBATCH --(\S+)", SLURM.read_text(), re.MULTILINE)

    expected = {"nodes=2", "ntasks-per-node=1", "gpus-per-node=8", "requeue", "signal=B:USR1@300"}
    assert expected <= set(directives)


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, 8),
        ({"SLURM_GPUS_PER_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2,h100:1"}, 3),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_NODE": "8"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS": "a100:8"}, 4),
    ],
)
def test_slurm_starts_one_process_per_gpu(environment, gpus):
    environment = environment | {"DRY_RUN": "1", "PATH": "/usr/bin:/bin"}

    process = run_bash(SLURM, env=environment)

    words = shlex.split(process.stdout)
    assert words[words.index("--num_processes") + 1] == str(2 * gpus), process.stderr


@pytest.mark.parametrize(
    ("environment", "phrase"),
    [
        ({"SLURM_GPUS_ON_NODE": "0"}, "allocated no GPU"),
        ({"SLURM_GPUS_PER_NODE": "a100"}, "number of GPUs from 'a100'"),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS": "6"}, "6 GPUs are not divided evenly"),
    ],
)
def test_slurm_rejects_unusable_gpu_counts(environment, phrase):
    settings = {"DRY_RUN": "1", "SLURM_JOB_NUM_NODES": "2", "PATH": "/usr/bin:/bin"}
    environment = environment | settings

    process = run_bash(SLURM, env=environment)

    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("error: ")
    assert phrase in process.stderr
    assert process.stderr.count("\n") == 1


# ---- hf_jobs.sh, read by the parser of hf

# Records the name of the program and its arguments, separated by NUL. hf also prints them.
WORD_RECORDER = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" >"$LOG"
[[ $0 != */hf ]] || echo "$@" >&2
exit "${hf_status:-0}"
"""
TRAIN_FROM_HUB = (
    "bash scripts/run_gpt2_124m.sh --hub_strategy checkpoint --resume_from_checkpoint hub://me/gpt2"
)
IMAGE = "python:3.12"
JOB = {"GIT_URL": "https://forge.example/ursa-minor", "HUB_MODEL_ID": "me/gpt2"}


class Submission(NamedTuple):
    """A finished hf_jobs.sh and the arguments that hf got."""

    process: subprocess.CompletedProcess
    words: list[str]


def submit(tmp_path: Path, *flags: str, **environment: str) -> Submission:
    """Run hf_jobs.sh with a replaced hf."""
    env = install_programs(tmp_path, hf=WORD_RECORDER) | {"HF_TOKEN": "hf_secret"}
    process = run_bash(HF_JOBS, *flags, env=env | environment)
    recorded = Path(env["LOG"]).read_text().split("\0")
    return Submission(process, recorded[1:-1])


def parse_with_hf(words: list[str]) -> dict:
    """Return the parameters that the command line of huggingface_hub reads from these arguments."""
    command = app
    while isinstance(command, click.Group):
        word, *words = words
        command = command.get_command(click.Context(command), word)
        assert command, f"hf has no command {word}"
    params = command.make_context("hf", words).params
    # hf takes an unknown flag for the image.
    assert params["image"] == IMAGE
    return params


def test_hf_parses_the_submitted_job(tmp_path):
    flags = ("--save_steps", "500", "--run_name", "a b")

    process, words = submit(tmp_path, *flags, **JOB)

    assert process.returncode == 0
    job = parse_with_hf(words)
    assert not job["dry_run"]
    assert job["attempts"] == 3
    assert job["timeout"] == "12h"
    assert job["flavor"] in [hardware.value for hardware in JobHardware]
    assert job["secrets"] == ["HF_TOKEN"]
    expected = {"HUB_MODEL_ID=me/gpt2", "RECIPE=recipes/gpt2_124m.yaml", "GIT_REVISION=main"}
    assert expected <= set(job["env"])
    assert job["command"][:2] == ("bash", "-c")
    assert job["command"][3:] == ("job", *flags)
    assert "hf_secret" not in " ".join(words) + process.stdout + process.stderr


def test_dry_run_of_job_is_passed_to_hf(tmp_path):
    _, words = submit(tmp_path, **JOB, DRY_RUN="1", TIMEOUT="2h")

    assert parse_with_hf(words)["dry_run"]


def test_status_and_redacted_command_of_hf_are_reported(tmp_path):
    process, words = submit(tmp_path, "--data_files", SIGNED_URL, **JOB, hf_status="3")

    assert process.returncode == 3
    assert words[-1] == SIGNED_URL
    assert process.stdout.endswith(f"--data_files {REDACTED_URL}\n")
    assert not re.search("PW|SECRET", process.stdout + process.stderr)


def test_job_installs_environment_and_trains_from_hub(tmp_path):
    _, words = submit(tmp_path, "--save_steps", "500", **JOB)
    command = parse_with_hf(words)["command"]
    (tmp_path / "bin").mkdir()
    recorder = '#!/bin/sh\necho "${0##*/} $*" >>"$LOG"\n'
    venv = "ursa-minor/.venv/bin"
    git = f"{recorder}mkdir -p {venv} && touch {venv}/activate\n"
    env = install_programs(tmp_path / "bin", git=git, make=recorder, bash=recorder)

    env = env | JOB | {"GIT_REVISION": "v1"}
    subprocess.run(["/bin/bash", *command[1:]], env=env, cwd=tmp_path, check=True)

    assert Path(env["LOG"]).read_text().splitlines() == [
        f"git clone --depth 1 --branch v1 -- {JOB['GIT_URL']} ursa-minor",
        "make environment",
        f"{TRAIN_FROM_HUB} --save_steps 500",
    ]


UNSAFE_URLS = [
    "ext::sh -c id",
    "file:///etc",
    "../x",
    "http://forge.example/x",
    "git@-oX:x",
    "https://-x/y",
    "https://",
    "ssh://git@-oProxyCommand=id/x",
    "https://forge.example/x\n--x",
    "https://secret@forge.example/x",
    "ssh://me:secret@forge.example/x",
    "https://forge.example/x?token=secret@",
]
VARIABLES = ["GIT_URL", "GIT_REVISION", "HUB_MODEL_ID", "RECIPE", "FLAVOR", "TIMEOUT", "ATTEMPTS"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GIT_URL", ""),
        ("HUB_MODEL_ID", ""),
        *((name, "--upload-pack=id") for name in VARIABLES),
        *(("GIT_URL", url) for url in UNSAFE_URLS),
    ],
)
def test_unsafe_value_of_a_job_is_rejected(tmp_path, name, value):
    process, words = submit(tmp_path, **JOB | {name: value})

    assert process.returncode == 2
    assert process.stderr.startswith(f"error: {name}: ")
    assert "secret@" not in process.stderr
    assert not words


@pytest.mark.parametrize(
    "url", ["ssh://git@forge.example:22/me/x.git", "git@forge.example:me/x.git"]
)
def test_ssh_url_of_a_job_is_accepted(tmp_path, url):
    _, words = submit(tmp_path, **JOB | {"GIT_URL": url})

    assert f"GIT_URL={url}" in words


# ---- skypilot.yaml


@pytest.fixture
def run_on_spot_machine(tmp_path) -> Callable[..., list[str]]:
    """Return a function that runs skypilot.yaml and returns the words of its last command."""
    task = yaml.safe_load(SKYPILOT.read_text())
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    env = install_programs(tmp_path, bash=WORD_RECORDER, accelerate=WORD_RECORDER)
    env["HUB_MODEL_ID"] = "me/gpt2"
    env |= {name: value for name, value in task["envs"].items() if value}

    def run(**environment) -> list[str]:
        command = ["/bin/bash", "-c", task["run"]]
        subprocess.run(command, env=env | environment, cwd=tmp_path, check=True)
        return Path(env["LOG"]).read_text().split("\0")[:-1]

    return run


def test_one_spot_machine_trains_from_hub(run_on_spot_machine):
    assert run_on_spot_machine(SKYPILOT_NUM_NODES="1") == TRAIN_FROM_HUB.split()


def test_two_spot_machines_are_launched_together(run_on_spot_machine, monkeypatch):
    monkeypatch.chdir(ROOT)

    words = run_on_spot_machine(
        SKYPILOT_NUM_NODES="2",
        SKYPILOT_NODE_RANK="1",
        SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
    )

    args = launch_command_parser().parse_args(words[2:])
    assert args.config_file == "accelerate_configs/multi_node_2x8.yaml"
    assert args.rdzv_backend == "c10d"
    assert args.machine_rank == 1
    assert args.main_process_ip == "10.0.0.1"
    assert args.main_process_port == 29500
    recipe, _, _ = command_line.parse_training(args.training_script_args)
    assert recipe.hub.pushes_checkpoints
    assert recipe.hub.hub_model_id == "me/gpt2"
    assert recipe.saving.resume_from_checkpoint == "hub://me/gpt2"
    assert recipe.saving.name == "gpt2_124m"
