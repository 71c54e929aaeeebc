"""Small models that several tests of the model room take, and ids for them."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from pretrain.model import build
from pretrain.recipe import keys

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "sequence_length": 16, "seed": 1}
SHAPE |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def built(**changes) -> PreTrainedModel:
    """A GPT-2 of ours, without dropout."""
    return build.build(keys.Model(**SHAPE | changes), eos_token_id=0)


def stock_of(model: PreTrainedModel) -> GPT2LMHeadModel:
    """Transformers' own, with its own attention and activation, and the weights of ``built``'s."""
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, attn_implementation="sdpa")
    other = GPT2LMHeadModel(config).eval()
    other.load_state_dict(model.state_dict())
    return other


def ids(*shape: int, below: int = 64) -> torch.Tensor:
    """The same ids always; 0, the end of text, is not among them."""
    return torch.randint(1, below, shape, generator=torch.Generator().manual_seed(0))


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """As after some training: nothing at its initial zero or one."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()
