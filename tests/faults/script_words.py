"""The scripts' own work, word for word: what each starts, with what, in which order, and what it leaves behind.

The programs are stand-ins that write down what they are given. What is expected stands here, and is not read from the tree.
"""

import contextlib
import hashlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import shell_doors
import yaml
from shell_doors import CANARY, GOOD, HUB_JOB, MACHINE, NODES, SLURM

TOKEN = {"HF_TOKEN": f"hf_{CANARY * 3}"}
A6000, UNKNOWN = "NVIDIA RTX A6000", "NVIDIA Graphics Device"
NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
# (a card's name, how many, the YAML, whether --multi_gpu has to be added)
CARDS = ((A6000, 1, "a6000", False), (A6000, 2, "a6000_x2", False), (A6000, 4, "a6000_x4", False))
CARDS += (
    (A6000, 3, "a6000", True),
    ("NVIDIA H100 80GB HBM3", 8, "h100_x8", False),
    (UNKNOWN, 1, "conservative", False),
)
CARDS += (
    ("Tesla T4", 2, "t4", True),
    (UNKNOWN, 8, "conservative", True),
    ("NVIDIA GeForce RTX 4090", 2, "rtx4090_x2", False),
)
ADDITION = "e624"
SMI = """#!/bin/bash
printf "%s\\0" nvidia-smi "$@" >>"$LOG.smi"
{driver}
for word; do [[ $word == --id=* ]] && ids=${{word#--id=}}; done
count={count}; [[ -n ${{ids:-}} ]] && count=$(tr ',' '\\n' <<<"$ids" | grep -c .)
for ((i = 0; i < count; i++)); do
    if [[ $1 == -L ]]; then echo "GPU $i: {name} (UUID: GPU-$i)"
    elif [[ "$*" == *utilization* ]]; then echo "$i, {name}, 97 %, 1 MiB, 2 MiB, 287.50 W, 61"
    else echo "{name}"; fi
done
"""
# A trainer that takes its time over the checkpoint, and notes each signal.
SLOW = """
import fcntl, os, signal, sys, time
lock = open(sys.argv[1], "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.truncate(0)
lock.write(f"{os.getpid()}\\n")
lock.flush()
def stop(number, _):
    open(sys.argv[2], "a").write(f"{number}\\n")
    if sys.argv[3] != "never":
        time.sleep(float(sys.argv[3]))
        open(sys.argv[2] + ".saved", "w").close()
        os._exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, stop)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def cases() -> Iterator[tuple[str, Callable]]:
    """What each script starts with which words, in friendly use and where something is missing."""
    for dry, change in itertools.product((False, True), HUB_JOBS):
        yield f"hf_jobs.sh: dry {dry}, {change}", lambda folder, dry=dry, change=change: _hub_job(folder, dry, change)
    for missing in ("GIT_URL", "HUB_MODEL_ID"):
        yield f"hf_jobs.sh: without {missing}", lambda folder, missing=missing: _missing(folder, missing)
    for fails in ("", "git clone", "make environment", "bash scripts"):
        yield (
            f"hf_jobs.sh: in the job {fails or 'nothing'} fails",
            lambda folder, fails=fails: _in_the_job(folder, fails),
        )
    for nodes, fails in itertools.product(("1", "2"), ("", "accelerate", "bash scripts")):
        yield f"skypilot.yaml: {nodes}, {fails}", lambda folder, nodes=nodes, fails=fails: _sky(folder, nodes, fails)
    for card, more in itertools.product(CARDS, RUNS):
        for dry in (False, True):
            title = f"run_gpt2_124m.sh: dry {dry}, {card[1]} x {card[0]}, {more}"
            yield title, lambda folder, card=card, more=more, dry=dry: _machine(folder, card, more, dry)
    for title, more, status in REFUSED:
        for dry in (False, True):
            yield f"run_gpt2_124m.sh: {title}, dry {dry}", lambda folder, a=(more, status, dry): _refused(folder, *a)
    for driver in ("", NO_DRIVER):
        for dry in (False, True):
            yield (
                f"run_gpt2_124m.sh: no card, {driver[:9]}, dry {dry}",
                lambda folder, a=(driver, dry): _no_card(folder, *a),
            )
    yield "run_gpt2_124m.sh: twice at once", _twice
    for number, flags in itertools.product(
        ("7", "4711", "123456"), ((), ("--recipe=r.yaml",), ("-x", "a b", "", "$y"))
    ):
        yield f"slurm: job {number}, {flags}", lambda folder, number=number, flags=flags: _nodes(folder, number, flags)
    for limit in ("x", "-1", "1.5", "1e3", "\x1b[2J", "²"):
        yield f"stop.py: LIMIT={limit!r}", lambda folder, limit=limit: _limit(folder, limit)
    for first, second, names in itertools.product(("0", "0.7", "never"), ("", "0.3", "never"), (0, 1, 2)):
        title = f"stop.py: runs that take {first}, {second or 'none'}; {names} named"
        yield title, lambda folder, a=(first, second, names): _ends(folder, *a)
    yield "stop.py: a run that is not there", lambda folder: _nothing(folder, "runs/no", 1)
    yield "stop.py: nothing runs", lambda folder: _nothing(folder, "", 0)
    for target, card in itertools.product(("train", "ddp-train", "post-train"), (*CARDS, None, NO_DRIVER)):
        for more in ({}, {"RECIPE": "recipes/own_text.yaml"}, {"FLAGS": "--run_name 'a b'"}, {"GPUS": "1"}):
            title = f"make {target}: {card and card[:2]}, {more}"
            yield title, lambda folder, a=(target, card, more): _target(folder, *a)
    for card in (CARDS[0], CARDS[1], None, NO_DRIVER):
        yield f"make gpu-status: {card and card[:2]}", lambda folder, card=card: _status(folder, card)
    for status in ("0", "1", "2"):
        yield f"make check-setup: status {status}", lambda folder, status=status: _check(folder, status)
    yield "make clean", _clean
    for before in (False, True):
        yield f"addition.py: a second time {before}", lambda folder, before=before: _addition(folder, before)


def _place(folder: Path, card: tuple | str | None) -> Path:
    """A folder with the scripts, their stand-ins, and an nvidia-smi that knows a card, fails with words, or is missing."""
    shell_doors._environment_of(folder)
    shutil.copy(Path(os.environ["FAULTS_TREE"]) / "recipes" / "quickstart.yaml", folder / "recipes")
    smi = folder / "bin" / "nvidia-smi"
    if isinstance(card, tuple):
        smi.write_text(SMI.format(driver="", name=card[0], count=card[1]))
    elif card:
        smi.write_text(SMI.format(driver=f'echo "{card}"; exit 9', name="", count=0))
    else:
        smi.unlink()
    return folder


def _other(found: list, wanted: list) -> str | None:
    return None if found == wanted else f"starts {found}, not {wanted}"


HUB_JOBS = ({}, {"FLAVOR": "t4-small"}, {"TIMEOUT": "90m"}, {"ATTEMPTS": "9"}, {"RECIPE": "recipes/a.yaml"})
HUB_JOBS += ({"GIT_REVISION": "v1"}, {"HUB_MODEL_ID": "org/na.me"}, {"GIT_URL": "git@h:x/y.git"})


def _hub_job(folder: Path, dry: bool, change: dict) -> str | None:
    given = {
        "FLAVOR": "h200",
        "TIMEOUT": "12h",
        "ATTEMPTS": "3",
        "RECIPE": "recipes/gpt2_124m.yaml",
        "GIT_REVISION": "main",
    }
    given |= GOOD | change
    flags = ("--save_steps", "500", "--run_name", "a b", "")
    how = GOOD | TOKEN | change | {"DRY_RUN": "1" if dry else "0", "SAYS": f"the token is {TOKEN['HF_TOKEN']}\\n"}
    done = shell_doors._run(_place(folder, None), *HUB_JOB, *flags, **how)
    if why := shell_doors._judge(done, folder, refused=False):
        return why
    words = shell_doors._words(folder)
    wanted = ["hf", "jobs", "run", *(["--dry-run"] if dry else []), "--detach", "--name"]
    wanted += [given["HUB_MODEL_ID"].rpartition("/")[2], "--flavor", given["FLAVOR"], "--timeout", given["TIMEOUT"]]
    wanted += ["--attempts", given["ATTEMPTS"], "--secrets", "HF_TOKEN"]
    for name in ("HUB_MODEL_ID", "RECIPE", "GIT_URL", "GIT_REVISION"):
        wanted += ["--env", f"{name}={given[name]}"]
    wanted += ["--", "python:3.12", "bash", "-c"]
    return _other(words[: len(wanted)], wanted) or _other(words[len(wanted) + 1 :], ["job", *flags])


def _missing(folder: Path, missing: str) -> str | None:
    done = shell_doors._run(_place(folder, None), *HUB_JOB, **{name: GOOD[name] for name in GOOD if name != missing})
    if done.code != 2 or not done.stderr.startswith(f"error: {missing}: "):
        return f"exit status {done.code}: {done.stderr[-300:]}"
    return _other(shell_doors._words(folder), [])


def _job_script(folder: Path) -> list[str]:
    """Return the words behind the image of a job that hf_jobs.sh submits."""
    shell_doors._run(folder, *HUB_JOB, "--a", "b c", **GOOD)
    words = shell_doors._words(folder)
    (folder / "log").unlink()
    return words[words.index("python:3.12") + 1 :]


def _bash_stub(folder: Path, fails: str) -> None:
    """Programs of the machine that a job runs on: git, make, and a bash that notes the script that it is given."""
    bin_folder = folder / "bin"
    for name in ("git", "make"):
        (bin_folder / name).write_text(shell_doors.WORDS_OF.format(name=name))
    script = shell_doors.WORDS_OF.format(name="bash").replace(
        "printf", '[[ $1 == -c ]] && exec /bin/bash "$@"\nprintf', 1
    )
    (bin_folder / "bash").write_text(
        script.replace("#!/bin/bash", f"#!/bin/bash\nFAILS={shlex.quote(fails)} STATUS=7", 1)
    )
    for name in ("git", "make", "bash"):
        (bin_folder / name).chmod(0o755)


def _in_the_job(folder: Path, fails: str) -> str | None:
    command = _job_script(_place(folder, None))
    _bash_stub(folder, fails)
    (folder / "ursa-minor" / ".venv" / "bin").mkdir(parents=True)
    (folder / "ursa-minor" / ".venv" / "bin" / "activate").write_text("printf '%s\\0' activated >>\"$LOG\"\n")
    job = {"GIT_URL": "https://h/x", "GIT_REVISION": "v 1", "HUB_MODEL_ID": "me/x y", "FAILS": fails, "STATUS": "7"}
    done = shell_doors._run(folder, str(folder / "bin" / "bash"), *command[1:], **job)
    steps = [["git", "clone", "--depth", "1", "--branch", "v 1", "--", "https://h/x", "ursa-minor"]]
    steps += [["make", "environment"], ["activated"]]
    steps += [["bash", "scripts/run_gpt2_124m.sh", "--hub_strategy", "checkpoint", "--resume_from_checkpoint"]]
    steps[-1] += ["hub://me/x y", "--a", "b c"]
    last = next((i for i, step in enumerate(steps) if fails and " ".join(step).startswith(fails)), len(steps) - 1)
    wanted = list(itertools.chain(*steps[: last + 1]))
    if done.code != (7 if fails else 0):
        return f"exit status {done.code}: {done.stderr[-300:]}"
    return _other(shell_doors._words(folder), wanted)


def _sky(folder: Path, nodes: str, fails: str) -> str | None:
    task = yaml.safe_load((Path(os.environ["FAULTS_TREE"]) / "scripts" / "skypilot.yaml").read_text())
    if (
        task["secrets"] != {"HF_TOKEN": None}
        or "HF_TOKEN" in task["envs"]
        or task["setup"].strip() != "make environment"
    ):
        return "the token is no secret of the task, or its setup is another"
    _bash_stub(_place(folder, None), fails)
    (folder / "bin" / "activate").write_text("")
    given = {"SKYPILOT_NUM_NODES": nodes, "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    given |= {"HUB_MODEL_ID": "me/x y", "RECIPE": "a b.yaml", "FAILS": fails, "STATUS": "7"}
    done = shell_doors._run(folder, "/bin/bash", "-c", task["run"], **given)
    resume = ["--hub_strategy", "checkpoint", "--resume_from_checkpoint", "hub://me/x y"]
    wanted = ["bash", "scripts/run_gpt2_124m.sh", *resume]
    if nodes == "2":
        wanted = [
            "accelerate",
            "launch",
            "--config_file",
            "accelerate_configs/multi_node_2x8.yaml",
            "--rdzv_backend",
            "c10d",
        ]
        wanted += ["--max_restarts", "3", "--machine_rank", "1", "--main_process_ip", "10.0.0.1", "--main_process_port"]
        wanted += [
            "29500",
            "train.py",
            "--recipe",
            "a b.yaml",
            "--push_to_hub",
            "true",
            "--hub_model_id",
            "me/x y",
            *resume,
        ]
    failed = 7 if fails and " ".join(wanted).startswith(fails) else 0
    if done.code != failed:
        return f"exit status {done.code}: {done.stderr[-300:]}"
    return _other(shell_doors._words(folder), wanted)


RUNS = (
    {},
    {"PUSH": "1"},
    {"HUB_MODEL_ID": "me/x"},
    {"PREPARE": "1"},
    {"PRICE_PER_MACHINE_HOUR": "3600"},
    {"PUSH": "0"},
)


def _machine_words(card: tuple, more: dict, flags: tuple) -> list[str]:
    recipe = ["--recipe", "recipes/quickstart.yaml"]
    wanted = ["python", "check_setup.py", *recipe]
    wanted += ["python", "prepare_data.py", *recipe] if "PREPARE" in more else []
    wanted += ["accelerate", "launch", "--config_file", f"accelerate_configs/{card[2]}.yaml"]
    wanted += ["--multi_gpu", "--num_processes", str(card[1])] if card[3] else []
    pushed = more.get("HUB_MODEL_ID") or ("quickstart" if more.get("PUSH") == "1" else "")
    wanted += ["train.py", *recipe, *(["--push_to_hub", "true", "--hub_model_id", pushed] if pushed else [])]
    return wanted + list(flags)


def _machine(folder: Path, card: tuple, more: dict, dry: bool) -> str | None:
    _place(folder, card)
    url = f"https://h/x?token={CANARY}"
    flags = ("--data_files", url if dry else "a b", "--run_name", "", "it's")
    how = {"RECIPE": "recipes/quickstart.yaml", "DRY_RUN": "1" if dry else "0"} | TOKEN | more
    done = shell_doors._run(folder, *MACHINE, *flags, **how)
    if why := shell_doors._judge(done, folder, refused=False):
        return why
    wanted = _machine_words(card, more, flags)
    if dry:
        if shell_doors._words(folder) or list((folder / "runs").iterdir()):
            return f"a dry run starts or makes something: {shell_doors._words(folder)}"
        printed = shlex.split(done.stdout)
        place = printed.index("--data_files") + 1 if "--data_files" in printed else 0
        if place and printed[place].startswith("https://h/x"):
            printed[place] = url
        return _other(printed, wanted)
    if "PRICE_PER_MACHINE_HOUR" in more and "x 3600 = " not in done.stdout:
        return f"no price is printed: {done.stdout[-200:]}"
    return _other(shell_doors._words(folder), wanted)


REFUSED = (
    *(
        (f"{name}={value!r}", {name: value}, 2)
        for name in ("HUB_MODEL_ID", "RECIPE")
        for value in ("-x", "--x", "me/-x", "/-")
    ),
    ("no such recipe", {"RECIPE": "recipes/no.yaml"}, 2),
    ("a recipe that is a folder", {"RECIPE": "recipes"}, 2),
    ("another recipe's flag", {"FLAGS": "--recipe x"}, 2),
    ("another recipe's flag, joined", {"FLAGS": "--recipe=x"}, 2),
    ("a push without a token", {"PUSH": "1", "HF_TOKEN": ""}, 1),
    ("a repository without a token", {"HUB_MODEL_ID": "me/x", "HF_TOKEN": ""}, 1),
)


def _refused(folder: Path, more: dict, status: int, dry: bool) -> str | None:
    _place(folder, CARDS[0])
    how = {"RECIPE": "recipes/quickstart.yaml", "DRY_RUN": "1" if dry else "0", "PREPARE": "1"} | TOKEN | more
    flags = how.pop("FLAGS", "").split()
    done = shell_doors._run(folder, *MACHINE, *flags, **how)
    if status == 1 and dry:  # a token is not asked for where nothing is pushed
        return None if done.code == 0 else f"exit status {done.code}: {done.stderr[-300:]}"
    if done.code != status or len(done.stderr.strip().splitlines()) != 1 or done.stdout:
        return f"exit status {done.code}, not {status} and one line: {done.stderr[-300:]}{done.stdout[-300:]}"
    if list((folder / "runs").iterdir()):
        return "something is made"
    return _other(shell_doors._words(folder), [])


def _no_card(folder: Path, driver: str, dry: bool) -> str | None:
    how = {"RECIPE": "recipes/quickstart.yaml", "DRY_RUN": "1" if dry else "0", "PREPARE": "1"}
    done = shell_doors._run(_place(folder, driver or None), *MACHINE, **how)
    if done.code != (0 if dry else 1) or "lists no card" not in done.stderr:
        return f"exit status {done.code}: {done.stderr[-300:]}"
    if dry and "accelerate_configs/cpu.yaml" not in done.stdout:
        return f"prints another YAML: {done.stdout[-300:]}"
    return _other(shell_doors._words(folder), [])


def _twice(folder: Path) -> str | None:
    """The second call is refused while the first trains, and starts when that has ended."""
    _place(folder, CARDS[0])
    waits = '#!/bin/bash\n[[ -n ${WAITS:-} ]] && { echo >"$LOG.up"; read -r _ <"$LOG.pipe"; }\nexit 0\n'
    (folder / "bin" / "accelerate").write_text(waits)
    os.mkfifo(folder / "log.pipe")
    kept = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), "LOG": str(folder / "log"), "WAITS": "1"}
    how = {"cwd": folder, "env": kept | {"RECIPE": "recipes/quickstart.yaml"}, "stdin": subprocess.DEVNULL}
    first = subprocess.Popen([*MACHINE], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **how)
    try:
        while not (folder / "log.up").exists() and first.poll() is None:
            time.sleep(0.02)
        second = shell_doors._run(folder, *MACHINE, RECIPE="recipes/quickstart.yaml")
        (folder / "log.pipe").write_text("go\n")
        first.wait(shell_doors.SECONDS)
    finally:
        first.kill()
        first.wait()
    third = shell_doors._run(folder, *MACHINE, RECIPE="recipes/quickstart.yaml")
    found = (second.code, "another run" in second.stderr, first.returncode, third.code)
    return None if found == (1, True, 0, 0) else f"refused, words, first, third: {found}"


def _nodes(folder: Path, number: str, flags: tuple) -> str | None:
    stand_in = (
        shell_doors.WORDS_OF.format(name="accelerate")
        + 'printf "%s" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" >"$LOG.seconds"\n'
    )
    (_place(folder, None) / "bin" / "accelerate").write_text(stand_in)
    submitted = folder / "elsewhere"
    submitted.mkdir()
    given = SLURM | {"SLURM_JOB_ID": number, "SLURM_CPUS_PER_TASK": "3", "SLURM_SUBMIT_DIR": str(submitted)}
    done = shell_doors._run(folder, *NODES, *flags, **given)
    if why := shell_doors._judge(done, folder, refused=False):
        return why
    words = shell_doors._words(folder)
    srun, launch = words.index("srun"), words.index("accelerate")
    wanted = ["launch", "--config_file", "accelerate_configs/multi_node_2x8.yaml", "--machine_rank", "0"]
    wanted += ["--main_process_ip", "node1", "--main_process_port", str(20000 + int(number) % 20000)]
    wanted += ["--rdzv_backend", "c10d", "--max_restarts", "3", "train.py", *flags]
    end = launch + 1 + len(wanted)
    if {"--cpus-per-task=3", "--kill-on-bad-exit=1"} - {*words[srun:launch]}:
        return f"srun is given {words[srun:launch]}"
    if "requeue" in words:
        return "a job that is done queues again"
    if int((folder / "log.seconds").read_text() or 0) < 60:
        return "a trainer that stops has too little time to save"
    return _other(words[launch + 1 : end], wanted)


@contextlib.contextmanager
def _slow(folder: Path, name: str, seconds: str) -> Iterator[subprocess.Popen]:
    lock = folder / "runs" / name / ".lock"
    lock.parent.mkdir(parents=True)
    command = [sys.executable, "-c", SLOW, str(lock), str(folder / f"{name}.signals"), seconds]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd="/")
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()


def _limit(folder: Path, limit: str) -> str | None:
    with _slow(_place(folder, None), "a", "0"):
        done = shell_doors._run(folder, sys.executable, "scripts/stop.py", LIMIT=limit)
        if done.code != 2 or not done.stderr.startswith("error: LIMIT=") or len(done.stderr.splitlines()) != 1:
            return f"exit status {done.code}: {done.stderr[-300:]}"
        if "\x1b" in done.stderr:
            return "an escape is printed"
        return "the run is asked to stop" if (folder / "a.signals").exists() else None


def _ends(folder: Path, first: str, second: str, names: int) -> str | None:
    """Each run that is named, or all, gets one SIGTERM; 0 only when their checkpoints are there."""
    _place(folder, None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_slow(folder, "a", first))
        if second:
            stack.enter_context(_slow(folder, "b", second))
        named = ["runs/a", "runs/b"][: min(names, 2 if second else 1)]
        done = shell_doors._run(folder, sys.executable, "scripts/stop.py", *named, LIMIT="2")
        meant = {"a": first} | ({"b": second} if second and names != 1 else {})
        for name in "ab":
            got = (folder / f"{name}.signals").read_text().split() if (folder / f"{name}.signals").exists() else []
            if got != ([str(int(signal.SIGTERM))] if name in meant else []):
                return f"{name} got the signals {got}"
        late = [name for name, seconds in meant.items() if seconds == "never"]
        for name in meant:
            if name not in late and not (folder / f"{name}.signals.saved").exists():
                return f"does not wait for {name}'s checkpoint"
            if (f"runs/{name}: stopped" in done.stdout) != (name not in late):
                return f"says of {name}: {done.stdout!r}"
            if (f"error: runs/{name} has not ended" in done.stderr) != (name in late):
                return f"says of {name}: {done.stderr!r}"
        return None if done.code == int(bool(late)) else f"exit status {done.code}: {done.stderr[-300:]}"


def _nothing(folder: Path, name: str, status: int) -> str | None:
    (_place(folder, None) / "runs" / "old").mkdir()
    (folder / "runs" / "old" / ".lock").write_text("1\n")
    done = shell_doors._run(folder, "make", "-s", "stop", f"RUN={name}", f"PYTHON={sys.executable}")
    wanted = "error: runs/no: " if status else "nothing of yours is running"
    code = 2 * status if done.code else 0  # make's own
    return (
        None
        if done.code == code and wanted in done.stdout + done.stderr
        else f"{done.code}: {done.stderr}{done.stdout}"
    )


def _target(folder: Path, target: str, card: tuple | str | None, more: dict) -> str | None:
    _place(folder, card)
    (folder / "bin" / "accelerate").write_text(
        shell_doors.WORDS_OF.format(name="accelerate") + 'printf "%s" "${CUDA_VISIBLE_DEVICES-unset}" >"$LOG.cards"\n'
    )
    done = shell_doors._run(folder, "make", "-s", target, *(f"{name}={value}" for name, value in more.items()))
    if done.code != 0:
        return f"exit status {done.code}: {done.stderr[-300:]}"
    found = card if isinstance(card, tuple) else None
    flags = shlex.split(more.get("FLAGS", ""))
    recipe = more.get("RECIPE", "recipes/quickstart.yaml")
    count = 0 if found is None else 1 if "GPUS" in more else found[1]
    single = {c[0]: c[2] for c in reversed(CARDS)} | {"NVIDIA H100 80GB HBM3": "h100"}
    single |= {"NVIDIA GeForce RTX 4090": "rtx4090"}
    one = f"accelerate_configs/{single[found[0]] if found else 'cpu'}.yaml"
    launch = ["accelerate", "launch", "--config_file"]
    if target == "train":
        wanted = [*launch, one, "train.py", "--recipe", recipe, *flags]
    elif target == "post-train":
        wanted = [
            "python",
            "scripts/addition.py",
            *launch,
            one,
            "train.py",
            "--recipe",
            "recipes/addition.yaml",
            "python",
        ]
        wanted += ["post_train.py", "--config", "recipes/post/addition.yaml", *flags]
    elif not found:
        wanted = ["torchrun", "--nproc_per_node", "2", "train.py", "--recipe", recipe, *flags]
    else:
        several = [] if count == 1 or not found[3] else ["--multi_gpu", "--num_processes", str(count)]
        stem = one if count == 1 else f"accelerate_configs/{found[2]}.yaml"
        large = more.get("RECIPE", "recipes/gpt2_124m_openwebtext.yaml")
        wanted = [*launch, stem, *several, "train.py", "--recipe", large, *flags]
    if "GPUS" in more and "accelerate" in wanted and (folder / "log.cards").read_text() != "1":
        return "the trainer sees other cards"
    if "GPUS" in more and found and "--id=1" not in (folder / "log.smi").read_text().split("\0"):
        return "nvidia-smi is asked about other cards"
    return _other(shell_doors._words(folder), wanted)


def _status(folder: Path, card: tuple | str | None) -> str | None:
    done = shell_doors._run(_place(folder, card), "make", "-s", "gpu-status")
    lines = done.stdout.strip().splitlines()
    if done.code or done.stderr:
        return f"exit status {done.code}: {done.stderr[-300:]}"
    if not isinstance(card, tuple):
        return None if lines == ["no NVIDIA driver answers here"] else f"prints {lines}"
    rows = [line for line in lines[1:] if card[0] in line and "97 %" in line and line.endswith("61")]
    return None if len(lines) == card[1] + 1 and len(rows) == card[1] else f"prints {lines}"


def _check(folder: Path, status: str) -> str | None:
    failing = {"FAILS": "python check_setup.py", "STATUS": status} if status != "0" else {}
    done = shell_doors._run(_place(folder, None), "make", "-s", "check-setup", "FLAGS=--estimate --json", **failing)
    if done.code != (2 if status != "0" else 0):
        return f"exit status {done.code}"
    return _other(shell_doors._words(folder), ["python", "check_setup.py", "--estimate", "--json"])


def _clean(folder: Path) -> str | None:
    """.venv goes, as the link that it is here, and nothing else."""
    _place(folder, None)
    for name in ("data", ".venv-null-card", "my .venv"):
        (folder / name).mkdir()
    before = {path.name for path in folder.iterdir()}
    done = shell_doors._run(folder, "make", "-s", "clean")
    gone = before - {path.name for path in folder.iterdir()}
    return None if not done.code and gone == {".venv", ".venv-null-card"} else f"exit {done.code}; gone: {sorted(gone)}"


def _addition(folder: Path, before: bool) -> str | None:
    tree = Path(os.environ["FAULTS_TREE"])
    for _ in range(1 + before):
        done = shell_doors._run(folder, sys.executable, str(tree / "scripts" / "addition.py"))
    files = {path.name: path.read_text() for path in sorted((folder / "data").iterdir())}
    prompts = {name: [line[12:-2] for line in text.splitlines()] for name, text in files.items() if name.endswith("l")}
    lines = files["addition.txt"].splitlines()
    learnt, held = set(prompts["addition_prompts.jsonl"]), set(prompts["addition_held_out.jsonl"])
    wrong = [line for line in lines if eval(line.replace("=", "==")) is not True]
    swapped = {"{1}+{0}=".format(*p[:-1].split("+")) for p in held}
    if (
        done.code
        or wrong
        or {line.partition("=")[0] + "=" for line in lines} - learnt
        or learnt & held
        or swapped != held
    ):
        return f"exit status {done.code}; wrong {wrong[:2]}; shared {len(learnt & held)}"
    if len(learnt) + len(held) != 10_000 or not 900 < len(held) < 1100 or len(lines) != 50_000:
        return f"{len(learnt)} and {len(held)} problems, {len(lines)} lines"
    digest = hashlib.sha256("".join(files.values()).encode()).hexdigest()[:4]
    return None if digest == ADDITION else f"other files than ever: {digest}"
