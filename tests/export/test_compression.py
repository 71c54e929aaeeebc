"""Pruning takes each matrix's smallest weights; int8 takes all of the blocks' matrices and loads back."""

import importlib.util

import pytest
import torch
from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

from ursa_minor.base.errors import BadInput
from ursa_minor.export import compression
from ursa_minor.model.precision import precision_of


@pytest.fixture
def model() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        vocab_size=64,
        n_positions=16,
        eos_token_id=0,
        bos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


def test_pruning_zeroes_the_smallest_weights_of_each_matrix_of_the_blocks_and_nothing_else(
    model, share=0.3
):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    compression.prune(model, share)
    for name, weight in model.state_dict().items():
        gone, kept = weight == 0, weight != 0
        assert gone.sum() == (
            round(share * weight.numel())
            if ".h." in name and weight.dim() == 2
            else (before[name] == 0).sum()
        )
        assert torch.equal(weight[kept], before[name][kept]), name
        assert (
            weight.dim() == 1
            or not gone.any()
            or before[name][gone].abs().max() <= weight[kept].abs().min()
        ), name
    assert compression.share_of_zeros(model) == pytest.approx(share, abs=1e-3)


def test_a_widened_model_computes_in_fp32_with_its_rounded_weights(model):
    tokens, half = torch.randint(0, 64, (2, 16)), model.to(torch.bfloat16)
    rounded = {name: weight.clone() for name, weight in half.state_dict().items()}
    compression.upcast(half)
    assert (
        half(tokens).logits.dtype == torch.float32
        and half.lm_head.weight is half.transformer.wte.weight
    )
    assert all(
        torch.equal(weight, rounded[name].float()) for name, weight in half.state_dict().items()
    )


def test_int8_without_its_library_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr(compression, "PACKAGE", "not_there")
    with pytest.raises(
        BadInput, match=r"--dtype int8: not_there is not installed. .* pip install not_there=="
    ):
        compression.require_int8()


@pytest.mark.parametrize(
    ("rules", "precision"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "nf4",
        ),
        (BitsAndBytesConfig(load_in_8bit=True), "int8"),
        ({"quant_method": "gptq", "bits": 4}, "int4 (gptq)"),
        ({"quant_method": "awq", "bits": 4}, "int4 (awq)"),
        ({"quant_method": "quanto", "weights": "int8"}, "int8 (quanto)"),
        ({"quant_method": "fp8"}, "fp8"),
    ],
)
def test_quantized_model_reports_precision_of_its_matrices(model, rules, precision):
    model.half().config.quantization_config = rules
    assert precision_of(model) == precision
    assert precision_of(model, "bf16") == f"{precision}, bf16 autocast"


def test_precision_is_that_of_most_weights(model):
    assert precision_of(model) == "fp32"
    assert precision_of(model, "bf16") == "bf16"
    model.to(torch.bfloat16).transformer.wpe.float()
    assert precision_of(model) == "bf16"


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_int8_takes_every_matrix_and_loads_back_with_the_same_logits(model, tmp_path):
    quantized = compression.quantize(model.to(torch.float16))
    assert {module.weight.dtype for module in compression.matrices(quantized).values()} == {
        torch.int8
    }
    for name, module in compression.matrices(quantized).items():  # Conv1D is (in, out)
        error = compression.dequantized(module.weight).T - model.get_submodule(name).weight.float()
        assert error.abs().max() <= module.weight.SCB.max() / 127, name
    quantized.save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    tokens = torch.randint(0, 64, (2, 16))
    assert torch.equal(loaded(tokens).logits, quantized(tokens).logits)
    assert (loaded(tokens).logits - model(tokens).logits).abs().max() < 0.05 * model(
        tokens
    ).logits.abs().max()
    assert compression.weight_bytes(loaded) < 0.7 * compression.weight_bytes(model)
    assert compression.weight_bytes(model) == 2 * sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert precision_of(loaded) == "int8"
    compression.upcast(loaded)
    assert (loaded(tokens).logits - quantized(tokens).logits).abs().max() < 0.01
