"""A local Hub for tests: model repositories with LFS ("basic") uploads, and injected errors.

``HubServer.environment`` returns the variables that direct a process to this Hub, if they are set
before it imports huggingface_hub (tested with 2.4.0).
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
    """An error that the next matching requests receive.

    Attributes:
        match: a regular expression that is searched in "METHOD /path".
        times: the number of requests that receive the error.
        kind: one of
            - status: the answer has this status, and the request has no effect;
            - say: the answer is ``message`` without a change, and the request has no effect;
            - hang: the server does not answer before it ends, and the request has no effect;
            - drop: the connection ends, and the request has no effect;
            - lose: the request has its effect, but the connection ends before the answer.
        status: the HTTP status of the answer.
        headers: headers of the answer.
        message: the text of the answer.
    """

    match: str
    times: float = 1
    kind: str = "status"
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "injected"


@dataclass
class Request:
    """A request that the server received. ``headers`` does not include the authorization."""

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
    """A repository: its commits, oldest first, and the oid of each tag."""

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
        for commit in self.commits:
            if commit.oid == oid:
                return commit
        return None


class HubServer(ThreadingHTTPServer):
    """The server, and the state that tests change and examine.

    Attributes:
        repositories: the repositories by id.
        objects: LFS objects by SHA-256.
        problems: the errors to inject. The first one that matches a request is used.
        requests: all requests so far.
        read_only: repositories and owners for which the login has no right to write.
        xet: the folder of hf_xet's store, for a client that uses Xet instead of LFS. The server
            does not know the contents of these files.
        ignored: a regular expression of the names that the repository's .gitignore excludes.
        renamed: the new id of each renamed repository, by its old id.
        login: the answer of whoami.
        lock: held while a request changes the state.
        ending: set when the server ends. Requests with the error "hang" wait for it.
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
        self.lock = threading.RLock()
        self.ending = threading.Event()

    def __enter__(self) -> "HubServer":
        options = {"poll_interval": 0.02}
        threading.Thread(target=self.serve_forever, kwargs=options, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.ending.set()
        self.shutdown()
        self.server_close()

    def environment(self, home: os.PathLike | str) -> dict[str, str]:
        """Return the environment variables of a process that uses only this Hub."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": "hf_" + "t" * 30,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
        }

    def make(self, repo_id: str, private: bool = True) -> Repository:
        """Create a repository, as its owner can do in the browser."""
        repository = Repository(private)
        repository.commit("initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.repositories[repo_id] = repository
        return repository

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a revision except .gitattributes."""
        contents = dict(self.repositories[repo_id].find(revision).files)
        contents.pop(".gitattributes", None)
        return contents

    def titles(self, repo_id: str) -> list[str]:
        """Return the titles of the commits, newest first, without the initial one."""
        return [commit.title for commit in self.repositories[repo_id].commits[:0:-1]]

    def tags(self, repo_id: str) -> dict[str, str]:
        """Return the title of the commit of each tag."""
        repository = self.repositories[repo_id]
        return {tag: repository.find(oid).title for tag, oid in sorted(repository.tags.items())}

    def count(self, match: str) -> int:
        """Return the number of requests whose "METHOD /path" contains a match of the pattern."""
        lines = [f"{request.method} {request.path}" for request in self.requests]
        return sum(bool(re.search(match, line)) for line in lines)

    def take_problem(self, line: str) -> InjectedError | None:
        """Return the error for a request, or None, and count its use.

        Args:
            line: "METHOD /path" of the request.
        """
        for problem in self.problems:
            if problem.times > 0 and re.search(problem.match, line):
                problem.times -= 1
                return problem
        return None

    def handle_error(self, request, client_address) -> None:
        """Print nothing about clients that close the connection."""


class Handler(BaseHTTPRequestHandler):
    """Answer the requests of one connection.

    The methods in ROUTES receive the body and the named groups of their pattern. If the pattern
    has an id, they also receive the repository's id, the repository and the commit.
    """

    protocol_version = "HTTP/1.1"
    # Without a buffer and TCP_NODELAY, the second small packet of an answer waits 40 ms.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: HubServer

    def do_GET(self) -> None:
        """Answer a request of any method."""
        path = unquote(urlsplit(self.path).path)
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        self.lost = False
        del self.headers["Authorization"]
        body = self.read_body()
        request = Request(self.command, path, self.token, str(self.headers), body)
        with self.server.lock:
            self.server.requests.append(request)
            problem = self.server.take_problem(f"{self.command} {path}")

        if problem is not None and problem.kind != "lose":
            self.fail(problem)
            return
        self.lost = problem is not None
        with self.server.lock:
            self.route(path, body)

    do_POST = do_PUT = do_HEAD = do_GET

    def fail(self, problem: InjectedError) -> None:
        """Answer with an injected error. The request has no effect."""
        if problem.kind == "status":
            self.error(problem.status, problem.message, headers=problem.headers)
        elif problem.kind == "say":
            headers = {"Content-Type": "application/json", **problem.headers}
            self.answer(problem.message.encode(), headers=headers)
        else:
            if problem.kind == "hang":
                self.server.ending.wait()
            self.close_connection = True

    def log_message(self, *_) -> None:
        """Print nothing."""

    def read_body(self) -> bytes:
        """Return the request's body."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        size = self.read_chunk_size()
        while size:
            parts.append(self.rfile.read(size))
            self.rfile.readline()
            size = self.read_chunk_size()
        self.rfile.readline()
        return b"".join(parts)

    def read_chunk_size(self) -> int:
        """Return the size of the next chunk of a body with chunked encoding."""
        return int(self.rfile.readline().split(b";")[0], 16)

    def answer(
        self,
        data: bytes | dict | list = b"",
        status: int = 200,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Send an answer, or close the connection if the answer is to be lost."""
        if self.lost:
            self.close_connection = True
            return
        content_type = "application/octet-stream"
        if not isinstance(data, bytes):
            content_type = "application/json"
            data = json.dumps(data).encode()
        all_headers = {"Content-Type": content_type, "Content-Length": str(len(data))}
        all_headers.update(headers or {})
        self.send_response(status)
        for name, value in all_headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def error(
        self, status: int, message: str, code: str | None = None, headers: dict | None = None
    ) -> None:
        """Send an error in the format of the Hub."""
        all_headers = {"X-Error-Message": message}
        if code:
            all_headers["X-Error-Code"] = code
        all_headers.update(headers or {})
        self.answer({"error": message}, status, all_headers)

    def route(self, path: str, body: bytes) -> None:
        """Answer with the method for this path."""
        for old, new in self.server.renamed.items():
            if f"/{old}" in path:
                location = self.server.url + self.path.replace(old, new, 1)
                return self.answer(status=307, headers={"Location": location})
        for method, pattern, answer in ROUTES:
            match = re.fullmatch(pattern, path)
            if not match or method not in (self.command, "ANY"):
                continue
            if "id" in match.groupdict():
                return self.route_in_repository(answer, path, match.groupdict(), body)
            return answer(self, body=body, **match.groupdict())
        return self.error(404, f"no such route: {self.command} {path}")

    def route_in_repository(self, answer, path: str, groups: dict, body: bytes) -> None:
        """Answer a request for a repository.

        Args:
            answer: the method in ROUTES.
            path: the path of the request.
            groups: the named groups of the route's pattern.
            body: the body of the request.
        """
        repo_id = groups.pop("id")
        repository = self.server.repositories.get(repo_id)
        if repository is None or (repository.private and self.token is None):
            status = 404 if self.token else 401
            return self.error(status, "Repository not found", "RepoNotFound")
        commit = repository.find(groups.pop("revision", None) or "main")
        if commit is None:
            return self.error(404, "Invalid rev id", "RevisionNotFound")
        is_write = self.command in ("POST", "PUT") or path.endswith("/write")
        owner = repo_id.split("/")[0]
        if is_write and self.server.read_only & {repo_id, owner}:
            return self.error(403, f"You don't have the rights to write to {repo_id}")
        return answer(self, repo_id, repository, commit, body=body, **groups)

    def whoami(self, body: bytes) -> None:
        if self.token is None:
            return self.error(401, "Invalid username or password.")
        return self.answer(self.server.login)

    def create(self, body: bytes) -> None:
        options = json.loads(body)
        owner = options.get("organization") or self.server.login["name"]
        repo_id = f"{owner}/{options['name']}"
        status = 409
        if repo_id not in self.server.repositories:
            status = 200
            self.server.make(repo_id, private=options.get("visibility") == "private")
        self.answer({"url": f"{self.server.url}/{repo_id}", "name": repo_id}, status)

    def validate(self, body: bytes) -> None:
        self.answer({"errors": [], "warnings": []})

    def preupload(self, repo_id, repository, commit, body) -> None:
        rows = []
        for file in json.loads(body)["files"]:
            name = file["path"]
            is_lfs = name.endswith(LFS)
            is_ignored = bool(self.server.ignored and re.fullmatch(self.server.ignored, name))
            oid = None
            if name in commit.files:
                oid = lfs_oid(commit.files[name]) if is_lfs else blob_id(commit.files[name])
            rows.append(
                {
                    "path": name,
                    "uploadMode": "lfs" if is_lfs else "regular",
                    "shouldIgnore": is_ignored,
                    "oid": oid,
                }
            )
        self.answer({"files": rows})

    def batch(self, repo_id, repository, commit, body) -> None:
        rows = []
        for lfs_object in json.loads(body)["objects"]:
            oid = lfs_object["oid"]
            row = {"oid": oid, "size": lfs_object["size"]}
            if oid not in self.server.objects:
                row["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{oid}"}}
            rows.append(row)
        self.answer({"transfer": "basic", "objects": rows})

    def put_object(self, body: bytes, oid: str) -> None:
        if sha256(body) != oid:
            return self.error(400, "SHA-256 mismatch")
        self.server.objects[oid] = body
        return self.answer()

    def xet_token(self, repo_id, repository, commit, body) -> None:
        url = f"local://{self.server.xet}"
        expiration = int(time.time()) + 3600
        headers = {
            "X-Xet-Cas-Url": url,
            "X-Xet-Access-Token": "x",
            "X-Xet-Token-Expiration": str(expiration),
        }
        self.answer({"casUrl": url, "accessToken": "x", "exp": expiration}, headers=headers)

    def make_commit(self, repo_id, repository, commit, body) -> None:
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        header = lines[0]["value"]
        tree = dict(commit.files)
        for line in lines[1:]:
            if not self.apply_operation(tree, line["key"], line["value"]):
                return self.error(400, f"{line['key']}: {line['value']['path']}")
        if header.get("parentCommit") not in (None, commit.oid):
            return self.error(412, "A commit has happened since. Please refresh and try again.")
        oid = repository.commit(header["summary"], tree)
        url = f"{self.server.url}/{repo_id}/commit/{oid}"
        return self.answer({"success": True, "commitOid": oid, "commitUrl": url})

    def apply_operation(self, tree: dict[str, bytes], kind: str, value: dict) -> bool:
        """Apply one operation of a commit to ``tree``. Return whether it is valid."""
        path = value["path"]
        if kind == "file":
            tree[path] = base64.b64decode(value["content"])
        elif kind == "lfsFile" and value["oid"] in self.server.objects:
            tree[path] = self.server.objects[value["oid"]]
        elif kind == "lfsFile" and self.server.xet:
            tree[path] = IN_XET + value["oid"].encode()
        elif kind == "deletedFile" and path in tree:
            del tree[path]
        else:
            return False
        return True

    def tag(self, repo_id, repository, commit, body) -> None:
        name = json.loads(body)["tag"]
        if name in repository.tags:
            return self.error(409, "Tag already exists")
        repository.tags[name] = commit.oid
        return self.answer({})

    def refs(self, repo_id, repository, commit, body) -> None:
        head = {"name": "main", "ref": "refs/heads/main", "targetCommit": commit.oid}
        tags = []
        for name, oid in repository.tags.items():
            tags.append({"name": name, "ref": f"refs/tags/{name}", "targetCommit": oid})
        self.answer({"converts": [], "branches": [head], "tags": tags})

    def may_write(self, repo_id, repository, commit, body) -> None:
        self.answer({})

    def info(self, repo_id, repository, commit, body) -> None:
        values = {
            "id": repo_id,
            "sha": commit.oid,
            "private": repository.private,
            "siblings": [{"rfilename": name} for name in commit.files],
        }
        self.answer(values)

    def tree(self, repo_id, repository, commit, body) -> None:
        rows = []
        for name, data in commit.files.items():
            row = {"type": "file", "path": name, "size": len(data), "oid": blob_id(data)}
            if name.endswith(LFS):
                row["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
            rows.append(row)
        self.answer(rows)

    def resolve(self, repo_id, repository, commit, body, name: str) -> None:
        headers = {"X-Repo-Commit": commit.oid}
        if name not in commit.files:
            return self.error(404, "Entry not found", "EntryNotFound", headers)
        data = commit.files[name]
        headers["ETag"] = f'"{blob_id(data)}"'
        if name.endswith(LFS):
            headers["X-Linked-ETag"] = f'"{sha256(data)}"'
            headers["X-Linked-Size"] = str(len(data))
        return self.answer(data, headers=headers)


MODEL = f"/api/models/{REPO_PATTERN}"
REVISION = "(?P<revision>.+)"
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
    """Return the SHA-256 of an LFS object or of a file in Xet."""
    if data.startswith(IN_XET):
        return data.removeprefix(IN_XET).decode()
    return sha256(data)


def blob_id(data: bytes) -> str:
    """Return git's id of a blob with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
