"""The shell's doors: names that a shell would take apart, locks that are none, addresses that are commands, secrets.

``make stop`` ends the run that was named and no other program; what a script prints can be pasted and holds no secret;
no word that it is given is run. The programs that the scripts start are pretended, the runs are this campaign's own.
"""

import contextlib
import fcntl
import os
import random
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import commands

SECONDS = 30.0
CANARY = "canarysecret"
NAMES = (
    "plain",
    "my runs",
    "it's",
    'a "b"',
    "two\nlines",
    "-dash",
    "--help",
    "a;touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME",
    "a*",
    "[a]",
    "a|b>c",
    "tab\tname",
    "#x",
    "%d{x}",
    "a\\b",
    "ünï 🦣",
    "caf\udce9",
    "\x1b[2Jx",
    "a=b",
    "x" * 200,
    "$$",
    "~",
    "!x",
)
# A run: it holds its lock as a trainer does, and ends at SIGTERM.
HOLDER = """
import fcntl, os, signal, sys
lock = open(sys.argv[1], "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.truncate(0)
lock.write(sys.argv[2].replace("PID", str(os.getpid())) + "\\n")
lock.flush()
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print("ready", flush=True)
signal.pause()
"""
WORDS_OF = '#!/bin/bash\nprintf "%s\\0" "{name}" "$@" >>"$LOG"\n'
PROGRAMS = {
    "nvidia-smi": '#!/bin/bash\nif [[ $1 == -L ]]; then echo "GPU 0: NVIDIA RTX A6000"; else echo "NVIDIA RTX A6000"; fi\n',
    "python": f'#!/bin/bash\n[[ $1 == -c ]] && exec {sys.executable} "$@"\n' + WORDS_OF.format(name="python")[12:],
    "accelerate": WORDS_OF.format(name="accelerate"),
    "hf": WORDS_OF.format(name="hf") + 'echo "$@"\n',  # as its dry run prints the job
    "srun": '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nSLURM_NODEID=0 exec "$@"\n',
    "scontrol": "#!/bin/bash\n[[ $1 == show ]] && echo node1\nexit 0\n",
}
SLURM = {"SLURM_JOB_NODELIST": "node1", "SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "4"}
GOOD = {"GIT_URL": "https://forge.example/ursa", "HUB_MODEL_ID": "me/gpt2"}
URL = f"https://h/x?token={CANARY}"
JOBS = (  # (is refused, what is other in the environment, flags)
    *(
        (True, {"GIT_URL": url}, ())
        for url in (
            "ext::sh -c 'touch pwned'",
            "--upload-pack=touch pwned",
            "-x",
            f"https://me:{CANARY}@h/x",
            URL,
            "file:///etc",
            "/etc",
            "h/x",
            "fd::17",
            "http://h/x",
            "https://h/x\n--upload-pack=x",
            "https://",
            "ssh://-oProxyCommand=x/y",
            f"https://h/x#{CANARY}",
        )
    ),
    *((True, {name: "-x"}, ()) for name in ("HUB_MODEL_ID", "GIT_REVISION", "FLAVOR", "TIMEOUT", "ATTEMPTS", "RECIPE")),
    (True, {"HUB_MODEL_ID": "me/-x"}, ()),
    (False, {}, ("--data_files", URL)),
    (False, {}, ("--run_name", "a b", "--hub_token_is", f"hf_{CANARY * 3}")),
    *((False, {}, ("--run_name", name)) for name in NAMES),
    (False, {"GIT_URL": "ssh://git@h/x.git"}, ()),
    (False, {"GIT_URL": "git@h:x.git"}, ()),
)
LOCKS = (
    "a link",
    "names another",
    "names 1",
    "names -1",
    "names 0",
    "names 9" + "9" * 30,
    "names \x1b[2J",
    "not held",
    "a folder",
    "a dangling link",
)


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """Each name for each script, each way in which a lock is none, each value that a job is refused for."""
    for name in NAMES:
        for door in ("make", "the script"):
            yield f"stop by {door}: {name!r:.30}", lambda folder, name=name, door=door: _stop(folder, name, door)
        yield f"run_gpt2_124m.sh: {name!r:.30}", lambda folder, name=name: _machine(folder, name)
        yield f"slurm: {name!r:.30}", lambda folder, name=name: _slurm(folder, name)
    for lock in LOCKS:
        yield f"stop: a lock {lock!r:.30}", lambda folder, lock=lock: _lock(folder, lock)
    yield "stop: a lock is looked at, and not taken", _looks
    for refused, environment, flags in JOBS:
        yield (
            f"hf_jobs.sh: {environment or flags!r:.60}",
            lambda folder, job=(refused, environment, flags): _job(folder, *job),
        )


def _place(folder: Path) -> Path:
    tree = Path(os.environ["FAULTS_TREE"])
    for name in ("pretrain", "accelerate_configs", "Makefile"):
        (folder / name).symlink_to(tree / name)
    shutil.copytree(tree / "scripts", folder / "scripts")
    for name in ("recipes", "runs", "bin"):
        (folder / name).mkdir()
    for name, text in PROGRAMS.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return folder


def _run(folder: Path, *command: str, **environment: str) -> commands.Done:
    out, err = commands.printed_by(folder)
    kept = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), "LOG": str(folder / "log"), "LIMIT": "4"}
    code = None
    with open(out, "wb") as stdout, open(err, "wb") as stderr, contextlib.suppress(subprocess.TimeoutExpired):
        how = {"cwd": folder, "env": kept | environment, "stdin": subprocess.DEVNULL, "timeout": SECONDS}
        code = subprocess.run(command, stdout=stdout, stderr=stderr, **how).returncode
    return commands.Done(code, out.read_text(errors="replace"), err.read_text(errors="replace"), SECONDS)


def _words(folder: Path) -> list[str]:
    log = folder / "log"
    return os.fsdecode(log.read_bytes()).split("\0")[:-1] if log.is_file() else []


@contextlib.contextmanager
def _held(lock: Path, content: str = "PID") -> Iterator[subprocess.Popen]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock), content], stdout=subprocess.PIPE, cwd="/")
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()


def _judge(done: commands.Done, folder: Path, *, refused: bool | None) -> str | None:
    """``refused``: whether it has to be; None: either."""
    if list(folder.rglob("pwned")):
        return "a word was run"
    if CANARY in done.stdout + done.stderr:
        return (
            f"a secret is printed: {next(line for line in (done.stdout + done.stderr).splitlines() if CANARY in line)}"
        )
    if "\x1b" in done.stdout + done.stderr:
        return "an escape is printed"
    if done.code == 0:
        return "is not refused" if refused else None
    return commands.fault_of(done, "") or (f"is refused: {done.stderr.strip()[-200:]}" if refused is False else None)


def _door(folder: Path, door: str, name: str) -> commands.Done:
    if door == "make":
        return _run(folder, "make", "-s", "stop", f"RUN={name}", f"PYTHON={sys.executable}")
    script = next(path for path in (folder / "scripts/stop.sh", folder / "scripts/stop.py") if path.is_file())
    return _run(folder, sys.executable if script.suffix == ".py" else "sh", str(script), name)


def _stop(folder: Path, name: str, door: str) -> str | None:
    _place(folder)
    run = folder / "runs" / name
    others = {*name.split(), "a", "other"} - {name, "pwned"}
    before = {path.name for path in folder.iterdir()}
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(_held(run / ".lock"))
        bystanders = [stack.enter_context(_held(folder / "runs" / other / ".lock")) for other in others]
        bystanders += [stack.enter_context(_held(folder / other / ".lock")) for other in ("my", "b")]
        done = _door(folder, door, f"runs/{name}")
        if hit := [process.pid for process in bystanders if process.poll() is not None]:
            return f"ended {len(hit)} other runs"
        if why := _judge(done, folder, refused=False):
            return why
        if mine.poll() is None:
            return f"is not stopped, with exit status 0: {done.stdout[-200:]}"
    made = {path.name for path in folder.iterdir()} - before - {"my", "b"}
    return f"makes {sorted(made)}" if made else None


def _lock(folder: Path, how: str) -> str | None:
    _place(folder)
    lock = folder / "runs" / "one" / ".lock"
    lock.parent.mkdir()
    with _held(folder / "another-program" / "its.lock") as other, contextlib.ExitStack() as stack:
        if how == "a link":
            lock.symlink_to(folder / "another-program" / "its.lock")
        elif how == "a dangling link":
            lock.symlink_to("nothing")
        elif how == "a folder":
            lock.mkdir()
        elif how == "not held":
            lock.write_text(f"{other.pid}\n")
        else:
            named = str(other.pid) if how == "names another" else how.removeprefix("names ")
            holder = stack.enter_context(_held(lock, named))
        done = _door(folder, "make", "runs/one")
        if other.poll() is not None:
            return "ends another program"
        if how.startswith("names") and holder.poll() is not None:
            return "ends a program that the lock does not name"
        return _judge(done, folder, refused=None if how in ("not held", "a folder", "a dangling link") else True)


def _looks(folder: Path) -> str | None:
    lock = _place(folder) / "runs" / "one" / ".lock"
    lock.parent.mkdir()
    lock.write_text("4194304\n")
    ended, missed = threading.Event(), []

    def take() -> None:
        with open(lock) as file:
            while not ended.is_set():
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    fcntl.flock(file, fcntl.LOCK_UN)
                except OSError:
                    missed.append(1)
                ended.wait(0.0002)

    taking = threading.Thread(target=take)
    taking.start()
    done = _door(folder, "make", "runs/one")
    ended.set()
    taking.join()
    return "a trainer that starts meanwhile is refused" if missed else _judge(done, folder, refused=None)


def _machine(folder: Path, name: str) -> str | None:
    """What a dry run prints has to be, pasted into a shell, what the run starts; its recipe has the name."""
    _place(folder)
    recipe = f"recipes/{name}.yaml"
    shutil.copy(Path(os.environ["FAULTS_TREE"]) / "recipes" / "quickstart.yaml", folder / recipe)
    command = ("bash", "scripts/run_gpt2_124m.sh", "--sample_prompts", name)
    flags = {"RECIPE": recipe, "HUB_MODEL_ID": f"me/{name}", "HF_TOKEN": f"hf_{CANARY * 3}"}
    dry, done = _run(folder, *command, DRY_RUN="1", **flags), _run(folder, *command, **flags)
    why = _judge(dry, folder, refused=None) or _judge(done, folder, refused=None)
    if why or dry.code or done.code:
        return why or (None if dry.code == done.code else f"a dry run ends with {dry.code}, the run with {done.code}")
    if "\x1b" in name or "\udce9" in name:  # which cannot be shown as they are
        return None
    with contextlib.suppress(ValueError):  # a quote that does not end
        if shlex.split(dry.stdout) == _words(folder):
            return None
    return f"cannot be pasted: {dry.stdout[-200:]!r}"


def _slurm(folder: Path, name: str) -> str | None:
    flags = ("--run_name", name, "--data_files", "a b", "")
    done = _run(_place(folder), "bash", "scripts/slurm_2x8.sh", *flags, **SLURM)
    if why := _judge(done, folder, refused=False):
        return why
    return None if _words(folder)[-len(flags) :] == list(flags) else f"gives other words on: {_words(folder)[-6:]}"


def _job(folder: Path, refused: bool, environment: dict, flags: tuple) -> str | None:
    done = _run(_place(folder), "bash", "scripts/hf_jobs.sh", *flags, **GOOD | {"DRY_RUN": "1"} | environment)
    if why := _judge(done, folder, refused=refused):
        return why
    if refused:
        return "hf is started" if _words(folder) else None
    given = _words(folder)[-len(flags) :] if flags else []
    return None if given == list(flags) else f"gives other words on: {given}"
