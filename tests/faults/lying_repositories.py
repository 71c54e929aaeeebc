"""A Hub that lies about its data repositories: no commit, endless listings, odd entries, pages of proxies, silence.

What hf:// names is read whole, as the reference reader counts it, or refused by name: never a part of it, and never two
versions mixed, where a file changes between two starts.
"""

import io
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import commands
import damage
import data_files
import lying_server
import numpy
import outside_words
import pyarrow.parquet
from lying_server import LyingServer

NAME = "me/corpus"
SECONDS = 2 * commands.SECONDS  # a silent server is waited for some times
KINDS = (".parquet", ".jsonl", ".csv")
PAGE = b"<!DOCTYPE html><html><body>log in</body></html>"
AFTER = ("\u00b2", "-1", "1e400", "nan", "soon", "9" * 400, "Fri, 31 Dec 9999 23:59:59 GMT", "Mon, 99 Foo 2026", "")
ENTRIES = (
    {"path": None},
    {"path": 7},
    {"path": ["a"]},
    {"path": ""},
    {"path": "../../../up.jsonl"},
    {"path": "/etc/a.jsonl"},
    {"path": "data/a\x1b[2J.jsonl"},
    {"path": "data/a\nb.jsonl"},
    {"path": "x" * 5000},
    {"size": None},
    {"size": "many"},
    {"size": -1},
    {"type": None},
    {"type": "link"},
    {"oid": None},
    {"lfs": 3},
)
ABOUT = {
    "no sha": lambda about: about.pop("sha"),
    "sha is null": lambda about: about.update(sha=None),
    "sha is empty": lambda about: about.update(sha=""),
    "sha is a number": lambda about: about.update(sha=7),
    "sha is main": lambda about: about.update(sha="main"),
    "sha climbs": lambda about: about.update(sha="../../x"),
    "siblings are null": lambda about: about.update(siblings=None),
    "siblings are numbers": lambda about: about.update(siblings=[1, 2]),
}
DATA = f"hf://datasets/{NAME}/files/*"  # of one kind

# What the Hub is asked for, by which command, and what of it there is to fail.
USES = {
    "a file": (("prepare_data.py", "--data_files", f"hf://datasets/{NAME}/data/*.jsonl"), NAME),
    "a data set": (("prepare_data.py", "--data_files", "null", "--dataset_name", NAME), NAME),
    "token files": (
        ("prepare_data.py", "--data_files", "null", "--data_dir", "hf://datasets/me/tokens/tokens"),
        "me/tokens",
    ),
    "a tokenizer": (("prepare_data.py", "--tokenizer", "me/model"), "me/model"),
    "a model": (("train.py", "--init_from", "me/model", "--max_steps", "3", "--warmup_steps", "1"), "me/model"),
    "HellaSwag": (("train.py", "--hellaswag_steps", "3", "--max_steps", "3", "--warmup_steps", "1"), "HellaSwag"),
    "a text by URL": (("prepare_data.py", "--data_files", "{}/files/a.txt"), "a.txt"),
    "rows by URL": (("prepare_data.py", "--data_files", "{}/files/a.jsonl"), "a.jsonl"),
}
# Of these two versions are served, "a" at first and as the tag v1: each row or run of tokens shows of which it is.
PINNED = {
    **{f"files, {kind}": ("--data_files", f"hf://datasets/{NAME}{{}}/data/*{kind}") for kind in KINDS},
    "a file": ("--data_files", f"hf://datasets/{NAME}{{}}/data/odd/c[1].jsonl"),
    "a link": ("--data_files", "URL/datasets/me/corpus/resolve/main/data/one.jsonl"),
    "a data set": ("--data_files", "null", "--dataset_name", NAME),
    "token files": ("--data_files", "null", "--data_dir", f"hf://datasets/{NAME}{{}}/tokens"),
}
PINNED_AT = ("at rest", "after a kill", "while it reads", "at a tag")
LASTING = ("503", "429", "429:7", "reset", "silent", "lie", "[]", "drip")
PASSING = ("503", "429:7", "reset", "garbled")


class _View:
    """A server as it is at one commit."""

    def __init__(self, server: LyingServer, commit: str, folder: Path):
        self.server, self.commit, self.folder = server, commit, folder

    def __getattr__(self, name: str) -> object:
        return getattr(self.server, name)


class _Hub(lying_server._Liar):
    """Answers of the Hub's API are changed by ``server.change``: of (path, status, headers, data), to None or another.

    Where there are ``server.versions``, folders by commit, a request without one is of the newest: the last one.
    """

    def answer(self, body: bool) -> None:
        """Answer from the version that is asked for."""
        server, versions = self.server, dict(self.server.versions)
        if versions:
            for tag, commit in {"v1": next(iter(versions)), "main": [*versions][-1]}.items():
                self.path = re.sub(rf"/{tag}(?=[/?]|$)", f"/{commit}", self.path)
            commit = next((commit for commit in versions if commit in self.path), [*versions][-1])
            self.server = _View(server, commit, versions[commit])
        try:
            super().answer(body)
        finally:
            self.server = server

    def send(self, status: int, data: bytes, headers: list, body: bool, half: bool = False) -> None:
        if self.path.startswith(("/api/", "/datasets/")) and status in (200, 206):
            status, data, headers = self.server.change(self.path, status, data, headers)
        super().send(status, data, headers, body, half)


class LyingHub(LyingServer):
    """``change``: what becomes of an answer; ``asked``: how many came."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.RequestHandlerClass = _Hub
        self.change: Callable = lambda path, *answer: answer
        self.asked, self.versions = 0, {}

    def lie_for(self, line: str) -> str | None:
        """Take a lie for this request, if there is one."""
        self.asked += 1
        return super().lie_for(line)


def _about(how: str) -> Callable:
    def change(path: str, status: int, data: bytes, headers: list) -> tuple:
        if path.startswith("/api/") and "/tree/" not in path and "/paths-info/" not in path:
            about = json.loads(data)
            ABOUT[how](about)
            data, headers = json.dumps(about).encode(), [(n, v) for n, v in headers if n != "X-Repo-Commit"]
        return status, data, headers

    return change


def _entry(entry: dict) -> Callable:
    def change(path: str, status: int, data: bytes, headers: list) -> tuple:
        if "/tree/" in path and isinstance(rows := json.loads(data), list) and rows:
            data = json.dumps([*rows, rows[-1] | entry]).encode()
        return status, data, headers

    return change


def _without(commit: str) -> Callable:
    return lambda path, *answer: (404, b"{}", []) if commit in path else answer


def _whole(answer: bytes) -> Callable:
    return lambda path, status, data, headers: (status, answer, headers) if "/api/" in path else (status, data, headers)


def _page(where: str) -> Callable:
    def change(path: str, status: int, data: bytes, headers: list) -> tuple:
        return (200, PAGE, [("Content-Type", "text/html")]) if where in path else (status, data, headers)

    return change


def _endless(server: LyingHub) -> Callable:
    def change(path: str, status: int, data: bytes, headers: list) -> tuple:
        if "/tree/" in path:
            address = urlsplit(path)
            query, _, page = address.query.partition("&page=")
            link = f'<{server.url}{address.path}?{query}&page={int(page or 0) + 1}>; rel="next"'
            data, headers = b"[]" if page else data, [*headers, ("Link", link)]
        return status, data, headers

    return change


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """Lies about a repository, its listing and its files; faults of each; changes between starts."""
    changes = {how: (_about(how), None) for how in ABOUT}
    changes |= {f"an entry with {entry!r:.50}": (_entry(entry), None) for entry in ENTRIES}
    changes |= {f"a proxy's page for {where}": (_page(where), False) for where in ("/api/", "/tree/", "/resolve/")}
    for answer in (b"[]", b"{}", b"null", b"3", b"[null]", b"[" * 100_000, b"\xff\xfe", b""):
        changes[f"the API answers {answer!r:.20}"] = (_whole(answer), False)
    for title, (change, may) in changes.items():
        yield title, _case(rng, change=change, well=may)
    yield "/resolve/: silent for good", _case(rng, fault=("/resolve/", "silent", 10**9), well=False)
    yield "a text of the Hub", _case(rng, kind=".txt")
    yield "a listing without end", _case(rng, endless=True, well=False)
    for after in AFTER:
        yield f"Retry-After: {after!r:.30}", _case(rng, fault=("/resolve/", f"429:{after}", 2), well=True)
    for where in ("/api/", "/tree/", "/resolve/"):
        for fault in ("reset", "garbled", "503", "stall", "silent"):
            yield f"{where}: {fault}, then well", _case(rng, fault=(where, fault, 2), well=True)
        for fault in ("404", "403", "reset", "garbled", "loop"):
            yield f"{where}: {fault} for good", _case(rng, fault=(where, fault, 10**9), well=False)
    model = damage.finished(base, shared)[0] / damage.RUN / "model"
    for use in USES:
        for fault in LASTING:
            yield f"{use}: {fault} for good", _used(model, use, fault, 10**9)
        for fault in PASSING:
            yield f"{use}: {fault}, then well", _used(model, use, fault, 2)
    for kind in KINDS:
        for mark in ("ETag", "Last-Modified", "") if kind != ".parquet" else ():  # whose sizes differ
            yield (
                f"{kind}: of equal size, another after a kill, marked by {mark or 'its size'}",
                _replaced(rng, kind, mark),
            )
        yield f"{kind}: changes between starts, sha is null", _changing(rng, kind, _about("sha is null"))
        yield f"{kind}: changes between starts, the first commit is gone", _changing(rng, kind, None)
    for use in PINNED:
        for when in PINNED_AT:
            if when != "at a tag" or "{}" in "".join(PINNED[use]) or use == "a data set":
                yield f"{use}: a new commit {when}", _pinned(rng, use, when)
    for how in [how for how in ABOUT if how.startswith(("no sha", "sha"))]:
        for use in [use for use, (_, named) in USES.items() if named.startswith("me/")]:
            yield f"{use}: {how}", _unpinned(model, use, how)
    for use in [use for use in USES if not use.endswith("URL")]:
        yield f"{use}: HF_HUB_OFFLINE is set", _offline(model, use)
    for mark in ("ETag", "Last-Modified"):
        yield f".parquet: of equal size, another after a kill, marked by {mark}", _replaced(rng, ".parquet", mark)
    for kind in KINDS:
        yield f"{kind}: the same one after a kill, modified now at each answer", _replaced(rng, kind, "now")
    for what, (damage_it, said) in TOKENS.items():
        yield f"token files: {what}", _tokens(damage_it, said)


def _case(
    rng: random.Random,
    change: Callable | None = None,
    fault: tuple[str, str, int] | None = None,
    endless: bool = False,
    well: bool | None = None,
    kind: str = "",
) -> Callable[[Path], str | None]:
    """``well``: it has to end in success (True) or with a line (False); None: either."""
    kind, seed = kind or rng.choice(KINDS), rng.random()

    def hit(folder: Path) -> str | None:
        commands.copy(folder.parents[1] / "base", folder)
        with LyingHub(folder / "served") as server:
            wanted = _serve(folder, kind, random.Random(seed))
            server.change = _endless(server) if endless else change or server.change
            if fault:
                server.meet(*fault)
            done = _start(folder, server, kind).wait(SECONDS)
            if not server.asked and kind in KINDS:  # else it may be refused at once
                raise RuntimeError(f"the Hub met no request: {done.stderr[-300:]}")
        if done.code != 0:
            if well:
                return f"a fault that passes ends it: {(done.errors or [done.stderr[-300:]])[0][:300]}"
            return commands.fault_of(done, NAME, "hf://", "one.", "two.")
        if well is False:
            return "success"
        found = commands.prepared(folder)
        return None if found == wanted else f"(documents, bytes) {found}, served were {wanted}"

    return hit


def _changing(rng: random.Random, kind: str, change: Callable | None) -> Callable[[Path], str | None]:
    seed = rng.random()

    def hit(folder: Path) -> str | None:
        commands.copy(folder.parents[1] / "base", folder)
        with LyingHub(folder / "served") as server:
            server.change = change or server.change
            wanted = [_serve(folder, kind, random.Random(seed), rows=600)]
            started = _start(folder, server, kind)
            while commands.alive(started.pids[0]) and len(commands.train_shards(folder)) < 3:
                time.sleep(0.005)
            started.kill()
            started.wait()
            wanted.append(_serve(folder, kind, random.Random(seed + 1), rows=600))
            if not change:
                server.change, server.commit = _without(server.commit), "decade" + "0" * 34
            done = _start(folder, server, kind).wait()
        if done.code != 0:
            return commands.fault_of(done, NAME, "one.", "two.")
        found = commands.prepared(folder)
        return None if found in wanted else f"(documents, bytes) {found}, the versions' are {wanted}"

    return hit


def _serve(folder: Path, kind: str, dice: random.Random, rows: int = 60) -> tuple[int, int]:
    repository = folder / "served" / "datasets" / NAME
    shutil.rmtree(folder / "served", ignore_errors=True)
    names, wanted = lying_server._serve(folder, kind, dice, rows)
    repository.mkdir(parents=True)
    (folder / "served" / "files").rename(repository / "files")
    return wanted


def _environment(folder: Path, server: LyingHub) -> dict[str, str]:
    environment = {"HF_ENDPOINT": server.url, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "0"}
    return environment | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def _start(folder: Path, server: LyingHub, kind: str) -> commands.Started:
    environment = _environment(folder, server)
    flags = ("--recipe", "tiny.yaml", "--shard_tokens", "600", "--data_files", DATA + kind)
    return commands.Started("prepare_data.py", *flags, cwd=folder, environment=environment, hasty=True)


def _used(model: Path, use: str, fault: str, times: int) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        commands.copy(folder.parents[1] / "base", folder)
        served, (words, culprit) = folder / "served", USES[use]
        outside_words.serve(served, model)
        with LyingHub(served) as server:
            server.meet("", fault, times)
            (script, *flags), how = [word.format(server.url) for word in words], _environment(folder, server)
            done = commands.run(
                script, "--recipe", "tiny.yaml", *flags, cwd=folder, seconds=SECONDS, hasty=True, environment=how
            )
            if not server.asked:
                raise RuntimeError(f"the server met no request: {done.stderr[-300:]}")
        if done.code == 0:
            # A small file may drip to its end; half of a text that is promised as all of it, or another one, is a text.
            may = times < 100 or fault == "drip" or (use == "a text by URL" and fault in ("lie", "[]"))
            return None if may else "success, without what was asked for"
        if times < 100 and use != "HellaSwag":  # whose few retries are the client's own: a file of it may be given
            return f"a fault that passes ends it: {(done.errors or [done.stderr[-300:]])[0][:300]}"
        return commands.fault_of(done, culprit, NAME, "hellaswag")

    return hit


def _replaced(rng: random.Random, kind: str, mark: str) -> Callable[[Path], str | None]:
    """The file is another one of the same size where a killed reading goes on: never some rows of each."""
    seed = rng.random()

    def hit(folder: Path) -> str | None:
        commands.copy(folder.parents[1] / "base", folder)
        texts = [[f"{letter}{i:04} " + commands.text(i, 40) for i in range(900)] for letter in "ab"]
        (folder / "served" / "files").mkdir(parents=True)
        path = folder / "served" / "files" / f"one{kind}"
        data = [_plain_parquet(rows) if kind == ".parquet" else data_files.FORMATS[kind][0](rows) for rows in texts]
        if len(data[0]) != len(data[1]):
            raise RuntimeError("the two files differ in size")
        with LyingServer(folder / "served") as server:
            server.marks = (mark,) if mark else ()
            words = (
                "--recipe",
                "tiny.yaml",
                "--shard_tokens",
                "600",
                "--data_files",
                f"{server.url}/files/{path.name}",
            )
            path.write_bytes(data[0])
            started = commands.Started("prepare_data.py", *words, cwd=folder, hasty=True)
            want = 1 + int(seed * 4)
            while commands.alive(started.pids[0]) and len(commands.train_shards(folder)) < want:
                time.sleep(0.005)
            started.kill()
            first = started.wait()
            if mark != "now":
                path.write_bytes(data[1])
                os.utime(path, (10**9, 10**9 + 5))
            done = commands.run("prepare_data.py", *words, cwd=folder, hasty=True)
        if mark == "now":
            same = done.code == 0 and commands.prepared(folder)[0] == len(texts[0])
            return None if same else f"it ends with {done.code}: {done.stderr[-300:]}"
        if done.code != 0:
            return commands.fault_of(done, path.name)
        if first.code == 0 or not mark:  # it had ended; or nothing states that it is another one
            return None
        found = _words_of(folder)
        return f"rows of both files: {found}" if len(found) > 1 else None

    return hit


def _version(folder: Path, letter: str) -> Path:
    """Write a repository of which each row begins with the letter, and all tokens are that of the letter."""
    place = folder / letter / "datasets" / NAME
    (place / "data" / "odd").mkdir(parents=True)
    (place / "tokens").mkdir()
    for name in ("one", "two", "odd/c[1]", "odd/c1"):  # the last one is what the third would be as a pattern
        texts = [f"{'b' if name == 'odd/c1' else letter}{i:04} " + commands.text(i, 40) for i in range(300)]
        for kind in KINDS if "odd" not in name else (".jsonl",):
            (place / "data" / f"{name}{kind}").write_bytes(data_files.FORMATS[kind][0](texts))
    for number, name in enumerate(("x_val_0", *(f"x_train_{i}" for i in range(5)))):
        (place / "tokens" / f"{name}.bin").write_bytes(_token_file(letter, 300 + number))
    return folder / letter


def _token_file(letter: str, count: int) -> bytes:
    header = b"".join(number.to_bytes(4, "little") for number in (20240520, 1, count)).ljust(1024, b"\0")
    return header + (ord(letter) % 250).to_bytes(2, "little") * count


def _pinned(rng: random.Random, use: str, when: str) -> Callable[[Path], str | None]:
    """All of it comes from the commit that was the newest at the first start, or that was asked for."""
    want = 1 + int(rng.random() * 4)

    def hit(folder: Path) -> str | None:
        commands.copy(folder.parents[1] / "base", folder)
        versions = [_version(folder / "served", letter) for letter in "ab"]
        if use == "a data set":  # of one kind
            for path in [
                path for version in versions for path in version.rglob("*") if path.suffix in (".csv", ".parquet")
            ]:
                path.unlink()
            for version in versions:
                shutil.rmtree(version / "datasets" / NAME / "tokens")
                shutil.rmtree(version / "datasets" / NAME / "data" / "odd")
        tag = when == "at a tag"
        with LyingHub(folder / "served") as server:
            server.versions = {"a" * 40: versions[0]}
            newer = {"a" * 40: versions[0], "b" * 40: versions[1]}
            words = [word.format("@v1" if tag else "").replace("URL", server.url) for word in PINNED[use]]
            words += ("--shard_tokens", "600", *(("--dataset_revision", "v1") if tag and use == "a data set" else ()))
            how = {"cwd": folder, "environment": _environment(folder, server), "hasty": True}
            if tag:
                server.versions = newer
            started = commands.Started("prepare_data.py", "--recipe", "tiny.yaml", *words, **how)
            if when in ("after a kill", "while it reads"):
                while commands.alive(started.pids[0]) and len(list((folder / "data").glob("*/*train_*.bin"))) < want:
                    time.sleep(0.002)
                server.versions = newer
                if when == "after a kill":
                    started.kill()
            done = started.wait(SECONDS)
            server.versions = newer
            if when == "after a kill":
                done = commands.run("prepare_data.py", "--recipe", "tiny.yaml", *words, **how)
            asked = server.asked
            again = commands.run("prepare_data.py", "--recipe", "tiny.yaml", *words, **how) if done.code == 0 else done
        if again.code != 0:
            return f"ends with {done.code}, {again.code}: {again.stderr[-300:]}"
        if use == "token files":
            (place,) = (folder / "data").glob("corpus-*")
            served = {path.name: path.read_bytes() for path in (versions[0] / "datasets" / NAME / "tokens").iterdir()}
            found = {path.name: path.read_bytes() for path in place.glob("*.bin")}
            if server.asked != asked:
                return "what is complete is asked for anew"
            return None if found == served else "other token files than the commit's"
        (place,) = (folder / "data").glob("*/manifest.json")
        files = 1 if use in ("a file", "a link") else 2
        found = _words_of(folder), commands.prepared(folder)[0]
        return None if found == ({"a"}, 300 * files) else f"rows of {found[0]}, {found[1]} documents"

    return hit


def _unpinned(model: Path, use: str, how: str) -> Callable[[Path], str | None]:
    """Without a commit two versions could be mixed: it is refused at once, and nothing is made."""

    def hit(folder: Path) -> str | None:
        commands.copy(folder.parents[1] / "base", folder)
        (script, *flags), named = USES[use]
        outside_words.serve(folder / "served", model)
        with LyingHub(folder / "served") as server:
            server.change, plain = _about(how), _environment(folder, server)
            done = commands.run(
                script, "--recipe", "tiny.yaml", *flags, cwd=folder, seconds=SECONDS, hasty=True, environment=plain
            )
        if done.code == 0:
            return "success, without a commit"
        odd = [path for path in (folder / "data").rglob("*") if path.suffix in (".bin", ".json")]
        said = None if "gives no commit" in "".join(done.errors) and done.code == 2 else f"not refused: {done.errors}"
        return commands.fault_of(done, named) or said or (f"made: {odd}" if odd and "token" in use else None)

    return hit


def _offline(model: Path, use: str) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        commands.copy(folder.parents[1] / "base", folder)
        (script, *flags), named = USES[use]
        outside_words.serve(folder / "served", model)
        with LyingHub(folder / "served") as server:
            how = _environment(folder, server) | {"HF_HUB_OFFLINE": "1"}
            done = commands.run(script, "--recipe", "tiny.yaml", *flags, cwd=folder, hasty=True, environment=how)
            if done.code == 0 or server.asked:
                return f"success, or {server.asked} requests"
        own = use in ("a file", "a data set", "token files")  # else it is a library that says so, in other words
        return commands.fault_of(done, "HF_HUB_OFFLINE" if own else named)

    return hit


def _plain_parquet(texts: list[str]) -> bytes:
    """Return a file whose size does not depend on its letters."""
    sink = io.BytesIO()
    how = {"compression": "none", "use_dictionary": False, "write_statistics": False, "row_group_size": 100}
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), sink, **how)
    return sink.getvalue()


# What happens to token files that are here or on the Hub, and a word of the line, or None where all is right again.
TOKENS: dict[str, tuple[Callable, str | None]] = {
    "nothing": (lambda here, hub: None, None),
    "a bit of one flips": (lambda here, hub: damage.flip(here / "x_train_1.bin", 0.9), None),
    "one is cut": (lambda here, hub: damage.cut(here / "x_train_2.bin", 0.5), None),
    "the validation file is gone": (lambda here, hub: (here / "x_val_0.bin").unlink(), None),
    "one is gone, and another on the Hub": (
        lambda here, hub: (
            (here / "x_train_1.bin").unlink(),
            (hub / "x_train_1.bin").write_bytes(_token_file("b", 302)),
        ),
        "x_train_1.bin",
    ),
    "the manifest is gone": (lambda here, hub: (here / "manifest.json").unlink(), None),
    "half a fetch is left": (
        lambda here, hub: ((here / ".fetch").mkdir(), (here / ".fetch/a").touch(), (here / "manifest.json").unlink()),
        None,
    ),
}


def _tokens(damage_it: Callable, said: str | None) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        commands.copy(folder.parents[1] / "base", folder)
        hub = _version(folder / "served", "a") / "datasets" / NAME / "tokens"
        served = {path.name: path.read_bytes() for path in hub.iterdir()}
        with LyingHub(folder / "served" / "a") as server:
            words = [word.format("") for word in PINNED["token files"]]
            how = {"cwd": folder, "environment": _environment(folder, server), "hasty": True}
            server.meet("GET .*/resolve/.*/x_train_3", "lie", 1)
            first = commands.run("prepare_data.py", "--recipe", "tiny.yaml", *words, "--limit_tokens", "500", **how)
            (few,) = (sorted(path.name for path in place.glob("*.bin")) for place in (folder / "data").glob("corpus-*"))
            commands.clear(folder)
            done = commands.run("prepare_data.py", "--recipe", "tiny.yaml", *words, **how)
            if first.code or done.code:
                return f"ends with {first.code}, {done.code}: {done.stderr[-300:]}"
            if few != ["x_train_0.bin", "x_train_1.bin", "x_val_0.bin"]:
                return f"of 500 tokens these are fetched: {few}"
            (here,) = (folder / "data").glob("corpus-*")
            damage_it(here, hub)
            done = commands.run("prepare_data.py", "--recipe", "tiny.yaml", *words, **how)
        if said:
            return commands.fault_of(done, said) if done.code else "success, with another file than before"
        found = {path.name: path.read_bytes() for path in here.glob("*.bin")}
        if done.code or found != served or (here / ".fetch").exists():
            return f"ends with {done.code}, all right: {found == served}: {done.stderr[-300:]}"
        return None

    return hit


def _words_of(folder: Path) -> set[str]:
    """Return by which letters the numbered rows of the shards begin."""
    import tokenizers

    (place,) = (path.parent for path in (folder / "data").glob("*/manifest.json"))
    coder = tokenizers.Tokenizer.from_file(str(folder / "tok" / "tokenizer.json"))
    found = set()
    for path in place.glob("*.bin"):
        ids = numpy.frombuffer(path.read_bytes()[1024:], dtype=numpy.uint16)
        found |= set(re.findall(r"\b([ab])\d{4} ", coder.decode(ids.tolist(), skip_special_tokens=False)))
    return found
