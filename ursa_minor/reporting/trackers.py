"""Report a run's metrics and samples to the trackers in ``report_to``, with Accelerate's classes.

metrics.jsonl contains all metrics, and a tracker has a copy. A tracker never ends a run. One that
raises an exception is disabled with a warning, and one that does not answer ends with its own
timeout.
"""

import contextlib
import html
import io
import logging
import os
import shlex
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from ursa_minor.base import files, run_files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.redaction import one_line
from ursa_minor.base.signals import SIGNALS
from ursa_minor.recipe import keys, loading

log = logging.getLogger(__name__)

# The versions that are tested. Only these trackers get samples.
TESTED = {
    "wandb": "wandb==0.31.0",
    "tensorboard": "tensorboard==2.21.0",
    "trackio": "trackio==0.43.0",
}
STDIN = 0  # file descriptor

# Environment variables that replace the default of project_name, run_name and the run's id.
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

# Timeouts for trackers that otherwise wait for a silent server longer than other processes wait for
# this one (ddp_timeout): wandb forever at the end of a run, MLflow for 20 minutes per call.
TIMEOUT_VARIABLES = {
    "wandb": {"WANDB_FINISH_TIMEOUT": "50"},  # seconds
    "mlflow": {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5"},
}

Result = TypeVar("Result")


def check(names: list[str]) -> None:
    """Raise BadInput for a tracker whose package is not installed."""
    installed = [str(name) for name in get_available_trackers()]
    problems = []
    for name in names:
        if name not in installed:
            package = TESTED.get(name, name)
            problems.append(
                f"report_to = {name}: the package is not installed. "
                f"Install it (pip install {package}), or remove {name} from report_to"
            )
    if problems:
        raise BadInput(problems)


def position_after(position: int, step: int) -> int:
    """Return the position of a row in the sequence of all rows that a tracker receives.

    Positions increase along metrics.jsonl. A row has the same position however often the run is
    resumed, so a tracker never receives it twice.

    Args:
        position: the position of the row before, or -1.
        step: the step of the row.
    """
    return max(position + 1, 1000 * step)


@dataclass
class SavedTrackers:
    """Contents of trackers.json in the run folder.

    Attributes:
        ids: the run's id in each tracker that needs one to continue the run.
        position: the position of the last row that was sent ("place" in the file).
        behind: for each tracker that was disabled, the position of the last row that it has.
    """

    ids: dict[str, str]
    position: int = -1
    behind: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "SavedTrackers":
        """Return the contents of the file, or no ids if there is none."""
        if not path.is_file():
            return cls(ids={})
        values = files.read_json(path)
        position = values.pop("place", -1)
        behind = values.pop("behind", {})
        return cls(ids=values, position=position, behind=behind)

    def write(self, path: Path) -> None:
        """Replace the file."""
        files.write_json(path, self.ids | {"place": self.position, "behind": self.behind})


@dataclass
class OpenTracker:
    """A tracker that receives rows.

    Attributes:
        tracker: Accelerate's tracker, started.
        last_position: the position of the last row that the tracker already has.
        run_id: the id that continues the run in the tracker, or None if it cannot be continued.
    """

    tracker: GeneralTracker
    last_position: int
    run_id: str | None = None


class Trackers:
    """The trackers of a run, on its main process.

    Args:
        recipe: the recipe of the run.
        first_step: the step at which this process starts.
        ids: ids from the checkpoint; those in the run folder take precedence.
        rows: the rows of metrics.jsonl before ``first_step``.
        sent: the position of the last row of metrics.jsonl, including rows that this process will
            write again.

    Attributes:
        ids: the run's id in each tracker, for the next checkpoint.
    """

    def __init__(
        self,
        recipe: keys.Recipe,
        first_step: int,
        *,
        ids: dict[str, str],
        rows: Iterable[dict],
        sent: int,
    ) -> None:
        names = recipe.tracking.names
        run_dir = recipe.saving.run_dir
        path = run_dir / run_files.TRACKER_IDS
        saved = SavedTrackers.read(path)
        self.ids = ids | saved.ids
        self._open: dict[str, OpenTracker] = {}
        self._position = -1
        if not (names or self.ids or path.is_file()):
            return

        # A tracker that knows this run has its rows up to a position. Other trackers have none.
        sent = max(sent, saved.position)
        last_positions = {name: saved.behind.get(name, sent) for name in self.ids}
        if (run_dir / run_files.TENSORBOARD).is_dir():
            last_positions["tensorboard"] = saved.behind.get("tensorboard", sent)

        self._choose_ids(recipe, last_positions)
        self._start_all(recipe, first_step, last_positions)

        # A tracker that is off (disabled, failed to start, not in report_to) receives the missed
        # rows when a later process starts it. The file is written before any row is sent, because
        # the run may be killed.
        for name in list(self.ids):
            if name not in last_positions and name not in self._open:
                del self.ids[name]
        behind = {}
        for name, position in last_positions.items():
            if name not in self._open:
                behind[name] = position
        SavedTrackers(self.ids, sent, behind).write(path)
        if self._open:
            for row in rows:
                self.log(row["step"], row)

    def _choose_ids(self, recipe: keys.Recipe, last_positions: dict[str, int]) -> None:
        """Add the ids of runs that the environment or this module chooses.

        Args:
            recipe: the recipe of the run.
            last_positions: the position of the last row that each tracker has. A tracker is
                removed from it if the environment names another run of the tracker.
        """
        names = recipe.tracking.names
        for name, variable in ID_VARIABLES.items():
            run_id = os.environ.get(variable)
            if name in names and run_id and run_id != self.ids.get(name):
                self.ids[name] = run_id
                last_positions.pop(name, None)
        if "wandb" in names:
            self.ids.setdefault("wandb", uuid.uuid4().hex[:8])
        if "trackio" in names:
            self.ids.setdefault("trackio", f"{recipe.saving.name}-{uuid.uuid4().hex[:4]}")

    def _start_all(
        self, recipe: keys.Recipe, first_step: int, last_positions: Mapping[str, int]
    ) -> None:
        """Start the trackers in ``report_to``. One that fails or is disabled is left out."""
        for name in recipe.tracking.names:
            run_id = self.ids.get(name)
            last_position = last_positions.get(name, -1)
            started = self._guarded(name, _start, name, recipe, run_id, first_step, last_position)
            if started is None:
                continue
            self._open[name] = started
            if started.run_id:
                self.ids[name] = started.run_id

    def log(self, step: int, row: dict) -> None:
        """Send a row to each tracker that does not have it.

        Args:
            step: the step of the row.
            row: a row of metrics.jsonl, or ``{"samples": [(prompt, text), ...]}``.
        """
        self._position = position_after(self._position, step)
        for name, opened in list(self._open.items()):  # _guarded may remove one
            if "samples" in row and name not in TESTED:
                continue
            if self._position > opened.last_position:
                self._guarded(name, _send, name, opened.tracker, step, self._position, row)

    def close(self) -> None:
        """Wait until each tracker has sent its remaining rows."""
        for name, opened in list(self._open.items()):
            self._guarded(name, opened.tracker.finish)

    def _guarded(self, name: str, call: Callable[..., Result], *args: Any) -> Result | None:
        """Call a tracker. If it raises an exception, disable it with a warning."""
        try:
            with without_stdin(), kept_signal_handlers(), contextlib.redirect_stdout(io.StringIO()):
                return call(*args)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit does not end the run either
            self._open.pop(name, None)
            reason = one_line(f"{type(error).__name__}: {error}").rstrip(".: ")
            log.warning(
                f"{name}: disabled: {reason}. "
                f"The run continues, and metrics.jsonl contains all metrics"
            )
            return None


@contextlib.contextmanager
def without_stdin() -> Iterator[None]:
    """Replace the standard input of this process by /dev/null inside the block.

    A tracker that asks the user a question then fails, instead of waiting for an answer. The same
    is true of programs that it starts, but not of getpass and others that open /dev/tty.
    """
    if sys.stdin is None:  # it is closed, and its descriptor may belong to another file
        yield
        return
    saved_stdin = os.dup(STDIN)
    try:
        with open(os.devnull) as empty:
            os.dup2(empty.fileno(), STDIN)
        yield
    finally:
        os.dup2(saved_stdin, STDIN)
        os.close(saved_stdin)


@contextlib.contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers after the block, because some trackers replace them."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None if it was not installed from Python
                signal.signal(number, handler)


def _send(name: str, tracker: GeneralTracker, step: int, position: int, row: dict) -> None:
    """Send a row to a tracker.

    Only numbers are sent, because MLflow refuses a row with a text or a missing value.
    """
    if "samples" in row:
        values = {"samples": _samples_page(name, row["samples"])}
    else:
        values = {}
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                values[key] = value
    if name == "wandb":
        # The steps of wandb cannot repeat, so the position is its step, and the step is a metric.
        tracker.log({"step": step} | values, step=position, commit=True)
    else:
        tracker.log(values, step=step)


def _samples_page(name: str, samples: list[tuple[str, str]]) -> Any:
    """Return samples as HTML for a tracker, because it would interpret plain text as Markdown."""
    page = ""
    for prompt, text in samples:
        page += f'<pre style="white-space: pre-wrap">{html.escape(prompt + text)}</pre>'
    if name == "tensorboard":
        return page
    return import_module(name).Html(page)


def _start(
    name: str, recipe: keys.Recipe, run_id: str | None, first_step: int, last_position: int
) -> OpenTracker | None:
    """Start or continue a run in a tracker.

    Args:
        name: a name in ``report_to``.
        recipe: the recipe of the run.
        run_id: the run's id in the tracker, or None if the tracker chooses it.
        first_step: the step at which this process starts.
        last_position: the position of the last row that was sent to the tracker.

    Returns:
        The tracker, or None if it is disabled.
    """
    for variable, value in TIMEOUT_VARIABLES.get(name, {}).items():
        os.environ.setdefault(variable, value)
    if name == "wandb":
        return _start_wandb(recipe, run_id, last_position)

    project = _project(name, recipe)
    config = keys.redacted(recipe)
    options: dict[str, Any] = {}
    if name == "tensorboard":
        # TensorBoard hides the points from first_step on (purge_step), and they are sent again.
        # No config is stored, because Accelerate would create a second run for it.
        project = "tensorboard"  # the folder
        options = {"purge_step": first_step}
        last_position = min(last_position, 1000 * first_step - 1)
    elif name == "trackio":
        options = {
            "name": run_id,
            "resume": "allow",
            "private": True,
            "embed": False,
            "config": config,
            "auto_log_gpu": False,
            "auto_log_cpu": False,
        }
    elif name == "mlflow":
        options = {
            "run_id": run_id,
            "run_name": _run_name(name, recipe),
            "tags": {"mlflow.user": "", "mlflow.source.name": ""},
        }
    elif name == "dvclive":
        options = {"save_dvc_exp": False}  # True, the default, commits to the user's repository
    tracker = _create(name, project, recipe, options)
    if name not in TESTED and run_id is None:  # MLflow accepts a config once
        tracker.store_init_configuration(config)
    if name == "mlflow":  # MLflow chooses the id of a new run
        run_id = tracker.tracker.info.run_id
    return OpenTracker(tracker, last_position, run_id)


def _start_wandb(recipe: keys.Recipe, run_id: str | None, last_position: int) -> OpenTracker | None:
    """Start or continue a run of wandb. Without a login it is offline, and does not ask for one.

    Args:
        recipe: the recipe of the run.
        run_id: the id of the run in wandb, or None for a new run.
        last_position: position of the last row that wandb has. If the run is online, the answer of
            the server replaces it.

    Returns:
        The tracker, or None if WANDB_MODE disables wandb.
    """
    wandb = import_module("wandb")
    mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
    if mode == "disabled":
        log.info(
            "wandb: disabled by WANDB_MODE. "
            "When the run resumes with wandb enabled, it sends the missed metrics"
        )
        return None
    offline_reason = "WANDB_MODE is offline"
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        mode = "offline"
        offline_reason = "there is no login (wandb login)"

    settings = wandb.Settings(
        silent=True,
        console="off",
        symlink=False,
        x_disable_meta=True,  # omits the command line, which may contain a URL with a password
    )
    options = {
        "id": run_id,
        "name": _run_name("wandb", recipe),
        "resume": "allow",
        "dir": os.environ.get("WANDB_DIR") or recipe.saving.run_dir,
        "mode": mode,
        "config": keys.redacted(recipe),
        "settings": settings,
    }
    if recipe.tracking.tags:  # otherwise wandb reads WANDB_TAGS
        options["tags"] = tuple(recipe.tracking.tags)
    tracker = _create("wandb", _project("wandb", recipe), recipe, options)

    run = tracker.tracker
    run.define_metric("*", step_metric="step")
    folder = Path(run.settings.wandb_dir)
    if run.offline:
        # One command per part, because wandb sync stops at a part that is incomplete.
        parts = f"{shlex.quote(str(folder))}/offline-*"
        log.info(
            f"wandb: offline, because {offline_reason}. "
            f'To upload the run later: for part in {parts}; do wandb sync "$part"; done'
        )
    elif run.url:
        log.info(f"wandb: {run.url}")
        # `_send` uses the position of a row as wandb's step. run.step is the step of the next row.
        last_position = run.step - 1
        for part in folder.glob(f"offline-*/run-{run.id}.wandb"):
            # The rows of this part are sent from metrics.jsonl. This file marks the part as
            # uploaded, so that `wandb sync` skips it.
            part.with_suffix(".wandb.synced").touch()
    return OpenTracker(tracker, last_position, run_id)


def _create(
    name: str, project: str, recipe: keys.Recipe, options: dict[str, Any]
) -> GeneralTracker:
    """Create and start Accelerate's tracker of this name."""
    tracker_class = LOGGER_TYPE_TO_CLASS[name]
    if tracker_class.requires_logging_directory:
        tracker = tracker_class(project, recipe.saving.run_dir, **options)
    else:
        tracker = tracker_class(project, **options)
    tracker.start()
    return tracker


def _project(name: str, recipe: keys.Recipe) -> str:
    """Return the name of the project in a tracker.

    A variable of the environment applies if the recipe has the default.
    """
    project = recipe.tracking.project_name
    variable = PROJECT_VARIABLES.get(name)
    if variable and project == keys.FIELDS["project_name"].default:
        return os.environ.get(variable) or project
    return project


def _run_name(name: str, recipe: keys.Recipe) -> str:
    """Return the name of the run in a tracker.

    ``drop_overridden`` has removed the variable from the environment if the recipe has priority.
    """
    return os.environ.get(NAME_VARIABLES[name]) or recipe.saving.name


def drop_overridden(recipe: keys.Recipe, argv: Sequence[str]) -> None:
    """Remove variables of trackers from the environment if a flag or the recipe has priority.

    Trackers read the environment themselves, and some of them prefer it to their arguments.

    Args:
        recipe: the recipe of the run.
        argv: the flags of the command line, in the form of ``reading.argv_of``.
    """
    flags = {}
    for argument in argv:
        if argument.startswith("--") and "=" in argument:
            name, _, value = argument.removeprefix("--").partition("=")
            flags[name] = value
    recipe_file = Path(flags.get("recipe", loading.DEFAULT_RECIPE))
    is_run_recipe = recipe_file.name == run_files.RECIPE
    has_default_name = is_run_recipe or recipe.saving.name == recipe_file.stem
    has_default_project = recipe.tracking.project_name == keys.FIELDS["project_name"].default

    overridden: list[str] = []
    if "run_name" in flags or not has_default_name:
        overridden += NAME_VARIABLES.values()
    if "project_name" in flags or not has_default_project:
        overridden += PROJECT_VARIABLES.values()
    for variable in overridden:
        os.environ.pop(variable, None)
