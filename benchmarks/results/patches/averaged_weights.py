# The run ends with an average of its weights: exponential, over about SHARE of the updates; STEPS: how many there are.
STEPS = 500
SHARE = 0.05

import torch

from pretrain.optim import muon

means, seen = {}, {"steps": 0}


def _step(self, closure=None, old=muon.Muon.step):
    old(self, closure)
    seen["steps"] += 1
    for parameter in (p for group in self.param_groups for p in group["params"]):
        mean = means.setdefault(parameter, parameter.clone())
        mean.lerp_(parameter, 1 / min(seen["steps"], SHARE * STEPS))
        if seen["steps"] == STEPS:
            parameter.copy_(mean)


muon.Muon.step = torch.no_grad()(_step)
