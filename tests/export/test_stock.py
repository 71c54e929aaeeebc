"""What is exported is stock, exact, whole or not there, and says what it is."""

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
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.export import stock as stock_export
from ursa_minor.model.attention import CAUSAL


@pytest.fixture
def model() -> GPT2LMHeadModel:
    return randomize_weights(build_small_model())


@pytest.fixture
def exported(model, tmp_path):
    tokenizer = tokenization.make_characters(["abcdefghij klmnop"])
    stock_export.write(model, tmp_path / "model", tokenizer)
    return tmp_path / "model", tokenizer


def test_reloaded_export_gives_the_trained_logits_exactly(model, exported):
    folder, _ = exported
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(loaded) is GPT2LMHeadModel and loaded.dtype == torch.float32
    assert loaded.config.activation_function == "gelu_new" and loaded.config.n_positions == 16
    tokens = random_ids(2, 16)
    assert (
        loaded.eval()(tokens).logits - stock_copy(model)(tokens).logits
    ).abs().max().item() == 0.0


def test_exported_files_are_as_the_ecosystem_reads_them(exported):
    folder, tokenizer = exported
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "transformer.wte.weight" in names
    assert not [name for name in names if name.startswith(("_orig_mod.", "module.", "model."))]
    assert (
        len({path.stat().st_mode for path in folder.iterdir()}) == 1
    )  # they may be read by whom the folder lets
    assert json.loads((folder / "config.json").read_text())["n_ctx"] == 16  # llama.cpp's name
    about = json.loads((folder / "tokenizer_config.json").read_text())
    assert about["tokenizer_class"] == "PreTrainedTokenizerFast"  # which older programs know
    loaded = AutoTokenizer.from_pretrained(folder)
    assert type(loaded) is type(tokenizer) and loaded.model_max_length == 16
    assert loaded("abc")["input_ids"] == tokenizer("abc")["input_ids"]


def reloaded(model, folder, tokenizer, **how) -> GPT2LMHeadModel:
    stock = stock_export.to_transformers(model, tokenizer, **how)
    with files.create_folder(folder, replace=True) as aside:
        stock_export.save(stock, aside, tokenizer)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("trim_vocab", [False, True])
def test_no_padding_id_is_ever_sampled(model, exported, tmp_path, trim_vocab):
    tokenizer, used = exported[1], len(exported[1])
    model.generation_config.temperature = 0.6  # the model's own way to generate is kept
    with torch.no_grad():
        model.transformer.wte.weight[used:] += (
            5 * model.transformer.ln_f.bias.sign()
        )  # what would win
        model.transformer.ln_f.bias *= 100
    loaded, tokens = (
        reloaded(model, tmp_path / "out", tokenizer, trim_vocab=trim_vocab),
        torch.tensor([[1, 2, 3]]),
    )
    rows = used if trim_vocab else 64
    assert loaded.generation_config.temperature == 0.6 and loaded.config.vocab_size == rows
    assert loaded.generation_config.suppress_tokens == (None if trim_vocab else [*range(used, 64)])
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert loaded.transformer.wte.weight.equal(model.transformer.wte.weight[:rows])
    assert trim_vocab or loaded(tokens).logits[0, -1].argmax() >= used
    made = loaded.generate(tokens, max_new_tokens=12, do_sample=True, num_return_sequences=20)
    assert made.max() < used


@pytest.mark.parametrize(
    ("dtype", "value", "words"),
    [
        (
            torch.float16,
            -70000.0,
            "70000, but fp16 ends at 65504. Use --dtype bf16 or --dtype fp32",
        ),
        (torch.bfloat16, 3.4e38, r"3.4e\+38, but bf16 ends at 3.38953e\+38. Use --dtype fp32"),
    ],
)
def test_overflowing_weight_is_refused_by_name(model, exported, dtype, value, words):
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[3, 4] = value
    with pytest.raises(
        BadInput, match=rf"^transformer.h.1.mlp.c_fc.weight has values up to {words}$"
    ):
        stock_export.to_transformers(model, exported[1], dtype=dtype)
    stock_export.to_transformers(model, exported[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_non_finite_weight_is_refused_in_every_format(model, exported, dtype, value):
    with torch.no_grad():
        model.transformer.ln_f.bias[3] = value
    with pytest.raises(BadInput, match=r"^transformer.ln_f.bias contains NaN or infinity"):
        stock_export.to_transformers(model, exported[1], dtype=dtype)


def test_description_is_what_export_writes_but_the_weights(model, exported):
    folder, tokenizer = exported
    described = stock_export.describe(model.config, tokenizer)
    assert described == {
        path.name: path.read_text() for path in folder.iterdir() if path.suffix == ".json"
    }


def test_a_trained_llama_is_exported_stock_and_exactly(tmp_path):
    tokenizer = tokenization.make_characters(["abcdefghij klmnop"])
    llama = randomize_weights(build_small_model(**LLAMA | {"tie_word_embeddings": False}))
    stock_export.write(llama, tmp_path / "model", tokenizer)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert (
        type(loaded) is LlamaForCausalLM
        and not info["missing_keys"]
        and not info["unexpected_keys"]
    )
    config = loaded.config
    assert (config.num_key_value_heads, config.rope_parameters["rope_theta"], config.use_cache) == (
        2,
        500.0,
        True,
    )
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    tokens = random_ids(2, 16)
    llama.set_attn_implementation("sdpa")
    assert (loaded.eval()(tokens).logits - llama(tokens).logits).abs().max().item() == 0.0


def test_a_model_that_was_trained_on_is_exported_as_what_it_was(exported, tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        **shape, vocab_size=64, max_position_embeddings=32, rope_parameters=rope, mlp_bias=True
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    llama = {
        "architecture": "llama",
        "init_from": str(tmp_path / "source"),
        "gradient_checkpointing": "mlp",
    }
    model = build_small_model(**llama).eval()
    loaded = reloaded(model, tmp_path / "out", exported[1])
    assert loaded.config.rope_parameters == rope and loaded.config.mlp_bias
    assert loaded.config.max_position_embeddings == 32
    tokens = random_ids(2, 16)
    assert torch.allclose(loaded(tokens).logits, model(tokens).logits, atol=1e-5)
    written = (tmp_path / "out" / "config.json").read_text()
    assert "source" not in written and CAUSAL not in written
