"""Prefixes that wrappers of a model add to the names of its weights."""

import json
from pathlib import Path

import pytest

from ursa_minor.model import weight_names


@pytest.mark.parametrize(
    ("model_type", "names", "expected"),
    [
        ("gpt2", ["_orig_mod.wte.weight"], ["wte.weight"]),
        ("gpt2", ["module.transformer.wte.weight"], ["transformer.wte.weight"]),
        ("gpt2", ["model.wte.weight", "model.lm_head.weight"], ["wte.weight", "lm_head.weight"]),
        ("gpt2", ["model._orig_mod.module.wpe.weight"], ["wpe.weight"]),
        ("gpt2", ["h.0._orig_mod.ln_1.bias"], ["h.0.ln_1.bias"]),
        ("llama", ["model.model.norm.weight"], ["model.norm.weight"]),
        ("llama", ["module.model.norm.weight"], ["model.norm.weight"]),
        ("opt", ["module.model.decoder.weight"], ["model.decoder.weight"]),
    ],
)
def test_prefixes_are_removed(model_type, names, expected):
    new_names = weight_names.without_prefixes(names, model_type)

    assert list(new_names) == names
    assert list(new_names.values()) == expected


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("gpt2", ["wte.weight", "module.weight"]),
        ("gpt2", ["h.0.attn.bias"]),
        ("gpt2", ["wte.weight", "_orig_mod.wte.weight"]),
        ("llama", ["model.norm.weight", "model.rotary_emb.inv_freq"]),
        ("llama", ["layers.0.mlp.up_proj.weight"]),
        ("opt", ["model.decoder.weight"]),
        (None, ["model.decoder.weight"]),
        ("gpt2", []),
    ],
)
def test_names_without_prefix_are_kept(model_type, names):
    new_names = weight_names.without_prefixes(names, model_type)

    assert list(new_names.values()) == names


@pytest.mark.parametrize(
    "data", [b"", b"\x10", b"\xff" * 16, b"\x02" + bytes(7) + b"[]", b"\x03" + bytes(7) + b"abc"]
)
def test_corrupted_safetensors_file_has_no_prefix(tmp_path, data):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_bytes(data)

    assert not weight_names.may_have_prefix(tmp_path)


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_corrupted_index_has_no_files(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)

    assert weight_names.weight_files(tmp_path) == []


def test_safetensors_precede_torch_files(tmp_path):
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).touch()

    assert weight_names.weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_missing_shards_are_left_out(tmp_path):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    Path(tmp_path / "model-2.safetensors").touch()

    assert weight_names.weight_files(tmp_path) == [tmp_path / "model-2.safetensors"]
