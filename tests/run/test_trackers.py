"""A curve has each point once however often the run was killed, and no tracker ends a run or holds it up.

Real packages; each process of a run is a fork (of this one, which has imported them), so that it can be killed.
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
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from conftest import ROOT, Done

from pretrain.base.errors import BadInput
from pretrain.base.layout import read_metrics
from pretrain.recipe import keys, reading
from pretrain.run import trackers

KEY, TOKEN = "0canary1" * 5, "hf_canaryCanaryCanaryCanary"
SAMPLES = [("the ", "cat sat"), ("a *dog*", " ate\n```\n<b>")]


def needs(*names: str):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """What every fork would import for itself, once; trackio keeps its database where this says at its import."""
    os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))
    for name in ("accelerate.tracking", "requests", "wandb.sdk.launch", "torch.utils.tensorboard", "trackio"):
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


def process(body, **environment: str) -> Done:
    """Call ``body`` in a process of its own, at a terminal, and return how it ended and everything it printed."""
    from accelerate import PartialState

    ours, theirs = pty.openpty()
    pid = os.fork()
    if not pid:
        code = 70
        try:
            os.environ.update(environment)
            for number in (0, 1, 2):
                os.dup2(theirs, number)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", 1), open(2, "w", 1)
            handler = logging.StreamHandler(sys.stdout)
            handler.setFormatter(logging.Formatter("logged: %(message)s"))
            logging.getLogger("pretrain").handlers = [handler]
            PartialState(cpu=True)
            body()
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
    return Done(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.decode().replace("\r\n", "\n"), "")


def begin(run_dir: Path, *names: str, first=0, rows=(), had=(), ids=None, **stated) -> trackers.Trackers:
    """Begin trackers as the trainer does; ``stated``: other keys of the recipe."""
    project = run_dir.parent.parent.name  # of this test alone
    recipe = reading.load_recipe(ROOT / "recipes" / "own_text.yaml", {"data_files": ["x"]})
    tracking = {"report_to": [name for name in names if name], "project_name": project, "tags": ["a", "b"]}
    recipe = keys.replace(recipe, output_dir=str(run_dir), run_name="tiny", **tracking | stated)
    sent = functools.reduce(lambda place, row: trackers.place_after(place, row["step"]), had, -1)
    return trackers.Trackers(recipe, first, ids=ids or {}, rows=rows, sent=sent)


def point(key: str, step: int) -> float:
    return step + {"train/loss": 0.25, "train/lr": 0.5, "eval/loss": 0.75}[key]


def train(run_dir: Path, name: str, first: int, last: int, *, killed: bool = False, ids=None, **stated) -> None:
    """Do as a run from a checkpoint at ``first``: metrics.jsonl, then the tracker; killed: before anything is sent."""
    path = run_dir / "metrics.jsonl"
    sent = read_metrics(path)
    done = [row for row in sent if row["step"] < first + ("train/loss" in row)]
    path.write_text("".join(json.dumps(row) + "\n" for row in done))
    tracker = begin(run_dir, name, first=first, rows=done, had=sent, ids=ids, **stated)
    with open(path, "a") as out:

        def report(step: int, *keys: str) -> None:
            row = {"step": step, "tokens": 8 * step, "mfu": None} | {key: point(key, step) for key in keys}
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
    return sorted((key, row["step"], row[key]) for row in rows for key in row if "/" in key and "samples" not in key)


def read_tensorboard(run_dir: Path) -> list[dict]:
    """Return every point and text as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    tags = found.Tags()["tensors"]
    return [{"step": e.step, tag: make_ndarray(e.tensor_proto).item()} for tag in tags for e in found.Tensors(tag)]


def read_trackio(run_dir: Path) -> list[dict]:
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs(run_dir.parent.parent.name, run=ids_of(run_dir)["trackio"])


def ids_of(run_dir: Path) -> dict[str, str]:
    return json.loads((run_dir / trackers.IDS).read_text())


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
        run = {"id": "1", "name": asked.get("name"), "displayName": "tiny", "config": self.config or "{}"}
        if operation == "UpsertBucket":
            self.config = asked.get("config") or self.config
            project = {"id": "2", "name": asked["project"], "entity": {"id": "3", "name": "me"}}
            return {"upsertBucket": {"bucket": run | {"project": project}, "inserted": not self.history}}
        if operation == "RunResumeStatus" and self.config is not None:
            tail = json.dumps([json.dumps(row) for row in self.history[-1:]])
            counts = {"logLineCount": 0, "historyLineCount": len(self.history), "eventsLineCount": 0}
            run |= counts | {"historyTail": tail, "eventsTail": "[]", "summaryMetrics": json.dumps(self.summary)}
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
                    row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                    rows.append(row)
                elif record.WhichOneof("record_type") == "run":
                    runs.append(record.run)
    return rows, runs


def assert_no_canary(folder: Path, said: str = "") -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for canary in (KEY, TOKEN):
        assert canary not in said
        assert not [path for path in files if canary.encode() in path.read_bytes()]


def assert_only_killed_points_lack(found: list[tuple[str, int, float]]) -> None:
    """Assert that no point is there twice, and that only those of the first process, killed at step 10, may lack."""
    assert len({*found}) == len(found) and {*found} <= {*expected(20)}
    assert {point for point in expected(20) if point[1] > 10} <= {*found}


def kill_and_resume(run_dir: Path, name: str, **environment: str) -> str:
    """Twice from the checkpoint at 8: after a kill that lost what was not yet sent, and after one that lost nothing."""
    first = process(lambda: train(run_dir, name, 0, 10, killed=True), **environment)
    assert first.returncode == -signal.SIGKILL, first.stdout
    second = process(lambda: train(run_dir, name, 8, 14), **environment)
    third = process(lambda: train(run_dir, name, 8, 20), **environment)
    assert (second.returncode, third.returncode) == (0, 0), second.stdout + third.stdout
    assert "switched off" not in first.stdout + second.stdout + third.stdout
    return first.stdout + second.stdout + third.stdout


@needs("tensorboard")
def test_tensorboard_has_one_curve_and_every_point_on_disk_when_killed(run_dir):
    process(lambda: train(run_dir, "tensorboard", 0, 10, killed=True))
    assert points(read_tensorboard(run_dir)) == expected(10)
    kill_and_resume(run_dir, "tensorboard")
    assert points(read_tensorboard(run_dir)) == expected(20)
    (run,) = {path.parent for path in run_dir.rglob("events.*")}  # no second run beside it for hyperparameters
    assert run == run_dir / "tensorboard"
    texts = [(row["step"], row["samples/text_summary"]) for row in read_tensorboard(run_dir) if "samples" in [*row][1]]
    assert [step for step, _ in texts] == [0, 4, 8, 12, 16, 20] and b">the cat sat</pre>" in texts[0][1]


@needs("trackio")
def test_trackio_has_no_point_twice_and_lacks_only_what_was_killed_unsent(run_dir):
    assert "* " not in kill_and_resume(run_dir, "trackio")
    rows = read_trackio(run_dir)
    assert_only_killed_points_lack(points(rows))
    assert [row["step"] for row in rows if "samples" in row][-3:] == [12, 16, 20]


@pytest.mark.slow
@needs("wandb")
def test_wandb_offline_has_no_point_twice_after_the_sync_that_it_names(run_dir, wandb_server):
    run_dir = run_dir / "a b"
    run_dir.mkdir()
    said = kill_and_resume(run_dir, "wandb")
    assert said.count("logged: wandb: offline") == 3  # once a process
    command = re.search(r"for part .* done", said)[0].replace("wandb sync", f"{sys.executable} -m wandb sync")
    how = {"cwd": run_dir, "env": os.environ | logged_in(wandb_server.url), "stdin": subprocess.DEVNULL}
    subprocess.run(["sh", "-c", command], **how, capture_output=True, check=True)
    assert_only_killed_points_lack(points(wandb_server.history))
    assert all(row["tokens"] == 8 * row["step"] for row in wandb_server.history if "eval/loss" in row)


@needs("wandb")
def test_wandb_online_is_one_curve_also_after_offline_without_a_login_and_kills_and_on_another_machine(
    run_dir, wandb_server
):
    online = logged_in(wandb_server.url)
    offline = process(lambda: train(run_dir, "wandb", 0, 10)).stdout  # at a terminal, where it asks nothing
    assert (
        offline.startswith("logged: wandb: offline, for no login was found (wandb login)") and offline.count("\n") == 1
    )
    assert f'for part in {run_dir}/wandb/offline-*; do wandb sync "$part"; done' in offline
    assert {path.name for path in run_dir.iterdir()} == {"wandb", "metrics.jsonl", trackers.IDS}
    assert not {"wandb-metadata.json", "requirements.txt"} & {path.name for path in run_dir.rglob("*")}
    killed = process(lambda: train(run_dir, "wandb", 8, 14, killed=True), **online)
    done = process(lambda: train(run_dir, "wandb", 8, 20), **online)
    assert killed.returncode == -signal.SIGKILL and done.returncode == 0, killed.stdout + done.stdout
    assert points(wandb_server.history) == expected(20)
    assert [row["step"] for row in wandb_server.history if "samples" in row][-3:] == [12, 16, 20]
    assert [path.parent.name[:8] for path in run_dir.rglob("*.wandb.synced")] == ["offline-"]  # nothing is left to sync
    elsewhere, ids = run_dir.parent.parent / "elsewhere" / "tiny", ids_of(run_dir)
    elsewhere.mkdir(parents=True)
    process(lambda: train(elsewhere, "wandb", 16, 24, ids=ids), **online)
    assert ids_of(elsewhere)["wandb"] == ids["wandb"]
    assert points(wandb_server.history) == expected(24)
    assert "learning_rate" in wandb_server.config and "args" not in wandb_server.config
    assert_no_canary(run_dir, killed.stdout + done.stdout)


@needs("wandb")
def test_wandb_server_that_dies_neither_slows_nor_ends_the_run(run_dir, wandb_server, monkeypatch):
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 1)
    wandb_server.mortal = True

    def body():
        tracker = begin(run_dir, "wandb")
        began = time.monotonic()
        for step in range(1, 1001):
            tracker.log(step, {"step": step, "tokens": 8 * step, "train/loss": 1.0})
        logged = time.monotonic()
        tracker.close()
        print(f"took {logged - began:.1f} {time.monotonic() - logged:.1f}")

    done = process(body, **logged_in(wandb_server.url))
    assert done.returncode == 0, done.stdout
    logging, closing = map(float, re.search(r"took (\S+) (\S+)", done.stdout).groups())
    assert logging < 30 and closing < trackers.FINISH_SECONDS + 30  # a wait a row would take 1,000 seconds and more
    assert_no_canary(run_dir, done.stdout)


@needs("wandb")
def test_wandb_gets_the_rows_of_the_time_when_it_was_off(run_dir):
    """Disabled at first, and later not in report_to."""
    disabled = {"WANDB_MODE": "disabled"}
    for first, last, names, given in ((0, 6, "wandb", disabled), (6, 10, "wandb", {}), (10, 14, "", {})):
        process(lambda: train(run_dir, names, first, last), **given)  # noqa: B023
    done = process(lambda: train(run_dir, "wandb", 14, 20))
    assert done.returncode == 0 and "switched off" not in done.stdout, done.stdout
    found, _ = read_offline(run_dir / "wandb")
    assert points(found) == expected(20)


@needs("tensorboard")
def test_tensorboard_gets_the_rows_of_the_time_when_it_was_off(run_dir):
    for first, last, names in ((0, 6, "tensorboard"), (6, 12, ""), (12, 20, "tensorboard")):
        process(lambda: train(run_dir, names, first, last))  # noqa: B023
    assert points(read_tensorboard(run_dir)) == expected(20)


@needs("wandb")
def test_wandb_takes_names_and_folder_from_the_environment(run_dir, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    given = {"WANDB_PROJECT": "p", "WANDB_NAME": "n", "WANDB_RUN_ID": "i1", "WANDB_DIR": str(tmp_path / "elsewhere")}
    given |= {"WANDB_TAGS": "x,y", "WANDB_RUN_GROUP": "g"}
    done = process(lambda: train(run_dir, "wandb", 0, 10, project_name="ursa-minor", tags=[]), **given)
    assert f"for part in {tmp_path}/elsewhere/wandb/offline-*" in done.stdout
    assert "switched off" not in done.stdout, done.stdout
    rows, runs = read_offline(tmp_path / "elsewhere" / "wandb")
    assert points(rows) == expected(10) and not (run_dir / "wandb").exists()
    for run in runs:
        assert (run.project, run.display_name, run.run_id, run.run_group) == ("p", "n", "i1", "g")
        assert run.tags == ["x", "y"]
    assert runs
    another = given | {"WANDB_RUN_ID": "i2"}
    process(lambda: train(run_dir, "wandb", 10, 12, project_name="stated", tags=["z"]), **another)
    rows, runs = read_offline(tmp_path / "elsewhere" / "wandb")
    assert (runs[-1].project, runs[-1].run_id, runs[-1].tags) == ("stated", "i2", ["z"])
    assert points(rows) == sorted(expected(10) + expected(12))  # another run gets every row


@pytest.mark.parametrize(("name", "variable"), trackers.PROJECT_VARIABLES.items())
@pytest.mark.parametrize(("stated", "used"), [("ursa-minor", "from the environment"), ("mine", "mine")])
def test_project_of_the_environment_replaces_the_default(monkeypatch, name, variable, stated, used):
    recipe = reading.load_recipe(ROOT / "recipes" / "quickstart.yaml", {"project_name": stated, "report_to": [name]})
    monkeypatch.setenv(variable, "from the environment")
    assert trackers._project(name, recipe) == used
    monkeypatch.setenv(variable, "")
    assert trackers._project(name, recipe) == stated


def test_mlflow_continues_the_run_of_the_environment(tmp_path, monkeypatch):
    """MLflow is not installed here: what Accelerate's class is given."""
    given = {}

    class Tracker:
        requires_logging_directory = False
        tracker = SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        def __init__(self, project, **how):
            given.update(how, project=project)

        def start(self):
            given["started"] = True

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", Tracker)
    for name, value in {"EXPERIMENT_NAME": "e", "RUN_ID": "r1", "RUN_NAME": "n"}.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    found = begin(tmp_path, "mlflow", project_name="ursa-minor")
    assert (given["project"], given["run_id"], given["run_name"]) == ("e", "r1", "n") and given["started"]
    assert found.ids == {"mlflow": "r1"}
    found._threads["mlflow"].terminate()


VARIABLES = {"WANDB_PROJECT", "WANDB_NAME", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_NAME", "CLEARML_PROJECT"}
PROJECTS = {"WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "CLEARML_PROJECT"}


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ([], VARIABLES),
        (["--run_name", "a"], PROJECTS),
        (["--project_name", "a"], VARIABLES - PROJECTS),
        (["--project_name", "ursa-minor"], VARIABLES - PROJECTS),  # stated, although it is the default
        (["--project_name", "a", "--run_name", "a"], set()),
    ],
)
def test_flag_wins_over_the_environment(monkeypatch, flags, left):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "x")
    recipe_file = str(ROOT / "recipes" / "quickstart.yaml")
    command = ["--recipe", recipe_file, "--report_to", "wandb", *flags]
    recipe, _, argv = reading.parse_training(command)
    trackers.drop_overridden(recipe, argv)
    assert {variable for variable in VARIABLES if variable in os.environ} == left


@pytest.mark.parametrize(("key", "left"), [("run_name", PROJECTS), ("project_name", VARIABLES - PROJECTS)])
def test_recipe_wins_over_the_environment(tmp_path, monkeypatch, key, left):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "x")
    file = tmp_path / "tiny.yaml"
    file.write_text((ROOT / "recipes" / "quickstart.yaml").read_text() + f"\n{key}: mine\n")
    recipe, _, argv = reading.parse_training(["--recipe", str(file)])
    trackers.drop_overridden(recipe, argv)
    assert {variable for variable in VARIABLES if variable in os.environ} == left


def test_texts_of_a_row_are_not_sent_as_metrics():
    sent = []
    tracker = SimpleNamespace(log=lambda values, **_: sent.append(values))
    row = {"step": 1, "hellaswag/acc": 0.5, "hellaswag/revision": "c0ffee"}
    trackers._send("mlflow", tracker, 1, 1000, row)
    assert sent == [{"hellaswag/acc": 0.5}]


def test_a_tracker_that_fails_or_hangs_is_switched_off_once_and_the_others_go_on(tmp_path, monkeypatch, caplog):
    def fail(*_, **about):
        raise RuntimeError(f"no room for {TOKEN}\nand more")

    sent = []
    logs = {
        "tensorboard": fail,
        "aim": lambda *_, **about: time.sleep(1),
        "swanlab": lambda *row, **about: sent.append(row),
    }
    monkeypatch.setattr(trackers, "CALL_SECONDS", 0.5)
    monkeypatch.setattr(trackers, "_start", lambda name, *_: (SimpleNamespace(log=logs[name], finish=sent.clear), -1))
    three = begin(tmp_path, *logs)
    for step in (1, 2):
        three.log(step, {"step": step, "tokens": 8 * step, "train/loss": float(step)})
    assert [row["train/loss"] for (row,) in sent] == [1.0, 2.0]
    three.close()
    failed, hung = caplog.messages
    assert "tensorboard: switched off: RuntimeError: no room for redacted and more. The run continues" in failed
    assert "aim: switched off: TimeoutError: no answer in 0.5 s. The run continues" in hung and not sent


def test_what_is_not_installed_is_found_before_anything_is_written(monkeypatch):
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["wandb", "tensorboard"])
    trackers.check(["wandb", "tensorboard"])
    with pytest.raises(BadInput) as refused:
        trackers.check(["wandb", "trackio", "mlflow"])
    assert refused.value.lines == [
        "report_to = trackio: the package is not installed; pip install trackio==0.43.0, or leave trackio out",
        "report_to = mlflow: the package is not installed; pip install mlflow, or leave mlflow out",
    ]


def test_every_tracker_of_accelerate_has_a_name_here():
    assert set(keys.TRACKERS) == set(LOGGER_TYPE_TO_CLASS)
