"""A server that fails, lies and changes its mind, for each format that is streamed or fetched from it.

What passes ends in the reference reader's count; what does not pass ends in one line with the file's name; never in a
part of the text.
"""

import itertools
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import commands
import data_files
from data_server import DataServer, _Handler

PASSING = ("503", "500", "429:1", "502", "reset", "short", "lie", "empty", "garbled", "stall", "408", "page")
LASTING = ("404", "403", "401", "410", "503", "reset", "short", "lie", "garbled", "loop", "page")
PAGE = "<!doctype html><title>Log in</title>"
KINDS = (".parquet", ".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".arrow", ".txt")
AFTER = ("429:86400", "503:Fri, 31 Dec 9999 23:59:59 GMT", "429:" + "9" * 400)
QUERY, SIGNED = "?part=1", "?part=1&token=SECRET&X-Amz-Signature=SECRET"


class _Liar(_Handler):
    """Knows some lies more."""

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        kind = self.server.lie_for(f"{self.command} {path}")
        if kind == "garbled":
            self.connection.sendall(b"\x00\xff\x13 this is not HTTP\r\n\r\n" * 3)
            self.close_connection = True
        elif kind == "stall":
            self.server.closing.wait(0.3)
            self.close_connection = True
        elif kind == "loop":
            self.send(302, b"", [("Location", self.path)], body)
        else:
            self.dressed = kind
            super().answer(body)

    def send(self, status: int, data: bytes, headers: list, body: bool, half: bool = False) -> None:
        """Answer as a lie has it."""
        kind, mid = getattr(self, "dressed", None), len(data) // 2
        if kind == "damage" and status in (200, 206) and mid > 100:
            data = data[:mid] + b'"' * 40 + data[mid + 40 :]
        elif kind == "shift":
            lines = data.splitlines(keepends=True)  # a row is left out, which the size does not show
            data = b"".join([*lines[:1], *lines[2:]]).ljust(len(data), b"\n")
            swap = {"Content-Range": lambda said: re.sub(r"(\d+)-", lambda at: f"{int(at[1]) + 1}-", said)}
            headers = [(name, swap.get(name, str)(value)) for name, value in headers]
        super().send(status, data, headers, body, half)


class LyingServer(DataServer):
    """``lies``: as ``faults``, of further kinds."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.RequestHandlerClass = _Liar
        self.lies: list[list] = []

    def lie_for(self, line: str) -> str | None:
        """Take a lie for this request, if there is one."""
        with self.lock:
            for lie in self.lies:
                if lie[2] and re.search(lie[0], line):
                    lie[2] -= 1
                    return lie[1]
        return None

    def meet(self, pattern: str, kind: str, times: int) -> None:
        """Add a fault or a lie."""
        own = ("garbled", "stall", "loop", "damage", "shift")
        kinds = self.lies if kind in own else self.faults
        kinds.append([pattern, PAGE if kind == "page" else kind, times])


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """Each fault for each format: at the first request, later, and for good; a file that changes on the way; secrets."""
    for kind in KINDS:
        passing, lasting = set(PASSING), set(LASTING)
        if kind == ".txt":  # it is fetched in one answer, and nothing else states its size: empty is empty
            passing, lasting = passing - {"lie", "empty"}, lasting - {"lie"} | {"empty"}
        for fault in sorted(passing):
            yield (
                f"{kind}: {fault}, then well",
                _case(rng, kind, fault, 1 if fault == "page" else 2),
            )  # a second page is final
        for fault in sorted(lasting):
            yield f"{kind}: {fault} for good", _case(rng, kind, fault, 10**9)
        if kind != ".txt":  # a text is fetched once
            yield f"{kind}: other content after a kill", _changing(rng, kind)
        for fault in ("ok", "403", "garbled"):
            yield f"{kind}: a signed URL, {fault}", _signed(rng, kind, fault)
    for kind in (".txt", ".jsonl"):
        for after in AFTER:
            yield f"{kind}: {after[:24]} for good", _case(rng, kind, after, 10**9)
    for kind in (".jsonl", ".jsonl.gz", ".csv.gz"):
        for times in (1, 10**9):
            yield f"{kind}: a damaged answer, {'once' if times == 1 else 'for good'}", _case(rng, kind, "damage", times)
    for kind in (".jsonl", ".csv", ".parquet"):
        yield f"{kind}: another range than was asked for, for good", _case(rng, kind, "shift", 10**9)
        yield f"{kind}: another range than was asked for, then well", _case(rng, kind, "shift", 2)
    for kind, fault, times in itertools.product((".jsonl", ".parquet", ".txt"), ("503", "garbled"), (1, 3, 4, 6)):
        yield f"{kind}: {fault}, {times} times", _case(rng, kind, fault, times)
    yield "nothing listens there", _nothing


def _case(rng: random.Random, kind: str, fault: str, times: int) -> Callable[[Path], str | None]:
    later, seed = rng.random() < 0.5, rng.random()

    def hit(folder: Path) -> str | None:
        commands.copy(folder.parents[1] / "base", folder)
        with LyingServer(folder / "served") as server:
            names, wanted = _serve(folder, kind, random.Random(seed))
            urls = [f"{server.url}/files/{name}{QUERY}" for name in names]
            method = "GET" if later else ""
            server.meet(f"{method}.*/{re.escape(names[1])}", fault, times)
            done = commands.run("prepare_data.py", *_flags(urls), cwd=folder, hasty=True)
        return _judge(done, folder, names[1], wanted, lasting=times > 100)

    return hit


def _nothing(folder: Path) -> str | None:
    commands.copy(folder.parents[1] / "base", folder)
    with LyingServer(folder) as server:
        url = server.url
    done = commands.run("prepare_data.py", *_flags([f"{url}/files/one.txt"]), cwd=folder)  # no wait in it is shortened
    return commands.fault_of(done, "one.txt") if done.code == 2 else f"it ends with {done.code}: {done.stderr[-300:]}"


def _signed(rng: random.Random, kind: str, fault: str) -> Callable[[Path], str | None]:
    seed = rng.random()

    def hit(folder: Path) -> str | None:
        commands.copy(folder.parents[1] / "base", folder)
        with LyingServer(folder / "served") as server:
            names, wanted = _serve(folder, kind, random.Random(seed))
            server.meet(f"/{names[1]}", fault, 10**9)
            urls = [f"{server.url}/files/{name}{SIGNED}" for name in names]
            urls[0] = urls[0].replace("http://", "http://me:SECRET@")
            done = commands.run("prepare_data.py", *_flags(urls), cwd=folder, hasty=True)
        written = [path.read_bytes() for path in (folder / "data").rglob("*") if path.is_file()]
        if "SECRET" in done.stdout + done.stderr or any(b"SECRET" in data for data in written):
            return "the URL's secret stands in what was printed or written"
        return _judge(done, folder, names[1], wanted, lasting=fault != "ok")

    return hit


def _changing(rng: random.Random, kind: str) -> Callable[[Path], str | None]:
    seed = rng.random()

    def hit(folder: Path) -> str | None:
        commands.copy(folder.parents[1] / "base", folder)
        with LyingServer(folder / "served") as server:
            names, _ = _serve(folder, kind, random.Random(seed), rows=600)
            urls = [f"{server.url}/files/{name}{QUERY}" for name in names]
            started = commands.Started("prepare_data.py", *_flags(urls), cwd=folder, hasty=True)
            while commands.alive(started.pids[0]) and len(commands.train_shards(folder)) < 3:
                time.sleep(0.005)
            started.kill()
            started.wait()
            shutil.rmtree(folder / "served")
            names, wanted = _serve(folder, kind, random.Random(seed + 1), rows=600)
            done = commands.run("prepare_data.py", *_flags(urls), cwd=folder, hasty=True)
        if done.code == 0:
            return _judge(done, folder, names[0], wanted, lasting=False)
        return commands.fault_of(done, *names)

    return hit


def _serve(folder: Path, kind: str, dice: random.Random, rows: int = 60) -> tuple[list[str], tuple[int, int]]:
    packed = ".gz" if kind.endswith(".gz") else ""
    suffix = kind.removesuffix(packed)
    (folder / "served" / "files").mkdir(parents=True)
    names = [f"one{kind}", f"two{kind}"]
    for name in names:
        texts = [f"{name} {dice.random()} {commands.text(i, 60)}" for i in range(rows)]
        data = data_files.PACK[packed](data_files.FORMATS[suffix][0](texts))
        (folder / "served" / "files" / name).write_bytes(data)
    return names, _count(folder, names)


def _count(folder: Path, names: list[str]) -> tuple[int, int]:
    found = [data_files.reference(name, (folder / "served" / "files" / name).read_bytes()) for name in names]
    if names[0].endswith(".txt"):  # two documents, of which the last one is cut
        return 3, sum(size for _, size in found)
    return sum(count for count, _ in found), sum(size for _, size in found)


def _flags(urls: list[str]) -> tuple[str, ...]:
    return ("--recipe", "tiny.yaml", "--shard_tokens", "600", "--data_files", *urls)


def _judge(done: commands.Done, folder: Path, name: str, wanted: tuple[int, int], *, lasting: bool) -> str | None:
    if done.code != 0:
        if not lasting:
            return f"a fault that passes ends it: {(done.errors or [done.stderr[-300:]])[0][:300]}"
        return commands.fault_of(done, name)
    if lasting and name.endswith(".txt"):
        return "success, without the text"
    found = commands.prepared(folder)
    return None if found == wanted else f"(documents, bytes) {found}, served were {wanted}"
