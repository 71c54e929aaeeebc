"""A Hub that fails, loses answers and keeps files out, while a run pushes; damaged checkpoints that it is resumed from.

Training never ends for it. What is not on the Hub waits on disk, is stated, and is sent later: then the repository
holds what a push without a fault has brought there.
"""

import hashlib
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import damage
from hub_server import Fault, HubServer

ID = "me/run"
ASKED = (
    "GET .*/refs",
    "POST /api/repos/create",
    "GET /api/models/me/run$",
    "POST .*/preupload/",
    "POST .*/objects/batch",
)
ASKED += ("PUT /lfs/", "POST .*/commit/", "POST .*/tag/", "GET /api/whoami", "POST /api/validate-yaml")
FAULTS = {
    "500 twice": {"status": 500, "times": 2},
    "503 for good": {"status": 503, "times": 10**9},
    "403 for good": {"status": 403, "times": 10**9},
    "429": {"status": 429, "times": 2, "headers": {"Retry-After": "3"}},
    "drop": {"kind": "drop", "times": 2},
    "lose": {"kind": "lose", "times": 1},
}
LASTING = {
    "503": {"status": 503},
    "429": {"status": 429},
    "429 with Retry-After": {"status": 429, "headers": {"Retry-After": "7"}},
    "429 with a Retry-After of days": {"status": 429, "headers": {"Retry-After": "999999"}},
    "resets": {"kind": "drop"},
    "silence": {"kind": "hang"},
    "empty answers": {"kind": "say", "message": ""},
    "answers of another kind": {"kind": "say", "message": "[]"},
    "HTML": {"kind": "say", "message": "<html>log in</html>", "headers": {"Content-Type": "text/html"}},
}
# What of a push's files is there, as a pattern, and what the start has to be: refused with that word, or a new run.
HALVES = {
    "nothing": (r"(?!)", None),
    "a model only": (r"[^/]+", "no full checkpoint"),
    "a model without weights": (r"config\.json", None),
    "a checkpoint's manifest only": (r".*/manifest\.json", ""),
    "a checkpoint without its model": (r"(?!.*step-\d+/model\.safetensors).*", ""),
    "a checkpoint without its optimizer": (r"(?!.*optimizer\.safetensors).*", ""),
    "a checkpoint without its state": (r"(?!.*state\.json).*", ""),
    "a checkpoint without its manifest": (r"(?!.*manifest\.json).*", "no full checkpoint"),
    "a checkpoint without metrics.jsonl": (r"(?!metrics\.jsonl).*", "well"),
}
PUSHES = ("--push_to_hub", "true", "--hub_model_id", ID, "--hub_strategy", "all_checkpoints")
OTHER = ("--push_to_hub", "true", "--hub_model_id", "me/newest", "--hub_strategy", "checkpoint")
PARTS = ("manifest.json", "model.safetensors", "optimizer.safetensors", "state.json")
# By hub_strategy: the steps that are pushed, and the folder of a step's checkpoint, if it has one.
STRATEGIES: dict[str, tuple[tuple[int, ...], str]] = {
    "end": ((12,), ""),
    "every_save": ((3, 6, 9, 12), ""),
    "checkpoint": ((3, 6, 9, 12), "last-checkpoint/"),
    "all_checkpoints": ((3, 6, 9, 12), "checkpoints/step-{:08}/"),
}
NAMES = {"me/run": "me/run", "run": "me/run", "org/run.2-a_b": "org/run.2-a_b"}  # as they are given, and are then
FINE = {"role": "fineGrained", "fineGrained": {"scoped": [{"entity": {"name": "you"}, "permissions": ["repo.write"]}]}}
# What the start of a run that pushes is refused for: what is changed of the server, the flags, and a word of the line.
REFUSED: dict[str, tuple[Callable[[HubServer], object], dict[str, str], str]] = {
    "a token that may only read": (lambda hub: hub.login["auth"]["accessToken"].update(role="read"), {}, "only read"),
    "a token of another owner": (lambda hub: hub.login["auth"].update(accessToken=FINE), {}, "me may not create it"),
    "an unknown token": (lambda hub: setattr(hub, "tokens", {"x"}), {}, "does not take the token"),
    "another's name": (lambda hub: None, {"--hub_model_id": "you/run"}, "me may not create it"),
    "an organisation's reader": (lambda hub: _join(hub, "read"), {"--hub_model_id": "org/run"}, "me may not create it"),
    "a repository that is only read": (lambda hub: (hub.make(ID), hub.read_only.add(ID)), {}, "403"),
    "another run's repository": (lambda hub: hub.make(ID).tags.update({"step-00000003": ""}), {}, "step-00000003"),
    "no id": (lambda hub: None, {"--hub_model_id": "me//run"}, "OWNER/NAME"),
    "an id with a space": (lambda hub: None, {"--hub_model_id": "me/ru n"}, "OWNER/NAME"),
    "no login": (lambda hub: None, {"HF_TOKEN": ""}, "no login"),
}
# What a checkpoint's manifest on the Hub can be instead, and a push.json on disk.
MANIFESTS: dict[str, Callable[[dict], object]] = {
    "no step": lambda about: about.pop("step"),
    "a step in words": lambda about: about.update(step="../../../x"),
    "another step": lambda about: about.update(step=7),
    "a step below 0": lambda about: about.update(step=-1),
    "no files": lambda about: about.pop("files"),
    "a list of files": lambda about: about.update(files=[1]),
    "a file less": lambda about: about["files"].pop("state.json"),
    "another sum": lambda about: about["files"]["model.safetensors"].update(sha256="0" * 64),
    "another size": lambda about: about["files"]["optimizer.safetensors"].update(size=1),
    "no sum": lambda about: about["files"]["state.json"].pop("sha256"),
}
STAGED: dict[str, Callable[[dict], object]] = {
    "a name that climbs": lambda push: push["files"].update({"../../../../../text.txt": push["files"]["README.md"]}),
    "a name that is not pushed": lambda push: push["files"].update({".env": push["files"]["README.md"]}),
    "a file that is gone": lambda push: push["files"].update({"curves.png": push["files"]["README.md"]}),
    "another sum": lambda push: push["files"]["README.md"].update(sha256="0" * 64),
    "no files": lambda push: push.pop("files"),
}
# Statuses of which each is over the third time, and those that no further attempt changes.
OVER, FINAL = (408, 409, 412, 423, 425, 429, 500, 502, 504), (400, 401, 403, 404, 410)


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """Each fault at each request of a push; files that the repository ignores; checkpoints damaged on the Hub."""
    whole, wanted = damage.finished(base, shared)
    reference = shared / "reference"
    reference.mkdir()
    commands.copy(base, reference)
    with HubServer() as server:
        done = _train(reference, server)
        if done.code != 0 or ID not in server.repositories:
            raise RuntimeError(f"the tree cannot push: {done.stderr}")
        pushed, tags = _weights(server), sorted(server.tags(ID))
        tree, there = server.files(ID), (server.repositories[ID], server.objects)
        newest = _run(reference, server, *damage.TRAIN, "--run_name", "newest", *OTHER)
        if newest.code != 0:
            raise RuntimeError(f"the tree cannot push: {newest.stderr}")
        one = server.repositories["me/newest"], server.objects  # of which each commit has another last-checkpoint
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
    for ignored in ("model.safetensors", ".*"):

        def hit(folder: Path, ignored=ignored) -> str | None:
            commands.copy(base, folder)
            with HubServer() as server:
                server.ignored = ignored
                done = _train(folder, server)
                waits = list((folder / "runs/tiny/hub").glob("step-*"))
                if done.code != 0:
                    return f"the run ends with {done.code}: {done.stderr[-300:]}"
                if not waits or "ignore" not in done.stderr:
                    return "the Hub has ignored files, and nothing states it or keeps them"
            return None

        yield f"the repository ignores {ignored}", hit
    for title, fault in LASTING.items():
        yield f"a run resumes from the Hub: {title} for good", _lasting(base, tree, fault, pending=None)
        yield f"a tag, from the start: {title} for good", _lasting(base, tree, fault, pending=None, tag=True)
        yield f"--push_pending: {title} for good", _lasting(base, tree, fault, pending=_waiting(base, shared))
    for title, (names, said) in HALVES.items():
        yield f"the repository holds {title}", _half(base, tree, names, said)
    for number in range(20):
        name = rng.choice([path for path in tree if path.startswith("checkpoints/")])
        how, seed = ("bit", "cut", "gone", "503", "other size")[number % 5], rng.random()

        def hit(folder: Path, name=name, how=how, seed=seed) -> str | None:
            commands.copy(base, folder)
            with HubServer() as server:
                repository = server.make(ID)
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
                repository.commit("by someone", files)
                server.objects |= {hashlib.sha256(data).hexdigest(): data for data in files.values()}
                if how == "503":
                    server.faults.append(Fault("GET .*/resolve/", status=503, times=2))
                own = () if said else PUSHES  # only a run's own repository may hold nothing yet
                done = _run(folder, server, *damage.TRAIN, *own, "--resume_from_checkpoint", f"hub://{ID}")
            return damage.ends(done, folder, wanted | {"losses": _losses(folder)}, ID, Path(name).name, "hub://")

        yield f"resumed from the Hub, {how}: {name}", hit
    for number, strategy in enumerate(STRATEGIES):
        for given in NAMES if strategy == "end" else list(NAMES)[:1]:
            yield f"pushes, {strategy}, to {given}", _pushes(base, wanted, strategy, given, private=number % 2 == 0)
        yield f"pushes, {strategy}: the Hub is down meanwhile", _pushes(base, wanted, strategy, "run", True, down=True)
    for title, (change, flags, said) in REFUSED.items():
        yield f"pushes are refused: {title}", _refused(base, change, flags, said)
    for at, steps in {"": (12,), "@main": (12,), "@step-00000003": (3, 6, 9, 12), "@step-00000006": (6, 9, 12)}.items():
        yield f"resumed from hub://{ID}{at}", _resumed(base, there, wanted, at, steps)
    yield "its own repository holds a model only", _own(base, tree)
    for title, edit in MANIFESTS.items():
        yield f"a checkpoint's manifest with {title}", _edited(base, tree, edit)
    for status in OVER:
        yield f"a run resumes from the Hub: {status}, then well", _answered(base, tree, wanted, status, 3)
    for status in FINAL:
        yield f"a run resumes from the Hub: {status} for good", _answered(base, tree, wanted, status, 10**9)
    yield "a run resumes from the Hub: a page, at once", _answered(base, tree, wanted, 200, 10**9)
    for title, edit in STAGED.items():
        yield f"a push on disk with {title}", _staged(_waiting(base, shared), edit)
    for asked in ("POST .*/commit/", "POST .*/tag/"):
        yield f"--push_pending: killed at {asked}, two at once", _killed(_waiting(base, shared), pushed, tags, asked)
    for other in (ID, "me/other"):
        for there in (False, True):
            yield (
                f"hub://{other}, empty: {there}, of a run that pushes to {ID}",
                _begins(base, pushed, tags, other, there),
            )
    for at, steps in {"": (12,), "@step-00000003": (3, 6, 9, 12)}.items():
        yield f"resumed from hub://{ID}{at}, last-checkpoint", _resumed(base, one, wanted, at, steps)
    yield "a push that the Hub refuses once", _in_order(_waiting(base, shared), tags)
    yield "an older last-checkpoint on the Hub has more files", _older(base)


def _join(server: HubServer, role: str) -> None:
    server.login["orgs"] = [{"name": "org", "roleInOrg": role}]


def _pushes(base: Path, wanted: dict, strategy: str, given: str, private: bool, down: bool = False) -> Callable:
    """What each step's tag holds is what the run has on disk, and nothing else; nothing is left to send."""
    steps, within = STRATEGIES[strategy]
    flags = ("--push_to_hub", "true", "--hub_model_id", given, "--hub_strategy", strategy)
    flags += ("--hub_private_repo", str(private).lower())

    def hit(folder: Path) -> str | None:
        commands.copy(base, folder)
        run = folder / damage.RUN
        with HubServer() as server:
            _join(server, "write")
            server.faults += [Fault("", status=503, times=10**9)] * down
            done = _run(folder, server, *damage.TRAIN, *flags)
            server.faults.clear()
            if down and done.code == 0:
                done = _run(folder, server, "train.py", "--push_pending", "runs/tiny")
            if done.code != 0 or list((run / "hub").glob("*step-*")):
                return f"ends with {done.code}, leaves {list((run / 'hub').iterdir())}: {done.stderr[-300:]}"
            found = server.repositories[NAMES[given]]
            if list(server.repositories) != [NAMES[given]] or found.private != private:
                return f"made: {list(server.repositories)}, private {found.private}"
            if sorted(found.tags) != [f"step-{step:08}" for step in steps]:
                return f"tags: {sorted(found.tags)}"
            if [one.oid for one in found.commits[1:]] != [found.tags[f"step-{step:08}"] for step in steps]:
                return f"the commits are not the steps', in order: {[one.title for one in found.commits]}"
            for step in steps:
                files = dict(found.find(f"step-{step:08}").files)
                files.pop(".gitattributes", None)
                local = run / "checkpoints" / f"step-{step:08}"
                those = {path.name: path for path in (run / "model").iterdir()} | {"recipe.yaml": run / "recipe.yaml"}
                those["model.safetensors"] = (run / "model" if step == commands.STEPS else local) / "model.safetensors"
                for one in steps if within.startswith("checkpoints") else (step,):
                    if within and one <= step:
                        place = within.format(one)
                        those |= {place + name: run / "checkpoints" / f"step-{one:08}" / name for name in PARTS}
                for name, path in those.items():
                    if name != "README.md" and files.get(name) != path.read_bytes():
                        return f"step {step}: {name} is not the run's"
                if odd := set(files) - set(those) - {"README.md", "metrics.jsonl", "curves.png"}:
                    return f"step {step}: holds {sorted(odd)} as well"
                rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
                rows = [row for row in rows if json.loads(row)["step"] <= step]
                if files["metrics.jsonl"].decode() != "".join(rows) or f"{step}" not in files["README.md"].decode():
                    return f"step {step}: its metrics.jsonl is not what the run had logged till then"
                if any(b"hf_ttt" in data for data in files.values()):
                    return "the token is on the Hub"
        return commands.difference(commands.bits_of(run), wanted)

    return hit


def _refused(base: Path, change: Callable, flags: dict[str, str], said: str) -> Callable:
    def hit(folder: Path) -> str | None:
        commands.copy(base, folder)
        with HubServer() as server:
            change(server)
            pushes = dict(zip(PUSHES[::2], PUSHES[1::2], strict=True)) | flags
            how = server.environment(folder / "hf") | {"HF_TOKEN": pushes.pop("HF_TOKEN", "hf_" + "t" * 30)}
            words = [word for pair in pushes.items() for word in pair]
            done = commands.run(*damage.TRAIN, *words, cwd=folder, environment=how, hasty=True)
            written = [one.path for one in server.requests if one.method != "GET" and "yaml" not in one.path]
        if done.code != 2 or said not in "".join(done.errors) or len(done.errors) != 1:
            return f"exit status {done.code}, without {said}: {done.stderr[-300:]}"
        made = (folder / damage.RUN / "checkpoints").exists()
        return f"made before it is refused: {written}, checkpoints: {made}" if written or made else None

    return hit


def _resumed(base: Path, there: tuple, wanted: dict, at: str, steps: tuple[int, ...]) -> Callable:
    """The run resumes from that step, to the whole run's bits, also where the fetch was cut off; then it asks no more."""

    def hit(folder: Path) -> str | None:
        commands.copy(base, folder)
        with HubServer() as server:
            server.repositories[ID], server.objects = there
            words = (*damage.TRAIN, "--resume_from_checkpoint", f"hub://{ID}{at}")
            server.faults.append(Fault("GET .*/optimizer.safetensors", status=503, times=10**9))
            done = _run(folder, server, *words)
            left = list((folder / damage.RUN / "checkpoints").glob("step-*"))
            if done.code != 1 or left or commands.fault_of(done, ID):
                return f"cut off, it ends with {done.code} and {left}: {done.stderr[-300:]}"
            server.faults.clear()
            done = _run(folder, server, *words)
            if done.code != 0 or server.count("GET .*/resolve/.*/model.safetensors") != 1:
                return f"what was fetched is fetched anew, or it ends with {done.code}: {done.stderr[-300:]}"
            server.requests.clear()
            shutil.rmtree(folder / damage.RUN / "model")
            done = _run(folder, server, *words)
            if done.code != 0 or server.requests:
                return f"started again, it asks the Hub, or ends with {done.code}: {done.stderr[-300:]}"
        found = sorted(path.name for path in (folder / damage.RUN / "checkpoints").iterdir())
        if found != [f"step-{step:08}" for step in steps]:
            return f"the run has {found}"
        return commands.difference(commands.bits_of(folder / damage.RUN), wanted)

    return hit


def _own(base: Path, tree: dict) -> Callable:
    def hit(folder: Path) -> str | None:
        commands.copy(base, folder)
        with HubServer() as server:
            _on_hub(server, {name: data for name, data in tree.items() if "/" not in name})
            done = _run(folder, server, *damage.TRAIN, *PUSHES, "--resume_from_checkpoint", f"hub://{ID}")
            if done.code != 2 or "no full checkpoint" not in "".join(done.errors) or len(server.titles(ID)) != 1:
                return f"a run begins over another's model, with {done.code}: {done.stderr[-300:]}"
        return None

    return hit


def _edited(base: Path, tree: dict, edit: Callable) -> Callable:
    def hit(folder: Path) -> str | None:
        commands.copy(base, folder)
        name = "checkpoints/step-00000012/manifest.json"
        edit(about := json.loads(tree[name]))
        with HubServer() as server:
            _on_hub(server, tree | {name: json.dumps(about).encode()})
            done = _run(folder, server, *damage.TRAIN, "--resume_from_checkpoint", f"hub://{ID}")
        left = list((folder / damage.RUN / "checkpoints").glob("step-*"))
        return f"ends with {done.code}, left: {left}" if done.code == 0 or left else commands.fault_of(done, ID)

    return hit


def _answered(base: Path, tree: dict, wanted: dict, status: int, times: int) -> Callable:
    page = {"kind": "say", "message": "<html>log in</html>", "headers": {"Content-Type": "text/html"}}

    def hit(folder: Path) -> str | None:
        commands.copy(base, folder)
        with HubServer() as server:
            _on_hub(server, tree)
            server.faults.append(Fault("", times=times, **(page if status == 200 else {"status": status})))
            done = _run(folder, server, *damage.TRAIN, "--resume_from_checkpoint", f"hub://{ID}")
            asked = len(server.requests)
        if times < 100:
            return (
                damage.ends(done, folder, wanted | {"losses": _losses(folder)})
                if done.code == 0
                else done.stderr[-300:]
            )
        if asked > 3:
            return f"is asked {asked} times for what no attempt changes"
        word = "looks like" if status == 200 else str(status)
        return commands.fault_of(done, ID) or (None if word in "".join(done.errors) else f"not named: {done.errors}")

    return hit


def _staged(waiting: Path, edit: Callable) -> Callable:
    def hit(folder: Path) -> str | None:
        commands.copy(waiting, folder)
        first, *others = sorted((folder / "runs/tiny/hub").glob("step-*"))
        old = json.loads((first / "push.json").read_text())["files"]
        edit(about := json.loads((first / "push.json").read_text()))
        (first / "push.json").write_text(json.dumps(about))
        for name in {*about.get("files", ())} - {*old}:
            if name != "curves.png":  # the others are there, as they are stated
                shutil.copy(first / "files" / "README.md", first / "files" / name)
        with HubServer() as server:
            done = _run(folder, server, "train.py", "--push_pending", "runs/tiny")
            found = server.files(ID) if ID in server.repositories else {}
            tags = server.tags(ID) if found else {}
        if done.code != 1 or "Traceback" in done.stderr or first.name not in done.stderr or not first.is_dir():
            return f"ends with {done.code}, kept: {first.is_dir()}: {done.stderr[-300:]}"
        if first.name in tags or {".env", "text.txt"} & {Path(name).name for name in found}:
            return f"it is on the Hub: {sorted(found)}"
        sent = all(one.name in tags and not one.exists() for one in others) or "files" not in about
        return None if sent else f"the other pushes are not sent: {sorted(tags)}"

    return hit


def _killed(waiting: Path, pushed: dict, tags: list[str], asked: str) -> Callable:
    """Two at once: the second is refused; after the first one's kill the next sends all, once."""

    def hit(folder: Path) -> str | None:
        commands.copy(waiting, folder)
        words = ("train.py", "--push_pending", "runs/tiny")
        with HubServer() as server:
            server.faults.append(Fault(asked, kind="hang", times=1))
            how = server.environment(folder / "hf")
            first = commands.Started(*words, cwd=folder, environment=how)
            while commands.alive(first.pids[0]) and not server.count(asked):
                time.sleep(0.01)
            second = _run(folder, server, *words)
            first.kill()
            first.wait()
            if second.code != 4 or "is sending it" not in second.stderr:
                return f"the second one ends with {second.code}: {second.stderr[-300:]}"
            third = _run(folder, server, *words)
            steps = [int(re.search(r"step (\d+)", title)[1]) for title in server.titles(ID)]  # newest first
            if third.code != 0 or _weights(server) != pushed or sorted(server.tags(ID)) != tags:
                return f"ends with {third.code}, on the Hub are {sorted(server.tags(ID))}: {third.stderr[-300:]}"
            again = _run(folder, server, *words)
        if again.code != 0 or again.stderr.strip() or steps != sorted(set(steps), reverse=True):
            return f"commits of the steps {steps}; the next one ends with {again.code}: {again.stderr[-300:]}"
        return None

    return hit


def _begins(base: Path, pushed: dict, tags: list[str], other: str, there: bool) -> Callable:
    """Where nothing was pushed yet, a run begins that is to resume from its own repository, and from no other one."""

    def hit(folder: Path) -> str | None:
        commands.copy(base, folder)
        with HubServer() as server:
            if there:
                server.make(other)
            done = _run(folder, server, *damage.TRAIN, *PUSHES, "--resume_from_checkpoint", f"hub://{other}")
            if other != ID:
                begun = (folder / damage.RUN / "metrics.jsonl").exists() or done.code != 2
                return f"a run begins, {done.code}: {done.stderr[-300:]}" if begun else commands.fault_of(done, other)
            if done.code != 0 or _weights(server) != pushed or sorted(server.tags(ID)) != tags:
                return f"ends with {done.code}, on the Hub are {list(server.files(ID))}: {done.stderr[-300:]}"
        return None

    return hit


def _in_order(waiting: Path, tags: list[str]) -> Callable:
    """No push overtakes one that the Hub refuses."""

    def hit(folder: Path) -> str | None:
        commands.copy(waiting, folder)
        with HubServer() as server:
            server.faults.append(Fault("POST .*/commit/", status=403, times=1))
            done = _run(folder, server, "train.py", "--push_pending", "runs/tiny")
            left = len(list((folder / "runs/tiny/hub").glob("step-*")))
            if done.code != 1 or left != len(tags) or server.titles(ID):
                return f"ends with {done.code}, {left} wait, on the Hub are {server.titles(ID)}"
            done = _run(folder, server, "train.py", "--push_pending", "runs/tiny")
            return (
                None
                if done.code == 0 and sorted(server.tags(ID)) == tags
                else f"then {done.code}: {done.stderr[-300:]}"
            )

    return hit


def _older(base: Path) -> Callable:
    def hit(folder: Path) -> str | None:
        commands.copy(base, folder)
        with HubServer() as server:
            _on_hub(server, {"last-checkpoint/old.safetensors": b"x", "notes.txt": b"mine"})
            done = _run(folder, server, *damage.TRAIN, *PUSHES[:-1], "checkpoint")
            found = [name for name in server.files(ID) if name.startswith("last-checkpoint/") or name == "notes.txt"]
        wanted = sorted(["notes.txt", *(f"last-checkpoint/{name}" for name in PARTS)])
        return None if done.code == 0 and sorted(found) == wanted else f"{done.code}, on the Hub are {sorted(found)}"

    return hit


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


def _waiting(base: Path, shared: Path) -> Path:
    """Return a folder with a run whose pushes wait on disk."""
    folder = shared / "waiting"
    if not folder.exists():
        folder.mkdir()
        commands.copy(base, folder)
        with HubServer() as server:
            server.faults.append(Fault("POST .*/commit/", status=403, times=10**9))
            done = _train(folder, server)
        if done.code != 0 or not list((folder / "runs/tiny/hub").glob("step-*")):
            raise RuntimeError(f"no push waits: {done.stderr}")
    return folder


def _on_hub(server: HubServer, files: dict[str, bytes]) -> None:
    server.make(ID).commit("by a run", dict(files))
    server.objects |= {hashlib.sha256(data).hexdigest(): data for data in files.values()}


def _lasting(base: Path, tree: dict, fault: dict, pending: Path | None, tag: bool = False) -> Callable:
    def hit(folder: Path) -> str | None:
        commands.copy(pending or base, folder)
        with HubServer() as server:
            _on_hub(server, {} if pending else tree)
            server.faults.append(Fault("", times=10**9, **fault))
            address = f"hub://{ID}" + "@step-00000006" * tag
            resumed = (*damage.TRAIN, "--resume_from_checkpoint", address)
            before = sorted((folder / "runs/tiny/hub").glob("step-*"))
            done = _run(folder, server, *(("train.py", "--push_pending", "runs/tiny") if pending else resumed))
            server.faults.clear()
            if not server.requests:
                raise RuntimeError(f"the Hub met no request: {done.stderr[-300:]}")
            stated = pending and done.code == 1 and "It waits in runs/tiny/hub" in done.stderr
            if why := commands.fault_of(done, ID, "hub://", "") if not stated or "Traceback" in done.stderr else None:
                return why if done.code != 0 else "success, without the Hub"
            if pending and sorted((folder / "runs/tiny/hub").glob("step-*")) != before:
                return "what waited to be pushed is gone"
        return None

    return hit


def _half(base: Path, tree: dict, names: str, said: str | None) -> Callable:
    """``said``: None: a run begins; "well": it is resumed; else it is refused with a line that holds this."""

    def hit(folder: Path) -> str | None:
        commands.copy(base, folder)
        with HubServer() as server:
            _on_hub(server, {name: data for name, data in tree.items() if re.fullmatch(names, name)})
            for number in range(2):  # the second start finds what the first has left
                own = () if said else PUSHES  # only a run's own repository may hold nothing yet
                done = _run(folder, server, *damage.TRAIN, *own, "--resume_from_checkpoint", f"hub://{ID}")
                if said in (None, "well"):
                    if done.code != 0:
                        return f"start {number + 1} ends with {done.code}: {done.stderr[-300:]}"
                elif why := commands.fault_of(done, ID) or (
                    said not in done.stderr and f"not {said}: {done.errors[0]}"
                ):
                    return why if done.code != 0 else "a run begins, or resumes from half a checkpoint"
        return None

    return hit
