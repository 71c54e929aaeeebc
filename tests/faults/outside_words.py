"""Words of others on their way to a person: no secret and no control character reaches a terminal, a log or a card.

Each source that the product reads, and each server that it writes to, stands behind a front on localhost that knows a
secret of each kind, breaks connections, redirects to signed links, and answers with the secrets and escapes in its
headers and pages. Whatever comes of the command, nothing that it prints or leaves may hold them.
"""

import ast
import http.client
import importlib.util
import json
import random
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import commands
import damage
import pyarrow.parquet
import yaml
from data_server import DataServer
from hub_server import HubServer

USER, PASSWORD, QUERY, LINK = "canaryuser", "canarypass", "canaryquery", "canarylink"
TOKEN = "hf_" + "canarytoken" * 3
API_KEY = "canarykey" * 5
LOGIN, SIGNED = f"{USER}:{PASSWORD}@", f"token={QUERY}&v=1"
ESCAPE = "\x1b[2J\x1b]0;mine\x07\x9b1m\u202e"
SECRETS = (USER, PASSWORD, QUERY, LINK, "canarytoken", "canarykey")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
KINDS = ("cut", "cut", "half", "error", "error", "redirect", "redirect", "page")
TEXTS = [f"{commands.text(i, 40)} {ESCAPE}" for i in range(40)]
# Every word that must not come through any of words_child's DOORS as it is: nothing of SECRETS, nothing of CONTROL.
STEERING = [chr(code) for code in (*range(9), *range(11, 32), *range(127, 160))]
STEERING += [chr(code) for code in (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))]
URLS = [
    *(f"{scheme}://{LOGIN}h/x?{SIGNED}" for scheme in ("http", "https", "HTTPS", "hTTp", "s3", "ftp", "git+https")),
    *(
        f"https://{LOGIN}{host}/x?a=1&{SIGNED}"
        for host in ("h:8443", "[::1]", "[fe80::1]:80", "127.0.0.1:1", "H.EXAMPLE")
    ),
    f"redis://:{PASSWORD}@h:6379/0",
    f"https://{PASSWORD}@h/x",
    f"https://{USER}:a%40{PASSWORD}@h/x",
    f"https://{USER}:a@{PASSWORD}@h/x",
    f"https://{USER}:a/{PASSWORD}@h/x",
    f"https://{USER}:a:{PASSWORD}@h/x",
    f"https://{LOGIN}h",
    f"https://{LOGIN}h?{QUERY}",
    f"https://h/x?{QUERY}",
    f"https://h/x#access_token={QUERY}",
    f"https://h/x?v=1#{QUERY}",
    f"https://h/x?v=1&tok%65n={QUERY}",
    f"https://h/x?next=https%3A%2F%2F{USER}%3A{PASSWORD}%40h%2Fx%3Ftoken%3D{QUERY}",
    f"https://h/x?a=1;token={QUERY}",
    f"https://h/x?a[]=1&token={QUERY}",
    f"HTTPS://H/X?TOKEN={QUERY}",
    rf"https:\/\/{LOGIN}h\/x?{SIGNED}",
    rf"HTTPS:\/\/{LOGIN}h:1\/x?v=1&token={QUERY}",
    f"https%3A%2F%2F{USER}%3A{PASSWORD}%40h%2Fx%3Ftoken%3D{QUERY}",
    f"https%3a%2f%2f{USER}%3a{PASSWORD}%40h%2fx%3fv%3d1%26token%3d{QUERY}",
    f"https://p/https%3A%2F%2F{USER}%3A{PASSWORD}%40h%2Fx",
    f"https://p/https://{LOGIN}h/x?{SIGNED}",
    f"https://h/a,https://{LOGIN}h/b",
    f"//{LOGIN}h/x?{SIGNED}",
]
PROVING = ("token", "access_token", "refresh_token", "id_token", "auth_token", "api_key", "apikey", "api-key", "auth")
PROVING += ("key-pair-id", "policy", "signature", "sig", "sign", "x-amz-signature", "x-amz-credential", "hmac", "hdnts")
PROVING += ("x-amz-security-token", "x-goog-signature", "x-goog-credential", "awsaccesskeyid", "authorization", "jwt")
PROVING += ("password", "passwd", "pwd", "secret", "client_secret", "session", "sessionid")
TARGETS = [
    f"{before}/a/x.csv?{first}{way(name)}={QUERY}{after}"
    for name in PROVING
    for way in (str.lower, str.upper, str.title)
    for before, first, after in (("url: ", "", " (Caused by E())"), ('"GET ', "v=1&", '&w=2 HTTP/1.1" 403 0'))
]
TARGETS += [f"('/x?Policy={QUERY}~a__&Key-Pair-Id={LINK}',)", f"Location: /x?v=1&X%2DAmz%2DSignature={LINK}"]
HEADERS = [
    f"{before}{way('authorization')}{between}{kind} {QUERY}.x-y{after}"
    for way in (str.lower, str.upper, str.title)
    for kind in ("Bearer", "bearer", "BASIC", "Token")
    for before, between, after in (("", ": ", ""), ("{'", "': '", "'}"), ('{"', '": "', '"}'), ("(b'", "', b'", "')"))
]
HEADERS += [
    f"{name}{between}sid={QUERY}{more}"
    for name in ("Cookie", "cookie", "COOKIE", "Set-Cookie", "set-cookie")
    for between, more in ((": ", f"; b={LINK}; Path=/"), ("': '", "'"), ("', b'", f"; b={LINK}'"))
]
HEADERS += [f"Proxy-Authorization: Basic {QUERY}=="]
KEPT_SECRET = {  # in the environment of each door; one is the beginning of another
    "HF_TOKEN": TOKEN,
    "MY_KEY": "innermost",
    "AWS_SECRET_ACCESS_KEY": f"innermost/{PASSWORD}+=",
    "GITHUB_TOKEN": f"ghp.{QUERY}",
    "DB_PASSWORD": f"a b'{LINK}",
    "WANDB_API_KEY": API_KEY,
}
WORDS = {
    "what steers": [f"a{one}b {one}" for one in STEERING],
    "URLs": [f"{before}{url}{after}" for url in URLS for before, after in (("", ""), ("of '", "'."), ("(", "): 403"))],
    "targets": TARGETS,
    "headers": HEADERS,
    "environment": [f"with {value} it fails; {value}" for value in KEPT_SECRET.values()],
}
DOORS = ("terminal", "libraries", "warnings", "tracebacks", "errors", "prints", "generated", "cleaned")


class Front(ThreadingHTTPServer):
    """Passes requests on to ``target``, except that it may do one of KINDS with each, ``faults`` times in all."""

    daemon_threads = True

    def __init__(self, target: str, dice: random.Random, faults: int, kinds: tuple[str, ...] = KINDS):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.dice, self.left, self.kinds = urlsplit(target), dice, faults, kinds
        self.lock, self.met = threading.Lock(), []
        self.place = f"127.0.0.1:{self.server_port}"
        self.url = f"http://{self.place}"

    def __enter__(self) -> "Front":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address) -> None:
        """Keep quiet about clients that gave up."""

    def fault(self) -> str | None:
        """Return what happens to this request; None: nothing."""
        with self.lock:
            kind = self.dice.choice(self.kinds) if self.left > 0 and self.dice.random() < 0.5 else None
            self.left -= kind is not None
            self.met.append(kind)
            return kind


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Front

    def log_message(self, *_) -> None:
        """Say nothing."""

    def do_GET(self) -> None:  # noqa: N802
        """Answer a request of any method."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = self.server.fault()
        if kind == "redirect" and LINK in self.path:  # once a request
            kind = "cut"
        if kind == "cut":
            self.close_connection = True
            return None
        leak = f"{self.server.url.replace('://', f'://{LOGIN}')}/x?{SIGNED}"
        said = f"{ESCAPE} {leak} {self.headers.get('Authorization')}".encode("ascii", "backslashreplace").decode()
        if kind == "error":
            status = self.server.dice.choice((400, 403, 404, 416, 500, 503))
            page = json.dumps({"error": f"{ESCAPE} {leak} {self.headers.get('Authorization')}"}).encode()
            return self.send(
                status, page, {"X-Error-Message": said.replace("\n", " "), "Content-Type": "application/json"}
            )
        if kind == "page":
            return self.send(
                200, f"<html>{ESCAPE} <a href='{leak}'>log in</a></html>".encode(), {"Content-Type": "text/html"}
            )
        if kind == "redirect":
            begin = self.server.url.replace("://", f"://{LOGIN}")
            joined = "&" if "?" in self.path else "?"
            where = f"{begin}{self.path}{joined}X-Amz-Signature={LINK}&Policy={LINK}"
            return self.send(self.server.dice.choice((302, 307)), b"", {"Location": where})
        return self.pass_on(body, half=kind == "half")

    do_POST = do_PUT = do_HEAD = do_GET  # noqa: N815

    def pass_on(self, body: bytes, half: bool) -> None:
        """Answer what the target answers, or half of it."""
        target = http.client.HTTPConnection(self.server.target.hostname, self.server.target.port, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        asked = urlsplit(self.path)  # a proxy is asked for a whole URL
        target.request(self.command, asked._replace(scheme="", netloc="").geturl(), body, headers)
        answer = target.getresponse()
        data = answer.read()
        target.close()
        kept = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ("connection", "transfer-encoding")
        }
        here = f"{self.server.target.hostname}:{self.server.target.port}"
        data = (
            data.replace(here.encode(), self.server.place.encode())
            if answer.getheader("Content-Type") == "application/json"
            else data
        )
        kept = {
            name: value.replace(here, self.server.place)
            for name, value in kept.items()
            if name.lower() != "content-length"
        }
        size = int(answer.getheader("Content-Length") or len(data)) if self.command == "HEAD" else len(data)
        self.send(answer.status, data[: len(data) // 2] if half else data, kept | {"Content-Length": str(size)})
        if half:
            self.close_connection = True

    def send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        """Send an answer."""
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def secret_shown(folder: Path, *printed: str) -> str | None:
    """Return which secret or control character stands in what was printed, or in a file below a folder."""
    seen = {f"output {number}": words.encode() for number, words in enumerate(printed)}
    left = [path for path in folder.rglob("*") if path.is_file() and path.name not in OWN]
    seen |= {str(path.relative_to(folder)): path.read_bytes() for path in left}
    for where, data in seen.items():
        # wandb's own process, which is not written in Python, logs what its server says.
        secrets = ("canarytoken", "canarykey") if "/wandb/" in where else SECRETS
        for secret in secrets:
            if secret.encode() in data:
                return f"{secret} stands in {where}: {line_with(data, secret.encode())}"
        shown = where.startswith("output") or re.search(
            r"runs/[^/]*/(run\.log|samples\.txt|metrics\.jsonl)$|\.md$", where
        )
        if shown and (odd := CONTROL.search(data.decode(errors="replace"))):
            return f"{odd[0]!r} stands in {where}: {line_with(data, odd[0].encode())}"
    return None


def line_with(data: bytes, piece: bytes) -> str:
    """Return the line of some bytes that holds a piece of them, as ASCII."""
    return ascii(next(line for line in data.split(b"\n") if piece in line)[:300].decode(errors="replace"))


def serve(folder: Path, model: Path | None) -> None:
    """Fill a DataServer's folder: files of each kind, data sets and a model of the Hub; some names hold escapes."""
    if model:
        shutil.copytree(model, folder / "models" / "me" / "model")
    items = folder / "datasets" / "Rowan" / "hellaswag" / "data"
    items.mkdir(parents=True)
    item = {
        "ind": 1,
        "activity_label": ESCAPE,
        "ctx": f"the cat {ESCAPE}",
        "ctx_a": f"the cat {ESCAPE}",
        "ctx_b": "",
        "endings": ["a", "b", "c", "d"],
        "label": "1",
    }
    table = pyarrow.Table.from_pylist([item | {"split_type": "x", "source_id": "y"}] * 4)
    pyarrow.parquet.write_table(table, items / "validation-00000-of-00001.parquet")
    (folder / "files").mkdir(parents=True)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "files" / "a.txt").write_text("\n".join(TEXTS))
    (folder / "files" / "a.jsonl").write_text(rows)
    for name, file in {"corpus": "data/train.jsonl", "odd": "odd/a\x1b[2J.jsonl", "tokens": "tokens/README.md"}.items():
        path = folder / "datasets" / "me" / name / file
        path.parent.mkdir(parents=True)
        path.write_text(rows)
    tokens = path.parent
    for name, count in {"x_val_0.bin": 400, "x_train_0.bin": 900}.items():
        header = b"".join(number.to_bytes(4, "little") for number in (20240520, 1, count)).ljust(1024, b"\0")
        (tokens / name).write_bytes(header + b"".join((i % 250).to_bytes(2, "little") for i in range(count)))


def of_data(*flags: str) -> Callable:
    """Return the words of a preparation, from the front's address; {0} is it, {1} with a login in it."""
    return lambda url: (
        "prepare_data.py",
        "--recipe",
        "tiny.yaml",
        *(flag.format(url, url.replace("://", f"://{LOGIN}")) for flag in flags),
    )


def of_train(*flags: str) -> Callable:
    """Return the words of a training run."""
    return lambda url: ("train.py", "--recipe", "tiny.yaml", "--max_steps", "3", "--warmup_steps", "1", *flags)


SAMPLED = ("--sample_steps", "3", "--sample_prompts", f"the {ESCAPE}")
SOURCES: dict[str, Callable[[str], tuple[str, ...]]] = {
    "a text by URL": of_data("--data_files", f"{{1}}/files/a.txt?{SIGNED}"),
    "rows by URL": of_data("--data_files", f"{{1}}/files/a.jsonl?{SIGNED}"),
    "files of the Hub": of_data("--data_files", "hf://datasets/me/corpus/data/*.jsonl"),
    "files of the Hub with odd names": of_data("--data_files", "hf://datasets/me/odd/odd/*.jsonl"),
    "a data set of the Hub": of_data("--data_files", "null", "--dataset_name", "me/corpus"),
    "token files of the Hub": of_data("--data_files", "null", "--data_dir", "hf://datasets/me/tokens/tokens"),
    "a tokenizer of the Hub": of_data("--tokenizer", "me/model"),
    "a model of the Hub": of_train("--init_from", "me/model"),
    "a model to sample from": lambda url: ("generate.py", "--model", "me/model", "--max_new_tokens", "5"),
    "a model to export": lambda url: ("export_model.py", "me/model", "--out", "out", "--text", "text.txt"),
    "a model to improve": lambda url: ("post_train.py", "--config", "post.yaml", "--model", "me/model"),
    "a reward and prompts": lambda url: ("post_child.py", "me/model", "prompts.jsonl", "reward.py:cat"),
    "a reward that prints": lambda url: ("post_child.py", "me/model", "prompts.jsonl", "reward.py:loud"),
    "HellaSwag's items": of_train("--hellaswag_steps", "3"),
    "a model to score": lambda url: ("eval_hellaswag.py", "--model", "me/model"),
    "samples": of_train(*SAMPLED),
    "a push": of_train(
        *SAMPLED, "--push_to_hub", "true", "--hub_model_id", "me/run", "--hub_strategy", "all_checkpoints"
    ),
    "a checkpoint of the Hub": of_train("--resume_from_checkpoint", "hub://me/run"),
    "a tracker": of_train("--report_to", "wandb"),
    "a proxy": of_data("--data_files", "http://somewhere.invalid/files/a.txt"),
    "an endpoint with a login": of_data("--data_files", "hf://datasets/me/corpus/data/*.jsonl"),
}
# A reward that raises: its words are its author's, and what stands in them.
REWARD = f"""
def cat(prompt, completion):
    if prompt == "well":
        return 1.0
    raise ValueError({ESCAPE!r} + " http://{LOGIN}h/x?{SIGNED}")


def loud(prompt, completion):
    print({ESCAPE!r})
    return 1.0
"""
POST = """
reward: reward.py:cat
prompts: prompts.jsonl
held_out: prompts.jsonl
output_dir: runs/post
max_steps: 1
per_device_train_batch_size: 2
num_generations: 2
max_completion_length: 3
logging_steps: 1
use_cpu: true
report_to: none
save_strategy: "no"
"""
OF_RUNS = ("a push", "a checkpoint of the Hub")  # what the fake Hub of pushes answers
LOCAL = ("samples",)  # asks nobody
# In ``make test``; the first one leaves the model of the others.
SHORT = (
    "samples",
    "a text by URL",
    "files of the Hub with odd names",
    "a reward and prompts",
    "a model to sample from",
)
OWN = ("reward.py", "prompts.jsonl", "post.yaml", "mixture.yaml")  # written by the user's own hand


def attack(
    folder: Path,
    source: str,
    model: Path,
    dice: random.Random,
    run: Callable[..., commands.Done],
    pushed: Mapping[str, bytes] | None = None,
) -> str | None:
    """Meet one source behind a front; return why it does not hold.

    Args:
        model: a model folder, which the Hub serves; nobody asks for it where the source is LOCAL.
        run: runs a command: (script, *flags, **environment).
        pushed: files of the repository that a run is resumed from.
    """
    (folder / "post.yaml").write_text(POST)
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text('{"prompt": "well"}\n' + json.dumps({"prompt": ESCAPE[:4]}) + "\n")
    served = folder.with_name(f".{folder.name}-served")
    serve(served, model if source not in LOCAL else None)
    home = str(folder / "home")
    environment = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
    environment |= {"HF_HOME": home, "WANDB_API_KEY": API_KEY, "WANDB_DIR": home, "HOME": home}
    with DataServer(served) as data, HubServer() as hub:
        for name in ("me/run", "me/model"):
            hub.make(name)
        if source == "a checkpoint of the Hub":
            hub.repositories["me/run"].commit("by a run", dict(pushed or {}))
        with Front((hub if source in OF_RUNS else data).url, dice, faults=dice.randint(0, 8)) as front:
            environment |= {"HF_ENDPOINT": front.url, "WANDB_BASE_URL": front.url}
            if source == "a proxy":
                environment |= {"http_proxy": front.url.replace("://", f"://{LOGIN}"), "no_proxy": ""}
            elif source == "an endpoint with a login":
                environment["HF_ENDPOINT"] = front.url.replace("://", f"://{LOGIN}")
            done = run(*SOURCES[source](front.url), **environment)
    shutil.rmtree(served)
    if "Traceback (most recent call last)" in done.stderr or done.code not in (0, 1, 2):
        return commands.fault_of(done, "")
    if not front.met and source not in LOCAL:
        raise RuntimeError(f"the front met no request: {done.stderr[-300:]}")
    if not any(front.met) and done.code != 0:
        return f"fails without a fault: {(done.errors or [done.stderr])[0][:300]}"
    return secret_shown(folder, done.stderr, "" if source == "a model to sample from" else done.stdout)


def through(door: str, words: list[str]) -> Callable[[Path], str | None]:
    """Return a case: words that go through a door of words_child; each of them comes through, and nothing as it is."""

    def hit(folder: Path) -> str | None:
        (folder / "words.json").write_text(json.dumps([f"w{number:03}w {word}" for number, word in enumerate(words)]))
        done = commands.run("words_child.py", door, "words.json", cwd=folder, environment=KEPT_SECRET)
        (folder / "words.json").unlink()
        printed = done.stdout + done.stderr
        if done.code not in (0, 2) or "other bytes in a pipe" in printed:
            return f"exit status {done.code}: {printed[-300:]!r}"
        if lost := [number for number in range(len(words)) if f"w{number:03}w" not in printed]:
            return f"of {words[lost[0]]!r} nothing comes through"
        return secret_shown(folder, done.stderr, done.stdout)

    return hit


def checked(check: str) -> Callable[[Path], str | None]:
    """Return a case: one of words_child's CHECKS."""

    def hit(folder: Path) -> str | None:
        done = commands.run("words_child.py", "check", check, cwd=folder)
        return None if done.code == 0 else done.stderr[-600:]

    return hit


PROMPTS = (
    "the cat",
    "the\ncat\n\n sat",
    "the '\"",
    "",
    "  the \\n",
    f"the {ESCAPE}",
    "the 'a'\r\nb",
    "é 🦣\u0085\u2028x",
)
TALKS = ("--sample_steps", "1", "--sample_tokens", "5", "--sample_prompts", *PROMPTS)
WEBS = 'weight: 1\n  data_files: ["{0}/files/a.txt?{1}&token={2}"]\n  validation_fraction: 0.2\n'


def talking(base: Path, shared: Path) -> Path:
    """Return the folder of a run that writes samples at each step, with all of its checkpoints."""
    folder = shared / "talking"
    folder.mkdir()
    done = commands.run(*damage.TRAIN, *TALKS, "--report_to", "tensorboard", cwd=commands.copy(base, folder))
    if done.code != 0:
        raise RuntimeError(f"the tree cannot train: {done.stderr}")
    return folder


def resumed(talking: Path, how: str) -> Callable[[Path], str | None]:
    """Return a case: a run that was killed behind its checkpoint leaves what the whole run left, each thing once."""

    def hit(folder: Path) -> str | None:
        commands.copy(talking, folder)
        run = folder / damage.RUN
        wanted = [samples_of(run), commands.bits_of(run), scalars_of(run)]
        cut_back(run, 6)
        before = (run / "run.log").read_text()
        metrics, samples = run / "metrics.jsonl", run / "samples.txt"
        if how == "torn":
            metrics.write_bytes(metrics.read_bytes()[:-9])
            samples.write_bytes(samples.read_bytes()[:-9])
        elif how == "odd":
            rows = metrics.read_text().splitlines(keepends=True)
            metrics.write_text("".join([*rows[:3], '{"step": "\x1b"}\n', "[" * 9999 + "\n", "\n", *rows[3:]]))
        elif how == "in the way":
            shutil.rmtree(run / "tensorboard")
            (run / "tensorboard").write_text("")
            (run / "curves.png").unlink(missing_ok=True)
            (run / "curves.png").mkdir()
        done = commands.run(*damage.TRAIN, *TALKS, "--report_to", "tensorboard", cwd=folder)
        if done.code != 0:
            return commands.fault_of(done, "") or f"exit status {done.code}: {done.errors[0][:300]}"
        if how == "in the way":
            if missing := [
                name for name in ("tensorboard: off from here", "curves.png: not drawn") if name not in done.stderr
            ]:
                return f"not a word of {missing}"
            wanted[2] = scalars_of(run)
        if how == "odd" and "metrics.jsonl: line 4 is no row; 3 such" not in done.stderr:
            return f"not a word of odd lines: {done.stderr[:300]}"
        kept = (run / "run.log").read_text()
        if kept != before + done.stderr:
            return "run.log is not what the terminal showed, one start after the other"
        found = [samples_of(run), commands.bits_of(run), scalars_of(run)]
        for name, one, other in zip(("samples.txt", "weights and losses", "tensorboard"), found, wanted, strict=True):
            if one != other:
                return f"{name} is not the whole run's: {one}, {other}"
        if len(found[0]) != (commands.STEPS + 1) * len(PROMPTS):
            return f"{len(found[0])} samples"
        return secret_shown(folder, done.stderr, done.stdout)

    return hit


def cut_back(run: Path, step: int) -> None:
    """Remove what a run has saved later than a step."""
    for path in (*(run / "checkpoints").iterdir(), run / "model"):
        if path.name == "model" or int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def samples_of(run: Path) -> list[str]:
    """Return the samples of a run, each with its heading."""
    return (run / "samples.txt").read_text().split("==== step ")[1:]


def scalars_of(run: Path) -> object:
    """Return the losses, and the number of samples, that TensorBoard shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not (run / "tensorboard").is_dir():
        return None
    shown = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    pages = [event.tensor_proto.string_val[0].decode() for event in shown.Tensors("samples/text_summary")]
    steps = sorted({event.step for event in shown.Tensors("samples/text_summary")})  # what is hidden is still there
    odd = [page for page in pages if CONTROL.search(page) or page.count("<pre") != len(PROMPTS)]
    return [(e.step, e.value) for name in ("train/loss", "eval/loss") for e in shown.Scalars(name)], steps, odd


def streamed(whole: Path, kind: str, number: int, wanted: dict) -> Callable[[Path], str | None]:
    """Return a case: a run whose terminal or pipe fails it, or that a signal stops, loses nothing."""

    def hit(folder: Path) -> str | None:
        commands.copy(whole, folder)
        stopped = kind in ("signal", "nohup")
        cut_back(folder / damage.RUN, 0 if stopped else 6)
        log, metrics = folder / damage.RUN / "run.log", folder / damage.RUN / "metrics.jsonl"
        log.unlink()
        if stopped:
            metrics.unlink()
        restarts = "2" if number == 15 else "0"
        environment = {"TORCHELASTIC_MAX_RESTARTS": restarts}
        steps = ("--eval_steps", "1", "--eval_tokens", "0") if stopped else ()  # which take their time
        done = commands.run(
            "words_child.py", kind, str(number), *damage.TRAIN, *steps, cwd=folder, environment=environment
        )
        if kind == "signal":
            code = 0 if restarts == "2" else 128 + number
            if done.code != code or done.errors or "Traceback" in done.stderr:
                return f"exit status {done.code}, not {code}: {done.stderr[-300:]}"
            rows = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
            newest = max(path.name for path in (folder / damage.RUN / "checkpoints").iterdir())
            if newest != f"step-{rows[-1]:08d}" or (folder / damage.RUN / "model").exists():
                return f"stopped behind step {rows[-1]}, it has {newest}"
            done = commands.run(*damage.TRAIN, *steps, cwd=folder)
        if done.code != 0:
            return f"exit status {done.code}: {done.stderr[-300:]}"
        last = f"/{commands.STEPS}  loss" if kind != "tty" else "run.log  "
        if (kind != "signal" and last not in log.read_text()) or "\x1b" in log.read_text():
            return f"run.log has not all lines: {log.read_text()[-300:]}"
        if kind == "tty" and f"{commands.STEPS}/{commands.STEPS} [" not in done.stderr:
            return f"no progress bar: {done.stderr[:1500]!r}"
        same = wanted if not stopped else {name: value for name, value in wanted.items() if name != "losses"}
        return damage.ends(done, folder, same)

    return hit


def generated(model: Path) -> Callable[[Path], str | None]:
    """Return a case: three samples, into a file, a pipe whose reader leaves, a terminal and a full disk."""

    def hit(folder: Path) -> str | None:
        def run(*words: str, seed: str = "5", many: str = "3") -> commands.Done:
            flags = ("--model", str(model), "--prompt", prompt, "--seed", seed, "--num_samples", many)
            child = ("words_child.py", *words) if words else ()
            return commands.run(*child, "generate.py", *flags, "--max_new_tokens", "60", cwd=folder)

        for prompt in ("the cat", f"the {ESCAPE}\t é"):
            alone = [run(seed=str(seed), many="1") for seed in (5, 6, 7)]
            wanted = "".join(f"---- sample {n} of 3\n{done.stdout}" for n, done in enumerate(alone, 1))
            whole, terminal, head, full = run(), run("tty", "1"), run("left", "1", many="50"), run("full", "1")
            if (
                any(not done.stdout.startswith(prompt) or done.stderr for done in alone)
                or len({one.stdout for one in alone}) < 3
            ):
                return f"samples alone: {[done.stdout + done.stderr for done in alone]}"
            if whole.stdout != wanted:
                return f"together: {whole.stdout!r}, one by one: {wanted!r}"
            shown = CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), wanted)
            if terminal.stdout.split() != shown.split() or terminal.code != 0:
                return f"on a terminal {terminal.stdout + terminal.stderr!r}, not {shown!r}"
            if (head.code, head.stdout, head.stderr) != (1, "---- sample 1 of 50\n", ""):
                return f"where the reader leaves: {head}"
            if full.code != 1 or full.stdout or full.stderr.count("\n") != 1 or "No space left" not in full.stderr:
                return f"on a full disk: {full}"
        return None

    return hit


def of_webs(base: Path, tracker: str) -> Callable[[Path], str | None]:
    """Return a case: texts behind two logins, as flags or a mixture: no file has them; renewed ones are the same."""

    def hit(folder: Path) -> str | None:
        commands.copy(base, folder)
        home, served = folder / "a b's", folder.with_name(f".{folder.name}-served")
        serve(served, None)
        with DataServer(served) as data:
            url = data.url.replace("://", f"://{LOGIN}")
            environment = {"WANDB_MODE": "offline", "WANDB_API_KEY": API_KEY, "HOME": str(folder), "HF_TOKEN": TOKEN}

            def train(token: str) -> commands.Done:
                text = commands.RECIPE.replace("sample_steps: 0", "")
                if by_flags:
                    links = [f"{url}/files/a.txt?{SIGNED}{v}&token={token}" for v in (1, 2)]
                    more = ("--validation_fraction", "0.2", "--data_files", *links)
                else:
                    links = [f"- {WEBS.format(url, f'v={v}', token)}" for v in (1, 2)]
                    more, text = (), text.replace("data_files: [text.txt]", "sources:\n" + "".join(links))
                (folder / "mixture.yaml").write_text(text)
                flags = (
                    "--recipe",
                    "mixture.yaml",
                    "--max_steps",
                    "3",
                    "--warmup_steps",
                    "1",
                    "--output_dir",
                    str(home),
                )
                return commands.run("train.py", *flags, *tracked, *more, cwd=folder, environment=environment)

            by_flags = tracker == "wandb"
            tracked = ("--report_to", tracker, "--sample_steps", "3", "--sample_prompts", "<b>&x", f"&{ESCAPE}")
            first = train(QUERY)
            if first.code != 0:
                return f"exit status {first.code}: {first.stderr[-500:]}"
            made = sorted(path.name for path in (folder / "data").iterdir())
            again = train("renewed")
        shutil.rmtree(served)
        for done in (first, again):
            if done.code != 0:
                return commands.fault_of(done, "") or f"exit status {done.code}: {done.errors[0][:300]}"
        if sorted(path.name for path in (folder / "data").iterdir()) != made:
            return f"a renewed link is taken for other data: {made}"
        (folder / "mixture.yaml").unlink()
        if tracker == "wandb":
            loop = first.stderr.partition("later: ")[2].splitlines()[0].replace("wandb sync", "ls")
            listed = subprocess.run(["bash", "-c", loop], cwd=folder, capture_output=True, text=True)
            if listed.returncode or ".wandb" not in listed.stdout:
                return f"the command that sends the curves finds none: {loop}: {listed.stderr}"
        for path in (path for path in folder.rglob("*") if path.is_file()):
            raw = ("<b>&x", ESCAPE) if path.suffix == ".html" or "tfevents" in path.name else ()
            for word in (*SECRETS, *raw):
                if word.encode() in path.read_bytes():
                    return f"{word!r} stands in {path.relative_to(folder)}"
        return secret_shown(folder, *(done.stderr + done.stdout for done in (first, again)))

    return hit


def carded(base: Path) -> Callable[[Path], str | None]:
    """Return a case: the card of a model whose recipe holds Markdown, quotes and a login says what was measured."""

    def hit(folder: Path) -> str | None:
        commands.copy(base, folder)
        served = folder.with_name(f".{folder.name}-served")
        serve(served, None)
        prompt = f"```\n# forged \"'$\n````\n{ESCAPE}"
        flags = ("--sample_steps", "3", "--tags", "a: b", "[x]", "--license", "mit", "--run_name", "a_b.c-d")
        flags += ("--push_to_hub", "true", "--hub_model_id", "me/card", "--sample_prompts", prompt)
        with DataServer(served) as data, HubServer() as hub:
            link = data.url.replace("://", f"://{LOGIN}") + f"/files/a.txt?{SIGNED}"
            command = (*of_train("--data_files", link)(""), *flags)
            environment = hub.environment(folder / "home")
            done = commands.run(*command, cwd=folder, environment=environment, hasty=True)
            pushed = hub.files("me/card") if "me/card" in hub.repositories else {}
        shutil.rmtree(served)
        if done.code != 0 or "README.md" not in pushed:
            return commands.fault_of(done, "") or f"exit status {done.code}, pushed: {list(pushed)}"
        _, head, body = pushed["README.md"].decode().split("---\n", 2)
        about, kept = yaml.safe_load(head), folder / "runs" / "a_b.c-d"
        rows = [json.loads(line) for line in (kept / "metrics.jsonl").read_text().splitlines()]
        loss = [row["eval/loss"] for row in rows if "eval/loss" in row][-1]
        measured = {each["name"]: each["value"] for each in about["model-index"][0]["results"][0]["metrics"]}
        if measured.get("validation loss, nats per token") != round(loss, 4) or "datasets" in about:
            return f"its head has {about}"
        if (about["license"], about["tags"]) != ("mit", ["ursa-minor", "a: b", "[x]"]):
            return f"its head has {about}"
        found = re.findall(r"^(`{3,})(\w+)\n(.*?)^\1$", body, re.DOTALL | re.MULTILINE)
        blocks = {language: text for _, language, text in found}
        calls = [node for node in ast.walk(ast.parse(blocks["python"])) if isinstance(node, ast.Call)]
        said = [node.value for call in calls for node in ast.walk(call) if isinstance(node, ast.Constant)]
        if prompt not in said or "me/card" not in said or "step-00000003" not in said:
            return f"its code has {said}"
        main = yaml.safe_load(blocks["yaml"])
        if (main["max_steps"], main["tokenizer"], main["learning_rate"]) != (3, "tok", 3e-3):
            return f"its recipe is {main}"
        hidden = link.replace(LOGIN, "redacted@").partition("?")[0] + "?redacted="
        words = shlex.split(blocks["sh"])
        wanted = ["python", *(hidden if word == link else word for word in command)][:-1]
        if [word.partition("=")[0] for word in words[:-1]] != [word.partition("=")[0] for word in wanted]:
            return f"its command is {words}"
        plain = re.sub(r"^(`{3,})\w+\n.*?^\1$", "", body, flags=re.DOTALL | re.MULTILINE)
        pieces = ("# a\\_b.c-d\n", "after step 3 of 3.", f"| {loss:.4f} |", "| tokens | 192 |", "files of its author's")
        if missing := [piece for piece in pieces if piece not in plain]:
            return f"its text has not {missing}: {plain}"
        if "forged" in plain or plain.count("\n# ") != 1:
            return f"its text has other headings: {plain}"
        if pushed["metrics.jsonl"] != (kept / "metrics.jsonl").read_bytes():
            return "other metrics were pushed"
        for name, data in pushed.items():
            if shown := [word for word in SECRETS if word.encode() in data]:
                return f"{shown} stands in {name}"
        (folder / "pushed.md").write_bytes(pushed["README.md"])
        return secret_shown(folder, done.stderr, done.stdout)

    return hit


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """Each source eight times, each time with other faults; by fours, so that every fourth case meets each source.

    Then all words through each door.
    """
    whole, _ = damage.finished(base, shared)
    with HubServer() as hub:
        pushes = ("--push_to_hub", "true", "--hub_model_id", "me/run", "--hub_strategy", "checkpoint")
        flags, environment = of_train(*pushes)(""), hub.environment(shared / "hf")
        done = commands.run(*flags, cwd=commands.copy(base, shared), environment=environment, hasty=True)
        if done.code != 0 or "me/run" not in hub.repositories:
            raise RuntimeError(f"the tree cannot push: {done.stderr}")
        pushed = hub.files("me/run")
    for number in range(8 * len(SOURCES)):
        source = list(SOURCES)[number // 4 % len(SOURCES)]
        if source == "a tracker" and number >= 4 * len(SOURCES):  # it waits for its server in a process of its own
            continue
        if source == "a model to improve" and not importlib.util.find_spec("trl"):
            continue

        def hit(folder: Path, source=source, seed=rng.random()) -> str | None:  # noqa: B008
            commands.copy(base, folder)

            def run(*command: str, **environment: str) -> commands.Done:
                return commands.run(*command, cwd=folder, environment=environment, hasty=True)

            return attack(folder, source, whole / damage.RUN / "model", random.Random(seed), run, pushed)

        yield f"{source}, {number}", hit
    for door in DOORS:
        for title, words in WORDS.items():
            yield f"{title} through {door}", through(door, rng.sample(words, len(words)))
    for check in ("friendly", "urls", "ends", "processes", "files", "console"):
        yield f"check {check}", checked(check)
    yield "generated", generated(whole / damage.RUN / "model")
    talks = talking(base, shared)
    for how in ("whole", "torn", "odd", "in the way"):
        yield f"killed and resumed: {how}", resumed(talks, how)
    bits = commands.bits_of(whole / damage.RUN)
    for kind in ("full", "left", "gone", "shut", "tty"):
        yield f"standard error: {kind}", streamed(whole, kind, 2, bits)
    yield "standard output: shut", streamed(whole, "shut", 1, bits)
    for number in (1, 2, 15):
        yield f"signal {number}", streamed(whole, "signal", number, bits)
    yield "nohup", streamed(whole, "nohup", 1, bits)
    for tracker in ("wandb", "tensorboard"):
        yield f"a mixture behind logins, {tracker}", of_webs(base, tracker)
    yield "a card", carded(base)
    yield "check trackers", checked("trackers")
