"""Models that others have trained: to train on (init_from), and to use."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.activations import NewGELUActivation

from ursa_minor.base import files, model_id
from ursa_minor.base.errors import BadInput, errno_of, first_line
from ursa_minor.base.wording import join_or
from ursa_minor.model.adapters import check_no_hub_adapter
from ursa_minor.model.architectures import ARCHITECTURES, padded
from ursa_minor.model.attention import CAUSAL
from ursa_minor.model.resolve import resolve_model
from ursa_minor.recipe import keys
from ursa_minor.recipe.rules import ineffective_flags


def complete(recipe: keys.Recipe) -> keys.Recipe:
    """Return the recipe with the keys of the model that it begins from, where it does not state them.

    Raises BadInput when ``init_from`` cannot be loaded, is of no architecture of ours, or differs from what is stated.
    """
    if recipe.model.init_from is None:
        return recipe
    config = _config(recipe.model.init_from, recipe.model)
    model_keys = ARCHITECTURES[config.model_type].model_keys(config)
    missing = {
        key: value for key, value in model_keys.items() if getattr(recipe.model, key) is None
    }
    completed = keys.replace(recipe, **missing)
    # Only now is the architecture known, and with it which keys have an effect.
    if errors := list(ineffective_flags(keys.to_dict(completed), flags=())):
        raise BadInput(f"init_from = {recipe.model.init_from}: {error}" for error in errors)
    return completed


def load_to_train(name: str, model: keys.Model) -> PreTrainedModel:
    """Load ``init_from`` (``name``) in fp32; its config is kept but for dropout, context and rows of the vocabulary.

    New rows begin at the mean of its own. Raises BadInput as ``complete`` does, and for weights that are not whole.
    """
    config = _config(name, model)
    architecture = ARCHITECTURES[config.model_type]
    rows, context = config.vocab_size, config.max_position_embeddings
    for key, value in architecture.training_config(model).items():
        setattr(config, key, value)
    options = {"dtype": torch.float32, "attn_implementation": CAUSAL, "config": config}
    made, unused = _load_whole(f"init_from = {name}", resolve_model(name), **options)
    # Old GPT-2s keep a buffer beside their weights.
    if beside := [key for key in unused if not key.endswith(".attn.masked_bias")]:
        raise BadInput(
            f"init_from = {name}: its weights do not match its config.json: it also has {beside[0]}"
        )
    embedding, head = made.get_input_embeddings(), made.get_output_embeddings()
    if config.tie_word_embeddings and head.weight is not embedding.weight:
        fix = 'which differ in its weights; write "tie_word_embeddings": false there'
        raise BadInput(f"init_from = {name}: its config.json ties the head to the embedding, {fix}")
    if model.vocab_size > rows:
        made.resize_token_embeddings(model.vocab_size, mean_resizing=False)
        with torch.no_grad():
            for part in (made.get_input_embeddings(), made.get_output_embeddings()):
                part.weight[rows:] = part.weight[:rows].mean(0)
    if architecture.positions and model.sequence_length < context:
        positions = (
            made.get_submodule(architecture.positions)
            .weight[: model.sequence_length]
            .detach()
            .clone()
        )
        made.set_submodule(
            architecture.positions, nn.Embedding.from_pretrained(positions, freeze=False)
        )
        setattr(made.config, architecture.config_names["sequence_length"], model.sequence_length)
    return made.train()


def _config(name: str, model: keys.Model) -> PreTrainedConfig:
    """Return the config of ``init_from`` (``name``); BadInput where training would silently make another model of it."""
    location = resolve_model(name, "init_from = ")
    check_no_hub_adapter(location, f"init_from = {name}")
    config = from_pretrained(f"init_from = {name}", AutoConfig, location)
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise BadInput(
            f"init_from = {name}: is a {config.model_type}; give a model of type {join_or([*ARCHITECTURES])}"
        )
    if getattr(config, "quantization_config", None):
        raise BadInput(
            f"init_from = {name}: its weights are quantized; give the model that it was made from"
        )
    problems = [
        f"{key} = {getattr(config, key)}: {architecture.label}'s is {values[0]}"
        for key, values in architecture.required.items()
        if getattr(config, key) not in values
    ]
    model_keys, rows, context = (
        architecture.model_keys(config),
        config.vocab_size,
        config.max_position_embeddings,
    )
    model_keys["intermediate_size"] = model_keys["intermediate_size"] or 4 * model_keys["n_embd"]
    for key, value in model_keys.items():
        stated = getattr(model, key)
        if key != "vocab_size" and stated not in (None, value):
            problems.append(
                f"{key} = {stated}, the model's is {value}; leave {key} out (--{key} none)"
            )
    if model.vocab_size is not None and model.vocab_size < rows:
        fix = f"use --vocab_size {padded(rows)}, or leave it out"
        problems.append(f"vocab_size = {model.vocab_size}: its vocabulary has {rows} rows; {fix}")
    if model.sequence_length > context:
        fix = f"use --sequence_length {context}"
        problems.append(
            f"sequence_length = {model.sequence_length}: its context is {context} tokens; {fix}"
        )
    if problems:
        raise BadInput(f"init_from = {name}: {problem}" for problem in problems)
    return config


def _load_whole(what: str, name: str, **options) -> tuple[PreTrainedModel, list[str]]:
    """Return a model and the names of the tensors beside it that it does not take.

    Raises BadInput where tensors are missing, which Transformers would fill with noise, or hold numbers that are none.
    """
    model, info = from_pretrained(
        what, AutoModelForCausalLM, name, output_loading_info=True, **options
    )
    if lacks := sorted(info["missing_keys"]):
        raise BadInput(
            f"{what}: its weights do not match its config.json: it lacks {lacks[0]}; give the whole model"
        )
    for key, tensor in model.named_parameters():
        if tensor.is_floating_point() and tensor.itemsize > 1 and not tensor.isfinite().all():
            raise BadInput(
                f"{what}: {key} holds values that are not finite; give a model that has not diverged"
            )
    return model, sorted(info["unexpected_keys"])


def from_pretrained(what: str, kind: Any, name: str, **options) -> Any:
    """Return what ``kind`` makes of a model's files.

    Raises BadInput for whatever is raised: the Hub client, the cache and the parsers each have their own kinds.
    """
    location, revision = model_id.parse(name, "model ")
    if revision is not None:
        options["revision"] = revision
    try:
        return kind.from_pretrained(location, trust_remote_code=False, **options)
    except Exception as error:
        if errno_of(error) in files.NO_MAPPING:
            fix = "the file system cannot map files into memory; copy the model to another one"
            raise BadInput(f"{what}: cannot be loaded: {fix}") from None
        raise BadInput(f"{what}: cannot be loaded: {first_line(error)}") from None


def load(name: str) -> PreTrainedModel:
    """Load any causal language model of Transformers, in the precision it was saved in, for use, not for training.

    Its GELU runs as one kernel. Raises BadInput when it cannot be loaded whole.
    """
    model, _ = _load_whole(f"--model {name}", name, dtype="auto")
    for part, module in list(model.named_modules()):
        if isinstance(module, NewGELUActivation):
            model.set_submodule(part, nn.GELU(approximate="tanh"))
    return model.eval()
