"""Resuming from a checkpoint, and saving the next: which one, and what it holds beside the tensors."""

import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from pretrain.base.errors import BadInput
from pretrain.data.corpus import Corpus
from pretrain.hub import fetch
from pretrain.recipe import keys, reading
from pretrain.run import checkpoint
from pretrain.run.state import RunState

log = logging.getLogger(__name__)

STATED = ("step", "science", "data", "scaler", "threads")  # by each state.json


def begins_at(saving: keys.Saving) -> Path | None:
    """Return the checkpoint on this machine that a run is to begin from, if the recipe names one."""
    asked = saving.resume_from_checkpoint
    return None if asked in ("auto", "none") or fetch.is_address(asked) else Path(asked)


def find_checkpoint(recipe: keys.Recipe, accelerator: Accelerator) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to resume from, the same on all processes, and a line for each newer one that is damaged."""
    asked, folder = recipe.saving.resume_from_checkpoint, recipe.saving.checkpoints
    if asked == "none":
        return None, []
    found: list = [None, [], None]
    if accelerator.is_main_process:
        try:
            begin = begins_at(recipe.saving)
            found[:2] = checkpoint.find_from(folder, begin) if begin else checkpoint.find_newest(folder)
            if found[0] is None and fetch.is_address(asked):  # later starts of the same command resume from this folder
                log.info(f"hub      fetching {asked}")
                found[0] = fetch.fetch_checkpoint(asked, folder, recipe.saving.run_dir)
        except BadInput as error:
            found[2] = error.lines
    broadcast_object_list(found)
    if found[2]:
        raise BadInput(found[2])
    return found[0], found[1]


def read_state(path: Path) -> dict:
    """Return what a run's checkpoint holds beside the tensors. Raises BadInput where it is none, or another program's."""
    saved = checkpoint.read_state(path)
    if lacks := [name for name in STATED if name not in saved]:
        raise BadInput(f"{path}: its state.json has no {', '.join(lacks)}: it is no checkpoint of a run of train.py")
    return saved


def resume(
    recipe: keys.Recipe,
    corpus: Corpus,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
) -> tuple[RunState, list[str]]:
    """Load the newest checkpoint that verifies, if any; return how far the run is and what the user should know."""
    path, damaged = find_checkpoint(recipe, accelerator)
    notes = [f"skipped a damaged checkpoint: {line}" for line in damaged]
    if path is None:
        return RunState.begin(recipe.schedule), notes
    saved = read_state(path)
    reading.refuse_changed_science(path, saved["science"], recipe)  # a path may lead to another run
    corpus.refuse_other(path, saved["data"])
    checkpoint.load(path, model, optimizer)
    if accelerator.scaler is not None and saved["scaler"]:
        accelerator.scaler.load_state_dict(saved["scaler"])
    state = RunState.begin(recipe.schedule, saved)
    if path == begins_at(recipe.saving):
        state.origin = checkpoint.origin_of(path)
    notes.append(f"resumed from {path}")
    if state.step >= state.max_steps:
        notes.append(f"nothing is left to train: max_steps = {state.max_steps} is reached")
    if saved["threads"] != torch.get_num_threads():
        notes.append(f"note: it ran with {saved['threads']} threads; bits may differ with {torch.get_num_threads()}")
    return state, notes


class Checkpoints:
    """Saves a run's checkpoints beside training; leaving its block waits for the one that is being written.

    Args:
        model: the bare model of Transformers.
        saved: called with each checkpoint once it is on disk, beside training; must not raise.
    """

    def __init__(
        self,
        recipe: keys.Recipe,
        corpus: Corpus,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        accelerator: Accelerator,
        saved: Callable[[Path], None],
    ):
        self._recipe, self._corpus, self._accelerator = recipe, corpus, accelerator
        self._tensors = model, optimizer
        self._folder = recipe.saving.checkpoints
        self._saver = checkpoint.Saver(
            self._folder, is_main=accelerator.is_main_process, keep=recipe.saving.save_total_limit, saved=saved
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error) -> None:
        self._saver.__exit__(*error)

    def prepare(self) -> None:
        """Make the memory of the next copies ready, beside training; after an update."""
        self._saver.prepare(*self._tensors)

    def save_alone(self, state: RunState, first_step: int) -> None:
        """Save on this process only, where it can and something was trained; the others may be in an exchange."""
        accelerator = self._accelerator
        sharded = accelerator.is_fsdp2 or self._recipe.optimizer.shard_optimizer
        if state.step > first_step and not (sharded and accelerator.num_processes > 1):
            self.save(state, alone=True)

    def save(self, state: RunState, *, alone: bool = False) -> None:
        """Begin to save, on all processes; a full disk is logged and survived, for the older checkpoints still stand."""
        accelerator, recipe = self._accelerator, self._recipe
        beside = {
            **state.saved(),
            "tokens": state.step * recipe.batch.tokens_per_step,
            "scaler": accelerator.scaler.state_dict() if accelerator.scaler else None,
            "science": keys.fixed(recipe),
            "data": self._corpus.contents(),
            "threads": torch.get_num_threads(),
            "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        }
        self._saver.save(state.step, *self._tensors, beside, alone=alone)

    def oldest_step(self) -> int:
        """Return the step of the oldest checkpoint that is kept: no resumed run begins before it."""
        kept = checkpoint.list_checkpoints(self._folder)
        return checkpoint.step_of(kept[-1]) if kept else 0

    def finish(self) -> None:
        """Wait until what was begun is on disk."""
        self._saver.finish()
