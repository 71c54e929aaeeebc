"""Small models, token ids and gradients for several test modules."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from ursa_minor.model import build
from ursa_minor.model.loss import NextTokenLoss
from ursa_minor.recipe import keys

SHAPE = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "vocab_size": 64,
    "sequence_length": 16,
    "seed": 1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LLAMA = {
    "architecture": "llama",
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "tie_word_embeddings": True,
    "rope_theta": 500.0,
}
# Changes of SHAPE for each kind of model.
KINDS = {"gpt2": {}, "llama": LLAMA, "untied": LLAMA | {"tie_word_embeddings": False}}


def build_small_model(**changes) -> PreTrainedModel:
    """Build a model with ``SHAPE`` and these changes. The default is a GPT-2 without dropout."""
    return build.build(keys.Model(**SHAPE | changes), eos_token_id=0)


def stock_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the weights into a model with Transformers' own attention and activation."""
    config = type(model.config).from_dict(model.config.to_dict())
    if config.model_type == "gpt2":
        config.activation_function = "gelu_new"
    copy = type(model)._from_config(config, attn_implementation="sdpa").eval()
    copy.load_state_dict(model.state_dict())
    return copy


def random_ids(*shape: int, below: int = 64) -> torch.Tensor:
    """Return token ids from 1 to ``below`` - 1. The same shape gives the same ids."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, below, shape, generator=generator)


def randomize_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Replace all weights by random ones, so that none has its initial value of zero or one."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


def overflowing_model(dtype: torch.dtype = torch.float16, **changes) -> PreTrainedModel:
    """Build a stock model with finite weights whose logits are not finite in this data type."""
    model = stock_copy(build_small_model(**changes))
    mlp = model.transformer.h[0].mlp
    largest = 6e4 if dtype == torch.float16 else 1e30
    with torch.no_grad():
        mlp.c_fc.weight.fill_(largest)
        mlp.c_fc.bias.fill_(largest)
        mlp.c_proj.weight.fill_(largest)
    return model.to(dtype)


def unchanged(module: nn.Module) -> nn.Module:
    """Return the module itself."""
    return module


def gradients_by_name(
    model: PreTrainedModel,
    dtype: torch.dtype | None = None,
    wrap: Callable[[nn.Module], nn.Module] = unchanged,
) -> dict[str, torch.Tensor]:
    """Return the gradients of the loss of two sequences.

    Args:
        model: The model.
        dtype: Data type of autocast, or None for fp32.
        wrap: Applied to the loss module, to compile it, for example.
    """
    inputs = random_ids(2, 16)
    targets = inputs.flip(1)
    module = wrap(NextTokenLoss(model).train())
    torch.manual_seed(5)  # for dropout
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = module(inputs, targets)
    return backward(loss, model)


def backward(loss: torch.Tensor, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Compute the gradients of a loss and return a copy of each by name."""
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
