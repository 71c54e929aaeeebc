"""A Hub that fails and loses answers, while a run pushes; damaged checkpoints that it is resumed from.

Training never ends for it. What is not on the Hub waits on disk, is stated, and is sent later: then the repository
holds what a push without a fault has brought there.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import damage
from hub_server import Fault, HubServer

ID = "me/run"
ASKED = ("GET .*/refs", "POST /api/repos/create", "GET /api/models/me/run$", "POST .*/preupload/", "PUT /lfs/")
ASKED += ("POST .*/objects/batch", "POST .*/commit/", "POST .*/tag/", "GET /api/whoami", "POST /api/validate-yaml")
FAULTS = {
    "500 twice": {"status": 500, "times": 2},
    "503 for good": {"status": 503, "times": 10**9},
    "403 for good": {"status": 403, "times": 10**9},
    "429": {"status": 429, "times": 2, "headers": {"Retry-After": "3"}},
    "drop": {"kind": "drop", "times": 2},
    "lose": {"kind": "lose", "times": 1},
}
PUSHES = ("--push_to_hub", "true", "--hub_model_id", ID, "--hub_strategy", "all_checkpoints")


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """Each fault at each request of a push; checkpoints that are damaged on the Hub."""
    whole, wanted = damage.finished(base, shared)
    reference = shared / "reference"
    reference.mkdir()
    commands.copy(base, reference)
    with HubServer() as server:
        done = _train(reference, server)
        if done.code != 0 or ID not in server.repositories:
            raise RuntimeError(f"the tree cannot push: {done.stderr}")
        pushed, tags, tree = _weights(server), sorted(server.tags(ID)), server.files(ID)
    for asked in ASKED:
        for name, fault in FAULTS.items():

            def hit(folder: Path, asked=asked, fault=fault) -> str | None:
                commands.copy(base, folder)
                with HubServer() as server:
                    server.faults.append(Fault(asked, **fault))
                    done = _train(folder, server)
                    early = done.code == 2 and not (folder / "runs").exists()
                    if early and (why := commands.fault_of(done, ID, "push_to_hub", "license")):
                        return why
                    if not early and (done.code != 0 or "Traceback" in done.stderr):
                        return f"the run ends with {done.code}: {done.stderr[-300:]}"
                    server.faults.clear()
                    if early:
                        done = _train(folder, server)
                    waits = list((folder / "runs/tiny/hub").glob("step-*"))
                    if waits and "--push_pending" not in done.stderr:
                        return "pushes wait on disk, and nothing states it"
                    if waits:
                        done = _run(folder, server, "train.py", "--push_pending", "runs/tiny")
                        if done.code != 0:
                            return f"--push_pending ends with {done.code}: {done.stderr[-300:]}"
                    if _weights(server) != pushed or sorted(server.tags(ID)) != tags:
                        return f"on the Hub are {sorted(server.tags(ID))}, not what a push without a fault brings"
                return commands.difference(commands.bits_of(folder / damage.RUN), wanted)

            yield f"{asked}: {name}", hit
    for number in range(20):
        name = rng.choice([path for path in tree if path.startswith("checkpoints/")])
        how, seed = ("bit", "cut", "gone", "503", "other size")[number % 5], rng.random()

        def hit(folder: Path, name=name, how=how, seed=seed) -> str | None:
            commands.copy(base, folder)
            with HubServer() as server:
                files = dict(tree)
                data = bytearray(files[name])
                if how == "bit":
                    data[int(seed * len(data))] ^= 1
                elif how == "cut":
                    del data[int(seed * len(data)) :]
                elif how == "other size":
                    data += b"x"
                files[name] = bytes(data)
                if how == "gone":
                    del files[name]
                _on_hub(server, files)
                if how == "503":
                    server.faults.append(Fault("GET .*/resolve/", status=503, times=2))
                done = _run(folder, server, *damage.TRAIN, "--resume_from_checkpoint", f"hub://{ID}")
            return damage.ends(done, folder, wanted | {"losses": _losses(folder)}, ID, Path(name).name, "hub://")

        yield f"resumed from the Hub, {how}: {name}", hit


def _losses(folder: Path) -> object:
    # The rows of before the checkpoint come from the Hub's own metrics.jsonl, which is not what is attacked here.
    found = folder / damage.RUN / "metrics.jsonl"
    return commands.bits_of(folder / damage.RUN)["losses"] if found.is_file() else None


def _train(folder: Path, server: HubServer) -> commands.Done:
    return _run(folder, server, *damage.TRAIN, *PUSHES)


def _run(folder: Path, server: HubServer, *command: str) -> commands.Done:
    return commands.run(*command, cwd=folder, environment=server.environment(folder / "hf"), hasty=True)


def _weights(server: HubServer) -> dict[str, bytes]:
    return {name: data for name, data in server.files(ID).items() if name.endswith((".safetensors", "config.json"))}


def _on_hub(server: HubServer, files: dict[str, bytes]) -> None:
    server.make(ID).commit("by a run", dict(files))
    server.objects |= {hashlib.sha256(data).hexdigest(): data for data in files.values()}
