"""Checkpoints of other trainers. The files have the layout that the programs write.

``test_other_trainers.py`` compares with the programs themselves.
"""

import argparse
import dataclasses
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import gpt2_tokenizer
from safetensors.torch import load_file, save_file
from small_models import (
    KINDS,
    SHAPE,
    build_small_model,
    random_ids,
    randomize_weights,
    stock_copy,
)
from transformers import PreTrainedModel

from ursa_minor.base import checkpoint_files, other_checkpoints
from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import pretrained_tokenizer
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.export import stock as stock_export
from ursa_minor.model import import_checkpoint, pretrained
from ursa_minor.model.resolve import resolve_model
from ursa_minor.recipe import keys

pytest_plugins = ["push_helpers"]

CHARACTERS = "".join(map(chr, range(ord("A"), ord("A") + 64)))
NANOGPT_CONFIG = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "block_size": 16,
    "vocab_size": 64,
    "bias": True,
    "dropout": 0.1,
}
LLM_C_ORDER = [
    "ln_1.weight",
    "ln_1.bias",
    "attn.c_attn.weight",
    "attn.c_attn.bias",
    "attn.c_proj.weight",
    "attn.c_proj.bias",
    "ln_2.weight",
    "ln_2.bias",
    "mlp.c_fc.weight",
    "mlp.c_fc.bias",
    "mlp.c_proj.weight",
    "mlp.c_proj.bias",
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Make an empty folder the current one, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Files of the other programs


def small_gpt2(*, activation: str = "gelu", has_bias: bool = True, **changes) -> PreTrainedModel:
    """Build a GPT-2 with random weights and the activation function of the other program."""
    model = stock_copy(randomize_weights(build_small_model(**changes)))
    if activation == "gelu":
        for block in model.transformer.h:
            block.mlp.act = torch.nn.GELU()
    if not has_bias:
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.zeros_(parameter)
    return model


def linear_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights with the shapes of torch.nn.Linear, as the other programs store them."""
    weights = {}
    for name, tensor in model.state_dict().items():
        is_projection = ".c_" in name and tensor.dim() == 2
        weights[name] = tensor.t().contiguous() if is_projection else tensor
    return weights


def nanogpt_contents(model: PreTrainedModel, **config) -> dict:
    """Return the contents of a ckpt.pt."""
    config = NANOGPT_CONFIG | {"vocab_size": model.config.vocab_size} | config
    weights = linear_weights(model)
    if config["bias"] is False:
        weights = {name: value for name, value in weights.items() if not name.endswith(".bias")}
    return {
        "model": weights,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-3}]},
        "model_args": config,
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "letters", "out_dir": "out", "compile": True, "dropout": 0.1},
    }


def write_nanogpt(model: PreTrainedModel, path: str = "out/ckpt.pt", **config) -> Path:
    """Write a ckpt.pt."""
    Path(path).parent.mkdir(exist_ok=True, parents=True)
    torch.save(nanogpt_contents(model, **config), path)
    return Path(path)


def write_meta(path: str = "out/meta.pkl", characters: str = CHARACTERS, **changes) -> None:
    """Write the meta.pkl of a character data set."""
    ids = {character: i for i, character in enumerate(characters)}
    meta = {"vocab_size": len(ids), "itos": {i: c for c, i in ids.items()}, "stoi": ids}
    Path(path).parent.mkdir(exist_ok=True, parents=True)
    Path(path).write_bytes(pickle.dumps(meta | changes))


@dataclasses.dataclass
class GPTConfig:
    """The configuration that a checkpoint of build-nanogpt contains."""

    block_size: int = 16
    vocab_size: int = 64
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 32


def write_build_nanogpt(
    model: PreTrainedModel, monkeypatch, path: str = "log/model_19072.pt", **more
) -> Path:
    """Write a checkpoint of build-nanogpt, whose classes are in ``__main__``."""
    monkeypatch.setattr(GPTConfig, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", GPTConfig, raising=False)
    contents = {
        "model": linear_weights(model),
        "config": GPTConfig(),
        "step": 19072,
        "val_loss": 3.07,
    }
    Path(path).parent.mkdir(exist_ok=True)
    torch.save(contents | more, path)
    return Path(path)


def write_llm_c(
    model: PreTrainedModel, path: str = "log124M/model_00019560.bin", version: int = 3, **header
) -> Path:
    """Write a model of llm.c with padding rows of zeros."""
    weights = linear_weights(model)
    embedding = weights["transformer.wte.weight"]
    rows = -(-len(embedding) // 128) * 128
    padding = torch.zeros(rows - len(embedding), embedding.shape[1])
    tensors = [embedding, padding, weights["transformer.wpe.weight"]]
    for name in LLM_C_ORDER:
        tensors += [weights[f"transformer.h.{layer}.{name}"] for layer in range(2)]
    tensors += [weights["transformer.ln_f.weight"], weights["transformer.ln_f.bias"]]
    values = torch.cat([tensor.flatten() for tensor in tensors])
    if version == 5:
        values = values.bfloat16().view(torch.int16)
    numbers = {0: 20240326, 1: version, 2: 16, 3: len(embedding), 4: 2, 5: 2, 6: 32, 7: rows}
    array = np.zeros(256, dtype=np.int32)
    for position, number in numbers.items():
        array[position] = header.get(f"at_{position}", number)
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_bytes(array.tobytes() + values.numpy().tobytes())
    return Path(path)


def write_tokenizer(path: str) -> None:
    """Write a tokenizer.json with 64 ids."""
    tokenizer = tokenization.make_characters([CHARACTERS[:63]])
    Path(path).parent.mkdir(exist_ok=True, parents=True)
    tokenizer.backend_tokenizer.save(path)


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    """Return the logits of two sequences for the first 64 ids."""
    with torch.no_grad():
        return model(random_ids(2, 16)).logits.float()[..., :64]


def assert_same_logits(
    name: str | Path, expected: PreTrainedModel, tolerance: float = 1e-5
) -> None:
    """Compare the logits of a model by name with those of the original."""
    loaded = pretrained.load(resolve_model(str(name)))

    torch.testing.assert_close(
        logits_of(loaded), logits_of(expected), atol=tolerance, rtol=tolerance
    )


def message_of(name: str | Path) -> str:
    """Return the message with which a model is rejected. Nothing may remain in the cache."""
    with pytest.raises(BadInput) as error:
        resolve_model(str(name))

    assert str(error.value).startswith(f"--model {name}: ")
    models = other_checkpoints.cache_folder()
    assert not models.exists() or not list(models.iterdir())
    return str(error.value)


# nanoGPT


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("name", ["out", "out/ckpt.pt"])
def test_nanogpt_checkpoint_has_equal_logits(name, has_bias):
    model = small_gpt2(has_bias=has_bias)
    write_nanogpt(model, bias=has_bias)
    write_meta()

    assert_same_logits(name, model)


def test_missing_biases_are_trained():
    write_nanogpt(small_gpt2(has_bias=False), bias=False)
    write_meta()
    model = pretrained.load_to_train(
        "out", keys.Model(**SHAPE | {"init_from": "out", "vocab_size": 128})
    )

    bias = model.transformer.h[0].mlp.c_fc.bias
    assert not bias.any()
    model(random_ids(2, 16), labels=random_ids(2, 16)).loss.backward()
    assert bias.requires_grad
    assert bias.grad.any()
    assert model.config.activation_function == "gelu"


def test_character_table_is_that_of_our_tokenizer():
    write_nanogpt(small_gpt2())
    write_meta()

    tokenizer = pretrained_tokenizer.load(resolve_model("out"))

    expected = tokenization.make_characters([CHARACTERS])
    assert tokenization.fingerprint(tokenizer) == tokenization.fingerprint(expected)
    assert tokenizer.eos_token_id == 64
    assert tokenizer.decode(tokenization.Encoder(tokenizer)(["AZ`"])[0]) == "AZ`"


def test_end_of_text_row_is_the_mean():
    write_nanogpt(small_gpt2())
    write_meta()

    model = pretrained.load(resolve_model("out"))

    embedding = model.get_input_embeddings().weight
    assert len(embedding) == 65
    torch.testing.assert_close(embedding[64], embedding[:64].mean(0))


@pytest.mark.parametrize("place", ["out/meta.pkl", "data/letters/meta.pkl"])
def test_character_table_is_found(place):
    write_nanogpt(small_gpt2())
    write_meta(place)

    tokenizer = pretrained_tokenizer.load(resolve_model("out/ckpt.pt"))

    assert len(tokenizer) == 65


def test_tokenizer_is_found_by_name_of_checkpoint():
    write_nanogpt(small_gpt2())
    write_meta()
    folder = resolve_model("out")

    assert checkpoint_files.model_folder_of(Path("out")) == Path(folder)
    assert len(pretrained_tokenizer.load("out/ckpt.pt")) == 65


def test_tokenizer_json_next_to_checkpoint_is_used():
    write_nanogpt(small_gpt2())
    write_tokenizer("out/tokenizer.json")

    folder = resolve_model("out")

    assert pretrained_tokenizer.load(folder).eos_token_id == 63
    assert len(pretrained.load(folder).get_input_embeddings().weight) == 64


def test_missing_tokenizer_is_named():
    write_nanogpt(small_gpt2())

    message = message_of("out/ckpt.pt")

    assert "tokenizer" in message
    assert "data/letters/meta.pkl" in message


def test_table_of_another_model_is_refused():
    write_nanogpt(small_gpt2())
    write_meta(characters="ab")

    assert "2 characters" in message_of("out")


def test_changed_table_is_refused_after_conversion():
    write_nanogpt(small_gpt2())
    write_meta()
    resolve_model("out")
    write_meta(characters=CHARACTERS[::-1])

    with pytest.raises(BadInput, match=r"meta\.pkl has changed.*delete"):
        resolve_model("out")


def test_table_may_be_deleted_after_conversion():
    write_nanogpt(small_gpt2())
    write_meta()
    folder = resolve_model("out")
    Path("out/meta.pkl").unlink()

    assert resolve_model("out") == folder


# build-nanogpt and llm.c


def test_build_nanogpt_checkpoint_has_equal_logits(monkeypatch):
    model = small_gpt2(activation="gelu_new")
    write_build_nanogpt(model, monkeypatch)
    write_tokenizer("log/tokenizer.json")

    assert_same_logits("log/model_19072.pt", model)


def test_namespace_in_checkpoint_is_accepted(monkeypatch):
    model = small_gpt2(activation="gelu_new")
    config = argparse.Namespace(**vars(GPTConfig()))
    write_build_nanogpt(model, monkeypatch, config=config, args=argparse.Namespace(lr=1e-3))
    write_tokenizer("log/tokenizer.json")

    assert_same_logits("log", model)


@pytest.mark.parametrize(("version", "tolerance"), [(3, 1e-5), (5, 0.1)])
def test_llm_c_model_has_equal_logits(version, tolerance):
    model = small_gpt2(activation="gelu_new")
    write_llm_c(model, version=version)
    write_tokenizer("log124M/tokenizer.json")
    if version == 5:
        model = model.bfloat16()

    assert_same_logits("log124M/model_00019560.bin", model, tolerance)


def test_llm_c_padding_rows_are_left_out():
    write_llm_c(small_gpt2(activation="gelu_new"))
    write_tokenizer("log124M/tokenizer.json")

    config = json.loads(Path(resolve_model("log124M"), "config.json").read_text())

    assert config["vocab_size"] == 64
    assert config["activation_function"] == "gelu_new"


def test_newest_checkpoint_of_folder_is_used():
    new_model = small_gpt2(activation="gelu_new")
    write_llm_c(new_model, "log/model_00000200.bin")
    write_llm_c(small_gpt2(activation="gelu_new").bfloat16().float(), "log/model_00000099.bin")
    Path("log/state_00000300_00000.bin").touch()
    write_tokenizer("log/tokenizer.json")

    assert_same_logits("log", new_model)


# Layouts of the tensors


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "model.", "_orig_mod.module.", "module._orig_mod."]
)
def test_prefix_in_checkpoint_is_removed(prefix):
    model = small_gpt2()
    contents = nanogpt_contents(model)
    contents["model"] = {prefix + name: value for name, value in contents["model"].items()}
    Path("out").mkdir()
    torch.save(contents, "out/ckpt.pt")
    write_meta()

    assert_same_logits("out", model)


def test_masks_of_old_versions_are_ignored():
    model = small_gpt2()
    contents = nanogpt_contents(model)
    contents["model"]["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    del contents["model_args"]["bias"]
    del contents["config"]
    Path("out").mkdir()
    torch.save(contents, "out/ckpt.pt", _use_new_zipfile_serialization=False)
    write_meta()

    assert_same_logits("out", model)


def test_checkpoint_of_gpu_is_loaded(monkeypatch):
    model = small_gpt2()
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    write_nanogpt(model)
    write_meta()

    assert_same_logits("out", model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_of_weights_is_kept(dtype):
    write_nanogpt(small_gpt2().to(dtype))
    write_meta()

    model = pretrained.load(resolve_model("out"))

    assert model.dtype == dtype


def change_contents(**changes) -> None:
    """Write a ckpt.pt with other tensors. None removes a tensor."""
    contents = nanogpt_contents(small_gpt2())
    for name, tensor in changes.items():
        full_name = f"transformer.{name.replace('__', '.')}"
        contents["model"][full_name] = tensor
        if tensor is None:
            del contents["model"][full_name]
    Path("out").mkdir()
    torch.save(contents, "out/ckpt.pt")
    write_meta()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"h__1__ln_1__weight": None}, "h.1.ln_1.weight is missing"),
        ({"h__1__ln_1__bias": None}, "h.1.ln_1.bias is missing"),
        ({"h__2__ln_1__weight": torch.ones(32)}, "h.2.ln_1.weight"),
        ({"wpe__weight": torch.ones(8, 32)}, "wpe.weight is (8, 32)"),
        ({"wte__weight": torch.ones(64, 32)}, "must be tied"),
        ({"ln_f__weight": torch.ones(32, dtype=torch.int64)}, "int64"),
        ({"ln_f__weight": torch.ones(32, device="meta")}, "without values"),
        ({"ln_f__weight": torch.ones(32).to_sparse()}, "sparse"),
    ],
)
def test_weights_that_contradict_configuration_are_refused(changes, words):
    change_contents(**changes)

    assert words in message_of("out/ckpt.pt")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"n_layer": 3}, "h.2.attn.c_attn.bias is missing"),
        ({"n_layer": 1}, "h.1"),
        ({"n_layer": 10**9}, "corrupted"),
        ({"n_head": 5}, "n_head"),
        ({"n_embd": "32"}, "n_embd"),
        ({"block_size": 0}, "block_size"),
        ({"vocab_size": 65}, "wte.weight"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_wrong_configuration_is_refused(config, word):
    write_nanogpt(small_gpt2(), **config)
    write_meta()

    assert word in message_of("out")


def test_stated_lack_of_biases_is_checked():
    contents = nanogpt_contents(small_gpt2())
    contents["model_args"]["bias"] = False
    Path("out").mkdir()
    torch.save(contents, "out/ckpt.pt")
    write_meta()

    assert "bias = False" in message_of("out")


# Files that are not models


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ({"state": {}, "param_groups": []}, "state of an optimizer"),
        ({"wte.weight": torch.ones(2)}, "not the configuration"),
        ({"state_dict": {}, "epoch": 3}, "epoch, state_dict"),
        ([1, 2], "type list"),
        ({"model": [], "model_args": {**NANOGPT_CONFIG}}, "not a dictionary of tensors"),
        ({"model": {}, "config": 3}, "not a dictionary"),
        ({"model": {}, "model_args": {**NANOGPT_CONFIG}}, "missing"),
    ],
)
def test_file_without_model_is_refused(contents, words):
    torch.save(contents, "ckpt.pt")

    assert words in message_of("ckpt.pt")


@pytest.mark.parametrize(
    ("start", "word"),
    [
        (b"", "truncated"),
        (b"hello", "truncated"),
        (np.array([20240326, 3], "<i4").tobytes(), "truncated"),
        (np.array([20240527, 1], "<i4").tobytes(), "optimizer"),
        (np.array([20240520, 1], "<i4").tobytes(), "tokens"),
        (np.array([20240326, 3, *[2**30] * 6] + [0] * 248, "<i4").tobytes(), "corrupted"),
        (b"PK\x03\x04 but no archive", "corrupted"),
        (pickle.dumps({"stoi": {}}, protocol=2), "corrupted"),
    ],
)
@pytest.mark.parametrize("name", ["model.bin", "ckpt.pt"])
def test_other_file_is_refused(name, start, word):
    Path(name).write_bytes(start)

    assert word in message_of(name)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_truncated_checkpoint_is_refused(share, monkeypatch):
    write = {"out/ckpt.pt": write_nanogpt, "log124M/model_00019560.bin": write_llm_c}
    for name, write_file in write.items():
        path = write_file(small_gpt2())
        data = path.read_bytes()
        path.write_bytes(data[: int(share * len(data))])

        assert "incomplete" in message_of(name)


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ({"at_1": 1}, "version 1"),
        ({"at_1": 4}, "version 4"),
        ({"at_5": 3}, "n_head"),
        ({"at_4": 3}, "bytes"),
        ({"at_7": 63}, "63 rows"),
        ({"at_2": -1}, "block_size"),
        ({"at_0": 20240803}, "Llama 3"),
    ],
)
def test_wrong_header_is_refused(header, word):
    write_llm_c(small_gpt2(), **header)

    assert word in message_of("log124M")


# Nothing is executed


class CreateFolder:
    """An object that creates a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_checkpoint_is_not_executed(is_zip):
    contents = nanogpt_contents(small_gpt2()) | {"extra": CreateFolder()}
    torch.save(contents, "ckpt.pt", _use_new_zipfile_serialization=is_zip)

    message = message_of("ckpt.pt")

    assert "execute code" in message
    assert not Path("executed").exists()
    if is_zip:
        assert "mkdir" in message


def test_code_in_character_table_is_not_executed():
    write_nanogpt(small_gpt2())
    write_meta(extra=CreateFolder())

    message = message_of("out")

    assert "mkdir" in message
    assert not Path("executed").exists()


def test_code_in_weights_of_folder_is_not_executed():
    write_folder(small_gpt2(), "module.")
    torch.save({"module.wte.weight": CreateFolder()}, "renamed/pytorch_model.bin")
    Path("renamed/model.safetensors").unlink()

    assert "execute code" in message_of("renamed")
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stoi": None}, "stoi"),
        ({"stoi": {}}, "stoi"),
        ({"stoi": {"a": 0, "b": 2}}, "consecutive"),
        ({"stoi": {"a": 0, "b": 0}}, "consecutive"),
        ({"stoi": {"a": 0, "bc": 1}}, "'bc'"),
        ({"stoi": {"a": 0, "\ud800": 1}}, "one character"),
        ({"stoi": {"a": True}}, "True"),
        ({"stoi": {0: "a"}}, "not a character"),
        ({"vocab_size": 3}, "vocab_size"),
        ({"vocab_size": "64"}, "vocab_size"),
    ],
)
def test_invalid_character_table_is_refused(changes, words):
    write_nanogpt(small_gpt2())
    write_meta(**changes)

    assert words in message_of("out")


@pytest.mark.parametrize("data", [b"", b"hello", b"\x80\x04]\x94", pickle.dumps([1])])
def test_corrupted_character_table_is_refused(data):
    write_nanogpt(small_gpt2())
    Path("out/meta.pkl").write_bytes(data)

    assert "meta.pkl is not a table" in message_of("out")


# GPT-2's tokenizer


@pytest.fixture
def gpt2_rows_checkpoint() -> Path:
    """A ckpt.pt with GPT-2's padded vocabulary."""
    return write_nanogpt(small_gpt2(vocab_size=50304))


def test_gpt2_tokenizer_is_loaded_from_hub(gpt2_rows_checkpoint, server, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    gpt2_tokenizer().backend_tokenizer.save("gpt2.json")
    repository = server.make(import_checkpoint.GPT2_REPOSITORY, private=False)
    repository.commit("main", {"tokenizer.json": Path("gpt2.json").read_bytes()})

    tokenizer = pretrained_tokenizer.load(resolve_model("out"))

    assert tokenization.fingerprint(tokenizer) == tokenization.fingerprint(gpt2_tokenizer())
    assert tokenizer.eos_token_id == 50256


def test_unavailable_gpt2_tokenizer_is_explained(gpt2_rows_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    message = message_of("out")

    assert "GPT-2's tokenizer" in message
    assert "Copy tokenizer.json" in message


def test_padding_ids_are_not_generated(gpt2_rows_checkpoint):
    gpt2_tokenizer().backend_tokenizer.save("out/tokenizer.json")

    model = pretrained.load(resolve_model("out"))

    assert model.config.vocab_size == 50304
    assert model.generation_config.suppress_tokens == list(range(50257, 50304))


# The cache


def test_checkpoint_is_converted_once(caplog):
    write_nanogpt(small_gpt2())
    write_meta()

    with caplog.at_level(logging.INFO):
        folders = [resolve_model(name) for name in ("out", "out/ckpt.pt", "out")]

    assert len(set(folders)) == 1
    (line,) = caplog.messages
    assert "nanoGPT checkpoint of step 2,000" in line
    assert line.endswith(folders[0])


def test_new_checkpoint_is_converted_again():
    write_nanogpt(small_gpt2())
    write_meta()
    old_folder = resolve_model("out")
    model = small_gpt2(has_bias=False)
    write_nanogpt(model)

    assert resolve_model("out") != old_folder
    assert_same_logits("out", model)


def convert_in_process(barrier, results) -> None:
    """Convert the checkpoint together with other processes."""
    barrier.wait()
    results.put(resolve_model("out"))


def test_two_processes_may_convert_together():
    model = small_gpt2()
    write_nanogpt(model)
    write_meta()
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    results = context.Queue()
    processes = [
        context.Process(target=convert_in_process, args=(barrier, results)) for _ in range(2)
    ]

    for process in processes:
        process.start()
    folders = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()

    assert len(folders) == 1
    assert len(list(other_checkpoints.cache_folder().iterdir())) == 1
    assert_same_logits("out", model)


def test_cache_that_cannot_be_written_is_named(monkeypatch):
    write_nanogpt(small_gpt2())
    write_meta()
    Path("file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("file").absolute()))

    with pytest.raises(BadInput) as error:
        resolve_model("out")

    assert "XDG_CACHE_HOME" in str(error.value)
    assert str(Path("file").absolute()) in str(error.value)


def test_full_disk_leaves_nothing(monkeypatch):
    write_nanogpt(small_gpt2())
    write_meta()

    def fail(*arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(import_checkpoint, "save_file", fail)

    message = message_of("out")

    assert "No space left" in message
    assert "XDG_CACHE_HOME" in message


def test_file_that_changes_meanwhile_is_refused(monkeypatch):
    path = write_nanogpt(small_gpt2())
    write_meta()
    save = import_checkpoint.save_file

    def save_and_touch(*arguments) -> None:
        save(*arguments)
        os.truncate(path, 10)

    monkeypatch.setattr(import_checkpoint, "save_file", save_and_touch)

    assert "was changed while it was read" in message_of("out")


# Model folders with prefixes


def write_folder(model: PreTrainedModel, prefix: str, file: str = "model.safetensors") -> Path:
    """Write the model folder ``renamed`` with prefixes, and ``right`` without."""
    tokenizer = tokenization.make_characters([CHARACTERS[:63]])
    stock_export.write(model, Path("right"), tokenizer)
    shutil.copytree("right", "renamed")
    weights = {prefix + name: value for name, value in model.state_dict().items()}
    Path("renamed/model.safetensors").unlink()
    if file.endswith(".bin"):
        torch.save(weights, f"renamed/{file}")
    else:
        weights = {name: value.clone().contiguous() for name, value in weights.items()}
        save_file(weights, f"renamed/{file}", {"format": "pt"})
    return Path("renamed")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "model.", "model._orig_mod."])
@pytest.mark.parametrize("kind", KINDS)
def test_prefix_in_folder_is_removed(kind, prefix, file):
    model = stock_copy(randomize_weights(build_small_model(**KINDS[kind])))
    write_folder(model, prefix, file)

    assert_same_logits("renamed", model)
    assert len(pretrained_tokenizer.load(resolve_model("renamed"))) == 64


def test_prefix_of_compiled_block_is_removed():
    model = small_gpt2(activation="gelu_new")
    write_folder(model, "")
    weights = load_file("renamed/model.safetensors")
    renamed = {name.replace(".h.0.", ".h.0._orig_mod."): value for name, value in weights.items()}
    save_file(renamed, "renamed/model.safetensors", {"format": "pt"})

    assert_same_logits("renamed", model)


def test_prefix_in_shards_is_removed():
    model = small_gpt2(activation="gelu_new")
    write_folder(model, "module.")
    weights = load_file("renamed/model.safetensors")
    Path("renamed/model.safetensors").unlink()
    file_by_name = {}
    for number, name in enumerate(sorted(weights)):
        file_by_name[name] = f"model-{number % 2}.safetensors"
    for file in set(file_by_name.values()):
        shard = {name: weights[name] for name in weights if file_by_name[name] == file}
        save_file(shard, f"renamed/{file}", {"format": "pt"})
    index = {"metadata": {}, "weight_map": file_by_name}
    Path("renamed/model.safetensors.index.json").write_text(json.dumps(index))

    assert_same_logits("renamed", model)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", KINDS)
def test_right_folder_is_not_changed(kind, file):
    write_folder(stock_copy(build_small_model(**KINDS[kind])), "", file)

    assert resolve_model("renamed") == "renamed"
    assert resolve_model("right") == "right"
    assert not other_checkpoints.cache_folder().exists()
