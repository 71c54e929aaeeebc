# EMA-Nesterov: gradients are taken ahead, along an average of the updates; BETA falls with the rate.
# https://arxiv.org/abs/2605.25395 as modded-nanogpt's track 3 has it.
GAMMA = 0.95
BETA = 0.5
BEGIN = 0.1
END = 0.8
STEPS = 500

import torch

from pretrain.optim import muon

means, ahead, seen = {}, {}, {"steps": 0, "peak": 0.0}


def _step(self, closure=None, old=muon.Muon.step):
    parameters = [p for group in self.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter in ahead:
            parameter.sub_(ahead.pop(parameter))
    before = [parameter.clone() for parameter in parameters]
    rate = self.param_groups[0]["lr"]
    seen["peak"] = max(seen["peak"], rate)
    old(self, closure)
    share = seen["steps"] / STEPS
    seen["steps"] += 1
    for parameter, start in zip(parameters, before, strict=True):
        mean = means.setdefault(parameter, torch.zeros_like(parameter))
        mean.lerp_(parameter - start, 1 - GAMMA)
        if BEGIN <= share < END:
            ahead[parameter] = mean * (BETA * rate / seen["peak"] / (1 - GAMMA))
            parameter.add_(ahead[parameter])


muon.Muon.step = torch.no_grad()(_step)
