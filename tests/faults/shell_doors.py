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
import signal
import subprocess
import sys
import threading
import time
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
# $FAILS: the program that ends with $STATUS, or by the signal -$STATUS, and the word that its first arguments begin with.
WORDS_OF = """#!/bin/bash
printf "%s\\0" "{name}" "$@" >>"$LOG"
if [[ -n ${{FAILS:-}} && "{name} $*" == "$FAILS"* ]]; then
    [[ $STATUS == -* ]] && kill "$STATUS" $$
    exit "$STATUS"
fi
"""
PROGRAMS = {
    "nvidia-smi": '#!/bin/bash\nif [[ $1 == -L ]]; then echo "GPU 0: NVIDIA RTX A6000"; else echo "NVIDIA RTX A6000"; fi\n',
    "python": f'#!/bin/bash\n[[ $1 == -c ]] && exec {sys.executable} "$@"\n' + WORDS_OF.format(name="python")[12:],
    "accelerate": WORDS_OF.format(name="accelerate"),
    "hf": WORDS_OF.format(name="hf")
    + 'echo "$@"\nprintf "%b" "${SAYS:-}" | tee /dev/stderr\n',  # as a dry run prints the job
    "srun": WORDS_OF.format(name="srun") + 'while [[ $1 == -* ]]; do shift; done\nSLURM_NODEID=0 exec "$@"\n',
    "scontrol": WORDS_OF.format(name="scontrol") + '[[ $1 == show ]] && echo "${JOB:-node1}"\nexit 0\n',
    "sleep": WORDS_OF.format(name="sleep"),
    "torchrun": WORDS_OF.format(name="torchrun"),
}
PROGRAMS["python"] = PROGRAMS["python"].replace("[[ $1 == -c ]]", '[[ $1 == -c && "${FAILS:-}" != "python -c" ]]')
MACHINE, NODES = ("bash", "scripts/run_gpt2_124m.sh"), ("bash", "scripts/slurm_2x8.sh")
HUB_JOB = ("bash", "scripts/hf_jobs.sh")
PREPARED = {"PREPARE": "1", "RECIPE": "recipes/quickstart.yaml"}
# A script, what fails in it, what starts before that and what after; the script ends as what failed. "!": it is missing.
FAILING = (
    (MACHINE, "python check_setup.py", "nvidia-smi", ("prepare_data.py", "accelerate")),
    (MACHINE, "python prepare_data.py", "check_setup.py", ("accelerate",)),
    (MACHINE, "python -c", "", ("check_setup.py", "prepare_data.py", "accelerate")),
    (MACHINE, "accelerate launch", "prepare_data.py", ()),
    (MACHINE, "!accelerate", "prepare_data.py", ()),
    (NODES, "scontrol show hostnames", "", ("srun", "accelerate")),
    (NODES, "srun", "scontrol", ("accelerate", "requeue")),
    (NODES, "accelerate launch", "srun", ("requeue",)),
    (NODES, "!accelerate", "srun", ("requeue",)),
    (NODES, "!srun", "scontrol", ("accelerate", "requeue")),
    (NODES, "!scontrol", "", ("srun", "accelerate")),
    (HUB_JOB, "hf jobs run", "", ()),
    (HUB_JOB, "!hf", "", ()),
)
STATUSES = ("1", "2", "3", "42", "99", "127", "-TERM", "-HUP", "-KILL")
# Of make: a target, the variable that takes a value, and the program that has to get it as one word.
TARGETS = (
    ("train", "RECIPE", "accelerate"),
    ("train", "ACCELERATE_CONFIG", "accelerate"),
    ("ddp-train", "RECIPE", "accelerate"),
    ("test-faults", "TREE", "python"),
    ("test-faults", "SEED", "python"),
)
QUOTED_TARGETS = ("train", "post-train", "ddp-train", "check-setup")  # those with FLAGS
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
            f"https://{CANARY}@h/x",
            f"https://{CANARY}@h:443/x",
            f"https://:{CANARY}@h/x",
            f"ssh://me:{CANARY}@h/x",
            f"me:{CANARY}@h:x",
            f"git@h:x?token={CANARY}",
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
SAID = (  # by printf's rules
    rf"https://me:{CANARY}@h/x?token={CANARY}\n",
    rf"Authorization: Bearer {CANARY}\nCookie: a={CANARY}\n",
    rf"\033[2J\033]0;mine\a\r https:\\/\\/me:{CANARY}@h\n",
    rf"GET /x?X-Amz-Signature={CANARY} HTTP/1.1\n",
    rf" hf_{CANARY * 3} without an end of line",
    r"\xff\xfe is not UTF-8\n",
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
    for command, fails, before, after in FAILING:
        for status in STATUSES if fails[0] != "!" else ("127",):
            yield f"{command[1]}: {fails} ends with {status}", _failing(command, fails, status, before, after)
    for sent in ("USR1", "TERM", "INT"):
        for ends in ("0", "1", "-KILL", "requeue fails"):
            yield f"slurm: {sent}, and the trainer ends with {ends}", _sent(sent, ends)
    for status in ("0", "1", "7"):
        yield f"slurm: preempted, and the trainer ends with {status}", _preempted(status)
    for number, says in enumerate(SAID):
        for status in ("0", "5"):
            yield f"hf_jobs.sh: what hf prints, {number}, status {status}", _printed(says, status)
    for target, variable, program in TARGETS:
        for name in NAMES:
            if "\n" not in name and (variable == "RECIPE" or not {"$", "#"} & {*name}):  # make itself reads the rest
                yield f"make {target} {variable}={name!r:.30}", _made(target, variable, program, name)
    for target in QUOTED_TARGETS:
        for name in NAMES:
            if "$" not in name and "\n" not in name and "#" not in name:
                yield f"make {target} FLAGS={name!r:.30}", _made(target, "FLAGS", "", name)
        for status in ("1", "3"):
            yield f"make {target}: what it starts ends with {status}", _make_fails(target, status)
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
    if name not in (words := _words(folder)):
        return f"gives other words on: {words[-6:]}"
    if "\x1b" in name or "\udce9" in name:  # which cannot be shown as they are
        return None
    with contextlib.suppress(ValueError):  # a quote that does not end
        if shlex.split(dry.stdout) == words:
            return None
    return f"cannot be pasted: {dry.stdout[-200:]!r}"


def _slurm(folder: Path, name: str) -> str | None:
    flags = ("--run_name", name, "--data_files", "a b", "")
    done = _run(_place(folder), "bash", "scripts/slurm_2x8.sh", *flags, **SLURM)
    if why := _judge(done, folder, refused=False):
        return why
    words = _words(folder)
    begin = words.index(flags[0]) if flags[0] in words else 0
    return None if words[begin:][: len(flags)] == list(flags) else f"gives other words on: {words}"


def _job(folder: Path, refused: bool, environment: dict, flags: tuple) -> str | None:
    done = _run(_place(folder), "bash", "scripts/hf_jobs.sh", *flags, **GOOD | {"DRY_RUN": "1"} | environment)
    if why := _judge(done, folder, refused=refused):
        return why
    if refused:
        return "hf is started" if _words(folder) else None
    given = _words(folder)[-len(flags) :] if flags else []
    return None if given == list(flags) else f"gives other words on: {given}"


def _ended(done: commands.Done, status: str) -> str | None:
    """Return why a script has not the status of what failed in it."""
    wanted = 128 + signal.Signals[f"SIG{status[1:]}"] if status[0] == "-" else int(status)
    return (
        None if done.code in (wanted, 128 - wanted) else f"exit status {done.code}, not {wanted}: {done.stderr[-300:]}"
    )


def _failing(command: tuple, fails: str, status: str, before: str, after: tuple) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        _place(folder)
        shutil.copy(Path(os.environ["FAULTS_TREE"]) / "recipes" / "quickstart.yaml", folder / "recipes")
        if fails[0] == "!":
            (folder / "bin" / fails[1:]).unlink()
        how = {"FAILS": fails, "STATUS": status} | (
            SLURM if command == NODES else GOOD if command == HUB_JOB else PREPARED
        )
        done, words = _run(folder, *command, "--run_name", "a b", **how), _words(folder)
        if (
            why := _judge(done, folder, refused=None)
            if done.code in (0, 1, 2) and done.errors
            else _ended(done, status)
        ):
            return why
        if "Traceback" in done.stderr or CANARY in done.stderr:
            return f"prints {done.stderr[-300:]}"
        if before and before != "nvidia-smi" and before not in words:
            return f"{before} was not started"
        started = [word for word in after if word in words]
        return f"goes on with {', '.join(started)}" if started else _ended(done, status)

    return hit


def _sent(sent: str, ends: str) -> Callable[[Path], str | None]:
    """Slurm's signals: at USR1 the trainer gets TERM and the job queues again; at any other it does not."""

    def hit(folder: Path) -> str | None:
        _place(folder)
        end = "kill -KILL $$" if ends == "-KILL" else f"exit {0 if ends == 'requeue fails' else ends}"
        trainer = f'#!/bin/bash\ntrap \'echo TERM >>"$LOG.got"; {end}\' TERM\necho >"$LOG.up"\n'
        (folder / "bin" / "accelerate").write_text(trainer + "while :; do /bin/sleep 0.05; done\n")
        kept = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), "LOG": str(folder / "log")} | SLURM
        kept |= {"FAILS": "scontrol requeue" if ends == "requeue fails" else "", "STATUS": "6"}
        with open(folder / "err", "wb") as err:
            how = {"cwd": folder, "env": kept, "stdin": subprocess.DEVNULL, "stdout": err, "stderr": err}
            process = subprocess.Popen([*NODES], start_new_session=True, **how)
        try:
            for _ in range(1500):
                if (folder / "log.up").exists():
                    break
                time.sleep(0.02)
            process.send_signal(signal.Signals[f"SIG{sent}"])
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return f"no end in {SECONDS:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        err = (folder / "err").read_text()
        words, got = _words(folder), (folder / "log.got").exists()
        queued = "requeue" in words and words[words.index("requeue") + 1] == SLURM["SLURM_JOB_ID"]
        if sent != "USR1":
            return "the job queues again" if queued else None if process.returncode else "exit status 0"
        if not got or not queued:
            return f"the trainer got no TERM: {err}" if not got else f"the job does not queue again: {err}"
        wanted = 6 if ends == "requeue fails" else 0
        return None if process.returncode == wanted else f"exit status {process.returncode}, not {wanted}: {err}"

    return hit


def _preempted(status: str) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        how = SLURM | {"JOB": "PreemptTime=2026-01-01T00:00:00", "FAILS": "accelerate", "STATUS": status}
        done, words = _run(_place(folder), *NODES, **how), _words(folder)
        return "does not wait for Slurm" if "sleep" not in words else _ended(done, status)

    return hit


def _printed(says: str, status: str) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        _place(folder)
        with open(folder / "bin" / "hf", "a") as file:
            file.write(f"exit {status}\n")
        done = _run(folder, *HUB_JOB, **GOOD | {"SAYS": says})
        if CANARY in done.stdout + done.stderr or "\x1b" in done.stdout + done.stderr:
            return f"is printed: {(done.stdout + done.stderr)[-300:]!r}"
        return _ended(done, status)

    return hit


def _environment_of(folder: Path) -> None:
    """Pretend that make has installed .venv."""
    _place(folder)
    tree = Path(os.environ["FAULTS_TREE"])
    for path in (*tree.glob("requirements*.txt"), tree / "constraints.txt"):
        shutil.copy(path, folder)
        os.utime(folder / path.name, (0, 0))
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(folder / "bin")
    for name in ("", "-dev", "-post", "-slow", "-test-post"):
        (folder / ".venv" / f".installed{name}").touch()


def _made(target: str, variable: str, program: str, name: str) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        _environment_of(folder)
        value = f"--run_name {shlex.quote(name)} --x ''" if variable == "FLAGS" else name
        done, words = _run(folder, "make", "-s", target, f"{variable}={value}"), _words(folder)
        if list(folder.rglob("pwned")):
            return "a word was run"
        if done.code != 0:
            return f"exit status {done.code}: {done.stderr[-300:]}"
        if program and program not in words:
            return f"{program} is not started"
        if variable == "FLAGS":
            return None if words[-4:] == ["--run_name", name, "--x", ""] else f"gives other words on: {words[-4:]}"
        return None if name in words else f"gives other words on: {words}"

    return hit


def _make_fails(target: str, status: str) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        _environment_of(folder)
        program = "python check_setup.py" if target == "check-setup" else "accelerate"
        done = _run(folder, "make", "-s", target, FAILS=program, STATUS=status)
        if done.code != 2 or f"Error {status}" not in done.stderr:
            return f"exit status {done.code}: {done.stderr[-300:]}"
        return "goes on" if target == "post-train" and "post_train.py" in _words(folder) else None

    return hit
