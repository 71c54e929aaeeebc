"""Evaluate a checkpoint, or the model that ``init_from`` names, for ``--eval_only``."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedModel

from ursa_minor.base import checkpoint_files, files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import MODEL_FOLDER
from ursa_minor.base.stopping import raise_on_lost_peer
from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.data.loading.corpus import Corpus
from ursa_minor.evaluation.encoded_task import EncodedTask
from ursa_minor.evaluation.evaluator import Evaluator, encode_items, read_items
from ursa_minor.evaluation.likelihood import not_finite
from ursa_minor.evaluation.task import Task
from ursa_minor.hub import pull
from ursa_minor.machine import device as hardware
from ursa_minor.machine.accelerator import check_kernels, make_accelerator
from ursa_minor.machine.full_model import FullModel
from ursa_minor.machine.micro_batch import propose_micro_batch
from ursa_minor.model.build import build
from ursa_minor.recipe import keys, loading
from ursa_minor.recipe.batching import make_plan
from ursa_minor.run.resume import find_checkpoint, local_start


def check_has_weights(recipe: keys.Recipe, *, downloaded: bool = False) -> None:
    """Check that there are weights to evaluate: those of ``init_from`` or of a checkpoint.

    Args:
        recipe: the complete recipe.
        downloaded: whether a checkpoint on the Hub has been downloaded. Before that, a recipe that
            resumes from the Hub passes the check.

    Raises:
        BadInput: there are no weights.
    """
    saving = recipe.saving
    if recipe.model.init_from or local_start(saving):
        return
    if checkpoint_files.list_resume_points(saving.checkpoints):
        return
    if pull.is_address(saving.resume_from_checkpoint) and not downloaded:
        return
    if (saving.run_dir / MODEL_FOLDER).is_dir():
        raise BadInput(
            f"eval_only: {saving.run_dir} contains no checkpoint. To evaluate its model: "
            f"--init_from {saving.run_dir}"
        )
    raise BadInput(
        f"eval_only: {saving.run_dir} contains no checkpoint. Train first, or use --init_from MODEL"
    )


def evaluate(recipe: keys.Recipe, reader_argv: Sequence[str]) -> str:
    """Evaluate the run's newest checkpoint, or ``init_from``, and write nothing.

    Args:
        recipe: a complete recipe.
        reader_argv: the flags that make prepare_data.py read the same recipe.

    Returns:
        The losses and scores as one line of JSON.

    Raises:
        BadInput: there are no weights, or a loss or log-likelihood is not finite.
    """
    check_has_weights(recipe)
    device = hardware.this_device()
    check_kernels(device)
    accelerator = make_accelerator(device, recipe.machine)
    items = read_items(recipe.evaluation, accelerator)
    with raise_on_lost_peer(), Corpus(recipe, reader_argv) as corpus:
        tests = encode_items(items, corpus.tokenizer, recipe.model.sequence_length)
        model = build(recipe.model, eos_token_id=corpus.tokenizer.eos_token_id)
        line = score(recipe, corpus, tests, model.to(accelerator.device), accelerator)
        # After an error this is not called, because it would wait for lost processes.
        accelerator.end_training()
    return line


def score(
    recipe: keys.Recipe,
    corpus: Corpus,
    tests: Mapping[Task, EncodedTask],
    model: PreTrainedModel,
    accelerator: Accelerator,
) -> str:
    """Return the losses and scores of the run's newest checkpoint, or of ``init_from``, as JSON.

    Args:
        recipe: the complete recipe.
        corpus: the opened data.
        tests: the tasks on which the model is scored.
        model: the model, on the device; the weights of a checkpoint are loaded into it.
        accelerator: of this process.

    Raises:
        BadInput: the model's loss, or a log-likelihood of a task's item, is not finite.
    """
    path = None
    if not recipe.model.init_from:
        path = local_start(recipe.saving) or find_checkpoint(recipe, accelerator)[0]
    check_has_weights(recipe, downloaded=True)
    if path is not None:
        load_checkpoint(path, model, recipe)

    evaluator = Evaluator(
        recipe, corpus, tests, FullModel(model, recipe.model, accelerator.device), accelerator
    )
    loss = evaluator.loss("validation", micro_batch_size(recipe, accelerator))
    if loss is not None and not math.isfinite(loss["loss"]):
        raise not_finite("the validation split", loss["loss"])
    results = {"eval": loss}
    for task in tests:
        results[task.name] = evaluator.score(task)

    line: dict[str, object] = {"model": recipe.model.init_from or str(path)}
    for prefix, result in results.items():
        assert result is not None  # nothing stops this evaluator
        for name, value in result.items():
            line[f"{prefix}/{name}"] = value
    return files.to_json(line)


def load_checkpoint(path: Path, model: PreTrainedModel, recipe: keys.Recipe) -> None:
    """Load the weights of a checkpoint whose model is that of the recipe.

    Only the keys of the model's section must agree, because the others do not change a score.

    Raises:
        BadInput: the checkpoint is of another model.
    """
    saved = checkpoint.read_state(path)["science"]
    saved_model = {name: saved[name] for name in vars(recipe.model) if name in saved}
    before = keys.hyperparameters(recipe) | saved_model
    loading.check_same_hyperparameters(path, before, recipe)
    checkpoint.load_weights(path, model)


def micro_batch_size(recipe: keys.Recipe, accelerator: Accelerator) -> int:
    """Return how many sequences are evaluated at a time: as many as training would use."""
    ceiling = None
    if recipe.batch.per_device_train_batch_size == "auto":
        free_bytes = hardware.free_memory_bytes(accelerator.device, accelerator.num_processes)
        ceiling = propose_micro_batch(recipe, free_bytes, accelerator)
    plan = make_plan(recipe, accelerator.num_processes, ceiling)
    return plan.per_device_train_batch_size
