"""Load pretrained models: to initialize a run (``init_from``), and to evaluate or export them."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.activations import NewGELUActivation

from ursa_minor.base import files, model_id
from ursa_minor.base.errors import BadInput, errno_of, first_line
from ursa_minor.base.wording import join_or
from ursa_minor.model.adapters import check_no_hub_adapter
from ursa_minor.model.architectures import ARCHITECTURES, Architecture, padded_vocab_size
from ursa_minor.model.attention import CAUSAL
from ursa_minor.model.resolve import resolve_model
from ursa_minor.recipe import keys
from ursa_minor.recipe.rules import ineffective_flags

# Buffer of older GPT-2 checkpoints in Transformers. It contains no weights.
GPT2_BUFFER = ".attn.masked_bias"


def complete(recipe: keys.Recipe) -> keys.Recipe:
    """Return the recipe with the model keys that it leaves out taken from its ``init_from``.

    A recipe without ``init_from`` is returned unchanged.

    Raises:
        BadInput: ``init_from`` cannot be loaded, its architecture is not supported, or it differs
            from the model keys of the recipe.
    """
    name = recipe.model.init_from
    if name is None:
        return recipe
    config = _config(name, recipe.model)
    model_keys = ARCHITECTURES[config.model_type].model_keys(config)
    missing = {}
    for key, value in model_keys.items():
        if getattr(recipe.model, key) is None:
            missing[key] = value
    completed = keys.replace(recipe, **missing)
    # The architecture is known only now, and with it the keys that have an effect.
    errors = list(ineffective_flags(keys.to_dict(completed), flags=()))
    if errors:
        raise BadInput(f"init_from = {name}: {error}" for error in errors)
    return completed


def load_to_train(name: str, model: keys.Model) -> PreTrainedModel:
    """Load the model ``name`` (``init_from``) in fp32 for training.

    The model keeps its config, except for dropout, the context length, the size of the vocabulary,
    and names of functions that have a faster implementation. New rows of the vocabulary are the
    mean of the existing ones.

    Raises:
        BadInput: as ``complete``, and if weights are missing, superfluous, NaN or infinite.
    """
    option = f"init_from = {name}"
    config = _config(name, model)
    architecture = ARCHITECTURES[config.model_type]
    training_config = architecture.training_config(model)
    for key in architecture.in_training:
        if getattr(config, key) != architecture.required[key][0]:
            del training_config[key]  # another function, which has no faster implementation
    for key, value in training_config.items():
        setattr(config, key, value)
    pretrained, unused = _load_complete(
        option,
        resolve_model(name),
        dtype=torch.float32,
        attn_implementation=CAUSAL,
        config=config,
    )
    superfluous = [tensor for tensor in unused if not tensor.endswith(GPT2_BUFFER)]
    if superfluous:
        raise BadInput(
            f"{option}: the weights contain {superfluous[0]}, which the model of config.json does "
            f"not have. Download the model again, so that its files belong together"
        )
    embedding = pretrained.get_input_embeddings()
    head = pretrained.get_output_embeddings()
    if config.tie_word_embeddings and head.weight is not embedding.weight:
        raise BadInput(
            f"{option}: config.json has tie_word_embeddings = true, but the output layer and the "
            f"embedding have different weights. Copy the model into a folder of your own, set "
            f"tie_word_embeddings to false in its config.json, and use that folder"
        )

    assert model.vocab_size is not None
    if model.vocab_size > config.vocab_size:
        _add_vocabulary_rows(pretrained, model.vocab_size)
    if architecture.positions and model.sequence_length < config.max_position_embeddings:
        _shorten_positions(pretrained, architecture, model.sequence_length)
    return pretrained.train()


def _add_vocabulary_rows(model: PreTrainedModel, vocab_size: int) -> None:
    """Enlarge embedding and head in place. The new rows are the mean of the old ones."""
    old_rows = model.config.vocab_size
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight[old_rows:] = layer.weight[:old_rows].mean(0)


def _shorten_positions(
    model: PreTrainedModel, architecture: Architecture, sequence_length: int
) -> None:
    """Keep the first ``sequence_length`` learned position embeddings, in place."""
    assert architecture.positions is not None
    positions = model.get_submodule(architecture.positions)
    weight = positions.weight[:sequence_length].detach().clone()
    model.set_submodule(architecture.positions, nn.Embedding.from_pretrained(weight, freeze=False))
    setattr(model.config, architecture.config_names["sequence_length"], sequence_length)


def _config(name: str, model: keys.Model) -> PreTrainedConfig:
    """Return the config of the model ``name`` (``init_from``).

    Raises:
        BadInput: the model is missing, an adapter, quantized or of an unsupported architecture, it
            has a setting that training would silently change, or ``model`` states other keys.
    """
    option = f"init_from = {name}"
    location = resolve_model(name, "init_from = ")
    check_no_hub_adapter(location, option)
    config = from_pretrained(option, AutoConfig, location)
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise BadInput(
            f"{option}: models of type {config.model_type} are not supported. Use a model of type "
            f"{join_or([*ARCHITECTURES])}"
        )
    if getattr(config, "quantization_config", None):
        raise BadInput(
            f"{option}: its weights are quantized and cannot be trained. Use the model that was "
            f"quantized"
        )
    problems = [
        *_unsupported_settings(config, architecture),
        *_contradicted_keys(config, architecture, model),
    ]
    if problems:
        raise BadInput(f"{option}: {problem}" for problem in problems)
    return config


def _unsupported_settings(config: PreTrainedConfig, architecture: Architecture) -> list[str]:
    """Return an error message for each setting with which the model would compute differently."""
    problems = []
    for key, supported in architecture.required.items():
        value = getattr(config, key)
        if value not in supported:
            problems.append(
                f"its config.json has {key} = {value}, but only {join_or(supported)} is supported. "
                f"Use another model"
            )
    return problems


def _contradicted_keys(
    config: PreTrainedConfig, architecture: Architecture, model: keys.Model
) -> list[str]:
    """Return an error message for each recipe key that contradicts the pretrained model."""
    problems = []
    model_keys = architecture.model_keys(config)
    if model_keys["intermediate_size"] is None:
        model_keys["intermediate_size"] = 4 * model_keys["n_embd"]
    for key, value in model_keys.items():
        stated = getattr(model, key)
        # A larger vocabulary is permitted.
        if key == "vocab_size" or stated is None or stated == value:
            continue
        problems.append(f"{key} = {stated}, but the model has {value}. Leave it out (--{key} none)")

    rows = config.vocab_size
    if model.vocab_size is not None and model.vocab_size < rows:
        problems.append(
            f"vocab_size = {model.vocab_size}, but its vocabulary has {rows} rows. Use "
            f"--vocab_size {padded_vocab_size(rows)}, or leave it out"
        )
    context = config.max_position_embeddings
    if model.sequence_length > context:
        problems.append(
            f"sequence_length = {model.sequence_length}, but its context is {context} tokens. Use "
            f"--sequence_length {context}"
        )
    return problems


def _load_complete(option: str, name: str, **settings) -> tuple[PreTrainedModel, list[str]]:
    """Load a model and check that it has every weight, and only finite ones.

    Args:
        option: beginning of error messages: the option and its value.
        name: model folder or Hub id.
        settings: keyword arguments of ``AutoModelForCausalLM.from_pretrained``.

    Returns:
        The model, and the sorted names of the tensors in its files that it does not use.

    Raises:
        BadInput: weights are missing (Transformers would initialize them at random), NaN or
            infinite, or the model cannot be loaded.
    """
    model, info = from_pretrained(
        option, AutoModelForCausalLM, name, output_loading_info=True, **settings
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise BadInput(
            f"{option}: its weights do not match its config.json, because {missing[0]} is missing. "
            f"Use a complete model"
        )
    for weight, tensor in model.named_parameters():
        # isfinite is not implemented for the 1-byte formats of quantized models.
        is_checked = tensor.is_floating_point() and tensor.itemsize > 1
        if is_checked and not tensor.isfinite().all():
            raise BadInput(
                f"{option}: {weight} contains NaN or infinity, so its training diverged. Use "
                f"another checkpoint or model"
            )
    return model, sorted(info["unexpected_keys"])


def from_pretrained(option: str, auto_class: Any, name: str, **settings) -> Any:
    """Return ``auto_class.from_pretrained(name)``, without remote code.

    Args:
        option: beginning of error messages: the option and its value.
        auto_class: a class of Transformers, such as ``AutoConfig``.
        name: model folder or Hub id, which may end in @REVISION.
        settings: further keyword arguments of ``from_pretrained``.

    Raises:
        BadInput: for any error, because the Hub client, the cache and the parsers raise errors of
            many classes.
    """
    location, revision = model_id.parse(name, "model ")
    if revision is not None:
        settings["revision"] = revision
    try:
        return auto_class.from_pretrained(location, trust_remote_code=False, **settings)
    except Exception as error:
        reason = first_line(error)
        if errno_of(error) in files.NO_MAPPING:
            reason = "the file system cannot map files into memory. Copy the model to another one"
        raise BadInput(f"{option}: the model cannot be loaded: {reason}") from None


def load(name: str) -> PreTrainedModel:
    """Load any causal language model of Transformers for inference, in the precision of its files.

    GELU is replaced by a fused kernel that computes the same function.

    Raises:
        BadInput: the model cannot be loaded, or weights are missing, NaN or infinite.
    """
    model, _ = _load_complete(f"--model {name}", name, dtype="auto")
    for path, module in list(model.named_modules()):
        if isinstance(module, NewGELUActivation):
            model.set_submodule(path, nn.GELU(approximate="tanh"))
    return model.eval()
