"""An exported model has the standard format, computes the same logits, and describes itself."""

import json

import pytest
import torch
from safetensors import safe_open
from small_models import LLAMA, build_small_model, random_ids, randomize_weights, stock_copy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import pretrained_tokenizer
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.export import stock as stock_export
from ursa_minor.model.attention import CAUSAL

VOCAB_SIZE = 64  # of the model; the tokenizer has fewer ids


@pytest.fixture
def model() -> GPT2LMHeadModel:
    """Return a small GPT-2 with random weights."""
    return randomize_weights(build_small_model())


@pytest.fixture
def tokenizer():
    """Return a tokenizer with one token for each character."""
    return tokenization.make_characters(["abcdefghij klmnop"])


@pytest.fixture
def exported(model, tokenizer, tmp_path):
    """Return the folder of the exported model."""
    folder = tmp_path / "model"
    stock_export.write(model, folder, tokenizer)
    return folder


def reload(model, folder, tokenizer, **options) -> GPT2LMHeadModel:
    """Export a model to a folder with ``options``, and load it from there."""
    stock_model = stock_export.to_transformers(model, tokenizer, **options)
    with files.create_folder(folder, replace=True) as new_folder:
        stock_export.save(stock_model, new_folder, tokenizer)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_reloaded_model_has_same_logits(model, exported):
    tokens = random_ids(2, 16)

    loaded, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)

    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(loaded) is GPT2LMHeadModel
    assert loaded.dtype == torch.float32
    assert loaded.config.activation_function == "gelu_new"
    assert loaded.config.n_positions == 16
    assert torch.equal(loaded.eval()(tokens).logits, stock_copy(model)(tokens).logits)


def test_exported_files_have_standard_names(exported):
    with safe_open(exported / "model.safetensors", "pt") as file:
        names = set(file.keys())
    config = json.loads((exported / "config.json").read_text())
    tokenizer_config = json.loads((exported / "tokenizer_config.json").read_text())

    assert {"wte.weight", "h.0.attn.c_attn.weight", "ln_f.bias"} <= names
    for name in names:
        assert not name.startswith(("transformer.", "_orig_mod.", "module.", "model."))
    assert config["n_ctx"] == 16  # the name that llama.cpp reads
    # Older versions of Transformers know this class.
    assert tokenizer_config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_names_of_sharded_weights_agree_with_index(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="50KB")

    stock_export._rename_weights(tmp_path, "gpt2")

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    for name, file_name in index["weight_map"].items():
        assert not name.startswith("transformer.")
        with safe_open(tmp_path / file_name, "pt") as file:
            assert name in set(file.keys())
    loaded, info = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(loaded.transformer.wte.weight, model.transformer.wte.weight)


def test_exported_files_have_same_permissions(exported):
    modes = {path.stat().st_mode for path in exported.iterdir()}

    assert len(modes) == 1


def test_exported_tokenizer_can_be_loaded(exported, tokenizer):
    loaded = AutoTokenizer.from_pretrained(exported)

    assert type(loaded) is type(tokenizer)
    assert loaded.model_max_length == 16
    assert loaded("abc")["input_ids"] == tokenizer("abc")["input_ids"]


def tokenizer_config_of(tokenizer, model, folder) -> dict:
    """Export a model with this tokenizer, and return the tokenizer_config.json."""
    stock_export.write(model, folder, tokenizer)
    return json.loads((folder / "tokenizer_config.json").read_text())


def test_tokenizer_config_states_other_programs_defaults(model, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "source")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "source", local_files_only=True)
    del loaded.init_kwargs["clean_up_tokenization_spaces"]

    config = tokenizer_config_of(loaded, model, tmp_path / "model")

    assert config["unk_token"] == "<|endoftext|>"  # CTranslate2 needs one
    assert config["clean_up_tokenization_spaces"] is False  # true in transformers.js
    assert "is_local" not in config
    assert "local_files_only" not in config


def test_exported_tokenizer_has_same_fingerprint(tokenizer, exported):
    loaded = pretrained_tokenizer.load(str(exported))

    assert tokenization.fingerprint(loaded) == tokenization.fingerprint(tokenizer)


def test_stated_unknown_token_is_kept(model, tokenizer, tmp_path):
    tokenizer.add_special_tokens({"unk_token": "a"})

    config = tokenizer_config_of(tokenizer, model, tmp_path / "model")

    assert config["unk_token"] == "a"


def test_chat_template_is_also_in_tokenizer_config(model, tokenizer, tmp_path):
    tokenizer.chat_template = "{{ messages[0].content }}"

    config = tokenizer_config_of(tokenizer, model, tmp_path / "model")

    # transformers.js and Transformers 4.46 do not read the file.
    assert config["chat_template"] == tokenizer.chat_template
    assert (tmp_path / "model/chat_template.jinja").read_text() == tokenizer.chat_template
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == config["chat_template"]
    )


def test_several_chat_templates_are_kept(model, tokenizer, tmp_path):
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}
    tokenizer.chat_template = templates

    description = stock_export.describe(model, tokenizer)
    stock_export.write(model, tmp_path / "model", tokenizer)

    assert "chat_template" in description["tokenizer_config.json"]
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == templates


def favor_padding(model, num_used: int) -> None:
    """Change the weights so that padding ids are likelier than all others."""
    final_norm = model.transformer.ln_f
    with torch.no_grad():
        model.transformer.wte.weight[num_used:] += 5 * final_norm.bias.sign()
        final_norm.bias *= 100


@pytest.mark.parametrize("trim_vocab", [False, True])
def test_padding_ids_are_not_sampled(model, tokenizer, tmp_path, trim_vocab):
    num_used = len(tokenizer)
    num_rows = num_used if trim_vocab else VOCAB_SIZE
    suppressed_ids = None if trim_vocab else list(range(num_used, VOCAB_SIZE))
    model.generation_config.temperature = 0.6
    favor_padding(model, num_used)
    tokens = torch.tensor([[1, 2, 3]])

    loaded = reload(model, tmp_path / "out", tokenizer, trim_vocab=trim_vocab)
    generated = loaded.generate(tokens, max_new_tokens=12, do_sample=True, num_return_sequences=20)

    assert generated.max() < num_used
    assert loaded.generation_config.temperature == 0.6
    assert loaded.generation_config.suppress_tokens == suppressed_ids
    assert loaded.config.vocab_size == num_rows
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert torch.equal(loaded.transformer.wte.weight, model.transformer.wte.weight[:num_rows])
    if not trim_vocab:
        # Without suppression, the model would generate padding.
        assert loaded(tokens).logits[0, -1].argmax() >= num_used


@pytest.mark.parametrize(
    ("dtype", "value", "problem"),
    [
        (torch.float16, -70000.0, "70000, but fp16 ends at 65504.*--dtype bf16 or --dtype fp32"),
        (torch.bfloat16, 3.4e38, r"3\.4e\+38, but bf16 ends at 3\.38953e\+38.*--dtype fp32"),
    ],
    ids=["fp16", "bf16"],
)
def test_overflowing_weight_is_rejected(model, tokenizer, dtype, value, problem):
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[3, 4] = value

    message = rf"^transformer\.h\.1\.mlp\.c_fc\.weight has values up to {problem}"
    with pytest.raises(BadInput, match=message):
        stock_export.to_transformers(model, tokenizer, dtype=dtype)
    stock_export.to_transformers(model, tokenizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_non_finite_weight_is_rejected(model, tokenizer, dtype, value):
    with torch.no_grad():
        model.transformer.ln_f.bias[3] = value

    with pytest.raises(BadInput, match=r"^transformer\.ln_f\.bias contains NaN or infinity"):
        stock_export.to_transformers(model, tokenizer, dtype=dtype)


def test_description_equals_exported_json_files(model, tokenizer, tmp_path):
    model.generation_config.temperature = 0.6  # as some published models have
    exported = tmp_path / "model"
    stock_export.write(model, exported, tokenizer)

    description = stock_export.describe(model, tokenizer)

    assert "0.6" in description["generation_config.json"]
    assert description == {path.name: path.read_text() for path in exported.glob("*.json")}


def test_exported_llama_has_same_logits(tokenizer, tmp_path):
    llama = randomize_weights(build_small_model(**LLAMA | {"tie_word_embeddings": False}))
    tokens = random_ids(2, 16)

    stock_export.write(llama, tmp_path / "model", tokenizer)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )

    assert type(loaded) is LlamaForCausalLM
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config.num_key_value_heads == 2
    assert loaded.config.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}
    assert loaded.config.use_cache is True
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    llama.set_attn_implementation("sdpa")
    assert torch.equal(loaded.eval()(tokens).logits, llama(tokens).logits)


def test_llama_config_has_legacy_rope_keys(tokenizer, tmp_path):
    stock_export.write(build_small_model(**LLAMA), tmp_path / "model", tokenizer)

    config = json.loads((tmp_path / "model/config.json").read_text())

    # mlx-lm and Transformers 4 do not read rope_parameters.
    assert config["rope_theta"] == 500.0
    assert "rope_scaling" not in config
    with safe_open(tmp_path / "model/model.safetensors", "pt") as file:
        assert "model.embed_tokens.weight" in set(file.keys())


ROPE_PARAMETERS = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}


@pytest.fixture
def llama_with_scaled_rope(tmp_path):
    """Return a model that continues from a Llama with options that recipes do not have."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=32,
        rope_parameters=ROPE_PARAMETERS,
        mlp_bias=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    model = build_small_model(
        architecture="llama",
        init_from=str(tmp_path / "source"),
        gradient_checkpointing="mlp",
    )
    return model.eval()


def test_continued_model_keeps_its_config(llama_with_scaled_rope, tokenizer, tmp_path):
    tokens = random_ids(2, 16)

    loaded = reload(llama_with_scaled_rope, tmp_path / "out", tokenizer)

    assert loaded.config.rope_parameters == ROPE_PARAMETERS
    assert loaded.config.mlp_bias
    assert loaded.config.max_position_embeddings == 32
    expected_logits = llama_with_scaled_rope(tokens).logits
    assert torch.allclose(loaded(tokens).logits, expected_logits, atol=1e-5)
    config_text = (tmp_path / "out" / "config.json").read_text()
    config = json.loads(config_text)
    assert config["rope_theta"] == 500.0
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert "source" not in config_text
    assert CAUSAL not in config_text
