"""Push to a Hub that fails or loses responses.

Training continues. Steps that are not on the Hub are stored on disk and reported, and can be pushed
later. Then the repository has the same contents as without a failure.
"""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import commands
from fake_hub import HubServer, InjectedError

REPO_ID = "me/run"
REQUESTS = (
    "GET .*/refs",
    "POST /api/repos/create",
    "GET /api/models/me/run$",
    "POST .*/preupload/",
    "PUT /lfs/",
    "POST .*/objects/batch",
    "POST .*/commit/",
    "POST .*/tag/",
    "GET /api/whoami",
    "POST /api/validate-yaml",
)
ERRORS = {
    "500 twice": {"status": 500, "times": 2},
    "503 for good": {"status": 503, "times": 10**9},
    "403 for good": {"status": 403, "times": 10**9},
    "429": {"status": 429, "times": 2, "headers": {"Retry-After": "3"}},
    "drop": {"kind": "drop", "times": 2},
    "lose": {"kind": "lose", "times": 1},
}
PUSH = (
    *commands.TRAIN,
    *("--push_to_hub", "true"),
    *("--hub_model_id", REPO_ID),
    *("--hub_strategy", "all_checkpoints"),
)
PUSH_PENDING = ("train.py", "--push_pending", str(commands.RUN))


class PushedContents(NamedTuple):
    """The files of the repository that every push of a run must contain, and its tags."""

    files: dict[str, bytes]
    tags: list[str]


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[commands.Case]:
    """Yield each error for each request of a push."""
    _, expected = commands.finished_run(base, shared)
    reference = shared / "reference"
    reference.mkdir()
    with HubServer() as server:
        result = run_with_hub(PUSH, commands.copy(base, reference), server)
        commands.run_or_raise(result)
        expected_push = pushed_contents(server)
    for request in REQUESTS:
        for name, error in ERRORS.items():
            run = partial(push_with_error, base, expected, expected_push, request, error)
            yield commands.Case(f"{request}: {name}", run)


def push_with_error(
    base: Path,
    expected: dict,
    expected_push: PushedContents,
    request: str,
    error: dict,
    folder: Path,
) -> str | None:
    """Train and push to a Hub that answers a request with an error."""
    commands.copy(base, folder)
    with HubServer() as server:
        server.problems.append(InjectedError(request, **error))
        problem = train_and_push(folder, server)
        if problem:
            return problem
        if pushed_contents(server) != expected_push:
            return f"the tags are {sorted(server.tags(REPO_ID))}, or the files differ"
    return commands.difference(commands.run_digests(folder / commands.RUN), expected)


def train_and_push(folder: Path, server: HubServer) -> str | None:
    """Train with an error of the Hub and then push the rest without it."""
    result = run_with_hub(PUSH, folder, server)
    server.problems.clear()
    is_rejected = result.code == 2 and not (folder / "runs").exists()
    if is_rejected:
        problem = commands.command_problem(result, REPO_ID, "push_to_hub", "license")
        if problem:
            return problem
        result = run_with_hub(PUSH, folder, server)
    elif result.code != 0 or "Traceback" in result.stderr:
        return f"the run ends with {result.code}: {result.stderr[-300:]}"

    staged = folder / commands.RUN / "hub"
    if list(staged.glob("step-*")):
        if "--push_pending" not in result.stderr:
            return "pushes are stored on disk, but no message reports it"
        result = run_with_hub(PUSH_PENDING, folder, server)
        if result.code != 0:
            return f"--push_pending ends with {result.code}: {result.stderr[-300:]}"
    return None


def run_with_hub(
    command: tuple[str, ...], folder: Path, server: HubServer
) -> commands.CompletedCommand:
    """Run a script with this Hub."""
    environment = server.environment(folder / "hf")
    return commands.run(command, folder, environment=environment, fast_waits=True)


def pushed_contents(server: HubServer) -> PushedContents:
    """Return the contents of the repository."""
    if REPO_ID not in server.repositories:
        return PushedContents({}, [])
    files = {}
    for name, data in server.files(REPO_ID).items():
        if name.endswith((".safetensors", "config.json")):
            files[name] = data
    return PushedContents(files, sorted(server.tags(REPO_ID)))
