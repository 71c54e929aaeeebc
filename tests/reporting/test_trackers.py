"""Trackers receive each row once, however often the run is killed, and never end a run.

The tests use the real packages, and fake trackers for packages that are not installed. Each process
of a run is a fork of the test process, which has imported the packages, so that it can be killed.
"""

import contextlib
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from conftest import ROOT, CompletedScript

from ursa_minor.base import run_files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import read_metrics
from ursa_minor.recipe import command_line, keys, loading
from ursa_minor.reporting import trackers

WANDB_KEY = "0canary1" * 5
HUB_TOKEN = "hf_canaryCanaryCanaryCanary"
SAMPLES = [("the ", "cat sat"), ("a *dog*", " ate\n```\n<b>")]
PROCESS_SECONDS = 240  # a tracker that waits forever fails its test after this time
Points = list[tuple[str, int, float]]


def needs(name: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if this package is not installed."""
    is_missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(is_missing, reason=f"not installed: {name}")


# Set-up: a run folder, processes of a run, and the rows that they report


@pytest.fixture(scope="module")
def imported_packages(tmp_path_factory) -> Iterator[None]:
    """Import the packages of trackers once, so that forks need not import them.

    trackio reads the folder of its database from the environment when it is imported.
    """
    os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))
    for name in (
        "accelerate.tracking",
        "pandas",
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
def run_dir(imported_packages, tmp_path, monkeypatch) -> Path:
    """Create a run folder, and a home folder without logins and settings of trackers."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "NETRC")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    # Otherwise wandb reports its own errors to its authors.
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    # These parts of wandb take seconds per process, and no test examines their results.
    monkeypatch.setenv("WANDB_X_SAVE_REQUIREMENTS", "false")
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    (tmp_path / "home").mkdir()
    run_dir = tmp_path / "runs" / "tiny"
    run_dir.mkdir(parents=True)
    return run_dir


def run_process(body: Callable[[], None], **environment: str) -> CompletedScript:
    """Call ``body`` in a process at a terminal. Return its status and output."""
    own_end, terminal = pty.openpty()
    pid = os.fork()
    if pid == 0:
        call_in_child(body, terminal, environment)
    os.close(terminal)
    output = b""
    with contextlib.suppress(OSError):  # a terminal ends with an error
        while data := os.read(own_end, 65536):
            output += data
    os.close(own_end)
    _, status = os.waitpid(pid, 0)
    text = output.decode().replace("\r\n", "\n")
    return CompletedScript(os.waitstatus_to_exitcode(status), text, "")


def call_in_child(body: Callable[[], None], terminal: int, environment: dict[str, str]) -> None:
    """Call ``body`` with the standard streams at a terminal, and end this process."""
    code = 70
    try:
        signal.alarm(PROCESS_SECONDS)
        os.environ.update(environment)
        for number in (0, 1, 2):
            os.dup2(terminal, number)
        sys.stdin = open(0)
        sys.stdout = open(1, "w", buffering=1)
        sys.stderr = open(2, "w", buffering=1)
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("logged: %(message)s"))
        logging.getLogger("ursa_minor").handlers = [handler]
        PartialState(cpu=True)
        body()
        if "wandb" in sys.modules:
            # A normal exit does this. wandb writes an offline run only then, not in finish().
            sys.modules["wandb"].teardown()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def project_name(run_dir: Path) -> str:
    """Return a project name that no other test uses."""
    return run_dir.parent.parent.name


def start_trackers(
    run_dir: Path,
    *names: str,
    first_step: int = 0,
    rows: Iterable[dict] = (),
    sent_rows: Iterable[dict] = (),
    ids: dict[str, str] | None = None,
    **recipe_changes,
) -> trackers.Trackers:
    """Start trackers as the trainer does.

    Args:
        run_dir: the run folder.
        names: the trackers in ``report_to``.
        first_step: the step at which the run starts.
        rows: the rows of metrics.jsonl before this step.
        sent_rows: all rows that earlier processes have written.
        ids: the ids of the checkpoint.
        recipe_changes: other keys of the recipe.
    """
    recipe = loading.load_recipe(ROOT / "recipes" / "own_text.yaml", {"data_files": ["x"]})
    values = {
        "output_dir": str(run_dir),
        "run_name": "tiny",
        "report_to": list(names),
        "project_name": project_name(run_dir),
        "tags": ["a", "b"],
    }
    recipe = keys.replace(recipe, **values | recipe_changes)
    position = -1
    for row in sent_rows:
        position = trackers.position_after(position, row["step"])
    return trackers.Trackers(recipe, first_step, ids=ids or {}, rows=rows, sent=position)


OFFSETS = {"train/loss": 0.25, "train/lr": 0.5, "eval/loss": 0.75}


def point(key: str, step: int) -> float:
    """Return the value of a metric at a step, which no other metric or step has."""
    return step + OFFSETS[key]


def expected_points(last: int) -> Points:
    """Return the points of a run that was never killed."""
    points = []
    for step in range(1, last + 1):
        points.append(("train/loss", step, point("train/loss", step)))
        points.append(("train/lr", step, point("train/lr", step)))
    for step in range(0, last + 1, 4):
        points.append(("eval/loss", step, point("eval/loss", step)))
    return sorted(points)


def points_of(rows: Iterable[dict]) -> Points:
    """Return the points in rows of a tracker."""
    points = []
    for row in rows:
        metrics = [key for key in row if "/" in key and "samples" not in key]
        points += [(key, row["step"], row[key]) for key in metrics]
    return sorted(points)


def steps_with(rows: Iterable[dict], key: str) -> list[int]:
    """Return the steps of the rows that have this key."""
    return [row["step"] for row in rows if key in row]


def metrics_row(step: int, *metrics: str) -> dict:
    """Return a row of metrics.jsonl."""
    row = {"step": step, "tokens": 8 * step, "mfu": None}
    for key in metrics:
        row[key] = point(key, step)
    return row


def train(
    run_dir: Path,
    name: str | None,
    first: int,
    last: int,
    *,
    killed: bool = False,
    ids: dict[str, str] | None = None,
    **recipe_changes,
) -> None:
    """Write metrics.jsonl and report to a tracker, as a run that starts from a checkpoint.

    Args:
        run_dir: the run folder.
        name: the tracker in ``report_to``, or None for no tracker.
        first: the step of the checkpoint.
        last: the last step.
        killed: whether the process is killed at the end, before the tracker has sent the rows.
        ids: the ids of trackers in the checkpoint.
        recipe_changes: other keys of the recipe.
    """
    path = run_dir / "metrics.jsonl"
    sent_rows = read_metrics(path)
    rows = []
    for row in sent_rows:
        # The evaluation at the step of the checkpoint is repeated.
        if row["step"] < first or (row["step"] == first and "train/loss" in row):
            rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = [name] if name else []
    tracker = start_trackers(
        run_dir,
        *names,
        first_step=first,
        rows=rows,
        sent_rows=sent_rows,
        ids=ids,
        **recipe_changes,
    )

    def report(row: dict) -> None:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
        tracker.log(row["step"], row)

    for step in range(first, last + 1):
        if step % 4 == 0:
            report(metrics_row(step, "eval/loss"))
            tracker.log(step, {"samples": SAMPLES})
        if step < last:
            report(metrics_row(step + 1, "train/loss", "train/lr"))
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    tracker.close()


def train_in_process(
    run_dir: Path,
    name: str | None,
    first: int,
    last: int,
    *,
    environment: dict[str, str] | None = None,
    killed: bool = False,
    **options,
) -> str:
    """Call ``train`` in a process, check its status and return its output."""
    process = run_process(
        lambda: train(run_dir, name, first, last, killed=killed, **options),
        **environment or {},
    )
    expected_status = -signal.SIGKILL if killed else 0
    assert process.returncode == expected_status, process.stdout
    return process.stdout


def kill_and_resume(run_dir: Path, name: str) -> str:
    """Run to step 20 with two resumptions at step 8. Return the output of all three processes.

    The first process is killed before its last rows are sent, and the second one ends at step 14.
    """
    output = train_in_process(run_dir, name, 0, 10, killed=True)
    output += train_in_process(run_dir, name, 8, 14)
    output += train_in_process(run_dir, name, 8, 20)
    assert "disabled" not in output
    return output


def assert_only_killed_points_are_missing(points: Points) -> None:
    """Assert that no point occurs twice, and that only the process killed at step 10 lost any."""
    expected = expected_points(20)
    assert len(set(points)) == len(points)
    assert set(points) <= set(expected)
    assert {point for point in expected if point[1] > 10} <= set(points)


def read_ids(run_dir: Path) -> dict[str, str]:
    """Return the contents of trackers.json."""
    return json.loads((run_dir / run_files.TRACKER_IDS).read_text())


def assert_no_secrets(folder: Path, output: str) -> None:
    """Assert that the key and the token are in no file of a folder and not in the output."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert paths
    for secret in (WANDB_KEY, HUB_TOKEN):
        assert secret not in output
        for path in paths:
            assert secret.encode() not in path.read_bytes()


# TensorBoard and trackio


def read_tensorboard(run_dir: Path) -> list[dict]:
    """Return each point and text with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    rows = []
    for tag in events.Tags()["tensors"]:
        for event in events.Tensors(tag):
            rows.append({"step": event.step, tag: make_ndarray(event.tensor_proto).item()})
    return rows


@needs("tensorboard")
def test_tensorboard_points_survive_a_kill(run_dir):
    train_in_process(run_dir, "tensorboard", 0, 10, killed=True)

    assert points_of(read_tensorboard(run_dir)) == expected_points(10)


@needs("tensorboard")
def test_tensorboard_has_each_point_once_after_kills(run_dir):
    kill_and_resume(run_dir, "tensorboard")

    rows = read_tensorboard(run_dir)
    assert points_of(rows) == expected_points(20)
    assert steps_with(rows, "samples/text_summary") == [0, 4, 8, 12, 16, 20]
    sample = next(row for row in rows if "samples/text_summary" in row)
    assert b">the cat sat</pre>" in sample["samples/text_summary"]
    # A folder for hyperparameters would be a second run in TensorBoard.
    folders = {path.parent for path in run_dir.rglob("events.*")}
    assert folders == {run_dir / "tensorboard"}


@needs("tensorboard")
def test_tensorboard_receives_rows_missed_while_off(run_dir):
    train_in_process(run_dir, "tensorboard", 0, 6)
    train_in_process(run_dir, None, 6, 12)
    train_in_process(run_dir, "tensorboard", 12, 20)

    assert points_of(read_tensorboard(run_dir)) == expected_points(20)


@pytest.mark.newest
@needs("trackio")
def test_trackio_lacks_only_killed_points(run_dir):
    from trackio.sqlite_storage import SQLiteStorage

    output = kill_and_resume(run_dir, "trackio")

    rows = SQLiteStorage.get_logs(project_name(run_dir), run=read_ids(run_dir)["trackio"])
    assert_only_killed_points_are_missing(points_of(rows))
    assert steps_with(rows, "samples")[-3:] == [12, 16, 20]
    assert "* " not in output  # trackio's own messages


# wandb


class WandbServer(http.server.ThreadingHTTPServer):
    """The part of wandb's server that its client needs for a run.

    Attributes:
        history: the rows of the run.
        summary: the newest value of each metric.
        config: the configuration as JSON, or None before the first run.
        dies_after_start: whether the server closes all connections after the start of a run.
    """

    daemon_threads = True

    def __init__(self):
        self.history = []
        self.summary = {}
        self.config = None
        self.dies_after_start = False
        super().__init__(("127.0.0.1", 0), WandbHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_) -> None:
        """Print nothing about clients that are killed."""

    def store(self, name: str, offset: int, lines: list[str]) -> None:
        """Store lines of a file at their offset."""
        if name == "wandb-history.jsonl":
            self.history[offset : offset + len(lines)] = map(json.loads, lines)
        elif name == "wandb-summary.json":
            self.summary = json.loads(lines[-1])

    def answer(self, operation: str, variables: dict) -> dict:
        """Return the data of a GraphQL operation."""
        if operation == "UpsertBucket":
            return self.create_or_update(variables)
        if operation == "RunResumeStatus" and self.config is not None:
            return self.resume_status(variables)
        if operation == "CreateRunFiles":
            files = []
            for name in variables["files"]:
                files.append({"name": name, "uploadUrl": f"{self.url}/{name}"})
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        return {}

    def describe_run(self, variables: dict) -> dict:
        """Return the fields that every description of the run has."""
        name = variables.get("name")
        return {"id": "1", "name": name, "displayName": "tiny", "config": self.config or "{}"}

    def create_or_update(self, variables: dict) -> dict:
        """Create the run, or update its configuration."""
        run = self.describe_run(variables)
        self.config = variables.get("config") or self.config
        entity = {"id": "3", "name": "me"}
        project = {"id": "2", "name": variables["project"], "entity": entity}
        bucket = run | {"project": project}
        return {"upsertBucket": {"bucket": bucket, "inserted": not self.history}}

    def resume_status(self, variables: dict) -> dict:
        """Return the state from which the client resumes the run."""
        last_rows = [json.dumps(row) for row in self.history[-1:]]
        run = self.describe_run(variables) | {
            "logLineCount": 0,
            "historyLineCount": len(self.history),
            "eventsLineCount": 0,
            "historyTail": json.dumps(last_rows),
            "eventsTail": "[]",
            "summaryMetrics": json.dumps(self.summary),
            "tags": [],
            "wandbConfig": '{"t": 1}',
        }
        return {"model": {"id": "2", "bucket": run}}


class WandbHandler(http.server.BaseHTTPRequestHandler):
    """Answer the requests of wandb's client."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        """Answer a GraphQL request, or store lines of files."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.dies_after_start and self.server.config:
            self.close_connection = True
            return
        request = {}
        answer = {}
        if self.command == "POST":
            request = json.loads(body)
        if "query" in request:
            operation = re.search(r"(query|mutation)\s+(\w+)", request["query"])[2]
            answer["data"] = self.server.answer(operation, request.get("variables") or {})
        for name, lines in request.get("files", {}).items():
            self.server.store(name, lines["offset"], lines["content"])
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_PUT = do_POST


@pytest.fixture
def wandb_server() -> Iterator[WandbServer]:
    """Start a local server for wandb."""
    with WandbServer() as server:
        options = {"poll_interval": 0.02}
        threading.Thread(target=server.serve_forever, kwargs=options, daemon=True).start()
        yield server
        server.shutdown()


def login(server: WandbServer) -> dict[str, str]:
    """Return the environment variables of a process that is logged in to this server."""
    return {"WANDB_API_KEY": WANDB_KEY, "WANDB_BASE_URL": server.url, "HF_TOKEN": HUB_TOKEN}


LOG_BLOCK_SIZE = 32768
LOG_HEADER_SIZE = 7  # checksum (4), length (2), kind (1)


def read_log_records(data: bytes) -> list[bytes]:
    """Return the records of a file in the format of LevelDB's log.

    The file has blocks of 32 KiB. They contain records, or pieces of records that continue in the
    next block. The end of a block is padding if a header does not fit.
    """
    records = []
    record = b""
    position = 7  # wandb's own header
    while position + LOG_HEADER_SIZE <= len(data):
        remaining = LOG_BLOCK_SIZE - position % LOG_BLOCK_SIZE
        if remaining < LOG_HEADER_SIZE:
            position += remaining
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        position += LOG_HEADER_SIZE
        record += data[position : position + length]
        position += length
        is_last_piece = kind in (1, 4)  # 1 is a complete record
        if is_last_piece:
            records.append(record)
            record = b""
    return records


def read_offline_runs(folder: Path) -> tuple[list[dict], list]:
    """Return the rows and the descriptions of the runs that wandb wrote offline into a folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    runs = []
    for path in sorted(folder.glob("offline-*/run-*.wandb")):
        for data in read_log_records(path.read_bytes()):
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                runs.append(record.run)
            elif kind == "history":
                row = {}
                for item in record.history.item:
                    row[item.key or item.nested_key[0]] = json.loads(item.value_json)
                rows.append(row)
    return rows, runs


@pytest.mark.slow
@needs("wandb")
def test_wandb_sync_uploads_offline_points_once(run_dir, wandb_server):
    run_dir = run_dir / "a b"  # the command must quote this name
    run_dir.mkdir()
    output = kill_and_resume(run_dir, "wandb")
    assert output.count("logged: wandb: offline") == 3  # once per process

    command = re.search(r"for part in .* done", output)[0]
    command = command.replace("wandb sync", f"{sys.executable} -m wandb sync")
    subprocess.run(
        ["sh", "-c", command],
        cwd=run_dir,
        env=os.environ | login(wandb_server),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )

    assert_only_killed_points_are_missing(points_of(wandb_server.history))
    for row in wandb_server.history:
        if "eval/loss" in row:
            assert row["tokens"] == 8 * row["step"]


@needs("wandb")
def test_wandb_without_login_is_offline(run_dir):
    output = train_in_process(run_dir, "wandb", 0, 2)

    assert output.startswith("logged: wandb: offline, because there is no login (wandb login)")
    assert "WANDB_MODE" not in output
    assert output.count("\n") == 1  # wandb asks no question
    assert f'for part in {run_dir}/wandb/offline-*; do wandb sync "$part"; done' in output
    names = {path.name for path in run_dir.iterdir()}
    assert names == {"wandb", "metrics.jsonl", run_files.TRACKER_IDS}
    # This file would contain the command line.
    assert not list(run_dir.rglob("wandb-metadata.json"))


@needs("wandb")
def test_wandb_has_each_point_once_after_kill(run_dir, wandb_server):
    online = login(wandb_server)
    train_in_process(run_dir, "wandb", 0, 10)  # without a login

    output = train_in_process(run_dir, "wandb", 8, 14, killed=True, environment=online)
    output += train_in_process(run_dir, "wandb", 8, 20, environment=online)

    assert points_of(wandb_server.history) == expected_points(20)
    assert steps_with(wandb_server.history, "samples")[-3:] == [12, 16, 20]
    (synced,) = run_dir.rglob("*.wandb.synced")  # `wandb sync` would upload these rows again
    assert synced.parent.name.startswith("offline-")
    assert "learning_rate" in wandb_server.config
    assert "args" not in wandb_server.config
    assert_no_secrets(run_dir, output)


@needs("wandb")
def test_wandb_run_continues_on_other_machine(run_dir, wandb_server):
    online = login(wandb_server)
    train_in_process(run_dir, "wandb", 0, 10, environment=online)
    ids = read_ids(run_dir)
    other_run_dir = run_dir.parent.parent / "elsewhere" / "tiny"
    other_run_dir.mkdir(parents=True)

    train_in_process(other_run_dir, "wandb", 8, 14, ids=ids, environment=online)

    assert read_ids(other_run_dir)["wandb"] == ids["wandb"]
    assert points_of(wandb_server.history) == expected_points(14)


@needs("wandb")
def test_dying_wandb_server_does_not_end_run(run_dir, wandb_server):
    wandb_server.dies_after_start = True

    def report_hundred_rows() -> None:
        tracker = start_trackers(run_dir, "wandb")
        for step in range(1, 101):
            tracker.log(step, {"step": step, "tokens": 8 * step, "train/loss": 1.0})
        tracker.close()

    environment = login(wandb_server) | {"WANDB_FINISH_TIMEOUT": "0.2"}
    process = run_process(report_hundred_rows, **environment)

    assert process.returncode == 0, process.stdout
    assert wandb_server.config  # the run has started
    assert_no_secrets(run_dir, process.stdout)


@needs("wandb")
def test_wandb_without_server_is_disabled(run_dir, wandb_server):
    wandb_server.server_close()

    environment = login(wandb_server) | {"WANDB_INIT_TIMEOUT": "0.2"}
    output = train_in_process(run_dir, "wandb", 0, 4, environment=environment)

    assert output.count("logged: wandb: disabled: CommError: ") == 1
    assert_no_secrets(run_dir, output)


@needs("wandb")
@pytest.mark.parametrize(
    ("variables", "seconds"),
    [({}, 50), ({"WANDB_FINISH_TIMEOUT": "7"}, 7)],
    ids=["default", "variable"],
)
def test_wandb_has_finish_timeout(run_dir, variables, seconds):
    def print_timeout() -> None:
        import wandb

        tracker = start_trackers(run_dir, "wandb")
        print(f"timeout {wandb.run.settings.finish_timeout:.0f}")
        tracker.close()

    process = run_process(print_timeout, **variables)

    assert f"timeout {seconds}\n" in process.stdout


@pytest.fixture
def git_repository(tmp_path) -> Path:
    """Create a git repository with a commit."""
    repository = tmp_path / "repository"
    repository.mkdir()
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    commit = [*author, "commit", "--allow-empty", "--message", "first"]
    for command in (["init"], commit):
        subprocess.run(["git", *command], cwd=repository, capture_output=True, check=True)
    return repository


@needs("wandb")
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize(
    ("variables", "is_recorded"),
    [({}, True), ({"WANDB_DISABLE_GIT": "true"}, False)],
    ids=["default", "disabled"],
)
def test_wandb_records_commit_unless_disabled(run_dir, git_repository, variables, is_recorded):
    def start_in_repository() -> None:
        os.chdir(git_repository)
        start_trackers(run_dir, "wandb").close()

    run_process(start_in_repository, **variables)

    _, runs = read_offline_runs(run_dir / "wandb")
    assert bool(runs[0].git.commit) == is_recorded


@needs("wandb")
def test_wandb_receives_rows_missed_while_off(run_dir):
    train_in_process(run_dir, "wandb", 0, 6, environment={"WANDB_MODE": "disabled"})
    output = train_in_process(run_dir, "wandb", 6, 10)
    train_in_process(run_dir, None, 10, 14)
    output += train_in_process(run_dir, "wandb", 14, 20)

    assert "disabled" not in output
    rows, _ = read_offline_runs(run_dir / "wandb")
    assert points_of(rows) == expected_points(20)


@needs("wandb")
def test_wandb_variables_replace_defaults(run_dir, tmp_path):
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
    defaults = {"project_name": "ursa-minor", "tags": []}

    output = train_in_process(run_dir, "wandb", 0, 10, environment=variables, **defaults)

    assert f"for part in {folder}/wandb/offline-*" in output
    assert "disabled" not in output
    assert not (run_dir / "wandb").exists()
    rows, runs = read_offline_runs(folder / "wandb")
    assert points_of(rows) == expected_points(10)
    assert runs
    for run in runs:
        assert run.project == "p"
        assert run.display_name == "n"
        assert run.run_id == "i1"
        assert run.run_group == "g"
        assert run.tags == ["x", "y"]


@needs("wandb")
def test_other_wandb_id_receives_all_rows(run_dir):
    train_in_process(run_dir, "wandb", 0, 10, environment={"WANDB_RUN_ID": "i1"})
    # Names in the recipe have priority over variables.
    other_run = {"WANDB_RUN_ID": "i2", "WANDB_PROJECT": "p", "WANDB_TAGS": "x,y"}
    names = {"project_name": "stated", "tags": ["z"]}

    train_in_process(run_dir, "wandb", 10, 12, environment=other_run, **names)

    rows, runs = read_offline_runs(run_dir / "wandb")
    assert points_of(rows) == sorted(expected_points(10) + expected_points(12))
    assert runs[-1].run_id == "i2"
    assert runs[-1].project == "stated"
    assert runs[-1].tags == ["z"]


# Other trackers, which are replaced by a fake


class FakeTracker:
    """A tracker with the interface of Accelerate's trackers that stores its arguments."""

    requires_logging_directory = False
    tracker = SimpleNamespace(info=SimpleNamespace(run_id="r1"))  # as in MLflow's tracker

    def __init__(self, project: str, **options) -> None:
        self.project = project
        self.options = options
        self.rows = []

    def start(self) -> None: ...

    def store_init_configuration(self, values: dict) -> None: ...

    def log(self, values: dict, step: int) -> None:
        self.rows.append(values)

    def finish(self) -> None: ...


def replace_tracker(monkeypatch, name: str, **methods: Callable) -> list[FakeTracker]:
    """Replace Accelerate's tracker of this name.

    Args:
        monkeypatch: pytest's fixture.
        name: the name of the tracker in ``report_to``.
        methods: methods that replace those of ``FakeTracker``.

    Returns:
        A list to which each new tracker is appended.
    """
    created = []

    class Tracker(FakeTracker):
        def __init__(self, project: str, **options) -> None:
            super().__init__(project, **options)
            created.append(self)

    for method_name, method in methods.items():
        setattr(Tracker, method_name, method)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, Tracker)
    return created


def report_two_rows(run_dir: Path, *names: str) -> None:
    """Start trackers, report the steps 1 and 2 and close the trackers."""
    opened = start_trackers(run_dir, *names)
    for step in (1, 2):
        opened.log(step, {"step": step, "tokens": 8 * step, "train/loss": float(step)})
    opened.close()


def test_mlflow_continues_run_of_environment(tmp_path, monkeypatch):
    created = replace_tracker(monkeypatch, "mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "e")
    monkeypatch.setenv("MLFLOW_RUN_ID", "r1")
    monkeypatch.setenv("MLFLOW_RUN_NAME", "n")

    opened = start_trackers(tmp_path, "mlflow", project_name="ursa-minor")

    assert created[0].project == "e"
    assert created[0].options["run_id"] == "r1"
    assert created[0].options["run_name"] == "n"
    assert opened.ids == {"mlflow": "r1"}


def test_dvclive_does_not_commit(tmp_path, monkeypatch):
    created = replace_tracker(monkeypatch, "dvclive")

    start_trackers(tmp_path, "dvclive")

    assert created[0].options["save_dvc_exp"] is False


def test_texts_are_not_sent_as_metrics(tmp_path, monkeypatch):
    created = replace_tracker(monkeypatch, "mlflow")
    opened = start_trackers(tmp_path, "mlflow")

    opened.log(1, {"step": 1, "hellaswag/acc": 0.5, "hellaswag/revision": "c0ffee"})

    assert created[0].rows == [{"hellaswag/acc": 0.5}]


def raise_error(*_args, **_options) -> None:
    raise RuntimeError(f"no space for {HUB_TOKEN}\nand more")


def exit_process(*_args, **_options) -> None:
    sys.exit(3)


@pytest.mark.parametrize("method", ["start", "log", "finish"])
@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (raise_error, "RuntimeError: no space for redacted and more"),
        (exit_process, "SystemExit: 3"),
    ],
    ids=["error", "exit"],
)
def test_failing_tracker_is_disabled(tmp_path, monkeypatch, caplog, method, failure, reason):
    monkeypatch.setenv("HF_TOKEN", HUB_TOKEN)
    replace_tracker(monkeypatch, "aim", **{method: failure})
    others = replace_tracker(monkeypatch, "swanlab")

    report_two_rows(tmp_path, "aim", "swanlab")

    (message,) = caplog.messages
    assert f"aim: disabled: {reason}. " in message
    assert "metrics.jsonl" in message
    assert [row["train/loss"] for row in others[0].rows] == [1.0, 2.0]


def test_keyboard_interrupt_is_not_caught(tmp_path, monkeypatch):
    def interrupt(*_args, **_options) -> None:
        raise KeyboardInterrupt

    replace_tracker(monkeypatch, "aim", log=interrupt)

    with pytest.raises(KeyboardInterrupt):
        report_two_rows(tmp_path, "aim")


def ask_question(*_args, **_options) -> None:
    input("API key: ")


def ask_question_in_subprocess(*_args, **_options) -> None:
    answer = subprocess.run(["cat"], stdout=subprocess.PIPE, timeout=60).stdout
    raise RuntimeError(f"the answer was {answer}")


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (ask_question, "EOFError: EOF when reading a line"),
        (ask_question_in_subprocess, "RuntimeError: the answer was b''"),
    ],
    ids=["input", "subprocess"],
)
@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_tracker_has_no_standard_input(tmp_path, monkeypatch, question, reason, method):
    replace_tracker(monkeypatch, "aim", **{method: question})

    def report_and_check_stdin() -> None:
        report_two_rows(tmp_path, "aim")
        print(f"stdin is a terminal: {os.isatty(0)}")

    process = run_process(report_and_check_stdin)

    assert f"logged: aim: disabled: {reason}. " in process.stdout
    assert "stdin is a terminal: True" in process.stdout
    assert process.returncode == 0


def test_tracker_works_without_standard_input(tmp_path, monkeypatch, caplog):
    created = replace_tracker(monkeypatch, "aim")
    # In a process whose descriptor 0 is closed, this descriptor may belong to another file.
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(os, "dup", lambda _: pytest.fail("the descriptor must not be replaced"))

    report_two_rows(tmp_path, "aim")

    assert len(created[0].rows) == 2
    assert not caplog.messages


def test_signal_handlers_are_restored(tmp_path, monkeypatch):
    def replace_handler(*_args, **_options) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def handler(*_args) -> None: ...

    signal.signal(signal.SIGTERM, handler)
    replace_tracker(monkeypatch, "clearml", start=replace_handler)

    start_trackers(tmp_path, "clearml")

    assert signal.getsignal(signal.SIGTERM) is handler


# Names, variables of the environment and installed packages


@pytest.mark.parametrize(("name", "variable"), trackers.PROJECT_VARIABLES.items())
@pytest.mark.parametrize(
    ("project", "expected"), [("ursa-minor", "from the environment"), ("mine", "mine")]
)
def test_variable_replaces_default_project(monkeypatch, name, variable, project, expected):
    values = {"project_name": project, "report_to": [name]}
    recipe = loading.load_recipe(ROOT / "recipes" / "quickstart.yaml", values)

    monkeypatch.setenv(variable, "from the environment")
    assert trackers._project(name, recipe) == expected
    monkeypatch.setenv(variable, "")
    assert trackers._project(name, recipe) == project


PROJECT_VARIABLES = {"WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "CLEARML_PROJECT"}
NAME_VARIABLES = {"WANDB_NAME", "MLFLOW_RUN_NAME"}
VARIABLES = PROJECT_VARIABLES | NAME_VARIABLES


@pytest.fixture
def set_variables(monkeypatch) -> None:
    """Set all variables that replace the names of a run."""
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "x")


def variables_left() -> set[str]:
    """Return the variables that are still in the environment."""
    return VARIABLES & set(os.environ)


@pytest.mark.usefixtures("set_variables")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], VARIABLES),
        (["--run_name", "a"], PROJECT_VARIABLES),
        (["--project_name", "a"], NAME_VARIABLES),
        (["--project_name", "ursa-minor"], NAME_VARIABLES),
        (["--project_name", "a", "--run_name", "a"], set()),
    ],
    ids=["no flag", "run_name", "project_name", "default project_name", "both"],
)
def test_flag_has_priority_over_environment(flags, expected):
    recipe_file = str(ROOT / "recipes" / "quickstart.yaml")
    command = ["--recipe", recipe_file, "--report_to", "wandb", *flags]
    recipe, _, argv = command_line.parse_training(command)

    trackers.drop_overridden(recipe, argv)

    assert variables_left() == expected


@pytest.mark.usefixtures("set_variables")
@pytest.mark.parametrize(
    ("key", "expected"), [("run_name", PROJECT_VARIABLES), ("project_name", NAME_VARIABLES)]
)
def test_recipe_has_priority_over_environment(tmp_path, key, expected):
    path = tmp_path / "tiny.yaml"
    path.write_text((ROOT / "recipes" / "quickstart.yaml").read_text() + f"\n{key}: mine\n")
    recipe, _, argv = command_line.parse_training(["--recipe", str(path)])

    trackers.drop_overridden(recipe, argv)

    assert variables_left() == expected


def test_missing_packages_are_reported(monkeypatch):
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["wandb", "tensorboard"])
    trackers.check(["wandb", "tensorboard"])

    with pytest.raises(BadInput) as caught:
        trackers.check(["wandb", "trackio", "mlflow"])

    about_trackio, about_mlflow = caught.value.lines
    assert "report_to = trackio" in about_trackio
    assert "pip install trackio==" in about_trackio
    assert "report_to = mlflow" in about_mlflow
    assert "pip install mlflow)" in about_mlflow


def test_all_trackers_of_accelerate_are_known():
    assert set(keys.TRACKERS) == set(LOGGER_TYPE_TO_CLASS)
