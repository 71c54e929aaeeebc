"""Training starts from others' weights at their loss, as their config is, and refuses what it would change."""

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

SHAPELESS = yaml.safe_load(RECIPE) | dict.fromkeys(keys.MODEL_KEYS)
SHAPELESS |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def gpt2_source(**other) -> GPT2LMHeadModel:
    shape = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "vocab_size": 61,
        "n_positions": 16,
        "n_inner": 48,
    }
    return randomize_weights(
        GPT2LMHeadModel(GPT2Config(**shape | {"bos_token_id": 1, "eos_token_id": 2} | other))
    )


def llama_source(**other) -> LlamaForCausalLM:
    shape = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
    }
    shape |= {
        "intermediate_size": 48,
        "vocab_size": 61,
        "max_position_embeddings": 16,
        "head_dim": 12,
    }
    shape |= {
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-2,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
    }
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return randomize_weights(
        LlamaForCausalLM(LlamaConfig(**shape | {"rope_parameters": rope} | other))
    )


SOURCES = {"gpt2": gpt2_source, "llama": llama_source}
SOURCES["tied"] = functools.partial(llama_source, tie_word_embeddings=True)


@pytest.fixture(params=SOURCES)
def other(request, tmp_path) -> PreTrainedModel:
    """It lies in tmp_path, too."""
    made = SOURCES[request.param]()
    made.generation_config.temperature, made.generation_config.do_sample = 0.6, True
    made.save_pretrained(tmp_path)
    return made


def completed(folder, **stated) -> keys.Model:
    """The model of a recipe that states nothing of the shape but this, when it is complete."""
    return pretrained.complete(
        keys.from_dict(SHAPELESS | {"init_from": str(folder)} | stated)
    ).model


def go_on(folder, **stated) -> PreTrainedModel:
    return build.build(completed(folder, **stated), eos_token_id=0)


def loss(model: PreTrainedModel, inputs: torch.Tensor) -> float:
    return F.cross_entropy(model(inputs).logits.flatten(0, 1), inputs.flip(1).flatten()).item()


def as_hub_keeps_gpt2(model, folder):
    """OpenAI's own has no prefix and its causal masks beside the weights, older fine-tunes have another buffer too."""
    model.save_pretrained(folder)
    weights = {
        name.removeprefix("transformer."): w
        for name, w in load_file(folder / "model.safetensors").items()
    }
    weights |= {
        "h.0.attn.bias": torch.ones(1, 1, 16, 16).tril(),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def as_export(model, folder):
    stock_export.write(model, folder / "model", tokenization.make_characters(["abcdefghij klmnop"]))


WAYS = [
    ("gpt2", as_hub_keeps_gpt2),
    ("llama", PreTrainedModel.save_pretrained),
    ("gpt2", as_export),
    ("tied", as_export),
]


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_going_on_from_a_model_begins_at_its_loss(tmp_path, kind, way):
    """``as_export`` makes a run's folder: it stands for the model in it."""
    source, tokens = SOURCES[kind](), random_ids(2, 16, below=61)
    expected, logits = loss(source, tokens), source(tokens).logits
    way(source, tmp_path)
    assert completed(tmp_path).vocab_size == 64
    wider, model = go_on(tmp_path, vocab_size=64).eval(), go_on(tmp_path, vocab_size=61).eval()
    assert torch.allclose(wider(tokens).logits[..., :61], logits, atol=1e-5)
    assert model.dtype == torch.float32 and loss(model, tokens) == pytest.approx(expected, abs=1e-5)
    with torch.no_grad():
        assert NextTokenLoss(model)(tokens, tokens.flip(1)).item() == pytest.approx(
            expected, abs=1e-5
        )


def test_new_rows_of_the_vocabulary_begin_at_the_mean_of_the_old_and_a_tied_head_stays_tied(
    other, tmp_path
):
    model = go_on(tmp_path)
    for ours, theirs in (
        (model.get_input_embeddings(), other.get_input_embeddings()),
        (model.lm_head, other.lm_head),
    ):
        assert torch.equal(ours.weight[:61], theirs.weight)
        assert torch.allclose(ours.weight[61:], theirs.weight.mean(0).expand(3, -1))
    assert (
        model.lm_head.weight is model.get_input_embeddings().weight
    ) == other.config.tie_word_embeddings
    assert model.config.vocab_size == 64
    assert all(parameter.requires_grad for parameter in model.parameters()) and model.training


def test_the_models_own_config_is_kept_but_for_what_the_recipe_states(other, tmp_path):
    model = go_on(tmp_path, attn_pdrop=0.25, vocab_size=61)
    before, after = other.config.to_dict(), model.config.to_dict()
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    dropout = "attn_pdrop" if other.config.model_type == "gpt2" else "attention_dropout"
    changed -= {
        "resid_pdrop",
        "embd_pdrop",
        "architectures",
        "dtype",
        "activation_function",
        "_name_or_path",
    }
    assert (
        changed == {"use_cache", dropout} and after[dropout] == 0.25 and after["use_cache"] is False
    )
    assert after.get("activation_function") in (None, "gelu_pytorch_tanh")
    assert model.generation_config.temperature == 0.6
    assert model.generation_config.eos_token_id == other.config.eos_token_id
    assert model.config._attn_implementation == CAUSAL


def test_a_shorter_context_cuts_gpt2s_positions_and_leaves_llamas(other, tmp_path):
    model, tokens = go_on(tmp_path, sequence_length=8).eval(), random_ids(2, 8, below=61)
    assert torch.allclose(model(tokens).logits[..., :61], other(tokens).logits, atol=1e-5)
    if other.config.model_type == "gpt2":
        assert model.config.n_positions == len(model.transformer.wpe.weight) == 8
        assert model.transformer.wpe.weight.requires_grad
    else:
        assert model.config.max_position_embeddings == 16


def test_a_checkpoint_gives_the_recipes_model_keys(tmp_path):
    """An MLP of 4 n_embd need not be stated, and may be."""
    gpt2_source(n_inner=128).save_pretrained(tmp_path / "a")
    llama_source().save_pretrained(tmp_path / "b")
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 64}
    gpt2 = {
        "architecture": "gpt2",
        "num_key_value_heads": None,
        "tie_word_embeddings": None,
        "rope_theta": None,
    }
    llama = {
        "architecture": "llama",
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "rope_theta": 500.0,
    }
    for folder, wanted in (
        ("a", gpt2 | {"intermediate_size": None}),
        ("b", llama | {"intermediate_size": 48}),
    ):
        model = completed(tmp_path / folder)
        assert {name: getattr(model, name) for name in keys.MODEL_KEYS} == shape | wanted
    assert go_on(tmp_path / "a", intermediate_size=128)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layer": 3, "sequence_length": 32}, "n_layer = 3, but the model has 2. Leave"),
        (
            {"vocab_size": 32},
            "vocab_size = 32, but its vocabulary has 61 rows. Use --vocab_size 64",
        ),
        (
            {"sequence_length": 32},
            "sequence_length = 32, but its context is 16 tokens. Use --sequence_length 16",
        ),
    ],
)
def test_a_recipe_of_another_shape_than_its_models_is_refused_with_a_remedy(
    tmp_path, change, words
):
    gpt2_source().save_pretrained(tmp_path)
    with pytest.raises(BadInput) as error:
        go_on(tmp_path, **change)
    assert all(line.startswith(f"init_from = {tmp_path}: ") for line in error.value.lines)
    assert len(error.value.lines) == len(change) and words in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "contains no model"),
        ({}, "cannot be loaded"),  # it has no weights
        ({"activation_function": "relu"}, "activation_function = relu, but only gelu_new or"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "its weights are quantized",
        ),
        ({"model_type": "bert"}, "type bert are not supported. .* gpt2 or llama"),
    ],
)
def test_a_model_that_is_not_there_or_that_training_would_silently_change_is_refused(
    tmp_path, change, words
):
    if change is not None:
        (tmp_path / "config.json").write_text(json.dumps(gpt2_source().config.to_dict() | change))
    with pytest.raises(BadInput, match=f"init_from = {tmp_path}: .*{words}"):
        go_on(tmp_path)


def test_weights_that_are_not_the_configs_are_refused_and_never_filled_with_noise(tmp_path):
    GPT2Model(gpt2_source().config).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, words in (
        (
            {"n_layer": 3},
            r"do not match its config.json, because transformer.h.2.* is missing",
        ),
        ({"n_layer": 1}, r"the weights contain h.1."),
        ({"n_inner": 64}, "cannot be loaded"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(BadInput, match=words):
            go_on(tmp_path)
    llama_source().save_pretrained(tmp_path / "llama")
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    (tmp_path / "llama" / "config.json").write_text(
        json.dumps(config | {"tie_word_embeddings": True})
    )
    with pytest.raises(BadInput, match="have different weights"):
        go_on(tmp_path / "llama")


def test_a_model_that_holds_nan_is_neither_used_nor_trained_on(tmp_path):
    model = gpt2_source()
    model.transformer.h[1].attn.c_attn.weight.data[3, 4] = torch.nan
    model.save_pretrained(tmp_path)
    for use in (pretrained.load, go_on):
        with pytest.raises(
            BadInput, match="transformer.h.1.attn.c_attn.weight contains NaN or infinity"
        ):
            use(str(tmp_path))
