# The head has weights of its own (GPT2Config's tie_word_embeddings = false), which begin with this standard deviation.
DEVIATION = 0.0

import dataclasses

import torch

from pretrain.model import architectures
from pretrain.model import build as room

changed = {"config_more": lambda model: {"tie_word_embeddings": False}, "required": {}}
architectures.ARCHITECTURES["gpt2"] = dataclasses.replace(architectures.GPT2, **changed)


def _build(model, *, eos_token_id, old=room.build):
    made = old(model, eos_token_id=eos_token_id)
    with torch.no_grad():
        made.lm_head.weight.normal_(0.0, DEVIATION) if DEVIATION else made.lm_head.weight.zero_()
    return made


room.build = _build
