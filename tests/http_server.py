"""A server on localhost for data files and the Hub, which misbehaves as told: what a stream meets on the way.

Files lie under ``folder``: ``/files/NAME`` serves them by URL; a data set ``me/corpus`` of the Hub is the folder
``datasets/me/corpus``, at the endpoint ``url`` (HF_ENDPOINT), with one commit. A model ``me/model`` is the folder
``models/me/model``; small files can be committed to it.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


class DataServer(ThreadingHTTPServer):
    """Serves a folder. ``problems``: (pattern of "METHOD path", kind, times) are met in order, each until used up.

    Kinds: a status ("503"), "429:2" (with Retry-After: 2), "reset" (the connection breaks before an answer), "short"
    (half of the promised bytes), "lie" (half of the bytes, promised as all of them), "empty" (none, promised as all),
    "garbage" (an answer that is not HTTP), "silent" (no answer in time), "drip" (a byte now and then), "ok" (no problem:
    what it meets is passed to no later one), and what begins with one of "[{< ": it is the answer itself, JSON or
    (called) HTML.
    """

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.problems, self.log, self.lock = Path(folder), [], [], threading.Lock()
        self.allowed: Callable[[str, Message], bool] = lambda path, headers: True  # else 403
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.commit, self.model_commits = "c0ffee" + "0" * 34, 1
        self.keeps_commits = (
            False  # a commit that is asked for by name is one of its own, of the same files
        )
        self.closing, self.outwaited = (
            threading.Event(),
            0,
        )  # silent answers that the client waited for to their end

    def __enter__(self):
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.closing.set()
        self.shutdown()
        self.thread.join()
        self.server_close()

    def handle_error(self, request, client_address):
        pass  # a client that went away

    def problem_for(self, line: str) -> str | None:
        with self.lock:
            self.log.append(line)
            for problem in self.problems:
                pattern, kind, times = problem
                if times and re.search(pattern, line):
                    problem[2] -= 1
                    return kind
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each body waits 40 ms for its headers to be acknowledged

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def do_POST(self):
        self.form = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer(body=True)

    def answer(self, body: bool):
        path = unquote(urlsplit(self.path).path)
        problem = self.server.problem_for(f"{self.command} {path}")
        if not self.server.allowed(self.path, self.headers):
            problem = "403"
        if problem == "reset":
            self.connection.shutdown(2)
            return
        if problem == "silent":
            self.server.outwaited += not self.server.closing.wait(30)
            self.close_connection = True
            return
        if problem == "garbage":
            self.wfile.write(b"HTTP/1.1 two hundred\r\n\r\n")
            self.close_connection = True
            return
        if problem and problem[0] in "[{< ":
            kind = "application/json" if problem[0] in "[{" else "text/html"
            self.send(200, problem.encode(), [("Content-Type", kind)], body)
            return
        if problem and problem[0].isdigit():
            status, _, after = problem.partition(":")
            self.send(int(status), b"no", [("Retry-After", after)] if after else [], body)
            return
        if match := re.fullmatch(r"/files/(.+)", path):
            self.file(self.server.folder / "files" / match[1], [], body, problem)
        elif match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.file(
                self.server.folder / "datasets" / match[1] / match[3],
                self.of_commit(),
                body,
                problem,
            )
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.file(
                self.server.folder / "models" / match[1] / match[3], self.of_model(), body, problem
            )
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path):
            self.model(match[1], match[2] or "", body)
        elif path == "/api/validate-yaml":
            self.send(200, b'{"errors": [], "warnings": []}', [], body)
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(/.*)?", path):
            self.hub(match[1], match[2] or "", body)
        else:
            self.send(404, b"{}", [], body)

    def of_model(self):
        return [("X-Repo-Commit", f"{self.server.model_commits:040x}")]

    def of_commit(self):
        asked = re.search("[0-9a-f]{40}", self.path) if self.server.keeps_commits else None
        return [("X-Repo-Commit", asked[0] if asked else self.server.commit)]

    def hub(self, name: str, rest: str, body: bool):
        root = self.server.folder / "datasets" / name
        if not root.is_dir():
            self.send(404, b'{"error": "not found"}', [("X-Error-Code", "RepoNotFound")], body)
            return
        found = sorted(root.rglob("*"))
        if rest.startswith("/tree/"):
            self.tree(root, rest, self.of_commit(), body)
        elif rest.startswith("/paths-info/"):
            asked = parse_qs(self.form.decode()).get("paths", []) or json.loads(
                self.form or b"{}"
            ).get("paths", [])
            rows = [row(root / path, root) for path in asked if (root / path).exists()]
            self.send(200, json.dumps(rows).encode(), self.of_commit(), body)
        elif rest == "" or rest.startswith("/revision/"):
            if not re.fullmatch(
                "|main|[0-9a-f]{40}", rest.split("/")[-1]
            ):  # it keeps earlier commits
                self.send(404, b'{"error": "no"}', [("X-Error-Code", "RevisionNotFound")], body)
                return
            siblings = [
                {"rfilename": str(path.relative_to(root))} for path in found if path.is_file()
            ]
            about = {
                "id": name,
                "sha": self.of_commit()[0][1],
                "private": False,
                "tags": [],
                "siblings": siblings,
            }
            self.send(
                200,
                json.dumps(about | {"downloads": 0, "likes": 0}).encode(),
                self.of_commit(),
                body,
            )
        else:
            self.send(404, b"{}", [], body)

    def tree(self, root: Path, rest: str, headers: list, body: bool):
        below = root / (rest.split("/", 3)[3] if rest.count("/") > 2 else "")
        deep = "recursive=true" in self.path.lower()
        rows = [
            row(path, root)
            for path in (sorted(below.rglob("*")) if deep else sorted(below.glob("*")))
        ]
        if below.is_dir():
            self.send(200, json.dumps(rows).encode(), headers, body)
        else:
            self.send(404, b"{}", [("X-Error-Code", "EntryNotFound"), *headers], body)

    def model(self, name: str, rest: str, body: bool):
        root = self.server.folder / "models" / name
        if not root.is_dir():
            self.send(404, b'{"error": "not found"}', [("X-Error-Code", "RepoNotFound")], body)
        elif rest.startswith("/tree/"):
            self.tree(root, rest, self.of_model(), body)
        elif rest.startswith("/preupload/"):
            asked = [file["path"] for file in json.loads(self.form)["files"]]
            told = [
                {"path": path, "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for path in asked
            ]
            self.send(200, json.dumps({"files": told}).encode(), [], body)
        elif rest.startswith("/commit/"):
            self.server.model_commits += 1
            for line in map(json.loads, self.form.splitlines()):
                if line["key"] == "file":
                    (root / line["value"]["path"]).write_bytes(
                        base64.b64decode(line["value"]["content"])
                    )
            about = {
                "success": True,
                "commitOid": self.server.commit,
                "commitUrl": f"{self.server.url}/{name}/commit/1",
            }
            self.send(200, json.dumps(about).encode(), [], body)
        else:
            about = {
                "id": name,
                "modelId": name,
                "sha": self.of_model()[0][1],
                "private": False,
                "tags": [],
            }
            about |= {
                "siblings": [{"rfilename": path.name} for path in root.iterdir()],
                "downloads": 0,
                "likes": 0,
            }
            self.send(200, json.dumps(about).encode(), [], body)

    def file(self, path: Path, headers: list, body: bool, problem: str | None):
        if not path.is_file():
            self.send(404, b"{}", [("X-Error-Code", "EntryNotFound"), *headers], body)
            return
        data = path.read_bytes()
        headers = [("ETag", f'"{_oid(path)}"'), *headers]
        headers.append(("Accept-Ranges", "bytes"))
        status = 200
        if asked := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
            headers.append(("Content-Range", f"bytes {begin}-{end}/{len(data)}"))
            data, status = data[begin : end + 1], 206
        if problem in ("lie", "empty"):
            data = data[: 0 if problem == "empty" else len(data) // 2]
        self.send(status, data, headers, body and problem != "drip", half=problem == "short")
        if problem == "drip":
            with contextlib.suppress(OSError):  # the client gives up
                for byte in data:
                    self.wfile.write(bytes([byte]))
                    if self.server.closing.wait(0.02):
                        return

    def send(self, status: int, data: bytes, headers: list, body: bool, half: bool = False):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data[: len(data) // 2] if half else data)
        if half:
            self.wfile.flush()
            self.connection.shutdown(2)


def row(path: Path, root: Path) -> dict:
    """What the Hub's listings say of a file or folder."""
    name = str(path.relative_to(root))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
    about = {"type": "file", "path": name, "size": path.stat().st_size, "oid": _oid(path)}
    if path.suffix in (".bin", ".npy"):
        oid = hashlib.sha256(path.read_bytes()).hexdigest()
        about["lfs"] = {"oid": oid, "size": path.stat().st_size, "pointerSize": 134}
    return about


def _oid(path: Path) -> str:
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # as Git has it
