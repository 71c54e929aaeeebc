"""A recipe's model: Transformers' own, which trains with causal attention and no mask, from noise or from weights."""

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
    """Build the model on the CPU in fp32, the same on every process: seeded random weights, or those of ``init_from``.

    Raises BadInput when ``init_from`` cannot be loaded whole, or has another shape.
    """
    register_causal_attention()
    torch.manual_seed(model.seed)
    assert model.architecture is not None, "pretrained.complete states it"
    architecture = ARCHITECTURES[model.architecture]
    if model.init_from is not None:
        made = pretrained.load_to_train(model.init_from, model)
    else:
        config_values = {
            "bos_token_id": eos_token_id,
            "eos_token_id": eos_token_id,
            "initializer_range": model.initializer_range,
        }
        config = AutoConfig.for_model(
            architecture.name,
            **architecture.config(model),
            **architecture.training_config(model),
            **config_values,
        )
        made = AutoModelForCausalLM.from_config(config, attn_implementation=CAUSAL)
    # Compiled by torch 2.11, a checkpointed block keeps what these functions save: twice a step's memory.
    if model.gradient_checkpointing != "full" or torch.__version__ >= (2, 13):
        architecture.prepare(made)
    if model.gradient_checkpointing == "mlp":
        for name, module in made.named_modules():
            if name.endswith(".mlp"):
                module.forward = functools.partial(_recomputed_mlp, module, architecture.mlp)
    elif model.gradient_checkpointing == "full":
        enable = getattr(made, "activation_checkpointing_enable", None)
        # The name of this option until about Transformers 5.17.
        enable = enable or made.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return made


def _recomputed_mlp(mlp: nn.Module, names: Mlp, hidden: torch.Tensor) -> torch.Tensor:
    """Return an MLP's result; it keeps its products' only, and computes what stands between again (llm.c's -r 1)."""

    def down_proj(inner: torch.Tensor, *gated: torch.Tensor) -> torch.Tensor:
        activated = getattr(mlp, names.activation)(inner)
        for other in gated:
            activated = activated * other
        return getattr(mlp, names.down_proj)(activated)

    wide = [getattr(mlp, name)(hidden) for name in names.up_proj]
    # The last product stands within, so that its input is not kept; it is not computed again, since nothing that the
    # backward pass needs comes after it. There is no dropout within, so no generator's state is kept.
    out = checkpoint(down_proj, *wide, use_reentrant=False, preserve_rng_state=False)
    return mlp.dropout(out) if hasattr(mlp, "dropout") else out
