"""Trackers: a run's rows and samples, also in wandb, TensorBoard or trackio, through accelerate's classes.

metrics.jsonl is the truth and a tracker is a copy of it. A killed run has sent rows that its tracker never kept (wandb
uploads and writes its file every 15 seconds, trackio twice a second), and rows past the checkpoint, which come again as
the run gets there. So each tracker is asked what it holds as it begins: what it lacks of metrics.jsonl is sent, what it
holds is not sent again, and a curve has each point once however often the run was killed.

No tracker ends a run: whatever one raises is logged once, and that tracker is off from there.
"""

import contextlib
import functools
import html
import importlib.util
import io
import json
import logging
import os
import re
import struct
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from textwrap import indent
from typing import Any

from pretrain.base import files
from pretrain.base.errors import BadInput
from pretrain.base.foreign import one_line
from pretrain.recipe import keys

log = logging.getLogger(__name__)

PINS = {"wandb": "wandb==0.31.0", "tensorboard": "tensorboard==2.21.0", "trackio": "trackio==0.43.0"}
NAMES = tuple(PINS)
IDS = "trackers.json"
INIT_SECONDS, FINISH_SECONDS = 20, 60
AXES = ("step", "tokens")
KINDS = ("train", "eval", "hellaswag", "samples", "test", "other")  # of rows, as they follow each other at one step
PROJECT = re.compile(r"[A-Za-z0-9_.-]{1,128}")
CODE = "    "  # Markdown shows what follows it as it is
BLOCK, FULL, FIRST, LAST = 32768, 1, 2, 4  # of a .wandb file
KINDS_AT_MOST = 10  # a row's number in wandb: KINDS_AT_MOST * step + its kind's place


def names_of(tracking: keys.Tracking) -> list[str]:
    """Return which trackers a run reports to."""
    return [name for name in tracking.report_to or () if name != "none"]


def check(names: Iterable[str], project_name: str) -> None:
    """Raise BadInput for a tracker that is not installed, or a project that cannot be named so."""
    lines = [
        f"report_to = {name}: the package is not installed; pip install {PINS[name]}, or leave {name} out"
        for name in names
        if importlib.util.find_spec(name) is None
    ]
    if names and not PROJECT.fullmatch(project_name):
        lines.append(f"project_name = {project_name!r}: letters, digits, _ . and - only, 1 to 128 of them")
    if lines:
        raise BadInput(lines)


def forget(run_dir: Path) -> None:
    """Begin new curves in a run folder: those of the run that was there are another one's."""
    for name in (IDS, "tensorboard"):
        files.remove(run_dir / name)


class Trackers:
    """The trackers of a run, on its main process.

    Args:
        recipe: what of it is public is shown beside the curves, and nothing else is.
        ids: of an earlier process of this run, from its checkpoint; those in the run folder are found anyway.
        rows: of metrics.jsonl, as far as this process takes them as done.

    Attributes:
        ids: for the next checkpoint, so that another machine continues the same curves.
    """

    def __init__(self, recipe: keys.Recipe, *, ids: dict[str, str], rows: list[dict]):
        self.ids = dict(ids)
        self._open: dict[str, _Wandb | _TensorBoard | _Trackio] = {}
        names, path = names_of(recipe.tracking), recipe.saving.run_dir / IDS
        if not names:  # nothing is imported or written
            return
        if path.is_file():
            self.ids = json.loads(path.read_text(encoding="utf-8")) | self.ids
        fresh = {"wandb": uuid.uuid4().hex[:8], "trackio": f"{recipe.saving.name}-{uuid.uuid4().hex[:4]}"}
        self.ids = fresh | self.ids
        files.write_json(path, self.ids)  # before anything is sent: a run killed at once keeps its curve
        kinds = {"wandb": _Wandb, "tensorboard": _TensorBoard, "trackio": _Trackio}
        for name in names:
            if tracker := self._try(name, kinds[name], recipe, self.ids.get(name), rows):
                self._open[name] = tracker
        for row in rows:
            self.log(row["step"], row)

    def log(self, step: int, row: dict) -> None:
        """Send a row of metrics.jsonl (with its ``tokens``) to each tracker that does not hold it."""
        kind = _kind(row)
        for name, tracker in list(self._open.items()):
            values = {
                key: value
                for key, value in row.items()
                if key not in AXES and value is not None and step > tracker.held.get(key, tracker.held.get(kind, -1))
            }
            if values:
                self._try(name, tracker.log, step, {"tokens": row.get("tokens")} | values)

    def sample(self, step: int, rows: list[tuple[str, str]]) -> None:
        """Send (prompt, text) pairs: a table, or text where the tracker has no tables."""
        for name, tracker in list(self._open.items()):
            if step > tracker.held.get("samples", -1):
                self._try(name, tracker.sample, step, rows)

    def close(self) -> None:
        """Let the trackers send what they have left."""
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.close)
        self._open.clear()

    def _try(self, name: str, call: Callable, *args) -> Any:
        try:
            return call(*args)
        except Exception as error:
            self._open.pop(name, None)
            log.warning(f"{name}: off from here: {_describe(error)}. The run goes on; metrics.jsonl has every number")
            return None


# Each of these has `held`: the last step that the tracker holds, by key or by kind of row.


class _Wandb:
    """A run in wandb. Its own count of steps is left alone: it drops whatever comes out of order."""

    def __init__(self, recipe: keys.Recipe, run_id: str, rows: list[dict]):
        import wandb

        tracking, run_dir = recipe.tracking, recipe.saving.run_dir
        settings = wandb.Settings(
            silent=True,
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            symlink=False,
            x_disable_meta=True,  # the command line, the host
            x_save_requirements=False,
        )
        about: dict[str, Any] = {"project": tracking.project_name, "id": run_id, "name": recipe.saving.name}
        about |= {"tags": tuple(tracking.tags), "config": keys.public(recipe), "dir": run_dir, "resume": "allow"}
        about["settings"] = settings
        self.held: dict[str, int] = {}
        written = {path: _last_row(path) for path in (run_dir / "wandb").glob(f"*/run-{run_id}.wandb")}
        mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
        why = f"as its settings ask (WANDB_MODE = {mode})"
        try:
            if mode == "online" and not wandb.login(prompt=False, verify=False):
                mode, why = "offline", "for no login was found (wandb login)"
            self.run = run = wandb.init(mode=mode, **about)
        except wandb.Error as error:
            why = f"for the server cannot be used ({_describe(error)})"
            wandb.teardown()  # its process, which would report that the run's id is in use
            self.run = run = wandb.init(mode="offline", **about)
        if run.disabled:
            return
        for axis in (*AXES, "row"):
            run.define_metric(axis, hidden=True)
        run.define_metric("*", step_metric="step")
        if run.offline:
            number = max(written.values(), default=-1)
            log.info(f"wandb: offline, {why}. To send the curves later: wandb sync {run_dir / 'wandb'}")
        else:
            number = run.summary.get("last_row", -1)
            log.info(f"wandb: {run.url}")
        for path, row in written.items():
            if path.parent.name.startswith("offline-") and (row < 0 or not run.offline):
                # A file without rows would fail the whole sync, and those of others are sent from metrics.jsonl now.
                path.with_suffix(".wandb.synced").touch()
        step, last = divmod(number, KINDS_AT_MOST)
        self.held = {kind: step if place <= last else step - 1 for place, kind in enumerate(KINDS)}

    def log(self, step: int, values: dict) -> None:
        number = KINDS_AT_MOST * step + KINDS.index(_kind(values))
        self.run.log({"step": step, "row": number} | values)
        self.run.summary["last_row"] = number  # after it: a row's own summary may be uploaded before it

    def sample(self, step: int, rows: list[tuple[str, str]]) -> None:
        import wandb

        # Not wandb.Table: it asks the server before it returns, and raises where there is no answer.
        lines = "".join(f"<tr><td>{html.escape(prompt)}<td>{html.escape(text)}" for prompt, text in rows)
        style = "white-space: pre-wrap; text-align: left; vertical-align: top"
        self.log(step, {"samples": wandb.Html(f'<table style="{style}"><tr><th>prompt<th>text{lines}</table>', False)})

    def close(self) -> None:
        self.run.finish()


class _TensorBoard:
    """Event files in the run folder, on disk after each row; a later process adds a file to the same curves."""

    def __init__(self, recipe: keys.Recipe, run_id: None, rows: list[dict]):
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from torch.utils.tensorboard import SummaryWriter

        self.held: dict[str, int] = {}
        run_dir = recipe.saving.run_dir
        for path in (run_dir / "tensorboard").glob("events.out.tfevents.*"):
            for event in LegacyEventFileLoader(str(path)).Load():  # ends at a torn last event
                for value in event.summary.value:
                    tag = value.tag.removesuffix("/text_summary")
                    self.held[tag] = max(event.step, self.held.get(tag, -1))
        self.writer = SummaryWriter(run_dir / "tensorboard")
        if not self.held:  # its hyperparameters would be a run of their own in the list
            self.log(0, {"config": indent(json.dumps(keys.public(recipe), indent=1, default=str), CODE)})
        log.info(f"tensorboard: to see it: tensorboard --logdir {run_dir}")

    def log(self, step: int, values: dict) -> None:
        for key in values.keys() - {*AXES}:
            add = self.writer.add_text if isinstance(values[key], str) else self.writer.add_scalar
            add(key, values[key], step)
        self.writer.flush()

    def sample(self, step: int, rows: list[tuple[str, str]]) -> None:
        self.log(step, {"samples": "\n\n---\n\n".join(indent(prompt + text, CODE) for prompt, text in rows)})

    def close(self) -> None:
        self.writer.close()


class _Trackio:
    """A run in trackio's database on this machine, or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL point."""

    def __init__(self, recipe: keys.Recipe, name: str, rows: list[dict]):
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        project_name = recipe.tracking.project_name
        about: dict[str, Any] = {"name": name, "resume": "allow", "config": keys.public(recipe), "private": True}
        begin = functools.partial(
            trackio.init, project_name, **about, embed=False, auto_log_gpu=False, auto_log_cpu=False
        )
        with contextlib.redirect_stdout(io.StringIO()):
            self.run = _within(INIT_SECONDS, begin)  # asks the Hub whose a token is, without a time-out
        elsewhere = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        if elsewhere or trackio.utils.get_storage_mode() != "sqlite":  # what it holds cannot be read
            held = rows
        else:
            held = SQLiteStorage.get_logs(project_name, run=name)
            log.info(f"trackio: run {name}; to see it: trackio show --project {project_name}")
        self.held: dict[str, int] = {}
        for row in held:
            self.held |= {key: max(row["step"], self.held.get(key, -1)) for key in row}

    def log(self, step: int, values: dict) -> None:
        self.run.log(values, step=step)

    def sample(self, step: int, rows: list[tuple[str, str]]) -> None:
        import trackio

        self.log(step, {"samples": trackio.Table(["prompt", "text"], [list(row) for row in rows])})

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.run.finish()


def _kind(row: dict) -> str:
    """Return which of ``KINDS`` a row is, by its first key."""
    prefix = next((key for key in row if key not in AXES), "").split("/")[0]
    return prefix if prefix in KINDS else "other"


def _describe(error: Exception) -> str:
    """Return the first line of an error."""
    line = next(iter(str(error).splitlines()), "")
    return one_line(f"{type(error).__name__}: {line}").removesuffix(":").rstrip(".")


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """Call in a thread that is left behind if it takes longer. Raises TimeoutError, or what the call raised."""
    answer: Future = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([answer], seconds).done:
        raise TimeoutError(f"no answer in {seconds} s")
    return answer.result()


def _last_row(path: Path) -> int:
    """Return the number of the last row in a .wandb file, -1 where there is none; a torn end is left out.

    The file is a LevelDB log (github.com/google/leveldb, doc/log_format.md) whose first block begins with seven bytes
    of wandb's own, and holds protocol buffers.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, last, record = path.read_bytes(), 7, -1, b""
    while at + 7 <= len(data):
        if (left := BLOCK - at % BLOCK) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        at += 7 + size
        if at > len(data):
            break
        record = data[at - size : at] if kind in (FULL, FIRST) else record + data[at - size : at]
        if kind in (FULL, LAST):
            for item in Record.FromString(record).history.item:
                if "row" in (item.key, *item.nested_key):
                    last = max(last, int(item.value_json))
    return last
