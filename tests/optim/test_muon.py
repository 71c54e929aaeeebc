"""Muon makes orthogonal steps of AdamW's size for the blocks' matrices, and leaves the rest to AdamW."""

import math
import shutil

import pytest
import torch
from conftest import in_fork
from test_optimizers import fill_gradients, made
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from pretrain.optim import muon


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=8))


def llama() -> LlamaForCausalLM:
    """Query and o are 16 x 16, key and value 8 x 16, gate and up 32 x 16, down 16 x 32."""
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}
    shape |= {"intermediate_size": 32, "vocab_size": 32}
    return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))


def clones(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("capability, dtype", [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_a_card_multiplies_in_what_its_tensor_cores_have(monkeypatch, capability, dtype):
    asked = []

    def supported(including_emulation=True):  # torch says yes to emulated bf16 on a T4, unless asked not to
        asked.append(including_emulation)
        return including_emulation or capability >= (8, 0)

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert muon._product_dtype(torch.device("cuda")) == dtype and asked == [False]
    assert muon._product_dtype(torch.device("cpu")) == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_singular_values_near_one_and_zero_stays_zero(dtype):
    torch.manual_seed(0)
    made = muon.orthogonalize(1e-4 * torch.randn(2, 96, 384).to(dtype)).float()
    assert ((torch.linalg.svdvals(made) > 0.6) & (torch.linalg.svdvals(made) < 1.3)).all()
    assert not muon.orthogonalize(torch.zeros(1, 4, 8, dtype=dtype)).any()


def test_two_steps_equal_pytorchs_own_muon():
    """torch.optim.Muon takes one matrix at a time, and its Newton-Schulz runs in bf16: c_proj, to bf16's rounding."""
    model, other = gpt2(), gpt2()
    ours = made(model, optimizer="muon")
    names = [name for name, _ in model.named_parameters() if name.endswith("c_proj.weight") or "c_fc.weight" in name]
    theirs = torch.optim.Muon(
        [dict(other.named_parameters())[name] for name in names],
        lr=0.01,
        momentum=0.95,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    for seed in (1, 2):
        before = clones(model)
        for each, optimizer in ((model, ours), (other, theirs)):
            fill_gradients(each, seed)
            optimizer.step()
    assert len(names) == 6
    for name in names:
        mine, reference = model.get_parameter(name), other.get_parameter(name)
        assert not torch.equal(mine, before[name])
        assert (mine - reference).norm() < 0.06 * (mine - before[name]).norm()


@pytest.mark.parametrize("make", [gpt2, llama])
def test_query_key_and_value_are_made_orthogonal_each_and_a_step_has_adamws_size(make):
    model = make()
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
    model, other = gpt2(), gpt2()
    for each, optimizer in ((model, made(model, optimizer="muon")), (other, made(other))):
        fill_gradients(each)
        optimizer.step()
    for name, parameter in model.named_parameters():
        hidden = parameter.dim() == 2 and ".h." in name
        assert torch.equal(parameter, other.get_parameter(name)) is not hidden, name


def train_by_transformers(folder, resume: bool) -> None:
    """Train 4 updates with Transformers' Trainer, which saves every 2; write the weights that it ends with."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=9.0,  # not taken: the rate is the factory's
        lr_scheduler_type="linear",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_total_limit=2,
    )
    model = gpt2()
    torch.manual_seed(3)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 32, (8, 8))]
    wanted = (muon.TrainerMuon, {"lr": 0.01, "weight_decay": 0.0})
    trainer = Trainer(model, arguments, train_dataset=rows, optimizer_cls_and_kwargs=wanted)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    torch.save(clones(model), folder / "weights.pt")


def trained_by_transformers(folder, *, resume: bool = False) -> dict[str, torch.Tensor]:
    """The weights that Trainer ends with, in a process of its own: it leaves Accelerate's state behind."""
    in_fork(train_by_transformers, folder, resume)
    return torch.load(folder / "weights.pt")


def test_transformers_trainer_takes_it_by_one_argument_and_resumes_with_its_moments(tmp_path):
    before, after = clones(gpt2()), trained_by_transformers(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = trained_by_transformers(tmp_path, resume=True)
    assert all(torch.equal(after[name], resumed[name]) for name in after)
    name = "transformer.h.0.attn.c_attn.weight"
    moved = (after[name] - before[name]).norm() / math.sqrt(3 * 16)  # of three orthogonal matrices it would be 1
    rates = 0.01 * sum((1.0, 0.75, 0.5, 0.25))
    assert 0.3 * rates < moved / muon.step_scale(16, 16) < 1.2 * rates
