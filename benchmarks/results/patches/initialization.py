# Weights that begin otherwise: factors of the blocks' c_proj and of their other matrices; positions as sinusoids; heads of
# the first block that attend to the 1st, 2nd, ... token before.
C_PROJ = 1.0
OTHERS = 1.0
SINUSOIDS = False
LOCAL = 0.0  # score of the token that a head begins to attend to, against 0

import math

import torch

from pretrain.model import build as room


def _sinusoids(table):
    """Positions as sines and cosines with the mean square that they had, in place; return the frequencies."""
    length, width = table.shape
    rates = torch.linspace(2 * math.pi / width, math.pi, width // 2)
    angles = torch.arange(length)[:, None] * rates
    table[:, 0::2], table[:, 1::2] = 0.02 * 2**0.5 * angles.sin(), 0.02 * 2**0.5 * angles.cos()
    return rates


def _attend_before(weight, heads, rates):
    """Add to the first block's queries and keys what makes head h score the token h + 1 before it highest."""
    width = weight.shape[0]
    for head in range(heads):
        mine = torch.arange(head, width // 2, heads)
        columns = torch.arange(len(mine)) * 2 + head * (width // heads)
        gain = math.sqrt(LOCAL * math.sqrt(width // heads) / len(mine))  # after the norm half of a row is position
        weight[2 * mine, width + columns] += gain
        weight[2 * mine + 1, width + columns + 1] += gain
        cosine, sine = (rates[mine] * (head + 1)).cos() * gain, (rates[mine] * (head + 1)).sin() * gain
        weight[2 * mine, columns] += cosine
        weight[2 * mine + 1, columns] -= sine
        weight[2 * mine + 1, columns + 1] += cosine
        weight[2 * mine, columns + 1] += sine


def _build(model, *, eos_token_id, old=room.build):
    made = old(model, eos_token_id=eos_token_id)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 2 and ".h." in name:
                parameter.mul_(C_PROJ if "c_proj" in name else OTHERS)
        if SINUSOIDS or LOCAL:
            rates = _sinusoids(made.transformer.wpe.weight)
        if LOCAL:
            _attend_before(made.transformer.h[0].attn.c_attn.weight, model.n_head, rates)
    return made


room.build = _build
