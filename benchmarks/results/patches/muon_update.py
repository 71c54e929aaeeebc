# Muon's update made otherwise: each flag is one change.
POLAR_EXPRESS = False  # Amsel et al., https://arxiv.org/abs/2505.16932
EQUAL_ROWS = False  # MuonEq-R: each row of the momentum has norm 1 before it is made orthogonal
NORMUON = False  # Li et al., https://arxiv.org/abs/2510.05491: each output's update has the same mean square
CAUTIOUS = False  # decay only where update and weight agree
FALLING = False  # the decay falls in a line with the rate once more, and is twice as high at the peak

import torch

from pretrain.optim import muon

COEFFICIENTS = [
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
]
peak = 0.0


def _polar(matrices):
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (1.01 * torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def _equal_rows(matrices, old=muon.orthogonalize):
    return old(matrices / matrices.norm(dim=-1, keepdim=True).clamp(min=1e-12))


def _muon_step(self, group):
    global peak
    peak = max(peak, group["lr"])
    parameters = [p for p in group["params"] if p.grad is not None]
    wanted = []
    for parameter in parameters:
        state = self.state[parameter]
        kept = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
        kept.lerp_(parameter.grad, 1 - group["momentum"])
        wanted.append(parameter.grad.lerp(kept, group["momentum"]))
        parameter.grad = None
    stack = muon.orthogonalize(torch.cat(torch.stack(wanted).chunk(group["parts"], dim=-1)))
    for parameter, update in zip(parameters, torch.cat(stack.chunk(group["parts"]), dim=-1), strict=True):
        if NORMUON:  # Conv1D's columns are the outputs
            size, square = update.norm(), update.square().mean(dim=0, keepdim=True)
            kept = self.state[parameter].setdefault("mean_square", torch.zeros_like(square)).lerp_(square, 0.05)
            update = update / (kept.sqrt() + 1e-8)
            update = update * (size / update.norm())
        decay = group["lr"] * group["weight_decay"] * (2 * group["lr"] / peak if FALLING else 1.0)
        parameter.sub_(parameter * (parameter * update > 0) if CAUTIOUS else parameter, alpha=decay)
        parameter.add_(update, alpha=-group["lr"] * group["scale"])


if POLAR_EXPRESS:
    muon.orthogonalize = _polar
if EQUAL_ROWS:
    muon.orthogonalize = _equal_rows
muon.Muon._muon_step = torch.no_grad()(_muon_step)
