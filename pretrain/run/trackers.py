"""A run's rows and samples, also in the trackers that ``report_to`` names: Accelerate's own classes.

metrics.jsonl is the truth, a tracker is a copy of it. None ends a run or holds it up: one that raises, or does not
answer in time, is off from there.
"""

import contextlib
import html
import io
import logging
import os
import shlex
import uuid
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from pretrain.base import files
from pretrain.base.errors import BadInput
from pretrain.base.redaction import one_line
from pretrain.recipe import keys, reading

log = logging.getLogger(__name__)

# Those that are tested here; they show text, too.
PINS = {"wandb": "wandb==0.31.0", "tensorboard": "tensorboard==2.21.0", "trackio": "trackio==0.43.0"}
IDS = "trackers.json"
# Variables of the environment that trackers have for the options project_name and run_name, and for a run's id.
PROJECT_VARIABLES = {
    "wandb": "WANDB_PROJECT",
    "mlflow": "MLFLOW_EXPERIMENT_NAME",
    "trackio": "TRACKIO_PROJECT",
    "comet_ml": "COMET_PROJECT_NAME",
    "clearml": "CLEARML_PROJECT",
    "swanlab": "SWANLAB_PROJ_NAME",
}
NAME_VARIABLES = {"wandb": "WANDB_NAME", "mlflow": "MLFLOW_RUN_NAME"}
ID_VARIABLES = {"wandb": "WANDB_RUN_ID", "mlflow": "MLFLOW_RUN_ID"}
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

    The run folder's trackers.json contains the ids, ``place``, the place of the last row that was sent, and ``behind``,
    the same for each tracker that has been off since.
    """

    def __init__(self, recipe: keys.Recipe, first_step: int, *, ids: dict, rows: Iterable[dict], sent: int):
        names = recipe.tracking.names
        run_dir = recipe.saving.run_dir
        path = run_dir / IDS
        saved = files.read_json(path) if path.is_file() else {}
        sent = max(sent, saved.pop("place", -1))
        behind = saved.pop("behind", {})
        self._place = -1
        self._open: dict[str, tuple[GeneralTracker, int]] = {}  # and the place of the last row that it has
        self.ids = dict(ids) | saved
        if not names and not self.ids and not path.is_file():
            return

        # A tracker that is known has the rows up to its place; one with another id, or with none, has no row.
        known = {name: behind.get(name, sent) for name in self.ids}
        if (run_dir / "tensorboard").is_dir():
            known["tensorboard"] = behind.get("tensorboard", sent)
        for name, variable in ID_VARIABLES.items():
            run_id = os.environ.get(variable)
            if name in names and run_id and run_id != self.ids.get(name):
                self.ids[name] = run_id
                known.pop(name, None)
        fresh = {"wandb": uuid.uuid4().hex[:8], "trackio": f"{recipe.saving.name}-{uuid.uuid4().hex[:4]}"}
        self.ids = {name: fresh[name] for name in names if name in fresh} | self.ids

        self._threads = {name: ThreadPool(1) for name in names}
        for name in names:
            held = known.get(name, -1)
            if started := self._try(name, _start, name, recipe, self.ids.get(name), first_step, held):
                self._open[name] = started
        if "mlflow" in self._open:  # MLflow chooses the id
            self.ids["mlflow"] = self._open["mlflow"][0].tracker.info.run_id

        # A tracker that is off (disabled, failed to start, not in report_to) receives the missed rows later.
        self.ids = {name: run_id for name, run_id in self.ids.items() if name in known or name in self._open}
        behind = {name: place for name, place in known.items() if name not in self._open}
        # Before any row, so that a killed run keeps its curves.
        files.write_json(path, self.ids | {"place": sent, "behind": behind})
        if self._open:
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


def _start(
    name: str, recipe: keys.Recipe, run_id: str | None, first_step: int, held: int
) -> tuple[GeneralTracker, int] | None:
    """Begin or continue a run in a tracker.

    Args:
        run_id: of the run there; None if the tracker chooses it.
        first_step: where this process begins.
        held: the place of the last row that the tracker has.

    Returns the tracker, and the place of the last row that it has, or that its server has; None if it is disabled.
    """
    run_dir = recipe.saving.run_dir
    kind = LOGGER_TYPE_TO_CLASS[name]
    project = _project(name, recipe)
    config = keys.public(recipe)
    how: dict[str, Any] = {}
    if name == "wandb":  # without what it gathers by itself, offline without a login
        wandb = import_module(name)
        mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
        if mode == "disabled":
            log.info("wandb: disabled by WANDB_MODE; what it misses is sent when it is enabled again")
            return None
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
        hidden = {"disable_code": True, "disable_git": True, "x_disable_meta": True}  # the last: command line and host
        quiet = {"silent": True, "console": "off", "symlink": False, "x_save_requirements": False}
        settings = wandb.Settings(**hidden, **quiet, init_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS)
        folder = os.environ.get("WANDB_DIR") or run_dir
        how = {"id": run_id, "name": _run_name(name, recipe), "resume": "allow", "dir": folder, "mode": mode}
        how |= {"config": config, "settings": settings}
        if recipe.tracking.tags:  # otherwise wandb takes those of WANDB_TAGS
            how["tags"] = tuple(recipe.tracking.tags)
    elif name == "tensorboard":  # without a config, which would be one more run in its list
        held = min(held, 1000 * first_step - 1)
        project, how = name, {"purge_step": first_step}  # what it has from there on is hidden, and sent again
    elif name == "trackio":
        how = {"name": run_id, "resume": "allow", "private": True, "embed": False, "config": config}
        how |= {"auto_log_gpu": False, "auto_log_cpu": False}
    elif name == "mlflow":
        tags = {"mlflow.user": "", "mlflow.source.name": ""}
        how = {"run_id": run_id, "run_name": _run_name(name, recipe), "tags": tags}
    tracker = kind(project, *[run_dir] * kind.requires_logging_directory, **how)
    tracker.start()
    if name not in PINS and not run_id:  # MLflow takes a config once; with the others each process begins a run
        tracker.store_init_configuration(config)
    if name == "wandb":
        held = _greet_wandb(tracker.tracker, held)
    return tracker, held


def _project(name: str, recipe: keys.Recipe) -> str:
    """Return the project's name in a tracker: the recipe's, or the environment's where the recipe has the default."""
    stated = recipe.tracking.project_name
    if stated == keys.FIELDS["project_name"].default:
        return os.environ.get(PROJECT_VARIABLES.get(name, "")) or stated
    return stated


def _run_name(name: str, recipe: keys.Recipe) -> str:
    """Return the run's name in a tracker; ``drop_overridden`` has left the variable only where it has an effect."""
    return os.environ.get(NAME_VARIABLES[name]) or recipe.saving.name


def drop_overridden(recipe: keys.Recipe, argv: Sequence[str]) -> None:
    """Remove the trackers' variables from the environment whose option a flag or the recipe states.

    The trackers read the environment themselves, and some prefer it to what they are given.

    Args:
        argv: the flags that were given, as ``reading.argv_of`` writes them.
    """
    flags = dict(word[2:].split("=", 1) for word in argv if word.startswith("--") and "=" in word)
    file = Path(flags.get("recipe", reading.RECIPE))
    is_default_name = file.name == reading.RUN_RECIPE or recipe.saving.name == file.stem
    is_default_project = recipe.tracking.project_name == keys.FIELDS["project_name"].default
    overridden: list[str] = []
    if "run_name" in flags or not is_default_name:
        overridden += NAME_VARIABLES.values()
    if "project_name" in flags or not is_default_project:
        overridden += PROJECT_VARIABLES.values()
    for variable in overridden:
        os.environ.pop(variable, None)


def _greet_wandb(run: Any, held: int) -> int:
    """Say where a run of wandb is; return the place of the last row that its server has."""
    run.define_metric("*", step_metric="step")
    folder = Path(run.settings.wandb_dir)
    if run.offline:
        parts = f"{shlex.quote(str(folder))}/offline-*"  # one by one: a sync of all ends at a torn one
        why = "for no login was found (wandb login), or WANDB_MODE asks for it"
        log.info(f'wandb: offline, {why}. To send the curves later: for part in {parts}; do wandb sync "$part"; done')
    elif run.url:
        log.info(f"wandb: {run.url}")
        for path in folder.glob(f"offline-*/run-{run.id}.wandb"):  # what they have is sent from metrics.jsonl
            path.with_suffix(".wandb.synced").touch()
        return run.step - 1
    return held
