"""Build the model of a recipe: a stock model of Transformers that trains with causal attention."""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ursa_minor.model import pretrained
from ursa_minor.model.architectures import ARCHITECTURES, Mlp
from ursa_minor.model.attention import CAUSAL, register_causal_attention
from ursa_minor.recipe import keys


def build(model: keys.Model, *, eos_token_id: int) -> PreTrainedModel:
    """Build the model on the CPU in fp32, identical on every process.

    Args:
        model: the model keys of a completed recipe (``pretrained.complete``).
        eos_token_id: id of the end-of-text token, for the config of a new model.

    Returns:
        A model with random weights that depend on the seed only, or with those of ``init_from``.

    Raises:
        BadInput: ``init_from`` cannot be loaded, is incomplete, or has another shape.
    """
    register_causal_attention()
    torch.manual_seed(model.seed)
    assert model.architecture is not None
    architecture = ARCHITECTURES[model.architecture]
    if model.init_from is not None:
        built = pretrained.load_to_train(model.init_from, model)
    else:
        config = AutoConfig.for_model(
            architecture.name,
            bos_token_id=eos_token_id,
            eos_token_id=eos_token_id,
            initializer_range=model.initializer_range,
            **architecture.config(model),
            **architecture.training_config(model),
        )
        built = AutoModelForCausalLM.from_config(config, attn_implementation=CAUSAL)

    # With torch.compile in torch 2.11, checkpointing would not discard the tensors that prepared
    # functions save, which doubles the memory of a step.
    if model.gradient_checkpointing != "full" or torch.__version__ >= (2, 13):
        architecture.prepare(built)
    if model.gradient_checkpointing == "mlp":
        _recompute_mlps(built, architecture.mlp)
    elif model.gradient_checkpointing == "full":
        _recompute_blocks(built)
    return built


def _recompute_mlps(model: PreTrainedModel, names: Mlp) -> None:
    """Make every MLP recompute its activation in the backward pass, in place."""
    for path, module in model.named_modules():
        if path.endswith(".mlp"):
            module.forward = functools.partial(_recomputed_mlp, module, names)


def _recompute_blocks(model: PreTrainedModel) -> None:
    """Make every block recompute its activations in the backward pass, in place."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        # Older versions of Transformers have this method under another name.
        enable = model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _recomputed_mlp(mlp: nn.Module, names: Mlp, hidden: torch.Tensor) -> torch.Tensor:
    """Return the output of an MLP and save only the outputs of its linear layers.

    The backward pass recomputes the activation, as llm.c does with ``-r 1``.
    """

    def activate_and_project(inner: torch.Tensor, *gated: torch.Tensor) -> torch.Tensor:
        activated = getattr(mlp, names.activation)(inner)
        for factor in gated:
            activated = activated * factor
        return getattr(mlp, names.down_proj)(activated)

    up_projections = [getattr(mlp, name)(hidden) for name in names.up_proj]
    # The last linear layer is part of the checkpointed function, so that its input is not saved.
    # It is not recomputed, because the backward pass needs nothing after it. The function has
    # no dropout, so the state of the random number generator is not saved.
    out = checkpoint(
        activate_and_project, *up_projections, use_reentrant=False, preserve_rng_state=False
    )
    if hasattr(mlp, "dropout"):
        out = mlp.dropout(out)
    return out
