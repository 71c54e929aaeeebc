"""A Hub that fails and loses answers, while a run pushes.

Training never ends for it. What is not on the Hub waits on disk, is stated, and is sent later: then the repository
holds what a push without a problem has brought there.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import commands
from fake_hub import HubServer, InjectedError

ID = "me/run"
ASKED = (
    "GET .*/refs",
    "POST /api/repos/create",
    "GET /api/models/me/run$",
    "POST .*/preupload/",
    "PUT /lfs/",
)
ASKED += (
    "POST .*/objects/batch",
    "POST .*/commit/",
    "POST .*/tag/",
    "GET /api/whoami",
    "POST /api/validate-yaml",
)
FAULTS = {
    "500 twice": {"status": 500, "times": 2},
    "503 for good": {"status": 503, "times": 10**9},
    "403 for good": {"status": 403, "times": 10**9},
    "429": {"status": 429, "times": 2, "headers": {"Retry-After": "3"}},
    "drop": {"kind": "drop", "times": 2},
    "lose": {"kind": "lose", "times": 1},
}
PUSHES = (
    *commands.TRAIN,
    "--push_to_hub",
    "true",
    "--hub_model_id",
    ID,
    "--hub_strategy",
    "all_checkpoints",
)


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """Each problem at each request of a push."""
    _, wanted = commands.finished_run(base, shared)
    (reference := shared / "reference").mkdir()
    with HubServer() as server:
        commands.run_or_raise(_run(commands.copy(base, reference), server, *PUSHES))
        pushed = _pushed(server)
    for asked in ASKED:
        for name, problem in FAULTS.items():
            yield f"{asked}: {name}", partial(failing, base, wanted, pushed, asked, problem)


def failing(
    base: Path, wanted: dict, pushed: tuple, asked: str, problem: dict, folder: Path
) -> str | None:
    """Be a case: train and push to a Hub that answers a request so."""
    commands.copy(base, folder)
    with HubServer() as server:
        server.problems.append(InjectedError(asked, **problem))
        done = _run(folder, server, *PUSHES)
        early = done.code == 2 and not (folder / "runs").exists()
        if early and (why := commands.command_problem(done, ID, "push_to_hub", "license")):
            return why
        if not early and (done.code != 0 or "Traceback" in done.stderr):
            return f"the run ends with {done.code}: {done.stderr[-300:]}"
        server.problems.clear()
        if early:
            done = _run(folder, server, *PUSHES)
        if list((folder / commands.RUN / "hub").glob("step-*")):
            if "--push_pending" not in done.stderr:
                return "pushes wait on disk, and nothing states it"
            done = _run(folder, server, "train.py", "--push_pending", str(commands.RUN))
            if done.code != 0:
                return f"--push_pending ends with {done.code}: {done.stderr[-300:]}"
        if _pushed(server) != pushed:
            return f"on the Hub are {sorted(server.tags(ID))}, not what a push without a problem brings"
    return commands.difference(commands.run_digests(folder / commands.RUN), wanted)


def _run(folder: Path, server: HubServer, *command: str) -> commands.Done:
    return commands.run(command, folder, environment=server.environment(folder / "hf"), hasty=True)


def _pushed(server: HubServer) -> tuple:
    if ID not in server.repositories:
        return ()
    files = {
        name: data
        for name, data in server.files(ID).items()
        if name.endswith((".safetensors", "config.json"))
    }
    return files, sorted(server.tags(ID))
