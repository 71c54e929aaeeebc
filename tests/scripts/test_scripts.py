"""What the launch scripts do, in which order, and when they stop; the programs that they start are pretended."""

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT
from huggingface_hub import JobHardware
from huggingface_hub.cli.hf import app

from ursa_minor.recipe import command_line

RUN, SLURM = ROOT / "scripts/run_gpt2_124m.sh", ROOT / "scripts/slurm.sh"
HF_JOBS, SKY = ROOT / "scripts/hf_jobs.sh", ROOT / "scripts/skypilot.yaml"

NVIDIA_SMI = """#!/bin/bash
[[ {count} == 0 ]] && {{ echo "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."; exit 9; }}
for ((i = 0; i < {count}; i++)); do
    if [[ $1 == -L ]]; then echo "GPU $i: {name} (UUID: GPU-$i)"; else echo "{name}"; fi
done
"""
NOTE = """#!/bin/bash
echo "{program} $*" >>"$LOG"
exit "${{{program}_status:-0}}"
"""
PYTHON = f"""#!/bin/bash
[[ $1 == -c ]] && exec {sys.executable} "$@"
echo "python $*" >>"$LOG"
exit "${{python_status:-0}}"
"""


def pretend(folder: Path, **programs: str) -> dict[str, str]:
    """Put programs in place of others; return the environment of a script among them, which has LOG to write to."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "log").write_text("")
    return {"PATH": f"{folder}:/usr/bin:/bin", "LOG": str(folder / "log")}


@pytest.fixture
def machine(tmp_path):
    """A copy of the script beside the real ursa_minor/ and YAMLs; ``run`` starts it among pretended programs."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("ursa_minor", "accelerate_configs", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = tmp_path / "scripts" / RUN.name
    script.write_text(RUN.read_text())
    programs = {name: NOTE.format(program=name) for name in ("accelerate", "hf")} | {
        "python": PYTHON
    }

    def run(card="NVIDIA RTX A6000", count=1, flags=(), **environment):
        given = {"nvidia-smi": NVIDIA_SMI.format(name=card, count=count), **programs}
        kept = pretend(tmp_path / "bin", **given) | {"HOME": str(tmp_path)}
        done = subprocess.run(
            ["bash", str(script), *flags], env=kept | environment, capture_output=True, text=True
        )
        return done, Path(kept["LOG"]).read_text().splitlines()

    return run


CHECK = "python check_setup.py --recipe recipes/gpt2_124m.yaml"
TRAIN = "accelerate launch --config_file accelerate_configs/{}.yaml{} train.py --recipe recipes/gpt2_124m.yaml"
PUSH = " --push_to_hub true --hub_model_id {}"


SHELL_SCRIPTS = [*ROOT.glob("scripts/*.sh"), *ROOT.glob("benchmarks/*.sh"), ROOT / ".ci/run", SKY]
SINCE_BASH_4 = (
    r"(declare|local|typeset) -[An]|mapfile|readarray|\$\{\w+(,|\^|@)|&>>|\|&|coproc|=~ .*\("
)


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_a_script_stops_at_the_first_error_and_runs_under_the_bash_of_macos(script):
    """3.2: an empty array is unset there, and a pattern with a bracket is read from a variable only."""
    text = script.read_text()
    assert "\nset -euo pipefail\n" in text or script == SKY
    assert not re.findall(SINCE_BASH_4, text)
    for name in re.findall(r"\b(\w+)=\(\)", text):
        assert not re.findall(rf'(?<!\+)"\$\{{{name}\[[@*]\]\}}"', text), name


def test_a_dry_run_prints_the_commands_for_these_cards_and_runs_none(machine, tmp_path):
    for card, count, preset, more in [
        ("NVIDIA A100-SXM4-80GB", 8, "a100_x8", ""),
        ("NVIDIA H200", 8, "h200", " --multi_gpu --num_processes 8"),
        ("none", 0, "cpu", ""),
    ]:
        done, ran = machine(card, count, DRY_RUN="1")
        assert done.returncode == 0 and not ran and not (tmp_path / "runs").exists()
        assert done.stdout.splitlines() == [CHECK, TRAIN.format(preset, more)]


def test_another_recipe_has_its_own_check_data_run_folder_lock_and_repository(machine, tmp_path):
    recipe = "recipes/gpt2_350m.yaml"
    wanted = [
        line.replace("recipes/gpt2_124m.yaml", recipe)
        for line in (CHECK, TRAIN.format("a6000", ""))
    ]
    wanted[1] += PUSH.format("gpt2_350m")
    wanted.insert(1, f"python prepare_data.py --recipe {recipe}")
    given = {"PUSH": "1", "RECIPE": recipe, "PREPARE": "1"}
    assert machine(DRY_RUN="1", **given)[0].stdout.splitlines() == wanted
    assert machine(HF_TOKEN="x", **given)[1] == wanted
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["gpt2_350m.lock"]


SIGNED, SHOWN = (
    "https://me:PW@forge.example/x?token=SECRET",
    "https://redacted@forge.example/x?redacted",
)


def test_a_dry_run_prints_what_can_be_pasted_and_no_secret(machine):
    done, _ = machine(
        DRY_RUN="1",
        HF_TOKEN="hf_secret_of_mine",
        flags=["--data_files", SIGNED, "--x", "a b's $c\nd"],
    )
    assert shlex.split(done.stdout)[-4:] == ["--data_files", SHOWN, "--x", "a b's $c\nd"]
    assert not re.search("PW|SECRET", done.stdout + done.stderr)


def test_a_recipe_or_a_name_that_a_command_would_not_hear_of_or_take_for_a_flag_is_refused(machine):
    for given, words in [
        ({"flags": ["--recipe=recipes/gpt2_350m.yaml"]}, "give RECIPE=FILE in the environment"),
        ({"RECIPE": "recipes/none.yaml"}, "RECIPE=recipes/none.yaml: there is no such file"),
        ({"HUB_MODEL_ID": "me/-x"}, "error: HUB_MODEL_ID: a name that begins with -"),
        ({"RECIPE": "recipes/--x.yaml"}, "error: RECIPE: a name that begins with -"),
    ]:
        done, ran = machine(HF_TOKEN="x", **given)
        assert done.returncode == 2 and not ran and not done.stdout
        assert done.stderr.count("\n") == 1 and words in done.stderr


def test_a_failing_check_stops_before_training_whose_status_is_the_scripts_and_which_may_be_started_again(
    machine,
):
    hub, train = (
        {"HUB_MODEL_ID": "you/gpt2", "HF_TOKEN": "hf_secret"},
        TRAIN.format("a6000", "") + PUSH.format("you/gpt2"),
    )
    for status, more, wanted in (
        (1, {"python_status": "1"}, [CHECK]),
        (143, {"accelerate_status": "143"}, [CHECK, f"{train} --save_steps 500"]),
        (0, {}, [CHECK, f"{train} --save_steps 500"]),
    ):
        done, ran = machine(**hub, **more, flags=["--save_steps", "500"])
        assert (
            done.returncode == status
            and ran == wanted
            and "hf_secret" not in done.stdout + done.stderr
        )


def test_what_would_waste_the_hours_is_refused_first_and_the_price_of_the_others_is_shown(
    machine, tmp_path
):
    (tmp_path / "runs").mkdir()
    with open(tmp_path / "runs/gpt2_124m.lock", "w") as lock:
        subprocess.run(["flock", "-n", str(lock.fileno())], pass_fds=[lock.fileno()], check=True)
        refused = [("another run", machine())]
    refused += [
        ("no GPU", machine(count=0)),
        ("HF_TOKEN", machine(HUB_MODEL_ID="me/x")),
        ("HF_TOKEN", machine(PUSH="1")),
    ]
    for words, (done, ran) in refused:
        assert done.returncode == 1 and not ran and words in done.stderr
    assert re.search(
        r"this call: 0\.0\d h x 2\.5 = 0\.0", machine(PRICE_PER_MACHINE_HOUR="2.5")[0].stdout
    )


SRUN = """#!/bin/bash
printf '%s\\n' "srun $*" >>"$LOG"
while [[ $1 == -* ]]; do shift; done
SLURM_NODEID=1 exec "$@"
"""
TRAINER = """#!/bin/bash
echo "${0##*/} $*" >>"$LOG"
[[ -z ${wait:-} ]] && exit 0
trap 'echo stopped >>"$LOG"; [[ -n ${saves:-} ]] && touch "$URSA_MINOR_STOPPED_FILE"; exit "${ends_with:-143}"' TERM
echo ready >>"$LOG"
for ((i = 0; i < 200; i++)); do sleep 0.05; done
"""
SCONTROL = """#!/bin/bash
[[ $1 == requeue ]] && echo "scontrol $*" >>"$LOG"
[[ "$1 $2" == "show hostnames" ]] && printf 'node1\\nnode2\\n'
[[ "$1 $2" == "show job" ]] && echo "   PreemptEligibleTime=2026-11-21T10:00:00 PreemptTime=None"
exit 0
"""


@pytest.fixture
def cluster(tmp_path):
    """Start the Slurm script among a pretended srun, scontrol and accelerate."""
    kept = pretend(tmp_path, srun=SRUN, accelerate=TRAINER, python=TRAINER, scontrol=SCONTROL)
    log = Path(kept["LOG"])
    kept |= {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "32"}

    def start(*flags, **environment):
        return subprocess.Popen(
            ["bash", str(SLURM), *flags], env=kept | environment, cwd=ROOT, text=True
        ), log

    return start


def test_slurm_starts_one_launcher_a_node_with_its_rank_and_flags_that_exist(cluster):
    for nodes, count in [(1, 1), (1, 8), (4, 4)]:
        size = {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_GPUS_PER_NODE": f"h100:{count}"}
        process, log = cluster("--recipe", "recipes/gpt2_1558m.yaml", "--run_name", "a b", **size)
        assert process.wait(20) == 0
        assert "srun --cpus-per-task=32 --kill-on-bad-exit=1 bash -c" in log.read_text()
        line = log.read_text().splitlines()[-1]
        assert line.endswith("train.py --recipe recipes/gpt2_1558m.yaml --run_name a b")
        if nodes * count == 1:
            assert line.startswith("python train.py ")  # it needs no launcher
            continue
        args = launch_command_parser().parse_args(line.removeprefix("accelerate launch ").split())
        assert (ROOT / args.config_file).is_file() and args.config_file.endswith(
            "multi_node_2x8.yaml"
        )
        assert (args.num_machines, args.num_processes, args.max_restarts) == (
            nodes,
            nodes * count,
            3,
        )
        assert (args.machine_rank, args.main_process_ip, args.main_process_port) == (
            1,
            "node1",
            24711,
        )
        assert args.rdzv_backend == ("c10d" if nodes > 1 else "static")


def test_slurms_dry_run_prints_the_command_with_container_and_needs_no_slurm():
    given = {
        "DRY_RUN": "1",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_GPUS_PER_NODE": "4",
        "PATH": "/usr/bin:/bin",
    }
    given |= {
        "CONTAINER": "our image.sqsh",
        "CONTAINER_MOUNTS": "/scratch:/scratch",
        "ACCELERATE_YAML": "x.yaml",
    }
    done = subprocess.run(
        ["bash", SLURM, "--run_name", "a b"], env=given, cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    words = shlex.split(done.stdout)
    assert words[:3] == ["srun", "--cpus-per-task=32", "--kill-on-bad-exit=1"]
    assert {
        "--container-image=our image.sqsh",
        f"--container-mounts={ROOT}:{ROOT},/scratch:/scratch",
    } < {*words}
    assert (
        words[-3:] == ["train.py", "--run_name", "a b"]
        and words[words.index("--config_file") + 1] == "x.yaml"
    )


def test_slurms_variables_reach_the_trainer_on_its_node(cluster, tmp_path):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text('echo "venv" >>"$LOG"\n')
    (tmp_path / "accelerate").write_text(
        '#!/bin/bash\nenv | grep -E "IFNAME|CACHE_DIR|ELASTIC" | sort >>"$LOG"\n'
    )
    given = {"INTERFACE": "ib0", "NODE_CACHE": "/local", "VENV": str(tmp_path / "venv")}
    process, log = cluster(**given)
    assert process.wait(20) == 0
    assert log.read_text().splitlines()[-6:] == [
        "venv",
        "GLOO_SOCKET_IFNAME=ib0",
        "NCCL_SOCKET_IFNAME=ib0",
        "TORCHINDUCTOR_CACHE_DIR=/local/inductor",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240",
        "TRITON_CACHE_DIR=/local/triton",
    ]


def warn_slurm(cluster, number=signal.SIGUSR1, **environment):
    """Send a signal to the batch script while the trainer runs; return the script's exit status and its requeues."""
    process, log = cluster(wait="1", **environment)
    deadline = time.monotonic() + 20
    while not log.read_text().endswith("ready\n") and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    status = process.wait(20)
    lines = log.read_text().splitlines()
    assert "stopped" in lines
    return status, [line for line in lines if line.startswith("scontrol requeue")]


AGAIN = ["scontrol requeue 4711"]
TASK = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"ends_with": "143"}, (0, AGAIN)),
        ({"ends_with": "1", "saves": "1"}, (0, AGAIN)),  # as accelerate launch ends after SIGTERM
        ({"ends_with": "143", "REQUEUE": "0"}, (0, [])),
        ({"ends_with": "143", **TASK}, (0, ["scontrol requeue 4700_3"])),
        ({"ends_with": "0"}, (0, [])),  # it finished in the last minutes
        ({"ends_with": "1"}, (1, [])),
        ({"ends_with": "2"}, (2, [])),
    ],
)
def test_slurm_requeues_only_an_interrupted_job(cluster, environment, expected):
    assert warn_slurm(cluster, **environment) == expected
    assert not list(ROOT.glob(".stopped-*"))


@pytest.mark.parametrize(
    ("status", "requeues"),
    [(0, []), (1, []), (143, []), (137, []), (138, AGAIN), (140, AGAIN), (152, AGAIN)],
)
def test_slurm_requeues_a_step_that_was_warned_itself(cluster, tmp_path, status, requeues):
    """With --signal=USR1 instead of B:USR1. A step that ends by itself, or by scancel, is not queued again."""
    (tmp_path / "accelerate").write_text(f"#!/bin/bash\nexit {status}\n")
    process, log = cluster()
    assert process.wait(20) == (0 if requeues else status)
    assert [
        line for line in log.read_text().splitlines() if line.startswith("scontrol requeue")
    ] == requeues


def test_slurm_asks_for_a_warning_before_the_time_limit():
    asked = set(re.findall(r"^#SBATCH --(\S+)", SLURM.read_text(), re.MULTILINE))
    assert {
        "nodes=2",
        "ntasks-per-node=1",
        "gpus-per-node=8",
        "requeue",
        "signal=B:USR1@300",
    } <= asked


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
def test_slurm_starts_one_process_per_allocated_gpu(environment, gpus):
    given = {"DRY_RUN": "1", "PATH": "/usr/bin:/bin", **environment}
    done = subprocess.run(["bash", SLURM], env=given, cwd=ROOT, capture_output=True, text=True)
    words = shlex.split(done.stdout)
    assert words[words.index("--num_processes") + 1] == str(2 * gpus), done.stderr


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_GPUS_ON_NODE": "0"}, "error: Slurm allocated no GPU on this node."),
        ({"SLURM_GPUS_PER_NODE": "a100"}, "error: cannot read the number of GPUs from 'a100'"),
        (
            {"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS": "6"},
            "error: the 6 GPUs are not divided evenly among 2 nodes.",
        ),
    ],
)
def test_slurm_rejects_gpus_that_it_cannot_use(environment, message):
    given = {"DRY_RUN": "1", "PATH": "/usr/bin:/bin", **environment}
    done = subprocess.run(["bash", SLURM], env=given, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


# A job of Hugging Face, and a spot machine: read by the programs that would start them, and not run on a cloud.

WORDS = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" >"$LOG"
[[ $0 != */hf ]] || echo "$@" >&2
exit "${hf_status:-0}"
"""
STARTS = (
    "bash scripts/run_gpt2_124m.sh --hub_strategy checkpoint --resume_from_checkpoint hub://me/gpt2"
)
IMAGE = "python:3.12"


def submit(tmp_path, *flags, **environment):
    """Start hf_jobs.sh with a pretended hf; return what came of it and the words that hf got."""
    kept = pretend(tmp_path, hf=WORDS) | {"HF_TOKEN": "hf_secret"}
    done = subprocess.run(
        ["bash", str(HF_JOBS), *flags], env=kept | environment, capture_output=True, text=True
    )
    return done, Path(kept["LOG"]).read_text().split("\0")[1:-1]


def read_by_hf(words):
    """What the parser of huggingface_hub's own hf makes of a command; it is not run."""
    command = app
    while isinstance(command, click.Group):
        word, *words = words
        command = command.get_command(click.Context(command), word)
        assert command, f"hf knows no {word}"
    params = command.make_context("hf", words).params
    assert params["image"] == IMAGE, (
        f"hf takes {params['image']} for the image"
    )  # as it does an unknown flag
    return params


WHERE = {"GIT_URL": "https://forge.example/ursa-minor", "HUB_MODEL_ID": "me/gpt2"}


def test_hf_reads_the_job_with_its_limit_and_shows_no_secret_and_its_status_is_kept(tmp_path):
    done, words = submit(tmp_path, "--save_steps", "500", "--run_name", "a b", **WHERE)
    job = read_by_hf(words)
    assert done.returncode == 0 and not job["dry_run"] and job["attempts"] == 3
    assert job["timeout"] == "12h" and job["flavor"] in [one.value for one in JobHardware]
    assert (
        job["secrets"] == ["HF_TOKEN"]
        and "hf_secret" not in " ".join(words) + done.stdout + done.stderr
    )
    assert set(job["env"]) >= {
        "HUB_MODEL_ID=me/gpt2",
        "RECIPE=recipes/gpt2_124m.yaml",
        "GIT_REVISION=main",
    }
    flags = ("--save_steps", "500", "--run_name", "a b")
    assert job["command"][:2] == ("bash", "-c") and job["command"][3:] == ("job", *flags)
    assert read_by_hf(submit(tmp_path, **WHERE, DRY_RUN="1", TIMEOUT="2h")[1])["dry_run"]
    done, words = submit(tmp_path, "--data_files", SIGNED, **WHERE, hf_status="3")
    assert done.returncode == 3 and words[-1] == SIGNED
    assert done.stdout.endswith(f"--data_files {SHOWN}\n") and not re.search(
        "PW|SECRET", done.stdout + done.stderr
    )


def test_the_job_makes_the_environment_and_goes_on_from_the_hub(tmp_path):
    """Its own shell, among pretended programs."""
    command = read_by_hf(submit(tmp_path, "--save_steps", "500", **WHERE)[1])["command"]
    (tmp_path / "bin").mkdir()
    note = '#!/bin/sh\necho "${0##*/} $*" >>"$LOG"\n'
    made = "mkdir -p ursa-minor/.venv/bin && touch ursa-minor/.venv/bin/activate\n"
    job = (
        pretend(tmp_path / "bin", git=note + made, make=note, bash=note)
        | WHERE
        | {"GIT_REVISION": "v1"}
    )
    subprocess.run(["/bin/bash", *command[1:]], env=job, cwd=tmp_path, check=True)
    clone = f"git clone --depth 1 --branch v1 -- {WHERE['GIT_URL']} ursa-minor"
    assert Path(job["LOG"]).read_text().splitlines() == [
        clone,
        "make environment",
        f"{STARTS} --save_steps 500",
    ]


BAD_URLS = [
    "ext::sh -c id",
    "file:///etc",
    "../x",
    "http://forge.example/x",
    "git@-oX:x",
    "https://-x/y",
    "https://",
]
BAD_URLS += [
    "ssh://git@-oProxyCommand=id/x",
    "https://forge.example/x\n--x",
    "https://secret@forge.example/x",
]
BAD_URLS += ["ssh://me:secret@forge.example/x", "https://forge.example/x?token=secret@"]
NAMES = ["GIT_URL", "GIT_REVISION", "HUB_MODEL_ID", "RECIPE", "FLAVOR", "TIMEOUT", "ATTEMPTS"]


def test_a_value_that_git_would_run_that_shows_a_password_or_is_a_flag_is_refused_and_an_address_of_ssh_is_not(
    tmp_path,
):
    values = [
        ("GIT_URL", ""),
        ("HUB_MODEL_ID", ""),
        *((name, "--upload-pack=id") for name in NAMES),
    ]
    for name, value in values + [("GIT_URL", url) for url in BAD_URLS]:
        done, got = submit(tmp_path, **WHERE | {name: value})
        assert done.returncode == 2 and not got and done.stderr.startswith(f"error: {name}: "), (
            value
        )
        assert "secret@" not in done.stderr
    for address in ("ssh://git@forge.example:22/me/x.git", "git@forge.example:me/x.git"):
        assert f"GIT_URL={address}" in submit(tmp_path, **WHERE | {"GIT_URL": address})[1]


@pytest.fixture
def spot(tmp_path):
    """Start what skypilot.yaml runs on a machine, among pretended programs; return its commands' words."""
    task = yaml.safe_load(SKY.read_text())
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    kept = pretend(tmp_path, bash=WORDS, accelerate=WORDS) | {"HUB_MODEL_ID": "me/gpt2"}
    kept |= {name: value for name, value in task["envs"].items() if value}

    def run(**sky):
        subprocess.run(["/bin/bash", "-c", task["run"]], env=kept | sky, cwd=tmp_path, check=True)
        return Path(kept["LOG"]).read_text().split("\0")[:-1]

    return run


def test_a_spot_machine_checks_and_trains_from_the_hub_and_two_are_launched_as_the_yaml_for_two_says(
    spot, monkeypatch
):
    assert spot(SKYPILOT_NUM_NODES="1") == STARTS.split()
    given = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    _, _, *words = spot(**given)
    args = launch_command_parser().parse_args(words)
    assert (
        args.config_file == "accelerate_configs/multi_node_2x8.yaml" and args.rdzv_backend == "c10d"
    )
    assert (args.machine_rank, args.main_process_ip, args.main_process_port) == (
        1,
        "10.0.0.1",
        29500,
    )
    monkeypatch.chdir(ROOT)
    recipe, _, _ = command_line.parse_training(args.training_script_args)
    assert recipe.hub.pushes_checkpoints and recipe.hub.hub_model_id == "me/gpt2"
    assert (
        recipe.saving.resume_from_checkpoint == "hub://me/gpt2"
        and recipe.saving.name == "gpt2_124m"
    )
