# SOAP-Muon: the momentum is divided by Adam's second moment in the eigenbasis of the gradients' covariances (SOAP,
# https://arxiv.org/abs/2409.11321, here only of sides up to LARGEST), and then made orthogonal.
BETA = 0.95
EVERY = 5
LARGEST = 128
ORTHOGONAL = True

import torch

from pretrain.optim import muon

kept = {}  # not saved: enough to see whether it pays


def _muon_step(self, group):
    parameters = [p for p in group["params"] if p.grad is not None]
    gradients = torch.cat(torch.stack([p.grad for p in parameters]).chunk(group["parts"], dim=-1))
    state = kept.setdefault(parameters[0], {"count": 0})
    state["count"] += 1
    momentum = state.setdefault("momentum", torch.zeros_like(gradients)).lerp_(gradients, 1 - group["momentum"])
    for side, covariance in (("rows", gradients @ gradients.mT), ("columns", gradients.mT @ gradients)):
        if covariance.shape[-1] > LARGEST:
            continue
        mean = state.setdefault(side, torch.zeros_like(covariance)).lerp_(covariance, 1 - BETA)
        if state["count"] == 1:
            state[side + "_basis"] = torch.linalg.eigh(mean)[1].flip(-1)
        elif state["count"] % EVERY == 0:
            state[side + "_basis"] = torch.linalg.qr(mean @ state[side + "_basis"])[0]
    rows, columns = state.get("rows_basis"), state.get("columns_basis")

    def turned(x, back=False):
        x = x if rows is None else (rows if back else rows.mT) @ x
        return x if columns is None else x @ (columns.mT if back else columns)

    square = state.setdefault("square", torch.zeros_like(gradients)).lerp_(turned(gradients).square(), 1 - BETA)
    root = (square / (1 - BETA ** state["count"])).sqrt() + 1e-12
    update = turned(turned(gradients.lerp(momentum, group["momentum"])) / root, back=True)
    update = muon.orthogonalize(update) * group["scale"] if ORTHOGONAL else 0.2 * update
    for parameter, part in zip(parameters, torch.cat(update.chunk(group["parts"]), dim=-1), strict=True):
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(part, alpha=-group["lr"])
        parameter.grad = None


muon.Muon._muon_step = torch.no_grad()(_muon_step)
