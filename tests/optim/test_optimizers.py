"""Optimizers contain each parameter once, have the estimated size, and are checked before use."""

import dataclasses
import importlib.util
import sys

import pytest
import small_models
import torch
from conftest import ROOT
from torch import nn
from transformers import PreTrainedModel

from ursa_minor.base.errors import BadInput
from ursa_minor.model import build
from ursa_minor.model.architectures import ARCHITECTURES
from ursa_minor.optim import optimizers, schedule
from ursa_minor.preflight import estimate
from ursa_minor.recipe import keys

CPU = torch.device("cpu")
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
)
SETTINGS = keys.Optimizer(
    weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, max_grad_norm=1.0
)
SHAPE = small_models.SHAPE | {"n_embd": 128, "vocab_size": 512, "sequence_length": 64}
ALL_OPTIMIZERS = [
    pytest.param(name, marks=needs_bitsandbytes if definition.package else ())
    for name, definition in optimizers.OPTIMIZERS.items()
]


def settings_of(name: str) -> keys.Optimizer:
    """Return the settings of an optimizer by name."""
    return dataclasses.replace(SETTINGS, optimizer=name)


def model_keys(architecture: str) -> keys.Model:
    """Return the model keys of a small model."""
    stated = {key: small_models.LLAMA[key] for key in keys.ARCHITECTURE_KEYS[architecture]}
    return keys.Model(**SHAPE, architecture=architecture, **stated)


def build_model(architecture: str = "gpt2") -> PreTrainedModel:
    """Build a small model."""
    return build.build(model_keys(architecture), eos_token_id=0)


def build_optimizer(model: nn.Module, **changes) -> torch.optim.Optimizer:
    """Build an optimizer with a learning rate of 0.01: AdamW, if ``changes`` name no other."""
    optimizer = optimizers.build(model, dataclasses.replace(SETTINGS, **changes))
    schedule.set_lr(optimizer, 0.01)
    return optimizer


def fill_gradients(model: nn.Module, seed: int = 0) -> None:
    """Give each parameter a random gradient."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def test_recipe_knows_every_optimizer():
    assert set(keys.OPTIMIZER_CAN_SHARD) == set(optimizers.OPTIMIZERS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ALL_OPTIMIZERS)
def test_only_matrices_have_weight_decay(name, architecture):
    model = build_model(architecture)

    groups = optimizers.build(model, settings_of(name)).param_groups

    optimized_ids = []
    for group in groups:
        dimensions = {parameter.dim() for parameter in group["params"]}
        assert dimensions == ({2} if group["weight_decay"] else {1})
        assert group["weight_decay"] in (0.1, 0.0)
        assert group["betas"] == (0.9, 0.95)
        optimized_ids += [id(parameter) for parameter in group["params"]]
    # Each parameter belongs to one group.
    assert sorted(optimized_ids) == sorted(id(parameter) for parameter in model.parameters())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state.

    The number of updates is stored on the host. bitsandbytes uses the same tables of 256 values
    ("qmap") for all tensors. Neither counts.
    """
    total = 0
    for state in optimizer.state.values():
        for name, value in state.items():
            if torch.is_tensor(value) and value.dim() and not name.startswith("qmap"):
                total += value.nbytes
    return total


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ALL_OPTIMIZERS)
def test_optimizer_state_has_estimated_size(name, architecture):
    model = build_model(architecture)
    optimizer = optimizers.build(model, settings_of(name))
    fill_gradients(model)

    optimizer.step()

    shape = estimate.shape_of(model_keys(architecture))
    expected = estimate.moment_bytes(shape, name)
    assert state_bytes(optimizer) == pytest.approx(expected, rel=0.005)


# Unusable optimizers


def test_missing_bitsandbytes_is_refused_with_install_command(monkeypatch):
    for name in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(BadInput) as error:
        optimizers.check(settings_of("adamw_8bit"), CPU, sharded=False)

    message = str(error.value)
    assert "adamw_8bit" in message
    assert f"pip install {optimizers.BITSANDBYTES_REQUIREMENT}" in message
    assert "--optimizer adamw" in message


def test_suggested_bitsandbytes_version_is_tested():
    requirements = (ROOT / "constraints.txt").read_text().split()

    assert optimizers.BITSANDBYTES_REQUIREMENT in requirements
    assert optimizers.BITSANDBYTES_REQUIREMENT.startswith("bitsandbytes==")


@pytest.mark.parametrize(
    ("name", "sharded"),
    [
        ("adamw", True),
        ("muon", True),
        pytest.param("adamw_8bit", False, marks=needs_bitsandbytes),
    ],
)
def test_usable_optimizer_is_accepted(name, sharded):
    optimizers.check(settings_of(name), CPU, sharded=sharded)


@needs_bitsandbytes
def test_8_bit_adamw_cannot_be_sharded():
    with pytest.raises(BadInput) as error:
        optimizers.check(settings_of("adamw_8bit"), CPU, sharded=True)

    message = str(error.value)
    assert "--shard_optimizer false" in message
    assert "FSDP" in message
    assert "--optimizer adamw" in message


@needs_bitsandbytes
def test_failure_of_bitsandbytes_is_refused(monkeypatch):
    def step(optimizer):
        raise RuntimeError("\nno kernels\nmore lines")

    monkeypatch.setattr("bitsandbytes.optim.AdamW8bit.step", step)

    with pytest.raises(BadInput, match="cpu: no kernels.* --optimizer adamw$"):
        optimizers.check(settings_of("adamw_8bit"), CPU, sharded=False)
