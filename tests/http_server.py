"""A server on localhost for files and for the Hub's data sets and models, with errors on demand.

The files are stored in ``folder``:

- ``files/NAME`` is served at ``/files/NAME``.
- ``datasets/me/corpus`` is the data set me/corpus of the Hub at the endpoint ``url`` (HF_ENDPOINT).
  It has one commit.
- ``models/me/model`` is the model me/model. Small files can be committed to it.
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

NOT_FOUND = b'{"error": "not found"}'


class DataServer(ThreadingHTTPServer):
    """Serve a folder.

    ``problems`` is a list of [pattern of "METHOD path", kind, times]. The first problem that
    matches a request and is not used up decides what happens:

    - a status ("503"), also with a Retry-After header in seconds ("429:2"),
    - "reset": the connection breaks before an answer,
    - "short": half of the promised bytes,
    - "lie": half of the bytes, and a Content-Length that agrees with it,
    - "empty": no bytes, and a Content-Length that agrees with it,
    - "garbage": an answer that is not HTTP,
    - "silent": no answer in time,
    - "drip": one byte every 20 ms,
    - "ok": no problem, and no later problem is applied,
    - a text that begins with one of "[{< ": the body of the answer, as JSON or HTML.
    """

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = Path(folder)
        self.problems: list[list] = []
        self.log: list[str] = []  # "METHOD path" of each request
        self.lock = threading.Lock()
        # Whether a request may be answered. Otherwise its status is 403.
        self.allowed: Callable[[str, Message], bool] = lambda path, headers: True
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.commit = "c0ffee" + "0" * 34
        self.model_commits = 1
        # With this, any commit that is requested by its id exists, and has the same files.
        self.keeps_commits = False
        self.closing = threading.Event()
        # Number of "silent" answers for which the client waited until the server gave up.
        self.outwaited = 0

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
        """Ignore clients that close their connection."""

    def problem_for(self, line: str) -> str | None:
        """Log a request, and return the kind of its problem."""
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
    disable_nagle_algorithm = True  # otherwise each body waits 40 ms for its headers

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
        """Answer a request, or cause its problem."""
        path = unquote(urlsplit(self.path).path)
        problem = self.server.problem_for(f"{self.command} {path}")
        if not self.server.allowed(self.path, self.headers):
            problem = "403"
        if not self.caused(problem, body):
            self.route(path, body, problem)

    def caused(self, problem: str | None, body: bool) -> bool:
        """Return whether a problem replaces the answer."""
        if not problem:
            return False
        if problem == "reset":
            self.connection.shutdown(2)
        elif problem == "silent":
            self.server.outwaited += not self.server.closing.wait(30)
            self.close_connection = True
        elif problem == "garbage":
            self.wfile.write(b"HTTP/1.1 two hundred\r\n\r\n")
            self.close_connection = True
        elif problem[0] in "[{":
            self.send(200, problem.encode(), [("Content-Type", "application/json")], body)
        elif problem[0] in "< ":
            self.send(200, problem.encode(), [("Content-Type", "text/html")], body)
        elif problem[0].isdigit():
            status, _, seconds = problem.partition(":")
            headers = [("Retry-After", seconds)] if seconds else []
            self.send(int(status), b"no", headers, body)
        else:
            return False
        return True

    def route(self, path: str, body: bool, problem: str | None):
        """Answer the request for a path."""
        folder = self.server.folder
        if match := re.fullmatch(r"/files/(.+)", path):
            self.send_file(folder / "files" / match[1], [], body, problem)
        elif match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            file = folder / "datasets" / match[1] / match[3]
            self.send_file(file, self.dataset_headers(), body, problem)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            file = folder / "models" / match[1] / match[3]
            self.send_file(file, self.model_headers(), body, problem)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path):
            self.model(match[1], match[2] or "", body)
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(/.*)?", path):
            self.dataset(match[1], match[2] or "", body)
        elif path == "/api/validate-yaml":
            self.send_json({"errors": [], "warnings": []}, [], body)
        else:
            self.send(404, b"{}", [], body)

    def model_headers(self):
        return [("X-Repo-Commit", f"{self.server.model_commits:040x}")]

    def dataset_headers(self):
        commit = None
        if self.server.keeps_commits:
            commit = re.search("[0-9a-f]{40}", self.path)
        return [("X-Repo-Commit", commit[0] if commit else self.server.commit)]

    def dataset(self, name: str, rest: str, body: bool):
        """Answer a request to the API of a data set."""
        root = self.server.folder / "datasets" / name
        headers = self.dataset_headers()
        if not root.is_dir():
            self.send(404, NOT_FOUND, [("X-Error-Code", "RepoNotFound")], body)
        elif rest.startswith("/tree/"):
            self.send_tree(root, rest, headers, body)
        elif rest.startswith("/paths-info/"):
            paths = parse_qs(self.form.decode()).get("paths")
            if not paths:
                paths = json.loads(self.form or b"{}").get("paths", [])
            rows = [row(root / path, root) for path in paths if (root / path).exists()]
            self.send_json(rows, headers, body)
        elif not re.fullmatch("(/revision/(main|[0-9a-f]{40}))?", rest):
            code = "RevisionNotFound" if rest.startswith("/revision/") else "EntryNotFound"
            self.send(404, NOT_FOUND, [("X-Error-Code", code)], body)
        else:
            files = [path for path in sorted(root.rglob("*")) if path.is_file()]
            info = {
                "id": name,
                "sha": headers[0][1],
                "private": False,
                "tags": [],
                "siblings": [{"rfilename": str(path.relative_to(root))} for path in files],
                "downloads": 0,
                "likes": 0,
            }
            self.send_json(info, headers, body)

    def send_tree(self, root: Path, rest: str, headers: list, body: bool):
        """List the files of a repository or of a folder in it."""
        folder = root
        if rest.count("/") > 2:  # /tree/REVISION/FOLDER
            folder = root / rest.split("/", 3)[3]
        if not folder.is_dir():
            self.send(404, b"{}", [("X-Error-Code", "EntryNotFound"), *headers], body)
            return
        pattern = "**/*" if "recursive=true" in self.path.lower() else "*"
        self.send_json([row(path, root) for path in sorted(folder.glob(pattern))], headers, body)

    def model(self, name: str, rest: str, body: bool):
        """Answer a request to the API of a model."""
        root = self.server.folder / "models" / name
        if not root.is_dir():
            self.send(404, NOT_FOUND, [("X-Error-Code", "RepoNotFound")], body)
        elif rest.startswith("/tree/"):
            self.send_tree(root, rest, self.model_headers(), body)
        elif rest.startswith("/preupload/"):
            mode = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            files = [{"path": file["path"], **mode} for file in json.loads(self.form)["files"]]
            self.send_json({"files": files}, [], body)
        elif rest.startswith("/commit/"):
            self.commit_files(root)
            result = {
                "success": True,
                "commitOid": self.server.commit,
                "commitUrl": f"{self.server.url}/{name}/commit/1",
            }
            self.send_json(result, [], body)
        else:
            info = {
                "id": name,
                "modelId": name,
                "sha": self.model_headers()[0][1],
                "private": False,
                "tags": [],
                "siblings": [{"rfilename": path.name} for path in root.iterdir()],
                "downloads": 0,
                "likes": 0,
            }
            self.send_json(info, [], body)

    def commit_files(self, root: Path):
        """Write the files of a commit."""
        self.server.model_commits += 1
        for line in self.form.splitlines():
            operation = json.loads(line)
            if operation["key"] == "file":
                content = base64.b64decode(operation["value"]["content"])
                (root / operation["value"]["path"]).write_bytes(content)

    def send_file(self, path: Path, headers: list, body: bool, problem: str | None):
        """Send a file or the range of it that the client requests."""
        if not path.is_file():
            self.send(404, b"{}", [("X-Error-Code", "EntryNotFound"), *headers], body)
            return
        data = path.read_bytes()
        headers = [("ETag", f'"{_oid(path)}"'), *headers, ("Accept-Ranges", "bytes")]
        status = 200
        byte_range = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if byte_range:
            begin = int(byte_range[1])
            end = min(int(byte_range[2] or len(data) - 1), len(data) - 1)
            headers.append(("Content-Range", f"bytes {begin}-{end}/{len(data)}"))
            data = data[begin : end + 1]
            status = 206
        if problem == "lie":
            data = data[: len(data) // 2]
        elif problem == "empty":
            data = b""
        self.send(status, data, headers, body and problem != "drip", half=problem == "short")
        if problem == "drip":
            self.send_slowly(data)

    def send_slowly(self, data: bytes):
        """Send one byte at a time until the client or the server closes the connection."""
        with contextlib.suppress(OSError):
            for byte in data:
                self.wfile.write(bytes([byte]))
                if self.server.closing.wait(0.02):
                    return

    def send_json(self, value, headers: list, body: bool):
        self.send(200, json.dumps(value).encode(), headers, body)

    def send(self, status: int, data: bytes, headers: list, body: bool, half: bool = False):
        """Send an answer. With ``half``, break the connection after half of the body."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if half:
            data = data[: len(data) // 2]
        if body:
            self.wfile.write(data)
        if half:
            self.wfile.flush()
            self.connection.shutdown(2)


def row(path: Path, root: Path) -> dict:
    """Return how the Hub lists a file or folder."""
    name = str(path.relative_to(root))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
    size = path.stat().st_size
    info = {"type": "file", "path": name, "size": size, "oid": _oid(path)}
    if path.suffix in (".bin", ".npy"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        info["lfs"] = {"oid": digest, "size": size, "pointerSize": 134}
    return info


def _oid(path: Path) -> str:
    """Return the id that git gives a file."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
