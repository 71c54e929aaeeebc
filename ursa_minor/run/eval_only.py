"""``--eval_only``: score a checkpoint, or the model that a recipe begins from, and write nothing."""

import math
from collections.abc import Mapping, Sequence

from accelerate import Accelerator
from transformers import PreTrainedModel

from ursa_minor.base import files
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
from ursa_minor.run.resume import begins_at, find_checkpoint


def check_has_weights(recipe: keys.Recipe, *, fetched: bool = False) -> None:
    """Raise BadInput where neither ``init_from`` nor a checkpoint here has weights to score.

    Args:
        fetched: what is on the Hub is here by now; else a run that resumes from there passes.
    """
    saving = recipe.saving
    here = (
        recipe.model.init_from
        or begins_at(saving)
        or checkpoint.list_checkpoints(saving.checkpoints)
    )
    if not here and (fetched or not pull.is_address(saving.resume_from_checkpoint)):
        if (saving.run_dir / MODEL_FOLDER).is_dir():
            raise BadInput(
                f"eval_only: {saving.run_dir} contains no checkpoint; score its model: --init_from {saving.run_dir}"
            )
        raise BadInput(
            f"eval_only: {saving.run_dir} holds no checkpoint; train first, or give --init_from MODEL"
        )


def evaluate(recipe: keys.Recipe, reader_argv: Sequence[str]) -> str:
    """Evaluate the run's newest checkpoint, or ``init_from``, and write nothing.

    Args:
        recipe: a complete recipe.
        reader_argv: flags with which prepare_data.py reads the same recipe.

    Returns:
        The losses and scores as a line of JSON.

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
        accelerator.end_training()  # not after an error: it would wait for processes that are lost
    return line


def score(
    recipe: keys.Recipe,
    corpus: Corpus,
    tests: Mapping[Task, EncodedTask],
    model: PreTrainedModel,
    accelerator: Accelerator,
) -> str:
    """Return the losses and scores of the run's newest checkpoint, or of ``init_from``, as a JSON line.

    Raises:
        BadInput: the model's loss, or a log-likelihood of a task's item, is not finite.
    """
    begun_from = recipe.model.init_from
    path = (
        None if begun_from else begins_at(recipe.saving) or find_checkpoint(recipe, accelerator)[0]
    )
    check_has_weights(recipe, fetched=True)
    if path is not None:
        then = checkpoint.read_state(path)["science"]
        begun = {name: then[name] for name in vars(recipe.model) if name in then}
        # How it was trained changes no score.
        loading.check_same_hyperparameters(path, keys.hyperparameters(recipe) | begun, recipe)
        checkpoint.load_weights(path, model)
    auto = recipe.batch.per_device_train_batch_size == "auto"
    free_bytes = hardware.free_memory_bytes(accelerator.device, accelerator.num_processes)
    # What trains fits here, too.
    ceiling = propose_micro_batch(recipe, free_bytes, accelerator) if auto else None
    plan = make_plan(recipe, accelerator.num_processes, ceiling)
    evaluator = Evaluator(
        recipe, corpus, tests, FullModel(model, recipe.model, accelerator.device), accelerator
    )
    loss = evaluator.loss("validation", plan.per_device_train_batch_size)
    if loss is not None and not math.isfinite(loss["loss"]):
        raise not_finite("the validation split", loss["loss"])
    results = {"eval": loss}
    for task in tests:
        results[task.name] = evaluator.score(task)

    line: dict[str, object] = {"model": begun_from or str(path)}
    for prefix, result in results.items():
        assert result is not None  # nothing stops this evaluator
        for name, value in result.items():
            line[f"{prefix}/{name}"] = value
    return files.to_json(line)
