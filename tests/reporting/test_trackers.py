"""A curve has each point once however often the run was killed, and no tracker ends a run.

Real packages, and stand-ins for those that are not installed. Each process of a run is a fork of
this one, which has imported the packages, so that it can be killed.
"""

import contextlib
import functools
import http.server
import importlib
import importlib.util
import json
import logging
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from conftest import ROOT, CompletedScript

from ursa_minor.base import run_files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import read_metrics
from ursa_minor.recipe import command_line, keys, loading
from ursa_minor.reporting import trackers

KEY = "0canary1" * 5  # of wandb
TOKEN = "hf_canaryCanaryCanaryCanary"
SAMPLES = [("the ", "cat sat"), ("a *dog*", " ate\n```\n<b>")]
LONGEST_SECONDS = 240  # of a process; a tracker that waits forever fails its test


def needs(*names: str):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """What every fork would import for itself, once; trackio keeps its database where this says at its import."""
    os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))
    for name in (
        "accelerate.tracking",
        "requests",
        "wandb.sdk.launch",
        "torch.utils.tensorboard",
        "trackio",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    yield
    del os.environ["TRACKIO_DIR"]


@pytest.fixture
def run_dir(imported, tmp_path, monkeypatch) -> Path:
    """A run folder, beside a home without a login and nobody's settings."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "NETRC"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")  # which would call its makers
    (tmp_path / "home").mkdir()
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    return tmp_path / "runs" / "tiny"


def process(body, **environment: str) -> CompletedScript:
    """Call ``body`` in a process of its own, at a terminal, and return its status and output."""
    from accelerate import PartialState

    ours, theirs = pty.openpty()
    pid = os.fork()
    if not pid:
        code = 70
        try:
            signal.alarm(LONGEST_SECONDS)
            os.environ.update(environment)
            for number in (0, 1, 2):
                os.dup2(theirs, number)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", 1), open(2, "w", 1)
            handler = logging.StreamHandler(sys.stdout)
            handler.setFormatter(logging.Formatter("logged: %(message)s"))
            logging.getLogger("ursa_minor").handlers = [handler]
            PartialState(cpu=True)
            body()
            if "wandb" in sys.modules:
                # As at the exit of a process. wandb writes an offline run only then: finish()
                # returns earlier.
                sys.modules["wandb"].teardown()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while data := os.read(ours, 65536):
            said += data
    os.close(ours)
    return CompletedScript(
        os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.decode().replace("\r\n", "\n"), ""
    )


def begin(
    run_dir: Path, *names: str, first=0, rows=(), had=(), ids=None, **stated
) -> trackers.Trackers:
    """Begin trackers as the trainer does; ``stated``: other keys of the recipe."""
    project = run_dir.parent.parent.name  # of this test alone
    recipe = loading.load_recipe(ROOT / "recipes" / "own_text.yaml", {"data_files": ["x"]})
    tracking = {
        "report_to": [name for name in names if name],
        "project_name": project,
        "tags": ["a", "b"],
    }
    recipe = keys.replace(recipe, output_dir=str(run_dir), run_name="tiny", **tracking | stated)
    sent = functools.reduce(lambda place, row: trackers.position_after(place, row["step"]), had, -1)
    return trackers.Trackers(recipe, first, ids=ids or {}, rows=rows, sent=sent)


def point(key: str, step: int) -> float:
    return step + {"train/loss": 0.25, "train/lr": 0.5, "eval/loss": 0.75}[key]


def train(
    run_dir: Path, name: str, first: int, last: int, *, killed: bool = False, ids=None, **stated
) -> None:
    """Do as a run from a checkpoint at ``first``: metrics.jsonl, then the tracker; killed: before anything is sent."""
    path = run_dir / "metrics.jsonl"
    sent = read_metrics(path)
    done = [row for row in sent if row["step"] < first + ("train/loss" in row)]
    path.write_text("".join(json.dumps(row) + "\n" for row in done))
    tracker = begin(run_dir, name, first=first, rows=done, had=sent, ids=ids, **stated)
    with open(path, "a") as out:

        def report(step: int, *keys: str) -> None:
            row = {"step": step, "tokens": 8 * step, "mfu": None} | {
                key: point(key, step) for key in keys
            }
            print(json.dumps(row), file=out, flush=True)
            tracker.log(step, row)

        for step in range(first, last + 1):
            if step % 4 == 0:
                report(step, "eval/loss")
                tracker.log(step, {"samples": SAMPLES})
            if step < last:
                report(step + 1, "train/loss", "train/lr")
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    tracker.close()


def expected(last: int) -> list[tuple[str, int, float]]:
    """Return the points of a run that was never killed."""
    keys = [(key, step) for key in ("train/loss", "train/lr") for step in range(1, last + 1)]
    keys += [("eval/loss", step) for step in range(0, last + 1, 4)]
    return sorted((key, step, point(key, step)) for key, step in keys)


def points(rows) -> list[tuple[str, int, float]]:
    return sorted(
        (key, row["step"], row[key])
        for row in rows
        for key in row
        if "/" in key and "samples" not in key
    )


def read_tensorboard(run_dir: Path) -> list[dict]:
    """Return every point and text as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    tags = found.Tags()["tensors"]
    return [
        {"step": e.step, tag: make_ndarray(e.tensor_proto).item()}
        for tag in tags
        for e in found.Tensors(tag)
    ]


def read_trackio(run_dir: Path) -> list[dict]:
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs(run_dir.parent.parent.name, run=ids_of(run_dir)["trackio"])


def ids_of(run_dir: Path) -> dict[str, str]:
    return json.loads((run_dir / run_files.TRACKER_IDS).read_text())


class WandbServer(http.server.ThreadingHTTPServer):
    """What of wandb's server its client needs for a run: rows at their offset, and what a resumed run asks."""

    daemon_threads = True

    def __init__(self):
        self.history, self.summary, self.config, self.mortal = [], {}, None, False
        super().__init__(("127.0.0.1", 0), WandbHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_) -> None:
        """Clients that go away are what these tests are about."""

    def take(self, name: str, offset: int, lines: list[str]) -> None:
        if name == "wandb-history.jsonl":
            self.history[offset : offset + len(lines)] = map(json.loads, lines)
        elif name == "wandb-summary.json":
            self.summary = json.loads(lines[-1])

    def answer(self, operation: str, asked: dict) -> dict:
        run = {
            "id": "1",
            "name": asked.get("name"),
            "displayName": "tiny",
            "config": self.config or "{}",
        }
        if operation == "UpsertBucket":
            self.config = asked.get("config") or self.config
            project = {"id": "2", "name": asked["project"], "entity": {"id": "3", "name": "me"}}
            return {
                "upsertBucket": {"bucket": run | {"project": project}, "inserted": not self.history}
            }
        if operation == "RunResumeStatus" and self.config is not None:
            tail = json.dumps([json.dumps(row) for row in self.history[-1:]])
            counts = {
                "logLineCount": 0,
                "historyLineCount": len(self.history),
                "eventsLineCount": 0,
            }
            run |= counts | {
                "historyTail": tail,
                "eventsTail": "[]",
                "summaryMetrics": json.dumps(self.summary),
            }
            return {"model": {"id": "2", "bucket": run | {"tags": [], "wandbConfig": '{"t": 1}'}}}
        if operation == "CreateRunFiles":
            names = [{"name": name, "uploadUrl": f"{self.url}/{name}"} for name in asked["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": names}}
        return {}


class WandbHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.mortal and self.server.config:  # from when a run has begun
            self.close_connection = True
            return
        asked, answer = json.loads(body) if self.command == "POST" else {}, {}
        if "query" in asked:
            operation = re.search(r"(query|mutation)\s+(\w+)", asked["query"])[2]
            answer = {"data": self.server.answer(operation, asked.get("variables") or {})}
        for name, chunk in asked.get("files", {}).items():
            self.server.take(name, chunk["offset"], chunk["content"])
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_PUT = do_POST


@pytest.fixture
def wandb_server():
    with WandbServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def logged_in(url: str) -> dict[str, str]:
    return {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": url, "HF_TOKEN": TOKEN}


def read_offline(folder: Path) -> tuple[list[dict], list]:
    """Return the rows, and the descriptions of the run, of all files that wandb wrote offline into a folder.

    Their format is LevelDB's log: blocks of 32 KiB, and in them pieces of records (checksum, length, kind).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    rows, runs = [], []
    for path in sorted(folder.glob("offline-*/run-*.wandb")):
        data, place, begun = path.read_bytes(), 7, b""
        while place + 7 <= len(data):
            if 32768 - place % 32768 < 7:  # the end of a block is padding
                place += 32768 - place % 32768
                continue
            length, kind = struct.unpack_from("<HB", data, place + 4)
            begun += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # a whole record, or the last piece of one
                record, begun = Record.FromString(begun), b""
                if record.WhichOneof("record_type") == "history":
                    row = {
                        item.key or item.nested_key[0]: json.loads(item.value_json)
                        for item in record.history.item
                    }
                    rows.append(row)
                elif record.WhichOneof("record_type") == "run":
                    runs.append(record.run)
    return rows, runs


def assert_no_canary(folder: Path, printed: str = "") -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for canary in (KEY, TOKEN):
        assert canary not in printed
        assert not [path for path in files if canary.encode() in path.read_bytes()]


def assert_only_killed_points_lack(found: list[tuple[str, int, float]]) -> None:
    """Assert that no point occurs twice and that only the first process, killed at step 10, lost any."""
    assert len(set(found)) == len(found)
    assert set(found) <= set(expected(20))
    assert {point for point in expected(20) if point[1] > 10} <= set(found)


def kill_and_resume(run_dir: Path, name: str, **environment: str) -> str:
    """Run to step 20 with two resumptions at step 8, and return the output of all three processes.

    The first process is killed before its last rows are sent, and the second one ends at step 14.
    """
    first = process(lambda: train(run_dir, name, 0, 10, killed=True), **environment)
    assert first.returncode == -signal.SIGKILL, first.stdout
    second = process(lambda: train(run_dir, name, 8, 14), **environment)
    third = process(lambda: train(run_dir, name, 8, 20), **environment)
    printed = first.stdout + second.stdout + third.stdout
    assert (second.returncode, third.returncode) == (0, 0), printed
    assert "disabled" not in printed
    return printed


@needs("tensorboard")
def test_tensorboard_has_each_point_once_after_kills(run_dir):
    # Given a run that is killed: its points are on disk
    process(lambda: train(run_dir, "tensorboard", 0, 10, killed=True))
    assert points(read_tensorboard(run_dir)) == expected(10)

    # When it is resumed
    kill_and_resume(run_dir, "tensorboard")

    # Then there is one run, without a second one for hyperparameters, and it has each point once
    rows = read_tensorboard(run_dir)
    assert points(rows) == expected(20)
    (folder,) = {path.parent for path in run_dir.rglob("events.*")}
    assert folder == run_dir / "tensorboard"
    samples = [row for row in rows if "samples/text_summary" in row]
    assert [row["step"] for row in samples] == [0, 4, 8, 12, 16, 20]
    assert b">the cat sat</pre>" in samples[0]["samples/text_summary"]


@needs("trackio")
def test_trackio_lacks_only_killed_points(run_dir):
    assert "* " not in kill_and_resume(run_dir, "trackio")  # it prints nothing

    rows = read_trackio(run_dir)
    assert_only_killed_points_lack(points(rows))
    assert [row["step"] for row in rows if "samples" in row][-3:] == [12, 16, 20]


@pytest.mark.slow
@needs("wandb")
def test_wandb_offline_has_no_point_twice_after_sync(run_dir, wandb_server):
    # Given offline parts of a run, in a folder whose name needs quotes
    run_dir = run_dir / "a b"
    run_dir.mkdir()
    printed = kill_and_resume(run_dir, "wandb")
    assert printed.count("logged: wandb: offline") == 3  # once per process

    # When they are sent with the command that the run has printed
    command = re.search(r"for part in .* done", printed)[0]
    command = command.replace("wandb sync", f"{sys.executable} -m wandb sync")
    environment = os.environ | logged_in(wandb_server.url)
    subprocess.run(
        ["sh", "-c", command],
        cwd=run_dir,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )

    # Then the server has them once
    assert_only_killed_points_lack(points(wandb_server.history))
    evaluations = [row for row in wandb_server.history if "eval/loss" in row]
    assert all(row["tokens"] == 8 * row["step"] for row in evaluations)


@needs("wandb")
def test_wandb_online_has_one_curve_after_kills(run_dir, wandb_server):
    # Given a run at a terminal without a login: it asks nothing, and is offline
    offline = process(lambda: train(run_dir, "wandb", 0, 10)).stdout
    assert offline.startswith("logged: wandb: offline, because there is no login (wandb login)")
    assert offline.count("\n") == 1
    assert f'for part in {run_dir}/wandb/offline-*; do wandb sync "$part"; done' in offline
    assert {path.name for path in run_dir.iterdir()} == {
        "wandb",
        "metrics.jsonl",
        run_files.TRACKER_IDS,
    }
    assert not list(run_dir.rglob("wandb-metadata.json"))  # it would have the command line

    # When it is resumed with a login, killed, and resumed
    online = logged_in(wandb_server.url)
    killed = process(lambda: train(run_dir, "wandb", 8, 14, killed=True), **online)
    done = process(lambda: train(run_dir, "wandb", 8, 20), **online)
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    assert done.returncode == 0, done.stdout

    # Then the server has each point once, and no offline part is left to be sent
    assert points(wandb_server.history) == expected(20)
    samples = [row["step"] for row in wandb_server.history if "samples" in row]
    assert samples[-3:] == [12, 16, 20]
    (synced,) = run_dir.rglob("*.wandb.synced")
    assert synced.parent.name.startswith("offline-")

    # And a resumption on another machine continues the run
    ids = ids_of(run_dir)
    elsewhere = run_dir.parent.parent / "elsewhere" / "tiny"
    elsewhere.mkdir(parents=True)
    process(lambda: train(elsewhere, "wandb", 16, 24, ids=ids), **online)
    assert ids_of(elsewhere)["wandb"] == ids["wandb"]
    assert points(wandb_server.history) == expected(24)
    assert "learning_rate" in wandb_server.config
    assert "args" not in wandb_server.config
    assert_no_canary(run_dir, killed.stdout + done.stdout)


@needs("wandb")
def test_dying_wandb_server_does_not_end_the_run(run_dir, wandb_server):
    wandb_server.mortal = True

    def body() -> None:
        tracker = begin(run_dir, "wandb")
        for step in range(1, 1001):
            tracker.log(step, {"step": step, "tokens": 8 * step, "train/loss": 1.0})
        tracker.close()

    done = process(body, **logged_in(wandb_server.url), WANDB_FINISH_TIMEOUT="1")

    assert done.returncode == 0, done.stdout
    assert wandb_server.config  # it has seen the run
    assert_no_canary(run_dir, done.stdout)


@needs("wandb")
def test_wandb_without_a_server_is_switched_off(run_dir, wandb_server):
    wandb_server.server_close()

    done = process(
        lambda: train(run_dir, "wandb", 0, 4), **logged_in(wandb_server.url), WANDB_INIT_TIMEOUT="1"
    )

    assert done.returncode == 0, done.stdout
    assert done.stdout.count("logged: wandb: disabled: CommError: ") == 1
    assert_no_canary(run_dir, done.stdout)


@needs("wandb")
@pytest.mark.parametrize(("variables", "seconds"), [({}, 50), ({"WANDB_FINISH_TIMEOUT": "7"}, 7)])
def test_wandb_has_a_timeout_at_the_end(run_dir, variables, seconds):
    def body() -> None:
        import wandb

        tracker = begin(run_dir, "wandb")
        print(f"timeout {wandb.run.settings.finish_timeout:.0f}")
        tracker.close()

    assert f"timeout {seconds}\n" in process(body, **variables).stdout


@needs("wandb")
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize(
    ("variables", "is_recorded"), [({}, True), ({"WANDB_DISABLE_GIT": "true"}, False)]
)
def test_wandb_settings_decide_about_git(run_dir, tmp_path, variables, is_recorded):
    # Given a repository with a commit
    repository = tmp_path / "repository"
    repository.mkdir()
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init"], [*author, "commit", "--allow-empty", "--message", "first"]):
        subprocess.run(["git", *command], cwd=repository, capture_output=True, check=True)

    # When a run starts there
    def body() -> None:
        os.chdir(repository)
        begin(run_dir, "wandb").close()

    process(body, **variables)

    # Then wandb has the commit, unless its variable says otherwise
    _, runs = read_offline(run_dir / "wandb")
    assert bool(runs[0].git.commit) == is_recorded


@needs("wandb")
def test_wandb_gets_the_rows_missed_while_off(run_dir):
    process(lambda: train(run_dir, "wandb", 0, 6), WANDB_MODE="disabled")
    process(lambda: train(run_dir, "wandb", 6, 10))
    process(lambda: train(run_dir, "", 10, 14))  # not in report_to
    done = process(lambda: train(run_dir, "wandb", 14, 20))

    assert done.returncode == 0
    assert "disabled" not in done.stdout, done.stdout
    found, _ = read_offline(run_dir / "wandb")
    assert points(found) == expected(20)


@needs("tensorboard")
def test_tensorboard_gets_the_rows_missed_while_off(run_dir):
    process(lambda: train(run_dir, "tensorboard", 0, 6))
    process(lambda: train(run_dir, "", 6, 12))
    process(lambda: train(run_dir, "tensorboard", 12, 20))

    assert points(read_tensorboard(run_dir)) == expected(20)


@needs("wandb")
def test_wandb_takes_names_and_folder_from_the_environment(run_dir, tmp_path):
    # Given wandb's variables
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    variables = {
        "WANDB_PROJECT": "p",
        "WANDB_NAME": "n",
        "WANDB_RUN_ID": "i1",
        "WANDB_DIR": str(folder),
        "WANDB_TAGS": "x,y",
        "WANDB_RUN_GROUP": "g",
    }

    # When a recipe has the defaults
    default = {"project_name": "ursa-minor", "tags": []}
    done = process(lambda: train(run_dir, "wandb", 0, 10, **default), **variables)

    # Then the run is in that folder, with those names
    assert f"for part in {folder}/wandb/offline-*" in done.stdout
    assert "disabled" not in done.stdout, done.stdout
    assert not (run_dir / "wandb").exists()
    rows, runs = read_offline(folder / "wandb")
    assert points(rows) == expected(10)
    assert runs
    for run in runs:
        assert (run.project, run.display_name, run.run_id, run.run_group) == ("p", "n", "i1", "g")
        assert run.tags == ["x", "y"]

    # And another id is another run, which gets every row, with the names that the recipe states
    variables["WANDB_RUN_ID"] = "i2"
    stated = {"project_name": "stated", "tags": ["z"]}
    process(lambda: train(run_dir, "wandb", 10, 12, **stated), **variables)
    rows, runs = read_offline(folder / "wandb")
    assert (runs[-1].project, runs[-1].run_id, runs[-1].tags) == ("stated", "i2", ["z"])
    assert points(rows) == sorted(expected(10) + expected(12))


@pytest.mark.parametrize(("name", "variable"), trackers.PROJECT_VARIABLES.items())
@pytest.mark.parametrize(
    ("stated", "used"), [("ursa-minor", "from the environment"), ("mine", "mine")]
)
def test_project_of_the_environment_replaces_the_default(monkeypatch, name, variable, stated, used):
    recipe = loading.load_recipe(
        ROOT / "recipes" / "quickstart.yaml", {"project_name": stated, "report_to": [name]}
    )
    monkeypatch.setenv(variable, "from the environment")
    assert trackers._project(name, recipe) == used
    monkeypatch.setenv(variable, "")
    assert trackers._project(name, recipe) == stated


class StandIn:
    """Has the interface of Accelerate's trackers, and keeps its arguments."""

    requires_logging_directory = False
    tracker = SimpleNamespace(info=SimpleNamespace(run_id="r1"))  # as MLflow's

    def __init__(self, project: str, **options) -> None:
        self.project = project
        self.options = options
        self.rows = []

    def start(self) -> None: ...

    def store_init_configuration(self, values: dict) -> None: ...

    def log(self, values: dict, step: int) -> None:
        self.rows.append(values)

    def finish(self) -> None: ...


def stand_in(monkeypatch, name: str, **methods: Callable) -> list[StandIn]:
    """Replace Accelerate's class of this name, and return the trackers that are created from then on."""
    created = []

    class Tracker(StandIn):
        def __init__(self, project: str, **options) -> None:
            super().__init__(project, **options)
            created.append(self)

    for method_name, method in methods.items():
        setattr(Tracker, method_name, method)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, Tracker)
    return created


def report_two_rows(run_dir: Path, *names: str) -> None:
    opened = begin(run_dir, *names)
    for step in (1, 2):
        opened.log(step, {"step": step, "tokens": 8 * step, "train/loss": float(step)})
    opened.close()


def test_mlflow_continues_the_run_of_the_environment(tmp_path, monkeypatch):
    created = stand_in(monkeypatch, "mlflow")
    for name, value in {"EXPERIMENT_NAME": "e", "RUN_ID": "r1", "RUN_NAME": "n"}.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)

    opened = begin(tmp_path, "mlflow", project_name="ursa-minor")

    (tracker,) = created
    assert (tracker.project, tracker.options["run_id"], tracker.options["run_name"]) == (
        "e",
        "r1",
        "n",
    )
    assert opened.ids == {"mlflow": "r1"}


def test_dvclive_does_not_commit(tmp_path, monkeypatch):
    created = stand_in(monkeypatch, "dvclive")
    begin(tmp_path, "dvclive")
    assert created[0].options["save_dvc_exp"] is False


def fail(*_args, **_options) -> None:
    raise RuntimeError(f"no room for {TOKEN}\nand more")


def leave(*_args, **_options) -> None:
    sys.exit(3)


@pytest.mark.parametrize("method", ["start", "log", "finish"])
@pytest.mark.parametrize(
    ("failure", "reason"),
    [(fail, "RuntimeError: no room for redacted and more"), (leave, "SystemExit: 3")],
)
def test_failing_tracker_is_switched_off_once(
    tmp_path, monkeypatch, caplog, method, failure, reason
):
    # Given a tracker that fails, and one that does not
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    stand_in(monkeypatch, "aim", **{method: failure})
    others = stand_in(monkeypatch, "swanlab")

    # When a run reports to both
    report_two_rows(tmp_path, "aim", "swanlab")

    # Then one warning has the reason, and the other tracker has all rows
    assert caplog.messages == [
        f"aim: disabled: {reason}. The run continues, and metrics.jsonl contains all metrics"
    ]
    assert [row["train/loss"] for row in others[0].rows] == [1.0, 2.0]


def test_interrupt_by_the_user_passes_a_tracker(tmp_path, monkeypatch):
    def interrupt(*_args, **_options) -> None:
        raise KeyboardInterrupt

    stand_in(monkeypatch, "aim", log=interrupt)
    with pytest.raises(KeyboardInterrupt):
        report_two_rows(tmp_path, "aim")


def ask(*_args, **_options) -> None:
    input("API key: ")


def ask_in_a_program(*_args, **_options) -> None:
    answer = subprocess.run(["cat"], stdout=subprocess.PIPE, timeout=60).stdout
    raise RuntimeError(f"the answer was {answer}")


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (ask, "EOFError: EOF when reading a line"),
        (ask_in_a_program, "RuntimeError: the answer was b''"),
    ],
)
@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_tracker_gets_no_standard_input(run_dir, monkeypatch, question, reason, method):
    # Given a tracker that asks a question
    stand_in(monkeypatch, "aim", **{method: question})

    # When it is used at a terminal where no one answers
    def body() -> None:
        report_two_rows(run_dir, "aim")
        print(f"stdin is a terminal: {os.isatty(0)}")

    done = process(body)

    # Then it is disabled, and the process has its standard input again
    assert f"logged: aim: disabled: {reason}. The run continues" in done.stdout
    assert "stdin is a terminal: True" in done.stdout
    assert done.returncode == 0


def test_tracker_works_without_a_standard_input(tmp_path, monkeypatch, caplog):
    created = stand_in(monkeypatch, "aim")
    monkeypatch.setattr(sys, "stdin", None)  # as in a process whose descriptor 0 is closed
    monkeypatch.setattr(os, "dup", lambda _: pytest.fail("the descriptor belongs to another file"))
    report_two_rows(tmp_path, "aim")
    assert len(created[0].rows) == 2
    assert not caplog.messages


def test_tracker_does_not_replace_signal_handlers(tmp_path, monkeypatch):
    def replace(*_args, **_options) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def handler(*_args) -> None: ...

    signal.signal(signal.SIGTERM, handler)
    stand_in(monkeypatch, "clearml", start=replace)
    begin(tmp_path, "clearml")
    assert signal.getsignal(signal.SIGTERM) is handler


VARIABLES = {
    "WANDB_PROJECT",
    "WANDB_NAME",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_RUN_NAME",
    "CLEARML_PROJECT",
}
PROJECTS = {"WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "CLEARML_PROJECT"}


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ([], VARIABLES),
        (["--run_name", "a"], PROJECTS),
        (["--project_name", "a"], VARIABLES - PROJECTS),
        (
            ["--project_name", "ursa-minor"],
            VARIABLES - PROJECTS,
        ),  # stated, although it is the default
        (["--project_name", "a", "--run_name", "a"], set()),
    ],
)
def test_flag_wins_over_the_environment(monkeypatch, flags, left):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "x")
    recipe_file = str(ROOT / "recipes" / "quickstart.yaml")
    command = ["--recipe", recipe_file, "--report_to", "wandb", *flags]
    recipe, _, argv = command_line.parse_training(command)
    trackers.drop_overridden(recipe, argv)
    assert {variable for variable in VARIABLES if variable in os.environ} == left


@pytest.mark.parametrize(
    ("key", "left"), [("run_name", PROJECTS), ("project_name", VARIABLES - PROJECTS)]
)
def test_recipe_wins_over_the_environment(tmp_path, monkeypatch, key, left):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "x")
    file = tmp_path / "tiny.yaml"
    file.write_text((ROOT / "recipes" / "quickstart.yaml").read_text() + f"\n{key}: mine\n")
    recipe, _, argv = command_line.parse_training(["--recipe", str(file)])
    trackers.drop_overridden(recipe, argv)
    assert {variable for variable in VARIABLES if variable in os.environ} == left


def test_texts_are_not_sent_as_metrics(tmp_path, monkeypatch):
    created = stand_in(monkeypatch, "mlflow")
    opened = begin(tmp_path, "mlflow")
    opened.log(1, {"step": 1, "hellaswag/acc": 0.5, "hellaswag/revision": "c0ffee"})
    assert created[0].rows == [{"hellaswag/acc": 0.5}]


def test_missing_package_is_refused(monkeypatch):
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["wandb", "tensorboard"])
    trackers.check(["wandb", "tensorboard"])
    with pytest.raises(BadInput) as refused:
        trackers.check(["wandb", "trackio", "mlflow"])
    assert refused.value.lines == [
        "report_to = trackio: the package is not installed. "
        "Install it (pip install trackio==0.43.0), or remove trackio from report_to",
        "report_to = mlflow: the package is not installed. "
        "Install it (pip install mlflow), or remove mlflow from report_to",
    ]


def test_every_tracker_of_accelerate_has_a_name_here():
    assert set(keys.TRACKERS) == set(LOGGER_TYPE_TO_CLASS)
