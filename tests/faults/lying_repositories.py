"""A Hub that lies about its data repositories: no commit, endless listings, odd entries, pages of proxies, silence.

What hf:// names is read whole, as the reference reader counts it, or refused by name: never a part of it, and never two
versions mixed, where a file changes between two starts.
"""

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
LASTING = ("503", "429", "429:7", "reset", "silent", "lie", "[]", "drip")
PASSING = ("503", "429:7", "reset", "garbled")


class _Hub(lying_server._Liar):
    """Answers of the Hub's API are changed by ``server.change``: of (path, status, headers, data), to None or another."""

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
        self.asked = 0

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
            while commands.alive(started.pids[0]) and len(list((folder / "data").rglob("train_*.bin"))) < 3:
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
        data = [data_files.FORMATS[kind][0](rows) for rows in texts]
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
            while commands.alive(started.pids[0]) and len(list((folder / "data").rglob("train_*.bin"))) < want:
                time.sleep(0.005)
            started.kill()
            first = started.wait()
            path.write_bytes(data[1])
            os.utime(path, (10**9, 10**9 + 5))
            done = commands.run("prepare_data.py", *words, cwd=folder, hasty=True)
        if done.code != 0:
            return commands.fault_of(done, path.name)
        if first.code == 0 or not mark:  # it had ended; or nothing states that it is another one
            return None
        found = _words_of(folder)
        return f"rows of both files: {found}" if len(found) > 1 else None

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
