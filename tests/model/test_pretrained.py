"""Training can start from other models, with their loss and their configuration."""

import functools
import json

import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import RECIPE
from safetensors.torch import load_file, save_file
from small_models import random_ids, randomize_weights
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.export import stock as stock_export
from ursa_minor.model import build, pretrained
from ursa_minor.model.attention import CAUSAL
from ursa_minor.model.loss import NextTokenLoss
from ursa_minor.recipe import keys

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
RECIPE_WITHOUT_SHAPE = yaml.safe_load(RECIPE) | dict.fromkeys(keys.MODEL_KEYS) | NO_DROPOUT
VOCAB_SIZE = 61  # of the source models


def build_gpt2_source(**changes) -> GPT2LMHeadModel:
    """Build a GPT-2 of Transformers with random weights."""
    options = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "vocab_size": VOCAB_SIZE,
        "n_positions": 16,
        "n_inner": 48,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return randomize_weights(GPT2LMHeadModel(GPT2Config(**options | changes)))


def build_llama_source(**changes) -> LlamaForCausalLM:
    """Build a Llama of Transformers with random weights and unusual settings."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    options = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 16,
        "head_dim": 12,
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-2,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "rope_parameters": rope,
    }
    return randomize_weights(LlamaForCausalLM(LlamaConfig(**options | changes)))


SOURCES = {
    "gpt2": build_gpt2_source,
    "llama": build_llama_source,
    "tied": functools.partial(build_llama_source, tie_word_embeddings=True),
}


@pytest.fixture(params=SOURCES)
def source(request, tmp_path) -> PreTrainedModel:
    """A model of Transformers that is also saved in tmp_path."""
    model = SOURCES[request.param]()
    model.generation_config.temperature = 0.6
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path)
    return model


def complete_model(folder, **stated) -> keys.Model:
    """Complete a recipe that initializes from a folder. It states only these model keys."""
    recipe = keys.from_dict(RECIPE_WITHOUT_SHAPE | {"init_from": str(folder)} | stated)
    return pretrained.complete(recipe).model


def build_from(folder, **stated) -> PreTrainedModel:
    """Build the model of that recipe."""
    return build.build(complete_model(folder, **stated), eos_token_id=0)


def compute_loss(model: PreTrainedModel, inputs: torch.Tensor) -> float:
    """Return the cross-entropy of reversed inputs as targets."""
    logits = model(inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), inputs.flip(1).flatten()).item()


# The initial weights


def save_like_hub_gpt2(model: PreTrainedModel, folder) -> None:
    """Save a model in the format of openai-community/gpt2.

    Its names have no prefix, and the weights contain causal masks. Older fine-tuned models contain
    another buffer too.
    """
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    weights = {}
    for name, weight in load_file(path).items():
        weights[name.removeprefix("transformer.")] = weight
    weights["h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    weights["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, path, {"format": "pt"})


def save_like_run(model: PreTrainedModel, folder) -> None:
    """Save a model as training does, in the folder "model" of the run folder."""
    tokenizer = tokenization.make_characters(["abcdefghij klmnop"])
    stock_export.write(model, folder / "model", tokenizer)


@pytest.mark.parametrize(
    ("kind", "save"),
    [
        ("gpt2", save_like_hub_gpt2),
        ("llama", PreTrainedModel.save_pretrained),
        ("gpt2", save_like_run),
        ("tied", save_like_run),
    ],
    ids=["gpt2 from Hub", "llama", "gpt2 run", "tied llama run"],
)
def test_training_starts_at_loss_of_source(tmp_path, kind, save):
    source = SOURCES[kind]()
    ids = random_ids(2, 16, below=VOCAB_SIZE)
    expected = compute_loss(source, ids)
    save(source, tmp_path)

    model = build_from(tmp_path, vocab_size=VOCAB_SIZE).eval()

    assert model.dtype == torch.float32
    assert compute_loss(model, ids) == pytest.approx(expected, abs=1e-5)
    with torch.no_grad():
        loss = NextTokenLoss(model)(ids, ids.flip(1))
    assert loss.item() == pytest.approx(expected, abs=1e-5)

    # By default the vocabulary is padded. Each of these formats supports that.
    assert complete_model(tmp_path).vocab_size == 64
    padded_model = build_from(tmp_path, vocab_size=64).eval()
    logits = padded_model(ids).logits[..., :VOCAB_SIZE]
    assert torch.allclose(logits, source(ids).logits, atol=1e-5)


def test_new_vocabulary_rows_are_mean_of_old(source, tmp_path):
    model = build_from(tmp_path)

    layers = [
        (model.get_input_embeddings(), source.get_input_embeddings()),
        (model.lm_head, source.lm_head),
    ]
    for layer, source_layer in layers:
        mean = source_layer.weight.mean(0)
        assert torch.equal(layer.weight[:VOCAB_SIZE], source_layer.weight)
        assert torch.allclose(layer.weight[VOCAB_SIZE:], mean.expand(3, -1))


def test_padded_model_is_ready_for_training(source, tmp_path):
    model = build_from(tmp_path)

    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert is_tied == source.config.tie_word_embeddings
    assert model.config.vocab_size == 64
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


# Keys of a configuration that always differ: the recipe's dropout, and records of the class.
ALWAYS_CHANGED = {
    "resid_pdrop",
    "embd_pdrop",
    "architectures",
    "dtype",
    "activation_function",
    "_name_or_path",
}


def test_config_of_source_is_kept(source, tmp_path):
    """Only the keys that the recipe states may change."""
    is_gpt2 = source.config.model_type == "gpt2"
    dropout = "attn_pdrop" if is_gpt2 else "attention_dropout"
    before = source.config.to_dict()

    model = build_from(tmp_path, attn_pdrop=0.25, vocab_size=VOCAB_SIZE)

    after = model.config.to_dict()
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert changed - ALWAYS_CHANGED == {"use_cache", dropout}
    assert after[dropout] == 0.25
    assert after["use_cache"] is False
    assert after.get("activation_function") in (None, "gelu_pytorch_tanh")
    assert model.config._attn_implementation == CAUSAL
    assert model.generation_config.temperature == 0.6
    assert model.generation_config.eos_token_id == source.config.eos_token_id


def test_shorter_context_keeps_logits(source, tmp_path):
    ids = random_ids(2, 8, below=VOCAB_SIZE)

    model = build_from(tmp_path, sequence_length=8).eval()

    logits = model(ids).logits[..., :VOCAB_SIZE]
    assert torch.allclose(logits, source(ids).logits, atol=1e-5)
    if source.config.model_type == "gpt2":
        positions = model.transformer.wpe.weight
        assert model.config.n_positions == 8
        assert len(positions) == 8
        assert positions.requires_grad
    else:
        assert model.config.max_position_embeddings == 16


# The recipe


@pytest.mark.parametrize(
    ("build_source", "expected"),
    [
        (
            functools.partial(build_gpt2_source, n_inner=128),
            {
                "architecture": "gpt2",
                "num_key_value_heads": None,
                "tie_word_embeddings": None,
                "rope_theta": None,
                "intermediate_size": None,
            },
        ),
        (
            build_llama_source,
            {
                "architecture": "llama",
                "num_key_value_heads": 2,
                "tie_word_embeddings": False,
                "rope_theta": 500.0,
                "intermediate_size": 48,
            },
        ),
    ],
    ids=["gpt2", "llama"],
)
def test_source_determines_model_keys(tmp_path, build_source, expected):
    build_source().save_pretrained(tmp_path)

    model = complete_model(tmp_path)

    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 64}
    assert {name: getattr(model, name) for name in keys.MODEL_KEYS} == shape | expected


def test_default_intermediate_size_may_be_stated(tmp_path):
    build_gpt2_source(n_inner=4 * 32).save_pretrained(tmp_path)

    assert build_from(tmp_path, intermediate_size=4 * 32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_layer": 3, "sequence_length": 32}, ["n_layer = 3", "the model has 2"]),
        ({"vocab_size": 32}, ["vocab_size = 32", "61", "--vocab_size 64"]),
        ({"sequence_length": 32}, ["sequence_length = 32", "16 tokens", "--sequence_length 16"]),
    ],
)
def test_recipe_with_other_shape_is_refused(tmp_path, changes, words):
    build_gpt2_source().save_pretrained(tmp_path)

    with pytest.raises(BadInput) as error:
        build_from(tmp_path, **changes)

    # One line per problem.
    assert len(error.value.lines) == len(changes)
    for line in error.value.lines:
        assert line.startswith(f"init_from = {tmp_path}: ")
    for word in words:
        assert word in str(error.value)


# Unusable models


def test_folder_without_model_is_refused(tmp_path):
    with pytest.raises(BadInput, match=f"init_from = {tmp_path}: .*contains no model"):
        build_from(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "cannot be loaded"),
        ({"activation_function": "relu"}, "activation_function = relu, .*gelu_new"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
        ({"model_type": "bert"}, "bert .*not supported.* gpt2 or llama"),
    ],
    ids=["no weights", "activation", "quantized", "model type"],
)
def test_unsupported_model_is_refused(tmp_path, changes, words):
    config = build_gpt2_source().config.to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(BadInput, match=f"init_from = {tmp_path}: .*{words}"):
        build_from(tmp_path)


def change_config(folder, changes: dict) -> None:
    """Change values in the config.json of a saved model."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_layer": 3}, "config.json.* transformer.h.2.* missing"),
        ({"n_layer": 1}, "the weights contain h.1."),
        ({"n_inner": 64}, "cannot be loaded"),
    ],
    ids=["missing layer", "extra layer", "other size"],
)
def test_weights_that_contradict_config_are_refused(tmp_path, changes, words):
    GPT2Model(build_gpt2_source().config).save_pretrained(tmp_path)
    change_config(tmp_path, changes)

    with pytest.raises(BadInput, match=words):
        build_from(tmp_path)


def test_tied_config_with_different_weights_is_refused(tmp_path):
    build_llama_source().save_pretrained(tmp_path)
    change_config(tmp_path, {"tie_word_embeddings": True})

    with pytest.raises(BadInput, match="have different weights"):
        build_from(tmp_path)


@pytest.mark.parametrize("use", [pretrained.load, build_from])
def test_model_with_nan_is_refused(tmp_path, use):
    model = build_gpt2_source()
    model.transformer.h[1].attn.c_attn.weight.data[3, 4] = torch.nan
    model.save_pretrained(tmp_path)

    with pytest.raises(BadInput) as error:
        use(str(tmp_path))

    message = str(error.value)
    assert "transformer.h.1.attn.c_attn.weight" in message
    assert "NaN or infinity" in message
