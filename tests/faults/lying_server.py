"""A server that fails, lies and changes its mind, for each format that is streamed or fetched from it.

What passes ends in the reference reader's count; what does not pass ends in one line with the file's name; never in a
part of the text.
"""

import gzip
import itertools
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import commands
import data_files
from data_server import DataServer, _Handler

PASSING = ("503", "500", "429:1", "502", "reset", "short", "lie", "empty", "garbled", "stall", "408", "page")
LASTING = ("404", "403", "401", "410", "503", "reset", "short", "lie", "garbled", "loop", "page")
PAGE = "<!doctype html><title>Log in</title>"
KINDS = (".parquet", ".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".arrow", ".txt")
WORDS = ("the request has no right to this, ask again with one\n" * 40).encode()
# How a friendly server may give a text, by the name that it is asked for.
FRIENDLY = {
    "plain.txt": "",
    "with space.txt": "",
    "\u00fcn\u00ef.txt": "",
    "n" * 240 + ".txt": "",
    "noname": "",
    "x.html": "html",
}
FRIENDLY |= {f"{how}.txt": how for how in ("html", "gzip", "chunks", "redirect")}
FRIENDLY |= {f"{how}.jsonl": how for how in ("html", "redirect", "weak")}
PAGES = ("<!DOCTYPE html><p>", "<html lang=en>", "\ufeff \n\t<HTML>", "<!doctype  HTML PUBLIC 'x'>")
# What ends the first start that asks for a text or rows, of which nothing may stay for the second one.
CUTS = ("404 words", "403 words", "503 words", "429 words", "page", "short", "reset", "kill", "full disk", "garbled")
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
        elif kind and kind.endswith(" words"):
            self.send(int(kind[:3]), WORDS, [("Content-Type", "text/plain")], body)
        elif kind == "redirect" and "/moved/" not in path:
            self.send(302, b"", [("Location", self.path.replace("/files/", "/files/moved/"))], body)
        else:
            self.dressed = kind
            super().answer(body)

    def send(self, status: int, data: bytes, headers: list, body: bool, half: bool = False) -> None:
        """Answer as a lie, or a friendly server's habit, has it."""
        kind, mid = getattr(self, "dressed", None), len(data) // 2
        if kind == "html":
            headers = [*headers, ("Content-Type", "Text/HTML; charset=utf-8")]
        elif kind == "damage" and status in (200, 206) and mid > 100:
            data = data[:mid] + b'"' * 40 + data[mid + 40 :]
        elif kind == "shift":
            lines = data.splitlines(keepends=True)  # a row is left out, which the size does not show
            data = b"".join([*lines[:1], *lines[2:]]).ljust(len(data), b"\n")
            swap = {"Content-Range": lambda said: re.sub(r"(\d+)-", lambda at: f"{int(at[1]) + 1}-", said)}
            headers = [(name, swap.get(name, str)(value)) for name, value in headers]
        elif kind == "weak":  # a proxy in between: every second time
            weak = "W/" * (next(self.server.numbers) % 2)
            headers = [(name, weak + value if name == "ETag" else value) for name, value in headers]
        elif kind == "gzip" and status == 200:
            data, headers = gzip.compress(data), [*headers, ("Content-Encoding", "gzip")]
        elif kind == "chunks" and status == 200 and body:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in (data[:mid], data[mid:], b""):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            return
        super().send(status, data, headers, body, half)


class LyingServer(DataServer):
    """``lies``: as ``faults``, of further kinds."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.RequestHandlerClass = _Liar
        self.lies: list[list] = []
        self.numbers = itertools.count()

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
        own = ("garbled", "stall", "loop", "html", "damage", "shift", "weak", "gzip", "chunks", "redirect")
        kinds = self.lies if kind in own or kind.endswith(" words") else self.faults
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
        for how in CUTS:
            yield f"{kind}: {how}, then a second start", _second(kind, how)
        for after in AFTER:
            yield f"{kind}: {after[:24]} for good", _case(rng, kind, after, 10**9)
    for name, how in FRIENDLY.items():
        yield f"a friendly server: {how or 'as it is'}, {name[:20]}", _friendly(name, how)
    for page, name in itertools.product(PAGES, ("page.txt", "page.jsonl")):
        yield f"{name} is {page!r}", _page(name, page)
    for kind in (".jsonl", ".jsonl.gz", ".csv.gz"):
        for times in (1, 10**9):
            yield f"{kind}: a damaged answer, {'once' if times == 1 else 'for good'}", _case(rng, kind, "damage", times)
    for kind in (".jsonl", ".csv", ".parquet"):
        yield f"{kind}: another range than was asked for, for good", _case(rng, kind, "shift", 10**9)
        yield f"{kind}: another range than was asked for, then well", _case(rng, kind, "shift", 2)
    for kind, fault, times in itertools.product((".jsonl", ".parquet", ".txt"), ("503", "garbled"), (1, 3, 4, 6)):
        yield f"{kind}: {fault}, {times} times", _case(rng, kind, fault, times)
    for packed, how, name in itertools.product((".gz", ".bz2", ".xz"), ("whole", "cut", "damaged"), (".txt", "")):
        for far in (False, True):
            yield (
                f"a text that is packed: {packed}, {how}, x{name or packed}, far: {far}",
                _packed(packed, how, name, far),
            )
    yield "two texts of one name, and a signature that is renewed", _names
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


def _second(kind: str, how: str) -> Callable[[Path], str | None]:
    """Of what a first start got nothing stays: the second one has all of it."""

    def hit(folder: Path) -> str | None:
        commands.copy(folder.parents[1] / "base", folder)
        with LyingServer(folder / "served") as server:
            names, wanted = _serve(folder, kind, random.Random(1), rows=400)
            words = _flags([f"{server.url}/files/{name}" for name in names])
            if how == "kill":
                server.meet(f"GET.*/{names[1]}", "drip", 1)
                started = commands.Started("prepare_data.py", *words, cwd=folder)
                while commands.alive(started.pids[0]) and not any(
                    names[1] in line for line in server.log if "GET" in line
                ):
                    time.sleep(0.005)
                time.sleep(0.1)  # some bytes of it have come
                started.kill()
                started.wait()
            else:
                if how != "full disk":
                    server.meet(f"/{names[1]}", how, 10**9)
                size = 30_000 if how == "full disk" and kind == ".txt" else 0
                done = commands.run("prepare_data.py", *words, cwd=folder, hasty=True, file_bytes=size)
                if (how != "full disk" or size) and (
                    not done.code or commands.fault_of(done, names[1], "downloads", "tiny")
                ):
                    return f"the first start: {commands.fault_of(done, names[1])}, status {done.code}"
                if left := [path for path in (folder / "data/downloads").glob("*") if names[1] in path.name]:
                    return f"it leaves {left}"
            for faults in (server.faults, server.lies):
                faults.clear()
            done = commands.run("prepare_data.py", *words, cwd=folder, hasty=True)
        return _judge(done, folder, names[1], wanted, lasting=False)

    return hit


def _friendly(name: str, how: str) -> Callable[[Path], str | None]:
    """What is asked for is read whole, and a text once only."""

    def hit(folder: Path) -> str | None:
        commands.copy(folder.parents[1] / "base", folder)
        place = folder / "served" / "files"
        (place / "moved").mkdir(parents=True)
        texts = [("<html>" if name == "x.html" else "") + commands.text(i, 60) for i in range(60)]
        suffix = ".jsonl" if name.endswith("l") and how != "html" or name == "html.jsonl" else ".txt"
        data = data_files.FORMATS[suffix][0](texts)
        for path in (place / name, place / "moved" / name):
            path.write_bytes(data)
        with LyingServer(folder / "served") as server:
            if how:
                server.meet("/files/", how, 10**9)
            words = _flags([f"{server.url}/files/{quote(name)}"])
            for _ in range(2):
                asked = len(server.log)
                done = commands.run("prepare_data.py", *words, cwd=folder, hasty=True)
                if done.code != 0 or (found := commands.prepared(folder)) != data_files.reference(f"x{suffix}", data):
                    return f"it ends with {done.code}: {done.stderr[-300:] or found}"
            if asked != len(server.log) and suffix == ".txt":
                return "a text that is here is fetched again"
        return None

    return hit


def _page(name: str, page: str) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        commands.copy(folder.parents[1] / "base", folder)
        (folder / "served" / "files").mkdir(parents=True)
        (folder / "served" / "files" / name).write_text(page + " log in here, " * 200)
        with LyingServer(folder / "served") as server:
            server.meet("/files/", "html", 10**9)
            done = commands.run("prepare_data.py", *_flags([f"{server.url}/files/{name}"]), cwd=folder, hasty=True)
        if done.code == 0 or "looks like a proxy's or log-in page" not in "".join(done.errors):
            return f"status {done.code}, and it is not said to be a page: {done.stderr[-300:]}"
        kept = [path for path in (folder / "data").rglob("*") if path.is_file() and name in path.name]
        return commands.fault_of(done, name) or (f"it is kept: {kept}" if kept else None)

    return hit


def _packed(packed: str, how: str, name: str, far: bool) -> Callable[[Path], str | None]:
    name = f"packed{name or '.txt' + packed}"

    def hit(folder: Path) -> str | None:
        commands.copy(folder.parents[1] / "base", folder)
        data = bytearray(data_files.PACK[packed](commands.text(0, 9000).encode()))
        if how == "cut":
            del data[len(data) // 2 :]
        elif how == "damaged":  # behind the bytes by which it is known
            data[14:] = bytes(byte ^ 0x5A for byte in data[14:])
        place = folder / "served" / "files" if far else folder
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
        with LyingServer(folder / "served") as server:
            words = _flags([f"{server.url}/files/{name}" if far else name])
            done = commands.run("prepare_data.py", *words, cwd=folder, hasty=True)
        if done.code != 2 or "is packed" not in "".join(done.errors) or len(done.errors) != 1:
            return f"status {done.code}, and it is not said to be packed: {done.stderr[-300:]}"
        command = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz"}[packed]
        return commands.fault_of(done, name) or (None if command in done.stderr else f"without {command}")

    return hit


def _names(folder: Path) -> str | None:
    commands.copy(folder.parents[1] / "base", folder)
    size = 0
    for number, place in enumerate(("a", "b")):
        (folder / "served" / "files" / place).mkdir(parents=True)
        size += (folder / "served" / "files" / place / "x.txt").write_text(commands.text(number, 900 + number))
    with LyingServer(folder / "served") as server:
        for sign in "12":
            query = f"?part=1&X-Amz-Signature={sign}"
            urls = [f"{server.url}/files/{place}/x.txt{query}" for place in "ab"]
            done = commands.run("prepare_data.py", *_flags(urls), cwd=folder, hasty=True)
            if done.code != 0 or (found := commands.prepared(folder)) != (3, size):
                return f"it ends with {done.code}: {done.stderr[-300:] or found}"
        if len(server.log) != 2:
            return f"is fetched again for another signature: {server.log}"
        urls[1] = urls[0].replace("part=1", "part=2")  # the same file's other part, for all that is known
        done = commands.run("prepare_data.py", *_flags(urls), cwd=folder, hasty=True)
        return (
            None if done.code == 0 and len(server.log) == 3 else f"another query is no other file: {done.stderr[-300:]}"
        )


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
