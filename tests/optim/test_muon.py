"""Muon orthogonalizes the steps of the blocks' matrices, and other parameters use AdamW."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import create_shared_folder, run_in_fork
from small_models import build_small_model
from test_optimizers import build_model, build_optimizer, fill_gradients
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from ursa_minor.optim import muon


def copy_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of each weight by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    """Update the model with random gradients."""
    fill_gradients(model, seed)
    optimizer.step()


# Orthogonalization


@pytest.mark.parametrize(
    ("supports_bf16", "dtype"), [(False, torch.float16), (True, torch.bfloat16)]
)
def test_products_use_half_precision_of_gpu(monkeypatch, supports_bf16, dtype):
    """By default torch reports bf16 support on a T4 too, where bf16 is emulated."""

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or supports_bf16

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)

    assert muon._product_dtype(torch.device("cuda")) == dtype


def test_products_use_fp32_on_cpu():
    assert muon._product_dtype(torch.device("cpu")) == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_matrices_become_orthogonal(dtype):
    torch.manual_seed(0)
    matrices = 1e-4 * torch.randn(2, 96, 384)

    orthogonal = muon.orthogonalize(matrices.to(dtype)).float()

    singular_values = torch.linalg.svdvals(orthogonal)
    assert singular_values.min() > 0.6
    assert singular_values.max() < 1.3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_zero_matrix_stays_zero(dtype):
    assert not muon.orthogonalize(torch.zeros(1, 4, 8, dtype=dtype)).any()


# Steps


def is_undivided_matrix(name: str) -> bool:
    """Return whether a weight of GPT-2 is a matrix that Muon does not split into parts."""
    return name.endswith("c_proj.weight") or "c_fc.weight" in name


def test_two_steps_equal_pytorchs_muon():
    """PyTorch's Newton-Schulz iteration is in bf16, so steps are equal up to its rounding.

    torch.optim.Muon does not split matrices, so only undivided ones are compared.
    """
    model = build_model()
    reference_model = build_model()
    names = [name for name, _ in model.named_parameters() if is_undivided_matrix(name)]
    optimizer = build_optimizer(model, optimizer="muon")
    reference_optimizer = torch.optim.Muon(
        [reference_model.get_parameter(name) for name in names],
        lr=0.01,
        momentum=0.95,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )

    for seed in (1, 2):
        before = copy_weights(model)
        take_step(model, optimizer, seed)
        take_step(reference_model, reference_optimizer, seed)

    assert len(names) == 6
    for name in names:
        weight = model.get_parameter(name)
        step_norm = (weight - before[name]).norm()
        difference = (weight - reference_model.get_parameter(name)).norm()
        assert difference < 0.06 * step_norm, name


def hidden_steps(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the first step of Muon for each matrix of the blocks, divided by the learning rate."""
    before = copy_weights(model)
    take_step(model, build_optimizer(model, optimizer="muon", weight_decay=0.0))
    steps = {}
    for name, weight in before.items():
        if weight.dim() == 2 and (".h." in name or ".layers." in name):
            steps[name] = (weight - model.get_parameter(name).detach()) / 0.01
    return steps


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_query_key_and_value_become_orthogonal_separately(architecture):
    steps = hidden_steps(build_model(architecture))

    for name, step in steps.items():
        num_parts = 3 if "c_attn" in name else 1
        for part in step.chunk(num_parts, dim=1):
            singular_values = torch.linalg.svdvals(part)
            singular_values /= 0.2 * math.sqrt(max(part.shape))
            assert singular_values.max() < 1.3, name
            assert singular_values.median() > 0.6, name


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_steps_have_size_of_adamw_steps(architecture):
    steps = hidden_steps(build_model(architecture))

    for name, step in steps.items():
        root_mean_square = step.square().mean().sqrt()
        assert root_mean_square == pytest.approx(0.2, rel=0.2), name


def test_other_parameters_equal_adamw_bitwise():
    model = build_model()
    adamw_model = build_model()

    take_step(model, build_optimizer(model, optimizer="muon"))
    take_step(adamw_model, build_optimizer(adamw_model))

    for name, parameter in model.named_parameters():
        is_hidden_matrix = parameter.dim() == 2 and ".h." in name
        is_equal = torch.equal(parameter, adamw_model.get_parameter(name))
        assert is_equal is not is_hidden_matrix, name


def test_batch_size_of_matrices_does_not_change_step(monkeypatch):
    """Products of fewer matrices may be rounded differently."""
    model = build_model()
    other_model = build_model()

    take_step(model, build_optimizer(model, optimizer="muon"))
    monkeypatch.setattr(muon, "MOST_ELEMENTS", 1)
    take_step(other_model, build_optimizer(other_model, optimizer="muon"))

    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, other_model.get_parameter(name))


# Transformers


def make_trainer(folder: Path) -> Trainer:
    """Return a Trainer of Transformers for 4 updates with Muon. It saves every 2 updates."""
    arguments = TrainingArguments(
        str(folder),
        max_steps=4,
        save_steps=2,
        lr_scheduler_type="linear",
        learning_rate=9.0,  # has no effect: the optimizer's own rate is used
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    model = build_small_model()
    torch.manual_seed(3)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 32, (8, 8))]
    optimizer = (muon.TrainerMuon, {"lr": 0.01, "weight_decay": 0.0})
    return Trainer(model, arguments, train_dataset=rows, optimizer_cls_and_kwargs=optimizer)


def train_and_resume(folder: Path) -> None:
    """Train, then resume from the middle. Save the weights of both."""
    trainer = make_trainer(folder)
    trainer.train()
    torch.save(copy_weights(trainer.model), folder / "trained.pt")

    shutil.rmtree(folder / "checkpoint-4")
    trainer = make_trainer(folder)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    torch.save(copy_weights(trainer.model), folder / "resumed.pt")


@pytest.fixture(scope="session")
def trainer_folder(tmp_path_factory) -> Path:
    """A folder with the weights of a complete and of a resumed run of Transformers' Trainer.

    The runs are in their own process, because the Trainer changes Accelerate's state.
    """

    def make() -> None:
        run_in_fork(train_and_resume, Path())

    return create_shared_folder(tmp_path_factory, "transformers_trainer", make)


def test_transformers_trainer_resumes_with_muon_state(trainer_folder):
    trained = torch.load(trainer_folder / "trained.pt")
    resumed = torch.load(trainer_folder / "resumed.pt")

    for name, weight in trained.items():
        assert torch.equal(weight, resumed[name]), name


def test_transformers_trainer_takes_muon_steps(trainer_folder):
    name = "transformer.h.0.attn.c_attn.weight"
    before = copy_weights(build_small_model())
    trained = torch.load(trainer_folder / "trained.pt")

    # The norm of three orthogonal matrices of width 32 is sqrt(3 * 32).
    distance = (trained[name] - before[name]).norm() / math.sqrt(3 * 32)

    total_rate = 0.01 * (1.0 + 0.75 + 0.5 + 0.25)
    relative_distance = distance / muon.step_scale(32, 32) / total_rate
    assert 0.3 < relative_distance < 1.2
