"""A run's rows and samples, also in the trackers that ``report_to`` names: Accelerate's own classes.

metrics.jsonl is the truth, a tracker is a copy of it. None ends a run or holds it up: one that raises, or does not
answer in time, is off from there.
"""

import contextlib
import html
import io
import logging
import shlex
import uuid
from collections.abc import Callable, Iterable
from importlib import import_module
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from pretrain.base import files
from pretrain.base.errors import BadInput
from pretrain.base.foreign import one_line
from pretrain.recipe import keys

log = logging.getLogger(__name__)

# Those that are tested here; they show text, too.
PINS = {"wandb": "wandb==0.31.0", "tensorboard": "tensorboard==2.21.0", "trackio": "trackio==0.43.0"}
IDS = "trackers.json"
CALL_SECONDS, INIT_SECONDS, FINISH_SECONDS = 60, 20, 50  # of each call; the last two are wandb's own
TEXT = '<pre style="white-space: pre-wrap">{}</pre>'  # trackio reads it as Markdown


def check(names: list[str]) -> None:
    """Raise BadInput for a tracker that is not installed."""
    why, installed = "the package is not installed; pip install", [str(name) for name in get_available_trackers()]
    if missing := [name for name in names if name not in installed]:
        raise BadInput([f"report_to = {name}: {why} {PINS.get(name, name)}, or leave {name} out" for name in missing])


class Trackers:
    """The trackers of a run, on its main process; ``ids`` is for its next checkpoint.

    Args:
        first_step: where this process begins.
        ids: of its checkpoint; those in the run folder are found anyway.
        rows: of metrics.jsonl, as far as this process takes them as done.
        sent: the last step of each kind of row that it held.
    """

    def __init__(self, recipe: keys.Recipe, first_step: int, *, ids: dict, rows: Iterable[dict], sent: dict):
        self.ids, names, path = dict(ids), recipe.tracking.names, recipe.saving.run_dir / IDS
        self._open: dict[str, tuple[GeneralTracker, dict[str, int]]] = {}  # and the last step it has, by kind of row
        if not names:
            return
        known = ids | (files.read_json(path) if path.is_file() else {})
        steps = known.pop("sent", {})
        steps |= {kind: max(step, steps.get(kind, 0)) for kind, step in sent.items()}
        steps["samples"] = max(steps.values(), default=0) - 1  # they follow the rows of their step
        fresh = {"wandb": uuid.uuid4().hex[:8], "trackio": f"{recipe.saving.name}-{uuid.uuid4().hex[:4]}"}
        self.ids = {name: fresh[name] for name in names if name in fresh} | known
        self._threads = {name: ThreadPool(1) for name in names}
        for name in names:
            held = dict(steps) if name in ("tensorboard", *known) else {}
            if started := self._try(name, _start, name, recipe, self.ids.get(name), first_step, held):
                self._open[name] = started
        if "mlflow" in self._open:  # MLflow chooses the id
            self.ids["mlflow"] = self._open["mlflow"][0].tracker.info.run_id
        files.write_json(path, self.ids | {"sent": steps})  # before any row, so that a killed run keeps its curves
        for row in rows:
            self.log(row["step"], row)

    def log(self, step: int, row: dict) -> None:
        """Send a row of metrics.jsonl to each tracker that does not have it.

        Samples are a row too, ``{"samples": [(prompt, text), ...]}``, for those that show text.
        """
        values, kind = {key: value for key, value in row.items() if key != "step" and value is not None}, kind_of(row)
        for name, (tracker, held) in list(self._open.items()):
            if step > held.get(kind, -1) and (kind != "samples" or name in PINS):
                held[kind] = step
                self._try(name, _send, name, tracker, step, values, held)

    def close(self) -> None:
        """Let the trackers send what they have left."""
        for name, (tracker, _) in list(self._open.items()):
            self._try(name, tracker.finish)

    def _try(self, name: str, call: Callable, *args) -> Any:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return self._threads[name].apply_async(call, args).get(CALL_SECONDS)
        except Exception as error:
            self._open.pop(name, None)
            why = one_line(f"{type(error).__name__}: {str(error) or f'no answer in {CALL_SECONDS} s'}").rstrip(".")
            log.warning(f"{name}: switched off: {why}. The run continues; metrics.jsonl has every number")


def kind_of(row: dict) -> str:
    """Return what a row is of: train, eval, a task, or samples."""
    return next((key.partition("/")[0] for key in row if "/" in key), "samples")


def _send(name: str, tracker: GeneralTracker, step: int, values: dict, held: dict[str, int]) -> None:
    if "samples" in values:
        page = "".join(TEXT.format(html.escape(prompt + text)) for prompt, text in values["samples"])
        values = {"samples": page if name == "tensorboard" else import_module(name).Html(page)}
    if name == "wandb":  # its own count of steps is left alone: it drops what comes out of order
        tracker.log({"step": step} | values)
        tracker.tracker.summary["held"] = held  # after the row, which may arrive later
    else:
        tracker.log(values, step=step)


def _start(name: str, recipe: keys.Recipe, run_id: str | None, first_step: int, held: dict[str, int]) -> tuple:
    """Begin or continue a run; return its tracker, and the last step that it has by kind of row."""
    run_dir, project, kind = recipe.saving.run_dir, recipe.tracking.project_name, LOGGER_TYPE_TO_CLASS[name]
    about: dict[str, Any] = {"name": recipe.saving.name, "resume": "allow", "config": keys.public(recipe)}
    if name == "wandb":
        tracker = kind(project, id=run_id, tags=tuple(recipe.tracking.tags), dir=run_dir, **about)
        return tracker, _start_wandb(tracker, run_dir, held)
    if name == "tensorboard":  # without a config, which would be one more run in its list
        held = dict.fromkeys(held if (run_dir / name).is_dir() else (), first_step - 1)
        tracker = kind(name, run_dir, purge_step=first_step)  # what it has from there on is hidden, and sent again
        log.info(f"tensorboard: to see it: tensorboard --logdir {run_dir}")
    elif name == "trackio":
        about |= {"name": run_id, "private": True, "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        tracker = kind(project, **about)
        log.info(f"trackio: run {run_id}; to see it: trackio show --project {project}")
    elif name == "mlflow":
        tags = dict.fromkeys(("mlflow.user", "mlflow.source.name"), "")
        tracker = kind(project, run_id=run_id, run_name=recipe.saving.name, tags=tags)
    else:  # each process begins a run there, with the whole curve
        tracker = kind(project, *[run_dir] * kind.requires_logging_directory)
    tracker.start()
    if name not in PINS and not run_id:  # MLflow takes a config once
        tracker.store_init_configuration(about["config"])
    return tracker, held


def _start_wandb(tracker: GeneralTracker, run_dir: Path, held: dict[str, int]) -> dict[str, int]:
    """Begin a run in wandb without what wandb gathers by itself; offline without a login or an answer.

    Returns the last step that the run has by kind of row: as its server says, else ``held``, what was sent.
    """
    import wandb

    mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
    why = f"as its settings ask (WANDB_MODE = {mode})"
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        mode, why = "offline", "for no login was found (wandb login)"
    hidden = {"disable_code": True, "disable_git": True, "x_disable_meta": True}  # the last: command line and host
    quiet = {"silent": True, "console": "off", "symlink": False, "x_save_requirements": False}
    settings = wandb.Settings(**hidden, **quiet, init_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS)
    tracker.init_kwargs |= {"mode": mode, "settings": settings}
    try:
        tracker.start()
    except wandb.Error as error:
        why, tracker.init_kwargs["mode"] = f"for the server cannot be used ({one_line(error)})", "offline"
        wandb.teardown()  # its process, which would report that the run's id is in use
        tracker.start()
    run = tracker.tracker
    run.define_metric("*", step_metric="step")
    if run.offline:
        parts = f"{shlex.quote(str(run_dir / 'wandb'))}/offline-*"  # one by one: a sync of all ends at a torn one
        log.info(f'wandb: offline, {why}. To send the curves later: for part in {parts}; do wandb sync "$part"; done')
    elif run.url:
        log.info(f"wandb: {run.url}")
        for path in run_dir.glob(f"wandb/offline-*/run-{run.id}.wandb"):  # what they have is sent from metrics.jsonl
            path.with_suffix(".wandb.synced").touch()
        return dict(run.summary.get("held") or {})
    return held
