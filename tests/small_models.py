"""Small models and token ids that several tests use."""

import torch
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
}
SHAPE |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {
    "architecture": "llama",
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "tie_word_embeddings": True,
}
LLAMA |= {"rope_theta": 500.0}
KINDS = {"gpt2": {}, "llama": LLAMA, "untied": LLAMA | {"tie_word_embeddings": False}}


def build_small_model(**changes) -> PreTrainedModel:
    """A model of ours, without dropout: a GPT-2 unless ``changes`` say otherwise, as those of ``KINDS`` do."""
    return build.build(keys.Model(**SHAPE | changes), eos_token_id=0)


def stock_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Transformers' own, with its own attention and activation, and the same weights."""
    config = type(model.config).from_dict(model.config.to_dict())
    if config.model_type == "gpt2":
        config.activation_function = "gelu_new"
    other = type(model)._from_config(config, attn_implementation="sdpa").eval()
    other.load_state_dict(model.state_dict())
    return other


def random_ids(*shape: int, below: int = 64) -> torch.Tensor:
    """The same ids always; 0, the end of text, is not among them."""
    return torch.randint(1, below, shape, generator=torch.Generator().manual_seed(0))


def randomize_weights(model: PreTrainedModel) -> PreTrainedModel:
    """As after some training: nothing at its initial zero or one."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def overflowing_model(dtype: torch.dtype = torch.float16, **changes) -> PreTrainedModel:
    """A stock model whose weights are finite and whose logits are not: in float16 its activations overflow."""
    model = stock_copy(build_small_model(**changes))
    block = model.transformer.h[0].mlp
    largest = 6e4 if dtype == torch.float16 else 1e30
    with torch.no_grad():
        block.c_fc.weight.fill_(largest)
        block.c_fc.bias.fill_(largest)
        block.c_proj.weight.fill_(largest)
    return model.to(dtype)


def gradients_by_name(
    model: PreTrainedModel, dtype: torch.dtype | None = None, wrap=lambda module: module
) -> dict:
    """Of the loss of two sequences by name; ``dtype``: of autocast."""
    torch.manual_seed(5)  # dropout's
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = wrap(NextTokenLoss(model).train())(random_ids(2, 16), random_ids(2, 16).flip(1))
    return backward(loss, model)


def backward(loss: torch.Tensor, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """By name."""
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
