"""Muon makes orthogonal steps of AdamW's size for the blocks' matrices, and leaves the rest to AdamW."""

import math
import shutil

import pytest
import torch
from conftest import run_in_fork
from small_models import build_small_model
from test_optimizers import fill_gradients, made, tiny
from transformers import Trainer, TrainingArguments

from ursa_minor.optim import muon


def clones(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("supported, dtype", [(False, torch.float16), (True, torch.bfloat16)])
def test_a_card_multiplies_in_what_its_tensor_cores_have(monkeypatch, supported, dtype):
    """torch says yes to the bf16 that it emulates on a T4, unless asked not to."""
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or supported,
    )
    assert muon._product_dtype(torch.device("cuda")) == dtype
    assert muon._product_dtype(torch.device("cpu")) == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_singular_values_near_one_and_zero_stays_zero(dtype):
    torch.manual_seed(0)
    made = muon.orthogonalize(1e-4 * torch.randn(2, 96, 384).to(dtype)).float()
    assert ((torch.linalg.svdvals(made) > 0.6) & (torch.linalg.svdvals(made) < 1.3)).all()
    assert not muon.orthogonalize(torch.zeros(1, 4, 8, dtype=dtype)).any()


def test_two_steps_equal_pytorchs_own_muon():
    """torch.optim.Muon takes one matrix at a time, and its Newton-Schulz runs in bf16: c_proj, to bf16's rounding."""
    model, other = tiny(), tiny()
    names = [
        name
        for name, _ in model.named_parameters()
        if name.endswith("c_proj.weight") or "c_fc.weight" in name
    ]
    wanted = [other.get_parameter(name) for name in names]
    how = {"lr": 0.01, "momentum": 0.95, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    ours, theirs = made(model, optimizer="muon"), torch.optim.Muon(wanted, **how)
    for seed in (1, 2):
        before = clones(model)
        for each, optimizer in ((model, ours), (other, theirs)):
            fill_gradients(each, seed)
            optimizer.step()
    assert len(names) == 6
    for name, reference in zip(names, wanted, strict=True):
        moved = (model.get_parameter(name) - before[name]).norm()
        assert (model.get_parameter(name) - reference).norm() < 0.06 * moved, name


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_query_key_and_value_are_made_orthogonal_each_and_a_step_has_adamws_size(architecture):
    model = tiny(architecture)
    before = clones(model)
    fill_gradients(model)
    made(model, optimizer="muon", weight_decay=0.0).step()
    for name, start in before.items():
        if start.dim() == 2 and (".h." in name or ".layers." in name):
            step = (start - model.get_parameter(name).detach()) / 0.01
            for part in step.chunk(3 if "c_attn" in name else 1, dim=1):
                values = torch.linalg.svdvals(part) / (0.2 * math.sqrt(max(part.shape)))
                assert values.max() < 1.3 and values.median() > 0.6, name
            assert step.square().mean().sqrt() == pytest.approx(0.2, rel=0.2), name


def test_all_that_is_no_hidden_matrix_takes_adamws_step_to_the_bit():
    model, other = tiny(), tiny()
    for each, optimizer in ((model, made(model, optimizer="muon")), (other, made(other))):
        fill_gradients(each)
        optimizer.step()
    for name, parameter in model.named_parameters():
        hidden = parameter.dim() == 2 and ".h." in name
        assert torch.equal(parameter, other.get_parameter(name)) is not hidden, name


def test_small_batches_of_matrices_give_the_step_of_large_ones(monkeypatch):
    """Products of fewer matrices may be rounded differently."""
    model, other = tiny(), tiny()
    for each, most_elements in ((model, muon.MOST_ELEMENTS), (other, 1)):
        monkeypatch.setattr(muon, "MOST_ELEMENTS", most_elements)
        fill_gradients(each)
        made(each, optimizer="muon").step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, other.get_parameter(name))


def train_by_transformers(folder, resume: bool) -> None:
    """Train 4 updates with Transformers' Trainer, which saves every 2; write the weights that it ends with."""
    how = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "per_device_train_batch_size": 2}
    how["learning_rate"] = 9.0  # not taken: the rate is the factory's
    arguments = TrainingArguments(
        str(folder), max_steps=4, save_steps=2, lr_scheduler_type="linear", **how
    )
    model = build_small_model()
    torch.manual_seed(3)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 32, (8, 8))]
    wanted = (muon.TrainerMuon, {"lr": 0.01, "weight_decay": 0.0})
    trainer = Trainer(model, arguments, train_dataset=rows, optimizer_cls_and_kwargs=wanted)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    torch.save(clones(model), folder / "weights.pt")


def trained_by_transformers(folder, *, resume: bool = False) -> dict[str, torch.Tensor]:
    """The weights that Trainer ends with, in a process of its own: it leaves Accelerate's state behind."""
    run_in_fork(train_by_transformers, folder, resume)
    return torch.load(folder / "weights.pt")


def test_transformers_trainer_takes_it_by_one_argument_and_resumes_with_its_moments(tmp_path):
    before, after = clones(build_small_model()), trained_by_transformers(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = trained_by_transformers(tmp_path, resume=True)
    assert all(torch.equal(after[name], resumed[name]) for name in after)
    name = "transformer.h.0.attn.c_attn.weight"
    moved = (after[name] - before[name]).norm() / math.sqrt(
        3 * 32
    )  # of three orthogonal matrices it would be 1
    rates = 0.01 * sum((1.0, 0.75, 0.5, 0.25))
    assert 0.3 * rates < moved / muon.step_scale(32, 32) < 1.2 * rates
