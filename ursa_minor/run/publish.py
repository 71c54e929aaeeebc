"""Push a run to the Hub: model, card, metrics and, depending on hub_strategy, checkpoints."""

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ursa_minor.base import checkpoint_files, files, paths, run_files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import pluralize
from ursa_minor.hub import pull, push
from ursa_minor.hub.model_card import metadata, model_card
from ursa_minor.machine.run_info import RunInfo
from ursa_minor.recipe import keys

log = logging.getLogger(__name__)


def push_seconds(stopped_by: signal.Signals | None) -> int:
    """Return the number of seconds for which a run waits for its pushes at its end.

    Args:
        stopped_by: the signal that stopped the run, or None if it has finished.
    """
    if stopped_by is None:
        return 600
    if stopped_by in (signal.SIGINT, signal.SIGHUP):  # sent by a user, who is waiting
        return 5
    # Clouds, schedulers and launchers usually kill a process 30 s after a SIGTERM.
    return 20


class Publisher:
    """Pushes a run to the Hub in the background. Only the main process pushes.

    Args:
        recipe: the run's recipe.
        repo_id: the repository, or None if the run pushes nothing.
        run_info: information on the run for the model card.
    """

    def __init__(self, recipe: keys.Recipe, repo_id: str | None, run_info: RunInfo):
        self._recipe = recipe
        self._repo_id = repo_id
        self._run_info = run_info
        self._run_dir = recipe.saving.run_dir
        self._num_submitted = 0
        self._pusher: push.PushQueue | None = None
        if repo_id:
            self._pusher = push.PushQueue(self._run_dir / run_files.PENDING)
            self._pusher.start()

    def saved(self, path: Path) -> None:
        """Push a checkpoint before the end of the run. A background thread calls it."""
        if self._pusher and self._recipe.hub.hub_strategy != "end":
            step = checkpoint_files.step_of(path)
            self._submit(step, path, weights_step=step)

    def finished(self, step: int, weights_step: int) -> None:
        """Push ``model/`` at the end of the run.

        Args:
            step: the last step.
            weights_step: the step of the weights in ``model/``, the best or the last.
        """
        if self._pusher:
            self._submit(step, self._run_dir / run_files.MODEL_FOLDER, weights_step)

    def wait(self, stopped_by: signal.Signals | None, give_up: Callable[[], bool]) -> None:
        """Wait until all pushes are sent. Those that are not sent in time stay in the run folder.

        Args:
            stopped_by: the signal that stopped the run, or None if it has finished.
            give_up: returns whether to stop waiting. It is called once a second.
        """
        if not self._pusher:
            return
        seconds = push_seconds(stopped_by)
        unsent = len(push.staged_pushes(self._pusher.pending))
        if unsent:
            pushes = pluralize(unsent, "push", "pushes")
            limit = f"{seconds} s"
            if stopped_by is None:
                limit = f"{seconds // 60} minutes (Ctrl-C ends the wait)"
            log.info(f"hub      {pushes} to send; the run waits for at most {limit}")
        unsent = self._pusher.wait(seconds, give_up)
        if unsent:
            pushes = pluralize(unsent, "push", "pushes")
            command = f"python train.py --push_pending {paths.quoted(self._run_dir)}"
            log.info(
                f"hub      {pushes} not sent, stored in {self._pusher.pending}. To send: {command}"
            )
        elif self._num_submitted:
            log.info(f"hub      all pushes are in {self._repo_id}")

    def _submit(self, step: int, model_folder: Path, weights_step: int) -> None:
        """Store a push in the run folder and send it in the background.

        An error is logged, and the run continues.

        Args:
            step: the step of the push.
            model_folder: ``model/`` or a checkpoint.
            weights_step: the step of the weights.
        """
        assert self._pusher and self._repo_id  # only called if the run pushes
        recipe = self._recipe
        try:
            rows = [
                row
                for row in run_files.read_metrics(self._run_dir / run_files.METRICS)
                if row["step"] <= step
            ]
            card = model_card(
                self._repo_id,
                step,
                rows,
                recipe,
                self._run_info,
                weights_step,
                prompt=run_files.read_first_prompt(self._run_dir / run_files.SAMPLES),
            )
            title = f"{recipe.saving.name}, step {step}: {_losses_at(step, rows)}"
            new_push = push.Push(
                step=step,
                repo_id=self._repo_id,
                private=recipe.hub.hub_private_repo,
                title=" ".join(title.split()),
                keep=recipe.hub.hub_strategy == "all_checkpoints",
                tokens_tag=run_files.tokens_name(step, recipe.batch.tokens_per_step),
            )
            self._pusher.submit(new_push, card, self._files_of(step, model_folder, rows))
            self._num_submitted += 1
        except Exception as error:  # an error of a push never ends a run
            log.error(
                f"step {step} was not pushed: {type(error).__name__}: {error}. The run continues"
            )

    def _files_of(
        self, step: int, model_folder: Path, rows: Sequence[Mapping]
    ) -> dict[str, Path | str]:
        """Return the files of a push by name: the path of a file, or its contents.

        Args:
            step: the step of the push.
            model_folder: ``model/`` or a checkpoint.
            rows: the rows of metrics.jsonl up to this step.
        """
        sources: dict[str, Path | str] = {}
        for file in model_folder.iterdir():
            if run_files.MODEL_FILE.fullmatch(file.name):
                sources[file.name] = file
        sources[run_files.METRICS] = "".join(files.to_json(row) + "\n" for row in rows)
        sources[run_files.RECIPE] = keys.redacted_yaml(self._recipe)
        curves = self._run_dir / run_files.CURVES
        if curves.is_file():
            sources[run_files.CURVES] = curves

        path = self._recipe.saving.checkpoints / run_files.step_name(step)
        folders = {
            "checkpoint": "last-checkpoint",
            "all_checkpoints": f"{run_files.CHECKPOINTS}/{path.name}",
        }
        strategy = self._recipe.hub.hub_strategy
        folder = folders.get(strategy)
        # last-checkpoint/ is only for checkpoints from which a run can be resumed.
        is_unsuitable = strategy == "checkpoint" and checkpoint_files.is_weights_only(path)
        if folder and path.is_dir() and not is_unsuitable:
            for file in _files_of_checkpoint(path):
                sources[f"{folder}/{file.relative_to(path).as_posix()}"] = file
        return sources


def _files_of_checkpoint(path: Path) -> list[Path]:
    """Return the files of a checkpoint that its manifest lists, and the manifest.

    Files that the user has added to the folder are not pushed.
    """
    manifest = files.read_json(path / run_files.MANIFEST)
    return [path / run_files.MANIFEST, *(path / name for name in manifest["files"])]


def _losses_at(step: int, rows: Sequence[Mapping]) -> str:
    """Return the losses of a step as text. Losses that are not finite are left out."""
    labels = {"train/loss": "train loss", "eval/loss": "validation loss"}
    losses = {}
    for row in rows:
        if row["step"] != step:
            continue
        for name, label in labels.items():
            if isinstance(row.get(name), (int, float)):
                losses[name] = f"{label} {row[name]:.4f}"
    return ", ".join(losses[name] for name in labels if name in losses)


def check(recipe: keys.Recipe) -> str | None:
    """Check that the run can push to the Hub, and return its repository.

    Returns:
        The repository's id on the first process; None on the others, or if the run does not push.

    Raises:
        BadInput: the repository cannot be used.
    """
    if not recipe.hub.push_to_hub or os.environ.get("RANK", "0") != "0":
        return None
    saving = recipe.saving
    has_checkpoint = bool(checkpoint_files.list_checkpoints(saving.checkpoints))
    has_model = (saving.run_dir / run_files.MODEL_FOLDER).is_dir()
    continues = has_checkpoint or has_model or pull.is_address(saving.resume_from_checkpoint)
    repo_id, note = push.check(
        recipe.hub.hub_model_id or saving.name,
        private=recipe.hub.hub_private_repo,
        fresh=not continues,
        card=f"---\n{metadata(recipe)}\n---\n",
    )
    if note:
        log.warning(f"hub      {note}")
    return repo_id


def push_pending(run_dir: Path) -> int:
    """Send the pushes that are stored in a run folder.

    Returns:
        The exit status: 0 if all were sent, else 1.

    Raises:
        BadInput: there is no such folder.
    """
    if not run_dir.is_dir():
        raise BadInput(
            f"--push_pending {run_dir}: this folder does not exist. Name a run folder, for example "
            f"runs/NAME"
        )
    num_left = push.push_pending(run_dir / run_files.PENDING)
    return 1 if num_left else 0
