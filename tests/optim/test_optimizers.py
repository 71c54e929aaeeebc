"""Each optimizer holds every parameter once, keeps what its record states, and is refused where it cannot run."""

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

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
)
SETTINGS = keys.Optimizer(
    weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, max_grad_norm=1.0
)
SHAPE = small_models.SHAPE | {"n_embd": 128, "vocab_size": 512, "sequence_length": 64}
EVERY = [
    pytest.param(name, marks=needs_bitsandbytes if record.package else ())
    for name, record in optimizers.OPTIMIZERS.items()
]


def settings(name: str) -> keys.Optimizer:
    return dataclasses.replace(SETTINGS, optimizer=name)


def shape(architecture: str) -> keys.Model:
    stated = {key: small_models.LLAMA[key] for key in keys.ARCHITECTURE_KEYS[architecture]}
    return keys.Model(**SHAPE, architecture=architecture, **stated)


def tiny(architecture: str = "gpt2") -> PreTrainedModel:
    return build.build(shape(architecture), eos_token_id=0)


def made(model: nn.Module, **changes) -> torch.optim.Optimizer:
    """AdamW, unless ``changes`` of the settings say otherwise, at a learning rate of 0.01."""
    optimizer = optimizers.build(model, dataclasses.replace(SETTINGS, **changes))
    schedule.set_lr(optimizer, 0.01)
    return optimizer


def fill_gradients(model: nn.Module, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def test_the_recipes_names_are_the_records():
    assert set(keys.OPTIMIZER_CAN_SHARD) == set(optimizers.OPTIMIZERS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", EVERY)
def test_every_parameter_is_held_once_and_only_matrices_decay(name, architecture):
    model = tiny(architecture)
    groups = optimizers.build(model, settings(name)).param_groups
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    for group in groups:
        assert {p.dim() for p in group["params"]} == ({2} if group["weight_decay"] else {1})
        assert group["weight_decay"] in (0.1, 0.0) and group["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", EVERY)
def test_what_an_optimizer_keeps_is_what_its_record_states(name, architecture):
    model = tiny(architecture)
    optimizer = optimizers.build(model, settings(name))
    fill_gradients(model)
    optimizer.step()
    # bitsandbytes shares its tables of 256 values among all tensors; a count of updates lies on the host.
    held = [
        item
        for state in optimizer.state.values()
        for item in state.items()
        if not item[0].startswith("qmap")
    ]
    allocated = sum(value.nbytes for _, value in held if torch.is_tensor(value) and value.dim())
    assert allocated == pytest.approx(
        estimate.moment_bytes(estimate.shape_of(shape(architecture)), name), rel=0.005
    )


def test_missing_bitsandbytes_is_refused_with_the_command_of_the_version_that_is_tested(
    monkeypatch,
):
    for name in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        BadInput,
        match=r"adamw_8bit needs .* pip install bitsandbytes==[\d.]+, or use --optimizer adamw$",
    ):
        optimizers.check(settings("adamw_8bit"), torch.device("cpu"), sharded=False)
    assert (
        optimizers.BITSANDBYTES_REQUIREMENT in (ROOT / "requirements/dev.txt").read_text().split()
    )


@needs_bitsandbytes
def test_8_bits_are_refused_where_bitsandbytes_cannot_work_before_any_training(monkeypatch):
    device = torch.device("cpu")
    for name in ("adamw", "muon"):
        optimizers.check(settings(name), device, sharded=True)
    optimizers.check(settings("adamw_8bit"), device, sharded=False)
    with pytest.raises(
        BadInput, match="--shard_optimizer false and a YAML without FSDP, or --optimizer adamw"
    ):
        optimizers.check(settings("adamw_8bit"), device, sharded=True)

    def step(self):
        raise RuntimeError("\nno kernels\nmore lines")

    monkeypatch.setattr("bitsandbytes.optim.AdamW8bit.step", step)
    with pytest.raises(BadInput, match=r"does not run on cpu: no kernels.* --optimizer adamw$"):
        optimizers.check(settings("adamw_8bit"), device, sharded=False)
