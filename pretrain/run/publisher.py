"""A run's pushes to the Hub: model, card, metrics and, as hub_strategy says, checkpoints; by the main process."""

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pretrain.base import files, layout, paths
from pretrain.base.errors import BadInput
from pretrain.hub import fetch, push
from pretrain.hub.model_card import metadata, model_card
from pretrain.machine.facts import Facts
from pretrain.recipe import keys
from pretrain.recipe.rules import counted
from pretrain.run import checkpoint

log = logging.getLogger(__name__)

PENDING = "hub"  # in the run folder: pushes to send


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
    """Stages a push on disk when its checkpoint is there, and sends it beside training.

    Args:
        repo_id: where to; None = nowhere.
        facts: for the model card.
        described: the files that describe a model beside its weights, by name.
    """

    def __init__(self, recipe: keys.Recipe, repo_id: str | None, facts: Facts, described: Mapping[str, str]):
        self._recipe, self._repo_id, self._facts, self._described = recipe, repo_id, facts, described
        self._run_dir, self._pushes = recipe.saving.run_dir, 0
        self._pusher = push.Pusher(self._run_dir / PENDING) if repo_id else None

    def saved(self, path: Path) -> None:
        """Stage the push of a checkpoint before the run's end; called beside training."""
        if self._pusher and self._recipe.hub.hub_strategy != "end":
            step = checkpoint.step_of(path)
            self._stage(step, {**self._described, "model.safetensors": path / checkpoint.MODEL}, step)

    def finished(self, step: int, weights_step: int) -> None:
        """Stage the run's last push: what ``model/`` holds after ``step``, the weights of ``weights_step``."""
        if self._pusher:
            self._stage(
                step, {path.name: path for path in (self._run_dir / layout.MODEL_FOLDER).iterdir()}, weights_step
            )

    def wait(self, seconds: float, given_up: Callable[[], bool]) -> None:
        """Wait for the Hub; what is not sent stays where it is."""
        if not self._pusher:
            return
        until, left = time.monotonic() + seconds, self._pusher.close(1)
        if left:
            log.info(f"hub      {counted(left, 'push', 'pushes')} to go; Ctrl-C leaves them for --push_pending")
        while left and self._pusher.sending and time.monotonic() < until and not given_up():
            left = self._pusher.close(1)
        if left:
            waiting = f"{counted(left, 'push', 'pushes')} to send in {self._run_dir / PENDING}"
            log.info(f"hub      {waiting}; the command: python train.py --push_pending {paths.quoted(self._run_dir)}")
        elif self._pushes:
            log.info(f"hub      all pushes are in {self._repo_id}")

    def _stage(self, step: int, model_files: Mapping[str, Path | str], weights_step: int) -> None:
        """Stage a push: ``model_files``, what describes it and, as hub_strategy says, its checkpoint."""
        recipe, run_dir = self._recipe, self._run_dir
        assert self._pusher and self._repo_id  # only a run that pushes comes here
        try:
            staged = {name: file for name, file in model_files.items() if push.ALLOWED.fullmatch(name)}
            rows = [row for row in layout.read_metrics(run_dir / layout.METRICS) if row["step"] <= step]
            staged["README.md"] = model_card(self._repo_id, step, rows, recipe, self._facts, weights_step)
            staged[layout.METRICS] = "".join(files.to_json(row) + "\n" for row in rows)
            staged["recipe.yaml"] = keys.public_yaml(recipe)
            if (run_dir / "curves.png").is_file():
                staged["curves.png"] = run_dir / "curves.png"
            path = recipe.saving.checkpoints / layout.step_name(step)
            places = {"checkpoint": "last-checkpoint", "all_checkpoints": f"checkpoints/{path.name}"}
            if (within := places.get(recipe.hub.hub_strategy)) and path.is_dir():
                staged |= {f"{within}/{file.name}": file for file in path.iterdir()}
            self._pusher.add(
                step,
                repo_id=self._repo_id,
                private=recipe.hub.hub_private_repo,
                title=f"{recipe.saving.name}, step {step}: {_losses_at(step, rows)}",
                files=staged,
            )
            self._pushes += 1
        except Exception as error:  # no error of a push ends a run
            log.error(f"no push of step {step}: {type(error).__name__}: {error}. The run continues")


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
    begun = checkpoint.list_checkpoints(recipe.saving.checkpoints) or (run_dir / layout.MODEL_FOLDER).is_dir()
    repo_id, note = push.check(
        recipe.hub.hub_model_id or recipe.saving.name,
        private=recipe.hub.hub_private_repo,
        fresh=not begun and not fetch.is_address(recipe.saving.resume_from_checkpoint),
        card=f"---\n{metadata(recipe)}\n---\n",
    )
    if note:
        log.warning(f"hub      {note}")
    return repo_id


def push_pending(run_dir: Path) -> int:
    """Send what waits in a run folder; return 0 when nothing is left, else 1."""
    if not run_dir.is_dir():
        raise BadInput(f"--push_pending {run_dir}: no such run folder")
    return 1 if push.push_pending(run_dir / PENDING) else 0
