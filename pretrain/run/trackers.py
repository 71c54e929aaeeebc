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


def check(names: list[str]) -> None:
    """Raise BadInput for a tracker that is not installed."""
    installed, why = [*map(str, get_available_trackers())], "the package is not installed; pip install"
    if missing := [name for name in names if name not in installed]:
        raise BadInput([f"report_to = {name}: {why} {PINS.get(name, name)}, or leave {name} out" for name in missing])


class Trackers:
    """The trackers of a run, on its main process; ``ids`` is for its next checkpoint.

    Args:
        first_step: where this process begins.
        ids: of its checkpoint; those in the run folder are found anyway.
        rows: of metrics.jsonl, as far as this process takes them as done.
        sent: the place of the last row that it held.
    """

    def __init__(self, recipe: keys.Recipe, first_step: int, *, ids: dict, rows: Iterable[dict], sent: int):
        self.ids, self._place, names, path = dict(ids), -1, recipe.tracking.names, recipe.saving.run_dir / IDS
        self._open: dict[str, tuple[GeneralTracker, int]] = {}  # and the place of the last row that it has
        if not names:
            return
        known = ids | (files.read_json(path) if path.is_file() else {})
        sent = max(sent, known.pop("place", -1))
        fresh = {"wandb": uuid.uuid4().hex[:8], "trackio": f"{recipe.saving.name}-{uuid.uuid4().hex[:4]}"}
        self.ids = {name: fresh[name] for name in names if name in fresh} | known
        self._threads = {name: ThreadPool(1) for name in names}
        for name in names:
            held = sent if name in known else -1
            if started := self._try(name, _start, name, recipe, self.ids.get(name), first_step, held):
                self._open[name] = started
        if "mlflow" in self._open:  # MLflow chooses the id
            self.ids["mlflow"] = self._open["mlflow"][0].tracker.info.run_id
        files.write_json(path, self.ids | {"place": sent})  # before any row, so that a killed run keeps its curves
        for row in rows:
            self.log(row["step"], row)

    def log(self, step: int, row: dict) -> None:
        """Send a row of metrics.jsonl, or ``{"samples": [(prompt, text), ...]}``, to each tracker that lacks it."""
        self._place = place_after(self._place, step)
        for name, (tracker, held) in list(self._open.items()):
            if self._place > held and ("samples" not in row or name in PINS):
                self._try(name, _send, name, tracker, step, self._place, row)

    def close(self) -> None:
        """Let the trackers send what they have left."""
        for name in [*self._open]:
            self._try(name, self._open[name][0].finish)

    def _try(self, name: str, call: Callable, *args) -> Any:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return self._threads[name].apply_async(call, args).get(CALL_SECONDS)
        except Exception as error:
            why = one_line(f"{type(error).__name__}: {str(error) or f'no answer in {CALL_SECONDS} s'}").rstrip(".")
            self._open.pop(name, None)
            log.warning(f"{name}: switched off: {why}. The run continues; metrics.jsonl has every number")


def place_after(place: int, step: int) -> int:
    """Return the place of a row of this step after the row at ``place``: the same however often a run resumes."""
    return max(place + 1, 1000 * step)


def _send(name: str, tracker: GeneralTracker, step: int, place: int, row: dict) -> None:
    values = {key: value for key, value in row.items() if key != "step" and value is not None}
    # A data set's revision is a text, which MLflow refuses as a metric.
    values = {key: value for key, value in values.items() if not isinstance(value, str)}
    if "samples" in values:
        texts = (html.escape(prompt + text) for prompt, text in values["samples"])
        page = "".join(f'<pre style="white-space: pre-wrap">{text}</pre>' for text in texts)  # trackio reads Markdown
        values = {"samples": page if name == "tensorboard" else import_module(name).Html(page)}
    if name != "wandb":
        return tracker.log(values, step=step)
    return tracker.log({"step": step} | values, step=place, commit=True)  # its own steps may not repeat


def _start(name: str, recipe: keys.Recipe, run_id: str | None, first_step: int, held: int) -> tuple:
    """Begin or continue a run; return its tracker, and the place of the last row that it has, or that its server has."""
    run_dir, project, kind = recipe.saving.run_dir, recipe.tracking.project_name, LOGGER_TYPE_TO_CLASS[name]
    config, how = keys.public(recipe), dict[str, Any]()
    if name == "wandb":  # without what it gathers by itself, offline without a login
        wandb = import_module(name)
        mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
        hidden = {"disable_code": True, "disable_git": True, "x_disable_meta": True}  # the last: command line and host
        quiet = {"silent": True, "console": "off", "symlink": False, "x_save_requirements": False}
        settings = wandb.Settings(**hidden, **quiet, init_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS)
        how = {"id": run_id, "name": recipe.saving.name, "resume": "allow", "dir": run_dir, "mode": mode}
        how |= {"tags": tuple(recipe.tracking.tags), "config": config, "settings": settings}
    elif name == "tensorboard":  # without a config, which would be one more run in its list
        held = 1000 * first_step - 1 if (run_dir / name).is_dir() else -1
        project, how = name, {"purge_step": first_step}  # what it has from there on is hidden, and sent again
    elif name == "trackio":
        how = {"name": run_id, "resume": "allow", "private": True, "embed": False, "config": config}
        how |= {"auto_log_gpu": False, "auto_log_cpu": False}
    elif name == "mlflow":
        how = {"run_id": run_id, "run_name": recipe.saving.name, "tags": {"mlflow.user": "", "mlflow.source.name": ""}}
    tracker = kind(project, *[run_dir] * kind.requires_logging_directory, **how)
    tracker.start()
    if name not in PINS and not run_id:  # MLflow takes a config once; with the others each process begins a run
        tracker.store_init_configuration(config)
    return tracker, _greet_wandb(tracker.tracker, run_dir, held) if name == "wandb" else held


def _greet_wandb(run: Any, run_dir: Path, held: int) -> int:
    """Say where a run of wandb is; return the place of the last row that its server has."""
    run.define_metric("*", step_metric="step")
    if run.offline:
        parts = f"{shlex.quote(str(run_dir / 'wandb'))}/offline-*"  # one by one: a sync of all ends at a torn one
        why = "for no login was found (wandb login), or WANDB_MODE asks for it"
        log.info(f'wandb: offline, {why}. To send the curves later: for part in {parts}; do wandb sync "$part"; done')
    elif run.url:
        log.info(f"wandb: {run.url}")
        for path in run_dir.glob(f"wandb/offline-*/run-{run.id}.wandb"):  # what they have is sent from metrics.jsonl
            path.with_suffix(".wandb.synced").touch()
        return run.step - 1
    return held
