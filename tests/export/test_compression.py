"""Pruning removes the smallest weights, and int8 stores the matrices of all blocks."""

import importlib.util

import pytest
import torch
from small_models import LLAMA, build_small_model
from torch import nn
from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

from ursa_minor.base.errors import BadInput
from ursa_minor.export import compression
from ursa_minor.model.precision import precision_of


@pytest.fixture
def model() -> GPT2LMHeadModel:
    """Return a small GPT-2."""
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


def clone_weights(model) -> dict[str, torch.Tensor]:
    """Return a copy of the weights by name."""
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def is_block_matrix(name: str, weight: torch.Tensor) -> bool:
    """Return whether a weight is a matrix of a transformer block."""
    return ".h." in name and weight.dim() == 2


def test_pruning_zeroes_smallest_weights_of_block_matrices(model):
    share = 0.3
    before = clone_weights(model)

    compression.prune(model, share)

    for name, weight in model.state_dict().items():
        if not is_block_matrix(name, weight):
            assert torch.equal(weight, before[name]), name
            continue
        is_pruned = weight == 0
        assert is_pruned.sum() == round(share * weight.numel())
        assert torch.equal(weight[~is_pruned], before[name][~is_pruned]), name
        largest_pruned = before[name][is_pruned].abs().max()
        assert largest_pruned <= weight[~is_pruned].abs().min(), name
    assert compression.share_of_zeros(model) == pytest.approx(share, abs=1e-3)


def test_unpruned_matrices_are_named_once_for_all_blocks():
    llama = build_small_model(**LLAMA | {"tie_word_embeddings": False})
    # Matrices outside of linear layers, such as the experts of some models, are not pruned.
    for block in llama.model.layers:
        block.mlp.experts = nn.Parameter(torch.ones(2, 3, 4))

    names = compression.unpruned(llama)

    assert names == ["model.embed_tokens.weight", "model.layers.*.mlp.experts", "lm_head.weight"]


def test_upcast_model_computes_in_fp32(model):
    tokens = torch.randint(0, 64, (2, 16))
    model.to(torch.bfloat16)
    rounded_weights = clone_weights(model)

    compression.upcast(model)

    assert model(tokens).logits.dtype == torch.float32
    assert model.lm_head.weight is model.transformer.wte.weight
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, rounded_weights[name].float())


def test_missing_int8_library_is_reported(monkeypatch):
    monkeypatch.setattr(compression, "PACKAGE", "missing_package")

    with pytest.raises(BadInput) as error:
        compression.require_int8()

    message = str(error.value)
    assert "--dtype int8: missing_package is not installed" in message
    assert "pip install missing_package==" in message


@pytest.mark.parametrize(
    ("quantization_config", "precision"),
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
def test_quantized_model_reports_precision_of_its_matrices(model, quantization_config, precision):
    model.half().config.quantization_config = quantization_config

    assert precision_of(model) == precision
    assert precision_of(model, "bf16") == f"{precision}, bf16 autocast"


def test_precision_is_that_of_most_weights(model):
    assert precision_of(model) == "fp32"
    assert precision_of(model, "bf16") == "bf16"

    model.to(torch.bfloat16).transformer.wpe.float()

    assert precision_of(model) == "bf16"


needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
)


@pytest.fixture
def half_model(model):
    """Return the small GPT-2 in fp16."""
    return model.to(torch.float16)


@needs_bitsandbytes
def test_int8_rounds_every_block_matrix(half_model):
    quantized = compression.quantize(half_model)

    for name, module in compression.matrices(quantized).items():
        assert module.weight.dtype == torch.int8, name
        weight = half_model.get_submodule(name).weight.float().T  # Conv1D is (in, out)
        error = compression.dequantized(module.weight) - weight
        assert error.abs().max() <= module.weight.SCB.max() / 127, name


@needs_bitsandbytes
def test_reloaded_int8_model_has_same_logits(half_model, tmp_path):
    quantized = compression.quantize(half_model)
    tokens = torch.randint(0, 64, (2, 16))
    quantized_logits = quantized(tokens).logits
    half_logits = half_model(tokens).logits

    quantized.save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)

    loaded_logits = loaded(tokens).logits
    assert torch.equal(loaded_logits, quantized_logits)
    assert (loaded_logits - half_logits).abs().max() < 0.05 * half_logits.abs().max()
    assert precision_of(loaded) == "int8"
    compression.upcast(loaded)
    assert (loaded(tokens).logits - quantized_logits).abs().max() < 0.01


@needs_bitsandbytes
def test_int8_weights_are_smaller(half_model):
    quantized = compression.quantize(half_model)

    num_parameters = sum(parameter.numel() for parameter in half_model.parameters())
    half_bytes = compression.weight_bytes(half_model)
    assert half_bytes == 2 * num_parameters
    assert compression.weight_bytes(quantized) < 0.7 * half_bytes
