"""AdamW's groups learn at the recipe's rates; Nesterov's and cautious steps are those of their papers, also in shards."""

import math

import pytest
import torch
from test_optimizers import EVERY, fill_gradients, made, tiny

from pretrain.optim import adamw

BETA1, BETA2 = 0.9, 0.95


def two_updates(**changes) -> dict[str, torch.Tensor]:
    """The weights after two updates with the same gradients."""
    model = tiny()
    optimizer = made(model, **changes)
    for seed in (1, 2):
        fill_gradients(model, seed)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def step_by_step(start: float, gradients: list[float], decay: float, *, nesterov: bool, cautious: bool) -> float:
    """One weight by the papers' formulas, in Python's own numbers."""
    weight, first, second = start, 0.0, 0.0
    for t, gradient in enumerate(gradients, 1):
        first = BETA1 * first + (1 - BETA1) * gradient
        second = BETA2 * second + (1 - BETA2) * gradient**2
        step = first / (1 - BETA1**t)
        if nesterov:
            step = BETA1 * first / (1 - BETA1 ** (t + 1)) + (1 - BETA1) * gradient / (1 - BETA1**t)
        if cautious and step * gradient <= 0:
            step = 0.0
        weight -= 0.01 * (decay * weight + step / (math.sqrt(second / (1 - BETA2**t)) + 1e-8))
    return weight


@pytest.mark.parametrize(
    ("optimizer", "nesterov", "cautious"), [("adamw", True, False), ("adamw", False, True), ("muon", True, True)]
)
def test_each_weight_takes_the_step_of_the_papers_formula(optimizer, nesterov, cautious):
    after = two_updates(optimizer=optimizer, adam_nesterov=nesterov, cautious=cautious)
    model, grown = tiny(), tiny()
    gradients = []
    for seed in (1, 2):
        fill_gradients(grown, seed)
        gradients.append({name: parameter.grad.clone() for name, parameter in grown.named_parameters()})
    waited = 0
    for name in ("transformer.wte.weight", "transformer.h.1.ln_1.bias"):
        places = [(5,), (77,)] if name.endswith("bias") else [(row, 3) for row in range(40)]
        for place in places:
            each = [gradient[name][place].item() for gradient in gradients]
            decay = 0.0 if name.endswith("bias") else 0.1
            start = model.get_parameter(name)[place].item()
            wanted = step_by_step(start, each, decay, nesterov=nesterov, cautious=cautious)
            assert after[name][place].item() == pytest.approx(wanted, abs=1e-6), (name, place)
            waited += cautious and wanted != step_by_step(start, each, decay, nesterov=nesterov, cautious=False)
    assert bool(waited) is cautious


def test_a_cautious_weight_of_muon_waits_where_its_step_goes_against_its_gradient():
    free, cautious = two_updates(optimizer="muon"), two_updates(optimizer="muon", cautious=True)
    for name in ("transformer.h.0.attn.c_attn.weight", "transformer.h.1.mlp.c_proj.weight"):
        alike = torch.isclose(free[name], cautious[name], rtol=0, atol=1e-7).float().mean().item()
        assert 0.1 < alike < 0.9, name


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("name", EVERY)
def test_each_kind_of_weight_learns_at_its_ratio_of_the_rate(name, architecture):
    ratios = {"embedding_lr_ratio": 2.0, "position_lr_ratio": 3.0, "vector_lr_ratio": 0.5}
    model = tiny(architecture)
    optimizer = made(model, optimizer=name, **ratios)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for label, parameter in model.named_parameters():
        kinds = {"wpe": 3.0, "wte": 2.0, "embed_tokens": 2.0, "lm_head": 2.0}
        ratio = next((value for part, value in kinds.items() if part in label), 1.0) if parameter.dim() == 2 else 0.5
        assert rates[id(parameter)] == 0.01 * ratio, label


def test_small_batches_of_tensors_give_the_step_of_large_ones(monkeypatch):
    whole = two_updates(adam_nesterov=True, cautious=True)
    monkeypatch.setattr(adamw, "MOST_ELEMENTS", 1000)
    parts = two_updates(adam_nesterov=True, cautious=True)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
