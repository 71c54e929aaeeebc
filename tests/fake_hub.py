"""A Hub on localhost for tests: model repositories with LFS ("basic") uploads, and problems on demand.

``server.environment()`` has what turns a process to it, before it imports huggingface_hub (checked with 2.4.0).
"""

import base64
import hashlib
import json
import os
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPO_PATTERN = r"(?P<id>[^/]+/[^/]+)"
LFS = (".safetensors", ".png")
IN_XET = b"in Xet: "


@dataclass
class InjectedError:
    """What happens to the next ``times`` requests whose "METHOD /path" has ``match`` (a regular expression) in it.

    ``kind``: status (answered with it, and not done), say (answered with ``message`` as it stands, and not done), hang
    (no answer until the server ends), drop (the connection ends, not done), lose (done, but the connection ends before
    the answer).
    """

    match: str
    times: float = 1
    kind: str = "status"
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "injected"


@dataclass
class Request:
    """A request as it came; its headers without the authorization."""

    method: str
    path: str
    token: str | None
    headers: str
    body: bytes


@dataclass
class Commit:
    """A commit and all files of its tree."""

    oid: str
    title: str
    files: dict[str, bytes]


@dataclass
class Repository:
    """A repository: its commits, oldest first, and its tags."""

    private: bool
    commits: list[Commit] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, title: str, files: dict[str, bytes]) -> str:
        """Add a commit and return its oid."""
        oid = hashlib.sha1(f"{id(self)} {len(self.commits)} {title}".encode()).hexdigest()
        self.commits.append(Commit(oid, title, files))
        return oid

    def find(self, revision: str) -> Commit | None:
        """Return the commit of a branch (main), a tag or an oid."""
        if revision == "main":
            return self.commits[-1]
        oid = self.tags.get(revision, revision)
        return next((commit for commit in self.commits if commit.oid == oid), None)


class HubServer(ThreadingHTTPServer):
    """The server, and what tests set and look at.

    ``login``: what whoami answers. ``read_only``: ids of repositories, and owners, without the right to write.
    ``requests``: all that came. ``objects``: LFS objects by SHA-256. ``xet``: a folder for hf_xet's store, where a client
    uses that instead of LFS; the files' own bytes are then not known here. ``ignored``: names that a .gitignore of the
    repository keeps out, a regular expression. ``renamed``: the new id of each repository that was renamed, by its old
    one.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.problems: list[InjectedError] = []
        self.requests: list[Request] = []
        self.read_only: set[str] = set()
        self.xet: os.PathLike | str | None = None
        self.ignored: str | None = None
        self.renamed: dict[str, str] = {}
        self.login = {
            "type": "user",
            "name": "me",
            "orgs": [],
            "auth": {"accessToken": {"role": "write"}},
        }
        self.lock, self.ending = threading.RLock(), threading.Event()

    def __enter__(self) -> "HubServer":
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *_) -> None:
        self.ending.set()
        self.shutdown()
        self.server_close()

    def environment(self, home: os.PathLike | str) -> dict[str, str]:
        """Return what a process needs in its environment to talk to this Hub and to no other."""
        plain = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
        return plain | {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_TOKEN": "hf_" + "t" * 30}

    def make(self, repo_id: str, private: bool = True) -> Repository:
        """Make a repository, as its owner would in the browser."""
        repository = self.repositories[repo_id] = Repository(private)
        repository.commit("initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
        return repository

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a revision but .gitattributes."""
        tree = self.repositories[repo_id].find(revision).files
        return {name: data for name, data in tree.items() if name != ".gitattributes"}

    def titles(self, repo_id: str) -> list[str]:
        """Return the commits' titles, newest first, but the initial one."""
        return [commit.title for commit in self.repositories[repo_id].commits[:0:-1]]

    def tags(self, repo_id: str) -> dict[str, str]:
        """Return the title of the commit of each tag."""
        repository = self.repositories[repo_id]
        return {tag: repository.find(oid).title for tag, oid in sorted(repository.tags.items())}

    def count(self, match: str) -> int:
        """Return how many requests came whose "METHOD /path" has ``match`` in it."""
        return sum(
            bool(re.search(match, f"{request.method} {request.path}")) for request in self.requests
        )

    def handle_error(self, request, client_address) -> None:
        """Keep quiet about clients that gave up."""


class Handler(BaseHTTPRequestHandler):
    """Answers one connection's requests; the methods of ROUTES get the repository's id, itself, its commit, the body."""

    protocol_version = "HTTP/1.1"
    wbufsize, disable_nagle_algorithm = (
        -1,
        True,
    )  # else a second small packet waits 40 ms for the first one
    server: HubServer

    def do_GET(self) -> None:
        """Answer a request of any method."""
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        del self.headers["Authorization"]
        self.token, self.lost = token, False
        body = self.read_body()
        with self.server.lock:
            self.server.requests.append(Request(self.command, path, token, str(self.headers), body))
            line = f"{self.command} {path}"
            problem = next(
                (
                    one
                    for one in self.server.problems
                    if one.times > 0 and re.search(one.match, line)
                ),
                None,
            )
            if problem:
                problem.times -= 1
        kind = problem.kind if problem else None
        if kind == "status":
            self.error(problem.status, problem.message, headers=problem.headers)
        elif kind == "say":
            self.answer(
                problem.message.encode(),
                200,
                {"Content-Type": "application/json", **problem.headers},
            )
        elif kind in ("hang", "drop"):
            if kind == "hang":
                self.server.ending.wait()
            self.close_connection = True
        else:
            self.lost = kind == "lose"
            with self.server.lock:
                self.route(path, body)

    do_POST = do_PUT = do_HEAD = do_GET

    def log_message(self, *_) -> None:
        """Say nothing."""

    def read_body(self) -> bytes:
        """Return the request's body."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(
        self,
        data: bytes | dict | list = b"",
        status: int = 200,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Send an answer, unless it is to be lost."""
        if self.lost:
            self.close_connection = True
            return
        kind = "application/octet-stream"
        if not isinstance(data, bytes):
            data, kind = json.dumps(data).encode(), "application/json"
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def error(
        self, status: int, message: str, code: str | None = None, headers: dict | None = None
    ) -> None:
        """Send an error as the Hub does."""
        named = {"X-Error-Code": code} if code else {}
        self.answer(
            {"error": message}, status, {"X-Error-Message": message, **named, **(headers or {})}
        )

    def route(self, path: str, body: bytes) -> None:
        """Find the method for a path and let it answer."""
        for old, new in self.server.renamed.items():
            if f"/{old}" in path:
                return self.answer(
                    b"", 307, {"Location": self.server.url + self.path.replace(old, new, 1)}
                )
        for method, pattern, answer in ROUTES:
            found = re.fullmatch(pattern, path)
            if not found or method not in (self.command, "ANY"):
                continue
            parts = found.groupdict()
            if "id" not in parts:
                return answer(self, body=body, **parts)
            repository = self.server.repositories.get(parts.pop("id"))
            if repository is None or (repository.private and self.token is None):
                return self.error(
                    404 if self.token else 401, "Repository not found", "RepoNotFound"
                )
            commit = repository.find(parts.pop("revision", None) or "main")
            if commit is None:
                return self.error(404, "Invalid rev id", "RevisionNotFound")
            writes = self.command in ("POST", "PUT") or path.endswith("/write")
            if writes and self.server.read_only & {found["id"], found["id"].split("/")[0]}:
                return self.error(403, f"You don't have the rights to write to {found['id']}")
            return answer(self, found["id"], repository, commit, body=body, **parts)
        return self.error(404, f"no such route: {self.command} {path}")

    def whoami(self, body: bytes) -> None:
        if self.token is None:
            return self.error(401, "Invalid username or password.")
        return self.answer(self.server.login)

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        owner = asked.get("organization") or self.server.login["name"]
        repo_id = f"{owner}/{asked['name']}"
        known = repo_id in self.server.repositories
        if not known:
            self.server.make(repo_id, private=asked.get("visibility") == "private")
        self.answer({"url": f"{self.server.url}/{repo_id}", "name": repo_id}, 409 if known else 200)

    def validate(self, body: bytes) -> None:
        self.answer({"errors": [], "warnings": []})

    def preupload(self, repo_id, repository, commit, body) -> None:
        answers = []
        for file in json.loads(body)["files"]:
            name, old = file["path"], commit.files.get(file["path"])
            mode, id_of = ("lfs", lfs_oid) if name.endswith(LFS) else ("regular", blob_id)
            ignored = bool(self.server.ignored and re.fullmatch(self.server.ignored, name))
            oid = None if old is None else id_of(old)
            answers.append({"path": name, "uploadMode": mode, "shouldIgnore": ignored, "oid": oid})
        self.answer({"files": answers})

    def batch(self, repo_id, repository, commit, body) -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            told = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.server.objects:
                told["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{asked['oid']}"}}
            objects.append(told)
        self.answer({"transfer": "basic", "objects": objects})

    def put_object(self, body: bytes, oid: str) -> None:
        if sha256(body) != oid:
            return self.error(400, "SHA-256 mismatch")
        self.server.objects[oid] = body
        return self.answer()

    def xet_token(self, repo_id, repository, commit, body) -> None:
        told = {
            "casUrl": f"local://{self.server.xet}",
            "accessToken": "x",
            "exp": int(time.time()) + 3600,
        }
        names = {
            "X-Xet-Cas-Url": "casUrl",
            "X-Xet-Access-Token": "accessToken",
            "X-Xet-Token-Expiration": "exp",
        }
        self.answer(told, headers={header: str(told[name]) for header, name in names.items()})

    def make_commit(self, repo_id, repository, commit, body) -> None:
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        header, tree = lines[0]["value"], dict(commit.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile" and value["oid"] in self.server.objects:
                tree[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] == "lfsFile" and self.server.xet:
                tree[value["path"]] = IN_XET + value["oid"].encode()
            elif line["key"] == "deletedFile" and value["path"] in tree:
                del tree[value["path"]]
            else:
                return self.error(400, f"{line['key']}: {value['path']}")
        if header.get("parentCommit") not in (None, commit.oid):
            return self.error(412, "A commit has happened since. Please refresh and try again.")
        oid = repository.commit(header["summary"], tree)
        url = f"{self.server.url}/{repo_id}/commit/{oid}"
        return self.answer({"success": True, "commitOid": oid, "commitUrl": url})

    def tag(self, repo_id, repository, commit, body) -> None:
        name = json.loads(body)["tag"]
        if name in repository.tags:
            return self.error(409, "Tag already exists")
        repository.tags[name] = commit.oid
        return self.answer({})

    def refs(self, repo_id, repository, commit, body) -> None:
        head = {"name": "main", "ref": "refs/heads/main", "targetCommit": commit.oid}
        tags = [
            {"name": t, "ref": f"refs/tags/{t}", "targetCommit": oid}
            for t, oid in repository.tags.items()
        ]
        self.answer({"converts": [], "branches": [head], "tags": tags})

    def may_write(self, repo_id, repository, commit, body) -> None:
        self.answer({})

    def info(self, repo_id, repository, commit, body) -> None:
        siblings = [{"rfilename": name} for name in commit.files]
        self.answer(
            {"id": repo_id, "sha": commit.oid, "private": repository.private, "siblings": siblings}
        )

    def tree(self, repo_id, repository, commit, body) -> None:
        rows = []
        for name, data in commit.files.items():
            lfs = (
                {"lfs": {"oid": sha256(data), "size": len(data), "pointerSize": 134}}
                if name.endswith(LFS)
                else {}
            )
            rows.append(
                {"type": "file", "path": name, "size": len(data), "oid": blob_id(data), **lfs}
            )
        self.answer(rows)

    def resolve(self, repo_id, repository, commit, body, name: str) -> None:
        data = commit.files.get(name)
        if data is None:
            return self.error(
                404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": commit.oid}
            )
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{blob_id(data)}"'}
        if name.endswith(LFS):
            headers |= {"X-Linked-ETag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
        return self.answer(data, 200, headers)


MODEL, REVISION = f"/api/models/{REPO_PATTERN}", "(?P<revision>.+)"
ROUTES = [
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", f"{MODEL}/preupload/{REVISION}", Handler.preupload),
    ("POST", f"/{REPO_PATTERN}.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]{64})", Handler.put_object),
    ("GET", f"{MODEL}/xet-write-token/{REVISION}", Handler.xet_token),
    ("POST", f"{MODEL}/commit/{REVISION}", Handler.make_commit),
    ("POST", f"{MODEL}/tag/{REVISION}", Handler.tag),
    ("GET", f"{MODEL}/refs", Handler.refs),
    ("GET", f"{MODEL}/auth-check(/write)?", Handler.may_write),
    ("GET", f"{MODEL}/tree/(?P<revision>[^/]+)(/.*)?", Handler.tree),
    ("GET", f"{MODEL}(/revision/{REVISION})?", Handler.info),
    ("ANY", f"/{REPO_PATTERN}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", Handler.resolve),
]


def sha256(data: bytes) -> str:
    """Return the SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def lfs_oid(data: bytes) -> str:
    """Return the SHA-256 that an LFS object or a file in Xet is known by."""
    return data.removeprefix(IN_XET).decode() if data.startswith(IN_XET) else sha256(data)


def blob_id(data: bytes) -> str:
    """Return what git calls these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
