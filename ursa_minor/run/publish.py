"""A run's pushes to the Hub: model, card, metrics and, as hub_strategy says, checkpoints; by the main process."""

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ursa_minor.base import files, paths, run_files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import pluralize
from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.hub import pull, push
from ursa_minor.hub.model_card import metadata, model_card
from ursa_minor.machine.run_info import RunInfo
from ursa_minor.recipe import keys

log = logging.getLogger(__name__)


def push_seconds(stopped_by: signal.Signals | None) -> int:
    """Return for how many seconds a run waits for the Hub.

    Args:
        stopped_by: the signal that stopped the run; None if it has finished.
    """
    if stopped_by is None:
        return 600
    if stopped_by in (signal.SIGINT, signal.SIGHUP):  # sent by a user, who is waiting
        return 5
    return 20  # clouds, schedulers and launchers usually kill a process 30 s after a SIGTERM


class Publisher:
    """Push the model, its card and, as hub_strategy says, checkpoints of a run.

    Args:
        recipe: of the run.
        repo_id: the repository, or None if the run pushes nothing.
        facts: for the model card.
        described: the files that describe a model in addition to its weights, by name.
    """

    def __init__(
        self, recipe: keys.Recipe, repo_id: str | None, facts: RunInfo, described: Mapping[str, str]
    ):
        self._recipe = recipe
        self._repo_id = repo_id
        self._facts = facts
        self._described = described
        self._run_dir = recipe.saving.run_dir
        self._num_submitted = 0
        self._pusher: push.PushQueue | None = None
        if repo_id:
            self._pusher = push.PushQueue(self._run_dir / run_files.PENDING)
            self._pusher.start()

    def saved(self, path: Path) -> None:
        """Push a checkpoint before the end of the run. Called in the background of training."""
        if self._pusher and self._recipe.hub.hub_strategy != "end":
            step = checkpoint.step_of(path)
            self._submit(
                step, {**self._described, "model.safetensors": path / checkpoint.MODEL}, step
            )

    def finished(self, step: int, weights_step: int) -> None:
        """Push ``model/`` at the end of the run.

        Args:
            step: the last step.
            weights_step: the step of the weights in ``model/``, the best or the last.
        """
        if self._pusher:
            model_files = {
                path.name: path for path in (self._run_dir / run_files.MODEL_FOLDER).iterdir()
            }
            self._submit(step, model_files, weights_step)

    def wait(self, stopped_by: signal.Signals | None, give_up: Callable[[], bool]) -> None:
        """Wait for the Hub. What is not sent stays staged.

        Args:
            stopped_by: the signal that stopped the run, or None if it has finished.
            give_up: returns whether to end the wait; called once a second.
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
            log.info(f"hub      {pushes} to send in {self._pusher.pending}; the command: {command}")
        elif self._num_submitted:
            log.info(f"hub      all pushes are in {self._repo_id}")

    def _submit(self, step: int, model_files: Mapping[str, Path | str], weights_step: int) -> None:
        """Stage a push and send it in the background. An error is logged, and the run continues."""
        assert self._pusher and self._repo_id  # only called if the run pushes
        recipe = self._recipe
        try:
            rows = [
                row
                for row in run_files.read_metrics(self._run_dir / run_files.METRICS)
                if row["step"] <= step
            ]
            card = model_card(self._repo_id, step, rows, recipe, self._facts, weights_step)
            new_push = push.Push(
                step=step,
                repo_id=self._repo_id,
                private=recipe.hub.hub_private_repo,
                title=" ".join(
                    f"{recipe.saving.name}, step {step}: {_losses_at(step, rows)}".split()
                ),
                keep=recipe.hub.hub_strategy == "all_checkpoints",
            )
            self._pusher.submit(new_push, card, self._files_of(step, model_files, rows))
            self._num_submitted += 1
        except Exception as error:  # an error of a push never ends a run
            log.error(f"no push of step {step}: {type(error).__name__}: {error}. The run continues")

    def _files_of(
        self, step: int, model_files: Mapping[str, Path | str], rows: Sequence[Mapping]
    ) -> dict[str, Path | str]:
        """Return what a push contains, by name: a file or its text.

        Args:
            step: of the push.
            model_files: the files of the model. Those that may not be pushed are left out.
            rows: of metrics.jsonl up to this step.
        """
        sources = {name: file for name, file in model_files.items() if push.ALLOWED.fullmatch(name)}
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
        folder = folders.get(self._recipe.hub.hub_strategy)
        if folder and path.is_dir():
            for file in path.iterdir():
                sources[f"{folder}/{file.name}"] = file
        return sources


def _losses_at(step: int, rows: Sequence[Mapping]) -> str:
    """Return the losses of a step as a text, without those that were not finite."""
    names = {"train/loss": "train loss", "eval/loss": "validation loss"}
    losses = {}
    for row in rows:
        for name, words in names.items():
            if row["step"] == step and isinstance(row.get(name), (int, float)):
                losses[words] = f"{words} {row[name]:.4f}"
    return ", ".join(losses[words] for words in names.values() if words in losses)


def check(recipe: keys.Recipe) -> str | None:
    """Return the repository that the run pushes to, on the first process; None: it pushes nothing.

    Raises BadInput for what cannot work.
    """
    if not recipe.hub.push_to_hub or os.environ.get("RANK", "0") != "0":
        return None
    run_dir = recipe.saving.run_dir
    begun = (
        checkpoint.list_checkpoints(recipe.saving.checkpoints)
        or (run_dir / run_files.MODEL_FOLDER).is_dir()
    )
    repo_id, note = push.check(
        recipe.hub.hub_model_id or recipe.saving.name,
        private=recipe.hub.hub_private_repo,
        fresh=not begun and not pull.is_address(recipe.saving.resume_from_checkpoint),
        card=f"---\n{metadata(recipe)}\n---\n",
    )
    if note:
        log.warning(f"hub      {note}")
    return repo_id


def push_pending(run_dir: Path) -> int:
    """Send what waits in a run folder; return 0 when nothing is left, else 1."""
    if not run_dir.is_dir():
        raise BadInput(f"--push_pending {run_dir}: no such run folder")
    return 1 if push.push_pending(run_dir / run_files.PENDING) else 0
